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

/* Values by the type of the factors, that of the result, and by what is added; an array of two: ours, the vendor's. */
struct sums {
    struct tally tallies[2][2][4]; /* fp16, into fp32, c + 2 * bias */
};

static struct tally *tally_of(struct sums *sums, const struct lk_gemm *g, bool vendor)
{
    bool adds = g->c && g->beta != 0;
    struct tally *tally = &sums[vendor].tallies[g->type == LK_FP16][g->out_type == LK_FP32]
                                               [adds + 2 * (g->bias != NULL)];

    snprintf(tally->name, sizeof(tally->name), "products by %s, %s into %s%s%s",
             vendor ? "cuBLASLt" : "our own kernel", type_name(g->type), type_name(g->out_type),
             adds ? ", c" : "", g->bias ? ", bias" : "");
    return tally;
}

/* What a failure is to be repeated with. */
static void print_case(const struct lk_gemm *g)
{
    printf(
        "  that was %llu x %llu x %llu%s%s, alpha %g, beta %g%s, strides %llu %llu %llu, a at %u, d at %u\n",
        (unsigned long long)g->rows, (unsigned long long)g->columns, (unsigned long long)g->depth,
        g->a_transposed ? ", a transposed" : "", g->b_transposed ? ", b transposed" : "",
        (double)g->alpha, (double)g->beta, g->c && g->c == g->d ? ", in place" : "",
        (unsigned long long)g->a_stride, (unsigned long long)g->b_stride,
        (unsigned long long)g->d_stride, (unsigned int)((uintptr_t)g->a % 64),
        (unsigned int)((uintptr_t)g->d % 64));
}

static void compare(const struct gemm_case *c, const struct dense *before, struct tally *tally,
                    bool vendor)
{
    const struct lk_gemm *g = &c->call;
    struct dense a = dense_of(&c->a), b = dense_of(&c->b), bias = dense_of(&c->bias), sum, size;
    bool adds = g->c && g->beta != 0;
    uint64_t wrong = tally->wrong;

    sum = dense_product(&a, g->a_transposed, &b, g->b_transposed);
    dense_abs(&a);
    dense_abs(&b);
    size = dense_product(&a, g->a_transposed, &b, g->b_transposed);
    for (uint64_t r = 0; r < g->rows; r++) {
        for (uint64_t j = 0; j < g->columns; j++) {
            double added = g->bias ? *dense_at(&bias, 0, j) : 0;
            double first = (double)g->alpha * *dense_at(&sum, r, j) + added;
            double terms = fabs((double)g->alpha) * *dense_at(&size, r, j) + 6;
            struct expected expected = { .value = first };

            if (adds)
                expected.value += (double)g->beta * *dense_at(before, r, j);
            expected.bound = (double)(g->depth + 4) * 0x1p-21 *
                             (terms + fabs(expected.value - first + added));
            if (g->bias && vendor && g->out_type != LK_FP32)
                expected.again[0] = fmax(fabs(first - added), fabs(expected.value - added));
            if (adds && vendor && g->out_type != LK_FP32)
                expected.again[1] = fabs(first);
            tally_value(tally, &c->d, r, j, &expected);
        }
    }
    if (!wrong && tally->wrong)
        print_case(g);
    dense_free(&a);
    dense_free(&b);
    dense_free(&bias);
    dense_free(&sum);
    dense_free(&size);
}

static void check_case(const struct compute_target *t, struct lk_blas *blas, struct gemm_case *c,
                       struct sums *sums)
{
    const struct lk_gemm *g = &c->call;
    struct dense old = dense_of(g->c == g->d ? &c->d : &c->c);
    struct lk_blas_counts before, after;
    struct tally *tally;
    int err;

    t->lib.lk_blas_counts(blas, &before);
    err = t->lib.lk_gemm_run(blas, g, NULL);
    t->lib.lk_blas_counts(blas, &after);
    tally = tally_of(sums, g, after.vendor != before.vendor);
    if (err) {
        tally->wrong++;
        printf("FAILED: %s: %s: %s\n", tally->name, t->lib.lk_error_text(err),
               t->lib.lk_blas_error());
        print_case(g);
    }
    memory_down(&c->d.memory);
    if (!err)
        compare(c, &old, tally, after.vendor != before.vendor);
    dense_free(&old);
}

/* Both ways, ours and the vendor's. */
static int end_sums(const struct sums *sums, bool always)
{
    int failed = 0;

    for (int vendor = 0; vendor < 2; vendor++)
        for (int i = 0; i < 16; i++) {
            const struct tally *tally = &sums[vendor].tallies[i >> 3][i >> 2 & 1][i & 3];

            if (tally->values || tally->wrong)
                failed += tally_end(tally, always && vendor);
        }
    return failed;
}

