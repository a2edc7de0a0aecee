/* SPDX-License-Identifier: Apache-2.0 */
#include "common/json.h"
#include "common/output.h"
#include "interpose/note.h"
#include "interpose/report.h"

#include <inttypes.h>
#include <string.h>

#define METRIC_LINES  32
#define PADDING_LIVE  75 /* percent */
#define PADDING_BYTES (UINT64_C(1) << 20)
#define SMALL_BUCKET  16 /* values below 2^16: 64 KiB */

/* Names come from the program and from plugins. */
static void print_name(const char *name, FILE *out)
{
    char safe[256];

    (void)snprintf(safe, sizeof(safe), "%s", name);
    lc_output_defuse(safe);
    fputs(safe, out);
}

static const char *nccl_version(int code, char *out, size_t size)
{
    if (code)
        (void)snprintf(out, size, "%d.%d.%d", code / 10000, code / 100 % 100, code % 100);
    else
        (void)snprintf(out, size, "of unknown version");
    return out;
}

static uint64_t op_calls(const struct lc_ledger_op *op)
{
    uint64_t calls = 0;

    for (int i = 0; i < LC_OUTCOMES; i++)
        calls += op->by[i].calls;
    return calls;
}

/* The sizes that most calls had: "64.0 KiB-128.0 KiB (80 %)". */
static void print_usual(const struct lc_ledger_op *op, FILE *out)
{
    uint64_t calls = 0;
    uint64_t share;
    int most = 0;
    char low[16];
    char high[16];
    char text[64];

    for (int i = 0; i < LC_BUCKETS; i++) {
        calls += op->sizes[i];
        if (op->sizes[i] > op->sizes[most])
            most = i;
    }
    if (!calls)
        return;
    share = op->sizes[most] * 100 / calls;
    if (most == 0)
        (void)snprintf(text, sizeof(text), "empty (%" PRIu64 " %%)", share);
    else
        (void)snprintf(text, sizeof(text), "%s-%s (%" PRIu64 " %%)",
                       lc_output_bytes(UINT64_C(1) << (most - 1), low),
                       lc_output_bytes(UINT64_C(1) << most, high), share);
    fprintf(out, "  %-26s", text);
}

/* Of what all-to-alls and messages had for other ranks. */
static uint64_t live_percent(const struct lc_ledger *ledger)
{
    double all = (double)ledger->exchange_sent + (double)ledger->exchange_elided;

    return all > 0 ? (uint64_t)(100 * (double)ledger->exchange_sent / all + 0.5) : 100;
}

static void print_ledger(const struct lc_ledger *ledger, FILE *out)
{
    char asked[16];
    char sent[16];

    for (int kind = 0; kind < LC_OP_KINDS; kind++) {
        const struct lc_ledger_op *op = &ledger->op[kind];

        for (int i = 0; i < LC_OUTCOMES; i++) {
            if (!op->by[i].calls)
                continue;
            fprintf(out, "    %-14s %10" PRIu64 " calls %12s asked %12s sent",
                    lc_op_name((enum lc_op_kind)kind), op->by[i].calls,
                    lc_output_bytes(op->by[i].asked, asked), lc_output_bytes(op->by[i].sent, sent));
            print_usual(op, out);
            fprintf(out, "  %s (%s)\n", lc_outcome_path((enum lc_outcome)i),
                    lc_outcome_reason((enum lc_outcome)i));
        }
    }
    if (ledger->ring_sent || ledger->ring_elided)
        fprintf(out, "    through rings: %s written to peers, %s not written, being zero\n",
                lc_output_bytes(ledger->ring_sent, sent),
                lc_output_bytes(ledger->ring_elided, asked));
    if (ledger->exchange_sent)
        fprintf(out,
                "    of these all-to-alls and messages: %s written, %s not written, %" PRIu64
                " %% live\n",
                lc_output_bytes(ledger->exchange_sent, sent),
                lc_output_bytes(ledger->exchange_elided, asked), live_percent(ledger));
    if (ledger->ring_bytes)
        fprintf(out, "    rings: %s in use, %s allocated, size changed %" PRIu64 " times\n",
                lc_output_bytes(ledger->ring_used, sent),
                lc_output_bytes(ledger->ring_bytes, asked), ledger->ring_changes);
    if (ledger->ring_ctas_allowed)
        fprintf(out, "    CTAs of a call: %" PRIu64 " allowed, %" PRIu64 " taken at most\n",
                ledger->ring_ctas_allowed, ledger->ring_ctas);
    if (ledger->drawn)
        fprintf(out, "    rounded stochastically: %" PRIu64 " calls\n", ledger->drawn);
    if (ledger->fed || ledger->unfed)
        fprintf(out,
                "    error feedback: %" PRIu64 " calls, %" PRIu64
                " went without; %s of residuals\n",
                ledger->fed, ledger->unfed, lc_output_bytes(ledger->feedback_bytes, sent));
    if (ledger->verify_begun || ledger->verify_passed)
        fprintf(out,
                "    verified beside NCCL: %" PRIu64 " of %" PRIu64 " calls, %" PRIu64
                " differ by more than rounding explains, largest relative error %.1e; %" PRIu64
                " calls were not\n",
                ledger->verified, ledger->verify_begun, ledger->verify_unlike,
                (double)ledger->verify_worst / 1e9, ledger->verify_passed);
}

