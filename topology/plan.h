/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_TOPO_PLAN_H
#define LC_TOPO_PLAN_H

#include "topology/routes.h"

#include <stdarg.h>

#define LC_PLAN_MAX_DEVS 1024

struct lc_plan_kind {
    struct lc_topo_routes *wires; /* with NCCL's defaults and the real speeds */
    int nodes;
    int first_gpu; /* of the job */
    int *rails;    /* of each port */
    int *dev_of;   /* of each GPU: index of its NVML number in `devs` */
    int *gpu_of;   /* of each number: the GPU; -1 */
};

struct lc_plan_side {
    struct lc_topo_nccl nccl;
    struct lc_topo_routes *routes[LC_TOPO_MAX_KINDS];
    struct lc_topo_choice *choices[LC_TOPO_MAX_KINDS]; /* [GPU][number of the remote GPU][slot] */
    int slots;                                         /* channels that are looked at */
    struct lc_topo_side_loads loads;
};

struct lc_plan_setting {
    const char *name;
    char value[32];
};

struct lc_topo_plan {
    struct lc_plan_kind kinds[LC_TOPO_MAX_KINDS];
    int kind_count, nodes, gpus;
    int devs[LC_PLAN_MAX_DEVS]; /* NVML numbers of all kinds */
    int dev_count;
    struct lc_plan_side sides[2];
    bool gains;
    struct lc_plan_setting settings[5];
    int setting_count;
};

static inline const struct lc_topo_choice *lc_plan_choice(const struct lc_topo_plan *plan,
                                                          const struct lc_plan_side *side, int kind,
                                                          int gpu, int dev, int slot)
{
    return &side->choices[kind][((size_t)gpu * (size_t)plan->dev_count + (size_t)dev) *
                                    (size_t)side->slots +
                                (size_t)slot];
}

/* Fills side->loads from its routes and choices. 0 or -ENOMEM. */
int lc_plan_weigh(const struct lc_topo_plan *plan, struct lc_plan_side *side);

#endif
