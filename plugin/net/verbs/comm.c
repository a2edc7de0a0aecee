/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/verbs/comm.h"

#include "common/deadline.h"
#include "common/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MS ((int64_t)1000000)

#define LOOK_MS       100  /* between looks at the ports while there is no way */
#define LOOK_AGAIN_MS 1000 /* while it runs */
#define GRACE_MS      300  /* what is on its way when the peer closes still arrives */
#define PROBES        4    /* in the time of a timeout */
#define PAUSE_MS      1000 /* of a way that has failed, at first */
#define PAUSE_DOUBLES 5
#define BARREN \
    8 /* repairs after which nothing gets through, if they also took the time of a timeout */

struct lc_net_comm *lc_verbs_comm_new(struct lc_verbs_device *dev, bool sender, int fd,
                                      int64_t timeout_ns)
{
    struct lc_net_comm *comm = calloc(1, sizeof(*comm));

    if (!comm)
        return NULL;
    comm->shared = aligned_alloc(4096, (sizeof(*comm->shared) + 4095) / 4096 * 4096);
    if (!comm->shared)
        goto free_comm;
    memset(comm->shared, 0, sizeof(*comm->shared));
    if (lc_verbs_mr_open(dev, comm->shared, sizeof(*comm->shared), -1, 0, &comm->shared_mr))
        goto free_shared;
    (void)pthread_mutex_init(&comm->lock, NULL);
    comm->sender = sender;
    comm->dev = dev;
    comm->fd = fd;
    comm->timeout_ns = timeout_ns;
    comm->deadline_ns = lc_now_ns() + timeout_ns;
    for (int i = 0; i < LC_VERBS_REQUESTS; i++)
        comm->requests[i].comm = comm;
    return comm;

free_shared:
    free(comm->shared);
free_comm:
    free(comm);
    return NULL;
}

void lc_verbs_comm_free(struct lc_net_comm *comm)
{
    (void)lc_verbs_mr_close(comm->shared_mr);
    free(comm->shared);
    (void)pthread_mutex_destroy(&comm->lock);
    free(comm);
}

