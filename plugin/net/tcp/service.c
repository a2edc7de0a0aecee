/* SPDX-License-Identifier: Apache-2.0
 *
 * The service thread: hears whoever connects, has lanes dialled, ends what takes too long, and moves lanes 0 for which nobody
 * calls. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/talk.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define GUESTS_MAX 512
#define READY_MAX  1024
#define ACCEPTS    64 /* of one turn */
#define EVENTS     32
#define SAMPLE_NS  ((int64_t)1000000000)
#define END_NS     ((int64_t)20 * 1000000) /* so often it looks whether all have left */

/* Listeners are changed with engine.lock held; the rest is the service thread's. */
static struct talk *talks;
static struct talk *listeners;
static unsigned n_guests;
static int64_t accept_after; /* no descriptors were left: not before */

void set_options(int fd)
{
    int64_t seconds = engine.timeout_ns / 1000000000;
    int on = 1;
    int user_timeout = (int)(seconds * 500);
    int idle = (int)(seconds / 4 + 1);
    int interval = (int)(seconds / 12 + 1);
    int count = 3;
    int lowat = 256 << 10;

    /* None is needed for the data to arrive; a kernel may lack some. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, sizeof(user_timeout));
    /* A lane that has this much unsent takes no further piece: another one may be faster. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof(lowat));
}

/* Inside one machine nothing is congested, and a control that paces what is sent, which may be the system's default, costs timers
 * and a third of the speed. This one does not, and every system has it. Before the connection is made: a socket that was
 * paced once remains so. */
void set_unpaced(int fd)
{
    (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

/* All that come to it are of this machine. */
static bool is_loopback(const union lc_tcp_address *address)
{
    if (address->sa.sa_family == AF_INET)
        return ntohl(address->v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(&address->v6.sin6_addr);
}

int service_poll(struct talk *talk, uint32_t events, bool add)
{
    struct epoll_event event = { .events = events, .data.ptr = talk };

    return epoll_ctl(engine.service_fd, add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, talk->fd, &event) == 0
               ? 0
               : -errno;
}

/* The soft limit is the user's shell's, the hard one is the administrator's word: more is taken when it is needed. */
static bool raise_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) {
        lc_warn_once(
            "few file descriptors are left (limit %lu, `ulimit -n`): connections get fewer "
            "sockets",
            (unsigned long)limit.rlim_cur);
        return false;
    }
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        return false;
    lc_info("the limit of file descriptors was raised to %lu", (unsigned long)limit.rlim_max);
    return true;
}

int service_socket(int family)
{
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0 && errno == EMFILE && raise_limit())
        fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return fd < 0 ? -errno : fd;
}

/* The last quarter of the descriptors is for connections that have no socket yet, and for the host program. Numbers
 * are given out from the lowest, so the newest tells how many are in use. */
bool service_is_scarce(int fd)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || (rlim_t)fd < limit.rlim_cur / 4 * 3)
        return false;
    return !raise_limit() ||
           (getrlimit(RLIMIT_NOFILE, &limit) == 0 && (rlim_t)fd >= limit.rlim_cur / 4 * 3);
}

/* ---- listening ---- */

int service_listen(int dev, uint16_t *port)
{
    const struct lc_tcp_device *device = &engine.devices[dev];
    struct listener *listener = &engine.listeners[dev];
    union lc_tcp_address address = device->address;
    socklen_t size = sizeof(address);
    char text[LC_TCP_ADDRESS_TEXT];
    struct talk *talk;
    int err;
    int fd;

    if (listener->fd >= 0) {
        *port = listener->port;
        return 0;
    }
    talk = calloc(1, sizeof(*talk));
    if (!talk)
        return -ENOMEM;
    fd = service_socket(address.sa.sa_family);
    if (fd < 0) {
        err = fd;
        goto free_talk;
    }
    talk->kind = LISTENER;
    talk->fd = fd;
    talk->dev = dev;
    if (is_loopback(&address))
        set_unpaced(fd);
    if (bind(fd, &address.sa, lc_tcp_address_size(&address)) != 0 || listen(fd, 4096) != 0 ||
        getsockname(fd, &address.sa, &size) != 0) {
        err = -errno;
        goto close_fd;
    }
    err = service_poll(talk, EPOLLIN, true);
    if (err)
        goto close_fd;
    listener->fd = fd;
    listener->port = address.sa.sa_family == AF_INET ? address.v4.sin_port : address.v6.sin6_port;
    talk->next = listeners;
    listeners = talk;
    *port = listener->port;
    return 0;

close_fd:
    close(fd);
free_talk:
    free(talk);
    lc_error("cannot listen on %s (%s): %s", device->name,
             lc_tcp_address_text(&device->address, text), strerror(-err));
    return err;
}

