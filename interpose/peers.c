/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/peers_internal.h"

#include "common/deadline.h"
#include "common/log.h"
#include "interpose/control/control.h"
#include "interpose/policy.h"
#include "interpose/pool.h"
#include "kernels/ring_layout.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* Bytes of segments on each device, of all communicators. Relaxed: only the sum counts. */
#define DEVICES 64
static atomic_size_t used[DEVICES];

#define CHANNELS_LEAST     8
#define CTAS_LEAST         8  /* of one beside graphs of other communicators */
#define CTAS_MOST          32 /* of a call, so that computation goes on beside it */
#define CHANNELS_USUAL     64
#define SLOTS_OF_CTA       8
#define SLOTS_ENOUGH       512 /* for any number of them */
#define EXCHANGE_CTAS_MOST 64  /* of one between GPUs */
/* For one of the shape's: one in each leg of reductions, two for exchanges. Two ranks have as many again for these. */
#define SLOTS_EACH 4
/* What one of two ranks has under way: sums of 256 MB between two H200 over NVLink take 910 us with 4 slots, 859 with 8, and
 * 465 and 448 with bf16 on the wire (perf/results/h200-x2-nvlink). With more ranks there are more units. */
#define SLOTS_OF_PAIR 8
#define LINES_LEAST   ((size_t)64 << 10)

static bool reserve(const struct lc_peers_facts *facts, size_t bytes)
{
    atomic_size_t *sum = &used[(unsigned)facts->device % DEVICES];

    if (atomic_fetch_add_explicit(sum, bytes, memory_order_relaxed) + bytes <= facts->cap)
        return true;
    atomic_fetch_sub_explicit(sum, bytes, memory_order_relaxed);
    return false;
}

size_t lc_peers_reserved(int device)
{
    return atomic_load_explicit(&used[(unsigned)device % DEVICES], memory_order_relaxed);
}

/* Of the largest message in lines: of more than four ranks, whose units have half as many slots for them, as much less as
 * lets so many be under way (lk_short_slots). */
static uint32_t short_bytes_for(uint32_t ranks, size_t wanted)
{
    size_t most = ranks > LK_SHORT_RANKS ? (size_t)256 << 10 : LK_SHORT_MAX;

    return (uint32_t)(wanted < most ? wanted : most);
}

/* The job wants more of a call than is usual. */
static bool is_wide(const struct lc_peers *peers)
{
    return peers->facts.most > CTAS_MOST;
}

/* One for each CTA, or two: fewer than is usual would let fewer messages be under way. */
static uint32_t channels_for(const struct lc_peers *peers, uint32_t usual)
{
    uint32_t most = peers->facts.most;

    if (!is_wide(peers))
        return usual;
    return usual * (most < CHANNELS_USUAL ? 2 * most : most) / CHANNELS_USUAL;
}

/* Half as many, but as many as is usual before. */
static uint32_t fewer(uint32_t channels, uint32_t usual)
{
    return channels > usual && channels / 2 < usual ? usual : channels / 2;
}

/* From what all ranks share. Few slots cost speed only, and so do few channels, which are what a CTA has one or two of. */
static struct lk_ring_shape shape_for(const struct lc_peers *peers)
{
    struct lk_ring_shape shape = { .ranks = (uint32_t)peers->facts.ranks,
                                   .channels = CHANNELS_USUAL };
    uint32_t usual;
    size_t slots;

    shape.line_bytes = lc_policy_line_bytes(shape.ranks);
    if (peers->facts.kernels > 1) /* there are exchanges */
        shape.short_bytes = short_bytes_for(shape.ranks, peers->facts.short_bytes);

