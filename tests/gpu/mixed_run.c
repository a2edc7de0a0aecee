/* SPDX-License-Identifier: Apache-2.0
 *
 * A program on one rank. Streams, pauses and what is on the GPU beside are each rank's own; so is the order of calls in a
 * group where NCCL leaves it to the ranks. */
#include "tests/gpu/mixed.h"

#include <string.h>
#include <unistd.h>

#define CAPTURED 3 /* streams that a graph may spread over */

/* The streams of a step's calls and messages on this rank, by their number in it. */
struct streams {
    uint8_t call[MX_CALLS], send[MX_MESSAGES], recv[MX_MESSAGES];
};

static unsigned own(struct mx_rank *me, unsigned n)
{
    return (unsigned)mx_draw(&me->random, n);
}

/* ---- places ---- */

static void *take_room(struct mx_arena *arena, size_t bytes)
{
    char *start = arena->base + arena->used;

    CHECK(bytes <= arena->size - arena->used);
    arena->used += (bytes + 255) / 256 * 256;
    return start;
}

static struct mx_place with_area(struct mx_rank *me, size_t skip, size_t bytes)
{
    struct mx_place place = { .area_bytes = 2 * MX_GUARD + skip + bytes };

    place.area = take_room(&me->device, place.area_bytes);
    place.recv = place.area + MX_GUARD + skip;
    return place;
}

static void place_call(struct mx_rank *me, const struct mx_call *call, struct mx_place *place)
{
    int size = mx_size_in(me->n, call->comm, me->rank);
    size_t rank = (size_t)mx_rank_in(me->n, call->comm, me->rank);
    size_t send = mx_send_bytes(call, size), recv = mx_recv_bytes(call, size);

    *place = with_area(me, call->skip, call->in_place ? (send > recv ? send : recv) : recv);
    if (!call->in_place) {
        place->send = (char *)take_room(&me->device, send + 64) + 64 -
                      (call->skip ? call->skip : 64);
        return;
    }
    place->send = place->recv + (call->kind == MX_ALL_GATHER ? rank * send : 0);
    if (call->kind == MX_REDUCE_SCATTER)
        place->recv += rank * recv;
}

static void place_all(struct mx_rank *me)
{
    const struct mx_plan *p = &me->plan;

    for (int i = 0; i < p->calls; i++)
        place_call(me, &p->call[i], &me->calls[i]);
    for (int i = 0; i < p->messages; i++) {
        const struct mx_message *m = &p->message[i];

        if (m->src == me->rank)
            me->sends[i].send = (char *)take_room(&me->device, m->bytes + 16) + (15 - m->skip);
        if (m->dst == me->rank)
            me->recvs[i] = with_area(me, m->skip, m->bytes);
    }
}

/* ---- other work ---- */

static void CUDART_CB sleep_a_while(void *us)
{
    usleep((unsigned)(uintptr_t)us);
}

/* Lets what comes behind it on the stream pile up. */
static void delay(struct mx_rank *me, int stream)
{
    if (own(me, 8) == 0)
        CUDA(cudaLaunchHostFunc(me->streams[stream], sleep_a_while,
                                (void *)(uintptr_t)own(me, 2000)));
    else if (own(me, 8) == 0)
        mx_load_add(me, me->streams[stream]);
}

/* What comes on the one comes behind what is on the other. */
static void order(struct mx_rank *me, int before, int behind)
{
    if (before == behind)
        return;
    CUDA(cudaEventRecord(me->event, me->streams[before]));
    CUDA(cudaStreamWaitEvent(me->streams[behind], me->event, 0));
}

/* Buffers of a graph are used again, by whom the stream waits for: nothing of theirs is on others. */
static int another(struct mx_rank *me, int stream, bool graph)
{
    return graph || own(me, 3) ? stream : (int)own(me, MX_STREAMS);
}

/* ---- inputs and results ---- */

static void copy_in(struct mx_rank *me, void *to, const void *from, size_t bytes, int stream)
{
    if (bytes)
        CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, me->streams[stream]));
}

static void clear(struct mx_rank *me, const struct mx_place *place, int stream)
{
    CUDA(cudaMemsetAsync(place->area, MX_FILLER, place->area_bytes, me->streams[stream]));
}

