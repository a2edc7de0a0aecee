/* SPDX-License-Identifier: Apache-2.0
 *
 * The control plane alone: ranks that abort, die, or end in order, and the process that hosts a room among them.
 */
#include "tests/control/ranks.h"

#include "common/deadline.h"

#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- the control thread, held between what poll() told it and what it makes of that ---- */

static atomic_bool hold;  /* set by the case; read by the control thread */
static atomic_bool held;  /* set by the control thread while it waits */
static atomic_uint wakes; /* how often it has come from poll() */

static int poll_kernel(struct pollfd *fds, nfds_t n, int ms)
{
    struct timespec patience = { ms / 1000, ms % 1000 * 1000000L };

    return (int)syscall(SYS_ppoll, fds, n, ms < 0 ? NULL : &patience, NULL, 0);
}

__attribute__((visibility("default"))) int poll(struct pollfd *fds, nfds_t n, int ms)
{
    int got = poll_kernel(fds, n, ms);

    if (!fds || fds[0].fd != control.wake_fd)
        return got;
    while (atomic_load(&hold)) {
        atomic_store(&held, true);
        (void)poll_kernel(NULL, 0, 1);
    }
    atomic_store(&held, false);
    atomic_fetch_add(&wakes, 1);
    return got;
}

static void hold_thread(void)
{
    atomic_store(&hold, true);
    lc_control_wake();
    WAIT_FOR(atomic_load(&held));
}

/* Returns when it has served what it was held with, and once more. */
static void let_go_thread(void)
{
    unsigned before = atomic_load(&wakes);

    atomic_store(&hold, false);
    for (unsigned turn = 2; turn <= 3; turn++) {
        WAIT_FOR(atomic_load(&wakes) - before >= turn - 1);
        lc_control_wake();
        WAIT_FOR(atomic_load(&wakes) - before >= turn);
    }
}

/* Of its connections, too. Ready when the process has ended, whoever its parent is. */
static void wait_for_end_of(uint32_t rank)
{
    int fd = (int)syscall(SYS_pidfd_open, atomic_load(&board->pid[rank]), 0);
    struct pollfd end = { fd, POLLIN, 0 };

    if (fd < 0 && errno == ESRCH)
        return;
    CHECK(fd >= 0);
    WAIT_FOR(poll_kernel(&end, 1, 0) == 1);
    close(fd);
}

static void vote_for(struct lc_room *room)
{
    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
}

/* The arbiter has more for a rank that has gone, and has not read its goodbye. */
static void a_goodbye_is_heard_before_a_write_fails(uint32_t rank)
{
    struct lc_room *room = join(rank, 3);

    vote_for(room);
    meet(0, 3);
    if (rank == 0)
        hold_thread();
    meet(1, 3);
    if (rank == 2) {
        lc_room_release(room);
        return;
    }
    if (rank == 0) {
        wait_for_end_of(2);
        lc_control_fini(); /* which tells everybody */
        let_go_thread();
    }
    meet(2, 2);
    sleep_ms(100);
    CHECK(lc_room_error(room, NULL) == 0);
    meet(3, 2);
    lc_room_release(room);
}

/* A member has more for the arbiter's process, and has not read that it has ended in order. */
static void an_orderly_end_is_heard_before_a_write_fails(uint32_t rank)
{
    struct lc_room *room = join(rank, 2), *other;
    struct lc_record mine = record_of(rank);

    CHECK(lc_room_join_child(room, 1, 0, 2, &mine, &other) == 0);
    vote_for(room);
    vote_for(other);
    meet(0, 2);
    if (rank == 1)
        hold_thread();
    meet(1, 2);
    if (rank == 0)
        return; /* with both rooms still held */
    wait_for_end_of(0);
    lc_room_release(room);
    let_go_thread();
    CHECK(lc_room_error(other, NULL) == 0);
    lc_room_release(other);
}

/* ---- deaths, aborts and ends ---- */

