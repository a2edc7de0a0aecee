/* SPDX-License-Identifier: Apache-2.0
 *
 * What a run says: a table for people on stdout, JSON and CSV for programs. */
#include "perf/bench.h"
#include "perf/document.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct lc_bench_output {
    const struct lc_bench *bench;
    struct lc_output_file json_file;
    struct lc_output_file csv_file;
    struct lc_json json;
    bool progress; /* a line on stderr is to be wiped */
};

static void nccl_text(int code, char *text, size_t size)
{
    snprintf(text, size, "%d.%d.%d", code / 10000, code / 100 % 100, code % 100);
}

void lc_bench_write_machine(struct lc_json *json, const struct lc_bench *bench)
{
    const struct lc_bench_machine *machine = &bench->machine;
    char text[256];

    lc_json_key(json, "machine");
    lc_json_object(json);
    lc_bench_read_line("/proc/cpuinfo", "model name", text, sizeof(text));
    lc_json_key_string(json, "cpu", text);
    lc_json_key_int(json, "cores", sysconf(_SC_NPROCESSORS_ONLN));
    lc_json_key_bool(json, "rig", machine->rig);
    lc_json_key_string(json, "gpu", machine->gpu);
    lc_json_key_int(json, "gpus", machine->gpus);
    lc_bench_read_line("/sys/module/nvidia/version", "", text, sizeof(text));
    lc_json_key_string(json, "driver", machine->rig ? "none" : text);
    lc_json_key_int(json, "driver_cuda", machine->driver);
    nccl_text(machine->nccl, text, sizeof(text));
    lc_json_key_string(json, "nccl", text);
    lc_json_key_string(json, "nccl_path", machine->nccl_path);
    lc_json_key_string(json, "cudart_path", machine->cudart_path);
    lc_json_key_int(json, "ranks", bench->ranks);
    lc_json_key_int(json, "nodes", bench->nodes);
    lc_json_end(json);
}

static void begin_json(struct lc_bench_output *output, int argc, char **argv)
{
    struct lc_json *json = &output->json;

    lc_json_init(json, output->json_file.out);
    lc_json_object(json);
    lc_json_key_string(json, "schema", "loongcomm.bench/1");
    lc_bench_write_machine(json, output->bench);
    lc_bench_write_command(json, NULL, argc, argv);
    lc_bench_write_settings(json);
    lc_json_key(json, "records");
    lc_json_array(json);
}

static void begin_table(const struct lc_bench *bench)
{
    const struct lc_bench_machine *machine = &bench->machine;
    char version[32];

    nccl_text(machine->nccl, version, sizeof(version));
    printf("# loongcomm-bench %s: %d ranks on %s, NCCL %s (%s)\n",
           lc_bench_op_names[bench->options->op], bench->ranks,
           machine->rig ? "the host rig (no GPU: figures of host memory)" : machine->gpu, version,
           machine->nccl_path);
    printf(
        "# size: bytes of a rank's send buffer (all-gather: receive buffer); us: per call, slowest rank; GB/s as in nccl-tests; "
        "cpu: seconds of all ranks' other threads for a GB of a rank's buffer; "
        "ratio: nccl / %s, median of rounds (p10..p90)\n",
        lc_bench_side_name(bench->options, LC_BENCH_OURS));
    printf("%8s %-7s %5s %-10s %12s %12s %12s %8s %8s %8s  %-21s %s\n", "size", "type", "live",
           "variant", "median us", "p10 us", "p99 us", "algbw", "busbw", "cpu", "ratio", "check");
    fflush(stdout);
}

int lc_bench_output_open(const struct lc_bench *bench, int argc, char **argv,
                         struct lc_bench_output **out)
{
    struct lc_bench_output *output = calloc(1, sizeof(*output));
    int err;

    if (!output)
        return -ENOMEM;
    output->bench = bench;
    err = lc_bench_file_open(&output->json_file, bench->options->json);
    if (!err)
        err = lc_bench_file_open(&output->csv_file, bench->options->csv);
    if (err) {
        lc_bench_file_close(&output->json_file, false);
        lc_bench_file_close(&output->csv_file, false);
        free(output);
        return err;
    }
    if (output->json_file.out)
        begin_json(output, argc, argv);
    if (output->csv_file.out)
        fprintf(
            output->csv_file.out,
            "op,bytes,dtype,ranks,live,live_drawn,inplace,graph,sendrecv,tensors,variant,median_us,p10_us,"
            "p99_us,algbw,busbw,verified,samples,inner,slots,cpu_s_per_gb,ratio,ratio_p10,ratio_p90\n");
    begin_table(bench);
    *out = output;
    return 0;
}

static void wipe_progress(struct lc_bench_output *output)
{
    if (output->progress)
        fprintf(stderr, "\r\033[K");
    output->progress = false;
}

void lc_bench_output_progress(struct lc_bench_output *output, int index, int count,
                              const struct lc_bench_case *kase)
{
    char text[128];

    if (!isatty(STDERR_FILENO))
        return;
    lc_bench_case_text(kase, text, sizeof(text));
    fprintf(stderr, "\r\033[K%d of %d: %s", index + 1, count, text);
    output->progress = true;
}

