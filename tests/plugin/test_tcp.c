/* SPDX-License-Identifier: Apache-2.0
 *
 * The TCP transport over loopback, without harm. */
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/tcp.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

static struct lc_net_context *ctx;
static size_t piece = 131072;

static void loopback_is_the_one_device(void)
{
    struct lc_net_properties p;
    int n = 0;

    CHECK(lc_net_tcp.devices(&n) == 0 && n == 1);
    CHECK(lc_net_tcp.properties(0, &p) == 0 && strcmp(p.name, "lo") == 0);
    CHECK(p.speed_mbps >= 10000 && p.max_recvs == 1 && p.ptr_support == LC_NET_HOST && !p.pci_path);
    CHECK(lc_net_tcp.properties(1, &p) == -EINVAL && lc_net_tcp.properties(-1, &p) == -EINVAL);
}

static void every_size_arrives_as_it_is(void)
{
    static const size_t sizes[] = { 0,    1,    2,      55,     56,     57,      4095,
                                    4096, 4097, 131071, 131072, 131073, 1 << 20, 3 << 20 };
    static unsigned char from[3 << 20];
    static unsigned char to[(3 << 20) + 1];
    struct pair pair = pair_open(ctx, 0);

    for (size_t i = 0; i < sizeof(from); i++)
        from[i] = (unsigned char)(i * 7 + i / 251);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        memset(to, 0, sizeof(to));
        pair_send(&pair, from, sizes[i], to, sizeof(to));
        CHECK(to[sizes[i]] == 0);
    }
    pair_close(&pair);
}

static void many_in_flight_arrive_in_order(void)
{
    struct pair pair = pair_open(ctx, 0);

    pair_stream(&pair, 400, 600000, LC_NET_MAX_REQUESTS, 1);
    pair_stream(&pair, 20000, 200, LC_NET_MAX_REQUESTS, 2);
    pair_close(&pair);
}

static void the_window_is_wide_enough_and_bounded(void)
{
    struct pair pair = pair_open(ctx, 0);
    unsigned char byte = 7;
    unsigned n = 0;

    for (;; n++) {
        struct lc_net_request *send;

        CHECK(lc_net_tcp.isend(pair.send, &byte, 1, 0, NULL, &send) == 0);
        if (!send)
            break;
        CHECK(n < 1000);
    }
    CHECK(n >= LC_NET_MAX_REQUESTS);
    pair_close(&pair); /* with all of them open */
}

/* Until the request fails. */
static int wait_error(struct lc_net_request *r)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool done = false;
    int err;

    while ((err = lc_net_tcp.test(r, &done, NULL)) == 0) {
        CHECK(!done && !lc_deadline_passed(end));
        sched_yield();
    }
    return err;
}

static void wait_done(struct lc_net_request *r, size_t size)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool done = false;
    size_t got = 0;

    while (!done) {
        CHECK(lc_net_tcp.test(r, &done, &got) == 0);
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    CHECK(got == size);
}

static void a_message_too_long_fails_both_sides_and_writes_nothing(void)
{
    struct pair pair = pair_open(ctx, 0);
    static unsigned char from[20000]; /* more than may come early */
    static unsigned char to[20000];
    void *at = to;
    size_t room = 9999;
    int tag = 0;
    struct lc_net_request *send;
    struct lc_net_request *recv;

    memset(from, 1, sizeof(from));
    memset(to, 2, sizeof(to));
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    CHECK(lc_net_tcp.isend(pair.send, from, 10000, 0, NULL, &send) == 0 && send);
    /* The sender's lane 0 moves in its calls. */
    for (struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);;) {
        bool done;
        int err = lc_net_tcp.test(send, &done, NULL);

        if (err) {
            CHECK(err == -EREMOTEIO);
            break;
        }
        err = lc_net_tcp.test(recv, &done, NULL);
        CHECK(err == 0 || err == -EMSGSIZE);
        CHECK(!done && !lc_deadline_passed(end));
        sched_yield();
    }
    CHECK(wait_error(recv) == -EMSGSIZE && wait_error(recv) == -EMSGSIZE);
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == -EMSGSIZE);
    CHECK(lc_net_tcp.isend(pair.send, from, 1, 0, NULL, &send) == -EREMOTEIO);
    for (size_t i = 0; i < sizeof(to); i++)
        CHECK(to[i] == 2);
    pair_close(&pair);
}

static void a_short_message_too_long_fails_both_sides_too(bool early)
{
    struct pair pair = pair_open(ctx, 0);
    unsigned char from[100] = { 1 };
    unsigned char to[100] = { 2 };
    void *at = to;
    size_t room = 99;
    int tag = 0;
    struct lc_net_request *send;
    struct lc_net_request *recv = NULL;
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

    if (!early)
        CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    CHECK(lc_net_tcp.isend(pair.send, from, 100, 0, NULL, &send) == 0 && send);
    if (early) {
        wait_done(send, 100);
        CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    } /* else the sender may know that there is too little room, and wait to be told of the end */
    CHECK(wait_error(recv) == -EMSGSIZE);
    while (lc_net_tcp.isend(pair.send, from, 1, 0, NULL, &send) != -EREMOTEIO) {
        bool done;

        CHECK(!lc_deadline_passed(end));
        (void)!lc_net_tcp.test(recv, &done, NULL); /* its lane 0, too, moves in calls only */
        sched_yield();
    }
    CHECK(to[0] == 2);
    pair_close(&pair);
}

