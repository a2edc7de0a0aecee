/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's detours and its choice of ports (2.28), step by step in its order, since each step sees what those before it
 * have changed. */
#include "topology/routes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CHANNELS 64

static int max(int a, int b)
{
    return a > b ? a : b;
}

int lc_topo_dev(const struct lc_topo_routes *routes, int gpu)
{
    int dev = routes->topo->nodes[routes->gpus[gpu]].gpu.dev;

    return dev >= 0 ? dev : gpu;
}

static bool can_gpudirect(const struct lc_topo *topo, int node, bool said)
{
    return said || !lc_topo_attribute(topo, node, "gdr");
}

static enum lc_topo_path_type merge(enum lc_topo_path_type a, enum lc_topo_path_type b)
{
    bool c2c = (a == LC_TOPO_PATH_PHB && b == LC_TOPO_PATH_C2C) ||
               (b == LC_TOPO_PATH_PHB && a == LC_TOPO_PATH_C2C);

    return c2c ? LC_TOPO_PATH_P2C : a > b ? a : b;
}

/* A copy of one way's cells in front of another's. -1 is an empty way; -errno below. */
static int join(struct lc_topo_paths *paths, int first, int rest)
{
    int edges[128];
    int count = 0;

    for (int at = first; at >= 0 && count < 128; at = paths->cells[at].rest)
        edges[count++] = paths->cells[at].edge;
    while (count && rest > -2) {
        int cell = lc_topo_add_cell(paths, edges[--count], rest);

        rest = cell < 0 ? -2 : cell;
    }
    return rest;
}

static int detour(struct lc_topo_routes *routes, struct lc_topo_way *way, struct lc_topo_way first,
                  struct lc_topo_way second, bool pxn)
{
    int cell = join(routes->paths, first.cell, second.cell);

    if (cell < -1)
        return -ENOMEM;
    way->cell = cell;
    way->path.hops = first.path.hops + second.path.hops;
    way->path.type = pxn ? LC_TOPO_PATH_PXN : merge(first.path.type, second.path.type);
    way->path.gbps = first.path.gbps < second.path.gbps ? first.path.gbps : second.path.gbps;
    routes->age++;
    return 0;
}

/* By hops; -1 where there is none. */
static int local_cpu(const struct lc_topo_routes *routes, int gpu)
{
    int best = -1;
    int hops = 0;

    for (int c = 0; c < routes->cpu_count; c++) {
        int have = lc_topo_path(routes->paths, routes->gpus[gpu], routes->cpus[c]).hops;

        if (have > 0 && (hops == 0 || have < hops)) {
            best = routes->cpus[c];
            hops = have;
        }
    }
    return best;
}

bool lc_topo_peers(const struct lc_topo_routes *routes, int from, int to)
{
    struct lc_topo_path path = lc_topo_path(routes->paths, routes->gpus[from], routes->gpus[to]);
    const struct lc_topo_cpu *cpu = routes->cpu_count ? &routes->topo->nodes[routes->cpus[0]].cpu
                                                      : NULL;
    int most = LC_TOPO_PATH_PXB;

    if (routes->gpu_count <= 2 && cpu && cpu->arch && cpu->vendor &&
        strcmp(cpu->arch, "x86_64") == 0 && strcmp(cpu->vendor, "AuthenticAMD") == 0)
        most = LC_TOPO_PATH_SYS;
    if (routes->nccl.p2p_level != LC_TOPO_UNKNOWN)
        most = routes->nccl.p2p_level;
    return (int)path.type <= most;
}

static int go_round_gpus(struct lc_topo_routes *routes)
{
    int err = 0;

    for (int g = 0; g < routes->gpu_count && !err; g++) {
        int cpu = local_cpu(routes, g);

        for (int p = 0; p < routes->gpu_count && cpu >= 0 && !err; p++) {
            if (!lc_topo_peers(routes, p, g))
                err = detour(routes, lc_topo_gpu_gpu(routes, p, g),
                             lc_topo_way(routes->paths, routes->gpus[p], cpu),
                             lc_topo_way(routes->paths, cpu, routes->gpus[g]), false);
        }
    }
    return err;
}

