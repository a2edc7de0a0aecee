/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's choices, worked out by hand from its rules, and what a job's nodes put on their links. */
#include "tests/check.h"
#include "topology/loongtopo.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static char *variables[16]; /* name, value, ..., NULL: what `get` finds */

static char *get(const char *name)
{
    for (int i = 0; i + 1 < 16 && variables[i]; i += 2) {
        if (strcmp(variables[i], name) == 0)
            return variables[i + 1];
    }
    return NULL;
}

static void set(char *name, char *value)
{
    int at = 0;

    while (variables[at])
        at += 2;
    CHECK(at + 2 < 16);
    variables[at] = name;
    variables[at + 1] = value;
}

static void unset_all(void)
{
    memset(variables, 0, sizeof(variables));
}

struct machine {
    struct lc_topo *topo;
    struct lc_topo_routes *routes;
};

static void open_text(struct machine *machine, const char *text)
{
    struct lc_topo_nccl nccl;
    char error[256] = "";

    lc_topo_nccl_read(get, &nccl);
    if (lc_topo_load_text(text, strlen(text), "given", &machine->topo, error, sizeof(error)) != 0)
        fprintf(stderr, "%s\n", error);
    CHECK(!*error && lc_topo_routes_find(machine->topo, &nccl, &machine->routes) == 0);
}

static void open_sample(struct machine *machine, const char *name)
{
    struct lc_topo_nccl nccl;

    lc_topo_nccl_read(get, &nccl);
    CHECK(lc_topo_sample(name, &machine->topo) == 0);
    CHECK(lc_topo_routes_find(machine->topo, &nccl, &machine->routes) == 0);
}

static void close_machine(struct machine *machine)
{
    lc_topo_routes_free(machine->routes);
    lc_topo_free(machine->topo);
}

static void is_way(int line, struct lc_topo_path path, const char *type, double gbps)
{
    if (strcmp(lc_topo_path_name(path.type), type) != 0 || fabs(path.gbps - gbps) > 0.01) {
        fprintf(stderr, "line %d: %s %.2f, not %s %.2f\n", line, lc_topo_path_name(path.type),
                path.gbps, type, gbps);
        abort();
    }
}

static struct lc_topo_path gpu_gpu(const struct machine *machine, int from, int to)
{
    return lc_topo_routes_path(machine->routes, lc_topo_routes_gpu(machine->routes, from),
                               lc_topo_routes_gpu(machine->routes, to));
}

static struct lc_topo_path gpu_net(const struct machine *machine, int gpu, int net)
{
    return lc_topo_routes_path(machine->routes, lc_topo_routes_gpu(machine->routes, gpu),
                               lc_topo_routes_net(machine->routes, net));
}

static struct lc_topo_path net_gpu(const struct machine *machine, int net, int gpu)
{
    return lc_topo_routes_path(machine->routes, lc_topo_routes_net(machine->routes, net),
                               lc_topo_routes_gpu(machine->routes, gpu));
}

#define LANES  " link_speed=\"16.0 GT/s PCIe\" link_width=\"16\""
#define NARROW " link_speed=\"16.0 GT/s PCIe\" link_width=\"4\""
#define INTEL                                                                                        \
    "<system version=\"1\"><cpu numaid=\"0\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\"" \
    " modelid=\"106\">"
#define AMD "<system version=\"1\"><cpu numaid=\"0\" arch=\"x86_64\" vendor=\"AuthenticAMD\">"
#define END "</cpu></system>"
#define GPU(bus, dev, more) \
    "<pci busid=\"0000:" bus ":00.0\" class=\"0x030200\"" LANES "><gpu dev=\"" dev "\" " more
#define GPU_END     "</gpu></pci>"
#define BRIDGE(bus) "<pci busid=\"0000:" bus ":00.0\" class=\"0x060400\"" LANES ">"
#define NET(bus, dev, gdr)                                                                     \
    "<pci busid=\"0000:" bus ":00.0\" class=\"0x020700\"" LANES "><nic><net name=\"n" dev "\"" \
    " dev=\"" dev "\" speed=\"100000\" gdr=\"" gdr "\"/></nic></pci>"
