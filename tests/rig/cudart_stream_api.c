/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA runtime's stream functions.
 */
#include "tests/rig/cudart_internal.h"

#include <stdlib.h>

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

static cudaError_t create_stream(cudaStream_t *out, unsigned flags, int priority)
{
    if (!out || (flags & ~(unsigned)cudaStreamNonBlocking))
        return rt_return(cudaErrorInvalidValue);
    if (priority > 0)
        priority = 0;
    if (priority < -5)
        priority = -5;
    rt_lock();
    *out = (cudaStream_t)rt_stream_new(rt_current_device(), flags, priority, false);
    rt_unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : create_stream(out, cudaStreamDefault, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : create_stream(out, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : create_stream(out, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
        return rt_return(cudaErrorInvalidResourceHandle);
    rt_lock();
    err = rt_stream_find(handle, &stream);
    if (!err && stream->capture)
        err = rt_capture_spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
    if (!err)
        rt_stream_close(stream);
    rt_unlock();
    return rt_return(err);
}

/* Locks and finds; on success the caller unlocks. */
static cudaError_t find_locked(const char *site, cudaStream_t handle, struct rt_stream **out)
{
    cudaError_t err = rt_enter(site);

    if (err)
        return err;
    rt_lock();
    err = rt_stream_find(handle, out);
    if (err)
        rt_unlock();
    return rt_return(err);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority)
{
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    *priority = stream->priority;
    rt_unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *flags)
{
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    *flags = stream->flags;
    rt_unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long *id)
{
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    *id = stream->id;
    rt_unlock();
    return cudaSuccess;
}

#if CUDART_VERSION >= 12080
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int *device)
{
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    *device = stream->device;
    rt_unlock();
    return cudaSuccess;
}
#endif

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    if (stream->capture)
        err = rt_capture_spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
    if (!err)
        err = rt_capture_check_unsafe();
    if (!err)
        err = rt_stream_wait(stream);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    if (stream->capture)
        err = rt_capture_spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
    if (!err)
        err = rt_capture_check_unsafe();
    if (!err && stream->is_legacy)
        err = rt_stream_join_legacy(stream);
    if (!err && !rt_stream_is_idle(stream))
        err = cudaErrorNotReady;
    rt_unlock();
    return rt_return(err);
}

struct host_call {
    cudaHostFn_t fn;
    cudaStreamCallback_t callback;
    cudaStream_t stream;
    void *data;
};

static void run_host_call(void *arg)
{
    struct host_call *call = arg;

    rt_set_in_host_function(true);
    if (call->fn)
        call->fn(call->data);
    else
        call->callback(call->stream, cudaSuccess, call->data);
    rt_set_in_host_function(false);
}

static struct rt_piece *host_piece(const struct host_call *call)
{
    struct host_call *copy = rt_alloc(sizeof(*copy));
    struct lcrig_work work = { .name = "host function",
                               .run = run_host_call,
                               .release = free,
                               .arg = copy };

    *copy = *call;
    return rt_piece_new(&work);
}

struct rt_piece *rt_host_piece(cudaHostFn_t fn, void *data)
{
    struct host_call call = { .fn = fn, .data = data };

    return host_piece(&call);
}

static cudaError_t submit_host_call(struct rt_stream *stream, const struct host_call *call)
{
    struct rt_piece *piece = host_piece(call);
    cudaError_t err = rt_submit(stream, piece, cudaGraphNodeTypeHost);

    rt_piece_unref(piece);
    return err;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t fn, void *data)
{
    struct host_call call = { .fn = fn, .data = data };
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    err = fn ? submit_host_call(stream, &call) : cudaErrorInvalidValue;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void *data,
                                  unsigned flags)
{
    struct host_call call = { .callback = callback, .stream = handle, .data = data };
    struct rt_stream *stream;
    cudaError_t err = find_locked(__func__, handle, &stream);

    if (err)
        return err;
    if (!callback || flags)
        err = cudaErrorInvalidValue;
    else if (stream->capture)
        err = rt_capture_spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
    else
        err = submit_host_call(stream, &call);
    rt_unlock();
    return rt_return(err);
}
