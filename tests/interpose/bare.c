/* SPDX-License-Identifier: Apache-2.0
 *
 * A program without NCCL. "local LIBRARY": opens a library that was linked with NCCL, as Python opens an
 * extension, and calls it. "late LIBRARY": the same, having asked
 * for NCCL before it was there. "nothing": nothing. */
#include "tests/check.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <string.h>

/* Asked before any NCCL is loaded. */
static void ask_early(void)
{
    void *addr = dlsym(RTLD_DEFAULT, "loongcommNcclPath");
    const char *(*path)(void);

    CHECK(addr);
    memcpy(&path, &addr, sizeof(addr));
    printf("%s\n", path() ? path() : "no NCCL");
}

int main(int argc, char **argv)
{
    bool late = argc > 2 && strcmp(argv[1], "late") == 0;

    if (late)
        ask_early();
    if (late || (argc > 2 && strcmp(argv[1], "local") == 0)) {
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
