/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/route.h"

#include "common/config.h"
#include "common/log.h"
#include "interpose/comm.h"
#include "interpose/control/control.h"
#include "interpose/create.h"
#include "interpose/feedback.h"
#include "interpose/gather.h"
#include "interpose/machine.h"
#include "interpose/messages.h"
#include "interpose/pairs.h"
#include "interpose/peers.h"
#include "interpose/policy.h"
#include "interpose/process.h"
#include "interpose/reduce.h"
#include "interpose/rings.h"
#include "interpose/rounding.h"
#include "interpose/verify.h"

#include <stdlib.h>

#define PACKING_ONLY ((size_t)16 << 20)

/* From what all ranks share. A communicator that only packs small tensors makes do with little; there is room for some
 * elements of every rank, whatever the setting: pieces must not be empty. */
static size_t scratch_size(int ranks)
{
    const struct lc_config *config = lc_process_config();
    size_t bytes = config->scratch, least = (size_t)1 << 20;

    if (config->allreduce_wire == LC_WIRE_DATA && bytes > PACKING_ONLY)
        bytes = PACKING_ONLY;

    if (least < (size_t)ranks * 256)
        least = (size_t)ranks * 256;
    return bytes < least ? least : bytes;
}

static bool is_collective(enum lc_op_kind kind)
{
    return kind != LC_OP_SEND && kind != LC_OP_RECV;
}

bool lc_route_is_captured(const struct lc_backend *backend, int device, cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
    struct lc_guard guard; /* the legacy stream is the current device's */

    if (!lc_guard_begin(backend, device, &guard))
        return true;
    if (backend->cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
        (void)backend->cudaGetLastError(); /* not the program's error */
        status = cudaStreamCaptureStatusActive;
    }
    lc_guard_end(backend, device, &guard);
    return status != cudaStreamCaptureStatusNone;
}

/* A launch then ends with its kernel, which waits for those of the others: one thread cannot make them all. */
static bool launches_wait_for_each_other(struct lc_room *room, const struct lc_comm *comm)
{
    const char *blocking = lc_environment_get("CUDA_LAUNCH_BLOCKING");
    uint32_t me = (uint32_t)comm->facts.rank;

    if (!blocking || strtol(blocking, NULL, 10) == 0)
        return false;
    for (uint32_t r = 0; r < (uint32_t)comm->facts.ranks; r++) {
        if (r != me && lc_room_record(room, r)->pid == lc_room_record(room, me)->pid)
            return true;
    }
    return false;
}

/* What this rank alone may know of, said once. */
static bool has_obstacle(struct lc_room *room, const struct lc_comm *comm)
{
    struct lk_ring_shape least = { .ranks = (uint32_t)comm->facts.ranks,
                                   .channels = 1,
                                   .slots = 1 };

    if (launches_wait_for_each_other(room, comm)) {
        lc_warn_once(
            "CUDA_LAUNCH_BLOCKING is set, and this process has several ranks of a communicator: its reductions do not go through peers' memory");
        return true;
    }
    if (comm->reducer->backend->lk_ring_bytes(&least) != 0)
        return false;
    lc_warn_once(
        "a communicator has %d ranks on this machine, more than the kernels library serves: its reductions do not go through peers' memory",
        comm->facts.ranks);
    return true;
}

/* Kinds of kernels that may run at a time. No message is as large as what leaves all of them to NCCL. */
static uint32_t kernels_of(const struct lc_config *config)
{
    return 1 + (lc_policy_exchanges(config, lc_machine_profile()) &&
                config->exchange_min_bytes <= LC_MESSAGE_MOST);
}

/* Through with it, whatever came of it. */
static bool has_tried_rings(struct lc_comm *comm, int device)
{
    struct lc_reducer *reducer = comm->reducer;
    struct lc_room *room = lc_agree_room(comm->agree);
    const struct lc_config *config = lc_process_config();
    struct lc_guard guard;
    bool done;

    if (!lc_policy_wants_rings(config, lc_machine_profile()) ||
        !lc_peers_possible(room, comm->facts.ranks))
        return true;
    if (!reducer->peers && !has_obstacle(room, comm)) {
        struct lc_peers_facts facts = { .device = device,
                                        .rank = comm->facts.rank,
                                        .ranks = comm->facts.ranks,
                                        .cap = config->staging_max,
                                        .start = config->staging_start,
                                        .short_bytes = config->exchange_short_bytes,
                                        .kernels = kernels_of(config),
                                        .ctas = comm->facts.ctas,
                                        .most = (uint32_t)config->max_ctas,
                                        .beside = lc_create_nccl_ctas() };

        reducer->sizing = (struct lc_sizing){ 0 };
        reducer->peers = lc_peers_new(reducer->backend, room, &facts, &comm->ledger);
    }
    if (!reducer->peers) {
        lc_peers_refuse(room);
        return true;
    }
    if (!lc_guard_begin(reducer->backend, device, &guard))
        return false; /* at a later call */
    done = lc_peers_step(reducer->peers);
    lc_guard_end(reducer->backend, device, &guard);
    return done;
}

