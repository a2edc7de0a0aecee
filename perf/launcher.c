/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts, asks and ends worker processes. */
#include "perf/bench.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORKER_FD   3 /* where a worker finds its socket and its progress page */
#define PROGRESS_FD 4
#define QUIT_MS     10000

extern char **environ;

struct env {
    char **words; /* NULL at the end; all of them ours */
    size_t count;
};

static void env_free(struct env *env)
{
    for (size_t i = 0; i < env->count; i++)
        free(env->words[i]);
    free(env->words);
    *env = (struct env){ 0 };
}

/* Takes over `word`. */
static int env_add(struct env *env, char *word)
{
    char **words;

    if (!word)
        return -ENOMEM;
    words = realloc(env->words, (env->count + 2) * sizeof(*words));
    if (!words) {
        free(word);
        return -ENOMEM;
    }
    words[env->count++] = word;
    words[env->count] = NULL;
    env->words = words;
    return 0;
}

__attribute__((format(printf, 2, 3))) static int env_printf(struct env *env, const char *fmt, ...)
{
    va_list args;
    char *word;
    int len;

    va_start(args, fmt);
    len = vasprintf(&word, fmt, args);
    va_end(args);
    return env_add(env, len < 0 ? NULL : word);
}

/* The user's list, for the plain variant without libraries of ours, behind ours for the other. */
static int env_preload(struct env *env, const char *library)
{
    const char *inherited = getenv("LD_PRELOAD");
    char *copy = strdup(inherited ? inherited : "");
    char *rest = copy;
    char *list = NULL;
    char *part;
    int len = asprintf(&list, "LD_PRELOAD=%s", library ? library : "");

    while (copy && len >= 0 && (part = strsep(&rest, ": "))) {
        char *longer;

        if (!*part || strstr(part, "libloongcomm.so"))
            continue;
        len = asprintf(&longer, "%s%s%s", list, list[strlen(list) - 1] == '=' ? "" : ":", part);
        free(list);
        list = len < 0 ? NULL : longer;
    }
    free(copy);
    return env_add(env, len < 0 ? NULL : list);
}

/* The user's variables for the side; what is inherited under their names has been left out. */
static int env_own(struct env *env, const struct lc_bench_options *options)
{
    int err = 0;

    for (int i = 0; i < options->n_env && !err; i++)
        err = env_add(env, strdup(options->env[i]));
    return err;
}

static bool is_own(const char *word, const struct lc_bench_options *options)
{
    for (int i = 0; options && i < options->n_env; i++) {
        size_t length = (size_t)(strchr(options->env[i], '=') - options->env[i]) + 1;

        if (strncmp(word, options->env[i], length) == 0)
            return true;
    }
    return false;
}

static bool is_set(const char *name, const struct lc_bench_options *options)
{
    char word[64];

    snprintf(word, sizeof(word), "%s=", name);
    return getenv(name) || is_own(word, options);
}

/* NCCL refuses two ranks of one machine on one GPU; with a host id each it takes them for several
 * machines, while ours keeps seeing one. What the user has set stands. */
static int env_hosts(struct env *env, const struct lc_bench_options *options, int rank)
{
    char host[64] = "host";
    int err = 0;

    gethostname(host, sizeof(host) - 1);
    if (!is_set("NCCL_HOSTID", options))
        err = env_printf(env, "NCCL_HOSTID=loongcomm-bench-%s-%d", host, rank);
    if (!err && !is_set("LOONGCOMM_HOSTID", options))
        err = env_printf(env, "LOONGCOMM_HOSTID=loongcomm-bench-%s", host);
    return err;
}

