/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/comm.h"
#include "interpose/create.h"
#include "interpose/process.h"
#include "tests/check.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct lc_comm_facts facts = { .ranks = 8, .rank = 3, .device = 1, .parent = -1 };
static unsigned warnings;

static ncclComm_t handle(uintptr_t n)
{
    return (ncclComm_t)((n + 1) * 4096);
}

static void count_warnings(enum lc_log_level level, const char *file, int line, const char *text)
{
    (void)file;
    (void)line;
    (void)text;
    warnings += level == LC_LOG_WARN;
}

static void call(struct lc_comm *comm)
{
    lc_ledger_add(&comm->ledger, LC_OP_SEND, LC_NCCL_NO_FASTER_PATH, 100, 100);
}

static void add_calls(const struct lc_comm *comm, void *arg)
{
    *(uint64_t *)arg += lc_ledger_calls(&comm->ledger);
}

/* Of all communicators there have been. */
static uint64_t all_calls(void)
{
    uint64_t communicators;
    uint64_t calls = lc_ledger_calls(lc_comm_others(&communicators));

    lc_comm_each(add_calls, &calls);
    return calls;
}

static void unknown_and_null_handles_have_no_entry(void)
{
    CHECK(!lc_comm_get(handle(1)));
    CHECK(!lc_comm_get(NULL));
    lc_comm_add(NULL, &facts, NULL);
    lc_comm_remove(NULL);
    lc_comm_remove(handle(1));
    lc_comm_put(NULL);
    CHECK(!lc_comm_get(NULL));
}

static void added_one_is_found_until_it_is_removed(void)
{
    struct lc_comm *comm;

    lc_comm_add(handle(1), &facts, NULL);
    comm = lc_comm_get(handle(1));
    CHECK(comm && comm->facts.ranks == 8 && comm->facts.rank == 3 && comm->device == 1);
    lc_comm_put(comm);
    lc_comm_remove(handle(1));
    CHECK(!lc_comm_get(handle(1)));
    lc_comm_remove(handle(1)); /* destroyed twice */
    CHECK(!lc_comm_get(handle(1)));
}

static uint32_t ctas_with(const ncclConfig_t *config)
{
    ncclComm_t made = handle(6);
    struct lc_comm *comm;
    uint32_t ctas;

    lc_create_init(&made, 8, 3, 1, config, NULL);
    comm = lc_comm_get(made);
    CHECK(comm);
    ctas = comm->facts.ctas;
    lc_comm_put(comm);
    return ctas;
}

/* The variable wins; what is no number is none; a child without a configuration has its parent's. */
static void a_communicator_knows_what_the_job_leaves_to_a_call(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct lc_pending child;
    ncclComm_t made = NULL;

    CHECK(unsetenv("NCCL_MAX_CTAS") == 0);
    CHECK(ctas_with(NULL) == 0 && ctas_with(&config) == 0);
    config.maxCTAs = 24;
    CHECK(ctas_with(&config) == 24);
    child = lc_create_prepare_child(handle(6), &made, NULL, 0, NULL);
    CHECK(child.ctas == 24);
    config.maxCTAs = 12;
    child = lc_create_prepare_child(handle(6), &made, &config, 0, NULL);
    CHECK(child.ctas == 12);
    CHECK(setenv("NCCL_MAX_CTAS", "8", 1) == 0);
    CHECK(ctas_with(&config) == 8 && ctas_with(NULL) == 8);
    CHECK(setenv("NCCL_MAX_CTAS", "many", 1) == 0);
    CHECK(ctas_with(&config) == 12);
    CHECK(unsetenv("NCCL_MAX_CTAS") == 0);
    lc_comm_remove(handle(6));
}

static void handle_used_again_is_another_communicator(void)
{
    struct lc_comm *comm;
    int64_t number;

    lc_comm_add(handle(2), &facts, NULL);
    comm = lc_comm_get(handle(2));
    call(comm);
    number = comm->number;
    lc_comm_put(comm);
    lc_comm_remove(handle(2));
    lc_comm_add(handle(2), &facts, NULL);
    comm = lc_comm_get(handle(2));
    CHECK(comm && comm->number == number + 1 && lc_ledger_calls(&comm->ledger) == 0);
    lc_comm_put(comm);
    lc_comm_add(handle(2), &facts, NULL); /* made again without our having seen its end */
    comm = lc_comm_get(handle(2));
    CHECK(comm && comm->number == number + 2);
    lc_comm_put(comm);
    lc_comm_remove(handle(2));
    CHECK(!lc_comm_get(handle(2)));
}

