/* SPDX-License-Identifier: Apache-2.0
 *
 * Groups through the preloaded library on the rig: what may travel together, and what must not. argv: ranks. */
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#define TENSORS 3
#define COUNT   3001
#define WARM    40 /* calls, so that the communicator is committed before the checks */

static struct meeting *meeting;

struct job {
    int rank, n;
    bool is_wire, accurate;
    ncclComm_t comm;
    cudaStream_t stream;
    float *send[TENSORS], *recv[TENSORS];
};

static float value(int rank, int tensor, size_t i)
{
    uint64_t x = (uint64_t)(rank + 1) * 0x9e3779b97f4a7c15u +
                 (uint64_t)(tensor + 1) * 0xbf58476d1ce4e5b9u + i;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (float)((double)(x >> 40) / (1 << 24) - 0.5);
}

static double error_of(const struct job *job, int tensor, size_t first, double scale)
{
    double diff = 0, norm = 0;

    for (size_t i = 0; i < COUNT; i++) {
        double want = 0, got = job->recv[tensor][i];

        for (int r = 0; r < job->n; r++)
            want += value(r, tensor, first + i);
        want *= scale;
        diff += (got - want) * (got - want);
        norm += want * want;
    }
    return sqrt(diff / norm);
}

static void fill(const struct job *job)
{
    for (int t = 0; t < TENSORS; t++) {
        for (size_t i = 0; i < COUNT * (size_t)job->n; i++)
            job->send[t][i] = value(job->rank, t, i);
        memset(job->recv[t], 0, COUNT * sizeof(float));
    }
}

static void check(const struct job *job, size_t first, const double *scales, bool may_cast)
{
    double bound = !may_cast || !job->is_wire ? 1e-6
                   : job->accurate            ? 2.5e-3
                                              : 2.4e-3 * sqrt(job->n);

    CUDA(cudaStreamSynchronize(job->stream));
    for (int t = 0; t < TENSORS; t++)
        CHECK(error_of(job, t, first, scales[t]) <= bound);
}

static void sums(const struct job *job)
{
    static const double scales[TENSORS] = { 1, 1, 1 };

    fill(job);
    NCCL(ncclGroupStart());
    for (int t = 0; t < TENSORS; t++)
        NCCL(ncclAllReduce(job->send[t], job->recv[t], COUNT, ncclFloat32, ncclSum, job->comm,
                           job->stream));
    NCCL(ncclGroupEnd());
    check(job, 0, scales, true);
}

static void reduce_scatters_in_a_group_stay_what_they_are(const struct job *job)
{
    static const double scales[TENSORS] = { 1, 1, 1 };

    fill(job);
    NCCL(ncclGroupStart());
    for (int t = 0; t < TENSORS; t++)
        NCCL(ncclReduceScatter(job->send[t], job->recv[t], COUNT, ncclFloat32, ncclSum, job->comm,
                               job->stream));
    NCCL(ncclGroupEnd());
    check(job, (size_t)job->rank * COUNT, scales, true);
}

/* As PyTorch does it: the handle lives for one call, and the next call's factor gets the same handle. */
static void every_call_keeps_the_factor_it_was_made_with(const struct job *job)
{
    static const double scales[TENSORS] = { 0.5, 0.125, 3 };

    fill(job);
    NCCL(ncclGroupStart());
    for (int t = 0; t < TENSORS; t++) {
        float factor = (float)scales[t];
        ncclRedOp_t op;

        NCCL(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate,
                                      job->comm));
        NCCL(ncclAllReduce(job->send[t], job->recv[t], COUNT, ncclFloat32, op, job->comm,
                           job->stream));
        NCCL(ncclRedOpDestroy(op, job->comm));
    }
    NCCL(ncclGroupEnd());
    check(job, 0, scales, true);
}

