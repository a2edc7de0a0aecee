/* SPDX-License-Identifier: Apache-2.0
 *
 * From attributes to fields, and what contradicts itself is refused. */
#include "topology/topo_internal.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool hex_run(const char **at, int least, int most)
{
    int digits = 0;

    while (digits < most && isxdigit((unsigned char)**at)) {
        (*at)++;
        digits++;
    }
    return digits >= least;
}

bool lc_topo_is_busid(const char *text)
{
    return hex_run(&text, 4, 8) && *text++ == ':' && hex_run(&text, 2, 2) && *text++ == ':' &&
           hex_run(&text, 2, 2) && *text++ == '.' && hex_run(&text, 1, 1) && !*text;
}

/* A whole number between the bounds. Missing or empty (NCCL writes that for what it does not know): `dflt`. */
static int number(const struct lc_topo *topo, int node, const char *name, int64_t dflt, int64_t min,
                  int64_t max, int64_t *out)
{
    const char *text = lc_topo_attribute(topo, node, name);
    char *end;
    long long value;

    *out = dflt;
    if (!text || !*text)
        return 0;
    errno = 0;
    value = strtoll(text, &end, 0);
    if (errno || *end || isspace((unsigned char)*text))
        return lc_topo_fail(topo, EINVAL, topo->nodes[node].line, "%s=\"%s\" is no whole number",
                            name, text);
    if (value < min || value > max)
        return lc_topo_fail(topo, ERANGE, topo->nodes[node].line,
                            "%s=\"%s\" is not between %lld and %lld", name, text, (long long)min,
                            (long long)max);
    *out = value;
    return 0;
}

static int small(const struct lc_topo *topo, int node, const char *name, int dflt, int min, int max,
                 int *out)
{
    int64_t value;
    int err = number(topo, node, name, dflt, min, max, &value);

    *out = (int)value;
    return err;
}

static int flag(const struct lc_topo *topo, int node, const char *name, bool *out)
{
    int value;
    int err = small(topo, node, name, 0, 0, INT_MAX, &value);

    *out = value != 0;
    return err;
}

/* 64 bits in hexadecimal, with or without 0x, as NCCL reads guid and host_hash. */
static int hash(const struct lc_topo *topo, int node, const char *name, uint64_t *out)
{
    const char *text = lc_topo_attribute(topo, node, name);
    char *end;

    *out = 0;
    if (!text || !*text)
        return 0;
    errno = 0;
    *out = strtoull(text, &end, 16);
    if (errno || *end || !isxdigit((unsigned char)*text))
        return lc_topo_fail(topo, EINVAL, topo->nodes[node].line,
                            "%s=\"%s\" is no hexadecimal number of 64 bits", name, text);
    return 0;
}

static void lower(char *text)
{
    for (; *text; text++)
        *text = (char)tolower((unsigned char)*text);
}

static int bus_id(struct lc_topo *topo, int node, const char *name, const char **out)
{
    char *text = (char *)lc_topo_attribute(topo, node, name);
    int line = topo->nodes[node].line;

    if (!text)
        return lc_topo_fail(topo, EINVAL, line, "<%s> without %s",
                            lc_topo_tags[topo->nodes[node].type].name, name);
    lower(text);
    *out = text;
    return 0;
}

static int finish_cpu(struct lc_topo *topo, int node, struct lc_topo_cpu *cpu)
{
    int err = small(topo, node, "numaid", LC_TOPO_UNKNOWN, -1, 65535, &cpu->numa);

    if (err)
        return err;
    if (!lc_topo_attribute(topo, node, "numaid"))
        return lc_topo_fail(topo, EINVAL, topo->nodes[node].line, "<cpu> without numaid");
    topo->nodes[node].id = lc_topo_attribute(topo, node, "numaid");
    cpu->cpus = lc_topo_attribute(topo, node, "affinity");
    cpu->arch = lc_topo_attribute(topo, node, "arch");
    cpu->vendor = lc_topo_attribute(topo, node, "vendor");
    if (cpu->cpus && cpu->cpus[strspn(cpu->cpus, "0123456789abcdefABCDEF,")])
        return lc_topo_fail(topo, EINVAL, topo->nodes[node].line,
                            "affinity=\"%s\" is no mask of processors", cpu->cpus);
    for (int at = topo->nodes[0].child; at >= 0 && at < node; at = topo->nodes[at].next) {
        if (topo->nodes[at].cpu.numa == cpu->numa && topo->nodes[at].type == LC_TOPO_CPU) {
            uint64_t host;

            err = hash(topo, node, "host_hash", &host);
            if (!err && topo->nodes[at].cpu.host == host)
                return lc_topo_fail(topo, EINVAL, topo->nodes[node].line,
                                    "NUMA node %d is there twice (line %d)", cpu->numa,
                                    topo->nodes[at].line);
        }
    }
    err = hash(topo, node, "host_hash", &cpu->host);
    if (!err)
        err = small(topo, node, "familyid", LC_TOPO_UNKNOWN, -1, 65535, &cpu->family);
    return err ? err : small(topo, node, "modelid", LC_TOPO_UNKNOWN, -1, 65535, &cpu->model);
}

