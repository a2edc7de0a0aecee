/* SPDX-License-Identifier: Apache-2.0
 *
 * A profile: what was measured to be fastest on one kind of machine. Text, one entry a line, `#` begins a comment:
 *
 *     loongcomm.profile/1
 *     gpu NVIDIA H200                       # it holds for this GPU (as NVML names it) ...
 *     nccl 2.28.9                           # ... and this release of NCCL
 *     nccl all-reduce 2 2 0 65536 tree ll 4
 *     rings all-reduce 2 exact 4096 0 two-shot 32
 *
 *  - nccl OPERATION RANKS NODES FROM TO ALGORITHM PROTOCOL CHANNELS: NCCL does best so from FROM up to, but without, TO bytes
 *    (TO 0: no end). OPERATION: broadcast, reduce, all-gather, reduce-scatter, all-reduce. ALGORITHM: tree, ring,
 *    collnet-direct, collnet-chain, nvls, nvls-tree, pat. PROTOCOL: ll, ll128, simple. CHANNELS 0: as NCCL chooses.
 *  - rings OPERATION RANKS WIRE FROM TO KERNEL CTAS: the peer-mapped kernels beat NCCL there. OPERATION: all-reduce,
 *    reduce-scatter. WIRE: exact, bf16. KERNEL: one-shot, two-shot. Or OPERATION all-to-all or send, WIRE exact, KERNEL
 *    exchange; bytes are those of the send buffer: of all ranks' parts, and of one message.
 *
 * Ranges of one operation, ranks and nodes (or wire) do not overlap. What is not named is left to NCCL.
 *
 * A profile comes from outside, and all ranks must use the same one: `hash` is equal for files that mean the same.
 */
#ifndef LC_COMMON_PROFILE_H
#define LC_COMMON_PROFILE_H

#include <stddef.h>
#include <stdint.h>

/* Numbers as NCCL counts them (ncclFunc_t, NCCL_ALGO_*, NCCL_PROTO_*). */
enum lc_profile_op {
    LC_PROFILE_BROADCAST,
    LC_PROFILE_REDUCE,
    LC_PROFILE_ALL_GATHER,
    LC_PROFILE_REDUCE_SCATTER,
    LC_PROFILE_ALL_REDUCE,
    LC_PROFILE_ALL_TO_ALL, /* these are ours alone, and their numbers none of NCCL's */
    LC_PROFILE_SEND,
    LC_PROFILE_OPS,
};
#define LC_PROFILE_ALGORITHMS 7
#define LC_PROFILE_PROTOCOLS  3
#define LC_PROFILE_ONE_SHOT   0
#define LC_PROFILE_TWO_SHOT   1
#define LC_PROFILE_EXCHANGE   2
#define LC_PROFILE_KERNELS    3
#define LC_PROFILE_WIRES      2 /* exact, bf16 */

enum lc_profile_who {
    LC_PROFILE_NCCL,
    LC_PROFILE_RINGS,
};

struct lc_profile_rule {
    uint8_t who;           /* enum lc_profile_who */
    uint8_t op;            /* enum lc_profile_op */
    uint8_t algorithm;     /* or kernel */
    uint8_t protocol;      /* or wire */
    uint16_t width;        /* channels or CTAs */
    uint32_t ranks, nodes; /* nodes 1 for rings */
    uint64_t from, to;     /* bytes, half open; UINT64_MAX: no end */
};

struct lc_profile {
    char gpu[96];
    int nccl; /* as ncclGetVersion counts: 22809 */
    uint64_t hash;
    size_t n_rings; /* rules about rings */
    size_t n;
    struct lc_profile_rule rules[];
};

#define LC_PROFILE_FILE_MAX  ((size_t)1 << 20)
#define LC_PROFILE_RULES_MAX 8192

/* NULL after one warning that names the file, the line and what is accepted. Freed by free(). */
struct lc_profile *lc_profile_load(const char *path);
struct lc_profile *lc_profile_parse(const char *name, const char *text, size_t size);

/* NULL: nothing is known of it. */
const struct lc_profile_rule *lc_profile_nccl(const struct lc_profile *profile, unsigned op,
                                              uint64_t ranks, uint64_t nodes, uint64_t bytes);
const struct lc_profile_rule *lc_profile_rings(const struct lc_profile *profile, unsigned op,
                                               uint64_t ranks, unsigned wire, uint64_t bytes);

/* The rule as a line of a file, without its newline. The number of characters, as snprintf. */
int lc_profile_print_rule(const struct lc_profile_rule *rule, char *out, size_t size);

/* The first GPU of this machine, as the driver names it; "none" where there is no driver. */
void lc_profile_gpu_here(char *out, size_t size);

/* Words of a rule, for what prints them; valid indices only. */
const char *lc_profile_op_name(unsigned op);
const char *lc_profile_algorithm_name(unsigned algorithm);
const char *lc_profile_protocol_name(unsigned protocol);

#endif
