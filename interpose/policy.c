/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/policy.h"

static struct lc_choice nccl(enum lc_outcome why)
{
    return (struct lc_choice){ LC_PATH_NCCL, why };
}

static bool is_packable_type(ncclDataType_t type)
{
    return type == ncclFloat32 || type == ncclBfloat16 || type == ncclFloat16;
}

static bool can_cast(const struct lc_op *op, const struct lc_situation *now,
                     const struct lc_config *config)
{
    return config->allreduce_wire != LC_WIRE_DATA && op->type == ncclFloat32 &&
           now->redop.kind != LC_REDOP_OTHER;
}

/* Operations that the program made live shorter than the group: PyTorch destroys them behind the call. */
static bool can_pack(const struct lc_op *op, const struct lc_situation *now,
                     const struct lc_config *config)
{
    return config->coalesce && now->grouped && op->kind == LC_OP_ALL_REDUCE &&
           is_packable_type(op->type) && op->redop >= 0 && op->redop < ncclNumOps;
}

struct lc_choice lc_policy(const struct lc_op *op, const struct lc_situation *now,
                           const struct lc_config *config)
{
    bool reduction = op->kind == LC_OP_ALL_REDUCE || op->kind == LC_OP_REDUCE_SCATTER;
    uint64_t bytes = lc_op_bytes(op, now->ranks);
    bool wants_cast, wants_pack;

    if (!reduction || now->ranks < 2)
        return nccl(LC_NCCL_NO_FASTER_PATH);
    wants_cast = can_cast(op, now, config) && bytes >= config->min_bytes;
    wants_pack = can_pack(op, now, config) && bytes > 0 && bytes <= LC_PACK_BYTES;
    if (!wants_cast && !wants_pack) {
        if (config->allreduce_wire != LC_WIRE_DATA && op->type == ncclFloat32 &&
            (now->redop.kind == LC_REDOP_OTHER || bytes < config->min_bytes))
            return nccl(now->redop.kind == LC_REDOP_OTHER ? LC_NCCL_OPERATION : LC_NCCL_SMALL);
        return nccl(LC_NCCL_NO_FASTER_PATH);
    }
    if (!now->committed)
        return nccl(LC_NCCL_NOT_COMMITTED);
    if (wants_cast)
        return (struct lc_choice){ LC_PATH_CAST, LC_CAST_BF16 };
    return (struct lc_choice){ LC_PATH_PACK, LC_PACKED };
}

/* NCCL rounds at every hop of a ring, so its error grows with the ranks. */
#define RING_RANKS 32

bool lc_wire_is_accurate(const struct lc_config *config, int ranks)
{
    return config->allreduce_wire == LC_WIRE_BF16_ACCURATE ||
           (config->allreduce_wire == LC_WIRE_BF16 && ranks > RING_RANKS);
}
