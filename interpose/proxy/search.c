/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/proxy/search.h"

#include "common/cleanup.h"
#include "common/input.h"
#include "common/log.h"

#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NCCL_FILE "libnccl.so.2"

/* True if it was loaded and is an NCCL. Files that are not there are no news; others are. */
static bool load(const char *path, bool named, struct lc_nccl *out)
{
    struct stat st;
    void *handle;
    bool usable;

    if (!named && stat(path, &st) != 0)
        return false;
    if (!lc_input_is_loadable(path)) {
        lc_warn("cannot use %s: it is no regular file", path);
        return false;
    }
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        lc_info("cannot use %s: %s", path, dlerror());
        return false;
    }
    usable = lc_nccl_open(handle, out); /* takes over the handle */
    if (usable)
        lc_debug("NCCL is %s", out->path);
    return usable;
}

static bool load_from(const char *folder, const char *file, struct lc_nccl *out)
{
    char path[PATH_MAX];

    return (size_t)snprintf(path, sizeof(path), "%s/%s", folder, file) < sizeof(path) &&
           load(path, false, out);
}

static bool load_matching(const char *pattern, struct lc_nccl *out)
{
    glob_t found = { 0 };
    bool done = false;

    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc && !done; i++)
            done = load(found.gl_pathv[i], false, out);
    }
    globfree(&found);
    return done;
}

/* The folders in which the loader looks for what this library needs: of LD_LIBRARY_PATH, or its own. */
static bool load_from_loader_path(bool own, struct lc_nccl *out)
{
    lc_autofree Dl_serinfo *info = NULL;
    Dl_serinfo size;
    Dl_info self;
    void *handle;
    bool done = false;

    if (!dladdr((const void *)lc_proxy_load_nccl, &self))
        return false;
    handle = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!handle)
        return false;
    if (dlinfo(handle, RTLD_DI_SERINFOSIZE, &size) == 0)
        info = malloc(size.dls_size);
    if (info && dlinfo(handle, RTLD_DI_SERINFOSIZE, info) == 0 &&
        dlinfo(handle, RTLD_DI_SERINFO, info) == 0) {
        for (unsigned i = 0; i < info->dls_cnt && !done; i++) {
            if (!!(info->dls_serpath[i].dls_flags & LA_SER_DEFAULT) == own)
                done = load_from(info->dls_serpath[i].dls_name, NCCL_FILE, out);
        }
    }
    (void)dlclose(handle);
    return done;
}

/* The first loaded object that lies among Python's packages tells where those are. */
static int packages_of(struct dl_phdr_info *info, size_t size, void *arg)
{
    static const char *const marks[] = { "/site-packages/", "/dist-packages/" };

    (void)size;
    for (size_t i = 0; info->dlpi_name && i < sizeof(marks) / sizeof(*marks); i++) {
        const char *at = strstr(info->dlpi_name, marks[i]);
        size_t len = at ? (size_t)(at - info->dlpi_name) + strlen(marks[i]) : 0;

        if (at && len < PATH_MAX) {
            memcpy(arg, info->dlpi_name, len);
            ((char *)arg)[len] = '\0';
            return 1;
        }
    }
    return 0;
}

/* Below the folder above the program's: /venv for /venv/bin/python. */
static bool load_from_prefix(const char *program, struct lc_nccl *out)
{
    char pattern[2 * PATH_MAX];
    char prefix[PATH_MAX];
    size_t len = strlen(program);
    char *slash;

    if (!strchr(program, '/') || len >= sizeof(prefix))
        return false;
    memcpy(prefix, program, len + 1);
    for (int level = 0; level < 2; level++) {
        slash = strrchr(prefix, '/');
        if (!slash)
            return false;
        *slash = '\0';
    }
    (void)snprintf(pattern, sizeof(pattern),
                   "%s/lib/python3*/site-packages/nvidia/nccl/lib/" NCCL_FILE, prefix);
    if (load_matching(pattern, out))
        return true;
    (void)snprintf(pattern, sizeof(pattern), "%s/lib", prefix); /* conda */
    return load_from(pattern, NCCL_FILE, out);
}

static bool load_from_python(struct lc_nccl *out)
{
    char folder[PATH_MAX];
    ssize_t len;

    if (dl_iterate_phdr(packages_of, folder) &&
        load_from(folder, "nvidia/nccl/lib/" NCCL_FILE, out))
        return true;
    /* The name it was called by, which a virtual environment's links have; then the file itself. */
    if (load_from_prefix(program_invocation_name, out))
        return true;
    len = readlink("/proc/self/exe", folder, sizeof(folder) - 1);
    if (len <= 0)
        return false;
    folder[len] = '\0';
    return load_from_prefix(folder, out);
}

bool lc_proxy_load_nccl(const char *given, struct lc_nccl *out)
{
    static unsigned char said; /* every later call fails as well: one line is enough */

    if (*given) {
        if (load(given, true, out))
            return true;
        if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
            lc_error("LOONGCOMM_NCCL names %s, which cannot be loaded as NCCL", given);
        return false;
    }
    if (load_from_loader_path(false, out) || load_from_python(out) ||
        load_from_loader_path(true, out) ||
        load("libnccl.so", true,
             out) || /* what ld.so's cache has, under a name that is not our own */
        load_from("/usr/local/cuda/lib64", NCCL_FILE, out) ||
        load_matching("/usr/local/cuda-*/lib64/" NCCL_FILE, out))
        return true;
    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        lc_error("no NCCL found; set LOONGCOMM_NCCL to the path of the real " NCCL_FILE);
    return false;
}
