/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/document.h"
#include "perf/net/net.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

struct lc_bnet_output {
    const struct lc_bnet_options *options;
    struct lc_output_file file;
    struct lc_json json;
};

static void write_machine(struct lc_json *json)
{
    struct utsname system;
    char text[256];

    lc_json_key(json, "machine");
    lc_json_object(json);
    lc_bench_read_line("/proc/cpuinfo", "model name", text, sizeof(text));
    lc_json_key_string(json, "cpu", text);
    lc_json_key_int(json, "cores", sysconf(_SC_NPROCESSORS_ONLN));
    lc_json_key_string(json, "kernel", uname(&system) == 0 ? system.release : "unknown");
    lc_json_key_bool(json, "rig", false);
    lc_json_key_string(json, "gpu", "none used");
    lc_json_key_int(json, "gpus", 0);
    lc_json_key_int(json, "ranks", 2);
    lc_json_end(json);
}

static void begin_json(struct lc_bnet_output *output, int argc, char **argv)
{
    struct lc_json *json = &output->json;

    lc_json_init(json, output->file.out);
    lc_json_object(json);
    lc_json_key_string(json, "schema", "loongcomm.bench/1");
    write_machine(json);
    lc_bench_write_command(json, "loongcomm-bench", argc, argv);
    lc_bench_write_settings(json);
    lc_json_key(json, "records");
    lc_json_array(json);
}

int lc_bnet_output_open(const struct lc_bnet_options *options, int argc, char **argv,
                        struct lc_bnet_output **out)
{
    struct lc_bnet_output *output = calloc(1, sizeof(*output));
    int err;

    if (!output)
        return -ENOMEM;
    output->options = options;
    err = lc_bench_file_open(&output->file, options->json);
    if (err) {
        free(output);
        return err;
    }
    if (output->file.out)
        begin_json(output, argc, argv);
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
    return 0;
}

static double gbps(const struct lc_bnet_case *kase, double us)
{
    return us > 0 ? (double)kase->bytes / us / 1e3 : 0;
}

static void print_row(const struct lc_bnet_case *kase, const char *side,
                      const struct lc_bench_figures *us, const struct lc_bench_figures *cpu,
                      const struct lc_bench_figures *ratio)
{
    char size[32];
    char spread[32];
    char text[64] = "";

    lc_bench_size_text(kase->bytes, size, sizeof(size));
    (void)snprintf(spread, sizeof(spread), "(%.2f..%.2f)", gbps(kase, us->p75),
                   gbps(kase, us->p25));
    if (ratio)
        (void)snprintf(text, sizeof(text), "%.3f (%.3f..%.3f)", ratio->median, ratio->p25,
                       ratio->p75);
    printf("%-12s %8s %5g %-10s %11.2f %8.3f %-15s %8.3f  %-21s %s\n", lc_bnet_op_names[kase->op],
           size, kase->live, side, us->median, gbps(kase, us->median), spread, cpu->median, text,
           "ok");
    fflush(stdout);
}

static void write_record(struct lc_bnet_output *output, const struct lc_bnet_case *kase,
                         const char *side, const struct lc_bnet_result *result,
                         const struct lc_bench_figures *us, const struct lc_bench_figures *cpu,
                         const double *ratios, const struct lc_bench_figures *ratio)
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
    lc_json_key_double(json, "p25_us", us->p25);
    lc_json_key_double(json, "p75_us", us->p75);
    lc_json_key_double(json, "p99_us", us->p99);
    lc_json_key_double(json, "algbw", gbps(kase, us->median));
    lc_json_key_double(json, "busbw", gbps(kase, us->median));
    lc_json_key_double(json, "cpu_s_per_gb", cpu->median);
    lc_json_key_bool(json, "verified", true); /* a wrong byte ends the run */
    lc_json_key_int(json, "rounds", result->rounds);
    lc_json_key_int(json, "messages", (int64_t)result->messages);
    if (ratios)
        lc_bench_write_ratio(json, ratio, ratios, result->rounds);
    lc_json_end(json);
}

void lc_bnet_output_result(struct lc_bnet_output *output, const struct lc_bnet_case *kase,
                           struct lc_bnet_result *result)
{
    for (int s = 0; s < LC_BNET_SIDES; s++) {
        struct lc_bench_figures us, cpu, ratio;
        /* Ours has the socket's, another plugin its own. */
        const double *ratios = s == LC_BNET_OURS   ? result->ratios[LC_BNET_SOCKET]
                               : s == LC_BNET_PEER ? result->ratios[s]
                                                   : NULL;

        if (!result->series[s].us)
            continue;
        if (!lc_bench_figures_of_rounds(result->series[s].us, result->rounds, &us) ||
            !lc_bench_figures_of_rounds(result->series[s].cpu, result->rounds, &cpu))
            continue;
        if (ratios && !lc_bench_figures_of_rounds(ratios, result->rounds, &ratio))
            ratios = NULL;
        print_row(kase, lc_bnet_ways[s]->name, &us, &cpu, ratios ? &ratio : NULL);
        if (output->file.out)
            write_record(output, kase, lc_bnet_ways[s]->name, result, &us, &cpu, ratios, &ratio);
    }
}

int lc_bnet_output_close(struct lc_bnet_output *output, bool complete)
{
    int err = lc_bench_file_close_json(&output->file, &output->json, 2, complete);

    free(output);
    return err;
}
