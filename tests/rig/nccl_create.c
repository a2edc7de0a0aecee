/* SPDX-License-Identifier: Apache-2.0
 *
 * Ways of creating a communicator. The handle is written before the set-up runs, so that another thread can abort it. */
#include "tests/rig/nccl_internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(RIG_ID_USED <= sizeof(ncclUniqueId), "the id must fit");

static struct rig_id id_of(const ncclUniqueId *unique)
{
    struct rig_id id;

    memcpy(&id, unique->internal, sizeof(id));
    return id;
}

ncclResult_t pncclGetUniqueId(ncclUniqueId *unique)
{
    struct rig_id id;

    if (!unique)
        return rig_error(ncclInvalidArgument, "ncclGetUniqueId: NULL");
    if (lcrig_fault("ncclGetUniqueId"))
        return rig_error(ncclSystemError, "ncclGetUniqueId: injected fault");
    id = rig_id_new();
    memset(unique, 0, sizeof(*unique));
    memcpy(unique->internal, &id, sizeof(id));
    return ncclSuccess;
}
RIG_EXPORT(GetUniqueId)

static ncclResult_t create_events(ncclComm_t comm)
{
    cudaEvent_t *events[] = { &comm->order, &comm->join, &comm->captured };
    int device;

    if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(comm->device) != cudaSuccess)
        return rig_error(ncclUnhandledCudaError, "device %d cannot be used", comm->device);
    for (int i = 0; i < 3; i++)
        if (cudaEventCreateWithFlags(events[i], cudaEventDisableTiming) != cudaSuccess)
            return rig_error(ncclUnhandledCudaError, "cudaEventCreate failed");
    cudaSetDevice(device);
    return ncclSuccess;
}

ncclResult_t rig_comm_connect(ncclComm_t comm, const struct rig_id *id)
{
    struct rig_clique *clique;
    ncclResult_t result = create_events(comm);

    if (result != ncclSuccess)
        return result;
    result = rig_clique_join(id, comm->rank, comm->n, comm->device, &comm->abort, &clique);
    if (result != ncclSuccess)
        return result;
    comm->lanes = rig_alloc((size_t)comm->n * sizeof(*comm->lanes));
    comm->block_in = rig_alloc(RIG_BLOCK_BYTES);
    comm->block_acc = rig_alloc(RIG_BLOCK_BYTES);
    comm->small = rig_alloc((size_t)comm->n * RIG_SMALL_BYTES);
    for (int peer = 0; peer < comm->n; peer++) {
        comm->lanes[peer].tx = rig_clique_ring(clique, comm->rank, peer);
        comm->lanes[peer].rx = rig_clique_ring(clique, peer, comm->rank);
    }
    pthread_mutex_lock(&comm->lock);
    comm->clique = clique;
    pthread_mutex_unlock(&comm->lock);
    rig_tuner_open(comm);
    pthread_mutex_lock(&comm->lock);
    comm->state = RIG_READY;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    return ncclSuccess;
}

static ncclResult_t run_init(struct rig_job *job)
{
    return rig_comm_connect(job->comm, &job->id);
}

/* Lists the communicator (which may be NULL), writes the handle and submits. The parent's reference is taken here. */
static ncclResult_t submit(ncclComm_t comm, ncclComm_t parent, ncclComm_t *out,
                           const struct rig_job *like)
{
    struct rig_job *job = rig_alloc(sizeof(*job));

    *job = *like;
    job->creates = true;
    job->comm = comm;
    job->parent = parent;
    job->out = out;
    job->nonblocking = comm ? !comm->blocking : !parent->blocking;
    if (comm) {
        rig_comm_list(comm);
        rig_comm_ref(comm);
    }
    if (parent)
        rig_comm_ref(parent);
    __atomic_store_n(out, comm, __ATOMIC_RELEASE);
    return rig_job_submit(job);
}

static ncclResult_t init_rank(ncclComm_t *out, int n, const ncclUniqueId *unique, int rank,
                              const ncclConfig_t *config, int device, const char *call)
{
    struct rig_job job = { .run = run_init };
    ncclComm_t comm;

    if (!out)
        return rig_error(ncclInvalidArgument, "%s: NULL", call);
    if (n < 1 || rank < 0 || rank >= n)
        return rig_error(ncclInvalidArgument, "%s: rank %d of %d", call, rank, n);
    if (n > RIG_RANKS_MAX)
        return rig_error(ncclInvalidArgument, "%s: the rig has at most %d ranks", call,
                         RIG_RANKS_MAX);
    if (lcrig_fault(call))
        return rig_error(ncclSystemError, "%s: injected fault", call);
    comm = rig_comm_new(rank, n, device, config, NULL);
    if (!comm)
        return ncclInvalidArgument;
    job.id = id_of(unique);
    return submit(comm, NULL, out, &job);
}

