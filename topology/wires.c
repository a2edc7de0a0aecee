/* SPDX-License-Identifier: Apache-2.0
 *
 * What collectives of a job of such nodes go over, for a model of their costs. */
#include "topology/routes.h"

#include <stdbool.h>

/* The widest tree that joins all GPUs, grown from the first: its narrowest way is the narrowest that no ring can avoid. */
static void find_inside(const struct lc_topo_routes *routes, struct lc_topo_wires *out)
{
    struct lc_topo_path best[LC_TOPO_MAX_GPUS];
    bool joined[LC_TOPO_MAX_GPUS] = { true };

    for (int i = 1; i < routes->gpu_count; i++)
        best[i] = lc_topo_gpu_gpu(routes, 0, i)->path;
    for (int count = 1; count < routes->gpu_count; count++) {
        int next = -1;

        for (int i = 1; i < routes->gpu_count; i++) {
            if (!joined[i] && (next < 0 || best[i].gbps > best[next].gbps))
                next = i;
        }
        joined[next] = true;
        if (count == 1 || best[next].gbps < out->inside_gbps) {
            out->inside_gbps = best[next].gbps;
            out->type = best[next].type;
        }
        for (int i = 1; i < routes->gpu_count; i++) {
            struct lc_topo_path path = lc_topo_gpu_gpu(routes, next, i)->path;

            if (!joined[i] && path.gbps > best[i].gbps)
                best[i] = path;
        }
    }
}

static double port_gbps(const struct lc_topo_routes *routes, int net)
{
    return (double)lc_topo_at(routes->topo, routes->nets[net])->net.mbps / 8e3;
}

/* Each port once, by the best way that a GPU which it serves has to it. */
static void find_between(const struct lc_topo_routes *routes, struct lc_topo_wires *out)
{
    double reached[LC_TOPO_MAX_NETS] = { 0 };

    for (int gpu = 0; gpu < routes->gpu_count; gpu++) {
        for (int channel = 0; channel < lc_topo_net_turns(routes, gpu); channel++) {
            int net = lc_topo_own_net(routes, gpu, channel);
            double gbps = net < 0 ? 0 : lc_topo_gpu_net(routes, gpu, net)->path.gbps;

            if (gbps > 0 && gbps > reached[net])
                reached[net] = gbps;
        }
    }
    for (int net = 0; net < routes->net_count; net++) {
        double gbps = port_gbps(routes, net);

        if (reached[net] > 0) {
            out->nets++;
            out->between_gbps += gbps < reached[net] ? gbps : reached[net];
        }
    }
}

void lc_topo_routes_wires(const struct lc_topo_routes *routes, struct lc_topo_wires *out)
{
    *out = (struct lc_topo_wires){ .gpus = routes->gpu_count, .type = LC_TOPO_PATH_LOC };
    if (routes->gpu_count > 1)
        find_inside(routes, out);
    if (routes->gpu_count > 0)
        find_between(routes, out);
}
