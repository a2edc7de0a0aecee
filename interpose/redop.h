/* SPDX-License-Identifier: Apache-2.0
 *
 * What a reduction operation's handle means. Handles of ncclRedOpCreatePreMulSum are remembered per communicator from
 * their creation to their destruction (PyTorch destroys them right behind the call that uses them).
 */
#ifndef LC_INTERPOSE_REDOP_H
#define LC_INTERPOSE_REDOP_H

#include <nccl.h>
#include <stdatomic.h>
#include <stdbool.h>

enum lc_redop_kind {
    LC_REDOP_OTHER, /* product, maximum, minimum, or a handle that is not remembered */
    LC_REDOP_SUM,
    LC_REDOP_AVG,
    LC_REDOP_PREMUL,
};

struct lc_redop {
    enum lc_redop_kind kind;
    ncclDataType_t type;      /* of the factor, PREMUL only */
    float value;              /* factor in fp32, unless it is on the device */
    const void *device_value; /* read in stream order */
};

/* Changed and read by the threads that call the communicator's functions, one at a time, as NCCL demands. Grows with
 * the handles in use, as NCCL's own table does: a limit could be met at one rank and not at another. */
struct lc_redops {
    struct lc_redop_slot *slot;
    int room;
};

/* 0, also for what is of no use to us; -ENOMEM: this rank knows less than the others. */
int lc_redop_remember(struct lc_redops *ops, ncclRedOp_t handle, const void *scalar,
                      ncclDataType_t type, ncclScalarResidence_t residence);
void lc_redops_free(struct lc_redops *ops);
void lc_redop_forget(struct lc_redops *ops, ncclRedOp_t handle);
struct lc_redop lc_redop_find(const struct lc_redops *ops, ncclRedOp_t handle);

#endif
