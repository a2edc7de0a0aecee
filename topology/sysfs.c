/* SPDX-License-Identifier: Apache-2.0
 *
 * A machine as its /sys and /proc show it, by the rules that NCCL reads them with: a PCI function hangs below the
 * bridge two levels up (a switch is its upstream port; ports between are left out), and below the NUMA node of the
 * topmost function. Only where the kernel names no NUMA node, which NCCL leaves at that, local_cpus is asked. */
#include "topology/devices.h"
#include "topology/root.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#define MAX_FUNCTIONS 4096
#define MAX_PORTS     2048
#define MAX_CHAIN     LC_TOPO_MAX_DEPTH

struct port { /* an entry of class/net or class/infiniband */
    char name[64];
    char busid[20]; /* "": no PCI function */
};

struct ports {
    struct port *list;
    int count;
};

struct chain { /* bus ids from the host bridge to a function */
    char ids[MAX_CHAIN][20];
    int count;
};

struct machine {
    struct lc_topo *topo;
    struct lc_root root;
    struct ports infiniband;
    struct ports ethernet;
    int nets; /* numbered so far */
    int gpus;
};

/* Bus ids in the text of a link such as ../../../devices/pci0000:00/0000:00:05.0/0000:02:00.0/net/eth0. */
static void parse_chain(const char *link, struct chain *out)
{
    char part[sizeof(out->ids[0])];

    out->count = 0;
    while (*link && out->count < MAX_CHAIN) {
        size_t len = strcspn(link, "/");

        if (len < sizeof(part)) {
            memcpy(part, link, len);
            part[len] = '\0';
            if (lc_topo_is_busid(part))
                memcpy(out->ids[out->count++], part, sizeof(part));
        }
        link += len;
        link += *link == '/';
    }
}

static unsigned read_hex(const struct machine *machine, const char *busid, const char *file)
{
    char text[32];

    if (lc_root_text(&machine->root, text, sizeof(text), "sys/bus/pci/devices/%s/%s", busid, file))
        return 0;
    return (unsigned)strtoul(text, NULL, 16);
}

/* The smaller of what the function and the port above it can do. */
static void read_link(const struct machine *machine, const struct chain *chain, int at,
                      struct lc_topo_function *function)
{
    double best = 0;

    for (int i = at; i >= 0 && i >= at - 1; i--) {
        char speed[sizeof(function->speed)];
        char width[16];
        double gts;
        long lanes;

        (void)lc_root_text(&machine->root, speed, sizeof(speed),
                           "sys/bus/pci/devices/%s/max_link_speed", chain->ids[i]);
        (void)lc_root_text(&machine->root, width, sizeof(width),
                           "sys/bus/pci/devices/%s/max_link_width", chain->ids[i]);
        gts = strtod(speed, NULL);
        lanes = strtol(width, NULL, 10);
        if (gts > 0 && (best == 0 || gts < best) && strstr(speed, " GT/s")) {
            best = gts;
            memcpy(function->speed, speed, sizeof(speed));
        }
        if (lanes > 0 && lanes < 255 && (function->width == 0 || lanes < function->width))
            function->width = (int)lanes;
    }
}

/* What the link runs at now, if the kernel says so. */
static int note_current(struct machine *machine, int node, const char *busid)
{
    static const char *const files[] = { "current_link_speed", "current_link_width" };
    int err = 0;

    for (size_t i = 0; i < 2 && !err; i++) {
        char text[40];

        if (lc_root_text(&machine->root, text, sizeof(text), "sys/bus/pci/devices/%s/%s", busid,
                         files[i]) == 0 &&
            *text)
            err = lc_topo_set(machine->topo, node, files[i], text);
    }
    return err;
}

/* Is every processor of `mask` in `of`? Both are words of 32 bits, the last one the lowest. */
static bool within(const char *mask, const char *of)
{
    const char *m = mask + strlen(mask);
    const char *o = of + strlen(of);
    bool any = false;

    while (m > mask) {
        unsigned long word;
        unsigned long allowed = 0;

        while (m > mask && m[-1] != ',')
            m--;
        word = strtoul(m, NULL, 16);
        if (o > of) {
            while (o > of && o[-1] != ',')
                o--;
            allowed = strtoul(o, NULL, 16);
            o -= o > of;
        }
        if (word & ~allowed)
            return false;
        any |= word != 0;
        m -= m > mask;
    }
    return any;
}

