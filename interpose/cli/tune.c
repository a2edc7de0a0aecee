/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/tune.h"

#include "common/config.h"
#include "common/deadline.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/topo_library.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "usage: loongcomm tune [--ranks N] [--out FILE] [--time MINUTES] [--sizes LIST]\n"
    "                      [--only rings|nccl] [--live SHARE] [--graph] [--resume] [--keep] [--json]\n"
    "                      [-- LAUNCHER ARGS]\n"
    "       loongcomm tune --explain SIZE [--op OP] [--type T] [--ranks N] [--nodes N]\n"
    "                      [--profile FILE] [--topology FILE] [--json]\n"
    "\n"
    "Measures on this machine, by loongcomm-bench, what beats NCCL's own choices, and writes a\n"
    "profile of it (LOONGCOMM_PROFILE): sums, all-to-alls and sends through memory that ranks map\n"
    "from each other, and NCCL's algorithms, protocols and channels. A rule stands where nine of ten\n"
    "rounds gain more than 2 %, and more than equal sides differ by chance, and then do so in a\n"
    "second run, also between the sizes; one for NCCL's own ways where the median of the rounds gains\n"
    "2 %, and more than it, and the median of equal sides, may be off by. Those all take turns in one\n"
    "job, which comes first. The most valuable is tried first. Nothing else should use\n"
    "the GPUs. Where ranks share one, MPS has to run; LD_LIBRARY_PATH names the folders of\n"
    "libnccl.so.2 and libcudart.so (`perf/run tune` sees to both).\n"
    "\n"
    "  --ranks N         ranks of the job (as many as GPUs, at least 2)\n"
    "  --out FILE        the profile (loongcomm.profile); rules in it for other numbers of ranks stay.\n"
    "                    What is measured is kept in FILE.part until nothing is left to try, then,\n"
    "                    for --explain, in FILE.RANKSxNODES.figures\n"
    "  --time MINUTES    stop trying then (5); confirming what was found may take a little longer\n"
    "  --sizes LIST      bytes (1k,4k,16k,64k,256k,1m,4m,16m,64m); nothing is said of larger ones\n"
    "  --only KIND       only rings (memory between ranks), or only nccl (its own choices)\n"
    "  --live SHARE      share of an all-to-all's rows that are not zero (1): zeros need not travel\n"
    "  --graph           calls are captured in a CUDA graph and replayed, for jobs that do so: small\n"
    "                    ones gain there what a call from the host hides\n"
    "  --resume          go on with what FILE.part holds\n"
    "  --keep            all figures of each job of NCCL's ways stay, in FILE.ways.1, FILE.ways.2 ...\n"
    "  --json            one JSON document, \"schema\": \"loongcomm.tune/1\", instead of text\n"
    "  -- LAUNCHER ARGS  put in front of loongcomm-bench: -- mpirun -n 16 --hostfile hosts\n"
    "\n"
    "Says what would become of one call with the settings of this environment: which path it takes,\n"
    "with which algorithm where NCCL carries it, and which setting, rule of a profile or default\n"
    "decides that. Nothing is measured or changed. Behind it stands how long NCCL's ways take: as was\n"
    "measured for the profile, as a model of costs fitted to that has it, and as the same model has\n"
    "it by the wires of this machine alone. The model decides nothing: tune uses it to choose what to\n"
    "measure.\n"
    "\n"
    "  --explain SIZE    bytes of a rank's send buffer (4096, 64k, 16m)\n"
    "  --op OP           all-reduce (default), reduce-scatter, all-gather, all-to-all, send, ...\n"
    "  --type T          f32 (default), bf16, f16, f64, i32, ...\n"
    "  --ranks N         ranks of the communicator (as the profile's rules, else 2)\n"
    "  --nodes N         on so many nodes (as NCCL counts in the profile's rules, else 1)\n"
    "  --profile FILE    this profile instead of LOONGCOMM_PROFILE's\n"
    "  --topology FILE   its wires instead of this machine's, as `loongcomm topo --input` takes it\n"
    "  --json            one JSON document, \"schema\": \"loongcomm.explain/1\"\n"
    "\n"
    "exit codes: 0 written (also if nothing is faster) or said, 1 something could not be measured,\n"
    "read or written, 2 wrong usage.\n";

struct options {
    struct lc_tune_question question;
    const char *out, *time, *sizes, *only, *live;
    char *const *launcher;
    double minutes;
    uint64_t size[LC_TUNE_SIZES];
    int n_sizes;
    bool resume;
    bool graph;
    bool keep;
    bool help;
};

static int parse_count(const char *name, const char *text, int least, int most, int *out)
{
    char *end;
    long value = strtol(text, &end, 10);

    if (end == text || *end || value < least || value > most)
        return lc_cli_usage("tune: %s takes a number from %d to %d, not '%s'", name, least, most,
                            text);
    *out = (int)value;
    return LC_CLI_FINE;
}

