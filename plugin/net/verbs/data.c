/* SPDX-License-Identifier: Apache-2.0
 *
 * How messages move. The receiver clears a group of buffers to send; the sender matches its messages to them by tag,
 * writes them in chunks over whichever path has the least to do for its speed, and ends the group on each path that it
 * used with a write that carries an immediate; the first of these brings the record of what really came. Writes of one
 * queue pair are placed in order, so that a path's last write says that all of it has arrived. */
#include "plugin/net/verbs/data.h"

#include "common/deadline.h"
#include "common/log.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <time.h>

#define CHUNK_MIN ((size_t)64 << 10)
#define CHUNK_MAX ((size_t)1 << 20)
#define CHUNK_ONE ((size_t)8 << 20) /* over one path nothing is gained by cutting */
#define WINDOW    ((size_t)4 << 20) /* of a path among several, so that the faster ones get more */
#define POLLS     32
#define DRAIN_MS  20

static int cts_path(const struct lc_net_comm *comm)
{
    return __builtin_ctz(comm->common);
}

static uint32_t shared_key(const struct lc_net_comm *comm, int path)
{
    return comm->shared_mr->mrs[path % comm->dev->n_ports]->lkey;
}

static struct lc_net_request *new_request(struct lc_net_comm *comm, enum lc_verbs_kind kind)
{
    for (int i = 0; i < LC_VERBS_REQUESTS; i++) {
        struct lc_net_request *request = &comm->requests[i];

        if (request->kind != LC_VERBS_FREE)
            continue;
        *request = (struct lc_net_request){ .comm = comm, .kind = kind };
        return request;
    }
    return NULL;
}

static struct lc_net_mr *hold(struct lc_net_mr *mr)
{
    if (mr)
        (void)atomic_fetch_add_explicit(&mr->users, 1, memory_order_relaxed);
    return mr;
}

static void let_go(struct lc_net_mr **mr)
{
    if (*mr)
        (void)atomic_fetch_sub_explicit(&(*mr)->users, 1, memory_order_release);
    *mr = NULL;
}

bool lc_verbs_data_uses(const struct lc_net_comm *comm, const struct lc_net_mr *mr)
{
    for (int i = 0; i < LC_VERBS_REQUESTS; i++)
        if (comm->requests[i].mr == mr)
            return true;
    for (int i = 0; i < LC_VERBS_GROUPS; i++)
        for (int k = 0; k < comm->incoming[i].n; k++)
            if (comm->incoming[i].mrs[k] == mr)
                return true;
    return false;
}

void lc_verbs_data_abandon(struct lc_net_comm *comm)
{
    for (int i = 0; i < LC_VERBS_REQUESTS; i++)
        let_go(&comm->requests[i].mr);
    for (int i = 0; i < LC_VERBS_GROUPS; i++)
        for (int k = 0; k < comm->incoming[i].n; k++)
            let_go(&comm->incoming[i].mrs[k]);
}

bool lc_verbs_data_waits(const struct lc_net_comm *comm)
{
    for (int i = 0; i < LC_VERBS_REQUESTS; i++)
        if (comm->requests[i].kind != LC_VERBS_FREE && !comm->requests[i].done)
            return true;
    return false;
}

static int post_cts_buffer(struct lc_net_comm *comm, int path, int i)
{
    return lc_verbs_path_post_recv(&comm->paths[path], (uint64_t)i, &comm->shared->cts[i],
                                   sizeof(*comm->shared->cts), shared_key(comm, path));
}

int lc_verbs_data_prepare(struct lc_net_comm *comm, int path)
{
    int err = 0;

    if (comm->sender && path != cts_path(comm))
        return 0;
    for (int i = 0; i < LC_VERBS_RQ && !err; i++) {
        if (comm->sender)
            err = post_cts_buffer(comm, path, i);
        else
            err = lc_verbs_path_post_recv(&comm->paths[path], LC_VERBS_END_ID, NULL, 0, 0);
    }
    return err;
}