static int numa_of(struct machine *machine, const char *busid)
{
    struct lc_topo *topo = machine->topo;
    char text[1024];
    int cpus = 0;
    int only = -1;

    if (lc_root_text(&machine->root, text, sizeof(text), "sys/bus/pci/devices/%s/numa_node",
                     busid) == 0) {
        long numa = strtol(text, NULL, 10);

        if (numa >= 0 && numa <= 65535)
            return (int)numa;
    }
    if (topo->as_nccl)
        return -1;
    (void)lc_root_text(&machine->root, text, sizeof(text), "sys/bus/pci/devices/%s/local_cpus",
                       busid);
    for (int at = topo->nodes[0].child; at >= 0; at = topo->nodes[at].next) {
        const char *mask = lc_topo_attribute(topo, at, "affinity");
        int numa = atoi(lc_topo_attribute(topo, at, "numaid"));

        if (numa >= 0 && mask && within(text, mask))
            return numa;
        if (numa >= 0) {
            cpus++;
            only = numa;
        }
    }
    return cpus == 1 ? only : -1;
}

/* The function at chain->ids[at] and all above it. */
static int place(struct machine *machine, const struct chain *chain, int at)
{
    struct lc_topo_function function = { 0 };
    const char *busid = chain->ids[at];
    int parent;
    int node;
    int err;

    parent = at >= 2 ? place(machine, chain, at - 2)
                     : lc_topo_place_cpu(machine->topo, numa_of(machine, busid));
    if (parent < 0)
        return parent;
    (void)snprintf(function.busid, sizeof(function.busid), "%s", busid);
    function.class = read_hex(machine, busid, "class");
    function.vendor = read_hex(machine, busid, "vendor");
    function.device = read_hex(machine, busid, "device");
    function.subvendor = read_hex(machine, busid, "subsystem_vendor");
    function.subdevice = read_hex(machine, busid, "subsystem_device");
    read_link(machine, chain, at, &function);
    node = lc_topo_place_pci(machine->topo, parent, &function);
    if (node < 0)
        return node;
    err = note_current(machine, node, busid);
    return err ? err : node;
}

/* A virtual machine's port is often no PCI function itself but a device of one: .../0000:00:03.0/virtio0/net/eth0. */
static bool is_function(const char *link, const char *busid, const char *class, const char *name)
{
    char end[160];
    int length = snprintf(end, sizeof(end), "/%s/%s/%s", busid, class, name);
    size_t size = strlen(link);

    return length > 0 && (size_t)length < sizeof(end) && size > (size_t)length &&
           strcmp(link + size - (size_t)length, end) == 0;
}

static int read_ports(struct machine *machine, const char *class, struct ports *out)
{
    char **names;
    int count = lc_root_names(&machine->root, &names, MAX_PORTS, "sys/class/%s", class);

    if (count <= 0) {
        lc_root_free_names(names, 0);
        return 0;
    }
    out->list = calloc((size_t)count, sizeof(*out->list));
    for (int i = 0; i < count && out->list; i++) {
        struct port *port = &out->list[out->count];
        struct chain chain;
        char link[PATH_MAX];

        if (strlen(names[i]) >= sizeof(port->name) ||
            lc_root_link(&machine->root, link, sizeof(link), "sys/class/%s/%s", class, names[i]))
            continue;
        parse_chain(link, &chain);
        memcpy(port->name, names[i], strlen(names[i]) + 1);
        if (chain.count && (!machine->topo->as_nccl ||
                            is_function(link, chain.ids[chain.count - 1], class, names[i])))
            memcpy(port->busid, chain.ids[chain.count - 1], sizeof(port->busid));
        out->count++;
    }
    lc_root_free_names(names, count);
    return out->list ? 0 : lc_topo_fail(machine->topo, ENOMEM, 0, "no memory");
}

static bool has_port(const struct ports *ports, const char *busid)
{
    for (int i = 0; ports->list && i < ports->count; i++) {
        if (strcmp(ports->list[i].busid, busid) == 0)
            return true;
    }
    return false;
}

