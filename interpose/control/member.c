/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/control/control_internal.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define ERRNO_MAX 4095
#define NO_RANK   UINT32_MAX

/* Whoever waits for it may have said more by now. */
static void raise_echo(uint32_t *word)
{
    uint32_t none = 0;

    (void)__atomic_compare_exchange_n(word, &none, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void raise_abort(struct lc_room *room)
{
    uint32_t *echo;

    atomic_store(&room->abort_word, 1);
    echo = atomic_load(&room->echo);
    if (echo)
        raise_echo(echo);
}

static void set_error(struct lc_room *room, uint32_t rank, int err)
{
    if (atomic_load(&room->error))
        return;
    atomic_store(&room->error, (uint64_t)rank << 32 | (uint32_t)-err);
    atomic_store(&room->abort_word, 1);
    room->cut = true;
    room->cut_at = lc_deadline_in_ms(LC_CUT_MS);
}

/* ---- the connection to an arbiter ---- */

/* The arbiter's name may have been taken by a stranger: only a process of the same user is believed. */
static int connect_unix(const struct lc_ticket *ticket)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct ucred peer = { .uid = (uid_t)-1 };
    socklen_t length = sizeof(peer);
    char name[64];
    int err = 0;

    if (fd < 0)
        return -errno;
    lc_unix_name(ticket, name);
    memcpy(addr.sun_path + 1, name, strlen(name));
    if (connect(fd, (struct sockaddr *)&addr,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name))) != 0)
        err = -errno;
    else if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != geteuid())
        err = -ECONNREFUSED;
    if (err) {
        close(fd);
        return err;
    }
    return fd;
}

static int connect_tcp(const struct lc_ticket *ticket)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(ticket->port) };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6,
                               .sin6_port = htons(ticket->port),
                               .sin6_scope_id = ticket->scope };
    bool is_v4 = ticket->family == 4;
    int fd = socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int err;

    if (fd < 0)
        return -errno;
    memcpy(&v4.sin_addr, ticket->address, sizeof(v4.sin_addr));
    memcpy(&v6.sin6_addr, ticket->address, sizeof(v6.sin6_addr));
    lc_conn_tune(fd);
    if (connect(fd, is_v4 ? (struct sockaddr *)&v4 : (struct sockaddr *)&v6,
                is_v4 ? sizeof(v4) : sizeof(v6)) != 0 &&
        errno != EINPROGRESS) {
        err = -errno;
        close(fd);
        return err;
    }
    return fd;
}

static void say_hello(struct link *link)
{
    struct lc_hello hello = { .version = LC_WIRE_VERSION, .pid = (uint32_t)getpid() };

    memcpy(hello.token, link->ticket.token, sizeof(hello.token));
    (void)lc_conn_send(&link->conn, LC_FRAME_HELLO, 0, &hello, sizeof(hello), NULL, 0);
}

static int open_link(const struct lc_ticket *ticket, struct link **out)
{
    struct link *link = calloc(1, sizeof(*link));
    bool is_unix = true;
    int fd;

    if (!link)
        return -ENOMEM;
    fd = control.tcp_only ? -ENOTSUP : connect_unix(ticket);
    if (fd < 0) {
        is_unix = false;
        fd = connect_tcp(ticket);
    }
    if (fd < 0) {
        free(link);
        return fd;
    }
    lc_conn_init(&link->conn, fd, is_unix);
    link->ticket = *ticket;
    link->connected = is_unix;
    link->connect_until = lc_deadline_in_ms(LC_CONNECT_MS);
    say_hello(link);
    link->next = control.links;
    control.links = link;
    *out = link;
    return 0;
}

static int find_link(const struct lc_ticket *ticket, struct link **out)
{
    for (struct link *l = control.links; l; l = l->next) {
        if (!l->closing && !l->probing && l->ticket.port == ticket->port &&
            l->ticket.family == ticket->family && l->ticket.scope == ticket->scope &&
            memcmp(l->ticket.address, ticket->address, sizeof(ticket->address)) == 0) {
            *out = l;
            return 0;
        }
    }
    return open_link(ticket, out);
}