static void a_death_after_the_vote_is_an_error_soon(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);
    struct lc_deadline until;
    enum lc_verdict verdict;
    uint32_t who = 99;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0 && lc_room_decide(room, 1, &verdict) == 0);
    meet(0, RANKS);
    if (rank == 1)
        _exit(0);                     /* without goodbye */
    until = lc_deadline_in_ms(10000); /* as a rule a millisecond; the machine may be busy */
    while (!lc_room_error(room, &who))
        CHECK(!lc_deadline_passed(until));
    CHECK(lc_room_error(room, &who) == -ECONNRESET && who == 1);
    WAIT_FOR(__atomic_load_n(lc_room_abort_word(room), __ATOMIC_ACQUIRE) == 1);
    meet(1, RANKS - 1);
    lc_room_release(room);
}

static void an_end_before_the_vote_is_no_error(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);
    enum lc_verdict verdict = LC_VERDICT_COMMIT;

    WAIT_FOR(lc_room_complete(room));
    if (rank > 1)
        CHECK(lc_room_vote(room, 1) == 0);
    meet(0, RANKS);
    if (rank == 1)
        _exit(0); /* without goodbye */
    if (rank == 0)
        lc_room_abort(room, 1);
    sleep_ms(200);
    CHECK(lc_room_error(room, NULL) == 0);
    if (rank > 1)
        CHECK(lc_room_decide(room, 1, &verdict) == 0 && verdict == LC_VERDICT_SKIP);
    meet(1, RANKS - 1);
    lc_room_release(room);
}

/* What survivors do: they abort what is broken and go on with a communicator of their own. */
static void an_abort_after_a_death_leaves_other_rooms_alone(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS), *child = NULL;
    struct lc_record mine = record_of(rank - (rank > 1));
    enum lc_verdict verdict = LC_VERDICT_SKIP;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0 && lc_room_decide(room, 1, &verdict) == 0);
    meet(0, RANKS);
    if (rank == 1)
        _exit(0); /* without goodbye */
    CHECK(lc_room_join_child(room, 1, 0, RANKS - 1, &mine, &child) == 0);
    WAIT_FOR(lc_room_complete(child) && lc_room_error(room, NULL) != 0);
    lc_room_abort(room, 1);
    sleep_ms(100);
    CHECK(lc_room_vote(room, 2) != 0);
    (void)lc_room_post(room, 1, "late", 4); /* its seat is gone: nothing may be said there */
    lc_room_release(room);
    CHECK(lc_room_vote(child, 1) == 0);
    sleep_ms(200);
    meet(1, RANKS - 1);
    CHECK(lc_room_decide(child, 2, &verdict) == 0 && verdict == LC_VERDICT_COMMIT);
    CHECK(lc_room_error(child, NULL) == 0);
    meet(2, RANKS - 1);
    lc_room_release(child);
}

static void the_arbiters_death_is_an_error_only_after_a_vote(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);
    enum lc_verdict verdict;

    WAIT_FOR(lc_room_complete(room));
    if (rank != 3)
        CHECK(lc_room_vote(room, 1) == 0);
    meet(0, RANKS);
    if (rank == 0)
        _exit(0);
    if (rank == 3) {
        sleep_ms(300);
        CHECK(lc_room_error(room, NULL) == 0 && lc_room_vote(room, 2) != 0);
    } else {
        WAIT_FOR(lc_room_error(room, NULL));
        if (tcp_only)
            CHECK(lc_room_decide(room, 2, &verdict) == -EPIPE);
    }
    meet(1, RANKS - 1);
    lc_room_release(room);
}

/* Rooms of all ranks and of all but rank 0, whose process hosts both; both committed. */
static void commit_two(uint32_t rank, uint32_t n, struct lc_room **all, struct lc_room **rest)
{
    struct lc_record mine = record_of(rank - 1);
    enum lc_verdict verdict = LC_VERDICT_SKIP;

    *all = join(rank, n);
    *rest = NULL;
    WAIT_FOR(lc_room_complete(*all));
    CHECK(lc_room_vote(*all, 1) == 0);
    if (rank > 0) {
        CHECK(lc_room_join_child(*all, 1, 1, n - 1, &mine, rest) == 0);
        WAIT_FOR(lc_room_complete(*rest));
        CHECK(lc_room_vote(*rest, 1) == 0);
    }
    meet(0, (int)n);
    sleep_ms(tcp_only ? 100 : 0); /* the votes of others may still be on their way */
    meet(1, (int)n);
    if (rank > 0)
        CHECK(lc_room_decide(*rest, 1, &verdict) == 0 && verdict == LC_VERDICT_COMMIT);
    meet(2, (int)n);
}

