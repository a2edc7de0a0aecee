/* SPDX-License-Identifier: Apache-2.0
 *
 * The host NCCL's inner parts. Ranks meet in a shared memory file named by the unique id (a clique); bytes move
 * through one bounded ring per directed pair; who waits sleeps on its own futex word (its bell), which peers ring.
 * A group of calls on one communicator is a plan: one piece of work on one stream, which does all of it.
 */
#ifndef LCRIG_NCCL_INTERNAL_H
#define LCRIG_NCCL_INTERNAL_H

#include "common/deadline.h"
#include "tests/rig/rig.h"

/* Hidden visibility is the rule; what the vendor's header declares is exported. */
#pragma GCC visibility push(default)
#include <nccl.h>
/* The header declares these without a prototype. */
ncclResult_t pncclGroupStart(void);
ncclResult_t pncclGroupEnd(void);
void pncclResetDebugInit(void);
#pragma GCC visibility pop
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define RIG_RANKS_MAX 64
#define RIG_ID_USED \
    40 /* bytes of an ncclUniqueId that mean something; NCCL too uses fewer than 48 */
#define RIG_CHECKS \
    256 /* collectives that a rank may run ahead and still be compared with its peers */
#define RIG_BLOCK_BYTES 8192 /* a reduction works on this much at a time */
#define RIG_SMALL_BYTES 4096 /* up to here an all-reduce is one exchange and everybody adds */

/* ---- nccl_types.c ---- */

size_t rig_type_size(ncclDataType_t type); /* 0: no such type */
const char *rig_type_name(int type);
bool rig_type_is_float(ncclDataType_t type);
float rig_f16_decode(uint16_t bits);
uint16_t rig_f16_encode(float value);
float rig_bf16_decode(uint16_t bits);
uint16_t rig_bf16_encode(float value);
float rig_e4m3_decode(uint8_t bits);
uint8_t rig_e4m3_encode(float value);
float rig_e5m2_decode(uint8_t bits);
uint8_t rig_e5m2_encode(float value);

/* ---- nccl_reduce.c: each function rounds once per element, to the data type ---- */

/* What a call's ncclRedOp_t stands for. */
enum rig_redop_kind {
    RIG_SUM,
    RIG_PROD,
    RIG_MAX,
    RIG_MIN,
    RIG_AVG,
    RIG_PREMUL
};

struct rig_redop {
    enum rig_redop_kind kind;
    const void *device_scalar; /* RIG_PREMUL: read when the operation runs; NULL: use scalar */
    uint64_t scalar;           /* bits of one element in the low bytes */
};

void rig_accumulate(ncclDataType_t type, enum rig_redop_kind kind, void *acc, const void *in,
                    size_t count);
void rig_scale(ncclDataType_t type, void *data, size_t count, uint64_t scalar);
void rig_divide_ints(ncclDataType_t type, void *data, size_t count, int by);
/* 1/n in the data type. */
uint64_t rig_reciprocal(ncclDataType_t type, int n);

/* ---- nccl_shm.c ---- */

struct rig_id {
    uint64_t magic;
    /* NCCL's bootstrap address stands here: a struct sockaddr_in of the loopback interface, but for its padding. */
    uint16_t family;
    uint16_t port;
    uint8_t address[4];
    int32_t pid; /* of the creator: lets a later process sweep away what a killed one left */
    int32_t zero;
    uint64_t key[2];
};
_Static_assert(sizeof(struct rig_id) == RIG_ID_USED, "the rest of the id belongs to others");

/* What a rank tells its peers about a creation (split): see clique_exchange. */
struct rig_post {
    int32_t color;
    int32_t key;
    struct rig_id id;
};

/* One collective as a rank sees it. Written by its rank only; seq is stored last (0 while the rest changes), all
 * sequentially consistent: whoever of two ranks comes second sees what the first one wrote. */
struct rig_check {
    _Atomic uint64_t seq; /* sequence number + 1 */
    _Atomic uint64_t what;
    _Atomic uint64_t count;
};

