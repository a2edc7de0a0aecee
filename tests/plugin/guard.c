/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/guard.h"

#include "tests/check.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FDS 4096

static _Thread_local const char *inside; /* the call that this thread is in, NULL: none */
static _Thread_local long switches;      /* of this thread when it entered */
static _Thread_local unsigned long fail_at, allocations;

/* Any thread, relaxed: counters. */
static unsigned long calls, waits, blocked;
static bool counting_only;

/* By descriptor: the port it listens on, 0: none. Relaxed, no lock: children of fork close descriptors, too. */
static uint16_t listening[FDS];

static uint16_t (*redirect)(uint16_t port); /* any thread, acquire and release */

/* What the C library, or a sanitizer before it, has by these names. Written before main, or by the first call where that
 * comes earlier: a thread that would look a name up while another unloads a library, and waits for it, would never end. */
#define NAME(name) static __typeof__(name) *real_##name;
#include "tests/plugin/guard.def"
#undef NAME

static void *look_up(const char *name)
{
    /* The name alone would find the oldest of several versions. */
    bool versions = strncmp(name, "pthread_cond_", 13) == 0 && !GUARD_SANITIZED;
    void *found = versions ? dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2") : NULL;

    found = found ? found : dlsym(RTLD_NEXT, name);
    CHECK(found);
    return found;
}

