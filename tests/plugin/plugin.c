/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/plugin.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

#define LINES 4096

struct lc_nccl_net_v12 net;
int plugin_version = NEWEST;
const char *plugin_path;
void *plugin_context;
bool plugin_soak;

static void *library;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the lines */
static struct {
    enum lc_nccl_log_level level;
    char text[256];
} lines[LINES];
static size_t line_count;

__attribute__((format(printf, 5, 6))) static void logger(enum lc_nccl_log_level level,
                                                         unsigned long subsystems, const char *file,
                                                         int line, const char *fmt, ...)
{
    va_list ap;

    CHECK(file && fmt);
    CHECK(subsystems & (LC_NCCL_LOG_INIT | LC_NCCL_LOG_NET));
    va_start(ap, fmt);
    pthread_mutex_lock(&log_lock);
    if (line_count < LINES) {
        lines[line_count].level = level;
        (void)vsnprintf(lines[line_count].text, sizeof(lines[0].text), fmt, ap);
        line_count++;
    }
    pthread_mutex_unlock(&log_lock);
    va_end(ap);
}

void plugin_log_clear(void)
{
    pthread_mutex_lock(&log_lock);
    line_count = 0;
    pthread_mutex_unlock(&log_lock);
}

unsigned plugin_log_count(enum lc_nccl_log_level level, const char *part)
{
    unsigned found = 0;

    pthread_mutex_lock(&log_lock);
    for (size_t i = 0; i < line_count; i++)
        found += lines[i].level == level && strstr(lines[i].text, part);
    pthread_mutex_unlock(&log_lock);
    return found;
}

void plugin_log_print(void)
{
    pthread_mutex_lock(&log_lock);
    for (size_t i = 0; i < line_count; i++)
        fprintf(stderr, "  level %d: %s\n", (int)lines[i].level, lines[i].text);
    pthread_mutex_unlock(&log_lock);
}

static enum lc_nccl_result profiler(void **event, int type, void *parent, int64_t id, void *data)
{
    return LC_NCCL_SUCCESS;
}

/* Older versions as the newest one: what NCCL does for them, and no more. */
static const struct lc_nccl_net_v6 *v6;
static const struct lc_nccl_net_v7 *v7;
static const struct lc_nccl_net_v8 *v8;
static const struct lc_nccl_net_v9 *v9;
static const struct lc_nccl_net_v10 *v10;
static const struct lc_nccl_net_v11 *v11;

static enum lc_nccl_result old_init(void **context, uint64_t comm_id,
                                    struct lc_nccl_comm_config *config, lc_nccl_logger *log,
                                    lc_nccl_profiler *prof)
{
    switch (plugin_version) {
    case 6: return v6->init(log);
    case 7: return v7->init(log);
    case 8: return v8->init(log);
    case 9: return v9->init(log);
    default: return v10->init(log, prof);
    }
}

#define ASSUMED ((size_t)1 << 30) /* largest message of versions that do not say one */

#define TAKE(from)                                                       \
    (*out = (struct lc_nccl_props_v12){ .name = (from).name,             \
                                        .pciPath = (from).pciPath,       \
                                        .guid = (from).guid,             \
                                        .ptrSupport = (from).ptrSupport, \
                                        .speed = (from).speed,           \
                                        .port = (from).port,             \
                                        .latency = (from).latency,       \
                                        .maxComms = (from).maxComms,     \
                                        .maxRecvs = (from).maxRecvs,     \
                                        .vProps.ndevs = 1,               \
                                        .vProps.devs[0] = dev,           \
                                        .maxP2pBytes = ASSUMED,          \
                                        .maxCollBytes = ASSUMED,         \
                                        .maxMultiRequestSize = 1,        \
                                        .railId = -1,                    \
                                        .planeId = -1 })

static enum lc_nccl_result props_v6(int dev, struct lc_nccl_props_v12 *out)
{
    struct lc_nccl_props_v6 got;
    enum lc_nccl_result result = v6->getProperties(dev, &got);

    if (!result)
        TAKE(got);
    return result;
}

static enum lc_nccl_result props_v7(int dev, struct lc_nccl_props_v12 *out)
{
    struct lc_nccl_props_v7 got;
    enum lc_nccl_result result = v7->getProperties(dev, &got);

    if (!result) {
        TAKE(got);
        out->netDeviceType = got.netDeviceType;
        out->netDeviceVersion = got.netDeviceVersion;
    }
    return result;
}

static enum lc_nccl_result props_v8(int dev, struct lc_nccl_props_v12 *out)
{
    struct lc_nccl_props_v8 got;
    enum lc_nccl_result result = v8->getProperties(dev, &got);

