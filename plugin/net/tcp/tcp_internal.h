/* SPDX-License-Identifier: Apache-2.0
 *
 * One process has one engine: a service thread that makes connections (listens, hears strangers, dials, watches
 * deadlines) and a pool that moves bytes, for all connections together.
 *
 * Lane 0 of a connection is moved by NCCL's own thread, in isend, irecv and test: a short message wakes nobody; where nobody
 * calls and something is owed, by the service thread. The other lanes, and the pool with them, are there from the first long
 * message on. Each lane that has nothing to do takes the next piece, so a slow one takes fewer.
 *
 * Locks, in the order in which they may be taken:
 *     engine.life    starts and stops the threads
 *     lane->io       the socket of a lane and what is half read or half written on it; movers only try it
 *     engine.lock    the lists of connections and listens
 *     conn->lock     everything else of a connection
 *     mover->lock    which sockets a thread of the pool has, and which of them it was asked to look at
 * engine.lock and conn->lock are held for a few instructions, never over a system call that moves data. */
#ifndef LC_PLUGIN_NET_TCP_INTERNAL_H
#define LC_PLUGIN_NET_TCP_INTERNAL_H

#include "plugin/net/tcp/device.h"
#include "plugin/net/tcp/sparse.h"
#include "plugin/net/tcp/wire.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/uio.h>

#define RING         64    /* pieces of one lane that are sent and not confirmed */
#define BATCH        8     /* frames of one sendmsg */
#define IOVS         112   /* a header and a payload each, or the runs of a sparse piece */
#define IN_BYTES     10240 /* holds any frame without its payload, and short messages whole */
#define CAUSE        200
#define DEVICES_TEXT ((size_t)LC_TCP_RAILS * (IF_NAMESIZE + 2))
#define POOL_MOST    64                  /* threads */
#define POOL_LANE    ((uint64_t)1 << 63) /* in the data of a lane's events; no pointer has it */

struct piece {
    uint64_t seq;
    uint64_t offset;
    uint64_t length;
};

/* A message in flight; NCCL holds a pointer to it. All under conn->lock. */
struct lc_net_request {
    struct conn *conn;
    unsigned char *data;
    uint64_t seq;
    uint64_t size;   /* of the caller's buffer; a send's whole length */
    uint64_t length; /* receive: what the sender says, once known is set */
    uint64_t moved;  /* send: bytes cut into pieces; receive: bytes that have come */
    int tag;
    const struct lc_net_mr *mr; /* of the caller's buffer, NULL: it said none */
    bool used;                  /* from isend or irecv until test has said done */
    bool known;
    bool complete;
    bool gone;  /* send: one of which there is a copy, and the kernel has taken all of it */
    bool alone; /* send: nothing was sent over other connections for a while */
    bool
        lone; /* ... and the caller had no other under way on this one, which is short enough to copy */
    bool copied; /* receive: the sender has a copy */
    /* Send: lane 0 leaves it to its siblings, if it has any. Written by the caller's thread alone, which reads it without the
     * lock, too. */
    bool handed;
    int looks; /* of that thread, which alone uses it, since then */
    /* Set, with conn->lock held, behind what may end it; test reads it without: while it is not set there is nothing to
     * look at. */
    atomic_bool ripe;
};

/* Receiver: a message that came before its receive was posted. Sender: a copy of a short message, until it is confirmed;
 * only the bytes are used. */
struct early {
    bool full;
    uint64_t seq;
    uint64_t length;
    unsigned char bytes[LC_TCP_EARLY_MAX];
};

struct lane {
    struct conn *conn;
    int index;
    pthread_mutex_t io;
    atomic_bool
        again; /* set before trying io: whoever holds it moves once more; cleared by who is about to */
    /* Set by the pool, before `again`: the socket's end is there, behind what is still to be read. Taken by whoever looks,
     * with io held, and set again by it if it has not come so far. */
    atomic_bool hung;
    atomic_bool
        wrote; /* set behind each write, by whoever holds io; rail_watch takes it back before it looks */
    /* Sender: the oldest message that the sendmsg under way reads, UINT64_MAX: none is under way. Stored by whoever holds
     * io, around the call; whoever sees it change knows that the reading is over. */
    atomic_uint_least64_t reading;

