/* SPDX-License-Identifier: Apache-2.0
 *
 * Cases that random programs do not reach, or would not name. */
#include "tests/gpu/reduce.h"

#include "common/deadline.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LARGE     300007 /* elements: more than one piece of the smallest scratch */
#define AGREED_MS 30000  /* what takes milliseconds on an idle machine */
#define UNTOLD    64     /* calls */

static void CUDART_CB sleep_a_while(void *us)
{
    usleep((unsigned)(uintptr_t)us);
}

static void delay(cudaStream_t stream, unsigned us)
{
    CUDA(cudaLaunchHostFunc(stream, sleep_a_while, (void *)(uintptr_t)us));
}

static struct rd_call sum_of(struct rd_rank *me, int comm, size_t count)
{
    struct rd_call call = { .kind = RD_ALL_REDUCE,
                            .op = RD_SUM,
                            .type = ncclFloat32,
                            .comm = comm,
                            .count = count };

    rd_prepare(me, &call);
    return call;
}

static void make_comm(struct rd_rank *me)
{
    me->comms[RD_NEW_COMM] = (struct rd_comm){ .rank = me->rank, .plain = true };
    NCCL(ncclCommSplit(me->comms[0].handle, 0, me->rank, &me->comms[RD_NEW_COMM].handle, NULL));
}

static cudaGraphExec_t capture_one(struct rd_rank *me, const struct rd_call *call,
                                   enum cudaStreamCaptureMode mode, cudaStream_t stream)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(stream, mode));
    rd_issue(me, call, stream);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void replay(struct rd_rank *me, const struct rd_call *call, cudaGraphExec_t exec,
                   cudaStream_t stream)
{
    uint64_t salt = rd_put(me, call, stream);

    CUDA(cudaGraphLaunch(exec, stream));
    rd_take(me, call, salt, stream);
}

/* Calls until the bits say that the ranks have agreed, on all ranks at the same call; from then on all must. Where nothing
 * can be told by bits no result depends on it, and so many calls will do. */
