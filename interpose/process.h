/* SPDX-License-Identifier: Apache-2.0
 *
 * What there is once per process and once per thread. */
#ifndef LC_INTERPOSE_PROCESS_H
#define LC_INTERPOSE_PROCESS_H

#include "common/config.h"

#include <nccl.h>
#include <stdbool.h>
#include <stdint.h>

/* Loads the settings and arranges for the report; every call but the first does nothing. Called before any
 * hook acts, and never before the process calls NCCL. */
void lc_process_begin(void);

/* Valid after lc_process_begin; written by nobody after it. */
const struct lc_config *lc_process_config(void);

/* False: every call goes straight to NCCL. Set before lc_real_table is, so that a hook that has seen the
 * table sees it too; never changed afterwards. */
extern bool lc_enabled;

/* Calls of the functions that are not operations on data; relaxed additions by all threads. */
extern uint64_t lc_other_calls;

/* A communicator that a Split or Shrink inside a group will have made when the group ends. */
struct lc_pending {
    struct lc_pending *next;
    ncclComm_t *where; /* the program's variable: NCCL writes it before the group's end returns */
    int64_t parent;    /* number of the parent's entry, -1 if unknown */
    ncclComm_t parent_handle;
    uint64_t set;      /* lc_agree_set */
    uint64_t creation; /* which split or shrink of the parent, for the agreement of its members */
    bool stays;        /* with NCCL, perhaps at this rank alone */
    int colour;
    int origin;    /* enum lc_comm_origin */
    char name[32]; /* LC_COMM_NAME */
    uint32_t ctas; /* struct lc_comm_facts */
};

struct lc_comm;
struct lc_gather;
struct lc_tuned;

/* Only the thread itself uses it. The initial-exec model makes it one instruction to reach; it is small
 * enough for the room that the loader keeps for libraries opened late (1664 bytes in glibc). */
struct lc_thread {
    bool inside;    /* NCCL calls some of its own public functions, and those calls reach us too */
    unsigned depth; /* of groups, as NCCL counts it */
    unsigned ops;   /* calls since the outermost group began */
    unsigned forwarded; /* of them to NCCL, at the call */
    struct lc_pending *pending;
    bool creating;            /* NCCL is making a communicator on this thread (tuner.h) */
    struct lc_tuned *tuned;   /* what the tuner plugin has got meanwhile */
    struct lc_comm *ended;    /* communicators destroyed in the open group (comm.h) */
    struct lc_gather *gather; /* all-reduces of the open group that travel together (gather.h) */
};
extern _Thread_local struct lc_thread lc_thread __attribute__((tls_model("initial-exec")));

#endif
