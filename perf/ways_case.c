/* SPDX-License-Identifier: Apache-2.0
 *
 * One operation and size: a first look at every way, then rounds among those that may be the best. What is decided by a clock
 * or a figure is decided by launcher 0, for all. */
#include "perf/ways.h"

#include "plugin/tuner/measure.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define SAMPLE_US   50.0  /* a sample lasts at least so long */
#define MAX_INNER   16    /* calls in one */
#define TURN_US     800.0 /* what a turn of short calls lasts */
#define MAX_ITERS   20
#define SHORT_US    2000.0             /* calls that long get two to warm up, */
#define LONG_US     20000.0            /* longer ones than that none */
#define LOOK_US     1500.0             /* shorter ones get a second first look */
#define ASK_US      250.0              /* what a turn costs besides its calls */
#define LIKELY      4                  /* that get a look however late it is */
#define FIRST_SHARE 0.4                /* of a case's time, for that */
#define FINAL_SHARE 0.2                /* for measuring anew what seems better than a profile */
#define PRUNE_BYTES ((size_t)16 << 20) /* from here on a look is dear: */
#define PRUNE       2.0                /* so far behind at the size before, it is not had */

struct context {
    struct lc_ways_job *job;
    const struct lc_bench_case *kase;
    struct lc_ways_entrant *field;
    int n;
    char what[128];
    int inner;
    int round; /* whose communicator is used */
};

static int agree(struct context *c, void *value, size_t bytes)
{
    struct lc_bench_bootstrap *boot = &c->job->bench->boot;

    return boot->ops->bcast(boot, value, bytes);
}

static int agree_bool(struct context *c, bool *value)
{
    return agree(c, value, sizeof(*value));
}

static uint64_t word_of(const struct lc_way *way)
{
    switch (way->kind) {
    case LC_WAY_PROFILE: return lc_measure_word(LC_MEASURE_PRODUCT, 0, 0, 0);
    case LC_WAY_FORCED:
        return lc_measure_word(LC_MEASURE_FORCED, way->algorithm, way->protocol, way->channels);
    default: return 0;
    }
}

/* The wide one is number 1. */
static int comm_of(const struct context *c, const struct lc_way *way)
{
    int turn = lc_ways_turn(c->round, c->job->options->comms);

    return way->wide ? 1 : turn ? turn + 1 : 0;
}

/* NCCL connects a communicator's ranks for an algorithm when that is first used, which takes as long as a thousand calls: such
 * a turn says nothing. All ranks choose alike. */
static bool is_first_use(struct context *c, int comm, uint64_t choice)
{
    uint32_t *used = &c->job->used[comm][c->kase->op];
    uint32_t bit = (uint32_t)1 << (choice >> 24 & 31);
    bool is_first = choice && !(*used & bit);

    *used |= choice ? bit : 0;
    return is_first;
}

/* `us`: median of the samples, without those in which NCCL connects. */
static int turn(struct context *c, struct lc_ways_entrant *e, int warmup, int iters, bool verify,
                double *us)
{
    struct lc_bench *bench = c->job->bench;
    const struct lc_bench_request request = {
        .kind = LC_BENCH_ASK_RUN,
        .comm = comm_of(c, e->way),
        .measures = true,
        .way = word_of(e->way),
        .warmup = warmup,
        .iters = iters,
        .inner = c->inner,
        .verify = verify && !c->kase->unchecked,
    };
    double samples[MAX_ITERS];
    char what[sizeof(c->what) + LC_WAYS_NAME + 8], name[LC_WAYS_NAME];
    int err;

    c->job->kase = c->kase;
    c->job->way = e->way;
    lc_way_name(e->way, name);
    snprintf(what, sizeof(what), "%s, %s", c->what, name);
    do {
        err = lc_bench_turn(bench, LC_BENCH_OURS, &request, what, samples, NULL);
        if (err)
            return err;
    } while (is_first_use(c, request.comm, bench->replies[0].choice));
    c->job->way = NULL;
    e->choice = bench->replies[0].choice;
    *us = bench->boot.rank == 0 ? lc_bench_percentile(samples, (size_t)iters, 50) : 0;
    return agree(c, us, sizeof(*us));
}

