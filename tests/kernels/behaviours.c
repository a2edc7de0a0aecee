/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/value_internal.h"
#include "tests/check.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/target.h"

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#define GUARD      ((size_t)64)
#define GUARD_BYTE 0xa5

/* Memory of the target with a copy here. Guard bytes lie around it. */
struct buffer {
    const struct target *target;
    size_t bytes;
    unsigned char *near; /* this process's copy */
    unsigned char *far;  /* the target's; GUARD bytes, a multiple of 16, on both sides of each */
};

static struct buffer make_buffer(const struct target *target, size_t bytes)
{
    struct buffer buffer = { .target = target, .bytes = bytes };
    unsigned char *base = target->alloc(bytes + 2 * GUARD);

    buffer.near = malloc(bytes + 2 * GUARD);
    CHECK(buffer.near && base);
    memset(buffer.near, GUARD_BYTE, bytes + 2 * GUARD);
    buffer.near += GUARD;
    buffer.far = base + GUARD;
    return buffer;
}

static void upload(const struct buffer *buffer)
{
    buffer->target->put(buffer->far - GUARD, buffer->near - GUARD, buffer->bytes + 2 * GUARD);
}

/* Fetches and checks that nothing outside changed. */
static void download(const struct buffer *buffer)
{
    buffer->target->get(buffer->near - GUARD, buffer->far - GUARD, buffer->bytes + 2 * GUARD);
    for (size_t i = 1; i <= GUARD; i++)
        CHECK(buffer->near[0 - i] == GUARD_BYTE &&
              buffer->near[buffer->bytes + i - 1] == GUARD_BYTE);
}

static void drop(struct buffer *buffer)
{
    free(buffer->near - GUARD);
    buffer->target->release(buffer->far - GUARD);
}

void open_library(struct target *target, const char *path)
{
    target->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!target->handle)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(target->handle);
#define LK_SYM(name) CHECK((*(void **)&target->lib.name = dlsym(target->handle, #name)));
#include "kernels/api.def"
#undef LK_SYM
    CHECK(target->lib.lk_abi_version() == LK_ABI_VERSION);
}

/* Bit patterns of fp32 at which rules change, then random ones. */
static uint32_t pattern(size_t i, uint64_t *state)
{
    static const uint32_t upper[] = { 0x0000, 0x0001, 0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3f81,
                                      0x7f7e, 0x7f7f, 0x7f80, 0x7f81, 0x7fbf, 0x7fc0, 0x7fff };
    static const uint32_t lower[] = { 0, 1, 0x7fff, 0x8000, 0x8001, 0xffff };
    size_t edges = sizeof(upper) / sizeof(*upper) * (sizeof(lower) / sizeof(*lower)) * 2;
    size_t n = sizeof(lower) / sizeof(*lower);

    if (i < edges)
        return upper[i / 2 / n] << 16 | lower[i / 2 % n] | (i % 2 ? 0x80000000U : 0);
    if (i % 4 == 0) /* exact ties */
        return (uint32_t)ref_next(state) << 16 | 0x8000;
    return (uint32_t)ref_next(state);
}

static void every_bf16_pattern_is_widened_exactly(const struct target *t)
{
    struct buffer packed = make_buffer(t, sizeof(uint16_t[65536]));
    struct buffer wide = make_buffer(t, sizeof(uint32_t[65536]));
    struct lk_tensor tensor = { wide.far, 65536, 0 };

    for (unsigned int i = 0; i < 65536; i++)
        ((uint16_t *)packed.near)[i] = (uint16_t)i;
    upload(&packed);
    upload(&wide);
    CHECK(t->lib.lk_cast_unpack(&tensor, 1, packed.far, NULL) == 0);
    download(&wide);
    for (unsigned int i = 0; i < 65536; i++)
        CHECK(((uint32_t *)wide.near)[i] == i << 16);
    drop(&packed);
    drop(&wide);
}

static void check_rounded(const struct buffer *in, const struct buffer *out, size_t n, float scale,
                          const struct lk_rng *rng)
{
    for (size_t i = 0; i < n; i++) {
        float x = ref_float(((uint32_t *)in->near)[i]);
        uint16_t want = rng ? ref_stochastic(x, scale, ref_random(rng->seed, i))
                            : ref_nearest(x, scale);

        CHECK(((uint16_t *)out->near)[i] == want);
    }
}

static void check_cast(const struct target *t, const struct buffer *in, const struct buffer *out,
                       const struct lk_scale *scale, float factor, const struct lk_rng *rng)
{
    struct lk_tensor tensor = { in->far, in->bytes / 4, 0 };

    upload(out);
    CHECK(t->lib.lk_cast_pack(&tensor, 1, out->far, scale, rng ? LK_STOCHASTIC : LK_NEAREST, rng,
                              NULL) == 0);
    download(out);
    check_rounded(in, out, in->bytes / 4, factor, rng);
}

