/* SPDX-License-Identifier: Apache-2.0
 *
 * Random legal programs of sends, receives and collectives on the rig: every byte arrives, and none of them hangs. What
 * is large enough goes through rings, the rest through the rig's NCCL; programs run before, while and after the pairs
 * agree, eager and as graphs. LOONGCOMM_PEER=force, LOONGCOMM_EXCHANGE_MIN_BYTES=2000.
 * argv: ranks, seconds, first seed, and "threads". */
#include "tests/interpose/content.h"
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <stdbool.h>
#include <time.h>

#define RANKS    8
#define STEPS    12
#define MESSAGES 160
#define ROOM     ((size_t)4 << 20)
#define GUARD    16
#define SUMS     64 /* floats */

static struct meeting *meeting;

struct message {
    uint8_t comm, src, dst; /* ranks of the job, whatever they are in the communicator */
    bool all;               /* one of an all-to-all's */
    size_t bytes, from, to; /* places in the buffers of src and dst */
};

enum step_kind {
    GROUP,  /* whoever has a message makes one group */
    SINGLE, /* one after another */
    HUB,    /* the first message's sender groups, the others send and receive one by one */
    SUM,
    ALL_TO_ALL,
    MIXED, /* a group of all ranks with a sum, an all-to-all and messages on both communicators */
    KINDS,
};

struct step {
    enum step_kind kind;
    uint8_t comm;
    int first, n; /* messages, in front of them an all-to-all's */
};

/* The same at all ranks. */
struct program {
    uint64_t seed, random;
    int ranks, n_steps, n;
    struct step steps[STEPS];
    struct message messages[MESSAGES];
    size_t sent[RANKS], received[RANKS]; /* of the buffers */
};

struct job {
    int rank, n;
    ncclComm_t comm[2]; /* in the second one ranks count backwards */
    cudaStream_t stream[2];
    char *send, *recv;
    float *sums; /* of each step */
    uint64_t random;
};

static uint64_t draw(uint64_t *state, uint64_t below)
{
    return content_mix(*state += 0x9e3779b97f4a7c15u) % below;
}

/* ---- programs ---- */

static size_t draw_bytes(struct program *p)
{
    static const size_t some[] = { 0, 1, 7, 511, 1999, 2000, 2001, 4095, 4096, 16384, 16385 };
    uint64_t way = draw(&p->random, 16);

    if (way < 11)
        return some[way];
    return (size_t)draw(&p->random, way == 11 ? 90000 : way < 14 ? 20000 : 3000);
}

/* False: there is no room for it. */
static bool add(struct program *p, uint8_t comm, int src, int dst, size_t bytes, size_t skip)
{
    struct message *m = &p->messages[p->n];

    if (p->n == MESSAGES || p->sent[src] + bytes + 2 * GUARD > ROOM ||
        p->received[dst] + bytes + 2 * GUARD > ROOM)
        return false;
    *m = (struct message){ .comm = comm, .src = (uint8_t)src, .dst = (uint8_t)dst, .bytes = bytes };
    m->from = p->sent[src] + skip;
    m->to = p->received[dst] + GUARD + skip;
    p->sent[src] = m->from + bytes;
    p->received[dst] = m->to + bytes;
    p->n++;
    return true;
}

/* Parts lie one behind another, at both ends. */
static bool add_all_to_all(struct program *p, uint8_t comm)
{
    size_t bytes = draw_bytes(p), ranks = (size_t)p->ranks;

    for (size_t i = 0; i < ranks * ranks; i++) {
        int src = (int)(i / ranks), dst = (int)(i % ranks);

        if (p->n == MESSAGES || p->sent[src] + bytes * ranks + 2 * GUARD > ROOM ||
            p->received[dst] + bytes * ranks + 2 * GUARD > ROOM)
            return false;
        p->messages[p->n++] = (struct message){ .comm = comm,
                                                .src = (uint8_t)src,
                                                .dst = (uint8_t)dst,
                                                .all = true,
                                                .bytes = bytes };
    }
    for (size_t i = 0; i < ranks * ranks; i++) { /* in each communicator's own order of ranks */
        struct message *m = &p->messages[p->n - (int)(ranks * ranks) + (int)i];

        m->from = p->sent[m->src] + bytes * (comm ? ranks - 1 - m->dst : m->dst);
        m->to = p->received[m->dst] + GUARD + bytes * (comm ? ranks - 1 - m->src : m->src);
    }
    for (int r = 0; r < p->ranks; r++) {
        p->sent[r] += bytes * ranks;
        p->received[r] += bytes * ranks + GUARD;
    }
    return true;
}

