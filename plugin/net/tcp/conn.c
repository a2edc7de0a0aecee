/* SPDX-License-Identifier: Apache-2.0
 *
 * A connection: messages, pieces, what the other side is told, and failing. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONG   65536  /* longer messages are the pool's ... */
#define MIDDLE 16384  /* ... and than this, where others are under way */
#define SHARE  65536  /* no piece is made shorter than this to share it ... */
#define HALF   131072 /* ... than this, where NCCL's thread carries some, too */

struct conn *conn_new(bool sends, int dev, int n_lanes, uint32_t piece)
{
    struct conn *conn = calloc(1, sizeof(*conn) + (size_t)n_lanes * sizeof(conn->lanes[0]));

    if (!conn)
        return NULL;
    if (sends) {
        conn->redo = calloc((size_t)n_lanes * RING, sizeof(*conn->redo));
        conn->early = calloc(LC_TCP_EARLY, sizeof(*conn->early));
        if (!conn->redo || !conn->early) {
            free(conn->redo);
            free(conn->early);
            free(conn);
            return NULL;
        }
    }
    atomic_init(&conn->refs, 1);
    conn->sends = sends;
    conn->dev = dev;
    conn->n_lanes = n_lanes;
    conn->piece = piece;
    conn->down_since = lc_now_ns();
    atomic_init(&conn->attendance, ALONE);
    lock_init(&conn->lock);
    for (int i = 0; i < LC_TCP_WINDOW; i++)
        conn->ring[i].conn = conn;
    for (int i = 0; i < n_lanes; i++)
        lane_init(&conn->lanes[i], conn, i);
    return conn;
}

void conn_ref(struct conn *conn)
{
    atomic_fetch_add(&conn->refs, 1);
}

void conn_unref(struct conn *conn)
{
    if (atomic_fetch_sub(&conn->refs, 1) != 1)
        return;
    count_conn(conn);
    for (int i = 0; i < conn->n_lanes; i++)
        pthread_mutex_destroy(&conn->lanes[i].io);
    pthread_mutex_destroy(&conn->lock);
    free(conn->redo);
    free(conn->early);
    for (int i = 0; i < LC_TCP_KEPT; i++)
        free(conn->kept[i]);
    free(conn);
}

/* ---- failing ---- */

/* All that it has used. */
static const char *device_names(const struct conn *conn, char text[DEVICES_TEXT])
{
    size_t n = 0;

    text[0] = '\0';
    for (int i = 0; i < conn->n_lanes && engine.devices; i++) {
        bool said = false;

        for (int j = 0; j < i && !said; j++)
            said = conn->lanes[j].dev == conn->lanes[i].dev;
        if (!said && n < DEVICES_TEXT)
            n += (size_t)snprintf(text + n, DEVICES_TEXT - n, "%s%s", n ? ", " : "",
                                  rail_name(&conn->lanes[i]));
    }
    return text;
}

void conn_fail_locked(struct conn *conn, int code, const char *text)
{
    char devices[DEVICES_TEXT];

    if (conn->error || conn->closing)
        return;
    (void)device_names(conn, devices);
    conn->error = code;
    atomic_store(&conn->troubled, true);
    (void)snprintf(conn->cause, sizeof(conn->cause), "%s", text);
    /* At the end of a job processes go in any order, and nobody misses them. */
    if (atomic_load(&conn->leaving))
        engine_wake();
    if (code == -ECANCELED)
        lc_info("%s %s over %s is given up: %s", conn->sends ? "sending to" : "receiving from",
                conn->peer_text, devices, text);
    else if (conn->acked < conn->posted)
        lc_warn("%s %s over %s failed: %s", conn->sends ? "sending to" : "receiving from",
                conn->peer_text, devices, text);
    else
        lc_info("%s %s over %s, where nothing waits, failed: %s",
                conn->sends ? "sending to" : "receiving from", conn->peer_text, devices, text);
}

void conn_fail(struct conn *conn, int code, const char *fmt, ...)
{
    char text[CAUSE];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    conn_lock(conn);
    conn_fail_locked(conn, code, text);
    conn_unlock(conn);
    conn_wake_lanes(conn, NULL);
}

/* ---- waking ---- */

bool conn_wake_lane(struct lane *lane)
{
    if (!lane->up || !lane->idle || lane->index == 0)
        return false;
    lane->idle = false;
    atomic_fetch_add(&lane->conn->changes, 1); /* it looks, too */
    pool_ask(lane);
    return true;
}

/* For what any lane may carry: the first that can takes it, the others find nothing. */
void conn_wake_lanes(struct conn *conn, const struct lane *except)
{
    bool woken = false;

    conn_lock(conn);
    for (int i = 1; i < conn->n_lanes; i++) {
        if (&conn->lanes[i] != except)
            woken |= conn_wake_lane(&conn->lanes[i]);
    }
    conn_unlock(conn);
    if (!woken && &conn->lanes[0] != except)
        lane_kick(&conn->lanes[0], 1);
}

/* May come before its receive. Both sides know the length of a piece. */
static bool is_short(const struct conn *conn, uint64_t size)
{
    return size <= LC_TCP_EARLY_MAX && size <= conn->piece;
}

/* Copying it on NCCL's thread costs that thread's other connections more than waking another. */
static bool is_long(uint64_t size)
{
    return size > LONG;
}

