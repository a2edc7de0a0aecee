/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes from rank to rank through rings in peers' memory: all-to-alls, sends and receives that do without NCCL. What of
 * one group is ours is one launch, and no wait for it is put on a stream before NCCL's part of the group is there, too.
 *
 * Order. Exchanges have units of the rings to themselves (kernels/rings.h): the i-th message from a rank to another one
 * meets the i-th receive there, whatever collectives either end calls in between. They need not be called in one order
 * at both ends: sends that fit into what NCCL buffers end before the receive is called, and some programs live by that.
 * Of the messages themselves the order is the same at both ends, as NCCL demands: all-to-alls count among them in call
 * order, since NCCL makes them of sends and receives. Messages have no number that is passed along, so zero bytes take
 * none.
 *
 * Ends. Each exchange of a communicator waits for what of ours was called before it and for nothing else, so it waits for
 * less than NCCL's kernel of the same call would, which waits for NCCL's own as well. A program that ends with NCCL where
 * a send ends once its receive has begun, ends here. What is not ours runs beside: within a group that is what a fork is
 * for, outside of one the program's stream.
 */
#ifndef LC_INTERPOSE_MESSAGES_H
#define LC_INTERPOSE_MESSAGES_H

#include "interpose/backend.h"
#include "interpose/op.h"
#include "interpose/reduce.h"

/* What one launch exchanges. Freed by lc_messages_free. */
struct lc_messages {
    struct lk_message *sends, *recvs;
    size_t n_sends, n_recvs, room_sends, room_recvs;
};

/* Adds what an operation sends and receives. False: out of memory. */
bool lc_messages_add(struct lc_messages *list, const struct lc_op *op);

/* As many bytes from this rank to itself as it takes from itself, message by message; else the group is none. */
bool lc_messages_are_whole(const struct lc_messages *list, int rank);
void lc_messages_free(struct lc_messages *list);

/* On the span's stream, behind earlier exchanges of the communicator. mask may be NULL. 0 or a result of the kernels
 * library. */
int lc_messages_launch(const struct lc_comm *comm, const struct lc_messages *list,
                       const struct lk_row_mask *mask, const struct lc_span *span);

/* One all-to-all, send or receive outside of a group. */
ncclResult_t lc_messages_now(const struct lc_op *op);

/* A stream of ours beside those of the program, for what is ours of a group. A graph that is being captured has it to
 * itself until the capture ends. */
struct lc_side {
    cudaStream_t stream;
    cudaEvent_t fork, done; /* within one group */
    unsigned long long capture;
};
#define LC_SIDES (1 + LC_CAPTURES) /* the first is for what is not captured */

/* Used by the thread that calls the communicator's operations; freed with the last reference. */
struct lc_sides {
    const struct lc_backend *backend;
    cudaEvent_t masked; /* behind what the mask for the next all-to-all waits for */
    bool blocking;      /* a launch returns when it has ended, so that nothing can run beside it */
    struct lc_side side[LC_SIDES];
};

/* Set-up, with the communicator's device current: streams of the priority that `like` has. NULL: not possible here. */
struct lc_sides *lc_sides_new(const struct lc_backend *backend, cudaStream_t like);

/* At any time, without waiting: what is still to run on them does. NULL is allowed. */
void lc_sides_free(struct lc_sides *sides);

/* For a group of this capture, 0 for none. NULL: as many captures as there are streams are under way. */
struct lc_side *lc_sides_take(struct lc_sides *sides, unsigned long long capture);

#endif
