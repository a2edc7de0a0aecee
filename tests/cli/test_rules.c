/* SPDX-License-Identifier: Apache-2.0
 *
 * What a second look is taken at where all sizes have rules, and borders between them. */
#include "interpose/cli/cli.h"
#include "interpose/cli/tune.h"
#include "tests/check.h"

#include <string.h>

static const struct lc_tune_ratio wins = { 1.5, 1.4, 1.6 }, loses = { 0.9, 0.8, 1.0 };

void lc_cli_say(const char *format, ...)
{
}

int lc_tune_write_file(const char *path, void (*write)(FILE *out, const void *arg), const void *arg)
{
    return 0;
}

/* Sizes 64 KiB apart; between two of them one way ends and another begins, or one goes on. */
static struct lc_tune_choice choose(bool borders)
{
    struct lc_tune_choice choice = {
        .place = {LC_TUNE_NCCL, LC_PROFILE_ALL_REDUCE, 0},
        .n = LC_TUNE_SIZES
    };

    for (int i = 0; i < choice.n; i++) {
        struct lc_tune_point *point = &choice.point[i];
        uint64_t bytes = (uint64_t)(i + 1) << 16;

        *point = (struct lc_tune_point){
            .bytes = bytes,
            .next = -1,
            .least = {0, 1.1, 1.1}
        };
        point->won = wins;
        if (i + 1 < choice.n && borders)
            point->until = point->since = bytes + (1 << 15);
        else if (i + 1 < choice.n)
            point->next = 0;
    }
    return choice;
}

static int look(const struct lc_tune_choice *choice, struct lc_tune_recheck *out)
{
    uint64_t sizes[LC_TUNE_CHECKS];
    int n = lc_tune_recheck_sizes(choice, sizes);

    for (int i = 0; i < n; i++) {
        CHECK(i == 0 || sizes[i - 1] < sizes[i]);
        out[i] = (struct lc_tune_recheck){ .bytes = sizes[i], .ratio = wins };
    }
    return n;
}

static void every_size_and_border_is_looked_at(void)
{
    static struct lc_tune_recheck found[LC_TUNE_CHECKS];
    struct lc_tune_choice choice = choose(true);
    int n = look(&choice, found);

    CHECK(n == 3 * LC_TUNE_SIZES - 2);
    lc_tune_confirm(&choice, found, n);
    for (int i = 0; i < choice.n; i++) {
        CHECK(choice.point[i].way == 0);
        CHECK(i + 1 == choice.n || (choice.point[i].until && choice.point[i].since));
    }
    choice = choose(false);
    n = look(&choice, found);
    CHECK(n == 2 * LC_TUNE_SIZES - 1);
    lc_tune_confirm(&choice, found, n);
    for (int i = 0; i < choice.n; i++)
        CHECK(choice.point[i].way == 0 && (i + 1 == choice.n || choice.point[i].next == 0));
}

static void what_loses_then_is_dropped(void)
{
    static struct lc_tune_recheck found[LC_TUNE_CHECKS];
    struct lc_tune_choice choice = choose(true);
    int n = look(&choice, found);

    found[n - 1].ratio = loses; /* the last size */
    found[n - 3].ratio = loses; /* up to the border before it */
    lc_tune_confirm(&choice, found, n);
    CHECK(choice.point[choice.n - 1].way < 0 && choice.point[choice.n - 2].way == 0);
    CHECK(!choice.point[choice.n - 2].until && !choice.point[choice.n - 2].since);
    CHECK(choice.point[choice.n - 3].until && choice.point[choice.n - 3].since);
}

int main(void)
{
    every_size_and_border_is_looked_at();
    what_loses_then_is_dropped();
    return 0;
}
