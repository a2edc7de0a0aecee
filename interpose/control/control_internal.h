/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by control.c (thread, sockets), arbiter.c (rooms hosted here) and member.c (rooms joined from here).
 *
 * One lock, control.lock, guards everything below that is not atomic. It is held for short and never across a call that
 * may block: sockets are non-blocking, waits are on the condition variable, and lines for the log go through lc_say. No call path of a committed or passed-through
 * operation takes it, but for calls through rings while these change, and one in sixteen to see whether they are to.
 */
#ifndef LC_INTERPOSE_CONTROL_INTERNAL_H
#define LC_INTERPOSE_CONTROL_INTERNAL_H

#include "common/deadline.h"
#include "common/log.h"
#include "interpose/control/wire.h"
#include "interpose/control/words.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#define LC_HELLO_MS     5000  /* an accepted connection says its token within this */
#define LC_CONNECT_MS   10000 /* a connection to an arbiter stands within this */
#define LC_PROBES       8     /* connections to see whether a process is there */
#define LC_ASK_MS       30000 /* an arbiter answers within this */
#define LC_EXIT_LOCK_MS 2000  /* at its end the program waits for the lock so long */
#define LC_GOODBYE_MS   200   /* ... and for sockets to take its goodbyes */
#define LC_CUT_MS       500   /* what a rank has sent before its end arrives within this */
#define LC_GRACE_MS     1000  /* for that it may take so long before it has to give way to others */
#define LC_MISSING_MS   5000  /* ranks join when NCCL has made the communicator, for all at once */
#define LC_STRANGERS    64    /* connections without a token at once; more wait to be accepted */
#define LC_CLIENTS      16384u /* and no more than a quarter of the descriptors of the program */
#define LC_ROOMS_IDLE   1024   /* ids made and never used; the oldest gives way */
#define LC_PAST_MAX     256u   /* tokens of rooms that have ended */
#define LC_RANKS_MAX    65536u
#define LC_SEATS_MAX    4096u /* of one client */
#define LC_BLOBS_MAX    64u   /* of one rank in one room */
#define LC_ROUND_MS     2000  /* a rank says how far it is within this */
#define LC_STALL_MS     500   /* between two stalls that one seat may tell */
#define LC_FINDING_MS   6000 /* an arbiter that was told of a stall sends its finding within this */
#define LC_HANGS_MAX    64u  /* waiting to be written; more are lost, which costs a report */
#define LC_LINES_MAX    64u  /* the same for lines of the log */

/* ---- rooms joined from here ---- */

enum room_state {
    JOINING,
    COMPLETE,
    NEVER
};

struct blob {
    struct blob *next;
    uint32_t rank, key;
    size_t size;
    unsigned char data[];
};

/* A question for a descriptor (pass.c): made by lc_room_fetch_fd, taken out by it or with the room. */
struct lc_fetch {
    struct lc_fetch *next;
    struct lc_room *room;
    uint32_t rank;
    struct lc_offer offer;
    struct lc_conn conn; /* fd -1: not connected yet, or over */
    struct lc_deadline until;
    bool over;
    int err; /* once it is over: 0 and `fd`, or why not */
    int fd;
};

/* Somebody who has connected for a descriptor and not asked yet. */
struct lc_visitor {
    struct lc_visitor *next;
    struct lc_conn conn;
    struct lc_deadline until;
};

/* Where the watchdog is with a room. */
struct lc_watch {
    bool foreign;    /* another version of the protocol may be at the other end: says nothing */
    uint64_t calls;  /* collectives and messages when looked at last */
    int64_t said_ns; /* 0, or when the arbiter was told that `calls` has not moved */
    bool reported;   /* that was reported */
    bool blamed;     /* and named somebody */
};

struct lc_room {
    struct lc_room *next; /* of its link, or of the orphans */
    struct link *link;    /* NULL: lost, or its process ended in order */
    pid_t pid;            /* of the process that joined; a forked child's calls do nothing */
    uint32_t id, nranks;
    unsigned char key[LC_KEY_BYTES];
    struct lc_record mine;
    struct lc_record **records; /* by rank; complete before `state` says so, then constant */
    struct blob *blobs;
    bool lost_blob;         /* some blob found no memory: what is not there may be that one */
    uint64_t capabilities;  /* as records */
    bool has_arbiter;       /* as records: a rank is of the process that hosts the room */
    struct lc_words *words; /* as records; NULL: the arbiter is asked */
    bool answered;
    uint64_t answer;
    bool abort_told; /* ABORT is queued: the arbiter knows this seat no more, nothing may follow */