    /* under io */
    int fd;
    int mover; /* of fd, -1: none; with `seat` written before the lane is up, and no more while it is */
    uint32_t seat;
    size_t in_start;
    size_t in_end;
    struct lc_tcp_frame rx; /* of the piece whose payload is being read */
    unsigned char *dst;     /* where the rest of it goes */
    size_t dst_left;
    bool in_piece;
    bool in_early; /* it goes to conn->early */
    bool out_cut;  /* a part of the batch has gone: the rest must follow */
    /* Something may have to be read or written though its caller calls no more: as conn_fill_batch found it, or not looked
     * at behind the rest of a batch. */
    bool owes;
    bool passes_on; /* what is to be said is left to lane 0 */
    bool watched;   /* lane 0: the pool is told of bytes and room, too */
    bool rests;     /* there was nothing to send when conn->changes was `seen` */
    unsigned seen;
    int iov_at;
    int iov_n;
    int n_short; /* in the batch, of which there are copies */
    uint64_t short_seqs[BATCH];
    bool to_copy[BATCH]; /* when they have gone; those that are shorter were copied before */
    uint64_t oldest;     /* message in the batch */
    struct iovec iov[IOVS];
    struct lc_tcp_frame heads[BATCH];
    unsigned char in[IN_BYTES];
    unsigned char out[LC_TCP_CONTROL_MAX];
    /* sparse.c; receiver: of the piece that comes; sender: of the batch */
    bool in_sparse; /* more runs come */
    unsigned char *base;
    size_t run_at; /* none of them begins earlier in it */
    unsigned char in_map[LC_TCP_MAP_BYTES];
    unsigned char out_map[LC_TCP_MAP_BYTES + 64];

    /* Set, with conn->lock held, behind a larger `retire`; whoever moves the lane reads it without, and takes it back with
     * the lock held when it stands all the same. */
    atomic_bool condemned;

    /* under conn->lock */
    bool up;
    bool idle;        /* looked for something to send in vain: has to be woken when there is */
    bool settled;     /* sender: what was lost with the last socket is known */
    int announced_by; /* sender: the lane that has told of this one's end; -1: none */
    uint32_t epoch;   /* of the socket in use, or of the last one */
    uint32_t tried;   /* sender: epoch of the last dial */
    uint32_t retire;  /* receiver: sockets up to this epoch have to end */
    uint64_t count;   /* pieces sent; pieces received */
    uint64_t told;    /* receiver: count in the last CONTROL; sender: confirmed by the receiver */
    struct piece sent[RING]; /* sender: number n at n % RING, told < n <= count */
    int64_t
        next_dial; /* sender: not before; INT64_MAX: a dial is on its way, or none is wanted (conn_widen) */
    unsigned tries;
    union lc_tcp_address home; /* receiver: where the sender's process listens, if has_home */
    bool has_home;
    int rail;           /* sender: index in conn->rails */
    int dev;            /* that the socket in use, or the last one, passes */
    bool stuck;         /* why it is retired: nothing that was sent has come for long */
    uint64_t rate;      /* sender: bytes per second, as far as is known */
    int64_t rate_at;    /* when that was looked at */
    int64_t busy_since; /* 0: nothing is on its way */
    uint64_t busy_from; /* what the peer's system had confirmed then */
    int64_t took_at;    /* sender: when it took its last piece */
    uint64_t gone; /* bytes that the peer's system has confirmed, when that was last seen to grow */
    int64_t moving_at; /* when that was; or that nothing was on its way */
    bool drained;      /* nothing was on its way when last looked at */
    uint64_t bytes;    /* of payload, sent or received; what was sent again counts again */
    uint64_t lost;     /* sockets that broke */
    uint64_t
        rail_lost; /* of them those with which the connection lost the device, and had others */
    uint64_t told_bytes; /* the same, as the report knows it */
    uint64_t told_lost;
    uint64_t told_rail_lost;
};

struct counts {
    uint64_t messages;
    uint64_t resent; /* pieces */
    uint64_t waits;  /* calls of isend and irecv that found no room */
};

/* A way from an interface of this machine to one of the peer's. Connections of one rail do without all that. */
struct rail {
    int dev;
    union lc_tcp_address to;
    bool proven; /* it has had a socket: what refuses there is the peer's machine */
};

