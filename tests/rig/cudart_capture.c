/* SPDX-License-Identifier: Apache-2.0
 *
 * Stream capture. A captured stream has a set of nodes that its next node will depend on; a record copies the set into
 * the event, a wait merges the event's set into the stream's, which is all there is to fork and join.
 */
#include "tests/rig/cudart_graph.h"

#include <stdlib.h>

struct rt_capture {
    unsigned long long id;
    struct rt_graph *graph;
    size_t first;    /* nodes before it were in the graph already */
    bool owns_graph; /* else the program gave it */
    bool is_spoilt;
    enum cudaStreamCaptureMode mode;
    const char *thread; /* identity of the thread that began it */
    struct rt_stream *origin;
    struct rt_capture *next;
};

static struct rt_capture *captures; /* those going on */
static unsigned long long last_id;

static _Thread_local char thread_anchor;                     /* its address names the thread */
static _Thread_local enum cudaStreamCaptureMode thread_mode; /* global at first */

void rt_nodes_add(struct rt_nodes *set, struct rt_node *node)
{
    for (size_t i = 0; i < set->count; i++) {
        if (set->list[i] == node)
            return;
    }
    set->list = rt_grow(set->list, set->count, &set->room, sizeof(struct rt_node *));
    set->list[set->count++] = node;
}

void rt_nodes_clear(struct rt_nodes *set)
{
    free(set->list);
    *set = (struct rt_nodes){ 0 };
}

static void merge(struct rt_nodes *to, const struct rt_nodes *from)
{
    for (size_t i = 0; i < from->count; i++)
        rt_nodes_add(to, from->list[i]);
}

void rt_nodes_copy(struct rt_nodes *to, const struct rt_nodes *from)
{
    rt_nodes_clear(to);
    merge(to, from);
}

bool rt_nodes_contain(const struct rt_nodes *set, const struct rt_node *node)
{
    for (size_t i = 0; i < set->count; i++) {
        if (set->list[i] == node)
            return true;
    }
    return false;
}

cudaError_t rt_capture_spoil(struct rt_capture *capture, cudaError_t err)
{
    capture->is_spoilt = true;
    return err;
}

cudaError_t rt_capture_check_unsafe(void)
{
    cudaError_t err = cudaSuccess;

    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    for (struct rt_capture *c = captures; c; c = c->next) {
        bool is_mine = c->thread == &thread_anchor && c->mode != cudaStreamCaptureModeRelaxed;
        bool is_global = thread_mode == cudaStreamCaptureModeGlobal &&
                         c->mode == cudaStreamCaptureModeGlobal;

        if (is_mine || is_global)
            err = rt_capture_spoil(c, cudaErrorStreamCaptureUnsupported);
    }
    return err;
}

static cudaError_t add_node(struct rt_stream *stream, struct rt_node *like)
{
    struct rt_node *node;

    if (stream->capture->is_spoilt)
        return cudaErrorStreamCaptureInvalidated;
    like->device = stream->device;
    node = rt_graph_add(stream->capture->graph, like, &stream->deps);
    stream->deps.count = 0;
    rt_nodes_add(&stream->deps, node);
    return cudaSuccess;
}

cudaError_t rt_capture_add(struct rt_stream *stream, struct rt_piece *piece,
                           enum cudaGraphNodeType type)
{
    struct rt_node like = { .kind = RT_NODE_WORK, .type = type, .piece = piece };

    return add_node(stream, &like);
}

cudaError_t rt_capture_record(struct rt_stream *stream, struct rt_event *event, bool external)
{
    struct rt_node like = { .kind = RT_NODE_RECORD,
                            .type = cudaGraphNodeTypeEventRecord,
                            .event = event };

    if (external)
        return add_node(stream, &like);
    if (stream->capture->is_spoilt)
        return cudaErrorStreamCaptureInvalidated;
    rt_mark_unref(event->mark);
    event->mark = NULL;
    event->capture_id = stream->capture->id;
    rt_nodes_copy(&event->deps, &stream->deps);
    return cudaSuccess;
}

cudaError_t rt_capture_graph(struct rt_stream *stream, struct rt_graph **out)
{
    if (stream->capture->is_spoilt)
        return cudaErrorStreamCaptureInvalidated;
    *out = stream->capture->graph;
    return cudaSuccess;
}

static struct rt_capture *find_capture(unsigned long long id)
{
    for (struct rt_capture *c = captures; c; c = c->next) {
        if (c->id == id)
            return c;
    }
    return NULL;
}

