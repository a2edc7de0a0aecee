/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/verbs/path.h"

#include "common/config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define INLINE_BYTES 128

/* 4.096 us << 16 = 0.27 s for each of 7 tries: a way that is down is noticed in about 2 s, and repair loses nothing. Not
 * the usual 7 retries: soft-RoCE takes that for "for ever". */
#define DEFAULT_TIMEOUT 16
#define DEFAULT_RETRIES 6

static uint8_t setting(const char *name, long dflt, long max)
{
    const char *text = lc_environment_get(name);
    char *end;
    long value;

    if (!text || !*text)
        return (uint8_t)dflt;
    value = strtol(text, &end, 10);
    return (uint8_t)(*end || value < 0 || value > max ? dflt : value);
}

static struct ibv_qp *make_qp(const struct lc_verbs_path *path, struct ibv_cq *cq, unsigned sends,
                              unsigned recvs, uint32_t inline_bytes)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = sends,
                .max_recv_wr = recvs,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = inline_bytes},
    };

    return lc_ibv.ibv_create_qp(path->port->nic->pd, &init);
}

static int to_init(const struct lc_verbs_path *path, struct ibv_qp *qp)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .pkey_index = setting("NCCL_IB_PKEY", 0, 255),
        .port_num = path->port->number,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    };

    return -lc_ibv.ibv_modify_qp(
        qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int lc_verbs_path_open(struct lc_verbs_path *path)
{
    unsigned most = path->port->nic->max_wr > 0 ? (unsigned)path->port->nic->max_wr : 64;
    int err;

    path->sq_max = most < LC_VERBS_SQ ? most : LC_VERBS_SQ;
    path->sq_used = path->note_first = path->recvs = 0;
    path->bytes = 0;
    if (getrandom(&path->psn, sizeof(path->psn), GRND_NONBLOCK) != (ssize_t)sizeof(path->psn))
        path->psn = (uint32_t)(uintptr_t)path;
    path->psn &= 0xffffff;
    path->cq = lc_ibv.ibv_create_cq(path->port->nic->context, (int)(path->sq_max + LC_VERBS_RQ),
                                    NULL, NULL, 0);
    if (!path->cq)
        return errno ? -errno : -EIO;
    path->inline_max = INLINE_BYTES;
    path->qp = make_qp(path, path->cq, path->sq_max, LC_VERBS_RQ, path->inline_max);
    if (!path->qp) {
        path->inline_max = 0;
        path->qp = make_qp(path, path->cq, path->sq_max, LC_VERBS_RQ, path->inline_max);
    }
    err = path->qp ? to_init(path, path->qp) : errno ? -errno : -EIO;
    if (err)
        lc_verbs_path_close(path);
    return err;
}

void lc_verbs_path_close(struct lc_verbs_path *path)
{
    if (path->qp)
        (void)lc_ibv.ibv_destroy_qp(path->qp);
    if (path->cq)
        (void)lc_ibv.ibv_destroy_cq(path->cq);
    path->qp = NULL;
    path->cq = NULL;
}

void lc_verbs_path_halt(struct lc_verbs_path *path)
{
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

    if (path->qp)
        (void)lc_ibv.ibv_modify_qp(path->qp, &attr, IBV_QP_STATE);
}

void lc_verbs_path_info(const struct lc_verbs_path *path, struct lc_verbs_path_info *out)
{
    out->qpn = path->qp->qp_num;
    out->psn = path->psn;
    out->lid = path->sight.lid;
    out->mtu = (uint8_t)path->sight.mtu;
    out->ethernet = path->port->ethernet;
    memcpy(out->gid, path->sight.gid.raw, sizeof(out->gid));
}

static int to_ready(const struct lc_verbs_path *path, struct ibv_qp *qp, uint32_t psn,
                    const struct lc_verbs_path_info *peer, int traffic_class)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = peer->mtu < path->sight.mtu ? (enum ibv_mtu)peer->mtu : path->sight.mtu,
        .dest_qp_num = peer->qpn,
        .rq_psn = peer->psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.dlid = peer->lid,
                    .sl = setting("NCCL_IB_SL", 0, 15),
                    .is_global = path->port->ethernet,
                    .port_num = path->port->number},
    };
    int err;

    if (path->port->ethernet) {
        attr.ah_attr.grh.sgid_index = path->sight.gid_index;
        attr.ah_attr.grh.hop_limit = 255;
        attr.ah_attr.grh.traffic_class = traffic_class >= 0 ? (uint8_t)traffic_class
                                                            : setting("NCCL_IB_TC", 0, 255);
        memcpy(attr.ah_attr.grh.dgid.raw, peer->gid, sizeof(peer->gid));
    }
    err = lc_ibv.ibv_modify_qp(qp, &attr,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                   IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                   IBV_QP_MIN_RNR_TIMER);
    if (err)
        return -err;
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .timeout = setting("NCCL_IB_TIMEOUT", DEFAULT_TIMEOUT, 31),
        .retry_cnt = setting("NCCL_IB_RETRY_CNT", DEFAULT_RETRIES, 7),
        .rnr_retry = 7,
        .sq_psn = psn,
        .max_rd_atomic = 1,
    };
    return -lc_ibv.ibv_modify_qp(qp, &attr,
                                 IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

int lc_verbs_path_join(struct lc_verbs_path *path, const struct lc_verbs_path_info *peer,
                       int traffic_class)
{
    if (peer->ethernet != path->port->ethernet)
        return -EPROTONOSUPPORT;
    return to_ready(path, path->qp, path->psn, peer, traffic_class);
}

int lc_verbs_path_open_flush(struct lc_verbs_path *path)
{
    struct lc_verbs_path_info self = { 0 };
    int err;

    path->flush_cq = lc_ibv.ibv_create_cq(path->port->nic->context, 64, NULL, NULL, 0);
    if (!path->flush_cq)
        return errno ? -errno : -EIO;
    path->flush_qp = make_qp(path, path->flush_cq, 32, 1, 0);
    if (!path->flush_qp) {
        err = errno ? -errno : -EIO;
        goto close_flush;
    }
    lc_verbs_path_info(path, &self);
    self.qpn = path->flush_qp->qp_num;
    self.psn = 0;
    err = to_init(path, path->flush_qp);
    if (!err)
        err = to_ready(path, path->flush_qp, 0, &self, -1);
    if (!err)
        return 0;
close_flush:
    lc_verbs_path_close_flush(path);
    return err;
}

void lc_verbs_path_close_flush(struct lc_verbs_path *path)
{
    if (path->flush_qp)
        (void)lc_ibv.ibv_destroy_qp(path->flush_qp);
    if (path->flush_cq)
        (void)lc_ibv.ibv_destroy_cq(path->flush_cq);
    path->flush_qp = NULL;
    path->flush_cq = NULL;
}

int lc_verbs_path_post(struct lc_verbs_path *path, struct ibv_send_wr *wr,
                       struct lc_verbs_note note)
{
    struct ibv_send_wr *bad;
    int err;

    wr->send_flags |= IBV_SEND_SIGNALED;
    wr->wr_id = LC_VERBS_SEND_ID;
    err = ibv_post_send(path->qp, wr, &bad);
    if (err)
        return -err;
    path->notes[(path->note_first + path->sq_used) % LC_VERBS_SQ] = note;
    path->sq_used++;
    path->bytes += note.bytes;
    return 0;
}

int lc_verbs_path_post_recv(struct lc_verbs_path *path, uint64_t id, void *data, uint32_t bytes,
                            uint32_t key)
{
    struct ibv_sge sge = { (uintptr_t)data, bytes, key };
    struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = bytes ? 1 : 0 }, *bad;

    int err = -ibv_post_recv(path->qp, &wr, &bad);

    path->recvs += !err;
    return err;
}
