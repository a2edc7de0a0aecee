/* SPDX-License-Identifier: Apache-2.0
 *
 * Norms of rows that are aligned and no longer than NORM_ROWS_MOST: they are read once and stay in registers. A team of
 * Lanes threads, a warp or a block, has Rows rows at a time, of each of which a lane holds Groups groups of eight columns.
 * Rows * Groups is 4: that many loads of 16 bytes of each matrix are in flight per thread.
 */
#ifndef LK_COMPUTE_NORM_ROWS_CUH
#define LK_COMPUTE_NORM_ROWS_CUH

#include "kernels/compute_device.cuh"
#include "kernels/compute_norm.h"

constexpr uint64_t NORM_ROWS_MOST = 512 * 4 * 8;

template <unsigned Lanes> struct norm_team {
    static constexpr unsigned threads = Lanes == 32 ? LK_BLOCK : Lanes;
    static constexpr unsigned count = threads / Lanes;
    static constexpr unsigned warps = Lanes / 32;
};

/* Sums over the team of N values of each thread, in an order that is the same everywhere. parts is used again two sums
 * later at the earliest, when the barrier of the one between has shown that everybody has read it. */
template <unsigned Lanes, unsigned N>
__device__ __forceinline__ void team_sum(float (&parts)[N][norm_team<Lanes>::warps],
                                         float (&values)[N])
{
#pragma unroll
    for (unsigned i = 0; i < N; i++)
#pragma unroll
        for (unsigned half = 16; half; half /= 2)
            values[i] += __shfl_xor_sync(~0U, values[i], half);
    if (Lanes == 32)
        return;
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            parts[i][threadIdx.x / 32] = values[i];
    __syncthreads();
#pragma unroll
    for (unsigned i = 0; i < N; i++) {
        values[i] = 0;
#pragma unroll
        for (unsigned w = 0; w < norm_team<Lanes>::warps; w += 4) {
            float4 four = *reinterpret_cast<const float4 *>(
                &parts[i][w % norm_team<Lanes>::warps]); /* the remainder: for one warp's sake */

            values[i] += (four.x + four.y) + (four.z + four.w);
        }
    }
}

/* What is read once. Groups that are not there are zeros. */
template <unsigned Lanes, unsigned Groups>
__device__ __forceinline__ void load_row(const uint16_t *row, uint64_t columns, bool there,
                                         unsigned lane, lk_wide16 (&out)[Groups])
{
#pragma unroll
    for (unsigned v = 0; v < Groups; v++) {
        uint64_t at = uint64_t{ 8 } * (lane + v * Lanes);

        out[v] = lk_wide16{};
        if (there && at < columns)
            out[v] = load_group(row, at, columns, LK_WHOLE);
    }
}

/* ---- forward ---- */

/* x, or what it makes with the residual. */
template <unsigned Lanes, unsigned Groups, unsigned Rows>
__device__ __forceinline__ void load_sums(const lk_norm_launch &launch, uint64_t first,
                                          unsigned lane, lk_wide16 (&s)[Rows][Groups])
{
    uint64_t columns = launch.norm.columns;
    lk_wide16 other[Rows][Groups];

#pragma unroll
    for (unsigned r = 0; r < Rows; r++)
        load_row<Lanes>(norm_find_row(&launch, first + r).x, columns, first + r < launch.norm.rows,
                        lane, s[r]);
    if (!launch.forward.residual)
        return;
#pragma unroll
    for (unsigned r = 0; r < Rows; r++)
        load_row<Lanes>(norm_find_row(&launch, first + r).residual, columns,
                        first + r < launch.norm.rows, lane, other[r]);
#pragma unroll
    for (unsigned r = 0; r < Rows; r++)
#pragma unroll
        for (unsigned v = 0; v < Groups; v++) {
            float a[8], b[8];

            unpack_group(s[r][v], a);
            unpack_group(other[r][v], b);
#pragma unroll
            for (int i = 0; i < 8; i++)
                a[i] += b[i];
            s[r][v] = pack_group(a);
        }
}

/* A power of two by which as many elements as a row has may be scaled and added up: it costs no bit, equal elements have
 * the exact sum, and large ones none that is infinite. */
__device__ __forceinline__ float mean_scale(uint64_t columns)
{
    return bits_float((127U - (32U - __clz(static_cast<int>(columns) - 1))) << 23);
}

