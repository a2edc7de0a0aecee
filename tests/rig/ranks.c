/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/ranks.h"

#include "common/deadline.h"
#include "tests/check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define GRACE_MS 1000
#define LEAST_S  300
#define NAP_US   2000

struct rank {
    pid_t pid;
    bool is_done;
    int fate; /* from wait */
};

static void set_env(const char *name, int value)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", value);
    setenv(name, text, 1);
}

static void start(struct rank *ranks, int n, lc_rank_main *rank_main, void *arg)
{
    pid_t parent = getpid();

    fflush(NULL);
    for (int rank = 0; rank < n; rank++) {
        ranks[rank] = (struct rank){ .pid = fork() };
        CHECK(ranks[rank].pid >= 0);
        if (ranks[rank].pid > 0)
            continue;
        /* Ranks must not outlive a test that its runner has killed. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        set_env("LCRIG_RANK", rank);
        set_env("RANK", rank);
        set_env("WORLD_SIZE", n);
        exit(rank_main(rank, n, arg));
    }
}

static bool is_fine(const struct rank *rank)
{
    return WIFEXITED(rank->fate) &&
           (WEXITSTATUS(rank->fate) == 0 || WEXITSTATUS(rank->fate) == LC_SKIP);
}

/* Waits for all of them. With impatience, less than the time that is left is granted after the first failure. Returns
 * how many had to be killed. */
static int collect(struct rank *ranks, int n, struct lc_deadline deadline, bool impatient)
{
    int left = n, killed = 0;

    while (left > 0) {
        for (int rank = 0; rank < n; rank++) {
            struct rank *r = &ranks[rank];

            if (r->is_done || waitpid(r->pid, &r->fate, WNOHANG) != r->pid)
                continue;
            r->is_done = true;
            left--;
            if (impatient && !is_fine(r)) {
                impatient = false;
                if (lc_deadline_left_ms(deadline) > GRACE_MS)
                    deadline = lc_deadline_in_ms(GRACE_MS);
            }
        }
        if (left > 0 && lc_deadline_passed(deadline)) {
            for (int rank = 0; rank < n; rank++)
                if (!ranks[rank].is_done && kill(ranks[rank].pid, SIGKILL) == 0)
                    killed++;
            deadline.at_ns = INT64_MAX;
        }
        if (left > 0)
            usleep(NAP_US);
    }
    return killed;
}

/* Less says nothing on a machine that is busy with other things. */
static int patient(int timeout_s)
{
    return timeout_s < LEAST_S ? LEAST_S : timeout_s;
}

int lc_ranks_run(int n, lc_rank_main *rank_main, void *arg, int timeout_s)
{
    struct rank *ranks = calloc((size_t)n, sizeof(*ranks));
    int failed = 0, skipped = 0;

    CHECK(ranks);
    start(ranks, n, rank_main, arg);
    collect(ranks, n, lc_deadline_in_ms(patient(timeout_s) * INT64_C(1000)), true);
    for (int rank = 0; rank < n; rank++) {
        int fate = ranks[rank].fate;

        if (is_fine(&ranks[rank])) {
            skipped += WEXITSTATUS(fate) == LC_SKIP;
            continue;
        }
        failed++;
        if (WIFSIGNALED(fate))
            fprintf(stderr, "ranks: rank %d of %d: signal %d\n", rank, n, WTERMSIG(fate));
        else
            fprintf(stderr, "ranks: rank %d of %d: exit status %d\n", rank, n, WEXITSTATUS(fate));
    }
    free(ranks);
    return failed ? failed : skipped ? LC_SKIP : 0;
}

int lc_ranks_watch(int n, lc_rank_main *rank_main, void *arg, int timeout_s, int *fate)
{
    struct rank *ranks = calloc((size_t)n, sizeof(*ranks));
    int killed;

    CHECK(ranks);
    start(ranks, n, rank_main, arg);
    killed = collect(ranks, n, lc_deadline_in_ms(timeout_s * INT64_C(1000)), false);
    for (int rank = 0; rank < n; rank++)
        fate[rank] = ranks[rank].fate;
    free(ranks);
    return killed ? -1 : 0;
}

/* ---- threads ---- */

struct crew {
    int n;
    lc_rank_main *rank_main;
    void *arg;
    pthread_mutex_t lock; /* guards left */
    pthread_cond_t changed;
    int left;
};

struct member {
    struct crew *crew;
    int rank, status;
};

static void *member_main(void *arg)
{
    struct member *member = arg;
    struct crew *crew = member->crew;

    member->status = crew->rank_main(member->rank, crew->n, crew->arg);
    pthread_mutex_lock(&crew->lock);
    crew->left--;
    pthread_cond_signal(&crew->changed);
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

int lc_ranks_run_threads(int n, lc_rank_main *rank_main, void *arg, int timeout_s)
{
    struct crew crew = { .n = n,
                         .rank_main = rank_main,
                         .arg = arg,
                         .lock = PTHREAD_MUTEX_INITIALIZER,
                         .left = n };
    struct member *members = calloc((size_t)n, sizeof(*members));
    pthread_t *threads = calloc((size_t)n, sizeof(*threads));
    struct timespec until;
    int failed = 0, skipped = 0;

    CHECK(members && threads);
    lc_deadline_cond_init(&crew.changed);
    clock_gettime(CLOCK_MONOTONIC, &until);
    timeout_s = patient(timeout_s);
    until.tv_sec += timeout_s;
    for (int rank = 0; rank < n; rank++) {
        members[rank] = (struct member){ &crew, rank, -1 };
        CHECK(pthread_create(&threads[rank], NULL, member_main, &members[rank]) == 0);
    }
    pthread_mutex_lock(&crew.lock);
    while (crew.left > 0) {
        if (pthread_cond_timedwait(&crew.changed, &crew.lock, &until) == ETIMEDOUT) {
            fprintf(stderr, "ranks: %d of %d threads not finished after %d s\n", crew.left, n,
                    timeout_s);
            abort();
        }
    }
    pthread_mutex_unlock(&crew.lock);
    for (int rank = 0; rank < n; rank++) {
        pthread_join(threads[rank], NULL);
        skipped += members[rank].status == LC_SKIP;
        if (members[rank].status == 0 || members[rank].status == LC_SKIP)
            continue;
        failed++;
        fprintf(stderr, "ranks: rank %d of %d: status %d\n", rank, n, members[rank].status);
    }
    free(members);
    free(threads);
    return failed ? failed : skipped ? LC_SKIP : 0;
}
