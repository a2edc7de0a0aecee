/* SPDX-License-Identifier: Apache-2.0
 *
 * What every hook does around NCCL's own function. */
#ifndef LC_INTERPOSE_CALL_H
#define LC_INTERPOSE_CALL_H

#include "common/log.h"
#include "interpose/op.h"
#include "interpose/process.h"
#include "interpose/real.h"

#define LC_EXPORT __attribute__((visibility("default")))

/* Declares `real`. Returns the one error that we ever invent if NCCL has no such function (the program was
 * linked with a newer one, or NCCL is not loaded). */
#define LC_REAL(name)                                   \
    const struct lc_real *real = lc_real();             \
    do {                                                \
        if (__builtin_expect(!real->name, 0)) {         \
            static unsigned char said;                  \
            return lc_call_missing(real, #name, &said); \
        }                                               \
    } while (0)

ncclResult_t lc_call_missing(const struct lc_real *real, const char *name, unsigned char *said);

/* Before and after an operation on data. enter() is false where the call is to go straight to NCCL, and
 * leave() must not be called then. leave() passes the result on. */
bool lc_call_enter(struct lc_op *op, const struct lc_real *real);
ncclResult_t lc_call_leave(struct lc_op *op, ncclResult_t result);

/* A whole operation: `nccl` is NCCL's own call with the program's arguments, made unless the operation is settled without
 * it. `real` stands where it is used. */
#define LC_CALL(op, nccl)                                                                   \
    (lc_call_enter(&(op), real) ? lc_call_leave(&(op), (op).settled ? (op).result : (nccl)) \
                                : (nccl))

/* The same for all other functions: keeps calls that NCCL makes inside this one from being counted.
 * True if this call was the program's own. */
static inline bool lc_call_enter_other(void)
{
    if (lc_thread.inside)
        return false;
    lc_thread.inside = true;
    __atomic_fetch_add(&lc_other_calls, 1, __ATOMIC_RELAXED);
    return true;
}

static inline void lc_call_leave_other(bool own)
{
    if (own)
        lc_thread.inside = false;
}

/* NCCL has accepted the call, perhaps to finish it later. */
static inline bool lc_accepted(ncclResult_t result)
{
    return result == ncclSuccess || result == ncclInProgress;
}

#endif
