/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/agree.h"

#include "common/deadline.h"
#include "common/log.h"
#include "interpose/control/control.h"
#include "interpose/machine.h"
#include "interpose/process.h"
#include "interpose/tuner.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Changes with the meaning of a vote, kernels/ring_layout.h included. */
#ifndef LC_RECORD_VERSION /* a test builds another one */
#define LC_RECORD_VERSION 9u
#endif

/* Children of one kind: splits, or shrinks without one set of ranks. */
struct children {
    uint64_t set; /* 0: splits, or no shrink yet */
    uint64_t count;
    bool failed; /* some of them: nobody knows whether the same have failed at the other ranks */
};
#define SHRINKS 16                  /* sets; beyond, children stay with NCCL */
#define SHRINK  ((uint64_t)1 << 63) /* no count of splits has this bit */

struct lc_agree {
    struct lc_room *room;
    int rank, ranks, device;
    struct lc_progress *progress; /* of its entry; set when the entry is made */
    struct lc_tuned *tuned;       /* set when it is made; NULL: no tuner plugin has asked */

    /* Used by the thread that calls the communicator's operations. */
    struct children splits, shrinks[SHRINKS];
    uint64_t count; /* collectives so far */
    uint64_t from;  /* the vote is for this epoch on */
    bool voted, committed;
    bool paired;         /* has voted for some pair */
    bool withheld;       /* the vote could not be given, and will not be */
    uint32_t generation; /* 0, then the number of the change that was agreed on last */
    uint32_t change;     /* 0, then the last that this rank has voted for */
    uint64_t change_from;

    /* Any thread, each written once. */
    atomic_int_fast64_t lost_ns; /* 0, then when a peer was first seen to be gone */
    _Atomic int broken;          /* 0 (ncclSuccess), then what later calls return */
    _Atomic bool aborted;
    _Atomic bool said; /* who is gone */
};

/* Where a process runs, as ranks of one machine must see it alike: LOONGCOMM_HOSTID, NCCL_HOSTID, else the boot. */
static void host_name(char out[64])
{
    const struct lc_config *config = lc_process_config();
    FILE *file;

    memset(out, 0, 64);
    if (*config->hostid) {
        (void)snprintf(out, 64, "%s", config->hostid);
        return;
    }
    file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file) {
        if (fgets(out, 48, file))
            out[strcspn(out, "\n")] = '\0';
        fclose(file);
    }
    (void)gethostname(out + strlen(out), 64 - strlen(out) - 1);
}

/* Profiles count like settings. */
static uint64_t settings_hash(void)
{
    uint64_t profile = lc_machine_hash();

    return lc_config_hash(lc_process_config()) ^ (profile >> 7 | profile << 57);
}

static struct lc_record my_record(const struct lc_agree *agree)
{
    struct lc_record record = { .version = LC_RECORD_VERSION,
                                .rank = (uint32_t)agree->rank,
                                .pid = (uint32_t)getpid(),
                                .device = agree->device,
                                .settings_hash = settings_hash(),
                                .capabilities = LC_CAN_CAST | (agree->tuned ? LC_CAN_TUNE : 0) };

    host_name(record.host);
    return record;
}

static struct lc_agree *new_agree(int ranks, int rank, int device)
{
    struct lc_agree *agree = calloc(1, sizeof(*agree));

    if (agree) {
        agree->ranks = ranks;
        agree->rank = rank;
        agree->device = device;
        agree->tuned = lc_tuner_take();
    }
    return agree;
}

/* Takes the result of joining; without a room there is nothing to agree on. */
static struct lc_agree *seated(struct lc_agree *agree, int err)
{
    if (!err)
        return agree;
    if (err == -ENOENT && agree->rank == 1 && !lc_environment_has("NCCL_COMM_ID"))
        lc_warn_once(
            "the process that made the id of a communicator of %d ranks (rank 0, as a rule) does not run loongcomm, or has it switched off: all of its calls stay with NCCL",
            agree->ranks);
    if (err != -ENOENT)
        lc_info(
            "rank %d cannot join the agreement of its communicator (%s): its calls stay with NCCL",
            agree->rank, strerror(-err));
    lc_tuner_put(agree->tuned);
    free(agree);
    return NULL;
}

struct lc_agree *lc_agree_init(const ncclUniqueId *id, int ranks, int rank, int device)
{
    struct lc_agree *agree;
    struct lc_record mine;

    if (!lc_enabled || ranks < 2 || rank < 0 || rank >= ranks)
        return NULL;
    agree = new_agree(ranks, rank, device);
    if (!agree)
        return NULL;
    mine = my_record(agree);
    return seated(agree, lc_room_join(id->internal, (uint32_t)ranks, &mine, &agree->room));
}

/* 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t lc_agree_set(const int *excluded, int count)
{
    uint64_t set = 0;

    for (int i = 0; excluded && i < count; i++)
        set += mix((uint64_t)excluded[i] + 1); /* in any order */
    return set | SHRINK;
}

