/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products by cuBLASLt, which is opened at run time. It counts rows along columns: our matrix, row by row, is the
 * transpose of what it sees, so it is asked for the transposed product, d^T = b^T a^T, with our b as its A and our a as its
 * B.
 */
#include "kernels/blocks_internal.h"

#include <errno.h>

#if __has_include(<cublasLt.h>)

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define STR_(x)        #x
#define STR(x)         STR_(x)
#define LIBRARY        "libcublasLt.so." STR(CUBLAS_VER_MAJOR)
#define MAX_METHODS    24 /* that tuning measures */
#define TUNE_ROUNDS    5
#define TUNE_US        400  /* of a round, about */
#define NOTICED        0.98 /* a method is taken for faster from here on */
#define MOST_ALIGNMENT 256

struct api {
#define LK_VENDOR(name) __typeof__(name) *name;
#include "kernels/vendor.def"
#undef LK_VENDOR
};

/* What a method depends on. Compared byte by byte: zeroed before it is filled in. */
struct key {
    uint64_t rows, columns, depth;
    uint64_t a_stride, b_stride, c_stride, d_stride;
    uint64_t workspace_bytes;
    int64_t apart[4]; /* of a, b, c, d of a batch */
    uint32_t count, sms;
    uint8_t type, out_type, a_transposed, b_transposed;
    uint8_t adds, in_place, bias;
    uint8_t alignments[4]; /* of a, b, c, d: logarithms */
    uint8_t listed;        /* a batch by lists of addresses */
    uint8_t unused[4];     /* so that no byte is undefined */
};

struct plan {
    struct key key;
    bool served; /* else there is no method */
    cublasLtMatmulAlgo_t method;
};

/* Constant after lk_vendor_open() but for what `lock` guards. */
struct lk_vendor {
    void *library;
    struct api api;
    cublasLtHandle_t handle;
    pthread_mutex_t lock;
    struct plan plans[LK_BLAS_PLANS]; /* guarded, as is all below */
    uint64_t hashes[LK_BLAS_PLANS];   /* theirs: what a search reads */
    uint32_t filled, next;
};

/* The library's description of one product or batch, on the stack: nothing is allocated. */
struct description {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c, d; /* of ours */
    const void *at_a, *at_b, *at_c;          /* matrices, or lists of them */
    void *at_d;
};

/* ---- opening ---- */

static int find_function(const struct lk_vendor *vendor, const char *name, void **out)
{
    *out = dlsym(vendor->library, name);
    return *out ? 0 : lk_blas_fail(-ENOSYS, "lk_blas_open: cuBLASLt has no %s", name);
}

static int find_functions(struct lk_vendor *vendor)
{
    size_t version;
    int err = 0;

#define LK_VENDOR(name) \
    if (!err)           \
        err = find_function(vendor, #name, (void **)&vendor->api.name);
#include "kernels/vendor.def"
#undef LK_VENDOR
    if (err)
        return err;
    version = vendor->api.cublasLtGetVersion ? vendor->api.cublasLtGetVersion() : 0;
    if (version / 10000 != CUBLAS_VER_MAJOR)
        return lk_blas_fail(-ENOSYS, "lk_blas_open: cuBLASLt is version %zu, not %d", version,
                            CUBLAS_VER_MAJOR);
    return 0;
}

static int fail_status(const struct lk_vendor *vendor, cublasStatus_t status, const char *call)
{
    return lk_blas_fail(-EIO, "%s: %s: %s", call, vendor->api.cublasLtGetStatusName(status),
                        vendor->api.cublasLtGetStatusString(status));
}

static int open_handle(struct lk_vendor *vendor)
{
    cublasStatus_t status = vendor->api.cublasLtCreate(&vendor->handle);

    return status == CUBLAS_STATUS_SUCCESS ? 0 : fail_status(vendor, status, "cublasLtCreate");
}

int lk_vendor_open(const char *library, struct lk_vendor **out)
{
    const char *name = library ? library : LIBRARY;
    struct lk_vendor *vendor = calloc(1, sizeof(*vendor));
    int err;

    if (!vendor)
        return lk_blas_fail(-ENOMEM, "lk_blas_open: out of memory");
    /* The copy that the process has already: two of them would not know of each other. */
    vendor->library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!vendor->library)
        vendor->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!vendor->library) {
        err = lk_blas_fail(-ENOSYS, "lk_blas_open: %s", dlerror());
        goto free_vendor;
    }
    err = find_functions(vendor);
    if (!err)
        err = open_handle(vendor);
    if (err)
        goto close_library;
    pthread_mutex_init(&vendor->lock, NULL);
    *out = vendor;
    return 0;