/* What NCCL does another way than asked is not measured as that. */
static int take_first_look(struct context *c, struct lc_ways_entrant *e)
{
    bool taken = true;
    double us;
    int err = turn(c, e, 0, 1, true, &us);

    for (int i = 0; i < c->job->bench->sets[LC_BENCH_OURS].count; i++)
        taken &= c->job->bench->replies[i].taken;
    if (!err)
        err = agree_bool(c, &taken);
    if (err)
        return err;
    if (!taken && e->way->kind == LC_WAY_FORCED) {
        e->state = LC_WAY_RULED_OUT;
        return 0;
    }
    if (us < LOOK_US)
        err = turn(c, e, 1, 3, false, &us);
    e->state = LC_WAY_TRIED;
    e->first_us = us > 0 ? us : 0.01;
    return err;
}

static const struct lc_ways_entrant *at_last(const struct lc_ways_entrant *last, int n,
                                             const struct lc_way *way)
{
    for (int i = 0; i < n; i++) {
        if (last[i].way == way)
            return &last[i];
    }
    return NULL;
}

static bool is_hopeless(const struct context *c, const struct lc_ways_entrant *last, int n,
                        const struct lc_way *way)
{
    const struct lc_ways_entrant *own = at_last(last, n, way);
    double best = INFINITY;

    if (c->kase->bytes < PRUNE_BYTES || !own || way->kind != LC_WAY_FORCED)
        return false;
    for (int i = 0; i < n; i++) {
        if (last[i].first_us > 0 && last[i].first_us < best)
            best = last[i].first_us;
    }
    return own->state == LC_WAY_SLOW || (own->first_us > 0 && own->first_us > PRUNE * best);
}

static bool is_beyond(const struct context *c, const struct lc_way *way)
{
    int channels = c->job->channels[way->wide];

    return way->kind == LC_WAY_FORCED && channels > 0 && way->channels > channels;
}

#define UNSEEN 1e12 /* us; behind all that was looked at */

static double hint(const struct context *c, const struct lc_ways_entrant *last, int n,
                   const struct lc_way *way)
{
    const struct lc_ways_entrant *own = at_last(last, n, way);

    if (way->kind != LC_WAY_FORCED)
        return -1;
    return own && own->first_us > 0
               ? own->first_us
               : UNSEEN +
                     lc_ways_guess(way, c->kase->bytes, c->job->bench->ranks, c->job->bench->nodes);
}

/* The likely ones first: time may be up before the last. */
static void line_up(struct context *c, const struct lc_ways_entrant *last, int n_last)
{
    for (int i = 1; i < c->n; i++) {
        struct lc_ways_entrant e = c->field[i];
        int at = i;

        while (at > 0 &&
               hint(c, last, n_last, c->field[at - 1].way) > hint(c, last, n_last, e.way)) {
            c->field[at] = c->field[at - 1];
            at--;
        }
        c->field[at] = e;
    }
}

static int look(struct context *c, const struct lc_ways_entrant *last, int n_last,
                struct lc_deadline end)
{
    line_up(c, last, n_last);
    for (int i = 0; i < c->n; i++) {
        struct lc_ways_entrant *e = &c->field[i];
        bool go = i < LC_WAYS_FIXED + LIKELY || c->kase->bytes < PRUNE_BYTES ||
                  !lc_deadline_passed(end);
        int err = agree_bool(c, &go);

        if (err)
            return err;
        if (is_beyond(c, e->way))
            e->state = LC_WAY_SAME;
        else if (is_hopeless(c, last, n_last, e->way))
            e->state = LC_WAY_SLOW;
        if (e->state != LC_WAY_LEFT)
            continue;
        err = go ? take_first_look(c, e) : 0;
        if (err)
            return err;
    }
    return 0;
}

/* Who had bad luck in one look may have rounds by another, with another communicator if there is one. */
static int look_again(struct context *c, struct lc_deadline end)
{
    double best = INFINITY;

    c->round = 2;
    for (int i = 0; i < c->n; i++) {
        if (c->field[i].state == LC_WAY_TRIED)
            best = fmin(best, c->field[i].first_us);
    }
    for (int i = 0; i < c->n; i++) {
        struct lc_ways_entrant *e = &c->field[i];
        bool go = !lc_deadline_passed(end);
        double us;
        int err = agree_bool(c, &go);

        if (!err && !go)
            return 0;
        if (err)
            return err;
        if (e->state != LC_WAY_TRIED || e->way->kind != LC_WAY_FORCED ||
            e->first_us > best * LC_WAYS_WITHIN)
            continue;
        err = turn(c, e, best < LOOK_US, best < LOOK_US ? 3 : 1, false, &us);
        if (err)
            return err;
        e->first_us = fmin(e->first_us, us > 0 ? us : 0.01);
    }
    return 0;
}

