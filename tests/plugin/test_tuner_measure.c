/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tuner_measure LIBRARY: the plugin for measuring, driven as NCCL and loongcomm-bench do. */
#include "plugin/tuner/abi.h"
#include "plugin/tuner/measure.h"
#include "tests/check.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    ALL_REDUCE = 4,
    TREE = 0,
    RING = 1,
    NVLS = 4,
    LL = 0,
    SIMPLE = 2,
    ALGORITHMS = 7,
    PROTOCOLS = 3,
};

#define PROFILE \
    "loongcomm.profile/1\ngpu none\nnccl 2.28.9\nnccl all-reduce 2 2 0 1000 tree simple 3\n"

static float costs[ALGORITHMS][PROTOCOLS];
static const struct lc_tuner_table table = { &costs[0][0], ALGORITHMS, PROTOCOLS };

/* As NCCL without NVLS: ring/LL is its choice. */
static void fill(void)
{
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++)
        table.costs[i] = i / PROTOCOLS == NVLS ? -1 : 20;
    costs[RING][LL] = 10;
}

static bool is_filled(void)
{
    float was[ALGORITHMS * PROTOCOLS];
    bool same = true;

    memcpy(was, costs, sizeof(was));
    fill();
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++)
        same = same && was[i] == table.costs[i];
    return same;
}

static uint64_t forced(unsigned algorithm, unsigned protocol, unsigned channels)
{
    return lc_measure_word(LC_MEASURE_FORCED, algorithm, protocol, channels);
}

static void word_that_names_no_way_changes_nothing(void)
{
    const uint64_t bad[] = {
        0,
        1,
        UINT64_MAX,
        forced(TREE, SIMPLE, 2) ^ UINT64_C(1) << 60, /* the mark */
        forced(TREE, SIMPLE, 2) ^ UINT64_C(1) << 34, /* the kind */
        lc_measure_word(LC_MEASURE_DEFAULT, TREE, SIMPLE, 2),
        lc_measure_word(LC_MEASURE_PRODUCT, TREE, SIMPLE, 2), /* not the table's business */
        forced(ALGORITHMS, SIMPLE, 2),
        forced(TREE, PROTOCOLS, 2),
        forced(255, 255, 65535),
        forced(NVLS, SIMPLE, 2), /* ruled out */
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        int channels = 0;

        fill();
        CHECK(!lc_measure_apply(bad[i], &table, &channels) && channels == 0);
        CHECK(is_filled());
    }
}

static void any_word_leaves_what_is_ruled_out(void)
{
    uint64_t word = 88172645463325252;

    for (int i = 0; i < 100000; i++) {
        int channels = 0;

        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        fill();
        (void)lc_measure_apply(i & 1 ? word : LC_MEASURE_MARK | UINT64_C(1) << 32 | (uint32_t)word,
                               &table, &channels);
        for (int p = 0; p < PROTOCOLS; p++)
            CHECK(costs[NVLS][p] == -1);
        CHECK(channels >= 0 && channels <= 65535);
    }
}

static void forced_way_is_what_nccl_takes(void)
{
    for (unsigned a = TREE; a <= RING; a++) {
        for (unsigned p = LL; p < PROTOCOLS; p++) {
            int channels = 0;

            fill();
            CHECK(lc_measure_apply(forced(a, p, 3), &table, &channels) && channels == 3);
            CHECK(lc_measure_choice(&table, channels) == forced(a, p, 3));
        }
    }
    fill();
    CHECK(lc_measure_choice(&table, 0) == forced(RING, LL, 0));
    costs[RING][SIMPLE] = costs[RING][LL]; /* NCCL takes the first of equal ones */
    CHECK(lc_measure_choice(&table, 0) == forced(RING, LL, 0));
    for (int i = 0; i < ALGORITHMS * PROTOCOLS; i++)
        table.costs[i] = -1;
    CHECK(lc_measure_choice(&table, 0) == 0);
}

/* --- through the plugin --- */

struct plugin {
    const struct lc_nccl_tuner_v5 *calls;
    struct lc_measure *measure;
    void *context;
};

static struct plugin open_plugin(const char *library)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    struct plugin p = { 0 };

    CHECK(handle);
    p.calls = dlsym(handle, "ncclTunerPlugin_v5");
    p.measure = dlsym(handle, LC_MEASURE_SYMBOL);
    CHECK(p.calls && p.measure && p.measure->version == 1);
    CHECK(p.calls->init(&p.context, 7, 2, 2, NULL, NULL, NULL) == LC_NCCL_SUCCESS);
    return p;
}

static int ask(const struct plugin *p, uint64_t way, size_t bytes)
{
    int channels = 0;

    fill();
    atomic_store(&p->measure->way, way);
    CHECK(p->calls->getCollInfo(p->context, ALL_REDUCE, bytes, 1, (float **)costs, ALGORITHMS,
                                PROTOCOLS, 0, &channels) == LC_NCCL_SUCCESS);
    return channels;
}

