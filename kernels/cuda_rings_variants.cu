/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of a group of variants, and of group 0 the choice among all. For launches with few entries, of fp32 with
 * either wire, of bf16, of exchanges, and of one-shot sums of fp32.
 */
#include "kernels/cuda_variants_internal.cuh"

#include "kernels/cuda_exchange_body.cuh"
#include "kernels/cuda_rings_lines.cuh"
#include "kernels/cuda_rings_paths.cuh"
#include "kernels/list_internal.h"

#include <cstddef>

using namespace lk_rings_device;

namespace
{

template <class V, class R>
__global__ void __launch_bounds__(R::threads, R::residents)
    lk_variant_kernel(const __grid_constant__ ring_args<LK_RING_SMALL> args)
{
    __shared__ pipeline pipelines[ROLES];
    __shared__ __align__(128) uint8_t stages[R::stages ? R::stages : 16];

    run_cta<V, R>(args, pipelines, blockIdx.x, gridDim.x, stages);
}

/* Stages come before cursors. */
template <class R>
__global__ void __launch_bounds__(R::threads, 1)
    lk_variant_exchange_kernel(const __grid_constant__ exchange_args<LK_EXCHANGE_SMALL> args)
{
    __shared__ exchange_pipeline pipelines[EXCHANGE_ROLES];
    __shared__ lk_barrier there[R::copy * R::bulk + 1];
    extern __shared__ __align__(128) uint8_t memory[];

    run_exchange_cta<R>(args, pipelines, reinterpret_cast<exchange_cursor *>(memory + R::stages),
                        blockIdx.x, gridDim.x, memory, there);
}

template <uint32_t Threads, uint32_t Ahead, bool Early>
__global__ void __launch_bounds__(Threads)
    lk_variant_lines_kernel(const __grid_constant__ ring_args<LK_RING_SMALL> args)
{
#if __CUDA_ARCH__ >= 900
    if (Early) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
#endif
    run_lines<value_fp32, Ahead>(args, blockIdx.x, gridDim.x, blockDim.x);
}

template <class V, class R> lk_ring_kernel sums()
{
    return { reinterpret_cast<const void *>(lk_variant_kernel<V, R>), R::threads, 0, 0, 0 };
}

template <class R> lk_ring_kernel exchanges()
{
    return { reinterpret_cast<const void *>(lk_variant_exchange_kernel<R>), R::threads, R::stages,
             0, 0 };
}

/* Threads of a CTA, and packs of a thread that are under way. */
template <uint32_t Threads, uint32_t Ahead, bool Early = false>
lk_variant only_lines(const char *name)
{
    lk_variant v = { name, {}, {}, {}, {}, {} };

    v.lines.kernel = reinterpret_cast<const void *>(lk_variant_lines_kernel<Threads, Ahead, Early>);
    v.lines.threads = Threads;
    v.lines.early = Early;
    return v;
}

template <class R> lk_variant all_sums(const char *name)
{
    return { name,
             sums<value_fp32_bf16<false>, R>(),
             sums<value_fp32, R>(),
             sums<value_16<false>, R>(),
             {},
             {} };
}

template <class R, class E> lk_variant sums_and_exchanges(const char *name)
{
    lk_variant v = all_sums<R>(name);

    v.exchange = exchanges<E>();
    return v;
}

template <class E> lk_variant only_exchanges(const char *name)
{
    return { name, {}, {}, {}, exchanges<E>(), {} };
}

[[maybe_unused]] lk_variant same_domain(lk_variant v)
{
    for (lk_ring_kernel *k : { &v.narrowed, &v.fp32, &v.bf16, &v.exchange, &v.lines })
        k->same_domain = 1;
    return v;
}

/* As the library's, or with a warp less for each that publishes. */
template <class Path>
using roles = warp_roles<Path::publish_apart ? 6 : 7, Path::publish_apart ? 16 : 17, 4, Path>;
template <class Path>
using moving = exchange_warps<11, Path::publish_apart ? 9 : 10, 8, unmasked_path<Path>>;
/* The library's, shared out otherwise. */
template <uint32_t Send, uint32_t Take, uint32_t Copy>
using shared = exchange_warps<Send, Take, Copy, unmasked_path<exchange_path>>;
/* Pieces for bulk copies of what a rank sends to itself, by one warp: 96 KB. */
template <class Path>
using copying = exchange_warps<15, Path::publish_apart ? 12 : 13, 1, unmasked_path<Path>, 24>;

const lk_variant variants[] = {
#if LK_GROUP == 0
    sums_and_exchanges<roles<plain_path>, moving<plain_path>>("plain stores"),
    only_lines<128, 1>("one-shot, 128 threads, 1 pack"),
    only_lines<512, 1>("one-shot, 512 threads, 1 pack"),
    only_lines<128, 4>("one-shot, 128 threads, 4 packs"),
    only_lines<512, 2>("one-shot, 512 threads, 2 packs"),
    only_lines<512, 4>("one-shot, 512 threads, 4 packs"),
    only_lines<256, 8>("one-shot, 256 threads, 8 packs"),
    only_lines<512, 4, true>("one-shot, 512 threads, 4 packs, early"),
#elif LK_GROUP == 1
    sums_and_exchanges<roles<apart_path>, moving<apart_path>>("plain, publishers apart"),
    same_domain(sums_and_exchanges<roles<plain_path>, moving<plain_path>>("plain, same domain")),
#elif LK_GROUP == 2
    sums_and_exchanges<roles<pull_path>, moving<pull_path>>("plain, pull"),
    all_sums<roles<pull_gather_path>>("plain, pull in the gather leg"),
#elif LK_GROUP == 3
    sums_and_exchanges<roles<bulk_path>, moving<bulk_path>>("bulk stores"),
    sums_and_exchanges<roles<few_fences_path>, moving<few_fences_path>>("plain, four jobs a fence"),
#elif LK_GROUP == 4
    only_exchanges<copying<plain_path>>("plain, own part in bulk"),
    only_exchanges<copying<apart_path>>("plain, apart, own part in bulk"),
    only_exchanges<copying<pull_apart_path>>("plain, pull, apart, own part in bulk"),
    all_sums<roles<in_order_path>>("plain, packs in order"),
#elif LK_GROUP == 5
    sums_and_exchanges<roles<streaming_path>, moving<streaming_path>>("streaming stores"),
    sums_and_exchanges<roles<strong_path>, moving<strong_path>>("strong stores"),
#elif LK_GROUP == 6
    all_sums<warp_roles<4, 6, 2, plain_path>>("plain, 512 threads"),
    all_sums<warp_roles<6, 11, 3, plain_path>>("plain, 768 threads"),
#elif LK_GROUP == 7
    all_sums<warp_roles<8, 16, 4, plain_path>>("plain, 8:16:4"),
    all_sums<warp_roles<7, 14, 7, plain_path>>("plain, 7:14:7"),
    only_exchanges<moving<in_turn_path>>("tiles in turn"),
    only_exchanges<shared<13, 10, 5>>("13:10:5"),
    only_exchanges<shared<13, 9, 6>>("13:9:6"),
    only_exchanges<shared<10, 7, 11>>("10:7:11"),
#else
    sums_and_exchanges<roles<pull_apart_path>, moving<pull_apart_path>>(
        "plain, pull, publishers apart"),
    sums_and_exchanges<roles<bulk_apart_path>, moving<bulk_apart_path>>(
        "bulk stores, publishers apart"),
#endif
};

} // namespace

