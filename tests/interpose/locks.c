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

/* Of the thread that makes the calls: the library has one of its own that may lock as it likes. Initial-exec, so that
 * counting does not allocate. */
static _Thread_local unsigned long locks __attribute__((tls_model("initial-exec")));
static _Thread_local unsigned long allocations __attribute__((tls_model("initial-exec")));

/* The address of libc's own. */
static void *next(const char *name)
{
    void *addr = dlsym(RTLD_NEXT, name);

    CHECK(addr);
    return addr;
}

#define COUNTED(name, params, args)        \
    int name params                        \
    {                                      \
        static int(*real) params;          \
        if (!real)                         \
            *(void **)&real = next(#name); \
        locks++;                           \
        return real args;                  \
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
    allocations++;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    allocations++;
    return __libc_calloc(count, size);
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

static void check(ncclComm_t comm)
{
    char buf[64];

    every_operation(comm, buf);     /* settings, resolving, making or adopting the communicator */
    CHECK(locks + allocations > 0); /* or the counting does not work, or the library is not there */
    locks = allocations = 0;
    for (int i = 0; i < 1000; i++)
        every_operation(comm, buf);
    printf("locks %lu, allocations %lu\n", locks, allocations);
    locks = allocations = 0;
}

/* A communicator without an agreement, then one with. */
int main(void)
{
    int place[2];
    ncclComm_t agreeing = (ncclComm_t)&place[1]; /* the NCCL that does nothing leaves it as it is */
    ncclUniqueId id;

    memset(&id, 0, sizeof(id));
    check((ncclComm_t)&place[0]);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess &&
          ncclCommInitRank(&agreeing, 2, id, 0) == ncclSuccess);
    check(agreeing);
    return 0;
}
