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

/* Ways of moving rows, or-ed. */
enum ring_way : unsigned {
    RING_EVICT = 1,    /* what is read leaves L2 first */
    RING_STREAMED = 2, /* so does what is written */
    RING_BULK = 4, /* whole rows come by the bulk copy engine, which one thread of a team asks */
};

/* The shape of a block. Rows of a team at a time, Groups of eight columns of each per thread. */
template <unsigned L, unsigned T, unsigned G, unsigned R, unsigned S, unsigned W = 0>
struct norm_ring {
    static constexpr unsigned Lanes = L, Teams = T, Groups = G, Rows = R, Stages = S, Way = W;
    static constexpr bool bulk = W & RING_BULK;
    static constexpr unsigned threads = L * T, warps = L / 32;
    static constexpr uint64_t columns = uint64_t{ 8 } * L * G;

    /* Bytes of shared memory for so many matrices; of the sums of columns at the end. */
    static constexpr size_t bytes(unsigned matrices)
    {
        return size_t{ 16 } * S * matrices * R * G * threads;
    }
};

template <class Shape> __device__ __forceinline__ void ring_barrier(unsigned team)
{
    if (Shape::Teams == 1)
        __syncthreads();
    else
        asm volatile("bar.sync %0, %1;" : : "r"(team + 1), "n"(Shape::Lanes) : "memory");
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

/* A thread's place in the ring: neighbours in neighbouring sixteen bytes. With bulk copies a team's rows are whole. */
template <class Shape, unsigned Matrices>
__device__ __forceinline__ uint4 *ring_at(uint4 *ring, unsigned stage, unsigned matrix,
                                          unsigned row, unsigned group)
{
    if (Shape::bulk)
        return ring +
               ((((threadIdx.x / Shape::Lanes * Shape::Stages + stage) * Matrices + matrix) *
                     Shape::Rows +
                 row) *
                    Shape::Groups +
                group) *
                   Shape::Lanes +
               threadIdx.x % Shape::Lanes;
    return ring +
           (((stage * Matrices + matrix) * Shape::Rows + row) * Shape::Groups + group) *
               Shape::threads +
           threadIdx.x;
}

__device__ __forceinline__ uint64_t evict_first()
{
    uint64_t policy;

    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

template <class Shape, unsigned Matrices>
__device__ __forceinline__ void ring_copy(uint4 *ring, unsigned stage, unsigned matrix,
                                          unsigned row, const uint16_t *from, unsigned columns,
                                          unsigned lane)
{
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++) {
        unsigned at = 8 * (lane + v * Shape::Lanes);

        if (at >= columns)
            continue;
        uint4 *to = ring_at<Shape, Matrices>(ring, stage, matrix, row, v);

        if (Shape::Way & RING_EVICT)
            asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                         :
                         : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from + at),
                           "l"(evict_first())
                         : "memory");
        else
            __pipeline_memcpy_async(to, from + at, 16);
    }
}

template <class Shape>
__device__ __forceinline__ void ring_store(uint16_t *to, unsigned at, unsigned columns, lk_wide16 x)
{
    if (Shape::Way & RING_STREAMED)
        __stcs(reinterpret_cast<uint4 *>(to + at), x);
    else
        store_group(to, at, columns, LK_WHOLE, x);
}

/* ---- whole rows at once ----
 * A team has a barrier for each stage, of one arrival, that of the thread that asks; the parity turns with every round
 * through the ring. A stage is asked for again when every thread of the team is past a barrier behind its last read. */

template <class Shape> struct ring_barriers {
    uint64_t full[Shape::bulk ? Shape::Teams : 1][Shape::bulk ? Shape::Stages : 1];
};

__device__ __forceinline__ uint32_t shared_address(const void *at)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

template <class Shape> __device__ __forceinline__ void init_barriers(ring_barriers<Shape> &barriers)
{
#if __CUDA_ARCH__ >= 900
    if constexpr (!Shape::bulk)
        return;
    if (threadIdx.x == 0) {
        for (unsigned t = 0; t < Shape::Teams; t++)
            for (unsigned s = 0; s < Shape::Stages; s++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
                             :
                             : "r"(shared_address(&barriers.full[t][s]))
                             : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    }
    __syncthreads();
#endif
}

__device__ __forceinline__ void expect_bytes(uint64_t *barrier, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}

template <class Shape>
__device__ __forceinline__ void copy_bulk(uint4 *to, const uint16_t *from, uint32_t bytes,
                                          uint64_t *barrier)
{
#if __CUDA_ARCH__ >= 900
    if (Shape::Way & RING_EVICT)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)),
                       "l"(evict_first())
                     : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1], %2, [%3];"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
                     : "memory");