#define SHORT \
    (LC_TCP_EARLY * 3 / 4) /* what a sender may be ahead, for a quarter need not be confirmed */

/* The caller's buffer is free again, whatever becomes of the message. */
static void send_short(struct pair *pair, int i, size_t size)
{
    static unsigned char from[LC_TCP_EARLY_MAX];
    struct lc_net_request *send;

    memset(from, i + 1, size);
    CHECK(lc_net_tcp.isend(pair->send, from, size, 0, NULL, &send) == 0 && send);
    wait_done(send, size);
    memset(from, 0xee, size);
}

static void expect_short(struct pair *pair, int i, size_t size)
{
    static unsigned char to[LC_TCP_EARLY_MAX + 1];
    struct lc_net_request *recv;
    void *at = to;
    size_t room = sizeof(to);
    int tag = 0;

    memset(to, 0xdd, sizeof(to));
    CHECK(lc_net_tcp.irecv(pair->recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    wait_done(recv, size);
    for (size_t k = 0; k < size; k++)
        CHECK(to[k] == i + 1);
    CHECK(to[size] == 0xdd);
}

static size_t short_size(int i)
{
    static const size_t sizes[] = { LC_TCP_EARLY_MAX, 0, LC_TCP_EARLY_MAX - 1, 55, 8000 };

    return sizes[i % 5] < piece ? sizes[i % 5] : piece;
}

static void short_messages_do_not_wait_for_their_receives(void)
{
    struct pair pair = pair_open(ctx, 0);

    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < SHORT; i++)
            send_short(&pair, i, short_size(i));
        for (int i = 0; i < SHORT; i++)
            expect_short(&pair, i, short_size(i));
    }
    pair_close(&pair);
}

/* Receives that were posted while the sender sent nothing are told of, however few of them short messages confirm. */
static void long_messages_behind_short_ones_get_their_room(void)
{
    struct pair pair = pair_open(ctx, 0);
    static unsigned char from[3 * LC_TCP_EARLY_MAX];
    static unsigned char to[12][sizeof(from)];

    memset(from, 7, sizeof(from));
    for (int n_short = 0; n_short < 12; n_short++) {
        struct lc_net_request *recv[12];
        struct lc_net_request *send;

        for (int i = 0; i < 12; i++) {
            void *at = to[i];
            size_t room = sizeof(from);
            int tag = 0;

            CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv[i]) == 0 && recv[i]);
        }
        for (int i = 0; i < 12; i++) {
            size_t size = i < n_short ? 55 : sizeof(from);

            CHECK(lc_net_tcp.isend(pair.send, from, size, 0, NULL, &send) == 0 && send);
            pair_wait(send, recv[i], NULL, NULL);
        }
    }
    pair_close(&pair);
}

/* The sender has asked for the long one's receive before those of the short ones, which came early, are posted. */
static void a_long_message_behind_early_ones_gets_its_room(void)
{
    struct pair pair = pair_open(ctx, 0);
    static unsigned char from[3 * LC_TCP_EARLY_MAX];
    static unsigned char to[sizeof(from)];

    memset(from, 7, sizeof(from));
    for (int round = 0; round < 20; round++) {
        struct lc_net_request *recv;
        struct lc_net_request *send;
        void *at = to;
        size_t room = sizeof(to);
        int tag = 0;

        for (int i = 0; i < SHORT; i++)
            send_short(&pair, i, short_size(i));
        CHECK(lc_net_tcp.isend(pair.send, from, sizeof(from), 0, NULL, &send) == 0 && send);
        for (int i = 0; i < SHORT; i++)
            expect_short(&pair, i, short_size(i));
        CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
        pair_wait(send, recv, NULL, NULL);
        CHECK(memcmp(to, from, sizeof(to)) == 0);
        memset(to, 0, sizeof(to));
    }
    pair_close(&pair);
}

