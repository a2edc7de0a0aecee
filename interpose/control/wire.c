/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/control/wire.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define OUT_MAX ((size_t)16 << 20) /* bytes waiting for one peer */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian");
_Static_assert(sizeof(struct lc_frame) == 16 && sizeof(struct lc_hello) == 24,
               "no padding on the wire");
_Static_assert(sizeof(struct lc_record) == 16 + 16 + 64 + 16, "no padding on the wire");
_Static_assert(sizeof(struct lc_join) == 24 + sizeof(struct lc_record), "no padding on the wire");
_Static_assert(sizeof(struct lc_offer) == 32 && sizeof(struct lc_wanted) == 32,
               "no padding on the wire");
_Static_assert(sizeof(struct lc_complete) == 16 && sizeof(struct lc_ask) == 24 &&
                   sizeof(struct lc_cause) == 8,
               "no padding on the wire");
_Static_assert(sizeof(struct lc_state) == 40 && sizeof(struct lc_missing) == 32 &&
                   sizeof(struct lc_finding) == 40 + 3 * sizeof(struct lc_note),
               "no padding on the wire");

/* ---- frames ---- */

static const struct {
    uint32_t min, max;
} lengths[LC_FRAME_TYPES] = {
#define FIXED(type)                \
    {                              \
        sizeof(type), sizeof(type) \
    }
    [LC_FRAME_HELLO] = FIXED(struct lc_hello),
    [LC_FRAME_JOIN] = FIXED(struct lc_join),
    [LC_FRAME_VOTE] = FIXED(struct lc_number),
    [LC_FRAME_ASK] = FIXED(struct lc_ask),
    [LC_FRAME_POST] = {sizeof(struct lc_blob_head),  sizeof(struct lc_blob_head) + LC_BLOB_MAX},
    [LC_FRAME_ABORT] = FIXED(struct lc_cause),
    [LC_FRAME_BYE] = { 0,                           0                                        },
    [LC_FRAME_SEAT] = { 0,                           0                                        },
    [LC_FRAME_WORDS] = { 0,                           0                                        },
    [LC_FRAME_RECORD] = FIXED(struct lc_record),
    [LC_FRAME_COMPLETE] = FIXED(struct lc_complete),
    [LC_FRAME_REFUSED] = FIXED(struct lc_cause),
    [LC_FRAME_ANSWER] = FIXED(struct lc_number),
    [LC_FRAME_BLOB] = { sizeof(struct lc_blob_head), sizeof(struct lc_blob_head) + LC_BLOB_MAX},
    [LC_FRAME_NOTICE] = FIXED(struct lc_cause),
    [LC_FRAME_CLOSING] = { 0,                           0                                        },
    [LC_FRAME_STATE] = { sizeof(struct lc_state),
                       sizeof(struct lc_state) + LC_RECENT * sizeof(struct lc_note)           },
    [LC_FRAME_QUERY] = FIXED(struct lc_number),
    [LC_FRAME_WANTED] = FIXED(struct lc_wanted),
    [LC_FRAME_PASSED] = { 0,                           0                                        },
    [LC_FRAME_WITHHOLD] = { 0,                           0                                        },
    [LC_FRAME_WITHHELD] = FIXED(struct lc_cause),
    [LC_FRAME_FINDING] = { sizeof(struct lc_finding),
                       sizeof(struct lc_finding) + LC_MISSING_MAX * sizeof(struct lc_missing) },
#undef FIXED
};

int lc_frame_check(const struct lc_frame *head)
{
    if (head->magic != LC_WIRE_MAGIC || head->type >= LC_FRAME_TYPES || head->pad != 0 ||
        head->length < lengths[head->type].min || head->length > lengths[head->type].max)
        return -EPROTO;
    return 0;
}

/* ---- buffers: bytes [start, end) are in use ---- */

