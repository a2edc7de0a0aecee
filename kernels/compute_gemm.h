/* SPDX-License-Identifier: Apache-2.0
 *
 * What the general kernel of matrix products does with single elements. Every sum is taken over the depth in its order, in
 * both libraries.
 */
#ifndef LK_COMPUTE_GEMM_H
#define LK_COMPUTE_GEMM_H

#include "kernels/blocks_internal.h"
#include "kernels/compute_access.h"

LK_INLINE float gemm_read(const void *base, enum lk_type type, uint64_t at)
{
    if (type == LK_FP32)
        return ((const float *)base)[at];
    return type == LK_BF16 ? widen_bf16(((const uint16_t *)base)[at])
                           : widen_fp16(((const uint16_t *)base)[at]);
}

/* Element (row, k) of a, as it is multiplied; 0 outside. */
LK_INLINE float gemm_a(const struct lk_gemm *gemm, uint64_t row, uint64_t k)
{
    if (row >= gemm->rows || k >= gemm->depth)
        return 0;
    return gemm_read(gemm->a, gemm->type,
                     gemm->a_transposed ? k * gemm->a_stride + row : row * gemm->a_stride + k);
}

/* Element (k, column) of b. */
LK_INLINE float gemm_b(const struct lk_gemm *gemm, uint64_t k, uint64_t column)
{
    if (column >= gemm->columns || k >= gemm->depth)
        return 0;
    return gemm_read(gemm->b, gemm->type,
                     gemm->b_transposed ? column * gemm->b_stride + k
                                        : k * gemm->b_stride + column);
}

LK_INLINE void gemm_write(const struct lk_gemm *gemm, uint64_t row, uint64_t column, float sum)
{
    uint64_t at = row * gemm->d_stride + column;

    sum = multiply(gemm->alpha, sum);
    if (gemm->c && gemm->beta != 0)
        sum += multiply(gemm->beta,
                        gemm_read(gemm->c, gemm->out_type, row * gemm->c_stride + column));
    if (gemm->bias)
        sum += gemm_read(gemm->bias, gemm->out_type, column);
    if (gemm->out_type == LK_FP32)
        ((float *)gemm->d)[at] = sum;
    else if (gemm->out_type == LK_BF16)
        ((uint16_t *)gemm->d)[at] = (uint16_t)round_bf16(sum);
    else
        ((uint16_t *)gemm->d)[at] = (uint16_t)narrow_fp16(sum);
}

#endif
