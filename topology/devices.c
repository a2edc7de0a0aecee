/* SPDX-License-Identifier: Apache-2.0 */
#include "topology/devices.h"

#include <stdlib.h>
#include <string.h>

#define VENDOR_AMD    0x1002
#define VENDOR_NVIDIA 0x10de

bool lc_topo_is_gpu(unsigned class, unsigned vendor)
{
    unsigned base = class >> 16; /* 0x12: accelerators, which newer AMD GPUs are */

    return (vendor == VENDOR_NVIDIA || vendor == VENDOR_AMD) && (base == 0x03 || base == 0x12);
}

bool lc_topo_is_nic(unsigned class)
{
    return class >> 16 == 0x02 || class >> 8 == 0x0c06; /* InfiniBand of the first years */
}

int lc_topo_place_cpu(struct lc_topo *topo, int numa)
{
    char number[16];
    int node;
    int err;

    (void)snprintf(number, sizeof(number), "%d", numa);
    node = lc_topo_find_child(topo, 0, LC_TOPO_CPU, "numaid", number);
    if (node >= 0)
        return node;
    node = lc_topo_add(topo, 0, LC_TOPO_CPU, 0);
    if (node < 0)
        return node;
    err = lc_topo_set(topo, node, "numaid", number);
    return err ? err : node;
}

int lc_topo_place_pci(struct lc_topo *topo, int parent, const struct lc_topo_function *function)
{
    const struct {
        const char *name;
        unsigned value;
    } ids[] = {
        {"vendor",            function->vendor   },
        { "device",           function->device   },
        { "subsystem_vendor", function->subvendor},
        { "subsystem_device", function->subdevice},
    };
    int node = lc_topo_find_child(topo, parent, LC_TOPO_PCI, "busid", function->busid);
    int err;

    if (node >= 0)
        return node;
    node = lc_topo_add(topo, parent, LC_TOPO_PCI, 0);
    if (node < 0)
        return node;
    err = lc_topo_set(topo, node, "busid", function->busid);
    if (!err)
        err = lc_topo_setf(topo, node, "class", "0x%06x", function->class & 0xffffff);
    for (size_t i = 0; i < sizeof(ids) / sizeof(*ids) && !err; i++)
        err = lc_topo_setf(topo, node, ids[i].name, "0x%04x", ids[i].value & 0xffff);
    if (!err)
        err = lc_topo_set(topo, node, "link_speed", function->speed);
    if (!err)
        err = lc_topo_setf(topo, node, "link_width", "%d", function->width);
    return err ? err : node;
}

int lc_topo_place_child(struct lc_topo *topo, int parent, enum lc_topo_type type)
{
    int node = lc_topo_find_child(topo, parent, type, NULL, NULL);

    return node >= 0 ? node : lc_topo_add(topo, parent, type, 0);
}