/* Input and an untouched receive buffer, on the stream or on another before it. */
static void put_call(struct mx_rank *me, int i, int round, int stream, bool graph)
{
    const struct mx_call *call = &me->plan.call[i];
    const struct mx_place *place = &me->calls[i];
    struct mx_take take = { .call = i, .message = -1, .round = round };
    size_t bytes = mx_send_bytes(call, mx_size_in(me->n, call->comm, me->rank));
    int first = another(me, stream, graph);
    char *input = take_room(&me->host, call->in_place ? place->area_bytes : bytes);

    delay(me, first);
    if (call->in_place) {
        memset(input, MX_FILLER, place->area_bytes);
        mx_fill_call(me, call, mx_salt(&me->plan, &take), input + (place->send - place->area));
        copy_in(me, place->area, input, place->area_bytes, first);
    } else {
        mx_fill_call(me, call, mx_salt(&me->plan, &take), input);
        copy_in(me, place->send, input, bytes, first);
        clear(me, place, first);
    }
    order(me, first, stream);
}

static void put_message(struct mx_rank *me, int i, int round, int send, int recv, bool graph)
{
    const struct mx_message *m = &me->plan.message[i];
    struct mx_take take = { .call = -1, .message = i, .round = round };
    int first;

    if (m->src == me->rank) {
        char *input = take_room(&me->host, m->bytes);

        first = another(me, send, graph);
        delay(me, first);
        mx_fill_message(m, mx_salt(&me->plan, &take), input);
        copy_in(me, me->sends[i].send, input, m->bytes, first);
        order(me, first, send);
    }
    if (m->dst == me->rank) {
        first = another(me, recv, graph);
        clear(me, &me->recvs[i], first);
        order(me, first, recv);
    }
}

static void take_result(struct mx_rank *me, const struct mx_place *place, struct mx_take take,
                        bool graph)
{
    char *to = take_room(&me->host, place->area_bytes);
    int last = another(me, take.stream, graph);

    order(me, take.stream, last);
    CUDA(cudaMemcpyAsync(to, place->area, place->area_bytes, cudaMemcpyDeviceToHost,
                         me->streams[last]));
    CHECK(me->takes_n < MX_TAKES);
    take.event = me->takes[me->takes_n].event;
    if (!take.event)
        CUDA(cudaEventCreateWithFlags(&take.event, cudaEventDisableTiming));
    CUDA(cudaEventRecord(take.event, me->streams[last]));
    take.area = to;
    pthread_mutex_lock(&me->lock);
    me->takes[me->takes_n++] = take;
    pthread_mutex_unlock(&me->lock);
    me->bytes += place->area_bytes;
}

/* `only` < 0: each on the stream of its own. */
static void put_step(struct mx_rank *me, const struct mx_step *s, int round,
                     const struct streams *streams, int only)
{
    for (int i = 0; i < s->calls; i++)
        put_call(me, s->call + i, round, only < 0 ? streams->call[i] : only, only >= 0);
    for (int i = 0; i < s->messages; i++)
        put_message(me, s->message + i, round, only < 0 ? streams->send[i] : only,
                    only < 0 ? streams->recv[i] : only, only >= 0);
}

static void take_step(struct mx_rank *me, const struct mx_step *s, int round,
                      const struct streams *streams, int only)
{
    struct mx_take take = { .step = (int)(s - me->plan.step), .message = -1, .round = round };

    for (int i = 0; i < s->calls; i++) {
        take.call = s->call + i;
        take.stream = only < 0 ? streams->call[i] : only;
        take_result(me, &me->calls[take.call], take, only >= 0);
    }
    take.call = -1;
    for (int i = 0; i < s->messages; i++) {
        take.message = s->message + i;
        take.stream = only < 0 ? streams->recv[i] : only;
        if (me->plan.message[take.message].dst == me->rank)
            take_result(me, &me->recvs[take.message], take, only >= 0);
    }
}

/* ---- calls ---- */