bool lc_member_idle(const struct link *link)
{
    return !link->rooms && !lc_conn_wants_write(&link->conn);
}

/* Nobody of the room ends with the process that hosts it: what has been agreed stays in force. Before it is complete
 * nothing has been. */
static bool outlives_arbiter(const struct lc_room *room)
{
    return atomic_load(&room->state) == COMPLETE && !room->has_arbiter;
}

static bool has_agreed(const struct lc_room *room)
{
    return atomic_load(&room->voted) || atomic_load(&room->voted_pair);
}

/* Warns once a link. */
static void say_unwatched(const struct link *link, int reason)
{
    const struct lc_room *room = link->rooms;

    if (reason == -ETIMEDOUT) {
        lc_say(
            LC_LOG_WARN,
            "the process that hosts the agreement can no longer be reached; what has been agreed stays in force");
        return;
    }
    while (room && !(outlives_arbiter(room) && has_agreed(room)))
        room = room->next;
    if (room && !link->closing && reason == -EPIPE)
        lc_say(
            LC_LOG_WARN,
            "the process that hosts the agreement has ended; communicators that it has no rank of go on without watching their ranks");
}

void lc_member_drop(struct link *link, int reason)
{
    struct link **at = &control.links;

    say_unwatched(link, reason);

    while (*at != link)
        at = &(*at)->next;
    *at = link->next;
    for (struct lc_room *room = link->rooms, *next; room; room = next) {
        next = room->next;
        room->link = NULL;
        room->next = control.orphans;
        control.orphans = room;
        if (atomic_load(&room->state) == JOINING)
            atomic_store(&room->state, NEVER);
        if (!link->closing && reason != -ETIMEDOUT && !(reason == -EPIPE && outlives_arbiter(room)))
            set_error(room, NO_RANK, reason == -EPROTO ? reason : -EPIPE);
    }
    lc_conn_close(&link->conn);
    free(link);
    pthread_cond_broadcast(&control.answered);
}

/* ---- what the arbiter says ---- */

/* Without memory for it the room is never complete here. */
static int take_record(struct lc_room *room, const unsigned char *body)
{
    struct lc_record *record = malloc(sizeof(*record));

    if (!record) {
        atomic_store(&room->state, NEVER);
        return 0;
    }
    memcpy(record, body, sizeof(*record));
    if (record->rank >= room->nranks || room->records[record->rank] ||
        record->host[sizeof(record->host) - 1] != '\0' || atomic_load(&room->state) == COMPLETE) {
        free(record);
        return -EPROTO;
    }
    room->records[record->rank] = record;
    return 0;
}

/* Without the words the arbiter is asked, which is slower and just as right. A descriptor comes with the last bytes of a
 * read, so the one that is there belongs to this frame, also if the room is gone (NULL). */
static int take_words(struct link *link, struct lc_room *room)
{
    int fd = link->conn.passed_fd;
    int err = 0;

    link->conn.passed_fd = -1;
    if (fd >= 0 && room && !room->words)
        err = lc_words_map(fd, room->nranks, &room->words);
    if (err)
        lc_say(LC_LOG_DEBUG, "the shared words cannot be mapped (%s); the arbiter will be asked",
               strerror(-err));
    if (fd >= 0)
        close(fd);
    return 0;
}

static int take_blob(struct lc_room *room, const struct lc_frame *head, const unsigned char *body)
{
    size_t size = head->length - sizeof(struct lc_blob_head);
    struct lc_blob_head said;
    struct blob *blob;

    memcpy(&said, body, sizeof(said));
    if (said.rank >= room->nranks)
        return -EPROTO;
    blob = malloc(sizeof(*blob) + size);
    room->lost_blob |= !blob;
    if (!blob)
        return 0;
    *blob = (struct blob){ room->blobs, said.rank, said.key, size };
    memcpy(blob->data, body + sizeof(said), size);
    room->blobs = blob;
    return 0;
}

