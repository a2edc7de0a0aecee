/* SPDX-License-Identifier: Apache-2.0
 *
 * Forms of the kernels that copy rows of tokens to experts and add them up again. MOE_PERMUTE_FORM and MOE_COMBINE_FORM
 * choose; the others are made with LK_COMPUTE_VARIANTS alone, to be measured.
 */
#ifndef LK_COMPUTE_MOE_FORMS_CUH
#define LK_COMPUTE_MOE_FORMS_CUH

#include "kernels/compute_device.cuh"
#include "kernels/compute_moe.h"
#include "kernels/cuda_rings_ops.cuh"

#include <cuda_pipeline_primitives.h>

constexpr uint32_t MOE_WARPS = LK_BLOCK / 32;

/* The permute's forms but the first take calls without weights whose groups are whole. */
enum moe_permute_form {
    MOE_PLAIN,    /* a warp for each token */
    MOE_STREAMED, /* and stores that are evicted first */
    MOE_THROUGH,  /* and stores that are written through */
    MOE_BY_ROWS,  /* a warp for each row of the result, which finds its token */
    MOE_IN_BULK,  /* rows come into shared memory and are sent from there to all of their places */
    MOE_PERMUTE_FORMS
};

constexpr const char *MOE_PERMUTE_NAMES[] = { "product", "stores evicted first", "stores through",
                                              "by rows", "in bulk" };
constexpr moe_permute_form MOE_PERMUTE_FORM = MOE_PLAIN; /* the product's */

enum moe_combine_form {
    MOE_WHOLE_TOKEN, /* a warp for each token */
    MOE_PIECES,      /* a warp for as much of a token as it has in flight at once */
    MOE_COMBINE_FORMS
};

constexpr const char *MOE_COMBINE_NAMES[] = { "product", "pieces" };
constexpr moe_combine_form MOE_COMBINE_FORM = MOE_WHOLE_TOKEN;

/* ---- to experts ---- */

template <moe_permute_form Form>
__device__ __forceinline__ void form_store(uint16_t *to, lk_wide16 x)
{
    if constexpr (Form == MOE_STREAMED)
        __stcs(reinterpret_cast<uint4 *>(to), x);
    else if constexpr (Form == MOE_THROUGH)
        __stwt(reinterpret_cast<uint4 *>(to), x);
    else
        *reinterpret_cast<uint4 *>(to) = x;
}

/* As moe_scatter_lane(). */
template <moe_permute_form Form>
__device__ __forceinline__ void form_scatter(const lk_moe_launch &launch, uint64_t token,
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
                    form_store<Form>(to + moe_at(at, g), x[g]);
        }
    }
}

/* Row by row: a token's row is read again for each of its choices, from L2 if they are not far apart. */
__device__ __forceinline__ void form_gather(const lk_moe_launch &launch, uint64_t row,
                                            uint32_t lane)
{
    const lk_moe_rows &rows = launch.rows;
    int32_t slot = launch.routing.slot_of_row[row];
    uint16_t *to = static_cast<uint16_t *>(rows.permuted) + row * rows.permuted_stride;
    uint32_t columns = static_cast<uint32_t>(rows.columns);

    if (slot < 0 && !rows.fill)
        return;
    const uint16_t *from = static_cast<const uint16_t *>(rows.tokens) +
                           (slot < 0 ? 0 : static_cast<uint32_t>(slot) / launch.routing.choices) *
                               rows.token_stride;

    for (uint32_t at = LK_VECTOR * lane; at < columns; at += moe_step(8)) {
        lk_wide16 x[8];

#pragma unroll
        for (uint32_t g = 0; g < 8; g++) {
            x[g] = lk_wide16{};
            if (slot >= 0 && moe_at(at, g) < columns)
                x[g] = *reinterpret_cast<const lk_wide16 *>(from + moe_at(at, g));
        }
#pragma unroll
        for (uint32_t g = 0; g < 8; g++)
            if (moe_at(at, g) < columns)
                __stcs(reinterpret_cast<uint4 *>(to + moe_at(at, g)), x[g]);
    }
}

template <moe_permute_form Form>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    moe_permute_form_kernel(const __grid_constant__ lk_moe_launch launch)
{
    uint64_t warp = uint64_t{ blockIdx.x } * MOE_WARPS + threadIdx.x / 32;
    uint64_t tokens = launch.routing.tokens;
    const lk_moe_rows &rows = launch.rows;

    if constexpr (Form == MOE_BY_ROWS) {
        if (warp < launch.routing.rows)
            form_gather(launch, warp, threadIdx.x % 32);
    } else if (warp < tokens) {
        form_scatter<Form>(launch, warp, threadIdx.x % 32);
    } else if (rows.fill && warp - tokens < launch.routing.rows) {
        moe_fill_lane(&launch.routing, rows.permuted, rows.permuted_stride, rows.columns,
                      warp - tokens, threadIdx.x % 32, LK_WHOLE);
    }
}

/* Warps that stay go from token to token. Each has three rows of shared memory: one comes, one is sent. */
constexpr uint32_t MOE_BULK_ROWS = 3;
constexpr uint32_t MOE_BULK_COLUMNS = 4096;    /* the most */
constexpr size_t MOE_BULK_DEVICE = 200 * 1024; /* a device that has bulk copies has so much */

__device__ __forceinline__ void bulk_fetch(const lk_moe_launch &launch, uint64_t token,
                                           uint32_t lane, uint16_t *to)
{
    const uint16_t *from = static_cast<const uint16_t *>(launch.rows.tokens) +
                           token * launch.rows.token_stride;

    if (token < launch.routing.tokens)
        for (uint32_t at = LK_VECTOR * lane; at < launch.rows.columns; at += LK_VECTOR * 32)
            __pipeline_memcpy_async(to + at, from + at, 16);
    __pipeline_commit();
}

