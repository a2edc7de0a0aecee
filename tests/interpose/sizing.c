/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings that begin with one slot and get more while they are used, on the rig. argv: what is to happen, ranks, "threads".
 * Every sum is of small whole numbers, so there is one right result whatever rings it went through. */
#include "common/deadline.h"
#include "tests/interpose/fault_lib.h"
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#define ROUNDS   6     /* that a large call sends through each slot, were there one */
#define SMALL    17000 /* elements: more than go without slots */
#define LIMIT_MS 60000

#pragma weak lcfault_arm
#pragma weak lcfault_calls

static struct meeting *meeting;
static bool threads;
static int cycles = 60;

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    float *send, *recv;
    size_t large;
    unsigned calls;
};

/* Element i of rank r is (7 i + 3 r + salt) % 61. */
static void fill(const struct job *job, size_t count, unsigned salt)
{
    unsigned value = (3 * (unsigned)job->rank + salt) % 61;

    for (size_t i = 0; i < count; i++) {
        job->send[i] = (float)value;
        value = value + 7 < 61 ? value + 7 : value + 7 - 61;
    }
}

static void check(const struct job *job, size_t count, unsigned salt)
{
    unsigned value = salt % 61;
    float sums[61] = { 0 };

    for (unsigned k = 0; k < 61; k++) {
        for (int r = 0; r < job->n; r++)
            sums[k] += (float)((k + 3 * (unsigned)r) % 61);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(job->recv[i] == sums[value]);
        value = value + 7 < 61 ? value + 7 : value + 7 - 61;
    }
}

static ncclResult_t issue(const struct job *job, size_t count)
{
    return ncclAllReduce(job->send, job->recv, count, ncclFloat32, ncclSum, job->comm, job->stream);
}

static void reduce(struct job *job, size_t count)
{
    fill(job, count, job->calls);
    NCCL(issue(job, count));
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, count, job->calls);
    job->calls++;
    usleep(
        300); /* for who sets things up: the more calls go by, the longer it takes to the next epoch */
}

/* One in two dozen is large. */
static void reduce_some(struct job *job, int calls)
{
    for (int i = 0; i < calls; i++)
        reduce(job, i % 24 ? SMALL : job->large);
}

static bool all_have_said(const struct job *job, const char *what, int times)
{
    bool said;

    meeting_wait(meeting, job->n);
    said = said_count(what) >= times;
    meeting_wait(meeting, job->n);
    return said;
}

/* Ends the test with what was said if it takes too long. */
static void check_time(struct lc_deadline until)
{
    static char text[1 << 14];

    if (!lc_deadline_passed(until))
        return;
    CHECK(pread(said_file, text, sizeof(text) - 1, 0) >= 0);
    fputs(text, stderr);
    CHECK(!"in time");
}

/* Goes on with `some` until the log holds `what` so often. */
static void until_said(struct job *job, const char *what, int times,
                       void (*some)(struct job *job, int calls))
{
    struct lc_deadline until = lc_deadline_in_ms(LIMIT_MS);

    while (!all_have_said(job, what, times)) {
        check_time(until);
        some(job, 24);
    }
}

static void reduce_small(struct job *job, int calls)
{
    for (int i = 0; i < calls; i++)
        reduce(job, SMALL);
}

/* Rings, with one slot. */
static void until_rings(struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(LIMIT_MS);
    int before = said_count("committed at");

    meeting_wait(meeting, job->n);
    while (!all_have_said(job, "committed at", before + job->n)) {
        check_time(until);
        reduce(job, 4);
    }
}

static void buffers_up(struct job *job, int rank, int n)
{
    *job = (struct job){ .rank = rank, .n = n };
    job->large = (size_t)ROUNDS * 32 * 4096 * (size_t)n;
    CUDA(cudaSetDevice(rank));
    job->stream = stream_up();
    job->send = device_alloc(job->large * sizeof(float));
    job->recv = device_alloc(job->large * sizeof(float));
}

static void buffers_down(struct job *job)
{
    CUDA(cudaStreamDestroy(job->stream));
    CUDA(cudaFree(job->send));
    CUDA(cudaFree(job->recv));
}

static void set_up(struct job *job, int rank, int n)
{
    buffers_up(job, rank, n);
    job->comm = comm_up(meeting, rank, n);
    until_rings(job);
    CHECK(said_count(" 1 slots") == n);
}

static void end(struct job *job)
{
    NCCL(ncclCommDestroy(job->comm));
    buffers_down(job);
}

/* Twice as many, and once more. */
static int they_grow(int rank, int n, void *arg)
{
    struct job job;

    (void)arg;
    set_up(&job, rank, n);
    until_said(&job, "from now on, 2 slots", n, reduce_some);
    until_said(&job, "from now on, 4 slots", n, reduce_some);
    CHECK(said_count("from now on, 2 slots") == n && said_count("from now on, 4 slots") == n);
    reduce_some(&job, 48);
    end(&job);
    return 0;
}

