/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host NCCL does about dead ranks, and that each misuse it knows is found: the test process ends with a line
 * that names the cause. */
#include "tests/rig/test_nccl.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#define RANKS_MAX 4
#define TEXT_MAX  8192

struct stage {
    struct meeting *meeting;
    int output; /* the ranks' standard error */
    lc_rank_main *run;
};

/* Of the ranks on stage; each writes its own, the others read it when all have met. In shared memory. */
static _Atomic int *pids;

static int on_stage(int rank, int n, void *arg)
{
    struct stage *stage = arg;
    struct rlimit none = { 0 };

    setrlimit(RLIMIT_CORE, &none);
    atomic_store(&pids[rank], (int)getpid());
    meeting_wait(stage->meeting, n);
    CHECK(dup2(stage->output, STDERR_FILENO) >= 0);
    return stage->run(rank, n, stage->meeting);
}

/* Runs ranks of which some must end with `signal` (0: with exit status `status`), saying `text`. */
static void expect_end(lc_rank_main *run, int n, int signal, int status, const char *text)
{
    struct stage stage = { meeting_new(), memfd_create("stderr", MFD_CLOEXEC), run };
    int fate[RANKS_MAX], found = 0;
    char said[TEXT_MAX];
    ssize_t bytes;

    CHECK(stage.output >= 0 && n <= RANKS_MAX);
    CHECK(lc_ranks_watch(n, on_stage, &stage, 100, fate) == 0);
    for (int rank = 0; rank < n; rank++)
        found += signal ? WIFSIGNALED(fate[rank]) && WTERMSIG(fate[rank]) == signal
                        : WIFEXITED(fate[rank]) && WEXITSTATUS(fate[rank]) == status;
    bytes = pread(stage.output, said, sizeof(said) - 1, 0);
    CHECK(bytes >= 0);
    said[bytes] = 0;
    if (found == 0 || !strstr(said, text)) {
        fprintf(stderr, "expected signal %d, status %d and \"%s\"; it was said:\n%s\n", signal,
                status, text, said);
        abort();
    }
    close(stage.output);
    munmap(stage.meeting, sizeof(*stage.meeting));
}

/* Until a rank has ended, and its parent has seen it. */
static void wait_for_an_end(int n)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);

    while (!lc_deadline_passed(until)) {
        for (int rank = 0; rank < n; rank++) {
            if (kill(atomic_load(&pids[rank]), 0) != 0)
                return;
        }
        usleep(1000);
    }
}

/* After the misuse some rank aborts, and no other one may end before that. */
static int after_misuse(ncclComm_t comm, cudaStream_t stream, int n)
{
    wait_for_an_end(n);
    NCCL(ncclCommAbort(comm));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

#define MISUSE(name, ...)                        \
    static int name(int rank, int n, void *arg)  \
    {                                            \
        ncclComm_t comm = comm_up(arg, rank, n); \
        cudaStream_t s = stream_up();            \
        static int x[100000], y[100000];         \
                                                 \
        (void)x;                                 \
        (void)y;                                 \
        __VA_ARGS__                              \
        return after_misuse(comm, s, n);         \
    }

/* clang-format off */
MISUSE(different_counts,
    NCCL(ncclAllReduce(x, y, 10 + rank, ncclInt, ncclSum, comm, s));)
MISUSE(different_big_counts,
    NCCL(ncclAllReduce(x, y, 50000 + rank, ncclInt, ncclSum, comm, s));)
MISUSE(different_types,
    NCCL(ncclAllGather(x, y, 10, rank ? ncclFloat : ncclInt, comm, s));)
MISUSE(different_operators,
    NCCL(ncclReduceScatter(x, y, 10, ncclInt, rank ? ncclMin : ncclMax, comm, s));)
MISUSE(different_roots,
    NCCL(ncclBroadcast(x, y, 10, ncclInt, rank, comm, s));)
MISUSE(different_collectives,
    if (rank)
        NCCL(ncclAllReduce(x, y, 10, ncclInt, ncclSum, comm, s));
    else
        NCCL(ncclBroadcast(x, y, 10, ncclInt, 0, comm, s));)
MISUSE(one_with_nothing,
    NCCL(ncclAllReduce(x, y, rank ? 10 : 0, ncclInt, ncclSum, comm, s));)
MISUSE(collective_against_message,
    if (rank)
        NCCL(ncclRecv(x, 10, ncclInt, 0, comm, s));
    else
        NCCL(ncclAllReduce(x, y, 10, ncclInt, ncclSum, comm, s));)
MISUSE(different_message_sizes,
    if (rank)
        NCCL(ncclRecv(x, 11, ncclInt, 0, comm, s));
    else
        NCCL(ncclSend(x, 10, ncclInt, 1, comm, s));)
MISUSE(different_sizes_to_oneself,
    NCCL(ncclGroupStart());
    NCCL(ncclSend(x, 10, ncclInt, rank, comm, s));
    NCCL(ncclRecv(y, 11, ncclInt, rank, comm, s));
    NCCL(ncclGroupEnd());)
MISUSE(all_to_all_in_place,
    NCCL(ncclAlltoAll(x, x, 10, ncclInt, comm, s));)
MISUSE(overlapping_results_in_a_group,
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(x, y, 10, ncclInt, ncclSum, comm, s));
    NCCL(ncclAllReduce(x, y + 9, 10, ncclInt, ncclSum, comm, s));
    NCCL(ncclGroupEnd());)
MISUSE(buffer_in_use_by_another_stream,
    cudaStream_t other = stream_up();
    if (rank)
        wait_for_an_end(n); /* rank 0's call waits for this one's */
    NCCL(ncclAllReduce(x, y, 10, ncclInt, ncclSum, comm, s));
    if (!rank) {
        usleep(20000);
        CUDA(cudaMemsetAsync(x, 0, 4, other));
        CUDA(cudaStreamSynchronize(other));
    })