static int parse_sizes(const char *text, struct options *out)
{
    char copy[512];
    char *rest = copy, *part;
    size_t last = 0;

    if (snprintf(copy, sizeof(copy), "%s", text) >= (int)sizeof(copy))
        return lc_cli_usage("tune: --sizes is too long");
    while ((part = strsep(&rest, ","))) {
        size_t size;

        if (lc_parse_size(part, &size) || size <= last || size > (size_t)1 << 34 || size % 4 ||
            out->n_sizes == LC_TUNE_SIZES - 1)
            return lc_cli_usage(
                "tune: --sizes takes up to %d ascending multiples of 4 bytes, not '%s'",
                LC_TUNE_SIZES - 1, part);
        out->size[out->n_sizes++] = last = size;
    }
    return LC_CLI_FINE;
}

/* What measures and what explains go apart. */
static int check(struct options *out, bool measures, bool asks)
{
    char *end = NULL;
    double share;
    int code;

    if (out->question.size && measures)
        return lc_cli_usage("tune: --explain measures nothing; see `loongcomm tune --help`");
    if (!out->question.size && asks)
        return lc_cli_usage(
            "tune: --op, --type, --nodes, --profile and --topology go with --explain SIZE");
    if (out->only && strcmp(out->only, "rings") != 0 && strcmp(out->only, "nccl") != 0)
        return lc_cli_usage("tune: --only takes rings or nccl, not '%s'", out->only);
    out->minutes = out->time ? strtod(out->time, &end) : 5;
    if (out->time && (end == out->time || *end || !(out->minutes >= 0 && out->minutes <= 1440)))
        return lc_cli_usage("tune: --time takes minutes, not '%s'", out->time);
    if (!out->live)
        out->live = "1";
    share = strtod(out->live, &end);
    if (end == out->live || *end || !(share >= 0 && share <= 1))
        return lc_cli_usage("tune: --live takes a share from 0 to 1, not '%s'", out->live);
    code = parse_sizes(out->sizes ? out->sizes : "1k,4k,16k,64k,256k,1m,4m,16m,64m", out);
    if (!out->out)
        out->out = "loongcomm.profile";
    if (!code && strlen(out->out) > PATH_MAX - 64)
        code = lc_cli_usage("tune: --out is too long");
    return code;
}

static int parse_values(struct options *out, const char *ranks, const char *nodes)
{
    bool measures = out->out || out->time || out->sizes || out->only || out->live || out->resume ||
                    out->graph || out->keep || out->launcher;
    bool asks = out->question.op || out->question.type || out->question.profile ||
                out->question.topology || nodes;
    int most = out->question.size ? 1 << 24 : 1024;
    int code = check(out, measures, asks);

    if (!code && ranks)
        code = parse_count("--ranks", ranks, out->question.size ? 1 : 2, most,
                           &out->question.ranks);
    if (!code && nodes)
        code = parse_count("--nodes", nodes, 1, most, &out->question.nodes);
    return code;
}

static bool take_flag(const char *word, struct options *out)
{
    const struct {
        const char *name;
        bool *value;
    } flags[] = {
        {"--json",    &out->question.json},
        { "--resume", &out->resume       },
        { "--graph",  &out->graph        },
        { "--keep",   &out->keep         },
    };

    for (size_t i = 0; i < sizeof(flags) / sizeof(*flags); i++) {
        if (strcmp(word, flags[i].name) == 0)
            return *flags[i].value = true;
    }
    return false;
}

static int parse(int argc, char **argv, struct options *out)
{
    const char *ranks = NULL, *nodes = NULL;
    const struct {
        const char *name, **value;
    } valued[] = {
        {"--explain",   &out->question.size    },
        { "--op",       &out->question.op      },
        { "--type",     &out->question.type    },
        { "--profile",  &out->question.profile },
        { "--topology", &out->question.topology},
        { "--ranks",    &ranks                 },
        { "--nodes",    &nodes                 },
        { "--out",      &out->out              },
        { "--time",     &out->time             },
        { "--sizes",    &out->sizes            },
        { "--only",     &out->only             },
        { "--live",     &out->live             },
    };
    const size_t n_valued = sizeof(valued) / sizeof(*valued);

    for (int i = 1; i < argc; i++) {
        size_t at = 0;

        if (strcmp(argv[i], "--") == 0) {
            if (!argv[i + 1])
                return lc_cli_usage("tune: no launcher behind --");
            out->launcher = argv + i + 1;
            break;
        }
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            out->help = true;
            return LC_CLI_FINE;
        }
        if (take_flag(argv[i], out))
            continue;
        while (at < n_valued && strcmp(argv[i], valued[at].name) != 0)
            at++;
        if (at == n_valued)
            return lc_cli_usage("tune: unexpected '%s'; see `loongcomm tune --help`", argv[i]);
        if (i + 1 == argc || !*argv[i + 1])
            return lc_cli_usage("tune: %s needs a value", argv[i]);
        *valued[at].value = argv[++i];
    }
    return parse_values(out, ranks, nodes);
}

/* --- measuring --- */

