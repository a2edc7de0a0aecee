/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of tokens to experts and back, on the device.
 */
#include "kernels/compute_device.cuh"
#include "kernels/compute_moe.h"

namespace
{

constexpr uint32_t WARPS = LK_BLOCK / 32;

/* A block's stretch of slots, and a warp's of that. */
struct stretch {
    uint64_t begin, end;
};

__device__ stretch find_stretch(uint64_t all, uint32_t parts, uint32_t part)
{
    uint64_t each = (all + parts - 1) / parts;
    uint64_t begin = part * each < all ? part * each : all;

    return { begin, begin + each < all ? begin + each : all };
}

__device__ bool is_routed(const lk_moe_routing &r, int32_t expert)
{
    return static_cast<uint32_t>(expert) < r.expert_count; /* negative ones are large */
}

/* First launch: how many slots of its stretch every expert has. */
__global__ void __launch_bounds__(LK_BLOCK)
    moe_count_kernel(const __grid_constant__ lk_moe_routing r)
{
    __shared__ uint32_t counts[LK_MOE_EXPERTS];
    stretch slots = find_stretch(r.tokens * r.choices, gridDim.x, blockIdx.x);
    uint32_t *out = static_cast<uint32_t *>(r.workspace) + blockIdx.x * r.expert_count;

    for (uint32_t e = threadIdx.x; e < r.expert_count; e += LK_BLOCK)
        counts[e] = 0;
    __syncthreads();
    for (uint64_t slot = slots.begin + threadIdx.x; slot < slots.end; slot += LK_BLOCK)
        if (is_routed(r, r.experts[slot]))
            atomicAdd(&counts[r.experts[slot]], 1U);
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < r.expert_count; e += LK_BLOCK)
        out[e] = counts[e];
}

struct route_state {
    uint32_t next[WARPS]
                 [LK_MOE_EXPERTS];   /* how many slots before a warp's next ones an expert has */
    uint32_t begin[LK_MOE_EXPERTS];  /* its first row */
    uint32_t filled[LK_MOE_EXPERTS]; /* its rows; before placing: its slots */
    uint32_t sums[WARPS];
};

/* All slots of every expert, and next[0]: those of the blocks before this one. */
__device__ void add_blocks(const lk_moe_routing &r, route_state &state)
{
    const uint32_t *counts = static_cast<const uint32_t *>(r.workspace);

    for (uint32_t e = threadIdx.x; e < r.expert_count; e += LK_BLOCK) {
        uint32_t all = 0, before = 0;

#pragma unroll 16
        for (uint32_t b = 0; b < gridDim.x; b++) {
            uint32_t count = counts[b * r.expert_count + e];

            all += count;
            before += b < blockIdx.x ? count : 0;
        }
        state.filled[e] = all;
        state.begin[e] = before;
    }
}

/* Slots of every expert in each warp's stretch. */
__device__ void count_warps(const lk_moe_routing &r, route_state &state, const stretch &slots)
{
    uint32_t *mine = state.next[threadIdx.x / 32];

    for (uint32_t e = threadIdx.x % 32; e < r.expert_count; e += 32)
        mine[e] = 0;
    __syncwarp();
    for (uint64_t slot = slots.begin + threadIdx.x % 32; slot < slots.end; slot += 32)
        if (is_routed(r, r.experts[slot]))
            atomicAdd(&mine[r.experts[slot]], 1U);
}

/* The sum over the threads before this one. */
__device__ uint32_t sum_before(route_state &state, uint32_t mine)
{
    uint32_t lane = threadIdx.x % 32, all = mine, before = 0;

    for (unsigned by = 1; by < 32; by *= 2) {
        uint32_t other = __shfl_up_sync(~0U, all, by);

        all += lane >= by ? other : 0;
    }
    if (lane == 31)
        state.sums[threadIdx.x / 32] = all;
    __syncthreads();
    for (uint32_t w = 0; w < threadIdx.x / 32; w++)
        before += state.sums[w];
    return before + all - mine;
}

