/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that play calls on rings with each other, as threads of this process or as processes.
 */
#ifndef LC_TESTS_KERNELS_RINGS_WORLD_H
#define LC_TESTS_KERNELS_RINGS_WORLD_H

#include "tests/kernels/rings_reference.h"

struct ring_world {
    struct lk_ring_shape shape;
    void *segments[LK_RANKS_MAX];
    int fds[LK_RANKS_MAX];
    void *states[LK_RANKS_MAX];
    uint32_t abort; /* one word for all ranks */
    uint32_t too_few[LK_RANKS_MAX];
};

/* Bytes of lines that most worlds have. */
#define LINES ((uint32_t)64 << 10)

struct ring_rank {
    struct ring_world *world;
    struct lk_rings rings;
    uint32_t rank;
};

/* Of the worlds that are made from now on. */
extern uint32_t ring_short_bytes;

void ring_world_init(struct ring_world *world, uint32_t ranks, uint32_t channels, uint32_t slots,
                     uint32_t line_bytes);
void ring_world_fini(struct ring_world *world);

/* A rank as the world's own mappings show it. */
void ring_rank_init(struct ring_rank *me, struct ring_world *world, uint32_t rank);

/* Runs body once for each rank, waits for all of them. */
void ring_threads(struct ring_world *world, void (*body)(struct ring_rank *me, void *arg),
                  void *arg);
void ring_processes(struct ring_world *world, void (*body)(struct ring_rank *me, void *arg),
                    void *arg);

/* Makes the call and checks every byte of the outputs and around them; inputs, too, where the call leaves them. */
void ring_play(struct ring_rank *me, const struct ring_call *call);

/* The call itself. */
int ring_issue(struct ring_rank *me, const struct ring_call *call, const struct lk_buffers *list,
               void *stream);

/* Makes `words` messages of every unit and `lines` one-shot calls the past, as if they had been. */
void ring_pretend(struct ring_world *world, uint64_t messages, uint64_t lines);

#endif
