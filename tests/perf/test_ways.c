/* SPDX-License-Identifier: Apache-2.0
 *
 * What `loongcomm-bench ways` decides from its figures, and what it is asked. */
#include "perf/ways.h"
#include "tests/check.h"

#include <string.h>

static const struct lc_way fixed = { .kind = LC_WAY_DEFAULT };
static const struct lc_way forced = { .kind = LC_WAY_FORCED };

static struct lc_ways_entrant look(const struct lc_way *way, double us)
{
    return (struct lc_ways_entrant){ .way = way, .first_us = us };
}

static void fastest_few_get_rounds(void)
{
    struct lc_ways_entrant field[] = { look(&fixed, 100), look(&forced, 50), look(&forced, 71),
                                       look(&forced, 60), look(&forced, 0),  look(&forced, 69) };
    bool in[6];

    lc_ways_contenders(field, 6, 1.4, 8, in);
    CHECK(in[0] && in[1] && !in[2] && in[3] && !in[4] && in[5]);
    lc_ways_contenders(field, 6, 1.4, 2, in);
    CHECK(in[0] && in[1] && !in[2] && in[3] && !in[4] && !in[5]);
    field[1].state = LC_WAY_SAME; /* as the default, which is measured by itself */
    lc_ways_contenders(field, 6, 1.4, 2, in);
    CHECK(in[0] && !in[1] && in[2] + in[3] + in[5] == 2);
    lc_ways_contenders(field, 6, 10, 0, in);
    CHECK(in[0] && !in[1] && !in[2] && !in[3] && !in[5]);
}

static struct lc_ways_entrant ran(const struct lc_way *way, double a, double b, double c)
{
    return (struct lc_ways_entrant){
        .way = way,
        .state = LC_WAY_MEASURED,
        .rounds = 3,
        .ratio = {a, b, c}
    };
}

static void who_is_clearly_behind_goes_and_who_is_within_chance_stays(void)
{
    struct lc_ways_entrant field[] = {
        ran(&fixed, 1, 1, 1),           ran(&forced, 1.2, 1.3, 1.25), /* the best */
        ran(&forced, 1.0, 1.02, 1.05), /* more behind than either median may be off */
        ran(&forced, 1.1, 1.1, 1.21),  /* whose own is as likely to be off */
        ran(&forced, 1.19, 1.19, 1.24), ran(&forced, 9, 9, 9), /* has gone before */
    };
    bool in[] = { true, true, true, true, true, false };

    lc_ways_drop(field, 6, 100, in);
    CHECK(in[0] && in[1] && !in[2] && in[3] && in[4] && !in[5]);
    CHECK(field[2].state == LC_WAY_BEHIND && field[3].state == LC_WAY_MEASURED);
    field[1].rounds = field[4].rounds = 2; /* too few to say anything */
    field[0].rounds = field[3].rounds = 2;
    field[3].ratio[0] = field[3].ratio[1] = 0.5;
    lc_ways_drop(field, 6, 100, in);
    CHECK(in[3]);
}

static void little_time_is_for_the_best(void)
{
    struct lc_ways_entrant field[8] = { ran(&fixed, 1, 1, 1) };
    bool in[8];

    for (int i = 0; i < 8; i++) {
        if (i)
            field[i] = ran(&forced, 0.9, 1 + i / 100.0, 1.2);
        in[i] = true;
    }
    lc_ways_drop(field, 8, 1000, in);
    for (int i = 0; i < 8; i++)
        CHECK(in[i]);
    lc_ways_drop(field, 8, 5, in);
    CHECK(in[0] && in[7] && in[6] && !in[5] && !in[1]);
    CHECK(lc_ways_keep(0) == 2 && lc_ways_keep(200) > 20 && lc_ways_keep(1e9) == LC_WAYS_MAX);
}

static void rounds_end_where_nobody_gains(void)
{
    struct lc_ways_entrant field[] = { ran(&fixed, 1, 1, 1), ran(&forced, 0.96, 0.97, 0.98) };
    bool in[] = { true, true };

    CHECK(lc_ways_hopeless(field, 2, in));
    field[1].ratio[2] = 1.03;
    CHECK(!lc_ways_hopeless(field, 2, in));
    in[1] = false;
    CHECK(lc_ways_hopeless(field, 2, in));
    field[0].rounds = 2;
    CHECK(!lc_ways_hopeless(field, 2, in));
}

