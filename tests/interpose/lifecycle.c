/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators come and go in every way, with an agreement on them. That something of ours is in use shows in the
 * results: they are rounded to bf16 on the wire. argv: processes or threads, cycles of the last part. */
#include "common/deadline.h"
#include "tests/rig/test_nccl.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>

#define COUNT    3001
#define ERROR_MS PATIENCE_MS

static int cycles = 1000;
static bool threads, rings;

struct buffers {
    cudaStream_t stream;
    float *send, *recv;
};

static struct buffers buffers_up(int rank)
{
    struct buffers b;

    CUDA(cudaSetDevice(rank));
    b.stream = stream_up();
    b.send = device_alloc(COUNT * sizeof(float));
    b.recv = device_alloc(COUNT * sizeof(float));
    for (int i = 0; i < COUNT; i++)
        b.send[i] = (float)sin(i * 0.37 + rank);
    return b;
}

static void buffers_down(struct buffers *b)
{
    (void)cudaStreamSynchronize(b->stream); /* aborted work is an error of its own */
    CUDA(cudaStreamDestroy(b->stream));
    CUDA(cudaFree(b->send));
    CUDA(cudaFree(b->recv));
}

/* Of ranks [0, n). */
static bool is_rounded(const struct buffers *b, int n)
{
    double diff = 0, norm = 0;

    for (int i = 0; i < COUNT; i++) {
        double want = 0;

        for (int r = 0; r < n; r++)
            want += (float)sin(i * 0.37 + r);
        diff += (b->recv[i] - want) * (b->recv[i] - want);
        norm += want * want;
    }
    CHECK(sqrt(diff / norm) < 1e-2);
    return sqrt(diff / norm) > 1e-5;
}

/* An abort frees nothing on the device, so the rig is not to look for what is left there. */
static void abort_comm(ncclComm_t comm)
{
    NCCL(ncclCommAbort(comm));
    if (!threads)
        CHECK(setenv("LCRIG_LEAKS", "0", 1) == 0);
}

static ncclResult_t reduce(const struct buffers *b, ncclComm_t comm)
{
    return ncclAllReduce(b->send, b->recv, COUNT, ncclFloat, ncclSum, comm, b->stream);
}

/* Calls until one is ours: the same one on all ranks, or they would have hung. */
static bool commits(const struct buffers *b, ncclComm_t comm, int n)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);

    while (!lc_deadline_passed(until)) {
        NCCL(reduce(b, comm));
        CUDA(cudaStreamSynchronize(b->stream));
        if (is_rounded(b, n))
            return true;
        usleep(1000);
    }
    return false;
}

/* Until the communicator has an error, which is returned, or the stream is through. An aborted one is through, too. */
static ncclResult_t wait_for(const struct buffers *b, ncclComm_t comm, int ms)
{
    struct lc_deadline until = lc_deadline_in_ms(ms);
    ncclResult_t state = ncclSuccess;
    bool done = false;

    while (!done && state == ncclSuccess && !lc_deadline_passed(until)) {
        usleep(1000);
        done = cudaStreamQuery(b->stream) != cudaErrorNotReady;
        NCCL(ncclCommGetAsyncError(comm, &state));
    }
    return state;
}

/* ---- ways to make one ---- */

static int made_in_every_way(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = meeting_id(arg, rank);
    ncclComm_t first, scalable, child, grandchild;

    NCCL(ncclCommInitRankConfig(&first, n, id, rank, &config));
    CHECK(commits(&b, first, n));
    NCCL(ncclCommSplit(first, 3, rank, &child, NULL));
    CHECK(commits(&b, child, n));
    NCCL(ncclGroupStart());
    NCCL(ncclCommSplit(child, 0, rank, &grandchild, &config));
    NCCL(ncclGroupEnd());
    NCCL(ncclCommDestroy(first)); /* parents may go first */
    NCCL(ncclCommDestroy(child));
    CHECK(commits(&b, grandchild, n));
    NCCL(ncclCommFinalize(grandchild));
    NCCL(ncclCommDestroy(grandchild));
    meeting_wait(arg, n);
    if (rank == 0)
        atomic_store(&((struct meeting *)arg)->has_id, 0);
    meeting_wait(arg, n);
    id = meeting_id(arg, rank);
    NCCL(ncclCommInitRankScalable(&scalable, n, rank, 1, &id, NULL));
    CHECK(commits(&b, scalable, n));
    NCCL(ncclCommDestroy(scalable));
    buffers_down(&b);
    return 0;
}

/* Those who are left out of a shrink do not make the call, and all go on together afterwards: what is counted must stay
 * equal. */
