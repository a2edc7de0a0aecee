/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW on the device: one block per chunk. Both kernels end in the last block that finishes, which is where sums and
 * counters of the whole grid are made.
 */
#include "kernels/compute_adamw_forms.cuh"

#include <utility>

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

constexpr adamw_kernel update = choose_adamw<ADAMW_UPDATE_FORM>();
constexpr adamw_kernel anywhere = choose_adamw<0>(); /* where that does not find room */

#ifdef LK_COMPUTE_VARIANTS
int form = -1; /* -1: the product's; set between launches */

template <size_t... I> const adamw_kernel &find_form(std::index_sequence<I...>)
{
    static const adamw_kernel all[] = { choose_adamw<I>()... };

    return form < 0 ? update : all[form];
}
#endif

const adamw_kernel &find_update()
{
#ifdef LK_COMPUTE_VARIANTS
    const adamw_kernel &wanted = find_form(std::make_index_sequence<ADAMW_FORMS>{});
#else
    const adamw_kernel &wanted = update;
#endif

    return device_has(wanted.shared) ? wanted : anywhere;
}

int run(const adamw_kernel &kernel, const lk_adamw_launch *launch, void *stream)
{
    void *args[] = { const_cast<lk_adamw_launch *>(launch) };
    const void *function = reinterpret_cast<const void *>(kernel.function);
    uint32_t blocks = launch->chunks ? launch->chunks : 1;
    int err = 0;

    if (kernel.blocks && blocks > kernel.blocks)
        blocks = kernel.blocks;
    if (kernel.shared)
        err = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(kernel.shared));
    return err ? err
               : cudaLaunchKernel(function, dim3(blocks), dim3(kernel.threads), args, kernel.shared,
                                  static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_adamw_norm(const lk_adamw_launch *launch, void *stream)
{
    return run({ adamw_norm_kernel, LK_BLOCK, 0, 0 }, launch, stream);
}

extern "C" int lk_run_adamw_update(const lk_adamw_launch *launch, void *stream)
{
    return run(find_update(), launch, stream);
}

#ifdef LK_COMPUTE_VARIANTS
extern "C" LK_API const char *lk_variants_adamw(int which)
{
    form = which;
    return which >= 0 && which < ADAMW_FORMS ? ADAMW_NAMES[which] : nullptr;
}
#endif

extern "C" int lk_load_adamw(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(adamw_norm_kernel),
                              reinterpret_cast<const void *>(find_update().function) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