void lc_verbs_data_stop(struct lc_net_comm *comm)
{
    comm->cts_n = comm->cts_todo = 0;
    for (int i = 0; i < LC_VERBS_GROUPS; i++) {
        struct lc_verbs_incoming *in = &comm->incoming[i];

        in->arrived = 0;
        in->cts_busy = false;
        in->cts_wanted = in->open;
        comm->cts_todo += in->open;
    }
    for (int i = 0; i < LC_VERBS_REQUESTS; i++)
        comm->requests[i].flush_left = comm->requests[i].flush_posted = 0;
}

uint32_t lc_verbs_data_open(const struct lc_net_comm *comm)
{
    uint32_t open = 0;

    for (int i = 0; i < LC_VERBS_GROUPS; i++)
        open |= (uint32_t)comm->incoming[i].open << i;
    return open;
}

/* ---- sender ---- */

static void complete_outgoing(struct lc_net_comm *comm, struct lc_verbs_outgoing *out)
{
    for (int i = 0; i < out->n; i++) {
        let_go(&out->sends[i]->mr);
        out->sends[i]->done = true;
    }
    out->known = false;
    comm->barren = 0;
}

void lc_verbs_data_resume(struct lc_net_comm *comm, uint64_t posted, uint32_t open, bool run)
{
    if (run)
        comm->post_seq = comm->cts_seq;
    for (int i = 0; i < LC_VERBS_GROUPS; i++) {
        struct lc_verbs_outgoing *out = &comm->outgoing[i];
        bool theirs_open = open >> i & 1;

        if (!out->known)
            continue;
        /* The peer's slot holds this group, or one that is later by whole rounds. */
        if (out->seq >= posted) {
            lc_verbs_comm_fail(comm, -EPROTO, "the peer has forgotten a receive");
            return;
        }
        if (theirs_open && posted - out->seq <= LC_VERBS_GROUPS) {
            if (!run)
                continue;
            out->posted = false;
            out->used = out->imm = out->unacked = 0;
            for (int k = 0; k < out->n; k++)
                if (out->sends[k])
                    out->sends[k]->posted = 0;
            if (out->seq < comm->post_seq)
                comm->post_seq = out->seq;
        } else if (out->matched < out->n) {
            lc_verbs_comm_fail(comm, -EPROTO, "the peer has what was not sent");
            return;
        } else {
            complete_outgoing(comm, out);
        }
    }
}

/* Clear-to-sends in the order in which they came, as long as their slots are free. */
static void adopt_cts(struct lc_net_comm *comm)
{
    while (comm->cts_n) {
        int at = comm->cts_queue[comm->cts_first];
        const struct lc_verbs_cts *cts = &comm->shared->cts[at];
        struct lc_verbs_outgoing *out = &comm->outgoing[cts->seq % LC_VERBS_GROUPS];

        if (cts->seq > comm->cts_seq) {
            lc_verbs_comm_fail(comm, -EPROTO, "the peer skipped a receive");
            return;
        }
        if (cts->seq == comm->cts_seq) {
            if (out->known)
                return;
            *out = (struct lc_verbs_outgoing){ .known = true, .seq = cts->seq, .n = (int)cts->n };
            memcpy(out->buffers, cts->buffers, cts->n * sizeof(*cts->buffers));
            comm->cts_seq++;
        } /* else said again after a repair, and known */
        comm->cts_first = (comm->cts_first + 1) % LC_VERBS_CTS_BUFS;
        comm->cts_n--;
        if (post_cts_buffer(comm, cts_path(comm), at)) {
            lc_verbs_comm_path_failed(comm, cts_path(comm), "cannot post a receive");
            return;
        }
    }
}

static void on_cts(struct lc_net_comm *comm, const struct ibv_wc *wc)
{
    if (wc->wr_id >= LC_VERBS_CTS_BUFS || comm->cts_n == LC_VERBS_CTS_BUFS ||
        lc_verbs_cts_check(&comm->shared->cts[wc->wr_id], wc->byte_len)) {
        lc_verbs_comm_fail(comm, -EPROTO, "the peer sent what is no receive");
        return;
    }
    comm->cts_queue[(comm->cts_first + comm->cts_n++) % LC_VERBS_CTS_BUFS] = (uint16_t)wc->wr_id;
}

