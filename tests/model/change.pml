/* SPDX-License-Identifier: Apache-2.0
 *
 * Later changes of what ranks have agreed on (interpose/control/control.h, interpose/sizing.h): rank 0 orders them one
 * after the other; every rank sets one up between any two of its operations, says whether it could, votes when all could,
 * and changes over at an epoch whose write-once word says so. A group's operations are counted, and epochs decided, before
 * it is known whether the group takes place; if it does not, the rank goes back to where the group began. Checked: two
 * ranks never use different generations for the same operation, nobody uses one that some rank has not set up, and nobody
 * waits for anybody (no invalid end states).
 *
 * BUG_...: errors of the protocol that the model must find; the test runs all of them.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef OPS
#define OPS 8
#endif
#ifndef CHANGES
#define CHANGES 2
#endif
#ifndef GROUP
#define GROUP 2 /* operations in a group that comes to nothing */
#endif
#define EPOCHS 4 /* indices 1, 2, 4, 8: enough for OPS up to 15 */

#define UNDECIDED 0
#define SKIP      1
#define COMMIT    2

#define IDLE   0
#define MAKING 1
#define SAID   2
#define VOTED  3
#define ENDED  4

#define WELL    1
#define FAILED  2
#define UNKNOWN 255

byte ordered;                         /* by rank 0: the last change */
byte said[RANKS * (CHANGES + 1)];
byte vote[RANKS], from[RANKS];        /* the last one, written as one word */
byte word[EPOCHS];
byte used[OPS + 1];                   /* generation of each operation, by the first that got there */

inline next_epoch(count, out)
{
    if
    :: count == 0 -> out = 1
    :: count == 1 -> out = 2
    :: count == 2 || count == 3 -> out = 4
    :: count >= 4 && count < 8 -> out = 8
    :: else -> out = 16
    fi
}

inline number_of(index, out)
{
    if
    :: index == 1 -> out = 0
    :: index == 2 -> out = 1
    :: index == 4 -> out = 2
    :: index == 8 -> out = 3
    :: else -> out = EPOCHS /* no epoch */
    fi
}

/* Votes are read one by one, as the code does: some may come in between. */
inline decide()
{
    do
    :: atomic {
        r < RANKS ->
        if
#ifdef BUG_NO_FROM
        :: vote[r] == vote[me] -> skip
#else
#ifdef BUG_NO_NUMBER
        :: vote[r] != 0 && from[r] <= count -> skip
#else
        :: vote[r] == vote[me] && from[r] <= count -> skip
#endif
#endif
        :: else -> all_in = false
        fi;
        r++
    }
    :: atomic { r == RANKS -> break }
    od;
    atomic {
#ifdef BUG_REWRITE
        word[number] = (all_in -> COMMIT : SKIP);
#else
        if
        :: word[number] == UNDECIDED -> word[number] = (all_in -> COMMIT : SKIP)
        :: else -> skip
        fi;
#endif
        if
        :: word[number] == COMMIT -> generation = vote[me]
        :: else -> skip
        fi;
        r = 0; /* equal states stay equal */
        all_in = false
    }
}

/* An operation is counted. */
inline call()
{
    atomic {
        count++;
        number_of(count, number);
        deciding = number < EPOCHS && vote[me] > generation && count >= from[me];
        all_in = deciding;
        r = 0
    };
    if
    :: deciding -> decide()
    :: else -> skip
    fi;
    atomic {
        number = 0;
        deciding = false
    }
}

/* It takes place. */
inline take()
{
    atomic {
        assert(used[count] == UNKNOWN || used[count] == generation);
        used[count] = generation;
        r = 0;
        do
        :: r < RANKS ->
            assert(generation == 0 || said[r * (CHANGES + 1) + generation] == WELL);
            r++
        :: else -> break
        od;
        r = 0
    }
}

/* Whether all have set up `change`, or one could not. */
inline listen()
{
    atomic {
        all_in = true;
        some_failed = false;
        r = 0;
        do
        :: r < RANKS ->
            all_in = all_in && said[r * (CHANGES + 1) + change] == WELL;
            some_failed = some_failed || said[r * (CHANGES + 1) + change] == FAILED;
            r++
        :: else -> break
        od;
        r = 0;
        if
        :: some_failed -> stage = ENDED
        :: !some_failed && all_in ->
            next_epoch(count, number);
            vote[me] = change;
            from[me] = number;
            number = 0;
            stage = VOTED
        :: else -> skip
        fi;
        all_in = false;
        some_failed = false
    }
}

/* One step of a change, between operations. */
inline step()
{
    if
    :: stage == IDLE && me == 0 && ordered < CHANGES ->
        atomic {
            ordered++;
            change = ordered;
            stage = MAKING
        }
    :: stage == IDLE && me != 0 && ordered > change ->
        atomic {
            change++;
            stage = MAKING
        }
    :: stage == MAKING ->
        atomic {
            if
            :: said[me * (CHANGES + 1) + change] = WELL; stage = SAID
            :: said[me * (CHANGES + 1) + change] = FAILED; stage = ENDED
            fi
        }
    :: stage == SAID -> listen()
    :: stage == VOTED && generation == change -> stage = IDLE
    :: else -> skip
    fi
}

proctype rank(byte me)
{
    byte count, generation, change, stage, r, number, marked, left;
    bool all_in, some_failed, deciding;

    do
    :: count == OPS -> break
    :: count < OPS -> step()
    :: count < OPS -> call(); take()
    :: count < OPS -> /* a group that does not take place */
        atomic {
            marked = generation;
            left = GROUP
        };
        do
        :: left > 0 && count < OPS -> call(); left--
#ifdef BUG_VOTE_IN_GROUP
        :: count < OPS -> step()
#endif
        :: left < GROUP ->
            atomic {
                count = count - (GROUP - left);
                generation = marked;
                marked = 0;
                left = 0;
                break
            }
        od;
        call();
        take()
    od
}

init {
    byte i = 0;

    atomic {
        do
        :: i <= OPS -> used[i] = UNKNOWN; i++
        :: else -> break
        od;
        i = 0;
        do
        :: i < RANKS -> run rank(i); i++
        :: else -> break
        od
    }
}
