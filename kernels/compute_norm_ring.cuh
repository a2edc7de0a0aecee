/* SPDX-License-Identifier: Apache-2.0
 *
 * Norms of aligned rows by blocks that stay: each of a block's teams of Lanes threads goes from row to row, and its next
 * rows are on their way into shared memory (cp.async) while it works on one. A thread copies what it reads itself, so
 * that nobody waits for another one's copies; memory is a ring of Stages.
 */
#ifndef LK_COMPUTE_NORM_RING_CUH
#define LK_COMPUTE_NORM_RING_CUH

#include "kernels/compute_norm_rows.cuh"

#include <cuda_pipeline_primitives.h>

/* The shape of a block. Rows of a team at a time, Groups of eight columns of each per thread. Late: rows are written when the
 * next ones have been added up, so that a team's threads have work on both sides of a barrier (backward alone). */
template <unsigned L, unsigned T, unsigned G, unsigned R, unsigned S, bool A = false>
struct norm_ring {
    static constexpr unsigned Lanes = L, Teams = T, Groups = G, Rows = R, Stages = S;
    static constexpr bool Late = A;
    static constexpr unsigned threads = L * T, warps = L / 32;
    static constexpr uint64_t columns = uint64_t{ 8 } * L * G;

    /* Bytes of shared memory for so many matrices; of the sums of columns at the end. */
    static constexpr size_t bytes(unsigned matrices)
    {
        return size_t{ 16 } * S * matrices * R * G * threads;
    }
};

template <unsigned Number, unsigned Threads> __device__ __forceinline__ void numbered_barrier()
{
    asm volatile("bar.sync %0, %1;" : : "n"(Number), "n"(Threads) : "memory");
}

/* A barrier of a team's threads. Numbers are constants: then the checker of races knows the barriers, too. */
template <class Shape, unsigned First = 0>
__device__ __forceinline__ void ring_barrier(unsigned team)
{
    static_assert(Shape::Lanes == 32 || Shape::Teams <= 8, "a barrier each");
    if constexpr (Shape::Teams == 1) {
        __syncthreads();
    } else if constexpr (First < Shape::Teams) {
        if (team == First)
            numbered_barrier<First + 1, Shape::Lanes>();
        else
            ring_barrier<Shape, First + 1>(team);
    }
}

/* As team_sum(), in two parts: what a team does between them does not wait for its other warps. */
template <class Shape, unsigned N>
__device__ __forceinline__ void ring_sum_begin(float (&parts)[N][(Shape::warps + 3) / 4 * 4],
                                               unsigned lane, float (&values)[N])
{
#pragma unroll
    for (unsigned half = 16; half; half /= 2)
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            values[i] += __shfl_xor_sync(~0U, values[i], half);
    if (Shape::Lanes != 32 && lane % 32 == 0)
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            parts[i][lane / 32] = values[i];
}

template <class Shape, unsigned N>
__device__ __forceinline__ void ring_sum_end(float (&parts)[N][(Shape::warps + 3) / 4 * 4],
                                             unsigned team, float (&values)[N])
{
    if (Shape::Lanes == 32)
        return;
    ring_barrier<Shape>(team);
#pragma unroll
    for (unsigned i = 0; i < N; i++) {
        values[i] = 0;
#pragma unroll
        for (unsigned w = 0; w < (Shape::warps + 3) / 4 * 4; w += 4) {
            float4 four = *reinterpret_cast<const float4 *>(&parts[i][w]);

            values[i] += w + 4 <= Shape::warps   ? (four.x + four.y) + (four.z + four.w)
                         : Shape::warps % 4 == 3 ? (four.x + four.y) + four.z
                         : Shape::warps % 4 == 2 ? four.x + four.y
                                                 : four.x;
        }
    }
}

template <class Shape, unsigned N>
__device__ __forceinline__ void ring_sum(float (&parts)[N][(Shape::warps + 3) / 4 * 4],
                                         unsigned team, unsigned lane, float (&values)[N])
{
    ring_sum_begin<Shape>(parts, lane, values);
    ring_sum_end<Shape>(parts, team, values);
}

