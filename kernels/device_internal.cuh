/* SPDX-License-Identifier: Apache-2.0
 *
 * What the device code of the library shares: warps, wide accesses, conversion of eight values.
 */
#ifndef LK_DEVICE_INTERNAL_CUH
#define LK_DEVICE_INTERNAL_CUH

#include "kernels/value_internal.h"

#include <cuda_runtime.h>

enum {
    LK_THREADS = 256,
    LK_WARPS = LK_THREADS / 32,
};

/* Sources are read once: evict-first, so that they do not push the wire buffer, which NCCL or the unpacking kernel
 * reads next, out of L2. Results are stored with the default policy for the same reason. */
static __device__ __forceinline__ float4 load_float4(const float *p)
{
    return __ldcs(reinterpret_cast<const float4 *>(p));
}

static __device__ __forceinline__ uint4 load_uint4(const void *p)
{
    return __ldcs(static_cast<const uint4 *>(p));
}

/* Addresses come as numbers; the state space is named so that no generic store is made. */
static __device__ __forceinline__ void store_uint4(void *p, uint4 value)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(p)), "r"(value.x), "r"(value.y), "r"(value.z),
                   "r"(value.w)
                 : "memory");
}

static __device__ __forceinline__ void store_float4(float *p, float4 value)
{
    store_uint4(p, make_uint4(float_bits(value.x), float_bits(value.y), float_bits(value.z),
                              float_bits(value.w)));
}

static __device__ __forceinline__ void store_one(uint32_t *p, uint32_t value)
{
    asm volatile("st.global.u32 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(p)), "r"(value)
                 : "memory");
}

static __device__ __forceinline__ void store_one(uint16_t *p, uint16_t value)
{
    asm volatile("st.global.u16 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(p)), "h"(value)
                 : "memory");
}

/* Two values rounded to nearest even; a NaN becomes 0x7fff. */
static __device__ __forceinline__ uint32_t narrow_pair(float low, float high)
{
    uint32_t pair;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* The same in fp16; a NaN becomes 0x7fff. */
static __device__ __forceinline__ uint32_t narrow_half_pair(float low, float high)
{
    uint32_t pair;

    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

static __device__ __forceinline__ float widen_half(uint32_t bits)
{
    float x;

    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
    return x;
}

static __device__ __forceinline__ float widen_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float widen_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000U);
}

/* A warp moves tiles of 256 elements of which one side has 16-byte groups of 8 elements (bf16) and the other of 4
 * (fp32). Each access of the warp is contiguous: a lane's fp32 groups are at 4 * lane and 128 + 4 * lane, its bf16
 * group at 8 * (lane / 2) of the lower half (even lanes) or of the upper half (odd lanes). Lanes 2p and 2p + 1 hold
 * the same 16 elements either way and swap half of them. */
static __device__ __forceinline__ uint32_t wide_lane_begin(uint32_t lane)
{
    return 4 * lane;
}

static __device__ __forceinline__ uint32_t packed_lane_begin(uint32_t lane)
{
    return (lane & 1) * 128 + (lane >> 1) * 8;
}

static __device__ __forceinline__ float4 swap_float4(float4 mine)
{
    return make_float4(__shfl_xor_sync(~0U, mine.x, 1), __shfl_xor_sync(~0U, mine.y, 1),
                       __shfl_xor_sync(~0U, mine.z, 1), __shfl_xor_sync(~0U, mine.w, 1));
}

static __device__ __forceinline__ float4 select_float4(bool first, float4 a, float4 b)
{
    return make_float4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

#endif
