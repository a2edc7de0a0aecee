/* SPDX-License-Identifier: Apache-2.0
 *
 * What a thread does in the two kernels of AdamW. The order of every sum is fixed here: thread t of a chunk's block adds
 * the squares of its groups into eight sums, those are added in pairs, the threads' sums as a tree, all in fp32; the
 * chunks' sums are added in fp64.
 */
#ifndef LK_COMPUTE_ADAMW_H
#define LK_COMPUTE_ADAMW_H

#include "kernels/compute_access.h"

#include <math.h>

/* The part of a tensor that a block works on. */
struct adamw_piece {
    struct lk_adamw_entry entry; /* a copy: nothing that the block stores can change it */
    uint64_t begin;
    uint64_t end;
};

LK_INLINE struct adamw_piece adamw_find(const struct lk_adamw_launch *launch, uint32_t chunk)
{
    struct adamw_piece piece;

    piece.entry = launch->entries[launch->chunk_entry[chunk]];
    piece.begin = (uint64_t)(chunk - piece.entry.first_chunk) * LK_ADAMW_CHUNK;
    piece.end = piece.begin + LK_ADAMW_CHUNK;
    if (piece.end > piece.entry.count)
        piece.end = piece.entry.count;
    return piece;
}

LK_INLINE enum lk_width adamw_width(const struct adamw_piece *piece)
{
    if (!(piece->entry.flags & LK_ADAMW_FAST))
        return LK_SINGLE;
    return piece->end - piece->begin == LK_ADAMW_CHUNK ? LK_WHOLE : LK_WIDE;
}

/* A sum and the largest magnitude, as bits, which also finds what is not finite. */
struct adamw_squares {
    float sum;
    uint32_t largest;
};

LK_INLINE void adamw_square(float x, float *sum, uint32_t *largest)
{
    uint32_t magnitude = float_bits(x) & 0x7fffffffU;

    *sum += x * x;
    *largest = magnitude > *largest ? magnitude : *largest;
}

LK_INLINE struct adamw_squares adamw_end_squares(const float sums[8], uint32_t largest)
{
    struct adamw_squares out;

    out.sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
              ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    out.largest = largest;
    return out;
}

/* Four wide loads are in flight before the first is used. */
LK_INLINE struct adamw_squares adamw_squares_fp32(const struct adamw_piece *piece, uint64_t thread,
                                                  enum lk_width width)
{
    const float *grad = (const float *)piece->entry.grad;
    float sums[8] = { 0 };
    uint32_t largest = 0;
    float x[16];

    for (uint64_t at = piece->begin + 4 * thread; at < piece->end; at += 16 * LK_BLOCK) {
        LK_UNROLL
        for (size_t j = 0; j < 4; j++)
            read4(grad, at + j * 4 * LK_BLOCK, piece->end, width, x + 4 * j);
        LK_UNROLL
        for (size_t i = 0; i < 16; i++)
            adamw_square(x[i], &sums[i % 8], &largest);
    }
    return adamw_end_squares(sums, largest);
}

LK_INLINE struct adamw_squares adamw_squares_bf16(const struct adamw_piece *piece, uint64_t thread,
                                                  enum lk_width width)
{
    const uint16_t *grad = (const uint16_t *)piece->entry.grad;
    float sums[8] = { 0 };
    uint32_t largest = 0;
    float x[32];

    for (uint64_t at = piece->begin + 8 * thread; at < piece->end; at += 32 * LK_BLOCK) {
        LK_UNROLL
        for (size_t j = 0; j < 4; j++)
            read8_bf16(grad, at + j * 8 * LK_BLOCK, piece->end, width, x + 8 * j);
        LK_UNROLL
        for (size_t i = 0; i < 32; i++)
            adamw_square(x[i], &sums[i % 8], &largest);
    }
    return adamw_end_squares(sums, largest);
}

