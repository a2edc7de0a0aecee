/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/tcp/sparse.h"

#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <string.h>

#define LOOK     64  /* bytes that say of nearly every block with data that it has some */
#define STRIDE   256 /* of the rest so many at once: a branch costs more than to look at them */
#define RUNS     24  /* of one piece: more are sent as one with the zeros between them */
#define GAIN     8   /* a piece counts as sparse from this part of it on */
#define PATIENCE 8   /* dense pieces in a row after which nothing is looked at ... */
#define PROBE    32  /* ... but each so manieth */
#define WORTH    ((size_t)16384)

_Static_assert(LC_TCP_MAP_BYTES == LC_TCP_PIECE_MAX / LC_TCP_BLOCK / 8, "a map of any piece fits");

/* Unaligned words. */
typedef uint64_t lanes __attribute__((vector_size(32), aligned(1), may_alias));

static bool is_zero(const unsigned char *bytes, size_t n)
{
#define AT(k) (*(const lanes *)(bytes + i + (k)))
    unsigned char rest = 0;
    size_t i = 0;

    if (n >= LOOK) {
        lanes l = AT(0) | AT(32);

        if (l[0] | l[1] | l[2] | l[3])
            return false;
    }
    for (; i + STRIDE <= n; i += STRIDE) {
        lanes l = (AT(0) | AT(32) | (AT(64) | AT(96))) | (AT(128) | AT(160) | (AT(192) | AT(224)));

        if (l[0] | l[1] | l[2] | l[3])
            return false;
    }
    for (; i < n; i++)
        rest |= bytes[i];
#undef AT
    return rest == 0;
}

size_t lc_tcp_map_make(const unsigned char *data, size_t length, unsigned char *map)
{
    size_t live = 0;

    memset(map, 0, lc_tcp_map_size(length));
    for (size_t at = 0; at < length; at += LC_TCP_BLOCK) {
        size_t n = length - at < LC_TCP_BLOCK ? length - at : LC_TCP_BLOCK;
        size_t block = at / LC_TCP_BLOCK;

        if (is_zero(data + at, n))
            continue;
        map[block / 8] |= (unsigned char)(1u << block % 8);
        live += n;
    }
    return live;
}

static bool comes(const unsigned char *map, size_t block)
{
    return map[block / 8] >> block % 8 & 1;
}

bool lc_tcp_map_next(const unsigned char *map, size_t length, size_t *at, size_t *run)
{
    size_t blocks = (length + LC_TCP_BLOCK - 1) / LC_TCP_BLOCK;
    size_t first = (*at + LC_TCP_BLOCK - 1) / LC_TCP_BLOCK;
    size_t end;

    while (first < blocks && !comes(map, first))
        first++;
    if (first >= blocks)
        return false;
    for (end = first; end < blocks && comes(map, end); end++)
        ;
    *at = first * LC_TCP_BLOCK;
    *run = (end * LC_TCP_BLOCK < length ? end * LC_TCP_BLOCK : length) - *at;
    return true;
}

bool lc_tcp_map_is_sane(const unsigned char *map, size_t length)
{
    size_t blocks = (length + LC_TCP_BLOCK - 1) / LC_TCP_BLOCK;

    for (size_t block = blocks; block < 8 * lc_tcp_map_size(length); block++) {
        if (comes(map, block))
            return false;
    }
    return true;
}

void lc_tcp_map_zero(const unsigned char *map, size_t length, unsigned char *out)
{
    size_t zeros = 0; /* where they may begin */
    size_t at = 0;
    size_t run;

    while (lc_tcp_map_next(map, length, &at, &run)) {
        memset(out + zeros, 0, at - zeros);
        at += run;
        zeros = at;
    }
    memset(out + zeros, 0, length - zeros);
}

/* ---- the sender's side: the batch of a lane ---- */

/* With too many runs the last of them takes in all that is left. */
static size_t limit_runs(unsigned char *map, size_t length)
{
    size_t live = 0;
    size_t at = 0;
    size_t run;

    for (int n = 0; lc_tcp_map_next(map, length, &at, &run); n++) {
        if (n == RUNS - 1) {
            for (size_t block = at / LC_TCP_BLOCK; block * LC_TCP_BLOCK < length; block++)
                map[block / 8] |= (unsigned char)(1u << block % 8);
            return live + length - at;
        }
        live += run;
        at += run;
    }
    return live;
}

static bool may_look(struct lane *lane, size_t length)
{
    struct conn *conn = lane->conn;

    if (!engine.elide || length < WORTH)
        return false;
    return atomic_load_explicit(&conn->dense, memory_order_relaxed) < PATIENCE ||
           atomic_fetch_add_explicit(&conn->skipped, 1, memory_order_relaxed) % PROBE == 0;
}