static void wait_until_asked(struct conn *conn, struct lc_net_request *send)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    uint64_t wanted = 0;

    while (wanted <= conn->posted) {
        bool done;

        CHECK(lc_net_tcp.test(send, &done, NULL) == 0 && !done);
        lane_kick(&conn->lanes[0], 1);
        conn_lock(conn);
        wanted = conn->wanted;
        conn_unlock(conn);
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

/* Over another lane; and one that no sender of ours would ask. */
static void an_older_question_comes_too_late_to_matter(void)
{
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.recv;
    static unsigned char from[3 * LC_TCP_EARLY_MAX];
    static unsigned char to[sizeof(from)];
    struct lc_net_request *recv;
    struct lc_net_request *send;
    void *at = to;
    size_t room = sizeof(to);
    int tag = 0;

    memset(from, 7, sizeof(from));
    for (int i = 0; i < SHORT; i++)
        send_short(&pair, i, 55);
    for (int i = 0; i < SHORT; i++)
        expect_short(&pair, i, 55);
    CHECK(lc_net_tcp.isend(pair.send, from, sizeof(from), 0, NULL, &send) == 0 && send);
    wait_until_asked(conn, send);
    CHECK(conn_take_ask(conn, &(struct lc_tcp_frame){ .seq = 3 }) == 0);
    CHECK(conn_take_ask(conn, &(struct lc_tcp_frame){ .seq = UINT64_MAX }) == -EPROTO);
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    pair_wait(send, recv, NULL, NULL);
    CHECK(memcmp(to, from, sizeof(to)) == 0);
    pair_close(&pair);
}

/* Before any other has. */
static void the_first_long_message_brings_the_other_threads(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open_narrow(ctx, 0);
    int wanted = ((struct conn *)pair.send)->n_lanes > 1 ? engine.threads_wanted : 0;
    static unsigned char from[200000];
    static unsigned char to[sizeof(from)];

    for (int i = 0; i < 100; i++)
        pair_send(&pair, from, 1000, to, sizeof(to));
    CHECK(engine.n_pool == 0);
    pair_send(&pair, from, sizeof(from), to, sizeof(to));
    while (engine.n_pool < wanted) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    pair_close(&pair);
}

/* In the place of the system's: the kernel lets a user poll so many sockets and no more. */
static atomic_uint refuse; /* of the pool's polls one in so many; 0: none */
static atomic_uint asked;
static atomic_int refused;

int epoll_ctl(int epfd, int op, int fd, struct epoll_event *event)
{
    int (*real)(int, int, int, struct epoll_event *);
    unsigned one_in = atomic_load(&refuse);

    if (one_in && event && pool_is_lane(event->data.u64) && op == EPOLL_CTL_ADD &&
        atomic_fetch_add(&asked, 1) % one_in == 0) {
        atomic_fetch_add(&refused, 1);
        errno = ENOSPC;
        return -1;
    }
    *(void **)&real = dlsym(RTLD_NEXT, "epoll_ctl");
    return real(epfd, op, fd, event);
}

/* Lane 0 goes without, the others are not used. */
static void sockets_that_cannot_be_polled_carry_nothing(unsigned one_in)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair;
    int n;

    atomic_store(&refused, 0);
    atomic_store(&asked, 0);
    atomic_store(&refuse, one_in);
    pair = pair_open(ctx, 0);
    n = ((struct conn *)pair.send)->n_lanes;
    while (atomic_load(&refused) < (one_in == 1 ? n + 1 : 1)) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    pair_stream(&pair, 40, 2000000, 8, 3);
    atomic_store(&refuse, 0);
    pair_close(&pair);
}

static int sockets_of(struct lc_net_comm *end)
{
    struct conn *conn = (struct conn *)end;
    int n;

    conn_lock(conn);
    n = conn->n_up;
    conn_unlock(conn);
    return n;
}

static void the_first_long_message_brings_the_other_sockets(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open_narrow(ctx, 0);
    int all = ((struct conn *)pair.send)->n_lanes;

    pair_stream(&pair, 100, 8000, 8, 11);
    CHECK(sockets_of(pair.send) == 1 && sockets_of(pair.recv) == 1);
    while (sockets_of(pair.send) < all || sockets_of(pair.recv) < all) {
        static unsigned char from[200000];
        static unsigned char to[200000];

        pair_send(&pair, from, sizeof(from), to, sizeof(to));
        CHECK(!lc_deadline_passed(end));
    }
    pair_stream(&pair, 20, 500000, 8, 12);
    pair_close(&pair);
}

