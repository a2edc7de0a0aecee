/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin for measuring: see measure.h. Without a word from loongcomm-bench it leaves every choice to NCCL. */
#include "plugin/tuner/measure.h"

#include "plugin/tuner/export.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PRODUCT "libnccl-tuner-loongcomm.so"

LC_TUNER_EXPORT extern struct lc_measure loongcomm_measure_v1;
struct lc_measure loongcomm_measure_v1 = { .version = 1 };

/* The real plugin, used as NCCL uses it. Written once by load_product, constant afterwards; it stays loaded. */
static const struct lc_nccl_tuner_v5 *product;

static void load_product(void)
{
    char path[PATH_MAX];
    Dl_info info;
    const char *slash;
    void *library;

    if (!dladdr(&loongcomm_measure_v1, &info) || !info.dli_fname)
        return;
    slash = strrchr(info.dli_fname, '/');
    if (!slash || snprintf(path, sizeof(path), "%.*s/" PRODUCT, (int)(slash - info.dli_fname),
                           info.dli_fname) >= (int)sizeof(path))
        return;
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library)
        product = dlsym(library, "ncclTunerPlugin_v5");
}

/* The context is the product's; NULL means the same here as there: no rule ever applies. */
static enum lc_nccl_result begin(void **out, size_t ranks, size_t nodes, lc_nccl_logger *log)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    *out = NULL;
    pthread_once(&once, load_product);
    if (product && product->init(out, 0, ranks, nodes, log, NULL, NULL) == LC_NCCL_SUCCESS && *out)
        atomic_fetch_add_explicit(&loongcomm_measure_v1.product, 1, memory_order_relaxed);
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result end(void *context)
{
    if (product)
        (void)product->finalize(context);
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
    bool taken = true;
    uint64_t choice;

    if (way == lc_measure_word(LC_MEASURE_PRODUCT, 0, 0, 0)) {
        if (product)
            (void)product->getCollInfo(context, op, bytes, pipe_ops, (float **)table->costs,
                                       table->algorithms, table->protocols, registered, channels);
    } else if (way) {
        taken = lc_measure_apply(way, table, channels);
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
    note(0, 0, false);
    return LC_NCCL_SUCCESS;
}

LC_TUNER_DEFINE("loongcomm-measure", begin, get, get_v2, end);
