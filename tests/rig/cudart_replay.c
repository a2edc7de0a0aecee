/* SPDX-License-Identifier: Apache-2.0
 *
 * Executable graphs. What one captured stream did is a lane: an internal stream at replay, with marks for the edges
 * between lanes. Lane 0 is the stream that the graph is launched into. A lane keeps the order of capture, so it is at
 * least as ordered as the graph, and no cycle of waits can arise: every wait is for a node captured earlier.
 */
#include "tests/rig/cudart_graph.h"

#include <stdlib.h>

struct step {
    enum rt_node_kind kind;
    enum cudaGraphNodeType type;
    struct rt_piece *piece; /* owned */
    struct rt_event *event; /* owned */
    size_t *deps;
    size_t dep_count;
    size_t lane;
    int device;
    bool is_awaited; /* some step depends on it */
    bool needs_mark; /* one of another lane does */
};

struct lane {
    unsigned long long key; /* the captured stream's id */
    int device;
    struct rt_stream *stream; /* NULL for lane 0 */
};

struct rt_exec {
    enum rt_magic magic;
    unsigned long long flags;
    struct step *steps;
    size_t step_count;
    struct lane *lanes;
    size_t lane_count, lane_room;
    struct rt_mark
        *end; /* of the latest launch: the next one waits for it, wherever it is launched */
    struct rt_holdings objects;
};

static size_t lane_of(struct rt_exec *exec, const struct rt_node *node)
{
    for (size_t i = 0; i < exec->lane_count; i++) {
        if (exec->lanes[i].key == node->lane)
            return i;
    }
    exec->lanes = rt_grow(exec->lanes, exec->lane_count, &exec->lane_room, sizeof(*exec->lanes));
    exec->lanes[exec->lane_count] = (struct lane){ node->lane, node->device, NULL };
    return exec->lane_count++;
}

static void add_step(struct rt_exec *exec, const struct rt_node *node)
{
    struct step *step = &exec->steps[exec->step_count++];

    *step = (struct step){ .kind = node->kind,
                           .type = node->type,
                           .piece = node->piece,
                           .event = node->event,
                           .dep_count = node->deps.count,
                           .lane = lane_of(exec, node),
                           .device = node->device };
    if (step->piece)
        rt_piece_ref(step->piece);
    if (step->event)
        step->event->refs++;
    step->deps = rt_alloc((node->deps.count + 1) * sizeof(size_t));
    for (size_t i = 0; i < node->deps.count; i++) {
        struct step *dep = &exec->steps[node->deps.list[i]->index];

        step->deps[i] = node->deps.list[i]->index;
        dep->is_awaited = true;
        if (dep->lane != step->lane)
            dep->needs_mark = true;
    }
}

static struct rt_exec *instantiate(const struct rt_graph *graph, unsigned long long flags)
{
    struct rt_exec *exec = rt_alloc(sizeof(*exec));

    exec->magic = RT_EXEC;
    exec->flags = flags;
    exec->steps = rt_alloc((graph->nodes.count + 1) * sizeof(*exec->steps));
    for (size_t i = 0; i < graph->nodes.count; i++)
        add_step(exec, graph->nodes.list[i]);
    for (size_t i = 1; i < exec->lane_count; i++)
        exec->lanes[i].stream = rt_stream_new(exec->lanes[i].device, cudaStreamNonBlocking, 0,
                                              true);
    rt_holdings_copy(&exec->objects, &graph->objects);
    rt_alive[RT_KIND_EXEC]++;
    return exec;
}

static cudaError_t instantiate_handle(cudaGraphExec_t *out, cudaGraph_t handle,
                                      unsigned long long flags)
{
    struct rt_graph *graph;
    cudaError_t err;

    rt_lock();
    err = out ? rt_graph_find(handle, &graph) : cudaErrorInvalidValue;
    if (!err)
        *out = (cudaGraphExec_t)instantiate(graph, flags);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : instantiate_handle(out, graph, flags);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph,
                                          unsigned long long flags)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : instantiate_handle(out, graph, flags);
}

static cudaError_t find_exec(cudaGraphExec_t handle, struct rt_exec **out)
{
    struct rt_exec *exec = (struct rt_exec *)handle;

    if (!exec || exec->magic != RT_EXEC)
        return cudaErrorInvalidValue;
    *out = exec;
    return cudaSuccess;
}

