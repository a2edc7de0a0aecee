/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/verbs/service.h"

#include "common/deadline.h"
#include "common/log.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define MS            ((int64_t)1000000)
#define STRANGER_MS   10000 /* to say the token */
#define MAX_STRANGERS 256   /* of one listen; the oldest goes first */
#define SCARCE_MS     100   /* before the next try to accept, where no descriptor was left */
#define EVENTS        16

enum kind {
    KICK,
    LISTEN,
    STRANGER,
    COMM
}; /* of an event: its two lowest bits; above them the id */

/* Somebody who has connected and not said the token yet. */
struct stranger {
    struct stranger *next;
    uint64_t id;
    int fd;
    size_t bytes;
    struct lc_verbs_hello hello;
    int64_t deadline_ns;
    char peer[LC_TCP_ADDRESS_TEXT];
};

struct lc_net_listen {
    struct lc_net_listen *next;
    uint64_t id;
    int fd;
    struct lc_verbs_device *dev;
    union lc_tcp_address address;
    uint8_t token[LC_VERBS_TOKEN];
    int64_t timeout_ns;
    struct stranger *strangers;   /* the newest first */
    struct lc_net_comm *come[16]; /* connections that nobody has accepted yet */
    int n_come;
    unsigned refused;
};

/* Guarded by `lock`, but for `forked`. The order of locks: a connection's own, then this one. A fork waits for it, and every
 * descriptor is made with it held and can be found from here: a child has to close them all. */
static struct {
    pthread_mutex_t lock;
    pthread_t thread;
    bool started, stop;
    int epoll, kick;
    int moving; /* the socket of a stranger that becomes a connection; -1: none does */
    uint64_t last_id;
    struct lc_net_comm *comms;
    struct lc_net_listen *listens;
    int64_t accept_ns; /* listens are not watched until then; 0: they are */
} service = { .lock = PTHREAD_MUTEX_INITIALIZER, .epoll = -1, .kick = -1, .moving = -1 };

static bool forked; /* written in the child before it has a second thread */

bool lc_verbs_forked(void)
{
    return forked;
}

static void lock(void)
{
    (void)pthread_mutex_lock(&service.lock);
}

