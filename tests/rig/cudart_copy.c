/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies and fills. Copies between devices' or pinned memory are asynchronous even where the function's name does not
 * say so (as in CUDA: a synchronous copy inside the device, a fill); copies of pageable memory wait.
 */
#include "tests/rig/cudart_internal.h"

#include <stdlib.h>
#include <string.h>

struct copy {
    char *dst;
    const char *src; /* NULL: fill */
    size_t dst_pitch, src_pitch;
    size_t width, height;
    int value;
};

static void run_copy(void *arg)
{
    const struct copy *copy = arg;

    for (size_t row = 0; row < copy->height; row++) {
        char *dst = copy->dst + row * copy->dst_pitch;

        lcrig_buffer_use(dst, copy->width, true);
        if (copy->src) {
            const char *src = copy->src + row * copy->src_pitch;

            lcrig_buffer_use(src, copy->width, false);
            memmove(dst, src, copy->width);
        } else {
            memset(dst, copy->value, copy->width);
        }
    }
}

static size_t extent(size_t pitch, const struct copy *copy)
{
    return copy->height ? pitch * (copy->height - 1) + copy->width : 0;
}

/* A side that must be device memory has to be live memory of the rig for the whole extent. */
static bool side_is_valid(const void *ptr, size_t bytes, bool on_device)
{
    const struct rt_memory *mem = rt_memory_find(ptr);

    if (!mem)
        return !on_device;
    return rt_memory_holds(mem, ptr, bytes);
}

static bool is_valid(const struct copy *copy, enum cudaMemcpyKind kind)
{
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;

    if (copy->width > copy->dst_pitch || (copy->src && copy->width > copy->src_pitch))
        return false;
    if (!side_is_valid(copy->dst, extent(copy->dst_pitch, copy), to_device))
        return false;
    return !copy->src || side_is_valid(copy->src, extent(copy->src_pitch, copy), from_device);
}

static bool is_pageable(const struct copy *copy)
{
    return !rt_memory_find(copy->dst) || (copy->src && !rt_memory_find(copy->src));
}

static bool touches_host(const struct copy *copy)
{
    const struct rt_memory *dst = rt_memory_find(copy->dst);
    const struct rt_memory *src = copy->src ? rt_memory_find(copy->src) : dst;

    return !dst || !src || dst->type == RT_MEM_HOST || dst->type == RT_MEM_REGISTERED ||
           src->type == RT_MEM_HOST || src->type == RT_MEM_REGISTERED;
}

static cudaError_t submit_copy(struct rt_stream *stream, const struct copy *copy)
{
    struct copy *own = rt_alloc(sizeof(*own));
    struct lcrig_work work = { .name = copy->src ? "copy" : "fill",
                               .run = run_copy,
                               .release = free,
                               .arg = own,
                               .is_kernel = true };
    struct rt_piece *piece = rt_piece_new(&work);
    cudaError_t err;

    *own = *copy;
    err = rt_submit(stream, piece, copy->src ? cudaGraphNodeTypeMemcpy : cudaGraphNodeTypeMemset);
    rt_piece_unref(piece);
    return err;
}

static cudaError_t copy_async(const struct copy *copy, enum cudaMemcpyKind kind,
                              cudaStream_t handle)
{
    struct rt_stream *stream;
    cudaError_t err;

    if ((unsigned)kind > cudaMemcpyDefault)
        return rt_return(cudaErrorInvalidMemcpyDirection);
    rt_lock();
    err = rt_stream_find(handle, &stream);
    if (!err && copy->width && copy->height) {
        err = is_valid(copy, kind) ? submit_copy(stream, copy) : cudaErrorInvalidValue;
        if (!err && !stream->capture && is_pageable(copy))
            err = rt_stream_wait(stream);
    }
    rt_unlock();
    return rt_return(err);
}

static cudaError_t copy_now(const struct copy *copy, enum cudaMemcpyKind kind)
{
    struct rt_stream *stream;
    cudaError_t err;

    if ((unsigned)kind > cudaMemcpyDefault)
        return rt_return(cudaErrorInvalidMemcpyDirection);
    rt_lock();
    err = rt_stream_find(cudaStreamLegacy, &stream);
    if (!err)
        err = rt_capture_check_unsafe();
    if (!err && copy->width && copy->height) {
        bool wait = touches_host(copy);

        err = is_valid(copy, kind) ? submit_copy(stream, copy) : cudaErrorInvalidValue;
        if (!err && wait)
            err = rt_stream_wait(stream);
    }
    rt_unlock();
    return rt_return(err);
}

static struct copy flat_copy(void *dst, const void *src, size_t bytes)
{
    return (struct copy){ dst, src, bytes, bytes, bytes, 1, 0 };
}

static struct copy flat_fill(void *dst, int value, size_t bytes)
{
    return (struct copy){ dst, NULL, bytes, 0, bytes, 1, value };
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    struct copy copy = flat_copy(dst, src, bytes);
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    return bytes && (!dst || !src) ? rt_return(cudaErrorInvalidValue) : copy_now(&copy, kind);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    struct copy copy = flat_copy(dst, src, bytes);
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    return bytes && (!dst || !src) ? rt_return(cudaErrorInvalidValue)
                                   : copy_async(&copy, kind, stream);
}

cudaError_t cudaMemcpyPeer(void *dst, int dst_device, const void *src, int src_device, size_t bytes)
{
    struct copy copy = flat_copy(dst, src, bytes);
    cudaError_t err = rt_enter(__func__);

    (void)dst_device; /* addresses are unique over devices */
    (void)src_device;
    if (err)
        return err;
    return bytes && (!dst || !src) ? rt_return(cudaErrorInvalidValue)
                                   : copy_now(&copy, cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device,
                                size_t bytes, cudaStream_t stream)
{
    struct copy copy = flat_copy(dst, src, bytes);
    cudaError_t err = rt_enter(__func__);

    (void)dst_device; /* addresses are unique over devices */
    (void)src_device;
    if (err)
        return err;
    return bytes && (!dst || !src) ? rt_return(cudaErrorInvalidValue)
                                   : copy_async(&copy, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    struct copy copy = { dst, src, dst_pitch, src_pitch, width, height, 0 };
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    return width && height && (!dst || !src) ? rt_return(cudaErrorInvalidValue)
                                             : copy_async(&copy, kind, stream);
}

cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                         size_t width, size_t height, enum cudaMemcpyKind kind)
{
    struct copy copy = { dst, src, dst_pitch, src_pitch, width, height, 0 };
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    return width && height && (!dst || !src) ? rt_return(cudaErrorInvalidValue)
                                             : copy_now(&copy, kind);
}

/* Fills are of device memory (or pinned): the kind says so to is_valid. */
cudaError_t cudaMemset(void *dst, int value, size_t bytes)
{
    struct copy fill = flat_fill(dst, value, bytes);
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err || !bytes)
        return err;
    rt_lock();
    err = rt_stream_find(cudaStreamLegacy, &stream);
    if (!err)
        err = is_valid(&fill, cudaMemcpyHostToDevice) ? submit_copy(stream, &fill)
                                                      : cudaErrorInvalidValue;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    struct copy fill = flat_fill(dst, value, bytes);
    cudaError_t err = rt_enter(__func__);

    return err ? err : copy_async(&fill, cudaMemcpyHostToDevice, stream);
}

cudaError_t cudaMemset2DAsync(void *dst, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream)
{
    struct copy fill = { dst, NULL, pitch, 0, width, height, value };
    cudaError_t err = rt_enter(__func__);

    return err ? err : copy_async(&fill, cudaMemcpyHostToDevice, stream);
}
