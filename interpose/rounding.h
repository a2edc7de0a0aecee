/* SPDX-License-Identifier: Apache-2.0
 *
 * LOONGCOMM_ROUNDING=stochastic: where the random numbers of a communicator's roundings come from.
 *
 * A rank's generator has a key of its own, from the communicator and the rank: ranks that rounded alike would add up their
 * errors. How many numbers have been drawn stands in device memory and is moved on in stream order behind each use, so that
 * neither two calls nor two replays of a graph draw the same. Only the device reads and writes it after set-up. All of that is a
 * rank's own affair: what is rounded at one rank is rounded there once.
 */
#ifndef LC_INTERPOSE_ROUNDING_H
#define LC_INTERPOSE_ROUNDING_H

#include "interpose/reduce.h"

struct lc_comm;

/* Part of set-up; never under capture. Where there is no memory it is rounded to nearest: said once. */
void lc_rounding_set_up(struct lc_comm *comm, cudaStream_t stream);

/* Of what is rounded next; also *out, the generator, if it is stochastic. */
enum lk_rounding lc_rounding_of(const struct lc_reducer *reducer, struct lk_rng *out);

/* Behind a use that may have drawn so many numbers; nothing where nothing is drawn. 0 or a result of the kernels library. */
int lc_rounding_drawn(const struct lc_reducer *reducer, uint64_t numbers, cudaStream_t stream);

/* No work that uses it is in flight. */
void lc_rounding_free(struct lc_reducer *reducer);

#endif
