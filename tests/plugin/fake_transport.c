/* SPDX-License-Identifier: Apache-2.0
 *
 * A transport within one process, right but for the fault that LCFAKE names: so every check of the harness is seen to fail,
 * and the adapters are tested without sockets. Linked in place of the real ones. */
#include "plugin/net/transport.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SENDS  (8 * LC_NET_MAX_REQUESTS)
#define LISTEN 4096

struct lc_net_request {
    struct lc_net_comm *comm;
    void *data;
    size_t size, got;
    int tag;
    bool used, done;
};

/* Both ends of a connection share one; freed with the last. Guarded by `lock`, as all here. */
struct wire {
    int ends;
    unsigned long sent, received; /* requests made */
    unsigned long matched;        /* messages that arrived */
    int error;
    struct lc_net_request sends[SENDS], recvs[LC_NET_MAX_REQUESTS];
};

struct lc_net_comm {
    struct wire *wire;
};

struct lc_net_listen {
    unsigned id;
    struct lc_net_comm *waiting[64]; /* accept takes from them */
    unsigned count;
};

struct lc_net_context {
    int unused;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lc_net_listen *listeners[LISTEN];
static unsigned next_id = 1;

static bool fault(const char *name)
{
    const char *asked = getenv("LCFAKE");

    return asked && strcmp(asked, name) == 0;
}

static void on_signal(int signal)
{
}

static void *idle(void *arg)
{
    pause();
    return NULL;
}

static int fake_init(const struct lc_net_options *options, struct lc_net_context **out)
{
    pthread_t thread;

    if (fault("signal"))
        (void)signal(SIGTERM, on_signal);
    if (fault("thread"))
        (void)pthread_create(&thread, NULL, idle, NULL);
    if (fault("mapping")) {
        int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);

        (void)mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
        close(fd);
    }
    *out = calloc(1, sizeof(**out));
    return *out ? 0 : -ENOMEM;
}

static void fake_fini(struct lc_net_context *ctx)
{
    free(ctx);
}

static int fake_devices(int *out)
{
    const char *names = getenv("NCCL_SOCKET_IFNAME");

    *out = names && strstr(names, "nosuch") ? 0 : 1;
    return 0;
}

static int fake_properties(int dev, struct lc_net_properties *out)
{
    static char name[16] = "fake0";

    if (dev != 0 && !fault("device"))
        return -EINVAL;
    *out = (struct lc_net_properties){ .name = fault("text") ? strdup(name) : name,
                                       .guid = 1,
                                       .ptr_support = LC_NET_HOST,
                                       .speed_mbps = fault("speed") ? 0 : 1000,
                                       .max_comms = 1000,
                                       .max_recvs = 1,
                                       .max_bytes = (size_t)1 << 40,
                                       .rail_id = -1,
                                       .plane_id = -1 };
    return 0;
}

static int fake_listen(struct lc_net_context *ctx, int dev, void *handle,
                       struct lc_net_listen **out)
{
    struct lc_net_listen *made = calloc(1, sizeof(*made));

    if (!made)
        return -ENOMEM;
    pthread_mutex_lock(&lock);
    made->id = next_id++ % LISTEN;
    listeners[made->id] = made;
    pthread_mutex_unlock(&lock);
    memset(handle, 0, LC_NET_HANDLE_BYTES);
    memcpy(handle, "fakewire", 8);
    memcpy((char *)handle + 8, &made->id, sizeof(made->id));
    *out = made;
    return 0;
}

static int fake_connect(struct lc_net_context *ctx, int dev, void *handle, struct lc_net_comm **out)
{
    struct lc_net_comm *ends[2] = { NULL, NULL };
    struct wire *wire;
    unsigned id;

    memcpy(&id, (char *)handle + 8, sizeof(id));
    if (fault("poll"))
        (void)poll(NULL, 0, 1);
    if (memcmp(handle, "fakewire", 8) != 0 && !fault("handle"))
        return -EPROTO;
    wire = calloc(1, sizeof(*wire));
    ends[0] = calloc(1, sizeof(*ends[0]));
    ends[1] = calloc(1, sizeof(*ends[1]));
    if (!wire || !ends[0] || !ends[1]) {
        free(wire);
        free(ends[0]);
        free(ends[1]);
        return -ENOMEM;
    }
    wire->ends = 2;
    ends[0]->wire = ends[1]->wire = wire;
    if (fault("descriptor"))
        (void)open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fault("cloexec"))
        (void)open("/dev/null", O_RDONLY);
    pthread_mutex_lock(&lock);
    if (id < LISTEN && listeners[id]) {
        unsigned at = fault("handles") && listeners[(id + 1) % LISTEN] ? (id + 1) % LISTEN : id;

        listeners[at]->waiting[listeners[at]->count++ % 64] = ends[1];
    }
    pthread_mutex_unlock(&lock);
    *out = ends[0];
    return 0;
}

static int fake_accept(struct lc_net_listen *listener, struct lc_net_comm **out)
{
    pthread_mutex_lock(&lock);
    if (listener->count)
        *out = listener->waiting[--listener->count];
    pthread_mutex_unlock(&lock);
    return 0;
}

