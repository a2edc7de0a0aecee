/* SPDX-License-Identifier: Apache-2.0
 *
 * What a thread does in the kernels of RMSNorm and LayerNorm that serve every shape, and the arithmetic of them all. Here
 * a row is read again for each step; between the steps of a row the block adds up what its threads found.
 */
#ifndef LK_COMPUTE_NORM_H
#define LK_COMPUTE_NORM_H

#include "kernels/compute_access.h"

#include <math.h>

LK_INLINE void norm_read(const uint16_t *base, uint64_t at, uint64_t columns, enum lk_width width,
                         float out[8])
{
    if (width == LK_WHOLE)
        load8_bf16(base + at, out);
    else
        read8_bf16(base, at, columns, LK_SINGLE, out);
}

/* Weights of eight columns; `offset` is added to what is there, `absent` stands for what is not. */
LK_INLINE void norm_weights(const struct lk_norm *norm, const void *weights, uint64_t at,
                            enum lk_width width, float absent, float offset, float out[8])
{
    if (!weights) {
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            out[i] = absent;
        return;
    }
    if (norm->weight_type == LK_BF16) {
        norm_read((const uint16_t *)weights, at, norm->columns, width, out);
    } else {
        read4_kept((const float *)weights, at, norm->columns, width, out);
        read4_kept((const float *)weights, at + 4, norm->columns, width, out + 4);
    }
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        out[i] += offset;
}

/* ---- forward ---- */

struct norm_row {
    const uint16_t *x, *residual;
    uint16_t *sum, *y;
    const uint16_t *s; /* what is normalised, after the first step */
    uint64_t columns;
};

LK_INLINE struct norm_row norm_find_row(const struct lk_norm_launch *launch, uint64_t row)
{
    const struct lk_norm_forward *f = &launch->forward;
    struct norm_row out;

    out.x = (const uint16_t *)f->x + row * f->x_stride;
    out.residual = f->residual ? (const uint16_t *)f->residual + row * f->residual_stride : NULL;
    out.sum = f->sum ? (uint16_t *)f->sum + row * f->sum_stride : NULL;
    out.y = f->y ? (uint16_t *)f->y + row * f->y_stride : NULL;
    out.s = out.sum ? out.sum : out.x;
    out.columns = launch->norm.columns;
    return out;
}

/* What sums of LayerNorm are taken around: the row's first element. 0 for RMSNorm. */
LK_INLINE float norm_shift(const struct lk_norm *norm, const struct norm_row *row)
{
    float first = widen_bf16(row->x[0]);

    if (norm->kind == LK_RMS_NORM)
        return 0;
    return row->residual ? bits_float(round_bf16(first + widen_bf16(row->residual[0])) << 16)
                         : first;
}

/* Makes s; the thread's sum of s - shift, or of the squares of s. Every thread has its shift before one writes. */
LK_INLINE float norm_first_thread(const struct norm_row *row, int squares, float shift,
                                  uint64_t thread, uint64_t threads, enum lk_width width)
{
    float total = 0;

    for (uint64_t at = 8 * thread; at < row->columns; at += 8 * threads) {
        float s[8], other[8];

        norm_read(row->x, at, row->columns, width, s);
        if (row->residual) {
            norm_read(row->residual, at, row->columns, width, other);
            LK_UNROLL
            for (size_t i = 0; i < 8; i++)
                s[i] = bits_float(round_bf16(s[i] + other[i]) << 16);
        }
        if (row->sum)
            write8_bf16(row->sum, at, row->columns, width, s);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            if (at + i < row->columns)
                total += squares ? s[i] * s[i] : s[i] - shift;
    }
    return total;
}

/* The thread's sum of squares around the mean, which is shift + rest. */
LK_INLINE float norm_second_thread(const struct norm_row *row, float shift, float rest,
                                   uint64_t thread, uint64_t threads, enum lk_width width)
{
    float total = 0;

    for (uint64_t at = 8 * thread; at < row->columns; at += 8 * threads) {
        float s[8];

        norm_read(row->s, at, row->columns, width, s);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++) {
            float away = s[i] - shift - rest;

            total += at + i < row->columns ? away * away : 0;
        }
    }
    return total;
}

LK_INLINE float norm_rstd(const struct lk_norm *norm, float squares)
{
    return 1 / sqrtf(squares / (float)norm->columns + (float)norm->eps);
}

/* What the steps of a row found. */
struct norm_found {
    float shift, rest, rstd;
};

LK_INLINE void norm_apply_thread(const struct lk_norm *norm, const struct norm_row *row,
                                 struct norm_found found, uint64_t thread, uint64_t threads,
                                 enum lk_width width)
{
    for (uint64_t at = 8 * thread; at < row->columns; at += 8 * threads) {
        float s[8], gamma[8], beta[8];

        norm_read(row->s, at, row->columns, width, s);
        norm_weights(norm, norm->gamma, at, width, 1, norm->gamma_offset, gamma);
        norm_weights(norm, norm->beta, at, width, 0, 0, beta);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            s[i] = (s[i] - found.shift - found.rest) * found.rstd * gamma[i] + beta[i];
        write8_bf16(row->y, at, row->columns, width, s);
    }
}

/* ---- backward ---- */

struct norm_back_row {
    const uint16_t *s, *dy, *ds;
    uint16_t *dx;
    float mean, rstd;
};

