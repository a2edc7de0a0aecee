/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/rings_cases.h"

#include "kernels/rings_internal.h"
#include "tests/check.h"
#include "tests/kernels/reference.h"

#include <string.h>

#define GUARD 64u

#define SHAPE(r, c, s, l)                                              \
    {                                                                  \
        .ranks = (r), .channels = (c), .slots = (s), .line_bytes = (l) \
    }

const struct rings_case rings_cases[] = {
    {"one element",
     RINGS_ALL_REDUCE,          SHAPE(2,         1,                                    1,0),
     LK_FP32,                                                                                                                        LK_FP32,
     LK_NEAREST,                                                                                                                                            { 1, 1, 1 },
     1,                                                                                                                                             1,
     .pre = 1,
     .post = 1                                                                                                                                      },
    { "fp32",
     RINGS_ALL_REDUCE,          SHAPE(2,         3,                                    2,0),
     LK_FP32,                                                                                                                        LK_FP32,
     LK_NEAREST,                                                                                                                                            { 2, 1, 3 },
     1,                                                                                                                                             30000,
     .pre = 1,
     .post = 0.5F,
     .specials = true },
    { "fp32 on a bf16 wire",
     RINGS_ALL_REDUCE, SHAPE(2,                           3,                                                        2,0),
     LK_FP32,                                                                                                                         LK_BF16,
     LK_NEAREST,              { 1, 3, 2 },
     1,                                                                                                          70001,
     .pre = 1,
     .post = 0.5F,
     .zeros = 50 },
    { "bf16",
     RINGS_ALL_REDUCE,            SHAPE(3,                     2,                                                                 1,0),
     LK_BF16, LK_BF16,
     LK_NEAREST,                                                                                                                                               { 1, 2, 1 },
     1,                                                                                                                                    40000,
     .pre = 0.75F,
     .post = 1,
     .specials = true },
    { "fp16 in place",
     RINGS_ALL_REDUCE,          SHAPE(3,                        2,                                             3,0),
     LK_FP16,                                                                   LK_FP16,
     LK_NEAREST,                                                                                                               { 2, 2, 1 },
     1,                                                            40000,
     .in_place = true,
     .pre = 1,
     .post = 0.25F,
     .specials = true,
     .zeros = 30 },
    { "stochastic",
     RINGS_ALL_REDUCE,                  SHAPE(2,                              2,                                                                 2,0),
     LK_FP32,                                                                                                   LK_BF16,
     LK_STOCHASTIC,                                                                                                            { 1, 2, 1 },
     1, 30000,
     .pre = 1,
     .post = 1,
     .zeros = 20,
     .specials = true },
    { "a list in place",
     RINGS_ALL_REDUCE,                         SHAPE(2,                                   4,                                                                         2,0),
     LK_FP32,                                                                                                               LK_BF16,
     LK_NEAREST,                                                                                                                { 2, 3, 1 },
     40,                                                                                             3000,
     .in_place = true,
     .pre = 1,
     .post = 0.5F },
    { "a long list, misaligned",
     RINGS_ALL_REDUCE,                SHAPE(3,                    2,                                                                               2,0),
     LK_FP32,                                                                                                                       LK_FP32,
     LK_NEAREST,                                                                                                                                       { 1, 2, 1 },
     300,                                                                                                                              200,
     .misaligned = true,
     .pre = 1,
     .post = 1,
     .zeros = 20 },
    { "a list of bf16, misaligned",
     RINGS_ALL_REDUCE,          SHAPE(2,                                 2,                                                          1,0),
     LK_BF16,                                                                                                             LK_BF16,
     LK_NEAREST,                                                                                                                                             { 2, 1, 1 },
     20,                                                                                                                                3000,
     .misaligned = true,
     .in_place = true,
     .pre = 1,
     .post = 1 },
    { "stochastic list, misaligned",
     RINGS_ALL_REDUCE,                    SHAPE(2,                                    2,                                                                 2,0),
     LK_FP32,                                                                                                                             LK_BF16,
     LK_STOCHASTIC,                                                                                                                                    { 1, 1, 1 },
     20,                                                                                                                                      2000,
     .misaligned = true,
     .pre = 1,
     .post = 0.5F,
     .seed = 3 },
    { "with residuals",
     RINGS_ALL_REDUCE,SHAPE(3,2,2,0),
     LK_FP32,                                                                                                                  LK_BF16,
     LK_NEAREST,                                                                                                                                                    { 1, 2, 1 },
     1,                                                                                                                            30001,
     .pre = 0.75F,
     .post = 1,
     .zeros = 30,
     .specials = true,
     .fed = true },
    { "a list with residuals in place, stochastic, misaligned",
     RINGS_ALL_REDUCE,          SHAPE(2,                       2,                                                                                    2, 0),
     LK_FP32,                                                                                                                        LK_BF16,
     LK_STOCHASTIC,                                                                                                                                            { 2, 1, 1 },
     20,                                                                                                                                             2000,
     .misaligned = true,
     .in_place = true,
     .pre = 1,
     .post = 0.5F,
     .fed = true },
    { "two ranks with residuals",
     RINGS_ALL_REDUCE,               SHAPE(2,                             3,         2,0),
     LK_FP32,                                                                    LK_BF16,
     LK_NEAREST, { 2, 3, 1 },
     1,       70001,
     .pre = 1,
     .post = 0.5F,
     .zeros = 20,
     .fed = true },
    { "reduce-scatter with residuals",
     RINGS_REDUCE_SCATTER,          SHAPE(3,                                   2,                                                                     1,0),
     LK_FP32,                                                                                     LK_BF16,
     LK_STOCHASTIC,                                                                                                               { 1, 2, 1 },
     3,                                                             5000,
     .pre = 1,
     .post = 1,
     .seed = 2,
     .fed = true },
    { "reduce-scatter",
     RINGS_REDUCE_SCATTER,                         SHAPE(2,                                   3,                                                                         2,0),
     LK_FP32,                                                                                                                    LK_BF16,
     LK_NEAREST,                                                                                                       { 2, 1, 3 },
     1,                                                                                                        30000,
     .pre = 1,
     .post = 0.5F,
     .zeros = 30 },
    { "reduce-scatter list",
     RINGS_REDUCE_SCATTER,             SHAPE(3,                 2,                                                                                1,0),
     LK_BF16,                                                                                                                      LK_BF16,
     LK_NEAREST,                                                                                                                                           { 2, 1, 1 },
     12,                                                                                                              3001,
     .misaligned = true,
     .pre = 1,
     .post = 1 },
    { "reduce-scatter in place",
     RINGS_REDUCE_SCATTER,                   SHAPE(2,                           2,                                                                       2,0),
     LK_FP32,                                                                                                                       LK_FP32,
     LK_NEAREST,                                                                                                                                          { 1, 1, 1 },
     3,                                                                                                                                5000,
     .in_place = true,
     .pre = 0.5F,
     .post = 1,
     .specials = true },
    { "one-shot",
     RINGS_LINES,                    SHAPE(2,                                    2,                                                                 1,4096),
     LK_FP32,                                                                                                                             LK_FP32,
     LK_NEAREST,                                                                                                                                    { 1, 2, 1 },
     1,                                                                                                                                     1000,
     .pre = 1,
     .post = 0.5F,
     .specials = true },
    { "one-shot list in place",
     RINGS_LINES,                     SHAPE(3,        2,                                                                          1,8192),
     LK_BF16,                                                                                                        LK_BF16,
     LK_NEAREST,                                                                                                                                               { 1, 2, 2 },
     9,                                                                                                                                   300,
     .misaligned = true,
     .in_place = true,
     .pre = 0.3F,
     .post = 1 },
    { "one-shot fp16",
     RINGS_LINES,SHAPE(2,2,1,16384),
     LK_FP16,LK_FP16,
     LK_NEAREST,{ 2, 1, 2 },
     1,   8000,
     .pre = 1,
     .post = 1                                                                                                                               },
};
const size_t rings_case_count = sizeof(rings_cases) / sizeof(*rings_cases);

