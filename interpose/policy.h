/* SPDX-License-Identifier: Apache-2.0
 *
 * Which path a call takes. A pure function of the call, of settings that all ranks share and of committed state: every
 * rank that gets the same call answers the same.
 */
#ifndef LC_INTERPOSE_POLICY_H
#define LC_INTERPOSE_POLICY_H

#include "common/config.h"
#include "common/profile.h"
#include "interpose/ledger.h"
#include "interpose/op.h"
#include "interpose/redop.h"
#include "kernels/rings.h"

#define LC_SCAN_BYTES   4096
#define LC_MESSAGE_MOST (UINT64_C(1) << 47) /* bytes: no memory is that large */

enum lc_path {
    LC_PATH_NCCL,
    LC_PATH_CAST,     /* fp32 data, bf16 on NCCL's wire */
    LC_PATH_RINGS,    /* through peers' memory */
    LC_PATH_EXCHANGE, /* likewise, of bytes that nobody adds up */
    LC_PATH_PACK, /* grouped small all-reduces as one; decided finally when the group is known */
};

struct lc_choice {
    enum lc_path path;
    enum lc_outcome outcome; /* for the ledger: path and reason in one */
};

/* What is known beside the call itself. */
struct lc_situation {
    int ranks;
    bool committed; /* for this very call; false also where there is no agreement at all */
    bool grouped;
    bool rings;            /* are there, or may still come */
    bool mapped;           /* they are there: all ranks are on one machine */
    struct lc_redop redop; /* what op->redop means */
    const struct lc_profile
        *profile; /* of this machine, the same at all ranks; NULL: nothing was measured */
};

/* Some reduction may go through peers' memory. */
static inline bool lc_policy_reduces_in_rings(const struct lc_config *config,
                                              const struct lc_profile *profile)
{
    if (config->peer != LC_PEER_AUTO)
        return config->peer == LC_PEER_FORCE;
    return profile ? profile->n_rings > 0 : config->allreduce_wire != LC_WIRE_DATA;
}

/* Some all-to-all, send or receive may. Without a measurement of the machine none is known to win. */
static inline bool lc_policy_exchanges(const struct lc_config *config,
                                       const struct lc_profile *profile)
{
    return config->peer == LC_PEER_FORCE ||
           (config->peer == LC_PEER_AUTO && profile && profile->n_rings > 0);
}

/* Some call may. */
static inline bool lc_policy_wants_rings(const struct lc_config *config,
                                         const struct lc_profile *profile)
{
    return lc_policy_reduces_in_rings(config, profile) || lc_policy_exchanges(config, profile);
}

/* True if no such call can leave NCCL's path, whatever else is known: saves looking further on every call. */
static inline bool lc_policy_is_nccl(const struct lc_op *op, bool grouped,
                                     const struct lc_config *config,
                                     const struct lc_profile *profile)
{
    if (op->kind == LC_OP_ALL_TO_ALL)
        return !lc_policy_exchanges(config, profile);
    return (op->kind != LC_OP_ALL_REDUCE && op->kind != LC_OP_REDUCE_SCATTER) ||
           (config->allreduce_wire == LC_WIRE_DATA &&
            !lc_policy_reduces_in_rings(config, profile) && !(grouped && config->coalesce));
}

/* Data of the largest one-shot call. Everybody sends everything to everybody, so that more ranks have less to gain; lines of a
 * segment take 4 MB to 8 MB. */
static inline uint32_t lc_policy_line_bytes(uint32_t ranks)
{
    size_t least = (size_t)64 << 10, bytes = ranks > 1 ? LK_LINES_MAX / (ranks - 1) : 0;

    return (uint32_t)(bytes < least ? least : bytes / least * least);
}

/* In one step, instead of in two with half as many bytes: an all-reduce, or several as one, of `bytes` of data, if it fits
 * the lines. */
bool lc_policy_one_shot(const struct lc_situation *now, size_t bytes,
                        const struct lc_config *config);

/* CTAs of a kernel over `bytes` of data, at most `most`. */
uint32_t lc_policy_ctas(const struct lc_op *op, const struct lc_situation *now, bool bf16_wire,
                        size_t bytes, uint32_t most);

struct lc_choice lc_policy(const struct lc_op *op, const struct lc_situation *now,
                           const struct lc_config *config);

/* A send or receive of so many bytes goes through peers' memory, once its pair is committed. Both ends answer the same. */
bool lc_policy_takes_message(const struct lc_situation *now, uint64_t bytes,
                             const struct lc_config *config);

/* A send of so many bytes is searched for zeros. The sender alone asks. Always, but for what is short: the data is in
 * registers anyway, and what the device has found in earlier ones the host does not know without waiting. */
static inline bool lc_policy_scans(uint64_t bytes)
{
    return bytes >= LC_SCAN_BYTES;
}

/* bf16 travels by all-to-all and is summed in fp32 here, instead of by NCCL hop by hop. */
bool lc_wire_is_accurate(const struct lc_config *config, int ranks);

/* Grouped all-reduces of up to this many bytes are worth packing, from LC_PACK_LEAST of one kind on. */
#define LC_PACK_BYTES ((size_t)1 << 20)
#define LC_PACK_LEAST 2

#endif
