/* SPDX-License-Identifier: Apache-2.0
 *
 * The transport's table: what NCCL's threads call. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define LONE 4 /* messages in a row of one connection after which no other one is taken to send */
#define HANDED_LOOKS \
    3 /* of the caller for a message that was left to another thread, before it sends it itself */
#define PENDING_NS(timeout) (2 * (timeout)) /* of a connect that nobody asks for again */

struct lc_net_context {
    uint64_t comm_id;
};

/* Of one connection, whose requests name it. */
struct lc_net_mr {
    const struct conn *conn;
};

static struct conn *conn_of(struct lc_net_comm *comm)
{
    return (struct conn *)comm;
}

static bool is_dead(void)
{
    return atomic_load_explicit(&engine.dead, memory_order_relaxed);
}

static int tcp_init(const struct lc_net_options *options, struct lc_net_context **out)
{
    struct lc_net_context *ctx;
    int err;

    if (is_dead())
        return -ECHILD;
    err = engine_configure();
    if (err)
        return err;
    ctx = calloc(1, sizeof(*ctx));
    if (!ctx)
        return -ENOMEM;
    ctx->comm_id = options ? options->comm_id : 0;
    /* Without threads there is nothing to offer; that is no failure of init. */
    if (engine.n_devices > 0 && engine_hold() != 0) {
        free(ctx);
        ctx = NULL;
    }
    *out = ctx;
    return 0;
}

static void tcp_fini(struct lc_net_context *ctx)
{
    if (!ctx || is_dead())
        return;
    free(ctx);
    if (engine.n_devices > 0)
        engine_drop();
}

static int tcp_devices(int *out)
{
    if (is_dead())
        return -ECHILD;
    pthread_mutex_lock(&engine.life);
    *out = engine.running ? engine.n_devices : 0;
    pthread_mutex_unlock(&engine.life);
    return 0;
}

static int tcp_properties(int dev, struct lc_net_properties *out)
{
    const struct lc_tcp_device *device;

    if (dev < 0 || dev >= engine.n_devices)
        return -EINVAL;
    device = &engine.devices[dev];
    /* No latency: NCCL adds it to its own idea of a network's, and for its Simple protocol twice, for a flush that host
     * memory has not. Its own sockets say none either. */
    *out = (struct lc_net_properties){ .name = device->name,
                                       .pci_path = device->pci_path,
                                       .guid = device->guid,
                                       .ptr_support = LC_NET_HOST,
                                       .speed_mbps = device->speed_mbps,
                                       .latency_us = 0,
                                       .max_comms = 65536,
                                       .max_recvs = 1,
                                       .max_bytes = (size_t)LC_TCP_MAX_BYTES,
                                       .rail_id = -1,
                                       .plane_id = -1 };
    return 0;
}

/* ---- connecting ---- */

static int random_bytes(void *out, size_t size)
{
    if (getrandom(out, size, GRND_NONBLOCK) == (ssize_t)size)
        return 0;
    lc_error("no random numbers: %s", strerror(errno));
    return errno ? -errno : -EIO;
}

/* With engine.lock held. */
static void fill_handle(void *handle, const struct lc_net_listen *listen, uint16_t port)
{
    struct lc_tcp_handle h = { .magic = LC_TCP_MAGIC, .version = LC_TCP_VERSION };
    union lc_tcp_address address = engine.devices[listen->dev].address;

    rail_fill_handle(listen->dev, &h);

    if (address.sa.sa_family == AF_INET)
        address.v4.sin_port = port;
    else
        address.v6.sin6_port = port;
    lc_tcp_address_write(&address, &h.address);
    memcpy(h.token, listen->token, sizeof(h.token));
    memcpy(handle, &h, sizeof(h));
}

static int tcp_listen(struct lc_net_context *ctx, int dev, void *handle, struct lc_net_listen **out)
{
    struct lc_net_listen *listen;
    uint16_t port;
    int err;

    if (is_dead())
        return -ECHILD;
    if (dev < 0 || dev >= engine.n_devices || !handle)
        return -EINVAL;
    listen = calloc(1, sizeof(*listen));
    if (!listen)
        return -ENOMEM;
    listen->dev = dev;
    err = random_bytes(listen->token, sizeof(listen->token));
    if (err)
        goto free_listen;
    err = engine_hold();
    if (err)
        goto free_listen;
    pthread_mutex_lock(&engine.lock);
    err = service_listen(dev, &port);
    if (!err) {
        fill_handle(handle, listen, port);
        listen->next = engine.listens;
        engine.listens = listen;
    }
    pthread_mutex_unlock(&engine.lock);
    if (err)
        goto drop;
    *out = listen;
    return 0;

drop:
    engine_drop();
free_listen:
    free(listen);
    return err;
}

