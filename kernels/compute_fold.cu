/* SPDX-License-Identifier: Apache-2.0
 *
 * Passes over matrices on the device. Sums over rows: a warp takes 32 groups of columns and every so many rows, a block adds
 * up its warps', and a second launch what the blocks found.
 */
#include "kernels/compute_device.cuh"
#include "kernels/compute_fold.h"

namespace
{

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    fold_forward_kernel(const __grid_constant__ lk_fold_launch launch)
{
    wait_for_the_last();
    fold_forward_thread(&launch, blockIdx.x, threadIdx.x, blockDim.x, Width);
}

/* A block of a sum: LK_FOLD_COLUMNS columns, LK_FOLD_SLICES slices of rows. `nth` of `of` rows of partial sums; without
 * partial sums the slices of so many blocks. */
template <lk_width Width, bool Plain>
__device__ __forceinline__ void fold_block(const lk_fold_launch &launch, uint64_t across,
                                           uint64_t nth, uint64_t of)
{
    __shared__ float slices[LK_FOLD_SLICES][LK_FOLD_COLUMNS];
    unsigned lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    uint64_t groups = fold_groups(launch.fold.columns), group = across * 32 + lane;
    uint64_t first = nth * LK_FOLD_SLICES + slice, every = of * LK_FOLD_SLICES;
    float parts[LK_FOLD_SLICES], mine[8] = { 0 };

    if (group < groups && Plain)
        fold_sum_rows(&launch, group, first, every, Width, mine);
    else if (group < groups)
        fold_backward_rows(&launch, group, first, every, Width, mine);
    if (!launch.partials)
        return;
#pragma unroll
    for (unsigned i = 0; i < 8; i += 4)
        *reinterpret_cast<float4 *>(&slices[slice][8 * lane + i]) = make_float4(
            mine[i], mine[i + 1], mine[i + 2], mine[i + 3]);
    __syncthreads();
    if (across * LK_FOLD_COLUMNS + threadIdx.x >= 8 * groups)
        return;
#pragma unroll
    for (unsigned i = 0; i < LK_FOLD_SLICES; i++)
        parts[i] = slices[i][threadIdx.x];
    static_cast<float *>(
        launch.grads.workspace)[nth * 8 * groups + across * LK_FOLD_COLUMNS + threadIdx.x] =
        fold_column_sum(parts);
}

/* x: columns; y: rows. */
template <lk_width Width, bool Plain>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    fold_backward_kernel(const __grid_constant__ lk_fold_launch launch)
{
    wait_for_the_last();
    fold_block<Width, Plain>(launch, blockIdx.x, blockIdx.y, gridDim.y);
}

/* 32 columns a block, 8 threads each. */
__global__ void __launch_bounds__(LK_BLOCK)
    fold_columns_kernel(const __grid_constant__ lk_fold_launch launch)
{
    __shared__ float parts[8][32];
    uint64_t column = uint64_t{ blockIdx.x } * 32 + threadIdx.x % 32;
    float mine[8];

    wait_for_the_last();
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
    wait_for_the_last();
    undo_thread(&launch, from_the_end(blockIdx.x, gridDim.x), threadIdx.x, blockDim.x, Width);
}

/* [wide][plain] */
void (*const backward_kernels[2][2])(lk_fold_launch) = {
    {fold_backward_kernel<LK_SINGLE, false>, fold_backward_kernel<LK_SINGLE, true>},
    { fold_backward_kernel<LK_WHOLE, false>, fold_backward_kernel<LK_WHOLE,  true>},
};

template <typename Launch>
int run(void (*kernel)(Launch), const Launch *launch, dim3 grid, unsigned threads, void *stream)
{
    void *args[] = { const_cast<Launch *>(launch) };

    return launch_early(reinterpret_cast<const void *>(kernel), args, grid, threads, 0, stream);
}

int run_columns(const lk_fold_launch *launch, void *stream)
{
    return run(fold_columns_kernel, launch,
               dim3(static_cast<unsigned>((launch->fold.columns + 31) / 32)), LK_BLOCK, stream);
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
    uint64_t across = (launch->fold.columns + LK_FOLD_COLUMNS - 1) / LK_FOLD_COLUMNS;
    uint64_t rows = launch->partials;
    int err = 0;

    if (!rows) /* nothing is summed: as many rows at once as there are */
        rows = (launch->fold.rows + LK_FOLD_SLICES - 1) / LK_FOLD_SLICES;
    rows = rows < 65535 ? rows : 65535;
    if (launch->fold.rows)
        err = run(backward_kernels[launch->wide][launch->plain], launch,
                  dim3(static_cast<unsigned>(across), static_cast<unsigned>(rows)), LK_BLOCK,
                  stream);
    return err || !launch->grads.dgamma ? err : run_columns(launch, stream);
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
                              reinterpret_cast<const void *>(backward_kernels[0][0]),
                              reinterpret_cast<const void *>(backward_kernels[0][1]),
                              reinterpret_cast<const void *>(backward_kernels[1][0]),
                              reinterpret_cast<const void *>(backward_kernels[1][1]),
                              reinterpret_cast<const void *>(fold_columns_kernel),
                              reinterpret_cast<const void *>(undo_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(undo_kernel<LK_SINGLE>) };

    int err = load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));

    return err ? err : find_whether_kernels_wait(kernels[0]);
}
