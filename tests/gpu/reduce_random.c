/* SPDX-License-Identifier: Apache-2.0
 *
 * Random legal programs. All ranks make the same calls in the same order; streams and pauses are each rank's own. */
#include "tests/gpu/reduce.h"

#include "common/deadline.h"

#include <unistd.h>

#define GRAPHS    3
#define MAX_CALLS 40 /* of a graph */

/* Same numbers on all ranks, and this rank's own. */
struct dice {
    uint64_t all, own;
};

static uint64_t next(uint64_t *state)
{
    uint64_t x = (*state += 0x9e3779b97f4a7c15u);

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static unsigned all(struct dice *dice, unsigned n)
{
    return (unsigned)(next(&dice->all) >> 33) % n;
}

static unsigned own(struct dice *dice, unsigned n)
{
    return (unsigned)(next(&dice->own) >> 33) % n;
}

struct graph {
    cudaGraphExec_t exec;
    struct rd_call calls[MAX_CALLS];
    unsigned n;
    cudaEvent_t done; /* behind the last use of its buffers */
};

struct program {
    struct rd_rank *me;
    struct dice dice;
    struct graph graphs[GRAPHS];
    size_t left; /* elements that may still be moved: bounds memory and time */
};

static size_t some_count(struct program *p)
{
    static const unsigned most[] = { 8, 300, 5000, 5000, 40000, 40000, 100000, 800000 };
    size_t count = all(&p->dice, most[all(&p->dice, 8)]);

    if (count * (size_t)p->me->n > p->left)
        count = all(&p->dice, 300);
    else
        p->left -= count * (size_t)p->me->n;
    return count;
}

static struct rd_call some_call(struct program *p, bool small)
{
    static const ncclDataType_t types[] = { ncclFloat32,  ncclFloat32, ncclFloat32,
                                            ncclBfloat16, ncclFloat16, ncclInt32 };
    static const enum rd_kind kinds[] = { RD_ALL_REDUCE, RD_ALL_REDUCE,     RD_ALL_REDUCE,
                                          RD_ALL_REDUCE, RD_REDUCE_SCATTER, RD_REDUCE_SCATTER,
                                          RD_ALL_GATHER, RD_BROADCAST,      RD_ROUND };
    struct rd_call call = { .kind = kinds[all(&p->dice, 9)],
                            .type = types[all(&p->dice, 6)],
                            .op = (enum rd_op)all(&p->dice, RD_OPS),
                            .comm = (int)all(&p->dice, RD_COMMS),
                            .root = (int)all(&p->dice, (unsigned)p->me->n),
                            .in_place = all(&p->dice, 2) };

    if (call.type != ncclFloat32 && call.op >= RD_HALF)
        call.op = RD_SUM; /* their factors are floats */
    if (call.type == ncclInt32 && call.op == RD_AVG)
        call.op = RD_MAX;
    if (small) {
        call.kind = RD_ALL_REDUCE;
        call.count = all(&p->dice, 2000);
    } else {
        call.count = some_count(p);
    }
    rd_prepare(p->me, &call);
    return call;
}

static void pause_somewhere(struct program *p)
{
    if (own(&p->dice, 6) == 0)
        usleep(own(&p->dice, 1500));
}

static void CUDART_CB sleep_a_while(void *us)
{
    usleep((unsigned)(uintptr_t)us);
}

/* Other work on the stream, which lets things behind it pile up. */
static void delay(struct program *p, cudaStream_t stream)
{
    if (own(&p->dice, 4) == 0)
        CUDA(cudaLaunchHostFunc(stream, sleep_a_while, (void *)(uintptr_t)own(&p->dice, 2000)));
}

static cudaStream_t some_stream(struct program *p)
{
    return p->me->streams[own(&p->dice, RD_STREAMS)];
}

/* Streams for the calls of a group. NCCL makes each stream that is named for a communicator wait for what was on all of
 * them, and what comes behind the group on any wait for all of it: inputs and results may be on any. A call of nothing
 * does not count. */
struct shape {
    unsigned n;
    struct rd_call calls[MAX_CALLS];
    cudaStream_t streams[MAX_CALLS];
};

static cudaStream_t stream_of_same(struct program *p, const struct shape *shape, unsigned i)
{
    while (shape->calls[i].count > 0) {
        unsigned j = own(&p->dice, shape->n);

        if (shape->calls[j].comm == shape->calls[i].comm && shape->calls[j].count > 0)
            return shape->streams[j];
    }
    return shape->streams[i];
}

/* NCCL 2.28 at times takes one factor for another's where several are in one group. */
static bool has_factor(const struct rd_call *call)
{
    return call->type == ncclFloat32 &&
           (call->op == RD_AVG || call->op == RD_HALF || call->op == RD_QUARTER);
}

static void some_shape(struct program *p, struct shape *shape, cudaStream_t const *streams,
                       unsigned streams_n, unsigned most)
{
    bool small = all(&p->dice, 3) == 0;

    static const enum rd_op factors[] = { RD_AVG, RD_HALF, RD_QUARTER };
    enum rd_op factor = factors[all(&p->dice, 3)];

    shape->n = 1 + all(&p->dice, small ? most : (most + 2) / 3);
    for (unsigned i = 0; i < shape->n; i++) {
        shape->calls[i] = some_call(p, small);
        if (!p->me->rig && has_factor(&shape->calls[i]))
            shape->calls[i].op = factor;
        shape->streams[i] = streams[own(&p->dice, streams_n)];
    }
}

static void issue_shape(struct program *p, const struct shape *shape)
{
    unsigned depth = 1 + all(&p->dice, 3);

    for (unsigned i = 0; i < depth; i++)
        NCCL(ncclGroupStart());
    for (unsigned i = 0; i < shape->n; i++)
        rd_issue(p->me, &shape->calls[i], shape->streams[i]);
    for (unsigned i = 0; i < depth; i++)
        NCCL(ncclGroupEnd());
}

static void group(struct program *p)
{
    struct shape shape;
    uint64_t salts[MAX_CALLS];

    some_shape(p, &shape, p->me->streams, RD_STREAMS, MAX_CALLS);
    for (unsigned i = 0; i < shape.n; i++) {
        cudaStream_t stream = stream_of_same(p, &shape, i);

        delay(p, stream);
        salts[i] = rd_put(p->me, &shape.calls[i], stream);
    }
    issue_shape(p, &shape);
    for (unsigned i = 0; i < shape.n; i++)
        rd_take(p->me, &shape.calls[i], salts[i], stream_of_same(p, &shape, i));
}

static void single(struct program *p)
{
    struct rd_call call = some_call(p, false);
    cudaStream_t stream = some_stream(p);

    delay(p, stream);
    rd_once(p->me, &call, stream);
}

/* Calls and groups on one stream, or on two that meet at the end. */
static void capture(struct program *p, struct graph *graph)
{
    static const enum cudaStreamCaptureMode modes[] = { cudaStreamCaptureModeThreadLocal,
                                                        cudaStreamCaptureModeRelaxed,
                                                        cudaStreamCaptureModeGlobal };
    struct rd_rank *me = p->me;
    bool forks = all(&p->dice, 2);
    unsigned pieces = 1 + all(&p->dice, 3);
    cudaGraph_t captured;

    CUDA(cudaStreamBeginCapture(me->streams[0], modes[all(&p->dice, me->threads ? 2 : 3)]));
    if (forks) {
        CUDA(cudaEventRecord(me->event, me->streams[0]));
        CUDA(cudaStreamWaitEvent(me->streams[1], me->event, 0));
    }
    for (unsigned i = 0; i < pieces; i++) {
        struct shape shape = { 0 };

        some_shape(p, &shape, me->streams, forks ? 2 : 1, all(&p->dice, 3) ? 2 : 12);
        delay(p, shape.streams[0]);
        if (shape.n == 1)
            rd_issue(me, &shape.calls[0], shape.streams[0]);
        else
            issue_shape(p, &shape);
        for (unsigned j = 0; j < shape.n; j++)
            graph->calls[graph->n++] = shape.calls[j];
    }
    if (forks) {
        CUDA(cudaEventRecord(me->event, me->streams[1]));
        CUDA(cudaStreamWaitEvent(me->streams[0], me->event, 0));
    }
    CUDA(cudaStreamEndCapture(me->streams[0], &captured));
    CUDA(cudaGraphInstantiateWithFlags(&graph->exec, captured, 0));
    CUDA(cudaGraphDestroy(captured));
    CUDA(cudaEventCreateWithFlags(&graph->done, cudaEventDisableTiming));
}

static void replay(struct program *p, struct graph *graph)
{
    struct rd_rank *me = p->me;
    cudaStream_t stream = some_stream(p);
    uint64_t salts[MAX_CALLS];
    size_t elements = 0;

    for (unsigned i = 0; i < graph->n; i++)
        elements += graph->calls[i].count * (size_t)me->n;
    if (elements > p->left)
        return;
    p->left -= elements;
    CUDA(cudaStreamWaitEvent(stream, graph->done, 0));
    for (unsigned i = 0; i < graph->n; i++)
        salts[i] = rd_put(me, &graph->calls[i], stream);
    delay(p, stream);
    CUDA(cudaGraphLaunch(graph->exec, stream));
    for (unsigned i = 0; i < graph->n; i++)
        rd_take(me, &graph->calls[i], salts[i], stream);
    CUDA(cudaEventRecord(graph->done, stream));
}

static void one_program(struct rd_rank *me, uint64_t seed)
{
    struct program p = { .me = me, .left = 2000000 };

    p.dice.all = seed * 2;
    p.dice.own = seed * 2654435761u + (uint64_t)me->rank * 97 + 1;
    for (unsigned step = 0, steps = 3 + all(&p.dice, 14); step < steps; step++) {
        struct graph *graph = &p.graphs[all(&p.dice, GRAPHS)];
        unsigned what = all(&p.dice, 8);

        pause_somewhere(&p);
        if (what < 2)
            single(&p);
        else if (what < 4)
            group(&p);
        else if (!graph->exec)
            capture(&p, graph);
        else
            replay(&p, graph);
    }
    rd_settle(me);
    for (int i = 0; i < GRAPHS; i++) {
        if (p.graphs[i].exec) {
            CUDA(cudaGraphExecDestroy(p.graphs[i].exec));
            CUDA(cudaEventDestroy(p.graphs[i].done));
        }
    }
}

void rd_random(struct rd_rank *me, uint64_t seed, double seconds)
{
    int64_t begun = lc_now_ns();
    uint64_t programs = 0;
    bool more = seconds > 0;

    while (more) {
        one_program(me, seed + programs);
        programs++;
        /* Rank 0's clock decides for all. */
        if (me->rank == 0)
            atomic_store(&me->shared->digest,
                         (double)(lc_now_ns() - begun) / 1e9 < seconds ? 1 : 0);
        rd_meet(me);
        more = atomic_load(&me->shared->digest) != 0;
        rd_meet(me);
    }
    if (me->rank == 0)
        printf("random: %llu programs from seed %llu, %llu results, %.1f s\n",
               (unsigned long long)programs, (unsigned long long)seed,
               (unsigned long long)me->checks, (double)(lc_now_ns() - begun) / 1e9);
}
