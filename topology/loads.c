/* SPDX-License-Identifier: Apache-2.0
 *
 * What each direction of each link of a node carries. */
#include "topology/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct scale {                          /* the links of one kind of node */
    const struct lc_topo_routes *wires; /* real bandwidths */
    double *gb;                         /* of each edge */
};

static void add_way(struct scale *scale, const struct lc_topo_routes *routes,
                    const struct lc_topo_way *way, double gb)
{
    for (int at = way->cell; at >= 0; at = routes->paths->cells[at].rest)
        scale->gb[routes->paths->cells[at].edge] += gb;
}

/* Without a relay the data takes the wires, whatever way NCCL would have for PXN. */
static void add_send(struct scale *scale, const struct lc_topo_routes *routes, int gpu,
                     struct lc_topo_choice choice, double gb)
{
    struct lc_topo_way way = *lc_topo_gpu_net(routes, choice.relay, choice.net);

    if (choice.relay != gpu)
        add_way(scale, routes, lc_topo_gpu_gpu(routes, gpu, choice.relay), gb);
    if (way.path.type == LC_TOPO_PATH_PXN)
        way = lc_topo_way(routes->paths, routes->gpus[choice.relay], routes->nets[choice.net]);
    add_way(scale, routes, &way, gb);
}

/* GPUs of other nodes than one of kind k. */
static int others(const struct lc_topo_plan *plan, int k)
{
    return plan->gpus - plan->kinds[k].wires->gpu_count;
}

/* Nodes other than one of kind k that are of kind `of`. */
static int nodes_beside(const struct lc_topo_plan *plan, int k, int of)
{
    return plan->kinds[of].nodes - (k == of);
}

/* What one GPU of kind k sends to all GPUs of that number; its share between rails is added up. */
static void send_to(const struct lc_topo_plan *plan, const struct lc_plan_side *side,
                    struct scale *scale, int k, int gpu, int dev, double *crossing)
{
    double part = 1.0 / others(plan, k) / side->slots;

    for (int slot = 0; slot < side->slots; slot++) {
        struct lc_topo_choice choice = *lc_plan_choice(plan, side, k, gpu, dev, slot);
        int receivers = 0;

        if (choice.net < 0)
            continue;
        for (int of = 0; of < plan->kind_count; of++) {
            int remote = plan->kinds[of].gpu_of[dev];
            int net = remote >= 0 ? lc_topo_own_net(side->routes[of], remote, slot) : -1;
            int nodes = remote >= 0 ? nodes_beside(plan, k, of) : 0;

            receivers += nodes;
            if (net >= 0 && plan->kinds[of].rails[net] != plan->kinds[k].rails[choice.net])
                *crossing += nodes * part * plan->kinds[k].nodes;
        }
        add_send(scale, side->routes[k], gpu, choice, receivers * part);
    }
}

static void receive(const struct lc_topo_plan *plan, const struct lc_plan_side *side,
                    struct scale *scale, int k, int gpu)
{
    const struct lc_topo_routes *routes = side->routes[k];
    double gb = 0;

    for (int of = 0; of < plan->kind_count; of++)
        gb += (double)nodes_beside(plan, k, of) * plan->kinds[of].wires->gpu_count /
              (others(plan, of) ? others(plan, of) : 1);
    for (int slot = 0; slot < side->slots; slot++) {
        int net = lc_topo_own_net(routes, gpu, slot);

        if (net >= 0)
            add_way(scale, routes, lc_topo_net_gpu(routes, net, gpu), gb / side->slots);
    }
}

/* The ports that NCCL prefers, of all GPUs. */
static int preferred(const struct lc_topo_routes *routes, int *out)
{
    bool taken[LC_TOPO_MAX_NETS] = { false };
    int count = 0;

    for (int g = 0; g < routes->gpu_count; g++) {
        for (int c = 0; c < lc_topo_net_turns(routes, g); c++) {
            int net = lc_topo_own_net(routes, g, c);

            if (net >= 0 && !taken[net])
                out[count++] = net;
            if (net >= 0)
                taken[net] = true;
        }
    }
    return count;
}

static double port_gbps(const struct lc_topo_routes *routes, int net)
{
    int64_t mbps = routes->topo->nodes[routes->nets[net]].net.mbps;

    mbps = mbps > 0 ? mbps : 10000;
    if (routes->nccl.most_mbps && mbps > routes->nccl.most_mbps)
        mbps = routes->nccl.most_mbps;
    return (double)mbps / 8000;
}

/* Rings of equal speed, as many on each port as it has room for, so that all of them together are fastest. */
static double ring_speed(const struct lc_topo_routes *routes, const int *nets, int count,
                         int *out_rings)
{
    double best = 0;
    double speed = 0;

    for (int i = 0; i < count; i++) {
        double each = port_gbps(routes, nets[i]);
        int rings = 0;

        for (int j = 0; j < count; j++)
            rings += (int)(port_gbps(routes, nets[j]) / each);
        if (rings * each > best) {
            best = rings * each;
            speed = each;
            *out_rings = rings;
        }
    }
    return speed;
}

