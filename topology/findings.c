/* SPDX-License-Identifier: Apache-2.0
 *
 * What is wrong with the devices of a machine and the ways between them. */
#include "topology/findings.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define SHOWN 12

void lc_exam_add(struct lc_exam_list *list, const char *fmt, ...)
{
    char item[64];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(item, sizeof(item), fmt, ap);
    va_end(ap);
    if (list->count < SHOWN)
        lc_topo_say(&list->text, "%s%s", list->count ? ", " : "", item);
    if (list->count == SHOWN)
        lc_topo_say(&list->text, " and more");
    list->count++;
}

void lc_exam_add_gpu(struct lc_exam_list *list, const struct lc_topo_routes *routes, int gpu)
{
    lc_exam_add(list, "GPU %d", lc_topo_dev(routes, gpu));
}

void lc_exam_find(const struct lc_exam *exam, enum lc_topo_severity severity, const char *id,
                  const char *fmt, ...)
{
    char text[1600];
    char *remedy;
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    remedy = strchr(text, '\n');
    if (remedy)
        *remedy++ = '\0';
    exam->report(exam->arg, severity, id, text, remedy ? remedy : "");
}

const char *lc_exam_get(const struct lc_exam *exam, const char *name)
{
    const char *value = exam->checks->get ? exam->checks->get(name) : NULL;

    return value && *value ? value : NULL;
}

static const struct lc_topo_node *port(const struct lc_topo_routes *routes, int net)
{
    return &routes->topo->nodes[routes->nets[net]];
}

static int mbps_of(const struct lc_topo_routes *routes, int net)
{
    return port(routes, net)->net.mbps > 0 ? (int)port(routes, net)->net.mbps : 10000;
}

int lc_exam_fastest(const struct lc_topo_routes *routes)
{
    int most = 0;

    for (int n = 0; n < routes->net_count; n++)
        most = mbps_of(routes, n) > most ? mbps_of(routes, n) : most;
    return most;
}

/* A port for management beside those for the job is nothing to wonder about. */
static bool is_fast(const struct lc_topo_routes *routes, int net)
{
    return 4 * (int64_t)mbps_of(routes, net) > lc_exam_fastest(routes);
}

bool lc_exam_is_used(const struct lc_topo_routes *routes, int net)
{
    for (int g = 0; g < routes->gpu_count; g++) {
        for (int channel = 0; channel < lc_topo_net_turns(routes, g); channel++) {
            if (lc_topo_own_net(routes, g, channel) == net)
                return true;
        }
    }
    return false;
}

static void check_far(const struct lc_exam *exam)
{
    const struct lc_topo_routes *routes = exam->default_routes;
    struct lc_exam_list far = { .count = 0 };
    bool relayed = true;

    for (int g = 0; g < routes->gpu_count; g++) {
        enum lc_topo_path_type wires = LC_TOPO_PATH_DIS;
        bool relay = false;

        for (int n = 0; n < routes->net_count; n++) {
            enum lc_topo_path_type type =
                lc_topo_path(routes->paths, routes->gpus[g], routes->nets[n]).type;

            wires = type < wires ? type : wires;
            relay |= lc_topo_gpu_net(routes, g, n)->path.type == LC_TOPO_PATH_PXN;
        }
        if (wires != LC_TOPO_PATH_SYS)
            continue;
        lc_exam_add_gpu(&far, routes, g);
        relayed &= relay;
    }
    if (far.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "gpu-far-nic",
                     "%s: every network port is on another NUMA node, so all its traffic to other "
                     "nodes crosses from CPU to CPU%s\n"
                     "move a NIC to a slot of that GPU's NUMA node",
                     far.text.s,
                     relayed ? " when it receives; sends can go by NVLink to another GPU (PXN)"
                             : "");
}

