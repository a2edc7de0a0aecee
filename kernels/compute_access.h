/* SPDX-License-Identifier: Apache-2.0
 *
 * How threads of the compute kernels touch memory: groups of elements by wide accesses where the group is whole and
 * aligned, else one by one. Compiled by gcc and by nvcc (with -fmad=false, so that both round alike).
 */
#ifndef LK_COMPUTE_ACCESS_H
#define LK_COMPUTE_ACCESS_H

#include "kernels/compute_internal.h"
#include "kernels/value_internal.h"

#ifdef __CUDA_ARCH__
#define LK_UNROLL _Pragma("unroll")
#else
#define LK_UNROLL
#endif

#ifndef __CUDACC__
/* Sixteen and eight bytes that are aligned as the device needs it: the compiler uses instructions that fail otherwise. */
typedef uint32_t lk_wide16 __attribute__((vector_size(16), may_alias));
typedef uint32_t lk_wide8 __attribute__((vector_size(8), may_alias));
#else
typedef uint4 lk_wide16;
typedef uint2 lk_wide8;
#endif

/* Streaming: what is touched once must not push out of L2 what comes back. */
LK_INLINE void load4(const float *p, float out[4])
{
#ifdef __CUDA_ARCH__
    float4 x = __ldcs((const float4 *)p);

    out[0] = x.x;
    out[1] = x.y;
    out[2] = x.z;
    out[3] = x.w;
#else
    lk_wide16 x = *(const lk_wide16 *)p;

    memcpy(out, &x, sizeof(x));
#endif
}

LK_INLINE void store4(float *p, const float in[4])
{
#ifdef __CUDA_ARCH__
    __stcs((float4 *)p, make_float4(in[0], in[1], in[2], in[3]));
#else
    lk_wide16 x;

    memcpy(&x, in, sizeof(x));
    *(lk_wide16 *)p = x;
#endif
}

