/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/find.h"

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>

/* Any NCCL of the last years has it, and nothing else does. */
#define PROBE "ncclCommInitRank"

/* The loaded objects' names, gathered under the loader's lock and looked at after it was released. */
struct names {
    char **name;
    size_t count;
    size_t room;
};

/* dlsym also searches what the object depends on: only its own definition counts. */
static bool defines(const struct lc_nccl *object, const char *symbol)
{
    void *addr = dlsym(object->handle, symbol);
    Dl_info info;

    return addr && dladdr(addr, &info) && info.dli_fname &&
           strcmp(info.dli_fname, object->path) == 0;
}

/* libloongcomm.so and the proxy, also another copy of them. */
static bool is_ours(const struct lc_nccl *object)
{
    return defines(object, "loongcommVersion") || defines(object, LC_PROXY_NCCL);
}

/* Takes over the handle. */
static bool open_foreign(void *handle, struct lc_nccl *out)
{
    struct link_map *map = NULL;
    struct lc_nccl object;

    /* The program itself has no name, and asking it would lead back to us. */
    if (dlinfo(handle, RTLD_DI_LINKMAP, (void *)&map) == 0 && map->l_name && *map->l_name) {
        object = (struct lc_nccl){ .handle = handle, .path = map->l_name };
        if (!is_ours(&object)) {
            *out = object;
            return true;
        }
    }
    (void)dlclose(handle);
    return false;
}

bool lc_nccl_open(void *handle, struct lc_nccl *out)
{
    struct lc_nccl object;

    if (!open_foreign(handle, &object))
        return false;
    if (!defines(&object, PROBE)) {
        (void)dlclose(object.handle);
        return false;
    }
    *out = object;
    return true;
}

static bool open_nccl(const char *name, struct lc_nccl *out)
{
    void *handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);

    return handle && lc_nccl_open(handle, out);
}

bool lc_nccl_at(const void *addr, struct lc_nccl *out)
{
    Dl_info info;
    void *handle;

    if (!dladdr(addr, &info) || !info.dli_fname || !*info.dli_fname)
        return false;
    handle = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return handle && open_foreign(handle, out);
}

/* 0 is the likeliest. */
static int likelihood(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *file = slash ? slash + 1 : path;

    if (strncmp(file, "libnccl.so", strlen("libnccl.so")) == 0)
        return 0;
    return strstr(file, "libtorch_cuda") ? 1 : 2;
}

bool lc_nccl_is_whole(const struct lc_nccl *nccl)
{
    return likelihood(nccl->path) == 0 || defines(nccl, "p" PROBE);
}

static int gather(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct names *names = arg;

    (void)size;
    if (!info->dlpi_name || !*info->dlpi_name)
        return 0;
    if (names->count == names->room) {
        size_t room = names->room ? 2 * names->room : 256;
        char **bigger = realloc(names->name, room * sizeof(*bigger));

        if (!bigger)
            return 1;
        names->name = bigger;
        names->room = room;
    }
    names->name[names->count] = strdup(info->dlpi_name);
    if (names->name[names->count])
        names->count++;
    return 0;
}

bool lc_nccl_find_loaded(struct lc_nccl *out)
{
    struct names names = { 0 };
    bool found = open_nccl("libnccl.so.2", out);

    if (!found)
        (void)dl_iterate_phdr(gather, &names);
    for (int rank = 0; !found && rank < 3; rank++) {
        for (size_t i = 0; !found && i < names.count; i++)
            found = likelihood(names.name[i]) == rank && open_nccl(names.name[i], out);
    }
    for (size_t i = 0; i < names.count; i++)
        free(names.name[i]);
    free(names.name);
    return found;
}

bool lc_nccl_find_by_proxy(struct lc_nccl *out)
{
    void *proxy = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
    void *addr = proxy ? dlsym(proxy, LC_PROXY_NCCL) : NULL;
    const char *(*load)(void);
    const char *path = NULL;

    if (addr) {
        memcpy(&load, &addr, sizeof(addr));
        path = load();
    }
    if (proxy)
        (void)dlclose(proxy);
    return path && open_nccl(path, out);
}