static ncclResult_t init_here(ncclComm_t *out, int n, const ncclUniqueId *unique, int rank,
                              const ncclConfig_t *config, const char *call)
{
    int device;

    if (cudaGetDevice(&device) != cudaSuccess)
        return rig_group_note(rig_error(ncclUnhandledCudaError, "%s: no current device", call));
    return rig_group_note(init_rank(out, n, unique, rank, config, device, call));
}

ncclResult_t pncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank)
{
    return init_here(comm, n, &id, rank, NULL, "ncclCommInitRank");
}
RIG_EXPORT(CommInitRank)

ncclResult_t pncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int rank,
                                     ncclConfig_t *config)
{
    return init_here(comm, n, &id, rank, config, "ncclCommInitRankConfig");
}
RIG_EXPORT(CommInitRankConfig)

/* One id is enough to meet; the others only share NCCL's set-up work. */
ncclResult_t pncclCommInitRankScalable(ncclComm_t *comm, int n, int rank, int ids,
                                       ncclUniqueId *unique, ncclConfig_t *config)
{
    if (ids < 1 || ids > n || !unique)
        return rig_group_note(
            rig_error(ncclInvalidArgument, "ncclCommInitRankScalable: %d ids", ids));
    return init_here(comm, n, unique, rank, config, "ncclCommInitRankScalable");
}
RIG_EXPORT(CommInitRankScalable)

static ncclResult_t check_devices(int n, const int *devices)
{
    int count;

    if (cudaGetDeviceCount(&count) != cudaSuccess)
        return rig_error(ncclUnhandledCudaError, "ncclCommInitAll: no device");
    if (n < 1 || (!devices && n > count))
        return rig_error(ncclInvalidArgument, "ncclCommInitAll: %d of %d devices", n, count);
    for (int i = 0; devices && i < n; i++) {
        if (devices[i] < 0 || devices[i] >= count)
            return rig_error(ncclInvalidArgument, "ncclCommInitAll: device %d", devices[i]);
        for (int other = 0; other < i; other++)
            if (devices[other] == devices[i])
                return rig_error(ncclInvalidUsage, "ncclCommInitAll: device %d twice", devices[i]);
    }
    return ncclSuccess;
}

ncclResult_t pncclCommInitAll(ncclComm_t *comm, int n, const int *devices)
{
    ncclUniqueId unique;
    ncclResult_t result = comm ? check_devices(n, devices) : ncclInvalidArgument;

    if (result == ncclSuccess)
        result = pncclGetUniqueId(&unique);
    if (result != ncclSuccess)
        return rig_group_note(result);
    rig_group_start();
    for (int rank = 0; rank < n; rank++)
        rig_group_note(init_rank(&comm[rank], n, &unique, rank, NULL,
                                 devices ? devices[rank] : rank, "ncclCommInitAll"));
    return rig_group_end();
}
RIG_EXPORT(CommInitAll)

/* ---- split ---- */

/* Place of `rank` among those of its colour: by key, then by old rank. Also finds who comes first and the count. */
static int place_in_color(const struct rig_post *all, int n, int rank, int *first, int *count)
{
    int place = 0;

    *first = rank;
    *count = 0;
    for (int other = 0; other < n; other++) {
        if (all[other].color != all[rank].color)
            continue;
        ++*count;
        if (all[other].key < all[rank].key || (all[other].key == all[rank].key && other < rank))
            place++;
        if (all[other].key < all[*first].key ||
            (all[other].key == all[*first].key && other < *first))
            *first = other;
    }
    return place;
}

static ncclResult_t run_split(struct rig_job *job)
{
    ncclComm_t parent = job->parent;
    struct rig_post mine = { job->color, job->key, rig_id_new() };
    struct rig_post all[RIG_RANKS_MAX];
    ncclResult_t result;
    int first;

    result = rig_clique_exchange(parent->clique, parent->rank, ++parent->turns, &mine,
                                 job->comm ? &job->comm->abort : &parent->abort, all);
    if (result != ncclSuccess || !job->comm)
        return result;
    job->comm->rank = place_in_color(all, parent->n, parent->rank, &first, &job->comm->n);
    return rig_comm_connect(job->comm, &all[first].id);
}

