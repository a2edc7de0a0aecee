/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's graph of a machine and its search, as 2.28 to 2.30 have them (2.31 looks at a way's type before its bandwidth):
 * breadth first from every GPU and port; a way is replaced by one of the same length and more bandwidth. Of equal ways
 * the first one stands, so the order of a vertex's links is part of the rule. */
#include "topology/paths.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_OF_KIND 576 /* NCCL_TOPO_MAX_NODES of the newest release */
#define LOCAL       5000.0
#define SWITCHES    LC_TOPO_SWITCHES
#define WHOLE       (-1) /* a switch that has its parts, and becomes none */
#define MAX_PARTS   128  /* of one switch; NCCL holds as many links */

#define LINK_NVL LC_TOPO_LINK_NVL
#define LINK_C2C LC_TOPO_LINK_C2C
#define LINK_PCI LC_TOPO_LINK_PCI
#define LINK_SYS LC_TOPO_LINK_SYS
#define LINK_NET LC_TOPO_LINK_NET

/* The links of a vertex stand by bandwidth, equal ones as they came. */
static void insert(struct lc_topo_paths *paths, int e)
{
    int *at = &paths->first[paths->edges[e].from];

    while (*at >= 0 && paths->edges[*at].gbps >= paths->edges[e].gbps)
        at = &paths->edges[*at].next;
    paths->edges[e].next = *at;
    *at = e;
}

static void unlink_edge(struct lc_topo_paths *paths, int e)
{
    int *at = &paths->first[paths->edges[e].from];

    while (*at != e)
        at = &paths->edges[*at].next;
    *at = paths->edges[e].next;
}

static void append(struct lc_topo_paths *paths, int e)
{
    int *at = &paths->first[paths->edges[e].from];

    while (*at >= 0)
        at = &paths->edges[*at].next;
    paths->edges[e].next = -1;
    *at = e;
}

static int add_edge(struct lc_topo_paths *paths, int from, int to, enum lc_topo_link_type type,
                    double gbps)
{
    for (int at = paths->first[from]; at >= 0; at = paths->edges[at].next) {
        struct lc_topo_edge *edge = &paths->edges[at];

        if (edge->to == to && edge->type == type) { /* links side by side count together */
            unlink_edge(paths, at);
            edge->gbps += gbps;
            insert(paths, at);
            return 0;
        }
    }
    if (paths->edge_count == paths->edge_room) {
        size_t room = 2 * paths->edge_room;
        void *edges = realloc(paths->edges, room * sizeof(*paths->edges));

        if (!edges)
            return -ENOMEM;
        paths->edges = edges;
        paths->edge_room = room;
    }
    paths->edges[paths->edge_count] = (struct lc_topo_edge){ from, to, -1, type, gbps };
    insert(paths, (int)paths->edge_count++);
    return 0;
}

static int connect(struct lc_topo_paths *paths, int a, int b, enum lc_topo_link_type type,
                   double gbps)
{
    int err = add_edge(paths, a, b, type, gbps);

    return err ? err : add_edge(paths, b, a, type, gbps);
}

static int vertex(int node)
{
    return node + 1;
}

/* GB/s of one NVLink, or of one XGMI link by RCCL's table. */
static double link_gbps(const struct lc_topo *topo, int gpu, enum lc_topo_type type)
{
    const char *gcn = lc_topo_attribute(topo, gpu, "gcn");
    int sm = topo->nodes[gpu].gpu.sm;

    if (type == LC_TOPO_XGMI) {
        if (gcn && (strncmp(gcn, "94", 2) == 0 || strncmp(gcn, "gfx94", 5) == 0))
            return 48.0;
        return gcn && (strcmp(gcn, "910") == 0 || strncmp(gcn, "gfx90a", 6) == 0) ? 36.0 : 24.0;
    }
    if (sm >= 100)
        return 40.1;
    if (sm >= 90)
        return 20.6;
    if (sm == 86)
        return 12.0;
    return sm >= 60 && sm < 70 ? 18.0 : 20.0;
}

