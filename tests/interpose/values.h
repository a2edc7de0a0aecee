/* SPDX-License-Identifier: Apache-2.0
 *
 * What ranks of tests add up, and how results are told apart. */
#ifndef LC_TESTS_VALUES_H
#define LC_TESTS_VALUES_H

#include <stddef.h>
#include <stdint.h>

/* From -0.5 to 0.5, another one for each rank, call and element. */
static inline float value(int rank, int call, size_t i)
{
    uint64_t x = (uint64_t)(rank + 1) * 0x9e3779b97f4a7c15u +
                 (uint64_t)(call + 1) * 0xbf58476d1ce4e5b9u + i;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (float)((double)(x >> 40) / (1 << 24) - 0.5);
}

static inline uint64_t hash_of(const void *data, size_t bytes)
{
    const unsigned char *p = data;
    uint64_t hash = 0xcbf29ce484222325u;

    while (bytes--)
        hash = (hash ^ *p++) * 0x100000001b3u;
    return hash;
}

#endif
