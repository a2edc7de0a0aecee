/* SPDX-License-Identifier: Apache-2.0
 *
 * Where everything lies in a segment and in the private state, and which tile of a call is whose: the one definition for
 * the CUDA kernels, their host twin, the tests and the model. Compiled by gcc and by nvcc. Ranks with another layout must
 * not agree: what changes here changes the version of the vote (interpose/agree.c).
 *
 * Tile space of a call. The list's tensors lie one behind another, each beginning at a multiple of LK_PACK_BYTES of the
 * wire's type, large ones of LK_GRANULE (lk_place), padded with zero bits. The space is cut into tiles of equal size, a
 * multiple of LK_GRANULE, of which the last may be shorter. All-reduce: tile t belongs to rank t % ranks and is that rank's
 * tile t / ranks. Reduce-scatter: every rank has a space of its own parts, all of one size. A rank's tile k travels in
 * channel k % channels.
 */
#ifndef LK_RING_LAYOUT_H
#define LK_RING_LAYOUT_H

#include "kernels/rings.h"
#include "kernels/value_internal.h"

#define LK_PACK_BYTES    16u  /* a pack belongs to one tensor and to one lane */
#define LK_WORD_BLOCK    256u /* the words of one unit, on cache lines of their own */
#define LK_SEGMENT_ALIGN 128u

enum lk_leg {
    LK_SCATTER,
    LK_GATHER,
    LK_EXCHANGE,
    LK_LEGS,
};

/* Front of a segment. `nonce` belongs to whoever sets up the mapping (LK_NONCE_OFFSET: word p is written by rank p); the
 * kernels leave it alone. The doorbell is the host twin's: a futex word that whoever wrote into the segment counts up, on
 * which the owner sleeps, and behind it how many of the owner's threads do. */
#define LK_NONCE_OFFSET    0u
#define LK_DOORBELL_OFFSET 2048u
#define LK_HEADER_BYTES    4096u

LK_INLINE size_t lk_units(const struct lk_ring_shape *s)
{
    return (size_t)LK_LEGS * s->ranks * s->channels;
}

/* Unit of leg `leg` between the segment's owner and `peer`. */
LK_INLINE size_t lk_unit(const struct lk_ring_shape *s, uint32_t leg, uint32_t peer,
                         uint32_t channel)
{
    return ((size_t)leg * s->ranks + peer) * s->channels + channel;
}

/* Slot words of what `src` sends to the owner; word i is slot i's. */
LK_INLINE size_t lk_words_offset(const struct lk_ring_shape *s, uint32_t leg, uint32_t src,
                                 uint32_t channel)
{
    return LK_HEADER_BYTES + lk_unit(s, leg, src, channel) * LK_WORD_BLOCK;
}

/* Credit of what the owner sends to `dst`, written by dst. */
LK_INLINE size_t lk_credit_offset(const struct lk_ring_shape *s, uint32_t leg, uint32_t dst,
                                  uint32_t channel)
{
    return LK_HEADER_BYTES + (lk_units(s) + lk_unit(s, leg, dst, channel)) * LK_WORD_BLOCK;
}

/* Lines that `src` sends to the owner in calls of one parity: 8 bytes for every 4 of data, which are the low half; the
 * high half is the call's number (lk_next_lines). Packs of a call lie in it as in slots of messages (lk_short_line). */
LK_INLINE size_t lk_lines_offset(const struct lk_ring_shape *s, uint32_t parity, uint32_t src)
{
    return LK_HEADER_BYTES + 2 * lk_units(s) * LK_WORD_BLOCK +
           ((size_t)parity * s->ranks + src) * 2 * s->line_bytes;
}

/* Slots of each unit of a leg. A reduction is under way in two legs at a time, an exchange in one, which therefore has
 * twice as many: what keeps the link busy is all that is under way. Where units are few, twice as many again, up to 16 MB
 * of a rank: the way of a slot there and of its credit back takes 13 us between two H200 over NVLink, 28 while the link is
 * full, and with 8 MB an exchange of 256 MB takes 455 us for 406, 208 at 90 % zeros for 155
 * (perf/results/h200-x2-nvlink). Between two ranks four times as many, up to 32 MB: tiles of zeros take their turn in slots,
 * too. One slot is as little as there can be, and stays so. */