static void issue_reduction(struct mx_rank *me, const struct mx_call *call,
                            const struct mx_place *at, cudaStream_t stream)
{
    static const ncclRedOp_t plain[] = { ncclSum, ncclAvg, ncclMax };
    ncclComm_t comm = me->comms[call->comm];
    float quarter = 0.25f;
    ncclRedOp_t op;

    if (call->op < MX_HALF)
        op = plain[call->op];
    else if (call->op == MX_HALF)
        NCCL(ncclRedOpCreatePreMulSum(&op, me->factor, ncclFloat32, ncclScalarDevice, comm));
    else
        NCCL(ncclRedOpCreatePreMulSum(&op, &quarter, ncclFloat32, ncclScalarHostImmediate, comm));
    if (call->kind == MX_ALL_REDUCE)
        NCCL(ncclAllReduce(at->send, at->recv, call->count, call->type, op, comm, stream));
    else
        NCCL(ncclReduceScatter(at->send, at->recv, call->count, call->type, op, comm, stream));
    if (call->op >= MX_HALF)
        NCCL(ncclRedOpDestroy(op, comm));
}

static void issue_call(struct mx_rank *me, int i, int stream_number)
{
    const struct mx_call *call = &me->plan.call[i];
    const struct mx_place *at = &me->calls[i];
    ncclComm_t comm = me->comms[call->comm];
    cudaStream_t stream = me->streams[stream_number];

    me->counts[call->kind]++;
    switch (call->kind) {
    case MX_ALL_GATHER:
        NCCL(ncclAllGather(at->send, at->recv, call->count, call->type, comm, stream));
        break;
    case MX_BROADCAST:
        NCCL(ncclBroadcast(at->send, at->recv, call->count, call->type, call->root, comm, stream));
        break;
    case MX_ALL_TO_ALL:
        NCCL(ncclAlltoAll(at->send, at->recv, call->count, call->type, comm, stream));
        break;
    default: issue_reduction(me, call, at, stream); break;
    }
}

static void issue_send(struct mx_rank *me, int i, int stream)
{
    const struct mx_message *m = &me->plan.message[i];

    me->counts[MX_KINDS]++;
    NCCL(ncclSend(m->bytes ? me->sends[i].send : NULL, m->bytes, ncclUint8,
                  mx_rank_in(me->n, m->comm, m->dst), me->comms[m->comm], me->streams[stream]));
}

static void issue_recv(struct mx_rank *me, int i, int stream)
{
    const struct mx_message *m = &me->plan.message[i];

    NCCL(ncclRecv(m->bytes ? me->recvs[i].recv : NULL, m->bytes, ncclUint8,
                  mx_rank_in(me->n, m->comm, m->src), me->comms[m->comm], me->streams[stream]));
}

/* What of a step is on one communicator: calls, sends and receives each in their order, mixed as the rank likes, messages
 * only behind all all-to-alls, which NCCL makes of messages. */
static void issue_comm(struct mx_rank *me, const struct mx_step *s, const struct streams *streams,
                       int comm)
{
    int at[3] = { 0, 0, 0 }, end[3] = { s->calls, s->messages, s->messages };
    int moves = 0;

    for (int i = 0; i < s->calls; i++)
        moves += me->plan.call[s->call + i].comm == comm &&
                 me->plan.call[s->call + i].kind == MX_ALL_TO_ALL;
    while (at[0] < end[0] || at[1] < end[1] || at[2] < end[2]) {
        int way = moves ? 0 : (int)own(me, 3), i = at[way];

        if (i == end[way])
            continue;
        at[way]++;
        if (way == 0 && me->plan.call[s->call + i].comm == comm) {
            moves -= me->plan.call[s->call + i].kind == MX_ALL_TO_ALL;
            issue_call(me, s->call + i, streams->call[i]);
        } else if (way > 0) {
            const struct mx_message *m = &me->plan.message[s->message + i];

            if (m->comm == comm && way == 1 && m->src == me->rank)
                issue_send(me, s->message + i, streams->send[i]);
            if (m->comm == comm && way == 2 && m->dst == me->rank)
                issue_recv(me, s->message + i, streams->recv[i]);
        }
    }
}

static bool takes_part(const struct mx_rank *me, const struct mx_step *s)
{
    for (int i = s->message; i < s->message + s->messages; i++) {
        if (me->plan.message[i].src == me->rank || me->plan.message[i].dst == me->rank)
            return true;
    }
    return s->calls > 0;
}

