/* SPDX-License-Identifier: Apache-2.0
 *
 * Order, groups, streams and graphs of the host NCCL. Usage: test_nccl_order processes|threads */
#include "tests/rig/test_nccl.h"

#include <stdint.h>

#define BIG   ((size_t)60000) /* elements: several rings full */
#define TIMES 8

/* A rank with a communicator and some streams. */
struct me {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t a, b;
    struct meeting *meeting;
};

static struct me me_up(int rank, int n, void *meeting)
{
    struct me me = { .rank = rank, .n = n, .meeting = meeting };

    me.comm = comm_up(meeting, rank, n);
    me.a = stream_up();
    me.b = stream_up();
    return me;
}

static void me_down(struct me *me)
{
    NCCL(ncclCommDestroy(me->comm));
    CUDA(cudaStreamDestroy(me->a));
    CUDA(cudaStreamDestroy(me->b));
}

static int *ints(size_t count, int value)
{
    int *ptr = device_alloc(count * sizeof(int));

    for (size_t i = 0; i < count; i++)
        ptr[i] = value;
    return ptr;
}

static void expect(const int *ptr, size_t count, int value)
{
    for (size_t i = 0; i < count; i++) {
        if (ptr[i] == value)
            continue;
        fprintf(stderr, "element %zu is %d, not %d\n", i, ptr[i], value);
        abort();
    }
}

static void sync_both(struct me *me)
{
    CUDA(cudaStreamSynchronize(me->a));
    CUDA(cudaStreamSynchronize(me->b));
}

/* Stops a stream until the test opens it. */
struct gate {
    _Atomic int is_open;
};

static void wait_at_gate(void *arg)
{
    struct gate *gate = arg;

    while (!atomic_load(&gate->is_open))
        usleep(200);
}

static int hub_and_spokes_exchange_in_one_group(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *out = ints(BIG, 100 + rank), *in = ints(BIG * (size_t)n, 0);

    NCCL(ncclGroupStart());
    for (int peer = 0; peer < n; peer++) {
        if ((rank != 0 && peer != 0) || peer == rank)
            continue;
        NCCL(ncclSend(out, BIG, ncclInt, peer, me.comm, me.a));
        NCCL(ncclRecv(in + BIG * (size_t)peer, BIG, ncclInt, peer, me.comm, me.a));
    }
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamSynchronize(me.a));
    for (int peer = 0; peer < n; peer++)
        if ((rank == 0) != (peer == 0))
            expect(in + BIG * (size_t)peer, BIG, 100 + peer);
    CUDA(cudaFree(out));
    CUDA(cudaFree(in));
    me_down(&me);
    return 0;
}

/* Rank 0 receives from 1 and from 2; 1 sends only after 2 has sent to it, and 2 does that after its big message to 0. */
static int receives_of_a_group_progress_independently(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *x = ints(BIG, rank), *y = ints(BIG, -1), *z = ints(BIG, -1);

    if (rank == 0) {
        NCCL(ncclGroupStart());
        NCCL(ncclRecv(y, BIG, ncclInt, 1, me.comm, me.a));
        NCCL(ncclRecv(z, BIG, ncclInt, 2, me.comm, me.a));
        NCCL(ncclGroupEnd());
    } else if (rank == 1) {
        NCCL(ncclRecv(y, BIG, ncclInt, 2, me.comm, me.a));
        NCCL(ncclSend(x, BIG, ncclInt, 0, me.comm, me.a));
    } else {
        NCCL(ncclSend(x, BIG, ncclInt, 0, me.comm, me.a));
        NCCL(ncclSend(x, BIG, ncclInt, 1, me.comm, me.a));
    }
    CUDA(cudaStreamSynchronize(me.a));
    if (rank == 0) {
        expect(y, BIG, 1);
        expect(z, BIG, 2);
    }
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    CUDA(cudaFree(z));
    me_down(&me);
    return 0;
}

static int a_pipeline_round_the_ring_arrives_in_order(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *buf[TIMES], next = (rank + 1) % n, last = (rank + n - 1) % n;

    for (int i = 0; i < TIMES; i++) {
        buf[i] = ints(BIG / 4, rank == 0 ? i : -1);
        if (rank != 0)
            NCCL(ncclRecv(buf[i], BIG / 4, ncclInt, last, me.comm, me.a));
        NCCL(ncclSend(buf[i], BIG / 4, ncclInt, next, me.comm, me.a));
        if (rank == 0)
            NCCL(ncclRecv(buf[i], BIG / 4, ncclInt, last, me.comm, me.a));
    }
    CUDA(cudaStreamSynchronize(me.a));
    for (int i = 0; i < TIMES; i++) {
        expect(buf[i], BIG / 4, i);
        CUDA(cudaFree(buf[i]));
    }
    me_down(&me);
    return 0;
}

