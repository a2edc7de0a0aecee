/* SPDX-License-Identifier: Apache-2.0
 *
 * How many channels NCCL makes over loongcomm's network plugin. A tuner plugin can only take fewer of those that a
 * communicator has, and the library may not ask for more by itself: a rank without it would have others. A variable
 * is the user's to see, and for all ranks to have alike, as NCCL's other ones. */
#include "interpose/cli/plan.h"

#include "interpose/cli/cli.h"
#include "interpose/cli/topo_library.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define FORCED 8

static void look_for_ours(const char *entry, void *arg)
{
    const char *slash = strrchr(entry, '/');
    const char *name = slash ? slash + 1 : entry;
    bool *found = arg;

    *found |= strcmp(name, "loongcomm") == 0 || strcmp(name, "libnccl-net-loongcomm.so") == 0;
}

static bool is_ours(void)
{
    const char *plugins = lc_cli_nccl_get("NCCL_NET_PLUGIN");
    const char *chosen = lc_cli_nccl_get("NCCL_NET");
    bool found = false;

    if (plugins)
        lc_cli_list_each(plugins, ",", look_for_ours, &found);
    return found && (!chosen || !*chosen || strcasecmp(chosen, "loongcomm") == 0);
}

/* The first of them that the user has set; NULL: none. */
static const char *find_set(const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (lc_cli_nccl_get(names[i]))
            return names[i];
    }
    return NULL;
}

/* Whether the first is set now. */
static bool put(const char *const *names, size_t n, int value, const char *why)
{
    const char *set = find_set(names, n);
    char text[16];

    (void)snprintf(text, sizeof(text), "%d", value);
    if (set) {
        lc_cli_say("run: %s is set already and stays: %s would set %s to %s", set, why, names[0],
                   text);
        return false;
    }
    lc_cli_put(names[0], text, why);
    return true;
}

static int number(const char *name)
{
    const char *text = lc_environment_get(name);
    char *end;
    long value = text ? strtol(text, &end, 10) : 0;

    return text && end != text && *end == '\0' && value > 0 && value < INT_MAX ? (int)value : 0;
}

/* Ranks of the job if there is one a node, as all of them see it; 0: more, or it is not certain. What a launcher says of this
 * node alone will not do: a rank that has its node for itself cannot tell that two others share one; it would have more
 * channels than they, and they would hang. torchrun says how many nodes there are. mpirun does not, but of two ranks one alone
 * means that both are. Where one of them has started the other, what they say is of other ranks, unless it is the same. A
 * WORLD_SIZE without the rest may be the user's, which mpirun does not take along to all nodes. */
static int lone_ranks(void)
{
    int ranks = number("WORLD_SIZE"), mpi_ranks = number("OMPI_COMM_WORLD_SIZE");
    bool torch = lc_environment_get("GROUP_WORLD_SIZE") != NULL;
    bool mpi = lc_environment_get("OMPI_COMM_WORLD_SIZE") != NULL;

    if (torch && mpi && (ranks != 2 || mpi_ranks != 2))
        return 0;
    if (torch)
        return number("GROUP_WORLD_SIZE") == ranks && number("LOCAL_WORLD_SIZE") == 1 ? ranks : 0;
    return mpi_ranks == 2 && number("OMPI_COMM_WORLD_LOCAL_SIZE") == 1 ? 2 : 0;
}

static bool is_one_of(const char *path, const char *const *names, size_t n)
{
    const char *slash = strrchr(path, '/');

    for (size_t i = 0; i < n; i++) {
        if (strcmp(slash ? slash + 1 : path, names[i]) == 0)
            return true;
    }
    return false;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);

    return n >= m && strcmp(text + n - m, end) == 0;
}

/* What is run starts ranks itself, of which the variables say nothing. A script that does so is not seen: its ranks all have
 * more channels than they need. Behind a program of Python's are its own arguments. */
static bool is_launcher(char *const *command)
{
    static const char *const programs[] = {
        "torchrun",      "mpirun",  "mpiexec", "mpirun.openmpi", "mpiexec.openmpi",
        "mpiexec.hydra", "orterun", "prterun", "srun",           "accelerate",
        "deepspeed",     "ray",     "torchx",  "horovodrun",     "loongcomm",
    };
    static const char *const modules[] = {
        "torch.distributed.run",      "torch.distributed.launch",  "torch.distributed.elastic",
        "accelerate.commands.launch", "deepspeed.launcher.runner",
    };

    for (; *command && !ends_with(*command, ".py"); command++) {
        const char *module = strncmp(*command, "-m", 2) == 0 ? *command + 2 : *command;

        if (is_one_of(*command, programs, sizeof(programs) / sizeof(*programs)) ||
            is_one_of(module, modules, sizeof(modules) / sizeof(*modules)))
            return true;
    }
    return false;
}

/* A tuner that does not ask our network's, which holds small collectives to fewer channels. */
static bool has_other_tuner(void)
{
    static const char *const ours[] = { "loongcomm", "libnccl-tuner-loongcomm.so" };
    const char *name = lc_cli_nccl_get("NCCL_TUNER_PLUGIN");

    return name && *name && !is_one_of(name, ours, sizeof(ours) / sizeof(*ours));
}

/* The plugin's own tuner has no more of them used than it takes for each size, if NCCL asks it. */
void lc_cli_apply_channels(const struct lc_config *config, char *const *command)
{
    /* A least number by NCCL_MIN_CTAS gives way to a program's own most, which one by NCCL_MIN_NCHANNELS does not. */
    static const char *const all[] = { "NCCL_MIN_CTAS",      "NCCL_MAX_CTAS",
                                       "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
                                       "NCCL_MIN_NRINGS",    "NCCL_MAX_NRINGS" };
    static const char *const pair[] = { "NCCL_NCHANNELS_PER_NET_PEER", "NCCL_MIN_P2P_NCHANNELS",
                                        "NCCL_MAX_P2P_NCHANNELS" };
    bool forced = config->net_channels == LC_PEER_FORCE;
    int ranks = lone_ranks();
    int channels = forced || ranks == 2 ? FORCED : ranks == 3 || ranks == 4 ? 4 : 0;
    char why[120];

    if (config->net_channels == LC_PEER_OFF || channels == 0 || !is_ours())
        return;
    if (!forced && is_launcher(command))
        return;
    if (!forced && has_other_tuner()) {
        lc_cli_say(
            "run: NCCL_TUNER_PLUGIN=%s: NCCL's channels stay, as small collectives would use "
            "all of more (LOONGCOMM_NET_CHANNELS)",
            lc_cli_nccl_get("NCCL_TUNER_PLUGIN"));
        return;
    }
    if (forced)
        (void)snprintf(why, sizeof(why), "LOONGCOMM_NET_CHANNELS=force");
    else
        (void)snprintf(why, sizeof(why),
                       "what was measured to be best over TCP for %d ranks, one a node "
                       "(LOONGCOMM_NET_CHANNELS)",
                       ranks);
    /* By which the tuner knows that they are not the user's. */
    if (put(all, sizeof(all) / sizeof(*all), channels, why))
        (void)setenv("LOONGCOMM_NET_CTAS", lc_cli_nccl_get(all[0]), 1);
    (void)put(pair, sizeof(pair) / sizeof(*pair), channels, why);
}
