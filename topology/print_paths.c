/* SPDX-License-Identifier: Apache-2.0 */
#include "topology/print.h"
#include "topology/routes.h"

#include <errno.h>
#include <string.h>

#define WIDTH 12 /* of a column */

struct table {
    const struct lc_topo_routes *routes;
    FILE *out;
};

static int count(const struct table *table)
{
    return table->routes->gpu_count + table->routes->net_count;
}

static int device(const struct table *table, int at)
{
    const struct lc_topo_routes *routes = table->routes;

    return at < routes->gpu_count ? routes->gpus[at] : routes->nets[at - routes->gpu_count];
}

static void name(const struct table *table, int at, struct lc_topo_text *out)
{
    const struct lc_topo *topo = table->routes->topo;
    int node = device(table, at);

    out->used = 0;
    if (topo->nodes[node].type == LC_TOPO_GPU)
        lc_topo_say(out, "GPU %d", lc_topo_gpu_number(topo, node));
    else
        lc_topo_say(out, "%.*s", WIDTH - 1, topo->nodes[node].id);
}

static void row(const struct table *table, int from)
{
    struct lc_topo_text text = { .used = 0 };

    name(table, from, &text);
    (void)fprintf(table->out, "%-*s", WIDTH, text.s);
    for (int to = 0; to < count(table); to++) {
        struct lc_topo_path path = lc_topo_routes_path(table->routes, device(table, from),
                                                       device(table, to));

        text = (struct lc_topo_text){ .used = 0 };
        if (from == to)
            lc_topo_say(&text, "-");
        else if (path.type == LC_TOPO_PATH_DIS)
            lc_topo_say(&text, "none");
        else
            lc_topo_say(&text, "%s %.1f", lc_topo_path_name(path.type), path.gbps);
        (void)fprintf(table->out, "%-*s%s", to + 1 == count(table) ? 0 : WIDTH, text.s,
                      to + 1 == count(table) ? "\n" : "");
    }
}

static void print_table(const struct table *table)
{
    struct lc_topo_text text = { .used = 0 };

    (void)fprintf(table->out,
                  "\nways as NCCL 2.28 sees them, towards what stands above, GB/s:\n%-*s", WIDTH,
                  "");
    for (int i = 0; i < count(table); i++) {
        name(table, i, &text);
        (void)fprintf(table->out, "%-*s", WIDTH, text.s);
    }
    (void)fputc('\n', table->out);
    for (int i = 0; i < table->routes->gpu_count; i++)
        row(table, i);
}

static void print_channels(const struct table *table)
{
    const struct lc_topo_routes *routes = table->routes;

    (void)fprintf(table->out, "\nports that the channels of each GPU take in turn:\n");
    for (int gpu = 0; gpu < routes->gpu_count; gpu++) {
        struct lc_topo_text text = { .used = 0 };

        name(table, gpu, &text);
        lc_topo_say(&text, ":");
        for (int i = 0; i < lc_topo_net_turns(routes, gpu) && lc_topo_own_net(routes, gpu, i) >= 0;
             i++)
            lc_topo_say(&text, " %s",
                        routes->topo->nodes[routes->nets[lc_topo_own_net(routes, gpu, i)]].id);
        (void)fprintf(table->out, "%s\n", text.s);
    }
}

int lc_topo_print_paths(const struct lc_topo *topo, lc_topo_getter *get, FILE *out)
{
    struct table table = { .out = out };
    struct lc_topo_routes *routes = NULL;
    struct lc_topo_nccl nccl;
    int err;

    lc_topo_nccl_read(get, &nccl);
    err = lc_topo_routes_find(topo, &nccl, &routes);
    if (err)
        return err;
    table.routes = routes;
    print_table(&table);
    print_channels(&table);
    lc_topo_routes_free(routes);
    return fflush(out) != 0 || ferror(out) ? -EIO : 0;
}
