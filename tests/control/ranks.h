/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks of the control plane alone: processes, forked before its first use. Argument "tcp" of a test: members act as if
 * they came from another host.
 */
#ifndef LC_TESTS_CONTROL_RANKS_H
#define LC_TESTS_CONTROL_RANKS_H

#include "interpose/control/control_internal.h"
#include "tests/check.h"

#include <stdatomic.h>

#define RANKS 4
#define OPS   64

extern bool tcp_only;

/* Shared by the processes of one case; `id` is written by rank 0 before `ready`. */
struct board {
    char id[LC_ID_BYTES];
    atomic_int ready;
    atomic_int arrived[8];
    atomic_int pid[RANKS];       /* of each process, before its case begins */
    atomic_int verdict[OPS + 1]; /* 0: nobody yet, else 1 + verdict */
};
extern struct board *board;

/* For what takes milliseconds on an idle machine. */
#define PATIENCE_MS 20000

/* Waits for a condition that other ranks bring about; a test that waits longer has failed. */
#define WAIT_FOR(cond)                                        \
    do {                                                      \
        struct lc_deadline until_ = lc_deadline_in_ms(60000); \
        while (!(cond)) {                                     \
            CHECK(!lc_deadline_passed(until_));               \
            sleep_ms(1);                                      \
        }                                                     \
    } while (0)

void sleep_ms(int ms);

/* All ranks wait for each other; each number is used once a case. */
void meet(int number, int n);

struct lc_record record_of(uint32_t rank);

/* Rank 0 makes it, the others wait for it. */
void get_id(uint32_t rank);

struct lc_room *join(uint32_t rank, uint32_t n);

typedef void rank_fn(uint32_t rank);

/* Runs a case with `n` ranks; ends the test unless each returns, or ends with 0 or 1. */
void run_processes(const char *name, rank_fn *fn, int n);
#define RUN(fn, n) run_processes(#fn, fn, n)

/* Before the first case, with what main was given. */
void set_up(int argc, char **argv);

#endif
