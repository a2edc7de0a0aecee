/* SPDX-License-Identifier: Apache-2.0
 *
 * What only the driver knows of its GPUs: number, compute capability, NVLinks. NVML is opened at run time; its ABI is
 * stable, so the little that is needed of it is declared here and no header of it has to be there. */
#include "topology/devices.h"
#include "topology/root.h"

#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_GPUS        64
#define MAX_LINKS       64
#define CAP_P2P         0
#define FIELD_LINK      165 /* NVML_FI_DEV_NVLINK_GET_STATE */
#define FIELD_C2C_COUNT 170
#define FIELD_C2C_STATE 171
#define FIELD_C2C_MAX   172
#define HIDDEN          "fffffff:ffff:ff" /* NCCL's word for a switch that a virtual machine does not see */

struct pci_info { /* nvmlPciInfo_t since version 3 */
    char legacy[16];
    unsigned domain, bus, device, ids, subsystem_ids;
    char busid[32];
};

struct field_value { /* nvmlFieldValue_t */
    unsigned field, scope;
    long long when, latency;
    int type, result;
    union {
        double d;
        unsigned long long ull;
        unsigned ui;
    } value;
};

struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *count);
    int (*handle)(unsigned index, void **device);
    int (*pci_info)(void *device, struct pci_info *info);
    int (*capability)(void *device, int *major, int *minor);
    int (*link_capability)(void *device, unsigned link, int capability, unsigned *value);
    int (*link_state)(void *device, unsigned link, int *state);
    int (*link_remote)(void *device, unsigned link, struct pci_info *info);
    int (*fields)(void *device, int count, struct field_value *values);
};

static int resolve(struct nvml *nvml, void *handle)
{
    const struct {
        const char *name;
        void *slot;
    } symbols[] = {
        {"nvmlInit_v2",                          &nvml->init           },
        { "nvmlShutdown",                        &nvml->shutdown       },
        { "nvmlDeviceGetCount_v2",               &nvml->count          },
        { "nvmlDeviceGetHandleByIndex_v2",       &nvml->handle         },
        { "nvmlDeviceGetPciInfo_v3",             &nvml->pci_info       },
        { "nvmlDeviceGetCudaComputeCapability",  &nvml->capability     },
        { "nvmlDeviceGetNvLinkCapability",       &nvml->link_capability},
        { "nvmlDeviceGetNvLinkState",            &nvml->link_state     },
        { "nvmlDeviceGetNvLinkRemotePciInfo_v2", &nvml->link_remote    },
        { "nvmlDeviceGetFieldValues",            &nvml->fields         },
    };

    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *found = dlsym(handle, symbols[i].name);

        if (!found)
            return -ENOENT;
        memcpy(symbols[i].slot, &found, sizeof(found));
    }
    return 0;
}

/* NVML writes 8 digits of domain and capitals; sysfs 4 and small letters where 4 suffice. */
static void short_busid(const struct pci_info *info, char *out, size_t size)
{
    const char *from = info->busid;

    if (strnlen(info->busid, sizeof(info->busid)) == sizeof(info->busid) || !*from) {
        (void)snprintf(out, size, HIDDEN);
        return;
    }
    if (strlen(from) == 16 && strncmp(from, "0000", 4) == 0)
        from += 4;
    (void)snprintf(out, size, "%s", from);
    for (char *c = out; *c; c++) {
        if (!isprint((unsigned char)*c)) {
            (void)snprintf(out, size, HIDDEN);
            return;
        }
        *c = (char)tolower((unsigned char)*c);
    }
}

static unsigned field(const struct nvml *nvml, void *device, unsigned id, unsigned scope)
{
    struct field_value value = { .field = id, .scope = scope };

    return nvml->fields(device, 1, &value) == 0 && value.result == 0 ? value.value.ui : 0;
}

static bool is_up(const struct nvml *nvml, void *device, unsigned link, int sm)
{
    unsigned p2p = 0;
    int state = 0;

    if (nvml->link_capability(device, link, CAP_P2P, &p2p) != 0 || !p2p)
        return false;
    if (sm >= 90)
        return field(nvml, device, FIELD_LINK, link) == 1;
    return nvml->link_state(device, link, &state) == 0 && state == 1;
}

static int find_pci(const struct lc_topo *topo, const char *busid)
{
    for (int i = lc_topo_next(topo, LC_TOPO_PCI, -1); i >= 0;
         i = lc_topo_next(topo, LC_TOPO_PCI, i)) {
        const char *have = lc_topo_attribute(topo, i, "busid");

        if (have && strcmp(have, busid) == 0)
            return i;
    }
    return -1;
}

/* The class of what a link leads to; what is not visible here is a switch, as NCCL takes it. */
static void class_of(const char *busid, char *out, size_t size)
{
    struct lc_root root;

    *out = '\0';
    if (lc_root_open(&root, "/") == 0) {
        (void)lc_root_text(&root, out, size, "sys/bus/pci/devices/%s/class", busid);
        lc_root_close(&root);
    }
    if (strlen(out) != strlen("0x068000") || out[2 + strspn(out + 2, "0123456789abcdef")])
        (void)snprintf(out, size, "0x068000");
}