static void the_arbiters_death_leaves_rooms_without_it_alone(uint32_t rank)
{
    struct lc_room *all, *rest;

    commit_two(rank, RANKS, &all, &rest);
    if (rank == 0)
        _exit(0); /* without goodbye */
    WAIT_FOR(lc_room_error(all, NULL) == -EPIPE);
    sleep_ms(200);
    CHECK(lc_room_error(rest, NULL) == 0 && !*lc_room_abort_word(rest));
    meet(3, RANKS - 1);
    lc_room_release(rest);
    lc_room_release(all);
}

/* At the arbiter: ends the connection of a rank. */
static void end_client(uint32_t rank, int reason, bool with_reset)
{
    struct linger none = { 1, 0 };
    struct hosted *hosted;
    struct client *client;

    pthread_mutex_lock(&control.lock);
    hosted = control.hosted;
    while (!hosted->is_root)
        hosted = hosted->next;
    client = hosted->seats[rank]->client;
    if (with_reset)
        CHECK(setsockopt(client->conn.fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none)) == 0);
    lc_arbiter_drop(client, reason);
    pthread_mutex_unlock(&control.lock);
}

/* Nobody has told the others that it is gone, unlike in the next case. */
static void a_network_that_comes_back_is_no_error(uint32_t rank)
{
    struct lc_room *room;

    if (!tcp_only)
        return;
    room = join(rank, 2);
    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    meet(0, 2);
    sleep_ms(100);
    if (rank == 0)
        end_client(1, -ETIMEDOUT, true);
    else
        WAIT_FOR(!room->link);
    meet(1, 2);
    CHECK(lc_room_error(room, NULL) == 0);
    lc_room_release(room);
}

static void a_member_that_is_shown_out_learns_that_it_is_lost(uint32_t rank)
{
    struct lc_room *all, *rest;
    uint32_t who = 99;

    commit_two(rank, 3, &all, &rest);
    if (rank == 0)
        end_client(1, -EPROTO, false);
    if (rank == 1)
        WAIT_FOR(lc_room_error(all, NULL) == -EPIPE && lc_room_error(rest, NULL) == -EPIPE);
    if (rank == 2)
        WAIT_FOR(lc_room_error(rest, &who) == -ECONNRESET && who == 0);
    meet(3, 3);
    lc_room_release(rest);
    lc_room_release(all);
}

static void an_orderly_end_of_the_arbiter_is_no_error(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    meet(0, RANKS);
    if (rank == 0)
        return; /* with the room still held */
    sleep_ms(400);
    CHECK(lc_room_error(room, NULL) == 0);
    meet(1, RANKS - 1);
    lc_room_release(room);
}

static void an_abort_reaches_everybody(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    meet(0, RANKS);
    if (rank == 2)
        lc_room_abort(room, 5);
    else
        WAIT_FOR(lc_room_error(room, NULL) == -ECANCELED);
    CHECK(__atomic_load_n(lc_room_abort_word(room), __ATOMIC_ACQUIRE) == 1);
    meet(1, RANKS);
    lc_room_release(room);
}

static void an_abort_sets_the_callers_word_too(uint32_t rank)
{
    struct lc_room *room = join(rank, 2);
    uint32_t word = 0, late = 0;

    WAIT_FOR(lc_room_complete(room));
    lc_room_echo_abort(room, &word);
    CHECK(lc_room_vote(room, 1) == 0);
    meet(0, 2);
    if (rank == 1)
        lc_room_abort(room, 3);
    WAIT_FOR(__atomic_load_n(&word, __ATOMIC_SEQ_CST) == 1);
    lc_room_echo_abort(room, &late);
    CHECK(late == 1);
    lc_room_echo_abort(room, NULL);
    meet(1, 2);
    lc_room_release(room);
}

