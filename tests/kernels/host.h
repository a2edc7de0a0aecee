/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of this process for tests of kernels, as device.h has it of a device.
 */
#ifndef LC_TESTS_KERNELS_HOST_H
#define LC_TESTS_KERNELS_HOST_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static inline void *host_alloc(size_t bytes)
{
    return aligned_alloc(256, (bytes + 255) / 256 * 256);
}

static inline void host_copy(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

#endif
