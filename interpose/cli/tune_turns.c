/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's ways by `loongcomm-bench ways`: one job, in which each call can go another way, so that all of them are compared with
 * the default in turns, and starting costs once. What a candidate profile would do is measured there too, through the
 * tuner plugin that a job uses. */
#include "interpose/cli/cli.h"
#include "interpose/cli/tune.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COMMS "2" /* a rule shall gain on connections of other luck, too */

static void add_case(struct lc_tune_command *command, const struct lc_tune_turns *turns, int op)
{
    char list[LC_TUNE_LIST];
    int used = 0;

    for (int i = 0; i < turns->n_sizes[op]; i++)
        used += snprintf(list + used, sizeof(list) - (size_t)used, "%s%" PRIu64, i ? "," : "",
                         turns->sizes[op][i]);
    lc_tune_word(command, "--case");
    lc_tune_wordf(command, "%s:%s", lc_tune_bench_op((uint8_t)op), list);
}

/* As the bench names it. */
static void way_name(const struct lc_profile_rule *way, char *out, size_t size)
{
    (void)snprintf(out, size, "%s/%s/%u", lc_profile_algorithm_name(way->algorithm),
                   lc_profile_protocol_name(way->protocol), way->width);
}

static void build(const struct lc_tune_tools *tools, const struct lc_tune_turns *turns,
                  struct lc_tune_command *command)
{
    for (char *const *word = tools->launcher; word && *word; word++)
        lc_tune_word(command, *word);
    lc_tune_word(command, tools->bench);
    lc_tune_word(command, "ways");
    for (int op = 0; op < LC_PROFILE_OPS; op++) {
        if (turns->n_sizes[op])
            add_case(command, turns, op);
    }
    for (int i = 0; turns->wanted && i < lc_tune_n_steps; i++) {
        const struct lc_tune_step *step = &lc_tune_steps[i];
        char name[LC_TUNE_LINE];

        if (!turns->wanted[i] || step->kind != LC_TUNE_NCCL)
            continue;
        way_name(&step->way, name, sizeof(name));
        lc_tune_word(command, "--way");
        lc_tune_wordf(command, "%s:%s", lc_tune_bench_op(step->way.op), name);
    }
    if (!turns->wanted) {
        lc_tune_word(command, "--profile");
        lc_tune_word(command, tools->candidate);
    }
    if (tools->ranks) {
        lc_tune_word(command, "--ranks");
        lc_tune_wordf(command, "%d", tools->ranks);
    }
    if (tools->graph)
        lc_tune_word(command, "--graph");
    lc_tune_word(command, "--comms");
    lc_tune_word(command, COMMS);
    lc_tune_word(command, "--budget");
    lc_tune_wordf(command, "%.2f", turns->budget_s < 0.1 ? 0.1 : turns->budget_s);
    lc_tune_word(command, "--timeout");
    lc_tune_wordf(command, "%d", LC_TUNE_WAIT_S);
    lc_tune_word(command, "--json");
    lc_tune_word(command, tools->json);
    command->word[command->n] = NULL;
}

/* --- what the bench has written --- */

struct reader {
    struct lc_tune_turned *out;
    int err;
};

/* -1: the candidate's; -2: nothing that was asked for. The default is what AGAIN is of. */
static int step_of(int op, const char *way)
{
    if (strcmp(way, "profile") == 0)
        return -1;
    if (strcmp(way, "default") == 0)
        way = "again";
    for (int i = 0; i < lc_tune_n_steps; i++) {
        const struct lc_tune_step *step = &lc_tune_steps[i];
        char name[LC_TUNE_LINE] = "again";

        if (step->kind == LC_TUNE_NCCL)
            way_name(&step->way, name, sizeof(name));
        if (lc_tune_step_is_turn(step) && step->way.op == op && strcmp(name, way) == 0)
            return i;
    }
    return -2;
}

