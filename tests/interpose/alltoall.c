/* SPDX-License-Identifier: Apache-2.0
 *
 * All-to-alls through rings, on the rig: every byte arrives as it was, eager, in groups and in graphs, in any type and
 * at any address. LOONGCOMM_PEER=force, LOONGCOMM_EXCHANGE_MIN_BYTES=1000. argv: ranks, and "threads". */
#include "interpose/loongcomm.h"
#include "tests/interpose/content.h"
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>

#define MOST \
    300000 /* bytes to each rank: more than all slots of a pair's channels at some shapes */

/* More than the library keeps at a time, so that one takes the place of an earlier one. */
#define CAPTURES 6

static struct meeting *meeting;

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    char *send, *recv;
};

static const ncclDataType_t types[] = { ncclInt8, ncclFloat16, ncclFloat32, ncclFloat64 };
static const size_t sizes[] = { 1, 2, 4, 8 };

static uint64_t seed_of(const struct job *job, int src, int dst, unsigned salt)
{
    return ((uint64_t)salt * 64 + (uint64_t)src) * (uint64_t)job->n + (uint64_t)dst;
}

static void fill(const struct job *job, size_t bytes, size_t skip, unsigned salt)
{
    for (int peer = 0; peer < job->n; peer++)
        content_fill(job->send + skip + (size_t)peer * bytes, bytes,
                     seed_of(job, job->rank, peer, salt));
    memset(job->recv, 0xa5, skip + (size_t)job->n * bytes + 64);
}

static void check(const struct job *job, size_t bytes, size_t skip, unsigned salt)
{
    const char *end = job->recv + skip + (size_t)job->n * bytes;

    for (int peer = 0; peer < job->n; peer++)
        CHECK(content_is(job->recv + skip + (size_t)peer * bytes, bytes,
                         seed_of(job, peer, job->rank, salt)));
    for (size_t i = 0; i < skip; i++)
        CHECK(job->recv[i] == (char)0xa5);
    for (int i = 0; i < 64; i++)
        CHECK(end[i] == (char)0xa5);
}

static void issue(const struct job *job, size_t count, int type, size_t skip, bool grouped)
{
    if (grouped)
        NCCL(ncclGroupStart());
    NCCL(ncclAlltoAll(job->send + skip, job->recv + skip, count, types[type], job->comm,
                      job->stream));
    if (grouped)
        NCCL(ncclGroupEnd());
}

static void until_agreed(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    for (int call = 0; !agreed; call++) {
        CHECK(!lc_deadline_passed(until));
        fill(job, 1000, 0, (unsigned)call);
        issue(job, 1000, 0, 0, false);
        CUDA(cudaStreamSynchronize(job->stream));
        check(job, 1000, 0, (unsigned)call);
        meeting_wait(meeting, job->n);
        agreed = said_count("committed at") == job->n;
        meeting_wait(meeting, job->n);
    }
    CHECK(said_count("rings of") == job->n);
}

static void any_size_type_and_address(const struct job *job)
{
    static const size_t counts[] = { 0, 1, 125, 1000, 1001, 4099, 16384, 36000 };
    unsigned salt = 5000;

    for (size_t c = 0; c < sizeof(counts) / sizeof(*counts); c++) {
        for (int type = 0; type < 4; type++) {
            size_t skip = salt * sizes[type] % 24, bytes = counts[c] * sizes[type];

            fill(job, bytes, skip, salt);
            issue(job, counts[c], type, skip, salt % 3 == 0);
            CUDA(cudaStreamSynchronize(job->stream));
            check(job, bytes, skip, salt++);
        }
    }
    fill(job, MOST, 3, salt);
    issue(job, MOST, 0, 3, false);
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, MOST, 3, salt);
    NCCL(ncclAlltoAll(NULL, NULL, 0, ncclInt8, job->comm, job->stream));
}

static void in_graphs(const struct job *job)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    for (unsigned grouped = 0; grouped < 2; grouped++) {
        CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
        issue(job, 5000, 0, 7, grouped);
        CUDA(cudaStreamEndCapture(job->stream, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        for (unsigned salt = 9000; salt < 9006; salt++) {
            fill(job, 5000, 7, salt);
            if (salt % 2)
                issue(job, 5000, 0, 7, false);
            else
                CUDA(cudaGraphLaunch(exec, job->stream));
            CUDA(cudaStreamSynchronize(job->stream));
            check(job, 5000, 7, salt);
        }
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(graph));
    }
}

/* No event that a node records: what follows in the graph would have to wait for it. */
static void stands_behind_work(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status;
    const cudaGraphNode_t *nodes = NULL;
    enum cudaGraphNodeType type;
    unsigned long long id;
    cudaGraph_t graph;
    size_t n = 0;

#if CUDART_VERSION >= 13000
    CUDA(cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, NULL, &n));
#else
    CUDA(cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, &n));
#endif
    CHECK(n == 1);
    CUDA(cudaGraphNodeGetType(nodes[0], &type));
    CHECK(type != cudaGraphNodeTypeEventRecord);
}

/* Of several calls in a graph the next one behind it waits for the last one. The rig sees to it that nothing is used by two
 * at a time. */
