/* SPDX-License-Identifier: Apache-2.0
 *
 * What was sent and is not confirmed when its caller closes. Test has said of a message with a copy that it is over, so its
 * caller counts on it: the connection stays until all have come to the receiver's process, with new sockets if need be, and the
 * engine stays for it though nobody else uses it. The limits are NET_TIMEOUT, and the end of the process. That waits for
 * SYSTEM_NS, and for EXIT_NS where something may not have come to the peer's machine yet: what is there a process that stands
 * still reads when it goes on, though nobody is there who could send it again. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <dlfcn.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>

#define EXIT_NS   ((int64_t)5 * 1000000000)
#define SYSTEM_NS ((int64_t)1 * 1000000000)

/* All that is not confirmed is a copy of ours. What its caller gives up unfinished, as in an abort, nobody counts on. With
 * conn->lock held. */
static bool owes_copies(const struct conn *conn)
{
    uint64_t seq = conn->acked;

    if (!conn->sends || conn->error || conn->peer_gone || seq == conn->posted)
        return false;
    while (seq < conn->posted && conn->ring[seq % LC_TCP_WINDOW].gone)
        seq++;
    return seq == conn->posted;
}

/* With engine.lock held. */
static bool stay(struct conn *conn)
{
    bool stays;

    conn_lock(conn);
    stays = !atomic_load(&conn->leaving) && !conn->closing && owes_copies(conn);
    if (stays) {
        conn->leave_until = lc_now_ns() + engine.timeout_ns;
        atomic_store(&conn->leaving, true);
        engine.n_leaving++;
    }
    conn_unlock(conn);
    return stays;
}

void leave(struct conn *conn)
{
    bool stays;

    count_conn(conn); /* as of a connection that is closed, for who asks next */
    pthread_mutex_lock(&engine.lock);
    stays = stay(conn);
    pthread_mutex_unlock(&engine.lock);
    if (!stays) {
        conn_close(conn);
        return;
    }
    engine_wake(); /* for the goodbye; the connection may be over already */
}

/* In the receiver's process, whether its caller has taken it or not. With conn->lock held. */
static bool has_come(const struct conn *conn)
{
    for (int i = 0; i < conn->n_lanes; i++) {
        if (!conn->lanes[i].settled || conn->lanes[i].told < conn->lanes[i].count)
            return false;
    }
    return conn->n_redo == 0;
}

bool leave_is_over(struct conn *conn, int64_t now, int64_t *next)
{
    uint64_t left;
    bool over;

    if (!atomic_load(&conn->leaving))
        return false;
    conn_lock(conn);
    left = conn->posted - conn->acked;
    over = left == 0 || has_come(conn) || conn->error || conn->peer_gone;
    conn_unlock_unchanged(conn);
    if (!over && now >= conn->leave_until) {
        lc_warn("sending to %s: some of the last %lu messages have not come within %lld s",
                conn->peer_text, (unsigned long)left, (long long)(engine.timeout_ns / 1000000000));
        over = true;
    }
    *next = conn->leave_until < *next ? conn->leave_until : *next;
    return over;
}

/* Of the lane all that it has to bring, as what has been sent is not confirmed. With engine.lock held; io, which comes before
 * that, is only tried: who has it is at work. */
static bool is_at_peer(struct lane *lane)
{
    int left = 0;
    bool at_peer;

    if (pthread_mutex_trylock(&lane->io) != 0)
        return false;
    at_peer = lane->fd >= 0 && lane->iov_n == 0 && ioctl(lane->fd, SIOCOUTQ, &left) == 0 &&
              left == 0;
    pthread_mutex_unlock(&lane->io);
    return at_peer;
}

/* With engine.lock held. */
static bool is_with_peer(struct conn *conn)
{
    bool owes[LC_TCP_LANES] = { false };
    bool is;

    conn_lock(conn);
    is = conn->n_redo == 0;
    for (int i = 0; i < conn->n_lanes; i++) {
        owes[i] = conn->lanes[i].told < conn->lanes[i].count;
        is &= conn->lanes[i].settled;
    }
    conn_unlock_unchanged(conn);
    for (int i = 0; i < conn->n_lanes && is; i++)
        is = !owes[i] || is_at_peer(&conn->lanes[i]);
    return is;
}

bool leave_is_with_peers(void)
{
    bool all = true;

    pthread_mutex_lock(&engine.lock);
    for (struct conn *conn = engine.conns; conn && all; conn = conn->next)
        all = !atomic_load(&conn->leaving) || is_with_peer(conn);
    pthread_mutex_unlock(&engine.lock);
    return all;
}

void leave_wait(int64_t most, bool for_systems)
{
    const struct timespec pause = { .tv_nsec = 1000000 };
    int64_t end = lc_now_ns() + most;

    while (leave_any() && !(for_systems && leave_is_with_peers()) && lc_now_ns() < end)
        nanosleep(&pause, NULL);
}

bool leave_any(void)
{
    bool any;

    pthread_mutex_lock(&engine.lock);
    any = engine.n_leaving > 0;
    pthread_mutex_unlock(&engine.lock);
    return any;
}

void leave_pin(void)
{
    Dl_info own;
    void *handle;

    if (!dladdr(&engine, &own))
        return;
    handle = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    if (handle)
        dlclose(handle);
}

void leave_all(void)
{
    pthread_mutex_lock(&engine.lock);
    for (struct conn *conn = engine.conns; conn; conn = conn->next) {
        if (conn->claimed && stay(conn))
            conn_ref(conn); /* NCCL still holds it, and its threads may run */
    }
    pthread_mutex_unlock(&engine.lock);
    engine_wake();
    leave_wait(SYSTEM_NS, false);
    leave_wait(EXIT_NS - SYSTEM_NS, true);
}
