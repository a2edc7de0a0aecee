/* SPDX-License-Identifier: Apache-2.0
 *
 * The member's part of the watchdog: sees that a communicator stands still, says so to the arbiter, and hands what
 * comes back to the writer thread. */
#include "interpose/control/control_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Set before the first room is joined, constant afterwards; a forked child inherits them. */
static struct {
    int64_t timeout_ns; /* 0: no watchdog */
    void (*report)(const struct lc_hang *hang);
} rules;

void lc_control_watch(unsigned timeout_s, void (*report)(const struct lc_hang *hang))
{
    rules.timeout_ns = (int64_t)timeout_s * 1000000000;
    rules.report = report;
}

void lc_room_watch(struct lc_room *room, struct lc_progress *progress)
{
    atomic_store(&room->progress, progress);
}

static uint64_t calls_of(struct lc_progress *progress)
{
    return LC_RELAXED(progress->collectives) + LC_RELAXED(progress->messages);
}

static uint64_t age_ms(int64_t at_ns)
{
    int64_t age = lc_now_ns() - at_ns;

    return at_ns && age > 0 ? (uint64_t)age / 1000000 : 0;
}

static void say_state(struct lc_room *room, struct lc_progress *progress, uint32_t round)
{
    struct lc_progress_copy copy = { 0 };
    struct lc_state state;

    if (progress)
        lc_progress_read(progress, &copy);
    state = (struct lc_state){ .round = round,
                               .n = copy.n,
                               .collectives = copy.collectives,
                               .messages = copy.messages,
                               .returned = copy.returned,
                               .age_ms = age_ms(copy.at_ns) };
    (void)lc_conn_send(&room->link->conn, LC_FRAME_STATE, room->id, &state, sizeof(state),
                       copy.recent, copy.n * sizeof(struct lc_note));
}

static bool can_speak(const struct lc_room *room)
{
    return room->link && !room->abort_told && !room->watch.foreign;
}

void lc_hang_asked(struct lc_room *room, uint32_t round)
{
    struct lc_progress *progress = atomic_load(&room->progress);

    if (can_speak(room))
        say_state(room, progress, round);
}

void lc_hang_last_words(struct lc_room *room)
{
    if (rules.timeout_ns)
        lc_hang_asked(room, LC_ROUND_LAST);
}

/* ---- reports ---- */

/* Half the time: a rank is told of a stall that another saw, and may have called a little later than that. */
static bool is_quiet(const struct lc_room *room)
{
    struct lc_progress *progress = atomic_load(&room->progress);

    return !progress || lc_now_ns() - LC_RELAXED(progress->at_ns) >= rules.timeout_ns / 2;
}

static bool are_quiet(const struct lc_room *rooms)
{
    while (rooms && is_quiet(rooms))
        rooms = rooms->next;
    return !rooms;
}

static bool process_is_quiet(void)
{
    for (const struct link *l = control.links; l; l = l->next) {
        if (!are_quiet(l->rooms))
            return false;
    }
    return are_quiet(control.orphans);
}

static struct lc_hang *add_report(struct lc_room *room, enum lc_hang_kind kind)
{
    struct lc_progress *progress = atomic_load(&room->progress);
    struct lc_hang *hang;

    if (!progress || control.n_hangs >= LC_HANGS_MAX)
        return NULL;
    hang = calloc(1, sizeof(*hang));
    if (!hang)
        return NULL;
    hang->kind = kind;
    hang->id = lc_room_id(room);
    hang->rank = room->mine.rank;
    hang->nranks = room->nranks;
    lc_progress_read(progress, &hang->mine);
    hang->age_ms = age_ms(hang->mine.at_ns);
    hang->process_quiet = process_is_quiet();
    hang->next = control.hangs;
    control.hangs = hang;
    control.n_hangs++;
    return hang;
}

int lc_hang_found(struct lc_room *room, const struct lc_frame *head, const unsigned char *body)
{
    struct lc_progress *progress = atomic_load(&room->progress);
    struct lc_finding finding;
    struct lc_hang *hang;

    memcpy(&finding, body, sizeof(finding));
    if (finding.n_listed > LC_MISSING_MAX ||
        head->length != sizeof(finding) + finding.n_listed * sizeof(struct lc_missing))
        return -EPROTO;
    if (!progress)
        return 0;
    room->watch.calls = calls_of(progress);
    room->watch.said_ns = lc_now_ns();
    room->watch.reported = true;
    hang = add_report(room, LC_HANG_FOUND);
    if (!hang)
        return 0;
    hang->finding = finding;
    memcpy(hang->missing, body + sizeof(finding), finding.n_listed * sizeof(struct lc_missing));
    room->watch.blamed = lc_hang_blames(hang);
    return 0;
}

/* ---- every turn of the control thread ---- */

/* Stands still for long, as far as this rank can see: the arbiter asks the others. */
static void look_at(struct lc_room *room, struct lc_progress *progress, int64_t now)
{
    struct lc_watch *watch = &room->watch;
    uint64_t calls = calls_of(progress);
    int64_t at = LC_RELAXED(progress->at_ns);
    struct lc_hang *hang;

    if (calls != watch->calls) {
        if (watch->blamed)
            (void)add_report(room, LC_HANG_OVER);
        *watch = (struct lc_watch){ .foreign = watch->foreign, .calls = calls };
    }
    if (watch->reported || !at || now - at < rules.timeout_ns || room->nranks < 2)
        return;
    if (!watch->said_ns && can_speak(room)) {
        watch->said_ns = now;
        say_state(room, progress, LC_ROUND_STALLED);
    } else if (!room->link || now - watch->said_ns > LC_FINDING_MS * INT64_C(1000000)) {
        watch->reported = true;
        hang = add_report(room, LC_HANG_ALONE);
        if (hang)
            hang->arbiter_lost = watch->blamed = !room->link && atomic_load(&room->error) != 0;
    }
}

static void look_at_all(struct lc_room *rooms, int64_t now)
{
    for (struct lc_room *r = rooms; r; r = r->next) {
        struct lc_progress *progress = atomic_load(&r->progress);
        bool ended_here = atomic_load(&r->abort_word) && !atomic_load(&r->error);

        if (progress && !ended_here)
            look_at(r, progress, now);
    }
}

void lc_hang_look(void)
{
    int64_t now = lc_now_ns();

    if (!rules.timeout_ns)
        return;
    for (struct link *l = control.links; l; l = l->next)
        look_at_all(l->rooms, now);
    look_at_all(control.orphans, now);
}

/* ---- what is written ---- */

void lc_hang_write(struct lc_hang *newest)
{
    struct lc_hang *list = NULL;

    while (newest) { /* oldest first */
        struct lc_hang *next = newest->next;

        newest->next = list;
        list = newest;
        newest = next;
    }
    while (list) {
        struct lc_hang *next = list->next;

        rules.report(list);
        free(list);
        list = next;
    }
}
