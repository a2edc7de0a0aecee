/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/report.h"

#include "common/cleanup.h"
#include "common/log.h"
#include "common/output.h"
#include "interpose/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void take_comm(const struct lc_comm *comm, void *arg)
{
    struct lc_report *report = arg;
    struct lc_report_comm *out;

    if (report->count == LC_REPORT_COMMS) {
        report->other_count++;
        lc_ledger_merge(&report->others, &comm->ledger);
    } else {
        out = &report->comm[report->count++];
        out->number = comm->number;
        out->facts = comm->facts;
        out->facts.device = atomic_load_explicit(&comm->device, memory_order_relaxed);
        out->closed = atomic_load_explicit(&comm->closed, memory_order_relaxed);
        out->windows = atomic_load_explicit(&comm->windows, memory_order_relaxed);
        out->id = comm->id;
        lc_progress_read((struct lc_progress *)&comm->progress, &out->progress);
        lc_ledger_merge(&out->ledger, &comm->ledger);
    }
    if (comm->facts.ranks > report->ranks) {
        report->ranks = comm->facts.ranks;
        report->rank = comm->facts.rank;
    }
}

static int by_number(const void *a, const void *b)
{
    const struct lc_report_comm *x = a;
    const struct lc_report_comm *y = b;

    return (x->number > y->number) - (x->number < y->number);
}

int lc_report_take(struct lc_report *out)
{
    const struct lc_real *real = atomic_load_explicit(&lc_real_table, memory_order_acquire);
    struct lc_report report = { .version = LC_VERSION,
                                .pid = (int)getpid(),
                                .enabled = lc_enabled,
                                .nccl_path = real ? real->path : NULL,
                                .nccl_version = real ? real->version : 0 };

    report.comm = calloc(LC_REPORT_COMMS, sizeof(*report.comm));
    if (!report.comm)
        return -ENOMEM;
    if (gethostname(report.host, sizeof(report.host)) != 0)
        strcpy(report.host, "unknown");
    lc_ledger_merge(&report.others, lc_comm_others(&report.other_count));
    lc_comm_each(take_comm, &report);
    qsort(report.comm, report.count, sizeof(*report.comm), by_number);
    for (int i = 0; i < LC_BUCKETS; i++)
        report.groups.sizes[i] = __atomic_load_n(&lc_groups.sizes[i], __ATOMIC_RELAXED);
    report.metrics = lc_metrics_take(&report.n_metrics);
    *out = report;
    return 0;
}

void lc_report_free(struct lc_report *report)
{
    free(report->comm);
    free(report->metrics);
    report->comm = NULL;
    report->metrics = NULL;
}

/* The folder is the user's choice and may be a link; what we make in it is new and ours alone. */
int lc_report_create(const char *dir, const char *host, int pid, int rank, const char *ending)
{
    char name[160];
    int dir_fd;
    int fd = -1;

    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return -errno;
    dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0)
        return -errno;
    for (int n = 0; n < 100 && fd < 0; n++) { /* containers may share both host name and number */
        (void)snprintf(name, sizeof(name),
                       n ? "loongcomm-%s-%d-rank%d-%d.%s" : "loongcomm-%s-%d-rank%d%.0d.%s", host,
                       pid, rank, n, ending);
        for (char *slash = name; (slash = strchr(slash, '/'));) /* a host name may hold any byte */
            *slash = '_';
        fd = openat(dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 && errno != EEXIST)
            break;
    }
    if (fd < 0)
        fd = -errno;
    close(dir_fd);
    return fd;
}

/* The whole text at once, so that several processes' reports do not mix. */
static int render(const struct lc_report *report, bool json, bool whole, char **text, size_t *size)
{
    FILE *out = open_memstream(text, size);
    int err = 0;

    if (!out)
        return -errno;
    if (json)
        err = lc_report_print_json(report, out);
    else if (whole)
        lc_report_print(report, out);
    else
        lc_report_print_line(report, out);
    if (fclose(out) != 0 && !err)
        err = -errno;
    return err;
}

static void deliver(const struct lc_report *report, const struct lc_config *config)
{
    bool json = config->report == LC_REPORT_JSON;
    bool whole = report->rank == 0 || *config->dir;
    lc_autofree char *text = NULL;
    size_t size = 0;
    int fd = STDERR_FILENO;
    int err;

    if (!whole && (json || report->ranks > LC_REPORT_LINES))
        return;
    err = render(report, json, whole, &text, &size);
    if (err) {
        lc_warn("cannot write the report: %s", strerror(-err));
        return;
    }
    if (*config->dir)
        fd = lc_report_create(config->dir, report->host, report->pid, report->rank,
                              json ? "json" : "txt");
    err = fd < 0 ? fd : lc_output_write(fd, text, size);
    if (err && *config->dir)
        lc_warn("cannot write a report into %s: %s", config->dir, strerror(-err));
    if (fd >= 0 && *config->dir)
        close(fd);
}

void lc_report_write(void)
{
    struct lc_report report;

    if (lc_report_take(&report) != 0)
        return;
    if (report.count || report.other_count || report.n_metrics)
        deliver(&report, lc_process_config());
    lc_report_free(&report);
}
