/* SPDX-License-Identifier: Apache-2.0
 *
 * Jobs: the parts of the API that wait for other ranks on the host. Several in one group run at once, a thread each,
 * except that those of one parent keep their order. */
#include "tests/rig/nccl_internal.h"

#include <stdlib.h>

static void count_jobs(ncclComm_t comm, const struct rig_job *job, int change)
{
    if (!comm || job->ends)
        return;
    pthread_mutex_lock(&comm->lock);
    comm->jobs += (unsigned)change;
    if (job->nonblocking)
        comm->background += (unsigned)change;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

/* The communicator was not made. With a blocking call nobody else will free it, unless an abort has taken it. */
static void creation_failed(struct rig_job *job)
{
    ncclComm_t comm = job->comm;

    if (!comm)
        return;
    rig_comm_set_error(comm, job->result);
    if (job->nonblocking) {
        rig_comm_set_state(comm, RIG_FAILED);
        return;
    }
    if (rig_comm_unlist(comm)) {
        __atomic_store_n(job->out, NULL, __ATOMIC_RELEASE);
        if (comm->order)
            cudaEventDestroy(comm->order);
        if (comm->join)
            cudaEventDestroy(comm->join);
        if (comm->captured)
            cudaEventDestroy(comm->captured);
        rig_comm_unref(comm);
    }
    rig_comm_set_state(comm, RIG_FAILED);
}

/* Frees the job. */
static ncclResult_t job_finish(struct rig_job *job)
{
    ncclResult_t result = job->result;

    if (job->creates && result != ncclSuccess)
        creation_failed(job);
    if (job->is_counted) {
        count_jobs(job->comm, job, -1);
        count_jobs(job->parent, job, -1);
    }
    if (job->comm)
        rig_comm_unref(job->comm);
    if (job->parent)
        rig_comm_unref(job->parent);
    free(job);
    return result;
}

void rig_jobs_cancel(struct rig_job *jobs)
{
    while (jobs) {
        struct rig_job *job = jobs;

        jobs = job->next;
        job->nonblocking = false;
        job->result = job->ends ? job->run(job) : ncclInvalidUsage; /* an end is an end */
        job_finish(job);
    }
}

/* Runs a chain in order; the first failure is the chain's result. */
static ncclResult_t chain_run(struct rig_job *job)
{
    ncclResult_t first = ncclSuccess;

    while (job) {
        struct rig_job *next = job->next;
        ncclComm_t on = job->comm ? job->comm : job->parent;
        ncclResult_t result;
        int device = -1;

        cudaGetDevice(&device);
        if (device != on->device)
            cudaSetDevice(on->device);
        job->result = job->run(job);
        if (device != on->device)
            cudaSetDevice(device);
        result = job_finish(job);
        if (first == ncclSuccess)
            first = result;
        job = next;
    }
    return first;
}

static void *chain_thread(void *arg)
{
    return (void *)(uintptr_t)chain_run(arg);
}

/* Takes the first job and all later ones with the same parent off the list. */
static struct rig_job *chain_take(struct rig_job **jobs)
{
    struct rig_job *chain = *jobs, **end = &chain->next, **link;
    ncclComm_t parent = chain->parent;

    *jobs = chain->next;
    chain->next = NULL;
    for (link = jobs; parent && *link;) {
        struct rig_job *job = *link;

        if (job->parent != parent) {
            link = &job->next;
            continue;
        }
        *link = job->next;
        job->next = NULL;
        *end = job;
        end = &job->next;
    }
    return chain;
}

static pthread_t start(void *(*run)(void *), void *arg)
{
    pthread_t thread;

    if (pthread_create(&thread, NULL, run, arg) != 0)
        lcrig_fail("cannot start a thread");
    return thread;
}

ncclResult_t rig_jobs_run(struct rig_job *jobs)
{
    bool nonblocking = jobs->nonblocking;
    ncclResult_t result = ncclSuccess;
    pthread_t *threads;
    size_t count = 0, room = 0;

    for (struct rig_job *job = jobs; job; job = job->next) {
        if (job->nonblocking != nonblocking) {
            rig_jobs_cancel(jobs);
            return rig_error(ncclInvalidArgument,
                             "a group has blocking and non-blocking communicators");
        }
    }
    for (struct rig_job *job = jobs; job; job = job->next) {
        job->is_counted = true;
        count_jobs(job->comm, job, 1);
        count_jobs(job->parent, job, 1);
    }
    if (nonblocking) {
        while (jobs)
            pthread_detach(start(chain_thread, chain_take(&jobs)));
        return ncclInProgress;
    }
    if (!jobs->next)
        return chain_run(jobs);
    for (threads = NULL; jobs; count++) {
        threads = rig_grow(threads, count, &room, sizeof(*threads));
        threads[count] = start(chain_thread, chain_take(&jobs));
    }
    for (size_t i = 0; i < count; i++) {
        void *answer;

        pthread_join(threads[i], &answer);
        if (result == ncclSuccess)
            result = (ncclResult_t)(uintptr_t)answer;
    }
    free(threads);
    return result;
}

ncclResult_t rig_job_submit(struct rig_job *job)
{
    if (!rig_group_is_open())
        return rig_jobs_run(job);
    rig_group_add_job(job);
    return ncclSuccess;
}