static void set_rails(struct conn *conn, const struct rail *rails, int n)
{
    conn->n_rails = n;
    memcpy(conn->rails, rails, (size_t)n * sizeof(*rails));
    for (int i = 0; i < conn->n_lanes; i++) {
        conn->lanes[i].rail = i % n;
        conn->lanes[i].dev = rails[i % n].dev;
    }
    if (n > 1) /* one of them may not work; nobody else knows the connection yet */
        (void)conn_widen(conn, UINT64_MAX);
    conn->peer = rails[0].to;
    (void)lc_tcp_address_text(&conn->peer, conn->peer_text);
    for (int i = 1; i < n; i++) {
        char text[LC_TCP_ADDRESS_TEXT];

        lc_info("sending to %s over %s goes over %s to %s, too", conn->peer_text,
                engine.devices[rails[0].dev].name, engine.devices[rails[i].dev].name,
                lc_tcp_address_text(&rails[i].to, text));
    }
}

/* With engine.lock held: the engine must run, so that somebody dials. */
static int begin_connect(int dev, const struct lc_tcp_handle *h, struct conn **out)
{
    struct rail rails[LC_TCP_RAILS];
    struct conn *conn;
    int n_rails;
    int n;
    int err;

    err = rail_choose(dev, h, rails, &n_rails);
    if (err) {
        lc_warn("the peer's handle holds no address");
        return err;
    }
    n = n_rails * engine.sockets;
    conn = conn_new(true, dev, n < LC_TCP_LANES ? n : LC_TCP_LANES, engine.piece);
    if (!conn)
        return -ENOMEM;
    set_rails(conn, rails, n_rails);
    memcpy(conn->token, h->token, sizeof(conn->token));
    conn->expires = lc_now_ns() + PENDING_NS(engine.timeout_ns);
    err = random_bytes(conn->id, sizeof(conn->id));
    if (!err)
        err = random_bytes(&conn->ticket, sizeof(conn->ticket));
    conn->ticket |= 1; /* 0 is none */
    /* For the receiver that asks whether this process is still there; where that fails, it waits for its deadline. */
    for (int i = 0; !err && engine.running && i < n_rails; i++) {
        uint16_t home;

        (void)service_listen(rails[i].dev, &home);
    }
    if (!err && !engine.running)
        err = -EINVAL;
    if (err) {
        conn_unref(conn);
        return err;
    }
    engine_enlist(conn);
    *out = conn;
    return 0;
}

/* Whether a connection that is being made has come so far. Its error is returned with its text logged. */
static int look_at(struct conn *conn, bool *ready)
{
    int err;

    conn_lock(conn);
    *ready = conn->was_up;
    err = conn->error;
    conn_unlock(conn);
    return err;
}

static struct conn *find_ticket(uint64_t ticket)
{
    for (struct conn *conn = engine.conns; conn; conn = conn->next) {
        if (conn->sends && !conn->claimed && conn->ticket == ticket)
            return conn;
    }
    return NULL;
}

static void set_ticket(void *handle, uint64_t ticket)
{
    memcpy((char *)handle + offsetof(struct lc_tcp_handle, ticket), &ticket, sizeof(ticket));
}

/* The next call of one that has begun. */
static int go_on(void *handle, uint64_t ticket, struct lc_net_comm **out)
{
    struct conn *failed = NULL;
    struct conn *conn;
    bool ready = false;
    int err;

    pthread_mutex_lock(&engine.lock);
    conn = find_ticket(ticket);
    err = conn ? look_at(conn, &ready) : -EINVAL;
    if (conn && (err || ready)) {
        conn->claimed = true;
        conn->ticket = 0;
        failed = err ? conn : NULL;
    }
    pthread_mutex_unlock(&engine.lock);
    if (failed)
        conn_close(failed);
    if (!err && ready)
        err = engine_hold();
    if (err) {
        set_ticket(handle, 0);
        return err;
    }
    *out = ready ? (struct lc_net_comm *)conn : NULL;
    return 0;
}