/* NCCL connects an algorithm when it is first used: none of its ways has to pay for that in a look. */
static int warm_up(struct context *c)
{
    bool *warm = &c->job->warm[c->kase->op];
    double us;

    for (c->round = 0; c->round < 2 * c->job->options->comms && !*warm; c->round += 2) {
        for (int i = 0; i < c->n; i++) {
            int err = is_beyond(c, c->field[i].way) ? 0 : turn(c, &c->field[i], 0, 1, false, &us);

            if (err)
                return err;
        }
    }
    c->round = 0;
    *warm = true;
    return 0;
}

struct plan {
    int inner, iters, warmup;
    double turn_s;
};

static const struct lc_ways_entrant *the_default(const struct context *c)
{
    for (int i = 0; i < c->n; i++) {
        if (c->field[i].way->kind == LC_WAY_DEFAULT)
            return &c->field[i];
    }
    return &c->field[0];
}

static struct plan make_plan(const struct context *c)
{
    double us = fmax(the_default(c)->first_us, 1);
    struct plan plan;

    plan.inner = (int)fmin(fmax(SAMPLE_US / us + 1, 1), MAX_INNER);
    plan.warmup = us < SHORT_US ? 2 : us < LONG_US ? 1 : 0;
    plan.iters = (int)fmin(fmax(TURN_US / (us * plan.inner), us < LOOK_US ? 3 : 1), MAX_ITERS);
    plan.turn_s = (ASK_US + us * plan.inner * (plan.iters + plan.warmup)) / 1e6;
    return plan;
}

/* A forced way that is what NCCL does by itself would be measured as a fourth of equal sides. */
static void leave_out_default(struct context *c)
{
    uint64_t choice = the_default(c)->choice;

    for (int i = 0; i < c->n; i++) {
        if (c->field[i].way->kind == LC_WAY_FORCED && !c->field[i].way->wide &&
            c->field[i].state == LC_WAY_TRIED && choice && c->field[i].choice == choice)
            c->field[i].state = LC_WAY_SAME;
    }
}

/* Everyone that is `in`, in an order that starts elsewhere each time and runs backwards every other time. */
static int round_of_turns(struct context *c, const struct plan *plan, int round, const bool *in)
{
    double base = 0;

    c->round = round;
    for (int k = 0; k < c->n; k++) {
        int step = (k + round / 2 * 3) % c->n;
        int i = round & 1 ? c->n - 1 - step : step;
        struct lc_ways_entrant *e = &c->field[i];
        int err = in[i] ? turn(c, e, plan->warmup, plan->iters, false, &e->us[round]) : 0;

        if (err)
            return err;
    }
    for (int i = 0; i < c->n; i++) {
        if (in[i] && c->field[i].way->kind == LC_WAY_DEFAULT)
            base = c->field[i].us[round];
    }
    for (int i = 0; i < c->n; i++) {
        struct lc_ways_entrant *e = &c->field[i];

        if (!in[i])
            continue;
        e->state = LC_WAY_MEASURED;
        e->ratio[round] = e->us[round] > 0 ? base / e->us[round] : 1;
        e->rounds = round + 1;
        e->comms = c->job->options->comms;
    }
    return 0;
}

static bool is_decided(const struct context *c, const bool *in)
{
    const struct lc_ways_options *o = c->job->options;

    if (!o->profile)
        return lc_ways_hopeless(c->field, c->n, in);
    return !o->to_the_end && lc_ways_settled(c->field, c->n, in);
}

