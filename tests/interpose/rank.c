/* SPDX-License-Identifier: Apache-2.0
 *
 * One rank of a job on the rig: rank FOLDER, with RANK and WORLD_SIZE set. Does every operation and writes all that
 * it received into FOLDER/result.RANK, and how much work the device was given to standard output. Started by
 * interpose.py in different ways, whose files must not differ. */
#include "tests/check.h"
#include "tests/interpose/by_file.h"
#include "tests/rig/rig.h"

#include <nccl.h>
#include <string.h>
#include <unistd.h>

#define OK(call)   CHECK((call) == ncclSuccess)
#define CUDA(call) CHECK((call) == cudaSuccess)
#define ROOM       ((size_t)1 << 17) /* bytes of the largest buffer */

static int rank;
static int ranks;
static char *send_buf;
static char *recv_buf;
static char *host_buf;
static cudaStream_t stream;
static FILE *results;

static int env_int(const char *name)
{
    const char *text = getenv(name);

    CHECK(text);
    return atoi(text);
}

/* Small values, exact in every type in use, different in every rank and place. */
static void fill(int salt)
{
    float *values = (float *)host_buf;

    for (size_t i = 0; i < ROOM / sizeof(*values); i++)
        values[i] = (float)((i * 7 + (size_t)salt * 13 + (size_t)rank * 5) % 31) / 8;
    CUDA(cudaMemcpyAsync(send_buf, host_buf, ROOM, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemsetAsync(recv_buf, 0, ROOM, stream));
    CUDA(cudaStreamSynchronize(stream));
}

static void keep(void)
{
    CUDA(cudaMemcpyAsync(host_buf, recv_buf, ROOM, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    CHECK(fwrite(host_buf, ROOM, 1, results) == 1);
}

static void operations(ncclComm_t comm, size_t n)
{
    int all;
    ncclRedOp_t op;
    float scale = 0.3f;

    OK(ncclCommCount(comm, &all));
#define STEP(call)      \
    do {                \
        fill(__LINE__); \
        OK(call);       \
        keep();         \
    } while (0)
    STEP(ncclAllReduce(send_buf, recv_buf, n, ncclFloat, ncclSum, comm, stream));
    STEP(ncclAllReduce(send_buf, recv_buf, n, ncclBfloat16, ncclAvg, comm, stream));
    OK(ncclRedOpCreatePreMulSum(&op, &scale, ncclFloat, ncclScalarHostImmediate, comm));
    STEP(ncclAllReduce(send_buf, recv_buf, n, ncclFloat, op, comm, stream));
    OK(ncclRedOpDestroy(op, comm));
    STEP(ncclReduceScatter(send_buf, recv_buf, n, ncclFloat, ncclMax, comm, stream));
    STEP(ncclAllGather(send_buf, recv_buf, n, ncclFloat, comm, stream));
    STEP(ncclAlltoAll(send_buf, recv_buf, n, ncclFloat, comm, stream));
    STEP(ncclBroadcast(send_buf, recv_buf, n, ncclInt8, all - 1, comm, stream));
    STEP(ncclReduce(send_buf, recv_buf, n, ncclFloat, ncclSum, 0, comm, stream));
    STEP(ncclGather(send_buf, recv_buf, n, ncclFloat, 0, comm, stream));
    STEP(ncclScatter(send_buf, recv_buf, n, ncclFloat, 0, comm, stream));
    fill(__LINE__);
    CUDA(cudaMemcpyAsync(recv_buf, send_buf, n, cudaMemcpyDeviceToDevice, stream));
    OK(ncclBcast(recv_buf, n, ncclInt8, 0, comm, stream));
    keep();
    fill(__LINE__);
    OK(ncclGroupStart());
    for (int peer = 0; peer < all; peer++) {
        size_t part = n / (size_t)all * sizeof(float);

        OK(ncclSend(send_buf + (size_t)peer * part, part, ncclInt8, peer, comm, stream));
        OK(ncclRecv(recv_buf + (size_t)peer * part, part, ncclInt8, peer, comm, stream));
    }
    OK(ncclAllReduce(send_buf, recv_buf + ROOM / 2, n, ncclFloat, ncclSum, comm, stream));
    OK(ncclGroupEnd());
    keep();
#undef STEP
}

int main(int argc, char **argv)
{
    static const size_t counts[] = { 0, 1, 3, 1000, 4099 };
    ncclComm_t comm;
    ncclComm_t half;
    ncclUniqueId id;
    char name[512];

    CHECK(argc == 2);
    rank = env_int("RANK");
    ranks = env_int("WORLD_SIZE");
    snprintf(name, sizeof(name), "%s/result.%d", argv[1], rank);
    results = fopen(name, "w");
    CHECK(results);
    host_buf = malloc(ROOM);
    CHECK(host_buf && ranks <= 4);
    CUDA(cudaSetDevice(rank));
    CUDA(cudaMalloc((void **)&send_buf, ROOM));
    CUDA(cudaMalloc((void **)&recv_buf, ROOM));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    id = id_by_file(argv[1], rank);
    OK(ncclCommInitRank(&comm, ranks, id, rank));
    for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
        operations(comm, counts[i]);
    OK(ncclCommSplit(comm, rank % 2, rank, &half, NULL));
    operations(half, 100);
    OK(ncclCommDestroy(half));
    OK(ncclCommDestroy(comm));
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaFree(send_buf));
    CUDA(cudaFree(recv_buf));
    CHECK(fclose(results) == 0);
    free(host_buf);
    printf("%llu\n", lcrig_gpu_work_count());
    return 0;
}