static int tcp_connect(struct lc_net_context *ctx, int dev, void *handle, struct lc_net_comm **out)
{
    struct lc_tcp_handle h;
    struct conn *conn;
    uint64_t ticket;
    int err;

    if (is_dead())
        return -ECHILD;
    if (dev < 0 || dev >= engine.n_devices || !handle)
        return -EINVAL;
    err = lc_tcp_handle_read(handle, &h);
    if (err)
        return err;
    if (h.ticket)
        return go_on(handle, h.ticket, out);
    pthread_mutex_lock(&engine.lock);
    err = begin_connect(dev, &h, &conn);
    ticket = err ? 0 : conn->ticket;
    pthread_mutex_unlock(&engine.lock);
    if (err)
        return err;
    set_ticket(handle, ticket);
    engine_wake();
    *out = NULL;
    return 0;
}

static int tcp_accept(struct lc_net_listen *listen, struct lc_net_comm **out)
{
    struct conn *conn;
    int err;

    if (is_dead())
        return -ECHILD;
    pthread_mutex_lock(&engine.lock);
    conn = listen->ready;
    if (conn) {
        listen->ready = conn->next_ready;
        listen->n_ready--;
        conn->claimed = true;
    }
    pthread_mutex_unlock(&engine.lock);
    if (conn) {
        err = engine_hold();
        if (err)
            return err;
    }
    *out = (struct lc_net_comm *)conn;
    return 0;
}

static void tcp_close_listen(struct lc_net_listen *listen)
{
    if (!listen || is_dead())
        return;
    pthread_mutex_lock(&engine.lock);
    for (struct lc_net_listen **link = &engine.listens; *link; link = &(*link)->next) {
        if (*link == listen) {
            *link = listen->next;
            break;
        }
    }
    pthread_mutex_unlock(&engine.lock);
    while (listen->ready) {
        struct conn *conn = listen->ready;

        listen->ready = conn->next_ready;
        conn_close(conn);
    }
    free(listen);
    engine_drop();
}

static void tcp_close(struct lc_net_comm *comm)
{
    if (!comm || is_dead())
        return;
    leave(conn_of(comm));
    engine_drop();
}

/* ---- memory: the kernel copies from and to the caller's own buffers; what is kept of them is who uses them ---- */

static int tcp_reg_mr(struct lc_net_comm *comm, void *data, size_t size, int type,
                      struct lc_net_mr **out)
{
    struct lc_net_mr *mr;

    if (is_dead())
        return -ECHILD;
    if (!comm)
        return -EINVAL;
    if (type != LC_NET_HOST)
        return -ENOTSUP;
    mr = malloc(sizeof(*mr));
    if (!mr)
        return -ENOMEM;
    mr->conn = conn_of(comm);
    *out = mr;
    return 0;
}

static int tcp_reg_dmabuf(struct lc_net_comm *comm, void *data, size_t size, int type,
                          uint64_t offset, int fd, struct lc_net_mr **out)
{
    return -ENOTSUP;
}

/* ---- messages ---- */

/* No other connection has been sent or received on, as this one is, for a while: none waits for NCCL's thread meanwhile. */
static bool is_alone(const struct conn *conn, size_t size)
{
    struct turns *turns = &engine.turns[conn->sends];
    unsigned n = atomic_load_explicit(&turns->n, memory_order_relaxed);

    if (size <= LC_TCP_EARLY_MAX)
        return false;
    if (atomic_load_explicit(&turns->conn, memory_order_relaxed) != conn) {
        atomic_store_explicit(&turns->conn, conn, memory_order_relaxed);
        n = 0;
    }
    if (n < LONE)
        atomic_store_explicit(&turns->n, n + 1, memory_order_relaxed);
    return n >= LONE;
}

/* The sender is to know of receives before it has used up those it knows of. Where it waits for the next confirmation, which
 * tells of this one, too, others are received meanwhile, if there are others. */