static void name_c2c(struct lc_topo_routes *routes)
{
    for (int n = 0; n < routes->net_count; n++) {
        for (int g = 0; g < routes->gpu_count; g++) {
            struct lc_topo_way *send = lc_topo_gpu_net(routes, g, n);
            struct lc_topo_way *recv = lc_topo_net_gpu(routes, n, g);
            int cpu = local_cpu(routes, g);

            if (cpu < 0 ||
                merge(lc_topo_path(routes->paths, routes->gpus[g], cpu).type,
                      lc_topo_path(routes->paths, routes->nets[n], cpu).type) != LC_TOPO_PATH_P2C)
                continue;
            if (send->path.type > LC_TOPO_PATH_P2C)
                send->path.type = LC_TOPO_PATH_P2C;
            if (recv->path.type > LC_TOPO_PATH_P2C)
                recv->path.type = LC_TOPO_PATH_P2C;
        }
    }
    routes->age++;
}

/* The best of a row by NCCL's rule: bandwidth, then type. */
static int nearest(const struct lc_topo_way *ways, int count, int *out)
{
    struct lc_topo_path best = { .type = LC_TOPO_PATH_DIS };
    int found = 0;

    for (int i = 0; i < count; i++) {
        struct lc_topo_path path = ways[i].path;

        if (path.gbps > best.gbps || (path.gbps == best.gbps && path.type < best.type)) {
            best = path;
            found = 0;
        }
        if (path.gbps == best.gbps && path.type == best.type && path.type != LC_TOPO_PATH_DIS)
            out[found++] = i;
    }
    return found;
}

static int mirrored(int value, int power)
{
    int out = 0;

    for (int bit = 1, other = power >> 1; bit < power; bit <<= 1, other >>= 1)
        out |= value & bit ? other : 0;
    return out;
}

static const struct lc_topo_local *local_of(const struct lc_topo_routes *routes, int gpu)
{
    struct lc_topo_local *local = &routes->local[gpu];
    int gpus[LC_TOPO_MAX_GPUS];
    int sharing;

    if (local->age == routes->age)
        return local;
    local->age = routes->age;
    local->count = nearest(lc_topo_gpu_net(routes, gpu, 0), routes->net_count, local->nets);
    local->turns = local->count;
    if (!local->count)
        return local;
    sharing = nearest(lc_topo_net_gpu(routes, local->nets[0], 0), routes->gpu_count, gpus);
    if (routes->nccl.policy == LC_TOPO_POLICY_AUTO && sharing)
        local->turns = (local->count + sharing - 1) / sharing;
    else if (routes->nccl.policy == LC_TOPO_POLICY_MAX && routes->nccl.nets_per_gpu < local->count)
        local->turns = routes->nccl.nets_per_gpu;
    return local;
}

int lc_topo_own_net(const struct lc_topo_routes *routes, int gpu, int channel)
{
    const struct lc_topo_local *local = local_of(routes, gpu);
    int at = lc_topo_dev(routes, gpu);

    if (!local->count)
        return -1;
    if ((local->count & (local->count - 1)) == 0)
        at = mirrored(at, local->count);
    return local->nets[(at + channel % local->turns) % local->count];
}

int lc_topo_net_turns(const struct lc_topo_routes *routes, int gpu)
{
    return local_of(routes, gpu)->turns;
}

static int owner_of(const struct lc_topo_routes *routes, int net)
{
    int gpus[LC_TOPO_MAX_GPUS];
    int count = nearest(lc_topo_net_gpu(routes, net, 0), routes->gpu_count, gpus);

    for (int channel = 0; channel < CHANNELS; channel++) {
        for (int i = 0; i < count; i++) {
            if (lc_topo_own_net(routes, gpus[i], channel) == net)
                return gpus[i];
        }
    }
    return -1;
}