/* Streams of ours for messages, where there may be any. */
static bool has_sides(struct lc_comm *comm, cudaStream_t stream)
{
    const struct lc_backend *backend = comm->reducer->backend;
    struct lc_guard guard;

    if (comm->sides || !lc_peers_rings(comm->reducer->peers, 0) ||
        !lc_policy_exchanges(lc_process_config(), lc_machine_profile()))
        return true;
    if (!lc_guard_begin(backend, comm->reducer->device, &guard))
        return false; /* at a later call */
    comm->sides = lc_sides_new(backend, stream);
    lc_guard_end(backend, comm->reducer->device, &guard);
    if (!comm->sides)
        lc_warn_once(
            "device %d: no streams for all-to-alls: all calls of the communicator go through NCCL",
            comm->reducer->device);
    comm->no_setup = !comm->sides;
    return comm->sides != NULL;
}

/* Local reasons end here: what cannot be set up on this rank withholds its vote, and nothing else. */
static bool is_set_up(struct lc_comm *comm, cudaStream_t stream)
{
    const struct lc_backend *backend;
    struct lc_reducer *reducer;
    int device = atomic_load_explicit(&comm->device, memory_order_relaxed);

    if (comm->set_up)
        return true;
    if (comm->no_setup || !lc_agree_wants_setup(comm->agree))
        return false;
    backend = lc_backend();
    if (backend && lc_route_is_captured(backend, device, stream))
        return false; /* at a later call */
    if (!comm->reducer) {
        reducer = lc_reducer_new(device, stream, scratch_size(comm->facts.ranks));
        atomic_store_explicit(&comm->reducer, reducer, memory_order_release);
        if (reducer) {
            lc_feedback_set_up(reducer, stream, &comm->ledger);
            lc_rounding_set_up(comm, stream);
        }
        comm->no_setup = !reducer || !lc_verify_set_up(reducer, stream, &comm->ledger,
                                                       comm->facts.rank, comm->facts.ranks);
    }
    if (comm->no_setup)
        lc_peers_refuse(lc_agree_room(comm->agree));
    comm->set_up = !comm->no_setup && has_tried_rings(comm, device) && has_sides(comm, stream);
    if (comm->no_setup)
        (void)lc_agree_withhold(comm->agree);
    return comm->set_up;
}

static bool has_rings(const struct lc_comm *comm)
{
    const struct lc_reducer *reducer = comm->reducer;

    return reducer && lc_peers_rings(reducer->peers, 0);
}

/* Some rank could not have them; why, the log has said. */
static bool was_refused_rings(const struct lc_comm *comm)
{
    return comm->set_up && comm->reducer->peers && !has_rings(comm);
}

/* Before all ranks have agreed nobody knows what will come. */
static struct lc_choice choose(const struct lc_op *op, struct lc_situation *now)
{
    now->rings = true;
    return lc_policy(op, now, lc_process_config());
}

/* Then all know the same. */
static struct lc_choice choose_again(const struct lc_op *op, struct lc_situation *now,
                                     const struct lc_comm *comm)
{
    struct lc_choice choice;

    now->rings = now->mapped = has_rings(comm);
    choice = lc_policy(op, now, lc_process_config());
    if (choice.path == LC_PATH_NCCL && was_refused_rings(comm))
        choice.outcome = LC_NCCL_NO_PEER_MEMORY;
    return choice;
}

static void settle(struct lc_op *op, ncclResult_t result)
{
    op->settled = true;
    op->result = result;
}

static void settle_failure(struct lc_op *op, ncclResult_t result)
{
    op->counted = result == ncclSuccess;
    if (result != ncclSuccess)
        settle(op, result);
}

static void gather(struct lc_op *op, const struct lc_choice *choice, const struct lc_redop *redop)
{
    ncclResult_t result = lc_gather_add(op, choice, redop);

    op->gathered = result == ncclSuccess;
    settle(op, result);
}