#endif
}

__device__ __forceinline__ void wait_full(uint64_t *barrier, unsigned parity)
{
#if __CUDA_ARCH__ >= 900
    uint32_t done;

    do
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}\n"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    while (!done);
#endif
}

/* ---- forward ---- */

template <class Shape, unsigned Matrices>
__device__ __forceinline__ void ring_begin_forward(const lk_norm_launch &launch, uint64_t first,
                                                   unsigned lane, uint4 *ring, unsigned stage,
                                                   ring_barriers<Shape> &barriers)
{
    unsigned columns = static_cast<unsigned>(launch.norm.columns);

    if constexpr (Shape::bulk) {
        uint64_t *full = &barriers.full[threadIdx.x / Shape::Lanes][stage];
        uint64_t rows = launch.norm.rows;

        if (lane || first >= rows)
            return;
        expect_bytes(full, columns * 2 * Matrices *
                               (rows - first < Shape::Rows ? static_cast<uint32_t>(rows - first)
                                                           : Shape::Rows));
#pragma unroll
        for (unsigned r = 0; r < Shape::Rows; r++) {
            if (first + r >= rows)
                break;
            norm_row row = norm_find_row(&launch, first + r);

            copy_bulk<Shape>(ring_at<Shape, Matrices>(ring, stage, 0, r, 0), row.x, columns * 2,
                             full);
            if (Matrices == 2)
                copy_bulk<Shape>(ring_at<Shape, Matrices>(ring, stage, Matrices - 1, r, 0),
                                 row.residual, columns * 2, full);
        }
    } else {
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
                    ring_store<Shape>(norm_find_row(&launch, first + r).sum, at, columns, s[r][v]);
                continue;
            }
            unpack_group(s[r][v], a);
            unpack_group(*ring_at<Shape, Matrices>(ring, stage, 1, r, v), b);
#pragma unroll
            for (int i = 0; i < 8; i++)
                a[i] += b[i];
            s[r][v] = pack_group(a);
            ring_store<Shape>(norm_find_row(&launch, first + r).sum, at, columns, s[r][v]);
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
            ring_store<Shape>(y, at, columns, pack_group(x));
        }
    }
}

template <class Shape> using ring_parts = float[Shape::Rows][(Shape::warps + 3) / 4 * 4];

/* As find_moments(). */
template <class Shape, bool Layer>
__device__ __forceinline__ void ring_moments(const lk_wide16 (&s)[Shape::Rows][Shape::Groups],
                                             unsigned columns, unsigned team, unsigned lane,
                                             ring_parts<Shape> &first, ring_parts<Shape> &second,
                                             float (&mean)[Shape::Rows],
                                             float (&total)[Shape::Rows])
{
    float scale = mean_scale(columns);

    if (Layer) {
#pragma unroll
        for (unsigned r = 0; r < Shape::Rows; r++)
            total[r] = row_sum<Shape::Lanes>(s[r], scale);
        ring_sum<Shape>(first, team, lane, total);
    }
#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        mean[r] = Layer ? total[r] / (static_cast<float>(columns) * scale) : 0;
        total[r] = row_squares<Shape::Lanes, Shape::Groups, Layer>(s[r], columns, lane, mean[r]);
    }
    ring_sum<Shape>(second, team, lane, total);
}

template <class Shape>
__device__ __forceinline__ void ring_load_weights(const lk_norm &norm, unsigned lane,
                                                  ring_weights<Shape> &weights)
{
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++) {
        uint64_t at = uint64_t{ 8 } * (lane + v * Shape::Lanes);

        if (at >= norm.columns)
            continue;
        norm_weights(&norm, norm.gamma, at, LK_WHOLE, 1, norm.gamma_offset, weights.gamma[v]);
        norm_weights(&norm, norm.beta, at, LK_WHOLE, 0, 0, weights.beta[v]);
    }
}

