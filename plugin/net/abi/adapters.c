/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's network plugin interfaces over one transport. They differ in types and in a few arguments; what is equal in
 * several versions is one function here, and nothing is kept but the context of interfaces that know none. */
#include "plugin/net/abi/adapters.h"

#include "common/log.h"
#include "plugin/net/abi/abi.h"
#include "plugin/net/settings.h"
#include "plugin/net/transport.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT    __attribute__((visibility("default")))
#define EARLY     16
#define MAX_RECVS 8 /* buffers of one irecv; as many as NCCL ever groups */

/* NCCL's test() reports sizes as int. */
#define MAX_BYTES LC_NCCL_MAX_BYTES_V8
_Static_assert(MAX_BYTES <= INT_MAX, "sizes are reported as int");
_Static_assert(LC_NET_HANDLE_BYTES == LC_NCCL_HANDLE_BYTES, "handles are passed through");
_Static_assert(LC_NET_MAX_REQUESTS >= LC_NCCL_MAX_REQUESTS, "NCCL has that many in flight");
_Static_assert((int)LC_NET_HOST == LC_NCCL_PTR_HOST && (int)LC_NET_CUDA == LC_NCCL_PTR_CUDA &&
                   (int)LC_NET_DMABUF == LC_NCCL_PTR_DMABUF,
               "types of memory are passed through");

/* Written under `setup`, read after it. */
static const struct lc_net_ops *net;

/* NCCL's own, the same at every call; written by init, read by any thread that logs. */
static lc_nccl_logger *nccl_log;

/* Of the interfaces before v11, whose init comes once for each load of the library, or again after the last communicator
 * went; under `lock`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lc_net_context *shared;
static bool shared_ready;

/* Connections and listeners that NCCL holds; any thread. */
static long open_objects;

/* Of the communicators that use TCP, one for each of their contexts; under `lock`. NCCL's threads may each be a rank of the
 * same one. */
static struct user {
    const struct lc_net_context *context;
    uint64_t comm_id;
    struct user *next;
} * users;

/* Set by inits that find devices, never cleared; under `lock`. */
static bool over_tcp;    /* of any interface */
static bool tells_apart; /* of one by which communicators are known */
static bool forgets;     /* one that uses it was not noted */

static enum lc_nccl_result to_nccl(int err)
{
    switch (err) {
    case 0: return LC_NCCL_SUCCESS;
    case -EINVAL: return LC_NCCL_INVALID_ARGUMENT;
    case -EMSGSIZE: return LC_NCCL_INVALID_USAGE;
    case -EREMOTEIO:
    case -EPROTO: return LC_NCCL_REMOTE_ERROR;
    default: return LC_NCCL_SYSTEM_ERROR;
    }
}

static void log_to_nccl(enum lc_log_level level, const char *file, int line, const char *text)
{
    static const enum lc_nccl_log_level levels[] = {
        [LC_LOG_ERROR] = LC_NCCL_LOG_WARN,  [LC_LOG_WARN] = LC_NCCL_LOG_WARN,
        [LC_LOG_INFO] = LC_NCCL_LOG_INFO,   [LC_LOG_DEBUG] = LC_NCCL_LOG_TRACE,
        [LC_LOG_TRACE] = LC_NCCL_LOG_TRACE,
    };
    lc_nccl_logger *log = __atomic_load_n(&nccl_log, __ATOMIC_RELAXED);

    if (log)
        log(levels[level], LC_NCCL_LOG_INIT | LC_NCCL_LOG_NET, file, line, "NET/loongcomm: %s",
            text);
}

/* What is said about the settings before they have told where to; of set_up's thread. Further lines are counted. */
static struct {
    enum lc_log_level level;
    const char *file; /* a literal */
    int line;
    char text[300];
} early[EARLY];
static unsigned early_count;

static void log_early(enum lc_log_level level, const char *file, int line, const char *text)
{
    unsigned n = early_count++;

    if (n >= EARLY)
        return;
    early[n].level = level;
    early[n].file = file;
    early[n].line = line;
    (void)snprintf(early[n].text, sizeof(early[n].text), "%s", text);
}

