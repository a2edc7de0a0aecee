/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/comm.h"

#include "common/deadline.h"
#include "common/log.h"
#include "interpose/messages.h"
#include "interpose/pairs.h"
#include "interpose/pool.h"
#include "interpose/process.h"
#include "interpose/reduce.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK      64
#define CHUNKS     (LC_COMM_MAX / CHUNK)
#define INDEX_BITS 13
#define INDEX_SIZE (1u << INDEX_BITS) /* twice the entries, so that probes stay short */
#define WINDOW     64u                /* a handle stands at most so far behind its own place */

/* Values of a slot's handle that are none: NCCL's handles are addresses. */
#define NEVER_USED ((uintptr_t)0)
#define USED_ONCE  ((uintptr_t)1)

/* Written under `changing` only: first comm, then handle (release). Read by anyone: first handle (acquire),
 * then comm; the pinned entry's own handle tells whether the slot was changed in between. */
struct slot {
    _Atomic uintptr_t handle;
    _Atomic(struct lc_comm *) comm;
};
static struct slot slots[INDEX_SIZE];

/* Held for a few dozen instructions, without any call, by who puts in or takes out; never by a look-up. Not
 * a mutex: one that a thread of the parent held would stay locked in the child. */
static _Atomic bool changing;

/* Entries, made when first needed, never freed. A chunk is published with release, read with acquire. */
static _Atomic(struct lc_comm *) chunks[CHUNKS];
static _Atomic uint32_t fresh; /* entries ever made; relaxed */

/* Entries in use. Grows before an entry is put in, falls (release) when nothing of it is left; read with acquire. */
static _Atomic uint32_t alive;

/* Stack of unused entries: low half index + 1, high half a count of changes (against ABA). */
static _Atomic uint64_t unused;

static _Atomic int64_t numbers; /* relaxed */

/* Closed entries whose counters stay apart: each place is written once (release). */
static _Atomic(struct lc_comm *) kept[LC_COMM_KEPT];
static _Atomic uint32_t kept_count;
static struct lc_ledger others; /* sum of the rest, as struct lc_tally */
static uint64_t others_count;   /* relaxed */

static bool change_begin(void)
{
    struct lc_deadline deadline = { 0 };

    while (atomic_exchange_explicit(&changing, true, memory_order_acquire)) {
        if (!deadline.at_ns)
            deadline = lc_deadline_in_ms(1000);
        if (lc_deadline_passed(deadline))
            return false;
        (void)sched_yield();
    }
    return true;
}

static void change_end(void)
{
    atomic_store_explicit(&changing, false, memory_order_release);
}

void lc_comm_after_fork(void)
{
    change_end();
    lc_thread.ended = NULL; /* the parent's */
}

static unsigned place(uintptr_t handle)
{
    return (unsigned)(((uint64_t)handle * 0x9e3779b97f4a7c15u) >> (64 - INDEX_BITS));
}

static struct lc_comm *entry_at(uint32_t index)
{
    struct lc_comm *chunk = atomic_load_explicit(&chunks[index / CHUNK], memory_order_acquire);

    return chunk ? &chunk[index % CHUNK] : NULL;
}

/* Of an index that has been handed out: its chunk is there and stays. */
static struct lc_comm *old_entry(uint32_t index)
{
    return atomic_load_explicit(&chunks[index / CHUNK], memory_order_acquire) + index % CHUNK;
}

static struct lc_comm *make_entry(void)
{
    uint32_t index = atomic_load_explicit(&fresh, memory_order_relaxed);
    struct lc_comm *chunk;
    struct lc_comm *none = NULL;

    do {
        if (index >= LC_COMM_MAX)
            return NULL;
        if (!entry_at(index)) {
            chunk = calloc(CHUNK, sizeof(*chunk));
            if (!chunk)
                return NULL;
            for (uint32_t i = 0; i < CHUNK; i++)
                chunk[i].index = index / CHUNK * CHUNK + i;
            if (!atomic_compare_exchange_strong_explicit(&chunks[index / CHUNK], &none, chunk,
                                                         memory_order_release,
                                                         memory_order_relaxed))
                free(chunk);
            none = NULL;
        }
    } while (!atomic_compare_exchange_weak_explicit(&fresh, &index, index + 1, memory_order_relaxed,
                                                    memory_order_relaxed));
    return old_entry(index);
}

static struct lc_comm *take_entry(void)
{
    uint64_t head = atomic_load_explicit(&unused, memory_order_acquire);