#define CONFIRM_SHARE 0.25 /* of the time */
#define MOST_S        30.0 /* that more figures of one step are worth */
#define USEFUL_S      0.3  /* for a size, less if there is little time in all */

struct tuning {
    const struct options *options;
    struct lc_tune_tools tools;
    struct lc_tune_results results;
    struct lc_deadline end;
    double total_s;
    double fixed_s;      /* what a run costs beside its budget, as the last ones did */
    char part[PATH_MAX]; /* the file of what has been measured */
    int failures;
    int refused;   /* ways through mapped memory that no call took; */
    bool allowed;  /* but some did */
    bool progress; /* a line on the terminal is to be wiped */
};

static double left_s(const struct tuning *t)
{
    return lc_deadline_left_ms(t->end) / 1e3;
}

static void wipe(struct tuning *t)
{
    if (t->progress)
        (void)fprintf(stderr, "\r\033[K");
    t->progress = false;
}

static void show(struct tuning *t, int at, int of, const char *what)
{
    int left = (int)left_s(t);

    wipe(t);
    if (!isatty(STDERR_FILENO))
        return;
    (void)fprintf(stderr, "[%d of %d, %d:%02d left] %s", at, of, left / 60, left % 60, what);
    t->progress = true;
}

/* Twice is no accident: the ranks cannot map each other's memory here. */
static bool lacks_rings(const struct tuning *t)
{
    return t->refused >= 2 && !t->allowed;
}

static bool is_wanted(const struct tuning *t, const struct lc_tune_step *step)
{
    const char *only = t->options->only;

    if (step->kind == LC_TUNE_RINGS && lacks_rings(t))
        return false;
    if (lc_tune_step_is_turn(step))
        return t->tools.plugin[0] && (!only || strcmp(only, "nccl") == 0);
    if (step->kind == LC_TUNE_EQUAL && lacks_rings(t))
        return false;
    return !only || strcmp(only, "rings") == 0;
}

static int count_open(const struct tuning *t, bool turns)
{
    int n = 0;

    for (int i = 0; i < lc_tune_n_steps; i++)
        n += t->results.state[i] == LC_TUNE_OPEN && is_wanted(t, &lc_tune_steps[i]) &&
             lc_tune_step_is_turn(&lc_tune_steps[i]) == turns;
    return n;
}

/* Runs, and learns what a run costs. */
static int compare(struct tuning *t, const struct lc_tune_run *run, struct lc_tune_found *out)
{
    int64_t begin = lc_now_ns();
    int err = lc_tune_compare(&t->tools, run, out);
    double over = (double)(lc_now_ns() - begin) / 1e9 - run->budget_s - run->settle_s;

    wipe(t);
    if (!err)
        t->fixed_s = over > 0 ? over : 0;
    return err;
}

/* The first figures say which machine it is; later ones must be of the same. */
static int same_machine(struct tuning *t, const struct lc_tune_machine *here, const char *why)
{
    struct lc_tune_results *r = &t->results;

    if (here->rig && strcmp(r->gpu, "none") != 0) {
        lc_cli_say(
            "tune: loongcomm-bench has used its host stand-in, not the GPUs of this machine: "
            "LD_LIBRARY_PATH has to name the folders of the real libnccl.so.2 and libcudart.so");
        return -EINVAL;
    }
    if (!r->nccl) {
        r->nccl = here->nccl;
        r->ranks = here->ranks;
        r->nodes = here->nodes;
        if (why[0]) /* once: it says the same again */
            lc_cli_say("tune: %s", why);
        return lc_tune_check_out(t->options->out, r);
    }
    if (r->nccl == here->nccl && r->ranks == here->ranks && r->nodes == here->nodes)
        return 0;
    lc_cli_say("tune: %s was measured with NCCL %d.%d.%d and %d ranks on %d nodes, and here are "
               "%d.%d.%d and %d on %d: go without --resume",
               t->part, r->nccl / 10000, r->nccl / 100 % 100, r->nccl % 100, r->ranks, r->nodes,
               here->nccl / 10000, here->nccl / 100 % 100, here->nccl % 100, here->ranks,
               here->nodes);
    return -EINVAL;
}

static int take(struct tuning *t, int step, const struct lc_tune_found *found)
{
    int err = same_machine(t, &found->machine, found->why);

    for (int i = 0; i < found->n && !err; i++)
        err = lc_tune_add(&t->results, step, found->at[i].bytes, &found->at[i].ratio);
    return err;
}

/* Ranks map each other's memory when a call first wants it, and agree at a later one, at the latest after as long again. */
static double settle_s(const struct tuning *t, enum lc_tune_kind kind)
{
    double most = kind == LC_TUNE_RINGS || kind == LC_TUNE_CAST ? 1.5 : 0.1;

    return most < t->total_s / 120 ? most : t->total_s / 120;
}

