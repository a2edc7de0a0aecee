/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/compute_matrix.h"
#include "tests/check.h"
#include "tests/kernels/reference.h"

#include <math.h>
#include <string.h>

static uint64_t type_bytes(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

struct typed typed_new(const struct compute_target *t, enum lk_type type, uint64_t rows,
                       uint64_t columns, uint64_t stride, size_t shift)
{
    struct typed out = { .type = type, .rows = rows, .columns = columns, .stride = stride };
    uint64_t elements = rows ? (rows - 1) * stride + columns : 0;

    out.memory = memory_new(t, elements * type_bytes(type), shift * type_bytes(type));
    return out;
}

static void *place(const struct typed *typed, uint64_t row, uint64_t column)
{
    return typed->memory.near + (row * typed->stride + column) * type_bytes(typed->type);
}

void typed_fill(struct typed *typed, double size, uint64_t *state)
{
    for (uint64_t r = 0; r < typed->rows; r++) {
        for (uint64_t c = 0; c < typed->columns; c++) {
            if (typed->type == LK_FP32)
                *(float *)place(typed, r, c) = (float)(size * random_unit(state));
            else if (typed->type == LK_BF16)
                *(uint16_t *)place(typed, r, c) = to_bf16(size * random_unit(state));
            else
                *(uint16_t *)place(typed, r, c) = random_half(-3, state);
        }
    }
    memory_up(&typed->memory);
}

void typed_set(struct typed *typed, uint64_t row, uint64_t column, double value)
{
    *(uint16_t *)place(typed, row, column) = to_bf16(value);
    memory_up(&typed->memory);
}

void typed_refill(struct typed *typed, enum filling filling, uint64_t *state)
{
    struct rows rows = { typed->rows, typed->columns, typed->stride, typed->memory };

    rows_fill(&rows, filling, state);
}

bool typed_same(const struct typed *a, const struct typed *b, uint64_t row)
{
    return memcmp(place(a, row, 0), place(b, row, 0), a->columns * type_bytes(a->type)) == 0;
}

double typed_get(const struct typed *typed, uint64_t row, uint64_t column)
{
    void *at = place(typed, row, column);

    if (typed->type == LK_FP32)
        return (double)*(float *)at;
    return typed->type == LK_BF16 ? from_bf16(*(uint16_t *)at) : (double)ref_fp16(*(uint16_t *)at);
}

double typed_bound(enum lk_type type, double want, double bound)
{
    if (type == LK_FP32)
        return bound + 0x1p-23 * fabs(want);
    if (type == LK_BF16)
        return bound + 0x1p-8 * (fabs(want) + bound) + 0x1p-134;
    return bound + 0x1p-11 * (fabs(want) + bound) + 0x1p-25;
}

bool typed_near(const struct typed *typed, uint64_t row, uint64_t column, double want, double bound)
{
    return near_float(typed_get(typed, row, column), want, typed_bound(typed->type, want, bound));
}

const char *type_name(enum lk_type type)
{
    return type == LK_FP32 ? "fp32" : type == LK_BF16 ? "bf16" : "fp16";
}

/* ---- tallies ---- */

#define SHOWN 3 /* values of a tally that are printed */

void tally_value(struct tally *tally, const struct typed *got, uint64_t row, uint64_t column,
                 const struct expected *expected)
{
    double value = typed_get(got, row, column), bound = expected->bound, allowed;

    tally->values++;
    allowed = typed_bound(got->type, expected->value, bound);
    if (near_float(value, expected->value, allowed))
        return;
    for (int i = 0; i < 2; i++) {
        if (expected->again[i] > 0)
            bound = typed_bound(got->type, expected->again[i], bound);
    }
    allowed = typed_bound(got->type, expected->value, bound);
    if (near_float(value, expected->value, allowed)) {
        tally->twice++;
        return;
    }
    if (tally->wrong++ < SHOWN)
        printf(
            "FAILED: %s: %llu x %llu %s: [%llu, %llu] is %.9g, not %.9g: off by %.3g, allowed %.3g%s\n",
            tally->name, (unsigned long long)got->rows, (unsigned long long)got->columns,
            type_name(got->type), (unsigned long long)row, (unsigned long long)column, value,
            expected->value, fabs(value - expected->value), allowed,
            bound > expected->bound ? " if rounded more than once" : "");
}

int tally_end(const struct tally *tally, bool always)
{
    if (always || tally->twice || tally->wrong)
        printf("%s: %s: %llu values, %llu rounded more than once, %llu wrong\n",
               tally->wrong ? "FAILED" : "passed", tally->name, (unsigned long long)tally->values,
               (unsigned long long)tally->twice, (unsigned long long)tally->wrong);
    return tally->wrong != 0;
}

/* ---- in double precision ---- */

struct dense dense_new(uint64_t rows, uint64_t columns)
{
    struct dense out = { rows, columns, calloc(rows * columns + 1, sizeof(double)) };

    CHECK(out.values);
    return out;
}

void dense_free(struct dense *dense)
{
    free(dense->values);
}

double *dense_at(const struct dense *dense, uint64_t row, uint64_t column)
{
    return &dense->values[row * dense->columns + column];
}

struct dense dense_of(const struct typed *typed)
{
    struct dense out = dense_new(typed->rows, typed->columns);

    for (uint64_t r = 0; r < typed->rows; r++)
        for (uint64_t c = 0; c < typed->columns; c++)
            *dense_at(&out, r, c) = typed_get(typed, r, c);
    return out;
}

struct dense dense_product(const struct dense *a, bool a_transposed, const struct dense *b,
                           bool b_transposed)
{
    uint64_t depth = a_transposed ? a->rows : a->columns;
    struct dense out = dense_new(a_transposed ? a->columns : a->rows,
                                 b_transposed ? b->rows : b->columns);

    CHECK(depth == (b_transposed ? b->columns : b->rows));
    for (uint64_t r = 0; r < out.rows; r++) {
        const double *left = dense_at(a, a_transposed ? 0 : r, a_transposed ? r : 0);

        for (uint64_t c = 0; c < out.columns; c++) {
            const double *right = dense_at(b, b_transposed ? c : 0, b_transposed ? 0 : c);
            double sum = 0;

            for (uint64_t k = 0; k < depth; k++)
                sum += left[k * (a_transposed ? a->columns : 1)] *
                       right[k * (b_transposed ? 1 : b->columns)];
            *dense_at(&out, r, c) = sum;
        }
    }
    return out;
}

void dense_abs(const struct dense *dense)
{
    for (uint64_t i = 0; i < dense->rows * dense->columns; i++)
        dense->values[i] = fabs(dense->values[i]);
}

/* Of the tests' only thread. */
static int errors;

void check_error(const char *what, const struct typed *got, const struct dense *want, double most)
{
    double error = 0, size = 0, few = sqrt((double)(got->rows * got->columns));

    CHECK(got->rows == want->rows && got->columns == want->columns);
    for (uint64_t r = 0; r < got->rows; r++) {
        for (uint64_t c = 0; c < got->columns; c++) {
            double w = *dense_at(want, r, c), e = typed_get(got, r, c) - w;

            error += e * e;
            size += w * w;
        }
    }
    error = sqrt(error);
    most *= (1 + 8 / few) * sqrt(size);
    if (error <= most)
        return;
    printf("FAILED: %s, %llu x %llu %s: error %g, at most %g wanted\n", what,
           (unsigned long long)got->rows, (unsigned long long)got->columns, type_name(got->type),
           error, most);
    errors++;
}

int matrix_errors(void)
{
    return errors;
}

struct lk_blas *open_blas(const struct compute_target *t, uint32_t flags)
{
    struct lk_blas *blas = NULL;
    int err = t->lib.lk_blas_open(NULL, flags, &blas);

    if (err)
        fprintf(stderr, "%s\n", t->lib.lk_blas_error());
    CHECK(err == 0 && blas);
    return blas;
}

/* The last workspace: kept, since those of the vendor's library are large. Of the tests' only thread. */
static struct {
    const struct compute_target *target;
    unsigned char *far;
    size_t room, used;
} workspace;

static const unsigned char workspace_guard[256] = { 0x5a, 0xa5, 1, 2, 3, 4, 5, 6, 7, 8 };

void *workspace_take(const struct compute_target *t, size_t bytes)
{
    CHECK(t);
    if (workspace.target != t || workspace.room < bytes + sizeof(workspace_guard)) {
        if (workspace.target)
            workspace.target->release(workspace.far);
        workspace.room = bytes + sizeof(workspace_guard);
        workspace.far = t->alloc(workspace.room);
        workspace.target = t;
    }
    CHECK(workspace.far && (uintptr_t)workspace.far % 256 == 0);
    workspace.used = bytes;
    t->put(workspace.far + bytes, workspace_guard, sizeof(workspace_guard));
    return workspace.far;
}

void workspace_check(const struct compute_target *t)
{
    unsigned char guard[sizeof(workspace_guard)];

    t->get(guard, workspace.far + workspace.used, sizeof(guard));
    CHECK(memcmp(guard, workspace_guard, sizeof(guard)) == 0);
}
