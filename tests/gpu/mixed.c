/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts the ranks. The parent of processes touches neither CUDA nor NCCL. See mixed.h. */
#include "tests/gpu/mixed.h"
#include "common/deadline.h"
#include "tests/interpose/said.h"
#include "tests/rig/ranks.h"

#include <dlfcn.h>
#include <getopt.h>

#define USAGE                                                                                         \
    "usage: mixed [--ranks N] [--threads] [--ordered] [--comms 1|2|4] [--seed N] [--seconds S]\n"     \
    "             [--programs N] [--hang S] [--bytes N] [--load LIBRARY] [--says TEXT]...\n"          \
    "Random programs from a seed on, for some seconds, and on until the library has said each TEXT\n" \
    "(with _ for blanks).\n"
#define SOAK_FACTOR 30
#define SAYS        4
#define SAYS_S      100 /* that may take so much longer */
#define AGREED_S    30

struct options {
    int ranks, comms, hang_s, programs, says_n;
    bool threads, ordered;
    uint64_t seed;
    double seconds;
    size_t bytes;
    const char *load, *says[SAYS];
    struct mx_shared *shared;
};

void mx_meet(struct mx_rank *me)
{
    int n = me->n, all = (atomic_fetch_add(&me->shared->arrived, 1) / n + 1) * n;

    while (atomic_load(&me->shared->arrived) < all)
        usleep(200);
}

static bool is_set(const char *name, const char *value)
{
    const char *text = getenv(name);

    return text && strcmp(text, value) == 0;
}

static void read_settings(struct mx_rank *me)
{
    const char *wire = getenv("LOONGCOMM_ALLREDUCE_WIRE"), *least = getenv("LOONGCOMM_MIN_BYTES");

    me->rig = dlsym(RTLD_DEFAULT, "lcrig_enqueue") != NULL;
    me->preloaded = dlsym(RTLD_DEFAULT, "loongcommCallsSeen") != NULL;
    me->min_bytes = least ? strtoul(least, NULL, 10) : 65536;
    if (me->preloaded && wire && strcmp(wire, "data") != 0)
        me->wire = MX_BF16;
    me->fed = is_set("LOONGCOMM_ERROR_FEEDBACK", "yes");
    me->drawn = is_set("LOONGCOMM_ROUNDING", "stochastic");
}

static void make_comms(struct mx_rank *me)
{
    int n = me->n, rank = me->rank;

    mx_now(me, "makes communicators");
    NCCL(ncclCommInitRank(&me->comms[0], n, job_get_id(&me->shared->id, rank), rank));
    for (int i = 1; i < me->comms_n; i++) {
        mx_now(me, "makes communicator %d", i);
        NCCL(ncclCommSplit(me->comms[0], mx_color_in(n, i, rank), mx_rank_in(n, i, rank),
                           &me->comms[i], NULL));
    }
}

static void set_up(struct mx_rank *me, const struct options *options)
{
    static const float half = 0.5f;
    size_t arena = options->bytes + ((size_t)6 << 20);
    int device = job_choose_device(me->rank, me->n), version;

    read_settings(me);
    NCCL(ncclGetVersion(&version));
    me->ordered |= version < NCCL_VERSION(2, 26, 0);
    mx_watch_begin(me, options->hang_s);
    me->device.size = me->host.size = arena;
    CUDA(cudaMalloc((void **)&me->device.base, arena));
    CUDA(cudaHostAlloc((void **)&me->host.base, arena, 0));
    CUDA(cudaMalloc((void **)&me->factor, sizeof(half)));
    CUDA(cudaMemcpy(me->factor, &half, sizeof(half), cudaMemcpyHostToDevice));
    for (int i = 0; i < MX_STREAMS - 1; i++)
        CUDA(cudaStreamCreateWithFlags(&me->streams[i], cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&me->event, cudaEventDisableTiming));
    me->load = mx_load_begin(me, options->load, device);
    make_comms(me);
}

