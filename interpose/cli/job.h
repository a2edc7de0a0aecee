/* SPDX-License-Identifier: Apache-2.0
 *
 * The reports of all processes of a job, merged. What is read is hostile: everything is bounded, and text is made
 * printable when it comes in. */
#ifndef LC_CLI_JOB_H
#define LC_CLI_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LC_JOB_COMMS    4096
#define LC_JOB_LEDGER   64 /* lines of one communicator */
#define LC_JOB_RECENT   16
#define LC_JOB_HANGS    8 /* different verdicts of one communicator that are kept */
#define LC_JOB_MEMBERS  65536
#define LC_JOB_METRICS  4096
#define LC_JOB_COUNTERS 16
#define LC_JOB_WORD     24

struct lc_job_note {
    uint64_t seq, count;
    char call[LC_JOB_WORD], reduction[LC_JOB_WORD], type[LC_JOB_WORD], peer[LC_JOB_WORD];
};

/* The latest that is known of one rank. */
struct lc_job_member {
    uint64_t rank, pid;
    char host[65];
    bool from_exit; /* else from a hang report, which an exit report replaces */
    uint64_t collectives, messages;
    size_t n;
    struct lc_job_note recent[LC_JOB_RECENT];
};

struct lc_job_sum {
    char call[LC_JOB_WORD], path[LC_JOB_WORD], reason[LC_JOB_WORD];
    uint64_t calls, asked, sent;
};

struct lc_job_hang {
    char verdict[512];
    bool blames;
    uint64_t reports, since; /* unix seconds of the first */
};

struct lc_job_comm {
    char id[LC_JOB_WORD]; /* empty: no number in common, nothing can be compared between ranks */
    uint64_t number;      /* of such a one: its number in each process */
    char name[33];
    uint64_t ranks;
    size_t n_members, room;
    struct lc_job_member *members; /* by rank once all is read */
    size_t n_sums;
    struct lc_job_sum sums[LC_JOB_LEDGER];
    size_t n_hangs;
    struct lc_job_hang hangs[LC_JOB_HANGS];

    /* lc_job_judge */
    uint64_t top; /* the most collectives */
    size_t n_behind;
    const struct lc_job_member *a, *b;         /* the first two ranks that differ, or NULL */
    const struct lc_job_note *note_a, *note_b; /* and what they called */
};

/* What a host has sent to and got from a peer through a device, of all its processes. */
struct lc_job_metric {
    char host[65], source[16], device[32], peer[64];
    size_t n;
    struct {
        char name[32];
        uint64_t value;
    } counter[LC_JOB_COUNTERS];
};

struct lc_job {
    size_t exits, hangs;
    size_t n_comms;
    struct lc_job_comm *comms[LC_JOB_COMMS];
    size_t n_metrics;
    struct lc_job_metric *metrics[LC_JOB_METRICS];
    bool full; /* something did not fit: said once */
};

/* Adds one report. 0, or -EINVAL for what is none (nothing of it stays unless it was cut), -ENOMEM. */
int lc_job_add(struct lc_job *job, const char *text);

/* When all is in. True if somebody lags or differs, or was blamed by a hang report. */
bool lc_job_judge(struct lc_job *job);

void lc_job_print(const struct lc_job *job);
int lc_job_print_json(const struct lc_job *job, size_t bad);

void lc_job_free(struct lc_job *job);

#endif