LK_INLINE struct adamw_squares adamw_squares_thread(const struct adamw_piece *piece,
                                                    uint64_t thread)
{
    int half = (piece->entry.flags & LK_ADAMW_GRAD16) != 0;

    switch (adamw_width(piece)) {
    case LK_WHOLE:
        return half ? adamw_squares_bf16(piece, thread, LK_WHOLE)
                    : adamw_squares_fp32(piece, thread, LK_WHOLE);
    case LK_WIDE:
        return half ? adamw_squares_bf16(piece, thread, LK_WIDE)
                    : adamw_squares_fp32(piece, thread, LK_WIDE);
    case LK_SINGLE: break;
    }
    return half ? adamw_squares_bf16(piece, thread, LK_SINGLE)
                : adamw_squares_fp32(piece, thread, LK_SINGLE);
}

/* True if squares left the range of fp32, so that the chunk has to be added up again in fp64. */
LK_INLINE int adamw_needs_wide(const struct adamw_squares *squares)
{
    return squares->largest && squares->largest < 0x7f800000U &&
           !(squares->sum >= 0x1p-80F && squares->sum <= 0x1.fffffep127F);
}

LK_INLINE double adamw_wide_thread(const struct adamw_piece *piece, uint64_t thread)
{
    double sum = 0;

    for (uint64_t at = piece->begin + thread; at < piece->end; at += LK_BLOCK) {
        double x = piece->entry.flags & LK_ADAMW_GRAD16
                       ? widen_bf16(((const uint16_t *)piece->entry.grad)[at])
                       : ((const float *)piece->entry.grad)[at];

        sum += x * x;
    }
    return sum;
}

/* A chunk's part of the sum; infinite or NaN if an element is. */
LK_INLINE double adamw_partial(const struct adamw_squares *squares, double wide)
{
    return adamw_needs_wide(squares) ? wide : squares->sum;
}

LK_INLINE double adamw_partials_thread(const double *partials, uint32_t chunks, uint64_t thread)
{
    double sum = 0;

    for (uint64_t i = thread; i < chunks; i += LK_BLOCK) {
#ifdef __CUDA_ARCH__
        sum += __ldcg(partials + i); /* written by other blocks */
#else
        sum += partials[i];
#endif
    }
    return sum;
}

/* One step of a tree over the block. */
LK_INLINE void adamw_join(struct adamw_squares *mine, const struct adamw_squares *other)
{
    mine->sum += other->sum;
    mine->largest = mine->largest > other->largest ? mine->largest : other->largest;
}

/* ---- the update ---- */

struct adamw_factors {
    double norm;
    float grad; /* clip / loss_scale */
    float clip;
    uint32_t apply;
    float beta1, rest1, beta2, rest2, eps;
    float keep;    /* 1 - lr * weight_decay */
    float step;    /* lr / (1 - beta1^t) */
    float inverse; /* 1 / sqrt(1 - beta2^t) */
};

LK_INLINE double adamw_power(double base, uint64_t exponent)
{
    double power = 1;

    for (; exponent; exponent >>= 1, base *= base)
        power *= exponent & 1 ? base : 1;
    return power;
}

LK_INLINE int adamw_is_finite(double x)
{
    return x - x == 0;
}

/* What follows from the state and the scalars alone. */
LK_INLINE void adamw_make_factors(const struct lk_adamw_launch *launch, struct adamw_factors *out)
{
    double scale = (double)scale_value(launch->loss_scale.value, launch->loss_scale.type,
                                       launch->loss_scale.device_value);
    double clip = 1;

    out->norm = sqrt(launch->state->sum_squares) / scale;
    if (launch->max_norm > 0 && launch->max_norm / (out->norm + 1e-6) < 1)
        clip = launch->max_norm / (out->norm + 1e-6);
    out->grad = (float)(clip / scale);
    out->apply = scale > 0 && adamw_is_finite(out->norm) && adamw_is_finite((double)out->grad);
    out->clip = out->apply ? (float)clip : 0;
}

/* The rest, for one tensor. */
LK_INLINE void adamw_tensor_factors(const struct lk_adamw_launch *launch,
                                    const struct lk_adamw_entry *entry, struct adamw_factors *out)
{
    uint64_t t = launch->state->step + 1;
    double lr = (double)scale_value(launch->lr.value, launch->lr.type, launch->lr.device_value) *
                (double)entry->lr_factor;

    out->beta1 = (float)launch->beta1;
    out->rest1 = (float)(1 - launch->beta1);
    out->beta2 = (float)launch->beta2;
    out->rest2 = (float)(1 - launch->beta2);
    out->eps = (float)launch->eps;
    out->keep = (float)(1 - lr * (double)entry->weight_decay);
    out->step = (float)(lr / (1 - adamw_power(launch->beta1, t)));
    out->inverse = (float)(1 / sqrt(1 - adamw_power(launch->beta2, t)));
}

