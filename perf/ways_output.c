/* SPDX-License-Identifier: Apache-2.0
 *
 * A line for people on stdout for each case, and a JSON document with a record for each way of it. */
#include "perf/document.h"
#include "perf/ways.h"

#include "common/profile.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct lc_ways_output {
    const struct lc_ways_job *job;
    struct lc_output_file file;
    struct lc_json json;
};

static const char *const states[] = { "left",  "ruled-out", "same",    "slow",
                                      "tried", "behind",    "measured" };

static double percentile(const double *values, int n, double percent)
{
    double copy[LC_WAYS_ROUNDS];

    memcpy(copy, values, (size_t)n * sizeof(*copy));
    return lc_bench_percentile(copy, (size_t)n, percent);
}

/* What NCCL has taken. */
static void choice_name(uint64_t choice, char out[LC_WAYS_NAME])
{
    const struct lc_way way = { .kind = LC_WAY_FORCED,
                                .algorithm = choice >> 24 & 0xff,
                                .protocol = choice >> 16 & 0xff,
                                .channels = choice & 0xffff };

    if (choice == 0 || way.algorithm >= LC_PROFILE_ALGORITHMS ||
        way.protocol >= LC_PROFILE_PROTOCOLS)
        snprintf(out, LC_WAYS_NAME, "unknown");
    else
        lc_way_name(&way, out);
}

int lc_ways_output_open(const struct lc_ways_job *job, int argc, char **argv,
                        struct lc_ways_output **out)
{
    struct lc_ways_output *output = calloc(1, sizeof(*output));
    int err;

    if (!output)
        return -ENOMEM;
    output->job = job;
    err = lc_bench_file_open(&output->file, job->options->bench.json);
    if (err) {
        free(output);
        return err;
    }
    if (output->file.out) {
        struct lc_json *json = &output->json;

        lc_json_init(json, output->file.out);
        lc_json_object(json);
        lc_json_key_string(json, "schema", "loongcomm.bench/1");
        lc_bench_write_machine(json, job->bench);
        lc_bench_write_command(json, NULL, argc, argv);
        lc_json_key_int(json, "channels", job->channels[0]);
        lc_json_key_int(json, "wide_channels", job->channels[1]);
        lc_json_key_int(json, "comms", job->options->comms); /* round r is number r / 2 % comms */
        lc_json_key(json, "records");
        lc_json_array(json);
    }
    printf(
        "# loongcomm-bench ways: %d ranks on %s; ratio: NCCL's default / the way, median of rounds "
        "(p10..p90); channels: %d, wide: %d\n",
        job->bench->ranks, job->bench->machine.rig ? "the host rig" : job->bench->machine.gpu,
        job->channels[0], job->channels[1]);
    *out = output;
    return 0;
}

static void write_ratios(struct lc_json *json, const char *key, const struct lc_ways_entrant *e,
                         double noise)
{
    double low, high;

    lc_json_key(json, key);
    lc_json_object(json);
    lc_json_key_double(json, "median", lc_ways_ratio(e));
    lc_ways_bounds(e, noise, &low, &high);
    lc_json_key_double(json, "low", low); /* what the median is between */
    lc_json_key_double(json, "high", high);
    lc_json_key_double(json, "p10", percentile(e->ratio, e->rounds, 10));
    lc_json_key_double(json, "p90", percentile(e->ratio, e->rounds, 90));
    lc_bench_write_rounds(json, e->ratio, e->rounds);
    lc_json_end(json);
}

static void write_record(struct lc_json *json, const struct lc_bench_case *kase,
                         const struct lc_ways_entrant *e, double noise)
{
    char name[LC_WAYS_NAME];

    lc_json_object(json);
    lc_json_key_string(json, "op", lc_bench_op_names[kase->op]);
    lc_json_key_int(json, "bytes", (int64_t)kase->bytes);
    lc_json_key_string(json, "dtype", lc_bench_dtypes[kase->dtype].name);
    lc_json_key(json, "graph");
    lc_json_bool(json, kase->graph);
    lc_json_key(json, "verified"); /* the first call; a wrong result ends the run */
    lc_json_bool(json, !kase->unchecked && e->first_us > 0);
    lc_way_name(e->way, name);
    lc_json_key_string(json, "way", name);
    lc_json_key_string(json, "state", states[e->state]);
    if (e->choice) {
        choice_name(e->choice, name);
        lc_json_key_string(json, "choice", name);
    }
    if (e->first_us > 0)
        lc_json_key_double(json, "first_us", e->first_us);
    if (e->rounds) {
        lc_json_key_double(json, "median_us", lc_ways_median(e->us, e->rounds));
        write_ratios(json, "ratio", e, noise);
    }
    if (e->finals) {
        struct lc_ways_entrant anew = { .way = e->way, .comms = e->comms, .rounds = e->finals };

        memcpy(anew.ratio, e->final, sizeof(anew.ratio));
        write_ratios(json, "final", &anew, noise);
    }
    lc_json_end(json);
}