static void unlock(void)
{
    (void)pthread_mutex_unlock(&service.lock);
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

/* As long as a child holds a socket, or a device that queue pairs are on, the peer does not see the parent's end. A child of
 * the child has nothing of it. */
static void let_go(void)
{
    for (struct lc_net_comm *comm = service.comms; comm; comm = comm->next)
        close_if_open(comm->fd);
    for (struct lc_net_listen *listen = service.listens; listen; listen = listen->next) {
        for (struct stranger *stranger = listen->strangers; stranger; stranger = stranger->next)
            close(stranger->fd);
        close(listen->fd);
    }
    close_if_open(service.moving);
    close_if_open(service.epoll);
    close_if_open(service.kick);
    lc_verbs_devices_forget();
}

static void in_child(void)
{
    if (!forked)
        let_go();
    forked = true;
    unlock();
}

int lc_verbs_service_prepare(void)
{
    return -pthread_atfork(lock, unlock, in_child);
}

static int watch(int op, int fd, enum kind kind, uint64_t id, uint32_t events)
{
    struct epoll_event event = { .events = events, .data.u64 = id << 2 | kind };

    return epoll_ctl(service.epoll, op, fd, &event) ? -errno : 0;
}

void lc_verbs_service_kick(void)
{
    const uint64_t one = 1;

    /* Full means kicked already; the thread may have ended, but not those who kick. */
    lock();
    if (service.kick >= 0 && write(service.kick, &one, sizeof(one)) < 0)
        lc_debug("the thread is kicked all the time");
    unlock();
}

void lc_verbs_service_watch(struct lc_net_comm *comm, bool writable)
{
    if (!comm->id || comm->gone)
        return;
    lock();
    (void)watch(EPOLL_CTL_MOD, comm->fd, COMM, comm->id,
                EPOLLIN | (writable ? (uint32_t)EPOLLOUT : 0));
    unlock();
}

void lc_verbs_service_unwatch(struct lc_net_comm *comm)
{
    if (!comm->id || comm->fd < 0)
        return;
    lock();
    (void)epoll_ctl(service.epoll, EPOLL_CTL_DEL, comm->fd, NULL);
    unlock();
}

/* ---- connections ---- */

static void unref(struct lc_net_comm *comm)
{
    bool last;

    lock();
    last = --comm->refs == 0;
    if (last) {
        struct lc_net_comm **at = &service.comms;

        while (*at != comm)
            at = &(*at)->next;
        *at = comm->next;
    }
    unlock();
    if (last)
        lc_verbs_comm_free(comm);
}

static void comm_event(uint64_t id, uint32_t events)
{
    struct lc_net_comm *comm;

    lock();
    for (comm = service.comms; comm && comm->id != id; comm = comm->next)
        ;
    if (comm && comm->closed)
        comm = NULL;
    if (comm)
        comm->refs++;
    unlock();
    if (!comm)
        return;
    (void)pthread_mutex_lock(&comm->lock);
    if (comm->fd >= 0 && events & EPOLLOUT)
        lc_verbs_comm_writable(comm);
    if (comm->fd >= 0 && events & (EPOLLIN | EPOLLHUP | EPOLLERR) && !comm->connecting)
        lc_verbs_comm_readable(comm);
    (void)pthread_mutex_unlock(&comm->lock);
    unref(comm);
}

/* The connection behind `comm` in the list, or the first, with a reference instead of that on `comm`. New ones are in front
 * and are not met. */
static struct lc_net_comm *next_comm(struct lc_net_comm *comm)
{
    struct lc_net_comm *next;

    lock();
    next = comm ? comm->next : service.comms;
    while (next && next->closed)
        next = next->next;
    if (next)
        next->refs++;
    unlock();
    if (comm)
        unref(comm);
    return next;
}

/* Gives every connection its tick; returns the milliseconds until the next one is due. */
static int tick_comms(void)
{
    int next = 10000;

    for (struct lc_net_comm *comm = next_comm(NULL); comm; comm = next_comm(comm)) {
        int wants = next;

        (void)pthread_mutex_lock(&comm->lock);
        if (comm->fd >= 0)
            wants = lc_verbs_comm_tick(comm, lc_now_ns());
        (void)pthread_mutex_unlock(&comm->lock);
        next = wants < next ? wants : next;
    }
    return next;
}

/* ---- listens ---- */

static struct lc_net_listen *find_listen(uint64_t id)
{
    struct lc_net_listen *listen = service.listens;

    while (listen && listen->id != id)
        listen = listen->next;
    return listen;
}

static void drop_stranger(struct lc_net_listen *listen, struct stranger *stranger, bool keep_fd)
{
    struct stranger **at = &listen->strangers;

    while (*at != stranger)
        at = &(*at)->next;
    *at = stranger->next;
    if (!keep_fd)
        close(stranger->fd);
    free(stranger);
}

/* A side socket says nothing for as long as all goes well, and whether the peer is there is asked of its device. But not for
 * ever: where a machine's processors have stopped the device goes on. And what is between may forget a connection
 * that is silent. Eleven minutes, as by the system's settings, though not two hours before the first question. */
static void set_options(int fd)
{
    int one = 1, seconds = 60, questions = 10;

    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof(seconds));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &questions, sizeof(questions));
}

static void add_stranger(struct lc_net_listen *listen, int fd, const union lc_tcp_address *address)
{
    struct stranger *stranger = calloc(1, sizeof(*stranger)), *oldest = NULL;
    int n = 0;

    if (!stranger) {
        close(fd);
        return;
    }
    for (struct stranger *s = listen->strangers; s; s = s->next, n++)
        oldest = s;
    if (n >= MAX_STRANGERS)
        drop_stranger(listen, oldest, false);
    set_options(fd);
    stranger->id = ++service.last_id;
    stranger->fd = fd;
    stranger->deadline_ns = lc_now_ns() + STRANGER_MS * MS;
    (void)lc_tcp_address_text(address, stranger->peer);
    stranger->next = listen->strangers;
    listen->strangers = stranger;
    if (watch(EPOLL_CTL_ADD, fd, STRANGER, stranger->id, EPOLLIN))
        drop_stranger(listen, stranger, false);
}