static void behind_graphs(const struct job *job)
{
    cudaGraphExec_t exec;
    cudaStream_t other;
    cudaGraph_t graph;

    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 3; i++) {
        issue(job, 5000, 0, 0, false);
        stands_behind_work(job->stream);
    }
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (unsigned salt = 9100; salt < 9110; salt++) {
        fill(job, 5000, 0, salt);
        CUDA(cudaGraphLaunch(exec, job->stream));
        NCCL(ncclAlltoAll(job->send, job->recv, 5000, ncclInt8, job->comm, other));
        CUDA(cudaGraphLaunch(exec, job->stream));
        CUDA(cudaStreamSynchronize(job->stream));
        CUDA(cudaStreamSynchronize(other));
        check(job, 5000, 0, salt);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(other));
}

/* Calls on streams that nothing orders within a graph, but that they are of one communicator. */
static void on_branches_of_a_graph(const struct job *job)
{
    struct job other = *job;
    cudaEvent_t fork, join;
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamCreateWithFlags(&other.stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    other.recv = device_alloc((size_t)job->n * 70000 + 100);
    fill(job, 70000, 0, 9200);
    memset(other.recv, 0xa5, (size_t)job->n * 70000 + 64);
    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    CUDA(cudaEventRecord(fork, job->stream));
    CUDA(cudaStreamWaitEvent(other.stream, fork, 0));
    for (int i = 0; i < 3; i++) {
        issue(job, 70000, 0, 0, false);
        issue(&other, 70000, 0, 0, false);
    }
    CUDA(cudaEventRecord(join, other.stream));
    CUDA(cudaStreamWaitEvent(job->stream, join, 0));
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, job->stream));
    CUDA(cudaGraphLaunch(exec, job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    check(job, 70000, 0, 9200);
    check(&other, 70000, 0, 9200);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaEventDestroy(fork));
    CUDA(cudaEventDestroy(join));
    CUDA(cudaStreamDestroy(other.stream));
    CUDA(cudaFree(other.recv));
}

/* The one starts behind the other, whichever streams they are on. */
static void on_streams_in_turn(const struct job *job)
{
    struct job other = *job;

    other.stream = stream_up();
    other.recv = device_alloc((size_t)job->n * 70000 + 100);
    fill(job, 70000, 0, 7000);
    memset(other.recv, 0xa5, (size_t)job->n * 70000 + 64);
    for (int i = 0; i < 10; i++) {
        issue(job, 70000, 0, 0, false);
        issue(&other, 70000, 0, 0, i % 2);
    }
    CUDA(cudaStreamSynchronize(job->stream));
    CUDA(cudaStreamSynchronize(other.stream));
    check(job, 70000, 0, 7000);
    check(&other, 70000, 0, 7000);
    CUDA(cudaStreamDestroy(other.stream));
    CUDA(cudaFree(other.recv));
}

/* ---- masks ---- */

#define ROWS      40 /* to each rank */
#define ROW_BYTES 730

static __typeof__(loongcommSetMask) *set_mask;

static bool is_live(int src, int row, unsigned salt)
{
    return content_mix((uint64_t)salt * 100000 + (uint64_t)src * 5000 + (uint64_t)row) % 3 != 0;
}

static void write_bits(const struct job *job, uint32_t *bits, unsigned salt)
{
    memset(bits, 0, (size_t)(ROWS * job->n + 31) / 32 * 4);
    for (int row = 0; row < ROWS * job->n; row++)
        bits[row / 32] |= (uint32_t)is_live(job->rank, row, salt) << row % 32;
}

/* Dead rows are zeros, but for those that the rank itself did not send through rings. */
static void check_rows(const struct job *job, unsigned salt, bool masked)
{
    char *want = malloc((size_t)ROWS * ROW_BYTES);

    CHECK(want);
    for (int peer = 0; peer < job->n; peer++) {
        content_fill(want, (size_t)ROWS * ROW_BYTES, seed_of(job, peer, job->rank, salt));
        for (int row = 0; masked && row < ROWS; row++) {
            if (!is_live(peer, job->rank * ROWS + row, salt))
                memset(want + row * ROW_BYTES, 0, ROW_BYTES);
        }
        CHECK(memcmp(job->recv + (size_t)peer * ROWS * ROW_BYTES, want, (size_t)ROWS * ROW_BYTES) ==
              0);
    }
    free(want);
}

enum form {
    ALONE,
    GROUPED,
    MESSAGES,
    FORMS
};

static void issue_rows(const struct job *job, enum form form)
{
    size_t bytes = (size_t)ROWS * ROW_BYTES;

    if (form != MESSAGES) {
        issue(job, bytes, 0, 0, form == GROUPED);
        return;
    }
    NCCL(ncclGroupStart());
    for (int i = 0; i < job->n; i++) {
        int peer = (job->rank + i) % job->n;

        NCCL(ncclSend(job->send + (size_t)peer * bytes, bytes, ncclInt8, peer, job->comm,
                      job->stream));
        NCCL(ncclRecv(job->recv + (size_t)peer * bytes, bytes, ncclInt8, peer, job->comm,
                      job->stream));
    }
    NCCL(ncclGroupEnd());
}