static void ring(struct scale *scale, const struct lc_topo_routes *routes, int net, double gb)
{
    int head = routes->owner[net] >= 0 ? routes->owner[net] : 0;
    int tail = (head + routes->gpu_count - 1) % routes->gpu_count;
    const struct lc_topo_way *out = lc_topo_gpu_net(routes, tail, net);

    add_way(scale, routes, lc_topo_net_gpu(routes, net, head), gb);
    for (int g = 0; g + 1 < routes->gpu_count; g++) {
        int from = (head + g) % routes->gpu_count;

        add_way(scale, routes, lc_topo_gpu_gpu(routes, from, (from + 1) % routes->gpu_count), gb);
    }
    add_way(scale, routes, out, gb);
}

static void all_reduce(const struct lc_topo_plan *plan, const struct lc_plan_side *side,
                       struct scale *scale, int k)
{
    const struct lc_topo_routes *routes = side->routes[k];
    double gb = 2.0 * (plan->gpus - 1) / plan->gpus;
    int nets[LC_TOPO_MAX_NETS];
    int count = preferred(routes, nets);
    int rings = 1;
    double speed = ring_speed(routes, nets, count, &rings);

    for (int i = 0; i < count; i++)
        ring(scale, routes, nets[i], gb * (int)(port_gbps(routes, nets[i]) / speed) / rings);
}

static const char *device(const struct lc_topo_routes *routes, int vertex, char *out, size_t size)
{
    const struct lc_topo_node *node = vertex == LC_TOPO_SWITCHES ? NULL
                                                                 : &routes->topo->nodes[vertex - 1];

    if (!node)
        return "NVSwitch";
    switch (node->type) {
    case LC_TOPO_GPU:
        (void)snprintf(out, size, "GPU %d", node->gpu.dev >= 0 ? node->gpu.dev : vertex - 1);
        break;
    case LC_TOPO_CPU: (void)snprintf(out, size, "NUMA %d", node->cpu.numa); break;
    case LC_TOPO_NET: (void)snprintf(out, size, "port %.40s", node->id); break;
    case LC_TOPO_NIC:
        node = &routes->topo->nodes[node->parent];
        (void)snprintf(out, size, "NIC %.20s", node->type == LC_TOPO_PCI ? node->id : "");
        break;
    default: (void)snprintf(out, size, "switch %.20s", node->id); break;
    }
    return out;
}

static void name_link(const struct lc_topo_routes *routes, const struct lc_topo_edge *edge,
                      char *out, size_t size)
{
    char from[48];
    char to[48];

    if (edge->type == LC_TOPO_LINK_NET) {
        bool leaves = routes->topo->nodes[edge->to - 1].type == LC_TOPO_NET;

        (void)snprintf(out, size, "%s, %s",
                       device(routes, leaves ? edge->to : edge->from, from, sizeof(from)),
                       leaves ? "out" : "in");
        return;
    }
    (void)snprintf(out, size, "%s to %s", device(routes, edge->from, from, sizeof(from)),
                   device(routes, edge->to, to, sizeof(to)));
}

static void take_most(const struct scale *scale, struct lc_topo_load *most)
{
    for (size_t e = 0; e < scale->wires->paths->edge_count; e++) {
        const struct lc_topo_edge *edge = &scale->wires->paths->edges[e];
        double ms = edge->gbps > 0 ? scale->gb[e] / edge->gbps * 1000 : 0;

        if (ms > most->ms * 1.000001) {
            most->ms = ms;
            name_link(scale->wires, edge, most->link, sizeof(most->link));
        }
    }
}

int lc_plan_weigh(const struct lc_topo_plan *plan, struct lc_plan_side *side)
{
    double crossing = 0;

    for (int k = 0; k < plan->kind_count; k++) {
        struct scale scale = { .wires = plan->kinds[k].wires };
        size_t edges = scale.wires->paths->edge_count;

        scale.gb = calloc(edges + 1, sizeof(*scale.gb));
        if (!scale.gb)
            return -ENOMEM;
        for (int g = 0; g < scale.wires->gpu_count && others(plan, k); g++) {
            for (int d = 0; d < plan->dev_count; d++)
                send_to(plan, side, &scale, k, g, d, &crossing);
            receive(plan, side, &scale, k, g);
        }
        take_most(&scale, &side->loads.all_to_all);
        memset(scale.gb, 0, edges * sizeof(*scale.gb));
        all_reduce(plan, side, &scale, k);
        take_most(&scale, &side->loads.all_reduce);
        free(scale.gb);
    }
    side->loads.between_rails = crossing / plan->gpus;
    return 0;
}
