/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/net/net.h"

#include "common/cleanup.h"
#include "common/config.h"
#include "common/json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

struct lc_bnet_output {
    const struct lc_bnet_options *options;
    char *temporary; /* renamed at the end */
    FILE *out;       /* NULL: no file is wanted */
    struct lc_json json;
};

struct figures {
    double median, p10, q1, q3, p90, p99;
};

static void cpu_name(char *text, size_t size)
{
    lc_autofclose FILE *in = fopen("/proc/cpuinfo", "re");
    char line[512];

    (void)snprintf(text, size, "unknown");
    while (in && fgets(line, sizeof(line), in)) {
        char *value = strchr(line, ':');

        if (strncmp(line, "model name", 10) != 0 || !value)
            continue;
        value[strcspn(value, "\n")] = '\0';
        (void)snprintf(text, size, "%.200s", value + 2);
        return;
    }
}

static void write_machine(struct lc_json *json)
{
    struct utsname system;
    char text[256];

    lc_json_key(json, "machine");
    lc_json_object(json);
    cpu_name(text, sizeof(text));
    lc_json_key_string(json, "cpu", text);
    lc_json_key_int(json, "cores", sysconf(_SC_NPROCESSORS_ONLN));
    lc_json_key_string(json, "kernel", uname(&system) == 0 ? system.release : "unknown");
    lc_json_key(json, "rig");
    lc_json_bool(json, false);
    lc_json_key_string(json, "gpu", "none used");
    lc_json_key_int(json, "gpus", 0);
    lc_json_key_int(json, "ranks", 2);
    lc_json_end(json);
}

static void write_settings(struct lc_json *json)
{
    struct lc_config_entry entries[64];
    size_t count = lc_config_list(entries, sizeof(entries) / sizeof(*entries));

    lc_json_key(json, "settings");
    lc_json_object(json);
    for (size_t i = 0; i < count && i < sizeof(entries) / sizeof(*entries); i++) {
        if (strcmp(entries[i].value, entries[i].dflt) != 0)
            lc_json_key_string(json, entries[i].name, entries[i].value);
    }
    lc_json_end(json);
}

static void begin_json(struct lc_bnet_output *output, int argc, char **argv)
{
    struct lc_json *json = &output->json;

    lc_json_init(json, output->out);
    lc_json_object(json);
    lc_json_key_string(json, "schema", "loongcomm.bench/1");
    write_machine(json);
    lc_json_key(json, "command");
    lc_json_array(json);
    lc_json_string(json, "loongcomm-bench");
    for (int i = 0; i < argc; i++)
        lc_json_string(json, argv[i]);
    lc_json_end(json);
    write_settings(json);
    lc_json_key(json, "records");
    lc_json_array(json);
}

int lc_bnet_output_open(const struct lc_bnet_options *options, int argc, char **argv,
                        struct lc_bnet_output **out)
{
    lc_autofree struct lc_bnet_output *output = calloc(1, sizeof(*output));

    if (!output)
        return -ENOMEM;
    output->options = options;
    if (options->json) {
        if (asprintf(&output->temporary, "%s.tmp%d", options->json, (int)getpid()) < 0)
            return -ENOMEM;
        output->out = fopen(output->temporary, "we");
        if (!output->out) {
            fprintf(stderr, "loongcomm-bench: cannot write %s: %s\n", options->json,
                    strerror(errno));
            free(output->temporary);
            return -EIO;
        }
        begin_json(output, argc, argv);
    }
    printf(
        "# loongcomm-bench net: 2 processes, %d connection(s) each way, %d messages in flight; us: "
        "per message; GB/s: each way, all connections together\n"
        "# cpu: seconds of both processes for a GB; ratio: socket / loongcomm by time, median of "
        "rounds (quartiles); in peer's rows: peer / loongcomm\n",
        options->flows, options->depth);
    printf("%-12s %8s %5s %-10s %11s %8s %-15s %8s  %-21s %s\n", "op", "size", "live", "side",
           "median us", "GB/s", "(quartiles)", "cpu", "ratio", "check");
    fflush(stdout);
    *out = output;
    output = NULL;
    return 0;
}

static struct figures figures_of(const double *values, int count)
{
    lc_autofree double *copy = calloc((size_t)count, sizeof(*copy));
    size_t n = (size_t)count;

    if (!copy)
        return (struct figures){ 0 };
    memcpy(copy, values, n * sizeof(*copy));
    return (struct figures){
        .median = lc_bench_percentile(copy, n, 50),
        .p10 = lc_bench_percentile(copy, n, 10),
        .q1 = lc_bench_percentile(copy, n, 25),
        .q3 = lc_bench_percentile(copy, n, 75),
        .p90 = lc_bench_percentile(copy, n, 90),
        .p99 = lc_bench_percentile(copy, n, 99),
    };
}

static double gbps(const struct lc_bnet_case *kase, double us)
{
    return us > 0 ? (double)kase->bytes / us / 1e3 : 0;
}

