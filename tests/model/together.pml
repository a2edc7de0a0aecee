/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that move the tiles of a unit together (kernels/cuda_exchange_direct.cuh): N messages of one tile from a sender to a
 * receiver, which put them into calls as they like, of MOST messages at most. A sender writes the words of a call when it has
 * credit for all, a receiver gives the credit of a call when it has taken all; or either does so for each message, as the
 * other kernels do. All groupings are tried. Checked: everybody ends, and a slot is written when what it held has been read.
 *
 * BUG_AS_MANY_AS_SLOTS: MOST is what there is room for at all.
 */
#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef N
#define N 7
#endif
#ifdef BUG_AS_MANY_AS_SLOTS
#define MOST SLOTS
#else
#define MOST ((SLOTS + 1) / 2)
#endif

byte sent;     /* words written; by the sender */
byte taken;    /* slots read; by the receiver */
byte credit;   /* taken, as far as it has said; by the receiver */

/* How many of those that are left a call has. */
inline choose(n, done)
{
    n = 1;
    do
    :: n < MOST && done + n < N -> n++
    :: break
    od
}

active proctype sender()
{
    byte begun, n, i;

    do
    :: begun < N ->
        choose(n, begun);
        if
        :: true -> /* together */
            i = 0;
            do
            :: i < n ->
                begun + i + 1 - credit <= SLOTS; /* it waits */
                assert(begun + i + 1 - taken <= SLOTS);
                i++
            :: else -> break
            od;
            sent = begun + n
        :: true -> /* each as it can be */
            i = 0;
            do
            :: i < n ->
                begun + i + 1 - credit <= SLOTS;
                sent = begun + i + 1;
                i++
            :: else -> break
            od
        fi;
        begun = begun + n
    :: else -> break
    od
}

active proctype receiver()
{
    byte begun, n, i;
    bool together;

    do
    :: begun < N ->
        choose(n, begun);
        if
        :: together = true
        :: together = false
        fi;
        i = 0;
        do
        :: i < n ->
            sent >= begun + i + 1;
            taken = begun + i + 1;
            if
            :: !together || i + 1 == n -> credit = taken
            :: else
            fi;
            i++
        :: else -> break
        od;
        begun = begun + n
    :: else -> break
    od
}