static void print_case(const struct lc_bench_case *kase, const struct lc_ways_entrant *field, int n)
{
    const struct lc_ways_entrant *best = NULL;
    char size[32], name[LC_WAYS_NAME];
    int counts[LC_WAY_MEASURED + 1] = { 0 };

    lc_bench_size_text(kase->bytes, size, sizeof(size));
    printf("%s %s:", lc_bench_op_names[kase->op], size);
    for (int i = 0; i < n; i++) {
        const struct lc_ways_entrant *e = &field[i];

        counts[e->state] += e->way->kind == LC_WAY_FORCED;
        if (e->state == LC_WAY_MEASURED && (!best || lc_ways_ratio(e) > lc_ways_ratio(best)))
            best = e;
        if (e->way->kind == LC_WAY_FORCED)
            continue;
        lc_way_name(e->way, name);
        printf(" %s", name);
        if (e->way->kind == LC_WAY_DEFAULT)
            printf(" %.1f us", lc_ways_median(e->us, e->rounds));
        else
            printf(" %.3f (%.3f..%.3f)", lc_ways_ratio(e), percentile(e->ratio, e->rounds, 10),
                   percentile(e->ratio, e->rounds, 90));
        choice_name(e->choice, name);
        printf(" [%s]", name);
    }
    if (best) {
        lc_way_name(best->way, name);
        printf(" best %s %.3f;", name, lc_ways_ratio(best));
    }
    printf(" %d rounds; ways: %d measured, %d behind, %d tried, %d slow, %d ruled out, "
           "%d the same as others, %d left\n",
           field[0].rounds, counts[LC_WAY_MEASURED], counts[LC_WAY_BEHIND], counts[LC_WAY_TRIED],
           counts[LC_WAY_SLOW], counts[LC_WAY_RULED_OUT], counts[LC_WAY_SAME], counts[LC_WAY_LEFT]);
    fflush(stdout);
}

void lc_ways_output_case(struct lc_ways_output *output, const struct lc_bench_case *kase,
                         const struct lc_ways_entrant *field, int n)
{
    print_case(kase, field, n);
    for (int i = 0; output->file.out && i < n; i++)
        write_record(&output->json, kase, &field[i], lc_ways_noise(field, n));
}

/* What was under way, if a turn was. */
static void write_failed(struct lc_ways_output *output)
{
    const struct lc_ways_job *job = output->job;
    char name[LC_WAYS_NAME];

    if (!job->way)
        return;
    lc_way_name(job->way, name);
    lc_json_key(&output->json, "failed");
    lc_json_object(&output->json);
    lc_json_key_string(&output->json, "op", lc_bench_op_names[job->kase->op]);
    lc_json_key_int(&output->json, "bytes", (int64_t)job->kase->bytes);
    lc_json_key_string(&output->json, "way", name);
    lc_json_end(&output->json);
}

/* What a job that fails had measured before is FILE.part's. */
int lc_ways_output_close(struct lc_ways_output *output, int left, bool good)
{
    bool complete = true;
    int err;

    if (left > 0)
        printf("%d cases are left%s\n", left, good ? ": the time is up" : "");
    if (output->file.out) {
        lc_json_end(&output->json);
        lc_json_key_int(&output->json, "left", left > 0 ? left : 0);
        if (!good) {
            write_failed(output);
            complete = lc_bench_file_extend(&output->file, ".part") == 0;
        }
    }
    err = lc_bench_file_close_json(&output->file, &output->json, 1, complete);
    free(output);
    return err;
}
