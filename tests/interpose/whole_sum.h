/* SPDX-License-Identifier: Apache-2.0
 *
 * A sum of whole numbers, which every wire type holds: 0 + i % 3, 1 + i % 3 and so on by rank, in place. */
#ifndef LC_TESTS_WHOLE_SUM_H
#define LC_TESTS_WHOLE_SUM_H

#include "tests/rig/test_nccl.h"

static inline void whole_sum(float *data, int count, int rank, int n, ncclComm_t comm,
                             cudaStream_t stream)
{
    for (int i = 0; i < count; i++)
        data[i] = (float)(rank + i % 3);
    NCCL(ncclAllReduce(data, data, (size_t)count, ncclFloat32, ncclSum, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < count; i++) {
        int want = n * (n - 1) / 2 + n * (i % 3);

        CHECK(data[i] == (float)want);
    }
}

#endif
