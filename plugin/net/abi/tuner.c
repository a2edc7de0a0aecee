/* SPDX-License-Identifier: Apache-2.0
 *
 * The tuner that NCCL finds in its network's library when NCCL_TUNER_PLUGIN names no other. It says how many channels a
 * collective uses, and leaves algorithm and protocol to NCCL. All ranks have this library, or they would not be connected, but
 * NCCL asks this tuner on those alone that have loaded no other: loongcomm's other tuners answer as it does where they have no
 * rule, and with one of someone else, or none, NCCL_TUNER_PLUGIN has to be alike on all ranks. So do the variables that are
 * looked at here: NCCL's own about channels, which ranks that differ in would hang by without us, and the one which
 * `loongcomm run` sets beside them. */
#include "common/config.h"
#include "common/log.h"
#include "plugin/net/abi/adapters.h"
#include "plugin/net/abi/channels.h"
#include "plugin/net/settings.h"
#include "plugin/tuner/abi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NAME   "loongcomm-net"

static void say(void)
{
    lc_info("small collectives use one channel (NCCL_TUNER_PLUGIN=none: as NCCL likes)");
}

/* A context is no pointer, but two numbers; NULL: the communicator is left alone. */
static void *pack(size_t ranks, bool ours)
{
    return (void *)(uintptr_t)(2 * ranks + ours);
}

/* What NCCL reads from its file is in the environment, too, by then. */
static bool is_set(const char *name)
{
    const char *value = lc_environment_get(name);

    return value && *value;
}

static bool is_number(const char *name, size_t number)
{
    const char *value = lc_environment_get(name);
    char text[24];

    (void)snprintf(text, sizeof(text), "%zu", number);
    return value && strcmp(value, text) == 0;
}

/* Channels by the user's will, who wants them for small collectives, too; *ours: by that of `loongcomm run`. */
static bool are_the_users(bool *ours)
{
    static const char *const names[] = { "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS",
                                         "NCCL_MAX_NCHANNELS", "NCCL_MIN_NRINGS",
                                         "NCCL_MAX_NRINGS" };
    size_t given = lc_net_settings()->net_ctas;

    *ours = given > 0 && is_number("NCCL_MIN_CTAS", given);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        if (is_set(names[i]))
            return true;
    }
    return is_set("NCCL_MIN_CTAS") && !*ours;
}

/* The network's log is in place: it was begun before. */
static enum lc_nccl_result init(uint64_t comm_id, size_t ranks, size_t nodes, void **context)
{
    static pthread_once_t said = PTHREAD_ONCE_INIT;
    bool ours = false;
    bool speaks = ranks == nodes && ranks > 1 && ranks < SIZE_MAX / 2 &&
                  lc_net_is_over_tcp(comm_id) && !are_the_users(&ours);

    if (speaks)
        pthread_once(&said, say);
    *context = speaks ? pack(ranks, ours) : NULL;
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result init_v2(size_t ranks, size_t nodes, lc_nccl_logger *log, void **context)
{
    return init(0, ranks, nodes, context);
}

static enum lc_nccl_result init_v5(void **context, uint64_t comm_id, size_t ranks, size_t nodes,
                                   lc_nccl_logger *log, struct lc_nccl_nvl_domains *domains,
                                   struct lc_nccl_tuner_constants_v5 *constants)
{
    return init(comm_id, ranks, nodes, context);
}

/* NCCL presets *channels with what means its own choice. */
static enum lc_nccl_result get(void *context, int op, size_t bytes, int *channels)
{
    size_t ranks = (size_t)(uintptr_t)context / 2;
    int n = lc_net_channels(op, ranks, ranks, bytes, (uintptr_t)context & 1);

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