void rd_agree(struct rd_rank *me, int comm, cudaStream_t stream)
{
    struct lc_deadline until = lc_deadline_in_ms(AGREED_MS);
    struct rd_call call = { .kind = RD_ALL_REDUCE, .op = RD_SUM, .type = ncclFloat32 };
    size_t device_used = me->device.used, host_used = me->host.used;
    bool agreed = false;
    char *result;

    call.comm = comm;
    /* What goes in one step is not rounded. */
    call.count = me->min_bytes / 4 + (me->wire == RD_DATA ? 1000 : LARGE);
    rd_prepare(me, &call);
    result = rd_alloc(&me->host, call.count * 4);
    for (int i = 0; me->wire == RD_DATA ? i < UNTOLD : !agreed; i++) {
        size_t used = me->host.used;
        uint64_t salt = rd_put(me, &call, stream);

        rd_issue(me, &call, stream);
        CUDA(cudaMemcpyAsync(result, call.recv, call.count * 4, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaStreamSynchronize(stream));
        agreed = !rd_matches(me, &call, salt, result, false, me->wire == RD_DATA);
        if (agreed)
            (void)rd_matches(me, &call, salt, result, true, true);
        CHECK(agreed || me->wire == RD_DATA || !lc_deadline_passed(until));
        me->host.used = used;
        usleep(2000);
    }
    me->device.used = device_used;
    me->host.used = host_used;
    me->comms[comm].plain = false;
}

/* Nothing can be set up under a capture, so the vote waits; what was captured stays what it was. */
static void first_use_is_captured(struct rd_rank *me)
{
    struct rd_call early, late;
    cudaGraphExec_t first, second;

    make_comm(me);
    usleep(50000); /* all ranks are there: what is not set up now is so for the capture's sake */
    early = sum_of(me, RD_NEW_COMM, LARGE);
    late = sum_of(me, RD_NEW_COMM, LARGE);
    first = capture_one(me, &early, cudaStreamCaptureModeThreadLocal, me->streams[0]);
    for (int i = 0; i < 3; i++)
        replay(me, &early, first, me->streams[0]);
    rd_agree(me, RD_NEW_COMM, me->streams[1]);
    second = capture_one(me, &late, cudaStreamCaptureModeThreadLocal, me->streams[0]);
    for (int i = 0; i < 3; i++) {
        me->comms[RD_NEW_COMM].plain = true;
        replay(me, &early, first, me->streams[0]);
        me->comms[RD_NEW_COMM].plain = false;
        replay(me, &late, second, me->streams[1]);
    }
    rd_settle(me);
    CUDA(cudaGraphExecDestroy(first));
    CUDA(cudaGraphExecDestroy(second));
    NCCL(ncclCommDestroy(me->comms[RD_NEW_COMM].handle));
}

/* Replays of both are under way at once, eager calls between them. Pauses inside the graphs make them overlap. */
static void graphs_of_one_communicator_run_at_once(struct rd_rank *me)
{
    struct rd_call calls[3];
    cudaGraphExec_t graphs[2];

    for (int i = 0; i < 3; i++)
        calls[i] = sum_of(me, 0, LARGE - 4096 * (size_t)i);
    for (int i = 0; i < 2; i++)
        graphs[i] = capture_one(me, &calls[i], cudaStreamCaptureModeRelaxed, me->streams[i]);
    for (int i = 0; i < 8; i++) {
        delay(me->streams[(i + me->rank) % 2], 1000);
        replay(me, &calls[i % 2], graphs[i % 2], me->streams[i % 2]);
        if (i % 3 == 2)
            rd_once(me, &calls[2], me->streams[2]);
    }
    rd_settle(me);
    for (int i = 0; i < 2; i++)
        CUDA(cudaGraphExecDestroy(graphs[i]));
}

/* Two branches of one graph with nothing of the program's between them. */
static void branches_of_one_graph_do_not_mix(struct rd_rank *me)
{
    cudaStream_t a = me->streams[0], b = me->streams[1];
    struct rd_call calls[4];
    uint64_t salts[4];
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    for (int i = 0; i < 4; i++)
        calls[i] = sum_of(me, 0, LARGE + 8 * (size_t)i);
    CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    CUDA(cudaEventRecord(me->event, a));
    CUDA(cudaStreamWaitEvent(b, me->event, 0));
    for (int i = 0; i < 4; i++)
        rd_issue(me, &calls[i], i % 2 ? b : a);
    CUDA(cudaEventRecord(me->event, b));
    CUDA(cudaStreamWaitEvent(a, me->event, 0));
    CUDA(cudaStreamEndCapture(a, &graph));
    CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++)
            salts[i] = rd_put(me, &calls[i], a);
        CUDA(cudaGraphLaunch(exec, a));
        for (int i = 0; i < 4; i++)
            rd_take(me, &calls[i], salts[i], a);
    }
    rd_settle(me);
    CUDA(cudaGraphExecDestroy(exec));
}

struct capturer {
    struct rd_rank *me;
    int device;
    struct rd_call call;
    cudaStream_t stream;
    cudaGraphExec_t exec;
    _Atomic int begun, may_end;
};

/* Has a capture open, of a call on another communicator, until told to end it. */
static void *capture_for_long(void *arg)
{
    struct capturer *capturer = arg;
    struct rd_rank *me = capturer->me;
    cudaGraph_t graph;

    CUDA(cudaSetDevice(capturer->device));
    CUDA(cudaStreamBeginCapture(capturer->stream, me->threads ? cudaStreamCaptureModeThreadLocal
                                                              : cudaStreamCaptureModeGlobal));
    rd_issue(me, &capturer->call, capturer->stream);
    atomic_store(&capturer->begun, 1);
    while (!atomic_load(&capturer->may_end))
        usleep(200);
    rd_issue(me, &capturer->call, capturer->stream);
    CUDA(cudaStreamEndCapture(capturer->stream, &graph));
    CUDA(cudaGraphInstantiateWithFlags(&capturer->exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return NULL;
}

/* Set-up of a communicator, votes and calls in one thread, a capture that forbids unsafe calls in another. */
static void another_thread_captures(struct rd_rank *me)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    struct capturer capturer = { .me = me, .stream = me->streams[1] };
    pthread_t thread;

    make_comm(me);
    CUDA(cudaGetDevice(&capturer.device));
    capturer.call = sum_of(me, 1, LARGE);
    CHECK(pthread_create(&thread, NULL, capture_for_long, &capturer) == 0);
    while (!atomic_load(&capturer.begun))
        usleep(200);
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode)); /* the program's own calls, too */
    rd_agree(me, RD_NEW_COMM, me->streams[0]);
    atomic_store(&capturer.may_end, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    for (int i = 0; i < 3; i++)
        replay(me, &capturer.call, capturer.exec, me->streams[0]);
    rd_settle(me);
    CUDA(cudaGraphExecDestroy(capturer.exec));
    NCCL(ncclCommDestroy(me->comms[RD_NEW_COMM].handle));
}