/* Messages of many sizes, zero included, several per peer, more data than fits into a ring, with collectives between. */
static int mixed_groups_keep_each_pairs_order(int rank, int n, void *arg)
{
    static const size_t sizes[] = { 0, 1, BIG, 3, 0, 20000 };
    struct me me = me_up(rank, n, arg);
    int *out = ints(BIG, rank), *in = device_alloc(6 * BIG * sizeof(int) * (size_t)n);
    int *sum = ints(5, 1);

    for (int round = 0; round < 3; round++) {
        memset(in, -1, 6 * BIG * sizeof(int) * (size_t)n);
        NCCL(ncclGroupStart());
        for (int i = 0; i < 6; i++) {
            NCCL(ncclSend(out, sizes[i], ncclInt, (rank + i) % n, me.comm, me.a));
            NCCL(ncclRecv(in + BIG * (size_t)i, sizes[i], ncclInt, (rank + 6 * n - i) % n, me.comm,
                          me.a));
        }
        NCCL(ncclAllReduce(sum, sum, 5, ncclInt, ncclSum, me.comm, me.a));
        NCCL(ncclGroupEnd());
        CUDA(cudaStreamSynchronize(me.a));
        for (int i = 0; i < 6; i++) {
            expect(in + BIG * (size_t)i, sizes[i], (rank + 6 * n - i) % n);
            expect(in + BIG * (size_t)i + sizes[i], sizes[i] < BIG, -1);
        }
    }
    expect(sum, 5, n * n * n);
    CUDA(cudaFree(out));
    CUDA(cudaFree(in));
    CUDA(cudaFree(sum));
    me_down(&me);
    return 0;
}

static int two_communicators_in_opposite_order_do_not_wait_for_each_other(int rank, int n,
                                                                          void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *x = ints(BIG, rank + 1), *y = ints(BIG, rank + 2);
    ncclComm_t other;

    NCCL(ncclCommSplit(me.comm, 0, rank, &other, NULL));
    for (int i = 0; i < 4; i++) {
        if (rank % 2) {
            NCCL(ncclAllReduce(y, y, BIG, ncclInt, ncclMax, other, me.b));
            NCCL(ncclAllReduce(x, x, BIG, ncclInt, ncclMax, me.comm, me.a));
        } else {
            NCCL(ncclAllReduce(x, x, BIG, ncclInt, ncclMax, me.comm, me.a));
            NCCL(ncclAllReduce(y, y, BIG, ncclInt, ncclMax, other, me.b));
        }
    }
    sync_both(&me);
    expect(x, BIG, n);
    expect(y, BIG, n + 1);
    NCCL(ncclCommDestroy(other));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    me_down(&me);
    return 0;
}

/* One group: two communicators, each on both streams, which odd ranks name in the opposite order. */
static int a_group_over_streams_and_communicators_joins_them_all(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *x[4], *y[4];
    ncclComm_t comms[2] = { me.comm };
    cudaStream_t streams[2] = { me.a, me.b };

    NCCL(ncclCommSplit(me.comm, 0, n - rank, &comms[1], NULL));
    for (int i = 0; i < 4; i++) {
        x[i] = ints(2000, 0);
        y[i] = ints(2000, -1);
        /* What was on each stream comes first, and what is put behind the group comes after it. */
        CUDA(cudaMemsetAsync(x[i], 1, 8000, streams[(i + rank) % 2]));
    }
    NCCL(ncclGroupStart());
    for (int i = 0; i < 4; i++)
        NCCL(ncclAllReduce(x[i], y[i], 2000, ncclInt, ncclSum, comms[i / 2],
                           streams[(i + rank) % 2]));
    NCCL(ncclGroupEnd());
    for (int i = 0; i < 4; i++)
        CUDA(cudaMemcpyAsync(x[i], y[i], 8000, cudaMemcpyDeviceToDevice, streams[(i + rank) % 2]));
    sync_both(&me);
    for (int i = 0; i < 4; i++) {
        expect(x[i], 2000, 0x01010101 * n);
        CUDA(cudaFree(x[i]));
        CUDA(cudaFree(y[i]));
    }
    NCCL(ncclCommDestroy(comms[1]));
    me_down(&me);
    return 0;
}