/* A thread's place in the ring: neighbours in neighbouring sixteen bytes. */
template <class Shape, unsigned Matrices>
__device__ __forceinline__ uint4 *ring_at(uint4 *ring, unsigned stage, unsigned matrix,
                                          unsigned row, unsigned group)
{
    return ring +
           (((stage * Matrices + matrix) * Shape::Rows + row) * Shape::Groups + group) *
               Shape::threads +
           threadIdx.x;
}

template <class Shape, unsigned Matrices>
__device__ __forceinline__ void ring_copy(uint4 *ring, unsigned stage, unsigned matrix,
                                          unsigned row, const uint16_t *from, unsigned columns,
                                          unsigned lane)
{
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++) {
        unsigned at = 8 * (lane + v * Shape::Lanes);

        if (at < columns)
            __pipeline_memcpy_async(ring_at<Shape, Matrices>(ring, stage, matrix, row, v),
                                    from + at, 16);
    }
}

/* ---- forward ---- */

template <class Shape, unsigned Matrices>
__device__ __forceinline__ void ring_begin_forward(const lk_norm_launch &launch, uint64_t first,
                                                   unsigned lane, uint4 *ring, unsigned stage)
{
    unsigned columns = static_cast<unsigned>(launch.norm.columns);

#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        if (first + r >= launch.norm.rows)
            continue;
        norm_row row = norm_find_row(&launch, first + r);

        ring_copy<Shape, Matrices>(ring, stage, 0, r, row.x, columns, lane);
        if (Matrices == 2)
            ring_copy<Shape, Matrices>(ring, stage, 1, r, row.residual, columns, lane);
    }
    __pipeline_commit();
}

/* What is normalised, out of the ring; if it is wanted it is stored here, without a residual, too. */
template <class Shape, unsigned Matrices>
__device__ __forceinline__ void ring_take(const lk_norm_launch &launch, uint64_t first,
                                          unsigned lane, uint4 *ring, unsigned stage,
                                          lk_wide16 (&s)[Shape::Rows][Shape::Groups])
{
    unsigned columns = static_cast<unsigned>(launch.norm.columns);

#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++)
#pragma unroll
        for (unsigned v = 0; v < Shape::Groups; v++) {
            unsigned at = 8 * (lane + v * Shape::Lanes);
            float a[8], b[8];

            s[r][v] = lk_wide16{};
            if (at >= columns || first + r >= launch.norm.rows)
                continue;
            s[r][v] = *ring_at<Shape, Matrices>(ring, stage, 0, r, v);
            if (Matrices == 1) {
                if (launch.forward.sum)
                    store_group(norm_find_row(&launch, first + r).sum, at, columns, LK_WHOLE,
                                s[r][v]);
                continue;
            }
            unpack_group(s[r][v], a);
            unpack_group(*ring_at<Shape, Matrices>(ring, stage, 1, r, v), b);
#pragma unroll
            for (int i = 0; i < 8; i++)
                a[i] += b[i];
            s[r][v] = pack_group(a);
            store_group(norm_find_row(&launch, first + r).sum, at, columns, LK_WHOLE, s[r][v]);
        }
}

template <class Shape> struct ring_weights {
    float gamma[Shape::Groups][8], beta[Shape::Groups][8];
};

template <class Shape, bool Layer>
__device__ __forceinline__ void ring_apply(const lk_norm_launch &launch, uint64_t first,
                                           unsigned lane, const ring_weights<Shape> &weights,
                                           const lk_wide16 (&s)[Shape::Rows][Shape::Groups],
                                           const float (&mean)[Shape::Rows],
                                           const float (&rstd)[Shape::Rows])
{
    unsigned columns = static_cast<unsigned>(launch.norm.columns);

#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        if (first + r >= launch.norm.rows)
            continue;
        uint16_t *y = norm_find_row(&launch, first + r).y;

#pragma unroll
        for (unsigned v = 0; v < Shape::Groups; v++) {
            unsigned at = 8 * (lane + v * Shape::Lanes);
            float x[8];

            if (at >= columns)
                continue;
            unpack_group(s[r][v], x);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float away = Layer ? x[i] - mean[r] : x[i];

                x[i] = fmaf(away * rstd[r], weights.gamma[v][i], weights.beta[v][i]);
            }
            store_group(y, at, columns, LK_WHOLE, pack_group(x));
        }
    }
}