#define NVLINK "<nvlink target=\"0000:fe:00.0\" count=\"12\" tclass=\"0x068000\"/>"
#define TWO_GPUS \
    BRIDGE("10") GPU("11", "0", "sm=\"80\">") GPU_END "</pci>" GPU("20", "1", "sm=\"80\">") GPU_END

static void gpus_that_are_no_peers_go_through_the_cpu(void)
{
    struct machine machine;

    /* their way: GPU, switch, CPU, GPU; the detour by GPU 0's CPU has the same links */
    open_text(&machine, INTEL TWO_GPUS END);
    is_way(__LINE__, gpu_gpu(&machine, 0, 1), "PHB", 24);
    close_machine(&machine);

    set("NCCL_P2P_DISABLE", "1");
    open_text(&machine, AMD GPU("11", "0", "sm=\"80\">") NVLINK GPU_END GPU("20", "1", "sm=\"80\">")
                            NVLINK GPU_END END);
    is_way(__LINE__, gpu_gpu(&machine, 0, 1), "PHB", 24);
    close_machine(&machine);
    unset_all();
    open_text(&machine, AMD GPU("11", "0", "sm=\"80\">") NVLINK GPU_END GPU("20", "1", "sm=\"80\">")
                            NVLINK GPU_END END);
    is_way(__LINE__, gpu_gpu(&machine, 0, 1), "NVL", 240);
    close_machine(&machine);
}

static void are_wires(int line, const char *text, const char *type, double inside, int nets,
                      double between)
{
    struct machine machine;
    struct lc_topo_wires wires;

    open_text(&machine, text);
    lc_topo_routes_wires(machine.routes, &wires);
    if (wires.gpus != lc_topo_routes_gpus(machine.routes) || wires.nets != nets ||
        strcmp(lc_topo_path_name(wires.type), type) != 0 ||
        fabs(wires.inside_gbps - inside) > 0.01 || fabs(wires.between_gbps - between) > 0.01) {
        fprintf(stderr, "line %d: %d GPUs %s %.2f, %d ports %.2f\n", line, wires.gpus,
                lc_topo_path_name(wires.type), wires.inside_gbps, wires.nets, wires.between_gbps);
        abort();
    }
    close_machine(&machine);
}

static void wires_of_collectives_are_the_narrowest_that_all_need(void)
{
    are_wires(__LINE__, INTEL TWO_GPUS END, "PHB", 24, 0, 0);
    are_wires(__LINE__,
              AMD GPU("11", "0", "sm=\"80\">") NVLINK GPU_END GPU("20", "1", "sm=\"80\">")
                  NVLINK GPU_END NET("30", "0", "1") NET("31", "1", "1") END,
              "NVL", 240, 2, 25);
    /* the third has no NVLink */
    are_wires(__LINE__,
              AMD GPU("11", "0", "sm=\"80\">") NVLINK GPU_END GPU("20", "1", "sm=\"80\">")
                  NVLINK GPU_END GPU("30", "2", "sm=\"80\">") GPU_END END,
              "PHB", 24, 0, 0);
    /* a port beyond a switch of 6 GB/s */
    are_wires(__LINE__,
              INTEL "<pci busid=\"0000:10:00.0\" class=\"0x060400\"" NARROW
                    ">" NET("12", "0", "1") "</pci>" GPU("11", "0", "sm=\"80\">") GPU_END END,
              "LOC", 0, 1, 6);
    are_wires(__LINE__, INTEL NET("12", "0", "1") END, "LOC", 0, 0, 0);
}

#define ONE_SWITCH(gpu, gdr)                                                              \
    INTEL "<pci busid=\"0000:10:00.0\" class=\"0x060400\"" NARROW ">" GPU("11", "0", gpu) \
        GPU_END NET("12", "0", gdr) "</pci>" END