cudaError_t rt_capture_wait(struct rt_stream *stream, struct rt_event *event, bool external)
{
    struct rt_node like = { .kind = RT_NODE_WAIT,
                            .type = cudaGraphNodeTypeWaitEvent,
                            .event = event };
    struct rt_capture *capture = stream->capture;

    if (external)
        return add_node(stream, &like);
    if (capture->is_spoilt)
        return cudaErrorStreamCaptureInvalidated;
    if (event->capture_id == capture->id) {
        merge(&stream->deps, &event->deps);
        return cudaSuccess;
    }
    return rt_capture_spoil(capture, find_capture(event->capture_id)
                                         ? cudaErrorStreamCaptureMerge
                                         : cudaErrorStreamCaptureIsolation);
}

cudaError_t rt_capture_join(struct rt_stream *stream, struct rt_event *event)
{
    struct rt_capture *capture = find_capture(event->capture_id);

    if (!capture)
        return cudaErrorCapturedEvent;
    if (capture->is_spoilt)
        return cudaErrorStreamCaptureInvalidated;
    if (stream->is_legacy)
        return rt_capture_spoil(capture, cudaErrorStreamCaptureImplicit);
    stream->capture = capture;
    rt_nodes_copy(&stream->deps, &event->deps);
    return cudaSuccess;
}

static void begin(struct rt_stream *stream, struct rt_graph *graph, const struct rt_nodes *deps,
                  enum cudaStreamCaptureMode mode)
{
    struct rt_capture *capture = rt_alloc(sizeof(*capture));

    capture->id = ++last_id;
    capture->owns_graph = !graph;
    capture->graph = graph ? graph : rt_graph_new();
    capture->first = capture->graph->nodes.count;
    capture->mode = mode;
    capture->thread = &thread_anchor;
    capture->origin = stream;
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    rt_nodes_copy(&stream->deps, deps);
}

static cudaError_t find_beginner(cudaStream_t handle, enum cudaStreamCaptureMode mode,
                                 struct rt_stream **out)
{
    cudaError_t err = rt_stream_find(handle, out);

    if (err)
        return err;
    if ((unsigned)mode > cudaStreamCaptureModeRelaxed)
        return cudaErrorInvalidValue;
    if ((*out)->is_legacy)
        return cudaErrorStreamCaptureUnsupported;
    return (*out)->capture ? cudaErrorIllegalState : cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    struct rt_nodes none = { 0 };
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_beginner(handle, mode, &stream);
    if (!err)
        begin(stream, NULL, &none, mode);
    rt_unlock();
    return rt_return(err);
}

#if CUDART_VERSION >= 12030
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t handle, cudaGraph_t graph_handle,
                                          const cudaGraphNode_t *deps,
                                          const cudaGraphEdgeData *edges, size_t count,
                                          enum cudaStreamCaptureMode mode)
{
    struct rt_nodes set = { (struct rt_node **)deps, count, count };
    struct rt_graph *graph;
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    (void)edges; /* plain edges only */
    if (err)
        return err;
    rt_lock();
    err = find_beginner(handle, mode, &stream);
    if (!err)
        err = rt_graph_find(graph_handle, &graph);
    if (!err && !rt_graph_has(graph, &set))
        err = cudaErrorInvalidValue;
    if (!err)
        begin(stream, graph, &set, mode);
    rt_unlock();
    return rt_return(err);
}
#endif

static bool is_joined(const struct rt_capture *capture)
{
    const struct rt_nodes *nodes = &capture->graph->nodes;

    for (size_t i = capture->first; i < nodes->count; i++) {
        const struct rt_node *node = nodes->list[i];

        if (!node->is_awaited && !node->is_loose && !rt_nodes_contain(&capture->origin->deps, node))
            return false;
    }
    return true;
}

/* The result is the graph, or NULL if it must not be used. */
static struct rt_graph *end(struct rt_capture *capture, bool keep)
{
    struct rt_graph *graph = capture->graph;

    rt_streams_forget_capture(capture);
    for (struct rt_capture **at = &captures; *at; at = &(*at)->next) {
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    }
    if (!keep && capture->owns_graph)
        rt_graph_free(graph);
    free(capture);
    return keep ? graph : NULL;
}

static cudaError_t end_capture(struct rt_stream *stream, struct rt_graph **out)
{
    struct rt_capture *capture = stream->capture;
    cudaError_t err = cudaSuccess;

    *out = NULL;
    if (!capture)
        return cudaErrorIllegalState;
    if (capture->origin != stream)
        return rt_capture_spoil(capture, cudaErrorStreamCaptureUnmatched);
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != &thread_anchor)
        return cudaErrorStreamCaptureWrongThread;
    if (capture->is_spoilt)
        err = cudaErrorStreamCaptureInvalidated;
    else if (!is_joined(capture))
        err = cudaErrorStreamCaptureUnjoined;
    *out = end(capture, !err);
    return err;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *out)
{
    struct rt_graph *graph = NULL;
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!out)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    err = rt_stream_find(handle, &stream);
    if (!err)
        err = end_capture(stream, &graph);
    *out = (cudaGraph_t)graph;
    rt_unlock();
    return rt_return(err);
}