close_library:
    dlclose(vendor->library);
free_vendor:
    free(vendor);
    return err;
}

void lk_vendor_close(struct lk_vendor *vendor)
{
    if (!vendor)
        return;
    vendor->api.cublasLtDestroy(vendor->handle);
    pthread_mutex_destroy(&vendor->lock);
    dlclose(vendor->library);
    free(vendor);
}

/* ---- describing a product ---- */

static cudaDataType_t data_type(enum lk_type type)
{
    if (type == LK_FP32)
        return CUDA_R_32F;
    return type == LK_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static uint8_t alignment_log(const void *pointer)
{
    uint8_t log = 0;

    while ((1 << log) < MOST_ALIGNMENT && (uintptr_t)pointer % (2U << log) == 0)
        log++;
    return log;
}

static bool reads_c(const struct lk_gemm *gemm)
{
    return gemm->c && gemm->beta != 0;
}

static uint64_t type_bytes(enum lk_type type)
{
    return type == LK_FP32 ? 4 : 2;
}

/* Of all of a batch. */
static uint8_t alignment_of(const void *pointer, int64_t apart, enum lk_type type)
{
    uint8_t base = alignment_log(pointer);
    uint8_t step = alignment_log((const void *)((uint64_t)apart * type_bytes(type)));

    return step < base ? step : base;
}

static void make_key(const struct lk_gemm *g, const struct lk_batch *batch, struct key *key)
{
    memset(key, 0, sizeof(*key));
    key->rows = g->rows;
    key->columns = g->columns;
    key->depth = g->depth;
    key->a_stride = g->a_stride;
    key->b_stride = g->b_stride;
    key->c_stride = reads_c(g) ? g->c_stride : g->d_stride;
    key->d_stride = g->d_stride;
    key->workspace_bytes = g->workspace_bytes;
    key->type = (uint8_t)g->type;
    key->out_type = (uint8_t)g->out_type;
    key->a_transposed = g->a_transposed != 0;
    key->b_transposed = g->b_transposed != 0;
    key->adds = reads_c(g);
    key->in_place = !reads_c(g) || g->c == g->d;
    key->bias = g->bias != NULL;
    key->sms = g->sms;
    key->count = batch->count;
    key->apart[0] = batch->a;
    key->apart[1] = batch->b;
    key->apart[2] = reads_c(g) ? batch->c : batch->d;
    key->apart[3] = batch->d;
    key->alignments[0] = alignment_of(g->a, batch->a, g->type);
    key->alignments[1] = alignment_of(g->b, batch->b, g->type);
    key->alignments[2] = alignment_of(reads_c(g) ? g->c : g->d, key->apart[2], g->out_type);
    key->alignments[3] = alignment_of(g->d, batch->d, g->out_type);
    if (!batch->pointers)
        return;
    key->listed = 1;
    key->alignments[0] = alignment_log((const void *)batch->a_bits);
    key->alignments[1] = alignment_log((const void *)batch->b_bits);
    key->alignments[2] = key->alignments[3] = alignment_log((const void *)batch->d_bits);
}

static uint64_t hash_key(const struct key *key)
{
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < sizeof(*key); i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Its columns are our rows. */
static cublasStatus_t describe_matrix(const struct lk_vendor *vendor,
                                      cublasLtMatrixLayoutOpaque_t *out, enum lk_type type,
                                      uint64_t rows, uint64_t columns, uint64_t stride)
{
    return vendor->api.cublasLtMatrixLayoutInit_internal(out, sizeof(*out), data_type(type),
                                                         columns, rows, (int64_t)stride);
}

static cublasStatus_t set(const struct lk_vendor *vendor, struct description *description,
                          cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes)
{
    return vendor->api.cublasLtMatmulDescSetAttribute(&description->product, attribute, value,
                                                      bytes);
}

static cublasStatus_t describe_bias(const struct lk_vendor *vendor, const struct lk_gemm *g,
                                    struct description *out)
{
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cudaDataType_t type = data_type(g->out_type);
    cublasStatus_t status = set(vendor, out, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                sizeof(epilogue));

    if (status == CUBLAS_STATUS_SUCCESS)
        status = set(vendor, out, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void *)&g->bias,
                     sizeof(g->bias));
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set(vendor, out, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type));
    return status;
}

