/* SPDX-License-Identifier: Apache-2.0
 *
 * What travels. A connection carries messages one way, over several sockets ("lanes"). The side that connects sends
 * HELLO first on every lane, the other answers REPLY; from then on frames, little-endian, go both ways:
 *     sender to receiver     PIECE (its payload behind it), DOWN, ASK, PARK, ERROR, BYE
 *     receiver to sender     CONTROL, PARK, ERROR, BYE
 * Messages are numbered from 0 in the order of isend and irecv. A message is cut into pieces; any lane may carry any
 * piece, and each lane counts its pieces over its whole life, through broken sockets. The receiver's CONTROL says how
 * many messages have come, how many receives are posted and how long they are, and how many pieces each lane has
 * brought: the sender sends a message only when its receive is posted, but for short ones a few ahead (LC_TCP_EARLY).
 * After LC_TCP_SHORT_RUN short ones in a row, which both sides count, a receiver says nothing of new receives by themselves
 * until the sender asks. A message that is marked as copied is confirmed with some others. On a broken lane the difference between its own count and the receiver's is exactly what it has to send again. */
#ifndef LC_PLUGIN_NET_TCP_WIRE_H
#define LC_PLUGIN_NET_TCP_WIRE_H

#include "plugin/net/transport.h"

#include <netinet/in.h>
#include <stdint.h>

#define LC_TCP_MAGIC   0x6c63746370317e0aull
#define LC_TCP_VERSION 7u
#define LC_TCP_TOKEN   16
#define LC_TCP_LANES   16 /* most of one connection */
#define LC_TCP_RAILS   4  /* most interfaces of one connection */
#define LC_TCP_WINDOW  64 /* most receives that are posted and not complete */
#define LC_TCP_EARLY \
    32 /* so many messages beyond the last confirmed one may come before their receives */
#define LC_TCP_EARLY_MAX 8192 /* if they are no longer than this, and in one piece */
#define LC_TCP_KEPT \
    8 /* so many messages beyond the last confirmed one has a sender copies of ... */
#define LC_TCP_KEPT_MAX \
    65536 /* ... if they are no longer than this, besides those that may come early */
#define LC_TCP_SHORT_RUN 4 /* such messages in a row, before a receiver waits to be asked */
#define LC_TCP_MAX_BYTES ((uint64_t)1 << 40)
#define LC_TCP_PIECE_MIN ((uint32_t)4096)
#define LC_TCP_PIECE_MAX ((uint32_t)16 << 20)
#define LC_TCP_TEXT      160

