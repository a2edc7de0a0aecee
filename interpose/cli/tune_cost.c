/* SPDX-License-Identifier: Apache-2.0
 *
 * The model of costs over what `loongcomm tune` has measured. */
#include "interpose/cli/tune.h"

#include <errno.h>
#include <string.h>

#define TRUST 0.15 /* how far the fit may be off where two ways were measured */
#define GAIN  1.02 /* as a rule has to gain */
#define WORTH 1.2  /* a range that ends at so many times of where it begins is worth looking at */
#define APART \
    1.05 /* so much better is another way, to be worth a rule beside one that wins at both sizes */

static int default_of(uint8_t op)
{
    for (int i = 0; i < lc_tune_n_steps; i++) {
        if (lc_tune_steps[i].kind == LC_TUNE_AGAIN && lc_tune_steps[i].way.op == op)
            return i;
    }
    return -1;
}

int lc_tune_fit(const struct lc_tune_results *results, int step, struct lc_cost_fit *out)
{
    struct lc_cost_point points[LC_COST_POINTS];
    int n = 0;

    for (size_t i = 0; i < results->n_times && n < LC_COST_POINTS; i++) {
        if (results->times[i].step == step)
            points[n++] = (struct lc_cost_point){ results->times[i].bytes, results->times[i].us };
    }
    return lc_cost_fit(points, n, out);
}

/* By the ratio, which was measured against the default in the same rounds, where there is one. */
static double time_at(const struct lc_tune_results *results, int step, uint64_t bytes)
{
    int dflt = default_of(lc_tune_steps[step].way.op);
    const struct lc_tune_ratio *ratio = step == dflt ? NULL : lc_tune_find(results, step, bytes);

    return ratio ? lc_tune_time_of(results, dflt, bytes) / ratio->median
                 : lc_tune_time_of(results, step, bytes);
}

/* -EINVAL: not measured at both, or the fit is not to be trusted there. */
static int find_span(const struct lc_tune_results *results, int step, uint64_t low, uint64_t high,
                     struct lc_cost_span *out)
{
    struct lc_cost_span span = {
        .low = {low,   time_at(results, step, low) },
        .high = { high, time_at(results, step, high)}
    };

    if (!(span.low.us > 0 && span.high.us > 0) || lc_tune_fit(results, step, &span.fit) != 0 ||
        lc_cost_span_error(&span) > TRUST)
        return -EINVAL;
    *out = span;
    return 0;
}

struct crossing {
    struct lc_tune_point *a;
    const struct lc_tune_point *b;
    struct lc_cost_span low, high; /* of the ways of both, or the default */
};

/* What only may win is looked at again by itself: ranges of it would take time from what does. */
static bool is_certain(const struct lc_tune_point *point)
{
    return point->way < 0 || point->sure;
}

static bool find_spans(const struct lc_tune_results *results, uint8_t op, struct crossing *c)
{
    int low = c->a->way >= 0 ? c->a->way : default_of(op);
    int high = c->b->way >= 0 ? c->b->way : default_of(op);

    return find_span(results, low, c->a->bytes, c->b->bytes, &c->low) == 0 &&
           find_span(results, high, c->a->bytes, c->b->bytes, &c->high) == 0;
}

static uint64_t find_crossing(const struct crossing *c)
{
    if (c->a->way < 0)
        return lc_cost_cross(&c->low, &c->high, 1 / GAIN);
    if (c->b->way < 0)
        return lc_cost_cross(&c->low, &c->high, GAIN);
    if (c->a->next >= 0 &&
        (c->high.low.us < APART * c->low.low.us || c->low.high.us < APART * c->high.high.us))
        return 0;
    return lc_cost_cross(&c->low, &c->high, 1);
}

static const char *name_of(int step, char *out, size_t size)
{
    if (step < 0)
        return "NCCL's default";
    (void)snprintf(
        out, size, "%s %s %u", lc_profile_algorithm_name(lc_tune_steps[step].way.algorithm),
        lc_profile_protocol_name(lc_tune_steps[step].way.protocol), lc_tune_steps[step].way.width);
    return out;
}

static void say(const struct crossing *c, uint64_t at, char *said, size_t size)
{
    char low[LC_TUNE_LINE], high[LC_TUNE_LINE];
    size_t used = strlen(said);

    (void)snprintf(said + used, size - used,
                   "%s%s up to %llu, %s from there (fits are off by %.0f and %.0f %%)",
                   used ? "; " : "", name_of(c->a->way, low, sizeof(low)), (unsigned long long)at,
                   name_of(c->b->way, high, sizeof(high)), 100 * lc_cost_span_error(&c->low),
                   100 * lc_cost_span_error(&c->high));
}

void lc_tune_place_crossings(const struct lc_tune_results *results, struct lc_tune_choice *choice,
                             char *said, size_t size)
{
    said[0] = '\0';
    for (int i = 0; i + 1 < choice->n && choice->place.kind == LC_TUNE_NCCL; i++) {
        struct crossing c = { .a = &choice->point[i], .b = &choice->point[i + 1] };
        uint64_t at;

        if (c.a->way == c.b->way || !is_certain(c.a) || !is_certain(c.b) ||
            !find_spans(results, choice->place.op, &c))
            continue;
        at = find_crossing(&c);
        if (at == 0)
            continue;
        c.a->until = c.a->way >= 0 && (double)at > WORTH * (double)c.a->bytes ? at : 0;
        c.a->since = c.b->way >= 0 && (double)c.b->bytes > WORTH * (double)at ? at : 0;
        c.a->next = -1;
        say(&c, at, said, size);
    }
}
