/* SPDX-License-Identifier: Apache-2.0
 *
 * From the calls of loongattention.h to cuDNN or to launches.
 */
#ifndef LK_ATTENTION_INTERNAL_H
#define LK_ATTENTION_INTERNAL_H

#include "kernels/blocks_internal.h"
#include "kernels/loongattention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- our own kernels ---- */

struct lk_attention_launch {
    struct lk_attention attention;
    struct lk_attention_grads grads;
    float *delta;  /* backward: sequences x heads x queries */
    uint32_t wide; /* everything is aligned to groups of LK_VECTOR */
};

int lk_run_attention_forward(const struct lk_attention_launch *launch, void *stream);
int lk_run_attention_backward(const struct lk_attention_launch *launch, void *stream);
int lk_load_attention(void);

/* ---- what cuDNN is given beside the caller's memory ---- */

/* Tensors with rows of their own, in this order everywhere. */
enum lk_attention_tensor {
    LK_TENSOR_Q,
    LK_TENSOR_K,
    LK_TENSOR_V,
    LK_TENSOR_O,
    LK_TENSOR_DOUT,
    LK_TENSOR_DQ,
    LK_TENSOR_DK,
    LK_TENSOR_DV,
    LK_TENSORS,
};

static inline bool lk_tensor_has_keys(enum lk_attention_tensor tensor)
{
    return tensor == LK_TENSOR_K || tensor == LK_TENSOR_V || tensor == LK_TENSOR_DK ||
           tensor == LK_TENSOR_DV;
}

static inline bool lk_tensor_has_value_depth(enum lk_attention_tensor tensor)
{
    return tensor == LK_TENSOR_V || tensor == LK_TENSOR_O || tensor == LK_TENSOR_DOUT ||
           tensor == LK_TENSOR_DV;
}

/* Lengths and offsets as cuDNN wants them. A sequence without keys has no queries for it. */
struct lk_attention_layout {
    struct lk_attention attention;
    struct lk_attention_grads grads;
    int32_t *lengths[2];          /* of queries and keys, one per sequence */
    int64_t *offsets[LK_TENSORS]; /* in elements, one more than sequences; NULL: not wanted */
};

/* Before cuDNN: fills in the arrays. Behind it: zeros, and +infinity in lse, in rows that cuDNN had no part in. */
int lk_run_attention_prepare(const struct lk_attention_layout *layout, void *stream);
int lk_run_attention_clear(const struct lk_attention_layout *layout, int backward, void *stream);

/* ---- cuDNN ---- */

/* What a plan depends on. Compared byte by byte: zeroed before it is filled in. */
struct lk_cudnn_key {
    int64_t sequences, heads, kv_heads, queries, keys, depth, value_depth;
    int64_t strides[LK_TENSORS]
                   [3]; /* of sequences, heads and rows; without grads the latter half is 0 */
    uint64_t most_workspace;
    uint8_t type, causal, lengths, packed; /* lengths: there are any, packed or not */
    uint8_t stats, backward, deterministic, unused;
};

struct lk_cudnn_memory {
    void *tensors[LK_TENSORS];
    void *offsets[LK_TENSORS]; /* packed: see struct lk_attention_layout */
    void *lengths[2];
    void *lse;
    void *dq_sum;    /* fp32, sequences x heads x queries x depth */
    void *row_sum;   /* fp32, sequences x heads x queries */
    void *workspace; /* of the plan */
    float scale;
};

struct lk_cudnn;

/* device: NULL for the current one, or its properties as cuDNN writes them, to make plans without running them. Host library:
 * *out is NULL. */
int lk_cudnn_open(const char *library, const char *device, struct lk_cudnn **out);
void lk_cudnn_close(struct lk_cudnn *cudnn);

/* 0, LK_VENDOR_NONE with the reason in why, or an error. *planned: cuDNN was asked for a plan. run also where it was not
 * planned ahead. */
#define LK_CUDNN_WHY 240
int lk_cudnn_plan(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key, uint64_t *workspace,
                  char why[LK_CUDNN_WHY], int *planned);
int lk_cudnn_run(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key,
                 const struct lk_cudnn_memory *memory, char why[LK_CUDNN_WHY], int *planned,
                 void *stream);

#ifdef __cplusplus
}
#endif

#endif