/* A lane's part of a row's sum, scaled. Groups that are not there are zeros. */
template <unsigned Lanes, unsigned Groups>
__device__ __forceinline__ float row_sum(const lk_wide16 (&s)[Groups], float scale)
{
    float total[2] = { 0, 0 };

#pragma unroll
    for (unsigned v = 0; v < Groups; v++) {
        float x[8];

        unpack_group(s[v], x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            total[i % 2] = fmaf(x[i], scale, total[i % 2]);
    }
    return total[0] + total[1];
}

/* A lane's part of a row's sum of squares, around the mean if it has one. */
template <unsigned Lanes, unsigned Groups, bool Layer>
__device__ __forceinline__ float row_squares(const lk_wide16 (&s)[Groups], uint64_t columns,
                                             unsigned lane, float mean)
{
    float total[2] = { 0, 0 };

#pragma unroll
    for (unsigned v = 0; v < Groups; v++) {
        float x[8];

        unpack_group(s[v], x);
        if (!Layer || 8 * (lane + v * Lanes) < columns)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float away = Layer ? x[i] - mean : x[i];

                total[i % 2] = fmaf(away, away, total[i % 2]);
            }
    }
    return total[0] + total[1];
}

template <unsigned Lanes, bool Layer, unsigned Groups, unsigned Rows>
__device__ __forceinline__ void apply_rows(const lk_norm_launch &launch, uint64_t first,
                                           unsigned lane, const lk_wide16 (&s)[Rows][Groups],
                                           const float (&mean)[Rows], const float (&rstd)[Rows])
{
    const lk_norm &norm = launch.norm;

#pragma unroll
    for (unsigned v = 0; v < Groups; v++) {
        uint64_t at = uint64_t{ 8 } * (lane + v * Lanes);
        float gamma[8], beta[8], x[8];

        if (at >= norm.columns)
            continue;
        norm_weights(&norm, norm.gamma, at, LK_WHOLE, 1, norm.gamma_offset, gamma);
        norm_weights(&norm, norm.beta, at, LK_WHOLE, 0, 0, beta);
#pragma unroll
        for (unsigned r = 0; r < Rows; r++) {
            if (first + r >= norm.rows)
                continue;
            unpack_group(s[r][v], x);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float away = Layer ? x[i] - mean[r] : x[i];

                x[i] = fmaf(away * rstd[r], gamma[i], beta[i]);
            }
            store_group(norm_find_row(&launch, first + r).y, at, norm.columns, LK_WHOLE,
                        pack_group(x));
        }
    }
}

/* Has the weights on their way into the cache while the row comes and is added up. */
template <unsigned Lanes, unsigned Groups>
__device__ __forceinline__ void touch_weights(const lk_norm &norm, const void *weights,
                                              unsigned lane)
{
    unsigned bytes = norm.weight_type == LK_BF16 ? 2 : 4;

    if (!weights)
        return;
#pragma unroll
    for (unsigned v = 0; v < Groups; v++) {
        uint64_t at = uint64_t{ 8 } * (lane + v * Lanes);
        uint32_t word;

        if (at < norm.columns)
            asm volatile("ld.global.b32 %0, [%1];"
                         : "=r"(word)
                         : "l"(static_cast<const char *>(weights) + at * bytes));
    }
}

/* Rows * Groups is Hold; so many blocks find room on a multiprocessor. */
template <unsigned Lanes, unsigned Groups, bool Layer, unsigned Hold = 4,
          unsigned Blocks = 1024 / norm_team<Lanes>::threads, bool Early = false>
__global__ void __launch_bounds__(norm_team<Lanes>::threads, Blocks)
    norm_forward_rows(const __grid_constant__ lk_norm_launch launch)
{
    constexpr unsigned Rows = Hold / Groups;
    __shared__ __align__(16) float parts[2][Rows][norm_team<Lanes>::warps];
    unsigned lane = threadIdx.x % Lanes;
    uint64_t team = uint64_t{ blockIdx.x } * norm_team<Lanes>::count + threadIdx.x / Lanes;
    uint64_t first = group_from_the_end(team, Rows, launch.norm.rows);
    uint64_t columns = launch.norm.columns;
    float total[Rows], mean[Rows];
    lk_wide16 s[Rows][Groups];

    wait_for_the_last();
    if (first >= launch.norm.rows)
        return; /* a warp whose block has rows; a block always has some */
    load_sums<Lanes>(launch, first, lane, s);
    if (Early && launch.forward.y) {
        touch_weights<Lanes, Groups>(launch.norm, launch.norm.gamma, lane);
        touch_weights<Lanes, Groups>(launch.norm, launch.norm.beta, lane);
    }
    if (Layer) {
#pragma unroll
        for (unsigned r = 0; r < Rows; r++)
            total[r] = row_sum<Lanes>(s[r], mean_scale(columns));
        team_sum<Lanes>(parts[0], total);
    }
#pragma unroll
    for (unsigned r = 0; r < Rows; r++) {
        mean[r] = Layer ? total[r] / (static_cast<float>(columns) * mean_scale(columns)) : 0;
        total[r] = row_squares<Lanes, Groups, Layer>(s[r], columns, lane, mean[r]);
    }
    team_sum<Lanes>(parts[1], total);
#pragma unroll
    for (unsigned r = 0; r < Rows; r++) {
        total[r] = norm_rstd(&launch.norm, total[r]);
        if (first + r >= launch.norm.rows)
            continue;
        if (lane == 0) {
            launch.norm.rstd[first + r] = total[r];
            if (Layer)
                launch.norm.mean[first + r] = mean[r];
        }
        if (launch.forward.sum)
#pragma unroll
            for (unsigned v = 0; v < Groups; v++)
                if (8 * (lane + v * Lanes) < columns)
                    store_group(norm_find_row(&launch, first + r).sum, 8 * (lane + v * Lanes),
                                columns, LK_WHOLE, s[r][v]);
    }
    if (launch.forward.y)
        apply_rows<Lanes, Layer>(launch, first, lane, s, mean, total);
}