/* GPU memory within reach of a NIC: a peer-memory module, or the open GPU driver with its dma-buf. */
static bool has_gpudirect(const struct machine *machine)
{
    char text[256];

    return lc_root_has(&machine->root, "sys/module/nvidia_peermem") ||
           lc_root_has(&machine->root, "sys/module/nv_peer_mem") ||
           lc_root_has(&machine->root, "sys/kernel/mm/memory_peers/nv_mem") ||
           lc_root_has(&machine->root, "sys/kernel/mm/memory_peers/amdkfd") ||
           (lc_root_text(&machine->root, text, sizeof(text), "proc/driver/nvidia/version") == 0 &&
            strstr(text, "Open Kernel Module"));
}

static int add_infiniband_port(struct machine *machine, int nic, const char *device,
                               const char *port)
{
    struct lc_topo *topo = machine->topo;
    char guid[40];
    char rate[64];
    char state[64];
    int net = lc_topo_add(topo, nic, LC_TOPO_NET, 0);
    int err;

    if (net < 0)
        return net;
    (void)lc_root_text(&machine->root, state, sizeof(state),
                       "sys/class/infiniband/%s/ports/%s/state", device, port);
    (void)lc_root_text(&machine->root, rate, sizeof(rate), "sys/class/infiniband/%s/ports/%s/rate",
                       device, port);
    err = lc_topo_set(topo, net, "name", device);
    if (!err && (!*state || strstr(state, "ACTIVE"))) /* NCCL counts no others */
        err = lc_topo_setf(topo, net, "dev", "%d", machine->nets++);
    if (!err)
        err = lc_topo_setf(topo, net, "speed", "%.0f",
                           strstr(rate, " Gb/sec") ? strtod(rate, NULL) * 1000 : 0.0);
    if (!err)
        err = lc_topo_setf(topo, net, "port", "%ld", strtol(port, NULL, 10) & 0xff);
    if (!err && lc_root_text(&machine->root, guid, sizeof(guid),
                             "sys/class/infiniband/%s/sys_image_guid", device) == 0) {
        char *to = guid;

        for (const char *from = guid; *from; from++) {
            if (*from != ':')
                *to++ = *from;
        }
        *to = '\0';
        if (strlen(guid) <= 16 && guid[strspn(guid, "0123456789abcdefABCDEF")] == '\0')
            err = lc_topo_setf(topo, net, "guid", "0x%s", guid);
    }
    if (!err)
        err = lc_topo_setf(topo, net, "gdr", "%d", has_gpudirect(machine));
    /* "4: ACTIVE"; what NCCL does not know it does not read */
    if (!err && *state)
        err = lc_topo_set(topo, net, "state", strchr(state, ' ') ? strchr(state, ' ') + 1 : state);
    return err;
}

static int add_infiniband(struct machine *machine, int nic, const char *device)
{
    char **ports;
    int count = lc_root_names(&machine->root, &ports, 16, "sys/class/infiniband/%s/ports", device);
    int err = 0;

    for (int i = 0; i < count && !err; i++)
        err = add_infiniband_port(machine, nic, device, ports[i]);
    lc_root_free_names(ports, count > 0 ? count : 0);
    return err;
}

/* NCCL's sockets see an interface only where no InfiniBand or RoCE device is; it has no number then. */
static int add_ethernet(struct machine *machine, int nic, const char *name)
{
    char text[32];
    long mbps = 0;
    int net = lc_topo_add(machine->topo, nic, LC_TOPO_NET, 0);
    int err;

    if (net < 0)
        return net;
    if (lc_root_text(&machine->root, text, sizeof(text), "sys/class/net/%s/speed", name) == 0)
        mbps = strtol(text, NULL, 10);
    err = lc_topo_set(machine->topo, net, "name", name);
    if (!err && machine->infiniband.count == 0)
        err = lc_topo_setf(machine->topo, net, "dev", "%d", machine->nets++);
    if (!err)
        err = lc_topo_setf(machine->topo, net, "speed", "%ld",
                           mbps > 0 && mbps < INT_MAX ? mbps : 0);
    if (!err)
        err = lc_topo_set(machine->topo, net, "gdr", "0");
    if (!err &&
        lc_root_text(&machine->root, text, sizeof(text), "sys/class/net/%s/operstate", name) == 0)
        err = lc_topo_set(machine->topo, net, "state", text);
    return err;
}