/* A rank's part of the shared memory. */
struct rig_slot {
    _Alignas(64) _Atomic int32_t pid; /* claimed by compare-and-swap from 0 */
    _Atomic uint32_t bell; /* futex: incremented by peers (release), read by the owner (acquire) */
    _Atomic uint32_t
        sleeping; /* owner: set around its futex wait, so that peers can save the system call */
    _Atomic uint32_t
        departed;            /* owner: destroyed its communicator (release, after its last byte) */
    _Atomic uint32_t posts;  /* owner: number of exchanges posted (release, after post[]) */
    int32_t device;          /* owner: before it counts itself in `attached`; read after that */
    uint64_t host;           /* likewise; hash of NCCL_HOSTID or of the machine's name */
    struct rig_post post[2]; /* owner: post[posts % 2]; nobody is two exchanges ahead of anybody */
    struct rig_check checks[RIG_CHECKS];
};

/* Its size is a multiple of its alignment, so the rings behind it are aligned, too. */
struct rig_shared {
    _Alignas(64) _Atomic uint32_t nranks; /* compare-and-swap from 0 by whoever comes first */
    _Atomic uint32_t attached; /* release increment by each rank when its slot is filled */
    _Atomic uint32_t control; /* futex: incremented when attached, posts, broken or failed change */
    _Atomic uint32_t failed;  /* set-up was given up by a rank */
    _Atomic uint32_t broken;  /* 1 + rank that aborted or died; compare-and-swap from 0 */
    _Atomic uint32_t revoked; /* 1: stop operations, but exchanges go on */
    struct rig_slot slot[RIG_RANKS_MAX];
};

_Static_assert(sizeof(struct rig_shared) % 64 == 0, "rings follow it");

/* One directed pair. Positions only grow; they and the data follow the usual rule: the writer of data stores head
 * with release, the reader loads it with acquire; tail likewise the other way round. */
struct rig_ring {
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint64_t tail;
    _Alignas(64) char data[];
};

/* A process's mapping, shared by its ranks (threads), so that a race checker sees them use the same addresses. */
struct rig_clique {
    struct rig_clique
        *next; /* the process's list; list and refs guarded by the lock in nccl_shm.c */
    unsigned refs;
    struct rig_id id;
    struct rig_shared *shared;
    size_t bytes;
    size_t ring_bytes;
    int n;
};

struct rig_id rig_id_new(void);
/* Collective over the ranks of id. Returns when all are there, or *abort is set, a rank died or the time is up. */
ncclResult_t rig_clique_join(const struct rig_id *id, int rank, int n, int device,
                             const _Atomic bool *abort, struct rig_clique **out);
void rig_clique_leave(struct rig_clique *clique, int rank);
struct rig_ring *rig_clique_ring(const struct rig_clique *clique, int from, int to);
/* Wakes a rank's executor if it sleeps. */
void rig_bell_ring(struct rig_clique *clique, int rank);
/* Sleeps until the own bell differs from seen, at most ms. */
void rig_bell_wait(struct rig_clique *clique, int rank, uint32_t seen, int ms);
/* Marks the clique broken by rank `by` and wakes everybody. */
void rig_clique_break(struct rig_clique *clique, int by);
void rig_clique_revoke(struct rig_clique *clique);
bool rig_rank_is_dead(const struct rig_clique *clique, int rank);
/* All ranks post and all read what the others posted. turn: 1, 2, ... per communicator. */
ncclResult_t rig_clique_exchange(struct rig_clique *clique, int rank, uint32_t turn,
                                 const struct rig_post *mine, const _Atomic bool *abort,
                                 struct rig_post *all);
int rig_timeout_ms(void);

/* ---- operations ---- */

enum rig_kind {
    RIG_ALL_REDUCE = 1,
    RIG_REDUCE,
    RIG_REDUCE_SCATTER,
    RIG_ALL_GATHER,
    RIG_BROADCAST,
    RIG_ALL_TO_ALL,
    RIG_GATHER,
    RIG_SCATTER,
    RIG_SEND,
    RIG_RECV,
};

struct rig_op {
    enum rig_kind kind;
    const char *send;
    char *recv;
    size_t count;
    ncclDataType_t type;
    struct rig_redop redop;
    int root; /* or peer */
    ncclComm_t comm;
    cudaStream_t stream;
    uint32_t choice; /* the tuner's, of 11 bits; 0: it has none; set at launch */
};

static inline bool rig_op_is_p2p(const struct rig_op *op)
{
    return op->kind == RIG_SEND || op->kind == RIG_RECV;
}

const char *rig_kind_name(int kind);

