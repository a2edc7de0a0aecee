/* SPDX-License-Identifier: Apache-2.0
 *
 * libperturb.so, preloaded: makes rare interleavings common. Calls that threads meet in begin late or come back late, and
 * may do less than they were asked for, as far as their contracts allow. LCPERTURB_SEED=N chooses; without it nothing is
 * changed. LCPERTURB_RATE (per cent, 100) makes all of it rarer or more frequent.
 *
 * What is not done, because callers may rely on it: a trylock of a free mutex succeeds (whoever fails leaves the work to
 * the holder, so there must be one); EAGAIN comes only from the kernel, else an edge-triggered poll would never tell that
 * it is over; the first bytes on a socket are sent whole; blocking sends are whole; eventfds are never interrupted. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT    __attribute__((visibility("default")))
#define CHANCES   65536
#define SHORT_MIN 512 /* bytes: shorter sends may be somebody's first ones */
#define IOVS      128

/* clang-format off */
#define CALLS(X) \
    X(pthread_mutex_lock) X(pthread_mutex_trylock) X(pthread_mutex_unlock) X(epoll_wait) X(epoll_ctl) X(poll) X(ppoll) \
    X(read) X(readv) X(recv) X(recvmsg) X(write) X(writev) X(send) X(sendmsg) X(accept4) X(shutdown) X(sched_yield)
/* Of these libc has two versions, and dlsym may find the older one. */
#define CONDITIONS(X) \
    X(pthread_cond_wait) X(pthread_cond_timedwait) X(pthread_cond_signal) X(pthread_cond_broadcast)
/* clang-format on */

/* Written by whoever calls first, by several at once with the same values, perhaps. */
static struct {
#define FIELD(name) __typeof__(name) *name;
    CALLS(FIELD)
    CONDITIONS(FIELD)
#undef FIELD
    __typeof__(syscall) *syscall;
    uintptr_t program, program_end; /* the code of the process's own file */
    uint64_t seed;
    unsigned rate;
    bool on;
} real;
static atomic_bool resolved;
static atomic_uint n_threads;
static atomic_uint n_forks;

enum site {
    LOCK,
    UNLOCK,
    WAIT,
    SIGNAL,
    POLL,
    CONTROL,
    IN,
    OUT,
    YIELD,
    SITES,
};

/* Of each thread: its generator, and how much it is perturbed in which place. */
static _Thread_local struct {
    uint64_t state; /* 0: not begun */
    unsigned char weight[SITES];
} mine __attribute__((tls_model("initial-exec")));

/* The first of them is the program. */
static int find_program(struct dl_phdr_info *info, size_t size, void *arg)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];

        if (part->p_type == PT_LOAD && part->p_flags & PF_X) {
            real.program = info->dlpi_addr + part->p_vaddr;
            real.program_end = real.program + part->p_memsz;
        }
    }
    return 1;
}

/* Not through libraries that stand in front of dlsym: they would find this one. */
static void *find(const char *name)
{
    static const char *const versions[] = { "GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17" };
    __typeof__(dlsym) *real_dlsym = NULL;

    for (size_t i = 0; i < sizeof(versions) / sizeof(versions[0]) && !real_dlsym; i++)
        *(void **)&real_dlsym = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    return real_dlsym ? real_dlsym(RTLD_NEXT, name) : NULL;
}

