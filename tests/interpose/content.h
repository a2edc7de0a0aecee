/* SPDX-License-Identifier: Apache-2.0
 *
 * What messages hold in tests: whatever an exchange might take for something else. */
#ifndef LC_TESTS_CONTENT_H
#define LC_TESTS_CONTENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t content_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Eight bytes of a message: many stretches of a few hundred bytes are zero, others hold minus zeros, NaNs with payloads,
 * denormals, or one bit. */
static inline uint64_t content_word(uint64_t seed, size_t i)
{
    static const uint64_t special[] = { 0x8000000080000000u, 0x7fc12345ffc00001u, 1,
                                        0x0000000100800000u, 0x80007fff7fffff80u, 1ull << 63 };
    uint64_t stretch = content_mix(seed * 77 + i / 53);
    uint64_t x = content_mix(seed + i * 0x9e3779b97f4a7c15u);

    if (stretch % 2 == 0)
        return i % 53 == 52 && stretch % 6 == 0 ? special[stretch / 6 % 6] : 0;
    return x % 5 ? x : special[x / 5 % 6];
}

static inline void content_fill(void *to, size_t bytes, uint64_t seed)
{
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = content_word(seed, at / 8);

        memcpy((char *)to + at, &word, bytes - at < 8 ? bytes - at : 8);
    }
}

static inline bool content_is(const void *got, size_t bytes, uint64_t seed)
{
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = content_word(seed, at / 8);

        if (memcmp((const char *)got + at, &word, bytes - at < 8 ? bytes - at : 8) != 0)
            return false;
    }
    return true;
}

#endif
