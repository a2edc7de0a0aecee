/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_matrix.h"

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#define EXPERTS 7

/* Tokens of each expert; one has none, one is not aligned to anything. */
static const uint64_t uneven[EXPERTS] = { 16, 0, 8, 24, 1, 7, 32 };
static const uint64_t even[EXPERTS] = { 23, 23, 23, 23, 23, 23, 23 };

enum product {
    FORWARD, /* rows of tokens times the transpose of a matrix of each */
    DGRAD,
    WGRAD, /* depth is that of tokens; added up */
    PRODUCTS,
};

static const char *const names[] = { "forward", "dgrad", "wgrad" };
static const char *const ways[] = { "as it chooses", "in a row", "grouped", "on streams",
                                    "batched" };

/* How often each way was taken is as expected, where that is not negative. */
struct ways_taken {
    int grouped, batched, spread;
};

struct grouped {
    const struct compute_target *t;
    struct lk_blas *blas;
    enum product product;
    enum lk_type type;
    uint64_t hidden, ffn;
    const uint64_t *tokens; /* of each expert */
    enum lk_gemm_grouping way;
    uint32_t streams, sms;
    size_t shift; /* of x */
    bool into_fp32;
    bool scattered; /* matrices of experts do not lie evenly */
    struct ways_taken wanted;
    /* what is made of these */
    struct typed x, y; /* tokens x hidden, tokens x ffn */
    struct typed all;  /* the matrices of all experts, one behind the other */
    struct typed weights[EXPERTS];
    struct lk_gemm gemms[EXPERTS];
    struct tally tally;
};

/* The type of matrices of experts. */
static enum lk_type weight_type(const struct grouped *g)
{
    return g->into_fp32 && g->product == WGRAD ? LK_FP32 : g->type;
}

static struct lk_gemm product_of(const struct grouped *g, int expert, uint64_t first)
{
    char *x = (char *)g->x.memory.far + first * g->x.stride * 2;
    char *y = (char *)g->y.memory.far + first * g->y.stride * 2;
    struct lk_gemm gemm = { .type = g->type, .out_type = g->type, .alpha = 1 };
    void *weight = g->weights[expert].memory.far;

    gemm.rows = g->product == WGRAD ? g->ffn : g->tokens[expert];
    gemm.columns = g->product == FORWARD ? g->ffn : g->hidden;
    gemm.depth = g->product == FORWARD ? g->hidden
                 : g->product == DGRAD ? g->ffn
                                       : g->tokens[expert];
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
        gemm.out_type = weight_type(g);
        gemm.c = gemm.d;
        gemm.c_stride = gemm.d_stride;
        gemm.beta = 1;
    }
    return gemm;
}

/* One expert's matrix within that of all. */
static struct typed part_of(const struct grouped *g, int expert)
{
    struct typed out = g->all;
    uint64_t place = (uint64_t)(g->scattered ? expert * 3 % EXPERTS : expert);
    uint64_t bytes = place * g->ffn * g->hidden * (weight_type(g) == LK_FP32 ? 4 : 2);

    out.rows = g->ffn;
    out.memory.near += bytes;
    out.memory.far += bytes;
    return out;
}

static void make(struct grouped *g)
{
    uint64_t state = 91, first = 0, all = 0;

    for (int e = 0; e < EXPERTS; e++)
        all += g->tokens[e];
    g->x = typed_new(g->t, g->type, all, g->hidden, g->hidden, g->shift);
    g->y = typed_new(g->t, g->type, all, g->ffn, g->ffn, 0);
    g->all = typed_new(g->t, weight_type(g), EXPERTS * g->ffn, g->hidden, g->hidden, 0);
    typed_fill(&g->x, 2, &state);
    typed_fill(&g->y, 2, &state);
    typed_fill(&g->all, 1, &state);
    for (int e = 0; e < EXPERTS; e++) {
        g->weights[e] = part_of(g, e);
        g->gemms[e] = product_of(g, e, first);
        first += g->tokens[e];
    }
}