/* The next stream may get the same handle while the work of the one before is still under way. */
static void streams_come_and_go(struct rd_rank *me)
{
    struct rd_call calls[12];

    for (int i = 0; i < 12; i++) {
        cudaStream_t stream;

        calls[i] = sum_of(me, 0, LARGE / 2);
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        delay(stream, 500);
        rd_once(me, &calls[i], stream);
        CUDA(cudaStreamDestroy(stream));
    }
    CUDA(cudaDeviceSynchronize());
    rd_settle(me);
}

/* The program's mistake is reported, and everything goes on. */
static void failed_group_leaves_no_trace(struct rd_rank *me)
{
    struct rd_call calls[4];
    ncclResult_t bad, end;

    for (int i = 0; i < 4; i++)
        calls[i] = sum_of(me, i % 2, 5000);
    for (int round = 0; round < 3; round++) {
        NCCL(ncclGroupStart());
        for (int i = 0; i < 4; i++)
            rd_issue(me, &calls[i], me->streams[0]);
        bad = ncclAllReduce(calls[0].send, calls[0].recv, 1, (ncclDataType_t)99, ncclSum,
                            me->comms[0].handle, me->streams[0]);
        end = ncclGroupEnd();
        CHECK(bad != ncclSuccess && end != ncclSuccess);
        CHECK(ncclAllReduce(calls[0].send, calls[0].recv, 1, (ncclDataType_t)99, ncclSum,
                            me->comms[0].handle, me->streams[0]) != ncclSuccess);
        for (int i = 0; i < 4; i++)
            rd_once(me, &calls[i], me->streams[round]);
        CUDA(cudaDeviceSynchronize());
    }
    rd_settle(me);
}

/* NCCL does not say that a simulation needs no other rank. */
static bool one(const struct rd_rank *me)
{
    return me->rank == 0 || !me->rig;
}

/* One rank asks what a group would cost, the others do not. */
static void simulated_group_did_not_happen(struct rd_rank *me)
{
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    struct rd_call calls[6];

    make_comm(me);
    for (int i = 0; i < 6; i++)
        calls[i] = sum_of(me, RD_NEW_COMM, 20000);
    for (int round = 0; one(me) && round < 3; round++) {
        NCCL(ncclGroupStart());
        for (int i = 0; i < 6; i++)
            rd_issue(me, &calls[i], me->streams[0]);
        NCCL(ncclGroupSimulateEnd(&info));
    }
    rd_agree(me, RD_NEW_COMM, me->streams[0]);
    for (int round = 0; round < 5; round++) {
        if (one(me)) {
            NCCL(ncclGroupStart());
            for (int i = 0; i < 6; i++)
                rd_issue(me, &calls[i], me->streams[0]);
            NCCL(ncclGroupSimulateEnd(&info));
        }
        for (int i = 0; i < 6; i++)
            rd_once(me, &calls[i], me->streams[0]);
    }
    rd_settle(me);
    NCCL(ncclCommDestroy(me->comms[RD_NEW_COMM].handle));
}

/* Many small ones, then more than any scratch holds, in turn with operations of NCCL's own. */
static void large_groups(struct rd_rank *me)
{
    static struct rd_call calls[RD_MAX_RANKS][980];
    uint64_t salts[980];
    struct rd_call *mine = calls[me->rank];

    for (int round = 0; round < 2; round++) {
        int n = round == 0 ? 980 : 24;

        for (int i = 0; i < n; i++) {
            mine[i] = (struct rd_call){
                .kind = round && i % 5 == 4 ? RD_REDUCE_SCATTER : RD_ALL_REDUCE,
                .op = round ? (enum rd_op)(i % (me->rig ? RD_OPS : RD_HALF)) : RD_AVG,
                .type = ncclFloat32,
                .comm = round ? i / 3 % 2 : 0,
                .count = round ? 3000 + (size_t)i * 8001 : 1 + (size_t)i * 7 % 900,
                .in_place = i % 2
            };
            if (mine[i].kind == RD_REDUCE_SCATTER)
                mine[i].count /= (size_t)me->n;
            rd_prepare(me, &mine[i]);
            salts[i] = rd_put(me, &mine[i], me->streams[0]);
        }
        NCCL(ncclGroupStart());
        for (int i = 0; i < n; i++)
            rd_issue(me, &mine[i], me->streams[0]);
        NCCL(ncclGroupEnd());
        for (int i = 0; i < n; i++)
            rd_take(me, &mine[i], salts[i], me->streams[0]);
        rd_settle(me);
    }
}

