/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/sizing.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/peers.h"
#include "interpose/process.h"
#include "interpose/reduce.h"
#include "interpose/route.h"
#include "kernels/ring_layout.h"

#define LOOK_EVERY 16 /* calls, of whatever kind: a look takes a lock for each rank */

void lc_sizing_note(struct lc_sizing *sizing, size_t bytes)
{
    sizing->calls++;
    sizing->calm++;
    if (bytes > sizing->largest)
        sizing->largest = bytes;
}

uint32_t lc_sizing_more(uint32_t slots, uint32_t most, size_t grow)
{
    size_t percent = grow < 1600 ? grow : 1600; /* that is too much of anything */
    uint32_t least = slots + (uint32_t)((slots * percent + 99) / 100);
    uint32_t more = least > 2 * slots ? least : 2 * slots;

    if (least == slots)
        least++;
    if (more > LK_SLOTS_MAX)
        more = LK_SLOTS_MAX;
    more = more < most ? more : most;
    return more < least ? 0 : more;
}

/* A step's constants. */
struct sizing {
    struct lc_comm *comm;
    struct lc_sizing *state;
    struct lc_peers *peers;
    const struct lk_rings *rings; /* in use */
    uint32_t generation, rank;
};

static size_t slot_bytes(const struct sizing *s)
{
    return (size_t)s->rings->shape.channels * LK_SLOT_BYTES;
}

/* As many as the largest message could fill, and some. */
static uint32_t most_slots(const struct sizing *s)
{
    size_t bytes = s->state->largest / 100 * lc_process_config()->staging_factor;
    size_t slots = (bytes + slot_bytes(s) - 1) / slot_bytes(s);

    return slots < LK_SLOTS_MAX ? (uint32_t)slots : LK_SLOTS_MAX;
}

/* Limits of this rank's, once. */
static void say_enough(const struct sizing *s, const char *why)
{
    if (!s->state->said_enough)
        lc_info("rank %u of %u: calls wait for slots, but rings stay at %u: %s", s->rank,
                s->rings->shape.ranks, s->rings->shape.slots, why);
    s->state->said_enough = true;
}

/* Slots that would be better, 0: none. The cap leaves room for fewer than twice as many, perhaps. */
static uint32_t better(const struct sizing *s)
{
    const struct lc_config *config = lc_process_config();
    uint32_t slots = s->rings->shape.slots;
    uint32_t more = lc_sizing_more(slots, most_slots(s), config->staging_grow);

    if (!more) {
        say_enough(s, slots == LK_SLOTS_MAX ? "there are no larger ones"
                                            : "no message is larger than they are");
        return 0;
    }
    while (more && !lc_peers_has(s->peers, more) && !lc_peers_fit(s->peers, more))
        more = lc_sizing_more(slots, more - 1, config->staging_grow);
    if (!more)
        say_enough(s, "LOONGCOMM_STAGING_MAX leaves no room for more");
    return more;
}

/* What this rank would like: a number of slots, its present one to keep it, or 0. */
static uint32_t wish(const struct sizing *s)
{
    const struct lc_config *config = lc_process_config();
    uint32_t more;

    if (!lc_peers_had_too_few(s->peers, s->generation) || config->staging_grow == 0)
        return 0;
    s->state->calm = 0;
    if (s->state->calls < config->staging_warmup)
        return 0;
    more = better(s);
    return more ? more : s->rings->shape.slots;
}

static void begin(const struct sizing *s, uint32_t slots)
{
    s->state->change++;
    s->state->slots = slots;
    s->state->wished = false;
    s->state->stage = lc_peers_change(s->peers, s->state->change, slots) ? LC_SIZING_UNDER_WAY
                                                                         : LC_SIZING_ENDED;
}

/* Rank 0: the most that anybody wishes, or fewer if nobody has missed any for long. */
static uint32_t decide(const struct sizing *s, uint32_t own)
{
    uint64_t calm = lc_process_config()->staging_calm;
    uint32_t most = own, slots;
    bool wished = own != 0;

    for (uint32_t r = 1; r < s->rings->shape.ranks; r++) {
        if (lc_peers_hear(s->peers, r, s->state->change + 1, LC_PEERS_WISH, &slots) != 0)
            continue;
        wished = true;
        most = slots > most ? slots : most;
    }
    if (!wished)
        return calm && s->state->calm >= calm ? lc_peers_smaller(s->peers, s->rings->shape.slots)
                                              : 0;
    if (most <= s->rings->shape.slots)
        return 0;
    if (most == own || lc_peers_has(s->peers, most) || lc_peers_fit(s->peers, most))
        return most;
    say_enough(s, "LOONGCOMM_STAGING_MAX leaves no room for more");
    return 0;
}

