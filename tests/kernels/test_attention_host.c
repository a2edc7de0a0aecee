/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_host LIBRARY [cudnn]: attention by the host library, or by what it has beneath in the place of cuDNN.
 */
#include "tests/check.h"
#include "tests/kernels/compute_attention.h"
#include "tests/kernels/host.h"

#include <string.h>

int main(int argc, char **argv)
{
    struct compute_target target = { .small = true,
                                     .alloc = host_alloc,
                                     .release = free,
                                     .put = host_copy,
                                     .get = host_copy };

    CHECK(argc == 2 || (argc == 3 && strcmp(argv[2], "cudnn") == 0));
    compute_open(&target, argv[1]);
    return check_attention(&target, argc == 3 ? BY_CUDNN : BY_OUR_KERNELS) ? 1 : 0;
}