/* RDMA ports that have no number for that. */
static void check_down(const struct lc_exam *exam)
{
    struct lc_exam_list down = { .count = 0 };

    for (int i = lc_topo_next(exam->topo, LC_TOPO_NET, -1); i >= 0;
         i = lc_topo_next(exam->topo, LC_TOPO_NET, i)) {
        const char *state = lc_topo_attribute(exam->topo, i, "state");

        if (state && lc_topo_attribute(exam->topo, i, "port") && strcasecmp(state, "active") != 0)
            lc_exam_add(&down, "%s (%.20s)", exam->topo->nodes[i].id, state);
    }
    if (down.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "nic-down",
                     "not connected: %s; NCCL leaves such ports out\n"
                     "plug in the cable, or see what the switch and the subnet manager say",
                     down.text.s);
}

static void check_unused(const struct lc_exam *exam)
{
    const struct lc_topo_routes *routes = exam->routes;
    struct lc_exam_list unused = { .count = 0 };

    for (int n = 0; n < routes->net_count; n++) {
        if (is_fast(routes, n) && !lc_exam_is_used(routes, n))
            lc_exam_add(&unused, "%s", port(routes, n)->id);
    }
    if (unused.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "nic-unused",
                     "no GPU would use %s: NCCL takes the ports with the most bandwidth to a GPU, "
                     "by the shortest way, and shares them out\n"
                     "`loongcomm topo --compare` says whether a setting changes that",
                     unused.text.s);
}

static void check_widths(const struct lc_exam *exam)
{
    const struct lc_topo_routes *routes = exam->routes;
    struct lc_exam_list speeds = { .count = 0 };
    int least = 0;
    int most = 0;

    for (int n = 0; n < routes->net_count; n++) {
        int mbps = mbps_of(routes, n);

        if (!is_fast(routes, n))
            continue;
        lc_exam_add(&speeds, "%s %g Gb/s", port(routes, n)->id, mbps / 1000.0);
        least = !least || mbps < least ? mbps : least;
        most = mbps > most ? mbps : most;
    }
    if (least < most)
        lc_exam_find(
            exam, LC_TOPO_WARNING, "rails-uneven",
            "ports of different speed: %s; with NVLink NCCL draws all GPUs to the fastest\n"
            "`loongcomm topo --compare` says what to set",
            speeds.text.s);
}

static void check_peers(const struct lc_exam *exam)
{
    const struct lc_topo_routes *routes = exam->default_routes;
    struct lc_exam_list pairs = { .count = 0 };
    enum lc_topo_path_type worst = LC_TOPO_PATH_LOC;

    for (int a = 0; a < routes->gpu_count; a++) {
        for (int b = a + 1; b < routes->gpu_count; b++) {
            enum lc_topo_path_type type =
                lc_topo_path(routes->paths, routes->gpus[a], routes->gpus[b]).type;

            if (lc_topo_peers(routes, a, b))
                continue;
            lc_exam_add(&pairs, "%d-%d", lc_topo_dev(routes, a), lc_topo_dev(routes, b));
            worst = type > worst ? type : worst;
        }
    }
    if (pairs.count)
        lc_exam_find(exam, LC_TOPO_INFO, "p2p-off",
                     "GPUs %s have no peer access in NCCL: the way between them goes through %s "
                     "(%s), so their data goes through host memory\n"
                     "GPUs below one PCIe switch or with NVLink need none; NCCL_P2P_LEVEL=%s tries "
                     "it all the same, where the platform carries it",
                     pairs.text.s, worst == LC_TOPO_PATH_SYS ? "several CPUs" : "the CPU",
                     lc_topo_path_name(worst), lc_topo_path_name(worst));
}

enum reason {
    REACHES,
    PORT_CANNOT,
    GPU_CANNOT,
    FAR_AWAY,
};

