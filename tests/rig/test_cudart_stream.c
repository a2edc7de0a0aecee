/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/test_cudart.h"

struct log {
    atomic_int next;
    int seen[64];
};

struct step {
    struct log *log;
    int value;
};

static void note(void *arg)
{
    struct step *step = arg;

    step->log->seen[atomic_fetch_add(&step->log->next, 1)] = step->value;
}

static void work_of_a_stream_runs_in_order(void)
{
    struct log log = { 0 };
    struct step steps[40];
    cudaStream_t stream;

    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < 40; i++) {
        steps[i] = (struct step){ &log, i };
        enqueue(stream, note, &steps[i]);
    }
    OK(cudaStreamSynchronize(stream));
    for (int i = 0; i < 40; i++)
        CHECK(log.seen[i] == i);
    OK(cudaStreamDestroy(stream));
}

static void streams_run_side_by_side_and_queries_say_so(void)
{
    struct gate gate = GATE_INIT;
    cudaStream_t a, b;

    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    enqueue(a, gate_pass, &gate);
    enqueue(b, gate_pass, &gate);
    gate_await_arrivals(&gate, 2);
    FAILS(cudaStreamQuery(a), cudaErrorNotReady);
    gate_open(&gate);
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamSynchronize(b));
    OK(cudaStreamQuery(a));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    FAILS(cudaStreamQuery(a), cudaErrorInvalidResourceHandle);
}

static void a_wait_orders_two_streams(void)
{
    struct gate gate = GATE_INIT;
    struct log log = { 0 };
    struct step first = { &log, 1 }, second = { &log, 2 };
    cudaStream_t a, b;
    cudaEvent_t event;

    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    enqueue(a, gate_pass, &gate);
    enqueue(a, note, &first);
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event, 0));
    enqueue(b, note, &second);
    sleep_ms(5);
    CHECK(log.next == 0);
    FAILS(cudaEventQuery(event), cudaErrorNotReady);
    gate_open(&gate);
    OK(cudaStreamSynchronize(b));
    OK(cudaEventQuery(event));
    CHECK(log.seen[0] == 1 && log.seen[1] == 2);
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

static void memory_is_copied_and_filled(void)
{
    char host[1000], back[1000];
    char *dev;
    cudaStream_t stream;

    OK(cudaStreamCreate(&stream));
    OK(cudaMalloc((void **)&dev, sizeof(host)));
    memset(host, 7, sizeof(host));
    OK(cudaMemcpyAsync(dev, host, sizeof(host), cudaMemcpyHostToDevice, stream));
    OK(cudaMemsetAsync(dev + 10, 9, 5, stream));
    OK(cudaMemcpyAsync(back, dev, sizeof(host), cudaMemcpyDeviceToHost, stream));
    CHECK(back[9] == 7 && back[10] == 9 && back[14] == 9 && back[15] == 7);
    OK(cudaFree(dev));
    OK(cudaStreamDestroy(stream));
}

int main(void)
{
    work_of_a_stream_runs_in_order();
    streams_run_side_by_side_and_queries_say_so();
    a_wait_orders_two_streams();
    memory_is_copied_and_filled();
    return 0;
}