static struct children *children_of(struct lc_agree *parent, uint64_t set)
{
    if (!set)
        return &parent->splits;
    for (int i = 0; i < SHRINKS; i++) {
        struct children *shrinks = &parent->shrinks[i];

        if (shrinks->set != set && shrinks->set != 0)
            continue;
        shrinks->set = set;
        return shrinks;
    }
    return NULL;
}

/* All ranks split between the same two collectives. Ranks that shrink may have been cut off at different ones. */
uint64_t lc_agree_count_child(struct lc_agree *parent, uint64_t set)
{
    struct children *children = parent ? children_of(parent, set) : NULL;

    if (!children || children->failed)
        return 0;
    children->count++;
    if (set)
        return (set + children->count) | SHRINK;
    return (mix(mix(children->count) + parent->count) & ~SHRINK) | 1;
}

void lc_agree_uncount_child(struct lc_agree *parent, uint64_t set)
{
    struct children *children = parent ? children_of(parent, set) : NULL;

    if (children && children->count > 0)
        children->count--;
}

void lc_agree_child_failed(struct lc_agree *parent, uint64_t set)
{
    struct children *children = parent ? children_of(parent, set) : NULL;

    if (children)
        children->failed = true;
}

struct lc_agree *lc_agree_child(struct lc_agree *parent, uint64_t creation, int colour, int ranks,
                                int rank, int device)
{
    struct lc_agree *agree;
    struct lc_record mine;

    if (!parent || ranks < 2)
        return NULL;
    agree = new_agree(ranks, rank, device);
    if (!agree)
        return NULL;
    mine = my_record(agree);
    return seated(agree, lc_room_join_child(parent->room, creation, (uint32_t)colour,
                                            (uint32_t)ranks, &mine, &agree->room));
}

struct lc_room *lc_agree_room(const struct lc_agree *agree)
{
    return agree->room;
}

bool lc_agree_is_tuned(const struct lc_agree *agree)
{
    return agree->tuned != NULL;
}

/* What is committed now, for the tuner; all ranks must have one, or their choices would differ. */
static void tell_tuner(const struct lc_agree *agree)
{
    if (agree->tuned)
        atomic_store_explicit(&agree->tuned->agreed,
                              agree->committed && lc_room_capabilities(agree->room) & LC_CAN_TUNE,
                              memory_order_release);
}

bool lc_agree_wants_setup(const struct lc_agree *agree)
{
    return !agree->voted && !agree->withheld && lc_room_complete(agree->room);
}

/* Meanwhile aborted by another thread: peers may have committed all the same. */
static ncclResult_t lost(struct lc_agree *agree, int err)
{
    if (!atomic_load(&agree->aborted)) {
        lc_error("rank %d: the agreement of its communicator is lost (%s)", agree->rank,
                 strerror(-err));
        lc_agree_break(agree, ncclRemoteError);
    }
    return ncclRemoteError;
}

static ncclResult_t decide(struct lc_agree *agree)
{
    enum lc_verdict verdict = LC_VERDICT_SKIP;
    int err = lc_room_decide(agree->room, agree->count, &verdict);

    if (err)
        return lost(agree, err);
    agree->committed = verdict == LC_VERDICT_COMMIT;
    if (agree->committed)
        lc_info("communicator of %d ranks: committed at collective %llu", agree->ranks,
                (unsigned long long)agree->count);
    return ncclSuccess;
}

bool lc_agree_can_change(const struct lc_agree *agree)
{
    return lc_room_can_change(agree->room);
}

bool lc_agree_vote_change(struct lc_agree *agree, uint32_t change)
{
    uint64_t from = lc_next_epoch(agree->count);

    if (!agree->committed || lc_room_vote_change(agree->room, change, from) != 0)
        return false;
    agree->change = change;
    agree->change_from = from;
    return true;
}

ncclResult_t lc_agree_next(struct lc_agree *agree, bool ready, bool *committed)
{
    ncclResult_t result = lc_agree_error(agree);
    uint64_t before = agree->count;
    bool epoch;

    *committed = false;
    if (result != ncclSuccess)
        return result; /* a peer may have made a call that this rank has not: no later one would match */
    agree->count++;
    epoch = lc_is_epoch(agree->count);
    /* An abort changes nothing of what has been agreed: NCCL may still take calls of the aborting communicator for a
     * moment, and peers that know nothing yet make the same ones. It only ends voting. */
    if (!agree->voted && !agree->withheld && ready && !atomic_load(&agree->aborted)) {
        agree->from = lc_next_epoch(before);
        agree->voted = lc_room_vote(agree->room, agree->from) == 0;
        agree->withheld = !agree->voted;
        if (agree->voted)
            lc_info("rank %d of %d: voted at collective %llu", agree->rank, agree->ranks,
                    (unsigned long long)agree->count);
    }
    if (agree->voted && !agree->committed && epoch && agree->count >= agree->from)
        result = decide(agree);
    else if (agree->change > agree->generation && epoch && agree->count >= agree->change_from &&
             lc_room_decide_change(agree->room, agree->change, agree->count) == LC_VERDICT_COMMIT)
        agree->generation = agree->change;
    *committed = agree->committed;
    tell_tuner(agree);
    return result;
}