static double cpu_gbps(const struct lc_topo_cpu *cpu)
{
    const char *vendor = cpu->vendor ? cpu->vendor : "";

    if (cpu->arch && strcmp(cpu->arch, "ppc64") == 0)
        return 32.0;
    if (cpu->arch && strcmp(cpu->arch, "arm64") == 0)
        return 6.0;
    if (strcmp(vendor, "AuthenticAMD") == 0)
        return 16.0;
    if (strcmp(vendor, "CentaurHauls") == 0 || strcmp(vendor, "  Shanghai  ") == 0)
        return cpu->family == 7 && cpu->model == 0x5b ? 9.0 : 6.0;
    if (strcmp(vendor, "GenuineIntel") != 0)
        return LOCAL;
    if (cpu->family != 6)
        return 6.0;
    return cpu->model >= 0xcf ? 40.0 : cpu->model >= 0x8f ? 22.0 : cpu->model >= 0x55 ? 10.0 : 6.0;
}

/* Broadcom's switches show themselves in two levels and are one: NCCL merges them. */
static int switch_generation(const struct lc_topo_pci *pci, int level)
{
    if (pci->vendor != 0x1000 || pci->subvendor != 0x1000)
        return 0;
    if (pci->device == 0xc010 && pci->subdevice >> 12 == 0xa)
        return 4;
    return pci->device == 0xc030 && pci->subdevice >> 12 == level ? 5 : 0;
}

/* NCCL numbers the cards without a PCI function alike whatever their NUMA node: the first one has all their ports. */
static int first_virtual(const struct lc_topo_paths *paths, int nic)
{
    const struct lc_topo *topo = paths->topo;
    int at = lc_topo_next(topo, LC_TOPO_NIC, -1);

    while (at != nic && (topo->nodes[topo->nodes[at].parent].type != LC_TOPO_CPU ||
                         topo->nodes[topo->nodes[at].parent].cpu.host !=
                             topo->nodes[topo->nodes[nic].parent].cpu.host))
        at = lc_topo_next(topo, LC_TOPO_NIC, at);
    return at;
}

static void merge_cards(struct lc_topo_paths *paths)
{
    const struct lc_topo_node *nodes = paths->topo->nodes;

    for (int i = 0; i < paths->topo->count; i++) {
        paths->merged[i] = i;
        if (nodes[i].type == LC_TOPO_NIC && nodes[nodes[i].parent].type == LC_TOPO_CPU)
            paths->merged[i] = first_virtual(paths, i);
    }
}

static const struct lc_topo_pci *switch_at(const struct lc_topo_paths *paths, int at)
{
    const struct lc_topo_node *node = at == SWITCHES ? NULL : &paths->topo->nodes[at - 1];

    return node && node->type == LC_TOPO_PCI ? &node->pci : NULL;
}

/* The links of a part become the last ones of the whole. */
static void flatten(struct lc_topo_paths *paths, int whole, int part)
{
    while (paths->first[part] >= 0) {
        int e = paths->first[part];
        struct lc_topo_edge *edge = &paths->edges[e];
        int back = paths->first[edge->to];

        paths->first[part] = edge->next;
        if (edge->to == whole)
            continue;
        edge->from = whole;
        append(paths, e);
        while (back >= 0 && paths->edges[back].to != part)
            back = paths->edges[back].next;
        if (back >= 0)
            paths->edges[back].to = whole;
    }
}

static void merge_switch(struct lc_topo_paths *paths, int whole)
{
    const struct lc_topo_pci *pci = switch_at(paths, whole);
    int generation = pci ? switch_generation(pci, 0) : 0;
    int parts[MAX_PARTS];
    int count = 0;

    if (!generation || paths->merged[whole - 1] != whole - 1)
        return;
    for (int e = paths->first[whole]; e >= 0; e = paths->edges[e].next) {
        int part = paths->edges[e].to;
        const struct lc_topo_pci *other = switch_at(paths, part);

        if (!other || switch_generation(other, 1) != generation || count == MAX_PARTS ||
            paths->merged[part - 1] != part - 1)
            continue;
        unlink_edge(paths, e);
        paths->merged[part - 1] = whole - 1;
        parts[count++] = part;
    }
    for (int i = 0; i < count; i++)
        flatten(paths, whole, parts[i]);
    paths->merged[whole - 1] = WHOLE;
}

/* The link that leads up stands last. */
static void sort_links(struct lc_topo_paths *paths, int at, int up, int depth)
{
    for (int e = up < 0 ? -1 : paths->first[at]; e >= 0; e = paths->edges[e].next) {
        if (paths->edges[e].to != up)
            continue;
        unlink_edge(paths, e);
        append(paths, e);
        break;
    }
    for (int e = paths->first[at]; e >= 0 && depth < 2 * LC_TOPO_MAX_DEPTH;
         e = paths->edges[e].next) {
        if (paths->edges[e].type == LINK_PCI && paths->edges[e].to != up)
            sort_links(paths, paths->edges[e].to, at, depth + 1);
    }
}

