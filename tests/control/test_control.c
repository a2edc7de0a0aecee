/* SPDX-License-Identifier: Apache-2.0
 *
 * The control plane alone: how ranks come, agree and pass things on. Ranks are processes or, with the argument "threads",
 * threads.
 */
#include "tests/control/ranks.h"

#include "common/deadline.h"
#include "common/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_bool no_descriptors; /* for words of new rooms hosted by this process */

__attribute__((visibility("default"))) int memfd_create(const char *name, unsigned flags)
{
    if (atomic_load(&no_descriptors) && strcmp(name, "loongcomm-words") == 0) {
        errno = EMFILE;
        return -1;
    }
    return (int)syscall(SYS_memfd_create, name, flags);
}

/* Calls OPS operations, voting before operation `vote_at`; checks the verdicts against everybody else's. */
static void walk(struct lc_room *room, uint32_t rank, int vote_at)
{
    bool voted = false, committed = false;
    unsigned seed = rank * 77 + 1;

    for (uint64_t op = 1; op <= OPS; op++) {
        int mine, expected = 0;

        if (!voted && (int)op >= vote_at && lc_room_complete(room))
            voted = lc_room_vote(room, lc_next_epoch(op - 1)) == 0;
        if (voted && !committed && lc_is_epoch(op)) {
            enum lc_verdict verdict = LC_VERDICT_SKIP;

            CHECK(lc_room_decide(room, op, &verdict) == 0);
            committed = verdict == LC_VERDICT_COMMIT;
        }
        mine = committed ? 2 : 1;
        if (!atomic_compare_exchange_strong(&board->verdict[op], &expected, mine))
            CHECK(expected == mine);
        if (rand_r(&seed) % 4 == 0)
            sleep_ms(rand_r(&seed) % 3);
    }
}

static void commits_when_all_voted(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);
    enum lc_verdict verdict;

    WAIT_FOR(lc_room_complete(room));
    CHECK((lc_room_capabilities(room) & 0xf0f0) == 0xf0f0);
    CHECK(lc_room_record(room, (rank + 1) % RANKS)->rank == (rank + 1) % RANKS);
    CHECK(lc_room_vote(room, 1) == 0 && lc_room_vote(room, 2) == -EALREADY);
    meet(0, RANKS);
    if (tcp_only) /* the votes of others may still be on their way */
        sleep_ms(100);
    meet(1, RANKS);
    CHECK(lc_room_decide(room, 1, &verdict) == 0 && verdict == LC_VERDICT_COMMIT);
    CHECK(lc_room_decide(room, 3, &verdict) == -EINVAL);
    CHECK(lc_room_error(room, NULL) == 0);
    meet(2, RANKS);
    lc_room_release(room);
}

static void ranks_that_run_apart_decide_alike(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);

    walk(room, rank, (int)rank * 5 + 1);
    meet(0, RANKS);
    CHECK(lc_room_error(room, NULL) == 0);
    lc_room_release(room);
}

static void a_rank_that_never_votes_keeps_all_with_nccl(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);

    walk(room, rank, rank == 2 ? OPS + 1 : 1);
    CHECK(atomic_load(&board->verdict[OPS]) == 1);
    meet(0, RANKS);
    lc_room_release(room);
}

static void a_rank_without_the_library_keeps_all_with_nccl(uint32_t rank)
{
    struct lc_room *room = rank == 3 ? NULL : join(rank, RANKS);

    if (room) {
        walk(room, rank, 1);
        CHECK(!lc_room_complete(room));
    }
    meet(0, RANKS);
    lc_room_release(room);
}

static void other_settings_or_versions_are_named(uint32_t rank)
{
    struct lc_record mine = record_of(rank);
    struct lc_room *room = NULL;

    mine.settings_hash += rank == 1;
    get_id(rank);
    CHECK(lc_room_join(board->id, RANKS, &mine, &room) == 0);
    meet(0, RANKS);
    sleep_ms(100);
    CHECK(!lc_room_complete(room) && lc_room_vote(room, 1) == -EINVAL);
    meet(1, RANKS);
    lc_room_release(room);
}

static void pairs_commit_alike(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);
    unsigned seed = rank + 5;
    bool committed = false;

    WAIT_FOR(lc_room_complete(room));
    for (uint64_t op = 1; rank < 2 && op <= OPS; op++) { /* messages from rank 0 to rank 1 */
        bool ready = op > (rank ? 9 : 3);
        enum lc_verdict verdict = LC_VERDICT_SKIP;
        int expected = 0;

        if (ready && !committed && lc_is_epoch(op))
            CHECK(lc_room_decide_pair(room, 0, 1, op, &verdict) == 0);
        committed |= verdict == LC_VERDICT_COMMIT;
        if (!atomic_compare_exchange_strong(&board->verdict[op], &expected, committed ? 2 : 1))
            CHECK(expected == (committed ? 2 : 1));
        sleep_ms(rand_r(&seed) % 3);
    }
    if (rank == 0)
        CHECK(lc_room_decide_pair(room, 1, 2, 1, &(enum lc_verdict){ 0 }) == -EINVAL);
    meet(0, RANKS);
    CHECK(lc_room_error(room, NULL) == 0);
    lc_room_release(room);
}

