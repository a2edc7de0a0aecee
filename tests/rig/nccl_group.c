/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups: a thread's calls between the outermost start and end. A call outside is a group by itself. */
#include "tests/rig/nccl_internal.h"

#include <stdlib.h>

/* One per thread, as with NCCL. */
static _Thread_local struct {
    int depth;
    ncclResult_t error; /* first failure in the group */
    struct rig_op *ops;
    size_t count, room;
    struct rig_job *jobs, **last_job;
} group;

ncclResult_t rig_group_start(void)
{
    group.depth++;
    return ncclSuccess;
}

bool rig_group_is_open(void)
{
    return group.depth > 0;
}

ncclResult_t rig_group_note(ncclResult_t result)
{
    if (group.depth > 0 && group.error == ncclSuccess && result != ncclInProgress)
        group.error = result;
    return result;
}

ncclResult_t rig_group_add_op(const struct rig_op *op)
{
    group.ops = rig_grow(group.ops, group.count, &group.room, sizeof(*group.ops));
    group.ops[group.count++] = *op;
    return ncclSuccess;
}

void rig_group_add_job(struct rig_job *job)
{
    if (!group.jobs)
        group.last_job = &group.jobs;
    *group.last_job = job;
    group.last_job = &job->next;
}

/* Runs or drops what was gathered. */
static ncclResult_t group_close(bool drop)
{
    struct rig_op *ops = group.ops;
    struct rig_job *jobs = group.jobs;
    size_t count = group.count;
    ncclResult_t result = group.error;

    group.ops = NULL;
    group.jobs = NULL;
    group.count = group.room = 0;
    group.error = ncclSuccess;
    if (drop || result != ncclSuccess) {
        rig_jobs_cancel(jobs);
    } else {
        if (jobs)
            result = rig_jobs_run(jobs);
        if (count && result == ncclSuccess)
            result = rig_launch(ops, count);
    }
    free(ops);
    return result;
}

ncclResult_t rig_group_end(void)
{
    if (group.depth == 0)
        return rig_error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0)
        return ncclSuccess;
    if (lcrig_fault("ncclGroupEnd") && group.error == ncclSuccess)
        group.error = rig_error(ncclSystemError, "ncclGroupEnd: injected fault");
    return group_close(false);
}

ncclResult_t pncclGroupStart(void)
{
    return rig_group_start();
}
RIG_EXPORT(GroupStart)

ncclResult_t pncclGroupEnd(void)
{
    return rig_group_end();
}
RIG_EXPORT(GroupEnd)

ncclResult_t pncclGroupSimulateEnd(ncclSimInfo_t *info)
{
    static const ncclSimInfo_t initial = NCCL_SIM_INFO_INITIALIZER;
    size_t bytes = 0;

    if (group.depth == 0)
        return rig_error(ncclInvalidUsage, "ncclGroupSimulateEnd without ncclGroupStart");
    if (info && info->magic != initial.magic)
        return rig_group_note(rig_error(ncclInvalidArgument, "ncclSimInfo_t is not initialised"));
    if (--group.depth > 0)
        return ncclSuccess;
    for (size_t i = 0; i < group.count; i++)
        bytes += group.ops[i].count * rig_type_size(group.ops[i].type);
    if (info)
        info->estimatedTime = 10.0f + (float)bytes * 1e-5f;
    return group_close(true);
}
RIG_EXPORT(GroupSimulateEnd)
