/* SPDX-License-Identifier: Apache-2.0
 *
 * Which rules follow from what was measured. */
#include "interpose/cli/tune.h"

#include <math.h>
#include <string.h>

/* A rule has to gain this much in nine of ten rounds. */
#define GAIN 1.02

/* Deviations of a mean of two figures, estimated from those two, that it may be off by. */
#define APART 1.5

/* Of ways as good as this, the one that leaves more of the GPU to others is taken. */
#define AS_GOOD 0.98

/* Of NCCL's, the one that serves a neighbour, too. */
#define AS_GOOD_NCCL 0.99

const struct lc_tune_place lc_tune_places[] = {
    {LC_TUNE_RINGS,  LC_PROFILE_ALL_REDUCE,     0},
    { LC_TUNE_RINGS, LC_PROFILE_ALL_REDUCE,     1},
    { LC_TUNE_RINGS, LC_PROFILE_REDUCE_SCATTER, 0},
    { LC_TUNE_RINGS, LC_PROFILE_REDUCE_SCATTER, 1},
    { LC_TUNE_RINGS, LC_PROFILE_ALL_TO_ALL,     0},
    { LC_TUNE_RINGS, LC_PROFILE_SEND,           0},
    { LC_TUNE_NCCL,  LC_PROFILE_ALL_REDUCE,     0},
    { LC_TUNE_NCCL,  LC_PROFILE_REDUCE_SCATTER, 0},
    { LC_TUNE_NCCL,  LC_PROFILE_ALL_GATHER,     0},
};
const int lc_tune_n_places = (int)(sizeof(lc_tune_places) / sizeof(*lc_tune_places));
_Static_assert(sizeof(lc_tune_places) / sizeof(*lc_tune_places) == LC_TUNE_PLACES, "as said");

bool lc_tune_is_ratio(const struct lc_tune_ratio *ratio)
{
    const double most = 1e9; /* also of what is no number */

    return ratio->median > 0 && ratio->median < most && ratio->p10 > 0 && ratio->p10 < most &&
           ratio->p90 > 0 && ratio->p90 < most;
}

