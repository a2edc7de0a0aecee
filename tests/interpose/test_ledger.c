/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/ledger.h"
#include "tests/check.h"

#include <string.h>

static uint64_t bytes(enum lc_op_kind kind, size_t count, ncclDataType_t type, int ranks)
{
    struct lc_op op = { .kind = kind, .count = count, .type = type };

    return lc_op_bytes(&op, ranks);
}

static void bytes_are_those_of_the_send_buffer(void)
{
    CHECK(bytes(LC_OP_ALL_REDUCE, 10, ncclFloat, 8) == 40);
    CHECK(bytes(LC_OP_BROADCAST, 10, ncclBfloat16, 8) == 20);
    CHECK(bytes(LC_OP_REDUCE, 10, ncclDouble, 8) == 80);
    CHECK(bytes(LC_OP_ALL_GATHER, 10, ncclInt8, 8) == 10);
    CHECK(bytes(LC_OP_GATHER, 10, ncclUint8, 8) == 10);
    CHECK(bytes(LC_OP_REDUCE_SCATTER, 10, ncclHalf, 8) == 160);
    CHECK(bytes(LC_OP_ALL_TO_ALL, 10, ncclInt64, 8) == 640);
    CHECK(bytes(LC_OP_SCATTER, 10, ncclUint32, 8) == 320);
    CHECK(bytes(LC_OP_SEND, 10, ncclUint64, 8) == 80);
    CHECK(bytes(LC_OP_RECV, 10, ncclInt32, 8) == 40);
    CHECK(bytes(LC_OP_ALL_TO_ALL, 0, ncclFloat, 8) == 0);
    CHECK(bytes(LC_OP_ALL_TO_ALL, 10, ncclFloat, 0) == 40); /* number of ranks unknown */
}

static void every_type_has_a_size(void)
{
    static const size_t sizes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };

    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
        CHECK(lc_type_size((ncclDataType_t)i) == sizes[i]);
    CHECK(lc_type_size((ncclDataType_t)12) == 0);
    CHECK(lc_type_size((ncclDataType_t)-1) == 0);
    CHECK(ncclNumTypes <= 12); /* or this table and op.c miss the newest */
}

static void buckets_are_powers_of_two(void)
{
    CHECK(lc_bucket(0) == 0);
    CHECK(lc_bucket(1) == 1);
    CHECK(lc_bucket(2) == 2 && lc_bucket(3) == 2);
    CHECK(lc_bucket(65535) == 16 && lc_bucket(65536) == 17);
    CHECK(lc_bucket(UINT64_C(1) << 39) == 40);
    CHECK(lc_bucket(UINT64_C(1) << 50) == LC_BUCKETS - 1);
    CHECK(lc_bucket(UINT64_MAX) == LC_BUCKETS - 1);
}

static void merging_adds_up(void)
{
    static struct lc_ledger a;
    static struct lc_ledger b;

    lc_ledger_add(&a, LC_OP_RECV, LC_NCCL_NO_FASTER_PATH, 5, 3);
    lc_ledger_add(&b, LC_OP_RECV, LC_NCCL_NO_FASTER_PATH, 5, 4);
    lc_ledger_add(&b, LC_OP_ALL_REDUCE, LC_NCCL_NO_FASTER_PATH, 1, 1);
    b.verify_unlike = 2;
    lc_ledger_larger(&a.verify_worst, 7);
    lc_ledger_larger(&b.verify_worst, 9);
    lc_ledger_larger(&b.verify_worst, 8);
    a.ring_changes = b.ring_changes = 1;
    a.ring_ctas_allowed = a.ring_ctas = b.ring_ctas_allowed = 96;
    b.ring_ctas = 64;
    lc_ledger_merge(&a, &b);
    CHECK(a.verify_unlike == 2 && a.verify_worst == 9); /* but of errors the worst is kept */
    CHECK(a.ring_changes == 2 && a.ring_ctas_allowed == 96 && a.ring_ctas == 96);
    CHECK(lc_ledger_calls(&a) == 3);
    CHECK(a.op[LC_OP_RECV].by[0].calls == 2 && a.op[LC_OP_RECV].by[0].asked == 10);
    CHECK(a.op[LC_OP_RECV].by[0].sent == 7 && a.op[LC_OP_RECV].sizes[3] == 2);
    lc_ledger_clear(&a);
    CHECK(lc_ledger_calls(&a) == 0);
}

static void every_kind_and_outcome_has_a_name(void)
{
    for (int i = 0; i < LC_OP_KINDS; i++)
        CHECK(lc_op_name((enum lc_op_kind)i) && lc_op_nccl_name((enum lc_op_kind)i));
    for (int i = 0; i < LC_OUTCOMES; i++)
        CHECK(lc_outcome_path((enum lc_outcome)i) && lc_outcome_reason((enum lc_outcome)i));
}

int main(void)
{
    bytes_are_those_of_the_send_buffer();
    every_type_has_a_size();
    buckets_are_powers_of_two();
    merging_adds_up();
    every_kind_and_outcome_has_a_name();
    return 0;
}
