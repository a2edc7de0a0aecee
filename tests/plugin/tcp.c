/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

static void set_number(const char *name, int value)
{
    char text[16];

    (void)snprintf(text, sizeof(text), "%d", value);
    setenv(name, text, 1);
}

void tcp_settings(int sockets, int piece, int timeout_s)
{
    setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
    setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    set_number("LOONGCOMM_NET_SOCKETS", sockets);
    set_number("LOONGCOMM_NET_PIECE", piece);
    set_number("LOONGCOMM_NET_TIMEOUT", timeout_s);
}

uint16_t pair_port(const void *handle)
{
    struct lc_tcp_handle h;

    memcpy(&h, handle, sizeof(h));
    return h.address.port;
}

struct pair pair_open_narrow(struct lc_net_context *ctx, uint16_t relay_port)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_net_listen *listen;
    struct lc_tcp_handle handle;
    struct pair pair = { NULL, NULL };

    CHECK(lc_net_tcp.listen(ctx, 0, &handle, &listen) == 0);
    if (relay_port)
        handle.address.port = relay_port;
    while (!pair.send || !pair.recv) {
        if (!pair.send)
            CHECK(lc_net_tcp.connect(ctx, 0, &handle, &pair.send) == 0);
        if (!pair.recv)
            CHECK(lc_net_tcp.accept(listen, &pair.recv) == 0);
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    lc_net_tcp.close_listen(listen);
    return pair;
}

struct pair pair_open(struct lc_net_context *ctx, uint16_t relay_port)
{
    struct pair pair = pair_open_narrow(ctx, relay_port);
    struct conn *conn = (struct conn *)pair.send;
    bool wake;

    conn_lock(conn);
    wake = conn_widen(conn, UINT64_MAX);
    conn_unlock(conn);
    if (wake)
        engine_wake();
    return pair;
}

void pair_close(struct pair *pair)
{
    lc_net_tcp.close_send(pair->send);
    lc_net_tcp.close_recv(pair->recv);
    pair->send = pair->recv = NULL;
}

void pair_wait(struct lc_net_request *send, struct lc_net_request *recv, size_t *sent, size_t *got)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool send_done = !send;
    bool recv_done = !recv;

    while (!send_done || !recv_done) {
        if (!send_done)
            CHECK(lc_net_tcp.test(send, &send_done, sent) == 0);
        if (!recv_done)
            CHECK(lc_net_tcp.test(recv, &recv_done, got) == 0);
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

void pair_send(struct pair *pair, void *from, size_t size, void *to, size_t room)
{
    struct lc_net_request *recv;
    struct lc_net_request *send;
    size_t sent = 0;
    size_t got = 0;
    int tag = 0;

    CHECK(lc_net_tcp.irecv(pair->recv, 1, &to, &room, &tag, NULL, &recv) == 0 && recv);
    CHECK(lc_net_tcp.isend(pair->send, from, size, tag, NULL, &send) == 0 && send);
    pair_wait(send, recv, &sent, &got);
    CHECK(sent == size && got == size && memcmp(from, to, size) == 0);
}

struct slot {
    unsigned char *from;
    unsigned char *to;
    size_t size;
    struct lc_net_request *send;
    struct lc_net_request *recv;
    bool sent;
    bool got;
};

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void fill(unsigned char *data, size_t size, uint64_t seed)
{
    for (size_t i = 0; i < size; i++)
        data[i] = (unsigned char)(next_random(&seed) >> 8);
}

/* Sizes of all magnitudes, 0 among them. */
static size_t choose_size(uint64_t *state, size_t max)
{
    size_t size = (size_t)next_random(state) >> next_random(state) % 31;

    return size % (max + 1);
}

static void begin(struct pair *pair, struct slot *slot, uint64_t *state, size_t max, bool *later)
{
    int tag = 0;

    if (!slot->recv && !slot->send) {
        slot->size = choose_size(state, max);
        fill(slot->from, slot->size, *state);
        memset(slot->to, 0xa5, max + 1);
        slot->sent = slot->got = false;
    }
    if (!slot->recv) {
        void *to = slot->to;

        CHECK(lc_net_tcp.irecv(pair->recv, 1, &to, &max, &tag, NULL, &slot->recv) == 0);
    }
    if (!slot->send)
        CHECK(lc_net_tcp.isend(pair->send, slot->from, slot->size, tag, NULL, &slot->send) == 0);
    *later = !slot->recv || !slot->send;
}

static bool end_slot(struct slot *slot, size_t max)
{
    size_t got = 0;

    if (!slot->sent)
        CHECK(lc_net_tcp.test(slot->send, &slot->sent, NULL) == 0);
    if (!slot->got) {
        CHECK(lc_net_tcp.test(slot->recv, &slot->got, &got) == 0);
        if (slot->got) {
            CHECK(got == slot->size && memcmp(slot->from, slot->to, got) == 0);
            for (size_t i = got; i <= max; i++)
                CHECK(slot->to[i] == 0xa5);
        }
    }
    if (!slot->sent || !slot->got)
        return false;
    slot->send = slot->recv = NULL;
    return true;
}

void pair_stream(struct pair *pair, unsigned messages, size_t max, unsigned depth, unsigned seed)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct slot *slots = calloc(depth, sizeof(*slots));
    uint64_t state = seed;
    unsigned begun = 0;
    unsigned ended = 0;

    CHECK(slots);
    for (unsigned i = 0; i < depth; i++) {
        slots[i].from = malloc(max + 1);
        slots[i].to = malloc(max + 1);
        CHECK(slots[i].from && slots[i].to);
    }
    while (ended < messages) {
        while (begun < messages && begun < ended + depth) {
            bool later;

            begin(pair, &slots[begun % depth], &state, max, &later);
            if (later)
                break;
            begun++;
        }
        while (ended < begun && end_slot(&slots[ended % depth], max)) {
            ended++;
            end = lc_deadline_in_ms(PATIENCE_MS);
        }
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    for (unsigned i = 0; i < depth; i++) {
        free(slots[i].from);
        free(slots[i].to);
    }
    free(slots);
}
