/* SPDX-License-Identifier: Apache-2.0
 *
 * The commit protocol of the control plane (interpose/control/control.h): ranks call the same operations in the same
 * order but arbitrarily far apart; at the operation indices 1, 2, 4, 8 ... a rank that has voted decides or obeys the
 * epoch's write-once word; a rank that has not voted passes without asking. Checked: two ranks never take different
 * paths for the same operation, whoever votes late, never votes, dies after voting, or finds the arbiter dead; and
 * nobody waits for anybody (no invalid end states).
 *
 * spin -a [-DBUG_NO_FROM | -DBUG_REWRITE | -DBUG_FALLBACK] commit.pml: each variant is a protocol error that the model
 * must find; the test runs all of them.
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef OPS
#define OPS 4
#endif
#define EPOCHS 4 /* indices 1, 2, 4, 8: enough for OPS up to 15 */

#define UNDECIDED 0
#define SKIP      1
#define COMMIT    2

#define UNKNOWN 0
#define NCCL    1
#define OURS    2

byte voted[RANKS];   /* 0: no vote; else the first index for which the vote counts. Write-once. */
byte word[EPOCHS];   /* UNDECIDED, then SKIP or COMMIT for ever */
byte path[OPS + 1];  /* what the first rank that got there took */
bool arbiter_dead;

inline take(index, chosen)
{
    atomic {
        assert(path[index] == UNKNOWN || path[index] == chosen);
        path[index] = chosen;
    }
}

/* Reads the votes one by one, as the code does: votes may arrive in between. */
inline decide(epoch, index, verdict)
{
    all_in = true;
    r = 0;
    do
    :: r < RANKS ->
        if
#ifdef BUG_NO_FROM
        :: voted[r] != 0 -> skip
#else
        :: voted[r] != 0 && voted[r] <= index -> skip
#endif
        :: else -> all_in = false
        fi;
        r++
    :: else -> break
    od;
#ifdef BUG_REWRITE
    word[epoch] = (all_in -> COMMIT : SKIP);
#else
    atomic { /* compare and swap */
        if
        :: word[epoch] == UNDECIDED -> word[epoch] = (all_in -> COMMIT : SKIP)
        :: else -> skip
        fi
    };
#endif
    atomic {
        verdict = word[epoch];
        r = 0; /* equal states stay equal */
        all_in = false
    }
}

proctype rank(byte me)
{
    byte index = 1, next_epoch = 1, epoch_number = 0, verdict, r;
    bool all_in, committed = false, failed = false;

    do
    :: index > OPS || failed -> break
    :: index <= OPS && !failed && voted[me] == 0 -> /* set-up is complete: vote, for epochs not yet passed */
        voted[me] = next_epoch
    :: index <= OPS && !failed && voted[me] != 0 -> break /* dies after voting */
    :: index <= OPS && !failed ->
        if
        :: index == next_epoch ->
            if
            :: voted[me] != 0 && !committed ->
                if
                :: arbiter_dead ->
#ifdef BUG_FALLBACK
                    take(index, NCCL)
#else
                    failed = true
#endif
                :: !arbiter_dead ->
                    decide(epoch_number, index, verdict);
                    committed = (verdict == COMMIT);
                    verdict = UNDECIDED;
                    take(index, (committed -> OURS : NCCL))
                fi
            :: else -> take(index, (committed -> OURS : NCCL))
            fi;
            next_epoch = 2 * next_epoch;
            epoch_number++
        :: else -> take(index, (committed -> OURS : NCCL))
        fi;
        index++
    od
}

active proctype arbiter()
{
    if
    :: arbiter_dead = true
    :: true
    fi
}

init {
    byte i = 0;

    atomic {
        do
        :: i < RANKS -> run rank(i); i++
        :: else -> break
        od
    }
}
