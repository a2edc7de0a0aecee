/* SPDX-License-Identifier: Apache-2.0
 *
 * Other shapes of the two-shot kernels, to be measured beside the one that the library has. For launches with few entries
 * of fp32 with a bf16 wire, some of them for fp32 and bf16, too.
 */
#include "kernels/cuda_rings_bulk.cuh"
#include "kernels/list_internal.h"
#include "kernels/rings_internal.h"

#include <cstddef>

using namespace lk_rings_device;

namespace
{

constexpr unsigned entries = LK_RING_SMALL;

struct product : warp_roles<4, 7, 2> {
};
struct peeking : product {
    static constexpr bool peek = true;
};
struct deep : product {
    static constexpr uint32_t jobs = 8;
};
struct reduce_more : warp_roles<3, 8, 2> {
};
struct send_more : warp_roles<5, 6, 2> {
};
struct threads_768 : warp_roles<6, 12, 3> {
    static constexpr uint32_t residents = 1;
};
struct threads_1024 : warp_roles<9, 16, 4> {
    static constexpr uint32_t residents = 1;
};
struct threads_1024_deep : threads_1024 {
    static constexpr bool peek = true;
    static constexpr uint32_t jobs = 8;
};
struct registers_128 : warp_roles<4, 7, 2> {
    static constexpr uint32_t send_ahead = 8, reduce_ahead = 4, take_ahead = 16, residents = 1;
};
struct registers_128_deep : registers_128 {
    static constexpr bool peek = true;
    static constexpr uint32_t jobs = 8;
};

template <class V, class R>
__global__ void __launch_bounds__(R::threads, R::residents)
    lk_variant_kernel(const __grid_constant__ ring_args<entries> args)
{
    __shared__ pipeline pipelines[ROLES];

    run_cta<V, R>(args, pipelines, blockIdx.x, gridDim.x);
}

/* The second CTA of a multiprocessor would not have the shared memory. */
template <uint32_t Stages> struct staged : warp_roles<4, 7, 2> {
    static constexpr uint32_t stages = Stages, residents = 1;
};
struct staged_deep : staged<3> {
    static constexpr bool peek = true;
    static constexpr uint32_t jobs = 8;
};
struct staged_768 : warp_roles<6, 12, 3> {
    static constexpr uint32_t stages = 2, jobs = 8, residents = 1;
};

template <class V, class R>
__global__ void __launch_bounds__(R::threads, R::residents)
    lk_staged_kernel(const __grid_constant__ ring_args<entries> args)
{
    __shared__ pipeline pipelines[ROLES];
    __shared__ lk_barrier full[staging<V, R>::count];
    extern __shared__ __align__(128) uint8_t bytes[];

    run_staged_cta<V, R>(args, pipelines, full, bytes, blockIdx.x, gridDim.x);
}

struct variant {
    const char *name;
    lk_ring_kernel narrowed, fp32, bf16; /* no kernel: none for that type */
};

template <class V, class R> lk_ring_kernel kernel_of()
{
    return { reinterpret_cast<const void *>(lk_variant_kernel<V, R>), R::threads, 0 };
}

template <class V, class R> lk_ring_kernel staged_kernel()
{
    static_assert(staging<V, R>::bytes <= 220 * 1024, "of 227 KB");
    return { reinterpret_cast<const void *>(lk_staged_kernel<V, R>), R::threads,
             staging<V, R>::bytes };
}

template <class R> variant for_narrowed(const char *name)
{
    return { name, kernel_of<value_fp32_bf16<false>, R>(), {}, {} };
}

template <class R> variant for_all(const char *name)
{
    return { name, kernel_of<value_fp32_bf16<false>, R>(), kernel_of<value_fp32, R>(),
             kernel_of<value_16<false>, R>() };
}

template <class R> variant staged_for_narrowed(const char *name)
{
    return { name, staged_kernel<value_fp32_bf16<false>, R>(), {}, {} };
}

template <class R> variant staged_for_all(const char *name)
{
    return { name, staged_kernel<value_fp32_bf16<false>, R>(), staged_kernel<value_fp32, R>(),
             staged_kernel<value_16<false>, R>() };
}

const variant variants[] = {
    {"product", {}, {}, {}},
    for_narrowed<reduce_more>("512 threads, 3:8:2"),
    for_narrowed<send_more>("512 threads, 5:6:2"),
    for_narrowed<peeking>("512 threads, looks first"),
    for_narrowed<deep>("512 threads, 8 jobs"),
    for_all<threads_768>("768 threads"),
    for_all<threads_1024>("1024 threads"),
    for_narrowed<threads_1024_deep>("1024 threads, looks first, 8 jobs"),
    for_all<registers_128>("512 threads, 128 registers"),
    for_narrowed<registers_128_deep>("512 threads, 128 registers, looks first, 8 jobs"),
    staged_for_all<staged<2>>("bulk loads, 2 stages"),
    staged_for_narrowed<staged<4>>("bulk loads, 4 stages"),
    staged_for_narrowed<staged_deep>("bulk loads, 3 stages, looks first, 8 jobs"),
    staged_for_narrowed<staged_768>("bulk loads, 768 threads, 2 stages, 8 jobs"),
};

/* Written by lk_rings_variant, read by launches; the callers keep the two apart. */
const variant *chosen = &variants[0];

/* Waiting kernels keep the driver from loading others. */
bool ready(const lk_ring_kernel &k)
{
    cudaFuncAttributes attributes;

    return !k.kernel || (cudaFuncGetAttributes(&attributes, k.kernel) == cudaSuccess &&
                         cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(k.shared)) == cudaSuccess);
}

} // namespace

extern "C" LK_API const char *lk_rings_variant(int number)
{
    if (number < 0 || number >= static_cast<int>(sizeof(variants) / sizeof(*variants)))
        return nullptr;

    const variant *v = &variants[number];

    if (!ready(v->narrowed) || !ready(v->fp32) || !ready(v->bf16))
        return nullptr;
    chosen = v;
    return v->name;
}

/* *kernel stays as it is where the variant has none for the call. */
extern "C" int lk_find_variant(const lk_ring_launch *launch, lk_ring_kernel *kernel)
{
    const lk_ring_head &h = launch->head;
    lk_ring_kernel found = {};

    if (h.n > entries || h.rounding == LK_STOCHASTIC)
        return 0;
    if (h.type == LK_FP32)
        found = h.wire == LK_BF16 ? chosen->narrowed : chosen->fp32;
    else if (h.type == LK_BF16)
        found = chosen->bf16;
    if (!found.kernel)
        return 0;
    *kernel = found;
    return 1;
}
