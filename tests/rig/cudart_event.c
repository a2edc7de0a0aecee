/* SPDX-License-Identifier: Apache-2.0
 *
 * Events. An event that was last recorded inside a capture names a point of that capture and nothing else.
 */
#include "tests/rig/cudart_internal.h"

#include <stdlib.h>
#include <string.h>

#define EVENT_FLAGS (cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess)

static struct rt_event all = { .prev = &all, .next = &all };
static unsigned long long unrecorded_waits;

void rt_event_unref(struct rt_event *event)
{
    if (--event->refs)
        return;
    rt_mark_unref(event->mark);
    rt_nodes_clear(&event->deps);
    rt_retire(event);
}

static cudaError_t create_event(cudaEvent_t *out, unsigned flags)
{
    struct rt_event *event;

    if (!out || (flags & ~(unsigned)EVENT_FLAGS) ||
        ((flags & cudaEventInterprocess) && !(flags & cudaEventDisableTiming)))
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    event = rt_alloc(sizeof(*event));
    event->magic = RT_EVENT;
    event->refs = 1;
    event->flags = flags;
    event->device = rt_current_device();
    event->prev = all.prev;
    event->next = &all;
    all.prev->next = event;
    all.prev = event;
    rt_alive[RT_KIND_EVENT]++;
    rt_unlock();
    *out = (cudaEvent_t)event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : create_event(out, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : create_event(out, flags);
}

static cudaError_t find_event(cudaEvent_t handle, struct rt_event **out)
{
    struct rt_event *event = (struct rt_event *)handle;

    if (!event || event->magic != RT_EVENT)
        return cudaErrorInvalidResourceHandle;
    *out = event;
    return cudaSuccess;
}

static void close_event(struct rt_event *event)
{
    event->magic = RT_DEAD;
    event->prev->next = event->next;
    event->next->prev = event->prev;
    rt_alive[RT_KIND_EVENT]--;
    rt_event_unref(event);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    struct rt_event *event;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_event(handle, &event);
    if (!err)
        close_event(event);
    rt_unlock();
    return rt_return(err);
}

void rt_device_close_events(int device)
{
    struct rt_event *next;

    for (struct rt_event *event = all.next; event != &all; event = next) {
        next = event->next;
        if (event->device == device)
            close_event(event);
    }
}

void rt_event_set_mark(struct rt_event *event, struct rt_mark *mark)
{
    rt_mark_ref(mark);
    rt_mark_unref(event->mark);
    event->mark = mark;
    event->capture_id = 0;
    rt_nodes_clear(&event->deps);
}

static cudaError_t record_now(struct rt_stream *stream, struct rt_event *event)
{
    struct rt_mark *mark;
    cudaError_t err = rt_stream_join_legacy(stream);

    if (err)
        return err;
    mark = rt_push_record(stream);
    rt_event_set_mark(event, mark);
    rt_mark_unref(mark);
    return cudaSuccess;
}

static cudaError_t record(cudaEvent_t event_handle, cudaStream_t stream_handle, unsigned flags)
{
    struct rt_event *event;
    struct rt_stream *stream;
    cudaError_t err;

    rt_lock();
    err = find_event(event_handle, &event);
    if (!err)
        err = rt_stream_find(stream_handle, &stream);
    if (!err && (flags & ~(unsigned)cudaEventRecordExternal))
        err = cudaErrorInvalidValue;
    if (!err && event->device != stream->device)
        err = cudaErrorInvalidResourceHandle;
    if (err)
        goto unlock;
    if (stream->capture)
        err = rt_capture_record(stream, event, flags & cudaEventRecordExternal);
    else if (flags & cudaEventRecordExternal)
        err = cudaErrorInvalidValue; /* means something in a capture only */
    else
        err = record_now(stream, event);

unlock:
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : record(event, stream, 0);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : record(event, stream, flags);
}

static void note_unrecorded_wait(void)
{
    unrecorded_waits++;
    if (lcrig_env("LCRIG_STRICT_EVENTS", 0, 1))
        lcrig_fail("cudaStreamWaitEvent on an event that was never recorded");
}

unsigned long long lcrig_unrecorded_waits(void)
{
    unsigned long long count;

    if (rt_is_forked_child())
        return 0;
    rt_lock();
    count = unrecorded_waits;
    rt_unlock();
    return count;
}

static cudaError_t wait_event(struct rt_stream *stream, struct rt_event *event, unsigned flags)
{
    cudaError_t err;

    if (flags & ~(unsigned)cudaEventWaitExternal)
        return cudaErrorInvalidValue;
    if (stream->capture)
        return rt_capture_wait(stream, event, flags & cudaEventWaitExternal);
    if (flags)
        return cudaErrorInvalidValue; /* means something in a capture only */
    if (event->capture_id)
        return rt_capture_join(stream, event);
    err = rt_stream_join_legacy(stream);
    if (err)
        return err;
    if (event->mark)
        rt_push_wait(stream, event->mark);
    else
        note_unrecorded_wait();
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle,
                                unsigned flags)
{
    struct rt_event *event;
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_event(event_handle, &event);
    if (!err)
        err = rt_stream_find(stream_handle, &stream);
    if (!err)
        err = wait_event(stream, event, flags);
    rt_unlock();
    return rt_return(err);
}

/* What query and synchronize have in common. */
static cudaError_t find_waitable(cudaEvent_t handle, struct rt_event **out)
{
    cudaError_t err = find_event(handle, out);

    if (!err && (*out)->capture_id)
        err = cudaErrorCapturedEvent;
    if (!err)
        err = rt_capture_check_unsafe();
    return err;
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    struct rt_event *event;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_waitable(handle, &event);
    if (!err && event->mark && !event->mark->done)
        err = cudaErrorNotReady;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    struct rt_event *event;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_waitable(handle, &event);
    if (!err && event->mark) {
        struct rt_mark *mark = rt_mark_ref(event->mark);

        rt_mark_wait(mark);
        rt_mark_unref(mark);
    }
    rt_unlock();
    return rt_return(err);
}

static cudaError_t elapsed(float *out, cudaEvent_t start_handle, cudaEvent_t end_handle)
{
    struct rt_event *start, *end;
    cudaError_t err = find_event(start_handle, &start);

    if (!err)
        err = find_event(end_handle, &end);
    if (err)
        return err;
    if (start->capture_id || end->capture_id)
        return cudaErrorCapturedEvent;
    if (!start->mark || !end->mark || ((start->flags | end->flags) & cudaEventDisableTiming))
        return cudaErrorInvalidResourceHandle;
    if (!start->mark->done || !end->mark->done)
        return cudaErrorNotReady;
    *out = (float)((double)(end->mark->at.tv_sec - start->mark->at.tv_sec) * 1e3 +
                   (double)(end->mark->at.tv_nsec - start->mark->at.tv_nsec) * 1e-6);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = ms ? elapsed(ms, start, end) : cudaErrorInvalidValue;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event)
{
    cudaError_t err = rt_enter(__func__);

    (void)handle;
    (void)event;
    return err ? err : rt_return(cudaErrorNotSupported);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle)
{
    cudaError_t err = rt_enter(__func__);

    (void)event;
    (void)handle;
    return err ? err : rt_return(cudaErrorNotSupported);
}
