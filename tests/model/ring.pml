/* SPDX-License-Identifier: Apache-2.0
 *
 * The rings of kernels/rings.h: every rank runs CALLS calls, each as one or two threads (CTAS) that share CHANNELS
 * channels; a thread does in any order what it finds can be done and sleeps on its rank's doorbell when that is nothing.
 * Checked, whatever the order and whenever the abort word is set: a slot that is read holds the message that its word
 * says (nothing lost, nothing overwritten), and everybody ends (no deadlock).
 *
 * ABORT: the word is set at some point. BELL: threads sleep; without it they wait for what they need by magic.
 * What is one step here is what no other thread can see the middle of; payload and word of a slot are two.
 * PAIRS: instead of all-reduces, every call moves TILES messages between a subset of the directed pairs, all subsets tried.
 * LINES: with PAIRS, every other message of a unit travels in lines, of which there are two in each of LINE_SLOTS slots. A
 * reader that has seen the first one waits for the second.
 * BUG_...: errors of the protocol that the model must find; the test runs all of them.
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef CALLS
#define CALLS 1
#endif
#ifndef TILES
#define TILES 2 /* of each rank, in each channel and call */
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef CHANNELS
#define CHANNELS 1
#endif
#ifndef LINE_SLOTS
#define LINE_SLOTS 1
#endif
#define CTAS(r) (CHANNELS > 1 -> 1 + (r) % 2 : 1)

#define SCATTER 0
#define GATHER  1

#ifdef PAIRS
#define LEGS 1
#else
#define LEGS 2
#endif

#define UNIT(leg, dst, src, ch) ((((leg) * RANKS + (dst)) * RANKS + (src)) * CHANNELS + (ch))
#define UNITS                   (LEGS * RANKS * RANKS * CHANNELS)

byte word[UNITS * SLOTS];    /* written by src */
byte payload[UNITS * SLOTS]; /* by src */
byte credit[UNITS];          /* by dst */
#ifdef LINES
byte line[UNITS * LINE_SLOTS * 2]; /* flag and data of one store; by src */
#define SHORT(n) ((n) % 2)
#else
#define SHORT(n) false
#endif
byte sent[UNITS];            /* src's alone */
byte taken[UNITS];           /* dst's alone */
byte reduced[RANKS * CHANNELS];
byte ended[RANKS];           /* threads, of all calls */
bool rung[RANKS * 2];        /* a thread's doorbell since it last listened */
bool aborted;

#ifdef PAIRS
bool busy[CALLS * RANKS * RANKS];
#define DUE_OUT(dst) (due_out[dst])
#define DUE_IN(src)  (due_in[src])
#else
#define DUE_OUT(dst) (call * TILES)
#define DUE_IN(src)  (call * TILES)
#endif

#define IN(leg, src, ch)      UNIT(leg, me, src, ch)
#define OUT(leg, dst, ch)     UNIT(leg, dst, me, ch)
#define WORD_CAME(u) (word[(u) * SLOTS + taken[u] % SLOTS] == taken[u] + 1)
#ifdef LINES
#define LINE_AT(u, before, i) line[((u) * LINE_SLOTS + (before) % LINE_SLOTS) * 2 + (i)]
#define LINE_CAME(u, i) (LINE_AT(u, taken[u], i) == taken[u] + 1)
#define CAME(u) (SHORT(taken[u] + 1) -> LINE_CAME(u, 0) : WORD_CAME(u))
#else
#define CAME(u) WORD_CAME(u)
#endif
#define ARRIVED(leg, src, ch) CAME(IN(leg, src, ch))
#ifdef BUG_NO_CREDIT
#define CREDIT(leg, dst, ch) true
#else
#define HAS_CREDIT(u) (sent[u] - credit[u] < (SHORT(sent[u] + 1) -> LINE_SLOTS : SLOTS))
#define CREDIT(leg, dst, ch) HAS_CREDIT(OUT(leg, dst, ch))
#endif
#define MINE(ch) ((ch) % CTAS(me) == cta)

inline ring(who)
{
#ifdef BELL
    rung[(who) * 2] = true;
    rung[(who) * 2 + 1] = true
#else
    skip
#endif
}

inline put_payload(leg, dst, ch)
{
    payload[OUT(leg, dst, ch) * SLOTS + sent[OUT(leg, dst, ch)] % SLOTS] = sent[OUT(leg, dst, ch)] + 1
}

inline put_word(leg, dst, ch)
{
    word[OUT(leg, dst, ch) * SLOTS + sent[OUT(leg, dst, ch)] % SLOTS] = sent[OUT(leg, dst, ch)] + 1;
    ring(dst)
}

inline read(leg, src, ch)
{
#ifdef LINES
    if
    :: SHORT(taken[IN(leg, src, ch)] + 1) ->
        assert(LINE_CAME(IN(leg, src, ch), 0) && LINE_CAME(IN(leg, src, ch), 1))
    :: else ->
#endif
    assert(payload[IN(leg, src, ch) * SLOTS + taken[IN(leg, src, ch)] % SLOTS] == taken[IN(leg, src, ch)] + 1)
#ifdef LINES
    fi
#endif
}

