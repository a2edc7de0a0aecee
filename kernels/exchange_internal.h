/* SPDX-License-Identifier: Apache-2.0
 *
 * From lk_rings_exchange to launches: exchange_api.c checks lists, sorts them by peer and cuts them; a backend
 * (cuda_exchange.cu or host_exchange.c, one per library) runs each launch.
 */
#ifndef LK_EXCHANGE_INTERNAL_H
#define LK_EXCHANGE_INTERNAL_H

#include "kernels/rings_internal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A message, or a copy from this rank to itself. */
struct lk_exchange_entry {
    uint64_t address; /* a copy's source */
    uint64_t bytes;   /* > 0 */
    uint64_t other;   /* a send: scan; a copy: destination; a take: 0 */
};

/* Entries of the sends to p: sends[p] .. sends[p + 1], of copies: the same with the own rank; of the takes from p: takes[p]
 * .. takes[p + 1], none from the own rank. Each in the order of the messages. */
struct lk_exchange_head {
    struct lk_rings rings;
    struct lk_row_mask mask; /* rows 0: none */
    uint16_t sends[LK_RANKS_MAX + 1];
    uint16_t takes[LK_RANKS_MAX + 1];
    uint32_t ctas; /* 1 .. channels */
};

/* Size classes of the argument block; the first for calls of short messages only. */
#define LK_EXCHANGE_FEW \
    ((2048 - sizeof(struct lk_exchange_head)) / sizeof(struct lk_exchange_entry))
#define LK_EXCHANGE_SMALL \
    ((4096 - sizeof(struct lk_exchange_head)) / sizeof(struct lk_exchange_entry))
#define LK_EXCHANGE_MAX \
    ((32764 - sizeof(struct lk_exchange_head)) / sizeof(struct lk_exchange_entry))

struct lk_exchange_launch {
    struct lk_exchange_head head;
    struct lk_exchange_entry entries[LK_EXCHANGE_MAX]; /* takes[ranks] of them */
};

LK_INLINE int lk_is_masked(const struct lk_row_mask *mask, uint64_t address)
{
    return address - (uint64_t)(uintptr_t)mask->base < mask->rows * mask->row_bytes;
}

LK_INLINE int lk_is_live(const uint32_t *bits, uint64_t row)
{
    return (bits[row / 32] >> (row % 32) & 1) != 0;
}

/* Of the backend. There is at least one entry. */
int lk_run_exchange(const struct lk_exchange_launch *launch, void *stream);

/* Of the CUDA backend: loads its kernels on the current device. 0 or a cudaError_t. */
int lk_load_exchange(void);

#ifdef __cplusplus
}
#endif

#endif