LK_INLINE struct norm_back_row norm_find_back(const struct lk_norm_launch *launch, uint64_t row)
{
    const struct lk_norm_backward *b = &launch->backward;
    struct norm_back_row out;

    out.s = (const uint16_t *)b->s + row * b->s_stride;
    out.dy = (const uint16_t *)b->dy + row * b->dy_stride;
    out.ds = b->ds ? (const uint16_t *)b->ds + row * b->ds_stride : NULL;
    out.dx = (uint16_t *)b->dx + row * b->dx_stride;
    out.mean = launch->norm.kind == LK_LAYER_NORM ? launch->norm.mean[row] : 0;
    out.rstd = launch->norm.rstd[row];
    return out;
}

/* Sums over a row of dy * gamma, and of that times the normalised value. */
struct norm_sums {
    float plain, product;
};

LK_INLINE struct norm_sums norm_sums_thread(const struct lk_norm *norm,
                                            const struct norm_back_row *row, uint64_t thread,
                                            uint64_t threads, enum lk_width width)
{
    struct norm_sums sums = { 0, 0 };

    for (uint64_t at = 8 * thread; at < norm->columns; at += 8 * threads) {
        float s[8], dy[8], gamma[8];

        norm_read(row->s, at, norm->columns, width, s);
        norm_read(row->dy, at, norm->columns, width, dy);
        norm_weights(norm, norm->gamma, at, width, 1, norm->gamma_offset, gamma);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++) {
            float d = at + i < norm->columns ? dy[i] * gamma[i] : 0;
            float hat = at + i < norm->columns ? (s[i] - row->mean) * row->rstd : 0;

            sums.plain += d;
            sums.product += d * hat;
        }
    }
    return sums;
}

/* Where a block adds up dgamma and dbeta: column c of group c / 8 lies so that neighbouring threads, each with a group,
 * touch neighbouring quarters of shared memory. */
LK_INLINE uint64_t norm_slot(uint64_t groups, uint64_t at, uint64_t i)
{
    return i / 4 * groups * 4 + at / 2 + i % 4;
}

/* dx, and the row's part of dgamma (partial NULL: not wanted) and, if it is wanted, dbeta in 8 * groups floats each. */
LK_INLINE void norm_back_thread(const struct lk_norm *norm, const struct norm_back_row *row,
                                struct norm_sums means, float *partial, int beta, uint64_t thread,
                                uint64_t threads, enum lk_width width)
{
    uint64_t groups = (norm->columns + 7) / 8;

    for (uint64_t at = 8 * thread; at < norm->columns; at += 8 * threads) {
        float s[8], dy[8], gamma[8], ds[8] = { 0 };

        norm_read(row->s, at, norm->columns, width, s);
        norm_read(row->dy, at, norm->columns, width, dy);
        if (row->ds)
            norm_read(row->ds, at, norm->columns, width, ds);
        norm_weights(norm, norm->gamma, at, width, 1, norm->gamma_offset, gamma);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++) {
            float hat = (s[i] - row->mean) * row->rstd;

            if (partial)
                partial[norm_slot(groups, at, i)] += dy[i] * hat;
            if (partial && beta)
                partial[8 * groups + norm_slot(groups, at, i)] += dy[i];
            s[i] = row->rstd * (dy[i] * gamma[i] - means.plain - hat * means.product) + ds[i];
        }
        write8_bf16(row->dx, at, norm->columns, width, s);
    }
}

/* RMSNorm has no term for the mean. */
LK_INLINE struct norm_sums norm_means(const struct lk_norm *norm, struct norm_sums sums)
{
    float columns = (float)norm->columns;

    sums.plain = norm->kind == LK_LAYER_NORM ? sums.plain / columns : 0;
    sums.product = sums.product / columns;
    return sums;
}

/* Every LK_NORM_PARTS-th of a column's partial sums, from `part`. */
LK_INLINE float norm_add_part(const float *column, uint64_t stride, uint64_t rows, uint64_t part)
{
    float sum = 0;

    for (uint64_t first = part; first < rows; first += (uint64_t)LK_NORM_BATCH * LK_NORM_PARTS) {
        float values[LK_NORM_BATCH];

        LK_UNROLL
        for (uint64_t i = 0; i < LK_NORM_BATCH; i++) {
            uint64_t row = first + i * LK_NORM_PARTS;

            values[i] = row < rows ? column[row * stride] : 0;
        }
        LK_UNROLL
        for (uint64_t i = 0; i < LK_NORM_BATCH; i++)
            sum += values[i];
    }
    return sum;
}

/* One of LK_NORM_PARTS parts of a column's sum over the partial rows. */
LK_INLINE float norm_column_part(const struct lk_norm_launch *launch, uint64_t column, int beta,
                                 uint64_t part)
{
    uint64_t groups = (launch->norm.columns + 7) / 8;
    const float *at = (const float *)launch->backward.workspace +
                      norm_slot(groups, column / 8 * 8, column % 8) + (beta ? 8 * groups : 0);

    return norm_add_part(at, 16 * groups, launch->partials, part);
}

LK_INLINE float norm_also_part(const struct lk_column_sums *also, uint64_t column, uint64_t part)
{
    return norm_add_part(also->partials + column, also->stride, also->rows, part);
}

LK_INLINE float norm_column_sum(float parts[LK_NORM_PARTS])
{
    LK_UNROLL
    for (uint32_t half = LK_NORM_PARTS / 2; half; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            parts[i] += parts[i + half];
    return parts[0];
}

#endif
