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

/* Bit for bit. Four wide loads are in flight before the first is stored. */
LK_INLINE void moe_copy_lane(const uint16_t *from, uint16_t *to, uint64_t columns, uint64_t lane,
                             enum lk_width width)
{
    lk_wide16 x[4] = {}; /* all of it is written before it is read, which gcc cannot see */

    if (width != LK_WHOLE) {
        for (uint64_t at = lane; at < columns; at += LK_MOE_LANES)
            to[at] = from[at];
        return;
    }
    for (uint64_t at = 8 * lane; at < columns; at += 32 * LK_MOE_LANES) {
        LK_UNROLL
        for (size_t j = 0; j < 4; j++)
            if (at + j * 8 * LK_MOE_LANES < columns)
                x[j] = *(const lk_wide16 *)(from + at + j * 8 * LK_MOE_LANES);
        LK_UNROLL
        for (size_t j = 0; j < 4; j++)
            if (at + j * 8 * LK_MOE_LANES < columns)
                *(lk_wide16 *)(to + at + j * 8 * LK_MOE_LANES) = x[j];
    }
}

/* `scale` times a row; 0 for a row that is not there. */
LK_INLINE void moe_scale_lane(const uint16_t *from, float scale, uint16_t *to, uint64_t columns,
                              uint64_t lane, enum lk_width width)
{
    for (uint64_t at = 8 * lane; at < columns; at += 8 * LK_MOE_LANES) {
        float x[8] = { 0 };

        if (from)
            read8_bf16(from, at, columns, width, x);
        LK_UNROLL
        for (size_t i = 0; i < 8; i++)
            x[i] *= scale;
        write8_bf16(to, at, columns, width, x);
    }
}

/* Row `to` of the permuted matrix; nothing is written for a row that nobody fills, unless zeros are asked for. */
LK_INLINE void moe_gather_lane(const struct lk_moe_launch *launch, uint64_t to, uint64_t lane,
                               enum lk_width width)
{
    const struct lk_moe_rows *rows = &launch->rows;
    int32_t slot = launch->routing.slot_of_row[to];
    uint16_t *out = (uint16_t *)rows->permuted + to * rows->permuted_stride;
    const uint16_t *from;

    if (slot < 0) {
        if (rows->fill)
            moe_scale_lane(NULL, 0, out, rows->columns, lane, width);
        return;
    }
    from = (const uint16_t *)rows->tokens +
           (uint64_t)slot / launch->routing.choices * rows->token_stride;
    if (rows->weights)
        moe_scale_lane(from, rows->weights[slot], out, rows->columns, lane, width);
    else
        moe_copy_lane(from, out, rows->columns, lane, width);
}

/* Token `token` from the rows of its choices, in their order. */
LK_INLINE void moe_combine_lane(const struct lk_moe_launch *launch, uint64_t token, uint64_t lane,
                                enum lk_width width)
{
    const struct lk_moe_rows *rows = &launch->rows;
    uint64_t choices = launch->routing.choices;
    uint16_t *out = (uint16_t *)rows->tokens + token * rows->token_stride;

    for (uint64_t at = 8 * lane; at < rows->columns; at += 8 * LK_MOE_LANES) {
        float sum[8] = { 0 };

        for (uint64_t slot = token * choices; slot < (token + 1) * choices; slot++) {
            int32_t row = launch->routing.row_of_slot[slot];
            float weight = rows->weights ? rows->weights[slot] : 1;
            float x[8];

            if (row < 0)
                continue;
            read8_bf16((const uint16_t *)rows->permuted + (uint64_t)row * rows->permuted_stride, at,
                       rows->columns, width, x);
            LK_UNROLL
            for (size_t i = 0; i < 8; i++)
                sum[i] += x[i] * weight;
        }
        write8_bf16(out, at, rows->columns, width, sum);
    }
}

#endif