struct talk *service_add(enum kind kind, int fd, int64_t until)
{
    struct talk *talk = calloc(1, sizeof(*talk));

    if (!talk)
        return NULL;
    talk->kind = kind;
    talk->fd = fd;
    talk->until = until;
    talk->next = talks;
    talks = talk;
    n_guests += kind == GUEST;
    return talk;
}

/* `keep`: the socket has found its lane. */
void service_end(struct talk *talk, bool keep)
{
    if (talk->over)
        return;
    talk->over = true;
    n_guests -= talk->kind == GUEST;
    if (keep)
        (void)epoll_ctl(engine.service_fd, EPOLL_CTL_DEL, talk->fd, NULL);
    else
        close(talk->fd);
    if (talk->lane)
        conn_unref(talk->lane->conn);
}

/* One that is just finding its lane is closed as the lane's, too: the child has opened nothing in between. */
void service_forget(void)
{
    for (const struct talk *talk = talks; talk; talk = talk->next) {
        if (!talk->over && talk->fd >= 0)
            close(talk->fd);
    }
    talks = NULL;
}

static void free_ended(bool all)
{
    for (struct talk **link = &talks; *link;) {
        struct talk *talk = *link;

        if (all)
            service_end(talk, false);
        if (!talk->over) {
            link = &talk->next;
            continue;
        }
        *link = talk->next;
        free(talk);
    }
}

/* On the service thread, which ends, or when it has. */
void service_close(void)
{
    free_ended(true);
    while (listeners) {
        struct talk *talk = listeners;

        listeners = talk->next;
        engine.listeners[talk->dev].fd = -1;
        close(talk->fd);
        free(talk);
    }
}

