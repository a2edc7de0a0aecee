/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_INTERPOSE_REAL_H
#define LC_INTERPOSE_REAL_H

#include <nccl.h>

/* The next definition of each function after ours; a pointer's type comes from nccl.h itself. */
struct lc_real {
#define LC_SYM(name) __typeof__(name) *name;
#include "interpose/symbols.def"
#undef LC_SYM
};

/* Never NULL. A function that the loaded NCCL lacks is a NULL pointer and disables its own hook only. */
const struct lc_real *lc_real(void);

#endif
