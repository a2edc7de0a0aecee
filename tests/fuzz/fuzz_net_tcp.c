/* SPDX-License-Identifier: Apache-2.0
 *
 * Whatever comes to the TCP transport: the first byte chooses who hears the rest.
 *   0: a receiver with posted receives, 1: a sender with messages, 2: the reader of a handle, a hello and a reply
 * Frames are made from the input so that the fuzzer need not learn magic and lengths; some are passed as they are. No
 * thread runs and no socket is open: the harness puts bytes where a read would have put them. */
#include "plugin/net/tcp/tcp_internal.h"

#include "common/log.h"
#include "tests/fuzz/input.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define POSTED 6     /* at first */
#define MORE   40    /* and so many on the way: what came before its receive is taken then */
#define ROOM   9000  /* more than a block, and than may come early */
#define BODY   16384 /* of a frame, at most */

static void post(struct conn *conn, unsigned char *buffers)
{
    uint64_t i = conn->posted++;

    conn->ring[i] = (struct lc_net_request){ .conn = conn,
                                             .data = buffers + (size_t)i * ROOM,
                                             .seq = i,
                                             .size = i % POSTED * ROOM / (POSTED - 1),
                                             .used = true };
    if (!conn->sends)
        conn_take_early(conn, &conn->ring[i]);
}

/* A map, and as many bytes as it says. */
static size_t make_sparse(struct input *in, size_t length, unsigned char *out)
{
    size_t size = lc_tcp_map_size(length);
    size_t at = 0;
    size_t run;

    take(in, out, size);
    if (take_byte(in) & 1)
        out[size - 1] &= 1; /* more often one that is sane */
    for (; lc_tcp_map_next(out, length, &at, &run); at += run) {
        memset(out + size, 0x5a, run);
        take(in, out + size, run < 4 ? run : 4);
        size += run;
    }
    return size;
}

/* Mostly sane numbers; the flags choose what is left as it came. */
static size_t make_frame(struct input *in, struct conn *conn, struct lane *lane, unsigned char *out)
{
    struct lc_tcp_frame f = { .magic = LC_TCP_FRAME_MAGIC };
    uint8_t flags = take_byte(in);
    size_t body;

    f.type = (uint8_t)(take_byte(in) % LC_TCP_FRAMES);
    f.lane = take_byte(in) & 3;
    f.seq = take_byte(in) % (POSTED + MORE);
    f.size = take_byte(in) * 2u << (flags & 16 ? 5 : 0);
    f.offset = take_byte(in) * 2u << (flags & 16 ? 5 : 0);
    f.length = (uint64_t)take_byte(in) << (flags & 16 ? 6 : 0);
    f.number = flags & 1 ? take_byte(in) : lane->count + 1;
    f.arg = flags & 2 ? take_byte(in) : (uint32_t)conn->n_lanes;
    if (f.type == LC_TCP_CONTROL && !(flags & 4)) {
        f.size = f.seq + f.size % 8;
        f.length = f.arg * sizeof(struct lc_tcp_lane_word) + (f.size - f.seq) * 8;
    }
    if (flags & 8)
        take(in, (char *)&f + take_byte(in) % (sizeof(f) - 7), 8);
    if (f.type == LC_TCP_PIECE && !(flags & 2))
        f.arg = (flags & 32 ? LC_TCP_SPARSE : 0) | (flags & 64 ? LC_TCP_COPIED : 0);
    if (f.type == LC_TCP_PIECE && (flags & 192) == 64) { /* a whole message, which it has to be */
        f.offset = 0;
        f.length = f.size;
    }
    memcpy(out, &f, sizeof(f));
    body = f.length < BODY ? (size_t)f.length : BODY;
    if (f.type == LC_TCP_PIECE && f.arg & LC_TCP_SPARSE && body)
        return sizeof(f) + make_sparse(in, body, out + sizeof(f));
    take(in, out + sizeof(f), body);
    return sizeof(f) + body;
}

/* As read_some does: first into the payload's place, then into the lane's buffer. */
static int give(struct lane *lane, const unsigned char *bytes, size_t size)
{
    while (size) {
        size_t room = lane->dst_left ? lane->dst_left : sizeof(lane->in) - lane->in_end;
        size_t n = size < room ? size : room;

        if (n == 0)
            abort(); /* a lane that waits for ever */
        if (lane->dst_left) {
            memcpy(lane->dst, bytes, n);
            lane_took(lane, n);
        } else {
            memcpy(lane->in + lane->in_end, bytes, n);
            lane->in_end += n;
        }
        bytes += n;
        size -= n;
        if (lane_parse(lane) != 0)
            return -1;
    }
    return 0;
}

static void hear(struct input *in, bool sends)
{
    unsigned char *buffers = calloc(POSTED + MORE,
                                    ROOM); /* of its own, so that a byte beyond is seen */
    struct conn *conn = conn_new(sends, 0, 3, LC_TCP_PIECE_MIN);
    unsigned char bytes[sizeof(struct lc_tcp_frame) + BODY + LC_TCP_MAP_BYTES];

    if (!buffers || !conn)
        abort();
    for (unsigned i = 0; i < POSTED; i++)
        post(conn, buffers);
    for (int i = 0; i < conn->n_lanes; i++) {
        conn->lanes[i].up = true;
        conn->lanes[i].epoch = 1;
        conn->n_up++;
    }
    conn->closing = true; /* so that nothing is logged */
    while (in->size) {
        struct lane *lane = &conn->lanes[take_byte(in) % 3];
        size_t n = make_frame(in, conn, lane, bytes);

        conn->lanes[1].up = take_byte(in) & 1;
        conn->lanes[1].settled = take_byte(in) & 1;
        if (take_byte(in) % 4 == 0 && conn->posted < POSTED + MORE)
            post(conn, buffers);
        if (give(lane, bytes, n) != 0)
            break;
        if (sends) {
            conn_fill_batch(lane);
            lane->iov_n = 0;
        }
    }
    conn_unref(conn);
    free(buffers);
}

static void read_greetings(struct input *in)
{
    struct lc_tcp_handle handle;
    struct lc_tcp_hello hello;
    struct lc_tcp_reply reply;
    union lc_tcp_address address;
    char text[LC_TCP_ADDRESS_TEXT];
    unsigned char bytes[LC_NET_HANDLE_BYTES];

    take(in, bytes, sizeof(bytes));
    if (take_byte(in) & 1) {
        struct lc_tcp_handle made = { .magic = LC_TCP_MAGIC, .version = LC_TCP_VERSION };

        memcpy(bytes, &made, offsetof(struct lc_tcp_handle, token));
    }
    if (lc_tcp_handle_read(bytes, &handle) == 0 &&
        lc_tcp_address_read(&handle.address, 1, &address) == 0)
        (void)lc_tcp_address_text(&address, text);
    take(in, &hello, sizeof(hello));
    (void)lc_tcp_hello_check(&hello);
    take(in, &reply, sizeof(reply));
    (void)lc_tcp_reply_check(&reply);
    take(in, text, sizeof(text));
    text[sizeof(text) - 1] = '\0';
    (void)lc_tcp_name_matches(text, "eth0");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = { data, size };

    lc_log_set_level(LC_LOG_ERROR);
    switch (take_byte(&in) % 3) {
    case 0: hear(&in, false); break;
    case 1: hear(&in, true); break;
    default: read_greetings(&in); break;
    }
    return 0;
}
