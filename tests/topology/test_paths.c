/* SPDX-License-Identifier: Apache-2.0
 *
 * Ways between GPUs and ports, with types and bandwidths worked out by hand from NCCL's rules. */
#include "tests/check.h"
#include "topology/loongtopo.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct machine {
    struct lc_topo *topo;
    struct lc_topo_paths *paths;
};

static void open_text(struct machine *machine, const char *text)
{
    char error[256] = "";

    if (lc_topo_load_text(text, strlen(text), "given", &machine->topo, error, sizeof(error)) != 0)
        fprintf(stderr, "%s\n", error);
    CHECK(!*error && lc_topo_paths_find(machine->topo, &machine->paths) == 0);
}

static void close_machine(struct machine *machine)
{
    lc_topo_paths_free(machine->paths);
    lc_topo_free(machine->topo);
}

/* The number-th GPU or port of the text. */
static int nth(const struct machine *machine, enum lc_topo_type type, int number)
{
    int at = lc_topo_next(machine->topo, type, -1);

    while (number--)
        at = lc_topo_next(machine->topo, type, at);
    CHECK(at >= 0);
    return at;
}

static void is_path(const struct machine *machine, int from, int to, const char *type, double gbps)
{
    struct lc_topo_path path = lc_topo_path(machine->paths, from, to);

    if (strcmp(lc_topo_path_name(path.type), type) != 0 || fabs(path.gbps - gbps) > 0.01) {
        fprintf(stderr, "node %d to %d: %s %.2f, not %s %.2f\n", from, to,
                lc_topo_path_name(path.type), path.gbps, type, gbps);
        abort();
    }
}

#define LANES " link_speed=\"16.0 GT/s PCIe\" link_width=\"16\""

static void pci_paths_have_the_type_of_what_they_pass(void)
{
    static const char text[] =
        "<system version=\"1\"><cpu numaid=\"0\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\""
        " modelid=\"106\">"
        "<pci busid=\"0000:10:00.0\" class=\"0x060400\"" LANES ">"
        "<pci busid=\"0000:11:00.0\" class=\"0x060400\"" LANES ">"
        "<pci busid=\"0000:12:00.0\" class=\"0x030200\"" LANES "><gpu dev=\"0\" sm=\"80\"/></pci>"
        "<pci busid=\"0000:13:00.0\" class=\"0x020700\"" LANES "><nic><net name=\"a\" dev=\"0\""
        " speed=\"100000\"/></nic></pci></pci>"
        "<pci busid=\"0000:14:00.0\" class=\"0x060400\"" LANES ">"
        "<pci busid=\"0000:15:00.0\" class=\"0x030200\"" LANES
        "><gpu dev=\"1\" sm=\"80\"/></pci></pci>"
        "</pci>"
        "<nic><net name=\"b\" dev=\"1\" speed=\"-1\"/><net name=\"unnumbered\"/></nic></cpu>"
        "<cpu numaid=\"1\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"106\">"
        "<pci busid=\"0000:20:00.0\" class=\"0x030200\" link_speed=\"8.0 GT/s PCIe\" link_width=\"8\">"
        "<gpu dev=\"2\" sm=\"80\"/></pci></cpu></system>";
    struct machine machine;
    int gpu[3];
    int net[3];
    int near[2];

    open_text(&machine, text);
    for (int i = 0; i < 3; i++) {
        gpu[i] = nth(&machine, LC_TOPO_GPU, i);
        net[i] = nth(&machine, LC_TOPO_NET, i);
    }
    is_path(&machine, gpu[0], gpu[0], "LOC", 5000);
    is_path(&machine, gpu[0], net[0], "PIX", 12.5);
    is_path(&machine, gpu[0], gpu[1], "PXB", 24);
    is_path(&machine, gpu[1], net[0], "PXB", 12.5);
    is_path(&machine, gpu[0], net[1], "PHB", 1.25);
    is_path(&machine, gpu[0], gpu[2], "SYS", 6);
    is_path(&machine, gpu[2], net[0], "SYS", 6);
    is_path(&machine, net[0], gpu[0], "PIX", 12.5);
    is_path(&machine, gpu[0], net[2], "DIS", 0);
    CHECK(lc_topo_nearest_nets(machine.paths, gpu[1], near, 2) == 1 && near[0] == net[0]);
    close_machine(&machine);
}

#define GPU_LINKS(bus, links)                                                            \
    "<pci busid=\"0000:" bus ":00.0\" class=\"0x030200\"" LANES "><gpu sm=\"90\">" links \
    "</gpu></pci>"
#define LINK(bus, count) \
    "<nvlink target=\"0000:" bus ":00.0\" count=\"" count "\" tclass=\"0x030200\"/>"
#define SWITCH "<nvlink target=\"0000:c0:00.0\" count=\"18\" tclass=\"0x068000\"/>"

static void nvlinks_count_together_and_lead_through_one_gpu_at_most(void)
{
    static const char text[] =
        "<system version=\"1\"><cpu numaid=\"0\" arch=\"x86_64\" vendor=\"AuthenticAMD\">" GPU_LINKS(
            "01", LINK("02", "4")) GPU_LINKS("02", LINK("01", "4") LINK("03", "2"))
            GPU_LINKS("03", LINK("02", "2") LINK("04", "2")) GPU_LINKS("04", LINK("03", "2"))
                GPU_LINKS("05", SWITCH) GPU_LINKS("06", SWITCH) "</cpu></system>";
    struct machine machine;
    int gpu[6];

    open_text(&machine, text);
    for (int i = 0; i < 6; i++)
        gpu[i] = nth(&machine, LC_TOPO_GPU, i);
    is_path(&machine, gpu[0], gpu[1], "NVL", 4 * 20.6);
    is_path(&machine, gpu[0], gpu[2], "NVB", 2 * 20.6);
    is_path(&machine, gpu[0], gpu[3], "PHB", 24);
    is_path(&machine, gpu[4], gpu[5], "NVL", 18 * 20.6);
    is_path(&machine, gpu[0], gpu[4], "PHB", 24);
    close_machine(&machine);
}

/* A switch of Broadcom that shows itself in two levels is one. */
static void merged_switches_are_one(const char *data)
{
    char path[PATH_MAX];
    char error[256];
    struct machine machine;

    (void)snprintf(path, sizeof(path), "%s/oci-hpc/H100-topology.xml", data);
    CHECK(lc_topo_load(path, &machine.topo, error, sizeof(error)) == 0);
    CHECK(lc_topo_paths_find(machine.topo, &machine.paths) == 0);
    is_path(&machine, nth(&machine, LC_TOPO_GPU, 0), nth(&machine, LC_TOPO_NET, 0), "PIX", 22.5);
    is_path(&machine, nth(&machine, LC_TOPO_GPU, 0), nth(&machine, LC_TOPO_GPU, 7), "NVL", 370.8);
    /* its uplink is given with 5 GT/s */
    is_path(&machine, nth(&machine, LC_TOPO_GPU, 0), nth(&machine, LC_TOPO_NET, 15), "SYS", 6);
    close_machine(&machine);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    pci_paths_have_the_type_of_what_they_pass();
    nvlinks_count_together_and_lead_through_one_gpu_at_most();
    merged_switches_are_one(argv[1]);
    return 0;
}
