/* SPDX-License-Identifier: Apache-2.0
 *
 * Any text as what `loongcomm tune` has measured: what is accepted is written and read again, fitted, and made to rules, which
 * are a profile. The source is included to be instrumented. NOLINTNEXTLINE(bugprone-suspicious-include) */
#include "interpose/cli/tune_state.c"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

void lc_cli_say(const char *format, ...)
{
}

int lc_tune_write_file(const char *path, void (*write)(FILE *out, const void *arg), const void *arg)
{
    return 0;
}

static void check(bool good)
{
    if (!good)
        abort();
}

static void read_again(const struct lc_tune_results *results)
{
    struct lc_tune_results again = { 0 };
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    int number;

    check(file != NULL);
    write_results(file, results);
    (void)fclose(file);
    if (read_lines(text, size, &again, &number) ==
        0) /* a figure may have been too small to be written */
        check(again.n == results->n && again.n_times == results->n_times &&
              again.ranks == results->ranks);
    lc_tune_free(&again);
    free(text);
}

static void fit_all(const struct lc_tune_results *results)
{
    for (int i = 0; i < lc_tune_n_steps; i++) {
        struct lc_cost_fit fit;

        if (lc_tune_fit(results, i, &fit) != 0)
            continue;
        check(fit.start_us >= 0 && fit.root_us >= 0 && fit.byte_us >= 0 && fit.error >= 0);
        check(lc_cost_at(&fit, fit.to) >= lc_cost_at(&fit, fit.from));
    }
}

/* Rules of a place do not overlap, or no profile could hold them. */
static void make_rules(const struct lc_tune_results *results, const struct lc_tune_place *place)
{
    static struct lc_tune_choice choice;
    static struct lc_tune_rule rules[2 * LC_TUNE_POINTS];
    uint64_t sizes[LC_TUNE_CHECKS];
    char said[256];
    int n;

    lc_tune_choose(results, place, &choice);
    lc_tune_place_crossings(results, &choice, said, sizeof(said));
    n = lc_tune_recheck_sizes(&choice, sizes);
    check(n <= LC_TUNE_CHECKS);
    for (int i = 1; i < n; i++)
        check(sizes[i - 1] < sizes[i]);
    n = lc_tune_rules(&choice, results->ranks, results->nodes, rules);
    check(n <= 2 * LC_TUNE_POINTS);
    for (int i = 0; i < n; i++) {
        check(rules[i].rule.from < rules[i].rule.to);
        check(i == 0 || rules[i - 1].rule.to <= rules[i].rule.from);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lc_tune_results results = { 0 };
    char *text = malloc(size + 1);
    int number;

    check(text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    if (read_lines(text, size, &results, &number) == 0) {
        read_again(&results);
        fit_all(&results);
        for (int i = 0; i < lc_tune_n_places; i++)
            make_rules(&results, &lc_tune_places[i]);
    }
    free(text);
    lc_tune_free(&results);
    return 0;
}
