/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench: collectives, NCCL alone beside NCCL with the library preloaded, or with other variables.
 *
 * Processes. A launcher starts, for each variant, one worker process per rank that it drives, and keeps
 * all of them until the end. Only workers load a GPU context; each hangs on a socket of its launcher and
 * does one request at a time, so that the two sets take turns on an otherwise idle machine. Started by
 * itself, one launcher drives all ranks; under mpirun every process is a launcher of one rank, and the
 * launchers agree through the bootstrap table. A launcher never calls CUDA or NCCL.
 *
 * Exit codes: 0 all results right, 1 a wrong result, a hang or a failure, 2 bad usage.
 */
#ifndef LC_PERF_BENCH_H
#define LC_PERF_BENCH_H

#include "common/deadline.h"
#include "perf/results.h"

#include <nccl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define LC_BENCH_MAX_RANKS 1024
#define LC_BENCH_MAX_ITERS 4096 /* samples of one turn: they fit one message */
#define LC_BENCH_MAX_LIST  128
#define LC_BENCH_TEXT      480
#define LC_BENCH_COMMS     5 /* that a worker may have */

enum lc_bench_op {
    LC_BENCH_ALLTOALL,
    LC_BENCH_ALLREDUCE,
    LC_BENCH_REDUCESCATTER,
    LC_BENCH_ALLGATHER,
    LC_BENCH_OPS,
};

enum lc_bench_variant {
    LC_BENCH_PLAIN, /* NCCL as it is */
    LC_BENCH_OURS, /* the same with libloongcomm.so preloaded (not with --no-preload) and the variables of --env-b */
    LC_BENCH_VARIANTS,
};

struct lc_bench_dtype {
    const char *name;
    ncclDataType_t nccl;
    unsigned size;
    unsigned bits; /* integers up to 2^bits are exact in it */
    int exponent;  /* bits of the exponent, 0: an integer type */
    bool has_sign;
};

/* One line of the table. */
struct lc_bench_case {
    enum lc_bench_op op;
    int dtype;    /* lc_bench_dtypes index */
    size_t bytes; /* send buffer of a rank (all-gather: receive buffer), after rounding */
    double live;  /* share of rows that are not zero */
    bool inplace;
    bool graph;    /* calls are captured once and replayed */
    bool sendrecv; /* all-to-all as a group of sends and receives */
    bool mask;     /* libloongcomm.so is told which rows of an all-to-all are not zero */
    int tensors;   /* all-reduce as a group of so many, of equal size but for the last */
    int experts;   /* of a chunk, where it has 4 rows for each: lc_bench_rows */
    unsigned bits; /* significant bits of a sum, at most */
    uint64_t seed;
    bool unchecked; /* buffers of zeros, no result is checked */
};

struct lc_bench_options {
    enum lc_bench_op op;
    size_t sizes[LC_BENCH_MAX_LIST];
    int n_sizes;
    int dtypes[LC_BENCH_MAX_LIST];
    int n_dtypes;
    double lives[LC_BENCH_MAX_LIST];
    int n_lives;
    bool variants[LC_BENCH_VARIANTS];
    int ranks;  /* 0: as many as GPUs, at least 2 */
    int iters;  /* 0: by the time budget, as warmup and rounds */
    int warmup; /* -1 */
    int rounds;
    bool inplace;
    bool graph;
    bool sendrecv;
    bool mask;
    int tensors;
    int experts;
    unsigned bits;
    double budget_s;
    double settle_s;
    int timeout_s;
    uint64_t seed;
    size_t rotate; /* SIZE_MAX: twice the GPU's L2 */
    const char *json;
    const char *csv;
    const char *library;
    bool no_preload;                    /* the second side is NCCL, too */
    bool measures;                      /* NCCL_TUNER_PLUGIN is the tuner for measuring */
    const char *env[LC_BENCH_MAX_LIST]; /* NAME=VALUE for it */
    int n_env;
};

/* What a worker says of the machine; plain data, sent as it is. */
struct lc_bench_machine {
    int gpus;
    int driver; /* CUDA version of the driver, as CUDA writes it */
    int nccl;   /* as NCCL writes it */
    bool rig;   /* host memory instead of a GPU */
    size_t l2_bytes;
    char gpu[64];
    char nccl_path[256];
    char cudart_path[256];
};

