/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/exchange_internal.h"
#include "kernels/list_internal.h"

#include <errno.h>

_Static_assert(sizeof(struct lk_exchange_entry) == 24, "the size of a message in arguments");
_Static_assert(sizeof(struct lk_exchange_head) % 8 == 0, "entries follow the head without a gap");
_Static_assert(LK_EXCHANGE_MAX >= 2 * LK_RANKS_MAX - 1, "one message of each pair in a launch");

/* Both lists of a call. */
struct call {
    const struct lk_message *sends, *recvs;
    size_t n_sends, n_recvs;
    uint32_t rank;
};

static uint32_t most(uint32_t ranks)
{
    return LK_EXCHANGE_MAX / (2 * ranks - 1); /* copies need one entry for two messages */
}

LK_API uint32_t lk_exchange_most(const struct lk_ring_shape *shape)
{
    return lk_ring_bytes(shape) ? most(shape->ranks) : 0;
}

static bool good_mask(const struct lk_row_mask *mask)
{
    uint64_t bytes, end;

    return !mask->rows ||
           (mask->base && mask->bits && !((uintptr_t)mask->bits & 3) && mask->row_bytes &&
            !__builtin_mul_overflow(mask->rows, mask->row_bytes, &bytes) &&
            !__builtin_add_overflow((uintptr_t)mask->base, bytes, &end));
}

/* No part of the message is in the mask's buffer, or all of it. */
static bool one_side(const struct lk_row_mask *mask, const struct lk_message *message)
{
    uint64_t begin = (uintptr_t)message->address, end = begin + message->bytes;
    uint64_t base = (uintptr_t)mask->base, over = base + mask->rows * mask->row_bytes;

    return !mask->rows || end <= base || begin >= over || (begin >= base && end <= over);
}

static bool good_messages(const struct lk_message *list, size_t n, uint32_t ranks,
                          const struct lk_row_mask *mask)
{
    if (!list && n)
        return false;
    for (size_t i = 0; i < n; i++) {
        uint64_t end;

        if (!list[i].bytes)
            continue;
        if (list[i].peer >= ranks || !list[i].address ||
            __builtin_add_overflow((uintptr_t)list[i].address, list[i].bytes, &end) ||
            (mask && (list[i].scan > 1 || !one_side(mask, &list[i]))))
            return false;
    }
    return true;
}

/* The next message of a list from or to `peer`; i: n at the end. */
static size_t find(const struct lk_message *list, size_t n, size_t i, uint32_t peer)
{
    while (i < n && (!list[i].bytes || list[i].peer != peer))
        i++;
    return i;
}

/* Sends to this rank itself and receives from it go in pairs of one size. */
static bool good_copies(const struct call *call)
{
    size_t s = find(call->sends, call->n_sends, 0, call->rank);
    size_t r = find(call->recvs, call->n_recvs, 0, call->rank);

    while (s < call->n_sends && r < call->n_recvs && call->sends[s].bytes == call->recvs[r].bytes) {
        s = find(call->sends, call->n_sends, s + 1, call->rank);
        r = find(call->recvs, call->n_recvs, r + 1, call->rank);
    }
    return s == call->n_sends && r == call->n_recvs;
}

/* What a launch has of a list: the messages numbered `begin` .. `begin + count` of each peer, sorted by peer. */
struct window {
    uint64_t begin;
    uint32_t count;
    uint32_t ranks;
    uint64_t seen[LK_RANKS_MAX];
    uint16_t place[LK_RANKS_MAX]; /* of the next one */
};

