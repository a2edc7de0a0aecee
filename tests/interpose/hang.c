/* SPDX-License-Identifier: Apache-2.0
 *
 * hang CASE FOLDER: three ranks on the rig with LOONGCOMM_HANG_TIMEOUT=3 and LOONGCOMM_DIR=FOLDER, one of which does not
 * do what the others do. The test that started this looks at what was written; FOLDER/log is LOONGCOMM_LOG_FILE. */
#include "tests/rig/test_nccl.h"

#include "common/deadline.h"

#include <dirent.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>

#define N     3
#define COUNT 4096

static struct meeting *meeting;
static const char *which, *folder;

static int hang_files(void)
{
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int count = 0;

    while (dir && (entry = readdir(dir)))
        count += strstr(entry->d_name, "hang") != NULL;
    if (dir)
        closedir(dir);
    return count;
}

static int lines_with(const char *path, const char *what)
{
    FILE *file = fopen(path, "re");
    char line[1024];
    int count = 0;

    while (file && fgets(line, sizeof(line), file))
        count += strstr(line, what) != NULL;
    if (file)
        fclose(file);
    return count;
}

/* Rank 0 looks, for it may be said between two looks. */
static bool all_have_said(int rank, const char *what)
{
    char path[512];

    (void)snprintf(path, sizeof(path), "%s/log", folder);
    meeting_wait(meeting, N);
    if (rank == 0)
        atomic_store(&meeting->word, lines_with(path, what) >= N);
    meeting_wait(meeting, N);
    return atomic_load(&meeting->word);
}

/* Who has not joined the agreement cannot be missed, and on a busy machine NCCL is done before that. Those who have were
 * given the memory in which it is kept. */
static void wait_until_joined(void)
{
    struct lc_deadline until = lc_deadline_in_ms(60000);

    while (lines_with("/proc/self/maps", "loongcomm-words") == 0) {
        CHECK(!lc_deadline_passed(until));
        usleep(1000);
    }
}

static void wait_for_files(int count)
{
    struct lc_deadline until = lc_deadline_in_ms(60000);

    while (hang_files() < count) {
        CHECK(!lc_deadline_passed(until));
        usleep(20000);
    }
}

static void reduce(ncclComm_t comm, cudaStream_t stream, float *buffer, size_t count)
{
    NCCL(ncclAllReduce(buffer, buffer, count, ncclFloat, ncclSum, comm, stream));
}

/* The same calls at all ranks until each has said it. */
static void reduce_until_said(int rank, const char *what, ncclComm_t comm, cudaStream_t stream,
                              float *buffer)
{
    struct lc_deadline until = lc_deadline_in_ms(60000);

    do {
        CHECK(!lc_deadline_passed(until));
        reduce(comm, stream, buffer, COUNT);
        CUDA(cudaStreamSynchronize(stream));
        usleep(20000);
    } while (!all_have_said(rank, what));
}

/* Rank 2 calls the third all-reduce only when all three have reported that it has not. */
static void late(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    reduce(comm, stream, buffer, COUNT);
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    if (rank == 2)
        wait_for_files(N);
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    reduce_until_said(rank, "going on at #", comm, stream, buffer);
}

/* The same work at all ranks, and then a pause: nobody is to blame. */
static void idle(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    wait_for_files(N);
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
}

static void never_ends(void *arg)
{
    for (;;)
        (void)pause();
}

/* Nothing may be said. */
static void pause_only(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    usleep(rank == 1 ? 3500000 : 0);
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
}

/* The same with lines instead of files. */
static void idle_lines(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    struct lc_deadline until = lc_deadline_in_ms(60000);

    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    while (!all_have_said(rank, "all ranks have called the same"))
        CHECK(!lc_deadline_passed(until));
}

/* Rank 1 names another count than the others: the usual mistake. The device is kept busy, so that the rig, which would
 * end the program, does not come to see it. */
static void differs(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaLaunchHostFunc(stream, never_ends, NULL));
    reduce(comm, stream, buffer, rank == 1 ? 7 : COUNT);
    wait_for_files(N);
}