static void check_unpaced(struct lc_net_comm *end)
{
    struct conn *conn = (struct conn *)end;

    for (int i = 0; i < conn->n_lanes; i++) {
        char name[16] = "";
        socklen_t size = sizeof(name);

        pthread_mutex_lock(&conn->lanes[i].io);
        CHECK(getsockopt(conn->lanes[i].fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0);
        pthread_mutex_unlock(&conn->lanes[i].io);
        CHECK(strcmp(name, "reno") == 0);
    }
}

/* Whatever the system's way with congestion is. */
static void what_stays_in_the_machine_is_not_paced(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open(ctx, 0);
    int all = ((struct conn *)pair.send)->n_lanes;

    while (sockets_of(pair.send) < all || sockets_of(pair.recv) < all) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    check_unpaced(pair.send);
    check_unpaced(pair.recv);
    pair_close(&pair);
}

static uint64_t pieces_of(struct lc_net_comm *end)
{
    struct conn *conn = (struct conn *)end;
    uint64_t n = 0;

    conn_lock(conn);
    for (int i = 0; i < conn->n_lanes; i++)
        n += conn->lanes[i].count;
    conn_unlock(conn);
    return n;
}

/* It would be one piece, were there no thread that has nothing else to do. */
static void a_lone_message_is_shared(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open(ctx, 0);
    unsigned char *from = calloc(2, piece);
    uint64_t messages = 0;

    CHECK(from);
    do {
        memset(from, (int)++messages, piece);
        pair_send(&pair, from, piece, from + piece, piece);
        CHECK(memcmp(from, from + piece, piece) == 0);
        CHECK(!lc_deadline_passed(end));
    } while (pieces_of(pair.send) <= messages);
    pair_close(&pair);
    free(from);
}

/* One of the size of a piece goes in equal parts, one for each thread, whether or not it has something to do. */
static void few_threads_and_nccls_share_a_message(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.send;
    unsigned char *from = calloc(2, piece);
    uint64_t pooled = 0;
    int messages = 0;

    CHECK(from);
    while (sockets_of(pair.send) < conn->n_lanes) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    do {
        memset(from, ++messages, piece);
        pair_send(&pair, from, piece, from + piece, piece);
        CHECK(memcmp(from, from + piece, piece) == 0);
        CHECK(pieces_of(pair.send) == (uint64_t)(messages * engine.parts));
        conn_lock(conn);
        for (int i = 1; i < conn->n_lanes; i++)
            pooled += conn->lanes[i].count;
        conn_unlock(conn);
        CHECK(!lc_deadline_passed(end));
    } while (pooled == 0);
    pair_close(&pair);
    free(from);
}

static bool all_do(enum doing doing)
{
    for (int i = 1; i <= engine.n_pool; i++) {
        if (atomic_load(&engine.movers[i].doing) != (int)doing)
            return false;
    }
    return true;
}

/* Sees what passes while messages are moved. */
static void *watch_for_looks(void *arg)
{
    atomic_bool *end = arg;
    bool seen = false;

    while (!seen && !atomic_load(end)) {
        for (int i = 1; i <= engine.n_pool; i++)
            seen |= atomic_load(&engine.movers[i].doing) == LOOKS;
        sched_yield();
    }
    atomic_store(end, true);
    return seen ? arg : NULL;
}

/* For a moment, and no more of them than shall. */
static void threads_look_on_before_they_sleep(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open(ctx, 0);
    static unsigned char from[1 << 20];
    static unsigned char to[sizeof(from)];
    atomic_bool over = false;
    pthread_t watcher;
    void *seen;

    CHECK(engine.lookers <= engine.threads_wanted);
    CHECK(pthread_create(&watcher, NULL, watch_for_looks, &over) == 0);
    while (!atomic_load(&over) && !lc_deadline_passed(end))
        pair_send(&pair, from, sizeof(from), to, sizeof(to));
    atomic_store(&over, true);
    CHECK(pthread_join(watcher, &seen) == 0 && seen);
    end = lc_deadline_in_ms(PATIENCE_MS);
    while (!all_do(SLEEPS) || atomic_load(&engine.n_looking) != 0) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    pair_close(&pair);
}

/* Whoever wakes lanes guesses by this word, which others change meanwhile: here all the time. */
static void *confuse(void *arg)
{
    for (unsigned i = 0; !atomic_load((atomic_bool *)arg); i++) {
        for (int j = 1; j <= engine.n_pool; j++)
            atomic_store_explicit(&engine.movers[j].doing, (int)(i % 3), memory_order_relaxed);
    }
    return NULL;
}

static void check_order(const struct conn *conn)
{
    int order[LC_TCP_LANES];
    unsigned seen = 0;
    int n = conn_order_lanes(conn, order);

    CHECK(n == conn->n_lanes - 1);
    for (int i = 0; i < n; i++)
        seen |= 1u << order[i];
    CHECK(seen == (1u << conn->n_lanes) - 2);
}

/* A lane that is left out may be the only one, and its message the last. */
static void every_lane_is_woken_whatever_threads_seem_to_do(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_deadline enough = lc_deadline_in_ms(1000);
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.send;
    atomic_bool over = false;
    pthread_t other;

    while (sockets_of(pair.send) < conn->n_lanes) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    CHECK(pthread_create(&other, NULL, confuse, &over) == 0);
    while (!lc_deadline_passed(enough)) {
        conn_lock(conn);
        for (int i = 0; i < 1000; i++)
            check_order(conn);
        conn_unlock(conn);
    }
    atomic_store(&over, true);
    CHECK(pthread_join(other, NULL) == 0);
    pair_close(&pair);
}

static void wait_for_all_sockets(const struct pair *pair)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    int all = ((struct conn *)pair->send)->n_lanes;

    while (sockets_of(pair->send) < all || sockets_of(pair->recv) < all) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

/* It may be about to sleep just then. Nobody calls the system for it while others wait for the connection. */
static void a_thread_that_is_asked_looks_whatever_it_does(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_deadline enough = lc_deadline_in_ms(500);
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.send;
    struct lane *lane = &conn->lanes[1];
    struct mover *mover;

    wait_for_all_sockets(&pair);
    mover = &engine.movers[lane->mover];
    CHECK(lane->mover > 0);
    for (int64_t i = 0; !lc_deadline_passed(enough); i++) {
        int64_t until = lc_now_ns() + i % 256 * (engine.spin_ns / 128);

        while (lc_now_ns() < until)
            sched_yield();
        conn_lock(conn);
        CHECK(conn->wakes == 0 && lane->up);
        pool_ask(lane);
        CHECK(conn->wakes == (uint64_t)1 << (lane->mover - 1));
        conn_unlock_unchanged(conn);
        while (atomic_load(&mover->asked)) {
            CHECK(!lc_deadline_passed(end));
            sched_yield();
        }
    }
    pair_close(&pair);
}

/* What a sender has heard over the sockets of the pool. */
static uint64_t heard_by_pool(struct lc_net_comm *end)
{
    struct conn *conn = (struct conn *)end;
    uint64_t bytes = 0;

    for (int i = 1; i < conn->n_lanes; i++) {
        struct tcp_info info = { 0 };
        socklen_t size = sizeof(info);

        pthread_mutex_lock(&conn->lanes[i].io);
        CHECK(getsockopt(conn->lanes[i].fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0);
        lane_unlock(&conn->lanes[i]);
        bytes += info.tcpi_bytes_received;
    }
    return bytes;
}

/* Who waits for it asks lane 0 all the time, and no thread has to be woken to tell it. Where processors are few the pool may
 * bring little. */
static void what_the_pool_has_brought_is_confirmed_over_the_first_socket(void)
{
    struct lc_deadline enough = lc_deadline_in_ms(5000);
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.send;
    size_t size = 4 * piece;
    unsigned char *from = calloc(2, size);
    uint64_t pooled = 0;
    uint64_t heard;

    CHECK(from);
    wait_for_all_sockets(&pair);
    pair_send(&pair, from, size, from + size, size); /* no socket ends for want of messages */
    heard = heard_by_pool(pair.send);
    while (pooled < 100 && !lc_deadline_passed(enough)) {
        pair_send(&pair, from, size, from + size, size);
        conn_lock(conn);
        pooled = 0;
        for (int i = 1; i < conn->n_lanes; i++)
            pooled += conn->lanes[i].count;
        conn_unlock(conn);
    }
    CHECK(heard_by_pool(pair.send) == heard);
    pair_close(&pair);
    free(from);
}

/* Together they are shorter than a piece, so that lane 0 would take all. */
static void the_pool_takes_middle_messages_when_there_are_several(void)
{
    enum {
        SEVERAL = 3,
        SIZE = 32768
    };
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.send;
    static unsigned char from[SEVERAL][SIZE];
    static unsigned char to[SEVERAL][SIZE];
    uint64_t pooled = 0;

    CHECK(piece > (size_t)SEVERAL * SIZE);
    for (int turn = 1; pooled == 0; turn++) {
        struct lc_net_request *send[SEVERAL];
        struct lc_net_request *recv[SEVERAL];

        for (int i = 0; i < SEVERAL; i++) {
            void *at = to[i];
            size_t room = SIZE;

            memset(from[i], turn + i, SIZE);
            CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, NULL, NULL, &recv[i]) == 0 && recv[i]);
        }
        for (int i = 0; i < SEVERAL; i++)
            CHECK(lc_net_tcp.isend(pair.send, from[i], SIZE, 0, NULL, &send[i]) == 0 && send[i]);
        for (int i = 0; i < SEVERAL; i++)
            pair_wait(send[i], recv[i], NULL, NULL);
        CHECK(memcmp(from, to, sizeof(from)) == 0);
        conn_lock(conn);
        for (int i = 1; i < conn->n_lanes; i++)
            pooled += conn->lanes[i].count;
        conn_unlock(conn);
        CHECK(!lc_deadline_passed(end));
    }
    pair_close(&pair);
}

