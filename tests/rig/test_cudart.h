/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of the host CUDA runtime share.
 */
#ifndef LC_TESTS_RIG_TEST_CUDART_H
#define LC_TESTS_RIG_TEST_CUDART_H

#include "tests/check.h"
#include "tests/rig/rig.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define OK(call)          CHECK((call) == cudaSuccess)
#define FAILS(call, code) CHECK((call) == (code) && cudaGetLastError() == (code))

/* A door that a piece waits at until the test opens it. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_open;
    int arrived; /* pieces that reached the gate */
};

#define GATE_INIT                                                     \
    {                                                                 \
        PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, 0 \
    }

static inline void gate_open(struct gate *gate)
{
    pthread_mutex_lock(&gate->lock);
    gate->is_open = true;
    pthread_cond_broadcast(&gate->changed);
    pthread_mutex_unlock(&gate->lock);
}

static inline void gate_pass(void *arg)
{
    struct gate *gate = arg;

    pthread_mutex_lock(&gate->lock);
    gate->arrived++;
    pthread_cond_broadcast(&gate->changed);
    while (!gate->is_open)
        pthread_cond_wait(&gate->changed, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

static inline void gate_await_arrivals(struct gate *gate, int count)
{
    pthread_mutex_lock(&gate->lock);
    while (gate->arrived < count)
        pthread_cond_wait(&gate->changed, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

static inline void enqueue(cudaStream_t stream, void (*run)(void *), void *arg)
{
    struct lcrig_work work = { .name = "test piece", .run = run, .arg = arg, .is_kernel = true };

    OK(lcrig_enqueue(stream, &work));
}

static inline void sleep_ms(long ms)
{
    struct timespec pause = { ms / 1000, ms % 1000 * 1000000 };

    nanosleep(&pause, NULL);
}

/* A thread that opens the gate after 10 ms. */
static inline void *open_gate_later(void *gate)
{
    sleep_ms(10);
    gate_open(gate);
    return NULL;
}

/* Runs fn in a forked child; the caller must not have used the runtime yet. Returns the wait status; *out is what the
 * child wrote to stderr (at most size - 1 bytes). */
static inline int in_child(void (*fn)(void), char *out, size_t size)
{
    size_t len = 0;
    ssize_t got;
    int pipes[2], status;
    pid_t pid;

    CHECK(!pipe(pipes));
    pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        const struct rlimit no_core = { 0, 0 };

        setrlimit(RLIMIT_CORE, &no_core);
        dup2(pipes[1], STDERR_FILENO);
        close(pipes[0]);
        close(pipes[1]);
        fn();
        exit(0);
    }
    close(pipes[1]);
    while ((got = read(pipes[0], out + len, size - 1 - len)) > 0)
        len += (size_t)got;
    out[len] = 0;
    close(pipes[0]);
    CHECK(waitpid(pid, &status, 0) == pid);
    return status;
}

static inline bool died(int status)
{
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static inline bool left(int status, int code)
{
    return WIFEXITED(status) && WEXITSTATUS(status) == code;
}

#endif
