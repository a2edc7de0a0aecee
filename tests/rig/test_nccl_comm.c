/* SPDX-License-Identifier: Apache-2.0
 *
 * Making, asking, splitting and ending communicators. Usage: test_nccl_comm processes|threads */
#include "tests/rig/test_nccl.h"

#include <pthread.h>

/* A small all-reduce that must give the sum of 1 .. n. */
static void use(ncclComm_t comm, cudaStream_t stream)
{
    int rank, n, *x = device_alloc(sizeof(int));

    NCCL(ncclCommUserRank(comm, &rank));
    NCCL(ncclCommCount(comm, &n));
    *x = rank + 1;
    NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
    CHECK(*x == n * (n + 1) / 2);
    CUDA(cudaFree(x));
}

static int rank_of(ncclComm_t comm)
{
    int rank;

    NCCL(ncclCommUserRank(comm, &rank));
    return rank;
}

static int count_of(ncclComm_t comm)
{
    int n;

    NCCL(ncclCommCount(comm, &n));
    return n;
}

static int a_unique_id_uses_fewer_than_48_bytes(int rank, int n, void *arg)
{
    ncclUniqueId id;

    memset(&id, 0xff, sizeof(id));
    NCCL(ncclGetUniqueId(&id));
    for (size_t i = 40; i < sizeof(id); i++)
        CHECK(id.internal[i] == 0);
    return 0;
}

static int the_version_can_be_pretended(int rank, int n, void *arg)
{
    int version;

    NCCL(ncclGetVersion(&version));
    CHECK(version == NCCL_VERSION_CODE);
    setenv("LCRIG_NCCL_VERSION", "21805", 1);
    NCCL(pncclGetVersion(&version));
    CHECK(version == 21805);
    unsetenv("LCRIG_NCCL_VERSION");
    return 0;
}

static int split_orders_by_key_and_leaves_out_no_color(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n), child = (ncclComm_t)8, same;
    cudaStream_t stream = stream_up();
    bool out = rank == n - 1;

    /* Odd and even ranks apart, in reverse order; the last rank stays out. */
    NCCL(ncclCommSplit(comm, out ? NCCL_SPLIT_NOCOLOR : rank % 2, -rank, &child, NULL));
    CHECK(out == (child == NULL));
    if (!out) {
        CHECK(count_of(child) == (n - rank % 2) / 2);
        CHECK(rank_of(child) == (n - 2 - rank) / 2);
        use(child, stream);
    }
    /* Equal keys: the order of the old ranks. The parent still works, and may go before its child. */
    NCCL(ncclCommSplit(comm, 3, 0, &same, NULL));
    CHECK(rank_of(same) == rank && count_of(same) == n);
    use(comm, stream);
    NCCL(ncclCommDestroy(comm));
    use(same, stream);
    NCCL(ncclCommDestroy(same));
    if (child)
        NCCL(ncclCommDestroy(child));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int shrink_needs_only_those_who_stay(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n), child, again;
    cudaStream_t stream = stream_up();
    int exclude[] = { 1 };

    use(comm, stream);
    if (rank != 1) {
        NCCL(ncclCommShrink(comm, exclude, 1, &child, NULL, NCCL_SHRINK_DEFAULT));
        CHECK(count_of(child) == n - 1 && rank_of(child) == (rank > 1 ? rank - 1 : 0));
        NCCL(ncclCommShrink(comm, exclude, 1, &again, NULL, NCCL_SHRINK_DEFAULT));
        use(again, stream);
        use(child, stream);
        NCCL(ncclCommDestroy(child));
        NCCL(ncclCommDestroy(again));
    }
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

