/* SPDX-License-Identifier: Apache-2.0
 *
 * Every call that libloongcomm.so makes of libc, the CUDA runtime and the kernels fails once, on one rank: the results
 * are right on all ranks, or the rank that fails and its peers get an error within a second. Never an error before the
 * ranks have committed to something of ours, never ranks with different numbers, a crash, a leak or a hang.
 *
 * argv: rank that fails, number of ranks, then the sites, or none for all. Prints one line per site. */
#include "common/deadline.h"
#include "tests/interpose/fault_lib.h"
#include "tests/interpose/values.h"
#include "tests/rig/test_nccl.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define RANKS_MAX 4
#define COUNT     20011 /* 80 KB: more than LOONGCOMM_MIN_BYTES */
#define SMALL     37
#define SMALLS    9
#define CALLS     80

/* All-reduces on a communicator, of which the last ones are ours: with rings it takes longer to agree. */
#define CALLS_PLAIN 5
#define CALLS_RINGS 34
#define RUN_S       60 /* far beyond the longest wait that is allowed */
#define ERROR_MS    10000
#define NTH_MAX     500

static struct meeting *meeting;

/* What the ranks of one run leave behind; each its own column. Read by the parent when they have ended, `error` also
 * by the others. */
static struct shared {
    uint64_t hash[RANKS_MAX][CALLS];
    bool rounded[RANKS_MAX][2]; /* by communicator: some result was not NCCL's own */
    int finished[RANKS_MAX];
    _Atomic int error[RANKS_MAX]; /* ncclResult_t */
    int error_call[RANKS_MAX], error_comm[RANKS_MAX];
    int64_t error_ns[RANKS_MAX];
    _Atomic int at[RANKS_MAX];   /* communicator that it uses */
    _Atomic int over[RANKS_MAX]; /* has an error or has finished */
    unsigned long calls;         /* at the site, on the rank that fails */
    int pid[RANKS_MAX];
    /* Lines of its own that say so, on the parent's account, and whether all later ones are on the child's. */
    int voted[RANKS_MAX], committed[RANKS_MAX], has_child[RANKS_MAX];
} * shared;

static struct plan {
    int victim, ranks;
    const char *site;
    unsigned long nth;
    int output, calls;
} plan;

/* One rank's program. */
struct program {
    int rank, n, call;
    ncclComm_t comm[2]; /* and its child */
    cudaStream_t stream;
    float *send, *recv;
};

static int64_t now_ns(void)
{
    return lc_deadline_in_ms(0).at_ns;
}

/* The result of one call, of which this rank has elements [first, first + count). */
static void check_result(struct program *p, int which, const float *got, size_t first, bool same)
{
    double diff = 0, norm = 0, error;

    for (size_t i = 0; i < COUNT; i++) {
        double want = 0;

        for (int r = 0; r < p->n; r++)
            want += value(r, p->call, first + i);
        diff += (got[i] - want) * (got[i] - want);
        norm += want * want;
    }
    error = sqrt(diff / norm);
    CHECK(error <= 2.4e-3 * sqrt(p->n));
    if (error > 1e-5)
        shared->rounded[p->rank][which] = true;
    if (same && p->call < CALLS)
        shared->hash[p->rank][p->call] = hash_of(got, COUNT * sizeof(float));
    p->call++;
}

static bool is_error(struct program *p, int which, ncclResult_t result)
{
    if (result == ncclSuccess)
        return false;
    shared->error_call[p->rank] = p->call;
    shared->error_comm[p->rank] = which;
    shared->error_ns[p->rank] = now_ns();
    atomic_store(&shared->error[p->rank], (int)result);
    return true;
}

/* As a watchdog does: until the communicator has an error or the stream is through. */
static bool wait_fails(struct program *p, int which)
{
    ncclResult_t state = ncclSuccess;
    bool done = false;

    while (!done && state == ncclSuccess) {
        usleep(300);
        done = cudaStreamQuery(p->stream) != cudaErrorNotReady;
        NCCL(ncclCommGetAsyncError(p->comm[which], &state)); /* an aborted stream is through, too */
    }
    return is_error(p, which, state);
}

static void fill(struct program *p)
{
    for (size_t i = 0; i < (size_t)COUNT * p->n; i++)
        p->send[i] = value(p->rank, p->call, i);
}

static bool all_reduce_fails(struct program *p, int which)
{
    fill(p);
    if (is_error(p, which,
                 ncclAllReduce(p->send, p->recv, COUNT, ncclFloat, ncclSum, p->comm[which],
                               p->stream)) ||
        wait_fails(p, which))
        return true;
    check_result(p, which, p->recv, 0, true);
    return false;
}

