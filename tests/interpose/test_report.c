/* SPDX-License-Identifier: Apache-2.0
 *
 * Prints a report with every feature, as text, line or JSON; interpose.py compares. */
#include "interpose/loongcomm.h"
#include "interpose/report.h"
#include "tests/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct lc_report_comm comms[] = {
    {.number = 0,
     .facts = { .ranks = 8, .device = 2, .parent = -1 },
     .closed = true,
     .windows = 2 },
    { .number = 4,
     .id = 0x1234567890abcdef,
     .progress = { .collectives = 100,
                    .messages = 1,
                    .returned = 101,
                    .n = 2,
                    .recent = { { .seq = 99, .count = 64, .type = 7, .peer = -1 },
                                { .seq = 100, .count = 65, .kind = 77, .type = 99, .peer = 1 } },
                    .message = { .seq = 1, .count = 3, .kind = LC_OP_RECV, .peer = 1 } },
     .facts = { .ranks = 2,
                 .rank = 1,
                 .device = LC_DEVICE_UNASKED,
                 .parent = 0,
                 .origin = LC_COMM_SPLIT,
                 .name = "pipe \"a\"\033[2J" } },
    { .number = 5, .facts = { .ranks = 2, .device = 2, .parent = -1, .origin = LC_COMM_ADOPTED }},
};

/* What a plugin adds only when it is asked. */
static void add_more(void)
{
    loongcomm_metrics_add_v1("tcp", "eth0", "10.0.0.2", "bytes_sent", 1 << 29);
}

static void more_metrics_than_fit_are_added_up(void)
{
    struct lc_metric *all;
    uint64_t sum = 0;
    size_t n;

    for (unsigned i = 0; i < 2 * LC_METRIC_LINKS; i++) {
        char peer[100];

        /* Longer than what is kept. */
        (void)snprintf(peer, sizeof(peer), "%04u%080u", i, 0);
        loongcomm_metrics_add_v1("many", "eth0", peer, "bytes_sent", 1);
        loongcomm_metrics_add_v1("many", "eth0", peer, "bytes_sent", 1);
    }
    for (unsigned i = 0; i < 2 * LC_METRIC_COUNTERS; i++) {
        char name[100];

        (void)snprintf(name, sizeof(name), "%02u%080u", i, 0);
        loongcomm_metrics_add_v1("tcp", "eth0", "10.0.0.2", name, 1);
    }
    all = lc_metrics_take(&n);
    CHECK(all && n == LC_METRIC_LINKS);
    CHECK(strcmp(all[n - 1].peer, "other peers") == 0);
    for (size_t i = 2; i < n; i++)
        sum += all[i].counter[0].value;
    CHECK(sum == 4 * LC_METRIC_LINKS && all[0].n == LC_METRIC_COUNTERS);
    CHECK(all[0].counter[0].value == (3u << 29)); /* add_more was taken back */
    free(all);
}

int main(int argc, char **argv)
{
    struct lc_report report = { .version = "9.8.7",
                                .host = "node-1",
                                .pid = 1234,
                                .enabled = true,
                                .nccl_path = "/opt/libnccl.so.2",
                                .nccl_version = 22809,
                                .ranks = 8,
                                .count = 3,
                                .comm = comms,
                                .other_count = 7 };

    CHECK(argc == 2);
    setenv("LOONGCOMM_REPORT", "off", 1);
    loongcomm_metrics_flush_v1(add_more, 1);
    loongcomm_metrics_add_v1("tcp", "eth0", "10.0.0.2", "bytes_sent", 1 << 30);
    loongcomm_metrics_add_v1("tcp", "eth0", "10.0.0.2", "messages_sent", 2000);
    loongcomm_metrics_add_v1("verbs", "mlx5_0:1", "10.0.0.2\302\233", "bytes_sent", 77);
    report.metrics = lc_metrics_take(&report.n_metrics);
    loongcomm_metrics_flush_v1(add_more, 0);
    lc_ledger_add(&comms[0].ledger, LC_OP_ALL_REDUCE, LC_NCCL_NO_FASTER_PATH, 1 << 30, 1 << 29);
    lc_ledger_add(&comms[0].ledger, LC_OP_ALL_TO_ALL, LC_NCCL_NO_FASTER_PATH, 1536, 1536);
    for (int i = 0; i < 2; i++)
        lc_ledger_add(&comms[0].ledger, LC_OP_ALL_TO_ALL, LC_NCCL_NO_FASTER_PATH, 0, 0);
    for (int i = 0; i < 100; i++)
        lc_ledger_add(&comms[1].ledger, LC_OP_ALL_REDUCE, LC_NCCL_NO_FASTER_PATH, 64 + i, 64 + i);
    lc_ledger_add(&comms[2].ledger, LC_OP_ALL_REDUCE, LC_RINGS_BF16, 1 << 20,
                  lc_outcome_sent(LC_RINGS_BF16, 1 << 20));
    comms[2].ledger.ring_sent = 2600000;
    comms[2].ledger.ring_elided = 2300000;
    comms[2].ledger.exchange_sent = 1000000;
    comms[2].ledger.exchange_elided = 2000000;
    comms[2].ledger.ring_bytes = 12 << 20;
    comms[2].ledger.ring_used = 8 << 20;
    comms[2].ledger.ring_changes = 1;
    comms[2].ledger.ring_ctas_allowed = 128;
    comms[2].ledger.ring_ctas = 64;
    comms[2].ledger.drawn = 42;
    comms[2].ledger.fed = 40;
    comms[2].ledger.unfed = 2;
    comms[2].ledger.feedback_bytes = 4 << 20;
    comms[2].ledger.verify_begun = 12;
    comms[2].ledger.verified = 11;
    comms[2].ledger.verify_unlike = 1;
    comms[2].ledger.verify_passed = 3;
    lc_ledger_larger(&comms[2].ledger.verify_worst, 1700000);
    lc_ledger_add(&report.others, LC_OP_SEND, LC_NCCL_NO_FASTER_PATH, 3, 3);
    report.groups.sizes[0] = 1;
    report.groups.sizes[1] = 2;
    report.groups.sizes[5] = 4;
    if (strcmp(argv[1], "line") == 0)
        lc_report_print_line(&report, stdout);
    else if (strcmp(argv[1], "json") == 0)
        CHECK(lc_report_print_json(&report, stdout) == 0);
    else
        lc_report_print(&report, stdout);
    free(report.metrics);
    more_metrics_than_fit_are_added_up();
    return 0;
}