    while (shape.channels > CHANNELS_LEAST &&
           (size_t)SLOTS_EACH * shape.channels * LK_SLOT_BYTES > peers->facts.start)
        shape.channels /= 2;
    slots = peers->facts.start / ((size_t)SLOTS_EACH * shape.channels * LK_SLOT_BYTES);
    if (shape.ranks == 2 && slots >= SLOTS_OF_PAIR / 2)
        slots = slots < SLOTS_OF_PAIR ? SLOTS_OF_PAIR : slots;
    shape.slots = slots < 1 ? 1 : slots > LK_SLOTS_MAX ? LK_SLOTS_MAX : (uint32_t)slots;
    usual = shape.channels;
    shape.channels = channels_for(peers, usual); /* with as many slots */
    while (shape.line_bytes > LINES_LEAST &&
           peers->backend->lk_ring_bytes(&shape) > peers->facts.cap)
        shape.line_bytes -= LINES_LEAST;
    while (shape.slots > 1 && peers->backend->lk_ring_bytes(&shape) > peers->facts.cap)
        shape.slots /= 2;
    while (shape.channels > CHANNELS_LEAST &&
           peers->backend->lk_ring_bytes(&shape) > peers->facts.cap)
        shape.channels = fewer(shape.channels, usual);
    return shape;
}

bool lc_peers_possible(struct lc_room *room, int ranks)
{
    if (ranks < 2 || ranks > (int)LK_RANKS_MAX)
        return false;
    for (int r = 0; r < ranks; r++) { /* those of other hosts are not told */
        if (!lc_room_record(room, (uint32_t)r))
            return false;
    }
    return true;
}

struct lc_peers *lc_peers_new(const struct lc_backend *backend, struct lc_room *room,
                              const struct lc_peers_facts *facts, struct lc_ledger *ledger)
{
    struct lc_peers *peers = calloc(1, sizeof(*peers));

    if (!peers)
        return NULL;
    peers->backend = backend;
    peers->room = room;
    peers->facts = *facts;
    peers->ledger = ledger;
    peers->fd = -1;
    return peers;
}

/* The event goes behind what is on the stream, also behind a part of what was meant: it is waited for before anything is
 * freed. */
static int mark(const struct lc_peers *peers, int err)
{
    int recorded = (int)peers->backend->cudaEventRecord(peers->event, peers->stream);

    return err ? err : recorded;
}

/* ---- what is allocated ---- */

/* For all generations. */
static int allocate(struct lc_peers *peers)
{
    const struct lc_backend *backend = peers->backend;
    struct lk_rings *rings = &peers->rings;
    size_t states = LC_GENERATIONS * lc_peers_state_bytes(peers);
    int err = backend->cudaStreamCreateWithFlags(&peers->stream, cudaStreamNonBlocking);

    if (!err)
        err = backend->cudaEventCreateWithFlags(&peers->event, cudaEventDisableTiming);
    if (!err)
        err = lc_pool_take(backend, LC_MEMORY_PINNED, peers->facts.device, sizeof(*peers->shared),
                           (void **)&peers->shared);
    if (err)
        return err;
    memset(peers->shared, 0, sizeof(*peers->shared));
    rings->abort = &peers->shared->abort;
    rings->too_few = &peers->shared->too_few[0];
    lc_room_echo_abort(peers->room, &peers->shared->abort);
    err = lc_pool_take(backend, LC_MEMORY_DEVICE, peers->facts.device, states, &rings->state);
    if (!err)
        err = backend->cudaMemsetAsync(rings->state, 0, states, peers->stream);
    return err;
}

void lc_peers_unmap(struct lc_peers *peers)
{
    for (uint32_t r = 0; r < LK_RANKS_MAX; r++) {
        if (peers->rings.segments[r])
            (void)peers->backend->lk_segment_free(peers->rings.segments[r], peers->bytes);
        peers->rings.segments[r] = NULL;
    }
    if (peers->reserved)
        atomic_fetch_sub_explicit(&used[(unsigned)peers->facts.device % DEVICES], peers->bytes,
                                  memory_order_relaxed);
    peers->reserved = false;
}

/* Its kernels end without waiting for anybody, also those of graphs. */
static bool is_aborted(const struct lc_peers *peers)
{
    return peers->shared && __atomic_load_n(&peers->shared->abort, __ATOMIC_ACQUIRE);
}

