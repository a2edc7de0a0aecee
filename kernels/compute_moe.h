/* SPDX-License-Identifier: Apache-2.0
 *
 * What a warp does in the kernels that move rows of tokens to experts and back. A row is moved by the 32 lanes of a warp,
 * a group of LK_VECTOR columns each at a time.
 */
#ifndef LK_COMPUTE_MOE_H
#define LK_COMPUTE_MOE_H

#include "kernels/compute_access.h"

#define LK_MOE_LANES UINT64_C(32)

/* ---- the layout: experts one after another, `first` counts from row 0 on ---- */

LK_INLINE uint64_t moe_first_row(const struct lk_moe_routing *r, uint32_t expert, uint64_t first)
{
    uint64_t row = r->capacity ? (uint64_t)expert * r->capacity : first;

    return row < r->rows ? row : r->rows;
}

LK_INLINE uint64_t moe_next_row(const struct lk_moe_routing *r, uint32_t expert, uint64_t first,
                                uint32_t count)
{
    if (r->capacity)
        return (uint64_t)(expert + 1) * r->capacity;
    return (first + count + r->align - 1) / r->align * r->align;
}

/* How many of an expert's slots have rows, which begin at `begin`. */
LK_INLINE uint64_t moe_filled(const struct lk_moe_routing *r, uint64_t begin, uint32_t count)
{
    uint64_t room = r->capacity ? r->capacity : r->rows - begin;

    return count < room ? count : room;
}

/* ---- rows ----
 *
 * A warp has a token. The functions of a lane are given two constants, so that all of their loads stand in one piece of
 * code and are in flight together: `groups` of columns by `batch` choices, LK_MOE_LOADS in all. Sums do not depend on
 * them. */

#define LK_MOE_LOADS UINT64_C(8)

/* Rows (-1: none) and weights of a token's choices from `first` on. */
struct moe_batch {
    int32_t row[LK_MOE_LOADS];
    float weight[LK_MOE_LOADS];
};

LK_INLINE struct moe_batch moe_find(const struct lk_moe_routing *r, const float *weights,
                                    uint64_t token, uint64_t first, uint64_t batch)
{
    struct moe_batch out;

    LK_UNROLL
    for (uint64_t k = 0; k < LK_MOE_LOADS; k++) {
        uint64_t slot = token * r->choices + first + k;

        out.row[k] = -1;
        out.weight[k] = 1;
        if (k >= batch || first + k >= r->choices)
            continue;
        out.row[k] = r->row_of_slot[slot];
        if (weights)
            out.weight[k] = weights[slot];
    }
    return out;
}

LK_INLINE uint64_t moe_step(uint64_t groups)
{
    return LK_VECTOR * LK_MOE_LANES * groups;
}

LK_INLINE uint64_t moe_at(uint64_t at, uint64_t group)
{
    return at + group * LK_VECTOR * LK_MOE_LANES;
}

/* A group of columns times a weight, or bit for bit. */
LK_INLINE void moe_store_scaled(uint16_t *to, uint64_t at, uint64_t columns, enum lk_width width,
                                lk_wide16 x, int scaled, float weight)
{
    float values[8];

    if (scaled) {
        unpack_group(x, values);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            values[i] *= weight;
        x = pack_group(values);
    }
    store_group(to, at, columns, width, x);
}

/* The token's row is read once, and written to all of its choices. */
LK_INLINE void moe_scatter_lane(const struct lk_moe_launch *launch, uint64_t token, uint64_t lane,
                                enum lk_width width)
{
    const struct lk_moe_routing *r = &launch->routing;
    const struct lk_moe_rows *rows = &launch->rows;
    const uint16_t *from = (const uint16_t *)rows->tokens + token * rows->token_stride;

    for (uint64_t at = LK_VECTOR * lane; at < rows->columns; at += moe_step(4)) {
        lk_wide16 x[4] = {}; /* all of it is written before it is read, which gcc cannot see */

        LK_UNROLL
        for (uint64_t g = 0; g < 4; g++)
            if (moe_at(at, g) < rows->columns)
                x[g] = load_group(from, moe_at(at, g), rows->columns, width);
        for (uint64_t slot = token * r->choices; slot < (token + 1) * r->choices; slot++) {
            int32_t row = r->row_of_slot[slot];
            float weight = rows->weights ? rows->weights[slot] : 1;
            uint16_t *to = (uint16_t *)rows->permuted + (uint64_t)row * rows->permuted_stride;

            if (row < 0)
                continue;
            LK_UNROLL
            for (uint64_t g = 0; g < 4; g++)
                if (moe_at(at, g) < rows->columns)
                    moe_store_scaled(to, moe_at(at, g), rows->columns, width, x[g],
                                     rows->weights != NULL, weight);
        }
    }
}

/* Zeros in a row that nobody fills. */
LK_INLINE void moe_fill_lane(const struct lk_moe_routing *r, void *matrix, uint64_t stride,
                             uint64_t columns, uint64_t row, uint64_t lane, enum lk_width width)
{
    lk_wide16 zeros = {};

    if (r->slot_of_row[row] >= 0)
        return;
    for (uint64_t at = LK_VECTOR * lane; at < columns; at += moe_step(1))
        store_group((uint16_t *)matrix + row * stride, at, columns, width, zeros);
}

