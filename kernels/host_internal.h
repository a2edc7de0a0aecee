/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the sources of the host library: how a piece of work gets onto a stream and what it declares.
 */
#ifndef LK_HOST_INTERNAL_H
#define LK_HOST_INTERNAL_H

#include "kernels/list_internal.h"

#include <stdbool.h>

/* Tells the owner of the streams what a running piece is about to access. */
void lk_host_use(uint64_t address, uint64_t bytes, bool write);

/* The factor of one execution: a scalar at `pointer`, else `value`. */
float lk_host_scale(float value, uint32_t type, const void *pointer);

/* Random bits of consecutive elements, from a piece's first one on. */
struct lk_host_draws {
    uint64_t seed;
    uint64_t next;
    uint32_t block[4];
};
void lk_host_draws_begin(struct lk_host_draws *out, const struct lk_draws *from);
uint32_t lk_host_draw(struct lk_host_draws *draws);

/* Hands arg to the enqueue function, or runs it now. Takes over arg in every case. */
int lk_host_enqueue(void *stream, const char *name, void (*run)(void *arg),
                    void (*release)(void *arg), void *arg);

/* Runs now, or hands a copy of the work to the enqueue function. */
int lk_host_submit(void *stream, const char *name, void (*run)(void *arg), void *arg, size_t bytes);

#endif
