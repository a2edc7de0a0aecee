/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_fold.h"
#include "kernels/compute_gemm.h"
#include "kernels/compute_host.h"

static uint64_t type_bytes(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

static void use_matrix(const void *base, uint64_t stride, uint64_t rows, uint64_t columns,
                       enum lk_type type, bool write)
{
    if (base && rows && columns)
        host_use(base, ((rows - 1) * stride + columns) * type_bytes(type), write);
}

static void use_gemm(const struct lk_gemm *g)
{
    uint64_t a_rows = g->a_transposed ? g->depth : g->rows;
    uint64_t b_rows = g->b_transposed ? g->columns : g->depth;

    use_matrix(g->a, g->a_stride, a_rows, g->a_transposed ? g->rows : g->depth, g->type, false);
    use_matrix(g->b, g->b_stride, b_rows, g->b_transposed ? g->depth : g->columns, g->type, false);
    if (g->beta != 0)
        use_matrix(g->c, g->c_stride, g->rows, g->columns, g->out_type, false);
    use_matrix(g->bias, g->columns, 1, g->columns, g->out_type, false);
    use_matrix(g->d, g->d_stride, g->rows, g->columns, g->out_type, true);
}

static void run_gemm(void *arg)
{
    const struct lk_gemm *gemm = arg;

    use_gemm(gemm);
    for (uint64_t row = 0; row < gemm->rows; row++) {
        for (uint64_t column = 0; column < gemm->columns; column++) {
            float sum = 0;

            for (uint64_t k = 0; k < gemm->depth; k++)
                sum += gemm_a(gemm, row, k) * gemm_b(gemm, k, column);
            gemm_write(gemm, row, column, sum);
        }
    }
}

int lk_run_gemm(const struct lk_gemm *gemm, void *stream)
{
    return lk_compute_submit(stream, "lk_gemm", run_gemm, gemm, sizeof(*gemm));
}

static void run_pointers(void *arg)
{
    const struct lk_pointers_launch *launch = arg;

    host_use(launch->to, launch->count * sizeof(void *), true);
    for (uint32_t i = 0; i < launch->count; i++)
        launch->to[i] = (void *)launch->values[i];
}

int lk_run_pointers(const struct lk_pointers_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_pointers", run_pointers, launch, sizeof(*launch));
}

static void run_fold_forward(void *arg)
{
    const struct lk_fold_launch *launch = arg;
    const struct lk_fold *fold = &launch->fold;

    use_matrix(fold->weight, fold->columns, fold->rows, fold->columns, fold->weight_type, false);
    use_matrix(fold->gamma, 0, 1, fold->columns, fold->gamma_type, false);
    use_matrix(launch->folded, fold->columns, fold->rows, fold->columns, LK_BF16, true);
    for (uint64_t row = 0; row < fold->rows; row++)
        fold_forward_thread(launch, row, 0, 1, launch->wide ? LK_WHOLE : LK_SINGLE);
}

/* A block's row of partial sums, in the order of the device. */
static void fold_block(const struct lk_fold_launch *launch, uint64_t nth, uint64_t of)
{
    uint64_t groups = fold_groups(launch->fold.columns);
    enum lk_width width = launch->wide ? LK_WHOLE : LK_SINGLE;

    for (uint64_t group = 0; group < groups; group++) {
        float slices[LK_FOLD_SLICES][8] = { { 0 } }, parts[LK_FOLD_SLICES];

        for (uint64_t s = 0; s < LK_FOLD_SLICES; s++)
            fold_backward_rows(launch, group, nth * LK_FOLD_SLICES + s, of * LK_FOLD_SLICES, width,
                               slices[s]);
        for (uint64_t i = 0; launch->partials && i < 8; i++) {
            for (uint64_t s = 0; s < LK_FOLD_SLICES; s++)
                parts[s] = slices[s][i];
            ((float *)launch->grads.workspace)[(nth * groups + group) * 8 + i] = fold_column_sum(
                parts);
        }
    }
}

static void run_fold_backward(void *arg)
{
    const struct lk_fold_launch *launch = arg;
    const struct lk_fold *fold = &launch->fold;
    const struct lk_fold_grads *grads = &launch->grads;
    uint64_t groups = fold_groups(fold->columns), blocks = launch->partials;

    if (!blocks)
        blocks = (fold->rows + LK_FOLD_SLICES - 1) / LK_FOLD_SLICES;
    use_matrix(grads->dfolded, launch->stride, fold->rows, fold->columns, grads->grad_type, false);
    if (grads->dweight) {
        use_matrix(fold->gamma, 0, 1, fold->columns, fold->gamma_type, false);
        use_matrix(grads->dweight, fold->columns, fold->rows, fold->columns, grads->grad_type,
                   true);
    }
    if (launch->partials) {
        use_matrix(fold->weight, fold->columns, fold->rows, fold->columns, fold->weight_type,
                   false);
        host_use(grads->workspace, launch->partials * groups * 8 * sizeof(float), true);
    }
    for (uint64_t nth = 0; nth < blocks; nth++)
        fold_block(launch, nth, blocks);
    if (!grads->dgamma)
        return;
    host_use(grads->dgamma, fold->columns * sizeof(float), true);
    for (uint64_t column = 0; column < fold->columns; column++) {
        float parts[8];

        for (uint64_t part = 0; part < 8; part++)
            parts[part] = fold_column_part(launch, column, part);
        grads->dgamma[column] = fold_column_sum(parts);
    }
}

int lk_run_fold_forward(const struct lk_fold_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_fold_forward", run_fold_forward, launch, sizeof(*launch));
}

int lk_run_fold_backward(const struct lk_fold_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_fold_backward", run_fold_backward, launch,
                             sizeof(*launch));
}

static void run_undo(void *arg)
{
    const struct lk_undo_launch *launch = arg;
    uint32_t threads = lk_row_threads(launch->columns);

    use_matrix(launch->x, launch->x_stride, launch->rows, launch->columns, LK_BF16, false);
    use_matrix(launch->add, launch->add_stride, launch->rows, launch->columns, LK_BF16, false);
    host_use(launch->rstd, launch->rows * 4, false);
    host_use(launch->row_dot, launch->rows * 4, false);
    use_matrix(launch->dx, launch->dx_stride, launch->rows, launch->columns, LK_BF16, true);
    for (uint64_t row = 0; row < launch->rows; row++)
        for (uint32_t t = 0; t < threads; t++)
            undo_thread(launch, row, t, threads, launch->wide ? LK_WHOLE : LK_SINGLE);
}

int lk_run_undo(const struct lk_undo_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_undo", run_undo, launch, sizeof(*launch));
}
