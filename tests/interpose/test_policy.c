/* SPDX-License-Identifier: Apache-2.0
 *
 * Which path a call takes, as a table. */
#include "interpose/policy.h"
#include "tests/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct lc_config config_with(enum lc_peer peer, enum lc_wire wire)
{
    struct lc_config config = { .enable = true,
                                .allreduce_wire = wire,
                                .peer = peer,
                                .min_bytes = 65536,
                                .one_shot_bytes = 262144,
                                .coalesce = true,
                                .exact = LC_EXACT_FP32 };

    return config;
}

struct row {
    enum lc_op_kind kind;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t redop;
    bool rings, grouped, committed;
    enum lc_path path;
    enum lc_outcome outcome;
};

static const struct lc_profile *profile; /* of this machine, in some cases */

static void check_rows_of(int ranks, const struct row *rows, size_t n,
                          const struct lc_config *config)
{
    for (size_t i = 0; i < n; i++) {
        const struct row *row = &rows[i];
        struct lc_redops none = { 0 };
        struct lc_op op = { .kind = row->kind,
                            .count = row->count,
                            .type = row->type,
                            .redop = row->redop };
        struct lc_situation now = { .ranks = ranks,
                                    .committed = row->committed,
                                    .grouped = row->grouped,
                                    .rings = row->rings,
                                    .mapped = row->rings,
                                    .profile = profile,
                                    .redop = lc_redop_find(&none, row->redop) };
        struct lc_choice got = lc_policy(&op, &now, config);

        if (got.path != row->path || got.outcome != row->outcome)
            printf("row %zu: path %d, %s\n", i, got.path, lc_outcome_reason(got.outcome));
        CHECK(got.path == row->path && got.outcome == row->outcome);
        if (got.path != LC_PATH_NCCL)
            CHECK(!lc_policy_is_nccl(&op, row->grouped, config, profile));
    }
}

static void check_rows(const struct row *rows, size_t n, const struct lc_config *config)
{
    check_rows_of(4, rows, n, config);
}
#define ROWS(rows) (rows), sizeof(rows) / sizeof(*(rows))

#define LARGE 100000
#define AR    LC_OP_ALL_REDUCE
#define RS    LC_OP_REDUCE_SCATTER

static void forced_rings_take_all_that_they_can(void)
{
    static const struct row rows[] = {
        {AR,               1,               ncclFloat32,  ncclSum, true,  false, true,  LC_PATH_RINGS, LC_RINGS              },
        { AR,              LARGE,           ncclFloat32,  ncclAvg, true,  false, true,  LC_PATH_RINGS, LC_RINGS              },
        { RS,              LARGE,           ncclBfloat16, ncclSum, true,  true,  true,  LC_PATH_RINGS, LC_RINGS              },
        { RS,              LARGE,           ncclFloat16,  ncclAvg, true,  false, true,  LC_PATH_RINGS, LC_RINGS              },
        { AR,              0,               ncclFloat32,  ncclSum, true,  false, true,  LC_PATH_NCCL,  LC_NCCL_NO_FASTER_PATH},
        { AR,              LARGE,           ncclFloat64,  ncclSum, true,  false, true,  LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                                              },
        { AR,              LARGE,           ncclFloat32,  ncclMax, true,  false, true,  LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                                              },
        { LC_OP_BROADCAST, LARGE,           ncclFloat32,  ncclSum, true,  false, true,  LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                                              },
        { AR,              LARGE,           ncclFloat32,  ncclSum, true,  false, false, LC_PATH_NCCL,
         LC_NCCL_NOT_COMMITTED                                                                                               },
 /* there are none */
        { AR,              LARGE,           ncclFloat32,  ncclSum, false, false, true,  LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                                              },
        { AR,              10,              ncclFloat32,  ncclSum, false, true,  true,  LC_PATH_PACK,  LC_PACKED             },
        { AR,              (size_t)1 << 62, ncclFloat32,  ncclSum, true,  false, true,  LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                                              },
        { RS,              (size_t)1 << 44, ncclFloat32,  ncclSum, true,  false, true,  LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                                              },
    };
    struct lc_config config = config_with(LC_PEER_FORCE, LC_WIRE_DATA);

    check_rows(ROWS(rows), &config);
}