static void rounding_follows_the_reference(const struct target *t)
{
    static const uint32_t scales[] = { 0x3f800000, 0x3eaaaaab, 0x3e000000, 0xbf800000, 0x00000000,
                                       0x80000000, 0x7f800000, 0x7fc00000, 0xffa00001, 0x00000001,
                                       0x7f7fffff, 0x00800000, 0x4b800001 };
    size_t n = t->small ? 3000 : 400000;
    struct buffer in = make_buffer(t, n * 4);
    struct buffer out = make_buffer(t, n * 2);
    struct lk_rng rng = { 0x123456789abcdefU, 0, NULL };
    uint64_t state = 1;

    for (size_t i = 0; i < n; i++)
        ((uint32_t *)in.near)[i] = pattern(i, &state);
    upload(&in);
    for (size_t s = 0; s < sizeof(scales) / sizeof(*scales); s++) {
        struct lk_scale scale = { .value = ref_float(scales[s]) };

        check_cast(t, &in, &out, s ? &scale : NULL, scale.value, NULL);
        check_cast(t, &in, &out, s ? &scale : NULL, scale.value, &rng);
    }
    drop(&in);
    drop(&out);
}

static void device_scalars_of_each_type_scale(const struct target *t)
{
    static const uint32_t values[] = { 0x3c00, 0x3555, 0x0001, 0x03ff, 0x0400, 0x7bff,
                                       0x7c00, 0xfc00, 0x7e00, 0x8000, 0xb555 };
    struct buffer in = make_buffer(t, sizeof(uint32_t[1024]));
    struct buffer out = make_buffer(t, sizeof(uint16_t[1024]));
    struct buffer scalar = make_buffer(t, 4);
    uint64_t state = 2;

    for (size_t i = 0; i < 1024; i++)
        ((uint32_t *)in.near)[i] = pattern(i, &state);
    upload(&in);
    for (size_t v = 0; v < sizeof(values) / sizeof(*values); v++) {
        for (int type = LK_FP32; type <= LK_FP16; type++) {
            struct lk_scale scale = { .value = 77,
                                      .type = (enum lk_type)type,
                                      .device_value = scalar.far };
            float factor = type == LK_FP16 ? ref_fp16((uint16_t)values[v])
                                           : ref_float(values[v] << 16);

            *(uint32_t *)scalar.near = type == LK_FP32 ? values[v] << 16 : values[v];
            upload(&scalar);
            check_cast(t, &in, &out, &scale, factor, NULL);
        }
    }
    drop(&in);
    drop(&out);
    drop(&scalar);
}

/* The operations on lists, for tests that go through all of them. */
enum list_op {
    CAST_NEAREST,
    CAST_STOCHASTIC,
    UNCAST,
    PACK16,
    UNPACK16,
    PACK32,
    UNPACK32,
    LIST_OPS
};

static bool op_packs(enum list_op op)
{
    return op != UNCAST && op != UNPACK16 && op != UNPACK32;
}

static size_t tensor_bytes(enum list_op op)
{
    return op == PACK16 || op == UNPACK16 ? 2 : 4;
}

static size_t packed_bytes(enum list_op op)
{
    return op == PACK32 || op == UNPACK32 ? 4 : 2;
}

static const struct lk_rng list_rng = { 99, UINT64_C(0xfffffffffffffff0),
                                        NULL }; /* wraps on the way */

static int run_op(const struct target *t, enum list_op op, const struct lk_tensor *list, size_t n,
                  void *packed)
{
    struct lk_scale scale = { .value = 0.7F };

    switch (op) {
    case CAST_NEAREST: return t->lib.lk_cast_pack(list, n, packed, &scale, LK_NEAREST, NULL, NULL);
    case CAST_STOCHASTIC:
        return t->lib.lk_cast_pack(list, n, packed, &scale, LK_STOCHASTIC, &list_rng, NULL);
    case UNCAST: return t->lib.lk_cast_unpack(list, n, packed, NULL);
    case PACK16: return t->lib.lk_pack(list, n, packed, LK_FP16, NULL);
    case UNPACK16: return t->lib.lk_unpack(list, n, packed, LK_BF16, NULL);
    case PACK32: return t->lib.lk_pack(list, n, packed, LK_FP32, NULL);
    case UNPACK32: return t->lib.lk_unpack(list, n, packed, LK_FP32, NULL);
    case LIST_OPS: break;
    }
    return -1;
}

/* What element i of a tensor is after the operation, given the bits on the other side. */
static uint32_t expected(enum list_op op, uint32_t in, uint64_t wire_index)
{
    if (op == CAST_NEAREST)
        return ref_nearest(ref_float(in), 0.7F);
    if (op == CAST_STOCHASTIC)
        return ref_stochastic(ref_float(in), 0.7F,
                              ref_random(list_rng.seed, list_rng.offset + wire_index));
    return op == UNCAST ? in << 16 : in;
}

