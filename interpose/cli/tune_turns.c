/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's ways by `loongcomm-bench ways`: one job, in which each call can go another way, so that all of them are compared with
 * the default in turns, and starting costs once. What a candidate profile would do is measured there too, through the
 * tuner plugin that a job uses. */
#include "common/cleanup.h"
#include "interpose/cli/child.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/json_walk.h"
#include "interpose/cli/tune.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#define BEYOND_MS 180000 /* what a run may last beyond its budget */

static void add_case(struct lc_tune_command *command, const struct lc_tune_turns *turns, int op)
{
    char list[LC_TUNE_POINTS * 12];
    int used = 0;

    for (int i = 0; i < turns->n_sizes[op] && used < (int)sizeof(list) - 24; i++)
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
    int op; /* of the record that is being read; -1: none of ours */
    uint64_t bytes;
    char way[64];
    bool measured; /* to the end: not dropped after a few rounds */
    struct lc_tune_ratio ratio;
    double low, high; /* what its median is between; 0: not said */
};

/* -1: the candidate's; -2: nothing that was asked for. */
static int step_of(int op, const char *way)
{
    if (strcmp(way, "profile") == 0)
        return -1;
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

static void take_record(struct reader *reader)
{
    struct lc_tune_turned *out = reader->out;
    struct lc_tune_ratio *ratio = &reader->ratio;
    int step = step_of(reader->op, reader->way);

    /* A round in which something else happened says nothing of the way, and there may be few. */
    if (reader->low > 0 && reader->high > 0) {
        ratio->p10 = reader->low;
        ratio->p90 = reader->high;
    }

    if (reader->op < 0 || !reader->measured || step < -1 ||
        !(ratio->median > 0 && ratio->p10 > 0 && ratio->p90 > 0))
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
        step,
        (uint8_t)reader->op,
        {reader->bytes, *ratio}
    };
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

static void visit_machine(const char *path, const char *value, struct lc_tune_turned *out)
{
    if (strcmp(path, "machine.nccl") == 0)
        out->nccl = lc_tune_nccl_version(value);
    else if (strcmp(path, "machine.rig") == 0)
        out->rig = strcmp(value, "true") == 0;
    else if (strcmp(path, "machine.ranks") == 0)
        out->ranks = (int)strtol(value, NULL, 10);
    else if (strcmp(path, "machine.nodes") == 0)
        out->nodes = (int)strtol(value, NULL, 10);
    else if (strcmp(path, "left") == 0)
        out->left = (int)strtol(value, NULL, 10);
}

static void visit(const char *path, const char *value, void *arg)
{
    struct reader *reader = arg;

    visit_machine(path, value, reader->out);
    if (strcmp(path, "records.op") == 0) {
        reader->op = op_of(value);
        reader->low = reader->high = 0;
    } else if (strcmp(path, "records.bytes") == 0)
        reader->bytes = strtoull(value, NULL, 10);
    else if (strcmp(path, "records.way") == 0)
        (void)snprintf(reader->way, sizeof(reader->way), "%s", value);
    else if (strcmp(path, "records.state") == 0)
        reader->measured = strcmp(value, "measured") == 0;
    else if (strcmp(path, "records.ratio.median") == 0)
        reader->ratio.median = strtod(value, NULL);
    else if (strcmp(path, "records.ratio.low") == 0)
        reader->low = strtod(value, NULL);
    else if (strcmp(path, "records.ratio.high") == 0)
        reader->high = strtod(value, NULL);
    else if (strcmp(path, "records.ratio.p10") == 0)
        reader->ratio.p10 = strtod(value, NULL);
    else if (strcmp(path, "records.ratio.p90") == 0) {
        reader->ratio.p90 = strtod(value, NULL);
        take_record(reader); /* the last of a record that counts */
    }
}

static int read_json(const char *path, struct lc_tune_turned *out)
{
    lc_autofree char *text = lc_tune_read_text(path);
    struct reader reader = { .out = out, .op = -1 };

    if (!text) {
        (void)snprintf(out->why, sizeof(out->why), "it wrote no %.400s", path);
        return -ENOENT;
    }
    if (lc_cli_json_walk(text, visit, &reader) != 0 || out->nccl < 20000 || out->ranks < 2 ||
        out->nodes < 1 || out->nodes > out->ranks) {
        (void)snprintf(out->why, sizeof(out->why), "what it wrote is no result");
        return -EINVAL;
    }
    return reader.err;
}

int lc_tune_take_turns(const struct lc_tune_tools *tools, const struct lc_tune_turns *turns,
                       struct lc_tune_turned *out)
{
    static struct lc_cli_outcome outcome;
    static struct lc_tune_command command;
    struct lc_cli_child child = { .argv = command.word,
                                  .timeout_ms = (int64_t)(turns->budget_s * 3000) + BEYOND_MS };
    int err = -EIO;

    memset(out, 0, sizeof(*out));
    memset(&command, 0, sizeof(command));
    build(tools, turns, &command);
    (void)unlink(tools->json);
    lc_cli_child_run(&child, &outcome);
    if (outcome.end == LC_CLI_EXITED && outcome.code == 0)
        err = read_json(tools->json, out);
    else
        (void)snprintf(out->why, sizeof(out->why), "%.100s: %.380s",
                       lc_cli_child_end(&child, &outcome), lc_cli_child_last_line(&outcome));
    (void)unlink(tools->json);
    return err;
}
