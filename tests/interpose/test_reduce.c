/* SPDX-License-Identifier: Apache-2.0
 *
 * Scratch that an aborted communicator has left, and what becomes of its peers' memory. */
#include "interpose/agree.h"
#include "interpose/feedback.h"
#include "interpose/peers.h"
#include "interpose/policy.h"
#include "interpose/process.h"
#include "interpose/reduce.h"
#include "interpose/rounding.h"
#include "interpose/verify.h"
#include "tests/check.h"

static int frees, peers_frees;

static cudaError_t nothing_left(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
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
    static char some;

    (void)bytes;
    *out = &some;
    return cudaSuccess;
}

static cudaError_t release(void *memory)
{
    (void)memory;
    frees++;
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

/* ---- what belongs to other files, stood in for ---- */

static const struct lc_backend fake = { .lk_load_all = load,
                                        .cudaMalloc = allocate,
                                        .cudaFree = release,
                                        .cudaEventCreateWithFlags = make_event,
                                        .cudaEventDestroy = end_event,
                                        .cudaEventQuery = nothing_left,
                                        .cudaEventRecord = record,
                                        .cudaGetLastError = last_error };

const struct lc_backend *lc_backend(void)
{
    return &fake;
}

void lc_backend_load(int device)
{
    (void)device;
}

bool lc_guard_begin(const struct lc_backend *backend, int device, struct lc_guard *guard)
{
    (void)backend;
    (void)device;
    (void)guard;
    return true;
}

void lc_guard_end(const struct lc_backend *backend, int device, const struct lc_guard *guard)
{
    (void)backend;
    (void)device;
    (void)guard;
}

void lc_peers_detach(struct lc_peers *peers)
{
    (void)peers;
}

void lc_peers_give_back(struct lc_peers *peers)
{
    (void)peers;
}

void lc_peers_free(struct lc_peers *peers)
{
    peers_frees += peers != NULL;
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

static void nothing_is_freed_where_operations_are_called(void)
{
    static char peers;
    struct lc_reducer *first = lc_reducer_new(0, NULL, 4096), *second;

    CHECK(first);
    first->peers = (struct lc_peers *)&peers;
    lc_reducer_free(first, true); /* its communicator was aborted */
    second = lc_reducer_new(0, NULL, 4096);
    CHECK(second == first && !second->peers); /* its scratch is used again */
    CHECK(frees == 0 && peers_frees == 0);    /* that would wait for all work of the device */
    lc_reducer_free(second, false);           /* in order: here the device is waited for */
    CHECK(frees == 1 && peers_frees == 1);
}

int main(void)
{
    nothing_is_freed_where_operations_are_called();
    return 0;
}