static uint32_t load_bits(const unsigned char *p, size_t bytes)
{
    uint32_t bits = 0;

    memcpy(&bits, p, bytes);
    return bits;
}

/* Runs one operation over tensors that lie in `apart` and are packed in `packed`; checks every byte of the
 * destination, those between tensors included. */
static void check_list(const struct target *t, enum list_op op, struct buffer *apart,
                       struct buffer *packed, const struct lk_tensor *list, size_t n,
                       unsigned char *packed_near, void *packed_far)
{
    struct buffer *dst = op_packs(op) ? packed : apart;
    unsigned char *want = malloc(dst->bytes);

    CHECK(want);
    memset(dst->near, GUARD_BYTE, dst->bytes);
    memset(want, GUARD_BYTE, dst->bytes);
    upload(dst);
    for (size_t k = 0; k < n; k++) {
        unsigned char *tensor = list[k].count
                                    ? apart->near + ((unsigned char *)list[k].ptr - apart->far)
                                    : NULL;

        for (size_t i = 0; i < list[k].count; i++) {
            unsigned char *a = tensor + i * tensor_bytes(op);
            unsigned char *p = packed_near + (list[k].offset + i) * packed_bytes(op);
            bool packs = op_packs(op);
            uint32_t in = packs ? load_bits(a, tensor_bytes(op)) : load_bits(p, packed_bytes(op));
            uint32_t bits = expected(op, in, list[k].offset + i);
            unsigned char *to = packs ? want + (p - packed->near) : want + (a - apart->near);

            memcpy(to, &bits, packs ? packed_bytes(op) : tensor_bytes(op));
        }
    }
    CHECK(run_op(t, op, list, n, packed_far) == 0);
    download(dst);
    CHECK(memcmp(dst->near, want, dst->bytes) == 0);
    free(want);
}

static void fill(struct buffer *buffer, uint64_t seed)
{
    for (size_t i = 0; i < buffer->bytes / 4; i++)
        ((uint32_t *)buffer->near)[i] = pattern(i % 1000, &seed);
    upload(buffer);
}

static void every_alignment_and_count_is_served(const struct target *t)
{
    static const size_t counts[] = { 1,    2,    3,    7,    8,    9,     15,    16,   17,
                                     31,   255,  256,  257,  263,  264,   1023,  1024, 1031,
                                     1032, 8191, 8192, 8193, 8200, 16384, 16397, 20000 };
    size_t most = sizeof(counts) / sizeof(*counts);
    struct buffer apart = make_buffer(t, sizeof(uint32_t[20016]));
    struct buffer packed = make_buffer(t, sizeof(uint32_t[20016]));

    for (enum list_op op = 0; op < LIST_OPS; op++) {
        fill(&apart, op);
        fill(&packed, op + 100U);
        for (size_t a = 0; a < 16; a += tensor_bytes(op))
            for (size_t p = 0; p < 16; p += packed_bytes(op))
                for (size_t c = 0; c < most; c += t->small ? 7 : 1) {
                    struct lk_tensor tensor = { apart.far + a, counts[c], 0 };

                    check_list(t, op, &apart, &packed, &tensor, 1, packed.near + p, packed.far + p);
                }
    }
    drop(&apart);
    drop(&packed);
}

/* Sizes from 0 to 300 and a few larger ones, at random alignments, in shuffled order. Pointers are offsets still. */
static void random_list(struct lk_tensor *list, size_t n, enum list_op op, bool aligned,
                        uint64_t *state, size_t *apart_bytes, size_t *packed_elements)
{
    size_t at = 0, offset = 0;

    for (size_t i = 0; i < n; i++) {
        size_t r = ref_next(state) % 100;
        size_t count = r < 5 ? 0 : r < 98 ? ref_next(state) % 300 : ref_next(state) % 20000;

        if (aligned) {
            at = (at + 15) / 16 * 16;
            offset = (offset + LK_PACK_ALIGN - 1) / LK_PACK_ALIGN * LK_PACK_ALIGN;
        }
        list[i] = (struct lk_tensor){ (void *)(uintptr_t)at, count, offset };
        at += (count + ref_next(state) % 3) * tensor_bytes(op);
        offset += count + ref_next(state) % 2;
    }
    for (size_t i = n; i > 1; i--) {
        size_t j = ref_next(state) % i;
        struct lk_tensor swap = list[i - 1];

        list[i - 1] = list[j];
        list[j] = swap;
    }
    *apart_bytes = at + 16;
    *packed_elements = offset + 4;
}

