/* SPDX-License-Identifier: Apache-2.0 */
#include "common/input.h"

#include "common/cleanup.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define FIRST_ROOM ((size_t)4096) /* files of /proc say that they are empty */

/* /dev/null, what an empty file is given as. */
static bool is_null(const struct stat *st)
{
    return S_ISCHR(st->st_mode) && st->st_rdev == makedev(1, 3);
}

static int check(int fd, struct stat *st)
{
    if (fstat(fd, st) != 0)
        return -errno;
    if (S_ISDIR(st->st_mode))
        return -EISDIR;
    return S_ISREG(st->st_mode) || is_null(st) ? 0 : -ENXIO;
}

int lc_input_check(int fd)
{
    struct stat st;

    return check(fd, &st);
}

static int open_regular(int folder, const char *path, int flags, struct stat *st)
{
    int fd = openat(folder, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | flags);
    int err;

    if (fd < 0)
        return -errno;
    err = check(fd, st);
    if (!err)
        return fd;
    close(fd);
    return err;
}

int lc_input_open(int folder, const char *path, int flags)
{
    struct stat st;

    return open_regular(folder, path, flags, &st);
}

/* A pipe has nothing for the moment. */
static void wait_for_more(int fd)
{
    struct pollfd pipe = { .fd = fd, .events = POLLIN };

    (void)poll(&pipe, 1, -1);
}

/* What is there now, whatever its size was: at most `room` bytes. The number of bytes, or -errno. */
static ssize_t read_some(int fd, char *to, size_t room)
{
    size_t have = 0;

    while (have < room) {
        ssize_t got = read(fd, to + have, room - have);

        if (got < 0 && errno == EAGAIN)
            wait_for_more(fd);
        else if (got < 0 && errno != EINTR)
            return -errno;
        if (got == 0)
            break;
        if (got > 0)
            have += (size_t)got;
    }
    return (ssize_t)have;
}

static int read_all(int fd, size_t first, size_t most, char **out, size_t *size)
{
    lc_autofree char *text = NULL;
    size_t room = first < FIRST_ROOM ? FIRST_ROOM : first;
    size_t have = 0;

    for (;; room *= 2) {
        char *larger;
        ssize_t got;

        room = room < most ? room : most;
        larger = realloc(text, room + 1); /* one more: the NUL, or the byte that is too many */
        if (!larger)
            return -ENOMEM;
        text = larger;
        got = read_some(fd, text + have, room + 1 - have);
        if (got < 0)
            return (int)got;
        have += (size_t)got;
        if (have <= room)
            break;
        if (room == most)
            return -EFBIG;
    }
    text[have] = '\0';
    *out = text;
    *size = have;
    text = NULL;
    return 0;
}

/* Takes `fd`. */
static int read_open(int fd, const struct stat *st, size_t most, char **out, size_t *size)
{
    int err = -EFBIG;

    if (st->st_size <= 0 || (size_t)st->st_size <= most)
        err = read_all(fd, (size_t)st->st_size, most, out, size);
    close(fd);
    return err;
}

int lc_input_read(int folder, const char *path, int flags, size_t most, char **out, size_t *size)
{
    struct stat st = { 0 };
    int fd = open_regular(folder, path, flags, &st);

    return fd < 0 ? fd : read_open(fd, &st, most, out, size);
}

int lc_input_read_argument(const char *path, size_t most, char **out, size_t *size)
{
    int err = lc_input_read(AT_FDCWD, path, 0, most, out, size);
    struct stat st;
    int fd;

    if (err != -ENXIO || stat(path, &st) != 0 || !S_ISFIFO(st.st_mode))
        return err;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) != 0 || !S_ISFIFO(st.st_mode)) {
        close(fd);
        return -ENXIO;
    }
    err = read_open(fd, &st, most, out, size);
    if (err || *size)
        return err;
    free(*out);
    *out = NULL;
    return -ENXIO;
}

bool lc_input_is_loadable(const char *name)
{
    struct stat st;

    return !strchr(name, '/') || stat(name, &st) != 0 || S_ISREG(st.st_mode);
}

const char *lc_input_why(int err)
{
    switch (err) {
    case -EISDIR: return "it is a folder";
    case -ENXIO: return "it is no regular file";
    case -EADDRINUSE: return "standard output or error goes there";
    case -EFBIG: return "it is too large";
    default: return strerror(-err);
    }
}
