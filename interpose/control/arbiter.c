/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/control/control_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define NAMED_MAX 8 /* ranks; of five digits they fit NAMES */

/* ---- rooms ---- */

static struct hosted *find_hosted(const unsigned char key[LC_KEY_BYTES])
{
    for (struct hosted *h = control.hosted; h; h = h->next) {
        if (memcmp(h->key, key, LC_KEY_BYTES) == 0)
            return h;
    }
    return NULL;
}

/* Who comes late says the token of a room that the others have left, and means other rooms, too: it is one of us. */
static void remember_token(const struct hosted *hosted)
{
    memcpy(control.past[control.n_past++ % LC_PAST_MAX], hosted->key, LC_KEY_BYTES);
}

static void free_hosted(struct hosted *hosted)
{
    struct hosted **at = &control.hosted;

    while (*at != hosted)
        at = &(*at)->next;
    *at = hosted->next;
    if (hosted->is_root)
        remember_token(hosted);
    if (hosted->is_root && hosted->nranks == 0)
        control.n_idle_roots--;
    lc_words_unmap(hosted->words);
    if (hosted->words_fd >= 0)
        close(hosted->words_fd);
    free(hosted->seats);
    free(hosted->fates);
    free(hosted->replies);
    free(hosted);
}

static struct hosted *new_hosted(const unsigned char key[LC_KEY_BYTES], bool is_root)
{
    struct hosted *hosted = calloc(1, sizeof(*hosted));

    if (!hosted)
        return NULL;
    memcpy(hosted->key, key, LC_KEY_BYTES);
    hosted->is_root = is_root;
    hosted->words_fd = -1;
    hosted->next = control.hosted;
    control.hosted = hosted;
    if (is_root)
        control.n_idle_roots++;
    return hosted;
}

int lc_arbiter_open_root(const unsigned char key[LC_KEY_BYTES])
{
    if (control.n_idle_roots >= LC_ROOMS_IDLE) {
        struct hosted *oldest = NULL;

        for (struct hosted *h = control.hosted; h; h = h->next) { /* newest first */
            if (h->is_root && h->nranks == 0)
                oldest = h;
        }
        if (oldest)
            free_hosted(oldest);
    }
    return new_hosted(key, true) ? 0 : -ENOMEM;
}

/* The first member says how many there are. -ENOMEM stands for descriptors, too. */
static int furnish(struct hosted *hosted, uint32_t nranks)
{
    int err;

    hosted->seats = calloc(nranks, sizeof(struct seat *));
    hosted->fates = calloc(nranks, sizeof(*hosted->fates));
    err = hosted->seats && hosted->fates
              ? lc_words_create(nranks, &hosted->words, &hosted->words_fd)
              : -ENOMEM;
    if (err) {
        free(hosted->seats);
        free(hosted->fates);
        hosted->seats = NULL;
        hosted->fates = NULL;
        return -ENOMEM;
    }
    hosted->nranks = nranks;
    hosted->missing_at = lc_deadline_in_ms(LC_MISSING_MS);
    if (hosted->is_root)
        control.n_idle_roots--;
    return 0;
}

/* ---- what is told to members; a member that cannot take it is dropped by its own connection's next turn ---- */

static void tell(struct seat *seat, enum lc_frame_type type, const void *body, size_t length)
{
    (void)lc_conn_send(&seat->client->conn, type, seat->id, body, length, NULL, 0);
}

static void tell_all(struct hosted *hosted, enum lc_frame_type type, const void *body,
                     size_t length)
{
    for (uint32_t r = 0; r < hosted->nranks; r++) {
        if (hosted->seats[r])
            tell(hosted->seats[r], type, body, length);
    }
}

static bool same_host(const struct seat *a, const struct seat *b)
{
    return memcmp(a->record.host, b->record.host, sizeof(a->record.host)) == 0;
}

/* A rank of it is of this process. It may have released the room a moment ago: then it has left in order. */
static bool has_member_here(const struct hosted *hosted)
{
    for (struct link *l = control.links; l; l = l->next) {
        for (struct lc_room *r = l->rooms; r; r = r->next) {
            if (memcmp(r->key, hosted->key, LC_KEY_BYTES) == 0)
                return true;
        }
    }
    return false;
}

