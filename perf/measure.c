/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SAMPLE_US \
    50.0 /* a sample lasts at least this long: events resolve about half a microsecond */
#define MAX_INNER  64
#define ROUNDS     10
#define MIN_ROUNDS 3
#define MAX_ITERS  100
#define WARMUP     2

/* Decided by launcher 0 and the same at all. */
struct plan {
    int rounds;
    int iters;
    int warmup;
    int inner;
};

static double max_double(double a, double b)
{
    return a > b ? a : b;
}

static int clamp(double value, int low, int high)
{
    if (!(value > low))
        return low;
    return value < high ? (int)value : high;
}

/* A collective is over when its last rank is. */
static void take_max(double *into, const double *values, int count)
{
    for (int i = 0; i < count; i++)
        into[i] = max_double(into[i], values[i]);
}

int lc_bench_turn(struct lc_bench *bench, enum lc_bench_variant variant,
                  const struct lc_bench_request *request, const char *what, double *us, double *cpu)
{
    struct lc_bench_set *set = &bench->sets[variant];
    size_t bytes = (size_t)request->iters * sizeof(double);
    int err = lc_bench_set_ask(set, request, what, bench->replies);

    if (err)
        return err;
    if (cpu)
        *cpu = bench->boot.size > 1 ? NAN : 0; /* other launchers do not tell */
    for (int i = 0; i < set->count; i++) {
        if (cpu)
            *cpu += bench->replies[i].cpu_s;
        if (bench->replies[i].samples != request->iters)
            return -EPROTO;
        take_max(bench->replies[0].us, bench->replies[i].us, request->iters);
    }
    err = bench->boot.ops->gather(&bench->boot, bench->replies[0].us, bytes, bench->gathered);
    if (!err && bench->boot.rank == 0) {
        memcpy(us, bench->gathered, bytes);
        for (int i = 1; i < bench->boot.size; i++)
            take_max(us, bench->gathered + (size_t)i * (size_t)request->iters, request->iters);
    }
    /* Nobody begins the other variant's turn while this one still runs elsewhere. */
    return err ? err : bench->boot.ops->barrier(&bench->boot);
}

int lc_bench_prepare(struct lc_bench *bench, const struct lc_bench_case *kase, const char *what,
                     int *out_slots)
{
    struct lc_bench_request request = { .kind = LC_BENCH_ASK_CASE, .kase = *kase };

    request.rotate = bench->rotate;
    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        int err;

        if (bench->sets[v].count == 0)
            continue;
        err = lc_bench_set_ask(&bench->sets[v], &request, what, bench->replies);
        if (err)
            return err;
        *out_slots = bench->replies[0].slots;
    }
    return 0;
}

/* Checks the very first call, then times a few. `out`: microseconds per call of each variant. */
static int try_out(struct lc_bench *bench, const char *what, double *out)
{
    struct lc_bench_request request = { .kind = LC_BENCH_ASK_RUN, .inner = 1 };
    double us[3];

    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        int err;

        out[v] = 0;
        if (bench->sets[v].count == 0)
            continue;
        request.warmup = 0;
        request.iters = 1;
        request.verify = true;
        err = lc_bench_turn(bench, v, &request, what, us, NULL);
        if (err)
            return err;
        request.warmup = WARMUP;
        request.iters = 3;
        request.verify = false;
        err = lc_bench_turn(bench, v, &request, what, us, NULL);
        if (err)
            return err;
        if (bench->boot.rank == 0)
            out[v] = lc_bench_percentile(us, 3, 50);
    }
    return 0;
}

/* What the user left open, such that all turns together last about budget_s. */
static struct plan make_plan(const struct lc_bench_options *options, const double *us, bool inplace,
                             int slots, double budget_s)
{
    double both = max_double(us[LC_BENCH_PLAIN] + us[LC_BENCH_OURS], 0.1);
    double fastest = both;
    struct plan plan = { .warmup = options->warmup < 0 ? WARMUP : options->warmup };
    double batch_s;

    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        if (us[v] > 0 && us[v] < fastest)
            fastest = us[v];
    }
    plan.inner = clamp(SAMPLE_US / fastest + 1, 1,
                       inplace && slots < MAX_INNER ? slots : MAX_INNER);
    batch_s = both * plan.inner / 1e6;
    plan.rounds = options->rounds;
    if (!plan.rounds)
        plan.rounds = clamp(budget_s / (batch_s * (plan.warmup + 3)), MIN_ROUNDS, ROUNDS);
    plan.iters = options->iters;
    if (!plan.iters)
        plan.iters = clamp(budget_s / plan.rounds / batch_s - plan.warmup, 1, MAX_ITERS);
    return plan;
}