/* First bytes of every message in a ring. */
struct rig_header {
    uint32_t magic;
    uint32_t kind; /* RIG_SEND for point-to-point */
    uint64_t seq;
    uint64_t count; /* point-to-point: bytes */
    uint32_t type;
    uint32_t redop;
    int32_t root;
    uint32_t zero;
    uint64_t scalar; /* the sender's factor for its input, not compared */
};

/* ---- nccl_lane.c: queues of segments between this rank and its peers; used by the executor only ---- */

struct rig_segment {
    char *ptr;
    size_t bytes;
    bool has_header;
    struct rig_header header; /* out: to send; in: what must come */
};

struct rig_queue {
    struct rig_segment *list;
    size_t count, room;
    size_t at;   /* first unfinished */
    size_t done; /* bytes of it that are through, header included */
};

struct rig_lane {
    struct rig_ring *tx, *rx;
    struct rig_queue out, in;
    struct rig_header got; /* last header that came */
};

enum {
    RIG_DRAIN_ALL = -1,
    RIG_DRAIN_IN = -2
};

void rig_lane_post_out(ncclComm_t comm, int peer, const void *ptr, size_t bytes,
                       const struct rig_header *header);
void rig_lane_post_in(ncclComm_t comm, int peer, void *ptr, size_t bytes,
                      const struct rig_header *header);
/* Moves bytes until a peer's incoming queue (or what the constants say) is empty. False: the communicator is broken;
 * the queues are cleared and the error is noted. */
bool rig_lane_drain(ncclComm_t comm, int what);
void rig_lanes_clear(ncclComm_t comm, bool release);

/* ---- nccl_exec.c ---- */

/* Operations of one communicator in one group. Immutable once launched. */
struct rig_plan {
    ncclComm_t comm; /* counted in comm->plans */
    bool in_graph;
    size_t count;
    struct rig_op *ops;
};

void rig_plan_run(void *plan);
void rig_plan_release(void *plan);

/* ---- nccl_launch.c ---- */

/* Puts the operations of a group on their streams. */
ncclResult_t rig_launch(const struct rig_op *ops, size_t count);

/* ---- communicators: nccl_comm.c, nccl_create.c, nccl_end.c ---- */

enum rig_state {
    RIG_INIT, /* set-up running */
    RIG_READY,
    RIG_FAILED, /* set-up failed */
    RIG_FINALIZED,
    RIG_REVOKED,
};

struct rig_user_op {
    bool used;
    ncclDataType_t type;
    struct rig_redop op;
};

struct ncclComm {
    /* Constant once created. */
    int rank, n, device;
    int blocking;
    unsigned salt; /* distinguishes this communicator's reduction operators from others' */
    char *name;
    pid_t pid;

    struct ncclComm *next; /* list of live handles; guarded by the lock in nccl_comm.c */

    _Atomic bool abort; /* set once by CommAbort; read by whoever waits */
    _Atomic bool stop;  /* operations end at once (abort, revoke, shrink with abort); set once */
    _Atomic bool
        broken; /* an operation ended with an error; set by the executor, read by it and callers */
    _Atomic int
        async_error; /* first asynchronous ncclResult_t, compare-and-swap from ncclSuccess */

    pthread_mutex_t
        lock; /* guards what follows, up to the next rule; `changed` tells of every change */
    pthread_cond_t changed;
    enum rig_state state;
    unsigned refs;      /* the handle, plans, jobs */
    unsigned plans;     /* alive: in a stream or in a graph */
    unsigned in_graphs; /* those of them in graphs */
    unsigned running;   /* plans being executed */
    unsigned jobs;      /* creations and finalizations started and not finished, as parent too */
    unsigned
        background; /* those of them without a waiting caller: GetAsyncError says in progress */
    struct rig_user_op *user_ops;
    size_t user_ops_count, user_ops_room;
    struct rig_clique *clique; /* written once, before state leaves RIG_INIT; then constant */

    /* The launching thread (NCCL too forbids two at once on one communicator), under launch_lock all the same. */
    pthread_mutex_t launch_lock;
    cudaEvent_t order;    /* behind the latest plan, eager or (as external record) in a graph */
    cudaEvent_t join;     /* where another stream of a group stood */
    cudaEvent_t captured; /* behind the latest plan of a capture */
    cudaStream_t last_stream;
    bool was_launched, was_captured;
    unsigned long long last_capture;

    /* Written before state leaves RIG_INIT. */
    void *tuner;
    bool is_tuned;
    unsigned tuned_calls;  /* that the tuner has decided; the launching thread's */
    _Atomic unsigned used; /* algorithms, a bit each; by the streams' threads, relaxed */

