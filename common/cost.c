/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cost.h"

#include "common/profile.h"

#include <errno.h>
#include <math.h>
#include <string.h>

enum {
    TREE = 0,
    RING = 1,
    NVLS = 4,
    PAT = 6,
};

const struct lc_cost_wires lc_cost_guess = {
    .start_us = 7,
    .inside_us = 3,
    .between_us = 14,
    .a_channel_gbps = 20,
};

/* ll sends a flag with each word and waits for no fence; ll128 one with each line. */
static const struct {
    double step, payload;
} protocols[LC_PROFILE_PROTOCOLS] = {
    {0.25, 0.5   },
    { 0.5, 0.9375},
    { 1,   1     },
};

static double log2_up(uint32_t n)
{
    double steps = 0;

    for (uint64_t reached = 1; reached < n; reached *= 2)
        steps++;
    return steps;
}

/* All-reduce goes round twice. */
static double passes(unsigned op)
{
    return op == LC_PROFILE_ALL_REDUCE ? 2 : 1;
}

static bool is_shared(unsigned op)
{
    return op == LC_PROFILE_ALL_REDUCE || op == LC_PROFILE_ALL_GATHER ||
           op == LC_PROFILE_REDUCE_SCATTER;
}

bool lc_cost_terms(const struct lc_cost_call *call, struct lc_cost_terms *out)
{
    double ranks = call->ranks, nodes = call->nodes, bytes = (double)call->bytes;
    double of_others = (ranks - 1) / ranks; /* of the bytes, what a rank does not have */
    double local = ceil(ranks / nodes);
    struct lc_cost_terms terms = { 0 };

    if (call->ranks < 2 || call->nodes < 1 || call->nodes > call->ranks ||
        call->op > LC_PROFILE_ALL_REDUCE || call->protocol >= LC_PROFILE_PROTOCOLS)
        return false;
    switch (call->algorithm) {
    case RING:
        terms.between = passes(call->op) * (nodes - 1);
        terms.inside = passes(call->op) * (ranks - nodes);
        terms.bytes = is_shared(call->op) ? passes(call->op) * bytes * of_others : bytes;
        break;
    case TREE: /* a chain inside each node, and two trees over them */
        if (call->op != LC_PROFILE_ALL_REDUCE)
            return false;
        terms.between = 2 * log2_up(call->nodes);
        terms.inside = 2 * (local - 1);
        terms.bytes = 2 * bytes;
        break;
    case PAT:
        if (call->nodes != call->ranks ||
            (call->op != LC_PROFILE_ALL_GATHER && call->op != LC_PROFILE_REDUCE_SCATTER))
            return false;
        terms.between = log2_up(call->ranks);
        terms.bytes = bytes * of_others;
        break;
    case NVLS: /* the switch adds and multiplies */
        if (call->nodes != 1 || !is_shared(call->op))
            return false;
        terms.inside = passes(call->op);
        terms.bytes = bytes;
        break;
    default: return false;
    }
    terms.bytes /= protocols[call->protocol].payload;
    *out = terms;
    return true;
}

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

double lc_cost_predict(const struct lc_cost_call *call, const struct lc_cost_wires *wires)
{
    struct lc_cost_terms terms;
    double gbps = INFINITY;

    if (!lc_cost_terms(call, &terms))
        return -1;
    if (call->channels && wires->a_channel_gbps > 0)
        gbps = call->channels * wires->a_channel_gbps;
    if (call->ranks > call->nodes)
        gbps = smaller(gbps, wires->inside_gbps);
    if (call->nodes > 1)
        gbps = smaller(gbps, wires->between_gbps);
    if (!(gbps > 0))
        return -1;
    return wires->start_us +
           protocols[call->protocol].step *
               (terms.inside * wires->inside_us + terms.between * wires->between_us) +
           terms.bytes / gbps / 1e3;
}

/* --- least squares --- */

#define TERMS      3
#define ROOT_LEAST 5 /* sizes that tell a third term */

/* Of one term at one size, over the time that was measured, so that all sizes count alike. */
static double column(int term, const struct lc_cost_point *point)
{
    double bytes = (double)point->bytes;

    return (term == 0 ? 1 : term == 1 ? sqrt(bytes) : bytes) / point->us;
}

/* Gauss with pivots; false: the terms cannot be told apart. */
static bool solve(double m[TERMS][TERMS + 1], int n, double *out)
{
    for (int i = 0; i < n; i++) {
        int pivot = i;

        for (int k = i + 1; k < n; k++)
            pivot = fabs(m[k][i]) > fabs(m[pivot][i]) ? k : pivot;
        if (!(fabs(m[pivot][i]) > 1e-9))
            return false;
        for (int k = 0; k <= n; k++) {
            double held = m[i][k];

            m[i][k] = m[pivot][k];
            m[pivot][k] = held;
        }
        for (int k = i + 1; k < n; k++) {
            double factor = m[k][i] / m[i][i];

            for (int j = i; j <= n; j++)
                m[k][j] -= factor * m[i][j];
        }
    }
    for (int i = n - 1; i >= 0; i--) {
        out[i] = m[i][n];
        for (int k = i + 1; k < n; k++)
            out[i] -= m[i][k] * out[k];
        out[i] /= m[i][i];
    }
    return true;
}

