/* SPDX-License-Identifier: Apache-2.0
 *
 * Inputs, and what must come of them. */
#include "tests/gpu/mixed.h"
#include "tests/interpose/content.h"

#include <math.h>
#include <string.h>

#define CHUNK 512 /* elements looked at at once */
#define ROW   192 /* elements that are zero together */

uint64_t mx_salt(const struct mx_plan *plan, const struct mx_take *take)
{
    int which = take->call >= 0 ? take->call : MX_CALLS + take->message;

    return content_mix(plan->seed * 0x9e3779b97f4a7c15u + (uint64_t)which * 64 +
                       (uint64_t)take->round);
}

static uint64_t key(uint64_t salt, int src, int dst)
{
    return content_mix(salt + (uint64_t)src * 16 + (uint64_t)dst);
}

/* ---- numbers ---- */

/* From -15 to 16: bf16 holds their sums over eight ranks, and those in eighths. Or any between -0.5 and 0.5. */
static void numbers(const struct mx_call *call, uint64_t salt, int world, size_t first, size_t n,
                    float *out)
{
    uint64_t base = key(salt, world, MX_RANKS);
    bool dead = false;

    for (size_t k = 0; k < n; k++) {
        size_t i = first + k;
        uint64_t x = (base + i) * 0x9e3779b97f4a7c15u;

        if (call->sparse && (k == 0 || i % ROW == 0))
            dead = content_mix(base + i / ROW) % 4 != 0;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x ^= x >> 29;
        if (dead)
            out[k] = 0;
        else if (call->rough)
            out[k] = (float)(((double)(x >> 40) + 0.5) / (1 << 24) - 0.5);
        else
            out[k] = (float)((int)(x >> 59) - 15);
    }
}

static uint16_t to_fp16(float value)
{
    int exponent;
    double mantissa = frexp(fabs((double)value), &exponent);
    unsigned sign = value < 0 ? 0x8000 : 0;

    if (mantissa == 0)
        return 0;
    return (uint16_t)(sign | (((unsigned)(exponent + 14) << 10) +
                              ((unsigned)ldexp(mantissa, 11) - (1u << 10))));
}

static void encode(ncclDataType_t type, const float *values, size_t n, void *out)
{
    for (size_t k = 0; k < n; k++) {
        uint32_t bits;

        memcpy(&bits, &values[k], sizeof(bits));
        switch (type) {
        case ncclFloat16: ((uint16_t *)out)[k] = to_fp16(values[k]); break;
        case ncclBfloat16: ((uint16_t *)out)[k] = (uint16_t)(bits >> 16); break;
        case ncclInt32: ((int32_t *)out)[k] = (int32_t)values[k]; break;
        case ncclFloat64: ((double *)out)[k] = values[k]; break;
        default: ((float *)out)[k] = values[k]; break;
        }
    }
}

static size_t size_of(const struct mx_call *call)
{
    struct mx_call one = { .kind = MX_ALL_REDUCE, .type = call->type, .count = 1 };

    return mx_send_bytes(&one, 1);
}

/* ---- inputs ---- */

void mx_fill_message(const struct mx_message *message, uint64_t salt, void *out)
{
    content_fill(out, message->bytes, key(salt, message->src, message->dst));
}

void mx_fill_call(const struct mx_rank *me, const struct mx_call *call, uint64_t salt, void *out)
{
    int size = mx_size_in(me->n, call->comm, me->rank);
    size_t bytes = mx_send_bytes(call, size), element = size_of(call);
    float values[CHUNK];

    if (call->kind == MX_ALL_TO_ALL) {
        for (int r = 0; r < size; r++)
            content_fill((char *)out + (size_t)r * call->count * element, call->count * element,
                         key(salt, me->rank, mx_world_of(me->n, call->comm, me->rank, r)));
        return;
    }
    if (call->kind > MX_REDUCE_SCATTER) {
        content_fill(out, bytes, key(salt, me->rank, 0));
        return;
    }
    for (size_t at = 0, n; at < bytes / element; at += n) {
        n = bytes / element - at < CHUNK ? bytes / element - at : CHUNK;
        numbers(call, salt, me->rank, at, n, values);
        encode(call->type, values, n, (char *)out + at * element);
    }
}

