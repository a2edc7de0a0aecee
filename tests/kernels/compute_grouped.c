/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_matrix.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define EXPERTS 7

/* Tokens of each expert; one has none, one is not aligned to anything. */
static const uint64_t tokens[EXPERTS] = { 16, 0, 8, 24, 1, 7, 32 };

enum product {
    FORWARD, /* rows of tokens times the transpose of a matrix of each */
    DGRAD,
    WGRAD, /* depth is that of tokens; added up */
    PRODUCTS,
};

static const char *const names[] = { "forward", "dgrad", "wgrad" };

struct grouped {
    const struct compute_target *t;
    struct lk_blas *blas;
    enum product product;
    enum lk_type type;
    uint64_t hidden, ffn;
    struct typed x, y; /* tokens x hidden, tokens x ffn */
    struct typed weights[EXPERTS], before[EXPERTS];
    struct lk_gemm gemms[EXPERTS];
    int failed;
};

static struct lk_gemm product_of(const struct grouped *g, int expert, uint64_t first)
{
    char *x = (char *)g->x.memory.far + first * g->x.stride * 2;
    char *y = (char *)g->y.memory.far + first * g->y.stride * 2;
    struct lk_gemm gemm = { .type = g->type, .out_type = g->type, .alpha = 1 };
    void *weight = g->weights[expert].memory.far;

    gemm.rows = g->product == WGRAD ? g->ffn : tokens[expert];
    gemm.columns = g->product == FORWARD ? g->ffn : g->hidden;
    gemm.depth = g->product == FORWARD ? g->hidden : g->product == DGRAD ? g->ffn : tokens[expert];
    gemm.a = g->product == FORWARD ? x : y;
    gemm.a_stride = g->product == FORWARD ? g->x.stride : g->y.stride;
    gemm.a_transposed = g->product == WGRAD;
    gemm.b = g->product == WGRAD ? x : weight;
    gemm.b_stride = g->product == WGRAD ? g->x.stride : g->weights[expert].stride;
    gemm.b_transposed = g->product == FORWARD;
    gemm.d = g->product == FORWARD ? y : g->product == DGRAD ? x : weight;
    gemm.d_stride = g->product == FORWARD ? g->y.stride
                    : g->product == DGRAD ? g->x.stride
                                          : g->weights[expert].stride;
    if (g->product == WGRAD) {
        gemm.c = gemm.d;
        gemm.c_stride = gemm.d_stride;
        gemm.beta = 1;
    }
    return gemm;
}

static void make(struct grouped *g, size_t shift)
{
    uint64_t state = 91, first = 0, all = 0;

    for (int e = 0; e < EXPERTS; e++)
        all += tokens[e];
    g->x = typed_new(g->t, g->type, all, g->hidden, g->hidden, shift);
    g->y = typed_new(g->t, g->type, all, g->ffn, g->ffn, 0);
    typed_fill(&g->x, 2, &state);
    typed_fill(&g->y, 2, &state);
    for (int e = 0; e < EXPERTS; e++) {
        g->weights[e] = typed_new(g->t, g->type, g->ffn, g->hidden, g->hidden, 0);
        typed_fill(&g->weights[e], 1, &state);
        g->before[e] = g->weights[e];
        g->gemms[e] = product_of(g, e, first);
        first += tokens[e];
    }
}

static void drop(struct grouped *g)
{
    memory_free(&g->x.memory);
    memory_free(&g->y.memory);
    for (int e = 0; e < EXPERTS; e++)
        memory_free(&g->weights[e].memory);
}

static struct dense rows_of(const struct typed *typed, uint64_t first, uint64_t rows)
{
    struct dense out = dense_new(rows, typed->columns);

    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t c = 0; c < typed->columns; c++)
            *dense_at(&out, r, c) = typed_get(typed, first + r, c);
    return out;
}

static void compare(struct grouped *g, int expert, uint64_t first, const struct dense *x,
                    const struct dense *y, const struct dense *weight)
{
    const struct typed *to = g->product == FORWARD ? &g->y
                             : g->product == DGRAD ? &g->x
                                                   : &g->weights[expert];
    struct dense a = g->product == FORWARD ? *x : *y, b = g->product == WGRAD ? *x : *weight;
    struct dense want = dense_product(&a, g->product == WGRAD, &b, g->product == FORWARD);
    uint64_t begin = g->product == WGRAD ? 0 : first, depth = g->gemms[expert].depth;

    for (uint64_t r = 0; r < want.rows; r++)
        for (uint64_t c = 0; c < want.columns; c++) {
            double rest = g->product == WGRAD ? *dense_at(weight, r, c) : 0;

            /* no term is above 4 */
            if (!typed_near(to, begin + r, c, *dense_at(&want, r, c) + rest,
                            (double)(depth + 4) * 0x1p-21 * (4 * (double)depth + 8)) &&
                !g->failed++)
                printf("FAILED: groups, %s: [%d: %llu, %llu] is %g, not %g\n", names[g->product],
                       expert, (unsigned long long)r, (unsigned long long)c,
                       typed_get(to, begin + r, c), *dense_at(&want, r, c) + rest);
        }
    dense_free(&want);
}