#define LK_EXCHANGE_SLOTS_MAX 32u /* of two ranks; of others LK_SLOTS_MAX */
LK_INLINE uint32_t lk_leg_slots(const struct lk_ring_shape *s, uint32_t leg)
{
    uint32_t two = s->ranks == 2, max = two ? LK_EXCHANGE_SLOTS_MAX : LK_SLOTS_MAX;
    uint32_t twice = 2 * s->slots, most = s->slots > 1 ? (two ? 4 : 2) * twice : twice;
    uint32_t enough = ((two ? 32U : 16U) << 20) / LK_SLOT_BYTES / (s->channels * (s->ranks - 1));
    uint32_t slots = enough < twice ? twice : enough < most ? enough : most;

    return leg != LK_EXCHANGE ? s->slots : slots < max ? slots : max;
}

/* Slots of a unit of the exchange leg for what travels in lines, each of them as above. None where nothing does. Programs
 * live by what a sender can be ahead of its receiver: with NCCL 8 messages of up to 512 KB on their way, which is what 32
 * hold in 64 channels. More than 4 ranks have half as many, and so for messages of up to 256 KB, which is all that they
 * should send in lines: what 8 ranks have for them is 32 MB of each segment. A power of two. */
#define LK_SHORT_GRANULES 4u /* data of a slot */
#define LK_SHORT_PACKS    (LK_SHORT_GRANULES * LK_GRANULE / LK_PACK_BYTES)
#define LK_SHORT_RANKS    4u
LK_INLINE uint32_t lk_short_slots(const struct lk_ring_shape *s)
{
    return s->ranks > LK_SHORT_RANKS ? 16 : 32;
}
LK_INLINE uint32_t lk_short_slot(const struct lk_ring_shape *s, uint64_t message)
{
    return (uint32_t)(message - 1) & (lk_short_slots(s) - 1);
}
LK_INLINE size_t lk_short_offset(const struct lk_ring_shape *s, uint32_t src, uint32_t channel,
                                 uint32_t slot)
{
    size_t unit = s->short_bytes ? (size_t)src * s->channels + channel : 0;

    return lk_lines_offset(s, 1, s->ranks - 1) + 2 * (size_t)s->line_bytes +
           (unit * lk_short_slots(s) + slot) * 2 * LK_SHORT_GRANULES * LK_GRANULE;
}

/* Where in such a slot, or in the lines of a one-shot call, the line of the 4-byte word `word` of a pack lies: the lines of the first halves of a granule's
 * packs together, then those of the second, so that what the lanes of a warp store at once is in one piece. */
LK_INLINE uint32_t lk_short_line(uint32_t pack, uint32_t word)
{
    return pack / 32 * 2 * LK_GRANULE + word / 2 * LK_GRANULE + pack % 32 * 16 + word % 2 * 8;
}

LK_INLINE size_t lk_slot_offset(const struct lk_ring_shape *s, uint32_t leg, uint32_t src,
                                uint32_t channel, uint32_t slot)
{
    size_t lines_end = lk_short_offset(s, s->ranks, 0, 0);
    size_t begin = (lines_end + LK_SLOT_BYTES - 1) / LK_SLOT_BYTES * LK_SLOT_BYTES;
    size_t before = lk_unit(s, leg, 0, 0) * s->slots; /* the exchange leg is the last one */
    /* Two ranks have a unit of messages to each other and no other in a segment. */
    uint32_t place = leg == LK_EXCHANGE && s->ranks == 2 ? src / 2 : src;
    size_t unit = lk_unit(s, 0, place, channel);

    return begin + (before + unit * lk_leg_slots(s, leg) + slot) * LK_SLOT_BYTES;
}

/* ---- private state: counts, then `sent` and `taken` of every unit, both uint64_t ----
 * lines: one-shot calls that have ended; lines_done: CTAs of the running one that have ended. */
struct lk_ring_state {
    struct lk_ring_counts counts;
    uint64_t lines;
    uint32_t lines_done;
    uint32_t pad;
};
#define LK_STATE_HEADER 128u

