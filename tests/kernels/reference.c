/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/reference.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

uint32_t ref_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

float ref_float(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* The magnitude with these upper 16 bits; what would be infinity is the next power of two. */
static double magnitude(uint32_t upper)
{
    return upper == 0x7f80 ? 0x1p128 : (double)ref_float(upper << 16);
}

/* Product in fp32: exact in double, rounded once by the conversion. */
static float product(float x, float scale)
{
    volatile float rounded = (float)((double)x * (double)scale);

    return rounded;
}

static bool special(float x, float scale, float y, uint16_t *out)
{
    if (isnan(x)) {
        *out = (uint16_t)(ref_bits(x) / 65536 | 0x40);
        return true;
    }
    if (isnan(y) || isnan(scale)) {
        *out = 0x7fff;
        return true;
    }
    if (isinf(y)) {
        *out = y > 0 ? 0x7f80 : 0xff80;
        return true;
    }
    return false;
}

uint16_t ref_nearest(float x, float scale)
{
    float y = product(x, scale);
    uint32_t low = (ref_bits(y) & 0x7fffffff) / 65536;
    double below = fabs((double)y) - magnitude(low);
    double above = magnitude(low + 1) - fabs((double)y);
    uint16_t out;

    if (special(x, scale, y, &out))
        return out;
    if (above < below || (above == below && low % 2 == 1))
        low++;
    return (uint16_t)(low + (signbit(y) ? 0x8000 : 0));
}

uint16_t ref_stochastic(float x, float scale, unsigned int random)
{
    float y = product(x, scale);
    uint32_t low = (ref_bits(y) & 0x7fffffff) / 65536;
    double step = magnitude(low + 1) - magnitude(low);
    double part = (fabs((double)y) - magnitude(low)) / step; /* a multiple of 2^-16 */
    uint16_t out;

    if (special(x, scale, y, &out))
        return out;
    if (part + random / 65536.0 >= 1)
        low++;
    return (uint16_t)(low + (signbit(y) ? 0x8000 : 0));
}

void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c[4], k[2] = { key[0], key[1] };

    memcpy(c, counter, sizeof(c));
    for (int round = 0; round < 10; round++) {
        unsigned __int128 a = (unsigned __int128)c[0] * 3528531795u;
        unsigned __int128 b = (unsigned __int128)c[2] * 3449720151u;
        uint32_t next[4] = { (uint32_t)(b / 4294967296u) ^ c[1] ^ k[0], (uint32_t)(b % 4294967296u),
                             (uint32_t)(a / 4294967296u) ^ c[3] ^ k[1],
                             (uint32_t)(a % 4294967296u) };

        memcpy(c, next, sizeof(c));
        k[0] += 2654435769u;
        k[1] += 3144134277u;
    }
    memcpy(out, c, sizeof(c));
}

unsigned int ref_random(uint64_t seed, uint64_t element)
{
    uint32_t counter[4] = { (uint32_t)(element / 8), (uint32_t)(element / 8 / 4294967296u), 0, 0 };
    uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed / 4294967296u) };
    uint32_t block[4];

    ref_philox(counter, key, block);
    return element % 2 ? block[element % 8 / 2] / 65536 : block[element % 8 / 2] % 65536;
}

float ref_fp16(uint16_t half)
{
    int exponent = half / 1024 % 32;
    double fraction = half % 1024;
    double sign = half >= 0x8000 ? -1 : 1;

    if (exponent == 31)
        return half % 1024 ? NAN : (float)(sign * INFINITY);
    if (exponent == 0)
        return (float)(sign * ldexp(fraction, -24));
    return (float)(sign * ldexp(1024 + fraction, exponent - 25));
}

uint64_t ref_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