static void ports_without_gpudirect_are_reached_through_the_cpu(void)
{
    struct machine machine;

    open_text(&machine, ONE_SWITCH("sm=\"80\" gdr=\"1\">", "1"));
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PIX", 12.5);
    close_machine(&machine);
    open_text(&machine, ONE_SWITCH("sm=\"80\" gdr=\"1\">", "0"));
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PHB", 6);
    is_way(__LINE__, net_gpu(&machine, 0, 0), "PHB", 6);
    CHECK(gpu_net(&machine, 0, 0).hops == 5);
    close_machine(&machine);
    open_text(&machine, ONE_SWITCH("sm=\"80\" gdr=\"0\">", "1"));
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PHB", 6);
    close_machine(&machine);
    set("NCCL_NET_GDR_LEVEL", "LOC");
    open_text(&machine, ONE_SWITCH("sm=\"80\">", "1"));
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PHB", 6);
    close_machine(&machine);
    unset_all();
    set("NCCL_NET_GDR_LEVEL", "1"); /* by its old number: PIX */
    open_text(&machine, ONE_SWITCH("sm=\"80\">", "1"));
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PIX", 12.5);
    close_machine(&machine);
    unset_all();
}

#define PAIR(bus, gpu_bus, net_bus, dev, gdr) \
    BRIDGE(bus) GPU(gpu_bus, dev, "sm=\"80\">") NVLINK GPU_END NET(net_bus, dev, gdr) "</pci>"

static void nvlink_leads_to_the_ports_of_other_gpus(void)
{
    struct machine machine;

    open_text(&machine,
              INTEL PAIR("10", "11", "12", "0", "1") PAIR("20", "21", "22", "1", "1") END);
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PIX", 12.5);
    is_way(__LINE__, gpu_net(&machine, 0, 1), "PXN", 12.5);
    is_way(__LINE__, gpu_net(&machine, 1, 0), "PXN", 12.5);
    is_way(__LINE__, net_gpu(&machine, 1, 0), "PHB", 12.5); /* receives go without */
    CHECK(gpu_net(&machine, 0, 1).hops == 2 + 3);           /* switches, GPU 1; switch, NIC, port */
    close_machine(&machine);

    set("NCCL_PXN_DISABLE", "1");
    open_text(&machine,
              INTEL PAIR("10", "11", "12", "0", "1") PAIR("20", "21", "22", "1", "1") END);
    is_way(__LINE__, gpu_net(&machine, 0, 1), "PHB", 12.5);
    close_machine(&machine);
    unset_all();

    /* GPU 0 is looked at before GPU 1's way to port 1 has lost GPUDirect, GPU 1 after port 0's */
    open_text(&machine,
              INTEL PAIR("10", "11", "12", "0", "0") PAIR("20", "21", "22", "1", "0") END);
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PHB", 12.5);
    is_way(__LINE__, gpu_net(&machine, 1, 0), "PHB", 12.5);
    is_way(__LINE__, gpu_net(&machine, 0, 1), "PHB", 12.5);
    close_machine(&machine);
}

/* A relay must be nearer to the port than the CPU is. */
static void gpus_do_not_relay_through_the_cpu(void)
{
    struct machine machine;

    set("NCCL_NET_GDR_LEVEL", "SYS");
    open_text(&machine, INTEL GPU("11", "0", "sm=\"80\">") NVLINK GPU_END GPU(
                            "20", "1", "sm=\"80\">") NVLINK GPU_END NET("30", "0", "1") END);
    is_way(__LINE__, gpu_net(&machine, 0, 0), "PHB", 12.5);
    is_way(__LINE__, gpu_net(&machine, 1, 0), "PHB", 12.5);
    CHECK(lc_topo_choose(machine.routes, 1, 0, 0).relay == 1);
    close_machine(&machine);
    unset_all();
}

static void c2c_and_pci_of_one_cpu_are_p2c(void)
{
    static const char text[] =
        "<system version=\"1\"><cpu numaid=\"0\" arch=\"arm64\" vendor=\"\">" GPU(
            "11", "0", "sm=\"90\"><c2c bw=\"44712\" count=\"10\"/>") GPU_END BRIDGE("20")
            NET("21", "0", "1") "</pci>" END;
    struct machine machine;

    open_text(&machine, text);
    is_way(__LINE__, gpu_net(&machine, 0, 0), "P2C", 12.5);
    is_way(__LINE__, net_gpu(&machine, 0, 0), "P2C", 12.5);
    close_machine(&machine);
}

