/* SPDX-License-Identifier: Apache-2.0
 *
 * A connection over verbs. The calls of NCCL's progress thread move its data (data.c); the transport's own thread
 * (service.c) reads its side socket and makes and repairs its queue pairs (comm.c), so that a peer's repair does not
 * wait for NCCL to call, and no call waits for the network. */
#ifndef LC_PLUGIN_NET_VERBS_COMM_H
#define LC_PLUGIN_NET_VERBS_COMM_H

#include "plugin/net/verbs/path.h"
#include "plugin/net/verbs/region.h"
#include "plugin/net/verbs/wire.h"

#include <pthread.h>

#define LC_VERBS_SENDS     (LC_VERBS_GROUPS * LC_VERBS_RECVS)
#define LC_VERBS_REQUESTS  (LC_VERBS_SENDS + 8)
#define LC_VERBS_CTS_BUFS  64 /* twice what can be on its way */
#define LC_VERBS_OUT_BYTES (8 * sizeof(struct lc_verbs_frame))

enum lc_verbs_kind {
    LC_VERBS_FREE,
    LC_VERBS_SEND,
    LC_VERBS_RECV,
    LC_VERBS_FLUSH
};

struct lc_net_request {
    struct lc_net_comm *comm;
    enum lc_verbs_kind kind;
    bool done;
    int n; /* of sizes */
    size_t sizes[LC_VERBS_RECVS];
    /* a send: */
    uintptr_t data;
    size_t posted; /* bytes of it that were given to a queue pair */
    /* a send or a flush, until it is done or can never be: */
    struct lc_net_mr *mr;
    /* a flush: */
    uint64_t flush_addr;
    unsigned flush_left; /* paths whose read is not over, one bit each */
    unsigned flush_posted;
};

/* A group of receives as its sender sees it. */
struct lc_verbs_outgoing {
    bool known;  /* the receiver has cleared it to send, and it is not complete */
    bool posted; /* all of it was given to queue pairs */
    uint64_t seq;
    int n;
    int matched;
    unsigned used;    /* paths that carry something of it */
    unsigned imm;     /* paths whose last write was posted */
    unsigned unacked; /* work requests */
    struct lc_verbs_buffer buffers[LC_VERBS_RECVS];
    struct lc_net_request *sends[LC_VERBS_RECVS];
};

struct lc_verbs_incoming {
    bool open;
    bool cts_wanted; /* clear-to-send has to be (re-)sent */
    bool cts_busy;   /* its buffer is still being sent */
    uint64_t seq;
    int n;
    unsigned arrived; /* paths whose last write has come */
    struct lc_net_request *request;
    struct lc_net_mr *mrs[LC_VERBS_RECVS]; /* while it is open */
    struct lc_verbs_cts cts;               /* as it is sent, so registered memory holds a copy */
};

enum lc_verbs_state {
    LC_VERBS_HELLO, /* the side socket is being connected, or HELLO has not come */
    LC_VERBS_PATHS_WAIT, /* queue pairs are made; the peer's PATHS of this epoch has not come, or none is usable */
    LC_VERBS_READY_WAIT, /* queue pairs are joined; the peer's READY has not come */
    LC_VERBS_RUN,
    LC_VERBS_FAILED,
};

/* The part of a connection that RDMA devices read and write. */
struct lc_verbs_shared {
    struct lc_verbs_record
        records[LC_VERBS_GROUPS]; /* receiver: written by the peer; sender: what it writes */
    struct lc_verbs_cts
        cts[LC_VERBS_CTS_BUFS]; /* sender: written by the peer; receiver: what it sends */
    uint64_t flushed[LC_VERBS_PATHS];
};

/* Everything here is guarded by `lock`, but for what is constant after creation. NCCL's calls only try to take it: while
 * the service thread has it there is nothing that they could do. */
struct lc_net_comm {
    pthread_mutex_t lock;
    bool sender;                 /* constant */
    struct lc_verbs_device *dev; /* constant */
    uint64_t ticket;             /* constant; the connecting side's name for it in the handle */
    uint64_t id;                 /* constant; 0: not in the service's care */
    struct lc_net_comm *next;    /* the service's list, guarded by its lock, as are: */
    int refs;                    /* as long as there are any, it is in the list */
    bool closed;                 /* the owner's reference is given back */
    bool offered;                /* connecting, and to be found by its ticket */
    int64_t offer_ends_ns;

    char peer[LC_TCP_ADDRESS_TEXT];
    uint8_t token[LC_VERBS_TOKEN];
    int traffic_class;

    /* the side socket */
    int fd;
    bool connecting;
    bool gone;      /* it has ended: the peer has closed it, or it broke */
    int gone_error; /* of the latter, 0: closed */
    int64_t gone_ns;
    size_t in_bytes, out_bytes;
    union {
        struct lc_verbs_hello hello;
        struct lc_verbs_frame frame;
        char bytes[sizeof(struct lc_verbs_frame)];
    } in;
    char out[LC_VERBS_OUT_BYTES];

