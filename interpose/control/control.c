/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/control/control_internal.h"

#include "common/log.h"

#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct control control = { .lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP,
                           .wake_fd = -1,
                           .tcp_fd = -1,
                           .unix_fd = -1,
                           .pass_fd = -1 };

/* ---- the thread ---- */

void lc_control_wake(void)
{
    uint64_t one = 1;
    ssize_t ignored = write(control.wake_fd, &one, sizeof(one)); /* full means awake already */

    (void)ignored;
}

/* The descriptors of one turn. Grown by the thread only. */
struct turn {
    struct pollfd *fds;
    size_t room, count;
};

static void add(struct turn *turn, int fd, bool write)
{
    if (turn->count == turn->room) {
        size_t room = turn->room ? 2 * turn->room : 64;
        struct pollfd *fds = realloc(turn->fds, room * sizeof(*fds));

        if (!fds)
            return; /* that one is looked at when there is memory again */
        turn->fds = fds;
        turn->room = room;
    }
    turn->fds[turn->count++] = (struct pollfd){ fd, (short)(POLLIN | (write ? POLLOUT : 0)), 0 };
}

/* A listener that is readable and not served would wake the thread without end: meanwhile it is not looked at. */
static bool may_accept(void)
{
    return lc_deadline_passed(control.accept_from) && lc_arbiter_has_room();
}

static bool may_receive(void)
{
    return lc_deadline_passed(control.accept_from) && lc_pass_has_room();
}

static void gather(struct turn *turn)
{
    turn->count = 0;
    add(turn, control.wake_fd, false);
    if (control.tcp_fd >= 0 && may_accept())
        add(turn, control.tcp_fd, false);
    if (control.unix_fd >= 0 && may_accept())
        add(turn, control.unix_fd, false);
    for (struct client *c = control.clients; c; c = c->next)
        add(turn, c->conn.fd, lc_conn_wants_write(&c->conn));
    for (struct link *l = control.links; l; l = l->next)
        add(turn, l->conn.fd, !l->connected || lc_conn_wants_write(&l->conn));
    if (control.pass_fd >= 0 && may_receive())
        add(turn, control.pass_fd, false);
    for (struct lc_visitor *v = control.visitors; v; v = v->next)
        add(turn, v->conn.fd, false);
    for (struct lc_fetch *f = control.fetches; f; f = f->next) {
        if (f->conn.fd >= 0)
            add(turn, f->conn.fd, false);
    }
}

static short events_of(const struct turn *turn, int fd, size_t *hint)
{
    for (size_t n = 0; n < turn->count;
         n++) { /* the lists keep their order: the hint nearly always fits */
        size_t i = (*hint + n) % turn->count;

        if (turn->fds[i].fd == fd) {
            *hint = i + 1;
            return turn->fds[i].revents;
        }
    }
    return 0;
}

/* Every connection is visited each turn, since a frame for it may have been queued by another. What is dropped meanwhile
 * is only ever the one visited: accepting, which may drop a stranger, comes last. */
static void serve_all(const struct turn *turn)
{
    size_t hint = 0;

    for (struct client *c = control.clients, *next; c; c = next) {
        next = c->next;
        lc_arbiter_serve(c, events_of(turn, c->conn.fd, &hint));
    }
    for (struct link *l = control.links, *next; l; l = next) {
        next = l->next;
        lc_member_serve(l, events_of(turn, l->conn.fd, &hint));
    }
    for (struct lc_visitor *v = control.visitors, *next; v; v = next) {
        next = v->next;
        lc_pass_serve_visitor(v, events_of(turn, v->conn.fd, &hint));
    }
    for (struct lc_fetch *f = control.fetches; f; f = f->next)
        lc_pass_serve_fetch(f, events_of(turn, f->conn.fd, &hint));
}

static void flush_clients(void)
{
    for (struct client *c = control.clients, *next; c; c = next) {
        next = c->next;
        lc_arbiter_serve(c, 0);
    }
}

static bool is_own_user(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof(peer);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

static void receive_tcp(int fd)
{
    lc_conn_tune(fd);
    lc_arbiter_accept(fd, false);
}

static void receive_unix(int fd)
{
    if (is_own_user(fd))
        lc_arbiter_accept(fd, true);
    else
        close(fd);
}

static void receive_visitor(int fd)
{
    if (is_own_user(fd))
        lc_pass_accept(fd);
    else
        close(fd);
}

static void accept_all(int listener, bool (*may)(void), void (*receive)(int fd))
{
    for (int i = 0; listener >= 0 && may() && i < 64; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ECONNABORTED)
            control.accept_from = lc_deadline_in_ms(1000); /* descriptors or memory are short */
        if (fd < 0)
            return;
        receive(fd);
    }
}

