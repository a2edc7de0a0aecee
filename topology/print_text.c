/* SPDX-License-Identifier: Apache-2.0 */
#include "topology/print.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void lc_topo_say(struct lc_topo_text *text, const char *fmt, ...)
{
    size_t room = sizeof(text->s) - text->used;
    va_list ap;
    int len;

    va_start(ap, fmt);
    len = vsnprintf(text->s + text->used, room, fmt, ap);
    va_end(ap);
    for (char *c = text->s + text->used; *c; c++) {
        if (iscntrl((unsigned char)*c) || (*c & 0x80))
            *c = '?';
    }
    if (len > 0)
        text->used += (size_t)len < room ? (size_t)len : room - 1;
}

void lc_topo_say_cpus(struct lc_topo_text *text, const char *mask)
{
    const char *at = mask ? mask + strlen(mask) : NULL;
    const char *comma = "";
    int first = -1;
    int cpu = 0;

    while (at && at > mask) {
        unsigned long word;

        while (at > mask && at[-1] != ',')
            at--;
        word = strtoul(at, NULL, 16);
        for (int bit = 0; bit < 32; bit++, cpu++) {
            bool set = word >> bit & 1;

            if (set && first < 0)
                first = cpu;
            if (!set && first >= 0) {
                lc_topo_say(text, first == cpu - 1 ? "%s%d" : "%s%d-%d", comma, first, cpu - 1);
                comma = ",";
                first = -1;
            }
        }
        at -= at > mask;
    }
    if (first >= 0)
        lc_topo_say(text, first == cpu - 1 ? "%s%d" : "%s%d-%d", comma, first, cpu - 1);
}

void lc_topo_say_link(struct lc_topo_text *text, const struct lc_topo_pci *pci)
{
    if (pci->gts > 0)
        lc_topo_say(text, "%g GT/s", pci->gts);
    if (pci->width)
        lc_topo_say(text, "%sx%d", pci->gts > 0 ? " " : "", pci->width);
}

void lc_topo_say_net(struct lc_topo_text *text, const struct lc_topo *topo, int net)
{
    const char *state = lc_topo_attribute(topo, net, "state");
    int64_t mbps = topo->nodes[net].net.mbps;

    if (mbps)
        lc_topo_say(text, "%g Gb/s", (double)mbps / 1000);
    if (state && strcasecmp(state, "up") != 0 && strcasecmp(state, "active") != 0 &&
        strcasecmp(state, "unknown") != 0)
        lc_topo_say(text, "%s%s", mbps ? " " : "", state);
}

int lc_topo_gpu_of(const struct lc_topo *topo, const struct lc_topo_link *link)
{
    return link->node < 0 ? -1 : lc_topo_find_child(topo, link->node, LC_TOPO_GPU, NULL, NULL);
}

int lc_topo_gpu_number(const struct lc_topo *topo, int gpu)
{
    int number = 0;

    if (topo->nodes[gpu].gpu.dev >= 0)
        return topo->nodes[gpu].gpu.dev;
    for (int i = lc_topo_next(topo, LC_TOPO_GPU, -1); i >= 0 && i < gpu;
         i = lc_topo_next(topo, LC_TOPO_GPU, i))
        number++;
    return number;
}

static bool is_switch(const struct lc_topo_link *link)
{
    return link->target_class == 0x068000 || (link->node < 0 && link->target_class == 0);
}

static void say_links_of(struct lc_topo_text *text, const struct lc_topo *topo, int gpu,
                         enum lc_topo_type type, const char *name)
{
    const char *comma = " to ";
    int switched = 0;
    bool any = false;

    for (int at = topo->nodes[gpu].child; at >= 0; at = topo->nodes[at].next) {
        const struct lc_topo_link *link = &topo->nodes[at].link;
        int peer;

        if (topo->nodes[at].type != type)
            continue;
        if (!any)
            lc_topo_say(text, "%s%s", text->used ? "; " : "", name);
        any = true;
        peer = lc_topo_gpu_of(topo, link);
        if (is_switch(link))
            switched += link->count;
        else if (peer >= 0 && peer != gpu)
            lc_topo_say(text, "%sGPU %d x%d", comma, lc_topo_gpu_number(topo, peer), link->count);
        else if (peer == gpu)
            lc_topo_say(text, "%sitself x%d", comma, link->count);
        else
            lc_topo_say(text, "%s%.20s x%d", comma, link->target, link->count);
        if (!is_switch(link))
            comma = ", ";
    }
    if (switched)
        lc_topo_say(text, "%sswitches x%d", comma, switched);
}