/* Rank 1 never takes part in the all-reduce on which the others hang. */
static int shrink_with_abort_frees_ranks_from_a_hanging_operation(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n), child;
    cudaStream_t stream = stream_up();
    int exclude[] = { 1 }, *x = device_alloc(sizeof(int));

    if (rank != 1) {
        NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream));
        usleep(20000);
        NCCL(ncclCommShrink(comm, exclude, 1, &child, NULL, NCCL_SHRINK_ABORT));
        CUDA(cudaStreamSynchronize(stream));
        use(child, stream);
        NCCL(ncclCommDestroy(child));
    }
    meeting_wait(arg, n);
    NCCL(ncclCommAbort(comm));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int a_nonblocking_communicator_is_in_progress_until_all_have_come(int rank, int n, void *arg)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    struct meeting *meeting = arg;
    ncclUniqueId id = meeting_id(meeting, rank);
    cudaStream_t stream;
    ncclComm_t comm = NULL, child = NULL;
    ncclResult_t state;

    config.blocking = 0;
    CUDA(cudaSetDevice(rank));
    stream = stream_up();
    if (rank == 1)
        while (!atomic_load(&meeting->word))
            usleep(1000);
    CHECK(ncclCommInitRankConfig(&comm, n, id, rank, &config) == ncclInProgress);
    CHECK(comm);
    if (rank == 0) {
        NCCL(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclInProgress);
        CHECK(ncclAllReduce(&id, &id, 1, ncclInt, ncclSum, comm, stream) == ncclInvalidArgument);
        atomic_store(&meeting->word, 1);
    }
    CHECK(comm_settle(comm) == ncclSuccess);
    use(comm, stream);
    CHECK(ncclCommSplit(comm, 0, -rank, &child, NULL) == ncclInProgress);
    CHECK(comm_settle(comm) == ncclSuccess && comm_settle(child) == ncclSuccess);
    CHECK(rank_of(child) == n - 1 - rank);
    use(child, stream);
    CHECK(ncclCommFinalize(comm) == ncclInProgress);
    CHECK(comm_settle(comm) == ncclSuccess);
    CHECK(ncclCommFinalize(comm) == ncclInvalidUsage);
    NCCL(ncclCommDestroy(comm));
    NCCL(ncclCommDestroy(child));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int several_communicators_are_made_split_and_destroyed_in_a_group(int rank, int n, void *arg)
{
    ncclUniqueId ids[2];
    ncclComm_t comms[2], child[2];
    struct meeting *meeting = arg;
    cudaStream_t stream;

    ids[0] = meeting_id(meeting, rank);
    ids[1] = ids[0];
    ids[1].internal[24] ^= 1; /* as good as another id */
    CUDA(cudaSetDevice(rank));
    stream = stream_up();
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++)
        NCCL(ncclCommInitRankScalable(&comms[i], n, rank, 1, &ids[i], NULL));
    NCCL(ncclGroupEnd());
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) /* both of one parent: in order */
        NCCL(ncclCommSplit(comms[0], i, i ? -rank : rank, &child[i], NULL));
    NCCL(ncclGroupEnd());
    CHECK(rank_of(child[1]) == n - 1 - rank);
    for (int i = 0; i < 2; i++) {
        use(comms[i], stream);
        use(child[i], stream);
    }
    NCCL(ncclGroupStart());
    for (int i = 0; i < 2; i++) {
        NCCL(ncclCommDestroy(comms[i]));
        NCCL(ncclCommDestroy(child[i]));
    }
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int destroy_waits_for_work_and_needs_no_order_of_ranks(int rank, int n, void *arg)
{
    struct meeting *meeting = arg;
    size_t count = 100000;
    ncclComm_t comm = comm_up(meeting, rank, n);
    cudaStream_t stream = stream_up();
    int *x = device_alloc(count * sizeof(int));

    for (size_t i = 0; i < count; i++)
        x[i] = 1;
    usleep((unsigned)rank * 10000);
    NCCL(ncclAllReduce(x, x, count, ncclInt, ncclSum, comm, stream));
    if (rank == 1)
        NCCL(ncclCommFinalize(comm));
    NCCL(ncclCommDestroy(comm));
    CHECK(x[0] == n && x[count - 1] == n);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

#if NCCL_VERSION_CODE >= 22807
static int a_revoked_communicator_ends_its_work_and_can_be_split(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n), child;
    cudaStream_t stream = stream_up();
    int *x = device_alloc(sizeof(int));

    if (rank == 0)
        NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream)); /* the others never come */
    else
        usleep(20000);
    NCCL(ncclCommRevoke(comm, 0));
    CUDA(cudaStreamSynchronize(stream));
    CHECK(comm_settle(comm) == ncclSuccess);
    CHECK(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream) == ncclInvalidUsage);
    CHECK(ncclCommFinalize(comm) == ncclInvalidUsage);
    NCCL(ncclCommSplit(comm, 0, rank, &child, NULL));
    use(child, stream);
    NCCL(ncclCommDestroy(child));
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}
#endif