/* From counts to places. A thread has a few experts one after another; the first block gives all places out. */
__device__ void place_experts(const lk_moe_routing &r, route_state &state)
{
    uint32_t each = (r.expert_count + LK_BLOCK - 1) / LK_BLOCK;
    uint32_t from = threadIdx.x * each, rows = 0;
    uint32_t to = from + each < r.expert_count ? from + each : r.expert_count;

    for (uint32_t e = from; e < to && !r.capacity; e++)
        rows += static_cast<uint32_t>(moe_next_row(&r, e, 0, state.filled[e]));
    uint64_t first = sum_before(state, rows);

    for (uint32_t e = from; e < to; e++) {
        uint64_t begin = moe_first_row(&r, e, first);
        uint64_t filled = moe_filled(&r, begin, state.filled[e]);
        uint32_t before = state.begin[e];

        first = moe_next_row(&r, e, first, state.filled[e]);
        state.begin[e] = static_cast<uint32_t>(begin);
        state.filled[e] = static_cast<uint32_t>(filled);
        for (uint32_t w = 0; w < WARPS; w++) {
            uint32_t count = state.next[w][e];

            state.next[w][e] = before;
            before += count;
        }
        if (blockIdx.x)
            continue;
        r.offsets[e] = static_cast<int32_t>(begin);
        r.counts[e] = static_cast<int32_t>(filled);
        if (e + 1 == r.expert_count)
            r.offsets[e + 1] = static_cast<int32_t>(moe_first_row(&r, e + 1, first));
    }
}

/* Rows to the slots of a warp's stretch, in their order. */
__device__ void give_rows(const lk_moe_routing &r, route_state &state, const stretch &slots)
{
    uint32_t *next = state.next[threadIdx.x / 32];
    uint32_t lane = threadIdx.x % 32;

    for (uint64_t at = slots.begin; at < slots.end; at += 32) {
        int32_t expert = at + lane < slots.end ? r.experts[at + lane] : -1;
        bool routed = is_routed(r, expert);
        uint32_t same = __match_any_sync(~0U, expert);
        uint32_t before = __popc(same & ((1U << lane) - 1)), nth = 0;
        int32_t row = -1;

        if (routed)
            nth = next[expert] + before;
        __syncwarp();
        if (routed && !before)
            next[expert] += __popc(same);
        __syncwarp();
        if (routed && nth < state.filled[expert])
            row = static_cast<int32_t>(state.begin[expert] + nth);
        if (at + lane < slots.end)
            r.row_of_slot[at + lane] = row;
        if (row >= 0)
            r.slot_of_row[row] = static_cast<int32_t>(at + lane);
    }
}

/* Rows that nobody fills, and the mask, a word per warp at a time. Experts without slots share their beginning with the
 * next one: the last that begins at or before a row is whose it is. */
__device__ void mark_rows(const lk_moe_routing &r, const route_state &state)
{
    uint64_t words = (r.rows + 31) / 32, step = uint64_t{ gridDim.x } * WARPS;

    for (uint64_t word = uint64_t{ blockIdx.x } * WARPS + threadIdx.x / 32; word < words;
         word += step) {
        uint64_t row = 32 * word + threadIdx.x % 32;
        uint32_t low = 0, high = r.expert_count;

        while (low + 1 < high) {
            uint32_t middle = (low + high) / 2;

            if (state.begin[middle] <= row)
                low = middle;
            else
                high = middle;
        }
        bool filled = row < r.rows && row - state.begin[low] < state.filled[low];
        uint32_t live = __ballot_sync(~0U, filled);

        if (row < r.rows && !filled)
            r.slot_of_row[row] = -1;
        if (r.live && threadIdx.x % 32 == 0)
            r.live[word] = live;
    }
}

/* Second launch. */
__global__ void __launch_bounds__(LK_BLOCK)
    moe_route_kernel(const __grid_constant__ lk_moe_routing r)
{
    __shared__ route_state state;
    stretch slots = find_stretch(r.tokens * r.choices, gridDim.x, blockIdx.x);
    stretch mine = find_stretch(slots.end - slots.begin, WARPS, threadIdx.x / 32);

    mine = { slots.begin + mine.begin, slots.begin + mine.end };
    add_blocks(r, state);
    count_warps(r, state, mine);
    __syncthreads();
    place_experts(r, state);
    __syncthreads();
    give_rows(r, state, mine);
    mark_rows(r, state);
}