/* No event of ours between the streams: the communicator's own order is all there is. */
/* On one stream, where one waits for the other. */
static int the_communicators_of_a_group_have_one_order_at_all_ranks(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *x[2] = { ints(BIG, rank), ints(BIG, rank) };
    ncclComm_t comms[2] = { me.comm };

    NCCL(ncclCommSplit(me.comm, 0, rank, &comms[1], NULL));
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) {
        int which = (i + rank) % 2;

        NCCL(ncclAllReduce(x[which], x[which], BIG, ncclInt, ncclMax, comms[which], me.a));
    }
    NCCL(ncclGroupEnd());
    sync_both(&me);
    for (int i = 0; i < 2; i++) {
        expect(x[i], BIG, n - 1);
        CUDA(cudaFree(x[i]));
    }
    NCCL(ncclCommDestroy(comms[1]));
    me_down(&me);
    return 0;
}

static int one_communicators_calls_run_in_order_whatever_their_streams(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    struct gate gate = { 0 };
    int *x = ints(1000, 1), *y = ints(1000, 7);

    CUDA(cudaLaunchHostFunc(me.a, wait_at_gate, &gate));
    for (int i = 0; i < 3; i++) {
        NCCL(ncclAllReduce(x, x, 1000, ncclInt, ncclSum, me.comm, i % 2 ? me.b : me.a));
    }
    NCCL(ncclBroadcast(y, x, 1000, ncclInt, 0, me.comm, me.b));
    NCCL(ncclAllReduce(x, x, 1000, ncclInt, ncclSum, me.comm, me.a));
    usleep(20000);
    expect(x, 1000, 1); /* stream b may not overtake */
    atomic_store(&gate.is_open, 1);
    sync_both(&me);
    expect(x, 1000, 7 * n);
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    me_down(&me);
    return 0;
}

static int a_call_is_asynchronous_work_of_its_stream(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    struct gate gate = { 0 };
    int *x = ints(1000, 1);

    CUDA(cudaLaunchHostFunc(me.a, wait_at_gate, &gate));
    NCCL(ncclAllReduce(x, x, 1000, ncclInt, ncclSum, me.comm, me.a));
    CHECK(cudaStreamQuery(me.a) == cudaErrorNotReady);
    for (int i = 0; i < 1000; i++)
        x[i] = 3; /* the gate still holds back the read */
    atomic_store(&gate.is_open, 1);
    CUDA(cudaStreamSynchronize(me.a));
    expect(x, 1000, 3 * n);
    CUDA(cudaFree(x));
    me_down(&me);
    return 0;
}

static int a_device_scalar_is_read_when_the_operation_runs(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    struct gate gate = { 0 };
    int *x = ints(1000, 1), *scalar = ints(1, 0), *later = ints(1, rank + 1);
    ncclRedOp_t op;

    CUDA(cudaLaunchHostFunc(me.a, wait_at_gate, &gate));
    CUDA(cudaMemcpyAsync(scalar, later, sizeof(int), cudaMemcpyDeviceToDevice, me.a));
    NCCL(ncclRedOpCreatePreMulSum(&op, scalar, ncclInt, ncclScalarDevice, me.comm));
    NCCL(ncclAllReduce(x, x, 1000, ncclInt, op, me.comm, me.a));
    NCCL(ncclRedOpDestroy(op, me.comm));
    atomic_store(&gate.is_open, 1);
    CUDA(cudaStreamSynchronize(me.a));
    expect(x, 1000, n * (n + 1) / 2);
    CUDA(cudaFree(x));
    CUDA(cudaFree(scalar));
    CUDA(cudaFree(later));
    me_down(&me);
    return 0;
}

/* ---- graphs ---- */

static cudaGraphExec_t end_capture(cudaStream_t stream)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static int a_captured_group_runs_again_at_every_replay(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *x = ints(BIG, 0), *y = ints(BIG, 0), *z = ints(1000, 1);
    cudaGraphExec_t exec;
    cudaEvent_t fork;

    CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA(cudaStreamBeginCapture(me.a, cudaStreamCaptureModeThreadLocal));
    CUDA(cudaEventRecord(fork, me.a));
    CUDA(cudaStreamWaitEvent(me.b, fork, 0));
    NCCL(ncclGroupStart());
    NCCL(ncclSend(x, BIG, ncclInt, (rank + 1) % n, me.comm, me.a));
    NCCL(ncclRecv(y, BIG, ncclInt, (rank + n - 1) % n, me.comm, me.b));
    NCCL(ncclGroupEnd());
    NCCL(ncclAllReduce(z, z, 1000, ncclInt, ncclSum, me.comm, me.b));
    CUDA(cudaEventRecord(fork, me.b));
    CUDA(cudaStreamWaitEvent(me.a, fork, 0));
    exec = end_capture(me.a);
    expect(z, 1000, 1);
    for (int i = 1; i < 4; i++) {
        for (size_t j = 0; j < BIG; j++)
            x[j] = 10 * i + rank;
        CUDA(cudaGraphLaunch(exec, me.a));
        CUDA(cudaStreamSynchronize(me.a));
        expect(y, BIG, 10 * i + (rank + n - 1) % n);
    }
    expect(z, 1000, n * n * n);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaEventDestroy(fork));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    CUDA(cudaFree(z));
    me_down(&me);
    return 0;
}

