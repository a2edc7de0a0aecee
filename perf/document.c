/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/document.h"

#include "common/cleanup.h"
#include "common/config.h"
#include "common/input.h"
#include "perf/bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int say(int err, const char *path)
{
    if (err)
        fprintf(stderr, "loongcomm-bench: cannot write %s: %s\n", path, lc_input_why(err));
    return err;
}

int lc_bench_file_open(struct lc_output_file *file, const char *path)
{
    *file = (struct lc_output_file){ 0 };
    return path ? say(lc_output_open(file, path), path) : 0;
}

int lc_bench_file_extend(struct lc_output_file *file, const char *suffix)
{
    int err = lc_output_extend(file, suffix);

    if (err)
        fprintf(stderr, "loongcomm-bench: cannot write %s%s: %s\n", file->path, suffix,
                lc_input_why(err));
    return err;
}

int lc_bench_file_close(struct lc_output_file *file, bool keep)
{
    const char *path = file->path;

    return say(lc_output_close(file, keep), path);
}

int lc_bench_file_close_json(struct lc_output_file *file, struct lc_json *json, int open,
                             bool complete)
{
    int err = 0;
    int close_err;

    if (file->out && complete) {
        while (open-- > 0)
            lc_json_end(json);
        err = lc_json_finish(json);
    }
    close_err = lc_bench_file_close(file, complete && !err);
    return err ? err : close_err;
}

struct lc_bench_figures lc_bench_figures_of(double *values, size_t n)
{
    return (struct lc_bench_figures){
        .median = lc_bench_percentile(values, n, 50),
        .p10 = lc_bench_percentile(values, n, 10),
        .p25 = lc_bench_percentile(values, n, 25),
        .p75 = lc_bench_percentile(values, n, 75),
        .p90 = lc_bench_percentile(values, n, 90),
        .p99 = lc_bench_percentile(values, n, 99),
    };
}

bool lc_bench_figures_of_rounds(const double *values, int n, struct lc_bench_figures *out)
{
    lc_autofree double *copy = values && n > 0 ? calloc((size_t)n, sizeof(*copy)) : NULL;

    if (!copy)
        return false;
    memcpy(copy, values, (size_t)n * sizeof(*copy));
    *out = lc_bench_figures_of(copy, (size_t)n);
    return true;
}

void lc_bench_read_line(const char *path, const char *key, char *text, size_t size)
{
    lc_autofclose FILE *in = fopen(path, "re");
    char line[512];

    (void)snprintf(text, size, "unknown");
    while (in && fgets(line, sizeof(line), in)) {
        char *value = *key ? strchr(line, ':') : NULL;

        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        (void)snprintf(text, size, "%.200s", value && value[1] ? value + 2 : line);
        return;
    }
}

void lc_bench_write_command(struct lc_json *json, const char *first, int argc, char **argv)
{
    lc_json_key(json, "command");
    lc_json_array(json);
    if (first)
        lc_json_string(json, first);
    for (int i = 0; i < argc; i++)
        lc_json_string(json, argv[i]);
    lc_json_end(json);
}

void lc_bench_write_settings(struct lc_json *json)
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

void lc_bench_write_rounds(struct lc_json *json, const double *rounds, int n)
{
    lc_json_key(json, "rounds");
    lc_json_array(json);
    for (int i = 0; i < n; i++)
        lc_json_double(json, rounds[i]);
    lc_json_end(json);
}

void lc_bench_write_ratio(struct lc_json *json, const struct lc_bench_figures *ratio,
                          const double *rounds, int n)
{
    lc_json_key(json, "ratio");
    lc_json_object(json);
    lc_json_key_double(json, "median", ratio->median);
    lc_json_key_double(json, "p10", ratio->p10);
    lc_json_key_double(json, "p25", ratio->p25);
    lc_json_key_double(json, "p75", ratio->p75);
    lc_json_key_double(json, "p90", ratio->p90);
    lc_bench_write_rounds(json, rounds, n);
    lc_json_end(json);
}
