/* SPDX-License-Identifier: Apache-2.0
 *
 * test_net_tuner LIBRARY TUNER...: the tuner that NCCL finds in the network's library, as NCCL drives it, and what the tuner
 * plugins make of it. */
#include "plugin/net/abi/channels.h"
#include "plugin/tuner/abi.h"
#include "tests/check.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    BROADCAST = 0,
    ALL_GATHER = 2,
    ALL_REDUCE = 4,
    SEND_RECV = 5,
};

static const char *library;

/* The first members of every version. */
struct net_v6 {
    const char *name;
    enum lc_nccl_result (*init)(lc_nccl_logger *log);
};

static void small_shares_use_one_channel_and_large_ones_as_many_as_were_measured_to_win(void)
{
    static const struct {
        size_t ranks, bytes;
        int channels;
    } cases[] = {
        {2,  8,         1},
        { 2, 256 << 10, 1},
        { 2, 1 << 20,   2},
        { 2, 4 << 20,   4},
        { 2, 16 << 20,  8},
        { 2, 1 << 30,   8},
        { 4, 1 << 20,   1},
        { 4, 4 << 20,   2},
        { 4, 64 << 20,  4},
        { 8, 1 << 20,   1},
        { 8, 16 << 20,  2},
        { 8, 1 << 30,   2},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        CHECK(lc_net_channels(ALL_REDUCE, cases[i].ranks, cases[i].ranks, cases[i].bytes) ==
              cases[i].channels);
        CHECK(lc_net_channels(ALL_GATHER, cases[i].ranks, cases[i].ranks, cases[i].bytes) ==
              cases[i].channels);
    }
}

static void what_was_not_measured_is_left_to_nccl(void)
{
    CHECK(lc_net_channels(BROADCAST, 2, 2, 1 << 20) == 0);
    CHECK(lc_net_channels(SEND_RECV, 2, 2, 1 << 20) == 0);
    CHECK(lc_net_channels(-1, 2, 2, 1 << 20) == 0);
    CHECK(lc_net_channels(ALL_REDUCE, 16, 2, 1 << 20) == 0); /* ranks that share a node */
    CHECK(lc_net_channels(ALL_REDUCE, 1, 1, 1 << 20) == 0);
    CHECK(lc_net_channels(ALL_REDUCE, 0, 0, 1 << 20) == 0);
}

/* NCCL's answer for an all-reduce of these ranks and nodes. */
static int ask(void *handle, int version, size_t ranks, size_t nodes, size_t bytes)
{
    char name[32];
    const void *table;
    void *context = handle;
    int algorithm = -1, protocol = -1, channels = 0;
    float costs[7][3] = { { 0 } };

    (void)snprintf(name, sizeof(name), "ncclTunerPlugin_v%d", version);
    table = dlsym(handle, name);
    CHECK(table);
    if (version < 5)
        CHECK(((const struct lc_nccl_tuner_v2 *)table)->init(ranks, nodes, NULL, &context) == 0);
    else
        CHECK(((const struct lc_nccl_tuner_v5 *)table)
                  ->init(&context, 7, ranks, nodes, NULL, NULL, NULL) == 0);
    if (version == 2)
        CHECK(((const struct lc_nccl_tuner_v2 *)table)
                  ->getCollInfo(context, ALL_REDUCE, bytes, 0, 0, 1, &algorithm, &protocol,
                                &channels) == 0);
    else if (version == 3)
        CHECK(((const struct lc_nccl_tuner_v3 *)table)
                  ->getCollInfo(context, ALL_REDUCE, bytes, 1, (float **)costs, 7, 3, &channels) ==
              0);
    else
        CHECK(((const struct lc_nccl_tuner_v4 *)table)
                  ->getCollInfo(context, ALL_REDUCE, bytes, 1, (float **)costs, 7, 3, 0,
                                &channels) == 0);
    CHECK(((const struct lc_nccl_tuner_v5 *)table)->finalize(context) == 0);
    CHECK(algorithm == -1 && protocol == -1);
    for (int i = 0; i < 7 * 3; i++)
        CHECK(costs[i / 3][i % 3] == 0);
    return channels;
}

static void *load(const char *interface)
{
    void *handle;

    CHECK(setenv("NCCL_SOCKET_IFNAME", interface, 1) == 0);
    handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    CHECK(handle);
    return handle;
}

