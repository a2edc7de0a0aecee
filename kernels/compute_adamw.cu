/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW on the device: one block per chunk. Both kernels end in the last block that finishes, which is where sums and
 * counters of the whole grid are made.
 */
#include "kernels/compute_adamw.h"
#include "kernels/compute_device.cuh"

namespace
{

__device__ __forceinline__ double tree(double *sums)
{
    for (uint32_t half = LK_BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

__device__ __forceinline__ adamw_squares tree(adamw_squares *squares)
{
    for (uint32_t half = LK_BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            adamw_join(&squares[threadIdx.x], &squares[threadIdx.x + half]);
    }
    __syncthreads();
    return squares[0];
}

__global__ void __launch_bounds__(LK_BLOCK, 4)
    adamw_norm_kernel(const __grid_constant__ lk_adamw_launch launch)
{
    __shared__ adamw_squares squares[LK_BLOCK];
    __shared__ double wide[LK_BLOCK];
    uint32_t t = threadIdx.x;

    if (blockIdx.x < launch.chunks) {
        adamw_piece piece = adamw_find(&launch, blockIdx.x);
        double again = 0;

        squares[t] = adamw_squares_thread(&piece, t);
        adamw_squares all = tree(squares);
        if (adamw_needs_wide(&all)) {
            wide[t] = adamw_wide_thread(&piece, t);
            again = tree(wide);
        }
        if (t == 0)
            launch.partials[blockIdx.x] = adamw_partial(&all, again);
    }
    if (!is_last_block(&launch.state->tickets[0]))
        return;
    wide[t] = adamw_partials_thread(launch.partials, launch.chunks, t);
    double sum = tree(wide);
    if (t == 0)
        launch.state->sum_squares = sum;
}

__global__ void __launch_bounds__(LK_BLOCK, 4)
    adamw_update_kernel(const __grid_constant__ lk_adamw_launch launch)
{
    __shared__ adamw_factors factors;
    bool some = blockIdx.x < launch.chunks;
    adamw_piece piece = {};

    if (some)
        piece = adamw_find(&launch, blockIdx.x);
    if (threadIdx.x == 0) {
        adamw_make_factors(&launch, &factors);
        if (some)
            adamw_tensor_factors(&launch, &piece.entry, &factors);
    }
    __syncthreads();
    if (some && factors.apply) {
        adamw_factors mine = factors;

        adamw_update_thread(&piece, &mine, threadIdx.x);
    }
    if (is_last_block(&launch.state->tickets[1]) && threadIdx.x == 0)
        adamw_end(launch.state, &factors);
}

int run(void (*kernel)(lk_adamw_launch), const lk_adamw_launch *launch, void *stream)
{
    void *args[] = { const_cast<lk_adamw_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel),
                            dim3(launch->chunks ? launch->chunks : 1), dim3(LK_BLOCK), args, 0,
                            static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_adamw_norm(const lk_adamw_launch *launch, void *stream)
{
    return run(adamw_norm_kernel, launch, stream);
}

extern "C" int lk_run_adamw_update(const lk_adamw_launch *launch, void *stream)
{
    return run(adamw_update_kernel, launch, stream);
}

extern "C" int lk_load_adamw(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(adamw_norm_kernel),
                              reinterpret_cast<const void *>(adamw_update_kernel) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
