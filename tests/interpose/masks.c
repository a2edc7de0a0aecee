/* SPDX-License-Identifier: Apache-2.0
 *
 * Dead rows arrive as zeros, be it that the library leaves them out or that it says it will not (loongcommSetMask) and
 * the program writes zeros: on two ranks of the rig, with a profile that leaves small all-to-alls to NCCL, before and
 * after the ranks agree, in either form, and with windows. LOONGCOMM_PEER=auto, LOONGCOMM_EXCHANGE_MIN_BYTES=1000. */
#include "interpose/loongcomm.h"
#include "tests/interpose/content.h"
#include "tests/interpose/profile_file.h"
#include "tests/interpose/said.h"
#include "tests/rig/test_nccl.h"

#include <dlfcn.h>
#include <stdbool.h>

#define RANKS     2
#define ROW_BYTES 730
#define SMALL     10 /* rows to each rank, of what the profile has no rule for */
#define LARGE     40

static struct meeting *meeting;
static __typeof__(loongcommSetMask) *set_mask;

struct job {
    int rank;
    ncclComm_t comm;
    cudaStream_t stream;
    char *send, *recv;
    uint32_t *bits;
};

static bool is_live(int src, size_t row, unsigned salt)
{
    return content_mix((uint64_t)salt * 1000 + (uint64_t)src * 100 + row) % 3 != 0;
}

static uint64_t seed_of(int src, unsigned salt)
{
    return (uint64_t)salt * RANKS + (uint64_t)src;
}

static void all_to_all(const struct job *job, size_t bytes, bool messages)
{
    if (!messages) {
        NCCL(ncclAlltoAll(job->send, job->recv, bytes, ncclInt8, job->comm, job->stream));
        return;
    }
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < RANKS; peer++) {
        NCCL(ncclSend(job->send + (size_t)peer * bytes, bytes, ncclInt8, peer, job->comm,
                      job->stream));
        NCCL(ncclRecv(job->recv + (size_t)peer * bytes, bytes, ncclInt8, peer, job->comm,
                      job->stream));
    }
    NCCL(ncclGroupEnd());
}

static void check_rows(const struct job *job, size_t rows, unsigned salt)
{
    char *want = malloc(RANKS * rows * ROW_BYTES);

    CHECK(want);
    for (int src = 0; src < RANKS; src++) {
        content_fill(want, RANKS * rows * ROW_BYTES, seed_of(src, salt));
        for (size_t row = 0; row < rows; row++) {
            size_t there = (size_t)job->rank * rows + row;

            if (!is_live(src, there, salt))
                memset(want + there * ROW_BYTES, 0, ROW_BYTES);
        }
        CHECK(memcmp(job->recv + (size_t)src * rows * ROW_BYTES,
                     want + (size_t)job->rank * rows * ROW_BYTES, rows * ROW_BYTES) == 0);
    }
    free(want);
}

/* As a program does. Returns what loongcommSetMask has said. */
static int exchange(const struct job *job, size_t rows, bool messages)
{
    static _Thread_local unsigned salt;
    int said;

    salt++;
    content_fill(job->send, RANKS * rows * ROW_BYTES, seed_of(job->rank, salt));
    memset(job->recv, 0xa5, RANKS * rows * ROW_BYTES);
    memset(job->bits, 0, (RANKS * rows + 31) / 32 * 4);
    for (size_t row = 0; row < RANKS * rows; row++)
        job->bits[row / 32] |= (uint32_t)is_live(job->rank, row, salt) << row % 32;
    said = set_mask((struct ncclComm *)job->comm, job->bits, RANKS * rows, ROW_BYTES,
                    (struct CUstream_st *)job->stream);
    CHECK(said == 0 || said == 1);
    for (size_t row = 0; said == 1 && row < RANKS * rows; row++) {
        if (!is_live(job->rank, row, salt))
            memset(job->send + row * ROW_BYTES, 0, ROW_BYTES);
    }
    all_to_all(job, rows * ROW_BYTES, messages);
    CUDA(cudaStreamSynchronize(job->stream));
    check_rows(job, rows, salt);
    return said;
}

static void until_committed(const struct job *job)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool agreed = false;

    for (int call = 0; !agreed; call++) {
        CHECK(!lc_deadline_passed(until));
        exchange(job, call % 2 ? SMALL : LARGE, false);
        meeting_wait(meeting, RANKS);
        agreed = said_count("committed at") == RANKS;
        meeting_wait(meeting, RANKS);
    }
}

static void a_profile_leaves_some_to_nccl(const struct job *job)
{
    for (int i = 0; i < 3; i++) {
        CHECK(exchange(job, LARGE, false) == 0);
        CHECK(exchange(job, SMALL, false) == 1);
    }
}

static void groups_have_to_agree_first(const struct job *job)
{
    int said = 1;

    all_to_all(job, LARGE * ROW_BYTES, true); /* only then it is known that there are such */
    CUDA(cudaStreamSynchronize(job->stream));
    for (int call = 0; said == 1; call++) {
        CHECK(call < 64);
        said = exchange(job, LARGE, true);
        meeting_wait(meeting, RANKS);
        if (said == 0)
            atomic_fetch_add(&meeting->word, 1);
        meeting_wait(meeting, RANKS);
        said = atomic_load(&meeting->word) < RANKS;
        meeting_wait(meeting, RANKS);
        atomic_store(&meeting->word, 0);
        meeting_wait(meeting, RANKS);
    }
    CHECK(exchange(job, LARGE, true) == 0 && exchange(job, SMALL, true) == 1);
    CHECK(exchange(job, LARGE, false) == 0 && exchange(job, SMALL, false) == 1);
}

static void windows_leave_all_to_nccl(const struct job *job)
{
    ncclWindow_t window;
    void *memory;

    NCCL(ncclMemAlloc(&memory, 10000));
    NCCL(ncclCommWindowRegister(job->comm, memory, 10000, &window, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(exchange(job, LARGE, false) == 1);
    NCCL(ncclCommWindowDeregister(job->comm, window));
    NCCL(ncclMemFree(memory));
}

static int rank_main(int rank, int n, void *arg)
{
    struct job job = { .rank = rank };

    job.comm = comm_up(meeting, rank, n);
    job.stream = stream_up();
    job.send = device_alloc(RANKS * LARGE * ROW_BYTES);
    job.recv = device_alloc(RANKS * LARGE * ROW_BYTES);
    job.bits = device_alloc((RANKS * LARGE + 31) / 32 * 4);
    until_committed(&job);
    a_profile_leaves_some_to_nccl(&job);
    groups_have_to_agree_first(&job);
    windows_leave_all_to_nccl(&job);
    NCCL(ncclCommDestroy(job.comm));
    CUDA(cudaStreamDestroy(job.stream));
    CUDA(cudaFree(job.send));
    CUDA(cudaFree(job.recv));
    CUDA(cudaFree(job.bits));
    return 0;
}

int main(void)
{
    char profile[64];
    int failed;

    profile_write(profile, "none",
                  "rings all-to-all 2 exact 40000 0 exchange 4\nrings send 2 exact 20000 0 "
                  "exchange 4\n");
    CHECK(setenv("LOONGCOMM_PROFILE", profile, 1) == 0);
    set_mask = (__typeof__(set_mask))dlsym(RTLD_DEFAULT, "loongcommSetMask");
    CHECK(set_mask);
    said_begin();
    meeting = meeting_new();
    failed = lc_ranks_run(RANKS, rank_main, NULL, 60);
    CHECK(unlink(profile) == 0);
    return failed;
}
