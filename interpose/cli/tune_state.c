/* SPDX-License-Identifier: Apache-2.0
 *
 * What has been measured, in memory and in a file beside the profile, so that another call goes on from there:
 *
 *     loongcomm.tune/1
 *     gpu NVIDIA H200
 *     nccl 22809 ranks 2 nodes 2
 *     how 4096,65536 live 1
 *     65536 1.012 0.991 1.033
 *     65536 took 302.125
 *     done rings all-reduce exact two-shot 32
 *
 * Figures (bytes; median, p10 and p90 of the ratio) and times (microseconds of a call; of the default in front of `again`)
 * stand in front of the step that they are of, or `failed STEP`; `open STEP` is one that was not measured at all sizes.
 */
#include "common/cleanup.h"
#include "common/input.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/tune.h"

#include <errno.h>
#include <fcntl.h>
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

static struct lc_tune_time *find_time(const struct lc_tune_results *results, int step,
                                      uint64_t bytes)
{
    for (size_t i = 0; i < results->n_times; i++) {
        if (results->times[i].step == step && results->times[i].bytes == bytes)
            return &results->times[i];
    }
    return NULL;
}

static int append_time(struct lc_tune_results *results, int step, uint64_t bytes, double us)
{
    if (results->n_times == results->times_room) {
        size_t room = results->times_room ? results->times_room * 2 : 256;
        struct lc_tune_time *times = realloc(results->times, room * sizeof(*times));

        if (!times)
            return -ENOMEM;
        results->times = times;
        results->times_room = room;
    }
    results->times[results->n_times++] = (struct lc_tune_time){ step, bytes, us };
    return 0;
}

int lc_tune_add_time(struct lc_tune_results *results, int step, uint64_t bytes, double us)
{
    struct lc_tune_time *known = find_time(results, step, bytes);

    if (!known)
        return append_time(results, step, bytes, us);
    known->us = us;
    return 0;
}

double lc_tune_time_of(const struct lc_tune_results *results, int step, uint64_t bytes)
{
    const struct lc_tune_time *time = find_time(results, step, bytes);

    return time ? time->us : 0;
}

void lc_tune_free(struct lc_tune_results *results)
{
    free(results->figures);
    free(results->times);
    *results = (struct lc_tune_results){ 0 };
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
    kept = 0;
    for (size_t i = 0; i < results->n_times; i++) {
        if (results->times[i].step != step)
            results->times[kept++] = results->times[i];
    }
    results->n_times = kept;
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
    for (size_t i = 0; i < results->n_times; i++) {
        const struct lc_tune_time *time = &results->times[i];

        if (time->step != step)
            continue;
        (void)fprintf(out, "%" PRIu64 " took %.3f\n", time->bytes, time->us);
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

void lc_tune_figures_path(const char *profile, int ranks, int nodes, char out[PATH_MAX])
{
    (void)snprintf(out, PATH_MAX, "%s.%dx%d.figures", profile, ranks, nodes);
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

/* Figures and times stand in front of their step: until then, from these on, they belong to none. */
struct open {
    size_t figures, times;
};

static bool has_any(const struct lc_tune_results *results, const struct open *open, int step)
{
    for (size_t i = 0; i < open->figures; i++) {
        if (results->figures[i].step == step)
            return true;
    }
    for (size_t i = 0; i < open->times; i++) {
        if (results->times[i].step == step)
            return true;
    }
    return false;
}

/* A step, for what stands in front of it. 0: it is none; -EINVAL: not one, or once more. */
static int take_step(struct lc_tune_results *out, const char *line, struct open *open)
{
    for (int state = 0; state < (int)(sizeof(states) / sizeof(*states)); state++) {
        size_t skip = strlen(states[state]);
        int step;

        if (strncmp(line, states[state], skip) != 0 || line[skip] != ' ')
            continue;
        step = find_step(line + skip + 1);
        if (step < 0 || out->state[step] != LC_TUNE_OPEN || has_any(out, open, step))
            return -EINVAL;
        out->state[step] = (uint8_t)state;
        for (; open->figures < out->n; open->figures++)
            out->figures[open->figures].step = step;
        for (; open->times < out->n_times; open->times++)
            out->times[open->times].step = step;
        return 1;
    }
    return 0;
}

#define MOST ((size_t)LC_TUNE_STEPS * LC_TUNE_SIZES)

static int take_figure(struct lc_tune_results *out, const char *line)
{
    struct lc_tune_ratio ratio;
    uint64_t bytes;
    double us;
    int end = 0;

    if (sscanf(line, "%19" SCNu64 " took %lf%n", &bytes, &us, &end) == 2 && end && !line[end])
        return bytes == 0 || bytes > (uint64_t)1 << 60 || !(us > 0 && us < 1e12) ||
                       out->n_times > MOST
                   ? -EINVAL
                   : append_time(out, -1, bytes, us);
    if (sscanf(line, "%19" SCNu64 " %lf %lf %lf%n", &bytes, &ratio.median, &ratio.p10, &ratio.p90,
               &end) != 4 ||
        line[end] || bytes == 0 || bytes > (uint64_t)1 << 60 || !lc_tune_is_ratio(&ratio) ||
        out->n > MOST)
        return -EINVAL;
    return lc_tune_add(out, -1, bytes, &ratio);
}

static int take_line(struct lc_tune_results *out, const char *line, int number, struct open *open)
{
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
    return take_figure(out, line);
}

/* Takes `text` apart. `number`: of the line that is refused. What was read is the caller's to free, whatever the answer is. */
static int read_lines(char *text, size_t size, struct lc_tune_results *out, int *number)
{
    struct open open = { 0 };
    char *end = text + size;
    int err = 0;

    *number = 0;
    while (!err && text < end) {
        char *newline = memchr(text, '\n', (size_t)(end - text));

        ++*number;
        if (!newline || memchr(text, '\0', (size_t)(newline - text)))
            return -EINVAL; /* written whole or not at all */
        *newline = '\0';
        err = take_line(out, text, *number, &open);
        text = newline + 1;
    }
    if (!err && (*number < 4 || open.figures != out->n || open.times != out->n_times))
        err = -EINVAL;
    return err;
}

int lc_tune_load(const char *path, struct lc_tune_results *out)
{
    struct lc_tune_results results = { 0 };
    lc_autofree char *text = NULL;
    size_t size = 0;
    int err = lc_input_read(AT_FDCWD, path, 0, LC_TUNE_TEXT_MAX, &text, &size);
    int number;

    if (err) {
        if (err != -ENOENT)
            lc_cli_say("tune: cannot read %s: %s", path, lc_input_why(err));
        return err;
    }
    err = read_lines(text, size, &results, &number);
    if (err) {
        lc_cli_say("tune: %s, line %d: not what `loongcomm tune` writes; remove it, or go without "
                   "--resume",
                   path, number);
        lc_tune_free(&results);
        return err;
    }
    *out = results;
    return 0;
}
