/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_matrix.h"

#include <errno.h>
#include <math.h>
#include <string.h>

struct shape {
    uint64_t rows, columns, depth;
    uint64_t pad; /* added to strides */
    size_t shift;
};

static const struct shape shapes[] = {
    {1,    1,   1,   0, 0},
    { 64,  64,  64,  0, 0},
    { 3,   5,   7,   0, 1},
    { 65,  130, 17,  3, 0},
    { 16,  128, 256, 8, 0},
    { 128, 8,   40,  0, 4},
    { 2,   72,  0,   0, 0},
};

struct gemm_case {
    struct lk_gemm call;
    struct typed a, b, c, d, bias;
    void *workspace;
};

/* Every bit of `variant` changes something. */
static struct gemm_case make_case(const struct compute_target *t, const struct lk_blas *blas,
                                  const struct shape *s, unsigned int variant, uint64_t *state)
{
    enum lk_type type = variant & 4 ? LK_FP16 : LK_BF16;
    enum lk_type out_type = variant & 8 ? LK_FP32 : type;
    int at = (int)(variant & 1), bt = (int)(variant >> 1 & 1);
    size_t bytes = t->lib.lk_gemm_workspace_bytes(blas);
    struct gemm_case c = {
        .a = typed_new(t, type, at ? s->depth : s->rows, at ? s->rows : s->depth,
                       (at ? s->rows : s->depth) + s->pad, s->shift),
        .b = typed_new(t, type, bt ? s->columns : s->depth, bt ? s->depth : s->columns,
                       (bt ? s->depth : s->columns) + s->pad, s->shift),
        .c = typed_new(t, out_type, s->rows, s->columns, s->columns + s->pad, s->shift),
        .d = typed_new(t, out_type, s->rows, s->columns, s->columns + s->pad, s->shift),
        .bias = typed_new(t, out_type, 1, s->columns, s->columns, s->shift),
        .workspace = workspace_take(t, bytes),
    };

    typed_fill(&c.a, 2, state);
    typed_fill(&c.b, 2, state);
    typed_fill(&c.c, 3, state);
    typed_fill(&c.d, 3, state);
    typed_fill(&c.bias, 3, state);
    c.call = (struct lk_gemm){
        .rows = s->rows,
        .columns = s->columns,
        .depth = s->depth,
        .type = type,
        .out_type = out_type,
        .a = c.a.memory.far,
        .b = c.b.memory.far,
        .a_stride = c.a.stride,
        .b_stride = c.b.stride,
        .a_transposed = at,
        .b_transposed = bt,
        .alpha = variant & 16 ? -0.5F : 1,
        .beta = variant & 32 ? 0.25F : 0,
        .c = variant & 96 ? (variant & 64 ? c.d.memory.far : c.c.memory.far) : NULL,
        .c_stride = c.c.stride,
        .bias = variant & 128 ? c.bias.memory.far : NULL,
        .d = c.d.memory.far,
        .d_stride = c.d.stride,
        .workspace = c.workspace,
        .workspace_bytes = bytes,
    };
    return c;
}

static void drop_case(const struct compute_target *t, struct gemm_case *c)
{
    memory_free(&c->a.memory);
    memory_free(&c->b.memory);
    memory_free(&c->c.memory);
    memory_free(&c->d.memory);
    memory_free(&c->bias.memory);
    workspace_check(t);
}

static void check_case(const struct compute_target *t, struct lk_blas *blas, struct gemm_case *c)
{
    const struct lk_gemm *g = &c->call;
    struct dense before = dense_of(g->c == g->d ? &c->d : &c->c);
    struct dense a = dense_of(&c->a), b = dense_of(&c->b), bias = dense_of(&c->bias), sum, size;
    int err = t->lib.lk_gemm_run(blas, g, NULL);

    if (err)
        fprintf(stderr, "%s\n", t->lib.lk_blas_error());
    CHECK(err == 0);
    memory_down(&c->d.memory);
    sum = dense_product(&a, g->a_transposed, &b, g->b_transposed);
    dense_abs(&a);
    dense_abs(&b);
    size = dense_product(&a, g->a_transposed, &b, g->b_transposed);
    for (uint64_t r = 0; r < g->rows; r++) {
        for (uint64_t j = 0; j < g->columns; j++) {
            double rest = 0, terms = fabs((double)g->alpha) * *dense_at(&size, r, j) + 6;

            if (g->c && g->beta != 0)
                rest += (double)g->beta * *dense_at(&before, r, j);
            if (g->bias)
                rest += *dense_at(&bias, 0, j);
            CHECK(typed_near(&c->d, r, j, (double)g->alpha * *dense_at(&sum, r, j) + rest,
                             (double)(g->depth + 4) * 0x1p-21 * (terms + fabs(rest))));
        }
    }
    dense_free(&before);
    dense_free(&a);
    dense_free(&b);
    dense_free(&bias);
    dense_free(&sum);
    dense_free(&size);
}

