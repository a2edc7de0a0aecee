/* SPDX-License-Identifier: Apache-2.0 */
#include "topology/root.h"

#include "common/input.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int lc_root_open(struct lc_root *root, const char *path)
{
    root->fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return root->fd < 0 ? -errno : 0;
}

void lc_root_close(struct lc_root *root)
{
    close(root->fd);
}

/* Kernels before 5.6 and some containers have no openat2; links may then lead out of a captured machine. */
static int open_below(const struct lc_root *root, const char *path, int flags)
{
    struct open_how how = { .flags = (unsigned)(flags | O_CLOEXEC),
                            .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS };
    long fd = syscall(SYS_openat2, root->fd, path, &how, sizeof(how));

    if (fd < 0 && (errno == ENOSYS || errno == EPERM))
        fd = openat(root->fd, path, flags | O_CLOEXEC);
    return (int)fd;
}

__attribute__((format(printf, 3, 0))) static int open_named(const struct lc_root *root, int flags,
                                                            const char *fmt, va_list ap)
{
    char path[PATH_MAX];
    int len = vsnprintf(path, sizeof(path), fmt, ap);

    if (len < 0 || (size_t)len >= sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    return open_below(root, path, flags);
}

/* Takes `fd`. Files of sysfs come whole. */
static ssize_t read_once(int fd, void *out, size_t size)
{
    ssize_t got = lc_input_check(fd);

    if (!got) {
        got = read(fd, out, size);
        got = got < 0 ? -errno : got;
    }
    close(fd);
    return got;
}

int lc_root_text(const struct lc_root *root, char *out, size_t size, const char *fmt, ...)
{
    ssize_t got;
    va_list ap;
    int fd;

    *out = '\0';
    va_start(ap, fmt);
    fd = open_named(root, O_RDONLY | O_NONBLOCK | O_NOCTTY, fmt, ap);
    va_end(ap);
    if (fd < 0)
        return -errno;
    got = read_once(fd, out, size - 1);
    if (got < 0)
        return (int)got;
    while (got > 0 && isspace((unsigned char)out[got - 1]))
        got--;
    out[got] = '\0';
    return 0;
}

int lc_root_bytes(const struct lc_root *root, void *out, size_t size, const char *fmt, ...)
{
    va_list ap;
    int fd;

    va_start(ap, fmt);
    fd = open_named(root, O_RDONLY | O_NONBLOCK | O_NOCTTY, fmt, ap);
    va_end(ap);
    if (fd < 0)
        return -errno;
    return (int)read_once(fd, out, size);
}

int lc_root_link(const struct lc_root *root, char *out, size_t size, const char *fmt, ...)
{
    ssize_t len = -1;
    va_list ap;
    int err = 0;
    int fd;

    *out = '\0';
    va_start(ap, fmt);
    fd = open_named(root, O_PATH | O_NOFOLLOW, fmt, ap);
    va_end(ap);
    if (fd < 0)
        return -errno;
    len = readlinkat(fd, "", out, size - 1);
    if (len < 0)
        err = -errno;
    close(fd);
    out[err ? 0 : len] = '\0';
    return err;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int collect(DIR *dir, char **names, int most)
{
    struct dirent *entry;
    int count = 0;

    while (count < most && (entry = readdir(dir))) {
        if (entry->d_name[0] == '.')
            continue;
        names[count] = strdup(entry->d_name);
        if (!names[count])
            break;
        count++;
    }
    qsort(names, (size_t)count, sizeof(*names), by_name);
    return count;
}

int lc_root_names(const struct lc_root *root, char ***out, int most, const char *fmt, ...)
{
    char **names;
    int count = 0;
    va_list ap;
    DIR *dir;
    int fd;

    *out = NULL;
    va_start(ap, fmt);
    fd = open_named(root, O_RDONLY | O_DIRECTORY, fmt, ap);
    va_end(ap);
    if (fd < 0)
        return -errno;
    dir = fdopendir(fd);
    if (!dir) {
        close(fd);
        return -ENOMEM;
    }
    names = calloc((size_t)most, sizeof(*names));
    if (names)
        count = collect(dir, names, most);
    closedir(dir);
    *out = names;
    return count;
}

void lc_root_free_names(char **names, int count)
{
    for (int i = 0; i < count; i++)
        free(names[i]);
    free(names);
}

int lc_root_has(const struct lc_root *root, const char *fmt, ...)
{
    va_list ap;
    int fd;

    va_start(ap, fmt);
    fd = open_named(root, O_PATH, fmt, ap);
    va_end(ap);
    if (fd < 0)
        return 0;
    close(fd);
    return 1;
}