/* ---- results ---- */

__attribute__((noreturn)) static void wrong(const struct mx_rank *me, const struct mx_take *take,
                                            const char *what)
{
    char text[MX_TEXT];

    fprintf(stderr, "rank %d: seed %llu: %s: %s\n", me->rank, (unsigned long long)me->plan.seed,
            mx_describe(me, take, text), what);
    abort();
}

static void differs(const struct mx_rank *me, const struct mx_take *take, size_t i, double got,
                    double want, double slack)
{
    char text[MX_TEXT];

    (void)snprintf(text, sizeof(text), "element %zu is %.9g, not %.9g (+- %g)", i, got, want,
                   slack);
    wrong(me, take, text);
}

static float factor_of(const struct mx_call *call, int size)
{
    switch (call->op) {
    case MX_AVG: return 1.0f / (float)size;
    case MX_HALF: return 0.5f;
    case MX_QUARTER: return 0.25f;
    default: return 1;
    }
}

static void check_whole(const struct mx_rank *me, const struct mx_take *take,
                        const struct mx_call *call, size_t first, size_t at, size_t n,
                        const char *got)
{
    int size = mx_size_in(me->n, call->comm, me->rank);
    float sums[CHUNK] = { 0 }, values[CHUNK], factor = factor_of(call, size);
    size_t element = size_of(call);
    char want[CHUNK * sizeof(double)];

    for (int r = 0; r < size; r++) {
        int world = mx_world_of(me->n, call->comm, me->rank, r);

        numbers(call, mx_salt(&me->plan, take), world, first + at, n, values);
        for (size_t k = 0; k < n; k++)
            sums[k] = r == 0               ? values[k]
                      : call->op == MX_MAX ? fmaxf(sums[k], values[k])
                                           : sums[k] + values[k];
    }
    for (size_t k = 0; k < n; k++)
        sums[k] *= factor;
    encode(call->type, sums, n, want);
    if (memcmp(got, want, n * element) == 0)
        return;
    for (size_t k = 0; k < n; k++) {
        uint64_t is = 0;

        memcpy(&is, got + k * element, element);
        if (memcmp(got + k * element, want + k * element, element) != 0) {
            char text[MX_TEXT];

            (void)snprintf(text, sizeof(text), "element %zu is not %g but the bits %llx", at + k,
                           sums[k], (unsigned long long)is);
            wrong(me, take, text);
        }
    }
}

/* fp32 sums that travel in bf16. */
static bool is_narrow(const struct mx_rank *me, const struct mx_call *call)
{
    return me->wire == MX_BF16 && call->type == ncclFloat32 && call->op != MX_MAX &&
           mx_send_bytes(call, mx_size_in(me->n, call->comm, me->rank)) >= me->min_bytes;
}

bool mx_is_near(const struct mx_rank *me, const struct mx_call *call)
{
    return call->rough || (me->fed && call->kind <= MX_REDUCE_SCATTER && is_narrow(me, call));
}

static void check_rough(const struct mx_rank *me, const struct mx_take *take,
                        const struct mx_call *call, size_t first, size_t at, size_t n,
                        const char *got)
{
    int size = mx_size_in(me->n, call->comm, me->rank);
    double step = !is_narrow(me, call) ? 0x1p-24 : (me->fed ? 2 : 1) * (me->drawn ? 2 : 1) * 0x1p-8;
    double sums[CHUNK] = { 0 }, sizes[CHUNK] = { 0 };
    float values[CHUNK], factor = factor_of(call, size), is;

    for (int r = 0; r < size; r++) {
        numbers(call, mx_salt(&me->plan, take), mx_world_of(me->n, call->comm, me->rank, r),
                first + at, n, values);
        for (size_t k = 0; k < n; k++) {
            sums[k] += (double)values[k] * factor;
            sizes[k] += fabs((double)values[k]) * factor;
        }
    }
    for (size_t k = 0; k < n; k++) {
        double slack = (size + 1) * step * sizes[k] + size * 0x1p-24;

        memcpy(&is, got + k * sizeof(is), sizeof(is));
        if (!(fabs(is - sums[k]) <= slack))
            differs(me, take, at + k, is, sums[k], slack);
    }
}

