/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that are not alike: other settings, another version, no library, switched off. All get NCCL's results, and one
 * line in the whole job names the rank. argv: the library, the same with another version of its votes, the kernels.
 *
 * The cases run side by side, for they mostly wait: a rank that does not come is named after some seconds. */
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <sys/wait.h>

#define RANKS    3
#define COUNT    20011
#define CALLS    10
#define WAIT_MS  60000 /* for what takes five seconds */
#define TEXT_MAX 65536

struct unequal {
    const char *name;
    int rank; /* the one that is not like the others */
    const char *variable, *value;
    const char *said; /* in the one line */
    bool waits;
};

static const struct unequal cases[] = {
    {"equal",      RANKS, "",                    "",      NULL,                                         false},
    { "settings",  1,     "LOONGCOMM_MIN_BYTES", "32k",
     "have the LOONGCOMM_ settings of rank 0: all of its calls stay with NCCL; rank 1\n",               false},
    { "ctas",      2,     "LOONGCOMM_MAX_CTAS",  "64",
     "have the LOONGCOMM_ settings of rank 0: all of its calls stay with NCCL; rank 2\n",               false},
    { "version",   2,     "LD_PRELOAD",          "other",
     "have the version of loongcomm of rank 0: all of its calls stay with NCCL; rank 2\n",              false},
    { "without",   2,     "LD_PRELOAD",          "",      "stay with NCCL; rank 2\n",                   true },
    { "off",       1,     "LOONGCOMM_ENABLE",    "no",    "stay with NCCL; rank 1\n",                   true },
    { "without_0", 0,     "LD_PRELOAD",          "",      "(rank 0, as a rule) does not run loongcomm", false},
    { "off_0",     0,     "LOONGCOMM_ENABLE",    "no",    "(rank 0, as a rule) does not run loongcomm", false},
};
#define CASES (sizeof(cases) / sizeof(*cases))

/* ---- one rank: argv "rank", rank, descriptor of the meeting, case ---- */

static double error_of(const float *got, int n)
{
    double diff = 0, norm = 0;

    for (size_t i = 0; i < COUNT; i++) {
        double want = 0;

        for (int r = 0; r < n; r++)
            want += sin((double)(float)(i * (size_t)(r + 1)));
        diff += (got[i] - want) * (got[i] - want);
        norm += want * want;
    }
    return sqrt(diff / norm);
}

static int count_lines(const char *text, const char *part)
{
    int count = 0;

    for (const char *at = text; (at = strstr(at, part)); at += strlen(part))
        count++;
    return count;
}

/* What all ranks have said, which stays the same for long enough that a rank that says it, too, would have. */
static void wait_for_line(void)
{
    struct lc_deadline until = lc_deadline_in_ms(WAIT_MS);
    static char text[TEXT_MAX];

    do {
        CHECK(!lc_deadline_passed(until));
        usleep(100000);
        CHECK(pread(STDERR_FILENO, text, sizeof(text) - 1, 0) >= 0);
    } while (count_lines(text, "loongcomm[") == 0);
    usleep(2000000);
}

static int rank_main(int rank, struct meeting *meeting, const struct unequal *which)
{
    ncclComm_t comm = comm_up(meeting, rank, RANKS);
    cudaStream_t stream = stream_up();
    float *send = device_alloc(COUNT * sizeof(float)), *recv = device_alloc(COUNT * sizeof(float));
    bool ours = false;

    for (size_t i = 0; i < COUNT; i++)
        send[i] = (float)sin((double)(float)(i * (size_t)(rank + 1)));
    for (int call = 0; call < CALLS; call++) {
        NCCL(ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, comm, stream));
        CUDA(cudaStreamSynchronize(stream));
        ours = ours || error_of(recv, RANKS) > 1e-5;
        usleep(20000);
        if (which->rank ==
            RANKS) /* all alike: the ranks agree, sooner or later, at the same call */
            call = ours ? CALLS : 0;
    }
    CHECK(ours == (which->rank == RANKS));
    if (which->waits)
        wait_for_line();
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaFree(send));
    CUDA(cudaFree(recv));
    return 0;
}

/* ---- the job ---- */

static void exec_rank(int rank, int meeting_fd, const struct unequal *which, char **libs)
{
    const char *value = strcmp(which->value, "other") == 0 ? libs[1] : which->value;
    char rank_text[16], fd_text[16], case_text[16];

    snprintf(rank_text, sizeof(rank_text), "%d", rank);
    snprintf(fd_text, sizeof(fd_text), "%d", meeting_fd);
    snprintf(case_text, sizeof(case_text), "%d", (int)(which - cases));
    setenv("RANK", rank_text, 1);
    setenv("LD_PRELOAD", libs[0], 1);
    setenv("LOONGCOMM_ALLREDUCE_WIRE", "bf16", 1);
    setenv("LOONGCOMM_SCRATCH", "1m", 1);
    setenv("LOONGCOMM_REPORT", "off", 1);
    setenv("LOONGCOMM_KERNELS", libs[2], 1);
    if (rank == which->rank)
        setenv(which->variable, value, 1);
    execl("/proc/self/exe", "unequal", "rank", rank_text, fd_text, case_text, NULL);
    _exit(1);
}

/* Exit status of one case's process. */
static int judge(const struct unequal *which, int output, bool failed)
{
    static char text[TEXT_MAX];
    ssize_t bytes = pread(output, text, sizeof(text) - 1, 0);
    int lines = count_lines(text, "loongcomm[");

    CHECK(bytes >= 0);
    if (!failed && lines == (which->said != NULL) && (!which->said || strstr(text, which->said)))
        return 0;
    fprintf(stderr, "%s: %d lines%s, wanted \"%s\":\n%s\n", which->name, lines,
            failed ? ", a rank failed" : "", which->said ? which->said : "nothing", text);
    return 1;
}

static int run_case(const struct unequal *which, char **libs)
{
    int fd = memfd_create("meeting", 0), output = memfd_create("stderr", MFD_CLOEXEC);
    pid_t pids[RANKS];
    bool failed = false;

    CHECK(fd >= 0 && output >= 0 && ftruncate(fd, sizeof(struct meeting)) == 0);
    for (int rank = 0; rank < RANKS; rank++) {
        pids[rank] = fork();
        CHECK(pids[rank] >= 0);
        if (pids[rank] == 0) {
            CHECK(dup2(output, STDERR_FILENO) >= 0);
            exec_rank(rank, fd, which, libs);
        }
    }
    for (int rank = 0; rank < RANKS; rank++) {
        int fate;

        CHECK(waitpid(pids[rank], &fate, 0) == pids[rank]);
        failed = failed || fate != 0;
    }
    return judge(which, output, failed);
}

static int main_of_rank(char **argv)
{
    struct meeting *meeting = mmap(NULL, sizeof(*meeting), PROT_READ | PROT_WRITE, MAP_SHARED,
                                   atoi(argv[1]), 0);

    CHECK(meeting != MAP_FAILED);
    alarm(200);
    return rank_main(atoi(argv[0]), meeting, &cases[atoi(argv[2])]);
}

int main(int argc, char **argv)
{
    pid_t pids[CASES];
    int failed = 0;

    if (argc == 5 && strcmp(argv[1], "rank") == 0)
        return main_of_rank(argv + 2);
    CHECK(argc == 4);
    for (size_t i = 0; i < CASES; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0)
            _exit(run_case(&cases[i], argv + 1));
    }
    for (size_t i = 0; i < CASES; i++) {
        int fate;

        CHECK(waitpid(pids[i], &fate, 0) == pids[i]);
        failed += fate != 0;
    }
    return failed != 0;
}
