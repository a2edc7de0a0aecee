/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/ways.h"

#include "common/cost.h"
#include "common/profile.h"

#include <math.h>
#include <string.h>

#define NORMAL      1.4826 /* a normal distribution's deviation, in middles of what its values are off */
#define MEDIAN      1.2533 /* how much more a median of such values is off than their mean */
#define OWN         0.7    /* of its own noise, which few rounds overrate, a way has at least */
#define SURE        1.5    /* deviations; */
#define DOUBT       2      /* so many times that, to go by what few rounds say against a way */
#define LOOK_ROUNDS 3      /* before anyone is dropped, in */
#define LOOK_SHARE  0.6    /* of the time; with all that fit */
#define EQUALS      2      /* of every round are the default and itself again */
#define LEAST_KEPT  2      /* forced ways, however little time there is */
#define CLOSE       1.03   /* who is not farther behind the best stays */
#define SURE_ROUNDS 9      /* that those who stay should have; fewer are few */
#define WORTH       1.02   /* what a rule of a profile has to gain */
#define BETTER      1.01   /* than the profile, to be measured anew */

/* Nobody knows the wires here; which way is likely to be fast depends little on them. */
#define INSIDE_GBPS  100
#define BETWEEN_GBPS 25

/* After so many rounds the best so many stay. */
static const struct {
    int rounds, most;
} halvings[] = {
    {LOOK_ROUNDS, 10},
    { 6,          5 },
    { 12,         4 },
};

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

double lc_ways_ratio(const struct lc_ways_entrant *entrant)
{
    int comms = entrant->comms > 1 ? entrant->comms : 1;
    double sum = 0;
    int seen = 0;

    for (int comm = 0; comm < comms; comm++) {
        double own[LC_WAYS_ROUNDS];
        int n = 0;

        for (int i = 0; i < entrant->rounds; i++) {
            if (lc_ways_turn(i, comms) == comm)
                own[n++] = entrant->ratio[i];
        }
        if (n)
            sum += lc_ways_median(own, n);
        seen += n > 0;
    }
    return seen ? sum / seen : lc_ways_median(entrant->ratio, 0);
}

static bool is_odd_middle(const struct lc_ways_entrant *entrant, double off)
{
    return off == 0 && (entrant->rounds & 1); /* it is the median, and says nothing */
}

/* How far rounds are off, in the middle; for a normal distribution, of its standard deviation. */
static double middle_of(double *off, size_t n)
{
    return n ? lc_bench_percentile(off, n, 50) * NORMAL : 0;
}

static size_t add_offs(const struct lc_ways_entrant *entrant, double *off)
{
    double median = lc_ways_ratio(entrant);
    size_t n = 0;

    for (int i = 0; i < entrant->rounds && median > 0; i++) {
        double value = fabs(entrant->ratio[i] / median - 1);

        if (!is_odd_middle(entrant, value))
            off[n++] = value;
    }
    return n;
}

double lc_ways_noise(const struct lc_ways_entrant *field, int n)
{
    double off[LC_WAYS_FIELD * LC_WAYS_ROUNDS];
    size_t count = 0;

    for (int i = 0; i < n; i++) {
        if (field[i].way->kind != LC_WAY_DEFAULT) /* whose ratio is 1 */
            count += add_offs(&field[i], off + count);
    }
    return middle_of(off, count);
}

static void bounds(const struct lc_ways_entrant *entrant, double noise, double deviations,
                   double *low, double *high)
{
    double off[LC_WAYS_ROUNDS];
    double median = lc_ways_ratio(entrant);
    double own = OWN * middle_of(off, add_offs(entrant, off));
    double error = 1 + deviations * MEDIAN * fmax(own, noise) / sqrt(entrant->rounds);

    *low = entrant->way->kind == LC_WAY_DEFAULT ? median : median / error;
    *high = entrant->way->kind == LC_WAY_DEFAULT ? median : median * error;
}

void lc_ways_bounds(const struct lc_ways_entrant *entrant, double noise, double *low, double *high)
{
    bounds(entrant, noise, SURE, low, high);
}

