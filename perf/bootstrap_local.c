/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include <string.h>

#define UNUSED __attribute__((unused))

static int local_bcast(struct lc_bench_bootstrap *self UNUSED, void *data UNUSED,
                       size_t bytes UNUSED)
{
    return 0;
}

static int local_gather(struct lc_bench_bootstrap *self UNUSED, const void *data, size_t bytes,
                        void *out)
{
    memcpy(out, data, bytes);
    return 0;
}

static int local_barrier(struct lc_bench_bootstrap *self UNUSED)
{
    return 0;
}

static void local_close(struct lc_bench_bootstrap *self UNUSED)
{
}

static const struct lc_bench_bootstrap_ops local_ops = {
    .bcast = local_bcast,
    .gather = local_gather,
    .barrier = local_barrier,
    .close = local_close,
    .abort = local_close,
};

int lc_bench_bootstrap_local(struct lc_bench_bootstrap *out)
{
    *out = (struct lc_bench_bootstrap){ .ops = &local_ops, .size = 1, .local_size = 1 };
    return 0;
}