/* Sets the borders of each peer's entries; those of `without` have none. Returns where they end. */
static uint16_t set_borders(struct window *w, const struct lk_message *list, size_t n, uint16_t at,
                            uint32_t without, uint16_t *borders)
{
    memset(w->seen, 0, sizeof(w->seen));
    for (size_t i = 0; i < n; i++)
        w->seen[list[i].bytes ? list[i].peer : 0] += list[i].bytes != 0;
    for (uint32_t p = 0; p < w->ranks; p++) {
        uint64_t left = w->seen[p] > w->begin && p != without ? w->seen[p] - w->begin : 0;

        borders[p] = w->place[p] = at;
        at += (uint16_t)(left < w->count ? left : w->count);
    }
    for (uint32_t p = w->ranks; p <= LK_RANKS_MAX; p++)
        borders[p] = at;
    memset(w->seen, 0, sizeof(w->seen));
    return at;
}

/* The entry of the next message of a list: UINT16_MAX: it has none in this launch. */
static uint16_t next_entry(struct window *w, const struct lk_message *message)
{
    uint64_t number;

    if (!message->bytes)
        return UINT16_MAX;
    number = w->seen[message->peer]++;
    if (number < w->begin || number - w->begin >= w->count)
        return UINT16_MAX;
    return w->place[message->peer]++;
}

static void set_sends(struct window *w, const struct call *call, struct lk_exchange_launch *launch)
{
    for (size_t i = 0; i < call->n_sends; i++) {
        const struct lk_message *m = &call->sends[i];
        uint16_t at = next_entry(w, m);

        if (at != UINT16_MAX)
            launch->entries[at] = (struct lk_exchange_entry){
                .address = (uintptr_t)m->address,
                .bytes = m->bytes,
                .other = m->scan,
            };
    }
}

static void set_recvs(struct window *w, const struct call *call, struct lk_exchange_launch *launch)
{
    w->place[call->rank] = launch->head.sends[call->rank];
    for (size_t i = 0; i < call->n_recvs; i++) {
        const struct lk_message *m = &call->recvs[i];
        uint16_t at = next_entry(w, m);

        if (at == UINT16_MAX)
            continue;
        if (m->peer == call->rank)
            launch->entries[at].other = (uintptr_t)m->address;
        else
            launch->entries[at] = (struct lk_exchange_entry){
                .address = (uintptr_t)m->address,
                .bytes = m->bytes,
            };
    }
}

/* The launch with the messages from number `begin` on of each pair. False: there are none left. */
static bool make_launch(const struct call *call, uint64_t begin, struct lk_exchange_launch *launch)
{
    struct lk_exchange_head *head = &launch->head;
    uint32_t ranks = head->rings.shape.ranks;
    struct window w = { .begin = begin, .count = most(ranks), .ranks = ranks };
    uint16_t at = set_borders(&w, call->sends, call->n_sends, 0, UINT32_MAX, head->sends);

    set_sends(&w, call, launch);
    at = set_borders(&w, call->recvs, call->n_recvs, at, call->rank, head->takes);
    set_recvs(&w, call, launch);
    return at > 0;
}

LK_API int lk_rings_exchange(const struct lk_rings *rings, const struct lk_message *sends,
                             size_t n_sends, const struct lk_message *recvs, size_t n_recvs,
                             const struct lk_row_mask *mask, uint32_t ctas, void *stream)
{
    const struct lk_row_mask none = { 0 };
    struct call call = { sends, recvs, n_sends, n_recvs, rings->rank };
    struct lk_exchange_launch launch;
    int err = 0;

    mask = mask ? mask : &none;
    if (!ctas || !lk_good_rings(rings) || !good_mask(mask) ||
        !good_messages(sends, n_sends, rings->shape.ranks, mask) ||
        !good_messages(recvs, n_recvs, rings->shape.ranks, NULL) || !good_copies(&call))
        return -EINVAL;
    launch.head = (struct lk_exchange_head){
        .rings = *rings,
        .mask = *mask,
        .ctas = ctas < rings->shape.channels ? ctas : rings->shape.channels,
    };
    for (uint64_t begin = 0; !err && make_launch(&call, begin, &launch);
         begin += most(rings->shape.ranks))
        err = lk_run_exchange(&launch, stream);
    return err;
}
