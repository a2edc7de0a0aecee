/* SPDX-License-Identifier: Apache-2.0
 *
 * Dialling: a sender gives its lanes sockets, and a receiver that has none left asks whether its sender is there. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/talk.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define REFUSED_NS   ((int64_t)2 * 1000000000) /* no one listens there any more */
#define RETRY_MIN_NS ((int64_t)2 * 1000000)
#define RETRY_MAX_NS ((int64_t)1000 * 1000000)
#define PROBE_MIN_NS ((int64_t)20 * 1000000)
#define PROBE_MAX_NS ((int64_t)250 * 1000000)
#define SCARCE_NS    ((int64_t)10 * 1000000000)
#define HOPELESS_NS  ((int64_t)30 * 1000000000)
#define RAIL_NS \
    ((int64_t)3 * 1000000000) /* of one dial where there are other rails: it may be repaired soon */

static int64_t grown(int64_t pause, int64_t most, unsigned times)
{
    for (unsigned i = 0; i < times && pause < most; i++)
        pause *= 2;
    return pause < most ? pause : most;
}

/* An address of the peer that never answered may lead nowhere at all. With conn->lock held. */
static int64_t longest_pause(const struct lane *lane)
{
    const struct conn *conn = lane->conn;

    return conn->was_up && !conn->rails[lane->rail].proven ? HOPELESS_NS : RETRY_MAX_NS;
}

void dial_again(struct talk *talk, const char *cause, bool refused)
{
    struct lane *lane = talk->lane;
    struct conn *conn = lane->conn;
    int64_t now = lc_now_ns();
    bool dead = false;

    conn_lock(conn);
    if (talk->kind == PROBE)
        conn->next_probe = now + grown(PROBE_MIN_NS, PROBE_MAX_NS, conn->probes++);
    else
        lane->next_dial = now + grown(RETRY_MIN_NS, longest_pause(lane), lane->tries++);
    atomic_store(&engine.attention, true);
    /* Other addresses of the peer may lead to another machine. */
    refused = refused &&
              (!conn->sends || (conn->was_up ? conn->rails[lane->rail].proven : lane->rail == 0));
    if (!refused) {
        conn->refused = 0;
    } else if (conn->refused++ == 0) {
        conn->refused_since = now;
    } else if (conn->n_up == 0 && conn->refused >= 3 && now - conn->refused_since > REFUSED_NS) {
        dead = true;
    }
    if (conn->n_up == 0 && !conn->error)
        (void)snprintf(conn->cause, sizeof(conn->cause), "%s", cause);
    conn_unlock(conn);
    if (dead)
        conn_fail(conn, -EREMOTEIO, "the other process has ended (%s)", cause);
    lc_debug("dialling %s, socket %d: %s", conn->peer_text, lane->index, cause);
    service_end(talk, false);
}

/* There are too few descriptors for this one, or it cannot be polled: the connection goes on without it. */
static void postpone(struct talk *talk)
{
    struct lane *lane = talk->lane;

    conn_lock(lane->conn);
    lane->next_dial = lc_now_ns() + SCARCE_NS;
    conn_unlock(lane->conn);
    atomic_store(&engine.attention, true);
    service_end(talk, false);
}

/* Where routes alone decide, a packet may leave by another interface than NCCL has chosen. */
static void bind_to_device(int fd, const struct lane *lane, unsigned tries)
{
    const struct lc_tcp_device *device = &engine.devices[lane->dev];
    const union lc_tcp_address *to = &lane->conn->rails[lane->rail].to;
    union lc_tcp_address from = device->address;

    if (from.sa.sa_family != to->sa.sa_family)
        return;
    if (from.sa.sa_family == AF_INET)
        from.v4.sin_port = 0;
    else
        from.v6.sin6_port = 0;
    /* If the peer cannot be reached through the device, every other attempt lets the routes decide, as NCCL does. */
    if (tries % 2 == 1 && (lane->conn->n_rails == 1 || !lane->conn->rails[lane->rail].proven))
        return;
    (void)bind(fd, &from.sa, lc_tcp_address_size(&from));
    if (engine.n_devices > 1)
        (void)setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device->name,
                         (socklen_t)strlen(device->name));
}