    while ((uint32_t)head) {
        struct lc_comm *comm = old_entry((uint32_t)head - 1);
        uint64_t next = atomic_load_explicit(&comm->next_free, memory_order_relaxed);

        next |= ((head >> 32) + 1) << 32;
        if (atomic_compare_exchange_weak_explicit(&unused, &head, next, memory_order_acquire,
                                                  memory_order_acquire))
            return comm;
    }
    return make_entry();
}

static void give_entry(struct lc_comm *comm)
{
    uint64_t head = atomic_load_explicit(&unused, memory_order_relaxed);
    uint64_t mine;

    do {
        atomic_store_explicit(&comm->next_free, (uint32_t)head, memory_order_relaxed);
        mine = (((head >> 32) + 1) << 32) | (comm->index + 1);
    } while (!atomic_compare_exchange_weak_explicit(&unused, &head, mine, memory_order_release,
                                                    memory_order_relaxed));
}

/* The last reference is gone: nobody can reach the entry any more. Whoever drops it may be a watchdog: nothing here waits
 * for the device. */
static void retire(struct lc_comm *comm)
{
    uint32_t at;

    lc_sides_free(comm->sides);
    comm->sides = NULL;
    lc_pairs_free(comm->pairs);
    comm->pairs = NULL;
    lc_reducer_free(atomic_exchange(&comm->reducer, NULL));
    lc_agree_free(comm->agree);
    comm->agree = NULL;
    lc_redops_free(&comm->redops);
    atomic_fetch_sub_explicit(&alive, 1, memory_order_release);

    if (lc_ledger_calls(&comm->ledger)) {
        at = atomic_load_explicit(&kept_count, memory_order_relaxed);
        while (at < LC_COMM_KEPT) {
            if (atomic_compare_exchange_weak_explicit(&kept_count, &at, at + 1,
                                                      memory_order_relaxed, memory_order_relaxed)) {
                atomic_store_explicit(&kept[at], comm, memory_order_release);
                return;
            }
        }
    }
    lc_ledger_merge(&others, &comm->ledger);
    lc_add(&others_count, 1);
    give_entry(comm);
}

static bool pin(struct lc_comm *comm)
{
    uint32_t refs = atomic_load_explicit(&comm->refs, memory_order_relaxed);

    while (refs) {
        if (atomic_compare_exchange_weak_explicit(&comm->refs, &refs, refs + 1,
                                                  memory_order_acquire, memory_order_relaxed))
            return true;
    }
    return false;
}

void lc_comm_put(struct lc_comm *comm)
{
    if (comm && atomic_fetch_sub_explicit(&comm->refs, 1, memory_order_acq_rel) == 1)
        retire(comm);
}

struct on_device {
    int device;
    bool found;
};

static void look_for_device(const struct lc_comm *comm, void *arg)
{
    struct on_device *on = arg;
    int device = atomic_load_explicit(&comm->device, memory_order_relaxed);

    /* What has been closed stays in the table for the report. */
    if (!atomic_load_explicit(&comm->closed, memory_order_relaxed))
        on->found = on->found || device == on->device || device < 0;
}

/* True if a communicator is on the device, or one may be. */
static bool somebody_is_on(int device)
{
    struct on_device on = { device, device < 0 };

    lc_comm_each(look_for_device, &on);
    return on.found;
}

/* Freeing memory waits for the devices: only when nothing of NCCL's can be on them. Looked at behind our own part, since
 * another thread that ends the last one finds nothing of what this one is about to give back. A device without communicators
 * may be reset, so nothing of it may be used again. */
static void free_what_is_left(int device)
{
    size_t spare;

    lc_reducer_free_ended();
    if (atomic_load_explicit(&alive, memory_order_acquire) == 0) {
        lc_reducer_free_all();
        return;
    }
    if (!somebody_is_on(device))
        lc_pool_empty(device);
    spare = lc_pool_spare();
    if (spare)
        lc_info("%zu KB of memory are kept for later communicators", spare >> 10);
}

void lc_comm_end(struct lc_comm *comm)
{
    int device;

    if (!comm)
        return;
    device = atomic_load_explicit(&comm->device, memory_order_relaxed);
    if (!lc_comm_is_aborted(comm))
        lc_reducer_settle(atomic_load_explicit(&comm->reducer, memory_order_acquire));
    lc_comm_put(comm);
    free_what_is_left(device);
}

