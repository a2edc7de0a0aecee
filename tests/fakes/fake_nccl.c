/* SPDX-License-Identifier: Apache-2.0
 *
 * Built once per NCCL release; a version script leaves out what that release did not have. */
#include "tests/fakes/fake.h"

#include <nccl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ncclComm {
    int ranks;
    int rank;
    int device;
    bool blocking;
    int polls; /* of ncclCommGetAsyncError until a child that is made in the background is there */
    struct ncclComm *next;
    ncclComm_t *child_where; /* of a Split that is not complete */
    struct ncclComm *child;
};

/* gcc wants the twin to have the same attributes as the function. */
#if __has_attribute(copy)
#define TWIN(name) __attribute__((alias("p" #name), copy(p##name)))
#else
#define TWIN(name) __attribute__((alias("p" #name)))
#endif

/* A name and its p-twin at one address, as in NCCL. */
#define FAKE(name, args)                      \
    ncclResult_t p##name args;                \
    extern __typeof(p##name) name TWIN(name); \
    ncclResult_t p##name args

static struct {
    const char *name;
    unsigned calls;
} counts[128];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of counts and free_comms */
static struct ncclComm *free_comms;

static _Thread_local unsigned depth;
static _Thread_local struct ncclComm *waiting; /* parents whose child appears at the group's end */

fake_count_fn fake_count;
unsigned fake_count(const char *name)
{
    unsigned calls = 0;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < 128 && counts[i].name; i++) {
        if (strcmp(counts[i].name, name) == 0)
            calls = counts[i].calls;
    }
    pthread_mutex_unlock(&lock);
    return calls;
}

static void count(const char *name)
{
    int i = 0;

    pthread_mutex_lock(&lock);
    while (counts[i].name && strcmp(counts[i].name, name) != 0)
        i++;
    counts[i].name = name;
    counts[i].calls++;
    pthread_mutex_unlock(&lock);
}

static struct ncclComm *new_comm(int ranks, int rank, bool blocking)
{
    const char *device = getenv("FAKE_DEVICE");
    struct ncclComm *comm;

    pthread_mutex_lock(&lock);
    comm = free_comms;
    if (comm)
        free_comms = comm->next;
    pthread_mutex_unlock(&lock);
    if (!comm)
        comm = malloc(sizeof(*comm));
    *comm = (struct ncclComm){ .ranks = ranks,
                               .rank = rank,
                               .device = device ? atoi(device) : 3,
                               .blocking = blocking };
    return comm;
}

static void free_comm(struct ncclComm *comm)
{
    pthread_mutex_lock(&lock);
    comm->next = free_comms;
    free_comms = comm;
    pthread_mutex_unlock(&lock);
}

static bool is_blocking(const ncclConfig_t *config)
{
    return !config || config->blocking != 0;
}

const char *pncclGetErrorString(ncclResult_t result)
{
    count("ncclGetErrorString");
    return "a text of the fake";
}
extern __typeof(pncclGetErrorString) ncclGetErrorString TWIN(ncclGetErrorString);

FAKE(ncclGetVersion, (int *version))
{
    count("ncclGetVersion");
    *version = FAKE_VERSION;
    return ncclSuccess;
}

FAKE(ncclGetUniqueId, (ncclUniqueId * id))
{
    count("ncclGetUniqueId");
    memset(id, 0, sizeof(*id));
    return ncclSuccess;
}

FAKE(ncclCommInitRank, (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank))
{
    count("ncclCommInitRank");
    *comm = new_comm(nranks, rank, true);
    return ncclSuccess;
}

FAKE(ncclCommInitRankConfig,
     (ncclComm_t * comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config))
{
    count("ncclCommInitRankConfig");
    *comm = new_comm(nranks, rank, is_blocking(config));
    return is_blocking(config) ? ncclSuccess : ncclInProgress;
}

FAKE(ncclCommInitRankScalable,
     (ncclComm_t * comm, int nranks, int rank, int nid, ncclUniqueId *ids, ncclConfig_t *config))
{
    count("ncclCommInitRankScalable");
    *comm = new_comm(nranks, rank, is_blocking(config));
    return is_blocking(config) ? ncclSuccess : ncclInProgress;
}

FAKE(ncclCommInitAll, (ncclComm_t * comm, int ndev, const int *devlist))
{
    ncclUniqueId id;

    count("ncclCommInitAll");
    (void)ncclGetUniqueId(&id); /* by its public name, as NCCL does */
    for (int i = 0; i < ndev; i++) {
        comm[i] = new_comm(ndev, i, true);
        comm[i]->device = devlist ? devlist[i] : i;
    }
    return ncclSuccess;
}

static ncclResult_t make_child(ncclComm_t comm, struct ncclComm *child, ncclComm_t *newcomm)
{
    *newcomm = NULL;
    comm->child = child;
    comm->child_where = newcomm;
    comm->polls = 2;
    if (depth) {
        comm->next = waiting;
        waiting = comm;
        return ncclSuccess;
    }
    if (!comm->blocking)
        return ncclInProgress;
    *newcomm = child;
    return ncclSuccess;
}

