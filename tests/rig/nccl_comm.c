/* SPDX-License-Identifier: Apache-2.0
 *
 * Communicators: handles, states, references, and what can be asked of them. */
#include "tests/rig/nccl_internal.h"

#include "common/deadline.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LEAK_STATUS 86 /* as for the CUDA runtime's leaks */

/* Guards the list of live handles. */
static pthread_mutex_t comms_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ncclComm *comms;

/* Handles of other processes (we may be a fork's child) are not ours to judge. */
static void check_leaks(int status, void *arg)
{
    unsigned leaked = 0;

    if (lcrig_env("LCRIG_LEAKS", 1, 1) == 0)
        return;
    pthread_mutex_lock(&comms_lock);
    for (ncclComm_t comm = comms; comm; comm = comm->next)
        leaked += comm->pid == getpid();
    pthread_mutex_unlock(&comms_lock);
    if (leaked == 0)
        return;
    fprintf(stderr, "rig: rank %d: %u communicator(s) leaked at exit\n", lcrig_rank(), leaked);
    if (status == 0)
        _exit(LEAK_STATUS);
}

static void watch_exit(void)
{
    on_exit(check_leaks, NULL);
}

void rig_comm_list(ncclComm_t comm)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, watch_exit);
    pthread_mutex_lock(&comms_lock);
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&comms_lock);
}

bool rig_comm_unlist(ncclComm_t comm)
{
    bool found = false;

    pthread_mutex_lock(&comms_lock);
    for (struct ncclComm **link = &comms; *link; link = &(*link)->next) {
        if (*link == comm) {
            *link = comm->next;
            found = true;
            break;
        }
    }
    pthread_mutex_unlock(&comms_lock);
    return found;
}

ncclResult_t rig_comm_check(ncclComm_t comm, const char *call)
{
    bool found = false;

    if (!comm)
        return rig_error(ncclInvalidArgument, "%s: no communicator", call);
    pthread_mutex_lock(&comms_lock);
    for (ncclComm_t other = comms; other && !found; other = other->next)
        found = other == comm;
    pthread_mutex_unlock(&comms_lock);
    if (!found)
        lcrig_fail("%s of %p, which is no live communicator", call, (void *)comm);
    return ncclSuccess;
}

ncclResult_t rig_comm_ready(ncclComm_t comm, const char *call)
{
    ncclResult_t result = rig_comm_check(comm, call);
    enum rig_state state;
    bool busy;

    if (result != ncclSuccess)
        return result;
    pthread_mutex_lock(&comm->lock);
    state = comm->state;
    busy = comm->background > 0;
    pthread_mutex_unlock(&comm->lock);
    if (state == RIG_INIT || busy)
        return rig_error(ncclInvalidArgument, "%s: the communicator's previous call is in progress",
                         call);
    result = (ncclResult_t)atomic_load(&comm->async_error);
    if (result != ncclSuccess)
        return rig_error(result, "%s: the communicator has failed", call);
    if (state != RIG_READY)
        return rig_error(ncclInvalidUsage, "%s: the communicator is %s", call,
                         state == RIG_FINALIZED ? "finalized" : "revoked");
    return ncclSuccess;
}

static int copy_config(ncclConfig_t *to, const ncclConfig_t *from)
{
    static const ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;

    *to = initial;
    if (!from)
        return 0;
    if (from->magic != initial.magic)
        return -EINVAL;
    /* The caller may be built with an older or newer header. */
    memcpy(to, from, from->size < sizeof(*to) ? from->size : sizeof(*to));
    if (to->blocking != NCCL_CONFIG_UNDEF_INT && to->blocking != 0 && to->blocking != 1)
        return -EINVAL;
    return 0;
}

ncclComm_t rig_comm_new(int rank, int n, int device, const ncclConfig_t *config, ncclComm_t parent)
{
    static _Atomic unsigned salts;
    ncclConfig_t copy;
    ncclComm_t comm;

    if (copy_config(&copy, config) != 0) {
        rig_error(ncclInvalidArgument, "the configuration is not initialised or has bad values");
        return NULL;
    }
    comm = rig_alloc(sizeof(*comm));
    comm->rank = rank;
    comm->n = n;
    comm->device = device;
    comm->pid = getpid();
    comm->salt = atomic_fetch_add(&salts, 1) % 1024;
    comm->blocking = copy.blocking;
    if (comm->blocking == NCCL_CONFIG_UNDEF_INT)
        comm->blocking = parent && !config ? parent->blocking : 1;
    if (copy.commName)
        comm->name = strdup(copy.commName);
    pthread_mutex_init(&comm->lock, NULL);
    pthread_mutex_init(&comm->launch_lock, NULL);
    pthread_mutex_init(&comm->exec_lock, NULL);
    lc_deadline_cond_init(&comm->changed);
    comm->refs = 1;
    return comm;
}

void rig_comm_ref(ncclComm_t comm)
{
    pthread_mutex_lock(&comm->lock);
    comm->refs++;
    pthread_mutex_unlock(&comm->lock);
}

