/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cost.h"
#include "common/profile.h"
#include "tests/check.h"

#include <errno.h>
#include <math.h>

enum {
    TREE = 0,
    RING = 1,
    COLLNET_CHAIN = 3,
    NVLS = 4,
    PAT = 6,
};
enum {
    LL,
    LL128,
    SIMPLE,
};

#define AR LC_PROFILE_ALL_REDUCE
#define AG LC_PROFILE_ALL_GATHER

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fabs(b);
}

static void steps_and_bytes_are_those_of_the_algorithm(void)
{
    static const struct {
        struct lc_cost_call call;
        double inside, between, bytes;
    } rows[] = {
        {{ AR, RING, SIMPLE, 0, 8, 1, 800 },                   14, 0,  1400},
        { { AR, RING, SIMPLE, 0, 8, 8, 800 },                  0,  14, 1400},
        { { AR, RING, LL, 0, 8, 2, 800 },                      12, 2,  2800},
        { { AG, RING, SIMPLE, 0, 8, 2, 800 },                  6,  1,  700 },
        { { AR, TREE, SIMPLE, 0, 16, 4, 80 },                  6,  4,  160 },
        { { AR, TREE, LL128, 0, 5, 5, 15 },                    0,  6,  32  },
        { { AG, PAT, SIMPLE, 0, 8, 8, 800 },                   0,  3,  700 },
        { { AR, NVLS, SIMPLE, 0, 8, 1, 800 },                  2,  0,  800 },
        { { LC_PROFILE_BROADCAST, RING, SIMPLE, 0, 4, 1, 80 }, 3,  0,  80  },
    };
    static const struct lc_cost_call unknown[] = {
        {AR,               PAT,           SIMPLE, 0, 8, 8, 1},
        { AG,              PAT,           SIMPLE, 0, 8, 2, 1},
        { AG,              TREE,          SIMPLE, 0, 8, 2, 1},
        { AR,              NVLS,          SIMPLE, 0, 8, 2, 1},
        { AR,              COLLNET_CHAIN, SIMPLE, 0, 8, 2, 1},
        { AR,              200,           SIMPLE, 0, 8, 2, 1},
        { AR,              RING,          9,      0, 8, 2, 1},
        { AR,              RING,          SIMPLE, 0, 1, 1, 1},
        { AR,              RING,          SIMPLE, 0, 2, 3, 1},
        { AR,              RING,          SIMPLE, 0, 2, 0, 1},
        { LC_PROFILE_SEND, RING,          SIMPLE, 0, 2, 1, 1},
    };
    struct lc_cost_terms terms;

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        CHECK(lc_cost_terms(&rows[i].call, &terms));
        CHECK(near(terms.inside, rows[i].inside) && near(terms.between, rows[i].between));
        CHECK(near(terms.bytes, rows[i].bytes));
    }
    for (size_t i = 0; i < sizeof(unknown) / sizeof(*unknown); i++) {
        CHECK(!lc_cost_terms(&unknown[i], &terms));
        CHECK(lc_cost_predict(&unknown[i], &lc_cost_guess) < 0);
    }
}

static double predict(uint8_t algorithm, uint8_t protocol, uint16_t channels, uint64_t bytes)
{
    static const struct lc_cost_wires wires = { 7, 3, 14, 400, 50, 20 };
    const struct lc_cost_call call = { AR, algorithm, protocol, channels, 64, 8, bytes };

    return lc_cost_predict(&call, &wires);
}

static void wires_say_what_is_expected_of_the_ways(void)
{
    CHECK(near(predict(RING, SIMPLE, 0, 64), 7 + 14 * 14 + 112 * 3 + 126 / 50e3));
    CHECK(predict(TREE, LL, 0, 64) < predict(RING, LL, 0, 64));
    CHECK(predict(RING, LL, 0, 64) < predict(RING, SIMPLE, 0, 64));
    CHECK(predict(RING, SIMPLE, 0, 1 << 30) < predict(RING, LL, 0, 1 << 30));
    CHECK(predict(RING, SIMPLE, 1, 1 << 30) >
          2 * predict(RING, SIMPLE, 4, 1 << 30)); /* 20 GB/s, 50 */
    CHECK(near(predict(RING, SIMPLE, 4, 1 << 30), predict(RING, SIMPLE, 32, 1 << 30)));
}

static void nothing_is_said_of_links_that_nobody_knows(void)
{
    struct lc_cost_wires wires = lc_cost_guess;
    const struct lc_cost_call inside = { AR, RING, SIMPLE, 4, 8, 1, 4096 };
    const struct lc_cost_call between = { AR, RING, SIMPLE, 4, 8, 8, 4096 };

    wires.inside_gbps = 300;
    CHECK(lc_cost_predict(&inside, &wires) > 0 && lc_cost_predict(&between, &wires) < 0);
    wires.between_gbps = 50;
    wires.inside_gbps = 0;
    CHECK(lc_cost_predict(&inside, &wires) < 0 && lc_cost_predict(&between, &wires) > 0);
}