/* Whether the caller of a receiver looks for what comes. It says so itself; the service thread looks at times whether it has
 * said so since. */
enum attendance {
    CALLED,
    UNCALLED, /* since the service thread has looked last */
    ALONE, /* for longer, or ever: the service thread moves lane 0, or the sender's system takes this one for dead */
};

/* See park.c. */
enum parking {
    PARK_FRESH,
    PARK_DUE,    /* sender: it is to ask */
    PARK_ASKED,  /* sender: it has, and waits for the answer */
    PARK_AGREED, /* its sockets may end; sender: they do */
    PARKED,      /* there are none */
    PARK_OVER,   /* it is used, or was called back */
};

struct conn {
    atomic_int refs; /* one of engine.conns, one of the caller, one of each dial and mover */
    bool sends;
    int dev;
    int n_lanes;
    uint32_t piece;
    uint8_t id[LC_TCP_TOKEN];
    uint8_t token[LC_TCP_TOKEN];
    struct rail
        rails[LC_TCP_RAILS];   /* sender: lane i takes rail i % n_rails; `proven` under lock */
    int n_rails;               /* receiver: 0, it takes what comes */
    union lc_tcp_address peer; /* sender: of its first rail; receiver: who came first */
    char peer_text[LC_TCP_ADDRESS_TEXT];

    /* under engine.lock */
    struct conn *next, **link; /* in engine.conns */
    struct conn *next_ready;   /* in a listen's queue */
    uint64_t ticket;           /* sender: of the handle, until claimed */
    bool claimed;              /* NCCL holds it */
    int64_t expires;           /* where it is not */

    /* Sender; relaxed, each lane adds to them: what it costs if they are wrong is a look more or less. */
    atomic_uint dense;   /* pieces in a row that were not worth a map */
    atomic_uint skipped; /* that were not looked at */
    atomic_bool sparse;  /* the last one that was looked at was zeros for the most part */
    atomic_ulong elided; /* bytes that were zero and not sent */

    pthread_mutex_t lock;
    /* Grows with each change under the lock, so that who found nothing to do need not look again: the caller's thread asks
     * all the time, and the others would wait for it. Written with the lock held, read without. */
    atomic_uint changes;
    /* Threads of the pool that were asked, a bit each, under the lock: whoever lets go of it wakes them then, or they would
     * wait for it at once. */
    uint64_t wakes;
    atomic_bool
        troubled; /* set behind error, peer_gone, closing; test and the lanes read it without the lock */
    struct lc_net_request ring[LC_TCP_WINDOW];
    uint64_t posted;                     /* calls of isend or irecv */
    unsigned n_used;                     /* of them the caller has not back */
    uint64_t acked;                      /* complete at the receiver, in a row */
    uint64_t cut;                        /* sender: the message that is being cut */
    uint64_t credit;                     /* sender: receives that the peer has posted */
    uint64_t credit_size[LC_TCP_WINDOW]; /* sender: their sizes */
    struct piece *redo;                  /* sender: n_lanes * RING; to be sent again */
    int n_redo;
    uint64_t told_posted; /* receiver: in the last CONTROL */
    uint64_t told_acked;  /* receiver: likewise */
    struct early *early;  /* number n at n % LC_TCP_EARLY; receiver: NULL until the first comes */
    /* Sender: copies of messages that are no short ones, number n at n % LC_TCP_KEPT, which only lane 0 makes: allocated under
     * the lock, written with its io held while the message is not confirmed. NULL until wanted. */
    unsigned char *kept[LC_TCP_KEPT];
    bool dirty; /* receiver: a CONTROL is due */
    /* Messages in a row that were short: of those complete at the receiver, of those cut at the sender. A receiver that has
     * counted LC_TCP_SHORT_RUN waits to be asked; its sender, when it has sent no other since, has counted as many. */
    unsigned short_run;
    bool asked; /* sender: for the receive of the message that is next */
    bool wide;  /* sender: lanes beside the first are wanted */
    uint64_t
        wanted; /* receiver: receives of which the sender is to know as soon as they are posted */
    bool closing;
    /* Sender: its caller has closed it, and it is there for its copies; set with engine.lock held, too. */
    atomic_bool leaving;
    bool said_leaving;   /* over a socket that is up */
    int64_t leave_until; /* written before `leaving` */
    bool peer_leaving;   /* receiver: it said BYE and is there until all has come */
    bool peer_gone;      /* it said BYE */
    uint64_t
        last; /* receiver, with one of these: so many messages may still come; if it is gone, over lanes that are up */
    bool told; /* the peer knows of the error, or caused it */
    int error; /* sticky */
    char cause[CAUSE];
    int n_up;
    bool was_up;
    enum parking parking;
    bool agrees;        /* receiver: of which the sender is to hear */
    int64_t up_since;   /* of the newest socket */
    int64_t down_since; /* with n_up == 0 */
    unsigned refused;   /* dials, or a receiver's probes, refused in a row */
    int64_t refused_since;
    int64_t next_probe;    /* receiver with n_up == 0: not before; INT64_MAX: one is on its way */
    unsigned probes;       /* since it had a socket */
    atomic_int attendance; /* receiver; relaxed: what is seen too late is seen at the next look */
    int64_t next_sample;   /* of it */
    struct counts counts;
    struct counts told_counts; /* as the report knows them */
    uint64_t told_elided;      /* likewise */

