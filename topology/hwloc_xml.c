/* SPDX-License-Identifier: Apache-2.0
 *
 * A machine as lstopo exported it. */
#include "topology/devices.h"
#include "topology/xml.h"

#include <errno.h>
#include <hwloc.h>
#include <hwloc/distances.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NVLINK_MBPS \
    25000.0 /* of one link of the generations that hwloc has seen most; older ones have 20000 */

#define SET_MAX ((size_t)8192) /* of a set of processors as text */

struct root {
    struct lc_topo *topo;
    char version[16];
    bool no_nodes; /* the machine has no nodeset */
};

static int take_version(void *arg, int line, const char *name, const char *value)
{
    struct root *root = arg;

    if (strcmp(name, "version") == 0)
        (void)snprintf(root->version, sizeof(root->version), "%s", value);
    return 0;
}

struct object {
    char type[24];
    bool cpuset, complete_cpuset, nodeset, complete_nodeset;
};

/* As hwloc writes it: 0x00000003 or 0xf,0xffffffff. */
static bool is_set(const char *value)
{
    size_t length = strlen(value);

    return length > 0 && length < SET_MAX && strspn(value, "0123456789abcdefx,") == length;
}

static int take_attribute(void *arg, int line, const char *name, const char *value)
{
    struct object *object = arg;

    if (strcmp(name, "type") == 0)
        (void)snprintf(object->type, sizeof(object->type), "%s", value);
    object->cpuset |= strcmp(name, "cpuset") == 0 && is_set(value);
    object->complete_cpuset |= strcmp(name, "complete_cpuset") == 0 && is_set(value);
    object->nodeset |= strcmp(name, "nodeset") == 0;
    object->complete_nodeset |= strcmp(name, "complete_nodeset") == 0 && is_set(value);
    return 0;
}

/* hwloc reads through a NULL pointer where an object of processors or memory lacks a set of processors, which it always writes,
 * or has a nodeset without the complete one, or below a machine that has none, which it never writes. */
static int check_sets(struct root *root, const struct object *object, int line, int depth)
{
    const char *type = object->type[0] ? object->type : "without type";

    if (!object->cpuset || !object->complete_cpuset)
        return lc_topo_fail(root->topo, EINVAL, line,
                            "an object (%s) without cpuset and complete_cpuset", type);
    if (object->nodeset && !object->complete_nodeset)
        return lc_topo_fail(root->topo, EINVAL, line,
                            "an object (%s) with nodeset, but no complete_nodeset", type);
    if (depth == 1)
        root->no_nodes = !object->nodeset;
    if (object->nodeset && root->no_nodes)
        return lc_topo_fail(root->topo, EINVAL, line,
                            "an object (%s) with nodeset in a machine without", type);
    return 0;
}

/* It also ends the process where the whole is no machine. */
static int take_object(struct root *root, struct lc_xml *xml, int line, int depth)
{
    static const char *const without[] = { "Bridge", "PCIDev", "OSDev", "Misc" };
    struct object object = { 0 };
    int err = lc_xml_attributes(xml, take_attribute, &object);

    if (!err && depth == 1 && strcmp(object.type, "Machine") != 0 &&
        strcmp(object.type, "System") != 0)
        err = lc_topo_fail(root->topo, EINVAL, line, "the first object is no Machine (%s)",
                           object.type);
    for (size_t i = 0; i < sizeof(without) / sizeof(*without); i++) {
        if (strcmp(object.type, without[i]) == 0)
            return err;
    }
    return err ? err : check_sets(root, &object, line, depth);
}

/* hwloc itself would say no more than that it failed. */
static int take_element(void *arg, struct lc_xml *xml, int line, int depth, const char *tag)
{
    struct root *root = arg;
    unsigned api = hwloc_get_api_version();
    int err;

    if (depth > 0)
        return strcmp(tag, "object") == 0 ? take_object(root, xml, line, depth) : 0;
    err = lc_xml_attributes(xml, take_version, root);
    if (!err && strtol(root->version, NULL, 10) > (long)(api >> 16))
        err = lc_topo_fail(
            root->topo, ENOTSUP, line,
            "hwloc XML of format %s; the installed hwloc reads format %u.x and older",
            root->version, api >> 16);
    return err;
}