void lc_topo_say_links(struct lc_topo_text *text, const struct lc_topo *topo, int gpu)
{
    int c2c = lc_topo_find_child(topo, gpu, LC_TOPO_C2C, NULL, NULL);

    say_links_of(text, topo, gpu, LC_TOPO_NVLINK, "NVLink");
    say_links_of(text, topo, gpu, LC_TOPO_XGMI, "XGMI");
    if (c2c >= 0)
        lc_topo_say(text, "%sC2C to the CPU x%d", text->used ? "; " : "",
                    topo->nodes[c2c].link.count);
}

const char *lc_topo_format_name(enum lc_topo_format format)
{
    static const char *const names[] = { "nccl", "rccl", "hwloc", "sysfs" };

    return names[format];
}

static int count_of(const struct lc_topo *topo, enum lc_topo_type type)
{
    int count = 0;

    for (int i = lc_topo_next(topo, type, -1); i >= 0; i = lc_topo_next(topo, type, i))
        count++;
    return count;
}

void lc_topo_say_counts(struct lc_topo_text *text, const struct lc_topo *topo)
{
    int gpus = count_of(topo, LC_TOPO_GPU);
    int nics = count_of(topo, LC_TOPO_NIC);
    int nets = count_of(topo, LC_TOPO_NET);
    int cpus = count_of(topo, LC_TOPO_CPU);

    lc_topo_say(text, "%d GPU%s, %d NIC%s", gpus, gpus == 1 ? "" : "s", nics, nics == 1 ? "" : "s");
    if (nets != nics)
        lc_topo_say(text, " (%d port%s)", nets, nets == 1 ? "" : "s");
    lc_topo_say(text, ", %d NUMA node%s", cpus, cpus == 1 ? "" : "s");
}

static void describe_cpu(struct lc_topo_text *text, const struct lc_topo_cpu *cpu)
{
    if (cpu->numa < 0)
        lc_topo_say(text, "NUMA node unknown");
    else
        lc_topo_say(text, "NUMA %d", cpu->numa);
    if (cpu->cpus) {
        lc_topo_say(text, "  CPUs ");
        lc_topo_say_cpus(text, cpu->cpus);
    }
    if (cpu->vendor)
        lc_topo_say(text, "  %s", cpu->vendor);
    else if (cpu->arch)
        lc_topo_say(text, "  %s", cpu->arch);
    if (cpu->vendor && cpu->family >= 0 && cpu->model >= 0)
        lc_topo_say(text, " %d/%d", cpu->family, cpu->model);
}

static void describe_net(struct lc_topo_text *text, const struct lc_topo *topo, int index)
{
    const struct lc_topo_node *node = &topo->nodes[index];

    lc_topo_say(text, "%s", *node->id ? node->id : "(no name)");
    if (node->net.port > 0)
        lc_topo_say(text, ":%d", node->net.port);
    if (node->net.mbps || lc_topo_attribute(topo, index, "state"))
        lc_topo_say(text, "  ");
    lc_topo_say_net(text, topo, index);
    if (node->net.gdr)
        lc_topo_say(text, "  GPUDirect");
}

int lc_topo_only_port(const struct lc_topo *topo, int pci)
{
    int nic = lc_topo_find_child(topo, pci, LC_TOPO_NIC, NULL, NULL);
    int net = nic < 0 ? -1 : topo->nodes[nic].child;

    return net >= 0 && topo->nodes[net].next < 0 ? net : -1;
}

static void describe_pci(struct lc_topo_text *text, const struct lc_topo *topo, int index)
{
    static const char *const kinds[] = { "switch", "GPU", "NIC", "NVSwitch", "PCI" };
    const struct lc_topo_pci *pci = &topo->nodes[index].pci;
    int gpu = lc_topo_find_child(topo, index, LC_TOPO_GPU, NULL, NULL);
    int net = lc_topo_only_port(topo, index);

    lc_topo_say(text, "%s", kinds[pci->kind]);
    if (gpu >= 0)
        lc_topo_say(text, " %d", lc_topo_gpu_number(topo, gpu));
    if (net >= 0) {
        lc_topo_say(text, " ");
        describe_net(text, topo, net);
    }
    lc_topo_say(text, "  %s", topo->nodes[index].id);
    if (pci->gts > 0 || pci->width) {
        lc_topo_say(text, "  ");
        lc_topo_say_link(text, pci);
    }
    if (gpu < 0)
        return;
    if (topo->nodes[gpu].gpu.sm >= 0 && topo->format != LC_TOPO_RCCL)
        lc_topo_say(text, "  sm_%d", topo->nodes[gpu].gpu.sm);
    if (topo->nodes[gpu].child >= 0) {
        struct lc_topo_text links = { .used = 0 };

        lc_topo_say_links(&links, topo, gpu);
        lc_topo_say(text, "  %s", links.s);
    }
}