/* What went to NCCL after all says nothing of memory between ranks. */
static void note_refusal(struct tuning *t, const char *name, struct lc_tune_found *found)
{
    t->allowed |= found->taken > 0;
    if (found->taken != 0)
        return;
    t->refused++;
    found->n = 0;
    lc_cli_say("tune: %s: no call went through memory between the ranks%s", name,
               lacks_rings(t) ? ", nor does any other here, so that is not tried further "
                                "(LOONGCOMM_LOG_LEVEL=info in a job says why)"
                              : "");
}

static int measure_step(struct tuning *t, int step, double budget_s)
{
    const struct lc_tune_step *s = &lc_tune_steps[step];
    struct lc_tune_run run = { .kind = s->kind, .op = s->way.op, .budget_s = budget_s };
    static struct lc_tune_found found;
    uint64_t sizes[LC_TUNE_SIZES];
    char name[LC_TUNE_LINE];
    int err = 0;

    lc_tune_step_name(s, name, sizeof(name));
    run.ranks = t->results.ranks;
    run.settle_s = settle_s(t, s->kind);
    run.wire = s->way.protocol;
    run.sizes = sizes;
    for (int i = 0; i < t->options->n_sizes; i++) {
        if (lc_tune_step_takes(s, t->results.ranks, t->options->size[i]))
            sizes[run.n_sizes++] = t->options->size[i];
    }
    if (run.n_sizes == 0)
        return 0;
    if (s->kind == LC_TUNE_RINGS)
        err = lc_tune_write_candidate(t->tools.candidate, &t->results, s);
    if (err)
        return err;
    if (compare(t, &run, &found) != 0) {
        lc_cli_say("tune: %s cannot be measured: %s", name, found.why);
        t->results.state[step] = LC_TUNE_FAILED;
        t->failures++;
        return t->results.nccl ? lc_tune_save(&t->results, t->part) : -EIO;
    }
    if (s->kind == LC_TUNE_RINGS)
        note_refusal(t, name, &found);
    err = take(t, step, &found);
    if (err)
        return err;
    t->results.state[step] = LC_TUNE_DONE;
    if (!t->options->question.json)
        lc_tune_print_figures(name, &found);
    return lc_tune_save(&t->results, t->part);
}

/* What a step gets of the time that is left; below 0: it is too late for it. */
static double plan(const struct tuning *t, int open, double settle)
{
    double left = left_s(t) - CONFIRM_SHARE * t->total_s;
    double useful = USEFUL_S * t->options->n_sizes;
    double fixed = t->fixed_s + settle;
    double budget = left / open - fixed;

    if (useful > t->total_s / 20)
        useful = t->total_s / 20;
    if (budget < useful)
        budget = useful;
    if (budget > MOST_S)
        budget = MOST_S;
    if (!t->results.nccl && t->total_s > 0)
        return budget; /* something is always measured */
    return left <= 0 || budget + fixed > left ? -1 : budget;
}

/* --- NCCL's ways: turns of one job --- */

#define TURNS_SHARE  0.62 /* of the time, the rest is for another look at what was chosen, */
#define AGAIN_SHARE  0.28 /* and at least so much, even if that is too much */
#define OTHERS_SHARE 0.3  /* for them, where there are rings to be tried as well */

static double turns_budget(const struct tuning *t)
{
    double left = TURNS_SHARE * (left_s(t) - 2 * t->fixed_s);
    bool alone = t->options->only != NULL; /* "nccl": else there are no turns */

    if (!alone)
        left = left < OTHERS_SHARE * t->total_s ? left : OTHERS_SHARE * t->total_s;
    if (left < 0.1 && !t->results.nccl && t->total_s > 0)
        return 0.1; /* something is always measured */
    return left;
}

/* The bench goes from small to large sizes, and rounds them down to what the ranks can share. */
static void list_rest(const struct tuning *t, uint8_t op, struct lc_tune_turns *turns)
{
    uint64_t done = 0;

    for (size_t i = 0; i < t->results.n; i++) {
        const struct lc_tune_figure *figure = &t->results.figures[i];

        if (lc_tune_steps[figure->step].kind == LC_TUNE_AGAIN &&
            lc_tune_steps[figure->step].way.op == op && figure->bytes > done)
            done = figure->bytes;
    }
    for (int i = 0; i < t->options->n_sizes; i++) {
        if (t->options->size[i] > done)
            turns->sizes[op][turns->n_sizes[op]++] = t->options->size[i];
    }
}

static bool list_turns(const struct tuning *t, bool wanted[LC_TUNE_STEPS],
                       struct lc_tune_turns *turns)
{
    bool any = false;

    for (int i = 0; i < lc_tune_n_steps; i++) {
        const struct lc_tune_step *step = &lc_tune_steps[i];
        uint8_t op = step->way.op;

        wanted[i] = lc_tune_step_is_turn(step) && t->results.state[i] == LC_TUNE_OPEN &&
                    is_wanted(t, step);
        if (!wanted[i] || turns->n_sizes[op])
            continue;
        list_rest(t, op, turns);
        any |= turns->n_sizes[op] > 0;
    }
    return any;
}

