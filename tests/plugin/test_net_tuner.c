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
#include <sys/resource.h>
#include <unistd.h>

enum {
    BROADCAST = 0,
    ALL_GATHER = 2,
    ALL_REDUCE = 4,
    SEND_RECV = 5,
};

static const char *library;

/* The first members of versions, from 11 on with a context each. */
struct net_v6 {
    const char *name;
    enum lc_nccl_result (*init)(lc_nccl_logger *log);
};

struct net_v11 {
    const char *name;
    enum lc_nccl_result (*init)(void **context, uint64_t comm_id, void *config, lc_nccl_logger *log,
                                void *profiler);
    enum lc_nccl_result (*devices)(int *out);
    void *others[17];
    enum lc_nccl_result (*finalize)(void *context);
};

static void small_shares_use_one_channel_and_middle_ones_fewer_than_were_added(void)
{
    /* `added`: of the channels that `loongcomm run` has added; `others`: of NCCL's or the user's. */
    static const struct {
        size_t ranks, bytes;
        int added, others;
    } cases[] = {
        {2,  8,         1, 1},
        { 2, 256 << 10, 1, 1},
        { 2, 1 << 20,   2, 0},
        { 2, 4 << 20,   4, 0},
        { 2, 16 << 20,  0, 0},
        { 2, 1 << 30,   0, 0},
        { 4, 1 << 20,   1, 1},
        { 4, 4 << 20,   2, 0},
        { 4, 64 << 20,  0, 0},
        { 8, 1 << 20,   1, 1},
        { 8, 4 << 20,   0, 0},
        { 8, 1 << 30,   0, 0},
    };
    static const int ops[] = { ALL_REDUCE, ALL_GATHER };

    for (size_t i = 0; i < 2 * sizeof(cases) / sizeof(*cases); i++) {
        size_t ranks = cases[i / 2].ranks, bytes = cases[i / 2].bytes;

        CHECK(lc_net_channels(ops[i % 2], ranks, ranks, bytes, true) == cases[i / 2].added);
        CHECK(lc_net_channels(ops[i % 2], ranks, ranks, bytes, false) == cases[i / 2].others);
    }
}

static void what_was_not_measured_is_left_to_nccl(void)
{
    CHECK(lc_net_channels(BROADCAST, 2, 2, 64 << 10, true) == 0);
    CHECK(lc_net_channels(SEND_RECV, 2, 2, 64 << 10, true) == 0);
    CHECK(lc_net_channels(-1, 2, 2, 64 << 10, true) == 0);
    CHECK(lc_net_channels(ALL_REDUCE, 16, 2, 64 << 10, true) == 0); /* ranks that share a node */
    CHECK(lc_net_channels(ALL_REDUCE, 9, 9, 64 << 10, true) == 0);
    CHECK(lc_net_channels(ALL_REDUCE, 1, 1, 64 << 10, true) == 0);
    CHECK(lc_net_channels(ALL_REDUCE, 0, 0, 64 << 10, true) == 0);
}

static uint64_t asked = 7; /* by this communicator, where the interface says */

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
                  ->init(&context, asked, ranks, nodes, NULL, NULL, NULL) == 0);
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
    CHECK(ask(handle, version, 2, 2, 4 << 20) == 0);
    CHECK(dlclose(handle) == 0);
    handle = load("there-is-none");
    begin(handle);
    CHECK(ask(handle, version, 2, 2, 64 << 10) == 0); /* no devices */
    CHECK(dlclose(handle) == 0);
}

static void of_channels_that_run_has_added_middle_sizes_use_fewer(int version)
{
    void *handle;

    CHECK(setenv("NCCL_MIN_CTAS", "8", 1) == 0 && setenv("LOONGCOMM_NET_CTAS", "8", 1) == 0);
    handle = load("lo");
    begin(handle);
    CHECK(ask(handle, version, 2, 2, 64 << 10) == 1);
    /* NCCL 2.21 would take more than there are. */
    CHECK(ask(handle, version, 2, 2, 4 << 20) == (version == 2 ? 0 : 4));
    CHECK(ask(handle, version, 2, 2, 64 << 20) == 0);
    CHECK(unsetenv("NCCL_MIN_CTAS") == 0);
    CHECK(ask(handle, version, 2, 2, 64 << 10) == 1);
    CHECK(ask(handle, version, 2, 2, 4 << 20) == 0); /* they are not there */
    CHECK(dlclose(handle) == 0 && unsetenv("LOONGCOMM_NET_CTAS") == 0);
}