/* What was there before is enough again. */
static int they_go_back(int rank, int n, void *arg)
{
    struct job job;

    (void)arg;
    set_up(&job, rank, n);
    until_said(&job, "from now on, 2 slots", n, reduce_some);
    until_said(&job, "from now on, 1 slots", n, reduce_small);
    until_said(&job, "from now on, 2 slots", 2 * n, reduce_some);
    end(&job);
    return 0;
}

/* ---- graphs ---- */

static cudaGraphExec_t capture(const struct job *job)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    NCCL(issue(job, job->large));
    NCCL(issue(job, SMALL));
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void replay(struct job *job, cudaGraphExec_t exec)
{
    fill(job, job->large, job->calls);
    CUDA(cudaGraphLaunch(exec, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, job->large, job->calls);
    job->calls++;
}

static _Thread_local cudaGraphExec_t graphs[2];

static void replay_between(struct job *job, int calls)
{
    for (int i = 0; i < calls; i++) {
        reduce(job, i % 24 ? SMALL : job->large);
        if (i == 5)
            replay(job, graphs[0]);
        if (i == 7 && graphs[1])
            replay(job, graphs[1]);
    }
}

/* What a graph was captured with stays, while calls go over to others. */
static int graphs_keep_theirs(int rank, int n, void *arg)
{
    struct job job;

    (void)arg;
    set_up(&job, rank, n);
    graphs[0] = capture(&job);
    until_said(&job, "from now on, 2 slots", n, replay_between);
    graphs[1] = capture(&job);
    replay_between(&job, 24);
    if (!threads)
        until_said(&job, "from now on, 4 slots", n, replay_between);
    CUDA(cudaGraphExecDestroy(graphs[0]));
    replay(&job, graphs[1]);
    CUDA(cudaGraphExecDestroy(graphs[1]));
    end(&job);
    return 0;
}

/* ---- what keeps them as they are ---- */

static int there_is_a_cap(int rank, int n, void *arg)
{
    struct job job;

    (void)arg;
    set_up(&job, rank, n);
    until_said(&job, "leaves no room for more", 1, reduce_some);
    reduce_some(&job, 300);
    meeting_wait(meeting, n);
    CHECK(said_count("leaves no room for more") <= n && said_count("from now on") == 0);
    end(&job);
    return 0;
}

/* Nobody changes over. `arg`: the call that fails. */
static int one_rank_cannot(int rank, int n, void *arg)
{
    struct job job;

    set_up(&job, rank, n);
    if (rank == n - 1)
        CHECK(lcfault_arm && lcfault_arm(arg, 1));
    until_said(&job, "no rings of 2 slots", 1, reduce_some);
    reduce_some(&job, 120);
    meeting_wait(meeting, n);
    CHECK(said_count("no rings of 2 slots") == 1 && said_count("from now on") == 0);
    end(&job);
    return 0;
}

/* Also while calls do without slots. */
static int it_is_seldom_looked_at(int rank, int n, void *arg)
{
    struct job job;

    (void)arg;
    set_up(&job, rank, n);
    CHECK(lcfault_arm && lcfault_arm("cudaStreamIsCapturing", 0));
    for (int i = 0; i < 320; i++)
        reduce(&job, 4);
    CHECK(lcfault_calls() >= 10 && lcfault_calls() <= 20);
    end(&job);
    return 0;
}

static int one_rank_cannot_do_all(int n)
{
    static char sites[][24] = { "lk_segment_map", "lk_segment_new", "cudaMemcpyAsync",
                                "cudaDeviceGetPCIBusId" };
    int failed = 0;

    for (size_t i = 0; i < sizeof(sites) / sizeof(*sites) && !failed; i++) {
        meeting_reset(meeting);
        CHECK(ftruncate(said_file, 0) == 0);
        failed = lc_ranks_run(n, one_rank_cannot, sites[i], 100);
    }
    meeting_reset(meeting);
    CHECK(ftruncate(said_file, 0) == 0);
    return failed ? failed : lc_ranks_run(n, it_is_seldom_looked_at, NULL, 100);
}

/* ---- ends while they grow ---- */

/* Calls after which a rank is no more. */
static int last_call;

static int a_rank_dies(int rank, int n, void *arg)
{
    struct lc_deadline until = lc_deadline_in_ms(LIMIT_MS);
    ncclResult_t state = ncclSuccess;
    struct job job;

    (void)arg;
    set_up(&job, rank, n);
    reduce_some(&job, last_call);
    if (rank == n - 1)
        _exit(0);
    while (state == ncclSuccess) {
        check_time(until);
        fill(&job, SMALL, 0);
        if (issue(&job, SMALL) != ncclSuccess)
            break;
        while (cudaStreamQuery(job.stream) == cudaErrorNotReady && state == ncclSuccess) {
            NCCL(ncclCommGetAsyncError(job.comm, &state));
            usleep(1000);
        }
    }
    NCCL(ncclCommAbort(job.comm));
    _exit(0); /* an abort frees nothing on the device */
}

static int ranks_die(int n)
{
    int failed = 0, said = 0;

    for (last_call = 19; last_call < 160 && !failed; last_call += 20 + last_call / 2) {
        meeting_reset(meeting);
        CHECK(ftruncate(said_file, 0) == 0);
        failed = lc_ranks_run(n, a_rank_dies, NULL, 100);
        said += said_count("has ended without destroying their communicator");
    }
    CHECK(failed || said > 0); /* the value alone, ncclRemoteError, names nobody */
    return failed;
}

static bool from_far; /* this rank finds no arbiter on its host, and asks it by TCP */

__attribute__((visibility("default"))) int connect(int fd, const struct sockaddr *addr,
                                                   socklen_t length)
{
    static __typeof__(connect) *real;
    const struct sockaddr_un *un = (const struct sockaddr_un *)addr;
    static const char name[] = "loongcomm-", pass[] = "loongcomm-fd-";

    if (!real)
        real = (__typeof__(real))dlsym(RTLD_NEXT, "connect");
    if (from_far && addr->sa_family == AF_UNIX &&
        memcmp(un->sun_path + 1, name, sizeof(name) - 1) == 0 &&
        memcmp(un->sun_path + 1, pass, sizeof(pass) - 1) != 0) {
        errno = ECONNREFUSED;
        return -1;
    }
    return real(fd, addr, length);
}

static int count_entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int count = 0;

    CHECK(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static int count_segments(void)
{
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512];
    int count = 0;

    CHECK(file);
    while (fgets(line, sizeof(line), file))
        count += strstr(line, "loongkernels-segment") != NULL;
    fclose(file);
    return count;
}

/* A change needs the words of all ranks: no rank spends memory on one that cannot be. */
static int one_rank_is_far(int rank, int n, void *arg)
{
    struct job job;
    int before;

    (void)arg;
    from_far = rank == n - 1;
    set_up(&job, rank, n);
    before = count_segments();
    until_said(&job, "share memory with the process", n, reduce_some);
    reduce_some(&job, 240);
    CHECK(count_segments() == before && said_count("from now on") == 0);
    end(&job);
    return 0;
}

/* At every moment of the change, and behind it. */
static int ends_at_any_time(int rank, int n, void *arg)
{
    int fds = 0;
    struct job job;

    (void)arg;
    buffers_up(&job, rank, n);
    for (int cycle = 0; cycle < cycles; cycle++) {
        job.comm = comm_up(meeting, rank, n);
        until_rings(&job);
        for (int i = 0; i < 14 + cycle % 40; i++)
            reduce(&job, i == 12 ? job.large : SMALL);
        NCCL(ncclCommDestroy(job.comm));
        meeting_wait(meeting, n);
        if (rank == 0)
            atomic_store(&meeting->has_id, 0);
        meeting_wait(meeting, n);
        CHECK(threads || count_segments() == 0);
        if (cycle == 10)
            fds = count_entries("/proc/self/fd");
    }
    CHECK(threads || count_entries("/proc/self/fd") <= fds + 4);
    buffers_down(&job);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        lc_rank_main *run;
        const char *cap, *calm;
    } parts[] = {
        {"grow",    they_grow,          "512m", "0" },
        { "calm",   they_go_back,       "512m", "48"},
        { "graphs", graphs_keep_theirs, "512m", "0" },
        { "cap",    there_is_a_cap,     "5m",   "0" },
        { "far",    one_rank_is_far,    "512m", "0" },
        { "unable", NULL,               "512m", "0" },
        { "end",    ends_at_any_time,   "512m", "16"},
        { "die",    NULL,               "512m", "0" },
    };
    int n = argc > 2 ? atoi(argv[2]) : 2;

    threads = argc > 3 && strcmp(argv[3], "threads") == 0;
    if (argc > 3 && !threads)
        cycles = atoi(argv[3]);
    CHECK(setenv("LOONGCOMM_PEER", "force", 1) == 0 && setenv("LOONGCOMM_REPORT", "off", 1) == 0 &&
          setenv("LOONGCOMM_SCRATCH", "1m", 1) == 0 &&
          setenv("LOONGCOMM_STAGING_START", "1m", 1) == 0 &&
          setenv("LOONGCOMM_STAGING_WARMUP", "8", 1) == 0);
    said_begin();
    meeting = meeting_new();
    for (size_t i = 0; argc > 1 && i < sizeof(parts) / sizeof(*parts); i++) {
        if (strcmp(argv[1], parts[i].name) != 0)
            continue;
        CHECK(setenv("LOONGCOMM_STAGING_MAX", parts[i].cap, 1) == 0 &&
              setenv("LOONGCOMM_STAGING_CALM", parts[i].calm, 1) == 0);
        if (!parts[i].run)
            return strcmp(argv[1], "die") == 0 ? ranks_die(n) : one_rank_cannot_do_all(n);
        return (threads ? lc_ranks_run_threads : lc_ranks_run)(n, parts[i].run, NULL, 150);
    }
    return 2;
}