static int operators_belong_to_their_communicator_and_type(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n), child;
    cudaStream_t stream = stream_up();
    float *x = device_alloc(4), half = 0.5f;
    ncclRedOp_t op, other, of_child;

    NCCL(ncclCommSplit(comm, 0, rank, &child, NULL));
    NCCL(ncclRedOpCreatePreMulSum(&op, &half, ncclFloat, ncclScalarHostImmediate, comm));
    NCCL(ncclRedOpCreatePreMulSum(&other, &half, ncclFloat, ncclScalarHostImmediate, comm));
    NCCL(ncclRedOpCreatePreMulSum(&of_child, &half, ncclFloat, ncclScalarHostImmediate, child));
    CHECK(op >= ncclNumOps && op != other);
    CHECK(ncclAllReduce(x, x, 1, ncclFloat, op, child, stream) == ncclInvalidArgument);
    CHECK(ncclAllReduce(x, x, 1, ncclInt, op, comm, stream) == ncclInvalidArgument);
    CHECK(ncclRedOpDestroy(op, child) == ncclInvalidArgument);
    *x = 3;
    NCCL(ncclAllReduce(x, x, 1, ncclFloat, op, comm, stream));
    NCCL(ncclRedOpDestroy(op, comm));
    NCCL(ncclRedOpDestroy(other, comm));
    NCCL(ncclRedOpDestroy(of_child, child));
    CHECK(ncclRedOpDestroy(op, comm) == ncclInvalidArgument);
    CUDA(cudaStreamSynchronize(stream));
    CHECK(*x == 1.5f * (float)n);
    NCCL(ncclCommDestroy(child));
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int a_failed_call_fails_the_group_and_nothing_of_it_runs(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n);
    cudaStream_t stream = stream_up();
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    int *x = device_alloc(sizeof(int));

    *x = 5;
    NCCL(ncclGroupStart());
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream));
    CHECK(ncclBroadcast(x, x, 1, ncclInt, n, comm, stream) == ncclInvalidArgument);
    NCCL(ncclGroupEnd());
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    CHECK(strstr(ncclGetLastError(comm), "ncclGroupEnd"));
    NCCL(ncclGroupStart());
    NCCL(ncclSend(x, 1, ncclInt, rank, comm, stream));
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream));
    NCCL(ncclGroupSimulateEnd(&info));
    CHECK(info.estimatedTime > 0);
    CUDA(cudaStreamSynchronize(stream));
    CHECK(*x == 5);
    CHECK(ncclAllReduce(x, x, 1, ncclNumTypes, ncclSum, comm, stream) == ncclInvalidArgument);
    CHECK(ncclAllReduce(x, x, 1, ncclInt, ncclSum, NULL, stream) == ncclInvalidArgument);
    CHECK(ncclAllReduce(NULL, x, 1, ncclInt, ncclSum, comm, stream) == ncclInvalidArgument);
    use(comm, stream);
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

/* One rank: where ranks are threads, a fault that is told of is whoever's comes first. */
static int a_group_fails_at_its_end_where_it_is_told_to(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n);
    cudaStream_t stream = stream_up();
    int *x = device_alloc(sizeof(int));

    *x = 5;
    lcrig_fail_next("ncclGroupEnd");
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream));
    CHECK(ncclGroupEnd() == ncclSystemError);
    CHECK(strstr(ncclGetLastError(comm), "ncclGroupEnd: injected fault"));
    use(comm, stream);
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