/* The descriptor, or -1 with errno. No fork comes between the socket and its place in the list, by which a child finds it. */
static int accept_one(const struct talk *listener, int64_t now, struct talk **out)
{
    union lc_tcp_address from = { 0 };
    socklen_t size = sizeof(from);
    struct talk *talk = NULL;
    int err;
    int fd;

    pthread_mutex_lock(&engine.lock);
    fd = accept4(listener->fd, &from.sa, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
    err = errno;
    if (fd >= 0) {
        talk = service_add(GUEST, fd, now + HANDSHAKE_NS);
        if (!talk)
            close(fd);
    }
    pthread_mutex_unlock(&engine.lock);
    if (talk) {
        talk->from = from;
        talk->dev = listener->dev;
    }
    *out = talk;
    errno = err;
    return fd;
}

static void accept_some(struct talk *listener, int64_t now)
{
    for (int i = 0; i < ACCEPTS; i++) {
        struct talk *talk;
        int fd = accept_one(listener, now, &talk);

        if (fd < 0 && (errno == EMFILE || errno == ENFILE) && !raise_limit()) {
            /* It stays readable: without a pause this would be a busy loop. */
            accept_after = now + 100000000;
            (void)service_poll(listener, 0, false);
        }
        if (fd < 0)
            return;
        /* The oldest strangers make room: a peer of ours needs a moment only. */
        if (n_guests > GUESTS_MAX) {
            struct talk *oldest = NULL;

            for (struct talk *t = talks; t; t = t->next)
                oldest = t->kind == GUEST && !t->over ? t : oldest;
            if (oldest) {
                atomic_fetch_add(&engine.strangers, 1);
                service_end(oldest, false);
            }
        }
        if (!talk)
            return;
        if (service_poll(talk, EPOLLIN | EPOLLRDHUP, true) != 0)
            service_end(talk, false);
    }
}

static void dismiss(struct talk *talk, const char *why)
{
    char text[LC_TCP_ADDRESS_TEXT];

    atomic_fetch_add(&engine.strangers, 1);
    lc_debug("%s %s: dismissed", lc_tcp_address_text(&talk->from, text), why);
    service_end(talk, false);
}

static bool belongs(const struct conn *conn, const struct lc_tcp_hello *hello)
{
    return conn->sends == (hello->kind == LC_TCP_PROBE) && same_bytes(conn->id, hello->id) &&
           same_bytes(conn->token, hello->token) && conn->n_lanes == hello->lanes;
}

/* The connection that a hello belongs to, with a reference; a new one where its listen is open. */
static struct conn *find_conn(const struct talk *talk, struct lc_tcp_reply *reply)
{
    const struct lc_tcp_hello *hello = &talk->hello;
    struct conn *conn;

    for (conn = engine.conns; conn; conn = conn->next) {
        if (belongs(conn, hello)) {
            conn_ref(conn);
            return conn;
        }
    }
    for (int i = 0; i < TOMBSTONES; i++) {
        const struct tombstone *t = &engine.tombstones[i];

        if (t->until > lc_now_ns() && t->sent == (hello->kind == LC_TCP_PROBE) &&
            same_bytes(t->id, hello->id) && same_bytes(t->token, hello->token)) {
            reply->status = LC_TCP_CLOSED;
            reply->acked = t->acked;
            return NULL;
        }
    }
    for (struct lc_net_listen *l = hello->kind == LC_TCP_LANE ? engine.listens : NULL; l;
         l = l->next) {
        struct conn **last;

        if (!same_bytes(l->token, hello->token) || l->n_ready >= READY_MAX)
            continue;
        conn = conn_new(false, l->dev, hello->lanes, hello->piece);
        if (!conn)
            return NULL;
        engine_enlist(conn);
        memcpy(conn->id, hello->id, sizeof(conn->id));
        memcpy(conn->token, hello->token, sizeof(conn->token));
        conn->peer = talk->from;
        (void)lc_tcp_address_text(&conn->peer, conn->peer_text);
        conn->expires = INT64_MAX;
        for (last = &l->ready; *last;)
            last = &(*last)->next_ready;
        *last = conn;
        l->n_ready++;
        conn_ref(conn);
        return conn;
    }
    return NULL;
}

static bool token_is_known(const uint8_t *token)
{
    bool known = false;

    pthread_mutex_lock(&engine.lock);
    for (struct lc_net_listen *l = engine.listens; l && !known; l = l->next)
        known = same_bytes(l->token, token);
    for (struct conn *c = engine.conns; c && !known; c = c->next)
        known = same_bytes(c->token, token);
    for (int i = 0; i < TOMBSTONES && !known; i++)
        known = engine.tombstones[i].until > 0 && same_bytes(engine.tombstones[i].token, token);
    pthread_mutex_unlock(&engine.lock);
    return known;
}

static bool send_reply(int fd, const struct lc_tcp_reply *reply)
{
    /* The first bytes on a new socket: they always fit. */
    return send(fd, reply, sizeof(*reply), MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(*reply);
}

/* Where the sender could be asked whether it is there. Not where addresses are translated on the way: then what refuses
 * may be another machine. */
static void note_home(struct lane *lane, const struct talk *talk)
{
    union lc_tcp_address home;
    bool same;

    if (lc_tcp_address_read(&talk->hello.home, engine.devices[talk->dev].index, &home) != 0 ||
        home.sa.sa_family != talk->from.sa.sa_family)
        return;
    if (home.sa.sa_family == AF_INET)
        same = home.v4.sin_addr.s_addr == talk->from.v4.sin_addr.s_addr;
    else
        same = IN6_ARE_ADDR_EQUAL(&home.v6.sin6_addr, &talk->from.v6.sin6_addr);
    conn_lock(lane->conn);
    lane->home = home;
    lane->has_home = same;
    conn_unlock(lane->conn);
}

/* A receiver that has no socket left asks for its sender. */
static void answer_probe(const struct talk *talk, struct conn *conn, struct lc_tcp_reply *reply)
{
    conn_lock(conn);
    if (conn->closing || conn->error)
        reply->status = conn->closing ? LC_TCP_CLOSED : LC_TCP_FAILED;
    else if (park_end(conn))
        atomic_store(&engine.attention, true);
    conn_unlock(conn);
    conn_unref(conn);
    (void)send_reply(talk->fd, reply);
}

/* The guest's socket becomes the lane's, whose earlier one ends here: from now on nothing that it may still hold is
 * taken, so the count in the reply is its last word. */
static bool seat_guest(struct talk *talk, struct lane *lane, struct lc_tcp_reply *reply)
{
    struct conn *conn = lane->conn;
    uint32_t epoch = talk->hello.epoch;
    bool ok = false;

    if (lane->index > 0)
        pool_grow();
    pthread_mutex_lock(&lane->io);
    conn_lock(conn);
    if (conn->closing || conn->error)
        reply->status = conn->closing ? LC_TCP_UNKNOWN : LC_TCP_FAILED;
    else if (lane->index > 0 && service_is_scarce(talk->fd))
        reply->status = LC_TCP_FULL;
    else if (epoch <= lane->epoch || epoch <= lane->retire)
        reply->status = LC_TCP_STALE;
    else
        ok = true;
    conn_unlock(conn);
    if (ok && lane->fd >= 0)
        lane_break(lane, "replaced by the other side");
    conn_lock(conn);
    reply->count = lane->count;
    reply->acked = conn->acked;
    if (ok)
        lane->dev = talk->dev;
    conn_unlock(conn);
    set_options(talk->fd);
    /* Before it is the lane's, whose thread may be this one. */
    if (ok)
        (void)epoll_ctl(engine.service_fd, EPOLL_CTL_DEL, talk->fd, NULL);
    if (ok && !lane_take(lane, talk->fd)) {
        ok = false;
        reply->status = LC_TCP_FULL;
    }
    if (ok && send_reply(talk->fd, reply)) {
        lane_attach(lane, epoch);
        talk->over = true; /* before the lane can close it: see service_forget */
        note_home(lane, talk);
    } else if (ok) {
        lane_return(lane);
        ok = false;
        reply->status = LC_TCP_STATUSES; /* nothing more to say */
    }
    lane_unlock(lane);
    return ok;
}

static void admit(struct talk *talk)
{
    struct lc_tcp_reply reply = { .magic = LC_TCP_MAGIC,
                                  .version = LC_TCP_VERSION,
                                  .status = LC_TCP_WELCOME,
                                  .epoch = talk->hello.epoch };
    struct conn *conn;
    bool seated = false;

    if (lc_tcp_hello_check(&talk->hello) != 0) {
        dismiss(talk, "speaks another version of the protocol");
        return;
    }
    pthread_mutex_lock(&engine.lock);
    conn = find_conn(talk, &reply);
    pthread_mutex_unlock(&engine.lock);
    if (conn && conn->sends) {
        answer_probe(talk, conn, &reply);
        service_end(talk, false);
        return;
    }
    if (conn) {
        struct lane *lane = &conn->lanes[talk->hello.lane];

        seated = seat_guest(talk, lane, &reply);
        if (seated) {
            n_guests--;
            lane_kick(lane, 1);
        }
        conn_unref(conn);
    } else if (reply.status == LC_TCP_WELCOME) {
        reply.status = LC_TCP_UNKNOWN;
    }
    if (!seated) {
        if (reply.status < LC_TCP_STATUSES)
            (void)send_reply(talk->fd, &reply);
        service_end(talk, false);
    }
}

static void hear_guest(struct talk *talk)
{
    while (talk->done < sizeof(talk->hello)) {
        ssize_t got = recv(talk->fd, (char *)&talk->hello + talk->done,
                           sizeof(talk->hello) - talk->done, MSG_DONTWAIT);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (got <= 0) {
            dismiss(talk, "went before it had said what it wants");
            return;
        }
        talk->done += (size_t)got;
        if (talk->done >= LC_TCP_TOKEN && talk->done - (size_t)got < LC_TCP_TOKEN &&
            !token_is_known(talk->hello.token)) {
            dismiss(talk, "does not know a token");
            return;
        }
    }
    admit(talk);
}

/* ---- looking after the connections ---- */

enum want {
    WANT_DIAL,
    WANT_PROBE,
    WANT_MOVE,
};

/* With a reference on the lane's connection. */
struct wanted {
    enum want want;
    struct lane *lane;
    uint32_t epoch; /* of a dial, as `tries` */
    unsigned tries;
};
#define WANTED 64

static void want_dials(struct conn *conn, int64_t now, struct wanted *wanted, int *n, int64_t *next)
{
    if (!conn->sends || conn->peer_gone || conn->error || conn->closing)
        return;
    for (int i = 0; i < conn->n_lanes; i++) {
        struct lane *lane = &conn->lanes[i];

        if (lane->up || lane->next_dial == INT64_MAX)
            continue;
        if (lane->next_dial > now || *n == WANTED) {
            *next = lane->next_dial < *next ? lane->next_dial : *next;
            continue;
        }
        lane->next_dial = INT64_MAX;
        conn_ref(conn);
        wanted[(*n)++] = (struct wanted){ WANT_DIAL, lane, ++lane->tried, lane->tries };
    }
}

/* Of a receiver without a socket; asks at one of the places after the other. With conn->lock held. */
static void want_probe(struct conn *conn, int64_t now, struct wanted *wanted, int *n, int64_t *next)
{
    if (conn->sends || conn->next_probe == INT64_MAX)
        return;
    if (conn->next_probe > now || *n == WANTED) {
        *next = conn->next_probe < *next ? conn->next_probe : *next;
        return;
    }
    for (int i = 0; i < conn->n_lanes; i++) {
        struct lane *lane = &conn->lanes[((unsigned)i + conn->probes) % (unsigned)conn->n_lanes];

        if (!lane->has_home)
            continue;
        conn->next_probe = INT64_MAX;
        conn_ref(conn);
        wanted[(*n)++] = (struct wanted){ .want = WANT_PROBE, .lane = lane };
        return;
    }
}

/* Between looks at who calls. Two of them fit well into the half of the timeout for which a system waits. */
static int64_t sample_ns(void)
{
    return engine.timeout_ns / 8 < SAMPLE_NS ? engine.timeout_ns / 8 : SAMPLE_NS;
}

/* True: nobody has looked after it for a while, and lane 0 has to know. With conn->lock held. */
static bool is_left_alone(struct conn *conn, int64_t now, int64_t *next)
{
    int seen = atomic_load_explicit(&conn->attendance, memory_order_relaxed);

    if (conn->sends || seen == ALONE)
        return false;
    if (conn->next_sample <= now) {
        conn->next_sample = now + sample_ns();
        /* Whoever calls at this moment has been here. */
        if (atomic_compare_exchange_strong(&conn->attendance, &seen, seen + 1) && seen == UNCALLED)
            return true;
    }
    *next = conn->next_sample < *next ? conn->next_sample : *next;
    return false;
}

/* Lane 0, which nobody calls; without it another one, for a goodbye. With conn->lock held. */
static void want_move(struct conn *conn, int64_t now, struct wanted *wanted, int *n, int64_t *next)
{
    int i = 0;
    bool moves;

    if (*n == WANTED)
        return; /* there is another look when these are done */
    moves = is_left_alone(conn, now, next);
    moves |= park_look(conn, now, next);
    moves |= atomic_load(&conn->leaving) && !conn->said_leaving;
    while (moves && i < conn->n_lanes && !conn->lanes[i].up)
        i++;
    if (!moves || i == conn->n_lanes)
        return;
    conn_ref(conn);
    wanted[(*n)++] = (struct wanted){ .want = WANT_MOVE, .lane = &conn->lanes[i] };
}

/* Returns whether the connection needs more than can be done with engine.lock held: its deadline has passed, or it has
 * sockets to give up. */
static bool look_at(struct conn *conn, int64_t now, struct wanted *wanted, int *n, int64_t *next)
{
    bool late = false;
    int64_t again;

    conn_lock(conn);
    want_dials(conn, now, wanted, n, next);
    if (!conn->error && !conn->peer_gone && !conn->closing) {
        again = rail_watch(conn, now, &late);
        *next = again < *next ? again : *next;
        want_move(conn, now, wanted, n, next);
    }
    if (conn->n_up == 0 && conn->parking != PARKED && !conn->error && !conn->peer_gone &&
        !conn->closing) {
        int64_t at = conn->down_since + engine.timeout_ns;

        want_probe(conn, now, wanted, n, next);
        late = now >= at;
        *next = !late && at < *next ? at : *next;
    }
    conn_unlock(conn);
    return late;
}

/* Of lanes that stand still the last may have broken just now, and then its time begins. */
void service_end_late(struct conn *conn)
{
    char cause[CAUSE];
    bool late;

    conn_lock(conn);
    memcpy(cause, conn->cause, sizeof(cause));
    late = conn->n_up == 0 && lc_now_ns() >= conn->down_since + engine.timeout_ns;
    conn_unlock(conn);
    if (!late) {
        for (int i = 0; i < conn->n_lanes; i++)
            lane_kick(&conn->lanes[i], 1);
        return;
    }
    conn_fail(conn, -EREMOTEIO, "no way to it for %lld s%s%.150s",
              (long long)(engine.timeout_ns / 1000000000), *cause ? ", at last: " : "", cause);
}

/* One connection that needs the service thread outside engine.lock; with a reference. */
static struct conn *look_at_all(int64_t now, struct wanted *wanted, int *n, int64_t *next,
                                bool *expired)
{
    struct conn *found = NULL;

    pthread_mutex_lock(&engine.lock);
    for (struct conn *conn = engine.conns; conn && !found; conn = conn->next) {
        if (leave_is_over(conn, now, next)) {
            *expired = true;
            found = conn;
        } else if (!conn->claimed && now >= conn->expires) {
            *expired = true;
            conn->ticket = 0;
            found = conn;
        } else if (look_at(conn, now, wanted, n, next)) {
            found = conn;
        }
    }
    if (found)
        conn_ref(found);
    pthread_mutex_unlock(&engine.lock);
    return found;
}

/* When to look again. */
static int64_t look_after(int64_t now)
{
    struct wanted wanted[WANTED];
    int64_t next;
    struct conn *conn;
    int n;

    do {
        bool expired = false;

        n = 0;
        next = now + sample_ns(); /* whoever begins to call wakes nobody */
        conn = look_at_all(now, wanted, &n, &next, &expired);
        for (int i = 0; i < n; i++) {
            struct lane *lane = wanted[i].lane;

            switch (wanted[i].want) {
            case WANT_DIAL: dial(lane, wanted[i].epoch, wanted[i].tries, now); break;
            case WANT_PROBE: dial_probe(lane, now); break;
            case WANT_MOVE:
                lane_kick(lane, 1);
                conn_unref(lane->conn);
                break;
            }
        }
        if (conn && expired) {
            conn_close(conn); /* drops the reference of the caller, who left, or never came back */
        } else if (conn) {
            service_end_late(conn);
        }
        if (conn)
            conn_unref(conn);
    } while (conn || n == WANTED);
    return next;
}

static int64_t end_late_talks(int64_t now)
{
    int64_t next = INT64_MAX;

    for (struct talk *talk = talks; talk; talk = talk->next) {
        if (talk->over)
            continue;
        if (now < talk->until) {
            next = talk->until < next ? talk->until : next;
        } else if (talk->kind == GUEST) {
            dismiss(talk, "said nothing for too long");
        } else {
            dial_again(talk, talk->connected ? "no answer" : "nobody there", false);
        }
    }
    return next;
}

static void handle(struct talk *talk, int64_t now)
{
    uint64_t ignored;

    if (!talk) {
        (void)!read(engine.wake_fd, &ignored, sizeof(ignored));
        return;
    }
    if (talk->over)
        return;
    switch (talk->kind) {
    case LISTENER: accept_some(talk, now); break;
    case GUEST: hear_guest(talk); break;
    default: dial_move(talk); break;
    }
}

static void accept_again(int64_t now)
{
    if (!accept_after || now < accept_after)
        return;
    accept_after = 0;
    pthread_mutex_lock(&engine.lock);
    for (struct talk *talk = listeners; talk; talk = talk->next)
        (void)service_poll(talk, EPOLLIN, false);
    pthread_mutex_unlock(&engine.lock);
}

void *service_main(void *arg)
{
    struct epoll_event events[EVENTS];
    int64_t next = 0;

    while (!atomic_load(&engine.stop)) {
        int64_t now = lc_now_ns();
        int64_t talk_next;
        int n;

        accept_again(now);
        talk_next = end_late_talks(now);
        /* Looking may itself ask for another look, and whoever finds that asked for wakes nobody. */
        while (atomic_exchange(&engine.attention, false) || lc_now_ns() >= next)
            next = look_after(lc_now_ns());
        free_ended(false);
        talk_next = talk_next < next ? talk_next : next;
        if (atomic_load(&engine.outlives)) {
            if (engine_end())
                return NULL;
            talk_next = talk_next < now + END_NS ? talk_next : now + END_NS;
        }
        if (accept_after && accept_after < talk_next)
            talk_next = accept_after;
        n = epoll_wait(engine.service_fd, events, EVENTS,
                       lc_deadline_left_ms((struct lc_deadline){ talk_next }));
        for (int i = 0; i < n; i++) {
            if (pool_is_lane(events[i].data.u64))
                pool_move(&engine.movers[0], &events[i]);
            else
                handle(events[i].data.ptr, lc_now_ns());
        }
    }
    return NULL;
}
