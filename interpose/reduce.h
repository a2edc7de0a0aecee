/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions with bf16 on NCCL's wire, and the device memory that they pass through.
 *
 * One scratch buffer per communicator, made before the vote, never moved or grown after it; what does not fit goes
 * through it in pieces whose sizes follow from counts and settings alone. All uses of one scratch happen in call order,
 * whatever their streams and graphs: each ends by recording an event that the next one waits for. Between graphs, and
 * between graphs and streams, that is an external record and wait, whose order is the launches' (as NCCL orders its own
 * kernels); inside one graph it is an edge.
 */
#ifndef LC_INTERPOSE_REDUCE_H
#define LC_INTERPOSE_REDUCE_H

#include "interpose/backend.h"
#include "interpose/op.h"
#include "interpose/policy.h"
#include "interpose/real.h"
#include "interpose/sizing.h"

#define LC_CAPTURES 16

/* Used by the thread that calls the communicator's operations; freed after NCCL has ended the communicator, by any. */
struct lc_reducer {
    const struct lc_backend *backend;
    int device;
    char *scratch;
    size_t bytes;
    cudaEvent_t serial; /* behind the last use of the scratch */
    cudaEvent_t join;   /* between streams of one group */

    /* Uses inside one graph are ordered by edges of that graph: an event that a node of it records tells its other
     * nodes nothing. Captures go on side by side; the one that was used longest ago is pushed out by one too many, and
     * starts afresh. */
    struct lc_captured {
        unsigned long long id; /* of the capture, 0: none */
        cudaEvent_t event;     /* behind its last use */
        cudaGraphNode_t
            mark;      /* that records `serial` behind it, beside what follows; NULL: none does */
        uint64_t last; /* its last use was that one of all captured ones */
    } captured[LC_CAPTURES];
    uint64_t captured_uses; /* so far; 0: none, or graphs of them are not replayed any more */
    bool open;              /* begun and not marked by an event yet */

    struct lc_feedback *feedback; /* NULL: there is none */
    bool stochastic;              /* so it is rounded (rounding.h) */
    uint64_t seed;
    uint64_t *drawn;          /* numbers so far, of the device's; NULL: none ever were */
    struct lc_verify *verify; /* NULL: nothing is verified */
    struct lc_peers *peers;   /* rings, in the making or made; NULL: none were tried */
    struct lc_sizing sizing;  /* of them */

    struct lc_reducer *next; /* of those that have been freed while something used them */
};

/* Set-up on the calling thread, never under capture. NULL: not possible here, said once. */
struct lc_reducer *lc_reducer_new(int device, cudaStream_t stream, size_t bytes);

/* Work of ours is on a stream and not finished. Any thread, under any capture, at any time until lc_reducer_free. */
bool lc_reducer_busy(const struct lc_reducer *reducer);

/* NCCL has destroyed the communicator in order: waits for work of ours that its own does not show, for a minute at most, and
 * counts what it did. Graphs of it are not replayed any more. NULL is allowed, as below. */
void lc_reducer_settle(struct lc_reducer *reducer);

/* After NCCL has ended the communicator's work. Any thread, never waits: what the device may still use is kept until it does
 * not, and longer if graphs have used it and the communicator has not been settled. */
void lc_reducer_free(struct lc_reducer *reducer);

/* Of what has been freed so: what nothing uses any more is given to later communicators, without waiting. */
void lc_reducer_free_ended(void);

/* All of it, and the memory of the pool. Waits for the devices, so no communicator may be under way. */
void lc_reducer_free_all(void);

/* A stretch of our work on a stream: the communicator's device is current and our calls are legal under any capture.
 * wait puts earlier uses of the scratch in front of it, record marks its end for later ones. Those two return 0 or a
 * cudaError_t. */
struct lc_span {
    struct lc_reducer *reducer;
    cudaStream_t stream;
    unsigned long long capture; /* 0: none */
    struct lc_guard guard;
};
int lc_span_begin(struct lc_reducer *reducer, cudaStream_t stream, struct lc_span *span);
int lc_span_wait(struct lc_span *span);
int lc_span_record(struct lc_span *span);
void lc_span_end(struct lc_span *span);

/* The capture that a stream is part of, 0 for none. 0 or a cudaError_t. */
int lc_capture_id(const struct lc_backend *backend, cudaStream_t stream, unsigned long long *id);

/* All-to-all of `shard` bf16 elements with each rank. */
ncclResult_t lc_exchange(const struct lc_real *real, const char *from, char *to, uint64_t shard,
                         const struct lc_comm *comm, cudaStream_t stream);

/* The factor that packing applies. */
struct lk_scale lc_scale_of(const struct lc_redop *redop, int ranks);

/* One all-reduce or reduce-scatter outside of a group, choice LC_PATH_CAST. */
ncclResult_t lc_reduce_cast(const struct lc_op *op, const struct lc_redop *redop,
                            const struct lc_real *real);

#endif
