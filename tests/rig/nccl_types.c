/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/nccl_internal.h"

#include <math.h>
#include <string.h>

static const struct {
    size_t size;
    bool is_float;
    const char *name;
} types[ncclNumTypes] = {
    [ncclInt8] = {1,  false, "int8"    },
      [ncclUint8] = { 1, false, "uint8"   },
    [ncclInt32] = { 4, false, "int32"   },
      [ncclUint32] = { 4, false, "uint32"  },
    [ncclInt64] = { 8, false, "int64"   },
      [ncclUint64] = { 8, false, "uint64"  },
    [ncclFloat16] = { 2, true,  "float16" },
      [ncclFloat32] = { 4, true,  "float32" },
    [ncclFloat64] = { 8, true,  "float64" },
      [ncclBfloat16] = { 2, true,  "bfloat16"},
    [ncclFloat8e4m3] = { 1, true,  "fp8e4m3" },
      [ncclFloat8e5m2] = { 1, true,  "fp8e5m2" },
};

size_t rig_type_size(ncclDataType_t type)
{
    return (unsigned)type < ncclNumTypes ? types[type].size : 0;
}

const char *rig_type_name(int type)
{
    return (unsigned)type < ncclNumTypes ? types[type].name : "unknown type";
}

bool rig_type_is_float(ncclDataType_t type)
{
    return types[type].is_float;
}

static uint32_t float_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float bits_float(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

float rig_bf16_decode(uint16_t bits)
{
    return bits_float((uint32_t)bits << 16);
}

uint16_t rig_bf16_encode(float value)
{
    uint32_t bits = float_bits(value);

    if (isnan(value))
        return 0x7fff;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float rig_f16_decode(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t exponent = (bits >> 10) & 31;
    uint32_t mantissa = bits & 1023;

    if (exponent == 31)
        return bits_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) {
        float value = (float)mantissa * 0x1p-24f;

        return sign ? -value : value;
    }
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t rig_f16_encode(float value)
{
    uint32_t bits = float_bits(value);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    uint32_t magnitude = bits & 0x7fffffff;

    if (magnitude > 0x7f800000)
        return 0x7fff;
    if (magnitude >= 0x477ff000) /* rounds to 65536 or more */
        return sign | 0x7c00;
    if (magnitude < 0x38800000) /* subnormal: the adder rounds for us, to multiples of 2^-24 */
        return sign | (uint16_t)(float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f));
    magnitude += 0xfff + ((magnitude >> 13) & 1);
    return sign | (uint16_t)((magnitude - (112u << 23)) >> 13);
}

/* The vendor's conversions saturate: what is too large, infinity included, becomes the largest number. */
static uint8_t fp8_encode(float value, int mantissa_bits, int bias, uint8_t largest)
{
    uint8_t sign = signbit(value) ? 0x80 : 0;
    float magnitude = fabsf(value);
    int exponent, scaled;

    if (isnan(value))
        return 0x7f;
    if (isinf(value))
        return sign | largest;
    if (magnitude == 0)
        return sign;
    exponent = ilogbf(magnitude);
    if (exponent < 1 - bias)
        exponent = 1 - bias;
    if (exponent > 16)
        return sign | largest;
    scaled = (int)rintf(ldexpf(magnitude, mantissa_bits - exponent));
    /* Adding carries into the exponent field by itself; so do subnormals that round up to a normal number. */
    scaled += (exponent + bias - 1) << mantissa_bits;
    return sign | (scaled > largest ? largest : (uint8_t)scaled);
}

static float fp8_decode(uint8_t bits, int mantissa_bits, int bias)
{
    int exponent = (bits & 0x7f) >> mantissa_bits;
    int mantissa = bits & ((1 << mantissa_bits) - 1);
    float value;

    if (exponent == 0)
        value = ldexpf((float)mantissa, 1 - bias - mantissa_bits);
    else
        value = ldexpf((float)(mantissa | 1 << mantissa_bits), exponent - bias - mantissa_bits);
    return bits & 0x80 ? -value : value;
}

float rig_e4m3_decode(uint8_t bits)
{
    if ((bits & 0x7f) == 0x7f)
        return NAN;
    return fp8_decode(bits, 3, 7);
}

uint8_t rig_e4m3_encode(float value)
{
    return fp8_encode(value, 3, 7, 0x7e);
}

float rig_e5m2_decode(uint8_t bits)
{
    if ((bits & 0x7f) > 0x7c)
        return NAN;
    if ((bits & 0x7f) == 0x7c)
        return bits & 0x80 ? -INFINITY : INFINITY;
    return fp8_decode(bits, 2, 15);
}

uint8_t rig_e5m2_encode(float value)
{
    return fp8_encode(value, 2, 15, 0x7b);
}