template <class Shape, unsigned Blocks, unsigned Matrices, bool Layer>
__global__ void __launch_bounds__(Shape::threads, Blocks)
    norm_forward_ring(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ __align__(128) uint4 ring[];
    __shared__ __align__(16) ring_parts<Shape> parts[Shape::Teams][2];
    __shared__ ring_barriers<Shape> barriers;
    unsigned team = threadIdx.x / Shape::Lanes, lane = threadIdx.x % Shape::Lanes, stage = 0;
    uint64_t first = (uint64_t{ blockIdx.x } * Shape::Teams + team) * Shape::Rows;
    uint64_t step = uint64_t{ gridDim.x } * Shape::Teams * Shape::Rows;
    uint64_t rows = launch.norm.rows;
    unsigned columns = static_cast<unsigned>(launch.norm.columns);
    ring_weights<Shape> weights;
    unsigned phase = 0, parity = 0;

    init_barriers<Shape>(barriers);
#pragma unroll
    for (unsigned s = 0; s < Shape::Stages; s++)
        ring_begin_forward<Shape, Matrices>(launch, first + s * step, lane, ring, s, barriers);
    if (launch.forward.y)
        ring_load_weights<Shape>(launch.norm, lane, weights);
    for (; first < rows; first += step) {
        lk_wide16 s[Shape::Rows][Shape::Groups];
        float total[Shape::Rows], mean[Shape::Rows];

        if constexpr (Shape::bulk)
            wait_full(&barriers.full[team][stage], parity);
        else
            __pipeline_wait_prior(Shape::Stages - 1);
        ring_take<Shape, Matrices>(launch, first, lane, ring, stage, s);
        if (!Shape::bulk)
            ring_begin_forward<Shape, Matrices>(launch, first + Shape::Stages * step, lane, ring,
                                                stage, barriers);
        ring_moments<Shape, Layer>(s, columns, team, lane, parts[team][0],
                                   parts[team][Layer ? 1 : phase], mean, total);
        phase ^= 1;
        if (Shape::bulk && Shape::Lanes == 32)
            __syncwarp();
        if (Shape::bulk) /* everybody has taken it */
            ring_begin_forward<Shape, Matrices>(launch, first + Shape::Stages * step, lane, ring,
                                                stage, barriers);
        stage = stage + 1 < Shape::Stages ? stage + 1 : 0;
        parity ^= stage == 0;
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
template <class Shape, unsigned Matrices>
__device__ __forceinline__ void ring_begin_bulk(const lk_norm_launch &launch, uint64_t first,
                                                uint4 *ring, uint64_t *full, unsigned stage)
{
    unsigned columns = static_cast<unsigned>(launch.norm.columns);
    const struct lk_norm_backward &b = launch.backward;
    uint64_t rows = launch.norm.rows;

    if (first >= rows)
        return;
    expect_bytes(
        full, columns * 2 * Matrices *
                  (rows - first < Shape::Rows ? static_cast<uint32_t>(rows - first) : Shape::Rows));
#pragma unroll
    for (unsigned r = 0; r < Shape::Rows; r++) {
        uint64_t row = first + r;

        if (row >= rows)
            break;
        copy_bulk<Shape>(ring_at<Shape, Matrices>(ring, stage, 0, r, 0),
                         static_cast<const uint16_t *>(b.s) + row * b.s_stride, columns * 2, full);
        copy_bulk<Shape>(ring_at<Shape, Matrices>(ring, stage, 1, r, 0),
                         static_cast<const uint16_t *>(b.dy) + row * b.dy_stride, columns * 2,
                         full);
        if (Matrices == 3)
            copy_bulk<Shape>(ring_at<Shape, Matrices>(ring, stage, Matrices - 1, r, 0),
                             static_cast<const uint16_t *>(b.ds) + row * b.ds_stride, columns * 2,
                             full);
    }
}

/* The rows' statistics; without bulk copies the rows, too. */
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
        if (Shape::bulk)
            continue;
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

template <class Shape, bool Full> struct ring_columns {
    float weight[Shape::Groups][8]; /* what gamma is */
    norm_columns_sums<Shape::Groups, Full> sums;
};

/* The sums of a stage's rows: dy * gamma * hat, then, if Full, dy * gamma. */
template <class Shape, unsigned Matrices, bool Full>
__device__ __forceinline__ void
ring_sum_rows(uint4 *ring, unsigned stage, unsigned count, unsigned columns, unsigned lane,
              const float (&mean)[Shape::Rows], const float (&rstd)[Shape::Rows],
              ring_columns<Shape, Full> &mine, float (&sums)[(Full ? 2 : 1) * Shape::Rows])
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

template <class Shape, unsigned Matrices, bool Full>
__device__ __forceinline__ void ring_write_rows(const lk_norm_launch &launch, uint4 *ring,
                                                unsigned stage, uint64_t first, unsigned lane,
                                                const float (&mean)[Shape::Rows],
                                                const float (&rstd)[Shape::Rows],
                                                const ring_columns<Shape, Full> &mine,
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
            if (Matrices == 3)
                unpack_group(*ring_at<Shape, Matrices>(ring, stage, 2, r, v), ds);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float d = dy[i] * mine.weight[v][i];

                d = fmaf(Full ? s[i] - mean[r] : s[i], slope, Full ? d - means.plain : d);
                dy[i] = Matrices == 3 ? fmaf(rstd[r], d, ds[i]) : rstd[r] * d;
            }
            ring_store<Shape>(dx, at, columns, pack_group(dy));
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

    __syncthreads(); /* all is read that was there */
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++)
#pragma unroll
        for (unsigned half = 0; half < 2; half++)
            all[2 * HALF * team + half * HALF + lane + v * Shape::Lanes] = make_float4(
                mine[v][4 * half], mine[v][4 * half + 1], mine[v][4 * half + 2],
                mine[v][4 * half + 3]);
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

/* Full: with a mean or dbeta. */
template <class Shape, unsigned Blocks, unsigned Matrices, bool Full>
__global__ void __launch_bounds__(Shape::threads, Blocks)
    norm_backward_ring(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ __align__(128) uint4 ring[];
    __shared__ __align__(
        16) float parts[Shape::Teams][2][(Full ? 2 : 1) * Shape::Rows][(Shape::warps + 3) / 4 * 4];
    __shared__ ring_barriers<Shape> barriers;
    __shared__ float scalars[Shape::threads / 32][Shape::Stages][2][Shape::Rows];
    unsigned team = threadIdx.x / Shape::Lanes, lane = threadIdx.x % Shape::Lanes;
    unsigned stage = 0, last = Shape::Stages - 1, phase = 0, parity = 0;
    unsigned columns = static_cast<unsigned>(launch.norm.columns);
    uint64_t first = (uint64_t{ blockIdx.x } * Shape::Teams + team) * Shape::Rows;
    uint64_t step = uint64_t{ gridDim.x } * Shape::Teams * Shape::Rows;
    uint64_t *full = barriers.full[Shape::bulk ? team : 0];
    float(*own)[2][Shape::Rows] = scalars[threadIdx.x / 32]; /* the warp's */
    ring_columns<Shape, Full> mine = {};

#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion(); /* what is launched next waits itself */
#endif
    init_barriers<Shape>(barriers);
#pragma unroll
    for (unsigned s = 0; s < Shape::Stages; s++) {
        ring_begin_backward<Shape, Matrices, Full>(launch, first + s * step, lane, ring, own, s);
        if (Shape::bulk && lane == 0 && s + 1 < Shape::Stages)
            ring_begin_bulk<Shape, Matrices>(launch, first + s * step, ring, full + s, s);
    }
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++)
        if (8 * (lane + v * Shape::Lanes) < columns)
            norm_weights(&launch.norm, launch.norm.gamma, uint64_t{ 8 } * (lane + v * Shape::Lanes),
                         LK_WHOLE, 1, launch.norm.gamma_offset, mine.weight[v]);
    for (; first < launch.norm.rows; first += step) {
        uint64_t left = launch.norm.rows - first;
        float sums[(Full ? 2 : 1) * Shape::Rows], mean[Shape::Rows], rstd[Shape::Rows];

        __pipeline_wait_prior(Shape::Stages - 1);
        if constexpr (Shape::bulk)
            wait_full(full + stage, parity);
        __syncwarp(); /* what other lanes copied */
#pragma unroll
        for (unsigned r = 0; r < Shape::Rows; r++) {
            rstd[r] = own[stage][0][r];
            mean[r] = Full && launch.norm.kind == LK_LAYER_NORM ? own[stage][1][r] : 0;
        }
        ring_sum_rows<Shape, Matrices, Full>(
            ring, stage, left < Shape::Rows ? static_cast<unsigned>(left) : Shape::Rows, columns,
            lane, mean, rstd, mine, sums);
        ring_sum<Shape>(parts[team][phase], team, lane, sums);
        phase ^= 1;
        if (Shape::bulk && Shape::Lanes == 32)
            __syncwarp();
        if (Shape::bulk && lane == 0) /* everybody has written the rows before */
            ring_begin_bulk<Shape, Matrices>(launch, first + (Shape::Stages - 1) * step, ring,
                                             full + last, last);
        ring_write_rows<Shape, Matrices, Full>(launch, ring, stage, first, lane, mean, rstd, mine,
                                               sums);
        ring_begin_backward<Shape, Matrices, Full>(launch, first + Shape::Stages * step, lane, ring,
                                                   own, stage);
        last = stage;
        stage = stage + 1 < Shape::Stages ? stage + 1 : 0;
        parity ^= stage == 0;
    }
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

#ifdef LK_COMPUTE_VARIANTS
/* The same, but rows are written when those behind them have been added up: barriers have work on both sides. */
template <class Shape, unsigned Blocks, unsigned Matrices, bool Full>
__global__ void __launch_bounds__(Shape::threads, Blocks)
    norm_backward_late(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ __align__(128) uint4 ring[];
    constexpr unsigned Sums = (Full ? 2 : 1) * Shape::Rows;
    __shared__ __align__(16) float parts[Shape::Teams][2][Sums][(Shape::warps + 3) / 4 * 4];
    __shared__ float scalars[Shape::threads / 32][Shape::Stages][2][Shape::Rows];
    unsigned team = threadIdx.x / Shape::Lanes, lane = threadIdx.x % Shape::Lanes;
    unsigned stage = 0, last = 0, phase = 0;
    unsigned columns = static_cast<unsigned>(launch.norm.columns);
    uint64_t first = (uint64_t{ blockIdx.x } * Shape::Teams + team) * Shape::Rows;
    uint64_t step = uint64_t{ gridDim.x } * Shape::Teams * Shape::Rows, rows = launch.norm.rows;
    float(*own)[2][Shape::Rows] = scalars[threadIdx.x / 32]; /* the warp's */
    ring_columns<Shape, Full> mine = {};
    float last_sums[Sums] = { 0 }, last_mean[Shape::Rows] = { 0 }, last_rstd[Shape::Rows] = { 0 };
    bool some = false; /* rows are still to be written */

#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion(); /* what is launched next waits itself */
#endif
#pragma unroll
    for (unsigned s = 0; s < Shape::Stages; s++)
        ring_begin_backward<Shape, Matrices, Full>(launch, first + s * step, lane, ring, own, s);
#pragma unroll
    for (unsigned v = 0; v < Shape::Groups; v++)
        if (8 * (lane + v * Shape::Lanes) < columns)
            norm_weights(&launch.norm, launch.norm.gamma, uint64_t{ 8 } * (lane + v * Shape::Lanes),
                         LK_WHOLE, 1, launch.norm.gamma_offset, mine.weight[v]);
    for (; first < rows || some; first += step) {
        uint64_t left = first < rows ? rows - first : 0;
        float sums[Sums], mean[Shape::Rows], rstd[Shape::Rows];

        if (left) {
            __pipeline_wait_prior(Shape::Stages - 2);
            __syncwarp(); /* what other lanes copied */
#pragma unroll
            for (unsigned r = 0; r < Shape::Rows; r++) {
                rstd[r] = own[stage][0][r];
                mean[r] = Full && launch.norm.kind == LK_LAYER_NORM ? own[stage][1][r] : 0;
            }
            ring_sum_rows<Shape, Matrices, Full>(
                ring, stage, left < Shape::Rows ? static_cast<unsigned>(left) : Shape::Rows,
                columns, lane, mean, rstd, mine, sums);
            ring_sum_begin<Shape>(parts[team][phase], lane, sums);
        }
        if (some) {
            ring_write_rows<Shape, Matrices, Full>(launch, ring, last, first - step, lane,
                                                   last_mean, last_rstd, mine, last_sums);
            ring_begin_backward<Shape, Matrices, Full>(launch, first + (Shape::Stages - 1) * step,
                                                       lane, ring, own, last);
        }
        some = left;
        if (!left)
            break;
        ring_sum_end<Shape>(parts[team][phase], team, sums);
        phase ^= 1;
#pragma unroll
        for (unsigned i = 0; i < Sums; i++)
            last_sums[i] = sums[i];
#pragma unroll
        for (unsigned r = 0; r < Shape::Rows; r++) {
            last_mean[r] = mean[r];
            last_rstd[r] = rstd[r];
        }
        last = stage;
        stage = stage + 1 < Shape::Stages ? stage + 1 : 0;
    }
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

#endif
