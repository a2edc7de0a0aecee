/* SPDX-License-Identifier: Apache-2.0
 *
 * What loongcomm-bench has written: the machine, and one record after the other. */
#include "common/cleanup.h"
#include "common/input.h"
#include "interpose/cli/json_walk.h"
#include "interpose/cli/tune.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *lc_tune_read_text(const char *path)
{
    char *text = NULL;
    size_t size;

    (void)lc_input_read(AT_FDCWD, path, 0, LC_TUNE_TEXT_MAX, &text, &size);
    return text;
}

int lc_tune_nccl_version(const char *text)
{
    int part[3];

    if (sscanf(text, "%4d.%2d.%2d", &part[0], &part[1], &part[2]) != 3)
        return 0;
    return part[0] * 10000 + part[1] * 100 + part[2];
}

struct reader {
    struct lc_tune_document *out;
    void (*take)(const struct lc_tune_record *record, void *arg);
    void *arg;
    bool begun;
    struct lc_tune_record record;
};

static void end_record(struct reader *reader)
{
    if (reader->begun)
        reader->take(&reader->record, reader->arg);
    reader->record = (struct lc_tune_record){ 0 };
}

static void visit_ratio(const char *name, const char *value, struct lc_tune_record *record)
{
    const struct {
        const char *name;
        double *value;
    } figures[] = {
        {"median", &record->ratio.median},
        { "p10",   &record->ratio.p10   },
        { "p90",   &record->ratio.p90   },
        { "low",   &record->low         },
        { "high",  &record->high        },
    };

    for (size_t i = 0; i < sizeof(figures) / sizeof(*figures); i++) {
        if (strcmp(name, figures[i].name) == 0)
            *figures[i].value = strtod(value, NULL);
    }
}

#define COPY(to, value) (void)snprintf(to, sizeof(to), "%s", value)

/* The operation is the first of a record's members. */
static void visit_record(struct reader *reader, const char *name, const char *value)
{
    struct lc_tune_record *record = &reader->record;

    if (strcmp(name, "op") == 0) {
        end_record(reader);
        reader->begun = true;
        COPY(record->op, value);
    } else if (strcmp(name, "bytes") == 0) {
        record->bytes = strtoull(value, NULL, 10);
    } else if (strcmp(name, "way") == 0) {
        COPY(record->way, value);
    } else if (strcmp(name, "state") == 0) {
        record->measured = strcmp(value, "measured") == 0;
    } else if (strcmp(name, "first_us") == 0 || strcmp(name, "median_us") == 0) {
        record->us = strtod(value, NULL); /* in this order */
    } else if (strncmp(name, "ratio.", 6) == 0) {
        visit_ratio(name + 6, value, record);
    }
}

static void visit(const char *path, const char *value, void *arg)
{
    struct reader *reader = arg;
    struct lc_tune_document *out = reader->out;

    if (strncmp(path, "records.", 8) == 0)
        visit_record(reader, path + 8, value);
    else if (strcmp(path, "machine.nccl") == 0)
        out->machine.nccl = lc_tune_nccl_version(value);
    else if (strcmp(path, "machine.rig") == 0)
        out->machine.rig = strcmp(value, "true") == 0;
    else if (strcmp(path, "machine.ranks") == 0)
        out->machine.ranks = (int)strtol(value, NULL, 10);
    else if (strcmp(path, "machine.nodes") == 0)
        out->machine.nodes = (int)strtol(value, NULL, 10);
    else if (strcmp(path, "left") == 0)
        out->left = (int)strtol(value, NULL, 10);
    else if (strcmp(path, "failed.op") == 0)
        COPY(out->failed_op, value);
    else if (strcmp(path, "failed.way") == 0)
        COPY(out->failed_way, value);
}

int lc_tune_read(const char *path, struct lc_tune_document *out,
                 void (*take)(const struct lc_tune_record *record, void *arg), void *arg)
{
    lc_autofree char *text = lc_tune_read_text(path);
    struct reader reader = { .out = out, .take = take, .arg = arg };
    const struct lc_tune_machine *machine = &out->machine;

    *out = (struct lc_tune_document){ 0 };
    if (!text)
        return -ENOENT;
    if (lc_cli_json_walk(text, visit, &reader) != 0 || machine->nccl < 20000 ||
        machine->ranks < 2 || machine->nodes < 1 || machine->nodes > machine->ranks)
        return -EINVAL;
    end_record(&reader);
    return 0;
}

void lc_tune_say_unread(int err, const char *path, char *why, size_t size)
{
    if (err == -ENOENT)
        (void)snprintf(why, size, "it wrote no %.400s", path);
    else
        (void)snprintf(why, size, "what it wrote is no result");
}