/* A listen that cannot be served stays readable, which would keep the thread busy. With the lock held. */
static void watch_listens(bool on)
{
    service.accept_ns = on ? 0 : lc_now_ns() + SCARCE_MS * MS;
    for (struct lc_net_listen *listen = service.listens; listen; listen = listen->next)
        (void)watch(EPOLL_CTL_MOD, listen->fd, LISTEN, listen->id, on ? (uint32_t)EPOLLIN : 0);
}

static void listen_event(uint64_t id)
{
    struct lc_net_listen *listen;

    lock();
    listen = find_listen(id);
    for (int i = 0; listen && i < EVENTS; i++) {
        union lc_tcp_address address;
        socklen_t size = sizeof(address);
        int fd;

        memset(&address, 0, sizeof(address));
        fd = accept4(listen->fd, &address.sa, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            lc_warn_once("a peer connects and there is no descriptor for it: %s", strerror(errno));
            watch_listens(false);
        }
        if (fd < 0)
            break;
        add_stranger(listen, fd, &address);
    }
    unlock();
}

/* True if there may be more to come from the stranger. */
static bool hear(struct lc_net_listen *listen, struct stranger *stranger)
{
    ssize_t got = recv(stranger->fd, (char *)&stranger->hello + stranger->bytes,
                       sizeof(stranger->hello) - stranger->bytes, MSG_DONTWAIT);

    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return true;
    if (got <= 0)
        return false;
    stranger->bytes += (size_t)got;
    return memcmp(stranger->hello.token, listen->token,
                  stranger->bytes < LC_VERBS_TOKEN ? stranger->bytes : LC_VERBS_TOKEN) == 0;
}

static void refuse(struct lc_net_listen *listen, struct stranger *stranger)
{
    listen->refused++;
    lc_debug("%s does not know the token; %u such so far", stranger->peer, listen->refused);
    drop_stranger(listen, stranger, false);
}

static struct stranger *find_stranger(const struct lc_net_listen *listen, uint64_t id)
{
    struct stranger *stranger = listen->strangers;

    while (stranger && stranger->id != id)
        stranger = stranger->next;
    return stranger;
}

/* Returns the socket of whoever has said all of HELLO and is welcome, with copies of it and of its listen; else -1. */
static int heard(uint64_t id, struct lc_net_listen *copy, struct stranger *out)
{
    struct stranger *stranger = NULL;
    int fd = -1;

    lock();
    for (struct lc_net_listen *listen = service.listens; listen; listen = listen->next) {
        stranger = find_stranger(listen, id);
        if (!stranger)
            continue;
        if (!hear(listen, stranger)) {
            refuse(listen, stranger);
        } else if (stranger->bytes == sizeof(stranger->hello)) {
            *copy = *listen;
            *out = *stranger;
            fd = stranger->fd;
            (void)epoll_ctl(service.epoll, EPOLL_CTL_DEL, fd, NULL);
            service.moving = fd;
            drop_stranger(listen, stranger, true);
        }
        break;
    }
    unlock();
    return fd;
}

static void drop_moving(void)
{
    lock();
    close(service.moving);
    service.moving = -1;
    unlock();
}

