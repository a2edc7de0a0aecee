/* SPDX-License-Identifier: Apache-2.0
 *
 * What would become of one call, and which setting or rule decides that. The policy asked is the library's own. */
#include "common/cleanup.h"
#include "common/json.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/settings.h"
#include "interpose/cli/tune.h"
#include "interpose/policy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define TEXT_MAX 512

struct call {
    struct lc_op op;
    size_t bytes;     /* of the send buffer */
    int profile_op;   /* enum lc_profile_op, -1: rules name no such operation */
    const char *type; /* as it is printed */
    int ranks;
    int nodes;  /* for NCCL, which may count each rank as one (NCCL_HOSTID) */
    bool apart; /* the user says that there are several */
};

struct decision {
    char choice[TEXT_MAX];
    char why[TEXT_MAX];
    char rule[LC_TUNE_LINE]; /* of the profile; "" */
};

struct answer {
    struct lc_cli_settings settings;
    struct lc_profile *profile; /* NULL: none */
    const char *profile_path;
    char profile_note[TEXT_MAX];
    struct decision path, nccl;
    const char *topology;       /* a file; NULL: this machine */
    bool asked;                 /* NCCL is, for an operation that its tuner is asked for, and */
    struct lc_cost_call cost;   /* this */
    struct lc_tune_costs costs; /* is what its ways cost */
};

static const struct {
    const char *name;
    ncclDataType_t type;
} types[] = {
    {"f32",     ncclFloat32   },
    { "bf16",   ncclBfloat16  },
    { "f16",    ncclFloat16   },
    { "f64",    ncclFloat64   },
    { "f8e4m3", ncclFloat8e4m3},
    { "f8e5m2", ncclFloat8e5m2},
    { "i8",     ncclInt8      },
    { "u8",     ncclUint8     },
    { "i32",    ncclInt32     },
    { "u32",    ncclUint32    },
    { "i64",    ncclInt64     },
    { "u64",    ncclUint64    },
};

/* "all-reduce" and "allreduce" alike. */
static bool same_word(const char *a, const char *b)
{
    for (;; a++, b++) {
        a += *a == '-';
        b += *b == '-';
        if (*a != *b || !*a)
            return *a == *b;
    }
}

static int parse_op(const char *word, struct call *call)
{
    int kind = 0;

    while (kind < LC_OP_RECV && !same_word(word, lc_op_name((enum lc_op_kind)kind)))
        kind++;
    if (kind == LC_OP_RECV)
        return lc_cli_usage("tune: --op takes all-reduce, reduce-scatter, all-gather, all-to-all, "
                            "send, broadcast or reduce, not '%s'",
                            word);
    call->op.kind = (enum lc_op_kind)kind;
    call->profile_op = -1;
    for (unsigned i = 0; i < LC_PROFILE_OPS; i++) {
        if (strcmp(lc_profile_op_name(i), lc_op_name(call->op.kind)) == 0)
            call->profile_op = (int)i;
    }
    return LC_CLI_FINE;
}

static int parse_type(const char *word, struct call *call)
{
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++) {
        const char *long_name = lc_type_name(types[i].type);

        if (strcasecmp(word, types[i].name) != 0 && strcmp(word, long_name ? long_name : "") != 0)
            continue;
        call->op.type = types[i].type;
        call->type = types[i].name;
        return LC_CLI_FINE;
    }
    return lc_cli_usage("tune: --type takes f32, bf16, f16, f64, f8e4m3, f8e5m2, i8, u8, i32, u32, "
                        "i64 or u64, not '%s'",
                        word);
}

static int parse_call(const struct lc_tune_question *question, struct call *out)
{
    struct call call = { .op.redop = ncclSum };
    int code = parse_op(question->op ? question->op : "all-reduce", &call);
    size_t element;

    if (!code)
        code = parse_type(question->type ? question->type : "f32", &call);
    if (code)
        return code;
    if (lc_parse_size(question->size, &call.bytes) || call.bytes == 0)
        return lc_cli_usage("tune: --explain takes bytes (4096, 64k, 16m), not '%s'",
                            question->size);
    call.ranks = question->ranks;
    call.nodes = question->nodes;
    call.apart = question->nodes > 1;
    element = lc_type_size(call.op.type);
    call.op.count = 1;
    if (lc_op_bytes(&call.op, 2) > element) /* the call's count is for one rank's part */
        element *= call.ranks ? (size_t)call.ranks : 2;
    call.op.count = call.bytes / element ? call.bytes / element : 1;
    *out = call;
    return LC_CLI_FINE;
}

