/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens go to experts of two ranks of the rig by lk_moe_route(), lk_moe_permute(), loongcommSetMask() and ncclAlltoAll:
 * rows that no token has filled are not written before, arrive as zeros, and are exactly what is not sent. Argument:
 * libloongkernels-host.so, which the library under test has loaded, too. */
#include "interpose/loongcomm.h"
#include "kernels/loongcompute.h"
#include "tests/interpose/content.h"
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <dlfcn.h>
#include <stdbool.h>

#define RANKS     2
#define EXPERTS   8 /* four of each rank */
#define CAPACITY  24
#define TOKENS    60
#define CHOICES   2
#define COLUMNS   256 /* a row is one of the pieces that are looked at */
#define ROWS      (EXPERTS * CAPACITY)
#define ROW_BYTES ((size_t)COLUMNS * 2)
#define ROUNDS    6

static struct meeting *meeting;
static __typeof__(loongcommSetMask) *set_mask;
static __typeof__(lk_moe_route) *route;
static __typeof__(lk_moe_permute) *permute;
static __typeof__(lk_moe_workspace_bytes) *workspace_bytes;

struct job {
    int rank;
    ncclComm_t comm;
    cudaStream_t stream;
    uint16_t *tokens, *send, *recv;
    int32_t *experts;
    struct lk_moe_routing routing;
};

/* Some experts get more than they have room for, some little. */
static int32_t expert_of(int rank, unsigned round, uint64_t slot)
{
    uint64_t drawn = content_mix((uint64_t)rank * 1000000 + round * 1000 + slot);

    return (int32_t)(drawn % 3 ? drawn / 3 % EXPERTS : drawn / 3 % 2) - (drawn % 97 == 0);
}

static uint16_t value_of(int rank, unsigned round, uint64_t token, uint64_t column)
{
    return (
        uint16_t)(content_mix(((uint64_t)rank * 100 + round) * 1000000 + token * COLUMNS + column) |
                  1);
}

static void all_to_all(const struct job *job)
{
    NCCL(ncclAlltoAll(job->send, job->recv, (size_t)ROWS / RANKS * COLUMNS, ncclFloat16, job->comm,
                      job->stream));
    CUDA(cudaStreamSynchronize(job->stream));
}

static void until_committed(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    memset(job->send, 0x5a, ROWS * ROW_BYTES);
    while (!agreed) {
        CHECK(!lc_deadline_passed(until));
        all_to_all(job);
        meeting_wait(meeting, RANKS);
        agreed = said_count("committed at") == RANKS;
        meeting_wait(meeting, RANKS);
    }
}

static void dispatch(const struct job *job, unsigned round)
{
    struct lk_moe_rows rows = { .tokens = job->tokens,
                                .token_stride = COLUMNS,
                                .permuted = job->send,
                                .permuted_stride = COLUMNS,
                                .columns = COLUMNS };

    for (uint64_t slot = 0; slot < (uint64_t)TOKENS * CHOICES; slot++)
        job->experts[slot] = expert_of(job->rank, round, slot);
    for (uint64_t i = 0; i < (uint64_t)TOKENS * COLUMNS; i++)
        job->tokens[i] = value_of(job->rank, round, i / COLUMNS, i % COLUMNS);
    memset(job->send, 0x5a, ROWS * ROW_BYTES); /* what rows that nobody fills hold */
    CHECK(route(&job->routing, job->stream) == 0);
    CHECK(permute(&job->routing, &rows, job->stream) == 0);
    CHECK(set_mask((struct ncclComm *)job->comm, job->routing.live, ROWS, ROW_BYTES,
                   (struct CUstream_st *)job->stream) == 0);
    all_to_all(job);
}

/* Whose token lies in which row of `rank`'s buffer, by the contract: -1 nobody's. */
static void expected_rows(int rank, unsigned round, int64_t token[ROWS])
{
    uint32_t filled[EXPERTS] = { 0 };

    for (int row = 0; row < ROWS; row++)
        token[row] = -1;
    for (uint64_t slot = 0; slot < (uint64_t)TOKENS * CHOICES; slot++) {
        int32_t expert = expert_of(rank, round, slot);

        if (expert >= 0 && filled[expert] < CAPACITY)
            token[expert * CAPACITY + (int)filled[expert]++] = (int64_t)(slot / CHOICES);
    }
}