static int fake_reg(struct lc_net_comm *comm, void *data, size_t size, int type,
                    struct lc_net_mr **out)
{
    *out = NULL;
    return type == LC_NET_HOST ? 0 : -ENOTSUP;
}

static int fake_dmabuf(struct lc_net_comm *comm, void *data, size_t size, int type, uint64_t offset,
                       int fd, struct lc_net_mr **out)
{
    return -ENOTSUP;
}

static int fake_dereg(struct lc_net_comm *comm, struct lc_net_mr *mr)
{
    return 0;
}

static struct lc_net_request *take(struct lc_net_request *from, size_t count, unsigned long *made,
                                   struct lc_net_comm *comm, void *data, size_t size)
{
    struct lc_net_request *request = &from[*made % count];

    if (request->used)
        return NULL;
    (*made)++;
    *request = (struct lc_net_request){ .comm = comm, .data = data, .size = size, .used = true };
    return request;
}

static int fake_isend(struct lc_net_comm *comm, void *data, size_t size, int tag,
                      struct lc_net_mr *mr, struct lc_net_request **out)
{
    struct wire *wire = comm->wire;
    void *bounce = NULL;

    if (fault("memory")) { /* takes a refusal of memory for the end */
        bounce = malloc(1);
        if (!bounce)
            return -ENOMEM;
        free(bounce);
    }
    pthread_mutex_lock(&lock);
    *out = take(wire->sends, fault("depth") ? 4 : SENDS, &wire->sent, comm, data, size);
    pthread_mutex_unlock(&lock);
    return wire->error;
}

static int fake_irecv(struct lc_net_comm *comm, int n, void *const *data, const size_t *sizes,
                      const int *tags, struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    struct wire *wire = comm->wire;

    pthread_mutex_lock(&lock);
    *out = take(wire->recvs, fault("room") ? 16 : LC_NET_MAX_REQUESTS, &wire->received, comm,
                data[0], sizes[0]);
    pthread_mutex_unlock(&lock);
    return wire->error;
}

static int fake_iflush(struct lc_net_comm *comm, int n, void *const *data, const int *sizes,
                       struct lc_net_mr *const *mrs, struct lc_net_request **out)
{
    *out = NULL;
    return 0;
}

static void deliver(struct wire *wire, struct lc_net_request *send, struct lc_net_request *recv)
{
    size_t size = send->size;

    if (size > recv->size && !fault("overrun")) {
        wire->error = fault("silent") ? 0 : -EMSGSIZE;
        if (fault("silent"))
            recv->done = send->done = true;
        return;
    }
    if (fault("zero") && size == 0)
        size = 1;
    memcpy(recv->data, send->data, size);
    if (fault("corrupt") && wire->matched % 100 == 50 && size)
        ((char *)recv->data)[size - 1] ^= 2;
    if (fault("behind") && wire->matched == 3)
        ((char *)recv->data)[size] = 1;
    recv->got = fault("posted") ? recv->size : size;
    send->got = send->size;
    recv->done = send->done = true;
}

static void match(struct wire *wire)
{
    unsigned sends = fault("depth") ? 4 : SENDS, recvs = fault("room") ? 16 : LC_NET_MAX_REQUESTS;

    while (!wire->error && wire->matched < wire->sent && wire->matched < wire->received) {
        if (fault("lost") && wire->matched == 30)
            return;
        deliver(wire, &wire->sends[wire->matched % sends], &wire->recvs[wire->matched % recvs]);
        wire->matched += !wire->error;
    }
}

static int fake_test(struct lc_net_request *request, bool *done, size_t *sizes)
{
    struct wire *wire = request->comm->wire;
    int err;

    if (fault("sleep"))
        (void)usleep(1);
    pthread_mutex_lock(&lock);
    match(wire);
    *done = request->done;
    err = *done ? 0 : wire->error;
    if (*done && sizes)
        sizes[0] = request->got;
    if (*done)
        request->used = false;
    pthread_mutex_unlock(&lock);
    return err;
}

static void fake_close(struct lc_net_comm *comm)
{
    pthread_mutex_lock(&lock);
    if (--comm->wire->ends == 0)
        free(comm->wire);
    pthread_mutex_unlock(&lock);
    free(comm);
}

static void fake_close_listen(struct lc_net_listen *listener)
{
    pthread_mutex_lock(&lock);
    listeners[listener->id] = NULL;
    pthread_mutex_unlock(&lock);
    free(listener);
}

static const struct lc_net_ops fake = {
    .name = "fake",
    .init = fake_init,
    .fini = fake_fini,
    .devices = fake_devices,
    .properties = fake_properties,
    .listen = fake_listen,
    .connect = fake_connect,
    .accept = fake_accept,
    .reg_mr = fake_reg,
    .reg_dmabuf = fake_dmabuf,
    .dereg = fake_dereg,
    .isend = fake_isend,
    .irecv = fake_irecv,
    .iflush = fake_iflush,
    .test = fake_test,
    .close_send = fake_close,
    .close_recv = fake_close,
    .close_listen = fake_close_listen,
};

const struct lc_net_ops *lc_net_choose(void)
{
    return &fake;
}
