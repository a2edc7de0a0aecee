/* SPDX-License-Identifier: Apache-2.0
 *
 * Error of an fp32 all-reduce against fp64, on independent N(0,1) data, with whatever LOONGCOMM_ALLREDUCE_WIRE says:
 * wire_error [--threads] [--count N] [--most E] RANKS... prints a line for each number of ranks and, with --json, a
 * record. --most: fails if the relative L2 error is larger. */
#include "tests/gpu/reduce.h"
#include "tests/rig/ranks.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define WARM 64 /* calls by which the ranks have agreed */

struct job {
    struct rd_shared *shared;
    size_t count;
    double most;
    bool json;
};

static double uniform(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return ((double)((x ^ (x >> 31)) >> 12) + 0.5) * 0x1p-52;
}

/* Box and Muller. */
static float normal(int rank, size_t i)
{
    uint64_t at = ((uint64_t)(rank + 1) << 32 | i) * 0x9e3779b97f4a7c15u;

    return (float)(sqrt(-2 * log(uniform(at))) * cos(2 * M_PI * uniform(at + 0x632be59bd9b4e019u)));
}

static double error_of(const float *got, size_t count, int n)
{
    double diff = 0, norm = 0;

    for (size_t i = 0; i < count; i++) {
        double want = 0;

        for (int r = 0; r < n; r++)
            want += normal(r, i);
        diff += (got[i] - want) * (got[i] - want);
        norm += want * want;
    }
    return sqrt(diff / norm);
}

static int report(const struct job *job, const float *got, int n)
{
    const char *wire = getenv("LOONGCOMM_ALLREDUCE_WIRE");
    double error = error_of(got, job->count, n);

    wire = wire ? wire : "data";
    if (job->json)
        printf(
            "{\"op\": \"AllReduce\", \"dtype\": \"float32\", \"data\": \"N(0,1)\", \"wire\": \"%s\", "
            "\"ranks\": %d, \"elements\": %zu, \"relative_l2\": %.4g}\n",
            wire, n, job->count, error);
    else
        printf("%-14s %3d ranks  relative L2 %.3e\n", wire, n, error);
    fflush(stdout);
    return job->most > 0 && !(error <= job->most);
}

static int run_rank(int rank, int n, void *arg)
{
    struct job *job = arg;
    size_t bytes = job->count * sizeof(float);
    float *data = malloc(bytes), *device;
    int devices = job_devices(), failed = 0;
    cudaStream_t stream;
    ncclComm_t comm;

    CHECK(data);
    if (devices == 0)
        return LC_SKIP;
    if (n > devices)
        job_be_on_node(rank / devices);
    stream = job_stream(rank % devices);
    CUDA(cudaMalloc((void **)&device, bytes));
    NCCL(ncclCommInitRank(&comm, n, job_get_id(&job->shared->id, rank), rank));
    for (size_t i = 0; i < job->count; i++)
        data[i] = normal(rank, i);
    for (int i = 0; i <= WARM; i++) {
        size_t count = i < WARM && job->count > 16384 ? 16384 : job->count;

        CUDA(cudaMemcpyAsync(device, data, count * sizeof(float), cudaMemcpyHostToDevice, stream));
        NCCL(ncclAllReduce(device, device, count, ncclFloat32, ncclSum, comm, stream));
        CUDA(cudaStreamSynchronize(stream));
        usleep(i < WARM / 2 ? 4000 : 0);
    }
    CUDA(cudaMemcpy(data, device, bytes, cudaMemcpyDeviceToHost));
    if (rank == 0)
        failed = report(job, data, n);
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(device));
    CUDA(cudaStreamDestroy(stream));
    free(data);
    return failed;
}

int main(int argc, char **argv)
{
    static const struct option names[] = {
        {"threads",          no_argument, NULL, 't' },
        { "count",              required_argument, NULL, 'c' },
        { "most",                 required_argument, NULL, 'm' },
        { "json",no_argument, NULL, 'j' },
        { 0              },
    };
    struct job job = { .count = 65536 };
    bool threads = false;
    int option, failed = 0;

    job.shared = mmap(NULL, sizeof(*job.shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      -1, 0);
    CHECK(job.shared != MAP_FAILED);
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 't': threads = true; break;
        case 'c': job.count = strtoul(optarg, NULL, 10); break;
        case 'm': job.most = atof(optarg); break;
        case 'j': job.json = true; break;
        default: return 2;
        }
    }
    for (; optind < argc && !failed; optind++) {
        memset(job.shared, 0, sizeof(*job.shared));
        failed = (threads ? lc_ranks_run_threads : lc_ranks_run)(atoi(argv[optind]), run_rank, &job,
                                                                 120);
    }
    return failed == LC_SKIP ? LC_SKIP : failed != 0;
}