static void drop(struct grouped *g)
{
    memory_free(&g->x.memory);
    memory_free(&g->y.memory);
    memory_free(&g->all.memory);
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
    bool vendor = g->t->lib.lk_gemm_workspace_bytes(g->blas) > 0;

    for (uint64_t r = 0; r < want.rows; r++)
        for (uint64_t c = 0; c < want.columns; c++) {
            struct expected expected = { .value = *dense_at(&want, r, c) };

            /* no term is above 4 */
            expected.bound = (double)(depth + 4) * 0x1p-21 * (4 * (double)depth + 8);
            if (g->product == WGRAD) {
                if (vendor && to->type != LK_FP32)
                    expected.again[1] = fabs(expected.value);
                expected.value += *dense_at(weight, r, c);
            }
            tally_value(&g->tally, to, begin + r, c, &expected);
        }
    dense_free(&want);
}

static void compare_all(struct grouped *g, const struct dense *x, const struct dense *y,
                        const struct dense *weights)
{
    uint64_t first = 0;

    for (int e = 0; e < EXPERTS; e++) {
        struct dense xs = rows_of(&g->x, first, g->tokens[e]);
        struct dense ys = rows_of(&g->y, first, g->tokens[e]);

        /* what was written over is as it was before */
        for (uint64_t i = 0; i < g->tokens[e] * g->hidden && g->product != DGRAD; i++)
            xs.values[i] = x->values[first * g->hidden + i];
        for (uint64_t i = 0; i < g->tokens[e] * g->ffn && g->product != FORWARD; i++)
            ys.values[i] = y->values[first * g->ffn + i];
        compare(g, e, first, &xs, &ys, &weights[e]);
        dense_free(&xs);
        dense_free(&ys);
        first += g->tokens[e];
    }
}

static void check_taken(struct grouped *g, const char *what, uint64_t taken, int wanted)
{
    if (wanted < 0 || taken == (uint64_t)wanted)
        return;
    g->tally.wrong++;
    printf("FAILED: %s: %llu products were %s, not %d\n", g->tally.name, (unsigned long long)taken,
           what, wanted);
}

/* false: there is nothing to compare. */
static bool run(struct grouped *g)
{
    const struct compute_lib *lib = &g->t->lib;
    struct lk_gemm_groups groups = { .gemms = g->gemms,
                                     .count = EXPERTS,
                                     .grouping = g->way,
                                     .streams = g->streams,
                                     .sms = g->sms };
    struct lk_blas_counts before, after;
    int err;

    groups.workspace = workspace_take(g->t, lib->lk_gemm_groups_workspace_bytes(g->blas));
    lib->lk_blas_counts(g->blas, &before);
    err = lib->lk_gemm_groups_run(g->blas, &groups, NULL);
    lib->lk_blas_counts(g->blas, &after);
    workspace_check(g->t);
    if (err) {
        g->tally.wrong++;
        printf("FAILED: %s: %s: %s\n", g->tally.name, lib->lk_error_text(err),
               lib->lk_blas_error());
        return false;
    }
    check_taken(g, "grouped", after.grouped - before.grouped, g->wanted.grouped);
    check_taken(g, "batched", after.batched - before.batched, g->wanted.batched);
    check_taken(g, "on streams", after.spread - before.spread, g->wanted.spread);
    return true;
}

/* All values of one way for one product. 1 if something is wrong. */
static int run_case(struct grouped g)
{
    bool vendor = g.t->lib.lk_gemm_workspace_bytes(g.blas) > 0;
    struct dense x, y, weights[EXPERTS];
    bool made;

    if (!vendor)
        g.wanted = (struct ways_taken){ 0 };
    snprintf(g.tally.name, sizeof(g.tally.name),
             "groups, %s, %s tokens, %s, %llu columns, %s into %s%s", ways[g.way],
             g.tokens == even ? "even" : "uneven", names[g.product], (unsigned long long)g.hidden,
             type_name(g.type), type_name(g.product == WGRAD ? weight_type(&g) : g.type),
             g.shift       ? ", not aligned"
             : g.scattered ? ", scattered"
                           : "");
    make(&g);
    for (int e = 0; e < EXPERTS; e++)
        weights[e] = dense_of(&g.weights[e]);
    x = dense_of(&g.x);
    y = dense_of(&g.y);
    made = run(&g);
    memory_down(g.product == WGRAD     ? &g.all.memory
                : g.product == FORWARD ? &g.y.memory
                                       : &g.x.memory);
    if (made)
        compare_all(&g, &x, &y, weights);
    for (int e = 0; e < EXPERTS; e++)
        dense_free(&weights[e]);
    dense_free(&x);
    dense_free(&y);
    drop(&g);
    return tally_end(&g.tally, strcmp(g.t->lib.lk_backend(), "host") != 0);
}