    struct lane lanes[];
};

struct lc_net_listen {
    struct lc_net_listen *next;
    int dev;
    uint8_t token[LC_TCP_TOKEN];
    struct conn *ready; /* complete, not yet accepted; oldest first */
    int n_ready;
};

struct listener {
    int fd; /* -1: not open */
    uint16_t port;
};

/* A side that was closed answers the other one: a sender whose last confirmation, a receiver whose BYE was lost. */
struct tombstone {
    bool sent; /* a sender, for the receiver that asks */
    uint8_t id[LC_TCP_TOKEN];
    uint8_t token[LC_TCP_TOKEN];
    uint64_t acked;
    int64_t until;
};
#define TOMBSTONES 512

/* What a thread of the pool does. */
enum doing {
    LOOKS,  /* it has nothing to do, and sees at once what comes */
    SLEEPS, /* until it is woken, which takes longer than a piece */
    MOVES,
};

/* A thread of the pool, or, as the first of them, the service thread, which has the lanes 0. */
struct mover {
    int poll;           /* epoll of its sockets; the service thread's is engine.service_fd */
    atomic_int doing;   /* the thread's; relaxed, as n_busy */
    int64_t look_after; /* the thread's alone: not before, for others want the processor */
    pthread_t thread;
    /* Eventfd in `poll`, which tells of each write once; -1: none, or the service thread's. See engine_signal. */
    atomic_int wake_fd;
    /* Set with the lock held by who asks, and taken back, likewise, by the thread when it takes what it was asked for. Before it
     * sleeps it sets `asleep`, and then reads this; who asks sets this, and then takes that back: if it was set, it wakes it. So
     * one of the two sees the other, and nobody calls the system for a thread that is not asleep. */
    atomic_bool asked;
    atomic_bool asleep;
    pthread_mutex_t lock; /* of what follows; the last to be taken, for a few instructions */
    struct seat *seats;
    uint32_t n_seats;
    uint32_t first_asked, last_asked; /* seats whose lanes it is to look at, by whom it was asked */
    int lanes; /* in them, lane 0 of connections left out: a new socket goes by it */
};

struct engine {
    pthread_mutex_t life;
    int users; /* contexts, listens and accepted or connected connections; under life */
    bool running;
    pthread_t service;
    /* The service thread, and room for those of the pool. Written under life; its memory stays, for who is about to wake one. */
    struct mover movers[POOL_MOST + 1];
    /* Of the pool, behind the service thread: none, and all from the first connection on that has more than one socket. Grows
     * with engine.lock held, on the service thread, behind what it counts; read by any thread. */
    atomic_int n_pool;
    /* Of the pool's threads, that do not wait. Each counts itself; relaxed: who reads it guesses, and a wrong guess costs a
     * little speed. */
    atomic_int n_busy;
    atomic_int
        n_looking; /* of the others, that look for something to do and do not sleep; counted likewise */