static void flush_out(struct lc_net_comm *comm)
{
    while (comm->out_bytes && !comm->connecting && !comm->gone) {
        ssize_t sent = send(comm->fd, comm->out, comm->out_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            break; /* what a broken socket means is found out when it is read */
        comm->out_bytes -= (size_t)sent;
        memmove(comm->out, comm->out + sent, comm->out_bytes);
    }
    lc_verbs_service_watch(comm, comm->out_bytes > 0 || comm->connecting);
}

static bool queue_out(struct lc_net_comm *comm, const void *data, size_t bytes)
{
    if (comm->out_bytes + bytes > sizeof(comm->out))
        return false;
    memcpy(comm->out + comm->out_bytes, data, bytes);
    comm->out_bytes += bytes;
    flush_out(comm);
    return true;
}

static void send_frame(struct lc_net_comm *comm, enum lc_verbs_frame_type type, const char *text)
{
    struct lc_verbs_frame frame = {
        .magic = LC_VERBS_FRAME_MAGIC,
        .epoch = comm->epoch,
        .type = (uint8_t)type,
        .usable = (uint8_t)comm->mine,
    };

    if (!comm->sender) {
        frame.open = lc_verbs_data_open(comm);
        frame.posted = comm->recv_seq;
    }
    (void)snprintf(frame.text, sizeof(frame.text), "%s", text);
    for (int i = 0; type == LC_VERBS_FRAME_PATHS && i < comm->n_paths; i++) {
        if (!(comm->mine >> i & 1))
            continue;
        lc_verbs_path_info(&comm->paths[i], &frame.paths[i]);
        frame.paths[i].record = (uintptr_t)comm->shared->records;
        frame.paths[i].record_key = comm->shared_mr->mrs[i % comm->dev->n_ports]->rkey;
    }
    /* The peer does not read, and has not for several epochs. */
    if (!queue_out(comm, &frame, sizeof(frame)) && type != LC_VERBS_FRAME_ERROR)
        lc_verbs_comm_fail(comm, -EREMOTEIO, "the peer does not listen any more");
}

void lc_verbs_comm_fail(struct lc_net_comm *comm, int err, const char *fmt, ...)
{
    char why[sizeof(comm->why)]; /* its arguments may be the old one */
    va_list ap;

    if (comm->error)
        return;
    va_start(ap, fmt);
    (void)vsnprintf(why, sizeof(why), fmt, ap);
    va_end(ap);
    memcpy(comm->why, why, sizeof(why));
    comm->error = err;
    comm->state = LC_VERBS_FAILED;
    lc_error("connection %s %s by %s: %s", comm->sender ? "to" : "from", comm->peer,
             comm->dev->name, comm->why);
    if (comm->fd >= 0 && comm->n_paths)
        send_frame(comm, LC_VERBS_FRAME_ERROR, comm->why);
}

static void close_paths(struct lc_net_comm *comm)
{
    for (int i = 0; i < comm->n_paths; i++) {
        lc_verbs_path_close(&comm->paths[i]);
        lc_verbs_path_close_flush(&comm->paths[i]);
    }
    comm->common = 0;
}

/* Ports that are up; those that have failed of late only if there are no others. */
static unsigned usable_paths(struct lc_net_comm *comm)
{
    unsigned up = 0, good = 0;
    int64_t now = lc_now_ns();

    for (int i = 0; i < comm->n_paths; i++) {
        struct lc_verbs_path *path = &comm->paths[i];
        struct lc_verbs_sight sight = path->sight;

        if (!lc_verbs_port_look(path->port, &sight))
            continue;
        if (!path->qp)
            path->sight = sight;
        up |= 1u << i;
        if (path->pause_ns <= now)
            good |= 1u << i;
    }
    return good ? good : up;
}

static void start_epoch(struct lc_net_comm *comm, uint32_t epoch)
{
    if (comm->state == LC_VERBS_RUN)
        comm->deadline_ns = lc_now_ns() + comm->timeout_ns;
    comm->restart = false;
    comm->state = LC_VERBS_PATHS_WAIT;
    comm->epoch = epoch;
    comm->theirs_known = comm->peer_ready = false;
    lc_verbs_data_drain(comm);
    close_paths(comm);
    lc_verbs_data_stop(comm);
    comm->mine = usable_paths(comm);
    for (int i = 0; i < comm->n_paths; i++) {
        int err = comm->mine >> i & 1 ? lc_verbs_path_open(&comm->paths[i]) : 0;

        if (err) {
            lc_warn("%s: no queue pair: %s", comm->paths[i].port->name, strerror(-err));
            comm->mine &= ~(1u << i);
        }
    }
    comm->look_ns = lc_now_ns() + LOOK_MS * MS;
    send_frame(comm, LC_VERBS_FRAME_PATHS, "");
}

void lc_verbs_comm_hello(struct lc_net_comm *comm)
{
    struct lc_verbs_hello hello = { .magic = LC_VERBS_MAGIC,
                                    .version = LC_VERBS_VERSION,
                                    .n_ports = (uint32_t)comm->dev->n_ports };

    memcpy(hello.token, comm->token, sizeof(hello.token));
    (void)queue_out(comm, &hello, sizeof(hello));
}

int lc_verbs_comm_greeted(struct lc_net_comm *comm, const struct lc_verbs_hello *hello)
{
    int theirs = (int)hello->n_ports;

    if (memcmp(hello->token, comm->token, sizeof(comm->token)) != 0 ||
        lc_verbs_hello_check(hello)) {
        lc_verbs_comm_fail(comm, -EPROTO, "what answers is not the peer");
        return -EPROTO;
    }
    comm->n_paths = theirs > comm->dev->n_ports ? theirs : comm->dev->n_ports;
    for (int i = 0; i < comm->n_paths; i++)
        comm->paths[i].port = comm->dev->ports[i % comm->dev->n_ports];
    start_epoch(comm, 0);
    return 0;
}

static void pause_path(struct lc_net_comm *comm, int i)
{
    struct lc_verbs_path *path = &comm->paths[i];
    int doubles = path->failures < PAUSE_DOUBLES ? path->failures : PAUSE_DOUBLES;

    path->failures++;
    path->pause_ns = lc_now_ns() + (PAUSE_MS * MS << doubles);
}

void lc_verbs_comm_path_failed(struct lc_net_comm *comm, int i, const char *cause)
{
    if (comm->error || comm->restart)
        return;
    /* Not worth a line if the peer has closed, whose queue pairs are gone then, or if it goes on. */
    if (!comm->gone && !comm->barren)
        lc_warn("connection %s %s: %s: %s; it is being repaired", comm->sender ? "to" : "from",
                comm->peer, comm->paths[i].port->name, cause);
    (void)snprintf(comm->why, sizeof(comm->why), "%s: %s", comm->paths[i].port->name, cause);
    pause_path(comm, i);
    comm->restart = true;
    lc_verbs_service_kick();
}

static void run(struct lc_net_comm *comm)
{
    comm->state = LC_VERBS_RUN;
    comm->look_ns = lc_now_ns() + LOOK_AGAIN_MS * MS;
    if (comm->epoch)
        lc_info("connection %s %s: running again, %d of %d ways", comm->sender ? "to" : "from",
                comm->peer, __builtin_popcount(comm->common), comm->n_paths);
    comm->probe_ns = lc_now_ns() + comm->timeout_ns / PROBES;
    if (comm->sender)
        lc_verbs_data_resume(comm, comm->theirs.posted, comm->theirs.open, true);
    if (comm->state == LC_VERBS_RUN)
        lc_verbs_data_move(comm);
}

static void join_paths(struct lc_net_comm *comm)
{
    comm->common = comm->mine & comm->theirs.usable;
    if (!comm->common)
        return; /* the next tick looks again */
    for (int i = 0; i < comm->n_paths; i++) {
        struct lc_verbs_path *path = &comm->paths[i];
        int err;

        if (!(comm->common >> i & 1)) {
            lc_verbs_path_close(path);
            continue;
        }
        err = lc_verbs_data_prepare(comm, i);
        if (!err)
            err = lc_verbs_path_join(path, &comm->theirs.paths[i], comm->traffic_class);
        if (err) {
            lc_verbs_comm_path_failed(comm, i, strerror(-err));
            return;
        }
    }
    comm->state = LC_VERBS_READY_WAIT;
    send_frame(comm, LC_VERBS_FRAME_READY, "");
    if (comm->peer_ready && comm->state == LC_VERBS_READY_WAIT)
        run(comm);
}

static void on_paths(struct lc_net_comm *comm, const struct lc_verbs_frame *frame)
{
    if (frame->epoch < comm->epoch || comm->error)
        return;
    if (frame->epoch > comm->epoch)
        start_epoch(comm, frame->epoch);
    if (comm->theirs_known) {
        lc_verbs_comm_fail(comm, -EPROTO, "the peer starts one epoch twice");
        return;
    }
    comm->theirs = *frame;
    comm->theirs_known = true;
    join_paths(comm);
}

static void on_frame(struct lc_net_comm *comm, struct lc_verbs_frame *frame)
{
    if (lc_verbs_frame_check(frame, comm->n_paths, comm->sender)) {
        lc_verbs_comm_fail(comm, -EPROTO, "the peer sent what is no frame");
        return;
    }
    frame->text[LC_VERBS_TEXT - 1] = '\0';
    for (char *c = frame->text; *c; c++)
        if (*c < ' ' || *c > '~')
            *c = '?';
    switch ((enum lc_verbs_frame_type)frame->type) {
    case LC_VERBS_FRAME_PATHS: on_paths(comm, frame); break;
    case LC_VERBS_FRAME_READY:
        comm->peer_ready |= frame->epoch == comm->epoch;
        if (comm->peer_ready && comm->state == LC_VERBS_READY_WAIT && !comm->restart)
            run(comm);
        break;
    case LC_VERBS_FRAME_ERROR:
        lc_verbs_comm_fail(comm, -EREMOTEIO, "the peer failed: %s", frame->text);
        break;
    case LC_VERBS_FRAME_BYE:
        if (comm->sender)
            lc_verbs_data_resume(comm, frame->posted, frame->open, false);
        break;
    case LC_VERBS_FRAME_TYPES: break;
    }
}

/* `err`: 0 where the peer has closed it. Without the side socket nothing can be repaired, and whether the peer is still
 * there can only be known from it, so that both are the end. */
static void set_gone(struct lc_net_comm *comm, int err)
{
    comm->gone = true;
    comm->gone_error = err;
    comm->gone_ns = lc_now_ns();
    lc_verbs_service_unwatch(comm);
}

void lc_verbs_comm_readable(struct lc_net_comm *comm)
{
    while (!comm->gone) {
        bool hello = comm->state == LC_VERBS_HELLO;
        size_t want = hello ? sizeof(comm->in.hello) : sizeof(comm->in.frame);
        ssize_t got = recv(comm->fd, comm->in.bytes + comm->in_bytes, want - comm->in_bytes,
                           MSG_DONTWAIT);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (got <= 0) {
            set_gone(comm, got < 0 ? errno : 0);
            return;
        }
        comm->in_bytes += (size_t)got;
        if (comm->in_bytes < want)
            continue;
        comm->in_bytes = 0;
        if (!hello)
            on_frame(comm, &comm->in.frame);
        else if (comm->error || lc_verbs_comm_greeted(comm, &comm->in.hello))
            set_gone(comm, 0);
    }
}

bool lc_verbs_no_route(int error)
{
    return error == ENETUNREACH || error == EHOSTUNREACH || error == ENETDOWN || error == EHOSTDOWN;
}

void lc_verbs_comm_writable(struct lc_net_comm *comm)
{
    int err = 0;
    socklen_t size = sizeof(err);

    if (comm->connecting) {
        comm->connecting = false;
        if (getsockopt(comm->fd, SOL_SOCKET, SO_ERROR, &err, &size) == 0 && err) {
            /* Whoever asks for it begins again, and says so if that does not help. */
            if (lc_verbs_no_route(err)) {
                comm->error = -EHOSTUNREACH;
                comm->state = LC_VERBS_FAILED;
            } else {
                lc_verbs_comm_fail(comm, -EREMOTEIO, "cannot connect: %s", strerror(err));
            }
            set_gone(comm, err);
            return;
        }
    }
    flush_out(comm);
}

static void tick_gone(struct lc_net_comm *comm, int64_t now)
{
    lc_verbs_data_move(comm);
    if (comm->error || now - comm->gone_ns < GRACE_MS * MS)
        return;
    if (lc_verbs_data_waits(comm) || comm->state == LC_VERBS_HELLO) {
        lc_verbs_comm_fail(comm, -EREMOTEIO, "%s%s",
                           comm->gone_error ? "the socket beside the queue pairs broke: "
                                            : "the peer has closed the connection",
                           comm->gone_error ? strerror(comm->gone_error) : "");
    } else { /* the usual end: nobody waits for anything */
        comm->error = -EREMOTEIO;
        comm->state = LC_VERBS_FAILED;
        lc_debug("%s has closed its connection", comm->peer);
    }
}

/* Whoever only waits has nothing under way that could fail: a machine that is gone says nothing. Its device is asked, and
 * not the side socket: that takes another network as a rule, which may be gone for minutes and harm nobody. */
static void look_for_peer(struct lc_net_comm *comm, int64_t now)
{
    bool waits = comm->asked || lc_verbs_data_waits(comm);

    comm->asked = false;
    if (!waits)
        comm->barren = 0;
    if (now < comm->probe_ns || !waits)
        return;
    comm->probe_ns = now + comm->timeout_ns / PROBES;
    lc_verbs_data_probe(comm);
}

/* While it runs: a port that is down here is silence to the peer, which it may take long to notice. */
static void look_at_ports(struct lc_net_comm *comm, int64_t now)
{
    unsigned usable;

    comm->look_ns = now + LOOK_AGAIN_MS * MS;
    if (!lc_verbs_data_waits(comm) && comm->common == (1u << comm->n_paths) - 1)
        return;
    usable = usable_paths(comm);
    for (int i = 0; i < comm->n_paths; i++)
        if (comm->common & ~usable & 1u << i)
            lc_verbs_comm_path_failed(comm, i, "the port is down");
    if (!comm->restart && usable & ~comm->mine) {
        lc_info("connection %s %s: a way has come back", comm->sender ? "to" : "from", comm->peer);
        start_epoch(comm, comm->epoch + 1);
    }
}

int lc_verbs_comm_tick(struct lc_net_comm *comm, int64_t now)
{
    bool waits = comm->state != LC_VERBS_RUN;

    if (comm->error)
        return 10000;
    if (comm->gone) {
        tick_gone(comm, now);
        return 50;
    }
    if (comm->restart) {
        if (comm->barren++ == 0)
            comm->barren_ns = now;
        if (comm->barren > BARREN && now - comm->barren_ns > comm->timeout_ns)
            lc_verbs_comm_fail(comm, -EREMOTEIO, "repairs do not help; %s", comm->why);
        else
            start_epoch(comm, comm->epoch + 1);
        return 20;
    }
    if (waits && now >= comm->deadline_ns) {
        lc_verbs_comm_fail(comm, -EREMOTEIO, "no way to the peer for %d s%s%s",
                           (int)(comm->timeout_ns / 1000 / MS), comm->why[0] ? "; " : "",
                           comm->why);
        return 10000;
    }
    if (comm->state == LC_VERBS_PATHS_WAIT && now >= comm->look_ns) {
        comm->look_ns = now + LOOK_MS * MS;
        if ((!comm->mine || (comm->theirs_known && !comm->common)) &&
            usable_paths(comm) != comm->mine)
            start_epoch(comm, comm->epoch + 1);
    }
    if (!waits && now >= comm->look_ns) {
        look_for_peer(comm, now);
        look_at_ports(comm, now);
    }
    return waits ? 20 : LOOK_AGAIN_MS;
}

void lc_verbs_comm_stop(struct lc_net_comm *comm)
{
    char rest[256];
    int fd;

    close_paths(comm);
    lc_verbs_data_abandon(comm);
    if (comm->fd < 0)
        return;
    if (comm->n_paths && !comm->error)
        send_frame(comm, LC_VERBS_FRAME_BYE, "");
    comm->state = LC_VERBS_FAILED;
    comm->error = comm->error ? comm->error : -EINVAL;
    lc_verbs_service_unwatch(comm);
    /* Closing with something unread resets the connection, and could take BYE away from the peer. */
    while (recv(comm->fd, rest, sizeof(rest), MSG_DONTWAIT) > 0)
        ;
    /* The number is forgotten first: a child of a fork in between must not close it twice. */
    fd = comm->fd;
    comm->fd = -1;
    close(fd);
}

void lc_verbs_comm_release(struct lc_net_comm *comm, const struct lc_net_mr *mr)
{
    if (!lc_verbs_data_uses(comm, mr))
        return;
    if (!comm->error)
        lc_warn_once(
            "connection %s %s ends: memory of an open request is deregistered, as after an abort",
            comm->sender ? "to" : "from", comm->peer);
    lc_verbs_comm_stop(comm);
}