static void children_and_blobs(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS), *child = NULL;
    struct lc_record mine = record_of(rank / 2);
    char text[8] = "", big[4];
    size_t size;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_join_child(room, 1, rank % 2, RANKS / 2, &mine, &child) == 0);
    WAIT_FOR(lc_room_complete(child));
    CHECK(lc_room_post(child, 3, "seven!", 7) == 0);
    WAIT_FOR(lc_room_look(child, 1 - rank / 2, 3, text, sizeof(text), &size) == 0);
    CHECK(size == 7 && strcmp(text, "seven!") == 0);
    CHECK(lc_room_look(child, 1 - rank / 2, 3, big, sizeof(big), &size) == -ENOSPC);
    CHECK(lc_room_look(child, 1 - rank / 2, 4, text, sizeof(text), &size) == -EAGAIN);
    meet(0, RANKS);
    lc_room_release(room); /* the parent may go first */
    CHECK(lc_room_error(child, NULL) == 0);
    lc_room_release(child);
}

static int count_entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int count = 0;

    CHECK(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static void a_thousand_rooms_leave_nothing(uint32_t rank)
{
    struct lc_record mine = record_of(rank);
    int fds = 0, threads = 0;

    for (int i = 0; i < 1000; i++) {
        struct lc_room *room = NULL;

        if (rank == 0) {
            CHECK(lc_control_stamp(board->id) == 0);
            atomic_store(&board->ready, i + 1);
        }
        WAIT_FOR(atomic_load(&board->ready) == i + 1);
        CHECK(lc_room_join(board->id, 2, &mine, &room) == 0);
        WAIT_FOR(lc_room_complete(room));
        lc_room_release(room);
        atomic_fetch_add(&board->arrived[0], 1);
        WAIT_FOR(atomic_load(&board->arrived[0]) >= 2 * (i + 1));
        if (i == 10) {
            fds = count_entries("/proc/self/fd");
            threads = count_entries("/proc/self/task");
        }
    }
    WAIT_FOR(count_entries("/proc/self/fd") <= fds);
    CHECK(count_entries("/proc/self/task") == threads);
}

/* ---- descriptors ---- */

static bool closed_within(int fd, int ms)
{
    struct pollfd p = { fd, POLLIN, 0 };
    char byte;

    return poll(&p, 1, ms) == 1 && recv(fd, &byte, 1, 0) <= 0;
}

static int memory_file(uint32_t rank)
{
    int fd = memfd_create("offered", MFD_CLOEXEC);

    CHECK(fd >= 0 && pwrite(fd, &rank, sizeof(rank), 0) == (ssize_t)sizeof(rank));
    return fd;
}

static void fetch_all(struct lc_room *room, uint32_t rank)
{
    for (uint32_t from = 0; from < RANKS; from++) {
        uint32_t said = UINT32_MAX;
        int fd = -1;

        if (from == rank)
            continue;
        WAIT_FOR(lc_room_fetch_fd(room, from, &fd) == 0);
        CHECK(pread(fd, &said, sizeof(said), 0) == (ssize_t)sizeof(said) && said == from);
        CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
        close(fd);
    }
}

static void descriptors_go_from_member_to_member(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS), *child = NULL;
    struct lc_record mine = record_of(rank);
    int fd = -1, before = 0;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_fetch_fd(room, (rank + 1) % RANKS, &fd) == -EAGAIN);
    meet(0, RANKS);
    for (int i = 0; i < 3; i++) {
        if (i == 1)
            before = count_entries("/proc/self/fd");
        CHECK(lc_room_join_child(room, (uint64_t)i + 1, 0, RANKS, &mine, &child) == 0);
        WAIT_FOR(lc_room_complete(child));
        CHECK(lc_room_offer_fd(child, memory_file(rank)) == 0);
        fd = memory_file(rank);
        CHECK(lc_room_offer_fd(child, fd) == -EALREADY);
        close(fd);
        fetch_all(child, rank);
        meet(1 + i, RANKS);
        if (i == 2)
            lc_room_withdraw_fd(child);
        lc_room_release(child);
    }
    WAIT_FOR(count_entries("/proc/self/fd") <= before);
    meet(4, RANKS);
    lc_room_release(room);
}

