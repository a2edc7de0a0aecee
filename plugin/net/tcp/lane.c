/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes of one socket: reading frames, writing batches. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_MAX       ((size_t)1 << 20) /* of one readv: bounds the time of a call */
#define PLACES         16                /* likewise */
#define GATHER         ((size_t)1024)    /* copying so little costs less than a list of places */
#define UNREAD         1024              /* reads of what a dead socket still holds */
#define PROBE_AFTER_NS ((int64_t)20 * 1000000) /* a sender that is there comes back sooner */

void lane_init(struct lane *lane, struct conn *conn, int index)
{
    lane->conn = conn;
    lane->index = index;
    lane->dev = conn->dev;
    pthread_mutex_init(&lane->io, NULL);
    lane->fd = -1;
    lane->mover = -1;
    lane->oldest = UINT64_MAX;
    atomic_init(&lane->reading, UINT64_MAX);
    lane->settled = true;
    lane->announced_by = -1;
    lane->next_dial = conn->sends && index == 0 ? 0 : INT64_MAX;
}

/* Nothing of the caller's buffers is referred to afterwards. */
static void reset(struct lane *lane)
{
    lane->in_start = lane->in_end = 0;
    lane->dst = NULL;
    lane->dst_left = 0;
    lane->in_piece = false;
    lane->in_early = false;
    lane->in_sparse = false;
    lane->out_cut = false;
    lane->owes = lane->watched = lane->rests = false;
    lane->iov_at = lane->iov_n = 0;
    lane->n_short = 0;
}

/* The number is forgotten first: a child of a fork in between must not close it twice. But then it has it, or has it already as
 * that of a connection that is in no list any more: the socket ends whoever has it. */
static void close_socket(struct lane *lane)
{
    int fd = lane->fd;

    if (fd >= 0)
        pool_leave(lane);
    lane->fd = -1;
    if (fd >= 0) {
        (void)shutdown(fd, SHUT_RDWR);
        close(fd);
    }
    reset(lane);
}

/* With conn->lock held, before the socket is closed: see pool_look. */
static void mark_down(struct lane *lane)
{
    struct conn *conn = lane->conn;

    lane->up = false;
    if (--conn->n_up == 0) {
        conn->down_since = lc_now_ns();
        conn->next_probe = conn->down_since + PROBE_AFTER_NS;
    }
    for (int i = 0; i < conn->n_lanes; i++) {
        if (conn->lanes[i].announced_by == lane->index)
            conn->lanes[i].announced_by = -1;
    }
    lane->announced_by = -1;
    if (lane->retire > lane->epoch)
        lane->epoch = lane->retire;
    if (park_lost(conn)) {
        lane->next_dial = conn->next_probe = INT64_MAX; /* nothing was sent, so it is settled */
    } else if (conn->sends) {
        conn->asked = conn->said_leaving = false; /* perhaps it has not come through */
        lane->settled = false;
        lane->next_dial = 0;
    } else {
        conn->dirty = true; /* CONTROL is a state: what was on its way is said again */
    }
}

/* With conn->lock held. */
static bool has_device(const struct conn *conn, int dev)
{
    for (int i = 0; i < conn->n_lanes; i++) {
        if (conn->lanes[i].up && conn->lanes[i].dev == dev)
            return true;
    }
    return false;
}

void lane_break(struct lane *lane, const char *cause)
{
    struct conn *conn = lane->conn;
    bool quiet;

    conn_lock(conn);
    quiet = conn->closing || conn->peer_gone || conn->error;
    if (lane->up) {
        mark_down(lane);
        quiet |= conn->parking == PARK_AGREED || conn->parking == PARKED;
        lane->lost += !quiet;
        lane->rail_lost += !quiet && conn->n_up > 0 && !has_device(conn, lane->dev);
    }
    if (!conn->error)
        (void)snprintf(conn->cause, sizeof(conn->cause), "%s", cause);
    conn_unlock(conn);
    close_socket(lane);
    if (quiet)
        return;
    atomic_fetch_add_explicit(&engine.broken, 1, memory_order_relaxed);
    lc_info("socket %d of the connection with %s over %s broke: %s", lane->index, conn->peer_text,
            rail_name(lane), cause);
    conn_wake_lanes(conn, lane);
    /* Whoever tells the receiver of it, the answer may come over lane 0. */
    if (conn->sends && lane->index > 0)
        lane_kick(&conn->lanes[0], 1);
    engine_wake();
}

