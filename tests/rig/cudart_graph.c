/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs and user objects.
 */
#include "tests/rig/cudart_graph.h"

#include <stdlib.h>

/* The destructor is the release of a piece, so it runs after the lock like all others. */
struct rt_object {
    enum rt_magic magic;
    unsigned refs;
    struct rt_piece *piece;
};

struct rt_graph *rt_graph_new(void)
{
    struct rt_graph *graph = rt_alloc(sizeof(*graph));

    graph->magic = RT_GRAPH;
    rt_alive[RT_KIND_GRAPH]++;
    return graph;
}

static void free_node(struct rt_node *node)
{
    if (node->piece)
        rt_piece_unref(node->piece);
    if (node->event)
        rt_event_unref(node->event);
    rt_nodes_clear(&node->deps);
    free(node);
}

void rt_graph_free(struct rt_graph *graph)
{
    for (size_t i = 0; i < graph->nodes.count; i++)
        free_node(graph->nodes.list[i]);
    rt_nodes_clear(&graph->nodes);
    rt_holdings_clear(&graph->objects);
    graph->magic = RT_DEAD;
    rt_alive[RT_KIND_GRAPH]--;
    rt_retire(graph);
}

cudaError_t rt_graph_find(cudaGraph_t handle, struct rt_graph **out)
{
    struct rt_graph *graph = (struct rt_graph *)handle;

    if (!graph || graph->magic != RT_GRAPH)
        return cudaErrorInvalidValue;
    *out = graph;
    return cudaSuccess;
}

bool rt_graph_has(const struct rt_graph *graph, const struct rt_nodes *nodes)
{
    for (size_t i = 0; i < nodes->count; i++) {
        if (!nodes->list || !rt_nodes_contain(&graph->nodes, nodes->list[i]))
            return false;
    }
    return true;
}

struct rt_node *rt_graph_add(struct rt_graph *graph, const struct rt_node *like,
                             const struct rt_nodes *deps)
{
    struct rt_node *node = rt_alloc(sizeof(*node));

    *node = *like;
    node->graph = graph;
    node->deps = (struct rt_nodes){ 0 };
    node->is_awaited = false;
    rt_nodes_copy(&node->deps, deps);
    for (size_t i = 0; i < deps->count; i++)
        deps->list[i]->is_awaited = true;
    if (node->piece)
        rt_piece_ref(node->piece);
    if (node->event)
        node->event->refs++;
    node->index = graph->nodes.count;
    rt_nodes_add(&graph->nodes, node);
    return node;
}

cudaError_t cudaGraphCreate(cudaGraph_t *out, unsigned flags)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!out || flags)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    *out = (cudaGraph_t)rt_graph_new();
    rt_unlock();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle)
{
    struct rt_graph *graph;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = rt_graph_find(handle, &graph);
    if (!err)
        rt_graph_free(graph);
    rt_unlock();
    return rt_return(err);
}

static cudaError_t add_by_hand(cudaGraphNode_t *out, cudaGraph_t handle,
                               const cudaGraphNode_t *deps, size_t count, struct rt_node *like)
{
    struct rt_nodes set = { (struct rt_node **)deps, count, count };
    struct rt_graph *graph;
    cudaError_t err;

    like->is_loose = true;
    err = rt_graph_find(handle, &graph);
    if (err || !rt_graph_has(graph, &set))
        return cudaErrorInvalidValue;
    *out = (cudaGraphNode_t)rt_graph_add(graph, like, &set);
    return cudaSuccess;
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *out, cudaGraph_t graph,
                                  const cudaGraphNode_t *deps, size_t count)
{
    struct rt_node like = { .kind = RT_NODE_EMPTY, .type = cudaGraphNodeTypeEmpty };
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = add_by_hand(out, graph, deps, count, &like);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *out, cudaGraph_t graph,
                                 const cudaGraphNode_t *deps, size_t count,
                                 const struct cudaHostNodeParams *params)
{
    struct rt_node like = { .kind = RT_NODE_WORK, .type = cudaGraphNodeTypeHost };
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!params || !params->fn)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    like.piece = rt_host_piece(params->fn, params->userData);
    err = add_by_hand(out, graph, deps, count, &like);
    rt_piece_unref(like.piece);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *count)
{
    struct rt_graph *graph;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = count ? rt_graph_find(handle, &graph) : cudaErrorInvalidValue;
    if (err)
        goto unlock;
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < graph->nodes.count ? (cudaGraphNode_t)graph->nodes.list[i] : NULL;
    if (!nodes || *count > graph->nodes.count)
        *count = graph->nodes.count;

unlock:
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!node || !type)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    *type = ((struct rt_node *)node)->type;
    rt_unlock();
    return cudaSuccess;
}

