/* SPDX-License-Identifier: Apache-2.0
 *
 * The TCP transport where sockets break: test_tcp_harm SOCKETS [quick]. Every byte of every message is looked at. */
#include "plugin/net/tcp/tcp_internal.h"
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "common/log.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static struct lc_net_context *ctx;

static struct pair open_through(struct relay *relay)
{
    struct lc_net_listen *listen;
    unsigned char handle[LC_NET_HANDLE_BYTES];
    uint16_t port;
    struct pair pair;

    /* All listens of a device share one port. */
    CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
    port = pair_port(handle);
    lc_net_tcp.close_listen(listen);
    relay_target(relay, port);
    pair = pair_open(ctx, relay_port(relay));
    return pair;
}

/* Headers come in pieces of one byte, so that every place where reading can stop is met. */
static void byte_by_byte(void)
{
    struct relay *relay = relay_open((struct harm){ .chunk = 1 });
    struct pair pair = open_through(relay);

    pair_stream(&pair, 60, 300, 8, 3);
    pair_close(&pair);
    relay_close(relay);
}

/* The first sockets of a connection end after every number of bytes: within hello, reply, headers and payloads. */
static void cut_at_every_offset(uint64_t from, uint64_t to, uint64_t step)
{
    for (uint64_t at = from; at < to; at += step) {
        struct relay *relay = relay_open((struct harm){ .cut_at = at, .cuts = 3 });
        struct pair pair = open_through(relay);

        pair_stream(&pair, 12, 400, 4, (unsigned)at);
        pair_close(&pair);
        relay_close(relay);
    }
}

static void cut_within_long_messages(void)
{
    unsigned cuts = 0;

    for (uint64_t at = 1000; at < 2000000; at = at * 5 / 3) {
        struct relay *relay = relay_open((struct harm){ .cut_at = at, .cuts = 6 });
        struct pair pair = open_through(relay);

        pair_stream(&pair, 10, 700000, 4, (unsigned)at);
        cuts += relay_cuts(relay);
        pair_close(&pair);
        relay_close(relay);
    }
    CHECK(cuts > 0); /* how much passes through each socket is chance */
}

static void random_kills_change_no_byte(unsigned seconds)
{
    struct relay *relay = relay_open((struct harm){ .kill_us = 20000 });
    struct pair pair = open_through(relay);
    struct lc_deadline end = lc_deadline_in_ms(seconds * 1000);
    unsigned seed = 7;

    do {
        pair_stream(&pair, 60, 500000, 16, seed++);
    } while (!lc_deadline_passed(end) || relay_cuts(relay) < 10 || atomic_load(&engine.resent) < 5);
    relay_stop_killing(relay);
    pair_close(&pair);
    relay_close(relay);
}

static void *stream(void *pair)
{
    pair_stream(pair, 60, 131072, 8, 9);
    return NULL;
}

/* Where several connections send, others take messages from NCCL's thread, and it takes them back. */
static void random_kills_of_two_connections_change_no_byte(void)
{
    struct relay *relay = relay_open((struct harm){ .chunk = 40000, .kill_us = 3000 });
    struct pair pairs[2] = { open_through(relay), open_through(relay) };
    pthread_t thread;

    CHECK(pthread_create(&thread, NULL, stream, &pairs[0]) == 0);
    stream(&pairs[1]);
    pthread_join(thread, NULL);
    relay_stop_killing(relay);
    pair_close(&pairs[0]);
    pair_close(&pairs[1]);
    relay_close(relay);
}

/* Sockets that end and cannot be replaced: the others bring what those have lost. */
static void one_socket_is_enough(int sockets)
{
    struct relay *relay = relay_open((struct harm){ 0 });
    struct pair pair = open_through(relay);
    unsigned long before = atomic_load(&engine.resent);
    unsigned seed = 50;

    /* All have to be there before some of them go. */
    while (relay_links(relay) < (unsigned)sockets)
        pair_stream(&pair, 2, 100, 2, seed++);
    relay_refuse(relay, true);
    for (int left = sockets - 1; left > 0; left--) {
        relay_kill_when_busy(relay);
        pair_stream(&pair, 30, 500000, 16, seed++);
        CHECK(relay_links(relay) == (unsigned)left);
    }
    CHECK(sockets == 1 || atomic_load(&engine.resent) > before);
    relay_refuse(relay, false);
    pair_close(&pair);
    relay_close(relay);
}