template <class Shape, unsigned Matrices, bool Layer>
__global__ void __launch_bounds__(Shape::threads, 1)
    norm_forward_ring(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ uint4 ring[];
    __shared__ __align__(16) float parts[Shape::Teams][2][Shape::Rows][(Shape::warps + 3) / 4 * 4];
    unsigned team = threadIdx.x / Shape::Lanes, lane = threadIdx.x % Shape::Lanes, stage = 0;
    uint64_t first = group_from_the_end(uint64_t{ blockIdx.x } * Shape::Teams + team, Shape::Rows,
                                        launch.norm.rows);
    uint64_t step = -uint64_t{ gridDim.x } * Shape::Teams * Shape::Rows;
    uint64_t rows = launch.norm.rows, columns = launch.norm.columns;
    float scale = mean_scale(columns);
    ring_weights<Shape> weights;
    unsigned phase = 0;

    wait_for_the_last();
#pragma unroll
    for (unsigned s = 0; s < Shape::Stages; s++)
        ring_begin_forward<Shape, Matrices>(launch, first + s * step, lane, ring, s);
    if (launch.forward.y)
#pragma unroll
        for (unsigned v = 0; v < Shape::Groups; v++) {
            uint64_t at = uint64_t{ 8 } * (lane + v * Shape::Lanes);

            if (at >= columns)
                continue;
            norm_weights(&launch.norm, launch.norm.gamma, at, LK_WHOLE, 1, launch.norm.gamma_offset,
                         weights.gamma[v]);
            norm_weights(&launch.norm, launch.norm.beta, at, LK_WHOLE, 0, 0, weights.beta[v]);
        }
    for (; first < rows; first += step, stage = stage + 1 < Shape::Stages ? stage + 1 : 0) {
        lk_wide16 s[Shape::Rows][Shape::Groups];
        float total[Shape::Rows], mean[Shape::Rows];

        __pipeline_wait_prior(Shape::Stages - 1);
        ring_take<Shape, Matrices>(launch, first, lane, ring, stage, s);
        ring_begin_forward<Shape, Matrices>(launch, first + Shape::Stages * step, lane, ring,
                                            stage);
        if (Layer) {
#pragma unroll
            for (unsigned r = 0; r < Shape::Rows; r++)
                total[r] = row_sum<Shape::Lanes>(s[r], scale);
            ring_sum<Shape>(parts[team][0], team, lane, total);
        }
#pragma unroll
        for (unsigned r = 0; r < Shape::Rows; r++) {
            mean[r] = Layer ? total[r] / (static_cast<float>(columns) * scale) : 0;
            total[r] = row_squares<Shape::Lanes, Shape::Groups, Layer>(s[r], columns, lane,
                                                                       mean[r]);
        }
        ring_sum<Shape>(parts[team][Layer ? 1 : phase], team, lane, total);
        phase ^= 1;
#pragma unroll
        for (unsigned r = 0; r < Shape::Rows; r++) {
            total[r] = norm_rstd(&launch.norm, total[r]);
            if (lane == 0 && first + r < rows) {
                launch.norm.rstd[first + r] = total[r];
                if (Layer)
                    launch.norm.mean[first + r] = mean[r];
            }
        }
        if (launch.forward.y)
            ring_apply<Shape, Layer>(launch, first, lane, weights, s, mean, total);
    }
}

/* ---- backward ---- */

/* Matrices: s, dy and, if it is there, ds. */
template <class Shape, unsigned Matrices, bool Full>
__device__ __forceinline__ void ring_begin_backward(const lk_norm_launch &launch, uint64_t first,
                                                    unsigned lane, uint4 *ring,
                                                    float (*scalars)[2][Shape::Rows],
                                                    unsigned stage)
{
    unsigned columns = static_cast<unsigned>(launch.norm.columns);
    const struct lk_norm_backward &b = launch.backward;

#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        uint64_t row = first + r;

        if (row >= launch.norm.rows)
            continue;
        if (lane % 32 == r)
            __pipeline_memcpy_async(&scalars[stage][0][r], launch.norm.rstd + row, 4);
        if (Full && launch.norm.kind == LK_LAYER_NORM && lane % 32 == 16 + r)
            __pipeline_memcpy_async(&scalars[stage][1][r], launch.norm.mean + row, 4);
        ring_copy<Shape, Matrices>(ring, stage, 0, r,
                                   static_cast<const uint16_t *>(b.s) + row * b.s_stride, columns,
                                   lane);
        ring_copy<Shape, Matrices>(ring, stage, 1, r,
                                   static_cast<const uint16_t *>(b.dy) + row * b.dy_stride, columns,
                                   lane);
        if (Matrices == 3)
            ring_copy<Shape, Matrices>(ring, stage, 2, r,
                                       static_cast<const uint16_t *>(b.ds) + row * b.ds_stride,
                                       columns, lane);
    }
    __pipeline_commit();
}