    atomic_bool dead; /* set once in a child, and when the library ends: nothing works any more */
    atomic_bool stop;
    /* Nobody uses it, but some connection leaves: the service thread ends it behind the last one. Under life; read without by
     * that thread. */
    atomic_bool outlives;
    bool ended;            /* in that way: its thread is to be joined; under life */
    atomic_bool attention; /* the service thread shall look at the connections */
    int service_fd;        /* epoll of the service thread */
    atomic_int wake_fd;    /* eventfd of the service thread; of the pool when it is to end */
    atomic_int wakers; /* who is about to write to an eventfd of the engine's; each counts itself */

    pthread_mutex_t lock;
    struct conn *conns;
    struct lc_net_listen *listens;
    struct listener *listeners; /* one a device */
    unsigned n_leaving;         /* of conns, see leave.c */
    struct tombstone tombstones[TOMBSTONES];
    unsigned n_tombstones; /* written so far; the oldest are overwritten */

    /* written once, under life, before the first device is shown */
    bool configured;
    struct lc_tcp_device *devices;
    int n_devices;
    int sockets; /* of each rail */
    int rails;
    int threads_wanted;
    bool
        relieves; /* lane 0 leaves long messages to the pool, as far as it has lanes on the same rail */
    int parts;       /* of a long message, one for each thread, where NCCL's carries one of them */
    int64_t spin_ns; /* so long looks a thread that has moved something ... */
    int lookers;     /* ... if no more than so many do */
    uint32_t piece;
    int64_t timeout_ns;
    bool elide;
    size_t keep; /* messages that are no longer are copied */

    /* Which connection was last called of those that receive [0] and of those that send [1], and how many times in a row;
     * relaxed: a wrong guess costs a little speed. */
    struct turns {
        _Atomic(const struct conn *) conn;
        atomic_uint n;
    } turns[2];

    atomic_ulong strangers; /* sockets that did not know a token */
    atomic_ulong broken;    /* sockets that ended before their connection */
    atomic_ulong resent;    /* pieces */
    atomic_ulong elided;    /* bytes that were zero and not sent */
};
extern struct engine engine;

/* engine.c */
void lock_init(pthread_mutex_t *lock); /* one that is held for a few instructions */
int engine_configure(void);
/* Of the processors that this rank may use, of all, with so many ranks on the machine: how many it has as its own. Ranks that
 * each have as many threads as there are processors are in each other's way. One that is bound to some of its own has those. */
int engine_share(int mine, int all, int ranks);
int engine_hold(void);
void engine_drop(void);
void engine_wake(void);
/* Writes to an eventfd of the engine's, and closes one. A caller of NCCL's may be about to write, with no lock held, when the
 * process ends: who closes takes the number away first, and then waits for those who may have read it, which is for a system
 * call that does not block. */
void engine_signal(atomic_int *fd);
void engine_close_signal(atomic_int *fd);
bool engine_end(void); /* on the service thread: true if it is the last to leave, and has to end */
void engine_enlist(struct conn *conn); /* with engine.lock held, as the next two */
void engine_delist(struct conn *conn); /* with engine.lock held; the caller has a reference, too */
void engine_bury(struct conn *conn);   /* with engine.lock held: a tombstone */
void engine_home(int dev,
                 struct lc_tcp_wire_address *out); /* where this process listens, or nothing */

/* pool.c; opening, ending and closing with engine.life held; a child of a fork forgets */
void pool_open(void);
void pool_grow(void); /* on the service thread: a lane of the pool will have a socket */
void pool_end(void);  /* the service thread has ended */
void pool_close(void);
void pool_forget(void);
int pool_join(struct lane *lane); /* with io held, the lane not being up: it has a socket */
/* An event of a lane and none of the service thread's own sockets. */
static inline bool pool_is_lane(uint64_t data)
{
    return data & POOL_LANE;
}
void pool_move(struct mover *mover, const struct epoll_event *event);
/* A thread of the pool looks at the lane at once, whatever it was told before. With io held, or, but for lane 0, with
 * conn->lock held and the lane up, so that the descriptor and the mover are the lane's. */
void pool_look(struct lane *lane);
/* The same with conn->lock held: the thread is woken when that is free. */
void pool_ask(struct lane *lane);
void pool_wake(uint64_t wakes); /* see conn->wakes */
void pool_leave(
    struct lane *lane); /* with io held: the socket is about to be closed, or somebody else's */