static void take_refusal(struct lc_room *room, const struct lc_cause *cause)
{
    room->watch.foreign |= cause->reason == -EPROTONOSUPPORT;
    if (atomic_exchange(&room->state, NEVER) == NEVER)
        return;
    if (cause->reason == -EEXIST) {
        lc_say(LC_LOG_INFO,
               "rank %u of %u is there already: calls of this communicator stay with NCCL",
               cause->rank, room->nranks);
        return;
    }
    if (cause->reason == -ENOMEM) {
        lc_say(LC_LOG_INFO,
               "the process that hosts the agreement has no room for rank %u of %u: calls of this "
               "communicator stay with NCCL",
               cause->rank, room->nranks);
        return;
    }
    lc_say(
        LC_LOG_INFO,
        "rank %u has %s than others of its communicator of %u ranks: all of its calls stay with NCCL",
        cause->rank,
        cause->reason == -EINVAL ? "other LOONGCOMM_ settings" : "another version of loongcomm",
        room->nranks);
}

static void take_notice(struct lc_room *room, const struct lc_cause *cause)
{
    if (cause->reason != -ETIMEDOUT)
        set_error(room, cause->rank, cause->reason);
    else if (cause->rank != room->mine.rank)
        lc_say(
            LC_LOG_WARN,
            "rank %u can no longer be reached out of band; communication goes on without watching it",
            cause->rank);
}

/* Of a seat that was given up, too. */
static int take_withheld(struct lc_room *room, const struct lc_cause *cause)
{
    if (cause->rank >= room->nranks || cause->reason != 0)
        return -EPROTO;
    atomic_store(&room->withheld[cause->rank], true);
    atomic_store(&room->never, true);
    return 0;
}

static void take_complete(struct lc_room *room, const unsigned char *body)
{
    struct lc_complete complete;

    memcpy(&complete, body, sizeof(complete));
    if (atomic_load(&room->state) != JOINING)
        return;
    room->capabilities = complete.capabilities;
    room->has_arbiter = complete.has_arbiter != 0;
    atomic_store(&room->state, COMPLETE);
}

static struct lc_room *find_room(struct link *link, uint32_t id)
{
    for (struct lc_room *r = link->rooms; r; r = r->next) {
        if (r->id == id)
            return r;
    }
    return NULL;
}

static int handle(struct link *link, const struct lc_frame *head, const unsigned char *body)
{
    struct lc_room *room = find_room(link, head->room);
    struct lc_number number = { 0 };
    struct lc_cause cause = { 0 };

    if (head->type == LC_FRAME_CLOSING)
        link->closing = true;
    if (head->type == LC_FRAME_WORDS)
        return take_words(link, room);
    if (!room) /* released a moment ago */
        return 0;
    if (head->length == sizeof(number)) {
        memcpy(&number, body, sizeof(number));
        memcpy(&cause, body, sizeof(cause));
    }
    switch (head->type) {
    case LC_FRAME_CLOSING: return 0;
    case LC_FRAME_SEAT: return 0;
    case LC_FRAME_RECORD: return take_record(room, body);
    case LC_FRAME_BLOB: return take_blob(room, head, body);
    case LC_FRAME_REFUSED: take_refusal(room, &cause); return 0;
    case LC_FRAME_QUERY: lc_hang_asked(room, (uint32_t)number.value); return 0;
    case LC_FRAME_FINDING: return lc_hang_found(room, head, body);
    case LC_FRAME_NOTICE:
        if (cause.reason >= 0 || cause.reason < -ERRNO_MAX)
            return -EPROTO;
        take_notice(room, &cause);
        return 0;
    case LC_FRAME_COMPLETE: take_complete(room, body); return 0;
    case LC_FRAME_WITHHELD: return take_withheld(room, &cause);
    case LC_FRAME_ANSWER:
        room->answer = number.value;
        room->answered = true;
        pthread_cond_broadcast(&control.answered);
        return 0;
    default: return -EPROTO;
    }
}