/* Whose last call has ended may end before the others' has. */
static void a_peers_end_leaves_calls_the_time_to_end(uint32_t rank)
{
    struct lc_room *room = join(rank, 3);
    enum lc_verdict verdict;
    uint32_t word = 0;
    int64_t lost;

    WAIT_FOR(lc_room_complete(room));
    lc_room_echo_abort(room, &word);
    CHECK(lc_room_vote(room, 1) == 0 && lc_room_decide(room, 1, &verdict) == 0);
    /* Or earlier than that: one may be slow to come back from where they meet. */
    lost = lc_now_ns();
    meet(0, 3);
    if (rank == 1)
        _exit(0); /* without goodbye */
    WAIT_FOR(lc_room_error(room, NULL));
    WAIT_FOR(__atomic_load_n(&word, __ATOMIC_SEQ_CST) == 1);
    CHECK(lc_now_ns() - lost >= LC_CUT_MS * INT64_C(1000000));
    CHECK(lc_now_ns() - lost < 20 * LC_CUT_MS * INT64_C(1000000)); /* a busy machine */
    meet(1, 2);
    lc_room_echo_abort(room, NULL);
    lc_room_release(room);
}

/* The device's words go before the thread does. */
static void after_an_exit_the_callers_word_is_left_alone(uint32_t rank)
{
    struct lc_room *room = join(rank, 2);
    uint32_t word = 0;

    WAIT_FOR(lc_room_complete(room));
    lc_room_echo_abort(room, &word);
    CHECK(lc_room_vote(room, 1) == 0);
    meet(0, 2);
    if (rank == 1)
        lc_control_fini();
    meet(1, 2);
    if (rank == 0)
        _exit(0); /* without goodbye */
    WAIT_FOR(__atomic_load_n(lc_room_abort_word(room), __ATOMIC_ACQUIRE) == 1);
    sleep_ms(2 * LC_CUT_MS);
    CHECK(__atomic_load_n(&word, __ATOMIC_SEQ_CST) == 0);
}

static void *have_lock_a_while(void *has_it)
{
    pthread_mutex_lock(&control.lock);
    atomic_store((atomic_bool *)has_it, true);
    sleep_ms(600);
    pthread_mutex_unlock(&control.lock);
    return NULL;
}

static void an_end_waits_for_who_is_within_a_call(uint32_t rank)
{
    struct lc_room *room = join(rank, 2);
    atomic_bool has_it = false;
    pthread_t thread;

    vote_for(room);
    meet(0, 2);
    if (rank == 1) {
        CHECK(pthread_create(&thread, NULL, have_lock_a_while, &has_it) == 0);
        WAIT_FOR(atomic_load(&has_it));
        lc_control_fini();
        _exit(0);
    }
    wait_for_end_of(1);
    sleep_ms(100);
    CHECK(lc_room_error(room, NULL) == 0);
    lc_room_release(room);
}

static void end_early(int sig)
{
    lc_control_fini(); /* what exit() calls, which programs do there. NOLINT(bugprone-signal-handler) */
    _exit(0);
}

/* A handler of the program's that ends it, while the thread that it interrupts has the lock. */
static void an_exit_within_a_call_ends(uint32_t rank)
{
    struct lc_room *room = join(rank, 1);

    WAIT_FOR(lc_room_complete(room));
    CHECK(signal(SIGALRM, end_early) != SIG_ERR);
    pthread_mutex_lock(&control.lock);
    alarm(1);
    sleep_ms(10000);
    CHECK(!"ended");
}

int main(int argc, char **argv)
{
    set_up(argc, argv);
    RUN(a_death_after_the_vote_is_an_error_soon, RANKS);
    RUN(an_end_before_the_vote_is_no_error, RANKS);
    RUN(an_abort_after_a_death_leaves_other_rooms_alone, RANKS);
    RUN(the_arbiters_death_is_an_error_only_after_a_vote, RANKS);
    RUN(the_arbiters_death_leaves_rooms_without_it_alone, RANKS);
    RUN(a_network_that_comes_back_is_no_error, 2);
    RUN(a_member_that_is_shown_out_learns_that_it_is_lost, 3);
    RUN(an_orderly_end_of_the_arbiter_is_no_error, RANKS);
    RUN(an_abort_reaches_everybody, RANKS);
    RUN(an_abort_sets_the_callers_word_too, 2);
    RUN(a_peers_end_leaves_calls_the_time_to_end, 3);
    RUN(after_an_exit_the_callers_word_is_left_alone, 2);
    RUN(an_end_waits_for_who_is_within_a_call, 2);
    RUN(an_exit_within_a_call_ends, 1);
    RUN(a_goodbye_is_heard_before_a_write_fails, 3);
    RUN(an_orderly_end_is_heard_before_a_write_fails, 2);
    return 0;
}