/* Takes the reference on the lane's connection; its descriptor may be an error. NULL: no memory. No fork comes between the
 * socket and its place in the list, by which a child finds it. */
static struct talk *new_talk(enum kind kind, struct lane *lane, int family, int64_t now)
{
    struct conn *conn = lane->conn;
    int64_t patience = conn->n_rails > 1 ? RAIL_NS : engine.timeout_ns / 4 + 1000000000;
    int64_t until = now + (patience < HANDSHAKE_NS ? patience : HANDSHAKE_NS);
    struct talk *talk;
    int fd;

    pthread_mutex_lock(&engine.lock);
    fd = service_socket(family);
    talk = service_add(kind, fd, until);
    if (!talk && fd >= 0)
        close(fd);
    pthread_mutex_unlock(&engine.lock);
    if (!talk) {
        conn_lock(conn);
        if (kind == PROBE)
            conn->next_probe = now + RETRY_MAX_NS;
        else
            lane->next_dial = now + RETRY_MAX_NS;
        conn_unlock(conn);
        conn_unref(conn);
        return NULL;
    }
    talk->lane = lane;
    talk->hello.kind = kind == PROBE ? LC_TCP_PROBE : LC_TCP_LANE;
    memcpy(talk->hello.token, conn->token, sizeof(talk->hello.token));
    memcpy(talk->hello.id, conn->id, sizeof(talk->hello.id));
    talk->hello.magic = LC_TCP_MAGIC;
    talk->hello.version = LC_TCP_VERSION;
    talk->hello.lane = (uint16_t)lane->index;
    talk->hello.lanes = (uint16_t)conn->n_lanes;
    talk->hello.epoch = 1;
    talk->hello.piece = conn->piece;
    return talk;
}

static void begin(struct talk *talk, const union lc_tcp_address *to)
{
    if (connect(talk->fd, &to->sa, lc_tcp_address_size(to)) != 0 && errno != EINPROGRESS &&
        errno != EINTR) {
        dial_again(talk, strerror(errno), errno == ECONNREFUSED);
        return;
    }
    if (service_poll(talk, EPOLLOUT | EPOLLIN | EPOLLRDHUP, true) != 0)
        dial_again(talk, strerror(errno), false);
}

void dial(struct lane *lane, uint32_t epoch, unsigned tries, int64_t now)
{
    struct conn *conn = lane->conn;
    const union lc_tcp_address *to = &conn->rails[lane->rail].to;
    struct talk *talk = new_talk(DIAL, lane, to->sa.sa_family, now);
    int fd;

    if (!talk)
        return;
    fd = talk->fd;
    talk->hello.epoch = epoch;
    engine_home(lane->dev, &talk->hello.home);
    if (fd < 0) {
        dial_again(talk, strerror(-fd), false);
        return;
    }
    if (lane->index > 0 && service_is_scarce(fd)) {
        postpone(talk);
        return;
    }
    if (lane->index > 0)
        pool_grow();
    set_options(fd);
    /* Inside one machine packets take the loopback interface, whatever the address. */
    if (lc_tcp_address_is_local(to))
        set_unpaced(fd);
    else
        bind_to_device(fd, lane, tries);
    begin(talk, to);
}

/* Whoever listened at the sender's address and does so no more has ended; where no answer comes, it may only be out of
 * reach, and the deadline decides. */
void dial_probe(struct lane *lane, int64_t now)
{
    struct talk *talk = new_talk(PROBE, lane, lane->home.sa.sa_family, now);

    if (!talk)
        return;
    if (talk->fd < 0) {
        dial_again(talk, strerror(-talk->fd), false);
        return;
    }
    begin(talk, &lane->home);
}