static void resolve(void)
{
    const char *seed = getenv("LCPERTURB_SEED");
    const char *rate = getenv("LCPERTURB_RATE");

#define FIND(name) *(void **)&real.name = find(#name);
    CALLS(FIND)
    FIND(syscall)
#undef FIND
#define FIND(name)                                                  \
    *(void **)&real.name = dlvsym(RTLD_NEXT, #name, "GLIBC_2.3.2"); \
    if (!real.name)                                                 \
        *(void **)&real.name = find(#name);
    CONDITIONS(FIND)
#undef FIND
    (void)dl_iterate_phdr(find_program, NULL);
    real.seed = seed ? strtoull(seed, NULL, 0) : 0;
    real.rate = rate ? (unsigned)strtoul(rate, NULL, 0) : 100;
    real.on = seed != NULL;
    atomic_store_explicit(&resolved, true, memory_order_release);
}

/* Ranks are forked by one process: each is another one. */
static void in_parent(void)
{
    atomic_fetch_add(&n_forks, 1);
}

static void in_child(void)
{
    mine.state = 0;
    atomic_store(&n_threads, 1000 * atomic_load(&n_forks));
    real.seed += 0x9e3779b97f4a7c15u * (atomic_load(&n_forks) + 1);
}

__attribute__((constructor)) static void begin(void)
{
    resolve();
    if (real.on)
        (void)pthread_atfork(in_parent, NULL, in_child);
}

static uint64_t next_random(void)
{
    uint64_t z;

    mine.state += 0x9e3779b97f4a7c15u;
    z = mine.state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void begin_thread(void)
{
    static const unsigned char weights[] = { 0, 1, 4, 16 };

    mine.state = real.seed * 0xd1342543de82ef95u + atomic_fetch_add(&n_threads, 1) + 1;
    for (int i = 0; i < SITES; i++)
        mine.weight[i] = weights[next_random() % (sizeof(weights) / sizeof(weights[0]))];
}

/* True in about so many of CHANCES cases, where the thread is perturbed a little; more where it is much. */
static bool happens(enum site site, unsigned chances)
{
    if (!atomic_load_explicit(&resolved, memory_order_acquire))
        resolve();
    if (!real.on)
        return false;
    if (!mine.state)
        begin_thread();
    return next_random() % CHANCES < (uint64_t)chances * mine.weight[site] * real.rate / 100;
}

static void pause_us(uint64_t us)
{
    struct timespec time = { .tv_nsec = (long)us * 1000 };

    real.syscall(SYS_nanosleep, &time, NULL);
}

static void late(enum site site)
{
    int err = errno;

    if (happens(site, 600)) {
        uint64_t kind = next_random() % 600;

        if (kind < 6)
            pause_us(1000 + next_random() % 4000);
        else if (kind < 160)
            pause_us(10 + next_random() % 190);
        else
            real.sched_yield();
    }
    errno = err;
}

/* `by`: where the call will return to. The tests' own programs have no signal handlers, so they need not look for it. */
static bool interrupted(enum site site, const void *by)
{
    if (!happens(site, 40) || ((uintptr_t)by >= real.program && (uintptr_t)by < real.program_end))
        return false;
    errno = EINTR;
    return true;
}

static bool is_stream(int fd)
{
    int type = 0;
    socklen_t size = sizeof(type);
    int err = errno;
    bool is = getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;

    errno = err;
    return is;
}

static bool never_blocks(int fd, int flags)
{
    int set = fcntl(fd, F_GETFL);

    return flags & MSG_DONTWAIT || (set >= 0 && set & O_NONBLOCK);
}

/* A part of so many bytes: of all magnitudes, from either end. */
static size_t part_of(size_t size)
{
    size_t part = (size_t)next_random() % size;

    part >>= next_random() % 20;
    if (next_random() % 2)
        part = size - part;
    return part ? part : 1;
}

static size_t shorter_in(int fd, size_t size, int flags)
{
    if (size < 2 || flags & (MSG_PEEK | MSG_WAITALL | MSG_TRUNC) || !happens(IN, 512) ||
        !is_stream(fd))
        return size;
    return part_of(size);
}

static size_t shorter_out(int fd, size_t size, int flags)
{
    if (size < SHORT_MIN || !happens(OUT, 512) || !never_blocks(fd, flags) || !is_stream(fd))
        return size;
    return part_of(size);
}

static size_t total(const struct iovec *iov, size_t n)
{
    size_t size = 0;

    for (size_t i = 0; i < n; i++)
        size += iov[i].iov_len;
    return size;
}

/* The first `size` bytes of them; the number of places. */
static size_t cut(const struct iovec *iov, size_t n, size_t size, struct iovec *out)
{
    size_t i = 0;

    for (; i < n && size; i++) {
        out[i] = iov[i];
        if (out[i].iov_len > size)
            out[i].iov_len = size;
        size -= out[i].iov_len;
    }
    return i;
}

/* ---- locks ---- */

EXPORT int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    int err;

    late(LOCK);
    err = real.pthread_mutex_lock(mutex);
    late(LOCK);
    return err;
}

EXPORT int pthread_mutex_trylock(pthread_mutex_t *mutex)
{
    int err;

    late(LOCK);
    err = real.pthread_mutex_trylock(mutex);
    late(LOCK);
    return err;
}

EXPORT int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    int err;

    late(UNLOCK);
    err = real.pthread_mutex_unlock(mutex);
    late(UNLOCK);
    return err;
}

static bool wakes_for_nothing(pthread_mutex_t *mutex)
{
    late(WAIT);
    if (!happens(WAIT, 256))
        return false;
    real.pthread_mutex_unlock(mutex);
    real.sched_yield();
    real.pthread_mutex_lock(mutex);
    return true;
}

EXPORT int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
{
    int err = wakes_for_nothing(mutex) ? 0 : real.pthread_cond_wait(cond, mutex);

    late(WAIT);
    return err;
}

EXPORT int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                                  const struct timespec *until)
{
    int err = wakes_for_nothing(mutex) ? 0 : real.pthread_cond_timedwait(cond, mutex, until);

    late(WAIT);
    return err;
}

EXPORT int pthread_cond_signal(pthread_cond_t *cond)
{
    late(SIGNAL);
    return real.pthread_cond_signal(cond);
}

EXPORT int pthread_cond_broadcast(pthread_cond_t *cond)
{
    late(SIGNAL);
    return real.pthread_cond_broadcast(cond);
}

