/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tuner LIBRARY agreeing|alone: loads the tuner plugin as NCCL does and drives every version of its interface. As
 * "agreeing" this program has the functions of the interposer; the other build of it has not. */
#include "plugin/tuner/abi.h"
#include "tests/check.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PROFILE                                               \
    "loongcomm.profile/1\ngpu NVIDIA H200\nnccl 2.28.9\n"     \
    "nccl all-reduce 4 2 0 1000 tree ll 4\n"                  \
    "nccl all-reduce 4 2 1000 2000 collnet-direct simple 8\n" \
    "nccl all-reduce 4 2 2000 3000 pat simple 2\n"            \
    "nccl all-gather 4 2 0 0 ring simple 0\n"

enum {
    ALL_GATHER = 2,
    ALL_REDUCE = 4,
    SEND_RECV = 5,
    ALGORITHMS = 7,
    PROTOCOLS = 3,
};

static const char *library;
static char profile_path[] = "/tmp/lc-tuner-XXXXXX";
static char said[1024]; /* the last line */
static int lines;

/* The interposer's part. */
static uint32_t word;
static uint64_t asked_hash;
static int begun, ended;
#ifdef WITH_INTERPOSER
__attribute__((visibility("default"))) const uint32_t *loongcomm_tuner_begin_v1(uint64_t hash);
__attribute__((visibility("default"))) void loongcomm_tuner_end_v1(const uint32_t *given);

const uint32_t *loongcomm_tuner_begin_v1(uint64_t hash)
{
    asked_hash = hash;
    begun++;
    return &word;
}

void loongcomm_tuner_end_v1(const uint32_t *given)
{
    CHECK(given == &word);
    ended++;
}
#endif

__attribute__((format(printf, 5, 6))) static void log_line(enum lc_nccl_log_level level,
                                                           unsigned long flags, const char *file,
                                                           int line, const char *format, ...)
{
    va_list args;

    CHECK(flags == LC_NCCL_LOG_TUNING && strcmp(format, "TUNER/loongcomm: %s") == 0);
    va_start(args, format);
    /* NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): it is, by the line above */
    (void)snprintf(said, sizeof(said), "%s", va_arg(args, const char *));
    va_end(args);
    lines++;
}

/* One communicator through one version. */
struct tuner {
    int version;
    void *handle, *context;
    const void *table;
};

static void *symbol(void *handle, int version)
{
    char name[32];

    snprintf(name, sizeof(name), "ncclTunerPlugin_v%d", version);
    return dlsym(handle, name);
}

static struct tuner begin_with(int version, lc_nccl_logger *log)
{
    struct tuner t = { version, dlopen(library, RTLD_NOW | RTLD_LOCAL), &t, NULL };
    struct lc_nccl_tuner_constants_v5 constants;
    unsigned char before[sizeof(constants)];
    struct lc_nccl_nvl_domains domains = { 1, 2, 2 };

    CHECK(t.handle);
    t.table = symbol(t.handle, version);
    CHECK(t.table && strcmp(*(const char *const *)t.table, "loongcomm") == 0);
    memset(&constants, 0x3f, sizeof(constants));
    memcpy(before, &constants, sizeof(constants));
    if (version < 5)
        CHECK(((const struct lc_nccl_tuner_v2 *)t.table)->init(4, 2, log, &t.context) == 0);
    else
        CHECK(((const struct lc_nccl_tuner_v5 *)t.table)
                  ->init(&t.context, 77, 4, 2, log, &domains, &constants) == 0);
    CHECK(memcmp((const unsigned char *)&constants, before, sizeof(constants)) == 0);
    return t;
}

static struct tuner begin(int version)
{
    return begin_with(version, log_line);
}

static void end(struct tuner *t)
{
    CHECK(((const struct lc_nccl_tuner_v5 *)t->table)->finalize(t->context) == 0);
    CHECK(dlclose(t->handle) == 0);
}