/* As one job of eight ranks had it at 16 MB, of which ring/simple/1 gained 4 % in all others. */
static void few_rounds_of_bad_luck_end_nothing(void)
{
    static const struct lc_way again = { .kind = LC_WAY_AGAIN };
    static const double rounds[][5] = {
        {0.62,  1.00, 0.90, 0.95, 1.00},
        { 0.87, 1.03, 0.97, 0.81, 0.99},
        { 0.70, 1.02, 0.92, 1.06, 0.86},
        { 0.83, 0.93, 0.80, 0.83, 0.83},
    };
    struct lc_ways_entrant field[] = { ran(&again, 1, 1, 1), ran(&forced, 1, 1, 1),
                                       ran(&forced, 1, 1, 1), ran(&forced, 1, 1, 1) };
    bool in[] = { true, true, true, false };

    for (int i = 0; i < 4; i++) {
        for (int round = 0; round < LC_WAYS_ROUNDS; round++)
            field[i].ratio[round] = rounds[i][round % 5];
        field[i].comms = 2;
        field[i].rounds = i < 3 ? 5 : 3;
    }
    CHECK(!lc_ways_hopeless(field, 4, in));
    for (int i = 0; i < 3; i++)
        field[i].rounds = 40; /* then it is no luck */
    CHECK(lc_ways_hopeless(field, 4, in));
}

static struct lc_ways_entrant chose(const struct lc_way *way, double ratio, uint64_t choice)
{
    struct lc_ways_entrant e = ran(way, ratio, ratio, ratio);

    e.choice = choice;
    return e;
}

static void what_seems_better_than_a_profile_is_measured_anew(void)
{
    static const struct lc_way again = { .kind = LC_WAY_AGAIN },
                               profile = { .kind = LC_WAY_PROFILE },
                               wide = { .kind = LC_WAY_FORCED, .wide = true };
    struct lc_ways_entrant field[] = {
        chose(&fixed, 1, 1),     chose(&again, 1, 1),      chose(&profile, 1.2, 2),
        chose(&forced, 1.3, 3),  chose(&forced, 1.205, 4), /* hardly better */
        chose(&forced, 1.5, 2),                            /* the profile's own */
        chose(&wide, 3, 5),      chose(&forced, 1.4, 6),   /* has gone before */
        chose(&forced, 1.22, 7), chose(&forced, 1.25, 8),  chose(&forced, 1.24, 9),
    };
    static const bool want[] = { true,  true,  true,  true, false, false,
                                 false, false, false, true, true };
    bool in[11];

    field[7].state = LC_WAY_BEHIND;
    CHECK(lc_ways_finalists(field, 11, in));
    for (int i = 0; i < 11; i++)
        CHECK(in[i] == want[i]);
    CHECK(!lc_ways_finalists(field, 3, in) && !in[0] && !in[2]); /* nothing is better */
    CHECK(!lc_ways_finalists(field, 2, in));                     /* and here is no profile */
    field[2] = chose(&profile, 0.95, 2);
    CHECK(lc_ways_finalists(field, 3, in) && in[0] && in[1] && in[2]); /* the default is */
    field[2].choice = 1;
    CHECK(!lc_ways_finalists(field, 3, in)); /* which it also does */
}

static struct lc_ways_entrant nine(const struct lc_way *way, double ratio, double off,
                                   uint64_t choice)
{
    struct lc_ways_entrant e = { .way = way, .state = LC_WAY_MEASURED, .choice = choice };

    for (e.rounds = 0; e.rounds < 9; e.rounds++)
        e.ratio[e.rounds] = ratio * (1 + off * (e.rounds % 3 - 1));
    return e;
}