/* What is not said of the job is as the profile's first rule for the operation has it, rules for NCCL before others. */
static void complete(const struct lc_profile *profile, struct call *call)
{
    bool per_rank = lc_op_bytes(&call->op, 2) > lc_op_bytes(&call->op, 1);

    for (size_t i = 0; profile && i < profile->n; i++) {
        const struct lc_profile_rule *rule = &profile->rules[i];

        if (rule->op != call->profile_op || (call->ranks && rule->ranks != (unsigned)call->ranks))
            continue;
        call->nodes = call->nodes ? call->nodes : (int)rule->nodes;
        call->ranks = (int)rule->ranks;
        break;
    }
    call->ranks = call->ranks ? call->ranks : 2;
    call->nodes = call->nodes ? call->nodes : 1;
    if (per_rank) {
        size_t count = call->bytes / lc_type_size(call->op.type) / (size_t)call->ranks;

        call->op.count = count ? count : 1;
    }
}

/* "LOONGCOMM_PEER=auto (environment)". */
static void name_setting(const struct answer *answer, const char *name, char *out, size_t size)
{
    for (size_t i = 0; i < answer->settings.count; i++) {
        const struct lc_config_entry *entry = &answer->settings.entry[i];

        if (strcmp(entry->name + strlen("LOONGCOMM_"), name) == 0)
            (void)snprintf(out, size, "%s=%s (%s)", entry->name, entry->value, entry->origin);
    }
}

static int load_profile(const struct lc_tune_question *question, struct answer *answer)
{
    const char *path = question->profile ? question->profile : answer->settings.config.profile;
    char gpu[sizeof(answer->profile->gpu)];

    if (!*path) {
        (void)snprintf(answer->profile_note, TEXT_MAX, "none (LOONGCOMM_PROFILE, --profile)");
        return LC_CLI_FINE;
    }
    answer->profile_path = path;
    answer->profile = lc_profile_load(path);
    if (!answer->profile)
        return LC_CLI_FINDING; /* it has said why */
    lc_profile_gpu_here(gpu, sizeof(gpu));
    (void)snprintf(answer->profile_note, TEXT_MAX, "%s, %s, of %s with NCCL %d.%d.%d", path,
                   question->profile ? "as asked" : "by LOONGCOMM_PROFILE", answer->profile->gpu,
                   answer->profile->nccl / 10000, answer->profile->nccl / 100 % 100,
                   answer->profile->nccl % 100);
    if (strcmp(gpu, answer->profile->gpu) != 0) {
        size_t used = strlen(answer->profile_note);

        (void)snprintf(answer->profile_note + used, TEXT_MAX - used,
                       "; not used on this machine, whose GPU is: %s", gpu);
    }
    return LC_CLI_FINE;
}

static struct lc_situation situation_of(const struct answer *answer, const struct call *call)
{
    bool rings = !call->apart && lc_policy_wants_rings(&answer->settings.config, answer->profile);

    return (struct lc_situation){
        .ranks = call->ranks,
        .committed = true,
        .rings = rings,
        .mapped = rings,
        .redop = {.kind = LC_REDOP_SUM, .type = call->op.type},
        .profile = answer->profile,
    };
}

static const struct lc_profile_rule *rings_rule(const struct answer *answer,
                                                const struct call *call, bool bf16_wire)
{
    if (!answer->profile || call->profile_op < 0)
        return NULL;
    return lc_profile_rings(answer->profile, (unsigned)call->profile_op, (uint64_t)call->ranks,
                            bf16_wire, lc_op_bytes(&call->op, call->ranks));
}

static const char *how_rounded(const struct lc_config *config)
{
    return config->rounding == LC_ROUNDING_STOCHASTIC ? ", rounded stochastically" : "";
}

