/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/redop.h"

#include <stdint.h>
#include <string.h>

/* A factor in host memory is copied at the call, as NCCL does; only fp32 ones are used on the host. */
static bool describe(const void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                     struct lc_redop *out)
{
    *out = (struct lc_redop){ .kind = LC_REDOP_PREMUL, .type = type };
    if (residence == ncclScalarDevice)
        out->device_value = scalar;
    else if (type == ncclFloat32)
        memcpy(&out->value, scalar, sizeof(out->value));
    else
        return false;
    return type == ncclFloat32;
}

void lc_redop_remember(struct lc_redops *ops, ncclRedOp_t handle, const void *scalar,
                       ncclDataType_t type, ncclScalarResidence_t residence)
{
    struct lc_redop op;

    if (!scalar || (int)handle < ncclNumOps || !describe(scalar, type, residence, &op))
        return;
    lc_redop_forget(ops, handle);
    for (int i = 0; i < LC_REDOPS; i++) {
        if (ops->slot[i].handle == 0) {
            ops->slot[i].op = op;
            ops->slot[i].handle = (int)handle;
            return;
        }
    }
}

void lc_redop_forget(struct lc_redops *ops, ncclRedOp_t handle)
{
    for (int i = 0; i < LC_REDOPS; i++) {
        if (ops->slot[i].handle == (int)handle)
            ops->slot[i].handle = 0;
    }
}

struct lc_redop lc_redop_find(const struct lc_redops *ops, ncclRedOp_t handle)
{
    if (handle == ncclSum)
        return (struct lc_redop){ .kind = LC_REDOP_SUM };
    if (handle == ncclAvg)
        return (struct lc_redop){ .kind = LC_REDOP_AVG };
    for (int i = 0; i < LC_REDOPS && (int)handle >= ncclNumOps; i++) {
        if (ops->slot[i].handle == (int)handle)
            return ops->slot[i].op;
    }
    return (struct lc_redop){ .kind = LC_REDOP_OTHER };
}
