/* SPDX-License-Identifier: Apache-2.0
 *
 * What the readers of machines (sysfs, hwloc) share: which PCI functions matter and how they become nodes. */
#ifndef LC_TOPO_DEVICES_H
#define LC_TOPO_DEVICES_H

#include "topology/topo_internal.h"

struct lc_topo_function {
    char busid[20];
    unsigned class, vendor, device, subvendor, subdevice;
    char speed[40]; /* "" : unknown */
    int width;      /* 0: unknown */
};

/* A GPU that computes; the graphics of a management controller is none. */
bool lc_topo_is_gpu(unsigned class, unsigned vendor);
bool lc_topo_is_nic(unsigned class);

/* The NUMA node with that number, added if it is not there; -errno. */
int lc_topo_place_cpu(struct lc_topo *topo, int numa);

/* The function below `parent`, added if it is not there; -errno. */
int lc_topo_place_pci(struct lc_topo *topo, int parent, const struct lc_topo_function *function);

/* The one child of that type, added if it is not there; -errno. */
int lc_topo_place_child(struct lc_topo *topo, int parent, enum lc_topo_type type);

#endif
