/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts ranks for a test, collects them, and never hangs. */
#ifndef LC_TESTS_RANKS_H
#define LC_TESTS_RANKS_H

typedef int lc_rank_main(int rank, int n, void *arg);

/* Forks n processes (the caller must not have used the CUDA runtime or NCCL: both refuse a fork's child); each
 * returns from rank_main or ends in another way, and its exit status is that value. LCRIG_RANK, RANK and WORLD_SIZE
 * are set for it. When one fails, the others get a second to end by themselves; after that, or when timeout_s is over
 * (300 at the least), they are killed. Returns 0 if all returned 0, LC_SKIP (77) if one returned that and the others
 * that or 0, else the number of ranks that failed, each named on standard error. */
int lc_ranks_run(int n, lc_rank_main *rank_main, void *arg, int timeout_s);

/* The same with threads of one process. A thread cannot be killed: if the time is over the process is aborted. */
int lc_ranks_run_threads(int n, lc_rank_main *rank_main, void *arg, int timeout_s);

/* Runs rank_main as lc_ranks_run does, with fate[rank] (from wait). Nothing is said
 * about failures and nobody is killed before timeout_s: for tests that expect them. Returns -1 if somebody had to be. */
int lc_ranks_watch(int n, lc_rank_main *rank_main, void *arg, int timeout_s, int *fate);

#endif
