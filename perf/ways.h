/* SPDX-License-Identifier: Apache-2.0
 *
 * `loongcomm-bench ways`: NCCL's ways to do a collective (algorithm, protocol, channels) beside its default, call by call in
 * turns of one job. The tuner for measuring (plugin/tuner/measure.h) sends each turn the way that its request names. */
#ifndef LC_PERF_WAYS_H
#define LC_PERF_WAYS_H

#include "perf/bench.h"

#define LC_WAYS_MAX    128 /* ways that are given */
#define LC_WAYS_CASES  288
#define LC_WAYS_FIXED  3                             /* default, again, profile */
#define LC_WAYS_FIELD  (LC_WAYS_MAX + LC_WAYS_FIXED) /* what one case may measure */
#define LC_WAYS_ROUNDS 40
#define LC_WAYS_LEAST  5   /* rounds, unless nobody has a chance */
#define LC_WAYS_WITHIN 2.2 /* of the fastest, by a look or two, which may well be that wrong */
#define LC_WAYS_NAME   48
#define LC_WAYS_FINAL  3 /* forced ways that are measured anew beside a profile */

enum lc_way_kind {
    LC_WAY_DEFAULT, /* NCCL's choice; the others' ratios are to it */
    LC_WAY_AGAIN,   /* the same: how far equal sides differ */
    LC_WAY_PROFILE, /* what the product's tuner makes of a profile */
    LC_WAY_FORCED,
};

struct lc_way {
    enum lc_way_kind kind;
    enum lc_bench_op op; /* FORCED */
    uint8_t algorithm, protocol;
    uint16_t channels;
    bool wide; /* on the communicator with more channels */
};

enum lc_way_state {
    LC_WAY_LEFT,      /* there was no time for it */
    LC_WAY_RULED_OUT, /* NCCL does not do it here: nothing was measured as it */
    LC_WAY_SAME,      /* what the default is, or more channels than there are, so as with fewer */
    LC_WAY_SLOW,      /* at a smaller size so far behind that it was not tried */
    LC_WAY_TRIED,     /* a first look: too far behind for more */
    LC_WAY_BEHIND,    /* some rounds, which say the same */
    LC_WAY_MEASURED,
};

/* A way at one case. */
struct lc_ways_entrant {
    const struct lc_way *way;
    enum lc_way_state state;
    double first_us; /* of the first look; 0: none */
    uint64_t choice; /* what NCCL has taken, a word of plugin/tuner/measure.h */
    int comms;       /* that took turns; 0: 1 */
    int rounds;
    double us[LC_WAYS_ROUNDS];    /* median of each round's samples */
    double ratio[LC_WAYS_ROUNDS]; /* NCCL's default's / it, of each round */
    int finals;
    double final[LC_WAYS_ROUNDS]; /* the same of rounds that nobody was chosen by */
};

struct lc_ways_options {
    struct lc_bench_options bench; /* of the one set of workers */
    struct lc_bench_case cases[LC_WAYS_CASES];
    int n_cases;
    struct lc_way ways[LC_WAYS_MAX];
    int n_ways;
    const char *profile;
    const char *tuner; /* NULL: beside this program */
    int ctas;          /* of the wide communicator, 0: there is none */
    int comms;         /* that take turns, equal ones */
    bool to_the_end;   /* rounds end with the time alone, where a profile is measured */
    bool help;
};

/* ways_options.c: 0, or a complaint on stderr and -EINVAL. */
int lc_ways_options_parse(int argc, char **argv, struct lc_ways_options *out);
void lc_ways_usage(FILE *out);

/* As `loongcomm tune` and its profiles say it: ring/ll/0, wide:ring/simple/8, default, again, profile. */
void lc_way_name(const struct lc_way *way, char out[LC_WAYS_NAME]);
int lc_way_parse(const char *text,
                 struct lc_way *out); /* OP:[wide:]ALGORITHM/PROTOCOL/CHANNELS; 0 or -EINVAL */

/* ways_choose.c: pure. */

/* Channels of the communicator that was made last, from what NCCL has logged of it; 0: it does not say. */
int lc_ways_channels(const char *text);

double lc_ways_median(const double *values, int n); /* NaN if there are none */

