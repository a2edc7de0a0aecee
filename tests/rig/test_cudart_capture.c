/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/test_cudart.h"

static cudaStream_t main_stream, side_stream, blocking_stream;
static cudaEvent_t fork_event, join_event;

static void capture_info(enum cudaStreamCaptureStatus *status, unsigned long long *id,
                         cudaGraph_t *graph, const cudaGraphNode_t **deps, size_t *count)
{
#if CUDART_VERSION >= 13000
    OK(cudaStreamGetCaptureInfo(main_stream, status, id, graph, deps, NULL, count));
#else
    OK(cudaStreamGetCaptureInfo(main_stream, status, id, graph, deps, count));
#endif
}

static cudaError_t set_deps(cudaGraphNode_t *deps, size_t count)
{
#if CUDART_VERSION >= 13000
    return cudaStreamUpdateCaptureDependencies(main_stream, deps, NULL, count,
                                               cudaStreamSetCaptureDependencies);
#else
    return cudaStreamUpdateCaptureDependencies(main_stream, deps, count,
                                               cudaStreamSetCaptureDependencies);
#endif
}

static void add_one(void *arg)
{
    atomic_fetch_add((atomic_int *)arg, 1);
}

static void pause_1ms(void *arg)
{
    (void)arg;
    sleep_ms(1);
}

static void set_up(void)
{
    OK(cudaStreamCreateWithFlags(&main_stream, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&side_stream, cudaStreamNonBlocking));
    OK(cudaStreamCreate(&blocking_stream));
    OK(cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&join_event, cudaEventDisableTiming));
}

static void tear_down(void)
{
    OK(cudaStreamDestroy(main_stream));
    OK(cudaStreamDestroy(side_stream));
    OK(cudaStreamDestroy(blocking_stream));
    OK(cudaEventDestroy(fork_event));
    OK(cudaEventDestroy(join_event));
}

static void begin(void)
{
    OK(cudaStreamBeginCapture(main_stream, cudaStreamCaptureModeThreadLocal));
}

static void fork_side(void)
{
    OK(cudaEventRecord(fork_event, main_stream));
    OK(cudaStreamWaitEvent(side_stream, fork_event, 0));
}

static void join_side(void)
{
    OK(cudaEventRecord(join_event, side_stream));
    OK(cudaStreamWaitEvent(main_stream, join_event, 0));
}