/* One that is alone is there sooner if nobody has to be woken for it; several, of one connection or of many, are copied at
 * once. What makes a message one for the pool is followed by spread, which wakes it. With conn->lock held. */
static bool is_for_pool(const struct conn *conn, const struct lc_net_request *r)
{
    return is_long(r->size) ||
           (r->size > MIDDLE && !r->lone && (!r->alone || conn->posted - conn->acked > 1));
}

bool conn_widen(struct conn *conn, uint64_t size)
{
    if (conn->wide || !conn->sends || size <= MIDDLE)
        return false;
    conn->wide = true;
    for (int i = 1; i < conn->n_lanes; i++)
        conn->lanes[i].next_dial = 0;
    return conn->n_lanes > 1;
}

/* Of lane 0. */
static bool is_sibling(const struct lane *lane)
{
    return lane->index > 0 && lane->up && lane->rail == lane->conn->lanes[0].rail;
}

/* Lane 0 has the pool's lanes beside it that take long messages for it, on the same rail: what a rail carries is not for it
 * to say. With conn->lock held. */
static bool has_sibling(const struct conn *conn)
{
    for (int i = 1; i < conn->n_lanes; i++) {
        if (is_sibling(&conn->lanes[i]))
            return true;
    }
    return false;
}

static bool is_relieved(const struct conn *conn)
{
    return engine.relieves && has_sibling(conn);
}

/* Without it a lane takes nothing until it is confirmed more. */
static bool has_room(const struct lane *lane)
{
    return lane->count - lane->told < RING;
}

/* Lane 0 takes no part of it, as long as it has siblings. With conn->lock held. */
static bool is_left(const struct conn *conn, const struct lc_net_request *r)
{
    return engine.relieves ? is_for_pool(conn, r) : r->handed;
}

bool conn_is_for_pool(const struct conn *conn)
{
    return !conn->n_redo && conn->cut < conn->posted &&
           is_left(conn, &conn->ring[conn->cut % LC_TCP_WINDOW]) && has_sibling(conn);
}

/* Where processors are few NCCL's thread takes what is too short to be shared. But where it has other connections to send on, a
 * thread that has nothing to do takes this message meanwhile. */
bool conn_hands_over(const struct conn *conn, uint64_t size, bool alone)
{
    if (engine.relieves || engine.parts == 1 || alone || !conn->sends || !is_long(size) ||
        size > HALF)
        return false;
    for (int i = 1; i < conn->n_lanes; i++) {
        const struct lane *lane = &conn->lanes[i];

        if (is_sibling(lane) && has_room(lane) && pool_doing(lane) != MOVES)
            return true;
    }
    return false;
}

/* Who it was left to may have lost its processor, and the caller waits. What is under way already stays where it is. */
void conn_take_back(struct lc_net_request *r)
{
    conn_lock(r->conn);
    r->handed = false;
    conn_unlock(r->conn);
}

/* With several rails a lane that was woken may have left the message before this one to lane 0, and sleep again. With one,
 * and its siblings asleep, there is nothing to take. */
static void leave_to_siblings(struct conn *conn)
{
    struct lane *next = NULL;

    for (int i = 1; i < conn->n_lanes && conn->n_rails > 1; i++) {
        struct lane *lane = &conn->lanes[i];

        if (!is_sibling(lane))
            continue;
        if (!lane->idle)
            return;
        if (!next && has_room(lane))
            next = lane;
    }
    if (next && rail_may_take(next))
        (void)conn_wake_lane(next);
}

/* Messages before this one may be sent as far as the receiver goes. With conn->lock held. */
static uint64_t sendable(const struct conn *conn)
{
    return conn->posted < conn->credit ? conn->posted : conn->credit;
}

/* Of the message that is next: where processors are few NCCL's thread carries its part. */
static uint64_t part_of_all(const struct conn *conn)
{
    uint64_t size = conn->cut < conn->posted ? conn->ring[conn->cut % LC_TCP_WINDOW].size : 0;
    uint64_t part = size / (uint64_t)engine.parts + LC_TCP_BLOCK - 1;

    part -= part % LC_TCP_BLOCK;
    if (part < HALF)
        part = HALF;
    return part < conn->piece ? part : conn->piece;
}

/* How long the next piece of a long message is: where threads have nothing to do, a little is shared by as many as can take
 * it, and what is left is shared again; much is cut as the setting says, for each piece costs. With conn->lock held. */
static uint64_t piece_length(const struct conn *conn)
{
    int idle = atomic_load_explicit(&engine.n_pool, memory_order_relaxed) -
               atomic_load_explicit(&engine.n_busy, memory_order_relaxed);
    int lanes = conn->n_up - is_relieved(conn);
    uint64_t limit = sendable(conn);
    uint64_t most = conn->piece;
    uint64_t bytes = 0;
    uint64_t share;

    if (!engine.relieves)
        return conn->n_up > 1 ? part_of_all(conn) : most;
    lanes = lanes > idle + 1 ? idle + 1 : lanes;
    /* Of what is mostly zeros there is little to share. */
    if (lanes <= 1 || most <= SHARE || atomic_load_explicit(&conn->sparse, memory_order_relaxed))
        return most;
    for (uint64_t seq = conn->cut; seq < limit && bytes < most * (uint64_t)lanes; seq++)
        bytes += conn->ring[seq % LC_TCP_WINDOW].size - conn->ring[seq % LC_TCP_WINDOW].moved;
    share = (bytes / (uint64_t)lanes + LC_TCP_BLOCK - 1) / LC_TCP_BLOCK * LC_TCP_BLOCK;
    return share > most ? most : share < SHARE ? SHARE : share;
}