static void tell_complete(struct hosted *hosted)
{
    struct lc_complete complete = { UINT64_MAX, has_member_here(hosted), 0 };

    for (uint32_t r = 0; r < hosted->nranks; r++)
        complete.capabilities &= hosted->seats[r]->record.capabilities;
    for (uint32_t to = 0; to < hosted->nranks; to++) {
        for (uint32_t of = 0; of < hosted->nranks; of++) {
            if (same_host(hosted->seats[to], hosted->seats[of]))
                tell(hosted->seats[to], LC_FRAME_RECORD, &hosted->seats[of]->record,
                     sizeof(struct lc_record));
        }
    }
    tell_all(hosted, LC_FRAME_COMPLETE, &complete, sizeof(complete));
    hosted->complete = true;
    close(hosted->words_fd); /* nobody is left to get it, and descriptors are the program's */
    hosted->words_fd = -1;
}

/* ---- what the user is told: here, where all ranks of a communicator are known, once per process ---- */

#define NAMES 80

/* The ranks for which `named` is true. */
static void name_ranks(const struct hosted *hosted,
                       bool (*named)(const struct hosted *hosted, uint32_t rank), char out[NAMES])
{
    unsigned count = 0;
    size_t at = 0;

    for (uint32_t r = 0; r < hosted->nranks && count <= NAMED_MAX; r++) {
        if (!named(hosted, r))
            continue;
        if (count == NAMED_MAX)
            (void)snprintf(out + at, NAMES - at, " ...");
        else
            at += (size_t)snprintf(out + at, NAMES - at, "%s%u", count ? ", " : " ", r);
        count++;
    }
}

static bool is_missing(const struct hosted *hosted, uint32_t rank)
{
    return !hosted->seats[rank];
}

/* Ranks without the library never come; only their absence tells. */
static void say_missing(const struct hosted *hosted)
{
    char names[NAMES];

    control.said_missing = true;
    name_ranks(hosted, is_missing, names);
    lc_say(
        LC_LOG_WARN,
        "%u of the %u ranks of a communicator do not run loongcomm, or have it switched off: all of "
        "its calls stay with NCCL; rank%s",
        hosted->nranks - hosted->joined, hosted->nranks, names);
}

static const struct seat *anyone(const struct hosted *hosted)
{
    for (uint32_t r = 0; r < hosted->nranks; r++) {
        if (hosted->seats[r])
            return hosted->seats[r];
    }
    return NULL;
}

static bool is_odd(const struct hosted *hosted, uint32_t rank)
{
    const struct seat *seat = hosted->seats[rank], *first = anyone(hosted);

    return seat && (seat->record.version != first->record.version ||
                    seat->record.settings_hash != first->record.settings_hash);
}

/* Not before all are here: the first to differ may be the one that is as it should be. */
static void say_refused(struct hosted *hosted)
{
    const struct seat *first = anyone(hosted);
    char names[NAMES];

    if (!hosted->refusal.reason || hosted->refusal.reason == -ENOMEM || control.said_refused ||
        !first)
        return;
    control.said_refused = true;
    name_ranks(hosted, is_odd, names);
    lc_say(LC_LOG_WARN,
           "not all %u ranks of a communicator have the %s of rank %u: all of its calls stay with "
           "NCCL; rank%s",
           hosted->nranks,
           hosted->refusal.reason == -EINVAL ? "LOONGCOMM_ settings" : "version of loongcomm",
           first->record.rank, names);
}

/* ---- members come and go ---- */

static struct seat *find_seat(struct client *client, uint32_t id)
{
    for (struct seat *s = client->seats; s; s = s->next) {
        if (s->id == id)
            return s;
    }
    return NULL;
}

/* Nobody has to ask any more what such a rank has a part in. False: it has voted. */
static bool withhold(struct hosted *hosted, uint32_t rank)
{
    const struct lc_cause cause = { rank, 0 };

    if (!lc_words_withhold(hosted->words, rank))
        return false;
    if (hosted->complete)
        tell_all(hosted, LC_FRAME_WITHHELD, &cause, sizeof(cause));
    return true;
}

/* A seat is given back, in order (reason 0) or not; the last one frees the room. One that has not voted, and now never
 * will, leaves nobody waiting for anything of ours: what becomes of the communicator is NCCL's matter then. */
