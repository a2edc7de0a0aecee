/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host_internal.h"

static void run_count(void *arg)
{
    const struct lk_count *count = arg;

    lk_host_use((uintptr_t)count->word, sizeof(*count->word), true);
    *count->word += count->by;
}

int lk_run_count(const struct lk_count *count, void *stream)
{
    struct lk_count copy = *count;

    return lk_host_submit(stream, "lk_count_up", run_count, &copy, sizeof(copy));
}
