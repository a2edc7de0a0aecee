/* SPDX-License-Identifier: Apache-2.0
 *
 * What small programs that use NCCL as a job does have in common. */
#ifndef LC_TESTS_GPU_JOB_H
#define LC_TESTS_GPU_JOB_H

#include "tests/check.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

#define NCCL(call)                                                                    \
    do {                                                                              \
        ncclResult_t result_ = (call);                                                \
        if (result_ != ncclSuccess)                                                   \
            (void)fprintf(stderr, "%s: %s: %s\n", #call, ncclGetErrorString(result_), \
                          ncclGetLastError(NULL));                                    \
        CHECK(result_ == ncclSuccess);                                                \
    } while (0)
#define CUDA(call) CHECK((call) == cudaSuccess)

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