static void leave(struct seat *seat, int reason)
{
    struct hosted *hosted = seat->hosted;
    struct seat **at = &seat->client->seats;

    while (*at != seat)
        at = &(*at)->next;
    *at = seat->next;
    seat->client->n_seats--;
    say_refused(hosted);
    hosted->seats[seat->record.rank] = NULL;
    hosted->left++;
    if (reason && !withhold(hosted, seat->record.rank)) {
        struct lc_cause cause = { seat->record.rank, reason };

        tell_all(hosted, LC_FRAME_NOTICE, &cause, sizeof(cause));
    }
    lc_finding_left(hosted, seat, reason);
    free(seat);
    if (hosted->left == hosted->joined)
        free_hosted(hosted);
}

/* Every record is compared with one that is there already, so the first difference is named. */
static void welcome_member(struct hosted *hosted, struct seat *seat)
{
    const struct seat *other = anyone(hosted);
    bool was_refused = hosted->refusal.reason != 0;

    if (other && !was_refused && other->record.version != seat->record.version)
        hosted->refusal = (struct lc_cause){ seat->record.rank, -EPROTONOSUPPORT };
    else if (other && !was_refused && other->record.settings_hash != seat->record.settings_hash)
        hosted->refusal = (struct lc_cause){ seat->record.rank, -EINVAL };
    hosted->seats[seat->record.rank] = seat;
    hosted->joined++;
    if (!seat->client->conn.is_unix ||
        lc_conn_send_fd(&seat->client->conn, LC_FRAME_WORDS, seat->id, hosted->words_fd) != 0)
        tell(seat, LC_FRAME_SEAT, NULL, 0);
    if (was_refused)
        tell(seat, LC_FRAME_REFUSED, &hosted->refusal, sizeof(hosted->refusal));
    else if (hosted->refusal.reason)
        tell_all(hosted, LC_FRAME_REFUSED, &hosted->refusal, sizeof(hosted->refusal));
    if (hosted->joined == hosted->nranks)
        say_refused(hosted);
    if (hosted->refusal.reason)
        return;
    if (hosted->joined == hosted->nranks && hosted->left == 0)
        tell_complete(hosted);
}

/* The other rooms of the client must not suffer, so it gets no seat, and what it says of this one is passed over.
 * -EEXIST: an id used twice, two of one rank, ranks that differ about the size, which is not a communicator. -ENOMEM: no
 * seat, memory or descriptor is left here. */
static int refuse(struct client *client, uint32_t id, uint32_t rank, int reason)
{
    const struct lc_cause cause = { rank, reason };

    (void)lc_conn_send(&client->conn, LC_FRAME_REFUSED, id, &cause, sizeof(cause), NULL, 0);
    return 0;
}

/* Nobody is missing for reasons of its own then. A room that has members already tells them, too, that it will never be
 * complete; one that has none (NULL, or of nobody yet) is gone. */
static int refuse_for_want(struct hosted *hosted, struct client *client, uint32_t id, uint32_t rank)
{
    if (!control.said_want)
        lc_say(LC_LOG_WARN,
               "no descriptor (ulimit -n), memory or seat for what the ranks of another "
               "communicator agree through: all of its calls stay with NCCL");
    control.said_want = true;
    if (hosted && hosted->joined == 0 && !(hosted->is_root && hosted->nranks == 0)) {
        free_hosted(hosted);
    } else if (hosted && hosted->joined > 0 && !hosted->complete && !hosted->refusal.reason) {
        hosted->refusal = (struct lc_cause){ rank, -ENOMEM };
        tell_all(hosted, LC_FRAME_REFUSED, &hosted->refusal, sizeof(hosted->refusal));
    }
    return refuse(client, id, rank, -ENOMEM);
}

static int join(struct client *client, uint32_t id, const struct lc_join *join)
{
    uint32_t nranks = join->nranks, rank = join->record.rank;
    struct hosted *hosted = find_hosted(join->key);
    struct seat *seat;

    if (nranks == 0 || nranks > LC_RANKS_MAX || rank >= nranks || id < client->ids ||
        join->record.host[sizeof(join->record.host) - 1] != '\0')
        return -EPROTO;
    client->ids = id + 1;
    if (hosted && hosted->nranks &&
        (hosted->nranks != nranks || hosted->seats[rank] || hosted->complete))
        return refuse(client, id, rank, -EEXIST);
    if (client->n_seats >= LC_SEATS_MAX)
        return refuse_for_want(hosted, client, id, rank);
    if (!hosted)
        hosted = new_hosted(join->key, false);
    if (!hosted || (hosted->nranks == 0 && furnish(hosted, nranks) != 0))
        return refuse_for_want(hosted, client, id, rank);
    seat = calloc(1, sizeof(*seat));
    if (!seat)
        return refuse_for_want(hosted, client, id, rank);
    *seat = (struct seat){ .next = client->seats,
                           .client = client,
                           .hosted = hosted,
                           .id = id,
                           .record = join->record };
    client->seats = seat;
    client->n_seats++;
    welcome_member(hosted, seat);
    return 0;
}

