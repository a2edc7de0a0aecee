/* SPDX-License-Identifier: Apache-2.0
 *
 * The executor: runs a plan's collectives one after the other, then its sends and receives all at once.
 *
 * A reduction adds in the order of NCCL's ring: the shard of rank j starts at rank j + 1 and ends at j. Here the
 * owner of the shard does all of the adding, and everybody sends it his part. No deadlock is possible: the owner
 * takes block after block from each rank in that order, a part precedes everything else in its ring, and all that a
 * rank has to send moves whenever it waits. In place is safe: a block of the result arrives after the owner has taken
 * our part of that block. */
#include "tests/rig/nccl_internal.h"

#include <stdlib.h>
#include <string.h>

const char *rig_kind_name(int kind)
{
    static const char *const names[] = {
        [RIG_ALL_REDUCE] = "ncclAllReduce",
        [RIG_REDUCE] = "ncclReduce",
        [RIG_REDUCE_SCATTER] = "ncclReduceScatter",
        [RIG_ALL_GATHER] = "ncclAllGather",
        [RIG_BROADCAST] = "ncclBroadcast",
        [RIG_ALL_TO_ALL] = "ncclAlltoAll",
        [RIG_GATHER] = "ncclGather",
        [RIG_SCATTER] = "ncclScatter",
        [RIG_SEND] = "ncclSend",
        [RIG_RECV] = "ncclRecv",
    };

    return kind >= RIG_ALL_REDUCE && kind <= RIG_RECV ? names[kind] : "unknown work";
}

static bool is_reduction(const struct rig_op *op)
{
    return op->kind == RIG_ALL_REDUCE || op->kind == RIG_REDUCE || op->kind == RIG_REDUCE_SCATTER;
}

static struct rig_header header_of(const struct rig_op *op, uint64_t seq)
{
    struct rig_header header = {
        .kind = op->kind,
        .seq = seq,
        .count = op->count,
        .type = op->type,
        .root = op->root,
    };

    if (is_reduction(op))
        header.redop = op->redop.kind;
    return header;
}

/* Compares the collective with what peers have said about theirs of the same number. Catches what the messages do
 * not, as two broadcasts with different roots. */
static void check_with_peers(ncclComm_t comm, const struct rig_header *header, uint32_t choice)
{
    struct rig_slot *slots = comm->clique->shared->slot;
    struct rig_check *mine = &slots[comm->rank].checks[header->seq % RIG_CHECKS];
    uint64_t what = (uint64_t)choice << 53 | (uint64_t)header->kind << 48 |
                    (uint64_t)header->type << 40 | (uint64_t)header->redop << 32 |
                    (uint32_t)header->root;

    atomic_store(&mine->seq, 0);
    atomic_store(&mine->what, what);
    atomic_store(&mine->count, header->count);
    atomic_store(&mine->seq, header->seq + 1);
    for (int peer = 0; peer < comm->n; peer++) {
        struct rig_check *check = &slots[peer].checks[header->seq % RIG_CHECKS];
        uint64_t seq = atomic_load(&check->seq);
        uint64_t his_what = atomic_load(&check->what), his_count = atomic_load(&check->count);

        if (seq != header->seq + 1 || atomic_load(&check->seq) != seq)
            continue;
        if (his_what != what || his_count != header->count)
            lcrig_fail(
                "mismatch in collective number %llu: rank %d runs %s (%llu x %s, op %u, root "
                "%d, choice %x), rank %d runs %s (%llu x %s, op %u, root %d, choice %x)",
                (unsigned long long)header->seq, comm->rank, rig_kind_name((int)header->kind),
                (unsigned long long)header->count, rig_type_name((int)header->type), header->redop,
                header->root, choice, peer, rig_kind_name((int)(his_what >> 48 & 0x1f)),
                (unsigned long long)his_count, rig_type_name((int)(his_what >> 40 & 0xff)),
                (unsigned)(his_what >> 32 & 0xff), (int32_t)his_what, (unsigned)(his_what >> 53));
    }
}

static void use_buffers(ncclComm_t comm, const struct rig_op *op)
{
    size_t bytes = op->count * rig_type_size(op->type), all = bytes * (size_t)comm->n;
    bool is_root = op->root == comm->rank;
    size_t in = bytes, out = bytes;

    switch (op->kind) {
    case RIG_REDUCE: out = is_root ? bytes : 0; break;
    case RIG_REDUCE_SCATTER: in = all; break;
    case RIG_ALL_GATHER: out = all; break;
    case RIG_BROADCAST: in = is_root ? bytes : 0; break;
    case RIG_ALL_TO_ALL: in = out = all; break;
    case RIG_GATHER: out = is_root ? all : 0; break;
    case RIG_SCATTER: in = is_root ? all : 0; break;
    case RIG_SEND: out = 0; break;
    case RIG_RECV: in = 0; break;
    default: break;
    }
    if (in)
        lcrig_buffer_use(op->send, in, false);
    if (out)
        lcrig_buffer_use(op->recv, out, true);
}