/* A case in one way. */
static int run_way(struct grouped g, enum lk_gemm_grouping way, struct ways_taken wanted)
{
    g.way = way;
    g.wanted = wanted;
    return run_case(g);
}

#define NONE ((struct ways_taken){ 0, 0, 0 })
#define ANY  ((struct ways_taken){ -1, -1, -1 })

/* Tokens as they come: what is empty is not made, or not in a group (with depth 0 something is left to do). */
static int uneven_groups_are_right(struct grouped g)
{
    int made = EXPERTS - (g.product != WGRAD), failed = 0;
    const struct ways_taken grouped = { g.into_fp32 && g.product == WGRAD ? 0 : EXPERTS - 1, 0, 0 };
    const struct ways_taken spread = { 0, 0, made };

    g.tokens = uneven;
    failed += run_way(g, LK_GROUP_ALWAYS, grouped);
    failed += run_way(g, LK_GROUP_AUTO, grouped); /* it is small */
    failed += run_way(g, LK_GROUP_NEVER, NONE);
    failed += run_way(g, LK_GROUP_BATCHED, NONE);
    failed += run_way(g, LK_GROUP_STREAMS, spread);
    for (uint32_t streams = 1; streams <= LK_GEMM_STREAMS; streams *= 2) {
        g.streams = streams;
        failed += run_way(g, LK_GROUP_STREAMS, spread);
    }
    g.sms = 66;
    failed += run_way(g, LK_GROUP_STREAMS, spread);
    g.sms = g.streams = 0;
    g.shift = 1; /* nothing is aligned */
    failed += run_way(g, LK_GROUP_AUTO, NONE);
    failed += run_way(g, LK_GROUP_STREAMS, spread);
    g.shift = 0;
    g.hidden = g.ffn = 48; /* of which the tests' library has no groups */
    return failed + run_way(g, LK_GROUP_AUTO, ANY);
}

/* What fake/streams.c has counted; NULL where there is none. */
static void *counted(const struct compute_target *t, const char *name)
{
    return dlsym(t->handle, name);
}

static int even_groups_are_right(struct grouped g)
{
    const struct ways_taken batched = { 0, EXPERTS, 0 }, spread = { 0, 0, EXPERTS };
    const struct ways_taken in_a_row = { 0 };
    int *version = counted(g.t, "fake_version");
    int failed = 0;

    g.tokens = even;
    failed += run_way(g, LK_GROUP_AUTO, batched);
    failed += run_way(g, LK_GROUP_BATCHED, batched);
    failed += run_way(g, LK_GROUP_STREAMS, spread);
    g.scattered = true; /* the vendor may have nothing for these, nor for what is not aligned */
    failed += run_way(g, LK_GROUP_BATCHED, counted(g.t, "fake_streams_used") ? batched : ANY);
    failed += run_way(g, LK_GROUP_AUTO, ANY);
    if (version) { /* a library that is older than what this was compiled with */
        const int now = *version;

        *version = now / 10000 * 10000;
        failed += run_way(g, LK_GROUP_BATCHED, in_a_row);
        *version = now;
    }
    g.scattered = false;
    g.shift = 1;
    failed += run_way(g, LK_GROUP_BATCHED, ANY);
    g.shift = 0;
    g.hidden = g.ffn = 24; /* of which the tests' library has no batches */
    return failed + run_way(g, LK_GROUP_BATCHED, ANY);
}

static void turn_around(struct grouped *g)
{
    for (int e = 0; e < EXPERTS / 2; e++) {
        struct lk_gemm first = g->gemms[e];

        g->gemms[e] = g->gemms[EXPERTS - 1 - e];
        g->gemms[EXPERTS - 1 - e] = first;
    }
}