/* Which communicator a round is of. */
static inline int lc_ways_turn(int round, int comms)
{
    return comms > 1 ? round / 2 % comms
                     : 0; /* two rounds each, since every other one runs backwards */
}

/* The middle of an entrant's ratios: of each communicator's own, since they may have other luck each, and a median of all of
 * them is anywhere between. NaN without rounds. */
double lc_ways_ratio(const struct lc_ways_entrant *entrant);

/* By how much single rounds are off the medians of their ways, as a standard deviation, in which a few that are far off do not
 * count: of all that had rounds, since each may have had too few to tell. */
double lc_ways_noise(const struct lc_ways_entrant *field, int n);

/* What the median ratio is between, on either side in about 14 of 15 draws. */
void lc_ways_bounds(const struct lc_ways_entrant *entrant, double noise, double *low, double *high);

/* What a way that has had no look yet takes, in us, by the model of costs over round figures: good enough to say which of them
 * are to have one first. INFINITY: the model does not know it. */
double lc_ways_guess(const struct lc_way *way, size_t bytes, int ranks, int nodes);

/* Of the entrants that a first look was had at, marks those that are worth rounds: `keep` of them at most, the fastest, none
 * more than `within` (1.4: 40 %) behind the fastest; the first LC_WAYS_FIXED kinds always. */
void lc_ways_contenders(const struct lc_ways_entrant *field, int n, double within, int keep,
                        bool *in);

/* What forced ways may get rounds at all, when so many turns fit in the case's time. */
int lc_ways_keep(double turns);

/* After a round: takes out, and marks BEHIND, who is clearly behind the best, and at some rounds the later half, as few as
 * `turns`, which are left, allow. Who cannot be told from the best stays as long as there is time. */
void lc_ways_drop(struct lc_ways_entrant *field, int n, double turns, bool *in);

/* No way that is `in` can be what a profile would say, so more rounds are of no use to it. */
bool lc_ways_hopeless(const struct lc_ways_entrant *field, int n, const bool *in);

/* Where a profile is measured: more rounds would tell nothing, since no way that is `in` and that a tuner can give is better
 * than it by more than 3 %, nor is it slower than the default, whatever the median ratios are between their bounds. */
bool lc_ways_settled(const struct lc_ways_entrant *field, int n, const bool *in);

/* The best of many is also the luckiest, so what a profile is held against is measured anew: marks the forced ways (at most
 * LC_WAYS_FINAL, none that is wide or what the profile does) that seem better than the profile, and the default, itself
 * again and the profile. False, and nobody is marked: nothing seems better than the profile. */
bool lc_ways_finalists(const struct lc_ways_entrant *field, int n, bool *in);

/* Share of what is left of the time that a case may have; case `at` of the list. */
double lc_ways_share(const struct lc_bench_case *cases, int n, int at);

/* ways_case.c. `last`: the field of the next smaller size of the same operation, or NULL. */
#define LC_WAYS_COMMS (LC_BENCH_COMMS - 1) /* most that take turns; one is the wide one */
struct lc_ways_job {
    const struct lc_ways_options *options;
    struct lc_bench *bench;
    int channels[LC_BENCH_COMMS];                /* 0: not known */
    uint32_t used[LC_BENCH_COMMS][LC_BENCH_OPS]; /* algorithms, a bit each */
    bool warm[LC_BENCH_OPS];                     /* every way of it has been used once */
    int done;                                    /* cases that are written */
    const struct lc_bench_case *kase;            /* of the turn that is under way, */
    const struct lc_way *way;                    /* and its way; NULL: there is none */
};
int lc_ways_measure(struct lc_ways_job *job, const struct lc_bench_case *kase,
                    const struct lc_ways_entrant *last, int n_last, double budget_s,
                    struct lc_ways_entrant *out, int *n);

/* ways_output.c */
struct lc_ways_output;
int lc_ways_output_open(const struct lc_ways_job *job, int argc, char **argv,
                        struct lc_ways_output **out);
void lc_ways_output_case(struct lc_ways_output *output, const struct lc_bench_case *kase,
                         const struct lc_ways_entrant *field, int n);
int lc_ways_output_close(struct lc_ways_output *output, int left,
                         bool good); /* also after a failure */

#endif
