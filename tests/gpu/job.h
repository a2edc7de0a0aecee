/* SPDX-License-Identifier: Apache-2.0
 *
 * What small programs that use NCCL as a job does have in common. */
#ifndef LC_TESTS_GPU_JOB_H
#define LC_TESTS_GPU_JOB_H

#include "tests/check.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define NCCL(call) job_must_nccl((call), #call, __FILE__, __LINE__)
#define CUDA(call) job_must_cuda((call), #call, __FILE__, __LINE__)

static inline void job_must_nccl(ncclResult_t result, const char *call, const char *file, int line)
{
    if (result == ncclSuccess)
        return;
    (void)fprintf(stderr, "%s:%d: %s: %s: %s\n", file, line, call, ncclGetErrorString(result),
                  ncclGetLastError(NULL));
    abort();
}

static inline void job_must_cuda(cudaError_t result, const char *call, const char *file, int line)
{
    if (result == cudaSuccess)
        return;
    (void)fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(result));
    abort();
}

/* In memory that the ranks share, zeroed at first. */
struct job_id {
    ncclUniqueId id;      /* written by rank 0 before `is_there` */
    _Atomic int is_there; /* release, acquire */
};

static inline ncclUniqueId job_get_id(struct job_id *shared, int rank)
{
    if (rank == 0) {
        NCCL(ncclGetUniqueId(&shared->id));
        atomic_store(&shared->is_there, 1);
    }
    while (!atomic_load(&shared->is_there))
        usleep(200);
    return shared->id;
}

/* Ranks take the GPUs in turn. 0: there are none. */
static inline int job_devices(void)
{
    int devices = 0;

    return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

/* Before anything is asked of NCCL; what the user has set stands. */
static inline void job_be_on_node(int node)
{
    char name[32];

    (void)snprintf(name, sizeof(name), "node%d", node);
    setenv("NCCL_HOSTID", name, 0);
}

/* Of a rank whose library maps memory between all, whatever NCCL takes for a machine. Ends the process where there is no GPU. */
static inline int job_choose_device(int rank, int ranks)
{
    int devices = job_devices();

    if (devices == 0) {
        if (rank == 0)
            printf("SKIPPED: no GPU here\n");
        (void)fflush(stdout);
        _exit(LC_SKIP);
    }
    if (ranks > devices) { /* NCCL refuses two ranks of one machine on one GPU */
        job_be_on_node(rank / devices);
        setenv("LOONGCOMM_HOSTID", "one", 0);
    }
    CUDA(cudaSetDevice(rank % devices));
    return rank % devices;
}

static inline cudaStream_t job_stream(int device)
{
    cudaStream_t stream;

    CUDA(cudaSetDevice(device));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

/* Of zeros: `count` floats for each rank to send to, and as many to receive from. */
static inline float *job_buffer(int ranks, size_t count, cudaStream_t stream)
{
    size_t bytes = 2 * count * sizeof(float) * (size_t)ranks;
    float *data;

    CUDA(cudaMalloc((void **)&data, bytes));
    CUDA(cudaMemsetAsync(data, 0, bytes, stream));
    return data;
}

/* With all others, in such a buffer. */
static inline void job_exchange(ncclComm_t comm, int rank, int ranks, float *data, size_t count,
                                cudaStream_t stream)
{
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < ranks; peer++) {
        if (peer == rank)
            continue;
        NCCL(ncclSend(data + (size_t)peer * count, count, ncclFloat32, peer, comm, stream));
        NCCL(ncclRecv(data + (size_t)(ranks + peer) * count, count, ncclFloat32, peer, comm,
                      stream));
    }
    NCCL(ncclGroupEnd());
}

#endif