/* What NCCL's table and answer are after one question. */
struct answer {
    float costs[ALGORITHMS][PROTOCOLS];
    int channels, algorithm, protocol;
};

static struct answer ask(const struct tuner *t, int op, size_t bytes, int algorithms,
                         const char *ruled_out)
{
    struct answer a = { .algorithm = -1, .protocol = -1 };
    float **table = (float **)a.costs;

    for (int i = 0; i < ALGORITHMS; i++) {
        for (int p = 0; p < PROTOCOLS; p++)
            a.costs[i][p] = i < algorithms ? 10.0f + (float)(i + p) : 5; /* beyond NCCL's table */
    }
    if (ruled_out)
        a.costs[ruled_out[0] - '0'][ruled_out[1] - '0'] = -1;
    switch (t->version) {
    case 2:
        CHECK(((const struct lc_nccl_tuner_v2 *)t->table)
                  ->getCollInfo(t->context, op, bytes, 1, 1, 1, &a.algorithm, &a.protocol,
                                &a.channels) == 0);
        break;
    case 3:
        CHECK(((const struct lc_nccl_tuner_v3 *)t->table)
                  ->getCollInfo(t->context, op, bytes, 1, table, algorithms, PROTOCOLS,
                                &a.channels) == 0);
        break;
    default:
        CHECK(((const struct lc_nccl_tuner_v4 *)t->table)
                  ->getCollInfo(t->context, op, bytes, 1, table, algorithms, PROTOCOLS, 1,
                                &a.channels) == 0);
    }
    return a;
}

/* Nothing but this entry was changed; algorithm -1: nothing at all. */
static bool is(const struct tuner *t, const struct answer *a, int algorithms, int algorithm,
               int protocol, int channels, const char *ruled_out)
{
    if (a->channels != channels)
        return false;
    if (t->version == 2 && (a->algorithm != algorithm || a->protocol != protocol))
        return false;
    for (int i = 0; i < ALGORITHMS; i++) {
        for (int p = 0; p < PROTOCOLS; p++) {
            float want = i < algorithms ? 10.0f + (float)(i + p) : 5; /* beyond NCCL's table */

            if (ruled_out && ruled_out[0] - '0' == i && ruled_out[1] - '0' == p)
                want = -1;
            else if (t->version != 2 && i == algorithm && p == protocol)
                want = 0;
            if (a->costs[i][p] != want)
                return false;
        }
    }
    return true;
}

static bool untouched(const struct tuner *t, int op, size_t bytes)
{
    struct answer a = ask(t, op, bytes, 7, NULL);

    return is(t, &a, 7, -1, -1, 0, NULL);
}

static void rules_apply_where_they_may(const struct tuner *t)
{
    struct answer a = ask(t, ALL_REDUCE, 999, 7, NULL);

    CHECK(is(t, &a, 7, 0, 0, 4, NULL));
    a = ask(t, ALL_GATHER, (size_t)1 << 40, 7, NULL);
    CHECK(is(t, &a, 7, 1, 2, 0, NULL));
    a = ask(t, ALL_REDUCE, 1000, 7, NULL); /* its channels NCCL would not bound */
    CHECK(is(t, &a, 7, 2, 2, 0, NULL));
    a = ask(t, ALL_REDUCE, 2000, 7, NULL);
    CHECK(is(t, &a, 7, 6, 2, 2, NULL));
    CHECK(untouched(t, ALL_REDUCE, 3000) && untouched(t, SEND_RECV, 1) && untouched(t, -1, 1));
    if (t->version == 2)
        return; /* NCCL itself looks at its table there */
    a = ask(t, ALL_REDUCE, 999, 7, "00");
    CHECK(is(t, &a, 7, -1, -1, 0, "00")); /* ruled out, NCCL_ALGO for one */
    a = ask(t, ALL_REDUCE, 2000, 6, NULL);
    CHECK(is(t, &a, 6, -1, -1, 0, NULL)); /* a release that does not have it */
}

