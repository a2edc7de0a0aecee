/* SPDX-License-Identifier: Apache-2.0
 *
 * `loongcomm tune`: measures what is fastest on this machine and writes a profile, or says what a profile and the settings
 * make of one call. One thread. */
#ifndef LC_CLI_TUNE_H
#define LC_CLI_TUNE_H

#include "common/cost.h"
#include "common/profile.h"

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Of a file: all sizes and ways with all rounds are less than 4 MB. */
#define LC_TUNE_TEXT_MAX ((size_t)64 << 20)

#define LC_TUNE_LINE   192 /* room for a rule, or a step, as a line */
#define LC_TUNE_HOW    512
#define LC_TUNE_STEPS  128
#define LC_TUNE_PLACES 9
#define LC_TUNE_SIZES  32                  /* that one step measures, at most */
#define LC_TUNE_POINTS (2 * LC_TUNE_SIZES) /* the sizes and what is between them */
#define LC_TUNE_CHECKS \
    (3 * LC_TUNE_SIZES) /* what a second look needs: the sizes and two between each and the next */

/* What is compared with plain NCCL: the second side of a run of loongcomm-bench, or one of NCCL's ways, all of which take
 * turns in one job (`loongcomm-bench ways`). */
enum lc_tune_kind {
    LC_TUNE_EQUAL, /* NCCL again: how far equal sides differ */
    LC_TUNE_CAST,  /* bf16 through NCCL, which a rule for a bf16 wire competes with */
    LC_TUNE_RINGS, /* the way is a rule's */
    LC_TUNE_NCCL,  /* the same, a turn of the one job */
    LC_TUNE_AGAIN, /* of which this is NCCL's default again */
    LC_TUNE_KINDS,
};

struct lc_tune_step {
    enum lc_tune_kind kind;
    struct lc_profile_rule
        way; /* without ranks, nodes and range; EQUAL, CAST and AGAIN: operation and wire alone */
};

/* Ratios NCCL / side of one size: above 1 the side is faster. Of turns of the one job, p10 and p90 are what the median is
 * between (`low` and `high` of loongcomm-bench). */
struct lc_tune_ratio {
    double median, p10, p90;
};

struct lc_tune_figure {
    int step;
    uint64_t bytes;
    struct lc_tune_ratio ratio;
};

/* How long a call of one of NCCL's ways took, be it in rounds or in a first look alone; of AGAIN: of the default. */
struct lc_tune_time {
    int step;
    uint64_t bytes;
    double us;
};

enum lc_tune_state {
    LC_TUNE_OPEN,
    LC_TUNE_DONE,
    LC_TUNE_FAILED,
};

/* All that has been measured. */
struct lc_tune_results {
    char gpu[96];
    char how[LC_TUNE_HOW]; /* the options that decide what a figure is of */
    int nccl; /* as ncclGetVersion counts; 0: nothing has run yet, then ranks and nodes are not known either */
    int ranks, nodes;
    uint8_t state[LC_TUNE_STEPS]; /* enum lc_tune_state */
    struct lc_tune_figure *figures;
    size_t n, room;
    struct lc_tune_time *times;
    size_t n_times, times_room;
};

/* tune_steps.c: what there is to measure, the most valuable first. */
extern const struct lc_tune_step lc_tune_steps[];
extern const int lc_tune_n_steps;
void lc_tune_step_name(const struct lc_tune_step *step, char *out, size_t size);
bool lc_tune_step_takes(const struct lc_tune_step *step, int ranks, uint64_t bytes);
bool lc_tune_step_is_turn(const struct lc_tune_step *step); /* of the one job */

/* tune_output.c. Beside its name, then renamed: whoever reads it sees all or nothing. 0 or -errno, after a line on standard
 * error. */
int lc_tune_write_file(const char *path, void (*write)(FILE *out, const void *arg),
                       const void *arg);

/* tune_state.c. 0 or -errno, after a line on standard error. */
int lc_tune_add(struct lc_tune_results *results, int step, uint64_t bytes,
                const struct lc_tune_ratio *ratio);