static uint32_t pick(uint64_t *state, uint32_t below)
{
    return (uint32_t)(ref_next(state) % below);
}

static void random_types(uint64_t *state, struct rings_case *c)
{
    static const enum lk_type types[][2] = {
        {LK_FP32,  LK_FP32},
        { LK_FP32, LK_BF16},
        { LK_BF16, LK_BF16},
        { LK_FP16, LK_FP16}
    };
    uint32_t t = pick(state, 4);

    c->type = types[t][0];
    c->wire = c->op == RINGS_LINES ? types[t][0] : types[t][1];
    c->rounding = c->type != c->wire && pick(state, 3) == 0 ? LK_STOCHASTIC : LK_NEAREST;
    c->fed = c->type != c->wire && pick(state, 3) == 0;
}

void rings_random_case(uint64_t seed, uint32_t ranks, uint64_t most, struct rings_case *out)
{
    uint64_t state = seed * 2 + 1;
    uint32_t n = pick(&state, 3) ? 1 : 1 + pick(&state, 60);
    uint32_t channels = 1 + pick(&state, 8);
    uint32_t draw = pick(&state, 8);
    struct rings_case c = {
        .name = "random",
        .op = draw == 0   ? RINGS_LINES
              : draw <= 2 ? RINGS_REDUCE_SCATTER
                          : RINGS_ALL_REDUCE,
        .shape = SHAPE(2 + pick(&state, ranks - 1), channels, 1 + pick(&state, 4), 16384),
        .ctas = {1 + pick(&state, channels), 1 + pick(&state, channels),
                 1 + pick(&state, channels)},
        .tensors = n,
        .count = 1 + ref_next(&state) % (most / n),
        .misaligned = pick(&state, 3) == 0,
        .in_place = pick(&state, 2),
        .specials = pick(&state, 2),
        .zeros = pick(&state, 2) ? pick(&state, 100) : 0,
        .pre = pick(&state, 2) ? 1 : 0.7F,
        .post = pick(&state, 2) ? 1 : 0.3F,
        .seed = seed,
    };

    random_types(&state, &c);
    if (c.op == RINGS_LINES && c.count > 4000 / n)
        c.count = 4000 / n;
    if (c.op == RINGS_REDUCE_SCATTER)
        c.count = (c.count + c.shape.ranks - 1) / c.shape.ranks;
    *out = c;
}

