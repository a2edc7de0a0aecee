/* SPDX-License-Identifier: Apache-2.0
 *
 * What `loongcomm tune` tries, in the order of what it may gain. */
#include "interpose/cli/tune.h"

#include "interpose/policy.h"

#define AR LC_PROFILE_ALL_REDUCE
#define RS LC_PROFILE_REDUCE_SCATTER
#define AG LC_PROFILE_ALL_GATHER
#define AA LC_PROFILE_ALL_TO_ALL
#define SR LC_PROFILE_SEND

enum {
    EXACT,
    BF16,
};

/* As NCCL numbers them. */
enum {
    TREE = 0,
    RING = 1,
    NVLS = 4,
    PAT = 6,
};
enum {
    LL,
    LL128,
    SIMPLE,
};

#define EQUAL(what)      \
    {                    \
        LC_TUNE_EQUAL,   \
        {                \
            .op = (what) \
        }                \
    }
#define AGAIN(what)      \
    {                    \
        LC_TUNE_AGAIN,   \
        {                \
            .op = (what) \
        }                \
    }
#define CAST(what)                         \
    {                                      \
        LC_TUNE_CAST,                      \
        {                                  \
            .op = (what), .protocol = BF16 \
        }                                  \
    }
#define RINGS(what, wire, kernel, ctas)                                \
    {                                                                  \
        LC_TUNE_RINGS,                                                 \
        {                                                              \
            .who = LC_PROFILE_RINGS, .op = (what), .protocol = (wire), \
            .algorithm = LC_PROFILE_##kernel, .width = (ctas)          \
        }                                                              \
    }
#define NCCL(what, how, proto, channels)                                                   \
    {                                                                                      \
        LC_TUNE_NCCL,                                                                      \
        {                                                                                  \
            .who = LC_PROFILE_NCCL, .op = (what), .algorithm = (how), .protocol = (proto), \
            .width = (channels)                                                            \
        }                                                                                  \
    }

/* A communicator has a few channels, and more are the same as those few: that is seen when it is there. */
#define CHANNELS(what, how, proto)                                                   \
    NCCL(what, how, proto, 0), NCCL(what, how, proto, 1), NCCL(what, how, proto, 2), \
        NCCL(what, how, proto, 4), NCCL(what, how, proto, 8)

const struct lc_tune_step lc_tune_steps[] = {
    AGAIN(AR),
    AGAIN(RS),
    AGAIN(AG),
    CHANNELS(AR, TREE, LL),
    CHANNELS(AR, TREE, LL128),
    CHANNELS(AR, TREE, SIMPLE),
    CHANNELS(AR, RING, LL),
    CHANNELS(AR, RING, LL128),
    CHANNELS(AR, RING, SIMPLE),
    CHANNELS(RS, RING, LL),
    CHANNELS(RS, RING, LL128),
    CHANNELS(RS, RING, SIMPLE),
    CHANNELS(RS, PAT, SIMPLE),
    CHANNELS(AG, RING, LL),
    CHANNELS(AG, RING, LL128),
    CHANNELS(AG, RING, SIMPLE),
    CHANNELS(AG, PAT, SIMPLE),
    NCCL(AR, NVLS, SIMPLE, 0),
    EQUAL(AR),
    RINGS(AR, EXACT, TWO_SHOT, 32),
    RINGS(AR, EXACT, ONE_SHOT, 16),
    EQUAL(AA),
    RINGS(AA, EXACT, EXCHANGE, 32),
    CAST(AR),
    RINGS(AR, BF16, TWO_SHOT, 32),
    RINGS(AR, EXACT, TWO_SHOT, 16),
    EQUAL(SR),
    RINGS(SR, EXACT, EXCHANGE, 32),
    EQUAL(RS),
    RINGS(RS, EXACT, TWO_SHOT, 32),
    RINGS(AR, EXACT, ONE_SHOT, 4),
    RINGS(AR, EXACT, TWO_SHOT, 8),
    RINGS(AA, EXACT, EXCHANGE, 16),
    RINGS(SR, EXACT, EXCHANGE, 16),
    RINGS(AR, BF16, TWO_SHOT, 16),
    RINGS(AR, BF16, TWO_SHOT, 8),
    CAST(RS),
    RINGS(RS, BF16, TWO_SHOT, 32),
    RINGS(RS, EXACT, TWO_SHOT, 16),
    RINGS(RS, EXACT, TWO_SHOT, 8),
    RINGS(RS, BF16, TWO_SHOT, 16),
    RINGS(AA, EXACT, EXCHANGE, 8),
    RINGS(SR, EXACT, EXCHANGE, 8),
};
const int lc_tune_n_steps = (int)(sizeof(lc_tune_steps) / sizeof(*lc_tune_steps));
_Static_assert(sizeof(lc_tune_steps) / sizeof(*lc_tune_steps) <= LC_TUNE_STEPS, "room for each");

/* One-shot kernels are for what fits their lines; above that they are two-shot ones under another name. */
#define ONE_SHOT_BYTES ((uint64_t)256 << 10)

bool lc_tune_step_takes(const struct lc_tune_step *step, int ranks, uint64_t bytes)
{
    return step->kind != LC_TUNE_RINGS || step->way.algorithm != LC_PROFILE_ONE_SHOT ||
           (bytes <= ONE_SHOT_BYTES && bytes <= lc_policy_line_bytes((uint32_t)ranks));
}

bool lc_tune_step_is_turn(const struct lc_tune_step *step)
{
    return step->kind == LC_TUNE_NCCL || step->kind == LC_TUNE_AGAIN;
}

void lc_tune_step_name(const struct lc_tune_step *step, char *out, size_t size)
{
    static const char *const kernels[] = { "one-shot", "two-shot", "exchange" };
    const struct lc_profile_rule *way = &step->way;
    const char *op = lc_profile_op_name(way->op);

    switch (step->kind) {
    case LC_TUNE_EQUAL: (void)snprintf(out, size, "equal %s", op); break;
    case LC_TUNE_AGAIN: (void)snprintf(out, size, "again %s", op); break;
    case LC_TUNE_CAST: (void)snprintf(out, size, "cast %s", op); break;
    case LC_TUNE_RINGS:
        (void)snprintf(out, size, "rings %s %s %s %u", op, way->protocol == BF16 ? "bf16" : "exact",
                       kernels[way->algorithm], way->width);
        break;
    default:
        (void)snprintf(out, size, "nccl %s %s %s %u", op, lc_profile_algorithm_name(way->algorithm),
                       lc_profile_protocol_name(way->protocol), way->width);
    }
}