    /* Creations on this communicator; one at a time as with NCCL. */
    uint32_t turns;
    uint64_t shrink_keys[16]; /* one per shrink so far, to name repeated ones apart */
    unsigned shrinks;

    /* The executor: whoever holds exec_lock. */
    pthread_mutex_t exec_lock;
    uint64_t seq;
    struct rig_lane *lanes; /* [n] */
    char *block_in, *block_acc;
    char *small; /* [n][RIG_SMALL_BYTES] */
};

/* ncclInvalidArgument for NULL; a handle that is no live communicator fails the test. */
ncclResult_t rig_comm_check(ncclComm_t comm, const char *call);
/* The same, and it must be ready for operations. */
ncclResult_t rig_comm_ready(ncclComm_t comm, const char *call);
ncclComm_t rig_comm_new(int rank, int n, int device, const ncclConfig_t *config, ncclComm_t parent);
void rig_comm_list(ncclComm_t comm);
/* False: somebody else has taken the handle off the list. */
bool rig_comm_unlist(ncclComm_t comm);
void rig_comm_ref(ncclComm_t comm);
void rig_comm_unref(ncclComm_t comm);
void rig_comm_set_error(ncclComm_t comm, ncclResult_t error);
void rig_comm_set_state(ncclComm_t comm, enum rig_state state);
ncclResult_t rig_comm_connect(ncclComm_t comm, const struct rig_id *id);

/* ---- nccl_tuner.c: by the thread that makes, ends or launches ---- */
void rig_tuner_open(ncclComm_t comm);
void rig_tuner_close(ncclComm_t comm);
uint32_t rig_tuner_choice(const struct rig_op *op);
void rig_tuner_take_time(ncclComm_t comm, uint32_t choice); /* by the thread of the stream */

/* Waits until no plan is left in a stream (with_graphs: nor in a graph); fails the test when the time is up. */
void rig_comm_wait_plans(ncclComm_t comm, bool with_graphs, const char *call);
void rig_comm_wait_running(ncclComm_t comm);
uint64_t rig_host_hash(void);

/* A creation or an end. Run by the caller, by GroupEnd's threads, or in the background. */
struct rig_job {
    struct rig_job *next;
    ncclResult_t (*run)(struct rig_job *job);
    bool creates, ends;
    ncclComm_t comm;   /* being created or ended; NULL for a split without colour */
    ncclComm_t parent; /* split, shrink: jobs with one parent run in order */
    ncclComm_t *out;   /* where the handle was written, NULL if nowhere */
    struct rig_id id;
    int color, key;
    bool nonblocking;
    bool is_counted; /* in the communicators' jobs */
    ncclResult_t result;
};

/* Takes over the job (from malloc), which holds a reference of comm and parent. Outside a group it runs (or is sent
 * to the background) now. */
ncclResult_t rig_job_submit(struct rig_job *job);
ncclResult_t rig_jobs_run(struct rig_job *jobs);
/* Frees jobs of a group that failed, and the communicators that they were to create. */
void rig_jobs_cancel(struct rig_job *jobs);

/* ---- nccl_group.c ---- */

ncclResult_t rig_group_start(void);
ncclResult_t rig_group_end(void);
/* Notes a failed call, so that the group's end returns it; passes the result on. */
ncclResult_t rig_group_note(ncclResult_t result);
bool rig_group_is_open(void);
ncclResult_t rig_group_add_op(const struct rig_op *op);
void rig_group_add_job(struct rig_job *job);

/* ---- nccl_redop.c ---- */

ncclResult_t rig_redop_resolve(ncclComm_t comm, ncclRedOp_t op, ncclDataType_t type,
                               struct rig_redop *out);

/* ---- nccl_misc.c ---- */

/* Remembers and returns: the text is what ncclGetLastError gives. */
__attribute__((format(printf, 2, 3))) ncclResult_t rig_error(ncclResult_t result, const char *fmt,
                                                             ...);
void *rig_alloc(size_t bytes);
/* Doubles *list when count has reached *room. */
void *rig_grow(void *list, size_t count, size_t *room, size_t item);

/* Every public function is pnccl* and has a weak alias nccl*, as in NCCL. */
#define RIG_EXPORT(name) \
    __typeof__(pnccl##name) nccl##name __attribute__((weak, alias("pnccl" #name)));

#endif