/* ---- backward ---- */

/* What a lane adds up over its team's rows. */
template <unsigned Groups, bool Beta> struct norm_columns_sums {
    float gamma[Groups][8];
    float beta[Beta ? Groups : 1][8];
};

template <unsigned Groups, bool Beta>
__device__ __forceinline__ void add_products(norm_columns_sums<Groups, Beta> &columns, unsigned v,
                                             const float (&dy)[8], const float (&hat)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        columns.gamma[v][i] = fmaf(dy[i], hat[i], columns.gamma[v][i]);
        if (Beta)
            columns.beta[v][i] += dy[i];
    }
}

__device__ __forceinline__ void normalised(const lk_wide16 &s, const norm_back_row &row,
                                           float (&hat)[8])
{
    unpack_group(s, hat);
#pragma unroll
    for (int i = 0; i < 8; i++)
        hat[i] = (hat[i] - row.mean) * row.rstd;
}

/* Rows of one round. */
template <unsigned Groups> struct norm_held {
    lk_wide16 s[4 / Groups][Groups], dy[4 / Groups][Groups];
    norm_back_row row[4 / Groups];
    bool there[4 / Groups];
};

template <unsigned Lanes, unsigned Groups>
__device__ __forceinline__ void hold_rows(const lk_norm_launch &launch, uint64_t first,
                                          unsigned lane, norm_held<Groups> &held)
{
#pragma unroll
    for (unsigned r = 0; r < 4 / Groups; r++) {
        held.there[r] = first + r < launch.norm.rows;
        held.row[r] = norm_find_back(&launch, held.there[r] ? first + r : first);
        load_row<Lanes>(held.row[r].s, launch.norm.columns, held.there[r], lane, held.s[r]);
        load_row<Lanes>(held.row[r].dy, launch.norm.columns, held.there[r], lane, held.dy[r]);
    }
}

/* Sums of the rows, two for each, and what goes to the sums of columns. */
template <unsigned Lanes, unsigned Groups, bool Beta>
__device__ __forceinline__ void sum_rows(const lk_norm_launch &launch, unsigned lane,
                                         const norm_held<Groups> &held,
                                         norm_columns_sums<Groups, Beta> &columns,
                                         float (&sums)[8 / Groups])
{
    const lk_norm &norm = launch.norm;

#pragma unroll
    for (unsigned i = 0; i < 8 / Groups; i++)
        sums[i] = 0;
#pragma unroll
    for (unsigned v = 0; v < Groups; v++) {
        uint64_t at = uint64_t{ 8 } * (lane + v * Lanes);
        float gamma[8], hat[8], dy[8];

        if (at >= norm.columns)
            continue;
        norm_weights(&norm, norm.gamma, at, LK_WHOLE, 1, norm.gamma_offset, gamma);
#pragma unroll
        for (unsigned r = 0; r < 4 / Groups; r++) {
            if (!held.there[r])
                continue;
            normalised(held.s[r][v], held.row[r], hat);
            unpack_group(held.dy[r][v], dy);
            add_products(columns, v, dy, hat);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float d = dy[i] * gamma[i];

                sums[2 * r] += d;
                sums[2 * r + 1] = fmaf(d, hat[i], sums[2 * r + 1]);
            }
        }
    }
}