/* A float that is no NaN, to nearest even; every NaN becomes 0x7fff. */
LK_INLINE uint32_t round_bf16(float x)
{
    uint32_t bits = float_bits(x);

    if ((bits & 0x7fffffffU) > 0x7f800000U)
        return LK_BF16_NAN;
    return (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16;
}

LK_INLINE uint32_t round_bf16_pair(float low, float high)
{
#ifdef __CUDA_ARCH__
    uint32_t pair;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return round_bf16(low) | round_bf16(high) << 16;
#endif
}

LK_INLINE void load4_bf16(const uint16_t *p, float out[4])
{
    uint32_t pairs[2];

#ifdef __CUDA_ARCH__
    uint2 x = __ldcs((const uint2 *)p);

    pairs[0] = x.x;
    pairs[1] = x.y;
#else
    lk_wide8 x = *(const lk_wide8 *)p;

    memcpy(pairs, &x, sizeof(x));
#endif
    LK_UNROLL
    for (size_t i = 0; i < 2; i++) {
        out[2 * i] = bits_float(pairs[i] << 16);
        out[2 * i + 1] = bits_float(pairs[i] & 0xffff0000U);
    }
}

LK_INLINE void store4_bf16(uint16_t *p, const float in[4])
{
    uint32_t pairs[2] = { round_bf16_pair(in[0], in[1]), round_bf16_pair(in[2], in[3]) };

#ifdef __CUDA_ARCH__
    *(uint2 *)p = make_uint2(pairs[0], pairs[1]);
#else
    lk_wide8 x;

    memcpy(&x, pairs, sizeof(x));
    *(lk_wide8 *)p = x;
#endif
}

#ifdef __CUDA_ARCH__
/* Plainly. Reads that leave L2 first (__ldcs) beside writes that do not cost 5 to 12 % where that was measured: of AdamW, of rows
 * on their way back from experts, of norms. */
LK_INLINE uint4 read_wide(const uint16_t *p)
{
    return *(const uint4 *)p;
}
#endif

LK_INLINE void load8_bf16(const uint16_t *p, float out[8])
{
    uint32_t pairs[4];

#ifdef __CUDA_ARCH__
    uint4 x = read_wide(p);

    pairs[0] = x.x;
    pairs[1] = x.y;
    pairs[2] = x.z;
    pairs[3] = x.w;
#else
    lk_wide16 x = *(const lk_wide16 *)p;

    memcpy(pairs, &x, sizeof(x));
#endif
    LK_UNROLL
    for (size_t i = 0; i < 4; i++) {
        out[2 * i] = bits_float(pairs[i] << 16);
        out[2 * i + 1] = bits_float(pairs[i] & 0xffff0000U);
    }
}

LK_INLINE void store8_bf16(uint16_t *p, const float in[8])
{
    uint32_t pairs[4];

    LK_UNROLL
    for (size_t i = 0; i < 4; i++)
        pairs[i] = round_bf16_pair(in[2 * i], in[2 * i + 1]);
#ifdef __CUDA_ARCH__
    *(uint4 *)p = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#else
    lk_wide16 x;

    memcpy(&x, pairs, sizeof(x));
    *(lk_wide16 *)p = x;
#endif
}

/* How groups are touched. LK_WHOLE is given as a constant where a block knows that every group is whole, so that its
 * loads stand in one piece of code without branches and are all in flight together. */
enum lk_width {
    LK_SINGLE = 0, /* something is not aligned */
    LK_WIDE = 1,   /* groups that are whole are touched at once */
    LK_WHOLE = 2,
};

/* Elements [at, at + 8) of an array of `count` as they are; those behind its end read as 0 and are not written. */
LK_INLINE lk_wide16 load_group(const uint16_t *base, uint64_t at, uint64_t count,
                               enum lk_width width)
{
    uint32_t pairs[4] = { 0 };
    lk_wide16 x;

    if (width == LK_WHOLE) {
#ifdef __CUDA_ARCH__
        return read_wide(base + at);
#else
        return *(const lk_wide16 *)(base + at);
#endif
    }
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        pairs[i / 2] |= at + i < count ? (uint32_t)base[at + i] << 16 * (i % 2) : 0;
    memcpy(&x, pairs, sizeof(x));
    return x;
}

LK_INLINE void store_group(uint16_t *base, uint64_t at, uint64_t count, enum lk_width width,
                           lk_wide16 x)
{
    uint32_t pairs[4];

    if (width == LK_WHOLE) {
        *(lk_wide16 *)(base + at) = x;
        return;
    }
    memcpy(pairs, &x, sizeof(x));
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        if (at + i < count)
            base[at + i] = (uint16_t)(pairs[i / 2] >> 16 * (i % 2));
}

LK_INLINE void unpack_group(lk_wide16 x, float out[8])
{
    uint32_t pairs[4];

    memcpy(pairs, &x, sizeof(x));
    LK_UNROLL
    for (size_t i = 0; i < 4; i++) {
        out[2 * i] = bits_float(pairs[i] << 16);
        out[2 * i + 1] = bits_float(pairs[i] & 0xffff0000U);
    }
}

LK_INLINE lk_wide16 pack_group(const float in[8])
{
    uint32_t pairs[4];
    lk_wide16 x;

    LK_UNROLL
    for (size_t i = 0; i < 4; i++)
        pairs[i] = round_bf16_pair(in[2 * i], in[2 * i + 1]);
    memcpy(&x, pairs, sizeof(x));
    return x;
}

/* Elements [at, at + 4) of an array of `count`; those behind its end read as 0. */
LK_INLINE void read4(const float *base, uint64_t at, uint64_t count, enum lk_width width,
                     float out[4])
{
    if (width == LK_WHOLE || (width == LK_WIDE && at + 4 <= count)) {
        load4(base + at, out);
        return;
    }
    LK_UNROLL
    for (size_t i = 0; i < 4; i++)
        out[i] = at + i < count ? base[at + i] : 0;
}

LK_INLINE void read4_bf16(const uint16_t *base, uint64_t at, uint64_t count, enum lk_width width,
                          float out[4])
{
    if (width == LK_WHOLE || (width == LK_WIDE && at + 4 <= count)) {
        load4_bf16(base + at, out);
        return;
    }
    LK_UNROLL
    for (size_t i = 0; i < 4; i++)
        out[i] = at + i < count ? widen_bf16(base[at + i]) : 0;
}

LK_INLINE void write4(float *base, uint64_t at, uint64_t count, enum lk_width width,
                      const float in[4])
{
    if (width == LK_WHOLE || (width == LK_WIDE && at + 4 <= count)) {
        store4(base + at, in);
        return;
    }
    LK_UNROLL
    for (size_t i = 0; i < 4; i++)
        if (at + i < count)
            base[at + i] = in[i];
}

LK_INLINE void write4_bf16(uint16_t *base, uint64_t at, uint64_t count, enum lk_width width,
                           const float in[4])
{
    if (width == LK_WHOLE || (width == LK_WIDE && at + 4 <= count)) {
        store4_bf16(base + at, in);
        return;
    }
    LK_UNROLL
    for (size_t i = 0; i < 4; i++)
        if (at + i < count)
            base[at + i] = (uint16_t)round_bf16(in[i]);
}

LK_INLINE void read8_bf16(const uint16_t *base, uint64_t at, uint64_t count, enum lk_width width,
                          float out[8])
{
    if (width == LK_WHOLE || (width == LK_WIDE && at + 8 <= count)) {
        load8_bf16(base + at, out);
        return;
    }
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        out[i] = at + i < count ? widen_bf16(base[at + i]) : 0;
}

LK_INLINE void write8_bf16(uint16_t *base, uint64_t at, uint64_t count, enum lk_width width,
                           const float in[8])
{
    if (width == LK_WHOLE || (width == LK_WIDE && at + 8 <= count)) {
        store8_bf16(base + at, in);
        return;
    }
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        if (at + i < count)
            base[at + i] = (uint16_t)round_bf16(in[i]);
}

/* As read4(), with the default policy, for what is read again soon. */
LK_INLINE void read4_kept(const float *base, uint64_t at, uint64_t count, enum lk_width width,
                          float out[4])
{
#ifdef __CUDA_ARCH__
    if (width == LK_WHOLE) {
        float4 x = *(const float4 *)(base + at);

        out[0] = x.x;
        out[1] = x.y;
        out[2] = x.z;
        out[3] = x.w;
        return;
    }
#endif
    read4(base, at, count, width, out);
}

#endif