/* 2 GPUs and 3 ports a switch: of ports 0 to 2, AUTO lets each GPU take turns of two. */
static void gpus_take_turns_of_the_ports_beside_them(void)
{
    struct machine machine;

    open_sample(&machine, "three-ports-for-two");
    for (int channel = 0; channel < 4; channel++) {
        CHECK(lc_topo_own_net(machine.routes, 0, channel) == channel % 2);
        CHECK(lc_topo_own_net(machine.routes, 1, channel) == 1 + channel % 2);
        CHECK(lc_topo_own_net(machine.routes, 2, channel) == 3 + (2 + channel % 2) % 3);
    }
    close_machine(&machine);
    set("NCCL_NETDEVS_POLICY", "ALL");
    open_sample(&machine, "three-ports-for-two");
    CHECK(lc_topo_net_turns(machine.routes, 1) == 3);
    CHECK(lc_topo_own_net(machine.routes, 1, 2) == 0);
    close_machine(&machine);
    unset_all();
    set("NCCL_NETDEVS_POLICY", "max:1");
    open_sample(&machine, "three-ports-for-two");
    CHECK(lc_topo_net_turns(machine.routes, 1) == 1);
    close_machine(&machine);
    unset_all();
    /* a power of two is mirrored: of 2 ports GPU 1 has the second, GPU 2 the first of its own */
    open_sample(&machine, "two-ports-a-switch");
    CHECK(lc_topo_own_net(machine.routes, 1, 0) == 1);
    CHECK(lc_topo_own_net(machine.routes, 2, 5) == 2);
    close_machine(&machine);
    open_text(&machine,
              INTEL BRIDGE("10") GPU("11", "0", "sm=\"80\">") GPU_END GPU("12", "1", "sm=\"80\">")
                  GPU_END NET("13", "0", "1") NET("14", "1", "1") NET("15", "2", "1")
                      NET("16", "3", "1") "</pci>" END);
    for (int channel = 0; channel < 4; channel++) {
        CHECK(lc_topo_own_net(machine.routes, 0, channel) == channel % 2);
        CHECK(lc_topo_own_net(machine.routes, 1, channel) == 2 + channel % 2);
    }
    close_machine(&machine);
    /* the fastest ports are nearest, whoever's they are */
    open_sample(&machine, "uneven-ports");
    CHECK(lc_topo_own_net(machine.routes, 7, 0) < 2);
    close_machine(&machine);
}

static struct lc_topo_choice choice(const struct machine *machine, int gpu, int remote)
{
    return lc_topo_choose(machine->routes, gpu, remote, 0);
}

static void sends_go_by_the_port_of_the_receivers_number(void)
{
    static char *const levels[] = { "0", "1", "2" };
    struct machine machine;

    for (int level = 0; level < 3; level++) {
        set("NCCL_P2P_PXN_LEVEL", levels[level]);
        open_sample(&machine, "a-port-each");
        for (int gpu = 0; gpu < 8; gpu++) {
            for (int remote = 0; remote < 8; remote++) {
                struct lc_topo_choice found = choice(&machine, gpu, remote);

                CHECK(found.net == (level ? remote : gpu));
                CHECK(found.relay == (level ? remote : gpu));
            }
            CHECK(choice(&machine, gpu, 8).net == gpu && choice(&machine, gpu, 8).relay == gpu);
        }
        close_machine(&machine);
        unset_all();
    }
    set("NCCL_PXN_DISABLE", "1");
    open_sample(&machine, "a-port-each");
    CHECK(choice(&machine, 3, 5).net == 3 && choice(&machine, 3, 5).relay == 3);
    close_machine(&machine);
    set("NCCL_CROSS_NIC", "0"); /* the port all the same, across PCIe */
    open_sample(&machine, "a-port-each");
    CHECK(choice(&machine, 3, 5).net == 5 && choice(&machine, 3, 5).relay == 3);
    close_machine(&machine);
    unset_all();
    /* of two GPUs that share a port, the one that NCCL finds first relays for the other */
    open_sample(&machine, "a-port-for-two");
    CHECK(choice(&machine, 1, 1).net == 0 && choice(&machine, 1, 1).relay == 0);
    close_machine(&machine);
}