/* Whatever is under way. */
static void a_room_that_is_released_early_keeps_no_descriptor(uint32_t rank)
{
    struct lc_room *room = join(rank, 2), *child = NULL;
    struct lc_record mine = record_of(rank);
    int before = 0;

    WAIT_FOR(lc_room_complete(room));
    for (int i = 0; i < 200; i++) {
        int fd = -1, err = -EAGAIN;

        CHECK(lc_room_join_child(room, (uint64_t)i + 1, 0, 2, &mine, &child) == 0);
        WAIT_FOR(lc_room_complete(child));
        fd = memory_file(rank);
        CHECK(lc_room_offer_fd(child, fd) == 0);
        for (int n = 0; n < i % 7 && err == -EAGAIN; n++) {
            err = lc_room_fetch_fd(child, 1 - rank, &fd);
            if (!err)
                close(fd);
            sched_yield();
        }
        lc_room_release(child);
        atomic_fetch_add(&board->arrived[0], 1);
        WAIT_FOR(atomic_load(&board->arrived[0]) >= 2 * (i + 1));
        if (i == 10)
            before = count_entries("/proc/self/fd");
    }
    WAIT_FOR(count_entries("/proc/self/fd") <= before + 2);
    meet(1, 2);
    lc_room_release(room);
}

static int connect_to_pass(const struct lc_offer *offer)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int at = sprintf(addr.sun_path + 1, "loongcomm-fd-");

    for (int i = 0; i < LC_KEY_BYTES; i++)
        at += sprintf(addr.sun_path + 1 + at, "%02x", offer->name[i]);
    CHECK(fd >= 0 &&
          connect(fd, (struct sockaddr *)&addr,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)at)) == 0);
    return fd;
}

/* Nothing comes but the end. */
static void ask_in_vain(const struct lc_offer *offer, const void *data, size_t size)
{
    int fd = connect_to_pass(offer);

    CHECK(send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size && closed_within(fd, 20000));
    close(fd);
}

static void strangers_get_no_descriptor(uint32_t rank)
{
    struct {
        struct lc_frame head;
        struct lc_wanted wanted;
    } ask = {
        {LC_WIRE_MAGIC, LC_FRAME_WANTED, 0, 0,            sizeof(struct lc_wanted) },
        { { 0 },            0,                      0,           0}
    };
    struct lc_room *room = join(rank, 2);
    int silent[LC_STRANGERS + 8], fd = -1, before;
    struct lc_offer offer;
    size_t size;

    WAIT_FOR(lc_room_complete(room));
    before = count_entries("/proc/self/fd");
    CHECK(lc_room_offer_fd(room, memory_file(rank)) == 0);
    meet(0, 2);
    if (rank == 1) {
        WAIT_FOR(lc_room_look(room, 0, UINT32_MAX, &offer, sizeof(offer), &size) == 0);
        ask_in_vain(&offer, "GET / HTTP/1.0\r\n\r\nnothing here but lines of text", 48);
        ask_in_vain(&offer, &ask, sizeof(ask));
        memcpy(ask.wanted.secret, offer.secret, LC_KEY_BYTES);
        ask.wanted.id = lc_room_id(room);
        ask.wanted.rank = 1; /* right secret, wrong rank */
        ask_in_vain(&offer, &ask, sizeof(ask));
        ask.head.type = LC_FRAME_PASSED;
        ask_in_vain(&offer, &ask, sizeof(ask));
        ask.head.type = LC_FRAME_JOIN; /* larger than what is read */
        ask.head.length = sizeof(struct lc_join);
        ask_in_vain(&offer, &ask, sizeof(ask));
        for (int i = 0; i < LC_STRANGERS + 8; i++)
            silent[i] = connect_to_pass(&offer);
        CHECK(closed_within(silent[0], 20000));
        WAIT_FOR(lc_room_fetch_fd(room, 0, &fd) == 0); /* among them */
        close(fd);
        for (int i = 0; i < LC_STRANGERS + 8; i++)
            close(silent[i]);
    }
    meet(1, 2);
    lc_room_withdraw_fd(room);
    WAIT_FOR(count_entries("/proc/self/fd") <= before + 1); /* the listener */
    CHECK(lc_room_error(room, NULL) == 0);
    lc_room_release(room);
}

/* The arbiter or another member of the same user says where to ask, but not the truth. */
static void a_false_offer_is_an_error(uint32_t rank)
{
    struct lc_room *room = join(rank, 2);
    struct lc_offer offer = { { 1 }, { 2 } };
    int fd = -1, err = -EAGAIN;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_post(room, UINT32_MAX, &offer, rank ? sizeof(offer) : 3) == 0);
    WAIT_FOR((err = lc_room_fetch_fd(room, 1 - rank, &fd)) != -EAGAIN);
    CHECK(err == (rank ? -EPROTO : -ECONNREFUSED));
    meet(0, 2);
    lc_room_release(room);
}

static int state_of(struct lc_room *room)
{
    return atomic_load(&room->state);
}

