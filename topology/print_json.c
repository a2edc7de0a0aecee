/* SPDX-License-Identifier: Apache-2.0
 *
 * A flat list of nodes with their parents: trees nest deeper than a reader likes. */
#include "common/json.h"
#include "topology/print.h"
#include "topology/routes.h"

#include <inttypes.h>

static void string(struct lc_json *json, const char *key, const char *value)
{
    if (!value)
        return;
    lc_json_key(json, key);
    lc_json_string(json, value);
}

static void known(struct lc_json *json, const char *key, int64_t value)
{
    if (value < 0)
        return;
    lc_json_key(json, key);
    lc_json_int(json, value);
}

static void boolean(struct lc_json *json, const char *key, bool value)
{
    lc_json_key(json, key);
    lc_json_bool(json, value);
}

static void number(struct lc_json *json, const char *key, double value)
{
    lc_json_key(json, key);
    lc_json_double(json, value);
}

static void print_pci(struct lc_json *json, const struct lc_topo_pci *pci)
{
    static const char *const kinds[] = { "bridge", "gpu", "nic", "nvswitch", "other" };
    char class[16];

    string(json, "kind", kinds[pci->kind]);
    (void)snprintf(class, sizeof(class), "0x%06x", pci->class);
    string(json, "class", pci->class ? class : NULL);
    known(json, "vendor", pci->vendor);
    known(json, "device", pci->device);
    if (pci->gts > 0)
        number(json, "link_gts", pci->gts);
    known(json, "link_width", pci->width ? pci->width : LC_TOPO_UNKNOWN);
    number(json, "link_gbytes_per_s", lc_topo_pci_gbps(pci));
}

static void print_link(struct lc_json *json, const struct lc_topo *topo,
                       const struct lc_topo_link *link)
{
    string(json, "target", *link->target ? link->target : NULL);
    known(json, "target_node", link->node);
    known(json, "target_gpu", lc_topo_gpu_of(topo, link));
    known(json, "count", link->count);
}

static void print_cpu(struct lc_json *json, const struct lc_topo_cpu *cpu)
{
    struct lc_topo_text cpus = { .used = 0 };

    lc_json_key(json, "numa");
    lc_json_int(json, cpu->numa);
    lc_topo_say_cpus(&cpus, cpu->cpus);
    string(json, "cpus", cpu->cpus ? cpus.s : NULL);
    string(json, "arch", cpu->arch);
    string(json, "vendor", cpu->vendor);
    known(json, "family", cpu->family);
    known(json, "model", cpu->model);
}

static void print_fields(struct lc_json *json, const struct lc_topo *topo, int index)
{
    const struct lc_topo_node *node = &topo->nodes[index];

    switch (node->type) {
    case LC_TOPO_CPU: print_cpu(json, &node->cpu); break;
    case LC_TOPO_PCI: print_pci(json, &node->pci); break;
    case LC_TOPO_GPU:
        known(json, "dev", node->gpu.dev);
        known(json, "rank", node->gpu.rank);
        known(json, "sm", node->gpu.sm);
        boolean(json, "gdr", node->gpu.gdr);
        break;
    case LC_TOPO_NET: {
        char guid[24];

        known(json, "dev", node->net.dev);
        known(json, "port", node->net.port);
        known(json, "mbits_per_s", node->net.mbps ? node->net.mbps : LC_TOPO_UNKNOWN);
        (void)snprintf(guid, sizeof(guid), "0x%" PRIx64, node->net.guid);
        string(json, "guid", node->net.guid ? guid : NULL);
        string(json, "state", lc_topo_attribute(topo, index, "state"));
        boolean(json, "gdr", node->net.gdr);
        break;
    }
    case LC_TOPO_NVLINK:
    case LC_TOPO_XGMI:
    case LC_TOPO_C2C:
    case LC_TOPO_PCILINK: print_link(json, topo, &node->link); break;
    default: break;
    }
}

/* For each GPU the ports nearest to it; left out where paths cannot be found. */
static void print_nearest(struct lc_json *json, const struct lc_topo *topo)
{
    struct lc_topo_paths *paths = NULL;
    int nets[16];

    if (lc_topo_is_partial(topo) || lc_topo_paths_find(topo, &paths) != 0)
        return;
    lc_json_key(json, "nearest");
    lc_json_array(json);
    for (int gpu = lc_topo_next(topo, LC_TOPO_GPU, -1); gpu >= 0;
         gpu = lc_topo_next(topo, LC_TOPO_GPU, gpu)) {
        int count = lc_topo_nearest_nets(paths, gpu, nets, 16);

        lc_json_object(json);
        known(json, "gpu", gpu);
        lc_json_key(json, "nets");
        lc_json_array(json);
        for (int i = 0; i < count && i < 16; i++)
            lc_json_int(json, nets[i]);
        lc_json_end(json);
        if (count) {
            struct lc_topo_path path = lc_topo_path(paths, gpu, nets[0]);

            string(json, "path", lc_topo_path_name(path.type));
            number(json, "gbytes_per_s", path.gbps);
        }
        lc_json_end(json);
    }
    lc_json_end(json);
    lc_topo_paths_free(paths);
}

