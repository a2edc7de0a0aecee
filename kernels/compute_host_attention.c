/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_attention.h"
#include "kernels/compute_host.h"

/* What a block has in shared memory, and its threads' sums. */
struct sides {
    float x[LK_ATTENTION_DEPTH], y[LK_ATTENTION_DEPTH];
    float first[LK_BLOCK], second[LK_BLOCK];
    float sums[LK_ATTENTION_DEPTH], others[LK_ATTENTION_DEPTH];
};

/* ---- what is touched ---- */

static uint64_t last_row(const int32_t *offsets, uint64_t sequences, uint64_t rows)
{
    return offsets ? (uint64_t)offsets[sequences] : rows;
}

static void use_heads(const struct lk_attention *a, const struct lk_heads *h, bool keys,
                      uint64_t columns, bool write)
{
    uint64_t heads = keys ? a->kv_heads : a->heads;
    uint64_t rows = last_row(keys ? a->key_offsets : a->query_offsets, a->sequences,
                             keys ? a->keys : a->queries);
    uint64_t sequences = a->query_offsets ? 1 : a->sequences;

    if (rows)
        host_use(h->base,
                 2 * ((sequences - 1) * h->sequence_stride + (heads - 1) * h->head_stride +
                      (rows - 1) * h->row_stride + columns),
                 write);
}

static void use_inputs(const struct lk_attention *a)
{
    host_use_optional(a->query_lengths, a->sequences * sizeof(int32_t), false);
    host_use_optional(a->key_lengths, a->sequences * sizeof(int32_t), false);
    host_use_optional(a->query_offsets, (a->sequences + UINT64_C(1)) * sizeof(int32_t), false);
    host_use_optional(a->key_offsets, (a->sequences + UINT64_C(1)) * sizeof(int32_t), false);
    use_heads(a, &a->q, false, a->depth, false);
    use_heads(a, &a->k, true, a->depth, false);
    use_heads(a, &a->v, true, a->value_depth, false);
}

/* ---- forward ---- */

static void fetch(const struct lk_attention *a, const uint16_t *row, uint64_t columns, float *out)
{
    for (uint64_t c = 0; c < columns; c++)
        out[c] = attention_value(a, row[c]);
}

static void add_rows(const struct lk_attention *a, const uint16_t *row, uint64_t stride, uint64_t n,
                     uint64_t columns, const float *weights, float fade, float *sums)
{
    for (uint64_t c = 0; c < columns; c++) {
        sums[c] *= fade;
        for (uint64_t j = 0; j < n; j++)
            sums[c] += weights[j] * attention_value(a, row[j * stride + c]);
    }
}

static void add_piece(const struct lk_attention_launch *launch, const struct attention_row *r,
                      uint64_t kv_head, uint64_t j, struct sides *s, struct attention_sums *total)
{
    const struct lk_attention *a = &launch->attention;
    uint64_t n = r->end - j < LK_BLOCK ? r->end - j : LK_BLOCK;
    float most = total->most, fade, sum = 0;

    for (uint64_t t = 0; t < n; t++) {
        s->first[t] = multiply(a->scale, attention_dot(a, s->x,
                                                       attention_at(a, &a->k, r->sequence,
                                                                    r->key_first, kv_head, j + t),
                                                       a->depth, launch->wide));
        most = fmaxf(most, s->first[t]);
    }
    fade = attention_fade(total->most, most);
    for (uint64_t t = 0; t < n; t++) {
        s->first[t] = attention_power(s->first[t], most);
        sum += s->first[t];
    }
    *total = (struct attention_sums){ most, total->sum * fade + sum };
    add_rows(a, attention_at(a, &a->v, r->sequence, r->key_first, kv_head, j), a->v.row_stride, n,
             a->value_depth, s->first, fade, s->sums);
}