static int make_room(const struct lc_bench *bench, const struct plan *plan,
                     struct lc_bench_result *out)
{
    size_t count = (size_t)plan->rounds * (size_t)plan->iters;

    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        if (bench->sets[v].count == 0)
            continue;
        out->series[v].us = calloc(count, sizeof(double));
        out->series[v].cpu = calloc((size_t)plan->rounds, sizeof(double));
        out->series[v].count = count;
        if (!out->series[v].us || !out->series[v].cpu)
            return -ENOMEM;
    }
    if (!out->series[LC_BENCH_PLAIN].us || !out->series[LC_BENCH_OURS].us)
        return 0;
    out->ratios = calloc((size_t)plan->rounds, sizeof(double));
    return out->ratios ? 0 : -ENOMEM;
}

/* Both variants once, in alternating order: what drifts then counts for neither. */
static int round_of_turns(struct lc_bench *bench, const struct lc_bench_case *kase,
                          const struct plan *plan, int round, const char *what,
                          struct lc_bench_result *result)
{
    const struct lc_bench_request request = {
        .kind = LC_BENCH_ASK_RUN,
        .warmup = plan->warmup,
        .iters = plan->iters,
        .inner = plan->inner,
        .verify = round == plan->rounds - 1,
    };
    double gb = (double)kase->bytes * (plan->warmup + plan->iters) * plan->inner / 1e9;
    double medians[LC_BENCH_VARIANTS] = { 0 };

    for (int i = 0; i < LC_BENCH_VARIANTS; i++) {
        int v = i ^ (round & 1);
        double *us = result->series[v].us + (size_t)round * (size_t)plan->iters;
        double *cpu = result->series[v].cpu; /* there where the side is */
        int err;

        if (bench->sets[v].count == 0 || !cpu)
            continue;
        err = lc_bench_turn(bench, v, &request, what, us, &cpu[round]);
        if (err)
            return err;
        cpu[round] /= gb;
        medians[v] = lc_bench_percentile(us, (size_t)plan->iters, 50);
    }
    if (result->ratios && medians[LC_BENCH_OURS] > 0)
        result->ratios[round] = medians[LC_BENCH_PLAIN] / medians[LC_BENCH_OURS];
    return 0;
}

int lc_bench_settle(struct lc_bench *bench, const struct lc_bench_case *kase, double seconds)
{
    const struct lc_bench_request request = { .kind = LC_BENCH_ASK_RUN,
                                              .iters = MAX_ITERS,
                                              .inner = kase->inplace ? 1 : 8 };
    struct lc_deadline end = lc_deadline_in_ms((int64_t)(seconds * 1000));
    struct lc_bench_case eager = *kase;
    bool more = seconds > 0;
    char what[128];
    double us[MAX_ITERS];
    int slots;
    int err = 0;

    eager.graph = false;
    lc_bench_case_text(&eager, what, sizeof(what));
    if (more)
        err = lc_bench_prepare(bench, &eager, what, &slots);
    while (more && !err) {
        for (int v = 0; v < LC_BENCH_VARIANTS && !err; v++) {
            if (bench->sets[v].count)
                err = lc_bench_turn(bench, v, &request, what, us, NULL);
        }
        more = !lc_deadline_passed(end);
        if (!err)
            err = bench->boot.ops->bcast(&bench->boot, &more, sizeof(more));
    }
    return err;
}

void lc_bench_result_free(struct lc_bench_result *result)
{
    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        free(result->series[v].us);
        free(result->series[v].cpu);
    }
    free(result->ratios);
    *result = (struct lc_bench_result){ 0 };
}

int lc_bench_measure(struct lc_bench *bench, const struct lc_bench_case *kase, double budget_s,
                     struct lc_bench_result *out)
{
    int64_t begin = lc_now_ns();
    struct lc_bench_result result = { 0 };
    double us[LC_BENCH_VARIANTS];
    struct plan plan = { 0 };
    char what[128];
    int err;

    lc_bench_case_text(kase, what, sizeof(what));
    err = lc_bench_prepare(bench, kase, what, &result.slots);
    if (!err)
        err = try_out(bench, what, us);
    if (err)
        return err;
    if (bench->boot.rank == 0) {
        double left = budget_s - (double)(lc_now_ns() - begin) / 1e9;

        plan = make_plan(bench->options, us, kase->inplace, result.slots,
                         max_double(left, budget_s / 4));
    }
    err = bench->boot.ops->bcast(&bench->boot, &plan, sizeof(plan));
    if (!err)
        err = make_room(bench, &plan, &result);
    for (int round = 0; round < plan.rounds && !err; round++)
        err = round_of_turns(bench, kase, &plan, round, what, &result);
    if (err) {
        lc_bench_result_free(&result);
        return err;
    }
    result.rounds = plan.rounds;
    result.iters = plan.iters;
    result.inner = plan.inner;
    *out = result;
    return 0;
}
