/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/job.h"

#include "common/output.h"
#include "interpose/cli/json_walk.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind {
    UNKNOWN,
    EXIT_REPORT,
    HANG_REPORT,
};

/* One report while it is read. A communicator is complete when the next begins, or the text ends. */
struct reader {
    struct lc_job *job;
    enum kind kind;
    int err;
    bool dry; /* only looks whether the text is whole and what it is */
    bool open;
    uint64_t pid, time;
    char host[65];
    bool blames;
    char verdict[512];
    struct lc_job_comm comm; /* its ledger, and facts */
    struct lc_job_member member;
    bool in_metric;
    struct lc_job_metric metric; /* complete when the next begins, or the text ends */
};

static void copy_text(char *out, size_t size, const char *value)
{
    size_t i = 0;

    for (; value[i] && i + 1 < size; i++)
        out[i] = value[i];
    out[i] = '\0';
    lc_output_defuse(out);
}
#define COPY(field, value) copy_text(field, sizeof(field), value)

static uint64_t number(struct reader *reader, const char *value)
{
    char *end;
    uint64_t result = 0;

    if (*value >= '0' && *value <= '9') {
        errno = 0;
        result = strtoull(value, &end, 10);
        if (!errno && !*end)
            return result;
    }
    reader->err = -EINVAL;
    return 0;
}

/* ---- into the job ---- */

static struct lc_job_comm *find_comm(struct lc_job *job, const struct lc_job_comm *like)
{
    for (size_t i = 0; i < job->n_comms; i++) {
        struct lc_job_comm *comm = job->comms[i];

        if (comm->ranks == like->ranks && strcmp(comm->id, like->id) == 0 &&
            (*like->id || comm->number == like->number))
            return comm;
    }
    return NULL;
}

static struct lc_job_comm *get_comm(struct lc_job *job, const struct lc_job_comm *like)
{
    struct lc_job_comm *comm = find_comm(job, like);

    if (comm)
        return comm;
    job->full |= job->n_comms == LC_JOB_COMMS;
    comm = job->n_comms < LC_JOB_COMMS ? calloc(1, sizeof(*comm)) : NULL;
    if (!comm)
        return NULL;
    memcpy(comm->id, like->id, sizeof(comm->id));
    memcpy(comm->name, like->name, sizeof(comm->name));
    comm->ranks = like->ranks;
    comm->number = like->number;
    job->comms[job->n_comms++] = comm;
    return comm;
}

static bool is_later(const struct lc_job_member *a, const struct lc_job_member *b)
{
    if (a->from_exit != b->from_exit)
        return a->from_exit;
    return a->collectives + a->messages > b->collectives + b->messages;
}

static int put_member(struct lc_job *job, struct lc_job_comm *comm,
                      const struct lc_job_member *member)
{
    for (size_t i = 0; i < comm->n_members; i++) {
        if (comm->members[i].rank != member->rank)
            continue;
        if (is_later(member, &comm->members[i]))
            comm->members[i] = *member;
        return 0;
    }
    if (comm->n_members == LC_JOB_MEMBERS) {
        job->full = true;
        return 0;
    }
    if (comm->n_members == comm->room) {
        size_t room = comm->room ? 2 * comm->room : 8;
        struct lc_job_member *members = realloc(comm->members, room * sizeof(*members));

        if (!members)
            return -ENOMEM;
        comm->members = members;
        comm->room = room;
    }
    comm->members[comm->n_members++] = *member;
    return 0;
}

static void put_sum(struct lc_job *job, struct lc_job_comm *comm, const struct lc_job_sum *sum)
{
    size_t i = 0;

    while (i < comm->n_sums && (strcmp(comm->sums[i].call, sum->call) != 0 ||
                                strcmp(comm->sums[i].path, sum->path) != 0 ||
                                strcmp(comm->sums[i].reason, sum->reason) != 0))
        i++;
    if (i == LC_JOB_LEDGER) {
        job->full = true;
        return;
    }
    if (i == comm->n_sums) {
        comm->sums[i] = *sum;
        comm->n_sums++;
        return;
    }
    comm->sums[i].calls += sum->calls; /* hostile numbers may wrap: unsigned, so harmless */
    comm->sums[i].asked += sum->asked;
    comm->sums[i].sent += sum->sent;
}