static void lists_of_any_length_are_served(const struct target *t)
{
    static const size_t lengths[] = { 0,   1,   2,    8,    9,    10,   168,  169,
                                      170, 300, 1362, 1363, 1364, 2726, 2727, 3000 };
    struct lk_tensor list[3000];
    uint64_t state = 4;

    for (size_t l = 0; l < sizeof(lengths) / sizeof(*lengths); l++) {
        if (t->small && lengths[l] > 400)
            continue;
        for (enum list_op op = 0; op < LIST_OPS; op++) {
            size_t n = lengths[l], apart_bytes, packed_elements;
            struct buffer apart, packed;

            random_list(list, n, op, (op + l) % 2, &state, &apart_bytes, &packed_elements);
            apart = make_buffer(t, apart_bytes);
            packed = make_buffer(t, packed_elements * packed_bytes(op));
            for (size_t i = 0; i < n; i++)
                list[i].ptr = list[i].count ? apart.far + (uintptr_t)list[i].ptr : NULL;
            fill(&apart, op);
            fill(&packed, op);
            check_list(t, op, &apart, &packed, list, n, packed.near, packed.far);
            drop(&apart);
            drop(&packed);
        }
    }
}

#define N ((size_t)40000)
static void stochastic_bits_depend_on_the_element_alone(const struct target *t)
{
    struct buffer in = make_buffer(t, sizeof(uint32_t[N]));
    struct buffer whole = make_buffer(t, sizeof(uint16_t[N]));
    struct buffer parts = make_buffer(t, sizeof(uint16_t[N]));
    struct buffer device_offset = make_buffer(t, 8);
    struct lk_tensor one = { in.far, N, 0 }, list[200];
    struct lk_rng rng = { 7, 1000, NULL };
    struct lk_rng split = { 7, 1000 - 345, (const uint64_t *)device_offset.far };
    uint64_t state = 5;
    size_t n = 0;

    for (size_t i = 0; i < N; i++)
        ((uint32_t *)in.near)[i] = (uint32_t)(ref_next(&state) % 0x7f000000);
    *(uint64_t *)device_offset.near = 345;
    upload(&in);
    upload(&device_offset);
    for (size_t at = 0; at < N; n++) {
        size_t count = n == 199 ? N - at : ref_next(&state) % 400;

        count = count > N - at ? N - at : count;
        list[n] = (struct lk_tensor){ in.far + at * 4, count, at };
        at += count;
    }
    upload(&whole);
    upload(&parts);
    CHECK(t->lib.lk_cast_pack(&one, 1, whole.far, NULL, LK_STOCHASTIC, &rng, NULL) == 0);
    CHECK(t->lib.lk_cast_pack(list, n, parts.far, NULL, LK_STOCHASTIC, &split, NULL) == 0);
    download(&whole);
    download(&parts);
    CHECK(memcmp(whole.near, parts.near, N * 2) == 0);
    rng.seed = 8;
    CHECK(t->lib.lk_cast_pack(&one, 1, parts.far, NULL, LK_STOCHASTIC, &rng, NULL) == 0);
    download(&parts);
    CHECK(memcmp(whole.near, parts.near, N * 2) != 0);
    drop(&in);
    drop(&whole);
    drop(&parts);
    drop(&device_offset);
}
#undef N

/* How many of n values became 0x3f82 rather than 0x3f81; either sign. */
static double count_ups(const uint16_t *values, size_t n)
{
    double ups = 0;

    for (size_t i = 0; i < n; i++) {
        unsigned int up = (values[i] & 0x7fffU) - 0x3f81U;

        CHECK(up <= 1);
        ups += up;
    }
    return ups;
}

/* N draws of a value that lies at a fraction f between two bf16 numbers: the mean of the rounded values is within 5
 * standard deviations, sqrt(f (1 - f) / N) steps, of it. Nearest rounding fails this by far. */
static void stochastic_rounding_is_unbiased(const struct target *t)
{
    static const uint32_t fractions[] = { 0x0001, 0x1000, 0x4000, 0x8000, 0xc123, 0xffff };
    size_t n = t->small ? 4096 : 1 << 20;
    struct buffer in = make_buffer(t, n * 4);
    struct buffer out = make_buffer(t, n * 2);
    struct lk_tensor tensor = { in.far, n, 0 };

    for (size_t f = 0; f < sizeof(fractions) / sizeof(*fractions); f++) {
        struct lk_rng rng = { 1234, f << 32, NULL };
        double fraction = fractions[f] / 65536.0;
        double ups;

        for (size_t i = 0; i < n; i++)
            ((uint32_t *)in.near)[i] = 0x3f810000U | fractions[f] | (uint32_t)(i % 2) << 31;
        upload(&in);
        upload(&out);
        CHECK(t->lib.lk_cast_pack(&tensor, 1, out.far, NULL, LK_STOCHASTIC, &rng, NULL) == 0);
        download(&out);
        ups = count_ups((uint16_t *)out.near, n);
        CHECK(fabs(ups / (double)n - fraction) <= 5 * sqrt(fraction * (1 - fraction) / (double)n));
    }
    drop(&in);
    drop(&out);
}

struct sum_case {
    size_t n, count, stride;
    size_t shift; /* of the output, in elements */
    enum lk_type type;
    float scale;
    enum lk_rounding rounding;
    struct lk_rng rng;
};

