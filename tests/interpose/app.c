/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that uses NCCL, in the way its first argument names. Run by interpose.py with and without our
 * library; what it prints on standard output is compared there. */
#include "tests/check.h"
#include "tests/fakes/fake.h"

#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define OK(call) CHECK((call) == ncclSuccess)

static int env_int(const char *name, int dflt)
{
    const char *text = getenv(name);

    return text ? atoi(text) : dflt;
}

static ncclComm_t world(void)
{
    ncclUniqueId id;
    ncclComm_t comm;

    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&comm, env_int("RANKS", 4), id, env_int("RANK", 0)));
    return comm;
}

static unsigned fake_count(const char *name)
{
    void *addr = dlsym(RTLD_DEFAULT, "fake_count");
    fake_count_fn *fn;

    CHECK(addr);
    memcpy(&fn, &addr, sizeof(addr));
    return fn(name);
}

static unsigned long long seen(void)
{
    void *addr = dlsym(RTLD_DEFAULT, "loongcommCallsSeen");
    unsigned long long (*fn)(void);

    if (!addr)
        return 0;
    memcpy(&fn, &addr, sizeof(addr));
    return fn();
}

/* Each function once; a line each with its result and how often the library behind was reached. */
static void every_function(void)
{
    ncclComm_t comm = world();
    ncclComm_t child = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclSimInfo_t sim = NCCL_SIM_INFO_INITIALIZER;
    ncclUniqueId id = { { 0 } };
    ncclWindow_t window;
    ncclRedOp_t op;
    char buf[64];
    float scalar = 2;
    int excluded = 1;

#define TRY(name, ...)                                          \
    do {                                                        \
        int result = name(__VA_ARGS__);                         \
        printf("%s %d %u\n", #name, result, fake_count(#name)); \
    } while (0)
    TRY(ncclAllReduce, buf, buf, 3, ncclFloat, ncclSum, comm, NULL);
    TRY(ncclReduceScatter, buf, buf, 3, ncclHalf, ncclSum, comm, NULL);
    TRY(ncclAllGather, buf, buf, 3, ncclInt8, comm, NULL);
    TRY(ncclAlltoAll, buf, buf, 3, ncclFloat, comm, NULL);
    TRY(ncclBroadcast, buf, buf, 3, ncclFloat, 0, comm, NULL);
    TRY(ncclReduce, buf, buf, 3, ncclFloat, ncclSum, 0, comm, NULL);
    TRY(ncclGather, buf, buf, 3, ncclFloat, 0, comm, NULL);
    TRY(ncclScatter, buf, buf, 3, ncclFloat, 0, comm, NULL);
    TRY(ncclGroupStart);
    TRY(ncclSend, buf, 3, ncclDouble, 1, comm, NULL);
    TRY(ncclRecv, buf, 3, ncclDouble, 1, comm, NULL);
    TRY(ncclGroupEnd);
    TRY(ncclGroupStart);
    TRY(ncclGroupSimulateEnd, &sim);
    TRY(ncclRedOpCreatePreMulSum, &op, &scalar, ncclFloat, ncclScalarHostImmediate, comm);
    TRY(ncclRedOpDestroy, op, comm);
    TRY(ncclCommWindowRegister, comm, buf, sizeof(buf), &window, 0);
    TRY(ncclCommSplit, comm, 0, 0, &child, NULL);
    TRY(ncclCommAbort, child);
    TRY(ncclCommShrink, comm, &excluded, 1, &child, NULL, 0);
#if NCCL_VERSION_CODE >= 22807
    TRY(ncclCommRevoke, comm, 0);
#endif
    TRY(ncclCommInitRankConfig, &child, 2, id, 0, &config);
    TRY(ncclCommInitRankScalable, &child, 2, 0, 1, &id, &config);
    TRY(ncclCommInitAll, &child, 1, NULL);
    TRY(ncclBcast, buf, 3, ncclFloat, 0, comm, NULL);
    TRY(ncclCommFinalize, comm);
    TRY(ncclCommDestroy, comm);
#undef TRY
}

/* NCCL calls ncclBroadcast from ncclBcast, ncclGetUniqueId from ncclCommInitAll. */
static void nested_calls_are_not_counted(void)
{
    unsigned long long one = dlsym(RTLD_DEFAULT, "loongcommCallsSeen") != NULL;
    ncclComm_t comms[2];
    char buf[4];

    OK(ncclCommInitAll(comms, 2, NULL));
    CHECK(fake_count("ncclGetUniqueId") == 1);
    CHECK(seen() == one);
    OK(ncclBcast(buf, 1, ncclInt8, 0, comms[1], NULL));
    CHECK(fake_count("ncclBroadcast") == 1);
    CHECK(seen() == 2ull * one);
}

static void communicators(void)
{
    ncclComm_t comm = world();
    ncclConfig_t named = NCCL_CONFIG_INITIALIZER;
    ncclComm_t half = NULL;
    ncclComm_t grouped = NULL;
    ncclComm_t none = comm;
    ncclComm_t loose = NULL;
    ncclComm_t late = NULL;
    ncclUniqueId id = { { 0 } };
    ncclResult_t state;
    char buf[4];

    OK(ncclAllReduce(buf, buf, 1, ncclInt8, ncclSum, comm, NULL));
    named.commName = "tensor parallel group with a name that is too long";
    OK(ncclCommSplit(comm, 0, 1, &half, &named));
    OK(ncclAllReduce(buf, buf, 2, ncclInt8, ncclSum, half, NULL));
    OK(ncclGroupStart());
    OK(ncclCommSplit(comm, 0, 0, &grouped, NULL));
    CHECK(!grouped);
    OK(ncclGroupEnd());
    OK(ncclAllReduce(buf, buf, 3, ncclInt8, ncclSum, grouped, NULL));
    OK(ncclCommSplit(comm, NCCL_SPLIT_NOCOLOR, 0, &none, NULL));
    CHECK(!none);
    named.blocking = 0;
    named.commName = NULL;
    CHECK(ncclCommInitRankConfig(&loose, 8, id, 0, &named) == ncclInProgress);
    CHECK(ncclCommSplit(loose, 0, 2, &late, NULL) == ncclInProgress);
    do
        OK(ncclCommGetAsyncError(loose, &state));
    while (state == ncclInProgress);
    OK(ncclAllReduce(buf, buf, 4, ncclInt8, ncclSum, late, NULL));
    CHECK(ncclAllReduce(buf, buf, 5, ncclInt8, ncclSum, NULL, NULL) == ncclInvalidArgument);
    OK(ncclCommDestroy(half));
    OK(ncclCommInitRank(&half, 2, id, 0)); /* gets the same handle */
    OK(ncclAllReduce(buf, buf, 6, ncclInt8, ncclSum, half, NULL));
    OK(ncclCommAbort(half));
    OK(ncclCommDestroy(NULL));
}

static void many_small(void)
{
    ncclComm_t comm = world();
    char buf[4];

    for (int i = 0; i < 200; i++)
        OK(ncclAllReduce(buf, buf, 100, ncclFloat, ncclSum, comm, NULL));
    OK(ncclAllReduce(buf, buf, 1 << 20, ncclFloat, ncclSum, comm, NULL));
    for (int i = 0; i < 3; i++) {
        OK(ncclGroupStart());
        OK(ncclSend(buf, 1, ncclFloat, 1, comm, NULL));
        OK(ncclRecv(buf, 1, ncclFloat, 1, comm, NULL));
        OK(ncclGroupEnd());
    }
}

static void use(void)
{
    ncclComm_t comm = world();
    char buf[8];
    int count;

    OK(ncclAllReduce(buf, buf, 2, ncclFloat, ncclSum, comm, NULL));
    OK(ncclAllReduce(buf, buf, 2, ncclFloat, ncclSum, comm, NULL));
    OK(ncclCommCount(comm, &count));
    CHECK(count == 4);
    OK(ncclCommDestroy(comm));
}

/* A child that forks from a process with communicators and uses NCCL and exits normally. */
static void forks(void)
{
    ncclComm_t comm = world();
    char buf[4];
    int status;
    pid_t pid;

    OK(ncclAllReduce(buf, buf, 1, ncclInt8, ncclSum, comm, NULL));
    fflush(stdout);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        OK(ncclAllReduce(buf, buf, 1, ncclInt8, ncclSum, comm, NULL));
        OK(ncclCommDestroy(comm));
        exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void execs(char **argv)
{
    ncclComm_t comm = world();
    char buf[4];
    char *again[] = { argv[0], "many_small", NULL };

    OK(ncclAllReduce(buf, buf, 1, ncclInt8, ncclSum, comm, NULL));
    execv("/proc/self/exe", again);
    CHECK(!"exec failed");
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "nothing";

    if (strcmp(what, "every_function") == 0)
        every_function();
    else if (strcmp(what, "nested") == 0)
        nested_calls_are_not_counted();
    else if (strcmp(what, "communicators") == 0)
        communicators();
    else if (strcmp(what, "many_small") == 0)
        many_small();
    else if (strcmp(what, "use") == 0)
        use();
    else if (strcmp(what, "forks") == 0)
        forks();
    else if (strcmp(what, "execs") == 0)
        execs(argv);
    else
        CHECK(strcmp(what, "nothing") == 0);
    printf("done\n");
    return 0;
}