/* A group without a copy. */
__device__ __forceinline__ void bulk_store_nothing()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/* Where a lane's choice of a token goes; -1: nowhere. */
__device__ __forceinline__ int32_t bulk_row(const lk_moe_launch &launch, uint64_t token,
                                            uint32_t lane)
{
    return token < launch.routing.tokens && lane < launch.routing.choices
               ? launch.routing.row_of_slot[token * launch.routing.choices + lane]
               : -1;
}

__global__ void __launch_bounds__(LK_BLOCK)
    moe_permute_bulk_kernel(const __grid_constant__ lk_moe_launch launch)
{
    extern __shared__ __align__(128) uint16_t moe_buffers[];
    uint32_t lane = threadIdx.x % 32, columns = static_cast<uint32_t>(launch.rows.columns);
    uint64_t warps = uint64_t{ gridDim.x } * MOE_WARPS, buffer = 0;
    uint64_t token = uint64_t{ blockIdx.x } * MOE_WARPS + threadIdx.x / 32, first = token;
    uint16_t *mine = moe_buffers + threadIdx.x / 32 * MOE_BULK_ROWS * columns;
    int32_t row = bulk_row(launch, token, lane), next;

    bulk_fetch(launch, token, lane, mine);
    for (; token < launch.routing.tokens; token += warps) {
        uint16_t *here = mine + buffer * columns;

        buffer = buffer + 1 < MOE_BULK_ROWS ? buffer + 1 : 0;
        bulk_wait_read<1>(); /* of the row that was there three tokens ago */
        __syncwarp();
        bulk_fetch(launch, token + warps, lane, mine + buffer * columns);
        next = bulk_row(launch, token + warps, lane);
        __pipeline_wait_prior(1);
        fence_bulk();
        __syncwarp();
        if (row >= 0)
            bulk_store(reinterpret_cast<uint64_t>(static_cast<uint16_t *>(launch.rows.permuted) +
                                                  static_cast<uint64_t>(row) *
                                                      launch.rows.permuted_stride),
                       here, columns * 2);
        else
            bulk_store_nothing(); /* groups are counted */
        row = next;
    }
    if (launch.rows.fill)
        for (uint64_t i = first; i < launch.routing.rows; i += warps)
            moe_fill_lane(&launch.routing, launch.rows.permuted, launch.rows.permuted_stride,
                          launch.rows.columns, i, lane, LK_WHOLE);
    bulk_wait();
}

/* ---- and back ---- */

template <unsigned Batch>
__global__ void __launch_bounds__(LK_BLOCK, Batch == 2 ? 2 : 3)
    moe_unpermute_pieces_kernel(const __grid_constant__ lk_moe_launch launch)
{
    constexpr uint64_t groups = LK_MOE_LOADS / Batch;
    uint64_t warp = uint64_t{ blockIdx.x } * MOE_WARPS + threadIdx.x / 32;
    uint64_t pieces = (launch.rows.columns + moe_step(groups) - 1) / moe_step(groups);
    uint64_t token = warp / pieces, begin = warp % pieces * moe_step(groups);
    lk_moe_launch own = launch;

    if (token >= launch.routing.tokens)
        return;
    own.rows.tokens = static_cast<uint16_t *>(launch.rows.tokens) + begin;
    own.rows.permuted = static_cast<uint16_t *>(launch.rows.permuted) + begin;
    own.rows.columns = launch.rows.columns - begin < moe_step(groups) ? launch.rows.columns - begin
                                                                      : moe_step(groups);
    moe_combine_lane(&own, token, threadIdx.x % 32, LK_WHOLE, groups, Batch);
}

/* ---- which ---- */

struct moe_kernel {
    void (*function)(lk_moe_launch);
    uint64_t warps;
    size_t shared;
};

/* By the form, if it serves the call. */
template <moe_permute_form Form>
moe_kernel choose_permute(const lk_moe_launch *launch, const moe_kernel &product)
{
    uint64_t rows = launch->routing.rows, columns = launch->rows.columns;
    size_t shared = MOE_WARPS * MOE_BULK_ROWS * columns * 2;

    if (Form == MOE_PLAIN || !launch->wide || launch->rows.weights || launch->routing.choices > 32)
        return product;
    if constexpr (Form == MOE_IN_BULK) {
        uint64_t blocks = shared <= 25 * 1024 ? 8 : 200 * 1024 / shared;

        if (columns > MOE_BULK_COLUMNS || !device_has(MOE_BULK_DEVICE))
            return product;
        blocks *= 132;
        return { moe_permute_bulk_kernel,
                 product.warps < blocks * MOE_WARPS ? product.warps : blocks * MOE_WARPS, shared };
    } else if constexpr (Form != MOE_PLAIN) {
        return { moe_permute_form_kernel<Form>, Form == MOE_BY_ROWS ? rows : product.warps, 0 };
    }
    return product;
}

template <moe_combine_form Form>
moe_kernel choose_combine(const lk_moe_launch *launch, const moe_kernel &product)
{
    if constexpr (Form == MOE_PIECES) {
        uint32_t choices = launch->routing.choices;
        uint64_t batch = choices <= 2 ? 2 : choices <= 4 ? 4 : 8;
        uint64_t step = moe_step(LK_MOE_LOADS / batch);
        uint64_t pieces = (launch->rows.columns + step - 1) / step;

        if (launch->wide)
            return { batch == 2   ? moe_unpermute_pieces_kernel<2>
                     : batch == 4 ? moe_unpermute_pieces_kernel<4>
                                  : moe_unpermute_pieces_kernel<8>,
                     launch->routing.tokens * pieces, 0 };
    }
    return product;
}

#endif