static bool is_bridge(hwloc_obj_t obj)
{
    return obj->type == HWLOC_OBJ_BRIDGE && obj->attr->bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI;
}

/* hwloc tells bandwidth only. Of the widths and speeds that make it the widest is taken. */
static void guess_link(double gbytes, struct lc_topo_function *function)
{
    static const struct {
        double gbits; /* of a lane, without its coding */
        const char *speed;
    } speeds[] = {
        {2.0,               "2.5 GT/s PCIe" },
        { 4.0,              "5.0 GT/s PCIe" },
        { 8.0 * 128 / 130,  "8.0 GT/s PCIe" },
        { 16.0 * 128 / 130, "16.0 GT/s PCIe"},
        { 32.0 * 128 / 130, "32.0 GT/s PCIe"},
    };

    for (int width = 16; width >= 1 && gbytes > 0; width /= 2) {
        for (size_t i = 0; i < sizeof(speeds) / sizeof(*speeds); i++) {
            if (fabs(speeds[i].gbits * width / 8 - gbytes) > 0.02 * gbytes)
                continue;
            (void)snprintf(function->speed, sizeof(function->speed), "%s", speeds[i].speed);
            function->width = width;
            return;
        }
    }
}

static int cpu_of(struct lc_topo *topo, hwloc_topology_t machine, hwloc_obj_t obj)
{
    hwloc_obj_t above = hwloc_get_non_io_ancestor_obj(machine, obj);
    int numa = -1;

    /* a device of the whole machine is near to no node, unless there is one only */
    if (above && above->nodeset && hwloc_bitmap_weight(above->nodeset) == 1)
        numa = hwloc_bitmap_first(above->nodeset);
    else if (above && above->nodeset && above->parent)
        numa = hwloc_bitmap_first(above->nodeset);
    return lc_topo_place_cpu(topo, numa);
}

/* By NCCL's rule: the bridge directly above a function (a root or downstream port) is left out. */
static int place(struct lc_topo *topo, hwloc_topology_t machine, hwloc_obj_t obj)
{
    const struct hwloc_pcidev_attr_s *pci = obj->type == HWLOC_OBJ_BRIDGE
                                                ? &obj->attr->bridge.upstream.pci
                                                : &obj->attr->pcidev;
    hwloc_obj_t port = obj->parent && is_bridge(obj->parent) ? obj->parent : NULL;
    hwloc_obj_t above = port && port->parent && is_bridge(port->parent) ? port->parent : NULL;
    struct lc_topo_function function = { .class = (unsigned)pci->class_id << 8,
                                         .vendor = pci->vendor_id,
                                         .device = pci->device_id,
                                         .subvendor = pci->subvendor_id,
                                         .subdevice = pci->subdevice_id };
    int parent = above ? place(topo, machine, above) : cpu_of(topo, machine, obj);

    if (parent < 0)
        return parent;
    (void)snprintf(function.busid, sizeof(function.busid), "%04x:%02x:%02x.%01x",
                   (unsigned)pci->domain, pci->bus, pci->dev, pci->func);
    if (strlen(function.busid) != 12 && !is_bridge(obj))
        lc_topo_remark(topo, 0, "NCCL cannot use %s: its domain has more than 4 digits",
                       function.busid);
    guess_link((double)pci->linkspeed, &function);
    return lc_topo_place_pci(topo, parent, &function);
}

/* Devices of the operating system below a PCI function: eth0, mlx5_0, nvml3, cuda0. */
static hwloc_obj_t device_of(hwloc_obj_t obj, hwloc_obj_osdev_type_t type, hwloc_obj_t after)
{
    hwloc_obj_t at = after ? after->next_sibling : obj->io_first_child;

    while (at && (at->type != HWLOC_OBJ_OS_DEVICE || at->attr->osdev.type != type))
        at = at->next_sibling;
    return at;
}

static int add_gpu(struct lc_topo *topo, hwloc_obj_t obj, int pci, int *numbered)
{
    int gpu = lc_topo_place_child(topo, pci, LC_TOPO_GPU);
    int number = *numbered;

    if (gpu < 0)
        return gpu;
    for (hwloc_obj_t at = obj->io_first_child; at; at = at->next_sibling) {
        if (at->name && strncmp(at->name, "nvml", 4) == 0)
            number = (int)(strtol(at->name + 4, NULL, 10) & 0xffff);
    }
    (*numbered)++;
    return lc_topo_setf(topo, gpu, "dev", "%d", number);
}