static void print_row(const struct lc_bench *bench, const struct lc_bench_case *kase,
                      enum lc_bench_variant variant, const struct lc_bench_figures *f,
                      const struct lc_bench_figures *ratio)
{
    char size[32];
    char text[64] = "";

    lc_bench_size_text(kase->bytes, size, sizeof(size));
    if (kase->tensors > 1)
        snprintf(size + strlen(size), sizeof(size) - strlen(size), "/%d", kase->tensors);
    if (ratio && variant == LC_BENCH_OURS)
        snprintf(text, sizeof(text), "%.3f (%.3f..%.3f)", ratio->median, ratio->p10, ratio->p90);
    printf("%8s %-7s %5g %-10s %12.2f %12.2f %12.2f %8.2f %8.2f %8.3f  %-21s %s\n", size,
           lc_bench_dtypes[kase->dtype].name, kase->live,
           lc_bench_side_name(bench->options, variant), f->median, f->p10, f->p99,
           lc_bench_algbw(kase, f->median), lc_bench_busbw(kase, bench->ranks, f->median), f->cpu,
           text, "ok");
    fflush(stdout);
}

static void write_record(struct lc_bench_output *output, const struct lc_bench_case *kase,
                         enum lc_bench_variant variant, const struct lc_bench_result *result,
                         const struct lc_bench_figures *f, const struct lc_bench_figures *ratio)
{
    struct lc_json *json = &output->json;
    int ranks = output->bench->ranks;

    lc_json_object(json);
    lc_json_key_string(json, "op", lc_bench_op_names[kase->op]);
    lc_json_key_int(json, "bytes", (int64_t)kase->bytes);
    lc_json_key_string(json, "dtype", lc_bench_dtypes[kase->dtype].name);
    lc_json_key_int(json, "ranks", ranks);
    lc_json_key_double(json, "live", kase->live);
    lc_json_key_double(json, "live_drawn", lc_bench_live_share(kase, ranks));
    lc_json_key_bool(json, "inplace", kase->inplace);
    lc_json_key_bool(json, "graph", kase->graph);
    lc_json_key_bool(json, "sendrecv", kase->sendrecv);
    lc_json_key_bool(json, "mask", kase->mask);
    lc_json_key_int(json, "tensors", kase->tensors);
    lc_json_key_int(json, "experts", kase->experts);
    lc_json_key_string(json, "variant", lc_bench_side_name(output->bench->options, variant));
    lc_json_key_double(json, "median_us", f->median);
    lc_json_key_double(json, "p10_us", f->p10);
    lc_json_key_double(json, "p25_us", f->p25);
    lc_json_key_double(json, "p75_us", f->p75);
    lc_json_key_double(json, "p99_us", f->p99);
    lc_json_key_double(json, "algbw", lc_bench_algbw(kase, f->median));
    lc_json_key_double(json, "busbw", lc_bench_busbw(kase, ranks, f->median));
    lc_json_key_double(json, "cpu_s_per_gb", f->cpu);
    lc_json_key_bool(json, "verified", true); /* a wrong result ends the run */
    lc_json_key_int(json, "rounds", result->rounds);
    lc_json_key_int(json, "iters", result->iters);
    lc_json_key_int(json, "inner", result->inner);
    lc_json_key_int(json, "slots", result->slots);
    if (ratio && variant == LC_BENCH_OURS)
        lc_bench_write_ratio(json, ratio, result->ratios, result->rounds);
    lc_json_end(json);
}

static void write_csv(FILE *out, const struct lc_bench *bench, const struct lc_bench_case *kase,
                      enum lc_bench_variant variant, const struct lc_bench_result *result,
                      const struct lc_bench_figures *f, const struct lc_bench_figures *ratio)
{
    fprintf(out, "%s,%zu,%s,%d,%g,%.4f,%d,%d,%d,%d,%s,%.3f,%.3f,%.3f,%.4f,%.4f,%d,%zu,%d,%d,%.4f,",
            lc_bench_op_names[kase->op], kase->bytes, lc_bench_dtypes[kase->dtype].name,
            bench->ranks, kase->live, lc_bench_live_share(kase, bench->ranks), kase->inplace,
            kase->graph, kase->sendrecv, kase->tensors, lc_bench_side_name(bench->options, variant),
            f->median, f->p10, f->p99, lc_bench_algbw(kase, f->median),
            lc_bench_busbw(kase, bench->ranks, f->median), 1, result->series[variant].count,
            result->inner, result->slots, f->cpu);
    if (ratio && variant == LC_BENCH_OURS)
        fprintf(out, "%.4f,%.4f,%.4f\n", ratio->median, ratio->p10, ratio->p90);
    else
        fprintf(out, ",,\n");
}

void lc_bench_output_result(struct lc_bench_output *output, const struct lc_bench_case *kase,
                            struct lc_bench_result *result)
{
    const struct lc_bench *bench = output->bench;
    struct lc_bench_figures ratio;
    bool has_ratio = lc_bench_figures_of_rounds(result->ratios, result->rounds, &ratio);

    wipe_progress(output);
    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        struct lc_bench_figures f;

        if (!result->series[v].us)
            continue;
        f = lc_bench_figures_of(result->series[v].us, result->series[v].count);
        f.cpu = lc_bench_percentile(result->series[v].cpu, (size_t)result->rounds, 50);
        print_row(bench, kase, v, &f, has_ratio ? &ratio : NULL);
        if (output->json_file.out)
            write_record(output, kase, v, result, &f, has_ratio ? &ratio : NULL);
        if (output->csv_file.out)
            write_csv(output->csv_file.out, bench, kase, v, result, &f, has_ratio ? &ratio : NULL);
    }
}

int lc_bench_output_close(struct lc_bench_output *output, bool complete)
{
    int err;
    int csv_err;

    if (!output)
        return 0;
    wipe_progress(output);
    err = lc_bench_file_close_json(&output->json_file, &output->json, 2, complete);
    csv_err = lc_bench_file_close(&output->csv_file, complete);
    free(output);
    return err ? err : csv_err;
}