void lc_peers_detach(struct lc_peers *peers)
{
    if (!peers || !peers->room)
        return;
    if (is_aborted(peers))
        lc_budget_leave(&peers->share);
    else
        lc_budget_forget(&peers->share);
    lc_room_echo_abort(peers->room, NULL);
    lc_room_withdraw_fd(peers->room);
    for (uint32_t c = 1; c <= LC_CHANGES; c++) {
        if (peers->by_change[c])
            peers->by_change[c]->room = NULL;
    }
    peers->room = NULL;
    peers->ledger = NULL;
}

/* 0: what was last put on the stream is done; cudaErrorNotReady. */
static int poll_device(const struct lc_peers *peers)
{
    int err = peers->event ? (int)peers->backend->cudaEventQuery(peers->event) : 0;

    if (err)
        (void)peers->backend->cudaGetLastError(); /* not the program's error */
    return err;
}

/* Bounded. */
static bool wait_for_device(const struct lc_peers *peers)
{
    struct lc_deadline until = lc_deadline_in_ms(10000);
    int err;

    while ((err = poll_device(peers)) == cudaErrorNotReady && !lc_deadline_passed(until))
        (void)poll(NULL, 0, 1);
    return err == 0;
}

void lc_peers_count(struct lc_peers *peers)
{
    const struct lc_backend *backend;
    struct shared *shared;
    int err = 0;

    if (!peers || peers->stage != READY || !peers->ledger)
        return;
    backend = peers->backend;
    shared = peers->shared;

    for (uint32_t g = 0; !err && g <= peers->made; g++)
        err = backend->cudaMemcpyAsync(&shared->counts[g],
                                       (char *)peers->rings.state + g * lc_peers_state_bytes(peers),
                                       sizeof(shared->counts[g]), cudaMemcpyDefault, peers->stream);
    err = mark(peers, err);
    if (err) {
        (void)backend->cudaGetLastError(); /* not the program's error */
        return;
    }
    if (!wait_for_device(peers))
        return;
    for (uint32_t g = 0; g <= peers->made; g++) {
        lc_add(&peers->ledger->ring_sent, shared->counts[g].bytes_sent);
        lc_add(&peers->ledger->ring_elided, shared->counts[g].bytes_elided);
        lc_add(&peers->ledger->exchange_sent, shared->counts[g].exchange_sent);
        lc_add(&peers->ledger->exchange_elided, shared->counts[g].exchange_elided);
    }
}

void lc_peers_close(struct lc_peers *peers)
{
    if (peers->fd >= 0)
        close(peers->fd);
    peers->fd = -1;
}

bool lc_peers_free(struct lc_peers *peers)
{
    const struct lc_backend *backend;

    if (!peers)
        return true;
    backend = peers->backend;
    lc_peers_detach(peers);
    if (poll_device(peers) == cudaErrorNotReady)
        return false;
    lc_budget_leave(&peers->share);
    lc_peers_close(peers);
    lc_peers_free_changes(peers);
    lc_peers_unmap(peers);
    lc_pool_give(peers->rings.state);
    lc_pool_give(peers->shared);
    if (peers->event)
        (void)backend->cudaEventDestroy(peers->event);
    if (peers->stream)
        (void)backend->cudaStreamDestroy(peers->stream);
    free(peers);
    return true;
}

/* ---- steps: 0, done; -EAGAIN, at another call; else it has failed ---- */

/* Another communicator may be smaller, and fit. */
static void warn_of_limit(const struct lc_peers *peers)
{
    size_t taken = lc_peers_reserved(peers->facts.device), cap = peers->facts.cap;

    lc_warn_once(
        "device %d: a communicator of %d ranks wants %zu MB for its peers to write to, and others have %zu of the %zu MB of LOONGCOMM_STAGING_MAX: its calls go through NCCL, as those of later ones may; raise that, or let each have less (LOONGCOMM_STAGING_START)",
        peers->facts.device, peers->facts.ranks, peers->bytes >> 20, taken >> 20, cap >> 20);
}