/* The sum in the contract's order, in fp32, and how far from the exact one it may be. */
static float sum_reference(const uint16_t *shards, const struct sum_case *c, size_t i,
                           double *exact, double *bound)
{
    volatile float sum = ref_float((uint32_t)shards[i] << 16);
    double magnitudes = fabs((double)sum);

    *exact = (double)sum;
    for (size_t r = 1; r < c->n; r++) {
        float x = ref_float((uint32_t)shards[r * c->stride + i] << 16);

        sum = sum + x;
        *exact += (double)x;
        magnitudes += fabs((double)x);
    }
    sum = sum * c->scale;
    *exact *= (double)c->scale;
    *bound = (double)c->n * 0x1p-24 * magnitudes * fabs((double)c->scale) + 0x1p-149;
    return sum;
}

static void check_sum_element(const struct sum_case *c, const uint16_t *shards, size_t i,
                              uint32_t bits)
{
    bool wide = c->type == LK_FP32;
    double exact, bound;
    float sum = sum_reference(shards, c, i, &exact, &bound);

    if (isnan(sum)) {
        CHECK(bits == (wide ? 0x7fffffffU : 0x7fffU));
        return;
    }
    if (!wide && c->rounding == LK_STOCHASTIC)
        CHECK(bits == ref_stochastic(sum, 1, ref_random(c->rng.seed, c->rng.offset + i)));
    else
        CHECK(bits == (wide ? ref_bits(sum) : ref_nearest(sum, 1)));
    CHECK(isinf(sum) || !isfinite(exact) || fabs((double)sum - exact) <= bound);
}

static void check_sum(const struct target *t, const struct buffer *in, const struct buffer *out,
                      const struct sum_case *c, void *result)
{
    struct lk_scale scale = { .value = c->scale };
    size_t bytes = c->type == LK_FP32 ? 4 : 2;
    const unsigned char *near = out->near + ((unsigned char *)result - out->far);

    CHECK(t->lib.lk_sum_shards(in->far, c->n, c->stride, c->count, result, c->type,
                               c->scale == 1 ? NULL : &scale,
                               c->rounding == LK_STOCHASTIC ? &c->rng : NULL, NULL) == 0);
    download(out);
    for (size_t i = 0; i < c->count; i++)
        check_sum_element(c, (uint16_t *)in->near, i, load_bits(near + i * bytes, bytes));
}

static void sums_follow_the_reference(const struct target *t)
{
    static const size_t ranks[] = { 1, 2, 3, 4, 5, 6, 8, 9, 16, 64 };
    static const size_t counts[] = { 1, 7, 8, 255, 256, 2048, 2055, 5000 };
    struct buffer in = make_buffer(t, sizeof(uint16_t[64][5008]));
    struct buffer out = make_buffer(t, sizeof(uint32_t[5008]));
    uint64_t state = 6;

    for (size_t i = 0; i < in.bytes / 2; i++) {
        uint64_t r = ref_next(&state);

        ((uint16_t *)in.near)[i] = (uint16_t)(r % 50 ? 0x3f00 + (r >> 8) % 256 + (r >> 32 & 0x8000)
                                                     : r >> 8);
    }
    upload(&in);
    for (size_t k = 0; k < sizeof(ranks) / sizeof(*ranks); k++)
        for (size_t j = 0; j < sizeof(counts) / sizeof(*counts); j += t->small ? 3 : 1)
            for (unsigned int way = 0; way < 32; way++) {
                struct sum_case c = {
                    .n = ranks[k],
                    .count = counts[j],
                    .stride = way & 1 ? counts[j] : (counts[j] + 7) / 8 * 8,
                    .shift = way & 2 ? 1 : 0,
                    .type = way & 4 ? LK_FP32 : LK_BF16,
                    .scale = way & 8 ? 0.3F : 1,
                    .rounding = way & 16 ? LK_STOCHASTIC : LK_NEAREST,
                    .rng = {.seed = way, .offset = j % 2 ? 24 : 13},
                };

                upload(&out);
                check_sum(t, &in, &out, &c, out.far + c.shift * (c.type == LK_FP32 ? 4 : 2));
            }
    drop(&in);
    drop(&out);
}

static void a_sum_may_replace_one_of_its_shards(const struct target *t)
{
    struct sum_case c = { .n = 5, .count = 3000, .stride = 3000, .type = LK_BF16, .scale = 1 };
    struct buffer in = make_buffer(t, sizeof(uint16_t[5][3000]));
    uint64_t state = 7;

    for (size_t r = 0; r < c.n; r++) {
        uint16_t *got = malloc(in.bytes);
        double exact, bound;

        CHECK(got);
        for (size_t i = 0; i < in.bytes / 2; i++)
            ((uint16_t *)in.near)[i] = (uint16_t)(0x3f00 + ref_next(&state) % 256);
        upload(&in);
        CHECK(t->lib.lk_sum_shards(in.far, 5, 3000, 3000, in.far + r * 6000, LK_BF16, NULL, NULL,
                                   NULL) == 0);
        t->get(got, in.far, in.bytes);
        for (size_t i = 0; i < in.bytes / 2; i++)
            CHECK(got[i] == (i / 3000 == r ? ref_nearest(sum_reference((uint16_t *)in.near, &c,
                                                                       i % 3000, &exact, &bound),
                                                         1)
                                           : ((uint16_t *)in.near)[i]));
        free(got);
    }
    drop(&in);
}