/* Of both ends all sockets: a pair is open with any of them, and lane 0 need not be the first. */
static void wait_until_up(const struct pair *pair)
{
    struct conn *const ends[] = { (struct conn *)pair->send, (struct conn *)pair->recv };
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

    for (int i = 0; i < 2; i++) {
        int up = 0;

        while (up < ends[i]->n_lanes) {
            pthread_mutex_lock(&ends[i]->lock);
            up = ends[i]->n_up;
            pthread_mutex_unlock(&ends[i]->lock);
            CHECK(!lc_deadline_passed(end));
            sched_yield();
        }
    }
}

/* Short sends are over before they have come. What a socket loses of them is sent again though the sender, which has
 * nothing left to ask about, calls no more. */
static void lost_short_messages_need_no_call(void)
{
    enum {
        MESSAGES = LC_TCP_EARLY * 3 / 4,
        SIZE = 8000
    };
    struct pair pair = pair_open(ctx, 0);
    struct lane *lane = &((struct conn *)pair.recv)->lanes[0];
    static unsigned char from[SIZE];
    static unsigned char to[SIZE];

    wait_until_up(&pair);
    pthread_mutex_lock(&lane->io); /* nobody reads */
    for (int i = 0; i < MESSAGES; i++) {
        struct lc_net_request *send;

        memset(from, i + 1, SIZE);
        CHECK(lc_net_tcp.isend(pair.send, from, SIZE, 0, NULL, &send) == 0 && send);
        pair_wait(send, NULL, NULL, NULL);
    }
    lane_break(lane, "lost with all that has come");
    pthread_mutex_unlock(&lane->io);
    for (int i = 0; i < MESSAGES; i++) {
        struct lc_net_request *recv;
        void *at = to;
        size_t room = SIZE;
        int tag = 0;

        CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
        pair_wait(NULL, recv, NULL, NULL);
        CHECK(to[0] == i + 1 && to[SIZE - 1] == i + 1);
    }
    pair_close(&pair);
}

/* So that what is sent goes through lane 0, which nobody else can have. */
static void hold_siblings(struct conn *conn)
{
    for (int i = 1; i < conn->n_lanes; i++)
        pthread_mutex_lock(&conn->lanes[i].io);
}

static void let_siblings(struct conn *conn)
{
    for (int i = 1; i < conn->n_lanes; i++) {
        pthread_mutex_unlock(&conn->lanes[i].io);
        lane_kick(&conn->lanes[i], 1); /* for what was told of meanwhile */
    }
}

/* Where one connection alone sends, messages that are not so short are over, too, when they have gone through lane 0. What is
 * sent again is what they were then. */
static void lost_copied_messages_are_what_they_were(void)
{
    enum {
        BEFORE = 6,                     /* that nothing else is sent is known after some */
        SIZE = LC_TCP_EARLY_MAX + 3000, /* in one piece */
    };
    struct pair pair = pair_open(ctx, 0);
    struct lane *lane = &((struct conn *)pair.recv)->lanes[0];
    struct lc_net_request *recvs[LC_TCP_KEPT];
    static unsigned char from[SIZE];
    static unsigned char to[LC_TCP_KEPT][SIZE];

    for (int i = 0; i < BEFORE; i++)
        pair_send(&pair, from, SIZE, to[0], SIZE);
    wait_until_up(&pair);
    for (int i = 0; i < LC_TCP_KEPT; i++) {
        void *at = to[i];
        size_t room = SIZE;
        int tag = 0;

        CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recvs[i]) == 0 && recvs[i]);
    }
    pthread_mutex_lock(&lane->io); /* nobody reads, nobody confirms */
    for (int i = 0; i < LC_TCP_KEPT; i++) {
        struct lc_net_request *send;
        bool lost = i < LC_TCP_KEPT / 2;

        memset(from, i + 1, SIZE);
        if (lost)
            hold_siblings((struct conn *)pair.send);
        CHECK(lc_net_tcp.isend(pair.send, from, SIZE, 0, NULL, &send) == 0 && send);
        pair_wait(send, lost ? NULL : recvs[i], NULL, NULL);
        if (lost)
            let_siblings((struct conn *)pair.send);
        if (i + 1 < LC_TCP_KEPT / 2)
            continue;
        memset(from, 0xee, SIZE);
        if (lost) {
            lane_break(lane, "lost with all that has come");
            pthread_mutex_unlock(&lane->io);
            for (int k = 0; k <= i; k++)
                pair_wait(NULL, recvs[k], NULL, NULL);
        }
    }
    for (int i = 0; i < LC_TCP_KEPT; i++) {
        for (int k = 0; k < SIZE; k++)
            CHECK(to[i][k] == i + 1);
    }
    pair_close(&pair);
}

