/* SPDX-License-Identifier: Apache-2.0
 *
 * mixed: random legal programs of everything at once. Collectives, sends and receives, alone, in groups, as hubs and in
 * graphs, on up to four communicators and streams, beside other work that fills the GPU. Whatever moves is compared byte
 * by byte; sums are of small whole numbers, which bf16 holds too, so there is one right result whoever carries them out;
 * some are of any numbers, within bounds and the same bits on every rank. A rank that comes no further says what it waits
 * for. Runs on real GPUs and on the rig, plain or preloaded, with processes or threads as ranks. */
#ifndef LC_GPU_MIXED_H
#define LC_GPU_MIXED_H

#include "tests/gpu/job.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MX_RANKS    8
#define MX_COMMS    4
#define MX_STREAMS  4 /* the last is the default stream */
#define MX_ITEMS    6
#define MX_STEPS    18
#define MX_CALLS    72
#define MX_MESSAGES 160
#define MX_TURNS    16
#define MX_ROUNDS   4
#define MX_GUARD \
    ((size_t)64) /* bytes before and behind what is received that must stay as they are */
#define MX_FILLER 0xa5

/* --- mixed_plan.c: what all ranks do, the same everywhere --- */

enum mx_kind {
    MX_ALL_REDUCE,
    MX_REDUCE_SCATTER,
    MX_ALL_GATHER,
    MX_BROADCAST,
    MX_ALL_TO_ALL,
    MX_KINDS,
};

enum mx_op {
    MX_SUM,
    MX_AVG,
    MX_MAX,
    MX_HALF,    /* pre-multiplied sum, factor 0.5 on the device */
    MX_QUARTER, /* the same, 0.25 from the host */
};

struct mx_call {
    enum mx_kind kind;
    enum mx_op op;
    ncclDataType_t type;
    size_t count; /* as the call's argument says */
    uint8_t comm, root, skip;
    bool in_place;
    bool rough;  /* any numbers, not whole ones */
    bool sparse; /* many rows of zeros */
};

struct mx_message {
    uint8_t comm, skip;
    uint8_t src, dst; /* ranks of the job, whatever they are in the communicator */
    size_t bytes;
};

enum mx_step_kind {
    MX_CALL,    /* one call */
    MX_GROUP,   /* calls and messages, on any communicators */
    MX_SINGLES, /* messages one after another */
    MX_HUB,     /* one rank groups what the others send and receive one by one */
};

struct mx_step {
    enum mx_step_kind kind;
    uint8_t hub;
    int call, calls, message, messages; /* where they begin, how many */
};

/* Steps that are carried out together, one or several times. */
struct mx_item {
    int step, steps, rounds;
    bool graph;
};

struct mx_turn {
    int item, round;
};

struct mx_plan {
    uint64_t seed, random;
    int n, comms;
    size_t left; /* bytes that may still be moved: bounds memory and time */
    int items, steps, calls, messages, turns;
    struct mx_item item[MX_ITEMS];
    struct mx_step step[MX_STEPS];
    struct mx_call call[MX_CALLS];
    struct mx_message message[MX_MESSAGES];
    struct mx_turn turn[MX_TURNS];
};

uint64_t mx_draw(uint64_t *state, uint64_t below);
void mx_plan_make(struct mx_plan *plan, uint64_t seed, int n, int comms, size_t bytes);

/* Ranks of a job of n in its communicators: all as they are, all backwards, even and odd ones apart (below four ranks all,
 * rotated), all rotated. */
int mx_rank_in(int n, int comm, int world);
int mx_size_in(int n, int comm, int world);
int mx_world_of(int n, int comm, int member, int rank);
int mx_color_in(int n, int comm, int world);

size_t mx_send_bytes(const struct mx_call *call, int size);
size_t mx_recv_bytes(const struct mx_call *call, int size);

/* --- one rank --- */

/* Shared by the ranks, processes or threads. */
struct mx_shared {
    struct job_id id;
    _Atomic int arrived;
    _Atomic int word;
    _Atomic int hung;                                        /* some rank comes no further */
    _Atomic uint64_t digest[MX_RANKS][MX_CALLS * MX_ROUNDS]; /* each written by its rank */
    _Atomic uint64_t results[MX_RANKS];
};