static int post(struct seat *seat, const struct lc_frame *head, const unsigned char *body)
{
    struct hosted *hosted = seat->hosted;
    struct lc_blob_head blob;

    memcpy(&blob, body, sizeof(blob));
    if (blob.rank != seat->record.rank || ++seat->blobs > LC_BLOBS_MAX)
        return -EPROTO;
    for (uint32_t r = 0; r < hosted->nranks; r++) {
        struct seat *to = hosted->seats[r];

        if (to && to != seat && same_host(to, seat))
            (void)lc_conn_send(&to->client->conn, LC_FRAME_BLOB, to->id, body, head->length, NULL,
                               0);
    }
    return 0;
}

static int answer(struct seat *seat, const unsigned char *body)
{
    uint32_t rank = seat->record.rank;
    struct lc_number number;
    struct lc_ask ask;

    memcpy(&ask, body, sizeof(ask));
    if (!lc_is_epoch(ask.index) || (ask.is_pair && rank != (ask.by_src ? ask.src : ask.dst)))
        return -EPROTO;
    if (ask.is_pair)
        number.value = lc_words_decide_pair(seat->hosted->words, ask.src, ask.dst, ask.by_src,
                                            ask.index);
    else
        number.value = lc_words_decide(seat->hosted->words, ask.index);
    return lc_conn_send(&seat->client->conn, LC_FRAME_ANSWER, seat->id, &number, sizeof(number),
                        NULL, 0);
}

/* Constant time over the token, so that a stranger learns nothing from the clock. */
static bool same_token(const unsigned char a[LC_KEY_BYTES], const unsigned char b[LC_KEY_BYTES])
{
    unsigned char differ = 0;

    for (int i = 0; i < LC_KEY_BYTES; i++)
        differ |= (unsigned char)(a[i] ^ b[i]);
    return !differ;
}

static bool token_is_known(const unsigned char token[LC_KEY_BYTES])
{
    uint32_t n_past = control.n_past < LC_PAST_MAX ? control.n_past : LC_PAST_MAX;
    bool known = false;

    for (struct hosted *h = control.hosted; h; h = h->next)
        known |= same_token(h->key, token) && h->is_root;
    for (uint32_t i = 0; i < n_past; i++)
        known |= same_token(control.past[i], token);
    return known;
}

static int hello(struct client *client, const unsigned char *body)
{
    struct lc_hello said;

    memcpy(&said, body, sizeof(said));
    if (!token_is_known(said.token))
        return -EACCES;
    client->welcome = true;
    control.n_strangers--;
    return 0;
}

static int handle_seated(struct client *client, const struct lc_frame *head,
                         const unsigned char *body)
{
    struct seat *seat = find_seat(client, head->room);
    struct lc_number number;
    struct lc_cause cause;

    if (!seat) /* of one that was given back or refused there may be more to come */
        return head->room < client->ids ? 0 : -EPROTO;
    switch (head->type) {
    case LC_FRAME_VOTE:
        memcpy(&number, body, sizeof(number));
        return lc_words_vote(seat->hosted->words, seat->record.rank, number.value) == -EINVAL
                   ? -EPROTO
                   : 0;
    case LC_FRAME_WITHHOLD: (void)withhold(seat->hosted, seat->record.rank); return 0;
    case LC_FRAME_ASK: return answer(seat, body);
    case LC_FRAME_POST: return post(seat, head, body);
    case LC_FRAME_ABORT:
        memcpy(&cause, body, sizeof(cause));
        leave(seat, -ECANCELED);
        return 0;
    case LC_FRAME_BYE: leave(seat, 0); return 0;
    case LC_FRAME_STATE: return lc_finding_take(seat, head, body);
    default: return -EPROTO;
    }
}

static int handle(struct client *client, const struct lc_frame *head, const unsigned char *body)
{
    struct lc_join said;

    if (!client->welcome)
        return head->type == LC_FRAME_HELLO ? hello(client, body) : -EACCES;
    if (head->type != LC_FRAME_JOIN)
        return handle_seated(client, head, body);
    memcpy(&said, body, sizeof(said));
    return join(client, head->room, &said);
}