static void fill_stderr(void)
{
    char page[4096] = { 0 };
    int ends[2];

    CHECK(pipe(ends) == 0 && fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
    while (write(ends[1], page, sizeof(page)) > 0)
        continue;
    CHECK(fcntl(ends[1], F_SETFL, 0) == 0 && dup2(ends[1], STDERR_FILENO) >= 0);
}

static void a_log_that_nobody_reads_stops_nobody(uint32_t rank)
{
    struct lc_record mine = record_of(rank);
    struct lc_room *room = NULL, *good = join(rank, 2);
    enum lc_verdict verdict;
    int64_t before;
    int status;
    pid_t pid;

    alarm(30);
    WAIT_FOR(lc_room_complete(good));
    fill_stderr();
    lc_log_set_level(LC_LOG_INFO);
    mine.settings_hash += rank;
    CHECK(lc_room_join_child(good, 1, 0, 2, &mine, &room) == 0);
    WAIT_FOR(state_of(room) == NEVER); /* which is a line at both */
    sleep_ms(50);
    CHECK(lc_room_vote(good, 1) == 0);
    meet(0, 2);
    sleep_ms(50);
    CHECK(lc_room_decide(good, 1, &verdict) == 0 && verdict == LC_VERDICT_COMMIT);
    pid = fork();
    if (pid == 0)
        _exit(0);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    meet(1, 2);
    lc_room_release(room);
    lc_room_release(good);
    before = lc_now_ns();
    lc_control_fini();
    CHECK(lc_now_ns() - before < 5000 * INT64_C(1000000));
}

/* ---- the watchdog ---- */

static struct lc_progress progress;
static struct lc_hang last_hang; /* written by the writer thread before `hangs` grows */
static atomic_int hangs;

static void keep_hang(const struct lc_hang *hang)
{
    last_hang = *hang;
    atomic_fetch_add(&hangs, 1);
}

/* Longer than a busy machine keeps a rank from running: ranks must have made their calls when the first looks. */
#define WATCH_S 4u

static void call(uint64_t count)
{
    struct lc_note note = { .count = count, .kind = 3, .type = 7, .peer = -1 };

    lc_progress_call(&progress, &note, true, 0);
    lc_progress_return(&progress);
}

static void a_rank_that_lags_is_found_once(uint32_t rank)
{
    struct lc_room *room;

    lc_control_watch(WATCH_S, keep_hang);
    room = join(rank, RANKS);
    WAIT_FOR(lc_room_complete(room));
    for (int i = 0; i < (rank == 3 ? 38 : 40); i++)
        call((uint64_t)i);
    meet(2, RANKS); /* nobody is watched before all have called */
    lc_room_watch(room, &progress);
    WAIT_FOR(atomic_load(&hangs) == 1);
    CHECK(last_hang.kind == LC_HANG_FOUND && last_hang.rank == rank && last_hang.nranks == RANKS);
    CHECK(last_hang.id == lc_room_id(room) && last_hang.mine.collectives == (rank == 3 ? 38 : 40));
    CHECK(last_hang.mine.n == LC_RECENT && last_hang.process_quiet);
    CHECK(last_hang.finding.n_missing == 1 && last_hang.missing[0].rank == 3);
    CHECK(last_hang.missing[0].presence == LC_HERE && last_hang.missing[0].collectives == 38);
    CHECK(last_hang.finding.at == 39 && last_hang.finding.top == 40);
    CHECK(last_hang.finding.awaited.seq == 39 && last_hang.finding.awaited.count == 38);
    CHECK(last_hang.finding.n_differ == 0 && last_hang.finding.n_absent == 0);
    meet(0, RANKS);
    sleep_ms(1500 * WATCH_S);
    CHECK(atomic_load(&hangs) == 1);
    meet(1, RANKS);
    call(38);
    WAIT_FOR(atomic_load(&hangs) == 2);
    CHECK(last_hang.kind == LC_HANG_OVER);
    lc_room_release(room);
}

/* As the arbiter's process, rank 0, sees it. */
static bool have_joined(uint32_t n)
{
    bool joined;

    pthread_mutex_lock(&control.lock);
    joined = control.hosted && control.hosted->joined == n;
    pthread_mutex_unlock(&control.lock);
    return joined;
}

static void who_differs_left_or_never_came_is_told_apart(uint32_t rank)
{
    struct lc_room *room;

    if (rank == 3)
        return; /* without the library */
    lc_control_watch(WATCH_S, keep_hang);
    room = join(rank, RANKS);
    call(5);
    if (rank == 0)
        WAIT_FOR(have_joined(RANKS - 1)); /* nobody knows of who leaves before */
    meet(0, RANKS - 1);
    if (rank == 2) {
        lc_room_watch(room, &progress); /* for its last words */
        lc_room_release(room);          /* in order, after the first */
        meet(2, RANKS - 1);
        meet(1, RANKS - 1);
        return;
    }
    call(rank ? 7 : 6);
    call(8);
    meet(2, RANKS - 1); /* nobody is watched before all have called */
    lc_room_watch(room, &progress);
    WAIT_FOR(atomic_load(&hangs) == 1);
    CHECK(last_hang.finding.n_missing == 1 && last_hang.finding.n_absent == 1);
    CHECK(last_hang.missing[0].rank == 2 && last_hang.missing[0].presence == LC_LEFT);
    CHECK(last_hang.missing[0].collectives == 1 && last_hang.finding.at == 2);
    CHECK(last_hang.finding.n_differ == 1 && last_hang.finding.rank_a == 0);
    CHECK(last_hang.finding.rank_b == 1 && last_hang.finding.a.seq == 2);
    CHECK(last_hang.finding.a.count == 6 && last_hang.finding.b.count == 7);
    meet(1, RANKS - 1);
    lc_room_release(room);
}

static int connect_raw(void)
{
    struct lc_ticket ticket;
    struct sockaddr_in addr = { .sin_family = AF_INET };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    CHECK(fd >= 0 && lc_ticket_read(board->id, &ticket) == 0);
    addr.sin_port = htons(ticket.port);
    memcpy(&addr.sin_addr, ticket.address, 4);
    CHECK(connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0);
    return fd;
}

/* Strangers: garbage, a wrong token, a JOIN without HELLO, silence in great number, a known client that talks nonsense. */
static void strangers_are_shown_out_and_harm_nobody(uint32_t rank)
{
    struct lc_frame head = { LC_WIRE_MAGIC, LC_FRAME_HELLO, 0, 0, sizeof(struct lc_hello) };
    struct lc_room *room = join(rank, 2);
    struct lc_hello hello = { .version = 1 };
    struct lc_ticket ticket;
    int silent[LC_STRANGERS + 8];

    CHECK(lc_ticket_read(board->id, &ticket) == 0);
    if (rank == 1) {
        int fd = connect_raw();

        CHECK(send(fd, "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL) == 18 &&
              closed_within(fd, PATIENCE_MS));
        close(fd);
        fd = connect_raw();
        CHECK(send(fd, &head, sizeof(head), MSG_NOSIGNAL) > 0);
        CHECK(send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) > 0 && closed_within(fd, PATIENCE_MS));
        close(fd);
        fd = connect_raw();
        head.type = LC_FRAME_JOIN;
        head.length = sizeof(struct lc_join);
        CHECK(send(fd, &head, sizeof(head), MSG_NOSIGNAL) > 0);
        CHECK(send(fd, &(struct lc_join){ 0 }, sizeof(struct lc_join), MSG_NOSIGNAL) > 0 &&
              closed_within(fd, PATIENCE_MS));
        close(fd);
        fd = connect_raw(); /* a known client that then talks nonsense */
        head.type = LC_FRAME_HELLO;
        head.length = sizeof(hello);
        memcpy(hello.token, ticket.token, sizeof(hello.token));
        CHECK(send(fd, &head, sizeof(head), MSG_NOSIGNAL) > 0 &&
              send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) > 0);
        head.type = LC_FRAME_VOTE;
        head.length = 8;
        CHECK(send(fd, &head, sizeof(head), MSG_NOSIGNAL) > 0 &&
              send(fd, "12345678", 8, MSG_NOSIGNAL) > 0);
        CHECK(closed_within(fd, PATIENCE_MS));
        close(fd);
        for (int i = 0; i < LC_STRANGERS + 8; i++)
            silent[i] = connect_raw();
        CHECK(closed_within(silent[0], PATIENCE_MS)); /* gave way */
        CHECK(closed_within(silent[LC_STRANGERS + 7],
                            LC_HELLO_MS + PATIENCE_MS)); /* said nothing in time */
    }
    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    meet(0, 2);
    CHECK(lc_room_error(room, NULL) == 0);
    lc_room_release(room);
}

