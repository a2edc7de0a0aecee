/* SPDX-License-Identifier: Apache-2.0
 *
 * Stochastic rounding in device code, by the rule of struct lk_rng. All elements of a pack share a block where numbers are
 * multiples of eight; elsewhere each is drawn alone.
 */
#ifndef LK_DEVICE_RANDOM_CUH
#define LK_DEVICE_RANDOM_CUH

#include "kernels/value_internal.h"

/* Random bits of one element. */
static __device__ __forceinline__ uint32_t random_of(uint64_t seed, uint64_t index)
{
    uint32_t block[4];

    philox(seed, index / 8, block);
    /* constant indices only: a variable one would put the block into local memory */
    uint32_t pair = index & 4 ? (index & 2 ? block[3] : block[2])
                              : (index & 2 ? block[1] : block[0]);
    return pair >> 16 * static_cast<uint32_t>(index & 1) & 0xffffU;
}

/* Of eight from `index` on, a pair in each word. */
static __device__ __forceinline__ void random_eight(uint64_t seed, uint64_t index,
                                                    uint32_t random[4])
{
    if (index % 8 == 0) {
        philox(seed, index / 8, random);
        return;
    }
#pragma unroll 1
    for (int i = 3; i >= 0; i--) {
        random[3] = random[2], random[2] = random[1], random[1] = random[0];
        random[0] = random_of(seed, index + 2 * i) | random_of(seed, index + 2 * i + 1) << 16;
    }
}

/* To bf16 with random bits. */
static __device__ __forceinline__ uint32_t round_up_or_down(float value, uint32_t random)
{
    return value != value ? LK_BF16_NAN : (float_bits(value) + random) >> 16;
}

static __device__ __forceinline__ uint4 narrow_stochastic(const float x[8], uint64_t seed,
                                                          uint64_t index)
{
    uint32_t random[4];
    uint32_t out[4];

    random_eight(seed, index, random);
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = round_up_or_down(x[2 * i], random[i] & 0xffffU) |
                 round_up_or_down(x[2 * i + 1], random[i] >> 16) << 16;
    return make_uint4(out[0], out[1], out[2], out[3]);
}

#endif