/* Again: y is made anew beside dx. */
template <class Shape, bool Full, bool Again> struct ring_columns {
    float weight[Shape::Groups][8]; /* what gamma is */
    float beta[Again ? Shape::Groups : 1][8];
    norm_columns_sums<Shape::Groups, Full> sums;
};

/* The sums of a stage's rows: dy * gamma * hat, then, if Full, dy * gamma. */
template <class Shape, unsigned Matrices, bool Full, bool Again>
__device__ __forceinline__ void
ring_sum_rows(uint4 *ring, unsigned stage, unsigned count, unsigned columns, unsigned lane,
              const float (&mean)[Shape::Rows], const float (&rstd)[Shape::Rows],
              ring_columns<Shape, Full, Again> &mine, float (&sums)[(Full ? 2 : 1) * Shape::Rows])
{
#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        float product[2] = { 0, 0 }, plain[2] = { 0, 0 };

#pragma unroll
        for (unsigned v = 0; v < Shape::Groups; v++) {
            float hat[8], dy[8];

            if (8 * (lane + v * Shape::Lanes) >= columns || r >= count)
                continue;
            unpack_group(*ring_at<Shape, Matrices>(ring, stage, 0, r, v), hat);
            unpack_group(*ring_at<Shape, Matrices>(ring, stage, 1, r, v), dy);
#pragma unroll
            for (int i = 0; i < 8; i++)
                hat[i] = (Full ? hat[i] - mean[r] : hat[i]) * rstd[r];
            add_products(mine.sums, v, dy, hat);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float d = dy[i] * mine.weight[v][i];

                if (Full)
                    plain[i % 2] += d;
                product[i % 2] = fmaf(d, hat[i], product[i % 2]);
            }
        }
        sums[r] = product[0] + product[1];
        if (Full)
            sums[(Full ? Shape::Rows : 0) + r] = plain[0] + plain[1];
    }
}

/* Eight columns of y, with the bits that ring_apply() gives them. */
template <class Shape, bool Full>
__device__ __forceinline__ void ring_write_again(const lk_norm_launch &launch, uint64_t row,
                                                 unsigned at, const float (&s)[8], float mean,
                                                 float rstd, const float (&weight)[8],
                                                 const float (&beta)[8])
{
    uint16_t *y = static_cast<uint16_t *>(launch.forward.y) + row * launch.forward.y_stride;
    float out[8];

#pragma unroll
    for (int i = 0; i < 8; i++)
        out[i] = fmaf((Full ? s[i] - mean : s[i]) * rstd, weight[i], beta[i]);
    store_group(y, at, launch.norm.columns, LK_WHOLE, pack_group(out));
}

