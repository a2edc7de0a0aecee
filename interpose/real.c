/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/real.h"

#include "common/config.h"
#include "common/log.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#define STR_(x) #x
#define STR(x)  STR_(x)

/* cuda.h renames some functions by macro; the string and the type would then disagree. */
#define LC_SYM(name) \
    _Static_assert(sizeof(#name) == sizeof(STR(name)), #name ": list the ABI name");
#include "interpose/symbols.def"
#undef LC_SYM

static const struct {
    const char *name;
    size_t offset;
} symbols[] = {
#define LC_SYM(name) { #name, offsetof(struct lc_real, name) },
#include "interpose/symbols.def"
#undef LC_SYM
};

static struct lc_real real_table;

/* Python loads its extensions with RTLD_LOCAL: NCCL is then not after us in the search order,
   so ask the copy that is already loaded, and never load a second one. */
static void *find(const char *name)
{
    static const char *const libraries[] = { "libnccl.so.2" };
    void *addr = dlsym(RTLD_NEXT, name);

    for (size_t i = 0; !addr && i < sizeof(libraries) / sizeof(*libraries); i++) {
        void *lib = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);

        if (lib)
            addr = dlsym(lib, name);
    }
    return addr;
}

static void load(void)
{
    struct lc_config config;

    (void)lc_config_load(&config); /* bad values were logged and replaced */
    lc_log_max = config.log_level;
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *addr = find(symbols[i].name);

        if (!addr) {
            lc_debug("the loaded NCCL has no %s", symbols[i].name);
            continue;
        }
        memcpy((char *)&real_table + symbols[i].offset, &addr, sizeof(addr));
    }
}

const struct lc_real *lc_real(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, load);
    return &real_table;
}
