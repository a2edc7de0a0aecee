/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that opens NCCL with dlopen, as vLLM, JAX and CuPy do: opener HOW [LIBRARY]. What it prints is
 * compared by interpose.py. Built with NCCL's header for the types only. */
#include "tests/check.h"
#include "tests/interpose/args.h"

#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <string.h>

static void *lib;

static void *find(const char *name)
{
    void *addr = dlsym(lib, name);

    CHECK(addr);
    return addr;
}

#define NCCL(name) ((__typeof(name) *)find(#name))

static void print_maps(void)
{
    char line[1024];
    FILE *maps = fopen("/proc/self/maps", "r");

    CHECK(maps);
    while (fgets(line, sizeof(line), maps)) {
        if (strstr(line, " r-xp ") && (strstr(line, "nccl") || strstr(line, "loongcomm.so")))
            fputs(strchr(line, '/'), stdout);
    }
    fclose(maps);
}

static void use(void)
{
    ncclUniqueId id;
    ncclComm_t comm;
    int version;
    char buf[8];

    memset(&id, 7, sizeof(id));
    CHECK(NCCL(ncclGetVersion)(&version) == ncclSuccess);
    CHECK(NCCL(ncclCommInitRank)(&comm, 4, id, 0) == ncclSuccess);
    for (int i = 0; i < 2; i++)
        CHECK(NCCL(ncclAllReduce)(buf, buf, 2, ncclFloat, ncclSum, comm, NULL) == ncclSuccess);
    CHECK(NCCL(ncclCommCount)(comm, &version) == ncclSuccess && version == 4);
    CHECK(((__typeof(ncclCommCount) *)find("pncclCommCount"))(comm, &version) == ncclSuccess);
    CHECK(NCCL(ncclCommDestroy)(comm) == ncclSuccess);
    print_maps();
}

/* Functions that no library, or only a newer one, has. */
static void missing(void)
{
    int value;

    for (int i = 0; i < 2; i++)
        printf("%d %d %d %s\n", NCCL(ncclCommCount)(NULL, &value), NCCL(ncclGetVersion)(&value),
               ((int (*)(void))find("ncclCommGrow"))(), NCCL(ncclGetErrorString)(ncclSuccess));
}

static void arguments(void)
{
    args_fn *fn = (args_fn *)find("ncclSetEncryption");
    struct args_big big = ARGS_BIG;

    for (int i = 0; i < 2; i++) { /* by way of the search, and straight */
        struct args_result result = fn(1, 2, 3, 4, 5, 6, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 7,
                                       9.5, big);

        CHECK(result.sum == ARGS_SUM);
        CHECK(result.floats == ARGS_FLOATS);
    }
}

static void *first_call(void *barrier)
{
    int version = 0;

    (void)pthread_barrier_wait(barrier);
    CHECK(NCCL(ncclGetVersion)(&version) == ncclSuccess && version > 0);
    return NULL;
}

static void race(void)
{
    pthread_barrier_t barrier;
    pthread_t threads[16];

    CHECK(pthread_barrier_init(&barrier, NULL, 16) == 0);
    for (int i = 0; i < 16; i++)
        CHECK(pthread_create(&threads[i], NULL, first_call, &barrier) == 0);
    for (int i = 0; i < 16; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    print_maps();
}

/* Every call searches, and finds no NCCL. */
static void *search(void *barrier)
{
    int version = 0;

    (void)pthread_barrier_wait(barrier);
    for (int i = 0; i < 1000; i++)
        CHECK(NCCL(ncclGetVersion)(&version) == ncclSystemError);
    return NULL;
}

static void search_in_vain(void)
{
    pthread_barrier_t barrier;
    pthread_t threads[4];

    CHECK(pthread_barrier_init(&barrier, NULL, 4) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, search, &barrier) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc > 1);
    lib = dlopen(argc > 2 ? argv[2] : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(lib);
    if (strcmp(argv[1], "use") == 0)
        use();
    else if (strcmp(argv[1], "missing") == 0)
        missing();
    else if (strcmp(argv[1], "arguments") == 0)
        arguments();
    else if (strcmp(argv[1], "race") == 0)
        race();
    else if (strcmp(argv[1], "search_in_vain") == 0)
        search_in_vain();
    else
        CHECK(strcmp(argv[1], "nothing") == 0);
    printf("done\n");
    return 0;
}
