/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_cases.h"
#include "tests/kernels/compute_rows.h"
#include "tests/kernels/reference.h"

#include <errno.h>
#include <math.h>
#include <string.h>

struct shape {
    uint64_t rows, columns;
    uint64_t pad;
    size_t shift;
};

static const struct shape shapes[] = {
    {1,     1,     0,  0},
    { 3,    8,     0,  0},
    { 5,    257,   0,  0},
    { 7,    264,   8,  0},
    { 2,    2048,  0,  0},
    { 3,    2056,  0,  1},
    { 2,    5000,  24, 0},
    { 4,    64,    3,  0},
    { 1100, 16,    0,  0},
    { 4,    250,   6,  0},
    { 9,    512,   0,  0},
    { 3,    1024,  0,  0},
    { 270,  4104,  0,  0},
    { 5,    4096,  0,  0},
    { 3,    8192,  8,  0},
    { 2,    9000,  0,  0},
    { 2,    16400, 0,  0},
};

enum norm_matrix {
    X,
    RESIDUAL,
    SUM,
    Y,
    DY,
    DS,
    DX,
    MATRICES,
};

struct norm_case {
    const struct compute_target *t;
    struct lk_norm norm;
    bool residual;
    struct rows m[MATRICES];
    struct memory gamma, beta, mean, rstd, dgamma, dbeta, workspace;
};

static struct memory make_weights(const struct compute_target *t, uint64_t n, unsigned int kind,
                                  uint64_t *state)
{
    bool half = kind & 2;
    size_t bytes = half ? 2 : 4;
    struct memory memory = memory_new(t, n * bytes, kind & 32 ? bytes : 0);

    for (uint64_t i = 0; i < n; i++) {
        double value = 1 + random_unit(state);

        if (half)
            ((uint16_t *)memory.near)[i] = to_bf16(value);
        else
            ((float *)memory.near)[i] = (float)value;
    }
    memory_up(&memory);
    return memory;
}

static struct memory make_floats(const struct compute_target *t, uint64_t n)
{
    struct memory memory = memory_new(t, n * 4, 0);

    memory_up(&memory);
    return memory;
}

/* kind: bit 0 LayerNorm, bit 1 bf16 weights, bit 2 weights around 0, bit 3 no weights, bit 4 residual, bit 5
 * weights that are not aligned to 16 bytes. */
static struct norm_case *make_case(const struct compute_target *t, const struct shape *shape,
                                   enum filling filling, unsigned int kind, uint64_t *state)
{
    struct norm_case *c = calloc(1, sizeof(*c));
    uint64_t n = shape->columns;

    CHECK(c);
    c->t = t;
    c->residual = kind & 16;
    for (int i = 0; i < MATRICES; i++) {
        c->m[i] = rows_new(t, shape->rows, n, n + shape->pad, shape->shift);
        if (i != X && (i == RESIDUAL || i == DY || i == DS))
            rows_fill(&c->m[i], FILL_RANDOM, state);
        else if (i == X)
            rows_fill(&c->m[i], filling, state);
        else
            memory_up(&c->m[i].memory);
    }
    c->gamma = make_weights(t, n, kind, state);
    c->beta = make_weights(t, n, kind, state);
    c->mean = make_floats(t, shape->rows);
    c->rstd = make_floats(t, shape->rows);
    c->dgamma = make_floats(t, n);
    c->dbeta = make_floats(t, n);
    c->norm = (struct lk_norm){
        .kind = kind & 1 ? LK_LAYER_NORM : LK_RMS_NORM,
        .rows = shape->rows,
        .columns = n,
        .eps = 1e-5,
        .weight_type = kind & 2 ? LK_BF16 : LK_FP32,
        .gamma = kind & 8 ? NULL : c->gamma.far,
        .beta = kind & 8 ? NULL : c->beta.far,
        .gamma_offset = kind & 4 ? 1 : 0,
        .mean = kind & 1 ? (float *)c->mean.far : NULL,
        .rstd = (float *)c->rstd.far,
    };
    c->workspace = memory_new(t, t->lib.lk_norm_workspace_bytes(&c->norm), 0);
    memory_up(&c->workspace);
    return c;
}

