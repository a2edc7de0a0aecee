/* SPDX-License-Identifier: Apache-2.0
 *
 * The host kernels on devices whose multiprocessors count: a grid runs while all of its CTAs have one each, as those of
 * peers' memory have on a GPU, and there are LCTEST_ROOM for all that run at a time. More than that is a failure: on a GPU
 * some would wait for room behind kernels that wait for them. Processes that share a device share the file LCTEST_GRIDS.
 *
 * A process says once in LOONGCOMM_LOG_FILE that a grid had LCTEST_GRID CTAs or more. */
#include "kernels/loongkernels_host.h"
#include "kernels/rings.h"
#include "tests/check.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT  __attribute__((visibility("default")))
#define DEVICES 64

#define REAL(name)                        \
    __typeof__(name) *real;               \
    void *addr = dlsym(RTLD_NEXT, #name); \
                                          \
    CHECK(addr &&memcpy(&real, &addr, sizeof(real)))

/* So that the linker keeps the library with all the rest. */
__attribute__((used)) static int (*const rest)(void) = lk_abi_version;

/* CTAs that run on a device now, of this process or of all that share the file. Any thread. */
static _Atomic uint32_t own[DEVICES], *running = own;

/* Of the largest grid of this process so far. Any thread. */
static _Atomic uint32_t largest[DEVICES];

/* Written before the first call, by the thread that makes the backend. */
static struct lk_host_ops rig;

/* Of the call that this thread is making; 0: of none through rings. */
static _Thread_local uint32_t grid;

/* Set once, by whoever says it. */
static atomic_bool said;

struct launch {
    void (*run)(void *arg);
    void (*release)(void *arg);
    void *arg;
    uint32_t ctas;
    int device;
};

static unsigned long number(const char *name, unsigned long other)
{
    const char *text = getenv(name);

    return text ? strtoul(text, NULL, 10) : other;
}

static void say(uint32_t ctas)
{
    const char *path = getenv("LOONGCOMM_LOG_FILE");
    FILE *file;

    if (ctas < number("LCTEST_GRID", UINT32_MAX) || !path || atomic_exchange(&said, true))
        return;
    file = fopen(path, "ae");
    CHECK(file && fprintf(file, "a grid has had enough CTAs\n") > 0 && fclose(file) == 0);
}

static void run(void *arg)
{
    const struct launch *l = arg;
    uint32_t all = atomic_fetch_add(&running[l->device], l->ctas) + l->ctas;

    if (all > number("LCTEST_ROOM", UINT32_MAX)) {
        (void)fprintf(stderr, "device %d: %u CTAs at a time, %u of the last grid\n", l->device, all,
                      l->ctas);
        abort();
    }
    l->run(l->arg);
    atomic_fetch_sub(&running[l->device], l->ctas);
}

static void release(void *arg)
{
    struct launch *l = arg;

    l->release(l->arg);
    free(l);
}

static int enqueue(void *stream, const char *name, void (*body)(void *), void (*end)(void *),
                   void *arg)
{
    struct launch *l;
    uint32_t before;

    if (!grid)
        return rig.enqueue(stream, name, body, end, arg);
    l = malloc(sizeof(*l));
    CHECK(l);
    *l = (struct launch){ .run = body, .release = end, .arg = arg, .ctas = grid };
    CHECK(cudaGetDevice(&l->device) == cudaSuccess && l->device < DEVICES);
    before = atomic_load(&largest[l->device]);
    while (grid > before && !atomic_compare_exchange_weak(&largest[l->device], &before, grid))
        ;
    say(grid);
    return rig.enqueue(stream, name, run, release, l);
}

static void share(void)
{
    const char *path = getenv("LCTEST_GRIDS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *map;

    if (!path)
        return;
    map = mmap(NULL, sizeof(own), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(fd >= 0 && map != MAP_FAILED && close(fd) == 0);
    running = map;
}

EXPORT void lk_host_set_ops(const struct lk_host_ops *ops)
{
    struct lk_host_ops ours = { .enqueue = enqueue, .buffer_use = ops->buffer_use };

    REAL(lk_host_set_ops);
    share();
    rig = *ops;
    real(&ours);
}

/* For tests that open this library, too. */
EXPORT uint32_t grids_largest(int device);
EXPORT uint32_t grids_largest(int device)
{
    return atomic_exchange(&largest[device], 0);
}

#define REDUCTION(name)                                                                   \
    EXPORT int name(const struct lk_rings *rings, const struct lk_reduction *how,         \
                    const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream) \
    {                                                                                     \
        int err;                                                                          \
                                                                                          \
        REAL(name);                                                                       \
        grid = ctas;                                                                      \
        err = real(rings, how, list, n, ctas, stream);                                    \
        grid = 0;                                                                         \
        return err;                                                                       \
    }
REDUCTION(lk_rings_all_reduce)
REDUCTION(lk_rings_reduce_scatter)
REDUCTION(lk_lines_all_reduce)

EXPORT int lk_rings_exchange(const struct lk_rings *rings, const struct lk_message *sends,
                             size_t n_sends, const struct lk_message *recvs, size_t n_recvs,
                             const struct lk_row_mask *mask, uint32_t ctas, void *stream)
{
    int err;

    REAL(lk_rings_exchange);
    grid = ctas;
    err = real(rings, sends, n_sends, recvs, n_recvs, mask, ctas, stream);
    grid = 0;
    return err;
}