/* Streams of a communicator that are not all in one graph. */
static void half_captured_group_is_refused(struct rd_rank *me)
{
    struct rd_call calls[2] = { sum_of(me, 0, 3000), sum_of(me, 0, 3000) };
    cudaGraph_t graph = NULL;
    ncclResult_t result;

    CUDA(cudaStreamBeginCapture(me->streams[0], cudaStreamCaptureModeRelaxed));
    NCCL(ncclGroupStart());
    result = ncclAllReduce(calls[0].send, calls[0].recv, 3000, ncclFloat32, ncclSum,
                           me->comms[0].handle, me->streams[0]);
    CHECK(result == ncclSuccess);
    result = ncclAllReduce(calls[1].send, calls[1].recv, 3000, ncclFloat32, ncclSum,
                           me->comms[0].handle, me->streams[1]);
    CHECK((ncclGroupEnd() != ncclSuccess) || result != ncclSuccess);
    (void)cudaStreamEndCapture(me->streams[0], &graph);
    (void)cudaGetLastError();
    if (graph)
        CUDA(cudaGraphDestroy(graph));
    rd_once(me, &calls[0], me->streams[0]);
    rd_settle(me);
}

/* A collective of nothing on a stream outside of the graph. */
static void nothing_joins_no_stream(struct rd_rank *me)
{
    struct rd_call calls[2] = { sum_of(me, 0, 3000), sum_of(me, 0, 3000) };
    uint64_t salts[2];
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaStreamBeginCapture(me->streams[0], cudaStreamCaptureModeRelaxed));
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++)
        rd_issue(me, &calls[i], me->streams[0]);
    NCCL(ncclAllReduce(calls[1].send, calls[1].recv, 0, ncclFloat32, ncclSum, me->comms[0].handle,
                       me->streams[1]));
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamEndCapture(me->streams[0], &graph));
    CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    for (int i = 0; i < 2; i++)
        salts[i] = rd_put(me, &calls[i], me->streams[1]);
    CUDA(cudaGraphLaunch(exec, me->streams[1]));
    for (int i = 0; i < 2; i++)
        rd_take(me, &calls[i], salts[i], me->streams[1]);
    rd_settle(me);
    CUDA(cudaGraphExecDestroy(exec));
}

#define TENSORS 3

/* All ranks of a communicator in one thread: every step of one must come before what waits for another. */
struct clique {
    ncclComm_t comms[RD_MAX_RANKS];
    cudaStream_t streams[RD_MAX_RANKS];
    struct rd_call calls[TENSORS][RD_MAX_RANKS];
};

static void clique_up(struct rd_rank *me, struct clique *clique)
{
    NCCL(ncclCommInitAll(clique->comms, me->n, NULL));
    for (int r = 0; r < me->n; r++) {
        CUDA(cudaSetDevice(r));
        CUDA(cudaStreamCreateWithFlags(&clique->streams[r], cudaStreamNonBlocking));
        for (int t = 0; t < TENSORS; t++) {
            clique->calls[t][r] = (struct rd_call){ .kind = t == 2 ? RD_REDUCE_SCATTER
                                                                   : RD_ALL_REDUCE,
                                                    .op = t == 1 ? RD_AVG : RD_SUM,
                                                    .type = ncclFloat32,
                                                    .count = LARGE / 3 };
            CUDA(cudaMalloc((void **)&clique->calls[t][r].send, (size_t)LARGE * 4 * 3));
            CUDA(cudaMalloc((void **)&clique->calls[t][r].recv, (size_t)LARGE * 4));
        }
    }
}

