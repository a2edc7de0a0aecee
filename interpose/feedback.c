/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/feedback.h"

#include "common/log.h"
#include "interpose/pool.h"
#include "interpose/process.h"

#include <stdlib.h>
#include <string.h>

#define BUFFERS 512
#define UNIT    256 /* bytes */

/* Of one buffer of a list. */
struct tensor {
    const char *address;
    uint64_t count; /* elements of all parts */
};

struct buffer {
    struct tensor *tensors; /* in the order of the call; owned */
    size_t n;
    enum lc_redop_kind redop;
    uint64_t layout;
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

static void drop(struct lc_feedback *feedback, size_t i)
{
    free(feedback->buffers[i].tensors);
    memmove(&feedback->buffers[i], &feedback->buffers[i + 1],
            (--feedback->n - i) * sizeof(struct buffer));
}

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
    int err;

    if (!lc_guard_begin(backend, reducer->device, &guard))
        return false;
    err = lc_pool_take(backend, LC_MEMORY_DEVICE, reducer->device, feedback->bytes,
                       (void **)&feedback->memory);
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
    struct lc_feedback *feedback;

    if (!config->error_feedback || config->allreduce_wire == LC_WIRE_DATA)
        return;
    feedback = reducer->feedback = calloc(1, sizeof(*feedback));
    if (!feedback) {
        say_none(reducer, config->feedback_max, "out of memory");
        return;
    }
    feedback->backend = reducer->backend;
    feedback->bytes = config->feedback_max / UNIT * UNIT;
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
    lc_pool_give(feedback->memory);
    while (feedback->n)
        drop(feedback, feedback->n - 1);
    free(feedback);
}

/* ---- which buffer has which place ---- */

static struct tensor tensor_of(const struct lc_owing *owing, size_t i)
{
    return (struct tensor){ owing->list[i].in, owing->parts * owing->list[i].count };
}

static bool is_for(const struct buffer *buffer, const struct lc_owing *owing, size_t bytes)
{
    if (buffer->n != owing->n || buffer->redop != owing->redop || buffer->bytes != bytes ||
        buffer->layout != owing->layout)
        return false;
    for (size_t i = 0; i < owing->n; i++) {
        struct tensor tensor = tensor_of(owing, i);

        if (buffer->tensors[i].address != tensor.address ||
            buffer->tensors[i].count != tensor.count)
            return false;
    }
    return true;
}

static struct buffer *find(struct lc_feedback *feedback, const struct lc_owing *owing, size_t bytes)
{
    for (size_t i = 0; i < feedback->n; i++) {
        if (is_for(&feedback->buffers[i], owing, bytes))
            return &feedback->buffers[i];
    }
    return NULL;
}

/* ---- what lies across what ---- */

struct range {
    const char *begin;
    const char *end; /* in a sorted list the last one of all up to it */
};

static struct range range_of(struct tensor tensor)
{
    return (struct range){ tensor.address, tensor.address + tensor.count * sizeof(float) };
}

static int by_begin(const void *a, const void *b)
{
    const struct range *left = a, *right = b;

    return (left->begin > right->begin) - (left->begin < right->begin);
}

/* NULL: no memory. */
static struct range *sort_ranges(const struct lc_owing *owing)
{
    struct range *ranges = calloc(owing->n, sizeof(*ranges));

    if (!ranges)
        return NULL;
    for (size_t i = 0; i < owing->n; i++)
        ranges[i] = range_of(tensor_of(owing, i));
    qsort(ranges, owing->n, sizeof(*ranges), by_begin);
    for (size_t i = 1; i < owing->n; i++) {
        if (ranges[i].end < ranges[i - 1].end)
            ranges[i].end = ranges[i - 1].end;
    }
    return ranges;
}

static bool overlaps(const struct range *ranges, size_t n, struct range other)
{
    size_t low = 0, high = n; /* before `low` all begin before the other one ends */

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (ranges[middle].begin < other.end)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 && ranges[low - 1].end > other.begin;
}