static int rounds(struct context *c, const struct plan *plan, struct lc_deadline end)
{
    double turns = (double)lc_deadline_left_ms(end) / 1e3 / plan->turn_s;
    int64_t begin = lc_now_ns();
    bool in[LC_WAYS_FIELD];
    bool more = true;
    int taken = 0;
    int err = agree(c, &turns, sizeof(turns));

    if (err)
        return err;
    lc_ways_contenders(c->field, c->n, LC_WAYS_WITHIN, lc_ways_keep(turns), in);
    c->inner = plan->inner;
    for (int round = 0; more && round < LC_WAYS_ROUNDS; round++) {
        err = round_of_turns(c, plan, round, in);
        for (int i = 0; i < c->n; i++)
            taken += in[i];
        turns = lc_deadline_left_ms(end) * 1e6 * taken / (double)(lc_now_ns() - begin + 1);
        if (!err)
            err = agree(c, &turns, sizeof(turns));
        if (err)
            return err;
        more = round + 1 < LC_WAYS_LEAST || turns > 0;
        lc_ways_drop(c->field, c->n, turns, in);
        if (is_decided(c, in))
            more = false;
    }
    return 0;
}

/* A field of its own, so that nothing of the rounds before is in it. */
static int final_rounds(struct context *c, const struct plan *plan, struct lc_deadline end)
{
    static struct lc_ways_entrant finalists[LC_WAYS_FIXED + LC_WAYS_FINAL];
    struct context final = *c;
    bool in[LC_WAYS_FIELD], all[LC_WAYS_FIXED + LC_WAYS_FINAL];
    bool more = lc_ways_finalists(c->field, c->n, in);

    final.field = finalists;
    final.n = 0;
    for (int i = 0; i < c->n; i++) {
        if (in[i])
            finalists[final.n++] = (struct lc_ways_entrant){ .way = c->field[i].way };
    }
    memset(all, true, sizeof(all));
    for (int round = 0; more && round < LC_WAYS_ROUNDS; round++) {
        int err = round_of_turns(&final, plan, round, all);

        more = round + 1 < LC_WAYS_LEAST || !lc_deadline_passed(end);
        if (!err)
            err = agree_bool(c, &more);
        if (err)
            return err;
    }
    for (int i = 0, k = 0; i < c->n; i++) {
        if (!in[i])
            continue;
        c->field[i].finals = finalists[k].rounds;
        memcpy(c->field[i].final, finalists[k++].ratio, sizeof(c->field[i].final));
    }
    return 0;
}

static void enter(struct context *c)
{
    static const struct lc_way fixed[] = { { .kind = LC_WAY_DEFAULT },
                                           { .kind = LC_WAY_AGAIN },
                                           { .kind = LC_WAY_PROFILE } };
    const struct lc_ways_options *options = c->job->options;

    for (int i = 0; i < LC_WAYS_FIXED; i++) {
        if (fixed[i].kind != LC_WAY_PROFILE || options->profile)
            c->field[c->n++] = (struct lc_ways_entrant){ .way = &fixed[i] };
    }
    for (int i = 0; i < options->n_ways; i++) {
        if (options->ways[i].op == c->kase->op)
            c->field[c->n++] = (struct lc_ways_entrant){ .way = &options->ways[i] };
    }
}

int lc_ways_measure(struct lc_ways_job *job, const struct lc_bench_case *kase,
                    const struct lc_ways_entrant *last, int n_last, double budget_s,
                    struct lc_ways_entrant *out, int *n)
{
    struct lc_deadline first_end, end, final_end;
    struct context c = { .job = job, .kase = kase, .field = out, .inner = 1 };
    struct plan plan;
    int slots;
    int err;

    lc_bench_case_text(kase, c.what, sizeof(c.what));
    enter(&c);
    err = lc_bench_prepare(job->bench, kase, c.what, &slots);
    if (!err)
        err = warm_up(&c);
    first_end = lc_deadline_in_ms((int64_t)(budget_s * FIRST_SHARE * 1e3));
    final_end = lc_deadline_in_ms((int64_t)(budget_s * 1e3));
    end = lc_deadline_in_ms(
        (int64_t)(budget_s * (job->options->profile ? 1 - FINAL_SHARE : 1) * 1e3));
    if (!err)
        err = look(&c, last, n_last, first_end);
    if (!err)
        leave_out_default(&c);
    if (!err)
        err = look_again(&c, first_end);
    if (err)
        return err;
    plan = make_plan(&c);
    err = agree(&c, &plan, sizeof(plan));
    if (!err)
        err = rounds(&c, &plan, end);
    if (!err)
        err = final_rounds(&c, &plan, final_end);
    *n = c.n;
    return err;
}
