/* SPDX-License-Identifier: Apache-2.0
 *
 * The threads that move what NCCL's own do not. A socket is one thread's as long as it lasts: what the kernel keeps of it
 * stays in that processor's cache. */
#include "common/deadline.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define EVENTS     4
#define BUDGET     16
#define CROWDED_NS ((int64_t)50 * 1000) /* of a look, which takes one by itself */
#define PAUSE_NS   ((int64_t)5 * 1000000)

/* A place in an epoll. Its number of uses grows, so that an event that is still on its way finds nobody. */
struct seat {
    struct lane *lane; /* NULL: free */
    uint32_t uses;
    bool asked;    /* it is one of those that the thread is to look at */
    uint32_t next; /* the next of them */
};
#define NO_SEAT UINT32_MAX
#define USES    ((uint32_t)INT32_MAX) /* as far as events tell them */

/* ---- which socket is whose ---- */

/* The one with the fewest; two that look at once may choose the same, which costs a little speed. Where no thread of the pool
 * could be started the service thread does it. */
static int choose_mover(const struct lane *lane)
{
    int best = 0;
    int fewest = INT32_MAX;
    int n_pool = lane->index ? atomic_load(&engine.n_pool) : 0;

    for (int i = 1; i <= n_pool; i++) {
        struct mover *mover = &engine.movers[i];
        int n;

        pthread_mutex_lock(&mover->lock);
        n = mover->lanes;
        pthread_mutex_unlock(&mover->lock);
        if (n < fewest) {
            fewest = n;
            best = i;
        }
    }
    return best;
}

static int grow(struct mover *mover)
{
    uint32_t n = mover->n_seats ? 2 * mover->n_seats : 16;
    struct seat *more = realloc(mover->seats, n * sizeof(*more));

    if (!more)
        return -ENOMEM;
    memset(more + mover->n_seats, 0, (n - mover->n_seats) * sizeof(*more));
    mover->seats = more;
    mover->n_seats = n;
    return 0;
}

static int take_seat(struct lane *lane)
{
    struct mover *mover = &engine.movers[lane->mover];
    uint32_t i = 0;
    int err = 0;

    pthread_mutex_lock(&mover->lock);
    while (i < mover->n_seats && mover->seats[i].lane)
        i++;
    if (i == mover->n_seats)
        err = grow(mover);
    if (!err) {
        mover->seats[i].lane = lane;
        mover->lanes += lane->index > 0;
        lane->seat = i;
    }
    pthread_mutex_unlock(&mover->lock);
    return err;
}

static void leave_seat(const struct lane *lane)
{
    struct mover *mover = &engine.movers[lane->mover];

    pthread_mutex_lock(&mover->lock);
    mover->seats[lane->seat].lane = NULL;
    mover->seats[lane->seat].uses++;
    mover->lanes -= lane->index > 0;
    pthread_mutex_unlock(&mover->lock);
}

static int poll_lane(const struct lane *lane, int op)
{
    /* Lane 0 moves in its caller's calls. But who has sent short messages need not call again, whether they have come or
     * have to be sent again: its end is looked at, and at times the rest. */
    uint32_t wanted = lane->index || lane->watched ? EPOLLIN | EPOLLOUT : 0;
    struct mover *mover = &engine.movers[lane->mover];
    struct epoll_event event = { .events = wanted | EPOLLRDHUP | EPOLLET };

    pthread_mutex_lock(&mover->lock);
    event.data.u64 = POOL_LANE | (uint64_t)mover->seats[lane->seat].uses << 32 | lane->seat;
    pthread_mutex_unlock(&mover->lock);
    return epoll_ctl(mover->poll, op, lane->fd, &event) == 0 ? 0 : -errno;
}

int pool_join(struct lane *lane)
{
    int err;

    lane->mover = choose_mover(lane);
    err = take_seat(lane);
    if (err) {
        lane->mover = -1;
        return err;
    }
    err = poll_lane(lane, EPOLL_CTL_ADD);
    if (err) {
        leave_seat(lane);
        lane->mover = -1;
    }
    return err;
}

static void enqueue(struct mover *mover, uint32_t i)
{
    struct seat *seat = &mover->seats[i];

    if (seat->asked)
        return;
    seat->asked = true;
    seat->next = NO_SEAT;
    if (mover->first_asked == NO_SEAT)
        mover->first_asked = i;
    else
        mover->seats[mover->last_asked].next = i;
    mover->last_asked = i;
    atomic_store(&mover->asked, true);
}

/* True: the thread is to be woken if it sleeps. The service thread is asked by its poll, which also tells it of what it has not
 * polled lane 0 for before. */
