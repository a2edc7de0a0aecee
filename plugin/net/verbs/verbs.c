/* SPDX-License-Identifier: Apache-2.0
 *
 * The transport's table: what NCCL's threads call. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/settings.h"
#include "plugin/net/tcp/device.h"
#include "plugin/net/transport.h"
#include "plugin/net/verbs/data.h"
#include "plugin/net/verbs/service.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define NS_PER_S ((int64_t)1000000000)

struct lc_net_context {
    int traffic_class;
};

/* Written once by `configure`. */
static pthread_once_t configured = PTHREAD_ONCE_INIT;
static int64_t timeout_ns;
static bool has_address;
static union lc_tcp_address
    side_address; /* where side sockets listen: NCCL's bootstrap interface */
static uint32_t side_scope;

static void configure(void)
{
    const struct lc_config *config = lc_net_settings();
    struct lc_tcp_device *found = NULL;
    int n = 0;

    timeout_ns = (config->net_timeout ? config->net_timeout : 1) * NS_PER_S;
    if (lc_verbs_service_prepare() || lc_verbs_devices() == 0 || lc_tcp_devices_find(0, &found, &n))
        return;
    if (n > 0) {
        side_address = found[0].address;
        side_scope = found[0].index;
        has_address = true;
    }
    lc_tcp_devices_free(found, n);
}

static int verbs_init(const struct lc_net_options *options, struct lc_net_context **out)
{
    struct lc_net_context *ctx;

    if (lc_verbs_forked())
        return -ECHILD;
    ctx = calloc(1, sizeof(*ctx));
    if (!ctx)
        return -ENOMEM;
    ctx->traffic_class = options ? options->traffic_class : -1;
    (void)pthread_once(&configured, configure);
    *out = ctx;
    return 0;
}

static void verbs_fini(struct lc_net_context *ctx)
{
    free(ctx);
}

static int verbs_devices(int *out)
{
    if (lc_verbs_forked())
        return -ECHILD;
    *out = has_address ? lc_verbs_devices() : 0;
    return 0;
}

static int verbs_properties(int dev, struct lc_net_properties *out)
{
    const struct lc_verbs_device *device = lc_verbs_device(dev);
    int support = LC_NET_HOST | LC_NET_CUDA | LC_NET_DMABUF;

    if (!device)
        return -EINVAL;
    for (int i = 0; i < device->n_ports; i++) {
        if (!device->ports[i]->nic->gpu_memory)
            support &= ~LC_NET_CUDA;
        if (!device->ports[i]->nic->dmabuf)
            support &= ~LC_NET_DMABUF;
    }
    *out = (struct lc_net_properties){ .name = device->name,
                                       .pci_path = device->ports[0]->nic->pci_path,
                                       .guid = device->ports[0]->nic->guid +
                                               device->ports[0]->number - 1u,
                                       .ptr_support = support,
                                       .reg_is_global = true,
                                       .speed_mbps = device->speed_mbps,
                                       .port = device->ports[0]->number,
                                       .latency_us = 1,
                                       .max_comms = 65536,
                                       .max_recvs = LC_VERBS_RECVS,
                                       .max_bytes = (size_t)LC_VERBS_MAX_BYTES,
                                       .rail_id = -1,
                                       .plane_id = -1 };
    return 0;
}

static int verbs_listen(struct lc_net_context *ctx, int dev, void *handle,
                        struct lc_net_listen **out)
{
    struct lc_verbs_device *device = lc_verbs_device(dev);
    struct lc_verbs_handle made;
    int err;

    if (lc_verbs_forked())
        return -ECHILD;
    if (!device || !has_address)
        return -EINVAL;
    err = lc_verbs_service_listen(device, &side_address, timeout_ns, out);
    if (err)
        return err;
    lc_verbs_service_handle(*out, &made);
    memcpy(handle, &made, sizeof(made));
    return 0;
}

