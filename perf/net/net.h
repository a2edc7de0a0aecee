/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench net: the network plugin beside a single socket and beside any other plugin, without NCCL and without a
 * GPU.
 *
 * For each side ("socket", "loongcomm", "peer") there are two processes, the ends, which stay until the end and take turns. All
 * sides are driven by the same loop, which calls as NCCL's progress thread does: it posts while fewer than `depth`
 * messages are in flight, tests the oldest, and yields when nothing has moved. So what is compared is the transport. */
#ifndef LC_PERF_NET_H
#define LC_PERF_NET_H

#include "perf/bench.h"
#include "plugin/net/abi/abi.h"

#define LC_BNET_FLOWS 16
#define LC_BNET_DEPTH LC_NCCL_MAX_REQUESTS
#define LC_BNET_TEXT  200

enum lc_bnet_op {
    LC_BNET_STREAM,   /* one way */
    LC_BNET_EXCHANGE, /* both ways at once, as in a ring */
    LC_BNET_PINGPONG, /* one message at a time, there and back */
    LC_BNET_OPS,
};

enum lc_bnet_side {
    LC_BNET_SOCKET,
    LC_BNET_OURS,
    LC_BNET_PEER, /* a plugin that the user names */
    LC_BNET_SIDES,
};

struct lc_bnet_handle {
    unsigned char bytes[LC_NCCL_HANDLE_BYTES];
};

/* One side's transport; 0 or -errno after a line on stderr. Comms are opaque. As in NCCL's interface connect, accept,
 * isend and irecv may give NULL: not yet. */
struct lc_bnet_way {
    const char *name;
    int (*init)(const char *library);
    void (*fini)(void);
    int (*listen)(struct lc_bnet_handle *handle, void **out);
    int (*connect)(struct lc_bnet_handle *handle, void **out);
    int (*accept)(void *listener, void **out);
    int (*reg)(void *comm, void *data, size_t size, void **out);
    void (*dereg)(void *comm, void *mr);
    int (*isend)(void *comm, void *data, size_t size, void *mr, void **out);
    int (*irecv)(void *comm, void *data, size_t size, void *mr, void **out);
    int (*test)(void *request, bool *done, size_t *size);
    void (*close_send)(void *comm);
    void (*close_recv)(void *comm);
    void (*close_listen)(void *listener);
    /* Where who connects by this handle goes, in network order; a relay is put in between by changing it. NULL: not known. */
    int (*get_port)(const struct lc_bnet_handle *handle, uint16_t *port);
    void (*set_port)(struct lc_bnet_handle *handle, uint16_t port);
};
extern const struct lc_bnet_way *const lc_bnet_ways[LC_BNET_SIDES];
extern const struct lc_bnet_way lc_bnet_way_socket; /* socket.c */
extern const struct lc_bnet_way lc_bnet_way_plugin; /* plugin.c */
extern const struct lc_bnet_way lc_bnet_way_peer;   /* plugin.c */
extern const char *const lc_bnet_op_names[LC_BNET_OPS];

/* What is between the ends. */
struct lc_bnet_link {
    bool relay; /* a process that passes on, connection by connection */
    bool veth;  /* a network namespace for each end, a pair of devices between them */
    double
        rate; /* bytes a second of one connection (relay), or of the device (veth); 0: as fast as it goes */
    double delay_s; /* relay, one way */
    double
        slow; /* relay: the second connection that comes is slower by this factor; 0: it is not */
    double
        stall; /* relay: the share of 64 KiB blocks that wait for another round trip, as after a loss */
};

struct lc_bnet_options {
    bool ops[LC_BNET_OPS];
    size_t sizes[LC_BENCH_MAX_LIST];
    int n_sizes;
    double lives[LC_BENCH_MAX_LIST]; /* shares of blocks of 4 KiB that are not zero */
    int n_lives;
    bool sides[LC_BNET_SIDES];
    int flows; /* connections in each direction */
    int depth;
    int rounds;
    double budget_s;
    int timeout_s;
    uint64_t seed;
    const char *json;
    const char *library;
    const char *peer; /* NULL: that side is not wanted */
    struct lc_bnet_link link;
};

