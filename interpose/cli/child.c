/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/child.h"

#include "common/deadline.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* A grandchild may hold a pipe open after the child is gone, so ends of file are not waited for. */
#define LOOK_EVERY_MS 20

enum {
    RESULT,
    TAIL,
    STATUS,
    PIPES
};

struct pipes {
    int reader[PIPES];
    int writer[PIPES];
};

static void close_all(int *fds)
{
    for (int i = 0; i < PIPES; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
}

/* All numbers are above LC_CLI_RESULT_FD, so that the child's dup2 calls cannot hit one of them. */
static int open_pipes(struct pipes *pipes)
{
    for (int i = 0; i < PIPES; i++)
        pipes->reader[i] = pipes->writer[i] = -1;
    for (int i = 0; i < PIPES; i++) {
        int fds[2];
        int err;

        if (pipe2(fds, O_CLOEXEC) != 0)
            return -errno;
        pipes->reader[i] = fcntl(fds[0], F_DUPFD_CLOEXEC, LC_CLI_RESULT_FD + 1);
        pipes->writer[i] = fcntl(fds[1], F_DUPFD_CLOEXEC, LC_CLI_RESULT_FD + 1);
        err = errno;
        close(fds[0]);
        close(fds[1]);
        if (pipes->reader[i] < 0 || pipes->writer[i] < 0)
            return -err;
        (void)fcntl(pipes->reader[i], F_SETFL, O_NONBLOCK);
    }
    return 0;
}

static void apply_environment(const char *const *env)
{
    for (; env && *env; env++) {
        const char *equals = strchr(*env, '=');
        char name[64];

        if (!equals) {
            (void)unsetenv(*env);
            continue;
        }
        (void)snprintf(name, sizeof(name), "%.*s", (int)(equals - *env), *env);
        (void)setenv(name, equals + 1, 1);
    }
}

/* Signals that end us, and the group of the child that must not outlive us (0: none). */
static const int ending[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM };
#define ENDING (sizeof(ending) / sizeof(*ending))
static volatile sig_atomic_t group;

static void end_with_group(int number)
{
    if (group > 0)
        (void)kill(-(pid_t)group, SIGKILL);
    (void)signal(number, SIG_DFL);
    (void)raise(number); /* delivered when this handler returns */
}

/* What was there before, for signals_restore. */
struct signals {
    struct sigaction action[ENDING];
    struct sigaction child;
    sigset_t mask;
};

/* Leaves the ending signals blocked, since `group` is not known before the fork. */
static void signals_take(struct signals *before)
{
    const struct sigaction plain = { .sa_handler = SIG_DFL };
    const struct sigaction ours = { .sa_handler = end_with_group };
    sigset_t block;

    (void)sigemptyset(&block);
    for (size_t i = 0; i < ENDING; i++) {
        (void)sigaddset(&block, ending[i]);
        (void)sigaction(ending[i], NULL, &before->action[i]);
        if (before->action[i].sa_handler != SIG_IGN)
            (void)sigaction(ending[i], &ours, NULL);
    }
    (void)sigprocmask(SIG_BLOCK, &block, &before->mask);
    (void)sigaction(SIGCHLD, &plain, &before->child); /* where it is ignored, exit codes are lost */
}

static void signals_restore(const struct signals *before)
{
    group = 0;
    for (size_t i = 0; i < ENDING; i++)
        (void)sigaction(ending[i], &before->action[i], NULL);
    (void)sigaction(SIGCHLD, &before->child, NULL);
    (void)sigprocmask(SIG_SETMASK, &before->mask, NULL);
}

/* A fork of a process with one thread, so anything may be called. */
static __attribute__((noreturn)) void become(const struct lc_cli_child *child,
                                             const struct pipes *pipes, pid_t parent)
{
    static const struct rlimit no_core;
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    int err;

    (void)setpgid(0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* ^C ends us, not this group */
    if (getppid() != parent)
        _exit(127);
    (void)setrlimit(RLIMIT_CORE, &no_core);
    (void)dup2(null, STDIN_FILENO);
    (void)dup2(child->loud ? STDERR_FILENO : null, STDOUT_FILENO);
    if (!child->loud)
        (void)dup2(pipes->writer[TAIL], STDERR_FILENO);
    (void)dup2(pipes->writer[RESULT], LC_CLI_RESULT_FD);
    apply_environment(child->env);
    if (child->body) {
        child->body(child->arg);
        _exit(0);
    }
    (void)execvp(child->argv[0], child->argv);
    err = errno;
    (void)!write(pipes->writer[STATUS], &err, sizeof(err));
    _exit(127);
}

/* Takes what is there; false once the other side has closed it. */
static bool drain_result(int fd, struct lc_cli_outcome *out)
{
    char spill[4096];

    for (;;) {
        size_t room = LC_CLI_RESULT_MAX - out->result_len;
        ssize_t got = room ? read(fd, out->result + out->result_len, room)
                           : read(fd, spill, sizeof(spill));

        if (got <= 0)
            return got < 0 && (errno == EAGAIN || errno == EINTR);
        if (room)
            out->result_len += (size_t)got;
        else
            return true; /* a flood is read piecewise, between looks at the clock */
    }
}

static bool drain_tail(int fd, char *tail)
{
    char piece[1024];
    ssize_t got = read(fd, piece, sizeof(piece));
    size_t len = strlen(tail);
    size_t add;

    if (got <= 0)
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    add = (size_t)got;
    for (size_t i = 0; i < add; i++) {
        if (!piece[i])
            piece[i] = ' ';
    }
    if (len + add > LC_CLI_TAIL_MAX) {
        size_t drop = len + add - LC_CLI_TAIL_MAX;

        memmove(tail, tail + drop, len - drop);
        len -= drop;
    }
    memcpy(tail + len, piece, add);
    tail[len + add] = '\0';
    return true;
}

static void listen_to(struct pipes *pipes, struct lc_cli_outcome *out, int wait_ms)
{
    struct pollfd fds[2] = {
        {.fd = pipes->reader[RESULT], .events = POLLIN},
        { .fd = pipes->reader[TAIL],  .events = POLLIN}
    };

    if (poll(fds, 2, wait_ms) <= 0)
        return;
    if (fds[0].revents && !drain_result(fds[0].fd, out)) {
        close(fds[0].fd);
        pipes->reader[RESULT] = -1;
    }
    if (fds[1].revents && !drain_tail(fds[1].fd, out->tail)) {
        close(fds[1].fd);
        pipes->reader[TAIL] = -1;
    }
}

/* What is still in the pipes, at most their capacity. */
static void listen_to_rest(struct pipes *pipes, struct lc_cli_outcome *out)
{
    struct lc_deadline deadline = lc_deadline_in_ms(1000);
    struct pollfd fds[2];

    do {
        listen_to(pipes, out, 0);
        fds[0] = (struct pollfd){ .fd = pipes->reader[RESULT], .events = POLLIN };
        fds[1] = (struct pollfd){ .fd = pipes->reader[TAIL], .events = POLLIN };
    } while (poll(fds, 2, 0) > 0 && !lc_deadline_passed(deadline));
}

static void attend(pid_t pid, int64_t timeout_ms, struct pipes *pipes, struct lc_cli_outcome *out)
{
    struct lc_deadline deadline = lc_deadline_in_ms(timeout_ms);
    bool late = false;
    int status = 0;
    pid_t got;

    while ((got = waitpid(pid, &status, WNOHANG)) == 0 && !late) {
        int left = lc_deadline_left_ms(deadline);

        listen_to(pipes, out, left < LOOK_EVERY_MS ? left : LOOK_EVERY_MS);
        late = lc_deadline_passed(deadline);
    }
    (void)kill(-pid, SIGKILL);
    if (got == 0) {
        (void)kill(pid, SIGKILL);
        (void)waitpid(pid, &status, 0);
    }
    listen_to_rest(pipes, out);
    out->end = late && got == 0      ? LC_CLI_TIMED_OUT
               : WIFSIGNALED(status) ? LC_CLI_SIGNALLED
                                     : LC_CLI_EXITED;
    out->code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

void lc_cli_child_run(const struct lc_cli_child *child, struct lc_cli_outcome *out)
{
    pid_t parent = getpid();
    struct signals before;
    struct pipes pipes;
    int err = open_pipes(&pipes);
    pid_t pid = -1;

    memset(out, 0, sizeof(*out));
    if (!err) {
        (void)fflush(NULL);
        signals_take(&before);
        pid = fork();
        err = pid < 0 ? -errno : 0;
        if (pid <= 0)
            signals_restore(&before);
    }
    if (pid == 0)
        become(child, &pipes, parent);
    close_all(pipes.writer);
    if (pid > 0) {
        (void)setpgid(pid, pid); /* whoever comes first, so that kill(-pid) finds the group */
        group = pid;
        (void)sigprocmask(SIG_SETMASK, &before.mask, NULL);
        attend(pid, child->timeout_ms, &pipes, out);
        if (read(pipes.reader[STATUS], &err, sizeof(err)) == (ssize_t)sizeof(err))
            err = -err;
        signals_restore(&before);
    }
    if (err) {
        out->end = LC_CLI_NOT_STARTED;
        out->code = -err;
    }
    close_all(pipes.reader);
}

const char *lc_cli_child_end(const struct lc_cli_child *child, const struct lc_cli_outcome *outcome)
{
    static char text[128];

    switch (outcome->end) {
    case LC_CLI_EXITED: (void)snprintf(text, sizeof(text), "exit code %d", outcome->code); break;
    case LC_CLI_SIGNALLED:
        (void)snprintf(text, sizeof(text), "killed by signal %d (%s)", outcome->code,
                       strsignal(outcome->code));
        break;
    case LC_CLI_TIMED_OUT:
        (void)snprintf(text, sizeof(text), "not finished within %.1f s",
                       (double)child->timeout_ms / 1000);
        break;
    case LC_CLI_NOT_STARTED:
        (void)snprintf(text, sizeof(text), "cannot be started (%s)", strerror(outcome->code));
        break;
    }
    return text;
}

const char *lc_cli_child_last_line(struct lc_cli_outcome *outcome)
{
    char *end = outcome->tail + strlen(outcome->tail);
    char *newline;

    while (end > outcome->tail && (end[-1] == '\n' || end[-1] == '\r' || end[-1] == ' '))
        *--end = '\0';
    newline = strrchr(outcome->tail, '\n');
    return newline ? newline + 1 : outcome->tail;
}