static void make_output(const struct lk_attention_launch *launch, uint64_t index)
{
    const struct lk_attention *a = &launch->attention;
    struct attention_row r = attention_query(a, index);
    struct attention_sums total = { -INFINITY, 0 };
    struct sides s = { .sums = { 0 } };
    uint16_t *out;

    if (a->lse)
        a->lse[attention_lse_at(a, r.sequence, r.head, r.row)] = INFINITY;
    if (!r.there && a->query_offsets)
        return;
    if (r.there)
        fetch(a, attention_at(a, &a->q, r.sequence, r.query_first, r.head, r.row), a->depth, s.x);
    for (uint64_t j = 0; j < r.end; j += LK_BLOCK)
        add_piece(launch, &r, r.head / (a->heads / a->kv_heads), j, &s, &total);
    out = attention_at(a, &a->o, r.sequence, r.query_first, r.head, r.row);
    for (uint64_t c = 0; c < a->value_depth; c++)
        attention_store(a, out + c, attention_mean(&r, total, s.sums[c]));
    if (a->lse)
        a->lse[attention_lse_at(a, r.sequence, r.head, r.row)] = attention_lse(&r, total);
}

static void run_forward(void *arg)
{
    const struct lk_attention_launch *launch = arg;
    const struct lk_attention *a = &launch->attention;
    uint64_t rows = (uint64_t)a->sequences * a->heads * a->queries;

    use_inputs(a);
    use_heads(a, &a->o, false, a->value_depth, true);
    host_use_optional(a->lse, rows * sizeof(float), true);
    for (uint64_t index = 0; index < rows; index++)
        make_output(launch, index);
}

int lk_run_attention_forward(const struct lk_attention_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_attention_forward", run_forward, launch, sizeof(*launch));
}

/* ---- backward ---- */

static float row_sum(const struct lk_attention *a, const float *dout, const uint16_t *o)
{
    float sum = 0;

    for (uint64_t c = 0; c < a->value_depth; c++)
        sum += dout[c] * attention_value(a, o[c]);
    return sum;
}

static void make_dq(const struct lk_attention_launch *launch, uint64_t index)
{
    const struct lk_attention *a = &launch->attention;
    const struct lk_attention_grads *g = &launch->grads;
    struct attention_row r = attention_query(a, index);
    uint64_t kv_head = r.head / (a->heads / a->kv_heads);
    uint64_t at = attention_lse_at(a, r.sequence, r.head, r.row);
    struct sides s = { .sums = { 0 } };
    float delta = 0;
    uint16_t *dq;

    if (!r.there && a->query_offsets)
        return;
    if (r.there) {
        fetch(a, attention_at(a, &a->q, r.sequence, r.query_first, r.head, r.row), a->depth, s.x);
        fetch(a, attention_at(a, &g->dout, r.sequence, r.query_first, r.head, r.row),
              a->value_depth, s.y);
        delta = row_sum(a, s.y, attention_at(a, &a->o, r.sequence, r.query_first, r.head, r.row));
    }
    launch->delta[at] = delta;
    for (uint64_t j = 0; j < r.end; j++) {
        const uint16_t *k = attention_at(a, &a->k, r.sequence, r.key_first, kv_head, j);
        const uint16_t *v = attention_at(a, &a->v, r.sequence, r.key_first, kv_head, j);
        float score = attention_dot(a, s.x, k, a->depth, launch->wide);
        float dp = attention_dot(a, s.y, v, a->value_depth, launch->wide);
        float ds = attention_undo(a, score, a->lse[at], dp, delta).ds;

        add_rows(a, k, 0, 1, a->depth, &ds, 1, s.sums);
    }
    dq = attention_at(a, &g->dq, r.sequence, r.query_first, r.head, r.row);
    for (uint64_t c = 0; c < a->depth; c++)
        attention_store(a, dq + c, s.sums[c]);
}

static void add_queries(const struct lk_attention_launch *launch, const struct attention_row *r,
                        uint64_t head, struct sides *s)
{
    const struct lk_attention *a = &launch->attention;
    const struct lk_attention_grads *g = &launch->grads;

    for (uint64_t i = r->begin; i < r->end; i++) {
        const uint16_t *q = attention_at(a, &a->q, r->sequence, r->query_first, head, i);
        const uint16_t *dout = attention_at(a, &g->dout, r->sequence, r->query_first, head, i);
        uint64_t at = attention_lse_at(a, r->sequence, head, i);
        float score = attention_dot(a, s->x, q, a->depth, launch->wide);
        float dp = attention_dot(a, s->y, dout, a->value_depth, 0);
        struct attention_pair pair = attention_undo(a, score, a->lse[at], dp, launch->delta[at]);

        add_rows(a, dout, 0, 1, a->value_depth, &pair.p, 1, s->others);
        add_rows(a, q, 0, 1, a->depth, &pair.ds, 1, s->sums);
    }
}