    /* The descriptor that this rank offers (pass.c). */
    struct lc_room *next_offer;
    int offered_fd; /* -1: none */
    uint32_t asked; /* so often */
    unsigned char secret[LC_KEY_BYTES];

    /* Read by any thread without the lock. `state` is stored with release after what it announces. */
    atomic_int state;
    atomic_uint abort_word;     /* 0, then 1; set after `error` */
    atomic_uint_fast64_t error; /* 0, then rank << 32 | errno; written once, under the lock */
    atomic_uint_fast64_t voted; /* 0, then the vote; written once, under the lock */
    _Atomic bool voted_pair;    /* for some pair; set by the thread that asks, read by any */
    _Atomic bool *withheld;     /* by rank: will never vote; set under the lock */
    _Atomic bool never;         /* some rank will not */
    atomic_int abort_wanted;    /* 0, then the caller's reason; taken by the control thread */
    struct lc_deadline cut_at;  /* as records; with `cut` */
    bool cut;                   /* as records: the echo is to be set then */
    _Atomic(uint32_t *) echo;   /* set beside abort_word; NULL: nothing. By lc_room_echo_abort */

    /* The watchdog's (hang.c). */
    _Atomic(struct lc_progress *) progress; /* NULL until lc_room_watch */
    struct lc_watch watch;                  /* as records, with the lock only */
};

/* ---- rooms hosted here ---- */

struct hosted; /* a room at its arbiter */

/* A seat as the arbiter sees it. */
struct seat {
    struct seat *next; /* of its client */
    struct client *client;
    struct hosted *hosted;
    uint32_t id; /* the member's name for the room */
    uint32_t blobs;
    struct lc_record record;
    struct lc_deadline stalled_until; /* it may not open another round before */
    bool knows;                       /* it said its last words, how far it had come */
    uint64_t collectives;
};

/* An accepted connection. */
struct client {
    struct client *next;
    struct lc_conn conn;
    struct lc_deadline hello_until;
    bool welcome; /* its token was right */
    uint32_t ids; /* names of rooms below were in use; a member counts up */
    uint32_t n_seats;
    struct seat *seats;
};

/* A rank's answer to the open round of the watchdog. */
struct reply {
    bool asked; /* else its rank has come since, and is no part of the round */
    bool is_here;
    struct lc_state state;
    struct lc_note recent[LC_RECENT];
};

/* What is left of a rank that has left. */
struct fate {
    uint32_t pid;
    uint8_t presence; /* enum lc_presence; LC_HERE: it has not left, or never came */
    bool knows;       /* it said how far it had come */
    uint64_t collectives;
};

struct hosted {
    struct hosted *next;
    unsigned char key[LC_KEY_BYTES];
    bool is_root;    /* made by lc_control_stamp: its key admits clients */
    uint32_t nranks; /* 0: nobody joined yet */
    uint32_t joined, left;
    bool complete;
    struct lc_cause refusal;       /* reason 0: none */
    struct lc_deadline missing_at; /* who has not joined by then is named */
    struct seat **seats;           /* by rank; NULL: not joined, or left */
    struct lc_words *words;
    int words_fd;

    /* The watchdog's (finding.c). */
    struct fate *fates;       /* by rank */
    struct reply *replies;    /* by rank; NULL: no round is open */
    uint32_t round;           /* of the last QUERY, from 1 */
    uint32_t waiting;         /* replies that the open round still waits for */
    struct lc_deadline until; /* of the open round */
    uint64_t told;            /* digest of what the last finding was about: nothing is told twice */
};

/* A connection from this process to an arbiter, shared by all rooms that it hosts for us. */
struct link {
    struct link *next;
    struct lc_ticket ticket; /* endpoint, and the token that was said */
    struct lc_conn conn;
    bool connected;
    struct lc_deadline connect_until;
    bool closing; /* the arbiter's process said that it ends in order */
    bool
        probing; /* the connection is lost; conn is another one, to see whether the process is there */
    bool reset; /* that was how */
    uint32_t probes;
    struct lc_room *rooms;
    uint32_t next_id;
};

/* A line of the log that waits to be written. */
struct lc_line {
    struct lc_line *next;
    enum lc_log_level level;
    const char *file;
    int line;
    char text[400];
};