static double squares(const struct lc_cost_point *points, int n, const double terms[TERMS])
{
    double sum = 0;

    for (int i = 0; i < n; i++) {
        double off = -1;

        for (int term = 0; term < TERMS; term++)
            off += terms[term] * column(term, &points[i]);
        sum += off * off;
    }
    return sum;
}

/* The terms of `set` (a bit each) that come nearest; false: one would be below 0, or they cannot be told apart. */
static bool fit_terms(const struct lc_cost_point *points, int n, unsigned set, double out[TERMS])
{
    double m[TERMS][TERMS + 1] = { 0 }, norm[TERMS] = { 0 }, found[TERMS];
    int term[TERMS];
    int count = 0;

    for (int k = 0; k < TERMS; k++) {
        for (int i = 0; i < n; i++)
            norm[k] += column(k, &points[i]) * column(k, &points[i]);
        norm[k] = sqrt(norm[k]);
        if (set >> k & 1)
            term[count++] = k;
    }
    for (int a = 0; a < count; a++) {
        for (int i = 0; i < n; i++) {
            double own = column(term[a], &points[i]) / norm[term[a]];

            for (int b = 0; b < count; b++)
                m[a][b] += own * column(term[b], &points[i]) / norm[term[b]];
            m[a][count] += own;
        }
    }
    if (!solve(m, count, found))
        return false;
    memset(out, 0, TERMS * sizeof(*out));
    for (int a = 0; a < count; a++) {
        if (!(found[a] >= 0))
            return false;
        out[term[a]] = found[a] / norm[term[a]];
    }
    return true;
}

static int count_sizes(const struct lc_cost_point *points, int n)
{
    int sizes = 0;

    for (int i = 0; i < n; i++) {
        bool is_new = true;

        for (int k = 0; k < i; k++)
            is_new &= points[k].bytes != points[i].bytes;
        sizes += is_new;
    }
    return sizes;
}

static bool is_point(const struct lc_cost_point *point)
{
    return point->us > 1e-6 && point->us < 1e12 && point->bytes > 0 &&
           point->bytes <= (uint64_t)1 << 60;
}

int lc_cost_fit(const struct lc_cost_point *points, int n, struct lc_cost_fit *out)
{
    double best[TERMS] = { 0 }, least = INFINITY;
    struct lc_cost_fit fit = { .n = n, .from = UINT64_MAX };
    int sizes, used = 1;

    if (n < LC_COST_LEAST || n > LC_COST_POINTS)
        return -EINVAL;
    for (int i = 0; i < n; i++) {
        if (!is_point(&points[i]))
            return -EINVAL;
        fit.from = points[i].bytes < fit.from ? points[i].bytes : fit.from;
        fit.to = points[i].bytes > fit.to ? points[i].bytes : fit.to;
    }
    sizes = count_sizes(points, n);
    if (sizes < LC_COST_LEAST)
        return -EINVAL;
    for (unsigned set = 1; set < 1u << TERMS; set++) {
        double terms[TERMS], sum;

        if ((set & 2 && sizes < ROOT_LEAST) || !fit_terms(points, n, set, terms))
            continue;
        sum = squares(points, n, terms);
        if (!(sum < least))
            continue;
        least = sum;
        memcpy(best, terms, sizeof(best));
        used = __builtin_popcount(set);
    }
    if (!isfinite(least))
        return -EINVAL;
    fit.start_us = best[0];
    fit.root_us = best[1];
    fit.byte_us = best[2];
    fit.error = sqrt(least / (n > used ? n - used : 1));
    *out = fit;
    return 0;
}

double lc_cost_at(const struct lc_cost_fit *fit, uint64_t bytes)
{
    return fit->start_us + fit->root_us * sqrt((double)bytes) + fit->byte_us * (double)bytes;
}

/* What was measured over what the fit says, as a logarithm. */
static double bend(const struct lc_cost_fit *fit, const struct lc_cost_point *point)
{
    return log(point->us / lc_cost_at(fit, point->bytes));
}

double lc_cost_between(const struct lc_cost_span *span, uint64_t bytes)
{
    double low = bend(&span->fit, &span->low), high = bend(&span->fit, &span->high);
    double share = log((double)bytes / (double)span->low.bytes) /
                   log((double)span->high.bytes / (double)span->low.bytes);

    return lc_cost_at(&span->fit, bytes) * exp(low + (high - low) * share);
}

double lc_cost_span_error(const struct lc_cost_span *span)
{
    double low = fabs(bend(&span->fit, &span->low)), high = fabs(bend(&span->fit, &span->high));

    return exp(low > high ? low : high) - 1;
}

uint64_t lc_cost_cross(const struct lc_cost_span *a, const struct lc_cost_span *b, double gain)
{
    uint64_t low = a->low.bytes, high = a->high.bytes;

    if (b->low.us < gain * a->low.us || b->high.us >= gain * a->high.us)
        return 0;
    while (high - low > 512) {
        uint64_t middle = low + (high - low) / 2;

        if (lc_cost_between(b, middle) < gain * lc_cost_between(a, middle))
            high = middle;
        else
            low = middle;
    }
    high -= high % 512;
    return high > a->low.bytes && high < a->high.bytes ? high : 0;
}