static int a_failed_group_creates_nothing_but_ends_what_it_ends(int rank, int n, void *arg)
{
    ncclComm_t comm = (ncclComm_t)8;
    ncclUniqueId id;

    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&comm, 2, id, 0)); /* would wait for a second rank */
    CHECK(ncclBroadcast(&id, &id, 1, ncclInt, 0, NULL, NULL) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    CHECK(!comm);
    /* But an end in it is an end. */
    NCCL(ncclCommInitRank(&comm, 1, id, 0));
    NCCL(ncclGroupStart());
    NCCL(ncclCommDestroy(comm));
    CHECK(ncclBroadcast(&id, &id, 1, ncclInt, 0, NULL, NULL) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    return 0;
}

static int memory_and_registrations_are_local(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n);
    ncclWindow_t window;
    void *ptr, *handle;

    NCCL(ncclMemAlloc(&ptr, 10000));
    CHECK(lcrig_is_device_memory(ptr, 10000) && (size_t)ptr % NCCL_WIN_REQUIRED_ALIGNMENT == 0);
    NCCL(ncclCommRegister(comm, ptr, 10000, &handle));
    NCCL(ncclCommWindowRegister(comm, ptr, 10000, &window, NCCL_WIN_COLL_SYMMETRIC));
    NCCL(ncclCommDeregister(comm, handle));
    NCCL(ncclCommWindowDeregister(comm, window));
    NCCL(ncclMemFree(ptr));
    NCCL(ncclCommDestroy(comm));
    return 0;
}

/* ---- abort ---- */

static int abort_frees_the_caller_at_once_and_tells_the_peers(int rank, int n, void *arg)
{
    ncclComm_t comm = comm_up(arg, rank, n);
    cudaStream_t stream = stream_up();
    int *x = device_alloc(400000);

    NCCL(ncclGroupStart());
    for (int peer = 1; peer < n; peer++)
        if (peer != rank && rank != 0)
            NCCL(ncclSend(x, 100000, ncclInt, peer, comm, stream)); /* nobody receives */
    NCCL(ncclGroupEnd());
    meeting_wait(arg, n);
    if (rank == 1) {
        NCCL(ncclCommAbort(comm));
    } else if (rank > 1) {
        CHECK(comm_error_within(comm, PATIENCE_MS) == ncclRemoteError);
        CHECK(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream) == ncclRemoteError);
        NCCL(ncclCommAbort(comm));
    } else { /* has nothing to do with any of this, and no error until it tries */
        CHECK(comm_error_within(comm, 50) == ncclSuccess);
        NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, stream));
        CHECK(comm_error_within(comm, PATIENCE_MS) == ncclRemoteError);
        NCCL(ncclCommDestroy(comm));
    }
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    meeting_wait(arg, n); /* it was not the end of a process that was seen */
    return 0;
}

struct lonely {
    ncclComm_t comm; /* written early by the init, read by the aborter: atomically */
    ncclUniqueId id;
    ncclResult_t result;
};

static void *init_alone(void *arg)
{
    struct lonely *lonely = arg;

    lonely->result = ncclCommInitRank(&lonely->comm, 2, lonely->id, 0);
    return NULL;
}

static int abort_ends_an_init_that_waits_for_a_missing_rank(int rank, int n, void *arg)
{
    struct lonely lonely = { 0 };
    ncclComm_t comm;
    pthread_t thread;

    NCCL(ncclGetUniqueId(&lonely.id));
    CHECK(pthread_create(&thread, NULL, init_alone, &lonely) == 0);
    while (!(comm = __atomic_load_n(&lonely.comm, __ATOMIC_ACQUIRE)))
        usleep(1000);
    usleep(10000);
    NCCL(ncclCommAbort(comm));
    pthread_join(thread, NULL);
    CHECK(lonely.result == ncclInternalError);
    return 0;
}

struct splitter {
    ncclComm_t comm;
    _Atomic int task; /* 0, then the thread that is about to split */
    ncclResult_t result;
};

/* For a tenth of a second: then it waits in what it was about to call. Or until it has ended, which the other rank's abort
 * may have it do. */
static void wait_until_asleep(int task)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    char path[64], state;

    (void)snprintf(path, sizeof(path), "/proc/self/task/%d/stat", task);
    for (int times = 0; times < 50; times++) {
        FILE *file = fopen(path, "re");

        if (!file || fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
            times = 50;
        else if (state != 'S')
            times = 0;
        if (file)
            fclose(file);
        CHECK(!lc_deadline_passed(until));
        usleep(2000);
    }
}

