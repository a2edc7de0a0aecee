/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host_rings_internal.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

const uint32_t lk_backend_ranks = LK_RANKS_MAX;

unsigned int lk_bell_nap_ms = 5;
bool lk_host_cta_threads;

/* ---- the doorbell ----
 * Two words of the owner's segment: how often it was rung, by anybody, and how many of the owner's threads sleep, by the
 * owner. All accesses are sequentially consistent: whoever rings either sees the sleeper or is heard by it. */

struct bell {
    uint32_t rings;
    uint32_t sleepers;
};

static struct bell *bell_of(const struct lk_ring_head *head, uint32_t rank)
{
    return (struct bell *)((uintptr_t)head->rings.segments[rank] + LK_DOORBELL_OFFSET);
}

void lk_bell_ring(const struct lk_ring_head *head, uint32_t rank)
{
    struct bell *bell = bell_of(head, rank);

    __atomic_fetch_add(&bell->rings, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&bell->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &bell->rings, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t lk_bell_heard(const struct lk_ring_head *head)
{
    return __atomic_load_n(&bell_of(head, head->rings.rank)->rings, __ATOMIC_SEQ_CST);
}

bool lk_aborted(const struct lk_ring_head *head)
{
    if (__atomic_load_n(head->rings.abort, __ATOMIC_ACQUIRE) == 0)
        return false;
    __atomic_store_n(head->rings.abort, 2, __ATOMIC_RELEASE);
    return true;
}

/* Nobody rings for an abort: it is seen when the nap is over. */
bool lk_bell_sleep(const struct lk_ring_head *head, uint32_t heard)
{
    struct bell *bell = bell_of(head, head->rings.rank);
    struct timespec nap = {
        .tv_sec = lk_bell_nap_ms / 1000,
        .tv_nsec = lk_bell_nap_ms % 1000 * 1000000L,
    };

    if (lk_aborted(head))
        return false;
    __atomic_fetch_add(&bell->sleepers, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &bell->rings, FUTEX_WAIT, heard, &nap, NULL, 0);
    __atomic_fetch_sub(&bell->sleepers, 1, __ATOMIC_SEQ_CST);
    return !lk_aborted(head);
}

/* ---- slots ---- */

static const struct lk_ring_shape *shape_of(const struct lk_cta *cta)
{
    return &cta->head->rings.shape;
}

static void *mine(const struct lk_cta *cta)
{
    return cta->head->rings.segments[cta->head->rings.rank];
}

/* Messages of a unit that this rank has sent, and taken out. */
static uint64_t *sent(const struct lk_cta *cta, uint32_t leg, uint32_t dst, uint32_t channel)
{
    return lk_word_at(cta->head->rings.state, lk_sent_offset(shape_of(cta), leg, dst, channel));
}

static uint64_t *taken(const struct lk_cta *cta, uint32_t leg, uint32_t src, uint32_t channel)
{
    return lk_word_at(cta->head->rings.state, lk_taken_offset(shape_of(cta), leg, src, channel));
}

/* Messages of a unit that its reader has not taken out, as far as it has said. */
static uint64_t under_way(const struct lk_cta *cta, uint32_t leg, uint32_t dst, uint32_t channel)
{
    const struct lk_ring_shape *shape = shape_of(cta);
    uint64_t credit = lk_word_load(
        lk_word_at(mine(cta), lk_credit_offset(shape, leg, dst, channel)));

    return *sent(cta, leg, dst, channel) - credit;
}

bool lk_slot_credit(const struct lk_cta *cta, uint32_t leg, uint32_t dst, uint32_t channel)
{
    return under_way(cta, leg, dst, channel) < lk_leg_slots(shape_of(cta), leg);
}

uint32_t lk_slot_live(const struct lk_cta *cta, uint32_t bytes)
{
    uint32_t live = 0;

    for (uint32_t at = 0; at < bytes; at += LK_PACK_BYTES) {
        uint64_t words[2];

        memcpy(words, cta->wire + at, sizeof(words));
        if (words[0] | words[1])
            live |= UINT32_C(1) << at / LK_GRANULE;
    }
    return live;
}

static uint32_t granule_end(uint32_t at, uint32_t bytes)
{
    return at + LK_GRANULE < bytes ? at + LK_GRANULE : bytes;
}

void lk_slot_send(struct lk_cta *cta, uint32_t leg, uint32_t dst, uint32_t channel, uint32_t bytes,
                  uint32_t live)
{
    const struct lk_ring_shape *shape = shape_of(cta);
    void *theirs = cta->head->rings.segments[dst];
    uint32_t me = cta->head->rings.rank;
    uint64_t message = ++*sent(cta, leg, dst, channel);
    uint32_t slot = (uint32_t)((message - 1) % lk_leg_slots(shape, leg));
    uint8_t *payload = (uint8_t *)lk_word_at(theirs, lk_slot_offset(shape, leg, me, channel, slot));

    for (uint32_t at = 0; at < bytes; at += LK_GRANULE) {
        uint32_t size = granule_end(at, bytes) - at;

        if (live >> at / LK_GRANULE & 1) {
            memcpy(payload + at, cta->wire + at, size);
            cta->counts.bytes_sent += size;
        } else {
            cta->counts.bytes_elided += size;
        }
    }
    lk_word_store(lk_word_at(theirs, lk_words_offset(shape, leg, me, channel)) + slot,
                  lk_slot_word(message, live));
    cta->counts.bytes_sent += sizeof(uint64_t);
    lk_bell_ring(cta->head, dst);
}

bool lk_slot_arrived(const struct lk_cta *cta, uint32_t leg, uint32_t src, uint32_t channel,
                     uint64_t *out)
{
    const struct lk_ring_shape *shape = shape_of(cta);
    uint64_t before = *taken(cta, leg, src, channel);
    uint64_t *words = lk_word_at(mine(cta), lk_words_offset(shape, leg, src, channel));
    uint64_t word = lk_word_load(words + before % lk_leg_slots(shape, leg));

    *out = word;
    return (uint32_t)word == (uint32_t)(before + 1);
}

void lk_slot_take(struct lk_cta *cta, uint32_t leg, uint32_t src, uint32_t channel, uint64_t word,
                  uint32_t bytes)
{
    const struct lk_ring_shape *shape = shape_of(cta);
    uint64_t *count = taken(cta, leg, src, channel);
    uint32_t slot = (uint32_t)(*count % lk_leg_slots(shape, leg));
    const uint8_t *payload = (const uint8_t *)lk_word_at(
        mine(cta), lk_slot_offset(shape, leg, src, channel, slot));
    uint64_t *credit = lk_word_at(cta->head->rings.segments[src],
                                  lk_credit_offset(shape, leg, cta->head->rings.rank, channel));

    for (uint32_t at = 0; at < bytes; at += LK_GRANULE) {
        uint32_t size = granule_end(at, bytes) - at;

        if (word >> (32 + at / LK_GRANULE) & 1)
            memcpy(cta->in + at, payload + at, size);
        else
            memset(cta->in + at, 0, size);
    }
    lk_word_store(credit, ++*count);
    cta->counts.bytes_sent += sizeof(uint64_t);
    lk_bell_ring(cta->head, src);
}

/* ---- tiles ---- */

static bool gathers(const struct lk_cta *cta)
{
    return cta->head->work == LK_WORK_ALL_REDUCE;
}

/* Tiles of `rank` that travel in the channel. */
static uint32_t tiles_in(const struct lk_cta *cta, uint32_t rank, uint32_t channel)
{
    const struct lk_ring_shape *shape = shape_of(cta);
    uint64_t tiles = cta->job->tiles;

    if (gathers(cta))
        tiles = lk_tiles_of(shape, tiles, rank);
    return (uint32_t)lk_tiles_in(shape, tiles, channel);
}

/* Tile number `count` of those. */
static struct lk_span tile_of(const struct lk_cta *cta, uint32_t rank, uint32_t channel,
                              uint32_t count)
{
    const struct lk_ring_shape *shape = shape_of(cta);
    uint64_t tile = channel + (uint64_t)count * shape->channels;
    uint64_t packs = (uint64_t)cta->head->tile_granules * (LK_GRANULE / LK_PACK_BYTES);
    uint64_t first;

    if (gathers(cta))
        tile = tile * shape->ranks + rank;
    first = tile * packs;
    if (packs > cta->head->packs - first)
        packs = cta->head->packs - first;
    return (struct lk_span){ .first = (uint32_t)first, .packs = (uint32_t)packs };
}

/* One contribution to a tile of `peer`'s. False: there is none left, or no credit. A peer that has taken out one of this
 * call is in it; before that it is not for want of slots that there is none. */
static bool send_one(struct lk_cta *cta, uint32_t channel, uint32_t peer)
{
    struct lk_channel *at = &cta->job->channels[channel];
    uint32_t *done = &at->sent[peer];
    struct lk_span span;
    uint64_t waiting;
    uint32_t bytes;

    if (*done == tiles_in(cta, peer, channel))
        return false;
    waiting = under_way(cta, LK_SCATTER, peer, channel);
    if (waiting >= lk_leg_slots(shape_of(cta), LK_SCATTER)) {
        at->waits[peer] |= waiting < *done;
        return false;
    }
    cta->waited += at->waits[peer];
    at->waits[peer] = false;
    span = tile_of(cta, peer, channel, (*done)++);
    lk_span_round(cta, span, peer * !gathers(cta));
    bytes = span.packs * LK_PACK_BYTES;
    lk_slot_send(cta, LK_SCATTER, peer, channel, bytes, lk_slot_live(cta, bytes));
    return true;
}

/* One result from `peer`. */
static bool take_one(struct lk_cta *cta, uint32_t channel, uint32_t peer)
{
    uint32_t *done = &cta->job->channels[channel].taken[peer];
    struct lk_span span;
    uint64_t word;

    if (!gathers(cta) || *done == tiles_in(cta, peer, channel) ||
        !lk_slot_arrived(cta, LK_GATHER, peer, channel, &word))
        return false;
    span = tile_of(cta, peer, channel, (*done)++);
    lk_slot_take(cta, LK_GATHER, peer, channel, word, span.packs * LK_PACK_BYTES);
    lk_span_store(cta, span, cta->in);
    return true;
}

static bool can_reduce(const struct lk_cta *cta, uint32_t channel)
{
    uint32_t me = cta->head->rings.rank;
    uint64_t word;

    for (uint32_t peer = 0; peer < shape_of(cta)->ranks; peer++) {
        if (peer == me)
            continue;
        if (!lk_slot_arrived(cta, LK_SCATTER, peer, channel, &word) ||
            (gathers(cta) && !lk_slot_credit(cta, LK_GATHER, peer, channel)))
            return false;
    }
    return true;
}

/* One own tile: everybody keeps the value that was rounded once, the owner too. */
static bool reduce_one(struct lk_cta *cta, uint32_t channel)
{
    uint32_t *done = &cta->job->channels[channel].reduced;
    uint32_t me = cta->head->rings.rank, ranks = shape_of(cta)->ranks;
    struct lk_span span;
    uint32_t bytes, live;

    if (*done == tiles_in(cta, me, channel) || !can_reduce(cta, channel))
        return false;
    span = tile_of(cta, me, channel, (*done)++);
    bytes = span.packs * LK_PACK_BYTES;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        uint64_t word;

        if (rank == me) {
            lk_span_own(cta, span, me * !gathers(cta), rank > 0);
            continue;
        }
        lk_slot_arrived(cta, LK_SCATTER, rank, channel, &word);
        lk_slot_take(cta, LK_SCATTER, rank, channel, word, bytes);
        lk_span_add(cta, span, cta->in, rank > 0);
    }
    lk_span_result(cta, span, me * !gathers(cta));
    lk_span_store(cta, span, cta->wire);
    live = lk_slot_live(cta, bytes);
    for (uint32_t peer = 0; peer < ranks && gathers(cta); peer++) {
        if (peer != me)
            lk_slot_send(cta, LK_GATHER, peer, channel, bytes, live);
    }
    return true;
}

/* ---- executions ---- */

/* Does what can be done in a channel. True: something was. */
static bool step(struct lk_cta *cta, uint32_t channel)
{
    uint32_t me = cta->head->rings.rank, ranks = shape_of(cta)->ranks;
    bool moved = false;

    for (uint32_t i = 1; i < ranks; i++)
        moved |= take_one(cta, channel, (me + i) % ranks);
    moved |= reduce_one(cta, channel);
    for (uint32_t i = 1; i < ranks; i++)
        moved |= send_one(cta, channel, (me + i) % ranks);
    return moved;
}

static bool finished(const struct lk_cta *cta, uint32_t channel)
{
    const struct lk_channel *at = &cta->job->channels[channel];
    uint32_t me = cta->head->rings.rank;

    for (uint32_t rank = 0; rank < shape_of(cta)->ranks; rank++) {
        uint32_t tiles = tiles_in(cta, rank, channel);

        if (rank == me ? at->reduced != tiles
                       : at->sent[rank] != tiles || (gathers(cta) && at->taken[rank] != tiles))
            return false;
    }
    return true;
}

static void run_slots(struct lk_cta *cta)
{
    uint32_t channels = shape_of(cta)->channels;
    bool moved, all;

    do {
        uint32_t heard = lk_bell_heard(cta->head);

        moved = false;
        all = true;
        for (uint32_t channel = cta->cta; channel < channels; channel += cta->ctas) {
            moved |= step(cta, channel);
            all &= finished(cta, channel);
        }
        if (!all && !moved && !lk_bell_sleep(cta->head, heard))
            return;
    } while (!all && !lk_aborted(cta->head));
}

void lk_cta_end(const struct lk_cta *cta)
{
    struct lk_ring_state *state = cta->head->rings.state;

    __atomic_fetch_add(&state->counts.bytes_sent, cta->counts.bytes_sent, __ATOMIC_RELAXED);
    __atomic_fetch_add(&state->counts.bytes_elided, cta->counts.bytes_elided, __ATOMIC_RELAXED);
    __atomic_fetch_add(&state->counts.exchange_sent, cta->counts.exchange_sent, __ATOMIC_RELAXED);
    __atomic_fetch_add(&state->counts.exchange_elided, cta->counts.exchange_elided,
                       __ATOMIC_RELAXED);
    if (cta->waited > LK_WAITS_ALLOWED && cta->head->rings.too_few)
        __atomic_store_n(cta->head->rings.too_few, 1, __ATOMIC_RELAXED);
}

static void run_cta(void *arg, uint32_t number, uint32_t ctas)
{
    struct lk_job *job = arg;
    struct lk_cta cta = { .job = job, .head = &job->launch.head, .cta = number, .ctas = ctas };

    if (cta.head->work == LK_WORK_LINES)
        lk_lines_run(&cta);
    else
        run_slots(&cta);
    lk_cta_end(&cta);
}

struct starter {
    void *job;
    void (*body)(void *job, uint32_t cta, uint32_t ctas);
    uint32_t cta;
    uint32_t ctas;
    pthread_t thread;
    bool running;
};

static void *cta_thread(void *arg)
{
    const struct starter *starter = arg;

    starter->body(starter->job, starter->cta, starter->ctas);
    return NULL;
}

void lk_run_ctas(void *job, uint32_t ctas, void (*body)(void *job, uint32_t cta, uint32_t ctas))
{
    struct starter starters[LK_CHANNELS_MAX];

    if (!lk_host_cta_threads) {
        body(job, 0, 1);
        return;
    }
    for (uint32_t i = 0; i < ctas; i++) {
        starters[i] = (struct starter){ .job = job, .body = body, .cta = i, .ctas = ctas };
        starters[i].running = !pthread_create(&starters[i].thread, NULL, cta_thread, &starters[i]);
    }
    for (uint32_t i = 0; i < ctas; i++) {
        if (starters[i].running)
            pthread_join(starters[i].thread, NULL);
        else
            body(job, i, ctas);
    }
}

static void declare_use(const struct lk_job *job)
{
    const struct lk_ring_head *head = &job->launch.head;
    uint64_t bytes = head->type == LK_FP32 ? 4 : 2;
    uint64_t parts = head->work == LK_WORK_REDUCE_SCATTER ? head->rings.shape.ranks : 1;

    for (uint32_t i = 0; i < head->n; i++) {
        const struct lk_ring_entry *entry = &job->launch.entries[i];
        uint64_t stride = head->stride ? head->stride : entry->count;

        lk_host_use(entry->in, (stride * (parts - 1) + entry->count) * bytes, false);
        lk_host_use(entry->out, entry->count * bytes, true);
    }
    if (head->residual)
        lk_host_use((uintptr_t)head->residual,
                    parts * head->packs * lk_pack_elements(head->wire) * sizeof(float), true);
}

void lk_use_units(const struct lk_rings *rings, uint32_t leg)
{
    size_t first = lk_sent_offset(&rings->shape, leg, 0, 0);

    lk_host_use((uintptr_t)lk_word_at(rings->state, first), sizeof(uint64_t), true);
}

static void run_job(void *arg)
{
    struct lk_job *job = arg;
    const struct lk_ring_head *head = &job->launch.head;
    uint64_t granules = ((uint64_t)head->packs * LK_PACK_BYTES + LK_GRANULE - 1) / LK_GRANULE;

    job->pre = lk_host_scale(head->pre, head->pre_type, head->pre_pointer);
    job->index = head->index;
    if (head->device_offset) {
        lk_host_use((uintptr_t)head->device_offset, sizeof(uint64_t), false);
        job->index += *head->device_offset;
    }
    job->tiles = (granules + head->tile_granules - 1) / head->tile_granules;
    memset(job->channels, 0, head->rings.shape.channels * sizeof(*job->channels));
    declare_use(job);
    lk_use_units(&head->rings, LK_SCATTER);
    lk_run_ctas(job, head->ctas, run_cta);
}

static void free_job(void *arg)
{
    struct lk_job *job = arg;

    free(job->channels);
    free(job);
}

int lk_run_rings(const struct lk_ring_launch *launch, void *stream)
{
    static const char *const names[] = {
        [LK_WORK_ALL_REDUCE] = "lk_rings_all_reduce",
        [LK_WORK_REDUCE_SCATTER] = "lk_rings_reduce_scatter",
        [LK_WORK_LINES] = "lk_lines_all_reduce",
    };
    const struct lk_ring_head *head = &launch->head;
    size_t bytes = offsetof(struct lk_ring_launch, entries) +
                   head->n * sizeof(struct lk_ring_entry);
    struct lk_job *job = malloc(offsetof(struct lk_job, launch) + bytes);

    if (!job)
        return -ENOMEM;
    job->channels = calloc(head->rings.shape.channels, sizeof(*job->channels));
    if (!job->channels) {
        free(job);
        return -ENOMEM;
    }
    memcpy(&job->launch, launch, bytes);
    return lk_host_enqueue(stream, names[head->work], run_job, free_job, job);
}