/* User objects */

static void object_drop(struct rt_object *object, unsigned refs)
{
    object->refs -= refs;
    if (object->refs)
        return;
    rt_piece_unref(object->piece);
    object->magic = RT_DEAD;
    rt_alive[RT_KIND_OBJECT]--;
    rt_retire(object);
}

void rt_holdings_add(struct rt_holdings *holdings, struct rt_object *object, unsigned refs)
{
    for (size_t i = 0; i < holdings->count; i++) {
        if (holdings->list[i].object == object) {
            holdings->list[i].refs += refs;
            return;
        }
    }
    holdings->list = rt_grow(holdings->list, holdings->count, &holdings->room,
                             sizeof(*holdings->list));
    holdings->list[holdings->count++] = (struct rt_held){ object, refs };
}

bool rt_holdings_drop(struct rt_holdings *holdings, struct rt_object *object, unsigned refs)
{
    for (size_t i = 0; i < holdings->count; i++) {
        struct rt_held *held = &holdings->list[i];

        if (held->object != object || held->refs < refs)
            continue;
        held->refs -= refs;
        if (!held->refs)
            *held = holdings->list[--holdings->count];
        object_drop(object, refs);
        return true;
    }
    return false;
}

void rt_holdings_copy(struct rt_holdings *to, const struct rt_holdings *from)
{
    for (size_t i = 0; i < from->count; i++) {
        from->list[i].object->refs++;
        rt_holdings_add(to, from->list[i].object, 1);
    }
}

void rt_holdings_clear(struct rt_holdings *holdings)
{
    for (size_t i = 0; i < holdings->count; i++)
        object_drop(holdings->list[i].object, holdings->list[i].refs);
    free(holdings->list);
    *holdings = (struct rt_holdings){ 0 };
}

void rt_holdings_push(struct rt_stream *stream, const struct rt_holdings *holdings)
{
    for (size_t i = 0; i < holdings->count; i++)
        rt_push_hold(stream, holdings->list[i].object->piece);
}

static cudaError_t find_object(cudaUserObject_t handle, unsigned count, struct rt_object **out)
{
    struct rt_object *object = (struct rt_object *)handle;

    if (!object || !count || object->magic != RT_OBJECT)
        return cudaErrorInvalidValue;
    *out = object;
    return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *out, void *ptr, cudaHostFn_t destroy,
                                 unsigned refs, unsigned flags)
{
    struct lcrig_work work = { .name = "user object", .release = destroy, .arg = ptr };
    struct rt_object *object;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!out || !destroy || !refs || flags != cudaUserObjectNoDestructorSync)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    object = rt_alloc(sizeof(*object));
    object->magic = RT_OBJECT;
    object->refs = refs;
    object->piece = rt_piece_new(&work);
    rt_alive[RT_KIND_OBJECT]++;
    rt_unlock();
    *out = (cudaUserObject_t)object;
    return cudaSuccess;
}

cudaError_t cudaUserObjectRetain(cudaUserObject_t handle, unsigned count)
{
    struct rt_object *object;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_object(handle, count, &object);
    if (!err)
        object->refs += count;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count)
{
    struct rt_object *object;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = find_object(handle, count, &object);
    if (!err && object->refs < count)
        lcrig_fail("a user object with %u references is released %u times", object->refs, count);
    if (!err)
        object_drop(object, count);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph_handle, cudaUserObject_t handle,
                                      unsigned count, unsigned flags)
{
    struct rt_graph *graph;
    struct rt_object *object;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = rt_graph_find(graph_handle, &graph);
    if (!err)
        err = find_object(handle, count, &object);
    if (!err && (flags & ~(unsigned)cudaGraphUserObjectMove))
        err = cudaErrorInvalidValue;
    if (!err) {
        if (!flags)
            object->refs += count;
        rt_holdings_add(&graph->objects, object, count);
    }
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph_handle, cudaUserObject_t handle,
                                       unsigned count)
{
    struct rt_graph *graph;
    struct rt_object *object;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = rt_graph_find(graph_handle, &graph);
    if (!err)
        err = find_object(handle, count, &object);
    if (!err && !rt_holdings_drop(&graph->objects, object, count))
        err = cudaErrorInvalidValue;
    rt_unlock();
    return rt_return(err);
}
