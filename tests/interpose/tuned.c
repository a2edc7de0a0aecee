/* SPDX-License-Identifier: Apache-2.0
 *
 * tuned TUNER MEASURING: the tuner plugin in a job on the rig whose ranks may differ. Ranks that choose differently end the program
 * there; each case says whether the profile is to be used in the end. The interposer is preloaded. */
#include "tests/interpose/profile_file.h"
#include "tests/rig/test_nccl.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

#define RANKS 3
#define CALLS 64
#define COUNT 1000

static const char *measure; /* the plugin for measuring, left over from that */

static const struct tuned {
    const char *name;
    int rank; /* the one that is not like the others */
    const char *variable, *value;
    bool used;
    bool all; /* all ranks are like that */
} cases[] = {
    {"alike",            0, "LOONGCOMM_LOG_LEVEL", "warn",    true,  false},
    { "no_plugin",       1, "NCCL_TUNER_PLUGIN",   "",        false, false},
    { "other_profile",   2, "LOONGCOMM_PROFILE",   "other",   false, false},
    { "no_profile",      1, "LOONGCOMM_PROFILE",   "",        false, false},
    { "off",             0, "LOONGCOMM_ENABLE",    "no",      false, false},
    { "off_elsewhere",   2, "LOONGCOMM_ENABLE",    "no",      false, false},
    { "another_machine", 0, "LOONGCOMM_PROFILE",   "alien",   false, true },
    { "measuring",       1, "NCCL_TUNER_PLUGIN",   "measure", false, false},
};

static struct meeting *meeting;
static char paths[3][64];        /* of profiles: the usual one, "other", "alien" */
static _Atomic unsigned *chosen; /* by each rank: calls that went as the profile says */

static void set(const struct tuned *which, int rank)
{
    const char *value = which->value;

    CHECK(setenv("LOONGCOMM_PROFILE", paths[0], 1) == 0);
    if (!which->all && rank != which->rank)
        return;
    if (strcmp(value, "other") == 0)
        value = paths[1];
    if (strcmp(value, "measure") == 0)
        value = measure;
    if (strcmp(value, "alien") == 0)
        value = paths[2];
    CHECK(setenv(which->variable, value, 1) == 0);
}

static void call(ncclComm_t comm, cudaStream_t stream, float *data)
{
    NCCL(ncclAllReduce(data, data, COUNT, ncclFloat32, ncclSum, comm, stream));
}

static int rank_main(int rank, int n, void *arg)
{
    unsigned (*count)(ncclComm_t) = dlsym(RTLD_DEFAULT, "lcrig_tuned_calls");
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    const struct tuned *which = arg;
    ncclComm_t comm, child;
    cudaStream_t stream;
    float *data;

    set(which, rank);
    comm = comm_up(meeting, rank, n);
    stream = stream_up();
    data = device_alloc(2 * COUNT * sizeof(float));
    memset(data, 0, 2 * COUNT * sizeof(float));
    CHECK(count);
    /* The ranks find each other sooner or later; what they choose changes at the same call. */
    for (int i = 0; i < CALLS || (which->used && count(comm) == 0); i++) {
        CHECK(i < CALLS || !lc_deadline_passed(until));
        call(comm, stream, data);
        NCCL(ncclGroupStart());
        call(comm, stream, data);
        call(comm, stream, data + COUNT);
        NCCL(ncclGroupEnd());
        CUDA(cudaStreamSynchronize(stream));
        usleep(1000);
    }
    chosen[rank] = count(comm);
    NCCL(ncclCommSplit(comm, 0, rank, &child, NULL));
    for (int i = 0; i < CALLS; i++)
        call(child, stream, data);
    CUDA(cudaStreamSynchronize(stream));
    NCCL(ncclCommDestroy(child));
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaFree(data));
    return 0;
}

static bool run(const struct tuned *which)
{
    meeting_reset(meeting);
    for (int r = 0; r < RANKS; r++)
        chosen[r] = 0;
    if (lc_ranks_run(RANKS, rank_main, (void *)(uintptr_t)which, 200)) {
        fprintf(stderr, "%s: a rank failed\n", which->name);
        return false;
    }
    printf("%s: %u, %u, %u calls as the profile says\n", which->name, chosen[0], chosen[1],
           chosen[2]);
    for (int r = 0; r < RANKS; r++) {
        if ((chosen[r] > 0) != which->used || (which->used && chosen[r] != chosen[0]))
            return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    int failed = 0;

    CHECK(argc == 3 && setenv("NCCL_TUNER_PLUGIN", argv[1], 1) == 0);
    measure = argv[2];
    meeting = meeting_new();
    chosen = mmap(NULL, sizeof(*chosen) * RANKS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                  -1, 0);
    CHECK(chosen != MAP_FAILED);
    profile_write(paths[0], "none", "nccl all-reduce 3 1 0 0 ring simple 8\n");
    profile_write(paths[1], "none", "nccl all-reduce 3 1 0 0 ring simple 4\n");
    profile_write(paths[2], "Some Other GPU", "nccl all-reduce 3 1 0 0 ring simple 8\n");
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        failed += !run(&cases[i]);
    for (int i = 0; i < 3; i++)
        unlink(paths[i]);
    return failed != 0;
}