/* Of NVLinks and XGMI those between GPUs are there once in each direction. */
static int add_link(struct lc_topo_paths *paths, int at)
{
    const struct lc_topo *topo = paths->topo;
    const struct lc_topo_link *link = &topo->nodes[at].link;
    int gpu = topo->nodes[at].parent;
    double gbps = link->count * link_gbps(topo, gpu, topo->nodes[at].type);
    int peer = lc_topo_above(topo, gpu, LC_TOPO_CPU);

    if (link->target_class == 0x068001)
        return connect(paths, vertex(gpu), vertex(peer), LINK_NVL, gbps);
    if (link->target_class == 0x068000)
        return connect(paths, vertex(gpu), SWITCHES, LINK_NVL, gbps);
    if (link->node < 0)
        return 0;
    peer = lc_topo_find_child(topo, link->node, LC_TOPO_GPU, NULL, NULL);
    return peer < 0 || peer == gpu ? 0 : add_edge(paths, vertex(gpu), vertex(peer), LINK_NVL, gbps);
}

static int add_c2c(struct lc_topo_paths *paths, int at)
{
    const struct lc_topo_node *node = &paths->topo->nodes[at];

    return connect(paths, vertex(node->parent),
                   vertex(lc_topo_above(paths->topo, node->parent, LC_TOPO_CPU)), LINK_C2C,
                   (double)node->link.mbps * node->link.count / 1000);
}

/* Switches that are wired to each other beside the tree. */
static int add_pcilink(struct lc_topo_paths *paths, int at)
{
    const struct lc_topo_node *nodes = paths->topo->nodes;
    int from = nodes[at].parent;
    int to = nodes[at].link.node;

    if (to < 0 || nodes[from].type != LC_TOPO_PCI || nodes[from].pci.kind != LC_TOPO_PCI_BRIDGE ||
        nodes[to].pci.kind != LC_TOPO_PCI_BRIDGE)
        return 0;
    return add_edge(paths, vertex(from), vertex(to), LC_TOPO_LINK_LOC, LOCAL);
}

static int add_links(struct lc_topo_paths *paths, enum lc_topo_type type)
{
    int err = 0;

    for (int at = lc_topo_next(paths->topo, type, -1); at >= 0 && !err;
         at = lc_topo_next(paths->topo, type, at))
        err = type == LC_TOPO_C2C       ? add_c2c(paths, at)
              : type == LC_TOPO_PCILINK ? add_pcilink(paths, at)
                                        : add_link(paths, at);
    return err;
}

static int add_cpu(struct lc_topo_paths *paths, int cpu)
{
    const struct lc_topo *topo = paths->topo;
    int err = 0;

    for (int at = lc_topo_next(topo, LC_TOPO_CPU, -1); at >= 0 && !err;
         at = lc_topo_next(topo, LC_TOPO_CPU, at)) {
        if (at != cpu && topo->nodes[at].cpu.host == topo->nodes[cpu].cpu.host)
            err = add_edge(paths, vertex(cpu), vertex(at), LINK_SYS,
                           cpu_gbps(&topo->nodes[cpu].cpu));
    }
    return err;
}

static double port_gbps(const struct lc_topo_paths *paths, const struct lc_topo_node *port)
{
    int64_t mbps = port->net.mbps > 0 ? port->net.mbps : 10000;

    if (paths->most_mbps && mbps > paths->most_mbps)
        mbps = paths->most_mbps;
    return (double)mbps / 8000;
}

static int add_children(struct lc_topo_paths *paths, int index);

/* What stands for a node in the graph: a GPU's PCI function is its GPU, a NIC's is the NIC. What hangs below a node is
 * connected before the node is, but where the node is a card of a CPU. */
