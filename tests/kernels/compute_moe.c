/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute_rows.h"
#include "tests/kernels/reference.h"

#include <errno.h>
#include <math.h>
#include <string.h>

/* How slots choose experts. */
enum choice {
    ANY,    /* some have none, or another rank's */
    ONE,    /* all the same */
    NOBODY, /* none */
    CHOICES,
};

struct shape {
    uint64_t tokens;
    uint32_t choices, experts, capacity, align;
    uint64_t rows; /* with capacity 0 */
    uint64_t columns, pad;
    size_t shift;
};

static const struct shape shapes[] = {
    {1,     1, 1,    0,   1,  1,    8,    0, 0},
    { 100,  2, 5,    0,   16, 300,  64,   8, 0},
    { 333,  3, 7,    0,   1,  500,  40,   0, 1},
    { 257,  2, 4,    100, 0,  0,    1304, 0, 0},
    { 64,   8, 16,   3,   0,  0,    33,   7, 0},
    { 1000, 2, 1024, 0,   8,  9000, 8,    0, 0},
    { 50,   2, 3,    40,  0,  0,    264,  0, 0},
    { 0,    2, 3,    4,   0,  0,    16,   0, 0},
    { 700,  4, 9,    0,   32, 2600, 520,  8, 0},
    { 150,  9, 300,  5,   0,  0,    16,   0, 0},
};

struct moe_case {
    const struct compute_target *t;
    struct lk_moe_routing routing;
    struct memory experts, row_of_slot, slot_of_row, counts, offsets, live, weights, workspace,
        dweights;
    struct rows tokens, permuted, again, dpermuted;
};

static struct memory make_ints(const struct compute_target *t, uint64_t n)
{
    struct memory memory = memory_new(t, n * 4, 0);

    memory_up(&memory);
    return memory;
}

static int32_t choose(const struct shape *shape, enum choice choice, uint64_t *state)
{
    int32_t any = (int32_t)(ref_next(state) % (shape->experts + 2)) - 1; /* one on either side */

    if (choice == ANY)
        return any;
    return choice == ONE ? (int32_t)shape->experts / 2 : -1;
}

static struct moe_case *make_case(const struct compute_target *t, const struct shape *shape,
                                  enum choice choice, uint64_t *state)
{
    struct moe_case *c = calloc(1, sizeof(*c));
    uint64_t slots = shape->tokens * shape->choices;
    uint64_t rows = shape->capacity ? (uint64_t)shape->capacity * shape->experts : shape->rows;

    CHECK(c);
    c->t = t;
    c->experts = memory_new(t, slots * 4, 0);
    c->weights = memory_new(t, slots * 4, 0);
    CHECK(c->experts.near && c->weights.near);
    for (uint64_t i = 0; i < slots; i++) {
        ((int32_t *)c->experts.near)[i] = choose(shape, choice, state);
        ((float *)c->weights.near)[i] = (float)random_unit(state);
    }
    memory_up(&c->experts);
    memory_up(&c->weights);
    c->row_of_slot = make_ints(t, slots);
    c->slot_of_row = make_ints(t, rows);
    c->counts = make_ints(t, shape->experts);
    c->offsets = make_ints(t, shape->experts + 1);
    c->live = make_ints(t, (rows + 31) / 32);
    c->tokens = rows_new(t, shape->tokens, shape->columns, shape->columns + shape->pad,
                         shape->shift);
    c->again = rows_new(t, shape->tokens, shape->columns, shape->columns + shape->pad,
                        shape->shift);
    c->permuted = rows_new(t, rows, shape->columns, shape->columns + shape->pad, shape->shift);
    for (uint64_t r = 0; r < shape->tokens; r++)
        for (uint64_t j = 0; j < shape->columns; j++)
            rows_at(&c->tokens, r)[j] = (uint16_t)ref_next(state); /* NaN and infinities, too */
    memory_up(&c->tokens.memory);
    memory_up(&c->again.memory);
    memory_up(&c->permuted.memory);
    c->dpermuted = rows_new(t, rows, shape->columns, shape->columns + shape->pad, shape->shift);
    c->dweights = make_ints(t, slots);
    c->routing = (struct lk_moe_routing){
        .experts = (int32_t *)c->experts.far,
        .tokens = shape->tokens,
        .choices = shape->choices,
        .expert_count = shape->experts,
        .capacity = shape->capacity,
        .align = shape->align,
        .rows = rows,
        .row_of_slot = (int32_t *)c->row_of_slot.far,
        .slot_of_row = (int32_t *)c->slot_of_row.far,
        .counts = (int32_t *)c->counts.far,
        .offsets = (int32_t *)c->offsets.far,
        .live = (uint32_t *)c->live.far,
    };
    c->workspace = memory_new(t, t->lib.lk_moe_workspace_bytes(&c->routing), 0);
    memory_up(&c->workspace);
    c->routing.workspace = c->workspace.far;
    return c;
}