static void add_some(struct program *p, bool both, uint8_t comm, bool own)
{
    int n = 1 + (int)draw(&p->random, 2 * (uint64_t)p->ranks);

    for (int i = 0; i < n; i++) {
        int src = (int)draw(&p->random, (uint64_t)p->ranks);
        int dst = (int)draw(&p->random, (uint64_t)p->ranks);
        size_t skip = draw(&p->random, 16);

        if (both)
            comm = (uint8_t)draw(&p->random, 2);
        if (src != dst || own)
            (void)add(p, comm, src, dst, draw_bytes(p), skip);
    }
}

static void add_hub(struct program *p, uint8_t comm)
{
    int hub = (int)draw(&p->random, (uint64_t)p->ranks);

    for (int spoke = 0; spoke < p->ranks; spoke++) {
        if (spoke != hub && draw(&p->random, 4) && p->n + 2 <= MESSAGES) {
            if (add(p, comm, hub, spoke, draw_bytes(p), 1) &&
                !add(p, comm, spoke, hub, draw_bytes(p), 5))
                p->n--;
        }
    }
}

static void add_step(struct program *p)
{
    struct step *s = &p->steps[p->n_steps];

    *s = (struct step){ .kind = (enum step_kind)draw(&p->random, KINDS),
                        .comm = (uint8_t)draw(&p->random, 2),
                        .first = p->n };
    if ((s->kind == ALL_TO_ALL || s->kind == MIXED) && !add_all_to_all(p, s->comm)) {
        p->n = s->first;
        s->kind = SUM;
    }
    if (s->kind == GROUP || s->kind == SINGLE)
        add_some(p, s->kind == GROUP && draw(&p->random, 3) == 0, s->comm, s->kind == GROUP);
    if (s->kind == MIXED)
        add_some(p, true, 0, true);
    if (s->kind == HUB)
        add_hub(p, s->comm);
    s->n = p->n - s->first;
    p->n_steps++;
}

static void make(struct program *p, uint64_t seed, int ranks)
{
    memset(p, 0, sizeof(*p));
    p->seed = p->random = seed;
    p->ranks = ranks;
    for (int n = 1 + (int)draw(&p->random, STEPS); p->n_steps < n;)
        add_step(p);
}

/* ---- one rank's part ---- */

static int rank_in(const struct job *job, int comm, int rank)
{
    return comm ? job->n - 1 - rank : rank;
}

static cudaStream_t any_stream(struct job *job)
{
    return job->stream[draw(&job->random, 2)];
}

static void issue(struct job *job, const struct message *m, bool send, cudaStream_t stream)
{
    ncclComm_t comm = job->comm[m->comm];

    if (send)
        NCCL(ncclSend(m->bytes ? job->send + m->from : NULL, m->bytes, ncclUint8,
                      rank_in(job, m->comm, m->dst), comm, stream));
    else
        NCCL(ncclRecv(m->bytes ? job->recv + m->to : NULL, m->bytes, ncclUint8,
                      rank_in(job, m->comm, m->src), comm, stream));
}

static void issue_all(struct job *job, const struct program *p, const struct step *s,
                      cudaStream_t stream)
{
    size_t from = SIZE_MAX, to = SIZE_MAX;
    const struct message *first = &p->messages[s->first];

    for (int i = 0; i < p->ranks * p->ranks; i++) {
        if (first[i].src == job->rank && first[i].from < from)
            from = first[i].from;
        if (first[i].dst == job->rank && first[i].to < to)
            to = first[i].to;
    }
    NCCL(ncclAlltoAll(job->send + from, job->recv + to, first->bytes, ncclUint8, job->comm[s->comm],
                      stream));
}

static void issue_sum(struct job *job, const struct program *p, const struct step *s,
                      cudaStream_t stream)
{
    float *sum = job->sums + (s - p->steps) * SUMS;

    NCCL(ncclAllReduce(sum, sum, SUMS, ncclFloat32, ncclSum, job->comm[s->comm], stream));
}

/* The rank's messages of a step from number `first` on, in one communicator: its sends in their order and its receives in
 * theirs, mixed as it likes. */
static void issue_mixed(struct job *job, const struct program *p, const struct step *s, int first,
                        int comm, cudaStream_t stream)
{
    int at[2] = { first, first }, end = s->first + s->n;

    while (at[0] < end || at[1] < end) {
        int way = at[0] == end ? 1 : at[1] == end ? 0 : (int)draw(&job->random, 2);
        const struct message *m = &p->messages[at[way]++];

        if ((way ? m->dst : m->src) == job->rank && m->comm == comm)
            issue(job, m, !way, draw(&job->random, 3) ? stream : any_stream(job));
    }
}

/* One communicator after the other, as NCCL wants it where they share a stream. */
static void issue_messages(struct job *job, const struct program *p, const struct step *s,
                           int first)
{
    for (int comm = 0; comm < 2; comm++)
        issue_mixed(job, p, s, first, comm, any_stream(job));
}

