/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_host.h"
#include "kernels/compute_norm.h"
#include "kernels/compute_swiglu.h"

/* As block_sum() of the device. */
static float tree(float *sums, uint32_t threads)
{
    for (uint32_t half = threads / 2; half; half /= 2)
        for (uint32_t t = 0; t < half; t++)
            sums[t] += sums[t + half];
    return sums[0];
}

static void use_matrix(const void *base, uint64_t stride, uint64_t rows, uint64_t columns,
                       bool write)
{
    if (rows)
        host_use(base, ((rows - 1) * stride + columns) * 2, write);
}

static void use_optional_matrix(const void *base, uint64_t stride, uint64_t rows, uint64_t columns,
                                bool write)
{
    if (base)
        use_matrix(base, stride, rows, columns, write);
}

static void use_swiglu(const struct lk_swiglu_launch *launch)
{
    const struct lk_swiglu *s = &launch->swiglu;

    use_matrix(s->z, s->z_stride, s->rows, 2 * s->columns, false);
    host_use_optional(s->row_scale, s->rows * 4, false);
    if (launch->threshold)
        host_use_optional(s->rng.device_offset, 8, false);
    use_optional_matrix(launch->grads.h, launch->grads.h_stride, s->rows, s->columns, true);
}

static void run_swiglu_forward(void *arg)
{
    const struct lk_swiglu_launch *launch = arg;
    uint32_t threads = lk_row_threads(launch->swiglu.columns);
    enum lk_width width = launch->wide ? LK_WHOLE : LK_SINGLE;

    use_swiglu(launch);
    for (uint64_t r = 0; r < launch->swiglu.rows; r++) {
        struct swiglu_row row = swiglu_find_row(launch, r);

        for (uint32_t t = 0; t < threads; t++)
            swiglu_forward_thread(&row, t, threads, width);
    }
}

static void run_swiglu_backward(void *arg)
{
    const struct lk_swiglu_launch *launch = arg;
    const struct lk_swiglu *s = &launch->swiglu;
    uint32_t threads = lk_row_threads(s->columns);
    enum lk_width width = launch->wide ? LK_WHOLE : LK_SINGLE;
    float dots[LK_BLOCK];

    use_swiglu(launch);
    use_matrix(launch->grads.dh, launch->grads.dh_stride, s->rows, s->columns, false);
    use_matrix(launch->grads.dz, launch->grads.dz_stride, s->rows, 2 * s->columns, true);
    host_use_optional(launch->grads.row_dot, s->rows * 4, true);
    for (uint64_t r = 0; r < s->rows; r++) {
        struct swiglu_row row = swiglu_find_back_row(launch, r);

        for (uint32_t t = 0; t < threads; t++)
            dots[t] = swiglu_backward_thread(&row, t, threads, width);
        if (launch->grads.row_dot)
            launch->grads.row_dot[r] = tree(dots, threads);
    }
}

int lk_run_swiglu_forward(const struct lk_swiglu_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_swiglu_forward", run_swiglu_forward, launch,
                             sizeof(*launch));
}

int lk_run_swiglu_backward(const struct lk_swiglu_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_swiglu_backward", run_swiglu_backward, launch,
                             sizeof(*launch));
}

static void use_norm(const struct lk_norm *norm, bool write)
{
    uint64_t bytes = norm->columns * (norm->weight_type == LK_FP32 ? 4 : 2);

    host_use_optional(norm->gamma, bytes, false);
    host_use_optional(norm->beta, bytes, false);
    host_use(norm->rstd, norm->rows * 4, write);
    if (norm->kind == LK_LAYER_NORM)
        host_use(norm->mean, norm->rows * 4, write);
}

static void norm_row_forward(const struct lk_norm_launch *launch, uint64_t r)
{
    const struct lk_norm *norm = &launch->norm;
    struct norm_row row = norm_find_row(launch, r);
    uint32_t threads = lk_row_threads(norm->columns);
    enum lk_width width = launch->wide ? LK_WHOLE : LK_SINGLE;
    bool layer = norm->kind == LK_LAYER_NORM;
    struct norm_found found = { .shift = norm_shift(norm, &row) };
    float sums[LK_BLOCK], squares;

    for (uint32_t t = 0; t < threads; t++)
        sums[t] = norm_first_thread(&row, !layer, found.shift, t, threads, width);
    squares = tree(sums, threads);
    if (layer) {
        found.rest = squares / (float)norm->columns;
        for (uint32_t t = 0; t < threads; t++)
            sums[t] = norm_second_thread(&row, found.shift, found.rest, t, threads, width);
        squares = tree(sums, threads);
        norm->mean[r] = found.shift + found.rest;
    }
    found.rstd = norm_rstd(norm, squares);
    norm->rstd[r] = found.rstd;
    for (uint32_t t = 0; row.y && t < threads; t++)
        norm_apply_thread(norm, &row, found, t, threads, width);
}

