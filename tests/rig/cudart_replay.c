/* SPDX-License-Identifier: Apache-2.0
 *
 * Executable graphs. A lane is a chain of nodes, each of which depends on the one before: an internal stream at replay, with
 * marks for the edges between lanes. Lane 0 is the stream that the graph is launched into. What one stream captured one
 * behind the other may thus run at once where its dependencies do not forbid it, as on a GPU. No cycle of waits can arise:
 * every wait is for a node captured earlier.
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
    size_t awaiters; /* steps that depend on it */
    bool needs_mark; /* one of another lane does */
};

struct lane {
    size_t last; /* step */
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

static void add_step(struct rt_exec *exec, const struct rt_node *node)
{
    struct step *step = &exec->steps[exec->step_count++];

    *step = (struct step){ .kind = node->kind,
                           .type = node->type,
                           .piece = node->piece,
                           .event = node->event,
                           .dep_count = node->deps.count,
                           .device = node->device };
    if (step->piece)
        rt_piece_ref(step->piece);
    if (step->event)
        step->event->refs++;
    step->deps = rt_alloc((node->deps.count + 1) * sizeof(size_t));
    for (size_t i = 0; i < node->deps.count; i++) {
        step->deps[i] = node->deps.list[i]->index;
        exec->steps[step->deps[i]].awaiters++;
    }
}

/* Behind the last step of a lane. A record leaves the lane to what else depends on that step, or each would need a new one. */
static bool may_follow(const struct rt_exec *exec, const struct step *step, size_t dep)
{
    const struct step *before = &exec->steps[dep];
    const struct lane *lane = &exec->lanes[before->lane];

    return lane->last == dep && lane->device == step->device &&
           (step->kind != RT_NODE_RECORD || before->kind == RT_NODE_RECORD ||
            before->awaiters == 1);
}

static size_t lane_for(struct rt_exec *exec, const struct step *step)
{
    for (size_t i = 0; i < step->dep_count; i++) {
        if (may_follow(exec, step, step->deps[i]))
            return exec->steps[step->deps[i]].lane;
    }
    exec->lanes = rt_grow(exec->lanes, exec->lane_count, &exec->lane_room, sizeof(*exec->lanes));
    exec->lanes[exec->lane_count] = (struct lane){ .device = step->device };
    return exec->lane_count++;
}

static void choose_lanes(struct rt_exec *exec)
{
    for (size_t i = 0; i < exec->step_count; i++) {
        struct step *step = &exec->steps[i];

        step->lane = lane_for(exec, step);
        exec->lanes[step->lane].last = i;
        for (size_t d = 0; d < step->dep_count; d++) {
            struct step *dep = &exec->steps[step->deps[d]];

            dep->needs_mark |= dep->lane != step->lane;
        }
    }
}

/* `late` waits for `early`; `seen` is zeroed and has room for all steps. */
static bool is_behind(const struct rt_exec *exec, size_t late, size_t early, bool *seen)
{
    const struct step *step = &exec->steps[late];

    seen[late] = true;
    for (size_t i = 0; i < step->dep_count; i++) {
        size_t dep = step->deps[i];

        if (dep == early || (dep > early && !seen[dep] && is_behind(exec, dep, early, seen)))
            return true;
    }
    return false;
}

/* Whoever waits for the event waits for one of them, and nobody knows which. */
static void check_records(const struct rt_exec *exec)
{
    for (size_t late = 0; late < exec->step_count; late++) {
        size_t early = late;
        bool *seen;

        while (exec->steps[late].kind == RT_NODE_RECORD && early > 0) {
            early--;
            if (exec->steps[early].kind != RT_NODE_RECORD ||
                exec->steps[early].event != exec->steps[late].event)
                continue;
            seen = rt_alloc(exec->step_count * sizeof(*seen));
            if (!is_behind(exec, late, early, seen))
                lcrig_fail(
                    "two nodes of a graph record one event, and neither waits for the other");
            free(seen);
            break;
        }
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
    choose_lanes(exec);
    check_records(exec);
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
                                .device = step->device };
        struct rt_nodes deps = { 0 };

        for (size_t d = 0; d < step->dep_count; d++)
            rt_nodes_add(&deps, nodes[step->deps[d]]);
        nodes[i] = rt_graph_add(graph, &like, deps.count ? &deps : &stream->deps);
        rt_nodes_clear(&deps);
        if (!step->awaiters)
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
