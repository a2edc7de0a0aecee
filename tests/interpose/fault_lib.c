/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/interpose/fault_lib.h"

#include "kernels/rings.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* clang-format off */
#define LIBC_SITES(X) \
    X(malloc) X(calloc) X(realloc) X(strdup) X(strndup) X(socket) X(connect) X(bind) X(listen) \
    X(getsockname) X(getsockopt) X(accept4) X(send) X(sendmsg) X(recvmsg) X(poll) X(eventfd) X(memfd_create) \
    X(ftruncate) X(fcntl) X(mmap) X(getrandom) X(pthread_create) X(dlopen) X(fopen)
#define CUDA_SITES(X) \
    X(cudaMalloc) X(cudaFree) X(cudaEventCreateWithFlags) X(cudaEventDestroy) X(cudaEventQuery) \
    X(cudaEventRecord) X(cudaEventRecordWithFlags) X(cudaGetDevice) X(cudaSetDevice) X(cudaStreamIsCapturing) X(cudaStreamGetCaptureInfo) \
    X(cudaStreamWaitEvent) X(cudaThreadExchangeStreamCaptureMode) X(cudaDeviceGetPCIBusId) X(cudaHostAlloc) X(cudaFreeHost) \
    X(cudaMemcpyAsync) X(lost_copy) X(cudaMemsetAsync) X(cudaStreamCreateWithFlags) \
    X(cudaStreamCreateWithPriority) X(cudaStreamGetPriority) X(cudaStreamDestroy)
#define KERNEL_SITES(X) \
    X(lk_load_all) X(lk_rings_load) X(lk_cast_pack) X(lk_cast_feedback) X(lk_cast_unpack) X(lk_pack) X(lk_unpack) X(lk_sum_shards) X(lk_compare) X(lk_count_up) \
    X(lk_segment_new) X(lk_segment_map) X(lk_segment_free) X(lk_rings_all_reduce) X(lk_rings_reduce_scatter) X(lk_lines_all_reduce)
/* clang-format on */

#define NAME(name) SITE_##name,
enum site {
    LIBC_SITES(NAME) CUDA_SITES(NAME) KERNEL_SITES(NAME) SITES
};
#undef NAME
#define NAME(name) #name,
static const char *const names[] = { LIBC_SITES(NAME) CUDA_SITES(NAME) KERNEL_SITES(NAME) NULL };
#undef NAME

/* Where libloongcomm.so lies; written by the constructor, before there are threads. */
static uintptr_t low, high;

static _Atomic int armed = -1; /* enum site; stored after the two others */
static _Atomic unsigned long nth, calls;

EXPORT bool lcfault_arm(const char *site, unsigned long n)
{
    atomic_store(&armed, -1);
    atomic_store(&nth, n);
    atomic_store(&calls, 0);
    for (int i = 0; i < SITES; i++) {
        if (strcmp(names[i], site) == 0) {
            atomic_store(&armed, i);
            return true;
        }
    }
    return false;
}

EXPORT unsigned long lcfault_calls(void)
{
    return atomic_load(&calls);
}

EXPORT const char *lcfault_site(unsigned i)
{
    return i < SITES ? names[i] : NULL;
}

static int find_us(struct dl_phdr_info *info, size_t size, void *arg)
{
    const char *slash = strrchr(info->dlpi_name, '/');

    if (!slash || strncmp(slash + 1, "libloongcomm", 12) != 0)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD || !(info->dlpi_phdr[i].p_flags & PF_X))
            continue;
        low = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        high = low + info->dlpi_phdr[i].p_memsz;
    }
    return 1;
}

__attribute__((constructor)) static void begin(void)
{
    (void)dl_iterate_phdr(find_us, NULL);
}

static bool hit(enum site site, const void *caller)
{
    uintptr_t at = (uintptr_t)caller;

    if (at < low || at >= high || atomic_load(&armed) != (int)site)
        return false;
    return atomic_fetch_add(&calls, 1) + 1 == atomic_load(&nth);
}

/* ---- libc ---- */

/* What dlsym below stands in front of. The version of any glibc; musl has none and no need of this test. */
static void *real_dlsym(void *handle, const char *name)
{
    static _Atomic(void *) found; /* relaxed: whoever comes first finds the same */
    void *addr = atomic_load_explicit(&found, memory_order_relaxed);
    void *(*call)(void *, const char *);

    if (!addr) {
        addr = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!addr)
            addr = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        if (!addr)
            addr = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
        atomic_store_explicit(&found, addr, memory_order_relaxed);
    }
    memcpy(&call, &addr, sizeof(call));
    return call(handle, name);
}