static void *run(void *unused)
{
    struct turn turn = { 0 };
    int patience;

    for (;;) {
        uint64_t wakes;
        ssize_t ignored;

        pthread_mutex_lock(&control.lock);
        gather(&turn);
        patience = lc_member_patience_ms();
        pthread_mutex_unlock(&control.lock);
        /* Other deadlines are looked at once a second. */
        if (poll(turn.fds, turn.count, patience) < 0 && errno != EINTR)
            (void)poll(NULL, 0, 100); /* no memory, or the program has lowered a limit below us */
        ignored = read(control.wake_fd, &wakes, sizeof(wakes));
        (void)ignored;
        pthread_mutex_lock(&control.lock);
        serve_all(&turn);
        flush_clients();
        lc_arbiter_expire();
        lc_member_expire();
        lc_finding_expire();
        lc_hang_look();
        accept_all(control.tcp_fd, may_accept, receive_tcp);
        accept_all(control.unix_fd, may_accept, receive_unix);
        accept_all(control.pass_fd, may_receive, receive_visitor);
        lc_writer_start();
        pthread_mutex_unlock(&control.lock);
    }
    return NULL;
}

/* ---- fork: the child starts afresh, without the parent's descriptors, so that the parent's end is seen ---- */

static void before_fork(void)
{
    pthread_mutex_lock(&control.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&control.lock);
}

static void after_fork_in_child(void)
{
    for (struct client *c = control.clients; c; c = c->next)
        close(c->conn.fd);
    for (struct hosted *h = control.hosted; h; h = h->next) {
        if (h->words_fd >= 0)
            close(h->words_fd);
    }
    lc_member_forked();
    lc_pass_forked();
    if (control.running)
        close(control.wake_fd);
    if (control.tcp_fd >= 0)
        close(control.tcp_fd);
    if (control.unix_fd >= 0)
        close(control.unix_fd);
    control = (struct control){ .lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP,
                                .wake_fd = -1,
                                .tcp_fd = -1,
                                .unix_fd = -1,
                                .pass_fd = -1 };
}

static void prepare_once(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int lc_control_start(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, old;
    int err;

    if (control.running)
        return 0;
    pthread_once(&once, prepare_once);
    control.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (control.wake_fd < 0)
        return -errno;
    lc_deadline_cond_init(&control.answered);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all,
                    &old); /* the host's signal handlers are not for this thread */
    err = pthread_create(&thread, &attr, run, NULL);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (err) {
        close(control.wake_fd);
        control.wake_fd = -1;
        return -err;
    }
    (void)pthread_setname_np(thread, "loongcomm");
    control.running = true;
    control.owner = getpid();
    return 0;
}

/* ---- listening ---- */

/* Same name from the same endpoint; an abstract name belongs to the network namespace, as the port does. */
void lc_unix_name(const struct lc_ticket *ticket, char name[64])
{
    int at = snprintf(name, 64, "loongcomm-%u-", ticket->port);

    for (int i = 0; i < (ticket->family == 4 ? 4 : 16); i++)
        at += snprintf(name + at, (size_t)(64 - at), "%02x", ticket->address[i]);
}

/* NCCL's id begins with a 64-bit magic and the sockaddr its bootstrap listens on. */
static void address_of_id(const char id[LC_ID_BYTES], struct lc_ticket *out)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;

    memcpy(&v4, id + 8, sizeof(v4));
    memcpy(&v6, id + 8, sizeof(v6));
    *out = (struct lc_ticket){ .family = v4.sin_family == AF_INET6 ? 6 : 4 };
    if (v4.sin_family == AF_INET6) {
        memcpy(out->address, &v6.sin6_addr, sizeof(v6.sin6_addr));
        out->scope = v6.sin6_scope_id;
    } else if (v4.sin_family == AF_INET) {
        memcpy(out->address, &v4.sin_addr, sizeof(v4.sin_addr));
    } else {
        static const unsigned char loopback[4] = { 127, 0, 0, 1 };

        memcpy(out->address, loopback, sizeof(loopback));
    }
}

