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

static const struct lc_profile_rule *rule_for(enum lc_op_kind kind, const struct lc_situation *now,
                                              bool bf16_wire, uint64_t bytes)
{
    unsigned op = kind == LC_OP_ALL_REDUCE       ? LC_PROFILE_ALL_REDUCE
                  : kind == LC_OP_REDUCE_SCATTER ? LC_PROFILE_REDUCE_SCATTER
                  : kind == LC_OP_ALL_TO_ALL     ? LC_PROFILE_ALL_TO_ALL
                                                 : LC_PROFILE_SEND;

    return now->profile ? lc_profile_rings(now->profile, op, (uint64_t)now->ranks, bf16_wire, bytes)
                        : NULL;
}

bool lc_policy_one_shot(const struct lc_situation *now, size_t bytes,
                        const struct lc_config *config)
{
    const struct lc_profile_rule *rule = rule_for(LC_OP_ALL_REDUCE, now, false, bytes);

    if (bytes > lc_policy_line_bytes((uint32_t)now->ranks))
        return false;
    return rule ? rule->algorithm == LC_PROFILE_ONE_SHOT
                : config->peer == LC_PEER_FORCE &&
                      bytes <= config->one_shot_bytes / (uint64_t)(now->ranks - 1);
}

uint32_t lc_policy_ctas(const struct lc_op *op, const struct lc_situation *now, bool bf16_wire,
                        size_t bytes, uint32_t most)
{
    const struct lc_profile_rule *rule = rule_for(op->kind, now, bf16_wire, bytes);

    return rule && rule->width < most ? rule->width : most;
}

/* Two ranks get each other's numbers and add them up: as many bytes as through rings, where the owner of a part rounds the
 * sum to bf16 as well. */
static bool is_better_added_up(const struct lc_op *op, const struct lc_situation *now,
                               const struct lc_config *config)
{
    return op->kind == LC_OP_ALL_REDUCE && now->ranks == 2 &&
           lc_wire_is_accurate(config, now->ranks);
}

/* Between two H200 over NVLink bf16 on the wire takes 1.38 times NCCL's time at 1 MB, 0.72 at 4 MB
 * (perf/results/h200-x2-nvlink). */
#define RINGS_CUT_LEAST ((uint64_t)4 << 20)

/* On one machine fewer bytes do not pay for small calls, whichever way. */
static bool is_small_on_one_machine(const struct lc_situation *now, uint64_t bytes,
                                    const struct lc_config *config)
{
    return config->peer == LC_PEER_AUTO && now->mapped && !now->profile && bytes < RINGS_CUT_LEAST;
}

/* Without a measurement of the machine only what cuts bytes is known to win. */
static bool is_known_to_win(const struct lc_op *op, const struct lc_situation *now, bool cuts_bytes)
{
    if (!now->profile)
        return cuts_bytes;
    return rule_for(op->kind, now, cuts_bytes, lc_op_bytes(op, now->ranks)) != NULL;
}

static bool takes_rings(const struct lc_op *op, const struct lc_situation *now, bool cuts_bytes,
                        const struct lc_config *config)
{
    if (!now->rings || !is_reducible_type(op->type) || !has_factor_for(op, &now->redop) ||
        op->count == 0 || (op->type != ncclFloat32 && config->exact == LC_EXACT_NCCL) ||
        (cuts_bytes && is_better_added_up(op, now, config)))
        return false;
    return config->peer == LC_PEER_FORCE ||
           (config->peer == LC_PEER_AUTO && is_known_to_win(op, now, cuts_bytes));
}

/* What takes one step anyway need not be rounded. Of a group's calls only all together say whether they do (lc_rings_launch),
 * but one that is alone in a group goes the way that it would go without: some ranks may have it in one, and some not. */
static bool is_one_shot(const struct lc_op *op, const struct lc_situation *now, uint64_t bytes,
                        const struct lc_config *config)
{
    return op->kind == LC_OP_ALL_REDUCE && lc_policy_one_shot(now, bytes, config) &&
           takes_rings(op, now, false, config) &&
           (!now->grouped || !takes_rings(op, now, true, config));
}

/* No memory is that large: whatever NCCL says about such a call, it says. */
static bool is_absurd(const struct lc_op *op, int ranks)
{
    return op->count > LC_MESSAGE_MOST / (uint64_t)(ranks > 1 ? ranks : 1) / 4;
}

/* `message`: bytes to one rank, `bytes`: as rules of the profile count them. Zeros in it do not travel, whatever is left. */
static bool takes_exchange(enum lc_op_kind kind, const struct lc_situation *now, uint64_t message,
                           uint64_t bytes, const struct lc_config *config)
{
    if (!now->rings || message == 0 || message < config->exchange_min_bytes ||
        message > LC_MESSAGE_MOST)
        return false;
    if (config->peer == LC_PEER_FORCE)
        return true;
    return config->peer == LC_PEER_AUTO && now->profile &&
           rule_for(kind, now, false, bytes) != NULL;
}

bool lc_policy_takes_message(const struct lc_situation *now, uint64_t bytes,
                             const struct lc_config *config)
{
    return takes_exchange(LC_OP_SEND, now, bytes, bytes, config);
}

static struct lc_choice all_to_all(const struct lc_op *op, const struct lc_situation *now,
                                   const struct lc_config *config)
{
    uint64_t size = lc_type_size(op->type), all;

    if (now->ranks < 2 || !lc_policy_exchanges(config, now->profile) ||
        __builtin_mul_overflow((uint64_t)op->count, size * (uint64_t)now->ranks, &all))
        return nccl(LC_NCCL_NO_FASTER_PATH);
    if (!takes_exchange(op->kind, now, op->count * size, all, config))
        return nccl(op->count * size < config->exchange_min_bytes ? LC_NCCL_SMALL
                                                                  : LC_NCCL_NO_FASTER_PATH);
    if (!now->committed)
        return nccl(LC_NCCL_NOT_COMMITTED);
    return (struct lc_choice){ LC_PATH_EXCHANGE, LC_RINGS_EXCHANGE };
}

struct lc_choice lc_policy(const struct lc_op *op, const struct lc_situation *now,
                           const struct lc_config *config)
{
    bool reduction = op->kind == LC_OP_ALL_REDUCE || op->kind == LC_OP_REDUCE_SCATTER;
    uint64_t bytes = lc_op_bytes(op, now->ranks);
    bool wants_cast, wants_pack, wants_rings;

    if (op->kind == LC_OP_ALL_TO_ALL)
        return all_to_all(op, now, config);
    if (!reduction || now->ranks < 2 || is_absurd(op, now->ranks))
        return nccl(LC_NCCL_NO_FASTER_PATH);
    wants_cast = can_cast(op, now, config) && bytes >= config->min_bytes &&
                 !is_small_on_one_machine(now, bytes, config) &&
                 !is_one_shot(op, now, bytes, config);
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