static void explain_rings(struct answer *answer, const struct call *call,
                          const struct lc_situation *now, bool bf16_wire)
{
    const struct lc_config *config = &answer->settings.config;
    const struct lc_profile_rule *rule = rings_rule(answer, call, bf16_wire);
    struct decision *d = &answer->path;
    bool one_shot = !bf16_wire && call->op.kind == LC_OP_ALL_REDUCE &&
                    lc_policy_one_shot(now, lc_op_bytes(&call->op, call->ranks), config);
    uint32_t ctas = lc_policy_ctas(&call->op, now, bf16_wire, lc_op_bytes(&call->op, call->ranks),
                                   UINT32_MAX);

    (void)snprintf(d->choice, TEXT_MAX, "memory mapped between the ranks, %s%s%s",
                   one_shot ? "one-shot where it fits the lines, else two-shot" : "two-shot",
                   bf16_wire ? ", bf16 on the wire" : "", bf16_wire ? how_rounded(config) : "");
    if (ctas != UINT32_MAX)
        (void)snprintf(d->choice + strlen(d->choice), TEXT_MAX - strlen(d->choice), ", %u CTAs",
                       ctas);
    if (config->peer == LC_PEER_FORCE || !rule)
        name_setting(answer, config->peer == LC_PEER_FORCE ? "PEER" : "ALLREDUCE_WIRE", d->why,
                     TEXT_MAX);
    if (rule) {
        (void)lc_profile_print_rule(rule, d->rule, sizeof(d->rule));
        if (config->peer != LC_PEER_FORCE)
            (void)snprintf(d->why, TEXT_MAX, "rule of the profile: %s", d->rule);
    } else if (config->peer != LC_PEER_FORCE) {
        (void)snprintf(d->why + strlen(d->why), TEXT_MAX - strlen(d->why),
                       ": fewer bytes travel, and no profile says otherwise");
    }
}

static void explain_exchange(struct answer *answer, const struct call *call,
                             const struct lc_situation *now)
{
    bool forced = answer->settings.config.peer == LC_PEER_FORCE;
    const struct lc_profile_rule *rule = rings_rule(answer, call, false);
    struct decision *d = &answer->path;
    uint32_t ctas = lc_policy_ctas(&call->op, now, false, lc_op_bytes(&call->op, call->ranks),
                                   UINT32_MAX);

    (void)snprintf(d->choice, TEXT_MAX, "memory mapped between the ranks, without what is zero");
    if (ctas != UINT32_MAX)
        (void)snprintf(d->choice + strlen(d->choice), TEXT_MAX - strlen(d->choice), ", %u CTAs",
                       ctas);
    if (rule)
        (void)lc_profile_print_rule(rule, d->rule, sizeof(d->rule));
    if (rule && !forced)
        (void)snprintf(d->why, TEXT_MAX, "rule of the profile: %s", d->rule);
    else
        name_setting(answer, "PEER", d->why, TEXT_MAX);
}

/* Why a sum between ranks of one machine is NCCL's. */
static void explain_no_rings(struct answer *answer, const struct call *call, char *out)
{
    const struct lc_config *config = &answer->settings.config;
    bool exchange = call->op.kind == LC_OP_ALL_TO_ALL || call->op.kind == LC_OP_SEND;

    if (!exchange && call->op.kind != LC_OP_ALL_REDUCE && call->op.kind != LC_OP_REDUCE_SCATTER)
        (void)snprintf(out, TEXT_MAX, "loongcomm has no other way for this operation");
    else if (config->peer == LC_PEER_OFF)
        name_setting(answer, "PEER", out, TEXT_MAX);
    else if (call->apart)
        (void)snprintf(out, TEXT_MAX, "the ranks are on %d nodes", call->nodes);
    else if (call->op.kind == LC_OP_SEND && call->bytes < config->exchange_min_bytes)
        name_setting(answer, "EXCHANGE_MIN_BYTES", out, TEXT_MAX);
    else if (!exchange && call->op.type != ncclFloat32 && call->op.type != ncclBfloat16 &&
             call->op.type != ncclFloat16)
        (void)snprintf(out, TEXT_MAX, "sums of this type stay with NCCL");
    else if (!exchange && call->op.type != ncclFloat32 && config->exact == LC_EXACT_NCCL)
        name_setting(answer, "EXACT", out, TEXT_MAX);
    else
        (void)snprintf(out, TEXT_MAX, "default: %s",
                       answer->profile
                           ? "no rule of the profile holds, so nothing is known to be faster"
                           : "without a profile nothing is known to be faster");
}