static int reserve(struct lc_buffer *buf, size_t more, size_t cap)
{
    size_t used = buf->end - buf->start;
    size_t want;
    unsigned char *data;

    if (used + more > cap)
        return -ENOBUFS;
    if (buf->end + more <= buf->room)
        return 0;
    if (buf->start) {
        memmove(buf->data, buf->data + buf->start, used);
        buf->start = 0;
        buf->end = used;
    }
    if (used + more <= buf->room)
        return 0;
    want = 2 * (used + more);
    data = realloc(buf->data, want);
    if (!data)
        return -ENOMEM;
    buf->data = data;
    buf->room = want;
    return 0;
}

static void append(struct lc_buffer *buf, const void *data, size_t length)
{
    if (length)
        memcpy(buf->data + buf->end, data, length);
    buf->end += length;
}

/* ---- connections ---- */

void lc_conn_tune(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP,  TCP_NODELAY,      1    },
        { SOL_SOCKET,  SO_KEEPALIVE,     1    },
        { IPPROTO_TCP, TCP_KEEPIDLE,     15   },
        { IPPROTO_TCP, TCP_KEEPINTVL,    5    },
        { IPPROTO_TCP, TCP_KEEPCNT,      3    },
        { IPPROTO_TCP, TCP_USER_TIMEOUT, 30000},
    };

    for (size_t i = 0; i < sizeof(options) / sizeof(*options); i++)
        (void)setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

void lc_conn_init(struct lc_conn *conn, int fd, bool is_unix)
{
    *conn = (struct lc_conn){ .fd = fd, .is_unix = is_unix, .passed_fd = -1 };
}

void lc_conn_close(struct lc_conn *conn)
{
    if (conn->fd >= 0)
        close(conn->fd);
    if (conn->passed_fd >= 0)
        close(conn->passed_fd);
    free(conn->in.data);
    free(conn->out.data);
    lc_conn_init(conn, -1, conn->is_unix);
}

int lc_conn_send(struct lc_conn *conn, enum lc_frame_type type, uint32_t room, const void *body,
                 size_t length, const void *more, size_t more_length)
{
    struct lc_frame head = { LC_WIRE_MAGIC, (uint16_t)type, 0, room,
                             (uint32_t)(length + more_length) };
    int err;

    if (conn->fd < 0)
        return -EPIPE;
    if (conn->deaf)
        return 0;
    err = lc_frame_check(&head);
    if (!err)
        err = reserve(&conn->out, sizeof(head) + length + more_length, OUT_MAX);
    if (err) {
        conn->broken = true;
        return err;
    }
    append(&conn->out, &head, sizeof(head));
    append(&conn->out, body, length);
    append(&conn->out, more, more_length);
    return 0;
}

/* A peer that is gone says so at once: its machine closes the connection. Silence is the network's. */
static int trouble(struct lc_conn *conn, int error)
{
    conn->reset |= error == ECONNRESET;
    switch (error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN: return -ETIMEDOUT;
    default: return -ECONNRESET;
    }
}

/* What the peer said before its end may not have been read yet. */
static int deafen(struct lc_conn *conn, int error)
{
    (void)trouble(conn, error);
    conn->deaf = true;
    conn->out.start = conn->out.end = 0;
    return 0;
}

int lc_conn_flush(struct lc_conn *conn)
{
    struct lc_buffer *out = &conn->out;

    if (conn->broken)
        return -ENOBUFS;
    while (conn->fd >= 0 && out->end != out->start) {
        ssize_t sent = send(conn->fd, out->data + out->start, out->end - out->start,
                            MSG_NOSIGNAL | MSG_DONTWAIT);

        if (sent >= 0)
            out->start += (size_t)sent;
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        else if (errno == EPIPE || errno == ECONNRESET)
            return deafen(conn, errno);
        else if (errno != EINTR)
            return trouble(conn, errno);
    }
    out->start = out->end = 0;
    return 0;
}

