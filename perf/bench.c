/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/bench.h"

#include "common/input.h"
#include "perf/net/net.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef LC_LIBDIR
#define LC_LIBDIR "../lib"
#endif

enum {
    EXIT_USAGE = 2,
};

/* Beside this program: in the build tree, in one folder, or where both are installed. */
static int find_library(struct lc_bench_options *options, char *path)
{
    static const char *const places[] = { "../interpose/", "", LC_LIBDIR "/", "../lib/" };
    char self[PATH_MAX];
    char candidate[2 * PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);

    if (options->library) {
        if (!realpath(options->library, path)) {
            fprintf(stderr, "loongcomm-bench: --lib %s: %s\n", options->library, strerror(errno));
            return -ENOENT;
        }
        if (!lc_input_is_loadable(path)) {
            fprintf(stderr, "loongcomm-bench: --lib %s: it is no regular file\n", options->library);
            return -EINVAL;
        }
        options->library = path;
        return 0;
    }
    self[length < 0 ? 0 : length] = '\0';
    if (strrchr(self, '/'))
        strrchr(self, '/')[1] = '\0';
    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        snprintf(candidate, sizeof(candidate), "%s%slibloongcomm.so",
                 places[i][0] == '/' ? "" : self, places[i]);
        if (realpath(candidate, path)) {
            options->library = path;
            return 0;
        }
    }
    fprintf(stderr,
            "loongcomm-bench: libloongcomm.so is not near this program; name it with --lib, or "
            "leave it out with --variants nccl\n");
    return -ENOENT;
}

static bool under_mpi(void)
{
    static const char *const signs[] = { "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK" };

    for (size_t i = 0; i < sizeof(signs) / sizeof(*signs); i++) {
        if (getenv(signs[i]))
            return true;
    }
    return false;
}

static int open_bootstrap(struct lc_bench *bench)
{
    int err = under_mpi() ? lc_bench_bootstrap_mpi(&bench->boot)
                          : lc_bench_bootstrap_local(&bench->boot);

    if (err == -ENOTSUP)
        fprintf(stderr, "loongcomm-bench: started by mpirun, but built without MPI\n");
    else if (err)
        fprintf(stderr, "loongcomm-bench: cannot reach the other launchers: %s\n", strerror(-err));
    bench->boot.timeout_s = bench->options->timeout_s;
    return err;
}

static int choose_ranks(struct lc_bench *bench)
{
    int asked = bench->options->ranks;

    bench->ranks = bench->boot.size;
    if (bench->boot.size == 1)
        bench->ranks = asked ? asked : bench->machine.gpus;
    if (bench->ranks < 2 || (bench->machine.rig && !asked && bench->boot.size == 1))
        bench->ranks = 2; /* the rig has any number of devices */
    if (asked && asked != bench->ranks) {
        fprintf(stderr, "loongcomm-bench: --ranks %d under mpirun with %d processes\n", asked,
                bench->ranks);
        return -EINVAL;
    }
    return 0;
}

/* See env_hosts in launcher.c: ranks that share a GPU are hosts of their own. */
static int count_nodes(const struct lc_bench *bench)
{
    int local = bench->boot.size > 1 ? bench->boot.local_size : bench->ranks;

    if (local > bench->machine.gpus && !getenv("NCCL_HOSTID"))
        return bench->ranks;
    return (bench->ranks + local - 1) / local;
}

/* Processes that share a GPU without MPS take turns of milliseconds. */
static void warn_without_mps(const struct lc_bench *bench)
{
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    int local = bench->boot.size > 1 ? bench->boot.local_size : bench->ranks;
    char control[PATH_MAX];

    snprintf(control, sizeof(control), "%s/control", folder ? folder : "/tmp/nvidia-mps");
    if (bench->boot.rank == 0 && !bench->machine.rig && local > bench->machine.gpus &&
        access(control, F_OK))
        fprintf(stderr,
                "loongcomm-bench: %d ranks share %d GPU(s) without MPS: they are time-sliced, and "
                "no figure means anything\n",
                local, bench->machine.gpus);
}

static int open_sets(struct lc_bench *bench)
{
    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        int err;

        if (!bench->options->variants[v])
            continue;
        err = lc_bench_set_open(bench->options, v, &bench->boot, bench->ranks, &bench->machine,
                                bench->replies, &bench->sets[v]);
        if (err)
            return err;
    }
    return bench->boot.ops->barrier(&bench->boot);
}

static int run_cases(struct lc_bench *bench, const struct lc_bench_case *cases, int count,
                     struct lc_bench_output *output)
{
    struct lc_deadline end;
    int settled = lc_bench_settle(bench, &cases[0], bench->options->settle_s);

