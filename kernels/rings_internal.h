/* SPDX-License-Identifier: Apache-2.0
 *
 * From the public calls of rings.h to launches. rings_api.c checks arguments and cuts lists into launches; a backend
 * (cuda_rings.cu or host_rings.c, one per library) runs each launch.
 */
#ifndef LK_RINGS_INTERNAL_H
#define LK_RINGS_INTERNAL_H

#include "kernels/ring_layout.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum lk_ring_work {
    LK_WORK_ALL_REDUCE,
    LK_WORK_REDUCE_SCATTER,
    LK_WORK_LINES,
};

/* One tensor or part of one, as it travels by value in the kernel's arguments. Entries lie in the tile space one behind
 * another: entry i ends where entry i + 1 begins, the last one at head.packs. */
struct lk_ring_entry {
    uint64_t in;
    uint64_t out;
    uint32_t count; /* elements; of one part of a reduce-scatter */
    uint32_t first; /* pack of the tile space at which it begins */
};

/* What the entries of a launch have in common. */
struct lk_ring_head {
    struct lk_rings rings;
    const void *pre_pointer; /* to a scalar of pre_type, read when the launch runs; NULL: pre */
    const uint64_t *device_offset; /* added to index when the launch runs; NULL: nothing */
    float *
        residual; /* of the space's first element, of part 0; NULL: no feedback. Only with fp32 data and a bf16 wire */
    uint64_t seed;
    uint64_t index; /* number that the space's first element draws, modulo 2^64 */
    uint64_t
        stride; /* reduce-scatter: elements from a rank's part to the next one's; 0: the entry's count */
    float pre;
    float post;
    uint32_t packs; /* of the space; of one part's space of a reduce-scatter */
    uint32_t tile_granules;
    uint32_t ctas; /* 1 .. channels */
    uint16_t n;
    uint8_t work; /* enum lk_ring_work */
    uint8_t type; /* enum lk_type, as wire and pre_type */
    uint8_t wire;
    uint8_t pre_type;
    uint8_t rounding; /* LK_STOCHASTIC only with fp32 data and a bf16 wire */
    uint8_t pad[5];
};

/* Size classes of the argument block. The largest is what a kernel takes since CUDA 12.1. */
#define LK_RING_SMALL ((1024 - sizeof(struct lk_ring_head)) / sizeof(struct lk_ring_entry))
#define LK_RING_MAX   ((32764 - sizeof(struct lk_ring_head)) / sizeof(struct lk_ring_entry))

/* Longer tensors become several entries, larger spaces several launches; both are multiples of every pack. */
#define LK_RING_ELEMENTS (UINT64_C(1) << 31)
#define LK_RING_PACKS    (UINT64_C(1) << 31)

/* head and the used class of entries are the kernel's argument as they lie here. */
struct lk_ring_launch {
    struct lk_ring_head head;
    struct lk_ring_entry entries[LK_RING_MAX]; /* head.n of them */
};

LK_INLINE uint32_t lk_pack_elements(uint32_t wire)
{
    return wire == LK_FP32 ? LK_PACK_BYTES / 4 : LK_PACK_BYTES / 2;
}

LK_INLINE uint64_t lk_packs(uint64_t count, uint32_t wire)
{
    return count / lk_pack_elements(wire) + (count % lk_pack_elements(wire) != 0);
}

/* The pack of the tile space where a tensor of `packs` packs begins that comes behind the first `before` ones. Granules of a
 * large tensor lie in memory as they would if it were alone: moved along its lines, and none of them shared. Calls in lines
 * have no granules. */
#define LK_LARGE_PACKS ((uint64_t)16 * (LK_GRANULE / LK_PACK_BYTES))
LK_INLINE uint64_t lk_place(uint32_t work, uint64_t before, uint64_t packs)
{
    uint64_t granule = LK_GRANULE / LK_PACK_BYTES;

    return work == LK_WORK_LINES || packs < LK_LARGE_PACKS
               ? before
               : (before + granule - 1) / granule * granule;
}

/* The residual of a pack's first element: those of a launch lie as its tile space does, one part behind another. */
LK_INLINE float *lk_residual(const struct lk_ring_head *head, uint32_t part, uint32_t pack)
{
    return head->residual + ((uint64_t)part * head->packs + pack) * (LK_PACK_BYTES / 2);
}

/* The bits of a type, and what they stand for. */
LK_INLINE float lk_widen(uint32_t type, uint32_t bits)
{
    return type == LK_FP32   ? bits_float(bits)
           : type == LK_BF16 ? widen_bf16(bits)
                             : widen_fp16(bits);
}

/* Rounded once; every NaN becomes the type's own. */
LK_INLINE uint32_t lk_narrow(uint32_t type, float value, int stochastic, uint32_t random)
{
    if (value != value)
        return type == LK_FP32 ? LK_FP32_NAN : LK_BF16_NAN; /* fp16's has the same bits */
    if (type == LK_FP32)
        return float_bits(value);
    return type == LK_BF16 ? narrow_bf16(value, 1, stochastic, random) : narrow_fp16(value);
}

/* A value on a bf16 wire with what its residual owes. */
LK_INLINE uint32_t lk_feed(float value, float *residual, int stochastic, uint32_t random)
{
    uint32_t sent = feed_value(value, residual, stochastic, random);

    return value == value ? sent : LK_BF16_NAN;
}

/* True of what a call can be made with. */
bool lk_good_rings(const struct lk_rings *rings);

/* Of the backend: the most ranks that it serves, at most LK_RANKS_MAX. */
extern const uint32_t lk_backend_ranks;

/* Of the backend. head.n >= 1 and packs >= 1; all entries have a count. */
int lk_run_rings(const struct lk_ring_launch *launch, void *stream);

/* A kernel that takes a launch as its argument, and how it is launched. */
struct lk_ring_kernel {
    const void *kernel;
    uint32_t threads;
    uint32_t shared;      /* bytes of dynamic shared memory, besides what the call takes */
    uint32_t early;       /* it may begin before the kernel before it has ended, and waits itself */
    uint32_t same_domain; /* it is waited for with other kernels' memory (lk_launch_domain) */
};

/* Kinds of calls that variants have kernels for, as bits. */
enum lk_variant_kind {
    LK_KIND_NARROWED = 1,
    LK_KIND_FP32 = 2,
    LK_KIND_BF16 = 4,
    LK_KIND_EXCHANGE = 8,
    LK_KIND_LINES = 16,
};

/* Of libloongkernels-variants.so, which is the CUDA library with more kernels in it, for benchmarks and tests: launches
 * of the whole process from now on use that variant where it has a kernel for them, those of number 0 always. Its kernels
 * are loaded on the current device; the callers do so on each that they use. Not while another thread makes a launch.
 * NULL: there is none of that number, nothing has changed. Otherwise its name. */
const char *lk_rings_variant(int number);

/* Likewise: the kinds that a variant has kernels for; of number 0: 0. */
unsigned int lk_rings_variant_kinds(int number);

/* Of the CUDA backend, and only there where variants are linked in: the kernel of the one that was chosen, for a call of
 * one kind and of few entries; NULL: it has none. */
const struct lk_ring_kernel *lk_find_variant(enum lk_variant_kind kind);

/* Of the CUDA backend: loads its kernels on the current device. 0 or a cudaError_t. */
int lk_load_rings(void);

#ifdef __cplusplus
}
#endif

#endif