static void products_are_right(const struct compute_target *t, struct lk_blas *blas,
                               struct sums *sums)
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
            check_case(t, blas, &c, sums);
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

static void one_row_may_stand_for_all(const struct compute_target *t, struct lk_blas *blas,
                                      struct sums *sums)
{
    uint64_t state = 73;
    struct gemm_case c = make_case(t, blas, &shapes[3], 0, &state);
    struct lk_blas_counts before, after;

    c.a.stride = 0;
    c.call.a_stride = 0;
    t->lib.lk_blas_counts(blas, &before);
    check_case(t, blas, &c, sums);
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

static void a_shape_is_planned_once(const struct compute_target *t, struct lk_blas *blas,
                                    struct sums *sums)
{
    uint64_t state = 89;
    struct gemm_case c = make_case(t, blas, &shapes[1], 2, &state);
    struct lk_blas_counts before, after;
    struct lk_gemm_tuned tuned = { .methods = 77 };

    check_case(t, blas, &c, sums);
    t->lib.lk_blas_counts(blas, &before);
    check_case(t, blas, &c, sums);
    t->lib.lk_blas_counts(blas, &after);
    CHECK(after.plans == before.plans);
    CHECK(after.vendor + after.general == before.vendor + before.general + 1);
    CHECK(t->lib.lk_gemm_tune(blas, &c.call, &tuned, NULL) == 0 && tuned.methods != 77);
    CHECK(!tuned.methods || tuned.chosen_us <= tuned.first_us);
    if (strcmp(t->lib.lk_backend(), "host") == 0 && tuned.methods) /* those of fake/cublaslt.c */
        CHECK(tuned.methods == 3 && tuned.chosen == 1);
    check_case(t, blas, &c, sums);
    drop_case(t, &c);
}

static void tuning_while_products_are_made_keeps_them_right(const struct compute_target *t,
                                                            struct lk_blas *blas, struct sums *sums)
{
    uint64_t state = 91;
    struct gemm_case c = make_case(t, blas, &shapes[4], 2, &state);
    struct lk_blas_counts before, after;

    t->lib.lk_blas_tune(blas, 1);
    check_case(t, blas, &c, sums);
    t->lib.lk_blas_tune(blas, 0);
    t->lib.lk_blas_counts(blas, &before);
    check_case(t, blas, &c, sums);
    t->lib.lk_blas_counts(blas, &after);
    CHECK(after.plans == before.plans);
    drop_case(t, &c);
}

/* More shapes than plans are kept; those from the beginning are asked for once more. */
static void more_shapes_than_plans_are_served(const struct compute_target *t, struct lk_blas *blas,
                                              struct sums *sums)
{
    uint64_t state = 97;

    for (uint64_t i = 0; i < LK_BLAS_PLANS + 44; i++) {
        uint64_t n = i % LK_BLAS_PLANS;
        const struct shape shape = { 1 + n % 64, 6 + n / 64, 2, 0, 0 };
        struct gemm_case c = make_case(t, blas, &shape, 2, &state);

        check_case(t, blas, &c, sums);
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

int check_gemm(const struct compute_target *t)
{
    bool host = strcmp(t->lib.lk_backend(), "host") == 0;
    struct sums sums[2];
    struct lk_blas *blas;
    int failed = 0;

    CHECK(t->lib.lk_blas_open(NULL, 2, &blas) == -EINVAL);
    CHECK(t->lib.lk_blas_open(NULL, 0, NULL) == -EINVAL);
    t->lib.lk_blas_close(NULL);
    a_library_that_is_missing_is_named(t);
    /* under a checker only kernels of our own; in the host library both are the same */
    for (uint32_t flags = t->small ? LK_BLAS_GENERAL : 0;
         flags <= (host ? 0U : (uint32_t)LK_BLAS_GENERAL); flags++) {
        memset(sums, 0, sizeof(sums));
        blas = open_blas(t, flags);
        CHECK(flags == 0 || t->lib.lk_gemm_workspace_bytes(blas) == 0);
        products_are_right(t, blas, sums);
        both_ways_were_taken(t, blas);
        one_row_may_stand_for_all(t, blas, sums);
        what_is_not_finite_spreads_along_its_row(t, blas);
        wrong_arguments_are_named(t, blas);
        a_shape_is_planned_once(t, blas, sums);
        tuning_while_products_are_made_keeps_them_right(t, blas, sums);
        if (!t->small)
            more_shapes_than_plans_are_served(t, blas, sums);
        failed += end_sums(sums, !host);
        t->lib.lk_blas_close(blas);
    }
    return failed;
}