static int add_node(struct lc_topo_paths *paths, int index)
{
    const struct lc_topo_node *nodes = paths->topo->nodes;
    const struct lc_topo_node *node = &nodes[index];
    int above = node->parent;
    bool virtual = node->type == LC_TOPO_NIC && nodes[above].type == LC_TOPO_CPU;
    int err = 0;

    if (virtual && paths->merged[index] == index)
        err = connect(paths, vertex(above), vertex(index), LINK_PCI, LOCAL);
    if (!err)
        err = add_children(paths, index);
    if (err || virtual)
        return err;
    switch (node->type) {
    case LC_TOPO_PCI:
        if (node->pci.kind != LC_TOPO_PCI_BRIDGE)
            return 0;
        return connect(paths, vertex(index), vertex(above), LINK_PCI, lc_topo_pci_gbps(&node->pci));
    case LC_TOPO_GPU:
    case LC_TOPO_NIC:
        return connect(paths, vertex(index), vertex(nodes[above].parent), LINK_PCI,
                       lc_topo_pci_gbps(&nodes[above].pci));
    case LC_TOPO_NET:
        if (!lc_topo_is_counted(paths->topo, index))
            return 0;
        return connect(paths, vertex(index), vertex(paths->merged[above]), LINK_NET,
                       port_gbps(paths, node));
    default: return 0;
    }
}

static int add_children(struct lc_topo_paths *paths, int index)
{
    int err = 0;

    for (int at = paths->topo->nodes[index].child; at >= 0 && !err;
         at = paths->topo->nodes[at].next)
        err = add_node(paths, at);
    return err;
}

/* In NCCL's order, which decides how equal links stand. */
static int add_all(struct lc_topo_paths *paths)
{
    const struct lc_topo *topo = paths->topo;
    int err = add_children(paths, 0);

    if (!err)
        err = add_links(paths, LC_TOPO_NVLINK);
    if (!err)
        err = add_links(paths, LC_TOPO_XGMI);
    if (!err)
        err = add_links(paths, LC_TOPO_C2C);
    if (!err)
        err = add_links(paths, LC_TOPO_PCILINK);
    for (int i = 0; i < topo->count && !err; i++)
        merge_switch(paths, vertex(i));
    for (int i = lc_topo_next(topo, LC_TOPO_CPU, -1); i >= 0 && !err;
         i = lc_topo_next(topo, LC_TOPO_CPU, i))
        err = add_cpu(paths, i);
    for (int i = lc_topo_next(topo, LC_TOPO_CPU, -1); i >= 0 && !err;
         i = lc_topo_next(topo, LC_TOPO_CPU, i))
        sort_links(paths, vertex(i), -1, 0);
    return err;
}

static bool is_gpu(const struct lc_topo_paths *paths, int at)
{
    return at != SWITCHES && paths->topo->nodes[at - 1].type == LC_TOPO_GPU;
}

static bool is(const struct lc_topo_paths *paths, int at, enum lc_topo_type type)
{
    return at != SWITCHES && paths->topo->nodes[at - 1].type == type;
}

static enum lc_topo_path_type type_over(const struct lc_topo_paths *paths, int at,
                                        const struct lc_topo_edge *edge,
                                        const struct lc_topo_path *have)
{
    enum lc_topo_path_type type = edge->type == LINK_NET ? LC_TOPO_PATH_LOC
                                                         : (enum lc_topo_path_type)edge->type;

    if (is(paths, at, LC_TOPO_PCI) && is(paths, edge->to, LC_TOPO_PCI))
        type = LC_TOPO_PATH_PXB;
    if (edge->type == LINK_PCI && (is(paths, at, LC_TOPO_CPU) || is(paths, edge->to, LC_TOPO_CPU)))
        type = LC_TOPO_PATH_PHB;
    if (is_gpu(paths, at) && have->type == LC_TOPO_PATH_NVL && type == LC_TOPO_PATH_NVL &&
        have->hops == 1)
        type = LC_TOPO_PATH_NVB;
    return type > have->type ? type : have->type;
}

/* A GPU lets through only what goes by NVLink to the GPU behind it, and is the only one on the way. */
static bool may_pass(const struct lc_topo_paths *paths, int base, int at,
                     const struct lc_topo_edge *edge, int hops)
{
    return at == base || !is_gpu(paths, at) ||
           (edge->type == LINK_NVL && is_gpu(paths, edge->to) && hops <= 1);
}

struct search {
    struct lc_topo_way *found; /* of each vertex */
    int *now, *then;           /* vertices whose ways have become better */
    bool *queued;
};

/* The link back, by which the way runs; NVLinks of a file may lack it. */
static int reverse(const struct lc_topo_paths *paths, int e)
{
    const struct lc_topo_edge *edge = &paths->edges[e];
    int at = paths->first[edge->to];

    while (at >= 0 && (paths->edges[at].to != edge->from || paths->edges[at].type != edge->type))
        at = paths->edges[at].next;
    return at >= 0 ? at : e;
}

