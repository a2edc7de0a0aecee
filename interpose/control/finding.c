/* SPDX-License-Identifier: Apache-2.0
 *
 * The arbiter's part of the watchdog: asks the ranks of a room how far they are and says who has not arrived. */
#include "interpose/control/control_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* How one rank stands when a round ends. */
struct standing {
    enum lc_presence presence;
    bool knows; /* `collectives` is known */
    uint64_t collectives;
    uint32_t pid;
};

static struct standing standing_of(const struct hosted *hosted, uint32_t rank)
{
    const struct reply *reply = &hosted->replies[rank];
    const struct fate *fate = &hosted->fates[rank];
    const struct seat *seat = hosted->seats[rank];

    if (seat && reply->is_here)
        return (struct standing){ LC_HERE, true, reply->state.collectives, seat->record.pid };
    if (seat && reply->asked)
        return (struct standing){ .presence = LC_SILENT, .pid = seat->record.pid };
    if (seat || fate->presence == LC_HERE)
        return (struct standing){ .presence = LC_ABSENT };
    return (struct standing){ (enum lc_presence)fate->presence, fate->knows, fate->collectives,
                              fate->pid };
}

static bool is_missing(const struct standing *standing, uint64_t top)
{
    switch (standing->presence) {
    case LC_HERE: return standing->collectives < top;
    case LC_LEFT: return standing->knows && standing->collectives < top;
    case LC_ABSENT: return false;
    default: return true;
    }
}

/* The note of collective `seq` in a reply, or NULL. */
static const struct lc_note *note_of(const struct reply *reply, uint64_t seq)
{
    for (uint32_t i = 0; reply->is_here && i < reply->state.n; i++) {
        if (reply->recent[i].seq == seq)
            return &reply->recent[i];
    }
    return NULL;
}

static void find_missing(const struct hosted *hosted, struct lc_finding *out,
                         struct lc_missing *missing)
{
    out->at = UINT64_MAX;
    for (uint32_t r = 0; r < hosted->nranks; r++) {
        struct standing standing = standing_of(hosted, r);

        out->n_absent += standing.presence == LC_ABSENT;
        if (!is_missing(&standing, out->top))
            continue;
        if (standing.knows && standing.collectives + 1 < out->at)
            out->at = standing.collectives + 1;
        if (out->n_missing++ < LC_MISSING_MAX)
            missing[out->n_listed++] = (struct lc_missing){
                .rank = r,
                .presence = standing.presence,
                .pid = standing.pid,
                .collectives = standing.collectives,
                .age_ms = hosted->replies[r].state.age_ms
            };
    }
    if (out->at == UINT64_MAX)
        out->at = out->top;
    for (uint32_t r = 0; r < hosted->nranks; r++) {
        const struct lc_note *note = note_of(&hosted->replies[r], out->at);

        if (!note)
            continue;
        out->awaited = *note;
        break;
    }
}

/* The first collective, among those remembered, that ranks called differently from one that is foremost. */
static void find_differences(const struct hosted *hosted, struct lc_finding *out)
{
    uint32_t first = 0;

    while (first < hosted->nranks && !(hosted->replies[first].is_here &&
                                       hosted->replies[first].state.collectives == out->top))
        first++;
    if (first == hosted->nranks)
        return;
    for (uint32_t i = 0; !out->n_differ && i < hosted->replies[first].state.n; i++) {
        const struct lc_note *mine = &hosted->replies[first].recent[i];

        for (uint32_t r = 0; r < hosted->nranks; r++) {
            const struct lc_note *other = note_of(&hosted->replies[r], mine->seq);

            if (!other || lc_note_same(mine, other) || out->n_differ++)
                continue;
            out->rank_a = first;
            out->rank_b = r;
            out->a = *mine;
            out->b = *other;
        }
    }
}

/* FNV-1a (Fowler, Noll, Vo) over what a finding depends on. */
static uint64_t digest_of(const struct hosted *hosted)
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (uint32_t r = 0; r < hosted->nranks; r++) {
        struct standing standing = standing_of(hosted, r);
        uint64_t words[] = { (uint64_t)standing.presence, standing.collectives,
                             hosted->replies[r].state.messages };

        for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++)
            hash = (hash ^ words[i]) * 0x100000001b3u;
    }
    return hash ? hash : 1;
}

