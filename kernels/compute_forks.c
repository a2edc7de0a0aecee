/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams beside the caller's.
 */
#include "kernels/blocks_internal.h"

#include <errno.h>

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>

/* The first of n streams is the caller's own. */
#define FORKS (LK_GEMM_STREAMS - 1)

/* Constant after lk_forks_open(), but what is recorded into the events is not: `lock` is held from the record of `begun`
 * until the caller's stream waits for all of `done`. */
struct lk_forks {
    pthread_mutex_t lock;
    cudaStream_t streams[FORKS];
    cudaEvent_t begun, done[FORKS];
    int sms;
};

static int fail(cudaError_t err, const char *call)
{
    return lk_blas_fail((int)err, "streams beside the caller's: %s: %s", call,
                        cudaGetErrorString(err));
}

static cudaError_t make(struct lk_forks *forks)
{
    int device = 0;
    cudaError_t err = cudaGetDevice(&device);

    if (err == cudaSuccess)
        err = cudaDeviceGetAttribute(&forks->sms, cudaDevAttrMultiProcessorCount, device);
    if (err == cudaSuccess)
        err = cudaEventCreateWithFlags(&forks->begun, cudaEventDisableTiming);
    for (uint32_t i = 0; err == cudaSuccess && i < FORKS; i++) {
        err = cudaStreamCreateWithFlags(&forks->streams[i], cudaStreamNonBlocking);
        if (err == cudaSuccess)
            err = cudaEventCreateWithFlags(&forks->done[i], cudaEventDisableTiming);
    }
    return err;
}

int lk_forks_open(struct lk_forks **out)
{
    struct lk_forks *forks = calloc(1, sizeof(*forks));
    cudaError_t err;

    if (!forks)
        return lk_blas_fail(-ENOMEM, "lk_blas_open: out of memory");
    pthread_mutex_init(&forks->lock, NULL);
    err = make(forks);
    if (err != cudaSuccess) {
        lk_forks_close(forks);
        return lk_blas_fail((int)err, "lk_blas_open: streams and events: %s",
                            cudaGetErrorString(err));
    }
    *out = forks;
    return 0;
}

void lk_forks_close(struct lk_forks *forks)
{
    if (!forks)
        return;
    for (uint32_t i = 0; i < FORKS; i++) {
        if (forks->done[i])
            cudaEventDestroy(forks->done[i]);
        if (forks->streams[i])
            cudaStreamDestroy(forks->streams[i]);
    }
    if (forks->begun)
        cudaEventDestroy(forks->begun);
    pthread_mutex_destroy(&forks->lock);
    free(forks);
}

uint32_t lk_forks_sms(const struct lk_forks *forks)
{
    return (uint32_t)forks->sms;
}

/* Of the capture that the stream is part of; 0 if it is part of none. */
static cudaError_t find_capture(cudaStream_t stream, unsigned long long *out)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
#if CUDART_VERSION >= 13000
    cudaError_t err = cudaStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL, NULL);
#else
    cudaError_t err = cudaStreamGetCaptureInfo_v2(stream, &status, &id, NULL, NULL, NULL);
#endif

    *out = status == cudaStreamCaptureStatusNone ? 0 : id;
    return err;
}

/* A stream stays in a capture that it was forked into until that ends. */
static int check_free(const struct lk_forks *forks, uint32_t n, cudaStream_t stream)
{
    unsigned long long caller = 0, captured = 0;
    cudaError_t err = find_capture(stream, &caller);

    for (uint32_t i = 0; err == cudaSuccess && i + 1 < n; i++) {
        err = find_capture(forks->streams[i], &captured);
        if (err == cudaSuccess && captured && captured != caller)
            return LK_VENDOR_NONE;
    }
    return err == cudaSuccess ? 0 : fail(err, "cudaStreamGetCaptureInfo");
}

/* The caller's stream waits for the first `n` of ours. */
static cudaError_t join(struct lk_forks *forks, uint32_t n, cudaStream_t stream)
{
    cudaError_t first = cudaSuccess;

    for (uint32_t i = 0; i < n; i++) {
        cudaError_t err = cudaEventRecord(forks->done[i], forks->streams[i]);

        if (err == cudaSuccess)
            err = cudaStreamWaitEvent(stream, forks->done[i], 0);
        if (first == cudaSuccess)
            first = err;
    }
    return first;
}

int lk_forks_begin(struct lk_forks *forks, uint32_t n, void *stream)
{
    cudaError_t err;
    uint32_t i = 0;
    int result;

    pthread_mutex_lock(&forks->lock);
    result = check_free(forks, n, (cudaStream_t)stream);
    if (result)
        goto unlock;
    err = cudaEventRecord(forks->begun, (cudaStream_t)stream);
    while (err == cudaSuccess && i + 1 < n) {
        err = cudaStreamWaitEvent(forks->streams[i], forks->begun, 0);
        if (err == cudaSuccess)
            i++;
    }
    if (err == cudaSuccess)
        return 0;
    join(forks, i, (cudaStream_t)stream);
    result = fail(err, "to begin");

unlock:
    pthread_mutex_unlock(&forks->lock);
    return result;
}

void *lk_forks_stream(const struct lk_forks *forks, uint32_t number, void *stream)
{
    return number ? (void *)forks->streams[number - 1] : stream;
}

int lk_forks_end(struct lk_forks *forks, uint32_t n, void *stream)
{
    cudaError_t err = join(forks, n - 1, (cudaStream_t)stream);

    pthread_mutex_unlock(&forks->lock);
    return err == cudaSuccess ? 0 : fail(err, "to come together");
}