static void drop_case(struct norm_case *c)
{
    for (int i = 0; i < MATRICES; i++)
        memory_free(&c->m[i].memory);
    memory_free(&c->gamma);
    memory_free(&c->beta);
    memory_free(&c->mean);
    memory_free(&c->rstd);
    memory_free(&c->dgamma);
    memory_free(&c->dbeta);
    memory_free(&c->workspace);
    free(c);
}

static double weight(const struct norm_case *c, const struct memory *memory, bool is_gamma,
                     uint64_t i)
{
    if (c->norm.gamma == NULL)
        return is_gamma;
    return (c->norm.weight_type == LK_BF16 ? from_bf16(((uint16_t *)memory->near)[i])
                                           : (double)((float *)memory->near)[i]) +
           (is_gamma ? (double)c->norm.gamma_offset : 0);
}

/* Statistics of a row of s, in doubles. */
static void reference_row(const struct norm_case *c, const struct rows *s, uint64_t r, double *mean,
                          double *rstd)
{
    double n = (double)c->norm.columns, sum = 0, squares = 0;

    for (uint64_t j = 0; j < c->norm.columns; j++)
        sum += rows_get(s, r, j);
    *mean = c->norm.kind == LK_LAYER_NORM ? sum / n : 0;
    for (uint64_t j = 0; j < c->norm.columns; j++)
        squares += pow(rows_get(s, r, j) - *mean, 2);
    *rstd = 1 / sqrt(squares / n + c->norm.eps);
}

/* What a normalised value is a difference of: sums are taken around the first element. */
static double row_size(const struct norm_case *c, const struct rows *s, uint64_t r, double mean)
{
    return c->norm.kind == LK_LAYER_NORM ? fabs(mean) + fabs(rows_get(s, r, 0) - mean) : 0;
}

/* How far the normalised value of an element may be off. */
static double hat_bound(double hat, double size, double rstd)
{
    return 0x1p-18 * fabs(hat) + 0x1p-22 * size * rstd;
}

static void check_forward(const struct norm_case *c, const struct rows *s)
{
    for (uint64_t r = 0; r < c->norm.rows; r++) {
        double mean, rstd, size_of_row;

        reference_row(c, s, r, &mean, &rstd);
        size_of_row = row_size(c, s, r, mean);
        CHECK(near_float((double)((float *)c->rstd.near)[r], rstd, 0x1p-18 * rstd));
        if (c->norm.kind == LK_LAYER_NORM)
            CHECK(near_float((double)((float *)c->mean.near)[r], mean,
                             0x1p-22 * (size_of_row + 1 / rstd)));
        for (uint64_t j = 0; j < c->norm.columns; j++) {
            double hat = (rows_get(s, r, j) - mean) * rstd;
            double gamma = weight(c, &c->gamma, true, j), beta = weight(c, &c->beta, false, j);

            CHECK(near_bf16(rows_get(&c->m[Y], r, j), hat * gamma + beta,
                            hat_bound(hat, size_of_row, rstd) * fabs(gamma) +
                                0x1p-20 * (fabs(hat * gamma) + fabs(beta))));
        }
    }
}

static void run_forward(struct norm_case *c)
{
    struct lk_norm_forward forward = {
        .x = c->m[X].memory.far,
        .x_stride = c->m[X].stride,
        .residual = c->residual ? c->m[RESIDUAL].memory.far : NULL,
        .residual_stride = c->m[RESIDUAL].stride,
        .sum = c->residual ? c->m[SUM].memory.far : NULL,
        .sum_stride = c->m[SUM].stride,
        .y = c->m[Y].memory.far,
        .y_stride = c->m[Y].stride,
    };

    CHECK(c->t->lib.lk_norm_forward(&c->norm, &forward, NULL) == 0);
    memory_down(&c->mean);
    memory_down(&c->rstd);
    memory_down(&c->m[SUM].memory);
    memory_down(&c->m[Y].memory);
}

