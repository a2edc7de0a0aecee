/* SPDX-License-Identifier: Apache-2.0 */
#include "common/cleanup.h"
#include "interpose/cli/cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LIBRARY  "libloongcomm.so"
#define PROXY    "libnccl.so.2"
#define TOPOLOGY "libloongtopo.so"
#define BENCH    "loongcomm-bench"
#define TUNER    "libnccl-tuner-loongcomm.so"

static bool is_file(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* The folder of this program; symbolic links to it are resolved by the kernel. */
static int program_folder(char *out)
{
    ssize_t len = readlink("/proc/self/exe", out, PATH_MAX - 1);
    char *slash;

    if (len < 0)
        return -errno;
    out[len] = '\0';
    slash = strrchr(out, '/');
    if (!slash)
        return -ENOENT;
    *slash = '\0';
    return 0;
}

/* The first of folder/candidate/name that is a file, in canonical form. */
static int first_of(const char *folder, const char *const *candidates, const char *name, char *out)
{
    char path[PATH_MAX];

    for (; *candidates; candidates++) {
        const char *base = **candidates == '/' ? "" : folder;
        int len = snprintf(path, sizeof(path), "%s/%s/%s", base, *candidates, name);

        if (len > 0 && (size_t)len < sizeof(path) && is_file(path) && realpath(path, out))
            return 0;
    }
    return -ENOENT;
}

int lc_cli_find_library(char *out)
{
    /* The last one is the build tree: interpose/cli/loongcomm and interpose/libloongcomm.so. */
    static const char *const candidates[] = { ".", LC_LIBDIR_FROM_BIN, "../lib", "../lib64", "..",
                                              NULL };
    char folder[PATH_MAX];
    int err = program_folder(folder);

    return err ? err : first_of(folder, candidates, LIBRARY, out);
}

int lc_cli_find_topology(char *out)
{
    static const char *const candidates[] = { ".",        LC_LIBDIR_FROM_BIN, "../lib",
                                              "../lib64", "../../topology",   NULL };
    char folder[PATH_MAX];
    int err = program_folder(folder);

    return err ? err : first_of(folder, candidates, TOPOLOGY, out);
}

int lc_cli_find_bench(char *out)
{
    static const char *const candidates[] = { ".", "../../perf", NULL };
    char folder[PATH_MAX];
    int err = program_folder(folder);

    return err ? err : first_of(folder, candidates, BENCH, out);
}

int lc_cli_find_tuner(char *out)
{
    static const char *const candidates[] = { ".",        LC_LIBDIR_FROM_BIN,   "../lib",
                                              "../lib64", "../../plugin/tuner", NULL };
    char folder[PATH_MAX];
    int err = program_folder(folder);

    return err ? err : first_of(folder, candidates, TUNER, out);
}

int lc_cli_find_proxy(char *out)
{
    static const char *const candidates[] = { "loongcomm", "proxy", NULL };
    char path[PATH_MAX];
    int err = lc_cli_find_library(path);

    if (err)
        return err;
    *strrchr(path, '/') = '\0';
    err = first_of(path, candidates, PROXY, out);
    if (!err)
        *strrchr(out, '/') = '\0';
    return err;
}

const char *lc_cli_unlistable(const char *path, const char *separators)
{
    switch (path[strcspn(path, separators)]) {
    case ' ': return "a space";
    case ':': return "a colon";
    case ';': return "a semicolon";
    default:
        return strchr(path, '$') ? "a dollar sign" : NULL; /* the loader expands $ORIGIN, $LIB */
    }
}

void lc_cli_list_each(const char *list, const char *separators,
                      void (*visit)(const char *entry, void *arg), void *arg)
{
    char entry[PATH_MAX];

    while (list && *list) {
        size_t len = strcspn(list, separators);

        if (len) {
            (void)snprintf(entry, sizeof(entry), "%.*s", (int)(len < PATH_MAX ? len : PATH_MAX),
                           list);
            visit(entry, arg);
        }
        list += len;
        list += *list != '\0';
    }
}

struct same {
    const char *path;
    bool found;
};

static void compare(const char *entry, void *arg)
{
    struct same *same = arg;
    struct stat a;
    struct stat b;

    if (strcmp(entry, same->path) == 0)
        same->found = true;
    else if (*entry == '/' && stat(entry, &a) == 0 && stat(same->path, &b) == 0)
        same->found |= a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

char *lc_cli_list_with(const char *old, const char *path, const char *separators, bool anywhere)
{
    struct same same = { .path = path };
    lc_autofree char *first = NULL;
    char *joined = NULL;

    if (!old || !*old)
        return strdup(path);
    first = strndup(old, strcspn(old, separators));
    lc_cli_list_each(anywhere ? old : first, separators, compare, &same);
    if (same.found)
        return strdup(old);
    return asprintf(&joined, "%s:%s", path, old) < 0 ? NULL : joined;
}