/* What could be sent now and lane 0 will not take at once, as far as it matters for waking lanes. With conn->lock held. */
static uint64_t bytes_for_pool(const struct conn *conn)
{
    uint64_t limit = sendable(conn);
    uint64_t shared = (uint64_t)conn->n_redo * conn->piece;
    uint64_t left = 0;
    uint64_t most;
    bool siblings = has_sibling(conn);

    for (uint64_t seq = conn->cut;
         seq < limit && left + shared < (uint64_t)conn->piece * LC_TCP_LANES; seq++) {
        const struct lc_net_request *r = &conn->ring[seq % LC_TCP_WINDOW];

        *(siblings && is_left(conn, r) ? &left : &shared) += r->size - r->moved;
    }
    /* Without lane 0 short messages, too, are the pool's. */
    if (!conn->lanes[0].up)
        return left + shared + (conn->cut < conn->posted);
    most = engine.relieves ? conn->piece : piece_length(conn);
    return left + (shared > most ? shared - most : 0);
}

/* Threads go on while this looks at what they do, which is read once: no lane may be left out, for it may be the only one. */
int conn_order_lanes(const struct conn *conn, int out[LC_TCP_LANES])
{
    enum doing doing[LC_TCP_LANES];
    int n = 0;

    for (int i = 1; i < conn->n_lanes; i++)
        doing[i] = conn->lanes[i].up ? pool_doing(&conn->lanes[i]) : MOVES;
    for (enum doing turn = LOOKS; turn <= MOVES; turn++) {
        for (int i = 1; i < conn->n_lanes; i++) {
            if (doing[i] == turn)
                out[n++] = i;
        }
    }
    return n;
}

/* Wakes idle lanes of the pool, one for each piece. What gives a full one room brings this about again. */
static void spread(struct conn *conn)
{
    int order[LC_TCP_LANES];
    uint64_t bytes;
    uint64_t piece;

    conn_lock(conn);
    bytes = bytes_for_pool(conn);
    piece = bytes ? piece_length(conn) : 0;
    for (int i = 0, n = bytes ? conn_order_lanes(conn, order) : 0; i < n && bytes; i++) {
        struct lane *lane = &conn->lanes[order[i]];

        if (has_room(lane) && conn_wake_lane(lane))
            bytes -= bytes < piece ? bytes : piece;
    }
    conn_unlock_unchanged(conn);
}

/* The receiver has a place for the next message. With conn->lock held. */
static bool may_cut(const struct conn *conn)
{
    if (conn->cut >= conn->posted)
        return false;
    if (is_short(conn, conn->ring[conn->cut % LC_TCP_WINDOW].size))
        return conn->cut - conn->acked < LC_TCP_EARLY; /* and there is a place for its copy */
    return conn->cut < conn->credit;
}

/* Nobody waits for what confirms messages of which there are copies; but for those there is little room. */
static bool may_run_short(const struct conn *conn)
{
    return conn->posted - conn->acked >= LC_TCP_KEPT / 2 &&
           !is_short(conn, conn->ring[(conn->posted - 1) % LC_TCP_WINDOW].size);
}

/* Reading is left to test, unless nobody may have had reason to call it for long. */
void conn_work(struct conn *conn)
{
    bool behind;
    bool alone;
    bool shares;

    conn_lock(conn);
    behind = conn->posted - conn->acked >= LC_TCP_EARLY / 2 ||
             (conn->sends && (!may_cut(conn) || may_run_short(conn)));
    alone = conn->dirty && !conn->lanes[0].up;
    shares = conn->sends && !engine.relieves && conn->posted > 0 &&
             is_long(conn->ring[(conn->posted - 1) % LC_TCP_WINDOW].size);
    conn_unlock(conn);
    /* What lane 0 takes now keeps this thread for a while: the others need not wait for that. */
    if (shares)
        spread(conn);
    if (behind)
        lane_kick(&conn->lanes[0], 1);
    else
        lane_push(&conn->lanes[0]);
    if (conn->sends && !shares)
        spread(conn);
    else if (!conn->sends && alone)
        conn_wake_lanes(conn, NULL);
}

/* ---- the sender's side ---- */

int conn_acked(struct conn *conn, uint64_t acked)
{
    if (acked > conn->cut)
        return -EPROTO;
    for (; conn->acked < acked; conn->acked++)
        atomic_store(&conn->ring[conn->acked % LC_TCP_WINDOW].ripe, true);
    return 0;
}

static int confirm(struct lane *lane, uint64_t count)
{
    if (count > lane->count)
        return -EPROTO;
    if (count > lane->told)
        lane->told = count;
    return 0;
}

int conn_settle(struct lane *lane, uint64_t count)
{
    struct conn *conn = lane->conn;

    if (lane->settled)
        return count == lane->count ? 0 : -EPROTO;
    if (count < lane->told || confirm(lane, count) != 0)
        return -EPROTO;
    for (uint64_t n = count + 1; n <= lane->count; n++) {
        const struct piece *p = &lane->sent[n % RING];

        if (p->seq >= conn->acked) {
            conn->redo[conn->n_redo++] = *p;
            conn->counts.resent++;
            atomic_fetch_add_explicit(&engine.resent, 1, memory_order_relaxed);
        }
    }
    lane->count = count;
    lane->settled = true;
    return 0;
}

