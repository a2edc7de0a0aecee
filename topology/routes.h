/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's final ways with the links they take. */
#ifndef LC_TOPO_ROUTES_H
#define LC_TOPO_ROUTES_H

#include "topology/paths.h"

#define LC_TOPO_MAX_GPUS 128
#define LC_TOPO_MAX_NETS 256

struct lc_topo_local { /* the ports that are nearest to a GPU, by NCCL's rule */
    int nets[LC_TOPO_MAX_NETS];
    int count;
    int turns;    /* how many of them its channels use */
    unsigned age; /* of the ways it was found with */
};

struct lc_topo_routes {
    const struct lc_topo *topo;
    struct lc_topo_nccl nccl;
    struct lc_topo_paths *paths; /* of the wires; the detours below add cells to them */
    int *gpus, *nets, *cpus;     /* nodes */
    int gpu_count, net_count, cpu_count;
    struct lc_topo_way *gpu_gpu, *gpu_net, *net_gpu; /* [from][to], by place */
    struct lc_topo_local *local;                     /* of each GPU */
    int *owner;   /* of each port: the GPU that NCCL takes for local to it; -1 */
    unsigned age; /* raised when a way changes */
};

static inline struct lc_topo_way *lc_topo_gpu_gpu(const struct lc_topo_routes *routes, int from,
                                                  int to)
{
    return &routes->gpu_gpu[from * routes->gpu_count + to];
}

static inline struct lc_topo_way *lc_topo_gpu_net(const struct lc_topo_routes *routes, int gpu,
                                                  int net)
{
    return &routes->gpu_net[gpu * routes->net_count + net];
}

static inline struct lc_topo_way *lc_topo_net_gpu(const struct lc_topo_routes *routes, int net,
                                                  int gpu)
{
    return &routes->net_gpu[net * routes->gpu_count + gpu];
}

/* NVML's number, or the place where the file gives none. */
int lc_topo_dev(const struct lc_topo_routes *routes, int gpu);

/* Can NCCL let the port read from (or write to) the GPU's memory? */
bool lc_topo_gpudirect(const struct lc_topo_routes *routes, int gpu, int net, bool read);

/* Can two GPUs reach each other's memory, as far as the way between them decides? */
bool lc_topo_peers(const struct lc_topo_routes *routes, int from, int to);

#endif
