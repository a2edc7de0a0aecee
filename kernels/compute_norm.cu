/* SPDX-License-Identifier: Apache-2.0
 *
 * Norms on the device. Forward: one block per row. Backward: a block takes every so many rows and adds up its part of
 * dgamma and dbeta on the way, in shared memory if it fits, else in the workspace; a second launch adds up the blocks'.
 */
#include "kernels/compute_device.cuh"
#include "kernels/compute_norm.h"

namespace
{

/* Three blocks of a multiprocessor find room. */
constexpr size_t SHARED_LIMIT = 72 * 1024;

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    norm_forward_kernel(const __grid_constant__ lk_norm_launch launch)
{
    __shared__ float sums[LK_BLOCK];
    norm_row row = norm_find_row(&launch, blockIdx.x);
    bool layer = launch.norm.kind == LK_LAYER_NORM;
    norm_found found = { norm_shift(&launch.norm, &row), 0, 0 };

    __syncthreads(); /* the first element may be overwritten by the sum */
    float squares = block_sum(
        sums, norm_first_thread(&row, !layer, found.shift, threadIdx.x, blockDim.x, Width));

    if (layer) {
        found.rest = squares / static_cast<float>(row.columns);
        squares = block_sum(sums, norm_second_thread(&row, found.shift, found.rest, threadIdx.x,
                                                     blockDim.x, Width));
    }
    found.rstd = norm_rstd(&launch.norm, squares);
    if (threadIdx.x == 0) {
        launch.norm.rstd[blockIdx.x] = found.rstd;
        if (layer)
            launch.norm.mean[blockIdx.x] = found.shift + found.rest;
    }
    if (row.y)
        norm_apply_thread(&launch.norm, &row, found, threadIdx.x, blockDim.x, Width);
}

template <lk_width Width, bool Shared>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    norm_backward_kernel(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ float accumulators[];
    __shared__ float sums[LK_BLOCK];
    uint64_t floats = (launch.norm.columns + 7) / 8 * 16;
    float *workspace = static_cast<float *>(launch.backward.workspace) + blockIdx.x * floats;
    float *partial = Shared ? accumulators : workspace;

    if (launch.partials)
        for (uint64_t i = threadIdx.x; i < floats; i += blockDim.x)
            partial[i] = 0;
    __syncthreads();
    for (uint64_t r = blockIdx.x; r < launch.norm.rows; r += gridDim.x) {
        norm_back_row row = norm_find_back(&launch, r);
        norm_sums all = norm_sums_thread(&launch.norm, &row, threadIdx.x, blockDim.x, Width);

        all.plain = launch.norm.kind == LK_LAYER_NORM ? block_sum(sums, all.plain) : 0;
        all.product = block_sum(sums, all.product);
        norm_back_thread(&launch.norm, &row, norm_means(&launch.norm, all),
                         launch.partials ? partial : nullptr, threadIdx.x, blockDim.x, Width);
    }
    if (!Shared || !launch.partials)
        return;
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < floats; i += blockDim.x)
        workspace[i] = partial[i];
}

/* 32 columns a block, 8 threads each; blocks of the second half of the grid make dbeta. */
__global__ void __launch_bounds__(LK_BLOCK)
    norm_columns_kernel(const __grid_constant__ lk_norm_launch launch)
{
    __shared__ float parts[8][32];
    bool beta = blockIdx.y == 1;
    float *out = beta ? launch.backward.dbeta : launch.backward.dgamma;
    uint64_t column = uint64_t{ blockIdx.x } * 32 + threadIdx.x % 32;
    float mine[8];

    if (!out)
        return;
    if (column < launch.norm.columns)
        parts[threadIdx.x / 32][threadIdx.x % 32] = norm_column_part(&launch, column, beta,
                                                                     threadIdx.x / 32);
    __syncthreads();
    if (threadIdx.x >= 32 || column >= launch.norm.columns)
        return;
    for (int i = 0; i < 8; i++)
        mine[i] = parts[i][threadIdx.x];
    out[column] = norm_column_sum(mine);
}

using kernel = void (*)(lk_norm_launch);

const kernel backward_kernels[2][2] = {
    {norm_backward_kernel<LK_SINGLE, false>, norm_backward_kernel<LK_SINGLE, true>},
    { norm_backward_kernel<LK_WHOLE, false>, norm_backward_kernel<LK_WHOLE,  true>},
};

int run(kernel function, const lk_norm_launch *launch, dim3 grid, unsigned threads, size_t shared,
        void *stream)
{
    void *args[] = { const_cast<lk_norm_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(function), grid, dim3(threads), args,
                            shared, static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_norm_forward(const lk_norm_launch *launch, void *stream)
{
    return run(launch->wide ? norm_forward_kernel<LK_WHOLE> : norm_forward_kernel<LK_SINGLE>,
               launch, dim3(static_cast<unsigned>(launch->norm.rows)),
               lk_row_threads(launch->norm.columns), 0, stream);
}

extern "C" int lk_run_norm_backward(const lk_norm_launch *launch, void *stream)
{
    uint64_t blocks = launch->partials ? launch->partials : launch->norm.rows;
    size_t shared = launch->partials ? (launch->norm.columns + 7) / 8 * 64 : 0;
    bool fits = shared <= SHARED_LIMIT;
    kernel function = backward_kernels[launch->wide][fits];
    int err = 0;

    if (fits && shared > 40 * 1024) /* with the block's own sums more than every kernel may have */
        err = cudaFuncSetAttribute(reinterpret_cast<const void *>(function),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_LIMIT);
    if (!err && blocks)
        err = run(function, launch, dim3(static_cast<unsigned>(blocks)),
                  lk_row_threads(launch->norm.columns), fits ? shared : 0, stream);
    if (err || (!launch->backward.dgamma && !launch->backward.dbeta))
        return err;
    return run(norm_columns_kernel, launch,
               dim3(static_cast<unsigned>((launch->norm.columns + 31) / 32), 2), LK_BLOCK, 0,
               stream);
}

extern "C" int lk_load_norm(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(norm_forward_kernel<LK_WHOLE>),
                              reinterpret_cast<const void *>(norm_forward_kernel<LK_SINGLE>),
                              reinterpret_cast<const void *>(backward_kernels[0][0]),
                              reinterpret_cast<const void *>(backward_kernels[0][1]),
                              reinterpret_cast<const void *>(backward_kernels[1][0]),
                              reinterpret_cast<const void *>(backward_kernels[1][1]),
                              reinterpret_cast<const void *>(norm_columns_kernel) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