static int shrunk_and_split(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    ncclComm_t comm = comm_up(arg, rank, n), shrunk[2], split;
    int without[2] = { n - 1, n - 2 };

    for (int i = 0; i < 2; i++) {
        if (rank != without[i])
            NCCL(ncclCommShrink(comm, &without[i], 1, &shrunk[i], NULL, NCCL_SHRINK_DEFAULT));
        NCCL(ncclCommSplit(comm, 0, rank, &split, NULL));
        CHECK(commits(&b, split, n));
        NCCL(ncclCommDestroy(split));
    }
    if (rank != n - 1) {
        CHECK(commits(&b, shrunk[0], n - 1));
        NCCL(ncclCommDestroy(shrunk[0]));
    }
    if (rank != n - 2)
        NCCL(ncclCommDestroy(shrunk[1]));
    CHECK(commits(&b, comm, n));
    NCCL(ncclCommDestroy(comm));
    buffers_down(&b);
    return 0;
}

static int not_blocking_stays_with_nccl(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id = meeting_id(arg, rank);
    ncclComm_t comm;
    ncclResult_t result;

    config.blocking = 0;
    result = ncclCommInitRankConfig(&comm, n, id, rank, &config);
    CHECK((result == ncclSuccess || result == ncclInProgress) && comm_settle(comm) == ncclSuccess);
    for (int call = 0; call < 32; call++) {
        result = reduce(&b, comm);
        CHECK(result == ncclSuccess || result == ncclInProgress);
        CHECK(comm_settle(comm) == ncclSuccess);
        CUDA(cudaStreamSynchronize(b.stream));
        CHECK(!is_rounded(&b, n));
    }
    result = ncclCommFinalize(comm);
    CHECK(result == ncclSuccess || result == ncclInProgress);
    CHECK(comm_settle(comm) == ncclSuccess);
    NCCL(ncclCommDestroy(comm));
    buffers_down(&b);
    return 0;
}

/* NULL: not set. */
static void set_policy(const char *text)
{
    CHECK((text ? setenv("NCCL_CTA_POLICY", text, 1) : unsetenv("NCCL_CTA_POLICY")) == 0);
}

/* A communicator made so; whether something of its calls is ours. */
static bool is_ours_with_policy(const struct buffers *b, struct meeting *meeting, int rank, int n,
                                const char *variable, int in_config)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    bool ours = false;
    ncclComm_t comm;

    meeting_wait(meeting, n);
    if (!threads || rank == 0)
        set_policy(variable);
    config.CTAPolicy = in_config;
    if (rank == 0)
        NCCL(ncclGetUniqueId(&meeting->id));
    meeting_wait(meeting, n);
    NCCL(ncclCommInitRankConfig(&comm, n, meeting->id, rank, &config));
    if (variable ? strcasestr(variable, "zero") || *variable == '2'
                 : in_config == NCCL_CTA_POLICY_ZERO) {
        for (int call = 0; call < 64 && !ours; call++) {
            NCCL(reduce(b, comm));
            CUDA(cudaStreamSynchronize(b->stream));
            ours = is_rounded(b, n);
            usleep(1000);
        }
    } else {
        ours = commits(b, comm, n);
    }
    NCCL(ncclCommDestroy(comm));
    meeting_wait(meeting, n);
    if (!threads || rank == 0)
        set_policy(NULL);
    return ours;
}

static int without_ctas_stays_with_nccl(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    const int undefined = NCCL_CONFIG_UNDEF_INT, zero = NCCL_CTA_POLICY_ZERO;

    CHECK(!is_ours_with_policy(&b, arg, rank, n, NULL, zero));
    CHECK(!is_ours_with_policy(&b, arg, rank, n, "2", undefined));
    CHECK(!is_ours_with_policy(&b, arg, rank, n, "Zero", NCCL_CTA_POLICY_EFFICIENCY));
    CHECK(!is_ours_with_policy(&b, arg, rank, n, "EFFICIENCY|ZERO", undefined));
    CHECK(is_ours_with_policy(&b, arg, rank, n, "EFFICIENCY", zero));
    CHECK(is_ours_with_policy(&b, arg, rank, n, "0", zero));
    CHECK(is_ours_with_policy(&b, arg, rank, n, "7", undefined));
    buffers_down(&b);
    return 0;
}

