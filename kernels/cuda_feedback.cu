/* SPDX-License-Identifier: Apache-2.0
 *
 * fp32 to bf16 with what earlier roundings have lost. Four elements a thread where everything is aligned.
 */
#include "kernels/device_internal.cuh"
#include "kernels/device_random.cuh"
#include "kernels/list_internal.h"

#include <cerrno>

namespace
{

constexpr uint32_t group = 4;

/* Random bits of a group from element `index` on, a pair in each word. */
__device__ __forceinline__ uint2 random_group(uint64_t seed, uint64_t index)
{
    uint32_t block[4];

    if (index % group == 0) {
        philox(seed, index / 8, block);
        return index & group ? make_uint2(block[2], block[3]) : make_uint2(block[0], block[1]);
    }
    return make_uint2(random_of(seed, index) | random_of(seed, index + 1) << 16,
                      random_of(seed, index + 2) | random_of(seed, index + 3) << 16);
}

template <bool Stochastic>
__global__ void __launch_bounds__(LK_THREADS)
    lk_feedback_kernel(const __grid_constant__ lk_feedback args)
{
    uint64_t at = (uint64_t{ blockIdx.x } * LK_THREADS + threadIdx.x) * group;
    float scale = scale_value(args.scale, args.scale_type, args.scale_pointer);
    uint64_t seed = args.draws.seed, index = args.draws.index;
    bool aligned = (reinterpret_cast<uint64_t>(args.in) |
                    reinterpret_cast<uint64_t>(args.residual) |
                    2 * reinterpret_cast<uint64_t>(args.packed)) %
                       16 ==
                   0;

    if (Stochastic && args.draws.device_offset)
        index += *args.draws.device_offset;
    if (aligned && at + group <= args.count) {
        float4 x = load_float4(args.in + at);
        float4 owed = load_float4(args.residual + at);
        uint2 random = Stochastic ? random_group(seed, index + at) : make_uint2(0, 0);
        uint32_t low = feed_bf16(x.x, scale, &owed.x, Stochastic, random.x & 0xffffU) |
                       feed_bf16(x.y, scale, &owed.y, Stochastic, random.x >> 16) << 16;
        uint32_t high = feed_bf16(x.z, scale, &owed.z, Stochastic, random.y & 0xffffU) |
                        feed_bf16(x.w, scale, &owed.w, Stochastic, random.y >> 16) << 16;

        *reinterpret_cast<uint2 *>(args.packed + at) = make_uint2(low, high);
        __stcs(reinterpret_cast<float4 *>(args.residual + at), owed);
        return;
    }
    for (uint64_t i = at; i < at + group && i < args.count; i++) {
        float owed = args.residual[i];
        uint32_t random = Stochastic ? random_of(seed, index + i) : 0;

        args.packed[i] = static_cast<uint16_t>(
            feed_bf16(args.in[i], scale, &owed, Stochastic, random));
        args.residual[i] = owed;
    }
}

const void *find_kernel(bool stochastic)
{
    return stochastic ? reinterpret_cast<const void *>(lk_feedback_kernel<true>)
                      : reinterpret_cast<const void *>(lk_feedback_kernel<false>);
}

} // namespace

extern "C" int lk_run_feedback(const lk_feedback *feedback, void *stream)
{
    uint64_t each = LK_THREADS * group, blocks = (feedback->count + each - 1) / each;
    void *args[] = { const_cast<lk_feedback *>(feedback) };

    if (blocks > INT32_MAX)
        return -EINVAL;
    return cudaLaunchKernel(find_kernel(feedback->rounding == LK_STOCHASTIC),
                            dim3(static_cast<uint32_t>(blocks)), dim3(LK_THREADS), args, 0,
                            static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_feedback(void)
{
    cudaFuncAttributes attributes;
    cudaError_t err = cudaFuncGetAttributes(&attributes, find_kernel(false));

    return err == cudaSuccess ? cudaFuncGetAttributes(&attributes, find_kernel(true)) : err;
}
