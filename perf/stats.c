/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include <math.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;

    return (x > y) - (x < y);
}

double lc_bench_percentile(double *values, size_t count, double percent)
{
    double position;
    size_t below;

    if (count == 0)
        return NAN;
    qsort(values, count, sizeof(*values), ascending);
    position = percent / 100 * (double)(count - 1);
    below = (size_t)position;
    if (below >= count - 1)
        return values[count - 1];
    return values[below] + (position - (double)below) * (values[below + 1] - values[below]);
}

double lc_bench_algbw(const struct lc_bench_case *kase, double us)
{
    return us > 0 ? (double)kase->bytes / us / 1e3 : 0;
}

double lc_bench_busbw(const struct lc_bench_case *kase, int ranks, double us)
{
    double factor = (double)(ranks - 1) / ranks;

    if (kase->op == LC_BENCH_ALLREDUCE)
        factor *= 2;
    return lc_bench_algbw(kase, us) * factor;
}
