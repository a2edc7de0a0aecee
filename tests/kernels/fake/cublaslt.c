/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels library uses of cuBLASLt, on this processor: matrices by columns as the
 * library has them, every argument checked against what its description said. There are three methods, of which the second
 * one is said to be the fastest; products whose columns are 5 have none, nor have batches whose columns are 24. What c is
 * added to is rounded before, as some of the library's methods do it.
 */
#include "kernels/value_internal.h"
#include "tests/kernels/fake/streams.h"

#include <cublasLt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define METHODS 3

struct layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld;
    int64_t apart;
    int32_t count;
    uint32_t mode; /* of a batch */
};

struct product {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    cublasOperation_t transposed[2];
    cublasLtEpilogue_t epilogue;
    const void *bias;
    cudaDataType_t bias_type;
    int32_t sms;
};

struct wishes {
    uint64_t workspace;
    uint32_t reductions;
    uint32_t alignments[4]; /* of A, B, C, D */
};

/* What is kept of the wishes in a method. */
struct method {
    uint32_t number;
    uint32_t alignments[4];
    uint64_t workspace;
    uint64_t descriptions; /* a number that depends on everything that was described */
};

_Static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "it has to fit");
_Static_assert(sizeof(struct product) <= sizeof(cublasLtMatmulDescOpaque_t), "it has to fit");
_Static_assert(sizeof(struct wishes) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "it has to fit");
_Static_assert(sizeof(struct method) <= sizeof(cublasLtMatmulAlgo_t), "it has to fit");

/* For tests, by name. */
int fake_version = CUBLAS_VERSION;

/* ---- descriptions ---- */

size_t cublasLtGetVersion(void)
{
    return (size_t)fake_version;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    return "name of a status";
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return "text of a status";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out)
{
    *out = malloc(1);
    return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t out, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld)
{
    const struct layout layout = { type, rows, cols, ld, 0, 1, CUBLASLT_BATCH_MODE_STRIDED };

    if (size != sizeof(*out))
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(out, &layout, sizeof(layout));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes)
{
    if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && bytes == 4)
        memcpy((char *)layout + offsetof(struct layout, count), value, bytes);
    else if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && bytes == 8)
        memcpy((char *)layout + offsetof(struct layout, apart), value, bytes);
    else if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_MODE && bytes == 4 &&
             fake_version == CUBLAS_VERSION)
        memcpy((char *)layout + offsetof(struct layout, mode), value, bytes);
    else
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t out, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale)
{
    const struct product product = { .compute = compute,
                                     .scale = scale,
                                     .epilogue = CUBLASLT_EPILOGUE_DEFAULT };

    if (size != sizeof(*out))
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(out, &product, sizeof(product));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    static const struct {
        cublasLtMatmulDescAttributes_t attribute;
        size_t at, bytes;
    } known[] = {
        {CUBLASLT_MATMUL_DESC_TRANSA,           offsetof(struct product, transposed),    4},
        { CUBLASLT_MATMUL_DESC_TRANSB,          offsetof(struct product, transposed[1]), 4},
        { CUBLASLT_MATMUL_DESC_EPILOGUE,        offsetof(struct product, epilogue),      4},
        { CUBLASLT_MATMUL_DESC_BIAS_POINTER,    offsetof(struct product, bias),          8},
        { CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,  offsetof(struct product, bias_type),     4},
        { CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, offsetof(struct product, sms),           4},
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        if (known[i].attribute == attribute && known[i].bytes == bytes) {
            memcpy((char *)desc + known[i].at, value, bytes);
            return CUBLAS_STATUS_SUCCESS;
        }
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t out, size_t size)
{
    const struct wishes wishes = {
        0,
        CUBLASLT_REDUCTION_SCHEME_MASK,
        {256, 256, 256, 256}
    };

    if (size != sizeof(*out))
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(out, &wishes, sizeof(wishes));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes)
{
    static const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        size_t at, bytes;
    } known[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,    offsetof(struct wishes, workspace),     8},
        { CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, offsetof(struct wishes, reductions),    4},
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, offsetof(struct wishes, alignments[0]), 4},
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, offsetof(struct wishes, alignments[1]), 4},
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, offsetof(struct wishes, alignments[2]), 4},
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, offsetof(struct wishes, alignments[3]), 4},
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        if (known[i].attribute == attribute && known[i].bytes == bytes) {
            memcpy((char *)pref + known[i].at, value, bytes);
            return CUBLAS_STATUS_SUCCESS;
        }
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

