/* SPDX-License-Identifier: Apache-2.0
 *
 * A tuner plugin (NCCL_TUNER_PLUGIN, a path), used as NCCL uses one of version 5. What it chooses does not change how the
 * rig moves data, but ranks that choose differently hang with NCCL: here that is a failed check. */
#include "plugin/tuner/abi.h"
#include "tests/rig/nccl_internal.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>

enum {
    ALGORITHMS = 7,
    PROTOCOLS = 3,
};

/* Written once, kept for good, as NCCL does by a mistake of its own. */
static const struct lc_nccl_tuner_v5 *plugin;

static void load(void)
{
    const char *path = getenv("NCCL_TUNER_PLUGIN");
    void *lib = path && *path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;

    plugin = lib ? dlsym(lib, "ncclTunerPlugin_v5") : NULL;
    if (path && *path && !plugin)
        lcrig_fail("NCCL_TUNER_PLUGIN=%s: %s", path, dlerror());
}

static void drop_line(enum lc_nccl_log_level level, unsigned long flags, const char *file, int line,
                      const char *format, ...)
{
}

__attribute__((visibility("default"))) unsigned lcrig_tuned_calls(ncclComm_t comm);

unsigned lcrig_tuned_calls(ncclComm_t comm)
{
    return comm->tuned_calls;
}

static size_t count_nodes(ncclComm_t comm)
{
    const struct rig_slot *slots = comm->clique->shared->slot;
    size_t nodes = 0;

    for (int r = 0; r < comm->n; r++) {
        int first = 0;

        while (slots[first].host != slots[r].host)
            first++;
        nodes += first == r;
    }
    return nodes;
}

void rig_tuner_open(ncclComm_t comm)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct lc_nccl_tuner_constants_v5 constants = { 0 };
    struct lc_nccl_nvl_domains domains = { 1, comm->n, comm->n };

    pthread_once(&once, load);
    if (plugin && plugin->init(&comm->tuner, 1, (size_t)comm->n, count_nodes(comm), drop_line,
                               &domains, &constants) != LC_NCCL_SUCCESS)
        lcrig_fail("the tuner's init failed");
    comm->is_tuned = plugin != NULL;
}

void rig_tuner_close(ncclComm_t comm)
{
    if (comm->is_tuned && plugin->finalize(comm->tuner) != LC_NCCL_SUCCESS)
        lcrig_fail("the tuner's finalize failed");
    comm->is_tuned = false;
}

/* NCCL's number of a collective that it tunes, or -1. */
static int function_of(enum rig_kind kind)
{
    switch (kind) {
    case RIG_BROADCAST: return 0;
    case RIG_REDUCE: return 1;
    case RIG_ALL_GATHER: return 2;
    case RIG_REDUCE_SCATTER: return 3;
    case RIG_ALL_REDUCE: return 4;
    default: return -1;
    }
}

void rig_tuner_take_time(ncclComm_t comm, uint32_t choice)
{
    unsigned algorithm = 1u << (choice >> 6) / PROTOCOLS;
    bool is_first = !(atomic_fetch_or_explicit(&comm->used, algorithm, memory_order_relaxed) &
                      algorithm);
    bool is_slow = choice >> 6 != lcrig_env("LCRIG_FAST_WAY", 0, ALGORITHMS * PROTOCOLS);
    unsigned long long us = (is_slow ? lcrig_env("LCRIG_SLOW_US", 0, 1000000) : 0) +
                            (is_first ? lcrig_env("LCRIG_CONNECT_US", 0, 1000000) : 0);
    const struct timespec time = { .tv_sec = (time_t)(us / 1000000),
                                   .tv_nsec = (long)(us % 1000000) * 1000 };

    if (us && plugin)
        nanosleep(&time, NULL);
}

uint32_t rig_tuner_choice(const struct rig_op *op)
{
    size_t bytes = op->count * rig_type_size(op->type);
    float costs[ALGORITHMS][PROTOCOLS];
    int function = function_of(op->kind), channels = 0, best = 0;

    if (function < 0 || !op->comm->is_tuned || op->comm->n < 2 || op->count == 0)
        return 0;
    if (op->kind == RIG_ALL_GATHER || op->kind == RIG_REDUCE_SCATTER)
        bytes *= (size_t)op->comm->n;
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++)
        costs[i / PROTOCOLS][i % PROTOCOLS] = i / PROTOCOLS < 2 ? 5 + (float)i : -1;
    if (plugin->getCollInfo(op->comm->tuner, function, bytes, 1, (float **)costs, ALGORITHMS,
                            PROTOCOLS, 0, &channels) != LC_NCCL_SUCCESS)
        lcrig_fail("the tuner's answer to %s failed", rig_kind_name((int)op->kind));
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++) {
        float cost = costs[i / PROTOCOLS][i % PROTOCOLS],
              least = costs[best / PROTOCOLS][best % PROTOCOLS];

        if (i / PROTOCOLS >= 2 && cost != -1)
            lcrig_fail("the tuner has changed an entry that is ruled out");
        if (cost >= 0 && (least < 0 || cost < least))
            best = i;
    }
    op->comm->tuned_calls += best != 0;
    return (uint32_t)best << 6 | ((uint32_t)channels & 63);
}
