/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/watch.h"

#include "common/cleanup.h"
#include "common/json.h"
#include "common/log.h"
#include "common/output.h"
#include "interpose/note.h"
#include "interpose/process.h"
#include "interpose/report.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_RANKS 64 /* of larger communicators not every rank writes a line */
#define NAMED      4  /* missing ranks in a line */

struct text {
    char *out;
    size_t size, used;
};

__attribute__((format(printf, 2, 3))) static void add(struct text *text, const char *fmt, ...)
{
    va_list ap;
    int length;

    va_start(ap, fmt);
    length = vsnprintf(text->out + text->used, text->size - text->used, fmt, ap);
    va_end(ap);
    if (length > 0)
        text->used += (size_t)length < text->size - text->used ? (size_t)length
                                                               : text->size - text->used - 1;
}

static void add_missing(struct text *text, const struct lc_missing *m)
{
    add(text, "rank %u (process %u ", m->rank, m->pid);
    switch ((enum lc_presence)m->presence) {
    case LC_HERE:
        if (m->collectives)
            add(text, "is at #%" PRIu64 ", its last call was %.1f s ago)", m->collectives,
                (double)m->age_ms / 1000);
        else
            add(text, "has called no collective yet)");
        break;
    case LC_SILENT: add(text, "does not answer: stopped, or its machine is gone)"); break;
    case LC_LEFT:
        add(text, "has ended the communicator after #%" PRIu64 ")", m->collectives);
        break;
    case LC_LOST: add(text, "has ended without goodbye)"); break;
    case LC_GAVE_UP: add(text, "has aborted the communicator)"); break;
    default: add(text, "is unknown)"); break;
    }
}

static void add_found(struct text *text, const struct lc_hang *hang)
{
    const struct lc_finding *f = &hang->finding;
    uint32_t named = f->n_listed < NAMED ? f->n_listed : NAMED;
    char a[96], b[96];

    if (f->n_missing) {
        add(text, "not arrived on #%" PRIu64 " %s: ", f->at,
            f->awaited.seq ? lc_note_text(&f->awaited, a, sizeof(a)) : "(a collective)");
        for (uint32_t i = 0; i < named; i++) {
            add(text, "%s", i ? ", " : "");
            add_missing(text, &hang->missing[i]);
        }
        if (f->n_missing > named)
            add(text, " and %u more", f->n_missing - named);
    }
    if (f->n_differ)
        add(text, "%sranks differ at #%" PRIu64 ": rank %u called %s, rank %u called %s%s",
            f->n_missing ? "; " : "", f->a.seq, f->rank_a, lc_note_text(&f->a, a, sizeof(a)),
            f->rank_b, lc_note_text(&f->b, b, sizeof(b)), f->n_differ > 1 ? ", and others" : "");
    if (!f->n_missing && !f->n_differ)
        add(text,
            "all ranks have called the same %" PRIu64 " collectives: idle, or stuck inside "
            "the last one",
            f->top);
    if (f->n_absent)
        add(text,
            "; nothing is known of %u ranks, which do not run loongcomm or left before they had joined",
            f->n_absent);
}

const char *lc_watch_verdict(const struct lc_hang *hang, char *out, size_t size)
{
    struct text text = { out, size, 0 };

    out[0] = '\0';
    if (hang->kind == LC_HANG_FOUND)
        add_found(&text, hang);
    else if (hang->arbiter_lost)
        add(&text, "the process that made this communicator's id has ended without goodbye or is "
                   "out of reach, and with it what is known of other ranks");
    else
        add(&text, "nothing is known of other ranks: the process that made this communicator's id "
                   "has ended, or does not answer");
    return out;
}

static const struct lc_note *last_call(const struct lc_hang *hang)
{
    const struct lc_progress_copy *mine = &hang->mine;

    return mine->n ? &mine->recent[mine->n - 1] : &mine->message;
}

static bool is_blamed(const struct lc_hang *hang, uint32_t rank)
{
    for (uint32_t i = 0; i < hang->finding.n_listed; i++) {
        if (hang->missing[i].rank == rank)
            return true;
    }
    return false;
}

static bool speaks_for_all(const struct lc_hang *hang)
{
    uint32_t rank = 0;

    while (rank < hang->rank && is_blamed(hang, rank))
        rank++;
    return rank == hang->rank;
}

static void say(const struct lc_hang *hang, enum lc_log_level level)
{
    const struct lc_note *last = last_call(hang);
    char verdict[400], call[96];

    LC_LOG(level,
           "rank %u of %u, communicator %016" PRIx64 ": %s; this rank is at #%" PRIu64
           "%s%s, its last call was %.1f s ago; we go on waiting",
           hang->rank, hang->nranks, hang->id, lc_watch_verdict(hang, verdict, sizeof(verdict)),
           hang->mine.collectives, last->seq ? " " : "",
           last->seq ? lc_note_text(last, call, sizeof(call)) : "", (double)hang->age_ms / 1000);
}

