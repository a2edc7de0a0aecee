/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts the ranks. The parent of processes touches neither CUDA nor NCCL. See reduce.h. */
#include "tests/gpu/reduce.h"
#include "tests/rig/ranks.h"

#include <dlfcn.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define USAGE                                                                     \
    "usage: reduce [--ranks N] [--threads] [--seed N] [--seconds S] [--limit S] " \
    "[--only CASE] [--streams default|thread]\n"
#define ARENA       ((size_t)160 << 20)
#define SOAK_FACTOR 15

struct options {
    int ranks, limit_s;
    bool threads, per_thread;
    uint64_t seed;
    double seconds;
    const char *only;
    struct rd_shared *shared;
};

static void read_settings(struct rd_rank *me)
{
    const char *wire = getenv("LOONGCOMM_ALLREDUCE_WIRE"), *least = getenv("LOONGCOMM_MIN_BYTES");
    const char *peer = getenv("LOONGCOMM_PEER");

    me->min_bytes = least ? strtoul(least, NULL, 10) : 65536;
    if (!dlsym(RTLD_DEFAULT, "loongcommCallsSeen"))
        return;
    me->rings = peer && strcmp(peer, "off") != 0;
    if (!wire || strcmp(wire, "data") == 0)
        return;
    me->wire = strcmp(wire, "bf16") == 0 ? RD_BF16 : RD_ACCURATE;
}

static void set_up(struct rd_rank *me, const struct options *options)
{
    static const float half = 0.5f;

    (void)job_choose_device(me->rank, me->n);
    me->rig = dlsym(RTLD_DEFAULT, "lcrig_enqueue") != NULL;
    read_settings(me);
    me->last_take = &me->takes;
    me->device.size = me->host.size = ARENA;
    CUDA(cudaMalloc((void **)&me->device.base, ARENA));
    CUDA(cudaHostAlloc((void **)&me->host.base, ARENA, 0));
    CUDA(cudaMalloc((void **)&me->factor, sizeof(half)));
    CUDA(cudaMemcpy(me->factor, &half, sizeof(half), cudaMemcpyHostToDevice));
    for (int i = 0; i < 2; i++)
        CUDA(cudaStreamCreateWithFlags(&me->streams[i], cudaStreamNonBlocking));
    me->streams[2] = options->per_thread ? cudaStreamPerThread : NULL;
    CUDA(cudaEventCreateWithFlags(&me->event, cudaEventDisableTiming));
    me->comms[0].rank = me->rank;
    me->comms[1].rank = me->n - 1 - me->rank;
    me->comms[1].reversed = true;
    NCCL(ncclCommInitRank(&me->comms[0].handle, me->n, job_get_id(&me->shared->id, me->rank),
                          me->rank));
    NCCL(ncclCommSplit(me->comms[0].handle, 0, me->n - 1 - me->rank, &me->comms[1].handle, NULL));
}

static void tear_down(struct rd_rank *me)
{
    for (int i = RD_COMMS - 1; i >= 0; i--)
        NCCL(ncclCommDestroy(me->comms[i].handle));
    for (int i = 0; i < 2; i++)
        CUDA(cudaStreamDestroy(me->streams[i]));
    CUDA(cudaEventDestroy(me->event));
    CUDA(cudaFree(me->factor));
    CUDA(cudaFree(me->device.base));
    CUDA(cudaFreeHost(me->host.base));
}

static int run_rank(int rank, int n, void *arg)
{
    const struct options *options = arg;
    struct rd_rank me = { .rank = rank,
                          .n = n,
                          .threads = options->threads,
                          .shared = options->shared };

    set_up(&me, options);
    for (int comm = 0; comm < RD_COMMS; comm++)
        rd_agree(&me, comm, me.streams[0]);
    rd_cases(&me, options->only);
    rd_random(&me, options->seed, options->seconds);
    tear_down(&me);
    return 0;
}

static bool parse(int argc, char **argv, struct options *options)
{
    static const struct option names[] = {
        {"ranks",      required_argument, NULL, 'r' },
        { "threads",        no_argument, NULL, 't' },
        { "seed",           required_argument, NULL, 's' },
        { "seconds",required_argument, NULL, 'd' },
        { "limit",         required_argument, NULL, 'l' },
        { "only",      required_argument, NULL, 'o' },
        { "streams",        required_argument, NULL, 'p' },
        { 0          },
    };
    int option;

    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 'r': options->ranks = atoi(optarg); break;
        case 't': options->threads = true; break;
        case 's': options->seed = strtoull(optarg, NULL, 10); break;
        case 'd': options->seconds = atof(optarg); break;
        case 'l': options->limit_s = atoi(optarg); break;
        case 'o': options->only = optarg; break;
        case 'p': options->per_thread = strcmp(optarg, "thread") == 0; break;
        default: return false;
        }
    }
    return optind == argc && options->ranks >= 2 && options->ranks <= RD_MAX_RANKS;
}

int main(int argc, char **argv)
{
    struct options options = { .ranks = 2, .limit_s = 120, .seed = 1, .seconds = 5 };
    int failed;

    if (!parse(argc, argv, &options)) {
        fputs(USAGE, stderr);
        return 2;
    }
    if (getenv("LCTEST_SOAK")) { /* tests/run --soak */
        options.seconds *= SOAK_FACTOR;
        options.limit_s *= SOAK_FACTOR;
        options.seed = (uint64_t)getpid() * 1000;
    }
    options.shared = mmap(NULL, sizeof(*options.shared), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(options.shared != MAP_FAILED);
    failed = (options.threads ? lc_ranks_run_threads : lc_ranks_run)(options.ranks, run_rank,
                                                                     &options, options.limit_s);
    if (failed == LC_SKIP)
        return LC_SKIP;
    printf("reduce: %d ranks%s: %s\n", options.ranks, options.threads ? " as threads" : "",
           failed ? "FAILED" : "passed");
    return failed ? 1 : 0;
}