static void put_hang(struct lc_job *job, struct lc_job_comm *comm, const struct reader *reader)
{
    size_t i = 0;

    while (i < comm->n_hangs && strcmp(comm->hangs[i].verdict, reader->verdict) != 0)
        i++;
    if (i == LC_JOB_HANGS) {
        job->full = true;
        return;
    }
    if (i == comm->n_hangs) {
        comm->n_hangs++;
        memcpy(comm->hangs[i].verdict, reader->verdict, sizeof(reader->verdict));
        comm->hangs[i].since = reader->time;
    }
    comm->hangs[i].blames |= reader->blames;
    comm->hangs[i].reports++;
    if (reader->time < comm->hangs[i].since)
        comm->hangs[i].since = reader->time;
}

static struct lc_job_metric *get_metric(struct lc_job *job, const struct lc_job_metric *like)
{
    struct lc_job_metric *m;

    for (size_t i = 0; i < job->n_metrics; i++) {
        m = job->metrics[i];
        if (strcmp(m->host, like->host) == 0 && strcmp(m->source, like->source) == 0 &&
            strcmp(m->device, like->device) == 0 && strcmp(m->peer, like->peer) == 0)
            return m;
    }
    job->full |= job->n_metrics == LC_JOB_METRICS;
    m = job->n_metrics < LC_JOB_METRICS ? calloc(1, sizeof(*m)) : NULL;
    if (!m)
        return NULL;
    memcpy(m->host, like->host, sizeof(m->host));
    memcpy(m->source, like->source, sizeof(m->source));
    memcpy(m->device, like->device, sizeof(m->device));
    memcpy(m->peer, like->peer, sizeof(m->peer));
    job->metrics[job->n_metrics++] = m;
    return m;
}

static void put_counter(struct lc_job_metric *m, const char *name, uint64_t value)
{
    size_t i = 0;

    while (i < m->n && strcmp(m->counter[i].name, name) != 0)
        i++;
    if (i == LC_JOB_COUNTERS)
        return;
    if (i == m->n)
        copy_text(m->counter[m->n++].name, sizeof(m->counter[i].name), name);
    m->counter[i].value += value; /* hostile numbers may wrap: unsigned, so harmless */
}

static void finish_metric(struct reader *reader)
{
    struct lc_job_metric *m;

    if (!reader->in_metric || reader->dry || reader->err)
        return;
    reader->in_metric = false;
    COPY(reader->metric.host, reader->host);
    m = get_metric(reader->job, &reader->metric);
    if (!m) {
        reader->err = reader->job->full ? 0 : -ENOMEM;
        return;
    }
    for (size_t i = 0; i < reader->metric.n; i++)
        put_counter(m, reader->metric.counter[i].name, reader->metric.counter[i].value);
}

/* The communicator that was read goes into the job. */
static void finish_comm(struct reader *reader)
{
    struct lc_job_comm *comm;

    if (reader->open && reader->member.rank >= reader->comm.ranks)
        reader->err = -EINVAL;
    if (!reader->open || reader->dry || reader->err)
        return;
    reader->open = false;
    reader->member.pid = reader->pid;
    reader->member.from_exit = reader->kind == EXIT_REPORT;
    memcpy(reader->member.host, reader->host, sizeof(reader->host));
    comm = get_comm(reader->job, &reader->comm);
    if (!comm) {
        reader->err = reader->job->full ? 0 : -ENOMEM;
        return;
    }
    reader->err = put_member(reader->job, comm, &reader->member);
    for (size_t i = 0; i < reader->comm.n_sums; i++)
        put_sum(reader->job, comm, &reader->comm.sums[i]);
    if (reader->kind == HANG_REPORT)
        put_hang(reader->job, comm, reader);
}

static void begin_comm(struct reader *reader)
{
    finish_comm(reader);
    memset(&reader->comm, 0, sizeof(reader->comm));
    memset(&reader->member, 0, sizeof(reader->member));
    reader->open = true;
}

/* ---- what the walker finds ---- */