static void begin(void *handle)
{
    const struct net_v6 *net = dlsym(handle, "ncclNetPlugin_v6");

    CHECK(net && net->init(NULL) == 0);
}

static void it_speaks_only_where_nccl_uses_the_network(int version)
{
    void *handle = load("lo");

    CHECK(ask(handle, version, 2, 2, 64 << 10) == 0); /* NCCL_NET named another network */
    begin(handle);
    CHECK(ask(handle, version, 2, 2, 64 << 10) == 1);
    CHECK(ask(handle, version, 4, 2, 64 << 10) == 0);
    /* NCCL 2.21 would take more than there are. */
    CHECK(ask(handle, version, 2, 2, 64 << 20) == (version == 2 ? 0 : 8));
    CHECK(dlclose(handle) == 0);
    handle = load("there-is-none");
    begin(handle);
    CHECK(ask(handle, version, 2, 2, 64 << 10) == 0); /* no devices */
    CHECK(dlclose(handle) == 0);
}

/* A job that names a tuner plugin, and a rank that lacks it, choose alike. */
static void tuner_plugin_says_what_the_network_says(const char *plugin, int version)
{
    void *tuner = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    void *net = load("lo");

    CHECK(tuner);
    CHECK(ask(tuner, version, 2, 2, 64 << 10) == 0);
    begin(net);
    CHECK(ask(tuner, version, 2, 2, 64 << 10) == 1);
    CHECK(ask(tuner, version, 4, 2, 64 << 10) == 0);
    CHECK(ask(tuner, version, 2, 2, 64 << 20) == (version == 2 ? 0 : 8));
    CHECK(dlclose(net) == 0);
    CHECK(ask(tuner, version, 2, 2, 64 << 10) == 0); /* and NCCL may unload it */
    CHECK(!dlopen(library, RTLD_NOW | RTLD_NOLOAD));
    CHECK(dlclose(tuner) == 0);
}

/* NCCL's default name, as a link. */
static void library_is_known_under_another_name(const char *plugin)
{
    const char *own = library;
    char folder[] = "/tmp/lc-net-tuner-XXXXXX", name[64], *file = realpath(own, NULL);

    CHECK(mkdtemp(folder) && file);
    (void)snprintf(name, sizeof(name), "%s/libnccl-net.so", folder);
    CHECK(symlink(file, name) == 0);
    library = name;
    tuner_plugin_says_what_the_network_says(plugin, 5);
    library = own;
    CHECK(unlink(name) == 0 && rmdir(folder) == 0);
    free(file);
}

static void rule_of_a_profile_goes_first(const char *plugin)
{
    static const char text[] =
        "loongcomm.profile/1\ngpu none\nnccl 2.28.9\nnccl all-reduce 2 2 0 100000 ring simple 3\n";
    char path[] = "/tmp/lc-net-tuner-XXXXXX";
    int fd = mkstemp(path);
    void *tuner, *net = load("lo");

    CHECK(fd >= 0 && write(fd, text, sizeof(text) - 1) == (ssize_t)sizeof(text) - 1);
    close(fd);
    CHECK(setenv("LOONGCOMM_PROFILE", path, 1) == 0);
    CHECK(setenv("LOONGCOMM_PROFILE_TRUST", "yes", 1) == 0);
    tuner = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    CHECK(tuner);
    begin(net);
    CHECK(ask(tuner, 5, 2, 2, 64 << 10) == 3);
    CHECK(ask(tuner, 5, 2, 2, 64 << 20) == 8);
    CHECK(dlclose(tuner) == 0 && dlclose(net) == 0);
    unlink(path);
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    library = argv[1];
    CHECK(setenv("NCCL_IB_DISABLE", "1", 1) == 0);
    small_shares_use_one_channel_and_large_ones_as_many_as_were_measured_to_win();
    what_was_not_measured_is_left_to_nccl();
    for (int version = 2; version <= 6; version++)
        it_speaks_only_where_nccl_uses_the_network(version);
    for (int version = 2; version <= 6; version++) {
        tuner_plugin_says_what_the_network_says(argv[2], version);
        tuner_plugin_says_what_the_network_says(argv[3], version);
    }
    library_is_known_under_another_name(argv[2]);
    rule_of_a_profile_goes_first(argv[2]);
    return 0;
}