static void copy(char *to, const char *from, size_t bytes)
{
    if (to != from)
        memmove(to, from, bytes);
}

/* ---- operations that only move ---- */

static bool run_all_gather(ncclComm_t comm, const struct rig_op *op,
                           const struct rig_header *header)
{
    size_t bytes = op->count * rig_type_size(op->type);

    copy(op->recv + bytes * comm->rank, op->send, bytes);
    for (int peer = 0; peer < comm->n; peer++) {
        if (peer == comm->rank)
            continue;
        rig_lane_post_out(comm, peer, op->send, bytes, header);
        rig_lane_post_in(comm, peer, op->recv + bytes * peer, bytes, header);
    }
    return rig_lane_drain(comm, RIG_DRAIN_ALL);
}

static bool run_all_to_all(ncclComm_t comm, const struct rig_op *op,
                           const struct rig_header *header)
{
    size_t bytes = op->count * rig_type_size(op->type), all = bytes * (size_t)comm->n;

    if (op->recv < op->send + all && op->send < op->recv + all)
        lcrig_fail("ncclAlltoAll whose buffers overlap");
    copy(op->recv + bytes * comm->rank, op->send + bytes * comm->rank, bytes);
    for (int peer = 0; peer < comm->n; peer++) {
        if (peer == comm->rank)
            continue;
        rig_lane_post_out(comm, peer, op->send + bytes * peer, bytes, header);
        rig_lane_post_in(comm, peer, op->recv + bytes * peer, bytes, header);
    }
    return rig_lane_drain(comm, RIG_DRAIN_ALL);
}

/* Broadcast and scatter: stride is what lies between two ranks' parts in the root's buffer. */
static bool run_from_root(ncclComm_t comm, const struct rig_op *op, const struct rig_header *header,
                          size_t stride)
{
    size_t bytes = op->count * rig_type_size(op->type);

    if (comm->rank != op->root) {
        rig_lane_post_in(comm, op->root, op->recv, bytes, header);
        return rig_lane_drain(comm, RIG_DRAIN_ALL);
    }
    for (int peer = 0; peer < comm->n; peer++)
        if (peer != comm->rank)
            rig_lane_post_out(comm, peer, op->send + stride * peer, bytes, header);
    if (!rig_lane_drain(comm, RIG_DRAIN_ALL))
        return false;
    copy(op->recv, op->send + stride * comm->rank, bytes);
    return true;
}

static bool run_gather(ncclComm_t comm, const struct rig_op *op, const struct rig_header *header)
{
    size_t bytes = op->count * rig_type_size(op->type);

    if (comm->rank != op->root) {
        rig_lane_post_out(comm, op->root, op->send, bytes, header);
        return rig_lane_drain(comm, RIG_DRAIN_ALL);
    }
    copy(op->recv + bytes * comm->rank, op->send, bytes);
    for (int peer = 0; peer < comm->n; peer++)
        if (peer != comm->rank)
            rig_lane_post_in(comm, peer, op->recv + bytes * peer, bytes, header);
    return rig_lane_drain(comm, RIG_DRAIN_ALL);
}

/* ---- reductions ---- */

static void pre_multiply(ncclComm_t comm, const struct rig_op *op, char *data, size_t count,
                         uint64_t scalar)
{
    if (op->redop.kind == RIG_PREMUL || (op->redop.kind == RIG_AVG && rig_type_is_float(op->type)))
        rig_scale(op->type, data, count, scalar);
}

/* Adds one rank's part (which is overwritten) to the partial result. */
static void add_part(ncclComm_t comm, const struct rig_op *op, char *acc, char *part, size_t count,
                     uint64_t scalar, bool first)
{
    pre_multiply(comm, op, part, count, scalar);
    if (first)
        memcpy(acc, part, count * rig_type_size(op->type));
    else
        rig_accumulate(op->type, op->redop.kind, acc, part, count);
}

static void post_divide(ncclComm_t comm, const struct rig_op *op, char *acc, size_t count)
{
    if (op->redop.kind == RIG_AVG && !rig_type_is_float(op->type))
        rig_divide_ints(op->type, acc, count, comm->n);
}