/* What lk_compare says of two buffers; `work` is used from call to call. */
static struct lk_difference difference_of(const struct target *t, const struct buffer *got,
                                          const struct buffer *want, uint64_t count,
                                          enum lk_type type, const struct buffer *work)
{
    struct buffer out = make_buffer(t, sizeof(struct lk_difference));
    struct lk_difference found;

    memset(out.near, 0, out.bytes);
    upload(&out);
    upload(got);
    upload(want);
    CHECK(t->lib.lk_compare(got->far, want->far, count, type, work->far,
                            (struct lk_difference *)out.far, NULL) == 0);
    download(&out);
    memcpy(&found, out.near, sizeof(found));
    drop(&out);
    CHECK(found.done == 1);
    return found;
}

static void differences_are_measured(const struct target *t)
{
    size_t n = t->small ? 3000 : 200003;
    struct buffer got = make_buffer(t, n * 4), want = make_buffer(t, n * 4);
    struct buffer work = make_buffer(t, LK_COMPARE_BYTES);
    struct lk_difference found;
    double norm = 0;

    memset(work.near, 0, work.bytes);
    upload(&work);
    for (size_t i = 0; i < n; i++) {
        ((float *)want.near)[i] = (float)(i % 1000) - 499;
        norm += ((double)(i % 1000) - 499) * ((double)(i % 1000) - 499);
    }
    memcpy(got.near, want.near, n * 4);
    found = difference_of(t, &got, &want, n, LK_FP32, &work);
    CHECK(found.relative == 0 && found.most == 0 && found.strange == 0);
    ((float *)got.near)[n - 1] += 3; /* the last element counts, and each once */
    ((float *)got.near)[1] -= 4;
    found = difference_of(t, &got, &want, n, LK_FP32, &work);
    CHECK(fabs(found.relative - 5 / sqrt(norm)) < 1e-12 && found.most == 4);
    found = difference_of(t, &got, &want, 1, LK_FP32, &work);
    CHECK(found.relative == 0 && found.most == 0);
    ((uint32_t *)got.near)[5] = 0x7fc00000;
    ((uint32_t *)want.near)[6] = 0xff800000;
    ((uint32_t *)got.near)[7] = ((uint32_t *)want.near)[7] = 0x7f800000;
    ((uint32_t *)got.near)[8] = 0x7fc00001;
    ((uint32_t *)want.near)[8] = 0xffffffff;
    found = difference_of(t, &got, &want, n, LK_FP32, &work);
    CHECK(found.strange == 2 && found.most == 4);
    memset(want.near, 0, n * 4);
    found = difference_of(t, &got, &want, 2, LK_FP32, &work);
    CHECK(isinf(found.relative));
    *(uint16_t *)want.near = 0x3f80; /* 1.0 and 1.5 of bf16 */
    *(uint16_t *)got.near = 0x3fc0;
    CHECK(difference_of(t, &got, &want, 1, LK_BF16, &work).relative == 0.5);
    *(uint16_t *)want.near = 0x3c00; /* the same of fp16 */
    *(uint16_t *)got.near = 0x3e00;
    CHECK(difference_of(t, &got, &want, 1, LK_FP16, &work).most == 0.5);
    drop(&got);
    drop(&want);
    drop(&work);
}

/* `steps` calls on the same values, whose sum over the calls must come out. `first`: what residuals hold before. */
static void feed(const struct target *t, size_t n, size_t shift, int steps, float first,
                 enum lk_rounding rounding, double *worst_sum, double *worst_call)
{
    struct buffer in = make_buffer(t, (n + shift) * 4), kept = make_buffer(t, (n + shift) * 4);
    struct buffer out = make_buffer(t, (n + shift) * 2);
    struct lk_scale scale = { .value = 0.75F };
    struct lk_rng rng = { .seed = 9, .offset = shift };
    double *sum = calloc(n, sizeof(*sum)), *want = calloc(n, sizeof(*want));
    float *model = calloc(n, sizeof(*model));
    uint64_t state = 5;