/* One communicator after the other, as NCCL wants it where they share a stream; from 2.26 on it has an order of its own. */
static void issue_group(struct mx_rank *me, const struct mx_step *s, const struct streams *streams)
{
    unsigned depth = 1 + (own(me, 4) == 0), first = 0;

    if (!takes_part(me, s))
        return;
    if (!me->ordered)
        first = own(me, (unsigned)me->comms_n);
    for (unsigned i = 0; i < depth; i++)
        NCCL(ncclGroupStart());
    for (int i = 0; i < me->comms_n; i++)
        issue_comm(me, s, streams, (i + (int)first) % me->comms_n);
    for (unsigned i = 0; i < depth; i++)
        NCCL(ncclGroupEnd());
}

static void issue_singles(struct mx_rank *me, const struct mx_step *s,
                          const struct streams *streams)
{
    for (int i = 0; i < s->messages; i++) {
        const struct mx_message *m = &me->plan.message[s->message + i];

        if (m->src == me->rank)
            issue_send(me, s->message + i, streams->send[i]);
        else if (m->dst == me->rank)
            issue_recv(me, s->message + i, streams->recv[i]);
    }
}

/* Pairs of messages: to the spoke, and back. */
static void issue_spoke(struct mx_rank *me, const struct mx_step *s, const struct streams *streams)
{
    for (int i = 0; i < s->messages; i += 2) {
        bool late = own(me, 2);

        if (me->plan.message[s->message + i].dst != me->rank)
            continue;
        if (!late)
            issue_recv(me, s->message + i, streams->recv[i]);
        issue_send(me, s->message + i + 1, streams->send[i + 1]);
        if (late)
            issue_recv(me, s->message + i, streams->recv[i]);
    }
}

static void issue_step(struct mx_rank *me, const struct mx_step *s, const struct streams *streams)
{
    if (s->kind == MX_SINGLES)
        issue_singles(me, s, streams);
    else if (s->kind == MX_HUB && s->hub != me->rank)
        issue_spoke(me, s, streams);
    else if (s->kind == MX_CALL && s->calls)
        issue_call(me, s->call, streams->call[0]);
    else
        issue_group(me, s, streams);
}

/* ---- items ---- */

static struct streams some_streams(struct mx_rank *me, const struct mx_step *s, unsigned most)
{
    struct streams streams;
    unsigned usual = own(me, most);

    for (int i = 0; i < s->calls; i++)
        streams.call[i] = (uint8_t)own(me, most);
    for (int i = 0; i < s->messages; i++) {
        streams.send[i] = (uint8_t)(own(me, 3) ? usual : own(me, most));
        streams.recv[i] = (uint8_t)(own(me, 3) ? usual : own(me, most));
    }
    return streams;
}

static const char *doing(const struct mx_step *s)
{
    static const char *const kinds[] = { "a call", "a group", "messages one after another",
                                         "a hub" };

    return kinds[s->kind];
}

static void run_eager(struct mx_rank *me, const struct mx_item *item)
{
    for (int i = item->step; i < item->step + item->steps; i++) {
        const struct mx_step *s = &me->plan.step[i];
        struct streams streams = some_streams(me, s, MX_STREAMS);

        put_step(me, s, 0, &streams, -1);
        mx_now(me, "is in step %d, %s", i, doing(s));
        issue_step(me, s, &streams);
        take_step(me, s, 0, &streams, -1);
        mx_now(me, "is behind step %d", i);
    }
}

static void capture(struct mx_rank *me, const struct mx_item *item, struct mx_graph *graph)
{
    static const enum cudaStreamCaptureMode modes[] = { cudaStreamCaptureModeThreadLocal,
                                                        cudaStreamCaptureModeRelaxed,
                                                        cudaStreamCaptureModeGlobal };
    int width = 1 + (int)own(me, CAPTURED);
    cudaGraph_t captured;

    CUDA(cudaStreamBeginCapture(me->streams[0], modes[own(me, me->threads ? 2 : 3)]));
    for (int i = 1; i < width; i++)
        order(me, 0, i);
    for (int i = item->step; i < item->step + item->steps; i++) {
        const struct mx_step *s = &me->plan.step[i];
        struct streams streams = some_streams(me, s, (unsigned)width);

        mx_now(me, "captures step %d, %s", i, doing(s));
        delay(me, (int)own(me, (unsigned)width));
        issue_step(me, s, &streams);
    }
    for (int i = 1; i < width; i++)
        order(me, i, 0);
    CUDA(cudaStreamEndCapture(me->streams[0], &captured));
    CUDA(cudaGraphInstantiateWithFlags(&graph->exec, captured, 0));
    CUDA(cudaGraphDestroy(captured));
    CUDA(cudaEventCreateWithFlags(&graph->done, cudaEventDisableTiming));
}