/* service.c */
void *service_main(void *arg);
void conn_work(struct conn *conn); /* something was posted: start it */
/* On the service thread: the deadline has passed without a socket, or lanes are to be given up. */
void service_end_late(struct conn *conn);
int service_listen(int dev, uint16_t *port); /* with engine.lock held */
void service_close(
    void); /* all its sockets; with engine.lock held, and no other thread of the engine running */
void service_forget(void); /* in a child: sockets that have not found their lane */
void set_options(int fd);
void set_unpaced(int fd); /* before it is connected or listens: both ends are in this machine */

/* conn.c */
struct conn *conn_new(bool sends, int dev, int n_lanes, uint32_t piece);
void conn_ref(struct conn *conn);
void conn_unref(struct conn *conn);
__attribute__((format(printf, 3, 4))) void conn_fail(struct conn *conn, int code, const char *fmt,
                                                     ...);
void conn_fail_locked(struct conn *conn, int code, const char *text);
void conn_close(struct conn *conn);
/* The connection has failed: when this returns nothing reads from or writes to the caller's buffers any more. */
void conn_abandon(struct conn *conn);
void conn_wake_lanes(struct conn *conn, const struct lane *except);
bool conn_wake_lane(struct lane *lane); /* with conn->lock held; false: it needs no waking */
/* The lanes of the pool, each once, those first whose threads see soonest that they are woken; their number. With conn->lock
 * held. */
int conn_order_lanes(const struct conn *conn, int out[LC_TCP_LANES]);
int conn_settle(struct lane *lane, uint64_t count); /* with conn->lock held */
int conn_acked(struct conn *conn, uint64_t acked);  /* with conn->lock held */
int conn_take_control(struct lane *lane, const struct lc_tcp_frame *f, const unsigned char *body);
int conn_begin_piece(struct lane *lane, const struct lc_tcp_frame *f);
void conn_end_piece(struct lane *lane);
bool conn_has_early(const struct conn *conn, uint64_t seq); /* with conn->lock held */
void conn_take_early(struct conn *conn,
                     struct lc_net_request *r); /* with conn->lock held: r was posted */
void conn_sent(struct lane *lane);              /* with io held: the batch has gone */
/* With conn->lock held: there are receives of which the sender is to know. */
void conn_want_credit(struct conn *conn);
int conn_take_ask(struct conn *conn, const struct lc_tcp_frame *f);
/* A message of this size is to be sent: the first long one brings the other lanes, which connections of short ones do
 * without. True: the service thread has to be woken for that. With conn->lock held. */
bool conn_widen(struct conn *conn, uint64_t size);
/* The next piece is of a message that lane 0 leaves to its siblings. With conn->lock held. */
bool conn_is_for_pool(const struct conn *conn);
/* A message of this size, that is about to be posted, is left to the pool; `alone`: as of a request. With conn->lock held. */
bool conn_hands_over(const struct conn *conn, uint64_t size, bool alone);
void conn_take_back(struct lc_net_request *r); /* it is for lane 0, too */
/* The message cannot come any more. With conn->lock held. */
bool conn_is_hopeless(const struct conn *conn, uint64_t seq);
int conn_bye(struct lane *lane, const struct lc_tcp_frame *f);
int conn_down(struct lane *lane, const struct lc_tcp_frame *f);
int conn_park(struct lane *lane);
void conn_fill_batch(struct lane *lane); /* with io held: what is to be sent next, if anything */
void conn_fill_bye(struct conn *conn, struct lc_tcp_frame *out);

/* leave.c */
void leave(struct conn *conn); /* its caller closes it, and has no reference any more */
/* With engine.lock held. True: it is to be closed, which drops the reference that its caller had; else `next`, if it may be
 * later. */
bool leave_is_over(struct conn *conn, int64_t now, int64_t *next);
bool leave_any(void);
bool leave_is_with_peers(void); /* all that they owe has come to the peers' machines */
/* So many nanoseconds at most, for all of them; `for_systems`: or until that. */
void leave_wait(int64_t most, bool for_systems);
void leave_pin(void); /* the library stays loaded */
void leave_all(
    void); /* the process ends: whoever is open leaves, and it waits for them; with engine.life held */

