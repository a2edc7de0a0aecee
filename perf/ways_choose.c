/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/ways.h"

#include <math.h>
#include <string.h>

int lc_ways_channels(const char *text)
{
    static const char words[] = " coll channels,";
    const char *at, *last = NULL;
    int channels = 0;

    for (at = text; (at = strstr(at, words)); at += sizeof(words) - 1)
        last = at;
    for (int digit = 1; last && last > text && digit <= 1000; digit *= 10) {
        last--;
        if (*last < '0' || *last > '9')
            break;
        channels += (*last - '0') * digit;
    }
    return channels;
}

double lc_ways_median(const double *values, int n)
{
    double copy[LC_WAYS_ROUNDS];

    memcpy(copy, values, (size_t)n * sizeof(*copy));
    return lc_bench_percentile(copy, (size_t)n, 50);
}

static bool is_fixed(const struct lc_ways_entrant *entrant)
{
    return entrant->way->kind != LC_WAY_FORCED;
}

void lc_ways_contenders(const struct lc_ways_entrant *field, int n, double within, int keep,
                        bool *in)
{
    double best = INFINITY;

    for (int i = 0; i < n; i++) {
        in[i] = field[i].first_us > 0 && is_fixed(&field[i]);
        if (field[i].first_us > 0 && field[i].first_us < best)
            best = field[i].first_us;
    }
    for (; keep > 0; keep--) {
        int fastest = -1;

        for (int i = 0; i < n; i++) {
            if (!in[i] && field[i].first_us > 0 && field[i].first_us <= best * within &&
                (fastest < 0 || field[i].first_us < field[fastest].first_us))
                fastest = i;
        }
        if (fastest < 0)
            return;
        in[fastest] = true;
    }
}

void lc_ways_drop(struct lc_ways_entrant *field, int n, double within, bool *in)
{
    double best = 0;

    for (int i = 0; i < n; i++) {
        double ratio = lc_ways_median(field[i].ratio, field[i].rounds);

        if (in[i] && ratio > best)
            best = ratio;
    }
    for (int i = 0; i < n; i++) {
        if (in[i] && !is_fixed(&field[i]) &&
            lc_ways_median(field[i].ratio, field[i].rounds) * within < best) {
            in[i] = false;
            field[i].state = LC_WAY_BEHIND;
        }
    }
}

/* A call costs something besides its bytes; all-reduce moves them twice. */
#define CALL_BYTES (16.0 * (1 << 20))

static double cost(const struct lc_bench_case *kase)
{
    return CALL_BYTES + (double)kase->bytes * (kase->op == LC_BENCH_ALLREDUCE ? 2 : 1);
}

double lc_ways_share(const struct lc_bench_case *cases, int n, int at)
{
    double sum = 0;

    for (int i = at; i < n; i++)
        sum += cost(&cases[i]);
    return cost(&cases[at]) / sum;
}