static void call_under_way_keeps_its_entry(void)
{
    uint64_t before = all_calls();
    struct lc_comm *comm;

    lc_comm_add(handle(3), &facts, NULL);
    comm = lc_comm_get(handle(3));
    lc_comm_remove(handle(3)); /* by another thread */
    lc_comm_add(handle(3), &facts, NULL);
    CHECK(comm->closed && comm->handle == (uintptr_t)handle(3));
    call(comm);
    lc_comm_put(comm);
    CHECK(all_calls() == before + 1);
    lc_comm_remove(handle(3));
}

static void thousand_communicators_need_no_more_room(void)
{
    uint64_t before = all_calls();
    uint32_t highest = 0;

    for (uintptr_t i = 0; i < 1000; i++) {
        struct lc_comm *comm;

        lc_comm_add(handle(100 + i), &facts, NULL);
        comm = lc_comm_get(handle(100 + i));
        CHECK(comm);
        call(comm);
        if (comm->index > highest)
            highest = comm->index;
        lc_comm_put(comm);
        lc_comm_remove(handle(100 + i));
    }
    CHECK(highest <= LC_COMM_KEPT + 2);
    CHECK(all_calls() == before + 1000);
}

static void too_many_pass_through_with_one_warning(void)
{
    uintptr_t count = 0;

    warnings = 0;
    lc_log_set_sink(count_warnings);
    for (uintptr_t i = 0; i < LC_COMM_MAX + 100; i++)
        lc_comm_add(handle(10000 + i), &facts, NULL);
    for (uintptr_t i = 0; i < LC_COMM_MAX + 100; i++) {
        struct lc_comm *comm = lc_comm_get(handle(10000 + i));

        count += comm != NULL;
        lc_comm_put(comm);
    }
    lc_log_set_sink(NULL);
    CHECK(warnings == 1);
    CHECK(count >= LC_COMM_MAX - LC_COMM_KEPT && count <= LC_COMM_MAX);
    for (uintptr_t i = 0; i < LC_COMM_MAX + 100; i++)
        lc_comm_remove(handle(10000 + i));
    lc_comm_add(handle(5), &facts, NULL); /* there is room again */
    lc_comm_put(lc_comm_get(handle(5)));
    CHECK(lc_comm_get(handle(5)));
    lc_comm_remove(handle(5));
}

static ncclResult_t give_count(const ncclComm_t comm, int *out)
{
    *out = (int)((uintptr_t)comm % 5) + 2;
    return ncclSuccess;
}

static ncclResult_t give_device(const ncclComm_t comm, int *out)
{
    return ncclInvalidArgument;
}

static ncclResult_t refuse(const ncclComm_t comm, int *out)
{
    return ncclInvalidArgument;
}

static const struct lc_real asked = { .ncclCommCount = give_count,
                                      .ncclCommUserRank = give_count,
                                      .ncclCommCuDevice = give_device };

static void unknown_handle_is_adopted_if_nccl_knows_it(void)
{
    static const struct lc_real denies = { .ncclCommCount = refuse, .ncclCommUserRank = refuse };
    static const struct lc_real none;
    struct lc_comm *comm;

    CHECK(!lc_comm_get_or_adopt(handle(7), &denies));
    CHECK(!lc_comm_get_or_adopt(handle(7), &none));
    CHECK(!lc_comm_get_or_adopt(NULL, &asked));
    comm = lc_comm_get_or_adopt(handle(7), &asked);
    CHECK(comm && comm->facts.origin == LC_COMM_ADOPTED && comm->device == LC_DEVICE_UNKNOWN);
    CHECK(lc_comm_get(handle(7)) == comm);
    lc_comm_put(comm);
    lc_comm_put(comm);
    lc_comm_remove(handle(7));
    CHECK(!lc_comm_get(handle(7)));
}

static pthread_barrier_t barrier;
static struct lc_comm *adopted[16];

