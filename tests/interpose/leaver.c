/* SPDX-License-Identifier: Apache-2.0
 *
 * One of two ranks on the rig: leaver FOLDER, with RANK set, and with bf16 on the wire if the library is preloaded. Rank 1 has used NCCL before it forks, and is the child,
 * which ends without destroying its communicator; rank 0 goes on for a while, and must see no error. */
#include "tests/interpose/by_file.h"
#include "tests/rig/test_nccl.h"

#include <sys/wait.h>

#define OK(call) CHECK((call) == ncclSuccess)

static void stay(ncclComm_t comm)
{
    ncclResult_t error = ncclSuccess;

    for (int i = 0; i < 150; i++) { /* a lost peer shows within milliseconds */
        OK(ncclCommGetAsyncError(comm, &error));
        CHECK(error == ncclSuccess);
        usleep(10000);
    }
}

static void take_part(const char *folder, int rank)
{
    cudaStream_t stream;
    ncclComm_t comm;
    float *buf;

    CUDA(cudaSetDevice(rank));
    CUDA(cudaMalloc((void **)&buf, 4000));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(ncclCommInitRank(&comm, 2, id_by_file(folder, rank), rank));
#if NCCL_VERSION_CODE >= 22807
    CHECK(ncclCommRevoke(comm, 12345) == ncclInvalidArgument); /* NCCL goes on as if nothing was */
#endif
    if (getenv("LD_PRELOAD"))
        until_bf16(comm, stream, buf, 1000);
    for (int i = 0; i < 10; i++) {
        OK(ncclAllReduce(buf, buf, 1000, ncclFloat, ncclSum, comm, stream));
        CUDA(cudaStreamSynchronize(stream));
    }
    if (rank == 0)
        stay(comm);
}

int main(int argc, char **argv)
{
    const char *given = getenv("RANK");
    int rank = given ? atoi(given) : 0;
    int status;
    int version;
    pid_t pid;

    CHECK(argc == 2);
    OK(ncclGetVersion(&version));
    if (rank == 0) {
        take_part(argv[1], 0);
        return 0;
    }
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        take_part(argv[1], 1);
        exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    return 0;
}
