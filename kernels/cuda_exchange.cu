/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of exchanges and their launches.
 */
#include "kernels/cuda_exchange_direct.cuh"
#include "kernels/cuda_exchange_short.cuh"
#include "kernels/cuda_launch_internal.cuh"

#include <cstddef>

using namespace lk_rings_device;

namespace
{

/* Of those that were measured on an H200 the fastest with 16 CTAs, and next to it with 32 (perf/results), but for a warp
 * less that takes. */
template <class Path> using warps = exchange_warps<11, 9, 8, Path>;
/* A mask takes registers that other calls need not do without. */
using plain_warps = warps<unmasked_path<exchange_path>>;
using masked_warps = warps<exchange_path>;

static_assert(masked_warps::threads == 1024,
              "co-residency is planned with a multiprocessor for each CTA");
static_assert(sizeof(exchange_args<LK_EXCHANGE_SMALL>) <= 4096, "small size class");
static_assert(sizeof(exchange_args<LK_EXCHANGE_FEW>) <= 2048, "size class of short calls");
static_assert(sizeof(exchange_args<LK_EXCHANGE_MAX>) <= 32764, "large size class");
static_assert(offsetof(lk_exchange_launch, entries) == sizeof(lk_exchange_head),
              "a launch is the argument in one piece");

template <unsigned N, class R>
__global__ void __launch_bounds__(R::threads, 1)
    lk_exchange_kernel(const __grid_constant__ exchange_args<N> args)
{
    __shared__ exchange_pipeline pipelines[EXCHANGE_ROLES];
    extern __shared__ exchange_cursor cursors[];

    run_exchange_cta<R>(args, pipelines, cursors, blockIdx.x, gridDim.x);
}

/* Enough for a warp for each unit of two ranks with 64 channels, and as many that copy. */
constexpr uint32_t short_threads = 512, short_ctas = 32;

template <unsigned N>
__global__ void __launch_bounds__(short_threads, 1)
    lk_exchange_short_kernel(const __grid_constant__ exchange_args<N> args)
{
    extern __shared__ exchange_cursor cursors[];

    run_short_cta(args, cursors, blockIdx.x, gridDim.x, short_threads);
}

/* Eight warps for each unit of two ranks with a CTA for each channel. */
using direct = direct_warps<16, 8>;

template <unsigned N>
__global__ void __launch_bounds__(direct::threads, 1)
    lk_exchange_direct_kernel(const __grid_constant__ exchange_args<N> args)
{
    __shared__ direct_team teams[direct::moving];

    run_direct_cta<direct>(args, teams, blockIdx.x, gridDim.x);
}

enum kernel_number {
    ALL_SMALL,
    ALL_LARGE,
    MASKED_SMALL,
    MASKED_LARGE,
    SHORT_FEW,
    SHORT_LARGE,
    DIRECT,
    KERNELS,
};

const void *kernel_of(int number)
{
    switch (number) {
    case ALL_SMALL:
        return reinterpret_cast<const void *>(lk_exchange_kernel<LK_EXCHANGE_SMALL, plain_warps>);
    case ALL_LARGE:
        return reinterpret_cast<const void *>(lk_exchange_kernel<LK_EXCHANGE_MAX, plain_warps>);
    case MASKED_SMALL:
        return reinterpret_cast<const void *>(lk_exchange_kernel<LK_EXCHANGE_SMALL, masked_warps>);
    case MASKED_LARGE:
        return reinterpret_cast<const void *>(lk_exchange_kernel<LK_EXCHANGE_MAX, masked_warps>);
    case SHORT_FEW:
        return reinterpret_cast<const void *>(lk_exchange_short_kernel<LK_EXCHANGE_FEW>);
    case SHORT_LARGE:
        return reinterpret_cast<const void *>(lk_exchange_short_kernel<LK_EXCHANGE_MAX>);
    default: return reinterpret_cast<const void *>(lk_exchange_direct_kernel<LK_EXCHANGE_SMALL>);
    }
}

/* Of all messages and copies. */
bool is_short(const lk_exchange_launch &launch)
{
    uint32_t n = launch.head.takes[launch.head.rings.shape.ranks];

    for (uint32_t i = 0; i < n; i++)
        if (!lk_message_is_short(&launch.head.rings.shape, launch.entries[i].bytes))
            return false;
    return true;
}

/* Lets a launch have as many cursors as a CTA has which has every channel of the largest shape, or as many as this device
 * has memory for: with a CTA for each channel a few are enough. */
cudaError_t allow_cursors(const void *kernel, const cudaFuncAttributes &attributes)
{
    constexpr int all = EXCHANGE_ROLES * LK_CHANNELS_MAX * LK_DEVICE_RANKS *
                        sizeof(exchange_cursor);
    int device = 0, room = 0;
    cudaError_t err = cudaGetDevice(&device);

    if (err == cudaSuccess)
        err = cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (err != cudaSuccess)
        return err;
    room -= static_cast<int>(attributes.sharedSizeBytes);
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                room < all ? room : all);
}

} // namespace

extern "C" int lk_run_exchange(const lk_exchange_launch *launch, void *stream)
{
    const lk_exchange_head &head = launch->head;
    uint32_t n = head.takes[head.rings.shape.ranks];
    bool all_short = is_short(*launch);
    uint32_t ctas = all_short && head.ctas > short_ctas ? short_ctas : head.ctas;
    size_t shared = exchange_cursors(&head.rings.shape, ctas) * sizeof(exchange_cursor);
    lk_ring_kernel kernel = {};
    const lk_ring_kernel *other;

    if (all_short) {
        kernel.kernel = kernel_of(n > LK_EXCHANGE_FEW ? SHORT_LARGE : SHORT_FEW);
        kernel.threads = short_threads;
        return lk_launch_kernel(kernel, ctas, shared, launch, stream);
    }
    other = lk_find_variant && n <= LK_EXCHANGE_SMALL && !head.mask.rows
                ? lk_find_variant(LK_KIND_EXCHANGE)
                : nullptr;
    if (!other && n <= LK_EXCHANGE_SMALL && runs_directly(*launch)) {
        kernel.kernel = kernel_of(DIRECT);
        kernel.threads = direct::threads;
        return lk_launch_kernel(kernel, head.ctas, 0, launch, stream);
    }
    kernel.kernel = kernel_of((head.mask.rows ? MASKED_SMALL : ALL_SMALL) +
                              (n > LK_EXCHANGE_SMALL ? 1 : 0));
    kernel.threads = masked_warps::threads;
    return lk_launch_kernel(other ? *other : kernel, ctas, shared, launch, stream);
}

extern "C" int lk_load_exchange(void)
{
    for (int i = 0; i < KERNELS; i++) {
        cudaFuncAttributes attributes;
        cudaError_t err = cudaFuncGetAttributes(&attributes, kernel_of(i));

        if (err == cudaSuccess)
            err = allow_cursors(kernel_of(i), attributes);
        if (err != cudaSuccess)
            return err;
    }
    return 0;
}