static void drop_case(struct moe_case *c)
{
    memory_free(&c->experts);
    memory_free(&c->row_of_slot);
    memory_free(&c->slot_of_row);
    memory_free(&c->counts);
    memory_free(&c->offsets);
    memory_free(&c->live);
    memory_free(&c->weights);
    memory_free(&c->workspace);
    memory_free(&c->dweights);
    memory_free(&c->dpermuted.memory);
    memory_free(&c->tokens.memory);
    memory_free(&c->again.memory);
    memory_free(&c->permuted.memory);
    free(c);
}

/* Expert by expert, slot by slot. */
static void check_routing(const struct moe_case *c)
{
    const struct lk_moe_routing *r = &c->routing;
    const int32_t *experts = (int32_t *)c->experts.near;
    const int32_t *row_of_slot = (int32_t *)c->row_of_slot.near;
    uint64_t begin = 0, filled = 0, dropped = 0;

    for (uint32_t e = 0; e < r->expert_count; e++) {
        uint64_t end, rank = 0, all = 0;

        if (r->capacity)
            begin = (uint64_t)e * r->capacity;
        begin = begin < r->rows ? begin : r->rows;
        end = r->capacity ? begin + r->capacity : r->rows;
        CHECK(((int32_t *)c->offsets.near)[e] == (int32_t)begin);
        for (uint64_t slot = 0; slot < r->tokens * r->choices; slot++) {
            if (experts[slot] != (int32_t)e)
                continue;
            all++;
            if (begin + rank >= end) {
                CHECK(row_of_slot[slot] == -1);
                dropped++;
                continue;
            }
            CHECK(row_of_slot[slot] == (int32_t)(begin + rank));
            CHECK(((int32_t *)c->slot_of_row.near)[begin + rank] == (int32_t)slot);
            rank++;
        }
        CHECK(((int32_t *)c->counts.near)[e] == (int32_t)rank);
        filled += rank;
        if (!r->capacity)
            begin = (begin + all + r->align - 1) / r->align * r->align;
    }
    for (uint64_t slot = 0; slot < r->tokens * r->choices; slot++)
        dropped += experts[slot] < 0 || (uint32_t)experts[slot] >= r->expert_count;
    for (uint64_t row = 0; row < r->rows; row++) {
        bool live = ((uint32_t *)c->live.near)[row / 32] >> row % 32 & 1;

        CHECK(live == (((int32_t *)c->slot_of_row.near)[row] >= 0));
        filled -= live;
    }
    CHECK(filled == 0);
    for (uint64_t slot = 0; slot < r->tokens * r->choices; slot++)
        dropped -= row_of_slot[slot] == -1;
    CHECK(dropped == 0);
}

static void route(const struct moe_case *c)
{
    CHECK(c->t->lib.lk_moe_route(&c->routing, NULL) == 0);
    memory_down(&c->row_of_slot);
    memory_down(&c->slot_of_row);
    memory_down(&c->counts);
    memory_down(&c->offsets);
    memory_down(&c->live);
    memory_down(&c->workspace);
}

