/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/feedback.h"

#include "common/log.h"
#include "interpose/process.h"

#include <stdlib.h>
#include <string.h>

#define BUFFERS 512
#define UNIT    256 /* bytes */

struct buffer {
    const char *address;
    size_t count;
    enum lc_redop_kind redop;
    size_t at, bytes;
    uint64_t used; /* number of the call that used it last */
    bool captured; /* by a graph, which may be replayed: stays */
};

struct lc_feedback {
    const struct lc_backend *backend;
    struct lc_ledger *ledger; /* NULL: no communicator has it */
    char *memory;
    size_t bytes;
    size_t touched; /* beyond it all is zero still */
    uint64_t calls;
    struct buffer buffers[BUFFERS]; /* by place */
    size_t n;
};

/* ---- set-up and end ---- */

static void say_none(const struct lc_reducer *reducer, size_t bytes, const char *why)
{
    lc_warn_once("device %d: no memory of %zu MB for error feedback (%s): there is none",
                 reducer->device, bytes >> 20, why);
}

static bool allocate(struct lc_feedback *feedback, struct lc_reducer *reducer, cudaStream_t stream)
{
    const struct lc_backend *backend = reducer->backend;
    struct lc_guard guard;
    int err = 0;

    if (!lc_guard_begin(backend, reducer->device, &guard))
        return false;
    if (!feedback->memory)
        err = backend->cudaMalloc((void **)&feedback->memory, feedback->bytes);
    if (!err)
        err = backend->cudaMemsetAsync(feedback->memory, 0, feedback->bytes, stream);
    if (!err) /* the first use of the memory comes behind it, on whatever stream */
        err = backend->cudaEventRecord(reducer->serial, stream);
    if (err) {
        (void)backend->cudaGetLastError(); /* not the program's error */
        say_none(reducer, feedback->bytes, backend->lk_error_text(err));
    }
    lc_guard_end(backend, reducer->device, &guard);
    return err == 0;
}

void lc_feedback_set_up(struct lc_reducer *reducer, cudaStream_t stream, struct lc_ledger *ledger)
{
    const struct lc_config *config = lc_process_config();
    struct lc_feedback *feedback = reducer->feedback;

    if (!config->error_feedback || config->allreduce_wire == LC_WIRE_DATA)
        return;
    if (!feedback)
        feedback = reducer->feedback = calloc(1, sizeof(*feedback));
    if (!feedback) {
        say_none(reducer, config->feedback_max, "out of memory");
        return;
    }
    feedback->backend = reducer->backend;
    feedback->bytes = config->feedback_max / UNIT * UNIT;
    feedback->n = feedback->touched = 0;
    feedback->calls = 0;
    feedback->ledger = allocate(feedback, reducer, stream) ? ledger : NULL;
}

void lc_feedback_detach(struct lc_feedback *feedback)
{
    if (feedback)
        feedback->ledger = NULL;
}

void lc_feedback_free(struct lc_feedback *feedback)
{
    if (!feedback)
        return;
    if (feedback->memory)
        (void)feedback->backend->cudaFree(feedback->memory);
    free(feedback);
}

/* ---- which buffer has which place ---- */

static struct buffer *find(struct lc_feedback *feedback, const struct lc_op *op,
                           const struct lc_redop *redop, size_t bytes)
{
    for (size_t i = 0; i < feedback->n; i++) {
        struct buffer *buffer = &feedback->buffers[i];

        if (buffer->address == op->send && buffer->count == op->count &&
            buffer->redop == redop->kind && buffer->bytes == bytes)
            return buffer;
    }
    return NULL;
}

static void drop(struct lc_feedback *feedback, size_t i)
{
    memmove(&feedback->buffers[i], &feedback->buffers[i + 1],
            (--feedback->n - i) * sizeof(struct buffer));
}

/* What lay where this one lies is no more. */
static void drop_overlapped(struct lc_feedback *feedback, const struct lc_op *op)
{
    const char *begin = op->send, *end = begin + op->count * sizeof(float);

    for (size_t i = feedback->n; i-- > 0;) {
        const struct buffer *buffer = &feedback->buffers[i];

        if (!buffer->captured && buffer->address < end &&
            begin < buffer->address + buffer->count * sizeof(float))
            drop(feedback, i);
    }
}

