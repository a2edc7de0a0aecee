/* SPDX-License-Identifier: Apache-2.0
 *
 * Comparisons by loongcomm-bench: plain NCCL and another way in turns of one run, every result checked. What a rule would
 * do is measured as it will be used, through the library or the tuner plugin with a profile of that rule. */
#include "common/cleanup.h"
#include "interpose/cli/child.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/json_walk.h"
#include "interpose/cli/tune.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PLUGIN_MAX 250    /* NCCL cuts longer paths */
#define BEYOND_MS  180000 /* what a run may last beyond its budget */

int lc_tune_find_tools(struct lc_tune_tools *out)
{
    if (lc_cli_find_bench(out->bench) != 0) {
        lc_cli_say("tune: loongcomm-bench is not beside this program; reinstall");
        return -ENOENT;
    }
    if (lc_cli_find_tuner(out->plugin) != 0 || strlen(out->plugin) > PLUGIN_MAX) {
        lc_cli_say("tune: there is no libnccl-tuner-loongcomm.so near, or its path is too long for "
                   "NCCL: NCCL's own ways are not tried");
        out->plugin[0] = '\0';
    }
    return 0;
}

void lc_tune_word(struct lc_tune_command *command, const char *word)
{
    if (command->n < LC_TUNE_ARGS - 1)
        command->word[command->n++] = (char *)word;
}

void lc_tune_wordf(struct lc_tune_command *command, const char *format, ...)
{
    size_t room = sizeof(command->text) - command->used;
    char *at = command->text + command->used;
    va_list ap;
    int length;

    va_start(ap, format);
    length = vsnprintf(at, room, format, ap);
    va_end(ap);
    if (length < 0 || (size_t)length >= room)
        return; /* the longest command fits */
    command->used += (size_t)length + 1;
    lc_tune_word(command, at);
}

static void add_env(struct lc_tune_command *command, const char *name, const char *value)
{
    lc_tune_word(command, "--env-b");
    lc_tune_wordf(command, "%s=%s", name, value);
}

static void add_side(struct lc_tune_command *command, const struct lc_tune_tools *tools,
                     const struct lc_tune_run *run)
{
    bool bf16 = run->kind == LC_TUNE_CAST || run->wire;

    if (run->kind == LC_TUNE_EQUAL) {
        lc_tune_word(command, "--no-preload");
        return;
    }
    add_env(command, "LOONGCOMM_ENABLE", "yes");
    add_env(command, "LOONGCOMM_PROFILE", run->kind == LC_TUNE_CAST ? "" : tools->candidate);
    add_env(command, "LOONGCOMM_PEER", run->kind == LC_TUNE_RINGS ? "auto" : "off");
    add_env(command, "LOONGCOMM_ALLREDUCE_WIRE", bf16 ? "bf16" : "data");
    add_env(command, "LOONGCOMM_MIN_BYTES", "0");
    add_env(command, "LOONGCOMM_REPORT", "json");
    add_env(command, "LOONGCOMM_DIR", tools->reports);
    add_env(command, "LOONGCOMM_EXACT", "fp32");
    if (bf16) {
        lc_tune_word(command, "--bits"); /* sums that bf16 holds */
        lc_tune_word(command, "8");
    }
}

const char *lc_tune_bench_op(uint8_t op)
{
    switch (op) {
    case LC_PROFILE_ALL_REDUCE: return "allreduce";
    case LC_PROFILE_REDUCE_SCATTER: return "reducescatter";
    case LC_PROFILE_ALL_GATHER: return "allgather";
    default: return "alltoall"; /* also as sends and receives */
    }
}

/* The benchmark's sizes are those of a rank's buffer; what is sent to one rank is a part of it. */
static uint64_t parts(uint8_t op, int ranks)
{
    return op == LC_PROFILE_SEND ? (uint64_t)ranks : 1;
}

#define AGREE_BYTES ((uint64_t)256 << 10)

/* The first case is one whose calls are not so small that they are left to NCCL, nor slow: at it the ranks agree. */
static int first_size(const struct lc_tune_run *run)
{
    int first = 0;

    while (first + 1 < run->n_sizes && run->sizes[first + 1] <= AGREE_BYTES)
        first++;
    return first;
}

static void add_sizes(struct lc_tune_command *command, const struct lc_tune_run *run)
{
    char list[LC_TUNE_LIST];
    int first = first_size(run);
    int used = snprintf(list, sizeof(list), "%" PRIu64,
                        run->sizes[first] * parts(run->op, run->ranks));

    for (int i = 0; i < run->n_sizes; i++) {
        if (i != first)
            used += snprintf(list + used, sizeof(list) - (size_t)used, ",%" PRIu64,
                             run->sizes[i] * parts(run->op, run->ranks));
    }
    lc_tune_word(command, "--sizes");
    lc_tune_wordf(command, "%s", list);
}

