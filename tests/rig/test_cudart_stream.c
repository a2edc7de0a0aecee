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

static void a_wait_binds_to_the_record_at_the_time_of_the_call(void)
{
    struct gate first = GATE_INIT, second = GATE_INIT;
    cudaStream_t a, b;
    cudaEvent_t event;

    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaEventCreate(&event));
    enqueue(a, gate_pass, &first);
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event, 0));
    enqueue(a, gate_pass, &second);
    OK(cudaEventRecord(event, a)); /* b does not wait for this one */
    OK(cudaEventDestroy(event));   /* and none of it is lost with the event */
    FAILS(cudaStreamQuery(b), cudaErrorNotReady);
    gate_open(&first);
    OK(cudaStreamSynchronize(b));
    FAILS(cudaStreamQuery(a), cudaErrorNotReady);
    gate_open(&second);
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

static void an_event_without_record_holds_nobody_up(void)
{
    unsigned long long before = lcrig_unrecorded_waits();
    cudaStream_t stream;
    cudaEvent_t event;

    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreate(&event));
    OK(cudaEventQuery(event));
    OK(cudaEventSynchronize(event));
    OK(cudaStreamWaitEvent(stream, event, 0));
    OK(cudaStreamSynchronize(stream));
    CHECK(lcrig_unrecorded_waits() == before + 1);
    OK(cudaEventDestroy(event));
    FAILS(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
    OK(cudaStreamDestroy(stream));
}

static void elapsed_time_spans_the_work_between(void)
{
    struct gate gate = GATE_INIT;
    cudaStream_t stream;
    cudaEvent_t start, end, untimed;
    float ms;

    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreate(&start));
    OK(cudaEventCreate(&end));
    OK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    OK(cudaEventRecord(start, stream));
    FAILS(cudaEventElapsedTime(&ms, start, end), cudaErrorInvalidResourceHandle);
    enqueue(stream, gate_pass, &gate);
    OK(cudaEventRecord(end, stream));
    OK(cudaEventRecord(untimed, stream));
    FAILS(cudaEventElapsedTime(&ms, start, end), cudaErrorNotReady);
    gate_await_arrivals(&gate, 1); /* behind the first event */
    sleep_ms(10);
    gate_open(&gate);
    OK(cudaEventSynchronize(untimed));
    OK(cudaEventElapsedTime(&ms, start, end));
    CHECK(ms >= 10.0f && ms < 100000.0f);
    FAILS(cudaEventElapsedTime(&ms, start, untimed), cudaErrorInvalidResourceHandle);
    OK(cudaEventDestroy(start));
    OK(cudaEventDestroy(end));
    OK(cudaEventDestroy(untimed));
    OK(cudaStreamDestroy(stream));
}

static void the_default_stream_waits_for_blocking_streams_and_they_for_it(void)
{
    struct gate early = GATE_INIT, late = GATE_INIT;
    struct log log = { 0 };
    struct step on_default = { &log, 1 }, on_blocking = { &log, 2 }, on_other = { &log, 3 };
    cudaStream_t blocking, other, free_running;

    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamCreate(&other));
    OK(cudaStreamCreateWithFlags(&free_running, cudaStreamNonBlocking));
    enqueue(blocking, gate_pass, &early);
    enqueue(0, note, &on_default);
    FAILS(cudaStreamQuery(0), cudaErrorNotReady);
    enqueue(other, note, &on_other); /* behind the default stream, hence behind `blocking` */
    sleep_ms(5);
    CHECK(log.next == 0);
    enqueue(free_running, note, &on_blocking);
    OK(cudaStreamSynchronize(free_running));
    CHECK(log.next == 1);
    gate_open(&early);
    OK(cudaStreamSynchronize(other));
    CHECK(log.seen[1] == 1 && log.seen[2] == 3);

    enqueue(cudaStreamLegacy, gate_pass, &late);
    enqueue(blocking, note, &on_blocking);
    FAILS(cudaStreamQuery(blocking), cudaErrorNotReady);
    sleep_ms(5);
    CHECK(log.next == 3);
    gate_open(&late);
    OK(cudaStreamSynchronize(0));
    OK(cudaStreamSynchronize(blocking));
    CHECK(log.next == 4);
    OK(cudaStreamDestroy(blocking));
    OK(cudaStreamDestroy(other));
    OK(cudaStreamDestroy(free_running));
}

