/* SPDX-License-Identifier: Apache-2.0
 *
 * Ports of RDMA devices, and the devices that NCCL sees: one port each, or several that a connection is striped over. */
#ifndef LC_PLUGIN_NET_VERBS_DEVICE_H
#define LC_PLUGIN_NET_VERBS_DEVICE_H

#include "plugin/net/transport.h"
#include "plugin/net/verbs/ibv.h"
#include "plugin/net/verbs/wire.h"

#include <pthread.h>

struct lc_verbs_region; /* region.c */

/* An opened RDMA device. Made at discovery and kept for the life of the process. */
struct lc_verbs_nic {
    struct ibv_context *context;
    struct ibv_pd *pd;
    char name[IBV_SYSFS_NAME_MAX];
    char sysfs[IBV_SYSFS_PATH_MAX]; /* its folder under /sys/class/infiniband */
    char *pci_path;                 /* owned; NULL: not a PCI device */
    uint64_t guid;
    int max_wr;
    bool gpu_memory; /* a module lets it reach the GPU's memory by address */
    bool dmabuf;
    pthread_mutex_t lock; /* guards `regions` */
    struct lc_verbs_region *regions;
};

/* Does not change after discovery; what can change is asked for (lc_verbs_port_look). */
struct lc_verbs_port {
    struct lc_verbs_nic *nic;
    uint8_t number;
    bool ethernet;
    char name[IBV_SYSFS_NAME_MAX + 8]; /* "mlx5_0:1" */
    int speed_mbps;
    uint32_t max_msg; /* bytes of one work request */
};

struct lc_verbs_device {
    char name[128]; /* of its ports, '+' between them */
    int n_ports;
    struct lc_verbs_port *ports[LC_VERBS_PATHS];
    int speed_mbps;
};

/* A port as it is now. */
struct lc_verbs_sight {
    uint16_t lid;
    uint8_t gid_index;
    union ibv_gid
        gid; /* RoCE: found by what it is and not by its index, which differs between machines */
    enum ibv_mtu mtu;
};

/* Finds the devices at the first call, whatever it finds. */
int lc_verbs_devices(void);
struct lc_verbs_device *lc_verbs_device(int dev); /* NULL: no such device */
void lc_verbs_devices_forget(
    void); /* in the child of a fork: closes its copies of their descriptors */
void lc_verbs_devices_close(void); /* only when nothing of them is in use any more */

/* False if the port is down or has no usable address. `sight` is what was last seen, or zeros, and becomes what is seen
 * now; the address stays the same while the port has it, which also takes no descriptor to find out. */
bool lc_verbs_port_look(const struct lc_verbs_port *port, struct lc_verbs_sight *sight);

#endif
