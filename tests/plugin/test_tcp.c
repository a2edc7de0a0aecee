/* SPDX-License-Identifier: Apache-2.0
 *
 * The TCP transport over loopback, without harm. */
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/wire.h"

#include <errno.h>
#include <sched.h>
#include <string.h>

static struct lc_net_context *ctx;

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
    wait_done(send, 100);
    if (early)
        CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
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

#define SHORT 20

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
    static const size_t sizes[] = { 1, 0, LC_TCP_EARLY_MAX, 55, 4096 };

    return sizes[i % 5];
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

/* Slowly, so that it is still under way when the sender is closed. */
static void what_was_sent_arrives_after_the_sender_was_closed(void)
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
    for (int i = 0; i < SHORT; i++)
        expect_short(&pair, i, short_size(i));
    if (lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0)
        CHECK(wait_error(recv) == -EREMOTEIO);
    lc_net_tcp.close_recv(pair.recv);
    relay_close(relay);
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
    tcp_settings(argc > 1 ? atoi(argv[1]) : 3, 131072, 60);
    lc_log_set_level(LC_LOG_ERROR);
    CHECK(lc_net_tcp.init(&(struct lc_net_options){ .traffic_class = -1 }, &ctx) == 0 && ctx);
    loopback_is_the_one_device();
    every_size_arrives_as_it_is();
    many_in_flight_arrive_in_order();
    the_window_is_wide_enough_and_bounded();
    a_message_too_long_fails_both_sides_and_writes_nothing();
    a_short_message_too_long_fails_both_sides_too(false);
    a_short_message_too_long_fails_both_sides_too(true);
    short_messages_do_not_wait_for_their_receives();
    what_was_sent_arrives_after_the_sender_was_closed();
    closing_one_side_fails_the_other();
    bad_arguments_are_refused();
    connections_come_and_go();
    lc_net_tcp.fini(ctx);
    lc_net_tcp.fini(NULL);
    return 0;
}
