/* SPDX-License-Identifier: Apache-2.0
 *
 * usage: topo_job RANKS [init]
 * A job that has NCCL choose its ways: an all-reduce, and sends between all ranks. Ranks take the GPUs in turn; where
 * there are fewer, those of one round are a node of their own. With init it ends when the communicator is there. */
#include "tests/check.h"
#include "tests/rig/ranks.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define COUNT 65536

struct shared {
    bool only_init;     /* before the ranks start */
    ncclUniqueId id;    /* written by rank 0 before has_id */
    _Atomic int has_id; /* release, acquire */
};

#define NCCL(call)                                                                    \
    do {                                                                              \
        ncclResult_t result_ = (call);                                                \
        if (result_ != ncclSuccess)                                                   \
            (void)fprintf(stderr, "%s: %s: %s\n", #call, ncclGetErrorString(result_), \
                          ncclGetLastError(NULL));                                    \
        CHECK(result_ == ncclSuccess);                                                \
    } while (0)
#define CUDA(call) CHECK((call) == cudaSuccess)

static void work(ncclComm_t comm, cudaStream_t stream, int rank, int ranks)
{
    size_t bytes = COUNT * sizeof(float);
    float *data;

    CUDA(cudaMalloc((void **)&data, 2 * bytes * (size_t)ranks));
    CUDA(cudaMemsetAsync(data, 0, 2 * bytes * (size_t)ranks, stream));
    NCCL(ncclAllReduce(data, data, COUNT, ncclFloat32, ncclSum, comm, stream));
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < ranks; peer++) {
        if (peer == rank)
            continue;
        NCCL(ncclSend(data + (size_t)peer * COUNT, COUNT, ncclFloat32, peer, comm, stream));
        NCCL(ncclRecv(data + (size_t)(ranks + peer) * COUNT, COUNT, ncclFloat32, peer, comm,
                      stream));
    }
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(data));
}

static int run_rank(int rank, int ranks, void *arg)
{
    struct shared *shared = arg;
    int devices = 0;
    cudaStream_t stream;
    ncclComm_t comm;
    char node[32];

    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
        return LC_SKIP;
    if (ranks > devices) {
        (void)snprintf(node, sizeof(node), "node%d", rank / devices);
        setenv("NCCL_HOSTID", node, 0);
    }
    CUDA(cudaSetDevice(rank % devices));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (rank == 0) {
        NCCL(ncclGetUniqueId(&shared->id));
        atomic_store(&shared->has_id, 1);
    }
    while (!atomic_load(&shared->has_id))
        usleep(500);
    NCCL(ncclCommInitRank(&comm, ranks, shared->id, rank));
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