static void *adopt(void *arg)
{
    (void)pthread_barrier_wait(&barrier);
    *(struct lc_comm **)arg = lc_comm_get_or_adopt(handle(8), &asked);
    return NULL;
}

static void adopt_at_once(void)
{
    pthread_t threads[16];

    CHECK(pthread_barrier_init(&barrier, NULL, 16) == 0);
    for (int i = 0; i < 16; i++)
        CHECK(pthread_create(&threads[i], NULL, adopt, &adopted[i]) == 0);
    for (int i = 0; i < 16; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(pthread_barrier_destroy(&barrier) == 0);
}

static void threads_that_adopt_at_once_share_one_entry(void)
{
    adopt_at_once();
    for (int i = 0; i < 16; i++) {
        CHECK(adopted[i] && adopted[i] == adopted[0]);
        lc_comm_put(adopted[i]);
    }
    lc_comm_remove(handle(8));
    CHECK(!lc_comm_get(handle(8)));
}

#define THREADS 64
#define HANDLES 8
#define ROUNDS  2000
static uint64_t calls_made; /* relaxed */

/* Calls on a communicator; true if that was counted. */
static bool use(ncclComm_t handle_used)
{
    struct lc_comm *comm = lc_comm_get_or_adopt(handle_used, &asked);

    if (!comm)
        return false;
    CHECK(comm->handle == (uintptr_t)handle_used);
    call(comm);
    lc_comm_put(comm);
    return true;
}

/* Each thread mostly calls, and now and then ends and makes communicators that the others are using. */
static void *churn(void *arg)
{
    unsigned seed = (unsigned)(uintptr_t)arg;
    uint64_t calls = 0;

    (void)pthread_barrier_wait(&barrier);
    for (int i = 0; i < ROUNDS; i++) {
        ncclComm_t chosen = handle(5000 + (uintptr_t)rand_r(&seed) % HANDLES);

        switch (rand_r(&seed) % 16) {
        case 0: lc_comm_remove(chosen); break;
        case 1: lc_comm_add(chosen, &facts, NULL); break;
        default: calls += use(chosen);
        }
    }
    lc_add(&calls_made, calls);
    return NULL;
}

static void start_churn(pthread_t *threads)
{
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS) == 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
}

static void end_churn(const pthread_t *threads)
{
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(pthread_barrier_destroy(&barrier) == 0);
    for (uintptr_t n = 0; n < HANDLES; n++) {
        lc_comm_remove(handle(5000 + n));
        CHECK(!lc_comm_get(handle(5000 + n)));
    }
}

static void no_call_is_lost_while_communicators_come_and_go(void)
{
    uint64_t before = all_calls();
    pthread_t threads[THREADS];

    calls_made = 0;
    start_churn(threads);
    end_churn(threads);
    CHECK(calls_made > THREADS * ROUNDS / 2);
    CHECK(all_calls() == before + calls_made);
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

/* A fork may catch another thread in the middle of a change. */
static void child_can_use_the_table(void)
{
    pthread_t threads[THREADS];
#ifdef __SANITIZE_THREAD__
    int forks = 0; /* it takes the parent's threads for leaks of the child */
#else
    int forks = 20;
#endif

    start_churn(threads);
    for (int i = 0; i < forks; i++) {
        int status;
        pid_t pid = fork();

        CHECK(pid >= 0);
        if (pid == 0) {
            lc_comm_after_fork();
            lc_comm_add(handle(9000), &facts, NULL);
            _exit(lc_comm_get(handle(9000)) == NULL);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    end_churn(threads);
}

int main(void)
{
    unknown_and_null_handles_have_no_entry();
    added_one_is_found_until_it_is_removed();
    a_communicator_knows_what_the_job_leaves_to_a_call();
    handle_used_again_is_another_communicator();
    call_under_way_keeps_its_entry();
    unknown_handle_is_adopted_if_nccl_knows_it();
    for (int i = 0; i < 50; i++)
        threads_that_adopt_at_once_share_one_entry();
    thousand_communicators_need_no_more_room();
    no_call_is_lost_while_communicators_come_and_go();
    child_can_use_the_table();
    too_many_pass_through_with_one_warning();
    return 0;
}
