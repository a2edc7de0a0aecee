/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels library uses of cuBLAS, on this processor. A stream takes the workspace away, as it does there; without one,
 * with arguments that are wrong, or while partial sums may be rounded, products fail. Groups with a product of 48 columns are not supported.
 */
#include "kernels/value_internal.h"

#include <cublas_v2.h>
#include <stdbool.h>
#include <stdlib.h>

int fake_cublas_live; /* handles that exist */
int fake_cublas_calls;

/* Of the tests' only thread. */
static bool has_workspace, is_exact;

cublasStatus_t cublasCreate_v2(cublasHandle_t *out)
{
    *out = malloc(1);
    fake_cublas_live++;
    return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle)
{
    free(handle);
    fake_cublas_live--;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    has_workspace = false;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes)
{
    has_workspace = workspace && (uintptr_t)workspace % 256 == 0 && bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
    is_exact = (mode & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION) != 0;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusString(cublasStatus_t status)
{
    return "text of cuBLAS";
}

static float read_one(const void *base, cudaDataType type, int64_t at)
{
    uint16_t bits = ((const uint16_t *)base)[at];

    return type == CUDA_R_16BF ? widen_bf16(bits) : widen_fp16(bits);
}

static void write_one(void *base, cudaDataType type, int64_t at, float x)
{
    ((uint16_t *)base)[at] = (uint16_t)(type == CUDA_R_16BF ? narrow_bf16(x, 1, 0, 0)
                                                            : narrow_fp16(x));
}

struct one {
    bool a_turned, b_turned;
    int m, n, k, lda, ldb, ldc;
    float alpha, beta;
    const void *a, *b;
    void *c;
};

static bool is_right(const struct one *o)
{
    return o->a && o->b && o->c &&
           ((uintptr_t)o->a | (uintptr_t)o->b | (uintptr_t)o->c) % 16 == 0 && o->m > 0 &&
           o->n > 0 && o->k > 0 && o->lda >= (o->a_turned ? o->k : o->m) &&
           o->ldb >= (o->b_turned ? o->n : o->k) && o->ldc >= o->m;
}

static void run_one(const struct one *o, cudaDataType type)
{
    for (int64_t j = 0; j < o->n; j++)
        for (int64_t i = 0; i < o->m; i++) {
            float sum = 0;

            for (int64_t k = 0; k < o->k; k++)
                sum += read_one(o->a, type, o->a_turned ? i * o->lda + k : k * o->lda + i) *
                       read_one(o->b, type, o->b_turned ? k * o->ldb + j : j * o->ldb + k);
            sum *= o->alpha;
            if (o->beta != 0)
                sum += o->beta * read_one(o->c, type, j * o->ldc + i);
            write_one(o->c, type, j * o->ldc + i, sum);
        }
}

/* NOLINTNEXTLINE(readability-function-size): it has that many parameters */
cublasStatus_t cublasGemmGroupedBatchedEx(
    cublasHandle_t handle, const cublasOperation_t transa[], const cublasOperation_t transb[],
    const int m[], const int n[], const int k[], const void *alpha, const void *const a[],
    cudaDataType_t a_type, const int lda[], const void *const b[], cudaDataType_t b_type,
    const int ldb[], const void *beta, void *const c[], cudaDataType_t c_type, const int ldc[],
    int groups, const int sizes[], cublasComputeType_t compute)
{
    if (!has_workspace || !is_exact || a_type != b_type || a_type != c_type ||
        compute != CUBLAS_COMPUTE_32F)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (int g = 0; g < groups; g++)
        if (m[g] == 48)
            return CUBLAS_STATUS_NOT_SUPPORTED;
    fake_cublas_calls++;
    for (int g = 0; g < groups; g++) {
        struct one o = { transa[g] == CUBLAS_OP_T,
                         transb[g] == CUBLAS_OP_T,
                         m[g],
                         n[g],
                         k[g],
                         lda[g],
                         ldb[g],
                         ldc[g],
                         ((const float *)alpha)[g],
                         ((const float *)beta)[g],
                         a[g],
                         b[g],
                         c[g] };

        if (sizes[g] != 1 || !is_right(&o))
            return CUBLAS_STATUS_INVALID_VALUE;
        run_one(&o, a_type);
    }
    return CUBLAS_STATUS_SUCCESS;
}
