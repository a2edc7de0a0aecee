/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/real.h"

#include "common/log.h"
#include "interpose/find.h"
#include "interpose/process.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
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
#define LC_ASK(name) { #name, offsetof(struct lc_real, name) },
#include "interpose/ask.def"
#undef LC_ASK
};

_Atomic(const struct lc_real *) lc_real_table;

/* Where functions are taken from. */
struct origin {
    struct lc_nccl nccl; /* of this object's own table if !next */
    bool next;           /* what RTLD_NEXT finds */
    bool whole; /* nccl is an NCCL: with next, no other NCCL may add functions that it lacks */
};

/* Python loads its extensions with RTLD_LOCAL: NCCL is then not after us in the search order, RTLD_NEXT
 * finds nothing, and the objects that are loaded have to be asked one by one. Where RTLD_NEXT does work it
 * comes first, so that another interposer behind us is not skipped. */
static bool locate(struct origin *out)
{
    void *addr = dlsym(RTLD_NEXT, "ncclCommInitRank");

    out->next = addr && lc_nccl_at(addr, &out->nccl);
    if (!out->next && !lc_nccl_find_loaded(&out->nccl) && !lc_nccl_find_by_proxy(&out->nccl))
        return false;
    out->whole = lc_nccl_is_whole(&out->nccl);
    return true;
}

static void *look_up(struct origin *origin, const char *name)
{
    void *addr = dlsym(origin->next ? RTLD_NEXT : origin->nccl.handle, name);
    struct lc_nccl owner;
    Dl_info info;
    bool usable;

    if (!addr || !origin->next)
        return addr;
    if (dladdr(addr, &info) && info.dli_fname && strcmp(info.dli_fname, origin->nccl.path) == 0)
        return addr;
    if (!lc_nccl_at(addr, &owner))
        return NULL; /* the proxy: its trampoline would lead back to us */
    usable = owner.handle == origin->nccl.handle || !lc_nccl_is_whole(&owner);
    if (!usable && !origin->whole) {
        (void)dlclose(origin->nccl.handle); /* a tracer in front of this NCCL */
        origin->nccl = owner;
        origin->whole = true;
        return addr;
    }
    (void)dlclose(owner.handle);
    return usable ? addr : NULL; /* another NCCL: the two must not share a communicator */
}

static void fill(struct origin *origin, struct lc_real *real)
{
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *addr = look_up(origin, symbols[i].name);

        if (!addr)
            lc_info("%s has no %s: that call is not taken over", origin->nccl.path,
                    symbols[i].name);
        memcpy((char *)real + symbols[i].offset, &addr, sizeof(addr));
    }
    real->path = origin->nccl.path;
    if (!real->ncclGetVersion || real->ncclGetVersion(&real->version) != ncclSuccess)
        real->version = 0;
}

/* Without a lock: a thread in the middle of dlopen may be waiting for a thread that resolves, and
 * resolving needs the loader's lock. Two threads may do the work; the first to finish is kept. */
const struct lc_real *lc_real_resolve(void)
{
    static const struct lc_real none;
    static struct lc_real spare; /* for one who finds no memory: a call must not fail for that */
    static _Atomic bool spare_taken;
    const struct lc_real *expected = NULL;
    struct origin origin;
    struct lc_real *real;

    lc_process_begin();
    if (!locate(&origin))
        return &none; /* not remembered: it may be loaded later */
    real = calloc(1, sizeof(*real));
    if (!real && !atomic_exchange(&spare_taken, true))
        real = &spare;
    if (!real)
        return &none;
    fill(&origin, real);
    if (!atomic_compare_exchange_strong_explicit(&lc_real_table, &expected, real,
                                                 memory_order_release, memory_order_acquire)) {
        if (real != &spare)
            free(real);
        return expected;
    }
    lc_debug("calls go to NCCL %d in %s", real->version, real->path);
    return real;
}
