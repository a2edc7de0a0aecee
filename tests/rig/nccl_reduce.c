/* SPDX-License-Identifier: Apache-2.0
 *
 * Arithmetic of reductions. 16- and 8-bit floats are widened, combined and rounded back: with float's 24 bits of
 * mantissa that gives the same as one correctly rounded operation in the narrow type. */
#include "tests/rig/nccl_internal.h"

#include <math.h>
#include <string.h>

#define MAX_FLOAT(a, b)                      \
    (isnan(a)     ? (b)                      \
     : isnan(b)   ? (a)                      \
     : (a) == (b) ? (signbit(a) ? (b) : (a)) \
     : (a) > (b)  ? (a)                      \
                  : (b))
#define MIN_FLOAT(a, b)                      \
    (isnan(a)     ? (b)                      \
     : isnan(b)   ? (a)                      \
     : (a) == (b) ? (signbit(a) ? (a) : (b)) \
     : (a) < (b)  ? (a)                      \
                  : (b))
#define MAX_INT(a, b) ((a) > (b) ? (a) : (b))
#define MIN_INT(a, b) ((a) < (b) ? (a) : (b))

#define EACH(T, statement)               \
    for (size_t i = 0; i < count; i++) { \
        T *x = (T *)acc + i;             \
        const T *y = (const T *)in + i;  \
        statement;                       \
    }

/* Integers wrap: W is an unsigned type no narrower than int. */
#define DEFINE_INT(name, T, W)                                                         \
    static void name##_accumulate(enum rig_redop_kind kind, void *acc, const void *in, \
                                  size_t count)                                        \
    {                                                                                  \
        switch (kind) {                                                                \
        case RIG_PROD: EACH(T, *x = (T)((W)*x * (W)*y)) break;                         \
        case RIG_MAX: EACH(T, *x = MAX_INT(*x, *y)) break;                             \
        case RIG_MIN: EACH(T, *x = MIN_INT(*x, *y)) break;                             \
        default: EACH(T, *x = (T)((W)*x + (W)*y)) break;                               \
        }                                                                              \
    }                                                                                  \
    static void name##_scale(void *acc, size_t count, const void *in)                  \
    {                                                                                  \
        T factor;                                                                      \
                                                                                       \
        memcpy(&factor, in, sizeof(factor));                                           \
        for (size_t i = 0; i < count; i++)                                             \
            ((T *)acc)[i] = (T)((W)((T *)acc)[i] * (W)factor);                         \
    }                                                                                  \
    static void name##_divide(void *acc, size_t count, int by)                         \
    {                                                                                  \
        for (size_t i = 0; i < count; i++)                                             \
            ((T *)acc)[i] = (T)(((T *)acc)[i] / (T)by);                                \
    }

/* F is the type of the arithmetic; DEC and ENC convert. */
#define DEFINE_FLOAT(name, T, F, DEC, ENC)                                                    \
    static void name##_accumulate(enum rig_redop_kind kind, void *acc, const void *in,        \
                                  size_t count)                                               \
    {                                                                                         \
        switch (kind) {                                                                       \
        case RIG_PROD: EACH(T, *x = ENC(DEC(*x) * DEC(*y))) break;                            \
        case RIG_MAX: EACH(T, F a = DEC(*x); F b = DEC(*y); *x = ENC(MAX_FLOAT(a, b))) break; \
        case RIG_MIN: EACH(T, F a = DEC(*x); F b = DEC(*y); *x = ENC(MIN_FLOAT(a, b))) break; \
        default: EACH(T, *x = ENC(DEC(*x) + DEC(*y))) break;                                  \
        }                                                                                     \
    }                                                                                         \
    static void name##_scale(void *acc, size_t count, const void *in)                         \
    {                                                                                         \
        T factor;                                                                             \
                                                                                              \
        memcpy(&factor, in, sizeof(factor));                                                  \
        for (size_t i = 0; i < count; i++)                                                    \
            ((T *)acc)[i] = ENC(DEC(((T *)acc)[i]) * DEC(factor));                            \
    }

