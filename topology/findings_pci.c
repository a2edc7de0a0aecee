/* SPDX-License-Identifier: Apache-2.0
 *
 * What is wrong with the functions of the PCI bus and how the kernel shows them. */
#include "topology/findings.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FUNCTIONS 4096

/* Runs at what it can? The attributes are those that the reader of machines notes. */
static void check_links(const struct lc_exam *exam)
{
    struct lc_exam_list narrow = { .count = 0 };
    struct lc_exam_list slow = { .count = 0 };
    struct lc_exam_list idle = { .count = 0 };

    for (int i = lc_topo_next(exam->topo, LC_TOPO_PCI, -1); i >= 0;
         i = lc_topo_next(exam->topo, LC_TOPO_PCI, i)) {
        const struct lc_topo_pci *pci = &exam->topo->nodes[i].pci;
        const char *width = lc_topo_attribute(exam->topo, i, "current_link_width");
        const char *speed = lc_topo_attribute(exam->topo, i, "current_link_speed");
        int lanes = width ? atoi(width) : 0;
        double gts = speed ? strtod(speed, NULL) : 0;
        bool gpu = pci->kind == LC_TOPO_PCI_GPU;

        if (lanes > 0 && lanes < pci->width)
            lc_exam_add(&narrow, "%s x%d of x%d", exam->topo->nodes[i].id, lanes, pci->width);
        if (gts > 0 && gts < 0.99 * pci->gts)
            lc_exam_add(gpu ? &idle : &slow, "%s %g of %g GT/s", exam->topo->nodes[i].id, gts,
                        pci->gts);
    }
    if (narrow.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "pcie-width",
                     "PCIe links run with fewer lanes than both ends have: %s\n"
                     "reseat the card or the cable; look for errors in the kernel's log",
                     narrow.text.s);
    if (slow.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "pcie-speed",
                     "PCIe links run slower than both ends can: %s\n"
                     "reseat the card or the cable; look at the slot's settings in the firmware",
                     slow.text.s);
    if (idle.count)
        lc_exam_find(exam, LC_TOPO_INFO, "pcie-speed-gpu",
                     "PCIe links of GPUs run slower than they can: %s; an idle GPU does that\n"
                     "look again while it works",
                     idle.text.s);
}

/* The control register of Access Control Services, an extended capability; -1: none, or hidden from us. */
static int acs_control(const unsigned char *config, int size)
{
    int at = 0x100;

    for (int hops = 0; hops < 64 && at >= 0x100 && at + 8 <= size; hops++) {
        unsigned head = config[at] | config[at + 1] << 8 | config[at + 2] << 16 |
                        (unsigned)config[at + 3] << 24;

        if ((head & 0xffff) == 0x000d)
            return config[at + 6] | config[at + 7] << 8;
        at = (int)(head >> 20);
    }
    return -1;
}

struct acs {
    struct lc_exam_list redirecting;
    bool hidden; /* config space cannot be read beyond its head */
    char seen[64][20];
    int seen_count;
};

static bool seen(struct acs *acs, const char *busid)
{
    for (int i = 0; i < acs->seen_count; i++) {
        if (strcmp(acs->seen[i], busid) == 0)
            return true;
    }
    if (acs->seen_count < 64)
        (void)snprintf(acs->seen[acs->seen_count++], sizeof(acs->seen[0]), "%.19s", busid);
    return false;
}

/* Bits 2 and 3 send requests and completions between devices below it up to the root. */
static void look_at_bridge(const struct lc_exam *exam, struct acs *acs, const char *busid)
{
    unsigned char config[4096];
    int size = lc_root_bytes(exam->root, config, sizeof(config), "sys/bus/pci/devices/%s/config",
                             busid);
    int control = acs_control(config, size);

    acs->hidden |= size > 0 && size <= 256;
    if (control >= 0 && control & 0x0c)
        lc_exam_add(&acs->redirecting, "%s", busid);
}

