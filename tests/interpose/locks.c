/* SPDX-License-Identifier: Apache-2.0
 *
 * Shows that libloongcomm.so, preloaded, takes no lock and allocates nothing on the path of a collective. The
 * program defines the functions in question itself, so that the calls of every library come here; the NCCL
 * behind does nothing at all. */
#include "tests/check.h"

#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <string.h>

static unsigned long calls;

/* The address of libc's own. */
static void *next(const char *name)
{
    void *addr = dlsym(RTLD_NEXT, name);

    CHECK(addr);
    return addr;
}

#define COUNTED(name, params, args)                      \
    int name params                                      \
    {                                                    \
        static int(*real) params;                        \
        if (!real)                                       \
            *(void **)&real = next(#name);               \
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); \
        return real args;                                \
    }
COUNTED(pthread_mutex_lock, (pthread_mutex_t * lock), (lock))
COUNTED(pthread_mutex_trylock, (pthread_mutex_t * lock), (lock))
COUNTED(pthread_rwlock_rdlock, (pthread_rwlock_t * lock), (lock))
COUNTED(pthread_rwlock_wrlock, (pthread_rwlock_t * lock), (lock))
COUNTED(pthread_rwlock_tryrdlock, (pthread_rwlock_t * lock), (lock))
COUNTED(pthread_rwlock_trywrlock, (pthread_rwlock_t * lock), (lock))
COUNTED(pthread_spin_lock, (pthread_spinlock_t * lock), (lock))
COUNTED(pthread_spin_trylock, (pthread_spinlock_t * lock), (lock))
COUNTED(pthread_cond_wait, (pthread_cond_t * cond, pthread_mutex_t *lock), (cond, lock))
COUNTED(pthread_once, (pthread_once_t * once, void (*fn)(void)), (once, fn))

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);

void *malloc(size_t size)
{
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    return __libc_calloc(count, size);
}

static unsigned long counted(void)
{
    return __atomic_exchange_n(&calls, 0, __ATOMIC_RELAXED);
}

static void every_operation(ncclComm_t comm, char *buf)
{
    ncclResult_t error;

    ncclAllReduce(buf, buf, 9, ncclFloat, ncclSum, comm, NULL);
    ncclReduceScatter(buf, buf, 9, ncclFloat, ncclSum, comm, NULL);
    ncclAllGather(buf, buf, 9, ncclFloat, comm, NULL);
    ncclAlltoAll(buf, buf, 9, ncclFloat, comm, NULL);
    ncclBroadcast(buf, buf, 9, ncclFloat, 0, comm, NULL);
    ncclBcast(buf, 9, ncclFloat, 0, comm, NULL);
    ncclReduce(buf, buf, 9, ncclFloat, ncclSum, 0, comm, NULL);
    ncclGather(buf, buf, 9, ncclFloat, 0, comm, NULL);
    ncclScatter(buf, buf, 9, ncclFloat, 0, comm, NULL);
    ncclGroupStart();
    ncclSend(buf, 9, ncclFloat, 0, comm, NULL);
    ncclRecv(buf, 9, ncclFloat, 0, comm, NULL);
    ncclGroupEnd();
    ncclCommGetAsyncError(comm, &error);
}

int main(void)
{
    char buf[64];
    int in_use;

    (void)counted();
    every_operation((ncclComm_t)&in_use, buf); /* settings, resolving, adoption */
    CHECK(counted() > 0); /* or the counting does not work, or the library is not there */
    for (int i = 0; i < 1000; i++)
        every_operation((ncclComm_t)&in_use, buf);
    printf("locks and allocations: %lu\n", counted());
    return 0;
}