static cudaGraphExec_t finish(void)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    OK(cudaStreamEndCapture(main_stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

/* The capture must end with an error and leave both streams usable. */
static void end_fails(cudaError_t code)
{
    cudaGraph_t graph = (cudaGraph_t)1;
    enum cudaStreamCaptureStatus status;

    FAILS(cudaStreamEndCapture(main_stream, &graph), code);
    CHECK(!graph);
    OK(cudaStreamIsCapturing(main_stream, &status));
    CHECK(status == cudaStreamCaptureStatusNone);
    OK(cudaStreamIsCapturing(side_stream, &status));
    CHECK(status == cudaStreamCaptureStatusNone);
    OK(cudaStreamSynchronize(main_stream));
}

static void captured_work_runs_at_replay_only(void)
{
    atomic_int runs = 0;
    unsigned long long before = lcrig_gpu_work_count();
    cudaGraphExec_t exec;

    begin();
    enqueue(main_stream, add_one, &runs);
    enqueue(main_stream, add_one, &runs);
    exec = finish();
    OK(cudaStreamSynchronize(main_stream));
    CHECK(runs == 0 && lcrig_gpu_work_count() == before);
    for (int i = 0; i < 3; i++)
        OK(cudaGraphLaunch(exec, main_stream));
    OK(cudaStreamSynchronize(main_stream));
    CHECK(runs == 6 && lcrig_gpu_work_count() == before + 6);
    OK(cudaGraphExecDestroy(exec));
}

/* Both branches must be inside their piece at once: each waits for the other's arrival. */
static void forked_streams_run_side_by_side(void)
{
    struct gate gate = GATE_INIT;
    atomic_int after = 0;
    cudaGraphExec_t exec;

    begin();
    fork_side();
    enqueue(main_stream, gate_pass, &gate);
    enqueue(side_stream, gate_pass, &gate);
    join_side();
    enqueue(main_stream, add_one, &after);
    exec = finish();
    OK(cudaGraphLaunch(exec, main_stream));
    gate_await_arrivals(&gate, 2);
    CHECK(after == 0);
    gate_open(&gate);
    OK(cudaStreamSynchronize(main_stream));
    CHECK(after == 1);
    OK(cudaGraphExecDestroy(exec));
}

/* The branch is the first and the last of the graph: nothing on the main stream orders it but the launch. */
static void a_launch_has_all_branches_between_its_neighbours(void)
{
    struct gate before = GATE_INIT, inside = GATE_INIT;
    atomic_int after = 0;
    cudaGraphExec_t exec;

    begin();
    fork_side();
    enqueue(main_stream, pause_1ms, NULL);
    enqueue(side_stream, gate_pass, &inside);
    join_side();
    exec = finish();
    enqueue(main_stream, gate_pass, &before);
    OK(cudaGraphLaunch(exec, main_stream));
    enqueue(main_stream, add_one, &after);
    gate_await_arrivals(&before, 1);
    sleep_ms(5);
    pthread_mutex_lock(&inside.lock);
    CHECK(inside.arrived == 0);
    pthread_mutex_unlock(&inside.lock);
    gate_open(&before);
    gate_await_arrivals(&inside, 1);
    sleep_ms(5);
    CHECK(after == 0);
    gate_open(&inside);
    OK(cudaStreamSynchronize(main_stream));
    CHECK(after == 1);
    OK(cudaGraphExecDestroy(exec));
}

struct relay {
    int token;
};

static void slow_set(void *arg)
{
    struct relay *relay = arg;

    sleep_ms(3);
    relay->token = 1;
}

static void slow_double(void *arg)
{
    struct relay *relay = arg;

    sleep_ms(3);
    relay->token *= 10;
}

static void add_seven(void *arg)
{
    ((struct relay *)arg)->token += 7;
}

static void edges_between_streams_hold_at_every_replay(void)
{
    struct relay relay = { 0 };
    cudaGraphExec_t exec;

    begin();
    enqueue(main_stream, slow_set, &relay);
    fork_side();
    enqueue(side_stream, slow_double, &relay);
    join_side();
    enqueue(main_stream, add_seven, &relay);
    exec = finish();
    for (int i = 0; i < 4; i++) {
        OK(cudaGraphLaunch(exec, i % 2 ? main_stream : side_stream));
        OK(cudaDeviceSynchronize());
        CHECK(relay.token == 17);
    }
    OK(cudaGraphExecDestroy(exec));
}

struct overlap {
    atomic_int inside, worst;
};

static void measure_overlap(void *arg)
{
    struct overlap *overlap = arg;
    int inside = atomic_fetch_add(&overlap->inside, 1) + 1;

    if (inside > overlap->worst)
        overlap->worst = inside;
    sleep_ms(3);
    atomic_fetch_sub(&overlap->inside, 1);
}

static void one_exec_never_overlaps_itself(void)
{
    struct overlap overlap = { 0 };
    cudaGraphExec_t exec;

    begin();
    enqueue(main_stream, measure_overlap, &overlap);
    exec = finish();
    for (int i = 0; i < 6; i++)
        OK(cudaGraphLaunch(exec, i % 2 ? main_stream : side_stream));
    OK(cudaDeviceSynchronize());
    CHECK(overlap.worst == 1);
    OK(cudaGraphExecDestroy(exec));
}

static void two_execs_run_at_once(void)
{
    struct gate gate = GATE_INIT;
    cudaGraphExec_t a, b;

    begin();
    enqueue(main_stream, gate_pass, &gate);
    a = finish();
    begin();
    enqueue(main_stream, gate_pass, &gate);
    b = finish();
    OK(cudaGraphLaunch(a, main_stream));
    OK(cudaGraphLaunch(b, side_stream));
    gate_await_arrivals(&gate, 2);
    gate_open(&gate);
    OK(cudaDeviceSynchronize());
    OK(cudaGraphExecDestroy(a));
    OK(cudaGraphExecDestroy(b));
}

static void release_comes_with_the_last_owner_and_after_the_last_launch(void)
{
    struct gate gate = GATE_INIT;
    atomic_int released = 0;
    struct lcrig_work work = { .name = "owned",
                               .run = add_one,
                               .release = add_one,
                               .arg = &released };
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    begin();
    enqueue(main_stream, gate_pass, &gate);
    OK(lcrig_enqueue(main_stream, &work));
    OK(cudaStreamEndCapture(main_stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    CHECK(released == 0);
    OK(cudaGraphLaunch(exec, main_stream));
    gate_await_arrivals(&gate, 1);
    OK(cudaGraphExecDestroy(exec));
    CHECK(released == 0);
    gate_open(&gate);
    OK(cudaStreamSynchronize(main_stream));
    while (released < 2) /* run, then release behind the last item */
        sleep_ms(1);
    CHECK(released == 2);
}

static void user_objects_live_as_long_as_graph_exec_and_launch(void)
{
    struct gate gate = GATE_INIT;
    atomic_int destroyed = 0;
    enum cudaStreamCaptureStatus status;
    cudaUserObject_t object;
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    OK(cudaUserObjectCreate(&object, &destroyed, add_one, 1, cudaUserObjectNoDestructorSync));
    begin();
    enqueue(main_stream, gate_pass, &gate);
    capture_info(&status, NULL, &graph, NULL, NULL);
    CHECK(status == cudaStreamCaptureStatusActive);
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    exec = finish();
    OK(cudaGraphLaunch(exec, main_stream));
    gate_await_arrivals(&gate, 1);
    OK(cudaGraphExecDestroy(exec));
    CHECK(destroyed == 0);
    gate_open(&gate);
    while (!destroyed)
        sleep_ms(1);
    OK(cudaStreamSynchronize(main_stream));
}

static void external_events_tie_replays_to_the_outside(void)
{
    struct gate gate = GATE_INIT;
    atomic_int runs = 0;
    cudaEvent_t in, out;
    cudaGraphExec_t exec;

    OK(cudaEventCreateWithFlags(&in, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&out, cudaEventDisableTiming));
    FAILS(cudaEventRecordWithFlags(out, main_stream, cudaEventRecordExternal),
          cudaErrorInvalidValue);
    begin();
    OK(cudaStreamWaitEvent(main_stream, in, cudaEventWaitExternal));
    enqueue(main_stream, add_one, &runs);
    OK(cudaEventRecordWithFlags(out, main_stream, cudaEventRecordExternal));
    exec = finish();
    OK(cudaEventQuery(out));
    enqueue(side_stream, gate_pass, &gate);
    OK(cudaEventRecord(in, side_stream));
    OK(cudaGraphLaunch(exec, main_stream));
    sleep_ms(5);
    CHECK(runs == 0);
    FAILS(cudaEventQuery(out), cudaErrorNotReady);
    gate_open(&gate);
    OK(cudaEventSynchronize(out));
    CHECK(runs == 1);
    OK(cudaEventDestroy(in));
    OK(cudaEventDestroy(out));
    OK(cudaGraphLaunch(exec, main_stream)); /* the graph keeps its events */
    OK(cudaStreamSynchronize(main_stream));
    OK(cudaGraphExecDestroy(exec));
}

static void a_launch_inside_a_capture_adds_its_nodes(void)
{
    atomic_int runs = 0;
    size_t count;
    cudaGraph_t graph;
    cudaGraphExec_t inner, outer;

    begin();
    fork_side();
    enqueue(side_stream, add_one, &runs);
    join_side();
    enqueue(main_stream, add_one, &runs);
    inner = finish();
    begin();
    OK(cudaGraphLaunch(inner, main_stream));
    enqueue(main_stream, add_one, &runs);
    OK(cudaStreamEndCapture(main_stream, &graph));
    OK(cudaGraphGetNodes(graph, NULL, &count));
    CHECK(count == 3);
    OK(cudaGraphInstantiate(&outer, graph, 0));
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphExecDestroy(inner));
    OK(cudaGraphLaunch(outer, side_stream));
    OK(cudaStreamSynchronize(side_stream));
    CHECK(runs == 3);
    OK(cudaGraphExecDestroy(outer));
}

/* One stream captured both, but nothing says that the second waits for the first. */
static void only_dependencies_order_a_replay(void)
{
    struct gate gate = GATE_INIT;
    atomic_int runs = 0;
    cudaGraphExec_t exec;

    begin();
    enqueue(main_stream, gate_pass, &gate);
    OK(set_deps(NULL, 0));
    enqueue(main_stream, add_one, &runs);
    exec = finish();
    OK(cudaGraphLaunch(exec, main_stream));
    gate_await_arrivals(&gate, 1);
    while (runs == 0)
        sleep_ms(1);
    gate_open(&gate);
    OK(cudaStreamSynchronize(main_stream));
    CHECK(runs == 1);
    OK(cudaGraphExecDestroy(exec));
}

static void nodes_of_another_graph_are_refused(void)
{
    cudaGraph_t mine, other;
    cudaGraphNode_t node, strange;

    OK(cudaGraphCreate(&mine, 0));
    OK(cudaGraphCreate(&other, 0));
    OK(cudaGraphAddEmptyNode(&strange, other, NULL, 0));
    FAILS(cudaGraphAddEmptyNode(&node, mine, &strange, 1), cudaErrorInvalidValue);
    OK(cudaGraphDestroy(mine));
    begin();
    FAILS(set_deps(&strange, 1), cudaErrorInvalidValue);
    OK(cudaStreamEndCapture(main_stream, &mine));
    OK(cudaGraphDestroy(mine));
    OK(cudaGraphDestroy(other));
}

static void an_unjoined_fork_is_refused(void)
{
    atomic_int runs = 0;

    begin();
    fork_side();
    enqueue(side_stream, add_one, &runs);
    end_fails(cudaErrorStreamCaptureUnjoined);
    begin();
    fork_side();
    join_side();
    enqueue(side_stream, add_one, &runs); /* behind the record: joined too early */
    end_fails(cudaErrorStreamCaptureUnjoined);
    CHECK(runs == 0);
}

static void waits_across_the_edge_of_a_capture_are_refused(void)
{
    cudaGraphExec_t exec;

    OK(cudaEventRecord(fork_event, side_stream));
    begin();
    FAILS(cudaStreamWaitEvent(main_stream, fork_event, 0), cudaErrorStreamCaptureIsolation);
    end_fails(cudaErrorStreamCaptureInvalidated);
    begin();
    OK(cudaEventRecord(fork_event, main_stream));
    FAILS(cudaEventQuery(fork_event), cudaErrorCapturedEvent);
    FAILS(cudaEventSynchronize(fork_event), cudaErrorCapturedEvent);
    exec = finish();
    FAILS(cudaStreamWaitEvent(side_stream, fork_event, 0), cudaErrorCapturedEvent);
    OK(cudaGraphExecDestroy(exec));
}

static void two_captures_are_not_merged(void)
{
    cudaGraph_t graph;

    begin();
    OK(cudaStreamBeginCapture(side_stream, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(fork_event, side_stream));
    FAILS(cudaStreamWaitEvent(main_stream, fork_event, 0), cudaErrorStreamCaptureMerge);
    OK(cudaStreamEndCapture(side_stream, &graph));
    OK(cudaGraphDestroy(graph));
    end_fails(cudaErrorStreamCaptureInvalidated);
}

static void unsafe_calls_spoil_the_capture_unless_relaxed(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    void *ptr;

    begin();
    FAILS(cudaMalloc(&ptr, 100), cudaErrorStreamCaptureUnsupported);
    end_fails(cudaErrorStreamCaptureInvalidated);
    begin();
    FAILS(cudaStreamQuery(side_stream), cudaErrorStreamCaptureUnsupported);
    end_fails(cudaErrorStreamCaptureInvalidated);
    begin();
    FAILS(cudaStreamSynchronize(main_stream), cudaErrorStreamCaptureUnsupported);
    end_fails(cudaErrorStreamCaptureInvalidated);
    begin();
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK(mode == cudaStreamCaptureModeGlobal);
    OK(cudaMalloc(&ptr, 100));
    OK(cudaStreamQuery(side_stream));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    OK(cudaGraphExecDestroy(finish()));
    OK(cudaFree(ptr));
}

static void *query_from_another_thread(void *arg)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    cudaGraph_t graph;

    (void)arg;
    FAILS(cudaStreamEndCapture(main_stream, &graph), cudaErrorStreamCaptureWrongThread);
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    OK(cudaStreamQuery(side_stream));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    FAILS(cudaStreamQuery(side_stream), cudaErrorStreamCaptureUnsupported);
    return NULL;
}

static void a_global_capture_is_spoilt_by_another_threads_query(void)
{
    pthread_t thread;

    OK(cudaStreamBeginCapture(main_stream, cudaStreamCaptureModeGlobal));
    CHECK(!pthread_create(&thread, NULL, query_from_another_thread, NULL));
    CHECK(!pthread_join(thread, NULL));
    end_fails(cudaErrorStreamCaptureInvalidated);
}

static void the_default_stream_and_captures_exclude_each_other(void)
{
    atomic_int runs = 0;
    struct lcrig_work work = { .name = "refused",
                               .run = add_one,
                               .release = add_one,
                               .arg = &runs };
    enum cudaStreamCaptureStatus status;
    cudaGraph_t graph;

    FAILS(cudaStreamBeginCapture(0, cudaStreamCaptureModeRelaxed),
          cudaErrorStreamCaptureUnsupported);
    OK(cudaStreamBeginCapture(blocking_stream, cudaStreamCaptureModeRelaxed));
    FAILS(cudaStreamIsCapturing(0, &status), cudaErrorStreamCaptureImplicit);
    FAILS(lcrig_enqueue(0, &work), cudaErrorStreamCaptureImplicit);
    CHECK(runs == 1); /* released, not run */
    FAILS(cudaStreamEndCapture(blocking_stream, &graph), cudaErrorStreamCaptureInvalidated);
}

static void dependencies_can_be_read_and_set(void)
{
    atomic_int runs = 0;
    enum cudaStreamCaptureStatus status;
    unsigned long long id, later_id;
    cudaGraph_t graph;
    cudaGraphNode_t empty;
    const cudaGraphNode_t *deps;
    size_t count;

    capture_info(&status, &id, &graph, &deps, &count);
    CHECK(status == cudaStreamCaptureStatusNone);
    begin();
    enqueue(main_stream, add_one, &runs);
    capture_info(&status, &id, &graph, &deps, &count);
    CHECK(status == cudaStreamCaptureStatusActive && count == 1);
    OK(cudaGraphAddEmptyNode(&empty, graph, deps, count));
    OK(set_deps(&empty, 1));
    capture_info(&status, &later_id, NULL, &deps, &count);
    CHECK(later_id == id && count == 1 && deps[0] == empty);
    enqueue(main_stream, add_one, &runs);
    OK(set_deps(NULL, 0));
    OK(cudaGraphExecDestroy(finish()));
}

int main(void)
{
    set_up();
    captured_work_runs_at_replay_only();
    forked_streams_run_side_by_side();
    a_launch_has_all_branches_between_its_neighbours();
    edges_between_streams_hold_at_every_replay();
    one_exec_never_overlaps_itself();
    two_execs_run_at_once();
    release_comes_with_the_last_owner_and_after_the_last_launch();
    user_objects_live_as_long_as_graph_exec_and_launch();
    external_events_tie_replays_to_the_outside();
    a_launch_inside_a_capture_adds_its_nodes();
    only_dependencies_order_a_replay();
    nodes_of_another_graph_are_refused();
    an_unjoined_fork_is_refused();
    waits_across_the_edge_of_a_capture_are_refused();
    two_captures_are_not_merged();
    unsafe_calls_spoil_the_capture_unless_relaxed();
    a_global_capture_is_spoilt_by_another_threads_query();
    the_default_stream_and_captures_exclude_each_other();
    dependencies_can_be_read_and_set();
    tear_down();
    return 0;
}
