/* SPDX-License-Identifier: Apache-2.0
 *
 * Frames of the control plane and the non-blocking connection that carries them. Everything received is hostile
 * until checked: a frame with a wrong magic, type or length ends the connection.
 */
#ifndef LC_INTERPOSE_CONTROL_WIRE_H
#define LC_INTERPOSE_CONTROL_WIRE_H

#include "interpose/control/control.h"
#include "interpose/control/progress.h"

#define LC_WIRE_MAGIC   0x3150434cu /* "LCP1" */
#define LC_WIRE_VERSION 1u
#define LC_BLOB_MAX     ((size_t)65536)
#define LC_KEY_BYTES    16

enum lc_frame_type {
    LC_FRAME_HELLO,  /* first of a client: token; nothing else is read before it is checked */
    LC_FRAME_JOIN,   /* seat taken: key, nranks, record */
    LC_FRAME_VOTE,   /* from */
    LC_FRAME_ASK,    /* pair or collective, index */
    LC_FRAME_POST,   /* key, blob */
    LC_FRAME_ABORT,  /* reason */
    LC_FRAME_BYE,    /* seat given back in order */
    LC_FRAME_SEAT,   /* arbiter: JOIN accepted */
    LC_FRAME_WORDS,  /* arbiter: the same, and the descriptor of the words comes with these bytes */
    LC_FRAME_RECORD, /* arbiter: record of a member on the receiver's host */
    LC_FRAME_COMPLETE, /* arbiter: all records are in and agree */
    LC_FRAME_REFUSED,  /* arbiter: will never be complete; rank, why */
    LC_FRAME_ANSWER,   /* arbiter: to ASK, in order */
    LC_FRAME_BLOB,     /* arbiter: a member's POST, for members on its host */
    LC_FRAME_NOTICE,   /* arbiter: the room is broken; rank, reason (-errno) */
    LC_FRAME_CLOSING,  /* arbiter: its process ends in order */
    LC_FRAME_STATE, /* how far the rank is: it has stood still too long, or was asked, or leaves */
    LC_FRAME_QUERY, /* arbiter: round; answered by STATE */
    LC_FRAME_FINDING,  /* arbiter: who has not arrived, as far as the answers tell */
    LC_FRAME_WANTED,   /* member to member: secret of an offer; the first and last that it asks */
    LC_FRAME_PASSED,   /* the answer: the descriptor comes with these bytes */
    LC_FRAME_WITHHOLD, /* this rank will never vote */
    LC_FRAME_WITHHELD, /* arbiter: the same of a rank */
    LC_FRAME_TYPES,
};

/* All fields little-endian; only little-endian machines are built for (checked in wire.c). */
struct lc_frame {
    uint32_t magic;
    uint16_t type;
    uint16_t pad;
    uint32_t room;   /* chosen by the member, unique on its connection */
    uint32_t length; /* of the body */
};

struct lc_hello {
    uint32_t version;
    uint32_t pid;
    unsigned char token[LC_KEY_BYTES];
};

struct lc_join {
    unsigned char key[LC_KEY_BYTES];
    uint32_t nranks;
    uint32_t pad;
    struct lc_record record;
};

struct lc_ask {
    uint32_t is_pair;
    uint32_t by_src;
    uint32_t src, dst;
    uint64_t index;
};

/* VOTE: from. ANSWER: verdict. */
struct lc_number {
    uint64_t value;
};

/* COMPLETE. */
struct lc_complete {
    uint64_t capabilities;
    uint32_t has_arbiter; /* a rank of the room is of the arbiter's process, and ends with it */
    uint32_t pad;
};

/* REFUSED, NOTICE, ABORT: rank and -errno or reason. WITHHELD: rank and 0. */
struct lc_cause {
    uint32_t rank;
    int32_t reason;
};

/* POST, BLOB: this, then the bytes. */
struct lc_blob_head {
    uint32_t rank;
    uint32_t key;
};