struct control {
    pthread_mutex_t lock;    /* error checking: see lc_control_fini */
    pthread_cond_t answered; /* an ANSWER came or a link was lost */
    bool running;
    pid_t owner;   /* the process whose thread it is */
    bool tcp_only; /* set by tests before first use: as if every member came from another host */
    int wake_fd;   /* eventfd: the thread looks at everything again */
    int tcp_fd, unix_fd;
    struct lc_ticket endpoint; /* of this process's arbiter; port 0: not listening */
    struct client *clients;
    uint32_t n_clients, n_strangers, max_clients;
    struct lc_deadline accept_from; /* not before, since descriptors are short */
    struct hosted *hosted;
    uint32_t n_idle_roots;
    unsigned char past[LC_PAST_MAX][LC_KEY_BYTES]; /* the last n_past of them */
    uint32_t n_past;                               /* ever; the oldest gives way */
    struct link *links;
    bool said_missing, said_refused, said_want; /* one line of each kind per process */
    bool said_full;
    struct lc_line *lines; /* to be written by the writer thread, oldest first; LC_LINES_MAX */
    _Atomic bool ended; /* the program is at its end; set by lc_control_fini, read by the thread */
    struct lc_room
        *orphans; /* their link is lost; still watched, for what this rank alone can see */
    struct lc_hang
        *hangs; /* to be reported by the writer thread, newest first; at most LC_HANGS_MAX */
    uint32_t n_hangs;
    bool writing; /* the writer thread runs */

    /* Descriptors between members (pass.c). */
    int pass_fd; /* listens; -1: nothing was ever offered here */
    unsigned char pass_name[LC_KEY_BYTES];
    struct lc_room *offers; /* rooms that offer one */
    struct lc_fetch *fetches;
    struct lc_visitor *visitors; /* newest first */
    uint32_t n_visitors;
};
extern struct control control;

/* Starts the thread if it is not running. With the lock held. */
int lc_control_start(void);
void lc_control_wake(void);
void lc_unix_name(const struct lc_ticket *ticket, char name[64]);

/* arbiter.c, with the lock held */
int lc_arbiter_open_root(const unsigned char key[LC_KEY_BYTES]);
bool lc_arbiter_has_room(void); /* for one more stranger */
void lc_arbiter_accept(int fd, bool is_unix);
void lc_arbiter_serve(struct client *client, short events); /* may free the client */
/* `reason`: -ETIMEDOUT if only the network is in the way; members then go on, for NCCL may have another one. */
void lc_arbiter_drop(struct client *client, int reason);
void lc_arbiter_expire(void);
void lc_arbiter_close_all(void);

/* member.c, with the lock held */
void lc_member_serve(struct link *link, short events); /* may free the link */
void lc_member_expire(void);
int lc_member_patience_ms(void); /* until it has something to do; at most a second */
void lc_member_goodbye(void);
bool lc_member_idle(const struct link *link);
/* Frees the link. -ETIMEDOUT: only the network is in the way, and what has been agreed stays in force. -EPIPE: the
 * arbiter's process has ended, which ends rooms that one of its ranks is in. Other reasons end all. */
void lc_member_drop(struct link *link, int reason);
void lc_member_forked(void);
int lc_member_post(struct lc_room *room, uint32_t key, const void *data, size_t size);
int lc_member_look(struct lc_room *room, uint32_t rank, uint32_t key, void *data, size_t max,
                   size_t *size);

/* pass.c, with the lock held */
bool lc_pass_has_room(void); /* for one more visitor */
void lc_pass_accept(int fd);
void lc_pass_serve_visitor(struct lc_visitor *visitor, short events); /* may free the visitor */
void lc_pass_serve_fetch(struct lc_fetch *fetch, short events);
void lc_pass_leave(struct lc_room *room);
void lc_pass_forked(void);

/* finding.c, with the lock held: the arbiter's part of the watchdog */
int lc_finding_take(struct seat *seat, const struct lc_frame *head, const unsigned char *body);
void lc_finding_left(struct hosted *hosted, const struct seat *seat, int reason);
void lc_finding_expire(void);

/* hang.c, with the lock held: the member's part */
void lc_hang_look(void); /* once a turn */
void lc_hang_asked(struct lc_room *room, uint32_t round);
int lc_hang_found(struct lc_room *room, const struct lc_frame *head, const unsigned char *body);
void lc_hang_last_words(struct lc_room *room);
void lc_hang_write(struct lc_hang *newest); /* without the lock; frees them */

/* writer.c, with the lock held */
__attribute__((format(printf, 4, 5))) void lc_writer_say(enum lc_log_level level, const char *file,
                                                         int line, const char *format, ...);
#define lc_say(level, ...)                                                \
    do {                                                                  \
        if ((int)(level) <= (int)lc_log_max)                              \
            lc_writer_say((level), __FILE_NAME__, __LINE__, __VA_ARGS__); \
    } while (0)
bool lc_writer_busy(void);
void lc_writer_start(void); /* if there is something to write */

#endif