static void print_comm(const struct lc_report_comm *comm, FILE *out)
{
    static const char *const origins[] = { "", ", split", ", shrunk", ", first seen in use" };

    fprintf(out, "  communicator #%" PRId64, comm->number);
    if (*comm->facts.name) {
        fputs(" \"", out);
        print_name(comm->facts.name, out);
        fputc('"', out);
    }
    fprintf(out, ": rank %d of %d", comm->facts.rank, comm->facts.ranks);
    if (comm->facts.device >= 0)
        fprintf(out, ", device %d", comm->facts.device);
    fputs(origins[comm->facts.origin], out);
    if (comm->facts.parent >= 0)
        fprintf(out, " from #%" PRId64, comm->facts.parent);
    if (comm->windows)
        fprintf(out, ", %u memory windows", comm->windows);
    if (comm->closed)
        fputs(", closed", out);
    fputs(lc_ledger_calls(&comm->ledger) ? "\n" : ", no operations\n", out);
    print_ledger(&comm->ledger, out);
}

static void total(const struct lc_report *report, struct lc_ledger *out)
{
    lc_ledger_clear(out);
    lc_ledger_merge(out, &report->others);
    for (size_t i = 0; i < report->count; i++)
        lc_ledger_merge(out, &report->comm[i].ledger);
}

/* Zeros do not travel, but they are made, read and written, and where they stay with NCCL they do. */
static void print_padding_hint(const struct lc_report_comm *comm, FILE *out)
{
    const struct lc_ledger *ledger = &comm->ledger;
    char elided[16];

    if (ledger->exchange_elided < PADDING_BYTES || live_percent(ledger) > PADDING_LIVE)
        return;
    fprintf(out,
            "  hint: %" PRIu64 " %% of what all-to-alls and messages on communicator #%" PRId64
            " had for other ranks were zeros (%s, which did not travel); with less padding they "
            "need not be made, and loongcommSetMask, told which rows are live, spares reading "
            "them\n",
            100 - live_percent(ledger), comm->number,
            lc_output_bytes(ledger->exchange_elided, elided));
}

static void print_peers_hint(const struct lc_ledger *sum, FILE *out)
{
    uint64_t calls = 0;

    for (int kind = 0; kind < LC_OP_KINDS; kind++)
        calls += sum->op[kind].by[LC_NCCL_NO_PEER_MEMORY].calls;
    if (calls)
        fprintf(out,
                "  hint: %" PRIu64
                " calls stayed with NCCL since memory between their communicator's "
                "ranks could not be set up on one of them, whose log says why (where it is "
                "LOONGCOMM_STAGING_MAX that can be raised)\n",
                calls);
}

static void print_hints(const struct lc_report *report, FILE *out)
{
    struct lc_ledger sum;
    const struct lc_ledger_op *op = &sum.op[LC_OP_ALL_REDUCE];
    uint64_t small = 0;
    uint64_t calls;

    total(report, &sum);
    calls = op_calls(op);
    for (int i = 0; i <= SMALL_BUCKET; i++)
        small += op->sizes[i];
    if (calls >= 100 && small * 2 > calls)
        fprintf(out,
                "  hint: %" PRIu64 " of %" PRIu64
                " all-reduces were smaller than 64 KiB, where the "
                "start of each costs more than its data; fewer and larger ones are faster (larger "
                "buckets, or all_reduce_coalesced)\n",
                small, calls);
    print_peers_hint(&sum, out);
    for (size_t i = 0; i < report->count; i++)
        print_padding_hint(&report->comm[i], out);
}