/* At best. One of twenty ways has bad luck in its first rounds, and who is out has no others. */
static double hope(const struct lc_ways_entrant *entrant, double noise)
{
    double low, high;

    bounds(entrant, noise, entrant->rounds < SURE_ROUNDS ? DOUBT * SURE : SURE, &low, &high);
    return high;
}

double lc_ways_guess(const struct lc_way *way, size_t bytes, int ranks, int nodes)
{
    static const uint8_t ops[LC_BENCH_OPS] = {
        [LC_BENCH_ALLTOALL] = LC_PROFILE_ALL_TO_ALL,
        [LC_BENCH_ALLREDUCE] = LC_PROFILE_ALL_REDUCE,
        [LC_BENCH_REDUCESCATTER] = LC_PROFILE_REDUCE_SCATTER,
        [LC_BENCH_ALLGATHER] = LC_PROFILE_ALL_GATHER,
    };
    const struct lc_cost_call call = { .op = ops[way->op],
                                       .algorithm = way->algorithm,
                                       .protocol = way->protocol,
                                       .channels = way->channels,
                                       .ranks = (uint32_t)ranks,
                                       .nodes = (uint32_t)nodes,
                                       .bytes = bytes };
    struct lc_cost_wires wires = lc_cost_guess;
    double us;

    wires.inside_gbps = INSIDE_GBPS;
    wires.between_gbps = BETWEEN_GBPS;
    us = lc_cost_predict(&call, &wires);
    return us < 0 ? INFINITY : us;
}

static bool is_fixed(const struct lc_ways_entrant *entrant)
{
    return entrant->way->kind != LC_WAY_FORCED;
}

/* What turned out to be the default has had its look, too. */
static bool was_tried(const struct lc_ways_entrant *entrant)
{
    return entrant->first_us > 0 && entrant->state != LC_WAY_SAME;
}

void lc_ways_contenders(const struct lc_ways_entrant *field, int n, double within, int keep,
                        bool *in)
{
    double best = INFINITY;

    for (int i = 0; i < n; i++) {
        in[i] = was_tried(&field[i]) && is_fixed(&field[i]);
        if (was_tried(&field[i]) && field[i].first_us < best)
            best = field[i].first_us;
    }
    for (; keep > 0; keep--) {
        int fastest = -1;

        for (int i = 0; i < n; i++) {
            if (!in[i] && was_tried(&field[i]) && field[i].first_us <= best * within &&
                (fastest < 0 || field[i].first_us < field[fastest].first_us))
                fastest = i;
        }
        if (fastest < 0)
            return;
        in[fastest] = true;
    }
}

int lc_ways_keep(double turns)
{
    double keep = turns * LOOK_SHARE / LOOK_ROUNDS - EQUALS;

    return keep < LEAST_KEPT ? LEAST_KEPT : keep > LC_WAYS_MAX ? LC_WAYS_MAX : (int)keep;
}

static void take_out(struct lc_ways_entrant *entrant, bool *in)
{
    *in = false;
    entrant->state = LC_WAY_BEHIND;
}

/* Who is behind the best by more than CLOSE, even if the best were as bad and it as good as they may be. */
static void drop_clear(struct lc_ways_entrant *field, int n, bool *in)
{
    double noise = lc_ways_noise(field, n), best = 0, best_low = 0;

    for (int i = 0; i < n; i++) {
        double low, high, median;

        if (!in[i])
            continue;
        lc_ways_bounds(&field[i], noise, &low, &high);
        median = lc_ways_ratio(&field[i]);
        if (median > best) {
            best = median;
            best_low = low;
        }
    }
    for (int i = 0; i < n; i++) {
        double low, high;

        if (!in[i] || is_fixed(&field[i]))
            continue;
        lc_ways_bounds(&field[i], noise, &low, &high);
        if (high < best_low && lc_ways_ratio(&field[i]) * CLOSE < best)
            take_out(&field[i], &in[i]);
    }
}

static void drop_last(struct lc_ways_entrant *field, int n, int most, bool *in)
{
    int count = 0;

    for (int i = 0; i < n; i++)
        count += in[i] && !is_fixed(&field[i]);
    for (; count > most; count--) {
        int worst = -1;

        for (int i = 0; i < n; i++) {
            if (in[i] && !is_fixed(&field[i]) &&
                (worst < 0 || lc_ways_ratio(&field[i]) < lc_ways_ratio(&field[worst])))
                worst = i;
        }
        take_out(&field[worst], &in[worst]);
    }
}

