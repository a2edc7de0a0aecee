/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/compute_attention.h"
#include "tests/check.h"
#include "tests/kernels/reference.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

enum tensor {
    Q,
    K,
    V,
    O,
    DOUT,
    DQ,
    DK,
    DV,
    TENSORS
};

static const char *const names[] = { "q", "k", "v", "o", "dout", "dq", "dk", "dv" };

enum lengths {
    WHOLE,
    KEY_LENGTHS, /* queries are whole */
    LENGTHS,
    PACKED,
};

enum layout {
    ROWS_FIRST,  /* sequence, row, head */
    HEADS_FIRST, /* sequence, head, row */
    ODD,         /* with strides that fit no wide access */
    LAYOUTS,
};

struct attention_case {
    const char *name;
    uint32_t sequences, heads, kv_heads, queries, keys, depth, value_depth;
    enum lk_causal causal;
    enum lengths lengths;
    enum layout layout;
    enum lk_type type;
    float size; /* of q and k; 0: 1 */
    int deterministic;
    int vendor; /* cuDNN has to serve forward (1) and backward (2) */
    int large;  /* not for runs under a checker, nor on the processor */
};

#define BR LK_CAUSAL_BOTTOM_RIGHT
#define TL LK_CAUSAL_TOP_LEFT
#define NO LK_CAUSAL_NONE

static const struct attention_case cases[] = {
  /* name                    n  h  kv q    k    d    dv   mask lengths      layout       type    */
    {"plain",                      2, 2, 2, 64,   64,   64,  64,  NO, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "causal",                    1, 2, 2, 70,   70,   64,  64,  TL, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "groups of two",             2, 4, 2, 33,   65,   64,  64,  NO, WHOLE,       HEADS_FIRST, LK_BF16, 0,  0, 3, 0},
    { "one head for all",          1, 4, 1, 65,   63,   64,  64,  TL, WHOLE,       ROWS_FIRST,  LK_FP16, 0,  0, 3, 0},
    { "depth 128",                 1, 2, 1, 127,  128,  128, 128, TL, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "depths 72 and 40",          1, 2, 2, 20,   30,   72,  40,  NO, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "bottom right",              2, 2, 1, 30,   50,   64,  64,  BR, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "bottom right, hidden rows", 1, 2, 1, 50,   30,   64,  64,  BR, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 0,
     0                                                                                                              },
    { "bottom right, square",      1, 2, 1, 40,   40,   64,  64,  BR, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "lengths of keys",           3, 2, 2, 40,   48,   64,  64,  NO, KEY_LENGTHS, ROWS_FIRST,  LK_BF16, 0,  0, 3,
     0                                                                                                              },
    { "lengths",                   4, 2, 1, 48,   48,   64,  64,  TL, LENGTHS,     ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "lengths, bottom right",     4, 2, 1, 40,   56,   64,  64,  BR, LENGTHS,     ROWS_FIRST,  LK_BF16, 0,  0, 0,
     0                                                                                                              },
    { "packed",                    4, 4, 2, 48,   48,   64,  64,  NO, PACKED,      ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "packed, causal",            4, 2, 2, 64,   64,   128, 128, TL, PACKED,      ROWS_FIRST,  LK_BF16, 0,  0, 3, 0},
    { "packed, bottom right",      4, 2, 2, 40,   50,   32,  32,  BR, PACKED,      ROWS_FIRST,  LK_FP16, 0,  0, 0,
     0                                                                                                              },
    { "deterministic",             2, 4, 2, 64,   64,   64,  64,  TL, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  1, 3, 0},
    { "deterministic, packed",     3, 2, 1, 64,   64,   64,  64,  TL, PACKED,      ROWS_FIRST,  LK_BF16, 0,  1, 3,
     0                                                                                                              },
    { "one query",                 2, 4, 2, 1,    80,   64,  64,  NO, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 1, 0},
    { "one query, bottom right",   2, 4, 2, 1,    80,   64,  64,  BR, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 1,
     0                                                                                                              },
    { "one of each",               1, 1, 1, 1,    1,    64,  64,  TL, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 0, 0},
    { "odd depths",                2, 3, 1, 9,    11,   13,  7,   TL, WHOLE,       ODD,         LK_BF16, 0,  0, 0, 0},
    { "odd strides",               1, 2, 2, 20,   20,   64,  64,  NO, WHOLE,       ODD,         LK_FP16, 0,  0, 0, 0},
    { "depth 320",                 1, 1, 1, 10,   270,  320, 300, NO, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 0, 0},
    { "large scores",              1, 2, 1, 64,   64,   64,  64,  TL, WHOLE,       ROWS_FIRST,  LK_BF16, 16, 0, 3, 0},
    { "many keys, large scores",   1, 1, 1, 24,   700,  16,  16,  NO, WHOLE,       ROWS_FIRST,  LK_BF16, 8,  0, 3,
     0                                                                                                              },
    { "no keys",                   2, 2, 1, 5,    0,    64,  64,  NO, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 0, 0},
    { "no queries",                2, 2, 1, 0,    5,    64,  64,  NO, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 0, 0},
    { "1024 rows, depth 128",      1, 2, 1, 1024, 1024, 128, 128, TL, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0,
     3,                                                                                                            1},
    { "1000 rows, depth 64",       1, 2, 2, 1000, 959,  64,  64,  NO, WHOLE,       HEADS_FIRST, LK_BF16, 0,  0, 3,
     1                                                                                                              },
    { "448 rows, large scores",    1, 2, 2, 448,  448,  64,  64,  TL, WHOLE,       ROWS_FIRST,  LK_BF16, 16, 0, 3,
     1                                                                                                              },
    { "packed, 600 rows",          5, 4, 2, 600,  600,  128, 128, TL, PACKED,      ROWS_FIRST,  LK_BF16, 0,  1, 3,
     1                                                                                                              },
    { "depth 256",                 1, 2, 1, 200,  200,  256, 256, TL, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3, 1},
    { "depths 192 and 128",        1, 2, 2, 256,  256,  192, 128, TL, WHOLE,       ROWS_FIRST,  LK_BF16, 0,  0, 3,
     1                                                                                                              },
};