/* A row's dx; what it adds to the sums over rows, with their terms' magnitudes. */
static void check_row_backward(const struct norm_case *c, const struct rows *s, uint64_t r,
                               double *gammas, double *betas, double *sizes)
{
    uint64_t n = c->norm.columns;
    double mean, rstd, plain = 0, product = 0, plain_size = 0, product_size = 0, size_of_row;

    reference_row(c, s, r, &mean, &rstd);
    size_of_row = row_size(c, s, r, mean);
    for (uint64_t j = 0; j < n; j++) {
        double d = rows_get(&c->m[DY], r, j) * weight(c, &c->gamma, true, j);
        double hat = (rows_get(s, r, j) - mean) * rstd;

        plain += c->norm.kind == LK_LAYER_NORM ? d / (double)n : 0;
        plain_size += c->norm.kind == LK_LAYER_NORM ? fabs(d) / (double)n : 0;
        product += d * hat / (double)n;
        product_size += fabs(d) * (fabs(hat) + 0x1p14 * hat_bound(hat, size_of_row, rstd)) /
                        (double)n;
    }
    for (uint64_t j = 0; j < n; j++) {
        double dy = rows_get(&c->m[DY], r, j), d = dy * weight(c, &c->gamma, true, j);
        double hat = (rows_get(s, r, j) - mean) * rstd, ds = rows_get(&c->m[DS], r, j);
        double hat_size = fabs(hat) + 0x1p14 * hat_bound(hat, size_of_row, rstd);
        double size = rstd * (fabs(d) + plain_size + hat_size * product_size) + fabs(ds);

        CHECK(near_bf16(rows_get(&c->m[DX], r, j), rstd * (d - plain - hat * product) + ds,
                        0x1p-14 * size));
        gammas[j] += dy * hat;
        sizes[j] += fabs(dy) * hat_size;
        betas[j] += dy;
        sizes[n + j] += fabs(dy);
    }
}

/* wanted: bit 0 dgamma, bit 1 dbeta; the other one is left alone. */
static void check_backward(struct norm_case *c, const struct rows *s, unsigned int wanted)
{
    uint64_t n = c->norm.columns;
    double *gammas = calloc(n, sizeof(*gammas)), *betas = calloc(n, sizeof(*betas)),
           *sizes = calloc(2 * n, sizeof(*sizes));
    struct lk_norm_backward backward = {
        .s = s->memory.far,
        .s_stride = s->stride,
        .dy = c->m[DY].memory.far,
        .dy_stride = c->m[DY].stride,
        .ds = c->m[DS].memory.far,
        .ds_stride = c->m[DS].stride,
        .dx = c->m[DX].memory.far,
        .dx_stride = c->m[DX].stride,
        .dgamma = wanted & 1 ? (float *)c->dgamma.far : NULL,
        .dbeta = wanted & 2 ? (float *)c->dbeta.far : NULL,
        .workspace = wanted ? c->workspace.far : NULL,
    };

    CHECK(gammas && betas && sizes);
    CHECK(c->t->lib.lk_norm_backward(&c->norm, &backward, NULL) == 0);
    memory_down(&c->m[DX].memory);
    memory_down(&c->dgamma);
    memory_down(&c->dbeta);
    memory_down(&c->workspace);
    for (uint64_t r = 0; r < c->norm.rows; r++)
        check_row_backward(c, s, r, gammas, betas, sizes);
    for (uint64_t j = 0; j < n; j++) {
        if (wanted & 1)
            CHECK(near_float((double)((float *)c->dgamma.near)[j], gammas[j], 0x1p-14 * sizes[j]));
        if (wanted & 2)
            CHECK(
                near_float((double)((float *)c->dbeta.near)[j], betas[j], 0x1p-14 * sizes[n + j]));
    }
    free(gammas);
    free(betas);
    free(sizes);
}

static void check_sum(const struct norm_case *c)
{
    for (uint64_t r = 0; r < c->norm.rows; r++)
        for (uint64_t j = 0; j < c->norm.columns; j++)
            CHECK(rows_at(&c->m[SUM], r)[j] ==
                  to_bf16(rows_get(&c->m[X], r, j) + rows_get(&c->m[RESIDUAL], r, j)));
}

struct formula_case {
    struct norm_case *data;
    unsigned int wanted; /* of check_backward() */
};