static size_t chunk_size(const struct lc_net_comm *comm, size_t size)
{
    size_t n = (size_t)__builtin_popcount(comm->common);
    size_t chunk = (size / 2 / n + 4095) & ~(size_t)4095;

    if (n == 1)
        return CHUNK_ONE;
    if (chunk < CHUNK_MIN)
        return CHUNK_MIN;
    return chunk < CHUNK_MAX ? chunk : CHUNK_MAX;
}

/* The path that would be the first to be done with it; -1: all are full. */
static int pick_path(const struct lc_net_comm *comm, size_t chunk, uint64_t seq)
{
    bool one = __builtin_popcount(comm->common) == 1;
    uint64_t best_time = UINT64_MAX;
    int best = -1;

    for (int k = 0; k < comm->n_paths; k++) {
        int i = (int)((seq + (uint64_t)k) % (uint64_t)comm->n_paths);
        const struct lc_verbs_path *path = &comm->paths[i];
        uint64_t time;

        if (!(comm->common >> i & 1) || lc_verbs_path_room(path) <= LC_VERBS_IMMS ||
            (!one && path->bytes && path->bytes + chunk > WINDOW))
            continue;
        time = (path->bytes + chunk) * 1000 / (uint64_t)path->port->speed_mbps;
        if (time < best_time) {
            best_time = time;
            best = i;
        }
    }
    return best;
}

static bool post(struct lc_net_comm *comm, int i, struct ibv_send_wr *wr, struct lc_verbs_note note)
{
    int err = lc_verbs_path_post(&comm->paths[i], wr, note);

    if (err)
        lc_verbs_comm_path_failed(comm, i, strerror(-err));
    return !err;
}

static bool post_message(struct lc_net_comm *comm, struct lc_verbs_outgoing *out, int k)
{
    struct lc_net_request *send = out->sends[k];
    size_t size = send->sizes[0];

    while (send->posted < size) {
        size_t chunk = chunk_size(comm, size);
        int i = pick_path(comm, chunk, out->seq);
        struct ibv_sge sge;
        struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE };

        if (i < 0)
            return false;
        if (chunk > size - send->posted)
            chunk = size - send->posted;
        if (chunk > comm->paths[i].port->max_msg)
            chunk = comm->paths[i].port->max_msg;
        sge.addr = send->data + send->posted;
        sge.length = (uint32_t)chunk;
        sge.lkey = send->mr->mrs[i % comm->dev->n_ports]->lkey;
        wr.wr.rdma.remote_addr = out->buffers[k].addr + send->posted;
        wr.wr.rdma.rkey = out->buffers[k].keys[i];
        if (!post(comm, i, &wr,
                  (struct lc_verbs_note){ out->seq, (uint32_t)chunk, LC_VERBS_WRITE }))
            return false;
        send->posted += chunk;
        out->used |= 1u << i;
        out->unacked++;
    }
    return true;
}

static void fill_record(struct lc_net_comm *comm, const struct lc_verbs_outgoing *out)
{
    struct lc_verbs_record *record = &comm->shared->records[out->seq % LC_VERBS_GROUPS];

    record->seq = out->seq;
    record->n = (uint64_t)out->n;
    for (int i = 0; i < out->n; i++)
        record->sizes[i] = out->sends[i]->sizes[0];
}

static bool post_ends(struct lc_net_comm *comm, struct lc_verbs_outgoing *out)
{
    uint64_t slot = out->seq % LC_VERBS_GROUPS;
    int lead;

    if (!out->used)
        out->used = 1u << cts_path(comm);
    lead = __builtin_ctz(out->used);
    for (int i = 0; i < comm->n_paths; i++) {
        struct ibv_sge sge = { (uintptr_t)&comm->shared->records[slot],
                               sizeof(*comm->shared->records), shared_key(comm, i) };
        struct ibv_send_wr wr = { .sg_list = &sge,
                                  .num_sge = i == lead,
                                  .opcode = IBV_WR_RDMA_WRITE_WITH_IMM };

        if (!((out->used & ~out->imm) >> i & 1))
            continue;
        if (!lc_verbs_path_room(&comm->paths[i]))
            return false;
        if (i == lead)
            fill_record(comm, out);
        if (i == lead && comm->paths[i].inline_max >= sge.length)
            wr.send_flags = IBV_SEND_INLINE;
        wr.imm_data = htonl(LC_VERBS_IMM(out->seq, out->used));
        wr.wr.rdma.remote_addr = comm->theirs.paths[i].record +
                                 slot * sizeof(*comm->shared->records);
        wr.wr.rdma.rkey = comm->theirs.paths[i].record_key;
        if (!post(comm, i, &wr, (struct lc_verbs_note){ out->seq, 0, LC_VERBS_WRITE }))
            return false;
        out->imm |= 1u << i;
        out->unacked++;
    }
    return true;
}

