/* SPDX-License-Identifier: Apache-2.0
 *
 * fp32 to bf16 with what earlier roundings have lost. Four elements a thread where everything is aligned.
 */
#include "kernels/device_internal.cuh"
#include "kernels/list_internal.h"

#include <cerrno>

namespace
{

constexpr uint32_t group = 4;

__global__ void __launch_bounds__(LK_THREADS)
    lk_feedback_kernel(const __grid_constant__ lk_feedback args)
{
    uint64_t at = (uint64_t{ blockIdx.x } * LK_THREADS + threadIdx.x) * group;
    float scale = scale_value(args.scale, args.scale_type, args.scale_pointer);
    bool aligned = (reinterpret_cast<uint64_t>(args.in) |
                    reinterpret_cast<uint64_t>(args.residual) |
                    2 * reinterpret_cast<uint64_t>(args.packed)) %
                       16 ==
                   0;

    if (aligned && at + group <= args.count) {
        float4 x = load_float4(args.in + at);
        float4 owed = load_float4(args.residual + at);
        uint32_t low = feed_bf16(x.x, scale, &owed.x) | feed_bf16(x.y, scale, &owed.y) << 16;
        uint32_t high = feed_bf16(x.z, scale, &owed.z) | feed_bf16(x.w, scale, &owed.w) << 16;

        *reinterpret_cast<uint2 *>(args.packed + at) = make_uint2(low, high);
        __stcs(reinterpret_cast<float4 *>(args.residual + at), owed);
        return;
    }
    for (uint64_t i = at; i < at + group && i < args.count; i++) {
        float owed = args.residual[i];

        args.packed[i] = static_cast<uint16_t>(feed_bf16(args.in[i], scale, &owed));
        args.residual[i] = owed;
    }
}

} // namespace

extern "C" int lk_run_feedback(const lk_feedback *feedback, void *stream)
{
    uint64_t each = LK_THREADS * group, blocks = (feedback->count + each - 1) / each;
    void *args[] = { const_cast<lk_feedback *>(feedback) };

    if (blocks > INT32_MAX)
        return -EINVAL;
    return cudaLaunchKernel(reinterpret_cast<const void *>(lk_feedback_kernel),
                            dim3(static_cast<uint32_t>(blocks)), dim3(LK_THREADS), args, 0,
                            static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_feedback(void)
{
    cudaFuncAttributes attributes;

    return cudaFuncGetAttributes(&attributes, lk_feedback_kernel);
}
