/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Primes: no chunk, slot or granule size of any transport is a multiple of one. */
#define NUMBERS 1021
#define BITS    4093

const struct vf_type vf_types[ncclNumTypes] = {
    [ncclInt8] = {"int8",        1, ncclInt8,       0,  0,  'i'},
    [ncclUint8] = { "uint8",      1, ncclUint8,      0,  0,  'u'},
    [ncclInt32] = { "int32",      4, ncclInt32,      0,  0,  'i'},
    [ncclUint32] = { "uint32",     4, ncclUint32,     0,  0,  'u'},
    [ncclInt64] = { "int64",      8, ncclInt64,      0,  0,  'i'},
    [ncclUint64] = { "uint64",     8, ncclUint64,     0,  0,  'u'},
    [ncclFloat16] = { "float16",    2, ncclFloat16,    5,  10, 'f'},
    [ncclFloat32] = { "float32",    4, ncclFloat32,    8,  23, 'f'},
    [ncclFloat64] = { "float64",    8, ncclFloat64,    11, 52, 'f'},
    [ncclBfloat16] = { "bfloat16",   2, ncclBfloat16,   8,  7,  'f'},
    [ncclFloat8e4m3] = { "float8e4m3", 1, ncclFloat8e4m3, 4,  3,  'f'},
    [ncclFloat8e5m2] = { "float8e5m2", 1, ncclFloat8e5m2, 5,  2,  'f'},
};

const char *const vf_redop_names[VF_REDOPS] = {
    "sum", "prod", "max", "min", "avg", "scaled sum", "scaled sum, device scalar"
};

/* Little-endian, as everywhere that CUDA runs. The value must be exact and normal, or 0. */
void vf_encode(const struct vf_type *type, double value, void *out)
{
    uint64_t bits = 0;

    if (type->kind != 'f') {
        bits = (uint64_t)(int64_t)value;
    } else if (value != 0) {
        int exponent;
        double mantissa = frexp(fabs(value), &exponent) * 2 - 1; /* 1.mantissa * 2^(exponent - 1) */
        int bias = (1 << (type->exponent_bits - 1)) - 1;

        bits = (uint64_t)ldexp(mantissa, type->mantissa_bits);
        bits |= (uint64_t)(exponent - 1 + bias) << type->mantissa_bits;
        if (value < 0)
            bits |= (uint64_t)1 << (type->size * 8 - 1);
    }
    memcpy(out, &bits, type->size);
}

double vf_scale(const struct vf_type *type)
{
    return type->kind == 'f' ? 0.5 : 3;
}

static uint32_t mix(uint32_t a, uint32_t b)
{
    uint32_t x = a * 2654435761u + b * 40503u + 0x9e3779b9u;

    x ^= x >> 15;
    x *= 2246822519u;
    return x ^ x >> 13;
}

/* Chosen so that nothing rounds or overflows in any order of addition: products stay at 64 or less, sums
 * of the narrow floats within 3 significant bits. Integer averages are of positive numbers only. */
static double input(const struct vf_type *type, enum vf_redop op, int rank, size_t i)
{
    uint32_t x = mix((uint32_t)(i % NUMBERS), (uint32_t)rank) >> 8;

    if (op == VF_PROD)
        return rank < 6 ? 1 + x % 2 : 1;
    if (type->kind == 'f' && type->size == 1)
        return (double)(x % 3) - 1;
    if (type->kind == 'u' || (type->kind == 'i' && op == VF_AVG))
        return x % 4;
    return (double)(x % 4) - 1;
}

static double result(const struct vf_type *type, enum vf_redop op, int ranks, size_t i)
{
    double all = input(type, op, 0, i);

    for (int rank = 1; rank < ranks; rank++) {
        double one = input(type, op, rank, i);

        switch (op) {
        case VF_PROD: all *= one; break;
        case VF_MAX: all = fmax(all, one); break;
        case VF_MIN: all = fmin(all, one); break;
        default: all += one; break;
        }
    }
    if (op == VF_AVG)
        return type->kind == 'f' ? all / ranks : floor(all / ranks);
    if (op == VF_SCALED_HOST || op == VF_SCALED_DEVICE)
        return all * vf_scale(type);
    return all;
}

/* out holds one period (or all there is); the rest follows by copying. */
static void repeat(unsigned char *out, size_t period, size_t bytes)
{
    for (size_t have = period; have < bytes; have *= 2)
        memcpy(out + have, out, have < bytes - have ? have : bytes - have);
}

void vf_fill_input(const struct vf_type *type, enum vf_redop op, int rank, size_t begin,
                   size_t count, void *out)
{
    unsigned char *bytes = out;

    for (size_t i = 0; i < count && i < NUMBERS; i++)
        vf_encode(type, input(type, op, rank, begin + i), bytes + i * type->size);
    repeat(bytes, NUMBERS * type->size, count * type->size);
}

void vf_fill_result(const struct vf_type *type, enum vf_redop op, int ranks, size_t begin,
                    size_t count, void *out)
{
    unsigned char *bytes = out;

    for (size_t i = 0; i < count && i < NUMBERS; i++)
        vf_encode(type, result(type, op, ranks, begin + i), bytes + i * type->size);
    repeat(bytes, NUMBERS * type->size, count * type->size);
}

void vf_fill_bits(size_t element, int source, int target, size_t count, void *out)
{
    unsigned char *bytes = out;
    uint32_t salt = (uint32_t)(source * 64 + target + 1);

    for (size_t i = 0; i < count * element && i < BITS * element; i++)
        bytes[i] = (unsigned char)(mix((uint32_t)i, salt) >> 16);
    repeat(bytes, BITS * element, count * element);
}
