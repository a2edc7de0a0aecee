/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/rings_reference.h"

#include "kernels/rings_internal.h"
#include "tests/check.h"
#include "tests/kernels/reference.h"

#include <math.h>

#define RESULTS (UINT64_C(1) << 48)

/* Where a tensor lies in the tile space of its launch. */
struct place {
    uint64_t element; /* its first one */
    uint64_t draws;   /* the number that the space's first element draws */
    uint64_t tile;    /* elements of a tile */
};

struct ring_expected {
    const struct ring_call *call;
    struct lk_ring_shape shape;
    struct place places[RING_TENSORS];
};

void ring_call_init(struct ring_call *call, enum ring_op op, enum lk_type type, enum lk_type wire,
                    uint64_t count, uint64_t seed)
{
    memset(call, 0, sizeof(*call));
    call->op = op;
    call->type = type;
    call->wire = op == RING_LINES ? type : wire;
    call->seed = seed;
    call->pre = 1;
    call->post = 1;
    call->n = 1;
    call->counts[0] = count;
    for (uint32_t r = 0; r < LK_RANKS_MAX; r++)
        call->ctas[r] = 1;
}

static uint64_t padded(const struct ring_call *call, size_t t)
{
    uint64_t each = call->wire == LK_FP32 ? 4 : 8;

    return (call->counts[t] + each - 1) / each * each;
}

uint64_t ring_call_bytes(const struct ring_call *call)
{
    uint64_t elements = 0;

    for (size_t t = 0; t < call->n; t++)
        elements += padded(call, t);
    return elements * (call->wire == LK_FP32 ? 4 : 2);
}

/* ---- data ---- */

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t state = a * 0x9fb21c651e98df25u + b;

    return ref_next(&state);
}

static uint32_t special_bits(enum lk_type type, uint64_t random)
{
    static const uint32_t wide[] = { 0x7fc12345, 0xffc00001, 0x7f800001, 0x7f800000,
                                     0xff800000, 0x80000000, 0,          1,
                                     0x807fffff, 0x7f7fffff, 0xff7fffff, 0x7f7f8000,
                                     0x3f808000, 0x3f818000, 0x00008000, 0x3f800000 };
    static const uint16_t brain[] = {
        0x7fc1, 0xffc0, 0x7f81, 0x7f80, 0xff80, 0x8000, 0,      1,
        0x807f, 0x7f7f, 0xff7f, 0x3f80, 0xbf80, 0x0080, 0x4000, 0x3f81
    };
    static const uint16_t half[] = {
        0x7e01, 0xfe00, 0x7c01, 0x7c00, 0xfc00, 0x8000, 0,      1,
        0x83ff, 0x7bff, 0xfbff, 0x3c00, 0xbc00, 0x0400, 0x4000, 0x3c01
    };

    /* Half of the elements only: else every sum is a NaN. */
    random %= 32;
    if (random > 15)
        random = random < 20 ? 5 : random < 26 ? 15 : 6;
    return type == LK_FP32 ? wide[random] : type == LK_BF16 ? brain[random] : half[random];
}

/* About N(0, 1); 16 bits are cut off, not rounded, which is no matter here. */
static uint32_t normal_bits(enum lk_type type, uint64_t random)
{
    double sum = (double)(random & 0xffff) + (double)(random >> 16 & 0xffff) +
                 (double)(random >> 32 & 0xffff) + (double)(random >> 48);

    if (type == LK_FP16)
        return (uint32_t)(random & 0x83ffu) | (uint32_t)(9 + (random >> 32) % 8) << 10;
    sum = (sum - 131070) / 37837;
    return type == LK_FP32 ? ref_bits((float)sum) : ref_bits((float)sum) / 65536;
}

static uint32_t element_bits(const struct ring_call *call, uint64_t key, uint64_t shared,
                             uint64_t i)
{
    uint64_t random = mix(key, i);

    switch (call->data) {
    case RING_ZERO: return 0;
    case RING_SPECIAL: return special_bits(call->type, random);
    case RING_SPARSE:
        if (mix(call->seed % 2 ? key : shared, i / 300) % 8 != 0)
            return 0;
        break;
    default: break;
    }
    return normal_bits(call->type, random);
}

static void put(enum lk_type type, void *out, uint64_t i, uint32_t bits)
{
    if (type == LK_FP32)
        ((uint32_t *)out)[i] = bits;
    else
        ((uint16_t *)out)[i] = (uint16_t)bits;
}

static uint64_t data_key(const struct ring_call *call, uint32_t rank, uint32_t part, size_t t)
{
    return mix(mix(call->seed, rank), (uint64_t)part << 32 | t);
}

void ring_fill(const struct ring_call *call, uint32_t rank, uint32_t part, size_t t, void *out)
{
    uint64_t key = data_key(call, rank, part, t);
    uint64_t shared = mix(call->seed, t);

    for (uint64_t i = 0; i < call->counts[t]; i++)
        put(call->type, out, i, element_bits(call, key, shared, i));
}

/* ---- results ---- */