static int start(struct lc_peers *peers)
{
    struct offer *mine = &peers->offers[peers->facts.rank];
    struct lk_rings *rings = &peers->rings;
    int err;

    if (!peers->first)
        rings->shape = shape_for(peers);
    rings->rank = (uint32_t)peers->facts.rank;
    peers->bytes = peers->backend->lk_ring_bytes(&rings->shape);
    peers->reserved = reserve(&peers->facts, peers->bytes);
    if (!peers->reserved) {
        if (!peers->first)
            warn_of_limit(peers);
        return -EDQUOT;
    }
    *mine = (struct offer){ .shape = rings->shape, .bytes = peers->bytes };
    if (getrandom(&mine->number, sizeof(mine->number), 0) != (ssize_t)sizeof(mine->number))
        return -EIO;
    mine->number |= 1; /* never what a zeroed segment holds */
    if (peers->backend->cudaDeviceGetPCIBusId(mine->gpu, BUS_ID, peers->facts.device) != 0)
        return -ENODEV;
    peers->offered[peers->facts.rank] = true;
    err = peers->first ? 0 : peers->backend->lk_rings_load();
    if (!err && !peers->first)
        err = allocate(peers);
    if (!err)
        err = peers->backend->lk_segment_new(peers->bytes, peers->stream,
                                             &rings->segments[rings->rank], &peers->fd);
    return peers->event ? mark(peers, err) : err;
}

static int offer(struct lc_peers *peers)
{
    const struct offer *mine = &peers->offers[peers->facts.rank];
    int err = poll_device(peers);

    if (err)
        return err == cudaErrorNotReady ? -EAGAIN : err;
    err = lc_room_offer_fd(peers->room, peers->fd);
    if (err)
        return err;
    peers->fd = -1;
    return lc_room_post(peers->room, peers_key(peers->change, KEY_OFFER), mine, sizeof(*mine));
}

static int look_at_offer(struct lc_peers *peers, uint32_t rank)
{
    struct offer *offer = &peers->offers[rank];
    size_t size = 0;
    int err;

    if (peers->offered[rank])
        return 0;
    err = lc_room_look(peers->room, rank, peers_key(peers->change, KEY_OFFER), offer,
                       sizeof(*offer), &size);
    if (err)
        return err;
    if (size != sizeof(*offer) || offer->bytes != peers->bytes ||
        memcmp(&offer->shape, &peers->rings.shape, sizeof(offer->shape)) != 0 ||
        memchr(offer->gpu, '\0', BUS_ID) == NULL)
        return -EPROTO;
    peers->offered[rank] = true;
    return 0;
}

static int map_peer(struct lc_peers *peers, uint32_t rank)
{
    int fd = -1, err;

    if (peers->rings.segments[rank])
        return 0;
    err = look_at_offer(peers, rank);
    if (!err)
        err = lc_room_fetch_fd(peers->room, rank, &fd);
    if (err)
        return err;
    err = peers->backend->lk_segment_map(fd, peers->bytes, &peers->rings.segments[rank]);
    close(fd);
    return err;
}

static int map_peers(struct lc_peers *peers)
{
    int result = 0;

    for (uint32_t r = 0; r < peers->rings.shape.ranks; r++) {
        int err = map_peer(peers, r);

        if (err && err != -EAGAIN)
            return err;
        result = err ? err : result;
    }
    return result;
}

#define MULTIPROCESSORS 132 /* where the device does not say */

/* Of kernels of NCCL's that run beside, one for each rank: those of messages have a power of two. A kernel of ours that waits
 * for room behind one of these, and one of these behind ours at another rank, would wait for ever. */
static uint32_t nccl_takes(const struct lc_peers *peers)
{
    uint32_t power = 1;

    while (power < peers->facts.beside)
        power *= 2;
    return power * peers->sharers;
}

