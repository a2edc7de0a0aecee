/* SPDX-License-Identifier: Apache-2.0
 *
 * Which numbers roundings draw, and that a rank without memory for a count rounds to nearest. */
#include "interpose/comm.h"
#include "interpose/pool.h"
#include "interpose/process.h"
#include "interpose/rounding.h"
#include "tests/check.h"

#include <string.h>

static uint64_t word, counted;
static int frees;
static cudaError_t answer;
static struct lc_config config;

static cudaError_t allocate(void **out, size_t bytes)
{
    CHECK(bytes == sizeof(word));
    if (!answer)
        *out = &word;
    return answer;
}

static cudaError_t release(void *ptr)
{
    CHECK(ptr == &word);
    frees++;
    return cudaSuccess;
}

static cudaError_t clear(void *to, int value, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    memset(to, value, bytes);
    return cudaSuccess;
}

static cudaError_t record(cudaEvent_t event, cudaStream_t stream)
{
    (void)event;
    (void)stream;
    return cudaSuccess;
}

static cudaError_t last_error(void)
{
    return cudaSuccess;
}

static const char *error_text(int err)
{
    (void)err;
    return "out of memory";
}

static int count_up(uint64_t *at, uint64_t by, void *stream)
{
    (void)stream;
    CHECK(at == &word);
    counted += by;
    return 0;
}

static const struct lc_backend backend = { .cudaMalloc = allocate,
                                           .cudaFree = release,
                                           .cudaMemsetAsync = clear,
                                           .cudaEventRecord = record,
                                           .cudaGetLastError = last_error,
                                           .lk_error_text = error_text,
                                           .lk_count_up = count_up };

const struct lc_config *lc_process_config(void)
{
    return &config;
}

static enum lk_rounding set_up(uint64_t id, int rank, struct lk_rng *out)
{
    static struct lc_reducer reducer;
    static struct lc_comm comm;

    reducer = (struct lc_reducer){ .backend = &backend };
    comm = (struct lc_comm){
        .reducer = &reducer,
        .id = id,
        .facts = {.rank = rank, .ranks = 64}
    };
    word = 77;
    lc_rounding_set_up(&comm, NULL);
    counted = 0;
    CHECK(lc_rounding_drawn(&reducer, 13, NULL) == 0);
    lc_rounding_free(&reducer);
    lc_pool_empty(LC_POOL_ALL);
    return lc_rounding_of(&reducer, out);
}

static void every_rank_of_every_communicator_has_its_own(void)
{
    struct lk_rng rngs[8 * 8];

    for (int i = 0; i < 64; i++) {
        CHECK(set_up((uint64_t)(i / 8) + 1, i % 8, &rngs[i]) == LK_STOCHASTIC);
        CHECK(word == 0 && counted == 16 && rngs[i].offset == 0);
        for (int before = 0; before < i; before++)
            CHECK(rngs[before].seed != rngs[i].seed);
    }
    CHECK(frees == 64);
}

static void without_memory_it_is_rounded_to_nearest(void)
{
    struct lk_rng rng;

    answer = cudaErrorMemoryAllocation;
    CHECK(set_up(1, 0, &rng) == LK_NEAREST && counted == 0 && word == 77);
    answer = cudaSuccess;
}

static void nothing_is_drawn_where_nobody_wants_it(void)
{
    struct lk_rng rng;

    config.rounding = LC_ROUNDING_NEAREST;
    CHECK(set_up(1, 0, &rng) == LK_NEAREST && word == 77);
    config.rounding = LC_ROUNDING_STOCHASTIC;
    config.allreduce_wire = LC_WIRE_DATA;
    CHECK(set_up(1, 0, &rng) == LK_NEAREST && word == 77);
}

int main(void)
{
    config = (struct lc_config){ .rounding = LC_ROUNDING_STOCHASTIC,
                                 .allreduce_wire = LC_WIRE_BF16 };
    every_rank_of_every_communicator_has_its_own();
    without_memory_it_is_rounded_to_nearest();
    nothing_is_drawn_where_nobody_wants_it();
    return 0;
}