static bool buffer_overlaps(const struct buffer *buffer, const struct range *ranges, size_t n)
{
    for (size_t i = 0; i < buffer->n; i++) {
        if (buffer->tensors[i].count && overlaps(ranges, n, range_of(buffer->tensors[i])))
            return true;
    }
    return false;
}

/* What lay where these lie is no more. False: no memory to find out. */
static bool drop_overlapped(struct lc_feedback *feedback, const struct lc_owing *owing)
{
    struct range *ranges = sort_ranges(owing);

    if (!ranges)
        return false;
    for (size_t i = feedback->n; i-- > 0;) {
        const struct buffer *buffer = &feedback->buffers[i];

        if (!buffer->captured && buffer_overlaps(buffer, ranges, owing->n))
            drop(feedback, i);
    }
    free(ranges);
    return true;
}

/* ---- places ---- */

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

/* The first gap from `from` on that holds it; NULL: none. */
static struct buffer *place(struct lc_feedback *feedback, size_t bytes, size_t from)
{
    size_t at = from, i = 0;

    if (feedback->n == BUFFERS)
        return NULL;
    while (i < feedback->n && feedback->buffers[i].at < at + bytes) {
        size_t end = feedback->buffers[i].at + feedback->buffers[i].bytes;

        at = at < end ? end : at;
        i++;
    }
    if (at > feedback->bytes || bytes > feedback->bytes - at)
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

static struct buffer *place_or_say(struct lc_feedback *feedback, size_t bytes,
                                   const struct lc_span *span)
{
    size_t from = span->capture ? feedback->touched : 0; /* what is zero already */
    struct buffer *buffer = place(feedback, bytes, from);

    if (!buffer && drop_stale(feedback))
        buffer = place(feedback, bytes, from);
    if (!buffer)
        lc_warn_once(
            "error feedback: no room for all buffers in LOONGCOMM_FEEDBACK_MAX (%zu MB) and %d lists of them: some go without",
            feedback->bytes >> 20, BUFFERS);
    return buffer;
}

static struct buffer *make(struct lc_feedback *feedback, const struct lc_owing *owing, size_t bytes,
                           const struct lc_span *span)
{
    struct tensor *tensors = calloc(owing->n, sizeof(*tensors));
    struct buffer *buffer = tensors && drop_overlapped(feedback, owing)
                                ? place_or_say(feedback, bytes, span)
                                : NULL;

    if (!buffer) {
        free(tensors);
        return NULL;
    }
    buffer->tensors = tensors;
    if (!clear(feedback, buffer, span)) {
        (void)feedback->backend->cudaGetLastError(); /* not the program's error */
        drop(feedback, (size_t)(buffer - feedback->buffers));
        return NULL;
    }
    for (size_t i = 0; i < owing->n; i++)
        tensors[i] = tensor_of(owing, i);
    buffer->n = owing->n;
    buffer->redop = owing->redop;
    buffer->layout = owing->layout;
    return buffer;
}

static bool has(const struct lc_reducer *reducer)
{
    return reducer->feedback && reducer->feedback->ledger;
}

float *lc_feedback_of(const struct lc_span *span, const struct lc_owing *owing)
{
    struct lc_feedback *feedback = span->reducer->feedback;
    size_t bytes = (owing->elements * sizeof(float) + UNIT - 1) / UNIT * UNIT;
    struct buffer *buffer;

    if (!has(span->reducer) || owing->elements == 0)
        return NULL;
    feedback->calls++;
    buffer = find(feedback, owing, bytes);
    if (!buffer)
        buffer = make(feedback, owing, bytes, span);
    if (!buffer) {
        lc_add(&feedback->ledger->unfed, owing->n);
        return NULL;
    }
    buffer->used = feedback->calls;
    buffer->captured |= span->capture != 0;
    lc_add(&feedback->ledger->fed, owing->n);
    return (float *)(feedback->memory + buffer->at);
}

void lc_feedback_pass_group(struct lc_reducer *reducer, uint64_t calls)
{
    if (!has(reducer))
        return;
    lc_add(&reducer->feedback->ledger->unfed, calls);
    lc_warn_once("error feedback: all-reduces in groups that go through NCCL go without");
}