/* Futexes; none of the others is touched. */
EXPORT long syscall(long number, ...)
{
    long arg[6];
    long got;
    va_list ap;

    va_start(ap, number);
    for (int i = 0; i < 6; i++)
        arg[i] = va_arg(ap, long);
    va_end(ap);
    if (number != SYS_futex) {
        if (!atomic_load_explicit(&resolved, memory_order_acquire))
            resolve();
        return real.syscall(number, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]);
    }
    late(WAIT);
    if ((arg[1] & FUTEX_CMD_MASK) == FUTEX_WAIT && happens(WAIT, 256))
        return 0; /* woken for nothing */
    got = real.syscall(number, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]);
    late(WAIT);
    return got;
}

EXPORT int sched_yield(void)
{
    late(YIELD);
    return real.sched_yield();
}

/* ---- polling ---- */

EXPORT int epoll_wait(int fd, struct epoll_event *events, int most, int timeout)
{
    int n;

    late(POLL);
    if (interrupted(POLL, __builtin_return_address(0)))
        return -1;
    n = real.epoll_wait(fd, events, most > 1 && happens(POLL, 512) ? 1 : most, timeout);
    late(POLL);
    return n;
}

EXPORT int epoll_ctl(int poll_fd, int op, int fd, struct epoll_event *event)
{
    int err;

    late(CONTROL);
    err = real.epoll_ctl(poll_fd, op, fd, event);
    late(CONTROL);
    return err;
}

EXPORT int poll(struct pollfd *fds, nfds_t n, int timeout)
{
    int got;

    late(POLL);
    if (interrupted(POLL, __builtin_return_address(0)))
        return -1;
    got = real.poll(fds, n, timeout);
    late(POLL);
    return got;
}

EXPORT int ppoll(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *set)
{
    int got;

    late(POLL);
    if (interrupted(POLL, __builtin_return_address(0)))
        return -1;
    got = real.ppoll(fds, n, timeout, set);
    late(POLL);
    return got;
}

/* ---- bytes ---- */

EXPORT ssize_t read(int fd, void *data, size_t size)
{
    ssize_t got;

    late(IN);
    got = real.read(fd, data, shorter_in(fd, size, 0));
    late(IN);
    return got;
}

EXPORT ssize_t readv(int fd, const struct iovec *iov, int n)
{
    size_t size = total(iov, n > 0 ? (size_t)n : 0);
    struct iovec less[IOVS];
    size_t part;
    ssize_t got;

    late(IN);
    part = n <= IOVS ? shorter_in(fd, size, 0) : size;
    if (part < size)
        got = real.readv(fd, less, (int)cut(iov, (size_t)n, part, less));
    else
        got = real.readv(fd, iov, n);
    late(IN);
    return got;
}

EXPORT ssize_t recv(int fd, void *data, size_t size, int flags)
{
    ssize_t got;

    late(IN);
    if (!(flags & MSG_WAITALL) && interrupted(IN, __builtin_return_address(0)))
        return -1;
    got = real.recv(fd, data, shorter_in(fd, size, flags), flags);
    late(IN);
    return got;
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
    ssize_t got;

    late(IN);
    if (interrupted(IN, __builtin_return_address(0)))
        return -1;
    got = real.recvmsg(fd, msg, flags);
    late(IN);
    return got;
}

EXPORT ssize_t write(int fd, const void *data, size_t size)
{
    ssize_t put;

    late(OUT);
    put = real.write(fd, data, size);
    late(OUT);
    return put;
}

EXPORT ssize_t writev(int fd, const struct iovec *iov, int n)
{
    ssize_t put;

    late(OUT);
    put = real.writev(fd, iov, n);
    late(OUT);
    return put;
}

EXPORT ssize_t send(int fd, const void *data, size_t size, int flags)
{
    ssize_t put;

    late(OUT);
    put = real.send(fd, data, shorter_out(fd, size, flags), flags);
    late(OUT);
    return put;
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    size_t size = total(msg->msg_iov, msg->msg_iovlen);
    struct msghdr less = *msg;
    struct iovec iov[IOVS];
    size_t part = size;
    ssize_t put;

    late(OUT);
    if (interrupted(OUT, __builtin_return_address(0)))
        return -1;
    if (msg->msg_iovlen <= IOVS && !msg->msg_controllen)
        part = shorter_out(fd, size, flags);
    if (part < size) {
        less.msg_iovlen = cut(msg->msg_iov, msg->msg_iovlen, part, iov);
        less.msg_iov = iov;
        msg = &less;
    }
    put = real.sendmsg(fd, msg, flags);
    late(OUT);
    return put;
}

EXPORT int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    int got;

    late(IN);
    got = real.accept4(fd, address, size, flags);
    late(IN);
    return got;
}

EXPORT int shutdown(int fd, int how)
{
    late(OUT);
    return real.shutdown(fd, how);
}