void lane_close(struct lane *lane)
{
    struct conn *conn = lane->conn;
    struct lc_tcp_frame bye;

    pthread_mutex_lock(&lane->io);
    conn_fill_bye(conn, &bye);
    conn_lock(conn);
    if (lane->fd >= 0 && !lane->out_cut)
        (void)!send(lane->fd, &bye, sizeof(bye), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (lane->up)
        mark_down(lane);
    lane->next_dial = INT64_MAX;
    conn_unlock(conn);
    close_socket(lane);
    pthread_mutex_unlock(&lane->io);
}

/* A failed connection reads no more and fills no batch from messages, but what was begun refers to buffers. Of a batch that has
 * gone in part the rest would have to follow before anything else. */
void lane_abandon(struct lane *lane)
{
    pthread_mutex_lock(&lane->io);
    if (lane->out_cut)
        lane_break(lane, "given up in the middle of a batch");
    else
        reset(lane);
    lane_unlock(lane);
}

bool lane_take(struct lane *lane, int fd)
{
    int err;

    reset(lane);
    lane->fd = fd;
    err = pool_join(lane);
    if (!err)
        return true;
    lc_warn("socket %d of the connection with %s cannot be polled: %s", lane->index,
            lane->conn->peer_text, strerror(-err));
    if (lane->index == 0)
        return true;
    lane->fd = -1;
    return false;
}

void lane_return(struct lane *lane)
{
    pool_leave(lane);
    lane->fd = -1;
}

void lane_attach(struct lane *lane, uint32_t epoch)
{
    struct conn *conn = lane->conn;

    conn_lock(conn);
    lane->epoch = epoch;
    lane->stuck = false;
    lane->rate = 0;
    lane->took_at = lane->moving_at = lane->busy_since = 0;
    lane->gone = 0;
    lane->drained = false;
    if (conn->sends)
        conn->rails[lane->rail].proven = true;
    lane->up = true;
    lane->idle = false;
    lane->tries = 0;
    lane->next_dial = INT64_MAX;
    lane->announced_by = -1;
    atomic_store(&lane->condemned, true); /* looked at once, to be sure */
    conn->n_up++;
    conn->was_up = true;
    park_attached(conn);
    conn->refused = 0;
    conn->probes = 0;
    conn->dirty = true;
    /* For rail_watch; sockets are attached on the service thread, which needs no waking. */
    atomic_store(&engine.attention, true);
    conn_unlock(conn);
}

/* ---- reading ---- */

/* The text comes from outside: only what can be printed is kept. */
static int take_error(struct lane *lane, const struct lc_tcp_frame *f, const unsigned char *body)
{
    char text[LC_TCP_TEXT + 1];

    memcpy(text, body, f->length);
    text[f->length] = '\0';
    for (size_t i = 0; i < f->length; i++) {
        if (body[i] < ' ' || body[i] > '~')
            text[i] = '?';
    }
    conn_lock(lane->conn);
    lane->conn->told = true;
    conn_unlock(lane->conn);
    conn_fail(lane->conn, -EREMOTEIO, "the other side failed: %s", text);
    return 0;
}

static int begin_piece(struct lane *lane, const struct lc_tcp_frame *f, const unsigned char *map)
{
    int err = conn_begin_piece(lane, f);

    if (!err && f->arg & LC_TCP_SPARSE)
        err = lane_begin_sparse(lane, map);
    return err;
}

static int take_frame(struct lane *lane, const struct lc_tcp_frame *f, const unsigned char *body)
{
    switch (f->type) {
    case LC_TCP_PIECE: return begin_piece(lane, f, body);
    case LC_TCP_DOWN: return conn_down(lane, f);
    case LC_TCP_ASK: return conn_take_ask(lane->conn, f);
    case LC_TCP_PARK: return conn_park(lane);
    case LC_TCP_CONTROL: return conn_take_control(lane, f, body);
    case LC_TCP_ERROR: return take_error(lane, f, body);
    default: return conn_bye(lane, f);
    }
}

static void take_payload(struct lane *lane, size_t n)
{
    memcpy(lane->dst, lane->in + lane->in_start, n);
    lane_took(lane, n);
    lane->in_start += n;
}

/* 1: a frame was taken; 0: more bytes are needed; -EPROTO. */
static int parse_one(struct lane *lane)
{
    size_t have = lane->in_end - lane->in_start;
    struct lc_tcp_frame f;
    size_t whole = sizeof(f);
    int err;

    if (have < sizeof(f))
        return 0;
    memcpy(&f, lane->in + lane->in_start, sizeof(f));
    err = lc_tcp_frame_check(&f, !lane->conn->sends);
    if (err)
        return err;
    if (f.type != LC_TCP_PIECE)
        whole += f.length;
    else if (f.arg & LC_TCP_SPARSE)
        whole += lc_tcp_map_size((size_t)f.length);
    if (have < whole)
        return 0;
    err = take_frame(lane, &f, lane->in + lane->in_start + sizeof(f));
    if (err)
        return err;
    lane->in_start += whole;
    return 1;
}

int lane_parse(struct lane *lane)
{
    for (;;) {
        size_t have = lane->in_end - lane->in_start;
        int got;

        if (lane->in_piece) {
            while (lane->dst_left && have) {
                take_payload(lane, have < lane->dst_left ? have : lane->dst_left);
                have = lane->in_end - lane->in_start;
            }
            if (lane->dst_left)
                break;
            lane->in_piece = false;
            conn_end_piece(lane);
        }
        got = parse_one(lane);
        if (got < 0)
            return got;
        if (got == 0)
            break;
    }
    if (lane->in_start) {
        memmove(lane->in, lane->in + lane->in_start, lane->in_end - lane->in_start);
        lane->in_end -= lane->in_start;
        lane->in_start = 0;
    }
    return 0;
}

/* Who waits asks all the time, for one place as a rule: that the system does without a list of them costs it less. */
static ssize_t receive(int fd, struct iovec *iov, int n)
{
    struct msghdr msg = { .msg_iov = iov, .msg_iovlen = (size_t)n };
    ssize_t got;

    do {
        got = n == 1 ? recv(fd, iov->iov_base, iov->iov_len, MSG_DONTWAIT)
                     : recvmsg(fd, &msg, MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    return got;
}

/* 1: something was read, 0: nothing there, -1: the lane is broken. */
static int read_some(struct lane *lane)
{
    struct iovec iov[PLACES + 1];
    size_t direct;
    int n = lane_places(lane, iov, PLACES, &direct);
    bool whole = n < PLACES; /* the piece ends within them */
    ssize_t got;

    if (direct > READ_MAX) {
        n = 1;
        whole = false;
        direct = iov->iov_len < READ_MAX ? iov->iov_len : READ_MAX;
        iov->iov_len = direct;
    }
    /* The next header, but not much of its payload, which would be copied once more. */
    if (whole)
        iov[n++] = (struct iovec){ lane->in + lane->in_end,
                                   direct ? 512 : sizeof(lane->in) - lane->in_end };
    got = receive(lane->fd, iov, n);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
    if (got <= 0) {
        lane_break(lane, got == 0 ? "closed by the other side" : strerror(errno));
        return -1;
    }
    while (got > 0 && lane->dst_left) {
        size_t part = (size_t)got < lane->dst_left ? (size_t)got : lane->dst_left;

        lane_took(lane, part);
        got -= (ssize_t)part;
    }
    lane->in_end += (size_t)got;
    if (lane_parse(lane) != 0) {
        conn_fail(lane->conn, -EPROTO, "socket %d brought what is not our protocol", lane->index);
        return -1;
    }
    return 1;
}

/* ---- writing ---- */

static void advance(struct lane *lane, size_t n)
{
    lane->out_cut = true;
    while (n) {
        struct iovec *iov = &lane->iov[lane->iov_at];
        size_t part = n < iov->iov_len ? n : iov->iov_len;

        iov->iov_base = (char *)iov->iov_base + part;
        iov->iov_len -= part;
        n -= part;
        if (iov->iov_len == 0)
            lane->iov_at++;
    }
    if (lane->iov_at == lane->iov_n) {
        lane->iov_at = lane->iov_n = 0;
        lane->out_cut = false;
        conn_sent(lane);
    }
}

/* Lane 0 moves in its caller's calls; but a caller whose short messages are gone from its sight, or whose receives are
 * complete, need not call again. What is lost with a socket then has to be asked for and sent again, the rest of what has gone in
 * part, and what is sent ahead taken, though nobody calls: then the service thread moves lane 0, too. `more`: it is to look at
 * once. With io held. */
static void watch(struct lane *lane, bool more)
{
    const struct conn *conn = lane->conn;
    bool alone = !conn->sends &&
                 atomic_load_explicit(&conn->attendance, memory_order_relaxed) == ALONE;
    bool owes = alone || atomic_load(&conn->leaving) || lane->owes || lane->n_short > 0 ||
                (!conn->sends && lane->iov_n > 0);
    bool changes = owes != lane->watched;

    if (lane->index > 0 || lane->fd < 0)
        return;
    lane->watched = owes;
    if (changes || (owes && more))
        pool_look(lane);
}

/* All that is left of the batch; a short one as a piece. */
static ssize_t transmit(struct lane *lane)
{
    struct iovec *iov = lane->iov + lane->iov_at;
    struct msghdr msg = { .msg_iov = iov, .msg_iovlen = (size_t)(lane->iov_n - lane->iov_at) };
    char bytes[GATHER];
    size_t n = 0;
    ssize_t put;

    for (size_t i = 0; i < msg.msg_iovlen && n <= GATHER; i++) {
        n += iov[i].iov_len;
        if (n <= GATHER)
            memcpy(bytes + n - iov[i].iov_len, iov[i].iov_base, iov[i].iov_len);
    }
    do {
        put = n <= GATHER ? send(lane->fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT)
                          : sendmsg(lane->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (put < 0 && errno == EINTR);
    return put;
}

enum standing {
    STANDS,
    FAILED,
    RETIRED,
    STUCK,
};

static enum standing look(struct lane *lane)
{
    struct conn *conn = lane->conn;
    enum standing standing = STANDS;

    if (!atomic_load(&lane->condemned) && !atomic_load(&conn->troubled))
        return STANDS;
    conn_lock(conn);
    if (lane->up && lane->retire >= lane->epoch)
        standing = lane->stuck ? STUCK : RETIRED;
    else
        atomic_store(&lane->condemned, false);
    if (standing == STANDS && conn->error)
        standing = FAILED;
    conn_unlock_unchanged(conn);
    return standing;
}

/* Nothing can be written any more, but what the peer had sent before its end may still be there to be read, and it may be unable
 * to send it again. */
static void end_unwritable(struct lane *lane, const char *cause)
{
    for (int i = 0; i < UNREAD && look(lane) == STANDS && read_some(lane) > 0; i++)
        ;
    if (lane->fd >= 0)
        lane_break(lane, cause);
}

/* 1: something was written, 0: nothing to write or no room, -1: the lane is broken. */
static int write_some(struct lane *lane)
{
    ssize_t put;

    if (lane->iov_n == 0 && lane->rests && atomic_load(&lane->conn->changes) == lane->seen)
        return 0;
    if (lane->iov_n == 0) {
        conn_fill_batch(lane);
        if (lane->conn->sends)
            lane_elide(lane);
    } else if (!lane->conn->sends) {
        lane->owes = true; /* what was read meanwhile may have to be confirmed */
    }
    if (lane->iov_n == 0 && lane->passes_on)
        lane_push(&lane->conn->lanes[0]);
    if (lane->iov_n == 0)
        return 0;
    atomic_store(&lane->reading, lane->oldest); /* also for the rest of a batch */
    put = transmit(lane);
    if (put > 0)
        advance(lane, (size_t)put); /* may still copy */
    atomic_store(&lane->reading, UINT64_MAX);
    if (put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS))
        return 0;
    if (put < 0) {
        end_unwritable(lane, strerror(errno));
        return -1;
    }
    if (!atomic_load_explicit(&lane->wrote, memory_order_relaxed))
        atomic_store(&lane->wrote, true);
    return 1;
}

/* True if the budget ended before the work did. */
static bool move(struct lane *lane, int budget)
{
    for (int i = 0; i < budget; i++) {
        int got = 0;
        int put;

        if (lane->fd < 0)
            return false;
        switch (look(lane)) {
        case RETIRED: lane_break(lane, "the other side has given it up"); return false;
        case STUCK: lane_break(lane, "nothing comes through it"); return false;
        case FAILED: break; /* nothing more is read: the caller's buffers are no longer ours */
        default: got = read_some(lane); break;
        }
        if (lane->fd < 0)
            return false;
        put = write_some(lane);
        if (got <= 0 && put <= 0)
            return false;
    }
    return true;
}

bool lane_kick(struct lane *lane, int budget)
{
    bool more = false;

    atomic_store(&lane->again, true);
    while (atomic_load(&lane->again) && pthread_mutex_trylock(&lane->io) == 0) {
        bool hung;

        atomic_store(&lane->again, false);
        hung = atomic_exchange(&lane->hung, false);
        more = move(lane, budget);
        if (more && hung)
            atomic_store(&lane->hung, true);
        if (more && (lane->index > 0 || hung))
            pool_look(lane);
        watch(lane, more);
        pthread_mutex_unlock(&lane->io);
    }
    return more;
}

void lane_unlock(struct lane *lane)
{
    pthread_mutex_unlock(&lane->io);
    if (atomic_load(&lane->again))
        lane_kick(lane, 1);
}

void lane_push(struct lane *lane)
{
    if (pthread_mutex_trylock(&lane->io) != 0) {
        lane_kick(lane, 1); /* whoever holds it looks once more */
        return;
    }
    if (lane->fd >= 0 && look(lane) == STANDS)
        watch(lane, write_some(lane) > 0);
    lane_unlock(lane);
}