/* Of a device, for the rings of all communicators; the rest is NCCL's and the program's. */
static uint32_t room_on(const struct lc_peers *peers)
{
    uint32_t all = peers->multiprocessors, usual = all * 3 / 4;
    uint32_t least = all - usual; /* that is left */

    if (!is_wide(peers) || peers->facts.beside == 0 || peers->facts.beside >= least ||
        nccl_takes(peers) >= least)
        return usual;
    return all - nccl_takes(peers);
}

static uint32_t smallest(uint32_t a, uint32_t b, uint32_t c)
{
    a = a < b ? a : b;
    return a < c ? a : c;
}

/* How much is left for computation is the job's choice: what it says of NCCL's kernels goes for these, unless it says something
 * of these. Sums of 256 MB between two H200 over NVLink with 32 and with 64 CTAs: fp32 873 and 818 us, bf16 on the wire 467
 * and 443, 16 MB of those 50 and 46 (perf/results/h200-x2-nvlink). */
static uint32_t allowed(const struct lc_peers *peers, uint32_t usual)
{
    if (peers->facts.most)
        return peers->facts.most;
    return peers->facts.ctas ? peers->facts.ctas : usual;
}

/* More than usual are faster only where there are enough slots: with 4 in each of 64 channels the same sums of 256 MB take 908
 * and 461 us with 32 CTAs, 942 and 507 with 64. With 4 and with 8 in each of 128 they take 775 and 406, 764 and 395 us with
 * 128. Each peer of more than one has slots of its own, which was not measured. */
static uint32_t most_with(const struct lc_peers *peers, uint32_t slots)
{
    uint32_t most = allowed(peers, CTAS_MOST);
    uint32_t fed = peers->rings.shape.channels * slots / SLOTS_OF_CTA;

    if (is_wide(peers) &&
        peers->rings.shape.channels * slots * (peers->rings.shape.ranks - 1) >= SLOTS_ENOUGH)
        return most;
    fed = fed < CTAS_MOST ? CTAS_MOST : fed;
    return most < fed ? most : fed;
}

/* Of at most `ctas` as many as are needed for none to have more channels than with all of them: a call takes as long as those
 * that have most, and the others are in their way. Where 64 were allowed and the budget gave 49 for 64 channels, sums of 256 MB
 * with bf16 on the wire took 537 us between two H200 over NVLink, 472 with 32 (perf/results/h200-x2-nvlink). */
static uint32_t without_idle(const struct lc_peers *peers, uint32_t ctas)
{
    uint32_t channels = peers->rings.shape.channels, each = 1;

    if (ctas == 0)
        return 1;
    while (ctas * each < channels)
        each++;
    return (channels + each - 1) / each;
}

/* As many as the job has said for one call are not to be had, whatever other communicators there are. */
static void say_bound(const struct lc_peers *peers)
{
    uint32_t room, kernels = peers->facts.kernels, sharers = peers->sharers, most;

    if (!is_wide(peers))
        return;
    room = room_on(peers);
    most = smallest(peers->rings.shape.channels, most_with(peers, peers->rings.shape.slots),
                    room / kernels);
    most = without_idle(peers, most / sharers);
    if (most == peers->facts.most)
        return;
    lc_warn_once(
        "device %d: a call takes %u CTAs at most, not the %u of LOONGCOMM_MAX_CTAS: of %u multiprocessors %u are left to kernels of NCCL's (a quarter, or less by NCCL_MAX_CTAS with NCCL_CGA_CLUSTER_SIZE=0), %u kernel%s of each of %u rank%s share the others, and there are %u channels",
        peers->facts.device, most, peers->facts.most, peers->multiprocessors,
        peers->multiprocessors - room, kernels, kernels == 1 ? "" : "s", sharers,
        sharers == 1 ? "" : "s", peers->rings.shape.channels);
}