    CHECK(sum && want && model);
    for (size_t i = 0; i < n + shift; i++)
        ((float *)kept.near)[i] = first;
    for (size_t i = 0; i < n; i++)
        model[i] = first;
    upload(&kept);
    *worst_sum = *worst_call = 0;
    for (int s = 0; s < steps; s++) {
        for (size_t i = shift; i < n + shift; i++) /* some alike all the time, some of any size */
            ((float *)in.near)[i] = i % 2 ? 1.001F + (float)(i % 100) / 64
                                          : (float)(ref_next(&state) % 4096) / 1024 - 2;
        ((float *)in.near)[shift] = -0.0F;
        upload(&in);
        upload(&out);
        CHECK(t->lib.lk_cast_feedback((float *)in.far + shift, n, (uint16_t *)out.far + shift,
                                      (float *)kept.far + shift, &scale, rounding, &rng,
                                      NULL) == 0);
        download(&out);
        download(&kept);
        for (size_t i = 0; i < n; i++) {
            uint32_t random = ref_random(rng.seed, rng.offset + i);
            uint32_t bits = feed_bf16(((float *)in.near)[i + shift], 0.75F, &model[i],
                                      rounding == LK_STOCHASTIC, random);

            CHECK(bits == ((uint16_t *)out.near)[i + shift]);
            CHECK(ref_bits(model[i]) == ref_bits(((float *)kept.near)[i + shift]));
        }
        rng.offset += n;
        for (size_t i = 0; i < n; i++) {
            double got = ref_float((uint32_t)((uint16_t *)out.near)[i + shift] << 16);
            double value = 0.75F * ((float *)in.near)[i + shift];

            sum[i] += got;
            want[i] += value;
            CHECK(isfinite(got) && (value != 0 || (got == 0 && signbit(got) == signbit(value))));
            if (value != 0 && fabs(got - value) / fabs(value) > *worst_call)
                *worst_call = fabs(got - value) / fabs(value);
        }
    }
    download(&kept);
    for (size_t i = 0; i < n; i++) {
        CHECK((i + shift) % 2 == 0 || first != 0 ||
              fabs(sum[i] + ((float *)kept.near)[i + shift] - want[i]) < 2e-3);
        *worst_sum = fmax(*worst_sum, fabs(sum[i] - want[i]));
    }
    free(sum);
    free(want);
    free(model);
    drop(&in);
    drop(&kept);
    drop(&out);
}

static void what_rounding_loses_is_sent_later(const struct target *t)
{
    int steps = t->small ? 20 : 200;
    double sum, call;

    for (size_t shift = 0; shift < 4; shift++) {
        feed(t, 1031, shift, steps, 0, LK_NEAREST, &sum, &call);
        CHECK(sum < 0.02);            /* one rounding, not `steps` of them, which is 0.2 and more */
        CHECK(call <= 2.02 * 0x1p-8); /* and no call is much worse for it */
        feed(t, 1031, shift, steps, 0, LK_STOCHASTIC, &sum, &call);
        CHECK(sum < 0.06); /* these may owe several roundings */
        CHECK(call <= 3.03 * 0x1p-8);
    }
}

/* Of a buffer that has another's place, say. */
static void residuals_of_anything_do_no_harm(const struct target *t)
{
    static const float firsts[] = { 1e30F, -3.0F, 0.25F, 0x1p-130F };
    double sum, call;

    for (size_t i = 0; i < sizeof(firsts) / sizeof(*firsts); i++) {
        feed(t, 1031, 0, 30, firsts[i], LK_NEAREST, &sum, &call);
        CHECK(call <= 2.02 * 0x1p-8 && sum < 0.3);
    }
    feed(t, 1031, 0, 30, ref_float(0x7fc00000), LK_NEAREST, &sum, &call);
    CHECK(call <= 2.02 * 0x1p-8 && sum < 0.02);
    feed(t, 1031, 0, 30, ref_float(0xff800000), LK_NEAREST, &sum, &call);
    CHECK(call <= 2.02 * 0x1p-8 && sum < 0.3);
}

static void a_count_runs_on(const struct target *t)
{
    struct buffer word = make_buffer(t, 8);

    *(uint64_t *)word.near = UINT64_MAX - 1;
    upload(&word);
    for (int i = 0; i < 3; i++)
        CHECK(t->lib.lk_count_up((uint64_t *)word.far, UINT64_C(1) << 40, NULL) == 0);
    download(&word);
    CHECK(*(uint64_t *)word.near == (UINT64_C(3) << 40) - 2);
    drop(&word);
}

#define REFUSED(call) CHECK((call) == -EINVAL)

