/* SPDX-License-Identifier: Apache-2.0
 *
 * SwiGLU on the device: one block per row, but forward of short rows.
 */
#include "kernels/compute_device.cuh"
#include "kernels/compute_swiglu.h"

namespace
{

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    swiglu_forward_kernel(const __grid_constant__ lk_swiglu_launch launch)
{
    swiglu_row row = swiglu_find_row(&launch, from_the_end(blockIdx.x, gridDim.x));

    swiglu_forward_thread(&row, threadIdx.x, blockDim.x, Width);
}

/* Of short rows: a thread has one group of any row, so that none is idle. All groups have 32-bit numbers. */
template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    swiglu_short_kernel(const __grid_constant__ lk_swiglu_launch launch)
{
    uint32_t groups = static_cast<uint32_t>((launch.swiglu.columns + 7) / 8);
    uint32_t all = static_cast<uint32_t>(launch.swiglu.rows) * groups;
    uint32_t nth = static_cast<uint32_t>(from_the_end(blockIdx.x, gridDim.x)) * LK_BLOCK +
                   threadIdx.x;

    if (nth >= all)
        return;
    swiglu_row row = swiglu_find_row(&launch, nth / groups);

    swiglu_forward_thread(&row, nth % groups, groups, Width);
}

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    swiglu_backward_kernel(const __grid_constant__ lk_swiglu_launch launch)
{
    __shared__ float sums[LK_BLOCK];
    uint64_t nth = from_the_end(blockIdx.x, gridDim.x);
    swiglu_row row = swiglu_find_back_row(&launch, nth);
    float dot = swiglu_backward_thread(&row, threadIdx.x, blockDim.x, Width);

    if (!launch.grads.row_dot)
        return;
    dot = block_sum(sums, dot);
    if (threadIdx.x == 0)
        launch.grads.row_dot[nth] = dot;
}

using swiglu_kernel = void (*)(lk_swiglu_launch);

int run(swiglu_kernel kernel, const lk_swiglu_launch *launch, uint64_t blocks, unsigned threads,
        void *stream)
{
    void *args[] = { const_cast<lk_swiglu_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel),
                            dim3(static_cast<unsigned>(blocks)), dim3(threads), args, 0,
                            static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_swiglu_forward(const lk_swiglu_launch *launch, void *stream)
{
    uint64_t rows = launch->swiglu.rows, groups = (launch->swiglu.columns + 7) / 8;

    if (groups <= LK_BLOCK && rows * groups < UINT32_MAX - LK_BLOCK)
        return run(launch->wide ? swiglu_short_kernel<LK_WHOLE> : swiglu_short_kernel<LK_SINGLE>,
                   launch, (rows * groups + LK_BLOCK - 1) / LK_BLOCK, LK_BLOCK, stream);
    return run(launch->wide ? swiglu_forward_kernel<LK_WHOLE> : swiglu_forward_kernel<LK_SINGLE>,
               launch, rows, lk_row_threads(launch->swiglu.columns), stream);
}

extern "C" int lk_run_swiglu_backward(const lk_swiglu_launch *launch, void *stream)
{
    return run(launch->wide ? swiglu_backward_kernel<LK_WHOLE> : swiglu_backward_kernel<LK_SINGLE>,
               launch, launch->swiglu.rows, lk_row_threads(launch->swiglu.columns), stream);
}

extern "C" int lk_load_swiglu(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(swiglu_forward_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(swiglu_forward_kernel<LK_SINGLE>),
                              reinterpret_cast<const void *>(swiglu_short_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(swiglu_short_kernel<LK_SINGLE>),
                              reinterpret_cast<const void *>(swiglu_backward_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(swiglu_backward_kernel<LK_SINGLE>) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
