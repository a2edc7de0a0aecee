/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups of products by cuBLAS, which is opened at run time. As in compute_vendor.c it is asked for the transposed products.
 * It wants sizes in host memory, and the addresses of the matrices in device memory.
 */
#include "kernels/blocks_internal.h"

#include <errno.h>

#if __has_include(<cublas_v2.h>)

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#define STR_(x) #x
#define STR(x)  STR_(x)
#define LIBRARY "libcublas.so." STR(CUBLAS_VER_MAJOR)

struct api {
#define LK_VENDOR(name) __typeof__(name) *name;
#include "kernels/cublas.def"
#undef LK_VENDOR
};

/* Constant after lk_cublas_open(), but the handle carries stream and workspace: `lock` is held over each call with it. */
struct lk_cublas {
    void *library;
    struct api api;
    pthread_mutex_t lock;
    cublasHandle_t handle;
};

static int find_function(const struct lk_cublas *cublas, const char *name, void **out)
{
    *out = dlsym(cublas->library, name);
    return *out ? 0 : lk_blas_fail(-ENOSYS, "lk_gemm_groups_run: cuBLAS has no %s", name);
}

static int find_functions(struct lk_cublas *cublas)
{
    int err = 0;

#define LK_VENDOR(name) \
    if (!err)           \
        err = find_function(cublas, #name, (void **)&cublas->api.name);
#include "kernels/cublas.def"
#undef LK_VENDOR
    return err;
}

static int fail_status(const struct lk_cublas *cublas, cublasStatus_t status, const char *call)
{
    return lk_blas_fail(-EIO, "%s: %s", call, cublas->api.cublasGetStatusString(status));
}

/* By default cuBLAS may add partial sums in the type of the result. */
static cublasStatus_t open_handle(struct lk_cublas *cublas)
{
    cublasStatus_t status = cublas->api.cublasCreate_v2(&cublas->handle);

    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    status = cublas->api.cublasSetMathMode(
        cublas->handle, CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    if (status != CUBLAS_STATUS_SUCCESS)
        cublas->api.cublasDestroy_v2(cublas->handle);
    return status;
}

int lk_cublas_open(struct lk_cublas **out)
{
    struct lk_cublas *cublas = calloc(1, sizeof(*cublas));
    cublasStatus_t status;
    int err;

    if (!cublas)
        return lk_blas_fail(-ENOMEM, "lk_gemm_groups_run: out of memory");
    cublas->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!cublas->library)
        cublas->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!cublas->library) {
        err = lk_blas_fail(-ENOSYS, "lk_gemm_groups_run: %s", dlerror());
        goto free_cublas;
    }
    err = find_functions(cublas);
    if (err)
        goto close_library;
    status = open_handle(cublas);
    if (status != CUBLAS_STATUS_SUCCESS) {
        err = fail_status(cublas, status, "cublasCreate");
        goto close_library;
    }
    pthread_mutex_init(&cublas->lock, NULL);
    *out = cublas;
    return 0;

close_library:
    dlclose(cublas->library);
free_cublas:
    free(cublas);
    return err;
}

void lk_cublas_close(struct lk_cublas *cublas)
{
    if (!cublas)
        return;
    cublas->api.cublasDestroy_v2(cublas->handle);
    pthread_mutex_destroy(&cublas->lock);
    dlclose(cublas->library);
    free(cublas);
}

/* What it reads on the host, one entry for each product. */
struct lists {
    cublasOperation_t its_a[LK_GEMM_GROUP], its_b[LK_GEMM_GROUP];
    int m[LK_GEMM_GROUP], n[LK_GEMM_GROUP], k[LK_GEMM_GROUP];
    int lda[LK_GEMM_GROUP], ldb[LK_GEMM_GROUP], ldc[LK_GEMM_GROUP], ones[LK_GEMM_GROUP];
    float alpha[LK_GEMM_GROUP], beta[LK_GEMM_GROUP];
};

static void fill_lists(const struct lk_gemm *const *gemms, uint32_t n, struct lists *out)
{
    for (uint32_t i = 0; i < n; i++) {
        const struct lk_gemm *g = gemms[i];

        out->its_a[i] = g->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
        out->its_b[i] = g->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
        out->m[i] = (int)g->columns;
        out->n[i] = (int)g->rows;
        out->k[i] = (int)g->depth;
        out->lda[i] = (int)g->b_stride;
        out->ldb[i] = (int)g->a_stride;
        out->ldc[i] = (int)g->d_stride;
        out->ones[i] = 1;
        out->alpha[i] = g->alpha;
        out->beta[i] = g->c ? g->beta : 0;
    }
}

/* Under the lock. */
static cublasStatus_t run(const struct lk_cublas *cublas, const struct lk_gemm *const *gemms,
                          uint32_t n, const struct lk_cublas_memory *memory, void *stream)
{
    cudaDataType_t type = gemms[0]->type == LK_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    const struct api *api = &cublas->api;
    struct lists lists;
    cublasStatus_t status;

    fill_lists(gemms, n, &lists);
    /* In this order: a new stream takes the workspace away. */
    status = api->cublasSetStream_v2(cublas->handle, (cudaStream_t)stream);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = api->cublasSetWorkspace_v2(cublas->handle, memory->workspace, memory->bytes);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    return api->cublasGemmGroupedBatchedEx(
        cublas->handle, lists.its_a, lists.its_b, lists.m, lists.n, lists.k, lists.alpha,
        (const void *const *)memory->pointers, type, lists.lda,
        (const void *const *)memory->pointers + LK_GEMM_GROUP, type, lists.ldb, lists.beta,
        (void *const *)memory->pointers + (size_t)2 * LK_GEMM_GROUP, type, lists.ldc, (int)n,
        lists.ones, CUBLAS_COMPUTE_32F);
}

int lk_cublas_run(struct lk_cublas *cublas, const struct lk_gemm *const *gemms, uint32_t n,
                  const struct lk_cublas_memory *memory, void *stream)
{
    cublasStatus_t status;

    pthread_mutex_lock(&cublas->lock);
    status = run(cublas, gemms, n, memory, stream);
    pthread_mutex_unlock(&cublas->lock);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED)
        return LK_VENDOR_NONE;
    return status == CUBLAS_STATUS_SUCCESS
               ? 0
               : fail_status(cublas, status, "cublasGemmGroupedBatchedEx");
}

#else

int lk_cublas_open(struct lk_cublas **out)
{
    return lk_blas_fail(-ENOSYS, "lk_gemm_groups_run: this library was built without cublas_v2.h");
}

void lk_cublas_close(struct lk_cublas *cublas)
{
}

int lk_cublas_run(struct lk_cublas *cublas, const struct lk_gemm *const *gemms, uint32_t n,
                  const struct lk_cublas_memory *memory, void *stream)
{
    return LK_VENDOR_NONE;
}

#endif
