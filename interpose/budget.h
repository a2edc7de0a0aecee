/* SPDX-License-Identifier: Apache-2.0
 *
 * How much of a GPU the grids of each communicator may take. Grids of all communicators of a process, and of all ranks that
 * share the GPU, have to be resident together, since each may wait for one of another rank that started them in another
 * order. Each communicator gets the same part. A captured graph keeps the grids that it was captured with, however many
 * communicators are added later: what those hold beyond an equal part is taken from what the others share. */
#ifndef LC_INTERPOSE_BUDGET_H
#define LC_INTERPOSE_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

/* Grids of a communicator that may run beside each other. */
enum lc_grid {
    LC_GRID_SUMS,
    LC_GRID_EXCHANGES,
    LC_GRIDS,
};

/* A communicator's, zeroed at first. */
struct lc_share {
    /* CTAs of the largest captured grids, of all ranks that share the GPU. Written under budget.c's lock by the thread that
     * calls the communicator's operations, which alone reads them without it. */
    uint32_t kept[LC_GRIDS];
    struct lc_share *next; /* of the device; under that lock */
    uint32_t device;
    bool joined; /* used by the thread that sets rings up, then by who frees them */
};

/* Among the communicators of a device, once. Leaving gives back what it keeps. Any thread, as all below. */
void lc_budget_join(struct lc_share *share, int device);
void lc_budget_leave(struct lc_share *share);

/* Communicators of the device. */
uint32_t lc_budget_members(const struct lc_share *share);

/* CTAs for all grids of a member that may run at a time, if the device has room for `room`; at least what it keeps. 0:
 * others' graphs leave none. */
uint32_t lc_budget_part(const struct lc_share *share, uint32_t room);

/* The communicator has ended, though what it has of the device cannot be given back yet: graphs of it run no more. */
void lc_budget_forget(struct lc_share *share);

/* `ctas`, or as many as the member's part has for each of `ranks` ranks and each of the first `kinds` kinds of grids at a
 * time, at least one. It keeps them from then on, in one step with looking what there is: all that members keep is no more
 * than `room`, if they take what they launch from here and have joined while there was one for each. */
uint32_t lc_budget_take(struct lc_share *share, uint32_t ctas, uint32_t ranks, uint32_t kinds,
                        uint32_t room);

/* A grid of so many CTAs has been captured. */
void lc_budget_keep(struct lc_share *share, enum lc_grid grid, uint32_t ctas);

#endif