static void take_note(struct reader *reader, const char *key, const char *value)
{
    struct lc_job_member *member = &reader->member;
    struct lc_job_note *note;

    if (strcmp(key, "seq") == 0 && member->n < LC_JOB_RECENT)
        member->recent[member->n++].seq = number(reader, value);
    if (!member->n)
        return;
    note = &member->recent[member->n - 1];
    if (strcmp(key, "call") == 0)
        COPY(note->call, value);
    else if (strcmp(key, "reduction") == 0 && strcmp(value, "null") != 0)
        COPY(note->reduction, value);
    else if (strcmp(key, "type") == 0)
        COPY(note->type, value);
    else if (strcmp(key, "peer") == 0 && strcmp(value, "null") != 0)
        COPY(note->peer, value);
    else if (strcmp(key, "count") == 0)
        note->count = number(reader, value);
}

static void take_sum(struct reader *reader, const char *key, const char *value)
{
    struct lc_job_comm *comm = &reader->comm;
    struct lc_job_sum *sum = comm->n_sums ? &comm->sums[comm->n_sums - 1] : NULL;

    if (strcmp(key, "op") == 0 || strcmp(key, "paths.path") == 0) {
        bool next_path = *key == 'p' && sum && !*sum->path;

        if (!next_path && comm->n_sums < LC_JOB_LEDGER) {
            struct lc_job_sum *fresh = &comm->sums[comm->n_sums++];

            if (*key == 'p' && sum)
                memcpy(fresh->call, sum->call, sizeof(fresh->call));
            sum = fresh;
        }
        if (sum && *key == 'p')
            COPY(sum->path, value);
        else if (sum)
            COPY(sum->call, value);
    } else if (sum && strcmp(key, "paths.reason") == 0) {
        COPY(sum->reason, value);
    } else if (sum && strcmp(key, "paths.calls") == 0) {
        sum->calls = number(reader, value);
    } else if (sum && strcmp(key, "paths.bytes_asked") == 0) {
        sum->asked = number(reader, value);
    } else if (sum && strcmp(key, "paths.bytes_sent") == 0) {
        sum->sent = number(reader, value);
    }
}

static void take_comm(struct reader *reader, const char *key, const char *value)
{
    if (strncmp(key, "recent.", 7) == 0)
        take_note(reader, key + 7, value);
    else if (strncmp(key, "operations.", 11) == 0)
        take_sum(reader, key + 11, value);
    else if (strcmp(key, "number") == 0)
        reader->comm.number = number(reader, value);
    else if (strcmp(key, "id") == 0 && strcmp(value, "null") != 0)
        COPY(reader->comm.id, value);
    else if (strcmp(key, "name") == 0 && strcmp(value, "null") != 0)
        COPY(reader->comm.name, value);
    else if (strcmp(key, "ranks") == 0)
        reader->comm.ranks = number(reader, value);
    else if (strcmp(key, "rank") == 0)
        reader->member.rank = number(reader, value);
    else if (strcmp(key, "collectives") == 0)
        reader->member.collectives = number(reader, value);
    else if (strcmp(key, "messages") == 0)
        reader->member.messages = number(reader, value);
}

static void take_metric(struct reader *reader, const char *key, const char *value)
{
    struct lc_job_metric *m = &reader->metric;
    char name[sizeof(m->counter[0].name)];

    if (strcmp(key, "source") == 0) {
        finish_metric(reader);
        memset(m, 0, sizeof(*m));
        reader->in_metric = true;
        COPY(m->source, value);
    } else if (strcmp(key, "device") == 0) {
        COPY(m->device, value);
    } else if (strcmp(key, "peer") == 0) {
        COPY(m->peer, value);
    } else if (strncmp(key, "counters.", 9) == 0) {
        COPY(name, key + 9);
        put_counter(m, name, number(reader, value));
    }
}

static void take_process(struct reader *reader, const char *path, const char *value)
{
    if (strcmp(path, "pid") == 0)
        reader->pid = number(reader, value);
    else if (strcmp(path, "host") == 0)
        COPY(reader->host, value);
    else if (strcmp(path, "time") == 0)
        reader->time = number(reader, value);
    else if (strcmp(path, "verdict") == 0)
        COPY(reader->verdict, value);
    else if (strcmp(path, "blames") == 0)
        reader->blames = strcmp(value, "true") == 0;
}