static enum lc_path explain_path(struct answer *answer, const struct call *call)
{
    const struct lc_config *config = &answer->settings.config;
    struct lc_situation now = situation_of(answer, call);
    struct lc_choice choice = { LC_PATH_NCCL, LC_NCCL_NO_FASTER_PATH };
    struct decision *d = &answer->path;

    if (!config->enable) {
        (void)snprintf(d->choice, TEXT_MAX, "NCCL");
        name_setting(answer, "ENABLE", d->why, TEXT_MAX);
        return LC_PATH_NCCL;
    }
    choice = lc_policy(&call->op, &now, config);
    if (call->op.kind == LC_OP_SEND && lc_policy_takes_message(&now, call->bytes, config))
        choice.path = LC_PATH_EXCHANGE;
    switch (choice.path) {
    case LC_PATH_RINGS: explain_rings(answer, call, &now, choice.outcome == LC_RINGS_BF16); break;
    case LC_PATH_EXCHANGE: explain_exchange(answer, call, &now); break;
    case LC_PATH_CAST:
        (void)snprintf(d->choice, TEXT_MAX, "NCCL, as bf16%s", how_rounded(config));
        name_setting(answer, "ALLREDUCE_WIRE", d->why, TEXT_MAX);
        break;
    case LC_PATH_NCCL:
    case LC_PATH_PACK:
        (void)snprintf(d->choice, TEXT_MAX, "NCCL");
        if (choice.outcome == LC_NCCL_SMALL)
            name_setting(answer,
                         call->op.kind == LC_OP_ALL_TO_ALL ? "EXCHANGE_MIN_BYTES" : "MIN_BYTES",
                         d->why, TEXT_MAX);
        else
            explain_no_rings(answer, call, d->why);
        break;
    }
    return choice.path;
}

/* Bytes as NCCL asks its tuner. */
static uint64_t nccl_bytes(const struct answer *answer, const struct call *call, enum lc_path path)
{
    uint64_t bytes = lc_op_bytes(&call->op, call->ranks);

    if (call->op.kind == LC_OP_ALL_GATHER)
        bytes *= (uint64_t)call->ranks;
    return path == LC_PATH_CAST ? bytes / 2 : bytes;
}

/* What NCCL's ways cost, where its tuner is asked: for other operations nothing is measured either. */
static void estimate(struct answer *answer, const struct call *call,
                     const struct lc_profile_rule *rule, uint64_t bytes)
{
    const struct lc_cost_call cost = { .op = (uint8_t)call->profile_op,
                                       .ranks = (uint32_t)call->ranks,
                                       .nodes = (uint32_t)call->nodes,
                                       .bytes = bytes };

    if (call->profile_op != LC_PROFILE_ALL_REDUCE && call->profile_op != LC_PROFILE_ALL_GATHER &&
        call->profile_op != LC_PROFILE_REDUCE_SCATTER)
        return;
    answer->cost = cost;
    answer->asked = true;
    lc_tune_estimate(answer->topology, answer->profile, answer->profile_path, &cost, rule,
                     &answer->costs);
}

