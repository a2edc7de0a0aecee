/* SPDX-License-Identifier: Apache-2.0
 *
 * Norms on the device. Aligned rows stay in registers (compute_norm_rows.cuh); the others and longer ones are read for
 * each step, by one block per row. Backward: a block takes every so many rows and adds up its part of dgamma and dbeta on
 * the way, in registers, or in shared memory if it fits, else in the workspace; a second launch adds up the blocks'.
 */
#include "kernels/compute_norm_rows.cuh"

namespace
{

/* Three blocks of a multiprocessor find room. */
constexpr size_t SHARED_LIMIT = 72 * 1024;

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    norm_forward_kernel(const __grid_constant__ lk_norm_launch launch)
{
    __shared__ float sums[LK_BLOCK];
    norm_row row = norm_find_row(&launch, blockIdx.x);
    bool layer = launch.norm.kind == LK_LAYER_NORM;
    norm_found found = { norm_shift(&launch.norm, &row), 0, 0 };

    __syncthreads(); /* the first element may be overwritten by the sum */
    float squares = block_sum(
        sums, norm_first_thread(&row, !layer, found.shift, threadIdx.x, blockDim.x, Width));

    if (layer) {
        found.rest = squares / static_cast<float>(row.columns);
        squares = block_sum(sums, norm_second_thread(&row, found.shift, found.rest, threadIdx.x,
                                                     blockDim.x, Width));
    }
    found.rstd = norm_rstd(&launch.norm, squares);
    if (threadIdx.x == 0) {
        launch.norm.rstd[blockIdx.x] = found.rstd;
        if (layer)
            launch.norm.mean[blockIdx.x] = found.shift + found.rest;
    }
    if (row.y)
        norm_apply_thread(&launch.norm, &row, found, threadIdx.x, blockDim.x, Width);
}

template <lk_width Width, bool Shared>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    norm_backward_kernel(const __grid_constant__ lk_norm_launch launch)
{
    extern __shared__ float accumulators[];
    __shared__ float sums[LK_BLOCK];
    bool beta = launch.backward.dbeta;
    uint64_t stride = (launch.norm.columns + 7) / 8 * 16, floats = beta ? stride : stride / 2;
    float *workspace = static_cast<float *>(launch.backward.workspace) + blockIdx.x * stride;
    float *partial = Shared ? accumulators : workspace;

    if (launch.partials)
        for (uint64_t i = threadIdx.x; i < floats; i += blockDim.x)
            partial[i] = 0;
    __syncthreads();
    for (uint64_t r = blockIdx.x; r < launch.norm.rows; r += gridDim.x) {
        norm_back_row row = norm_find_back(&launch, r);
        norm_sums all = norm_sums_thread(&launch.norm, &row, threadIdx.x, blockDim.x, Width);

        all.plain = launch.norm.kind == LK_LAYER_NORM ? block_sum(sums, all.plain) : 0;
        all.product = block_sum(sums, all.product);
        norm_back_thread(&launch.norm, &row, norm_means(&launch.norm, all),
                         launch.partials ? partial : nullptr, beta, threadIdx.x, blockDim.x, Width);
    }
    if (!Shared || !launch.partials)
        return;
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < floats; i += blockDim.x)
        workspace[i] = partial[i];
}

/* 32 columns a block, LK_NORM_PARTS threads each; blocks of the second half of the grid make dbeta. */
__global__ void __launch_bounds__(32 * LK_NORM_PARTS)
    norm_columns_kernel(const __grid_constant__ lk_norm_launch launch)
{
    __shared__ float parts[LK_NORM_PARTS][32];
    bool beta = blockIdx.y == 1 || !launch.backward.dgamma;
    float *out = beta ? launch.backward.dbeta : launch.backward.dgamma;
    unsigned mine = threadIdx.x % 32, part = threadIdx.x / 32;
    uint64_t column = uint64_t{ blockIdx.x } * 32 + mine;
    float all[LK_NORM_PARTS];

    if (column < launch.norm.columns)
        parts[part][mine] = norm_column_part(&launch, column, beta, part);
    __syncthreads();
    if (part || column >= launch.norm.columns)
        return;
    for (int i = 0; i < LK_NORM_PARTS; i++)
        all[i] = parts[i][mine];
    out[column] = norm_column_sum(all);
}

using kernel = void (*)(lk_norm_launch);

const kernel general_forward[2] = { norm_forward_kernel<LK_SINGLE>, norm_forward_kernel<LK_WHOLE> };

const kernel general_backward[2][2] = {
    {norm_backward_kernel<LK_SINGLE, false>, norm_backward_kernel<LK_SINGLE, true>},
    { norm_backward_kernel<LK_WHOLE, false>, norm_backward_kernel<LK_WHOLE,  true>},
};

/* The kernels for rows of up to so many columns: forward without and with a mean, backward without and with dbeta. */
struct rows_kernels {
    uint64_t columns;
    unsigned threads, rows; /* of a block */
    kernel forward[2], backward[2];
};