static int op_of(const char *name)
{
    for (int op = 0; op < LC_PROFILE_OPS; op++) {
        if ((op == LC_PROFILE_ALL_GATHER || op == LC_PROFILE_REDUCE_SCATTER ||
             op == LC_PROFILE_ALL_REDUCE) &&
            strcmp(lc_tune_bench_op((uint8_t)op), name) == 0)
            return op;
    }
    return -1;
}

static void take_record(const struct lc_tune_record *record, void *arg)
{
    struct reader *reader = arg;
    struct lc_tune_turned *out = reader->out;
    struct lc_tune_ratio ratio = record->ratio;
    int op = op_of(record->op);
    int step = step_of(op, record->way);

    bool is_default = strcmp(record->way, "default") == 0;
    bool measured = record->measured && !is_default;
    double us = strcmp(record->way, "again") == 0 || !(record->us > 0) ? 0 : record->us;

    /* A round in which something else happened says nothing of the way, and there may be few. */
    if (record->low > 0 && record->high > 0) {
        ratio.p10 = record->low;
        ratio.p90 = record->high;
    }
    measured = measured && lc_tune_is_ratio(&ratio);
    if (op < 0 || step < -1 || !(measured || us > 0) || reader->err)
        return;
    if (out->n == out->room) {
        size_t room = out->room ? out->room * 2 : 256;
        struct lc_tune_turn *turns = realloc(out->turns, room * sizeof(*turns));

        if (!turns) {
            reader->err = -ENOMEM;
            return;
        }
        out->turns = turns;
        out->room = room;
    }
    out->turns[out->n++] = (struct lc_tune_turn){
        .step = step,
        .op = (uint8_t)op,
        .measured = measured,
        .us = us,
        .at = {.bytes = record->bytes, .ratio = ratio}
    };
}

static int read_json(const char *path, struct lc_tune_turned *out)
{
    struct reader reader = { .out = out };
    struct lc_tune_document document;
    int err = lc_tune_read(path, &document, take_record, &reader);

    err = err ? err : reader.err;
    if (err)
        return err;
    out->machine = document.machine;
    out->left = document.left;
    out->culprit = step_of(op_of(document.failed_op), document.failed_way);
    return 0;
}

/* One job after another, those of an earlier call first. */
static void keep(const char *json, const char *name)
{
    char kept[PATH_MAX];
    int number = 1;

    do
        (void)snprintf(kept, sizeof(kept), "%s.ways.%d", name, number++);
    while (access(kept, F_OK) == 0);
    if (rename(json, kept) != 0 && errno != ENOENT)
        lc_cli_say("tune: cannot keep %s: %s", kept, strerror(errno));
}

int lc_tune_take_turns(const struct lc_tune_tools *tools, const struct lc_tune_turns *turns,
                       struct lc_tune_turned *out)
{
    static struct lc_tune_command command;
    char part[PATH_MAX + 8]; /* what a job that died had measured before */
    int err;

    memset(out, 0, sizeof(*out));
    memset(&command, 0, sizeof(command));
    build(tools, turns, &command);
    (void)snprintf(part, sizeof(part), "%s.part", tools->json);
    (void)unlink(tools->json);
    (void)unlink(part);
    err = lc_tune_run_bench(&command, turns->budget_s, out->why, sizeof(out->why));
    if (!err) {
        err = read_json(tools->json, out);
        if (err)
            lc_tune_say_unread(err, tools->json, out->why, sizeof(out->why));
        else
            out->why[0] = '\0';
    } else if (read_json(part, out) == 0) {
        out->died = true;
        err = 0;
    }
    if (err || out->culprit < 0 || lc_tune_steps[out->culprit].kind != LC_TUNE_NCCL)
        out->culprit = -1; /* the default is no way to leave out */
    if (tools->keep)
        keep(tools->json, tools->keep);
    (void)unlink(tools->json);
    (void)unlink(part);
    return err;
}