struct data {
    const struct compute_target *t;
    const struct attention_case *c;
    struct lk_attention_library *library;
    const char *way;
    struct memory heads[TENSORS], lse, lengths[2], offsets[2];
    uint64_t strides[TENSORS][3]; /* of sequences, heads, rows */
    uint32_t length[2][8], first[2][9];
    struct lk_attention call;
    struct lk_attention_grads grads;
    double *values[TENSORS];                /* of what is read, as it lies */
    double *want[TENSORS], *bound[TENSORS]; /* contiguous: sequence, head, row, column */
    double *lse_want, *lse_bound;
    int failed;
};

static bool has_keys(int which)
{
    return which == K || which == V || which == DK || which == DV;
}

static uint64_t heads_of(const struct data *d, int which)
{
    return has_keys(which) ? d->c->kv_heads : d->c->heads;
}

static uint64_t rows_of(const struct data *d, int which)
{
    return has_keys(which) ? d->c->keys : d->c->queries;
}

static uint64_t columns_of(const struct data *d, int which)
{
    return which == V || which == O || which == DOUT || which == DV ? d->c->value_depth
                                                                    : d->c->depth;
}

static void fail(struct data *d, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Once for each case: what follows is mostly the same. */
static void fail(struct data *d, const char *format, ...)
{
    va_list args;

    if (d->failed++)
        return;
    printf("FAILED: attention, %s, %s: ", d->c->name, d->way);
    va_start(args, format);
    vprintf(format, args); /* NOLINT(clang-analyzer-valist.Uninitialized) */
    va_end(args);
    printf("\n");
    fflush(stdout);
}

/* ---- data ---- */

static uint64_t element(const struct data *d, int which, uint64_t sequence, uint64_t head,
                        uint64_t row)
{
    const uint64_t *s = d->strides[which];
    uint64_t at = d->c->lengths == PACKED ? d->first[has_keys(which)][sequence] * s[2]
                                          : sequence * s[0];

    return at + head * s[1] + row * s[2];
}

static uint64_t dense(const struct data *d, int which, uint64_t sequence, uint64_t head,
                      uint64_t row)
{
    return ((sequence * heads_of(d, which) + head) * rows_of(d, which) + row) *
           columns_of(d, which);
}

static double widen(const struct data *d, uint16_t bits)
{
    return d->c->type == LK_BF16 ? from_bf16(bits) : (double)ref_fp16(bits);
}

static double get(const struct data *d, int which, uint64_t at)
{
    return widen(d, ((uint16_t *)(void *)d->heads[which].near)[at]);
}

static void decode(struct data *d, int which)
{
    for (uint64_t i = 0; i < d->heads[which].bytes / 2; i++)
        d->values[which][i] = get(d, which, i);
}

/* Sequences of different lengths, one without rows, one whole; never with queries but no row of the other side alone. */
static void make_lengths(struct data *d)
{
    static const uint32_t eighths[2][8] = {
        {8,  3, 0, 5, 1, 8, 2, 7},
        { 5, 8, 3, 0, 6, 8, 1, 7}
    };
    bool equal = d->c->lengths == PACKED && d->c->queries == d->c->keys;

    for (int side = 0; side < 2; side++) {
        uint32_t most = side ? d->c->keys : d->c->queries;

        for (uint32_t s = 0; s < d->c->sequences; s++) {
            uint32_t part = eighths[equal ? 0 : side][s];

            d->length[side][s] = most;
            if (d->c->lengths >= LENGTHS || (d->c->lengths == KEY_LENGTHS && side))
                d->length[side][s] = (most * part + 4) / 8;
            d->first[side][s + 1] = d->first[side][s] + d->length[side][s];
        }
    }
}

static void put_numbers(struct data *d, struct memory *memory, const uint32_t *numbers, uint32_t n)
{
    *memory = memory_new(d->t, n * 4, 0);
    memcpy(memory->near, numbers, n * 4);
    memory_up(memory);
}

static void make_heads(struct data *d, int which, uint64_t *state)
{
    uint64_t rows = d->c->lengths == PACKED ? d->first[has_keys(which)][d->c->sequences]
                                            : rows_of(d, which);
    uint64_t columns = columns_of(d, which), heads = heads_of(d, which), count;
    uint64_t pad = d->c->layout == ODD ? 3 : 0, *s = d->strides[which];
    double size = d->c->size != 0 && which < V ? (double)d->c->size : 1;
    uint16_t *to;

    s[1] = d->c->layout == HEADS_FIRST ? rows * columns : columns + pad;
    s[2] = d->c->layout == HEADS_FIRST ? columns : heads * (columns + pad);
    s[0] = rows * heads * (columns + pad);
    count = s[0] * (d->c->lengths == PACKED ? 1 : d->c->sequences);
    d->heads[which] = memory_new(d->t, count * 2, d->c->layout == ODD ? 2 : 0);
    to = (uint16_t *)(void *)d->heads[which].near;
    for (uint64_t i = 0; i < count && (which < O || which == DOUT); i++)
        to[i] = d->c->type == LK_BF16 ? to_bf16(size * random_unit(state)) : random_half(-4, state);
    memory_up(&d->heads[which]);
}

static struct lk_heads heads(const struct data *d, int which)
{
    return (struct lk_heads){ d->heads[which].far, d->strides[which][0], d->strides[which][1],
                              d->strides[which][2] };
}

static void make_call(struct data *d)
{
    const struct attention_case *c = d->c;

    d->call = (struct lk_attention){
        .sequences = c->sequences,
        .heads = c->heads,
        .kv_heads = c->kv_heads,
        .queries = c->queries,
        .keys = c->keys,
        .depth = c->depth,
        .value_depth = c->value_depth,
        .type = c->type,
        .causal = c->causal,
        .scale = (float)(1 / sqrt((double)c->depth)),
        .q = heads(d, Q),
        .k = heads(d, K),
        .v = heads(d, V),
        .o = heads(d, O),
        .lse = (float *)(void *)d->lse.far,
    };
    if (c->lengths == LENGTHS)
        d->call.query_lengths = (int32_t *)(void *)d->lengths[0].far;
    if (c->lengths == LENGTHS || c->lengths == KEY_LENGTHS)
        d->call.key_lengths = (int32_t *)(void *)d->lengths[1].far;
    if (c->lengths == PACKED) {
        d->call.query_offsets = (int32_t *)(void *)d->offsets[0].far;
        d->call.key_offsets = c->queries == c->keys ? d->call.query_offsets
                                                    : (int32_t *)(void *)d->offsets[1].far;
    }
    d->grads = (struct lk_attention_grads){ .dout = heads(d, DOUT),
                                            .dq = heads(d, DQ),
                                            .dk = heads(d, DK),
                                            .dv = heads(d, DV),
                                            .deterministic = c->deterministic };
}

static void make_data(struct data *d)
{
    uint64_t state = 4711, rows = (uint64_t)d->c->sequences * d->c->heads * d->c->queries;

    make_lengths(d);
    for (int which = 0; which < TENSORS; which++) {
        uint64_t all = (uint64_t)d->c->sequences * heads_of(d, which) * rows_of(d, which) *
                       columns_of(d, which);

        make_heads(d, which, &state);
        d->want[which] = calloc(all + 1, sizeof(double));
        d->bound[which] = calloc(all + 1, sizeof(double));
        d->values[which] = calloc(d->heads[which].bytes / 2 + 1, sizeof(double));
        CHECK(d->want[which] && d->bound[which] && d->values[which]);
        decode(d, which);
    }
    d->lse = memory_new(d->t, rows * 4, 0);
    memory_up(&d->lse);
    d->lse_want = calloc(rows + 1, sizeof(double));
    d->lse_bound = calloc(rows + 1, sizeof(double));
    CHECK(d->lse_want && d->lse_bound);
    for (int side = 0; side < 2; side++) {
        put_numbers(d, &d->lengths[side], d->length[side], d->c->sequences);
        put_numbers(d, &d->offsets[side], d->first[side], d->c->sequences + 1);
    }
    make_call(d);
}

static void drop_data(struct data *d)
{
    for (int which = 0; which < TENSORS; which++) {
        memory_free(&d->heads[which]);
        free(d->want[which]);
        free(d->bound[which]);
        free(d->values[which]);
    }
    for (int side = 0; side < 2; side++) {
        memory_free(&d->lengths[side]);
        memory_free(&d->offsets[side]);
    }
    memory_free(&d->lse);
    free(d->lse_want);
    free(d->lse_bound);
}

/* ---- the reference ---- */

static uint64_t seen(const struct data *d, uint64_t sequence, uint64_t i)
{
    int64_t keys = d->length[1][sequence], end = keys;

    if (d->c->causal == TL)
        end = (int64_t)i + 1;
    if (d->c->causal == BR)
        end = (int64_t)i + 1 + keys - d->length[0][sequence];
    return end < 0 ? 0 : end < keys ? (uint64_t)end : (uint64_t)keys;
}

static double dot(const struct data *d, int a, uint64_t at, int b, uint64_t bt, double *magnitude)
{
    double sum = 0;

    *magnitude = 0;
    for (uint64_t c = 0; c < columns_of(d, a); c++) {
        double term = d->values[a][at + c] * d->values[b][bt + c];

        sum += term;
        *magnitude += fabs(term);
    }
    return sum;
}

struct row {
    uint64_t sequence, head, kv_head, i;
    double slack; /* x of the header */
};

/* Scores of one row; its lse. */
static double score_row(struct data *d, struct row *r, double *scores, uint64_t end)
{
    double most = -INFINITY, sum = 0, scale = (double)d->call.scale, largest = 0;

    for (uint64_t j = 0; j < end; j++) {
        double magnitude;

        scores[j] = scale * dot(d, Q, element(d, Q, r->sequence, r->head, r->i), K,
                                element(d, K, r->sequence, r->kv_head, j), &magnitude);
        most = fmax(most, scores[j]);
        largest = fmax(largest, scale * magnitude);
    }
    r->slack = 0x1p-18 * largest;
    for (uint64_t j = 0; j < end; j++)
        sum += exp(scores[j] - most);
    return end ? most + log(sum) : INFINITY;
}

static void add_scaled(struct data *d, int to, uint64_t at, double factor, double bound, int from,
                       uint64_t from_at)
{
    for (uint64_t c = 0; c < columns_of(d, to); c++) {
        double x = d->values[from][from_at + c];

        d->want[to][at + c] += factor * x;
        d->bound[to][at + c] += bound * fabs(x);
    }
}

/* One row of queries: what it makes and what it adds to the gradients of keys and values. o: as it was found, rounded. */
static void refer_row(struct data *d, struct row r, double *scores, bool general)
{
    uint64_t end = seen(d, r.sequence, r.i), lse_at;
    double lse = score_row(d, &r, scores, end), sum_magnitude, sum;
    uint64_t at = dense(d, O, r.sequence, r.head, r.i);
    double forward = (general ? 0x1p-13 : 0x1p-7) + 2 * r.slack, backward = 0x1p-6 + 4 * r.slack;

    lse_at = (r.sequence * d->c->heads + r.head) * d->c->queries + r.i;
    d->lse_want[lse_at] = lse;
    d->lse_bound[lse_at] = 0x1p-9 + r.slack;
    sum = dot(d, DOUT, element(d, DOUT, r.sequence, r.head, r.i), O,
              element(d, O, r.sequence, r.head, r.i), &sum_magnitude);
    for (uint64_t j = 0; j < end; j++) {
        uint64_t v = element(d, V, r.sequence, r.kv_head, j),
                 k = element(d, K, r.sequence, r.kv_head, j);
        double p = exp(scores[j] - lse), magnitude, dp, ds, ds_bound;

        dp = dot(d, DOUT, element(d, DOUT, r.sequence, r.head, r.i), V, v, &magnitude);
        ds = (double)d->call.scale * p * (dp - sum);
        ds_bound = backward * (double)d->call.scale * p * (magnitude + sum_magnitude);
        add_scaled(d, O, at, p, forward * p, V, v);
        add_scaled(d, DQ, dense(d, DQ, r.sequence, r.head, r.i), ds, ds_bound, K, k);
        add_scaled(d, DK, dense(d, DK, r.sequence, r.kv_head, j), ds, ds_bound, Q,
                   element(d, Q, r.sequence, r.head, r.i));
        add_scaled(d, DV, dense(d, DV, r.sequence, r.kv_head, j), p, backward * p, DOUT,
                   element(d, DOUT, r.sequence, r.head, r.i));
    }
}

static void refer(struct data *d, bool general)
{
    double *scores = calloc(d->c->keys + 1, sizeof(double));

    CHECK(scores);
    for (uint64_t s = 0; s < d->c->sequences; s++)
        for (uint64_t h = 0; h < d->c->heads; h++)
            for (uint64_t i = 0; i < d->c->queries; i++) {
                struct row r = { s, h, h / (d->c->heads / d->c->kv_heads), i, 0 };

                if (i < d->length[0][s])
                    refer_row(d, r, scores, general);
                else
                    d->lse_want[(s * d->c->heads + h) * d->c->queries + i] = INFINITY;
            }
    free(scores);
}

/* ---- comparing ---- */

static bool near_to(const struct data *d, double got, double want, double bound)
{
    if (d->c->type == LK_BF16)
        return near_bf16(got, want, bound + 1e-30);
    return near_float(got, want, bound + 0x1p-11 * (fabs(want) + bound) + 0x1p-25);
}

/* Rows behind a sequence's end are zeros, packed ones belong to the next. */
static void compare(struct data *d, int which)
{
    memory_down(&d->heads[which]);
    for (uint64_t s = 0; s < d->c->sequences; s++)
        for (uint64_t h = 0; h < heads_of(d, which); h++)
            for (uint64_t i = 0; i < rows_of(d, which); i++) {
                uint64_t at = element(d, which, s, h, i), want = dense(d, which, s, h, i);

                if (d->c->lengths == PACKED && i >= d->length[has_keys(which)][s])
                    continue;
                for (uint64_t c = 0; c < columns_of(d, which); c++)
                    if (!near_to(d, get(d, which, at + c), d->want[which][want + c],
                                 d->bound[which][want + c]))
                        fail(d, "%s[%llu, %llu, %llu, %llu] is %g, not %g within %g", names[which],
                             (unsigned long long)s, (unsigned long long)h, (unsigned long long)i,
                             (unsigned long long)c, get(d, which, at + c), d->want[which][want + c],
                             d->bound[which][want + c]);
            }
}

static void compare_lse(struct data *d)
{
    const float *got = (const float *)(const void *)d->lse.near;

    memory_down(&d->lse);
    for (uint64_t i = 0; i < (uint64_t)d->c->sequences * d->c->heads * d->c->queries; i++) {
        double want = d->lse_want[i];

        if (isinf(want) ? got[i] != (float)want : !(fabs((double)got[i] - want) <= d->lse_bound[i]))
            fail(d, "lse[%llu] is %g, not %g within %g", (unsigned long long)i, (double)got[i],
                 want, d->lse_bound[i]);
    }
}

/* ---- running ---- */

static bool run_call(struct data *d, bool backward, bool general)
{
    const struct compute_lib *lib = &d->t->lib;
    const struct lk_attention_grads *grads = backward ? &d->grads : NULL;
    size_t bytes = lib->lk_attention_workspace_bytes(d->library, &d->call, grads);
    struct lk_attention_counts before, after;
    bool wanted = !general && (d->c->vendor & (backward ? 2 : 1));
    int err;

    if (!bytes) {
        fail(d, "no size of the workspace: %s", lib->lk_blas_error());
        return false;
    }
    d->call.workspace = workspace_take(d->t, bytes);
    lib->lk_attention_counts(d->library, &before);
    err = backward ? lib->lk_attention_backward(d->library, &d->call, &d->grads, NULL)
                   : lib->lk_attention_forward(d->library, &d->call, NULL);
    if (err) {
        fail(d, "%s: %s: %s", backward ? "backward" : "forward", lib->lk_error_text(err),
             lib->lk_blas_error());
        return false;
    }
    lib->lk_attention_counts(d->library, &after);
    workspace_check(d->t);
    if (wanted && (after.general != before.general || after.vendor == before.vendor))
        fail(d, "%s was left to the general kernels: %s", backward ? "backward" : "forward",
             lib->lk_attention_why());
    return true;
}

/* The same bits again, where that is promised. */
static void repeat(struct data *d, bool general)
{
    struct memory again[3];

    if (!general && !d->c->deterministic)
        return;
    for (int i = 0; i < 3; i++) {
        again[i] = memory_new(d->t, d->heads[DQ + i].bytes, 0);
        memcpy(again[i].near, d->heads[DQ + i].near, again[i].bytes);
    }
    for (int times = 0; times < (d->t->small ? 1 : 5) && run_call(d, true, general); times++)
        for (int i = 0; i < 3; i++) {
            memory_down(&d->heads[DQ + i]);
            if (memcmp(again[i].near, d->heads[DQ + i].near, again[i].bytes) != 0)
                fail(d, "%s is not the same when it is made again", names[DQ + i]);
        }
    for (int i = 0; i < 3; i++)
        memory_free(&again[i]);
}

/* Backward that has neither o nor lse is as right; by our own kernels alone it has the same bits. */
static void forget(struct data *d, bool general)
{
    struct lk_attention kept = d->call;
    bool ours = strcmp(d->way, "cuDNN") != 0;

    d->call.o.base = NULL;
    d->call.lse = NULL;
    for (int i = 0; i < 3; i++) {
        struct memory *memory = &d->heads[DQ + i];
        uint16_t *now = (uint16_t *)(void *)memory->near, *before = malloc(memory->bytes + 1);

        CHECK(before);
        memcpy(before, now, memory->bytes);
        memset(now, 0xff, memory->bytes); /* NaN */
        memory_up(memory);
        if (run_call(d, true, general))
            compare(d, DQ + i);
        for (uint64_t at = 0; ours && at < memory->bytes / 2; at++)
            if (now[at] != before[at] && now[at] != 0xffff) /* between rows nothing is written */
                fail(d, "%s[%llu] is %04x, was %04x, without o and lse", names[DQ + i],
                     (unsigned long long)at, now[at], before[at]);
        free(before);
    }
    d->call = kept;
}

static int run_case(const struct compute_target *t, struct lk_attention_library *library,
                    const struct attention_case *c, bool general)
{
    struct data d = { .t = t,
                      .c = c,
                      .library = library,
                      .way = general ? "our own kernels" : "cuDNN" };
    clock_t begun = clock();

    make_data(&d);
    if (run_call(&d, false, general)) {
        memory_down(&d.heads[O]);
        decode(&d, O);
        refer(&d, general || !(c->vendor & 1));
        compare(&d, O);
        compare_lse(&d);
        if (run_call(&d, true, general)) {
            compare(&d, DQ);
            compare(&d, DK);
            compare(&d, DV);
            repeat(&d, general || !(c->vendor & 2));
            if (!d.call.query_offsets)
                forget(&d, general || !(c->vendor & 2));
        }
    }
    drop_data(&d);
    /* cuDNN may take seconds for a plan: one sees where the time goes */
    if (!d.failed && !t->small)
        printf("passed: attention, %s, %s, %.1f s\n", c->name, d.way,
               (double)(clock() - begun) / CLOCKS_PER_SEC);
    fflush(stdout);
    return d.failed != 0;
}

/* A NaN in a value reaches the rows that see it; without one nothing is NaN. */
static int nan_reaches_what_sees_it(const struct compute_target *t,
                                    struct lk_attention_library *library)
{
    static const struct attention_case c = { "a NaN", 1,     1,          1,       8, 8, 16, 16,
                                             TL,      WHOLE, ROWS_FIRST, LK_BF16, 0, 0, 0,  0 };
    struct data d = { .t = t, .c = &c, .library = library, .way = "our own kernels" };

    make_data(&d);
    ((uint16_t *)(void *)d.heads[V].near)[5 * 16] = 0x7fc0;
    memory_up(&d.heads[V]);
    if (run_call(&d, false, true)) {
        memory_down(&d.heads[O]);
        for (uint64_t i = 0; i < 8; i++)
            if (isnan(get(&d, O, i * 16)) != (i >= 5) || isnan(get(&d, O, i * 16 + 1)))
                fail(&d, "row %llu", (unsigned long long)i);
    }
    drop_data(&d);
    return d.failed != 0;
}

int check_attention(const struct compute_target *t, unsigned int ways)
{
    struct lk_attention_library *library;
    int failed = 0;

    for (int general = 1; general >= 0; general--) {
        int err;

        if (!(ways & (general ? BY_OUR_KERNELS : BY_CUDNN)))
            continue;
        err = t->lib.lk_attention_open(NULL, general ? LK_ATTENTION_GENERAL : 0, &library);

        if (err) {
            printf("FAILED: lk_attention_open: %s: %s\n", t->lib.lk_error_text(err),
                   t->lib.lk_blas_error());
            failed++;
            continue;
        }
        for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
            if (!cases[i].large || !t->small)
                failed += run_case(t, library, &cases[i], general);
        if (general)
            failed += nan_reaches_what_sees_it(t, library);
        t->lib.lk_attention_close(library);
    }
    return failed;
}
