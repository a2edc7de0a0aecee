/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/verbs/ibv.h"

#include "common/log.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

struct lc_ibv lc_ibv;

static const struct {
    const char *name;
    size_t offset;
    bool maybe;
} symbols[] = {
#define LC_IBV(name)       { #name, offsetof(struct lc_ibv, name), false },
#define LC_IBV_MAYBE(name) { #name, offsetof(struct lc_ibv, name), true },
#include "plugin/net/verbs/ibv.def"
#undef LC_IBV
#undef LC_IBV_MAYBE
};

/* The library stays loaded: the providers that it loads in turn keep pointers into it. */
int lc_ibv_open(void)
{
    void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!lib) {
        lc_debug("no verbs: %s", dlerror());
        return -ENOENT;
    }
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *found = dlsym(lib, symbols[i].name);

        if (!found && !symbols[i].maybe) {
            lc_warn("no verbs: libibverbs.so.1 has no %s", symbols[i].name);
            dlclose(lib);
            return -ENOENT;
        }
        memcpy((char *)&lc_ibv + symbols[i].offset, &found, sizeof(found));
    }
    return 0;
}
