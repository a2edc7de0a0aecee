/* SPDX-License-Identifier: Apache-2.0
 *
 * How many slots follow on how many. */
#include "interpose/sizing.h"
#include "tests/check.h"

#include <stdint.h>

static void twice_as_many_if_there_may_be(void)
{
    CHECK(lc_sizing_more(1, 16, 20) == 2);
    CHECK(lc_sizing_more(4, 16, 20) == 8);
    CHECK(lc_sizing_more(8, 16, 20) == 16);
    CHECK(lc_sizing_more(12, 16, 20) == 16);
    CHECK(lc_sizing_more(4, 16, 0) == 8);
}

static void no_more_than_serve_a_purpose(void)
{
    CHECK(lc_sizing_more(8, 10, 20) == 10);
    CHECK(lc_sizing_more(8, 8, 20) == 0);
    CHECK(lc_sizing_more(8, 1, 20) == 0);
}

static void too_few_are_not_worth_it(void)
{
    CHECK(lc_sizing_more(8, 9, 20) == 0);
    CHECK(lc_sizing_more(8, 9, 12) == 9);
    CHECK(lc_sizing_more(14, 16, 20) == 0);
    CHECK(lc_sizing_more(16, 16, 20) == 0);
    CHECK(lc_sizing_more(16, 16, 0) == 0);
    CHECK(lc_sizing_more(4, 16, 300) == 16);
    CHECK(lc_sizing_more(4, 16, 301) == 0);
    CHECK(lc_sizing_more(1, 16, SIZE_MAX) == 0);
}

int main(void)
{
    twice_as_many_if_there_may_be();
    no_more_than_serve_a_purpose();
    too_few_are_not_worth_it();
    return 0;
}
