/* SPDX-License-Identifier: Apache-2.0
 *
 * Lanes: everything posted makes progress whenever the executor waits for anything. */
#include "tests/rig/nccl_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEADER_MAGIC 0x6763726cu
#define SLICE_MS     200 /* how often a sleeper looks for dead peers */

static void queue_push(struct rig_queue *queue, void *ptr, size_t bytes,
                       const struct rig_header *header)
{
    struct rig_segment *segment;

    if (queue->at == queue->count)
        queue->at = queue->count = 0;
    queue->list = rig_grow(queue->list, queue->count, &queue->room, sizeof(*queue->list));
    segment = &queue->list[queue->count++];
    *segment = (struct rig_segment){ .ptr = ptr, .bytes = bytes, .has_header = header != NULL };
    if (header) {
        segment->header = *header;
        segment->header.magic = HEADER_MAGIC;
    }
}

static bool queue_is_empty(const struct rig_queue *queue)
{
    return queue->at == queue->count;
}

void rig_lane_post_out(ncclComm_t comm, int peer, const void *ptr, size_t bytes,
                       const struct rig_header *header)
{
    queue_push(&comm->lanes[peer].out, (void *)ptr, bytes, header);
}

void rig_lane_post_in(ncclComm_t comm, int peer, void *ptr, size_t bytes,
                      const struct rig_header *header)
{
    queue_push(&comm->lanes[peer].in, ptr, bytes, header);
}

/* Copies up to bytes into the ring; returns how many. */
static size_t ring_write(struct rig_ring *ring, size_t size, const char *from, size_t bytes)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    size_t room = size - (size_t)(head - tail), at = head % size, first;

    if (bytes > room)
        bytes = room;
    if (bytes == 0)
        return 0;
    first = bytes < size - at ? bytes : size - at;
    memcpy(ring->data + at, from, first);
    if (bytes > first)
        memcpy(ring->data, from + first, bytes - first);
    atomic_store_explicit(&ring->head, head + bytes, memory_order_release);
    return bytes;
}

static size_t ring_read(struct rig_ring *ring, size_t size, char *to, size_t bytes)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    size_t there = (size_t)(head - tail), at = tail % size, first;

    if (bytes > there)
        bytes = there;
    if (bytes == 0)
        return 0;
    first = bytes < size - at ? bytes : size - at;
    memcpy(to, ring->data + at, first);
    if (bytes > first)
        memcpy(to + first, ring->data, bytes - first);
    atomic_store_explicit(&ring->tail, tail + bytes, memory_order_release);
    return bytes;
}

static void describe(const struct rig_header *header, char *text, size_t bytes)
{
    if (header->kind == RIG_SEND)
        snprintf(text, bytes, "a message of %llu bytes", (unsigned long long)header->count);
    else
        snprintf(text, bytes, "%s number %llu (%llu x %s, op %u, root %d)",
                 rig_kind_name((int)header->kind), (unsigned long long)header->seq,
                 (unsigned long long)header->count, rig_type_name((int)header->type), header->redop,
                 header->root);
}

static void check_header(ncclComm_t comm, int peer, const struct rig_header *want,
                         const struct rig_header *got)
{
    char wanted[128], came[128];

    if (got->magic == HEADER_MAGIC && got->kind == want->kind && got->seq == want->seq &&
        got->count == want->count && got->type == want->type && got->redop == want->redop &&
        got->root == want->root)
        return;
    if (got->magic != HEADER_MAGIC)
        lcrig_fail("rank %d lost the frame of what rank %d sends", comm->rank, peer);
    describe(want, wanted, sizeof(wanted));
    describe(got, came, sizeof(came));
    lcrig_fail("mismatch: rank %d runs %s, rank %d runs %s", comm->rank, wanted, peer, came);
}

static bool move_out(ncclComm_t comm, int peer)
{
    struct rig_lane *lane = &comm->lanes[peer];
    struct rig_queue *queue = &lane->out;
    size_t size = comm->clique->ring_bytes, moved;
    bool progress = false;

    while (!queue_is_empty(queue)) {
        struct rig_segment *segment = &queue->list[queue->at];
        size_t header = segment->has_header ? sizeof(segment->header) : 0;

        if (queue->done < header)
            moved = ring_write(lane->tx, size, (char *)&segment->header + queue->done,
                               header - queue->done);
        else
            moved = ring_write(lane->tx, size, segment->ptr + (queue->done - header),
                               segment->bytes - (queue->done - header));
        queue->done += moved;
        progress |= moved > 0;
        if (queue->done == header + segment->bytes) {
            queue->at++;
            queue->done = 0;
            progress = true;
        } else if (moved == 0) {
            break;
        }
    }
    return progress;
}

