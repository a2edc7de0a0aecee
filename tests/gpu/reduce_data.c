/* SPDX-License-Identifier: Apache-2.0
 *
 * Inputs and what they sum up to. */
#include "tests/gpu/reduce.h"

#include <math.h>
#include <string.h>

size_t rd_type_size(ncclDataType_t type)
{
    return type == ncclFloat16 || type == ncclBfloat16 ? 2 : 4;
}

size_t rd_send_count(const struct rd_call *call, int n)
{
    return call->kind == RD_REDUCE_SCATTER ? call->count * (size_t)n : call->count;
}

size_t rd_recv_count(const struct rd_call *call, int n)
{
    return call->kind == RD_ALL_GATHER ? call->count * (size_t)n : call->count;
}

static float from_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* To nearest, ties to even; finite values only. */
static float round_bf16(float value)
{
    uint32_t bits = to_bits(value);

    return from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

static float round_fp16(float value)
{
    int exponent;
    double step;

    if (value == 0)
        return value;
    (void)frexp(value, &exponent);
    step = ldexp(1.0, (exponent < -13 ? -13 : exponent) - 11);
    return (float)(nearbyint(value / step) * step);
}

static uint16_t encode_fp16(float value)
{
    uint32_t sign = to_bits(value) >> 31 << 15;
    int exponent;
    double mantissa = frexp(fabs(value), &exponent);

    if (mantissa == 0)
        return (uint16_t)sign;
    if (exponent < -13)
        return (uint16_t)(sign | (uint32_t)ldexp(mantissa, exponent + 24));
    return (uint16_t)(sign | (((uint32_t)(exponent + 14) << 10) +
                              ((uint32_t)ldexp(mantissa, 11) - (1u << 10))));
}

static float decode_fp16(uint16_t bits)
{
    int exponent = bits >> 10 & 31;
    double mantissa = bits & 1023;
    double value = exponent ? ldexp(mantissa + 1024, exponent - 25) : ldexp(mantissa, -24);

    return (float)(bits >> 15 ? -value : value);
}

static float rounded(ncclDataType_t type, float value)
{
    switch (type) {
    case ncclBfloat16: return round_bf16(value);
    case ncclFloat16: return round_fp16(value);
    default: return value;
    }
}

static void encode(ncclDataType_t type, float value, size_t i, void *out)
{
    switch (type) {
    case ncclBfloat16: ((uint16_t *)out)[i] = (uint16_t)(to_bits(value) >> 16); break;
    case ncclFloat16: ((uint16_t *)out)[i] = encode_fp16(value); break;
    case ncclInt32: ((int32_t *)out)[i] = (int32_t)value; break;
    default: ((float *)out)[i] = value; break;
    }
}

static float decode(ncclDataType_t type, const void *data, size_t i)
{
    switch (type) {
    case ncclBfloat16: return from_bits((uint32_t)((const uint16_t *)data)[i] << 16);
    case ncclFloat16: return decode_fp16(((const uint16_t *)data)[i]);
    case ncclInt32: return (float)((const int32_t *)data)[i];
    default: return ((const float *)data)[i];
    }
}

/* What one rank puts in. Between -0.5 and 0.5; not 0, so that no result has two zeros to choose from. */
static float input(ncclDataType_t type, int world_rank, uint64_t salt, size_t i)
{
    uint64_t x = (salt * 64 + (uint64_t)world_rank + 1) * 0x9e3779b97f4a7c15u + i;
    float value;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
    if (type == ncclInt32)
        return (float)((int64_t)(x >> 45) - (1 << 18));
    value = (float)(((double)(x >> 40) + 0.5) / (1 << 24) - 0.5);
    return rounded(type, value);
}

void rd_fill(const struct rd_call *call, int n, int world_rank, uint64_t salt, void *out)
{
    size_t count = rd_send_count(call, n);

    for (size_t i = 0; i < count; i++)
        encode(call->type, input(call->type, world_rank, salt, i), i, out);
}

static float factor(const struct rd_call *call, int n)
{
    switch (call->op) {
    case RD_AVG: return 1.0f / (float)n;
    case RD_HALF: return 0.5f;
    case RD_QUARTER: return 0.25f;
    default: return 1;
    }
}

/* How an element is summed up: exactly as `want`, or within `slack` of it. */
struct sum {
    float want;
    double slack;
};

static struct sum sum_up(const struct rd_rank *me, const struct rd_call *call, bool wire,
                         const float *values)
{
    bool accurate = wire && me->wire == RD_ACCURATE;
    float scale = factor(call, me->n), narrow = 0;
    double wide = 0, size = 0, ulp;

    if (call->op == RD_MAX) {
        float most = values[0];

        for (int r = 1; r < me->n; r++)
            most = fmaxf(most, values[r]);
        return (struct sum){ most, 0 };
    }
    for (int r = 0; r < me->n; r++) {
        float value = rounded(call->type, values[r] * scale);

        if (wire)
            value = round_bf16(value);
        narrow = r == 0 ? value : narrow + value;
        wide += (double)values[r] * scale;
        size += fabs((double)values[r] * scale);
    }
    if (accurate && !me->rings && (call->kind == RD_REDUCE_SCATTER || me->n == 2))
        return (struct sum){ narrow, 0 };
    if (wire)
        narrow = round_bf16(narrow);
    narrow = rounded(call->type, narrow);
    if (me->rings && (wire || (call->type != ncclFloat32 && call->type != ncclInt32)))
        return (struct sum){ (float)wide,
                             (me->n + 1) * (call->type == ncclFloat16 ? 0x1p-11 : 0x1p-8) * size };
    if (me->n == 2 || accurate || call->type == ncclInt32)
        return (struct sum){ narrow, 0 };
    ulp = wire || call->type == ncclBfloat16 ? 0x1p-8
          : call->type == ncclFloat16        ? 0x1p-11
                                             : 0x1p-24;
    return (struct sum){ (float)wide, (me->n + 1) * ulp * size + me->n * 0x1p-24 };
}

static bool goes_by_wire(const struct rd_rank *me, const struct rd_call *call)
{
    return me->wire != RD_DATA && call->type == ncclFloat32 && call->op != RD_MAX &&
           rd_send_count(call, me->n) * 4 >= me->min_bytes;
}

static int world_rank(const struct rd_rank *me, const struct rd_call *call, int rank)
{
    return me->comms[call->comm].reversed ? me->n - 1 - rank : rank;
}

static bool wrong(const struct rd_rank *me, const struct rd_call *call, uint64_t salt, size_t i,
                  float got, struct sum want, bool complain)
{
    if (!complain)
        return false;
    fprintf(
        stderr,
        "rank %d: kind %d op %d type %d count %zu comm %d%s input %llu: element %zu is %.9g, not %.9g (+- %g)\n",
        me->rank, call->kind, call->op, call->type, call->count, call->comm,
        call->in_place ? " in place" : "", (unsigned long long)salt, i, got, want.want, want.slack);
    abort();
}

static bool check_sums(const struct rd_rank *me, const struct rd_call *call, uint64_t salt,
                       const void *result, bool wire, bool complain)
{
    int own = me->comms[call->comm].rank;
    size_t first = call->kind == RD_REDUCE_SCATTER ? (size_t)own * call->count : 0;

    for (size_t i = 0; i < call->count; i++) {
        float got = decode(call->type, result, i), values[RD_MAX_RANKS] = { 0 };
        struct sum want;

        for (int r = 0; r < me->n; r++)
            values[r] = input(call->type, world_rank(me, call, r), salt, first + i);
        want = sum_up(me, call, wire && goes_by_wire(me, call), values);
        if (!(fabs((double)got - want.want) <= want.slack))
            return wrong(me, call, salt, i, got, want, complain);
    }
    return true;
}

static bool check_moved(const struct rd_rank *me, const struct rd_call *call, uint64_t salt,
                        const void *result, bool complain)
{
    int own = me->comms[call->comm].rank;

    for (size_t i = 0; i < rd_recv_count(call, me->n); i++) {
        int from = call->kind == RD_ALL_GATHER  ? (int)(i / call->count)
                   : call->kind == RD_BROADCAST ? call->root
                                                : (own + me->n - 1) % me->n;
        size_t at = call->kind == RD_ALL_GATHER ? i % call->count : i;
        struct sum want = { input(call->type, world_rank(me, call, from), salt, at), 0 };
        float got = decode(call->type, result, i);

        if (got != want.want)
            return wrong(me, call, salt, i, got, want, complain);
    }
    return true;
}

bool rd_matches(const struct rd_rank *me, const struct rd_call *call, uint64_t salt,
                const void *result, bool wire, bool complain)
{
    if (call->kind == RD_ALL_REDUCE || call->kind == RD_REDUCE_SCATTER)
        return check_sums(me, call, salt, result, wire, complain);
    return check_moved(me, call, salt, result, complain);
}
