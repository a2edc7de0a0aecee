/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads that each push a chain of dependent steps over several streams, by events, host functions and graphs. The
 * steps do not commute and the chain's memory is plain: a lost edge is a wrong value, and a race to a sanitizer.
 */
#include "tests/rig/test_cudart.h"

#define THREADS 4
#define STREAMS 3
#define EVENTS  4
#define STEPS   120

struct chain {
    cudaStream_t streams[STREAMS];
    cudaEvent_t events[EVENTS];
    cudaEvent_t last; /* recorded behind the latest step */
    unsigned random;
    unsigned value, expected;
    unsigned steps; /* so far */
    int *dev;
};

static unsigned draw(struct chain *chain, unsigned below)
{
    chain->random = chain->random * 1664525u + 1013904223u;
    return (chain->random >> 16) % below;
}

struct link {
    struct chain *chain;
    unsigned number;
};

static unsigned after(unsigned value, unsigned number)
{
    return value * 31 + number;
}

static void run_link(void *arg)
{
    struct link *link = arg;

    lcrig_buffer_use(&link->chain->value, sizeof(link->chain->value), true);
    link->chain->value = after(link->chain->value, link->number);
}

static void run_host_link(void *arg)
{
    struct link *link = arg;

    link->chain->value = after(link->chain->value, link->number);
    free(link);
}

static struct link *make_link(struct chain *chain)
{
    struct link *link = malloc(sizeof(*link));

    CHECK(link);
    *link = (struct link){ chain, ++chain->steps };
    return link;
}

static unsigned enqueue_link(struct chain *chain, cudaStream_t stream)
{
    struct link *link = make_link(chain);
    struct lcrig_work work = { .name = "link", .run = run_link, .release = free, .arg = link };

    OK(lcrig_enqueue(stream, &work));
    return chain->steps;
}

static void record(struct chain *chain, cudaStream_t stream)
{
    cudaEvent_t event = chain->events[draw(chain, EVENTS)];

    OK(cudaEventRecord(event, stream));
    chain->last = event;
}

static void plain_step(struct chain *chain, cudaStream_t stream)
{
    if (draw(chain, 4))
        enqueue_link(chain, stream);
    else
        OK(cudaLaunchHostFunc(stream, run_host_link, make_link(chain)));
    chain->expected = after(chain->expected, chain->steps);
}

/* A graph of two branches, one behind the other, launched twice and destroyed under way. */
static void graph_step(struct chain *chain, cudaStream_t stream)
{
    cudaStream_t side;
    cudaEvent_t edge;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    unsigned links[3];

    OK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&edge, cudaEventDisableTiming));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    links[0] = enqueue_link(chain, stream);
    OK(cudaEventRecord(edge, stream));
    OK(cudaStreamWaitEvent(side, edge, 0));
    links[1] = enqueue_link(chain, side);
    OK(cudaEventRecord(edge, side));
    OK(cudaStreamWaitEvent(stream, edge, 0));
    links[2] = enqueue_link(chain, stream);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaEventDestroy(edge));
    OK(cudaStreamDestroy(side));
    for (int i = 0; i < 6; i++)
        chain->expected = after(chain->expected, links[i % 3]);
}

/* Throws an event and a stream away while work may wait for them, and puts fresh ones in their places. */
static void renew_step(struct chain *chain, unsigned at)
{
    unsigned other = draw(chain, EVENTS);

    if (chain->events[other] != chain->last) {
        OK(cudaEventDestroy(chain->events[other]));
        OK(cudaEventCreateWithFlags(&chain->events[other], cudaEventDisableTiming));
    }
    OK(cudaStreamDestroy(chain->streams[at]));
    OK(cudaStreamCreate(&chain->streams[at]));
}

static void step(struct chain *chain)
{
    unsigned at = draw(chain, STREAMS + 1);
    cudaStream_t stream = at == STREAMS ? 0 : chain->streams[at];

    if (chain->last)
        OK(cudaStreamWaitEvent(stream, chain->last, 0));
    if (at < STREAMS && !draw(chain, 6)) {
        graph_step(chain, stream);
    } else {
        plain_step(chain, stream);
        OK(cudaMemsetAsync(chain->dev, (int)chain->steps & 0x7f, 64, stream));
    }
    record(chain, stream);
    if (at < STREAMS && !draw(chain, 8))
        renew_step(chain, at);
    if (!draw(chain, 10))
        OK(cudaEventSynchronize(chain->last));
}

static void *run(void *arg)
{
    int device = (int)(size_t)arg;
    struct chain chain = { .random = 77u + (unsigned)device };

    lcrig_set_thread_rank(device);
    OK(cudaSetDevice(device));
    OK(cudaMalloc((void **)&chain.dev, 64));
    for (int i = 0; i < STREAMS; i++)
        OK(cudaStreamCreate(&chain.streams[i]));
    for (int i = 0; i < EVENTS; i++)
        OK(cudaEventCreateWithFlags(&chain.events[i], cudaEventDisableTiming));
    for (int i = 0; i < STEPS; i++)
        step(&chain);
    OK(cudaDeviceSynchronize());
    CHECK(chain.value == chain.expected);
    OK(cudaFree(chain.dev));
    for (int i = 0; i < STREAMS; i++)
        OK(cudaStreamDestroy(chain.streams[i]));
    for (int i = 0; i < EVENTS; i++)
        OK(cudaEventDestroy(chain.events[i]));
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];

    setenv("LCRIG_DELAY_US", "200", 1);
    setenv("LCRIG_SEED", "3", 0);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, run, (void *)i));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    return 0;
}