/* What a connection in the making has come to: it is handed out, kept, or closed. */
static int look(struct lc_net_comm *comm, bool *ready)
{
    int err = 0;

    *ready = false;
    if (pthread_mutex_trylock(&comm->lock)) /* the thread is at work on it */
        return 0;
    err = comm->error;
    *ready = !err && comm->state == LC_VERBS_RUN;
    (void)pthread_mutex_unlock(&comm->lock);
    return err;
}

static int begin(const struct lc_net_context *ctx, struct lc_verbs_device *device,
                 struct lc_verbs_handle *handle, struct lc_net_comm **out)
{
    union lc_tcp_address address;
    struct lc_net_comm *comm;
    int err;

    err = lc_tcp_address_read(&handle->address, side_scope, &address);
    if (err)
        return err;
    comm = lc_verbs_comm_new(device, true, -1, timeout_ns);
    if (!comm)
        return -ENOMEM;
    (void)lc_tcp_address_text(&address, comm->peer);
    memcpy(comm->token, handle->token, sizeof(comm->token));
    comm->traffic_class = ctx ? ctx->traffic_class : -1;
    do {
        err = getrandom(&comm->ticket, sizeof(comm->ticket), 0) < 0 ? -errno : 0;
    } while (!err && !comm->ticket);
    (void)pthread_mutex_lock(&comm->lock);
    if (!err)
        err = lc_verbs_service_dial(comm, &address);
    if (!err)
        lc_verbs_comm_hello(comm);
    (void)pthread_mutex_unlock(&comm->lock);
    if (err) {
        lc_verbs_comm_free(comm);
        return err;
    }
    handle->ticket = comm->ticket;
    *out = comm;
    return 0;
}

/* A route that is missing for a moment ends no job. */
static int wait_for_route(struct lc_verbs_handle *handle)
{
    int64_t now = lc_now_ns();

    handle->ticket = 0;
    if (!handle->unreachable_ns)
        handle->unreachable_ns = now;
    if (now - handle->unreachable_ns < timeout_ns)
        return 0;
    handle->unreachable_ns = 0;
    lc_error("no route to the peer for %d s", (int)(timeout_ns / NS_PER_S));
    return -EREMOTEIO;
}

static int verbs_connect(struct lc_net_context *ctx, int dev, void *memory,
                         struct lc_net_comm **out)
{
    struct lc_verbs_device *device = lc_verbs_device(dev);
    struct lc_verbs_handle handle;
    struct lc_net_comm *comm = NULL;
    bool ready = false;
    int err;

    if (lc_verbs_forked())
        return -ECHILD;
    if (!device)
        return -EINVAL;
    err = lc_verbs_handle_read(memory, &handle);
    if (err)
        return err;
    if (handle.ticket)
        comm = lc_verbs_service_take(handle.ticket, handle.token);
    if (comm)
        err = look(comm, &ready);
    else
        err = begin(ctx, device, &handle, &comm);
    if (err == -EHOSTUNREACH) {
        lc_verbs_service_close(comm);
        *out = NULL;
        err = wait_for_route(&handle);
    } else if (err) {
        lc_verbs_service_close(comm);
        handle.ticket = 0;
    } else if (ready) {
        *out = comm;
    } else {
        lc_verbs_service_offer(comm);
        *out = NULL;
    }
    memcpy(memory, &handle, sizeof(handle));
    return err;
}

static int verbs_accept(struct lc_net_listen *listen, struct lc_net_comm **out)
{
    struct lc_net_comm *comm;
    bool ready;
    int err;

    if (lc_verbs_forked())
        return -ECHILD;
    comm = lc_verbs_service_incoming(listen);
    if (!comm) {
        *out = NULL;
        return 0;
    }
    err = look(comm, &ready);
    if (err) {
        lc_verbs_service_close(comm);
        return err;
    }
    if (!ready)
        lc_verbs_service_put_back(listen, comm);
    *out = ready ? comm : NULL;
    return 0;
}