void rings_describe(const struct rings_case *c, char *text, size_t size)
{
    static const char *const ops[] = { "all-reduce", "reduce-scatter", "one-shot" };
    static const char *const types[] = { "fp32", "bf16", "fp16" };

    snprintf(
        text, size,
        "%s: %s, %u ranks, %u channels, %u slots, ctas %u %u %u, %s on %s%s, %u x %llu%s%s, zeros %u, seed %llu",
        c->name, ops[c->op], c->shape.ranks, c->shape.channels, c->shape.slots, c->ctas[0],
        c->ctas[1], c->ctas[2], types[c->type], types[c->wire],
        c->rounding == LK_STOCHASTIC ? " stochastic" : "", c->tensors, (unsigned long long)c->count,
        c->misaligned ? " misaligned" : "", c->in_place ? " in place" : "", c->zeros,
        (unsigned long long)c->seed);
}

/* ---- values ---- */

static uint32_t element_bytes(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

static float get(enum lk_type type, const uint8_t *p)
{
    uint32_t wide;
    uint16_t half;

    if (type == LK_FP32) {
        memcpy(&wide, p, 4);
        return bits_float(wide);
    }
    memcpy(&half, p, 2);
    return type == LK_BF16 ? widen_bf16(half) : widen_fp16(half);
}

static void put(enum lk_type type, uint8_t *p, float value)
{
    uint32_t wide = float_bits(value);
    uint16_t half = (uint16_t)(type == LK_BF16 ? narrow_bf16(value, 1, 0, 0) : narrow_fp16(value));

    if (type == LK_FP32)
        memcpy(p, &wide, 4);
    else
        memcpy(p, &half, 2);
}

/* The value after rounding to the wire's type; of NaNs only that they are one matters before the result. */
static float round_to(enum lk_type wire, float value, enum lk_rounding rounding,
                      const struct lk_rng *rng, uint64_t index)
{
    uint32_t block[4];

    if (value != value)
        return bits_float(LK_FP32_NAN);
    if (wire == LK_FP32)
        return value;
    if (wire == LK_FP16)
        return widen_fp16(narrow_fp16(value));
    if (rounding == LK_NEAREST)
        return widen_bf16(narrow_bf16(value, 1, 0, 0));
    index += rng->offset;
    philox(rng->seed, index / 8, block);
    return widen_bf16(narrow_bf16(value, 1, 1, random_bits(block, index % 8)));
}

/* The same with what `owed` has, which changes; NULL: without. */
static float feed_to(const struct rings_case *c, float value, const struct lk_rng *rng,
                     uint64_t index, float *owed)
{
    bool stochastic = c->rounding == LK_STOCHASTIC;
    uint32_t block[4], random = 0;

    if (!owed)
        return round_to(c->wire, value, c->rounding, rng, index);
    if (stochastic) {
        philox(rng->seed, (index + rng->offset) / 8, block);
        random = random_bits(block, (index + rng->offset) % 8);
    }
    return widen_bf16(lk_feed(value, owed, stochastic, random));
}

/* A NaN of the wire's type, as the element's type has it. */
static void put_result(const struct rings_case *c, uint8_t *p, float value)
{
    const uint32_t wide = c->wire == LK_FP32 ? LK_FP32_NAN : LK_BF16_NAN << 16;
    const uint16_t half = LK_BF16_NAN;

    if (value == value)
        put(c->type, p, value);
    else if (c->type == LK_FP32)
        memcpy(p, &wide, 4);
    else
        memcpy(p, &half, 2);
}

static float random_value(uint64_t *state, bool specials)
{
    static const float special[] = {
        -0.0F, 0, 1e-41F, -1e-40F, 1e30F, 3e38F, -3e38F, 6e-6F, 65520
    };
    uint64_t draw = ref_next(state);
    uint32_t which = draw >> 8 & 1023;

    if (specials && which < 9)
        return special[which];
    if (specials && which == 9)
        return bits_float(0x7f800000U);
    if (specials && which == 10)
        return bits_float(0xff800000U);
    if (specials && which == 11)
        return bits_float(0xffa01234U);
    return ((float)(draw >> 40) * 0x1p-24F - 0.5F) * 8;
}

/* ---- making ---- */

static void fill(const struct rings_case *c, uint32_t rank, uint8_t *p, uint64_t count,
                 uint64_t tensor)
{
    uint32_t bytes = element_bytes(c->type);
    uint64_t run = LK_GRANULE / bytes;
    uint64_t mine = (c->seed + 1) * 1000003 + rank * 7919 + tensor;
    uint64_t shared = (c->seed + 1) * 999983 + tensor;
    bool zero = false;

    for (uint64_t i = 0; i < count; i++) {
        float x = random_value(&mine, c->specials);

        if (i % run == 0) {
            uint32_t alike = pick(&shared, 300), alone = pick(&mine, 300);

            zero = alike < 2 * c->zeros || alone < c->zeros;
        }
        put(c->type, p + i * bytes, zero ? 0 : x);
    }
}

/* Offsets of the tensors in the arenas; sizes are the same at all ranks, places are not. */
static void lay_out(const struct rings_case *c, uint32_t rank, struct rings_rank *r, uint32_t n)
{
    uint64_t sizes = c->seed * 31 + 5, places = c->seed * 77 + rank + 1;
    uint64_t parts = c->op == RINGS_REDUCE_SCATTER ? c->shape.ranks : 1;
    uint32_t bytes = element_bytes(c->type);
    size_t in = GUARD, out = GUARD;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t count = n == 1 ? c->count : ref_next(&sizes) % (c->count + 1);
        size_t shift_in = c->misaligned ? pick(&places, 8) * bytes : 0;
        size_t shift_out = c->misaligned ? pick(&places, 8) * bytes : 0;

        in = (in + 15) / 16 * 16 + shift_in;
        out = (out + 15) / 16 * 16 + shift_out;
        r->list[i].in = (void *)(uintptr_t)in;
        r->list[i].out = (void *)(uintptr_t)(c->in_place
                                                 ? in + (parts > 1 ? rank * count * bytes : 0)
                                                 : out);
        r->list[i].count = count;
        in += parts * count * bytes;
        out += count * bytes;
    }
    r->in_bytes = in + GUARD;
    r->out_bytes = c->in_place ? 0 : out + GUARD;
}