/* The library that was found may be older than the headers. */
#define KNOWS_LISTS 130100

#if CUBLAS_VERSION >= KNOWS_LISTS
static cublasStatus_t describe_list(const struct lk_vendor *vendor,
                                    cublasLtMatrixLayoutOpaque_t *layout)
{
    uint32_t mode = CUBLASLT_BATCH_MODE_POINTER_ARRAY;

    if (vendor->api.cublasLtGetVersion() < KNOWS_LISTS)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return vendor->api.cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_MODE,
                                                        &mode, sizeof(mode));
}
#else
static cublasStatus_t describe_list(const struct lk_vendor *vendor,
                                    cublasLtMatrixLayoutOpaque_t *layout)
{
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
#endif

static cublasStatus_t describe_places(const struct lk_vendor *vendor,
                                      cublasLtMatrixLayoutOpaque_t *layout,
                                      const struct lk_batch *batch, int64_t apart)
{
    int32_t its_count = (int32_t)batch->count;
    cublasStatus_t status = vendor->api.cublasLtMatrixLayoutSetAttribute(
        layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &its_count, sizeof(its_count));

    if (status == CUBLAS_STATUS_SUCCESS && batch->pointers)
        return describe_list(vendor, layout);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = vendor->api.cublasLtMatrixLayoutSetAttribute(
            layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &apart, sizeof(apart));
    return status;
}

static cublasStatus_t describe_batch(const struct lk_vendor *vendor, const struct lk_batch *batch,
                                     bool reads, struct description *out)
{
    cublasStatus_t status = describe_places(vendor, &out->a, batch, batch->a);

    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_places(vendor, &out->b, batch, batch->b);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_places(vendor, &out->c, batch, reads ? batch->c : batch->d);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_places(vendor, &out->d, batch, batch->d);
    return status;
}

/* For fewer multiprocessors than there are. */
static cublasStatus_t describe_share(const struct lk_vendor *vendor, uint32_t sms,
                                     struct description *out)
{
    int32_t its_sms = (int32_t)sms;

    return set(vendor, out, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &its_sms, sizeof(its_sms));
}

static void set_places(const struct lk_gemm *g, const struct lk_batch *batch,
                       struct description *out)
{
    bool listed = batch->pointers != NULL;

    out->at_b = listed ? (const void *)batch->pointers : g->b;
    out->at_a = listed ? (const void *)(batch->pointers + LK_GEMM_GROUP) : g->a;
    out->at_d = listed ? (void *)(batch->pointers + (size_t)2 * LK_GEMM_GROUP) : g->d;
    out->at_c = !listed && reads_c(g) ? g->c : out->at_d;
}

static cublasStatus_t describe(const struct lk_vendor *vendor, const struct lk_gemm *g,
                               const struct lk_batch *batch, struct description *out)
{
    cublasOperation_t its_a = g->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t its_b = g->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t status = vendor->api.cublasLtMatmulDescInit_internal(
        &out->product, sizeof(out->product), CUBLAS_COMPUTE_32F, CUDA_R_32F);

    if (status == CUBLAS_STATUS_SUCCESS)
        status = set(vendor, out, CUBLASLT_MATMUL_DESC_TRANSA, &its_a, sizeof(its_a));
    if (status == CUBLAS_STATUS_SUCCESS)
        status = set(vendor, out, CUBLASLT_MATMUL_DESC_TRANSB, &its_b, sizeof(its_b));
    if (status == CUBLAS_STATUS_SUCCESS && g->bias)
        status = describe_bias(vendor, g, out);
    if (status == CUBLAS_STATUS_SUCCESS && g->sms)
        status = describe_share(vendor, g->sms, out);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_matrix(vendor, &out->a, g->type, g->a_transposed ? g->depth : g->rows,
                                 g->a_transposed ? g->rows : g->depth, g->a_stride);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_matrix(vendor, &out->b, g->type, g->b_transposed ? g->columns : g->depth,
                                 g->b_transposed ? g->depth : g->columns, g->b_stride);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_matrix(vendor, &out->c, g->out_type, g->rows, g->columns,
                                 reads_c(g) ? g->c_stride : g->d_stride);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = describe_matrix(vendor, &out->d, g->out_type, g->rows, g->columns, g->d_stride);
    if (status == CUBLAS_STATUS_SUCCESS && batch->count > 1)
        status = describe_batch(vendor, batch, reads_c(g), out);
    return status;
}

/* ---- methods ---- */

/* Partial products are added up in fp32 only, and with what memory and alignment there is. */
static cublasStatus_t describe_wishes(const struct lk_vendor *vendor, const struct key *key,
                                      cublasLtMatmulPreferenceOpaque_t *out)
{
    /* its A, B, C, D by the place in key->alignments */
    static const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        int place;
    } sides[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,  1},
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 0},
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 2},
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 3},
    };
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const struct api *api = &vendor->api;
    cublasStatus_t status = api->cublasLtMatmulPreferenceInit_internal(out, sizeof(*out));

    if (status == CUBLAS_STATUS_SUCCESS)
        status = api->cublasLtMatmulPreferenceSetAttribute(
            out, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &key->workspace_bytes,
            sizeof(key->workspace_bytes));
    if (status == CUBLAS_STATUS_SUCCESS)
        status = api->cublasLtMatmulPreferenceSetAttribute(
            out, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof(reductions));
    for (size_t i = 0; status == CUBLAS_STATUS_SUCCESS && i < sizeof(sides) / sizeof(*sides); i++) {
        uint32_t bytes = 1U << key->alignments[sides[i].place];

        status = api->cublasLtMatmulPreferenceSetAttribute(out, sides[i].attribute, &bytes,
                                                           sizeof(bytes));
    }
    return status;
}

