/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_INTERPOSE_OP_H
#define LC_INTERPOSE_OP_H

#include "kernels/loongkernels.h"

#include <nccl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct lc_comm;

/* Also the order of the report. */
enum lc_op_kind {
    LC_OP_ALL_REDUCE,
    LC_OP_REDUCE_SCATTER,
    LC_OP_ALL_GATHER,
    LC_OP_ALL_TO_ALL,
    LC_OP_BROADCAST, /* ncclBcast too */
    LC_OP_REDUCE,
    LC_OP_GATHER,
    LC_OP_SCATTER,
    LC_OP_SEND,
    LC_OP_RECV,
    LC_OP_KINDS,
};

/* One call as the program made it: plain data, lives on the stack of the hook. */
struct lc_op {
    enum lc_op_kind kind;
    const void *send; /* NULL for a receive */
    void *recv;       /* NULL for a send */
    size_t count;     /* elements, as the call's argument says */
    ncclDataType_t type;
    ncclRedOp_t redop; /* reductions only */
    int peer;          /* root of a rooted collective, other rank of send and receive, else -1 */
    ncclComm_t handle;
    cudaStream_t stream;
    struct lc_comm *comm; /* pinned while the call runs; NULL: handle unknown, nothing is counted */

    /* What has become of it (route.h). */
    bool counted;        /* by the communicator's agreement */
    bool settled;        /* nothing is left for NCCL to do now; the call returns `result` */
    ncclResult_t result; /* of a settled one */
    int outcome;         /* enum lc_outcome, for the ledger */
    uint32_t generation; /* of the rings that a collective goes through; equal at all ranks */
    bool gathered;       /* runs, is counted and unpinned at the end of the group */
};

/* "all-reduce", as the text report shows it. */
const char *lc_op_name(enum lc_op_kind kind);

/* "AllReduce", as JSON and NCCL call it. */
const char *lc_op_nccl_name(enum lc_op_kind kind);

/* "float32"; "type N" is for the caller to print where this is NULL. */
const char *lc_type_name(unsigned type);

/* The same for the kernels library, of a type that it has. */
enum lk_type lc_lk_type(ncclDataType_t type);

/* Bytes of one element; 0 for a type that we do not know. */
size_t lc_type_size(ncclDataType_t type);

/* Bytes asked: the send buffer as NCCL's call defines it, own part of an all-to-all included; the receive
 * buffer of a receive. Counted alike at every rank, also where a rooted collective reads no send buffer:
 *   count           all-reduce, broadcast, reduce, all-gather, gather, send, receive
 *   count * ranks   reduce-scatter, all-to-all, scatter */
uint64_t lc_op_bytes(const struct lc_op *op, int ranks);

#endif
