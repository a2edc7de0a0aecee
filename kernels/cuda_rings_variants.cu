/* SPDX-License-Identifier: Apache-2.0
 *
 * Other shapes of the two-shot kernels, to be measured beside the one that the library has. For launches with few
 * entries, of fp32 with either wire and of bf16.
 */
#include "kernels/cuda_rings_body.cuh"
#include "kernels/list_internal.h"
#include "kernels/rings_internal.h"

#include <cstddef>

using namespace lk_rings_device;

namespace
{

constexpr unsigned entries = LK_RING_SMALL;

template <class V, class R>
__global__ void __launch_bounds__(R::threads, R::residents)
    lk_variant_kernel(const __grid_constant__ ring_args<entries> args)
{
    __shared__ pipeline pipelines[ROLES];

    run_cta<V, R>(args, pipelines, blockIdx.x, gridDim.x);
}

struct variant {
    const char *name;
    lk_ring_kernel narrowed, fp32, bf16; /* no kernel: none for that type */
};

template <class V, class R> lk_ring_kernel kernel_of()
{
    return { reinterpret_cast<const void *>(lk_variant_kernel<V, R>), R::threads };
}

template <class R> variant for_all(const char *name)
{
    return { name, kernel_of<value_fp32_bf16<false>, R>(), kernel_of<value_fp32, R>(),
             kernel_of<value_16<false>, R>() };
}

const variant variants[] = {
    {"product", {}, {}, {}},
    for_all<warp_roles<4, 6, 2>>("512 threads"),
    for_all<warp_roles<6, 11, 3>>("768 threads"),
    for_all<warp_roles<8, 16, 4>>("1024 threads, 8:16:4"),
    for_all<warp_roles<7, 16, 5>>("1024 threads, 7:16:5"),
};

/* Written by lk_rings_variant, read by launches; the callers keep the two apart. */
const variant *chosen = &variants[0];

/* Waiting kernels keep the driver from loading others. */
bool ready(const lk_ring_kernel &k)
{
    cudaFuncAttributes attributes;

    return !k.kernel || cudaFuncGetAttributes(&attributes, k.kernel) == cudaSuccess;
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
