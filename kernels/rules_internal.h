/* SPDX-License-Identifier: Apache-2.0
 *
 * What arguments have to be like, and what is said where they are not.
 */
#ifndef LK_RULES_INTERNAL_H
#define LK_RULES_INTERNAL_H

#include "kernels/blocks_internal.h"

#include <errno.h>

/* Whether a rule is broken; then lk_compute_error() says so. */
static inline bool lk_breaks(const char *call, bool holds, const char *otherwise)
{
    if (holds)
        return false;
    lk_blas_fail(-EINVAL, "%s: %s", call, otherwise);
    return true;
}

/* wide: whether a call's rows are moved by wide accesses. For lk_compute_counts(). */
void lk_count_call(bool wide);

static inline bool lk_is_aligned(const void *pointer, unsigned int bytes)
{
    return (uintptr_t)pointer % bytes == 0;
}

#endif
