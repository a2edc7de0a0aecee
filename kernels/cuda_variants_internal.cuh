/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels that are measured beside those of the library. cuda_rings_variants.cu is compiled once for each group of them,
 * with LK_GROUP, so that a machine with many processors makes them all at once.
 */
#ifndef LK_CUDA_VARIANTS_INTERNAL_CUH
#define LK_CUDA_VARIANTS_INTERNAL_CUH

#include "kernels/rings_internal.h"

#define LK_GROUPS 9 /* as many as meson.build has objects */

/* No kernel: none for that kind of call. */
struct lk_variant {
    const char *name;
    lk_ring_kernel narrowed, fp32, bf16, exchange, lines;
};

#define LK_GROUP_NAME_(n) lk_variants_of_group_##n
#define LK_GROUP_NAME(n)  LK_GROUP_NAME_(n)

/* The group's variant of that number, from 0 on; NULL: there are no more. */
#define LK_GROUP_DECLARE(n) extern "C" const lk_variant *LK_GROUP_NAME(n)(int number);

#endif