static void make_dkv(const struct lk_attention_launch *launch, uint64_t index)
{
    const struct lk_attention *a = &launch->attention;
    const struct lk_attention_grads *g = &launch->grads;
    struct attention_row r = attention_key(a, index);
    uint64_t group = a->heads / a->kv_heads;
    struct sides s = { .sums = { 0 } };
    uint16_t *dk, *dv;

    if (!r.there && a->query_offsets)
        return;
    if (r.there) {
        fetch(a, attention_at(a, &a->k, r.sequence, r.key_first, r.head, r.row), a->depth, s.x);
        fetch(a, attention_at(a, &a->v, r.sequence, r.key_first, r.head, r.row), a->value_depth,
              s.y);
    }
    for (uint64_t h = 0; h < group; h++)
        add_queries(launch, &r, r.head * group + h, &s);
    dk = attention_at(a, &g->dk, r.sequence, r.key_first, r.head, r.row);
    dv = attention_at(a, &g->dv, r.sequence, r.key_first, r.head, r.row);
    for (uint64_t c = 0; c < a->depth; c++)
        attention_store(a, dk + c, s.sums[c]);
    for (uint64_t c = 0; c < a->value_depth; c++)
        attention_store(a, dv + c, s.others[c]);
}

static void run_backward(void *arg)
{
    const struct lk_attention_launch *launch = arg;
    const struct lk_attention *a = &launch->attention;
    const struct lk_attention_grads *g = &launch->grads;
    uint64_t rows = (uint64_t)a->sequences * a->heads * a->queries;

    use_inputs(a);
    use_heads(a, &a->o, false, a->value_depth, false);
    use_heads(a, &g->dout, false, a->value_depth, false);
    host_use_optional(a->lse, rows * sizeof(float), false);
    use_heads(a, &g->dq, false, a->depth, true);
    use_heads(a, &g->dk, true, a->depth, true);
    use_heads(a, &g->dv, true, a->value_depth, true);
    host_use(launch->delta, rows * sizeof(float), true);
    for (uint64_t index = 0; index < rows; index++)
        make_dq(launch, index);
    for (uint64_t index = 0; index < (uint64_t)a->sequences * a->kv_heads * a->keys; index++)
        make_dkv(launch, index);
}

int lk_run_attention_backward(const struct lk_attention_launch *launch, void *stream)
{
    return lk_compute_submit(stream, "lk_attention_backward", run_backward, launch,
                             sizeof(*launch));
}

/* ---- around cuDNN ---- */

static void run_prepare(void *arg)
{
    const struct lk_attention_layout *layout = arg;

    for (uint64_t i = 0; i <= layout->attention.sequences; i++)
        attention_prepare(layout, i);
}

int lk_run_attention_prepare(const struct lk_attention_layout *layout, void *stream)
{
    return lk_compute_submit(stream, "lk_attention_prepare", run_prepare, layout, sizeof(*layout));
}

struct clear {
    struct lk_attention_layout layout;
    int backward;
};

static void run_clear(void *arg)
{
    const struct clear *clear = arg;
    const struct lk_attention *a = &clear->layout.attention;

    for (uint64_t i = 0; i < (uint64_t)a->sequences * a->heads * a->queries; i++)
        for (uint64_t lane = 0; lane < 32; lane++)
            attention_clear_query(&clear->layout, clear->backward, i, lane);
    if (!clear->backward)
        return;
    for (uint64_t i = 0; i < (uint64_t)a->sequences * a->kv_heads * a->keys; i++)
        for (uint64_t lane = 0; lane < 32; lane++)
            attention_clear_key(&clear->layout, i, lane);
}

int lk_run_attention_clear(const struct lk_attention_layout *layout, int backward, void *stream)
{
    struct clear clear = { *layout, backward };

    return lk_compute_submit(stream, "lk_attention_clear", run_clear, &clear, sizeof(clear));
}
