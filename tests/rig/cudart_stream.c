/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams: queues, their workers, the default stream's implicit order.
 */
#include "tests/rig/cudart_internal.h"

#include <signal.h>
#include <stdlib.h>

/* All streams but internal lanes, of all devices; the head is no stream. */
static struct rt_stream all = { .prev = &all, .next = &all };
static unsigned long long last_id;

/* cudaStreamPerThread: one array per thread, freed with it. */
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static pthread_key_t per_thread_key;

static void add_item(struct rt_stream *stream, enum rt_item_kind kind, struct rt_piece *piece,
                     struct rt_mark *mark);

static void run_piece(struct rt_stream *stream, struct rt_piece *piece)
{
    rt_unlock();
    rt_delay(&stream->random, stream->device, stream->number);
    rt_lock();
    /* The process is on its way out: what the piece needs may be gone. */
    while (rt_exiting)
        pthread_cond_wait(&stream->wake, &rt_lock_);
    rt_unlock();
    rt_use_begin(piece->work.name, stream->id);
    piece->work.run(piece->work.arg);
    rt_use_end();
    rt_lock();
}

static void do_item(struct rt_stream *stream, struct rt_item *item)
{
    switch (item->kind) {
    case RT_WORK:
        run_piece(stream, item->piece);
        rt_piece_unref(item->piece);
        break;
    case RT_HOLD: rt_piece_unref(item->piece); break;
    case RT_RECORD:
        rt_mark_finish(item->mark);
        rt_mark_unref(item->mark);
        break;
    case RT_WAIT:
        rt_mark_wait(item->mark);
        rt_mark_unref(item->mark);
        break;
    }
    free(item);
}

static void free_stream(struct rt_stream *stream)
{
    pthread_cond_destroy(&stream->wake);
    rt_nodes_clear(&stream->deps);
    if (stream->next) {
        stream->prev->next = stream->next;
        stream->next->prev = stream->prev;
    }
    rt_retire(stream);
}

static void *work_off(void *arg)
{
    struct rt_stream *stream = arg;

    lcrig_set_thread_rank(stream->rank);
    rt_lock();
    for (;;) {
        struct rt_item *item = stream->head;

        if (!item && stream->is_closing)
            break;
        if (!item) {
            pthread_cond_wait(&stream->wake, &rt_lock_);
            continue;
        }
        stream->head = item->next;
        if (!stream->head)
            stream->tail = &stream->head;
        stream->is_busy = true;
        do_item(stream, item);
        stream->is_busy = false;
        /* Releases of what this item held must not wait for the next one. */
        rt_unlock();
        rt_lock();
    }
    free_stream(stream);
    rt_unlock();
    return NULL;
}

/* Workers take no signals: those are the program's. Detached: at exit they may be waiting for another rank. */
static void start_worker(struct rt_stream *stream)
{
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t every, before;
    int err;

    sigfillset(&every);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    err = pthread_create(&thread, &attr, work_off, stream);
    if (!err)
        pthread_setname_np(thread, "rig-stream");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (err)
        lcrig_fail("cannot start a stream's thread: error %d", err);
    stream->has_worker = true;
}

static void add_item(struct rt_stream *stream, enum rt_item_kind kind, struct rt_piece *piece,
                     struct rt_mark *mark)
{
    struct rt_item *item = rt_alloc(sizeof(*item));

    item->kind = kind;
    item->piece = piece;
    item->mark = mark;
    *stream->tail = item;
    stream->tail = &item->next;
    if (!stream->has_worker)
        start_worker(stream);
    pthread_cond_signal(&stream->wake);
}

bool rt_stream_is_idle(const struct rt_stream *stream)
{
    return !stream->head && !stream->is_busy;
}

void rt_push_work(struct rt_stream *stream, struct rt_piece *piece)
{
    rt_piece_ref(piece);
    if (piece->work.is_kernel)
        rt_work_count++;
    stream->pushed++;
    add_item(stream, RT_WORK, piece, NULL);
}

void rt_push_hold(struct rt_stream *stream, struct rt_piece *piece)
{
    rt_piece_ref(piece);
    add_item(stream, RT_HOLD, piece, NULL);
}

void rt_push_wait(struct rt_stream *stream, struct rt_mark *mark)
{
    if (mark->done)
        return;
    stream->pushed++;
    add_item(stream, RT_WAIT, NULL, rt_mark_ref(mark));
}

struct rt_mark *rt_push_record(struct rt_stream *stream)
{
    struct rt_mark *mark = rt_mark_new();

    if (rt_stream_is_idle(stream))
        rt_mark_finish(mark);
    else
        add_item(stream, RT_RECORD, NULL, rt_mark_ref(mark));
    return mark;
}

struct rt_stream *rt_stream_new(int device, unsigned flags, int priority, bool internal)
{
    struct rt_stream *stream = rt_alloc(sizeof(*stream));

    stream->magic = RT_STREAM;
    stream->device = device;
    stream->flags = flags;
    stream->priority = priority;
    stream->rank = rt_thread_rank();
    stream->id = ++last_id;
    stream->number = ++rt_devices[device].streams;
    stream->is_internal = internal;
    stream->tail = &stream->head;
    pthread_cond_init(&stream->wake, NULL);
    stream->prev = all.prev;
    stream->next = &all;
    all.prev->next = stream;
    all.prev = stream;
    if (!internal)
        rt_alive[RT_KIND_STREAM]++;
    return stream;
}

void rt_stream_close(struct rt_stream *stream)
{
    stream->magic = RT_DEAD;
    stream->is_closing = true;
    if (!stream->is_internal)
        rt_alive[RT_KIND_STREAM]--;
    if (stream->has_worker)
        pthread_cond_signal(&stream->wake);
    else
        free_stream(stream);
}