static bool has_few(const struct conn *conn, bool others)
{
    return conn->told_posted < conn->acked + (others ? 1 : 3) || conn->told_posted < conn->wanted ||
           conn->told_posted < conn->acked + (conn->posted - conn->acked) / 2;
}

/* NULL: the window is full. */
static struct lc_net_request *post(struct conn *conn, void *data, size_t size, int tag,
                                   const struct lc_net_mr *mr, int *err)
{
    struct lc_net_request *r;
    bool wake = false;
    bool alone;

    conn_lock(conn);
    *err = conn->error;
    if (!*err && conn_is_hopeless(conn, conn->posted) && !conn_has_early(conn, conn->posted)) {
        conn_fail_locked(conn, -EREMOTEIO, "the other side has closed the connection");
        *err = conn->error;
    }
    r = &conn->ring[conn->posted % LC_TCP_WINDOW];
    if (*err || r->used || conn->posted - conn->acked >= LC_TCP_WINDOW) {
        conn->counts.waits += *err == 0;
        r = NULL;
    } else {
        alone = is_alone(conn, size);
        *r = (struct lc_net_request){ .conn = conn,
                                      .data = data,
                                      .seq = conn->posted,
                                      .size = size,
                                      .tag = tag,
                                      .mr = mr,
                                      .alone = conn->sends && alone,
                                      .handed = conn_hands_over(conn, size, alone),
                                      .lone = conn->sends && alone && size <= engine.keep &&
                                              conn->n_used == 0,
                                      .used = true };
        conn->posted++;
        conn->n_used++;
        wake = conn_widen(conn, size);
        if (conn->parking != PARK_OVER)
            wake |= park_end(conn);
        if (!conn->sends) {
            /* Every confirmation tells of new receives, too: by itself that is worth a frame when there may be no other,
             * and not for what is here already. */
            conn_take_early(conn, r);
            if (!r->complete && has_few(conn, size > LC_TCP_EARLY_MAX && !alone))
                conn_want_credit(conn);
        }
    }
    conn_unlock(conn);
    if (wake)
        engine_wake();
    return r;
}

/* See enum attendance. Most calls find that it has been said. */
static void attend(struct conn *conn)
{
    if (!conn->sends && atomic_load_explicit(&conn->attendance, memory_order_relaxed) != CALLED)
        atomic_store_explicit(&conn->attendance, CALLED, memory_order_relaxed);
}

static int start(struct lc_net_comm *comm, bool sends, void *data, size_t size, int tag,
                 const struct lc_net_mr *mr, struct lc_net_request **out)
{
    struct conn *conn = conn_of(comm);
    struct lc_net_request *r;
    int err;

    if (is_dead())
        return -ECHILD;
    if (!comm || conn->sends != sends || size > LC_TCP_MAX_BYTES || (!data && size))
        return -EINVAL;
    attend(conn);
    r = post(conn, data, size, tag, mr, &err);
    if (err)
        return err;
    conn_work(conn);
    *out = r;
    return 0;
}

static int tcp_isend(struct lc_net_comm *comm, void *data, size_t size, int tag,
                     struct lc_net_mr *mr, struct lc_net_request **out)
{
    return start(comm, true, data, size, tag, mr, out);
}

/* One buffer at a time, so that tags have nothing to choose between. */
static int tcp_irecv(struct lc_net_comm *comm, int n, void *const *data, const size_t *sizes,
                     const int *tags, struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    if (n != 1)
        return -EINVAL;
    return start(comm, false, data[0], sizes[0], tags ? tags[0] : 0, mrs ? mrs[0] : NULL, out);
}

/* Host memory needs none. */
static int tcp_iflush(struct lc_net_comm *comm, int n, void *const *data, const int *sizes,
                      struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    *out = NULL;
    return 0;
}

/* A message that came before the connection failed has come. With conn->lock held. */
static bool has_come(const struct lc_net_request *r)
{
    return r->conn->sends ? r->gone || r->seq < r->conn->acked : r->complete;
}

/* The peer may confirm a message before the thread that sent its end is back from the kernel. */
static bool is_read(const struct lc_net_request *r)
{
    for (int i = 0; r->conn->sends && i < r->conn->n_lanes; i++) {
        if (atomic_load(&r->conn->lanes[i].reading) <= r->seq)
            return true;
    }
    return false;
}

