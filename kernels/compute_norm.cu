/* SPDX-License-Identifier: Apache-2.0
 *
 * Norms on the device. Aligned rows are read once (compute_norm_forms.cuh); the others and longer ones are read for
 * each step, by one block per row. Backward: a block takes every so many rows and adds up its part of dgamma and dbeta on
 * the way, in registers, or in shared memory if it fits, else in the workspace; a second launch adds up the blocks'.
 */
#include "kernels/compute_norm_forms.cuh"
#include "kernels/compute_norm_shifted.cuh"

#include <utility>

namespace
{

/* Three blocks of a multiprocessor find room. */
constexpr size_t SHARED_LIMIT = 72 * 1024;

template <lk_width Width>
__global__ void __launch_bounds__(LK_BLOCK, 4)
    norm_forward_kernel(const __grid_constant__ lk_norm_launch launch)
{
    __shared__ float sums[LK_BLOCK];
    uint64_t nth = from_the_end(blockIdx.x, gridDim.x);
    norm_row row = norm_find_row(&launch, nth);
    bool layer = launch.norm.kind == LK_LAYER_NORM;

    wait_for_the_last();
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
        launch.norm.rstd[nth] = found.rstd;
        if (layer)
            launch.norm.mean[nth] = found.shift + found.rest;
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

    wait_for_the_last();
    let_the_next_begin();
    if (launch.partials)
        for (uint64_t i = threadIdx.x; i < floats; i += blockDim.x)
            partial[i] = 0;
    __syncthreads();
    for (uint64_t r = blockIdx.x; r < launch.norm.rows; r += gridDim.x) {
        norm_back_row row = norm_find_back(&launch, from_the_end(r, launch.norm.rows));
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

/* 32 columns a block, LK_NORM_PARTS threads each. Rows of the grid: dgamma, dbeta, other sums, as far as they are wanted. */
__global__ void __launch_bounds__(32 * LK_NORM_PARTS)
    norm_columns_kernel(const __grid_constant__ lk_norm_launch launch)
{
    __shared__ float parts[LK_NORM_PARTS][32];
    bool also = launch.also.out && blockIdx.y + 1 == gridDim.y;
    bool beta = blockIdx.y == 1 || !launch.backward.dgamma;
    float *out = also ? launch.also.out : beta ? launch.backward.dbeta : launch.backward.dgamma;
    uint64_t columns = also ? launch.also.columns : launch.norm.columns;
    unsigned mine = threadIdx.x % 32, part = threadIdx.x / 32;
    uint64_t column = uint64_t{ blockIdx.x } * 32 + mine;
    float all[LK_NORM_PARTS];

    wait_for_the_last();
    if (column < columns)
        parts[part][mine] = also ? norm_also_part(&launch.also, column, part)
                                 : norm_column_part(&launch, column, beta, part);
    __syncthreads();
    if (part || column >= columns)
        return;
    for (int i = 0; i < LK_NORM_PARTS; i++)
        all[i] = parts[i][mine];
    out[column] = norm_column_sum(all);
}

const norm_function general_forward[2] = { norm_forward_kernel<LK_SINGLE>,
                                           norm_forward_kernel<LK_WHOLE> };

const norm_function general_backward[2][2] = {
    {norm_backward_kernel<LK_SINGLE, false>, norm_backward_kernel<LK_SINGLE, true>},
    { norm_backward_kernel<LK_WHOLE, false>, norm_backward_kernel<LK_WHOLE,  true>},
};

/* Of all classes: forward without and with a mean, backward without and with a mean or dbeta; each without and with a
 * residual. */
struct norm_table {
    norm_kernel kernels[NORM_CLASS_COUNT];
};

#ifdef LK_COMPUTE_VARIANTS
int forward_form = -1, backward_form = -1; /* -1: the product's; set between launches */

template <norm_forward_form Form, bool Layer, bool Residual, size_t... I>
constexpr norm_table form_forward(std::index_sequence<I...>)
{
    return { { choose_forward<Form, NORM_CLASSES[I], Layer, Residual>()... } };
}

template <norm_backward_form Form, bool Full, bool Residual, size_t... I>
constexpr norm_table form_backward(std::index_sequence<I...>)
{
    return { { choose_backward<Form, NORM_CLASSES[I], Full, Residual>()... } };
}
#endif

template <bool Layer, bool Residual, size_t... I>
constexpr norm_table make_forward(std::index_sequence<I...>)
{
    return { { choose_forward<NORM_FORWARD_FORM[Layer][Residual][I], NORM_CLASSES[I], Layer,
                              Residual>()... } };
}

template <bool Full, bool Residual, size_t... I>
constexpr norm_table make_backward(std::index_sequence<I...>)
{
    return { { choose_backward<NORM_BACKWARD_FORM[I], NORM_CLASSES[I], Full, Residual>()... } };
}

/* Of devices on which a form does not find room. */
template <bool Layer, bool Residual, size_t... I>
constexpr norm_table rows_forward(std::index_sequence<I...>)
{
    return { { choose_forward_rows<NORM_CLASSES[I], Layer>()... } };
}

/* Without y. */
template <bool Layer, bool Residual, size_t... I>
constexpr norm_table statistics_forward(std::index_sequence<I...>)
{
    return { { choose_forward<statistics_form(Layer, NORM_CLASSES[I]), NORM_CLASSES[I], Layer,
                              Residual>()... } };
}

/* Of few rows. */
template <bool Layer, bool Residual, size_t... I>
constexpr norm_table few_forward(std::index_sequence<I...>)
{
    return { { choose_forward<FORWARD_ROWS_WIDE, NORM_CLASSES[I], Layer, Residual>()... } };
}

template <bool Full, bool Residual, size_t... I>
constexpr norm_table rows_backward(std::index_sequence<I...>)
{
    return { { choose_backward_rows<NORM_CLASSES[I], Full>()... } };
}

template <bool Full, bool Residual, size_t... I>
constexpr norm_table again_backward(std::index_sequence<I...>)
{
    return { { choose_backward_again<NORM_CLASSES[I], Full, Residual>()... } };
}

using all_classes = std::make_index_sequence<NORM_CLASS_COUNT>;

#define NORM_TABLES(make)                                                        \
    {                                                                            \
        { make<false, false>(all_classes{}), make<false, true>(all_classes{}) }, \
        {                                                                        \
            make<true, false>(all_classes{}), make<true, true>(all_classes{})    \
        }                                                                        \
    }

const norm_table forward_tables[2][2] = NORM_TABLES(make_forward);
const norm_table backward_tables[2][2] = NORM_TABLES(make_backward);
const norm_table forward_few_tables[2][2] = NORM_TABLES(few_forward);
const norm_table statistics_tables[2][2] = NORM_TABLES(statistics_forward);
const norm_table forward_rows_tables[2][2] = NORM_TABLES(rows_forward);
const norm_table backward_rows_tables[2][2] = NORM_TABLES(rows_backward);
const norm_table backward_again_tables[2][2] = NORM_TABLES(again_backward);

#ifdef LK_COMPUTE_VARIANTS
#define FORM_TABLES(make, form)                                                              \
    {                                                                                        \
        { make<form, false, false>(all_classes{}), make<form, false, true>(all_classes{}) }, \
        {                                                                                    \
            make<form, true, false>(all_classes{}), make<form, true, true>(all_classes{})    \
        }                                                                                    \
    }

const norm_table forward_forms[NORM_FORWARD_FORMS][2][2] = {
    FORM_TABLES(form_forward, FORWARD_ROWS),      FORM_TABLES(form_forward, FORWARD_RING),
    FORM_TABLES(form_forward, FORWARD_ROWS_MORE), FORM_TABLES(form_forward, FORWARD_ROWS_WIDE),
    FORM_TABLES(form_forward, FORWARD_ROWS_HELD), FORM_TABLES(form_forward, FORWARD_ROWS_NARROW)
};
const norm_table backward_forms[NORM_BACKWARD_FORMS][2][2] = {
    FORM_TABLES(form_backward, BACKWARD_ROWS), FORM_TABLES(form_backward, BACKWARD_RING)
};
#endif

const norm_kernel *find_class(const norm_table &table, const norm_table &rows, unsigned nth)
{
    return device_has(table.kernels[nth].shared) ? &table.kernels[nth] : &rows.kernels[nth];
}

/* The number of the class of a launch's rows; NORM_CLASS_COUNT: none, the general kernel serves them. */
unsigned find_nth(const lk_norm_launch *launch)
{
    for (unsigned i = 0; launch->wide && i < NORM_CLASS_COUNT; i++)
        if (launch->norm.columns <= NORM_CLASSES[i])
            return i;
    return NORM_CLASS_COUNT;
}

/* NULL: none. */
const norm_kernel *find_kernel(const lk_norm_launch *launch, const norm_table &table,
                               const norm_table &rows)
{
    unsigned nth = find_nth(launch);

    return nth < NORM_CLASS_COUNT ? find_class(table, rows, nth) : nullptr;
}

/* The product's. */
const norm_kernel *product_forward(const lk_norm_launch *launch)
{
    bool layer = launch->norm.kind == LK_LAYER_NORM, residual = launch->forward.residual;
    const norm_table &rows = forward_rows_tables[layer][residual];
    unsigned nth = find_nth(launch);

    if (nth == NORM_CLASS_COUNT)
        return nullptr;
    if (!launch->forward.y && !launch->like_y)
        return &statistics_tables[layer][residual].kernels[nth];
    if (launch->norm.rows <= NORM_FEW[nth])
        return &forward_few_tables[layer][residual].kernels[nth];
    const norm_kernel *found = find_class(forward_tables[layer][residual], rows, nth);

    return launch->norm.rows < NORM_ROUNDS * found->blocks * found->rows ? &rows.kernels[nth]
                                                                         : found;
}

const norm_kernel *find_forward(const lk_norm_launch *launch)
{
#ifdef LK_COMPUTE_VARIANTS
    bool layer = launch->norm.kind == LK_LAYER_NORM, residual = launch->forward.residual;

    if (forward_form >= 0)
        return find_kernel(launch, forward_forms[forward_form][layer][residual],
                           forward_rows_tables[layer][residual]);
#endif
    return product_forward(launch);
}

const norm_kernel *find_backward(const lk_norm_launch *launch)
{
    bool full = launch->norm.kind == LK_LAYER_NORM || launch->backward.dbeta;
    bool residual = launch->backward.ds;
    const norm_table *table = &backward_tables[full][residual];

    if (launch->forward.y) /* lk_norm_makes_y() has said so */
        return &backward_again_tables[full][residual].kernels[find_nth(launch)];

#ifdef LK_COMPUTE_VARIANTS
    if (backward_form >= 0)
        table = &backward_forms[backward_form][full][residual];
#endif
    return find_kernel(launch, *table, backward_rows_tables[full][residual]);
}

int run(norm_function function, const lk_norm_launch *launch, dim3 grid, unsigned threads,
        size_t shared, void *stream)
{
    void *args[] = { const_cast<lk_norm_launch *>(launch) };

    return launch_early(reinterpret_cast<const void *>(function), args, grid, threads, shared,
                        stream);
}

/* Rows that are not aligned, but lie alike in x and y. */
const norm_kernel shifted_kernels[2][2] = {
    {{ SHIFTED_COLUMNS<128, 3>, norm_forward_shifted<128, 3, false>, 128, 1, 132 * 8, 0 },
     { SHIFTED_COLUMNS<256, 4>, norm_forward_shifted<256, 4, false>, 256, 1, 132 * 3, 0 }},
    { { SHIFTED_COLUMNS<128, 3>, norm_forward_shifted<128, 3, true>, 128, 1, 132 * 8, 0 },
     { SHIFTED_COLUMNS<256, 4>, norm_forward_shifted<256, 4, true>, 256, 1, 132 * 3, 0 } }
};

const norm_kernel *find_shifted_kernel(const lk_norm_launch *launch)
{
    const struct lk_norm_forward *f = &launch->forward;
    bool alike = !f->y ||
                 ((reinterpret_cast<uintptr_t>(f->x) ^ reinterpret_cast<uintptr_t>(f->y)) % 16 ==
                      0 &&
                  (f->x_stride ^ f->y_stride) % 8 == 0);

    for (const norm_kernel &each : shifted_kernels[launch->norm.kind == LK_LAYER_NORM])
        if (alike && !f->residual && !f->sum && launch->norm.columns <= each.columns)
            return device_has(shifted_bytes(launch->norm.columns)) ? &each : nullptr;
    return nullptr;
}

unsigned count_blocks(const norm_kernel &kernel, uint64_t rows)
{
    uint64_t blocks = (rows + kernel.rows - 1) / kernel.rows;

    return static_cast<unsigned>(kernel.blocks && kernel.blocks < blocks ? kernel.blocks : blocks);
}

int run_kernel(const norm_kernel &kernel, const lk_norm_launch *launch, unsigned blocks,
               void *stream)
{
    int err = 0;

    if (kernel.shared > 40 * 1024) /* with the block's own more than every kernel may have */
        err = cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel.function),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(kernel.shared));
    return err ? err
               : run(kernel.function, launch, dim3(blocks), kernel.threads, kernel.shared, stream);
}

/* The second launch of backward. */
int run_columns(const lk_norm_launch *launch, void *stream)
{
    const struct lk_norm_backward &b = launch->backward;
    uint64_t columns = launch->norm.columns;

    if (launch->also.out && launch->also.columns > columns)
        columns = launch->also.columns;
    return run(norm_columns_kernel, launch,
               dim3(static_cast<unsigned>((columns + 31) / 32),
                    !!b.dgamma + !!b.dbeta + !!launch->also.out),
               32 * LK_NORM_PARTS, 0, stream);
}

int run_general_backward(const lk_norm_launch *launch, void *stream)
{
    uint64_t blocks = launch->partials ? launch->partials : launch->norm.rows;
    size_t shared = launch->partials ? (launch->norm.columns + 7) / 8 * 64 : 0;
    bool fits = shared <= SHARED_LIMIT;
    norm_function function = general_backward[launch->wide][fits];
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
    const norm_kernel *kernel = find_forward(launch);
    norm_kernel shifted;

    if (!kernel && find_shifted_kernel(launch)) {
        shifted = *find_shifted_kernel(launch);
        shifted.shared = shifted_bytes(launch->norm.columns);
        kernel = &shifted;
    }
    if (kernel)
        return run_kernel(*kernel, launch, count_blocks(*kernel, launch->norm.rows), stream);
    return run(general_forward[launch->wide], launch,
               dim3(static_cast<unsigned>(launch->norm.rows)), lk_row_threads(launch->norm.columns),
               0, stream);
}

extern "C" int lk_norm_makes_y(uint64_t columns, int residual)
{
    lk_norm_launch launch = {};

    launch.norm.columns = columns;
    launch.wide = 1;
    if (columns > NORM_AGAIN_MOST)
        return 0;
    unsigned nth = find_nth(&launch);
    const norm_kernel &kernel = backward_again_tables[1][!!residual].kernels[nth];

    return kernel.function && device_has(kernel.shared) &&
           device_has(backward_again_tables[0][!!residual].kernels[nth].shared);
}

extern "C" int lk_run_norm_backward(const lk_norm_launch *launch, void *stream)
{
    const norm_kernel *kernel = find_backward(launch);
    lk_norm_launch own = *launch;
    int err = 0;

    if (kernel && launch->norm.rows) {
        unsigned blocks = count_blocks(*kernel, launch->norm.rows);

        own.partials = launch->partials ? blocks : 0;
        err = run_kernel(*kernel, &own, blocks, stream);
    } else if (launch->norm.rows) {
        err = run_general_backward(launch, stream);
    }
    if (err || (!launch->backward.dgamma && !launch->backward.dbeta))
        return err;
    return run_columns(&own, stream);
}

#ifdef LK_COMPUTE_VARIANTS
extern "C" LK_API const char *lk_variants_norm_forward(int form)
{
    forward_form = form;
    return form >= 0 && form < NORM_FORWARD_FORMS ? NORM_FORWARD_NAMES[form] : nullptr;
}

extern "C" LK_API const char *lk_variants_norm_backward(int form)
{
    backward_form = form;
    return form >= 0 && form < NORM_BACKWARD_FORMS ? NORM_BACKWARD_NAMES[form] : nullptr;
}
#endif

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