static bool post_group(struct lc_net_comm *comm, struct lc_verbs_outgoing *out)
{
    for (int i = 0; i < out->n; i++)
        if (out->sends[i] && !post_message(comm, out, i))
            return false;
    if (out->matched < out->n || !post_ends(comm, out))
        return false;
    out->posted = true;
    return true;
}

static void post_groups(struct lc_net_comm *comm)
{
    for (; comm->post_seq < comm->cts_seq; comm->post_seq++) {
        struct lc_verbs_outgoing *out = &comm->outgoing[comm->post_seq % LC_VERBS_GROUPS];

        /* Another group in its slot, or none: it is complete. */
        if (out->known && out->seq == comm->post_seq && !out->posted && !post_group(comm, out))
            return;
    }
}

/* ---- receiver ---- */

static void send_cts(struct lc_net_comm *comm)
{
    uint64_t seq = comm->recv_seq > LC_VERBS_GROUPS ? comm->recv_seq - LC_VERBS_GROUPS : 0;
    int i = cts_path(comm);

    for (; comm->cts_todo && seq < comm->recv_seq; seq++) {
        struct lc_verbs_incoming *in = &comm->incoming[seq % LC_VERBS_GROUPS];
        struct lc_verbs_cts *copy = &comm->shared->cts[seq % LC_VERBS_GROUPS];
        struct ibv_sge sge = { (uintptr_t)copy,
                               (uint32_t)(offsetof(struct lc_verbs_cts, buffers) +
                                          (size_t)in->n * sizeof(*copy->buffers)),
                               shared_key(comm, i) };
        struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND };

        if (!in->cts_wanted)
            continue;
        if (!lc_verbs_path_room(&comm->paths[i]))
            return;
        memcpy(copy, &in->cts, sge.length);
        if (comm->paths[i].inline_max >= sge.length)
            wr.send_flags = IBV_SEND_INLINE;
        if (!post(comm, i, &wr, (struct lc_verbs_note){ seq, 0, LC_VERBS_CTS }))
            return;
        in->cts_wanted = false;
        in->cts_busy = true;
        comm->cts_todo--;
    }
}

static void complete_incoming(struct lc_net_comm *comm, struct lc_verbs_incoming *in)
{
    const struct lc_verbs_record *record = &comm->shared->records[in->seq % LC_VERBS_GROUPS];

    if (record->seq != in->seq || record->n != (uint64_t)in->n) {
        lc_verbs_comm_fail(comm, -EPROTO, "the peer's record is of another message");
        return;
    }
    for (int i = 0; i < in->n; i++) {
        if (record->sizes[i] > in->cts.buffers[i].size) {
            lc_verbs_comm_fail(comm, -EMSGSIZE, "a message is longer than its receive");
            return;
        }
        in->request->sizes[i] = record->sizes[i];
    }
    for (int i = 0; i < in->n; i++)
        let_go(&in->mrs[i]);
    in->request->done = true;
    in->open = false;
    comm->barren = 0;
}

