/* SPDX-License-Identifier: Apache-2.0 */
#include "common/output.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int write_all(int fd, const char *text, size_t size)
{
    while (size) {
        ssize_t done = write(fd, text, size);

        if (done < 0 && errno != EINTR)
            return -errno;
        if (done == 0)
            return -EIO;
        if (done > 0) {
            text += done;
            size -= (size_t)done;
        }
    }
    return 0;
}

/* Takes away what our write raised in this thread, but not one that was pending before. */
static void swallow(int signal, const sigset_t *before)
{
    const struct timespec now = { 0 };
    sigset_t only;

    if (sigismember(before, signal))
        return;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, signal);
    while (sigtimedwait(&only, NULL, &now) < 0 && errno == EINTR)
        ;
}

int lc_output_write(int fd, const char *text, size_t size)
{
    sigset_t before;
    sigset_t block;
    sigset_t old;
    bool blocked;
    int err;

    (void)sigemptyset(&before);
    (void)sigpending(&before);
    (void)sigemptyset(&block);
    (void)sigaddset(&block, SIGPIPE);
    (void)sigaddset(&block, SIGXFSZ);
    blocked = pthread_sigmask(SIG_BLOCK, &block, &old) == 0;
    err = write_all(fd, text, size);
    if (!blocked)
        return err;
    if (err == -EPIPE)
        swallow(SIGPIPE, &before);
    else if (err == -EFBIG)
        swallow(SIGXFSZ, &before);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    return err;
}

void lc_output_defuse(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        if (*c < ' ' || *c == 0x7f)
            *c = '?';
        else if (*c == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0)
            *c = c[1] = '?';
    }
}

const char *lc_output_bytes(uint64_t bytes, char out[LC_OUTPUT_BYTES])
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
    double value = (double)bytes;
    int unit = 0;

    for (; value >= 1024 && unit < 6; unit++)
        value /= 1024;
    (void)snprintf(out, LC_OUTPUT_BYTES, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return out;
}

static int open_stream(const char *path, int flags, FILE **out)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | flags, 0666);
    int err;

    if (fd < 0)
        return -errno;
    *out = fdopen(fd, "w");
    if (*out)
        return 0;
    err = -errno;
    close(fd);
    return err;
}

static bool is_same(const struct stat *st, int fd)
{
    struct stat other;

    return fstat(fd, &other) == 0 && st->st_dev == other.st_dev && st->st_ino == other.st_ino;
}

/* 0, or why nothing may be put at `path`. */
static int check_place(const char *path)
{
    struct stat st;

    if (stat(path, &st) != 0)
        return 0;
    if (!S_ISREG(st.st_mode))
        return S_ISDIR(st.st_mode) ? -EISDIR : -ENXIO;
    return is_same(&st, STDOUT_FILENO) || is_same(&st, STDERR_FILENO) ? -EADDRINUSE : 0;
}

/* Processes of other machines or containers may have our number, so a name that is there belongs to somebody. */
static int open_temporary(struct lc_output_file *file)
{
    int err = -EEXIST;

    for (int i = 0; i < 100 && err == -EEXIST; i++) {
        struct timespec now = { 0 };

        (void)clock_gettime(CLOCK_REALTIME, &now);
        if (asprintf(&file->temporary, "%s.tmp%d-%09ld", file->target, (int)getpid(), now.tv_nsec) <
            0)
            return -ENOMEM;
        err = open_stream(file->temporary, O_EXCL | O_NOFOLLOW, &file->out);
        if (err)
            free(file->temporary);
    }
    return err;
}

int lc_output_open(struct lc_output_file *file, const char *path)
{
    struct lc_output_file mine = { .path = path };
    int err = check_place(path);

    if (err)
        return err;
    mine.target = realpath(path, NULL); /* a link stays, and leads to the new file */
    if (!mine.target)
        mine.target = strdup(path);
    if (!mine.target)
        return -ENOMEM;
    err = open_temporary(&mine);
    if (err)
        free(mine.target);
    else
        *file = mine;
    return err;
}

int lc_output_extend(struct lc_output_file *file, const char *suffix)
{
    char *longer;
    int err;

    if (asprintf(&longer, "%s%s", file->target, suffix) < 0)
        return -ENOMEM;
    err = check_place(longer);
    if (err) {
        free(longer);
        return err;
    }
    free(file->target);
    file->target = longer;
    return 0;
}

int lc_output_close(struct lc_output_file *file, bool keep)
{
    int err = 0;

    if (!file->out)
        return 0;
    if (ferror(file->out))
        err = -EIO;
    if (fclose(file->out) != 0 && !err)
        err = -errno;
    if (!err && keep && rename(file->temporary, file->target) != 0)
        err = -errno;
    if (err || !keep)
        (void)unlink(file->temporary);
    free(file->temporary);
    free(file->target);
    *file = (struct lc_output_file){ 0 };
    return err;
}

int lc_output_open_in_place(const char *path, FILE **out)
{
    FILE *file = NULL;
    int err = open_stream(path, O_TRUNC | O_NONBLOCK, &file);
    int flags;

    if (err)
        return err;
    flags = fcntl(fileno(file), F_GETFL);
    if (flags < 0 || fcntl(fileno(file), F_SETFL, flags & ~O_NONBLOCK) != 0) {
        err = -errno;
        (void)fclose(file);
        return err;
    }
    *out = file;
    return 0;
}
