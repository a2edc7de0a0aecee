/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels library uses of the runtime's streams and events, on this processor, where everything is done at once. A
 * stream that was made here belongs to a caller's stream from when it waits for an event of that one until that one waits
 * for an event recorded behind the last launch. Events hold the time at which they were recorded.
 */
#include "tests/kernels/fake/streams.h"

#include <stdlib.h>

/* For tests, by name. */
int fake_streams_used;                    /* streams launched on that were made here */
int fake_streams_left;                    /* that still belong to a caller's */
unsigned long long fake_streams_captured; /* the capture they are part of; 0: none */
unsigned long long fake_caller_captured;  /* likewise any other stream */

float fake_ms;

struct memory {
    const char *base;
    size_t bytes;
};

struct fake_stream {
    struct fake_stream *next; /* of all that exist */
    bool forked, recorded;    /* recorded: an event, since the last launch */
    struct memory workspace;  /* of the last launch since it was forked */
};

struct fake_event {
    float ms;
    struct fake_stream *stream; /* it was recorded on; NULL: one of the caller's */
};

static struct fake_stream *streams;
static struct memory
    callers; /* workspace of the last launch on any other stream, while one of these is forked */

static struct fake_stream *find(cudaStream_t stream)
{
    struct fake_stream *at = streams;

    while (at && (void *)at != (void *)stream)
        at = at->next;
    return at;
}

static bool overlap(const struct memory *one, const struct memory *other)
{
    return one->bytes && other->bytes && one->base < other->base + other->bytes &&
           other->base < one->base + one->bytes;
}

bool fake_launch(cudaStream_t stream, const void *workspace, size_t bytes)
{
    const struct memory memory = { workspace, bytes };
    struct fake_stream *own = find(stream);

    for (struct fake_stream *at = streams; at; at = at->next)
        if (at != own && at->forked && overlap(&memory, &at->workspace))
            return false;
    if (!own) {
        callers = fake_streams_left ? memory : (struct memory){ NULL, 0 };
        return true;
    }
    fake_streams_used++;
    own->recorded = false;
    own->workspace = memory;
    return own->forked && !overlap(&memory, &callers);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    struct fake_stream *stream = calloc(1, sizeof(*stream));

    if (!stream)
        return cudaErrorMemoryAllocation;
    stream->next = streams;
    streams = stream;
    *out = (cudaStream_t)(void *)stream;
    return flags == cudaStreamNonBlocking ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    struct fake_stream **at = &streams, *own = find(stream);

    while (*at && *at != own)
        at = &(*at)->next;
    if (!own)
        return cudaErrorInvalidResourceHandle;
    *at = own->next;
    free(own);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    struct fake_event *recorded = (struct fake_event *)(void *)event;
    struct fake_stream *own = find(stream);

    if (own && !recorded->stream && !own->forked) {
        own->forked = true;
        own->workspace = callers = (struct memory){ NULL, 0 };
        fake_streams_left++;
    }
    if (!own && recorded->stream && recorded->stream->recorded && recorded->stream->forked) {
        recorded->stream->forked = false;
        fake_streams_left--;
    }
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count)
{
    *id = find(stream) ? fake_streams_captured : fake_caller_captured;
    *status = *id ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device)
{
    *out = 132;
    return attribute == cudaDevAttrMultiProcessorCount ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    struct fake_event *event = calloc(1, sizeof(*event));

    *out = (cudaEvent_t)(void *)event;
    return event ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    return cudaEventCreate(out);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    struct fake_event *recorded = (struct fake_event *)(void *)event;

    recorded->ms = fake_ms;
    recorded->stream = find(stream);
    if (recorded->stream)
        recorded->stream->recorded = true;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    *ms = ((struct fake_event *)(void *)end)->ms - ((struct fake_event *)(void *)begin)->ms;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return "text of an error";
}