static void on_end(struct lc_net_comm *comm, int i, uint32_t imm)
{
    struct lc_verbs_incoming *in = &comm->incoming[LC_VERBS_IMM_SLOT(imm)];
    unsigned mask = LC_VERBS_IMM_MASK(imm);

    /* Soft-RoCE has been seen to complete one write twice. */
    if (!in->open || LC_VERBS_IMM_ROUND(imm) != (in->seq / LC_VERBS_GROUPS & 0x7fffff)) {
        lc_debug("%s: an end that was not due: %08x", comm->paths[i].port->name, imm);
        return;
    }
    if (!(mask >> i & 1) || mask & ~comm->common) {
        lc_verbs_comm_fail(comm, -EPROTO, "the peer sent over a way that there is not");
        return;
    }
    in->arrived |= 1u << i;
    if ((in->arrived & mask) == mask)
        complete_incoming(comm, in);
}

/* ---- both ---- */

static void on_sent(struct lc_net_comm *comm, struct lc_verbs_path *path)
{
    struct lc_verbs_note note = path->notes[path->note_first];
    struct lc_verbs_outgoing *out = &comm->outgoing[note.seq % LC_VERBS_GROUPS];

    path->note_first = (path->note_first + 1) % LC_VERBS_SQ;
    path->sq_used--;
    path->bytes -= note.bytes;
    path->failures = 0;
    if (note.work == LC_VERBS_CTS)
        comm->incoming[note.seq % LC_VERBS_GROUPS].cts_busy = false;
    /* Where only writes get lost, repairs go on in vain; but then there is one, and nobody asks. */
    if (note.work == LC_VERBS_PROBE)
        comm->barren = 0;
    if (note.work != LC_VERBS_WRITE)
        return;
    /* Else the peer's farewell has completed it already. */
    if (out->known && out->seq == note.seq && --out->unacked == 0 && out->posted)
        complete_outgoing(comm, out);
}

/* These say that somebody asks for memory that there is not: the same would happen again. */
static bool is_final(enum ibv_wc_status status)
{
    return status == IBV_WC_LOC_LEN_ERR || status == IBV_WC_LOC_PROT_ERR ||
           status == IBV_WC_REM_ACCESS_ERR;
}

static void on_completion(struct lc_net_comm *comm, int i, const struct ibv_wc *wc)
{
    if (wc->status != IBV_WC_SUCCESS) {
        const char *text = lc_ibv.ibv_wc_status_str(wc->status);

        /* The memory of a process that is killed may go before its queue pairs. */
        if (is_final(wc->status))
            lc_verbs_comm_fail(comm, wc->status == IBV_WC_REM_ACCESS_ERR ? -EREMOTEIO : -EIO,
                               "%s: %s", comm->paths[i].port->name, text);
        else
            lc_verbs_comm_path_failed(comm, i, text);
        return;
    }
    if (wc->wr_id == LC_VERBS_SEND_ID) {
        on_sent(comm, &comm->paths[i]);
        return;
    }
    comm->paths[i].recvs--;
    if (wc->opcode == IBV_WC_RECV) {
        on_cts(comm, wc);
        return;
    }
    if (lc_verbs_path_post_recv(&comm->paths[i], LC_VERBS_END_ID, NULL, 0, 0))
        lc_verbs_comm_path_failed(comm, i, "cannot post a receive");
    on_end(comm, i, ntohl(wc->imm_data));
}

/* What the sender has been told has arrived must not be forgotten with the queue pair. Receives that were not used are
 * given back by the device, so that one knows when all is seen; soft-RoCE does not give them back. */
void lc_verbs_data_drain(struct lc_net_comm *comm)
{
    const struct timespec pause = { 0, 100000 };
    struct ibv_wc wc;

    for (int i = 0; i < comm->n_paths && !comm->sender; i++)
        if (comm->common >> i & 1)
            lc_verbs_path_halt(&comm->paths[i]);
    for (int i = 0; i < comm->n_paths && !comm->sender; i++) {
        struct lc_verbs_path *path = &comm->paths[i];
        struct lc_deadline deadline = lc_deadline_in_ms(DRAIN_MS);

        while (comm->common >> i & 1 && path->recvs && !lc_deadline_passed(deadline)) {
            if (ibv_poll_cq(path->cq, 1, &wc) <= 0) {
                nanosleep(&pause, NULL);
                continue;
            }
            if (wc.wr_id != LC_VERBS_END_ID)
                continue;
            path->recvs--;
            if (wc.status == IBV_WC_SUCCESS && !comm->error)
                on_end(comm, i, ntohl(wc.imm_data));
        }
    }
}