static void check_round(const struct job *job, unsigned round)
{
    int first = job->rank * ROWS / RANKS;
    int64_t token[ROWS];

    for (int src = 0; src < RANKS; src++) {
        const uint16_t *got = job->recv + (size_t)src * ROWS / RANKS * COLUMNS;

        expected_rows(src, round, token);
        for (size_t i = 0; i < (size_t)ROWS / RANKS * COLUMNS; i++) {
            int64_t whose = token[(size_t)first + i / COLUMNS];

            CHECK(got[i] == (whose < 0 ? 0 : value_of(src, round, (uint64_t)whose, i % COLUMNS)));
        }
    }
    expected_rows(job->rank, round, token);
    for (int row = 0; row < ROWS; row++)
        if (token[row] < 0 && row * RANKS / ROWS != job->rank)
            atomic_fetch_add(&meeting->word, 1); /* to another rank */
}

static void make_routing(struct job *job)
{
    struct lk_moe_routing *r = &job->routing;

    *r = (struct lk_moe_routing){ .experts = job->experts,
                                  .tokens = TOKENS,
                                  .choices = CHOICES,
                                  .expert_count = EXPERTS,
                                  .capacity = CAPACITY,
                                  .rows = ROWS };
    r->row_of_slot = device_alloc((size_t)TOKENS * CHOICES * 4);
    r->slot_of_row = device_alloc(ROWS * sizeof(int32_t));
    r->counts = device_alloc(EXPERTS * sizeof(int32_t));
    r->offsets = device_alloc((EXPERTS + 1) * sizeof(int32_t));
    r->live = device_alloc((ROWS + 31) / 32 * sizeof(uint32_t));
    r->workspace = device_alloc(workspace_bytes(r));
}

static void drop_routing(const struct job *job)
{
    CUDA(cudaFree(job->routing.row_of_slot));
    CUDA(cudaFree(job->routing.slot_of_row));
    CUDA(cudaFree(job->routing.counts));
    CUDA(cudaFree(job->routing.offsets));
    CUDA(cudaFree(job->routing.live));
    CUDA(cudaFree(job->routing.workspace));
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank };

    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.tokens = device_alloc(TOKENS * ROW_BYTES);
    job.send = device_alloc(ROWS * ROW_BYTES);
    job.recv = device_alloc(ROWS * ROW_BYTES);
    job.experts = device_alloc((size_t)TOKENS * CHOICES * 4);
    make_routing(&job);
    until_committed(&job);
    for (unsigned round = 0; round < ROUNDS; round++) {
        dispatch(&job, round);
        check_round(&job, round);
    }
    NCCL(ncclCommDestroy(job.comm));
    CUDA(cudaStreamDestroy(job.stream));
    drop_routing(&job);
    CUDA(cudaFree(job.tokens));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    CUDA(cudaFree(job.experts));
    return 0;
}

/* The sum of a number over the reports of all ranks. */
static unsigned long reported(const char *folder, const char *name)
{
    unsigned long sum = 0, one;
    char command[200];
    FILE *file;

    snprintf(command, sizeof(command),
             "cat %s/* | tr -d ' \\n' | grep -o '\"%s\":[0-9]*' | sed 's/.*://'", folder, name);
    file = popen(command, "r");
    CHECK(file);
    while (fscanf(file, "%lu", &one) == 1)
        sum += one;
    CHECK(pclose(file) == 0);
    return sum;
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/lc-moe-XXXXXX", command[80];
    void *kernels;
    int failed;

    CHECK(argc == 2 && (kernels = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL)));
    route = (__typeof__(route))dlsym(kernels, "lk_moe_route");
    permute = (__typeof__(permute))dlsym(kernels, "lk_moe_permute");
    workspace_bytes = (__typeof__(workspace_bytes))dlsym(kernels, "lk_moe_workspace_bytes");
    CHECK(mkdtemp(folder) && setenv("LOONGCOMM_DIR", folder, 1) == 0 &&
          setenv("LOONGCOMM_REPORT", "json", 1) == 0);
    set_mask = (__typeof__(set_mask))dlsym(RTLD_DEFAULT, "loongcommSetMask");
    CHECK(route && permute && workspace_bytes && set_mask);
    said_begin();
    meeting = meeting_new();
    failed = lc_ranks_run(RANKS, rank_main, NULL, 60);
    CHECK(unsetenv("LD_PRELOAD") == 0);
    if (!failed) {
        unsigned long dead = (unsigned long)atomic_load(&meeting->word);

        printf("%lu dead rows, %lu bytes left out\n", dead, reported(folder, "exchange_elided"));
        CHECK(dead > 0 && reported(folder, "exchange_elided") == dead * ROW_BYTES);
    }
    snprintf(command, sizeof(command), "rm -r %s", folder);
    CHECK(system(command) == 0);
    return failed;
}
