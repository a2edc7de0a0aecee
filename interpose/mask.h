/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of the next all-to-all's send buffer that need not travel, as the program says (loongcommSetMask). Local to the
 * sender: slots of the rings say themselves what is in them.
 */
#ifndef LC_INTERPOSE_MASK_H
#define LC_INTERPOSE_MASK_H

#include "interpose/backend.h"

#include <stddef.h>
#include <stdint.h>

struct lc_comm;

/* Used by the thread that calls the communicator's operations. */
struct lc_mask {
    const uint32_t *bits; /* of the device; NULL: there is none */
    uint64_t rows, row_bytes;
    unsigned long long capture; /* in which it was set, 0: none */
};

/* The bytes that an all-to-all sends, own part included. */
struct lc_extent {
    uintptr_t begin, end; /* equal: nothing */
};

/* Takes the mask from the communicator, for an all-to-all that goes through rings on a stream of this capture: waits on
 * the stream for the mask and writes it, or rows 0 if there is none that fits. 0 or a cudaError_t. */
int lc_mask_take(struct lc_comm *comm, const struct lc_extent *sends, cudaStream_t stream,
                 unsigned long long capture, struct lk_row_mask *out);

/* The next all-to-all has gone through NCCL instead, as it was. */
void lc_mask_miss(struct lc_comm *comm);

#endif