inline give_back(leg, src, ch)
{
    credit[IN(leg, src, ch)] = taken[IN(leg, src, ch)] + 1;
#ifndef BUG_NO_BELL
    ring(src)
#endif
}

#ifdef BUG_EARLY_WORD
#define FIRST_PUT put_word
#define THEN_PUT  put_payload
#else
#define FIRST_PUT put_payload
#define THEN_PUT  put_word
#endif
#ifdef BUG_EARLY_CREDIT
#define FIRST_GET give_back
#define THEN_GET  read
#else
#define FIRST_GET read
#define THEN_GET  give_back
#endif

#ifdef PAIRS
#define TAKE_LEG SCATTER
#else
#define TAKE_LEG GATHER
#endif
#define TAKE_LEFT(p, ch) ((p) != me && MINE(ch) && taken[IN(TAKE_LEG, p, ch)] < DUE_IN(p))

/* The next message of a unit, for which there is credit. */
inline send(leg, dst, ch)
{
#ifdef LINES
    if
    :: SHORT(sent[OUT(leg, dst, ch)] + 1) ->
        LINE_AT(OUT(leg, dst, ch), sent[OUT(leg, dst, ch)], 0) = sent[OUT(leg, dst, ch)] + 1;
#ifdef BUG_WAIT_BETWEEN_LINES
        (!TAKE_LEFT(dst, ch) || LINE_CAME(IN(leg, dst, ch), 1) || aborted);
#endif
        atomic {
            LINE_AT(OUT(leg, dst, ch), sent[OUT(leg, dst, ch)], 1) = sent[OUT(leg, dst, ch)] + 1;
            ring(dst);
            sent[OUT(leg, dst, ch)]++
        }
    :: else ->
#endif
    atomic { FIRST_PUT(leg, dst, ch) };
    atomic {
        THEN_PUT(leg, dst, ch);
        sent[OUT(leg, dst, ch)]++
    }
#ifdef LINES
    fi
#endif
}

/* A message that has arrived. */
inline take(leg, src, ch)
{
#ifdef LINES
#ifndef BUG_ONE_LINE
    if
    :: SHORT(taken[IN(leg, src, ch)] + 1) ->
        (LINE_CAME(IN(leg, src, ch), 1) || aborted);
        if
        :: !LINE_CAME(IN(leg, src, ch), 1) -> goto over
        :: else
        fi
    :: else
    fi;
#endif
#endif
    atomic { FIRST_GET(leg, src, ch) };
    atomic {
        THEN_GET(leg, src, ch);
        taken[IN(leg, src, ch)]++
    }
}

#define ROOM(p, ch) ((p) == me || CREDIT(GATHER, p, ch))
#define HERE(p, ch) ((p) == me || ARRIVED(SCATTER, p, ch))
#if RANKS == 2
#define ALL_ROOM(ch) (ROOM(0, ch) && ROOM(1, ch))
#define ALL_HERE(ch) (HERE(0, ch) && HERE(1, ch))
#elif RANKS == 3
#define ALL_ROOM(ch) (ROOM(0, ch) && ROOM(1, ch) && ROOM(2, ch))
#define ALL_HERE(ch) (HERE(0, ch) && HERE(1, ch) && HERE(2, ch))
#else
#define ALL_ROOM(ch) (ROOM(0, ch) && ROOM(1, ch) && ROOM(2, ch) && ROOM(3, ch))
#define ALL_HERE(ch) (HERE(0, ch) && HERE(1, ch) && HERE(2, ch) && HERE(3, ch))
#endif

#define EACH_PEER(what)                      \
    r = 0;                                   \
    do                                       \
    :: r < RANKS && r != me -> what; r++     \
    :: r < RANKS && r == me -> r++           \
    :: else -> r = 0; break                  \
    od

/* To all peers at once: what it does for one of them another one does not see. */
inline reduce(ch)
{
    atomic { EACH_PEER(FIRST_GET(SCATTER, r, ch)) };
    atomic { EACH_PEER(THEN_GET(SCATTER, r, ch); taken[IN(SCATTER, r, ch)]++) };
#ifdef BUG_BLOCKED_REDUCE
    (ALL_ROOM(ch) || aborted);
#endif
    atomic { EACH_PEER(FIRST_PUT(GATHER, r, ch)) };
    atomic {
        EACH_PEER(THEN_PUT(GATHER, r, ch); sent[OUT(GATHER, r, ch)]++);
        reduced[me * CHANNELS + ch]++
    }
}

#ifdef BUG_BLOCKED_REDUCE
#define ALL_READY(ch) ALL_HERE(ch)
#else
#define ALL_READY(ch) (ALL_HERE(ch) && ALL_ROOM(ch))
#endif

