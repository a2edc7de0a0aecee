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

/* bf16 alone: one value, as rows_fill() has them. */
void typed_set(struct typed *typed, uint64_t row, uint64_t column, double value);
void typed_refill(struct typed *typed, enum filling filling, uint64_t *state);
double typed_get(const struct typed *typed, uint64_t row, uint64_t column);
bool typed_same(const struct typed *a, const struct typed *b, uint64_t row); /* a row's bits */

/* Rounded to its type and within `bound` besides. */
bool typed_near(const struct typed *typed, uint64_t row, uint64_t column, double want,
                double bound);

/* How far a value may be from what is wanted: rounded to its type, and `bound` besides. */
double typed_bound(enum lk_type type, double want, double bound);

/* What a value should be. again: the magnitudes of what may be rounded to the type of the result before something is added to
 * it, as loongblocks.h says of sums with bias and with c; 0 where nothing may. */
struct expected {
    double value, bound, again[2];
};

/* Values compared under one name. The first wrong ones are printed, each with what it is and what is allowed. */
struct tally {
    char name[120];
    uint64_t values;
    uint64_t twice; /* of them only right if they were rounded more than once */
    uint64_t wrong;
};

void tally_value(struct tally *tally, const struct typed *got, uint64_t row, uint64_t column,
                 const struct expected *expected);

/* Prints one line if something is wrong, was rounded more than once or `always`. 1 if something is wrong. */
int tally_end(const struct tally *tally, bool always);

const char *type_name(enum lk_type type);

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
 * whose errors could cancel out. What is wrong is printed and counted, so that a run shows all of it. */
void check_error(const char *what, const struct typed *got, const struct dense *want, double most);
int matrix_errors(void); /* that check_error() has counted */

/* A library of the target with the given flags; a failure is printed. */
struct lk_blas *open_blas(const struct compute_target *t, uint32_t flags);

/* A workspace of the target, until the next one is taken; behind it lies a guard. */
void *workspace_take(const struct compute_target *t, size_t bytes);
void workspace_check(const struct compute_target *t);

#endif