/* One line of the tree, or none for what has been told in its parent's line. */
static bool describe(struct lc_topo_text *text, const struct lc_topo *topo, int index)
{
    const struct lc_topo_node *node = &topo->nodes[index];

    switch (node->type) {
    case LC_TOPO_CPU: describe_cpu(text, &node->cpu); return true;
    case LC_TOPO_PCI: describe_pci(text, topo, index); return true;
    case LC_TOPO_NET:
        if (lc_topo_only_port(topo, topo->nodes[node->parent].parent) >= 0 &&
            topo->nodes[topo->nodes[node->parent].parent].type == LC_TOPO_PCI)
            return false;
        lc_topo_say(text, "port ");
        describe_net(text, topo, index);
        return true;
    case LC_TOPO_PCILINK: lc_topo_say(text, "link to %s", node->link.target); return true;
    case LC_TOPO_NIC:
        if (topo->nodes[node->parent].type != LC_TOPO_CPU)
            return false;
        lc_topo_say(text, "network");
        return true;
    default: return false;
    }
}

struct tree {
    const struct lc_topo *topo;
    FILE *out;
    char prefix[4 * (LC_TOPO_MAX_DEPTH + 2) + 1];
};

/* What stands behind `at`; a NIC without a line of its own counts as its children. `at` < 0: the first. */
static int step(const struct tree *tree, int parent, int at)
{
    const struct lc_topo_node *nodes = tree->topo->nodes;
    struct lc_topo_text text = { .used = 0 };

    if (at < 0)
        return nodes[parent].child;
    if (nodes[at].type == LC_TOPO_NIC && nodes[at].child >= 0 && !describe(&text, tree->topo, at))
        return nodes[at].child;
    while (nodes[at].next < 0 && nodes[at].parent != parent)
        at = nodes[at].parent;
    return nodes[at].next;
}

static int next_line(const struct tree *tree, int parent, int after)
{
    struct lc_topo_text text = { .used = 0 };
    int at = step(tree, parent, after);

    while (at >= 0 && !describe(&text, tree->topo, at)) {
        at = step(tree, parent, at);
        text = (struct lc_topo_text){ .used = 0 };
    }
    return at;
}

static void print_children(struct tree *tree, int parent, size_t depth)
{
    for (int at = next_line(tree, parent, -1); at >= 0;) {
        struct lc_topo_text text = { .used = 0 };
        int next = next_line(tree, parent, at);

        (void)describe(&text, tree->topo, at);
        while (text.used && text.s[text.used - 1] == ' ')
            text.s[--text.used] = '\0';
        (void)fprintf(tree->out, "%s%s%s\n", tree->prefix, next >= 0 ? "|-- " : "`-- ", text.s);
        memcpy(tree->prefix + 4 * depth, next >= 0 ? "|   " : "    ", 5);
        print_children(tree, at, depth + 1);
        tree->prefix[4 * depth] = '\0';
        at = next;
    }
}

static void print_nearest(const struct lc_topo *topo, const struct lc_topo_paths *paths, int gpu,
                          FILE *out)
{
    struct lc_topo_text text = { .used = 0 };
    int nets[4];
    int count = lc_topo_nearest_nets(paths, gpu, nets, 4);

    for (int i = 0; i < count && i < 4; i++) {
        struct lc_topo_path path = lc_topo_path(paths, gpu, nets[i]);

        lc_topo_say(&text, "%s%.40s", i ? ", " : "", topo->nodes[nets[i]].id);
        if (i == count - 1 || i == 3)
            lc_topo_say(&text, "%s  %s  %.1f GB/s", count > 4 ? ", ..." : "",
                        lc_topo_path_name(path.type), path.gbps);
    }
    (void)fprintf(out, "GPU %d: %s\n", lc_topo_gpu_number(topo, gpu), count ? text.s : "none");
}

static void print_paths(const struct lc_topo *topo, FILE *out)
{
    struct lc_topo_paths *paths = NULL;

    if (lc_topo_is_partial(topo) || lc_topo_paths_find(topo, &paths) != 0)
        return;
    (void)fprintf(out, "\nnearest network port of each GPU, with NCCL's name of the way:\n");
    for (int i = lc_topo_next(topo, LC_TOPO_GPU, -1); i >= 0;
         i = lc_topo_next(topo, LC_TOPO_GPU, i))
        print_nearest(topo, paths, i, out);
    lc_topo_paths_free(paths);
}

int lc_topo_print_text(const struct lc_topo *topo, FILE *out)
{
    struct tree tree = { .topo = topo, .out = out };
    struct lc_topo_text counts = { .used = 0 };
    struct lc_topo_text name = { .used = 0 };

    lc_topo_say_counts(&counts, topo);
    lc_topo_say(&name, "%s", topo->name);
    (void)fprintf(out, "%s: %s\n", name.s, counts.s);
    print_children(&tree, 0, 0);
    print_paths(topo, out);
    for (int i = 0; i < topo->note_count; i++)
        (void)fprintf(out, "note: %s\n", topo->notes[i]);
    return fflush(out) != 0 || ferror(out) ? -EIO : 0;
}