static void print_groups(const struct lc_report *report, FILE *out)
{
    uint64_t groups = 0;
    uint64_t larger = 0;

    for (int i = 0; i < LC_BUCKETS; i++) {
        groups += report->groups.sizes[i];
        larger += i > 1 ? report->groups.sizes[i] : 0;
    }
    if (groups)
        fprintf(out, "  groups: %" PRIu64 ", of them %" PRIu64 " with two operations or more\n",
                groups, larger);
}

/* "network eth0 to 10.0.0.2 (tcp): bytes_sent 1.5 GiB, messages_sent 2000". */
static void print_metrics(const struct lc_report *report, FILE *out)
{
    char text[16];

    for (size_t i = 0; i < report->n_metrics && i < METRIC_LINES; i++) {
        const struct lc_metric *m = &report->metrics[i];

        fputs("  network ", out);
        print_name(m->device, out);
        fputs(", ", out);
        print_name(m->peer, out);
        fputs(" (", out);
        print_name(m->source, out);
        fputs("):", out);
        for (int j = 0; j < m->n; j++) {
            fputs(j ? ", " : " ", out);
            print_name(m->counter[j].name, out);
            fputc(' ', out);
            if (strncmp(m->counter[j].name, "bytes_", 6) == 0)
                fputs(lc_output_bytes(m->counter[j].value, text), out);
            else
                fprintf(out, "%" PRIu64, m->counter[j].value);
        }
        fputc('\n', out);
    }
    if (report->n_metrics > METRIC_LINES)
        fprintf(out, "  network: %zu more devices and peers (LOONGCOMM_REPORT=json has all)\n",
                report->n_metrics - METRIC_LINES);
}

void lc_report_print(const struct lc_report *report, FILE *out)
{
    char version[32];

    fprintf(out, "loongcomm %s: rank %d of %d, process %d on %s\n", report->version, report->rank,
            report->ranks, report->pid, report->host);
    fprintf(out, "  NCCL %s, %s\n", nccl_version(report->nccl_version, version, sizeof(version)),
            report->nccl_path ? report->nccl_path : "not loaded");
    if (!report->enabled)
        fprintf(out,
                "  disabled by LOONGCOMM_ENABLE: every call went straight to NCCL, uncounted\n");
    for (size_t i = 0; i < report->count; i++)
        print_comm(&report->comm[i], out);
    if (report->other_count) {
        fprintf(out, "  %" PRIu64 " more communicators together:\n", report->other_count);
        print_ledger(&report->others, out);
    }
    print_groups(report, out);
    print_metrics(report, out);
    print_hints(report, out);
}

void lc_report_print_line(const struct lc_report *report, FILE *out)
{
    struct lc_ledger sum;
    uint64_t asked = 0;
    uint64_t sent = 0;
    char asked_text[16];
    char sent_text[16];

    if (!report->enabled) {
        fprintf(out, "loongcomm %s: rank %d of %d: disabled by LOONGCOMM_ENABLE\n", report->version,
                report->rank, report->ranks);
        return;
    }
    total(report, &sum);
    for (int kind = 0; kind < LC_OP_KINDS; kind++) {
        for (int i = 0; i < LC_OUTCOMES; i++) {
            asked += sum.op[kind].by[i].asked;
            sent += sum.op[kind].by[i].sent;
        }
    }
    fprintf(out, "loongcomm %s: rank %d of %d: %" PRIu64 " calls, %s asked, %s sent\n",
            report->version, report->rank, report->ranks, lc_ledger_calls(&sum),
            lc_output_bytes(asked, asked_text), lc_output_bytes(sent, sent_text));
}

