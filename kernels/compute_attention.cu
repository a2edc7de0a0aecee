/* SPDX-License-Identifier: Apache-2.0
 *
 * Our own kernels of attention, for what cuDNN does not serve, and what surrounds cuDNN's.
 */
#include "kernels/compute_attention.h"
#include "kernels/compute_device.cuh"

namespace
{

constexpr uint64_t MAX_BLOCKS = 65536;

struct sides {
    float x[LK_ATTENTION_DEPTH], y[LK_ATTENTION_DEPTH]; /* the block's own row or rows */
    float first[LK_BLOCK], second[LK_BLOCK];            /* of the other side */
    float sums[LK_BLOCK];
};

__device__ float block_max(float *sums, float mine)
{
    sums[threadIdx.x] = mine;
    for (unsigned half = LK_BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] = fmaxf(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    __syncthreads();
    mine = sums[0];
    __syncthreads();
    return mine;
}

/* A row of the block into shared memory; a barrier has to follow. */
__device__ void fetch(const lk_attention &a, const uint16_t *row, uint64_t columns, float *out)
{
    for (uint64_t c = threadIdx.x; c < columns; c += LK_BLOCK)
        out[c] = attention_value(&a, row[c]);
}

/* sums[i] = fade * sums[i] + the products of weights with a column of rows from `row` on. */
__device__ void add_rows(const lk_attention &a, const uint16_t *row, uint64_t stride, uint64_t n,
                         uint64_t columns, const float *weights, float fade,
                         float sums[LK_ATTENTION_SIDES])
{
#pragma unroll
    for (uint64_t i = 0; i < LK_ATTENTION_SIDES; i++) {
        uint64_t column = threadIdx.x + i * LK_BLOCK;

        if (column >= columns)
            return;
        sums[i] *= fade;
        for (uint64_t j = 0; j < n; j++)
            sums[i] += weights[j] * attention_value(&a, row[j * stride + column]);
    }
}

__device__ void store_row(const lk_attention &a, uint16_t *row, uint64_t columns,
                          const float sums[LK_ATTENTION_SIDES])
{
#pragma unroll
    for (uint64_t i = 0; i < LK_ATTENTION_SIDES; i++)
        if (threadIdx.x + i * LK_BLOCK < columns)
            attention_store(&a, row + threadIdx.x + i * LK_BLOCK, sums[i]);
}

__device__ void make_output(const lk_attention_launch &launch, sides &shared, uint64_t index)
{
    const lk_attention &a = launch.attention;
    attention_row r = attention_query(&a, index);
    uint64_t kv_head = r.head / (a.heads / a.kv_heads), lse_at;
    attention_sums total = { -INFINITY, 0 };
    float sums[LK_ATTENTION_SIDES] = {};

    if (!r.there && a.query_offsets) {
        if (threadIdx.x == 0 && a.lse)
            a.lse[attention_lse_at(&a, r.sequence, r.head, r.row)] = INFINITY;
        return;
    }
    if (r.there)
        fetch(a, attention_at(&a, &a.q, r.sequence, r.query_first, r.head, r.row), a.depth,
              shared.x);
    __syncthreads();
    for (uint64_t j = 0; j < r.end; j += LK_BLOCK) {
        uint64_t n = r.end - j < LK_BLOCK ? r.end - j : LK_BLOCK;
        float score = -INFINITY, most, fade, power;

        if (threadIdx.x < n)
            score = multiply(a.scale, attention_dot(&a, shared.x,
                                                    attention_at(&a, &a.k, r.sequence, r.key_first,
                                                                 kv_head, j + threadIdx.x),
                                                    a.depth, launch.wide));
        most = fmaxf(total.most, block_max(shared.sums, score));
        fade = attention_fade(total.most, most);
        power = attention_power(score, most);
        shared.first[threadIdx.x] = power;
        total.sum = total.sum * fade + block_sum(shared.sums, power);
        total.most = most;
        add_rows(a, attention_at(&a, &a.v, r.sequence, r.key_first, kv_head, j), a.v.row_stride, n,
                 a.value_depth, shared.first, fade, sums);
        __syncthreads();
    }
#pragma unroll
    for (uint64_t i = 0; i < LK_ATTENTION_SIDES; i++)
        sums[i] = attention_mean(&r, total, sums[i]);
    store_row(a, attention_at(&a, &a.o, r.sequence, r.query_first, r.head, r.row), a.value_depth,
              sums);
    lse_at = attention_lse_at(&a, r.sequence, r.head, r.row);
    if (threadIdx.x == 0 && a.lse)
        a.lse[lse_at] = attention_lse(&r, total);
}

__global__ void __launch_bounds__(LK_BLOCK)
    forward_kernel(const __grid_constant__ lk_attention_launch launch)
{
    __shared__ sides shared;
    const lk_attention &a = launch.attention;
    uint64_t all = static_cast<uint64_t>(a.sequences) * a.heads * a.queries;

    for (uint64_t index = blockIdx.x; index < all; index += gridDim.x)
        make_output(launch, shared, index);
}

__device__ void make_dq(const lk_attention_launch &launch, sides &shared, uint64_t index)
{
    const lk_attention &a = launch.attention;
    const lk_attention_grads &g = launch.grads;
    attention_row r = attention_query(&a, index);
    uint64_t kv_head = r.head / (a.heads / a.kv_heads);
    uint64_t at = attention_lse_at(&a, r.sequence, r.head, r.row);
    float sums[LK_ATTENTION_SIDES] = {}, delta = 0;

    if (!r.there && a.query_offsets)
        return;
    if (r.there) {
        const uint16_t *o = attention_at(&a, &a.o, r.sequence, r.query_first, r.head, r.row);

        fetch(a, attention_at(&a, &a.q, r.sequence, r.query_first, r.head, r.row), a.depth,
              shared.x);
        fetch(a, attention_at(&a, &g.dout, r.sequence, r.query_first, r.head, r.row), a.value_depth,
              shared.y);
        for (uint64_t c = threadIdx.x; c < a.value_depth; c += LK_BLOCK)
            delta += shared.y[c] * attention_value(&a, o[c]); /* its own elements */
    }
    delta = block_sum(shared.sums, delta);
    if (threadIdx.x == 0)
        launch.delta[at] = delta;
    for (uint64_t j = 0; j < r.end; j += LK_BLOCK) {
        uint64_t n = r.end - j < LK_BLOCK ? r.end - j : LK_BLOCK;

        if (threadIdx.x < n) {
            uint64_t key = j + threadIdx.x;
            float s = attention_dot(&a, shared.x,
                                    attention_at(&a, &a.k, r.sequence, r.key_first, kv_head, key),
                                    a.depth, launch.wide);
            float dp = attention_dot(&a, shared.y,
                                     attention_at(&a, &a.v, r.sequence, r.key_first, kv_head, key),
                                     a.value_depth, launch.wide);

            shared.first[threadIdx.x] = attention_undo(&a, s, a.lse[at], dp, delta).ds;
        }
        __syncthreads();
        add_rows(a, attention_at(&a, &a.k, r.sequence, r.key_first, kv_head, j), a.k.row_stride, n,
                 a.depth, shared.first, 1, sums);
        __syncthreads();
    }
    store_row(a, attention_at(&a, &g.dq, r.sequence, r.query_first, r.head, r.row), a.depth, sums);
}

__global__ void __launch_bounds__(LK_BLOCK)
    dq_kernel(const __grid_constant__ lk_attention_launch launch)
{
    __shared__ sides shared;
    const lk_attention &a = launch.attention;
    uint64_t all = static_cast<uint64_t>(a.sequences) * a.heads * a.queries;

    for (uint64_t index = blockIdx.x; index < all; index += gridDim.x)
        make_dq(launch, shared, index);
}

/* What the queries of one head add to a key's row. */
__device__ void add_queries(const lk_attention_launch &launch, sides &shared,
                            const attention_row &r, uint64_t head, float dk[LK_ATTENTION_SIDES],
                            float dv[LK_ATTENTION_SIDES])
{
    const lk_attention &a = launch.attention;
    const lk_attention_grads &g = launch.grads;

    for (uint64_t i = r.begin; i < r.end; i += LK_BLOCK) {
        uint64_t n = r.end - i < LK_BLOCK ? r.end - i : LK_BLOCK;
        const uint16_t *q = attention_at(&a, &a.q, r.sequence, r.query_first, head, i);
        const uint16_t *dout = attention_at(&a, &g.dout, r.sequence, r.query_first, head, i);

        if (threadIdx.x < n) {
            uint64_t at = attention_lse_at(&a, r.sequence, head, i + threadIdx.x);
            float s = attention_dot(&a, shared.x, q + threadIdx.x * a.q.row_stride, a.depth,
                                    launch.wide);
            float dp = attention_dot(&a, shared.y, dout + threadIdx.x * g.dout.row_stride,
                                     a.value_depth, 0);
            attention_pair pair = attention_undo(&a, s, a.lse[at], dp, launch.delta[at]);

            shared.first[threadIdx.x] = pair.p;
            shared.second[threadIdx.x] = pair.ds;
        }
        __syncthreads();
        add_rows(a, dout, g.dout.row_stride, n, a.value_depth, shared.first, 1, dv);
        add_rows(a, q, a.q.row_stride, n, a.depth, shared.second, 1, dk);
        __syncthreads();
    }
}

__global__ void __launch_bounds__(LK_BLOCK)
    dkv_kernel(const __grid_constant__ lk_attention_launch launch)
{
    __shared__ sides shared;
    const lk_attention &a = launch.attention;
    const lk_attention_grads &g = launch.grads;
    uint64_t all = static_cast<uint64_t>(a.sequences) * a.kv_heads * a.keys;
    uint64_t group = a.heads / a.kv_heads;

    for (uint64_t index = blockIdx.x; index < all; index += gridDim.x) {
        attention_row r = attention_key(&a, index);
        float dk[LK_ATTENTION_SIDES] = {}, dv[LK_ATTENTION_SIDES] = {};

        if (!r.there && a.query_offsets)
            continue;
        if (r.there) {
            fetch(a, attention_at(&a, &a.k, r.sequence, r.key_first, r.head, r.row), a.depth,
                  shared.x);
            fetch(a, attention_at(&a, &a.v, r.sequence, r.key_first, r.head, r.row), a.value_depth,
                  shared.y);
        }
        __syncthreads();
        for (uint64_t h = 0; h < group; h++)
            add_queries(launch, shared, r, r.head * group + h, dk, dv);
        store_row(a, attention_at(&a, &g.dk, r.sequence, r.key_first, r.head, r.row), a.depth, dk);
        store_row(a, attention_at(&a, &g.dv, r.sequence, r.key_first, r.head, r.row), a.value_depth,
                  dv);
        __syncthreads();
    }
}

/* ---- around cuDNN ---- */

__global__ void prepare_kernel(const __grid_constant__ lk_attention_layout layout)
{
    const lk_attention &a = layout.attention;

    for (uint64_t i = threadIdx.x; i <= a.sequences; i += LK_BLOCK)
        attention_prepare(&layout, i);
}

__global__ void clear_kernel(const __grid_constant__ lk_attention_layout layout, int backward)
{
    const lk_attention &a = layout.attention;
    uint64_t queries = static_cast<uint64_t>(a.sequences) * a.heads * a.queries;
    uint64_t keys = static_cast<uint64_t>(a.sequences) * a.kv_heads * a.keys;
    uint64_t warp = (blockIdx.x * LK_BLOCK + threadIdx.x) / 32, warps = gridDim.x * LK_BLOCK / 32;
    uint64_t lane = threadIdx.x % 32;

    for (uint64_t i = warp; i < queries; i += warps)
        attention_clear_query(&layout, backward, i, lane);
    for (uint64_t i = warp; backward && i < keys; i += warps)
        attention_clear_key(&layout, i, lane);
}

template <class T> int launch_rows(const void *kernel, const T *launch, uint64_t rows, void *stream)
{
    void *args[] = { const_cast<T *>(launch) };

    if (!rows)
        return 0;
    return cudaLaunchKernel(kernel,
                            dim3(static_cast<unsigned>(rows < MAX_BLOCKS ? rows : MAX_BLOCKS)),
                            dim3(LK_BLOCK), args, 0, static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_attention_forward(const lk_attention_launch *launch, void *stream)
{
    const lk_attention &a = launch->attention;

    return launch_rows(reinterpret_cast<const void *>(forward_kernel), launch,
                       static_cast<uint64_t>(a.sequences) * a.heads * a.queries, stream);
}

extern "C" int lk_run_attention_backward(const lk_attention_launch *launch, void *stream)
{
    const lk_attention &a = launch->attention;
    int err = launch_rows(reinterpret_cast<const void *>(dq_kernel), launch,
                          static_cast<uint64_t>(a.sequences) * a.heads * a.queries, stream);

    if (err)
        return err;
    return launch_rows(reinterpret_cast<const void *>(dkv_kernel), launch,
                       static_cast<uint64_t>(a.sequences) * a.kv_heads * a.keys, stream);
}

extern "C" int lk_run_attention_prepare(const lk_attention_layout *layout, void *stream)
{
    return launch_rows(reinterpret_cast<const void *>(prepare_kernel), layout, 1, stream);
}

extern "C" int lk_run_attention_clear(const lk_attention_layout *layout, int backward, void *stream)
{
    const lk_attention &a = layout->attention;
    uint64_t rows = static_cast<uint64_t>(a.sequences) * a.heads *
                    (a.queries > a.keys ? a.queries : a.keys);
    uint64_t blocks = (rows + 7) / 8;
    void *args[] = { const_cast<lk_attention_layout *>(layout), &backward };

    return cudaLaunchKernel(reinterpret_cast<const void *>(clear_kernel),
                            dim3(static_cast<unsigned>(blocks < 1056 ? blocks : 1056)),
                            dim3(LK_BLOCK), args, 0, static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_attention(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(forward_kernel),
                              reinterpret_cast<const void *>(dq_kernel),
                              reinterpret_cast<const void *>(dkv_kernel),
                              reinterpret_cast<const void *>(prepare_kernel),
                              reinterpret_cast<const void *>(clear_kernel) };

    return load_kernels(kernels, 5);
}