static void tear_down(struct mx_rank *me)
{
    mx_now(me, "destroys communicators");
    for (int i = me->comms_n - 1; i >= 0; i--)
        NCCL(ncclCommDestroy(me->comms[i]));
    mx_watch_end(me);
    mx_load_end(me);
    for (int i = 0; i < MX_TAKES; i++) {
        if (me->takes[i].event)
            CUDA(cudaEventDestroy(me->takes[i].event));
    }
    for (int i = 0; i < MX_STREAMS - 1; i++)
        CUDA(cudaStreamDestroy(me->streams[i]));
    CUDA(cudaEventDestroy(me->event));
    CUDA(cudaFree(me->factor));
    CUDA(cudaFree(me->device.base));
    CUDA(cudaFreeHost(me->host.base));
}

/* Everybody a byte to everybody, and a sum: NCCL connects pairs where all are at it, and the library's ranks agree. */
static void all_pairs(struct mx_rank *me, int comm)
{
    int size = mx_size_in(me->n, comm, me->rank);
    cudaStream_t stream = me->streams[0];

    CUDA(cudaMemsetAsync(me->device.base, 0, 4096, stream));
    NCCL(ncclAllReduce(me->device.base, me->device.base, 64, ncclFloat32, ncclSum, me->comms[comm],
                       stream));
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < size; peer++) {
        NCCL(ncclSend(me->device.base + 1024, 1, ncclUint8, peer, me->comms[comm], stream));
        NCCL(ncclRecv(me->device.base + 2048 + peer, 1, ncclUint8, peer, me->comms[comm], stream));
    }
    NCCL(ncclGroupEnd());
}

/* Rank 0's answer for all. */
static bool all_say(struct mx_rank *me, bool yes)
{
    bool answer;

    if (me->rank == 0)
        atomic_store(&me->shared->word, yes);
    mx_meet(me);
    answer = atomic_load(&me->shared->word) != 0;
    mx_meet(me);
    return answer;
}

/* On to the next epoch but one behind the rings of all, if there will be any: programs run with them. What is there sooner
 * or later than elsewhere is for the programs that have run before. */
static void until_agreed(struct mx_rank *me)
{
    struct lc_deadline until = lc_deadline_in_ms(AGREED_S * 1000);
    const char *peer = getenv("LOONGCOMM_PEER");
    bool rings = me->preloaded && peer && strcmp(peer, "force") == 0;
    int calls = 0, last = 0;

    while (!last || calls < last) {
        mx_now(me, "lets ranks agree, %d calls", calls);
        for (int comm = 0; comm < me->comms_n; comm++)
            all_pairs(me, comm);
        CUDA(cudaStreamSynchronize(me->streams[0]));
        calls++;
        if (!last && all_say(me, !rings || said_count("rings of") >= me->n * me->comms_n ||
                                     lc_deadline_passed(until)))
            for (last = rings ? 64 : 2; rings && last <= 2 * calls; last *= 2)
                ;
    }
    if (me->rank == 0)
        printf("agreed within %d calls\n", calls);
}

static bool all_is_said(const struct options *options)
{
    for (int i = 0; i < options->says_n; i++) {
        if (!said_count(options->says[i]))
            return false;
    }
    return true;
}

static void run_programs(struct mx_rank *me, const struct options *options)
{
    int64_t begun = lc_now_ns();
    uint64_t seed = options->seed;
    double took = 0;
    bool more;

    mx_now(me, "connects everybody with everybody");
    for (int comm = 0; comm < me->comms_n; comm++)
        all_pairs(me, comm);
    CUDA(cudaStreamSynchronize(me->streams[0]));
    do {
        mx_run(me, seed++, options->bytes);
        if (seed == options->seed + 3) {
            until_agreed(me);
            begun = lc_now_ns();
        }
        took = (double)(lc_now_ns() - begun) / 1e9;
        if (me->rank == 0 && took > options->seconds + SAYS_S && !all_is_said(options)) {
            fprintf(stderr, "the library has not said what it had to\n");
            abort();
        }
        more = options->programs ? seed - options->seed < (uint64_t)options->programs
                                 : took < options->seconds || !all_is_said(options);
    } while (all_say(me, more));
    atomic_store(&me->shared->results[me->rank], me->results);
    if (me->rank == 0)
        printf("mixed: %llu programs, seeds %llu to %llu, %.1f s; of rank 0: %llu all-reduces, "
               "%llu reduce-scatters, %llu all-gathers, %llu broadcasts, %llu all-to-alls, "
               "%llu messages, %llu results of %.1f MB\n",
               (unsigned long long)(seed - options->seed), (unsigned long long)options->seed,
               (unsigned long long)seed - 1, took, me->counts[MX_ALL_REDUCE],
               me->counts[MX_REDUCE_SCATTER], me->counts[MX_ALL_GATHER], me->counts[MX_BROADCAST],
               me->counts[MX_ALL_TO_ALL], me->counts[MX_KINDS], (unsigned long long)me->results,
               (double)me->bytes / 1e6);
}

