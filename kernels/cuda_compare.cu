/* SPDX-License-Identifier: Apache-2.0
 *
 * How far two results are apart. Each block leaves what it has found in the work area; the last one adds it all up, in the
 * order of the blocks, and tells the caller.
 */
#include "kernels/device_internal.cuh"
#include "kernels/list_internal.h"

namespace
{

struct found {
    double apart; /* sum of squares */
    double norm;
    double most;
    unsigned long long strange;
};

constexpr uint32_t most_blocks = 120;

struct work_area {
    unsigned ticket; /* wraps to 0 with the last block of a grid */
    unsigned pad[3];
    found blocks[most_blocks];
};

static_assert(sizeof(work_area) <= LK_COMPARE_BYTES, "what callers allocate");

template <lk_type Type> __device__ __forceinline__ float element(const void *data, uint64_t i)
{
    if (Type == LK_FP32)
        return static_cast<const float *>(data)[i];
    if (Type == LK_BF16)
        return widen_bf16(static_cast<const uint16_t *>(data)[i]);
    return widen_half(static_cast<const uint16_t *>(data)[i]);
}

__device__ __forceinline__ void look_at(found *sum, float got, float want)
{
    if (!isfinite(got) || !isfinite(want)) {
        sum->strange += got != want && !(got != got && want != want);
        return;
    }
    double by = fabs(static_cast<double>(got) - static_cast<double>(want));

    sum->apart += by * by;
    sum->norm += static_cast<double>(want) * static_cast<double>(want);
    sum->most = fmax(sum->most, by);
}

__device__ __forceinline__ void add(found *sum, const found &more)
{
    sum->apart += more.apart;
    sum->norm += more.norm;
    sum->most = fmax(sum->most, more.most);
    sum->strange += more.strange;
}

/* Of the block's threads, in thread 0. */
__device__ found add_block(found mine)
{
    __shared__ found warps[LK_WARPS];

    for (int step = 16; step; step /= 2) {
        found other = { __shfl_down_sync(~0U, mine.apart, step),
                        __shfl_down_sync(~0U, mine.norm, step),
                        __shfl_down_sync(~0U, mine.most, step),
                        __shfl_down_sync(~0U, mine.strange, step) };

        add(&mine, other);
    }
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < LK_WARPS; w++)
            add(&mine, warps[w]);
    }
    return mine;
}

__device__ void tell(const lk_comparison &args, const found *blocks)
{
    volatile lk_difference *out = args.out;
    found sum = {};

    for (uint32_t b = 0; b < gridDim.x; b++) {
        found one = { __ldcg(&blocks[b].apart), __ldcg(&blocks[b].norm), __ldcg(&blocks[b].most),
                      __ldcg(&blocks[b].strange) };

        add(&sum, one);
    }
    out->relative = sum.apart == 0 ? 0 : sqrt(sum.apart / sum.norm);
    out->most = sum.most;
    out->strange = sum.strange;
    __threadfence_system();
    out->done = 1;
}

template <lk_type Type>
__global__ void __launch_bounds__(LK_THREADS)
    lk_compare_kernel(const __grid_constant__ lk_comparison args)
{
    work_area *work = static_cast<work_area *>(args.work);
    uint64_t stride = uint64_t{ gridDim.x } * LK_THREADS;
    found mine = {};

    for (uint64_t i = uint64_t{ blockIdx.x } * LK_THREADS + threadIdx.x; i < args.count;
         i += stride)
        look_at(&mine, element<Type>(args.got, i), element<Type>(args.want, i));
    mine = add_block(mine);
    if (threadIdx.x != 0)
        return;
    work->blocks[blockIdx.x] = mine;
    __threadfence();
    if (atomicInc(&work->ticket, gridDim.x - 1) != gridDim.x - 1)
        return;
    __threadfence();
    tell(args, work->blocks);
}

const void *kernel_for(lk_type type)
{
    switch (type) {
    case LK_FP32: return reinterpret_cast<const void *>(lk_compare_kernel<LK_FP32>);
    case LK_BF16: return reinterpret_cast<const void *>(lk_compare_kernel<LK_BF16>);
    default: return reinterpret_cast<const void *>(lk_compare_kernel<LK_FP16>);
    }
}

} // namespace

extern "C" int lk_run_compare(const lk_comparison *comparison, void *stream)
{
    uint64_t blocks = (comparison->count + LK_THREADS - 1) / LK_THREADS;
    void *args[] = { const_cast<lk_comparison *>(comparison) };

    blocks = blocks < 1 ? 1 : blocks > most_blocks ? most_blocks : blocks;
    return cudaLaunchKernel(kernel_for(comparison->type), dim3(static_cast<uint32_t>(blocks)),
                            dim3(LK_THREADS), args, 0, static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_compare(void)
{
    for (lk_type type : { LK_FP32, LK_BF16, LK_FP16 }) {
        cudaFuncAttributes attributes;
        cudaError_t err = cudaFuncGetAttributes(&attributes, kernel_for(type));

        if (err != cudaSuccess)
            return err;
    }
    return 0;
}