/* How many cuBLAS made of them is as expected, unless that is negative. */
static int run_case(struct grouped *g, enum lk_gemm_grouping grouping, size_t shift, int wanted)
{
    const struct compute_lib *lib = &g->t->lib;
    struct lk_gemm_groups groups = { .gemms = g->gemms, .count = EXPERTS, .grouping = grouping };
    struct lk_blas_counts before, after;
    struct dense x, y, weights[EXPERTS];
    uint64_t first = 0;
    int err;

    make(g, shift);
    for (int e = 0; e < EXPERTS; e++)
        weights[e] = dense_of(&g->weights[e]);
    x = dense_of(&g->x);
    y = dense_of(&g->y);
    groups.workspace = workspace_take(g->t, lib->lk_gemm_groups_workspace_bytes(g->blas));
    lib->lk_blas_counts(g->blas, &before);
    err = lib->lk_gemm_groups_run(g->blas, &groups, NULL);
    lib->lk_blas_counts(g->blas, &after);
    if (err && !g->failed++)
        printf("FAILED: groups, %s: %s: %s\n", names[g->product], lib->lk_error_text(err),
               lib->lk_blas_error());
    if (!err && wanted >= 0 && after.grouped != before.grouped + (uint64_t)wanted && !g->failed++)
        printf("FAILED: groups, %s: cuBLAS made %llu products, not %d\n", names[g->product],
               (unsigned long long)(after.grouped - before.grouped), wanted);
    workspace_check(g->t);
    memory_down(g->product == FORWARD ? &g->y.memory : &g->x.memory);
    for (int e = 0; e < EXPERTS; e++) {
        struct dense xs, ys;

        memory_down(&g->weights[e].memory);
        xs = rows_of(&g->x, first, tokens[e]);
        ys = rows_of(&g->y, first, tokens[e]);
        /* what was written over is as it was before */
        for (uint64_t i = 0; i < tokens[e] * g->hidden && g->product != DGRAD; i++)
            xs.values[i] = x.values[first * g->hidden + i];
        for (uint64_t i = 0; i < tokens[e] * g->ffn && g->product != FORWARD; i++)
            ys.values[i] = y.values[first * g->ffn + i];
        if (!err)
            compare(g, e, first, &xs, &ys, &weights[e]);
        dense_free(&xs);
        dense_free(&ys);
        dense_free(&weights[e]);
        first += tokens[e];
    }
    dense_free(&x);
    dense_free(&y);
    drop(g);
    return g->failed != 0;
}

static void wrong_arguments_are_refused(const struct compute_target *t, struct lk_blas *blas)
{
    struct lk_gemm gemm = { .rows = 1, .columns = 1, .depth = 1, .type = LK_FP32 };
    struct lk_gemm_groups groups = { &gemm, 1, LK_GROUP_AUTO, NULL };

    CHECK(t->lib.lk_gemm_groups_run(NULL, &groups, NULL) == -EINVAL);
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
    CHECK(strstr(t->lib.lk_blas_error(), "workspace"));
    groups.workspace = workspace_take(t, t->lib.lk_gemm_groups_workspace_bytes(blas));
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
    CHECK(strstr(t->lib.lk_blas_error(), "neither bf16 nor fp16"));
    groups.grouping = (enum lk_gemm_grouping)3;
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
    groups = (struct lk_gemm_groups){ NULL, 0, LK_GROUP_AUTO, groups.workspace };
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == 0);
    groups.count = 1;
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
}

int check_grouped(const struct compute_target *t)
{
    struct lk_blas *blas = open_blas(t, 0);
    bool vendor = t->lib.lk_gemm_workspace_bytes(blas) > 0;
    int failed = 0;

    for (int product = 0; product < PRODUCTS; product++)
        for (int type = LK_BF16; type <= LK_FP16; type++) {
            struct grouped g = { .t = t,
                                 .blas = blas,
                                 .product = product,
                                 .type = type,
                                 .hidden = 40,
                                 .ffn = 64 };

            failed += run_case(&g, LK_GROUP_ALWAYS, 0, vendor ? EXPERTS - 1 : 0);
            failed += run_case(&g, LK_GROUP_AUTO, 0, vendor ? EXPERTS - 1 : 0);
            failed += run_case(&g, LK_GROUP_NEVER, 0, 0);
            failed += run_case(&g, LK_GROUP_AUTO, 1, 0); /* nothing is aligned */
            g.hidden = g.ffn = 48;                       /* of which the tests' library has none */
            failed += run_case(&g, LK_GROUP_AUTO, 0, -1);
        }
    wrong_arguments_are_refused(t, blas);
    t->lib.lk_blas_close(blas);
    return failed;
}