static int listen_tcp(struct lc_ticket *ticket)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_scope_id = ticket->scope };
    bool is_v4 = ticket->family == 4;
    struct sockaddr *addr = is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6;
    socklen_t length = is_v4 ? sizeof(v4) : sizeof(v6);
    int fd = socket(addr->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int err;

    if (fd < 0)
        return -errno;
    memcpy(&v4.sin_addr, ticket->address, sizeof(v4.sin_addr));
    memcpy(&v6.sin6_addr, ticket->address, sizeof(v6.sin6_addr));
    if (bind(fd, addr, length) != 0 || listen(fd, 1024) != 0 ||
        getsockname(fd, addr, &length) != 0) {
        err = -errno;
        close(fd);
        return err;
    }
    ticket->port = ntohs(is_v4 ? v4.sin_port : v6.sin6_port);
    return fd;
}

/* Without it, members of this host come by TCP and ask. */
static int listen_unix(const struct lc_ticket *ticket)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    char name[64];

    if (fd < 0)
        return -errno;
    lc_unix_name(ticket, name);
    memcpy(addr.sun_path + 1, name, strlen(name));
    if (bind(fd, (struct sockaddr *)&addr,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))) != 0 ||
        listen(fd, 1024) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static uint32_t share_of_descriptors(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur / 4 > LC_CLIENTS)
        return LC_CLIENTS;
    return (uint32_t)limit.rlim_cur / 4;
}

/* One listener per process: the address of its first id serves all later ones. */
static int start_listening(const char id[LC_ID_BYTES])
{
    struct lc_ticket ticket;
    int fd;

    if (control.endpoint.port)
        return 0;
    address_of_id(id, &ticket);
    fd = listen_tcp(&ticket);
    if (fd < 0)
        return fd;
    control.tcp_fd = fd;
    control.max_clients = share_of_descriptors();
    control.unix_fd = listen_unix(&ticket);
    control.endpoint = ticket;
    return 0;
}

int lc_control_stamp(char id[LC_ID_BYTES])
{
    struct lc_ticket ticket;
    int err;

    pthread_mutex_lock(&control.lock);
    err = lc_control_start();
    if (!err)
        err = start_listening(id);
    ticket = control.endpoint;
    if (!err && getrandom(ticket.token, sizeof(ticket.token), 0) != (ssize_t)sizeof(ticket.token))
        err = -EIO;
    if (!err)
        err = lc_arbiter_open_root(ticket.token);
    pthread_mutex_unlock(&control.lock);
    if (err) {
        lc_warn_once(
            "the control plane cannot start (%s): communicators made from here stay with NCCL",
            strerror(-err));
        return err;
    }
    lc_ticket_write(id, &ticket);
    lc_control_wake();
    return 0;
}

/* ---- the end ---- */

static bool unsent(void)
{
    bool left = false;

    for (struct client *c = control.clients; c; c = c->next)
        left |= lc_conn_flush(&c->conn) == 0 && lc_conn_wants_write(&c->conn);
    for (struct link *l = control.links; l; l = l->next)
        left |= l->connected && lc_conn_flush(&l->conn) == 0 && lc_conn_wants_write(&l->conn);
    return left;
}

/* Others have it for moments, which a busy machine makes long; to end without a goodbye is a death to all peers. A handler
 * of a signal may have interrupted the very thread that has it: that is told at once (EDEADLK). */
static bool lock_until(struct lc_deadline until)
{
    static const struct timespec at_once = { 0 };
    int err;

    while ((err = pthread_mutex_timedlock(&control.lock, &at_once)) == ETIMEDOUT &&
           !lc_deadline_passed(until))
        (void)poll(NULL, 0, 1);
    return err == 0;
}

/* Links first: what they say to this very process's arbiter must not be taken for a death. */
static void say_goodbye(struct lc_deadline until)
{
    lc_member_goodbye();
    lc_arbiter_close_all();
    while (unsent() && !lc_deadline_passed(until))
        (void)poll(NULL, 0, 1);
    lc_writer_start();
}

void lc_control_fini(void)
{
    struct lc_deadline until;
    bool mine;

    atomic_store(&control.ended, true);
    if (!lock_until(lc_deadline_in_ms(LC_EXIT_LOCK_MS)))
        return;
    until = lc_deadline_in_ms(LC_GOODBYE_MS);
    mine = control.running && control.owner == getpid(); /* no clone without the handlers of fork */
    if (mine)
        say_goodbye(until);
    while (mine && lc_writer_busy() && !lc_deadline_passed(until)) { /* the last lines */
        pthread_mutex_unlock(&control.lock);
        (void)poll(NULL, 0, 1);
        if (!lock_until(until))
            return;
    }
    pthread_mutex_unlock(&control.lock);
}