int lc_tune_add_time(struct lc_tune_results *results, int step, uint64_t bytes, double us);
double lc_tune_time_of(const struct lc_tune_results *results, int step,
                       uint64_t bytes);                         /* us; 0: not known */
void lc_tune_forget(struct lc_tune_results *results, int step); /* its figures and times */
void lc_tune_free(struct lc_tune_results *results);             /* what it holds */
void lc_tune_figures_path(const char *profile, int ranks, int nodes, char out[PATH_MAX]);
int lc_tune_save(const struct lc_tune_results *results, const char *path);
int lc_tune_load(const char *path,
                 struct lc_tune_results *out); /* -ENOENT: there is none, silently */
const struct lc_tune_ratio *lc_tune_find(const struct lc_tune_results *results, int step,
                                         uint64_t bytes);

/* tune_rules.c: what follows from the figures. Pure. */

bool lc_tune_is_ratio(const struct lc_tune_ratio *ratio); /* figures above 0, and numbers */

/* Rules of one place exclude each other. */
struct lc_tune_place {
    enum lc_tune_kind kind; /* RINGS or NCCL */
    uint8_t op, wire;
};

/* With `next` there is neither `until` nor `since`. */
struct lc_tune_point {
    uint64_t bytes;
    int way;                    /* a step that wins at this size, or may; -1: none */
    bool sure;                  /* it has won in the first look alone */
    int next;                   /* one that wins here and at the next point, thus in between; -1 */
    uint64_t until;             /* behind the point `way` goes on up to here; 0: not */
    uint64_t since;             /* from here on it is the next point's way; 0: not */
    struct lc_tune_ratio won;   /* where way >= 0 */
    struct lc_tune_ratio least; /* what has to be exceeded */
};

struct lc_tune_choice {
    struct lc_tune_place place;
    struct lc_tune_point point[LC_TUNE_POINTS]; /* ascending */
    int n;
};

extern const struct lc_tune_place lc_tune_places[];
extern const int lc_tune_n_places;

void lc_tune_choose(const struct lc_tune_results *results, const struct lc_tune_place *place,
                    struct lc_tune_choice *out);
bool lc_tune_has_rules(const struct lc_tune_choice *choice);

/* What a second look at the chosen rules found, `recheck` being the ratios at the points and between them: they stay where they
 * win again, or, of NCCL's ways at a point, where both looks together say that they win. */
struct lc_tune_recheck {
    uint64_t bytes;
    struct lc_tune_ratio ratio;
    struct lc_tune_ratio equal; /* of equal sides in that run; zeros: not measured there */
};
void lc_tune_confirm(struct lc_tune_choice *choice, const struct lc_tune_recheck *recheck, int n);

/* A second look may have bad luck as the first had good. True: `after` it, much has gone that had surely won `before`, so that
 * a third look is worth its time. */
bool lc_tune_is_disputed(const struct lc_tune_choice *before, const struct lc_tune_choice *after);

/* Without what may win, but did not surely. */
void lc_tune_keep_sure(struct lc_tune_choice *choice);

/* What one of the two looks has confirmed stays: `other` is the same choice after the other. */
void lc_tune_merge(struct lc_tune_choice *choice, const struct lc_tune_choice *other);

/* All sizes that a second look needs, ascending; what it does not look at is not confirmed. The number. */
int lc_tune_recheck_sizes(const struct lc_tune_choice *choice, uint64_t sizes[LC_TUNE_CHECKS]);

/* Rules of a choice, and for each the least and the best ratio of its points. The number, at most LC_TUNE_POINTS * 2. */
struct lc_tune_rule {
    struct lc_profile_rule rule;
    struct lc_tune_ratio worst;
    double best;
};
int lc_tune_rules(const struct lc_tune_choice *choice, int ranks, int nodes,
                  struct lc_tune_rule *out);

/* tune_cost.c: what common/cost.h makes of the times. */

/* -EINVAL: too few were measured. */
int lc_tune_fit(const struct lc_tune_results *results, int step, struct lc_cost_fit *out);