/* With io held. Another lane may be the first to take it. */
static void say_control(struct lane *lane)
{
    do {
        conn_lock(lane->conn);
        lane->conn->dirty = true;
        conn_unlock(lane->conn);
        conn_fill_batch(lane);
    } while (lane->iov_n == 0);
    CHECK(writev(lane->fd, lane->iov, lane->iov_n) > 0);
    lane->iov_n = 0;
    atomic_store(&lane->reading, UINT64_MAX);
}

static void wait_until_told(struct lane *lane)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

    while (!atomic_load(&lane->again)) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

static void send_short(struct pair *pair, unsigned char value)
{
    unsigned char from[8];
    struct lc_net_request *send;

    memset(from, value, sizeof(from));
    CHECK(lc_net_tcp.isend(pair->send, from, sizeof(from), 0, NULL, &send) == 0 && send);
    pair_wait(send, NULL, NULL, NULL);
}

static void receive_short(struct pair *pair, unsigned char value)
{
    unsigned char to[8];
    void *at = to;
    size_t room = sizeof(to);
    struct lc_net_request *recv;
    int tag = 0;

    CHECK(lc_net_tcp.irecv(pair->recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    pair_wait(NULL, recv, NULL, NULL);
    CHECK(to[0] == value && to[sizeof(to) - 1] == value);
}

/* The end of a socket is told of once, here while another thread holds the lane, and behind a CONTROL that has not been
 * read. The messages that were lost with it have to come though the sender calls no more. */
static void end_behind_control_is_seen(void)
{
    struct pair pair = pair_open(ctx, 0);
    struct lane *far = &((struct conn *)pair.recv)->lanes[0];
    struct lane *lane = &((struct conn *)pair.send)->lanes[0];

    wait_until_up(&pair);
    pthread_mutex_lock(&far->io); /* nobody reads */
    for (unsigned char i = 1; i <= 4; i++)
        send_short(&pair, i);
    pthread_mutex_lock(&lane->io);
    say_control(far);
    lane_break(far, "lost with all that has come");
    pthread_mutex_unlock(&far->io);
    wait_until_told(lane);
    lane_unlock(lane);
    for (unsigned char i = 1; i <= 4; i++)
        receive_short(&pair, i);
    pair_close(&pair);
}

static bool has_lost_its_socket(struct lane *lane)
{
    bool lost;

    conn_lock(lane->conn);
    lost = lane->lost > 0;
    conn_unlock(lane->conn);
    return lost;
}

/* Who holds the lane only writes, and the write does not fail. Where the pool is first, there is nothing to write to until
 * the receiver's lane is free for the next socket. */
static void end_is_seen_beside_a_write(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.send;
    struct lane *far = &((struct conn *)pair.recv)->lanes[0];
    unsigned char from[8];
    struct lc_net_request *send;
    bool sent = false;

    memset(from, 5, sizeof(from));

    wait_until_up(&pair);
    pthread_mutex_lock(&far->io);
    pthread_mutex_lock(&conn->lanes[0].io);
    CHECK(shutdown(far->fd, SHUT_WR) == 0);
    wait_until_told(&conn->lanes[0]);
    pthread_mutex_unlock(&conn->lanes[0].io); /* has looked last before that */
    CHECK(lc_net_tcp.isend(pair.send, from, sizeof(from), 0, NULL, &send) == 0 && send);
    while (!sent && !has_lost_its_socket(&conn->lanes[0])) {
        CHECK(lc_net_tcp.test(send, &sent, NULL) == 0);
        CHECK(!lc_deadline_passed(end));
    }
    pthread_mutex_unlock(&far->io);
    while (!has_lost_its_socket(&conn->lanes[0])) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    pair_wait(sent ? NULL : send, NULL, NULL, NULL);
    receive_short(&pair, 5);
    pair_close(&pair);
}

static int count_announced(struct conn *conn, uint64_t *up)
{
    int n = 0;

    conn_lock(conn);
    for (int i = 1; i < conn->n_lanes; i++)
        n += !conn->lanes[i].up && conn->lanes[i].announced_by == 0;
    *up = (uint64_t)conn->n_up;
    conn_unlock(conn);
    return n;
}

enum {
    LOST = 3,
    LOST_BYTES = 8000 /* more than a piece together, so that other sockets take part */
};

/* Both ends know of the receives, then the first socket is held so that the others take all. */
static void send_past_the_first(struct pair *pair)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct conn *near = (struct conn *)pair->send;
    static unsigned char from[LOST][LOST_BYTES];
    struct lc_net_request *send[LOST];
    uint64_t credit = 0;

    while (credit < LOST) {
        lane_kick(&near->lanes[0], 1);
        conn_lock(near);
        credit = near->credit;
        conn_unlock(near);
        CHECK(!lc_deadline_passed(end));
    }
    for (int i = 0; i < near->n_lanes; i++)
        pthread_mutex_lock(&((struct conn *)pair->recv)->lanes[i].io);
    pthread_mutex_lock(&near->lanes[0].io);
    for (int i = 0; i < LOST; i++) {
        memset(from[i], i + 1, LOST_BYTES);
        CHECK(lc_net_tcp.isend(pair->send, from[i], LOST_BYTES, 0, NULL, &send[i]) == 0 && send[i]);
    }
    /* A lane that was still looking around may have taken the first before the others came, which alone would be left to
     * lane 0. */
    for (int i = 0; i < LOST; i++) {
        for (bool sent = false; !sent; sched_yield()) {
            conn_wake_lanes(near, &near->lanes[0]);
            CHECK(lc_net_tcp.test(send[i], &sent, NULL) == 0);
            CHECK(!lc_deadline_passed(end));
        }
    }
}

/* All but the first, unread, and no new ones can be had. */
static void lose_the_others(struct pair *pair, struct relay *relay)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct conn *near = (struct conn *)pair->send;
    struct conn *far = (struct conn *)pair->recv;
    uint64_t up;

    relay_refuse(relay, true);
    lane_unlock(&near->lanes[0]);
    for (int i = 1; i < far->n_lanes; i++) {
        lane_break(&far->lanes[i], "lost with all that has come");
        pthread_mutex_unlock(&far->lanes[i].io);
    }
    while (count_announced(near, &up) < near->n_lanes - 1) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    /* Whoever wrote that has let go of the lane. */
    pthread_mutex_lock(&near->lanes[0].io);
    lane_unlock(&near->lanes[0]);
    lane_unlock(&far->lanes[0]);
}