/* Up to `most` methods, the one that the library thinks best first; *n 0 if there is none. */
static int ask(const struct lk_vendor *vendor, struct description *description,
               const struct key *key, int most, cublasLtMatmulHeuristicResult_t *out, int *n)
{
    cublasLtMatmulPreferenceOpaque_t wishes;
    cublasStatus_t status = describe_wishes(vendor, key, &wishes);
    int returned = 0;

    if (status != CUBLAS_STATUS_SUCCESS)
        return fail_status(vendor, status, "cublasLtMatmulPreferenceSetAttribute");
    status = vendor->api.cublasLtMatmulAlgoGetHeuristic(
        vendor->handle, &description->product, &description->b, &description->a, &description->c,
        &description->d, &wishes, most, out, &returned);
    *n = 0;
    if (status == CUBLAS_STATUS_NOT_SUPPORTED)
        return 0;
    if (status != CUBLAS_STATUS_SUCCESS)
        return fail_status(vendor, status, "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < returned; i++)
        if (out[i].state == CUBLAS_STATUS_SUCCESS && out[i].workspaceSize <= key->workspace_bytes)
            out[(*n)++] = out[i];
    return 0;
}

/* Under the lock. */
static struct plan *find_plan(struct lk_vendor *vendor, const struct key *key, uint64_t hash)
{
    for (uint32_t i = 0; i < vendor->filled; i++) {
        struct plan *plan = &vendor->plans[i];

        if (vendor->hashes[i] == hash && memcmp(&plan->key, key, sizeof(*key)) == 0)
            return plan;
    }
    return NULL;
}

static bool recall(struct lk_vendor *vendor, const struct key *key, struct plan *out)
{
    struct plan *plan;

    pthread_mutex_lock(&vendor->lock);
    plan = find_plan(vendor, key, hash_key(key));
    if (plan)
        *out = *plan;
    pthread_mutex_unlock(&vendor->lock);
    return plan != NULL;
}

/* In the place of the same key, else of the oldest one. */
static void keep(struct lk_vendor *vendor, const struct plan *plan)
{
    uint64_t hash = hash_key(&plan->key);
    struct plan *place;

    pthread_mutex_lock(&vendor->lock);
    place = find_plan(vendor, &plan->key, hash);
    if (!place) {
        place = &vendor->plans[vendor->next];
        vendor->hashes[vendor->next] = hash;
        vendor->next = (vendor->next + 1) % LK_BLAS_PLANS;
        if (vendor->filled < LK_BLAS_PLANS)
            vendor->filled++;
    }
    *place = *plan;
    pthread_mutex_unlock(&vendor->lock);
}

static int find_method(struct lk_vendor *vendor, struct description *description,
                       const struct key *key, struct plan *out, int *planned)
{
    cublasLtMatmulHeuristicResult_t result;
    int n = 0, err;

    if (recall(vendor, key, out))
        return 0;
    err = ask(vendor, description, key, 1, &result, &n);
    if (err)
        return err;
    *planned = 1;
    *out = (struct plan){ .key = *key, .served = n > 0 };
    if (n)
        out->method = result.algo;
    keep(vendor, out);
    return 0;
}

/* ---- products ---- */

static int multiply_with(const struct lk_vendor *vendor, const struct lk_gemm *g,
                         struct description *d, const cublasLtMatmulAlgo_t *method, void *stream)
{
    float beta = reads_c(g) ? g->beta : 0;
    cublasStatus_t status = vendor->api.cublasLtMatmul(
        vendor->handle, &d->product, &g->alpha, d->at_b, &d->b, d->at_a, &d->a, &beta, d->at_c,
        &d->c, d->at_d, &d->d, method, g->workspace, g->workspace_bytes, (cudaStream_t)stream);

    if (status == CUBLAS_STATUS_NOT_SUPPORTED)
        return LK_VENDOR_NONE;
    if (status == CUBLAS_STATUS_SUCCESS)
        return 0;
    return lk_blas_fail(-EIO, "cublasLtMatmul of %llu x %llu x %llu: %s: %s",
                        (unsigned long long)g->rows, (unsigned long long)g->columns,
                        (unsigned long long)g->depth, vendor->api.cublasLtGetStatusName(status),
                        vendor->api.cublasLtGetStatusString(status));
}

static int prepare(const struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   const struct lk_batch *batch, struct key *key, struct description *description)
{
    cublasStatus_t status = describe(vendor, gemm, batch, description);

    make_key(gemm, batch, key);
    set_places(gemm, batch, description);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED)
        return LK_VENDOR_NONE;
    return status == CUBLAS_STATUS_SUCCESS
               ? 0
               : fail_status(vendor, status, "the description of a product for cuBLASLt");
}