template <unsigned Lanes, unsigned Groups>
__device__ __forceinline__ void write_rows(const lk_norm_launch &launch, unsigned lane,
                                           const norm_held<Groups> &held,
                                           const float (&sums)[8 / Groups])
{
    const lk_norm &norm = launch.norm;

#pragma unroll
    for (unsigned v = 0; v < Groups; v++) {
        uint64_t at = uint64_t{ 8 } * (lane + v * Lanes);
        float gamma[8], hat[8], dy[8], ds[8];

        if (at >= norm.columns)
            continue;
        norm_weights(&norm, norm.gamma, at, LK_WHOLE, 1, norm.gamma_offset, gamma);
#pragma unroll
        for (unsigned r = 0; r < 4 / Groups; r++) {
            const norm_back_row &row = held.row[r];
            norm_sums means = norm_means(&norm, { sums[2 * r], sums[2 * r + 1] });

            if (!held.there[r])
                continue;
            for (int i = 0; i < 8; i++)
                ds[i] = 0;
            if (row.ds)
                load8_bf16(row.ds + at, ds);
            normalised(held.s[r][v], row, hat);
            unpack_group(held.dy[r][v], dy);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float inner = fmaf(-hat[i], means.product, dy[i] * gamma[i] - means.plain);

                dy[i] = fmaf(row.rstd, inner, ds[i]);
            }
            store_group(row.dx, at, norm.columns, LK_WHOLE, pack_group(dy));
        }
    }
}

/* A block's row of partial sums: the block's teams one after another. `all` holds the sums of a lane as two quarters of
 * shared memory's width, so that neighbours touch neighbours; norm_slot() is the same order. */
template <unsigned Lanes, unsigned Groups>
__device__ __forceinline__ void write_columns(float4 *all, float *out, uint64_t groups,
                                              const float (&mine)[Groups][8])
{
    constexpr unsigned HALF = Lanes * Groups;
    unsigned lane = threadIdx.x % Lanes, team = threadIdx.x / Lanes;

#pragma unroll
    for (unsigned v = 0; v < Groups; v++)
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            float4 four = make_float4(mine[v][4 * half], mine[v][4 * half + 1],
                                      mine[v][4 * half + 2], mine[v][4 * half + 3]);
            unsigned group = lane + v * Lanes;

            if (Lanes == 32)
                all[2 * HALF * team + half * HALF + group] = four;
            else if (group < groups)
                reinterpret_cast<float4 *>(out)[half * groups + group] = four;
        }
    if (Lanes != 32)
        return;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 2 * HALF; i += LK_BLOCK) {
        float4 sum = all[i];

        for (unsigned t = 1; t < norm_team<Lanes>::count; t++) {
            float4 other = all[2 * HALF * t + i];

            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
        }
        if (i % HALF < groups)
            reinterpret_cast<float4 *>(out)[i / HALF * groups + i % HALF] = sum;
    }
    __syncthreads();
}

template <unsigned Lanes, unsigned Groups, bool Beta>
__global__ void __launch_bounds__(norm_team<Lanes>::threads, 512 / norm_team<Lanes>::threads)
    norm_backward_rows(const __grid_constant__ lk_norm_launch launch)
{
    constexpr unsigned Rows = 4 / Groups;
    __shared__ __align__(16) float parts[2][2 * Rows][norm_team<Lanes>::warps];
    __shared__ float4 all[Lanes == 32 ? 2 * LK_BLOCK * Groups : 1];
    unsigned lane = threadIdx.x % Lanes, phase = 0;
    uint64_t team = uint64_t{ blockIdx.x } * norm_team<Lanes>::count + threadIdx.x / Lanes;
    uint64_t step = -uint64_t{ gridDim.x } * norm_team<Lanes>::count * Rows;
    uint64_t groups = launch.norm.columns / 8;
    norm_columns_sums<Groups, Beta> columns = {};

    wait_for_the_last();
    let_the_next_begin();
    for (uint64_t first = group_from_the_end(team, Rows, launch.norm.rows);
         first < launch.norm.rows; first += step) {
        norm_held<Groups> held;
        float sums[2 * Rows];

        hold_rows<Lanes>(launch, first, lane, held);
        sum_rows<Lanes>(launch, lane, held, columns, sums);
        team_sum<Lanes>(parts[phase], sums);
        phase ^= 1;
        write_rows<Lanes>(launch, lane, held, sums);
    }
    if (!launch.partials)
        return;
    float *out = static_cast<float *>(launch.backward.workspace) + blockIdx.x * 16 * groups;

    if (launch.backward.dgamma)
        write_columns<Lanes>(all, out, groups, columns.gamma);
    if constexpr (Beta)
        write_columns<Lanes, Groups>(all, out + 8 * groups, groups, columns.beta);
}

#endif
