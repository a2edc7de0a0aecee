/* SPDX-License-Identifier: Apache-2.0
 *
 * What communicators leave: nothing waits for the device where others may be under way, and nothing goes that is in use. */
#include "interpose/agree.h"
#include "interpose/feedback.h"
#include "interpose/peers.h"
#include "interpose/policy.h"
#include "interpose/pool.h"
#include "interpose/process.h"
#include "interpose/reduce.h"
#include "interpose/rounding.h"
#include "interpose/verify.h"
#include "tests/check.h"

#include <string.h>

static int allocations, frees, peers_frees, counts;
static bool busy, peers_busy;
static unsigned long long capture; /* that every stream is part of */
static bool waits_outside;         /* the last wait was for what is no part of the graph */

static cudaError_t query(cudaEvent_t event)
{
    (void)event;
    return busy ? cudaErrorNotReady : cudaSuccess;
}

static cudaError_t make_event(cudaEvent_t *event, unsigned int flags)
{
    static char some;

    (void)flags;
    *event = (cudaEvent_t)&some;
    return cudaSuccess;
}

static cudaError_t record(cudaEvent_t event, cudaStream_t stream)
{
    (void)event;
    (void)stream;
    return cudaSuccess;
}

static cudaError_t end_event(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}

static cudaError_t allocate(void **out, size_t bytes)
{
    static char some[8];

    (void)bytes;
    *out = &some[allocations++];
    return cudaSuccess;
}

static cudaError_t release(void *memory)
{
    (void)memory;
    frees++;
    return cudaSuccess;
}

static cudaError_t current(int *device)
{
    *device = 0;
    return cudaSuccess;
}

static int load(void)
{
    return 0;
}

static cudaError_t last_error(void)
{
    return cudaSuccess;
}

static cudaError_t wait_for(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    (void)stream;
    (void)event;
    waits_outside = flags == cudaEventWaitExternal;
    return cudaSuccess;
}

static cudaError_t record_outside(cudaEvent_t event, cudaStream_t stream, unsigned int flags)
{
    (void)event;
    (void)stream;
    CHECK(flags == cudaEventRecordExternal);
    return cudaSuccess;
}

/* As reduce.c calls it. The graph is too wide to be looked at. */
static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                unsigned long long *id, void *graph, void *nodes, void *edges,
                                void *count)
{
    (void)stream;
    (void)graph;
    (void)nodes;
    (void)edges;
    *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    *id = capture;
    if (count)
        *(size_t *)count = 1000;
    return cudaSuccess;
}

/* ---- what belongs to other files, stood in for ---- */

static struct lc_backend fake = { .lk_load_all = load,
                                  .cudaMalloc = allocate,
                                  .cudaFree = release,
                                  .cudaEventCreateWithFlags = make_event,
                                  .cudaEventDestroy = end_event,
                                  .cudaEventQuery = query,
                                  .cudaGetDevice = current,
                                  .cudaEventRecord = record,
                                  .cudaEventRecordWithFlags = record_outside,
                                  .cudaStreamWaitEvent = wait_for,
                                  .cudaGetLastError = last_error };

const struct lc_backend *lc_backend(void)
{
    return &fake;
}

void lc_backend_load(int device)
{
    (void)device;
}

void lc_peers_detach(struct lc_peers *peers)
{
    (void)peers;
}

void lc_peers_count(struct lc_peers *peers)
{
    (void)peers;
    counts++;
}

bool lc_peers_free(struct lc_peers *peers)
{
    peers_frees += peers && !peers_busy;
    return !peers_busy;
}

void lc_feedback_detach(struct lc_feedback *feedback)
{
    (void)feedback;
}

void lc_feedback_free(struct lc_feedback *feedback)
{
    (void)feedback;
}

float *lc_feedback_of(const struct lc_span *span, const struct lc_owing *owing)
{
    (void)span;
    (void)owing;
    return NULL;
}

enum lk_rounding lc_rounding_of(const struct lc_reducer *reducer, struct lk_rng *out)
{
    (void)reducer;
    (void)out;
    return LK_NEAREST;
}

int lc_rounding_drawn(const struct lc_reducer *reducer, uint64_t numbers, cudaStream_t stream)
{
    (void)reducer;
    (void)numbers;
    (void)stream;
    return 0;
}

void lc_rounding_free(struct lc_reducer *reducer)
{
    (void)reducer;
}

void lc_verify_detach(struct lc_verify *verify)
{
    (void)verify;
}

void lc_verify_free(struct lc_verify *verify)
{
    (void)verify;
}

ncclResult_t lc_verify_plain(struct lc_reducer *reducer, const struct lc_op *op,
                             const struct lc_checked *how, const struct lc_real *real,
                             struct lc_check *check)
{
    (void)reducer;
    (void)op;
    (void)how;
    (void)real;
    (void)check;
    return ncclSuccess;
}