/* Number of the one-shot call after `lines`. Its low 32 bits are the flag of its lines, never 0, and its parity is the
 * bank: a rank that is in a call has heard from everybody in the one before, so nobody still reads the one before that.
 * Where flags would be 0 two numbers are left out, so that banks go on taking turns. */
LK_INLINE uint64_t lk_next_lines(uint64_t lines)
{
    return (uint32_t)(lines + 1) ? lines + 1 : lines + 3;
}

/* True of one call of each parity in 2^24: its senders write every line of the bank, so that none keeps a flag for as
 * long as 2^32 calls, after which it would be taken for a new one. */
LK_INLINE int lk_lines_refresh(uint64_t number)
{
    uint64_t place = number & 0xffffffU;

    return place == 2 || place == 3;
}

LK_INLINE size_t lk_sent_offset(const struct lk_ring_shape *s, uint32_t leg, uint32_t dst,
                                uint32_t channel)
{
    return LK_STATE_HEADER + lk_unit(s, leg, dst, channel) * 8;
}

LK_INLINE size_t lk_taken_offset(const struct lk_ring_shape *s, uint32_t leg, uint32_t src,
                                 uint32_t channel)
{
    return LK_STATE_HEADER + (lk_units(s) + lk_unit(s, leg, src, channel)) * 8;
}

/* ---- tiles ---- */

/* Granules of a tile: as few as spread the space over all units, at most a slot. `granules`: of the whole space of an
 * all-reduce, or `ranks` times one part's of a reduce-scatter. */
LK_INLINE uint32_t lk_tile_granules(const struct lk_ring_shape *s, uint64_t granules)
{
    uint64_t units = (uint64_t)s->ranks * s->channels;
    uint64_t tile = (granules + units - 1) / units;

    return tile < 1 ? 1 : tile > LK_SLOT_GRANULES ? LK_SLOT_GRANULES : (uint32_t)tile;
}

/* How many of `tiles` tiles of an all-reduce belong to `rank`. */
LK_INLINE uint64_t lk_tiles_of(const struct lk_ring_shape *s, uint64_t tiles, uint32_t rank)
{
    return tiles / s->ranks + (rank < tiles % s->ranks);
}

/* How many of a rank's `tiles` tiles travel in `channel`. */
LK_INLINE uint64_t lk_tiles_in(const struct lk_ring_shape *s, uint64_t tiles, uint32_t channel)
{
    return tiles / s->channels + (channel < tiles % s->channels);
}

/* ---- messages of an exchange ----
 * A message has tiles of its own, of equal size, the last may be shorter. Tile k of a message from src to dst is carried by
 * the unit (LK_EXCHANGE, src, dst, channel (src + dst + k) % channels). A unit carries the tiles of messages in the order
 * of the messages, and those of one message in the order of k, or, in slots, of another one (lk_message_place). So both
 * ends know it from the size of each message alone, and it does not matter which messages have been put into one call at
 * either end. That src + dst comes in spreads small messages to different ranks.
 *
 * Short messages travel in lines, all others in slots; a unit numbers the tiles of both alike, and its credit counts both.
 * Tile n in lines lies in the unit's slot lk_short_slot(n) for lines, padded with zeros to a pack, and may be written when
 * n - credit <= lk_exchange_slots. It has come when all its lines have the flag lk_short_flag(n): there is no
 * word, and nothing to wait for between data and word. Whoever writes a tile's first line waits for nothing before
 * the last one, so that a reader who has seen one may wait for the others.
 *
 * Progress: a send waits for the credit of its unit, which its reader gives for having taken the message before; a take
 * waits for its unit's word, or lines. Nothing waits for another unit, provided that whoever runs a call looks at all
 * units that it has left and not at one until that one is ready. */

LK_INLINE int lk_message_is_short(const struct lk_ring_shape *s, uint64_t bytes)
{
    return bytes <= s->short_bytes;
}

/* Never 0, which is what lines hold that have not been written. */
LK_INLINE uint32_t lk_short_flag(uint64_t message)
{
    return (uint32_t)message ? (uint32_t)message : UINT32_C(1) << 31;
}

