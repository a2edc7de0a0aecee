/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptors that members of one host hand to each other, each from the process that has it to the one that wants it:
 * the arbiter takes no part, but for the blob that says where to ask. A member asks by the name and the secret of that
 * blob; whoever else finds the socket gets nothing and is shown out.
 */
#include "interpose/control/control_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define KEY_OFFER UINT32_MAX /* of the blob below; lc_room_post's callers use small ones */

static socklen_t address_of(const unsigned char name[LC_KEY_BYTES], struct sockaddr_un *out)
{
    char text[2 * LC_KEY_BYTES + 16];
    int length = snprintf(text, sizeof(text), "loongcomm-fd-");

    for (int i = 0; i < LC_KEY_BYTES; i++)
        length += snprintf(text + length, sizeof(text) - (size_t)length, "%02x", name[i]);
    *out = (struct sockaddr_un){ .sun_family = AF_UNIX };
    memcpy(out->sun_path + 1, text, (size_t)length);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int draw(unsigned char out[LC_KEY_BYTES])
{
    return getrandom(out, LC_KEY_BYTES, 0) == LC_KEY_BYTES ? 0 : -EIO;
}

/* ---- the side that has ---- */

/* One socket per process. */
static int start_listening(void)
{
    struct sockaddr_un addr;
    socklen_t length;
    int fd, err;

    if (control.pass_fd >= 0)
        return 0;
    err = draw(control.pass_name);
    if (err)
        return err;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    length = address_of(control.pass_name, &addr);
    if (bind(fd, (struct sockaddr *)&addr, length) != 0 || listen(fd, LC_STRANGERS) != 0) {
        err = -errno;
        close(fd);
        return err;
    }
    control.pass_fd = fd;
    return 0;
}

static void withdraw(struct lc_room *room)
{
    struct lc_room **at = &control.offers;

    if (room->offered_fd < 0)
        return;
    while (*at != room)
        at = &(*at)->next_offer;
    *at = room->next_offer;
    close(room->offered_fd);
    room->offered_fd = -1;
}

int lc_room_offer_fd(struct lc_room *room, int fd)
{
    struct lc_offer offer;
    int err;

    if (!lc_room_complete(room) || room->pid != getpid())
        return -EINVAL;
    pthread_mutex_lock(&control.lock);
    err = room->offered_fd >= 0 ? -EALREADY : start_listening();
    if (!err)
        err = draw(room->secret);
    if (!err) {
        memcpy(offer.name, control.pass_name, LC_KEY_BYTES);
        memcpy(offer.secret, room->secret, LC_KEY_BYTES);
        err = lc_member_post(room, KEY_OFFER, &offer, sizeof(offer));
    }
    if (!err) {
        room->offered_fd = fd;
        room->asked = 0;
        room->next_offer = control.offers;
        control.offers = room;
    }
    pthread_mutex_unlock(&control.lock);
    return err;
}

void lc_room_withdraw_fd(struct lc_room *room)
{
    if (room->pid != getpid())
        return;
    pthread_mutex_lock(&control.lock);
    withdraw(room);
    pthread_mutex_unlock(&control.lock);
}

static void show_out(struct lc_visitor *visitor)
{
    struct lc_visitor **at = &control.visitors;

    while (*at != visitor)
        at = &(*at)->next;
    *at = visitor->next;
    control.n_visitors--;
    lc_conn_close(&visitor->conn);
    free(visitor);
}

static struct lc_visitor *oldest_visitor(void)
{
    struct lc_visitor *oldest = control.visitors;

    while (oldest && oldest->next)
        oldest = oldest->next;
    return oldest;
}

/* Nobody gives way before he had the time to ask. */
bool lc_pass_has_room(void)
{
    return control.n_visitors < LC_STRANGERS ||
           lc_deadline_left_ms(oldest_visitor()->until) < LC_HELLO_MS - LC_GRACE_MS;
}

void lc_pass_accept(int fd)
{
    struct lc_visitor *visitor = calloc(1, sizeof(*visitor));

    if (control.n_visitors >= LC_STRANGERS)
        show_out(oldest_visitor());
    if (!visitor) {
        close(fd);
        return;
    }
    lc_conn_init(&visitor->conn, fd, true);
    visitor->until = lc_deadline_in_ms(LC_HELLO_MS);
    visitor->next = control.visitors;
    control.visitors = visitor;
    control.n_visitors++;
}

/* Constant time over the secret, so that a stranger learns nothing from the clock. */
static struct lc_room *find_offer(const struct lc_wanted *wanted)
{
    struct lc_room *found = NULL;

    for (struct lc_room *r = control.offers; r; r = r->next_offer) {
        unsigned char differ = 0;

        for (int i = 0; i < LC_KEY_BYTES; i++)
            differ |= (unsigned char)(r->secret[i] ^ wanted->secret[i]);
        if (!differ && wanted->id == lc_room_id(r) && wanted->rank == r->mine.rank)
            found = r;
    }
    return found;
}

/* The one frame that may come. 1: it is there; -EAGAIN: not yet. */
static int read_only_frame(struct lc_conn *conn, enum lc_frame_type type, size_t length,
                           const unsigned char **body)
{
    struct lc_frame head = { 0 };
    int err = lc_conn_read(conn, sizeof(head) + length);

    if (!err)
        err = lc_conn_next(conn, &head, body);
    if (err == 0) /* no larger one, which would never be whole */
        return conn->in.end - conn->in.start < sizeof(head) + length ? -EAGAIN : -EPROTO;
    return err > 0 && head.type != type ? -EPROTO : err;
}

/* One question and its answer; nobody stays. Each member asks once, or a few times if something fails at its end. */
static void hear(struct lc_visitor *visitor)
{
    const unsigned char *body;
    struct lc_wanted wanted;
    struct lc_room *room;
    int err = read_only_frame(&visitor->conn, LC_FRAME_WANTED, sizeof(wanted), &body);

    if (err == -EAGAIN && !lc_deadline_passed(visitor->until))
        return;
    if (err > 0) {
        memcpy(&wanted, body, sizeof(wanted));
        room = find_offer(&wanted);
        if (room && room->asked < 4 * room->nranks) {
            room->asked++;
            (void)lc_conn_send_fd(&visitor->conn, LC_FRAME_PASSED, 0, room->offered_fd);
        }
    }
    show_out(visitor);
}

/* ---- the side that wants ---- */

static void end_fetch(struct lc_fetch *fetch, int err)
{
    fetch->over = true;
    fetch->err = err;
    lc_conn_close(&fetch->conn);
}

/* The name may have been taken by a stranger: only a process of the same user is believed. */
static void start_fetch(struct lc_fetch *fetch)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct lc_wanted wanted = { .id = lc_room_id(fetch->room), .rank = fetch->rank };
    socklen_t length = sizeof(struct ucred);
    struct ucred peer = { .uid = (uid_t)-1 };
    struct sockaddr_un addr;
    int err = 0;

    if (fd < 0) {
        end_fetch(fetch, -errno);
        return;
    }
    if (connect(fd, (struct sockaddr *)&addr, address_of(fetch->offer.name, &addr)) != 0)
        err = -errno;
    else if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid())
        err = -EACCES;
    if (err) {
        close(fd);
        if (err != -EAGAIN) /* a queue of visitors before us: at a later turn */
            end_fetch(fetch, err);
        return;
    }
    lc_conn_init(&fetch->conn, fd, true);
    memcpy(wanted.secret, fetch->offer.secret, LC_KEY_BYTES);
    err = lc_conn_send(&fetch->conn, LC_FRAME_WANTED, 0, &wanted, sizeof(wanted), NULL, 0);
    if (!err)
        err = lc_conn_flush(&fetch->conn);
    if (err)
        end_fetch(fetch, err);
}