static void print_row(const struct lc_bnet_case *kase, const char *side, const struct figures *us,
                      const struct figures *cpu, const struct figures *ratio)
{
    char size[32];
    char spread[32];
    char text[64] = "";

    lc_bench_size_text(kase->bytes, size, sizeof(size));
    (void)snprintf(spread, sizeof(spread), "(%.2f..%.2f)", gbps(kase, us->q3), gbps(kase, us->q1));
    if (ratio)
        (void)snprintf(text, sizeof(text), "%.3f (%.3f..%.3f)", ratio->median, ratio->q1,
                       ratio->q3);
    printf("%-12s %8s %5g %-10s %11.2f %8.3f %-15s %8.3f  %-21s %s\n", lc_bnet_op_names[kase->op],
           size, kase->live, side, us->median, gbps(kase, us->median), spread, cpu->median, text,
           "ok");
    fflush(stdout);
}

static void write_ratio(struct lc_json *json, const double *rounds, int n,
                        const struct figures *ratio)
{
    lc_json_key(json, "ratio");
    lc_json_object(json);
    lc_json_key_double(json, "median", ratio->median);
    lc_json_key_double(json, "p10", ratio->p10);
    lc_json_key_double(json, "p25", ratio->q1);
    lc_json_key_double(json, "p75", ratio->q3);
    lc_json_key_double(json, "p90", ratio->p90);
    lc_json_key(json, "rounds");
    lc_json_array(json);
    for (int i = 0; i < n; i++)
        lc_json_double(json, rounds[i]);
    lc_json_end(json);
    lc_json_end(json);
}

static void write_record(struct lc_bnet_output *output, const struct lc_bnet_case *kase,
                         const char *side, const struct lc_bnet_result *result,
                         const struct figures *us, const struct figures *cpu, const double *ratios,
                         const struct figures *ratio)
{
    struct lc_json *json = &output->json;

    lc_json_object(json);
    lc_json_key_string(json, "op", lc_bnet_op_names[kase->op]);
    lc_json_key_int(json, "bytes", (int64_t)kase->bytes);
    lc_json_key_string(json, "dtype", "u8");
    lc_json_key_int(json, "ranks", 2);
    lc_json_key_double(json, "live", kase->live);
    lc_json_key_int(json, "flows", output->options->flows);
    lc_json_key_int(json, "depth", output->options->depth);
    lc_json_key_string(json, "variant", side);
    lc_json_key_double(json, "median_us", us->median);
    lc_json_key_double(json, "p10_us", us->p10);
    lc_json_key_double(json, "p25_us", us->q1);
    lc_json_key_double(json, "p75_us", us->q3);
    lc_json_key_double(json, "p99_us", us->p99);
    lc_json_key_double(json, "algbw", gbps(kase, us->median));
    lc_json_key_double(json, "busbw", gbps(kase, us->median));
    lc_json_key_double(json, "cpu_s_per_gb", cpu->median);
    lc_json_key(json, "verified");
    lc_json_bool(json, true); /* a wrong byte ends the run */
    lc_json_key_int(json, "rounds", result->rounds);
    lc_json_key_int(json, "messages", (int64_t)result->messages);
    if (ratios)
        write_ratio(json, ratios, result->rounds, ratio);
    lc_json_end(json);
}

void lc_bnet_output_result(struct lc_bnet_output *output, const struct lc_bnet_case *kase,
                           struct lc_bnet_result *result)
{
    for (int s = 0; s < LC_BNET_SIDES; s++) {
        struct figures us;
        struct figures cpu;
        struct figures ratio;
        /* Ours has the socket's, another plugin its own. */
        const double *ratios = s == LC_BNET_OURS   ? result->ratios[LC_BNET_SOCKET]
                               : s == LC_BNET_PEER ? result->ratios[s]
                                                   : NULL;

        if (!result->series[s].us)
            continue;
        us = figures_of(result->series[s].us, result->rounds);
        cpu = figures_of(result->series[s].cpu, result->rounds);
        if (ratios)
            ratio = figures_of(ratios, result->rounds);
        print_row(kase, lc_bnet_ways[s]->name, &us, &cpu, ratios ? &ratio : NULL);
        if (output->out)
            write_record(output, kase, lc_bnet_ways[s]->name, result, &us, &cpu, ratios, &ratio);
    }
}

int lc_bnet_output_close(struct lc_bnet_output *output, bool complete)
{
    int err = 0;

    if (output->out) {
        if (complete) {
            lc_json_end(&output->json);
            lc_json_end(&output->json);
            err = lc_json_finish(&output->json);
        }
        if (fclose(output->out) != 0)
            err = -errno;
        if (complete && !err && rename(output->temporary, output->options->json) != 0)
            err = -errno;
        if (err)
            fprintf(stderr, "loongcomm-bench: cannot write %s: %s\n", output->options->json,
                    strerror(-err));
        if (err || !complete)
            unlink(output->temporary);
    }
    free(output->temporary);
    free(output);
    return err;
}
