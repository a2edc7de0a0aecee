/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/policy.h"

static struct lc_choice nccl(enum lc_outcome why)
{
    return (struct lc_choice){ LC_PATH_NCCL, why };
}

static bool is_reducible_type(ncclDataType_t type)
{
    return type == ncclFloat32 || type == ncclBfloat16 || type == ncclFloat16;
}

static bool has_factor_for(const struct lc_op *op, const struct lc_redop *redop)
{
    return redop->kind != LC_REDOP_OTHER &&
           (redop->kind != LC_REDOP_PREMUL || redop->type == op->type);
}

static bool can_cast(const struct lc_op *op, const struct lc_situation *now,
                     const struct lc_config *config)
{
    return config->allreduce_wire != LC_WIRE_DATA && op->type == ncclFloat32 &&
           has_factor_for(op, &now->redop);
}

/* Operations that the program made live shorter than the group: PyTorch destroys them behind the call. */
static bool can_pack(const struct lc_op *op, const struct lc_situation *now,
                     const struct lc_config *config)
{
    return config->coalesce && now->grouped && op->kind == LC_OP_ALL_REDUCE &&
           is_reducible_type(op->type) && op->redop >= 0 && op->redop < ncclNumOps;
}

bool lc_policy_wants_rings(const struct lc_config *config)
{
    return config->peer == LC_PEER_FORCE ||
           (config->peer == LC_PEER_AUTO && config->allreduce_wire != LC_WIRE_DATA);
}

bool lc_policy_one_shot(const struct lc_config *config, size_t bytes, size_t most)
{
    return config->peer == LC_PEER_FORCE && bytes > 0 && bytes <= most;
}

/* Without a measurement of the machine only what cuts bytes is known to win. */
static bool takes_rings(const struct lc_op *op, const struct lc_situation *now, bool cuts_bytes,
                        const struct lc_config *config)
{
    if (!now->rings || !is_reducible_type(op->type) || !has_factor_for(op, &now->redop) ||
        op->count == 0 || (op->type != ncclFloat32 && config->exact == LC_EXACT_NCCL))
        return false;
    return config->peer == LC_PEER_FORCE || (config->peer == LC_PEER_AUTO && cuts_bytes);
}

struct lc_choice lc_policy(const struct lc_op *op, const struct lc_situation *now,
                           const struct lc_config *config)
{
    bool reduction = op->kind == LC_OP_ALL_REDUCE || op->kind == LC_OP_REDUCE_SCATTER;
    uint64_t bytes = lc_op_bytes(op, now->ranks);
    bool wants_cast, wants_pack, wants_rings;

    if (!reduction || now->ranks < 2)
        return nccl(LC_NCCL_NO_FASTER_PATH);
    wants_cast = can_cast(op, now, config) && bytes >= config->min_bytes;
    wants_pack = can_pack(op, now, config) && bytes > 0 && bytes <= LC_PACK_BYTES;
    wants_rings = takes_rings(op, now, wants_cast, config);
    if (!wants_cast && !wants_pack && !wants_rings) {
        if (config->allreduce_wire != LC_WIRE_DATA && op->type == ncclFloat32 &&
            (now->redop.kind == LC_REDOP_OTHER || bytes < config->min_bytes))
            return nccl(now->redop.kind == LC_REDOP_OTHER ? LC_NCCL_OPERATION : LC_NCCL_SMALL);
        return nccl(LC_NCCL_NO_FASTER_PATH);
    }
    if (!now->committed)
        return nccl(LC_NCCL_NOT_COMMITTED);
    if (wants_rings)
        return (struct lc_choice){ LC_PATH_RINGS, wants_cast ? LC_RINGS_BF16 : LC_RINGS };
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