/* ---- products ---- */

/* A call's descriptions, taken out of what is opaque. */
struct call {
    struct product product;
    struct layout layouts[4]; /* of A, B, C, D */
};

static struct call read_call(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                             cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                             cublasLtMatrixLayout_t d)
{
    const cublasLtMatrixLayout_t layouts[4] = { a, b, c, d };
    struct call out;

    memcpy(&out.product, desc, sizeof(out.product));
    for (int i = 0; i < 4; i++)
        memcpy(&out.layouts[i], layouts[i], sizeof(out.layouts[i]));
    return out;
}

static uint64_t depth_of(const struct call *call)
{
    return call->product.transposed[0] == CUBLAS_OP_T ? call->layouts[0].rows
                                                      : call->layouts[0].columns;
}

static bool fits(const struct call *call)
{
    const struct layout *l = call->layouts;
    bool at = call->product.transposed[0] == CUBLAS_OP_T;
    bool bt = call->product.transposed[1] == CUBLAS_OP_T;

    for (int i = 0; i < 4; i++)
        if (l[i].ld < (int64_t)l[i].rows || l[i].count != l[0].count || l[i].count < 1 ||
            l[i].mode != l[0].mode)
            return false;
    return call->product.compute == CUBLAS_COMPUTE_32F && call->product.scale == CUDA_R_32F &&
           l[0].type == l[1].type && l[2].type == l[3].type &&
           (at ? l[0].columns : l[0].rows) == l[3].rows &&
           (bt ? l[1].rows : l[1].columns) == l[3].columns &&
           (bt ? l[1].columns : l[1].rows) == depth_of(call) && l[2].rows == l[3].rows &&
           l[2].columns == l[3].columns;
}

static uint64_t fingerprint(const struct call *call)
{
    uint64_t out = call->product.transposed[0] * 3U + call->product.transposed[1] * 7U +
                   (uint64_t)call->product.epilogue * 1000 + (uint64_t)call->product.sms * 77777;

    for (int i = 0; i < 4; i++) {
        const struct layout *l = &call->layouts[i];

        out = (out * 1000003 + l->rows) * 1000003 + l->columns;
        out = (out * 1000003 + (uint64_t)l->ld) * 1000003 + l->type;
        out = (out * 1000003 + (uint64_t)l->apart) * 1000003 + (uint64_t)l->count + l->mode;
    }
    return out;
}

