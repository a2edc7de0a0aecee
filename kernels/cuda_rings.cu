/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of the rings and their launches.
 */
#include "kernels/cuda_launch_internal.cuh"
#include "kernels/cuda_rings_lines.cuh"

#include <cerrno>
#include <cstddef>

using namespace lk_rings_device;

namespace
{

/* Of the shapes that were measured on an H200 the fastest with 32 CTAs and with 16 (perf/results). */
using roles = warp_roles<7, 17, 4>;

/* Threads of a CTA of a one-shot call: between two H200 8 and 64 KB take 3.0 and 3.5 us with 128, 3.4 and 3.8 with 512. So
 * there are more only where there is not one for each pack, and a thread has several packs only where there are no more. */
constexpr uint32_t line_threads = 128, line_threads_most = 512, lines_ahead = 4;

static_assert(roles::residents == 1, "co-residency is planned with a multiprocessor for each CTA");
static_assert(sizeof(ring_args<LK_RING_SMALL>) <= 1024, "small size class");
static_assert(sizeof(ring_args<LK_RING_MAX>) <= 32764, "large size class");
static_assert(offsetof(lk_ring_launch, entries) == sizeof(lk_ring_head),
              "a launch is the argument in one piece");

/* At most 64 registers. */
template <class V, unsigned N>
__global__ void __launch_bounds__(roles::threads, roles::residents)
    lk_rings_kernel(const __grid_constant__ ring_args<N> args)
{
    __shared__ pipeline pipelines[ROLES];

    run_cta<V, roles>(args, pipelines, blockIdx.x, gridDim.x);
}

template <class V, unsigned N, uint32_t Ahead>
__global__ void __launch_bounds__(line_threads_most, 1)
    lk_lines_kernel(const __grid_constant__ ring_args<N> args)
{
    run_lines<V, Ahead>(args, blockIdx.x, gridDim.x, blockDim.x);
}

/* Two size classes: each is a kernel of its own, and they take long to compile. */
struct kernel_set {
    const void *small, *large;
};

template <class V> kernel_set two_shot()
{
    return { reinterpret_cast<const void *>(lk_rings_kernel<V, LK_RING_SMALL>),
             reinterpret_cast<const void *>(lk_rings_kernel<V, LK_RING_MAX>) };
}

template <class V, uint32_t Ahead> kernel_set one_shot_of()
{
    return { reinterpret_cast<const void *>(lk_lines_kernel<V, LK_RING_SMALL, Ahead>),
             reinterpret_cast<const void *>(lk_lines_kernel<V, LK_RING_MAX, Ahead>) };
}

template <class V> kernel_set one_shot(bool ahead)
{
    return ahead ? one_shot_of<V, lines_ahead>() : one_shot_of<V, 1>();
}

enum kind {
    FP32,
    BF16,
    FP16,
    NARROWED,
    NARROWED_STOCHASTIC,
    NARROWED_FED,
    NARROWED_FED_STOCHASTIC,
    KINDS,
};

kind kind_of(const lk_ring_head &h)
{
    if (h.wire == h.type)
        return h.type == LK_FP32 ? FP32 : h.type == LK_BF16 ? BF16 : FP16;
    if (h.residual)
        return h.rounding == LK_STOCHASTIC ? NARROWED_FED_STOCHASTIC : NARROWED_FED;
    return h.rounding == LK_STOCHASTIC ? NARROWED_STOCHASTIC : NARROWED;
}

enum form {
    TWO_SHOT,
    LINES,
    LINES_AHEAD, /* a thread has several packs under way */
    FORMS,
};

/* Nothing narrows in a one-shot call. */
kernel_set find_set(kind k, form f)
{
    bool lines = f != TWO_SHOT, ahead = f == LINES_AHEAD;

    switch (k) {
    case FP32: return lines ? one_shot<value_fp32>(ahead) : two_shot<value_fp32>();
    case BF16: return lines ? one_shot<value_16<false>>(ahead) : two_shot<value_16<false>>();
    case FP16: return lines ? one_shot<value_16<true>>(ahead) : two_shot<value_16<true>>();
    case NARROWED: return lines ? kernel_set{} : two_shot<value_fp32_bf16<false>>();
    case NARROWED_STOCHASTIC: return lines ? kernel_set{} : two_shot<value_fp32_bf16<true>>();
    case NARROWED_FED: return lines ? kernel_set{} : two_shot<value_fp32_bf16_fed<false>>();
    case NARROWED_FED_STOCHASTIC:
        return lines ? kernel_set{} : two_shot<value_fp32_bf16_fed<true>>();
    default: return {};
    }
}

uint32_t whole_warps(uint32_t threads)
{
    return (threads + 31) / 32 * 32;
}

/* Fewer threads begin and meet sooner. */
uint32_t threads_of_lines(const lk_ring_head &head)
{
    uint32_t each = (head.packs + head.ctas - 1) / head.ctas;

    if (head.packs < line_threads)
        return whole_warps(head.packs);
    return each <= line_threads       ? line_threads
           : each < line_threads_most ? whole_warps(each)
                                      : line_threads_most;
}

} // namespace

extern "C" const uint32_t lk_backend_ranks = LK_DEVICE_RANKS;

/* What is measured in the place of a kernel, or NULL. */
static const lk_ring_kernel *find_other(const lk_ring_head &head)
{
    kind k = kind_of(head);

    if (!lk_find_variant || head.n > LK_RING_SMALL)
        return nullptr;
    if (head.work == LK_WORK_LINES)
        return k == FP32 ? lk_find_variant(LK_KIND_LINES) : nullptr;
    return k == FP32       ? lk_find_variant(LK_KIND_FP32)
           : k == BF16     ? lk_find_variant(LK_KIND_BF16)
           : k == NARROWED ? lk_find_variant(LK_KIND_NARROWED)
                           : nullptr;
}

static lk_ring_kernel find_kernel(const lk_ring_head &head)
{
    bool one = head.work == LK_WORK_LINES;
    uint32_t threads = one ? threads_of_lines(head) : roles::threads;
    form f = !one ? TWO_SHOT : head.packs > head.ctas * threads ? LINES_AHEAD : LINES;
    kernel_set set = find_set(kind_of(head), f);
    const lk_ring_kernel *other = find_other(head);
    lk_ring_kernel found = {};

    if (other) {
        found = *other;
        found.threads = one && head.packs < found.threads ? whole_warps(head.packs) : found.threads;
        return found;
    }
    found.kernel = head.n <= LK_RING_SMALL ? set.small : set.large;
    found.threads = threads;
    return found;
}

extern "C" int lk_run_rings(const lk_ring_launch *launch, void *stream)
{
    const lk_ring_head &head = launch->head;
    bool one = head.work == LK_WORK_LINES;
    lk_ring_kernel kernel = find_kernel(head);
    uint32_t useful = (head.packs + kernel.threads - 1) / kernel.threads;

    return lk_launch_kernel(kernel, one && useful < head.ctas ? useful : head.ctas, 0, launch,
                            stream);
}

extern "C" int lk_load_rings(void)
{
    for (int k = FP32; k < KINDS; k++) {
        for (int f = TWO_SHOT; f < FORMS; f++) {
            kernel_set set = find_set(static_cast<kind>(k), static_cast<form>(f));

            for (const void *kernel : { set.small, set.large }) {
                cudaFuncAttributes attributes;
                cudaError_t err = kernel ? cudaFuncGetAttributes(&attributes, kernel) : cudaSuccess;

                if (err != cudaSuccess)
                    return err;
            }
        }
    }
    return 0;
}
