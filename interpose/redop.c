/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/redop.h"

#include "kernels/value_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct lc_redop_slot {
    int handle; /* 0: free */
    struct lc_redop op;
};

static float widen(const void *scalar, ncclDataType_t type)
{
    uint16_t bits;
    float value;

    if (type == ncclFloat32) {
        memcpy(&value, scalar, sizeof(value));
        return value;
    }
    memcpy(&bits, scalar, sizeof(bits));
    return type == ncclFloat16 ? widen_fp16(bits) : widen_bf16(bits);
}

/* A factor in host memory is copied at the call, as NCCL does. */
static bool describe(const void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                     struct lc_redop *out)
{
    *out = (struct lc_redop){ .kind = LC_REDOP_PREMUL, .type = type };
    if (type != ncclFloat32 && type != ncclFloat16 && type != ncclBfloat16)
        return false;
    if (residence == ncclScalarDevice)
        out->device_value = scalar;
    else
        out->value = widen(scalar, type);
    return true;
}

static int grow(struct lc_redops *ops)
{
    int room = ops->room ? 2 * ops->room : 16;
    struct lc_redop_slot *slot = realloc(ops->slot, (size_t)room * sizeof(*slot));

    if (!slot)
        return -ENOMEM;
    memset(slot + ops->room, 0, (size_t)(room - ops->room) * sizeof(*slot));
    ops->slot = slot;
    ops->room = room;
    return 0;
}

int lc_redop_remember(struct lc_redops *ops, ncclRedOp_t handle, const void *scalar,
                      ncclDataType_t type, ncclScalarResidence_t residence)
{
    struct lc_redop op;
    int at = 0;

    if (!scalar || (int)handle < ncclNumOps || !describe(scalar, type, residence, &op))
        return 0;
    lc_redop_forget(ops, handle);
    while (at < ops->room && ops->slot[at].handle != 0)
        at++;
    if (at == ops->room && grow(ops) != 0)
        return -ENOMEM;
    ops->slot[at] = (struct lc_redop_slot){ (int)handle, op };
    return 0;
}

void lc_redop_forget(struct lc_redops *ops, ncclRedOp_t handle)
{
    for (int i = 0; i < ops->room; i++) {
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
    for (int i = 0; i < ops->room && (int)handle >= ncclNumOps; i++) {
        if (ops->slot[i].handle == (int)handle)
            return ops->slot[i].op;
    }
    return (struct lc_redop){ .kind = LC_REDOP_OTHER };
}

void lc_redops_free(struct lc_redops *ops)
{
    free(ops->slot);
    *ops = (struct lc_redops){ 0 };
}