    if (!result) {
        TAKE(got);
        out->regIsGlobal = got.regIsGlobal;
        out->netDeviceType = got.netDeviceType;
        out->netDeviceVersion = got.netDeviceVersion;
    }
    return result;
}

#define TAKE_V9(from)                                                             \
    do {                                                                          \
        TAKE(from);                                                               \
        out->regIsGlobal = (from).regIsGlobal;                                    \
        out->forceFlush = (from).forceFlush;                                      \
        out->netDeviceType = (from).netDeviceType;                                \
        out->netDeviceVersion = (from).netDeviceVersion;                          \
        out->vProps.ndevs = (from).vProps.ndevs;                                  \
        memcpy(out->vProps.devs, (from).vProps.devs, sizeof((from).vProps.devs)); \
        out->maxP2pBytes = (from).maxP2pBytes;                                    \
        out->maxCollBytes = (from).maxCollBytes;                                  \
    } while (0)

static enum lc_nccl_result props_v9(int dev, struct lc_nccl_props_v12 *out)
{
    struct lc_nccl_props_v9 got;
    enum lc_nccl_result result = plugin_version == 9 ? v9->getProperties(dev, &got)
                                                     : v10->getProperties(dev, &got);

    if (!result)
        TAKE_V9(got);
    return result;
}

static enum lc_nccl_result props_v11(int dev, struct lc_nccl_props_v12 *out)
{
    struct lc_nccl_props_v11 got;
    enum lc_nccl_result result = v11->getProperties(dev, &got);

    if (!result) {
        TAKE_V9(got);
        out->maxMultiRequestSize = got.maxMultiRequestSize;
    }
    return result;
}

static enum lc_nccl_result old_listen(void *context, int dev, void *handle, void **out)
{
    switch (plugin_version) {
    case 6: return v6->listen(dev, handle, out);
    case 7: return v7->listen(dev, handle, out);
    case 8: return v8->listen(dev, handle, out);
    case 9: return v9->listen(dev, handle, out);
    default: return v10->listen(dev, handle, out);
    }
}

static enum lc_nccl_result old_connect(void *context, int dev, void *handle, void **out,
                                       struct lc_nccl_net_device_handle **device)
{
    struct lc_nccl_comm_config config = { .trafficClass = LC_NCCL_UNDEFINED };

    switch (plugin_version) {
    case 6: return v6->connect(dev, handle, out);
    case 7: return v7->connect(dev, handle, out, device);
    case 8: return v8->connect(dev, handle, out, device);
    case 9: return v9->connect(dev, handle, out, device);
    default: return v10->connect(dev, &config, handle, out, device);
    }
}

static enum lc_nccl_result accept_v6(void *listener, void **out,
                                     struct lc_nccl_net_device_handle **device)
{
    return v6->accept(listener, out);
}

static enum lc_nccl_result reg_mr_int(void *comm, void *data, size_t size, int type, void **mr)
{
    if (size >= 1U << 31)
        return LC_NCCL_INTERNAL_ERROR;
    return plugin_version == 6 ? v6->regMr(comm, data, (int)size, type, mr)
                               : v7->regMr(comm, data, (int)size, type, mr);
}

static enum lc_nccl_result send_old(void *comm, void *data, size_t size, int tag, void *mr,
                                    void *event, void **request)
{
    if (plugin_version < 9 && size > ASSUMED)
        return LC_NCCL_INTERNAL_ERROR;
    switch (plugin_version) {
    case 6: return v6->isend(comm, data, (int)size, tag, mr, request);
    case 7: return v7->isend(comm, data, (int)size, tag, mr, request);
    case 8: return v8->isend(comm, data, (int)size, tag, mr, request);
    default: return v9->isend(comm, data, size, tag, mr, request);
    }
}

static enum lc_nccl_result recv_old(void *comm, int n, void **data, size_t *sizes, int *tags,
                                    void **mrs, void **events, void **request)
{
    int narrow[32];

    if (plugin_version == 9)
        return v9->irecv(comm, n, data, sizes, tags, mrs, request);
    if (*request == LC_NCCL_OPTIONAL_RECV_COMPLETION)
        *request = NULL;
    for (int i = 0; i < n; i++) {
        if (sizes[i] > ASSUMED)
            return LC_NCCL_INTERNAL_ERROR;
        narrow[i] = (int)sizes[i];
    }
    switch (plugin_version) {
    case 6: return v6->irecv(comm, n, data, narrow, tags, mrs, request);
    case 7: return v7->irecv(comm, n, data, narrow, tags, mrs, request);
    default: return v8->irecv(comm, n, data, narrow, tags, mrs, request);
    }
}

static enum lc_nccl_result no_finalize(void *context)
{
    return LC_NCCL_SUCCESS;
}

