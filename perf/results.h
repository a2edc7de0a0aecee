/* SPDX-License-Identifier: Apache-2.0
 *
 * Stored results (loongcomm.bench/1), read as what comes from outside: what compares and what draws them share this. */
#ifndef LC_PERF_RESULTS_H
#define LC_PERF_RESULTS_H

#define LC_BENCH_EXPERTS 4 /* of a case that does not say it */

#ifdef LC_HAVE_CJSON
#include <cjson/cJSON.h>

/* One case that was measured with and without loongcomm in turns. */
struct lc_result {
    char key[192]; /* the case in words, the same in all files */
    char op[64], dtype[64];
    double bytes, ranks, live, tensors, experts;
    double median, p10, p90; /* of the ratio nccl / loongcomm */
    double us;               /* median time with loongcomm; 0: not given */
};

struct lc_results {
    const char *path;
    cJSON *root;
    const cJSON *machine;
    struct lc_result *records;
    int count;
};

/* 0, or a negative number after one line on standard error that names the file. Unload in both cases. */
int lc_results_load(const char *path, struct lc_results *out);
void lc_results_unload(struct lc_results *results);

/* NULL: no such case. */
const struct lc_result *lc_results_find(const struct lc_results *in, const char *key);
#endif

#endif