/* True if the whole hello has gone. */
static bool say_hello(struct talk *talk)
{
    int err = 0;
    socklen_t size = sizeof(err);
    ssize_t put;

    if (!talk->connected) {
        if (getsockopt(talk->fd, SOL_SOCKET, SO_ERROR, &err, &size) != 0)
            err = errno;
        if (err) {
            dial_again(talk, strerror(err), err == ECONNREFUSED);
            return false;
        }
        talk->connected = true;
    }
    put = send(talk->fd, &talk->hello, sizeof(talk->hello), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOTCONN))
        return false;
    if (put != sizeof(talk->hello)) { /* the first bytes on a socket always fit */
        dial_again(talk, put < 0 ? strerror(errno) : "a hello was cut", false);
        return false;
    }
    talk->hello_sent = true;
    return true;
}

static void attach_dialled(struct talk *talk)
{
    struct lane *lane = talk->lane;
    struct conn *conn = lane->conn;
    bool taken = false;
    bool ok;
    int err;

    pthread_mutex_lock(&lane->io);
    conn_lock(conn);
    err = conn_settle(lane, talk->reply.count);
    if (!err)
        err = conn_acked(conn, talk->reply.acked);
    ok = !err && !conn->closing && !conn->error;
    conn_unlock(conn);
    if (ok) {
        (void)epoll_ctl(engine.service_fd, EPOLL_CTL_DEL, talk->fd, NULL); /* as in seat_guest */
        taken = lane_take(lane, talk->fd);
    }
    if (taken) {
        lane_attach(lane, talk->hello.epoch);
        talk->over = true; /* before the lane can close it: see service_forget */
    }
    lane_unlock(lane);
    if (err)
        conn_fail(conn, -EPROTO, "the other side counts more pieces than were sent");
    if (ok)
        conn_work(conn); /* what the last socket has lost is known now */
    if (taken) {
        lane_kick(lane, 1);
        conn_unref(conn);
    } else if (ok) {
        postpone(talk);
    } else {
        service_end(talk, false);
    }
}

static void hear_closed(struct conn *conn, uint64_t acked)
{
    int err = 0;

    conn_lock(conn);
    if (conn->sends)
        err = conn_acked(conn, acked);
    conn->peer_gone = true;
    atomic_store(&conn->troubled, true);
    conn->told = true;
    if (err || conn->acked < conn->posted)
        conn_fail_locked(conn, -EREMOTEIO, "the other side closed the connection");
    conn_unlock(conn);
    atomic_store(&engine.attention, true); /* it may have been leaving */
}

static void hear_refusal(struct conn *conn, const char *text)
{
    conn_lock(conn);
    conn->told = true;
    conn_unlock(conn);
    conn_fail(conn, -EREMOTEIO, "%s", text);
}

static void take_reply(struct talk *talk)
{
    struct conn *conn = talk->lane->conn;
    int err = lc_tcp_reply_check(&talk->reply);

    if (err || talk->reply.epoch != talk->hello.epoch) {
        dial_again(talk, "something else than the peer answered", false);
        return;
    }
    switch (talk->reply.status) {
    case LC_TCP_WELCOME:
        if (talk->kind == PROBE)
            dial_again(talk, "it is there, and has not come back yet", false);
        else
            attach_dialled(talk);
        return;
    case LC_TCP_STALE: dial_again(talk, "too late", false); return;
    case LC_TCP_FULL: postpone(talk); return;
    case LC_TCP_CLOSED: hear_closed(conn, talk->reply.acked); break;
    case LC_TCP_FAILED:
        hear_refusal(conn, "the other side has failed, and could not say why");
        break;
    default: hear_refusal(conn, "the other side knows nothing of this connection any more"); break;
    }
    service_end(talk, false);
}

void dial_move(struct talk *talk)
{
    if (!talk->hello_sent) {
        if (!say_hello(talk))
            return;
        if (service_poll(talk, EPOLLIN | EPOLLRDHUP, false) != 0) {
            dial_again(talk, strerror(errno), false);
            return;
        }
    }
    while (talk->done < sizeof(talk->reply)) {
        ssize_t got = recv(talk->fd, (char *)&talk->reply + talk->done,
                           sizeof(talk->reply) - talk->done, MSG_DONTWAIT);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (got <= 0) {
            dial_again(talk, got == 0 ? "closed before an answer" : strerror(errno),
                       got < 0 && errno == ECONNREFUSED);
            return;
        }
        talk->done += (size_t)got;
    }
    take_reply(talk);
}