static void run_norm_forward(void *arg)
{
    const struct lk_norm_launch *launch = arg;
    const struct lk_norm *norm = &launch->norm;
    const struct lk_norm_forward *f = &launch->forward;

    use_norm(norm, true);
    use_matrix(f->x, f->x_stride, norm->rows, norm->columns, false);
    use_optional_matrix(f->residual, f->residual_stride, norm->rows, norm->columns, false);
    use_optional_matrix(f->sum, f->sum_stride, norm->rows, norm->columns, true);
    use_optional_matrix(f->y, f->y_stride, norm->rows, norm->columns, true);
    for (uint64_t r = 0; r < norm->rows; r++)
        norm_row_forward(launch, r);
}

/* y, by the steps of forward: so it has the bits that it had. */
static void norm_row_again(const struct lk_norm_launch *launch, uint64_t r)
{
    const struct lk_norm_backward *b = &launch->backward;
    float mean, rstd;
    struct lk_norm_launch again = {
        .norm = launch->norm,
        .forward = {.x = (const uint16_t *)b->s + r * b->s_stride,
                    .y = (uint16_t *)launch->forward.y + r * launch->forward.y_stride},
        .wide = launch->wide,
    };

    again.norm.rows = 1;
    again.norm.mean = &mean;
    again.norm.rstd = &rstd;
    norm_row_forward(&again, 0);
}

int lk_norm_makes_y(uint64_t columns, int residual)
{
    (void)columns;
    (void)residual;
    return 1;
}

static void norm_row_backward(const struct lk_norm_launch *launch, uint64_t r, float *partial)
{
    const struct lk_norm *norm = &launch->norm;
    struct norm_back_row row = norm_find_back(launch, r);
    uint32_t threads = lk_row_threads(norm->columns);
    enum lk_width width = launch->wide ? LK_WHOLE : LK_SINGLE;
    float plain[LK_BLOCK], product[LK_BLOCK];
    struct norm_sums all;

    for (uint32_t t = 0; t < threads; t++) {
        all = norm_sums_thread(norm, &row, t, threads, width);
        plain[t] = all.plain;
        product[t] = all.product;
    }
    all.plain = tree(plain, threads);
    all.product = tree(product, threads);
    for (uint32_t t = 0; t < threads; t++)
        norm_back_thread(norm, &row, norm_means(norm, all), partial, launch->backward.dbeta != NULL,
                         t, threads, width);
    if (launch->forward.y)
        norm_row_again(launch, r);
}

static void norm_columns(const struct lk_norm_launch *launch, float *out, bool beta)
{
    for (uint64_t column = 0; out && column < launch->norm.columns; column++) {
        float parts[LK_NORM_PARTS];

        for (uint64_t part = 0; part < LK_NORM_PARTS; part++)
            parts[part] = norm_column_part(launch, column, beta, part);
        out[column] = norm_column_sum(parts);
    }
}

static void add_also(const struct lk_column_sums *also)
{
    if (!also->out)
        return;
    if (also->rows)
        host_use(also->partials, also->rows * also->stride * 4, false);
    host_use(also->out, also->columns * 4, true);
    for (uint64_t column = 0; column < also->columns; column++) {
        float parts[LK_NORM_PARTS];

        for (uint64_t part = 0; part < LK_NORM_PARTS; part++)
            parts[part] = norm_also_part(also, column, part);
        also->out[column] = norm_column_sum(parts);
    }
}

static void run_norm_backward(void *arg)
{
    const struct lk_norm_launch *launch = arg;
    const struct lk_norm *norm = &launch->norm;
    const struct lk_norm_backward *b = &launch->backward;
    uint64_t blocks = launch->partials ? launch->partials : norm->rows;
    uint64_t floats = (norm->columns + 7) / 8 * 16;

    use_norm(norm, false);
    use_matrix(b->s, b->s_stride, norm->rows, norm->columns, false);
    use_matrix(b->dy, b->dy_stride, norm->rows, norm->columns, false);
    use_optional_matrix(b->ds, b->ds_stride, norm->rows, norm->columns, false);
    use_matrix(b->dx, b->dx_stride, norm->rows, norm->columns, true);
    use_optional_matrix(launch->forward.y, launch->forward.y_stride, norm->rows, norm->columns,
                        true);
    host_use_optional(b->dgamma, norm->columns * 4, true);
    host_use_optional(b->dbeta, norm->columns * 4, true);
    if (launch->partials) {
        host_use(b->workspace, launch->partials * floats * 4, true);
        memset(b->workspace, 0, launch->partials * floats * 4);
    }
    for (uint64_t block = 0; block < blocks; block++) {
        float *partial = launch->partials ? (float *)b->workspace + block * floats : NULL;

        for (uint64_t r = block; r < norm->rows; r += blocks)
            norm_row_backward(launch, r, partial);
    }
    norm_columns(launch, b->dgamma, false);
    norm_columns(launch, b->dbeta, true);
    add_also(&launch->also);
}

int lk_run_norm_forward(const struct lk_norm_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_norm_forward", run_norm_forward, launch, sizeof(*launch));
}

int lk_run_norm_backward(const struct lk_norm_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_norm_backward", run_norm_backward, launch,
                             sizeof(*launch));
}
