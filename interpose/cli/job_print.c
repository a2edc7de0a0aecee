/* SPDX-License-Identifier: Apache-2.0 */
#include "common/json.h"
#include "common/output.h"
#include "interpose/cli/job.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define NAMED ((size_t)16) /* ranks in one line */

static void print_note(const struct lc_job_note *note)
{
    bool reduces = *note->reduction != '\0';

    (void)printf("%s%s%s%s of %" PRIu64 " %s", note->call, reduces ? " (" : "", note->reduction,
                 reduces ? ")" : "", note->count, note->type);
    if (*note->peer)
        (void)printf(", root %s", note->peer);
}

static void print_member(const struct lc_job_member *member)
{
    (void)printf("    rank %" PRIu64 " (process %" PRIu64 " on %s, %s): at #%" PRIu64, member->rank,
                 member->pid, member->host, member->from_exit ? "at its exit" : "when it hung",
                 member->collectives);
    if (member->n) {
        (void)printf(", ");
        print_note(&member->recent[member->n - 1]);
    }
    (void)printf("\n");
}

static bool like_last(const struct lc_job_comm *comm, size_t i)
{
    const struct lc_job_member *a = &comm->members[0], *b = &comm->members[i];

    return a->collectives == b->collectives && a->n == b->n && comm->a == NULL;
}

/* One line where all ranks stand alike, else one for each that is not like the first, and for that one. */
static void print_members(const struct lc_job_comm *comm)
{
    size_t alike = 0, shown = 0;

    for (size_t i = 0; i < comm->n_members; i++)
        alike += like_last(comm, i);
    if (alike == comm->n_members) {
        const struct lc_job_member *first = &comm->members[0];

        (void)printf("  last operation: all %zu ranks that reported are at #%" PRIu64,
                     comm->n_members, first->collectives);
        if (first->n) {
            (void)printf(", ");
            print_note(&first->recent[first->n - 1]);
        }
        (void)printf("\n");
        return;
    }
    (void)printf("  last operation of each rank:\n");
    for (size_t i = 0; i < comm->n_members; i++) {
        if (shown++ < 4 * NAMED)
            print_member(&comm->members[i]);
    }
    if (shown > 4 * NAMED)
        (void)printf("    and %zu more\n", shown - 4 * NAMED);
}

static void print_unheard(const struct lc_job_comm *comm)
{
    uint64_t rank = 0;
    size_t named = 0;

    if (comm->n_members >= comm->ranks)
        return;
    (void)printf("  no report of rank");
    for (size_t i = 0; i <= comm->n_members && named < NAMED; i++) {
        uint64_t next = i < comm->n_members ? comm->members[i].rank : comm->ranks;

        for (; rank < next && named < NAMED; rank++)
            (void)printf("%s %" PRIu64, named++ ? "," : "", rank);
        rank = next + 1;
    }
    if (comm->ranks - comm->n_members > named)
        (void)printf(" and %" PRIu64 " more", comm->ranks - comm->n_members - named);
    (void)printf(": killed, still running, or without loongcomm\n");
}

static void print_faults(const struct lc_job_comm *comm)
{
    size_t named = 0;

    for (size_t i = 0; i < comm->n_hangs; i++)
        (void)printf("  %s (%" PRIu64 " report%s): %s\n",
                     comm->hangs[i].blames ? "hang" : "standstill", comm->hangs[i].reports,
                     comm->hangs[i].reports == 1 ? "" : "s", comm->hangs[i].verdict);
    if (comm->a) {
        (void)printf("  ranks differ at #%" PRIu64 ": rank %" PRIu64 " called ", comm->note_a->seq,
                     comm->a->rank);
        print_note(comm->note_a);
        (void)printf(", rank %" PRIu64 " called ", comm->b->rank);
        print_note(comm->note_b);
        (void)printf("\n");
    }
    if (!comm->n_behind)
        return;
    (void)printf("  behind #%" PRIu64 ":", comm->top);
    for (size_t i = 0; i < comm->n_members && named < NAMED; i++) {
        const struct lc_job_member *m = &comm->members[i];

        if (m->collectives < comm->top)
            (void)printf("%s rank %" PRIu64 " at #%" PRIu64, named++ ? "," : "", m->rank,
                         m->collectives);
    }
    if (comm->n_behind > named)
        (void)printf(" and %zu more", comm->n_behind - named);
    (void)printf("\n");
}

