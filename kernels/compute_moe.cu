/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of tokens to experts and back, on the device.
 */
#include "kernels/compute_device.cuh"
#include "kernels/compute_moe.h"

namespace
{

constexpr uint32_t WARPS = LK_BLOCK / 32;

/* First launch: nobody fills anything yet. */
__global__ void __launch_bounds__(LK_BLOCK)
    moe_clear_kernel(const __grid_constant__ lk_moe_routing r)
{
    uint64_t step = uint64_t{ gridDim.x } * LK_BLOCK;
    uint64_t first = uint64_t{ blockIdx.x } * LK_BLOCK + threadIdx.x;

    for (uint64_t row = first; row < r.rows; row += step)
        r.slot_of_row[row] = -1;
    for (uint64_t slot = first; slot < r.tokens * r.choices; slot += step)
        r.row_of_slot[slot] = -1;
    for (uint64_t word = first; r.live && word < (r.rows + 31) / 32; word += step)
        r.live[word] = 0;
}

/* How many slots every expert has, counted by the whole block. */
__device__ void count_slots(const lk_moe_routing &r, uint32_t *counts)
{
    for (uint32_t e = threadIdx.x; e < r.expert_count; e += LK_BLOCK)
        counts[e] = 0;
    __syncthreads();
    for (uint64_t slot = threadIdx.x; slot < r.tokens * r.choices; slot += LK_BLOCK) {
        int32_t expert = r.experts[slot];

        if (static_cast<uint32_t>(expert) < r.expert_count) /* negative ones are large */
            atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
}

/* Where expert `mine` begins; all experts' places go out from the block of the first. */
__device__ uint64_t place(const lk_moe_routing &r, const uint32_t *counts, uint32_t mine)
{
    uint64_t first = 0, begin = 0;

    for (uint32_t e = 0; e < r.expert_count; e++) {
        uint64_t row = moe_first_row(&r, e, first);

        begin = e == mine ? row : begin;
        if (mine == 0) {
            r.offsets[e] = static_cast<int32_t>(row);
            r.counts[e] = static_cast<int32_t>(moe_filled(&r, row, counts[e]));
        }
        first = moe_next_row(&r, e, first, counts[e]);
    }
    if (mine == 0)
        r.offsets[r.expert_count] = static_cast<int32_t>(moe_first_row(&r, r.expert_count, first));
    return begin;
}

/* Second launch: a block for each expert. A warp takes a stretch of slots, counts its own first, and then gives rows in
 * the order of slots, behind those of the warps before it. */
__global__ void __launch_bounds__(LK_BLOCK)
    moe_route_kernel(const __grid_constant__ lk_moe_routing r)
{
    __shared__ uint32_t counts[LK_MOE_EXPERTS];
    __shared__ uint32_t of_warp[WARPS];
    __shared__ uint64_t begin;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t mine = static_cast<int32_t>(blockIdx.x);
    uint64_t slots = r.tokens * r.choices;
    uint64_t stretch = (slots + WARPS * 32 - 1) / (WARPS * 32) * 32;
    uint64_t from = warp * stretch, to = from + stretch < slots ? from + stretch : slots;
    uint32_t found = 0;

    count_slots(r, counts);
    if (threadIdx.x == 0)
        begin = place(r, counts, blockIdx.x);
    for (uint64_t at = from; at < to; at += 32)
        found += __popc(__ballot_sync(~0U, at + lane < to && r.experts[at + lane] == mine));
    if (lane == 0)
        of_warp[warp] = found;
    __syncthreads();
    uint64_t room = moe_filled(&r, begin, counts[blockIdx.x]);
    uint64_t rank = 0;
    for (uint32_t w = 0; w < warp; w++)
        rank += of_warp[w];
    for (uint64_t at = from; at < to; at += 32) {
        bool hit = at + lane < to && r.experts[at + lane] == mine;
        uint32_t hits = __ballot_sync(~0U, hit);
        uint64_t nth = rank + __popc(hits & ((1U << lane) - 1));

        if (hit && nth < room) {
            uint64_t row = begin + nth;

            r.row_of_slot[at + lane] = static_cast<int32_t>(row);
            r.slot_of_row[row] = static_cast<int32_t>(at + lane);
            if (r.live)
                atomicOr(&r.live[row / 32], 1U << row % 32);
        }
        rank += __popc(hits);
    }
}

/* A warp for each row of the result. */
template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    moe_permute_kernel(const __grid_constant__ lk_moe_launch launch)
{
    uint64_t row = uint64_t{ blockIdx.x } * WARPS + threadIdx.x / 32;

    if (row < launch.routing.rows)
        moe_gather_lane(&launch, row, threadIdx.x % 32, Width);
}

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    moe_unpermute_kernel(const __grid_constant__ lk_moe_launch launch)
{
    uint64_t token = uint64_t{ blockIdx.x } * WARPS + threadIdx.x / 32;

    if (token < launch.routing.tokens)
        moe_combine_lane(&launch, token, threadIdx.x % 32, Width);
}

int run(const void *kernel, const void *argument, uint64_t blocks, void *stream)
{
    void *args[] = { const_cast<void *>(argument) };

    return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(LK_BLOCK), args, 0,
                            static_cast<cudaStream_t>(stream));
}

template <class T> const void *address(T *kernel)
{
    return reinterpret_cast<const void *>(kernel);
}

} // namespace

extern "C" int lk_run_moe_route(const lk_moe_routing *routing, void *stream)
{
    uint64_t most = routing->rows + routing->tokens * routing->choices;
    uint64_t blocks = most / (4 * LK_BLOCK) + 1;
    int err = run(address(moe_clear_kernel), routing, blocks < 1024 ? blocks : 1024, stream);

    return err ? err : run(address(moe_route_kernel), routing, routing->expert_count, stream);
}

extern "C" int lk_run_moe_permute(const lk_moe_launch *launch, void *stream)
{
    return run(launch->wide ? address(moe_permute_kernel<LK_WHOLE>)
                            : address(moe_permute_kernel<LK_SINGLE>),
               launch, (launch->routing.rows + WARPS - 1) / WARPS, stream);
}

extern "C" int lk_run_moe_unpermute(const lk_moe_launch *launch, void *stream)
{
    return run(launch->wide ? address(moe_unpermute_kernel<LK_WHOLE>)
                            : address(moe_unpermute_kernel<LK_SINGLE>),
               launch, (launch->routing.tokens + WARPS - 1) / WARPS, stream);
}

extern "C" int lk_load_moe(void)
{
    const void *kernels[] = { address(moe_clear_kernel),
                              address(moe_route_kernel),
                              address(moe_permute_kernel<LK_WHOLE>),
                              address(moe_permute_kernel<LK_SINGLE>),
                              address(moe_unpermute_kernel<LK_WHOLE>),
                              address(moe_unpermute_kernel<LK_SINGLE>) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
