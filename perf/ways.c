/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/ways.h"

#include "common/profile.h"
#include "plugin/tuner/measure.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NCCL_PATH_MAX 250 /* it cuts longer ones */

#ifndef LC_LIBDIR
#define LC_LIBDIR "../lib"
#endif

/* Beside this program: in the build tree, in one folder, or where both are installed. */
static int find_tuner(const char *given, char out[PATH_MAX])
{
    static const char *const places[] = { "../plugin/tuner/", "", LC_LIBDIR "/", "../lib/" };
    char self[PATH_MAX];
    char candidate[2 * PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);

    self[length < 0 ? 0 : length] = '\0';
    if (strrchr(self, '/'))
        strrchr(self, '/')[1] = '\0';
    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        snprintf(candidate, sizeof(candidate), "%s%s" LC_MEASURE_FILE,
                 places[i][0] == '/' ? "" : self, places[i]);
        if (realpath(given ? given : candidate, out) && strlen(out) <= NCCL_PATH_MAX)
            return 0;
        if (given)
            break;
    }
    fprintf(stderr,
            "loongcomm-bench: %s is not near this program, or its path is too long for NCCL; name "
            "it with --tuner\n",
            given ? given : LC_MEASURE_FILE);
    return -ENOENT;
}

/* Of the workers; `text` holds what is made here. */
static int set_variables(struct lc_ways_options *o, const char *tuner, char text[2][PATH_MAX + 32])
{
    char profile[PATH_MAX] = "";

    if (o->profile && !realpath(o->profile, profile)) {
        fprintf(stderr, "loongcomm-bench: %s: %s\n", o->profile, strerror(errno));
        return -ENOENT;
    }
    snprintf(text[0], PATH_MAX + 32, "NCCL_TUNER_PLUGIN=%s", tuner);
    snprintf(text[1], PATH_MAX + 32, "LOONGCOMM_PROFILE=%s", profile);
    o->bench.env[o->bench.n_env++] = text[0];
    o->bench.env[o->bench.n_env++] = text[1];
    o->bench.env[o->bench.n_env++] = "LOONGCOMM_PROFILE_TRUST=yes"; /* from the first call on */
    o->bench.env[o->bench.n_env++] = "LOONGCOMM_ENABLE=yes";
    return 0;
}

static int open_ranks(struct lc_ways_job *job)
{
    const struct lc_ways_options *o = job->options;
    struct lc_bench *bench = job->bench;
    struct lc_bench_set *set = &bench->sets[LC_BENCH_OURS];
    const struct lc_bench_request wide = { .ranks = bench->ranks,
                                           .comm = 1,
                                           .ctas = o->ctas,
                                           .measures = true };
    int err = lc_bench_set_open(&o->bench, LC_BENCH_OURS, &bench->boot, bench->ranks,
                                &bench->machine, bench->replies, set);

    for (int i = 0; i < set->count && !err && o->profile; i++) {
        if (bench->replies[i].product)
            continue;
        fprintf(stderr,
                "loongcomm-bench: rank %d: the tuner does not use %s (NCCL_DEBUG=INFO says why)\n",
                set->first + i, o->profile);
        err = -EIO;
    }
    job->channels[0] = bench->replies[0].channels;
    if (!err && o->ctas)
        err = lc_bench_set_connect(set, &bench->boot, &bench->machine, &wide, bench->replies);
    if (!err && o->ctas)
        job->channels[1] = bench->replies[0].channels;
    for (int i = 1; i < o->comms && !err; i++) {
        const struct lc_bench_request equal = { .ranks = bench->ranks,
                                                .comm = i + 1,
                                                .measures = true };

        err = lc_bench_set_connect(set, &bench->boot, &bench->machine, &equal, bench->replies);
    }
    if (!err)
        err = bench->boot.ops->bcast(&bench->boot, job->channels, sizeof(job->channels));
    return err ? err : bench->boot.ops->barrier(&bench->boot);
}

static bool is_there(const struct lc_ways_options *o, int n, const struct lc_bench_case *kase)
{
    for (int i = 0; i < n; i++) {
        if (o->cases[i].op == kase->op && o->cases[i].bytes == kase->bytes)
            return true;
    }
    return false;
}

