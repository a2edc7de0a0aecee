/* SPDX-License-Identifier: Apache-2.0
 *
 * What a thread does in the kernels of SwiGLU.
 */
#ifndef LK_COMPUTE_SWIGLU_H
#define LK_COMPUTE_SWIGLU_H

#include "kernels/compute_access.h"

#include <math.h>

/* 1 / (1 + exp(-x)). The device's fast division gives 0 where the divisor is beyond 2^126, and so it is to be. */
LK_INLINE float swiglu_sigmoid(float x)
{
#ifdef __CUDA_ARCH__
    return __fdividef(1, 1 + __expf(-x));
#else
    return 1 / (1 + expf(-x));
#endif
}

/* One row, as a thread sees it. */
struct swiglu_row {
    const uint16_t *gate, *up, *dh;
    uint16_t *dgate, *dup, *h;
    uint64_t columns;
    uint64_t counter; /* of the generator, for the row's first group */
    uint64_t seed;
    uint32_t threshold;
    float kept;
    float scale;
};

LK_INLINE struct swiglu_row swiglu_find_row(const struct lk_swiglu_launch *launch, uint64_t row)
{
    const struct lk_swiglu *s = &launch->swiglu;
    const struct lk_swiglu_grads *g = &launch->grads;
    struct swiglu_row out;

    out.columns = s->columns;
    out.gate = (const uint16_t *)s->z + row * s->z_stride;
    out.up = out.gate + s->columns;
    out.dh = NULL;
    out.dgate = NULL;
    out.dup = NULL;
    out.h = g->h ? (uint16_t *)g->h + row * g->h_stride : NULL;
    out.threshold = launch->threshold;
    out.kept = launch->kept;
    out.seed = s->rng.seed;
    out.counter = s->rng.offset;
    if (launch->threshold && s->rng.device_offset)
        out.counter += *s->rng.device_offset;
    out.counter = out.counter / 8 + row * ((s->columns + 7) / 8);
    out.scale = s->row_scale ? s->row_scale[row] : 1;
    return out;
}

/* What backward knows besides. */
LK_INLINE struct swiglu_row swiglu_find_back_row(const struct lk_swiglu_launch *launch,
                                                 uint64_t row)
{
    const struct lk_swiglu_grads *g = &launch->grads;
    struct swiglu_row out = swiglu_find_row(launch, row);

    out.dh = (const uint16_t *)g->dh + row * g->dh_stride;
    out.dgate = (uint16_t *)g->dz + row * g->dz_stride;
    out.dup = out.dgate + out.columns;
    return out;
}

/* What each of eight elements is multiplied by. */
LK_INLINE void swiglu_factors(const struct swiglu_row *row, uint64_t at, float out[8])
{
    uint32_t block[4] = { 0 };

    if (row->threshold)
        philox(row->seed, row->counter + at / 8, block);
    LK_UNROLL
    for (uint32_t i = 0; i < 8; i++)
        out[i] = random_bits(block, i) >= row->threshold ? row->kept : 0;
}

LK_INLINE void swiglu_forward_thread(const struct swiglu_row *row, uint64_t thread,
                                     uint64_t threads, enum lk_width width)
{
    for (uint64_t at = 8 * thread; at < row->columns; at += 8 * threads) {
        float gate[8], up[8], factor[8];

        read8_bf16(row->gate, at, row->columns, width, gate);
        read8_bf16(row->up, at, row->columns, width, up);
        swiglu_factors(row, at, factor);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++) {
            float g = gate[i] * row->scale;

            gate[i] = g * swiglu_sigmoid(g) * (up[i] * row->scale) * factor[i];
            gate[i] = factor[i] == 0 ? 0 : gate[i]; /* what is dropped is 0, whatever it was */
        }
        write8_bf16(row->h, at, row->columns, width, gate);
    }
}

/* Gradients of eight elements; gives back the part of the row's product of gradients and z. */
LK_INLINE float swiglu_gradients(const struct swiglu_row *row, const float factor[8], float gate[8],
                                 float up[8], float dh[8])
{
    float dot = 0;

    LK_UNROLL
    for (size_t i = 0; i < 8; i++) {
        float g = gate[i] * row->scale, u = up[i] * row->scale;
        float s = swiglu_sigmoid(g);
        float d = factor[i] == 0 ? 0 : dh[i] * factor[i];
        float dg = d * u * (s * (1 + g * (1 - s))), du = d * (g * s);

        dg = factor[i] == 0 ? 0 : dg;
        du = factor[i] == 0 ? 0 : du;
        dh[i] = factor[i] == 0 ? 0 : g * s * u * factor[i];
        dot += factor[i] == 0 ? 0 : dg * gate[i] + du * up[i];
        gate[i] = dg * row->scale;
        up[i] = du * row->scale;
    }
    return dot;
}

LK_INLINE float swiglu_backward_thread(const struct swiglu_row *row, uint64_t thread,
                                       uint64_t threads, enum lk_width width)
{
    float dot = 0;

    for (uint64_t at = 8 * thread; at < row->columns; at += 8 * threads) {
        float gate[8], up[8], dh[8], factor[8];

        read8_bf16(row->gate, at, row->columns, width, gate);
        read8_bf16(row->up, at, row->columns, width, up);
        read8_bf16(row->dh, at, row->columns, width, dh);
        swiglu_factors(row, at, factor);
        dot += swiglu_gradients(row, factor, gate, up, dh);
        write8_bf16(row->dgate, at, row->columns, width, gate);
        write8_bf16(row->dup, at, row->columns, width, up);
        if (row->h)
            write8_bf16(row->h, at, row->columns, width, dh);
    }
    return dot;
}

#endif