/* Bytes that nobody has read would turn the end into a reset, by which a member knows a network that came back. */
static void drain(struct lc_conn *conn)
{
    char sink[4096];

    for (int i = 0; i < 1024 && recv(conn->fd, sink, sizeof(sink), MSG_DONTWAIT) > 0; i++)
        continue;
}

void lc_arbiter_drop(struct client *client, int reason)
{
    struct client **at = &control.clients;

    while (*at != client)
        at = &(*at)->next;
    *at = client->next;
    control.n_clients--;
    if (!client->welcome)
        control.n_strangers--;
    while (client->seats)
        leave(client->seats, reason == -ETIMEDOUT ? -ETIMEDOUT : -ECONNRESET);
    if (reason != -ETIMEDOUT)
        drain(&client->conn);
    lc_conn_close(&client->conn);
    free(client);
}

/* A stranger may fill no more than one HELLO; a known client one frame of any size and a read ahead. */
static int serve(struct client *client)
{
    size_t limit = client->welcome ? 2 * LC_BLOB_MAX
                                   : sizeof(struct lc_frame) + sizeof(struct lc_hello);
    struct lc_frame head = { .type = LC_FRAME_HELLO };
    const unsigned char *body;
    int err = lc_conn_read(&client->conn, limit);

    if (err)
        return err == -EAGAIN ? 0 : err;
    while ((err = lc_conn_next(&client->conn, &head, &body)) > 0) {
        err = handle(client, &head, body);
        if (err)
            return err;
    }
    return !err && !client->welcome && head.type != LC_FRAME_HELLO ? -EACCES : err;
}

void lc_arbiter_serve(struct client *client, short events)
{
    int err = 0;

    if (events & (POLLIN | POLLHUP | POLLERR))
        err = serve(client);
    if (!err)
        err = lc_conn_flush(&client->conn);
    if (err) {
        lc_say(LC_LOG_DEBUG, "control connection dropped: %s", strerror(-err));
        lc_arbiter_drop(client, err);
    }
}

static struct client *oldest_stranger(void)
{
    struct client *oldest = NULL;

    for (struct client *c = control.clients; c; c = c->next) { /* newest first */
        if (!c->welcome)
            oldest = c;
    }
    return oldest;
}

/* All ranks of a large job come in the same moment: nobody gives way before he had the time to say his token. */
bool lc_arbiter_has_room(void)
{
    return control.n_strangers < LC_STRANGERS ||
           lc_deadline_left_ms(oldest_stranger()->hello_until) < LC_HELLO_MS - LC_GRACE_MS;
}

void lc_arbiter_accept(int fd, bool is_unix)
{
    struct client *client;

    if (control.n_strangers >= LC_STRANGERS)
        lc_arbiter_drop(oldest_stranger(), -ECONNRESET);
    if (control.n_clients >= control.max_clients) {
        if (!control.said_full)
            lc_say(
                LC_LOG_WARN,
                "more than %u processes share a communicator's agreement, with the limit on open files as it is (ulimit -n): calls of some communicators stay with NCCL",
                control.max_clients);
        control.said_full = true;
        close(fd);
        return;
    }
    client = calloc(1, sizeof(*client));
    if (!client) {
        close(fd);
        return;
    }
    lc_conn_init(&client->conn, fd, is_unix);
    client->hello_until = lc_deadline_in_ms(LC_HELLO_MS);
    client->next = control.clients;
    control.clients = client;
    control.n_clients++;
    control.n_strangers++;
}

/* A room that somebody has left is about to end, and who is seated does not tell any more who came. */
static void look_for_missing(struct hosted *hosted)
{
    if (!hosted->nranks || hosted->joined == hosted->nranks || hosted->left ||
        !lc_deadline_passed(hosted->missing_at))
        return;
    if (hosted->refusal.reason)
        say_refused(hosted);
    else if (!control.said_missing && !control.said_want)
        say_missing(hosted);
}

void lc_arbiter_expire(void)
{
    struct client *next;

    for (struct hosted *h = control.hosted; h; h = h->next)
        look_for_missing(h);
    for (struct client *c = control.clients; c; c = next) {
        next = c->next;
        if (!c->welcome && lc_deadline_passed(c->hello_until))
            lc_arbiter_drop(c, -ECONNRESET);
    }
}

void lc_arbiter_close_all(void)
{
    for (struct hosted *h = control.hosted; h; h = h->next)
        tell_all(h, LC_FRAME_CLOSING, NULL, 0);
}