/* Two graphs and eager calls of one communicator on different streams, nothing else orders them. */
static int replays_and_calls_keep_the_order_of_their_launches(int rank, int n, void *arg)
{
    struct me me = me_up(rank, n, arg);
    int *x = ints(1000, 1), *y = ints(1000, 5);
    cudaGraphExec_t multiply, reset;

    CUDA(cudaStreamBeginCapture(me.a, cudaStreamCaptureModeThreadLocal));
    NCCL(ncclAllReduce(x, x, 1000, ncclInt, ncclSum, me.comm, me.a));
    multiply = end_capture(me.a);
    CUDA(cudaStreamBeginCapture(me.b, cudaStreamCaptureModeThreadLocal));
    NCCL(ncclBroadcast(y, x, 1000, ncclInt, 0, me.comm, me.b));
    reset = end_capture(me.b);
    for (int i = 0; i < TIMES; i++) {
        CUDA(cudaGraphLaunch(multiply, me.a));
        CUDA(cudaGraphLaunch(reset, me.b));
        CUDA(cudaGraphLaunch(multiply, me.a));
        NCCL(ncclAllReduce(x, x, 1000, ncclInt, ncclMax, me.comm, me.b));
        NCCL(ncclAllReduce(x, x, 1000, ncclInt, ncclSum, me.comm, me.a));
    }
    sync_both(&me);
    expect(x, 1000, 5 * n * n);
    CUDA(cudaGraphExecDestroy(multiply));
    CUDA(cudaGraphExecDestroy(reset));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    me_down(&me);
    return 0;
}

/* ---- one thread, several ranks ---- */

static int one_thread_drives_all_ranks(int rank, int n, void *arg)
{
    ncclComm_t comms[4];
    cudaStream_t streams[4];
    int *x[4], value;

    NCCL(ncclCommInitAll(comms, 4, NULL));
    for (int i = 0; i < 4; i++) {
        NCCL(ncclCommUserRank(comms[i], &value));
        CHECK(value == i);
        NCCL(ncclCommCuDevice(comms[i], &value));
        CHECK(value == i);
        CUDA(cudaSetDevice(i));
        x[i] = ints(BIG, i + 1);
        streams[i] = i == 3 ? NULL
                            : stream_up(); /* the default stream is the device's of that rank */
    }
    for (int times = 0; times < 3; times++) {
        NCCL(ncclGroupStart());
        for (int i = 0; i < 4; i++)
            NCCL(ncclAllReduce(x[i], x[i], BIG, ncclInt, ncclSum, comms[i], streams[i]));
        NCCL(ncclGroupEnd());
    }
    for (int i = 0; i < 4; i++) {
        CUDA(cudaSetDevice(i));
        CUDA(cudaStreamSynchronize(streams[i]));
        expect(x[i], BIG, 10 * 4 * 4);
        if (streams[i])
            CUDA(cudaStreamDestroy(streams[i]));
        CUDA(cudaFree(x[i]));
    }
    for (int i = 3; i >= 0; i--)
        NCCL(ncclCommDestroy(comms[i]));
    return 0;
}

int main(int argc, char **argv)
{
    static const struct nccl_test tests[] = {
        NCCL_TEST(5, hub_and_spokes_exchange_in_one_group),
        NCCL_TEST(3, receives_of_a_group_progress_independently),
        NCCL_TEST(4, a_pipeline_round_the_ring_arrives_in_order),
        NCCL_TEST(3, mixed_groups_keep_each_pairs_order),
        NCCL_TEST(2, two_communicators_in_opposite_order_do_not_wait_for_each_other),
        NCCL_TEST(3, a_group_over_streams_and_communicators_joins_them_all),
        NCCL_TEST(3, the_communicators_of_a_group_have_one_order_at_all_ranks),
        NCCL_TEST(3, one_communicators_calls_run_in_order_whatever_their_streams),
        NCCL_TEST(2, a_call_is_asynchronous_work_of_its_stream),
        NCCL_TEST(3, a_device_scalar_is_read_when_the_operation_runs),
        NCCL_TEST(3, a_captured_group_runs_again_at_every_replay),
        NCCL_TEST(3, replays_and_calls_keep_the_order_of_their_launches),
        NCCL_TEST(1, one_thread_drives_all_ranks),
    };

    return nccl_tests_run(tests, sizeof(tests) / sizeof(*tests), argc, argv);
}