/* What one step has of the turns, as if it had been a run of its own. */
static void print_turns(const struct lc_tune_turned *turned, int step, const char *name)
{
    static struct lc_tune_found found;

    found = (struct lc_tune_found){ .taken = -1 };
    for (size_t i = 0; i < turned->n; i++) {
        if (turned->turns[i].step != step || !turned->turns[i].measured)
            continue;
        if (found.n == LC_TUNE_CHECKS) { /* a candidate is of several operations */
            lc_tune_print_figures(name, &found);
            found.n = 0;
        }
        found.at[found.n++] = turned->turns[i].at;
    }
    if (found.n)
        lc_tune_print_figures(name, &found);
}

static int turn(struct tuning *t, const struct lc_tune_turns *turns, struct lc_tune_turned *out)
{
    int64_t begin = lc_now_ns();
    int err = lc_tune_take_turns(&t->tools, turns, out);
    double over = (double)(lc_now_ns() - begin) / 1e9 - turns->budget_s;

    wipe(t);
    if (!err && !out->died) /* or it has waited for a rank */
        t->fixed_s = over > 0 ? over : 0;
    return err;
}

static int take_turned(struct tuning *t, const bool wanted[LC_TUNE_STEPS],
                       const struct lc_tune_turned *turned)
{
    int err = same_machine(t, &turned->machine, "");

    for (size_t i = 0; i < turned->n && !err; i++) {
        const struct lc_tune_turn *one = &turned->turns[i];

        if (one->step < 0 || !wanted[one->step])
            continue;
        if (one->measured)
            err = lc_tune_add(&t->results, one->step, one->at.bytes, &one->at.ratio);
        if (one->us > 0 && !err)
            err = lc_tune_add_time(&t->results, one->step, one->at.bytes, one->us);
    }
    for (int i = 0; i < lc_tune_n_steps && !err; i++) {
        char name[LC_TUNE_LINE];

        if (!wanted[i])
            continue;
        if (!turned->left) /* else they go on with the sizes that are missing */
            t->results.state[i] = LC_TUNE_DONE;
        lc_tune_step_name(&lc_tune_steps[i], name, sizeof(name));
        if (!t->options->question.json)
            print_turns(turned, i, name);
    }
    return err;
}

/* Nobody knows whether a way that has ended one job would not end another, at whatever size. */
static void leave_out(struct tuning *t, int step)
{
    char name[LC_TUNE_LINE];

    lc_tune_step_name(&lc_tune_steps[step], name, sizeof(name));
    lc_cli_say("tune: %s is left out", name);
    t->results.state[step] = LC_TUNE_FAILED;
    lc_tune_forget(&t->results, step);
}

/* One job. True: it has died of a way that is left out from now on, so that another one may live longer. */
static bool measure_in_turns(struct tuning *t, int *err)
{
    bool wanted[LC_TUNE_STEPS] = { false };
    struct lc_tune_turns turns = { .wanted = wanted, .budget_s = turns_budget(t) };
    struct lc_tune_turned turned;
    bool again;

    *err = 0;
    if (!list_turns(t, wanted, &turns)) {
        for (int i = 0; i < lc_tune_n_steps; i++) /* an earlier call has had all sizes */
            t->results.state[i] = wanted[i] ? LC_TUNE_DONE : t->results.state[i];
        return false;
    }
    if (turns.budget_s <= 0)
        return false;
    show(t, 1, count_open(t, true), "NCCL's ways, in turns of one job");
    *err = turn(t, &turns, &turned);
    again = !*err && turned.died && turned.culprit >= 0;
    if (*err || turned.died) {
        lc_cli_say("tune: NCCL's ways cannot be measured%s: %s", *err ? "" : " to the end",
                   turned.why);
        t->failures++;
    }
    if (*err) { /* what was measured before stays, and --resume tries again */
        *err = t->results.nccl ? 0 : -EIO;
        free(turned.turns);
        return false;
    }
    *err = take_turned(t, wanted, &turned);
    if (!*err && again)
        leave_out(t, turned.culprit);
    if (!*err)
        *err = lc_tune_save(&t->results, t->part);
    free(turned.turns);
    return again && !*err;
}

static int measure_turns(struct tuning *t)
{
    int err;

    while (measure_in_turns(t, &err))
        continue;
    return err;
}

static int measure_all(struct tuning *t)
{
    int err = measure_turns(t);
    int of = count_open(t, false);

    if (err)
        return err;

    for (int i = 0; i < lc_tune_n_steps; i++) {
        char name[LC_TUNE_LINE];
        double budget;

        if (t->results.state[i] != LC_TUNE_OPEN || !is_wanted(t, &lc_tune_steps[i]) ||
            lc_tune_step_is_turn(&lc_tune_steps[i]))
            continue;
        budget = plan(t, count_open(t, false), settle_s(t, lc_tune_steps[i].kind));
        if (budget < 0)
            break;
        lc_tune_step_name(&lc_tune_steps[i], name, sizeof(name));
        show(t, of - count_open(t, false) + 1, of, name);
        err = measure_step(t, i, budget);
        if (err)
            return err;
    }
    return 0;
}

