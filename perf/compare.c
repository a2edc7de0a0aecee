/* SPDX-License-Identifier: Apache-2.0
 *
 * `compare REFERENCE NEW`: did loongcomm's gain over NCCL change? Times of two runs cannot be compared, as
 * machines drift; the ratio nccl / loongcomm was measured in turns within one run and can be. */
#include "perf/bench.h"
#include "perf/results.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    EXIT_SAME = 0,
    EXIT_CHANGED = 1,
    EXIT_REFUSED = 2,
};

#ifdef LC_HAVE_CJSON
#include <math.h>

/* Figures of two kinds of machine say nothing about the library. */
static int same_machine(const struct lc_results *a, const struct lc_results *b, bool force)
{
    static const char *const keys[] = { "rig", "gpu", "gpus", "cpu", "cores" };

    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
        const cJSON *x = cJSON_GetObjectItemCaseSensitive(a->machine, keys[i]);
        const cJSON *y = cJSON_GetObjectItemCaseSensitive(b->machine, keys[i]);

        if (x && y && cJSON_Compare(x, y, true))
            continue;
        fprintf(stderr, "loongcomm-bench compare: %s and %s are of different machines (\"%s\")%s\n",
                a->path, b->path, keys[i], force ? "" : "; --force compares them all the same");
        return force ? 0 : -EINVAL;
    }
    return 0;
}

static int name_missing(const struct lc_results *from, const struct lc_results *in)
{
    int missing = 0;

    for (int i = 0; i < from->count; i++) {
        if (!lc_results_find(in, from->records[i].key)) {
            printf("missing  %s: not in %s\n", from->records[i].key, in->path);
            missing++;
        }
    }
    return missing;
}

static bool changed(const struct lc_result *a, const struct lc_result *b, double threshold)
{
    bool apart = a->p90 < b->p10 || b->p90 < a->p10;

    return apart && fabs(b->median - a->median) > threshold / 100 * a->median;
}

static int compare(const struct lc_results *a, const struct lc_results *b, double threshold)
{
    int matched = 0;
    int worse = 0;
    int better = 0;
    int missing = name_missing(a, b) + name_missing(b, a);

    for (int i = 0; i < a->count; i++) {
        const struct lc_result *x = &a->records[i];
        const struct lc_result *y = lc_results_find(b, x->key);
        const char *verdict = "same";

        if (!y)
            continue;
        matched++;
        if (changed(x, y, threshold)) {
            bool is_worse = y->median < x->median;

            worse += is_worse;
            better += !is_worse;
            verdict = is_worse ? "worse" : "better";
        }
        printf("%-8s %s: %.3f (%.3f..%.3f) -> %.3f (%.3f..%.3f), %+.1f %%\n", verdict, x->key,
               x->median, x->p10, x->p90, y->median, y->p10, y->p90,
               100 * (y->median / x->median - 1));
    }
    printf("%d compared, %d worse, %d better, %d missing\n", matched, worse, better, missing);
    if (matched == 0) {
        fprintf(stderr, "loongcomm-bench compare: no case is in both files\n");
        return EXIT_REFUSED;
    }
    return worse || better ? EXIT_CHANGED : EXIT_SAME;
}

static int parse(int argc, char **argv, double *threshold, bool *force, const char **paths)
{
    int count = 0;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--force") == 0) {
            *force = true;
        } else if (strcmp(argv[i], "--threshold") == 0 && i + 1 < argc) {
            char *end;

            *threshold = strtod(argv[++i], &end);
            if (*end || end == argv[i] || !(*threshold >= 0 && *threshold <= 1000))
                return -EINVAL;
        } else if (argv[i][0] == '-' || count == 2) {
            return -EINVAL;
        } else {
            paths[count++] = argv[i];
        }
    }
    return count == 2 ? 0 : -EINVAL;
}

int lc_bench_compare(int argc, char **argv)
{
    struct lc_results a = { 0 };
    struct lc_results b = { 0 };
    const char *paths[2];
    double threshold = 5;
    bool force = false;
    int rc = EXIT_REFUSED;

    if (parse(argc, argv, &threshold, &force, paths)) {
        lc_bench_usage(stderr);
        return EXIT_REFUSED;
    }
    if (lc_results_load(paths[0], &a) == 0 && lc_results_load(paths[1], &b) == 0 &&
        same_machine(&a, &b, force) == 0)
        rc = compare(&a, &b, threshold);
    lc_results_unload(&a);
    lc_results_unload(&b);
    return rc;
}
#else
int lc_bench_compare(int argc, char **argv)
{
    fprintf(stderr, "loongcomm-bench: built without cJSON (libcjson-dev): no compare\n");
    return EXIT_REFUSED;
}
#endif
