/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the host library's compute kernels.
 */
#ifndef LK_COMPUTE_HOST_H
#define LK_COMPUTE_HOST_H

#include "kernels/compute_internal.h"
#include "kernels/host_internal.h"

/* Puts run(copy of *arg) onto the stream. */
int lk_compute_submit(void *stream, const char *name, void (*run)(void *arg), const void *arg,
                      size_t bytes);

static inline void host_use(const void *pointer, uint64_t bytes, bool write)
{
    if (bytes)
        lk_host_use((uintptr_t)pointer, bytes, write);
}

/* What may be left out. */
static inline void host_use_optional(const void *pointer, uint64_t bytes, bool write)
{
    if (pointer)
        host_use(pointer, bytes, write);
}

static inline void host_use_scale(const struct lk_scale *scale)
{
    host_use_optional(scale->device_value, scale->type == LK_FP32 ? 4 : 2, false);
}

/* As lk_norm_forward(), at once. */

#endif