/* STATE: this, then its notes. */
struct lc_state {
    uint32_t round; /* of the QUERY that it answers, or one of the two below */
    uint32_t n;
    uint64_t collectives, messages, returned;
    uint64_t age_ms; /* since the last call */
};
#define LC_ROUND_STALLED 0u         /* nobody asked: nothing has moved for the time-out */
#define LC_ROUND_LAST    UINT32_MAX /* nobody asked: the seat is about to be given back */

/* Blob of a rank that offers a descriptor: where to ask for it, and how. */
struct lc_offer {
    unsigned char name[LC_KEY_BYTES];
    unsigned char secret[LC_KEY_BYTES];
};

/* WANTED: the offer's secret, the room and the rank that offers. */
struct lc_wanted {
    unsigned char secret[LC_KEY_BYTES];
    uint64_t id;
    uint32_t rank;
    uint32_t pad;
};

struct lc_buffer {
    unsigned char *data;
    size_t start, end, room;
};

/* A non-blocking stream socket. Used by the control thread only. */
struct lc_conn {
    int fd; /* -1: closed */
    bool is_unix;
    bool broken; /* something could not be queued: to be dropped by its owner's next flush */
    bool
        deaf; /* the other end takes no more: what it said before is still to be read, up to its end */
    bool reset; /* the other end does not know of it any more; an end in order says so first */
    struct lc_buffer in, out;
    int passed_fd; /* received with SCM_RIGHTS and not taken yet, or -1 */
};

void lc_conn_init(struct lc_conn *conn, int fd, bool is_unix);
void lc_conn_close(struct lc_conn *conn);

/* For TCP: no delay, and a peer's machine that vanishes is noticed within half a minute. */
void lc_conn_tune(int fd);

/* Queues a frame; it is sent by lc_conn_flush. More than `cap` bytes waiting: -ENOBUFS, the peer is too slow.
 * pass_fd: -1, or a descriptor that goes with the frame (Unix only, not taken over). It is sent at once or not at
 * all: a queue that is not empty is flushed first and -EAGAIN returned if that is not possible. */
int lc_conn_send(struct lc_conn *conn, enum lc_frame_type type, uint32_t room, const void *body,
                 size_t length, const void *more, size_t more_length);
int lc_conn_send_fd(struct lc_conn *conn, enum lc_frame_type type, uint32_t room, int pass_fd);

/* Sends what the socket takes. 0, -ENOBUFS (see above), or what has befallen the network (as of lc_conn_read). That the
 * peer is gone is not said here but by lc_conn_read, behind all that the peer had to say; frames for it are lost. */
int lc_conn_flush(struct lc_conn *conn);
static inline bool lc_conn_wants_write(const struct lc_conn *conn)
{
    return conn->out.end != conn->out.start;
}

/* Reads what is there, at most `limit` bytes in the buffer at once. 0, -EAGAIN (nothing new), -ECONNRESET (the
 * peer is gone), -ETIMEDOUT (the network no longer leads to it). */
int lc_conn_read(struct lc_conn *conn, size_t limit);

/* The next whole frame in the buffer: 1 and its head and body (valid until the next read), 0: incomplete (the head
 * is given if it is there already), -EPROTO: not a frame of the protocol. */
int lc_conn_next(struct lc_conn *conn, struct lc_frame *head, const unsigned char **body);

/* 0 if a frame of this type may have a body of this length. Pure; fuzzed. */
int lc_frame_check(const struct lc_frame *head);

/* The ticket in the tail of a unique id. */
struct lc_ticket {
    unsigned char address[16]; /* IPv4 in the first four */
    uint32_t scope;            /* IPv6 scope id */
    uint16_t port;             /* host order */
    uint16_t family;           /* 4 or 6 */
    unsigned char token[LC_KEY_BYTES];
};

void lc_ticket_write(char id[LC_ID_BYTES], const struct lc_ticket *ticket);
int lc_ticket_read(const char id[LC_ID_BYTES],
                   struct lc_ticket *out); /* -ENOENT: none, or damaged */

#endif
