/* SPDX-License-Identifier: Apache-2.0
 *
 * Sum of bf16 shards in fp32, in shard order.
 */
#include "kernels/device_internal.cuh"
#include "kernels/device_random.cuh"
#include "kernels/list_internal.h"

#include <cerrno>

namespace
{

constexpr uint32_t tile = 256;      /* elements a warp */
constexpr uint32_t loads_ahead = 4; /* shards whose loads are under way at once */

struct eight {
    float x[8];
};

__device__ __forceinline__ void add_group(eight *sum, const uint4 &group)
{
    const uint32_t words[4] = { group.x, group.y, group.z, group.w };

#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum->x[2 * i] = __fadd_rn(sum->x[2 * i], widen_low(words[i]));
        sum->x[2 * i + 1] = __fadd_rn(sum->x[2 * i + 1], widen_high(words[i]));
    }
}

/* Shards may be replaced by the sum: no load may be done through the read-only cache, and a thread has read all
 * shards at its elements before it writes. */
__device__ __forceinline__ eight add_shards(const uint16_t *shards, uint64_t stride, uint32_t n)
{
    uint4 group = load_uint4(shards);
    eight sum = {
        {widen_low(group.x), widen_high(group.x), widen_low(group.y), widen_high(group.y),
         widen_low(group.z), widen_high(group.z), widen_low(group.w), widen_high(group.w)}
    };

    for (uint32_t r = 1; r < n; r += loads_ahead) {
        uint4 next[loads_ahead];

#pragma unroll
        for (uint32_t j = 0; j < loads_ahead; j++)
            if (r + j < n)
                next[j] = load_uint4(shards + (r + j) * stride);
#pragma unroll
        for (uint32_t j = 0; j < loads_ahead; j++)
            if (r + j < n)
                add_group(&sum, next[j]);
    }
    return sum;
}

__device__ __forceinline__ float finish(float sum, float scale)
{
    float value = __fmul_rn(sum, scale);

    return value != value ? bits_float(LK_FP32_NAN) : value;
}

/* Where a launch's random bits begin; unused without. */
struct draws {
    uint64_t seed, index;
};

template <bool Stochastic> __device__ __forceinline__ draws start_draws(const lk_sum &args)
{
    const lk_draws &d = args.draws;

    if (!Stochastic)
        return { 0, 0 };
    return { d.seed, d.index + (d.device_offset ? *d.device_offset : 0) };
}

template <bool Stochastic>
__device__ void store_group(uint16_t *out, const eight &sum, float scale, uint32_t lane,
                            const draws &d)
{
    const float *x = sum.x;

    if constexpr (Stochastic) {
        float y[8];

#pragma unroll
        for (int i = 0; i < 8; i++)
            y[i] = multiply(x[i], scale);
        store_uint4(out + packed_lane_begin(lane),
                    narrow_stochastic(y, d.seed, d.index + packed_lane_begin(lane)));
        return;
    }
    store_uint4(out + packed_lane_begin(lane),
                make_uint4(narrow_pair(multiply(x[0], scale), multiply(x[1], scale)),
                           narrow_pair(multiply(x[2], scale), multiply(x[3], scale)),
                           narrow_pair(multiply(x[4], scale), multiply(x[5], scale)),
                           narrow_pair(multiply(x[6], scale), multiply(x[7], scale))));
}

template <bool Stochastic>
__device__ void store_group(float *out, const eight &sum, float scale, uint32_t lane, const draws &)
{
    bool odd = lane & 1;
    float y[8];

#pragma unroll
    for (int i = 0; i < 8; i++)
        y[i] = finish(sum.x[i], scale);
    float4 low = make_float4(y[0], y[1], y[2], y[3]);
    float4 high = make_float4(y[4], y[5], y[6], y[7]);
    float4 other = swap_float4(select_float4(odd, low, high));
    float *p = out + wide_lane_begin(lane);

    store_float4(p, select_float4(odd, other, low));
    store_float4(p + 128, select_float4(odd, high, other));
}

template <bool Stochastic> __device__ void store_value(uint16_t *out, float value, const draws &d)
{
    uint32_t bits = Stochastic ? round_up_or_down(value, random_of(d.seed, d.index))
                               : narrow_pair(value, 0);

    store_one(out, static_cast<uint16_t>(bits));
}

template <bool Stochastic> __device__ void store_value(float *out, float value, const draws &)
{
    store_one(reinterpret_cast<uint32_t *>(out), float_bits(value));
}

template <class Out, bool Stochastic>
__global__ void __launch_bounds__(LK_THREADS) lk_sum_kernel(const __grid_constant__ lk_sum args)
{
    const uint16_t *shards = static_cast<const uint16_t *>(args.shards);
    Out *out = static_cast<Out *>(args.out);
    uint32_t lane = threadIdx.x % 32;
    uint64_t begin = (uint64_t{ blockIdx.x } * LK_WARPS + threadIdx.x / 32) * tile;
    bool aligned = (reinterpret_cast<uint64_t>(shards) | reinterpret_cast<uint64_t>(out) |
                    args.stride * 2) %
                       16 ==
                   0;
    float scale = scale_value(args.scale, static_cast<lk_type>(args.scale_type),
                              args.scale_pointer);
    draws d = start_draws<Stochastic>(args);

    if (aligned && begin + tile <= args.count) {
        eight sum = add_shards(shards + begin + packed_lane_begin(lane), args.stride, args.n);

        store_group<Stochastic>(out + begin, sum, scale, lane, { d.seed, d.index + begin });
        return;
    }
    for (uint64_t i = begin + lane; i < begin + tile && i < args.count; i += 32) {
        float sum = widen_bf16(__ldcs(shards + i));

#pragma unroll 4
        for (uint32_t r = 1; r < args.n; r++)
            sum = __fadd_rn(sum, widen_bf16(__ldcs(shards + r * args.stride + i)));
        store_value<Stochastic>(out + i, finish(sum, scale), { d.seed, d.index + i });
    }
}

/* As out_type and rounding say. */
const void *find_kernel(bool wide, bool stochastic)
{
    if (wide)
        return reinterpret_cast<const void *>(lk_sum_kernel<float, false>);
    return stochastic ? reinterpret_cast<const void *>(lk_sum_kernel<uint16_t, true>)
                      : reinterpret_cast<const void *>(lk_sum_kernel<uint16_t, false>);
}

} // namespace

extern "C" int lk_run_sum(const lk_sum *sum, void *stream)
{
    uint64_t blocks = (sum->count + LK_WARPS * tile - 1) / (LK_WARPS * tile);
    const void *kernel = find_kernel(sum->out_type == LK_FP32, sum->rounding == LK_STOCHASTIC);
    void *args[] = { const_cast<lk_sum *>(sum) };

    if (blocks > INT32_MAX)
        return -EINVAL;
    return cudaLaunchKernel(kernel, dim3(static_cast<uint32_t>(blocks)), dim3(LK_THREADS), args, 0,
                            static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_sum(void)
{
    cudaFuncAttributes attributes;
    cudaError_t err = cudaSuccess;

    for (const void *kernel :
         { find_kernel(true, false), find_kernel(false, false), find_kernel(false, true) })
        err = err == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernel) : err;
    return err;
}
