/* SPDX-License-Identifier: Apache-2.0
 *
 * Forks the ranks, waits for them until a deadline, sums up. The parent touches neither CUDA nor NCCL. See
 * verify.h. */
#include "tests/gpu/verify.h"
#include "common/deadline.h"
#include "tests/check.h"
#include "tests/rig/ranks.h"

#include <dlfcn.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define USAGE                                                                                           \
    "usage: verify [--ranks N] [--quick] [--limit SECONDS] [--only PART] [--seconds N] [--loongcomm]\n" \
    "parts: collectives, pairs, comms, order, sums. --loongcomm: fail unless it is preloaded.\n"        \
    "--seconds: of all-reduces in the part sums, which is left out without.\n"
#define MAX_FAILURES 20

struct options {
    int ranks;
    int id_fd[2]; /* a pipe: rank 0 writes the id once for each other rank */
    bool quick, loongcomm;
    int limit_s;
    int seconds;
    const char *only;
};

static const char *const op_names[VF_OPS] = { "AllReduce", "ReduceScatter", "AllGather", "AlltoAll",
                                              "Broadcast", "Reduce",        "Gather",    "Scatter",
                                              "Send",      "Recv" };
static int own_rank; /* for messages; set once at the start */

/* --- one rank --- */

void vf_die(const char *call, const char *error, const char *file, int line)
{
    fprintf(stderr, "rank %d: %s:%d: %s: %s\n", own_rank, file, line, call, error);
    _exit(1);
}

void vf_fail(struct vf_rank *rank, const char *fmt, ...)
{
    char text[384]; /* one write a line: lines of the ranks do not mix */
    va_list args;

    if (rank->failures++ >= MAX_FAILURES)
        return;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    fprintf(stderr, "rank %d: %s\n", rank->rank, text);
}

void vf_note(const struct vf_rank *rank, const char *fmt, ...)
{
    va_list args;

    if (rank->rank != 0)
        return;
    va_start(args, fmt);
    printf("skipped: ");
    vprintf(fmt, args);
    printf("\n");
    va_end(args);
}

void vf_compare(struct vf_rank *rank, const void *device, const void *want, size_t bytes,
                const char *what)
{
    const unsigned char *wanted = want;

    if (bytes)
        VF_CUDA(
            cudaMemcpyAsync(rank->host_got, device, bytes, cudaMemcpyDeviceToHost, rank->stream));
    VF_CUDA(cudaStreamSynchronize(rank->stream));
    rank->checks++;
    if (!bytes || memcmp(rank->host_got, wanted, bytes) == 0)
        return;
    for (size_t i = 0; i < bytes; i++) {
        if (rank->host_got[i] != wanted[i]) {
            vf_fail(rank, "%s: byte %zu of %zu is %02x, not %02x", what, i, bytes,
                    rank->host_got[i], wanted[i]);
            return;
        }
    }
}

static void share_id(struct vf_rank *rank, const struct options *options)
{
    if (rank->rank == 0) {
        VF_NCCL(ncclGetUniqueId(&rank->id));
        for (int i = 1; i < rank->ranks; i++)
            CHECK(write(options->id_fd[1], &rank->id, sizeof(rank->id)) == sizeof(rank->id));
    } else {
        /* Writes of this size are whole, and so are reads. */
        CHECK(read(options->id_fd[0], &rank->id, sizeof(rank->id)) == sizeof(rank->id));
    }
    close(options->id_fd[0]);
    close(options->id_fd[1]);
}

static void *host_memory(size_t bytes)
{
    void *p = malloc(bytes);

    CHECK(p);
    return p;
}

static void set_up(struct vf_rank *rank, const struct options *options)
{
    int major = 0;

    if (cudaGetDeviceCount(&rank->devices) != cudaSuccess || rank->devices == 0) {
        if (rank->rank == 0)
            printf("SKIPPED: no GPU here: nothing was verified\n");
        fflush(stdout);
        _exit(LC_SKIP);
    }
    rank->device = rank->rank % rank->devices;
    if (rank->ranks > rank->devices) {
        /* NCCL refuses two ranks of one machine on one GPU: each round of ranks is another machine. */
        char node[32];

        snprintf(node, sizeof(node), "node%d", rank->rank / rank->devices);
        setenv("NCCL_HOSTID", node, 0);
        setenv("LOONGCOMM_HOSTID", "one", 0); /* for us they stay on one */
    }
    VF_CUDA(cudaSetDevice(rank->device));
    VF_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, rank->device));
    rank->fp8_sums = major >= 9;
    if (!rank->fp8_sums)
        vf_note(rank, "reductions of 1-byte floats need compute capability 9, this is %d", major);
    rank->room = VF_BIG * 8 * (size_t)rank->ranks + 4 * VF_GUARD;
    VF_CUDA(cudaMalloc((void **)&rank->device_send, rank->room));
    VF_CUDA(cudaMalloc((void **)&rank->device_recv, rank->room));
    rank->host_in = host_memory(rank->room);
    rank->host_want = host_memory(rank->room);
    rank->host_got = host_memory(rank->room);
    VF_CUDA(cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking));
    share_id(rank, options);
    VF_NCCL(ncclCommInitRank(&rank->comm, rank->ranks, rank->id, rank->rank));
}