/* A collective of NCCL's, then messages round the ring, the last of which are ours. */
static void messages(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    struct lc_deadline until = lc_deadline_in_ms(60000);
    const size_t half = COUNT / 2;

    NCCL(ncclBroadcast(buffer, buffer, COUNT, ncclFloat, 0, comm, stream));
    for (int more = 2; more > 0; more -= all_have_said(rank, "messages to rank")) {
        CHECK(!lc_deadline_passed(until));
        NCCL(ncclGroupStart());
        NCCL(ncclSend(buffer, half, ncclFloat, (rank + 1) % N, comm, stream));
        NCCL(ncclRecv(buffer + half, half, ncclFloat, (rank + N - 1) % N, comm, stream));
        NCCL(ncclGroupEnd());
        CUDA(cudaStreamSynchronize(stream));
        usleep(20000);
    }
    wait_for_files(N);
}

static void killed(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    meeting_wait(meeting, N);
    if (rank == 1)
        (void)raise(SIGKILL);
    reduce(comm, stream, buffer, COUNT);
    wait_for_files(N - 1);
}

/* The arbiter's process dies: its peers know no more than what they did themselves. */
static void arbiter_killed(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    meeting_wait(meeting, N);
    if (rank == 0)
        (void)raise(SIGKILL);
    reduce(comm, stream, buffer, COUNT);
    wait_for_files(N - 1);
}

static void stopped(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer)
{
    static _Atomic int *pid;

    pid = &meeting->word;
    reduce(comm, stream, buffer, COUNT);
    CUDA(cudaStreamSynchronize(stream));
    if (rank == 1)
        atomic_store(pid, (int)getpid());
    meeting_wait(meeting, N);
    if (rank == 0)
        CHECK(kill(atomic_load(pid), SIGSTOP) == 0);
    reduce(comm, stream, buffer, COUNT);
    if (rank == 1)
        return;
    wait_for_files(N - 1);
    if (rank == 0)
        CHECK(kill(atomic_load(pid), SIGCONT) == 0);
    CUDA(cudaStreamSynchronize(stream));
}

static const struct {
    const char *name;
    void (*run)(int rank, ncclComm_t comm, cudaStream_t stream, float *buffer);
    bool dies; /* some rank does not end well, and nobody may wait for what it left */
} cases[] = {
    {"late",            late,           false},
    { "idle",           idle,           false},
    { "pause",          pause_only,     false},
    { "idle_lines",     idle_lines,     false},
    { "differs",        differs,        true },
    { "messages",       messages,       false},
    { "killed",         killed,         true },
    { "arbiter_killed", arbiter_killed, true },
    { "stopped",        stopped,        false},
};

static int rank_main(int rank, int n, void *arg)
{
    size_t which_one = (size_t)(uintptr_t)arg;
    ncclComm_t comm = comm_up(meeting, rank, n);
    cudaStream_t stream = stream_up();
    float *buffer = device_alloc(COUNT * sizeof(float));

    wait_until_joined();
    meeting_wait(meeting, N);
    cases[which_one].run(rank, comm, stream, buffer);
    if (cases[which_one].dies) {
        int all = strstr(which, "killed") ? n - 1 : n;

        atomic_fetch_add(&meeting->word, 1);
        while (atomic_load(&meeting->word) < all)
            usleep(1000);
        exit(0); /* with the report, without waiting for NCCL */
    }
    CUDA(cudaFree(buffer));
    CUDA(cudaStreamDestroy(stream));
    NCCL(ncclCommDestroy(comm));
    return 0;
}

int main(int argc, char **argv)
{
    int fate[N];

    CHECK(argc == 3);
    which = argv[1];
    folder = argv[2];
    meeting = meeting_new();
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        if (strcmp(which, cases[i].name) == 0) {
            CHECK(lc_ranks_watch(N, rank_main, (void *)(uintptr_t)i, 100, fate) == 0);
            for (int r = 0; r < N; r++)
                printf("rank %d: %x\n", r, fate[r]);
            return 0;
        }
    }
    return 1;
}
