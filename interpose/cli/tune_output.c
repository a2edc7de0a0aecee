/* SPDX-License-Identifier: Apache-2.0
 *
 * What `loongcomm tune` writes and prints. */
#include "common/cleanup.h"
#include "common/input.h"
#include "common/json.h"
#include "common/output.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/tune.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

/* Of NCCL, as three arguments. */
#define VERSION(code) (code) / 10000, (code) / 100 % 100, (code) % 100

static void write_head(FILE *out, const struct lc_tune_results *results)
{
    (void)fprintf(out, "loongcomm.profile/1\ngpu %s\nnccl %d.%d.%d\n", results->gpu,
                  VERSION(results->nccl));
}

int lc_tune_write_file(const char *path, void (*write)(FILE *out, const void *arg), const void *arg)
{
    struct lc_output_file file = { 0 };
    int err = lc_output_open(&file, path);

    if (!err) {
        write(file.out, arg);
        err = lc_output_close(&file, true);
    }
    if (err)
        lc_cli_say("tune: cannot write %s: %s", path, lc_input_why(err));
    return err;
}

struct profile {
    const struct lc_tune_results *results;
    const struct lc_tune_rule *rules;
    int n;
    struct lc_profile *old; /* NULL: none */
};

/* A rule may have no size of its own, but lie between two. */
static bool is_measured(const struct lc_tune_rule *rule)
{
    return rule->best > 0;
}

static void write_rules(FILE *out, const void *arg)
{
    const struct profile *profile = arg;
    char line[LC_TUNE_LINE];

    write_head(out, profile->results);
    for (size_t i = 0; profile->old && i < profile->old->n; i++) {
        const struct lc_profile_rule *rule = &profile->old->rules[i];

        if ((int)rule->ranks == profile->results->ranks &&
            (rule->who == LC_PROFILE_RINGS || (int)rule->nodes == profile->results->nodes))
            continue;
        (void)lc_profile_print_rule(rule, line, sizeof(line));
        (void)fprintf(out, "%s\n", line);
    }
    (void)fprintf(out,
                  "# measured with %d ranks, for NCCL on %d nodes; behind a rule NCCL's time / "
                  "its: the worst p10 and the best median\n",
                  profile->results->ranks, profile->results->nodes);
    (void)fprintf(out, "# %.200s\n", profile->results->how); /* lines are bounded */
    for (int i = 0; i < profile->n; i++) {
        (void)lc_profile_print_rule(&profile->rules[i].rule, line, sizeof(line));
        if (is_measured(&profile->rules[i]))
            (void)fprintf(out, "%s # %.3f, %.3f\n", line, profile->rules[i].worst.p10,
                          profile->rules[i].best);
        else
            (void)fprintf(out, "%s # won at the sizes around it\n", line);
    }
}

int lc_tune_check_out(const char *path, const struct lc_tune_results *results)
{
    struct lc_profile *old = access(path, F_OK) == 0 ? lc_profile_load(path) : NULL;
    int err = 0;

    if (!old && access(path, F_OK) == 0) {
        lc_cli_say("tune: %s is no profile, and is left alone; name another --out", path);
        return -EEXIST;
    }
    if (old &&
        (strcmp(old->gpu, results->gpu) != 0 || (results->nccl && old->nccl != results->nccl))) {
        lc_cli_say("tune: %s is for %s and NCCL %d.%d.%d, and is left alone; name another --out",
                   path, old->gpu, VERSION(old->nccl));
        err = -EEXIST;
    }
    free(old);
    return err;
}

int lc_tune_write_profile(const char *path, const struct lc_tune_results *results,
                          const struct lc_tune_rule *rules, int n)
{
    struct profile profile = { results, rules, n, NULL };
    int err;

    if (access(path, F_OK) == 0)
        profile.old = lc_profile_load(path);
    err = lc_tune_write_file(path, write_rules, &profile);
    free(profile.old);
    return err;
}

int lc_tune_write_rules(const char *path, const struct lc_tune_results *results,
                        const struct lc_tune_rule *rules, int n)
{
    const struct profile profile = { results, rules, n, NULL };

    return lc_tune_write_file(path, write_rules, &profile);
}

struct candidate {
    const struct lc_tune_results *results;
    const struct lc_tune_step *step;
};

static void write_way(FILE *out, const void *arg)
{
    const struct candidate *candidate = arg;
    struct lc_profile_rule rule = candidate->step->way;
    char line[LC_TUNE_LINE];

    rule.from = 0;
    rule.to = UINT64_MAX;
    rule.ranks = (uint32_t)candidate->results->ranks;
    rule.nodes = rule.who == LC_PROFILE_RINGS ? 1 : (uint32_t)candidate->results->nodes;
    (void)lc_profile_print_rule(&rule, line, sizeof(line));
    write_head(out, candidate->results);
    (void)fprintf(out, "%s\n", line);
}

int lc_tune_write_candidate(const char *path, const struct lc_tune_results *results,
                            const struct lc_tune_step *step)
{
    const struct candidate candidate = { results, step };

    return lc_tune_write_file(path, write_way, &candidate);
}

