/* SPDX-License-Identifier: Apache-2.0
 *
 * When a new communicator enters the table. NCCL writes the handle of an Init at the call, even if the
 * communicator is not usable yet (in a group, or not blocking). The handle of a Split or Shrink is NULL until
 * the communicator is complete: after the call, after the end of the group, or some time later from a thread
 * of NCCL's. In the last case the first use adopts it. */
#ifndef LC_INTERPOSE_CREATE_H
#define LC_INTERPOSE_CREATE_H

#include "interpose/comm.h"
#include "interpose/process.h"

/* After an Init that NCCL accepted. */
void lc_create_init(const ncclComm_t *newcomm, int ranks, int rank, int device,
                    const ncclConfig_t *config, struct lc_agree *agree);

/* The agreement of a communicator that is made from this id. NULL: it has no ticket, or this kind of communicator stays
 * with NCCL (not blocking, or with a policy of no kernels). */
struct lc_agree *lc_create_agree(const ncclUniqueId *id, int ranks, int rank, int device,
                                 const ncclConfig_t *config);

/* Of a kernel of NCCL's, at most, by NCCL_MAX_CTAS and the variables that ask for more channels; 0: it is not set, or one of
 * them not to a number, or such a kernel may need more than so many multiprocessors (clusters). */
uint32_t lc_create_nccl_ctas(void);

struct lc_excluded {
    const int *ranks;
    int count;
};

/* Before and after a Split (excluded: NULL) or Shrink: the config and the parent may be gone after the call. */
struct lc_pending lc_create_prepare_child(ncclComm_t parent, ncclComm_t *newcomm,
                                          const ncclConfig_t *config, int colour,
                                          const struct lc_excluded *excluded);
void lc_create_child(struct lc_pending *child, ncclResult_t result, const struct lc_real *real);

/* The outermost group has ended with `result`, or was only simulated. */
void lc_create_pending(ncclResult_t result, bool simulated, const struct lc_real *real);

#endif