/* The first GPU of a way, behind switches; -1. */
static int relay_of(const struct lc_topo_routes *routes, const struct lc_topo_way *way)
{
    for (int at = way->cell; at >= 0; at = routes->paths->cells[at].rest) {
        int vertex = routes->paths->edges[routes->paths->cells[at].edge].to;

        if (vertex == LC_TOPO_SWITCHES)
            continue;
        for (int g = 0; g < routes->gpu_count; g++) {
            if (routes->gpus[g] == vertex - 1)
                return g;
        }
        return -1;
    }
    return -1;
}

static bool has_nvlink(const struct lc_topo_routes *routes, int gpu)
{
    for (int i = 0; i < routes->gpu_count; i++) {
        if (i != gpu && lc_topo_gpu_gpu(routes, gpu, i)->path.type == LC_TOPO_PATH_NVL)
            return true;
    }
    return routes->gpu_count == 1;
}

bool lc_topo_gpudirect(const struct lc_topo_routes *routes, int gpu, int net, bool read)
{
    const struct lc_topo_node *g = &routes->topo->nodes[routes->gpus[gpu]];
    const struct lc_topo_node *n = &routes->topo->nodes[routes->nets[net]];
    const struct lc_topo_way *way = lc_topo_gpu_net(routes, gpu, net);
    int most = routes->nccl.gdr_level != LC_TOPO_UNKNOWN ? routes->nccl.gdr_level
                                                         : LC_TOPO_PATH_PXB;
    int distance = way->path.type;

    if (!can_gpudirect(routes->topo, routes->nets[net], n->net.gdr) ||
        !can_gpudirect(routes->topo, routes->gpus[gpu], g->gpu.gdr))
        return false;
    if (read && (routes->nccl.gdr_read == 0 || (routes->nccl.gdr_read < 0 && g->gpu.sm >= 0 &&
                                                g->gpu.sm < 80 && !has_nvlink(routes, gpu))))
        return false;
    if (distance == LC_TOPO_PATH_PXN) {
        int relay = relay_of(routes, way);

        if (relay >= 0)
            distance = lc_topo_gpu_net(routes, relay, net)->path.type;
    }
    if (routes->nccl.gdr_c2c && distance == LC_TOPO_PATH_P2C)
        distance = LC_TOPO_PATH_C2C;
    return distance <= most;
}

static uint64_t host(const struct lc_topo_routes *routes, int gpu)
{
    int cpu = lc_topo_above(routes->topo, routes->gpus[gpu], LC_TOPO_CPU);

    return cpu < 0 ? 0 : routes->topo->nodes[cpu].cpu.host;
}

/* The farthest that a port may be from the GPU that relays to it. */
static enum lc_topo_path_type pxn_reach(const struct lc_topo_routes *routes)
{
    return routes->nccl.pxn_c2c ? LC_TOPO_PATH_P2C : LC_TOPO_PATH_PXB;
}

static int try_pxn(struct lc_topo_routes *routes, int gpu, int net)
{
    struct lc_topo_way *way = lc_topo_gpu_net(routes, gpu, net);
    const struct lc_topo_way *relayed;
    int relay;

    if (routes->nccl.pxn_disable == 1)
        return 0;
    relay = owner_of(routes, net);
    if (relay < 0 || relay == gpu || host(routes, relay) != host(routes, gpu))
        return 0;
    relayed = lc_topo_gpu_net(routes, relay, net);
    if (relayed->path.type > pxn_reach(routes) ||
        lc_topo_gpu_gpu(routes, relay, gpu)->path.type > LC_TOPO_PATH_NVL ||
        (relayed->path.gbps <= way->path.gbps && way->path.type <= LC_TOPO_PATH_PXN))
        return 0;
    return detour(routes, way, *lc_topo_gpu_gpu(routes, gpu, relay), *relayed, true);
}

static int settle(struct lc_topo_routes *routes, int gpu, int net)
{
    int err = try_pxn(routes, gpu, net);
    int node = routes->gpus[gpu];
    int port = routes->nets[net];
    int cpu;

    if (err || lc_topo_gpu_net(routes, gpu, net)->path.type >= LC_TOPO_PATH_PHB ||
        lc_topo_gpudirect(routes, gpu, net, false))
        return err;
    cpu = local_cpu(routes, gpu);
    if (cpu < 0)
        return 0;
    err = detour(routes, lc_topo_net_gpu(routes, net, gpu), lc_topo_way(routes->paths, port, cpu),
                 lc_topo_way(routes->paths, cpu, node), false);
    return err ? err
               : detour(routes, lc_topo_gpu_net(routes, gpu, net),
                        lc_topo_way(routes->paths, node, cpu),
                        lc_topo_way(routes->paths, cpu, port), false);
}