static int run_rank(int rank, int n, void *arg)
{
    const struct options *options = arg;
    struct mx_rank *me = calloc(1, sizeof(*me));

    CHECK(me);
    me->rank = rank;
    me->n = n;
    me->comms_n = options->comms;
    me->threads = options->threads;
    me->ordered = options->ordered;
    me->shared = options->shared;
    set_up(me, options);
    run_programs(me, options);
    tear_down(me);
    free(me);
    return 0;
}

/* The end of what the library has said. */
static void print_said(void)
{
    char text[4096];
    off_t size = lseek(said_file, 0, SEEK_END);
    ssize_t got = pread(said_file, text, sizeof(text),
                        size > (off_t)sizeof(text) ? size - (off_t)sizeof(text) : 0);

    if (got > 0)
        fprintf(stderr, "the library said:\n%.*s", (int)got, text);
}

static bool parse(int argc, char **argv, struct options *options)
{
    static const struct option names[] = {
        {"ranks",            required_argument, NULL, 'r' },
        { "threads",              no_argument, NULL, 't' },
        { "comms",                 required_argument, NULL, 'c' },
        { "seed",required_argument, NULL, 's' },
        { "seconds",               required_argument, NULL, 'd' },
        { "programs",           required_argument, NULL, 'p' },
        { "hang",              required_argument, NULL, 'h' },
        { "bytes",                 required_argument, NULL, 'b' },
        { "load",        required_argument, NULL, 'l' },
        { "says",               required_argument, NULL, 'y' },
        { "ordered",         no_argument, NULL, 'o' },
        { 0             },
    };
    int option;

    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 'r': options->ranks = atoi(optarg); break;
        case 't': options->threads = true; break;
        case 'o': options->ordered = true; break;
        case 'c': options->comms = atoi(optarg); break;
        case 's': options->seed = strtoull(optarg, NULL, 10); break;
        case 'd': options->seconds = atof(optarg); break;
        case 'p': options->programs = atoi(optarg); break;
        case 'h': options->hang_s = atoi(optarg); break;
        case 'b': options->bytes = strtoull(optarg, NULL, 10); break;
        case 'l': options->load = optarg; break;
        case 'y':
            if (options->says_n == SAYS)
                return false;
            for (char *c = optarg; *c; c++)
                if (*c == '_')
                    *c = ' ';
            options->says[options->says_n++] = optarg;
            break;
        default: return false;
        }
    }
    return optind == argc && options->ranks >= 2 && options->ranks <= MX_RANKS &&
           options->comms >= 1 && options->comms <= MX_COMMS && options->hang_s > 0;
}

int main(int argc, char **argv)
{
    struct options options = { .ranks = 2,
                               .comms = 2,
                               .seed = 1,
                               .seconds = 5,
                               .hang_s = 60,
                               .bytes = (size_t)3 << 20 };
    int failed;

    if (!parse(argc, argv, &options)) {
        fputs(USAGE, stderr);
        return 2;
    }
    if (getenv("LCTEST_SOAK")) { /* tests/run --soak */
        options.seconds *= SOAK_FACTOR;
        options.seed = (uint64_t)getpid() * 100000;
    }
    said_begin();
    options.shared = mmap(NULL, sizeof(*options.shared), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(options.shared != MAP_FAILED);
    failed = (options.threads ? lc_ranks_run_threads : lc_ranks_run)(
        options.ranks, run_rank, &options, (int)options.seconds + SAYS_S + 300);
    if (failed == LC_SKIP)
        return LC_SKIP;
    if (failed)
        print_said();
    printf("mixed: %d ranks%s: %s; the library said \"committed\" %d, \"from now on\" %d times\n",
           options.ranks, options.threads ? " as threads" : "", failed ? "FAILED" : "passed",
           said_count("committed"), said_count("from now on"));
    return failed ? 1 : 0;
}