static void print_comm(const struct lc_job_comm *comm)
{
    char asked[16], sent[16];

    if (*comm->id)
        (void)printf("communicator %s", comm->id);
    else
        (void)printf("communicator #%" PRIu64 " of each process (no number in common)",
                     comm->number);
    if (*comm->name)
        (void)printf(" \"%s\"", comm->name);
    (void)printf(", %" PRIu64 " ranks\n", comm->ranks);
    print_faults(comm);
    if (*comm->id) {
        print_members(comm);
        print_unheard(comm);
    }
    for (size_t i = 0; i < comm->n_sums; i++) {
        const struct lc_job_sum *s = &comm->sums[i];

        if (s->calls)
            (void)printf("  %-14s %10" PRIu64 " calls %12s asked %12s sent  %s (%s)\n", s->call,
                         s->calls, lc_output_bytes(s->asked, asked), lc_output_bytes(s->sent, sent),
                         s->path, s->reason);
    }
}

static void print_metrics(const struct lc_job *job)
{
    char text[16];

    for (size_t i = 0; i < job->n_metrics && i < 4 * NAMED; i++) {
        const struct lc_job_metric *m = job->metrics[i];

        (void)printf("network %s of %s, %s (%s):", m->device, m->host, m->peer, m->source);
        for (size_t j = 0; j < m->n; j++) {
            (void)printf("%s %s ", j ? "," : "", m->counter[j].name);
            if (strncmp(m->counter[j].name, "bytes_", 6) == 0)
                (void)printf("%s", lc_output_bytes(m->counter[j].value, text));
            else
                (void)printf("%" PRIu64, m->counter[j].value);
        }
        (void)printf("\n");
    }
    if (job->n_metrics > 4 * NAMED)
        (void)printf("network: %zu more (--json has all)\n", job->n_metrics - 4 * NAMED);
}

void lc_job_print(const struct lc_job *job)
{
    (void)printf("%zu exit report%s, %zu hang report%s, %zu communicator%s\n", job->exits,
                 job->exits == 1 ? "" : "s", job->hangs, job->hangs == 1 ? "" : "s", job->n_comms,
                 job->n_comms == 1 ? "" : "s");
    for (size_t i = 0; i < job->n_comms; i++)
        print_comm(job->comms[i]);
    print_metrics(job);
    if (job->full)
        (void)printf("there was more than fits: something was left out\n");
}

/* ---- JSON ---- */

static void json_text(struct lc_json *json, const char *key, const char *text)
{
    lc_json_key(json, key);
    lc_json_string(json, *text ? text : NULL);
}

static void json_number(struct lc_json *json, const char *key, uint64_t value)
{
    lc_json_key(json, key);
    lc_json_uint(json, value);
}

static void json_note(struct lc_json *json, const char *key, const struct lc_job_note *note)
{
    lc_json_key(json, key);
    if (!note) {
        lc_json_string(json, NULL);
        return;
    }
    lc_json_object(json);
    json_number(json, "seq", note->seq);
    json_text(json, "call", note->call);
    json_text(json, "reduction", note->reduction);
    json_number(json, "count", note->count);
    json_text(json, "type", note->type);
    json_text(json, "peer", note->peer);
    lc_json_end(json);
}