/* What was lost is known by the answer over the only socket that is left, which the sender's caller reads no more. */
static void the_last_socket_is_read_without_a_call(void)
{
    struct relay *relay = relay_open((struct harm){ 0 });
    struct pair pair = open_through(relay);
    static unsigned char to[LOST][LOST_BYTES];
    struct lc_net_request *recv[LOST];

    wait_until_up(&pair);
    for (int i = 0; i < LOST; i++) {
        void *at = to[i];
        size_t room = LOST_BYTES;
        int tag = 0;

        CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv[i]) == 0 && recv[i]);
    }
    send_past_the_first(&pair);
    lose_the_others(&pair, relay);
    for (int i = 0; i < LOST; i++) {
        pair_wait(NULL, recv[i], NULL, NULL);
        CHECK(to[i][0] == i + 1 && to[i][LOST_BYTES - 1] == i + 1);
    }
    relay_refuse(relay, false);
    pair_close(&pair);
    relay_close(relay);
}

static void set_buffers(struct pair *pair, int bytes)
{
    CHECK(setsockopt(((struct conn *)pair->send)->lanes[0].fd, SOL_SOCKET, SO_SNDBUF, &bytes,
                     sizeof(bytes)) == 0);
    CHECK(setsockopt(((struct conn *)pair->recv)->lanes[0].fd, SOL_SOCKET, SO_RCVBUF, &bytes,
                     sizeof(bytes)) == 0);
}

static void say_control_of(struct pair *pair)
{
    struct lane *far = &((struct conn *)pair->recv)->lanes[0];

    pthread_mutex_lock(&far->io);
    say_control(far);
    pthread_mutex_unlock(&far->io);
}

static struct lc_net_request *post_recv(struct pair *pair, void *to, size_t room)
{
    struct lc_net_request *recv;
    int tag = 0;

    CHECK(lc_net_tcp.irecv(pair->recv, 1, &to, &room, &tag, NULL, &recv) == 0 && recv);
    return recv;
}

static struct lc_net_request *post_send(struct pair *pair, void *from, size_t size)
{
    struct lc_net_request *send;