static int finish_connect(struct link *link)
{
    socklen_t length = sizeof(int);
    int err = 0;

    if (getsockopt(link->conn.fd, SOL_SOCKET, SO_ERROR, &err, &length) != 0)
        err = errno;
    link->connected = err == 0;
    return -err;
}

static int serve(struct link *link)
{
    const unsigned char *body;
    struct lc_frame head;
    int err = lc_conn_read(&link->conn, 4 * LC_BLOB_MAX);

    if (err)
        return err == -EAGAIN ? 0 : err;
    while ((err = lc_conn_next(&link->conn, &head, &body)) > 0) {
        err = handle(link, &head, body);
        if (err)
            return err;
    }
    return err;
}

static void tell_abort(struct lc_room *room)
{
    struct lc_cause cause = { room->mine.rank, atomic_exchange(&room->abort_wanted, 0) };

    if (!cause.reason || room->abort_told)
        return;
    room->abort_told = true;
    (void)lc_conn_send(&room->link->conn, LC_FRAME_ABORT, room->id, &cause, sizeof(cause), NULL, 0);
    pthread_cond_broadcast(&control.answered); /* a question of another thread gets no answer now */
}

static void send_wanted_aborts(struct link *link)
{
    for (struct lc_room *r = link->rooms; r; r = r->next) {
        tell_abort(r);
    }
}

/* ---- the connection is lost: has the process ended, or is it this link alone that it knows no more? ---- */

static bool is_left_open(const struct link *link)
{
    for (const struct lc_room *r = link->rooms; r; r = r->next) {
        if (has_agreed(r) && (link->reset || outlives_arbiter(r)))
            return true;
    }
    return false;
}

/* `err`: of another connection, 0 if it was answered. A process that is there and has ended this one has told the others
 * that we are gone. It has not where it found the network in the way, which shows as a reset when that leads to it again. */
static void judge(struct link *link, int err)
{
    if (err == -ECONNREFUSED)
        lc_member_drop(link, -EPIPE);
    else
        lc_member_drop(link, err == 0 && link->reset ? -ETIMEDOUT : -ECONNABORTED);
}

/* A process that ends may take long to, and be connected to meanwhile: only an answer tells that it is there. So the
 * token is said again, and a seat asked for that is taken. */
static void probe(struct link *link)
{
    const struct lc_room *room = link->rooms;
    bool is_unix = link->conn.is_unix;
    int fd = ++link->probes > LC_PROBES ? -ETIMEDOUT
             : is_unix                  ? connect_unix(&link->ticket)
                                        : connect_tcp(&link->ticket);
    struct lc_join said;

    lc_conn_close(&link->conn);
    if (fd < 0 || !room) {
        if (fd >= 0)
            close(fd);
        judge(link, fd < 0 ? fd : -ETIMEDOUT);
        return;
    }
    lc_conn_init(&link->conn, fd, is_unix);
    link->probing = true;
    link->connected = is_unix;
    say_hello(link);
    said = (struct lc_join){ .nranks = room->nranks, .record = room->mine };
    memcpy(said.key, room->key, LC_KEY_BYTES);
    (void)lc_conn_send(&link->conn, LC_FRAME_JOIN, 0, &said, sizeof(said), NULL, 0);
}

static void serve_probe(struct link *link, short events)
{
    int err = 0;

    if (!link->connected && (events & (POLLOUT | POLLERR | POLLHUP))) {
        err = finish_connect(link);
        if (err && err != -ECONNRESET) {
            judge(link, err);
            return;
        }
    }
    if (!err && link->connected)
        err = lc_conn_flush(&link->conn);
    if (!err && link->connected && (events & (POLLIN | POLLHUP | POLLERR))) {
        err = lc_conn_read(&link->conn, LC_BLOB_MAX);
        if (!err) {
            judge(link, 0);
            return;
        }
    }
    if (err && err != -EAGAIN)
        probe(link);
}