static bool move_in(ncclComm_t comm, int peer)
{
    struct rig_lane *lane = &comm->lanes[peer];
    struct rig_queue *queue = &lane->in;
    size_t size = comm->clique->ring_bytes, moved;
    bool progress = false;

    while (!queue_is_empty(queue)) {
        struct rig_segment *segment = &queue->list[queue->at];
        size_t header = segment->has_header ? sizeof(segment->header) : 0;

        if (queue->done < header) {
            moved = ring_read(lane->rx, size, (char *)&lane->got + queue->done,
                              header - queue->done);
            if (queue->done + moved == header)
                check_header(comm, peer, &segment->header, &lane->got);
        } else {
            moved = ring_read(lane->rx, size, segment->ptr + (queue->done - header),
                              segment->bytes - (queue->done - header));
        }
        queue->done += moved;
        progress |= moved > 0;
        if (queue->done == header + segment->bytes) {
            queue->at++;
            queue->done = 0;
            progress = true;
        } else if (moved == 0) {
            break;
        }
    }
    return progress;
}

static bool pump(ncclComm_t comm)
{
    bool progress = false;

    for (int i = 1; i < comm->n; i++) {
        int peer = (comm->rank + i) % comm->n;
        bool moved = move_out(comm, peer);

        moved |= move_in(comm, peer);
        if (moved)
            rig_bell_ring(comm->clique, peer);
        progress |= moved;
    }
    return progress;
}

static bool is_drained(ncclComm_t comm, int what)
{
    if (what >= 0)
        return queue_is_empty(&comm->lanes[what].in);
    for (int peer = 0; peer < comm->n; peer++) {
        if (!queue_is_empty(&comm->lanes[peer].in))
            return false;
        if (what == RIG_DRAIN_ALL && !queue_is_empty(&comm->lanes[peer].out))
            return false;
    }
    return true;
}

/* Called without progress only, so what a peer sent before it went away is still taken. */
static bool is_broken(ncclComm_t comm)
{
    return atomic_load(&comm->stop) || atomic_load(&comm->clique->shared->broken) ||
           atomic_load(&comm->clique->shared->revoked);
}

/* Peers that we still need: are they there? Returns true if the communicator broke. */
static bool look_for_dead(ncclComm_t comm)
{
    for (int peer = 0; peer < comm->n; peer++) {
        struct rig_lane *lane = &comm->lanes[peer];

        if (queue_is_empty(&lane->out) && queue_is_empty(&lane->in))
            continue;
        if (rig_rank_is_dead(comm->clique, peer)) {
            fprintf(stderr, "rig: rank %d: the process of rank %d is gone\n", comm->rank, peer);
            rig_clique_break(comm->clique, peer);
            return true;
        }
        if (atomic_load(&comm->clique->shared->slot[peer].departed) && !pump(comm) &&
            !is_broken(comm))
            lcrig_fail("rank %d destroyed the communicator, but rank %d still waits for it", peer,
                       comm->rank);
    }
    return false;
}

static void say_stuck(ncclComm_t comm)
{
    for (int peer = 0; peer < comm->n; peer++) {
        struct rig_lane *lane = &comm->lanes[peer];

        if (!queue_is_empty(&lane->in))
            fprintf(stderr, "rig: rank %d waits for rank %d since %d s\n", comm->rank, peer,
                    rig_timeout_ms() / 1000);
        if (!queue_is_empty(&lane->out))
            fprintf(stderr, "rig: rank %d cannot send to rank %d since %d s\n", comm->rank, peer,
                    rig_timeout_ms() / 1000);
    }
}

bool rig_lane_drain(ncclComm_t comm, int what)
{
    struct lc_deadline patience = { 0 };
    struct lc_deadline next_look = { 0 };

    while (!is_drained(comm, what)) {
        uint32_t seen = atomic_load(&comm->clique->shared->slot[comm->rank].bell);

        if (pump(comm))
            continue;
        if (is_broken(comm) ||
            (next_look.at_ns && lc_deadline_passed(next_look) && look_for_dead(comm))) {
            atomic_store(&comm->broken, true);
            if (!atomic_load(&comm->stop))
                rig_comm_set_error(comm, ncclRemoteError);
            rig_lanes_clear(comm, false);
            return false;
        }
        if (!next_look.at_ns || lc_deadline_passed(next_look))
            next_look = lc_deadline_in_ms(SLICE_MS);
        if (!patience.at_ns)
            patience = lc_deadline_in_ms(rig_timeout_ms());
        if (lc_deadline_passed(patience)) {
            say_stuck(comm);
            patience.at_ns = INT64_MAX; /* a device waits for ever; once is enough */
        }
        rig_bell_wait(comm->clique, comm->rank, seen, SLICE_MS);
    }
    return true;
}

void rig_lanes_clear(ncclComm_t comm, bool release)
{
    for (int peer = 0; comm->lanes && peer < comm->n; peer++) {
        struct rig_queue *queues[] = { &comm->lanes[peer].out, &comm->lanes[peer].in };

        for (int i = 0; i < 2; i++) {
            queues[i]->at = queues[i]->count = queues[i]->done = 0;
            if (release)
                free(queues[i]->list);
        }
    }
}
