/* SPDX-License-Identifier: Apache-2.0
 *
 * A libnccl.so.2 for programs that open NCCL with dlopen, where preloading has no effect. The functions that we
 * replace go to libloongcomm.so, all others to the real NCCL. Nothing happens before the first call. */
#include "common/cleanup.h"
#include "common/config.h"
#include "common/log.h"
#include "interpose/proxy/search.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ncclResult_t, without NCCL's header: the proxy must not depend on one release. */
#define SYSTEM_ERROR  2
#define INVALID_USAGE 5

#define MAX_SETTINGS 64

enum returns {
    RETURNS_result,
    RETURNS_text,
};

static const struct {
    const char *name;
    enum returns returns;
} functions[] = {
#define LC_NCCL(name, since, returns) \
    { #name, RETURNS_##returns }, { "p" #name, RETURNS_##returns },
#define LC_NCCL_BARE(name, since, returns) { #name, RETURNS_##returns },
#include "interpose/proxy/nccl.def"
#undef LC_NCCL
#undef LC_NCCL_BARE
};
#define N_FUNCTIONS (sizeof(functions) / sizeof(*functions))

/* Read by the trampolines, each with one plain load; written by lc_proxy_resolve (relaxed: the code behind
 * the pointer was there before). */
extern _Atomic(void *) lc_proxy_slots[N_FUNCTIONS];
void *lc_proxy_resolve(_Atomic(void *) *slot);

const char *loongcommProxyNccl(void);

/* Where calls go. Published once by the first thread that has found the real NCCL (release), then constant. */
struct targets {
    struct lc_nccl nccl;
    void *hooks; /* libloongcomm.so, NULL if it is not to be had */
};
static _Atomic(struct targets *) targets;

static int no_nccl(void)
{
    return SYSTEM_ERROR;
}

static int no_function(void)
{
    return INVALID_USAGE;
}

static const char *no_text(void)
{
    return "loongcomm: the real NCCL was not found, or is too old for this call";
}

/* Read once; of threads that do so at the same time one publishes (release) what all get (acquire). */
static const char *nccl_setting(void)
{
    static _Atomic(const char *) setting;
    const char *known = atomic_load_explicit(&setting, memory_order_acquire);
    lc_autofree struct lc_config_entry *entries = NULL;
    const char *mine = "";
    size_t count;

    if (known)
        return known;
    entries = calloc(MAX_SETTINGS, sizeof(*entries));
    count = entries ? lc_config_list(entries, MAX_SETTINGS) : 0;
    for (size_t i = 0; i < count && i < MAX_SETTINGS; i++) {
        if (strcmp(entries[i].name, "LOONGCOMM_NCCL") == 0)
            mine = entries[i].value; /* lives as long as the process */
    }
    return atomic_compare_exchange_strong_explicit(&setting, &known, mine, memory_order_acq_rel,
                                                   memory_order_acquire)
               ? mine
               : known;
}

/* The preloaded one, else the one beside us or in the folder above. */
static void *open_hooks(void)
{
    static const char *const places[] = { "libloongcomm.so", "../libloongcomm.so" };
    void *addr = dlsym(RTLD_DEFAULT, "loongcommNcclPath");
    char path[PATH_MAX];
    Dl_info info;
    void *handle = NULL;

    if (addr && dladdr(addr, &info) && info.dli_fname)
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!dladdr((const void *)lc_proxy_resolve, &info) || !strrchr(info.dli_fname, '/'))
        return NULL;
    for (size_t i = 0; !handle && i < sizeof(places) / sizeof(*places); i++) {
        int folder = (int)(strrchr(info.dli_fname, '/') - info.dli_fname);

        if ((size_t)snprintf(path, sizeof(path), "%.*s/%s", folder, info.dli_fname, places[i]) >=
                sizeof(path) ||
            access(path, F_OK) != 0)
            continue;
        handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!handle) {
            const char *why = dlerror();

            lc_warn_once("%s cannot be loaded: %s; calls go straight to NCCL", path,
                         why ? why : "of an unknown cause");
            return NULL;
        }
    }
    if (!handle)
        lc_warn_once("libloongcomm.so is not beside %s: calls go straight to NCCL", info.dli_fname);
    return handle;
}

/* The NCCL that the hooks pass calls to: two of them must not share a communicator. */
static void agree(struct targets *mine)
{
    void *addr = mine->hooks ? dlsym(mine->hooks, "loongcommNcclPath") : NULL;
    const char *(*path)(void);
    const char *theirs;
    void *handle;

    if (!addr)
        return;
    memcpy(&path, &addr, sizeof(addr));
    theirs = path();
    if (!theirs || strcmp(theirs, mine->nccl.path) == 0)
        return;
    handle = dlopen(theirs, RTLD_NOW | RTLD_NOLOAD);
    if (handle) {
        (void)dlclose(mine->nccl.handle);
        mine->nccl = (struct lc_nccl){ .handle = handle, .path = theirs };
    }
}

static bool find_nccl(struct lc_nccl *out)
{
    return lc_nccl_find_loaded(out) || lc_proxy_load_nccl(nccl_setting(), out);
}

/* For a preloaded libloongcomm.so, which nobody but us can tell where NCCL is: see LC_PROXY_NCCL. */
__attribute__((visibility("default"))) const char *loongcommProxyNccl(void)
{
    struct lc_nccl nccl;

    return find_nccl(&nccl) ? nccl.path : NULL; /* the handle is kept */
}

/* Without a lock, since dlopen holds one of the loader's: two threads may both search; the first to finish
 * is kept. Finding nothing is not remembered. */
static const struct targets *find_targets(void)
{
    struct targets *known = atomic_load_explicit(&targets, memory_order_acquire);
    struct targets *mine;

    if (known)
        return known;
    mine = calloc(1, sizeof(*mine));
    if (!mine)
        return NULL;
    if (!find_nccl(&mine->nccl)) {
        free(mine);
        return NULL;
    }
    mine->hooks = open_hooks();
    agree(mine);
    if (!atomic_compare_exchange_strong_explicit(&targets, &known, mine, memory_order_acq_rel,
                                                 memory_order_acquire)) {
        free(mine);
        return known;
    }
    return mine;
}

/* The twin with a p is NCCL's own, past every interposer; a library without twins has one function for both. */
static void *find_function(const struct targets *to, const char *name)
{
    bool twin = name[0] == 'p';
    void *addr = !twin && to->hooks ? dlsym(to->hooks, name) : NULL;

    if (!addr)
        addr = dlsym(to->nccl.handle, name);
    if (!addr && twin)
        addr = dlsym(to->nccl.handle, name + 1);
    return addr;
}

/* Called by a trampoline whose slot has not been filled. What it returns is jumped to. */
void *lc_proxy_resolve(_Atomic(void *) *slot)
{
    static unsigned char said[N_FUNCTIONS];
    size_t index = (size_t)(slot - lc_proxy_slots);
    const char *name = functions[index].name;
    const struct targets *to = find_targets();
    void *addr = to ? find_function(to, name) : NULL;

    if (addr) {
        atomic_store_explicit(slot, addr, memory_order_relaxed);
        return addr;
    }
    if (to && !__atomic_exchange_n(&said[index], 1, __ATOMIC_RELAXED))
        lc_error("%s was called, but NCCL in %s has no such function", name, to->nccl.path);
    if (functions[index].returns == RETURNS_text)
        return (void *)no_text;
    return to ? (void *)no_function : (void *)no_nccl;
}
