/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of a library under test beside a reference in double precision. What is wrong is printed, and the next case is
 * run: time on a device is short.
 */
#ifndef LC_TESTS_KERNELS_COMPUTE_ATTENTION_H
#define LC_TESTS_KERNELS_COMPUTE_ATTENTION_H

#include "tests/kernels/compute_matrix.h"

enum attention_ways {
    BY_OUR_KERNELS = 1,
    BY_CUDNN = 2, /* or what stands for it */
};

/* Gives the number of cases that failed. */
int check_attention(const struct compute_target *t, unsigned int ways);

#endif
