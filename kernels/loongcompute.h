/* SPDX-License-Identifier: Apache-2.0
 *
 * Fused compute kernels of the kernels library, beside the communication kernels of loongkernels.h, whose rules on
 * calls, results and thread safety hold here, too: ordered by the stream, nothing allocated, nothing waited for, fit for
 * graphs after lk_compute_load_all(), 0 or a negative errno or a cudaError_t (lk_error_text()).
 *
 * Memory. All pointers are device memory unless it says otherwise; workspaces are the caller's, aligned to 16 bytes, of
 * the size that the query returns, with any contents, and may be used by the next call of the same stream. Structures
 * are read during the call.
 *
 * Shapes. Every shape is served. Rows whose length is a multiple of LK_VECTOR elements, with pointers aligned to 16
 * bytes, take wide accesses; others are served by the same kernels element by element. Sizes may exceed 2^31.
 *
 * Repeatability. Every function gives the same bits when it is repeated on the same device: sums are added in an order
 * that follows from the shape alone, never by atomic additions. What is said to be exact gives the same bits in both
 * libraries; the rest keeps within the bounds that are stated, of the result in exact arithmetic.
 */
#ifndef LOONGCOMPUTE_H
#define LOONGCOMPUTE_H

#include "kernels/loongkernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_VECTOR 8 /* elements */

/* lk_load_all() for the functions below. */
int lk_compute_load_all(void);

/* ---- AdamW over many tensors, with clipping by the global norm and a check for what is not finite ----
 *
 * lk_adamw_step() does, in two launches, for all tensors of a plan:
 *     norm = sqrt(sum of (grad / loss_scale)^2)
 *     if a gradient, the norm or loss_scale is not finite (or it is not positive): skipped += 1, and nothing else is written; else
 *     step += 1;  clip = min(1, max_norm / (norm + 1e-6));  g = clip * grad / loss_scale
 *     m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
 *     param -= lr * weight_decay * param + lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 * which is torch's AdamW after clip_grad_norm_ and GradScaler. Exact between the libraries. One step's change of a
 * parameter is within 2^-22 * (|param| + |change|) of exact arithmetic; the norm within 1e-6 of itself. */

struct lk_adamw_tensor {
    void *param;      /* fp32, or bf16 with a master */
    const void *grad; /* of grad_type */
    float *
        master; /* fp32 value of a bf16 parameter, which is its rounded copy; NULL for an fp32 parameter */
    float *m, *v;
    uint64_t count;          /* 0: skipped, whatever else the entry holds */
    enum lk_type param_type; /* LK_FP32 or LK_BF16 */
    enum lk_type grad_type;  /* LK_FP32 or LK_BF16 */
    float lr_factor;         /* of this tensor's group; usually 1 */
    float weight_decay;      /* of this tensor's group */
};

/* A list of tensors, prepared once on the host. The caller copies `bytes` bytes of `table` (host) to the device and sets
 * `device_table` (aligned to 16 bytes) before the plan is used. Pointers, not values, are in it: it serves until a tensor
 * moves. In the host library both may be the same memory. */
struct lk_adamw_plan {
    void *table; /* host memory of the caller, aligned to 16 bytes */
    size_t bytes;
    const void *device_table;
    uint64_t elements; /* filled in, as is what follows */
    uint32_t tensors, chunks;
};

/* Bytes of the table and of the workspace for this list; 0 if it is too long (2^31 chunks of 16384 elements). */
size_t lk_adamw_table_bytes(const struct lk_adamw_tensor *tensors, size_t n);
size_t lk_adamw_workspace_bytes(const struct lk_adamw_plan *plan);

/* Fills plan->table. -EINVAL: no room, a NULL or misaligned pointer, an unknown type, a bf16 parameter without master or
 * an fp32 one with one. */
int lk_adamw_plan(const struct lk_adamw_tensor *tensors, size_t n, struct lk_adamw_plan *plan);

/* Device memory, aligned to 16 bytes. Zero at the start, or with `step` of a checkpoint. */
struct lk_adamw_state {
    uint64_t step;       /* updates applied */
    uint64_t skipped;    /* updates left out */
    double sum_squares;  /* of the gradients as they lie there; infinite or NaN if one of them is */
    double norm;         /* of the last call, after the division by loss_scale, before clipping */
    float clip;          /* factor of the last call; 0 if it was left out */
    uint32_t applied;    /* 1 if the last call was applied */
    uint32_t tickets[2]; /* for the kernels: 0 between calls */
};

struct lk_adamw {
    struct lk_scale lr;         /* device_value: what a graph reads anew each time */
    struct lk_scale loss_scale; /* gradients are divided by it; positive */
    double beta1, beta2, eps;
    double max_norm; /* 0: no clipping */
    struct lk_adamw_state *state;
    void *workspace;
};

int lk_adamw_step(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw, void *stream);

/* The two halves, one launch each, for gradients that are spread over ranks: the first writes state->sum_squares, which
 * the caller then adds up over the ranks (one fp64 sum), the second does the rest with that sum. */
int lk_adamw_norm(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw, void *stream);
int lk_adamw_update(const struct lk_adamw_plan *plan, const struct lk_adamw *adamw, void *stream);

#ifdef __cplusplus
}
#endif

#endif