/* As moe_scatter_lane(), of whole groups without weights, and what is written is evicted first: it is more than L2 holds,
 * and the rows of tokens stay there. */
__device__ __forceinline__ void scatter_streamed(const lk_moe_launch &launch, uint64_t token,
                                                 uint32_t lane)
{
    const lk_moe_routing &r = launch.routing;
    const lk_moe_rows &rows = launch.rows;
    const uint16_t *from = static_cast<const uint16_t *>(rows.tokens) + token * rows.token_stride;
    uint32_t columns = static_cast<uint32_t>(rows.columns);

    for (uint32_t at = LK_VECTOR * lane; at < columns; at += moe_step(4)) {
        lk_wide16 x[4];

#pragma unroll
        for (uint32_t g = 0; g < 4; g++)
            if (moe_at(at, g) < columns)
                x[g] = load_group(from, moe_at(at, g), columns, LK_WHOLE);
#pragma unroll 4
        for (uint32_t k = 0; k < r.choices; k++) {
            int32_t row = r.row_of_slot[token * r.choices + k];
            uint16_t *to = static_cast<uint16_t *>(rows.permuted) +
                           static_cast<uint64_t>(row) * rows.permuted_stride;

            if (row < 0)
                continue;
#pragma unroll
            for (uint32_t g = 0; g < 4; g++)
                if (moe_at(at, g) < columns)
                    __stcs(reinterpret_cast<uint4 *>(to + moe_at(at, g)), x[g]);
        }
    }
}

/* A warp for each token, then, if rows that nobody fills are to be zeros, one for each row. */
template <lk_width Width, bool Streamed>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    moe_permute_kernel(const __grid_constant__ lk_moe_launch launch)
{
    uint64_t warp = uint64_t{ blockIdx.x } * WARPS + threadIdx.x / 32;
    uint64_t tokens = launch.routing.tokens;
    const lk_moe_rows &rows = launch.rows;

    if (warp < tokens && Streamed)
        scatter_streamed(launch, warp, threadIdx.x % 32);
    else if (warp < tokens)
        moe_scatter_lane(&launch, warp, threadIdx.x % 32, Width);
    else if (rows.fill && warp - tokens < launch.routing.rows)
        moe_fill_lane(&launch.routing, rows.permuted, rows.permuted_stride, rows.columns,
                      warp - tokens, threadIdx.x % 32, Width);
}

template <lk_width Width, unsigned Batch>
__global__ void __launch_bounds__(LK_BLOCK, Batch == 2 ? 2 : 3)
    moe_unpermute_kernel(const __grid_constant__ lk_moe_launch launch)
{
    uint64_t token = uint64_t{ blockIdx.x } * WARPS + threadIdx.x / 32;

    if (token < launch.routing.tokens)
        moe_combine_lane(&launch, token, threadIdx.x % 32, Width, LK_MOE_LOADS / Batch, Batch);
}

template <bool Streamed> __device__ __forceinline__ void store_sum(uint16_t *to, lk_wide16 x)
{
    if (Streamed)
        __stcs(reinterpret_cast<uint4 *>(to), x);
    else
        *reinterpret_cast<uint4 *>(to) = x;
}

/* A thread for each group of a token's columns, of at most Batch choices; sums as moe_combine_lane(). */
template <unsigned Batch, bool StreamedReads, bool StreamedWrites>
__global__ void __launch_bounds__(LK_BLOCK, Batch == 2 ? 6 : 3)
    moe_combine_flat(const __grid_constant__ lk_moe_launch launch)
{
    const lk_moe_routing &r = launch.routing;
    const lk_moe_rows &rows = launch.rows;
    uint32_t groups = static_cast<uint32_t>(rows.columns / LK_VECTOR);
    uint64_t nth = uint64_t{ blockIdx.x } * LK_BLOCK + threadIdx.x, token = nth / groups;
    uint64_t at = LK_VECTOR * (nth - token * groups);
    lk_wide16 x[Batch] = {};
    float sum[8] = { 0 };

    if (token >= r.tokens)
        return;
    moe_batch found = moe_find(&r, rows.weights, token, 0, Batch);
#pragma unroll
    for (unsigned k = 0; k < Batch; k++) {
        const uint4 *from = reinterpret_cast<const uint4 *>(
            static_cast<const uint16_t *>(rows.permuted) +
            static_cast<uint64_t>(found.row[k]) * rows.permuted_stride + at);

        if (found.row[k] >= 0)
            x[k] = StreamedReads ? __ldcs(from) : *from;
    }
#pragma unroll
    for (unsigned k = 0; k < Batch; k++) {
        float values[8];

        if (found.row[k] < 0)
            continue;
        unpack_group(x[k], values);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += values[i] * found.weight[k];
    }
    store_sum<StreamedWrites>(static_cast<uint16_t *>(rows.tokens) + token * rows.token_stride + at,
                              pack_group(sum));
}