void lc_verify_compare(struct lc_reducer *reducer, const struct lc_check *check,
                       const struct lc_op *op, enum lc_outcome outcome)
{
    (void)reducer;
    (void)check;
    (void)op;
    (void)outcome;
}

void lc_agree_break(struct lc_agree *agree, ncclResult_t error)
{
    (void)agree;
    (void)error;
}

const struct lc_config *lc_process_config(void)
{
    return NULL;
}

bool lc_wire_is_accurate(const struct lc_config *config, int ranks)
{
    (void)config;
    return ranks < 0;
}

static struct lc_reducer *begin(void)
{
    static char peers;
    struct lc_reducer *reducer = lc_reducer_new(0, NULL, 4096);

    CHECK(reducer && reducer->scratch);
    reducer->peers = (struct lc_peers *)&peers;
    peers_frees = frees = allocations = counts = 0;
    return reducer;
}

static void end(struct lc_reducer *reducer)
{
    busy = peers_busy = false;
    lc_reducer_free(reducer);
    lc_reducer_free_all();
    CHECK(lc_pool_spare() == 0);
}

/* An abort, or a destruction whose last reference a watchdog drops. */
static void what_is_in_use_is_kept_without_waiting(void)
{
    struct lc_reducer *first = begin(), *second;

    busy = true;
    lc_reducer_free(first);
    lc_reducer_free_ended();
    CHECK(lc_pool_spare() == 0 && peers_frees == 0);
    busy = false;
    peers_busy = true; /* its rings were just being set up */
    lc_reducer_free_ended();
    CHECK(lc_pool_spare() == 0 && peers_frees == 0);
    peers_busy = false;
    lc_reducer_free_ended();
    CHECK(lc_pool_spare() == 4096 && peers_frees == 1 && frees == 0);
    second = lc_reducer_new(0, NULL, 4096);
    CHECK(second && allocations == 0 && lc_pool_spare() == 0); /* its scratch is used again */
    end(second);
    CHECK(frees == 1); /* nobody is left that could be kept waiting */
}

static void what_fits_badly_is_left_for_others(void)
{
    struct lc_reducer *first = begin(), *small, *other;

    lc_reducer_free(first);
    small = lc_reducer_new(0, NULL, 1024);
    other = lc_reducer_new(1, NULL, 4096);
    CHECK(small && other && allocations == 2 && lc_pool_spare() == 4096);
    lc_reducer_free(small);
    end(other);
}

static void graphs_keep_what_an_abort_leaves(void)
{
    struct lc_reducer *aborted = begin();

    aborted->captured_uses = 1;
    lc_reducer_free(aborted);
    lc_reducer_free_ended();
    CHECK(lc_pool_spare() == 0 && peers_frees == 0);
    end(NULL);
    CHECK(peers_frees == 1);
}

/* They are not replayed behind a destruction. */
static void a_destruction_in_order_counts_and_ends_graphs(void)
{
    struct lc_reducer *reducer = begin();

    reducer->captured_uses = 1;
    lc_reducer_settle(reducer);
    CHECK(counts == 1);
    lc_reducer_free(reducer);
    lc_reducer_free_ended();
    CHECK(lc_pool_spare() == 4096 && peers_frees == 1 && frees == 0);
    end(NULL);
}

/* A failed call: no event says when what it has launched is over. */
static void what_no_event_ends_stays_to_the_last(void)
{
    struct lc_reducer *reducer = begin();

    reducer->open = true;
    lc_reducer_free(reducer);
    lc_reducer_free_ended();
    CHECK(lc_pool_spare() == 0 && peers_frees == 0);
    end(NULL);
    CHECK(peers_frees == 1 && frees == 1);
}

static void use_in(struct lc_reducer *reducer, unsigned long long id)
{
    struct lc_span span;

    capture = id;
    CHECK(lc_span_begin(reducer, NULL, &span) == 0 && span.capture == id);
    CHECK(lc_span_wait(&span) == 0 && lc_span_record(&span) == 0);
    lc_span_end(&span);
    capture = 0;
}

/* Uses in one graph follow each other by its edges, however many graphs are made in the meantime. */
static void a_graph_may_be_made_around_many(void)
{
    __typeof__(capture_info) *info = capture_info;
    struct lc_reducer *reducer = begin();

    memcpy(&fake.cudaStreamGetCaptureInfo, &info, sizeof(info));
    for (unsigned long long id = 10; id < 100; id++) {
        use_in(reducer, 1);
        CHECK(waits_outside == (id == 10));
        use_in(reducer, id);
        CHECK(waits_outside);
        use_in(reducer, id);
        CHECK(!waits_outside);
    }
    lc_reducer_settle(reducer);
    end(reducer);
}

int main(void)
{
    a_graph_may_be_made_around_many();
    what_is_in_use_is_kept_without_waiting();
    what_fits_badly_is_left_for_others();
    graphs_keep_what_an_abort_leaves();
    a_destruction_in_order_counts_and_ends_graphs();
    what_no_event_ends_stays_to_the_last();
    return 0;
}