__attribute__((constructor)) static void look_all_up(void)
{
#define NAME(name) \
    __atomic_store_n(&real_##name, (__typeof__(name) *)look_up(#name), __ATOMIC_RELAXED);
#include "tests/plugin/guard.def"
#undef NAME
}

#define REAL(name)                                            \
    ({                                                        \
        if (!__atomic_load_n(&real_##name, __ATOMIC_RELAXED)) \
            look_all_up();                                    \
        __atomic_load_n(&real_##name, __ATOMIC_RELAXED);      \
    })

static long own_switches(void)
{
    struct rusage usage;

    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_nvcsw;
}

void guard_enter(const char *what)
{
    inside = what;
    switches = own_switches();
}

void guard_leave(void)
{
    inside = NULL;
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (own_switches() != switches)
        __atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED);
}

struct guard_counts guard_count(void)
{
    return (struct guard_counts){ .calls = __atomic_load_n(&calls, __ATOMIC_RELAXED),
                                  .waits = __atomic_load_n(&waits, __ATOMIC_RELAXED) };
}

void guard_only_count(bool on)
{
    counting_only = on;
}

unsigned long guard_blocked(void)
{
    return __atomic_load_n(&blocked, __ATOMIC_RELAXED);
}

static void can_block(const char *what)
{
    if (!inside)
        return;
    __atomic_add_fetch(&blocked, 1, __ATOMIC_RELAXED);
    if (counting_only)
        return;
    fprintf(stderr, "blocks on NCCL's thread: %s in %s\n", what, inside);
    abort();
}

/* Files do not count: only what waits for somebody else. */
static void can_block_on(int fd, int flags, const char *what)
{
    struct stat st;

    if (!inside || (flags & MSG_DONTWAIT))
        return;
    if (fstat(fd, &st) || S_ISREG(st.st_mode) || S_ISDIR(st.st_mode) || S_ISCHR(st.st_mode))
        return;
    if (!(fcntl(fd, F_GETFL) & O_NONBLOCK))
        can_block(what);
}

int poll(struct pollfd *fds, nfds_t count, int timeout)
{
    if (timeout)
        can_block("poll");
    return REAL(poll)(fds, count, timeout);
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    if (!timeout || timeout->tv_sec || timeout->tv_nsec)
        can_block("ppoll");
    return REAL(ppoll)(fds, count, timeout, mask);
}

int select(int count, fd_set *in, fd_set *out, fd_set *err, struct timeval *timeout)
{
    if (!timeout || timeout->tv_sec || timeout->tv_usec)
        can_block("select");
    return REAL(select)(count, in, out, err, timeout);
}

int epoll_wait(int fd, struct epoll_event *events, int max, int timeout)
{
    if (timeout)
        can_block("epoll_wait");
    return REAL(epoll_wait)(fd, events, max, timeout);
}

int epoll_pwait(int fd, struct epoll_event *events, int max, int timeout, const sigset_t *mask)
{
    if (timeout)
        can_block("epoll_pwait");
    return REAL(epoll_pwait)(fd, events, max, timeout, mask);
}

int nanosleep(const struct timespec *time, struct timespec *left)
{
    can_block("nanosleep");
    return REAL(nanosleep)(time, left);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left)
{
    can_block("clock_nanosleep");
    return REAL(clock_nanosleep)(clock, flags, time, left);
}

int usleep(useconds_t time)
{
    can_block("usleep");
    return REAL(usleep)(time);
}

unsigned sleep(unsigned seconds)
{
    can_block("sleep");
    return REAL(sleep)(seconds);
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **out)
{
    can_block("getaddrinfo");
    return REAL(getaddrinfo)(node, service, hints, out);
}

int pthread_join(pthread_t thread, void **out)
{
    can_block("pthread_join");
    return REAL(pthread_join)(thread, out);
}

int sem_wait(sem_t *sem)
{
    can_block("sem_wait");
    return REAL(sem_wait)(sem);
}

int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
{
    can_block("pthread_cond_wait");
    return REAL(pthread_cond_wait)(cond, mutex);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                           const struct timespec *until)
{
    can_block("pthread_cond_timedwait");
    return REAL(pthread_cond_timedwait)(cond, mutex, until);
}

ssize_t read(int fd, void *data, size_t size)
{
    can_block_on(fd, 0, "read");
    return REAL(read)(fd, data, size);
}

ssize_t readv(int fd, const struct iovec *parts, int count)
{
    can_block_on(fd, 0, "readv");
    return REAL(readv)(fd, parts, count);
}

ssize_t write(int fd, const void *data, size_t size)
{
    can_block_on(fd, 0, "write");
    return REAL(write)(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    can_block_on(fd, 0, "writev");
    return REAL(writev)(fd, parts, count);
}

ssize_t recv(int fd, void *data, size_t size, int flags)
{
    can_block_on(fd, flags, "recv");
    return REAL(recv)(fd, data, size, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    can_block_on(fd, flags, "recvmsg");
    return REAL(recvmsg)(fd, message, flags);
}

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    can_block_on(fd, flags, "send");
    return REAL(send)(fd, data, size, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    can_block_on(fd, flags, "sendmsg");
    return REAL(sendmsg)(fd, message, flags);
}

int accept(int fd, struct sockaddr *restrict addr, socklen_t *restrict len)
{
    can_block_on(fd, 0, "accept");
    return REAL(accept)(fd, addr, len);
}

int accept4(int fd, struct sockaddr *restrict addr, socklen_t *restrict len, int flags)
{
    can_block_on(fd, 0, "accept4");
    return REAL(accept4)(fd, addr, len, flags);
}

static in_port_t *port_of(struct sockaddr_storage *addr)
{
    if (addr->ss_family == AF_INET)
        return &((struct sockaddr_in *)addr)->sin_port;
    if (addr->ss_family == AF_INET6)
        return &((struct sockaddr_in6 *)addr)->sin6_port;
    return NULL;
}

int connect(int fd, const struct sockaddr *addr, socklen_t len)
{
    uint16_t (*map)(uint16_t) = __atomic_load_n(&redirect, __ATOMIC_ACQUIRE);
    struct sockaddr_storage to = { 0 };
    in_port_t *port;

    can_block_on(fd, 0, "connect");
    if (!map || len > sizeof(to))
        return REAL(connect)(fd, addr, len);
    memcpy(&to, addr, len);
    port = port_of(&to);
    if (port)
        *port = htons(map(ntohs(*port)));
    return REAL(connect)(fd, (struct sockaddr *)&to, len);
}

int listen(int fd, int backlog)
{
    struct sockaddr_storage addr = { 0 };
    socklen_t len = sizeof(addr);
    int err = REAL(listen)(fd, backlog);
    in_port_t *port;

    if (err || getsockname(fd, (struct sockaddr *)&addr, &len))
        return err;
    port = port_of(&addr);
    if (port && fd < FDS)
        __atomic_store_n(&listening[fd], ntohs(*port), __ATOMIC_RELAXED);
    return err;
}

int close(int fd)
{
    if (fd >= 0 && fd < FDS)
        __atomic_store_n(&listening[fd], 0, __ATOMIC_RELAXED);
    return REAL(close)(fd);
}

size_t guard_ports(uint16_t *out, size_t max)
{
    size_t count = 0;

    for (int fd = 0; fd < FDS; fd++) {
        uint16_t port = __atomic_load_n(&listening[fd], __ATOMIC_RELAXED);

        if (port && count < max)
            out[count++] = port;
    }
    return count;
}

void guard_redirect(uint16_t (*map)(uint16_t port))
{
    __atomic_store_n(&redirect, map, __ATOMIC_RELEASE);
}

unsigned long guard_fail_allocation(unsigned long n)
{
    unsigned long counted = allocations;

    fail_at = n;
    allocations = 0;
    return counted;
}

#if !GUARD_SANITIZED
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t align, size_t size);

static bool refused(void)
{
    if (!inside || ++allocations != fail_at)
        return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t size)
{
    return refused() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return refused() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    return refused() ? NULL : __libc_realloc(old, size);
}

void *aligned_alloc(size_t align, size_t size)
{
    return refused() ? NULL : __libc_memalign(align, size);
}

int posix_memalign(void **out, size_t align, size_t size)
{
    void *got = refused() ? NULL : __libc_memalign(align, size);

    if (!got)
        return ENOMEM;
    *out = got;
    return 0;
}
#endif

bool guard_fd_inherited(const int *except, size_t count)
{
    for (int fd = 3; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);
        bool known = flags < 0 || (flags & FD_CLOEXEC);

        for (size_t i = 0; i < count; i++)
            known = known || except[i] == fd;
        if (!known) {
            fprintf(stderr, "descriptor %d is inherited\n", fd);
            return true;
        }
    }
    return false;
}