/* CONTROL frames of several lanes may overtake each other; each is a whole state, and what is older says nothing new. */
static int take_words(struct conn *conn, const unsigned char *body, uint32_t n, bool *ended)
{
    if (n != (uint32_t)conn->n_lanes)
        return -EPROTO;
    for (uint32_t i = 0; i < n; i++) {
        struct lane *about = &conn->lanes[i];
        struct lc_tcp_lane_word word;
        int err = 0;

        memcpy(&word, body + i * sizeof(word), sizeof(word));
        if (about->up && word.epoch == about->epoch) {
            err = confirm(about, word.count);
            /* The other side has given it up, and its end may not come through. */
            if (!word.open && about->retire < word.epoch) {
                about->retire = word.epoch;
                atomic_store(&about->condemned, true);
                *ended = true;
            }
        } else if (!about->up && !about->settled && !word.open && word.epoch >= about->epoch)
            err = conn_settle(about, word.count);
        if (err)
            return err;
    }
    return 0;
}

int conn_take_control(struct lane *lane, const struct lc_tcp_frame *f, const unsigned char *body)
{
    struct conn *conn = lane->conn;
    const unsigned char *sizes = body + f->arg * sizeof(struct lc_tcp_lane_word);
    bool ended = false;
    bool redo;
    int err;

    conn_lock(conn);
    err = take_words(conn, body, f->arg, &ended);
    if (!err)
        err = conn_acked(conn, f->seq);
    for (uint64_t i = 0; !err && i < f->size - f->seq; i++) {
        uint64_t seq = f->seq + i;

        if (seq >= conn->acked)
            memcpy(&conn->credit_size[seq % LC_TCP_WINDOW], sizes + i * 8, 8);
    }
    if (!err && f->size > conn->credit)
        conn->credit = f->size;
    redo = conn->n_redo > 0;
    park_refused(conn);
    conn_unlock(conn);
    if (atomic_load(&conn->leaving))
        engine_wake();
    for (int i = 0; ended && i < conn->n_lanes; i++) {
        if (&conn->lanes[i] != lane)
            lane_kick(&conn->lanes[i], 1);
    }
    if (!err)
        spread(conn);
    if (!err && redo && lane->index > 0)
        lane_kick(&conn->lanes[0], 1);
    return err;
}

/* What was to be sent again and has come meanwhile. */
static void drop_confirmed(struct conn *conn)
{
    while (conn->n_redo && conn->redo[conn->n_redo - 1].seq < conn->acked)
        conn->n_redo--;
}

/* The next piece that this lane may send; false: none. With conn->lock held. */
static bool next_piece(struct lane *lane, struct piece *out)
{
    struct conn *conn = lane->conn;
    struct lc_net_request *r;
    uint64_t left;
    uint64_t most;

    drop_confirmed(conn);
    if (!has_room(lane) || (!conn->n_redo && !may_cut(conn)))
        return false;
    if (lane->index == 0 && conn_is_for_pool(conn)) {
        leave_to_siblings(conn);
        return false;
    }
    if (!rail_may_take(lane))
        return false;
    if (conn->n_redo) {
        *out = conn->redo[--conn->n_redo];
        return true;
    }
    r = &conn->ring[conn->cut % LC_TCP_WINDOW];
    left = r->size - r->moved;
    most = is_long(r->size) ? piece_length(conn) : conn->piece;
    *out = (struct piece){ r->seq, r->moved, left < most ? left : most };
    /* Too long: the receiver shall see its length, and not a byte of it. */
    if (r->seq < conn->credit && r->size > conn->credit_size[r->seq % LC_TCP_WINDOW])
        *out = (struct piece){ r->seq, 0, 0 };
    r->moved += out->length;
    if (out->length == left || out->length == 0) {
        conn->short_run = is_short(conn, r->size) ? conn->short_run + 1 : 0;
        conn->asked = false;
        conn->cut++;
    }
    return true;
}

static void add_frame(struct lane *lane, int at, const struct lc_tcp_frame *f, void *data,
                      size_t size)
{
    lane->heads[at] = *f;
    lane->iov[lane->iov_n++] = (struct iovec){ &lane->heads[at], sizeof(*f) };
    if (size)
        lane->iov[lane->iov_n++] = (struct iovec){ data, size };
}

static int fill_notices(struct lane *lane)
{
    struct conn *conn = lane->conn;
    int n = 0;

    for (int i = 0; i < conn->n_lanes && n < BATCH && !conn->closing; i++) {
        struct lane *about = &conn->lanes[i];
        struct lc_tcp_frame f = { .magic = LC_TCP_FRAME_MAGIC,
                                  .type = LC_TCP_DOWN,
                                  .lane = (uint8_t)i,
                                  .arg = about->tried };

        if (about->up || about->settled || about->announced_by >= 0)
            continue;
        about->announced_by = lane->index;
        add_frame(lane, n++, &f, NULL, 0);
    }
    return n;
}

/* The caller has its buffer back before the message is confirmed, which the receiver then need not do at once. */
static void keep_copy(struct lane *lane, struct lc_net_request *r)
{
    struct early *copy = &lane->conn->early[r->seq % LC_TCP_EARLY];

    if (r->size && r->data != copy->bytes)
        memcpy(copy->bytes, r->data, r->size);
    r->data = copy->bytes;
    lane->to_copy[lane->n_short] = false;
    lane->short_seqs[lane->n_short++] = r->seq;
}

