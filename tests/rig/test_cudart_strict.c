/* SPDX-License-Identifier: Apache-2.0
 *
 * What the rig does not let pass. Each case runs in a child: this process never calls the runtime, so that the
 * children may.
 */
#include "tests/rig/test_cudart.h"

#include <stdio.h>

static char said[4096]; /* by the child, on stderr */

static int run(void (*fn)(void))
{
    return in_child(fn, said, sizeof(said));
}

static bool says(const char *text)
{
    return strstr(said, text) != NULL;
}

/* Buffers in flight */

struct use {
    struct gate *gate;
    char *ptr;
    bool write;
};

static void use_and_pass(void *arg)
{
    struct use *use = arg;

    lcrig_buffer_use(use->ptr, 100, use->write);
    gate_pass(use->gate);
}

static void use_at_once(struct use *a, struct use *b)
{
    struct gate gate = GATE_INIT;
    cudaStream_t s, t;

    a->gate = b->gate = &gate;
    OK(cudaStreamCreate(&s));
    OK(cudaStreamCreate(&t));
    enqueue(s, use_and_pass, a);
    gate_await_arrivals(&gate, 1);
    enqueue(t, use_and_pass, b);
    gate_await_arrivals(&gate, 2);
    gate_open(&gate);
    OK(cudaDeviceSynchronize());
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(t));
}

static char buffer[300];

static void write_while_read(void)
{
    struct use a = { NULL, buffer, false }, b = { NULL, buffer + 99, true };

    use_at_once(&a, &b);
}

static void read_while_read(void)
{
    struct use a = { NULL, buffer, false }, b = { NULL, buffer, false };

    use_at_once(&a, &b);
}

static void write_beside_write(void)
{
    struct use a = { NULL, buffer, true }, b = { NULL, buffer + 100, true };

    use_at_once(&a, &b);
}

static void write_beside_write_the_other_way_round(void)
{
    struct use a = { NULL, buffer + 100, true }, b = { NULL, buffer, true };

    use_at_once(&a, &b);
}

static void free_while_another_device_uses_it(void)
{
    struct gate gate = GATE_INIT;
    struct use use = { &gate, NULL, false };
    cudaStream_t stream;

    OK(cudaMalloc((void **)&use.ptr, 100));
    OK(cudaSetDevice(1));
    OK(cudaStreamCreate(&stream));
    enqueue(stream, use_and_pass, &use);
    gate_await_arrivals(&gate, 1);
    cudaFree(use.ptr);
}

static void buffers_in_flight_are_guarded(void)
{
    CHECK(died(run(write_while_read)) && says("test piece on stream") && says("writes"));
    CHECK(left(run(read_while_read), 0));
    CHECK(left(run(write_beside_write), 0));
    CHECK(left(run(write_beside_write_the_other_way_round), 0));
    CHECK(died(run(free_while_another_device_uses_it)) &&
          says("is freed while test piece uses it"));
}

/* Memory */

static void write_behind_the_end(void)
{
    char *dev;

    OK(cudaMalloc((void **)&dev, 100));
    dev[100] = 1;
    cudaFree(dev);
}

static void touch(char *ptr)
{
    *(volatile char *)ptr = 1;
}

static void write_after_free(void)
{
    char *dev;

    OK(cudaMalloc((void **)&dev, 100));
    OK(cudaFree(dev));
    touch(dev);
}

static void write_into_the_next_page(void)
{
    char *dev;

    OK(cudaMalloc((void **)&dev, 4096));
    touch(dev + 4096);
}

static void memory_errors_do_not_pass(void)
{
    CHECK(died(run(write_behind_the_end)) && says("byte 0 behind the end"));
    CHECK(!left(run(write_after_free), 0) && !left(run(write_into_the_next_page), 0));
}

/* Leaks */

static void leak_one_of_each(void)
{
    cudaStream_t stream;
    cudaEvent_t event;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    void *ptr;

    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreate(&event));
    OK(cudaGraphCreate(&graph, 0));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaMalloc(&ptr, 1));
    OK(cudaMallocHost(&ptr, 1));
}

/* Nothing on the heap: a sanitizer has its own say about that. */
static void leak_and_opt_out(void)
{
    void *ptr;

    setenv("LCRIG_LEAKS", "0", 1);
    OK(cudaMalloc(&ptr, 1));
}