static void take_fd(struct lc_fetch *fetch)
{
    const unsigned char *body;
    int err = read_only_frame(&fetch->conn, LC_FRAME_PASSED, 0, &body);

    if (err == -EAGAIN)
        return;
    if (err > 0)
        err = fetch->conn.passed_fd >= 0 ? 0 : -EPROTO;
    if (!err) {
        fetch->fd = fetch->conn.passed_fd;
        fetch->conn.passed_fd = -1;
    }
    end_fetch(fetch, err);
}

static struct lc_fetch **find_fetch(const struct lc_room *room, uint32_t rank)
{
    struct lc_fetch **at = &control.fetches;

    while (*at && ((*at)->room != room || (*at)->rank != rank))
        at = &(*at)->next;
    return at;
}

static void free_fetch(struct lc_fetch **at)
{
    struct lc_fetch *fetch = *at;

    *at = fetch->next;
    lc_conn_close(&fetch->conn);
    if (fetch->fd >= 0)
        close(fetch->fd);
    free(fetch);
}

/* With the lock held. */
static int new_fetch(struct lc_room *room, uint32_t rank)
{
    struct lc_fetch *fetch;
    struct lc_offer offer;
    size_t size;
    int err = lc_member_look(room, rank, KEY_OFFER, &offer, sizeof(offer), &size);

    if (err)
        return err;
    if (size != sizeof(offer))
        return -EPROTO;
    fetch = calloc(1, sizeof(*fetch));
    if (!fetch)
        return -ENOMEM;
    *fetch = (struct lc_fetch){ .next = control.fetches,
                                .room = room,
                                .rank = rank,
                                .offer = offer,
                                .until = lc_deadline_in_ms(LC_CONNECT_MS),
                                .fd = -1 };
    lc_conn_init(&fetch->conn, -1, true);
    control.fetches = fetch;
    lc_control_wake();
    return -EAGAIN;
}

