/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/attention_internal.h"

LK_API int lk_compute_load_all(void)
{
    static int (*const loads[])(void) = { lk_load_adamw,   lk_load_swiglu,   lk_load_norm,
                                          lk_load_moe,     lk_load_gemm,     lk_load_fold,
                                          lk_load_augment, lk_load_attention };
    int result = lk_load_all();

    for (size_t i = 0; !result && i < sizeof(loads) / sizeof(*loads); i++)
        result = loads[i]();
    return result;
}