static void size_text(uint64_t bytes, char out[24])
{
    static const char units[] = " kmg";
    int unit = 0;

    while (unit < 3 && bytes >= 1024 && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    (void)snprintf(out, 24, unit ? "%" PRIu64 "%c" : "%" PRIu64, bytes, units[unit]);
}

void lc_tune_print_figures(const char *name, const struct lc_tune_found *found)
{
    char size[24];

    (void)printf("%s:", name);
    for (int i = 0; i < found->n; i++) {
        size_text(found->at[i].bytes, size);
        (void)printf("  %s %.2f(%.2f)", size, found->at[i].ratio.median, found->at[i].ratio.p10);
    }
    if (found->taken > 0)
        (void)printf("  [%.0f %% of calls through mapped memory]", 100 * found->taken);
    (void)printf("\n");
    (void)fflush(stdout);
}

static int count(const struct lc_tune_results *results, enum lc_tune_state state)
{
    int n = 0;

    for (int i = 0; i < lc_tune_n_steps; i++)
        n += results->state[i] == state;
    return n;
}

void lc_tune_print_summary(const struct lc_tune_results *results,
                           const struct lc_tune_summary *summary)
{
    char line[LC_TUNE_LINE];

    (void)printf("\n%s: %d rule%s for %d ranks on %s, NCCL %d.%d.%d\n", summary->out, summary->n,
                 summary->n == 1 ? "" : "s", results->ranks, results->gpu, VERSION(results->nccl));
    for (int i = 0; i < summary->n; i++) {
        (void)lc_profile_print_rule(&summary->rules[i].rule, line, sizeof(line));
        if (is_measured(&summary->rules[i]))
            (void)printf("  %s  (p10 %.3f at least, up to %.3f)\n", line,
                         summary->rules[i].worst.p10, summary->rules[i].best);
        else
            (void)printf("  %s  (won at the sizes around it)\n", line);
    }
    if (summary->n == 0)
        (void)printf("  nothing was found to be faster than NCCL's own choices\n");
    if (count(results, LC_TUNE_FAILED))
        (void)printf("%d ways could not be measured, and get no rules\n",
                     count(results, LC_TUNE_FAILED));
    if (summary->open)
        (void)printf("%d of %d ways were not tried within the time: --resume goes on with them\n",
                     summary->open, lc_tune_n_steps);
    (void)printf("use it: LOONGCOMM_PROFILE=%s, with LOONGCOMM_PEER=auto for rules of rings, and "
                 "with NCCL_TUNER_PLUGIN=libnccl-tuner-loongcomm.so for those of nccl\n",
                 summary->out);
}

static void json_number(struct lc_json *json, const char *key, double value)
{
    lc_json_key(json, key);
    lc_json_double(json, value);
}

static void json_figures(struct lc_json *json, const struct lc_tune_results *results, int step)
{
    lc_json_key(json, "ratios");
    lc_json_array(json);
    for (size_t i = 0; i < results->n; i++) {
        const struct lc_tune_figure *figure = &results->figures[i];

        if (figure->step != step)
            continue;
        lc_json_object(json);
        lc_json_key(json, "bytes");
        lc_json_uint(json, figure->bytes);
        json_number(json, "median", figure->ratio.median);
        json_number(json, "p10", figure->ratio.p10);
        json_number(json, "p90", figure->ratio.p90);
        lc_json_end(json);
    }
    lc_json_end(json);
}

static void json_steps(struct lc_json *json, const struct lc_tune_results *results)
{
    static const char *const states[] = { "open", "done", "failed" };
    char name[LC_TUNE_LINE];

    lc_json_key(json, "steps");
    lc_json_array(json);
    for (int i = 0; i < lc_tune_n_steps; i++) {
        lc_tune_step_name(&lc_tune_steps[i], name, sizeof(name));
        lc_json_object(json);
        lc_json_key(json, "step");
        lc_json_string(json, name);
        lc_json_key(json, "state");
        lc_json_string(json, states[results->state[i]]);
        json_figures(json, results, i);
        lc_json_end(json);
    }
    lc_json_end(json);
}

void lc_tune_print_json(const struct lc_tune_results *results,
                        const struct lc_tune_summary *summary)
{
    char line[LC_TUNE_LINE];
    struct lc_json json;

    lc_json_init(&json, stdout);
    lc_json_object(&json);
    lc_json_key(&json, "schema");
    lc_json_string(&json, "loongcomm.tune/1");
    lc_json_key(&json, "gpu");
    lc_json_string(&json, results->gpu);
    lc_json_key(&json, "nccl");
    (void)snprintf(line, sizeof(line), "%d.%d.%d", VERSION(results->nccl));
    lc_json_string(&json, line);
    lc_json_key(&json, "ranks");
    lc_json_int(&json, results->ranks);
    lc_json_key(&json, "nodes");
    lc_json_int(&json, results->nodes);
    lc_json_key(&json, "profile");
    lc_json_string(&json, summary->out);
    lc_json_key(&json, "complete");
    lc_json_bool(&json, summary->open == 0);
    lc_json_key(&json, "rules");
    lc_json_array(&json);
    for (int i = 0; i < summary->n; i++) {
        (void)lc_profile_print_rule(&summary->rules[i].rule, line, sizeof(line));
        lc_json_object(&json);
        lc_json_key(&json, "rule");
        lc_json_string(&json, line);
        if (is_measured(&summary->rules[i])) {
            json_number(&json, "worst_p10", summary->rules[i].worst.p10);
            json_number(&json, "best_median", summary->rules[i].best);
        }
        lc_json_end(&json);
    }
    lc_json_end(&json);
    json_steps(&json, results);
    lc_json_end(&json);
    (void)lc_json_finish(&json); /* a failing stream is seen by main() */
}
