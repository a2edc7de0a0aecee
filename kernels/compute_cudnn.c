/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention by cuDNN, which is opened at run time: plans that are kept, and calls with them.
 */
#include "kernels/cudnn_internal.h"

#include <errno.h>

#if __has_include(<cuda_runtime_api.h>)

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY      "libcudnn.so.9"
#define OLDEST       91501 /* before it backward needed a mask for rows that are no multiple of 128 */
#define MAX_POINTERS 32

struct plan {
    struct lk_cudnn_key key;
    void *made; /* NULL: cuDNN has none, and why says so */
    uint64_t workspace;
    uint64_t used; /* the time of the last use, by lk_cudnn.time */
    bool captured; /* a graph may run it as long as the library is open */
    char why[LK_CUDNN_WHY];
};

/* Constant after lk_cudnn_open() but for what `lock` guards: the handle and all plans. It is held while a plan is made, too
 * (a tenth of a second and more), and over each launch: the handle carries the stream. */
struct lk_cudnn {
    void *library;
    struct lk_cudnn_api api;
    void *device; /* the descriptor of its properties, if no plan is ever run */
    pthread_mutex_t lock;
    void *handle; /* guarded from here on; NULL with `device` */
    struct plan plans[LK_ATTENTION_PLANS];
    uint32_t filled;
    uint64_t time;
};

/* ---- opening ---- */

static int find_function(const struct lk_cudnn *cudnn, const char *name, void **out)
{
    *out = dlsym(cudnn->library, name);
    return *out ? 0 : lk_blas_fail(-ENOSYS, "lk_attention_open: cuDNN has no %s", name);
}

static int find_functions(struct lk_cudnn *cudnn)
{
    size_t version;
    int err = 0;

#define LK_CUDNN(type, name, ...) \
    if (!err)                     \
        err = find_function(cudnn, #name, (void **)&cudnn->api.name);
#include "kernels/cudnn.def"
#undef LK_CUDNN
    if (err)
        return err;
    version = cudnn->api.cudnnGetVersion ? cudnn->api.cudnnGetVersion() : 0;
    if (version / 10000 != 9 || version < OLDEST)
        return lk_blas_fail(-ENOSYS, "lk_attention_open: cuDNN is version %zu, not 9.15.1 or newer",
                            version);
    return 0;
}

static int fail_status(const struct lk_cudnn *cudnn, int status, const char *call)
{
    char text[160] = "";

    cudnn->api.cudnnGetLastErrorString(text, sizeof(text));
    return lk_blas_fail(-EIO, "%s: %s: %s", call, cudnn->api.cudnnGetErrorString(status), text);
}

static int describe_device(struct lk_cudnn *cudnn, const char *device)
{
    const struct lk_cudnn_api *api = &cudnn->api;
    int status = api->cudnnBackendCreateDescriptor(LK_CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR,
                                                   &cudnn->device);

    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendSetAttribute(
            cudnn->device, LK_CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, LK_CUDNN_TYPE_CHAR,
            (int64_t)strlen(device) + 1, device);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendFinalize(cudnn->device);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        return 0;
    if (cudnn->device)
        api->cudnnBackendDestroyDescriptor(cudnn->device);
    return fail_status(cudnn, status, "the description of a device for cuDNN");
}

static int open_handle(struct lk_cudnn *cudnn)
{
    int status = cudnn->api.cudnnCreate(&cudnn->handle);

    return status == LK_CUDNN_STATUS_SUCCESS ? 0 : fail_status(cudnn, status, "cudnnCreate");
}

int lk_cudnn_open(const char *library, const char *device, struct lk_cudnn **out)
{
    const char *name = library ? library : LIBRARY;
    struct lk_cudnn *cudnn = calloc(1, sizeof(*cudnn));
    int err;

    if (!cudnn)
        return lk_blas_fail(-ENOMEM, "lk_attention_open: out of memory");
    /* The copy that the process has already: its parts find each other by name, and two copies mix them up. */
    cudnn->library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!cudnn->library)
        cudnn->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!cudnn->library) {
        err = lk_blas_fail(-ENOSYS, "lk_attention_open: %s", dlerror());
        goto free_cudnn;
    }
    err = find_functions(cudnn);
    if (!err)
        err = device ? describe_device(cudnn, device) : open_handle(cudnn);
    if (err)
        goto close_library;
    pthread_mutex_init(&cudnn->lock, NULL);
    *out = cudnn;
    return 0;