union lc_tcp_address {
    struct sockaddr sa;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* An address without a scope: that is a number of one machine. */
struct lc_tcp_wire_address {
    uint8_t family; /* 4 or 6; 0: none */
    uint8_t pad;
    uint16_t port; /* network order */
    uint8_t bytes[16];
};

struct lc_tcp_handle {
    uint64_t magic;
    uint32_t version;
    uint32_t pad;
    uint8_t token[LC_TCP_TOKEN];
    uint64_t ticket;                    /* 0; the connecting side's, between its calls */
    struct lc_tcp_wire_address address; /* of the device that NCCL has chosen */
    struct lc_tcp_wire_address more[LC_TCP_RAILS - 1]; /* of others in the same process */
    uint8_t reserved[8];
};

enum lc_tcp_kind {
    LC_TCP_LANE,
    LC_TCP_PROBE, /* from a receiver that has no socket left, to where its sender listens: is it still there? */
    LC_TCP_KINDS
};

/* The token comes first: whoever does not know it is heard no further. */
struct lc_tcp_hello {
    uint8_t token[LC_TCP_TOKEN];
    uint64_t magic;
    uint32_t version;
    uint16_t lane;
    uint16_t lanes;
    uint8_t id[LC_TCP_TOKEN]; /* of the connection, chosen by its sender */
    uint32_t epoch;           /* of the lane: grows with every attempt */
    uint32_t piece;           /* no piece is longer */
    uint8_t kind;
    uint8_t pad[3];
    struct lc_tcp_wire_address home; /* where the process that sends this listens, too */
};

enum lc_tcp_status {
    LC_TCP_WELCOME,
    LC_TCP_CLOSED, /* the receiver has closed the connection; `acked` is its last word */
    LC_TCP_STALE,  /* the lane has been told to end in this epoch: try the next */
    LC_TCP_FULL,   /* too few descriptors for this lane, or no room in a poll */
    LC_TCP_UNKNOWN,
    LC_TCP_FAILED, /* the connection is there, and in error */
    LC_TCP_STATUSES
};

struct lc_tcp_reply {
    uint64_t magic;
    uint32_t version;
    uint32_t status;
    uint32_t epoch;
    uint32_t pad;
    uint64_t count; /* pieces that the lane has brought */
    uint64_t acked;
};

enum lc_tcp_frame_type {
    LC_TCP_PIECE = 1, /* `arg` is 0: all of it follows, or some of LC_TCP_SPARSE, LC_TCP_COPIED */
    LC_TCP_DOWN,      /* `lane` is broken up to epoch `arg`: say how far it came */
    LC_TCP_CONTROL,   /* seq: acked; size: posted; `arg` lane words and size - seq sizes follow */
    LC_TCP_ERROR,     /* the other side has failed; `length` bytes of text follow */
    LC_TCP_ASK,       /* message `seq`, a long one, waits for its receive */
    /* Nothing was sent: may all sockets end? The receiver, if it waits for nothing and can call the sender back, answers by the
     * same, and the sender ends them. */
    LC_TCP_PARK,
    /* The other side closes; seq: acked, from a receiver; size: messages sent, from a sender. `arg` is 1: the sender is there
     * until all of them are confirmed. */
    LC_TCP_BYE,
    LC_TCP_FRAMES
};

struct lc_tcp_frame {
    uint32_t magic;
    uint8_t type;
    uint8_t lane;
    uint16_t pad;
    uint64_t number; /* of this piece on its lane, from 1 */
    uint64_t seq;
    uint64_t size; /* of the whole message */
    uint64_t offset;
    uint64_t length; /* of what follows */
    int32_t tag;
    uint32_t arg;
};

struct lc_tcp_lane_word {
    uint64_t count;
    uint32_t epoch;
    uint32_t open; /* 0: nothing more will be taken from this epoch */
};

#define LC_TCP_COPIED \
    2u /* a whole message of which the sender has a copy: it waits for no confirmation */
#define LC_TCP_SPARSE      1u /* a map follows (sparse.h) and those blocks that are not zero */
#define LC_TCP_FRAME_MAGIC 0x3154434cu
#define LC_TCP_CONTROL_MAX \
    (LC_TCP_LANES * sizeof(struct lc_tcp_lane_word) + LC_TCP_WINDOW * sizeof(uint64_t))

/* Pure checks of what a peer may have made up: 0 or -EPROTO. `to_receiver`: frames that a sender sends. */
int lc_tcp_frame_check(const struct lc_tcp_frame *frame, bool to_receiver);
int lc_tcp_hello_check(const struct lc_tcp_hello *hello);
int lc_tcp_reply_check(const struct lc_tcp_reply *reply);

/* -EPROTO: not a handle of ours. An older or newer wire version is named in the log. */
int lc_tcp_handle_read(const void *handle, struct lc_tcp_handle *out);

void lc_tcp_address_write(const union lc_tcp_address *address, struct lc_tcp_wire_address *out);

/* `scope`: the interface that a link-local address is meant on. -EPROTO: no address. */
int lc_tcp_address_read(const struct lc_tcp_wire_address *wire, uint32_t scope,
                        union lc_tcp_address *out);
socklen_t lc_tcp_address_size(const union lc_tcp_address *address);

#define LC_TCP_ADDRESS_TEXT 64
const char *lc_tcp_address_text(const union lc_tcp_address *address,
                                char text[LC_TCP_ADDRESS_TEXT]);

#endif