static struct lk_moe_rows make_rows(const struct moe_case *c, bool weights, int fill)
{
    return (struct lk_moe_rows){
        .tokens = c->tokens.memory.far,
        .token_stride = c->tokens.stride,
        .permuted = c->permuted.memory.far,
        .permuted_stride = c->permuted.stride,
        .columns = c->tokens.columns,
        .weights = weights ? (float *)c->weights.far : NULL,
        .fill = fill,
    };
}

/* Bits of every row; what nobody fills is untouched, or zero. */
static void check_permuted(const struct moe_case *c, bool weights, int fill)
{
    struct lk_moe_rows rows = make_rows(c, weights, fill);

    memset(c->permuted.memory.near, 0x5a, c->permuted.memory.bytes);
    memory_up(&c->permuted.memory);
    CHECK(c->t->lib.lk_moe_permute(&c->routing, &rows, NULL) == 0);
    memory_down(&c->permuted.memory);
    for (uint64_t row = 0; row < c->routing.rows; row++) {
        int32_t slot = ((int32_t *)c->slot_of_row.near)[row];

        for (uint64_t j = 0; j < c->tokens.columns; j++) {
            uint16_t got = rows_at(&c->permuted, row)[j], want = fill ? 0 : 0x5a5a;

            if (slot >= 0)
                want = rows_at(&c->tokens, (uint64_t)slot / c->routing.choices)[j];
            if (slot >= 0 && weights) {
                double scaled = from_bf16(want) * (double)((float *)c->weights.near)[slot];

                CHECK(isnan(scaled) ? isnan(from_bf16(got)) : got == to_bf16(scaled));
            } else {
                CHECK(got == want);
            }
        }
        for (uint64_t j = c->tokens.columns; row + 1 < c->routing.rows && j < c->permuted.stride;
             j++)
            CHECK(rows_at(&c->permuted, row)[j] == 0x5a5a);
    }
}

static void check_combined(const struct moe_case *c, bool weights)
{
    struct lk_moe_rows rows = make_rows(c, weights, 0);

    rows.tokens = c->again.memory.far;
    CHECK(c->t->lib.lk_moe_unpermute(&c->routing, &rows, NULL) == 0);
    memory_down(&c->again.memory);
    for (uint64_t token = 0; token < c->routing.tokens; token++) {
        for (uint64_t j = 0; j < c->tokens.columns; j++) {
            float sum = 0;

            for (uint32_t k = 0; k < c->routing.choices; k++) {
                uint64_t slot = token * c->routing.choices + k;
                int32_t row = ((int32_t *)c->row_of_slot.near)[slot];
                float weight = weights ? ((float *)c->weights.near)[slot] : 1;
                volatile float term;

                if (row < 0)
                    continue;
                term = (float)rows_get(&c->permuted, (uint64_t)row, j) * weight;
                sum += term;
            }
            CHECK(isnan(sum) ? isnan(rows_get(&c->again, token, j))
                             : rows_at(&c->again, token)[j] == to_bf16((double)sum));
        }
    }
}

static struct lk_moe_grads make_grads(const struct moe_case *c, bool weights)
{
    return (struct lk_moe_grads){
        .dtokens = c->again.memory.far,
        .dtoken_stride = c->again.stride,
        .permuted = c->permuted.memory.far,
        .permuted_stride = c->permuted.stride,
        .dpermuted = c->dpermuted.memory.far,
        .dpermuted_stride = c->dpermuted.stride,
        .columns = c->tokens.columns,
        .weights = weights ? (float *)c->weights.far : NULL,
        .dweights = (float *)c->dweights.far,
    };
}

static void check_dweights(const struct moe_case *c)
{
    for (uint64_t slot = 0; slot < c->routing.tokens * c->routing.choices; slot++) {
        int32_t row = ((int32_t *)c->row_of_slot.near)[slot];
        double sum = 0, size = 0;

        for (uint64_t j = 0; row >= 0 && j < c->tokens.columns; j++) {
            double term = rows_get(&c->again, slot / c->routing.choices, j) *
                          rows_get(&c->permuted, (uint64_t)row, j);

            sum += term;
            size += fabs(term);
        }
        CHECK(near_float((double)((float *)c->dweights.near)[slot], sum, 0x1p-14 * size));
    }
}