/* Longer ones are copied when they have gone: by then the other side is at them. There is a place until the message is
 * confirmed, which those before it are when another one has its place; and the next one is sent by who holds io as well. */
static bool may_keep(const struct lane *lane, const struct lc_net_request *r)
{
    struct conn *conn = lane->conn;
    unsigned char **place = &conn->kept[r->seq % LC_TCP_KEPT];

    if (lane->index > 0 || !r->lone || r->gone || r->size > engine.keep || r->size > conn->piece ||
        r->seq - conn->acked >= LC_TCP_KEPT)
        return false;
    if (!*place)
        *place = malloc(LC_TCP_KEPT_MAX);
    return *place != NULL;
}

/* Of the batch's messages this one is still under way. A batch may go in parts, and between them what went whole may be
 * confirmed, over, and its place another message's; what is sent again may have been over long ago. With conn->lock held. */
static struct lc_net_request *find_sent(struct conn *conn, uint64_t seq)
{
    struct lc_net_request *r = &conn->ring[seq % LC_TCP_WINDOW];

    return r->seq == seq && r->used && !r->gone && seq >= conn->acked ? r : NULL;
}

/* The caller has no message back that is under way now, as long as `reading` names one no later: then it can be read without
 * the lock. */
void conn_sent(struct lane *lane)
{
    struct conn *conn = lane->conn;
    const void *from[BATCH] = { NULL };
    size_t sizes[BATCH];

    if (lane->n_short == 0)
        return;
    conn_lock(conn);
    for (int i = 0; i < lane->n_short; i++) {
        const struct lc_net_request *r = find_sent(conn, lane->short_seqs[i]);

        if (r && lane->to_copy[i]) {
            from[i] = r->data;
            sizes[i] = r->size;
        }
    }
    conn_unlock_unchanged(conn);
    for (int i = 0; i < lane->n_short; i++) {
        if (from[i])
            memcpy(conn->kept[lane->short_seqs[i] % LC_TCP_KEPT], from[i], sizes[i]);
    }
    conn_lock(conn);
    for (int i = 0; i < lane->n_short; i++) {
        struct lc_net_request *r = find_sent(conn, lane->short_seqs[i]);

        if (!r || (lane->to_copy[i] && !from[i]))
            continue;
        if (from[i])
            r->data = conn->kept[r->seq % LC_TCP_KEPT];
        r->gone = true;
        atomic_store(&r->ripe, true);
    }
    conn_unlock_unchanged(conn);
    lane->n_short = 0;
}

/* A long message waits, and the receiver may say nothing of its receive by itself. */
static bool must_ask(const struct conn *conn)
{
    return conn->cut < conn->posted && conn->cut >= conn->credit && !conn->asked &&
           conn->short_run >= LC_TCP_SHORT_RUN &&
           !is_short(conn, conn->ring[conn->cut % LC_TCP_WINDOW].size);
}

static void add_ask(struct lane *lane, int at)
{
    struct lc_tcp_frame f = { .magic = LC_TCP_FRAME_MAGIC,
                              .type = LC_TCP_ASK,
                              .lane = (uint8_t)lane->index,
                              .seq = lane->conn->cut };

    lane->conn->asked = true;
    add_frame(lane, at, &f, NULL, 0);
}

static void fill_last(struct lane *lane, int at)
{
    struct conn *conn = lane->conn;
    struct lc_tcp_frame f = { .magic = LC_TCP_FRAME_MAGIC, .lane = (uint8_t)lane->index };

    if (must_ask(conn)) {
        add_ask(lane, at);
    } else if (lane->index == 0 && park_take_question(conn)) {
        f.type = LC_TCP_PARK;
        add_frame(lane, at, &f, NULL, 0);
    } else if (atomic_load(&conn->leaving) && !conn->said_leaving) {
        conn->said_leaving = true;
        f.type = LC_TCP_BYE;
        f.size = conn->cut;
        f.arg = 1;
        add_frame(lane, at, &f, NULL, 0);
    }
}

static void fill_sender(struct lane *lane)
{
    struct conn *conn = lane->conn;
    int n = fill_notices(lane);
    /* Where no other lane could take them, several in one call: each call costs, and so does a short read. */
    uint64_t most = conn->n_up == 1 ? 4 * (uint64_t)conn->piece : piece_length(conn);
    uint64_t bytes = 0;
    struct piece p;

    while (n < BATCH && bytes < most && next_piece(lane, &p)) {
        struct lc_net_request *r = &conn->ring[p.seq % LC_TCP_WINDOW];
        struct lc_tcp_frame f = { .magic = LC_TCP_FRAME_MAGIC,
                                  .type = LC_TCP_PIECE,
                                  .lane = (uint8_t)lane->index,
                                  .number = ++lane->count,
                                  .seq = p.seq,
                                  .size = r->size,
                                  .offset = p.offset,
                                  .length = p.length,
                                  .tag = r->tag };

        if (p.length == r->size) {
            if (is_short(conn, r->size)) {
                keep_copy(lane, r);
            } else if (may_keep(lane, r)) {
                f.arg = LC_TCP_COPIED;
                lane->to_copy[lane->n_short] = true;
                lane->short_seqs[lane->n_short++] = r->seq;
            }
        }
        lane->sent[lane->count % RING] = p;
        if (conn->n_rails > 1)
            lane->took_at = lc_now_ns();
        lane->bytes += p.length;
        lane->oldest = p.seq < lane->oldest ? p.seq : lane->oldest;
        add_frame(lane, n++, &f, r->data + p.offset, p.length);
        bytes += p.length;
    }
    if (n < BATCH)
        fill_last(lane, n);
}

