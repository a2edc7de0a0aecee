/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce: order and groups of reductions. Calls of several communicators, streams, groups and graphs with nothing but
 * stream order between them, each result checked. Says nothing about who carries the calls out: run it plain, it must
 * pass; run it preloaded, with any LOONGCOMM_ALLREDUCE_WIRE, it must pass. Runs on real GPUs and on the rig, with
 * processes or threads as ranks. */
#ifndef LC_GPU_REDUCE_H
#define LC_GPU_REDUCE_H

#include "tests/gpu/job.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RD_MAX_RANKS 8
#define RD_COMMS     2 /* all ranks, and a split of all with the ranks reversed */
#define RD_NEW_COMM  2 /* place for one that a case makes */
#define RD_STREAMS   3 /* two of our own, then a default stream */

enum rd_wire {
    RD_DATA,
    RD_BF16,
    RD_ACCURATE,
};

/* Shared by the ranks, processes or threads. */
struct rd_shared {
    struct job_id id;
    _Atomic int arrived;
    _Atomic uint64_t digest; /* of rank 0's results that all ranks must have alike */
};

struct rd_comm {
    ncclComm_t handle;
    int rank;
    bool reversed; /* its rank r is n - 1 - r of all */
    bool plain;    /* its ranks have not agreed yet */
};

/* Memory that is used up in order and given back at once. */
struct rd_arena {
    char *base;
    size_t size, used;
};

struct rd_rank {
    int rank, n;
    bool threads; /* other ranks are in this process */
    bool rig;
    enum rd_wire wire;
    bool rings;       /* owners of a shard do not round what they add themselves */
    size_t min_bytes; /* smaller reductions keep their type on the wire */
    struct rd_shared *shared;
    struct rd_comm comms[RD_COMMS + 1];
    cudaStream_t streams[RD_STREAMS];
    cudaEvent_t event;
    struct rd_arena device, host;
    float *factor; /* on the device: 0.5 */
    struct rd_take *takes, **last_take;
    uint64_t digest;
    uint64_t salts; /* inputs made so far */
    uint64_t checks;
};

enum rd_kind {
    RD_ALL_REDUCE,
    RD_REDUCE_SCATTER,
    RD_ALL_GATHER,
    RD_BROADCAST,
    RD_ROUND, /* send to the next rank, receive from the one before, as a group */
    RD_KINDS,
};

enum rd_op {
    RD_SUM,
    RD_AVG,
    RD_MAX,
    RD_HALF,    /* pre-multiplied sum, factor 0.5 on the device */
    RD_QUARTER, /* the same, 0.25 from the host */
    RD_OPS,
};

/* A call with buffers of its own. */
struct rd_call {
    enum rd_kind kind;
    enum rd_op op;
    ncclDataType_t type; /* float, half, bfloat16, int32 */
    size_t count;        /* as the call's argument says */
    int comm, root;
    bool in_place;
    char *send, *recv;
};

/* --- reduce_calls.c --- */

void *rd_alloc(struct rd_arena *arena, size_t bytes);

/* Gives the call its buffers. */
void rd_prepare(struct rd_rank *me, struct rd_call *call);

/* Enqueues a new input; returns what tells it from others. */
uint64_t rd_put(struct rd_rank *me, const struct rd_call *call, cudaStream_t stream);

void rd_issue(struct rd_rank *me, const struct rd_call *call, cudaStream_t stream);

/* Enqueues a copy of the result, to be checked against the input by rd_settle. */
void rd_take(struct rd_rank *me, const struct rd_call *call, uint64_t salt, cudaStream_t stream);

/* put, issue and take. */
void rd_once(struct rd_rank *me, const struct rd_call *call, cudaStream_t stream);

/* Waits for everything, checks all that was taken, compares digests with rank 0, gives memory back. */
void rd_settle(struct rd_rank *me);

/* Waits for the other ranks, outside of NCCL. */
void rd_meet(struct rd_rank *me);

/* --- reduce_data.c --- */

size_t rd_type_size(ncclDataType_t type);
size_t rd_send_count(const struct rd_call *call, int n);
size_t rd_recv_count(const struct rd_call *call, int n);

/* Input of a rank of the communicator, counted as in the communicator with all ranks. */
void rd_fill(const struct rd_call *call, int n, int world_rank, uint64_t salt, void *out);

/* Is the result what NCCL gives, or (wire) what the library gives that may put bf16 on the wire? `complain`: if not,
 * abort with one line. */
bool rd_matches(const struct rd_rank *me, const struct rd_call *call, uint64_t salt,
                const void *result, bool wire, bool complain);

/* --- reduce_cases.c, reduce_random.c --- */

void rd_cases(struct rd_rank *me, const char *only);

/* Calls on a communicator until its ranks have agreed. */
void rd_agree(struct rd_rank *me, int comm, cudaStream_t stream);

void rd_random(struct rd_rank *me, uint64_t seed, double seconds);

#endif