static enum reason why_no_gpudirect(const struct lc_topo_routes *routes, int gpu, int net)
{
    if (lc_topo_gpudirect(routes, gpu, net, false))
        return REACHES;
    if (!port(routes, net)->net.gdr && lc_topo_attribute(routes->topo, routes->nets[net], "gdr"))
        return PORT_CANNOT;
    if (!routes->topo->nodes[routes->gpus[gpu]].gpu.gdr &&
        lc_topo_attribute(routes->topo, routes->gpus[gpu], "gdr"))
        return GPU_CANNOT;
    return FAR_AWAY;
}

static void check_gpudirect(const struct lc_exam *exam)
{
    const struct lc_topo_routes *routes = exam->default_routes;
    struct lc_exam_list lists[4] = { { .count = 0 } };
    enum lc_topo_severity severity = lc_exam_fastest(routes) >= 100000 ? LC_TOPO_WARNING
                                                                       : LC_TOPO_INFO;

    for (int g = 0; g < routes->gpu_count; g++) {
        int net = lc_topo_own_net(routes, g, 0);

        if (net >= 0)
            lc_exam_add_gpu(&lists[why_no_gpudirect(routes, g, net)], routes, g);
    }
    if (lists[PORT_CANNOT].count)
        lc_exam_find(exam, severity, "gpudirect-off-port",
                     "no GPUDirect RDMA for %s: the ports cannot reach GPU memory, so data goes "
                     "through host memory and no port serves another GPU (PXN)\n"
                     "with InfiniBand or RoCE ports: load nvidia_peermem, or use the open kernel "
                     "modules of the GPU driver",
                     lists[PORT_CANNOT].text.s);
    if (lists[GPU_CANNOT].count)
        lc_exam_find(exam, severity, "gpudirect-off-gpu",
                     "no GPUDirect RDMA for %s: the GPU or its driver does not offer it (gdr=0)",
                     lists[GPU_CANNOT].text.s);
    if (lists[FAR_AWAY].count)
        lc_exam_find(exam, severity, "gpudirect-off-far",
                     "no GPUDirect RDMA for %s: the nearest port is not below a PCIe switch of the "
                     "GPU, so data goes through host memory\n"
                     "move the NIC below the GPU's switch; NCCL_NET_GDR_LEVEL=PHB or SYS tries it "
                     "all the same",
                     lists[FAR_AWAY].text.s);
}

/* Do the two masks (words of 32 bits, the last one the lowest) share a processor? */
static bool share(const char *a, const char *b)
{
    const char *x = a + strlen(a);
    const char *y = b + strlen(b);

    while (x > a && y > b) {
        while (x > a && x[-1] != ',')
            x--;
        while (y > b && y[-1] != ',')
            y--;
        if (strtoul(x, NULL, 16) & strtoul(y, NULL, 16))
            return true;
        x -= x > a;
        y -= y > b;
    }
    return false;
}

static void check_numa(const struct lc_exam *exam)
{
    const struct lc_topo_routes *routes = exam->routes;
    struct lc_exam_list unbound = { .count = 0 };
    struct lc_exam_list homeless = { .count = 0 };
    int numas = 0;

    for (int c = 0; c < routes->cpu_count; c++)
        numas += exam->topo->nodes[routes->cpus[c]].cpu.numa >= 0;
    for (int g = 0; g < routes->gpu_count; g++) {
        int cpu = lc_topo_above(exam->topo, routes->gpus[g], LC_TOPO_CPU);
        const char *mask = cpu < 0 ? NULL : exam->topo->nodes[cpu].cpu.cpus;

        if (numas > 1 && cpu >= 0 && exam->topo->nodes[cpu].cpu.numa < 0)
            lc_exam_add_gpu(&homeless, routes, g);
        if (mask && mask[strspn(mask, "0,")] && exam->checks->affinity &&
            !share(mask, exam->checks->affinity))
            lc_exam_add_gpu(&unbound, routes, g);
    }
    if (unbound.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "numa-binding",
                     "this process may use no processor of the NUMA node of %s, and a job started "
                     "from here may not either: its proxy threads would work from the other side\n"
                     "start it without that binding (taskset, numactl, cpuset), or bind each rank "
                     "to its GPU's node",
                     unbound.text.s);
    if (homeless.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "numa-unknown",
                     "the kernel does not say on which of %d NUMA nodes %s is\n"
                     "where a virtual machine or the firmware hides it, give NCCL a topology file "
                     "(`loongcomm topo --nccl-xml` writes one to correct)",
                     numas, homeless.text.s);
}