/* ---- the receiver's side ---- */

/* Of a sender the caller reads lane 0 all the time, and is the one who waits for this; over another lane a thread of its
 * pool would be woken to tell it. Not where the lane itself would run out of room, or lane 0 is of another rail, which may
 * be silent. */
static bool is_for_caller(const struct lane *lane)
{
    const struct lane *first = &lane->conn->lanes[0];

    return lane->index > 0 && first->up && first->dev == lane->dev &&
           lane->count - lane->told < RING / 4;
}

static void fill_receiver(struct lane *lane)
{
    struct conn *conn = lane->conn;
    uint64_t n = conn->posted - conn->acked;
    unsigned char *at = lane->out;
    struct lc_tcp_frame f = { .magic = LC_TCP_FRAME_MAGIC,
                              .type = LC_TCP_CONTROL,
                              .lane = (uint8_t)lane->index,
                              .seq = conn->acked,
                              .size = conn->posted,
                              .arg = (uint32_t)conn->n_lanes };
    const struct lc_tcp_frame park = { .magic = LC_TCP_FRAME_MAGIC,
                                       .type = LC_TCP_PARK,
                                       .lane = (uint8_t)lane->index };

    if (park_take_answer(conn)) {
        add_frame(lane, 0, &park, NULL, 0);
        return;
    }
    if (!conn->dirty)
        return;
    lane->passes_on = is_for_caller(lane);
    if (lane->passes_on)
        return;
    conn->dirty = false;
    conn->told_posted = conn->posted;
    conn->told_acked = conn->acked;
    for (int i = 0; i < conn->n_lanes; i++) {
        struct lane *about = &conn->lanes[i];
        struct lc_tcp_lane_word word = { about->count, about->epoch, about->up };

        about->told = about->count;
        memcpy(at, &word, sizeof(word));
        at += sizeof(word);
    }
    for (uint64_t i = 0; i < n; i++) {
        memcpy(at, &conn->ring[(conn->acked + i) % LC_TCP_WINDOW].size, 8);
        at += 8;
    }
    f.length = (uint64_t)(at - lane->out);
    add_frame(lane, 0, &f, lane->out, f.length);
}

static int find_message(struct conn *conn, const struct lc_tcp_frame *f)
{
    struct lc_net_request *r = &conn->ring[f->seq % LC_TCP_WINDOW];

    if (f->seq < conn->acked || f->seq >= conn->posted || r->complete)
        return -EPROTO;
    if (f->size > r->size)
        return -EMSGSIZE;
    if (r->known ? r->length != f->size : r->moved != 0)
        return -EPROTO;
    if (f->length > f->size - r->moved)
        return -EPROTO;
    r->known = true;
    r->copied = f->arg & LC_TCP_COPIED;
    r->length = f->size;
    return 0;
}

/* Short messages come without, and after some of them the next is one, too, as a rule. */
void conn_want_credit(struct conn *conn)
{
    conn->dirty |= conn->short_run < LC_TCP_SHORT_RUN || conn->told_posted < conn->wanted;
}

/* The receives of short messages that came early may be posted before its own, and count as ever. An older question may
 * come behind a newer one, over another lane. */
int conn_take_ask(struct conn *conn, const struct lc_tcp_frame *f)
{
    int err = 0;

    conn_lock(conn);
    if (f->seq >= conn->acked + LC_TCP_WINDOW)
        err = -EPROTO;
    else if (f->seq >= conn->wanted)
        conn->wanted = f->seq + 1;
    conn->dirty |= conn->told_posted < conn->posted;
    conn_unlock(conn);
    return err;
}

/* The sender waits for this alone. With conn->lock held. */
static void take_leave(struct conn *conn)
{
    conn->dirty = true;
    if (conn->acked < conn->last)
        return;
    conn->peer_gone = conn->told = true;
    atomic_store(&conn->troubled, true);
}

/* All that are complete in a row. For those of which there are copies nobody waits, until there are many, or the sender knows of no further
 * receive: nothing else may come to tell it of those that were posted meanwhile. With conn->lock held. */
static void confirm_complete(struct conn *conn)
{
    const struct lc_net_request *r = &conn->ring[conn->acked % LC_TCP_WINDOW];

    while (conn->acked < conn->posted && r->complete && r->seq == conn->acked) {
        if (r->copied)
            conn->dirty |= conn->acked + 1 - conn->told_acked >= LC_TCP_KEPT / 2;
        else
            conn->dirty |= !is_short(conn, r->length);
        conn->short_run = is_short(conn, r->length) ? conn->short_run + 1 : 0;
        conn->acked++;
        r = &conn->ring[conn->acked % LC_TCP_WINDOW];
    }
    conn->dirty |= conn->acked - conn->told_acked >= LC_TCP_EARLY / 4;
    if (conn->told_posted <= conn->acked && conn->acked < conn->posted)
        conn_want_credit(conn);
    if (conn->peer_leaving)
        take_leave(conn);
}

/* ---- messages that come before their receives ---- */