static void rings_by_themselves_take_what_cuts_bytes(void)
{
    static const struct row rows[] = {
        {AR,  4 << 18,       ncclFloat32,  ncclSum, true,  false, true, LC_PATH_RINGS, LC_RINGS_BF16},
        { RS, 4 << 16,       ncclFloat32,  ncclAvg, true,  true,  true, LC_PATH_RINGS, LC_RINGS_BF16},
        { AR, (4 << 18) - 1, ncclFloat32,  ncclSum, true,  false, true, LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                     },
        { AR, LARGE,         ncclFloat32,  ncclSum, true,  false, true, LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                     },
        { AR, LARGE,         ncclFloat32,  ncclSum, false, false, true, LC_PATH_CAST,  LC_CAST_BF16 },
        { AR, 10,            ncclFloat32,  ncclSum, true,  false, true, LC_PATH_NCCL,  LC_NCCL_SMALL},
        { AR, 10,            ncclFloat32,  ncclSum, true,  true,  true, LC_PATH_PACK,  LC_PACKED    },
        { AR, LARGE,         ncclBfloat16, ncclSum, true,  false, true, LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                     },
    };
    static const struct row plain[] = {
        {AR, LARGE, ncclFloat32, ncclSum, true, false, true, LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH},
    };
    struct lc_config config = config_with(LC_PEER_AUTO, LC_WIRE_BF16);

    check_rows(ROWS(rows), &config);
    CHECK(lc_policy_wants_rings(&config, NULL));
    config = config_with(LC_PEER_AUTO, LC_WIRE_DATA);
    check_rows(ROWS(plain), &config);
    CHECK(!lc_policy_wants_rings(&config, NULL));
}

#define A2A LC_OP_ALL_TO_ALL

/* Of at least 1000 bytes to each rank. */
static void all_to_alls_go_where_zeros_need_not_travel(void)
{
    static const struct row rows[] = {
        {A2A,  1000,            ncclUint8, ncclSum, true,  false, true,  LC_PATH_EXCHANGE, LC_RINGS_EXCHANGE     },
        { A2A, 250,             ncclInt32, ncclSum, true,  true,  true,  LC_PATH_EXCHANGE, LC_RINGS_EXCHANGE     },
        { A2A, 999,             ncclUint8, ncclSum, true,  false, true,  LC_PATH_NCCL,     LC_NCCL_SMALL         },
        { A2A, 0,               ncclUint8, ncclSum, true,  false, true,  LC_PATH_NCCL,     LC_NCCL_SMALL         },
        { A2A, 1000,            ncclUint8, ncclSum, true,  false, false, LC_PATH_NCCL,     LC_NCCL_NOT_COMMITTED },
        { A2A, 1000,            ncclUint8, ncclSum, false, false, true,  LC_PATH_NCCL,     LC_NCCL_NO_FASTER_PATH},
        { A2A, SIZE_MAX / 16,   ncclInt64, ncclSum, true,  false, true,  LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                                  },
        { A2A, (size_t)1 << 33, ncclInt64, ncclSum, true,  false, true,  LC_PATH_EXCHANGE,
         LC_RINGS_EXCHANGE                                                                                       },
    };
    static const struct row off[] = {
        {A2A, LARGE, ncclUint8, ncclSum, true, false, true, LC_PATH_NCCL, LC_NCCL_NO_FASTER_PATH},
    };
    struct lc_situation now = { .ranks = 4, .rings = true };
    struct lc_config config;

    for (int peer = LC_PEER_AUTO; peer <= LC_PEER_OFF; peer++) {
        config = config_with((enum lc_peer)peer, LC_WIRE_DATA);
        config.exchange_min_bytes = 1000;
        /* Nothing is known without a measurement. */
        if (peer == LC_PEER_FORCE)
            check_rows(ROWS(rows), &config);
        else
            check_rows(ROWS(off), &config);
        CHECK(lc_policy_takes_message(&now, 1000, &config) == (peer == LC_PEER_FORCE));
        CHECK(lc_policy_exchanges(&config, NULL) == (peer == LC_PEER_FORCE));
        CHECK(!lc_policy_takes_message(&now, 999, &config));
        CHECK(!lc_policy_takes_message(&now, 0, &config));
    }
}

static void profile_says_which_messages_win(void)
{
    static const char text[] = "loongcomm.profile/1\ngpu X\nnccl 2.28.9\n"
                               "rings all-to-all 4 exact 400000 0 exchange 7\n"
                               "rings send 4 exact 50000 60000 exchange 5\n";
    struct lc_config config = config_with(LC_PEER_AUTO, LC_WIRE_DATA);
    struct lc_op op = { .kind = A2A, .count = LARGE, .type = ncclUint8 };
    struct lc_situation now = { .ranks = 4, .rings = true, .committed = true };
    struct lc_profile *own = lc_profile_parse("test", text, sizeof(text) - 1);

    CHECK(own);
    now.profile = own;
    CHECK(lc_policy(&op, &now, &config).path == LC_PATH_EXCHANGE);
    CHECK(lc_policy_ctas(&op, &now, false, 4 * LARGE, 32) == 7);
    op.count--;
    CHECK(lc_policy(&op, &now, &config).path == LC_PATH_NCCL);
    CHECK(lc_policy_takes_message(&now, 50000, &config));
    CHECK(!lc_policy_takes_message(&now, 49999, &config));
    CHECK(!lc_policy_takes_message(&now, 60000, &config));
    CHECK(lc_policy_exchanges(&config, own));
    free(own);
}