/* Takes all peers' parts of a shard that is ours, adds, stores; with `spread` sends each block to all. */
static bool reduce_shard(ncclComm_t comm, const struct rig_op *op, const struct rig_header *header,
                         const char *mine, char *result, size_t count, bool spread)
{
    size_t size = rig_type_size(op->type), step = RIG_BLOCK_BYTES / size;

    for (int i = 1; i < comm->n; i++)
        rig_lane_post_in(comm, (comm->rank + i) % comm->n, NULL, 0, header);
    if (!rig_lane_drain(comm, RIG_DRAIN_IN))
        return false;
    for (size_t at = 0; at < count; at += step) {
        size_t now = count - at < step ? count - at : step;

        for (int i = 1; i < comm->n; i++) {
            int peer = (comm->rank + i) % comm->n;

            rig_lane_post_in(comm, peer, comm->block_in, now * size, NULL);
            if (!rig_lane_drain(comm, peer))
                return false;
            add_part(comm, op, comm->block_acc, comm->block_in, now, comm->lanes[peer].got.scalar,
                     i == 1);
        }
        memcpy(comm->block_in, mine + at * size, now * size);
        add_part(comm, op, comm->block_acc, comm->block_in, now, header->scalar, comm->n == 1);
        post_divide(comm, op, comm->block_acc, now);
        memcpy(result + at * size, comm->block_acc, now * size);
        for (int i = 1; spread && i < comm->n; i++)
            rig_lane_post_out(comm, (comm->rank + i) % comm->n, result + at * size, now * size,
                              NULL);
    }
    return true;
}

struct shard {
    size_t first, count;
};

static struct shard shard_of(size_t count, int n, int rank)
{
    size_t each = (count + (size_t)n - 1) / (size_t)n, first = each * (size_t)rank;
    struct shard shard = { first, each };

    if (first >= count)
        return (struct shard){ count, 0 };
    if (count - first < each)
        shard.count = count - first;
    return shard;
}

/* Small messages: everybody gets everything and adds all shards itself, in the same order as the owners would. */
static bool run_small_all_reduce(ncclComm_t comm, const struct rig_op *op,
                                 const struct rig_header *header)
{
    size_t size = rig_type_size(op->type), bytes = op->count * size;
    uint64_t scalars[RIG_RANKS_MAX];

    for (int peer = 0; peer < comm->n; peer++) {
        if (peer == comm->rank)
            continue;
        rig_lane_post_out(comm, peer, op->send, bytes, header);
        rig_lane_post_in(comm, peer, comm->small + (size_t)peer * RIG_SMALL_BYTES, bytes, header);
    }
    memcpy(comm->small + (size_t)comm->rank * RIG_SMALL_BYTES, op->send, bytes);
    if (!rig_lane_drain(comm, RIG_DRAIN_ALL))
        return false;
    for (int peer = 0; peer < comm->n; peer++)
        scalars[peer] = peer == comm->rank ? header->scalar : comm->lanes[peer].got.scalar;
    for (int owner = 0; owner < comm->n; owner++) {
        struct shard shard = shard_of(op->count, comm->n, owner);

        for (int i = 1; i <= comm->n; i++) {
            int rank = (owner + i) % comm->n;

            add_part(comm, op, comm->block_acc,
                     comm->small + (size_t)rank * RIG_SMALL_BYTES + shard.first * size, shard.count,
                     scalars[rank], i == 1);
        }
        post_divide(comm, op, comm->block_acc, shard.count);
        memcpy(op->recv + shard.first * size, comm->block_acc, shard.count * size);
    }
    return true;
}

static bool run_all_reduce(ncclComm_t comm, const struct rig_op *op,
                           const struct rig_header *header)
{
    size_t size = rig_type_size(op->type);
    struct shard mine = shard_of(op->count, comm->n, comm->rank);

    if (op->count * size <= RIG_SMALL_BYTES)
        return run_small_all_reduce(comm, op, header);
    for (int peer = 0; peer < comm->n; peer++) {
        struct shard shard = shard_of(op->count, comm->n, peer);

        if (peer != comm->rank)
            rig_lane_post_out(comm, peer, op->send + shard.first * size, shard.count * size,
                              header);
    }
    if (!reduce_shard(comm, op, header, op->send + mine.first * size, op->recv + mine.first * size,
                      mine.count, true))
        return false;
    for (int peer = 0; peer < comm->n; peer++) {
        struct shard shard = shard_of(op->count, comm->n, peer);

        if (peer != comm->rank)
            rig_lane_post_in(comm, peer, op->recv + shard.first * size, shard.count * size, NULL);
    }
    return rig_lane_drain(comm, RIG_DRAIN_ALL);
}