/* Header, map and the runs of one piece, in the place of header and payload. False: not worth it. */
static bool put_sparse(struct lane *lane, struct lc_tcp_frame *head, const struct iovec *payload,
                       unsigned char *map, struct iovec *iov, int *n)
{
    size_t length = payload->iov_len;
    size_t live = lc_tcp_map_make(payload->iov_base, length, map);
    size_t at = 0;
    size_t run;

    if (live < length)
        live = limit_runs(map, length);
    if (length - live < length / GAIN) {
        atomic_fetch_add_explicit(&lane->conn->dense, 1, memory_order_relaxed);
        atomic_store_explicit(&lane->conn->sparse, false, memory_order_relaxed);
        return false;
    }
    atomic_store_explicit(&lane->conn->dense, 0, memory_order_relaxed);
    atomic_store_explicit(&lane->conn->sparse, live < length / 2, memory_order_relaxed);
    head->arg |= LC_TCP_SPARSE;
    iov[(*n)++] = (struct iovec){ head, sizeof(*head) };
    iov[(*n)++] = (struct iovec){ map, lc_tcp_map_size(length) };
    for (; lc_tcp_map_next(map, length, &at, &run); at += run)
        iov[(*n)++] = (struct iovec){ (char *)payload->iov_base + at, run };
    atomic_fetch_add_explicit(&lane->conn->elided, length - live, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine.elided, length - live, memory_order_relaxed);
    return true;
}

void lane_elide(struct lane *lane)
{
    struct iovec iov[IOVS];
    size_t map_at = 0;
    int head = 0;
    int n = 0;

    for (int i = 0; i < lane->iov_n; i++) {
        struct lc_tcp_frame *f = &lane->heads[head++];
        const struct iovec *payload = &lane->iov[i + 1];
        size_t map_size = lc_tcp_map_size((size_t)f->length);

        if (f->type != LC_TCP_PIECE || f->length == 0) {
            iov[n++] = lane->iov[i];
            if (f->length)
                iov[n++] = lane->iov[++i];
            continue;
        }
        i++;
        /* What follows still needs its places. */
        if (may_look(lane, payload->iov_len) && n + RUNS + 2 + lane->iov_n - i <= IOVS &&
            map_at + map_size <= sizeof(lane->out_map) &&
            put_sparse(lane, f, payload, lane->out_map + map_at, iov, &n)) {
            map_at += map_size;
            continue;
        }
        iov[n++] = lane->iov[i - 1];
        iov[n++] = *payload;
    }
    memcpy(lane->iov, iov, (size_t)n * sizeof(*iov));
    lane->iov_n = n;
}

/* ---- the receiver's side ---- */

static void next_run(struct lane *lane)
{
    size_t at = lane->run_at;
    size_t run;

    if (lane->dst_left || !lane->in_sparse)
        return;
    if (!lc_tcp_map_next(lane->in_map, (size_t)lane->rx.length, &at, &run)) {
        lane->in_sparse = false;
        return;
    }
    lane->dst = lane->base + at;
    lane->dst_left = run;
    lane->run_at = at + run;
}

int lane_begin_sparse(struct lane *lane, const unsigned char *map)
{
    size_t length = (size_t)lane->rx.length;

    if (!lc_tcp_map_is_sane(map, length))
        return -EPROTO;
    memcpy(lane->in_map, map, lc_tcp_map_size(length));
    lane->base = lane->dst;
    lane->run_at = 0;
    lane->dst_left = 0;
    lane->in_sparse = true;
    lc_tcp_map_zero(lane->in_map, length, lane->base);
    next_run(lane);
    return 0;
}

void lane_took(struct lane *lane, size_t n)
{
    lane->dst += n;
    lane->dst_left -= n;
    next_run(lane);
}

int lane_places(const struct lane *lane, struct iovec *iov, int most, size_t *bytes)
{
    size_t at = lane->run_at;
    size_t run;
    int n = 0;

    *bytes = 0;
    if (lane->dst_left) {
        iov[n++] = (struct iovec){ lane->dst, lane->dst_left };
        *bytes = lane->dst_left;
    }
    while (n > 0 && n < most && lane->in_sparse &&
           lc_tcp_map_next(lane->in_map, (size_t)lane->rx.length, &at, &run)) {
        iov[n++] = (struct iovec){ lane->base + at, run };
        *bytes += run;
        at += run;
    }
    return n;
}