/* A buffer that has not come again while all others came several times will not. */
static bool drop_stale(struct lc_feedback *feedback)
{
    uint64_t age = 8 * feedback->n + 64;
    size_t before = feedback->n;

    for (size_t i = feedback->n; i-- > 0;) {
        const struct buffer *buffer = &feedback->buffers[i];

        if (!buffer->captured && feedback->calls - buffer->used > age)
            drop(feedback, i);
    }
    return feedback->n < before;
}

/* The first gap that holds it; NULL: none. */
static struct buffer *place(struct lc_feedback *feedback, size_t bytes)
{
    size_t at = 0, i = 0;

    if (feedback->n == BUFFERS)
        return NULL;
    while (i < feedback->n && feedback->buffers[i].at - at < bytes) {
        at = feedback->buffers[i].at + feedback->buffers[i].bytes;
        i++;
    }
    if (bytes > feedback->bytes - at)
        return NULL;
    memmove(&feedback->buffers[i + 1], &feedback->buffers[i],
            (feedback->n++ - i) * sizeof(struct buffer));
    feedback->buffers[i] = (struct buffer){ .at = at, .bytes = bytes };
    return &feedback->buffers[i];
}

/* In stream order, unless that would be each time that a graph is replayed. */
static bool clear(struct lc_feedback *feedback, const struct buffer *buffer,
                  const struct lc_span *span)
{
    size_t end = buffer->at + buffer->bytes;

    if (buffer->at < feedback->touched &&
        (span->capture || feedback->backend->cudaMemsetAsync(feedback->memory + buffer->at, 0,
                                                             buffer->bytes, span->stream)))
        return false;
    if (end > feedback->touched) {
        lc_add(&feedback->ledger->feedback_bytes, end - feedback->touched);
        feedback->touched = end;
    }
    return true;
}

static struct buffer *make(struct lc_feedback *feedback, const struct lc_op *op,
                           const struct lc_redop *redop, size_t bytes, const struct lc_span *span)
{
    struct buffer *buffer;

    drop_overlapped(feedback, op);
    buffer = place(feedback, bytes);
    if (!buffer && drop_stale(feedback))
        buffer = place(feedback, bytes);
    if (!buffer) {
        lc_warn_once(
            "error feedback: no room for all buffers in LOONGCOMM_FEEDBACK_MAX (%zu MB): some go without",
            feedback->bytes >> 20);
        return NULL;
    }
    if (!clear(feedback, buffer, span)) {
        (void)feedback->backend->cudaGetLastError(); /* not the program's error */
        drop(feedback, (size_t)(buffer - feedback->buffers));
        return NULL;
    }
    buffer->address = op->send;
    buffer->count = op->count;
    buffer->redop = redop->kind;
    return buffer;
}

static bool has(const struct lc_reducer *reducer)
{
    return reducer->feedback && reducer->feedback->ledger;
}

float *lc_feedback_of(const struct lc_span *span, const struct lc_op *op,
                      const struct lc_redop *redop, uint64_t elements)
{
    struct lc_feedback *feedback = span->reducer->feedback;
    size_t bytes = (elements * sizeof(float) + UNIT - 1) / UNIT * UNIT;
    struct buffer *buffer;

    if (!has(span->reducer) || op->count == 0)
        return NULL;
    feedback->calls++;
    buffer = find(feedback, op, redop, bytes);
    if (!buffer)
        buffer = make(feedback, op, redop, bytes, span);
    if (!buffer) {
        lc_add(&feedback->ledger->unfed, 1);
        return NULL;
    }
    buffer->used = feedback->calls;
    buffer->captured |= span->capture != 0;
    lc_add(&feedback->ledger->fed, 1);
    return (float *)(feedback->memory + buffer->at);
}

void lc_feedback_pass_group(struct lc_reducer *reducer, uint64_t calls)
{
    if (!has(reducer))
        return;
    lc_add(&reducer->feedback->ledger->unfed, calls);
    lc_warn_once("error feedback: all-reduces in groups go without");
}

void lc_feedback_pass_rings(struct lc_reducer *reducer)
{
    if (!has(reducer))
        return;
    lc_add(&reducer->feedback->ledger->unfed, 1);
    lc_warn_once("error feedback: all-reduces through peers' memory (LOONGCOMM_PEER) go without");
}