/* Another look at what was chosen, as a whole: the best of many was also the luckiest. */
static int confirm(struct tuning *t, struct lc_tune_choice *choice,
                   const struct lc_tune_rule *rules, int n)
{
    static struct lc_tune_found found;
    uint64_t sizes[LC_TUNE_CHECKS];
    char name[LC_TUNE_LINE];
    struct lc_tune_run run = { .kind = choice->place.kind,
                               .op = choice->place.op,
                               .wire = choice->place.wire,
                               .sizes = sizes,
                               .ranks = t->results.ranks,
                               .two_types = choice->place.op <= LC_PROFILE_ALL_REDUCE &&
                                            choice->place.kind == LC_TUNE_RINGS &&
                                            !choice->place.wire };
    int err = lc_tune_write_rules(t->tools.candidate, &t->results, rules, n);

    if (err)
        return err;
    run.n_sizes = lc_tune_recheck_sizes(choice, sizes);
    run.settle_s = settle_s(t, run.kind);
    run.budget_s = CONFIRM_SHARE * t->total_s / lc_tune_n_places - t->fixed_s - run.settle_s;
    if (run.budget_s < USEFUL_S / 2 * run.n_sizes)
        run.budget_s = USEFUL_S / 2 * run.n_sizes;
    show(t, 1, 1, "confirming");
    if (compare(t, &run, &found) != 0) {
        lc_cli_say("tune: the chosen rules cannot be measured, and are dropped: %s", found.why);
        found.n = 0;
        t->failures++;
    } else if (same_machine(t, &found.machine, found.why) != 0) {
        return -EINVAL;
    } else if (!t->options->question.json) {
        (void)snprintf(name, sizeof(name), "again: %s %s%s",
                       run.kind == LC_TUNE_RINGS ? "rings" : "nccl", lc_profile_op_name(run.op),
                       run.wire ? " bf16" : "");
        lc_tune_print_figures(name, &found);
    }
    lc_tune_confirm(choice, found.at, found.n);
    return 0;
}

/* What the job says of an operation's candidates, with equal sides at the same size. */
static int list_again(const struct lc_tune_turned *turned, uint8_t op, struct lc_tune_recheck *out)
{
    int n = 0;

    for (size_t i = 0; i < turned->n && n < LC_TUNE_CHECKS; i++) {
        const struct lc_tune_turn *one = &turned->turns[i];

        if (one->step >= 0 || one->op != op || !one->measured)
            continue;
        out[n] = one->at;
        for (size_t k = 0; k < turned->n; k++) {
            const struct lc_tune_turn *other = &turned->turns[k];

            if (other->step >= 0 && other->measured && other->op == op &&
                other->at.bytes == one->at.bytes)
                out[n].equal = other->at.ratio; /* there is no other step in that job */
        }
        n++;
    }
    return n;
}

static int rules_of_turns(const struct tuning *t, const struct lc_tune_choice *choices,
                          struct lc_tune_rule *rules)
{
    int n = 0;

    for (int p = 0; p < lc_tune_n_places; p++) {
        if (lc_tune_places[p].kind == LC_TUNE_NCCL)
            n += lc_tune_rules(&choices[p], t->results.ranks, t->results.nodes, rules + n);
    }
    return n;
}

/* The same for all that NCCL is to do another way, in one job. `choices`: one a place; those without rules are left alone. */
static int confirm_turns(struct tuning *t, struct lc_tune_choice *choices, double budget_s)
{
    static struct lc_tune_rule rules[2 * LC_TUNE_POINTS * LC_TUNE_PLACES];
    struct lc_tune_turns turns = { .budget_s = budget_s };
    struct lc_tune_turned turned;
    int err = lc_tune_write_rules(t->tools.candidate, &t->results, rules,
                                  rules_of_turns(t, choices, rules));

    if (err)
        return err;
    for (int p = 0; p < lc_tune_n_places; p++) {
        uint8_t op = lc_tune_places[p].op;

        if (lc_tune_places[p].kind == LC_TUNE_NCCL)
            turns.n_sizes[op] = lc_tune_recheck_sizes(&choices[p], turns.sizes[op]);
    }
    show(t, 1, 1, "confirming NCCL's ways");
    err = turn(t, &turns, &turned);
    if (err || turned.died) {
        lc_cli_say("tune: chosen rules cannot be measured%s, and those are dropped: %s",
                   err ? "" : " to the end", turned.why);
        t->failures++;
        turned.n = err ? 0 : turned.n;
    }
    if (!err && same_machine(t, &turned.machine, "")) {
        free(turned.turns);
        return -EINVAL;
    }
    for (int p = 0; p < lc_tune_n_places; p++) {
        struct lc_tune_recheck again[LC_TUNE_CHECKS];

        if (lc_tune_places[p].kind == LC_TUNE_NCCL)
            lc_tune_confirm(&choices[p], again, list_again(&turned, lc_tune_places[p].op, again));
    }
    if (!err && !t->options->question.json)
        print_turns(&turned, -1, "again: nccl");
    free(turned.turns);
    return 0;
}