/* Through rings the sum is rounded to bf16 for its way to the other rank. */
static void accurate_sums_of_two_ranks_are_not_rounded_again(void)
{
    static const struct row two[] = {
        {AR,  LARGE, ncclFloat32, ncclSum, true, false, true, LC_PATH_CAST,  LC_CAST_BF16 },
        { AR, 10,    ncclFloat32, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS     },
        { RS, LARGE, ncclFloat32, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS_BF16},
    };
    static const struct row more[] = {
        {AR, LARGE, ncclFloat32, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS_BF16},
    };
    struct lc_config config = config_with(LC_PEER_FORCE, LC_WIRE_BF16_ACCURATE);

    check_rows_of(2, ROWS(two), &config);
    check_rows_of(3, ROWS(more), &config);
    config.allreduce_wire = LC_WIRE_BF16;
    check_rows_of(2, ROWS(more), &config);
}

static void switched_off_there_are_no_rings(void)
{
    static const struct row rows[] = {
        {AR, LARGE, ncclFloat32, ncclSum, true, false, true, LC_PATH_CAST, LC_CAST_BF16},
    };
    struct lc_config config = config_with(LC_PEER_OFF, LC_WIRE_BF16);

    check_rows(ROWS(rows), &config);
    CHECK(!lc_policy_wants_rings(&config, NULL));
}

static void sums_of_16_bits_can_be_left_to_nccl(void)
{
    static const struct row rows[] = {
        {AR,  LARGE, ncclBfloat16, ncclSum, true, false, true, LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                       },
        { AR, LARGE, ncclFloat32,  ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS},
    };
    struct lc_config config = config_with(LC_PEER_FORCE, LC_WIRE_DATA);

    config.exact = LC_EXACT_NCCL;
    check_rows(ROWS(rows), &config);
}

static void small_calls_go_in_one_step_if_forced(void)
{
    struct lc_config config = config_with(LC_PEER_FORCE, LC_WIRE_DATA);
    const struct lc_situation now = { .ranks = 4 }, pair = { .ranks = 2 };

    CHECK(lc_policy_one_shot(&now, 4, &config) && lc_policy_one_shot(&now, 87380, &config));
    CHECK(!lc_policy_one_shot(&now, 87384, &config));
    CHECK(lc_policy_one_shot(&pair, 262144, &config) &&
          !lc_policy_one_shot(&pair, 262148, &config));
    config.peer = LC_PEER_AUTO;
    CHECK(!lc_policy_one_shot(&now, 4, &config));
}

/* Whatever may be rounded: nothing is gained by it. In a group nobody knows yet how much there will be. */
static void what_goes_in_one_step_stays_exact(void)
{
    static const struct row rows[] = {
        {AR,  16384, ncclFloat32, ncclSum, true,  false, true, LC_PATH_RINGS, LC_RINGS     },
        { AR, 65536, ncclFloat32, ncclAvg, true,  false, true, LC_PATH_RINGS, LC_RINGS     },
        { AR, 65537, ncclFloat32, ncclSum, true,  false, true, LC_PATH_RINGS, LC_RINGS_BF16},
        { AR, 16384, ncclFloat32, ncclSum, true,  true,  true, LC_PATH_RINGS, LC_RINGS_BF16},
        { RS, 16384, ncclFloat32, ncclSum, true,  false, true, LC_PATH_RINGS, LC_RINGS_BF16},
        { AR, 16384, ncclFloat32, ncclSum, false, false, true, LC_PATH_CAST,  LC_CAST_BF16 },
    };
    struct lc_config config = config_with(LC_PEER_FORCE, LC_WIRE_BF16);

    check_rows_of(2, ROWS(rows), &config);
}

/* A call alone in a group is one without a group to a rank that has it so. */
static void alone_in_a_group_or_not_is_the_same_way(void)
{
    static const struct row rows[] = {
        {AR,  16384, ncclFloat32, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS    },
        { AR, 16384, ncclFloat32, ncclSum, true, true,  true, LC_PATH_RINGS, LC_RINGS    },
        { AR, 65537, ncclFloat32, ncclSum, true, false, true, LC_PATH_CAST,  LC_CAST_BF16},
        { AR, 65537, ncclFloat32, ncclSum, true, true,  true, LC_PATH_CAST,  LC_CAST_BF16},
    };
    struct lc_config config = config_with(LC_PEER_FORCE, LC_WIRE_BF16_ACCURATE);

    check_rows_of(2, ROWS(rows), &config);
}