static void nobody_writes_and_nccl_chooses(const struct plugin *p)
{
    int channels = 0;

    CHECK(atomic_load(&p->measure->way) == 0);
    fill();
    for (int i = 0; i < 3; i++)
        CHECK(p->calls->getCollInfo(p->context, ALL_REDUCE, 8, 1, (float **)costs, ALGORITHMS,
                                    PROTOCOLS, 0, &channels) == LC_NCCL_SUCCESS);
    CHECK(is_filled() && channels == 0);
}

static void what_becomes_of_a_way_is_said(const struct plugin *p)
{
    uint64_t asked = atomic_load(&p->measure->asked), taken = atomic_load(&p->measure->taken);

    CHECK(ask(p, forced(TREE, SIMPLE, 2), 64) == 2 && costs[TREE][SIMPLE] == 0);
    CHECK(atomic_load(&p->measure->asked) == asked + 1 &&
          atomic_load(&p->measure->taken) == taken + 1);
    CHECK(atomic_load(&p->measure->choice) == forced(TREE, SIMPLE, 2));
    CHECK(ask(p, forced(NVLS, SIMPLE, 2), 64) == 0 && is_filled());
    CHECK(ask(p, UINT64_MAX, 64) == 0 && is_filled());
    /* NCCL's own choice, but not because the word says so */
    CHECK(ask(p, forced(RING, LL, 2) ^ UINT64_C(1) << 60, 64) == 0 && is_filled());
    CHECK(atomic_load(&p->measure->asked) == asked + 4 &&
          atomic_load(&p->measure->taken) == taken + 1);
    CHECK(atomic_load(&p->measure->choice) == forced(RING, LL, 0));
}

/* The rule is read from a file by the plugin that a job uses. */
static void product_decides_by_its_profile(const struct plugin *p)
{
    uint64_t way = lc_measure_word(LC_MEASURE_PRODUCT, 0, 0, 0);

    CHECK(atomic_load(&p->measure->product) == 1);
    CHECK(ask(p, way, 999) == 3 && costs[TREE][SIMPLE] == 0);
    CHECK(atomic_load(&p->measure->choice) == forced(TREE, SIMPLE, 3));
    CHECK(ask(p, way, 1000) == 0 && is_filled());
    CHECK(ask(p, 0, 999) == 0 && is_filled());
}

/* The interposer's, as the product's tuner finds them. */
const uint32_t *loongcomm_tuner_begin_v1(uint64_t hash);
void loongcomm_tuner_end_v1(const uint32_t *word);
static int begun;

const uint32_t *loongcomm_tuner_begin_v1(uint64_t hash)
{
    static const uint32_t agreed = 1;

    begun++;
    return &agreed;
}

void loongcomm_tuner_end_v1(const uint32_t *word)
{
}

/* Left in NCCL_TUNER_PLUGIN by mistake, on one rank of a job: the others shall not count on it. */
static void it_agrees_to_no_profile(const char *library)
{
    pid_t child = fork(); /* what a process has found out stays */
    int status;

    CHECK(child >= 0);
    if (child == 0) {
        struct plugin p = open_plugin(library);

        CHECK(begun == 0 && atomic_load(&p.measure->product) == 0);
        CHECK(ask(&p, 0, 999) == 0 && is_filled());
        CHECK(ask(&p, lc_measure_word(LC_MEASURE_PRODUCT, 0, 0, 0), 999) == 0 && is_filled());
        CHECK(p.calls->finalize(p.context) == LC_NCCL_SUCCESS);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv)
{
    char path[] = "/tmp/lc-measure-XXXXXX";
    int fd = mkstemp(path);
    struct plugin p;

    CHECK(argc == 2 && fd >= 0);
    CHECK(write(fd, PROFILE, sizeof(PROFILE) - 1) == (ssize_t)sizeof(PROFILE) - 1);
    close(fd);
    CHECK(setenv("LOONGCOMM_PROFILE", path, 1) == 0);
    CHECK(unsetenv("LOONGCOMM_PROFILE_TRUST") == 0);
    it_agrees_to_no_profile(argv[1]);
    CHECK(setenv("LOONGCOMM_PROFILE_TRUST", "yes", 1) == 0);
    word_that_names_no_way_changes_nothing();
    any_word_leaves_what_is_ruled_out();
    forced_way_is_what_nccl_takes();
    p = open_plugin(argv[1]);
    nobody_writes_and_nccl_chooses(&p);
    what_becomes_of_a_way_is_said(&p);
    product_decides_by_its_profile(&p);
    CHECK(p.calls->finalize(p.context) == LC_NCCL_SUCCESS);
    unlink(path);
    return 0;
}