#define SAME(value) (value)

/* clang-format off */
DEFINE_INT(i8, int8_t, uint32_t)
DEFINE_INT(u8, uint8_t, uint32_t)
DEFINE_INT(i32, int32_t, uint32_t)
DEFINE_INT(u32, uint32_t, uint32_t)
DEFINE_INT(i64, int64_t, uint64_t)
DEFINE_INT(u64, uint64_t, uint64_t)
DEFINE_FLOAT(f16, uint16_t, float, rig_f16_decode, rig_f16_encode)
DEFINE_FLOAT(f32, float, float, SAME, SAME)
DEFINE_FLOAT(f64, double, double, SAME, SAME)
DEFINE_FLOAT(bf16, uint16_t, float, rig_bf16_decode, rig_bf16_encode)
DEFINE_FLOAT(e4m3, uint8_t, float, rig_e4m3_decode, rig_e4m3_encode)
DEFINE_FLOAT(e5m2, uint8_t, float, rig_e5m2_decode, rig_e5m2_encode)
/* clang-format on */

static void no_divide(void *acc, size_t count, int by)
{
}

static const struct {
    void (*accumulate)(enum rig_redop_kind kind, void *acc, const void *in, size_t count);
    void (*scale)(void *acc, size_t count, const void *factor);
    void (*divide)(void *acc, size_t count, int by);
} arithmetic[ncclNumTypes] = {
    [ncclInt8] = {i8_accumulate,    i8_scale,   i8_divide },
    [ncclUint8] = { u8_accumulate,   u8_scale,   u8_divide },
    [ncclInt32] = { i32_accumulate,  i32_scale,  i32_divide},
    [ncclUint32] = { u32_accumulate,  u32_scale,  u32_divide},
    [ncclInt64] = { i64_accumulate,  i64_scale,  i64_divide},
    [ncclUint64] = { u64_accumulate,  u64_scale,  u64_divide},
    [ncclFloat16] = { f16_accumulate,  f16_scale,  no_divide },
    [ncclFloat32] = { f32_accumulate,  f32_scale,  no_divide },
    [ncclFloat64] = { f64_accumulate,  f64_scale,  no_divide },
    [ncclBfloat16] = { bf16_accumulate, bf16_scale, no_divide },
    [ncclFloat8e4m3] = { e4m3_accumulate, e4m3_scale, no_divide },
    [ncclFloat8e5m2] = { e5m2_accumulate, e5m2_scale, no_divide },
};

void rig_accumulate(ncclDataType_t type, enum rig_redop_kind kind, void *acc, const void *in,
                    size_t count)
{
    arithmetic[type].accumulate(kind, acc, in, count);
}

/* The factor's bits are little-endian like everything here, so its low bytes are the element. */
void rig_scale(ncclDataType_t type, void *data, size_t count, uint64_t scalar)
{
    arithmetic[type].scale(data, count, &scalar);
}

void rig_divide_ints(ncclDataType_t type, void *data, size_t count, int by)
{
    arithmetic[type].divide(data, count, by);
}

uint64_t rig_reciprocal(ncclDataType_t type, int n)
{
    float narrow = (float)(1.0 / n);
    double wide = 1.0 / n;
    uint64_t bits = 0;

    switch (type) {
    case ncclFloat16: return rig_f16_encode(narrow);
    case ncclBfloat16: return rig_bf16_encode(narrow);
    case ncclFloat8e4m3: return rig_e4m3_encode(narrow);
    case ncclFloat8e5m2: return rig_e5m2_encode(narrow);
    case ncclFloat32: memcpy(&bits, &narrow, sizeof(narrow)); return bits;
    case ncclFloat64: memcpy(&bits, &wide, sizeof(wide)); return bits;
    default: return 0;
    }
}