static void say_early(void)
{
    for (unsigned i = 0; i < early_count && i < EARLY; i++)
        if (early[i].level <= lc_log_max)
            lc_log_write(early[i].level, early[i].file, early[i].line, "%s", early[i].text);
    if (early_count > EARLY)
        lc_warn("%u more settings are not right", early_count - EARLY);
}

/* NCCL filters what its logger gets (NCCL_DEBUG), so it gets info, too; a file of ours has our level. */
static void set_up_log(void)
{
    bool to_nccl = __atomic_load_n(&nccl_log, __ATOMIC_RELAXED);
    const struct lc_config *config;
    enum lc_log_level level;
    int err = 0;

    lc_log_set_sink(log_early);
    config = lc_net_settings();
    level = config->log_level;
    if (config->log_file[0])
        err = lc_log_open_file(config->log_file);
    if (!config->log_file[0] || err) {
        if (to_nccl && level < LC_LOG_INFO)
            level = LC_LOG_INFO;
        lc_log_set_sink(to_nccl ? log_to_nccl : NULL);
    }
    lc_log_set_level(level);
    if (err)
        lc_warn("cannot append to %s (LOONGCOMM_LOG_FILE): %s", config->log_file, strerror(-err));
    say_early();
}

static void set_up(void)
{
    set_up_log();
    net = lc_net_choose();
}

/* As NCCL's own networks do: one line that says what is used. */
static void say_devices(void)
{
    struct lc_net_properties props;
    char text[300] = "";
    size_t used = 0;
    int count = 0;

    if (net->devices(&count))
        return;
    for (int i = 0; i < count && used < sizeof(text); i++) {
        if (!net->properties(i, &props))
            used += (size_t)snprintf(text + used, sizeof(text) - used, " [%d]%s", i, props.name);
    }
    lc_info("using %s over%s", net->name, text);
}

/* A device may be missing now and be there for the next communicator, when threads or descriptors are. */
static bool has_devices(void)
{
    int count = 0;

    return !net->devices(&count) && count > 0;
}

bool lc_net_is_over_tcp(uint64_t comm_id)
{
    bool known = false;

    pthread_mutex_lock(&lock);
    if (comm_id == 0 || !tells_apart)
        known = over_tcp;
    for (const struct user *u = users; u && !known; u = u->next)
        known = u->comm_id == comm_id;
    pthread_mutex_unlock(&lock);
    return known;
}

/* With `lock` held, as the next one. */
static void add_user(const struct lc_net_context *context, uint64_t comm_id)
{
    struct user *user = malloc(sizeof(*user));

    /* Ranks of this one must say the same: without memory for it the others are taken for it. */
    tells_apart = user != NULL && !forgets;
    forgets |= user == NULL;
    if (!user)
        return;
    *user = (struct user){ context, comm_id, users };
    users = user;
}

static void drop_user(const struct lc_net_context *context)
{
    for (struct user **link = &users; *link; link = &(*link)->next) {
        struct user *user = *link;

        if (user->context != context)
            continue;
        *link = user->next;
        free(user);
        return;
    }
}

/* With `lock` held. Never an error: some releases of NCCL cannot stand one. Where the transport is of no use it has no devices. */
static struct lc_net_context *begin(lc_nccl_logger *log, uint64_t comm_id, int traffic_class)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT, said = PTHREAD_ONCE_INIT;
    struct lc_net_options options = { .comm_id = comm_id, .traffic_class = traffic_class };
    struct lc_net_context *ctx = NULL;

    __atomic_store_n(&nccl_log, log, __ATOMIC_RELAXED);
    pthread_once(&once, set_up);
    if (net->init(&options, &ctx))
        return NULL;
    if (has_devices()) {
        pthread_once(&said, say_devices);
        over_tcp |= strcmp(net->name, "tcp") == 0;
        if (ctx && comm_id && over_tcp)
            add_user(ctx, comm_id);
    }
    return ctx;
}