template <lk_width Width, unsigned Batch>
__global__ void __launch_bounds__(LK_BLOCK, 2)
    moe_backward_kernel(const __grid_constant__ lk_moe_launch launch)
{
    uint64_t warp = uint64_t{ blockIdx.x } * WARPS + threadIdx.x / 32;
    uint32_t lane = threadIdx.x % 32;
    const lk_moe_routing &r = launch.routing;
    const lk_moe_grads &grads = launch.grads;

    if (warp >= r.tokens) {
        if (grads.fill && grads.dpermuted && warp - r.tokens < r.rows)
            moe_fill_lane(&r, grads.dpermuted, grads.dpermuted_stride, grads.columns,
                          warp - r.tokens, lane, Width);
        return;
    }
    for (uint64_t first = 0; first < r.choices; first += Batch) {
        float dot[LK_MOE_LOADS];

        moe_backward_lane(&launch, warp, first, lane, Width, LK_MOE_LOADS / Batch, Batch, dot);
        if (!grads.dweights)
            continue;
#pragma unroll
        for (unsigned k = 0; k < Batch; k++) {
            uint64_t slot = warp * r.choices + first + k;

#pragma unroll
            for (int half = 16; half; half /= 2)
                dot[k] += __shfl_xor_sync(~0U, dot[k], half);
            if (lane == k && first + k < r.choices)
                grads.dweights[slot] = r.row_of_slot[slot] < 0 ? 0 : dot[k];
        }
    }
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

/* A token's choices at a time: as many as there are, so that the other loads are of its other columns. */
using kernel = void (*)(lk_moe_launch);

const kernel unpermute_kernels[] = { moe_unpermute_kernel<LK_SINGLE, 8>,
                                     moe_unpermute_kernel<LK_WHOLE, 2>,
                                     moe_unpermute_kernel<LK_WHOLE, 4>,
                                     moe_unpermute_kernel<LK_WHOLE, 8> };
const kernel backward_kernels[] = { moe_backward_kernel<LK_SINGLE, 8>,
                                    moe_backward_kernel<LK_WHOLE, 2>,
                                    moe_backward_kernel<LK_WHOLE, 4>,
                                    moe_backward_kernel<LK_WHOLE, 8> };

/* Measured on one H200: streamed 8192 tokens of 2048 columns to 8 experts each take 84.6 us, else 124; 16384 of 4096 to 2
 * experts 105.9 us, else 121; zeros in the result alone take 81.5 us. */
kernel choose_permute(const lk_moe_launch *launch)
{
    constexpr uint64_t most = uint64_t{ 1 } << 31; /* columns that 32 bits count */

    if (!launch->wide)
        return moe_permute_kernel<LK_SINGLE, false>;
    if (launch->rows.weights || launch->rows.columns > most)
        return moe_permute_kernel<LK_WHOLE, false>;
    return moe_permute_kernel<LK_WHOLE, true>;
}

const void *choose(const kernel (&kernels)[4], const lk_moe_launch *launch)
{
    uint32_t choices = launch->routing.choices;

    return address(kernels[!launch->wide ? 0 : choices <= 2 ? 1 : choices <= 4 ? 2 : 3]);
}

int run_warps(const void *kernel, const lk_moe_launch *launch, uint64_t warps, void *stream)
{
    return warps ? run(kernel, launch, (warps + WARPS - 1) / WARPS, stream) : 0;
}

#ifdef LK_COMPUTE_VARIANTS
int combine_form = -1; /* -1: the product's; set between launches */

constexpr const char *COMBINE_NAMES[] = { "a warp a token", "a thread a group",
                                          "the same, plain reads", "the same, streamed writes",
                                          "plain reads, streamed writes" };
constexpr int COMBINE_FORMS = 5;

const kernel combine_forms[COMBINE_FORMS - 1][2] = {
    {moe_combine_flat<2,  true,  false>, moe_combine_flat<8, true,  false>},
    { moe_combine_flat<2, false, false>, moe_combine_flat<8, false, false>},
    { moe_combine_flat<2, true,  true>,  moe_combine_flat<8, true,  true> },
    { moe_combine_flat<2, false, true>,  moe_combine_flat<8, false, true> },
};

#endif

int run_flat(kernel function, const lk_moe_launch *launch, void *stream)
{
    uint64_t threads = launch->routing.tokens * (launch->rows.columns / LK_VECTOR);

    return threads ? run(address(function), launch, (threads + LK_BLOCK - 1) / LK_BLOCK, stream)
                   : 0;
}

/* Of eight choices at most. On one H200 16384 tokens of 4096 columns, two choices each, take 97.5 us, and 105 by a warp for each
 * token; 8192 of 2048 columns, eight choices, 72.1 and 79.8 us. Reads that leave L2 first take 104 and 76 where writes do not. */
kernel choose_flat(const lk_moe_launch *launch)
{
    uint32_t choices = launch->routing.choices;
    bool fits = launch->wide && launch->rows.columns < uint64_t{ 1 } << 31 &&
                launch->routing.tokens * (launch->rows.columns / LK_VECTOR) < uint64_t{ 1 } << 38;

#ifdef LK_COMPUTE_VARIANTS
    if (combine_form >= 0)
        return combine_form && fits && choices <= 8 ? combine_forms[combine_form - 1][choices > 2]
                                                    : nullptr;
#endif
    if (!fits || choices > 8)
        return nullptr;
    return choices <= 2 ? moe_combine_flat<2, false, true> : moe_combine_flat<8, false, true>;
}

} // namespace

