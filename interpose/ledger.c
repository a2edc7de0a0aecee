/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/ledger.h"

#include <string.h>

/* A ledger is nothing but counters, so that merging needs no list of them. */
#define WORDS (sizeof(struct lc_ledger) / sizeof(uint64_t))
_Static_assert(sizeof(struct lc_ledger) % sizeof(uint64_t) == 0, "counters only");
_Static_assert(offsetof(struct lc_ledger, ring_ctas_allowed) ==
                   (WORDS - LC_LARGEST) * sizeof(uint64_t),
               "the last ones are not added");

struct lc_groups lc_groups;

static const struct {
    const char *path;
    const char *reason;
} outcomes[LC_OUTCOMES] = {
    [LC_NCCL_NO_FASTER_PATH] = {"nccl",    "no-faster-path"        },
    [LC_NCCL_NOT_COMMITTED] = { "nccl",   "not-agreed-yet"        },
    [LC_NCCL_SMALL] = { "nccl",   "smaller-than-min-bytes"},
    [LC_NCCL_OPERATION] = { "nccl",   "no-sum-or-average"     },
    [LC_NCCL_NO_PEER_MEMORY] = { "nccl",   "no-peer-memory"        },
    [LC_CAST_BF16] = { "cast",   "bf16-wire"             },
    [LC_PACKED] = { "packed", "grouped"               },
    [LC_RINGS] = { "rings",  "two-shot"              },
    [LC_RINGS_BF16] = { "rings",  "two-shot-bf16-wire"    },
    [LC_RINGS_LINES] = { "rings",  "one-shot"              },
    [LC_RINGS_EXCHANGE] = { "rings",  "exchange"              },
};

const char *lc_outcome_path(enum lc_outcome outcome)
{
    return outcomes[outcome].path;
}

const char *lc_outcome_reason(enum lc_outcome outcome)
{
    return outcomes[outcome].reason;
}

uint64_t lc_outcome_sent(enum lc_outcome outcome, uint64_t asked)
{
    return outcome == LC_CAST_BF16 || outcome == LC_RINGS_BF16 ? asked / 2 : asked;
}

void lc_ledger_larger(uint64_t *word, uint64_t value)
{
    uint64_t have = __atomic_load_n(word, __ATOMIC_RELAXED);

    while (value > have && !__atomic_compare_exchange_n(word, &have, value, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED))
        ;
}

void lc_ledger_merge(struct lc_ledger *into, const struct lc_ledger *from)
{
    uint64_t *to = (uint64_t *)into;
    const uint64_t *word = (const uint64_t *)from;

    for (size_t i = 0; i < WORDS - LC_LARGEST; i++) {
        uint64_t value = __atomic_load_n(&word[i], __ATOMIC_RELAXED);

        if (value)
            lc_add(&to[i], value);
    }
    for (size_t i = WORDS - LC_LARGEST; i < WORDS; i++)
        lc_ledger_larger(&to[i], __atomic_load_n(&word[i], __ATOMIC_RELAXED));
}

void lc_ledger_clear(struct lc_ledger *ledger)
{
    memset(ledger, 0, sizeof(*ledger));
}

uint64_t lc_ledger_calls(const struct lc_ledger *ledger)
{
    uint64_t calls = 0;

    for (int kind = 0; kind < LC_OP_KINDS; kind++) {
        for (int outcome = 0; outcome < LC_OUTCOMES; outcome++)
            calls += __atomic_load_n(&ledger->op[kind].by[outcome].calls, __ATOMIC_RELAXED);
    }
    return calls;
}