static void products_are_right(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 71;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(*shapes); s++) {
        for (unsigned int variant = 0; variant < 256; variant++) {
            struct gemm_case c;

            if (shapes[s].rows > 16 &&
                variant % 3) /* each bit is both there and not among the rest */
                continue;
            if (t->small && variant % 7)
                continue;
            c = make_case(t, blas, &shapes[s], variant, &state);
            check_case(t, blas, &c);
            drop_case(t, &c);
        }
    }
}

static void both_ways_were_taken(const struct compute_target *t, struct lk_blas *blas)
{
    bool vendor = t->lib.lk_gemm_workspace_bytes(blas) > 0;
    struct lk_blas_counts counts;

    t->lib.lk_blas_counts(blas, &counts);
    CHECK(counts.general > 0 && (counts.vendor > 0) == vendor && (counts.plans > 0) == vendor);
}

static void one_row_may_stand_for_all(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 73;
    struct gemm_case c = make_case(t, blas, &shapes[3], 0, &state);
    struct lk_blas_counts before, after;

    c.a.stride = 0;
    c.call.a_stride = 0;
    t->lib.lk_blas_counts(blas, &before);
    check_case(t, blas, &c);
    t->lib.lk_blas_counts(blas, &after);
    CHECK(after.general == before.general + 1 && after.vendor == before.vendor);
    drop_case(t, &c);
}

static void what_is_not_finite_spreads_along_its_row(const struct compute_target *t,
                                                     struct lk_blas *blas)
{
    uint64_t state = 79;
    struct gemm_case c = make_case(t, blas, &shapes[4], 0, &state);

    ((uint16_t *)c.a.memory.near)[2 * c.a.stride + 3] = 0x7fc0;
    ((uint16_t *)c.a.memory.near)[4 * c.a.stride + 3] = 0x7f80;
    memory_up(&c.a.memory);
    CHECK(t->lib.lk_gemm_run(blas, &c.call, NULL) == 0);
    memory_down(&c.d.memory);
    for (uint64_t j = 0; j < c.call.columns; j++) {
        CHECK(isnan(typed_get(&c.d, 2, j)));
        CHECK(isinf(typed_get(&c.d, 4, j)));
        CHECK(isfinite(typed_get(&c.d, 3, j)));
    }
    drop_case(t, &c);
}

static void wrong_arguments_are_named(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 83;
    struct gemm_case c = make_case(t, blas, &shapes[3], 32 + 128, &state);
    struct lk_gemm call;

#define REFUSED(change, word)                                    \
    do {                                                         \
        call = c.call;                                           \
        change;                                                  \
        CHECK(t->lib.lk_gemm_run(blas, &call, NULL) == -EINVAL); \
        CHECK(strstr(t->lib.lk_blas_error(), word) != NULL);     \
    } while (0)
    REFUSED(call.a = NULL, "a is NULL");
    REFUSED(call.b = (char *)call.b + 1, "b is not aligned");
    REFUSED(call.d = NULL, "d is NULL");
    REFUSED(call.bias = (char *)call.bias + 1, "bias is not aligned");
    REFUSED(call.d_stride = call.columns - 1, "rows of d overlap");
    REFUSED(call.b_stride = UINT64_C(1) << 60, "of b is too large");
    REFUSED(call.type = LK_FP32, "type");
    REFUSED(call.out_type = LK_FP16, "out_type");
    REFUSED(call.rows = UINT64_C(1) << 31, "too large");
    REFUSED((call.workspace_bytes = 256, call.workspace = (char *)c.workspace + 16), "workspace");
    REFUSED((call.c = call.d, call.c_stride++), "stride");
#undef REFUSED
    CHECK(t->lib.lk_gemm_run(NULL, &c.call, NULL) == -EINVAL);
    CHECK(t->lib.lk_gemm_run(blas, NULL, NULL) == -EINVAL);
    call = c.call;
    call.rows = 0;
    call.d = NULL;
    CHECK(t->lib.lk_gemm_run(blas, &call, NULL) == 0);
    memory_down(&c.d.memory);
    drop_case(t, &c);
}