static int fill_nic(struct machine *machine, int pci, const char *busid)
{
    int nic = lc_topo_place_child(machine->topo, pci, LC_TOPO_NIC);
    bool fast = has_port(&machine->infiniband, busid);
    const struct ports *ports = fast ? &machine->infiniband : &machine->ethernet;
    int err = nic < 0 ? nic : 0;

    for (int i = 0; i < ports->count && !err; i++) {
        if (strcmp(ports->list[i].busid, busid) != 0)
            continue;
        err = fast ? add_infiniband(machine, nic, ports->list[i].name)
                   : add_ethernet(machine, nic, ports->list[i].name);
    }
    return err;
}

static int fill_gpu(struct machine *machine, int pci)
{
    int gpu = lc_topo_place_child(machine->topo, pci, LC_TOPO_GPU);

    return gpu < 0 ? gpu : lc_topo_setf(machine->topo, gpu, "dev", "%d", machine->gpus++);
}

static int read_function(struct machine *machine, const char *busid)
{
    unsigned class = read_hex(machine, busid, "class");
    bool gpu = lc_topo_is_gpu(class, read_hex(machine, busid, "vendor"));
    bool nic = lc_topo_is_nic(class) || has_port(&machine->infiniband, busid) ||
               has_port(&machine->ethernet, busid);
    struct chain chain;
    char link[PATH_MAX];
    int node;

    if (!gpu && !nic)
        return 0;
    if (lc_root_link(&machine->root, link, sizeof(link), "sys/bus/pci/devices/%s", busid))
        return 0;
    parse_chain(link, &chain);
    if (chain.count == 0 || strcmp(chain.ids[chain.count - 1], busid) != 0)
        return 0;
    if (strlen(busid) != strlen("0000:00:00.0"))
        lc_topo_remark(machine->topo, 0, "NCCL cannot use %s: its domain has more than 4 digits",
                       busid);
    node = place(machine, &chain, chain.count - 1);
    if (node < 0)
        return node;
    return gpu ? fill_gpu(machine, node) : fill_nic(machine, node, busid);
}

static int read_functions(struct machine *machine)
{
    char **names;
    int count = lc_root_names(&machine->root, &names, MAX_FUNCTIONS, "sys/bus/pci/devices");
    int err = 0;

    for (int i = 0; i < count && !err; i++) {
        if (lc_topo_is_busid(names[i]))
            err = read_function(machine, names[i]);
    }
    lc_root_free_names(names, count > 0 ? count : 0);
    return err;
}

/* NCCL has met the GPU of its process alone when it places them. */
static int cpu_of_virtual(struct lc_topo *topo)
{
    int gpu = lc_topo_next(topo, LC_TOPO_GPU, -1);

    if (gpu >= 0)
        return lc_topo_above(topo, gpu, LC_TOPO_CPU);
    return topo->nodes[0].child >= 0 ? topo->nodes[0].child : lc_topo_place_cpu(topo, -1);
}

/* Interfaces without a PCI function (a container's eth0) are what NCCL uses where there is nothing else. */
static int read_virtual(struct machine *machine)
{
    int err = 0;
    int cpu = -1;
    int nic = -1;

    if (machine->nets)
        return 0;
    for (int i = 0; i < machine->ethernet.count && !err; i++) {
        const struct port *port = &machine->ethernet.list[i];

        if (*port->busid || strcmp(port->name, "lo") == 0)
            continue;
        if (cpu < 0)
            cpu = cpu_of_virtual(machine->topo);
        if (cpu >= 0 && nic < 0)
            nic = lc_topo_place_child(machine->topo, cpu, LC_TOPO_NIC);
        if (cpu < 0 || nic < 0)
            return cpu < 0 ? cpu : nic;
        err = add_ethernet(machine, nic, port->name);
    }
    return err;
}

/* The value behind "key : " in /proc/cpuinfo; "" if there is none. */
static void cpuinfo_value(const char *text, const char *key, char *out, size_t size)
{
    size_t len = strlen(key);

    *out = '\0';
    for (; text && *text; text = strchr(text, '\n'), text += text != NULL) {
        const char *colon;

        if (strncmp(text, key, len) != 0 || (text[len] != '\t' && text[len] != ' '))
            continue;
        colon = strchr(text, ':');
        if (!colon || colon > strchrnul(text, '\n'))
            continue;
        colon += strspn(colon, ": \t");
        (void)snprintf(out, size, "%.*s", (int)strcspn(colon, "\n"), colon);
        return;
    }
}