static void rounds_end_where_a_profile_is_surely_no_worse(void)
{
    static const struct lc_way profile = { .kind = LC_WAY_PROFILE },
                               wide = { .kind = LC_WAY_FORCED, .wide = true };
    struct lc_ways_entrant field[] = {
        nine(&fixed, 1, 0, 1),       nine(&profile, 1.2, 0.01, 2),
        nine(&forced, 1.2, 0.01, 3),                            /* within 3 % of it, */
        nine(&forced, 1.3, 0.01, 2), nine(&wide, 3, 0.01, 4),   /* itself, not to be had, */
        nine(&forced, 1.5, 0.01, 5), nine(&forced, 1, 0.01, 6), /* dropped, far behind */
    };
    bool in[] = { true, true, true, true, true, false, true };

    CHECK(lc_ways_settled(field, 7, in));
    field[2] = nine(&forced, 1.23, 0.01, 3); /* its median may well be more than that */
    CHECK(!lc_ways_settled(field, 7, in));
    field[2] = nine(&forced, 1.2, 0.06, 3);
    CHECK(!lc_ways_settled(field, 7, in));
    in[2] = false;
    CHECK(lc_ways_settled(field, 7, in));
    field[1] = nine(&profile, 1.005, 0.03, 2); /* may be slower than the default, */
    in[3] = in[6] = false;
    CHECK(!lc_ways_settled(field, 7, in));
    field[1].choice = 1; /* unless it is that */
    CHECK(lc_ways_settled(field, 7, in));
    for (int i = 0; i < 7; i++)
        field[i].rounds = 8;
    CHECK(!lc_ways_settled(field, 7, in));
    CHECK(!lc_ways_settled(field, 1, in)); /* there is no profile */
}

static void median_is_between_bounds_that_outliers_do_not_move(void)
{
    struct lc_ways_entrant field[] = {
        ran(&fixed, 1, 1, 1),
        {.way = &forced,  .rounds = 15},
        { .way = &forced, .rounds = 15}
    };
    double noise, low, high;

    CHECK(lc_ways_noise(field, 1) == 0); /* the default's ratios say nothing */
    for (int i = 0; i < 15; i++) {
        field[1].ratio[i] = i < 2 ? 0.1 : i < 4 ? 9 : 1.1 + (i % 3 - 1) * 0.03;
        field[2].ratio[i] = 1 + (i % 3 - 1) * 0.04;
    }
    noise = lc_ways_noise(field, 3);
    CHECK(noise > 0.02 && noise < 0.08);
    lc_ways_bounds(&field[1], noise, &low, &high);
    CHECK(low > 1.03 && low < 1.1 && high > 1.1 && high < 1.17);
    field[1].rounds = 4;
    lc_ways_bounds(&field[2], noise, &low, &high);
    CHECK(low < 1 && high > 1);
    lc_ways_bounds(&field[2], 10 * noise, &low, &high);
    CHECK(low < 0.9 && high > 1.1); /* its own rounds may be alike by luck */
    lc_ways_bounds(&field[0], noise, &low, &high);
    CHECK(low == 1 && high == 1);
}

static void each_communicator_counts_as_much(void)
{
    struct lc_ways_entrant e = {
        .way = &forced,
        .rounds = 5,
        .ratio = {1.3, 1.2, 1, 1, 1.25}
    };

    CHECK(lc_ways_ratio(&e) == 1.2); /* of one */
    e.comms = 2;
    CHECK(lc_ways_ratio(&e) == (1.25 + 1) / 2);
    e.comms = 3;
    e.ratio[4] = 1.6;
    CHECK(lc_ways_ratio(&e) > 1.28 && lc_ways_ratio(&e) < 1.29);
    e.comms = 4; /* the last one has had no round yet */
    CHECK(lc_ways_ratio(&e) > 1.28 && lc_ways_ratio(&e) < 1.29);
    e.rounds = 0;
    CHECK(!(lc_ways_ratio(&e) > 0));
}

static void dear_cases_get_more_time(void)
{
    const struct lc_bench_case cases[] = {
        {.op = LC_BENCH_ALLGATHER,  .bytes = 8        },
        { .op = LC_BENCH_ALLGATHER, .bytes = 256 << 20},
        { .op = LC_BENCH_ALLREDUCE, .bytes = 256 << 20}
    };
    double all = lc_ways_share(cases, 3, 0) +
                 lc_ways_share(cases, 3, 1) * (1 - lc_ways_share(cases, 3, 0));

    CHECK(lc_ways_share(cases, 3, 0) > 0.05 && lc_ways_share(cases, 3, 0) < 0.15);
    CHECK(all < 0.5 && lc_ways_share(cases, 3, 2) == 1);
}

