/* SPDX-License-Identifier: Apache-2.0
 *
 * Registered memory. The same pages are registered once per RDMA device however often they are asked for: connections
 * share a registration, and the last one to give it back ends it, so none outlives its memory. A part of them is a
 * registration of its own, for the rest may be unmapped earlier, and the device would not see what is mapped there next. */
#ifndef LC_PLUGIN_NET_VERBS_REGION_H
#define LC_PLUGIN_NET_VERBS_REGION_H

#include "plugin/net/verbs/device.h"

#include <stdatomic.h>

/* Of a connection: one registration for each of the device's ports. */
struct lc_net_mr {
    int n;
    struct lc_verbs_nic *nics[LC_VERBS_PATHS];
    struct lc_verbs_region *regions[LC_VERBS_PATHS];
    struct ibv_mr *mrs[LC_VERBS_PATHS]; /* of the regions */
    /* Open requests, of any connection, that name it. Changed with their connection's lock held; whoever reads 0 may free
     * it, so the last one lets go with release and is done with it then. */
    atomic_int users;
};

/* `fd` is -1, or a DMA-BUF with `offset`. 0, or -errno after saying why. */
int lc_verbs_mr_open(const struct lc_verbs_device *dev, void *data, size_t size, int fd,
                     uint64_t offset, struct lc_net_mr **out);
int lc_verbs_mr_close(struct lc_net_mr *mr); /* NULL is allowed */

#endif
