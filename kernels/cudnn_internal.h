/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention as graphs of cuDNN's backend. cuDNN knows its fused kernels by the pattern of the operations, so their order and
 * the shapes of what lies between them are part of the interface.
 */
#ifndef LK_CUDNN_INTERNAL_H
#define LK_CUDNN_INTERNAL_H

#include "kernels/attention_internal.h"

enum lk_cudnn_value {
#define LK_VALUE(name, value) LK_##name = (value),
#include "kernels/cudnn_values.def"
#undef LK_VALUE
};

/* Several of the vendor's types are enums; all of them are passed as int. */
struct lk_cudnn_api {
#define LK_CUDNN(type, name, ...) type (*name)(__VA_ARGS__);
#include "kernels/cudnn.def"
#undef LK_CUDNN
};

/* Names of the tensors that lie in memory; those of the caller are 1 + enum lk_attention_tensor, their offsets that + 10. */
enum lk_cudnn_name {
    LK_NAME_TENSORS = 1,
    LK_NAME_OFFSETS = 11,
    LK_NAME_LSE = 20,
    LK_NAME_LENGTHS = 21, /* of queries, of keys */
    LK_NAME_DQ_SUM = 23,
    LK_NAME_ROW_SUM = 24,
    LK_NAME_SCALE = 25, /* the rest is passed by value */
    LK_NAME_MINUS_INFINITY = 26,
    LK_NAME_ONE = 27,
    LK_NAME_SIZES = 28,   /* queries and keys */
    LK_NAME_VIRTUAL = 40, /* from here on */
};

/* The descriptor of a finished plan and what it needs. 0, LK_VENDOR_NONE or an error; device may be NULL. */
struct lk_cudnn_made {
    void *plan;
    uint64_t workspace;
};

/* Under the lock of its owner: the handle may be used by one thread at a time. */
int lk_cudnn_make(const struct lk_cudnn_api *api, void *handle, void *device,
                  const struct lk_cudnn_key *key, char why[LK_CUDNN_WHY],
                  struct lk_cudnn_made *out);

#endif
