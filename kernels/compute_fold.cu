/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes over matrices on the device. Sums over rows: a block takes 256 groups of columns and every so many rows, a
 * second launch adds up what the blocks found.
 */
#include "kernels/compute_device.cuh"
#include "kernels/compute_fold.h"

namespace
{

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    fold_forward_kernel(const __grid_constant__ lk_fold_launch launch)
{
    fold_forward_thread(&launch, blockIdx.x, threadIdx.x, blockDim.x, Width);
}

/* x: groups of columns; y: rows. */
template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    fold_backward_kernel(const __grid_constant__ lk_fold_launch launch)
{
    uint64_t group = uint64_t{ blockIdx.x } * blockDim.x + threadIdx.x;

    if (group < fold_groups(launch.fold.columns))
        fold_backward_thread(&launch, group, blockIdx.y, gridDim.y, Width);
}

/* 32 columns a block, 8 threads each. */
__global__ void __launch_bounds__(LK_BLOCK)
    fold_columns_kernel(const __grid_constant__ lk_fold_launch launch)
{
    __shared__ float parts[8][32];
    uint64_t column = uint64_t{ blockIdx.x } * 32 + threadIdx.x % 32;
    float mine[8];

    if (column < launch.fold.columns)
        parts[threadIdx.x / 32][threadIdx.x % 32] = fold_column_part(&launch, column,
                                                                     threadIdx.x / 32);
    __syncthreads();
    if (threadIdx.x >= 32 || column >= launch.fold.columns)
        return;
    for (int i = 0; i < 8; i++)
        mine[i] = parts[i][threadIdx.x];
    launch.grads.dgamma[column] = fold_column_sum(mine);
}

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    undo_kernel(const __grid_constant__ lk_undo_launch launch)
{
    undo_thread(&launch, blockIdx.x, threadIdx.x, blockDim.x, Width);
}

template <typename Launch>
int run(void (*kernel)(Launch), const Launch *launch, dim3 grid, unsigned threads, void *stream)
{
    void *args[] = { const_cast<Launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, dim3(threads), args, 0,
                            static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_fold_forward(const lk_fold_launch *launch, void *stream)
{
    return run(launch->wide ? fold_forward_kernel<LK_WHOLE> : fold_forward_kernel<LK_SINGLE>,
               launch, dim3(static_cast<unsigned>(launch->fold.rows)),
               lk_row_threads(launch->fold.columns), stream);
}

extern "C" int lk_run_fold_backward(const lk_fold_launch *launch, void *stream)
{
    uint64_t groups = fold_groups(launch->fold.columns);
    unsigned threads = lk_row_threads(launch->fold.columns);
    uint64_t rows = launch->partials;
    int err = 0;

    if (!rows) /* nothing is summed: as many rows at once as there are */
        rows = launch->fold.rows < 65535 ? launch->fold.rows : 65535;
    if (launch->fold.rows)
        err = run(launch->wide ? fold_backward_kernel<LK_WHOLE> : fold_backward_kernel<LK_SINGLE>,
                  launch,
                  dim3(static_cast<unsigned>((groups + threads - 1) / threads),
                       static_cast<unsigned>(rows)),
                  threads, stream);
    if (err || !launch->grads.dgamma)
        return err;
    return run(fold_columns_kernel, launch,
               dim3(static_cast<unsigned>((launch->fold.columns + 31) / 32)), LK_BLOCK, stream);
}

extern "C" int lk_run_undo(const lk_undo_launch *launch, void *stream)
{
    return run(launch->wide ? undo_kernel<LK_WHOLE> : undo_kernel<LK_SINGLE>, launch,
               dim3(static_cast<unsigned>(launch->rows)), lk_row_threads(launch->columns), stream);
}

extern "C" int lk_load_fold(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(fold_forward_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(fold_forward_kernel<LK_SINGLE>),
                              reinterpret_cast<const void *>(fold_backward_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(fold_backward_kernel<LK_SINGLE>),
                              reinterpret_cast<const void *>(fold_columns_kernel),
                              reinterpret_cast<const void *>(undo_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(undo_kernel<LK_SINGLE>) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