/* One thread calls for all of them, in groups. */
static void ranks_of_one_thread(ncclComm_t *comms, struct buffers *b, int n)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool rounded = false;

    while (!rounded) {
        CHECK(!lc_deadline_passed(until));
        NCCL(ncclGroupStart());
        for (int r = 0; r < n; r++)
            NCCL(reduce(&b[r], comms[r]));
        NCCL(ncclGroupEnd());
        for (int r = 0; r < n; r++) {
            CUDA(cudaStreamSynchronize(b[r].stream));
            CHECK(r == 0 || is_rounded(&b[r], n) == rounded);
            rounded = is_rounded(&b[r], n);
        }
        usleep(1000);
    }
    for (int r = 0; r < n; r++)
        NCCL(ncclCommDestroy(comms[(r + 1) % n]));
}

static int several_in_one_process(int rank, int n, void *arg)
{
    enum {
        RANKS = 3
    };
    struct buffers b[RANKS];
    ncclComm_t comms[RANKS];
    ncclUniqueId id;

    for (int r = 0; r < RANKS; r++)
        b[r] = buffers_up(r);
    NCCL(ncclCommInitAll(comms, RANKS, NULL));
    ranks_of_one_thread(comms, b, RANKS);
    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclGroupStart());
    for (int r = 0; r < RANKS; r++) {
        CUDA(cudaSetDevice(r));
        NCCL(ncclCommInitRank(&comms[r], RANKS, id, r));
    }
    NCCL(ncclGroupEnd());
    ranks_of_one_thread(comms, b, RANKS);
    for (int r = 0; r < RANKS; r++)
        buffers_down(&b[r]);
    return 0;
}

/* ---- ways to end ---- */

static int death_while_peers_wait(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    ncclComm_t comm = comm_up(arg, rank, n);

    CHECK(commits(&b, comm, n));
    if (rank == 1) {
        usleep(50000);
        _exit(0);
    }
    NCCL(reduce(&b, comm));
    CHECK(wait_for(&b, comm, 50 + ERROR_MS) == ncclRemoteError);
    abort_comm(comm);
    buffers_down(&b);
    return 0;
}

/* Idle peers are not concerned, and end as they like. */
static int exit_without_destroy(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    ncclComm_t comm = comm_up(arg, rank, n);
    ncclResult_t state;

    CHECK(commits(&b, comm, n));
    meeting_wait(arg, n);
    if (rank == 1)
        _exit(0);
    for (int i = 0; i < 300; i++) {
        NCCL(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclSuccess);
        usleep(1000);
    }
    state = reduce(&b, comm); /* but the next call would wait for ever */
    CHECK(state != ncclSuccess || wait_for(&b, comm, ERROR_MS) == ncclRemoteError);
    CHECK(reduce(&b, comm) != ncclSuccess);
    abort_comm(comm);
    buffers_down(&b);
    return 0;
}

static void *abort_soon(void *comm)
{
    usleep(30000);
    abort_comm(comm);
    return NULL;
}

static int abort_while_peers_wait(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    ncclComm_t comm = comm_up(arg, rank, n);
    pthread_t thread;

    CHECK(commits(&b, comm, n));
    if (rank == 1) {
        CHECK(pthread_create(&thread, NULL, abort_soon, comm) == 0);
        pthread_join(thread, NULL);
    } else {
        NCCL(reduce(&b, comm));
        CHECK(wait_for(&b, comm, 30 + ERROR_MS) == ncclRemoteError);
        abort_comm(comm);
    }
    buffers_down(&b);
    return 0;
}

#if NCCL_VERSION_CODE >= 22807
static void *revoke_soon(void *comm)
{
    usleep((unsigned)((uintptr_t)comm / 64 % 4000));
    NCCL(ncclCommRevoke(comm, 0));
    return NULL;
}

/* At any moment of set-up and of the first calls. */
static int revoked_by_another_thread(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    struct meeting *meeting = arg;

    for (int cycle = 0; cycle < 12; cycle++) {
        struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
        ncclComm_t comm = comm_up(arg, rank, n);
        ncclResult_t result = ncclSuccess;
        pthread_t thread;

        CHECK(pthread_create(&thread, NULL, revoke_soon, comm) == 0);
        while (result == ncclSuccess) {
            CHECK(!lc_deadline_passed(until));
            result = reduce(&b, comm);
            if (result == ncclSuccess)
                result = wait_for(&b, comm, 2 * ERROR_MS);
        }
        pthread_join(thread, NULL);
        abort_comm(comm);
        CUDA(cudaStreamSynchronize(b.stream));
        meeting_wait(arg, n);
        if (rank == 0)
            atomic_store(&meeting->has_id, 0);
        meeting_wait(arg, n);
    }
    buffers_down(&b);
    return 0;
}
#endif