/* Between points of which different ways win, or one and the default, says by the fits how far each goes (`until`, `since`), where
 * they are near what was measured at both points; only of NCCL's ways. `said`: room for a line of it, "" if nothing. */
void lc_tune_place_crossings(const struct lc_tune_results *results, struct lc_tune_choice *choice,
                             char *said, size_t size);

/* tune_bench.c: one comparison by loongcomm-bench. */
struct lc_tune_tools {
    char bench[PATH_MAX], plugin[PATH_MAX]; /* of the tuner; "": there is none */
    char *const *launcher;    /* NULL-terminated words in front of the bench's; NULL */
    int ranks;                /* 0: as the bench does */
    char candidate[PATH_MAX]; /* the profile that the second side uses */
    char json[PATH_MAX];      /* what the bench writes */
    char reports[PATH_MAX];   /* folder for what the library says of its calls */
    const char *live;         /* share of rows of an all-to-all that are not zero */
    bool graph;               /* calls are captured and replayed */
    const char *keep;         /* KEEP.ways.1 and so on hold what jobs of NCCL's ways wrote; NULL */
};

struct lc_tune_run {
    enum lc_tune_kind kind;
    uint8_t op, wire;
    bool two_types;        /* fp32 and bf16; the worse ratio of a size counts */
    int ranks;             /* as far as they are known */
    const uint64_t *sizes; /* ascending */
    int n_sizes;
    double budget_s;
    double settle_s; /* before, for ranks to agree */
};

/* What the benchmark has run on. */
struct lc_tune_machine {
    int nccl, ranks, nodes;
    bool rig; /* host memory instead of GPUs */
};

struct lc_tune_found {
    struct lc_tune_machine machine;
    double taken; /* share of calls that went through mapped memory; below 0: not known */
    struct lc_tune_recheck at[LC_TUNE_CHECKS];
    int n;
    char why[512]; /* of a failure, or what the bench warns of */
};

/* NCCL's ways in one job, for sums and all-gathers at sizes of their own. */
struct lc_tune_turns {
    const bool *wanted;          /* of the steps; NULL: none, but what the candidate says */
    int n_sizes[LC_PROFILE_OPS]; /* 0: not this operation */
    uint64_t sizes[LC_PROFILE_OPS][LC_TUNE_CHECKS];
    double budget_s;
};

struct lc_tune_turn {
    int step; /* -1: what the tuner made of the candidate */
    uint8_t op;
    bool measured; /* else there is no ratio, but */
    double us;     /* how long a call took; 0: not known */
    struct lc_tune_recheck at;
};

struct lc_tune_turned {
    struct lc_tune_machine machine;
    int left;    /* sizes that time, or the job's end, did not allow */
    bool died;   /* `why` says of what; what there is was measured before */
    int culprit; /* the step under way then; -1: none of the steps, or it is not known */
    struct lc_tune_turn *turns; /* the caller's to free */
    size_t n, room;
    char why[512];
};

int lc_tune_find_tools(
    struct lc_tune_tools *out); /* 0, or -ENOENT after a line on standard error */
int lc_tune_compare(const struct lc_tune_tools *tools, const struct lc_tune_run *run,
                    struct lc_tune_found *out);

/* For the command lines of both. */
#define LC_TUNE_ARGS   512
#define LC_TUNE_WAIT_S 60 /* for one rank's answer */
struct lc_tune_command {
    char *word[LC_TUNE_ARGS];
    int n;
    char text[32768]; /* of the words that are made here */
    size_t used;
};
#define LC_TUNE_LIST (LC_TUNE_CHECKS * 21) /* room for so many sizes, a comma behind each */
void lc_tune_word(struct lc_tune_command *command, const char *word);
__attribute__((format(printf, 2, 3))) void lc_tune_wordf(struct lc_tune_command *command,
                                                         const char *format, ...);
const char *lc_tune_bench_op(uint8_t op);

/* 0: it has ended well, and `why` is its last line; -EIO: why not. */
int lc_tune_run_bench(struct lc_tune_command *command, double budget_s, char *why, size_t size);