static uint64_t hash_of(const char *data, size_t bytes)
{
    uint64_t hash = bytes, word;

    for (; bytes >= 4; bytes -= 4, data += 4) {
        word = 0;
        memcpy(&word, data, 4);
        hash = (hash ^ word) * 0x100000001b3u;
        hash ^= hash >> 29;
    }
    return hash;
}

static void check_sums(struct mx_rank *me, const struct mx_take *take, const struct mx_call *call,
                       const char *data)
{
    size_t own = (size_t)mx_rank_in(me->n, call->comm, me->rank), element = size_of(call);
    size_t first = call->kind == MX_REDUCE_SCATTER ? own * call->count : 0;

    for (size_t at = 0, n; at < call->count; at += n) {
        n = call->count - at < CHUNK ? call->count - at : CHUNK;
        if (mx_is_near(me, call))
            check_rough(me, take, call, first, at, n, data + at * element);
        else
            check_whole(me, take, call, first, at, n, data + at * element);
    }
    /* Whole numbers are compared with the only right ones, unless something is owed; of others all must have the same. */
    if (mx_is_near(me, call) && call->kind == MX_ALL_REDUCE)
        atomic_store(&me->shared->digest[me->rank][take->call * MX_ROUNDS + take->round],
                     hash_of(data, call->count * element));
}

static void check_moved(const struct mx_rank *me, const struct mx_take *take,
                        const struct mx_call *call, const char *data)
{
    int size = mx_size_in(me->n, call->comm, me->rank);
    size_t part = call->count * size_of(call);
    uint64_t salt = mx_salt(&me->plan, take);
    bool parts = call->kind != MX_BROADCAST;

    for (int r = 0; r < (parts ? size : 1); r++) {
        int from = mx_world_of(me->n, call->comm, me->rank, parts ? r : call->root);
        int to = call->kind == MX_ALL_TO_ALL ? me->rank : 0;

        if (!content_is(data + (size_t)r * part, part, key(salt, from, to)))
            wrong(me, take, "did not arrive as it was sent");
    }
}

static void check_guards(const struct mx_rank *me, const struct mx_take *take, size_t before,
                         size_t bytes)
{
    const char *end = take->area + before + bytes;

    for (size_t i = 0; i < before; i++) {
        if (take->area[i] != (char)MX_FILLER)
            wrong(me, take, "bytes in front of the buffer have been written");
    }
    for (size_t i = 0; i < MX_GUARD; i++) {
        if (end[i] != (char)MX_FILLER)
            wrong(me, take, "bytes behind the buffer have been written");
    }
}

void mx_check(struct mx_rank *me, const struct mx_take *take)
{
    const struct mx_message *m = &me->plan.message[take->message < 0 ? 0 : take->message];
    const struct mx_call *call = &me->plan.call[take->call < 0 ? 0 : take->call];
    const struct mx_place *place = take->call < 0 ? &me->recvs[take->message]
                                                  : &me->calls[take->call];
    size_t before = MX_GUARD + (take->call < 0 ? m->skip : call->skip);
    const char *data = take->area + (place->recv - place->area);

    check_guards(me, take, before, place->area_bytes - before - MX_GUARD);
    if (take->call < 0) {
        if (!content_is(data, m->bytes, key(mx_salt(&me->plan, take), m->src, m->dst)))
            wrong(me, take, "did not arrive as it was sent");
    } else if (call->kind <= MX_REDUCE_SCATTER) {
        check_sums(me, take, call, data);
    } else {
        check_moved(me, take, call, data);
    }
    me->results++;
}