static struct lc_topo_plan *plan_of(const struct lc_topo_kind *kinds, int count)
{
    struct lc_topo_plan *plan = NULL;

    CHECK(lc_topo_plan_make(kinds, count, get, &plan) == 0);
    return plan;
}

static void is_load(int line, const struct lc_topo_plan *plan, enum lc_topo_side side, double ms,
                    const char *link)
{
    struct lc_topo_side_loads loads = lc_topo_plan_loads(plan, side);

    if (fabs(loads.all_to_all.ms - ms) > 0.001 || strcmp(loads.all_to_all.link, link) != 0) {
        fprintf(stderr, "line %d: %.3f ms on %s\n", line, loads.all_to_all.ms,
                loads.all_to_all.link);
        abort();
    }
}

static void loads_are_what_they_are_by_hand(void)
{
    struct lc_topo *topo = NULL;
    struct lc_topo_plan *plan;

    /* 1 GB through 48 GB/s of PCIe */
    CHECK(lc_topo_sample("a-port-each", &topo) == 0);
    plan = plan_of(&(struct lc_topo_kind){ topo, 3 }, 1);
    is_load(__LINE__, plan, LC_TOPO_NCCLS, 1000 / 48.0, "GPU 0 to switch 0000:10:00.0");
    CHECK(lc_topo_plan_setting_count(plan) == 0 && lc_topo_plan_gpus(plan) == 24);
    CHECK(lc_topo_plan_loads(plan, LC_TOPO_NCCLS).between_rails == 0);
    lc_topo_plan_free(plan);
    set("NCCL_PXN_DISABLE", "1"); /* 7 of 8 leave by another rail than that of the receiver */
    plan = plan_of(&(struct lc_topo_kind){ topo, 3 }, 1);
    CHECK(fabs(lc_topo_plan_loads(plan, LC_TOPO_NCCLS).between_rails - 7.0 / 8) < 1e-9);
    lc_topo_plan_free(plan);
    unset_all();
    lc_topo_free(topo);

    /* the middle one of 3 ports carries half of both GPUs; a third of both on each with ALL */
    CHECK(lc_topo_sample("three-ports-for-two", &topo) == 0);
    plan = plan_of(&(struct lc_topo_kind){ topo, 2 }, 1);
    is_load(__LINE__, plan, LC_TOPO_NCCLS, 1000 / 25.0, "port mlx5_1, in");
    is_load(__LINE__, plan, LC_TOPO_OURS, 2000 / 3.0 / 25, "port mlx5_0, in");
    lc_topo_plan_free(plan);
    lc_topo_free(topo);

    /* 2 of 8 ports at 400 Gb/s draw all to them; receives cross the sockets: 4 GPUs' at 22 GB/s */
    CHECK(lc_topo_sample("uneven-ports", &topo) == 0);
    plan = plan_of(&(struct lc_topo_kind){ topo, 2 }, 1);
    is_load(__LINE__, plan, LC_TOPO_NCCLS, 4000 / 22.0, "NUMA 0 to NUMA 1");
    is_load(__LINE__, plan, LC_TOPO_OURS, 1000 / 25.0, "port mlx5_2, in");
    CHECK(lc_topo_plan_most_mbps(plan) == 200000 && lc_topo_plan_setting_count(plan) == 1);
    CHECK(strcmp(lc_topo_plan_setting(plan, 0).name, "NCCL_TOPO_FILE") == 0);
    lc_topo_plan_free(plan);
    lc_topo_free(topo);
}

#define OLD \
    "</cpu><cpu numaid=\"1\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"63\">"
#define WIDE " link_speed=\"32.0 GT/s PCIe\" link_width=\"16\""
#define FAST(bus, gpu_bus, net_bus, dev)                                                         \
    "<pci busid=\"0000:" bus ":00.0\" class=\"0x060400\"" WIDE "><pci busid=\"0000:" gpu_bus     \
    ":00.0\""                                                                                    \
    " class=\"0x030200\"" WIDE "><gpu dev=\"" dev                                                \
    "\" sm=\"80\"><nvlink target=\"0000:fe:00.0\" count=\"1\" tclass=\"0x068000\"/></gpu></pci>" \
    "<pci busid=\"0000:" net_bus ":00.0\" class=\"0x020700\"" WIDE "><nic><net name=\"f" dev     \
    "\" dev=\"" dev "\" speed=\"400000\" gdr=\"1\"/></nic></pci></pci>"

