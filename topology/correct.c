/* SPDX-License-Identifier: Apache-2.0
 *
 * Where NCCL, which believes /sys, sees a machine otherwise than a better description of it does. */
#include "topology/paths.h"

#include <errno.h>
#include <string.h>

struct views {
    const struct lc_topo *seen, *truth;
    struct lc_topo_paths *seen_paths, *truth_paths;
    char *why;
    size_t size;
    int count;
};

/* The first GPU or port of the same name; -1. */
static int first_named(const struct lc_topo *of, int index, const struct lc_topo *in)
{
    const struct lc_topo_node *node = &of->nodes[index];

    for (int i = lc_topo_next(in, node->type, -1); i >= 0; i = lc_topo_next(in, node->type, i)) {
        const char *id = node->type == LC_TOPO_GPU ? of->nodes[node->parent].id : node->id;
        const struct lc_topo_node *other = &in->nodes[i];

        if (strcmp(node->type == LC_TOPO_GPU ? in->nodes[other->parent].id : other->id, id) == 0)
            return i;
    }
    return -1;
}

/* The same GPU or port in the other topology; -1 also behind another one of its name. */
static int twin(const struct lc_topo *of, int index, const struct lc_topo *in)
{
    return first_named(of, index, of) == index ? first_named(of, index, in) : -1;
}

static int numa_of(const struct lc_topo *topo, int index)
{
    int cpu = lc_topo_above(topo, index, LC_TOPO_CPU);

    return cpu < 0 ? LC_TOPO_UNKNOWN : topo->nodes[cpu].cpu.numa;
}

static void take(struct views *views, int index, const char *what, const char *seen,
                 const char *truth)
{
    const struct lc_topo_node *node = &views->truth->nodes[index];
    bool gpu = node->type == LC_TOPO_GPU;

    if (views->count++ == 0 && views->size)
        (void)snprintf(views->why, views->size, "%s %.40s %s %s for NCCL, and is %s",
                       gpu ? "GPU" : "port", gpu ? views->truth->nodes[node->parent].id : node->id,
                       what, seen, truth);
}

/* True: it hangs elsewhere, and has been counted. */
static bool compare_numa(struct views *views, int index, int seen)
{
    int there = numa_of(views->seen, seen);
    int here = numa_of(views->truth, index);
    char a[40] = "no known NUMA node";
    char b[40];

    if (there == here || here < 0)
        return false;
    if (there >= 0)
        (void)snprintf(a, sizeof(a), "NUMA node %d", there);
    (void)snprintf(b, sizeof(b), "at %d", here);
    take(views, index, "is at", a, b);
    return true;
}

static void compare_ways(struct views *views, int index, int seen)
{
    for (int i = lc_topo_next(views->truth, LC_TOPO_NET, -1); i >= 0;
         i = lc_topo_next(views->truth, LC_TOPO_NET, i)) {
        int port = twin(views->truth, i, views->seen);
        enum lc_topo_path_type there;
        enum lc_topo_path_type here = lc_topo_path(views->truth_paths, index, i).type;
        char what[64];

        if (port < 0 || here == LC_TOPO_PATH_DIS)
            continue;
        there = lc_topo_path(views->seen_paths, seen, port).type;
        if (there == here || there == LC_TOPO_PATH_DIS)
            continue;
        (void)snprintf(what, sizeof(what), "has port %.40s by", views->truth->nodes[i].id);
        take(views, index, what, lc_topo_path_name(there), lc_topo_path_name(here));
        return;
    }
}

static void compare(struct views *views, enum lc_topo_type type)
{
    for (int i = lc_topo_next(views->truth, type, -1); i >= 0;
         i = lc_topo_next(views->truth, type, i)) {
        int seen = twin(views->truth, i, views->seen);

        if (seen >= 0 && !compare_numa(views, i, seen) && type == LC_TOPO_GPU)
            compare_ways(views, i, seen);
    }
}

int lc_topo_misplaced(const struct lc_topo *seen, const struct lc_topo *truth, char *why,
                      size_t size)
{
    struct views views = { .seen = seen, .truth = truth, .why = why, .size = size };
    int err = lc_topo_paths_find(seen, &views.seen_paths);

    if (!err)
        err = lc_topo_paths_find(truth, &views.truth_paths);
    if (!err) {
        compare(&views, LC_TOPO_GPU);
        if (views.count)
            compare(&views, LC_TOPO_NET);
    }
    lc_topo_paths_free(views.seen_paths);
    lc_topo_paths_free(views.truth_paths);
    return err ? err : views.count;
}
