/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions through rings beside NCCL's own, on the rig: the same calls on a communicator that stays with NCCL, since
 * it is not blocking. LOONGCOMM_PEER=force, LOONGCOMM_ALLREDUCE_WIRE=data. argv: ranks, and "profile" if one is to say
 * where rings win instead, or "small" for what goes in one step, also with LOONGCOMM_ALLREDUCE_WIRE=bf16. */
#include "tests/interpose/profile_file.h"
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <stdbool.h>

#define MOST 70001 /* elements of a rank's part: more than one step takes, and many tiles */

static struct meeting *meeting;

/* Rank 0's result, for the others to compare with. */
static struct shared {
    unsigned char bytes[MOST * 4];
} * shared;

struct job {
    int rank, n;
    ncclComm_t ours, plain;
    cudaStream_t stream;
    char *send, *recv, *want;
};

struct call {
    bool scatter, in_place;
    ncclDataType_t type;
    ncclRedOp_t op, own; /* own: of the other communicator, where a call's is made for one */
    bool odd;            /* rank 0 has the call alone in a group */
    size_t count, skip;  /* elements in front of the buffers */
};

static size_t size_of(ncclDataType_t type)
{
    return type == ncclFloat32 ? 4 : 2;
}

/* Small whole numbers: bits of bf16 and fp16 that are far from overflow, in every type. */
static void fill(const struct job *job, ncclDataType_t type, unsigned salt)
{
    for (size_t i = 0; i < (MOST + 8) * (size_t)job->n; i++) {
        uint64_t x = (i * 131 + (uint64_t)job->rank * 7919 + salt) * 0x9e3779b97f4a7c15u;

        if (type == ncclFloat32)
            ((float *)job->send)[i] = (float)((double)(x >> 40) / (1 << 24) - 0.5);
        else /* 1.x or 2.x, of either sign */
            ((uint16_t *)job->send)[i] = (uint16_t)((type == ncclBfloat16 ? 0x3f80 : 0x3c00) |
                                                    (x >> 48 & 0x807f));
    }
}

static double value_of(ncclDataType_t type, const void *data, size_t i)
{
    uint32_t bits = ((const uint16_t *)data)[i];
    float value;

    if (type == ncclFloat32)
        return ((const float *)data)[i];
    if (type == ncclFloat16)
        bits = (bits & 0x8000) << 16 |
               ((bits & 0x7fff) ? ((bits & 0x7fff) << 13) + (112u << 23) : 0);
    else
        bits <<= 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void issue(const struct job *job, ncclComm_t comm, const struct call *call, void *out)
{
    char *in = job->send + call->skip * size_of(call->type);
    bool grouped = call->odd && comm == job->ours && job->rank == 0;
    ncclRedOp_t op = comm == job->plain && call->op >= ncclNumOps ? call->own : call->op;

    if (grouped)
        NCCL(ncclGroupStart());
    if (call->scatter)
        NCCL(ncclReduceScatter(in, out, call->count, call->type, op, comm, job->stream));
    else
        NCCL(ncclAllReduce(in, out, call->count, call->type, op, comm, job->stream));
    if (grouped)
        NCCL(ncclGroupEnd());
}

/* Two ranks: bit for bit. More: NCCL rounds 16-bit sums at every hop and adds in another order. */
static void compare(const struct job *job, const struct call *call, const char *got)
{
    size_t size = size_of(call->type);
    double slack = (call->type == ncclFloat32   ? 0x1p-22
                    : call->type == ncclFloat16 ? 0x1p-9
                                                : 0x1p-6) *
                   job->n;

    if (job->n == 2)
        CHECK(memcmp(got, job->want, call->count * size) == 0);
    for (size_t i = 0; i < call->count; i++)
        CHECK(fabs(value_of(call->type, got, i) - value_of(call->type, job->want, i)) <=
              slack * job->n);
    if (call->scatter)
        return;
    if (job->rank == 0)
        memcpy(shared->bytes, got, call->count * size);
    meeting_wait(meeting, job->n);
    CHECK(memcmp(shared->bytes, got, call->count * size) == 0);
    meeting_wait(meeting, job->n);
}

static void run(const struct job *job, const struct call *call, unsigned salt)
{
    size_t size = size_of(call->type);
    char *out = job->recv + call->skip * size;

    fill(job, call->type, salt);
    issue(job, job->plain, call, job->want);
    CHECK(comm_settle(job->plain) == ncclSuccess);
    CUDA(cudaStreamSynchronize(job->stream));
    if (call->in_place)
        out = job->send +
              (call->skip + (call->scatter ? (size_t)job->rank * call->count : 0)) * size;
    issue(job, job->ours, call, out);
    CUDA(cudaStreamSynchronize(job->stream));
    compare(job, call, out);
}

static void until_rings(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        NCCL(ncclAllReduce(job->send, job->recv, 4, ncclFloat32, ncclSum, job->ours, job->stream));
        CUDA(cudaStreamSynchronize(job->stream));
        meeting_wait(meeting, job->n);
        agreed = said_count("committed at") == job->n;
        meeting_wait(meeting, job->n);
    }
    CHECK(said_count("rings of") == job->n);
    CHECK(getenv("LOONGCOMM_STAGING_MAX") || said_count(job->n == 2 ? ", 8 slots" : ", 4 slots") ==
                                                 job->n); /* two have one peer each */
}