static void end_round(struct hosted *hosted)
{
    struct lc_missing missing[LC_MISSING_MAX];
    struct lc_finding finding = { 0 };
    uint64_t digest = digest_of(hosted);

    for (uint32_t r = 0; r < hosted->nranks; r++) {
        struct standing standing = standing_of(hosted, r);

        if (standing.knows && standing.collectives > finding.top)
            finding.top = standing.collectives;
    }
    find_missing(hosted, &finding, missing);
    find_differences(hosted, &finding);
    for (uint32_t r = 0; digest != hosted->told && r < hosted->nranks; r++) {
        struct seat *seat = hosted->seats[r];

        if (seat)
            (void)lc_conn_send(&seat->client->conn, LC_FRAME_FINDING, seat->id, &finding,
                               sizeof(finding), missing,
                               finding.n_listed * sizeof(struct lc_missing));
    }
    hosted->told = digest;
    free(hosted->replies);
    hosted->replies = NULL;
}

static void begin_round(struct hosted *hosted)
{
    struct lc_number number = { 0 };

    hosted->replies = calloc(hosted->nranks, sizeof(*hosted->replies));
    if (!hosted->replies)
        return; /* the members report what they know alone */
    hosted->round++;
    if (hosted->round == LC_ROUND_STALLED || hosted->round == LC_ROUND_LAST)
        hosted->round = 1;
    number.value = hosted->round;
    hosted->waiting = 0;
    hosted->until = lc_deadline_in_ms(LC_ROUND_MS);
    for (uint32_t r = 0; r < hosted->nranks; r++) {
        struct seat *seat = hosted->seats[r];

        if (!seat)
            continue;
        hosted->replies[r].asked = true;
        hosted->waiting++;
        (void)lc_conn_send(&seat->client->conn, LC_FRAME_QUERY, seat->id, &number, sizeof(number),
                           NULL, 0);
    }
}

static void count_reply(struct hosted *hosted)
{
    if (--hosted->waiting == 0)
        end_round(hosted);
}

static void take_reply(struct seat *seat, const struct lc_state *state, const unsigned char *notes)
{
    struct hosted *hosted = seat->hosted;
    struct reply *reply;

    if (!hosted->replies || state->round != hosted->round)
        return; /* too late */
    reply = &hosted->replies[seat->record.rank];
    if (!reply->asked || reply->is_here)
        return;
    reply->is_here = true;
    reply->state = *state;
    memcpy(reply->recent, notes, state->n * sizeof(struct lc_note));
    count_reply(hosted);
}

int lc_finding_take(struct seat *seat, const struct lc_frame *head, const unsigned char *body)
{
    struct lc_state state;

    memcpy(&state, body, sizeof(state));
    if (state.n > LC_RECENT || head->length != sizeof(state) + state.n * sizeof(struct lc_note))
        return -EPROTO;
    if (state.round == LC_ROUND_LAST) {
        seat->knows = true;
        seat->collectives = state.collectives;
    } else if (state.round != LC_ROUND_STALLED) {
        take_reply(seat, &state, body + sizeof(state));
    } else if (!seat->hosted->replies && lc_deadline_passed(seat->stalled_until)) {
        seat->stalled_until = lc_deadline_in_ms(LC_STALL_MS);
        begin_round(seat->hosted);
    }
    return 0;
}

void lc_finding_left(struct hosted *hosted, const struct seat *seat, int reason)
{
    uint32_t rank = seat->record.rank;
    enum lc_presence how = reason == 0 ? LC_LEFT : reason == -ECANCELED ? LC_GAVE_UP : LC_LOST;

    hosted->fates[rank] = (struct fate){ seat->record.pid, (uint8_t)how, seat->knows,
                                         seat->collectives };
    if (hosted->replies && hosted->replies[rank].asked && !hosted->replies[rank].is_here) {
        hosted->replies[rank].asked = false;
        count_reply(hosted);
    }
}

void lc_finding_expire(void)
{
    for (struct hosted *h = control.hosted; h; h = h->next) {
        if (h->replies && lc_deadline_passed(h->until))
            end_round(h);
    }
}
