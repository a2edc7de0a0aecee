/* SPDX-License-Identifier: Apache-2.0
 *
 * The general kernel of matrix products: tiles in shared memory, a square of elements for each thread.
 */
#include "kernels/compute_device.cuh"
#include "kernels/compute_gemm.h"

namespace
{

constexpr unsigned SIDE = 4; /* elements of a thread in either direction */
constexpr unsigned LANES = LK_GEMM_TILE / SIDE;
constexpr uint64_t MAX_BLOCKS = 4096;

static_assert(LANES * LANES == LK_BLOCK, "a tile is a block's work");

struct tiles {
    float a[LK_GEMM_STEP][LK_GEMM_TILE + 1];
    float b[LK_GEMM_STEP][LK_GEMM_TILE + 1];
};

/* Neighbouring threads read neighbouring elements, whichever way the matrix lies. */
__device__ void fill(const lk_gemm &gemm, tiles &shared, uint64_t row, uint64_t column, uint64_t k)
{
    for (uint64_t i = threadIdx.x; i < LK_GEMM_TILE * LK_GEMM_STEP; i += LK_BLOCK) {
        uint64_t across = i % LK_GEMM_TILE, down = i / LK_GEMM_TILE;
        uint64_t along = i % LK_GEMM_STEP, side = i / LK_GEMM_STEP;

        if (gemm.a_transposed)
            shared.a[down][across] = gemm_a(&gemm, row + across, k + down);
        else
            shared.a[along][side] = gemm_a(&gemm, row + side, k + along);
        if (gemm.b_transposed)
            shared.b[along][side] = gemm_b(&gemm, k + along, column + side);
        else
            shared.b[down][across] = gemm_b(&gemm, k + down, column + across);
    }
}

__device__ void make_tile(const lk_gemm &gemm, tiles &shared, uint64_t row, uint64_t column)
{
    unsigned x = threadIdx.x % LANES, y = threadIdx.x / LANES;
    float sums[SIDE][SIDE] = {};

    for (uint64_t k = 0; k < gemm.depth; k += LK_GEMM_STEP) {
        fill(gemm, shared, row, column, k);
        __syncthreads();
        uint64_t steps = gemm.depth - k < LK_GEMM_STEP ? gemm.depth - k : LK_GEMM_STEP;

        for (uint64_t s = 0; s < steps; s++)
#pragma unroll
            for (unsigned i = 0; i < SIDE; i++)
#pragma unroll
                for (unsigned j = 0; j < SIDE; j++)
                    sums[i][j] += shared.a[s][y + LANES * i] * shared.b[s][x + LANES * j];
        __syncthreads();
    }
#pragma unroll
    for (unsigned i = 0; i < SIDE; i++)
#pragma unroll
        for (unsigned j = 0; j < SIDE; j++)
            if (row + y + LANES * i < gemm.rows && column + x + LANES * j < gemm.columns)
                gemm_write(&gemm, row + y + LANES * i, column + x + LANES * j, sums[i][j]);
}

__device__ __host__ uint64_t tiles_of(uint64_t n)
{
    return (n + LK_GEMM_TILE - 1) / LK_GEMM_TILE;
}

__global__ void __launch_bounds__(LK_BLOCK) gemm_kernel(const __grid_constant__ lk_gemm gemm)
{
    __shared__ tiles shared;
    uint64_t across = tiles_of(gemm.columns), all = across * tiles_of(gemm.rows);

    for (uint64_t tile = blockIdx.x; tile < all; tile += gridDim.x)
        make_tile(gemm, shared, tile / across * LK_GEMM_TILE, tile % across * LK_GEMM_TILE);
}

__global__ void __launch_bounds__(LK_GEMM_GROUP)
    pointers_kernel(const __grid_constant__ lk_pointers_launch launch)
{
    if (threadIdx.x < launch.count)
        launch.to[threadIdx.x] = const_cast<void *>(launch.values[threadIdx.x]);
}

} // namespace

extern "C" int lk_run_gemm(const lk_gemm *gemm, void *stream)
{
    void *args[] = { const_cast<lk_gemm *>(gemm) };
    uint64_t all = tiles_of(gemm->columns) * tiles_of(gemm->rows);

    return cudaLaunchKernel(reinterpret_cast<const void *>(gemm_kernel),
                            dim3(static_cast<unsigned>(all < MAX_BLOCKS ? all : MAX_BLOCKS)),
                            dim3(LK_BLOCK), args, 0, static_cast<cudaStream_t>(stream));
}

extern "C" int lk_run_pointers(const lk_pointers_launch *launch, void *stream)
{
    void *args[] = { const_cast<lk_pointers_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(pointers_kernel), dim3(1),
                            dim3(LK_GEMM_GROUP), args, 0, static_cast<cudaStream_t>(stream));
}

extern "C" int lk_load_gemm(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(gemm_kernel),
                              reinterpret_cast<const void *>(pointers_kernel) };

    return load_kernels(kernels, 2);
}