/* Revoked parents may still have children. */
static ncclResult_t check_parent(ncclComm_t comm, const char *call)
{
    ncclResult_t result = rig_comm_check(comm, call);
    bool revoked;

    if (result != ncclSuccess)
        return result;
    pthread_mutex_lock(&comm->lock);
    revoked = comm->state == RIG_REVOKED && comm->background == 0;
    pthread_mutex_unlock(&comm->lock);
    return revoked ? ncclSuccess : rig_comm_ready(comm, call);
}

static ncclResult_t split(ncclComm_t comm, int color, int key, ncclComm_t *out,
                          const ncclConfig_t *config)
{
    struct rig_job job = { .run = run_split, .color = color, .key = key };
    ncclResult_t result = check_parent(comm, "ncclCommSplit");
    ncclComm_t child = NULL;

    if (result != ncclSuccess)
        return result;
    if (!out || (color < 0 && color != NCCL_SPLIT_NOCOLOR))
        return rig_error(ncclInvalidArgument, "ncclCommSplit: color %d", color);
    if (lcrig_fault("ncclCommSplit"))
        return rig_error(ncclSystemError, "ncclCommSplit: injected fault");
    if (color != NCCL_SPLIT_NOCOLOR) {
        child = rig_comm_new(0, 0, comm->device, config, comm);
        if (!child)
            return ncclInvalidArgument;
    }
    return submit(child, comm, out, &job);
}

ncclResult_t pncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                            ncclConfig_t *config)
{
    return rig_group_note(split(comm, color, key, newcomm, config));
}
RIG_EXPORT(CommSplit)

/* ---- shrink ---- */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        hash = (hash ^ (value >> 8 * i & 0xff)) * 0x100000001b3ull;
    return hash;
}

/* The child's id follows from what the remaining ranks have in common, so the parent need not work: its id, who is
 * excluded, and how often the same ones were. */
static struct rig_id shrink_id(ncclComm_t comm, uint64_t excluded)
{
    struct rig_id id = comm->clique->id;
    uint64_t key = mix(0xcbf29ce484222325ull, excluded), times = 0;

    for (unsigned i = 0; i < comm->shrinks; i++)
        times += comm->shrink_keys[i] == key;
    comm->shrink_keys[comm->shrinks++] = key;
    id.key[0] = mix(mix(id.key[0], key), times);
    id.key[1] = mix(mix(id.key[1], times), key);
    return id;
}

static ncclResult_t stop_parent(ncclComm_t comm)
{
    atomic_store(&comm->stop, true);
    rig_clique_revoke(comm->clique);
    rig_bell_ring(comm->clique, comm->rank);
    rig_comm_wait_running(comm);
    rig_comm_set_state(comm, RIG_REVOKED);
    return ncclSuccess;
}

static ncclResult_t shrink(ncclComm_t comm, const int *exclude, int count, ncclComm_t *out,
                           const ncclConfig_t *config, int flags)
{
    struct rig_job job = { .run = run_init };
    ncclResult_t result;
    uint64_t excluded = 0;
    ncclComm_t child;
    int rank = 0;

    result = flags & NCCL_SHRINK_ABORT ? rig_comm_check(comm, "ncclCommShrink")
                                       : check_parent(comm, "ncclCommShrink");
    if (result != ncclSuccess)
        return result;
    if (!out || !exclude || count < 1 || count >= comm->n ||
        comm->shrinks == sizeof(comm->shrink_keys) / sizeof(*comm->shrink_keys))
        return rig_error(ncclInvalidArgument, "ncclCommShrink: %d ranks excluded", count);
    for (int i = 0; i < count; i++) {
        if (exclude[i] < 0 || exclude[i] >= comm->n || exclude[i] == comm->rank ||
            excluded >> exclude[i] & 1)
            return rig_error(ncclInvalidArgument, "ncclCommShrink: excluded rank %d", exclude[i]);
        excluded |= 1ull << exclude[i];
    }
    for (int other = 0; other < comm->rank; other++)
        rank += !(excluded >> other & 1);
    child = rig_comm_new(rank, comm->n - count, comm->device, config, comm);
    if (!child)
        return ncclInvalidArgument;
    if (flags & NCCL_SHRINK_ABORT)
        stop_parent(comm);
    job.id = shrink_id(comm, excluded);
    return submit(child, comm, out, &job);
}

ncclResult_t pncclCommShrink(ncclComm_t comm, int *exclude, int count, ncclComm_t *newcomm,
                             ncclConfig_t *config, int flags)
{
    return rig_group_note(shrink(comm, exclude, count, newcomm, config, flags));
}
RIG_EXPORT(CommShrink)
