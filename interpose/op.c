/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/op.h"

static const struct {
    const char *name;
    const char *nccl_name;
    int per_rank; /* the call's count is for one rank's part of the send buffer */
} kinds[LC_OP_KINDS] = {
    [LC_OP_ALL_REDUCE] = {"all-reduce",      "AllReduce",     0},
    [LC_OP_REDUCE_SCATTER] = { "reduce-scatter", "ReduceScatter", 1},
    [LC_OP_ALL_GATHER] = { "all-gather",     "AllGather",     0},
    [LC_OP_ALL_TO_ALL] = { "all-to-all",     "AlltoAll",      1},
    [LC_OP_BROADCAST] = { "broadcast",      "Broadcast",     0},
    [LC_OP_REDUCE] = { "reduce",         "Reduce",        0},
    [LC_OP_GATHER] = { "gather",         "Gather",        0},
    [LC_OP_SCATTER] = { "scatter",        "Scatter",       1},
    [LC_OP_SEND] = { "send",           "Send",          0},
    [LC_OP_RECV] = { "receive",        "Recv",          0},
};

const char *lc_op_name(enum lc_op_kind kind)
{
    return kinds[kind].name;
}

const char *lc_op_nccl_name(enum lc_op_kind kind)
{
    return kinds[kind].nccl_name;
}

size_t lc_type_size(ncclDataType_t type)
{
    /* By number: the types after 9 are newer than some of the headers we build with. */
    static const unsigned char sizes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };

    return (unsigned)type < sizeof(sizes) ? sizes[(unsigned)type] : 0;
}

const char *lc_type_name(unsigned type)
{
    static const char *const names[] = { "int8",    "uint8",    "int32",      "uint32",
                                         "int64",   "uint64",   "float16",    "float32",
                                         "float64", "bfloat16", "float8e4m3", "float8e5m2" };

    return type < sizeof(names) / sizeof(*names) ? names[type] : NULL;
}

enum lk_type lc_lk_type(ncclDataType_t type)
{
    switch (type) {
    case ncclBfloat16: return LK_BF16;
    case ncclFloat16: return LK_FP16;
    default: return LK_FP32;
    }
}

uint64_t lc_op_bytes(const struct lc_op *op, int ranks)
{
    uint64_t bytes = (uint64_t)op->count * lc_type_size(op->type);

    return kinds[op->kind].per_rank && ranks > 1 ? bytes * (unsigned)ranks : bytes;
}