static bool reduce_scatter_fails(struct program *p, int which)
{
    fill(p);
    if (is_error(p, which,
                 ncclReduceScatter(p->send, p->recv, COUNT, ncclFloat, ncclSum, p->comm[which],
                                   p->stream)) ||
        wait_fails(p, which))
        return true;
    check_result(p, which, p->recv, (size_t)p->rank * COUNT, false);
    return false;
}

/* One large tensor and many small ones. */
static bool group_fails(struct program *p, int which)
{
    ncclResult_t result = ncclGroupStart(), ended;
    size_t at = 0;

    fill(p);
    for (int i = 0; result == ncclSuccess && i <= SMALLS; i++) {
        size_t count = i == SMALLS ? COUNT - at : SMALL;

        result = ncclAllReduce(p->send + at, p->recv + at, count, ncclFloat, ncclSum,
                               p->comm[which], p->stream);
        at += count;
    }
    ended = ncclGroupEnd();
    if (is_error(p, which, result != ncclSuccess ? result : ended) || wait_fails(p, which))
        return true;
    check_result(p, which, p->recv, 0, true);
    return false;
}

static const char *said(void)
{
    static char text[1 << 16];
    ssize_t bytes = pread(plan.output, text, sizeof(text) - 1, 0);

    text[bytes > 0 ? bytes : 0] = '\0';
    return text;
}

/* Lines of a rank that hold `what`. */
static int lines_with(int rank, const char *what)
{
    char mark[32];
    int lines = 0;

    (void)snprintf(mark, sizeof(mark), "loongcomm[%d] ", shared->pid[rank]);
    for (const char *at = said(), *end; (at = strstr(at, mark)); at = end) {
        const char *found = strstr(at, what);

        end = at + strcspn(at, "\n");
        lines += found && found < end;
    }
    return lines;
}

static void go_on_with_child(const struct program *p)
{
    shared->voted[p->rank] = lines_with(p->rank, "voted at");
    shared->committed[p->rank] = lines_with(p->rank, "committed at");
    shared->has_child[p->rank] = 1;
}

/* Has the rank said it of the communicator? Under load it may be only the second that the ranks agree on. */
static bool has_said(int rank, int which, const char *what, const int *parent)
{
    if (!shared->has_child[rank])
        return which == 0 && lines_with(rank, what) > 0;
    return which == 0 ? parent[rank] > 0 : lines_with(rank, what) > parent[rank];
}

/* The first copies carry what tells that memory is shared, which must be noticed, however many calls that takes. */
static bool must_be_noticed(void)
{
    return strcmp(plan.site, "lost_copy") == 0 && plan.nth <= 3;
}

static bool is_noticed(const struct program *p)
{
    if (!must_be_noticed())
        return true;
    meeting_wait(meeting, p->n);
    if (p->rank == 0) /* looks for all: it may be said between two looks */
        atomic_store(&meeting->word, strstr(said(), "another machine") != NULL);
    meeting_wait(meeting, p->n);
    return atomic_load(&meeting->word);
}

static bool program_fails(struct program *p)
{
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    bool fails = false;

    NCCL(ncclCommSplit(p->comm[0], 0, p->rank, &p->comm[1], NULL));
    usleep(10000); /* the control threads find each other */
    for (int which = 0; which < 2; which++) {
        if (which == 1)
            go_on_with_child(p);
        atomic_store(&shared->at[p->rank], which);
        for (int i = 0; !fails && (i < plan.calls || !is_noticed(p)); i++) {
            CHECK(i < plan.calls || !lc_deadline_passed(until));
            fails = all_reduce_fails(p, which);
            if (plan.calls > CALLS_PLAIN)
                usleep(1000); /* set-up takes several rounds between the control threads */
        }
        fails = fails || group_fails(p, which) || reduce_scatter_fails(p, which);
    }
    return fails;
}

/* The others are to learn of it by themselves, before an abort tells them, if they use the same communicator. */
static void wait_for_others(struct program *p)
{
    struct lc_deadline until = lc_deadline_in_ms(ERROR_MS + 500);
    bool all = false;

    while (!all && !lc_deadline_passed(until)) {
        all = true;
        for (int r = 0; r < p->n; r++)
            all = all && (atomic_load(&shared->over[r]) ||
                          atomic_load(&shared->at[r]) != shared->error_comm[p->rank]);
        usleep(1000);
    }
}

