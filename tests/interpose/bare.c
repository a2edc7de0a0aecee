/* SPDX-License-Identifier: Apache-2.0
 *
 * A program without NCCL. "local LIBRARY": opens a library that was linked with NCCL, as Python opens an
 * extension, and calls it. "nothing": nothing. */
#include "tests/check.h"

#include <dlfcn.h>
#include <string.h>

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "local") == 0) {
        void *lib = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
        void *addr = lib ? dlsym(lib, "use_nccl") : NULL;
        int (*use)(void);

        if (!addr)
            fprintf(stderr, "%s\n", dlerror());
        CHECK(addr);
        memcpy(&use, &addr, sizeof(addr));
        CHECK(use() == 0);
    }
    printf("done\n");
    return 0;
}