/* Which factors are alike is a rank's own matter: what travels together must not depend on it. */
static void factors_of_ranks_need_not_be_alike(const struct job *job)
{
    double bound = !job->is_wire ? 1e-6 : 4e-3 * sqrt(job->n);
    ncclRedOp_t ops[TENSORS];

    fill(job);
    NCCL(ncclGroupStart());
    for (int t = 0; t < TENSORS; t++) {
        float factor = job->rank ? (float)(t + 1) : 2;

        NCCL(ncclRedOpCreatePreMulSum(&ops[t], &factor, ncclFloat32, ncclScalarHostImmediate,
                                      job->comm));
        NCCL(ncclAllReduce(job->send[t], job->recv[t], COUNT, ncclFloat32, ops[t], job->comm,
                           job->stream));
    }
    NCCL(ncclGroupEnd());
    CUDA(cudaStreamSynchronize(job->stream));
    for (int t = 0; t < TENSORS; t++) {
        double diff = 0, norm = 0;

        for (size_t i = 0; i < COUNT; i++) {
            double want = 0;

            for (int r = 0; r < job->n; r++)
                want += value(r, t, i) * (float)(r ? t + 1 : 2);
            diff += (job->recv[t][i] - want) * (job->recv[t][i] - want);
            norm += want * want;
        }
        CHECK(sqrt(diff / norm) <= bound);
        NCCL(ncclRedOpDestroy(ops[t], job->comm));
    }
}

/* More handles at a time than anybody needs: which are known must not depend on the order they were made in, since that
 * may differ between ranks. */
static void any_number_of_factors_is_known(const struct job *job)
{
    enum {
        MANY = 40
    };
    double scales[TENSORS];
    ncclRedOp_t ops[MANY];

    for (int i = 0; i < MANY; i++) {
        int at = job->rank ? MANY - 1 - i : i;
        float factor = (float)(at + 1);

        NCCL(ncclRedOpCreatePreMulSum(&ops[at], &factor, ncclFloat32, ncclScalarHostImmediate,
                                      job->comm));
    }
    for (int at = 0; at < MANY; at += MANY - 1) {
        fill(job);
        for (int t = 0; t < TENSORS; t++) {
            scales[t] = at + 1;
            NCCL(ncclAllReduce(job->send[t], job->recv[t], COUNT, ncclFloat32, ops[at], job->comm,
                               job->stream));
        }
        check(job, 0, scales, true);
    }
    for (int i = 0; i < MANY; i++)
        NCCL(ncclRedOpDestroy(ops[i], job->comm));
}

/* A call that NCCL refuses never took place, at whichever ranks it was made. */
static void a_refused_call_does_not_count(const struct job *job)
{
    for (int i = 0; i < job->rank; i++)
        CHECK(ncclAllReduce(job->send[0], job->recv[0], COUNT, ncclFloat32, (ncclRedOp_t)-1,
                            job->comm, job->stream) != ncclSuccess);
}

static int rank_main(int rank, int n, void *arg)
{
    const char *wire = getenv("LOONGCOMM_ALLREDUCE_WIRE");
    struct job job = { .rank = rank,
                       .n = n,
                       .is_wire = wire && strncmp(wire, "bf16", 4) == 0,
                       .accurate = wire && strcmp(wire, "bf16-accurate") == 0 };

    (void)arg;
    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    for (int t = 0; t < TENSORS; t++) {
        CUDA(cudaMalloc((void **)&job.send[t], COUNT * (size_t)n * sizeof(float)));
        CUDA(cudaMalloc((void **)&job.recv[t], COUNT * sizeof(float)));
    }
    a_refused_call_does_not_count(&job);
    if (job.is_wire)
        until_bf16(job.comm, job.stream, job.send[0], COUNT);
    for (int i = 0; i < WARM; i++) {
        sums(&job);
        meeting_wait(meeting, n);
        usleep(2000);
    }
    reduce_scatters_in_a_group_stay_what_they_are(&job);
    every_call_keeps_the_factor_it_was_made_with(&job);
    factors_of_ranks_need_not_be_alike(&job);
    any_number_of_factors_is_known(&job);
    sums(&job);
    for (int t = 0; t < TENSORS; t++) {
        CUDA(cudaFree(job.send[t]));
        CUDA(cudaFree(job.recv[t]));
    }
    CUDA(cudaStreamDestroy(job.stream));
    NCCL(ncclCommDestroy(job.comm));
    return 0;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 2;

    meeting = meeting_new();
    return lc_ranks_run(n, rank_main, NULL, 200);
}