/* True of one tile of each slot for lines in 2^24 of a unit, whichever way it travels: its sender writes all lines of the
 * slot, so that none keeps a flag for as long as 2^31 tiles, after which it might be taken for a new one. What lies there
 * has been read, whichever way the tile travels: no more tiles are under way in slots than there are slots for lines. A tile
 * in lines writes the word of the slot as well that it would have had, as of a tile of zeros, so that no word keeps a number
 * for 2^32 tiles. Nobody waits for that one. */
LK_INLINE int lk_short_refresh(const struct lk_ring_shape *s, uint64_t message)
{
    return s->short_bytes && (message & 0xffffffU) - 0x800000U < lk_short_slots(s);
}

#if LK_EXCHANGE_SLOTS_MAX > 32 || LK_SLOTS_MAX > 16
#error "a tile in a slot would refresh lines that nobody has read"
#endif

/* How many tiles of a unit of leg LK_EXCHANGE may be under way when tile `message` is written. What writes the word of a slot
 * has to know that the one before has been read. */
LK_INLINE uint32_t lk_exchange_slots(const struct lk_ring_shape *s, int is_short, uint64_t message)
{
    return is_short && !lk_short_refresh(s, message) ? lk_short_slots(s)
                                                     : lk_leg_slots(s, LK_EXCHANGE);
}

/* As few as spread the message over all channels, at most a slot. Several smaller ones for each channel, so that taking
 * begins sooner, took 4 % longer for 2 MB to a rank between two H200 over NVLink, and let fewer messages be under way. */
LK_INLINE uint32_t lk_message_granules(const struct lk_ring_shape *s, uint64_t bytes)
{
    uint64_t granules = (bytes + LK_GRANULE - 1) / LK_GRANULE;
    uint64_t tile = (granules + s->channels - 1) / s->channels;
    uint32_t most = lk_message_is_short(s, bytes) ? LK_SHORT_GRANULES : LK_SLOT_GRANULES;

    return tile < 1 ? 1 : tile > most ? most : (uint32_t)tile;
}

LK_INLINE uint64_t lk_message_tiles(const struct lk_ring_shape *s, uint64_t bytes)
{
    uint32_t tile = lk_message_granules(s, bytes) * LK_GRANULE;

    return bytes / tile + (bytes % tile != 0);
}

/* The first tile of every message between the two that is carried in `channel`, by their numbers; the next ones are
 * `channels` apart. */
LK_INLINE uint32_t lk_message_first(const struct lk_ring_shape *s, uint32_t src, uint32_t dst,
                                    uint32_t channel)
{
    return (channel + s->channels - (src + dst) % s->channels) % s->channels;
}

/* Where in the message lies what its channel carries as tile `tile` of `tiles` in slots. Of each full round of `channels`
 * tiles a channel has one, LK_ROUND_STEP further on than its one of the round before: zeros lie where experts have no rows,
 * often at equal distances of a power of two, and channels that had the same one of each round would have all that is live
 * or nothing. Counted for periods of 1 to 256 tiles with 60 to 90 % zeros, 64 channels and 8192 tiles, the fullest channel
 * has 1.06 times the mean on average and 1.22 times at most; 2.2 and 10 without the step, 1.24 and 2.5 with a step of 1.
 * Besides, each channel goes round its tiles from another one on, spread over the message, so that some have zeros while
 * others have data, and link and memory are both busy all the time. first: lk_message_first of the channel. A message has
 * fewer than 2^28 tiles, or nobody could hold it. */
#define LK_ROUND_STEP 5u
LK_INLINE uint32_t lk_message_place(const struct lk_ring_shape *s, uint32_t tiles, uint32_t first,
                                    uint32_t tile)
{
    uint32_t rounds = tiles / s->channels;                          /* full ones */
    uint32_t all = rounds + (first < tiles - rounds * s->channels); /* tiles of the channel */
    uint32_t i = (tile - first) / s->channels + all * first / s->channels;
    uint32_t round = i < all ? i : i - all;
    uint32_t column = round < rounds ? (first + round * LK_ROUND_STEP) % s->channels : first;

    return round * s->channels + column;
}

LK_INLINE uint64_t lk_slot_word(uint64_t message, uint32_t live)
{
    return (uint64_t)live << 32 | (uint32_t)message;
}

#endif