/* `settled`: nothing of the communicator is open in a group. */
static void route_reduction(struct lc_op *op, const struct lc_real *real, bool settled)
{
    struct lc_comm *comm = op->comm;
    struct lc_situation now = { .ranks = comm->facts.ranks,
                                .committed = true,
                                .grouped = lc_thread.depth > 0,
                                .redop = lc_redop_find(&comm->redops, op->redop),
                                .profile = lc_machine_profile() };
    struct lc_choice choice;
    ncclResult_t result;
    bool committed, ours;

    comm->had_all_to_alls |= op->kind == LC_OP_ALL_TO_ALL;
    choice = choose(op, &now);
    ours = choice.path != LC_PATH_NCCL &&
           atomic_load_explicit(&comm->windows, memory_order_relaxed) == 0;
    if (ours && settled && comm->set_up && has_rings(comm))
        lc_sizing_step(comm, op->stream);
    result = lc_agree_next(comm->agree, ours && is_set_up(comm, op->stream), &committed);
    settle_failure(op, result);
    if (result != ncclSuccess)
        return;
    op->generation = lc_agree_generation(comm->agree);
    if (ours && committed && (choice.path == LC_PATH_RINGS || choice.path == LC_PATH_EXCHANGE)) {
        choice = choose_again(op, &now, comm);
        ours = choice.path != LC_PATH_NCCL;
    }
    if (op->kind == LC_OP_ALL_TO_ALL && !now.grouped && (!ours || !committed))
        lc_mask_miss(comm);
    if (!ours || !committed) {
        op->outcome = ours                          ? LC_NCCL_NOT_COMMITTED
                      : choice.path == LC_PATH_NCCL ? (int)choice.outcome
                                                    : LC_NCCL_NO_FASTER_PATH;
        return;
    }
    op->outcome = (int)choice.outcome;
    lc_progress_path(&comm->progress, true, (uint8_t)choice.outcome);
    if (!now.grouped) {
        settle(op, choice.path == LC_PATH_EXCHANGE ? lc_messages_now(op)
                   : choice.path == LC_PATH_RINGS  ? lc_reduce_rings(op, &now.redop, &choice, real)
                                                   : lc_reduce_cast(op, &now.redop, real));
        return;
    }
    gather(op, &choice, &now.redop);
}

/* This rank may vote for pairs. Reasons of its own end here, too: launches that wait for each other's end would keep NCCL's
 * part of a group from beginning. */
static bool may_exchange(struct lc_comm *comm, cudaStream_t stream)
{
    return atomic_load_explicit(&comm->windows, memory_order_relaxed) == 0 &&
           is_set_up(comm, stream) && comm->sides && !comm->sides->blocking;
}

static void route_message(struct lc_op *op)
{
    struct lc_comm *comm = op->comm;
    const struct lc_config *config = lc_process_config();
    struct lc_situation now = { .ranks = comm->facts.ranks,
                                .rings = true,
                                .profile = lc_machine_profile() };
    const struct lc_choice choice = { LC_PATH_EXCHANGE, LC_RINGS_EXCHANGE };
    size_t size = lc_type_size(op->type);
    bool committed, takes;
    ncclResult_t result;
    uint64_t bytes;

    if (op->peer == comm->facts.rank && lc_thread.depth == 0)
        return; /* NCCL says what that is */
    if (!lc_policy_exchanges(config, now.profile) || now.ranks > (int)LK_RANKS_MAX ||
        op->peer < 0 || op->peer >= now.ranks || !size ||
        __builtin_mul_overflow(op->count, size, &bytes))
        return;
    result = lc_agree_error(comm->agree);
    if (result == ncclSuccess)
        result = lc_pairs_next(op, bytes, may_exchange(comm, op->stream), &committed);
    settle_failure(op, result);
    if (result != ncclSuccess)
        return;
    takes = lc_policy_takes_message(&now, bytes, config);
    if (!committed || (bytes > 0 && !takes)) {
        op->outcome = takes && was_refused_rings(comm)     ? LC_NCCL_NO_PEER_MEMORY
                      : takes                              ? LC_NCCL_NOT_COMMITTED
                      : bytes < config->exchange_min_bytes ? LC_NCCL_SMALL
                                                           : LC_NCCL_NO_FASTER_PATH;
        return;
    }
    op->outcome = (int)choice.outcome;
    lc_progress_path(&comm->progress, false, (uint8_t)choice.outcome);
    if (bytes == 0)
        settle(op, ncclSuccess); /* both ends know that there is nothing */
    else if (lc_thread.depth == 0)
        settle(op, lc_messages_now(op));
    else
        gather(op, &choice, &(struct lc_redop){ 0 });
}

void lc_route_refused(struct lc_op *op)
{
    if (is_collective(op->kind))
        lc_agree_refused(op->comm->agree);
    else
        lc_pairs_refused(op);
}

/* The vote of a communicator that needs none but for its tuner. */
static bool is_ready_to_tune(struct lc_comm *comm, cudaStream_t stream)
{
    return lc_agree_is_tuned(comm->agree) && is_set_up(comm, stream);
}

void lc_route(struct lc_op *op, const struct lc_real *real)
{
    struct lc_comm *comm = op->comm;
    bool settled = lc_thread.depth == 0 || !lc_gather_knows(comm);

    if (lc_thread.depth > 0) {
        ncclResult_t result = lc_gather_note(op);

        if (result != ncclSuccess) {
            settle(op, result);
            return;
        }
    }
    if (!is_collective(op->kind)) {
        route_message(op);
        return;
    }
    if (lc_policy_is_nccl(op, lc_thread.depth > 0, lc_process_config(), lc_machine_profile())) {
        bool committed;

        op->outcome = LC_NCCL_NO_FASTER_PATH;
        settle_failure(op,
                       lc_agree_next(comm->agree, is_ready_to_tune(comm, op->stream), &committed));
        return;
    }
    route_reduction(op, real, settled);
}