static int add_net(struct lc_topo *topo, int nic, hwloc_obj_t device, int *numbered)
{
    const char *guid = hwloc_obj_get_info_by_name(device, "NodeGUID");
    int net = lc_topo_add(topo, nic, LC_TOPO_NET, 0);
    int err = net < 0 ? net : lc_topo_set(topo, net, "name", device->name ? device->name : "");
    char hex[17];
    size_t used = 0;

    if (!err && numbered)
        err = lc_topo_setf(topo, net, "dev", "%d", (*numbered)++);
    for (; guid && *guid && used < 16; guid++) {
        if (strchr("0123456789abcdefABCDEF", *guid))
            hex[used++] = *guid;
    }
    hex[used] = '\0';
    return err || !used ? err : lc_topo_setf(topo, net, "guid", "0x%s", hex);
}

struct counts {
    int gpus, nets;
    bool infiniband; /* of the whole machine: then NCCL takes no sockets */
};

static int add_nic(struct lc_topo *topo, hwloc_obj_t obj, int pci, struct counts *counts)
{
    hwloc_obj_osdev_type_t type = device_of(obj, HWLOC_OBJ_OSDEV_OPENFABRICS, NULL)
                                      ? HWLOC_OBJ_OSDEV_OPENFABRICS
                                      : HWLOC_OBJ_OSDEV_NETWORK;
    bool counted = !counts->infiniband || type == HWLOC_OBJ_OSDEV_OPENFABRICS;
    int nic = lc_topo_place_child(topo, pci, LC_TOPO_NIC);
    int err = nic < 0 ? nic : 0;

    for (hwloc_obj_t at = device_of(obj, type, NULL); at && !err; at = device_of(obj, type, at))
        err = add_net(topo, nic, at, counted ? &counts->nets : NULL);
    return err;
}

static int add_devices(struct lc_topo *topo, hwloc_topology_t machine)
{
    struct counts counts = { 0 };
    hwloc_obj_t obj = NULL;
    int err = 0;

    while ((obj = hwloc_get_next_osdev(machine, obj)))
        counts.infiniband |= obj->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS;
    while (!err && (obj = hwloc_get_next_pcidev(machine, obj))) {
        unsigned class = (unsigned)obj->attr->pcidev.class_id << 8;
        bool gpu = lc_topo_is_gpu(class, obj->attr->pcidev.vendor_id);
        bool nic = lc_topo_is_nic(class) || device_of(obj, HWLOC_OBJ_OSDEV_NETWORK, NULL) ||
                   device_of(obj, HWLOC_OBJ_OSDEV_OPENFABRICS, NULL);
        int pci = gpu || nic ? place(topo, machine, obj) : 0;

        if (pci < 0)
            err = pci;
        else if (gpu)
            err = add_gpu(topo, obj, pci, &counts.gpus);
        else if (nic)
            err = add_nic(topo, obj, pci, &counts);
    }
    return err;
}

static int add_cpus(struct lc_topo *topo, hwloc_topology_t machine)
{
    hwloc_obj_t node = NULL;
    int err = 0;

    while (!err && (node = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_NUMANODE, node))) {
        hwloc_obj_t package = hwloc_get_ancestor_obj_by_type(machine, HWLOC_OBJ_PACKAGE, node);
        const char *const names[] = { "CPUVendor", "CPUFamilyNumber", "CPUModelNumber" };
        const char *const attrs[] = { "vendor", "familyid", "modelid" };
        int cpu;

        if (!node->cpuset || hwloc_bitmap_iszero(node->cpuset) || node->os_index > 65535)
            continue;
        cpu = lc_topo_place_cpu(topo, (int)node->os_index);
        err = cpu < 0 ? cpu : 0;
        for (int i = 0; i < 3 && package && !err; i++) {
            const char *value = hwloc_obj_get_info_by_name(package, names[i]);

            if (value)
                err = lc_topo_set(topo, cpu, attrs[i], value);
            if (value && i == 0 && !err &&
                (strcmp(value, "GenuineIntel") == 0 || strcmp(value, "AuthenticAMD") == 0))
                err = lc_topo_set(topo, cpu, "arch", "x86_64");
        }
    }
    return err;
}