/* One CTA of each kernel beside all others; where captured graphs have taken more than their part, enough to be worth it. */
static bool has_room(const struct lc_peers *peers)
{
    uint32_t kernels = peers->sharers * peers->facts.kernels;
    uint32_t part = lc_budget_part(&peers->share, room_on(peers));
    uint32_t equal = room_on(peers) /
                     lc_budget_members(&peers->share); /* others may have come since */

    return kernels <= equal && (part >= kernels * CTAS_LEAST || part >= equal);
}

bool lc_peers_take_room(struct lc_peers *peers)
{
    int n = 0;

    peers->sharers = 1;
    for (uint32_t r = 0; r < peers->rings.shape.ranks; r++)
        peers->sharers += r != peers->rings.rank &&
                          strcmp(peers->offers[r].gpu, peers->offers[peers->rings.rank].gpu) == 0;
    if (peers->backend->cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount,
                                               peers->facts.device) != cudaSuccess ||
        n < 1)
        n = MULTIPROCESSORS;
    peers->multiprocessors = (uint32_t)n;
    lc_budget_join(&peers->share, peers->facts.device);
    if (has_room(peers))
        return true;
    lc_budget_leave(&peers->share);
    return false;
}

static char *number_in(const struct lc_peers *peers, uint32_t segment, uint32_t from)
{
    return (char *)peers->rings.segments[segment] + LK_NONCE_OFFSET + from * sizeof(uint64_t);
}

static int write_numbers(struct lc_peers *peers)
{
    const struct lc_backend *backend = peers->backend;
    uint32_t me = peers->rings.rank;
    int err = map_peers(peers);

    if (err)
        return err;
    if (!peers->first && !lc_peers_take_room(peers))
        return -EBUSY;
    peers->shared->number = peers->offers[me].number;
    for (uint32_t r = 0; !err && r < peers->rings.shape.ranks; r++)
        err = backend->cudaMemcpyAsync(number_in(peers, r, me), &peers->shared->number,
                                       sizeof(uint64_t), cudaMemcpyDefault, peers->stream);
    return mark(peers, err);
}

static int tell_written(struct lc_peers *peers)
{
    int err = poll_device(peers);

    if (err)
        return err == cudaErrorNotReady ? -EAGAIN : err;
    return lc_room_post(peers->room, peers_key(peers->change, KEY_WRITTEN), NULL, 0);
}

static int read_numbers(struct lc_peers *peers)
{
    const struct lc_backend *backend = peers->backend;
    uint32_t me = peers->rings.rank, ranks = peers->rings.shape.ranks;
    int err = 0;

    for (uint32_t r = 0; !err && r < ranks; r++) {
        char none[1];
        size_t size;

        if (r != me)
            err = lc_room_look(peers->room, r, peers_key(peers->change, KEY_WRITTEN), none,
                               sizeof(none), &size);
    }
    if (err)
        return err;
    err = backend->cudaMemcpyAsync(peers->shared->seen, number_in(peers, me, 0),
                                   ranks * sizeof(uint64_t), cudaMemcpyDefault, peers->stream);
    return err ? err : (int)backend->cudaEventRecord(peers->event, peers->stream);
}

static int say(struct lc_peers *peers, uint32_t well)
{
    return lc_room_post(peers->room, peers_key(peers->change, KEY_RESULT), &well, sizeof(well));
}

/* -EXDEV: some rank writes to another machine's memory, whatever its host name is. */
static int check_numbers(struct lc_peers *peers)
{
    int err = poll_device(peers);

    if (err)
        return err == cudaErrorNotReady ? -EAGAIN : err;
    for (uint32_t r = 0; r < peers->rings.shape.ranks; r++) {
        if (peers->shared->seen[r] != peers->offers[r].number)
            return -EXDEV;
    }
    return say(peers, 1);
}

/* 1: well, 0: not, -EAGAIN: it has not said. */
static int result_of(const struct lc_peers *peers, uint32_t rank)
{
    uint32_t well = 0;
    size_t size = 0;
    int err = lc_room_look(peers->room, rank, peers_key(peers->change, KEY_RESULT), &well,
                           sizeof(well), &size);

    if (err)
        return err == -EAGAIN ? err : 0;
    return size == sizeof(well) && well == 1;
}