#ifdef BUG_BLOCKED_SEND
#define CAN_SEND(p, ch) true
#define WAIT_SEND(p, ch) (CREDIT(SCATTER, p, ch) || aborted);
#else
#define CAN_SEND(p, ch) CREDIT(SCATTER, p, ch)
#define WAIT_SEND(p, ch)
#endif

#define SEND_LEFT(p, ch) ((p) != me && MINE(ch) && sent[OUT(SCATTER, p, ch)] < DUE_OUT(p))

/* What a thread may find to do with one peer in one channel, and with its own tiles. */
#define PEER(p, ch)                                                                     \
    :: SEND_LEFT(p, ch) && CAN_SEND(p, ch) -> WAIT_SEND(p, ch) send(SCATTER, p, ch)     \
    :: TAKE_LEFT(p, ch) && ARRIVED(TAKE_LEG, p, ch) -> take(TAKE_LEG, p, ch)
#define OWN_LEFT(ch) (MINE(ch) && reduced[me * CHANNELS + (ch)] < call * TILES)
#define PEER_LEFT(p, ch) (SEND_LEFT(p, ch) || TAKE_LEFT(p, ch))

#if RANKS == 2
#define PEERS(ch) PEER(0, ch) PEER(1, ch)
#define PEERS_LEFT(ch) (PEER_LEFT(0, ch) || PEER_LEFT(1, ch))
#elif RANKS == 3
#define PEERS(ch) PEER(0, ch) PEER(1, ch) PEER(2, ch)
#define PEERS_LEFT(ch) (PEER_LEFT(0, ch) || PEER_LEFT(1, ch) || PEER_LEFT(2, ch))
#else
#define PEERS(ch) PEER(0, ch) PEER(1, ch) PEER(2, ch) PEER(3, ch)
#define PEERS_LEFT(ch) (PEER_LEFT(0, ch) || PEER_LEFT(1, ch) || PEER_LEFT(2, ch) || PEER_LEFT(3, ch))
#endif

#ifdef PAIRS
#define CHANNEL(ch) PEERS(ch)
#define LEFT(ch) PEERS_LEFT(ch)
#else
#define CHANNEL(ch) PEERS(ch) :: OWN_LEFT(ch) && ALL_READY(ch) -> reduce(ch)
#define LEFT(ch) (PEERS_LEFT(ch) || OWN_LEFT(ch))
#endif

#if CHANNELS == 1
#define ALL_CHANNELS CHANNEL(0)
#define ANY_LEFT LEFT(0)
#else
#define ALL_CHANNELS CHANNEL(0) CHANNEL(1)
#define ANY_LEFT (LEFT(0) || LEFT(1))
#endif

proctype thread(byte me; byte cta)
{
    byte call = 1, r;
    bool listened = false;
#ifdef PAIRS
    byte due_out[RANKS], due_in[RANKS];
#endif

    do
    :: call <= CALLS ->
#ifdef PAIRS
        atomic {
            do
            :: r < RANKS ->
                due_out[r] = due_out[r] + TILES * busy[((call - 1) * RANKS + me) * RANKS + r];
                due_in[r] = due_in[r] + TILES * busy[((call - 1) * RANKS + r) * RANKS + me];
                r++
            :: else -> r = 0; break
            od
        };
#endif
        do
        ALL_CHANNELS
#ifdef ABORT
        :: aborted -> goto over
#endif
#ifndef BELL
        :: !ANY_LEFT -> break
#else
        :: else ->
            if
            :: !ANY_LEFT -> break
#ifdef BUG_LATE_LISTENING
            /* Looks, and only then notes what it has heard so far. */
            :: ANY_LEFT ->
                rung[me * 2 + cta] = false;
                (rung[me * 2 + cta] || aborted)
#else
            :: ANY_LEFT && !listened ->
                atomic {
                    rung[me * 2 + cta] = false;
                    listened = true
                }
            :: ANY_LEFT && listened ->
#ifdef BUG_DEAF
                rung[me * 2 + cta];
#else
                (rung[me * 2 + cta] || aborted);
#endif
                listened = false
#endif
            fi
#endif
        od;
        atomic {
            listened = false;
            ended[me]++
        };
        /* The rank's next call begins when all threads of this one have ended. */
        (ended[me] >= call * CTAS(me) || aborted);
        call++
    :: else -> break
    od;
over:
    skip
}

#ifdef ABORT
active proctype user()
{
    aborted = true
}
#endif

init {
    byte i = 0;

    atomic {
#ifdef PAIRS
        do
        :: i < CALLS * RANKS * RANKS ->
            if
            :: i / RANKS % RANKS != i % RANKS -> busy[i] = true
            :: true
            fi;
            i++
        :: else -> break
        od;
        i = 0;
#endif
        do
        :: i < RANKS ->
            run thread(i, 0);
            if
            :: CTAS(i) == 2 -> run thread(i, 1)
            :: else
            fi;
            i++
        :: else -> break
        od
    }
}
