/* SPDX-License-Identifier: Apache-2.0
 *
 * `compare REFERENCE NEW`: did loongcomm's gain over NCCL change? Times of two runs cannot be compared, as
 * machines drift; the ratio nccl / loongcomm was measured in turns within one run and can be. */
#include "perf/bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    EXIT_SAME = 0,
    EXIT_CHANGED = 1,
    EXIT_REFUSED = 2,
};

#ifdef LC_HAVE_CJSON
#include "common/cleanup.h"

#include <cjson/cJSON.h>
#include <math.h>

#define MAX_FILE   ((size_t)64 << 20)
#define MAX_RECORD 4096

struct record {
    char key[160]; /* the case in words, the same in both files */
    double median, p10, p90;
};

struct results {
    const char *path;
    cJSON *root;
    const cJSON *machine;
    struct record *records;
    int count;
};

/* Numbers of a file end up on a terminal: only those of a plain name do. */
static bool plain_text(const char *text)
{
    size_t length = strlen(text);

    for (size_t i = 0; i < length; i++) {
        if ((unsigned char)text[i] < ' ' || text[i] == 0x7f)
            return false;
    }
    return length < 64;
}

static int refuse(const char *path, const char *why)
{
    fprintf(stderr, "loongcomm-bench compare: %s: %s\n", path, why);
    return -EINVAL;
}

static int read_file(const char *path, char **out, size_t *out_size)
{
    lc_autofclose FILE *in = fopen(path, "re");
    size_t size = 0;
    size_t room = 1 << 16;
    lc_autofree char *text = malloc(room);

    if (!in || !text)
        return refuse(path, in ? "out of memory" : strerror(errno));
    while (!feof(in) && !ferror(in)) {
        size += fread(text + size, 1, room - 1 - size, in);
        if (size + 1 == room) {
            char *larger = room < MAX_FILE ? realloc(text, room * 2) : NULL;

            if (!larger)
                return refuse(path, "too large");
            text = larger;
            room *= 2;
        }
    }
    if (ferror(in))
        return refuse(path, "cannot be read");
    text[size] = '\0';
    *out = text;
    *out_size = size;
    text = NULL;
    return 0;
}

static const char *get_text(const cJSON *object, const char *key)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));

    return text && plain_text(text) ? text : NULL;
}

static int get_number(const cJSON *object, const char *key, double low, double high, double *out)
{
    double value = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(object, key));

    if (!(value >= low && value <= high))
        return -EINVAL;
    *out = value;
    return 0;
}

static const char *flag_text(const cJSON *item, const char *key)
{
    return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(item, key)) ? key : "";
}

static int read_key(const cJSON *item, struct record *out)
{
    const char *op = get_text(item, "op");
    const char *dtype = get_text(item, "dtype");
    double bytes;
    double ranks;
    double live;
    double tensors = 1;
    char group[32] = "";

    if (cJSON_HasObjectItem(item, "tensors") && get_number(item, "tensors", 1, 1e9, &tensors))
        return -EINVAL;
    if (!op || !dtype || get_number(item, "bytes", 1, 0x1p60, &bytes) ||
        get_number(item, "ranks", 1, 1e6, &ranks) || get_number(item, "live", 0, 1, &live))
        return -EINVAL;
    if (tensors > 1)
        snprintf(group, sizeof(group), " in %.0f tensors", tensors);
    snprintf(out->key, sizeof(out->key), "%s %.0f bytes%s %s, %.0f ranks, live %g %s %s %s", op,
             bytes, group, dtype, ranks, live, flag_text(item, "inplace"), flag_text(item, "graph"),
             flag_text(item, "sendrecv"));
    for (size_t end = strlen(out->key); end > 0 && out->key[end - 1] == ' '; end--)
        out->key[end - 1] = '\0';
    return 0;
}

/* 1: a record with a ratio, 0: one without (the plain variant), -EINVAL: nonsense. */
static int read_record(const cJSON *item, struct record *out)
{
    const cJSON *ratio = cJSON_GetObjectItemCaseSensitive(item, "ratio");

    if (!cJSON_IsObject(item) || read_key(item, out))
        return -EINVAL;
    if (!ratio)
        return 0;
    if (!cJSON_IsObject(ratio) || get_number(ratio, "median", 1e-9, 1e9, &out->median) ||
        get_number(ratio, "p10", 1e-9, 1e9, &out->p10) ||
        get_number(ratio, "p90", 1e-9, 1e9, &out->p90) || out->p10 > out->median ||
        out->median > out->p90)
        return -EINVAL;
    return 1;
}