static void *split_alone(void *arg)
{
    struct splitter *splitter = arg;
    ncclComm_t child;

    atomic_store(&splitter->task, (int)gettid());
    splitter->result = ncclCommSplit(splitter->comm, 0, 0, &child, NULL);
    return NULL;
}

/* The others never split. */
static int abort_ends_a_split_in_another_thread(int rank, int n, void *arg)
{
    struct splitter splitter = { comm_up(arg, rank, n), 0, ncclSuccess };
    pthread_t thread;

    if (rank == 0) {
        CHECK(pthread_create(&thread, NULL, split_alone, &splitter) == 0);
        while (!atomic_load(&splitter.task))
            usleep(1000);
        wait_until_asleep(atomic_load(&splitter.task));
    }
    NCCL(ncclCommAbort(splitter.comm));
    if (rank == 0) {
        pthread_join(thread, NULL);
        CHECK(splitter.result == ncclRemoteError);
    }
    return 0;
}

static int init_gives_up_when_a_rank_does_not_come(int rank, int n, void *arg)
{
    ncclUniqueId id;
    ncclComm_t comm = (ncclComm_t)8;

    setenv("LCRIG_TIMEOUT_S", "1", 1);
    NCCL(ncclGetUniqueId(&id));
    CHECK(ncclCommInitRank(&comm, 2, id, 0) == ncclSystemError);
    CHECK(!comm && strstr(ncclGetLastError(NULL), "within 1 s"));
    unsetenv("LCRIG_TIMEOUT_S");
    return 0;
}

static int aborts_in_a_group_of_one_thread_do_not_wait_for_each_other(int rank, int n, void *arg)
{
    ncclComm_t comms[2];
    cudaStream_t stream;
    int *x;

    NCCL(ncclCommInitAll(comms, 2, NULL));
    CUDA(cudaSetDevice(0));
    stream = stream_up();
    x = device_alloc(sizeof(int));
    NCCL(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comms[0], stream));
    NCCL(ncclGroupStart());
    NCCL(ncclCommAbort(comms[0]));
    NCCL(ncclCommAbort(comms[1]));
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

int main(int argc, char **argv)
{
    static const struct nccl_test tests[] = {
        NCCL_TEST(1, a_unique_id_uses_fewer_than_48_bytes),
        NCCL_TEST(1, the_version_can_be_pretended),
        NCCL_TEST(5, split_orders_by_key_and_leaves_out_no_color),
        NCCL_TEST(3, shrink_needs_only_those_who_stay),
        NCCL_TEST(3, shrink_with_abort_frees_ranks_from_a_hanging_operation),
        NCCL_TEST(2, a_nonblocking_communicator_is_in_progress_until_all_have_come),
        NCCL_TEST(3, several_communicators_are_made_split_and_destroyed_in_a_group),
        NCCL_TEST(4, destroy_waits_for_work_and_needs_no_order_of_ranks),
#if NCCL_VERSION_CODE >= 22807
        NCCL_TEST(2, a_revoked_communicator_ends_its_work_and_can_be_split),
#endif
        NCCL_TEST(2, operators_belong_to_their_communicator_and_type),
        NCCL_TEST(2, a_failed_call_fails_the_group_and_nothing_of_it_runs),
        NCCL_TEST(1, a_group_fails_at_its_end_where_it_is_told_to),
        NCCL_TEST(1, a_failed_group_creates_nothing_but_ends_what_it_ends),
        NCCL_TEST(2, memory_and_registrations_are_local),
        NCCL_TEST(3, abort_frees_the_caller_at_once_and_tells_the_peers),
        NCCL_TEST(1, abort_ends_an_init_that_waits_for_a_missing_rank),
        NCCL_TEST(2, abort_ends_a_split_in_another_thread),
        NCCL_TEST(1, init_gives_up_when_a_rank_does_not_come),
        NCCL_TEST(1, aborts_in_a_group_of_one_thread_do_not_wait_for_each_other),
    };

    return nccl_tests_run(tests, sizeof(tests) / sizeof(*tests), argc, argv);
}