static bool takes_part(const struct job *job, const struct program *p, const struct step *s)
{
    for (int i = s->first; i < s->first + s->n; i++) {
        if (p->messages[i].src == job->rank || p->messages[i].dst == job->rank)
            return true;
    }
    return false;
}

/* Some groups are several deep. */
static unsigned begin(struct job *job)
{
    unsigned depth = 1 + (unsigned)(draw(&job->random, 4) == 0);

    for (unsigned i = 0; i < depth; i++)
        NCCL(ncclGroupStart());
    return depth;
}

static void end(unsigned depth)
{
    while (depth--)
        NCCL(ncclGroupEnd());
}

static void run_group(struct job *job, const struct program *p, const struct step *s)
{
    unsigned depth;

    if (!takes_part(job, p, s))
        return;
    depth = begin(job);
    issue_messages(job, p, s, s->first);
    end(depth);
}

/* The all-to-all first, the sum anywhere. */
static void run_mixed(struct job *job, const struct program *p, const struct step *s)
{
    bool late = draw(&job->random, 2);
    unsigned depth = begin(job);

    issue_all(job, p, s, any_stream(job));
    if (!late)
        issue_sum(job, p, s, any_stream(job));
    issue_messages(job, p, s, s->first + p->ranks * p->ranks);
    if (late)
        issue_sum(job, p, s, any_stream(job));
    end(depth);
}

static void run_singles(struct job *job, const struct program *p, const struct step *s)
{
    for (int i = s->first; i < s->first + s->n; i++) {
        const struct message *m = &p->messages[i];

        if (m->src == job->rank || m->dst == job->rank)
            issue(job, m, m->src == job->rank, any_stream(job));
    }
}

static void run_hub(struct job *job, const struct program *p, const struct step *s)
{
    if (s->n && p->messages[s->first].src == job->rank) {
        run_group(job, p, s);
        return;
    }
    for (int i = s->first; i < s->first + s->n; i += 2) {
        if (p->messages[i].dst == job->rank) {
            bool late = draw(&job->random, 2);

            if (late)
                issue(job, &p->messages[i], false, any_stream(job));
            issue(job, &p->messages[i + 1], true, any_stream(job));
            if (!late)
                issue(job, &p->messages[i], false, any_stream(job));
        }
    }
}

static void run_steps(struct job *job, const struct program *p)
{
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];

        switch (s->kind) {
        case GROUP: run_group(job, p, s); break;
        case MIXED: run_mixed(job, p, s); break;
        case SINGLE: run_singles(job, p, s); break;
        case HUB: run_hub(job, p, s); break;
        case SUM: issue_sum(job, p, s, any_stream(job)); break;
        default: issue_all(job, p, s, any_stream(job)); break;
        }
    }
}

/* ---- running them ---- */

static void fill(const struct job *job, const struct program *p, uint64_t salt)
{
    for (int i = 0; i < p->n; i++) {
        if (p->messages[i].src == job->rank)
            content_fill(job->send + p->messages[i].from, p->messages[i].bytes,
                         p->seed * 1000 + salt * 300 + (uint64_t)i);
    }
    memset(job->recv, 0xa5, p->received[job->rank] + GUARD);
    for (int i = 0; i < STEPS * SUMS; i++)
        job->sums[i] = (float)(i + job->rank);
}

static bool has_sum(const struct step *s)
{
    return s->kind == SUM || s->kind == MIXED;
}

static void check_sums(const struct job *job, const struct program *p)
{
    for (int i = 0; i < p->n_steps * SUMS; i++) {
        int sum = job->n * i + job->n * (job->n - 1) / 2;
        float want = (float)(has_sum(&p->steps[i / SUMS]) ? sum : i + job->rank);

        CHECK(job->sums[i] == want);
    }
}

static void check(const struct job *job, const struct program *p, uint64_t salt)
{
    size_t at = 0;

    for (int i = 0; i < p->n; i++) {
        const struct message *m = &p->messages[i];

        if (m->dst != job->rank)
            continue;
        if (!content_is(job->recv + m->to, m->bytes, p->seed * 1000 + salt * 300 + (uint64_t)i)) {
            fprintf(stderr, "seed %llu: message %d, %d to %d, %zu bytes\n",
                    (unsigned long long)p->seed, i, m->src, m->dst, m->bytes);
            CHECK(!"arrived as it was");
        }
        for (; !m->all && at < m->to; at++)
            CHECK(job->recv[at] == (char)0xa5);
        if (m->to + m->bytes > at)
            at = m->to + m->bytes;
    }
    CHECK(job->recv[p->received[job->rank]] == (char)0xa5);
    check_sums(job, p);
}

static void settle(const struct job *job)
{
    CUDA(cudaStreamSynchronize(job->stream[0]));
    CUDA(cudaStreamSynchronize(job->stream[1]));
}