static void leak_and_fail(void)
{
    void *ptr;

    OK(cudaMalloc(&ptr, 1));
    exit(3);
}

static void leaks_change_the_exit_status(void)
{
    CHECK(left(run(leak_one_of_each), 86));
    CHECK(says("leaked at exit: 1 stream\n") && says("1 event\n") && says("1 graph\n"));
    CHECK(says("1 executable graph\n") && says("1 device memory allocation\n"));
    CHECK(says("1 pinned memory allocation\n"));
    CHECK(left(run(leak_and_opt_out), 0) && !says("leaked"));
    CHECK(left(run(leak_and_fail), 3) && says("leaked"));
}

static struct gate forever = GATE_INIT;

static void exit_while_streams_are_busy(void)
{
    enqueue(0, gate_pass, &forever);
    enqueue(cudaStreamPerThread, gate_pass, &forever);
    gate_await_arrivals(&forever, 1);
}

/* fork */

static void fork_after_use(void)
{
    enqueue(0, gate_pass, &forever);
    gate_await_arrivals(&forever, 1);
    if (fork() == 0) {
        void *ptr;
        struct lcrig_work work = { .name = "never", .run = gate_pass, .arg = &forever };

        FAILS(cudaMalloc(&ptr, 1), cudaErrorInitializationError);
        FAILS(cudaDeviceSynchronize(), cudaErrorInitializationError);
        FAILS(lcrig_enqueue(0, &work), cudaErrorInitializationError);
        CHECK(!lcrig_is_device_memory(&work, 1) && !lcrig_gpu_work_count());
        _exit(0); /* a leak sanitizer would miss what the parent's workers hold */
    }
    {
        int status;

        CHECK(wait(&status) > 0 && left(status, 0));
    }
    gate_open(&forever);
    OK(cudaDeviceSynchronize());
}

static void leaky_parent_of_a_clean_child(void)
{
    void *ptr;
    int status;

    if (fork() == 0)
        exit(0);
    CHECK(wait(&status) > 0 && left(status, 0));
    OK(cudaMalloc(&ptr, 1));
    if (fork() == 0)
        exit(0);
    CHECK(wait(&status) > 0 && left(status, 0));
}

static void exit_and_fork_are_clean(void)
{
    CHECK(left(run(exit_while_streams_are_busy), 0));
    CHECK(left(run(fork_after_use), 0));
    CHECK(left(run(leaky_parent_of_a_clean_child), 86));
}

/* Faults */

static void second_malloc_fails_once(void)
{
    void *a, *b;

    setenv("LCRIG_FAULT", "cudaMalloc:2,cudaEventCreate:1:4,cudaStreamCreate:1:5", 1);
    setenv("LCRIG_RANK", "4", 1);
    OK(cudaMalloc(&a, 1));
    FAILS(cudaMalloc(&b, 1), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&b, 1));
    OK(cudaFree(a));
    OK(cudaFree(b));
    FAILS(cudaEventCreate((cudaEvent_t *)&a), cudaErrorUnknown);
    OK(cudaStreamCreate((cudaStream_t *)&a));
    OK(cudaStreamDestroy((cudaStream_t)a));
}

static void note_rank(void *arg)
{
    *(int *)arg = lcrig_rank();
}

static void a_threads_rank_holds_in_its_streams(void)
{
    cudaStream_t stream;
    int rank = -1;

    setenv("RANK", "2", 1);
    CHECK(lcrig_rank() == 2);
    lcrig_set_thread_rank(9);
    OK(cudaStreamCreate(&stream));
    enqueue(stream, note_rank, &rank);
    OK(cudaStreamSynchronize(stream));
    CHECK(rank == 9);
    OK(cudaStreamDestroy(stream));
}

static void a_machine_without_devices(void)
{
    int count = 7;
    void *ptr;

    setenv("LCRIG_DEVICES", "0", 1);
    FAILS(cudaGetDeviceCount(&count), cudaErrorNoDevice);
    CHECK(!count);
    FAILS(cudaMalloc(&ptr, 1), cudaErrorNoDevice);
}

static void fault_with_a_typing_error(void)
{
    setenv("LCRIG_FAULT", "cudaMalloc:zwei", 1);
    cudaDeviceSynchronize();
}

