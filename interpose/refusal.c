/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/refusal.h"

#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/reduce.h"

ncclResult_t lc_refuse(const struct lc_op *op, int err)
{
    const struct lc_backend *backend = op->comm->reducer->backend;

    lc_error("%s of %zu elements: the stream cannot take it (%s); nothing of the call was done",
             lc_op_name(op->kind), op->count, backend->lk_error_text(err));
    (void)backend->cudaGetLastError();
    return ncclUnhandledCudaError;
}