static void clique_down(struct rd_rank *me, struct clique *clique)
{
    for (int r = 0; r < me->n; r++) {
        CUDA(cudaSetDevice(r));
        NCCL(ncclCommDestroy(clique->comms[r]));
        CUDA(cudaStreamDestroy(clique->streams[r]));
        for (int t = 0; t < TENSORS; t++) {
            CUDA(cudaFree(clique->calls[t][r].send));
            CUDA(cudaFree(clique->calls[t][r].recv));
        }
    }
    CUDA(cudaSetDevice(me->rank));
}

static void clique_call(struct rd_rank *me, struct clique *clique, int t, int r)
{
    struct rd_call *call = &clique->calls[t][r];
    ncclRedOp_t op = call->op == RD_AVG ? ncclAvg : ncclSum;

    if (call->kind == RD_ALL_REDUCE)
        NCCL(ncclAllReduce(call->send, call->recv, call->count, ncclFloat32, op, clique->comms[r],
                           clique->streams[r]));
    else
        NCCL(ncclReduceScatter(call->send, call->recv, call->count, ncclFloat32, op,
                               clique->comms[r], clique->streams[r]));
}

/* True if all results are those of ranks that have agreed; others must be plain ones. */
static bool clique_round(struct rd_rank *me, struct clique *clique, uint64_t salt)
{
    char *host = rd_alloc(&me->host, (size_t)LARGE * 4 * 3);
    bool wire = true;

    for (int r = 0; r < me->n; r++) {
        for (int t = 0; t < TENSORS; t++) {
            struct rd_call *call = &clique->calls[t][r];

            rd_fill(call, me->n, r, salt + (uint64_t)t, host);
            CUDA(cudaMemcpyAsync(call->send, host, rd_send_count(call, me->n) * 4,
                                 cudaMemcpyHostToDevice, clique->streams[r]));
            CUDA(cudaStreamSynchronize(clique->streams[r]));
        }
    }
    NCCL(ncclGroupStart());
    for (int t = 0; t < TENSORS; t++) {
        for (int r = 0; r < me->n; r++)
            clique_call(me, clique, t, r);
    }
    NCCL(ncclGroupEnd());
    for (int r = 0; r < me->n; r++) {
        struct rd_rank as = *me;

        as.comms[0].rank = r;
        for (int t = 0; t < TENSORS; t++) {
            struct rd_call *call = &clique->calls[t][r];

            CUDA(cudaMemcpyAsync(host, call->recv, call->count * 4, cudaMemcpyDeviceToHost,
                                 clique->streams[r]));
            CUDA(cudaStreamSynchronize(clique->streams[r]));
            if (rd_matches(&as, call, salt + (uint64_t)t, host, false, me->wire == RD_DATA))
                wire = me->wire == RD_DATA; /* the ranks agree from some call of a group on */
            else
                (void)rd_matches(&as, call, salt + (uint64_t)t, host, true, true);
        }
    }
    me->host.used = 0;
    return wire;
}

static void ranks_of_one_thread_go_together(struct rd_rank *me)
{
    struct lc_deadline until = lc_deadline_in_ms(AGREED_MS);
    struct clique clique = { 0 };
    int agreed = 0;

    if (!me->rig || me->threads || me->rank != 0 || me->n > 3)
        return;
    clique_up(me, &clique);
    for (uint64_t round = 0; agreed < 4; round++) {
        bool wire = clique_round(me, &clique, 1000 + round * TENSORS);

        CHECK(wire || (agreed == 0 && !lc_deadline_passed(until)));
        agreed += wire;
        usleep(agreed ? 0 : 2000);
    }
    clique_down(me, &clique);
}

void rd_cases(struct rd_rank *me, const char *only)
{
    static const struct {
        const char *name;
        void (*run)(struct rd_rank *me);
    } cases[] = {
#define CASE(name) { #name, name }
        CASE(first_use_is_captured),
        CASE(graphs_of_one_communicator_run_at_once),
        CASE(branches_of_one_graph_do_not_mix),
        CASE(another_thread_captures),
        CASE(streams_come_and_go),
        CASE(failed_group_leaves_no_trace),
        CASE(half_captured_group_is_refused),
        CASE(nothing_joins_no_stream),
        CASE(simulated_group_did_not_happen),
        CASE(large_groups),
        CASE(ranks_of_one_thread_go_together),
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        if (only && strcmp(only, cases[i].name) != 0)
            continue;
        if (me->rank == 0) {
            printf("%s\n", cases[i].name);
            fflush(stdout);
        }
        cases[i].run(me);
        rd_settle(me);
    }
}