/* One of each at a time. */
static void the_pool_takes_middle_messages_when_several_connections_send(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pairs[2] = { pair_open(ctx, 0), pair_open(ctx, 0) };
    static unsigned char from[32768];
    static unsigned char to[sizeof(from)];
    uint64_t pooled[2] = { 0 };

    for (int turn = 1; pooled[0] == 0 || pooled[1] == 0; turn++) {
        struct conn *conn = (struct conn *)pairs[turn % 2].send;

        memset(from, turn, sizeof(from));
        pair_send(&pairs[turn % 2], from, sizeof(from), to, sizeof(to));
        CHECK(memcmp(from, to, sizeof(from)) == 0);
        conn_lock(conn);
        for (int i = 1; i < conn->n_lanes; i++)
            pooled[turn % 2] += conn->lanes[i].count;
        conn_unlock(conn);
        CHECK(!lc_deadline_passed(end));
    }
    pair_close(&pairs[0]);
    pair_close(&pairs[1]);
}

static uint64_t pooled_of(struct lc_net_comm *comm)
{
    struct conn *conn = (struct conn *)comm;
    uint64_t n = 0;

    conn_lock(conn);
    for (int i = 1; i < conn->n_lanes; i++)
        n += conn->lanes[i].count;
    conn_unlock(conn);
    return n;
}

/* Of messages that are not shared, each as a whole: by whoever has nothing to do. One connection alone sends by itself. */
static void few_threads_take_messages_of_several_connections(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pairs[2] = { pair_open(ctx, 0), pair_open(ctx, 0) };
    static unsigned char from[131072];
    static unsigned char to[sizeof(from)];
    uint64_t before;
    int turn = 0;

    for (int i = 0; i < 2; i++) {
        while (sockets_of(pairs[i].send) < ((struct conn *)pairs[i].send)->n_lanes) {
            CHECK(!lc_deadline_passed(end));
            sched_yield();
        }
    }
    while (pooled_of(pairs[0].send) == 0 || pooled_of(pairs[1].send) == 0) {
        memset(from, ++turn, sizeof(from));
        pair_send(&pairs[turn % 2], from, sizeof(from), to, sizeof(to));
        CHECK(memcmp(from, to, sizeof(from)) == 0);
        CHECK(!lc_deadline_passed(end));
    }
    CHECK(pieces_of(pairs[0].send) + pieces_of(pairs[1].send) == (uint64_t)turn);
    for (int i = 0; i < 8; i++)
        pair_send(&pairs[0], from, sizeof(from), to, sizeof(to));
    before = pooled_of(pairs[0].send);
    for (int i = 0; i < 8; i++)
        pair_send(&pairs[0], from, sizeof(from), to, sizeof(to));
    CHECK(pooled_of(pairs[0].send) == before);
    pair_close(&pairs[0]);
    pair_close(&pairs[1]);
}

/* A thread that was seen to have nothing to do, and never comes. */
static void a_message_that_nobody_takes_is_taken_back(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pairs[2] = { pair_open(ctx, 0), pair_open(ctx, 0) };
    struct conn *conn = (struct conn *)pairs[0].send;
    static unsigned char from[131072];
    static unsigned char to[sizeof(from)];
    bool handed = false;

    while (sockets_of(pairs[0].send) < conn->n_lanes) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    for (int i = 1; i < conn->n_lanes; i++)
        pthread_mutex_lock(&conn->lanes[i].io);
    for (int turn = 1; !handed; turn++) {
        struct lc_net_request *send;
        struct lc_net_request *recv;
        void *at = to;
        size_t size = sizeof(to);
        int tag = 0;

        pair_send(&pairs[1], from, sizeof(from), to, sizeof(to)); /* none is alone */
        memset(from, turn, sizeof(from));
        CHECK(lc_net_tcp.irecv(pairs[0].recv, 1, &at, &size, &tag, NULL, &recv) == 0 && recv);
        CHECK(lc_net_tcp.isend(pairs[0].send, from, sizeof(from), 0, NULL, &send) == 0 && send);
        handed = send->handed;
        pair_wait(send, recv, NULL, NULL);
        CHECK(memcmp(from, to, sizeof(from)) == 0);
        CHECK(!lc_deadline_passed(end));
    }
    CHECK(pooled_of(pairs[0].send) == 0);
    for (int i = 1; i < conn->n_lanes; i++)
        lane_unlock(&conn->lanes[i]);
    pair_close(&pairs[0]);
    pair_close(&pairs[1]);
}