static void stranger_event(uint64_t id)
{
    struct lc_net_listen from, *listen;
    struct stranger stranger;
    int fd = heard(id, &from, &stranger);
    struct lc_net_comm *comm;
    bool kept = false;

    if (fd < 0)
        return;
    comm = lc_verbs_comm_new(from.dev, false, fd, from.timeout_ns);
    if (!comm) {
        drop_moving();
        return;
    }
    memcpy(comm->peer, stranger.peer, sizeof(comm->peer));
    memcpy(comm->token, from.token, sizeof(comm->token));
    comm->traffic_class = -1;
    if (lc_verbs_service_add(comm)) {
        drop_moving();
        lc_verbs_comm_free(comm);
        return;
    }
    (void)pthread_mutex_lock(&comm->lock);
    lc_verbs_comm_hello(comm);
    (void)lc_verbs_comm_greeted(comm, &stranger.hello);
    (void)pthread_mutex_unlock(&comm->lock);
    lock();
    listen = find_listen(from.id);
    if (listen && listen->n_come < (int)(sizeof(listen->come) / sizeof(*listen->come))) {
        listen->come[listen->n_come++] = comm;
        kept = true;
    }
    unlock();
    if (!kept)
        lc_verbs_service_close(comm);
}

/* Returns the milliseconds until it is due again, at most. */
static int tick_listens(void)
{
    int64_t now = lc_now_ns();
    int wait_ms = STRANGER_MS / 10;

    lock();
    if (service.accept_ns && now >= service.accept_ns)
        watch_listens(true);
    if (service.accept_ns)
        wait_ms = SCARCE_MS;
    for (struct lc_net_listen *listen = service.listens; listen; listen = listen->next)
        for (struct stranger *s = listen->strangers, *next; s; s = next) {
            next = s->next;
            if (now >= s->deadline_ns)
                refuse(listen, s);
        }
    unlock();
    return wait_ms;
}

/* Connections that were begun and that nobody has asked for since. */
static void tick_offered(void)
{
    int64_t now = lc_now_ns();
    struct lc_net_comm *comm;

    lock();
    for (comm = service.comms; comm; comm = comm->next)
        if (comm->offered && now >= comm->offer_ends_ns)
            break;
    if (comm)
        comm->offered = false;
    unlock();
    lc_verbs_service_close(comm);
}

/* ---- the thread ---- */

static void *serve(void *arg)
{
    struct epoll_event events[EVENTS];
    int wait_ms = 0;

    (void)arg;
    for (;;) {
        int n = epoll_wait(service.epoll, events, EVENTS, wait_ms);
        int listens_ms;
        bool stop;

        lock();
        stop = service.stop;
        unlock();
        if (stop)
            return NULL;
        for (int i = 0; i < n; i++) {
            uint64_t id = events[i].data.u64 >> 2, kicks;

            switch ((enum kind)(events[i].data.u64 & 3)) {
            case KICK:
                if (read(service.kick, &kicks, sizeof(kicks)) < 0)
                    break;
                break;
            case LISTEN: listen_event(id); break;
            case STRANGER: stranger_event(id); break;
            case COMM: comm_event(id, events[i].events); break;
            }
        }
        listens_ms = tick_listens();
        tick_offered();
        wait_ms = tick_comms();
        if (wait_ms > listens_ms)
            wait_ms = listens_ms;
    }
}

/* These with the lock held. */
static void close_polls(void)
{
    close_if_open(service.epoll);
    close_if_open(service.kick);
    service.epoll = service.kick = -1;
}

static int start(void)
{
    int err;

    if (service.started)
        return 0;
    service.epoll = epoll_create1(EPOLL_CLOEXEC);
    service.kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    err = service.epoll < 0 || service.kick < 0 ? -errno : 0;
    if (!err)
        err = watch(EPOLL_CTL_ADD, service.kick, KICK, 0, EPOLLIN);
    if (!err)
        err = -pthread_create(&service.thread, NULL, serve, NULL);
    if (!err) {
        service.started = true;
        return 0;
    }
    lc_error("the verbs transport's thread cannot be started: %s", strerror(-err));
    close_polls();
    return err;
}

/* The library is unloaded, or the process ends. */
__attribute__((destructor)) static void finish(void)
{
    bool idle;

    if (forked)
        return;
    lock();
    service.stop = true;
    idle = !service.comms && !service.listens;
    unlock();
    if (service.started) {
        lc_verbs_service_kick();
        (void)pthread_join(service.thread, NULL);
        lock();
        close_polls();
        unlock();
    }
    /* At the end of a process connections may still be in use by threads that go on to the last. */
    if (idle)
        lc_verbs_devices_close();
}

