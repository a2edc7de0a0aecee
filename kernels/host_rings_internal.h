/* SPDX-License-Identifier: Apache-2.0
 *
 * The host library's rings: host_rings.c moves slots, host_rings_lines.c moves lines, host_rings_data.c turns elements
 * into what travels and back.
 */
#ifndef LK_HOST_RINGS_INTERNAL_H
#define LK_HOST_RINGS_INTERNAL_H

#include "kernels/host_internal.h"
#include "kernels/rings_internal.h"

#define LK_TILE_PACKS (LK_SLOT_BYTES / LK_PACK_BYTES)
#define LK_TILE_MOST  (LK_SLOT_BYTES / 2) /* elements of a tile */

/* How far one channel of a launch is; of one thread. */
struct lk_channel {
    uint32_t reduced;             /* own tiles */
    uint32_t sent[LK_RANKS_MAX];  /* contributions to each rank's tiles */
    uint32_t taken[LK_RANKS_MAX]; /* results from each rank */
    bool waits[LK_RANKS_MAX];     /* for a slot of that rank's, which has begun, too */
};

/* A launch on its stream. What is above `launch` is written when an execution begins, before its threads do. */
struct lk_job {
    float pre;
    uint64_t index;
    uint64_t tiles; /* of the space; of each part of a reduce-scatter */
    struct lk_channel *channels;
    struct lk_ring_launch launch; /* only head.n entries of it */
};

/* One thread of an execution. It takes every channel c with c % ctas == cta. */
struct lk_cta {
    struct lk_job *job;
    const struct lk_ring_head *head;
    uint32_t cta;
    uint32_t ctas;
    struct lk_ring_counts counts; /* added to the state's at the end */
    uint32_t waited;              /* for so many slots of peers that had begun */
    float sum[LK_TILE_MOST];
    uint8_t wire[LK_SLOT_BYTES] __attribute__((aligned(16))); /* what goes out */
    uint8_t in[LK_SLOT_BYTES] __attribute__((aligned(16)));   /* what came in */
};

/* ---- host_rings_data.c: a range of packs of the tile space, at most a tile ---- */

struct lk_span {
    uint32_t first;
    uint32_t packs;
};

/* This rank's contribution to `part` (0 but for a reduce-scatter), as it travels: cta->wire, padding zeroed. */
void lk_span_round(struct lk_cta *cta, struct lk_span span, uint32_t part);

/* cta->sum = or += that contribution before rounding, or what `wire` holds. */
void lk_span_own(struct lk_cta *cta, struct lk_span span, uint32_t part, bool add);
void lk_span_add(struct lk_cta *cta, struct lk_span span, const uint8_t *wire, bool add);

/* cta->wire = the result for this rank's part, from cta->sum. */
void lk_span_result(struct lk_cta *cta, struct lk_span span, uint32_t part);

/* The outputs from what `wire` holds. */
void lk_span_store(const struct lk_cta *cta, struct lk_span span, const uint8_t *wire);

/* ---- host_rings.c ---- */

/* Declares that the units of a leg are used: calls of a rank have to run one after another, those of exchanges beside those
 * of reductions. Whoever checks buffers in use sees to it. */
void lk_use_units(const struct lk_rings *rings, uint32_t leg);

static inline uint64_t *lk_word_at(const void *base, size_t offset)
{
    return (uint64_t *)((uintptr_t)base + offset);
}

/* The words of a segment are shared between processes: everything is read with acquire and written with release. */
static inline uint64_t lk_word_load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void lk_word_store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* To be called after each write into `rank`'s segment that it may be waiting for. */
void lk_bell_ring(const struct lk_ring_head *head, uint32_t rank);

/* What has been rung for so far: read it, look at everything that is waited for, then sleep with it. */
uint32_t lk_bell_heard(const struct lk_ring_head *head);

/* Sleeps unless the bell has rung since; for a bounded time. False: the call is aborted. */
bool lk_bell_sleep(const struct lk_ring_head *head, uint32_t heard);

bool lk_aborted(const struct lk_ring_head *head);

/* Slots of a unit. A word of `arrived` is the one to take its message with. */
bool lk_slot_credit(const struct lk_cta *cta, uint32_t leg, uint32_t dst, uint32_t channel);
bool lk_slot_arrived(const struct lk_cta *cta, uint32_t leg, uint32_t src, uint32_t channel,
                     uint64_t *out);

/* Puts cta->wire into the next slot, for which there is credit: the granules with a bit in `live`. */
void lk_slot_send(struct lk_cta *cta, uint32_t leg, uint32_t dst, uint32_t channel, uint32_t bytes,
                  uint32_t live);

/* Takes the message with this word out of its slot into cta->in and gives the slot back. */
void lk_slot_take(struct lk_cta *cta, uint32_t leg, uint32_t src, uint32_t channel, uint64_t word,
                  uint32_t bytes);

/* ---- host_exchange_lines.c: the same of what an exchange sends in lines. `bytes` of a tile. ---- */
bool lk_exchange_credit(const struct lk_cta *cta, uint32_t dst, uint32_t channel, bool is_short);
void lk_short_send(struct lk_cta *cta, uint32_t dst, uint32_t channel, uint32_t bytes);
bool lk_short_arrived(const struct lk_cta *cta, uint32_t src, uint32_t channel, uint32_t bytes);
void lk_short_take(struct lk_cta *cta, uint32_t src, uint32_t channel, uint32_t bytes);

/* Behind a message number `message` to dst: all lines of its slot get the flag, but the first `but`. */
void lk_short_refresh_lines(const struct lk_cta *cta, uint32_t dst, uint32_t channel,
                            uint64_t message, uint32_t but);

/* Granules of cta->wire that are not all zero bits. */
uint32_t lk_slot_live(const struct lk_cta *cta, uint32_t bytes);

/* Adds what a thread has counted to the state. */
void lk_cta_end(const struct lk_cta *cta);

/* Runs body for every CTA of a launch: as one of one, or (tests) as `ctas` threads. */
void lk_run_ctas(void *job, uint32_t ctas, void (*body)(void *job, uint32_t cta, uint32_t ctas));

/* ---- host_rings_lines.c ---- */
void lk_lines_run(struct lk_cta *cta);

/* ---- for tests: written before any call ---- */

extern unsigned int lk_bell_nap_ms; /* longest sleep */
extern bool lk_host_cta_threads;    /* a launch runs as `ctas` threads instead of one */

#endif