/* The allocator's own names: dlsym may allocate. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *ptr, size_t bytes);

#define CALLER __builtin_return_address(0)

/* `symbol` is the name that the compiler's headers turn `site` into. */
#define LIBC(ret, site, symbol, failed, code, params, args)               \
    EXPORT ret symbol params;                                             \
    EXPORT ret symbol params                                              \
    {                                                                     \
        static _Atomic(void *) found;                                     \
        void *where = atomic_load_explicit(&found, memory_order_relaxed); \
        ret(*call) params;                                                \
                                                                          \
        if (hit(SITE_##site, CALLER)) {                                   \
            errno = code;                                                 \
            return failed;                                                \
        }                                                                 \
        if (!where) {                                                     \
            where = real_dlsym(RTLD_NEXT, #symbol);                       \
            atomic_store_explicit(&found, where, memory_order_relaxed);   \
        }                                                                 \
        memcpy(&call, &where, sizeof(call));                              \
        return call args;                                                 \
    }

#define ALLOCATOR(name, params, args)   \
    EXPORT void *name params;           \
    EXPORT void *name params            \
    {                                   \
        if (hit(SITE_##name, CALLER)) { \
            errno = ENOMEM;             \
            return NULL;                \
        }                               \
        return __libc_##name args;      \
    }

/* clang-format off */
ALLOCATOR(malloc, (size_t bytes), (bytes))
ALLOCATOR(calloc, (size_t n, size_t bytes), (n, bytes))
ALLOCATOR(realloc, (void *ptr, size_t bytes), (ptr, bytes))
LIBC(char *, strdup, strdup, NULL, ENOMEM, (const char *text), (text))
LIBC(char *, strndup, strndup, NULL, ENOMEM, (const char *text, size_t n), (text, n))
LIBC(int, socket, socket, -1, EMFILE, (int family, int type, int protocol), (family, type, protocol))
LIBC(int, connect, connect, -1, ECONNREFUSED, (int fd, const struct sockaddr *addr, socklen_t length), (fd, addr, length))
LIBC(int, bind, bind, -1, EADDRINUSE, (int fd, const struct sockaddr *addr, socklen_t length), (fd, addr, length))
LIBC(int, listen, listen, -1, EADDRINUSE, (int fd, int backlog), (fd, backlog))
LIBC(int, getsockname, getsockname, -1, ENOBUFS, (int fd, struct sockaddr *addr, socklen_t *length), (fd, addr, length))
LIBC(int, getsockopt, getsockopt, -1, ENOBUFS, (int fd, int level, int name, void *value, socklen_t *length), (fd, level, name, value, length))
LIBC(int, accept4, accept4, -1, EMFILE, (int fd, struct sockaddr *addr, socklen_t *length, int flags), (fd, addr, length, flags))
LIBC(ssize_t, send, send, -1, ECONNRESET, (int fd, const void *data, size_t bytes, int flags), (fd, data, bytes, flags))
LIBC(ssize_t, sendmsg, sendmsg, -1, ETOOMANYREFS, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
LIBC(ssize_t, recvmsg, recvmsg, -1, ECONNRESET, (int fd, struct msghdr *message, int flags), (fd, message, flags))
LIBC(int, poll, poll, -1, ENOMEM, (struct pollfd *fds, nfds_t n, int ms), (fds, n, ms))
LIBC(int, eventfd, eventfd, -1, EMFILE, (unsigned int value, int flags), (value, flags))
LIBC(int, memfd_create, memfd_create, -1, EMFILE, (const char *name, unsigned int flags), (name, flags))
LIBC(int, ftruncate, ftruncate64, -1, ENOSPC, (int fd, off64_t size), (fd, size))
LIBC(void *, mmap, mmap64, MAP_FAILED, ENOMEM, (void *at, size_t bytes, int rights, int flags, int fd, off64_t from), (at, bytes, rights, flags, fd, from))
LIBC(ssize_t, getrandom, getrandom, -1, EAGAIN, (void *data, size_t bytes, unsigned int flags), (data, bytes, flags))
LIBC(int, pthread_create, pthread_create, EAGAIN, EAGAIN, (pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg), (thread, attr, run, arg))
LIBC(FILE *, fopen, fopen64, NULL, EMFILE, (const char *path, const char *mode), (path, mode))
/* clang-format on */

/* In tail position: the loader looks at the caller for $ORIGIN and RUNPATH. */
EXPORT void *dlopen(const char *path, int flags)
{
    static _Atomic(void *) found;
    void *addr = atomic_load_explicit(&found, memory_order_relaxed);
    void *(*call)(const char *, int);

    if (hit(SITE_dlopen, CALLER))
        return NULL;
    if (!addr) {
        addr = real_dlsym(RTLD_NEXT, "dlopen");
        atomic_store_explicit(&found, addr, memory_order_relaxed);
    }
    memcpy(&call, &addr, sizeof(call));
    return call(path, flags);
}

EXPORT int fcntl64(int fd, int command, ...);
EXPORT int fcntl64(int fd, int command, ...)
{
    int (*call)(int, int, ...);
    void *addr, *arg;
    va_list args;

    if (hit(SITE_fcntl, CALLER)) {
        errno = EPERM;
        return -1;
    }
    va_start(args, command);
    arg = va_arg(args, void *);
    va_end(args);
    addr = real_dlsym(RTLD_NEXT, "fcntl64");
    memcpy(&call, &addr, sizeof(call));
    return call(fd, command, arg);
}

/* ---- what libloongcomm.so finds by dlsym: the CUDA runtime and the kernels ---- */

/* Not by return address: the pointer is known to libloongcomm.so alone. */
static bool hit_found(enum site site)
{
    return hit(site, (const void *)low);
}

#define FOUND(site, code, params, args)                                  \
    static __typeof__(site) *found_##site;                               \
    static int stand_in_##site params                                    \
    {                                                                    \
        return hit_found(SITE_##site) ? (code) : (int)found_##site args; \
    }

/* clang-format off */
FOUND(cudaMalloc, cudaErrorMemoryAllocation, (void **ptr, size_t bytes), (ptr, bytes))
FOUND(cudaFree, cudaErrorUnknown, (void *ptr), (ptr))
FOUND(cudaEventCreateWithFlags, cudaErrorMemoryAllocation, (cudaEvent_t *event, unsigned int flags), (event, flags))
FOUND(cudaEventDestroy, cudaErrorUnknown, (cudaEvent_t event), (event))
FOUND(cudaEventQuery, cudaErrorUnknown, (cudaEvent_t event), (event))
FOUND(cudaEventRecord, cudaErrorUnknown, (cudaEvent_t event, cudaStream_t stream), (event, stream))
FOUND(cudaEventRecordWithFlags, cudaErrorUnknown, (cudaEvent_t event, cudaStream_t stream, unsigned int flags), (event, stream, flags))
FOUND(cudaGetDevice, cudaErrorUnknown, (int *device), (device))
FOUND(cudaSetDevice, cudaErrorUnknown, (int device), (device))
FOUND(cudaStreamIsCapturing, cudaErrorUnknown, (cudaStream_t stream, enum cudaStreamCaptureStatus *status), (stream, status))
FOUND(cudaStreamWaitEvent, cudaErrorUnknown, (cudaStream_t stream, cudaEvent_t event, unsigned int flags), (stream, event, flags))
FOUND(cudaThreadExchangeStreamCaptureMode, cudaErrorUnknown, (enum cudaStreamCaptureMode *mode), (mode))
FOUND(cudaDeviceGetPCIBusId, cudaErrorUnknown, (char *id, int length, int device), (id, length, device))
FOUND(cudaHostAlloc, cudaErrorMemoryAllocation, (void **ptr, size_t bytes, unsigned int flags), (ptr, bytes, flags))
FOUND(cudaFreeHost, cudaErrorUnknown, (void *ptr), (ptr))
FOUND(cudaMemsetAsync, cudaErrorUnknown, (void *to, int value, size_t bytes, cudaStream_t stream), (to, value, bytes, stream))
FOUND(cudaStreamCreateWithPriority, cudaErrorMemoryAllocation, (cudaStream_t *stream, unsigned int flags, int priority), (stream, flags, priority))
FOUND(cudaStreamGetPriority, cudaErrorInvalidValue, (cudaStream_t stream, int *priority), (stream, priority))
FOUND(cudaStreamCreateWithFlags, cudaErrorMemoryAllocation, (cudaStream_t *stream, unsigned int flags), (stream, flags))
FOUND(cudaStreamDestroy, cudaErrorUnknown, (cudaStream_t stream), (stream))
FOUND(lk_segment_new, cudaErrorMemoryAllocation, (size_t bytes, void *stream, void **address, int *fd), (bytes, stream, address, fd))
FOUND(lk_segment_map, -EINVAL, (int fd, size_t bytes, void **address), (fd, bytes, address))
FOUND(lk_segment_free, cudaErrorUnknown, (void *address, size_t bytes), (address, bytes))
FOUND(lk_rings_all_reduce, cudaErrorLaunchFailure, (const struct lk_rings *rings, const struct lk_reduction *how, const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream), (rings, how, list, n, ctas, stream))
FOUND(lk_rings_reduce_scatter, cudaErrorLaunchFailure, (const struct lk_rings *rings, const struct lk_reduction *how, const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream), (rings, how, list, n, ctas, stream))
FOUND(lk_lines_all_reduce, cudaErrorLaunchFailure, (const struct lk_rings *rings, const struct lk_reduction *how, const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream), (rings, how, list, n, ctas, stream))
FOUND(lk_load_all, cudaErrorLaunchFailure, (void), ())
FOUND(lk_rings_load, cudaErrorInvalidDeviceFunction, (void), ())
FOUND(lk_cast_pack, cudaErrorLaunchFailure, (const struct lk_tensor *tensors, size_t n, void *packed, const struct lk_scale *scale, enum lk_rounding rounding, const struct lk_rng *rng, void *stream), (tensors, n, packed, scale, rounding, rng, stream))
FOUND(lk_cast_unpack, cudaErrorLaunchFailure, (const struct lk_tensor *tensors, size_t n, const void *packed, void *stream), (tensors, n, packed, stream))
FOUND(lk_pack, cudaErrorLaunchFailure, (const struct lk_tensor *tensors, size_t n, void *packed, enum lk_type type, void *stream), (tensors, n, packed, type, stream))
FOUND(lk_unpack, cudaErrorLaunchFailure, (const struct lk_tensor *tensors, size_t n, const void *packed, enum lk_type type, void *stream), (tensors, n, packed, type, stream))
FOUND(lk_sum_shards, cudaErrorLaunchFailure, (const void *shards, size_t n, uint64_t stride, uint64_t count, void *out, enum lk_type out_type, const struct lk_scale *scale, const struct lk_rng *rng, void *stream), (shards, n, stride, count, out, out_type, scale, rng, stream))
FOUND(lk_cast_feedback, cudaErrorLaunchFailure, (const float *in, uint64_t count, void *packed, float *residual, const struct lk_scale *scale, enum lk_rounding rounding, const struct lk_rng *rng, void *stream), (in, count, packed, residual, scale, rounding, rng, stream))
FOUND(lk_count_up, cudaErrorLaunchFailure, (uint64_t *word, uint64_t by, void *stream), (word, by, stream))
FOUND(lk_compare, cudaErrorLaunchFailure, (const void *got, const void *want, uint64_t count, enum lk_type type, void *work, struct lk_difference *out, void *stream), (got, want, count, type, work, out, stream))
/* clang-format on */

/* At the site lost_copy nothing is copied, and nothing is said about it. */
static void *found_cudaMemcpyAsync, *found_lost_copy;
static int stand_in_cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind,
                                    void *stream)
{
    int (*call)(void *, const void *, size_t, int, void *);

    memcpy(&call, &found_cudaMemcpyAsync, sizeof(call));
    if (hit_found(SITE_lost_copy))
        return cudaSuccess;
    return hit_found(SITE_cudaMemcpyAsync) ? (int)cudaErrorUnknown
                                           : call(to, from, bytes, kind, stream);
}

static int stand_in_lost_copy(void) /* nobody asks for it */
{
    return cudaErrorUnknown;
}

/* Its arguments differ between releases: called with all that the newest has. */
static void *found_cudaStreamGetCaptureInfo;
static int stand_in_cudaStreamGetCaptureInfo(void *stream, void *status, void *id, void *graph,
                                             void *nodes, void *edges, void *count)
{
    int (*call)(void *, void *, void *, void *, void *, void *, void *);

    memcpy(&call, &found_cudaStreamGetCaptureInfo, sizeof(call));
    return hit_found(SITE_cudaStreamGetCaptureInfo)
               ? cudaErrorUnknown
               : call(stream, status, id, graph, nodes, edges, count);
}

static const struct {
    const char *name;
    void *stand_in;
    void **found;
} replaced[] = {
#define NAME(name) { #name, (void *)stand_in_##name, (void **)&found_##name },
    CUDA_SITES(NAME) KERNEL_SITES(NAME)
#undef NAME
};

EXPORT void *dlsym(void *restrict handle, const char *restrict name)
{
    uintptr_t caller = (uintptr_t)CALLER;
    bool ours = caller >= low && caller < high;

    for (size_t i = 0; ours && i < sizeof(replaced) / sizeof(*replaced); i++) {
        if (strcmp(replaced[i].name, name) != 0)
            continue;
        *replaced[i].found = real_dlsym(handle, name);
        return *replaced[i].found ? replaced[i].stand_in : NULL;
    }
    return real_dlsym(handle, name);
}