extern "C" int lk_run_moe_route(const lk_moe_routing *routing, void *stream)
{
    uint32_t blocks = lk_moe_blocks(routing);
    int err = run(address(moe_count_kernel), routing, blocks, stream);

    return err ? err : run(address(moe_route_kernel), routing, blocks, stream);
}

extern "C" int lk_run_moe_permute(const lk_moe_launch *launch, void *stream)
{
    return run_warps(address(choose_permute(launch)), launch,
                     launch->routing.tokens + (launch->rows.fill ? launch->routing.rows : 0),
                     stream);
}

extern "C" int lk_run_moe_unpermute(const lk_moe_launch *launch, void *stream)
{
    kernel flat = choose_flat(launch);

    if (flat)
        return run_flat(flat, launch, stream);
    return run_warps(choose(unpermute_kernels, launch), launch, launch->routing.tokens, stream);
}

#ifdef LK_COMPUTE_VARIANTS
extern "C" LK_API const char *lk_variants_moe_combine(int form)
{
    combine_form = form >= 0 && form < COMBINE_FORMS ? form : -1;
    return combine_form >= 0 ? COMBINE_NAMES[form] : nullptr;
}
#endif

extern "C" int lk_run_moe_unpermute_backward(const lk_moe_launch *launch, void *stream)
{
    bool fill = launch->grads.fill && launch->grads.dpermuted;

    return run_warps(choose(backward_kernels, launch), launch,
                     launch->routing.tokens + (fill ? launch->routing.rows : 0), stream);
}

extern "C" int lk_load_moe(void)
{
    const void *kernels[] = { address(moe_count_kernel),
                              address(moe_route_kernel),
                              address(moe_permute_kernel<LK_SINGLE, false>),
                              address(moe_permute_kernel<LK_WHOLE, false>),
                              address(moe_permute_kernel<LK_WHOLE, true>),
                              address(moe_combine_flat<2, false, true>),
                              address(moe_combine_flat<8, false, true>) };
    int err = load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));

    for (size_t i = 0; !err && i < 4; i++) {
        const void *both[] = { address(unpermute_kernels[i]), address(backward_kernels[i]) };

        err = load_kernels(both, 2);
    }
    return err;
}