static bool ask(const struct lane *lane)
{
    struct mover *mover;

    if (lane->mover < 0)
        return false;
    if (lane->mover == 0) {
        (void)poll_lane(lane, EPOLL_CTL_MOD);
        return false;
    }
    mover = &engine.movers[lane->mover];
    pthread_mutex_lock(&mover->lock);
    enqueue(mover, lane->seat);
    pthread_mutex_unlock(&mover->lock);
    return true;
}

/* See mover->asked. */
static void wake(struct mover *mover)
{
    if (atomic_exchange(&mover->asleep, false))
        engine_signal(&mover->wake_fd);
}

void pool_ask(struct lane *lane)
{
    if (ask(lane))
        lane->conn->wakes |= (uint64_t)1 << (lane->mover - 1);
}

void pool_wake(uint64_t wakes)
{
    for (; wakes; wakes &= wakes - 1)
        wake(&engine.movers[__builtin_ctzll(wakes) + 1]);
}

void pool_look(struct lane *lane)
{
    if (ask(lane))
        wake(&engine.movers[lane->mover]);
}

void pool_leave(struct lane *lane)
{
    if (lane->mover < 0)
        return;
    (void)epoll_ctl(engine.movers[lane->mover].poll, EPOLL_CTL_DEL, lane->fd, NULL);
    leave_seat(lane);
    lane->mover = -1;
}

/* ---- the threads ---- */

/* With a reference to its connection. NULL: it has left. */
static struct lane *find_lane(struct mover *mover, uint64_t data)
{
    uint32_t uses = (uint32_t)((data & ~POOL_LANE) >> 32);
    uint32_t i = (uint32_t)data;
    struct lane *lane = NULL;

    pthread_mutex_lock(&mover->lock);
    if (i < mover->n_seats && (mover->seats[i].uses & USES) == uses)
        lane = mover->seats[i].lane;
    if (lane)
        conn_ref(lane->conn);
    pthread_mutex_unlock(&mover->lock);
    return lane;
}

/* The end of a socket is told of once. Whoever holds lane 0 then may have read only what came before it, and may be its
 * caller's last call. */