static enum cudaStreamCaptureStatus status_of(const struct rt_stream *stream)
{
    if (!stream->capture)
        return cudaStreamCaptureStatusNone;
    return stream->capture->is_spoilt ? cudaStreamCaptureStatusInvalidated
                                      : cudaStreamCaptureStatusActive;
}

/* The default stream has no answer while a blocking stream is captured; asking spoils nothing. */
static cudaError_t find_asked(cudaStream_t handle, struct rt_stream **out)
{
    cudaError_t err = rt_stream_find(handle, out);

    if (!err && (*out)->is_legacy && rt_blocking_stream_in_capture((*out)->device))
        err = cudaErrorStreamCaptureImplicit;
    return err;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = status ? find_asked(handle, &stream) : cudaErrorInvalidValue;
    if (!err)
        *status = status_of(stream);
    rt_unlock();
    return rt_return(err);
}

struct info {
    enum cudaStreamCaptureStatus *status;
    unsigned long long *id;
    cudaGraph_t *graph;
    const cudaGraphNode_t **deps;
    size_t *count;
};

static cudaError_t get_info(cudaStream_t handle, const struct info *out)
{
    struct rt_stream *stream;
    cudaError_t err;

    rt_lock();
    err = out->status ? find_asked(handle, &stream) : cudaErrorInvalidValue;
    if (err)
        goto unlock;
    *out->status = status_of(stream);
    if (*out->status != cudaStreamCaptureStatusActive)
        goto unlock;
    if (out->id)
        *out->id = stream->capture->id;
    if (out->graph)
        *out->graph = (cudaGraph_t)stream->capture->graph;
    if (out->deps)
        *out->deps = (const cudaGraphNode_t *)stream->deps.list;
    if (out->count)
        *out->count = stream->deps.count;

unlock:
    rt_unlock();
    return rt_return(err);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **deps, const cudaGraphEdgeData **edges,
                                     size_t *count)
{
    struct info info = { status, id, graph, deps, count };
    cudaError_t err = rt_enter("cudaStreamGetCaptureInfo");

    if (err)
        return err;
    if (edges)
        *edges = NULL; /* plain edges only */
    return get_info(stream, &info);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **deps, size_t *count)
{
    struct info info = { status, id, graph, deps, count };
    cudaError_t err = rt_enter("cudaStreamGetCaptureInfo");

    return err ? err : get_info(stream, &info);
}
#endif

static cudaError_t update_deps_locked(cudaStream_t handle, const struct rt_nodes *nodes,
                                      unsigned flags)
{
    struct rt_stream *stream;
    cudaError_t err;

    if (flags > cudaStreamSetCaptureDependencies)
        return cudaErrorInvalidValue;
    err = rt_stream_find(handle, &stream);
    if (err)
        return err;
    if (!stream->capture)
        return cudaErrorIllegalState;
    if (stream->capture->is_spoilt)
        return cudaErrorStreamCaptureInvalidated;
    if (!rt_graph_has(stream->capture->graph, nodes))
        return cudaErrorInvalidValue;
    if (flags == cudaStreamSetCaptureDependencies) {
        for (size_t i = 0; i < stream->deps.count; i++)
            stream->deps.list[i]->is_loose = true;
        rt_nodes_clear(&stream->deps);
    }
    merge(&stream->deps, nodes);
    return cudaSuccess;
}

static cudaError_t update_deps(cudaStream_t handle, cudaGraphNode_t *deps, size_t count,
                               unsigned flags)
{
    struct rt_nodes nodes = { (struct rt_node **)deps, count, count };
    cudaError_t err = rt_enter("cudaStreamUpdateCaptureDependencies");

    if (err)
        return err;
    rt_lock();
    err = update_deps_locked(handle, &nodes, flags);
    rt_unlock();
    return rt_return(err);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t *deps,
                                                const cudaGraphEdgeData *edges, size_t count,
                                                unsigned flags)
{
    (void)edges; /* plain edges only */
    return update_deps(handle, deps, count, flags);
}
#else
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t *deps,
                                                size_t count, unsigned flags)
{
    return update_deps(handle, deps, count, flags);
}
#endif

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = thread_mode;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!mode || (unsigned)*mode > cudaStreamCaptureModeRelaxed)
        return rt_return(cudaErrorInvalidValue);
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}
