/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tuner plugin has to know: from which call on all ranks of a communicator use one profile. The plugin is another
 * library of the same process, and asks while NCCL makes the communicator, on the thread that does so.
 */
#ifndef LC_INTERPOSE_TUNER_H
#define LC_INTERPOSE_TUNER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* One for each communicator that the plugin asked about. */
struct lc_tuned {
    /* First: the plugin has a pointer to it. 1: agreed. Written by the thread that calls the communicator's operations
     * (release), before it calls NCCL for the first operation that it counts for; read by that thread or one that NCCL
     * starts within the call (acquire). */
    _Atomic uint32_t agreed;
    _Atomic uint32_t refs; /* the plugin's and the agreement's */
};

/* Around NCCL's making of one communicator, outside of groups: the plugin may ask in between, on this thread. Other
 * communicators are never agreed on: NCCL makes them on threads of its own. */
void lc_tuner_open(bool own);
void lc_tuner_close(void);

/* In between: what the plugin has got, for the agreement to keep; NULL: it has not asked. */
struct lc_tuned *lc_tuner_take(void);
void lc_tuner_put(struct lc_tuned *tuned); /* NULL is allowed */

#endif