int lc_conn_send_fd(struct lc_conn *conn, enum lc_frame_type type, uint32_t room, int pass_fd)
{
    struct lc_frame head = { LC_WIRE_MAGIC, (uint16_t)type, 0, room, 0 };
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = { { 0 } };
    struct iovec iov = { &head, sizeof(head) };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);
    ssize_t sent;

    if (conn->fd < 0 || lc_conn_flush(conn) != 0)
        return -EPIPE;
    if (lc_conn_wants_write(conn))
        return -EAGAIN;
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(cmsg), &pass_fd, sizeof(int));
    do
        sent = sendmsg(conn->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    if (sent == (ssize_t)sizeof(head))
        return 0;
    return sent < 0 && errno == EAGAIN ? -EAGAIN : -EPIPE;
}

/* Keeps the last descriptor that came, closes any other. */
static void take_fds(struct lc_conn *conn, struct msghdr *msg)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        size_t count;

        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
            if (conn->passed_fd >= 0)
                close(conn->passed_fd);
            conn->passed_fd = fd;
        }
    }
}

int lc_conn_read(struct lc_conn *conn, size_t limit)
{
    union {
        char bytes[CMSG_SPACE(4 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct lc_buffer *in = &conn->in;
    size_t used = in->end - in->start;
    struct iovec iov;
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    ssize_t got;

    if (conn->fd < 0)
        return -ECONNRESET;
    if (used >= limit)
        return -EAGAIN; /* frames wait to be taken first */
    limit -= used;
    if (limit > 65536)
        limit = 65536;
    if (reserve(in, limit, SIZE_MAX) != 0)
        return -ECONNRESET;
    iov = (struct iovec){ in->data + in->end, limit };
    got = recvmsg(conn->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? -EAGAIN
                                                                         : trouble(conn, errno);
    if (conn->is_unix)
        take_fds(conn, &msg);
    if (got == 0)
        return -ECONNRESET;
    in->end += (size_t)got;
    return 0;
}

int lc_conn_next(struct lc_conn *conn, struct lc_frame *head, const unsigned char **body)
{
    struct lc_buffer *in = &conn->in;

    if (in->end - in->start < sizeof(*head))
        return 0;
    memcpy(head, in->data + in->start, sizeof(*head));
    if (lc_frame_check(head) != 0)
        return -EPROTO;
    if (in->end - in->start < sizeof(*head) + head->length)
        return 0;
    *body = in->data + in->start + sizeof(*head);
    in->start += sizeof(*head) + head->length;
    return 1;
}

/* ---- the ticket: bytes 64 to 127 of the id ---- */

#define TICKET_AT    64
#define TICKET_MAGIC "loongcm1"

struct ticket_bytes {
    char magic[8];
    struct lc_ticket ticket;
    uint64_t
        check; /* of everything before, so that another library's bytes are not taken for ours */
};
_Static_assert(sizeof(struct lc_ticket) == 40 &&
                   TICKET_AT + sizeof(struct ticket_bytes) <= LC_ID_BYTES,
               "fits the tail");

/* FNV-1a (Fowler, Noll, Vo); integrity against accidents, not against attackers. */
static uint64_t checksum(const void *data, size_t length)
{
    const unsigned char *p = data;
    uint64_t hash = 0xcbf29ce484222325u;

    while (length--)
        hash = (hash ^ *p++) * 0x100000001b3u;
    return hash;
}

void lc_ticket_write(char id[LC_ID_BYTES], const struct lc_ticket *ticket)
{
    struct ticket_bytes bytes = { .ticket = *ticket };

    memcpy(bytes.magic, TICKET_MAGIC, sizeof(bytes.magic));
    bytes.check = checksum(&bytes, offsetof(struct ticket_bytes, check));
    memcpy(id + TICKET_AT, &bytes, sizeof(bytes));
}

int lc_ticket_read(const char id[LC_ID_BYTES], struct lc_ticket *out)
{
    struct ticket_bytes bytes;

    memcpy(&bytes, id + TICKET_AT, sizeof(bytes));
    if (memcmp(bytes.magic, TICKET_MAGIC, sizeof(bytes.magic)) != 0 ||
        bytes.check != checksum(&bytes, offsetof(struct ticket_bytes, check)) ||
        (bytes.ticket.family != 4 && bytes.ticket.family != 6) || bytes.ticket.port == 0)
        return -ENOENT;
    *out = bytes.ticket;
    return 0;
}