struct summing {
    struct rings_data *data;
    uint32_t owner; /* LK_RANKS_MAX: everybody */
    uint64_t index; /* in the tile space */
    uint64_t owed;  /* where the residual lies */
};

static float *owed_by(const struct summing *s, uint32_t rank)
{
    float *owed = s->data->ranks[rank % LK_RANKS_MAX].owed;

    return owed ? owed + s->owed : NULL;
}

/* Of the packs of one part's space. */
static void make_residuals(struct rings_data *data, uint64_t packs)
{
    const struct rings_case *c = data->c;
    uint64_t parts = c->op == RINGS_REDUCE_SCATTER ? c->shape.ranks : 1;
    uint64_t count = packs * parts * 8;

    if (!c->fed)
        return;
    data->residual_bytes = (count + 1) * sizeof(float); /* none of them needs to be there */
    for (uint32_t r = 0; r < c->shape.ranks; r++) {
        struct rings_rank *rank = &data->ranks[r];
        uint64_t state = c->seed * 55 + r;

        rank->residual = calloc(1, data->residual_bytes);
        rank->owed = calloc(1, data->residual_bytes);
        CHECK(rank->residual && rank->owed);
        for (uint64_t i = 0; i < count; i++)
            rank->residual[i] = random_value(&state, true) * 0.003F;
        memcpy(rank->owed, rank->residual, data->residual_bytes);
    }
}