int lk_vendor_gemm(struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   const struct lk_batch *batch, void *stream, int *planned)
{
    struct description description;
    struct plan plan;
    struct key key;
    int err = prepare(vendor, gemm, batch, &key, &description);

    if (!err)
        err = find_method(vendor, &description, &key, &plan, planned);
    if (err)
        return err;
    if (!plan.served)
        return LK_VENDOR_NONE;
    return multiply_with(vendor, gemm, &description, &plan.method, stream);
}

/* ---- measuring ---- */

struct clock {
    cudaEvent_t begin, end;
};

static int run_timed(const struct lk_vendor *vendor, const struct lk_gemm *gemm,
                     struct description *description, const cublasLtMatmulAlgo_t *method, int times,
                     const struct clock *clock, float *out, void *stream)
{
    cudaError_t err = cudaEventRecord(clock->begin, (cudaStream_t)stream);

    for (int i = 0; i < times; i++) {
        int result = multiply_with(vendor, gemm, description, method, stream);

        if (result)
            return result;
    }
    if (err == cudaSuccess)
        err = cudaEventRecord(clock->end, (cudaStream_t)stream);
    if (err == cudaSuccess)
        err = cudaEventSynchronize(clock->end);
    if (err == cudaSuccess)
        err = cudaEventElapsedTime(out, clock->begin, clock->end);
    return err == cudaSuccess ? 0
                              : lk_blas_fail((int)err, "lk_gemm_tune: %s", cudaGetErrorString(err));
}