/* Memory that is used up in order and given back at once. */
struct mx_arena {
    char *base;
    size_t size, used;
};

/* Where a call or one end of a message is on the device. `area` is what is looked at: what is received, with guards. */
struct mx_place {
    char *send, *recv, *area;
    size_t area_bytes;
};

/* A result on its way to the host. */
struct mx_take {
    int step, call, message; /* call or message is -1 */
    int round, stream;
    const char *area;
    cudaEvent_t event; /* behind the copy */
};

#define MX_TAKES ((MX_CALLS + MX_MESSAGES) * MX_ROUNDS)

struct mx_graph {
    cudaGraphExec_t exec;
    cudaEvent_t done; /* behind the last use of its buffers */
};

enum mx_wire {
    MX_DATA,
    MX_BF16,
};

struct mx_rank {
    int rank, n, comms_n;
    bool threads; /* other ranks are in this process */
    bool rig, preloaded;
    bool ordered; /* groups name communicators in the same order on all ranks */
    enum mx_wire wire;
    bool fed;         /* what travels in bf16 has what earlier calls owe */
    bool drawn;       /* and is rounded stochastically */
    size_t min_bytes; /* smaller reductions keep their type on the wire */
    struct mx_shared *shared;
    ncclComm_t comms[MX_COMMS];
    cudaStream_t streams[MX_STREAMS];
    cudaEvent_t event;
    float *factor; /* on the device: 0.5 */
    struct mx_arena device, host;
    struct mx_load *load;
    uint64_t random; /* this rank's own */

    struct mx_plan plan;
    struct mx_place calls[MX_CALLS], sends[MX_MESSAGES], recvs[MX_MESSAGES];
    struct mx_graph graphs[MX_ITEMS];
    uint64_t results, bytes;
    unsigned long long counts[MX_KINDS + 1]; /* of calls; last: messages sent */

    /* Guards what is below, which the rank writes and its watchdog reads. */
    pthread_mutex_t lock;
    pthread_t watchdog;
    bool over;
    char what[128]; /* what it is doing */
    int64_t since;  /* when it began with that */
    int limit_s;
    int takes_n;
    struct mx_take takes[MX_TAKES];
};

/* Waits for the other ranks, outside of NCCL. */
void mx_meet(struct mx_rank *me);

/* --- mixed_run.c: a program on this rank, from its plan to its results --- */

void mx_run(struct mx_rank *me, uint64_t seed, size_t bytes);

/* --- mixed_data.c: what is sent, and what must come of it --- */

/* Of a call's results, which are compared with a slack then. */
bool mx_is_near(const struct mx_rank *me, const struct mx_call *call);

void mx_fill_call(const struct mx_rank *me, const struct mx_call *call, uint64_t salt, void *out);
void mx_fill_message(const struct mx_message *message, uint64_t salt, void *out);

/* Compares what has arrived, in the order of the plan; ends the test where it differs. */
void mx_check(struct mx_rank *me, const struct mx_take *take);

/* What a rank's inputs of a call or message are told from others by. */
uint64_t mx_salt(const struct mx_plan *plan, const struct mx_take *take);

/* --- mixed_watch.c: who waits for what --- */

void mx_watch_begin(struct mx_rank *me, int limit_s);
void mx_watch_end(struct mx_rank *me);

/* The rank has come further: it does this now. */
__attribute__((format(printf, 2, 3))) void mx_now(struct mx_rank *me, const char *fmt, ...);

/* In words, into a buffer of MX_TEXT bytes. */
#define MX_TEXT 160
const char *mx_describe(const struct mx_rank *me, const struct mx_take *take, char *text);

/* --- mixed_load.c: work that fills the GPU beside (real GPUs only: NULL on the rig) --- */

struct mx_load *mx_load_begin(const struct mx_rank *me, const char *path, int device);
void mx_load_add(struct mx_rank *me, cudaStream_t stream); /* on the load's own stream if NULL */
void mx_load_check(struct mx_rank *me);
void mx_load_end(struct mx_rank *me);

#endif
