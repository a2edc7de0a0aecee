/* SPDX-License-Identifier: Apache-2.0
 *
 * What all parts of loongcomm-bench write alike: files that appear whole or not at all, since they are written beside their
 * name and renamed at the end, and parts of a JSON document (loongcomm.bench/1). */
#ifndef LC_PERF_DOCUMENT_H
#define LC_PERF_DOCUMENT_H

#include "common/json.h"
#include "common/output.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* `path` NULL: none is wanted. 0, or -errno after a line on stderr. */
int lc_bench_file_open(struct lc_output_file *file, const char *path);

/* It is to appear under a longer name (lc_output_extend). */
int lc_bench_file_extend(struct lc_output_file *file, const char *suffix);

/* Without `keep` it goes. Also of one that was not opened. */
int lc_bench_file_close(struct lc_output_file *file, bool keep);

/* Ends a document and its file, the latter only if it is `complete`; `open`: objects and lists that are. */
int lc_bench_file_close_json(struct lc_output_file *file, struct lc_json *json, int open,
                             bool complete);

struct lc_bench_figures {
    double median, p10, p25, p75, p90, p99;
    double cpu; /* seconds a GB; the caller's to set */
};

/* Sorts the values. */
struct lc_bench_figures lc_bench_figures_of(double *values, size_t n);

/* Leaves them in order: in a file a drift can be seen. False: there is no memory, or there are no values. */
bool lc_bench_figures_of_rounds(const double *values, int n, struct lc_bench_figures *out);

/* Of the first line of a file that begins with `key`, what stands behind a colon, or all of it without a key; "unknown". */
void lc_bench_read_line(const char *path, const char *key, char *text, size_t size);

/* The words of the command line, behind `first`, which may be NULL. */
void lc_bench_write_command(struct lc_json *json, const char *first, int argc, char **argv);

/* Settings of loongcomm that are not the default. They decide what was measured. */
void lc_bench_write_settings(struct lc_json *json);

void lc_bench_write_rounds(struct lc_json *json, const double *rounds, int n);
void lc_bench_write_ratio(struct lc_json *json, const struct lc_bench_figures *ratio,
                          const double *rounds, int n);

#endif