/* "16.0 GT/s PCIe", "32 GT/s PCIe/s", "5 GT/s", and "" or "Unknown" for what nobody knows. */
static int link_speed(const struct lc_topo *topo, int node, double *out)
{
    const char *text = lc_topo_attribute(topo, node, "link_speed");
    char *end;

    *out = 0;
    if (!text || !*text || strncasecmp(text, "unknown", 7) == 0)
        return 0;
    *out = strtod(text, &end);
    if (end == text || strncmp(end, " GT/s", 5) != 0 || !isfinite(*out) || *out < 0 || *out > 1024)
        return lc_topo_fail(topo, EINVAL, topo->nodes[node].line,
                            "link_speed=\"%s\" is no speed in GT/s", text);
    return 0;
}

static enum lc_topo_pci_kind pci_kind(const struct lc_topo *topo, int node, uint32_t class)
{
    if (lc_topo_find_child(topo, node, LC_TOPO_GPU, NULL, NULL) >= 0 || class >> 16 == 0x03)
        return LC_TOPO_PCI_GPU;
    if (lc_topo_find_child(topo, node, LC_TOPO_NIC, NULL, NULL) >= 0 || class >> 16 == 0x02)
        return LC_TOPO_PCI_NIC;
    if (class == 0x068000)
        return LC_TOPO_PCI_NVSWITCH;
    if (class == 0x060400 || lc_topo_find_child(topo, node, LC_TOPO_PCI, NULL, NULL) >= 0)
        return LC_TOPO_PCI_BRIDGE;
    return LC_TOPO_PCI_OTHER;
}

static int finish_pci(struct lc_topo *topo, int node, struct lc_topo_pci *pci)
{
    int class;
    int err = bus_id(topo, node, "busid", &topo->nodes[node].id);

    if (err)
        return err;
    if (!lc_topo_is_busid(topo->nodes[node].id))
        return lc_topo_fail(topo, EINVAL, topo->nodes[node].line,
                            "busid=\"%s\" is no bus id (DDDD:BB:DD.F)", topo->nodes[node].id);
    err = small(topo, node, "class", 0, 0, 0xffffff, &class);
    if (!err)
        err = small(topo, node, "vendor", LC_TOPO_UNKNOWN, 0, 0xffff, &pci->vendor);
    if (!err)
        err = small(topo, node, "device", LC_TOPO_UNKNOWN, 0, 0xffff, &pci->device);
    if (!err)
        err = small(topo, node, "subsystem_vendor", LC_TOPO_UNKNOWN, 0, 0xffff, &pci->subvendor);
    if (!err)
        err = small(topo, node, "subsystem_device", LC_TOPO_UNKNOWN, 0, 0xffff, &pci->subdevice);
    if (!err)
        err = small(topo, node, "link_width", 0, 0, 255, &pci->width);
    if (!err)
        err = link_speed(topo, node, &pci->gts);
    if (!err) {
        pci->class = (uint32_t) class;
        pci->speed = lc_topo_attribute(topo, node, "link_speed");
        pci->kind = pci_kind(topo, node, pci->class);
    }
    return err;
}

static int finish_gpu(struct lc_topo *topo, int node, struct lc_topo_gpu *gpu)
{
    int err = small(topo, node, "dev", LC_TOPO_UNKNOWN, -1, 65535, &gpu->dev);

    if (!err)
        err = small(topo, node, "rank", LC_TOPO_UNKNOWN, -1, INT_MAX, &gpu->rank);
    if (!err)
        err = small(topo, node, "sm", LC_TOPO_UNKNOWN, -1, 65535, &gpu->sm);
    return err ? err : flag(topo, node, "gdr", &gpu->gdr);
}

static int finish_net(struct lc_topo *topo, int node, struct lc_topo_net *net)
{
    const char *name = lc_topo_attribute(topo, node, "name");
    int err = small(topo, node, "dev", LC_TOPO_UNKNOWN, -1, 65535, &net->dev);

    topo->nodes[node].id = name ? name : "";
    if (!err)
        err = number(topo, node, "speed", 0, -1, INT_MAX, &net->mbps);
    if (!err)
        err = small(topo, node, "port", 0, -1, INT_MAX, &net->port);
    if (!err)
        err = hash(topo, node, "guid", &net->guid);
    if (net->mbps < 0)
        net->mbps = 0; /* drivers say -1 while the link is down */
    return err ? err : flag(topo, node, "gdr", &net->gdr);
}

