/* SPDX-License-Identifier: Apache-2.0
 *
 * The network interfaces that NCCL's own rules (NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY, NCCL_COMM_ID) leave. */
#ifndef LC_PLUGIN_NET_TCP_DEVICE_H
#define LC_PLUGIN_NET_TCP_DEVICE_H

#include "plugin/net/tcp/wire.h"

#include <net/if.h>

struct lc_tcp_device {
    char name[IF_NAMESIZE];
    char *pci_path; /* owned; NULL: not a PCI device */
    union lc_tcp_address address;
    union lc_tcp_address mask; /* family 0: none */
    uint32_t index;            /* of the interface */
    int speed_mbps;
    uint64_t guid;
};

/* True if an interface is named by a list as in NCCL_SOCKET_IFNAME: prefixes with commas between them, each up to a
 * colon; '=' in front: whole names; '^' in front: all but those. */
bool lc_tcp_name_matches(const char *list, const char *name);

/* An array that the caller frees (lc_tcp_devices_free). 0 devices is a success and is logged once, though both
 * transports look. `speed_mbps`: what the user says, 0: what the system says. */
int lc_tcp_devices_find(int speed_mbps, struct lc_tcp_device **out, int *n_out);
void lc_tcp_devices_free(struct lc_tcp_device *devices, int n);

/* True if the address is in the network that the device is in. */
bool lc_tcp_device_reaches(const struct lc_tcp_device *device, const union lc_tcp_address *address);

/* True if the address is one of this machine's own, where packets pass no device. */
bool lc_tcp_address_is_local(const union lc_tcp_address *address);

#endif