    err = err ? err
              : find_whether_kernels_wait(reinterpret_cast<const void *>(norm_columns_kernel));
    for (unsigned i = 0; i < 4; i++) {
        const void *shifted[] = { reinterpret_cast<const void *>(
            shifted_kernels[i / 2][i % 2].function) };

        err = err ? err : load_kernels(shifted, 1);
    }
    for (unsigned i = 0; i < 4 * NORM_CLASS_COUNT; i++) {
        unsigned c = i / 4, one = i / 2 % 2, two = i % 2;
        const void *ours[] = {
            reinterpret_cast<const void *>(
                find_class(forward_tables[one][two], forward_rows_tables[one][two], c)->function),
            reinterpret_cast<const void *>(forward_rows_tables[one][two].kernels[c].function),
            reinterpret_cast<const void *>(forward_few_tables[one][two].kernels[c].function),
            reinterpret_cast<const void *>(statistics_tables[one][two].kernels[c].function),
            reinterpret_cast<const void *>(
                find_class(backward_tables[one][two], backward_rows_tables[one][two], c)->function),
            reinterpret_cast<const void *>(backward_again_tables[one][two].kernels[c].function)
        };

        err = err ? err : load_kernels(ours, 5 + (NORM_CLASSES[c] <= NORM_AGAIN_MOST));
    }
    return err;
}
