/* SPDX-License-Identifier: Apache-2.0
 *
 * A plugin, opened and called as NCCL does: ours, or another one. */
#include "perf/net/net.h"

#include "plugin/net/tcp/wire.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>

static void *library;
static const struct lc_nccl_net_v12
    *net; /* of a v11 all but getProperties and makeVDevice, which are not called */
static void *context;

__attribute__((format(printf, 5, 6))) static void logger(enum lc_nccl_log_level level,
                                                         unsigned long subsystems, const char *file,
                                                         int line, const char *fmt, ...)
{
    va_list ap;

    if (level != LC_NCCL_LOG_WARN)
        return;
    va_start(ap, fmt);
    (void)fputs("loongcomm-bench net: the plugin: ", stderr);
    (void)vfprintf(stderr, fmt, ap);
    (void)fputc('\n', stderr);
    va_end(ap);
}

static int failed(const char *call, enum lc_nccl_result result)
{
    fprintf(stderr, "loongcomm-bench net: the plugin's %s: error %d\n", call, (int)result);
    return -EIO;
}

/* From the function that uses it. */
#define NET(call)                                \
    do {                                         \
        enum lc_nccl_result result_ = net->call; \
        if (result_ != LC_NCCL_SUCCESS)          \
            return failed(#call, result_);       \
    } while (0)

static int plugin_init(const char *path)
{
    struct lc_nccl_comm_config config = { .trafficClass = LC_NCCL_UNDEFINED };
    int devices = 0;

    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "loongcomm-bench net: %s\n", dlerror());
        return -ENOENT;
    }
    net = dlsym(library, "ncclNetPlugin_v12");
    if (!net)
        net = dlsym(library, "ncclNetPlugin_v11");
    if (!net) {
        fprintf(stderr, "loongcomm-bench net: %s has neither ncclNetPlugin_v12 nor v11\n", path);
        return -ENOENT;
    }
    NET(init(&context, 1, &config, logger, NULL));
    NET(devices(&devices));
    if (devices < 1) {
        fprintf(stderr, "loongcomm-bench net: the plugin offers no device\n");
        return -ENODEV;
    }
    return 0;
}

static void plugin_fini(void)
{
    if (net && context)
        (void)net->finalize(context);
    if (library)
        dlclose(library);
}

static int plugin_listen(struct lc_bnet_handle *handle, void **out)
{
    NET(listen(context, 0, handle->bytes, out));
    return 0;
}

static int plugin_connect(struct lc_bnet_handle *handle, void **out)
{
    struct lc_nccl_net_device_handle *device = NULL;

    NET(connect(context, 0, handle->bytes, out, &device));
    return 0;
}

static int plugin_accept(void *listener, void **out)
{
    struct lc_nccl_net_device_handle *device = NULL;

    NET(accept(listener, out, &device));
    return 0;
}

static int plugin_reg(void *comm, void *data, size_t size, void **out)
{
    NET(regMr(comm, data, size, LC_NCCL_PTR_HOST, out));
    return 0;
}

static void plugin_dereg(void *comm, void *mr)
{
    (void)net->deregMr(comm, mr);
}

static int plugin_isend(void *comm, void *data, size_t size, void *mr, void **out)
{
    *out = NULL;
    NET(isend(comm, data, size, 0, mr, NULL, out));
    return 0;
}

static int plugin_irecv(void *comm, void *data, size_t size, void *mr, void **out)
{
    int tag = 0;

    *out = NULL;
    NET(irecv(comm, 1, &data, &size, &tag, &mr, NULL, out));
    return 0;
}

static int plugin_test(void *request, bool *done, size_t *size)
{
    int over = 0;
    int got = 0;

    NET(test(request, &over, &got));
    *done = over;
    *size = (size_t)got;
    return 0;
}

static void plugin_close_send(void *comm)
{
    (void)net->closeSend(comm);
}

static void plugin_close_recv(void *comm)
{
    (void)net->closeRecv(comm);
}

static void plugin_close_listen(void *listener)
{
    (void)net->closeListen(listener);
}

static int plugin_get_port(const struct lc_bnet_handle *handle, uint16_t *port)
{
    struct lc_tcp_handle h;

    memcpy(&h, handle->bytes, sizeof(h));
    if (h.magic != LC_TCP_MAGIC || h.address.family != 4)
        return -EPROTO;
    *port = h.address.port;
    return 0;
}

static void plugin_set_port(struct lc_bnet_handle *handle, uint16_t port)
{
    struct lc_tcp_handle h;

    memcpy(&h, handle->bytes, sizeof(h));
    h.address.port = port;
    memcpy(handle->bytes, &h, sizeof(h));
}

#define CALLS                                                                                     \
    .init = plugin_init, .fini = plugin_fini, .listen = plugin_listen, .connect = plugin_connect, \
    .accept = plugin_accept, .reg = plugin_reg, .dereg = plugin_dereg, .isend = plugin_isend,     \
    .irecv = plugin_irecv, .test = plugin_test, .close_send = plugin_close_send,                  \
    .close_recv = plugin_close_recv, .close_listen = plugin_close_listen

const struct lc_bnet_way lc_bnet_way_plugin = { .name = "loongcomm",
                                                CALLS,
                                                .get_port = plugin_get_port,
                                                .set_port = plugin_set_port };

const struct lc_bnet_way lc_bnet_way_peer = { .name = "peer", CALLS };