static void json_buckets(struct lc_json *json, const char *key, const uint64_t *sizes)
{
    lc_json_key(json, key);
    lc_json_array(json);
    for (int i = 0; i < LC_BUCKETS; i++) {
        if (!sizes[i])
            continue;
        lc_json_object(json);
        lc_json_key(json, "from");
        lc_json_uint(json, i ? UINT64_C(1) << (i - 1) : 0);
        lc_json_key(json, "count");
        lc_json_uint(json, sizes[i]);
        lc_json_end(json);
    }
    lc_json_end(json);
}

static void json_feedback(struct lc_json *json, const struct lc_ledger *ledger)
{
    lc_json_key(json, "error_feedback");
    lc_json_object(json);
    lc_json_key(json, "calls");
    lc_json_uint(json, ledger->fed);
    lc_json_key(json, "calls_without");
    lc_json_uint(json, ledger->unfed);
    lc_json_key(json, "residual_bytes");
    lc_json_uint(json, ledger->feedback_bytes);
    lc_json_end(json);
}

static void json_verify(struct lc_json *json, const struct lc_ledger *ledger)
{
    lc_json_key(json, "verify");
    lc_json_object(json);
    lc_json_key(json, "begun");
    lc_json_uint(json, ledger->verify_begun);
    lc_json_key(json, "verified");
    lc_json_uint(json, ledger->verified);
    lc_json_key(json, "unlike");
    lc_json_uint(json, ledger->verify_unlike);
    lc_json_key(json, "not_verified");
    lc_json_uint(json, ledger->verify_passed);
    lc_json_key(json, "largest_relative_error");
    lc_json_double(json, (double)ledger->verify_worst / 1e9);
    lc_json_end(json);
}

static void json_rings(struct lc_json *json, const struct lc_ledger *ledger)
{
    lc_json_key(json, "rings");
    lc_json_object(json);
    lc_json_key(json, "bytes_written");
    lc_json_uint(json, ledger->ring_sent);
    lc_json_key(json, "bytes_elided");
    lc_json_uint(json, ledger->ring_elided);
    lc_json_key(json, "exchange_written");
    lc_json_uint(json, ledger->exchange_sent);
    lc_json_key(json, "exchange_elided");
    lc_json_uint(json, ledger->exchange_elided);
    lc_json_key(json, "memory_in_use");
    lc_json_uint(json, ledger->ring_used);
    lc_json_key(json, "memory_allocated");
    lc_json_uint(json, ledger->ring_bytes);
    lc_json_key(json, "changes");
    lc_json_uint(json, ledger->ring_changes);
    if (ledger->ring_ctas_allowed) {
        lc_json_key(json, "ctas_allowed");
        lc_json_uint(json, ledger->ring_ctas_allowed);
        lc_json_key(json, "ctas_taken_at_most");
        lc_json_uint(json, ledger->ring_ctas);
    }
    lc_json_end(json);
}

static void json_ledger(struct lc_json *json, const struct lc_ledger *ledger)
{
    lc_json_key(json, "operations");
    lc_json_array(json);
    for (int kind = 0; kind < LC_OP_KINDS; kind++) {
        const struct lc_ledger_op *op = &ledger->op[kind];

        if (!op_calls(op))
            continue;
        lc_json_object(json);
        lc_json_key(json, "op");
        lc_json_string(json, lc_op_nccl_name((enum lc_op_kind)kind));
        lc_json_key(json, "paths");
        lc_json_array(json);
        for (int i = 0; i < LC_OUTCOMES; i++) {
            if (!op->by[i].calls)
                continue;
            lc_json_object(json);
            lc_json_key(json, "path");
            lc_json_string(json, lc_outcome_path((enum lc_outcome)i));
            lc_json_key(json, "reason");
            lc_json_string(json, lc_outcome_reason((enum lc_outcome)i));
            lc_json_key(json, "calls");
            lc_json_uint(json, op->by[i].calls);
            lc_json_key(json, "bytes_asked");
            lc_json_uint(json, op->by[i].asked);
            lc_json_key(json, "bytes_sent");
            lc_json_uint(json, op->by[i].sent);
            lc_json_end(json);
        }
        lc_json_end(json);
        json_buckets(json, "sizes", op->sizes);
        lc_json_end(json);
    }
    lc_json_end(json);
    if (ledger->ring_sent || ledger->ring_elided || ledger->ring_bytes)
        json_rings(json, ledger);
    if (ledger->drawn) {
        lc_json_key(json, "rounded_stochastically");
        lc_json_uint(json, ledger->drawn);
    }
    if (ledger->fed || ledger->unfed)
        json_feedback(json, ledger);
    if (ledger->verify_begun || ledger->verify_passed)
        json_verify(json, ledger);
}

