/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/rings_internal.h"

#include <errno.h>

const uint32_t lk_backend_ranks = LK_RANKS_MAX;

int lk_run_rings(const struct lk_ring_launch *launch, void *stream)
{
    return -ENOTSUP;
}