static void build(const struct lc_tune_tools *tools, const struct lc_tune_run *run,
                  struct lc_tune_command *command)
{
    for (char *const *word = tools->launcher; word && *word; word++)
        lc_tune_word(command, *word);
    lc_tune_word(command, tools->bench);
    lc_tune_word(command, lc_tune_bench_op(run->op));
    add_sizes(command, run);
    lc_tune_word(command, "--types");
    lc_tune_word(command, run->two_types ? "f32,bf16" : "f32");
    lc_tune_word(command, "--live");
    lc_tune_word(command, tools->live);
    if (run->op == LC_PROFILE_SEND)
        lc_tune_word(command, "--sendrecv");
    if (tools->ranks) {
        lc_tune_word(command, "--ranks");
        lc_tune_wordf(command, "%d", tools->ranks);
    }
    if (tools->graph)
        lc_tune_word(command, "--graph");
    lc_tune_word(command, "--budget");
    lc_tune_wordf(command, "%.2f", run->budget_s < 0.1 ? 0.1 : run->budget_s);
    lc_tune_word(command, "--settle");
    lc_tune_wordf(command, "%.2f", run->settle_s);
    lc_tune_word(command, "--timeout");
    lc_tune_wordf(command, "%d", LC_TUNE_WAIT_S);
    lc_tune_word(command, "--json");
    lc_tune_word(command, tools->json);
    add_side(command, tools, run);
    command->word[command->n] = NULL;
}

/* --- what the bench has written --- */

struct reader {
    struct lc_tune_found *out;
    uint64_t parts;
};

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

static void take_record(const struct lc_tune_record *record, void *arg)
{
    const struct reader *reader = arg;
    struct lc_tune_found *out = reader->out;
    const struct lc_tune_ratio *ratio = &record->ratio;
    uint64_t bytes = record->bytes / reader->parts;

    if (!lc_tune_is_ratio(ratio))
        return;
    for (int i = 0; i < out->n; i++) {
        struct lc_tune_ratio *old = &out->at[i].ratio;

        if (out->at[i].bytes != bytes)
            continue;
        *old = (struct lc_tune_ratio){ smaller(old->median, ratio->median),
                                       smaller(old->p10, ratio->p10),
                                       smaller(old->p90, ratio->p90) };
        return;
    }
    if (out->n < LC_TUNE_CHECKS)
        out->at[out->n++] = (struct lc_tune_recheck){ .bytes = bytes, .ratio = *ratio };
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = ((const struct lc_tune_recheck *)a)->bytes;
    uint64_t y = ((const struct lc_tune_recheck *)b)->bytes;

    return (x > y) - (x < y);
}

struct calls {
    bool mapped; /* the path that is being read */
    double all, through_memory;
};

static void visit_report(const char *path, const char *value, void *arg)
{
    struct calls *calls = arg;

    if (strcmp(path, "communicators.operations.paths.path") == 0)
        calls->mapped = strcmp(value, "rings") == 0;
    if (strcmp(path, "communicators.operations.paths.calls") != 0)
        return;
    calls->all += strtod(value, NULL);
    if (calls->mapped)
        calls->through_memory += strtod(value, NULL);
}

/* Of the ranks on this machine; the folder is gone afterwards. */
static double read_reports(const char *folder)
{
    DIR *dir = opendir(folder);
    struct calls calls = { 0 };
    struct dirent *entry;

    while (dir && (entry = readdir(dir))) {
        lc_autofree char *path = NULL;
        lc_autofree char *text = NULL;

        if (entry->d_name[0] == '.' || asprintf(&path, "%s/%s", folder, entry->d_name) < 0)
            continue;
        text = lc_tune_read_text(path);
        if (text)
            (void)lc_cli_json_walk(text, visit_report, &calls);
        (void)unlink(path);
    }
    if (dir)
        closedir(dir);
    (void)rmdir(folder);
    return calls.all > 0 ? calls.through_memory / calls.all : -1;
}

static int read_json(const char *path, uint64_t n_parts, struct lc_tune_found *out)
{
    struct reader reader = { .out = out, .parts = n_parts };
    struct lc_tune_document document;
    int err = lc_tune_read(path, &document, take_record, &reader);

    if (err) {
        lc_tune_say_unread(err, path, out->why, sizeof(out->why));
        return err;
    }
    out->machine = document.machine;
    qsort(out->at, (size_t)out->n, sizeof(out->at[0]), by_size);
    return 0;
}

int lc_tune_run_bench(struct lc_tune_command *command, double budget_s, char *why, size_t size)
{
    static struct lc_cli_outcome outcome;
    struct lc_cli_child child = { .argv = command->word,
                                  .timeout_ms = (int64_t)(budget_s * 3000) + BEYOND_MS };

    lc_cli_child_run(&child, &outcome);
    if (outcome.end == LC_CLI_EXITED && outcome.code == 0) {
        (void)snprintf(why, size, "%.500s", lc_cli_child_last_line(&outcome));
        return 0;
    }
    (void)snprintf(why, size, "%.100s: %.380s", lc_cli_child_end(&child, &outcome),
                   lc_cli_child_last_line(&outcome));
    return -EIO;
}

int lc_tune_compare(const struct lc_tune_tools *tools, const struct lc_tune_run *run,
                    struct lc_tune_found *out)
{
    static struct lc_tune_command command;
    int err;

    memset(out, 0, sizeof(*out));
    memset(&command, 0, sizeof(command));
    build(tools, run, &command);
    (void)unlink(tools->json);
    (void)read_reports(tools->reports); /* of a run that was interrupted */
    (void)mkdir(tools->reports, 0700);
    err = lc_tune_run_bench(&command, run->budget_s, out->why, sizeof(out->why));
    if (!err)
        err = read_json(tools->json, parts(run->op, run->ranks), out);
    out->taken = read_reports(tools->reports);
    (void)unlink(tools->json);
    return err;
}