/* park.c; all with conn->lock held */
void park_attached(struct conn *conn); /* a lane has a socket */
/* True: some lane is to be moved, so that it asks; else `next`, if it may be later. */
bool park_look(struct conn *conn, int64_t now, int64_t *next);
bool park_take_question(struct conn *conn); /* a PARK is to be sent now, once */
bool park_agree(struct conn *conn);         /* receiver: a PARK has come; false: a CONTROL is due */
bool park_take_answer(struct conn *conn);   /* receiver: a PARK is to be sent now, once */
bool park_agreed(struct conn *conn); /* sender: a PARK has come; true: the lanes have to be moved */
void park_refused(struct conn *conn); /* sender: a CONTROL has come, and who agrees sends none */
bool park_passed(struct conn *conn);  /* receiver: a message has come; true: a CONTROL is due */
bool park_lost(struct conn *conn);    /* a socket has ended; true: as it should */
bool park_end(
    struct conn
        *conn); /* it is used; true: sockets are needed, and the service thread knows nothing yet */

/* sparse.c; all with io held */
void lane_elide(struct lane *lane); /* the batch that has just been filled */
/* The piece that has just begun comes without its zeros. -EPROTO: the map is none. */
int lane_begin_sparse(struct lane *lane, const unsigned char *map);
void lane_took(struct lane *lane, size_t n); /* bytes have come to dst */
/* Where the rest of the piece goes; the number of places. */
int lane_places(const struct lane *lane, struct iovec *iov, int most, size_t *bytes);

/* lane.c */
void lane_init(struct lane *lane, struct conn *conn, int index);
/* Reads and writes so often. True: the last one who moved it, if that was here, may not have been done. */
bool lane_kick(struct lane *lane, int budget);
void lane_unlock(struct lane *lane); /* lets go of io, for those who have not tried it */
void lane_push(struct lane *lane);   /* writes only: what was just posted */
void lane_break(struct lane *lane, const char *cause); /* with io held */
void lane_close(struct lane *lane);
void lane_abandon(struct lane *lane); /* see conn_abandon */
/* With io held, the lane being down: it goes on with this socket. False: it cannot, for the pool would not move it; only lane
 * 0, which its caller moves, does without. Then, unless the socket is given back, lane_attach. */
bool lane_take(struct lane *lane, int fd);
void lane_return(struct lane *lane);
void lane_attach(struct lane *lane, uint32_t epoch);
int lane_parse(struct lane *lane); /* with io held: whatever stands in `in` */

/* count.c */
void count_begin(void);
void count_end(void);
void count_conn(struct conn *conn);

/* rail.c; the last three with conn->lock held */
void rail_fill_handle(int dev, struct lc_tcp_handle *h); /* with engine.lock held */
int rail_choose(int dev, const struct lc_tcp_handle *h, struct rail rails[LC_TCP_RAILS],
                int *n_out);
bool rail_may_take(struct lane *lane);
int64_t rail_watch(struct conn *conn, int64_t now, bool *stuck); /* when to look again */
const char *rail_name(const struct lane *lane);

/* What the thread of a lane of the pool does, if one has it; with conn->lock held. */
static inline enum doing pool_doing(const struct lane *lane)
{
    if (lane->mover < 0)
        return MOVES;
    return (enum doing)atomic_load_explicit(&engine.movers[lane->mover].doing,
                                            memory_order_relaxed);
}

static inline void conn_lock(struct conn *conn)
{
    pthread_mutex_lock(&conn->lock);
}

/* Of those who have changed nothing that makes something to send. */
static inline void conn_unlock_unchanged(struct conn *conn)
{
    uint64_t wakes = conn->wakes;

    conn->wakes = 0;
    pthread_mutex_unlock(&conn->lock);
    if (wakes)
        pool_wake(wakes);
}

static inline void conn_unlock(struct conn *conn)
{
    atomic_fetch_add(&conn->changes, 1);
    conn_unlock_unchanged(conn);
}

static inline bool same_bytes(const uint8_t *a, const uint8_t *b)
{
    unsigned char diff = 0;

    for (int i = 0; i < LC_TCP_TOKEN; i++)
        diff |= a[i] ^ b[i];
    return diff == 0;
}

#endif