/* One way of NCCL's between two devices; none is left out. */
static void print_way(struct lc_json *json, const struct lc_topo_routes *routes, int from, int to)
{
    struct lc_topo_path path = lc_topo_routes_path(routes, from, to);

    if (path.type == LC_TOPO_PATH_DIS)
        return;
    lc_json_object(json);
    known(json, "from", from);
    known(json, "to", to);
    string(json, "type", lc_topo_path_name(path.type));
    number(json, "gbytes_per_s", path.gbps);
    known(json, "hops", path.hops);
    lc_json_end(json);
}

/* The ports that a GPU's channels take in turn. */
static void print_own_nets(struct lc_json *json, const struct lc_topo_routes *routes)
{
    lc_json_key(json, "channels");
    lc_json_array(json);
    for (int gpu = 0; gpu < routes->gpu_count; gpu++) {
        int turns = lc_topo_net_turns(routes, gpu);

        lc_json_object(json);
        known(json, "gpu", routes->gpus[gpu]);
        lc_json_key(json, "nets");
        lc_json_array(json);
        for (int i = 0; i < turns && lc_topo_own_net(routes, gpu, i) >= 0; i++)
            lc_json_int(json, routes->nets[lc_topo_own_net(routes, gpu, i)]);
        lc_json_end(json);
        lc_json_end(json);
    }
    lc_json_end(json);
}

static void print_ways_from(struct lc_json *json, const struct lc_topo_routes *routes, int from)
{
    for (int i = 0; i < routes->gpu_count; i++)
        print_way(json, routes, from, routes->gpus[i]);
    for (int i = 0; i < routes->cpu_count; i++)
        print_way(json, routes, from, routes->cpus[i]);
    for (int i = 0; i < routes->net_count; i++)
        print_way(json, routes, from, routes->nets[i]);
}

/* Ways begin at GPUs and ports and end at any of them or at a NUMA node, as NCCL logs them. */
static void print_ways(struct lc_json *json, const struct lc_topo_routes *routes)
{
    lc_json_key(json, "paths");
    lc_json_array(json);
    for (int i = 0; i < routes->gpu_count; i++)
        print_ways_from(json, routes, routes->gpus[i]);
    for (int i = 0; i < routes->net_count; i++)
        print_ways_from(json, routes, routes->nets[i]);
    lc_json_end(json);
    print_own_nets(json, routes);
}

static int print_document(const struct lc_topo *topo, const struct lc_topo_routes *routes,
                          FILE *out)
{
    struct lc_json json;

    lc_json_init(&json, out);
    lc_json_object(&json);
    string(&json, "schema", "loongcomm.topology/1");
    string(&json, "source", topo->name);
    string(&json, "format", lc_topo_format_name(topo->format));
    boolean(&json, "partial", lc_topo_is_partial(topo));
    lc_json_key(&json, "notes");
    lc_json_array(&json);
    for (int i = 0; i < topo->note_count; i++)
        lc_json_string(&json, topo->notes[i]);
    lc_json_end(&json);
    lc_json_key(&json, "nodes");
    lc_json_array(&json);
    for (int i = 0; i < topo->count; i++) {
        const struct lc_topo_node *node = &topo->nodes[i];

        lc_json_object(&json);
        known(&json, "node", i);
        known(&json, "parent", node->parent);
        string(&json, "type", lc_topo_tags[node->type].name);
        string(&json, "id", *node->id ? node->id : NULL);
        known(&json, "line", node->line ? node->line : LC_TOPO_UNKNOWN);
        print_fields(&json, topo, i);
        lc_json_end(&json);
    }
    lc_json_end(&json);
    print_nearest(&json, topo);
    if (routes)
        print_ways(&json, routes);
    lc_json_end(&json);
    return lc_json_finish(&json);
}

int lc_topo_print_json(const struct lc_topo *topo, FILE *out)
{
    return print_document(topo, NULL, out);
}

int lc_topo_print_json_paths(const struct lc_topo *topo, lc_topo_getter *get, FILE *out)
{
    struct lc_topo_routes *routes = NULL;
    struct lc_topo_nccl nccl;
    int err;

    lc_topo_nccl_read(get, &nccl);
    err = lc_topo_routes_find(topo, &nccl, &routes);
    if (!err)
        err = print_document(topo, routes, out);
    lc_topo_routes_free(routes);
    return err;
}