struct lc_bench_series {
    double *us; /* all samples of all rounds, microseconds per call, maximum over ranks */
    size_t count;
    double
        *cpu; /* one a round: seconds for a GB of a rank's buffer, of all ranks; NaN: not known */
};

struct lc_bench_result {
    struct lc_bench_series series[LC_BENCH_VARIANTS];
    double *ratios; /* per round: plain median / our median; NULL with one variant */
    int rounds;
    int iters;
    int inner; /* calls per sample */
    int slots; /* buffers used in turn */
};

/* cases.c */
extern const struct lc_bench_dtype lc_bench_dtypes[];
extern const char *const lc_bench_op_names[];
extern const char *const lc_bench_variant_names[];
int lc_bench_dtype_find(const char *name); /* -1: unknown */
int lc_bench_op_find(const char *name);    /* likewise */

/* "nccl", "loongcomm", or "nccl-b" for a second side without the library. */
const char *lc_bench_side_name(const struct lc_bench_options *options,
                               enum lc_bench_variant variant);

bool lc_bench_is_sum(enum lc_bench_op op);

/* The buffer in whole elements; one that has a part for each rank in equal parts of whole 16 bytes where it has them,
 * as nccl-tests rounds. */
size_t lc_bench_round_bytes(enum lc_bench_op op, size_t bytes, size_t element, size_t ranks);

/* What a rank's call reads, and writes. */
size_t lc_bench_send_bytes(const struct lc_bench_case *kase, int ranks);
size_t lc_bench_recv_bytes(const struct lc_bench_case *kase, int ranks);

/* Every combination of the lists, equal ones once. The array is the caller's; the number or -errno; what
 * cannot be run is named. */
int lc_bench_cases(const struct lc_bench_options *options, int ranks, struct lc_bench_case **out);
void lc_bench_case_text(const struct lc_bench_case *kase, char *text, size_t size);
void lc_bench_size_text(size_t bytes, char *text, size_t size);

/* Largest magnitude of a reduction's terms such that no sum of `ranks` of them rounds; 0: none. */
int64_t lc_bench_term_max(const struct lc_bench_case *kase, int ranks);

/* options.c: 0, or a complaint on stderr and -EINVAL. */
int lc_bench_options_parse(int argc, char **argv, struct lc_bench_options *out);
int lc_bench_parse_sizes(const char *text, size_t *sizes, int max); /* the number, or -EINVAL */
int lc_bench_parse_lives(const char *text, double *lives, int max);
int lc_bench_parse_dtypes(const char *text, int *dtypes, int max);
void lc_bench_usage(FILE *out);

/* data.c. Rows as in capacity-padded expert dispatch: a chunk (what goes to one rank; where all get the same, or a sum,
 * the whole send buffer) is [local expert][capacity] rows, the first few of each expert live, the others zero.
 * All of it is a function of the case and the ranks, so that each rank knows what to expect. */
struct lc_bench_rows {
    size_t row_bytes;
    size_t rows; /* the last one may be cut short */
    size_t experts;
    size_t capacity; /* rows per expert; the last expert may have fewer */
};

void lc_bench_rows_layout(const struct lc_bench_case *kase, size_t bytes,
                          struct lc_bench_rows *out);
size_t lc_bench_rows_live(const struct lc_bench_case *kase, const struct lc_bench_rows *rows,
                          int src, int dst, size_t expert);
double lc_bench_live_share(const struct lc_bench_case *kase, int ranks); /* what was really drawn */
/* Of the rows of a rank's send buffer: bit r % 32 of bits[r / 32] is 1 where row r is not zero. The number of rows; 0: the
 * case has none that fill it. bits: all zero before, NULL: the number alone. */
size_t lc_bench_fill_mask(const struct lc_bench_case *kase, int ranks, int rank, uint32_t *bits);

void lc_bench_fill_send(const struct lc_bench_case *kase, int ranks, int rank, void *out);
void lc_bench_fill_expected(const struct lc_bench_case *kase, int ranks, int rank, void *out);
void lc_bench_encode(const struct lc_bench_dtype *dtype, int64_t value, void *out);