static bool is_likelier(const char *a, const char *b, size_t bytes)
{
    struct lc_way one, other;

    CHECK(lc_way_parse(a, &one) == 0 && lc_way_parse(b, &other) == 0);
    return lc_ways_guess(&one, bytes, 8, 8) < lc_ways_guess(&other, bytes, 8, 8);
}

static void who_was_never_looked_at_is_guessed_by_steps_and_bytes(void)
{
    CHECK(is_likelier("allreduce:tree/ll/0", "allreduce:ring/ll/0", 1024));
    CHECK(is_likelier("allreduce:ring/ll/0", "allreduce:ring/simple/0", 1024));
    CHECK(is_likelier("allreduce:ring/simple/0", "allreduce:tree/ll/0", 64 << 20));
    CHECK(is_likelier("allreduce:ring/simple/0", "allreduce:ring/simple/1", 64 << 20));
    CHECK(is_likelier("allgather:pat/simple/0", "allgather:ring/simple/0", 64 << 10));
    CHECK(
        is_likelier("allgather:pat/simple/0", "allgather:nvls/simple/0", 1024)); /* unknown there */
}

static void channels_are_those_of_the_last_communicator(void)
{
    CHECK(lc_ways_channels("") == 0 && lc_ways_channels("2 coll") == 0);
    CHECK(lc_ways_channels("NCCL INFO 2 coll channels, 2 collnet channels") == 2);
    CHECK(lc_ways_channels("a 2 coll channels, 2\nb 16 coll channels, 4 nvls channels") == 16);
    CHECK(lc_ways_channels(" coll channels,") == 0 && lc_ways_channels("x coll channels,") == 0);
    CHECK(lc_ways_channels("12 coll channels,") == 12);
    CHECK(lc_ways_channels("99999999999999999999 coll channels,") >= 0);
}

static void ways_are_read_as_they_are_written(void)
{
    static const char *const good[] = { "ring/ll/0", "tree/ll128/2", "wide:pat/simple/8",
                                        "nvls/simple/1024" };
    static const char *const bad[] = { "",
                                       "ring",
                                       "ring/ll",
                                       "ring/ll/",
                                       "ring/ll/-1",
                                       "ring/ll/1x",
                                       "ring/ll/1025",
                                       "ring/ll/0/0",
                                       "ing/ll/0",
                                       "ring/simpler/0",
                                       "wide:wide:ring/ll/0" };
    char text[64], name[LC_WAYS_NAME];
    struct lc_way way;

    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        snprintf(text, sizeof(text), "allreduce:%s", good[i]);
        CHECK(lc_way_parse(text, &way) == 0 && way.op == LC_BENCH_ALLREDUCE);
        lc_way_name(&way, name);
        CHECK(strcmp(name, good[i]) == 0);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        snprintf(text, sizeof(text), "allgather:%s", bad[i]);
        CHECK(lc_way_parse(text, &way) != 0);
    }
    CHECK(lc_way_parse("alltoall:ring/ll/0", &way) != 0 && lc_way_parse("ring/ll/0", &way) != 0);
}

int main(void)
{
    fastest_few_get_rounds();
    who_is_clearly_behind_goes_and_who_is_within_chance_stays();
    little_time_is_for_the_best();
    rounds_end_where_nobody_gains();
    few_rounds_of_bad_luck_end_nothing();
    rounds_end_where_a_profile_is_surely_no_worse();
    what_seems_better_than_a_profile_is_measured_anew();
    median_is_between_bounds_that_outliers_do_not_move();
    each_communicator_counts_as_much();
    dear_cases_get_more_time();
    who_was_never_looked_at_is_guessed_by_steps_and_bytes();
    channels_are_those_of_the_last_communicator();
    ways_are_read_as_they_are_written();
    return 0;
}