/* Of what the second look has dropped. A job has luck of its own (which connection is served by whom), and all its rounds
 * share it. */
static int look_a_third_time(struct tuning *t, const struct lc_tune_choice *before,
                             struct lc_tune_choice *choices)
{
    static struct lc_tune_choice third[LC_TUNE_PLACES];
    bool any = false;
    int err;

    for (int p = 0; p < lc_tune_n_places; p++) {
        third[p] = (struct lc_tune_choice){ .place = lc_tune_places[p] };
        if (lc_tune_places[p].kind != LC_TUNE_NCCL || !lc_tune_is_disputed(&before[p], &choices[p]))
            continue;
        third[p] = before[p];
        lc_tune_keep_sure(&third[p]);
        any = true;
    }
    if (!any)
        return 0;
    err = confirm_turns(t, third, AGAIN_SHARE / 2 * t->total_s);
    for (int p = 0; p < lc_tune_n_places && !err; p++) {
        if (third[p].n)
            lc_tune_merge(&choices[p], &third[p]);
    }
    return err;
}

/* Rules for NCCL; the number or -errno. */
static int choose_turns(struct tuning *t, struct lc_tune_rule *rules)
{
    static struct lc_tune_choice choices[LC_TUNE_PLACES], before[LC_TUNE_PLACES];
    double budget_s;
    int err;

    for (int p = 0; p < lc_tune_n_places; p++) {
        char said[1024];

        if (lc_tune_places[p].kind != LC_TUNE_NCCL)
            continue;
        lc_tune_choose(&t->results, &lc_tune_places[p], &choices[p]);
        lc_tune_place_crossings(&t->results, &choices[p], said, sizeof(said));
        if (said[0] && !t->options->question.json)
            (void)printf("between sizes, %s: %s\n", lc_profile_op_name(lc_tune_places[p].op), said);
    }
    if (rules_of_turns(t, choices, rules) == 0)
        return 0;
    memcpy(before, choices, sizeof(before));
    budget_s = left_s(t) - t->fixed_s;
    if (budget_s < AGAIN_SHARE * t->total_s)
        budget_s = AGAIN_SHARE * t->total_s;
    err = confirm_turns(t, choices, budget_s);
    if (!err)
        err = look_a_third_time(t, before, choices);
    return err ? err : rules_of_turns(t, choices, rules);
}

/* Rules of all places; the number or -errno. */
static int choose(struct tuning *t, struct lc_tune_rule *rules)
{
    static struct lc_tune_choice choice;
    int n = 0, count_turns;

    for (int p = 0; p < lc_tune_n_places; p++) {
        struct lc_tune_rule own[2 * LC_TUNE_POINTS];
        int err, count;

        if (lc_tune_places[p].kind == LC_TUNE_NCCL)
            continue;
        lc_tune_choose(&t->results, &lc_tune_places[p], &choice);
        if (!lc_tune_has_rules(&choice))
            continue;
        count = lc_tune_rules(&choice, t->results.ranks, t->results.nodes, own);
        err = confirm(t, &choice, own, count);
        if (err)
            return err;
        n += lc_tune_rules(&choice, t->results.ranks, t->results.nodes, rules + n);
    }
    count_turns = choose_turns(t, rules + n);
    return count_turns < 0 ? count_turns : n + count_turns;
}

/* What NCCL's default, and what is ruled out beside it, depend on. */
static const char *const nccl_settings[] = {
    "NCCL_ALGO",     "NCCL_PROTO",    "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "NCCL_BUFFSIZE", "NCCL_NTHREADS",      "NCCL_NET",           "NCCL_NET_PLUGIN"
};

#define SETTING_ROOM 40 /* a name, and what makes two values unlike */

static size_t describe_settings(char *out, size_t size)
{
    size_t used = 0;

    for (size_t i = 0; i < sizeof(nccl_settings) / sizeof(*nccl_settings); i++) {
        const char *value = lc_cli_nccl_get(nccl_settings[i]);

        if (value && *value && used + SETTING_ROOM < size)
            used += (size_t)snprintf(out + used, SETTING_ROOM, " %s=%.18s", nccl_settings[i],
                                     value);
    }
    for (size_t i = 0; i < used; i++) { /* it goes into a line of a file */
        if ((unsigned char)out[i] < ' ' || out[i] == 0x7f)
            out[i] = '?';
    }
    return used;
}

/* A profile says nothing of them, and a job without them has another default. */
static void warn_of_settings(void)
{
    for (int i = 0; i < 2; i++) {
        const char *value = lc_cli_nccl_get(nccl_settings[i]);

        if (value && *value)
            lc_cli_say("tune: %s=%s is set: what is measured holds for jobs that set the same",
                       nccl_settings[i], value);
    }
}