static void a_shape_is_planned_once(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 89;
    struct gemm_case c = make_case(t, blas, &shapes[1], 2, &state);
    struct lk_blas_counts before, after;
    struct lk_gemm_tuned tuned = { .methods = 77 };

    check_case(t, blas, &c);
    t->lib.lk_blas_counts(blas, &before);
    check_case(t, blas, &c);
    t->lib.lk_blas_counts(blas, &after);
    CHECK(after.plans == before.plans);
    CHECK(after.vendor + after.general == before.vendor + before.general + 1);
    CHECK(t->lib.lk_gemm_tune(blas, &c.call, &tuned, NULL) == 0 && tuned.methods != 77);
    CHECK(!tuned.methods || tuned.chosen_us <= tuned.first_us);
    if (strcmp(t->lib.lk_backend(), "host") == 0 && tuned.methods) /* those of fake/cublaslt.c */
        CHECK(tuned.methods == 3 && tuned.chosen == 1);
    check_case(t, blas, &c);
    drop_case(t, &c);
}

static void tuning_while_products_are_made_keeps_them_right(const struct compute_target *t,
                                                            struct lk_blas *blas)
{
    uint64_t state = 91;
    struct gemm_case c = make_case(t, blas, &shapes[4], 2, &state);
    struct lk_blas_counts before, after;

    t->lib.lk_blas_tune(blas, 1);
    check_case(t, blas, &c);
    t->lib.lk_blas_tune(blas, 0);
    t->lib.lk_blas_counts(blas, &before);
    check_case(t, blas, &c);
    t->lib.lk_blas_counts(blas, &after);
    CHECK(after.plans == before.plans);
    drop_case(t, &c);
}

/* More shapes than plans are kept; those from the beginning are asked for once more. */
static void more_shapes_than_plans_are_served(const struct compute_target *t, struct lk_blas *blas)
{
    uint64_t state = 97;

    for (uint64_t i = 0; i < LK_BLAS_PLANS + 44; i++) {
        const struct shape shape = { 1 + i % LK_BLAS_PLANS, 8, 8, 0, 0 };
        struct gemm_case c = make_case(t, blas, &shape, 2, &state);

        check_case(t, blas, &c);
        drop_case(t, &c);
    }
}

static void a_library_that_is_missing_is_named(const struct compute_target *t)
{
    struct lk_blas *blas = NULL;

    if (strcmp(t->lib.lk_backend(), "host") == 0)
        return;
    CHECK(t->lib.lk_blas_open("/nowhere/libcublasLt.so", 0, &blas) == -ENOSYS && !blas);
    CHECK(strstr(t->lib.lk_blas_error(), "/nowhere/libcublasLt.so") != NULL);
}

void check_gemm(const struct compute_target *t)
{
    struct lk_blas *blas;

    CHECK(t->lib.lk_blas_open(NULL, 2, &blas) == -EINVAL);
    CHECK(t->lib.lk_blas_open(NULL, 0, NULL) == -EINVAL);
    t->lib.lk_blas_close(NULL);
    a_library_that_is_missing_is_named(t);
    /* under a checker only kernels of our own */
    for (uint32_t flags = t->small ? LK_BLAS_GENERAL : 0; flags <= LK_BLAS_GENERAL; flags++) {
        blas = open_blas(t, flags);
        CHECK(flags == 0 || t->lib.lk_gemm_workspace_bytes(blas) == 0);
        products_are_right(t, blas);
        both_ways_were_taken(t, blas);
        one_row_may_stand_for_all(t, blas);
        what_is_not_finite_spreads_along_its_row(t, blas);
        wrong_arguments_are_named(t, blas);
        a_shape_is_planned_once(t, blas);
        tuning_while_products_are_made_keeps_them_right(t, blas);
        if (!t->small)
            more_shapes_than_plans_are_served(t, blas);
        t->lib.lk_blas_close(blas);
        if (strcmp(t->lib.lk_backend(), "host") == 0)
            return; /* there both are the same */
    }
}