template <class Shape, unsigned Matrices, bool Full, bool Again>
__device__ __forceinline__ void ring_write_rows(const lk_norm_launch &launch, uint4 *ring,
                                                unsigned stage, uint64_t first, unsigned lane,
                                                const float (&mean)[Shape::Rows],
                                                const float (&rstd)[Shape::Rows],
                                                const ring_columns<Shape, Full, Again> &mine,
                                                const float (&sums)[(Full ? 2 : 1) * Shape::Rows])
{
    unsigned columns = static_cast<unsigned>(launch.norm.columns);
    bool layer = launch.norm.kind == LK_LAYER_NORM;

#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        if (first + r >= launch.norm.rows)
            continue;
        norm_sums means = norm_means(
            &launch.norm,
            norm_sums{ Full && layer ? sums[(Full ? Shape::Rows : 0) + r] : 0, sums[r] });
        float slope = -(means.product * rstd[r]);
        uint16_t *dx = static_cast<uint16_t *>(launch.backward.dx) +
                       (first + r) * launch.backward.dx_stride;

#pragma unroll
        for (unsigned v = 0; v < Shape::Groups; v++) {
            unsigned at = 8 * (lane + v * Shape::Lanes);
            float s[8], dy[8], ds[8];

            if (at >= columns)
                continue;
            unpack_group(*ring_at<Shape, Matrices>(ring, stage, 0, r, v), s);
            unpack_group(*ring_at<Shape, Matrices>(ring, stage, 1, r, v), dy);
            if (Again)
                ring_write_again<Shape, Full>(launch, first + r, at, s, mean[r], rstd[r],
                                              mine.weight[v], mine.beta[Again ? v : 0]);
            if (Matrices == 3)
                unpack_group(*ring_at<Shape, Matrices>(ring, stage, 2, r, v), ds);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float d = dy[i] * mine.weight[v][i];

                d = fmaf(Full ? s[i] - mean[r] : s[i], slope, Full ? d - means.plain : d);
                dy[i] = Matrices == 3 ? fmaf(rstd[r], d, ds[i]) : rstd[r] * d;
            }
            store_group(dx, at, columns, LK_WHOLE, pack_group(dy));
        }
    }
}

/* The block's row of partial sums: its teams' one after another. As write_columns(). */
template <class Shape>
__device__ __forceinline__ void ring_write_columns(float4 *all, float *out, unsigned groups,
                                                   const float (&mine)[Shape::Groups][8])
{
    constexpr unsigned HALF = Shape::Lanes * Shape::Groups;
    unsigned lane = threadIdx.x % Shape::Lanes, team = threadIdx.x / Shape::Lanes;

    if (Shape::Teams > 1)
        __syncthreads(); /* all is read that was there */
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++)
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            float4 four = make_float4(mine[v][4 * half], mine[v][4 * half + 1],
                                      mine[v][4 * half + 2], mine[v][4 * half + 3]);
            unsigned group = lane + v * Shape::Lanes;

            if (Shape::Teams > 1)
                all[2 * HALF * team + half * HALF + group] = four;
            else if (group < groups)
                reinterpret_cast<float4 *>(out)[half * groups + group] = four;
        }
    if (Shape::Teams == 1)
        return;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 2 * HALF; i += Shape::threads) {
        float4 sum = all[i];

#pragma unroll 4
        for (unsigned t = 1; t < Shape::Teams; t++) {
            float4 other = all[2 * HALF * t + i];

            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
        }
        if (i % HALF < groups)
            reinterpret_cast<float4 *>(out)[i / HALF * groups + i % HALF] = sum;
    }
}

/* Rows that have been added up: where they begin and lie, and what was found. */
template <class Shape, bool Full> struct ring_found {
    uint64_t first;
    unsigned stage;
    float mean[Shape::Rows], rstd[Shape::Rows];
    float sums[(Full ? 2 : 1) * Shape::Rows];
};

/* Writes them, and asks for those that take their place. */
template <class Shape, unsigned Matrices, bool Full, bool Again>
__device__ __forceinline__ void ring_end_rows(const lk_norm_launch &launch, uint4 *ring,
                                              float (*own)[2][Shape::Rows], unsigned lane,
                                              uint64_t step,
                                              const ring_columns<Shape, Full, Again> &mine,
                                              const ring_found<Shape, Full> &found)
{
    ring_write_rows<Shape, Matrices, Full, Again>(launch, ring, found.stage, found.first, lane,
                                                  found.mean, found.rstd, mine, found.sums);
    ring_begin_backward<Shape, Matrices, Full>(launch, found.first + Shape::Stages * step, lane,
                                               ring, own, found.stage);
}

