/* SPDX-License-Identifier: Apache-2.0
 *
 * What is known of this machine by measurement: the profile that LOONGCOMM_PROFILE names, if it is of this GPU and of the
 * NCCL in use. */
#ifndef LC_INTERPOSE_MACHINE_H
#define LC_INTERPOSE_MACHINE_H

#include "common/profile.h"

/* NULL: there is none. The first call reads it; it lives as long as the process. Not before NCCL is found. */
const struct lc_profile *lc_machine_profile(void);

/* Its hash; 0: there is none. */
uint64_t lc_machine_hash(void);

#endif
