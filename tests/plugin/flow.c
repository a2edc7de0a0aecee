/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/plugin.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>

void pair_listen(struct pair *pair, int dev)
{
    memset(pair, 0, sizeof(*pair));
    pair->listener = STALE;
    OK(net.listen(plugin_context, dev, pair->handle, &pair->listener));
    CHECK(pair->listener && pair->listener != STALE);
}

static bool connect_step(struct pair *pair, int dev)
{
    struct lc_nccl_net_device_handle *device = NULL;

    if (!pair->send)
        OK(net.connect(plugin_context, dev, pair->handle, &pair->send, &device));
    return pair->send;
}

static bool accept_step(struct pair *pair)
{
    struct lc_nccl_net_device_handle *device = NULL;

    if (!pair->recv)
        OK(net.accept(pair->listener, &pair->recv, &device));
    if (pair->recv && pair->listener) {
        OK(net.closeListen(pair->listener));
        pair->listener = NULL;
    }
    return pair->recv;
}

bool pair_step(struct pair *pair, int dev)
{
    bool connected = connect_step(pair, dev);

    return accept_step(pair) && connected;
}

void pair_open(struct pair *pair, int dev)
{
    long begun = now_ms();

    pair_listen(pair, dev);
    while (!pair_step(pair, dev)) {
        still_patient(begun, "connecting");
        sched_yield();
    }
}

#define REGISTERED 256

/* What mr_of has registered; a free place has no connection. */
static pthread_mutex_t registered_lock = PTHREAD_MUTEX_INITIALIZER; /* guards: */
static struct registered {
    void *comm, *mr;
    uintptr_t begin, end;
} registered[REGISTERED];

void *mr_of(void *comm, void *data, size_t size)
{
    uintptr_t begin = (uintptr_t)data, end = begin + size;
    struct registered *found = NULL, *place = NULL;
    void *mr;

    if (size == 0)
        return NULL;
    CHECK(pthread_mutex_lock(&registered_lock) == 0);
    for (size_t i = 0; i < REGISTERED && !found; i++) {
        struct registered *at = &registered[i];

        if (!at->comm)
            place = at;
        else if (at->comm == comm && at->begin <= begin && at->end >= end)
            found = at;
    }
    if (!found) {
        CHECK(place);
        *place = (struct registered){ comm, NULL, begin, end };
        OK(net.regMr(comm, data, size, LC_NCCL_PTR_HOST, &place->mr));
        found = place;
    }
    mr = found->mr;
    CHECK(pthread_mutex_unlock(&registered_lock) == 0);
    return mr;
}

static void deregister(void *comm)
{
    CHECK(pthread_mutex_lock(&registered_lock) == 0);
    for (size_t i = 0; i < REGISTERED; i++) {
        if (registered[i].comm != comm)
            continue;
        OK(net.deregMr(comm, registered[i].mr));
        registered[i].comm = NULL;
    }
    CHECK(pthread_mutex_unlock(&registered_lock) == 0);
}

void close_send(void *comm)
{
    deregister(comm);
    OK(net.closeSend(comm));
}

void close_recv(void *comm)
{
    deregister(comm);
    OK(net.closeRecv(comm));
}

void pair_close(struct pair *pair)
{
    if (pair->send)
        close_send(pair->send);
    if (pair->recv)
        close_recv(pair->recv);
    if (pair->listener)
        OK(net.closeListen(pair->listener));
    pair->send = pair->recv = pair->listener = NULL;
}

enum lc_nccl_result test_once(void *request, bool *done, int *sizes)
{
    int ended = 0x5a5a5a5a;
    enum lc_nccl_result result = CALL(net.test(request, &ended, sizes));

    *done = false;
    if (result)
        return result;
    CHECK(ended == 0 || ended == 1);
    *done = ended;
    return result;
}

int wait_done(void *request)
{
    int sizes[32] = { 0 };
    long begun = now_ms();
    bool done = false;

    while (!done) {
        CHECK(test_once(request, &done, sizes) == LC_NCCL_SUCCESS);
        still_patient(begun, "a request");
        sched_yield();
    }
    return sizes[0];
}

void wait_all(struct waited *waited, int n)
{
    long begun = now_ms();
    int left = n;

    while (left > 0) {
        for (int i = 0; i < n; i++) {
            struct waited *one = &waited[i];

            if (one->done)
                continue;
            CHECK(test_once(one->request, &one->done, one->sizes) == LC_NCCL_SUCCESS);
            left -= one->done;
        }
        still_patient(begun, "all of several requests");
        sched_yield();
    }
}

void wait_both(void *recv, void *send, int size)
{
    struct waited both[2] = { { .request = recv }, { .request = send } };

    wait_all(both, 2);
    CHECK(both[0].sizes[0] == size && both[1].sizes[0] == size);
}

void *post_send(void *comm, void *data, size_t size, int tag)
{
    void *mr = mr_of(comm, data, size);
    long begun = now_ms();
    void *request;

    do {
        request = STALE;
        OK(net.isend(comm, data, size, tag, mr, NULL, &request));
        CHECK(request != STALE);
        still_patient(begun, "room for a send");
    } while (!request);
    return request;
}

void *post_recv(void *comm, void *data, size_t size, int tag)
{
    void *mr = mr_of(comm, data, size), *event = NULL, *request;
    long begun = now_ms();

    do {
        request = LC_NCCL_OPTIONAL_RECV_COMPLETION;
        OK(net.irecv(comm, 1, &data, &size, &tag, &mr, &event, &request));
        CHECK(request != LC_NCCL_OPTIONAL_RECV_COMPLETION);
        still_patient(begun, "room for a receive");
    } while (!request);
    return request;
}