static void look_above(const struct lc_exam *exam, struct acs *acs, const char *busid)
{
    char link[PATH_MAX];
    char *rest = link;
    char *part;

    if (lc_root_link(exam->root, link, sizeof(link), "sys/bus/pci/devices/%s", busid) != 0)
        return;
    while ((part = strsep(&rest, "/"))) {
        if (lc_topo_is_busid(part) && strcmp(part, busid) != 0 && !seen(acs, part))
            look_at_bridge(exam, acs, part);
    }
}

static void check_acs(const struct lc_exam *exam)
{
    struct acs acs = { .seen_count = 0 };
    int ends = 0;

    for (int i = lc_topo_next(exam->topo, LC_TOPO_PCI, -1); i >= 0;
         i = lc_topo_next(exam->topo, LC_TOPO_PCI, i)) {
        enum lc_topo_pci_kind kind = exam->topo->nodes[i].pci.kind;

        if (kind != LC_TOPO_PCI_GPU && kind != LC_TOPO_PCI_NIC)
            continue;
        ends++;
        look_above(exam, &acs, exam->topo->nodes[i].id);
    }
    if (ends < 2)
        return;
    if (acs.redirecting.count)
        lc_exam_find(exam, LC_TOPO_WARNING, "acs",
                     "PCIe bridges above GPUs or NICs send traffic between devices up to the CPU "
                     "(ACS redirect): %s; peer access and GPUDirect are slow or hang\n"
                     "on bare metal turn ACS off (firmware, or setpci ECAP_ACS+6.w=0000 at each)",
                     acs.redirecting.text.s);
    else if (acs.hidden)
        lc_exam_find(exam, LC_TOPO_INFO, "acs-unknown",
                     "whether PCIe bridges redirect traffic (ACS) can be read by root only\n"
                     "run `loongcomm doctor` as root once");
}

static void check_invisible(const struct lc_exam *exam)
{
    struct lc_exam_list portless = { .count = 0 };
    bool ports = exam->routes && exam->routes->net_count;

    for (int i = lc_topo_next(exam->topo, LC_TOPO_PCI, -1); i >= 0;
         i = lc_topo_next(exam->topo, LC_TOPO_PCI, i)) {
        int nic = lc_topo_find_child(exam->topo, i, LC_TOPO_NIC, NULL, NULL);

        if (exam->topo->nodes[i].pci.kind == LC_TOPO_PCI_NIC &&
            (nic < 0 || exam->topo->nodes[nic].child < 0))
            lc_exam_add(&portless, "%s", exam->topo->nodes[i].id);
    }
    if (portless.count)
        lc_exam_find(exam, ports ? LC_TOPO_INFO : LC_TOPO_WARNING, "nic-invisible",
                     "network cards without a port that can be seen here: %s\n"
                     "load their driver; in a container, share the host's network and its "
                     "/sys/class/infiniband",
                     portless.text.s);
}

/* Containers show RDMA devices in /sys and must be given their files in /dev as well. */
static void check_device_files(const struct lc_exam *exam)
{
    char **names;
    int devices = lc_root_names(exam->root, &names, MAX_FUNCTIONS, "sys/class/infiniband");
    int files = 0;
    int count;

    lc_root_free_names(names, devices > 0 ? devices : 0);
    if (devices <= 0 || !lc_root_has(exam->root, "dev"))
        return;
    count = lc_root_names(exam->root, &names, MAX_FUNCTIONS, "dev/infiniband");
    for (int i = 0; i < count; i++)
        files += strncmp(names[i], "uverbs", 6) == 0;
    lc_root_free_names(names, count > 0 ? count : 0);
    if (files < devices)
        lc_exam_find(exam, LC_TOPO_WARNING, "rdma-device-missing",
                     "%d RDMA devices are here but %d of their files /dev/infiniband/uverbs*: NCCL "
                     "cannot open the others\n"
                     "load ib_uverbs; start the container with --device=/dev/infiniband",
                     devices, files);
}

void lc_exam_pci(const struct lc_exam *exam)
{
    if (exam->topo->format == LC_TOPO_SYSFS || exam->topo->format == LC_TOPO_HWLOC)
        check_invisible(exam);
    check_links(exam);
    if (!exam->root)
        return;
    check_device_files(exam);
    if (lc_topo_next(exam->topo, LC_TOPO_GPU, -1) >= 0)
        check_acs(exam);
}