    if (settled)
        return settled;
    end = lc_deadline_in_ms((int64_t)(bench->options->budget_s * 1000));
    for (int i = 0; i < count; i++) {
        struct lc_bench_result result;
        double left_s = lc_deadline_left_ms(end) / 1e3;
        int err;

        if (output)
            lc_bench_output_progress(output, i, count, &cases[i]);
        err = lc_bench_measure(bench, &cases[i], left_s / (count - i), &result);
        if (err)
            return err;
        if (output)
            lc_bench_output_result(output, &cases[i], &result);
        lc_bench_result_free(&result);
    }
    return 0;
}

static int quit_sets(struct lc_bench *bench)
{
    int err = 0;

    for (int v = 0; v < LC_BENCH_VARIANTS; v++) {
        if (bench->sets[v].count && !err)
            err = lc_bench_set_quit(&bench->sets[v], bench->replies);
    }
    return err;
}

int lc_bench_begin(struct lc_bench *bench)
{
    const struct lc_bench_options *options = bench->options;
    int err;

    if (open_bootstrap(bench))
        return -EIO;
    err = lc_bench_probe(options->timeout_s, &bench->machine);
    if (!err)
        err = choose_ranks(bench);
    if (err)
        return err;
    bench->rotate = options->rotate;
    if (options->rotate == SIZE_MAX)
        bench->rotate = bench->machine.rig ? 0 : 2 * bench->machine.l2_bytes;
    bench->nodes = count_nodes(bench);
    warn_without_mps(bench);
    bench->replies = calloc((size_t)bench->ranks, sizeof(*bench->replies));
    bench->gathered = calloc((size_t)bench->boot.size * LC_BENCH_MAX_ITERS,
                             sizeof(*bench->gathered));
    return bench->replies && bench->gathered ? 0 : -ENOMEM;
}

int lc_bench_end(struct lc_bench *bench, int err)
{
    free(bench->replies);
    free(bench->gathered);
    if (bench->boot.ops && err)
        bench->boot.ops->abort(&bench->boot);
    else if (bench->boot.ops)
        bench->boot.ops->close(&bench->boot);
    return err == -EINVAL ? EXIT_USAGE : err ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int measure_all(struct lc_bench *bench, int argc, char **argv)
{
    struct lc_bench_output *output = NULL;
    struct lc_bench_case *cases = NULL;
    int count = lc_bench_cases(bench->options, bench->ranks, &cases);
    int err = count < 0 ? count : open_sets(bench);

    if (!err && bench->boot.rank == 0)
        err = lc_bench_output_open(bench, argc, argv, &output);
    if (!err)
        err = run_cases(bench, cases, count, output);
    if (!err)
        err = quit_sets(bench);
    for (int v = 0; v < LC_BENCH_VARIANTS; v++)
        lc_bench_set_close(&bench->sets[v]);
    if (output) {
        int close_err = lc_bench_output_close(output, !err);

        err = err ? err : close_err;
    }
    free(cases);
    return err;
}

static int bench_main(int argc, char **argv)
{
    static struct lc_bench_options options;
    static struct lc_bench bench = { .options = &options };
    static char library[PATH_MAX];
    int err;

    if (lc_bench_options_parse(argc - 1, argv + 1, &options))
        return EXIT_USAGE;
    if (options.variants[LC_BENCH_OURS] && !options.no_preload && find_library(&options, library))
        return EXIT_USAGE;
    err = lc_bench_begin(&bench);
    if (!err)
        err = measure_all(&bench, argc, argv);
    return lc_bench_end(&bench, err);
}

/* For scripts: what this build can do. */
static int print_build_info(void)
{
#ifdef LC_HAVE_MPI
    puts("mpi");
#endif
#ifdef LC_HAVE_CJSON
    puts("cjson");
#endif
    return EXIT_SUCCESS;
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0)
            return true;
    }
    return false;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";

    /* worker LAUNCHER VARIANT: see exec_worker in launcher.c, which leaves it these descriptors */
    if (strcmp(what, "worker") == 0 && argc == 4)
        return lc_bench_worker(3, 4, (pid_t)atoi(argv[2]), argv[3]);
    if (strcmp(what, "ways") == 0)
        return lc_bench_ways(argc - 1, argv + 1);
    if (asks_for_help(argc, argv)) {
        (strcmp(what, "net") == 0 ? lc_bnet_usage : lc_bench_usage)(stdout);
        return EXIT_SUCCESS;
    }
    if (strcmp(what, "net") == 0)
        return lc_bnet_main(argc - 1, argv + 1);
    if (strcmp(what, "compare") == 0)
        return lc_bench_compare(argc - 1, argv + 1);
    if (strcmp(what, "plot") == 0)
        return lc_bench_plot(argc - 1, argv + 1);
    if (strcmp(what, "build-info") == 0)
        return print_build_info();
    if (lc_bench_op_find(what) >= 0)
        return bench_main(argc, argv);
    lc_bench_usage(stderr);
    return EXIT_USAGE;
}
