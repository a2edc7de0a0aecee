/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic that both libraries share, so that their bits agree. Compiled by gcc and by nvcc.
 */
#ifndef LK_VALUE_INTERNAL_H
#define LK_VALUE_INTERNAL_H

#include "kernels/loongkernels.h"

#include <string.h>

#ifdef __CUDACC__
#define LK_INLINE static __host__ __device__ __forceinline__
#else
#define LK_INLINE static inline
#endif

#define LK_BF16_NAN 0x7fffU
#define LK_FP16_NAN 0x7fffU
#define LK_FP32_NAN 0x7fffffffU

LK_INLINE uint32_t float_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

LK_INLINE float bits_float(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

LK_INLINE float widen_bf16(uint32_t bits)
{
    return bits_float(bits << 16);
}

LK_INLINE float widen_fp16(uint32_t half)
{
    uint32_t sign = (half & 0x8000U) << 16;
    uint32_t exponent = half >> 10 & 0x1fU;
    uint32_t fraction = half & 0x3ffU;

    if (exponent == 0) /* zero or denormal: fraction units of 2^-24, exact in fp32 */
        return bits_float(sign | float_bits((float)fraction * 0x1p-24F));
    exponent = exponent == 31 ? 255 : exponent + 112;
    return bits_float(sign | exponent << 23 | fraction << 13);
}

/* Never part of a fused multiply-add: a product is rounded before it is used. The host library is compiled with
 * -ffp-contract=off for the same reason. */
LK_INLINE float multiply(float x, float y)
{
#ifdef __CUDA_ARCH__
    return __fmul_rn(x, y);
#else
    return x * y;
#endif
}

/* What a NaN becomes in bf16, given the value that was scaled. */
LK_INLINE uint32_t nan_bf16(float unscaled)
{
    uint32_t bits = float_bits(unscaled);

    return (bits & 0x7fffffffU) > 0x7f800000U ? bits >> 16 | 0x40U : LK_BF16_NAN;
}

/* scale * x in bf16, to nearest even or, with `stochastic`, by adding 16 random bits below the kept part. */
LK_INLINE uint32_t narrow_bf16(float x, float scale, int stochastic, uint32_t random)
{
    uint32_t bits = float_bits(multiply(x, scale));

    if ((bits & 0x7fffffffU) > 0x7f800000U)
        return nan_bf16(x);
    return (bits + (stochastic ? random : 0x7fffU + (bits >> 16 & 1U))) >> 16;
}

/* `value` in bf16 with what its residual owes: the rules are in loongkernels.h (lk_cast_feedback). */
LK_INLINE uint32_t feed_value(float value, float *residual, int stochastic, uint32_t random)
{
    float limit = multiply(bits_float(float_bits(value) & 0x7fffffffU), 0x1p-8F);
    float owed = *residual == *residual ? *residual : 0;
    float paid = owed > limit ? limit : owed < -limit ? -limit : owed;
    float rest = owed - paid;
    uint32_t sent;

    *residual = 0;
    if ((float_bits(value) & 0x7f800000U) == 0x7f800000U)
        return narrow_bf16(value, 1, 0, 0);
    if (limit > 0 && (rest > 64 * limit || rest < -64 * limit))
        rest = 0;
    sent = narrow_bf16(paid == 0 ? value : value + paid, 1, stochastic,
                       random); /* -0.0 stays what it is */
    if ((sent & 0x7f80U) != 0x7f80U)
        *residual = rest + ((value - widen_bf16(sent)) + paid);
    return sent;
}

/* One element of lk_cast_feedback. */
LK_INLINE uint32_t feed_bf16(float x, float scale, float *residual, int stochastic, uint32_t random)
{
    float value = multiply(x, scale);
    uint32_t sent = feed_value(value, residual, stochastic, random);

    return value == value ? sent : narrow_bf16(x, scale, 0, 0);
}

/* To nearest even; every NaN becomes 0x7fff. */
LK_INLINE uint32_t narrow_fp16(float x)
{
    uint32_t sign = float_bits(x) >> 16 & 0x8000U;
    uint32_t bits = float_bits(x) & 0x7fffffffU;

    if (bits > 0x7f800000U)
        return LK_FP16_NAN;
    if (bits >= 0x477ff000U) /* nearer to what would be 65536 than to 65504 */
        return sign | 0x7c00U;
    if (bits < 0x38800000U) /* zero or denormal: the addition rounds to units of 2^-24 */
        return sign | (float_bits(bits_float(bits) + 0.5F) - float_bits(0.5F));
    return sign | (bits - 0x38000000U + 0xfffU + (bits >> 13 & 1U)) >> 13;
}

/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). */
LK_INLINE void philox_words(uint64_t key, const uint32_t counter[4], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);

#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xd2511f53U * c0;
        uint64_t p1 = (uint64_t)0xcd9e8d57U * c2;

        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9e3779b9U;
        k1 += 0xbb67ae85U;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

LK_INLINE void philox(uint64_t seed, uint64_t counter, uint32_t out[4])
{
    const uint32_t words[4] = { (uint32_t)counter, (uint32_t)(counter >> 32), 0, 0 };

    philox_words(seed, words, out);
}

/* Random bits of element e = 8 * counter + lane of a block: the rule of struct lk_rng. */
LK_INLINE uint32_t random_bits(const uint32_t block[4], uint32_t lane)
{
    return block[lane / 2] >> 16 * (lane & 1U) & 0xffffU;
}

/* The factor of one execution. `pointer` lies where the caller runs. */
LK_INLINE float scale_value(float value, enum lk_type type, const void *pointer)
{
    if (!pointer)
        return value;
    if (type == LK_FP32)
        return *(const float *)pointer;
    return type == LK_BF16 ? widen_bf16(*(const uint16_t *)pointer)
                           : widen_fp16(*(const uint16_t *)pointer);
}

#endif
