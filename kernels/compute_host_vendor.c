/* SPDX-License-Identifier: Apache-2.0
 *
 * The processor has none of the vendor's libraries: everything is left to our own kernels.
 */
#include "kernels/attention_internal.h"

int lk_vendor_open(const char *library, struct lk_vendor **out)
{
    *out = NULL;
    return 0;
}

void lk_vendor_close(struct lk_vendor *vendor)
{
}

int lk_vendor_gemm(struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   const struct lk_batch *batch, void *stream, int *planned)
{
    return LK_VENDOR_NONE;
}

int lk_vendor_tune(struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   const struct lk_batch *batch, struct lk_gemm_tuned *out, void *stream)
{
    return LK_VENDOR_NONE;
}

int lk_cublas_open(struct lk_cublas **out)
{
    *out = NULL;
    return 0;
}

void lk_cublas_close(struct lk_cublas *cublas)
{
}

int lk_cublas_run(struct lk_cublas *cublas, const struct lk_gemm *const *gemms, uint32_t n,
                  const struct lk_cublas_memory *memory, void *stream)
{
    return LK_VENDOR_NONE;
}

int lk_forks_open(struct lk_forks **out)
{
    *out = NULL;
    return 0;
}

void lk_forks_close(struct lk_forks *forks)
{
}

uint32_t lk_forks_sms(const struct lk_forks *forks)
{
    return 0;
}

int lk_forks_begin(struct lk_forks *forks, uint32_t n, void *stream)
{
    return LK_VENDOR_NONE;
}

void *lk_forks_stream(const struct lk_forks *forks, uint32_t number, void *stream)
{
    return stream;
}

int lk_forks_end(struct lk_forks *forks, uint32_t n, void *stream)
{
    return 0;
}

int lk_cudnn_open(const char *library, const char *device, struct lk_cudnn **out)
{
    *out = NULL;
    return 0;
}

void lk_cudnn_close(struct lk_cudnn *cudnn)
{
}

int lk_cudnn_plan(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key, uint64_t *workspace,
                  char why[LK_CUDNN_WHY], int *planned)
{
    return LK_VENDOR_NONE;
}

int lk_cudnn_run(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key,
                 const struct lk_cudnn_memory *memory, char why[LK_CUDNN_WHY], int *planned,
                 void *stream)
{
    return LK_VENDOR_NONE;
}