void lc_comm_end_aborted(struct lc_comm *comm)
{
    int device;

    if (!comm)
        return;
    device = atomic_load_explicit(&comm->device, memory_order_relaxed);
    lc_comm_put(comm);
    if (!somebody_is_on(device))
        lc_pool_forget(device);
}

void lc_comm_end_behind_group(struct lc_comm *comm)
{
    if (!comm)
        return;
    comm->next_ended = lc_thread.ended;
    lc_thread.ended = comm;
}

void lc_comm_end_group(void)
{
    struct lc_comm *comm = lc_thread.ended;

    lc_thread.ended = NULL;
    while (comm) {
        struct lc_comm *next = comm->next_ended;

        lc_comm_end(comm);
        comm = next;
    }
}

struct lc_comm *lc_comm_pin(struct lc_comm *comm)
{
    atomic_fetch_add_explicit(&comm->refs, 1, memory_order_relaxed);
    return comm;
}

struct lc_comm *lc_comm_get(ncclComm_t handle)
{
    uintptr_t key = (uintptr_t)handle;

    if (key <= USED_ONCE)
        return NULL;
    for (unsigned i = place(key), end = i + WINDOW; i != end; i++) {
        struct slot *slot = &slots[i % INDEX_SIZE];
        uintptr_t have = atomic_load_explicit(&slot->handle, memory_order_acquire);
        struct lc_comm *comm;

        if (have == NEVER_USED)
            return NULL;
        if (have != key)
            continue;
        comm = atomic_load_explicit(&slot->comm, memory_order_acquire);
        if (!pin(comm))
            continue;
        if (atomic_load_explicit(&comm->handle, memory_order_relaxed) == key)
            return comm;
        lc_comm_put(comm);
    }
    return NULL;
}

/* Under `changing`. The slot of this handle, else (make) one for it, else NULL. */
static struct slot *slot_of(uintptr_t key, bool make)
{
    struct slot *vacant = NULL;

    for (unsigned i = place(key), end = i + WINDOW; i != end; i++) {
        struct slot *slot = &slots[i % INDEX_SIZE];
        uintptr_t have = atomic_load_explicit(&slot->handle, memory_order_relaxed);

        if (have == key)
            return slot;
        if (have <= USED_ONCE && !vacant)
            vacant = slot;
        if (have == NEVER_USED)
            break;
    }
    return make ? vacant : NULL;
}

static void prepare(struct lc_comm *comm, uintptr_t key, const struct lc_comm_facts *facts,
                    struct lc_agree *agree)
{
    lc_ledger_clear(&comm->ledger);
    lc_progress_clear(&comm->progress);
    comm->agree = agree;
    comm->id = lc_agree_watch(agree, &comm->progress);
    comm->no_setup = false;
    comm->set_up = false;
    comm->no_pairs = false;
    comm->mask.bits = NULL;
    comm->had_all_to_alls = false;
    comm->had_messages = false;
    atomic_store_explicit(&comm->aborted, false, memory_order_relaxed);
    comm->facts = *facts;
    comm->number = atomic_fetch_add_explicit(&numbers, 1, memory_order_relaxed);
    atomic_store_explicit(&comm->device, facts->device, memory_order_relaxed);
    atomic_store_explicit(&comm->closed, false, memory_order_relaxed);
    atomic_store_explicit(&comm->windows, 0, memory_order_relaxed);
    atomic_store_explicit(&comm->handle, key, memory_order_relaxed);
}

/* Of one that has not been put in. */
static void give_back(struct lc_comm *comm)
{
    atomic_fetch_sub_explicit(&alive, 1, memory_order_release);
    give_entry(comm);
}

static void warn_full(void)
{
    lc_warn_once("more than %d communicators at a time: calls on some of them are not counted",
                 LC_COMM_MAX);
}

static void warn_stuck(void)
{
    lc_warn_once("the table of communicators is stuck: the report may mix two of them");
}

/* Puts an entry with `refs` references in. An entry that is there already is kept, or replaced: *old then
 * holds it, with the reference that the table had. Returns the entry that now stands for the handle. */
static struct lc_comm *put_in(uintptr_t key, const struct lc_comm_facts *facts,
                              struct lc_agree *agree, uint32_t refs, bool replace,
                              struct lc_comm **old)
{
    struct lc_comm *comm = take_entry();
    struct lc_comm *there = NULL;
    struct slot *slot;