template <unsigned Lanes, unsigned Groups> constexpr rows_kernels make_kernels()
{
    return {
        uint64_t{Lanes }
        * Groups * 8,
        norm_team<Lanes>::threads,
        norm_team<Lanes>::count * 4 / Groups,
        {  norm_forward_rows<Lanes,  Groups, false>, norm_forward_rows<Lanes,  Groups, true> },
        { norm_backward_rows<Lanes, Groups, false>, norm_backward_rows<Lanes, Groups, true> }
    };
}

const rows_kernels kernels_of_rows[] = {
    make_kernels<32, 1>(),  make_kernels<32, 2>(),  make_kernels<32, 4>(),  make_kernels<256, 1>(),
    make_kernels<256, 2>(), make_kernels<256, 4>(), make_kernels<512, 4>(),
};

const rows_kernels *find_rows(const lk_norm_launch *launch)
{
    for (const rows_kernels &each : kernels_of_rows)
        if (launch->wide && launch->norm.columns <= each.columns)
            return &each;
    return nullptr;
}

int run(kernel function, const lk_norm_launch *launch, dim3 grid, unsigned threads, size_t shared,
        void *stream)
{
    void *args[] = { const_cast<lk_norm_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(function), grid, dim3(threads), args,
                            shared, static_cast<cudaStream_t>(stream));
}

int run_general_backward(const lk_norm_launch *launch, void *stream)
{
    uint64_t blocks = launch->partials ? launch->partials : launch->norm.rows;
    size_t shared = launch->partials ? (launch->norm.columns + 7) / 8 * 64 : 0;
    bool fits = shared <= SHARED_LIMIT;
    kernel function = general_backward[launch->wide][fits];
    int err = 0;

    if (fits && shared > 40 * 1024) /* with the block's own sums more than every kernel may have */
        err = cudaFuncSetAttribute(reinterpret_cast<const void *>(function),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_LIMIT);
    return err ? err
               : run(function, launch, dim3(static_cast<unsigned>(blocks)),
                     lk_row_threads(launch->norm.columns), fits ? shared : 0, stream);
}

} // namespace

extern "C" int lk_run_norm_forward(const lk_norm_launch *launch, void *stream)
{
    const rows_kernels *rows = find_rows(launch);
    uint64_t blocks = rows ? (launch->norm.rows + rows->rows - 1) / rows->rows : launch->norm.rows;

    return run(rows ? rows->forward[launch->norm.kind == LK_LAYER_NORM]
                    : general_forward[launch->wide],
               launch, dim3(static_cast<unsigned>(blocks)),
               rows ? rows->threads : lk_row_threads(launch->norm.columns), 0, stream);
}

extern "C" int lk_run_norm_backward(const lk_norm_launch *launch, void *stream)
{
    const rows_kernels *rows = find_rows(launch);
    lk_norm_launch own = *launch;
    bool gamma = launch->backward.dgamma, beta = launch->backward.dbeta;
    int err = 0;

    if (rows && launch->norm.rows) {
        uint64_t blocks = (launch->norm.rows + rows->rows - 1) / rows->rows;

        blocks = blocks < LK_NORM_PARTIALS ? blocks : LK_NORM_PARTIALS;
        own.partials = launch->partials ? static_cast<uint32_t>(blocks) : 0;
        err = run(rows->backward[beta], &own, dim3(static_cast<unsigned>(blocks)), rows->threads, 0,
                  stream);
    } else if (launch->norm.rows) {
        err = run_general_backward(launch, stream);
    }
    if (err || (!gamma && !beta))
        return err;
    return run(norm_columns_kernel, &own,
               dim3(static_cast<unsigned>((launch->norm.columns + 31) / 32), gamma + beta),
               32 * LK_NORM_PARTS, 0, stream);
}

extern "C" int lk_load_norm(void)
{
    const void *general[] = { reinterpret_cast<const void *>(general_forward[0]),
                              reinterpret_cast<const void *>(general_forward[1]),
                              reinterpret_cast<const void *>(general_backward[0][0]),
                              reinterpret_cast<const void *>(general_backward[0][1]),
                              reinterpret_cast<const void *>(general_backward[1][0]),
                              reinterpret_cast<const void *>(general_backward[1][1]),
                              reinterpret_cast<const void *>(norm_columns_kernel) };
    int err = load_kernels(general, sizeof(general) / sizeof(*general));

    for (const rows_kernels &each : kernels_of_rows) {
        const void *ours[] = { reinterpret_cast<const void *>(each.forward[0]),
                               reinterpret_cast<const void *>(each.forward[1]),
                               reinterpret_cast<const void *>(each.backward[0]),
                               reinterpret_cast<const void *>(each.backward[1]) };

        err = err ? err : load_kernels(ours, 4);
    }
    return err;
}