static int most_rounds(const struct lc_ways_entrant *field, int n, const bool *in)
{
    int most = 0;

    for (int i = 0; i < n; i++)
        most = in[i] && field[i].rounds > most ? field[i].rounds : most;
    return most;
}

void lc_ways_drop(struct lc_ways_entrant *field, int n, double turns, bool *in)
{
    int round = most_rounds(field, n, in);

    if (round < LOOK_ROUNDS)
        return;
    drop_clear(field, n, in);
    for (size_t i = 0; i < sizeof(halvings) / sizeof(*halvings); i++) {
        double fit = turns / (SURE_ROUNDS - round > 2 ? SURE_ROUNDS - round : 2) - EQUALS;

        if (halvings[i].rounds != round)
            continue;
        fit = fit < LEAST_KEPT ? LEAST_KEPT : fit;
        drop_last(field, n, fit < halvings[i].most ? (int)fit : halvings[i].most, in);
    }
}

bool lc_ways_hopeless(const struct lc_ways_entrant *field, int n, const bool *in)
{
    double noise = lc_ways_noise(field, n);

    for (int i = 0; i < n; i++) {
        if (in[i] && (field[i].rounds < LOOK_ROUNDS ||
                      (!is_fixed(&field[i]) && hope(&field[i], noise) > WORTH)))
            return false;
    }
    return true;
}

static const struct lc_ways_entrant *find_kind(const struct lc_ways_entrant *field, int n,
                                               enum lc_way_kind kind)
{
    for (int i = 0; i < n; i++) {
        if (field[i].way->kind == kind && field[i].rounds)
            return &field[i];
    }
    return NULL;
}

bool lc_ways_settled(const struct lc_ways_entrant *field, int n, const bool *in)
{
    const struct lc_ways_entrant *profile = find_kind(field, n, LC_WAY_PROFILE);
    const struct lc_ways_entrant *dflt = find_kind(field, n, LC_WAY_DEFAULT);
    double noise = lc_ways_noise(field, n), worst, low, high;

    if (!profile || !dflt || most_rounds(field, n, in) < SURE_ROUNDS)
        return false;
    lc_ways_bounds(profile, noise, &worst, &high);
    if (profile->choice != dflt->choice && worst < 1)
        return false;
    for (int i = 0; i < n; i++) {
        if (!in[i] || is_fixed(&field[i]) || field[i].way->wide ||
            field[i].choice == profile->choice)
            continue;
        lc_ways_bounds(&field[i], noise, &low, &high);
        if (high > CLOSE * worst)
            return false;
    }
    return true;
}

bool lc_ways_finalists(const struct lc_ways_entrant *field, int n, bool *in)
{
    const struct lc_ways_entrant *profile = find_kind(field, n, LC_WAY_PROFILE);
    const struct lc_ways_entrant *dflt = find_kind(field, n, LC_WAY_DEFAULT);
    bool any = profile && dflt && profile->choice != dflt->choice &&
               lc_ways_ratio(profile) * BETTER < lc_ways_ratio(dflt);

    for (int i = 0; i < n; i++)
        in[i] = false;
    for (int count = 0; profile && count < LC_WAYS_FINAL; count++) {
        int best = -1;

        for (int i = 0; i < n; i++) {
            if (!in[i] && !is_fixed(&field[i]) && !field[i].way->wide &&
                field[i].state == LC_WAY_MEASURED && field[i].choice != profile->choice &&
                lc_ways_ratio(&field[i]) > BETTER * lc_ways_ratio(profile) &&
                (best < 0 || lc_ways_ratio(&field[i]) > lc_ways_ratio(&field[best])))
                best = i;
        }
        if (best < 0)
            break;
        any = in[best] = true;
    }
    for (int i = 0; any && i < n; i++)
        in[i] |= is_fixed(&field[i]) && field[i].rounds;
    return any;
}

/* All-reduce moves its bytes twice. However short a call is, telling twenty ways apart takes hundreds of turns, each with a
 * start of its own; and it is there that the ways differ most. */
#define CALL_BYTES (96.0 * (1 << 20))

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