static void a_forked_child_is_no_member(uint32_t rank)
{
    struct lc_room *room = join(rank, 2), *second = NULL;
    struct lc_record seat = record_of(rank);
    enum lc_verdict verdict;
    int status;
    pid_t pid;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    CHECK(lc_room_join_child(room, 1, 0, 2, &seat, &second) == 0);
    WAIT_FOR(lc_room_complete(second));
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct lc_record mine = record_of(0);
        struct lc_room *own = NULL;
        char id[LC_ID_BYTES] = "";

        CHECK(lc_room_decide(room, 1, &verdict) == -EINVAL);
        CHECK(lc_room_vote(second, 1) == -EINVAL);
        lc_room_release(room);
        CHECK(lc_control_stamp(id) == 0 && lc_room_join(id, 1, &mine, &own) == 0);
        WAIT_FOR(lc_room_complete(own));
        lc_room_release(own);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(lc_room_error(room, NULL) == 0 && lc_room_vote(second, 1) == 0);
    meet(0, 2);
    lc_room_release(room);
    lc_room_release(second);
}

static void an_id_without_a_ticket_is_left_alone(uint32_t rank)
{
    struct lc_record mine = record_of(rank);
    char id[LC_ID_BYTES] = "something else";
    struct lc_room *room = NULL;

    CHECK(lc_room_join(id, 2, &mine, &room) == -ENOENT && !room);
    CHECK(lc_control_stamp(id) == 0);
    CHECK(memcmp(id, "something else", 14) == 0);
    id[70] ^= 1;
    CHECK(lc_room_join(id, 2, &mine, &room) == -ENOENT);
    id[70] ^= 1;
    CHECK(lc_room_join(id, 0, &mine, &room) == -EINVAL);
    CHECK(lc_room_join(id, 2, &mine, &room) == 0);
    lc_room_release(room);
}

