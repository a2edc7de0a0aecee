/* SPDX-License-Identifier: Apache-2.0
 *
 * What a process that used NCCL says at its end (LOONGCOMM_REPORT, LOONGCOMM_DIR).
 *
 * With a folder every process writes one file. Without one, the report goes to standard error: the table (or
 * the JSON document) from the process that holds rank 0 of its largest communicator; of the others, in jobs of
 * at most LC_REPORT_LINES ranks, one line each as text and nothing as JSON. A process without communicators, and
 * whose plugins have nothing to tell, says nothing. */
#ifndef LC_INTERPOSE_REPORT_H
#define LC_INTERPOSE_REPORT_H

#include "interpose/comm.h"
#include "interpose/metrics.h"

#include <stdio.h>

#define LC_REPORT_COMMS 64 /* shown one by one; the rest is added up */
#define LC_REPORT_LINES 64

struct lc_report_comm {
    int64_t number;
    struct lc_comm_facts facts;
    bool closed;
    unsigned windows;
    uint64_t id; /* the same at every rank, 0: unknown */
    struct lc_progress_copy progress;
    struct lc_ledger ledger;
};

/* A copy of everything at one moment. */
struct lc_report {
    const char *version;
    char host[65];
    int pid;
    bool enabled;
    const char *nccl_path; /* NULL: none was loaded */
    int nccl_version;
    int rank; /* in the largest communicator, of those the oldest */
    int ranks;
    size_t count;
    struct lc_report_comm *comm; /* by number */
    uint64_t other_count;        /* communicators beyond those */
    struct lc_ledger others;
    struct lc_groups groups;
    size_t n_metrics;
    struct lc_metric *metrics; /* of plugins */
};

/* Of this process. -ENOMEM leaves nothing to free. */
int lc_report_take(struct lc_report *out);
void lc_report_free(struct lc_report *report);

void lc_report_print(const struct lc_report *report, FILE *out);
void lc_report_print_line(const struct lc_report *report, FILE *out);
int lc_report_print_json(const struct lc_report *report, FILE *out); /* as lc_json_finish */

/* A new file in `dir` for something of one rank, named after host, process and rank: a descriptor or -errno. */
int lc_report_create(const char *dir, const char *host, int pid, int rank, const char *ending);

/* At exit: calls nothing of NCCL or CUDA. */
void lc_report_write(void);

#endif