static void fit_finds_the_terms_that_made_the_times(void)
{
    struct lc_cost_point points[8];
    struct lc_cost_fit fit;

    for (int i = 0; i < 8; i++) {
        points[i].bytes = (uint64_t)1024 << 2 * i;
        points[i].us = 40 + 0.02 * sqrt((double)points[i].bytes) + 3e-5 * (double)points[i].bytes;
    }
    CHECK(lc_cost_fit(points, 8, &fit) == 0);
    CHECK(fabs(fit.start_us - 40) < 0.01 && fabs(fit.root_us - 0.02) < 1e-4);
    CHECK(fabs(fit.byte_us - 3e-5) < 1e-8 && fit.error < 1e-6);
    CHECK(fit.n == 8 && fit.from == 1024 && fit.to == points[7].bytes);
    CHECK(fabs(lc_cost_at(&fit, 5000) - (40 + 0.02 * sqrt(5000) + 0.15)) < 0.01);

    CHECK(lc_cost_fit(points, 3, &fit) == 0 &&
          fit.root_us == 0); /* three sizes tell no third term */
    for (int i = 0; i < 8; i++)
        points[i].us = 1e4 / sqrt((double)points[i].bytes); /* faster the larger */
    CHECK(lc_cost_fit(points, 8, &fit) == 0);
    CHECK(fit.start_us >= 0 && fit.root_us >= 0 && fit.byte_us >= 0 && fit.error > 0.3);
}

static void what_is_no_measurement_is_refused(void)
{
    struct lc_cost_point points[LC_COST_POINTS + 1], bad[5];
    static const double times[] = { 0, -1, NAN, INFINITY };
    struct lc_cost_fit fit = { .start_us = 77 };

    for (int i = 0; i <= LC_COST_POINTS; i++)
        points[i] = (struct lc_cost_point){ (uint64_t)1000 * (i + 1), 10 + i };
    CHECK(lc_cost_fit(points, 2, &fit) == -EINVAL);
    CHECK(lc_cost_fit(points, LC_COST_POINTS + 1, &fit) == -EINVAL);
    for (size_t k = 0; k < sizeof(times) / sizeof(*times); k++) {
        for (int i = 0; i < 5; i++)
            bad[i] = points[i];
        bad[3].us = times[k];
        CHECK(lc_cost_fit(bad, 5, &fit) == -EINVAL);
    }
    for (int i = 0; i < 5; i++)
        bad[i] = points[i & 1];
    CHECK(lc_cost_fit(bad, 5, &fit) == -EINVAL); /* two sizes */
    CHECK(fit.start_us == 77);
    CHECK(lc_cost_fit(points, LC_COST_POINTS, &fit) == 0);
}

/* 8 ranks over sockets, one H200: ring and tree, over seven decades of time and size. */
static const struct lc_cost_point ring[] = {
    {32,         325.3   },
    { 1024,      353.3   },
    { 16384,     413.3   },
    { 65536,     459.3   },
    { 262144,    625.5   },
    { 1048576,   1478.6  },
    { 4194304,   3450.1  },
    { 16777216,  12812.1 },
    { 67108864,  42123.9 },
    { 268435456, 205231.0},
};
static const struct lc_cost_point tree[] = {
    {32,         270.3   },
    { 1024,      163.3   },
    { 16384,     202.7   },
    { 65536,     308.6   },
    { 262144,    579.4   },
    { 1048576,   1724.9  },
    { 4194304,   5337.1  },
    { 16777216,  19493.7 },
    { 67108864,  63228.2 },
    { 268435456, 270348.4},
};

static void measured_times_are_met(void)
{
    struct lc_cost_fit fit;

    CHECK(lc_cost_fit(ring, 10, &fit) == 0 && fit.error < 0.15);
    CHECK(lc_cost_fit(tree, 10, &fit) == 0 && fit.error < 0.2);
    for (int i = 1; i < 9; i++) { /* each from the others */
        struct lc_cost_point rest[9];

        for (int k = 0, n = 0; k < 10; k++) {
            if (k != i)
                rest[n++] = ring[k];
        }
        CHECK(lc_cost_fit(rest, 9, &fit) == 0);
        CHECK(fabs(log(lc_cost_at(&fit, ring[i].bytes) / ring[i].us)) < log(1.35));
    }
}

static struct lc_cost_span span(double start, double byte, double off)
{
    struct lc_cost_span out = {
        .fit = {.start_us = start, .byte_us = byte},
        .low = { 65536,            0              },
        .high = { 1 << 20,          0              }
    };

    out.low.us = lc_cost_at(&out.fit, out.low.bytes) * (1 + off);
    out.high.us = lc_cost_at(&out.fit, out.high.bytes) * (1 - off);
    return out;
}

static void crossing_is_where_both_take_as_long(void)
{
    struct lc_cost_span a = span(50, 1e-3, 0), b = span(300, 5e-4, 0); /* 500 kB */
    uint64_t at = lc_cost_cross(&a, &b, 1);

    CHECK(at % 512 == 0 && at > 499000 && at <= 500736);
    CHECK(lc_cost_cross(&b, &a, 1) == 0);
    CHECK(lc_cost_cross(&a, &a, 1) == 0);
    CHECK(lc_cost_cross(&a, &b, 0.9) > at); /* where it gains a tenth */
    CHECK(lc_cost_cross(&a, &b, 1.1) < at);
    CHECK(lc_cost_span_error(&a) < 1e-9);

    a = span(50, 1e-3, 0.05);
    CHECK(near(lc_cost_between(&a, 65536), a.low.us) &&
          near(lc_cost_between(&a, 1 << 20), a.high.us));
    CHECK(lc_cost_span_error(&a) > 0.04 && lc_cost_span_error(&a) < 0.06);
}

int main(void)
{
    steps_and_bytes_are_those_of_the_algorithm();
    wires_say_what_is_expected_of_the_ways();
    nothing_is_said_of_links_that_nobody_knows();
    fit_finds_the_terms_that_made_the_times();
    what_is_no_measurement_is_refused();
    measured_times_are_met();
    crossing_is_where_both_take_as_long();
    return 0;
}