static void lose(struct link *link, int err)
{
    if (err != -ECONNRESET) {
        lc_member_drop(link, err);
        return;
    }
    link->reset = link->conn.reset && !link->conn.is_unix;
    if (link->closing || !is_left_open(link)) {
        lc_member_drop(link, -EPIPE);
        return;
    }
    for (struct lc_room *r = link->rooms; r && !link->reset; r = r->next) {
        if (!outlives_arbiter(r))
            set_error(r, NO_RANK, -EPIPE);
    }
    link->connect_until = lc_deadline_in_ms(LC_CONNECT_MS);
    probe(link);
}

void lc_member_serve(struct link *link, short events)
{
    int err = 0;

    if (link->probing) {
        serve_probe(link, events);
        return;
    }
    if (!link->connected && (events & (POLLOUT | POLLERR | POLLHUP)))
        err = finish_connect(link);
    if (!err && link->connected && (events & (POLLIN | POLLHUP | POLLERR)))
        err = serve(link);
    send_wanted_aborts(link);
    if (!err && link->connected)
        err = lc_conn_flush(&link->conn);
    if (!err && lc_member_idle(link))
        err = -ECONNRESET; /* nobody needs it any more */
    if (err)
        lose(link, err);
}

/* The device's words may be unmapped when the program has come to its end. */
static void cut_late(struct lc_room *rooms)
{
    for (struct lc_room *r = rooms; r; r = r->next) {
        if (!r->cut || !lc_deadline_passed(r->cut_at))
            continue;
        r->cut = false;
        if (!atomic_load(&control.ended))
            raise_abort(r);
    }
}

static int least_patience_ms(const struct lc_room *rooms, int ms)
{
    for (const struct lc_room *r = rooms; r; r = r->next) {
        int left = r->cut ? (int)lc_deadline_left_ms(r->cut_at) + 1 : ms;

        ms = left < ms ? left : ms;
    }
    return ms;
}

int lc_member_patience_ms(void)
{
    int ms = least_patience_ms(control.orphans, 1000);

    for (struct link *l = control.links; l; l = l->next)
        ms = least_patience_ms(l->rooms, ms);
    return ms;
}

void lc_member_expire(void)
{
    for (struct link *l = control.links; l; l = l->next)
        cut_late(l->rooms);
    cut_late(control.orphans);
    for (struct link *l = control.links, *next; l; l = next) {
        next = l->next;
        if ((l->connected && !l->probing) || !lc_deadline_passed(l->connect_until))
            continue;
        if (l->probing)
            judge(l, -ETIMEDOUT);
        else
            lc_member_drop(l, -EPIPE);
    }
}

static void say_bye(struct lc_room *room)
{
    tell_abort(room);
    if (!room->abort_told) {
        lc_hang_last_words(room);
        (void)lc_conn_send(&room->link->conn, LC_FRAME_BYE, room->id, NULL, 0, NULL, 0);
    }
    room->abort_told = true; /* whatever comes after the goodbyes of an exit */
}

void lc_member_goodbye(void)
{
    for (struct link *l = control.links; l; l = l->next) {
        for (struct lc_room *r = l->rooms; r; r = r->next)
            say_bye(r);
    }
}

/* The parent owns them; this process only lets go of the descriptors, so that the parent's death is seen. */
void lc_member_forked(void)
{
    for (struct link *l = control.links; l; l = l->next) {
        if (l->conn.fd >= 0)
            close(l->conn.fd);
    }
    control.links = NULL;
}

/* ---- rooms ---- */