static int finish_link(struct lc_topo *topo, int node, struct lc_topo_link *link)
{
    enum lc_topo_type type = topo->nodes[node].type;
    int class = 0;
    int err = 0;

    link->node = -1;
    link->target = "";
    if (type != LC_TOPO_C2C)
        err = bus_id(topo, node, "target", &link->target);
    if (!err)
        err = small(topo, node, "count", 1, 1, 1024, &link->count);
    if (!err && type == LC_TOPO_C2C)
        err = small(topo, node, "bw", 0, 0, 100000000, &link->mbps);
    if (!err)
        err = small(topo, node, "tclass", 0, 0, 0xffffff, &class);
    link->target_class = (uint32_t) class;
    return err;
}

static int finish_node(struct lc_topo *topo, int index)
{
    struct lc_topo_node *node = &topo->nodes[index];

    switch (node->type) {
    case LC_TOPO_CPU: return finish_cpu(topo, index, &node->cpu);
    case LC_TOPO_PCI: return finish_pci(topo, index, &node->pci);
    case LC_TOPO_GPU: return finish_gpu(topo, index, &node->gpu);
    case LC_TOPO_NET: return finish_net(topo, index, &node->net);
    case LC_TOPO_NVLINK:
    case LC_TOPO_XGMI:
    case LC_TOPO_C2C:
    case LC_TOPO_PCILINK: return finish_link(topo, index, &node->link);
    default: return 0;
    }
}

static uint64_t host_of(const struct lc_topo *topo, int index)
{
    int cpu = lc_topo_above(topo, index, LC_TOPO_CPU);

    return cpu < 0 ? 0 : topo->nodes[cpu].cpu.host;
}

/* PCI functions by machine and bus id, so that a file of any size is judged in little more than one pass. */
struct entry {
    uint64_t host;
    const char *id;
    int node;
};

static int compare(const void *a, const void *b)
{
    const struct entry *x = a;
    const struct entry *y = b;

    if (x->host != y->host)
        return x->host < y->host ? -1 : 1;
    return strcmp(x->id, y->id);
}

/* Machines of many switches have been seen that name each of them alike; a device is there once. */
static int same_bus_id(struct lc_topo *topo, const struct entry *entries, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        const struct lc_topo_node *a = &topo->nodes[entries[i - 1].node];
        const struct lc_topo_node *b = &topo->nodes[entries[i].node];

        if (compare(&entries[i - 1], &entries[i]) != 0)
            continue;
        if (a > b) {
            a = &topo->nodes[entries[i].node];
            b = &topo->nodes[entries[i - 1].node];
        }
        if (a->pci.kind != LC_TOPO_PCI_BRIDGE || b->pci.kind != LC_TOPO_PCI_BRIDGE)
            return lc_topo_fail(topo, EINVAL, b->line, "bus id %s is there twice (line %d)", b->id,
                                a->line);
        if (i == 1 || compare(&entries[i - 2], &entries[i - 1]) != 0)
            lc_topo_remark(topo, b->line, "bridge %s is there twice (line %d)", b->id, a->line);
    }
    return 0;
}

static void resolve(struct lc_topo *topo, const struct entry *entries, size_t count)
{
    for (int i = 0; i < topo->count; i++) {
        struct lc_topo_node *node = &topo->nodes[i];
        struct entry key = { .host = host_of(topo, i) };
        const struct entry *found;

        if (node->type < LC_TOPO_NVLINK || node->type == LC_TOPO_C2C)
            continue;
        key.id = node->link.target;
        found = count ? bsearch(&key, entries, count, sizeof(key), compare) : NULL;
        if (found)
            node->link.node = found->node;
        else if (node->link.target_class >> 16 == 0x03)
            lc_topo_remark(topo, node->line, "a link leads to GPU %s, which is not in the topology",
                           node->link.target);
    }
}

static int check_bus_ids(struct lc_topo *topo)
{
    struct entry *entries = calloc((size_t)topo->count, sizeof(*entries));
    size_t count = 0;
    int err;

    if (!entries)
        return lc_topo_fail(topo, ENOMEM, 0, "no memory");
    for (int i = lc_topo_next(topo, LC_TOPO_PCI, -1); i >= 0;
         i = lc_topo_next(topo, LC_TOPO_PCI, i))
        entries[count++] = (struct entry){ host_of(topo, i), topo->nodes[i].id, i };
    qsort(entries, count, sizeof(*entries), compare);
    err = same_bus_id(topo, entries, count);
    if (!err)
        resolve(topo, entries, count);
    free(entries);
    return err;
}

