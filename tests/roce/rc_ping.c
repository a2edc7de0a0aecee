/* SPDX-License-Identifier: Apache-2.0
 *
 * rc_ping DEVICE ADDRESS DEVICE ADDRESS: one message there and one back over a reliable connection between two RDMA
 * devices of this machine. Shows that the guest is fit for the tests of the verbs transport. */
#include "tests/check.h"

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <string.h>
#include <time.h>

enum {
    BYTES = 4096,
    WAIT_SECONDS = 20
};

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    union ibv_gid gid;
    uint8_t gid_index;
    unsigned char memory[BYTES];
};

static struct ibv_context *open_device(const char *name)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = NULL;

    CHECK(list);
    for (int i = 0; list[i] && !context; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name))
            context = ibv_open_device(list[i]);
    ibv_free_device_list(list);
    return context;
}

/* The GID that carries an IPv4 address ends in it, behind ::ffff. */
static void find_gid(struct end *end, const char *address)
{
    static const unsigned char prefix[12] = { [10] = 0xff, [11] = 0xff };
    struct in_addr wanted;

    CHECK(inet_pton(AF_INET, address, &wanted) == 1);
    for (int i = 0; i < 16; i++) {
        if (ibv_query_gid(end->context, 1, i, &end->gid))
            continue;
        if (!memcmp(end->gid.raw, prefix, 12) && !memcmp(end->gid.raw + 12, &wanted, 4)) {
            end->gid_index = (uint8_t)i;
            return;
        }
    }
    CHECK(!"no GID has the address");
}

static void set_up(struct end *end, const char *device, const char *address)
{
    struct ibv_qp_init_attr init = {
        .qp_type = IBV_QPT_RC,
        .cap = {4, 4, 1, 1, 0}
    };
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

    end->context = open_device(device);
    CHECK(end->context);
    find_gid(end, address);
    end->pd = ibv_alloc_pd(end->context);
    CHECK(end->pd);
    end->mr = ibv_reg_mr(end->pd, end->memory, BYTES, IBV_ACCESS_LOCAL_WRITE);
    CHECK(end->mr);
    end->cq = ibv_create_cq(end->context, 8, NULL, NULL, 0);
    CHECK(end->cq);
    init.send_cq = init.recv_cq = end->cq;
    end->qp = ibv_create_qp(end->pd, &init);
    CHECK(end->qp);
    CHECK(!ibv_modify_qp(end->qp, &attr,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

static void join(struct end *end, const struct end *peer)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer->qp->qp_num,
        .rq_psn = 1,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1},
    };

    attr.ah_attr.grh = (struct ibv_global_route){ .dgid = peer->gid,
                                                  .sgid_index = end->gid_index,
                                                  .hop_limit = 64 };
    CHECK(!ibv_modify_qp(end->qp, &attr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                                 .sq_psn = 1,
                                 .timeout = 18,
                                 .retry_cnt = 7,
                                 .rnr_retry = 7,
                                 .max_rd_atomic = 1 };
    CHECK(!ibv_modify_qp(end->qp, &attr,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void await(struct end *end, enum ibv_wc_opcode opcode)
{
    const struct timespec pause = { 0, 1000000 };
    struct timespec begin, now;
    struct ibv_wc wc;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    while (ibv_poll_cq(end->cq, 1, &wc) == 0) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        CHECK(now.tv_sec - begin.tv_sec < WAIT_SECONDS);
        nanosleep(&pause, NULL);
    }
    if (wc.status)
        fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status));
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == opcode);
}

static void message_arrives(struct end *from, struct end *to, int seed)
{
    struct ibv_sge target = { (uintptr_t)to->memory, BYTES, to->mr->lkey };
    struct ibv_recv_wr recv = { .sg_list = &target, .num_sge = 1 }, *bad_recv;
    struct ibv_sge source = { (uintptr_t)from->memory, BYTES, from->mr->lkey };
    struct ibv_send_wr send = { .sg_list = &source,
                                .num_sge = 1,
                                .opcode = IBV_WR_SEND,
                                .send_flags = IBV_SEND_SIGNALED },
                       *bad_send;

    for (int i = 0; i < BYTES; i++)
        from->memory[i] = (unsigned char)(seed + i * 7);
    memset(to->memory, 0, BYTES);
    CHECK(!ibv_post_recv(to->qp, &recv, &bad_recv));
    CHECK(!ibv_post_send(from->qp, &send, &bad_send));
    await(from, IBV_WC_SEND);
    await(to, IBV_WC_RECV);
    CHECK(!memcmp(from->memory, to->memory, BYTES));
}

int main(int argc, char **argv)
{
    static struct end a, b;

    CHECK(argc == 5);
    set_up(&a, argv[1], argv[2]);
    set_up(&b, argv[3], argv[4]);
    join(&a, &b);
    join(&b, &a);
    message_arrives(&a, &b, 1);
    message_arrives(&b, &a, 2);
    printf("%s <-> %s: %d bytes each way\n", argv[1], argv[3], BYTES);
    return 0;
}