static cudaGraphExec_t capture(struct job *job, const struct program *p)
{
    cudaEvent_t fork, join;
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    CUDA(cudaStreamBeginCapture(job->stream[0], cudaStreamCaptureModeThreadLocal));
    CUDA(cudaEventRecord(fork, job->stream[0]));
    CUDA(cudaStreamWaitEvent(job->stream[1], fork, 0));
    run_steps(job, p);
    CUDA(cudaEventRecord(join, job->stream[1]));
    CUDA(cudaStreamWaitEvent(job->stream[0], join, 0));
    CUDA(cudaStreamEndCapture(job->stream[0], &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaEventDestroy(fork));
    CUDA(cudaEventDestroy(join));
    return exec;
}

static void run_program(struct job *job, uint64_t seed, bool graph)
{
    struct program *p = malloc(sizeof(*p));
    cudaGraphExec_t exec = NULL;

    CHECK(p);
    make(p, seed, job->n);
    job->random = seed * 64 + (uint64_t)job->rank;
    if (graph)
        exec = capture(job, p);
    for (uint64_t round = 0; round < 1 + 2 * (uint64_t)graph; round++) {
        fill(job, p, round);
        if (graph)
            CUDA(cudaGraphLaunch(exec, job->stream[0]));
        else
            run_steps(job, p);
        settle(job);
        check(job, p, round);
    }
    if (exec)
        CUDA(cudaGraphExecDestroy(exec));
    free(p);
}

/* Each rank a message to each other one on both communicators, so that every pair comes past an epoch. */
static void all_pairs(struct job *job)
{
    NCCL(ncclGroupStart());
    for (int comm = 0; comm < 2; comm++) {
        for (int peer = 0; peer < job->n; peer++) {
            NCCL(ncclSend(job->send, 1, ncclUint8, peer, job->comm[comm], job->stream[0]));
            NCCL(ncclRecv(job->recv + comm * RANKS + peer, 1, ncclUint8, peer, job->comm[comm],
                          job->stream[0]));
        }
    }
    NCCL(ncclGroupEnd());
    settle(job);
}

static void until_agreed(struct job *job)
{
    struct lc_deadline patience = lc_deadline_in_ms(PATIENCE_MS);
    int calls = 0, until = 0;

    while (!until || calls < until) {
        CHECK(until || !lc_deadline_passed(patience));
        all_pairs(job);
        calls++;
        meeting_wait(meeting, job->n);
        if (!until && said_count("rings of") == 2 * job->n)
            for (until = 512; until <= 2 * calls + 512; until *= 2)
                ;
        meeting_wait(meeting, job->n);
    }
}

/* Rank 0 says when it is over. */
static bool is_over(const struct job *job, const struct timespec *begin, int seconds)
{
    struct timespec now;
    bool over;

    clock_gettime(CLOCK_MONOTONIC, &now);
    if (job->rank == 0)
        atomic_store(&meeting->word, now.tv_sec - begin->tv_sec >= seconds);
    meeting_wait(meeting, job->n);
    over = atomic_load(&meeting->word);
    meeting_wait(meeting, job->n);
    return over;
}

static uint64_t first_seed;
static int seconds;

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n };
    uint64_t seed = first_seed;
    struct timespec begin;

    job.comm[0] = comm_up(meeting, rank, n);
    NCCL(ncclCommSplit(job.comm[0], 0, n - 1 - rank, &job.comm[1], NULL));
    for (int i = 0; i < 2; i++)
        job.stream[i] = stream_up();
    job.send = device_alloc(ROOM);
    job.recv = device_alloc(ROOM);
    job.sums = device_alloc(STEPS * SUMS * sizeof(float));
    for (int i = 0; i < 5; i++, seed++)
        run_program(&job, seed, false);
    if (getenv("LD_PRELOAD")) /* else it is seen whether NCCL takes these programs */
        until_agreed(&job);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        run_program(&job, seed, seed % 4 == 3);
        seed++;
    } while (!is_over(&job, &begin, seconds));
    if (rank == 0)
        printf("%llu programs\n", (unsigned long long)(seed - first_seed));
    for (int i = 0; i < 2; i++)
        NCCL(ncclCommDestroy(job.comm[1 - i]));
    for (int i = 0; i < 2; i++)
        CUDA(cudaStreamDestroy(job.stream[i]));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    CUDA(cudaFree(job.sums));
    return 0;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 3;
    bool threads = argc > 4 && strcmp(argv[4], "threads") == 0;

    seconds = argc > 2 ? atoi(argv[2]) : 2;
    if (getenv("LCTEST_SOAK"))
        seconds *= 30;
    first_seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    CHECK(n >= 2 && n <= RANKS);
    said_begin();
    meeting = meeting_new();
    return (threads ? lc_ranks_run_threads : lc_ranks_run)(n, rank_main, NULL, seconds + 60);
}
