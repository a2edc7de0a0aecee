/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's tuner plugin interfaces over one profile. What NCCL would have chosen, by the network's tuner if it uses our
 * network, stays where no rule applies, and always unless it is certain that all ranks use the same rules: ranks that choose differently hang.
 *
 * Certain means one of two things. Either the interposer is in the process and its ranks have agreed on the hash of the
 * profile for this communicator; it then gives a word that becomes 1 at the same call on all ranks. Or the user vouches for
 * it (LOONGCOMM_PROFILE_TRUST). */
#include "common/config.h"
#include "common/log.h"
#include "common/profile.h"
#include "plugin/tuner/export.h"
#include "plugin/tuner/net_tuner.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Of libloongcomm.so, found by name: neither library needs the other. begin is called while the communicator is made, by the
 * thread that makes it; NULL: no agreement is to be expected. The word is written by the interposer alone. */
typedef const uint32_t *begin_fn(uint64_t profile_hash);
typedef void end_fn(const uint32_t *word);

/* A communicator's. Made by init, constant until it is freed. */
struct context {
    size_t ranks, nodes;
    bool ruled;             /* the profile's rules may apply: when they are `agreed`, */
    const uint32_t *agreed; /* or, NULL, at once, as it is `trusted` */
    end_fn *end;
    struct lc_net_tuner net;
};

/* Written once by set_up, constant afterwards. */
static const struct lc_profile *profile; /* kept while the library is loaded */
static bool trusted;

/* NCCL's own, the same at every call; written by init, read by any thread that logs. */
static lc_nccl_logger *nccl_log;

static void log_to_nccl(enum lc_log_level level, const char *file, int line, const char *text)
{
    lc_nccl_logger *log = __atomic_load_n(&nccl_log, __ATOMIC_RELAXED);

    if (log)
        log(level <= LC_LOG_WARN ? LC_NCCL_LOG_WARN : LC_NCCL_LOG_INFO, LC_NCCL_LOG_TUNING, file,
            line, "TUNER/loongcomm: %s", text);
}

static void set_up(void)
{
    static struct lc_config config;

    if (__atomic_load_n(&nccl_log, __ATOMIC_RELAXED))
        lc_log_set_sink(log_to_nccl);
    (void)lc_config_load(&config);
    lc_log_set_level(config.log_level < LC_LOG_INFO ? LC_LOG_INFO : config.log_level);
    if (config.log_file[0] && lc_log_open_file(config.log_file))
        lc_warn("cannot append to %s (LOONGCOMM_LOG_FILE)", config.log_file);
    trusted = config.profile_trust;
    if (!config.enable || !config.profile[0])
        lc_info("%s: NCCL's own choices stay",
                config.enable ? "LOONGCOMM_PROFILE names no profile" : "switched off");
    else
        profile = lc_profile_load(config.profile);
}

__attribute__((destructor)) static void tear_down(void)
{
    free((void *)profile);
}

static bool find_agreement(struct context *context)
{
    begin_fn *begin = (begin_fn *)dlsym(RTLD_DEFAULT, "loongcomm_tuner_begin_v1");

    context->end = (end_fn *)dlsym(RTLD_DEFAULT, "loongcomm_tuner_end_v1");
    if (!begin || !context->end) {
        static unsigned char said;

        if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
            lc_info(
                "profile %s is not used: libloongcomm.so is not preloaded, so the ranks cannot agree on it (LOONGCOMM_PROFILE_TRUST=yes if all have the same)",
                profile->gpu);
        return false;
    }
    context->agreed = begin(profile->hash);
    return context->agreed != NULL;
}

/* A NULL context means: all is left to NCCL. Nothing here is an error to it. */
static enum lc_nccl_result begin(void **out, uint64_t comm_id, size_t ranks, size_t nodes,
                                 lc_nccl_logger *log)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct context *context;

    *out = NULL;
    __atomic_store_n(&nccl_log, log, __ATOMIC_RELAXED);
    pthread_once(&once, set_up);
    context = calloc(1, sizeof(*context));
    if (!context)
        return LC_NCCL_SUCCESS;
    context->ranks = ranks;
    context->nodes = nodes;
    context->ruled = profile && (trusted || find_agreement(context));
    lc_net_tuner_open(&context->net, comm_id, ranks, nodes, log);
    if (!context->ruled && !context->net.library) {
        free(context);
        return LC_NCCL_SUCCESS;
    }
    *out = context;
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result end(void *opaque)
{
    struct context *context = opaque;

    if (context && context->agreed)
        context->end(context->agreed);
    if (context)
        lc_net_tuner_close(&context->net);
    free(context);
    return LC_NCCL_SUCCESS;
}

static const struct lc_profile_rule *rule_for(const struct context *context, int op, size_t bytes)
{
    if (!context || !context->ruled ||
        (context->agreed && !__atomic_load_n(context->agreed, __ATOMIC_ACQUIRE)))
        return NULL;
    return lc_tuner_rule(profile, context->ranks, context->nodes, op, bytes);
}

static enum lc_nccl_result get(void *context, int op, size_t bytes, int pipe_ops,
                               const struct lc_tuner_table *table, int registered, int *channels)
{
    const struct context *own = context;
    const struct lc_profile_rule *rule = rule_for(own, op, bytes);

    if (rule && lc_tuner_apply(rule, table, channels)) {
        lc_debug("%s of %zu bytes: %s %s %u", lc_profile_op_name(rule->op), bytes,
                 lc_profile_algorithm_name(rule->algorithm),
                 lc_profile_protocol_name(rule->protocol), rule->width);
    } else if (own) {
        lc_net_tuner_ask(&own->net, op, bytes, pipe_ops, table, registered, channels);
    }
    return LC_NCCL_SUCCESS;
}

/* NCCL checks the answer against its own table, and ignores one that it has ruled out. */
static enum lc_nccl_result get_v2(void *context, int op, size_t bytes, int collnet, int nvls,
                                  int pipe_ops, int *algorithm, int *protocol, int *channels)
{
    const struct context *own = context;
    const struct lc_profile_rule *rule = rule_for(own, op, bytes);

    if (rule) {
        *algorithm = rule->algorithm;
        *protocol = rule->protocol;
        lc_tuner_set_channels(rule, channels);
    } else if (own) {
        lc_net_tuner_ask_v2(&own->net, op, bytes, collnet, nvls, pipe_ops, algorithm, protocol,
                            channels);
    }
    return LC_NCCL_SUCCESS;
}

LC_TUNER_DEFINE("loongcomm", begin, get, get_v2, end);