/* Memory of ours that a fault keeps from being given back is ours to lose; NCCL and CUDA are asked about the rest. */
static void end(struct program *p, bool failed)
{
    atomic_store(&shared->over[p->rank], 1);
    if (failed) {
        wait_for_others(p);
        NCCL(ncclCommAbort(p->comm[1]));
        NCCL(ncclCommAbort(p->comm[0]));
        CHECK(setenv("LCRIG_LEAKS", "0", 1) == 0); /* an abort frees nothing on the device */
    } else {
        NCCL(ncclCommDestroy(p->comm[1]));
        NCCL(ncclCommDestroy(p->comm[0]));
    }
    (void)cudaStreamSynchronize(p->stream);
    CUDA(cudaStreamDestroy(p->stream));
    CUDA(cudaFree(p->send));
    CUDA(cudaFree(p->recv));
}

static void arm(const char *site, unsigned long nth)
{
    __typeof__(lcfault_arm) *lib_arm = dlsym(RTLD_DEFAULT, "lcfault_arm");

    CHECK(lib_arm && lib_arm(site, nth));
}

static int rank_main(int rank, int n, void *arg)
{
    __typeof__(lcfault_calls) *calls = dlsym(RTLD_DEFAULT, "lcfault_calls");
    struct program p = { .rank = rank, .n = n };
    struct rlimit none = { 0 };
    bool failed;

    setrlimit(RLIMIT_CORE, &none);
    CHECK(dup2(plan.output, STDERR_FILENO) >= 0);
    shared->pid[rank] = (int)getpid();
    CUDA(cudaSetDevice(rank));
    p.send = device_alloc((size_t)COUNT * n * sizeof(float));
    p.recv = device_alloc((size_t)COUNT * n * sizeof(float));
    p.stream = stream_up();
    if (rank == plan.victim)
        arm(plan.site, plan.nth);
    p.comm[0] = comm_up(meeting, rank, n);
    failed = program_fails(&p);
    shared->finished[rank] = !failed;
    end(&p, failed);
    if (rank == plan.victim)
        shared->calls = calls();
    return 0;
}

/* ---- what is to be said about a run ---- */

struct outcome {
    unsigned long runs, ours, plain, errors;
    int worst_ms; /* from the first error to the last */
};

static const char *judge_numbers(void)
{
    for (int r = 1; r < plan.ranks; r++) {
        for (int c = 0; c < CALLS; c++) {
            if (shared->hash[0][c] && shared->hash[r][c] &&
                shared->hash[0][c] != shared->hash[r][c])
                return "ranks have different numbers";
        }
    }
    return NULL;
}

/* From the first rank's error to the last one's, and how many ranks have one. */
static int64_t spread_ns(int *errors)
{
    int64_t first = INT64_MAX, last = 0;

    *errors = 0;
    for (int r = 0; r < plan.ranks; r++) {
        if (!shared->error[r])
            continue;
        ++*errors;
        first = shared->error_ns[r] < first ? shared->error_ns[r] : first;
        last = shared->error_ns[r] > last ? shared->error_ns[r] : last;
    }
    return *errors ? last - first : 0;
}

/* A communicator on which ranks fail has shown results that are ours, or the log tells that it has committed. */
static bool has_committed(int rank)
{
    int which = shared->error_comm[rank];
    bool committed = false;

    for (int r = 0; r < plan.ranks; r++)
        committed = committed || shared->rounded[r][which] ||
                    has_said(r, which, "committed at", shared->committed);
    return committed;
}

/* Before they have voted, ranks have no errors of ours (of NCCL's, once the rank that fails has aborted). From then on the
 * others may commit, and a rank that could not hear of it has one. */
static bool may_fail(int rank)
{
    return has_committed(rank) ||
           has_said(rank, shared->error_comm[rank], "voted at", shared->voted);
}

static const char *judge_errors(struct outcome *sum)
{
    int errors;
    int64_t ns = spread_ns(&errors);
    bool rounded = shared->rounded[0][0] && shared->rounded[0][1], committed = false;

    sum->errors += errors > 0;
    sum->ours += !errors && rounded;
    sum->plain += !errors && !rounded;
    if (!errors)
        return NULL;
    for (int r = 0; r < plan.ranks; r++) {
        if (!shared->error[r] && !shared->finished[r])
            return "a rank has neither an error nor results";
        if (shared->error[r] && r != plan.victim && shared->error[r] != ncclRemoteError)
            return "a peer's error is not ncclRemoteError";
        if (shared->error[r] && (r == plan.victim || !shared->error[plan.victim]) && !may_fail(r))
            return "an error before anything was agreed on";
        committed |= shared->error[r] && has_committed(r);
    }
    if (!committed)
        return NULL; /* peers wait in NCCL, which tells them when the rank that has failed aborts */
    if (ns / 1000000 > sum->worst_ms)
        sum->worst_ms = (int)(ns / 1000000);
    return ns > ERROR_MS * INT64_C(1000000) ? "a peer learnt of it too late" : NULL;
}