static void a_default_stream_belongs_to_its_device(void)
{
    struct gate gate = GATE_INIT, other_gate = GATE_INIT;
    cudaStream_t blocking;

    OK(cudaStreamCreate(&blocking));
    enqueue(blocking, gate_pass, &other_gate);
    OK(cudaSetDevice(1));
    OK(cudaStreamQuery(0));
    OK(cudaSetDevice(0));
    enqueue(0, gate_pass, &gate);
    OK(cudaSetDevice(1));
    OK(cudaStreamQuery(0));
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    FAILS(cudaStreamQuery(0), cudaErrorNotReady);
    gate_open(&other_gate);
    gate_open(&gate);
    OK(cudaDeviceSynchronize());
    OK(cudaStreamQuery(0));
    OK(cudaStreamDestroy(blocking));
}

struct own_default {
    struct log log;
    unsigned long long id; /* of the first thread's */
};

static void *use_own_default(void *arg)
{
    struct own_default *shared = arg;
    struct step step = { &shared->log, 1 };
    unsigned long long id;

    OK(cudaStreamGetId(cudaStreamPerThread, &id));
    CHECK(id != shared->id);
    enqueue(cudaStreamPerThread, note, &step);
    OK(cudaStreamSynchronize(cudaStreamPerThread));
    return NULL;
}

static void threads_have_default_streams_of_their_own(void)
{
    struct own_default shared = { 0 };
    unsigned long long again;
    pthread_t thread;

    OK(cudaStreamGetId(cudaStreamPerThread, &shared.id));
    OK(cudaStreamGetId(cudaStreamPerThread, &again));
    CHECK(again == shared.id);
    CHECK(!pthread_create(&thread, NULL, use_own_default, &shared));
    CHECK(!pthread_join(thread, NULL));
    CHECK(shared.log.next == 1);
}

static void destroying_a_stream_does_not_drop_its_work(void)
{
    struct gate gate = GATE_INIT;
    struct log log = { 0 };
    struct step step = { &log, 1 };
    cudaStream_t stream;

    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    enqueue(stream, gate_pass, &gate);
    enqueue(stream, note, &step);
    OK(cudaStreamDestroy(stream));
    CHECK(log.next == 0);
    gate_open(&gate);
    OK(cudaDeviceSynchronize());
    CHECK(log.next == 1);
}

static void try_cuda(void *arg)
{
    *(cudaError_t *)arg = cudaStreamSynchronize(0);
}

static void on_callback(cudaStream_t stream, cudaError_t status, void *arg)
{
    CHECK(stream && status == cudaSuccess);
    *(cudaError_t *)arg = cudaGetLastError();
    CHECK(cudaFree(NULL) == cudaErrorNotPermitted);
}

static void host_functions_run_in_order_and_must_not_call_cuda(void)
{
    cudaError_t err = cudaSuccess, err2 = cudaErrorUnknown;
    cudaStream_t stream;

    OK(cudaStreamCreate(&stream));
    OK(cudaLaunchHostFunc(stream, try_cuda, &err));
    OK(cudaStreamAddCallback(stream, on_callback, &err2, 0));
    OK(cudaStreamSynchronize(stream));
    CHECK(err == cudaErrorNotPermitted && err2 == cudaErrorNotPermitted);
    OK(cudaGetLastError()); /* errors are the calling thread's */
    OK(cudaStreamDestroy(stream));
}

static void streams_know_their_properties(void)
{
    cudaStream_t stream;
    unsigned flags;
    int least, greatest, priority;

    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(least == 0 && greatest < 0);
    OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest - 10));
    OK(cudaStreamGetPriority(stream, &priority));
    OK(cudaStreamGetFlags(stream, &flags));
    CHECK(priority == greatest && flags == cudaStreamNonBlocking);
    OK(cudaStreamDestroy(stream));
    FAILS(cudaStreamCreateWithFlags(&stream, 8), cudaErrorInvalidValue);
    FAILS(cudaStreamDestroy(0), cudaErrorInvalidResourceHandle);
}

int main(void)
{
    work_of_a_stream_runs_in_order();
    streams_run_side_by_side_and_queries_say_so();
    a_wait_orders_two_streams();
    a_wait_binds_to_the_record_at_the_time_of_the_call();
    an_event_without_record_holds_nobody_up();
    elapsed_time_spans_the_work_between();
    the_default_stream_waits_for_blocking_streams_and_they_for_it();
    a_default_stream_belongs_to_its_device();
    threads_have_default_streams_of_their_own();
    destroying_a_stream_does_not_drop_its_work();
    host_functions_run_in_order_and_must_not_call_cuda();
    streams_know_their_properties();
    return 0;
}
