/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cleanup.h"
#include "common/input.h"
#include "interpose/cli/child.h"
#include "interpose/cli/doctor.h"
#include "interpose/cli/json_walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILES_MAX 4096
#define FILE_MAX  ((size_t)1 << 20)

/* Summed over the reports of all processes of the command. */
struct sum {
    uint64_t calls;
    size_t comms;
    size_t reports; /* of processes that made a communicator */
    size_t bad;     /* files that are no report */
    bool is_report; /* the file being read says so */
    char nccl[1024];
    bool mixed; /* not all the same NCCL */
};

static void visit(const char *path, const char *value, void *arg)
{
    struct sum *sum = arg;
    uint64_t calls;
    char *end;

    if (strcmp(path, "schema") == 0) {
        sum->is_report = strcmp(value, "loongcomm.report/1") == 0;
    } else if (strcmp(path, "communicators.number") == 0) {
        sum->comms++;
    } else if (strcmp(path, "communicators.operations.paths.calls") == 0 ||
               strcmp(path, "others.operations.paths.calls") == 0) {
        calls = strtoull(value, &end, 10);
        if (!*end && calls < UINT64_MAX - sum->calls)
            sum->calls += calls;
    } else if (strcmp(path, "nccl.path") == 0 && strcmp(value, "null") != 0) {
        sum->mixed |= *sum->nccl && strcmp(sum->nccl, value) != 0;
        (void)snprintf(sum->nccl, sizeof(sum->nccl), "%s", value);
    }
}

static void add_report(int folder, const char *name, struct sum *sum)
{
    lc_autofree char *text = NULL;
    size_t size;

    sum->is_report = false;
    if (lc_input_read(folder, name, O_NOFOLLOW, FILE_MAX, &text, &size) == 0 &&
        lc_cli_json_walk(text, visit, sum) == 0 && sum->is_report)
        sum->reports++;
    else
        sum->bad++;
}

/* Reads and removes what the processes left. */
static void collect(const char *folder, struct sum *sum)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    size_t files = 0;

    while (dir && (entry = readdir(dir))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (files++ < FILES_MAX)
            add_report(dirfd(dir), entry->d_name, sum);
        if (unlinkat(dirfd(dir), entry->d_name, 0) != 0)
            (void)unlinkat(dirfd(dir), entry->d_name, AT_REMOVEDIR);
    }
    if (dir)
        closedir(dir);
}

static void judge(struct lc_cli_doctor *doctor, const struct sum *sum)
{
    const char *name = doctor->command[0];

    if (sum->bad) {
        lc_cli_find(&doctor->findings, LC_CLI_WARNING, "command-reports",
                    "%zu of the files that %s left in LOONGCOMM_DIR are no whole reports", sum->bad,
                    name);
        lc_cli_remedy(&doctor->findings, "see whether something else writes to LOONGCOMM_DIR, or "
                                         "processes were killed at their exit");
    }
    if (sum->reports) {
        lc_cli_find(
            &doctor->findings, LC_CLI_OK, "command",
            "%s: loongcomm saw %" PRIu64 " operation%s on %zu communicator%s in %zu process%s "
            "and passed them to %s%s",
            name, sum->calls, sum->calls == 1 ? "" : "s", sum->comms, sum->comms == 1 ? "" : "s",
            sum->reports, sum->reports == 1 ? "" : "es",
            *sum->nccl ? sum->nccl : "an NCCL it cannot name", sum->mixed ? " and others" : "");
        return;
    }
    lc_cli_find(&doctor->findings, LC_CLI_ERROR, "command-no-calls",
                "%s ran with loongcomm preloaded, which saw no communicator of NCCL", name);
    lc_cli_remedy(
        &doctor->findings,
        "if it uses NCCL at all: it may clear LD_PRELOAD, open NCCL itself (then `loongcomm "
        "run --proxy` serves it), end without exit handlers, or have NCCL linked in "
        "statically and hidden");
}

static void run_in(struct lc_cli_doctor *doctor, const char *folder)
{
    static struct lc_cli_outcome outcome;
    lc_autofree char *preload = NULL;
    lc_autofree char *dir = NULL;
    const char *env[] = { "LOONGCOMM_ENABLE=yes", "LOONGCOMM_REPORT=json", NULL, NULL, NULL };
    struct lc_cli_child child = { .argv = doctor->command,
                                  .env = env,
                                  .timeout_ms = doctor->command_ms,
                                  .loud = true };
    struct sum sum = { 0 };

    if (asprintf(&preload, "LD_PRELOAD=%s", doctor->preload) < 0 ||
        asprintf(&dir, "LOONGCOMM_DIR=%s", folder) < 0)
        return;
    env[2] = preload;
    env[3] = dir;
    lc_cli_child_run(&child, &outcome);
    collect(folder, &sum);
    if (outcome.end != LC_CLI_EXITED || outcome.code != 0) {
        lc_cli_find(&doctor->findings, LC_CLI_ERROR, "command-failed", "%s, preloaded: %s",
                    doctor->command[0], lc_cli_child_end(&child, &outcome));
        lc_cli_remedy(&doctor->findings, "see whether it fails without loongcomm too");
    }
    if (outcome.end != LC_CLI_NOT_STARTED && (sum.reports || outcome.end == LC_CLI_EXITED))
        judge(doctor, &sum);
}

void lc_cli_check_command(struct lc_cli_doctor *doctor)
{
    const char *tmp = getenv("TMPDIR");
    lc_autofree char *folder = NULL;

    if (!doctor->command || !doctor->preload)
        return;
    if (asprintf(&folder, "%s/loongcomm-doctor-XXXXXX", tmp && *tmp == '/' ? tmp : "/tmp") < 0)
        return;
    if (!mkdtemp(folder)) {
        lc_cli_find(&doctor->findings, LC_CLI_ERROR, "command-folder",
                    "cannot make a folder %s: %s", folder, strerror(errno));
        lc_cli_remedy(&doctor->findings, "point TMPDIR to a folder that can be written to");
        return;
    }
    run_in(doctor, folder);
    (void)rmdir(folder);
}
