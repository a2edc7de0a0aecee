/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/topo_library.h"

#include "interpose/cli/cli.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* False: the symbol is not there. */
static bool look_up(void *handle, const char *name, void *slot)
{
    void *found = dlsym(handle, name);

    memcpy(slot, &found, sizeof(found));
    return found != NULL;
}

int lc_cli_topo_open(struct lc_cli_topo_library *out, char *why, size_t size)
{
    char path[PATH_MAX];
    bool complete = true;
    void *handle;

    if (lc_cli_find_topology(path) != 0) {
        (void)snprintf(why, size,
                       "libloongtopo.so is not installed: loongcomm was built without hwloc or "
                       "libxml2");
        return -ENOENT;
    }
    (void)setenv("HWLOC_HIDE_ERRORS", "2", 0); /* what it finds wrong is said in one line of ours */
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    complete = handle != NULL;
#define LOOK_UP(name) complete = complete && look_up(handle, "lc_topo_" #name, &out->name)
    LC_CLI_TOPO_FUNCTIONS(LOOK_UP);
#undef LOOK_UP
    if (complete)
        return 0;
    (void)snprintf(why, size, "libloongtopo.so cannot be loaded, it needs hwloc and libxml2: %s",
                   dlerror());
    return -ELIBACC;
}
