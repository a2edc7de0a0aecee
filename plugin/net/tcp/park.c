/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL makes connections that it may never use: of a job whose messages are short, half. One on which nothing was sent or
 * awaited for a while does without sockets: the sender asks, the receiver agrees, the sender ends them, and the first message,
 * or its receiver that waits for it, brings them back. Nothing can get lost with them, for nothing was sent. Who has not heard
 * the answer when a socket breaks comes back at once: the receiver may not know of the question, or be unable to call. All
 * with conn->lock held. */
#include "common/deadline.h"
#include "plugin/net/tcp/tcp_internal.h"

#define PARK_NS ((int64_t)1000000000)

void park_attached(struct conn *conn)
{
    if (conn->parking >= PARK_ASKED)
        conn->parking = PARK_OVER;
    conn->up_since = lc_now_ns();
}

/* A socket that is on its way, or missing, will come when they are gone. */
static bool has_all(const struct conn *conn)
{
    return conn->n_up == (conn->wide ? conn->n_lanes : 1);
}

bool park_look(struct conn *conn, int64_t now, int64_t *next)
{
    int64_t at = conn->up_since + PARK_NS;

    if (!conn->sends || conn->parking != PARK_FRESH || conn->posted || !has_all(conn))
        return false;
    if (now < at) {
        *next = at < *next ? at : *next;
        return false;
    }
    conn->parking = PARK_DUE;
    atomic_fetch_add(&conn->changes, 1); /* there is something to send */
    return true;
}

/* Not while a dial is on its way, perhaps for a socket that was lost meanwhile: see park_end. */
bool park_take_question(struct conn *conn)
{
    if (conn->parking != PARK_DUE || conn->posted || !has_all(conn))
        return false;
    conn->parking = PARK_ASKED;
    return true;
}

/* Where the sender could not be called it is not let go. */
static bool may_call(const struct conn *conn)
{
    for (int i = 0; i < conn->n_lanes; i++) {
        if (conn->lanes[i].has_home)
            return true;
    }
    return false;
}

bool park_agree(struct conn *conn)
{
    if (conn->parking != PARK_FRESH || conn->posted || conn->error || conn->closing ||
        !may_call(conn))
        return false;
    conn->parking = PARK_AGREED;
    conn->agrees = true;
    return true;
}

bool park_take_answer(struct conn *conn)
{
    bool agrees = conn->agrees && conn->parking == PARK_AGREED;

    conn->agrees = false;
    return agrees;
}

bool park_agreed(struct conn *conn)
{
    if (conn->parking != PARK_ASKED)
        return false;
    conn->parking = PARK_AGREED;
    for (int i = 0; i < conn->n_lanes; i++) {
        struct lane *lane = &conn->lanes[i];

        if (!lane->up)
            continue;
        lane->retire = lane->epoch;
        atomic_store(&lane->condemned, true);
    }
    return true;
}

bool park_lost(struct conn *conn)
{
    if (conn->parking == PARK_ASKED)
        conn->parking = PARK_FRESH;
    if (conn->posted || (conn->parking != PARK_AGREED && conn->parking != PARKED))
        return false;
    if (conn->n_up == 0)
        conn->parking = PARKED;
    return true;
}

/* Some sockets may have ended, and others not yet. Since its receiver agreed, a sender has dialled for none. */
bool park_end(struct conn *conn)
{
    bool agreed = conn->parking == PARK_AGREED || conn->parking == PARKED;
    bool missing = agreed && (conn->sends ? !has_all(conn) : conn->n_up == 0);

    conn->parking = PARK_OVER;
    if (!missing)
        return false;
    if (conn->n_up == 0)
        conn->down_since = conn->next_probe = lc_now_ns();
    for (int i = 0; i < conn->n_lanes && conn->sends; i++) {
        if (!conn->lanes[i].up && (i == 0 || conn->wide))
            conn->lanes[i].next_dial = 0;
    }
    return true;
}

void park_refused(struct conn *conn)
{
    if (conn->parking == PARK_ASKED || conn->parking == PARK_AGREED)
        conn->parking = PARK_OVER;
}

/* The sender has not ended the sockets though it might. If one has broken meanwhile it may not know. */
bool park_passed(struct conn *conn)
{
    if (conn->parking != PARK_AGREED)
        return false;
    conn->parking = PARK_OVER;
    return true;
}
