/* SPDX-License-Identifier: Apache-2.0
 *
 * What single products and groups of them share.
 */
#ifndef LK_GEMM_INTERNAL_H
#define LK_GEMM_INTERNAL_H

#include "kernels/blocks_internal.h"

#include <pthread.h>
#include <stdbool.h>

#define LK_GEMM_WORKSPACE \
    ((size_t)32 << 20) /* what cuBLAS itself takes on this generation of devices */

/* Counters and `tuning`: any thread writes, any reads, relaxed; they order nothing. `lock` guards what is opened late. The rest
 * is constant after lk_blas_open(). */
struct lk_blas {
    struct lk_vendor *vendor; /* NULL: only the kernel of our own */
    struct lk_forks *forks;   /* NULL: everything goes to the caller's stream */
    uint64_t vendor_products, general_products, plans;
    uint64_t grouped_products, batched_products, spread_products;
    int tuning;
    pthread_mutex_t lock;
    struct lk_cublas *cublas;     /* guarded; NULL: not yet, or it is missing */
    int cublas_tried, cublas_err; /* guarded */
};

static inline void lk_count(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}

#define LK_GEMM_CUT 128 /* rows and columns that a multiprocessor makes of a product at a time */

/* Whether a product of so many rows and columns leaves multiprocessors idle, and there are streams to fill them from. */
static inline bool lk_gemm_leaves_room(const struct lk_blas *blas, uint64_t rows, uint64_t columns)
{
    uint64_t parts = (rows + LK_GEMM_CUT - 1) / LK_GEMM_CUT *
                     ((columns + LK_GEMM_CUT - 1) / LK_GEMM_CUT);

    return blas && blas->forks && parts <= lk_forks_sms(blas->forks);
}

static inline uint64_t lk_type_bytes(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

/* 0, or -EINVAL with a text. What follows is for products that it has found right. */
int lk_gemm_check(const struct lk_gemm *gemm);

/* What the vendor's library can be asked for: its columns, our rows, may not overlap. */
bool lk_gemm_is_plain(const struct lk_gemm *gemm);

int lk_gemm_run_one(struct lk_blas *blas, const struct lk_gemm *gemm, void *stream);

/* Before lk_gemm_run_one(): measures methods if that is switched on, and waits for the stream then. */
int lk_gemm_tune_one(struct lk_blas *blas, const struct lk_gemm *gemm, void *stream);

/* The same of a batch, by the vendor's library alone. LK_VENDOR_NONE: it has no method. */
int lk_gemm_run_vendor(struct lk_blas *blas, const struct lk_gemm *gemm,
                       const struct lk_batch *batch, void *stream);
int lk_gemm_tune_if_told(struct lk_blas *blas, const struct lk_gemm *gemm,
                         const struct lk_batch *batch, void *stream);

#endif