static bool run_reduce_scatter(ncclComm_t comm, const struct rig_op *op,
                               const struct rig_header *header)
{
    size_t bytes = op->count * rig_type_size(op->type);

    for (int peer = 0; peer < comm->n; peer++)
        if (peer != comm->rank)
            rig_lane_post_out(comm, peer, op->send + bytes * peer, bytes, header);
    return reduce_shard(comm, op, header, op->send + bytes * comm->rank, op->recv, op->count,
                        false) &&
           rig_lane_drain(comm, RIG_DRAIN_ALL);
}

static bool run_reduce(ncclComm_t comm, const struct rig_op *op, const struct rig_header *header)
{
    if (comm->rank == op->root)
        return reduce_shard(comm, op, header, op->send, op->recv, op->count, false);
    rig_lane_post_out(comm, op->root, op->send, op->count * rig_type_size(op->type), header);
    return rig_lane_drain(comm, RIG_DRAIN_ALL);
}

/* ---- plans ---- */

static void run_collective(ncclComm_t comm, const struct rig_op *op)
{
    struct rig_header header = header_of(op, comm->seq++);

    check_with_peers(comm, &header, op->choice);
    if (op->count == 0)
        return;
    rig_tuner_take_time(comm, op->choice);
    if (op->redop.kind == RIG_AVG)
        header.scalar = rig_reciprocal(op->type, comm->n);
    else if (op->redop.kind == RIG_PREMUL && op->redop.device_scalar)
        memcpy(&header.scalar, op->redop.device_scalar, rig_type_size(op->type));
    else
        header.scalar = op->redop.scalar;
    switch (op->kind) {
    case RIG_ALL_REDUCE: run_all_reduce(comm, op, &header); break;
    case RIG_REDUCE: run_reduce(comm, op, &header); break;
    case RIG_REDUCE_SCATTER: run_reduce_scatter(comm, op, &header); break;
    case RIG_ALL_GATHER: run_all_gather(comm, op, &header); break;
    case RIG_BROADCAST: run_from_root(comm, op, &header, 0); break;
    case RIG_ALL_TO_ALL: run_all_to_all(comm, op, &header); break;
    case RIG_GATHER: run_gather(comm, op, &header); break;
    case RIG_SCATTER: run_from_root(comm, op, &header, op->count * rig_type_size(op->type)); break;
    default: break;
    }
}

/* The launch has made sure that sends to and receives from the rank itself pair up. */
static void run_self(const struct rig_plan *plan)
{
    size_t at = 0;

    for (size_t i = 0; i < plan->count; i++) {
        const struct rig_op *send = &plan->ops[i], *recv;

        if (send->kind != RIG_SEND || send->root != plan->comm->rank)
            continue;
        while (plan->ops[at].kind != RIG_RECV || plan->ops[at].root != plan->comm->rank)
            at++;
        recv = &plan->ops[at++];
        copy(recv->recv, send->send, send->count * rig_type_size(send->type));
    }
}

static void run_p2p(const struct rig_plan *plan)
{
    ncclComm_t comm = plan->comm;

    for (size_t i = 0; i < plan->count; i++) {
        const struct rig_op *op = &plan->ops[i];
        size_t bytes = op->count * rig_type_size(op->type);
        struct rig_header header = { .kind = RIG_SEND, .count = bytes };

        if (!rig_op_is_p2p(op) || op->root == comm->rank)
            continue;
        if (op->kind == RIG_SEND)
            rig_lane_post_out(comm, op->root, op->send, bytes, &header);
        else
            rig_lane_post_in(comm, op->root, op->recv, bytes, &header);
    }
    run_self(plan);
    rig_lane_drain(comm, RIG_DRAIN_ALL);
}

static void set_running(ncclComm_t comm, int change)
{
    pthread_mutex_lock(&comm->lock);
    comm->running += (unsigned)change;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

void rig_plan_run(void *arg)
{
    struct rig_plan *plan = arg;
    ncclComm_t comm = plan->comm;

    set_running(comm, 1);
    pthread_mutex_lock(&comm->exec_lock);
    for (size_t i = 0; i < plan->count; i++)
        use_buffers(comm, &plan->ops[i]);
    for (size_t i = 0; i < plan->count; i++) {
        if (atomic_load(&comm->stop) || atomic_load(&comm->broken))
            break;
        if (!rig_op_is_p2p(&plan->ops[i]))
            run_collective(comm, &plan->ops[i]);
    }
    if (!atomic_load(&comm->stop) && !atomic_load(&comm->broken))
        run_p2p(plan);
    pthread_mutex_unlock(&comm->exec_lock);
    set_running(comm, -1);
}

void rig_plan_release(void *arg)
{
    struct rig_plan *plan = arg;
    ncclComm_t comm = plan->comm;

    pthread_mutex_lock(&comm->lock);
    comm->plans--;
    comm->in_graphs -= plan->in_graph;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    free(plan->ops);
    free(plan);
    rig_comm_unref(comm);
}