struct number_of { /* a GPU's rank or number */
    int64_t key;
    uint64_t host;
    int node;
};

static int compare_numbers(const void *a, const void *b)
{
    const struct number_of *x = a;
    const struct number_of *y = b;

    if (x->host != y->host)
        return x->host < y->host ? -1 : 1;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->node < y->node ? -1 : 1;
}

/* Ranks are those of a communicator; two GPU elements of one PCI function are two ranks or partitions that share it. */
static int check_gpus(const struct lc_topo *topo, bool ranks)
{
    struct number_of *gpus = calloc((size_t)topo->count, sizeof(*gpus));
    size_t count = 0;
    int err = 0;

    if (!gpus)
        return lc_topo_fail(topo, ENOMEM, 0, "no memory");
    for (int i = lc_topo_next(topo, LC_TOPO_GPU, -1); i >= 0;
         i = lc_topo_next(topo, LC_TOPO_GPU, i)) {
        const struct lc_topo_gpu *gpu = &topo->nodes[i].gpu;

        gpus[count] = (struct number_of){ ranks ? gpu->rank : gpu->dev,
                                          ranks ? 0 : host_of(topo, i), i };
        count += gpus[count].key >= 0;
    }
    qsort(gpus, count, sizeof(*gpus), compare_numbers);
    for (size_t i = 1; i < count && !err; i++) {
        const struct lc_topo_node *a = &topo->nodes[gpus[i - 1].node];
        const struct lc_topo_node *b = &topo->nodes[gpus[i].node];

        if (gpus[i - 1].key == gpus[i].key && gpus[i - 1].host == gpus[i].host &&
            (ranks || a->parent != b->parent))
            err = lc_topo_fail(topo, EINVAL, b->line, "two GPUs with %s %lld (line %d)",
                               ranks ? "rank" : "dev", (long long)gpus[i].key, a->line);
    }
    free(gpus);
    return err;
}

bool lc_topo_is_partial(const struct lc_topo *topo)
{
    return lc_topo_next(topo, LC_TOPO_GPU, -1) < 0 || lc_topo_next(topo, LC_TOPO_NET, -1) < 0;
}

static void remark_partial(struct lc_topo *topo)
{
    bool gpus = lc_topo_next(topo, LC_TOPO_GPU, -1) >= 0;
    bool nets = lc_topo_next(topo, LC_TOPO_NET, -1) >= 0;

    if (gpus && nets)
        return;
    if (topo->format == LC_TOPO_SYSFS || topo->format == LC_TOPO_HWLOC)
        lc_topo_remark(topo, 0, "no %s here",
                       gpus   ? "network device"
                       : nets ? "GPU"
                              : "GPU and no network device");
    else
        lc_topo_remark(topo, 0,
                       "partial: no %s in this file; NCCL adds what it finds on the machine",
                       gpus   ? "network device"
                       : nets ? "GPU"
                              : "GPU and no network device");
}

int lc_topo_finish(struct lc_topo *topo)
{
    int err = 0;

    for (int i = 0; i < topo->count && !err; i++)
        err = finish_node(topo, i);
    if (!err)
        err = check_bus_ids(topo);
    if (!err)
        err = check_gpus(topo, false);
    if (!err)
        err = check_gpus(topo, true);
    if (!err)
        remark_partial(topo);
    return err;
}

double lc_topo_pci_gbps(const struct lc_topo_pci *pci)
{
    /* Compared as NCCL does, by the first characters: "64 GT/s" is unknown to it, "64.0 GT/s PCIe" is not. */
    static const struct {
        const char *speed;
        int units; /* of 100 Mbit/s for each lane */
    } known[] = {
        {"2.5 GT/s",        15 },
        { "5 GT/s",         30 },
        { "8 GT/s",         60 },
        { "16 GT/s",        120},
        { "32 GT/s",        240},
        { "5.0 GT/s PCIe",  30 },
        { "8.0 GT/s PCIe",  60 },
        { "16.0 GT/s PCIe", 120},
        { "32.0 GT/s PCIe", 240},
        { "64.0 GT/s PCIe", 480},
    };
    int units = 60;

    for (size_t i = 0; pci->speed && i < sizeof(known) / sizeof(*known); i++) {
        if (strncmp(pci->speed, known[i].speed, strlen(known[i].speed)) == 0)
            units = known[i].units;
    }
    return (pci->width ? pci->width : 16) * units / 80.0;
}