static int survivors_go_on(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    ncclComm_t comm = comm_up(arg, rank, n), rest;
    int dead = n - 1;

    CHECK(commits(&b, comm, n));
    if (rank == dead) {
        usleep(20000);
        abort_comm(comm);
        buffers_down(&b);
        return 0;
    }
    NCCL(reduce(&b, comm));
    CHECK(wait_for(&b, comm, 20 + ERROR_MS) == ncclRemoteError);
    NCCL(ncclCommShrink(comm, &dead, 1, &rest, NULL, NCCL_SHRINK_ABORT));
    abort_comm(comm);
    CHECK(commits(&b, rest, n - 1));
    NCCL(ncclCommDestroy(rest));
    buffers_down(&b);
    return 0;
}

/* ---- nothing is left ---- */

static int count_entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int count = 0;

    CHECK(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static int count_lines(const char *path)
{
    FILE *file = fopen(path, "r");
    int count = 0, c;

    CHECK(file);
    while ((c = fgetc(file)) != EOF)
        count += c == '\n';
    fclose(file);
    return count;
}

struct held {
    int fds, tasks, maps;
};

static struct held count_held(void)
{
    return (struct held){ count_entries("/proc/self/fd"), count_entries("/proc/self/task"),
                          count_lines("/proc/self/maps") };
}

static bool is_more(struct held now, struct held before)
{
    return now.fds > before.fds + 2 || now.tasks > before.tasks + 1 ||
           now.maps > before.maps + 16; /* the allocator's own come and go */
}

static int nothing_is_left(int rank, int n, void *arg)
{
    struct buffers b = buffers_up(rank);
    struct meeting *meeting = arg;
    struct held before = { 0 }, now;
    struct lc_deadline until;
    int ours = 0;

    for (int cycle = 0; cycle < cycles; cycle++) {
        ncclComm_t comm = comm_up(arg, rank, n);

        for (int call = 0; call < (rings ? 40 : 8); call++) {
            NCCL(reduce(&b, comm));
            CUDA(cudaStreamSynchronize(b.stream));
            if (rings)
                usleep(500); /* it takes more rounds to agree */
        }
        if (cycle % 8 == 0) /* of the others most do, unless the machine is busy */
            CHECK(commits(&b, comm, n));
        ours += is_rounded(&b, n);
        if (rank == cycle % n) /* in any order */
            usleep(200);
        NCCL(ncclCommDestroy(comm));
        meeting_wait(arg, n);
        if (rank == 0)
            atomic_store(&meeting->has_id, 0);
        meeting_wait(arg, n);
        if (cycle == cycles / 10) {
            usleep(200000);
            before = count_held();
        }
    }
    until = lc_deadline_in_ms(PATIENCE_MS);
    while (is_more(now = count_held(), before) && !lc_deadline_passed(until))
        usleep(10000); /* goodbyes are read */
    printf(
        "rank %d: %d of %d were ours; descriptors %d, then %d; threads %d, %d; mappings %d, %d\n",
        rank, ours, cycles, before.fds, now.fds, before.tasks, now.tasks, before.maps, now.maps);
    CHECK(ours > cycles / 20 && !is_more(now, before));
    buffers_down(&b);
    return 0;
}

static const struct nccl_test tests[] = {
    NCCL_TEST(3, made_in_every_way),
    NCCL_TEST(4, shrunk_and_split),
    NCCL_TEST(2, not_blocking_stays_with_nccl),
    NCCL_TEST(2, without_ctas_stays_with_nccl),
    NCCL_TEST(1, several_in_one_process),
    NCCL_TEST(3, abort_while_peers_wait),
#if NCCL_VERSION_CODE >= 22807
    NCCL_TEST(2, revoked_by_another_thread),
#endif
    NCCL_TEST(3, survivors_go_on),
    NCCL_TEST(2, nothing_is_left),
    /* not as threads: they end the process */
    NCCL_TEST(3, death_while_peers_wait),
    NCCL_TEST(3, exit_without_destroy),
};
#define TESTS (sizeof(tests) / sizeof(*tests))

int main(int argc, char **argv)
{
    const char *peer = getenv("LOONGCOMM_PEER");

    rings = peer && strcmp(peer, "force") == 0;
    threads = argc > 1 && strcmp(argv[1], "threads") == 0;
    if (threads)
        CHECK(setenv("LCRIG_LEAKS", "0", 1) == 0);
    if (argc > 2)
        cycles = atoi(argv[2]);
    return nccl_tests_run(tests, threads ? TESTS - 2 : TESTS, argc, argv);
}