/* Ways share their ends, as lists do; what a way was when another was built on it stays. */
int lc_topo_add_cell(struct lc_topo_paths *paths, int e, int rest)
{
    if (paths->cell_count == paths->cell_room) {
        size_t room = paths->cell_room ? 2 * paths->cell_room : 1024;
        void *cells = room > INT32_MAX ? NULL : realloc(paths->cells, room * sizeof(*paths->cells));

        if (!cells)
            return -ENOMEM;
        paths->cells = cells;
        paths->cell_room = room;
    }
    paths->cells[paths->cell_count] = (struct lc_topo_cell){ e, rest };
    return (int)paths->cell_count++;
}

static int step(struct lc_topo_paths *paths, struct search *search, int base, int at, int *out)
{
    for (int e = paths->first[at]; e >= 0; e = paths->edges[e].next) {
        const struct lc_topo_edge *edge = &paths->edges[e];
        struct lc_topo_path have = search->found[at].path;
        struct lc_topo_path *old = &search->found[edge->to].path;
        int cell;
        double gbps = have.gbps < edge->gbps ? have.gbps : edge->gbps;
        enum lc_topo_path_type type;

        if (!may_pass(paths, base, at, edge, have.hops))
            continue;
        if ((old->gbps != 0 && old->hops <= have.hops) || old->gbps >= gbps)
            continue;
        type = type_over(paths, at, edge, &have);
        cell = lc_topo_add_cell(paths, reverse(paths, e), search->found[at].cell);
        if (cell < 0)
            return cell;
        *old = (struct lc_topo_path){ type, gbps, have.hops + 1 };
        search->found[edge->to].cell = cell;
        if (!search->queued[edge->to])
            search->then[(*out)++] = edge->to;
        search->queued[edge->to] = true;
    }
    return 0;
}

static int search_from(struct lc_topo_paths *paths, struct search *search, int base)
{
    int vertices = paths->topo->count + 1;
    int count = 1;
    int err = 0;

    for (int i = 0; i < vertices; i++)
        search->found[i] = (struct lc_topo_way){ { .type = LC_TOPO_PATH_DIS }, -1 };
    search->found[base].path = (struct lc_topo_path){ LC_TOPO_PATH_LOC, LOCAL, 0 };
    search->now[0] = base;
    while (count && !err) {
        int *swap = search->now;
        int next = 0;

        memset(search->queued, 0, (size_t)vertices * sizeof(*search->queued));
        for (int i = 0; i < count && !err; i++)
            err = step(paths, search, base, search->now[i], &next);
        search->now = search->then;
        search->then = swap;
        count = next;
    }
    return err;
}

static int search_all(struct lc_topo_paths *paths)
{
    size_t vertices = (size_t)paths->topo->count + 1;
    size_t count = (size_t)paths->count;
    struct search search = {
        .found = calloc(vertices, sizeof(*search.found)),
        .now = calloc(vertices, sizeof(*search.now)),
        .then = calloc(vertices, sizeof(*search.then)),
        .queued = calloc(vertices, sizeof(*search.queued)),
    };
    int err = 0;

    paths->table = calloc(count * count + 1, sizeof(*paths->table));
    if (!search.found || !search.now || !search.then || !search.queued || !paths->table)
        err = -ENOMEM;
    for (size_t to = 0; to < count && !err; to++) {
        err = search_from(paths, &search, vertex(paths->endpoints[to]));
        for (size_t from = 0; from < count && !err; from++)
            paths->table[to * count + from] = search.found[vertex(paths->endpoints[from])];
    }
    free(search.found);
    free(search.now);
    free(search.then);
    free(search.queued);
    return err;
}

static uint64_t host_of(const struct lc_topo *topo, int index)
{
    int cpu = lc_topo_above(topo, index, LC_TOPO_CPU);

    return cpu < 0 ? 0 : topo->nodes[cpu].cpu.host;
}

bool lc_topo_is_counted(const struct lc_topo *topo, int net)
{
    int dev = topo->nodes[net].net.dev;

    for (int i = lc_topo_next(topo, LC_TOPO_NET, -1); dev >= 0 && i >= 0 && i < net;
         i = lc_topo_next(topo, LC_TOPO_NET, i)) {
        if (topo->nodes[i].net.dev == dev && host_of(topo, i) == host_of(topo, net))
            return false;
    }
    return dev >= 0;
}