static void set_up(struct job *job)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;

    job->ours = comm_up(meeting, job->rank, job->n);
    job->stream = stream_up();
    meeting_wait(meeting, job->n);
    if (job->rank == 0)
        atomic_store(&meeting->has_id, 0);
    meeting_wait(meeting, job->n);
    id = meeting_id(meeting, job->rank);
    config.blocking = 0;
    CHECK(ncclCommInitRankConfig(&job->plain, job->n, id, job->rank, &config) <= ncclInProgress);
    CHECK(comm_settle(job->plain) == ncclSuccess);
    job->send = device_alloc((MOST + 8) * (size_t)job->n * 4);
    job->recv = device_alloc((MOST + 8) * (size_t)4);
    job->want = device_alloc((MOST + 8) * (size_t)4);
}

static void every_size(const struct job *job)
{
    static const ncclDataType_t types[] = { ncclFloat32, ncclBfloat16, ncclFloat16 };
    static const size_t counts[] = { 1, 3, 1000, 8192, 16384, 16385, 65537, MOST };
    unsigned salt = 0;

    for (int t = 0; t < 3; t++) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(*counts); c++) {
            for (int way = 0; way < 4; way++) {
                struct call call = { .scatter = way & 1,
                                     .in_place = way & 2,
                                     .type = types[t],
                                     .op = salt % 3 ? ncclSum : ncclAvg,
                                     .count = counts[c],
                                     .skip = salt % 5 };

                run(job, &call, salt++);
            }
        }
    }
}

/* The same call in a graph that is replayed. */
static void run_captured(const struct job *job, const struct call *call, unsigned salt)
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    fill(job, call->type, salt);
    issue(job, job->plain, call, job->want);
    CHECK(comm_settle(job->plain) == ncclSuccess);
    CUDA(cudaStreamBeginCapture(job->stream, cudaStreamCaptureModeThreadLocal));
    issue(job, job->ours, call, job->recv);
    CUDA(cudaStreamEndCapture(job->stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) {
        CUDA(cudaMemsetAsync(job->recv, 0xa5, call->count * size_of(call->type), job->stream));
        CUDA(cudaGraphLaunch(exec, job->stream));
        CUDA(cudaStreamSynchronize(job->stream));
        compare(job, call, job->recv);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
}

/* Two ranks: not a bit is lost, whatever may travel as bf16. */
static void every_small_size(const struct job *job)
{
    static const size_t counts[] = { 1, 256, 16384, 20000, 65536 };
    ncclRedOp_t ops[] = { ncclSum, ncclAvg, ncclSum }, same;
    float factor = 0.75F;
    unsigned salt = 0;

    NCCL(ncclRedOpCreatePreMulSum(&ops[2], &factor, ncclFloat32, ncclScalarHostImmediate,
                                  job->ours));
    NCCL(
        ncclRedOpCreatePreMulSum(&same, &factor, ncclFloat32, ncclScalarHostImmediate, job->plain));
    for (size_t c = 0; c < sizeof(counts) / sizeof(*counts); c++) {
        for (int o = 0; o < 3; o++) {
            struct call call = { .type = ncclFloat32,
                                 .op = ops[o],
                                 .own = same,
                                 .count = counts[c] };

            run(job, &call, salt++);
            call.in_place = true;
            run(job, &call, salt++);
            call.odd = true;
            run(job, &call, salt++);
            run_captured(job, &call, salt++);
        }
    }
    NCCL(ncclRedOpDestroy(ops[2], job->ours));
    NCCL(ncclRedOpDestroy(same, job->plain));
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n };

    set_up(&job);
    until_rings(&job);
    if (arg)
        every_small_size(&job);
    else
        every_size(&job);
    NCCL(ncclCommDestroy(job.ours));
    NCCL(ncclCommFinalize(job.plain) <= ncclInProgress ? ncclSuccess : ncclSystemError);
    CHECK(comm_settle(job.plain) == ncclSuccess);
    NCCL(ncclCommDestroy(job.plain));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    CUDA(cudaFree(job.want));
    return 0;
}

static char profile[64], folder[] = "/tmp/lc-rings-XXXXXX";

static void use_profile(int n)
{
    char rules[160];

    CHECK(mkdtemp(folder) && setenv("LOONGCOMM_DIR", folder, 1) == 0 &&
          setenv("LOONGCOMM_REPORT", "json", 1) == 0);

    snprintf(
        rules, sizeof(rules),
        "rings all-reduce %d exact 1 2000 one-shot 4\nrings all-reduce %d exact 2000 0 two-shot 16\n"
        "rings reduce-scatter %d exact 1 0 two-shot 16\n",
        n, n, n);
    profile_write(profile, "none", rules);
    CHECK(setenv("LOONGCOMM_PROFILE", profile, 1) == 0 && setenv("LOONGCOMM_PEER", "auto", 1) == 0);
}

/* Every rank's report knows of calls that went both ways. */
static void check_reports(void)
{
    char command[256];

    snprintf(command, sizeof(command),
             "cat %s/*.json >%s/all && grep -q one-shot %s/all && grep -q two-shot %s/all", folder,
             folder, folder, folder);
    CHECK(unsetenv("LD_PRELOAD") == 0 && system(command) == 0);
    snprintf(command, sizeof(command), "rm -r %s %s", folder, profile);
    CHECK(system(command) == 0);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 2;
    bool small = argc > 2 && strcmp(argv[2], "small") == 0;

    if (argc > 2 && !small)
        use_profile(n);
    said_begin();
    meeting = meeting_new();
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    n = lc_ranks_run(n, rank_main, small ? &small : NULL, 200);
    if (argc > 2 && !small && n == 0)
        check_reports();
    return n;
}
