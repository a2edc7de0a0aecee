/* SPDX-License-Identifier: Apache-2.0
 *
 * The processor has no vendor's library: everything is left to the kernel of our own.
 */
#include "kernels/blocks_internal.h"

int lk_vendor_open(const char *library, struct lk_vendor **out)
{
    *out = NULL;
    return 0;
}

void lk_vendor_close(struct lk_vendor *vendor)
{
}

int lk_vendor_gemm(struct lk_vendor *vendor, const struct lk_gemm *gemm, void *stream, int *planned)
{
    return LK_VENDOR_NONE;
}

int lk_vendor_tune(struct lk_vendor *vendor, const struct lk_gemm *gemm, struct lk_gemm_tuned *out,
                   void *stream)
{
    return LK_VENDOR_NONE;
}