/* Lanes of the pool bring it ahead of what lane 0 has, which nobody reads yet. */
static void wait_for_goodbye(const struct pair *pair)
{
    struct conn *conn = (struct conn *)pair->recv;
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool gone = conn->n_lanes == 1;

    while (!gone) {
        conn_lock(conn);
        gone = conn->peer_gone || conn->peer_leaving;
        conn_unlock(conn);
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

/* Slowly, so that it is still under way when the sender is closed. */
static void what_was_sent_arrives_after_the_sender_was_closed(bool late)
{
    struct relay *relay = relay_open((struct harm){ .chunk = 100 });
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_listen *listen;
    struct lc_net_request *recv;
    struct pair pair;
    unsigned char byte;
    void *at = &byte;
    size_t room = 1;
    int tag = 0;

    CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
    relay_target(relay, pair_port(handle)); /* all listens of a device share one */
    lc_net_tcp.close_listen(listen);
    pair = pair_open(ctx, relay_port(relay));
    for (int i = 0; i < SHORT; i++)
        send_short(&pair, i, short_size(i));
    lc_net_tcp.close_send(pair.send);
    if (late)
        wait_for_goodbye(&pair);
    for (int i = 0; i < SHORT; i++)
        expect_short(&pair, i, short_size(i));
    if (lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0)
        CHECK(wait_error(recv) == -EREMOTEIO);
    lc_net_tcp.close_recv(pair.recv);
    relay_close(relay);
}

/* ---- zeros ---- */

enum zeros {
    ALL,
    EVERY_OTHER,
    RANDOM,
    BUT_THE_LAST_BYTE, /* of each block */
    NEGATIVE,          /* floating point: their bits are not zero */
    NONE,
    ZEROS
};

static void fill_zeros(enum zeros kind, unsigned char *out, size_t size, unsigned seed)
{
    uint64_t state = seed * 2654435761u + 1;

    memset(out, 0, size);
    for (size_t at = 0; at < size; at += LC_TCP_BLOCK) {
        size_t n = size - at < LC_TCP_BLOCK ? size - at : LC_TCP_BLOCK;

        state = state * 6364136223846793005u + 1442695040888963407u;
        if (kind == NONE || (kind == EVERY_OTHER && at / LC_TCP_BLOCK % 2) ||
            (kind == RANDOM && state >> 62 == 0))
            memset(out + at, (int)(state >> 40) | 1, n);
        if (kind == BUT_THE_LAST_BYTE)
            out[at + n - 1] = 1;
        for (size_t i = 3; kind == NEGATIVE && i < n; i += 4)
            out[at + i] = 0x80;
    }
}

/* The room is larger than the message: what lies behind it is not touched. */
static void zeros_are_exact(void)
{
    static const size_t sizes[] = { 16384, 16385, 100001, 131072, 135167, 1 << 20, 3000000 };
    static unsigned char from[3000000 + 16];
    static unsigned char to[3000000 + 16];
    struct pair pair = pair_open(ctx, 0);

    for (unsigned i = 0; i < sizeof(sizes) / sizeof(*sizes) * ZEROS; i++) {
        size_t size = sizes[i / ZEROS];
        unsigned shift = i % 3; /* nothing need be aligned */

        fill_zeros(i % ZEROS, from + shift, size, i);
        memset(to, 0xa5, sizeof(to));
        pair_send(&pair, from + shift, size, to + 3 - shift, sizeof(to) - 3);
        CHECK(memcmp(from + shift, to + 3 - shift, size) == 0);
        CHECK(to[2 - shift] == 0xa5 && to[3 - shift + size] == 0xa5);
    }
    pair_close(&pair);
}

/* What the report would be told; by whoever closes or ends. */
void loongcomm_metrics_add_v1(const char *source, const char *device, const char *peer,
                              const char *name, uint64_t value);
static atomic_ulong told_zeros;

void loongcomm_metrics_add_v1(const char *source, const char *device, const char *peer,
                              const char *name, uint64_t value)
{
    __typeof__(&loongcomm_metrics_add_v1) next; /* the library's, where it is preloaded */

    told_zeros += strcmp(name, "zero_bytes_not_sent") == 0 ? value : 0;
    *(void **)&next = dlsym(RTLD_NEXT, "loongcomm_metrics_add_v1");
    if (next)
        next(source, device, peer, name, value);
}

static unsigned long elided_of(struct pair *pair, enum zeros kind, size_t size)
{
    unsigned long before = atomic_load(&engine.elided);
    static unsigned char from[1 << 20];
    static unsigned char to[1 << 20];

    fill_zeros(kind, from, size, 1);
    pair_send(pair, from, size, to, size);
    return atomic_load(&engine.elided) - before;
}

static void zeros_stay_at_home(void)
{
    struct pair pair = pair_open(ctx, 0);
    int tries = 0;

    CHECK(elided_of(&pair, ALL, 1 << 20) == 1 << 20);
    CHECK(elided_of(&pair, EVERY_OTHER, 1 << 20) == 1 << 19);
    CHECK(elided_of(&pair, ALL, LC_TCP_EARLY_MAX) == 0); /* too short to look at */
    CHECK(elided_of(&pair, NEGATIVE, 1 << 20) == 0);
    CHECK(elided_of(&pair, BUT_THE_LAST_BYTE, 1 << 20) == 0);
    /* After some time without zeros nobody looks for them, but for one piece in many. */
    for (int i = 0; i < 20; i++)
        CHECK(elided_of(&pair, NONE, 1 << 20) == 0);
    while (elided_of(&pair, ALL, 1 << 20) == 0)
        CHECK(++tries < 200);
    CHECK(elided_of(&pair, ALL, 1 << 20) == 1 << 20);
    engine.elide = false;
    CHECK(elided_of(&pair, ALL, 1 << 20) == 0);
    engine.elide = true;
    pair_close(&pair);
    CHECK(told_zeros == atomic_load(&engine.elided));
}

static void maps_say_what_comes(void)
{
    static unsigned char data[70000];
    static unsigned char out[sizeof(data)];
    unsigned char map[LC_TCP_MAP_BYTES];

    for (unsigned i = 0; i < 300; i++) {
        size_t size = 1 + i * 7919u % sizeof(data);
        size_t at = 0;
        size_t sum = 0;
        size_t run;

        fill_zeros(i % ZEROS, data, size, i);
        memset(out, 0xa5, sizeof(out));
        memset(map, 0xff, sizeof(map));
        CHECK(lc_tcp_map_make(data, size, map) <= size && lc_tcp_map_is_sane(map, size));
        lc_tcp_map_zero(map, size, out);
        for (; lc_tcp_map_next(map, size, &at, &run); at += run) {
            CHECK(run > 0 && at + run <= size);
            memcpy(out + at, data + at, run);
            sum += run;
        }
        CHECK(sum == lc_tcp_map_make(data, size, map) && memcmp(data, out, size) == 0);
        if ((size + LC_TCP_BLOCK - 1) / LC_TCP_BLOCK % 8) {
            map[lc_tcp_map_size(size) - 1] |= 0x80;
            CHECK(!lc_tcp_map_is_sane(map, size));
        }
    }
}

static void closing_one_side_fails_the_other(void)
{
    static unsigned char from[2 * LC_TCP_EARLY_MAX]; /* a short one is gone at once */
    struct pair pair = pair_open(ctx, 0);
    unsigned char byte = 0;
    struct lc_net_request *r;
    void *at = &byte;
    size_t room = 1;
    int tag = 0;

    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &r) == 0 && r);
    lc_net_tcp.close_send(pair.send);
    CHECK(wait_error(r) == -EREMOTEIO);
    lc_net_tcp.close_recv(pair.recv);
    pair = pair_open(ctx, 0);
    CHECK(lc_net_tcp.isend(pair.send, from, sizeof(from), 0, NULL, &r) == 0 && r);
    lc_net_tcp.close_recv(pair.recv);
    CHECK(wait_error(r) == -EREMOTEIO);
    lc_net_tcp.close_send(pair.send);
}

