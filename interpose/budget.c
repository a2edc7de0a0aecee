/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/budget.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#define DEVICES 64

/* Guards the lists, and `kept` of their members. Nothing else is called under it. A fork waits for it: its child has whole
 * lists and a free lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lc_share *members[DEVICES];

/* Members of each device, and those that keep something. Written under the lock; relaxed elsewhere: a size of grids follows
 * from them, which may differ between calls. */
static atomic_uint n_members[DEVICES], n_keepers[DEVICES];

static void release(void)
{
    (void)pthread_mutex_unlock(&lock);
}

static void hold_at_fork(void)
{
    (void)pthread_mutex_lock(&lock);
}

static void watch_forks(void)
{
    (void)pthread_atfork(hold_at_fork, release, release);
}

static void hold(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, watch_forks);
    (void)pthread_mutex_lock(&lock);
}

static uint32_t kept_by(const struct lc_share *share)
{
    uint32_t sum = 0;

    for (int grid = 0; grid < LC_GRIDS; grid++)
        sum += share->kept[grid];
    return sum;
}

void lc_budget_join(struct lc_share *share, int device)
{
    if (share->joined)
        return;
    share->device = (uint32_t)device % DEVICES;
    share->joined = true;
    hold();
    share->next = members[share->device];
    members[share->device] = share;
    atomic_fetch_add_explicit(&n_members[share->device], 1, memory_order_relaxed);
    release();
}

/* Under the lock. */
static void forget(struct lc_share *share)
{
    if (kept_by(share))
        atomic_fetch_sub_explicit(&n_keepers[share->device], 1, memory_order_relaxed);
    for (int grid = 0; grid < LC_GRIDS; grid++)
        share->kept[grid] = 0;
}

void lc_budget_forget(struct lc_share *share)
{
    hold();
    forget(share);
    release();
}

void lc_budget_leave(struct lc_share *share)
{
    struct lc_share **at = &members[share->device];

    if (!share->joined)
        return;
    share->joined = false;
    hold();
    while (*at != share)
        at = &(*at)->next;
    *at = share->next;
    atomic_fetch_sub_explicit(&n_members[share->device], 1, memory_order_relaxed);
    forget(share);
    release();
}

uint32_t lc_budget_members(const struct lc_share *share)
{
    return atomic_load_explicit(&n_members[share->device], memory_order_relaxed);
}

/* Of those who have no more than the others: what is left by the ones that keep more than this, which are found by and by. */
static uint32_t equal_part(const struct lc_share *share, uint32_t room)
{
    uint32_t n = lc_budget_members(share), part = n ? room / n : room, before;

    do {
        uint32_t taken = 0, equal = n;

        before = part;
        for (const struct lc_share *other = members[share->device]; other; other = other->next) {
            if (other == share || kept_by(other) <= part)
                continue;
            taken += kept_by(other);
            equal--;
        }
        part = taken < room ? (room - taken) / (equal ? equal : 1) : 0;
    } while (part < before);
    return part;
}

/* Under the lock. */
static uint32_t own_part(const struct lc_share *share, uint32_t room)
{
    uint32_t part = equal_part(share, room), own = kept_by(share);

    return part > own ? part : own;
}

uint32_t lc_budget_part(const struct lc_share *share, uint32_t room)
{
    uint32_t n = lc_budget_members(share), part;

    if (!atomic_load_explicit(&n_keepers[share->device], memory_order_relaxed))
        return room / (n ? n : 1);
    hold();
    part = own_part(share, room);
    release();
    return part;
}

/* Under the lock. */
static void keep(struct lc_share *share, enum lc_grid grid, uint32_t ctas)
{
    if (!share->joined || ctas <= share->kept[grid])
        return;
    if (!kept_by(share))
        atomic_fetch_add_explicit(&n_keepers[share->device], 1, memory_order_relaxed);
    share->kept[grid] = ctas;
}

uint32_t lc_budget_take(struct lc_share *share, uint32_t ctas, uint32_t ranks, uint32_t kinds,
                        uint32_t room)
{
    uint32_t most;

    hold();
    most = own_part(share, room) / ranks / kinds;
    if (ctas > most)
        ctas = most ? most : 1;
    for (uint32_t grid = 0; grid < kinds; grid++)
        keep(share, (enum lc_grid)grid, ctas * ranks);
    release();
    return ctas;
}

void lc_budget_keep(struct lc_share *share, enum lc_grid grid, uint32_t ctas)
{
    hold();
    keep(share, grid, ctas);
    release();
}