/* Launches under way have references of their own to all they need. */
static void free_exec(struct rt_exec *exec)
{
    for (size_t i = 0; i < exec->step_count; i++) {
        if (exec->steps[i].piece)
            rt_piece_unref(exec->steps[i].piece);
        if (exec->steps[i].event)
            rt_event_unref(exec->steps[i].event);
        free(exec->steps[i].deps);
    }
    for (size_t i = 1; i < exec->lane_count; i++)
        rt_stream_close(exec->lanes[i].stream);
    free(exec->steps);
    free(exec->lanes);
    rt_mark_unref(exec->end);
    rt_holdings_clear(&exec->objects);
    exec->magic = RT_DEAD;
    rt_alive[RT_KIND_EXEC]--;
    rt_retire(exec);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle)
{
    struct rt_exec *exec;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_exec(handle, &exec);
    if (!err)
        free_exec(exec);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphExecGetFlags(cudaGraphExec_t handle, unsigned long long *flags)
{
    struct rt_exec *exec;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_exec(handle, &exec);
    if (!err)
        *flags = exec->flags;
    rt_unlock();
    return rt_return(err);
}

static void push_body(struct rt_stream *stream, const struct step *step)
{
    struct rt_mark *mark;

    switch (step->kind) {
    case RT_NODE_WORK: rt_push_work(stream, step->piece); break;
    case RT_NODE_EMPTY: break;
    case RT_NODE_RECORD:
        mark = rt_push_record(stream);
        rt_event_set_mark(step->event, mark);
        rt_mark_unref(mark);
        break;
    case RT_NODE_WAIT:
        if (step->event->mark)
            rt_push_wait(stream, step->event->mark);
        break;
    }
}

static void push_steps(struct rt_exec *exec, struct rt_stream *stream)
{
    struct rt_mark **marks = rt_alloc((exec->step_count + 1) * sizeof(struct rt_mark *));

    for (size_t i = 0; i < exec->step_count; i++) {
        const struct step *step = &exec->steps[i];
        struct rt_stream *lane = step->lane ? exec->lanes[step->lane].stream : stream;

        for (size_t d = 0; d < step->dep_count; d++) {
            if (exec->steps[step->deps[d]].lane != step->lane)
                rt_push_wait(lane, marks[step->deps[d]]);
        }
        push_body(lane, step);
        if (step->needs_mark)
            marks[i] = rt_push_record(lane);
    }
    for (size_t i = 0; i < exec->step_count; i++)
        rt_mark_unref(marks[i]);
    free(marks);
}

/* The stream's next item waits for all lanes. */
static void launch(struct rt_exec *exec, struct rt_stream *stream)
{
    struct rt_mark *mark;

    if (exec->end)
        rt_push_wait(stream, exec->end);
    mark = rt_push_record(stream);
    for (size_t i = 1; i < exec->lane_count; i++)
        rt_push_wait(exec->lanes[i].stream, mark);
    rt_mark_unref(mark);
    push_steps(exec, stream);
    for (size_t i = 1; i < exec->lane_count; i++) {
        mark = rt_push_record(exec->lanes[i].stream);
        rt_push_wait(stream, mark);
        rt_mark_unref(mark);
    }
    rt_holdings_push(stream, &exec->objects);
    rt_mark_unref(exec->end);
    exec->end = rt_push_record(stream);
}

/* A launch inside a capture: the nodes join the graph being captured. */
static cudaError_t launch_into_capture(struct rt_exec *exec, struct rt_stream *stream)
{
    struct rt_node **nodes = rt_alloc((exec->step_count + 1) * sizeof(struct rt_node *));
    struct rt_nodes leaves = { 0 };
    struct rt_graph *graph;
    cudaError_t err = rt_capture_graph(stream, &graph);

    for (size_t i = 0; !err && i < exec->step_count; i++) {
        const struct step *step = &exec->steps[i];
        struct rt_node like = { .kind = step->kind,
                                .type = step->type,
                                .piece = step->piece,
                                .event = step->event,
                                .device = step->device,
                                .lane = step->lane ? exec->lanes[step->lane].stream->id
                                                   : stream->id };
        struct rt_nodes deps = { 0 };

        for (size_t d = 0; d < step->dep_count; d++)
            rt_nodes_add(&deps, nodes[step->deps[d]]);
        nodes[i] = rt_graph_add(graph, &like, deps.count ? &deps : &stream->deps);
        rt_nodes_clear(&deps);
        if (!step->is_awaited)
            rt_nodes_add(&leaves, nodes[i]);
    }
    if (!err && leaves.count)
        rt_nodes_copy(&stream->deps, &leaves);
    if (!err)
        rt_holdings_copy(&graph->objects, &exec->objects);
    rt_nodes_clear(&leaves);
    free(nodes);
    return err;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle)
{
    struct rt_exec *exec;
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_exec(handle, &exec);
    if (!err)
        err = rt_stream_find(stream_handle, &stream);
    if (err)
        goto unlock;
    if (stream->capture) {
        err = launch_into_capture(exec, stream);
        goto unlock;
    }
    err = rt_stream_join_legacy(stream);
    if (!err)
        launch(exec, stream);

unlock:
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t handle, cudaStream_t stream)
{
    (void)handle;
    (void)stream;
    return rt_enter(__func__);
}
