/* SPDX-License-Identifier: Apache-2.0
 *
 * One way of a connection: a queue pair on one port and its completion queue, made anew in each epoch. */
#ifndef LC_PLUGIN_NET_VERBS_PATH_H
#define LC_PLUGIN_NET_VERBS_PATH_H

#include "plugin/net/verbs/device.h"
#include "plugin/net/verbs/wire.h"

#define LC_VERBS_SQ   256
#define LC_VERBS_RQ   (2 * LC_VERBS_GROUPS)
#define LC_VERBS_IMMS 8 /* work requests kept free for the ends of groups */

/* Ids of completions; smaller ones number clear-to-send buffers. */
#define LC_VERBS_END_ID  1000 /* of a receive without memory */
#define LC_VERBS_SEND_ID 1001

enum lc_verbs_work {
    LC_VERBS_WRITE,
    LC_VERBS_CTS,
    LC_VERBS_PROBE /* writes nothing: whether there is an answer is the question */
};

/* What a work request on the send queue was: they complete in order. */
struct lc_verbs_note {
    uint64_t seq; /* of its group */
    uint32_t bytes;
    enum lc_verbs_work work;
};

/* Guarded by the connection's lock. */
struct lc_verbs_path {
    struct lc_verbs_port *port;
    struct ibv_cq *cq; /* NULL: no queue pair now */
    struct ibv_qp *qp;
    struct lc_verbs_sight sight;
    uint32_t psn;
    uint32_t inline_max;
    uint64_t bytes; /* given to it and not acknowledged */
    unsigned sq_used, sq_max, note_first;
    unsigned recvs; /* posted and not complete */
    struct lc_verbs_note notes[LC_VERBS_SQ];
    int failures;     /* in a row; each doubles the pause */
    int64_t pause_ns; /* not used before this time if there is another way */
    struct ibv_cq *flush_cq;
    struct ibv_qp *flush_qp; /* to itself */
};

/* A new queue pair in the state "init". 0 or -errno. */
int lc_verbs_path_open(struct lc_verbs_path *path);
void lc_verbs_path_close(struct lc_verbs_path *path);
void lc_verbs_path_halt(
    struct lc_verbs_path *path); /* nothing arrives any more; what did can still be polled */
void lc_verbs_path_info(const struct lc_verbs_path *path, struct lc_verbs_path_info *out);

/* Ready to receive and to send. May take a second where the peer's hardware address has to be asked for. */
int lc_verbs_path_join(struct lc_verbs_path *path, const struct lc_verbs_path_info *peer,
                       int traffic_class);

/* Joined with itself; for flushes. */
int lc_verbs_path_open_flush(struct lc_verbs_path *path);
void lc_verbs_path_close_flush(struct lc_verbs_path *path);

static inline unsigned lc_verbs_path_room(const struct lc_verbs_path *path)
{
    return path->qp ? path->sq_max - path->sq_used : 0;
}

/* Always signalled. The caller has seen that there is room. */
int lc_verbs_path_post(struct lc_verbs_path *path, struct ibv_send_wr *wr,
                       struct lc_verbs_note note);
int lc_verbs_path_post_recv(struct lc_verbs_path *path, uint64_t id, void *data, uint32_t bytes,
                            uint32_t key);

#endif
