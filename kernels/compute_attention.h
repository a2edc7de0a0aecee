/* SPDX-License-Identifier: Apache-2.0
 *
 * What the threads of a block do in our own kernels of attention. A block has one row: of queries in forward and for dq, of
 * keys for dk and dv. It takes the other side LK_BLOCK rows at a time, first each thread one of them, then each thread
 * columns of the result, LK_BLOCK apart.
 */
#ifndef LK_COMPUTE_ATTENTION_H
#define LK_COMPUTE_ATTENTION_H

#include "kernels/attention_internal.h"
#include "kernels/compute_access.h"

#include <math.h>

#define LK_ATTENTION_SIDES (LK_ATTENTION_DEPTH / LK_BLOCK) /* columns of a thread */

/* One row of a block. */
struct attention_row {
    uint64_t sequence, head, row;    /* head: of its own side */
    uint64_t queries, keys;          /* of this sequence */
    uint64_t query_first, key_first; /* packed: where it begins */
    uint64_t begin, end;             /* of the other side's rows that it sees or is seen by */
    int there;                       /* else it is behind the sequence's end */
};

LK_INLINE uint64_t attention_limit(int64_t x, uint64_t most)
{
    return x < 0 ? 0 : (uint64_t)x < most ? (uint64_t)x : most;
}

/* Lengths beyond what the caller said are cut. */
LK_INLINE uint64_t attention_length(const int32_t *lengths, const int32_t *offsets,
                                    uint64_t sequence, uint64_t most)
{
    if (offsets)
        return attention_limit((int64_t)offsets[sequence + 1] - offsets[sequence], most);
    return lengths ? attention_limit(lengths[sequence], most) : most;
}

LK_INLINE void attention_find(const struct lk_attention *a, struct attention_row *out)
{
    out->queries = attention_length(a->query_lengths, a->query_offsets, out->sequence, a->queries);
    out->keys = attention_length(a->key_lengths, a->key_offsets, out->sequence, a->keys);
    out->query_first = a->query_offsets ? (uint64_t)a->query_offsets[out->sequence] : 0;
    out->key_first = a->key_offsets ? (uint64_t)a->key_offsets[out->sequence] : 0;
}

/* How many keys query i sees: those before. */
LK_INLINE uint64_t attention_seen(const struct lk_attention *a, const struct attention_row *r,
                                  uint64_t i)
{
    if (a->causal == LK_CAUSAL_NONE)
        return r->keys;
    if (a->causal == LK_CAUSAL_TOP_LEFT)
        return attention_limit((int64_t)i + 1, r->keys);
    return attention_limit((int64_t)(i + 1 + r->keys) - (int64_t)r->queries, r->keys);
}

/* index: sequences, heads of queries, rows, the last one fastest. */
LK_INLINE struct attention_row attention_query(const struct lk_attention *a, uint64_t index)
{
    struct attention_row r = {};

    r.sequence = index / a->queries / a->heads;
    r.head = index / a->queries % a->heads;
    r.row = index % a->queries;
    attention_find(a, &r);
    r.there = r.row < r.queries;
    r.end = r.there ? attention_seen(a, &r, r.row) : 0;
    return r;
}

/* As above, of keys; the first query that sees it, and behind it all. */
LK_INLINE struct attention_row attention_key(const struct lk_attention *a, uint64_t index)
{
    struct attention_row r = {};

    r.sequence = index / a->keys / a->kv_heads;
    r.head = index / a->keys % a->kv_heads;
    r.row = index % a->keys;
    attention_find(a, &r);
    r.there = r.row < r.keys;
    if (a->causal == LK_CAUSAL_TOP_LEFT)
        r.begin = r.row;
    if (a->causal == LK_CAUSAL_BOTTOM_RIGHT)
        r.begin = attention_limit((int64_t)(r.row + r.queries) - (int64_t)r.keys, r.queries);
    r.end = r.there ? r.queries : 0;
    return r;
}

/* ---- memory ---- */

LK_INLINE uint16_t *attention_at(const struct lk_attention *a, const struct lk_heads *heads,
                                 uint64_t sequence, uint64_t first, uint64_t head, uint64_t row)
{
    uint64_t at = a->query_offsets ? first * heads->row_stride : sequence * heads->sequence_stride;

    return (uint16_t *)heads->base + at + head * heads->head_stride + row * heads->row_stride;
}

LK_INLINE float attention_value(const struct lk_attention *a, uint16_t bits)
{
    return a->type == LK_BF16 ? widen_bf16(bits) : widen_fp16(bits);
}

LK_INLINE void attention_store(const struct lk_attention *a, uint16_t *to, float x)
{
    *to = (uint16_t)(a->type == LK_BF16 ? round_bf16(x) : narrow_fp16(x));
}

LK_INLINE uint64_t attention_lse_at(const struct lk_attention *a, uint64_t sequence, uint64_t head,
                                    uint64_t row)
{
    return (sequence * a->heads + head) * a->queries + row;
}