static void explain_nccl(struct answer *answer, const struct call *call, enum lc_path path)
{
    const struct lc_profile_rule *rule = NULL;
    const char *plugin = lc_environment_get("NCCL_TUNER_PLUGIN");
    struct decision *d = &answer->nccl;
    bool ours = plugin && strstr(plugin, "loongcomm");

    (void)snprintf(d->choice, TEXT_MAX, "NCCL's own choice");
    if (path == LC_PATH_RINGS || path == LC_PATH_EXCHANGE) {
        (void)snprintf(d->choice, TEXT_MAX, "not asked");
        (void)snprintf(d->why, TEXT_MAX, "the call does not reach NCCL");
        return;
    }
    if (answer->profile && call->profile_op >= 0 && answer->settings.config.enable)
        rule = lc_profile_nccl(answer->profile, (unsigned)call->profile_op, (uint64_t)call->ranks,
                               (uint64_t)call->nodes, nccl_bytes(answer, call, path));
    estimate(answer, call, rule, nccl_bytes(answer, call, path));
    if (!rule) {
        (void)snprintf(d->why, TEXT_MAX, "default: %s",
                       answer->profile ? "no rule of the profile holds" : "there is no profile");
        return;
    }
    (void)lc_profile_print_rule(rule, d->rule, sizeof(d->rule));
    if (!ours) {
        (void)snprintf(d->why, TEXT_MAX,
                       "NCCL_TUNER_PLUGIN does not name libnccl-tuner-loongcomm.so, else by: %s",
                       d->rule);
        return;
    }
    (void)snprintf(d->choice, TEXT_MAX, "%s %s", lc_profile_algorithm_name(rule->algorithm),
                   lc_profile_protocol_name(rule->protocol));
    if (rule->width)
        (void)snprintf(d->choice + strlen(d->choice), TEXT_MAX - strlen(d->choice),
                       ", %u channels at most", rule->width);
    (void)snprintf(d->why, TEXT_MAX, "rule of the profile: %s%s", d->rule,
                   lc_environment_has("NCCL_ALGO") || lc_environment_has("NCCL_PROTO")
                       ? "; NCCL_ALGO and NCCL_PROTO of the environment rule out what they do not "
                         "name"
                   : answer->costs.placed
                       ? "; where it ends was placed by the model, and measured on this side of it"
                       : "");
}

static const char *way_name(const struct lc_tune_estimate *e, char *out, size_t size)
{
    char channels[16] = "";

    if (e->is_default)
        return "NCCL's default";
    if (e->way.width)
        (void)snprintf(channels, sizeof(channels), " %u", e->way.width);
    (void)snprintf(out, size, "%s %s%s", lc_profile_algorithm_name(e->way.algorithm),
                   lc_profile_protocol_name(e->way.protocol), channels);
    return out;
}

static const char *microseconds(double us, char *out, size_t size)
{
    if (us > 0)
        (void)snprintf(out, size, "%.1f us", us);
    else
        (void)snprintf(out, size, "-");
    return out;
}

#define SHOWN 12 /* ways in text, the fastest */

static void print_costs(const struct answer *answer)
{
    const struct lc_tune_costs *costs = &answer->costs;

    (void)printf("NCCL's ways for its %llu bytes; the model of costs decides nothing:\n",
                 (unsigned long long)answer->cost.bytes);
    (void)printf("   wires: %s\n   measured: %s\n", costs->wires.note, costs->figures);
    if (costs->n)
        (void)printf("   %-20s %14s %14s %10s %14s\n", "", "measured", "fitted", "off by",
                     "by wires");
    for (int i = 0; i < costs->n && i < SHOWN; i++) {
        const struct lc_tune_estimate *e = &costs->at[i];
        char name[64], measured[32], fitted[32], wires[32], off[32] = "";

        if (e->fitted_us > 0)
            (void)snprintf(off, sizeof(off), "%.0f %%", 100 * e->error);
        (void)printf("   %-20s %14s %14s %10s %14s\n", way_name(e, name, sizeof(name)),
                     microseconds(e->measured_us, measured, sizeof(measured)),
                     microseconds(e->fitted_us, fitted, sizeof(fitted)), off,
                     microseconds(e->wires_us, wires, sizeof(wires)));
    }
    if (costs->n > SHOWN)
        (void)printf("   and %d slower ones (--json)\n", costs->n - SHOWN);
}