static void json_missing(struct lc_json *json, const struct lc_missing *m)
{
    static const char *const presences[] = {
        "here", "silent", "left", "lost", "aborted", "absent"
    };

    lc_json_object(json);
    lc_json_key(json, "rank");
    lc_json_uint(json, m->rank);
    lc_json_key(json, "presence");
    lc_json_string(json, m->presence <= LC_ABSENT ? presences[m->presence] : NULL);
    lc_json_key(json, "pid");
    lc_json_uint(json, m->pid);
    lc_json_key(json, "collectives");
    lc_json_uint(json, m->collectives);
    lc_json_key(json, "age_ms");
    lc_json_uint(json, m->age_ms);
    lc_json_end(json);
}

static void json_finding(struct lc_json *json, const struct lc_hang *hang)
{
    const struct lc_finding *f = &hang->finding;

    lc_json_object(json);
    lc_json_key(json, "foremost");
    lc_json_uint(json, f->top);
    lc_json_key(json, "at");
    lc_json_uint(json, f->at);
    lc_json_key(json, "awaited");
    lc_note_json(json, &f->awaited);
    lc_json_key(json, "missing_ranks");
    lc_json_uint(json, f->n_missing);
    lc_json_key(json, "unknown_ranks");
    lc_json_uint(json, f->n_absent);
    lc_json_key(json, "missing");
    lc_json_array(json);
    for (uint32_t i = 0; i < f->n_listed; i++)
        json_missing(json, &hang->missing[i]);
    lc_json_end(json);
    lc_json_key(json, "differing_ranks");
    lc_json_uint(json, f->n_differ);
    if (f->n_differ) {
        lc_json_key(json, "rank_a");
        lc_json_uint(json, f->rank_a);
        lc_json_key(json, "call_a");
        lc_note_json(json, &f->a);
        lc_json_key(json, "rank_b");
        lc_json_uint(json, f->rank_b);
        lc_json_key(json, "call_b");
        lc_note_json(json, &f->b);
    }
    lc_json_end(json);
}

int lc_watch_print_json(const struct lc_hang *hang, const char *host, int pid, int64_t unix_s,
                        FILE *out)
{
    struct lc_json json;
    char text[768];

    lc_json_init(&json, out);
    lc_json_object(&json);
    lc_json_key(&json, "schema");
    lc_json_string(&json, "loongcomm.hang/1");
    lc_json_key(&json, "version");
    lc_json_string(&json, LC_VERSION);
    lc_json_key(&json, "host");
    lc_json_string(&json, host);
    lc_json_key(&json, "pid");
    lc_json_int(&json, pid);
    lc_json_key(&json, "time");
    lc_json_int(&json, unix_s);
    lc_json_key(&json, "verdict");
    lc_json_string(&json, lc_watch_verdict(hang, text, sizeof(text)));
    lc_json_key(&json, "blames");
    lc_json_bool(&json, lc_hang_blames(hang));
    lc_json_key(&json, "process_quiet");
    lc_json_bool(&json, hang->process_quiet);
    lc_json_key(&json, "communicator");
    lc_json_object(&json);
    lc_json_key(&json, "id");
    lc_note_json_id(&json, hang->id);
    lc_json_key(&json, "ranks");
    lc_json_uint(&json, hang->nranks);
    lc_json_key(&json, "rank");
    lc_json_uint(&json, hang->rank);
    lc_json_key(&json, "age_ms");
    lc_json_uint(&json, hang->age_ms);
    lc_json_key(&json, "stream");
    lc_note_json_id(&json, hang->mine.stream);
    lc_note_json_progress(&json, &hang->mine);
    lc_json_end(&json);
    lc_json_key(&json, "finding");
    if (hang->kind == LC_HANG_FOUND)
        json_finding(&json, hang);
    else
        lc_json_string(&json, NULL);
    lc_json_end(&json);
    return lc_json_finish(&json);
}

static int write_file(const struct lc_hang *hang, const char *dir)
{
    lc_autofree char *text = NULL;
    size_t size = 0;
    char host[65] = "unknown";
    FILE *out = open_memstream(&text, &size);
    int err, fd;

    if (!out)
        return -errno;
    (void)gethostname(host, sizeof(host) - 1);
    err = lc_watch_print_json(hang, host, (int)getpid(), (int64_t)time(NULL), out);
    if (fclose(out) != 0 && !err)
        err = -errno;
    if (err)
        return err;
    fd = lc_report_create(dir, host, (int)getpid(), (int)hang->rank, "hang.json");
    if (fd < 0)
        return fd;
    err = lc_output_write(fd, text, size);
    close(fd);
    return err;
}

void lc_watch_report(const struct lc_hang *hang)
{
    const char *dir = lc_process_config()->dir;
    bool blames = lc_hang_blames(hang);
    bool line = hang->nranks <= LINE_RANKS || speaks_for_all(hang) || is_blamed(hang, hang->rank);

    if (hang->kind == LC_HANG_OVER) {
        lc_warn("rank %u of %u, communicator %016" PRIx64 ": going on at #%" PRIu64, hang->rank,
                hang->nranks, hang->id, hang->mine.collectives);
        return;
    }
    if (*dir && (blames || hang->process_quiet)) {
        int err = write_file(hang, dir);

        if (err)
            lc_warn_once("cannot write a hang report into %s: %s", dir, strerror(-err));
        else
            line = speaks_for_all(hang);
    }
    if (line)
        say(hang, blames ? LC_LOG_WARN : LC_LOG_INFO);
}