/* The rows of a batch of choices, as far as they are there. x: batch by batch of a group. */
LK_INLINE void moe_load(const void *matrix, uint64_t stride, const struct moe_batch *batch,
                        uint64_t at, uint64_t columns, enum lk_width width, uint64_t groups,
                        uint64_t choices, lk_wide16 x[LK_MOE_LOADS])
{
    LK_UNROLL
    for (uint64_t g = 0; g < groups; g++) {
        LK_UNROLL
        for (uint64_t k = 0; k < choices; k++)
            if (batch->row[k] >= 0 && moe_at(at, g) < columns)
                x[g * choices + k] = load_group((const uint16_t *)matrix +
                                                    (uint64_t)batch->row[k] * stride,
                                                moe_at(at, g), columns, width);
    }
}

/* Token `token` from the rows of its choices, in their order. */
LK_INLINE void moe_combine_lane(const struct lk_moe_launch *launch, uint64_t token, uint64_t lane,
                                enum lk_width width, uint64_t groups, uint64_t batch)
{
    const struct lk_moe_routing *r = &launch->routing;
    const struct lk_moe_rows *rows = &launch->rows;
    uint16_t *out = (uint16_t *)rows->tokens + token * rows->token_stride;
    struct moe_batch found = moe_find(r, rows->weights, token, 0, batch);

    for (uint64_t at = LK_VECTOR * lane; at < rows->columns; at += moe_step(groups)) {
        float sum[LK_MOE_LOADS][8] = { { 0 } };

        for (uint64_t first = 0; first < r->choices; first += batch) {
            lk_wide16 x[LK_MOE_LOADS] = {};

            if (r->choices > batch)
                found = moe_find(r, rows->weights, token, first, batch);
            moe_load(rows->permuted, rows->permuted_stride, &found, at, rows->columns, width,
                     groups, batch, x);
            LK_UNROLL
            for (uint64_t j = 0; j < groups * batch; j++) {
                float values[8];

                if (found.row[j % batch] < 0)
                    continue;
                unpack_group(x[j], values);
                LK_UNROLL
                for (size_t i = 0; i < 8; i++)
                    sum[j / batch][i] += values[i] * found.weight[j % batch];
            }
        }
        LK_UNROLL
        for (uint64_t g = 0; g < groups; g++)
            if (moe_at(at, g) < rows->columns)
                store_group(out, moe_at(at, g), rows->columns, width, pack_group(sum[g]));
    }
}

/* ---- backward ---- */

/* One group of columns of one choice: what goes to its row, and the lane's part of the gradient of its weight. */
LK_INLINE void moe_backward_group(const struct lk_moe_grads *grads, int32_t row, float weight,
                                  uint64_t at, enum lk_width width, lk_wide16 d, lk_wide16 x,
                                  float *dot)
{
    float mine[8], theirs[8];

    if (row < 0 || at >= grads->columns)
        return;
    unpack_group(d, mine);
    unpack_group(x, theirs);
    LK_UNROLL
    for (size_t i = 0; i < 8; i++)
        *dot += mine[i] * theirs[i];
    if (grads->dpermuted)
        moe_store_scaled((uint16_t *)grads->dpermuted + (uint64_t)row * grads->dpermuted_stride, at,
                         grads->columns, width, d, grads->weights != NULL, weight);
}

/* A batch of a token's choices from `first` on. dot: the lane's parts of their weights' gradients. */
LK_INLINE void moe_backward_lane(const struct lk_moe_launch *launch, uint64_t token, uint64_t first,
                                 uint64_t lane, enum lk_width width, uint64_t groups,
                                 uint64_t batch, float dot[LK_MOE_LOADS])
{
    const struct lk_moe_grads *grads = &launch->grads;
    const uint16_t *from = (const uint16_t *)grads->dtokens + token * grads->dtoken_stride;
    struct moe_batch found = moe_find(&launch->routing, grads->weights, token, first, batch);

    LK_UNROLL
    for (uint64_t k = 0; k < LK_MOE_LOADS; k++)
        dot[k] = 0;
    for (uint64_t at = LK_VECTOR * lane; at < grads->columns; at += moe_step(groups)) {
        lk_wide16 d[LK_MOE_LOADS] = {}, x[LK_MOE_LOADS] = {};

        LK_UNROLL
        for (uint64_t g = 0; g < groups; g++)
            if (moe_at(at, g) < grads->columns)
                d[g] = load_group(from, moe_at(at, g), grads->columns, width);
        if (grads->permuted)
            moe_load(grads->permuted, grads->permuted_stride, &found, at, grads->columns, width,
                     groups, batch, x);
        LK_UNROLL
        for (uint64_t j = 0; j < groups * batch; j++)
            moe_backward_group(grads, found.row[j % batch], found.weight[j % batch],
                               moe_at(at, j / batch), width, d[j / batch], x[j], &dot[j % batch]);
    }
}

#endif