static bool running(const struct lc_net_comm *comm)
{
    return comm->state == LC_VERBS_RUN && !comm->restart && !comm->error;
}

static void poll_paths(struct lc_net_comm *comm)
{
    struct ibv_wc wc[POLLS];

    for (int i = 0; i < comm->n_paths; i++) {
        int n = comm->common >> i & 1 ? ibv_poll_cq(comm->paths[i].cq, POLLS, wc) : 0;

        if (n < 0)
            lc_verbs_comm_path_failed(comm, i, "the completion queue cannot be read");
        for (int k = 0; k < n && running(comm); k++)
            on_completion(comm, i, &wc[k]);
        if (!running(comm))
            return;
    }
}

void lc_verbs_data_probe(struct lc_net_comm *comm)
{
    for (int i = 0; i < comm->n_paths && running(comm); i++) {
        struct lc_verbs_path *path = &comm->paths[i];
        struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE };

        if (!(comm->common >> i & 1) || path->sq_used || !lc_verbs_path_room(path))
            continue;
        wr.wr.rdma.remote_addr = comm->theirs.paths[i].record;
        wr.wr.rdma.rkey = comm->theirs.paths[i].record_key;
        (void)post(comm, i, &wr, (struct lc_verbs_note){ 0, 0, LC_VERBS_PROBE });
    }
}

static void post_flush(struct lc_net_comm *comm, struct lc_net_request *flush)
{
    if (!flush->flush_left)
        flush->flush_left = comm->common;
    for (int i = 0; i < comm->n_paths; i++) {
        struct lc_verbs_path *path = &comm->paths[i];
        struct ibv_sge sge = { (uintptr_t)&comm->shared->flushed[i], 1, shared_key(comm, i) };
        struct ibv_send_wr wr = { .wr_id = (uint64_t)(flush - comm->requests),
                                  .sg_list = &sge,
                                  .num_sge = 1,
                                  .opcode = IBV_WR_RDMA_READ,
                                  .send_flags = IBV_SEND_SIGNALED },
                           *bad;
        int err;

        if (!((flush->flush_left & ~flush->flush_posted) >> i & 1))
            continue;
        err = path->flush_qp ? 0 : lc_verbs_path_open_flush(path);
        if (err) {
            lc_verbs_comm_path_failed(comm, i, strerror(-err));
            return;
        }
        wr.wr.rdma.remote_addr = flush->flush_addr;
        wr.wr.rdma.rkey = flush->mr->mrs[i % comm->dev->n_ports]->rkey;
        if (!ibv_post_send(path->flush_qp, &wr, &bad)) /* full: next time */
            flush->flush_posted |= 1u << i;
    }
}

static void move_flushes(struct lc_net_comm *comm)
{
    struct ibv_wc wc;

    for (int i = 0; i < comm->n_paths; i++) {
        while (comm->paths[i].flush_cq && ibv_poll_cq(comm->paths[i].flush_cq, 1, &wc) > 0) {
            struct lc_net_request *flush = &comm->requests[wc.wr_id % LC_VERBS_REQUESTS];

            if (wc.status != IBV_WC_SUCCESS) {
                lc_verbs_comm_path_failed(comm, i, lc_ibv.ibv_wc_status_str(wc.status));
                return;
            }
            flush->flush_left &= ~(1u << i);
            if (flush->flush_left == 0) {
                let_go(&flush->mr);
                flush->done = true;
            }
        }
    }
    for (int i = 0; i < LC_VERBS_REQUESTS; i++)
        if (comm->requests[i].kind == LC_VERBS_FLUSH && !comm->requests[i].done && running(comm))
            post_flush(comm, &comm->requests[i]);
}

void lc_verbs_data_move(struct lc_net_comm *comm)
{
    if (running(comm))
        poll_paths(comm);
    if (comm->sender) {
        if (running(comm))
            adopt_cts(comm);
        if (running(comm))
            post_groups(comm);
    } else {
        if (running(comm) && comm->cts_todo)
            send_cts(comm);
        if (running(comm) && comm->flushes)
            move_flushes(comm);
    }
}