int lc_room_fetch_fd(struct lc_room *room, uint32_t rank, int *out)
{
    struct lc_fetch **at;
    int err = -EAGAIN;

    if (!lc_room_complete(room) || rank >= room->nranks || room->pid != getpid())
        return -EINVAL;
    pthread_mutex_lock(&control.lock);
    at = find_fetch(room, rank);
    if (!*at) {
        err = new_fetch(room, rank);
    } else if ((*at)->over) {
        err = (*at)->err;
        if (!err) {
            *out = (*at)->fd;
            (*at)->fd = -1;
        }
        free_fetch(at);
    }
    pthread_mutex_unlock(&control.lock);
    return err;
}

/* ---- turns of the control thread, and ends ---- */

void lc_pass_serve_visitor(struct lc_visitor *visitor, short events)
{
    if (events & (POLLIN | POLLHUP | POLLERR))
        hear(visitor);
    else if (lc_deadline_passed(visitor->until))
        show_out(visitor);
}

void lc_pass_serve_fetch(struct lc_fetch *fetch, short events)
{
    if (fetch->over)
        return;
    if (fetch->conn.fd < 0)
        start_fetch(fetch);
    else if (events & (POLLIN | POLLHUP | POLLERR))
        take_fd(fetch);
    if (!fetch->over && lc_deadline_passed(fetch->until))
        end_fetch(fetch, -ETIMEDOUT);
}

void lc_pass_leave(struct lc_room *room)
{
    struct lc_fetch **at = &control.fetches;

    withdraw(room);
    while (*at) {
        if ((*at)->room == room)
            free_fetch(at);
        else
            at = &(*at)->next;
    }
}

/* The parent owns what they belong to; this process lets go of the descriptors. */
void lc_pass_forked(void)
{
    for (struct lc_visitor *v = control.visitors; v; v = v->next)
        close(v->conn.fd);
    for (struct lc_fetch *f = control.fetches; f; f = f->next) {
        if (f->conn.fd >= 0)
            close(f->conn.fd);
        if (f->fd >= 0)
            close(f->fd);
    }
    for (struct lc_room *r = control.offers; r; r = r->next_offer)
        close(r->offered_fd);
    if (control.pass_fd >= 0)
        close(control.pass_fd);
}
