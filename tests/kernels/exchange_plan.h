/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges to play: messages between ranks, the memory of a rank that takes part, and what it must have got. All follows
 * from the plan, so each rank knows everybody's data without asking.
 */
#ifndef LC_TESTS_KERNELS_EXCHANGE_PLAN_H
#define LC_TESTS_KERNELS_EXCHANGE_PLAN_H

#include "kernels/rings.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct exchange_message {
    uint32_t src, dst;
    uint64_t bytes;
    uint64_t seed;             /* of its data */
    uint32_t zeros;            /* per cent of its rows of 700 bytes, in runs that begin anywhere */
    uint8_t in_skew, out_skew; /* bytes behind a multiple of 16 */
    bool scan;
    bool apart;    /* outside the buffer with the mask */
    bool in_place; /* with src == dst */
};

struct exchange_plan {
    uint32_t ranks;
    uint64_t row_bytes; /* of masks; 0: none */
    uint64_t seed;      /* of masks: a third of the rows is live */
    size_t n;
    struct exchange_message *messages;
};

/* One rank's memory and arguments. */
struct exchange_side {
    const struct exchange_plan *plan;
    uint32_t rank;
    struct lk_message *sends, *recvs;
    size_t n_sends, n_recvs;
    struct lk_row_mask mask; /* rows 0: none */
    uint8_t *in, *before, *out;
    uint64_t in_bytes, out_bytes;
};

struct exchange_side *exchange_side_make(const struct exchange_plan *plan, uint32_t rank);

/* Every byte received, and every byte around it and of what was sent. */
void exchange_side_check(const struct exchange_side *side);
void exchange_side_free(struct exchange_side *side);

/* Bytes of payload and words that the plan's messages from one rank put into rings, as they should be counted. Without
 * masks. */
struct lk_ring_counts exchange_counts(const struct exchange_plan *plan, uint32_t rank,
                                      const struct lk_ring_shape *shape);

/* A plan of up to `most` messages, of up to `bytes` bytes each. Its messages are to be freed. */
void exchange_random(uint64_t seed, uint32_t ranks, uint32_t most, uint64_t bytes,
                     struct exchange_plan *out);

#ifdef __cplusplus
}
#endif

#endif