FAKE(ncclCommSplit,
     (ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config))
{
    count("ncclCommSplit");
    if (color == NCCL_SPLIT_NOCOLOR) {
        *newcomm = NULL;
        return ncclSuccess;
    }
    return make_child(comm, new_comm(comm->ranks / 2, key, comm->blocking), newcomm);
}

FAKE(ncclCommShrink, (ncclComm_t comm, int *excluded, int excluded_count, ncclComm_t *newcomm,
                      ncclConfig_t *config, int flags))
{
    count("ncclCommShrink");
    return make_child(comm, new_comm(comm->ranks - excluded_count, comm->rank, comm->blocking),
                      newcomm);
}

FAKE(ncclCommFinalize, (ncclComm_t comm))
{
    ncclResult_t error;

    count("ncclCommFinalize");
    return ncclCommGetAsyncError(comm, &error); /* by its public name, as NCCL does */
}

FAKE(ncclCommDestroy, (ncclComm_t comm))
{
    count("ncclCommDestroy");
    if (comm)
        free_comm(comm);
    return ncclSuccess;
}

FAKE(ncclCommAbort, (ncclComm_t comm))
{
    count("ncclCommAbort");
    if (comm)
        free_comm(comm);
    return ncclSuccess;
}

FAKE(ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *error))
{
    count("ncclCommGetAsyncError");
    *error = ncclSuccess;
    if (comm->child_where && !comm->blocking) {
        *error = ncclInProgress;
        if (--comm->polls == 0) {
            *comm->child_where = comm->child;
            comm->child_where = NULL;
            *error = ncclSuccess;
        }
    }
    return ncclSuccess;
}

#define GETTER(name, field)                       \
    FAKE(name, (const ncclComm_t comm, int *out)) \
    {                                             \
        count(#name);                             \
        if (!comm)                                \
            return ncclInvalidArgument;           \
        *out = comm->field;                       \
        return ncclSuccess;                       \
    }
GETTER(ncclCommCount, ranks)
GETTER(ncclCommUserRank, rank)
GETTER(ncclCommCuDevice, device)

FAKE(ncclGroupStart, (void))
{
    count("ncclGroupStart");
    depth++;
    return ncclSuccess;
}

static ncclResult_t end_group(bool simulated)
{
    if (depth == 0)
        return ncclInvalidUsage;
    if (--depth)
        return ncclSuccess;
    for (; waiting && !simulated; waiting = waiting->next) {
        *waiting->child_where = waiting->child;
        waiting->child_where = NULL;
    }
    waiting = NULL;
    return ncclSuccess;
}

FAKE(ncclGroupEnd, (void))
{
    count("ncclGroupEnd");
    return end_group(false);
}

FAKE(ncclGroupSimulateEnd, (ncclSimInfo_t * info))
{
    count("ncclGroupSimulateEnd");
    return end_group(true);
}

/* The operations on data. A missing communicator is refused. */
#define OPERATION(name, args)                            \
    FAKE(name, args)                                     \
    {                                                    \
        count(#name);                                    \
        return comm ? ncclSuccess : ncclInvalidArgument; \
    }
#define HEAD const void *send, void *recv, size_t n, ncclDataType_t type
#define TAIL ncclComm_t comm, cudaStream_t stream
OPERATION(ncclAllReduce, (HEAD, ncclRedOp_t op, TAIL))
OPERATION(ncclReduceScatter, (HEAD, ncclRedOp_t op, TAIL))
OPERATION(ncclAllGather, (HEAD, TAIL))
OPERATION(ncclAlltoAll, (HEAD, TAIL))
OPERATION(ncclBroadcast, (HEAD, int root, TAIL))
OPERATION(ncclReduce, (HEAD, ncclRedOp_t op, int root, TAIL))
OPERATION(ncclGather, (HEAD, int root, TAIL))
OPERATION(ncclScatter, (HEAD, int root, TAIL))
OPERATION(ncclSend, (const void *send, size_t n, ncclDataType_t type, int peer, TAIL))
OPERATION(ncclRecv, (void *recv, size_t n, ncclDataType_t type, int peer, TAIL))

FAKE(ncclBcast, (void *buff, size_t n, ncclDataType_t type, int root, TAIL))
{
    count("ncclBcast");
    return ncclBroadcast(buff, buff, n, type, root, comm,
                         stream); /* by its public name, as NCCL does */
}

OPERATION(ncclRedOpCreatePreMulSum, (ncclRedOp_t * op, void *scalar, ncclDataType_t type,
                                     ncclScalarResidence_t residence, ncclComm_t comm))
OPERATION(ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm))
#if NCCL_VERSION_CODE >= 22807
OPERATION(ncclCommRevoke, (ncclComm_t comm, int flags))
#endif
OPERATION(ncclCommWindowRegister,
          (ncclComm_t comm, void *buff, size_t size, ncclWindow_t *window, int flags))
