/* SPDX-License-Identifier: Apache-2.0
 *
 * From the calls of loongblocks.h to the vendor's library or to launches.
 */
#ifndef LK_BLOCKS_INTERNAL_H
#define LK_BLOCKS_INTERNAL_H

#include "kernels/compute_internal.h"
#include "kernels/loongblocks.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- arguments ---- */

#define LK_BLOCKS_ALIGN UINT64_C(256) /* of workspaces and their parts */

/* A matrix, as it lies in memory. */
struct lk_operand {
    const char *name;
    const void *base;
    uint64_t rows, columns, stride;
    enum lk_type type;
};

/* 0, or -EINVAL with a text that begins with the call's name. */
int lk_check_operand(const char *call, const struct lk_operand *operand, bool written);
int lk_check_workspace(const char *call, const void *workspace);

/* A workspace that is handed out from its beginning; with base NULL only its size is found. */
struct lk_arena {
    char *base;
    uint64_t used;
};

/* NULL where nothing is wanted. Sizes are far below what 64 bits hold: every dimension is below 2^31 and checked before. */
static inline void *lk_take(struct lk_arena *arena, bool wanted, uint64_t bytes)
{
    void *at = arena->base ? arena->base + arena->used : NULL;

    if (!wanted)
        return NULL;
    arena->used += (bytes + LK_BLOCKS_ALIGN - 1) / LK_BLOCKS_ALIGN * LK_BLOCKS_ALIGN;
    return at;
}

/* ---- products ---- */

#define LK_GEMM_TILE UINT64_C(64) /* rows and columns of a block of the general kernel */
#define LK_GEMM_STEP UINT64_C(16) /* of depth between two barriers */

/* The kernel of our own. */
int lk_run_gemm(const struct lk_gemm *gemm, void *stream);

/* ---- passes over matrices ---- */

/* dx = add + factor * x, with one factor for each row: -rstd^3 / columns * row_dot. */
struct lk_undo_launch {
    uint64_t rows, columns;
    const uint16_t *x, *add; /* add: NULL for none */
    uint64_t x_stride, add_stride;
    uint16_t *dx;
    uint64_t dx_stride;
    const float *rstd, *row_dot;
    uint32_t wide;
};

int lk_run_undo(const struct lk_undo_launch *launch, void *stream);

/* Sums over the rows of a matrix: a block takes LK_FOLD_COLUMNS columns of every so many rows, LK_FOLD_SLICES of them at a
 * time, and writes a row of partial sums. */
#define LK_FOLD_COLUMNS UINT64_C(256)
#define LK_FOLD_SLICES  UINT64_C(8)

/* How many of these rows: blocks that find room at once, and four rows of each slice where there are fewer. */
static inline uint32_t lk_fold_partials(uint64_t rows, uint64_t columns)
{
    uint64_t across = (columns + LK_FOLD_COLUMNS - 1) / LK_FOLD_COLUMNS;
    uint64_t most = across && across < 528 ? 528 / across : 1; /* a query may have no columns */
    uint64_t wanted = (rows + 4 * LK_FOLD_SLICES - 1) / (4 * LK_FOLD_SLICES);

    return (uint32_t)(wanted < most ? wanted : most);
}

struct lk_fold_launch {
    struct lk_fold fold;
    struct lk_fold_grads grads; /* dgamma NULL: partial sums are left as they are */
    uint16_t *folded;           /* forward */
    uint64_t stride;            /* of dfolded */
    uint32_t wide;
    uint32_t partials; /* rows of partial sums, each of `columns` rounded up to 8; 0: no sum */
    uint32_t plain;    /* the sum of dfolded alone: there is no weight */
};

int lk_run_fold_forward(const struct lk_fold_launch *launch, void *stream);
int lk_run_fold_backward(const struct lk_fold_launch *launch, void *stream);

/* ---- the vendor's library ---- */

struct lk_vendor;

enum {
    LK_VENDOR_NONE = 1
}; /* the library has no method for this product */

/* Host library: *out is NULL. */
int lk_vendor_open(const char *library, struct lk_vendor **out);
void lk_vendor_close(struct lk_vendor *vendor);

/* How many products of the same sizes, and how many elements their matrices are apart. Where these do not lie evenly,
 * `pointers` are lists of their addresses in device memory, LK_GEMM_GROUP apart: of b, of a, of d, which is c then. */
struct lk_batch {
    uint32_t count;
    int64_t a, b, c, d;
    void **pointers;                  /* NULL: they lie evenly */
    uintptr_t a_bits, b_bits, d_bits; /* with pointers: that any address has */
};

/* 0, LK_VENDOR_NONE or an error. *planned: the library was asked for a method. */
int lk_vendor_gemm(struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   const struct lk_batch *batch, void *stream, int *planned);
int lk_vendor_tune(struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   const struct lk_batch *batch, struct lk_gemm_tuned *out, void *stream);

/* Groups of products, at most LK_GEMM_GROUP. Addresses: of b, of a, of d, LK_GEMM_GROUP apart, in device memory. */
struct lk_cublas_memory {
    void **pointers;
    void *workspace;
    size_t bytes;
};

/* Streams of our own beside the caller's, for products that are made side by side. Everything that is launched on them lies
 * between lk_forks_begin() and lk_forks_end(), which hold their lock and tie them to the caller's stream by events: so it
 * is in the caller's order, also in a graph that is being captured. */
struct lk_forks;

/* Host library: *out is NULL. */
int lk_forks_open(struct lk_forks **out);
void lk_forks_close(struct lk_forks *forks);
uint32_t lk_forks_sms(const struct lk_forks *forks); /* multiprocessors of the device */

/* 0, and lk_forks_end() has to follow whatever happens; an error; or LK_VENDOR_NONE: they are part of a graph that is being
 * captured from another stream, which keeps them until that capture ends. n: 1 .. LK_GEMM_STREAMS. */
int lk_forks_begin(struct lk_forks *forks, uint32_t n, void *stream);
void *lk_forks_stream(const struct lk_forks *forks, uint32_t number, void *stream); /* 0 .. n - 1 */
int lk_forks_end(struct lk_forks *forks, uint32_t n, void *stream);

struct lk_cublas;

/* Host library: *out is NULL. */
int lk_cublas_open(struct lk_cublas **out);
void lk_cublas_close(struct lk_cublas *cublas);
int lk_cublas_run(struct lk_cublas *cublas, const struct lk_gemm *const *gemms, uint32_t n,
                  const struct lk_cublas_memory *memory, void *stream);

/* Writes addresses to device memory; they travel with the launch. */
struct lk_pointers_launch {
    void **to;
    uint32_t count;
    const void *values[LK_GEMM_GROUP];
};

int lk_run_pointers(const struct lk_pointers_launch *launch, void *stream);

/* Sets what lk_blas_error() returns; gives back err. */
int lk_blas_fail(int err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Of the CUDA backend: load their kernels on the current device. 0 or a cudaError_t. */
int lk_load_gemm(void);
int lk_load_fold(void);

#ifdef __cplusplus
}
#endif

#endif