static void relays_load_nvlink_and_no_relay_loads_the_wires(void)
{
    struct machine machine;
    struct lc_topo_plan *plan;

    /* half of what each GPU sends goes over one NVLink of 20 GB/s */
    open_text(&machine, INTEL FAST("10", "11", "12", "0") FAST("20", "21", "22", "1") END);
    plan = plan_of(&(struct lc_topo_kind){ machine.topo, 2 }, 1);
    is_load(__LINE__, plan, LC_TOPO_NCCLS, 500 / 20.0, "GPU 0 to NVSwitch");
    lc_topo_plan_free(plan);
    close_machine(&machine);

    /* GPU 1 has no port: at level 0 what it sends crosses from its old CPU at 6 GB/s, whatever way NCCL has in mind */
    set("NCCL_P2P_PXN_LEVEL", "0");
    open_text(&machine, INTEL PAIR("10", "11", "12", "0", "1") OLD GPU("20", "1", "sm=\"80\">")
                            NVLINK GPU_END END);
    is_way(__LINE__, gpu_net(&machine, 1, 0), "PXN", 12.5);
    plan = plan_of(&(struct lc_topo_kind){ machine.topo, 2 }, 1);
    is_load(__LINE__, plan, LC_TOPO_NCCLS, 1000 / 6.0, "NUMA 1 to NUMA 0");
    lc_topo_plan_free(plan);
    close_machine(&machine);
    unset_all();
}

static void what_the_user_has_set_stays(void)
{
    struct lc_topo *topo = NULL;
    struct lc_topo_plan *plan;

    CHECK(lc_topo_sample("three-ports-for-two", &topo) == 0);
    set("NCCL_NETDEVS_POLICY", "AUTO");
    plan = plan_of(&(struct lc_topo_kind){ topo, 4 }, 1);
    for (int i = 0; i < lc_topo_plan_setting_count(plan); i++)
        CHECK(strcmp(lc_topo_plan_setting(plan, i).name, "NCCL_NETDEVS_POLICY") != 0);
    lc_topo_plan_free(plan);
    unset_all();
    set("NCCL_P2P_PXN_LEVEL", "2");
    plan = plan_of(&(struct lc_topo_kind){ topo, 4 }, 1);
    CHECK(lc_topo_plan_setting_count(plan) == 1);
    CHECK(strcmp(lc_topo_plan_setting(plan, 0).name, "NCCL_NETDEVS_POLICY") == 0);
    CHECK(strcmp(lc_topo_plan_setting(plan, 0).value, "ALL") == 0);
    lc_topo_plan_free(plan);
    lc_topo_free(topo);
    unset_all();
    CHECK(lc_topo_sample("uneven-ports", &topo) == 0);
    set("NCCL_TOPO_FILE", "/somewhere");
    plan = plan_of(&(struct lc_topo_kind){ topo, 4 }, 1);
    CHECK(lc_topo_plan_most_mbps(plan) == 0);
    lc_topo_plan_free(plan);
    lc_topo_free(topo);
    unset_all();
}

static double mbps(const struct lc_topo *topo, int net)
{
    int at = lc_topo_next(topo, LC_TOPO_NET, -1);

    while (net--)
        at = lc_topo_next(topo, LC_TOPO_NET, at);
    return (double)lc_topo_at(topo, at)->net.mbps;
}