static int add_link(struct lc_topo *topo, int gpu, const char *target)
{
    int link = lc_topo_find_child(topo, gpu, LC_TOPO_NVLINK, "target", target);
    int count = 0;
    char class[16];
    int err = 0;

    if (link >= 0) {
        count = atoi(lc_topo_attribute(topo, link, "count"));
    } else {
        link = lc_topo_add(topo, gpu, LC_TOPO_NVLINK, 0);
        if (link < 0)
            return link;
        err = lc_topo_set(topo, link, "target", target);
    }
    class_of(target, class, sizeof(class));
    if (!err)
        err = lc_topo_setf(topo, link, "count", "%d", count + 1);
    return err ? err : lc_topo_set(topo, link, "tclass", class);
}

static int add_c2c(const struct nvml *nvml, void *device, struct lc_topo *topo, int gpu)
{
    unsigned links = field(nvml, device, FIELD_C2C_COUNT, 0);
    unsigned mbps = 0;
    int up = 0;
    int node;
    int err;

    for (unsigned link = 0; link < links && link < MAX_LINKS; link++) {
        if (field(nvml, device, FIELD_C2C_STATE, link) == 1) {
            mbps = field(nvml, device, FIELD_C2C_MAX, link);
            up++;
        }
    }
    if (!up)
        return 0;
    node = lc_topo_add(topo, gpu, LC_TOPO_C2C, 0);
    if (node < 0)
        return node;
    err = lc_topo_setf(topo, node, "bw", "%u", mbps);
    return err ? err : lc_topo_setf(topo, node, "count", "%d", up);
}

static int add_links(const struct nvml *nvml, void *device, struct lc_topo *topo, int gpu, int sm)
{
    int err = 0;

    for (unsigned link = 0; link < MAX_LINKS && !err; link++) {
        struct pci_info remote = { 0 };
        char busid[40];

        if (!is_up(nvml, device, link, sm) || nvml->link_remote(device, link, &remote) != 0)
            continue;
        short_busid(&remote, busid, sizeof(busid));
        err = add_link(topo, gpu, busid);
    }
    if (!err && sm >= 90)
        err = add_c2c(nvml, device, topo, gpu);
    return err;
}

/* A GPU that sysfs does not show (a container with its own /sys) hangs below no known NUMA node, as NCCL has it. */
static int gpu_node(struct lc_topo *topo, const struct pci_info *info, const char *busid)
{
    struct lc_topo_function function = { .class = 0x030200 };
    int pci = find_pci(topo, busid);

    if (pci < 0) {
        int cpu = lc_topo_place_cpu(topo, -1);

        if (cpu < 0)
            return cpu;
        (void)snprintf(function.busid, sizeof(function.busid), "%.19s", busid);
        function.vendor = info->ids & 0xffff;
        function.device = info->ids >> 16;
        function.subvendor = info->subsystem_ids & 0xffff;
        function.subdevice = info->subsystem_ids >> 16;
        pci = lc_topo_place_pci(topo, cpu, &function);
        lc_topo_remark(topo, 0, "GPU %s is known to the driver but not to /sys", busid);
    }
    return pci < 0 ? pci : lc_topo_place_child(topo, pci, LC_TOPO_GPU);
}

static int read_gpu(const struct nvml *nvml, struct lc_topo *topo, unsigned index)
{
    struct pci_info info = { 0 };
    void *device = NULL;
    char busid[40];
    int major = 0;
    int minor = 0;
    int gpu;
    int err;

    if (nvml->handle(index, &device) != 0 || nvml->pci_info(device, &info) != 0)
        return 0;
    short_busid(&info, busid, sizeof(busid));
    if (!lc_topo_is_busid(busid))
        return 0;
    gpu = gpu_node(topo, &info, busid);
    err = gpu < 0 ? gpu : lc_topo_setf(topo, gpu, "dev", "%u", index);
    if (!err && nvml->capability(device, &major, &minor) == 0)
        err = lc_topo_setf(topo, gpu, "sm", "%d", 10 * major + minor);
    return err ? err : add_links(nvml, device, topo, gpu, 10 * major + minor);
}

/* Numbers that sysfs gave in its order are taken back: the driver may show only some GPUs, in another order. */
static int forget_numbers(struct lc_topo *topo)
{
    int err = 0;

    for (int i = lc_topo_next(topo, LC_TOPO_GPU, -1); i >= 0 && !err;
         i = lc_topo_next(topo, LC_TOPO_GPU, i))
        err = lc_topo_set(topo, i, "dev", "-1");
    return err;
}

static int read_gpus(const struct nvml *nvml, struct lc_topo *topo)
{
    unsigned count = 0;
    int err = 0;

    if (nvml->count(&count) != 0)
        count = 0;
    if (count)
        err = forget_numbers(topo);
    for (unsigned i = 0; i < count && i < MAX_GPUS && !err; i++)
        err = read_gpu(nvml, topo, i);
    return err;
}

int lc_topo_read_nvml(struct lc_topo *topo)
{
    void *handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    struct nvml nvml = { 0 };
    int err = 0;

    if (!handle) {
        if (lc_topo_next(topo, LC_TOPO_GPU, -1) >= 0)
            lc_topo_remark(topo, 0, "no NVML here: NVLinks and compute capabilities are unknown");
        return 0;
    }
    if (resolve(&nvml, handle) != 0 || nvml.init() != 0) {
        lc_topo_remark(topo, 0, "NVML does not work: NVLinks and compute capabilities are unknown");
    } else {
        err = read_gpus(&nvml, topo);
        (void)nvml.shutdown();
    }
    (void)dlclose(handle);
    return err;
}
