/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/verbs/device.h"

#include "common/config.h"
#include "common/input.h"
#include "common/log.h"
#include "plugin/net/tcp/device.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_PORTS  64
#define MAX_GIDS   256
#define KNOWN_MBPS 10000 /* taken for the speed of a port that says something unheard of */

static pthread_once_t found = PTHREAD_ONCE_INIT;
static struct lc_verbs_device devices[MAX_PORTS]; /* these are written by `find`, then constant */
static int n_devices;
static struct lc_verbs_nic *nics[MAX_PORTS]; /* likewise */
static int n_nics;

static bool read_file(char *text, size_t size, const char *folder, const char *name)
{
    char path[PATH_MAX];
    ssize_t got;
    int fd;

    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    fd = lc_input_open(AT_FDCWD, path, 0);
    if (fd < 0)
        return false;
    got = read(fd, text, size - 1);
    close(fd);
    if (got <= 0)
        return false;
    text[got] = '\0';
    text[strcspn(text, "\n")] = '\0';
    return true;
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* Which ports NCCL_IB_HCA leaves: "mlx5_0:1,mlx5_3" by prefix, '=' in front for whole names, '^' for all but those. A
 * device that is made of software alone is slower than TCP and is taken only when it is named. */
static bool wanted(const struct lc_verbs_nic *nic, unsigned port)
{
    const char *list = lc_environment_get("NCCL_IB_HCA");
    bool software = strstr(nic->sysfs, "/virtual/") != NULL;
    bool all_but, whole, match = false;

    if (!list || !*list)
        return !software;
    all_but = *list == '^';
    list += all_but;
    whole = *list == '=';
    list += whole;
    while (*list) {
        size_t entry = strcspn(list, ",");
        size_t n = strcspn(list, ":,");

        if (n && strncmp(nic->name, list, n) == 0 && (!whole || nic->name[n] == '\0') &&
            (list[n] != ':' || strtoul(list + n + 1, NULL, 10) == port))
            match = true;
        list += entry + (list[entry] == ',');
    }
    return all_but ? !match && !software : match;
}

static int link_mbps(const struct ibv_port_attr *attr)
{
    static const int lanes[] = { 1, 4, 8, 12, 2 };                    /* by bit */
    static const int speeds[] = { 2500,  5000,  10000,  10000, 14000, /* by bit */
                                  25000, 50000, 100000, 200000 };
    int width = attr->active_width ? __builtin_ctz(attr->active_width) : 99;
    int speed = attr->active_speed ? __builtin_ctz(attr->active_speed) : 99;

    if (width >= (int)(sizeof(lanes) / sizeof(*lanes)) ||
        speed >= (int)(sizeof(speeds) / sizeof(*speeds)))
        return KNOWN_MBPS;
    return lanes[width] * speeds[speed];
}

static bool query_port(const struct lc_verbs_port *port, struct ibv_port_attr *out)
{
    memset(out, 0, sizeof(*out));
    return lc_ibv.ibv_query_port(port->nic->context, port->number,
                                 (struct _compat_ibv_port_attr *)out) == 0;
}

/* Higher is better, 0 is unusable. RoCE v1 cannot be routed and is not offered by newer cards. */
static int rank_gid(const struct lc_verbs_port *port, int index, const union ibv_gid *gid)
{
    static const uint8_t none[16];
    static const uint8_t v4[12] = { [10] = 0xff, [11] = 0xff };
    char name[64], type[32];
    int rank;

    if (memcmp(gid->raw, none, 16) == 0)
        return 0;
    if (memcmp(gid->raw, v4, 12) == 0)
        rank = 3;
    else if (gid->raw[0] == 0xfe && (gid->raw[1] & 0xc0) == 0x80)
        rank = 1;
    else
        rank = 2;
    (void)snprintf(name, sizeof(name), "ports/%d/gid_attrs/types/%d", port->number, index);
    if (!read_file(type, sizeof(type), port->nic->sysfs, name))
        return 0;
    return strcmp(type, "RoCE v2") == 0 ? rank + 3 : rank;
}

static bool choose_gid(const struct lc_verbs_port *port, int n, struct lc_verbs_sight *out)
{
    const char *fixed = lc_environment_get("NCCL_IB_GID_INDEX");
    static const uint8_t none[16];
    union ibv_gid gid;
    int best = 0;

    if (fixed && *fixed && strtol(fixed, NULL, 10) >= 0) {
        out->gid_index = (uint8_t)strtol(fixed, NULL, 10);
        return lc_ibv.ibv_query_gid(port->nic->context, port->number, out->gid_index, &out->gid) ==
               0;
    }
    if (memcmp(out->gid.raw, none, sizeof(none)) != 0 &&
        !lc_ibv.ibv_query_gid(port->nic->context, port->number, out->gid_index, &gid) &&
        memcmp(gid.raw, out->gid.raw, sizeof(gid.raw)) == 0)
        return true;
    for (int i = 0; i < n && i < MAX_GIDS; i++) {
        int rank;

        if (lc_ibv.ibv_query_gid(port->nic->context, port->number, i, &gid))
            continue;
        rank = rank_gid(port, i, &gid);
        if (rank > best) {
            best = rank;
            out->gid = gid;
            out->gid_index = (uint8_t)i;
        }
    }
    return best > 0;
}

bool lc_verbs_port_look(const struct lc_verbs_port *port, struct lc_verbs_sight *sight)
{
    struct ibv_port_attr attr;

    if (!query_port(port, &attr) || attr.state != IBV_PORT_ACTIVE)
        return false;
    sight->lid = attr.lid;
    sight->mtu = attr.active_mtu;
    if (port->ethernet)
        return choose_gid(port, attr.gid_tbl_len, sight);
    return lc_ibv.ibv_query_gid(port->nic->context, port->number, 0, &sight->gid) == 0;
}

/* A call with a descriptor that cannot be one says whether the kernel and the driver know such memory. */
static bool probe_dmabuf(struct lc_verbs_nic *nic)
{
    if (!lc_ibv.ibv_reg_dmabuf_mr)
        return false;
    errno = 0;
    (void)lc_ibv.ibv_reg_dmabuf_mr(nic->pd, 0, 0, 0, -1, 0);
    return errno == EBADF;
}

static bool probe_gpu_memory(void)
{
    return exists("/sys/module/nvidia_peermem/version") ||
           exists("/sys/kernel/mm/memory_peers/nv_mem/version") ||
           exists("/sys/kernel/mm/memory_peers/nv_mem_nc/version");
}

static struct lc_verbs_nic *open_nic(struct ibv_device *device)
{
    struct lc_verbs_nic *nic = calloc(1, sizeof(*nic));
    struct ibv_device_attr attr;
    char link[IBV_SYSFS_PATH_MAX + 16];
    char *real;

    if (!nic)
        return NULL;
    nic->context = lc_ibv.ibv_open_device(device);
    if (!nic->context) {
        lc_info("%s cannot be opened: %s", device->name, strerror(errno));
        goto free_nic;
    }
    nic->pd = lc_ibv.ibv_alloc_pd(nic->context);
    if (!nic->pd || lc_ibv.ibv_query_device(nic->context, &attr))
        goto close_device;
    (void)snprintf(nic->name, sizeof(nic->name), "%s", device->name);
    real = realpath(device->ibdev_path, NULL);
    (void)snprintf(nic->sysfs, sizeof(nic->sysfs), "%s", real ? real : device->ibdev_path);
    free(real);
    (void)snprintf(link, sizeof(link), "%s/device", nic->sysfs);
    nic->pci_path = realpath(link, NULL);
    nic->guid = be64toh(lc_ibv.ibv_get_device_guid(device));
    nic->max_wr = attr.max_qp_wr;
    nic->dmabuf = probe_dmabuf(nic);
    nic->gpu_memory = probe_gpu_memory();
    (void)pthread_mutex_init(&nic->lock, NULL);
    return nic;

close_device:
    if (nic->pd)
        lc_ibv.ibv_dealloc_pd(nic->pd);
    lc_ibv.ibv_close_device(nic->context);
free_nic:
    free(nic);
    return NULL;
}

static void close_nic(struct lc_verbs_nic *nic)
{
    lc_ibv.ibv_dealloc_pd(nic->pd);
    lc_ibv.ibv_close_device(nic->context);
    (void)pthread_mutex_destroy(&nic->lock);
    free(nic->pci_path);
    free(nic);
}

/* NULL: the port is not there, down or not wanted. */
static struct lc_verbs_port *open_port(struct lc_verbs_nic *nic, unsigned number)
{
    struct lc_verbs_port *port = calloc(1, sizeof(*port));
    struct ibv_port_attr attr;

    if (!port)
        return NULL;
    port->nic = nic;
    port->number = (uint8_t)number;
    if (!query_port(port, &attr) || attr.state != IBV_PORT_ACTIVE || !wanted(nic, number)) {
        free(port);
        return NULL;
    }
    port->ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    port->speed_mbps = link_mbps(&attr);
    port->max_msg = attr.max_msg_sz;
    (void)snprintf(port->name, sizeof(port->name), "%s:%u", nic->name, number);
    return port;
}

/* True if a group of NCCL_NET_FORCE_MERGE ("mlx5_0,mlx5_1;mlx5_2:1,mlx5_3") has both. */
static bool merge_by_user(const char *rule, const struct lc_verbs_port *a,
                          const struct lc_verbs_port *b)
{
    while (*rule) {
        size_t group = strcspn(rule, ";");
        bool has_a = false, has_b = false;

        for (size_t at = 0; at < group;) {
            size_t n = strcspn(rule + at, ",;");
            size_t name = strcspn(rule + at, ":,;");
            unsigned long number = rule[at + name] == ':' ? strtoul(rule + at + name + 1, NULL, 10)
                                                          : 0;

            has_a |= name == strlen(a->nic->name) && !strncmp(rule + at, a->nic->name, name) &&
                     (!number || number == a->number);
            has_b |= name == strlen(b->nic->name) && !strncmp(rule + at, b->nic->name, name) &&
                     (!number || number == b->number);
            at += n + 1;
        }
        if (has_a && has_b)
            return true;
        rule += group + (rule[group] == ';');
    }
    return false;
}

/* Ports of one card share its PCI slot and are one device, as in NCCL; only the function differs. */
static bool merge(const struct lc_verbs_port *a, const struct lc_verbs_port *b)
{
    const char *rule = lc_environment_get("NCCL_NET_FORCE_MERGE");
    const char *x = a->nic->pci_path, *y = b->nic->pci_path;
    size_t n;

    if (rule && *rule)
        return merge_by_user(rule, a, b);
    if (!x || !y || a->speed_mbps != b->speed_mbps)
        return false;
    n = strlen(x);
    return n == strlen(y) && n > 2 && strncmp(x, y, n - 1) == 0;
}

static void add_port(struct lc_verbs_port *port)
{
    struct lc_verbs_device *dev = NULL;
    size_t used;

    for (int i = 0; i < n_devices && !dev; i++)
        if (devices[i].n_ports < LC_VERBS_PATHS && merge(devices[i].ports[0], port))
            dev = &devices[i];
    if (!dev && n_devices == MAX_PORTS)
        return;
    if (!dev)
        dev = &devices[n_devices++];
    used = strlen(dev->name);
    (void)snprintf(dev->name + used, sizeof(dev->name) - used, "%s%s", used ? "+" : "", port->name);
    dev->ports[dev->n_ports++] = port;
    dev->speed_mbps += port->speed_mbps;
}

static void find(void)
{
    const char *off = lc_environment_get("NCCL_IB_DISABLE");
    struct ibv_device **list;
    int n = 0;

    if ((off && strtol(off, NULL, 10)) || lc_ibv_open())
        return;
    /* Without this a child's copy-on-write could take pages away from the parent's transfers; new kernels need nothing,
     * and a refusal means that somebody has registered memory already, and has decided. */
    (void)lc_ibv.ibv_fork_init();
    list = lc_ibv.ibv_get_device_list(&n);
    for (int i = 0; list && i < n; i++) {
        struct lc_verbs_nic *nic;
        struct ibv_device_attr attr;
        bool used = false;

        if (list[i]->transport_type != IBV_TRANSPORT_IB) /* iWARP needs another way to connect */
            continue;
        nic = open_nic(list[i]);
        if (!nic)
            continue;
        for (unsigned number = 1;
             !lc_ibv.ibv_query_device(nic->context, &attr) && number <= attr.phys_port_cnt;
             number++) {
            struct lc_verbs_port *port = open_port(nic, number);

            if (port)
                add_port(port);
            used |= port != NULL;
        }
        if (used && n_nics < MAX_PORTS)
            nics[n_nics++] = nic;
        else if (!used)
            close_nic(nic);
    }
    if (list)
        lc_ibv.ibv_free_device_list(list);
}

int lc_verbs_devices(void)
{
    (void)pthread_once(&found, find);
    return n_devices;
}

struct lc_verbs_device *lc_verbs_device(int dev)
{
    return dev >= 0 && dev < n_devices ? &devices[dev] : NULL;
}

void lc_verbs_devices_forget(void)
{
    for (int i = 0; i < n_nics && nics[i]; i++) {
        close(nics[i]->context->cmd_fd);
        close(nics[i]->context->async_fd);
    }
}

void lc_verbs_devices_close(void)
{
    for (int i = 0; i < n_devices; i++)
        for (int k = 0; k < devices[i].n_ports; k++)
            free(devices[i].ports[k]);
    for (int i = 0; i < n_nics; i++)
        close_nic(nics[i]);
    n_devices = n_nics = 0;
}