static void setting_with_a_typing_error(void)
{
    setenv("LCRIG_DEVICES", "4x", 1);
    cudaDeviceSynchronize();
}

static void faults_are_injected_as_told(void)
{
    CHECK(left(run(second_malloc_fails_once), 0));
    CHECK(died(run(fault_with_a_typing_error)) && says("LCRIG_FAULT"));
    CHECK(left(run(a_threads_rank_holds_in_its_streams), 0));
    CHECK(left(run(a_machine_without_devices), 0));
    CHECK(died(run(setting_with_a_typing_error)) && says("LCRIG_DEVICES"));
}

/* Delays */

struct order {
    atomic_int turn;
    int first, second;
};

static void come_first(void *arg)
{
    struct order *order = arg;

    order->first = atomic_fetch_add(&order->turn, 1);
}

static void come_second(void *arg)
{
    struct order *order = arg;

    order->second = atomic_fetch_add(&order->turn, 1);
}

/* How many of 40 pairs on two streams ran in the order of their calls. */
static int pairs_in_order(bool wait)
{
    cudaStream_t a, b;
    cudaEvent_t event;
    int good = 0;

    OK(cudaStreamCreate(&a));
    OK(cudaStreamCreate(&b));
    OK(cudaEventCreate(&event));
    for (int i = 0; i < 40; i++) {
        struct order order = { 0 };

        enqueue(a, come_first, &order);
        OK(cudaEventRecord(event, a));
        if (wait)
            OK(cudaStreamWaitEvent(b, event, 0));
        enqueue(b, come_second, &order);
        OK(cudaDeviceSynchronize());
        good += order.first < order.second;
    }
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    return good;
}

/* 40 pieces in a row, each after a pause of 0 to 3 ms. */
static void check_pauses(void)
{
    struct order order = { 0 };
    struct timespec start, end;

    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < 40; i++)
        enqueue(0, come_first, &order);
    OK(cudaStreamSynchronize(0));
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK((end.tv_sec - start.tv_sec) * 1000 + (end.tv_nsec - start.tv_nsec) / 1000000 > 30);
}

static void delays_bring_a_missing_wait_to_light(void)
{
    int with, without;

    setenv("LCRIG_DELAY_US", "3000", 1);
    setenv("LCRIG_SEED", "7", 1);
    check_pauses();
    with = pairs_in_order(true);
    without = pairs_in_order(false);
    fprintf(stderr, "in order: %d with the wait, %d without\n", with, without);
    CHECK(with == 40);
    CHECK(without < 40);
}

/* Events */

static void wait_for_nothing(void)
{
    cudaEvent_t event;

    setenv("LCRIG_STRICT_EVENTS", "1", 1);
    OK(cudaEventCreate(&event));
    cudaStreamWaitEvent(0, event, 0);
}

static void record_on_two_branches(bool in_order)
{
    cudaStream_t s, t;
    cudaEvent_t event, fork;
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    OK(cudaStreamCreate(&s));
    OK(cudaStreamCreate(&t));
    OK(cudaEventCreate(&event));
    OK(cudaEventCreate(&fork));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(fork, s));
    OK(cudaStreamWaitEvent(t, fork, 0));
    OK(cudaEventRecordWithFlags(event, s, cudaEventRecordExternal));
    if (in_order) {
        OK(cudaEventRecord(fork, s));
        OK(cudaStreamWaitEvent(t, fork, 0));
    }
    OK(cudaEventRecordWithFlags(event, t, cudaEventRecordExternal));
    OK(cudaEventRecord(fork, t));
    OK(cudaStreamWaitEvent(s, fork, 0));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(event));
    OK(cudaEventDestroy(fork));
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(t));
}

static void record_in_no_order(void)
{
    record_on_two_branches(false);
}

static void record_in_order(void)
{
    record_on_two_branches(true);
}

int main(void)
{
    buffers_in_flight_are_guarded();
    memory_errors_do_not_pass();
    leaks_change_the_exit_status();
    exit_and_fork_are_clean();
    faults_are_injected_as_told();
    CHECK(left(run(delays_bring_a_missing_wait_to_light), 0));
    CHECK(died(run(wait_for_nothing)) && says("never recorded"));
    CHECK(died(run(record_in_no_order)) && says("record one event"));
    CHECK(left(run(record_in_order), 0));
    return 0;
}
