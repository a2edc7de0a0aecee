/* SPDX-License-Identifier: Apache-2.0
 *
 * libnccl-tuner-loongcomm-measure.so: a tuner plugin for measuring. NCCL asks its tuner at every call, so whoever makes the
 * calls can send each another way, in one job with resident communicators. Only loongcomm-bench does: it loads the plugin
 * through NCCL_TUNER_PLUGIN, finds `loongcomm_measure_v1` in it, and writes a way there before its calls, the same at all
 * ranks. In any other process nobody writes: the word stays 0 and NCCL chooses by itself. There is no file and no shared
 * memory to be filled by somebody else; a word that says nothing sensible is NCCL's default, and nothing is ever an error to
 * NCCL. */
#ifndef LC_PLUGIN_TUNER_MEASURE_H
#define LC_PLUGIN_TUNER_MEASURE_H

#include "plugin/tuner/choose.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define LC_MEASURE_FILE   "libnccl-tuner-loongcomm-measure.so"
#define LC_MEASURE_SYMBOL "loongcomm_measure_v1"

enum lc_measure_kind {
    LC_MEASURE_DEFAULT, /* NCCL's choice, by our network's tuner if it uses that: as without a tuner plugin */
    LC_MEASURE_FORCED,
    LC_MEASURE_PRODUCT, /* what libnccl-tuner-loongcomm.so beside this library makes of it */
};

/* A way in a word: a mark, kind, algorithm, protocol and channels (0: as NCCL chooses). The default is 0. */
#define LC_MEASURE_MARK (UINT64_C(0x4c43) << 48)

static inline uint64_t lc_measure_word(enum lc_measure_kind kind, unsigned algorithm,
                                       unsigned protocol, unsigned channels)
{
    if (kind == LC_MEASURE_DEFAULT)
        return 0;
    return LC_MEASURE_MARK | (uint64_t)kind << 32 | (uint64_t)(algorithm & 0xff) << 24 |
           (uint64_t)(protocol & 0xff) << 16 | (channels & 0xffff);
}

/* Every member is one word of its own: `way` is written by the thread that makes NCCL's calls, between them, the others by
 * the thread in which NCCL asks. Relaxed: NCCL hands a call from the one to the other, if they differ at all. */
struct lc_measure {
    uint32_t version; /* 1; constant */
    _Atomic uint32_t
        product;          /* communicators for which LC_MEASURE_PRODUCT is more than the default */
    _Atomic uint64_t way; /* of the calls from now on */
    _Atomic uint64_t asked;  /* calls that NCCL has asked about, ever */
    _Atomic uint64_t taken;  /* of them those that go the way that `way` says */
    _Atomic uint64_t choice; /* how the last of them goes, as a forced way */
};

/* Pure. Writes the way into the table, as a rule of a profile would be. False, and nothing is changed: the word names no
 * way, or one that NCCL has ruled out. */
bool lc_measure_apply(uint64_t word, const struct lc_tuner_table *table, int *channels);

/* What NCCL takes from a table: the least entry that is not negative, the first of equal ones. 0: none. */
uint64_t lc_measure_choice(const struct lc_tuner_table *table, int channels);

#endif