    *old = NULL;
    if (!comm) {
        warn_full();
        return NULL;
    }
    atomic_fetch_add_explicit(&alive, 1, memory_order_relaxed);
    prepare(comm, key, facts, agree);
    if (!change_begin()) {
        warn_stuck();
        give_back(comm);
        return NULL;
    }
    slot = slot_of(key, true);
    if (slot && atomic_load_explicit(&slot->handle, memory_order_relaxed) == key)
        there = atomic_load_explicit(&slot->comm, memory_order_relaxed);
    if (slot && (!there || replace)) {
        atomic_store_explicit(&comm->refs, refs, memory_order_release);
        atomic_store_explicit(&slot->comm, comm, memory_order_release);
        atomic_store_explicit(&slot->handle, key, memory_order_release);
        *old = there;
        there = comm;
        comm = NULL;
    } else if (there && !pin(there)) {
        there = NULL;
    }
    change_end();
    if (!slot)
        warn_full();
    if (comm)
        give_back(comm);
    return there;
}

static void close_entry(struct lc_comm *comm)
{
    atomic_store_explicit(&comm->closed, true, memory_order_relaxed);
    lc_comm_put(comm);
}

void lc_comm_add(ncclComm_t handle, const struct lc_comm_facts *facts, struct lc_agree *agree)
{
    struct lc_comm *old = NULL;

    if ((uintptr_t)handle <= USED_ONCE || !put_in((uintptr_t)handle, facts, agree, 1, true, &old))
        lc_agree_free(agree);
    if (old)
        close_entry(old);
}

void lc_comm_remove(ncclComm_t handle)
{
    struct lc_comm *comm = NULL;
    struct slot *slot;

    if ((uintptr_t)handle <= USED_ONCE)
        return;
    if (!change_begin()) {
        warn_stuck();
        return;
    }
    slot = slot_of((uintptr_t)handle, false);
    if (slot) {
        comm = atomic_load_explicit(&slot->comm, memory_order_relaxed);
        atomic_store_explicit(&slot->handle, USED_ONCE, memory_order_release);
    }
    change_end();
    if (comm)
        close_entry(comm);
}

static bool ask(ncclComm_t handle, const struct lc_real *real, struct lc_comm_facts *out)
{
    return real->ncclCommCount && real->ncclCommUserRank &&
           real->ncclCommCount(handle, &out->ranks) == ncclSuccess &&
           real->ncclCommUserRank(handle, &out->rank) == ncclSuccess;
}

/* Not asked when the communicator is made: it may not be ready then. */
static void learn_device(struct lc_comm *comm, const struct lc_real *real)
{
    int device;

    if (!real->ncclCommCuDevice || real->ncclCommCuDevice((ncclComm_t)atomic_load_explicit(
                                                              &comm->handle, memory_order_relaxed),
                                                          &device) != ncclSuccess)
        device = LC_DEVICE_UNKNOWN;
    atomic_store_explicit(&comm->device, device, memory_order_relaxed);
}

struct lc_comm *lc_comm_get_or_adopt(ncclComm_t handle, const struct lc_real *real)
{
    struct lc_comm *comm = lc_comm_get(handle);
    struct lc_comm_facts facts = { .device = LC_DEVICE_UNASKED,
                                   .parent = LC_COMM_NO_PARENT,
                                   .origin = LC_COMM_ADOPTED };
    struct lc_comm *old;

    if (__builtin_expect(!comm, 0)) {
        if ((uintptr_t)handle <= USED_ONCE || !ask(handle, real, &facts))
            return NULL;
        comm = put_in((uintptr_t)handle, &facts, NULL, 2, false, &old);
        if (!comm)
            return NULL;
    }
    if (__builtin_expect(
            atomic_load_explicit(&comm->device, memory_order_relaxed) == LC_DEVICE_UNASKED, 0))
        learn_device(comm, real);
    return comm;
}

void lc_comm_each(void (*fn)(const struct lc_comm *comm, void *arg), void *arg)
{
    uint32_t count = atomic_load_explicit(&fresh, memory_order_relaxed);

    for (uint32_t i = 0; i < count; i++) {
        struct lc_comm *comm = entry_at(i);

        if (!comm || !pin(comm))
            continue;
        fn(comm, arg);
        lc_comm_put(comm);
    }
    for (uint32_t i = 0; i < LC_COMM_KEPT; i++) {
        struct lc_comm *comm = atomic_load_explicit(&kept[i], memory_order_acquire);

        if (comm)
            fn(comm, arg);
    }
}

const struct lc_ledger *lc_comm_others(uint64_t *communicators)
{
    *communicators = __atomic_load_n(&others_count, __ATOMIC_RELAXED);
    return &others;
}
