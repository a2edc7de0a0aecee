/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/results.h"

#ifdef LC_HAVE_CJSON
#include "common/cleanup.h"
#include "common/input.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE   ((size_t)64 << 20)
#define MAX_RECORD 4096

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
    fprintf(stderr, "loongcomm-bench: %s: %s\n", path, why);
    return -EINVAL;
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

static void name_case(const cJSON *item, struct lc_result *out)
{
    char group[32] = "", experts[32] = "";

    if (out->tensors > 1)
        snprintf(group, sizeof(group), " in %.0f tensors", out->tensors);
    if (out->experts != LC_BENCH_EXPERTS)
        snprintf(experts, sizeof(experts), " of %.0f experts", out->experts);
    snprintf(out->key, sizeof(out->key),
             "%.20s %.0f bytes%s %.20s, %.0f ranks, live %g%s %s %s %s %s", out->op, out->bytes,
             group, out->dtype, out->ranks, out->live, experts, flag_text(item, "inplace"),
             flag_text(item, "graph"), flag_text(item, "sendrecv"), flag_text(item, "mask"));
    for (size_t end = strlen(out->key); end > 0 && out->key[end - 1] == ' '; end--)
        out->key[end - 1] = '\0';
}

static int read_key(const cJSON *item, struct lc_result *out)
{
    const char *op = get_text(item, "op");
    const char *dtype = get_text(item, "dtype");

    out->tensors = 1;
    out->experts = LC_BENCH_EXPERTS;
    if (cJSON_HasObjectItem(item, "tensors") && get_number(item, "tensors", 1, 1e9, &out->tensors))
        return -EINVAL;
    if (cJSON_HasObjectItem(item, "experts") && get_number(item, "experts", 1, 1e6, &out->experts))
        return -EINVAL;
    if (!op || !dtype || get_number(item, "bytes", 1, 0x1p60, &out->bytes) ||
        get_number(item, "ranks", 1, 1e6, &out->ranks) ||
        get_number(item, "live", 0, 1, &out->live))
        return -EINVAL;
    snprintf(out->op, sizeof(out->op), "%s", op);
    snprintf(out->dtype, sizeof(out->dtype), "%s", dtype);
    name_case(item, out);
    return 0;
}

/* 1: a record with a ratio, 0: one without (the plain variant), -EINVAL: nonsense. */
static int read_record(const cJSON *item, struct lc_result *out)
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
    if (get_number(item, "median_us", 0, 1e12, &out->us))
        out->us = 0;
    return 1;
}

const struct lc_result *lc_results_find(const struct lc_results *in, const char *key)
{
    for (int i = 0; i < in->count; i++) {
        if (strcmp(in->records[i].key, key) == 0)
            return &in->records[i];
    }
    return NULL;
}

static int read_records(struct lc_results *results)
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
        struct lc_result record = { 0 };
        int has_ratio = read_record(item, &record);

        if (has_ratio < 0)
            return refuse(results->path, "a record is malformed");
        if (has_ratio && lc_results_find(results, record.key))
            return refuse(results->path, "two records for one case");
        if (has_ratio)
            results->records[results->count++] = record;
    }
    if (results->count == 0)
        return refuse(results->path, "no record with a ratio: both variants are needed");
    return 0;
}

int lc_results_load(const char *path, struct lc_results *out)
{
    lc_autofree char *text = NULL;
    const char *schema;
    const char *end;
    size_t size;
    int err;

    out->path = path;
    err = lc_input_read_argument(path, MAX_FILE, &text, &size);
    if (err)
        return refuse(path, lc_input_why(err));
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

void lc_results_unload(struct lc_results *results)
{
    cJSON_Delete(results->root);
    free(results->records);
}
#endif
