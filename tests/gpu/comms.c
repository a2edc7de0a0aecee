/* SPDX-License-Identifier: Apache-2.0
 *
 * usage: comms RANKS COUNT SECONDS
 * What many communicators cost: makes COUNT of them, as many as SECONDS are enough for, each rank a node of its own, uses
 * each for a small all-reduce and a small exchange, and says how long that took and how many threads and descriptors each
 * process has more than before, while all are open. One line. */
#include "common/deadline.h"
#include "tests/gpu/job.h"
#include "tests/rig/ranks.h"

#include <dirent.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_RANKS 16
#define MOST_COMMS 1024
#define COUNT      2048

/* Of one rank, written by it before it ends. */
struct cost {
    double init_ms, reduce_ms, exchange_ms; /* of all communicators together */
    int threads, descriptors;
};

struct shared {
    int wanted;
    double seconds;
    ncclUniqueId ids[MOST_COMMS]; /* written by rank 0 before `ready` */
    _Atomic int ready;            /* communicators that all shall make; release, acquire */
    _Atomic bool over;            /* there will be no more */
    struct cost costs[MOST_RANKS];
};

static int entries(const char *path)
{
    DIR *folder = opendir(path);
    int n = -2; /* . and .. */

    CHECK(folder);
    while (readdir(folder))
        n++;
    closedir(folder);
    return n;
}

static double since_ms(int64_t *last)
{
    int64_t now = lc_now_ns();
    double ms = (double)(now - *last) / 1e6;

    *last = now;
    return ms;
}

/* False: there is none. Rank 0 alone looks at the clock, so that all make the same. */
static bool next(struct shared *shared, int rank, int i, int64_t begun)
{
    if (rank == 0) {
        if (i == shared->wanted ||
            (i > 0 && (double)(lc_now_ns() - begun) > shared->seconds * 1e9)) {
            atomic_store(&shared->over, true);
            return false;
        }
        NCCL(ncclGetUniqueId(&shared->ids[i]));
        atomic_store(&shared->ready, i + 1);
    }
    while (atomic_load(&shared->ready) <= i) {
        if (atomic_load(&shared->over))
            return atomic_load(&shared->ready) > i;
        usleep(200);
    }
    return true;
}

static void use(ncclComm_t comm, int rank, int ranks, float *data, cudaStream_t stream,
                struct cost *cost, int64_t *last)
{
    NCCL(ncclAllReduce(data, data, COUNT, ncclFloat32, ncclSum, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
    cost->reduce_ms += since_ms(last);
    job_exchange(comm, rank, ranks, data, COUNT, stream);
    CUDA(cudaStreamSynchronize(stream));
    cost->exchange_ms += since_ms(last);
}

static int run_rank(int rank, int ranks, void *arg)
{
    static ncclComm_t comms[MOST_COMMS];
    struct shared *shared = arg;
    struct cost cost = { 0 };
    int64_t begun = lc_now_ns();
    int devices = job_devices(), n = 0;
    cudaStream_t stream;
    float *data;

    if (devices == 0)
        return LC_SKIP;
    job_be_on_node(rank);
    stream = job_stream(rank % devices);
    data = job_buffer(ranks, COUNT, stream);
    CUDA(cudaStreamSynchronize(stream));
    cost.threads = -entries("/proc/self/task");
    cost.descriptors = -entries("/proc/self/fd");
    for (; next(shared, rank, n, begun); n++) {
        int64_t last = lc_now_ns();

        NCCL(ncclCommInitRank(&comms[n], ranks, shared->ids[n], rank));
        cost.init_ms += since_ms(&last);
        use(comms[n], rank, ranks, data, stream, &cost, &last);
    }
    cost.threads += entries("/proc/self/task");
    cost.descriptors += entries("/proc/self/fd");
    shared->costs[rank] = cost;
    while (n > 0)
        NCCL(ncclCommDestroy(comms[--n]));
    CUDA(cudaFree(data));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

/* Of the rank that has most of each. */
static void say(const struct shared *shared, int ranks)
{
    int n = atomic_load(&shared->ready);
    struct cost most = { 0 };

    for (int i = 0; i < ranks; i++) {
        const struct cost *cost = &shared->costs[i];

        most.init_ms = cost->init_ms > most.init_ms ? cost->init_ms : most.init_ms;
        most.reduce_ms = cost->reduce_ms > most.reduce_ms ? cost->reduce_ms : most.reduce_ms;
        most.exchange_ms = cost->exchange_ms > most.exchange_ms ? cost->exchange_ms
                                                                : most.exchange_ms;
        most.threads = cost->threads > most.threads ? cost->threads : most.threads;
        most.descriptors = cost->descriptors > most.descriptors ? cost->descriptors
                                                                : most.descriptors;
    }
    printf(
        "%d communicators of %d ranks: each init %.1f ms, first all-reduce %.1f ms, first exchange %.1f ms; "
        "in all %d threads, %d descriptors\n",
        n, ranks, most.init_ms / n, most.reduce_ms / n, most.exchange_ms / n, most.threads,
        most.descriptors);
}

int main(int argc, char **argv)
{
    struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int ranks = argc == 4 ? atoi(argv[1]) : 0;
    int failed;

    CHECK(shared != MAP_FAILED);
    if (ranks < 2 || ranks > MOST_RANKS || atoi(argv[2]) < 1 || atoi(argv[2]) > MOST_COMMS) {
        fputs("usage: comms RANKS COUNT SECONDS\n", stderr);
        return 2;
    }
    shared->wanted = atoi(argv[2]);
    shared->seconds = atof(argv[3]);
    failed = lc_ranks_run(ranks, run_rank, shared, 60);
    if (!failed)
        say(shared, ranks);
    return failed;
}