static enum lc_nccl_result init_v6(lc_nccl_logger *log)
{
    pthread_mutex_lock(&lock);
    if (!shared_ready)
        shared = begin(log, 0, LC_NCCL_UNDEFINED);
    shared_ready = true;
    pthread_mutex_unlock(&lock);
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result init_v10(lc_nccl_logger *log, lc_nccl_profiler *profiler)
{
    return init_v6(log);
}

static enum lc_nccl_result init_v11(void **context, uint64_t comm_id,
                                    struct lc_nccl_comm_config *config, lc_nccl_logger *log,
                                    lc_nccl_profiler *profiler)
{
    pthread_mutex_lock(&lock);
    *context = begin(log, comm_id, config ? config->trafficClass : LC_NCCL_UNDEFINED);
    pthread_mutex_unlock(&lock);
    return LC_NCCL_SUCCESS;
}

/* NCCL 2.28.3 to 2.29.2 call this after an init without success, too. */
static enum lc_nccl_result finalize(void *context)
{
    if (!context)
        return LC_NCCL_SUCCESS;
    pthread_mutex_lock(&lock);
    drop_user(context);
    pthread_mutex_unlock(&lock);
    net->fini(context);
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result set_attr(void *context, struct lc_nccl_net_attr *attr)
{
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result devices(int *out)
{
    int count = 0;

    *out = net && !net->devices(&count) ? count : 0;
    return LC_NCCL_SUCCESS;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The newest form holds everything that an older one has. NCCL does not write to the texts. */
static enum lc_nccl_result properties_v12(int dev, struct lc_nccl_props_v12 *out)
{
    struct lc_net_properties from;
    int err = net->properties(dev, &from);

    if (err)
        return to_nccl(err);
    *out = (struct lc_nccl_props_v12){
        .name = (char *)from.name,
        .pciPath = (char *)from.pci_path,
        .guid = from.guid,
        .ptrSupport = from.ptr_support,
        .regIsGlobal = from.reg_is_global,
        .forceFlush = from.force_flush,
        .speed = from.speed_mbps,
        .port = from.port,
        .latency = from.latency_us,
        .maxComms = from.max_comms,
        .maxRecvs = from.max_recvs < MAX_RECVS ? from.max_recvs : MAX_RECVS,
        .netDeviceType = LC_NCCL_NET_DEVICE_HOST,
        .netDeviceVersion = 0,
        .vProps = {.ndevs = 1, .devs = { dev }},
        .maxP2pBytes = smaller(from.max_bytes, MAX_BYTES),
        .maxCollBytes = smaller(from.max_bytes, MAX_BYTES),
        .maxMultiRequestSize = 1,
        .railId = from.rail_id,
        .planeId = from.plane_id,
    };
    return LC_NCCL_SUCCESS;
}

#define SINCE_V6(p)                                                                           \
    .name = (p).name, .pciPath = (p).pciPath, .guid = (p).guid, .ptrSupport = (p).ptrSupport, \
    .speed = (p).speed, .port = (p).port, .latency = (p).latency, .maxComms = (p).maxComms,   \
    .maxRecvs = (p).maxRecvs
#define SINCE_V7(p) \
    SINCE_V6(p), .netDeviceType = (p).netDeviceType, .netDeviceVersion = (p).netDeviceVersion
#define SINCE_V8(p) SINCE_V7(p), .regIsGlobal = (p).regIsGlobal
#define SINCE_V9(p)                                                            \
    SINCE_V8(p), .forceFlush = (p).forceFlush, .maxP2pBytes = (p).maxP2pBytes, \
                 .maxCollBytes = (p).maxCollBytes,                             \
                 .vProps = { .ndevs = 1, .devs = { (p).vProps.devs[0] } }
#define SINCE_V11(p) SINCE_V9(p), .maxMultiRequestSize = (p).maxMultiRequestSize

#define PROPERTIES(version, members)                                                              \
    static enum lc_nccl_result properties_##version(int dev, struct lc_nccl_props_##version *out) \
    {                                                                                             \
        struct lc_nccl_props_v12 all;                                                             \
        enum lc_nccl_result result = properties_v12(dev, &all);                                   \
                                                                                                  \
        if (result == LC_NCCL_SUCCESS)                                                            \
            *out = (struct lc_nccl_props_##version){ members(all) };                              \
        return result;                                                                            \
    }
PROPERTIES(v6, SINCE_V6)
PROPERTIES(v7, SINCE_V7)
PROPERTIES(v8, SINCE_V8)
PROPERTIES(v9, SINCE_V9)
PROPERTIES(v11, SINCE_V11)
#undef PROPERTIES

/* What was opened, for the destructor: outputs are written in every case, as NCCL does not clear them before. */
static enum lc_nccl_result opened(int err, void *object, void **out)
{
    *out = err ? NULL : object;
    if (*out)
        __atomic_add_fetch(&open_objects, 1, __ATOMIC_RELAXED);
    return to_nccl(err);
}

static void closed(const void *object)
{
    if (object)
        __atomic_sub_fetch(&open_objects, 1, __ATOMIC_RELAXED);
}

static enum lc_nccl_result listen_v11(void *context, int dev, void *handle, void **out)
{
    struct lc_net_listen *listener = NULL;
    int err = net->listen(context, dev, handle, &listener);

    return opened(err, listener, out);
}

static enum lc_nccl_result listen_v6(int dev, void *handle, void **out)
{
    return listen_v11(shared, dev, handle, out);
}

/* Nothing is offered for device offload, so what it asks for is answered with nothing. */
static enum lc_nccl_result connect_v11(void *context, int dev, void *handle, void **out,
                                       struct lc_nccl_net_device_handle **device)
{
    struct lc_net_comm *comm = NULL;
    int err = net->connect(context, dev, handle, &comm);

    if (device)
        *device = NULL;
    return opened(err, comm, out);
}

static enum lc_nccl_result connect_v10(int dev, struct lc_nccl_comm_config *config, void *handle,
                                       void **out, struct lc_nccl_net_device_handle **device)
{
    return connect_v11(shared, dev, handle, out, device);
}

static enum lc_nccl_result connect_v7(int dev, void *handle, void **out,
                                      struct lc_nccl_net_device_handle **device)
{
    return connect_v11(shared, dev, handle, out, device);
}

static enum lc_nccl_result connect_v6(int dev, void *handle, void **out)
{
    return connect_v11(shared, dev, handle, out, NULL);
}

static enum lc_nccl_result accept_v7(void *listener, void **out,
                                     struct lc_nccl_net_device_handle **device)
{
    struct lc_net_comm *comm = NULL;
    int err = net->accept(listener, &comm);

    if (device)
        *device = NULL;
    return opened(err, comm, out);
}

static enum lc_nccl_result accept_v6(void *listener, void **out)
{
    return accept_v7(listener, out, NULL);
}

static enum lc_nccl_result reg_mr_v8(void *comm, void *data, size_t size, int type, void **mr)
{
    struct lc_net_mr *made = NULL;
    int err = net->reg_mr(comm, data, size, type, &made);

    *mr = err ? NULL : made;
    return to_nccl(err);
}

static enum lc_nccl_result reg_mr_v6(void *comm, void *data, int size, int type, void **mr)
{
    *mr = NULL;
    return size < 0 ? LC_NCCL_INVALID_ARGUMENT : reg_mr_v8(comm, data, (size_t)size, type, mr);
}

static enum lc_nccl_result reg_dmabuf(void *comm, void *data, size_t size, int type,
                                      uint64_t offset, int fd, void **mr)
{
    struct lc_net_mr *made = NULL;
    int err = net->reg_dmabuf(comm, data, size, type, offset, fd, &made);

    *mr = err ? NULL : made;
    return to_nccl(err);
}

static enum lc_nccl_result dereg(void *comm, void *mr)
{
    return to_nccl(net->dereg(comm, mr));
}

/* Such a message could not be reported by test(); no transport gets to see it. */
static bool too_long(size_t size)
{
    if (size <= MAX_BYTES)
        return false;
    lc_error("a message of %zu bytes is longer than the %zu that were offered", size, MAX_BYTES);
    return true;
}

static enum lc_nccl_result send_v10(void *comm, void *data, size_t size, int tag, void *mr,
                                    void *event, void **request)
{
    struct lc_net_request *made = NULL;
    int err = too_long(size) ? -EINVAL : net->isend(comm, data, size, tag, mr, &made);

    *request = err ? NULL : made;
    return to_nccl(err);
}

static enum lc_nccl_result send_v9(void *comm, void *data, size_t size, int tag, void *mr,
                                   void **request)
{
    return send_v10(comm, data, size, tag, mr, NULL, request);
}

/* A negative size becomes one that is too long. */
static enum lc_nccl_result send_v6(void *comm, void *data, int size, int tag, void *mr,
                                   void **request)
{
    return send_v10(comm, data, (size_t)size, tag, mr, NULL, request);
}

/* *request may hold anything on entry, LC_NCCL_OPTIONAL_RECV_COMPLETION among it: that hint is not needed here. */
static enum lc_nccl_result recv_v10(void *comm, int n, void **data, size_t *sizes, int *tags,
                                    void **mrs, void **events, void **request)
{
    struct lc_net_request *made = NULL;
    int err = n < 1 || n > MAX_RECVS ? -EINVAL : 0;

    for (int i = 0; i < n && !err; i++)
        err = too_long(sizes[i]) ? -EINVAL : 0;
    if (!err)
        err = net->irecv(comm, n, data, sizes, tags, (struct lc_net_mr *const *)mrs, &made);
    *request = err ? NULL : made;
    return to_nccl(err);
}

static enum lc_nccl_result recv_v9(void *comm, int n, void **data, size_t *sizes, int *tags,
                                   void **mrs, void **request)
{
    return recv_v10(comm, n, data, sizes, tags, mrs, NULL, request);
}

static enum lc_nccl_result recv_v6(void *comm, int n, void **data, int *sizes, int *tags,
                                   void **mrs, void **request)
{
    size_t wide[MAX_RECVS] = { 0 };

    for (int i = 0; i < n && i < MAX_RECVS; i++)
        wide[i] = (size_t)sizes[i];
    return recv_v10(comm, n, data, wide, tags, mrs, NULL, request);
}

static enum lc_nccl_result flush(void *comm, int n, void **data, int *sizes, void **mrs,
                                 void **request)
{
    struct lc_net_request *made = NULL;
    int err = net->iflush(comm, n, data, sizes, (struct lc_net_mr *const *)mrs, &made);

    *request = err ? NULL : made;
    return to_nccl(err);
}

/* The caller has room for one size if this is a send, so only what the transport has written is passed on. */
static enum lc_nccl_result test(void *request, int *done, int *sizes)
{
    size_t got[MAX_RECVS];
    bool ended = false;
    int err;

    for (int i = 0; i < MAX_RECVS; i++)
        got[i] = SIZE_MAX;
    err = net->test(request, &ended, sizes ? got : NULL);
    *done = !err && ended;
    if (!*done || !sizes)
        return to_nccl(err);
    for (int i = 0; i < MAX_RECVS && got[i] != SIZE_MAX; i++)
        sizes[i] = (int)got[i];
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result close_send(void *comm)
{
    net->close_send(comm);
    closed(comm);
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result close_recv(void *comm)
{
    net->close_recv(comm);
    closed(comm);
    return LC_NCCL_SUCCESS;
}

static enum lc_nccl_result close_listen(void *listener)
{
    net->close_listen(listener);
    closed(listener);
    return LC_NCCL_SUCCESS;
}

/* Interfaces before v11 have no finalize: what their init began ends with the library. At the exit of a process other
 * threads may still use what is open; then everything is left to the kernel. */
static __attribute__((destructor)) void unload(void)
{
    if (!__atomic_load_n(&open_objects, __ATOMIC_RELAXED) && shared)
        net->fini(shared);
}

#define COMMON                                                                            \
    .name = "loongcomm", .devices = devices, .regMrDmaBuf = reg_dmabuf, .deregMr = dereg, \
    .iflush = flush, .test = test, .closeSend = close_send, .closeRecv = close_recv,      \
    .closeListen = close_listen

/* Left empty where NCCL takes NULL for "has none": getDeviceMr, irecvConsumed (device offload), makeVDevice (it would
 * fuse ports on its own; one connection spreads over several devices below this interface). */
EXPORT extern const struct lc_nccl_net_v6 ncclNetPlugin_v6;
const struct lc_nccl_net_v6 ncclNetPlugin_v6 = {
    COMMON,
    .init = init_v6,
    .getProperties = properties_v6,
    .listen = listen_v6,
    .connect = connect_v6,
    .accept = accept_v6,
    .regMr = reg_mr_v6,
    .isend = send_v6,
    .irecv = recv_v6,
};

EXPORT extern const struct lc_nccl_net_v7 ncclNetPlugin_v7;
const struct lc_nccl_net_v7 ncclNetPlugin_v7 = {
    COMMON,
    .init = init_v6,
    .getProperties = properties_v7,
    .listen = listen_v6,
    .connect = connect_v7,
    .accept = accept_v7,
    .regMr = reg_mr_v6,
    .isend = send_v6,
    .irecv = recv_v6,
};

EXPORT extern const struct lc_nccl_net_v8 ncclNetPlugin_v8;
const struct lc_nccl_net_v8 ncclNetPlugin_v8 = {
    COMMON,
    .init = init_v6,
    .getProperties = properties_v8,
    .listen = listen_v6,
    .connect = connect_v7,
    .accept = accept_v7,
    .regMr = reg_mr_v8,
    .isend = send_v6,
    .irecv = recv_v6,
};

EXPORT extern const struct lc_nccl_net_v9 ncclNetPlugin_v9;
const struct lc_nccl_net_v9 ncclNetPlugin_v9 = {
    COMMON,
    .init = init_v6,
    .getProperties = properties_v9,
    .listen = listen_v6,
    .connect = connect_v7,
    .accept = accept_v7,
    .regMr = reg_mr_v8,
    .isend = send_v9,
    .irecv = recv_v9,
};

EXPORT extern const struct lc_nccl_net_v10 ncclNetPlugin_v10;
const struct lc_nccl_net_v10 ncclNetPlugin_v10 = {
    COMMON,
    .init = init_v10,
    .getProperties = properties_v9,
    .listen = listen_v6,
    .connect = connect_v10,
    .accept = accept_v7,
    .regMr = reg_mr_v8,
    .isend = send_v10,
    .irecv = recv_v10,
};

EXPORT extern const struct lc_nccl_net_v11 ncclNetPlugin_v11;
const struct lc_nccl_net_v11 ncclNetPlugin_v11 = {
    COMMON,
    .init = init_v11,
    .getProperties = properties_v11,
    .listen = listen_v11,
    .connect = connect_v11,
    .accept = accept_v7,
    .regMr = reg_mr_v8,
    .isend = send_v10,
    .irecv = recv_v10,
    .finalize = finalize,
    .setNetAttr = set_attr,
};

EXPORT extern const struct lc_nccl_net_v12 ncclNetPlugin_v12;
const struct lc_nccl_net_v12 ncclNetPlugin_v12 = {
    COMMON,
    .init = init_v11,
    .getProperties = properties_v12,
    .listen = listen_v11,
    .connect = connect_v11,
    .accept = accept_v7,
    .regMr = reg_mr_v8,
    .isend = send_v10,
    .irecv = recv_v10,
    .finalize = finalize,
    .setNetAttr = set_attr,
};