static void bad_sums_and_feedback_are_refused(const struct target *t)
{
    struct buffer apart = make_buffer(t, 4096);
    struct buffer packed = make_buffer(t, 4096);
    struct lk_rng odd = { .device_offset = (const uint64_t *)(apart.far + 4) };

    REFUSED(t->lib.lk_sum_shards(packed.far, 2, 10, 10, apart.far, LK_BF16, NULL, &odd, NULL));
    REFUSED(t->lib.lk_sum_shards(packed.far, 0, 10, 10, apart.far, LK_BF16, NULL, NULL, NULL));
    REFUSED(t->lib.lk_sum_shards(packed.far, 2, 9, 10, apart.far, LK_BF16, NULL, NULL, NULL));
    REFUSED(t->lib.lk_sum_shards(packed.far, 2, 10, 10, packed.far + 2, LK_BF16, NULL, NULL, NULL));
    REFUSED(t->lib.lk_sum_shards(packed.far, 2, 10, 10, packed.far, LK_FP32, NULL, NULL, NULL));
    REFUSED(t->lib.lk_sum_shards(packed.far, 2, 10, 10, apart.far, LK_FP16, NULL, NULL, NULL));
    REFUSED(t->lib.lk_sum_shards(packed.far, 3, UINT64_MAX / 2, 10, apart.far, LK_BF16, NULL, NULL,
                                 NULL));
    CHECK(t->lib.lk_cast_feedback((float *)apart.far, 10, packed.far, (float *)apart.far, NULL,
                                  LK_NEAREST, NULL, NULL) == -EINVAL);
    CHECK(t->lib.lk_cast_feedback((float *)apart.far, 10, packed.far, (float *)(packed.far + 16),
                                  NULL, LK_NEAREST, NULL, NULL) == -EINVAL);
    CHECK(t->lib.lk_cast_feedback((float *)(apart.far + 2), 10, packed.far,
                                  (float *)(packed.far + 64), NULL, LK_NEAREST, NULL,
                                  NULL) == -EINVAL);
    CHECK(t->lib.lk_cast_feedback((float *)apart.far, 10, packed.far, (float *)(packed.far + 64),
                                  NULL, LK_STOCHASTIC, NULL, NULL) == -EINVAL);
    CHECK(t->lib.lk_count_up((uint64_t *)(apart.far + 4), 1, NULL) == -EINVAL);
    CHECK(t->lib.lk_count_up(NULL, 1, NULL) == -EINVAL);
    drop(&apart);
    drop(&packed);
}

static void bad_arguments_are_refused(const struct target *t)
{
    struct buffer apart = make_buffer(t, 4096);
    struct buffer packed = make_buffer(t, 4096);
    struct lk_tensor good = { apart.far, 100, 0 };
    struct lk_tensor odd = { apart.far + 2, 10, 0 };
    struct lk_tensor inside = { packed.far + 128, 10, 0 };
    struct lk_tensor huge = { apart.far, 10, UINT64_MAX - 5 };
    struct lk_tensor null = { NULL, 10, 0 };
    struct lk_tensor both[2] = { good, inside };
    struct lk_scale scale = { 1, (enum lk_type)9, apart.far };
    struct lk_rng rng = { 0 };

    REFUSED(t->lib.lk_cast_pack(&odd, 1, packed.far, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&good, 1, packed.far + 1, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&huge, 1, packed.far, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&null, 1, packed.far, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(NULL, 1, packed.far, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&good, 1, NULL, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(both, 2, packed.far, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&good, 1, apart.far, NULL, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&good, 1, packed.far, &scale, LK_NEAREST, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&good, 1, packed.far, NULL, LK_STOCHASTIC, NULL, NULL));
    REFUSED(t->lib.lk_cast_pack(&good, 1, packed.far, NULL, (enum lk_rounding)2, &rng, NULL));
    REFUSED(t->lib.lk_cast_unpack(both, 2, packed.far, NULL));
    REFUSED(t->lib.lk_unpack(&good, 1, packed.far + 2, LK_FP32, NULL));
    REFUSED(t->lib.lk_pack(&good, 1, packed.far, (enum lk_type)3, NULL));
    CHECK(t->lib.lk_cast_pack(NULL, 0, NULL, NULL, LK_NEAREST, NULL, NULL) == 0);
    CHECK(t->lib.lk_compare(apart.far, packed.far, 1, (enum lk_type)3, apart.far, (void *)apart.far,
                            NULL) == -EINVAL);
    CHECK(t->lib.lk_compare(apart.far, packed.far + 2, 1, LK_FP32, apart.far, (void *)apart.far,
                            NULL) == -EINVAL);
    CHECK(t->lib.lk_sum_shards(packed.far, 2, 0, 0, apart.far, LK_BF16, NULL, NULL, NULL) == 0);
    CHECK(t->lib.lk_error_text(-EINVAL)[0] && t->lib.lk_error_text(0)[0]);
    drop(&apart);
    drop(&packed);
}

void check_behaviours(const struct target *t)
{
    every_bf16_pattern_is_widened_exactly(t);
    rounding_follows_the_reference(t);
    device_scalars_of_each_type_scale(t);
    every_alignment_and_count_is_served(t);
    lists_of_any_length_are_served(t);
    stochastic_bits_depend_on_the_element_alone(t);
    stochastic_rounding_is_unbiased(t);
    sums_follow_the_reference(t);
    a_sum_may_replace_one_of_its_shards(t);
    differences_are_measured(t);
    what_rounding_loses_is_sent_later(t);
    residuals_of_anything_do_no_harm(t);
    a_count_runs_on(t);
    bad_sums_and_feedback_are_refused(t);
    bad_arguments_are_refused(t);
}
