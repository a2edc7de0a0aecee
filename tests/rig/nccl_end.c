/* SPDX-License-Identifier: Apache-2.0
 *
 * Ways of ending a communicator. */
#include "tests/rig/nccl_internal.h"

/* Its own set-up, and splits of it in other threads, which an abort ends. */
static void wait_jobs(ncclComm_t comm)
{
    pthread_mutex_lock(&comm->lock);
    while (comm->state == RIG_INIT || comm->jobs > 0)
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

static ncclResult_t submit(ncclComm_t comm, ncclResult_t (*run)(struct rig_job *), bool nonblocking,
                           bool ends)
{
    struct rig_job *job = rig_alloc(sizeof(*job));

    job->run = run;
    job->comm = comm;
    job->nonblocking = nonblocking;
    job->ends = ends;
    rig_comm_ref(comm);
    return rig_job_submit(job);
}

/* Gives up everything but the memory, which goes with the last reference. */
static void take_apart(ncclComm_t comm)
{
    if (comm->clique)
        rig_clique_leave(comm->clique, comm->rank);
    if (comm->order)
        cudaEventDestroy(comm->order);
    if (comm->join)
        cudaEventDestroy(comm->join);
    if (comm->captured)
        cudaEventDestroy(comm->captured);
    rig_comm_unref(comm);
}

static ncclResult_t run_finalize(struct rig_job *job)
{
    rig_comm_wait_plans(job->comm, false, "ncclCommFinalize");
    rig_comm_set_state(job->comm, RIG_FINALIZED);
    return ncclSuccess;
}

ncclResult_t pncclCommFinalize(ncclComm_t comm)
{
    ncclResult_t result = rig_comm_ready(comm, "ncclCommFinalize");

    if (result == ncclSuccess)
        result = submit(comm, run_finalize, !comm->blocking, false);
    return rig_group_note(result);
}
RIG_EXPORT(CommFinalize)

static ncclResult_t run_destroy(struct rig_job *job)
{
    wait_jobs(job->comm);
    rig_comm_wait_plans(job->comm, true, "ncclCommDestroy");
    take_apart(job->comm);
    return ncclSuccess;
}

ncclResult_t pncclCommDestroy(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    rig_comm_check(comm, "ncclCommDestroy");
    if (!rig_comm_unlist(comm))
        lcrig_fail("ncclCommDestroy of %p by two threads", (void *)comm);
    return rig_group_note(submit(comm, run_destroy, false, true));
}
RIG_EXPORT(CommDestroy)

static ncclResult_t run_abort(struct rig_job *job)
{
    wait_jobs(job->comm);
    rig_comm_wait_running(job->comm);
    take_apart(job->comm);
    return ncclSuccess;
}

/* Stops at the call, also inside a group; only taking the pieces apart is left to the group's end. */
ncclResult_t pncclCommAbort(ncclComm_t comm)
{
    struct rig_clique *clique;

    if (!comm)
        return ncclSuccess;
    rig_comm_check(comm, "ncclCommAbort");
    if (!rig_comm_unlist(comm))
        lcrig_fail("ncclCommAbort of %p by two threads", (void *)comm);
    atomic_store(&comm->abort, true);
    atomic_store(&comm->stop, true);
    pthread_mutex_lock(&comm->lock);
    clique = comm->clique;
    pthread_mutex_unlock(&comm->lock);
    if (clique) {
        rig_clique_break(clique, comm->rank);
        rig_bell_ring(clique, comm->rank);
    }
    return rig_group_note(submit(comm, run_abort, false, true));
}
RIG_EXPORT(CommAbort)

#if NCCL_VERSION_CODE >= 22807
static ncclResult_t run_revoke(struct rig_job *job)
{
    ncclComm_t comm = job->comm;

    rig_comm_wait_running(comm);
    atomic_store(&comm->async_error, ncclSuccess);
    rig_comm_set_state(comm, RIG_REVOKED);
    return ncclSuccess;
}

ncclResult_t pncclCommRevoke(ncclComm_t comm, int flags)
{
    ncclResult_t result = rig_comm_check(comm, "ncclCommRevoke");

    if (result != ncclSuccess)
        return rig_group_note(result);
    if (flags != 0 || !comm->clique)
        return rig_group_note(rig_error(ncclInvalidArgument, "ncclCommRevoke: flags %d", flags));
    atomic_store(&comm->stop, true);
    rig_clique_revoke(comm->clique);
    rig_bell_ring(comm->clique, comm->rank);
    return rig_group_note(submit(comm, run_revoke, !comm->blocking, false));
}
RIG_EXPORT(CommRevoke)
#endif
