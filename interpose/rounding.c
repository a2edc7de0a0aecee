/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/rounding.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/pool.h"
#include "interpose/process.h"

/* splitmix64's last steps: one bit of the input changes half of the output's. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static uint64_t seed_of(const struct lc_comm *comm)
{
    return mix(mix(comm->id) + (uint64_t)comm->facts.rank + 1);
}

static int allocate(struct lc_reducer *reducer, cudaStream_t stream)
{
    const struct lc_backend *backend = reducer->backend;
    int err = lc_pool_take(backend, LC_MEMORY_DEVICE, reducer->device, sizeof(*reducer->drawn),
                           (void **)&reducer->drawn);
    if (!err)
        err = backend->cudaMemsetAsync(reducer->drawn, 0, sizeof(*reducer->drawn), stream);
    return err ? err
               : (int)backend->cudaEventRecord(
                     reducer->serial, stream); /* the first use comes behind it, wherever */
}

void lc_rounding_set_up(struct lc_comm *comm, cudaStream_t stream)
{
    const struct lc_config *config = lc_process_config();
    struct lc_reducer *reducer = comm->reducer;
    const struct lc_backend *backend = reducer->backend;
    struct lc_guard guard;
    int err;

    reducer->stochastic = false;
    if (config->rounding == LC_ROUNDING_NEAREST || config->allreduce_wire == LC_WIRE_DATA ||
        !lc_guard_begin(backend, reducer->device, &guard))
        return;
    reducer->seed = seed_of(comm);
    err = allocate(reducer, stream);
    if (err) {
        (void)backend->cudaGetLastError(); /* not the program's error */
        lc_warn_once("device %d: no memory for stochastic rounding (%s): to nearest it is",
                     reducer->device, backend->lk_error_text(err));
    }
    reducer->stochastic = !err;
    lc_guard_end(backend, reducer->device, &guard);
}

enum lk_rounding lc_rounding_of(const struct lc_reducer *reducer, struct lk_rng *out)
{
    if (!reducer->stochastic)
        return LK_NEAREST;
    *out = (struct lk_rng){ .seed = reducer->seed, .device_offset = reducer->drawn };
    return LK_STOCHASTIC;
}

/* In whole packs, whose elements share a block of numbers. */
int lc_rounding_drawn(const struct lc_reducer *reducer, uint64_t numbers, cudaStream_t stream)
{
    uint64_t packs = (numbers + LK_PACK_ALIGN - 1) / LK_PACK_ALIGN;

    if (!reducer->stochastic)
        return 0;
    return reducer->backend->lk_count_up(reducer->drawn, packs * LK_PACK_ALIGN, stream);
}

void lc_rounding_free(struct lc_reducer *reducer)
{
    lc_pool_give(reducer->drawn);
    reducer->drawn = NULL;
}
