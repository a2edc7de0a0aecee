/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of exchanges and their launches.
 */
#include "kernels/cuda_exchange_body.cuh"
#include "kernels/cuda_launch_internal.cuh"

#include <cstddef>

using namespace lk_rings_device;

namespace
{

/* Of those that were measured on an H200 the fastest with 16 CTAs, and next to it with 32 (perf/results). */
using warps = exchange_warps<11, 10, 8>;

static_assert(warps::threads == 1024, "co-residency is planned with a multiprocessor for each CTA");
static_assert(sizeof(exchange_args<LK_EXCHANGE_SMALL>) <= 4096, "small size class");
static_assert(sizeof(exchange_args<LK_EXCHANGE_MAX>) <= 32764, "large size class");
static_assert(offsetof(lk_exchange_launch, entries) == sizeof(lk_exchange_head),
              "a launch is the argument in one piece");

template <unsigned N>
__global__ void __launch_bounds__(warps::threads, 1)
    lk_exchange_kernel(const __grid_constant__ exchange_args<N> args)
{
    __shared__ exchange_pipeline pipelines[EXCHANGE_ROLES];
    extern __shared__ exchange_cursor cursors[];

    run_exchange_cta<warps>(args, pipelines, cursors, blockIdx.x, gridDim.x);
}

const void *kernel_for(bool large)
{
    return large ? reinterpret_cast<const void *>(lk_exchange_kernel<LK_EXCHANGE_MAX>)
                 : reinterpret_cast<const void *>(lk_exchange_kernel<LK_EXCHANGE_SMALL>);
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
    bool large = head.takes[head.rings.shape.ranks] > LK_EXCHANGE_SMALL;
    const lk_ring_kernel *other = lk_find_variant && !large ? lk_find_variant(LK_KIND_EXCHANGE)
                                                            : nullptr;
    lk_ring_kernel kernel = {};

    kernel.kernel = kernel_for(large);
    kernel.threads = warps::threads;
    return lk_launch_kernel(
        other ? *other : kernel, head.ctas,
        exchange_cursors(&head.rings.shape, head.ctas) * sizeof(exchange_cursor), launch, stream);
}

extern "C" int lk_load_exchange(void)
{
    for (bool large : { false, true }) {
        cudaFuncAttributes attributes;
        cudaError_t err = cudaFuncGetAttributes(&attributes, kernel_for(large));

        if (err == cudaSuccess)
            err = allow_cursors(kernel_for(large), attributes);
        if (err != cudaSuccess)
            return err;
    }
    return 0;
}
