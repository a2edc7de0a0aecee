/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrices of bf16 for the tests of kernels that work on rows.
 */
#ifndef LC_TESTS_KERNELS_COMPUTE_ROWS_H
#define LC_TESTS_KERNELS_COMPUTE_ROWS_H

#include "tests/kernels/compute.h"

#include <stdint.h>

struct rows {
    uint64_t rows, columns, stride;
    struct memory memory;
};

enum filling {
    FILL_RANDOM,  /* [-2, 2) */
    FILL_LARGE,   /* some are sixty times as large */
    FILL_EQUAL,   /* one value */
    FILL_SHIFTED, /* 100 and a little */
    FILLINGS,
};

/* stride 0 gives one row for all; shift in elements. */
struct rows rows_new(const struct compute_target *t, uint64_t rows, uint64_t columns,
                     uint64_t stride, size_t shift);
void rows_fill(struct rows *rows, enum filling filling, uint64_t *state);
uint16_t *rows_at(const struct rows *rows, uint64_t row);
double rows_get(const struct rows *rows, uint64_t row, uint64_t column);

/* Rounded to bf16 and within `bound` besides; a NaN is wanted as a NaN. */
bool near_bf16(double got, double want, double bound);
bool near_float(double got, double want, double bound);

void check_swiglu(const struct compute_target *t);
void check_norm(const struct compute_target *t);
void check_moe(const struct compute_target *t);
void check_augment(const struct compute_target *t);

/* A few calls of every kernel whose threads share memory, for a checker of races. */
void check_races(const struct compute_target *t);

/* Once with the kernel of our own, once as the library does it. Prints what is wrong and goes on; gives how many sorts of
 * products failed. */
int check_gemm(const struct compute_target *t);
void check_fold(const struct compute_target *t);
void check_mlp(const struct compute_target *t);
void check_norm_linear(const struct compute_target *t);

/* Prints what is wrong and goes on; gives the number of cases that failed. */
int check_grouped(const struct compute_target *t);

/* As adamw_fingerprint(), of the gradient of weights. */
uint64_t moe_fingerprint(const struct compute_target *t);
uint64_t augment_fingerprint(const struct compute_target *t); /* of all types of output */

#endif