/* Nor does anybody wait for the arbiter, where it stands still. */
static void a_vote_that_is_withheld_is_not_asked_for(uint32_t rank)
{
    struct lc_room *room = join(rank, RANKS);
    enum lc_verdict verdict = LC_VERDICT_COMMIT;
    int64_t before;

    WAIT_FOR(lc_room_complete(room));
    if (rank == 2)
        lc_room_withhold(room);
    else
        CHECK(lc_room_vote(room, 1) == 0);
    WAIT_FOR(atomic_load(&room->never) && atomic_load(&room->withheld[2]));
    meet(0, RANKS);
    if (rank == 0)
        pthread_mutex_lock(&control.lock);
    meet(1, RANKS);
    before = lc_now_ns();
    if (rank == 1 || rank == 3) {
        CHECK(lc_room_decide(room, 4, &verdict) == 0 && verdict == LC_VERDICT_SKIP);
        verdict = LC_VERDICT_COMMIT;
        CHECK(lc_room_decide_pair(room, rank, 2, 4, &verdict) == 0 && verdict == LC_VERDICT_SKIP);
    }
    CHECK(lc_now_ns() - before < 5000 * INT64_C(1000000));
    meet(2, RANKS);
    if (rank == 0)
        pthread_mutex_unlock(&control.lock);
    CHECK(lc_room_error(room, NULL) == 0);
    meet(3, RANKS);
    if (rank == 1 || rank == 3) /* others are asked for */
        CHECK(lc_room_decide_pair(room, 1, 3, 1, &verdict) == 0);
    meet(4, RANKS);
    lc_room_release(room);
}

static void an_id_used_twice_harms_no_other_room(uint32_t rank)
{
    struct lc_record mine = record_of(rank);
    struct lc_room *room = join(rank, 2), *again = NULL;
    enum lc_verdict verdict;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    CHECK(lc_room_join(board->id, 2, &mine, &again) == 0);
    meet(0, 2);
    sleep_ms(200);
    CHECK(!lc_room_complete(again));
    lc_room_release(again);
    sleep_ms(100);
    CHECK(lc_room_error(room, NULL) == 0);
    meet(1, 2);
    CHECK(lc_room_decide(room, 1, &verdict) == 0 && verdict == LC_VERDICT_COMMIT);
    meet(2, 2);
    lc_room_release(room);
}

static void a_room_without_descriptors_harms_no_other(uint32_t rank)
{
    struct lc_record mine = record_of(rank);
    struct lc_room *room = join(rank, 2), *child = NULL, *later = NULL;
    enum lc_verdict verdict;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    atomic_store(&no_descriptors, true);
    meet(0, 2);
    CHECK(lc_room_join_child(room, 1, 0, 2, &mine, &child) == 0);
    WAIT_FOR(state_of(child) == NEVER);
    meet(1, 2);
    atomic_store(&no_descriptors, false);
    meet(2, 2);
    CHECK(lc_room_error(room, NULL) == 0 && lc_room_error(child, NULL) == 0);
    CHECK(lc_room_join_child(room, 2, 0, 2, &mine, &later) == 0);
    WAIT_FOR(lc_room_complete(later));
    CHECK(lc_room_decide(room, 1, &verdict) == 0 && verdict == LC_VERDICT_COMMIT);
    meet(3, 2);
    lc_room_release(child);
    lc_room_release(later);
    lc_room_release(room);
}

static void more_rooms_than_seats_harm_no_other(uint32_t rank)
{
    static struct lc_room *many[LC_SEATS_MAX];
    struct lc_record alone = record_of(0), mine = record_of(rank);
    struct lc_room *room = join(rank, 2), *last = NULL;
    enum lc_verdict verdict;

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_vote(room, 1) == 0);
    for (uint32_t i = 0; rank == 1 && i < LC_SEATS_MAX; i++)
        CHECK(lc_room_join_child(room, i + 2, 0, 1, &alone, &many[i]) == 0);
    if (rank == 1)
        WAIT_FOR(state_of(many[LC_SEATS_MAX - 1]) == NEVER &&
                 lc_room_complete(many[LC_SEATS_MAX - 2]));
    CHECK(lc_room_join_child(room, 1, 0, 2, &mine, &last) == 0);
    if (rank == 1)
        WAIT_FOR(state_of(last) == NEVER);
    meet(0, 2);
    CHECK(!lc_room_complete(last) && lc_room_error(room, NULL) == 0);
    CHECK(lc_room_decide(room, 1, &verdict) == 0 && verdict == LC_VERDICT_COMMIT);
    meet(1, 2);
    for (uint32_t i = 0; rank == 1 && i < LC_SEATS_MAX; i++)
        lc_room_release(many[i]);
    lc_room_release(last);
    lc_room_release(room);
}