static void tear_down(struct vf_rank *rank)
{
    VF_NCCL(ncclCommDestroy(rank->comm));
    VF_CUDA(cudaStreamDestroy(rank->stream));
    VF_CUDA(cudaFree(rank->device_send));
    VF_CUDA(cudaFree(rank->device_recv));
    free(rank->host_in);
    free(rank->host_want);
    free(rank->host_got);
}

static void check_preload(struct vf_rank *rank)
{
    unsigned long long (*seen)(void) = NULL;
    unsigned long long made = 0, counted;

    *(void **)&seen = dlsym(RTLD_DEFAULT, "loongcommCallsSeen");
    if (!seen) {
        vf_fail(rank, "libloongcomm.so is not preloaded");
        return;
    }
    for (int op = 0; op < VF_OPS; op++)
        made += rank->calls[op];
    counted = seen();
    if (counted < made)
        vf_fail(rank, "the library saw %llu calls of %llu", counted, made);
}

/* Read by verify_report.py, which holds it against the exit report. */
static void print_calls(const struct vf_rank *rank)
{
    char line[512];
    int used = snprintf(line, sizeof(line), "calls rank %d:", rank->rank);

    for (int op = 0; op < VF_OPS; op++)
        used += snprintf(line + used, sizeof(line) - (size_t)used, " %s=%llu", op_names[op],
                         rank->calls[op]);
    printf("%s\n", line);
    fflush(stdout);
}

static int run_rank(int number, int ranks, void *arg)
{
    const struct options *options = arg;
    static const struct {
        const char *name;
        void (*run)(struct vf_rank *rank);
    } parts[] = {
        {"collectives", vf_collectives},
        { "pairs",      vf_pairs      },
        { "comms",      vf_comms      },
        { "order",      vf_order      },
        { "sums",       vf_sums       }
    };
    struct vf_rank rank = { .rank = number,
                            .ranks = ranks,
                            .quick = options->quick,
                            .seconds = options->seconds };
    int version;

    own_rank = rank.rank;
    setvbuf(stdout, NULL, _IOFBF, 4096);
    set_up(&rank, options);
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        int64_t begun = lc_now_ns();

        if (options->only && strcmp(options->only, parts[i].name) != 0)
            continue;
        parts[i].run(&rank);
        if (rank.rank == 0)
            printf("%-12s %6.1f s\n", parts[i].name, (double)(lc_now_ns() - begun) / 1e9);
    }
    if (options->loongcomm)
        check_preload(&rank);
    VF_NCCL(ncclGetVersion(&version));
    tear_down(&rank);
    if (rank.rank == 0)
        printf("NCCL %d, %d device%s, %llu checks on each rank\n", version, rank.devices,
               rank.devices == 1 ? "" : "s", rank.checks);
    print_calls(&rank);
    if (rank.failures > MAX_FAILURES)
        fprintf(stderr, "rank %d: %u failures in all\n", rank.rank, rank.failures);
    return rank.failures ? 1 : 0;
}

/* --- the parent --- */

static int run_all(struct options *options)
{
    int64_t begun = lc_now_ns();
    int failed;

    CHECK(pipe(options->id_fd) == 0);
    failed = lc_ranks_run(options->ranks, run_rank, options, options->limit_s);
    if (failed == LC_SKIP)
        return LC_SKIP;
    printf("verify: %d ranks%s: %s, %.1f s\n", options->ranks,
           options->loongcomm ? ", preloaded" : "", failed ? "FAILED" : "passed",
           (double)(lc_now_ns() - begun) / 1e9);
    return failed ? 1 : 0;
}

static bool parse(int argc, char **argv, struct options *options)
{
    static const struct option names[] = {
        {"ranks",      required_argument, NULL, 'r' },
        { "quick",        no_argument, NULL, 'q' },
        { "limit",           required_argument, NULL, 'l' },
        { "only",required_argument, NULL, 'o' },
        { "seconds",         required_argument, NULL, 's' },
        { "loongcomm",     no_argument, NULL, 'c' },
        { 0       },
    };
    int option;

    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 'r': options->ranks = atoi(optarg); break;
        case 'q': options->quick = true; break;
        case 'l': options->limit_s = atoi(optarg); break;
        case 'o': options->only = optarg; break;
        case 's': options->seconds = atoi(optarg); break;
        case 'c': options->loongcomm = true; break;
        default: return false;
        }
    }
    return optind == argc && options->ranks >= 2 && options->ranks <= VF_MAX_RANKS &&
           options->limit_s > 0;
}

int main(int argc, char **argv)
{
    struct options options = { .ranks = 2, .limit_s = 120 };

    if (!parse(argc, argv, &options)) {
        fputs(USAGE, stderr);
        return 2;
    }
    return run_all(&options);
}