/* stats.c */
double lc_bench_percentile(double *values, size_t count, double percent); /* sorts; NaN if none */
double lc_bench_algbw(const struct lc_bench_case *kase, double us);       /* GB/s, as nccl-tests */
double lc_bench_busbw(const struct lc_bench_case *kase, int ranks, double us);

/* worker.c: main of a worker process; `fd` is its socket, `progress_fd` holds its progress page. */
int lc_bench_worker(int fd, int progress_fd, pid_t launcher, const char *variant);

/* Written by one worker, read by its launcher when it gives up waiting. Relaxed: a diagnosis may be a
 * call late. */
struct lc_bench_progress {
    _Atomic uint64_t entered; /* calls into NCCL begun, and returned from, since the start */
    _Atomic uint64_t returned;
};

enum lc_bench_request_kind {
    LC_BENCH_ASK_ID = 1, /* make a unique id */
    LC_BENCH_ASK_INIT,
    LC_BENCH_ASK_CASE,
    LC_BENCH_ASK_RUN,
    LC_BENCH_ASK_QUIT,
};

struct lc_bench_request {
    enum lc_bench_request_kind kind;
    int rank, ranks, device; /* INIT */
    ncclUniqueId id;
    int comm;                  /* INIT, RUN: which of LC_BENCH_COMMS */
    int ctas;                  /* INIT: the communicator has so many channels, 0: as NCCL chooses */
    struct lc_bench_case kase; /* CASE */
    size_t rotate;
    int warmup, iters, inner; /* RUN */
    bool verify;              /* poison before the last sample and check what it left */
    bool measures; /* INIT: NCCL must have loaded the tuner for measuring; RUN: it gets `way` */
    uint64_t way;  /* a word of plugin/tuner/measure.h */
};

/* A worker's first message carries `machine`; then one reply a request. Sent up to the last sample. */
struct lc_bench_reply {
    int error; /* 0 or -errno, then text says why */
    int slots; /* CASE */
    int samples;
    double cpu_s; /* RUN: of all threads but the one that calls, warm-up included */
    /* RUN with `measures`: NCCL has sent all calls, or none of them, the way that was asked; the last one's; INIT: the product's
     * tuner has a profile */
    bool taken, product;
    uint64_t choice;
    int channels; /* INIT with `measures`: of the communicator; 0: not known */
    char text[LC_BENCH_TEXT];
    struct lc_bench_machine machine;
    ncclUniqueId id;
    double us[LC_BENCH_MAX_ITERS];
};

/* How launchers agree. Every launcher calls the same functions in the same order; each wait is bounded. */
struct lc_bench_bootstrap {
    const struct lc_bench_bootstrap_ops *ops;
    int rank, size;             /* of this launcher */
    int local_rank, local_size; /* among those on this machine */
    int timeout_s;
};

struct lc_bench_bootstrap_ops {
    int (*bcast)(struct lc_bench_bootstrap *self, void *data, size_t bytes); /* from launcher 0 */
    /* `out` at launcher 0: size x bytes, in the order of ranks */
    int (*gather)(struct lc_bench_bootstrap *self, const void *data, size_t bytes, void *out);
    int (*barrier)(struct lc_bench_bootstrap *self);
    void (*close)(struct lc_bench_bootstrap *self);
    void (*abort)(struct lc_bench_bootstrap *self); /* ends the other launchers too */
};

int lc_bench_bootstrap_local(struct lc_bench_bootstrap *out);
int lc_bench_bootstrap_mpi(struct lc_bench_bootstrap *out); /* -ENOTSUP: built without MPI */

/* launcher.c: the workers of one launcher. */
struct lc_bench_child {
    pid_t pid; /* 0: none */
    int fd;
    struct lc_bench_progress *progress;
};

struct lc_bench_set {
    const char *name; /* of the side, for what is said */
    int first;        /* rank of children[0] */
    int count;
    int timeout_s;
    struct lc_bench_child *children;
};

