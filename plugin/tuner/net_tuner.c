/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/tuner/net_tuner.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libnccl-net-loongcomm.so"

static bool is_ours(const char *path)
{
    const char *slash = strrchr(path, '/');

    return strcmp(slash ? slash + 1 : path, LIBRARY) == 0;
}

/* By its file's name: NCCL may have been given a path, or its own default, libnccl-net.so, as a link. */
static int look(struct dl_phdr_info *info, size_t size, void *arg)
{
    char file[PATH_MAX];
    char *path = arg;

    if (!strstr(info->dlpi_name, "libnccl-net") || strlen(info->dlpi_name) >= PATH_MAX ||
        (!is_ours(info->dlpi_name) && (!realpath(info->dlpi_name, file) || !is_ours(file))))
        return 0;
    memcpy(path, info->dlpi_name, strlen(info->dlpi_name) + 1);
    return 1;
}

void lc_net_tuner_open(struct lc_net_tuner *out, uint64_t comm_id, size_t ranks, size_t nodes,
                       lc_nccl_logger *log)
{
    char path[PATH_MAX];

    *out = (struct lc_net_tuner){ 0 };
    if (!dl_iterate_phdr(look, path))
        return;
    out->library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!out->library)
        return;
    out->tuner = dlsym(out->library, "ncclTunerPlugin_v5");
    out->old = dlsym(out->library, "ncclTunerPlugin_v2");
    if (out->tuner && out->old &&
        out->tuner->init(&out->context, comm_id, ranks, nodes, log, NULL, NULL) == LC_NCCL_SUCCESS)
        return;
    (void)dlclose(out->library); /* one of before it had a tuner */
    *out = (struct lc_net_tuner){ 0 };
}

void lc_net_tuner_ask(const struct lc_net_tuner *net, int op, size_t bytes, int pipe_ops,
                      const struct lc_tuner_table *table, int registered, int *channels)
{
    if (net->library)
        (void)net->tuner->getCollInfo(net->context, op, bytes, pipe_ops, (float **)table->costs,
                                      table->algorithms, table->protocols, registered, channels);
}

void lc_net_tuner_ask_v2(const struct lc_net_tuner *net, int op, size_t bytes, int collnet,
                         int nvls, int pipe_ops, int *algorithm, int *protocol, int *channels)
{
    if (net->library)
        (void)net->old->getCollInfo(net->context, op, bytes, collnet, nvls, pipe_ops, algorithm,
                                    protocol, channels);
}

void lc_net_tuner_close(struct lc_net_tuner *net)
{
    if (!net->library)
        return;
    (void)net->tuner->finalize(net->context);
    (void)dlclose(net->library);
    *net = (struct lc_net_tuner){ 0 };
}