/* Giving back is what fails: the memory stays where it is. */
static bool may_leak(void)
{
    return strcmp(plan.site, "cudaFree") == 0 || strcmp(plan.site, "cudaEventDestroy") == 0 ||
           strcmp(plan.site, "cudaFreeHost") == 0 || strcmp(plan.site, "cudaStreamDestroy") == 0;
}

static const char *judge(int killed, const int *fate, struct outcome *sum)
{
    const char *fault;

    if (killed)
        return "hang";
    for (int r = 0; r < plan.ranks; r++) {
        if (WIFSIGNALED(fate[r]))
            return "crash or failed check";
        if (WEXITSTATUS(fate[r]) == 86 && !may_leak())
            return "leak";
        if (WEXITSTATUS(fate[r]) != 0 && WEXITSTATUS(fate[r]) != 86)
            return "exit status";
    }
    /* Of a lost copy nobody hears but by what is missing: a number written to a peer, or read of one's own. */
    if (must_be_noticed() && !strstr(said(), "another machine"))
        return "a peer that does not share memory was not noticed";
    fault = judge_numbers();
    return fault ? fault : judge_errors(sum);
}

static void show(const char *fault)
{
    printf("%s:%lu on rank %d of %d: %s\n", plan.site, plan.nth, plan.victim, plan.ranks, fault);
    for (int r = 0; r < plan.ranks; r++)
        printf("  rank %d: ours %d %d, error %d in call %d, finished %d\n", r,
               shared->rounded[r][0], shared->rounded[r][1], shared->error[r],
               shared->error_call[r], shared->finished[r]);
    printf("%s\n", said());
}

/* One run; false: it must not be so. */
static bool run(struct outcome *sum)
{
    int fate[RANKS_MAX], killed;
    const char *fault;

    meeting_reset(meeting);
    memset(shared, 0, sizeof(*shared));
    CHECK(ftruncate(plan.output, 0) == 0);
    killed = lc_ranks_watch(plan.ranks, rank_main, NULL, RUN_S, fate);
    sum->runs++;
    fault = judge(killed, fate, sum);
    if (fault)
        show(fault);
    return !fault;
}

/* The nth call fails, for n from 1 until a run makes fewer calls. A timer's calls never end: NTH_MAX. */
static int sweep(const char *site)
{
    struct outcome sum = { 0 };
    int failed = 0;

    plan.site = site;
    for (plan.nth = 1; plan.nth <= NTH_MAX; plan.nth++) {
        if (!run(&sum)) {
            if (++failed >= 3)
                break;
        } else if (shared->calls < plan.nth) {
            break;
        }
    }
    printf(
        "%-36s rank %d: %3lu runs: %3lu ours, %3lu plain, %3lu errors (peers within %d ms), %d failed\n",
        site, plan.victim, sum.runs, sum.ours, sum.plain, sum.errors, sum.worst_ms, failed);
    fflush(stdout);
    return failed;
}

int main(int argc, char **argv)
{
    __typeof__(lcfault_site) *site = dlsym(RTLD_DEFAULT, "lcfault_site");
    const char *peer = getenv("LOONGCOMM_PEER");
    bool rings = peer && strcmp(peer, "force") == 0;
    struct lc_deadline until = lc_deadline_in_ms(PATIENCE_MS);
    struct outcome sum = { 0 };
    int failed = 0;

    CHECK(argc > 2 && site);
    plan = (struct plan){ .victim = atoi(argv[1]),
                          .ranks = atoi(argv[2]),
                          .site = "malloc",
                          .calls = rings ? CALLS_RINGS : CALLS_PLAIN,
                          .output = memfd_create("stderr", MFD_CLOEXEC) };
    CHECK(plan.ranks <= RANKS_MAX && plan.output >= 0 &&
          fcntl(plan.output, F_SETFL, O_APPEND) == 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    meeting = meeting_new();
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    /* Nothing fails: the ranks do agree, unless the machine has not let them all that time. */
    do
        CHECK(run(&sum) && !lc_deadline_passed(until));
    while (!sum.ours || (rings && !strstr(said(), "rings of")));
    for (int i = 3; i < argc; i++)
        failed += sweep(argv[i]);
    for (unsigned i = 0; argc == 3 && site(i); i++) {
        if (rings ||
            strcmp(site(i), "lost_copy") != 0) /* without rings nothing is looked for in a copy */
            failed += sweep(site(i));
    }
    return failed != 0;
}
