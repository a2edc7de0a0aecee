/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of loongkernels.h written a second time, by other means (doubles, comparisons).
 */
#ifndef LC_TESTS_KERNELS_REFERENCE_H
#define LC_TESTS_KERNELS_REFERENCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

uint32_t ref_bits(float x);
float ref_float(uint32_t bits);

/* fp32 product x * scale as bf16: nearest even, or stochastic with 16 random bits. */
uint16_t ref_nearest(float x, float scale);
uint16_t ref_stochastic(float x, float scale, unsigned int random);

/* Philox4x32-10 with full counter and key. */
void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* 16 random bits of one element. */
unsigned int ref_random(uint64_t seed, uint64_t element);

float ref_fp16(uint16_t half);

/* splitmix64, for test data. */
uint64_t ref_next(uint64_t *state);

#ifdef __cplusplus
}
#endif

#endif
