/* SPDX-License-Identifier: Apache-2.0
 *
 * A network plugin with ports that are not there: LC_NET_NAMES lists their names. NCCL counts them, and finds ways to
 * them by the topology file it was given; nothing can be sent. For jobs that end when a communicator is made. */
#include "plugin/net/abi/abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PORTS 64

static char names[MAX_PORTS][64]; /* written by init, under NCCL's lock, then only read */
static int count;

static enum lc_nccl_result init(lc_nccl_logger *log)
{
    const char *at = getenv("LC_NET_NAMES");

    (void)log;
    for (count = 0; at && *at && count < MAX_PORTS; count++) {
        size_t length = strcspn(at, ",");

        (void)snprintf(names[count], sizeof(names[count]), "%.*s", (int)length, at);
        at += length;
        at += *at == ',';
    }
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result devices(int *out)
{
    *out = count;
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result properties(int dev, struct lc_nccl_props_v8 *out)
{
    if (dev < 0 || dev >= count)
        return LC_NCCL_INVALID_ARGUMENT;
    *out = (struct lc_nccl_props_v8){
        .name = names[dev],
        .guid = (uint64_t)dev + 1,
        .ptrSupport = 3, /* host and GPU memory */
        .speed = 100000,
        .port = 1,
        .maxComms = 1024,
        .maxRecvs = 1,
    };
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result listen_nowhere(int dev, void *handle, void **comm)
{
    (void)dev;
    (void)handle;
    (void)comm;
    return LC_NCCL_SYSTEM_ERROR;
}

/* What cannot be asked for without a listener is left out. */
__attribute__((visibility("default"))) extern const struct lc_nccl_net_v8 ncclNetPlugin_v8;
const struct lc_nccl_net_v8 ncclNetPlugin_v8 = {
    .name = "named",
    .init = init,
    .devices = devices,
    .getProperties = properties,
    .listen = listen_nowhere,
};
