/* SPDX-License-Identifier: Apache-2.0
 *
 * From the calls of loongcompute.h to launches: compute_*.c check arguments, a backend (compute_*.cu or compute_host*.c,
 * one per library) runs each launch. What a thread of a block does is written once, in the compute_*.h of its subject:
 * the device runs it in LK_BLOCK threads, the host library in a loop over them.
 */
#ifndef LK_COMPUTE_INTERNAL_H
#define LK_COMPUTE_INTERNAL_H

#include "kernels/list_internal.h"
#include "kernels/loongcompute.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_BLOCK UINT64_C(256) /* threads of every block */

/* ---- AdamW ---- */

/* Elements of a tensor that one block takes. */
#define LK_ADAMW_CHUNK UINT64_C(16384)

enum lk_adamw_flags {
    LK_ADAMW_COPY = 1,   /* there is a bf16 copy of the parameter */
    LK_ADAMW_GRAD16 = 2, /* bf16 gradients */
    LK_ADAMW_FAST = 4,   /* everything is aligned to 16 bytes */
};

/* One tensor in the table. */
struct lk_adamw_entry {
    float *param; /* fp32: the parameter or its master */
    uint16_t *copy;
    const void *grad;
    float *m, *v;
    uint64_t count;
    uint32_t first_chunk;
    uint32_t flags;
    float lr_factor;
    float weight_decay;
};

/* The table: tensors, then the number of the tensor of each chunk. */
struct lk_adamw_launch {
    const struct lk_adamw_entry *entries;
    const uint32_t *chunk_entry;
    double *partials; /* one per chunk */
    struct lk_adamw_state *state;
    uint32_t chunks;
    uint32_t tensors;
    struct lk_scale lr;
    struct lk_scale loss_scale;
    double beta1, beta2, eps, max_norm;
};

int lk_run_adamw_norm(const struct lk_adamw_launch *launch, void *stream);
int lk_run_adamw_update(const struct lk_adamw_launch *launch, void *stream);

/* ---- rows ----
 * One block per row (backward of norms: per LK_NORM_PARTIALS-th row); a thread takes groups of LK_VECTOR columns. */

/* Threads of a block for rows of this length: a power of two, since their sums are added as a tree. */
static inline uint32_t lk_row_threads(uint64_t columns)
{
    uint32_t threads = 32;

    while (threads < LK_BLOCK && (uint64_t)threads * LK_VECTOR < columns)
        threads *= 2;
    return threads;
}

struct lk_swiglu_launch {
    struct lk_swiglu swiglu;
    struct lk_swiglu_grads grads; /* forward: h alone */
    uint32_t threshold;           /* of 65536 random numbers that many drop an element */
    float kept;                   /* 1 / (1 - drop) */
    uint32_t wide;                /* everything is aligned to groups */
};

int lk_run_swiglu_forward(const struct lk_swiglu_launch *launch, void *stream);
int lk_run_swiglu_backward(const struct lk_swiglu_launch *launch, void *stream);

/* Rows of partial sums of dgamma and dbeta, one for each block of backward: as many blocks as 132 multiprocessors run of
 * a kernel that needs half of one's registers. A column's sum over them is made of so many parts. */
#define LK_NORM_PARTIALS UINT64_C(264)
#define LK_NORM_PARTS    16
#define LK_NORM_BATCH    9 /* partial rows of a part that are read at once: all of 144 */

/* A matrix of partial sums whose rows are added up beside those of dgamma and dbeta. */
struct lk_column_sums {
    const float *partials;
    float *out; /* NULL: none */
    uint64_t columns, stride;
    uint32_t rows;
};

struct lk_norm_launch {
    struct lk_norm norm;
    struct lk_norm_forward forward; /* of a backward y alone, if that is made anew */
    struct lk_norm_backward backward;
    struct lk_column_sums also; /* of a backward with dgamma or dbeta */
    uint32_t like_y; /* a forward without y whose statistics have the bits of one with y */
    uint32_t wide;
    uint32_t
        partials; /* rows of partial sums in the workspace (norm_slot()), each of 16 floats per group; 0: not wanted */
};

int lk_run_norm_forward(const struct lk_norm_launch *launch, void *stream);
int lk_run_norm_backward(const struct lk_norm_launch *launch, void *stream);

/* lk_norm_forward(); without y, too, its statistics have the bits that they have with it. */
int lk_norm_forward_like_y(const struct lk_norm *norm, const struct lk_norm_forward *forward,
                           void *stream);

/* What a backward makes beside its results. */
struct lk_norm_beside {
    struct lk_column_sums also; /* with dgamma or dbeta alone */
    void *y; /* of rows of which lk_norm_makes_y(); may be dy itself; NULL: not wanted */
    uint64_t y_stride;
};

int lk_norm_backward_beside(const struct lk_norm *norm, const struct lk_norm_backward *backward,
                            const struct lk_norm_beside *beside, void *stream);

/* Whether backward of rows that are aligned to groups, all of them and of the weights, can make y, with the bits that forward
 * gave it. */
int lk_norm_makes_y(uint64_t columns, int residual);

/* ---- rows of tokens to experts ---- */

struct lk_moe_launch {
    struct lk_moe_routing routing;
    struct lk_moe_rows rows;
    struct lk_moe_grads grads; /* of lk_moe_unpermute_backward() alone, which has no `rows` */
    uint32_t wide;
};

/* Blocks that route, each a stretch of slots, of which it counts every expert's in a row of the workspace. */
static inline uint32_t lk_moe_blocks(const struct lk_moe_routing *r)
{
    uint64_t blocks = (r->tokens * r->choices + 1023) / 1024;

    return blocks < 1 ? 1 : blocks < 128 ? (uint32_t)blocks : 128;
}

int lk_run_moe_route(const struct lk_moe_routing *routing, void *stream);
int lk_run_moe_permute(const struct lk_moe_launch *launch, void *stream);
int lk_run_moe_unpermute(const struct lk_moe_launch *launch, void *stream);
int lk_run_moe_unpermute_backward(const struct lk_moe_launch *launch, void *stream);

/* ---- augmentation ---- */

/* What is drawn from. Logarithms are to base 2, made on the host by both libraries alike. */
struct lk_augment_launch {
    struct lk_augment augment;
    float crop_log[2], erase_log[2]; /* of the least ratio; how much to the most */
    float inverse_std[3];
};

int lk_run_augment(const struct lk_augment_launch *launch, void *stream);

/* Of the CUDA backend: load their kernels on the current device. 0 or a cudaError_t. */
int lk_load_adamw(void);
int lk_load_swiglu(void);
int lk_load_norm(void);
int lk_load_moe(void);
int lk_load_augment(void);

#ifdef __cplusplus
}
#endif

#endif