static struct lc_net_request *post_receive(struct pair *pair, void *to, size_t size)
{
    struct lc_net_request *r = NULL;
    int tag = 0;

    CHECK(lc_net_tcp.irecv(pair->recv, 1, &to, &size, &tag, NULL, &r) == 0 && r);
    return r;
}

/* How many receives beyond the last confirmed one the sender has been told of, after its receiver has been called often. */
static uint64_t told_of(struct pair *pair, struct lc_net_request *r)
{
    const struct conn *conn = (struct conn *)pair->recv;
    uint64_t told;

    for (int i = 0; i < 100; i++) {
        bool done = false;

        CHECK(lc_net_tcp.test(r, &done, NULL) == 0 && !done);
    }
    conn_lock((struct conn *)conn);
    told = conn->told_posted - conn->acked;
    conn_unlock_unchanged((struct conn *)conn);
    return told;
}

/* Each frame by itself costs: with others to wait for, the second receive is told of with the next confirmation, or when there
 * are many. */
static void receives_of_several_connections_are_told_of_together(void)
{
    struct pair pairs[2] = { pair_open(ctx, 0), pair_open(ctx, 0) };
    static unsigned char from[65536];
    static unsigned char to[4 * sizeof(from)];
    struct lc_net_request *r[2][4];
    struct lc_net_request *send;

    for (int p = 0; p < 2; p++) /* a new socket is a reason to tell of all */
        while (sockets_of(pairs[p].recv) < ((struct conn *)pairs[p].recv)->n_lanes)
            sched_yield();
    for (int i = 0; i < 4; i++) {
        for (int p = 0; p < 2; p++)
            r[p][i] = post_receive(&pairs[p], to + i * sizeof(from), sizeof(from));
        if (i < 2)
            CHECK(told_of(&pairs[0], r[0][0]) == 1 && told_of(&pairs[1], r[1][0]) == 1);
    }
    CHECK(told_of(&pairs[0], r[0][0]) == 4 && told_of(&pairs[1], r[1][0]) == 4);
    for (int i = 0; i < 8; i++) {
        CHECK(lc_net_tcp.isend(pairs[i % 2].send, from, sizeof(from), 0, NULL, &send) == 0 && send);
        pair_wait(send, r[i % 2][i / 2], NULL, NULL);
    }
    for (int i = 0; i < 5; i++) /* now alone */
        pair_send(&pairs[0], from, sizeof(from), to, sizeof(from));
    for (int i = 0; i < 2; i++)
        r[0][i] = post_receive(&pairs[0], to, sizeof(from));
    CHECK(told_of(&pairs[0], r[0][0]) == 2);
    pair_close(&pairs[0]);
    pair_close(&pairs[1]);
}

