/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's operations on data: collectives, send and receive. */
#include "interpose/call.h"

LC_EXPORT ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                                     ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                     cudaStream_t stream)
{
    LC_REAL(ncclAllReduce);
    struct lc_op call = { .kind = LC_OP_ALL_REDUCE,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = count,
                          .type = datatype,
                          .redop = op,
                          .peer = -1,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call,
                   real->ncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream));
}

LC_EXPORT ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                                         ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                         cudaStream_t stream)
{
    LC_REAL(ncclReduceScatter);
    struct lc_op call = { .kind = LC_OP_REDUCE_SCATTER,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = recvcount,
                          .type = datatype,
                          .redop = op,
                          .peer = -1,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(
        call, real->ncclReduceScatter(sendbuff, recvbuff, recvcount, datatype, op, comm, stream));
}

LC_EXPORT ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                                     ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)
{
    LC_REAL(ncclAllGather);
    struct lc_op call = { .kind = LC_OP_ALL_GATHER,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = sendcount,
                          .type = datatype,
                          .peer = -1,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call,
                   real->ncclAllGather(sendbuff, recvbuff, sendcount, datatype, comm, stream));
}

LC_EXPORT ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count,
                                    ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)
{
    LC_REAL(ncclAlltoAll);
    struct lc_op call = { .kind = LC_OP_ALL_TO_ALL,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = count,
                          .type = datatype,
                          .peer = -1,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call, real->ncclAlltoAll(sendbuff, recvbuff, count, datatype, comm, stream));
}

LC_EXPORT ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                                     ncclDataType_t datatype, int root, ncclComm_t comm,
                                     cudaStream_t stream)
{
    LC_REAL(ncclBroadcast);
    struct lc_op call = { .kind = LC_OP_BROADCAST,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = count,
                          .type = datatype,
                          .peer = root,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call,
                   real->ncclBroadcast(sendbuff, recvbuff, count, datatype, root, comm, stream));
}

LC_EXPORT ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root,
                                 ncclComm_t comm, cudaStream_t stream)
{
    LC_REAL(ncclBcast);
    struct lc_op call = { .kind = LC_OP_BROADCAST,
                          .send = buff,
                          .recv = buff,
                          .count = count,
                          .type = datatype,
                          .peer = root,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call, real->ncclBcast(buff, count, datatype, root, comm, stream));
}

LC_EXPORT ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count,
                                  ncclDataType_t datatype, ncclRedOp_t op, int root,
                                  ncclComm_t comm, cudaStream_t stream)
{
    LC_REAL(ncclReduce);
    struct lc_op call = { .kind = LC_OP_REDUCE,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = count,
                          .type = datatype,
                          .redop = op,
                          .peer = root,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call,
                   real->ncclReduce(sendbuff, recvbuff, count, datatype, op, root, comm, stream));
}

LC_EXPORT ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count,
                                  ncclDataType_t datatype, int root, ncclComm_t comm,
                                  cudaStream_t stream)
{
    LC_REAL(ncclGather);
    struct lc_op call = { .kind = LC_OP_GATHER,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = count,
                          .type = datatype,
                          .peer = root,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call, real->ncclGather(sendbuff, recvbuff, count, datatype, root, comm, stream));
}

LC_EXPORT ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count,
                                   ncclDataType_t datatype, int root, ncclComm_t comm,
                                   cudaStream_t stream)
{
    LC_REAL(ncclScatter);
    struct lc_op call = { .kind = LC_OP_SCATTER,
                          .send = sendbuff,
                          .recv = recvbuff,
                          .count = count,
                          .type = datatype,
                          .peer = root,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call,
                   real->ncclScatter(sendbuff, recvbuff, count, datatype, root, comm, stream));
}

LC_EXPORT ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype,
                                int peer, ncclComm_t comm, cudaStream_t stream)
{
    LC_REAL(ncclSend);
    struct lc_op call = { .kind = LC_OP_SEND,
                          .send = sendbuff,
                          .count = count,
                          .type = datatype,
                          .peer = peer,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call, real->ncclSend(sendbuff, count, datatype, peer, comm, stream));
}

LC_EXPORT ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                                ncclComm_t comm, cudaStream_t stream)
{
    LC_REAL(ncclRecv);
    struct lc_op call = { .kind = LC_OP_RECV,
                          .recv = recvbuff,
                          .count = count,
                          .type = datatype,
                          .peer = peer,
                          .handle = comm,
                          .stream = stream };

    return LC_CALL(call, real->ncclRecv(recvbuff, count, datatype, peer, comm, stream));
}