/* Figures of other sizes or data, of calls in graphs or with other settings of NCCL are no figures of these. */
static void describe(const struct options *options, char *out, size_t size)
{
    size_t used = 0;

    for (int i = 0; i < options->n_sizes; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%" PRIu64, i ? "," : "",
                                 options->size[i]);
    used += (size_t)snprintf(out + used, size - used, " live %.16s%s", options->live,
                             options->graph ? " graph" : "");
    out[used + describe_settings(out + used, size - used)] = '\0';
}

static int begin(struct tuning *t)
{
    const char *out = t->options->out;
    struct lc_tune_results *r = &t->results;
    char gpu[sizeof(r->gpu)], how[sizeof(r->how)];
    int err = lc_tune_find_tools(&t->tools);

    (void)snprintf(t->part, sizeof(t->part), "%s.part", out);
    (void)snprintf(t->tools.json, sizeof(t->tools.json), "%s.bench", out);
    (void)snprintf(t->tools.reports, sizeof(t->tools.reports), "%s.reports", out);
    if (!err && !realpath(".", t->tools.candidate))
        err = -errno;
    if (err)
        return err;
    if (*out == '/')
        t->tools.candidate[0] = '\0'; /* the ranks of a launcher may run in another folder */
    if (strlen(t->tools.candidate) + strlen(out) + 16 > PATH_MAX)
        return -ENAMETOOLONG;
    (void)sprintf(t->tools.candidate + strlen(t->tools.candidate), "%s%s.try",
                  *out == '/' ? "" : "/", out);
    t->tools.live = t->options->live;
    t->tools.graph = t->options->graph;
    t->tools.keep = t->options->keep ? out : NULL;
    t->tools.launcher = t->options->launcher;
    t->tools.ranks = t->options->question.ranks;
    lc_profile_gpu_here(gpu, sizeof(gpu));
    err = t->options->resume ? lc_tune_load(t->part, r) : 0;
    if (err && err != -ENOENT)
        return err;
    describe(t->options, how, sizeof(how));
    warn_of_settings();
    if (r->nccl && strcmp(r->how, how) != 0) {
        lc_cli_say("tune: %s was measured with %s, and this is %s: go without --resume", t->part,
                   r->how, how);
        return -EINVAL;
    }
    (void)snprintf(r->how, sizeof(r->how), "%s", how);
    if (r->nccl && strcmp(r->gpu, gpu) != 0) {
        lc_cli_say("tune: %s was measured on %s, and here is %s: go without --resume", t->part,
                   r->gpu, gpu);
        return -EINVAL;
    }
    (void)snprintf(r->gpu, sizeof(r->gpu), "%s", gpu);
    return lc_tune_check_out(out, r);
}

/* For --explain. What an older profile was made of says nothing of this one. */
static void keep_figures(const struct tuning *t, bool complete)
{
    char kept[PATH_MAX];

    lc_tune_figures_path(t->options->out, t->results.ranks, t->results.nodes, kept);
    if (!complete)
        (void)unlink(kept);
    else if (rename(t->part, kept) != 0) /* it was written a moment ago, beside the profile */
        lc_cli_say("tune: cannot keep %s: %s", kept, strerror(errno));
}

static void finish(struct tuning *t, const struct lc_tune_rule *rules, int n)
{
    const struct lc_tune_summary summary = { t->options->out, rules, n,
                                             count_open(t, false) + count_open(t, true) };

    if (t->options->question.json)
        lc_tune_print_json(&t->results, &summary);
    else
        lc_tune_print_summary(&t->results, &summary);
    keep_figures(t, summary.open == 0);
}

static int tune(const struct options *options)
{
    static struct lc_tune_rule rules[2 * LC_TUNE_POINTS * LC_TUNE_PLACES];
    static struct tuning t;
    int n = 0, err;

    t.options = options;
    t.total_s = options->minutes * 60;
    t.end = lc_deadline_in_ms((int64_t)(t.total_s * 1e3));
    t.fixed_s = t.total_s / 20 < 2 ? t.total_s / 20 : 2;
    err = begin(&t);
    if (!err)
        err = measure_all(&t);
    if (!err && !t.results.nccl) {
        lc_cli_say("tune: there was no time to measure anything");
        err = -ETIME;
    }
    if (!err) {
        n = choose(&t, rules);
        err = n < 0 ? n : lc_tune_write_profile(options->out, &t.results, rules, n);
    }
    wipe(&t);
    if (t.tools.candidate[0])
        (void)unlink(t.tools.candidate);
    if (!err)
        finish(&t, rules, n);
    lc_tune_free(&t.results);
    return err || t.failures ? LC_CLI_FINDING : LC_CLI_FINE;
}

int lc_cli_tune(int argc, char **argv)
{
    static struct options options;
    int code = parse(argc, argv, &options);

    if (code)
        return code;
    if (options.help) {
        (void)fputs(help, stdout);
        return LC_CLI_FINE;
    }
    return options.question.size ? lc_tune_explain(&options.question) : tune(&options);
}