void pool_move(struct mover *mover, const struct epoll_event *event)
{
    struct lane *lane = find_lane(mover, event->data.u64);
    struct conn *conn = lane ? lane->conn : NULL;

    if (!conn)
        return;
    if (event->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        atomic_store(&lane->hung, true);
    lane_kick(lane, BUDGET);
    conn_unref(conn);
}

/* All that it has been asked to look at, once: what is asked for meanwhile comes behind what its sockets tell. */
static void move_asked(struct mover *mover)
{
    uint32_t i;

    pthread_mutex_lock(&mover->lock);
    i = mover->first_asked;
    mover->first_asked = NO_SEAT;
    atomic_store(&mover->asked, false);
    while (i != NO_SEAT) {
        struct seat *seat = &mover->seats[i];
        struct lane *lane = seat->lane;

        i = seat->next;
        seat->asked = false;
        if (!lane)
            continue;
        conn_ref(lane->conn);
        pthread_mutex_unlock(&mover->lock);
        lane_kick(lane, BUDGET);
        conn_unref(lane->conn);
        pthread_mutex_lock(&mover->lock);
    }
    pthread_mutex_unlock(&mover->lock);
}

static void set_doing(struct mover *mover, enum doing doing)
{
    atomic_store_explicit(&mover->doing, doing, memory_order_relaxed);
}

/* Messages follow each other sooner than a thread is woken, and whoever wakes it has other connections to look after. Where
 * another thread takes the processor meanwhile, it is needed more there: who has looked on has used up its turn when
 * something comes. */
static int look_on(struct mover *mover, struct epoll_event *events)
{
    int64_t now = lc_now_ns();
    int64_t end = now + engine.spin_ns;
    int64_t last;
    int n;

    if (now < mover->look_after)
        return 0;
    set_doing(mover, LOOKS);
    do {
        sched_yield();
        n = epoll_wait(mover->poll, events, EVENTS, 0);
        last = now;
        now = lc_now_ns();
        if (now - last > CROWDED_NS)
            mover->look_after = now + PAUSE_NS;
    } while (n == 0 && !atomic_load(&mover->asked) && now < end && now >= mover->look_after &&
             !atomic_load_explicit(&engine.stop, memory_order_relaxed));
    return n;
}

static int wait_for_events(struct mover *mover, struct epoll_event *events)
{
    int n = 0;

    if (engine.spin_ns && !atomic_load(&mover->asked)) {
        if (atomic_fetch_add_explicit(&engine.n_looking, 1, memory_order_relaxed) < engine.lookers)
            n = look_on(mover, events);
        atomic_fetch_sub_explicit(&engine.n_looking, 1, memory_order_relaxed);
    }
    if (n == 0) {
        set_doing(mover, SLEEPS);
        atomic_store(&mover->asleep, true);
        n = epoll_wait(mover->poll, events, EVENTS, atomic_load(&mover->asked) ? 0 : -1);
        atomic_store(&mover->asleep, false);
    }
    set_doing(mover, MOVES);
    return n;
}

static void *mover_main(void *arg)
{
    struct mover *mover = arg;
    struct epoll_event events[EVENTS];

    atomic_fetch_add_explicit(&engine.n_busy, 1, memory_order_relaxed);
    while (!atomic_load(&engine.stop)) {
        int n;

        atomic_fetch_sub_explicit(&engine.n_busy, 1, memory_order_relaxed);
        n = wait_for_events(mover, events);
        atomic_fetch_add_explicit(&engine.n_busy, 1, memory_order_relaxed);
        for (int i = 0; i < n; i++)
            pool_move(mover, &events[i]);
        if (atomic_load(&mover->asked))
            move_asked(mover);
    }
    atomic_fetch_sub_explicit(&engine.n_busy, 1, memory_order_relaxed);
    return NULL;
}

/* ---- life; with engine.life held ---- */

static void close_fds(struct mover *mover)
{
    if (mover->poll >= 0)
        close(mover->poll);
    engine_close_signal(&mover->wake_fd);
}

/* All but what may still be touched by who is about to wake the thread before. */
static void clear(struct mover *mover)
{
    atomic_store(&mover->doing, (int)LOOKS);
    mover->look_after = 0;
    atomic_store(&mover->asked, false);
    lock_init(&mover->lock);
    mover->seats = NULL;
    mover->n_seats = 0;
    mover->first_asked = NO_SEAT;
    mover->lanes = 0;
}

/* What wakes the pool when it is to end is told of then: that must not need memory, and this does. */
static int open_mover(struct mover *mover)
{
    struct epoll_event end = { .data.u64 = UINT32_MAX };
    struct epoll_event asked = { .events = EPOLLIN | EPOLLET, .data.u64 = UINT32_MAX };
    int err;

    mover->poll = epoll_create1(EPOLL_CLOEXEC);
    mover->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (mover->poll < 0 || mover->wake_fd < 0 ||
        epoll_ctl(mover->poll, EPOLL_CTL_ADD, engine.wake_fd, &end) != 0 ||
        epoll_ctl(mover->poll, EPOLL_CTL_ADD, mover->wake_fd, &asked) != 0) {
        err = -errno;
        close_fds(mover);
        return err;
    }
    clear(mover);
    return 0;
}

/* Its error, for who has met another one. */
static int close_mover(struct mover *mover)
{
    close_fds(mover);
    pthread_mutex_destroy(&mover->lock);
    return -EAGAIN;
}

/* Nearly all connections of a job with many of them carry short messages alone, which NCCL's threads move. What is lost of those
 * is the service thread's. */
void pool_open(void)
{
    struct mover *service = &engine.movers[0];

    clear(service);
    service->poll = engine.service_fd;
    atomic_store(&service->wake_fd, -1);
    atomic_store(&service->doing, (int)SLEEPS);
}

/* Fewer do, too, where there are no descriptors or threads; the next lane tries again. No fork comes between a descriptor and
 * its place among the movers. A thread that fails leaves a mover which nobody has seen. */
void pool_grow(void)
{
    int n = atomic_load(&engine.n_pool);
    int err = 0;

    while (n < engine.threads_wanted && !err) {
        struct mover *mover = &engine.movers[n + 1];

        pthread_mutex_lock(&engine.lock);
        err = open_mover(mover);
        if (!err)
            err = pthread_create(&mover->thread, NULL, mover_main, mover) ? close_mover(mover) : 0;
        if (!err)
            atomic_store(&engine.n_pool, ++n);
        pthread_mutex_unlock(&engine.lock);
        if (!err)
            (void)pthread_setname_np(mover->thread, "lc-net-pool");
    }
}

void pool_end(void)
{
    struct epoll_event end = { .events = EPOLLIN, .data.u64 = UINT32_MAX };

    for (int i = 1; i <= atomic_load(&engine.n_pool); i++) {
        (void)epoll_ctl(engine.movers[i].poll, EPOLL_CTL_MOD, engine.wake_fd, &end);
        pthread_join(engine.movers[i].thread, NULL);
    }
}

void pool_forget(void)
{
    for (int i = 1; i <= atomic_load(&engine.n_pool); i++)
        close_fds(&engine.movers[i]);
}

void pool_close(void)
{
    pool_forget();
    for (int i = 0; i <= atomic_load(&engine.n_pool); i++) {
        pthread_mutex_destroy(&engine.movers[i].lock);
        free(engine.movers[i].seats);
    }
    atomic_store(&engine.n_pool, 0);
}