static int list(const struct lc_topo *topo, enum lc_topo_type type, int most, int *out)
{
    int count = 0;

    for (int i = lc_topo_next(topo, type, -1); i >= 0 && count <= most;
         i = lc_topo_next(topo, type, i)) {
        if (type == LC_TOPO_NET && !lc_topo_is_counted(topo, i))
            continue;
        if (count < most)
            out[count] = i;
        count++;
    }
    return count;
}

static int begin(struct lc_topo_routes *routes)
{
    const struct lc_topo *topo = routes->topo;
    size_t gpus;
    size_t nets;

    routes->gpus = calloc(LC_TOPO_MAX_GPUS, sizeof(int));
    routes->nets = calloc(LC_TOPO_MAX_NETS, sizeof(int));
    routes->cpus = calloc((size_t)topo->count, sizeof(int));
    if (!routes->gpus || !routes->nets || !routes->cpus)
        return -ENOMEM;
    routes->gpu_count = list(topo, LC_TOPO_GPU, LC_TOPO_MAX_GPUS, routes->gpus);
    routes->net_count = list(topo, LC_TOPO_NET, LC_TOPO_MAX_NETS, routes->nets);
    routes->cpu_count = list(topo, LC_TOPO_CPU, topo->count, routes->cpus);
    if (routes->gpu_count > LC_TOPO_MAX_GPUS || routes->net_count > LC_TOPO_MAX_NETS)
        return -E2BIG;
    gpus = (size_t)routes->gpu_count;
    nets = (size_t)routes->net_count;
    routes->gpu_gpu = calloc(gpus * gpus + 1, sizeof(*routes->gpu_gpu));
    routes->gpu_net = calloc(gpus * nets + 1, sizeof(*routes->gpu_net));
    routes->net_gpu = calloc(gpus * nets + 1, sizeof(*routes->net_gpu));
    routes->local = calloc(gpus + 1, sizeof(*routes->local));
    routes->owner = calloc(nets + 1, sizeof(*routes->owner));
    routes->age = 1;
    return routes->gpu_gpu && routes->gpu_net && routes->net_gpu && routes->local && routes->owner
               ? 0
               : -ENOMEM;
}

static void copy_wires(struct lc_topo_routes *routes)
{
    for (int g = 0; g < routes->gpu_count; g++) {
        for (int p = 0; p < routes->gpu_count; p++)
            *lc_topo_gpu_gpu(routes, g, p) = lc_topo_way(routes->paths, routes->gpus[g],
                                                         routes->gpus[p]);
        for (int n = 0; n < routes->net_count; n++) {
            *lc_topo_gpu_net(routes, g, n) = lc_topo_way(routes->paths, routes->gpus[g],
                                                         routes->nets[n]);
            *lc_topo_net_gpu(routes, n, g) = lc_topo_way(routes->paths, routes->nets[n],
                                                         routes->gpus[g]);
        }
    }
}

int lc_topo_routes_find(const struct lc_topo *topo, const struct lc_topo_nccl *nccl,
                        struct lc_topo_routes **out)
{
    struct lc_topo_routes *routes = calloc(1, sizeof(*routes));
    int err;

    if (!routes)
        return -ENOMEM;
    routes->topo = topo;
    routes->nccl = *nccl;
    err = begin(routes);
    if (!err)
        err = lc_topo_paths_find_with(topo, nccl->most_mbps, &routes->paths);
    if (!err) {
        copy_wires(routes);
        err = go_round_gpus(routes);
    }
    if (!err)
        name_c2c(routes);
    for (int n = 0; n < routes->net_count && !err; n++) {
        for (int g = 0; g < routes->gpu_count && !err; g++)
            err = settle(routes, g, n);
    }
    for (int n = 0; n < routes->net_count && !err; n++)
        routes->owner[n] = owner_of(routes, n);
    for (int g = 0; g < routes->gpu_count && !err; g++) /* none is stale when threads read */
        (void)local_of(routes, g);
    if (err)
        lc_topo_routes_free(routes);
    else
        *out = routes;
    return err;
}

