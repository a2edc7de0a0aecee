/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_INTERPOSE_REAL_H
#define LC_INTERPOSE_REAL_H

#include <nccl.h>
#include <stdatomic.h>

/* The definition of each function that ours stands for; a pointer's type comes from nccl.h itself. */
struct lc_real {
#define LC_SYM(name) __typeof__(name) *name;
#include "interpose/symbols.def"
#undef LC_SYM
#define LC_ASK(name) __typeof__(name) *name;
#include "interpose/ask.def"
#undef LC_ASK
    const char *path; /* file of that NCCL; NULL while none is loaded */
    int version;      /* as ncclGetVersion gives it, 0 if it would not say */
};

/* NULL until an NCCL was found. Written once, by the thread that resolves first (release); what it points
 * to never changes. Read by every hook (acquire). */
extern _Atomic(const struct lc_real *) lc_real_table;

/* Looks for the NCCL in use; the first call also loads the settings. Never NULL: while there is no NCCL
 * all functions are NULL pointers, and the next call looks again. */
const struct lc_real *lc_real_resolve(void);

/* Never NULL. A function that the loaded NCCL lacks is a NULL pointer and disables its own hook only. */
static inline const struct lc_real *lc_real(void)
{
    const struct lc_real *real = atomic_load_explicit(&lc_real_table, memory_order_acquire);

    return __builtin_expect(!!real, 1) ? real : lc_real_resolve();
}

#endif