/* Every pair of GPUs looked at by itself gives the ports the same load as the plan does. */
static void single_ways_add_up_to_the_loads(void)
{
    static const char *const names[] = { "uneven-ports", "missing-rail", "three-ports-for-two" };
    struct lc_topo_kind kinds[3];
    struct lc_topo_plan *plan;

    for (int k = 0; k < 3; k++) {
        struct lc_topo *topo = NULL;

        CHECK(lc_topo_sample(names[k], &topo) == 0);
        kinds[k] = (struct lc_topo_kind){ topo, 1 };
    }
    plan = plan_of(kinds, 3);
    CHECK(lc_topo_plan_gpus(plan) == 24);
    for (int side = 0; side < 2; side++) {
        double in[3][16] = { { 0 } };
        double out[3][16] = { { 0 } };
        double between = 0;
        double most = 0;
        struct lc_topo_side_loads loads = lc_topo_plan_loads(plan, (enum lc_topo_side)side);

        for (int from = 0; from < 24; from++) {
            for (int to = 0; to < 24 * 42;
                 to++) { /* 42 channels: turns of 1, 2, 3 and 7 are whole */
                struct lc_topo_hop hop = lc_topo_plan_hop(plan, (enum lc_topo_side)side, from,
                                                          to / 42, to % 42);

                CHECK((hop.net < 0) == (from / 8 == to / 42 / 8));
                if (hop.net < 0)
                    continue;
                out[from / 8][hop.net] += 1.0 / 16 / 42;
                in[to / 42 / 8][hop.remote_net] += 1.0 / 16 / 42;
                between += hop.same_rail ? 0 : 1.0 / 16 / 42 / 24;
            }
        }
        for (int i = 0; i < 3 * 16; i++) {
            double gb = fmax(in[i / 16][i % 16], out[i / 16][i % 16]);

            if (gb > 0)
                most = fmax(most, gb * 8e6 / mbps(kinds[i / 16].topo, i % 16));
        }
        CHECK(fabs(between - loads.between_rails) < 1e-9);
        CHECK(most <= loads.all_to_all.ms * 1.000001);
        if (strncmp(loads.all_to_all.link, "port", 4) == 0)
            CHECK(fabs(most - loads.all_to_all.ms) < 1e-6);
    }
    lc_topo_plan_free(plan);
    for (int k = 0; k < 3; k++)
        lc_topo_free((struct lc_topo *)kinds[k].topo);
}

static void is_never_worse(const struct lc_topo *topo)
{
    static char *const settings[][2] = {
        {"NCCL_CROSS_NIC",       "2"  }, /* the default */
        { "NCCL_PXN_DISABLE",    "1"  },
        { "NCCL_P2P_PXN_LEVEL",  "0"  },
        { "NCCL_P2P_PXN_LEVEL",  "1"  },
        { "NCCL_CROSS_NIC",      "0"  },
        { "NCCL_NETDEVS_POLICY", "ALL"},
        { "NCCL_NET_GDR_LEVEL",  "SYS"},
        { "NCCL_P2P_DISABLE",    "1"  },
    };

    for (size_t i = 0; i < sizeof(settings) / sizeof(*settings); i++) {
        struct lc_topo_plan *plan = NULL;
        struct lc_topo_side_loads ours;
        struct lc_topo_side_loads theirs;

        set(settings[i][0], settings[i][1]);
        if (lc_topo_plan_make(&(struct lc_topo_kind){ topo, 5 }, 1, get, &plan) != 0)
            CHECK(plan == NULL);
        unset_all();
        if (!plan)
            continue;
        ours = lc_topo_plan_loads(plan, LC_TOPO_OURS);
        theirs = lc_topo_plan_loads(plan, LC_TOPO_NCCLS);
        CHECK(theirs.all_to_all.ms > 0 && theirs.all_reduce.ms > 0);
        CHECK(ours.all_to_all.ms <= theirs.all_to_all.ms);
        CHECK(ours.all_reduce.ms <= theirs.all_reduce.ms * 1.0002);
        CHECK(ours.between_rails <= theirs.between_rails + 1e-6);
        if (lc_topo_plan_setting_count(plan))
            CHECK(ours.all_to_all.ms < 0.99 * theirs.all_to_all.ms);
        lc_topo_plan_free(plan);
    }
}