static const struct record *find(const struct results *in, const char *key)
{
    for (int i = 0; i < in->count; i++) {
        if (strcmp(in->records[i].key, key) == 0)
            return &in->records[i];
    }
    return NULL;
}

static int read_records(struct results *results)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(results->root, "records");
    const cJSON *item;
    int most = cJSON_GetArraySize(list);

    if (!cJSON_IsArray(list) || most > MAX_RECORD)
        return refuse(results->path, "no list of records, or too many of them");
    results->records = calloc((size_t)most + 1, sizeof(*results->records));
    if (!results->records)
        return refuse(results->path, "out of memory");
    cJSON_ArrayForEach(item, list)
    {
        struct record record = { 0 };
        int has_ratio = read_record(item, &record);

        if (has_ratio < 0)
            return refuse(results->path, "a record is malformed");
        if (has_ratio && find(results, record.key))
            return refuse(results->path, "two records for one case");
        if (has_ratio)
            results->records[results->count++] = record;
    }
    if (results->count == 0)
        return refuse(results->path, "no record with a ratio: both variants are needed");
    return 0;
}

static int load(const char *path, struct results *out)
{
    lc_autofree char *text = NULL;
    const char *schema;
    const char *end;
    size_t size;

    out->path = path;
    if (read_file(path, &text, &size))
        return -EINVAL;
    if (memchr(text, '\0', size)) /* blank to cJSON */
        return refuse(path, "not a JSON document");
    out->root = cJSON_ParseWithLengthOpts(text, size + 1, &end, true);
    if (!out->root || end != text + size)
        return refuse(path, "not a JSON document");
    schema = get_text(out->root, "schema");
    if (!schema || strcmp(schema, "loongcomm.bench/1") != 0)
        return refuse(path, "its schema is not loongcomm.bench/1");
    out->machine = cJSON_GetObjectItemCaseSensitive(out->root, "machine");
    if (!cJSON_IsObject(out->machine))
        return refuse(path, "it names no machine");
    return read_records(out);
}

static void unload(struct results *results)
{
    cJSON_Delete(results->root);
    free(results->records);
}

/* Figures of two kinds of machine say nothing about the library. */
static int same_machine(const struct results *a, const struct results *b, bool force)
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

static int name_missing(const struct results *from, const struct results *in)
{
    int missing = 0;

    for (int i = 0; i < from->count; i++) {
        if (!find(in, from->records[i].key)) {
            printf("missing  %s: not in %s\n", from->records[i].key, in->path);
            missing++;
        }
    }
    return missing;
}

static bool changed(const struct record *a, const struct record *b, double threshold)
{
    bool apart = a->p90 < b->p10 || b->p90 < a->p10;

    return apart && fabs(b->median - a->median) > threshold / 100 * a->median;
}

static int compare(const struct results *a, const struct results *b, double threshold)
{
    int matched = 0;
    int worse = 0;
    int better = 0;
    int missing = name_missing(a, b) + name_missing(b, a);

    for (int i = 0; i < a->count; i++) {
        const struct record *x = &a->records[i];
        const struct record *y = find(b, x->key);
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
    struct results a = { 0 };
    struct results b = { 0 };
    const char *paths[2];
    double threshold = 5;
    bool force = false;
    int rc = EXIT_REFUSED;

    if (parse(argc, argv, &threshold, &force, paths)) {
        lc_bench_usage(stderr);
        return EXIT_REFUSED;
    }
    if (load(paths[0], &a) == 0 && load(paths[1], &b) == 0 && same_machine(&a, &b, force) == 0)
        rc = compare(&a, &b, threshold);
    unload(&a);
    unload(&b);
    return rc;
}
#else
int lc_bench_compare(int argc, char **argv)
{
    fprintf(stderr, "loongcomm-bench: built without cJSON (libcjson-dev): no compare\n");
    return EXIT_REFUSED;
}
#endif
