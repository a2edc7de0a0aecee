/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs, shared by capture and replay. Guarded by rt_lock. A graph is a list of nodes in an order that respects
 * their dependencies (nodes depend on earlier nodes only: capture and the adding functions can make no other).
 */
#ifndef LCRIG_CUDART_GRAPH_H
#define LCRIG_CUDART_GRAPH_H

#include "tests/rig/cudart_internal.h"

enum rt_node_kind {
    RT_NODE_EMPTY,
    RT_NODE_WORK,
    RT_NODE_RECORD,
    RT_NODE_WAIT
};

struct rt_node {
    enum rt_node_kind kind;
    enum cudaGraphNodeType type;
    struct rt_graph *graph;
    struct rt_piece *piece; /* RT_NODE_WORK; owned */
    struct rt_event *event; /* RT_NODE_RECORD, RT_NODE_WAIT: external; owned */
    struct rt_nodes deps;
    int device;
    size_t index;    /* in the graph */
    bool is_awaited; /* another node depends on it */
    bool is_loose; /* added by hand or taken out of its stream's dependencies: need not be joined */
};

/* References to user objects; CUDA counts them, so does this. */
struct rt_held {
    struct rt_object *object;
    unsigned refs;
};

struct rt_holdings {
    struct rt_held *list;
    size_t count, room;
};

struct rt_graph {
    enum rt_magic magic;
    struct rt_nodes nodes; /* owned */
    struct rt_holdings objects;
};

struct rt_graph *rt_graph_new(void);
void rt_graph_free(struct rt_graph *graph);
cudaError_t rt_graph_find(cudaGraph_t handle, struct rt_graph **out);
/* All of them are nodes of it; they may be anything. */
bool rt_graph_has(const struct rt_graph *graph, const struct rt_nodes *nodes);
/* Copies deps; takes its own references of piece and event (either may be NULL). */
struct rt_node *rt_graph_add(struct rt_graph *graph, const struct rt_node *like,
                             const struct rt_nodes *deps);

void rt_holdings_add(struct rt_holdings *holdings, struct rt_object *object, unsigned refs);
/* Gives up to `refs` references back; false if fewer are held. */
bool rt_holdings_drop(struct rt_holdings *holdings, struct rt_object *object, unsigned refs);
/* `to` gets references of its own, one for each object. */
void rt_holdings_copy(struct rt_holdings *to, const struct rt_holdings *from);
void rt_holdings_clear(struct rt_holdings *holdings);
/* Keeps the objects alive until the stream comes to this point. */
void rt_holdings_push(struct rt_stream *stream, const struct rt_holdings *holdings);

#endif
