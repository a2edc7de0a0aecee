/* SPDX-License-Identifier: Apache-2.0
 *
 * Whatever comes to the control plane: the first byte chooses who hears the rest.
 *   0: the arbiter, from two members that said the token
 *   1: the arbiter, from a stranger
 *   2: a member, from its arbiter
 *   3: a ticket in the tail of an id
 *   4: a member that offers a descriptor, from two visitors, one of whom knows the secret
 *   5: a member that fetches a descriptor, from whoever answers
 * Frames are made from the input so that the fuzzer need not learn magic and lengths: type, room, then the body; every
 * tenth or so is passed as it is. No thread runs: the harness makes the turns. */
#include "interpose/control/control_internal.h"
#include "tests/fuzz/input.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const unsigned char token[LC_KEY_BYTES] = "a token of 16 b";

/* The lengths that lc_frame_check knows, found by asking it. */
static uint32_t least_length(uint16_t type)
{
    struct lc_frame head = { .magic = LC_WIRE_MAGIC, .type = type };

    while (head.length < 512 && lc_frame_check(&head) != 0)
        head.length++;
    return head.length;
}

static void write_some(int fd, const void *data, size_t size)
{
    ssize_t ignored = send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);

    (void)ignored;
}

/* One frame of the input to a socket. `sane` keys and ranks let most of them mean something. */
static void write_frame(struct input *in, int fd, uint8_t choice)
{
    static unsigned char body[2048];
    struct lc_frame head = { .magic = LC_WIRE_MAGIC };
    uint32_t extra;

    head.type = choice % (LC_FRAME_TYPES + 1);
    head.room = take_byte(in) % 4;
    extra = take_byte(in);
    head.length = least_length(head.type);
    if (extra >= 128)
        head.length += (extra - 128) % (head.type == LC_FRAME_STATE ? LC_RECENT + 1 : 40) *
                       (head.type == LC_FRAME_STATE ? sizeof(struct lc_note) : 8);
    take(in, body, head.length);
    if (head.type == LC_FRAME_JOIN && extra & 1) {
        struct lc_join *join = (struct lc_join *)body;

        memcpy(join->key, token, sizeof(join->key));
        join->nranks = join->nranks % 4 + 1;
        join->record.rank %= 4;
        join->record.version = 1;
        join->record.settings_hash = 0;
        memset(join->record.host, 0, sizeof(join->record.host));
    }
    if (head.type == LC_FRAME_STATE && extra & 1)
        ((struct lc_state *)body)->n = (head.length - sizeof(struct lc_state)) /
                                       sizeof(struct lc_note);
    write_some(fd, &head, sizeof(head));
    write_some(fd, body, head.length);
}

static void drain(int fd)
{
    char sink[4096];

    while (recv(fd, sink, sizeof(sink), MSG_DONTWAIT) > 0)
        continue;
}

static void pair_up(int fds[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0)
        abort();
}

static void turn(void)
{
    for (struct client *c = control.clients, *next; c; c = next) {
        next = c->next;
        lc_arbiter_serve(c, POLLIN);
    }
    for (struct link *l = control.links, *next; l; l = next) {
        next = l->next;
        lc_member_serve(l, POLLIN);
    }
    lc_finding_expire();
    lc_hang_look();
}

static void say_token(int fd)
{
    struct lc_frame head = { LC_WIRE_MAGIC, LC_FRAME_HELLO, 0, 0, sizeof(struct lc_hello) };
    struct lc_hello hello = { .version = LC_WIRE_VERSION };

    memcpy(hello.token, token, sizeof(token));
    write_some(fd, &head, sizeof(head));
    write_some(fd, &hello, sizeof(hello));
}

static void hear_members(struct input *in, bool known)
{
    int fds[2][2];

    if (!control.hosted && lc_arbiter_open_root(token) != 0)
        return;
    for (int i = 0; i < 2; i++) {
        pair_up(fds[i]);
        lc_arbiter_accept(fds[i][0], i == 0);
        if (known)
            say_token(fds[i][1]);
    }
    turn();
    while (in->size) {
        uint8_t choice = take_byte(in);
        int to = fds[choice >> 7][1];

        if ((choice & 0x78) == 0x78) {
            uint8_t raw[64];
            size_t n = take_byte(in) % sizeof(raw);

            take(in, raw, n);
            write_some(to, raw, n);
        } else {
            write_frame(in, to, choice & 0x1f);
        }
        turn();
        drain(fds[0][1]);
        drain(fds[1][1]);
    }
    close(fds[0][1]);
    close(fds[1][1]);
    while (control.clients)
        turn();
}

static void hear_arbiter(struct input *in)
{
    static struct lc_progress progress;
    struct lc_ticket ticket = { .port = 9, .family = 4 };
    struct lc_record mine = { .version = 1, .rank = 1 };
    struct link *link = calloc(1, sizeof(*link));
    struct lc_room *room = NULL;
    char id[LC_ID_BYTES] = "";
    int fds[2];

    if (!link)
        return;
    pair_up(fds);
    lc_ticket_write(id, &ticket);
    lc_conn_init(&link->conn, fds[0], true);
    link->ticket = ticket;
    link->connected = true;
    control.links = link;
    if (lc_room_join(id, 4, &mine, &room) == 0)
        lc_room_watch(room, &progress);
    while (in->size) {
        write_frame(in, fds[1], take_byte(in) & 0x1f);
        turn();
        drain(fds[1]);
    }
    if (room) {
        char blob[64];
        size_t size;
        uint32_t who;

        (void)lc_room_look(room, 0, 0, blob, sizeof(blob), &size);
        (void)lc_room_record(room, 2);
        (void)lc_room_error(room, &who);
        lc_room_release(room);
    }
    close(fds[1]);
    while (control.links)
        turn();
    while (control.hangs) {
        struct lc_hang *next = control.hangs->next;

        free(control.hangs);
        control.hangs = next;
    }
    control.n_hangs = 0;
}