/* What a worker sees of the machine, from one that is started for that and ended. */
int lc_bench_probe(int timeout_s, struct lc_bench_machine *out);

/* Starts this launcher's workers of `ranks` ranks and makes their communicator. `replies`, here and below:
 * room for one reply per worker. Whatever fails has been said on stderr. */
int lc_bench_set_open(const struct lc_bench_options *options, enum lc_bench_variant variant,
                      struct lc_bench_bootstrap *boot, int ranks,
                      const struct lc_bench_machine *machine, struct lc_bench_reply *replies,
                      struct lc_bench_set *out);

/* One communicator more over the workers of a set: comm, ctas, ranks and measures of `init`. */
int lc_bench_set_connect(struct lc_bench_set *set, struct lc_bench_bootstrap *boot,
                         const struct lc_bench_machine *machine,
                         const struct lc_bench_request *init, struct lc_bench_reply *replies);

/* Sends a request to every worker and waits for all replies. `what` is named when a worker fails, dies or
 * does not answer in time. */
int lc_bench_set_ask(struct lc_bench_set *set, const struct lc_bench_request *request,
                     const char *what, struct lc_bench_reply *replies);

int lc_bench_set_quit(struct lc_bench_set *set,
                      struct lc_bench_reply *replies); /* an orderly end */
void lc_bench_set_close(struct lc_bench_set *set);     /* kills who is left */

struct lc_bench {
    const struct lc_bench_options *options;
    struct lc_bench_machine machine;
    struct lc_bench_bootstrap boot;
    int ranks;
    int nodes; /* as NCCL counts them */
    size_t rotate;
    struct lc_bench_set sets[LC_BENCH_VARIANTS]; /* count 0: left out */
    struct lc_bench_reply *replies;              /* one per worker of a set */
    double *gathered;                            /* LC_BENCH_MAX_ITERS per launcher */
};

/* bench.c: the other launchers, the machine and room for replies; then the end of it: 0 or what went wrong, the exit code. */
int lc_bench_begin(struct lc_bench *bench);
int lc_bench_end(struct lc_bench *bench, int err);

/* measure.c */
/* The buffers of a case, at all ranks of all sets. */
int lc_bench_prepare(struct lc_bench *bench, const struct lc_bench_case *kase, const char *what,
                     int *out_slots);
/* One turn of one variant; `us` gets request->iters samples at launcher 0. `cpu` (or NULL): seconds of all ranks. */
int lc_bench_turn(struct lc_bench *bench, enum lc_bench_variant variant,
                  const struct lc_bench_request *request, const char *what, double *us,
                  double *cpu);

/* One case, all turns, in about budget_s. The result is complete at launcher 0 only, and the caller's to
 * free; after a failure there is none. */
int lc_bench_measure(struct lc_bench *bench, const struct lc_bench_case *kase, double budget_s,
                     struct lc_bench_result *out);
/* Calls of one case for that long that nobody counts. Never captured: ranks agree outside of graphs only. */
int lc_bench_settle(struct lc_bench *bench, const struct lc_bench_case *kase, double seconds);
void lc_bench_result_free(struct lc_bench_result *result);

/* output.c: the table, the JSON and the CSV file. */
struct lc_bench_output;
int lc_bench_output_open(const struct lc_bench *bench, int argc, char **argv,
                         struct lc_bench_output **out);
void lc_bench_output_progress(struct lc_bench_output *output, int index, int count,
                              const struct lc_bench_case *kase);
void lc_bench_output_result(struct lc_bench_output *output, const struct lc_bench_case *kase,
                            struct lc_bench_result *result);
int lc_bench_output_close(struct lc_bench_output *output, bool complete); /* finishes the files */

/* ways.c: `ways`, likewise. */
int lc_bench_ways(int argc, char **argv);

/* output.c: for other documents of the same schema. */
struct lc_json;
void lc_bench_write_machine(struct lc_json *json, const struct lc_bench *bench);

/* compare.c: `compare A B`; argv[0] is "compare". Returns the exit code. */
int lc_bench_compare(int argc, char **argv);

/* plot.c: `plot FILE...`, likewise. */
int lc_bench_plot(int argc, char **argv);

#endif
