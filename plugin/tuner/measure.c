/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin for measuring: see measure.h. Without a word from loongcomm-bench it leaves every choice to NCCL. */
#include "plugin/tuner/measure.h"

#include "common/config.h"
#include "common/profile.h"
#include "plugin/tuner/export.h"
#include "plugin/tuner/net_tuner.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PRODUCT "libnccl-tuner-loongcomm.so"

LC_TUNER_EXPORT extern struct lc_measure loongcomm_measure_v1;
struct lc_measure loongcomm_measure_v1 = { .version = 1 };

/* The real plugin, used as NCCL uses it, and whether it has a profile that it can read. Written once by load_product, constant
 * afterwards; it stays loaded. */
static const struct lc_nccl_tuner_v5 *product;
static bool has_profile;

/* Only where no agreement is asked for, as loongcomm-bench has it: this rank must not stand up for rules in any other process,
 * where it does not follow them. */
static void load_product(void)
{
    const char *trust = lc_environment_get("LOONGCOMM_PROFILE_TRUST");
    const char *name = lc_environment_get("LOONGCOMM_PROFILE");
    struct lc_profile *profile;
    char path[PATH_MAX];
    Dl_info info;
    const char *slash;
    void *library;

    if (!trust || strcmp(trust, "yes") != 0 || !dladdr(&loongcomm_measure_v1, &info) ||
        !info.dli_fname)
        return;
    slash = strrchr(info.dli_fname, '/');
    if (!slash || snprintf(path, sizeof(path), "%.*s/" PRODUCT, (int)(slash - info.dli_fname),
                           info.dli_fname) >= (int)sizeof(path))
        return;
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library)
        product = dlsym(library, "ncclTunerPlugin_v5");
    profile = name && *name ? lc_profile_load(name) : NULL;
    has_profile = profile != NULL;
    free(profile);
}

/* A communicator's. Made by begin, constant until it is freed. */
struct context {
    void *product;
    struct lc_net_tuner net;
};

/* A NULL context means: all is left to NCCL, but for what is forced. */
static enum lc_nccl_result begin(void **out, uint64_t comm_id, size_t ranks, size_t nodes,
                                 lc_nccl_logger *log)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct context *context = calloc(1, sizeof(*context));

    *out = context;
    if (!context)
        return LC_NCCL_SUCCESS;
    pthread_once(&once, load_product);
    lc_net_tuner_open(&context->net, comm_id, ranks, nodes, log);
    if (product &&
        product->init(&context->product, comm_id, ranks, nodes, log, NULL, NULL) ==
            LC_NCCL_SUCCESS &&
        has_profile)
        atomic_fetch_add_explicit(&loongcomm_measure_v1.product, 1, memory_order_relaxed);
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result end(void *opaque)
{
    struct context *context = opaque;

    if (!context)
        return LC_NCCL_SUCCESS;
    if (product)
        (void)product->finalize(context->product);
    lc_net_tuner_close(&context->net);
    free(context);
    return LC_NCCL_SUCCESS;
}

static void note(uint64_t way, uint64_t choice, bool taken)
{
    struct lc_measure *m = &loongcomm_measure_v1;

    atomic_store_explicit(&m->choice, choice, memory_order_relaxed);
    if (taken)
        atomic_fetch_add_explicit(&m->taken, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&m->asked, 1, memory_order_relaxed);
}

/* The mask of what a forced way and a choice share: not the channels, which NCCL bounds later. */
#define SAME_WAY (UINT64_C(0xffff) << 16)

static enum lc_nccl_result get(void *context, int op, size_t bytes, int pipe_ops,
                               const struct lc_tuner_table *table, int registered, int *channels)
{
    uint64_t way = atomic_load_explicit(&loongcomm_measure_v1.way, memory_order_relaxed);
    const struct context *own = context;
    bool taken = true;
    uint64_t choice;

    if (way == lc_measure_word(LC_MEASURE_PRODUCT, 0, 0, 0)) {
        if (product && own)
            (void)product->getCollInfo(own->product, op, bytes, pipe_ops, (float **)table->costs,
                                       table->algorithms, table->protocols, registered, channels);
    } else if (way) {
        taken = lc_measure_apply(way, table, channels);
    } else if (own) {
        lc_net_tuner_ask(&own->net, op, bytes, pipe_ops, table, registered, channels);
    }
    choice = lc_measure_choice(table, *channels);
    if (way && taken && way != lc_measure_word(LC_MEASURE_PRODUCT, 0, 0, 0))
        taken = (choice & SAME_WAY) == (way & SAME_WAY);
    note(way, choice, taken);
    return LC_NCCL_SUCCESS;
}

/* One answer instead of a table, of which NCCL ignores what it has ruled out: that a way is taken is not known, so nothing is
 * measured with these releases. */
static enum lc_nccl_result get_v2(void *context, int op, size_t bytes, int collnet, int nvls,
                                  int pipe_ops, int *algorithm, int *protocol, int *channels)
{
    const struct context *own = context;

    if (own)
        lc_net_tuner_ask_v2(&own->net, op, bytes, collnet, nvls, pipe_ops, algorithm, protocol,
                            channels);
    note(0, 0, false);
    return LC_NCCL_SUCCESS;
}

LC_TUNER_DEFINE("loongcomm-measure", begin, get, get_v2, end);