uint32_t lc_agree_generation(const struct lc_agree *agree)
{
    return agree->generation;
}

void lc_agree_refused(struct lc_agree *agree)
{
    agree->count--;
    if (agree->progress)
        lc_progress_rewind(agree->progress, agree->count);
}

struct lc_agree_mark lc_agree_mark(const struct lc_agree *agree)
{
    return (struct lc_agree_mark){ agree->count, agree->committed, agree->generation };
}

void lc_agree_rewind(struct lc_agree *agree, struct lc_agree_mark mark)
{
    agree->count = mark.count;
    agree->committed = mark.committed;
    agree->generation = mark.generation;
    tell_tuner(agree);
    if (agree->progress)
        lc_progress_rewind(agree->progress, mark.count);
}

bool lc_agree_is_committed(const struct lc_agree *agree)
{
    return agree && agree->committed;
}

ncclResult_t lc_agree_pair(struct lc_agree *agree, int peer, bool send, uint64_t index,
                           bool *committed)
{
    uint32_t mine = (uint32_t)agree->rank, other = (uint32_t)peer;
    enum lc_verdict verdict = LC_VERDICT_SKIP;
    int err;

    if (atomic_load(&agree->aborted)) /* as for collectives: it only ends voting */
        return ncclSuccess;
    if (agree->withheld &&
        !agree->paired) /* a vote of pairs that has been given counts at the others */
        return ncclSuccess;
    agree->paired = true;
    err = lc_room_decide_pair(agree->room, send ? mine : other, send ? other : mine, index,
                              &verdict);
    if (err)
        return lost(agree, err);
    *committed = verdict == LC_VERDICT_COMMIT;
    return ncclSuccess;
}

bool lc_agree_withhold(struct lc_agree *agree)
{
    bool was = agree->withheld;

    agree->withheld = !agree->voted && !agree->paired;
    if (agree->withheld && !was)
        lc_room_withhold(agree->room);
    return agree->withheld;
}

void lc_agree_break(struct lc_agree *agree, ncclResult_t error)
{
    int none = ncclSuccess;

    if (atomic_compare_exchange_strong(&agree->broken, &none, (int)error))
        lc_room_abort(agree->room, (int)error);
}

void lc_agree_abort(struct lc_agree *agree)
{
    if (!atomic_exchange(&agree->aborted, true))
        lc_room_abort(agree->room, (int)ncclRemoteError);
}

ncclResult_t lc_agree_own_error(const struct lc_agree *agree)
{
    return (ncclResult_t)atomic_load(&agree->broken);
}

ncclResult_t lc_agree_state(const struct lc_agree *agree)
{
    ncclResult_t broken = lc_agree_own_error(agree);

    if (broken != ncclSuccess)
        return broken;
    return lc_room_error(agree->room, NULL) ? ncclRemoteError : ncclSuccess;
}

/* The program learns no more than ncclRemoteError from the value. */
static void say_lost(struct lc_agree *agree)
{
    uint32_t peer = 0;
    int err = lc_room_error(agree->room, &peer);

    if (!err || atomic_exchange(&agree->said, true))
        return;
    if (err == -ECONNRESET)
        lc_error("rank %d of %d: rank %" PRIu32 " has ended without destroying their communicator; "
                 "calls on it fail from now on",
                 agree->rank, agree->ranks, peer);
    else if (err == -ECANCELED)
        lc_error("rank %d of %d: rank %" PRIu32 " has aborted their communicator, or a call of its "
                 "has failed there; calls on it fail from now on",
                 agree->rank, agree->ranks, peer);
    else
        lc_error("rank %d of %d: the rank that the others of its communicator agree through has "
                 "ended; calls on it fail from now on",
                 agree->rank, agree->ranks);
}

ncclResult_t lc_agree_error(struct lc_agree *agree)
{
    ncclResult_t error = lc_agree_state(agree);

    if (error != ncclSuccess && !atomic_load(&agree->aborted))
        say_lost(agree);
    return error;
}

uint64_t lc_agree_watch(struct lc_agree *agree, struct lc_progress *progress)
{
    if (!agree)
        return 0;
    agree->progress = progress;
    lc_room_watch(agree->room, progress);
    return lc_room_id(agree->room);
}

int64_t lc_agree_lost_for_ms(struct lc_agree *agree)
{
    int_fast64_t since = 0;
    int64_t now = lc_now_ns();

    if (atomic_compare_exchange_strong(&agree->lost_ns, &since, now))
        since = now;
    return (now - since) / 1000000;
}

void lc_agree_free(struct lc_agree *agree)
{
    if (!agree)
        return;
    lc_room_release(agree->room);
    lc_tuner_put(agree->tuned);
    free(agree);
}