struct lc_bnet_case {
    enum lc_bnet_op op;
    size_t bytes;
    double live;
    uint64_t seed;
};

/* ---- the ends ---- */

enum lc_bnet_order_kind {
    LC_BNET_ASK_UP = 1, /* the devices; one runs only when both do */
    LC_BNET_ASK_LISTEN,
    LC_BNET_ASK_CONNECT,
    LC_BNET_ASK_CASE,
    LC_BNET_ASK_RUN,
    LC_BNET_ASK_QUIT,
};

struct lc_bnet_order {
    enum lc_bnet_order_kind kind;
    struct lc_bnet_handle handles[LC_BNET_FLOWS]; /* CONNECT */
    struct lc_bnet_case kase;                     /* CASE */
    uint64_t messages;                            /* RUN: on each flow */
    bool verify; /* RUN: poison what is written to, and check it after */
};

struct lc_bnet_answer {
    int error; /* 0 or -errno, then text says why */
    char text[LC_BNET_TEXT];
    struct lc_bnet_handle handles[LC_BNET_FLOWS]; /* LISTEN */
    int64_t begin_ns, end_ns;                     /* RUN: of one clock for both ends */
    int64_t cpu_ns;                               /* RUN: of all threads */
};

struct lc_bnet_end {
    pid_t pid; /* 0: none */
    int fd;
};

/* Main of an end process; never returns. `end`: 0 or 1. */
__attribute__((noreturn)) void lc_bnet_end_main(int fd, enum lc_bnet_side side, int end,
                                                const struct lc_bnet_options *options);

/* What one end sends on one flow in one slot, and the other expects. */
void lc_bnet_fill(const struct lc_bnet_case *kase, int end, int flow, int slot, void *out);

/* ---- the link ---- link.c */

/* In a new process: everything that goes to `port` of the loopback now also reaches it by the returned port. The
 * relay ends with the process that started it. 0 or -errno. */
int lc_bnet_relay_start(const struct lc_bnet_link *link, const uint16_t *ports, int count,
                        pid_t *pid, uint16_t *out);

/* Both ends wait meanwhile in namespaces of their own. 0, or -errno after a line on stderr. */
int lc_bnet_veth_make(const struct lc_bnet_link *link, const pid_t *ends);
/* Called by an end first: a namespace of its own; and later, when the pair has been made. */
int lc_bnet_veth_enter(void);
int lc_bnet_veth_up(const struct lc_bnet_link *link, int end);
/* Until the device runs, which it does some time after both ends are up. */
int lc_bnet_veth_wait(int timeout_s);

/* ---- results ---- */

struct lc_bnet_series {
    double *us;  /* per message, one a round */
    double *cpu; /* seconds a GB, of both ends together */
};

struct lc_bnet_result {
    struct lc_bnet_series series[LC_BNET_SIDES];
    double *ratios
        [LC_BNET_SIDES]; /* a side / ours by time; NULL: ours itself, or one of the two was not run */
    int rounds;
    uint64_t messages;
};

/* output.c */
struct lc_bnet_output;
int lc_bnet_output_open(const struct lc_bnet_options *options, int argc, char **argv,
                        struct lc_bnet_output **out);
void lc_bnet_output_result(struct lc_bnet_output *output, const struct lc_bnet_case *kase,
                           struct lc_bnet_result *result);
int lc_bnet_output_close(struct lc_bnet_output *output, bool complete);

/* options.c: 0, or a complaint on stderr and -EINVAL. */
int lc_bnet_options_parse(int argc, char **argv, struct lc_bnet_options *out);
int lc_bnet_parse_link(const char *text, struct lc_bnet_link *out);
void lc_bnet_usage(FILE *out);

/* main.c: `net ...`; argv[0] is "net". Returns the exit code. */
int lc_bnet_main(int argc, char **argv);

#endif