static void check_formula(void *arg)
{
    const struct formula_case *formula = arg;
    struct norm_case *c = formula->data;
    const struct rows *s = &c->m[c->residual ? SUM : X];

    run_forward(c);
    if (c->residual)
        check_sum(c);
    check_forward(c, s);
    check_backward(c, s, formula->wanted);
}

static void results_follow_the_formula(const struct compute_target *t)
{
    uint64_t state = 61;
    unsigned int kind = 0, round = 0;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(*shapes); s++) {
        for (int filling = 0; filling < FILLINGS; filling++) {
            for (unsigned int i = 0; i < 2; i++, kind += 5) {
                struct formula_case formula = {
                    make_case(t, &shapes[s], (enum filling)filling, kind, &state), 3 - round++ % 4
                };

                run_case(check_formula, &formula,
                         "norm of %llu x %llu, kind %u, filling %d, wanted %u",
                         (unsigned long long)shapes[s].rows, (unsigned long long)shapes[s].columns,
                         kind, filling, formula.wanted);
                drop_case(formula.data);
            }
        }
    }
}

/* Statistics alone; sum and dx in place of what they come from. */
static void outputs_may_be_left_out_or_replace_inputs(const struct compute_target *t)
{
    uint64_t state = 67;
    struct norm_case *c = make_case(t, &shapes[3], FILL_RANDOM, 1 + 16, &state);
    struct lk_norm_forward forward = { .x = c->m[X].memory.far,
                                       .x_stride = c->m[X].stride,
                                       .residual = c->m[RESIDUAL].memory.far,
                                       .residual_stride = c->m[RESIDUAL].stride,
                                       .sum = c->m[X].memory.far,
                                       .sum_stride = c->m[X].stride };
    struct lk_norm_backward backward = { .s = c->m[SUM].memory.far,
                                         .s_stride = c->m[SUM].stride,
                                         .dy = c->m[DY].memory.far,
                                         .dy_stride = c->m[DY].stride,
                                         .dx = c->m[DX].memory.far,
                                         .dx_stride = c->m[DX].stride };
    uint32_t *before = malloc(c->rstd.bytes);

    CHECK(before);
    run_forward(c);
    memcpy(before, c->rstd.near, c->rstd.bytes);
    memset(c->rstd.near, 0, c->rstd.bytes);
    memory_up(&c->rstd);
    CHECK(t->lib.lk_norm_forward(&c->norm, &forward, NULL) == 0);
    memory_down(&c->rstd);
    memory_down(&c->m[X].memory);
    CHECK(memcmp(before, c->rstd.near, c->rstd.bytes) == 0);
    CHECK(memcmp(c->m[X].memory.near, c->m[SUM].memory.near, c->m[X].memory.bytes) == 0);
    CHECK(t->lib.lk_norm_backward(&c->norm, &backward, NULL) == 0);
    backward.dx = c->m[DY].memory.far;
    CHECK(t->lib.lk_norm_backward(&c->norm, &backward, NULL) == 0);
    memory_down(&c->m[DX].memory);
    memory_down(&c->m[DY].memory);
    CHECK(memcmp(c->m[DX].memory.near, c->m[DY].memory.near, c->m[DX].memory.bytes) == 0);
    free(before);
    drop_case(c);
}

/* Every kernel that serves a class of rows writes it, also one that has no residual to add. */
static void the_sum_without_a_residual_is_x(const struct compute_target *t)
{
    static const struct shape own[] = {
        {3,  257,  0, 0},
        { 9, 1024, 0, 0},
        { 3, 5120, 0, 0},
        { 3, 8192, 0, 0},
        { 2, 9000, 0, 0},
    };
    uint64_t state = 73;

    for (unsigned int i = 0; i < 2 * sizeof(own) / sizeof(*own); i++) {
        struct norm_case *c = make_case(t, &own[i / 2], FILL_RANDOM, i % 2, &state);
        struct lk_norm_forward forward = { .x = c->m[X].memory.far,
                                           .x_stride = c->m[X].stride,
                                           .sum = c->m[SUM].memory.far,
                                           .sum_stride = c->m[SUM].stride,
                                           .y = c->m[Y].memory.far,
                                           .y_stride = c->m[Y].stride };

        CHECK(t->lib.lk_norm_forward(&c->norm, &forward, NULL) == 0);
        memory_down(&c->m[SUM].memory);
        for (uint64_t r = 0; r < c->norm.rows; r++)
            CHECK(memcmp(rows_at(&c->m[SUM], r), rows_at(&c->m[X], r), c->norm.columns * 2) == 0);
        drop_case(c);
    }
}