static int find_endpoints(struct lc_topo_paths *paths)
{
    const struct lc_topo *topo = paths->topo;
    int counts[LC_TOPO_TYPES] = { 0 };

    for (int i = 0; i < topo->count; i++) {
        const struct lc_topo_node *node = &topo->nodes[i];

        paths->place[i] = -1;
        if (++counts[node->type] > MAX_OF_KIND && node->type < LC_TOPO_NVLINK)
            return -E2BIG;
        if (node->type == LC_TOPO_GPU || node->type == LC_TOPO_CPU ||
            (node->type == LC_TOPO_NET && lc_topo_is_counted(topo, i))) {
            paths->place[i] = paths->count;
            paths->endpoints[paths->count++] = i;
        }
    }
    return 0;
}

int lc_topo_paths_find(const struct lc_topo *topo, struct lc_topo_paths **out)
{
    return lc_topo_paths_find_with(topo, 0, out);
}

int lc_topo_paths_find_with(const struct lc_topo *topo, int64_t most_mbps,
                            struct lc_topo_paths **out)
{
    size_t nodes = (size_t)topo->count;
    struct lc_topo_paths *paths = calloc(1, sizeof(*paths));
    int err;

    if (!paths)
        return -ENOMEM;
    paths->topo = topo;
    paths->most_mbps = most_mbps;
    paths->first = malloc((nodes + 1) * sizeof(*paths->first));
    paths->merged = calloc(nodes, sizeof(*paths->merged));
    paths->endpoints = calloc(nodes, sizeof(*paths->endpoints));
    paths->place = calloc(nodes, sizeof(*paths->place));
    paths->edge_room = 256;
    paths->edges = calloc(paths->edge_room, sizeof(*paths->edges));
    err = paths->first && paths->merged && paths->endpoints && paths->place && paths->edges
              ? 0
              : -ENOMEM;
    if (!err)
        err = find_endpoints(paths);
    if (!err) {
        memset(paths->first, 0xff, (nodes + 1) * sizeof(*paths->first));
        merge_cards(paths);
    }
    if (!err)
        err = add_all(paths);
    if (!err)
        err = search_all(paths);
    if (err)
        lc_topo_paths_free(paths);
    else
        *out = paths;
    return err;
}

void lc_topo_paths_free(struct lc_topo_paths *paths)
{
    if (!paths)
        return;
    free(paths->first);
    free(paths->edges);
    free(paths->merged);
    free(paths->endpoints);
    free(paths->place);
    free(paths->cells);
    free(paths->table);
    free(paths);
}

struct lc_topo_path lc_topo_path(const struct lc_topo_paths *paths, int from, int to)
{
    return lc_topo_way(paths, from, to).path;
}

struct lc_topo_way lc_topo_way(const struct lc_topo_paths *paths, int from, int to)
{
    int a = paths->place[from];
    int b = paths->place[to];

    if (a < 0 || b < 0)
        return (struct lc_topo_way){ { .type = LC_TOPO_PATH_DIS }, -1 };
    return paths->table[(size_t)b * (size_t)paths->count + (size_t)a];
}

int lc_topo_nearest_nets(const struct lc_topo_paths *paths, int gpu, int *out, int most)
{
    const struct lc_topo *topo = paths->topo;
    struct lc_topo_path best = { .type = LC_TOPO_PATH_DIS };
    int count = 0;

    for (int i = lc_topo_next(topo, LC_TOPO_NET, -1); i >= 0;
         i = lc_topo_next(topo, LC_TOPO_NET, i)) {
        struct lc_topo_path path = lc_topo_path(paths, gpu, i);

        if (path.type == LC_TOPO_PATH_DIS || path.gbps < best.gbps)
            continue;
        if (path.gbps > best.gbps || path.type < best.type) {
            best = path;
            count = 0;
        }
        if (path.type == best.type) {
            if (count < most)
                out[count] = i;
            count++;
        }
    }
    return count;
}

const char *lc_topo_path_name(enum lc_topo_path_type type)
{
    static const char *const names[] = { "LOC", "NVL", "NVB", "C2C", "PIX", "PXB",
                                         "P2C", "PXN", "PHB", "SYS", "NET", "DIS" };

    return names[type];
}