static void json_members(struct lc_json *json, const struct lc_job_comm *comm)
{
    lc_json_key(json, "members");
    lc_json_array(json);
    for (size_t i = 0; i < comm->n_members; i++) {
        const struct lc_job_member *m = &comm->members[i];

        lc_json_object(json);
        json_number(json, "rank", m->rank);
        json_number(json, "pid", m->pid);
        json_text(json, "host", m->host);
        json_text(json, "source", m->from_exit ? "exit" : "hang");
        json_number(json, "collectives", m->collectives);
        json_number(json, "messages", m->messages);
        lc_json_key(json, "behind");
        lc_json_bool(json, m->collectives < comm->top);
        json_note(json, "last", m->n ? &m->recent[m->n - 1] : NULL);
        lc_json_end(json);
    }
    lc_json_end(json);
}

static void json_faults(struct lc_json *json, const struct lc_job_comm *comm)
{
    lc_json_key(json, "hangs");
    lc_json_array(json);
    for (size_t i = 0; i < comm->n_hangs; i++) {
        lc_json_object(json);
        json_text(json, "verdict", comm->hangs[i].verdict);
        lc_json_key(json, "blames");
        lc_json_bool(json, comm->hangs[i].blames);
        json_number(json, "reports", comm->hangs[i].reports);
        json_number(json, "since", comm->hangs[i].since);
        lc_json_end(json);
    }
    lc_json_end(json);
    lc_json_key(json, "differs");
    if (!comm->a) {
        lc_json_string(json, NULL);
        return;
    }
    lc_json_object(json);
    json_number(json, "rank_a", comm->a->rank);
    json_note(json, "call_a", comm->note_a);
    json_number(json, "rank_b", comm->b->rank);
    json_note(json, "call_b", comm->note_b);
    lc_json_end(json);
}

static void json_ledger(struct lc_json *json, const struct lc_job_comm *comm)
{
    lc_json_key(json, "ledger");
    lc_json_array(json);
    for (size_t i = 0; i < comm->n_sums; i++) {
        const struct lc_job_sum *s = &comm->sums[i];

        lc_json_object(json);
        json_text(json, "call", s->call);
        json_text(json, "path", s->path);
        json_text(json, "reason", s->reason);
        json_number(json, "calls", s->calls);
        json_number(json, "bytes_asked", s->asked);
        json_number(json, "bytes_sent", s->sent);
        lc_json_end(json);
    }
    lc_json_end(json);
}

static void json_metrics(struct lc_json *json, const struct lc_job *job)
{
    lc_json_key(json, "network");
    lc_json_array(json);
    for (size_t i = 0; i < job->n_metrics; i++) {
        const struct lc_job_metric *m = job->metrics[i];

        lc_json_object(json);
        json_text(json, "host", m->host);
        json_text(json, "source", m->source);
        json_text(json, "device", m->device);
        json_text(json, "peer", m->peer);
        lc_json_key(json, "counters");
        lc_json_object(json);
        for (size_t j = 0; j < m->n; j++)
            json_number(json, m->counter[j].name, m->counter[j].value);
        lc_json_end(json);
        lc_json_end(json);
    }
    lc_json_end(json);
}

int lc_job_print_json(const struct lc_job *job, size_t bad)
{
    struct lc_json json;

    lc_json_init(&json, stdout);
    lc_json_object(&json);
    json_text(&json, "schema", "loongcomm.job/1");
    json_number(&json, "exit_reports", job->exits);
    json_number(&json, "hang_reports", job->hangs);
    json_number(&json, "bad_files", bad);
    lc_json_key(&json, "complete");
    lc_json_bool(&json, !job->full);
    lc_json_key(&json, "communicators");
    lc_json_array(&json);
    for (size_t i = 0; i < job->n_comms; i++) {
        const struct lc_job_comm *comm = job->comms[i];

        lc_json_object(&json);
        json_text(&json, "id", comm->id);
        json_text(&json, "name", comm->name);
        json_number(&json, "ranks", comm->ranks);
        json_number(&json, "foremost", comm->top);
        json_number(&json, "behind", comm->n_behind);
        json_faults(&json, comm);
        json_members(&json, comm);
        json_ledger(&json, comm);
        lc_json_end(&json);
    }
    lc_json_end(&json);
    json_metrics(&json, job);
    lc_json_end(&json);
    return lc_json_finish(&json);
}