static int begin_early(struct lane *lane, const struct lc_tcp_frame *f)
{
    struct conn *conn = lane->conn;
    struct early *early;

    if (f->seq - conn->acked >= LC_TCP_EARLY || f->size > LC_TCP_EARLY_MAX ||
        f->length != f->size || f->arg != 0)
        return -EPROTO;
    if (!conn->early) {
        conn->early = calloc(LC_TCP_EARLY, sizeof(*conn->early));
        if (!conn->early) {
            conn_fail_locked(conn, -ENOMEM, "no memory for early messages");
            return -ENOMEM;
        }
    }
    early = &conn->early[f->seq % LC_TCP_EARLY];
    if (early->full)
        return -EPROTO;
    lane->rx = *f;
    lane->dst = early->bytes;
    lane->dst_left = f->length;
    lane->in_piece = true;
    lane->in_early = true;
    return 0;
}

static void fail_too_long(struct conn *conn, uint64_t length, uint64_t size)
{
    char text[CAUSE];

    (void)snprintf(text, sizeof(text),
                   "a message of %" PRIu64 " bytes came for a buffer of %" PRIu64, length, size);
    conn_fail_locked(conn, -EMSGSIZE, text);
}

bool conn_has_early(const struct conn *conn, uint64_t seq)
{
    const struct early *early = conn->early ? &conn->early[seq % LC_TCP_EARLY] : NULL;

    return !conn->sends && early && early->full && early->seq == seq;
}

void conn_take_early(struct conn *conn, struct lc_net_request *r)
{
    struct early *early = conn->early ? &conn->early[r->seq % LC_TCP_EARLY] : NULL;

    if (!conn_has_early(conn, r->seq))
        return;
    if (early->length > r->size) {
        fail_too_long(conn, early->length, r->size);
        return;
    }
    if (early->length)
        memcpy(r->data, early->bytes, early->length);
    early->full = false;
    r->known = true;
    r->length = r->moved = early->length;
    r->complete = true;
    atomic_store(&r->ripe, true);
    confirm_complete(conn);
}

/* Two lanes may bring the same message only if the peer is not one of ours: the second finds the place taken, or its
 * receive complete. */
static void end_early(struct lane *lane)
{
    struct conn *conn = lane->conn;
    struct early *early = &conn->early[lane->rx.seq % LC_TCP_EARLY];
    struct lc_net_request *r = &conn->ring[lane->rx.seq % LC_TCP_WINDOW];

    lane->in_early = false;
    if (early->full || lane->rx.seq < conn->acked) {
        conn_fail_locked(conn, -EPROTO, "a message came twice");
        return;
    }
    early->full = true;
    early->seq = lane->rx.seq;
    early->length = lane->rx.length;
    if (early->seq < conn->posted && !r->complete)
        conn_take_early(conn, r);
}

int conn_begin_piece(struct lane *lane, const struct lc_tcp_frame *f)
{
    struct conn *conn = lane->conn;
    struct lc_net_request *r = &conn->ring[f->seq % LC_TCP_WINDOW];
    bool early;
    int err;

    conn_lock(conn);
    early = f->seq >= conn->posted;
    if (f->number != lane->count + 1)
        err = -EPROTO;
    else
        err = early ? begin_early(lane, f) : find_message(conn, f);
    if (err == -EMSGSIZE)
        fail_too_long(conn, f->size, r->size);
    if (!err && conn->error)
        err = conn->error;
    if (!err && !early) {
        lane->rx = *f;
        lane->dst = r->data + f->offset;
        lane->dst_left = f->length;
        lane->in_piece = true;
    }
    conn_unlock_unchanged(conn); /* an error is seen by itself */
    return err;
}

void conn_end_piece(struct lane *lane)
{
    struct conn *conn = lane->conn;
    struct lc_net_request *r = &conn->ring[lane->rx.seq % LC_TCP_WINDOW];

    conn_lock(conn);
    lane->count++;
    lane->bytes += lane->rx.length;
    if (lane->in_early) {
        end_early(lane);
    } else {
        r->moved += lane->rx.length;
        if (r->moved == r->length) {
            r->complete = true;
            atomic_store(&r->ripe, true);
            confirm_complete(conn);
        }
    }
    if (lane->count - lane->told >= RING / 4 || conn->peer_leaving || park_passed(conn))
        conn->dirty = true;
    if (conn->dirty)
        conn_unlock(conn);
    else
        conn_unlock_unchanged(conn);
}

/* Whoever moves the other lane ends it: waiting for its lock here could be waiting in a circle. */
int conn_down(struct lane *lane, const struct lc_tcp_frame *f)
{
    struct conn *conn = lane->conn;
    struct lane *about = &conn->lanes[f->lane];

    if (f->lane >= conn->n_lanes || about == lane)
        return -EPROTO;
    conn_lock(conn);
    if (f->arg > about->retire) {
        about->retire = f->arg;
        atomic_store(&about->condemned, true);
    }
    if (!about->up && about->retire > about->epoch)
        about->epoch = about->retire;
    conn->dirty = true;
    conn_unlock(conn);
    lane_kick(about, 1);
    return 0;
}

/* Whoever moves a lane ends it, as in conn_down; this one is moved once more behind what is being read. A receiver answers then. */
int conn_park(struct lane *lane)
{
    struct conn *conn = lane->conn;
    bool ends = false;

    conn_lock(conn);
    if (conn->sends)
        ends = park_agreed(conn);
    else
        conn->dirty |= !park_agree(conn);
    conn_unlock(conn);
    for (int i = 0; i < conn->n_lanes && ends; i++)
        lane_kick(&conn->lanes[i], 1);
    return 0;
}

