/* SPDX-License-Identifier: Apache-2.0
 *
 * What has been measured, in memory and in a file beside the profile, so that another call goes on from there:
 *
 *     loongcomm.tune/1
 *     gpu NVIDIA H200
 *     nccl 22809 ranks 2 nodes 2
 *     how 4096,65536 live 1
 *     65536 1.012 0.991 1.033
 *     done rings all-reduce exact two-shot 32
 *
 * Figures (bytes; median, p10 and p90 of the ratio) stand in front of the step that they are of, or `failed STEP`; `open
 * STEP` is one that was not measured at all sizes.
 */
#include "common/cleanup.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/tune.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define HEAD "loongcomm.tune/1"

int lc_tune_add(struct lc_tune_results *results, int step, uint64_t bytes,
                const struct lc_tune_ratio *ratio)
{
    if (results->n == results->room) {
        size_t room = results->room ? results->room * 2 : 256;
        struct lc_tune_figure *figures = realloc(results->figures, room * sizeof(*figures));

        if (!figures)
            return -ENOMEM;
        results->figures = figures;
        results->room = room;
    }
    results->figures[results->n++] = (struct lc_tune_figure){ step, bytes, *ratio };
    return 0;
}

const struct lc_tune_ratio *lc_tune_find(const struct lc_tune_results *results, int step,
                                         uint64_t bytes)
{
    for (size_t i = 0; i < results->n; i++) {
        if (results->figures[i].step == step && results->figures[i].bytes == bytes)
            return &results->figures[i].ratio;
    }
    return NULL;
}

void lc_tune_forget(struct lc_tune_results *results, int step)
{
    size_t kept = 0;

    for (size_t i = 0; i < results->n; i++) {
        if (results->figures[i].step != step)
            results->figures[kept++] = results->figures[i];
    }
    results->n = kept;
}

/* By enum lc_tune_state. */
static const char *const states[] = { "open", "done", "failed" };

static void write_step(FILE *out, const struct lc_tune_results *results, int step)
{
    char name[LC_TUNE_LINE];
    bool any = false;

    for (size_t i = 0; i < results->n; i++) {
        const struct lc_tune_figure *figure = &results->figures[i];

        if (figure->step != step)
            continue;
        (void)fprintf(out, "%" PRIu64 " %.6f %.6f %.6f\n", figure->bytes, figure->ratio.median,
                      figure->ratio.p10, figure->ratio.p90);
        any = true;
    }
    if (!any && results->state[step] == LC_TUNE_OPEN)
        return;
    lc_tune_step_name(&lc_tune_steps[step], name, sizeof(name));
    (void)fprintf(out, "%s %s\n", states[results->state[step]], name);
}

static void write_results(FILE *out, const void *arg)
{
    const struct lc_tune_results *results = arg;

    (void)fprintf(out, HEAD "\ngpu %s\nnccl %d ranks %d nodes %d\nhow %s\n", results->gpu,
                  results->nccl, results->ranks, results->nodes, results->how);
    for (int i = 0; i < lc_tune_n_steps; i++)
        write_step(out, results, i);
}

int lc_tune_save(const struct lc_tune_results *results, const char *path)
{
    return lc_tune_write_file(path, write_results, results);
}

static int find_step(const char *name)
{
    char own[LC_TUNE_LINE];

    for (int i = 0; i < lc_tune_n_steps; i++) {
        lc_tune_step_name(&lc_tune_steps[i], own, sizeof(own));
        if (strcmp(own, name) == 0)
            return i;
    }
    return -1;
}

static int take_text(const char *line, const char *name, char *out, size_t size)
{
    size_t skip = strlen(name);
    size_t length = strlen(line);

    if (strncmp(line, name, skip) != 0 || length == skip || length - skip >= size)
        return -EINVAL;
    memcpy(out, line + skip, length - skip + 1);
    return 0;
}

/* A step, for the figures in front of it. 0: it is none; -EINVAL: not one, or once more. */
static int take_step(struct lc_tune_results *out, const char *line, size_t *open)
{
    for (int state = 0; state < (int)(sizeof(states) / sizeof(*states)); state++) {
        size_t skip = strlen(states[state]);
        int step;

        if (strncmp(line, states[state], skip) != 0 || line[skip] != ' ')
            continue;
        step = find_step(line + skip + 1);
        if (step < 0 || out->state[step] != LC_TUNE_OPEN)
            return -EINVAL;
        for (size_t i = 0; i < *open; i++) {
            if (out->figures[i].step == step)
                return -EINVAL;
        }
        out->state[step] = (uint8_t)state;
        for (; *open < out->n; ++*open)
            out->figures[*open].step = step;
        return 1;
    }
    return 0;
}

/* Figures stand in front of their step: until then they belong to none. */
static int take_line(struct lc_tune_results *out, char *line, int number, size_t *open)
{
    struct lc_tune_ratio ratio;
    uint64_t bytes;
    int end = 0;
    int taken;

    if (number == 1)
        return strcmp(line, HEAD) == 0 ? 0 : -EINVAL;
    if (number == 2)
        return take_text(line, "gpu ", out->gpu, sizeof(out->gpu));
    if (number == 4)
        return take_text(line, "how ", out->how, sizeof(out->how));
    if (number == 3)
        return sscanf(line, "nccl %9d ranks %9d nodes %9d%n", &out->nccl, &out->ranks, &out->nodes,
                      &end) == 3 &&
                       !line[end] && out->nccl > 0 && out->ranks > 1 && out->nodes > 0 &&
                       out->nodes <= out->ranks
                   ? 0
                   : -EINVAL;
    taken = take_step(out, line, open);
    if (taken)
        return taken < 0 ? taken : 0;
    if (sscanf(line, "%19" SCNu64 " %lf %lf %lf%n", &bytes, &ratio.median, &ratio.p10, &ratio.p90,
               &end) != 4 ||
        line[end] || bytes == 0 || bytes > (uint64_t)1 << 60 || !lc_tune_is_ratio(&ratio) ||
        out->n > (size_t)LC_TUNE_STEPS * LC_TUNE_SIZES)
        return -EINVAL;
    return lc_tune_add(out, -1, bytes, &ratio);
}

int lc_tune_load(const char *path, struct lc_tune_results *out)
{
    lc_autofclose FILE *in = fopen(path, "re");
    struct lc_tune_results results = { 0 };
    char line[LC_TUNE_HOW + 8];
    size_t open = 0;
    int number = 0;
    int err = 0;

    if (!in) {
        err = -errno;
        if (err != -ENOENT)
            lc_cli_say("tune: cannot read %s: %s", path, strerror(-err));
        return err;
    }
    while (!err && fgets(line, sizeof(line), in)) {
        size_t length = strlen(line);

        number++;
        if (!length || line[length - 1] != '\n')
            err = -EINVAL; /* written whole or not at all */
        else
            line[length - 1] = '\0';
        if (!err)
            err = take_line(&results, line, number, &open);
    }
    if (!err && (number < 4 || open != results.n || ferror(in)))
        err = -EINVAL;
    if (err) {
        lc_cli_say("tune: %s, line %d: not what `loongcomm tune` writes; remove it, or go without "
                   "--resume",
                   path, number);
        free(results.figures);
        return err;
    }
    *out = results;
    return 0;
}