static float sum_up(const struct summing *s, uint32_t tensor, uint64_t element)
{
    const struct rings_case *c = s->data->c;
    float sum = 0;

    for (uint32_t r = 0; r < c->shape.ranks; r++) {
        const struct rings_rank *rank = &s->data->ranks[r];
        const uint8_t *p;
        float value;

        CHECK(rank->list);
        p = rank->in + (uintptr_t)rank->list[tensor].in + element * element_bytes(c->type);
        value = multiply(get(c->type, p), c->pre);
        if (r != s->owner)
            value = feed_to(c, value, &rank->rng, s->index, owed_by(s, r));
        sum = r ? sum + value : value;
    }
    return multiply(sum, c->post);
}

/* Elements of one tensor; `first`: its pack in the tile space of `packs`. */
static void expect(struct rings_data *data, uint32_t tensor, uint64_t first, uint64_t tile_packs,
                   uint64_t packs)
{
    const struct rings_case *c = data->c;
    uint64_t each = LK_PACK_BYTES / element_bytes(c->wire);
    uint32_t bytes = element_bytes(c->type), ranks = c->shape.ranks;
    bool scatter = c->op == RINGS_REDUCE_SCATTER;
    uint64_t count = data->ranks[0].list[tensor].count;

    for (uint64_t i = 0; i < count * (scatter ? ranks : 1); i++) {
        uint64_t at = scatter ? i % count : i;
        struct summing s = { data, LK_RANKS_MAX, first * each + at, first * each + at };
        float value;

        if (scatter)
            s.owner = (uint32_t)(i / count), s.owed += s.owner * packs * each;
        else if (c->op == RINGS_ALL_REDUCE)
            s.owner = (uint32_t)((first + at / each) / tile_packs % ranks);
        value = sum_up(&s, tensor, i);
        value = feed_to(c, value, &data->ranks[s.owner % LK_RANKS_MAX].rng,
                        LK_RESULT_DRAWS + s.index, owed_by(&s, s.owner));
        for (uint32_t r = 0; r < ranks; r++) {
            struct rings_rank *rank = &data->ranks[r];

            if (!scatter || r == s.owner)
                put_result(c, rank->expected + (uintptr_t)rank->list[tensor].out + at * bytes,
                           value);
        }
    }
}

/* Where a tensor begins that comes behind `packs` packs, and how many it has. */
static uint64_t place_of(const struct rings_data *data, uint32_t tensor, uint64_t packs,
                         uint64_t *own)
{
    const struct rings_case *c = data->c;
    uint64_t each = LK_PACK_BYTES / element_bytes(c->wire);
    uint64_t granule = LK_GRANULE / LK_PACK_BYTES;

    *own = (data->ranks[0].list[tensor].count + each - 1) / each;
    if (c->op == RINGS_LINES || *own < 16 * granule)
        return packs;
    return (packs + granule - 1) / granule * granule;
}

static void expect_all(struct rings_data *data)
{
    const struct rings_case *c = data->c;
    uint64_t packs = 0, all, granules, tile, own;

    CHECK(c->shape.ranks >= 2 && c->shape.channels >= 1);
    for (uint32_t i = 0; i < data->n; i++) {
        packs = place_of(data, i, packs, &own);
        packs += own;
    }
    granules = (packs * LK_PACK_BYTES + LK_GRANULE - 1) / LK_GRANULE;
    tile = lk_tile_granules(&c->shape,
                            granules * (c->op == RINGS_REDUCE_SCATTER ? c->shape.ranks : 1));
    all = packs;
    make_residuals(data, all);
    packs = 0;
    for (uint32_t i = 0; i < data->n; i++) {
        packs = place_of(data, i, packs, &own);
        expect(data, i, packs, tile * (LK_GRANULE / LK_PACK_BYTES), all);
        packs += own;
    }
}