static int mask_rows(const struct job *job, const uint32_t *bits, size_t rows)
{
    return set_mask((struct ncclComm *)job->comm, bits, rows, ROW_BYTES,
                    (struct CUstream_st *)job->stream);
}

static void masked_eager(const struct job *job, uint32_t *bits)
{
    size_t rows = (size_t)ROWS * (size_t)job->n;

    for (unsigned salt = 11000; salt < 11000 + 4 * FORMS; salt++) {
        fill(job, (size_t)ROWS * ROW_BYTES, 0, salt);
        write_bits(job, bits, salt);
        if (salt % 2) /* only for the next one */
            CHECK(mask_rows(job, bits, rows) == 0);
        issue_rows(job, (enum form)(salt / 2 % FORMS));
        CUDA(cudaStreamSynchronize(job->stream));
        check_rows(job, salt, salt % 2);
    }
    CHECK(mask_rows(job, bits, rows + 1) == 0); /* which the next call has not */
    issue_rows(job, ALONE);
    CUDA(cudaStreamSynchronize(job->stream));
    check_rows(job, 11000 + 4 * FORMS - 1, false);
}

static void masked_in_graphs(const struct job *job, uint32_t *bits)
{
    for (enum form form = ALONE; form < FORMS; form++) {
        cudaGraphExec_t exec;
        cudaGraph_t graph;

        CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
        CHECK(mask_rows(job, bits, (size_t)ROWS * (size_t)job->n) == 0);
        issue_rows(job, form);
        CUDA(cudaStreamEndCapture(job->stream, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        for (unsigned salt = 12000; salt < 12003; salt++) {
            fill(job, (size_t)ROWS * ROW_BYTES, 0, salt);
            write_bits(job, bits, salt);
            CUDA(cudaGraphLaunch(exec, job->stream));
            CUDA(cudaStreamSynchronize(job->stream));
            check_rows(job, salt, true);
        }
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(graph));
    }
}

static void dead_rows_arrive_as_zeros(const struct job *job)
{
    uint32_t *bits = device_alloc((size_t)(ROWS * job->n + 31) / 32 * 4);

    CHECK(set_mask(NULL, bits, 1, 1000, NULL) == 1 && mask_rows(job, NULL, 1) == -EINVAL);
    CHECK(mask_rows(job, (uint32_t *)((char *)bits + 1), 1) == -EINVAL);
    CHECK(mask_rows(job, bits, 1) == 1); /* too small for rings */
    CHECK(mask_rows(job, bits, 0) == -EINVAL && mask_rows(job, bits, SIZE_MAX) == -EINVAL);
    for (unsigned salt = 10000; salt < 10005; salt++) { /* until pairs have agreed */
        fill(job, (size_t)ROWS * ROW_BYTES, 0, salt);
        issue_rows(job, MESSAGES);
        CUDA(cudaStreamSynchronize(job->stream));
        check_rows(job, salt, false);
    }
    masked_eager(job, bits);
    masked_in_graphs(job, bits);
    CUDA(cudaFree(bits));
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n };

    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc((size_t)n * MOST + 100);
    job.recv = device_alloc((size_t)n * MOST + 100);
    CHECK(mask_rows(&job, (uint32_t *)job.send, 100) == 1);
    until_agreed(&job);
    any_size_type_and_address(&job);
    in_graphs(&job);
    for (int i = 0; i < CAPTURES; i++)
        behind_graphs(&job);
    on_branches_of_a_graph(&job);
    on_streams_in_turn(&job);
    dead_rows_arrive_as_zeros(&job);
    NCCL(ncclCommDestroy(job.comm));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    return 0;
}

static char folder[] = "/tmp/lc-alltoall-XXXXXX";

static bool reported(const char *pattern)
{
    char command[160];

    snprintf(command, sizeof(command), "cat %s/* | tr -d ' \\n' | grep -q '%s'", folder, pattern);
    return system(command) == 0;
}

static bool remove_folder(void)
{
    char command[80];

    snprintf(command, sizeof(command), "rm -r %s", folder);
    return system(command) == 0;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 2, failed;
    bool threads = argc > 2 && strcmp(argv[2], "threads") == 0;

    CHECK(mkdtemp(folder) && setenv("LOONGCOMM_DIR", folder, 1) == 0 &&
          setenv("LOONGCOMM_REPORT", "json", 1) == 0);
    set_mask = (__typeof__(set_mask))dlsym(RTLD_DEFAULT, "loongcommSetMask");
    CHECK(set_mask);
    said_begin();
    meeting = meeting_new();
    failed = (threads ? lc_ranks_run_threads : lc_ranks_run)(n, rank_main, NULL, 60);
    CHECK(unsetenv("LD_PRELOAD") == 0);
    if (!failed && !threads)
        CHECK(reported("\"op\":\"AlltoAll\",\"paths\":.*\"reason\":\"exchange\"") &&
              reported("\"reason\":\"smaller-than-min-bytes\"") &&
              reported("\"exchange_elided\":[1-9]"));
    return remove_folder() ? failed : 1;
}