/* NOLINTNEXTLINE(readability-function-size): the vendor's parameters */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *returned)
{
    struct call call = read_call(desc, a, b, c, d);
    struct wishes wishes;

    memcpy(&wishes, preference, sizeof(wishes));
    if (!fits(&call) || wishes.reductions != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (call.layouts[3].rows == 5 || (call.layouts[3].rows == 24 && call.layouts[3].count > 1))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    *returned = most < METHODS ? most : METHODS;
    memset(results, 0, (size_t)*returned * sizeof(*results));
    for (int i = 0; i < *returned; i++) {
        struct method method = { .number = (uint32_t)i,
                                 .workspace = wishes.workspace,
                                 .descriptions = fingerprint(&call) };

        memcpy(method.alignments, wishes.alignments, sizeof(method.alignments));
        memcpy(&results[i].algo, &method, sizeof(method));
        results[i].workspaceSize = wishes.workspace;
    }
    return CUBLAS_STATUS_SUCCESS;
}

static float widen(cudaDataType type, uint16_t bits)
{
    return type == CUDA_R_16BF ? widen_bf16(bits) : widen_fp16(bits);
}

static uint16_t narrow(cudaDataType type, float value)
{
    return (uint16_t)(type == CUDA_R_16BF ? narrow_bf16(value, 1, 0, 0) : narrow_fp16(value));
}

static float get(const void *base, const struct layout *layout, uint64_t row, uint64_t column)
{
    uint64_t at = row + column * (uint64_t)layout->ld;

    if (layout->type == CUDA_R_32F)
        return ((const float *)base)[at];
    return widen(layout->type, ((const uint16_t *)base)[at]);
}

static void put(void *base, const struct layout *layout, uint64_t row, uint64_t column, float value)
{
    uint64_t at = row + column * (uint64_t)layout->ld;

    if (layout->type == CUDA_R_32F)
        ((float *)base)[at] = value;
    else
        ((uint16_t *)base)[at] = narrow(layout->type, value);
}

/* The sum for one element of d. */
static float dot(const struct call *call, const void *a, const void *b, uint64_t row,
                 uint64_t column)
{
    bool at = call->product.transposed[0] == CUBLAS_OP_T;
    bool bt = call->product.transposed[1] == CUBLAS_OP_T;
    float sum = 0;

    for (uint64_t k = 0; k < depth_of(call); k++)
        sum += get(a, &call->layouts[0], at ? k : row, at ? row : k) *
               get(b, &call->layouts[1], bt ? column : k, bt ? k : column);
    return sum;
}

/* One of a batch. pointers: to a, b, c, d. */
static void multiply_one(const struct call *call, float alpha, float beta,
                         const void *const pointers[3], void *d)
{
    const struct layout bias = { .type = call->product.bias_type, .ld = 1 },
                        *to = &call->layouts[3];

    for (uint64_t column = 0; column < to->columns; column++) {
        for (uint64_t row = 0; row < to->rows; row++) {
            float sum = alpha * dot(call, pointers[0], pointers[1], row, column);

            if (call->product.epilogue == CUBLASLT_EPILOGUE_BIAS)
                sum += get(call->product.bias, &bias, row, 0);
            if (beta != 0 && to->type != CUDA_R_32F)
                sum = widen(to->type, narrow(to->type, sum));
            if (beta != 0)
                sum += beta * get(pointers[2], &call->layouts[2], row, column);
            put(d, to, row, column, sum);
        }
    }
}

static const void *of_batch(const void *base, const struct layout *layout, int32_t i)
{
    if (layout->mode == CUBLASLT_BATCH_MODE_POINTER_ARRAY)
        return ((const void *const *)base)[i];
    return (const char *)base + i * layout->apart * (layout->type == CUDA_R_32F ? 4 : 2);
}

/* NOLINTNEXTLINE(readability-function-size): the vendor's parameters */
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_desc, const void *b,
                              cublasLtMatrixLayout_t b_desc, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_desc, void *d, cublasLtMatrixLayout_t d_desc,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    struct call call = read_call(desc, a_desc, b_desc, c_desc, d_desc);
    const void *pointers[4] = { a, b, c, d };
    struct method method;

    memcpy(&method, algo, sizeof(method));
    if (!fits(&call) || method.workspace != workspace_bytes ||
        method.descriptions != fingerprint(&call) ||
        (workspace_bytes && (uintptr_t)workspace % 256))
        return CUBLAS_STATUS_INVALID_VALUE;
    for (int i = 0; i < 4; i++)
        for (int32_t j = 0; j < call.layouts[i].count; j++) {
            const void *at = of_batch(pointers[i], &call.layouts[i], j);

            if (!at || (uintptr_t)at % method.alignments[i])
                return CUBLAS_STATUS_INVALID_VALUE;
        }
    if (!fake_launch(stream, workspace, workspace_bytes))
        return CUBLAS_STATUS_INVALID_VALUE;
    fake_ms += method.number == 1 ? 0.1F : 0.2F;
    for (int32_t i = 0; i < call.layouts[3].count; i++) {
        const void *const its[3] = { of_batch(a, &call.layouts[0], i),
                                     of_batch(b, &call.layouts[1], i),
                                     of_batch(c, &call.layouts[2], i) };

        multiply_one(&call, *(const float *)alpha, *(const float *)beta, its,
                     (void *)of_batch(d, &call.layouts[3], i));
    }
    return CUBLAS_STATUS_SUCCESS;
}