LK_GROUP_DECLARE(LK_GROUP)
extern "C" const lk_variant *LK_GROUP_NAME(LK_GROUP)(int number)
{
    return number < static_cast<int>(sizeof(variants) / sizeof(*variants)) ? &variants[number]
                                                                           : nullptr;
}

#if LK_GROUP == 0
LK_GROUP_DECLARE(1)
LK_GROUP_DECLARE(2)
LK_GROUP_DECLARE(3)
LK_GROUP_DECLARE(4)
LK_GROUP_DECLARE(5)
LK_GROUP_DECLARE(6)
LK_GROUP_DECLARE(7)
LK_GROUP_DECLARE(8)

namespace
{

const lk_variant *(*const groups[LK_GROUPS])(int) = {
    LK_GROUP_NAME(0), LK_GROUP_NAME(1), LK_GROUP_NAME(2), LK_GROUP_NAME(3), LK_GROUP_NAME(4),
    LK_GROUP_NAME(5), LK_GROUP_NAME(6), LK_GROUP_NAME(7), LK_GROUP_NAME(8),
};

/* Written by lk_rings_variant, read by launches; the callers keep the two apart. */
const lk_variant product = { "product", {}, {}, {}, {}, {} };
const lk_variant *chosen = &product;

const lk_variant *variant_of(int number)
{
    if (number <= 0)
        return number ? nullptr : &product;
    number--;
    for (auto group : groups) {
        int n = 0;

        for (; const lk_variant *v = group(n); n++)
            if (n == number)
                return v;
        number -= n;
    }
    return nullptr;
}

const lk_ring_kernel *kernel_of(const lk_variant *v, unsigned int kind)
{
    const lk_ring_kernel *k = kind == LK_KIND_NARROWED   ? &v->narrowed
                              : kind == LK_KIND_FP32     ? &v->fp32
                              : kind == LK_KIND_BF16     ? &v->bf16
                              : kind == LK_KIND_EXCHANGE ? &v->exchange
                                                         : &v->lines;

    return k->kernel ? k : nullptr;
}

/* Waiting kernels keep the driver from loading others. */
bool ready(const lk_ring_kernel *k)
{
    constexpr int cursors = 65536; /* room for those of a call */
    cudaFuncAttributes attributes;

    if (!k)
        return true;
    if (k->shared && cudaFuncSetAttribute(k->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(k->shared) + cursors) != cudaSuccess)
        return false;
    return cudaFuncGetAttributes(&attributes, k->kernel) == cudaSuccess;
}

} // namespace

extern "C" LK_API const char *lk_rings_variant(int number)
{
    const lk_variant *v = variant_of(number);

    if (!v)
        return nullptr;
    for (unsigned int kind = LK_KIND_NARROWED; kind <= LK_KIND_LINES; kind *= 2)
        if (!ready(kernel_of(v, kind)))
            return nullptr;
    chosen = v;
    return v->name;
}

extern "C" LK_API unsigned int lk_rings_variant_kinds(int number)
{
    const lk_variant *v = variant_of(number);
    unsigned int kinds = 0;

    for (unsigned int kind = LK_KIND_NARROWED; v && kind <= LK_KIND_LINES; kind *= 2)
        kinds |= kernel_of(v, kind) ? kind : 0;
    return kinds;
}

extern "C" const lk_ring_kernel *lk_find_variant(enum lk_variant_kind kind)
{
    return kernel_of(chosen, kind);
}
#endif
