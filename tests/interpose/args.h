/* SPDX-License-Identifier: Apache-2.0
 *
 * A function that takes and returns values in every way that the calling convention has. */
#ifndef LC_TESTS_ARGS_H
#define LC_TESTS_ARGS_H

struct args_big {
    long part[16];
};

struct args_result {
    double floats;
    long sum;
    long more[4]; /* too large for registers: returned through a hidden pointer */
};

#define ARGS_BIG                                                                  \
    {                                                                             \
        {                                                                         \
            10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160 \
        }                                                                         \
    }

/* Each argument by its place, so that two that were exchanged are seen. */
#define ARGS_SUM (1 + 2 * 2 + 3 * 3 + 4 * 4 + 5 * 5 + 6 * 6 + 7 * 7 + 8 * 160)
#define ARGS_FLOATS \
    (1.5 + 2 * 2.5 + 3 * 3.5 + 4 * 4.5 + 5 * 5.5 + 6 * 6.5 + 7 * 7.5 + 8 * 8.5 + 9 * 9.5)

typedef struct args_result args_fn(long a, long b, long c, long d, long e, long f, double p,
                                   double q, double r, double s, double t, double u, double v,
                                   double w, long g, double x, struct args_big big);

#endif
