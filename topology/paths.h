/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's graph of a machine, for those who count what its links carry. */
#ifndef LC_TOPO_PATHS_H
#define LC_TOPO_PATHS_H

#include "topology/topo_internal.h"

#define LC_TOPO_SWITCHES 0 /* the one vertex of all NVSwitches; others are a node's index + 1 */

enum lc_topo_link_type { /* as NCCL numbers them, to be compared with path types */
    LC_TOPO_LINK_LOC = LC_TOPO_PATH_LOC,
    LC_TOPO_LINK_NVL = LC_TOPO_PATH_NVL,
    LC_TOPO_LINK_C2C = LC_TOPO_PATH_C2C,
    LC_TOPO_LINK_PCI = LC_TOPO_PATH_PIX,
    LC_TOPO_LINK_SYS = LC_TOPO_PATH_SYS,
    LC_TOPO_LINK_NET = LC_TOPO_PATH_NET,
};

struct lc_topo_edge {   /* one direction of a link */
    int from, to, next; /* next: of the same vertex; -1 */
    enum lc_topo_link_type type;
    double gbps;
};

struct lc_topo_cell { /* of a way, from its beginning */
    int edge, rest;   /* -1: the end */
};

struct lc_topo_way {
    struct lc_topo_path path;
    int cell; /* -1: none */
};

struct lc_topo_paths {
    const struct lc_topo *topo;
    int64_t most_mbps; /* faster ports count as this fast; 0: as they are */
    int *first;        /* edge of each vertex; -1 */
    struct lc_topo_edge *edges;
    size_t edge_count, edge_room;
    struct lc_topo_cell *cells;
    size_t cell_count, cell_room;
    int *merged;    /* of each PCI node or card: what it is part of, else itself; -1: has parts */
    int *endpoints; /* GPUs, CPUs and ports */
    int *place;     /* of each node: its place among the endpoints; -1 */
    int count;
    struct lc_topo_way *table; /* [to][from] */
};

/* Edges have the same numbers whatever `most_mbps` is. */
int lc_topo_paths_find_with(const struct lc_topo *topo, int64_t most_mbps,
                            struct lc_topo_paths **out);

/* Does NCCL reach that port? Not without a number, nor behind another one of the same number on the same host, as its
 * dumps have them where GPUs of several NUMA nodes found the same virtual port. */
bool lc_topo_is_counted(const struct lc_topo *topo, int net);

/* A new cell in front of `rest`; -ENOMEM. */
int lc_topo_add_cell(struct lc_topo_paths *paths, int edge, int rest);

struct lc_topo_way lc_topo_way(const struct lc_topo_paths *paths, int from, int to);

#endif