static bool is_hosted(const char id[LC_ID_BYTES])
{
    struct lc_ticket ticket;
    bool found = false;

    CHECK(lc_ticket_read(id, &ticket) == 0);
    pthread_mutex_lock(&control.lock);
    for (struct hosted *h = control.hosted; h; h = h->next)
        found |= memcmp(h->key, ticket.token, LC_KEY_BYTES) == 0;
    pthread_mutex_unlock(&control.lock);
    return found;
}

/* Its connection says the token of the room that has ended, and carries the seat of the other one. */
static void who_comes_late_for_one_room_is_in_time_for_the_next(uint32_t rank)
{
    struct lc_record mine = record_of(rank);
    struct lc_room *first = NULL, *second = NULL;
    char ended[LC_ID_BYTES];

    if (rank == 0) {
        first = join(rank, 2);
        lc_room_release(first);
        WAIT_FOR(!is_hosted(board->id));
        first = NULL;
    } else {
        WAIT_FOR(atomic_load(&board->ready));
    }
    memcpy(ended, board->id, sizeof(ended));
    meet(0, 2);
    if (rank == 0)
        CHECK(lc_control_stamp(board->id) == 0);
    meet(1, 2);
    if (rank == 1)
        CHECK(lc_room_join(ended, 2, &mine, &first) == 0);
    CHECK(lc_room_join(board->id, 2, &mine, &second) == 0);
    WAIT_FOR(lc_room_complete(second));
    CHECK(!first || !lc_room_complete(first));
    meet(2, 2);
    lc_room_release(first);
    lc_room_release(second);
}

static void say_hello(int fd, const unsigned char token[LC_KEY_BYTES])
{
    struct lc_frame head = { LC_WIRE_MAGIC, LC_FRAME_HELLO, 0, 0, sizeof(struct lc_hello) };
    struct lc_hello hello = { .version = 1 };

    memcpy(hello.token, token, sizeof(hello.token));
    CHECK(send(fd, &head, sizeof(head), MSG_NOSIGNAL) == (ssize_t)sizeof(head));
    CHECK(send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) == (ssize_t)sizeof(hello));
}

/* The ranks of a large job come together, and their first words a while behind them. */
static void a_burst_of_ranks_is_let_in(uint32_t rank)
{
    struct lc_room *room = join(rank, 2);
    int fds[LC_STRANGERS + 40];
    struct lc_ticket ticket;

    CHECK(lc_ticket_read(board->id, &ticket) == 0);
    for (int i = 0; rank == 1 && i < LC_STRANGERS + 40; i++)
        fds[i] = connect_raw();
    sleep_ms(200);
    for (int i = 0; rank == 1 && i < LC_STRANGERS + 40; i++)
        say_hello(fds[i], ticket.token);
    sleep_ms(200);
    for (int i = 0; rank == 1 && i < LC_STRANGERS + 40; i++)
        CHECK(!closed_within(fds[i], 0));
    meet(0, 2);
    lc_room_release(room);
}

static void without_descriptors_the_thread_sleeps(uint32_t rank)
{
    struct lc_room *room = join(rank, 2);
    struct rlimit limit, none;
    clock_t before;
    int fd;

    WAIT_FOR(lc_room_complete(room));
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    none = limit;
    fd = dup(STDERR_FILENO);
    close(fd);
    none.rlim_cur = (rlim_t)fd; /* the lowest that is free */
    if (rank == 0)
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    meet(0, 2);
    fd = rank == 1 ? connect_raw() : -1;
    before = clock();
    sleep_ms(600);
    CHECK(clock() - before < CLOCKS_PER_SEC / 10);
    meet(1, 2);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (rank == 1) {
        say_hello(fd, (unsigned char[LC_KEY_BYTES]){ 0 });
        CHECK(closed_within(fd, PATIENCE_MS)); /* it was let in at last, and shown out */
    }
    meet(2, 2);
    lc_room_release(room);
}

/* The arbiter of the next case: it gives the words of the second room, and for the first wants to be asked. */
static int pretend_to_be_arbiter(struct lc_ticket *ticket)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char name[64];

    *ticket = (struct lc_ticket){ .port = 1, .family = 4 };
    for (int i = 0; i < 4; i++) /* a name that no other process has */
        ticket->address[i] = (unsigned char)((unsigned)getpid() >> 8 * i);
    lc_unix_name(ticket, name);
    memcpy(addr.sun_path + 1, name, strlen(name));
    CHECK(bind(fd, (struct sockaddr *)&addr,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))) == 0);
    CHECK(listen(fd, 1) == 0);
    return fd;
}