static void end(const struct sizing *s)
{
    say_enough(s, "not all ranks share memory with the process that hosts their agreement");
    s->state->stage = LC_SIZING_ENDED;
}

/* Rank 0 orders nothing before all have said that they can: memory for what could never be agreed on would be spent for
 * good. What a rank can is settled with the first commit. */
static bool all_able(const struct sizing *s)
{
    bool able = lc_agree_can_change(s->comm->agree);
    uint32_t said;

    if (s->rank != 0 && !s->state->asked)
        s->state->asked = lc_peers_say(s->peers, 1, LC_PEERS_ABLE, able ? 1 : 2) == 0;
    for (uint32_t r = 1; able && s->rank == 0 && !s->state->asked && r < s->rings->shape.ranks;
         r++) {
        if (lc_peers_hear(s->peers, r, 1, LC_PEERS_ABLE, &said) != 0)
            return false; /* not yet */
        able = said == 1;
    }
    if (!able)
        end(s);
    else if (s->rank == 0)
        s->state->asked = true;
    return able;
}

static void look(const struct sizing *s)
{
    uint32_t next = s->state->change + 1, own = wish(s), slots;

    if (next > LC_CHANGES) {
        s->state->stage = LC_SIZING_ENDED;
        return;
    }
    if (!all_able(s))
        return;
    if (s->rank == 0) {
        slots = decide(s, own);
        if (slots && lc_peers_say(s->peers, next, LC_PEERS_ORDER, slots) == 0)
            begin(s, slots);
        return;
    }
    if (own && !s->state->wished)
        s->state->wished = lc_peers_say(s->peers, next, LC_PEERS_WISH, own) == 0;
    if (lc_peers_hear(s->peers, 0, next, LC_PEERS_ORDER, &slots) == 0)
        begin(s, slots);
}

static void set_up(const struct sizing *s)
{
    struct lc_peers *later = lc_peers_of(s->peers, s->state->change);

    if (!lc_peers_step(later))
        return;
    s->state->stage = lc_peers_are_ready(later) &&
                              lc_agree_vote_change(s->comm->agree, s->state->change)
                          ? LC_SIZING_VOTED
                          : LC_SIZING_ENDED;
    __atomic_store_n(&s->comm->ledger.ring_bytes, lc_peers_all_bytes(s->peers), __ATOMIC_RELAXED);
}

/* What was voted for has become true some calls ago. */
static void settle(const struct sizing *s)
{
    struct lc_ledger *ledger = &s->comm->ledger;

    lc_info("rank %u of %u: rings of %zu KB in peers' memory from now on, %u slots", s->rank,
            s->rings->shape.ranks, lc_peers_bytes(s->peers, s->generation) >> 10,
            s->rings->shape.slots);
    lc_add(&ledger->ring_changes, 1);
    __atomic_store_n(&ledger->ring_used, lc_peers_bytes(s->peers, s->generation), __ATOMIC_RELAXED);
    (void)lc_peers_had_too_few(s->peers, s->generation); /* in a use of long ago */
    s->state->calm = 0;
    s->state->said_enough = false;
    s->state->stage = LC_SIZING_IDLE;
}

void lc_sizing_step(struct lc_comm *comm, cudaStream_t stream)
{
    struct lc_reducer *reducer = comm->reducer;
    struct sizing s = { .comm = comm,
                        .state = &reducer->sizing,
                        .peers = reducer->peers,
                        .generation = lc_agree_generation(comm->agree),
                        .rank = (uint32_t)comm->facts.rank };
    struct lc_guard guard;

    if (s.state->stage == LC_SIZING_ENDED ||
        (s.state->stage == LC_SIZING_IDLE && ++s.state->steps % LOOK_EVERY != 0))
        return;
    s.rings = lc_peers_rings(s.peers, s.generation);
    if (s.state->stage == LC_SIZING_VOTED) {
        if (s.generation == s.state->change)
            settle(&s);
        return;
    }
    if (lc_route_is_captured(reducer->backend, reducer->device, stream) ||
        !lc_guard_begin(reducer->backend, reducer->device, &guard))
        return; /* at a later call */
    if (s.state->stage == LC_SIZING_IDLE)
        look(&s);
    if (s.state->stage == LC_SIZING_UNDER_WAY)
        set_up(&s);
    lc_guard_end(reducer->backend, reducer->device, &guard);
}
