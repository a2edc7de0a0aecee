/* SPDX-License-Identifier: Apache-2.0
 *
 * What travels beside the RDMA operations of a connection: fixed-size structs, little-endian. A TCP connection (the
 * "side socket", for the life of the connection) carries HELLO both ways and then frames; the receiver's clear-to-send
 * goes as an RDMA send; the sender's record of a group of messages as an RDMA write with immediate.
 *
 * Set-up and repair are the same exchange, numbered by epochs: each side makes new queue pairs and says so (PATHS), joins
 * those that both have, says READY, and moves data once it has heard READY. Whoever sees a queue pair fail starts the
 * next epoch. No queue pair of an earlier epoch exists any more when PATHS is sent, so what it says of the receives that
 * are open is final: the sender repeats those, and only those. */
#ifndef LC_PLUGIN_NET_VERBS_WIRE_H
#define LC_PLUGIN_NET_VERBS_WIRE_H

#include "plugin/net/tcp/wire.h"

#include <stdint.h>

#define LC_VERBS_MAGIC     0x6c63766572627301ull
#define LC_VERBS_VERSION   1u
#define LC_VERBS_TOKEN     16
#define LC_VERBS_PATHS     4 /* most of one connection, each with a queue pair */
#define LC_VERBS_GROUPS    32
#define LC_VERBS_RECVS     8 /* most buffers of one receive */
#define LC_VERBS_MAX_BYTES ((uint64_t)1 << 40)
#define LC_VERBS_TEXT      128

struct lc_verbs_handle {
    uint64_t magic;
    uint32_t version;
    uint32_t pad;
    uint8_t token[LC_VERBS_TOKEN];
    uint64_t ticket; /* 0; the connecting side's, between its calls */
    struct lc_tcp_wire_address address;
    uint8_t reserved[60];
    int64_t unreachable_ns; /* 0; the connecting side's: since when there has been no route */
};

/* The token comes first: whoever does not know it is heard no further. */
struct lc_verbs_hello {
    uint8_t token[LC_VERBS_TOKEN];
    uint64_t magic;
    uint32_t version;
    uint32_t n_ports;
    uint8_t reserved[32];
};

struct lc_verbs_path_info {
    uint64_t record; /* receiver: address of its array of records */
    uint32_t record_key;
    uint32_t qpn;
    uint32_t psn;
    uint16_t lid;
    uint8_t mtu;
    uint8_t ethernet;
    uint8_t gid[16];
};

enum lc_verbs_frame_type {
    LC_VERBS_FRAME_PATHS = 1,
    LC_VERBS_FRAME_READY,
    LC_VERBS_FRAME_ERROR, /* the sender of this has failed for good; `text` says why */
    LC_VERBS_FRAME_BYE,   /* the sender of this closes; a receiver says what is open */
    LC_VERBS_FRAME_TYPES
};

struct lc_verbs_frame {
    uint32_t magic;
    uint32_t epoch;
    uint8_t type;
    uint8_t usable; /* one bit for each path */
    uint16_t pad;
    uint32_t open;   /* receiver: groups that are not complete, one bit for each slot */
    uint64_t posted; /* receiver: the next group's number */
    char text[LC_VERBS_TEXT];
    struct lc_verbs_path_info paths[LC_VERBS_PATHS];
};

struct lc_verbs_buffer {
    uint64_t addr;
    uint64_t size;
    uint32_t keys[LC_VERBS_PATHS];
    int32_t tag;
    uint32_t pad;
};

/* Clear to send: one group of receives, numbered from 0. */
struct lc_verbs_cts {
    uint64_t seq;
    uint32_t n;
    uint32_t pad;
    struct lc_verbs_buffer buffers[LC_VERBS_RECVS];
};

/* What really came for a group. */
struct lc_verbs_record {
    uint64_t seq;
    uint64_t n;
    uint64_t sizes[LC_VERBS_RECVS];
};

#define LC_VERBS_FRAME_MAGIC 0x3153564cu

/* The immediate of a group's last write on each path: slot, paths used, and what fits of the group's number. */
#define LC_VERBS_IMM(seq, mask)                                    \
    ((uint32_t)((seq) % LC_VERBS_GROUPS) | (uint32_t)(mask) << 5 | \
     (uint32_t)((seq) / LC_VERBS_GROUPS) << 9)
#define LC_VERBS_IMM_SLOT(imm)  ((imm)&31u)
#define LC_VERBS_IMM_MASK(imm)  ((imm) >> 5 & 15u)
#define LC_VERBS_IMM_ROUND(imm) ((imm) >> 9)

/* Pure checks of what a peer may have made up: 0 or -EPROTO. `to_sender`: from a receiver. */
int lc_verbs_hello_check(const struct lc_verbs_hello *hello);
int lc_verbs_frame_check(const struct lc_verbs_frame *frame, int n_paths, bool to_sender);
int lc_verbs_cts_check(const struct lc_verbs_cts *cts, size_t bytes);
int lc_verbs_handle_read(const void *handle, struct lc_verbs_handle *out);

#endif
