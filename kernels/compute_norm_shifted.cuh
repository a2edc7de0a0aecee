/* SPDX-License-Identifier: Apache-2.0
 *
 * Forward of rows that do not begin at sixteen bytes or whose length is not a multiple of eight, where x and y lie alike.
 * A thread's groups are aligned ones of memory, of which a row's first and last may be a part. Blocks stay, and have the
 * weights in shared memory.
 */
#ifndef LK_COMPUTE_NORM_SHIFTED_CUH
#define LK_COMPUTE_NORM_SHIFTED_CUH

#include "kernels/compute_norm_rows.cuh"

/* Columns of `columns` that group `group` of a row has, which begins `phase` elements behind its first group's begin. */
struct shifted_group {
    int32_t first;
    bool some, whole;
};

__device__ __forceinline__ shifted_group find_shifted(unsigned group, unsigned phase,
                                                      unsigned columns)
{
    int32_t first = static_cast<int32_t>(8 * group) - static_cast<int32_t>(phase);
    int32_t end = static_cast<int32_t>(columns);

    return { first, first < end, first >= 0 && first + 8 <= end };
}

/* Of an element: whether the row has it. */
__device__ __forceinline__ bool has_column(const shifted_group &group, int i, unsigned columns)
{
    return static_cast<uint32_t>(group.first + i) < columns;
}

__device__ __forceinline__ lk_wide16 load_shifted(const uint16_t *row, const shifted_group &group,
                                                  unsigned columns)
{
    uint32_t pairs[4] = { 0 };

    if (group.whole)
        return __ldcs(reinterpret_cast<const uint4 *>(row + group.first));
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (group.some && has_column(group, i, columns))
            pairs[i / 2] |= static_cast<uint32_t>(row[group.first + i]) << 16 * (i % 2);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

__device__ __forceinline__ void store_shifted(uint16_t *row, const shifted_group &group,
                                              unsigned columns, const float (&x)[8])
{
    if (group.whole) {
        store_group(row, static_cast<uint64_t>(group.first), columns, LK_WHOLE, pack_group(x));
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (group.some && has_column(group, i, columns))
            row[group.first + i] = static_cast<uint16_t>(round_bf16_pair(x[i], 0));
}

/* Where a column's weight lies: columns that differ by a multiple of eight are neighbours. */
__device__ __forceinline__ unsigned weight_slot(unsigned column, unsigned columns)
{
    return column % 8 * ((columns + 7) / 8) + column / 8;
}

__device__ __forceinline__ float one_weight(const lk_norm &norm, const void *weights,
                                            unsigned column, float absent, float offset)
{
    if (!weights)
        return absent;
    return (norm.weight_type == LK_BF16 ? widen_bf16(static_cast<const uint16_t *>(weights)[column])
                                        : static_cast<const float *>(weights)[column]) +
           offset;
}

/* Shared memory: gamma, then beta, each of whole groups. */
inline size_t shifted_bytes(uint64_t columns)
{
    return (columns + 7) / 8 * 8 * 2 * sizeof(float);
}

template <unsigned Lanes, unsigned Groups>
constexpr uint64_t SHIFTED_COLUMNS = 8 * Lanes *Groups - 7; /* whatever the phase */

template <unsigned Lanes, unsigned Groups, bool Layer>
__global__ void __launch_bounds__(Lanes, 1024 / Lanes)
    norm_forward_shifted(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ float shifted_weights[];
    __shared__ __align__(16) float parts[2][1][Lanes / 32];
    const lk_norm &norm = launch.norm;
    unsigned columns = static_cast<unsigned>(norm.columns), slots = (columns + 7) / 8 * 8;
    float scale = mean_scale(columns);

    wait_for_the_last();
    for (unsigned c = threadIdx.x; c < columns; c += Lanes) {
        shifted_weights[weight_slot(c, columns)] = one_weight(norm, norm.gamma, c, 1,
                                                              norm.gamma_offset);
        shifted_weights[slots + weight_slot(c, columns)] = one_weight(norm, norm.beta, c, 0, 0);
    }
    __syncthreads();
    for (uint64_t r = blockIdx.x; r < norm.rows; r += gridDim.x) {
        uint64_t nth = from_the_end(r, norm.rows);
        norm_row row = norm_find_row(&launch, nth);
        unsigned phase = static_cast<unsigned>(reinterpret_cast<uintptr_t>(row.x) / 2 % 8);
        lk_wide16 s[Groups];
        float total[1] = { 0 }, mean = 0, x[8];

#pragma unroll
        for (unsigned v = 0; v < Groups; v++)
            s[v] = load_shifted(row.x, find_shifted(threadIdx.x + v * Lanes, phase, columns),
                                columns);
        if (Layer) {
            total[0] = row_sum<Lanes>(s, scale);
            team_sum<Lanes>(parts[0], total);
            mean = total[0] / (static_cast<float>(columns) * scale);
            total[0] = 0;
        }
#pragma unroll
        for (unsigned v = 0; v < Groups; v++) {
            shifted_group group = find_shifted(threadIdx.x + v * Lanes, phase, columns);

            unpack_group(s[v], x);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float away = !Layer || has_column(group, i, columns) ? x[i] - mean : 0;

                total[0] = fmaf(away, away, total[0]);
            }
        }
        if (!Layer)
            __syncthreads(); /* everybody has read the last row's parts */
        team_sum<Lanes>(parts[1], total);
        float rstd = norm_rstd(&norm, total[0]);

        if (threadIdx.x == 0) {
            norm.rstd[nth] = rstd;
            if (Layer)
                norm.mean[nth] = mean;
        }
        if (!row.y)
            continue;
#pragma unroll
        for (unsigned v = 0; v < Groups; v++) {
            shifted_group group = find_shifted(threadIdx.x + v * Lanes, phase, columns);

            unpack_group(s[v], x);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (has_column(group, i, columns)) {
                    const float *weights = shifted_weights + weight_slot(group.first + i, columns);

                    x[i] = fmaf((x[i] - mean) * rstd, weights[0], weights[slots]);
                }
            store_shifted(row.y, group, columns, x);
        }
    }
}

#endif