static bool has_prefix(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* `options`: those of the second side; NULL for the first. */
static int env_make(const struct lc_bench_options *options, bool shared_gpus, int rank,
                    struct env *out)
{
    const char *library = options && !options->no_preload ? options->library : NULL;
    struct env env = { 0 };
    int err = 0;

    for (char **word = environ; *word && !err; word++) {
        if (!has_prefix(*word, "LD_PRELOAD=") && !has_prefix(*word, "LCRIG_RANK=") &&
            !is_own(*word, options))
            err = env_add(&env, strdup(*word));
    }
    if (!err)
        err = env_preload(&env, library);
    if (!err && !is_set("LOONGCOMM_REPORT", options))
        err = env_printf(&env, "LOONGCOMM_REPORT=off"); /* the table is the report */
    if (!err)
        err = env_printf(&env, "LCRIG_RANK=%d", rank);
    if (!err && shared_gpus)
        err = env_hosts(&env, options, rank);
    if (!err && options)
        err = env_own(&env, options);
    if (err) {
        env_free(&env);
        return err;
    }
    *out = env;
    return 0;
}

static int exec_worker(int fd, int progress_fd, const char *variant, char **env, pid_t *out)
{
    posix_spawn_file_actions_t actions;
    char launcher[16];
    char *argv[] = { "loongcomm-bench", "worker", launcher, (char *)variant, NULL };
    int err;

    snprintf(launcher, sizeof(launcher), "%d", (int)getpid());
    err = posix_spawn_file_actions_init(&actions);
    if (err)
        return -err;
    err = posix_spawn_file_actions_adddup2(&actions, fd, WORKER_FD);
    if (!err)
        err = posix_spawn_file_actions_adddup2(&actions, progress_fd, PROGRESS_FD);
    if (!err)
        err = posix_spawn(out, "/proc/self/exe", &actions, NULL, argv, env);
    posix_spawn_file_actions_destroy(&actions);
    return -err;
}

/* Above the numbers that workers get, so that one dup2 never overwrites the other's source. */
static int move_up(int fd)
{
    int high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, PROGRESS_FD + 1);

    if (fd >= 0)
        close(fd);
    return high;
}

static int make_progress(int *out_fd, struct lc_bench_progress **out)
{
    int fd = move_up(memfd_create("loongcomm-bench", MFD_CLOEXEC));
    void *page;
    int err;

    if (fd < 0)
        return -errno;
    if (ftruncate(fd, sizeof(**out))) {
        err = -errno;
        goto close_fd;
    }
    page = mmap(NULL, sizeof(**out), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        err = -errno;
        goto close_fd;
    }
    *out_fd = fd;
    *out = page;
    return 0;

close_fd:
    close(fd);
    return err;
}

/* `options`, `name`: of the side. */
static int start_child(const struct lc_bench_options *options, bool shared_gpus, const char *name,
                       int rank, struct lc_bench_child *out)
{
    struct lc_bench_child child = { 0 };
    struct env env = { 0 };
    int pair[2];
    int progress_fd = -1;
    int err;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return -errno;
    pair[1] = move_up(pair[1]);
    if (pair[1] < 0) {
        err = -errno;
        goto close_pair;
    }
    err = make_progress(&progress_fd, &child.progress);
    if (err)
        goto close_pair;
    err = env_make(options, shared_gpus, rank, &env);
    if (err)
        goto drop_progress;
    err = exec_worker(pair[1], progress_fd, name, env.words, &child.pid);
    env_free(&env);
    if (err)
        goto drop_progress;
    close(progress_fd);
    close(pair[1]);
    child.fd = pair[0];
    *out = child;
    return 0;

drop_progress:
    munmap(child.progress, sizeof(*child.progress));
    close(progress_fd);
close_pair:
    close(pair[0]);
    if (pair[1] >= 0)
        close(pair[1]);
    return err;
}

/* Waits up to `ms`, then kills. Returns the wait status. */
static int reap(pid_t pid, int ms)
{
    struct lc_deadline deadline = lc_deadline_in_ms(ms);
    const struct timespec pause = { .tv_nsec = 2000000 };
    int status = 0;

    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (lc_deadline_passed(deadline)) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return status;
        }
        nanosleep(&pause, NULL);
    }
    return status;
}

static void end_child(struct lc_bench_child *child, int ms)
{
    if (child->pid == 0)
        return;
    close(child->fd);
    reap(child->pid, ms);
    munmap(child->progress, sizeof(*child->progress));
    *child = (struct lc_bench_child){ 0 };
}