void lc_topo_routes_free(struct lc_topo_routes *routes)
{
    if (!routes)
        return;
    lc_topo_paths_free(routes->paths);
    free(routes->gpus);
    free(routes->nets);
    free(routes->cpus);
    free(routes->gpu_gpu);
    free(routes->gpu_net);
    free(routes->net_gpu);
    free(routes->local);
    free(routes->owner);
    free(routes);
}

static int place(const int *nodes, int count, int node)
{
    for (int i = 0; i < count; i++) {
        if (nodes[i] == node)
            return i;
    }
    return -1;
}

struct lc_topo_path lc_topo_routes_path(const struct lc_topo_routes *routes, int from, int to)
{
    int a = place(routes->gpus, routes->gpu_count, from);
    int b = place(routes->gpus, routes->gpu_count, to);
    int n = place(routes->nets, routes->net_count, a >= 0 ? to : from);

    if (a >= 0 && b >= 0)
        return lc_topo_gpu_gpu(routes, a, b)->path;
    if (max(a, b) < 0 || n < 0)
        return lc_topo_path(routes->paths, from, to);
    return a >= 0 ? lc_topo_gpu_net(routes, a, n)->path : lc_topo_net_gpu(routes, n, b)->path;
}

int lc_topo_routes_gpus(const struct lc_topo_routes *routes)
{
    return routes->gpu_count;
}

int lc_topo_routes_nets(const struct lc_topo_routes *routes)
{
    return routes->net_count;
}

int lc_topo_routes_gpu(const struct lc_topo_routes *routes, int place)
{
    return routes->gpus[place];
}

int lc_topo_routes_net(const struct lc_topo_routes *routes, int place)
{
    return routes->nets[place];
}

static int gpu_numbered(const struct lc_topo_routes *routes, int dev)
{
    for (int g = 0; g < routes->gpu_count; g++) {
        if (lc_topo_dev(routes, g) == dev)
            return g;
    }
    return -1;
}

/* By level 1: if a way as it is leads there; by level 2: if the GPU beside that port is one of ours by NVLink. */
static void try_remote_port(const struct lc_topo_routes *routes, int gpu, int net, int level,
                            struct lc_topo_choice *choice)
{
    const struct lc_topo_way *way = lc_topo_gpu_net(routes, gpu, net);
    int relay = routes->owner[net];

    if (level == 1 && way->path.type <= LC_TOPO_PATH_PXN) {
        int by = way->path.type == LC_TOPO_PATH_PXN ? relay_of(routes, way) : gpu;

        *choice = (struct lc_topo_choice){ net, by >= 0 ? by : gpu };
    }
    if (level == 2 && relay >= 0 &&
        lc_topo_gpu_gpu(routes, relay, gpu)->path.type <= LC_TOPO_PATH_NVL &&
        lc_topo_gpu_net(routes, relay, net)->path.type <= pxn_reach(routes))
        *choice = (struct lc_topo_choice){ net, relay };
}

struct lc_topo_choice lc_topo_choose(const struct lc_topo_routes *routes, int gpu, int remote_dev,
                                     int channel)
{
    struct lc_topo_choice choice = { lc_topo_own_net(routes, gpu, channel), gpu };
    int level = routes->nccl.pxn_disable == 1 ? 0 : routes->nccl.p2p_pxn_level;
    int twin;
    int net;

    if (choice.net < 0 || (routes->nccl.cross_nic != 0 && level == 0))
        return choice;
    twin = gpu_numbered(routes, remote_dev);
    if (twin < 0)
        return choice;
    net = lc_topo_own_net(routes, twin, channel);
    if (net < 0)
        return choice;
    if (routes->nccl.cross_nic == 0)
        choice.net = net;
    try_remote_port(routes, gpu, net, level, &choice);
    return choice;
}