static void in_order(int version, bool agreeing)
{
    struct tuner t;

    word = 0;
    begun = ended = 0;
    unsetenv("LOONGCOMM_PROFILE_TRUST");
    t = begin(version);
    CHECK(untouched(&t, ALL_REDUCE, 999));
    __atomic_store_n(&word, 1, __ATOMIC_RELEASE);
    if (agreeing)
        rules_apply_where_they_may(&t);
    else
        CHECK(untouched(&t, ALL_REDUCE, 999));
    end(&t);
    CHECK(begun == agreeing && ended == agreeing && (!agreeing || asked_hash));

    CHECK(setenv("LOONGCOMM_PROFILE_TRUST", "yes", 1) == 0);
    word = 0;
    t = begin(version);
    rules_apply_where_they_may(&t);
    end(&t);
    CHECK(begun == agreeing);
}

static void no_logger_and_no_context_do_no_harm(int version)
{
    struct tuner t = begin_with(version, NULL);

    end(&t);
    t = begin(version);
    CHECK(((const struct lc_nccl_tuner_v5 *)t.table)->finalize(NULL) == 0);
    end(&t);
}

static void without_a_profile_nothing_changes(int version)
{
    struct tuner t;

    CHECK(setenv("LOONGCOMM_PROFILE", "/nowhere", 1) == 0);
    said[0] = '\0';
    t = begin(version);
    CHECK(untouched(&t, ALL_REDUCE, 999) && strstr(said, "/nowhere"));
    end(&t);
    unsetenv("LOONGCOMM_PROFILE");
    t = begin(version);
    CHECK(untouched(&t, ALL_REDUCE, 999));
    end(&t);
    CHECK(setenv("LOONGCOMM_PROFILE", profile_path, 1) == 0);
    CHECK(setenv("LOONGCOMM_ENABLE", "no", 1) == 0);
    t = begin(version);
    CHECK(untouched(&t, ALL_REDUCE, 999));
    end(&t);
    unsetenv("LOONGCOMM_ENABLE");
}

static int count(const char *path)
{
    DIR *dir = opendir(path);
    int n = 0;

    CHECK(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* A job makes and ends communicators all the time, and NCCL may load the plugin anew for each. */
static void a_thousand_of_them_take_no_second_and_leave_nothing(int version)
{
    void *kept = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    int fds = count("/proc/self/fd"), tasks = count("/proc/self/task");
    clock_t before = clock();

    for (int i = 0; i < 1000; i++) {
        struct tuner t = begin(version);

        end(&t);
    }
    CHECK(clock() - before <
          CLOCKS_PER_SEC); /* of the processor: this machine may have other work */
    CHECK(kept && dlclose(kept) == 0);
    for (int i = 0; i < 200; i++) {
        struct tuner t = begin(version);

        end(&t);
    }
    CHECK(count("/proc/self/fd") == fds && count("/proc/self/task") == tasks);
}

int main(int argc, char **argv)
{
    bool agreeing;
    int fd = mkstemp(profile_path);

    CHECK(argc == 3 && fd >= 0);
    library = argv[1];
    agreeing = strcmp(argv[2], "agreeing") == 0;
    CHECK(write(fd, PROFILE, sizeof(PROFILE) - 1) == (ssize_t)sizeof(PROFILE) - 1);
    close(fd);
    CHECK(setenv("LOONGCOMM_PROFILE", profile_path, 1) == 0);
    for (int version = 2; version <= 6; version++) {
        in_order(version, agreeing);
        no_logger_and_no_context_do_no_harm(version);
        without_a_profile_nothing_changes(version);
        a_thousand_of_them_take_no_second_and_leave_nothing(version);
    }
    CHECK(lines > 0);
    unlink(profile_path);
    return 0;
}
