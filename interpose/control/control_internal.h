/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by control.c (thread, sockets), arbiter.c (rooms hosted here) and member.c (rooms joined from here).
 *
 * One lock, control.lock, guards everything below that is not atomic. It is held for short and never across a call that
 * may block: sockets are non-blocking, waits are on the condition variable. No call path of a committed or passed-through
 * operation takes it.
 */
#ifndef LC_INTERPOSE_CONTROL_INTERNAL_H
#define LC_INTERPOSE_CONTROL_INTERNAL_H

#include "common/deadline.h"
#include "interpose/control/wire.h"
#include "interpose/control/words.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#define LC_HELLO_MS   5000  /* an accepted connection says its token within this */
#define LC_CONNECT_MS 10000 /* a connection to an arbiter stands within this */
#define LC_ASK_MS     30000 /* an arbiter answers within this */
#define LC_GOODBYE_MS 200
#define LC_GRACE_MS   1000   /* for that it may take so long before it has to give way to others */
#define LC_MISSING_MS 5000   /* ranks join when NCCL has made the communicator, for all at once */
#define LC_STRANGERS  64     /* connections without a token at once; more wait to be accepted */
#define LC_CLIENTS    16384u /* and no more than a quarter of the descriptors of the program */
#define LC_ROOMS_IDLE 1024   /* ids made and never used; the oldest gives way */
#define LC_RANKS_MAX  65536u
#define LC_SEATS_MAX  4096u /* of one client */
#define LC_BLOBS_MAX  64u   /* of one rank in one room */

struct hosted; /* a room at its arbiter */

/* A seat as the arbiter sees it. */
struct seat {
    struct seat *next; /* of its client */
    struct client *client;
    struct hosted *hosted;
    uint32_t id; /* the member's name for the room */
    uint32_t blobs;
    struct lc_record record;
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
};

/* A connection from this process to an arbiter, shared by all rooms that it hosts for us. */
struct link {
    struct link *next;
    struct lc_ticket ticket; /* endpoint, and the token that was said */
    struct lc_conn conn;
    bool connected;
    struct lc_deadline connect_until;
    bool closing; /* the arbiter's process said that it ends in order */
    struct lc_room *rooms;
    uint32_t next_id;
};

struct control {
    pthread_mutex_t lock;
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
    struct link *links;
    bool said_missing, said_refused; /* one line of each kind per process */
    char notice[256];                /* for the log, once the lock is given back; empty: none */
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
void lc_arbiter_expire(void);
void lc_arbiter_close_all(void);

/* member.c, with the lock held */
void lc_member_serve(struct link *link, short events); /* may free the link */
void lc_member_expire(void);
void lc_member_goodbye(void);
bool lc_member_idle(const struct link *link);
void lc_member_drop(struct link *link, int reason); /* frees the link */
void lc_member_forked(void);

#endif