static void check_machine(const struct lc_exam *exam)
{
    struct lc_topo_text counts = { .used = 0 };

    lc_topo_say_counts(&counts, exam->topo);
    lc_exam_find(exam, LC_TOPO_FINE, "machine", "%s: %s", exam->topo->name, counts.s);
    for (int i = 0; i < exam->topo->note_count; i++)
        lc_exam_find(exam, LC_TOPO_INFO, "machine-note", "%s", exam->topo->notes[i]);
}

static void check_gain(const struct lc_exam *exam)
{
    struct lc_topo_kind kind = { exam->topo, 4 };
    struct lc_topo_plan *plan = NULL;
    struct lc_exam_list settings = { .count = 0 };

    if (!lc_topo_is_plannable(exam->topo) ||
        lc_topo_plan_make(&kind, 1, exam->checks->get, &plan) != 0)
        return;
    for (int i = 0; i < lc_topo_plan_setting_count(plan); i++) {
        struct lc_topo_setting setting = lc_topo_plan_setting(plan, i);

        lc_exam_add(&settings, "%s%s%s", setting.name, *setting.value ? "=" : "", setting.value);
    }
    if (settings.count)
        lc_exam_find(exam, LC_TOPO_INFO, "plan-gain",
                     "between nodes like this one, %s takes %.0f %% off the most loaded link of an "
                     "all-to-all\n"
                     "`loongcomm run` sets it; `loongcomm topo --compare` tells more",
                     settings.text.s,
                     100 - 100 * lc_topo_plan_loads(plan, LC_TOPO_OURS).all_to_all.ms /
                               lc_topo_plan_loads(plan, LC_TOPO_NCCLS).all_to_all.ms);
    lc_topo_plan_free(plan);
}

static void examine(struct lc_exam *exam)
{
    bool devices = exam->routes && exam->default_routes && exam->routes->gpu_count;

    if (devices && exam->routes->net_count) {
        check_far(exam);
        check_gpudirect(exam);
        check_unused(exam);
        check_widths(exam);
    }
    if (lc_topo_next(exam->topo, LC_TOPO_GPU, -1) >= 0)
        check_down(exam);
    lc_exam_settings(exam);
    if (devices)
        check_numa(exam);
    lc_exam_pci(exam);
    if (devices) {
        check_peers(exam);
        check_gain(exam);
    }
    check_machine(exam);
}

int lc_topo_examine(const struct lc_topo *topo, const struct lc_topo_checks *checks,
                    lc_topo_report *report, void *arg)
{
    struct lc_exam exam = { .topo = topo, .checks = checks, .report = report, .arg = arg };
    struct lc_topo_routes *routes = NULL;
    struct lc_topo_routes *plain = NULL;
    struct lc_topo_nccl nccl;
    struct lc_root root = { .fd = -1 };
    int err;

    lc_topo_nccl_read(checks->get, &nccl);
    err = lc_topo_routes_find(topo, &nccl, &routes);
    lc_topo_nccl_read(NULL, &nccl);
    if (!err)
        err = lc_topo_routes_find(topo, &nccl, &plain);
    if (err != -ENOMEM) {
        err = 0;
        exam.routes = routes;
        exam.default_routes = plain;
        if (checks->root && lc_root_open(&root, checks->root) == 0)
            exam.root = &root;
        examine(&exam);
        if (exam.root)
            lc_root_close(&root);
    }
    lc_topo_routes_free(routes);
    lc_topo_routes_free(plain);
    return err;
}