static hwloc_obj_t pci_of(hwloc_obj_t obj)
{
    while (obj && obj->type != HWLOC_OBJ_PCI_DEVICE)
        obj = obj->parent;
    return obj;
}

static int add_link(struct lc_topo *topo, hwloc_obj_t from, hwloc_obj_t to, double mbps)
{
    const struct hwloc_pcidev_attr_s *a = &from->attr->pcidev;
    const struct hwloc_pcidev_attr_s *b = &to->attr->pcidev;
    int gpu = -1;
    char id[24];
    int link;
    int err;

    (void)snprintf(id, sizeof(id), "%04x:%02x:%02x.%01x", (unsigned)a->domain, a->bus, a->dev,
                   a->func);
    for (int i = lc_topo_next(topo, LC_TOPO_GPU, -1); i >= 0 && gpu < 0;
         i = lc_topo_next(topo, LC_TOPO_GPU, i)) {
        const char *busid = lc_topo_attribute(topo, topo->nodes[i].parent, "busid");

        if (strcmp(busid, id) == 0)
            gpu = i;
    }
    if (gpu < 0)
        return 0;
    link = lc_topo_add(topo, gpu, LC_TOPO_NVLINK, 0);
    err = link < 0 ? link
                   : lc_topo_setf(topo, link, "target", "%04x:%02x:%02x.%01x", (unsigned)b->domain,
                                  b->bus, b->dev, b->func);
    if (!err)
        err = lc_topo_setf(topo, link, "count", "%d",
                           mbps < NVLINK_MBPS ? 1 : (int)fmin(mbps / NVLINK_MBPS + 0.5, 64));
    return err ? err
               : lc_topo_setf(topo, link, "tclass", "0x%04x00", (unsigned)b->class_id & 0xffff);
}

static int add_nvlinks(struct lc_topo *topo, hwloc_topology_t machine)
{
    struct hwloc_distances_s *distances = NULL;
    unsigned found = 1;
    int err = 0;
    bool any = false;

    if (hwloc_distances_get_by_name(machine, "NVLinkBandwidth", &found, &distances, 0) != 0 ||
        !found || !distances)
        return 0;
    for (unsigned i = 0; i < distances->nbobjs && !err; i++) {
        for (unsigned k = 0; k < distances->nbobjs && !err; k++) {
            hwloc_uint64_t value = distances->values[(size_t)i * distances->nbobjs + k];
            hwloc_obj_t a = pci_of(distances->objs[i]);
            hwloc_obj_t b = pci_of(distances->objs[k]);

            if (!value || !a || !b || a == b)
                continue;
            err = add_link(topo, a, b, (double)value);
            any = true;
        }
    }
    if (any)
        lc_topo_remark(topo, 0, "NVLinks are counted from hwloc's bandwidths, 25 GB/s each");
    hwloc_distances_release(machine, distances);
    return err;
}

static int convert(struct lc_topo *topo, hwloc_topology_t machine)
{
    int err = add_cpus(topo, machine);

    if (!err)
        err = add_devices(topo, machine);
    return err ? err : add_nvlinks(topo, machine);
}

int lc_topo_read_hwloc(struct lc_topo *topo, const char *text, size_t size)
{
    struct root root = { .topo = topo };
    hwloc_topology_t machine;
    char *copy;
    int err = lc_xml_walk(topo, text, size, true, take_element, &root);

    topo->format = LC_TOPO_HWLOC;
    if (err)
        return err;
    copy = strndup(text, size); /* hwloc wants the 0 behind it */
    if (!copy || hwloc_topology_init(&machine) != 0) {
        free(copy);
        return lc_topo_fail(topo, ENOMEM, 0, "no memory");
    }
    (void)hwloc_topology_set_io_types_filter(machine, HWLOC_TYPE_FILTER_KEEP_ALL);
    if (hwloc_topology_set_xmlbuffer(machine, copy, (int)size + 1) != 0 ||
        hwloc_topology_load(machine) != 0)
        err = lc_topo_fail(topo, EINVAL, 0, "hwloc cannot make a machine of it");
    else
        err = convert(topo, machine);
    hwloc_topology_destroy(machine);
    free(copy);
    return err;
}
