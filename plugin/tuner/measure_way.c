/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/tuner/measure.h"

#define MARK_BITS  (UINT64_C(0xffff) << 48)
#define KIND(word) ((word) >> 32 & 0xffff)

bool lc_measure_apply(uint64_t word, const struct lc_tuner_table *table, int *channels)
{
    const struct lc_profile_rule way = {
        .algorithm = word >> 24 & 0xff,
        .protocol = word >> 16 & 0xff,
        .width = word & 0xffff,
    };

    if ((word & MARK_BITS) != LC_MEASURE_MARK || KIND(word) != LC_MEASURE_FORCED)
        return false;
    return lc_tuner_apply(&way, table, channels);
}

uint64_t lc_measure_choice(const struct lc_tuner_table *table, int channels)
{
    int best = -1;

    for (int i = 0; i < table->algorithms * table->protocols; i++) {
        if (table->costs[i] >= 0 && (best < 0 || table->costs[i] < table->costs[best]))
            best = i;
    }
    if (best < 0)
        return 0;
    return lc_measure_word(LC_MEASURE_FORCED, (unsigned)(best / table->protocols),
                           (unsigned)(best % table->protocols), (unsigned)channels);
}
