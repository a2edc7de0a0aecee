/* SPDX-License-Identifier: Apache-2.0
 *
 * The tuner that NCCL finds in its network's library when NCCL_TUNER_PLUGIN names no other. It says how many channels a
 * collective uses, and leaves algorithm and protocol to NCCL. All ranks have this library, or they would not be connected,
 * so all say the same. A context is no pointer: it is the number of ranks, or NULL for communicators that are left alone. */
#include "common/log.h"
#include "plugin/net/abi/adapters.h"
#include "plugin/net/abi/channels.h"
#include "plugin/tuner/abi.h"

#include <pthread.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define NAME   "loongcomm-net"

static void say(void)
{
    lc_info("channels of a collective go by its size (NCCL_TUNER_PLUGIN=none: as NCCL likes)");
}

/* The network's log is in place: it was begun before. */
static enum lc_nccl_result init_v2(size_t ranks, size_t nodes, lc_nccl_logger *log, void **context)
{
    static pthread_once_t said = PTHREAD_ONCE_INIT;
    bool ours = ranks == nodes && ranks > 1 && lc_net_is_over_tcp();

    if (ours)
        pthread_once(&said, say);
    *context = (void *)(uintptr_t)(ours ? ranks : 0);
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result init_v5(void **context, uint64_t comm_id, size_t ranks, size_t nodes,
                                   lc_nccl_logger *log, struct lc_nccl_nvl_domains *domains,
                                   struct lc_nccl_tuner_constants_v5 *constants)
{
    return init_v2(ranks, nodes, log, context);
}

/* NCCL presets *channels with what means its own choice. */
static enum lc_nccl_result get(void *context, int op, size_t bytes, int *channels)
{
    size_t ranks = (size_t)(uintptr_t)context;
    int n = lc_net_channels(op, ranks, ranks, bytes);

    if (n)
        *channels = n;
    return LC_NCCL_SUCCESS;
}

/* NCCL 2.21 takes the number as it is; later ones keep to what the communicator has. */
static enum lc_nccl_result get_v2(void *context, int op, size_t bytes, int collnet, int nvls,
                                  int pipe_ops, int *algorithm, int *protocol, int *channels)
{
    int n = 0;

    (void)get(context, op, bytes, &n);
    if (n == 1)
        *channels = 1;
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result get_v3(void *context, int op, size_t bytes, int pipe_ops, float **table,
                                  int algorithms, int protocols, int *channels)
{
    return get(context, op, bytes, channels);
}

static enum lc_nccl_result get_v4(void *context, int op, size_t bytes, int pipe_ops, float **table,
                                  int algorithms, int protocols, int registered, int *channels)
{
    return get(context, op, bytes, channels);
}

static enum lc_nccl_result end(void *context)
{
    return LC_NCCL_SUCCESS;
}

EXPORT const struct lc_nccl_tuner_v2 ncclTunerPlugin_v2 = { NAME, init_v2, get_v2, end };
EXPORT const struct lc_nccl_tuner_v3 ncclTunerPlugin_v3 = { NAME, init_v2, get_v3, end };
EXPORT const struct lc_nccl_tuner_v4 ncclTunerPlugin_v4 = { NAME, init_v2, get_v4, end };
EXPORT const struct lc_nccl_tuner_v5 ncclTunerPlugin_v5 = { NAME, init_v5, get_v4, end };
EXPORT const struct lc_nccl_tuner_v6 ncclTunerPlugin_v6 = { NAME, init_v5, get_v4, end, NULL };