/* As other benchmarks round: whole elements, equal parts for each rank. What is the same then is measured once. */
static void round_sizes(struct lc_ways_options *o, int ranks)
{
    int n = 0;

    for (int i = 0; i < o->n_cases; i++) {
        struct lc_bench_case kase = o->cases[i];

        kase.bytes = lc_bench_round_bytes(kase.op, kase.bytes, 4, (size_t)ranks);
        if (!is_there(o, n, &kase))
            o->cases[n++] = kase;
    }
    o->n_cases = n;
}

/* The dearest cases come last, and the little that the others may have been too long must not cost them. */
#define LATE 0.15

struct field {
    struct lc_ways_entrant entrant[LC_WAYS_FIELD];
    int n;
};

/* The cases that there was no time for, or -errno. */
static int run_cases(struct lc_ways_job *job, struct lc_ways_output *output)
{
    static struct field fields[2][LC_BENCH_OPS]; /* this size's and the last one's */
    const struct lc_ways_options *o = job->options;
    int64_t begin = lc_now_ns();
    int turn[LC_BENCH_OPS] = { 0 };

    for (int i = 0; i < o->n_cases; i++) {
        const struct lc_bench_case *kase = &o->cases[i];
        struct field *now = &fields[turn[kase->op] & 1][kase->op];
        const struct field *last = &fields[~turn[kase->op] & 1][kase->op];
        double left_s = o->bench.budget_s - (double)(lc_now_ns() - begin) / 1e9;
        int err;

        err = job->bench->boot.ops->bcast(&job->bench->boot, &left_s, sizeof(left_s));
        if (err)
            return err;
        if (i && left_s <= -LATE * o->bench.budget_s)
            return o->n_cases - i;
        left_s = left_s > 0 ? left_s : 0;
        *now = (struct field){ 0 };
        err = lc_ways_measure(job, kase, last->entrant, last->n,
                              left_s * lc_ways_share(o->cases, o->n_cases, i), now->entrant,
                              &now->n);
        if (err)
            return err;
        turn[kase->op]++;
        job->done++;
        if (output)
            lc_ways_output_case(output, kase, now->entrant, now->n);
    }
    return 0;
}

static int measure_all(struct lc_ways_job *job, int argc, char **argv)
{
    struct lc_bench *bench = job->bench;
    struct lc_ways_output *output = NULL;
    int left = 0;
    int err = open_ranks(job);

    if (!err && bench->boot.rank == 0)
        err = lc_ways_output_open(job, argc, argv, &output);
    if (!err)
        left = run_cases(job, output);
    if (left < 0)
        err = left;
    if (err)
        left = job->options->n_cases - job->done;
    if (!err)
        err = lc_bench_set_quit(&bench->sets[LC_BENCH_OURS], bench->replies);
    lc_bench_set_close(&bench->sets[LC_BENCH_OURS]);
    if (output) {
        int close_err = lc_ways_output_close(output, left, !err);

        err = err ? err : close_err;
    }
    return err;
}

/* Each launcher's ranks read the file of their own host, and no library that agrees on it is loaded here. */
static int agree_on_profile(struct lc_bench *bench, const char *path)
{
    struct lc_profile *profile = bench->boot.size > 1 ? lc_profile_load(path) : NULL;
    uint64_t own = profile ? profile->hash : 0;
    uint64_t first = own;
    int err = bench->boot.ops->bcast(&bench->boot, &first, sizeof(first));

    free(profile);
    if (err || first == own)
        return err;
    fprintf(stderr,
            "loongcomm-bench: rank %d: %s is not what rank 0 reads under that name, and ranks that "
            "choose differently hang\n",
            bench->boot.rank, path);
    return -EIO;
}

int lc_bench_ways(int argc, char **argv)
{
    static struct lc_ways_options options;
    static struct lc_bench bench = { .options = &options.bench };
    static struct lc_ways_job job = { .options = &options, .bench = &bench };
    static char text[2][PATH_MAX + 32];
    char tuner[PATH_MAX];
    int err;

    if (lc_ways_options_parse(argc, argv, &options))
        return 2;
    if (options.help) {
        lc_ways_usage(stdout);
        return 0;
    }
    if (find_tuner(options.tuner, tuner) || set_variables(&options, tuner, text))
        return 2;
    err = lc_bench_begin(&bench);
    if (!err && options.profile)
        err = agree_on_profile(&bench, options.profile);
    if (!err) {
        round_sizes(&options, bench.ranks);
        err = measure_all(&job, argc, argv);
    }
    return lc_bench_end(&bench, err);
}
