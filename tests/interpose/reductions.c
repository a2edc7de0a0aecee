/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions through the preloaded library on the rig. argv: ranks, mode (processes or threads).
 * The settings come from the environment; what must hold follows from them. */
#include "tests/interpose/said.h"
#include "tests/interpose/values.h"
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define COUNT 300007
#define CALLS 24

static struct meeting *meeting;

/* Bits of rank 0's result, for the others to compare with. */
static struct shared {
    _Atomic uint64_t hash[CALLS];
    _Atomic int cast_seen;
} * shared;

/* Relative L2 error of a sum or mean against fp64. */
static double error_of(const float *got, size_t count, size_t first, int n, int call, double scale)
{
    double diff = 0, norm = 0;

    for (size_t i = 0; i < count; i++) {
        double want = 0;

        for (int r = 0; r < n; r++)
            want += value(r, call, first + i);
        want *= scale;
        diff += (got[i] - want) * (got[i] - want);
        norm += want * want;
    }
    return sqrt(diff / norm);
}

static void check_error(double error, int n, bool wire, bool accurate)
{
    double bound = accurate ? 2.5e-3 : 2.4e-3 * sqrt(n);

    CHECK(error <= (wire ? bound : 1e-6));
    if (error > 1e-4)
        atomic_store(&shared->cast_seen, 1);
}

static void fill(float *buffer, size_t count, int rank, int call)
{
    for (size_t i = 0; i < count; i++)
        buffer[i] = value(rank, call, i);
}

/* Calls until the ranks have agreed, on rings if they were to: however long their threads take, all make as many. */
static void until_agreed(const float *send, float *recv, ncclComm_t comm, cudaStream_t stream,
                         int n)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    const char *peer = getenv("LOONGCOMM_PEER");
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        NCCL(ncclAllReduce(send, recv, COUNT, ncclFloat32, ncclSum, comm, stream));
        CUDA(cudaStreamSynchronize(stream));
        meeting_wait(meeting, n);
        agreed = said_count("committed at") == n;
        meeting_wait(meeting, n);
    }
    CHECK(said_count("rings of") == (peer && strcmp(peer, "force") == 0 ? n : 0));
    if (getenv("LOONGCOMM_STAGING_MAX"))
        CHECK(said_count("MB of LOONGCOMM_STAGING_MAX") > 0);
}

/* With REDUCTIONS_NODES ranks take turns to be on different machines. */
static ncclComm_t on_its_node(int rank, int n)
{
    const char *nodes = getenv("REDUCTIONS_NODES");
    char name[32];

    if (nodes) {
        (void)snprintf(name, sizeof(name), "node%d", rank % atoi(nodes));
        CHECK(setenv("LOONGCOMM_HOSTID", name, 1) == 0);
    }
    return comm_up(meeting, rank, n);
}

static int rank_main(int rank, int n, void *arg)
{
    const char *peer = getenv("LOONGCOMM_PEER");
    const char *wire = getenv("LOONGCOMM_ALLREDUCE_WIRE");
    bool is_wire = wire && strncmp(wire, "bf16", 4) == 0;
    bool accurate = wire && strcmp(wire, "bf16-accurate") == 0;
    ncclComm_t comm = on_its_node(rank, n);
    cudaStream_t stream = stream_up();
    ncclRedOp_t premul;
    float *send, *recv, factor = 0.25f;

    CUDA(cudaMalloc((void **)&send, sizeof(float) * COUNT * (size_t)n));
    CUDA(cudaMalloc((void **)&recv, sizeof(float) * COUNT * (size_t)n));
    NCCL(ncclRedOpCreatePreMulSum(&premul, &factor, ncclFloat32, ncclScalarHostImmediate, comm));
    if (is_wire)
        until_bf16(comm, stream, send, COUNT);
    if (is_wire || (peer && strcmp(peer, "off") != 0))
        until_agreed(send, recv, comm, stream, n);
    for (int call = 0; call < CALLS; call++) {
        ncclRedOp_t ops[] = { ncclSum, ncclAvg, premul };
        double scales[] = { 1, 1.0 / n, 0.25 };
        bool scatter = call % 4 == 3, in_place = call % 2;
        float *out = in_place ? (scatter ? send + (size_t)rank * COUNT : send) : recv;
        int op = call % 3;

        fill(send, scatter ? COUNT * n : COUNT, rank, call);
        if (scatter)
            NCCL(ncclReduceScatter(send, out, COUNT, ncclFloat32, ops[op], comm, stream));
        else
            NCCL(ncclAllReduce(send, out, COUNT, ncclFloat32, ops[op], comm, stream));
        CUDA(cudaStreamSynchronize(stream));
        check_error(error_of(out, COUNT, scatter ? (size_t)rank * COUNT : 0, n, call, scales[op]),
                    n, is_wire, accurate);
        if (!scatter && rank == 0)
            atomic_store(&shared->hash[call], hash_of(out, COUNT * sizeof(float)));
        meeting_wait(meeting, n);
        if (!scatter)
            CHECK(atomic_load(&shared->hash[call]) == hash_of(out, COUNT * sizeof(float)));
        meeting_wait(meeting, n);
    }
    NCCL(ncclRedOpDestroy(premul, comm));
    CHECK(atomic_load(&shared->cast_seen) == is_wire);
    CUDA(cudaFree(send));
    CUDA(cudaFree(recv));
    CUDA(cudaStreamDestroy(stream));
    NCCL(ncclCommDestroy(comm));
    return 0;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 2;
    bool threads = argc > 2 && strcmp(argv[2], "threads") == 0;

    said_begin();
    meeting = meeting_new();
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    return threads ? lc_ranks_run_threads(n, rank_main, NULL, 200)
                   : lc_ranks_run(n, rank_main, NULL, 200);
}
