/* SPDX-License-Identifier: Apache-2.0
 *
 * usage: topo_job RANKS [init]
 * A job that has NCCL choose its ways: an all-reduce, and sends between all ranks. Ranks take the GPUs in turn; where
 * there are fewer, those of one round are a node of their own. With init it ends when the communicator is there. */
#include "tests/gpu/job.h"
#include "tests/rig/ranks.h"

#include <stdbool.h>
#include <sys/mman.h>

#define COUNT 65536

struct shared {
    bool only_init; /* before the ranks start */
    struct job_id id;
};

static void work(ncclComm_t comm, cudaStream_t stream, int rank, int ranks)
{
    float *data = job_buffer(ranks, COUNT, stream);

    NCCL(ncclAllReduce(data, data, COUNT, ncclFloat32, ncclSum, comm, stream));
    job_exchange(comm, rank, ranks, data, COUNT, stream);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(data));
}

static int run_rank(int rank, int ranks, void *arg)
{
    struct shared *shared = arg;
    int devices = job_devices();
    cudaStream_t stream;
    ncclComm_t comm;

    if (devices == 0)
        return LC_SKIP;
    if (ranks > devices)
        job_be_on_node(rank / devices);
    stream = job_stream(rank % devices);
    NCCL(ncclCommInitRank(&comm, ranks, job_get_id(&shared->id, rank), rank));
    if (!shared->only_init)
        work(comm, stream, rank, ranks);
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaStreamDestroy(stream));
    return 0;
}

int main(int argc, char **argv)
{
    struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK((argc == 2 || argc == 3) && shared != MAP_FAILED);
    shared->only_init = argc == 3;
    return lc_ranks_run(atoi(argv[1]), run_rank, shared, 60);
}