static void what_is_not_finite_stays_in_its_row(const struct compute_target *t)
{
    for (unsigned int kind = 0; kind < 2; kind++) {
        uint64_t state = 71;
        struct norm_case *c = make_case(t, &shapes[3], FILL_RANDOM, kind, &state);

        rows_at(&c->m[X], 2)[100] = 0x7fc0;
        rows_at(&c->m[X], 4)[0] = 0xff80;
        memory_up(&c->m[X].memory);
        run_forward(c);
        for (uint64_t r = 0; r < c->norm.rows; r++) {
            CHECK(isnan(rows_get(&c->m[Y], r, 100)) == (r == 2 || (r == 4 && kind == 1)));
            CHECK(isnan(rows_get(&c->m[Y], r, 0)) == (r == 2 || r == 4));
        }
        drop_case(c);
    }
}

/* Of one row element by element is as right, but slower: callers see that it happened. */
static void rows_that_are_not_aligned_are_counted(const struct compute_target *t)
{
    static const struct shape own[] = {
        {3,  1024, 0, 0},
        { 3, 1023, 0, 0},
        { 3, 1024, 0, 1},
    };
    struct lk_compute_counts before, after;
    uint64_t state = 79;

    for (unsigned int i = 0; i < sizeof(own) / sizeof(*own); i++) {
        struct norm_case *c = make_case(t, &own[i], FILL_RANDOM, 0, &state);

        t->lib.lk_compute_counts(&before);
        run_forward(c);
        t->lib.lk_compute_counts(&after);
        CHECK(after.wide - before.wide == (i == 0));
        CHECK(after.general - before.general == (i != 0));
        drop_case(c);
    }
}

static void wrong_arguments_are_refused(const struct compute_target *t)
{
    uint64_t state = 73;
    struct norm_case *c = make_case(t, &shapes[3], FILL_RANDOM, 1, &state);
    struct lk_norm_forward good = { .x = c->m[X].memory.far, .x_stride = c->m[X].stride }, forward;
    struct lk_norm norm;

#define REFUSED(change, text)                                            \
    do {                                                                 \
        norm = c->norm;                                                  \
        forward = good;                                                  \
        change;                                                          \
        CHECK(t->lib.lk_norm_forward(&norm, &forward, NULL) == -EINVAL); \
        CHECK(error_says(t, "lk_norm_forward", text));                   \
    } while (0)
    REFUSED(norm.kind = (enum lk_norm_kind)2, "kind");
    REFUSED(norm.weight_type = LK_FP16, "weight_type");
    REFUSED(norm.gamma = (char *)norm.gamma + 2, "gamma is not aligned");
    REFUSED(norm.rstd = NULL, "rstd is NULL");
    REFUSED(norm.mean = NULL, "mean is NULL");
    REFUSED(norm.eps = NAN, "eps");
    REFUSED(norm.columns = 0, "of 0 columns");
    REFUSED(norm.rows = UINT64_C(1) << 31, "2147483648 rows");
    REFUSED(forward.x = NULL, "x is NULL");
    REFUSED(forward.residual = forward.x, "sum is NULL");
    REFUSED(forward.y = c->m[Y].memory.far; forward.y_stride = 1, "rows of y overlap");
#undef REFUSED
    drop_case(c);
}

void check_norm(const struct compute_target *t)
{
    results_follow_the_formula(t);
    outputs_may_be_left_out_or_replace_inputs(t);
    the_sum_without_a_residual_is_x(t);
    what_is_not_finite_stays_in_its_row(t);
    rows_that_are_not_aligned_are_counted(t);
    wrong_arguments_are_refused(t);
}