#define COPY(from)                             \
    do {                                       \
        net.name = (from)->name;               \
        net.devices = (from)->devices;         \
        net.regMrDmaBuf = (from)->regMrDmaBuf; \
        net.deregMr = (from)->deregMr;         \
        net.iflush = (from)->iflush;           \
        net.test = (from)->test;               \
        net.closeSend = (from)->closeSend;     \
        net.closeRecv = (from)->closeRecv;     \
        net.closeListen = (from)->closeListen; \
    } while (0)

static void adapt_old(void)
{
    net = (struct lc_nccl_net_v12){ .init = old_init,
                                    .listen = old_listen,
                                    .connect = old_connect,
                                    .accept = accept_v6,
                                    .isend = send_old,
                                    .irecv = recv_old,
                                    .finalize = no_finalize };
    switch (plugin_version) {
    case 6:
        COPY(v6);
        net.getProperties = props_v6;
        net.regMr = reg_mr_int;
        break;
    case 7:
        COPY(v7);
        net.getProperties = props_v7;
        net.regMr = reg_mr_int;
        net.accept = v7->accept;
        break;
    case 8:
        COPY(v8);
        net.getProperties = props_v8;
        net.regMr = v8->regMr;
        net.accept = v8->accept;
        break;
    case 9:
        COPY(v9);
        net.getProperties = props_v9;
        net.regMr = v9->regMr;
        net.accept = v9->accept;
        break;
    default:
        COPY(v10);
        net.getProperties = props_v9;
        net.regMr = v10->regMr;
        net.accept = v10->accept;
        net.isend = v10->isend;
        net.irecv = v10->irecv;
        break;
    }
}

static void adapt(const void *table)
{
    v6 = table, v7 = table, v8 = table, v9 = table, v10 = table, v11 = table;
    if (plugin_version >= 12) {
        memcpy(&net, table, sizeof(net));
    } else if (plugin_version == 11) {
        memcpy(&net, table, sizeof(*v11)); /* the same members in the same places */
        net.getProperties = props_v11;
        net.makeVDevice = NULL;
    } else {
        adapt_old();
    }
}

void *plugin_init_again(uint64_t comm_id)
{
    struct lc_nccl_comm_config config = { .trafficClass = LC_NCCL_UNDEFINED };
    void *context = NULL;

    CHECK(net.init(&context, comm_id, &config, logger, profiler) == LC_NCCL_SUCCESS);
    return context;
}

int plugin_load(void)
{
    char name[32];
    const void *table;
    int count = -1;

    library = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(library);
    (void)snprintf(name, sizeof(name), "ncclNetPlugin_v%d", plugin_version);
    table = dlsym(library, name);
    CHECK(table);
    adapt(table);
    plugin_context = plugin_init_again(1);
    CHECK(net.devices(&count) == LC_NCCL_SUCCESS);
    return count;
}

void plugin_unload(void)
{
    CHECK(net.finalize(plugin_context) == LC_NCCL_SUCCESS);
    CHECK(dlclose(library) == 0);
    plugin_context = NULL;
    memset(&net, 0, sizeof(net));
}

long now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void pause_ms(long ms)
{
    struct timespec time = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };

    while (nanosleep(&time, &time))
        ;
}

/* LCTEST_PATIENCE: seconds, for what is meant to fail. */
long patience_ms(void)
{
    const char *asked = getenv("LCTEST_PATIENCE");

    return asked ? 1000 * atol(asked) : PATIENCE;
}

void still_patient(long since, const char *text)
{
    if (now_ms() - since < patience_ms())
        return;
    fprintf(stderr, "nothing for %ld s: %s\n", patience_ms() / 1000, text);
    plugin_log_print();
    abort();
}

uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static int entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = 0;

    CHECK(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static int lines_of(const char *path)
{
    FILE *file = fopen(path, "re");
    int count = 0;

    CHECK(file);
    for (int c; (c = fgetc(file)) != EOF;)
        count += c == '\n';
    fclose(file);
    return count;
}

struct holdings holdings_now(void)
{
    return (struct holdings){ .descriptors = entries("/proc/self/fd"),
                              .threads = entries("/proc/self/task"),
                              .mappings = lines_of("/proc/self/maps") };
}

struct holdings holdings_since(const struct holdings *before)
{
    struct holdings now = holdings_now();

    for (long begun = now_ms(); now_ms() - begun < patience_ms(); pause_ms(2)) {
        if (now.descriptors <= before->descriptors && now.threads <= before->threads)
            break;
        now = holdings_now();
    }
    if (now.descriptors > before->descriptors || now.threads > before->threads ||
        now.mappings > before->mappings + 2)
        fprintf(stderr, "descriptors %d -> %d, threads %d -> %d, mappings %d -> %d\n",
                before->descriptors, now.descriptors, before->threads, now.threads,
                before->mappings, now.mappings);
    return now;
}
