/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors of CUDA's that are the program's own and harm nobody: NCCL refuses the call, does nothing of it and works
 * again. So does ours: the error is returned, the call is not counted, no peer is told. */
#ifndef LC_INTERPOSE_REFUSAL_H
#define LC_INTERPOSE_REFUSAL_H

#include "interpose/op.h"

#include <cuda_runtime_api.h>

/* Whenever it comes: the capture that the stream is part of is invalid, so that nothing in it will ever run. */
static inline bool lc_is_void(int err)
{
    return err == cudaErrorStreamCaptureInvalidated;
}

/* Before anything of the call is on its stream: the stream takes nothing now, or is none. */
static inline bool lc_is_streams_fault(int err)
{
    return lc_is_void(err) || err == cudaErrorStreamCaptureUnsupported ||
           err == cudaErrorStreamCaptureImplicit || err == cudaErrorInvalidResourceHandle;
}

/* Says it, and leaves no error for the program's cudaGetLastError, as NCCL does. What the call is to return. */
ncclResult_t lc_refuse(const struct lc_op *op, int err);

#endif