static void json_comm(struct lc_json *json, const struct lc_report_comm *comm)
{
    static const char *const origins[] = { "init", "split", "shrink", "adopted" };

    lc_json_object(json);
    lc_json_key(json, "number");
    lc_json_int(json, comm->number);
    lc_json_key(json, "name");
    lc_json_string(json, *comm->facts.name ? comm->facts.name : NULL);
    lc_json_key(json, "ranks");
    lc_json_int(json, comm->facts.ranks);
    lc_json_key(json, "rank");
    lc_json_int(json, comm->facts.rank);
    lc_json_key(json, "device");
    if (comm->facts.device >= 0)
        lc_json_int(json, comm->facts.device);
    else
        lc_json_string(json, NULL);
    lc_json_key(json, "origin");
    lc_json_string(json, origins[comm->facts.origin]);
    lc_json_key(json, "parent");
    if (comm->facts.parent >= 0)
        lc_json_int(json, comm->facts.parent);
    else
        lc_json_string(json, NULL);
    lc_json_key(json, "windows");
    lc_json_uint(json, comm->windows);
    lc_json_key(json, "closed");
    lc_json_bool(json, comm->closed);
    lc_json_key(json, "id");
    lc_note_json_id(json, comm->id);
    lc_note_json_progress(json, &comm->progress);
    json_ledger(json, &comm->ledger);
    lc_json_end(json);
}

static void json_metrics(struct lc_json *json, const struct lc_report *report)
{
    if (!report->n_metrics)
        return;
    lc_json_key(json, "network");
    lc_json_array(json);
    for (size_t i = 0; i < report->n_metrics; i++) {
        const struct lc_metric *m = &report->metrics[i];

        lc_json_object(json);
        lc_json_key(json, "source");
        lc_json_string(json, m->source);
        lc_json_key(json, "device");
        lc_json_string(json, m->device);
        lc_json_key(json, "peer");
        lc_json_string(json, m->peer);
        lc_json_key(json, "counters");
        lc_json_object(json);
        for (int j = 0; j < m->n; j++) {
            lc_json_key(json, m->counter[j].name);
            lc_json_uint(json, m->counter[j].value);
        }
        lc_json_end(json);
        lc_json_end(json);
    }
    lc_json_end(json);
}

int lc_report_print_json(const struct lc_report *report, FILE *out)
{
    struct lc_json json;
    char version[32];

    lc_json_init(&json, out);
    lc_json_object(&json);
    lc_json_key(&json, "schema");
    lc_json_string(&json, "loongcomm.report/1");
    lc_json_key(&json, "version");
    lc_json_string(&json, report->version);
    lc_json_key(&json, "host");
    lc_json_string(&json, report->host);
    lc_json_key(&json, "pid");
    lc_json_int(&json, report->pid);
    lc_json_key(&json, "rank");
    lc_json_int(&json, report->rank);
    lc_json_key(&json, "ranks");
    lc_json_int(&json, report->ranks);
    lc_json_key(&json, "enabled");
    lc_json_bool(&json, report->enabled);
    lc_json_key(&json, "nccl");
    lc_json_object(&json);
    lc_json_key(&json, "version");
    lc_json_string(&json, report->nccl_version
                              ? nccl_version(report->nccl_version, version, sizeof(version))
                              : NULL);
    lc_json_key(&json, "path");
    lc_json_string(&json, report->nccl_path);
    lc_json_end(&json);
    lc_json_key(&json, "communicators");
    lc_json_array(&json);
    for (size_t i = 0; i < report->count; i++)
        json_comm(&json, &report->comm[i]);
    lc_json_end(&json);
    lc_json_key(&json, "others");
    lc_json_object(&json);
    lc_json_key(&json, "communicators");
    lc_json_uint(&json, report->other_count);
    json_ledger(&json, &report->others);
    lc_json_end(&json);
    json_buckets(&json, "groups", report->groups.sizes);
    json_metrics(&json, report);
    lc_json_end(&json);
    return lc_json_finish(&json);
}