static unsigned char pattern(size_t index, size_t at)
{
    return (unsigned char)((index * 131 + at * 7 + at / 251) | 1);
}

static size_t room_of(const struct flow *flow, size_t index)
{
    return flow->room ? flow->room(index) : flow->size(index);
}

#define SLACK 64 /* behind each buffer, never to be touched */

void flow_begin(struct flow *flow)
{
    size_t stride = flow->largest + SLACK;

    CHECK(flow->window >= 1 && flow->window <= LC_NCCL_MAX_REQUESTS);
    flow->out = malloc(stride * flow->window);
    flow->in = malloc(stride * flow->window);
    CHECK(flow->out && flow->in);
    OK(net.regMr(flow->pair->send, flow->out, stride * flow->window, LC_NCCL_PTR_HOST,
                 &flow->out_mr));
    OK(net.regMr(flow->pair->recv, flow->in, stride * flow->window, LC_NCCL_PTR_HOST,
                 &flow->in_mr));
}

static bool failed(struct flow *flow, enum lc_nccl_result result)
{
    if (!result)
        return false;
    if (!flow->fails) {
        fprintf(stderr, "message %zu of %zu: result %d\n", flow->received, flow->count,
                (int)result);
        plugin_log_print();
    }
    CHECK(flow->fails);
    flow->error = result;
    return true;
}

static size_t slot_of(const struct flow *flow, size_t index)
{
    CHECK(flow->window);
    return index % flow->window;
}

static void post_one_recv(struct flow *flow)
{
    size_t slot = slot_of(flow, flow->posted), size = room_of(flow, flow->posted);
    void *data = flow->in + slot * (flow->largest + SLACK), *mr = flow->in_mr, *event = NULL;
    void *request = flow->posted % 2 ? LC_NCCL_OPTIONAL_RECV_COMPLETION : STALE;
    int tag = 3;

    if (flow->posted == flow->count || flow->posted - flow->received == flow->window)
        return;
    memset(data, 0, flow->largest + SLACK);
    if (failed(flow,
               CALL(net.irecv(flow->pair->recv, 1, &data, &size, &tag, &mr, &event, &request))))
        return;
    CHECK(request != STALE && request != LC_NCCL_OPTIONAL_RECV_COMPLETION);
    if (!request)
        return;
    flow->recvs[slot] = request;
    flow->posted++;
}

static void post_one_send(struct flow *flow)
{
    size_t slot = slot_of(flow, flow->started);
    size_t size = flow->size(flow->started < flow->count ? flow->started : 0);
    unsigned char *data = flow->out + slot * (flow->largest + SLACK);
    void *request = STALE;

    if (flow->started == flow->count || flow->started - flow->sent == flow->window)
        return;
    for (size_t i = 0; i < size; i++)
        data[i] = pattern(flow->started, i);
    if (failed(flow,
               CALL(net.isend(flow->pair->send, data, size, 3, flow->out_mr, NULL, &request))))
        return;
    CHECK(request != STALE);
    if (!request)
        return;
    flow->sends[slot] = request;
    flow->started++;
}

static void check_message(const struct flow *flow, size_t index, int reported)
{
    const unsigned char *data = flow->in + slot_of(flow, index) * (flow->largest + SLACK);
    size_t size = flow->size(index);

    if ((size_t)reported != size)
        fprintf(stderr, "message %zu of %zu bytes is reported as %d\n", index, size, reported);
    CHECK((size_t)reported == size);
    for (size_t i = 0; i < flow->largest + SLACK; i++) {
        unsigned char wanted = i < size ? pattern(index, i) : 0;

        if (data[i] != wanted)
            fprintf(stderr, "message %zu of %zu bytes differs at %zu\n", index, size, i);
        CHECK(data[i] == wanted);
    }
}

static void finish_oldest(struct flow *flow)
{
    int sizes[32] = { 0 };
    bool done = false;

    if (flow->posted > flow->received) {
        if (failed(flow, test_once(flow->recvs[slot_of(flow, flow->received)], &done, sizes)))
            return;
        if (done)
            check_message(flow, flow->received++, sizes[0]);
    }
    if (flow->started > flow->sent) {
        int size = -1; /* room for one only */

        if (failed(flow, test_once(flow->sends[slot_of(flow, flow->sent)], &done, &size)))
            return;
        if (done)
            CHECK((size_t)size == flow->size(flow->sent++));
    }
}

bool flow_step(struct flow *flow)
{
    for (size_t i = 0; i < flow->window && !flow->error; i++)
        post_one_recv(flow);
    for (size_t i = 0; i < flow->window && !flow->error; i++)
        post_one_send(flow);
    if (!flow->error)
        finish_oldest(flow);
    return !flow->error && (flow->sent < flow->count || flow->received < flow->count);
}

void flow_end(struct flow *flow)
{
    if (flow->pair->send)
        OK(net.deregMr(flow->pair->send, flow->out_mr));
    if (flow->pair->recv)
        OK(net.deregMr(flow->pair->recv, flow->in_mr));
    free(flow->out);
    free(flow->in);
}

void flow_run(struct flow *flow)
{
    long last = now_ms();
    size_t before = 0;

    flow_begin(flow);
    while (flow_step(flow)) {
        if (flow->sent + flow->received != before)
            last = now_ms();
        before = flow->sent + flow->received;
        still_patient(last, "a message");
        sched_yield();
    }
    flow_end(flow);
}