static void print_text(const struct answer *answer, const struct call *call)
{
    (void)printf("%s of %zu bytes, %s, %d ranks on %d node%s\n", lc_op_name(call->op.kind),
                 call->bytes, call->type, call->ranks, call->nodes, call->nodes == 1 ? "" : "s");
    (void)printf("profile: %s\n", answer->profile_note);
    (void)printf("path: %s\n   why: %s\n", answer->path.choice, answer->path.why);
    (void)printf("NCCL's algorithm: %s\n   why: %s\n", answer->nccl.choice, answer->nccl.why);
    if (answer->asked)
        print_costs(answer);
    if (call->op.kind == LC_OP_ALL_REDUCE && answer->settings.config.coalesce &&
        answer->settings.config.enable && strcmp(answer->path.choice, "NCCL") == 0)
        (void)printf("in a group with others: packed into one call (LOONGCOMM_COALESCE) if both "
                     "are up to %zu bytes\n",
                     LC_PACK_BYTES);
}

static void json_text(struct lc_json *json, const char *key, const char *text)
{
    lc_json_key(json, key);
    lc_json_string(json, text && *text ? text : NULL);
}

static void json_decision(struct lc_json *json, const char *key, const struct decision *decision)
{
    lc_json_key(json, key);
    lc_json_object(json);
    json_text(json, "choice", decision->choice);
    json_text(json, "why", decision->why);
    json_text(json, "rule", decision->rule);
    lc_json_end(json);
}

static void json_us(struct lc_json *json, const char *key, double us)
{
    if (!(us > 0))
        return;
    lc_json_key(json, key);
    lc_json_double(json, us);
}

static void json_costs(struct lc_json *json, const struct answer *answer)
{
    const struct lc_tune_costs *costs = &answer->costs;
    char name[64];

    lc_json_key(json, "costs");
    lc_json_object(json);
    lc_json_key(json, "bytes");
    lc_json_uint(json, answer->cost.bytes);
    json_text(json, "wires", costs->wires.note);
    json_text(json, "figures", costs->figures);
    lc_json_key(json, "ways");
    lc_json_array(json);
    for (int i = 0; i < costs->n; i++) {
        const struct lc_tune_estimate *e = &costs->at[i];

        lc_json_object(json);
        json_text(json, "way", e->is_default ? "default" : way_name(e, name, sizeof(name)));
        json_us(json, "measured_us", e->measured_us);
        json_us(json, "fitted_us", e->fitted_us);
        if (e->fitted_us > 0) {
            lc_json_key(json, "error");
            lc_json_double(json, e->error);
            lc_json_key(json, "sizes");
            lc_json_int(json, e->points);
        }
        json_us(json, "wires_us", e->wires_us);
        lc_json_end(json);
    }
    lc_json_end(json);
    lc_json_end(json);
}

static void print_json(const struct answer *answer, const struct call *call)
{
    struct lc_json json;

    lc_json_init(&json, stdout);
    lc_json_object(&json);
    json_text(&json, "schema", "loongcomm.explain/1");
    json_text(&json, "op", lc_op_name(call->op.kind));
    lc_json_key(&json, "bytes");
    lc_json_uint(&json, call->bytes);
    json_text(&json, "dtype", call->type);
    lc_json_key(&json, "ranks");
    lc_json_int(&json, call->ranks);
    lc_json_key(&json, "nodes");
    lc_json_int(&json, call->nodes);
    json_text(&json, "profile", answer->profile_path);
    json_decision(&json, "path", &answer->path);
    json_decision(&json, "nccl", &answer->nccl);
    if (answer->asked)
        json_costs(&json, answer);
    lc_json_end(&json);
    (void)lc_json_finish(&json); /* a failing stream is seen by main() */
}

int lc_tune_explain(const struct lc_tune_question *question)
{
    static struct answer answer;
    struct call call = { 0 };
    int code = parse_call(question, &call);

    if (code)
        return code;
    lc_cli_settings_load(&answer.settings);
    for (size_t i = 0; i < answer.settings.problem_count; i++)
        lc_cli_say("%s", answer.settings.problem[i]);
    answer.topology = question->topology;
    code = load_profile(question, &answer);
    if (code)
        return code;
    complete(answer.profile, &call);
    if (call.nodes > call.ranks)
        code = lc_cli_usage("tune: %d ranks cannot be on %d nodes", call.ranks, call.nodes);
    if (!code) {
        explain_nccl(&answer, &call, explain_path(&answer, &call));
        if (question->json)
            print_json(&answer, &call);
        else
            print_text(&answer, &call);
    }
    free(answer.profile);
    answer.profile = NULL;
    return code;
}