uint16_t ref_to_fp16(float x)
{
    double size = fabs((double)x);
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent;
    double kept;

    if (isnan(x))
        return 0x7fff;
    if (size >= 65520)
        return (uint16_t)(sign + 0x7c00);
    if (size < 0x1p-14)
        return (uint16_t)(sign + (uint16_t)nearbyint(size * 0x1p24));
    kept = nearbyint(ldexp(frexp(size, &exponent), 11)); /* 1024 .. 2048 */
    return (uint16_t)(sign + (exponent + 13) * 1024 + (int)kept);
}

static float number(enum lk_type type, uint32_t bits)
{
    return type == LK_FP32   ? ref_float(bits)
           : type == LK_BF16 ? ref_float(bits * 65536)
                             : ref_fp16((uint16_t)bits);
}

/* x * scale as it is after one rounding to `wire`, in the bits of that type. */
static uint32_t rounded(enum lk_type wire, float x, float scale, bool stochastic, uint64_t key,
                        uint64_t draw)
{
    volatile float y = (float)((double)x * (double)scale);

    if (isnan(y))
        return wire == LK_FP32 ? 0x7fffffff : 0x7fff;
    if (wire == LK_FP32)
        return ref_bits(y);
    if (wire == LK_FP16)
        return ref_to_fp16(y);
    return stochastic ? ref_stochastic(x, scale, ref_random(key, draw)) : ref_nearest(x, scale);
}

/* Launches as the list is cut: a launch takes at most so many entries. */
struct ring_expected *ring_expect(const struct ring_call *call, const struct lk_ring_shape *shape)
{
    struct ring_expected *expected = calloc(1, sizeof(*expected));
    uint64_t bytes = call->wire == LK_FP32 ? 4 : 2;
    uint64_t parts = call->op == RING_REDUCE_SCATTER ? shape->ranks : 1;
    uint64_t draws = call->draws;
    size_t t = 0;

    CHECK(expected);
    expected->call = call;
    expected->shape = *shape;
    while (t < call->n) {
        size_t begin = t, entries = 0;
        uint64_t elements = 0, granules, tile;

        for (; t < call->n; t++) {
            if (!call->counts[t])
                continue;
            if (entries++ == LK_RING_MAX)
                break;
            if (call->op != RING_LINES && padded(call, t) * bytes >= 16 * 512) /* whole granules */
                elements = (elements * bytes + 511) / 512 * 512 / bytes;
            expected->places[t].element = elements;
            expected->places[t].draws = draws;
            elements += padded(call, t);
        }
        granules = parts * ((elements * bytes + 511) / 512);
        tile = (granules + shape->ranks * shape->channels - 1) / (shape->ranks * shape->channels);
        tile = tile < 1 ? 1 : tile > 32 ? 32 : tile;
        for (size_t i = begin; i < t; i++)
            expected->places[i].tile = tile * 512 / bytes;
        draws += elements;
    }
    return expected;
}

void ring_expected_free(struct ring_expected *expected)
{
    free(expected);
}

static uint32_t owner(const struct ring_expected *expected, uint32_t rank, size_t t, uint64_t i)
{
    const struct place *place = &expected->places[t];

    if (expected->call->op == RING_REDUCE_SCATTER)
        return rank;
    CHECK(place->tile && expected->shape.ranks);
    return (uint32_t)((place->element + i) / place->tile % expected->shape.ranks);
}

/* One rank's contributions to a tensor, as numbers. */
static void add(const struct ring_expected *expected, uint32_t from, uint32_t rank, size_t t,
                const void *data, float *sum)
{
    const struct ring_call *call = expected->call;
    const struct place *place = &expected->places[t];
    bool plain = call->wire == call->type && call->pre == 1;
    bool stochastic = call->stochastic && call->wire != call->type;

    for (uint64_t i = 0; i < call->counts[t]; i++) {
        uint32_t bits = call->type == LK_FP32 ? ((const uint32_t *)data)[i]
                                              : ((const uint16_t *)data)[i];
        float value = number(call->type, bits);

        if (!plain && (call->op == RING_LINES || owner(expected, rank, t, i) != from))
            value = number(call->wire,
                           rounded(call->wire, value, call->pre, stochastic, call->seed + from,
                                   place->draws + place->element + i));
        else if (!plain)
            value = (float)((double)value * (double)call->pre);
        sum[i] = from == 0 ? value : sum[i] + value;
    }
}

void ring_result(const struct ring_expected *expected, uint32_t rank, size_t t, void *out)
{
    const struct ring_call *call = expected->call;
    const struct place *place = &expected->places[t];
    bool stochastic = call->stochastic && call->wire != call->type;
    uint64_t count = call->counts[t];
    uint32_t part = call->op == RING_REDUCE_SCATTER ? rank : 0;
    float *sum = calloc(count ? count : 1, sizeof(*sum));
    void *data = calloc(count ? count : 1, 4);

    CHECK(sum && data);
    for (uint32_t from = 0; from < expected->shape.ranks; from++) {
        ring_fill(call, from, part, t, data);
        add(expected, from, rank, t, data, sum);
    }
    for (uint64_t i = 0; i < count; i++) {
        uint64_t draw = place->draws + RESULTS + place->element + i;
        uint64_t key = call->seed + owner(expected, rank, t, i);
        uint32_t bits = rounded(call->wire, sum[i], call->post, stochastic, key, draw);

        put(call->type, out, i,
            call->wire == LK_BF16 && call->type == LK_FP32 ? bits * 65536 : bits);
    }
    free(sum);
    free(data);
}