/* Its buffer is the caller's again. With conn->lock held. */
static bool is_over(const struct lc_net_request *r)
{
    return has_come(r) && (r->gone || !is_read(r));
}

/* With conn->lock held. */
static bool finish(struct lc_net_request *r, size_t *sizes)
{
    if (!is_over(r))
        return false;
    if (sizes)
        sizes[0] = r->conn->sends ? r->size : r->length;
    r->used = false;
    r->conn->n_used--;
    return true;
}

/* Nothing has happened that could end it. */
static bool is_waiting(struct lc_net_request *r)
{
    return !atomic_load(&r->ripe) && !atomic_load(&r->conn->troubled);
}

static bool try_to_finish(struct lc_net_request *r, size_t *sizes)
{
    bool over;

    if (is_waiting(r))
        return false;
    conn_lock(r->conn);
    over = finish(r, sizes);
    conn_unlock_unchanged(r->conn); /* that a place of the window is free is for post */
    return over;
}

/* What cannot come any more. 0: it can. */
static int find_loss(struct lc_net_request *r)
{
    struct conn *conn = r->conn;
    bool lost;
    int err;

    if (is_waiting(r))
        return 0;
    conn_lock(conn);
    err = conn->error;
    lost = !has_come(r) && (err || conn_is_hopeless(conn, r->seq));
    conn_unlock_unchanged(conn);
    if (lost && !err) {
        conn_fail(conn, -EREMOTEIO, "the other side closed the connection");
        err = -EREMOTEIO;
    }
    return lost ? err : 0;
}

static int tcp_test(struct lc_net_request *request, bool *done, size_t *sizes)
{
    bool more = true;
    int err = 0;

    if (is_dead())
        return -ECHILD;
    if (!request)
        return -EINVAL;
    attend(request->conn);
    /* Each look that finds nothing costs as much as one that does: what has come is enough. */
    *done = try_to_finish(request, sizes);
    if (!*done && request->handed && ++request->looks == HANDED_LOOKS)
        conn_take_back(request);
    for (int i = 0; i < 2 && more && !*done; i++) {
        more = lane_kick(&request->conn->lanes[0], 1);
        *done = try_to_finish(request, sizes);
    }
    if (!*done)
        err = find_loss(request);
    return err;
}

/* True: the connection has failed now, if it had not before. */
static bool ends_with(struct conn *conn, const struct lc_net_mr *mr)
{
    bool used = false;

    conn_lock(conn);
    for (int i = 0; i < LC_TCP_WINDOW && conn->n_used > 0; i++) {
        const struct lc_net_request *r = &conn->ring[i];

        used |= r->used && r->mr == mr && !is_over(r);
    }
    if (used)
        conn_fail_locked(conn, -ECANCELED, "memory of an open request was deregistered");
    conn_unlock(conn);
    return used;
}

/* After an abort, or an error, NCCL makes no further calls but for this, frees the buffers, and only then closes, while the
 * pool would still go on for the requests that are open. */
static int tcp_dereg(struct lc_net_comm *comm, struct lc_net_mr *mr)
{
    struct conn *conn = conn_of(comm);

    if (is_dead())
        return -ECHILD;
    if (!mr)
        return 0;
    if (mr->conn != conn)
        return -EINVAL;
    if (ends_with(conn, mr)) {
        lc_warn_once("%s %s ends: memory of an open request is deregistered, as after an abort",
                     conn->sends ? "sending to" : "receiving from", conn->peer_text);
        conn_abandon(conn);
    }
    free(mr);
    return 0;
}

const struct lc_net_ops lc_net_tcp = {
    .name = "tcp",
    .init = tcp_init,
    .fini = tcp_fini,
    .devices = tcp_devices,
    .properties = tcp_properties,
    .listen = tcp_listen,
    .connect = tcp_connect,
    .accept = tcp_accept,
    .reg_mr = tcp_reg_mr,
    .reg_dmabuf = tcp_reg_dmabuf,
    .dereg = tcp_dereg,
    .isend = tcp_isend,
    .irecv = tcp_irecv,
    .iflush = tcp_iflush,
    .test = tcp_test,
    .close_send = tcp_close,
    .close_recv = tcp_close,
    .close_listen = tcp_close_listen,
};