close_library:
    dlclose(cudnn->library);
free_cudnn:
    free(cudnn);
    return err;
}

void lk_cudnn_close(struct lk_cudnn *cudnn)
{
    if (!cudnn)
        return;
    for (uint32_t i = 0; i < cudnn->filled; i++)
        if (cudnn->plans[i].made)
            cudnn->api.cudnnBackendDestroyDescriptor(cudnn->plans[i].made);
    if (cudnn->device)
        cudnn->api.cudnnBackendDestroyDescriptor(cudnn->device);
    if (cudnn->handle)
        cudnn->api.cudnnDestroy(cudnn->handle);
    pthread_mutex_destroy(&cudnn->lock);
    dlclose(cudnn->library);
    free(cudnn);
}

/* ---- plans, all under the lock ---- */

static struct plan *find_plan(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key)
{
    for (uint32_t i = 0; i < cudnn->filled; i++)
        if (memcmp(&cudnn->plans[i].key, key, sizeof(*key)) == 0)
            return &cudnn->plans[i];
    return NULL;
}

/* An empty place, else that of the plan that was used longest ago; NULL if graphs need all of them. */
static struct plan *make_room(struct lk_cudnn *cudnn)
{
    struct plan *oldest = NULL;

    if (cudnn->filled < LK_ATTENTION_PLANS)
        return &cudnn->plans[cudnn->filled++];
    for (uint32_t i = 0; i < cudnn->filled; i++)
        if (!cudnn->plans[i].captured && (!oldest || cudnn->plans[i].used < oldest->used))
            oldest = &cudnn->plans[i];
    if (oldest && oldest->made)
        cudnn->api.cudnnBackendDestroyDescriptor(oldest->made);
    return oldest;
}

static struct plan *get_plan(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key,
                             char why[LK_CUDNN_WHY], int *planned)
{
    struct plan *plan = find_plan(cudnn, key);

    if (!plan) {
        struct lk_cudnn_made made = { .plan = NULL };

        plan = make_room(cudnn);
        if (!plan) {
            snprintf(why, LK_CUDNN_WHY, "captured graphs need all of the plans");
            return NULL;
        }
        memset(plan, 0, sizeof(*plan));
        *planned = 1;
        lk_cudnn_make(&cudnn->api, cudnn->handle, cudnn->device, key, plan->why, &made);
        plan->key = *key;
        plan->made = made.plan;
        plan->workspace = made.workspace;
    }
    plan->used = ++cudnn->time;
    memcpy(why, plan->why, LK_CUDNN_WHY);
    return plan->made ? plan : NULL;
}

int lk_cudnn_plan(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key, uint64_t *workspace,
                  char why[LK_CUDNN_WHY], int *planned)
{
    const struct plan *plan;

    pthread_mutex_lock(&cudnn->lock);
    plan = get_plan(cudnn, key, why, planned);
    if (plan)
        *workspace = plan->workspace;
    pthread_mutex_unlock(&cudnn->lock);
    return plan ? 0 : LK_VENDOR_NONE;
}

/* ---- calls ---- */

/* Names of tensors and where they lie; values are on the caller's stack. */
struct pack {
    int64_t names[MAX_POINTERS];
    void *pointers[MAX_POINTERS];
    int64_t n;
};

static void put(struct pack *pack, int64_t name, void *pointer)
{
    pack->names[pack->n] = name;
    pack->pointers[pack->n++] = pointer;
}

struct values {
    float scale, minus_infinity, one;
    int32_t sizes[2];
};

static void fill_pack(const struct lk_cudnn_key *key, const struct lk_cudnn_memory *memory,
                      struct values *values, struct pack *pack)
{
    int tensors = key->backward ? LK_TENSORS : LK_TENSOR_O + 1;

