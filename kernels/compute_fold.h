/* SPDX-License-Identifier: Apache-2.0
 *
 * What a thread does in the passes over matrices beside the products: a norm's weight into a matrix and back out of its
 * gradients, sums over rows, and the norm's part of the gradient of its input.
 */
#ifndef LK_COMPUTE_FOLD_H
#define LK_COMPUTE_FOLD_H

#include "kernels/blocks_internal.h"
#include "kernels/compute_norm.h"

/* Eight elements of a matrix in either type. */
LK_INLINE void fold_read(const void *base, enum lk_type type, uint64_t row_at, uint64_t at,
                         uint64_t columns, enum lk_width width, float out[8])
{
    if (type == LK_BF16) {
        read8_bf16((const uint16_t *)base + row_at, at, columns, width, out);
        return;
    }
    read4((const float *)base + row_at, at, columns, width, out);
    read4((const float *)base + row_at, at + 4, columns, width, out + 4);
}

LK_INLINE void fold_gamma(const struct lk_fold *fold, uint64_t at, enum lk_width width,
                          float out[8])
{
    fold_read(fold->gamma, fold->gamma_type, 0, at, fold->columns, width, out);
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        out[i] += fold->gamma_offset;
}

/* A row of the folded matrix. */
LK_INLINE void fold_forward_thread(const struct lk_fold_launch *launch, uint64_t row,
                                   uint64_t thread, uint64_t threads, enum lk_width width)
{
    const struct lk_fold *fold = &launch->fold;
    uint64_t row_at = row * fold->columns;

    for (uint64_t at = 8 * thread; at < fold->columns; at += 8 * threads) {
        float weight[8], gamma[8];

        fold_read(fold->weight, fold->weight_type, row_at, at, fold->columns, width, weight);
        fold_gamma(fold, at, width, gamma);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            weight[i] *= gamma[i];
        write8_bf16(launch->folded + row_at, at, fold->columns, width, weight);
    }
}

/* A row's gradients: dweight, and what they add to the sums of eight columns each. */
LK_INLINE void fold_backward_group(const struct lk_fold_launch *launch, uint64_t row, uint64_t at,
                                   enum lk_width width, float sums[8])
{
    const struct lk_fold *fold = &launch->fold;
    const struct lk_fold_grads *grads = &launch->grads;
    uint64_t row_at = row * fold->columns;
    float grad[8], other[8];

    fold_read(grads->dfolded, grads->grad_type, row * launch->stride, at, fold->columns, width,
              grad);
    if (!launch->plain && launch->partials) {
        fold_read(fold->weight, fold->weight_type, row_at, at, fold->columns, width, other);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            sums[i] += grad[i] * other[i];
    }
    if (launch->plain) {
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            sums[i] += grad[i];
    }
    if (!grads->dweight)
        return;
    fold_gamma(fold, at, width, other);
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        grad[i] *= other[i];
    if (grads->grad_type == LK_BF16) {
        write8_bf16((uint16_t *)grads->dweight + row_at, at, fold->columns, width, grad);
        return;
    }
    write4((float *)grads->dweight + row_at, at, fold->columns, width, grad);
    write4((float *)grads->dweight + row_at, at + 4, fold->columns, width, grad + 4);
}

LK_INLINE uint64_t fold_groups(uint64_t columns)
{
    return (columns + 7) / 8;
}

/* Every so many rows, from `first`, of one group of columns. */
LK_INLINE void fold_backward_rows(const struct lk_fold_launch *launch, uint64_t group,
                                  uint64_t first, uint64_t every, enum lk_width width,
                                  float sums[8])
{
    for (uint64_t row = first; row < launch->fold.rows; row += every)
        fold_backward_group(launch, row, 8 * group, width, sums);
}

/* The same of a sum of dfolded alone in bf16, where four rows are under way together. */
LK_INLINE void fold_sum_rows(const struct lk_fold_launch *launch, uint64_t group, uint64_t first,
                             uint64_t every, enum lk_width width, float sums[8])
{
    const uint16_t *from = (const uint16_t *)launch->grads.dfolded;
    const struct lk_fold *fold = &launch->fold;

    for (uint64_t row = first; row < fold->rows; row += 4 * every) {
        float values[4][8];

        LK_UNROLL
        for (size_t j = 0; j < 4; j++) {
            uint64_t nth = row + j * every;

            LK_UNROLL
            for (size_t i = 0; i < 8; i++)
                values[j][i] = 0;
            if (nth < fold->rows) /* from the last row on, see from_the_end() */
                read8_bf16(from + (fold->rows - 1 - nth) * launch->stride, 8 * group, fold->columns,
                           width, values[j]);
        }
        LK_UNROLL
        for (size_t j = 0; j < 4; j++) {
            LK_UNROLL
            for (size_t i = 0; i < 8; i++)
                sums[i] += values[j][i];
        }
    }
}

/* One of eight parts of a column's sum over the partial rows. */
LK_INLINE float fold_column_part(const struct lk_fold_launch *launch, uint64_t column,
                                 uint64_t part)
{
    uint64_t width = fold_groups(launch->fold.columns) * 8;
    const float *at = (const float *)launch->grads.workspace + column;
    float sum = 0;

#ifdef __CUDA_ARCH__
#pragma unroll 8
#endif
    for (uint64_t row = part; row < launch->partials; row += 8)
        sum += at[row * width];
    return sum;
}

LK_INLINE float fold_column_sum(const float parts[8])
{
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
           ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

/* A row of the norm's part of dx. */
LK_INLINE void undo_thread(const struct lk_undo_launch *launch, uint64_t row, uint64_t thread,
                           uint64_t threads, enum lk_width width)
{
    const uint16_t *x = launch->x + row * launch->x_stride;
    const uint16_t *add = launch->add ? launch->add + row * launch->add_stride : NULL;
    uint16_t *dx = launch->dx + row * launch->dx_stride;
    float rstd = launch->rstd[row];
    float factor = -launch->row_dot[row] * rstd * rstd * rstd / (float)launch->columns;

    for (uint64_t at = 8 * thread; at < launch->columns; at += 8 * threads) {
        float own[8], other[8] = { 0 };

        read8_bf16(x, at, launch->columns, width, own);
        if (add)
            read8_bf16(add, at, launch->columns, width, other);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            own[i] = factor * own[i] + other[i];
        write8_bf16(dx, at, launch->columns, width, own);
    }
}

#endif