static bool somebody_has_failed(const struct lc_peers *peers)
{
    for (uint32_t r = 0; r < (uint32_t)peers->facts.ranks; r++) {
        if (r != (uint32_t)peers->facts.rank && result_of(peers, r) == 0)
            return true;
    }
    return false;
}

static int hear_results(struct lc_peers *peers)
{
    for (uint32_t r = 0; r < peers->rings.shape.ranks; r++) {
        int result = r == peers->rings.rank ? 1 : result_of(peers, r);

        if (result <= 0) /* a failure may have come in a moment ago */
            return result ? result : -ECANCELED;
    }
    lc_room_withdraw_fd(peers->room);
    if (peers->first)
        return 0;
    if (peers->ledger) {
        __atomic_store_n(&peers->ledger->ring_bytes, peers->bytes, __ATOMIC_RELAXED);
        __atomic_store_n(&peers->ledger->ring_used, peers->bytes, __ATOMIC_RELAXED);
        lc_ledger_larger(&peers->ledger->ring_ctas_allowed, peers->facts.most);
    }
    lc_info("rank %u of %u: rings of %zu KB in peers' memory, %u slots", peers->rings.rank,
            peers->rings.shape.ranks, peers->bytes >> 10, peers->rings.shape.slots);
    say_bound(peers);
    return 0;
}

static int clear(struct lc_peers *peers)
{
    if (poll_device(peers) == cudaErrorNotReady)
        return -EAGAIN;
    lc_room_withdraw_fd(peers->room);
    lc_peers_close(peers);
    if (!peers->first)
        lc_peers_unmap(peers);
    return 0;
}

static const struct {
    int (*run)(struct lc_peers *peers);
    enum stage next;
} steps[] = {
    [START] = {start,          ZEROING },
      [ZEROING] = { offer,         OFFERED },
    [OFFERED] = { write_numbers, WRITING },
      [WRITING] = { tell_written,  TOLD    },
    [TOLD] = { read_numbers,  CHECKING},
      [CHECKING] = { check_numbers, SAID    },
    [SAID] = { hear_results,  READY   },
      [CLEARING] = { clear,         WITHOUT },
};

static const char *reason(const struct lc_peers *peers, int err)
{
    switch (err) {
    case -EDQUOT: return "they are more than LOONGCOMM_STAGING_MAX leaves";
    case -EBUSY:
        return "kernels of other ranks and communicators, captured graphs included, leave it no room on this GPU";
    case -EXDEV: return "some ranks are on another machine than their host name says";
    case -ENOTSUP: return "the device or the kernels library cannot share memory";
    default: return err > 0 ? peers->backend->lk_error_text(err) : strerror(-err);
    }
}

/* Nothing of ours may keep the others waiting; if even that cannot be said, they do not get this rank's vote. */
static void fail(struct lc_peers *peers, int err)
{
    if (err > 0)
        (void)peers->backend->cudaGetLastError(); /* not the program's error */
    if (peers->first && err != -ECANCELED)
        lc_info("rank %d of %d: no rings of %u slots (%s)", peers->facts.rank, peers->facts.ranks,
                peers->rings.shape.slots, reason(peers, err));
    else if (err == -EPIPE) /* the arbiter is gone, which is no matter of memory */
        lc_info("device %d: no agreement on peers' memory any more", peers->facts.device);
    else if (err != -ECANCELED && err != -EDQUOT)
        lc_warn_once(
            "device %d: peers' memory cannot be used (%s): reductions of this communicator go through NCCL",
            peers->facts.device, reason(peers, err));
    (void)say(peers, 0);
    lc_budget_leave(&peers->share);
    peers->stage = CLEARING;
}

