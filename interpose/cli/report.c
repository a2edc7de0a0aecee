/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cleanup.h"
#include "common/input.h"
#include "common/output.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/job.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILES_MAX 262144
#define FILE_MAX  ((size_t)4 << 20)

static const char help[] =
    "usage: loongcomm report DIR [--json]\n"
    "\n"
    "Merges what the processes of a job left in the folder that LOONGCOMM_DIR named: exit reports\n"
    "(LOONGCOMM_REPORT=json) and hang reports. For each communicator: who had not arrived on which\n"
    "operation, ranks that called something else than others, the last operation of each rank, and\n"
    "calls and bytes summed over all ranks.\n"
    "\n"
    "exit codes: 0 nothing is wrong, 1 a rank lagged or differed, or a file is no whole report,\n"
    "2 wrong usage.\n";

static const char *why(int err)
{
    switch (err) {
    case -ELOOP: return "it is a link";
    case -EFBIG: return "it is larger than 4 MiB";
    case -EISDIR: return "it is a folder";
    case -ENXIO: return "it is no regular file";
    case -EINVAL: return "it is no whole report of this version";
    case -EILSEQ: return "it is no text";
    default: return strerror(-err);
    }
}

static bool is_report(const char *name)
{
    size_t length = strlen(name);

    return strncmp(name, "loongcomm-", 10) == 0 && length > 15 &&
           strcmp(name + length - 5, ".json") == 0;
}

static void say_bad(const char *name, int err, size_t bad)
{
    char safe[128];

    (void)snprintf(safe, sizeof(safe), "%s", name);
    lc_output_defuse(safe);
    if (bad <= 10)
        lc_cli_say("%s is left out: %s", safe, why(err));
    else if (bad == 11)
        lc_cli_say("and more files");
}

static int add_report(int folder, const char *name, struct lc_job *job)
{
    lc_autofree char *text = NULL;
    size_t size;
    int err = lc_input_read(folder, name, O_NOFOLLOW, FILE_MAX, &text, &size);

    if (!err && memchr(text, '\0', size))
        err = -EILSEQ;
    return err ? err : lc_job_add(job, text);
}

static void read_folder(DIR *dir, struct lc_job *job, size_t *bad)
{
    struct dirent *entry;
    size_t files = 0;

    while (files < FILES_MAX && (entry = readdir(dir))) {
        int err;

        if (!is_report(entry->d_name))
            continue;
        files++;
        err = add_report(dirfd(dir), entry->d_name, job);
        if (err)
            say_bad(entry->d_name, err, ++*bad);
    }
    job->full |= files == FILES_MAX;
}

static int show(struct lc_job *job, size_t bad, const char *folder, bool json)
{
    bool any = job->exits || job->hangs;
    bool faults = lc_job_judge(job) || bad || !any;

    if (json)
        (void)lc_job_print_json(job, bad); /* a failing stream is seen by main() */
    else if (any)
        lc_job_print(job);
    if (!any)
        lc_cli_say("no report in %s: jobs write them there with LOONGCOMM_DIR and "
                   "LOONGCOMM_REPORT=json",
                   folder);
    return faults ? LC_CLI_FINDING : LC_CLI_FINE;
}

static int report(const char *folder, bool json)
{
    lc_autofree struct lc_job *job = calloc(1, sizeof(*job));
    DIR *dir = opendir(folder);
    int err = dir ? 0 : -errno;
    int code = LC_CLI_FINDING;
    size_t bad = 0;

    if (!job)
        err = -ENOMEM;
    if (!err && dir)
        read_folder(dir, job, &bad);
    if (dir)
        closedir(dir);
    if (err)
        lc_cli_say("cannot read %s: %s", folder, strerror(-err));
    else
        code = show(job, bad, folder, json);
    if (job)
        lc_job_free(job);
    return code;
}

int lc_cli_report(int argc, char **argv)
{
    const char *folder = NULL;
    bool json = false;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            (void)fputs(help, stdout);
            return LC_CLI_FINE;
        }
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else if (argv[i][0] == '-' && argv[i][1])
            return lc_cli_usage("report: unknown option '%s'", argv[i]);
        else if (folder)
            return lc_cli_usage("report: one folder, not two");
        else
            folder = argv[i];
    }
    if (!folder)
        return lc_cli_usage("report: which folder? `loongcomm report --help` tells more");
    return report(folder, json);
}
