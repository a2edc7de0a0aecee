/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of the host NCCL share. */
#ifndef LCRIG_TEST_NCCL_H
#define LCRIG_TEST_NCCL_H

#include "common/deadline.h"
#include "tests/check.h"
#include "tests/rig/ranks.h"
#include "tests/rig/rig.h"

#include <nccl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PATIENCE_MS 30000 /* for what takes milliseconds on an idle machine */

#define NCCL(call) nccl_ok((call), #call, __FILE__, __LINE__)
#define CUDA(call) cuda_ok((call), #call, __FILE__, __LINE__)

static inline void nccl_ok(ncclResult_t result, const char *call, const char *file, int line)
{
    if (result == ncclSuccess)
        return;
    fprintf(stderr, "%s:%d: %s: %d %s\n", file, line, call, (int)result, ncclGetLastError(NULL));
    abort();
}

static inline void cuda_ok(cudaError_t result, const char *call, const char *file, int line)
{
    if (result == cudaSuccess)
        return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(result));
    abort();
}

/* Where ranks, processes or threads, find an id and meet outside NCCL. In memory that forked ranks share. */
struct meeting {
    _Atomic int has_id;
    _Atomic int arrived; /* grows by n with every meeting_wait of all */
    _Atomic int word;    /* the test's */
    ncclUniqueId id;
};

static inline struct meeting *meeting_new(void)
{
    struct meeting *meeting = mmap(NULL, sizeof(*meeting), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(meeting != MAP_FAILED);
    return meeting;
}

static inline void meeting_reset(struct meeting *meeting)
{
    memset(meeting, 0, sizeof(*meeting));
}

static inline ncclUniqueId meeting_id(struct meeting *meeting, int rank)
{
    if (rank == 0) {
        NCCL(ncclGetUniqueId(&meeting->id));
        atomic_store(&meeting->has_id, 1);
    }
    while (!atomic_load(&meeting->has_id))
        usleep(500);
    return meeting->id;
}

static inline void meeting_wait(struct meeting *meeting, int n)
{
    int all = (atomic_fetch_add(&meeting->arrived, 1) / n + 1) * n;

    while (atomic_load(&meeting->arrived) < all)
        usleep(500);
}

static inline ncclComm_t comm_up(struct meeting *meeting, int rank, int n)
{
    ncclComm_t comm;

    CUDA(cudaSetDevice(rank));
    NCCL(ncclCommInitRank(&comm, n, meeting_id(meeting, rank), rank));
    return comm;
}

static inline cudaStream_t stream_up(void)
{
    cudaStream_t stream;

    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static inline void *device_alloc(size_t bytes)
{
    void *ptr;

    CUDA(cudaMalloc(&ptr, bytes ? bytes : 1));
    return ptr;
}

/* Polls until the communicator's state is no longer ncclInProgress; gives up at last. */
static inline ncclResult_t comm_settle(ncclComm_t comm)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    ncclResult_t state = ncclInProgress;

    while (state == ncclInProgress && !lc_deadline_passed(until)) {
        NCCL(ncclCommGetAsyncError(comm, &state));
        if (state == ncclInProgress)
            usleep(1000);
    }
    return state;
}

/* Polls until an asynchronous error shows, at most ms. */
static inline ncclResult_t comm_error_within(ncclComm_t comm, int ms)
{
    ncclResult_t state = ncclSuccess;

    for (int i = 0; i < ms && state == ncclSuccess; i++) {
        NCCL(ncclCommGetAsyncError(comm, &state));
        usleep(1000);
    }
    return state;
}

/* Calls all-reduces of `count` floats in place until the ranks have agreed on bf16 on the wire, at the same call on all
 * of them: on a busy machine that takes more than a handful. 0.1 is no bf16 value, nor are its sums. */
static inline void until_bf16(ncclComm_t comm, cudaStream_t stream, float *buffer, size_t count)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    uint32_t bits = 1;

    while (bits & 0xffff) {
        CHECK(!lc_deadline_passed(until));
        for (size_t i = 0; i < count; i++)
            buffer[i] = 0.1f;
        NCCL(ncclAllReduce(buffer, buffer, count, ncclFloat32, ncclSum, comm, stream));
        CUDA(cudaStreamSynchronize(stream));
        memcpy(&bits, buffer, sizeof(bits));
        usleep(1000);
    }
}

struct nccl_test {
    int n;
    lc_rank_main *run;
    const char *name;
};

#define NCCL_TEST(n, name) \
    {                      \
        n, name, #name     \
    }

/* main() of a test that runs each of its parts as processes or (argument "threads") as threads. */
static inline int nccl_tests_run(const struct nccl_test *tests, size_t count, int argc, char **argv)
{
    bool threads = argc > 1 && strcmp(argv[1], "threads") == 0;
    struct meeting *meeting = meeting_new();
    int failed = 0;

    for (size_t i = 0; i < count; i++) {
        meeting_reset(meeting);
        if ((threads ? lc_ranks_run_threads : lc_ranks_run)(tests[i].n, tests[i].run, meeting,
                                                            120)) {
            fprintf(stderr, "%s failed\n", tests[i].name);
            failed++;
        }
    }
    return failed != 0;
}

#endif