/* ---- both ---- */

bool conn_is_hopeless(const struct conn *conn, uint64_t seq)
{
    if (!conn->peer_gone)
        return false;
    return conn->sends || conn->n_up == 0 || (seq >= conn->last && conn->acked >= conn->last);
}

/* A receiver goes on reading: what the sender had sent before may come behind this, over other lanes. */
int conn_bye(struct lane *lane, const struct lc_tcp_frame *f)
{
    struct conn *conn = lane->conn;
    int err = 0;

    conn_lock(conn);
    if (conn->sends)
        err = conn_acked(conn, f->seq);
    conn->last = f->size;
    if (f->arg) {
        conn->peer_leaving = true;
        take_leave(conn);
    } else {
        conn->peer_gone = true;
        atomic_store(&conn->troubled, true);
        conn->told = true;
    }
    if (!err && conn->acked < conn->posted && conn_is_hopeless(conn, conn->posted - 1))
        conn_fail_locked(conn, -EREMOTEIO, "the other side closed the connection");
    conn_unlock(conn);
    if (atomic_load(&conn->leaving))
        engine_wake();
    return err;
}

static void fill_error(struct lane *lane)
{
    struct conn *conn = lane->conn;
    size_t n = strnlen(conn->cause, LC_TCP_TEXT);
    struct lc_tcp_frame f = { .magic = LC_TCP_FRAME_MAGIC,
                              .type = LC_TCP_ERROR,
                              .lane = (uint8_t)lane->index,
                              .length = n,
                              .arg = (uint32_t)-conn->error };

    if (conn->told)
        return;
    conn->told = true;
    memcpy(lane->out, conn->cause, n);
    add_frame(lane, 0, &f, lane->out, n);
}

/* What short messages have lost with a socket is not known yet, or has to be sent again. With conn->lock held. */
static bool has_lost(const struct conn *conn)
{
    bool lost = conn->n_redo > 0;

    for (int i = 0; i < conn->n_lanes; i++)
        lost |= !conn->lanes[i].up && !conn->lanes[i].settled;
    return lost && conn->acked < conn->cut && !conn->error && !conn->closing;
}

void conn_fill_batch(struct lane *lane)
{
    struct conn *conn = lane->conn;
    uint64_t cut;
    bool lost;

    conn_lock(conn);
    cut = conn->cut;
    lost = conn->sends && has_lost(conn);
    lane->iov_at = lane->iov_n = 0;
    lane->n_short = 0;
    lane->passes_on = false;
    lane->oldest = UINT64_MAX;
    /* Who leaves waits for what has come, though this one waits in vain for more. */
    if (conn->error && !(conn->told && conn->peer_leaving))
        fill_error(lane);
    else if (conn->sends)
        fill_sender(lane);
    else
        fill_receiver(lane);
    /* Also while what is sent again goes in part: its caller may have gone. Who has asked whether sockets may end has to read
     * the answer, and nobody calls. */
    lane->owes = lost || (conn->sends && (has_lost(conn) || conn->parking == PARK_ASKED));
    lane->idle = lane->iov_n == 0;
    /* With several rails it depends on the time, too. */
    lane->rests = lane->idle && conn->n_rails <= 1;
    lane->seen = atomic_load(&conn->changes);
    if (!lane->idle)
        atomic_store(&lane->reading, lane->oldest); /* before anybody can confirm what is in it */
    /* The next message may be one for another lane; what was taken otherwise leaves less to do. */
    if (conn->cut != cut)
        conn_unlock(conn);
    else
        conn_unlock_unchanged(conn);
}

void conn_fill_bye(struct conn *conn, struct lc_tcp_frame *out)
{
    memset(out, 0, sizeof(*out));
    out->magic = LC_TCP_FRAME_MAGIC;
    out->type = LC_TCP_BYE;
    conn_lock(conn);
    out->seq = conn->sends ? 0 : conn->acked;
    out->size = conn->sends ? conn->cut : 0;
    conn_unlock(conn);
}

void conn_abandon(struct conn *conn)
{
    for (int i = 0; i < conn->n_lanes; i++)
        lane_abandon(&conn->lanes[i]);
    for (int i = 0; i < conn->n_lanes; i++) /* the first that can tells the peer */
        lane_kick(&conn->lanes[i], 1);
}

/* After this nothing reads from or writes to the caller's buffers. When the process ends its caller and the service thread may
 * both come to close what leaves; who is second has a reference that is not dropped. */
void conn_close(struct conn *conn)
{
    bool first;

    pthread_mutex_lock(&engine.lock);
    first = conn->link != NULL;
    if (first) {
        engine_delist(conn);
        engine_bury(conn);
        engine.n_leaving -= atomic_load(&conn->leaving);
    }
    pthread_mutex_unlock(&engine.lock);
    if (!first)
        return;
    /* First: a lane that is still open must not tell of closed ones that they are down, or the peer gives them up unread. */
    conn_lock(conn);
    conn->closing = true;
    atomic_store(&conn->troubled, true);
    conn_unlock(conn);
    for (int i = 0; i < conn->n_lanes; i++)
        lane_close(&conn->lanes[i]);
    count_conn(conn); /* what NCCL never closes is not freed */
    conn_unref(conn);
    engine_wake();
}
