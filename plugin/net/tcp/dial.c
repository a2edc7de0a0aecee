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

#define REFUSED_NS   ((int64_t)3 * 1000000000) /* no one listens there any more */
#define RETRY_MIN_NS ((int64_t)2 * 1000000)
#define RETRY_MAX_NS ((int64_t)1000 * 1000000)
#define SCARCE_NS    ((int64_t)10 * 1000000000)

void dial_again(struct talk *talk, const char *cause, bool refused)
{
    struct lane *lane = talk->lane;
    struct conn *conn = lane->conn;
    int64_t now = lc_now_ns();
    int64_t pause = RETRY_MIN_NS;
    bool dead = false;

    pthread_mutex_lock(&conn->lock);
    for (unsigned i = 0; i < lane->tries && pause < RETRY_MAX_NS; i++)
        pause *= 2;
    lane->tries++;
    lane->next_dial = now + (pause < RETRY_MAX_NS ? pause : RETRY_MAX_NS);
    atomic_store(&engine.attention, true);
    if (!refused) {
        conn->refused = 0;
    } else if (conn->refused++ == 0) {
        conn->refused_since = now;
    } else if (conn->n_up == 0 && conn->refused >= 3 && now - conn->refused_since > REFUSED_NS) {
        dead = true;
    }
    if (conn->n_up == 0 && !conn->error)
        (void)snprintf(conn->cause, sizeof(conn->cause), "%s", cause);
    pthread_mutex_unlock(&conn->lock);
    if (dead)
        conn_fail(conn, -EREMOTEIO, "the other process has ended (%s)", cause);
    lc_debug("dialling %s, socket %d: %s", conn->peer_text, lane->index, cause);
    service_end(talk, false);
}

/* There are too few descriptors for this one: the connection goes on without it. */
static void postpone(struct talk *talk)
{
    struct lane *lane = talk->lane;

    pthread_mutex_lock(&lane->conn->lock);
    lane->next_dial = lc_now_ns() + SCARCE_NS;
    pthread_mutex_unlock(&lane->conn->lock);
    atomic_store(&engine.attention, true);
    service_end(talk, false);
}

/* Where routes alone decide, a packet may leave by another interface than NCCL has chosen. */
static void bind_to_device(int fd, const struct conn *conn, unsigned tries)
{
    const struct lc_tcp_device *device = &engine.devices[conn->dev];
    union lc_tcp_address from = device->address;

    if (from.sa.sa_family != conn->peer.sa.sa_family)
        return;
    if (from.sa.sa_family == AF_INET)
        from.v4.sin_port = 0;
    else
        from.v6.sin6_port = 0;
    /* Inside one machine packets take the loopback interface, whatever the address. If the peer cannot be reached
     * through the device, every other attempt lets the routes decide, as NCCL does. */
    if (tries % 2 == 1 || lc_tcp_address_is_local(&conn->peer))
        return;
    (void)bind(fd, &from.sa, lc_tcp_address_size(&from));
    if (engine.n_devices > 1)
        (void)setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, device->name,
                         (socklen_t)strlen(device->name));
}

void dial(struct lane *lane, uint32_t epoch, unsigned tries, int64_t now)
{
    struct conn *conn = lane->conn;
    int fd = service_socket(conn->peer.sa.sa_family);
    int64_t patience = engine.timeout_ns / 4 + 1000000000;
    struct talk *talk = service_add(DIAL, fd,
                                    now + (patience < HANDSHAKE_NS ? patience : HANDSHAKE_NS));

    if (!talk) {
        if (fd >= 0)
            close(fd);
        pthread_mutex_lock(&conn->lock);
        lane->next_dial = now + RETRY_MAX_NS;
        pthread_mutex_unlock(&conn->lock);
        conn_unref(conn);
        return;
    }
    talk->lane = lane;
    memcpy(talk->hello.token, conn->token, sizeof(talk->hello.token));
    memcpy(talk->hello.id, conn->id, sizeof(talk->hello.id));
    talk->hello.magic = LC_TCP_MAGIC;
    talk->hello.version = LC_TCP_VERSION;
    talk->hello.lane = (uint16_t)lane->index;
    talk->hello.lanes = (uint16_t)conn->n_lanes;
    talk->hello.epoch = epoch;
    talk->hello.piece = conn->piece;
    if (fd < 0) {
        dial_again(talk, strerror(-fd), false);
        return;
    }
    if (lane->index > 0 && service_is_scarce(fd)) {
        postpone(talk);
        return;
    }
    set_options(fd);
    bind_to_device(fd, conn, tries);
    if (connect(fd, &conn->peer.sa, lc_tcp_address_size(&conn->peer)) != 0 &&
        errno != EINPROGRESS && errno != EINTR) {
        dial_again(talk, strerror(errno), errno == ECONNREFUSED);
        return;
    }
    if (service_poll(talk, EPOLLOUT | EPOLLIN | EPOLLRDHUP, true) != 0)
        dial_again(talk, strerror(errno), false);
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
    bool ok = false;
    int err;

    pthread_mutex_lock(&lane->io);
    pthread_mutex_lock(&conn->lock);
    err = conn_settle(lane, talk->reply.count);
    if (!err)
        err = conn_acked(conn, talk->reply.acked);
    ok = !err && !conn->closing && !conn->error;
    pthread_mutex_unlock(&conn->lock);
    if (ok) {
        (void)epoll_ctl(engine.service_fd, EPOLL_CTL_DEL, talk->fd, NULL);
        lane_attach(lane, talk->fd, talk->hello.epoch);
    }
    pthread_mutex_unlock(&lane->io);
    if (err)
        conn_fail(conn, -EPROTO, "the other side counts more pieces than were sent");
    if (ok) {
        talk->over = true;
        conn_work(conn);
        lane_kick(lane, 1);
        conn_unref(conn);
    } else {
        service_end(talk, false);
    }
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
    case LC_TCP_WELCOME: attach_dialled(talk); return;
    case LC_TCP_STALE: dial_again(talk, "too late", false); return;
    case LC_TCP_FULL: postpone(talk); return;
    case LC_TCP_CLOSED:
        pthread_mutex_lock(&conn->lock);
        err = conn_acked(conn, talk->reply.acked);
        conn->peer_gone = true;
        conn->told = true;
        if (err || conn->acked < conn->posted)
            conn_fail_locked(conn, -EREMOTEIO, "the other side closed the connection");
        pthread_mutex_unlock(&conn->lock);
        break;
    default:
        pthread_mutex_lock(&conn->lock);
        conn->told = true;
        pthread_mutex_unlock(&conn->lock);
        conn_fail(conn, -EREMOTEIO, "the other side knows nothing of this connection any more");
        break;
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