MISUSE(destroyed_while_a_peer_waits,
    if (rank) {
        NCCL(ncclCommDestroy(comm));
        wait_for_an_end(n);
        return 0;
    }
    NCCL(ncclAllReduce(x, y, 10, ncclInt, ncclSum, comm, s));)
MISUSE(use_after_destroy,
    NCCL(ncclCommDestroy(comm));
    ncclAllReduce(x, y, 10, ncclInt, ncclSum, comm, s);)
MISUSE(rank_taken_twice,
    ncclComm_t twin;
    ncclUniqueId id = ((struct meeting *)arg)->id;
    id.internal[9] ^= 1;
    if (rank == 2)
        usleep(20000);
    ncclCommInitRank(&twin, 4, id, rank ? 1 : 0);)
/* clang-format on */

static int leaked_communicator(int rank, int n, void *arg)
{
    comm_up(arg, rank, n);
    return 0;
}

static double seconds(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

/* Also the ranks that wait for nothing from the dead one directly end: rank 2 waits for rank 0 only. */
static int work_of_peers_of_a_killed_rank_ends_soon(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n);
    cudaStream_t stream = stream_up();
    int *x = device_alloc(4);
    double start;

    meeting_wait(arg, n);
    if (rank == 1)
        raise(SIGKILL);
    start = seconds();
    if (rank == 0)
        NCCL(ncclRecv(x, 1, ncclInt, 1, comm, stream));
    else
        NCCL(ncclRecv(x, 1, ncclInt, 0, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
    CHECK(seconds() - start < 20); /* as a rule milliseconds */
    CHECK(comm_error_within(comm, PATIENCE_MS) == ncclRemoteError);
    NCCL(ncclCommAbort(comm));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int a_rank_that_dies_before_init_fails_the_others(int rank, int n, void *arg)
{
    struct meeting *meeting = arg;
    ncclUniqueId id = meeting_id(meeting, rank);
    ncclComm_t comm, parent = NULL;

    NCCL(ncclCommInitRank(&parent, n, id, rank));
    if (rank == 1)
        raise(SIGKILL);
    CHECK(ncclCommSplit(parent, 0, rank, &comm, NULL) == ncclRemoteError);
    CHECK(!comm);
    NCCL(ncclCommAbort(parent));
    return 0;
}

/* Rank 1 finishes all it owes and leaves; what it sent still arrives. */
static int bytes_of_a_rank_that_left_are_delivered(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n);
    cudaStream_t stream = stream_up();
    int *x = device_alloc(4000);

    memset(x, rank, 4000);
    if (rank == 1) {
        NCCL(ncclSend(x, 1000, ncclInt, 0, comm, stream));
        CUDA(cudaStreamSynchronize(stream));
        NCCL(ncclCommAbort(comm));
        CUDA(cudaFree(x));
        CUDA(cudaStreamDestroy(stream));
        return 0;
    }
    usleep(100000);
    NCCL(ncclRecv(x, 1000, ncclInt, 1, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
    CHECK(x[999] == 0x01010101);
    CHECK(comm_error_within(comm, 10) == ncclSuccess);
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static void expect_survivors(lc_rank_main *run, int n)
{
    int fate[RANKS_MAX];
    struct meeting *meeting = meeting_new();

    CHECK(lc_ranks_watch(n, run, meeting, 100, fate) == 0);
    for (int rank = 0; rank < n; rank++)
        CHECK(rank == 1 ? WIFSIGNALED(fate[1]) && WTERMSIG(fate[1]) == SIGKILL : fate[rank] == 0);
    munmap(meeting, sizeof(*meeting));
}

int main(void)
{
    pids = mmap(NULL, sizeof(*pids) * RANKS_MAX, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                -1, 0);
    CHECK(pids != MAP_FAILED);
    expect_survivors(work_of_peers_of_a_killed_rank_ends_soon, 3);
    expect_survivors(a_rank_that_dies_before_init_fails_the_others, 3);
    CHECK(lc_ranks_run(2, bytes_of_a_rank_that_left_are_delivered, meeting_new(), 20) == 0);
    expect_end(different_counts, 2, SIGABRT, 0, "mismatch");
    expect_end(different_big_counts, 3, SIGABRT, 0, "mismatch");
    expect_end(different_types, 2, SIGABRT, 0, "mismatch");
    expect_end(different_operators, 2, SIGABRT, 0, "mismatch");
    expect_end(different_roots, 2, SIGABRT, 0, "mismatch");
    expect_end(different_collectives, 2, SIGABRT, 0, "mismatch");
    expect_end(one_with_nothing, 2, SIGABRT, 0, "mismatch");
    expect_end(collective_against_message, 2, SIGABRT, 0, "mismatch");
    expect_end(different_message_sizes, 2, SIGABRT, 0, "mismatch");
    expect_end(different_sizes_to_oneself, 1, SIGABRT, 0, "to itself");
    expect_end(all_to_all_in_place, 2, SIGABRT, 0, "overlap");
    expect_end(overlapping_results_in_a_group, 2, SIGABRT, 0, "overlap");
    expect_end(buffer_in_use_by_another_stream, 2, SIGABRT, 0, "rig:");
    expect_end(destroyed_while_a_peer_waits, 2, SIGABRT, 0, "destroyed the communicator");
    expect_end(use_after_destroy, 1, SIGABRT, 0, "no live communicator");
    expect_end(rank_taken_twice, 3, SIGABRT, 0, "is taken");
    expect_end(leaked_communicator, 2, 0, 86, "leaked");
    return 0;
}
