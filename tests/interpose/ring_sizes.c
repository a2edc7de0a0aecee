/* SPDX-License-Identifier: Apache-2.0
 *
 * All-reduces through rings of sizes up to 64 KB and of powers of two and their neighbours above, at every alignment of
 * either buffer, in place and not, on the rig. Values are small whole numbers, whose sums are exact in every type and on
 * every wire. LOONGCOMM_PEER=force. argv: ranks, megabytes of the largest (64); with LCTEST_SOAK=1 each size up to 64 KB, and
 * two ranks go up to 1 GB. */
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <stdbool.h>

#define SMALL ((size_t)64 << 10) /* bytes: each size up to it */
#define LIE   16                 /* bytes that a buffer may be away from an aligned address */
#define GUARD 64                 /* bytes behind and before a result that nobody writes */

static struct meeting *meeting;
static size_t most = (size_t)64 << 20;
static size_t step = 37; /* above 1024 elements */

struct job {
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    char *send, *recv;
};

struct call {
    ncclDataType_t type;
    size_t count, from, to; /* elements that the buffers are away */
    bool in_place;
};

static size_t size_of(ncclDataType_t type)
{
    return type == ncclFloat32 ? 4 : 2;
}

/* -8 to 7. */
static int value_of(size_t i, int rank)
{
    return (int)((i * 5 + (unsigned)rank * 3) & 15) - 8;
}

static uint16_t to_bf16(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16); /* of so few bits nothing is lost */
}

static void fill(char *out, ncclDataType_t type, size_t count, int rank)
{
    for (size_t i = 0; i < count; i++) {
        float value = (float)value_of(i, rank);

        if (type == ncclFloat32)
            ((float *)out)[i] = value;
        else
            ((uint16_t *)out)[i] = to_bf16(value);
    }
}

/* How many are wrong. */
static size_t count_wrong(const struct job *job, const struct call *call, const char *got)
{
    float sums[16];
    size_t wrong = 0;

    for (size_t i = 0; i < 16; i++) { /* the values repeat themselves */
        sums[i] = 0;
        for (int r = 0; r < job->n; r++)
            sums[i] += (float)value_of(i, r);
    }
    for (size_t i = 0; i < call->count; i++) {
        float want = sums[i & 15];

        if (call->type == ncclFloat32)
            wrong += ((const float *)got)[i] != want;
        else
            wrong += ((const uint16_t *)got)[i] != to_bf16(want);
    }
    return wrong;
}

static bool is_untouched(const char *bytes)
{
    for (int i = 0; i < GUARD; i++) {
        if ((unsigned char)bytes[i] != 0xa5)
            return false;
    }
    return true;
}

static void run(const struct job *job, const struct call *call)
{
    size_t size = size_of(call->type), bytes = call->count * size;
    char *in = job->send + call->from * size;
    char *out = job->recv + GUARD + call->to * size;
    size_t wrong;

    memset(out - GUARD, 0xa5, GUARD);
    memset(out + bytes, 0xa5, GUARD);
    fill(in, call->type, call->count, job->rank);
    if (call->in_place)
        memcpy(out, in, bytes);
    else
        memset(out, 0xff, bytes);
    NCCL(ncclAllReduce(call->in_place ? out : in, out, call->count, call->type, ncclSum, job->comm,
                       job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
    wrong = count_wrong(job, call, out);
    if (wrong || !is_untouched(out - GUARD) || !is_untouched(out + bytes))
        fprintf(stderr, "rank %d: %zu x %zu bytes, away %zu and %zu%s: %zu wrong\n", job->rank,
                call->count, size, call->from, call->to, call->in_place ? ", in place" : "", wrong);
    CHECK(wrong == 0 && is_untouched(out - GUARD) && is_untouched(out + bytes));
}

/* Each size, or of those above a few pages some; and each pair of alignments with many of them. */
static void run_small(const struct job *job, ncclDataType_t type)
{
    size_t away = LIE / size_of(type);

    for (size_t count = 0; count <= SMALL / size_of(type); count += count < 1024 ? 1 : step) {
        struct call call = { type, count, count % away, count / away % away, count % 3 == 0 };

        run(job, &call);
    }
}

static void run_large(const struct job *job, ncclDataType_t type)
{
    size_t size = size_of(type), away = LIE / size, turn = 0;

    for (size_t bytes = 2 * SMALL; bytes <= most; bytes *= 2) {
        for (int off = -1; off <= 1; off++, turn++) {
            struct call call = { type, bytes / size + (size_t)(ptrdiff_t)off, turn % away,
                                 turn * 3 % away, turn % 2 };

            run(job, &call);
        }
    }
}

static void until_rings(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        NCCL(ncclAllReduce(job->send, job->recv, 4, ncclFloat32, ncclSum, job->comm, job->stream));
        CUDA(cudaStreamSynchronize(job->stream));
        meeting_wait(meeting, job->n);
        agreed = said_count("committed at") == job->n;
        meeting_wait(meeting, job->n);
    }
    CHECK(said_count("rings of") == job->n);
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank, .n = n };

    (void)arg;
    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc(most + 4 * LIE);
    job.recv = device_alloc(most + 4 * LIE + 2 * (size_t)GUARD);
    until_rings(&job);
    run_small(&job, ncclFloat32);
    run_small(&job, ncclBfloat16);
    run_large(&job, ncclFloat32);
    run_large(&job, ncclBfloat16);
    NCCL(ncclCommDestroy(job.comm));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    return 0;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 2;

    if (argc > 2)
        most = strtoull(argv[2], NULL, 10) << 20;
    if (getenv("LCTEST_SOAK")) {
        most = (size_t)(n == 2 ? 1024 : 64) << 20;
        step = 1;
    }
    CHECK(n >= 2 && n <= 8 && most >= SMALL);
    said_begin();
    meeting = meeting_new();
    return lc_ranks_run(n, rank_main, NULL, 1200);
}