static int fill_cpu(struct machine *machine, int cpu, const char *cpuinfo)
{
    static const struct {
        const char *key, *attr;
    } keys[] = {
        {"vendor_id",   "vendor"  },
        { "cpu family", "familyid"},
        { "model",      "modelid" },
    };
    char value[64];
    int err;

    cpuinfo_value(cpuinfo, "vendor_id", value, sizeof(value));
    if (!*value) {
        cpuinfo_value(cpuinfo, "CPU implementer", value, sizeof(value));
        if (*value)
            return lc_topo_set(machine->topo, cpu, "arch", "arm64");
        cpuinfo_value(cpuinfo, "cpu", value, sizeof(value));
        return strncmp(value, "POWER", 5) == 0 ? lc_topo_set(machine->topo, cpu, "arch", "ppc64")
                                               : 0;
    }
    err = lc_topo_set(machine->topo, cpu, "arch", "x86_64");
    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys) && !err; i++) {
        cpuinfo_value(cpuinfo, keys[i].key, value, sizeof(value));
        if (i > 0 && value[strspn(value, "0123456789")])
            *value = '\0';
        if (*value)
            err = lc_topo_set(machine->topo, cpu, keys[i].attr, value);
    }
    return err;
}

/* NUMA nodes without processors hold memory only (of a GPU, or persistent): nothing is near to them. */
static int read_cpus(struct machine *machine)
{
    static const char digits[] = "0123456789";
    char **names;
    int count = lc_root_names(&machine->root, &names, 4096, "sys/devices/system/node");
    int numbers[1024];
    int found = 0;
    int err = 0;

    for (int i = 0; i < count && found < 1024; i++) {
        if (strncmp(names[i], "node", 4) == 0 && names[i][4] && strlen(names[i]) < 10 &&
            names[i][4 + strspn(names[i] + 4, digits)] == '\0')
            numbers[found++] = atoi(names[i] + 4);
    }
    lc_root_free_names(names, count > 0 ? count : 0);
    for (int i = 1; i < found; i++) { /* "node10" was sorted before "node2" */
        for (int k = i; k > 0 && numbers[k - 1] > numbers[k]; k--) {
            int swap = numbers[k];

            numbers[k] = numbers[k - 1];
            numbers[k - 1] = swap;
        }
    }
    for (int i = 0; i < found && !err; i++) {
        char mask[LC_TOPO_MAX_VALUE + 1];
        int cpu;

        (void)lc_root_text(&machine->root, mask, sizeof(mask),
                           "sys/devices/system/node/node%d/cpumap", numbers[i]);
        if (numbers[i] > 65535 || mask[strspn(mask, "0,")] == '\0' ||
            mask[strspn(mask, "0123456789abcdefABCDEF,")])
            continue;
        cpu = lc_topo_place_cpu(machine->topo, numbers[i]);
        err = cpu < 0 ? cpu : lc_topo_set(machine->topo, cpu, "affinity", mask);
    }
    return err;
}

static int fill_cpus(struct machine *machine)
{
    char cpuinfo[8192];
    int err = 0;

    (void)lc_root_text(&machine->root, cpuinfo, sizeof(cpuinfo), "proc/cpuinfo");
    for (int at = machine->topo->nodes[0].child; at >= 0 && !err;
         at = machine->topo->nodes[at].next)
        err = fill_cpu(machine, at, cpuinfo);
    return err;
}

int lc_topo_read_sysfs(struct lc_topo *topo, const char *path, bool driver)
{
    struct machine machine = { .topo = topo };
    int err = lc_root_open(&machine.root, path);

    topo->format = LC_TOPO_SYSFS;
    if (err)
        return lc_topo_fail(topo, -err, 0, "%s", strerror(-err));
    if (!lc_root_has(&machine.root, "sys/devices"))
        err = lc_topo_fail(topo, ENOENT, 0, "no sys/devices below this folder");
    if (!err)
        err = read_cpus(&machine);
    if (!err)
        err = read_ports(&machine, "infiniband", &machine.infiniband);
    if (!err)
        err = read_ports(&machine, "net", &machine.ethernet);
    if (!err)
        err = read_functions(&machine);
    if (!err && driver)
        err = lc_topo_read_nvml(topo);
    if (!err)
        err = read_virtual(&machine);
    if (!err)
        err = fill_cpus(&machine);
    free(machine.infiniband.list);
    free(machine.ethernet.list);
    lc_root_close(&machine.root);
    return err;
}