static void drop_lines(void)
{
    while (control.lines) {
        struct lc_line *next = control.lines->next;

        free(control.lines);
        control.lines = next;
    }
}

/* A room that is complete, without an arbiter behind it. */
static struct lc_room *lone_room(struct link *link)
{
    struct lc_ticket ticket = { .port = 9, .family = 4 };
    struct lc_record mine = { .version = 1, .rank = 1 };
    struct lc_room *room = NULL;
    char id[LC_ID_BYTES] = "";

    lc_ticket_write(id, &ticket);
    lc_conn_init(&link->conn, open("/dev/null", O_RDWR | O_CLOEXEC), true);
    link->ticket = ticket;
    link->connected = true;
    control.links = link;
    if (lc_room_join(id, 4, &mine, &room) != 0)
        abort();
    atomic_store(&room->state, COMPLETE);
    return room;
}

static void drop_lone_room(struct lc_room *room)
{
    lc_room_release(room);
    lc_member_drop(control.links, -EPIPE);
}

static void serve_passing(void)
{
    for (struct lc_visitor *v = control.visitors, *next; v; v = next) {
        next = v->next;
        lc_pass_serve_visitor(v, POLLIN);
    }
    for (struct lc_fetch *f = control.fetches; f; f = f->next)
        lc_pass_serve_fetch(f, POLLIN);
}

static void hear_visitors(struct input *in)
{
    struct link *link = calloc(1, sizeof(*link));
    struct lc_room *room = link ? lone_room(link) : NULL;
    int fds[2][2];

    if (!room)
        return;
    if (lc_room_offer_fd(room, open("/dev/null", O_RDONLY | O_CLOEXEC)) != 0)
        abort();
    for (int i = 0; i < 2; i++) {
        pair_up(fds[i]);
        lc_pass_accept(fds[i][0]);
    }
    while (in->size && control.visitors) {
        uint8_t choice = take_byte(in);
        struct lc_wanted wanted = { .id = lc_room_id(room), .rank = 1 };
        struct lc_frame head = { LC_WIRE_MAGIC, LC_FRAME_WANTED, 0, 0, sizeof(wanted) };

        memcpy(wanted.secret, room->secret, sizeof(wanted.secret));
        if ((choice & 0x7f) == 0x7f) {
            write_some(fds[1][1], &head, sizeof(head));
            write_some(fds[1][1], &wanted, sizeof(wanted));
        } else {
            write_frame(in, fds[choice >> 7][1], choice & 0x1f);
        }
        serve_passing();
    }
    for (int i = 0; i < 2; i++)
        close(fds[i][1]);
    while (control.visitors)
        serve_passing();
    drop_lone_room(room);
}

/* With or without a descriptor beside the bytes. */
static void answer_fetch(struct input *in, int fd)
{
    uint8_t choice = take_byte(in);
    struct lc_conn conn;

    if (choice & 0x80) {
        lc_conn_init(&conn, fd, true);
        (void)lc_conn_send_fd(&conn, choice & 0x1f, 0, STDERR_FILENO);
    } else {
        write_frame(in, fd, choice & 0x1f);
    }
}

static void hear_answers(struct input *in)
{
    struct link *link = calloc(1, sizeof(*link));
    struct lc_room *room = link ? lone_room(link) : NULL;
    struct blob *blob = calloc(1, sizeof(*blob) + sizeof(struct lc_offer));
    int fds[2], got = -1;

    if (!room || !blob)
        abort();
    *blob = (struct blob){ .rank = 2,
                           .key = UINT32_MAX,
                           .size = take_byte(in) % 48 ? sizeof(struct lc_offer) : 3 };
    room->blobs = blob;
    (void)lc_room_fetch_fd(room, 2, &got);
    pair_up(fds);
    if (control.fetches)
        lc_conn_init(&control.fetches->conn, fds[0], true);
    else
        close(fds[0]);
    while (in->size && control.fetches) {
        answer_fetch(in, fds[1]);
        serve_passing();
        if (take_byte(in) & 1 && lc_room_fetch_fd(room, 2, &got) == 0)
            close(got);
        if (control.fetches && control.fetches->conn.fd < 0)
            break; /* it would connect to a name that nobody has */
    }
    close(fds[1]);
    drop_lone_room(room);
}

static void ignore_hang(const struct lc_hang *hang)
{
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = { data, size };
    struct lc_ticket ticket;
    char id[LC_ID_BYTES];

    control.running = true; /* no thread is started: this one does its work */
    control.max_clients = 8;
    lc_control_watch(1, ignore_hang);
    switch (take_byte(&in) % 6) {
    case 0: hear_members(&in, true); break;
    case 1: hear_members(&in, false); break;
    case 2: hear_arbiter(&in); break;
    case 4: hear_visitors(&in); break;
    case 5: hear_answers(&in); break;
    default:
        take(&in, id, sizeof(id));
        if (lc_ticket_read(id, &ticket) == 0)
            lc_ticket_write(id, &ticket);
        memcpy(id + 64, "loongcm1", 8);
        (void)lc_ticket_read(id, &ticket);
        break;
    }
    drop_lines();
    return 0;
}