static void visit(const char *path, const char *value, void *arg)
{
    struct reader *reader = arg;

    if (strcmp(path, "schema") == 0)
        reader->kind = strcmp(value, "loongcomm.report/1") == 0 ? EXIT_REPORT
                       : strcmp(value, "loongcomm.hang/1") == 0 ? HANG_REPORT
                                                                : UNKNOWN;
    if (reader->kind == EXIT_REPORT && strcmp(path, "communicators.number") == 0)
        begin_comm(reader);
    if (reader->kind == HANG_REPORT && strcmp(path, "communicator.id") == 0)
        begin_comm(reader);
    if (reader->open && reader->kind == EXIT_REPORT && strncmp(path, "communicators.", 14) == 0)
        take_comm(reader, path + 14, value);
    else if (reader->open && reader->kind == HANG_REPORT && strncmp(path, "communicator.", 13) == 0)
        take_comm(reader, path + 13, value);
    else if (reader->kind == EXIT_REPORT && strncmp(path, "network.", 8) == 0)
        take_metric(reader, path + 8, value);
    else
        take_process(reader, path, value);
}

static int walk(struct lc_job *job, const char *text, bool dry, enum kind *kind)
{
    struct reader *reader = calloc(1,
                                   sizeof(*reader)); /* too large for the stack of a small thread */
    int err;

    if (!reader)
        return -ENOMEM;
    reader->job = job;
    reader->dry = dry;
    err = lc_cli_json_walk(text, visit, reader);
    if (!err) {
        finish_comm(reader);
        finish_metric(reader);
        err = reader->kind == UNKNOWN ? -EINVAL : reader->err;
    }
    *kind = reader->kind;
    free(reader);
    return err;
}

/* Twice: what turns out to be damaged leaves nothing behind. */
int lc_job_add(struct lc_job *job, const char *text)
{
    enum kind kind;
    int err = walk(job, text, true, &kind);

    if (!err)
        err = walk(job, text, false, &kind);
    if (!err && kind == EXIT_REPORT)
        job->exits++;
    if (!err && kind == HANG_REPORT)
        job->hangs++;
    return err;
}

/* ---- judgement ---- */

static int by_rank(const void *a, const void *b)
{
    const struct lc_job_member *x = a, *y = b;

    return (x->rank > y->rank) - (x->rank < y->rank);
}

static bool same(const struct lc_job_note *a, const struct lc_job_note *b)
{
    bool own = strcmp(a->reduction, "own operation") == 0 ||
               strcmp(b->reduction, "own operation") == 0;

    return a->count == b->count && strcmp(a->call, b->call) == 0 && strcmp(a->type, b->type) == 0 &&
           strcmp(a->peer, b->peer) == 0 && (own || strcmp(a->reduction, b->reduction) == 0);
}

static void compare(struct lc_job_comm *comm, const struct lc_job_member *a,
                    const struct lc_job_member *b)
{
    for (size_t i = 0; i < a->n; i++) {
        for (size_t j = 0; j < b->n; j++) {
            if (a->recent[i].seq != b->recent[j].seq || same(&a->recent[i], &b->recent[j]) ||
                (comm->a && comm->note_a->seq <= a->recent[i].seq))
                continue;
            comm->a = a;
            comm->b = b;
            comm->note_a = &a->recent[i];
            comm->note_b = &b->recent[j];
        }
    }
}

static bool judge(struct lc_job_comm *comm)
{
    const struct lc_job_member *foremost = NULL;
    bool bad = false;

    if (comm->n_members)
        qsort(comm->members, comm->n_members, sizeof(*comm->members), by_rank);
    for (size_t i = 0; i < comm->n_hangs; i++)
        bad |= comm->hangs[i].blames;
    if (!*comm->id)
        return bad;
    for (size_t i = 0; i < comm->n_members; i++) {
        if (!foremost || comm->members[i].collectives > foremost->collectives)
            foremost = &comm->members[i];
    }
    comm->top = foremost ? foremost->collectives : 0;
    for (size_t i = 0; i < comm->n_members; i++) {
        comm->n_behind += comm->members[i].collectives < comm->top;
        compare(comm, foremost, &comm->members[i]);
    }
    return bad || comm->n_behind || comm->a;
}

bool lc_job_judge(struct lc_job *job)
{
    bool bad = false;

    for (size_t i = 0; i < job->n_comms; i++)
        bad |= judge(job->comms[i]);
    return bad;
}

void lc_job_free(struct lc_job *job)
{
    for (size_t i = 0; i < job->n_comms; i++) {
        free(job->comms[i]->members);
        free(job->comms[i]);
    }
    for (size_t i = 0; i < job->n_metrics; i++)
        free(job->metrics[i]);
}
