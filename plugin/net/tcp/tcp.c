/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/transport.h"

#include <errno.h>

/* Nothing is offered yet: no devices, so that nothing else is called. */

static int tcp_init(const struct lc_net_options *options, struct lc_net_context **out)
{
    *out = NULL;
    return 0;
}

static void tcp_fini(struct lc_net_context *ctx)
{
}

static int tcp_devices(int *out)
{
    *out = 0;
    return 0;
}

static int tcp_properties(int dev, struct lc_net_properties *out)
{
    return -EINVAL;
}

static int tcp_listen(struct lc_net_context *ctx, int dev, void *handle, struct lc_net_listen **out)
{
    return -ENOTSUP;
}

static int tcp_connect(struct lc_net_context *ctx, int dev, void *handle, struct lc_net_comm **out)
{
    return -ENOTSUP;
}

static int tcp_accept(struct lc_net_listen *listen, struct lc_net_comm **out)
{
    return -ENOTSUP;
}

static int tcp_reg_mr(struct lc_net_comm *comm, void *data, size_t size, int type,
                      struct lc_net_mr **out)
{
    return -ENOTSUP;
}

static int tcp_reg_dmabuf(struct lc_net_comm *comm, void *data, size_t size, int type,
                          uint64_t offset, int fd, struct lc_net_mr **out)
{
    return -ENOTSUP;
}

static int tcp_dereg(struct lc_net_comm *comm, struct lc_net_mr *mr)
{
    return 0;
}

static int tcp_isend(struct lc_net_comm *comm, void *data, size_t size, int tag,
                     struct lc_net_mr *mr, struct lc_net_request **out)
{
    return -ENOTSUP;
}

static int tcp_irecv(struct lc_net_comm *comm, int n, void *const *data, const size_t *sizes,
                     const int *tags, struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    return -ENOTSUP;
}

static int tcp_iflush(struct lc_net_comm *comm, int n, void *const *data, const int *sizes,
                      struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    return -ENOTSUP;
}

static int tcp_test(struct lc_net_request *request, bool *done, size_t *sizes)
{
    return -ENOTSUP;
}

static void tcp_close(struct lc_net_comm *comm)
{
}

static void tcp_close_listen(struct lc_net_listen *listen)
{
}

const struct lc_net_ops lc_net_tcp = {
    .name = "tcp",
    .init = tcp_init,
    .fini = tcp_fini,
    .devices = tcp_devices,
    .properties = tcp_properties,
    .listen = tcp_listen,
    .connect = tcp_connect,
    .accept = tcp_accept,
    .reg_mr = tcp_reg_mr,
    .reg_dmabuf = tcp_reg_dmabuf,
    .dereg = tcp_dereg,
    .isend = tcp_isend,
    .irecv = tcp_irecv,
    .iflush = tcp_iflush,
    .test = tcp_test,
    .close_send = tcp_close,
    .close_recv = tcp_close,
    .close_listen = tcp_close_listen,
};