static int step_of(enum lc_tune_kind kind, uint8_t op)
{
    for (int i = 0; i < lc_tune_n_steps; i++) {
        if (lc_tune_steps[i].kind == kind && lc_tune_steps[i].way.op == op)
            return i;
    }
    return -1;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* All in one job, so that a smaller gain is a gain, if the median surely has one. */
static struct lc_tune_ratio least_of_turns(const struct lc_tune_ratio *equal)
{
    return (struct lc_tune_ratio){ 1, 1, larger(GAIN, larger(equal->p90, 1 / equal->p10)) };
}

/* What a way has to exceed at a size: by its p10 `p10`, by its median `p90`, up to which equal sides differ by chance. False:
 * that is not known, so nothing can be said. */
static bool baseline(const struct lc_tune_results *results, const struct lc_tune_place *place,
                     uint64_t bytes, struct lc_tune_ratio *out)
{
    bool turns = place->kind == LC_TUNE_NCCL;
    int step = step_of(turns ? LC_TUNE_AGAIN : LC_TUNE_EQUAL, place->op);
    const struct lc_tune_ratio *equal = lc_tune_find(results, step, bytes);
    const struct lc_tune_ratio *cast = NULL;

    if (!equal)
        return false;
    if (turns) {
        *out = least_of_turns(equal);
        return true;
    }
    *out = (struct lc_tune_ratio){ 1, GAIN, equal->p90 };
    if (place->kind != LC_TUNE_RINGS || !place->wire)
        return true;
    cast = lc_tune_find(results, step_of(LC_TUNE_CAST, place->op), bytes);
    if (!cast)
        return false;
    out->median = larger(1, cast->median);
    out->p10 = out->median * GAIN;
    out->p90 = larger(equal->p90, cast->p90);
    return true;
}

static bool wins(const struct lc_tune_ratio *ratio, const struct lc_tune_ratio *least)
{
    return ratio && ratio->p10 > least->p10 && ratio->median > least->p90;
}

/* Of NCCL's ways, what is worth a second look: its rounds may have been too few to be sure. */
static bool may_win(const struct lc_tune_ratio *ratio)
{
    return ratio && ratio->median > GAIN;
}

static bool is_of(const struct lc_tune_step *step, const struct lc_tune_place *place)
{
    return step->kind == place->kind && step->way.op == place->op &&
           (place->kind == LC_TUNE_NCCL || step->way.protocol == place->wire);
}

static const struct lc_tune_ratio *winner_at(const struct lc_tune_results *results, int step,
                                             const struct lc_tune_point *point)
{
    const struct lc_tune_ratio *ratio = lc_tune_find(results, step, point->bytes);

    return wins(ratio, &point->least) ? ratio : NULL;
}

/* The best way that wins at the point and, unless it is NULL, at the other; -1. */
static int best_way(const struct lc_tune_results *results, const struct lc_tune_place *place,
                    const struct lc_tune_point *point, const struct lc_tune_point *other)
{
    double score = 0;
    int best = -1;

    for (int i = 0; i < lc_tune_n_steps; i++) {
        const struct lc_tune_ratio *here, *there;
        double value, slack = 1;

        if (!is_of(&lc_tune_steps[i], place) || !(here = winner_at(results, i, point)))
            continue;
        there = other ? winner_at(results, i, other) : here;
        if (!there)
            continue;
        value = here->median < there->median ? here->median : there->median;
        if (best >= 0 && place->kind == LC_TUNE_RINGS)
            slack = lc_tune_steps[i].way.width < lc_tune_steps[best].way.width   ? AS_GOOD
                    : lc_tune_steps[i].way.width > lc_tune_steps[best].way.width ? 1 / AS_GOOD
                                                                                 : 1;
        if (value > score * slack) {
            best = i;
            score = value;
        }
    }
    return best;
}

static bool has_point(const struct lc_tune_choice *choice, uint64_t bytes)
{
    for (int i = 0; i < choice->n; i++) {
        if (choice->point[i].bytes == bytes)
            return true;
    }
    return false;
}

/* Ascending sizes at which anything was measured for the operation, and what has to be exceeded there. */
static void list_points(const struct lc_tune_results *results, struct lc_tune_choice *choice)
{
    bool turns = choice->place.kind == LC_TUNE_NCCL;
    int equal = step_of(turns ? LC_TUNE_AGAIN : LC_TUNE_EQUAL, choice->place.op);

    for (size_t i = 0; i < results->n && choice->n < LC_TUNE_SIZES; i++) {
        struct lc_tune_point point = { .bytes = results->figures[i].bytes, .way = -1, .next = -1 };
        int at = choice->n;

        if (results->figures[i].step != equal ||
            !baseline(results, &choice->place, point.bytes, &point.least))
            continue;
        if (has_point(choice, point.bytes)) /* two sizes may be the same for so many ranks */
            continue;
        while (at > 0 && choice->point[at - 1].bytes > point.bytes) {
            choice->point[at] = choice->point[at - 1];
            at--;
        }
        choice->point[at] = point;
        choice->n++;
    }
}

/* The best of those that are not sure to win, where no other is; -1. */
static int best_chance(const struct lc_tune_results *results, const struct lc_tune_place *place,
                       const struct lc_tune_point *point)
{
    double score = 0;
    int best = -1;

    for (int i = 0; i < lc_tune_n_steps && place->kind == LC_TUNE_NCCL; i++) {
        const struct lc_tune_ratio *here = lc_tune_find(results, i, point->bytes);

        if (!is_of(&lc_tune_steps[i], place) || !may_win(here) || here->median <= score)
            continue;
        best = i;
        score = here->median;
    }
    return best;
}

/* Of NCCL's ways, what has lost, but may have been unlucky: it may be off by twice as much as is likely. */
static bool may_have_won(const struct lc_tune_ratio *ratio)
{
    return ratio && ratio->p90 * (ratio->p90 / ratio->median) > GAIN;
}

/* What surely wins at a size beside this one hardly loses here, so that it is worth a second look where it may have won. The
 * better one of both neighbours', or -1. */
static int neighbours_chance(const struct lc_tune_results *results,
                             const struct lc_tune_choice *choice, int i)
{
    const struct lc_tune_point *point = &choice->point[i];
    double score = 0;
    int best = -1;

    for (int k = i - 1; k <= i + 1; k += 2) {
        const struct lc_tune_ratio *here;
        int way;

        if (k < 0 || k >= choice->n || !choice->point[k].sure || choice->place.kind != LC_TUNE_NCCL)
            continue;
        way = choice->point[k].way;
        here = lc_tune_find(results, way, point->bytes);
        if (!may_have_won(here) || here->median <= score)
            continue;
        best = way;
        score = here->median;
    }
    return best;
}

/* Between two points that have one way, but not both surely, it is looked at, too. */
static void reach_on(struct lc_tune_choice *choice)
{
    for (int i = 0; i + 1 < choice->n; i++) {
        struct lc_tune_point *point = &choice->point[i];

        if (point->next < 0 && choice->place.kind == LC_TUNE_NCCL &&
            point->way == choice->point[i + 1].way)
            point->next = point->way;
    }
}

/* A way that reaches on to a neighbour is taken at the point, too, if it is as good there. */
static int settle(const struct lc_tune_results *results, const struct lc_tune_choice *choice, int i)
{
    const struct lc_tune_point *point = &choice->point[i];
    int best = best_way(results, &choice->place, point, NULL);
    const int reaching[] = { point->next, i > 0 ? choice->point[i - 1].next : -1 };
    double as_good = choice->place.kind == LC_TUNE_NCCL ? AS_GOOD_NCCL : AS_GOOD;

    for (int k = 0; k < 2; k++) {
        if (reaching[k] >= 0 && lc_tune_find(results, reaching[k], point->bytes)->median >=
                                    as_good * lc_tune_find(results, best, point->bytes)->median)
            return reaching[k];
    }
    return best;
}

void lc_tune_choose(const struct lc_tune_results *results, const struct lc_tune_place *place,
                    struct lc_tune_choice *out)
{
    memset(out, 0, sizeof(*out));
    out->place = *place;
    list_points(results, out);
    for (int i = 0; i + 1 < out->n; i++)
        out->point[i].next = best_way(results, place, &out->point[i], &out->point[i + 1]);
    for (int i = 0; i < out->n; i++) {
        struct lc_tune_point *point = &out->point[i];

        point->way = settle(results, out, i);
        point->sure = point->way >= 0;
    }
    for (int i = 0; i < out->n; i++) {
        struct lc_tune_point *point = &out->point[i];

        if (!point->sure)
            point->way = best_chance(results, place, point);
        if (point->way < 0)
            point->way = neighbours_chance(results, out, i);
        if (point->way >= 0)
            point->won = *lc_tune_find(results, point->way, point->bytes);
    }
    reach_on(out);
}

bool lc_tune_has_rules(const struct lc_tune_choice *choice)
{
    for (int i = 0; i < choice->n; i++) {
        if (choice->point[i].way >= 0)
            return true;
    }
    return false;
}

static uint64_t between(uint64_t a, uint64_t b)
{
    uint64_t middle = (uint64_t)sqrt((double)a * (double)b);

    return middle - middle % 512;
}

static bool has_middle(uint64_t low, uint64_t high)
{
    return between(low, high) > low;
}

/* Of a range that is to have a rule, the middle; 0 bytes at its end: there is none. */
static int add_middle(uint64_t low, uint64_t high, uint64_t *sizes, int n)
{
    if (high && has_middle(low, high))
        sizes[n++] = between(low, high);
    return n;
}

int lc_tune_recheck_sizes(const struct lc_tune_choice *choice, uint64_t sizes[LC_TUNE_CHECKS])
{
    int n = 0;

    for (int i = 0; i < choice->n; i++) {
        const struct lc_tune_point *point = &choice->point[i];

        if (point->way >= 0)
            sizes[n++] = point->bytes;
        if (point->next >= 0) {
            n = add_middle(point->bytes, point[1].bytes, sizes, n);
            continue;
        }
        n = add_middle(point->bytes, point->until, sizes, n);
        if (point->since)
            n = add_middle(point->since, point[1].bytes, sizes, n);
    }
    return n;
}

static const struct lc_tune_recheck *find_recheck(const struct lc_tune_recheck *recheck, int n,
                                                  uint64_t bytes)
{
    for (int i = 0; i < n; i++) {
        if (recheck[i].bytes == bytes)
            return &recheck[i];
    }
    return NULL;
}

/* By how much equal sides differ is a run's own, if it says so. */
static bool wins_again(const struct lc_tune_recheck *again, const struct lc_tune_ratio *least)
{
    struct lc_tune_ratio own = *least;

    if (lc_tune_is_ratio(&again->equal))
        own = least_of_turns(&again->equal);
    return wins(&again->ratio, &own);
}

static double off(const struct lc_tune_ratio *ratio)
{
    return log(ratio->median / ratio->p10);
}

/* Two jobs' figures of one way, as one: what both are off by is less, unless they say different things. */
static struct lc_tune_ratio together(const struct lc_tune_ratio *a, const struct lc_tune_ratio *b)
{
    double median = sqrt(a->median * b->median);
    double apart = APART * fabs(log(a->median / b->median));
    double error = exp(larger(hypot(off(a), off(b)), apart) / 2);

    return (struct lc_tune_ratio){ median, median / error, median * error };
}

/* What was best of many in the first look was lucky there, so that the second one has to say much the same. */
static bool wins_together(const struct lc_tune_point *point, const struct lc_tune_recheck *again,
                          struct lc_tune_ratio *out)
{
    struct lc_tune_ratio least = { 1, 1, GAIN };
    double equal, own;

    if (!lc_tune_is_ratio(&again->equal))
        return false;
    equal = log(point->least.p90);
    own = log(least_of_turns(&again->equal).p90);
    least.p90 = larger(GAIN, exp(hypot(equal, own) / 2));
    *out = together(&point->won, &again->ratio);
    return wins(out, &least);
}

/* Whatever was looked at between two points, or in a range there, must win there as well. */
static bool wins_between(const struct lc_tune_point *a, uint64_t low, uint64_t high,
                         const struct lc_tune_recheck *recheck, int n)
{
    const struct lc_tune_point *b = a + 1;
    const struct lc_tune_ratio least = { 0, larger(a->least.p10, b->least.p10),
                                         larger(a->least.p90, b->least.p90) };
    bool seen = !has_middle(low, high);

    for (int i = 0; i < n; i++) {
        if (recheck[i].bytes <= low || recheck[i].bytes >= high)
            continue;
        if (!wins_again(&recheck[i], &least))
            return false;
        seen = true;
    }
    return seen;
}

void lc_tune_confirm(struct lc_tune_choice *choice, const struct lc_tune_recheck *recheck, int n)
{
    for (int i = 0; i < choice->n; i++) {
        struct lc_tune_point *point = &choice->point[i];
        const struct lc_tune_recheck *again = find_recheck(recheck, n, point->bytes);
        struct lc_tune_ratio both;

        if (point->way < 0)
            continue;
        if (again && wins_again(again, &point->least))
            point->won = again->ratio;
        else if (again && wins_together(point, again, &both))
            point->won = both;
        else
            point->way = -1;
    }
    for (int i = 0; i + 1 < choice->n; i++) {
        struct lc_tune_point *point = &choice->point[i];
        const struct lc_tune_point *other = &choice->point[i + 1];

        if (point->next >= 0 && (point->way < 0 || other->way < 0 ||
                                 !wins_between(point, point->bytes, other->bytes, recheck, n)))
            point->next = -1;
        if (point->until && (point->way < 0 || !has_middle(point->bytes, point->until) ||
                             !wins_between(point, point->bytes, point->until, recheck, n)))
            point->until = 0;
        if (point->since && (other->way < 0 || !has_middle(point->since, other->bytes) ||
                             !wins_between(point, point->since, other->bytes, recheck, n)))
            point->since = 0;
    }
}

/* From this gain on. */
#define WORTH_A_LOOK 1.05

bool lc_tune_is_disputed(const struct lc_tune_choice *before, const struct lc_tune_choice *after)
{
    for (int i = 0; i < before->n; i++) {
        if (before->point[i].way >= 0 && before->point[i].sure && after->point[i].way < 0 &&
            before->point[i].won.median > WORTH_A_LOOK)
            return true;
    }
    return false;
}

void lc_tune_keep_sure(struct lc_tune_choice *choice)
{
    for (int i = 0; i < choice->n; i++)
        choice->point[i].way = choice->point[i].sure ? choice->point[i].way : -1;
}

void lc_tune_merge(struct lc_tune_choice *choice, const struct lc_tune_choice *other)
{
    for (int i = 0; i < choice->n; i++) {
        if (choice->point[i].way >= 0)
            continue;
        choice->point[i].way = other->point[i].way;
        choice->point[i].won = other->point[i].won;
    }
    for (int i = 0; i + 1 < choice->n; i++) {
        struct lc_tune_point *point = &choice->point[i];

        if (point->next < 0 && point->way >= 0 && choice->point[i + 1].way >= 0)
            point->next = other->point[i].next;
        if (!point->until && point->way >= 0)
            point->until = other->point[i].until;
        if (!point->since && choice->point[i + 1].way >= 0)
            point->since = other->point[i].since;
    }
}

/* Appends a range, to the last rule if it goes on. `point`: what was measured in it, or NULL. */
static int extend(struct lc_tune_rule *rules, int n, int way, uint64_t from, uint64_t to,
                  const struct lc_tune_point *point)
{
    struct lc_tune_rule *last = n ? &rules[n - 1] : NULL;
    struct lc_profile_rule rule = lc_tune_steps[way].way;

    if (!last || last->rule.to != from || last->rule.algorithm != rule.algorithm ||
        last->rule.protocol != rule.protocol || last->rule.width != rule.width) {
        last = &rules[n++];
        *last = (struct lc_tune_rule){ .rule = rule, .worst.p10 = INFINITY };
        last->rule.from = from;
    }
    last->rule.to = to;
    if (point && point->way == way && point->won.p10 < last->worst.p10)
        last->worst = point->won;
    if (point && point->way == way)
        last->best = larger(last->best, point->won.median);
    return n;
}

int lc_tune_rules(const struct lc_tune_choice *choice, int ranks, int nodes,
                  struct lc_tune_rule *out)
{
    int n = 0;

    for (int i = 0; i < choice->n; i++) {
        const struct lc_tune_point *point = &choice->point[i];

        if (point->way >= 0)
            n = extend(out, n, point->way, point->bytes, point->bytes + 1, point);
        if (point->until)
            n = extend(out, n, point->way, point->bytes + 1, point->until, NULL);
        if (point->next >= 0)
            n = extend(out, n, point->next, point->bytes + 1, choice->point[i + 1].bytes, NULL);
        if (point->since)
            n = extend(out, n, choice->point[i + 1].way, point->since, choice->point[i + 1].bytes,
                       NULL);
    }
    for (int i = 0; i < n; i++) {
        out[i].rule.ranks = (uint32_t)ranks;
        out[i].rule.nodes = choice->place.kind == LC_TUNE_RINGS ? 1 : (uint32_t)nodes;
    }
    return n;
}