/* ---- requests ---- */

int lc_verbs_data_send(struct lc_net_comm *comm, void *data, size_t size, int tag,
                       struct lc_net_mr *mr, struct lc_net_request **out)
{
    struct lc_verbs_outgoing *group = &comm->outgoing[comm->match_seq % LC_VERBS_GROUPS];
    int i;

    *out = NULL;
    if (size && !mr)
        return -EINVAL;
    comm->asked = true;
    if (!group->known || group->seq != comm->match_seq)
        return 0;
    for (i = 0; i < group->n; i++)
        if (!group->sends[i] && group->buffers[i].tag == tag)
            break;
    if (i == group->n)
        return 0;
    if (size > group->buffers[i].size) {
        lc_verbs_comm_fail(comm, -EMSGSIZE,
                           "a message of %zu bytes is longer than its receive of %llu", size,
                           (unsigned long long)group->buffers[i].size);
        return -EMSGSIZE;
    }
    *out = new_request(comm, LC_VERBS_SEND);
    if (!*out)
        return 0;
    (*out)->n = 1;
    (*out)->sizes[0] = size;
    (*out)->data = (uintptr_t)data;
    (*out)->mr = hold(mr);
    group->sends[i] = *out;
    if (++group->matched == group->n)
        comm->match_seq++;
    lc_verbs_data_move(comm);
    return 0;
}

int lc_verbs_data_recv(struct lc_net_comm *comm, int n, void *const *data, const size_t *sizes,
                       const int *tags, struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    struct lc_verbs_incoming *in = &comm->incoming[comm->recv_seq % LC_VERBS_GROUPS];

    *out = NULL;
    if (n < 1 || n > LC_VERBS_RECVS)
        return -EINVAL;
    for (int i = 0; i < n; i++)
        if (sizes[i] > LC_VERBS_MAX_BYTES || (sizes[i] && !mrs[i]))
            return -EINVAL;
    if (in->open || in->cts_busy)
        return 0;
    *out = new_request(comm, LC_VERBS_RECV);
    if (!*out)
        return 0;
    (*out)->n = n;
    *in = (struct lc_verbs_incoming){ .open = true,
                                      .cts_wanted = true,
                                      .seq = comm->recv_seq++,
                                      .n = n,
                                      .request = *out };
    in->cts.seq = in->seq;
    in->cts.n = (uint32_t)n;
    for (int i = 0; i < n; i++) {
        struct lc_verbs_buffer *buffer = &in->cts.buffers[i];

        buffer->addr = (uintptr_t)data[i];
        buffer->size = sizes[i];
        buffer->tag = tags[i];
        in->mrs[i] = hold(mrs[i]);
        for (int k = 0; k < comm->n_paths; k++)
            buffer->keys[k] = mrs[i] ? mrs[i]->mrs[k % comm->dev->n_ports]->rkey : 0;
    }
    comm->cts_todo++;
    lc_verbs_data_move(comm);
    return 0;
}

int lc_verbs_data_flush(struct lc_net_comm *comm, int n, void *const *data, const int *sizes,
                        struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    int last = n - 1;

    *out = NULL;
    while (last >= 0 && sizes[last] == 0)
        last--;
    if (last < 0)
        return 0;
    if (!mrs[last])
        return -EINVAL;
    *out = new_request(comm, LC_VERBS_FLUSH);
    if (!*out)
        return -EAGAIN; /* NULL would say that there is nothing to wait for */
    (*out)->flush_addr = (uintptr_t)data[last];
    (*out)->mr = hold(mrs[last]);
    comm->flushes++;
    lc_verbs_data_move(comm);
    return 0;
}

void lc_verbs_data_end(struct lc_net_request *request, size_t *sizes)
{
    for (int i = 0; sizes && i < request->n; i++)
        sizes[i] = request->sizes[i];
    request->comm->flushes -= request->kind == LC_VERBS_FLUSH;
    request->kind = LC_VERBS_FREE;
}