static void channels_that_the_user_has_set_are_for_all_sizes(void)
{
    static const char *const names[] = { "NCCL_MIN_CTAS",      "NCCL_MAX_CTAS",
                                         "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
                                         "NCCL_MIN_NRINGS",    "NCCL_MAX_NRINGS" };

    for (size_t i = 0; i < 2 * sizeof(names) / sizeof(*names); i++) {
        bool given = i % 2;
        void *handle;

        if (given)
            CHECK(setenv("NCCL_MIN_CTAS", "8", 1) == 0 &&
                  setenv("LOONGCOMM_NET_CTAS", "8", 1) == 0);
        CHECK(setenv(names[i / 2], "16", 1) == 0);
        handle = load("lo");
        begin(handle);
        CHECK(ask(handle, 5, 2, 2, 64 << 10) == 0);
        CHECK(ask(handle, 5, 2, 2, 4 << 20) == 0);
        CHECK(dlclose(handle) == 0);
        CHECK(unsetenv("NCCL_MIN_CTAS") == 0 && unsetenv("LOONGCOMM_NET_CTAS") == 0);
        CHECK(unsetenv(names[i / 2]) == 0);
    }
}

/* This rank had no descriptors for its first communicator; of the second it is a rank like the others. */
static void a_device_that_comes_late_counts(void)
{
    const struct net_v11 *net;
    struct rlimit limit, none;
    void *handle = load("lo"), *early = NULL, *late = NULL;
    int next = dup(0), devices = -1;

    CHECK(next >= 0 && close(next) == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0);
    net = dlsym(handle, "ncclNetPlugin_v11");
    none = (struct rlimit){ (rlim_t)next + 1, limit.rlim_max };
    CHECK(net && setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK(net->init(&early, 1, NULL, NULL, NULL) == 0 && !early);
    CHECK(net->devices(&devices) == 0 && devices == 0);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(ask(handle, 5, 2, 2, 64 << 10) == 0);
    asked = 2;
    CHECK(net->init(&late, 2, NULL, NULL, NULL) == 0 && late);
    CHECK(ask(handle, 5, 2, 2, 64 << 10) == 1);
    asked = 7;
    CHECK(dlclose(handle) == 0);
}

/* Ranks of the other one may not have this library. */
static void communicators_of_another_network_are_left_alone(const char *plugin)
{
    const struct net_v11 *net;
    void *handle = load("lo"), *tuner = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    void *contexts[3] = { NULL };

    net = dlsym(handle, "ncclNetPlugin_v11");
    CHECK(net && tuner);
    for (int i = 0; i < 3; i++) /* two ranks of one, as threads of this process */
        CHECK(net->init(&contexts[i], i == 0 ? 3 : 7, NULL, NULL, NULL) == 0 && contexts[i]);
    for (int i = 0; i < 4; i++) {
        CHECK(ask(handle, 5, 2, 2, 64 << 10) == (i < 3));
        CHECK(ask(tuner, 5, 2, 2, 64 << 10) == (i < 3));
        asked = 8;
        CHECK(ask(handle, 5, 2, 2, 64 << 10) == 0);
        CHECK(ask(tuner, 5, 2, 2, 64 << 10) == 0);
        asked = 7;
        if (i < 3)
            CHECK(net->finalize(contexts[i]) == 0);
    }
    CHECK(dlclose(tuner) == 0 && dlclose(handle) == 0);
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
    CHECK(ask(tuner, version, 2, 2, 4 << 20) == 0);
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
    CHECK(ask(tuner, 5, 2, 2, 4 << 20) == 0);
    CHECK(ask(tuner, 5, 4, 4, 64 << 10) == 1);
    CHECK(dlclose(tuner) == 0 && dlclose(net) == 0);
    unlink(path);
}

int main(int argc, char **argv)
{
    CHECK(argc == 4);
    library = argv[1];
    CHECK(setenv("NCCL_IB_DISABLE", "1", 1) == 0);
    small_shares_use_one_channel_and_middle_ones_fewer_than_were_added();
    what_was_not_measured_is_left_to_nccl();
    for (int version = 2; version <= 6; version++) {
        it_speaks_only_where_nccl_uses_the_network(version);
        of_channels_that_run_has_added_middle_sizes_use_fewer(version);
    }
    channels_that_the_user_has_set_are_for_all_sizes();
    a_device_that_comes_late_counts();
    communicators_of_another_network_are_left_alone(argv[2]);
    communicators_of_another_network_are_left_alone(argv[3]);
    for (int version = 2; version <= 6; version++) {
        tuner_plugin_says_what_the_network_says(argv[2], version);
        tuner_plugin_says_what_the_network_says(argv[3], version);
    }
    library_is_known_under_another_name(argv[2]);
    rule_of_a_profile_goes_first(argv[2]);
    return 0;
}