/* The best of several rounds, in microseconds for one product. */
static int measure(const struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   struct description *description, const cublasLtMatmulAlgo_t *method,
                   const struct clock *clock, double *out, void *stream)
{
    float ms = 0;
    int times, err = run_timed(vendor, gemm, description, method, 1, clock, &ms, stream);

    if (!err)
        err = run_timed(vendor, gemm, description, method, 2, clock, &ms, stream);
    if (err)
        return err;
    times = ms > 0 ? (int)(TUNE_US / (500 * ms)) : 1;
    times = times < 1 ? 1 : times > 50 ? 50 : times;
    *out = 500 * (double)ms;
    for (int round = 0; round < TUNE_ROUNDS; round++) {
        err = run_timed(vendor, gemm, description, method, times, clock, &ms, stream);
        if (err)
            return err;
        if (1000 * (double)ms / times < *out)
            *out = 1000 * (double)ms / times;
    }
    return 0;
}

static int choose(struct lk_vendor *vendor, const struct lk_gemm *gemm,
                  const struct lk_batch *batch, const struct clock *clock,
                  struct lk_gemm_tuned *out, void *stream)
{
    cublasLtMatmulHeuristicResult_t results[MAX_METHODS];
    struct description description;
    struct plan plan = { .served = false };
    int n = 0, err = prepare(vendor, gemm, batch, &plan.key, &description);

    if (!err)
        err = ask(vendor, &description, &plan.key, MAX_METHODS, results, &n);
    for (int i = 0; !err && i < n; i++) {
        double us;

        err = measure(vendor, gemm, &description, &results[i].algo, clock, &us, stream);
        if (err == LK_VENDOR_NONE) { /* it is offered and then refused */
            err = 0;
            continue;
        }
        if (err)
            break;
        if (!out->methods++)
            out->first_us = us;
        if (!plan.served || us < NOTICED * out->chosen_us) {
            out->chosen_us = us;
            out->chosen = (uint32_t)i;
            plan.method = results[i].algo;
            plan.served = true;
        }
    }
    if (err || !plan.served)
        return err ? err : LK_VENDOR_NONE;
    keep(vendor, &plan);
    return 0;
}

int lk_vendor_tune(struct lk_vendor *vendor, const struct lk_gemm *gemm,
                   const struct lk_batch *batch, struct lk_gemm_tuned *out, void *stream)
{
    struct clock clock = { NULL, NULL };
    cudaError_t error = cudaEventCreate(&clock.begin);
    int err;

    if (error == cudaSuccess)
        error = cudaEventCreate(&clock.end);
    err = error == cudaSuccess
              ? choose(vendor, gemm, batch, &clock, out, stream)
              : lk_blas_fail((int)error, "lk_gemm_tune: %s", cudaGetErrorString(error));
    if (clock.end)
        cudaEventDestroy(clock.end);
    if (clock.begin)
        cudaEventDestroy(clock.begin);
    return err;
}

#else

int lk_vendor_open(const char *library, struct lk_vendor **out)
{
    return lk_blas_fail(-ENOSYS, "lk_blas_open: this library was built without cublasLt.h");
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

#endif