static void free_parts(struct lc_room *room)
{
    for (uint32_t r = 0; room->records && r < room->nranks; r++)
        free(room->records[r]);
    free(room->records);
    free(room->withheld);
    for (struct blob *b = room->blobs, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    free(room);
}

static int join(struct link *link, const unsigned char key[LC_KEY_BYTES], uint32_t nranks,
                const struct lc_record *mine, struct lc_room **out)
{
    struct lc_join said = { .nranks = nranks, .record = *mine };
    struct lc_room *room = calloc(1, sizeof(*room));
    int err;

    if (!room)
        return -ENOMEM;
    room->records = calloc(nranks, sizeof(struct lc_record *));
    room->withheld = calloc(nranks, sizeof(*room->withheld));
    if (!room->records || !room->withheld) {
        free_parts(room);
        return -ENOMEM;
    }
    room->pid = getpid();
    room->offered_fd = -1;
    room->nranks = nranks;
    room->mine = *mine;
    room->id = link->next_id++;
    memcpy(room->key, key, LC_KEY_BYTES);
    memcpy(said.key, key, LC_KEY_BYTES);
    said.record.host[sizeof(said.record.host) - 1] = '\0';
    err = lc_conn_send(&link->conn, LC_FRAME_JOIN, room->id, &said, sizeof(said), NULL, 0);
    if (err) {
        free_parts(room);
        return err;
    }
    room->link = link;
    room->next = link->rooms;
    link->rooms = room;
    lc_control_wake();
    *out = room;
    return 0;
}

static bool sane(uint32_t nranks, const struct lc_record *mine)
{
    return nranks > 0 && nranks <= LC_RANKS_MAX && mine->rank < nranks;
}

int lc_room_join(const char id[LC_ID_BYTES], uint32_t nranks, const struct lc_record *mine,
                 struct lc_room **out)
{
    struct lc_ticket ticket;
    struct link *link;
    int err = lc_ticket_read(id, &ticket);

    if (err)
        return err;
    if (!sane(nranks, mine))
        return -EINVAL;
    pthread_mutex_lock(&control.lock);
    err = lc_control_start();
    if (!err)
        err = find_link(&ticket, &link);
    if (!err)
        err = join(link, ticket.token, nranks, mine, out);
    pthread_mutex_unlock(&control.lock);
    return err;
}

/* 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014). Keys of children need to differ, not to be secret: only
 * members that said a token may use them. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Never the key itself, which is the token of a room that was made from an id. */
uint64_t lc_room_id(const struct lc_room *room)
{
    uint64_t half[2];

    memcpy(half, room->key, sizeof(half));
    return mix(half[0] ^ mix(half[1] ^ 0x6c6f6f6e67636f6du));
}

static void child_key(const unsigned char parent[LC_KEY_BYTES], uint64_t creation, uint32_t colour,
                      unsigned char out[LC_KEY_BYTES])
{
    uint64_t half[2];

    memcpy(half, parent, sizeof(half));
    for (int i = 0; i < 2; i++) {
        half[i] = mix(half[i] + 0x9e3779b97f4a7c15u * (uint64_t)(i + 1));
        half[i] = mix(half[i] ^ creation);
        half[i] = mix(half[i] + colour);
    }
    memcpy(out, half, sizeof(half));
}

int lc_room_join_child(struct lc_room *parent, uint64_t creation, uint32_t colour, uint32_t nranks,
                       const struct lc_record *mine, struct lc_room **out)
{
    unsigned char key[LC_KEY_BYTES];
    int err = -EPIPE;

    if (!sane(nranks, mine))
        return -EINVAL;
    child_key(parent->key, creation, colour, key);
    pthread_mutex_lock(&control.lock);
    if (parent->pid != getpid())
        err = -ECHILD;
    else if (parent->link)
        err = join(parent->link, key, nranks, mine, out);
    pthread_mutex_unlock(&control.lock);
    return err;
}

bool lc_room_complete(struct lc_room *room)
{
    return atomic_load_explicit(&room->state, memory_order_acquire) == COMPLETE;
}

const struct lc_record *lc_room_record(struct lc_room *room, uint32_t rank)
{
    return lc_room_complete(room) && rank < room->nranks ? room->records[rank] : NULL;
}

uint64_t lc_room_capabilities(struct lc_room *room)
{
    return lc_room_complete(room) ? room->capabilities : 0;
}

int lc_room_vote(struct lc_room *room, uint64_t from)
{
    struct lc_number number = { from };
    uint64_t broken;
    int err;

    if (!lc_room_complete(room) || !lc_is_epoch(from) || room->pid != getpid())
        return -EINVAL;
    pthread_mutex_lock(&control.lock);
    broken = atomic_load(&room->error);
    if (broken)
        err = -(int)(uint32_t)broken;
    else if (room->abort_told || atomic_load(&room->abort_word))
        err = -ECANCELED;
    else if (atomic_load(&room->voted))
        err = -EALREADY;
    else if (room->words)
        err = lc_words_vote(room->words, room->mine.rank, from);
    else if (!room->link)
        err = -EPIPE;
    else
        err = lc_conn_send(&room->link->conn, LC_FRAME_VOTE, room->id, &number, sizeof(number),
                           NULL, 0);
    if (!err) {
        atomic_store(&room->voted, from);
        lc_control_wake();
    }
    pthread_mutex_unlock(&control.lock);
    return err;
}

/* The arbiter writes the word, too, where it is mapped. */
void lc_room_withhold(struct lc_room *room)
{
    if (!lc_room_complete(room) || room->pid != getpid())
        return;
    pthread_mutex_lock(&control.lock);
    if (room->link && !room->abort_told)
        (void)lc_conn_send(&room->link->conn, LC_FRAME_WITHHOLD, room->id, NULL, 0, NULL, 0);
    lc_control_wake();
    pthread_mutex_unlock(&control.lock);
}

/* With the lock held. One question of a room at a time: its calls are serialised. */
static int ask(struct lc_room *room, const struct lc_ask *question, enum lc_verdict *out)
{
    struct lc_deadline until = lc_deadline_in_ms(LC_ASK_MS);
    struct timespec ts = { until.at_ns / 1000000000, until.at_ns % 1000000000 };
    int err;

    if (!room->link)
        return -EPIPE;
    if (room->abort_told)
        return -ECANCELED;
    room->answered = false;
    err = lc_conn_send(&room->link->conn, LC_FRAME_ASK, room->id, question, sizeof(*question), NULL,
                       0);
    if (err)
        return err;
    lc_control_wake();
    while (!room->answered && room->link && !room->abort_told && err == 0)
        err = pthread_cond_timedwait(&control.answered, &control.lock, &ts);
    if (!room->answered)
        return room->abort_told ? -ECANCELED : room->link ? -ETIMEDOUT : -EPIPE;
    *out = room->answer == LC_VERDICT_COMMIT ? LC_VERDICT_COMMIT : LC_VERDICT_SKIP;
    return 0;
}

static int decide_by_arbiter(struct lc_room *room, const struct lc_ask *question,
                             enum lc_verdict *out)
{
    int err;

    pthread_mutex_lock(&control.lock);
    err = ask(room, question, out);
    if (err)
        set_error(room, NO_RANK, err);
    pthread_mutex_unlock(&control.lock);
    return err;
}

int lc_room_decide(struct lc_room *room, uint64_t index, enum lc_verdict *out)
{
    struct lc_ask question = { .index = index };
    uint64_t voted = atomic_load(&room->voted);

    if (!voted || voted > index || !lc_is_epoch(index) || room->pid != getpid())
        return -EINVAL;
    if (room->words) {
        *out = lc_words_decide(room->words, index);
        return 0;
    }
    *out = LC_VERDICT_SKIP;
    return atomic_load(&room->never) ? 0 : decide_by_arbiter(room, &question, out);
}

bool lc_room_can_change(const struct lc_room *room)
{
    return room->words != NULL;
}

int lc_room_vote_change(struct lc_room *room, uint32_t change, uint64_t from)
{
    if (!atomic_load(&room->voted) || room->pid != getpid())
        return -EINVAL;
    if (!room->words)
        return -ENOTSUP;
    if (atomic_load(&room->abort_word))
        return -ECANCELED;
    return lc_words_vote_change(room->words, room->mine.rank, change, from);
}

enum lc_verdict lc_room_decide_change(struct lc_room *room, uint32_t change, uint64_t index)
{
    return lc_words_decide_change(room->words, change, index);
}

int lc_room_decide_pair(struct lc_room *room, uint32_t src, uint32_t dst, uint64_t index,
                        enum lc_verdict *out)
{
    bool by_src = src == room->mine.rank;
    struct lc_ask question = { 1, by_src, src, dst, index };

    if (!lc_room_complete(room) || !lc_is_epoch(index) || src >= room->nranks ||
        dst >= room->nranks || (room->mine.rank != src && room->mine.rank != dst) || src == dst ||
        room->pid != getpid())
        return -EINVAL;
    atomic_store(&room->voted_pair, true);
    if (!room->words) {
        *out = LC_VERDICT_SKIP;
        return atomic_load(&room->withheld[src]) || atomic_load(&room->withheld[dst])
                   ? 0
                   : decide_by_arbiter(room, &question, out);
    }
    *out = lc_words_decide_pair(room->words, src, dst, by_src, index);
    return 0;
}

int lc_member_post(struct lc_room *room, uint32_t key, const void *data, size_t size)
{
    struct lc_blob_head head = { room->mine.rank, key };
    int err = -EPIPE;

    if (room->link && !room->abort_told)
        err = lc_conn_send(&room->link->conn, LC_FRAME_POST, room->id, &head, sizeof(head), data,
                           size);
    if (!err)
        lc_control_wake();
    return err;
}

int lc_room_post(struct lc_room *room, uint32_t key, const void *data, size_t size)
{
    int err;

    if (size > LC_BLOB_MAX || !lc_room_complete(room) || room->pid != getpid())
        return -EINVAL;
    pthread_mutex_lock(&control.lock);
    err = lc_member_post(room, key, data, size);
    pthread_mutex_unlock(&control.lock);
    return err;
}

int lc_member_look(struct lc_room *room, uint32_t rank, uint32_t key, void *data, size_t max,
                   size_t *size)
{
    int err = room->lost_blob ? -ENOMEM : -EAGAIN;

    for (struct blob *b = room->blobs; b; b = b->next) {
        if (b->rank != rank || b->key != key)
            continue;
        err = b->size <= max ? 0 : -ENOSPC;
        if (!err) {
            memcpy(data, b->data, b->size);
            *size = b->size;
        }
        break;
    }
    return err;
}

int lc_room_look(struct lc_room *room, uint32_t rank, uint32_t key, void *data, size_t max,
                 size_t *size)
{
    int err;

    pthread_mutex_lock(&control.lock);
    err = lc_member_look(room, rank, key, data, max, size);
    pthread_mutex_unlock(&control.lock);
    return err;
}

void lc_room_echo_abort(struct lc_room *room, uint32_t *word)
{
    pthread_mutex_lock(&control.lock); /* the control thread may be about to write */
    atomic_store(&room->echo, word);
    if (word && atomic_load(&room->abort_word) && !room->cut)
        raise_echo(word);
    pthread_mutex_unlock(&control.lock);
}

void lc_room_abort(struct lc_room *room, int reason)
{
    atomic_store(&room->abort_wanted, reason ? reason : 1);
    raise_abort(room);
    lc_control_wake();
}

int lc_room_error(struct lc_room *room, uint32_t *rank)
{
    uint64_t error = atomic_load(&room->error);

    if (!error || (!atomic_load(&room->voted) && !atomic_load(&room->voted_pair)))
        return 0;
    if (rank)
        *rank = (uint32_t)(error >> 32);
    return -(int)(uint32_t)error;
}

const uint32_t *lc_room_abort_word(struct lc_room *room)
{
    _Static_assert(sizeof(room->abort_word) == sizeof(uint32_t), "kernels poll it as a plain word");
    return (const uint32_t *)&room->abort_word;
}

static void leave(struct lc_room *room)
{
    struct lc_room **at = room->link ? &room->link->rooms : &control.orphans;

    while (*at != room)
        at = &(*at)->next;
    *at = room->next;
    lc_pass_leave(room);
    if (!room->link)
        return;
    say_bye(room);
    lc_control_wake();
}

void lc_room_release(struct lc_room *room)
{
    if (!room)
        return;
    if (room->pid == getpid()) {
        pthread_mutex_lock(&control.lock);
        leave(room);
        pthread_mutex_unlock(&control.lock);
    }
    lc_words_unmap(room->words);
    free_parts(room);
}