/* Returns how many could be planned. */
static int every_file_below(const char *folder)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int count = 0;

    CHECK(dir);
    while ((entry = readdir(dir))) {
        struct lc_topo *topo = NULL;
        char path[PATH_MAX];
        char error[256];

        if (entry->d_name[0] == '.')
            continue;
        (void)snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        if (entry->d_type == DT_DIR) {
            count += every_file_below(path);
        } else if (lc_topo_load(path, &topo, error, sizeof(error)) == 0) {
            is_never_worse(topo);
            count += lc_topo_is_plannable(topo);
            lc_topo_free(topo);
        }
    }
    closedir(dir);
    return count;
}

static void a_thousand_nodes_are_no_matter(void)
{
    const char *soak = getenv("LCTEST_SOAK");
    struct lc_topo *topo = NULL;
    struct lc_topo_plan *plan;
    int gpus;
    long relayed = 0;
    long looked = 0;
    clock_t before = clock();
    struct rusage usage;

    CHECK(lc_topo_sample("a-port-each", &topo) == 0);
    plan = plan_of(&(struct lc_topo_kind){ topo, 1024 }, 1);
    (void)lc_topo_plan_loads(plan, LC_TOPO_OURS);
    CHECK(clock() - before < 2 * CLOCKS_PER_SEC); /* of the processor: there may be other work */
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0 && usage.ru_maxrss < 1 << 20); /* KB */
    gpus = lc_topo_plan_gpus(plan);
    CHECK(gpus == 8192);
    is_load(__LINE__, plan, LC_TOPO_NCCLS, 1000 / 48.0, "GPU 0 to switch 0000:10:00.0");
    for (int from = 0; from < gpus; from += soak ? 1 : 61) {
        for (int to = 0; to < gpus; to++) {
            struct lc_topo_hop hop = lc_topo_plan_hop(plan, LC_TOPO_OURS, from, to, 0);

            looked++;
            relayed += hop.net >= 0 && hop.relay != from % 8;
            CHECK(hop.net < 0 || (hop.net == to % 8 && hop.same_rail));
        }
    }
    CHECK(relayed == looked / 8192 * 1023 * 7);
    lc_topo_plan_free(plan);
    lc_topo_free(topo);
}

static void what_cannot_be_planned_is_refused(void)
{
    struct lc_topo_plan *plan = NULL;
    struct machine machine;

    open_text(&machine, INTEL TWO_GPUS END);
    CHECK(lc_topo_plan_make(&(struct lc_topo_kind){ machine.topo, 4 }, 1, get, &plan) == -EINVAL);
    close_machine(&machine);
    open_sample(&machine, "a-port-each");
    CHECK(lc_topo_plan_make(&(struct lc_topo_kind){ machine.topo, 1 }, 1, get, &plan) == -EINVAL);
    CHECK(lc_topo_plan_make(&(struct lc_topo_kind){ machine.topo, 0 }, 1, get, &plan) == -EINVAL);
    CHECK(lc_topo_plan_make(NULL, 0, get, &plan) == -EINVAL);
    close_machine(&machine);
    CHECK(lc_topo_sample("none", &machine.topo) == -ENOENT && !plan);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    gpus_that_are_no_peers_go_through_the_cpu();
    wires_of_collectives_are_the_narrowest_that_all_need();
    ports_without_gpudirect_are_reached_through_the_cpu();
    nvlink_leads_to_the_ports_of_other_gpus();
    gpus_do_not_relay_through_the_cpu();
    c2c_and_pci_of_one_cpu_are_p2c();
    gpus_take_turns_of_the_ports_beside_them();
    sends_go_by_the_port_of_the_receivers_number();
    loads_are_what_they_are_by_hand();
    relays_load_nvlink_and_no_relay_loads_the_wires();
    what_the_user_has_set_stays();
    single_ways_add_up_to_the_loads();
    what_cannot_be_planned_is_refused();
    a_thousand_nodes_are_no_matter();
    CHECK(every_file_below(argv[1]) == 6); /* with NVLink and several ports */
    for (int i = 0; lc_topo_sample_name(i); i++) {
        struct lc_topo *topo = NULL;

        CHECK(lc_topo_sample(lc_topo_sample_name(i), &topo) == 0);
        is_never_worse(topo);
        lc_topo_free(topo);
    }
    return 0;
}