struct rings_data *rings_data_make(const struct rings_case *c)
{
    struct rings_data *data = calloc(1, sizeof(*data));
    uint64_t parts = c->op == RINGS_REDUCE_SCATTER ? c->shape.ranks : 1;

    CHECK(data);
    CHECK(c->shape.ranks >= 2 && c->shape.ranks <= LK_RANKS_MAX && c->tensors);
    data->c = c;
    data->n = c->tensors;
    for (uint32_t r = 0; r < c->shape.ranks; r++) {
        struct rings_rank *rank = &data->ranks[r];

        rank->list = calloc(data->n, sizeof(*rank->list));
        CHECK(rank->list);
        lay_out(c, r, rank, data->n);
        rank->rng = (struct lk_rng){ c->seed + r, c->seed % 3 ? c->seed * 1000 : 0, NULL };
        rank->in = malloc(rank->in_bytes);
        rank->out = c->in_place ? NULL : malloc(rank->out_bytes);
        rank->expected = malloc(c->in_place ? rank->in_bytes : rank->out_bytes);
        CHECK(rank->in && rank->expected && (c->in_place || rank->out));
        memset(rank->in, 0x5a, rank->in_bytes);
        for (uint32_t i = 0; i < data->n; i++)
            fill(c, r, rank->in + (uintptr_t)rank->list[i].in, rank->list[i].count * parts, i);
        if (rank->out)
            memset(rank->out, 0xa5, rank->out_bytes);
        memcpy(rank->expected, c->in_place ? rank->in : rank->out,
               c->in_place ? rank->in_bytes : rank->out_bytes);
    }
    expect_all(data);
    return data;
}

void rings_data_free(struct rings_data *data)
{
    for (uint32_t r = 0; r < data->c->shape.ranks; r++) {
        free(data->ranks[r].in);
        free(data->ranks[r].out);
        free(data->ranks[r].expected);
        free(data->ranks[r].list);
        free(data->ranks[r].residual);
        free(data->ranks[r].owed);
    }
    free(data);
}

struct lk_reduction rings_reduction(const struct rings_data *data, uint32_t rank,
                                    struct lk_scale *scale, float *residual)
{
    const struct rings_case *c = data->c;

    *scale = (struct lk_scale){ .value = c->pre };
    return (struct lk_reduction){
        .type = c->type,
        .wire = c->wire,
        .pre = c->pre == 1 ? NULL : scale,
        .post = c->post,
        .rounding = c->rounding,
        .rng = c->rounding == LK_STOCHASTIC ? &data->ranks[rank].rng : NULL,
        .residual = data->residual_bytes ? residual : NULL,
    };
}

void rings_compare_residual(const struct rings_data *data, uint32_t rank, const float *got)
{
    const float *owed = data->ranks[rank].owed;
    char text[400];

    for (size_t i = 0; i < data->residual_bytes / sizeof(float); i++) {
        if (float_bits(got[i]) == float_bits(owed[i]))
            continue;
        rings_describe(data->c, text, sizeof(text));
        fprintf(stderr, "%s\nrank %u: residual %zu of %zu is %g instead of %g\n", text, rank, i,
                data->residual_bytes / sizeof(float), got[i], owed[i]);
        abort();
    }
}

void rings_compare(const struct rings_data *data, uint32_t rank, const uint8_t *got)
{
    const struct rings_rank *r = &data->ranks[rank];
    size_t bytes = data->c->in_place ? r->in_bytes : r->out_bytes;
    char text[400];

    for (size_t i = 0; i < bytes; i++) {
        if (got[i] == r->expected[i])
            continue;
        rings_describe(data->c, text, sizeof(text));
        fprintf(stderr, "%s\nrank %u: byte %zu of %zu is %02x instead of %02x\n", text, rank, i,
                bytes, got[i], r->expected[i]);
        for (uint32_t t = 0; t < data->n; t++) {
            size_t out = (uintptr_t)r->list[t].out;

            if (i >= out && i < out + r->list[t].count * element_bytes(data->c->type))
                fprintf(stderr, "tensor %u, element %zu of %llu\n", t,
                        (i - out) / element_bytes(data->c->type),
                        (unsigned long long)r->list[t].count);
        }
        abort();
    }
}
