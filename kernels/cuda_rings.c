/* SPDX-License-Identifier: Apache-2.0
 *
 * Until there are kernels for it: the device shares no memory and runs no rings. */
#include "kernels/list_internal.h"
#include "kernels/rings_internal.h"

#include <errno.h>

const uint32_t lk_backend_ranks = LK_DEVICE_RANKS;

int lk_run_rings(const struct lk_ring_launch *launch, void *stream)
{
    return -ENOTSUP;
}

LK_API int lk_segment_new(size_t bytes, void *stream, void **address, int *fd)
{
    return -ENOTSUP;
}

LK_API int lk_segment_map(int fd, size_t bytes, void **address)
{
    return -ENOTSUP;
}

LK_API int lk_segment_free(void *address, size_t bytes)
{
    return -ENOTSUP;
}
