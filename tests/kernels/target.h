/* SPDX-License-Identifier: Apache-2.0
 *
 * One kernels library under test, with the memory it works on, so that the same behaviours are checked on the
 * processor and on a device.
 */
#ifndef LC_TESTS_KERNELS_TARGET_H
#define LC_TESTS_KERNELS_TARGET_H

#include "kernels/rings.h"

#include <stdbool.h>
#include <stddef.h>

struct lk_lib {
#define LK_SYM(name) __typeof__(name) *name;
#include "kernels/api.def"
#undef LK_SYM
};

struct target {
    struct lk_lib lib;
    void *handle;                 /* of dlopen */
    bool small;                   /* fewer cases, for runs under a checker */
    void *(*alloc)(size_t bytes); /* aligned to 256 bytes */
    void (*release)(void *ptr);
    void (*put)(void *dst, const void *src, size_t bytes); /* to the target's memory, waits */
    void (*get)(void *dst, const void *src, size_t bytes); /* waits for earlier calls too */
};

void open_library(struct target *target, const char *path);

/* All behaviours of loongkernels.h, against the reference. */
void check_behaviours(const struct target *target);

#endif