bool lc_peers_step(struct lc_peers *peers)
{
    while (peers->stage != READY && peers->stage != WITHOUT) {
        int err = -ECANCELED;

        if (peers->stage == CLEARING || !somebody_has_failed(peers))
            err = steps[peers->stage].run(peers);
        if (err == -EAGAIN)
            return false;
        if (err)
            fail(peers, err);
        else
            peers->stage = steps[peers->stage].next;
    }
    return true;
}

void lc_peers_refuse(struct lc_room *room)
{
    uint32_t well = 0;

    (void)lc_room_post(room, KEY_RESULT, &well, sizeof(well));
}

bool lc_peers_were_cut(const struct lc_peers *peers)
{
    return peers && peers->shared && __atomic_load_n(&peers->shared->abort, __ATOMIC_ACQUIRE) == 2;
}

/* Of a GPU, for one rank of one communicator. */
static uint32_t share_of(const struct lc_peers *peers)
{
    return lc_budget_part(&peers->share, room_on(peers)) / peers->sharers;
}

uint32_t lc_peers_ctas(const struct lc_peers *peers, uint32_t slots)
{
    uint32_t ctas = smallest(peers->rings.shape.channels / peers->sharers,
                             most_with(peers, slots) / peers->sharers,
                             share_of(peers) / peers->facts.kernels);

    return without_idle(peers, ctas);
}

/* What a rank sends to itself and what it takes go through its own memory, for which the link leaves time that 32 CTAs do
 * not fill. All-to-alls of 256 MB between two H200 over NVLink, with 32, 48 and 64 CTAs: 1.08, 1.11 and 1.17 times as fast
 * as NCCL, at 90 % zeros 2.07, 2.74 and 3.05 times (perf/results/h200-x2-nvlink). Ranks of one GPU share its memory. */
uint32_t lc_peers_exchange_ctas(const struct lc_peers *peers)
{
    uint32_t sums = lc_peers_ctas(peers, LK_SLOTS_MAX), share = share_of(peers);
    uint32_t beside = peers->share.kept[LC_GRID_SUMS] / peers->sharers; /* in a graph, perhaps */

    if (is_wide(peers)) /* half of what there is for either */
        return without_idle(peers, smallest(peers->rings.shape.channels / peers->sharers,
                                            peers->facts.most / peers->sharers,
                                            share / peers->facts.kernels));
    if (beside < sums)
        beside = sums;
    if (beside >= share)
        return 1;
    if (peers->sharers > 1 || share < 2 * sums)
        return without_idle(peers, sums < share - beside ? sums : share - beside);
    return without_idle(peers, smallest(peers->rings.shape.channels,
                                        allowed(peers, EXCHANGE_CTAS_MOST), share - beside));
}

/* Beside a captured exchange sums may run, as large as beside one that is not. */
static void keep(struct lc_peers *peers, enum lc_grid grid, uint32_t ctas)
{
    uint32_t sums = grid == LC_GRID_SUMS ? ctas : lc_peers_ctas(peers, LK_SLOTS_MAX);

    lc_budget_keep(&peers->share, LC_GRID_SUMS, sums * peers->sharers);
    if (grid == LC_GRID_EXCHANGES)
        lc_budget_keep(&peers->share, grid, ctas * peers->sharers);
}

/* Grids that wait for each other have to be resident together, also those that were launched while there were fewer
 * communicators. What is usual leaves a quarter of the device, in which that finds room; what a job has more may leave nothing,
 * so that each communicator keeps what its largest call has had, as much for either kind, and later ones get the rest. */
uint32_t lc_peers_take(struct lc_peers *peers, enum lc_grid grid, uint32_t ctas, bool captured)
{
    if (is_wide(peers))
        ctas = lc_budget_take(&peers->share, ctas, peers->sharers, peers->facts.kernels,
                              room_on(peers));
    else if (captured)
        keep(peers, grid, ctas);
    if (peers->facts.most && peers->ledger)
        lc_ledger_larger(&peers->ledger->ring_ctas, ctas);
    return ctas;
}
