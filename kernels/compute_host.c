/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_host.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

LK_API int lk_compute_load_all(void)
{
    return 0;
}

int lk_compute_submit(void *stream, const char *name, void (*run)(void *arg), const void *arg,
                      size_t bytes)
{
    void *copy = malloc(bytes);

    if (!copy)
        return -ENOMEM;
    memcpy(copy, arg, bytes);
    return lk_host_enqueue(stream, name, run, free, copy);
}