/* `got` beside the gradient of the tokens; rows that nobody fills hold `other`. */
static void check_drows(const struct moe_case *c, const struct rows *got, bool weights, bool zeros)
{
    for (uint64_t row = 0; row < c->routing.rows; row++) {
        int32_t slot = ((int32_t *)c->slot_of_row.near)[row];
        double weight = slot >= 0 && weights ? (double)((float *)c->weights.near)[slot] : 1;

        for (uint64_t j = 0; j < c->tokens.columns && slot >= 0; j++)
            CHECK(rows_at(got, row)[j] ==
                  to_bf16(weight * rows_get(&c->again, (uint64_t)slot / c->routing.choices, j)));
        for (uint64_t j = 0; j < c->tokens.columns && slot < 0; j++)
            CHECK(rows_at(got, row)[j] == (zeros ? 0 : 0x5a5a));
    }
}

static void check_backward(struct moe_case *c, bool weights, uint64_t *state)
{
    struct lk_moe_grads grads = make_grads(c, weights);
    unsigned char *before = malloc(c->dweights.bytes + 1);

    CHECK(before);
    rows_fill(&c->again, FILL_RANDOM, state);
    rows_fill(&c->permuted, FILL_LARGE, state);
    memset(c->dpermuted.memory.near, 0x5a, c->dpermuted.memory.bytes);
    memory_up(&c->dpermuted.memory);
    grads.fill = weights;
    CHECK(c->t->lib.lk_moe_unpermute_backward(&c->routing, &grads, NULL) == 0);
    memory_down(&c->dweights);
    memory_down(&c->dpermuted.memory);
    check_dweights(c);
    check_drows(c, &c->dpermuted, weights, weights);
    memcpy(before, c->dweights.near, c->dweights.bytes);
    grads.dpermuted = NULL;
    CHECK(c->t->lib.lk_moe_unpermute_backward(&c->routing, &grads, NULL) == 0);
    memory_down(&c->dweights);
    CHECK(memcmp(before, c->dweights.near, c->dweights.bytes) == 0);
    grads.dpermuted = c->permuted.memory.far; /* in place */
    grads.dpermuted_stride = c->permuted.stride;
    grads.fill = 1;
    CHECK(c->t->lib.lk_moe_unpermute_backward(&c->routing, &grads, NULL) == 0);
    memory_down(&c->dweights);
    memory_down(&c->permuted.memory);
    CHECK(memcmp(before, c->dweights.near, c->dweights.bytes) == 0);
    check_drows(c, &c->permuted, weights, true);
    grads.permuted = NULL;
    grads.dweights = NULL;
    grads.dpermuted = c->dpermuted.memory.far;
    grads.dpermuted_stride = c->dpermuted.stride;
    CHECK(c->t->lib.lk_moe_unpermute_backward(&c->routing, &grads, NULL) == 0);
    memory_down(&c->dpermuted.memory);
    check_drows(c, &c->dpermuted, weights, true);
    free(before);
}

static void rows_go_to_their_experts_and_back(const struct compute_target *t)
{
    uint64_t state = 83;

    for (size_t s = 0; s < sizeof(shapes) / sizeof(*shapes); s++) {
        for (int choice = 0; choice < CHOICES; choice++) {
            struct moe_case *c = make_case(t, &shapes[s], (enum choice)choice, &state);

            route(c);
            check_routing(c);
            check_permuted(c, true, 0);
            check_permuted(c, false, 1);
            check_combined(c, true);
            check_permuted(c, false, 0);
            check_combined(c, false);
            check_backward(c, choice == ANY, &state);
            drop_case(c);
        }
    }
}

