/* SPDX-License-Identifier: Apache-2.0
 *
 * SwiGLU on the device: one block per row.
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

int run(void (*kernel)(lk_swiglu_launch), const lk_swiglu_launch *launch, void *stream)
{
    void *args[] = { const_cast<lk_swiglu_launch *>(launch) };

    return cudaLaunchKernel(
        reinterpret_cast<const void *>(kernel), dim3(static_cast<unsigned>(launch->swiglu.rows)),
        dim3(lk_row_threads(launch->swiglu.columns)), args, 0, static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_swiglu_forward(const lk_swiglu_launch *launch, void *stream)
{
    return run(launch->wide ? swiglu_forward_kernel<LK_WHOLE> : swiglu_forward_kernel<LK_SINGLE>,
               launch, stream);
}

extern "C" int lk_run_swiglu_backward(const lk_swiglu_launch *launch, void *stream)
{
    return run(launch->wide ? swiglu_backward_kernel<LK_WHOLE> : swiglu_backward_kernel<LK_SINGLE>,
               launch, stream);
}

extern "C" int lk_load_swiglu(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(swiglu_forward_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(swiglu_forward_kernel<LK_SINGLE>),
                              reinterpret_cast<const void *>(swiglu_backward_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(swiglu_backward_kernel<LK_SINGLE>) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