/* Of one thread of the whole launch, behind everything. */
LK_INLINE void adamw_end(struct lk_adamw_state *state, const struct adamw_factors *f)
{
    state->step += f->apply;
    state->skipped += !f->apply;
    state->norm = f->norm;
    state->clip = f->clip;
    state->applied = f->apply;
}

/* Four elements. */
struct adamw_group {
    float param[4], grad[4], m[4], v[4];
};

/* `flags` and `width` are constants where it matters. */
LK_INLINE void adamw_read(const struct adamw_piece *piece, uint64_t at, uint32_t flags,
                          enum lk_width width, struct adamw_group *out)
{
    const struct lk_adamw_entry *entry = &piece->entry;

    if (flags & LK_ADAMW_GRAD16)
        read4_bf16((const uint16_t *)entry->grad, at, piece->end, width, out->grad);
    else
        read4((const float *)entry->grad, at, piece->end, width, out->grad);
    read4(entry->param, at, piece->end, width, out->param);
    read4(entry->m, at, piece->end, width, out->m);
    read4(entry->v, at, piece->end, width, out->v);
}

LK_INLINE void adamw_change(const struct adamw_factors *f, struct adamw_group *group)
{
    LK_UNROLL
    for (size_t i = 0; i < 4; i++) {
        float g = group->grad[i] * f->grad;
        float m = f->beta1 * group->m[i] + f->rest1 * g;
        float v = f->beta2 * group->v[i] + f->rest2 * g * g;

        group->m[i] = m;
        group->v[i] = v;
        group->param[i] = group->param[i] * f->keep -
                          f->step * (m / (sqrtf(v) * f->inverse + f->eps));
    }
}

LK_INLINE void adamw_write(const struct adamw_piece *piece, uint64_t at, uint32_t flags,
                           enum lk_width width, const struct adamw_group *group)
{
    const struct lk_adamw_entry *entry = &piece->entry;

    write4(entry->param, at, piece->end, width, group->param);
    write4(entry->m, at, piece->end, width, group->m);
    write4(entry->v, at, piece->end, width, group->v);
    if (flags & LK_ADAMW_COPY)
        write4_bf16(entry->copy, at, piece->end, width, group->param);
}

/* Eight wide loads are in flight before the first is used. */
LK_INLINE void adamw_update_groups(const struct adamw_piece *piece, const struct adamw_factors *f,
                                   uint64_t thread, uint32_t flags, enum lk_width width)
{
    struct adamw_group group[2];

    for (uint64_t at = piece->begin + 4 * thread; at < piece->end; at += 8 * LK_BLOCK) {
        LK_UNROLL
        for (size_t j = 0; j < 2; j++)
            adamw_read(piece, at + j * 4 * LK_BLOCK, flags, width, &group[j]);
        LK_UNROLL
        for (size_t j = 0; j < 2; j++) {
            adamw_change(f, &group[j]);
            adamw_write(piece, at + j * 4 * LK_BLOCK, flags, width, &group[j]);
        }
    }
}

LK_INLINE void adamw_update_thread(const struct adamw_piece *piece, const struct adamw_factors *f,
                                   uint64_t thread)
{
    enum lk_width width = adamw_width(piece);
    uint32_t flags = piece->entry.flags & (LK_ADAMW_COPY | LK_ADAMW_GRAD16);

    if (width != LK_WHOLE)
        adamw_update_groups(piece, f, thread, flags, width);
    else if (flags == 0)
        adamw_update_groups(piece, f, thread, 0, LK_WHOLE);
    else if (flags == LK_ADAMW_COPY)
        adamw_update_groups(piece, f, thread, LK_ADAMW_COPY, LK_WHOLE);
    else if (flags == LK_ADAMW_GRAD16)
        adamw_update_groups(piece, f, thread, LK_ADAMW_GRAD16, LK_WHOLE);
    else
        adamw_update_groups(piece, f, thread, LK_ADAMW_COPY | LK_ADAMW_GRAD16, LK_WHOLE);
}

#endif