    enum lc_verbs_state state;
    int error; /* sticky once it is not 0 */
    char why[2 * LC_VERBS_TEXT];
    int64_t deadline_ns; /* while it is neither running nor failed */
    int64_t timeout_ns;  /* constant */
    int64_t look_ns;     /* when to look at the ports again */
    int64_t probe_ns;    /* when to ask for the peer's device again, if somebody waits then */
    int barren;          /* repairs since something got through, or nobody waited for it */
    int64_t barren_ns;   /* when the first of them began */

    uint32_t epoch;
    bool restart;      /* a queue pair has failed: start the next epoch */
    bool theirs_known; /* `theirs` is of this epoch */
    bool peer_ready;   /* has said READY in this epoch */
    int n_paths;
    unsigned mine;   /* paths usable here, as said in this epoch */
    unsigned common; /* paths in use */
    struct lc_verbs_frame theirs;
    struct lc_verbs_path paths[LC_VERBS_PATHS];

    struct lc_verbs_shared *shared;
    struct lc_net_mr *shared_mr;
    struct lc_net_request requests[LC_VERBS_REQUESTS];

    /* sender */
    bool asked;           /* isend has been called since the last look at the ports */
    uint64_t match_seq;   /* the next group that isend fills */
    uint64_t post_seq;    /* the oldest group that is not wholly posted */
    uint64_t cts_seq;     /* the next group that the peer will clear */
    int cts_first, cts_n; /* clear-to-sends that came and wait for their slot, in order */
    uint16_t cts_queue[LC_VERBS_CTS_BUFS];
    struct lc_verbs_outgoing outgoing[LC_VERBS_GROUPS];

    /* receiver */
    uint64_t recv_seq;
    int cts_todo; /* groups with cts_wanted */
    int flushes;  /* requests */
    struct lc_verbs_incoming incoming[LC_VERBS_GROUPS];
};

/* comm.c: called with the lock held unless said otherwise. */
struct lc_net_comm *lc_verbs_comm_new(struct lc_verbs_device *dev, bool sender, int fd,
                                      int64_t timeout_ns); /* no lock yet */
void lc_verbs_comm_free(struct lc_net_comm *comm);         /* no lock any more */
void lc_verbs_comm_hello(struct lc_net_comm *comm);        /* queues HELLO */
bool lc_verbs_no_route(int error); /* of connecting: as it is while a link or a route comes back */
int lc_verbs_comm_greeted(struct lc_net_comm *comm, const struct lc_verbs_hello *hello);
void lc_verbs_comm_readable(struct lc_net_comm *comm);
void lc_verbs_comm_writable(struct lc_net_comm *comm);
/* What time brings; returns the milliseconds until it wants to be called again. */
int lc_verbs_comm_tick(struct lc_net_comm *comm, int64_t now_ns);
void lc_verbs_comm_stop(struct lc_net_comm *comm); /* says BYE; no buffer is touched after it */
/* Stops it if an open request of it uses the registration. */
void lc_verbs_comm_release(struct lc_net_comm *comm, const struct lc_net_mr *mr);

/* Of a queue pair; the service thread then repairs. */
void lc_verbs_comm_path_failed(struct lc_net_comm *comm, int path, const char *cause);

/* Makes the connection fail for good, here and at the peer. `err` < 0. */
__attribute__((format(printf, 3, 4))) void lc_verbs_comm_fail(struct lc_net_comm *comm, int err,
                                                              const char *fmt, ...);

/* data.c */
void lc_verbs_data_drain(
    struct lc_net_comm *comm); /* of what has come; nothing comes any more after it */
void lc_verbs_data_stop(
    struct lc_net_comm *comm); /* its queue pairs are no more: forget what was under way */
uint32_t lc_verbs_data_open(
    const struct lc_net_comm *comm); /* receiver: slots of groups that are not complete */
void lc_verbs_data_resume(struct lc_net_comm *comm, uint64_t posted, uint32_t open, bool run);
int lc_verbs_data_prepare(struct lc_net_comm *comm,
                          int path); /* posts receives on a new queue pair */
void lc_verbs_data_move(struct lc_net_comm *comm);
/* Has the peer's device acknowledge something on every path that nothing is under way on. Where it is not there any more the
 * path fails. */
void lc_verbs_data_probe(struct lc_net_comm *comm);
bool lc_verbs_data_waits(const struct lc_net_comm *comm); /* a request is open */
bool lc_verbs_data_uses(const struct lc_net_comm *comm,
                        const struct lc_net_mr *mr); /* an open request does */
void lc_verbs_data_abandon(
    struct lc_net_comm *comm); /* its queue pairs are no more, and there will be no others */

/* service.c: the thread, and the connections that it looks after. */
void lc_verbs_service_kick(void); /* a connection wants its tick now; its lock may be held */
void lc_verbs_service_watch(struct lc_net_comm *comm,
                            bool writable); /* of its side socket; the lock is held */
void lc_verbs_service_unwatch(struct lc_net_comm *comm);

#endif