static void bad_arguments_are_refused(void)
{
    struct pair pair = pair_open(ctx, 0);
    unsigned char handle[LC_NET_HANDLE_BYTES] = { 1, 2, 3 };
    struct lc_net_comm *comm = NULL;
    struct lc_net_listen *listen = NULL;
    struct lc_net_request *r;
    struct lc_net_mr *mr;
    void *at[2] = { handle, handle };
    size_t sizes[2] = { 1, 1 };
    int tags[2] = { 0, 0 };

    CHECK(lc_net_tcp.connect(ctx, 0, handle, &comm) == -EPROTO && !comm);
    CHECK(lc_net_tcp.connect(ctx, 5, handle, &comm) == -EINVAL);
    CHECK(lc_net_tcp.listen(ctx, -1, handle, &listen) == -EINVAL && !listen);
    CHECK(lc_net_tcp.irecv(pair.recv, 2, at, sizes, tags, NULL, &r) == -EINVAL);
    CHECK(lc_net_tcp.isend(pair.recv, handle, 1, 0, NULL, &r) == -EINVAL);
    CHECK(lc_net_tcp.isend(pair.send, handle, ((size_t)1 << 40) + 1, 0, NULL, &r) == -EINVAL);
    CHECK(lc_net_tcp.reg_mr(pair.send, handle, 1, LC_NET_CUDA, &mr) == -ENOTSUP);
    CHECK(lc_net_tcp.reg_mr(pair.send, handle, 1, LC_NET_HOST, &mr) == 0);
    CHECK(lc_net_tcp.dereg(pair.send, mr) == 0);
    pair_close(&pair);
}

static void connections_come_and_go(void)
{
    for (int i = 0; i < 200; i++) {
        struct pair pair = pair_open(ctx, 0);
        unsigned char from[100] = { 1, 2, 3 };
        unsigned char to[100];

        pair_send(&pair, from, sizeof(from), to, sizeof(to));
        pair_close(&pair);
    }
}

int main(int argc, char **argv)
{
    if (argc > 2)
        piece = (size_t)atoi(argv[2]);
    tcp_settings(argc > 1 ? atoi(argv[1]) : 3, (int)piece, 60);
    lc_log_set_level(LC_LOG_ERROR);
    CHECK(lc_net_tcp.init(&(struct lc_net_options){ .traffic_class = -1 }, &ctx) == 0 && ctx);
    loopback_is_the_one_device();
    the_first_long_message_brings_the_other_threads();
    every_size_arrives_as_it_is();
    many_in_flight_arrive_in_order();
    the_window_is_wide_enough_and_bounded();
    a_message_too_long_fails_both_sides_and_writes_nothing();
    a_short_message_too_long_fails_both_sides_too(false);
    a_short_message_too_long_fails_both_sides_too(true);
    short_messages_do_not_wait_for_their_receives();
    long_messages_behind_short_ones_get_their_room();
    a_long_message_behind_early_ones_gets_its_room();
    an_older_question_comes_too_late_to_matter();
    the_first_long_message_brings_the_other_sockets();
    what_stays_in_the_machine_is_not_paced();
    receives_of_several_connections_are_told_of_together();
    if (engine.sockets > 1 && engine.lookers > 0)
        threads_look_on_before_they_sleep();
    if (engine.sockets > 1) {
        every_lane_is_woken_whatever_threads_seem_to_do();
        a_thread_that_is_asked_looks_whatever_it_does();
    }
    if (engine.sockets > 1 && (engine.relieves || engine.parts > 1) && piece >= 131072)
        what_the_pool_has_brought_is_confirmed_over_the_first_socket();
    if (!engine.relieves && engine.sockets > 1 && engine.parts > 1 && piece == 524288)
        few_threads_and_nccls_share_a_message();
    if (!engine.relieves && engine.sockets > 1 && engine.parts > 1 && piece >= 131072) {
        few_threads_take_messages_of_several_connections();
        a_message_that_nobody_takes_is_taken_back();
    }
    /* With two sockets beside the first, and pieces of which two can be made (small ones are never cut). */
    if (engine.relieves && engine.sockets > 2 && piece >= 131072) {
        a_lone_message_is_shared();
        the_pool_takes_middle_messages_when_there_are_several();
        the_pool_takes_middle_messages_when_several_connections_send();
    }
    for (unsigned one_in = 1; one_in <= 3; one_in++)
        sockets_that_cannot_be_polled_carry_nothing(one_in);
    what_was_sent_arrives_after_the_sender_was_closed(false);
    what_was_sent_arrives_after_the_sender_was_closed(true);
    maps_say_what_comes();
    zeros_are_exact();
    if (piece == 131072) /* small ones are not looked at, large ones have too many runs */
        zeros_stay_at_home();
    closing_one_side_fails_the_other();
    bad_arguments_are_refused();
    connections_come_and_go();
    lc_net_tcp.fini(ctx);
    lc_net_tcp.fini(NULL);
    return 0;
}