static void replay(struct mx_rank *me, const struct mx_item *item, struct mx_graph *graph,
                   int round)
{
    int stream = (int)own(me, MX_STREAMS);

    CUDA(cudaStreamWaitEvent(me->streams[stream], graph->done, 0));
    for (int i = item->step; i < item->step + item->steps; i++)
        put_step(me, &me->plan.step[i], round, NULL, stream);
    mx_now(me, "launches the graph of steps %d to %d", item->step, item->step + item->steps - 1);
    CUDA(cudaGraphLaunch(graph->exec, me->streams[stream]));
    for (int i = item->step; i < item->step + item->steps; i++)
        take_step(me, &me->plan.step[i], round, NULL, stream);
    CUDA(cudaEventRecord(graph->done, me->streams[stream]));
}

/* ---- the end ---- */

static void compare_digests(const struct mx_rank *me)
{
    for (int i = 0; i < me->takes_n; i++) {
        const struct mx_take *take = &me->takes[i];
        const struct mx_call *call = &me->plan.call[take->call < 0 ? 0 : take->call];
        int first = mx_world_of(me->n, call->comm, me->rank, 0);
        int at = take->call * MX_ROUNDS + take->round;
        char text[MX_TEXT];

        if (take->call < 0 || !mx_is_near(me, call) || call->kind != MX_ALL_REDUCE ||
            me->shared->digest[me->rank][at] == me->shared->digest[first][at])
            continue;
        fprintf(stderr, "rank %d: seed %llu: %s: other bits than on rank %d\n", me->rank,
                (unsigned long long)me->plan.seed, mx_describe(me, take, text), first);
        abort();
    }
}

static void settle(struct mx_rank *me)
{
    mx_now(me, "waits for the end of a program");
    for (int i = 0; i < MX_STREAMS; i++)
        CUDA(cudaStreamSynchronize(me->streams[i]));
    mx_now(me, "compares");
    for (int i = 0; i < me->takes_n; i++)
        mx_check(me, &me->takes[i]);
    mx_load_check(me);
    mx_now(me, "waits for the others at the end of a program");
    mx_meet(me);
    compare_digests(me);
    mx_meet(me); /* digests are used again */
    pthread_mutex_lock(&me->lock);
    me->takes_n = 0;
    pthread_mutex_unlock(&me->lock);
    me->device.used = me->host.used = 0;
}

void mx_run(struct mx_rank *me, uint64_t seed, size_t bytes)
{
    struct mx_plan *p = &me->plan;

    mx_plan_make(p, seed, me->n, me->comms_n, bytes);
    me->random = seed * 2654435761u + (uint64_t)me->rank * 97 + 1;
    place_all(me);
    for (int t = 0; t < p->turns; t++) {
        const struct mx_item *item = &p->item[p->turn[t].item];
        struct mx_graph *graph = &me->graphs[p->turn[t].item];

        if (own(me, 6) == 0)
            usleep(own(me, 1500));
        if (own(me, 3) == 0)
            mx_load_add(me, NULL);
        if (!item->graph) {
            run_eager(me, item);
            continue;
        }
        if (!graph->exec)
            capture(me, item, graph);
        replay(me, item, graph, p->turn[t].round);
    }
    settle(me);
    for (int i = 0; i < MX_ITEMS; i++) {
        if (!me->graphs[i].exec)
            continue;
        CUDA(cudaGraphExecDestroy(me->graphs[i].exec));
        CUDA(cudaEventDestroy(me->graphs[i].done));
        me->graphs[i] = (struct mx_graph){ 0 };
    }
}
