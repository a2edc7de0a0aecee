/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/backend.h"

#include "common/input.h"
#include "common/log.h"
#include "interpose/machine.h"
#include "interpose/policy.h"
#include "interpose/process.h"
#include "kernels/loongkernels_host.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 0 or the table, once made; `refused` stays set if making it failed. Release, acquire. */
static _Atomic(const struct lc_backend *) table;
static _Atomic bool refused;

static const struct {
    const char *name;
    size_t offset;
} kernel_symbols[] = {
#define LK_SYM(name) { #name, offsetof(struct lc_backend, name) },
#include "kernels/api.def"
#undef LK_SYM
},
  runtime_symbols[] = {
#define LK_RT(name) { #name, offsetof(struct lc_backend, name) },
#include "kernels/runtime.def"
#undef LK_RT
};

/* The host runtime of the rig, if this process runs on it. */
static void *open_rig(void)
{
    char name[32];

    for (int major = 11; major < 20; major++) {
        void *lib;

        (void)snprintf(name, sizeof(name), "libcudart.so.%d", major);
        lib = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
        if (lib && dlsym(lib, "lcrig_enqueue"))
            return lib;
        if (lib)
            (void)dlclose(lib);
    }
    return NULL;
}

/* In the folder of this library, or where the build leaves it. */
static void *open_beside(const char *name)
{
    static const char *const folders[] = { "", "../kernels/" };
    char path[PATH_MAX];
    const char *slash;
    Dl_info info;
    void *lib = NULL;

    if (!dladdr((const void *)lc_backend, &info) || !(slash = strrchr(info.dli_fname, '/')))
        return NULL;
    for (size_t i = 0; !lib && i < sizeof(folders) / sizeof(*folders); i++) {
        (void)snprintf(path, sizeof(path), "%.*s%s%s", (int)(slash + 1 - info.dli_fname),
                       info.dli_fname, folders[i], name);
        lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return lib;
}

/* "auto": the one that fits, else a path. NULL, and `why` (NULL: nothing to say). */
static void *open_kernels(bool host, const char **why)
{
    const char *wanted = lc_process_config()->kernels;
    void *library;

    *why = "it is no regular file";
    if (!lc_input_is_loadable(wanted))
        return NULL;
    if (strcmp(wanted, "auto") != 0)
        library = dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
    else
        library = open_beside(host ? "libloongkernels-host.so" : "libloongkernels.so");
    *why = library ? "its interface is another one" : dlerror();
    return library;
}

static bool set(struct lc_backend *backend, size_t offset, void *addr)
{
    memcpy((char *)backend + offset, &addr, sizeof(addr));
    return addr != NULL;
}

struct work_call {
    int (*enqueue)(void *stream, const void *work);
};
static struct work_call rig_call; /* written before the backend is published */

/* Guards the writing of rig_call, and is held at a fork, whose child then has that or does it again; the rig only. */
static pthread_mutex_t rig_lock = PTHREAD_MUTEX_INITIALIZER;

static void hold_rig(void)
{
    (void)pthread_mutex_lock(&rig_lock);
}

static void release_rig(void)
{
    (void)pthread_mutex_unlock(&rig_lock);
}

static void watch_forks(void)
{
    (void)pthread_atfork(hold_rig, release_rig, release_rig);
}

/* struct lcrig_work of the rig, which is no part of the product. */
struct rig_work {
    const char *name;
    void (*run)(void *arg);
    void (*release)(void *arg);
    void *arg;
    bool is_kernel;
};

static int rig_enqueue(void *stream, const char *name, void (*run)(void *), void (*release)(void *),
                       void *arg)
{
    const struct rig_work work = { name, run, release, arg, true };

    return rig_call.enqueue(stream, &work);
}

static bool bind_rig(void *kernels, void *rig)
{
    __typeof__(lk_host_set_ops) *set_ops = dlsym(kernels, "lk_host_set_ops");
    struct lk_host_ops ops = { .enqueue = rig_enqueue,
                               .buffer_use = dlsym(rig, "lcrig_buffer_use") };
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct work_call call = { .enqueue = dlsym(rig, "lcrig_enqueue") };

    if (!set_ops || !call.enqueue)
        return false;
    (void)pthread_once(&once, watch_forks);
    hold_rig();
    if (!rig_call.enqueue) { /* else another thread was first, and work may be running */
        rig_call = call;
        set_ops(&ops);
    }
    release_rig();
    return true;
}

static bool fill(struct lc_backend *backend, void *kernels, void *rig)
{
    __typeof__(lk_runtime_symbol) *runtime = dlsym(kernels, "lk_runtime_symbol");
    bool whole = rig || runtime;

    for (size_t i = 0; whole && i < sizeof(kernel_symbols) / sizeof(*kernel_symbols); i++)
        whole = set(backend, kernel_symbols[i].offset, dlsym(kernels, kernel_symbols[i].name));
    for (size_t i = 0; whole && i < sizeof(runtime_symbols) / sizeof(*runtime_symbols); i++)
        whole = set(backend, runtime_symbols[i].offset,
                    rig ? dlsym(rig, runtime_symbols[i].name) : runtime(runtime_symbols[i].name));
    return whole && backend->lk_abi_version() == LK_ABI_VERSION;
}

static const struct lc_backend *make(void)
{
    const struct lc_config *config = lc_process_config();
    void *rig = open_rig();
    const char *why;
    void *kernels = open_kernels(rig != NULL, &why);
    struct lc_backend *backend = calloc(1, sizeof(*backend));

    if (!kernels || !backend || !fill(backend, kernels, rig) || (rig && !bind_rig(kernels, rig))) {
        /* Without device code in the build that is how it is; whoever asked for more hears of it. */
        if (!kernels && strcmp(config->kernels, "auto") == 0 &&
            config->allreduce_wire == LC_WIRE_DATA)
            lc_info("no kernels library; all calls stay with NCCL");
        else
            lc_warn_once(
                "LOONGCOMM_KERNELS=%s: no kernels library that fits (%s); all calls stay with NCCL",
                config->kernels, why ? why : "not found");
        free(backend);
        return NULL; /* libraries stay open: closing one whose exit handlers are registered is no gain */
    }
    return backend;
}

/* Without a lock, as in real.c: two threads may do the work, the first is kept. */
const struct lc_backend *lc_backend(void)
{
    const struct lc_backend *have = atomic_load_explicit(&table, memory_order_acquire);
    const struct lc_backend *mine;

    if (have || atomic_load_explicit(&refused, memory_order_relaxed))
        return have;
    mine = make();
    if (!mine) {
        atomic_store_explicit(&refused, true, memory_order_relaxed);
        return NULL;
    }
    if (atomic_compare_exchange_strong_explicit(&table, &have, mine, memory_order_release,
                                                memory_order_acquire))
        return mine;
    free((void *)mine);
    return have;
}

void lc_backend_load(int device)
{
    const struct lc_backend *backend = lc_backend();
    struct lc_guard guard;

    if (!backend || (device < 0 && backend->cudaGetDevice(&device) != cudaSuccess) ||
        !lc_guard_begin(backend, device, &guard))
        return;
    if (backend->lk_load_all() != 0)
        (void)backend->cudaGetLastError(); /* not the program's error */
    if (lc_policy_wants_rings(lc_process_config(), lc_machine_profile()) &&
        backend->lk_rings_load() != 0)
        (void)backend->cudaGetLastError();
    lc_guard_end(backend, device, &guard);
}

bool lc_guard_begin(const struct lc_backend *backend, int device, struct lc_guard *guard)
{
    guard->mode = cudaStreamCaptureModeRelaxed;
    if (backend->cudaGetDevice(&guard->previous) != cudaSuccess)
        goto failed;
    if (guard->previous != device && backend->cudaSetDevice(device) != cudaSuccess)
        goto failed;
    if (backend->cudaThreadExchangeStreamCaptureMode(&guard->mode) == cudaSuccess)
        return true;
    if (guard->previous != device)
        (void)backend->cudaSetDevice(guard->previous);

failed:
    (void)backend->cudaGetLastError(); /* not the program's error */
    return false;
}

void lc_guard_end(const struct lc_backend *backend, int device, const struct lc_guard *guard)
{
    enum cudaStreamCaptureMode mode = guard->mode;

    (void)backend->cudaThreadExchangeStreamCaptureMode(&mode);
    if (guard->previous != device)
        (void)backend->cudaSetDevice(guard->previous);
}
