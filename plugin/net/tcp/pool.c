/* SPDX-License-Identifier: Apache-2.0
 *
 * The threads that move what NCCL's own do not. A socket is one thread's as long as it lasts: what the kernel keeps of it
 * stays in that processor's cache. */
#include "common/deadline.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define LANE_BITS 5
#define EVENTS    4
#define BUDGET    16
/* Of looking on when there is nothing: to be woken takes tens of microseconds, and pieces follow each other faster. */
#define SPIN_NS ((int64_t)50 * 1000)

_Static_assert(LC_TCP_LANES <= 1 << LANE_BITS, "a lane's number fits");

/* The end of a socket is told of once. Whoever holds lane 0 then may have read only what came before it, and may be its
 * caller's last call. */
static void move(struct lane *lane, uint32_t events)
{
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        atomic_store(&lane->hung, true);
    lane_kick(lane, BUDGET);
}

static int wait_for_events(const struct mover *mover, struct epoll_event *events, int64_t idle_from)
{
    int n;

    do {
        n = epoll_wait(mover->poll, events, EVENTS, 0);
    } while (n == 0 && engine.spins && lc_now_ns() - idle_from < SPIN_NS &&
             !atomic_load_explicit(&engine.stop, memory_order_relaxed));
    return n ? n : epoll_wait(mover->poll, events, EVENTS, -1);
}

static void *mover_main(void *arg)
{
    struct mover *mover = arg;
    struct epoll_event events[EVENTS];
    int64_t idle_from = 0;

    while (!atomic_load(&engine.stop)) {
        int n = wait_for_events(mover, events, idle_from);

        for (int i = 0; i < n; i++) {
            struct conn *conn = engine_find(events[i].data.u64 >> LANE_BITS);

            if (!conn)
                continue;
            move(&conn->lanes[events[i].data.u64 & ((1u << LANE_BITS) - 1)], events[i].events);
            conn_unref(conn);
        }
        idle_from = lc_now_ns();
    }
    return NULL;
}

/* ---- which socket is whose ---- */

/* The one with the fewest; two that look at once may choose the same, which costs a little speed. */
static int choose_mover(void)
{
    int best = 0;
    int fewest = INT32_MAX;

    for (int i = 0; i < engine.n_movers; i++) {
        int n = atomic_load_explicit(&engine.movers[i].lanes, memory_order_relaxed);

        if (n < fewest) {
            fewest = n;
            best = i;
        }
    }
    return best;
}

int pool_poll(struct lane *lane, int op)
{
    /* Lane 0 moves in its caller's calls. But who has sent short messages need not call again, whether they have come or
     * have to be sent again: its end is looked at, and at times the rest. */
    uint32_t wanted = lane->index || lane->watched ? EPOLLIN | EPOLLOUT : 0;
    struct epoll_event event = { .events = wanted | EPOLLRDHUP | EPOLLET,
                                 .data.u64 = lane->conn->slot << LANE_BITS |
                                             (uint64_t)lane->index };

    if (op == EPOLL_CTL_ADD) {
        lane->mover = choose_mover();
        if (lane->index > 0)
            atomic_fetch_add_explicit(&engine.movers[lane->mover].lanes, 1, memory_order_relaxed);
    }
    return epoll_ctl(engine.movers[lane->mover].poll, op, lane->fd, &event) == 0 ? 0 : -errno;
}

void pool_leave(struct lane *lane)
{
    struct mover *mover = &engine.movers[lane->mover];

    (void)epoll_ctl(mover->poll, EPOLL_CTL_DEL, lane->fd, NULL);
    if (lane->index > 0)
        atomic_fetch_sub_explicit(&mover->lanes, 1, memory_order_relaxed);
}

/* ---- life; with engine.life held ---- */

static int open_mover(struct mover *mover)
{
    struct epoll_event stop = { .events = EPOLLIN, .data.u64 = UINT64_MAX };
    int err;

    mover->poll = epoll_create1(EPOLL_CLOEXEC);
    if (mover->poll >= 0 && epoll_ctl(mover->poll, EPOLL_CTL_ADD, engine.stop_fd, &stop) == 0)
        return 0;
    err = -errno;
    if (mover->poll >= 0)
        close(mover->poll);
    return err;
}

int pool_open(void)
{
    int err = 0;

    engine.movers = calloc((size_t)engine.threads_wanted, sizeof(*engine.movers));
    if (!engine.movers)
        return -ENOMEM;
    while (!err && engine.n_movers < engine.threads_wanted) {
        err = open_mover(&engine.movers[engine.n_movers]);
        engine.n_movers += err == 0;
    }
    if (err)
        pool_close();
    return err;
}

int pool_start(void)
{
    int err = 0;

    while (!err && engine.n_threads < engine.n_movers) {
        struct mover *mover = &engine.movers[engine.n_threads];

        err = pthread_create(&mover->thread, NULL, mover_main, mover);
        if (!err) {
            (void)pthread_setname_np(mover->thread, "lc-net-pool");
            engine.n_threads++;
        }
    }
    return -err;
}

void pool_join(void)
{
    while (engine.n_threads > 0)
        pthread_join(engine.movers[--engine.n_threads].thread, NULL);
}

void pool_forget(void)
{
    for (int i = 0; i < engine.n_movers; i++)
        close(engine.movers[i].poll);
}

void pool_close(void)
{
    pool_forget();
    free(engine.movers);
    engine.movers = NULL;
    engine.n_movers = 0;
}