/* What does not fit the lines is not called one-shot, whatever is asked for. */
static void lines_bound_what_goes_in_one_step(void)
{
    struct lc_config config = config_with(LC_PEER_FORCE, LC_WIRE_DATA);

    config.one_shot_bytes = (size_t)16 << 20;
    for (int ranks = 2; ranks <= 64; ranks++) {
        struct lc_situation now = { .ranks = ranks };
        uint32_t most = lc_policy_line_bytes((uint32_t)ranks);

        CHECK(most >= 65536 && most <= LK_LINES_MAX && most % LK_GRANULE == 0);
        CHECK(lc_policy_one_shot(&now, most, &config) &&
              !lc_policy_one_shot(&now, most + 4, &config));
    }
}

/* What was measured decides, and what was not is left to NCCL. */
static void a_profile_says_where_rings_win(void)
{
    static const char text[] = "loongcomm.profile/1\ngpu g\nnccl 2.28.9\n"
                               "rings all-reduce 4 exact 4000 8000 one-shot 3\n"
                               "rings all-reduce 4 exact 8000 200000 two-shot 64\n"
                               "rings all-reduce 4 exact 200000 300000 one-shot 5\n"
                               "rings all-reduce 4 exact 300000 0 two-shot 64\n"
                               "rings all-reduce 4 bf16 1000000 0 two-shot 16\n";
    static const struct row rows[] = {
        {AR,  999,    ncclFloat32,  ncclSum, true, false, true, LC_PATH_NCCL,  LC_NCCL_NO_FASTER_PATH},
        { AR, 1000,   ncclFloat32,  ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS              },
        { AR, 2000,   ncclBfloat16, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS              },
        { RS, 100000, ncclFloat32,  ncclSum, true, false, true, LC_PATH_NCCL,
         LC_NCCL_NO_FASTER_PATH                                                                      },
    };
    static const struct row narrow[] = {
        {AR,  249999, ncclFloat32, ncclSum, true, false, true, LC_PATH_CAST,  LC_CAST_BF16 },
        { AR, 60000,  ncclFloat32, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS     },
        { AR, 250000, ncclFloat32, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS_BF16},
        { AR, 1000,   ncclFloat32, ncclSum, true, false, true, LC_PATH_RINGS, LC_RINGS     },
    };
    struct lc_profile *read = lc_profile_parse("test", text, sizeof(text) - 1);
    struct lc_config config = config_with(LC_PEER_AUTO, LC_WIRE_DATA);
    struct lc_situation now = { .ranks = 4, .profile = read };
    struct lc_op op = { .kind = AR };

    CHECK(read && lc_policy_wants_rings(&config, read));
    profile = read;
    check_rows(ROWS(rows), &config);
    CHECK(lc_policy_one_shot(&now, 4000, &config) && !lc_policy_one_shot(&now, 8000, &config));
    CHECK(lc_policy_ctas(&op, &now, false, 4000, 32) == 3);
    CHECK(lc_policy_ctas(&op, &now, false, 8000, 32) == 32);
    CHECK(lc_policy_ctas(&op, &now, true, 1000000, 32) == 16);
    CHECK(lc_policy_ctas(&op, &now, false, 1, 32) == 32);
    config.allreduce_wire = LC_WIRE_BF16;
    check_rows(ROWS(narrow), &config);
    config.peer = LC_PEER_OFF;
    CHECK(!lc_policy_wants_rings(&config, read));
    config.peer = LC_PEER_AUTO;
    read->n_rings = 0;
    CHECK(!lc_policy_wants_rings(&config, read));
    profile = NULL;
    free(read);
}

int main(void)
{
    forced_rings_take_all_that_they_can();
    rings_by_themselves_take_what_cuts_bytes();
    all_to_alls_go_where_zeros_need_not_travel();
    profile_says_which_messages_win();
    accurate_sums_of_two_ranks_are_not_rounded_again();
    switched_off_there_are_no_rings();
    sums_of_16_bits_can_be_left_to_nccl();
    small_calls_go_in_one_step_if_forced();
    what_goes_in_one_step_stays_exact();
    alone_in_a_group_or_not_is_the_same_way();
    lines_bound_what_goes_in_one_step();
    a_profile_says_where_rings_win();
    return 0;
}
