/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands for a libloongcomm.so that the loader complains about in every process. */
#include <unistd.h>

__attribute__((constructor)) static void complain(void)
{
    (void)!write(STDERR_FILENO, "cannot be preloaded\n", 20);
}