    CHECK(lc_net_tcp.isend(pair->send, from, size, 0, NULL, &send) == 0 && send);
    return send;
}

/* Its place is free when the sender has read that it was confirmed. */
static void post_in_place_of(struct pair *pair, const struct lc_net_request *over, void *from,
                             size_t size)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_net_request *send = NULL;

    while (!send) {
        CHECK(lc_net_tcp.isend(pair->send, from, size, 0, NULL, &send) == 0);
        CHECK(!lc_deadline_passed(end));
    }
    CHECK(send == over);
}

static void wait_for_credit(struct conn *conn, uint64_t receives)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    uint64_t credit = 0;

    while (credit < receives) {
        (void)lane_kick(&conn->lanes[0], 1);
        conn_lock(conn);
        credit = conn->credit;
        conn_unlock_unchanged(conn);
        CHECK(!lc_deadline_passed(end));
    }
}

/* Two messages are one batch, and the rest of the second has no room until the first is over: its buffer is gone, or its place
 * is another message's. */
static void a_message_that_is_over_before_the_rest_of_its_batch_is_left_alone(bool copied)
{
    enum {
        REST = 16 << 20,
        COPIED = LC_TCP_EARLY_MAX + 3000
    };
    static unsigned char to[COPIED], rest[REST], rest_to[REST];
    unsigned char *from = mmap(NULL, COPIED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                               -1, 0);
    size_t size = copied ? COPIED : 8;
    uint32_t piece = engine.piece;
    struct lc_net_request *recvs[2], *first, *second;
    struct conn *conn;
    struct pair pair;

    engine.piece = 4 << 20;
    pair = pair_open_narrow(ctx, 0);
    conn = (struct conn *)pair.send;
    CHECK(from != MAP_FAILED);
    for (int i = 0; i < 6; i++) /* after some it is known that nothing else is sent */
        pair_send(&pair, from, COPIED, to, COPIED);
    memset(rest, 7, REST);
    set_buffers(&pair, 65536);
    recvs[0] = post_recv(&pair, to, size);
    recvs[1] = post_recv(&pair, rest_to, REST);
    say_control_of(&pair);
    wait_for_credit(conn, 8);
    pthread_mutex_lock(&conn->lanes[0].io); /* so that they are one batch */
    first = post_send(&pair, from, size);
    second = post_send(&pair, rest, REST);
    lane_unlock(&conn->lanes[0]);
    pair_wait(NULL, recvs[0], NULL, NULL);
    say_control_of(&pair);
    pair_wait(first, NULL, NULL, NULL);
    CHECK(munmap(from, COPIED) == 0);
    for (int i = 0; !copied && i < LC_TCP_WINDOW - 2; i++)
        (void)post_send(&pair, to, 8);
    if (!copied)
        post_in_place_of(&pair, first, rest, REST);
    set_buffers(&pair, 1 << 22);
    pair_wait(second, recvs[1], NULL, NULL);
    CHECK(memcmp(rest, rest_to, REST) == 0);
    pair_close(&pair);
    engine.piece = piece;
}

int main(int argc, char **argv)
{
    bool soak = getenv("LCTEST_SOAK") != NULL;
    bool quick = argc > 2; /* for many runs, whose threads meet differently */
    int sockets = argc > 1 ? atoi(argv[1]) : 3;

    tcp_settings(sockets, 16384, 60);
    lc_log_set_level(LC_LOG_ERROR);
    CHECK(lc_net_tcp.init(&(struct lc_net_options){ .traffic_class = -1 }, &ctx) == 0 && ctx);
    if (!quick) {
        byte_by_byte();
        cut_within_long_messages();
    }
    cut_at_every_offset(1, 400, soak ? 1 : quick ? 27 : 9);
    lost_short_messages_need_no_call();
    lost_copied_messages_are_what_they_were();
    a_message_that_is_over_before_the_rest_of_its_batch_is_left_alone(true);
    a_message_that_is_over_before_the_rest_of_its_batch_is_left_alone(false);
    end_behind_control_is_seen();
    end_is_seen_beside_a_write();
    if (sockets > 1)
        the_last_socket_is_read_without_a_call();
    if (!quick)
        one_socket_is_enough(sockets);
    random_kills_of_two_connections_change_no_byte();
    random_kills_change_no_byte(quick ? 0 : soak ? 60 : 2);
    lc_net_tcp.fini(ctx);
    return 0;
}