    for (int i = 0; i < tensors; i++) {
        put(pack, LK_NAME_TENSORS + i, memory->tensors[i]);
        if (key->packed)
            put(pack, LK_NAME_OFFSETS + i, memory->offsets[i]);
    }
    for (int side = 0; side < 2 && key->lengths; side++)
        put(pack, LK_NAME_LENGTHS + side, memory->lengths[side]);
    if (key->backward || key->stats)
        put(pack, LK_NAME_LSE, memory->lse);
    put(pack, LK_NAME_SCALE, &values->scale);
    if (key->lengths || key->causal)
        put(pack, LK_NAME_MINUS_INFINITY, &values->minus_infinity);
    for (int side = 0; side < 2 && key->causal == LK_CAUSAL_BOTTOM_RIGHT && !key->lengths; side++)
        put(pack, LK_NAME_SIZES + side, &values->sizes[side]);
    if (!key->backward)
        return;
    put(pack, LK_NAME_ROW_SUM, memory->row_sum);
    put(pack, LK_NAME_ONE, &values->one);
    if (!key->deterministic)
        put(pack, LK_NAME_DQ_SUM, memory->dq_sum);
}

static int make_pack(const struct lk_cudnn_api *api, const struct pack *pack, void *workspace,
                     void **out)
{
    int status = api->cudnnBackendCreateDescriptor(LK_CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, out);

    if (status != LK_CUDNN_STATUS_SUCCESS)
        return status;
    status = api->cudnnBackendSetAttribute(*out, LK_CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
                                           LK_CUDNN_TYPE_INT64, pack->n, pack->names);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendSetAttribute(*out, LK_CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                                               LK_CUDNN_TYPE_VOID_PTR, pack->n,
                                               (const void *)pack->pointers);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendSetAttribute(*out, LK_CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
                                               LK_CUDNN_TYPE_VOID_PTR, 1, (const void *)&workspace);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = api->cudnnBackendFinalize(*out);
    if (status != LK_CUDNN_STATUS_SUCCESS)
        api->cudnnBackendDestroyDescriptor(*out);
    return status;
}

static int execute(struct lk_cudnn *cudnn, struct plan *plan, const struct lk_cudnn_memory *memory,
                   void *stream)
{
    struct values values = {
        .scale = memory->scale,
        .minus_infinity = -INFINITY,
        .one = 1,
        .sizes = {(int32_t)plan->key.queries, (int32_t)plan->key.keys}
    };
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    struct pack pack = { .n = 0 };
    void *made = NULL;
    int status;

    /* Before the launch: once a graph has it the plan may not go. */
    if (cudaStreamIsCapturing((cudaStream_t)stream, &capture) == cudaSuccess &&
        capture != cudaStreamCaptureStatusNone)
        plan->captured = true;
    fill_pack(&plan->key, memory, &values, &pack);
    status = make_pack(&cudnn->api, &pack, memory->workspace, &made);
    if (status != LK_CUDNN_STATUS_SUCCESS)
        return fail_status(cudnn, status, "the arguments of attention for cuDNN");
    status = cudnn->api.cudnnSetStream(cudnn->handle, stream);
    if (status == LK_CUDNN_STATUS_SUCCESS)
        status = cudnn->api.cudnnBackendExecute(cudnn->handle, plan->made, made);
    cudnn->api.cudnnBackendDestroyDescriptor(made);
    return status == LK_CUDNN_STATUS_SUCCESS ? 0
                                             : fail_status(cudnn, status, "cudnnBackendExecute");
}

int lk_cudnn_run(struct lk_cudnn *cudnn, const struct lk_cudnn_key *key,
                 const struct lk_cudnn_memory *memory, char why[LK_CUDNN_WHY], int *planned,
                 void *stream)
{
    struct plan *plan;
    int err = LK_VENDOR_NONE;

    pthread_mutex_lock(&cudnn->lock);
    plan = get_plan(cudnn, key, why, planned);
    if (plan)
        err = execute(cudnn, plan, memory, stream);
    pthread_mutex_unlock(&cudnn->lock);
    return err;
}

#else

int lk_cudnn_open(const char *library, const char *device, struct lk_cudnn **out)
{
    return lk_blas_fail(-ENOSYS, "lk_attention_open: this library was built without CUDA");
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

#endif
