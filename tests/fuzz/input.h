/* SPDX-License-Identifier: Apache-2.0
 *
 * What a fuzzer hands out, taken piece by piece; zeros where it has ended.
 */
#ifndef LC_TESTS_FUZZ_INPUT_H
#define LC_TESTS_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct input {
    const uint8_t *data;
    size_t size;
};

static inline uint8_t take_byte(struct input *in)
{
    if (!in->size)
        return 0;
    in->size--;
    return *in->data++;
}

static inline void take(struct input *in, void *out, size_t size)
{
    size_t n = size < in->size ? size : in->size;

    memset(out, 0, size);
    memcpy(out, in->data, n);
    in->data += n;
    in->size -= n;
}

#endif