static void close_per_thread(void *arg)
{
    struct rt_stream **streams = arg;

    if (!rt_is_forked_child()) {
        rt_lock();
        for (int i = 0; i < rt_device_count; i++) {
            if (streams[i])
                rt_stream_close(streams[i]);
        }
        rt_unlock();
    }
    free(streams);
}

static void make_key(void)
{
    if (pthread_key_create(&per_thread_key, close_per_thread))
        lcrig_fail("no thread-specific key left");
}

static struct rt_stream *per_thread_stream(int device)
{
    struct rt_stream **streams;

    pthread_once(&key_once, make_key);
    streams = pthread_getspecific(per_thread_key);
    if (!streams) {
        streams = rt_alloc(RT_DEVICES_MAX * sizeof(struct rt_stream *));
        pthread_setspecific(per_thread_key, streams);
    }
    if (!streams[device])
        streams[device] = rt_stream_new(device, cudaStreamDefault, 0, true);
    return streams[device];
}

static struct rt_stream *legacy_stream(int device)
{
    struct rt_device *dev = &rt_devices[device];

    if (!dev->legacy) {
        dev->legacy = rt_stream_new(device, cudaStreamDefault, 0, true);
        dev->legacy->is_legacy = true;
    }
    return dev->legacy;
}

cudaError_t rt_stream_find(cudaStream_t handle, struct rt_stream **out)
{
    struct rt_stream *stream = (struct rt_stream *)handle;

    if (!handle || handle == cudaStreamLegacy) {
        *out = legacy_stream(rt_current_device());
        return cudaSuccess;
    }
    if (handle == cudaStreamPerThread) {
        *out = per_thread_stream(rt_current_device());
        return cudaSuccess;
    }
    if (stream->magic != RT_STREAM)
        return cudaErrorInvalidResourceHandle;
    *out = stream;
    return cudaSuccess;
}

static bool is_blocking(const struct rt_stream *stream, int device)
{
    return stream->device == device && !stream->is_legacy &&
           !(stream->flags & cudaStreamNonBlocking);
}

struct rt_stream *rt_blocking_stream_in_capture(int device)
{
    for (struct rt_stream *s = all.next; s != &all; s = s->next) {
        if (is_blocking(s, device) && s->capture)
            return s;
    }
    return NULL;
}

void rt_streams_forget_capture(const struct rt_capture *capture)
{
    for (struct rt_stream *s = all.next; s != &all; s = s->next) {
        if (s->capture != capture)
            continue;
        s->capture = NULL;
        rt_nodes_clear(&s->deps);
    }
}

static cudaError_t join_all_to_legacy(struct rt_stream *legacy)
{
    struct rt_stream *captured = rt_blocking_stream_in_capture(legacy->device);

    if (captured)
        return rt_capture_spoil(captured->capture, cudaErrorStreamCaptureImplicit);
    for (struct rt_stream *s = all.next; s != &all; s = s->next) {
        struct rt_mark *mark;

        if (!is_blocking(s, legacy->device) || rt_stream_is_idle(s) ||
            s->legacy_joined == s->pushed)
            continue;
        mark = rt_push_record(s);
        s->legacy_joined = s->pushed;
        rt_push_wait(legacy, mark);
        rt_mark_unref(mark);
    }
    return cudaSuccess;
}

cudaError_t rt_stream_join_legacy(struct rt_stream *stream)
{
    struct rt_stream *legacy = rt_devices[stream->device].legacy;
    struct rt_mark *mark;

    if (stream->is_legacy)
        return join_all_to_legacy(stream);
    if ((stream->flags & cudaStreamNonBlocking) || !legacy || rt_stream_is_idle(legacy) ||
        stream->joined == legacy->pushed)
        return cudaSuccess;
    mark = rt_push_record(legacy);
    stream->joined = legacy->pushed;
    rt_push_wait(stream, mark);
    rt_mark_unref(mark);
    return cudaSuccess;
}

cudaError_t rt_submit(struct rt_stream *stream, struct rt_piece *piece, enum cudaGraphNodeType type)
{
    cudaError_t err;

    if (stream->capture)
        return rt_capture_add(stream, piece, type);
    err = rt_stream_join_legacy(stream);
    if (err)
        return err;
    rt_push_work(stream, piece);
    return cudaSuccess;
}

cudaError_t rt_stream_wait(struct rt_stream *stream)
{
    struct rt_mark *mark;
    cudaError_t err = stream->is_legacy ? rt_stream_join_legacy(stream) : cudaSuccess;

    if (err)
        return err;
    mark = rt_push_record(stream);
    rt_mark_wait(mark);
    rt_mark_unref(mark);
    return cudaSuccess;
}

void rt_device_wait(int device)
{
    struct rt_mark **marks = NULL;
    size_t count = 0, room = 0;

    for (struct rt_stream *s = all.next; s != &all; s = s->next) {
        if (s->device != device || rt_stream_is_idle(s))
            continue;
        marks = rt_grow(marks, count, &room, sizeof(struct rt_mark *));
        marks[count++] = rt_push_record(s);
    }
    for (size_t i = 0; i < count; i++) {
        rt_mark_wait(marks[i]);
        rt_mark_unref(marks[i]);
    }
    free(marks);
}

bool rt_device_is_capturing(int device)
{
    for (struct rt_stream *s = all.next; s != &all; s = s->next) {
        if (s->device == device && s->capture)
            return true;
    }
    return false;
}

void rt_device_close_streams(int device)
{
    struct rt_stream *next;

    for (struct rt_stream *s = all.next; s != &all; s = next) {
        next = s->next;
        if (s->device == device && !s->is_internal && !s->is_closing)
            rt_stream_close(s);
    }
}