/* Of which one differs from the others in something; then all lie one before another. */
static int what_is_no_batch_is_made_otherwise(const struct compute_target *t, struct lk_blas *blas)
{
    struct grouped g = { .t = t, .blas = blas, .type = LK_BF16, .hidden = 40, .ffn = 64 };
    bool vendor = t->lib.lk_gemm_workspace_bytes(blas) > 0;
    struct lk_gemm_groups groups = { .gemms = g.gemms,
                                     .count = EXPERTS,
                                     .grouping = LK_GROUP_BATCHED };
    struct lk_blas_counts before, after;
    int failed = 0;

    g.tokens = even;
    groups.workspace = workspace_take(t, t->lib.lk_gemm_groups_workspace_bytes(blas));
    make(&g);
    for (int change = 0; change < 6; change++) {
        struct lk_gemm *odd = &g.gemms[3], old = *odd;

        if (change == 1)
            odd->rows--;
        else if (change == 2)
            odd->alpha = 2;
        else if (change == 3)
            odd->bias = g.y.memory.far;
        else if (change == 4) {
            odd->c = odd->d;
            odd->c_stride = odd->d_stride;
        } else if (change == 5) {
            turn_around(&g);
            old = *odd;
            groups.grouping = LK_GROUP_AUTO;
        }
        t->lib.lk_blas_counts(blas, &before);
        CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == 0);
        t->lib.lk_blas_counts(blas, &after);
        if (after.batched - before.batched != (vendor && !change ? EXPERTS : 0) && ++failed)
            printf("FAILED: groups, change %d: %llu products in a batch\n", change,
                   (unsigned long long)(after.batched - before.batched));
        *odd = old;
    }
    memory_down(&g.y.memory);
    drop(&g);
    return failed;
}

/* While the library's streams are part of a capture, groups from elsewhere are made on the caller's stream. */
static int a_capture_keeps_its_streams(struct grouped g)
{
    unsigned long long *streams = counted(g.t, "fake_streams_captured");
    unsigned long long *caller = counted(g.t, "fake_caller_captured");
    int *used = counted(g.t, "fake_streams_used"), *left = counted(g.t, "fake_streams_left");
    int failed, before;

    if (!streams || !caller || !used || !left)
        return 0;
    g.tokens = uneven;
    g.streams = 4;
    before = *used;
    failed = run_way(g, LK_GROUP_STREAMS, (struct ways_taken){ 0, 0, EXPERTS - 1 });
    CHECK(*used > before && *left == 0);
    before = *used;
    *streams = 7;
    failed += run_way(g, LK_GROUP_STREAMS, NONE);
    *caller = 5;
    failed += run_way(g, LK_GROUP_STREAMS, NONE);
    CHECK(*used == before);
    *caller = 7;
    failed += run_way(g, LK_GROUP_STREAMS, (struct ways_taken){ 0, 0, EXPERTS - 1 });
    *streams = *caller = 0;
    CHECK(*used > before && *left == 0);
    return failed;
}

static void wrong_arguments_are_refused(const struct compute_target *t, struct lk_blas *blas)
{
    struct lk_gemm gemm = { .rows = 1, .columns = 1, .depth = 1, .type = LK_FP32 };
    struct lk_gemm_groups groups = { .gemms = &gemm, .count = 1 };

    CHECK(t->lib.lk_gemm_groups_run(NULL, &groups, NULL) == -EINVAL);
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
    CHECK(strstr(t->lib.lk_blas_error(), "workspace"));
    groups.workspace = workspace_take(t, t->lib.lk_gemm_groups_workspace_bytes(blas));
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
    CHECK(strstr(t->lib.lk_blas_error(), "neither bf16 nor fp16"));
    groups.grouping = (enum lk_gemm_grouping)5;
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
    CHECK(strstr(t->lib.lk_blas_error(), "grouping 5"));
    groups.grouping = LK_GROUP_STREAMS;
    groups.streams = LK_GEMM_STREAMS + 1;
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
    CHECK(strstr(t->lib.lk_blas_error(), "9 streams"));
    groups = (struct lk_gemm_groups){ .workspace = groups.workspace };
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == 0);
    groups.count = 1;
    CHECK(t->lib.lk_gemm_groups_run(blas, &groups, NULL) == -EINVAL);
}

int check_grouped(const struct compute_target *t)
{
    struct lk_blas *blas = open_blas(t, 0);
    struct grouped g = { .t = t, .blas = blas, .hidden = 40, .ffn = 64 };
    int failed = 0;

    for (int product = 0; product < PRODUCTS; product++)
        for (int type = LK_BF16; type <= LK_FP16; type++)
            for (int wide = 0; wide <= (product == WGRAD); wide++) {
                g.product = product;
                g.type = type;
                g.into_fp32 = wide;
                failed += uneven_groups_are_right(g);
                failed += even_groups_are_right(g);
            }
    g.product = FORWARD;
    failed += a_capture_keeps_its_streams(g);
    failed += what_is_no_batch_is_made_otherwise(t, blas);
    wrong_arguments_are_refused(t, blas);
    t->lib.lk_blas_close(blas);
    return failed;
}