static void complain_dead(const struct lc_bench_set *set, int index, const char *what)
{
    struct lc_bench_child *child = &set->children[index];
    int status = reap(child->pid, 1000);

    fprintf(stderr, "loongcomm-bench: %s (%s): rank %d died", what, set->name, set->first + index);
    if (WIFSIGNALED(status))
        fprintf(stderr, " of signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        fprintf(stderr, " with exit code %d\n", WEXITSTATUS(status));
    close(child->fd);
    munmap(child->progress, sizeof(*child->progress));
    *child = (struct lc_bench_child){ 0 };
}

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* One line: who has not answered, and who of them is furthest behind. */
static void complain_hang(const struct lc_bench_set *set, const bool *answered, const char *what)
{
    uint64_t least = UINT64_MAX;
    int behind = 0;
    int named = 0;

    fprintf(stderr, "loongcomm-bench: %s (%s): hangs: no answer within %d s from rank", what,
            set->name, set->timeout_s);
    for (int i = 0; i < set->count; i++) {
        uint64_t returned = load(&set->children[i].progress->returned);

        if (answered[i])
            continue;
        fprintf(stderr, "%s %d", named++ ? "," : "", set->first + i);
        if (returned < least) {
            least = returned;
            behind = i;
        }
    }
    if (load(&set->children[behind].progress->entered) > least)
        fprintf(stderr, "; rank %d is furthest behind, inside call %llu\n", set->first + behind,
                (unsigned long long)least + 1);
    else
        fprintf(stderr, "; rank %d is furthest behind, after call %llu\n", set->first + behind,
                (unsigned long long)least);
}

/* 0: a whole reply without error. Says what is wrong otherwise. */
static int receive(struct lc_bench_set *set, int index, const char *what,
                   struct lc_bench_reply *reply)
{
    ssize_t bytes = recv(set->children[index].fd, reply, sizeof(*reply), MSG_DONTWAIT);

    if (bytes < (ssize_t)offsetof(struct lc_bench_reply, us)) {
        complain_dead(set, index, what);
        return -EPIPE;
    }
    reply->text[sizeof(reply->text) - 1] = '\0';
    if (reply->error) {
        fprintf(stderr, "loongcomm-bench: %s (%s): rank %d: %s\n", what, set->name,
                set->first + index, reply->text);
        return reply->error;
    }
    return 0;
}

/* Receives from those who have something to say. The number of answers, or -errno. */
static int receive_ready(struct lc_bench_set *set, const struct pollfd *polls, const char *what,
                         struct lc_bench_reply *replies, bool *answered)
{
    int count = 0;

    for (int i = 0; i < set->count; i++) {
        int err;

        if (answered[i] || !polls[i].revents)
            continue;
        err = receive(set, i, what, &replies[i]);
        if (err)
            return err;
        answered[i] = true;
        count++;
    }
    return count;
}

static int collect(struct lc_bench_set *set, const char *what, struct lc_bench_reply *replies)
{
    struct lc_deadline deadline = lc_deadline_in_ms((int64_t)set->timeout_s * 1000);
    struct pollfd polls[LC_BENCH_MAX_RANKS];
    bool answered[LC_BENCH_MAX_RANKS] = { false };
    int missing = set->count;

    while (missing > 0) {
        int ready;

        for (int i = 0; i < set->count; i++)
            polls[i] = (struct pollfd){ answered[i] ? -1 : set->children[i].fd, POLLIN, 0 };
        ready = poll(polls, (nfds_t)set->count, lc_deadline_left_ms(deadline));
        if (ready < 0 && errno != EINTR)
            return -errno;
        if (ready == 0) {
            complain_hang(set, answered, what);
            return -ETIMEDOUT;
        }
        ready = ready < 0 ? 0 : receive_ready(set, polls, what, replies, answered);
        if (ready < 0)
            return ready;
        missing -= ready;
    }
    return 0;
}

static int tell(struct lc_bench_set *set, int index, const struct lc_bench_request *request,
                const char *what)
{
    ssize_t bytes = send(set->children[index].fd, request, sizeof(*request), MSG_NOSIGNAL);

    if (bytes == (ssize_t)sizeof(*request))
        return 0;
    complain_dead(set, index, what);
    return -EPIPE;
}

int lc_bench_set_ask(struct lc_bench_set *set, const struct lc_bench_request *request,
                     const char *what, struct lc_bench_reply *replies)
{
    for (int i = 0; i < set->count; i++) {
        int err = tell(set, i, request, what);

        if (err)
            return err;
    }
    return collect(set, what, replies);
}

void lc_bench_set_close(struct lc_bench_set *set)
{
    for (int i = 0; i < set->count; i++)
        end_child(&set->children[i], 0);
    free(set->children);
    *set = (struct lc_bench_set){ 0 };
}

int lc_bench_set_quit(struct lc_bench_set *set, struct lc_bench_reply *replies)
{
    const struct lc_bench_request quit = { .kind = LC_BENCH_ASK_QUIT };
    int err = lc_bench_set_ask(set, &quit, "ending", replies);

    for (int i = 0; i < set->count; i++) {
        struct lc_bench_child *child = &set->children[i];
        int status;

        if (err || child->pid == 0)
            continue;
        status = reap(child->pid, QUIT_MS);
        munmap(child->progress, sizeof(*child->progress));
        close(child->fd);
        *child = (struct lc_bench_child){ 0 };
        if (status != 0) {
            fprintf(stderr, "loongcomm-bench: rank %d (%s) did not end well: status 0x%x\n",
                    set->first + i, set->name, (unsigned)status);
            err = -EIO;
        }
    }
    return err;
}

int lc_bench_probe(int timeout_s, struct lc_bench_machine *out)
{
    struct lc_bench_reply *reply = malloc(sizeof(*reply));
    struct lc_bench_child child = { 0 };
    struct lc_bench_set set = { .name = "nccl",
                                .count = 1,
                                .timeout_s = timeout_s,
                                .children = &child };
    int err;

    if (!reply)
        return -ENOMEM;
    err = start_child(NULL, false, set.name, 0, &child);
    if (!err)
        err = collect(&set, "looking at the machine", reply);
    if (!err)
        *out = reply->machine;
    end_child(&child, 1000);
    free(reply);
    return err;
}

/* The id comes from rank 0's worker, which must live on as NCCL's rendezvous. */
int lc_bench_set_connect(struct lc_bench_set *set, struct lc_bench_bootstrap *boot,
                         const struct lc_bench_machine *machine,
                         const struct lc_bench_request *init, struct lc_bench_reply *replies)
{
    struct lc_bench_request request = *init;
    int err = 0;

    request.kind = LC_BENCH_ASK_ID;

    if (set->first == 0) {
        struct lc_bench_set first = *set;

        first.count = 1;
        err = lc_bench_set_ask(&first, &request, "making a unique id", replies);
        request.id = replies[0].id;
    }
    if (!err)
        err = boot->ops->bcast(boot, &request.id, sizeof(request.id));
    request.kind = LC_BENCH_ASK_INIT;
    for (int i = 0; i < set->count && !err; i++) {
        request.rank = set->first + i;
        request.device = (boot->local_rank + i) % machine->gpus;
        err = tell(set, i, &request, "connecting");
    }
    return err ? err : collect(set, "connecting", replies);
}

int lc_bench_set_open(const struct lc_bench_options *options, enum lc_bench_variant variant,
                      struct lc_bench_bootstrap *boot, int ranks,
                      const struct lc_bench_machine *machine, struct lc_bench_reply *replies,
                      struct lc_bench_set *out)
{
    struct lc_bench_set set = {
        .name = lc_bench_side_name(options, variant),
        .first = boot->rank,
        .timeout_s = options->timeout_s,
    };
    const struct lc_bench_request init = { .ranks = ranks, .measures = options->measures };
    int count = boot->size > 1 ? 1 : ranks;
    int local_ranks = boot->size > 1 ? boot->local_size : ranks;
    char ranks_text[16];
    int err = 0;

    set.children = calloc((size_t)count, sizeof(*set.children));
    if (!set.children)
        return -ENOMEM;
    (void)snprintf(ranks_text, sizeof(ranks_text), "%d", local_ranks);
    setenv("LOCAL_WORLD_SIZE", ranks_text, 0); /* as torchrun does */
    while (set.count < count && !err) {
        err = start_child(variant == LC_BENCH_OURS ? options : NULL, local_ranks > machine->gpus,
                          set.name, set.first + set.count, &set.children[set.count]);
        set.count += !err;
    }
    if (err)
        fprintf(stderr, "loongcomm-bench: cannot start a worker: %s\n", strerror(-err));
    if (!err)
        err = collect(&set, "starting", replies);
    if (!err)
        err = lc_bench_set_connect(&set, boot, machine, &init, replies);
    if (err) {
        lc_bench_set_close(&set);
        return err;
    }
    *out = set;
    return 0;
}