static void words_are_those_of_their_room(uint32_t rank)
{
    struct lc_complete nothing = { 0 };
    struct lc_record mine = record_of(rank);
    struct lc_room *first = NULL, *second = NULL;
    struct lc_ticket ticket;
    struct lc_words *words;
    struct lc_conn conn;
    char id[LC_ID_BYTES] = "";
    int listener, fd;

    if (tcp_only)
        return;
    listener = pretend_to_be_arbiter(&ticket);
    lc_ticket_write(id, &ticket);
    CHECK(lc_room_join(id, 2, &mine, &first) == 0 && lc_room_join(id, 2, &mine, &second) == 0);
    lc_conn_init(&conn, accept(listener, NULL, NULL), true);
    CHECK(lc_words_create(2, &words, &fd) == 0);
    pthread_mutex_lock(&control.lock); /* so that all is read at once */
    CHECK(lc_conn_send(&conn, LC_FRAME_SEAT, 0, NULL, 0, NULL, 0) == 0);
    CHECK(lc_conn_send_fd(&conn, LC_FRAME_WORDS, 1, fd) == 0);
    for (uint32_t room = 0; room < 2; room++)
        CHECK(lc_conn_send(&conn, LC_FRAME_COMPLETE, room, &nothing, sizeof(nothing), NULL, 0) ==
              0);
    CHECK(lc_conn_flush(&conn) == 0);
    pthread_mutex_unlock(&control.lock);
    WAIT_FOR(lc_room_complete(first) && lc_room_complete(second));
    CHECK(lc_room_vote(first, 4) == 0);
    CHECK(lc_words_vote(words, rank, 1) == 0); /* nobody has */
    CHECK(lc_room_vote(second, 1) == -EALREADY);
    lc_room_release(first);
    lc_room_release(second);
    lc_conn_close(&conn);
    lc_words_unmap(words);
    close(fd);
    close(listener);
}

static void *thread_rank(void *arg)
{
    uint32_t rank = (uint32_t)(uintptr_t)arg;
    struct lc_room *room = join(rank, RANKS);

    WAIT_FOR(lc_room_complete(room));
    CHECK(lc_room_offer_fd(room, memory_file(rank)) == 0);
    fetch_all(room, rank);
    walk(room, rank, (int)rank * 7 + 1);
    meet(0, RANKS);
    CHECK(lc_room_error(room, NULL) == 0);
    lc_room_release(room);
    return NULL;
}

static void threads_as_ranks(void)
{
    pthread_t threads[RANKS];

    memset(board, 0, sizeof(*board));
    for (uintptr_t r = 0; r < RANKS; r++)
        CHECK(pthread_create(&threads[r], NULL, thread_rank, (void *)r) == 0);
    for (int r = 0; r < RANKS; r++)
        CHECK(pthread_join(threads[r], NULL) == 0);
    printf("threads_as_ranks: ok\n");
}

int main(int argc, char **argv)
{
    set_up(argc, argv);
    if (argc > 1 && strcmp(argv[1], "threads") == 0) {
        threads_as_ranks();
        return 0;
    }
    RUN(an_id_without_a_ticket_is_left_alone, 1);
    RUN(commits_when_all_voted, RANKS);
    RUN(ranks_that_run_apart_decide_alike, RANKS);
    RUN(a_rank_that_never_votes_keeps_all_with_nccl, RANKS);
    RUN(a_rank_without_the_library_keeps_all_with_nccl, RANKS);
    RUN(other_settings_or_versions_are_named, RANKS);
    RUN(a_vote_that_is_withheld_is_not_asked_for, RANKS);
    RUN(pairs_commit_alike, RANKS);
    RUN(children_and_blobs, RANKS);
    RUN(descriptors_go_from_member_to_member, RANKS);
    RUN(a_room_that_is_released_early_keeps_no_descriptor, 2);
    RUN(strangers_get_no_descriptor, 2);
    RUN(a_false_offer_is_an_error, 2);
    RUN(a_log_that_nobody_reads_stops_nobody, 2);
    RUN(a_rank_that_lags_is_found_once, RANKS);
    RUN(who_differs_left_or_never_came_is_told_apart, RANKS);
    RUN(a_thousand_rooms_leave_nothing, 2);
    RUN(strangers_are_shown_out_and_harm_nobody, 2);
    RUN(a_forked_child_is_no_member, 2);
    RUN(an_id_used_twice_harms_no_other_room, 2);
    RUN(a_room_without_descriptors_harms_no_other, 2);
    RUN(more_rooms_than_seats_harm_no_other, 2);
    RUN(who_comes_late_for_one_room_is_in_time_for_the_next, 2);
    RUN(a_burst_of_ranks_is_let_in, 2);
    RUN(without_descriptors_the_thread_sleeps, 2);
    RUN(words_are_those_of_their_room, 1);
    return 0;
}