static int verbs_reg_mr(struct lc_net_comm *comm, void *data, size_t size, int type,
                        struct lc_net_mr **out)
{
    if (lc_verbs_forked())
        return -ECHILD;
    if (type != LC_NET_HOST && type != LC_NET_CUDA)
        return -EINVAL;
    for (int i = 0; type == LC_NET_CUDA && i < comm->dev->n_ports; i++)
        if (!comm->dev->ports[i]->nic->gpu_memory)
            return -ENOTSUP;
    if (size == 0) {
        *out = NULL;
        return 0;
    }
    return lc_verbs_mr_open(comm->dev, data, size, -1, 0, out);
}

static int verbs_reg_dmabuf(struct lc_net_comm *comm, void *data, size_t size, int type,
                            uint64_t offset, int fd, struct lc_net_mr **out)
{
    if (lc_verbs_forked())
        return -ECHILD;
    for (int i = 0; i < comm->dev->n_ports; i++)
        if (!comm->dev->ports[i]->nic->dmabuf)
            return -ENOTSUP;
    if (fd < 0 || size == 0)
        return -EINVAL;
    return lc_verbs_mr_open(comm->dev, data, size, fd, offset, out);
}

static int verbs_dereg(struct lc_net_comm *comm, struct lc_net_mr *mr)
{
    return lc_verbs_forked() ? -ECHILD : lc_verbs_service_dereg(comm, mr);
}

static int verbs_isend(struct lc_net_comm *comm, void *data, size_t size, int tag,
                       struct lc_net_mr *mr, struct lc_net_request **out)
{
    int err;

    *out = NULL;
    if (lc_verbs_forked())
        return -ECHILD;
    if (pthread_mutex_trylock(&comm->lock))
        return 0;
    lc_verbs_data_move(comm);
    err = comm->error;
    if (!err)
        err = lc_verbs_data_send(comm, data, size, tag, mr, out);
    (void)pthread_mutex_unlock(&comm->lock);
    return err;
}

static int verbs_irecv(struct lc_net_comm *comm, int n, void *const *data, const size_t *sizes,
                       const int *tags, struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    int err;

    *out = NULL;
    if (lc_verbs_forked())
        return -ECHILD;
    if (pthread_mutex_trylock(&comm->lock))
        return 0;
    err = comm->error;
    if (!err)
        err = lc_verbs_data_recv(comm, n, data, sizes, tags, mrs, out);
    (void)pthread_mutex_unlock(&comm->lock);
    return err;
}

/* Unlike the others it cannot say "call again", so it waits for the thread, which waits for nobody. */
static int verbs_iflush(struct lc_net_comm *comm, int n, void *const *data, const int *sizes,
                        struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    int err;

    *out = NULL;
    if (lc_verbs_forked())
        return -ECHILD;
    (void)pthread_mutex_lock(&comm->lock);
    err = comm->error;
    if (!err)
        err = lc_verbs_data_flush(comm, n, data, sizes, mrs, out);
    (void)pthread_mutex_unlock(&comm->lock);
    return err;
}

static int verbs_test(struct lc_net_request *request, bool *done, size_t *sizes)
{
    struct lc_net_comm *comm = request->comm;
    int err = 0;

    *done = false;
    if (lc_verbs_forked())
        return -ECHILD;
    if (pthread_mutex_trylock(&comm->lock))
        return 0;
    lc_verbs_data_move(comm);
    if (request->done) {
        lc_verbs_data_end(request, sizes);
        *done = true;
    } else {
        err = comm->error;
    }
    (void)pthread_mutex_unlock(&comm->lock);
    return err;
}

const struct lc_net_ops lc_net_verbs = {
    .name = "verbs",
    .init = verbs_init,
    .fini = verbs_fini,
    .devices = verbs_devices,
    .properties = verbs_properties,
    .listen = verbs_listen,
    .connect = verbs_connect,
    .accept = verbs_accept,
    .reg_mr = verbs_reg_mr,
    .reg_dmabuf = verbs_reg_dmabuf,
    .dereg = verbs_dereg,
    .isend = verbs_isend,
    .irecv = verbs_irecv,
    .iflush = verbs_iflush,
    .test = verbs_test,
    .close_send = lc_verbs_service_close,
    .close_recv = lc_verbs_service_close,
    .close_listen = lc_verbs_service_unlisten,
};