/* tune_read.c: what the bench has written. */
struct lc_tune_record {
    char op[32], way[64]; /* "": not said */
    uint64_t bytes;
    bool measured;              /* to the end: not dropped after a few rounds */
    double us;                  /* the median of its rounds, else of the first look; 0: none */
    struct lc_tune_ratio ratio; /* zeros: none */
    double low, high;           /* what its median is between; 0: not said */
};

struct lc_tune_document {
    struct lc_tune_machine machine;
    int left;                           /* sizes that were not measured */
    char failed_op[32], failed_way[64]; /* what was under way when the job died; "": not known */
};

/* 0; -ENOENT: there is no such file; -EINVAL: it is no result. */
int lc_tune_read(const char *path, struct lc_tune_document *out,
                 void (*take)(const struct lc_tune_record *record, void *arg), void *arg);
void lc_tune_say_unread(int err, const char *path, char *why, size_t size);
int lc_tune_nccl_version(const char *text); /* as ncclGetVersion counts; 0: not understood */
char *lc_tune_read_text(const char *path);  /* NULL; the caller's to free */

/* tune_turns.c */
int lc_tune_take_turns(const struct lc_tune_tools *tools, const struct lc_tune_turns *turns,
                       struct lc_tune_turned *out);

/* tune_output.c */

/* Rules of a profile that is there already for this machine, for other ranks or nodes, stay. */
int lc_tune_write_profile(const char *path, const struct lc_tune_results *results,
                          const struct lc_tune_rule *rules, int n);

/* The same without looking at what is there. */
int lc_tune_write_rules(const char *path, const struct lc_tune_results *results,
                        const struct lc_tune_rule *rules, int n);

/* 0, or -EEXIST after a line on standard error: the file is another machine's, or no profile. */
int lc_tune_check_out(const char *path, const struct lc_tune_results *results);

/* One rule for one step, over all sizes. */
int lc_tune_write_candidate(const char *path, const struct lc_tune_results *results,
                            const struct lc_tune_step *step);
void lc_tune_print_figures(const char *name, const struct lc_tune_found *found);

struct lc_tune_summary {
    const char *out;
    const struct lc_tune_rule *rules;
    int n;
    int open; /* steps that time did not allow */
};
void lc_tune_print_summary(const struct lc_tune_results *results,
                           const struct lc_tune_summary *summary);
void lc_tune_print_json(const struct lc_tune_results *results,
                        const struct lc_tune_summary *summary);

/* explain.c: what `--explain` is asked. NULL or 0: not given. */
struct lc_tune_question {
    const char *size, *op, *type, *profile, *topology;
    int ranks, nodes;
    bool json;
};

/* explain_cost.c: how long NCCL's ways take at one size. */
struct lc_tune_wires {
    struct lc_cost_wires wires;
    bool known;     /* some of it */
    char note[512]; /* of what they are, or why they are not known */
};
struct lc_tune_estimate {
    struct lc_profile_rule way; /* without ranks, nodes and range; of the default: see below */
    bool is_default;            /* what NCCL does by itself, whatever that is */
    double wires_us;            /* the model's, of the wires; below 0: not known */
    double fitted_us;   /* the model's, fitted to what was measured; below 0: not, or beyond that */
    double error;       /* relative, of the fit */
    int points;         /* sizes it is of */
    double measured_us; /* at this size; 0: not */
};
struct lc_tune_costs {
    struct lc_tune_wires wires;
    char figures[512]; /* where what was measured is from, or that there is nothing */
    bool placed; /* an end of the rule is between sizes that were measured, but not beside one */
    int n;
    struct lc_tune_estimate at[LC_TUNE_STEPS]; /* the fastest first, by the best that is known */
};
void lc_tune_estimate(const char *topology, const struct lc_profile *profile,
                      const char *profile_path, const struct lc_cost_call *call,
                      const struct lc_profile_rule *rule, struct lc_tune_costs *out);

/* Returns the exit code. */
int lc_tune_explain(const struct lc_tune_question *question);

#endif
