/* SPDX-License-Identifier: Apache-2.0
 *
 * How long one of NCCL's ways takes, by the model of Hockney: so many steps, each with its latency, and so many bytes over
 * the narrowest link.
 *
 *     time = start + steps x latency of a step + bytes on the wire / bandwidth
 *
 * Steps and bytes follow from algorithm, operation, ranks and nodes. Latencies and bandwidths are first those of the wires
 * (lc_cost_wires: what a topology says, and round figures where it says nothing); then those of what was measured of
 * one way (lc_cost_fit), least squares of relative errors, with a third term between the two: where a message is cut
 * into chunks that follow each other, and larger messages into more of them, time grows with the root of its size.
 *
 * It is no more than what the figures allow. A prediction from wires alone orders candidates, and decides nothing. A fit holds
 * between the sizes that it is of: ways of 8 ranks over sockets, predicted from sizes up to a quarter of theirs, would
 * take five to ten times what they took, since NCCL cuts larger messages into other chunks; so no way is left out by it.
 * Pure functions; any thread. */
#ifndef LC_COMMON_COST_H
#define LC_COMMON_COST_H

#include <stdbool.h>
#include <stdint.h>

/* Of one direction. GB/s: bytes per nanosecond. */
struct lc_cost_wires {
    double start_us;       /* what any call costs */
    double inside_us;      /* a step between ranks of one node, by the simple protocol; */
    double between_us;     /* and one between nodes */
    double inside_gbps;    /* the narrowest way between neighbours of one node; 0: not known */
    double between_gbps;   /* all ports of a node together; 0: not known */
    double a_channel_gbps; /* what one channel moves at most */
};

/* Round figures without a topology: the order of magnitude that NCCL's public tables have for NVLink and InfiniBand. */
extern const struct lc_cost_wires lc_cost_guess;

/* Numbers as in common/profile.h. `bytes` as NCCL counts them: all-gather and reduce-scatter of all ranks' parts. */
struct lc_cost_call {
    uint8_t op, algorithm, protocol;
    uint16_t channels; /* 0: as many as there are, which is not known: they limit nothing */
    uint32_t ranks, nodes;
    uint64_t bytes;
};

struct lc_cost_terms {
    double inside, between; /* steps, one behind the other */
    double bytes; /* that the busiest link carries in one direction, with what the protocol adds */
};

/* False: the algorithm does not do that operation, or not there, or nothing is known of its steps (collnet, nvls-tree). */
bool lc_cost_terms(const struct lc_cost_call *call, struct lc_cost_terms *out);

/* Microseconds; below 0: not known (no terms, or no bandwidth of a link that is used). */
double lc_cost_predict(const struct lc_cost_call *call, const struct lc_cost_wires *wires);

/* --- from what was measured of one way --- */

struct lc_cost_point {
    uint64_t bytes;
    double us;
};

#define LC_COST_POINTS 64 /* at most */
#define LC_COST_LEAST  3  /* sizes, for a fit */

struct lc_cost_fit {
    double start_us;   /* of a message without bytes: start + steps x latency */
    double root_us;    /* for each root of a byte; 0 with fewer than five sizes */
    double byte_us;    /* for each byte */
    double error;      /* relative, as a standard deviation of the points around it */
    int n;             /* points */
    uint64_t from, to; /* the smallest and the largest of them */
};

/* 0; -EINVAL: fewer than LC_COST_LEAST different sizes, more points than LC_COST_POINTS, or times that are none. No term
 * is below 0. */
int lc_cost_fit(const struct lc_cost_point *points, int n, struct lc_cost_fit *out);
double lc_cost_at(const struct lc_cost_fit *fit, uint64_t bytes); /* microseconds */

/* Between two measured sizes: the fit, bent so that it is what was measured at both. */
struct lc_cost_span {
    struct lc_cost_fit fit;
    struct lc_cost_point low, high; /* measured; ascending */
};
double lc_cost_between(const struct lc_cost_span *span, uint64_t bytes);

/* How far the fit is off at the ends, relative, the worse of both. */
double lc_cost_span_error(const struct lc_cost_span *span);

/* The size between both ends, which are the same for `a` and `b`, from which on `b` takes less than `a` times `gain`; 0:
 * it is not so that a is better at the low end and b at the high one, or there is nothing between. A multiple of 512. */
uint64_t lc_cost_cross(const struct lc_cost_span *a, const struct lc_cost_span *b, double gain);

#endif