/* In the order of the columns. x: widened before. */
LK_INLINE float attention_dot(const struct lk_attention *a, const float *x, const uint16_t *y,
                              uint64_t columns, uint32_t wide)
{
    float sum = 0;

    if (wide && a->type == LK_BF16) {
        for (uint64_t c = 0; c < columns; c += 8) {
            float values[8];

            load8_bf16(y + c, values);
            LK_UNROLL
            for (uint64_t i = 0; i < 8; i++)
                sum += x[c + i] * values[i];
        }
        return sum;
    }
    for (uint64_t c = 0; c < columns; c++)
        sum += x[c] * attention_value(a, y[c]);
    return sum;
}

LK_INLINE float attention_exp(float x)
{
#ifdef __CUDA_ARCH__
    return __expf(x);
#else
    return expf(x);
#endif
}

/* ---- softmax over pieces ---- */

/* What a piece of scores does to the sums so far. */
struct attention_sums {
    float most, sum;
};

/* exp(score - most); hidden and infinitely small ones are 0 also where all of a row are. */
LK_INLINE float attention_power(float score, float most)
{
    return score == -INFINITY ? 0 : attention_exp(score - most);
}

/* The factor of everything that was added up below an older maximum. */
LK_INLINE float attention_fade(float older, float most)
{
    return older == -INFINITY ? 0 : attention_exp(older - most);
}

/* A row's lse: +infinity if it sees nothing. */
LK_INLINE float attention_lse(const struct attention_row *r, struct attention_sums s)
{
    return r->end ? s.most + logf(s.sum) : INFINITY;
}

/* Without keys 0; where all are infinitely small 0 / 0. */
LK_INLINE float attention_mean(const struct attention_row *r, struct attention_sums s, float x)
{
    return r->end ? x / s.sum : 0;
}

/* ---- backward ---- */

/* Of one query and one key: p, and the gradient of the score before scale. */
struct attention_pair {
    float p, ds;
};

LK_INLINE struct attention_pair attention_undo(const struct lk_attention *a, float product,
                                               float lse, float dp, float delta)
{
    struct attention_pair pair;
    float score = multiply(a->scale, product);

    pair.p = lse == INFINITY ? 0 : attention_exp(score - lse);
    pair.ds = lse == INFINITY ? 0 : multiply(a->scale, multiply(pair.p, dp - delta));
    return pair;
}

/* ---- around cuDNN ---- */

/* Sequence `i`, or behind the last one. Where there is nothing to see nothing looks. */
LK_INLINE void attention_prepare(const struct lk_attention_layout *layout, uint64_t i)
{
    const struct lk_attention *a = &layout->attention;
    const struct lk_heads *const heads[] = { &a->q,
                                             &a->k,
                                             &a->v,
                                             &a->o,
                                             &layout->grads.dout,
                                             &layout->grads.dq,
                                             &layout->grads.dk,
                                             &layout->grads.dv };

    if (i < a->sequences) {
        uint64_t queries = attention_length(a->query_lengths, a->query_offsets, i, a->queries);
        uint64_t keys = attention_length(a->key_lengths, a->key_offsets, i, a->keys);

        layout->lengths[0][i] = keys ? (int32_t)queries : 0;
        layout->lengths[1][i] = (int32_t)keys;
    }
    for (int t = 0; t < LK_TENSORS; t++) {
        int keys = t == LK_TENSOR_K || t == LK_TENSOR_V || t == LK_TENSOR_DK || t == LK_TENSOR_DV;

        if (layout->offsets[t])
            layout->offsets[t][i] = (int64_t)(keys ? a->key_offsets : a->query_offsets)[i] *
                                    (int64_t)heads[t]->row_stride;
    }
}

LK_INLINE void attention_zero(uint16_t *row, uint64_t columns, uint64_t lane)
{
    for (uint64_t c = lane; c < columns; c += 32)
        row[c] = 0;
}

/* Lane `lane` of 32. Rows of queries that see nothing; packed ones as far as there are any. */
LK_INLINE void attention_clear_query(const struct lk_attention_layout *layout, int backward,
                                     uint64_t index, uint64_t lane)
{
    const struct lk_attention *a = &layout->attention;
    struct attention_row r = attention_query(a, index);

    if (r.end)
        return;
    if (!backward && a->lse && lane == 0)
        a->lse[attention_lse_at(a, r.sequence, r.head, r.row)] = INFINITY;
    if (!r.there && a->query_offsets)
        return;
    if (backward)
        attention_zero(attention_at(a, &layout->grads.dq, r.sequence, r.query_first, r.head, r.row),
                       a->depth, lane);
    else
        attention_zero(attention_at(a, &a->o, r.sequence, r.query_first, r.head, r.row),
                       a->value_depth, lane);
}

/* Rows of keys that nothing sees. */
LK_INLINE void attention_clear_key(const struct lk_attention_layout *layout, uint64_t index,
                                   uint64_t lane)
{
    const struct lk_attention *a = &layout->attention;
    struct attention_row r = attention_key(a, index);

    if (r.begin < r.end || (!r.there && a->query_offsets))
        return;
    attention_zero(attention_at(a, &layout->grads.dk, r.sequence, r.key_first, r.head, r.row),
                   a->depth, lane);
    attention_zero(attention_at(a, &layout->grads.dv, r.sequence, r.key_first, r.head, r.row),
                   a->value_depth, lane);
}

#endif