void rig_comm_unref(ncclComm_t comm)
{
    bool last;

    pthread_mutex_lock(&comm->lock);
    last = --comm->refs == 0;
    pthread_mutex_unlock(&comm->lock);
    if (!last)
        return;
    rig_tuner_close(comm);
    rig_lanes_clear(comm, true);
    free(comm->lanes);
    free(comm->block_in);
    free(comm->block_acc);
    free(comm->small);
    free(comm->user_ops);
    free(comm->name);
    pthread_cond_destroy(&comm->changed);
    pthread_mutex_destroy(&comm->exec_lock);
    pthread_mutex_destroy(&comm->launch_lock);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

void rig_comm_set_error(ncclComm_t comm, ncclResult_t error)
{
    int none = ncclSuccess;

    atomic_compare_exchange_strong(&comm->async_error, &none, (int)error);
}

void rig_comm_set_state(ncclComm_t comm, enum rig_state state)
{
    pthread_mutex_lock(&comm->lock);
    comm->state = state;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

void rig_comm_wait_plans(ncclComm_t comm, bool with_graphs, const char *call)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += rig_timeout_ms() / 1000;
    pthread_mutex_lock(&comm->lock);
    while (comm->plans > (with_graphs ? 0 : comm->in_graphs)) {
        if (pthread_cond_timedwait(&comm->changed, &comm->lock, &until) == ETIMEDOUT)
            lcrig_fail(
                "%s on rank %d: %u operation(s) unfinished, of which %u in graphs not destroyed",
                call, comm->rank, comm->plans, comm->in_graphs);
    }
    pthread_mutex_unlock(&comm->lock);
}

void rig_comm_wait_running(ncclComm_t comm)
{
    pthread_mutex_lock(&comm->lock);
    while (comm->running > 0)
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

uint64_t rig_host_hash(void)
{
    const char *host = getenv("NCCL_HOSTID");
    uint64_t hash = 0xcbf29ce484222325ull;
    char name[256] = "";

    if (!host) {
        gethostname(name, sizeof(name) - 1);
        host = name;
    }
    for (; *host; host++)
        hash = (hash ^ (unsigned char)*host) * 0x100000001b3ull;
    return hash;
}

ncclResult_t pncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *async_error)
{
    ncclResult_t result = rig_comm_check(comm, "ncclCommGetAsyncError");
    bool busy;

    if (result != ncclSuccess)
        return result;
    if (!async_error)
        return rig_error(ncclInvalidArgument, "ncclCommGetAsyncError: NULL");
    pthread_mutex_lock(&comm->lock);
    busy = comm->state == RIG_INIT || comm->background > 0;
    pthread_mutex_unlock(&comm->lock);
    *async_error = busy ? ncclInProgress : (ncclResult_t)atomic_load(&comm->async_error);
    return ncclSuccess;
}
RIG_EXPORT(CommGetAsyncError)

static ncclResult_t ask(ncclComm_t comm, int value_at, int *out, const char *call)
{
    ncclResult_t result = rig_comm_check(comm, call);

    if (result != ncclSuccess)
        return result;
    if (!out)
        return rig_error(ncclInvalidArgument, "%s: NULL", call);
    *out = value_at == 0 ? comm->n : value_at == 1 ? comm->rank : comm->device;
    return ncclSuccess;
}

ncclResult_t pncclCommCount(const ncclComm_t comm, int *count)
{
    return ask(comm, 0, count, "ncclCommCount");
}
RIG_EXPORT(CommCount)

ncclResult_t pncclCommUserRank(const ncclComm_t comm, int *rank)
{
    return ask(comm, 1, rank, "ncclCommUserRank");
}
RIG_EXPORT(CommUserRank)

ncclResult_t pncclCommCuDevice(const ncclComm_t comm, int *device)
{
    return ask(comm, 2, device, "ncclCommCuDevice");
}
RIG_EXPORT(CommCuDevice)

/* Registrations mean nothing here; the handle is memory of its own, so that a leak checker sees who forgets it. */
static ncclResult_t register_range(ncclComm_t comm, void *buff, size_t size, void **handle,
                                   const char *call)
{
    ncclResult_t result = rig_comm_ready(comm, call);

    if (result != ncclSuccess)
        return result;
    if (!handle || !buff || size == 0)
        return rig_error(ncclInvalidArgument, "%s: no buffer", call);
    if (lcrig_fault(call))
        return rig_error(ncclUnhandledCudaError, "%s: injected fault", call);
    *handle = rig_alloc(sizeof(struct {
        void *buff;
        size_t size;
    }));
    return ncclSuccess;
}

ncclResult_t pncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle)
{
    return register_range(comm, buff, size, handle, "ncclCommRegister");
}
RIG_EXPORT(CommRegister)

ncclResult_t pncclCommDeregister(const ncclComm_t comm, void *handle)
{
    ncclResult_t result = rig_comm_check(comm, "ncclCommDeregister");

    if (result == ncclSuccess)
        free(handle);
    return result;
}
RIG_EXPORT(CommDeregister)

ncclResult_t pncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                     int flags)
{
    return register_range(comm, buff, size, (void **)win, "ncclCommWindowRegister");
}
RIG_EXPORT(CommWindowRegister)

ncclResult_t pncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)
{
    ncclResult_t result = rig_comm_check(comm, "ncclCommWindowDeregister");

    if (result == ncclSuccess)
        free(win);
    return result;
}
RIG_EXPORT(CommWindowDeregister)
