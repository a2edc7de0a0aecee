/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrices for the tests of products: of any type in the target's memory, and in double precision here.
 */
#ifndef LC_TESTS_KERNELS_COMPUTE_MATRIX_H
#define LC_TESTS_KERNELS_COMPUTE_MATRIX_H

#include "tests/kernels/compute_rows.h"

/* In the target's memory. */
struct typed {
    enum lk_type type;
    uint64_t rows, columns, stride;
    struct memory memory;
};

struct typed typed_new(const struct compute_target *t, enum lk_type type, uint64_t rows,
                       uint64_t columns, uint64_t stride, size_t shift);
void typed_fill(struct typed *typed, double size, uint64_t *state);
double typed_get(const struct typed *typed, uint64_t row, uint64_t column);

/* Rounded to its type and within `bound` besides. */
bool typed_near(const struct typed *typed, uint64_t row, uint64_t column, double want,
                double bound);

/* In double precision. */
struct dense {
    uint64_t rows, columns;
    double *values;
};

struct dense dense_new(uint64_t rows, uint64_t columns);
void dense_free(struct dense *dense);
double *dense_at(const struct dense *dense, uint64_t row, uint64_t column);
struct dense dense_of(const struct typed *typed);

/* Either may be taken as its transpose. */
struct dense dense_product(const struct dense *a, bool a_transposed, const struct dense *b,
                           bool b_transposed);

/* Every element becomes its magnitude. */
void dense_abs(const struct dense *dense);

/* Root of the sum of squares of the difference, at most that part of what is wanted, and more where there are few elements
 * whose errors could cancel out. */
void check_error(const char *what, const struct typed *got, const struct dense *want, double most);

/* A library of the target with the given flags; a failure is printed. */
struct lk_blas *open_blas(const struct compute_target *t, uint32_t flags);

/* A workspace of the target, until the next one is taken; behind it lies a guard. */
void *workspace_take(const struct compute_target *t, size_t bytes);
void workspace_check(const struct compute_target *t);

#endif