template <class Shape, unsigned Matrices, bool Full, bool Again>
__device__ __forceinline__ void ring_add_up(const lk_norm_launch &launch, uint4 *ring,
                                            float (*own)[2][Shape::Rows], unsigned lane,
                                            ring_columns<Shape, Full, Again> &mine,
                                            ring_found<Shape, Full> &found)
{
    uint64_t left = launch.norm.rows - found.first;

    /* late: the stage before is asked for behind this wait */
    __pipeline_wait_prior(Shape::Stages - (Shape::Late ? 2 : 1));
    __syncwarp(); /* what other lanes copied */
#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        found.rstd[r] = own[found.stage][0][r];
        found.mean[r] = Full && launch.norm.kind == LK_LAYER_NORM ? own[found.stage][1][r] : 0;
    }
    ring_sum_rows<Shape, Matrices, Full, Again>(
        ring, found.stage, left < Shape::Rows ? static_cast<unsigned>(left) : Shape::Rows,
        static_cast<unsigned>(launch.norm.columns), lane, found.mean, found.rstd, mine, found.sums);
}

/* Full: with a mean or dbeta. */
template <class Shape, unsigned Matrices, bool Full, bool Again>
__global__ void __launch_bounds__(Shape::threads, 1)
    norm_backward_ring(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ uint4 ring[];
    __shared__ __align__(
        16) float parts[Shape::Teams][2][(Full ? 2 : 1) * Shape::Rows][(Shape::warps + 3) / 4 * 4];
    __shared__ float scalars[Shape::threads / 32][Shape::Stages][2][Shape::Rows];
    unsigned team = threadIdx.x / Shape::Lanes, lane = threadIdx.x % Shape::Lanes;
    unsigned phase = 0, columns = static_cast<unsigned>(launch.norm.columns);
    uint64_t step = -uint64_t{ gridDim.x } * Shape::Teams * Shape::Rows;
    float(*own)[2][Shape::Rows] = scalars[threadIdx.x / 32]; /* the warp's */
    ring_columns<Shape, Full, Again> mine = {};
    ring_found<Shape, Full> now = {}, last = {};
    bool owed = false; /* late: those of `last` have not been written */

    now.first = group_from_the_end(uint64_t{ blockIdx.x } * Shape::Teams + team, Shape::Rows,
                                   launch.norm.rows);
    wait_for_the_last();
    let_the_next_begin();
#pragma unroll
    for (unsigned s = 0; s < Shape::Stages; s++)
        ring_begin_backward<Shape, Matrices, Full>(launch, now.first + s * step, lane, ring, own,
                                                   s);
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++) {
        uint64_t at = uint64_t{ 8 } * (lane + v * Shape::Lanes);

        if (at >= columns)
            continue;
        norm_weights(&launch.norm, launch.norm.gamma, at, LK_WHOLE, 1, launch.norm.gamma_offset,
                     mine.weight[v]);
        if (Again)
            norm_weights(&launch.norm, launch.norm.beta, at, LK_WHOLE, 0, 0,
                         mine.beta[Again ? v : 0]);
    }
    for (; now.first < launch.norm.rows; now.first += step) {
        ring_add_up<Shape, Matrices, Full, Again>(launch, ring, own, lane, mine, now);
        ring_sum_begin<Shape>(parts[team][phase], lane, now.sums);
        if (Shape::Late && owed)
            ring_end_rows<Shape, Matrices, Full, Again>(launch, ring, own, lane, step, mine, last);
        ring_sum_end<Shape>(parts[team][phase], team, now.sums);
        phase ^= 1;
        if (!Shape::Late)
            ring_end_rows<Shape, Matrices, Full, Again>(launch, ring, own, lane, step, mine, now);
        last = now;
        owed = Shape::Late;
        now.stage = now.stage + 1 < Shape::Stages ? now.stage + 1 : 0;
    }
    if (Shape::Late && owed)
        ring_end_rows<Shape, Matrices, Full, Again>(launch, ring, own, lane, step, mine, last);
    if (!launch.partials)
        return;
    float *out = static_cast<float *>(launch.backward.workspace) +
                 uint64_t{ blockIdx.x } * 16 * (columns / 8);
    float4 *all = reinterpret_cast<float4 *>(ring);

    __pipeline_wait_prior(0);
    if (launch.backward.dgamma)
        ring_write_columns<Shape>(all, out, columns / 8, mine.sums.gamma);
    if constexpr (Full)
        if (launch.backward.dbeta)
            ring_write_columns<Shape>(all, out + columns, columns / 8, mine.sums.beta);
}

#endif