static void wrong_routings_are_refused(const struct compute_target *t, const struct moe_case *c)
{
    struct lk_moe_routing r;

#define REFUSED(change, text)                            \
    do {                                                 \
        r = c->routing;                                  \
        change;                                          \
        CHECK(t->lib.lk_moe_route(&r, NULL) == -EINVAL); \
        CHECK(error_says(t, "lk_moe_route", text));      \
    } while (0)
    REFUSED(r.choices = 0, "choices");
    REFUSED(r.tokens = UINT64_C(1) << 30, "slots");
    REFUSED(r.rows = UINT64_C(1) << 31, "rows");
    REFUSED(r.expert_count = 0, "expert_count");
    REFUSED(r.expert_count = LK_MOE_EXPERTS + 1, "expert_count");
    REFUSED(r.capacity = 7, "capacity");
    REFUSED(r.align = 12, "align");
    REFUSED(r.align = 0, "align");
    REFUSED(r.experts = NULL, "experts is NULL");
    REFUSED(r.counts = NULL, "counts is NULL");
    REFUSED(r.live = (uint32_t *)((char *)r.live + 2), "live is not aligned");
    REFUSED(r.slot_of_row = NULL, "slot_of_row is NULL");
    REFUSED(r.workspace = NULL, "workspace");
    REFUSED(r.workspace = (char *)r.workspace + 4, "workspace");
#undef REFUSED
}

static void wrong_arguments_are_refused(const struct compute_target *t)
{
    uint64_t state = 89;
    struct moe_case *c = make_case(t, &shapes[1], ANY, &state);
    struct lk_moe_rows rows;
    struct lk_moe_grads grads;

    wrong_routings_are_refused(t, c);
#define REFUSED(change, text)                                                \
    do {                                                                     \
        rows = make_rows(c, true, 0);                                        \
        change;                                                              \
        CHECK(t->lib.lk_moe_permute(&c->routing, &rows, NULL) == -EINVAL);   \
        CHECK(t->lib.lk_moe_unpermute(&c->routing, &rows, NULL) == -EINVAL); \
        CHECK(error_says(t, "lk_moe_unpermute", text));                      \
    } while (0)
    REFUSED(rows.columns = 0, "0 columns");
    REFUSED(rows.token_stride = rows.columns - 1, "of tokens");
    REFUSED(rows.permuted_stride = 0, "stride 0 of permuted");
    REFUSED(rows.tokens = NULL, "tokens is NULL");
    REFUSED(rows.permuted = (char *)rows.permuted + 1, "permuted is not aligned");
    REFUSED(rows.weights = (float *)((char *)rows.weights + 2), "weights");
#undef REFUSED
#define REFUSED(change, text)                                                          \
    do {                                                                               \
        grads = make_grads(c, true);                                                   \
        change;                                                                        \
        CHECK(t->lib.lk_moe_unpermute_backward(&c->routing, &grads, NULL) == -EINVAL); \
        CHECK(error_says(t, "lk_moe_unpermute_backward", text));                       \
    } while (0)
    REFUSED(grads.columns = 0, "0 columns");
    REFUSED(grads.dtokens = NULL, "dtokens is NULL");
    REFUSED(grads.dweights = NULL, "alone");
    REFUSED(grads.permuted = NULL, "alone");
    REFUSED(grads.permuted_stride = grads.columns - 1, "of permuted");
    REFUSED(grads.dpermuted_stride = 0, "of dpermuted");
    REFUSED(grads.dpermuted = (char *)grads.dpermuted + 1, "dpermuted is not aligned");
    REFUSED(grads.dweights = (float *)((char *)grads.dweights + 2), "dweights is not aligned");
#undef REFUSED
    drop_case(c);
}

uint64_t moe_fingerprint(const struct compute_target *t)
{
    uint64_t state = 97, hash = 0;
    struct moe_case *c = make_case(t, &shapes[3], ANY, &state);

    route(c);
    check_backward(c, true, &state);
    for (size_t i = 0; i < c->dweights.bytes; i++)
        hash = (hash ^ c->dweights.near[i]) * UINT64_C(0x100000001b3);
    drop_case(c);
    return hash;
}

void check_moe(const struct compute_target *t)
{
    rows_go_to_their_experts_and_back(t);
    wrong_arguments_are_refused(t);
}
