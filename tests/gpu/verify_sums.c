/* SPDX-License-Identifier: Apache-2.0
 *
 * All-reduces for so many seconds, of sizes from a few bytes to the whole room: what runs while a test breaks things
 * below. See verify.h. */
#include "common/deadline.h"
#include "tests/gpu/verify.h"

/* Rank 0's clock decides; the others hear it by the communicator itself. */
static bool time_is_left(struct vf_rank *rank, struct lc_deadline end)
{
    int over = rank->rank == 0 && lc_deadline_passed(end);

    VF_CUDA(cudaMemcpyAsync(rank->device_send, &over, sizeof(over), cudaMemcpyHostToDevice,
                            rank->stream));
    rank->calls[VF_ALL_REDUCE]++;
    VF_NCCL(ncclAllReduce(rank->device_send, rank->device_recv, 1, ncclInt32, ncclSum, rank->comm,
                          rank->stream));
    VF_CUDA(cudaMemcpyAsync(&over, rank->device_recv, sizeof(over), cudaMemcpyDeviceToHost,
                            rank->stream));
    VF_CUDA(cudaStreamSynchronize(rank->stream));
    return over == 0;
}

void vf_sums(struct vf_rank *rank)
{
    struct lc_deadline end = lc_deadline_in_ms((int64_t)rank->seconds * 1000);
    static const size_t counts[] = { 7, 1000, 30001, VF_BIG / 4, VF_BIG };

    if (rank->seconds == 0)
        return;
    do {
        for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
            vf_check_comm(rank, rank->comm, rank->stream, counts[i], "all-reduce for some time");
    } while (time_is_left(rank, end));
}