/* ---- for the table ---- */

/* With the lock held. */
static int enter(struct lc_net_comm *comm)
{
    int err;

    comm->id = ++service.last_id;
    err = watch(EPOLL_CTL_ADD, comm->fd, COMM, comm->id,
                EPOLLIN | (comm->connecting ? (uint32_t)EPOLLOUT : 0));
    if (err) {
        comm->id = 0;
        return err;
    }
    comm->refs = 1;
    comm->next = service.comms;
    service.comms = comm;
    return 0;
}

int lc_verbs_service_add(struct lc_net_comm *comm)
{
    int err;

    lock();
    err = start();
    if (!err)
        err = enter(comm);
    if (!err && service.moving == comm->fd)
        service.moving = -1;
    unlock();
    if (!err)
        lc_verbs_service_kick();
    return err;
}

static int open_socket(const union lc_tcp_address *address, bool *connecting)
{
    int fd = socket(address->sa.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int err;

    if (fd < 0) {
        err = -errno;
        lc_error("no socket: %s", strerror(-err));
        return err;
    }
    set_options(fd);
    *connecting = connect(fd, &address->sa, lc_tcp_address_size(address)) != 0;
    if (*connecting && errno != EINPROGRESS) {
        char text[LC_TCP_ADDRESS_TEXT];

        err = errno;
        close(fd);
        if (lc_verbs_no_route(err))
            return -EHOSTUNREACH;
        lc_error("cannot connect to %s: %s", lc_tcp_address_text(address, text), strerror(err));
        return -EREMOTEIO;
    }
    return fd;
}

int lc_verbs_service_dial(struct lc_net_comm *comm, const union lc_tcp_address *address)
{
    int err;

    lock();
    err = start();
    if (!err)
        comm->fd = open_socket(address, &comm->connecting);
    if (!err && comm->fd < 0)
        err = comm->fd;
    if (!err)
        err = enter(comm);
    if (err)
        close_if_open(comm->fd);
    unlock();
    if (!err)
        lc_verbs_service_kick();
    return err;
}

/* Takes it from its owner; false: it has been, or never was there. */
static bool take_back(struct lc_net_comm *comm)
{
    struct lc_net_comm *known;
    bool found;

    lock();
    for (known = service.comms; known && known != comm; known = known->next)
        ;
    found = known && !known->closed;
    if (found) {
        known->closed = true;
        known->offered = false;
    }
    unlock();
    return found;
}

void lc_verbs_service_close(struct lc_net_comm *comm)
{
    if (!comm || forked)
        return;
    if (!take_back(comm)) {
        lc_warn("a connection is closed that there is not");
        return;
    }
    /* The thread may be at work on it, for as long as making a queue pair takes. */
    (void)pthread_mutex_lock(&comm->lock);
    lc_verbs_comm_stop(comm);
    (void)pthread_mutex_unlock(&comm->lock);
    unref(comm);
}

static bool in_use(const struct lc_net_mr *mr)
{
    return mr && atomic_load_explicit(&mr->users, memory_order_acquire) > 0;
}

static void release(struct lc_net_comm *comm, const struct lc_net_mr *mr)
{
    (void)pthread_mutex_lock(&comm->lock);
    lc_verbs_comm_release(comm, mr);
    (void)pthread_mutex_unlock(&comm->lock);
}

int lc_verbs_service_dereg(struct lc_net_comm *comm, struct lc_net_mr *mr)
{
    if (in_use(mr))
        release(comm, mr);
    if (in_use(mr)) /* it serves every connection of the device */
        for (comm = next_comm(NULL); comm; comm = next_comm(comm))
            release(comm, mr);
    return lc_verbs_mr_close(mr);
}

void lc_verbs_service_offer(struct lc_net_comm *comm)
{
    lock();
    comm->offered = true;
    comm->offer_ends_ns = lc_now_ns() + 2 * comm->timeout_ns;
    unlock();
}

struct lc_net_comm *lc_verbs_service_take(uint64_t ticket, const uint8_t token[LC_VERBS_TOKEN])
{
    struct lc_net_comm *comm;

    lock();
    for (comm = service.comms; comm; comm = comm->next)
        if (comm->offered && comm->ticket == ticket &&
            memcmp(comm->token, token, LC_VERBS_TOKEN) == 0)
            break;
    if (comm)
        comm->offered = false;
    unlock();
    return comm;
}

static int open_listen(struct lc_net_listen *made, const union lc_tcp_address *address)
{
    socklen_t size = sizeof(made->address);
    union lc_tcp_address any = *address;

    if (any.sa.sa_family == AF_INET)
        any.v4.sin_port = 0;
    else
        any.v6.sin6_port = 0;
    if (getrandom(made->token, sizeof(made->token), 0) != (ssize_t)sizeof(made->token))
        return -EIO;
    made->fd = socket(any.sa.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (made->fd < 0)
        return -errno;
    if (bind(made->fd, &any.sa, lc_tcp_address_size(&any)) || listen(made->fd, SOMAXCONN) ||
        getsockname(made->fd, &made->address.sa, &size))
        return -errno;
    return 0;
}

int lc_verbs_service_listen(struct lc_verbs_device *dev, const union lc_tcp_address *address,
                            int64_t timeout_ns, struct lc_net_listen **out)
{
    struct lc_net_listen *made = calloc(1, sizeof(*made));
    int err;

    if (!made)
        return -ENOMEM;
    made->dev = dev;
    made->timeout_ns = timeout_ns;
    made->fd = -1;
    lock();
    err = start();
    if (!err)
        err = open_listen(made, address);
    if (!err) {
        made->id = ++service.last_id;
        err = watch(EPOLL_CTL_ADD, made->fd, LISTEN, made->id, EPOLLIN);
    }
    if (!err) {
        made->next = service.listens;
        service.listens = made;
    }
    if (err)
        close_if_open(made->fd);
    unlock();
    if (!err) {
        *out = made;
        return 0;
    }
    lc_error("%s: cannot listen: %s", dev->name, strerror(-err));
    free(made);
    return err;
}

void lc_verbs_service_handle(const struct lc_net_listen *listen, struct lc_verbs_handle *out)
{
    *out = (struct lc_verbs_handle){ .magic = LC_VERBS_MAGIC, .version = LC_VERBS_VERSION };
    memcpy(out->token, listen->token, sizeof(out->token));
    lc_tcp_address_write(&listen->address, &out->address);
}

void lc_verbs_service_unlisten(struct lc_net_listen *listen)
{
    struct lc_net_listen **at;

    if (!listen || forked)
        return;
    lock();
    for (at = &service.listens; *at && *at != listen;)
        at = &(*at)->next;
    if (!*at) {
        unlock();
        lc_warn("a listen is closed that there is not");
        return;
    }
    *at = listen->next;
    while (listen->strangers)
        drop_stranger(listen, listen->strangers, false);
    close(listen->fd);
    unlock();
    for (int i = 0; i < listen->n_come; i++)
        lc_verbs_service_close(listen->come[i]);
    free(listen);
}

struct lc_net_comm *lc_verbs_service_incoming(struct lc_net_listen *listen)
{
    struct lc_net_comm *comm = NULL;

    lock();
    if (listen->n_come) {
        comm = listen->come[0];
        listen->n_come--;
        memmove(listen->come, listen->come + 1, (size_t)listen->n_come * sizeof(*listen->come));
    }
    unlock();
    return comm;
}

void lc_verbs_service_put_back(struct lc_net_listen *listen, struct lc_net_comm *comm)
{
    bool kept;

    lock();
    kept = listen->n_come < (int)(sizeof(listen->come) / sizeof(*listen->come));
    if (kept)
        listen->come[listen->n_come++] = comm;
    unlock();
    if (!kept)
        lc_verbs_service_close(comm);
}
