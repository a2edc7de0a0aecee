/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/rows.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void run_flow(struct pair *pair, size_t count, size_t window, size_t largest,
                     size_t (*size)(size_t), size_t (*room)(size_t))
{
    struct flow flow = { .pair = pair,
                         .count = count,
                         .window = window,
                         .largest = largest,
                         .size = size,
                         .room = room };

    flow_run(&flow);
}

/* A receive of `room` bytes right before memory that cannot be touched meets a longer send. Either end may be the one
 * that sees it; the other then fails with it. */
#define SHORT \
    16384 /* such messages may be on their way before anybody knows that there is no room */

static void truncated(size_t room, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), span = (room + page - 1) / page * page + page;
    unsigned char *area = mmap(NULL, span, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *data = calloc(1, size);
    enum lc_nccl_result result = LC_NCCL_SUCCESS, refused = LC_NCCL_SUCCESS;
    long begun = now_ms();
    struct pair pair;
    void *in, *out = NULL, *mr;
    bool done = false, sent = false;
    int sizes[32];

    CHECK(area != MAP_FAILED && data);
    CHECK(mprotect(area + span - page, page, PROT_NONE) == 0);
    pair_open(&pair, 0);
    in = post_recv(pair.recv, area + span - page - room, room, 1);
    mr = mr_of(pair.send, data, size);
    while (!result) {
        if (!out && !refused)
            refused = CALL(net.isend(pair.send, data, size, 1, mr, NULL, &out));
        if (out && !refused && !sent)
            refused = test_once(out, &sent, NULL);
        CHECK(!sent || size <= SHORT);
        result = test_once(in, &done, sizes);
        CHECK(!done);
        still_patient(begun, "the error for a message that is too long");
        sched_yield();
    }
    CHECK(result == LC_NCCL_INVALID_USAGE ||
          (result == LC_NCCL_REMOTE_ERROR && refused == LC_NCCL_INVALID_USAGE));
    pair_close(&pair);
    CHECK(munmap(area, span) == 0);
    free(data);
}

void longer_message_than_room_is_an_error(void)
{
    start();
    truncated(64, 65);
    truncated(0, 1);
    truncated(65536, 524288);
    truncated(4096, plugin_soak ? (size_t)1 << 30 : 4 << 20);
    plugin_unload();
}

void lengths_beyond_int_are_refused(void)
{
    static const size_t sizes[] = { (1UL << 31) - 1, 1UL << 31, (1UL << 32) + 1, SIZE_MAX };
    void *request, *mr = NULL, *event = NULL;
    static char data[16];
    struct lc_nccl_props_v12 props;
    int newest = plugin_version, tag = 1;
    struct pair pair;

    for (plugin_version = 6; plugin_version <= newest; plugin_version++) {
        start();
        OK(net.getProperties(0, &props));
        CHECK(props.maxP2pBytes > 0 && props.maxP2pBytes <= (1UL << 31) - 1);
        CHECK(props.maxCollBytes > 0 && props.maxCollBytes <= (1UL << 31) - 1);
        pair_open(&pair, 0);
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            size_t size = sizes[i];
            void *part = data;

            request = STALE;
            CHECK(CALL(net.isend(pair.send, data, size, 1, NULL, NULL, &request)) != 0);
            request = STALE;
            CHECK(CALL(net.irecv(pair.recv, 1, &part, &size, &tag, &mr, &event, &request)) != 0);
        }
        /* Nothing of it has reached the connection. */
        run_flow(&pair, 10, 2, 4096, size_page, NULL);
        pair_close(&pair);
        plugin_unload();
    }
    plugin_version = newest;
}

void deep_pipeline_tested_at_its_oldest(void)
{
    struct pair pair;

    start();
    pair_open(&pair, 0);
    run_flow(&pair, 60, 8, LARGEST_MIXED, size_mixed, NULL);
    run_flow(&pair, 200, 32, 512 * 1024, size_step, NULL);
    run_flow(&pair, 2000, 32, 256, size_small, NULL);
    pair_close(&pair);
    plugin_unload();
}

static size_t size_long_run(size_t index)
{
    return index % 64 == 63 ? 20000 : index * 13 % 90;
}

void long_run_of_mixed_messages(void)
{
    struct pair pair;

    start();
    pair_open(&pair, 0);
    run_flow(&pair, times(12000, 10000000), 32, 20000, size_long_run, NULL);
    pair_close(&pair);
    plugin_unload();
}

static int max_recvs(void)
{
    struct lc_nccl_props_v12 props;

    OK(net.getProperties(0, &props));
    CHECK(props.maxRecvs >= 1 && props.maxRecvs <= 8);
    return props.maxRecvs;
}

/* Tags that are distinct, equal, or in pairs; sends in an order of their own. */
static void grouped(struct pair *pair, int n, int kind, uint64_t *state)
{
    static unsigned char out[8][5000], in[8][6000];
    void *data[8], *mrs[8], *events[8] = { NULL }, *recv = STALE;
    struct waited waited[9] = { 0 };
    size_t rooms[8], sizes[8];
    int tags[8], order[8];
    long begun = now_ms();

    for (int i = 0; i < n; i++) {
        data[i] = in[i];
        rooms[i] = sizeof(in[i]);
        sizes[i] = random_next(state) % sizeof(out[i]);
        memset(out[i], 17 * i + 1, sizeof(out[i]));
        memset(in[i], 0, sizeof(in[i]));
        mrs[i] = mr_of(pair->recv, in, sizeof(in));
        tags[i] = kind == 0 ? i : kind == 1 ? 5 : i / 2;
        order[i] = i;
    }
    for (int i = n - 1; kind == 0 && i > 0; i--) {
        int other = (int)(random_next(state) % (uint64_t)(i + 1)), kept = order[i];

        order[i] = order[other];
        order[other] = kept;
    }
    do {
        OK(net.irecv(pair->recv, n, data, rooms, tags, mrs, events, &recv));
        still_patient(begun, "room for a group");
    } while (!recv);
    for (int i = 0; i < n; i++)
        waited[1 + i].request = post_send(pair->send, out[order[i]], sizes[order[i]],
                                          tags[order[i]]);
    waited[0].request = recv;
    wait_all(waited, 1 + n);
    for (int i = 0; i < n; i++) {
        CHECK((size_t)waited[0].sizes[i] == sizes[i]);
        CHECK(memcmp(in[i], out[i], sizes[i]) == 0);
        CHECK(waited[1 + i].sizes[0] == (int)sizes[order[i]]);
    }
}

void grouped_receives(void)
{
    uint64_t state = 4711;
    struct pair pair;
    int most;

    start();
    most = max_recvs();
    if (most == 1)
        skip("one buffer a receive is offered, so there are no groups");
    pair_open(&pair, 0);
    for (size_t i = 0; i < times(300, 10000); i++)
        grouped(&pair, 1 + (int)(i % (size_t)most), (int)(i / 8 % 3), &state);
    pair_close(&pair);
    plugin_unload();
}

/* Several sockets, of which some are slow at times: order of arrival is any. */
void pieces_arrive_in_any_order(void)
{
    static const struct relay_rule rule = { .chunk = 3000 };
    struct pair pair;

    start();
    relay_start(&rule);
    pair_open(&pair, 0);
    run_flow(&pair, times(40, 2000), 8, LARGEST_MIXED, size_mixed, NULL);
    pair_close(&pair);
    plugin_unload();
}

void outputs_are_always_written(void)
{
    static void *const stale[] = { STALE, LC_NCCL_OPTIONAL_RECV_COMPLETION, NULL };
    struct pair pair;
    static char out[64], in[64];

    start();
    pair_open(&pair, 0);
    for (int i = 0; i < 30; i++) {
        void *recv = stale[i % 3], *send = stale[i % 3], *part = in, *event = NULL;
        void *mr = mr_of(pair.recv, in, sizeof(in)), *out_mr = mr_of(pair.send, out, sizeof(out));
        size_t size = sizeof(in);
        long begun = now_ms();
        int tag = 0;

        out[0] = (char)i;
        do {
            recv = stale[i % 3];
            OK(net.irecv(pair.recv, 1, &part, &size, &tag, &mr, &event, &recv));
            CHECK(recv != STALE && recv != LC_NCCL_OPTIONAL_RECV_COMPLETION);
            still_patient(begun, "a receive");
        } while (!recv);
        do {
            send = stale[i % 3];
            OK(net.isend(pair.send, out, sizeof(out), tag, out_mr, event, &send));
            CHECK(send != STALE && send != LC_NCCL_OPTIONAL_RECV_COMPLETION);
            still_patient(begun, "a send");
        } while (!send);
        wait_both(recv, send, (int)sizeof(in));
        CHECK(in[0] == (char)i);
        /* Host memory needs no flush: nothing to wait for, or something that ends. */
        {
            int flushed = (int)sizeof(in);
            void *flush = STALE;

            if (CALL(net.iflush(pair.recv, 1, &part, &flushed, &mr, &flush)) == LC_NCCL_SUCCESS &&
                flush) {
                CHECK(flush != STALE);
                (void)wait_done(flush);
            }
        }
    }
    pair_close(&pair);
    plugin_unload();
}

static void send_or_test(void *comm, void *data, size_t size, void *mr, void **send, bool *done)
{
    if (*send)
        CHECK(test_once(*send, done, NULL) == LC_NCCL_SUCCESS);
    else
        OK(net.isend(comm, data, size, 1, mr, NULL, send));
}

/* Sends to the next, and receives from the one before only when told. A send may be put off until its receive is there,
 * as NCCL's own IB does. */
static void ring_member(int fd)
{
    static unsigned char out[1 << 20], in[1 << 20];
    struct lc_nccl_net_device_handle *device = NULL;
    struct pair next = { 0 }, before;
    void *send, *recv, *mr;
    long begun = now_ms();
    int got[32];
    char x;

    start();
    pair_listen(&before, 0);
    tell(fd, before.handle, sizeof(before.handle));
    hear(fd, next.handle, sizeof(next.handle));
    while (!next.send || !before.recv) {
        if (!next.send)
            OK(net.connect(plugin_context, 0, next.handle, &next.send, &device));
        if (!before.recv)
            OK(net.accept(before.listener, &before.recv, &device));
        still_patient(begun, "a ring");
        sched_yield();
    }
    for (size_t size = 0; size <= sizeof(out); size = size ? size * 16 : 1) {
        bool done = false;

        begun = now_ms();
        memset(out, (int)(size % 251) + 1, size);
        memset(in, 0, sizeof(in));
        send = NULL;
        mr = mr_of(next.send, out, size ? sizeof(out) : 0);
        for (int i = 0; i < 20 && !done; i++)
            send_or_test(next.send, out, size, mr, &send, &done);
        tell(fd, "s", 1);
        hear(fd, &x, 1); /* all have sent */
        recv = post_recv(before.recv, in, sizeof(in), 1);
        for (bool came = false; !came || !done;) {
            if (!came) {
                CHECK(test_once(recv, &came, got) == LC_NCCL_SUCCESS);
                CHECK(!came || got[0] == (int)size);
            }
            if (!done)
                send_or_test(next.send, out, size, mr, &send, &done);
            still_patient(begun, "a message of a ring");
            sched_yield();
        }
        CHECK(memcmp(in, out, size) == 0);
        tell(fd, "r", 1);
        hear(fd, &x, 1);
    }
    pair_close(&next);
    pair_close(&before);
    plugin_unload();
}

void senders_may_be_first(void)
{
    enum {
        RANKS = 8
    };
    char handles[RANKS][LC_NCCL_HANDLE_BYTES], x;
    struct peer peers[RANKS];

    for (int i = 0; i < RANKS; i++)
        peers[i] = peer_start(ring_member);
    for (int i = 0; i < RANKS; i++)
        hear(peers[i].fd, handles[i], sizeof(handles[i]));
    for (int i = 0; i < RANKS; i++)
        tell(peers[i].fd, handles[(i + 1) % RANKS], sizeof(handles[i]));
    for (size_t size = 0; size <= 1 << 20; size = size ? size * 16 : 1) {
        for (int turn = 0; turn < 2; turn++) {
            for (int i = 0; i < RANKS; i++)
                hear(peers[i].fd, &x, 1);
            for (int i = 0; i < RANKS; i++)
                tell(peers[i].fd, "g", 1);
        }
    }
    for (int i = 0; i < RANKS; i++)
        peer_wait(&peers[i]);
}

#define LINES 4096 /* of 128 bytes; each 8 of them are 4 of data and a flag */

struct watched {
    const uint64_t *words;
    uint64_t flag;
    bool stop;               /* relaxed */
    unsigned torn, unsorted; /* written by the watcher until it is joined */
};

static uint64_t word_of(uint64_t flag, size_t index)
{
    return flag << 32 | (uint32_t)(index * 2654435761U + 1);
}

static void *watch_words(void *arg)
{
    struct watched *watched = arg;

    while (!__atomic_load_n(&watched->stop, __ATOMIC_RELAXED)) {
        for (size_t i = LINES * 16; i-- > 0;) {
            uint64_t word = __atomic_load_n(watched->words + i, __ATOMIC_ACQUIRE);

            if (word >> 32 != watched->flag)
                continue;
            watched->torn += word != word_of(watched->flag, i);
            if (i % 16 == 15) /* the last of a line: are all others there? */
                watched->unsorted += __atomic_load_n(watched->words + i - 15, __ATOMIC_ACQUIRE) !=
                                     word_of(watched->flag, i - 15);
        }
        sched_yield();
    }
    return NULL;
}

/* As a GPU polls the flags of the LL protocol while the transport still writes: whoever sees a flag sees its data. The
 * order of 128-byte lines, which LL128 would need, is only reported: the system's copy from a socket does not keep it,
 * and NCCL takes LL128 for device memory only, which is not offered. */
void flags_do_not_overtake_data(void)
{
    uint64_t *out = aligned_alloc(128, LINES * 128), *in = aligned_alloc(128, LINES * 128);
    struct watched watched = { .words = in };
    pthread_t watcher;
    struct pair pair;

#if defined(__SANITIZE_THREAD__)
    skip("the watcher races with the kernel by design");
#endif
    CHECK(out && in);
    start();
    pair_open(&pair, 0);
    for (uint64_t round = 1; round <= times(30, 3000); round++) {
        void *recv, *send;

        memset(in, 0, LINES * 128);
        for (size_t i = 0; i < LINES * 16; i++)
            out[i] = word_of(round, i);
        watched.flag = round;
        watched.stop = false;
        CHECK(pthread_create(&watcher, NULL, watch_words, &watched) == 0);
        recv = post_recv(pair.recv, in, LINES * 128, 1);
        send = post_send(pair.send, out, LINES * 128, 1);
        wait_both(recv, send, LINES * 128);
        __atomic_store_n(&watched.stop, true, __ATOMIC_RELAXED);
        CHECK(pthread_join(watcher, NULL) == 0);
    }
    fprintf(stderr, "words torn: %u; lines whose end came first: %u\n", watched.torn,
            watched.unsorted);
    CHECK(watched.torn == 0);
    pair_close(&pair);
    plugin_unload();
    free(out);
    free(in);
}

void rails_share_by_weight(void)
{
    start();
    skip("one connection uses one device so far");
}

static size_t size_tiny(size_t index)
{
    return index % 3;
}

static size_t room_one(size_t index)
{
    return index % 2 ? 2 : 64;
}

void empty_and_single_bytes_are_kept_apart(void)
{
    struct pair pair;

    start();
    pair_open(&pair, 0);
    run_flow(&pair, 300, 8, 64, size_tiny, room_one);
    run_flow(&pair, 300, 1, 64, size_tiny, room_one);
    pair_close(&pair);
    plugin_unload();
}

void byte_by_byte_through_a_relay(void)
{
    static const struct relay_rule rule = { .chunk = 1 };
    struct pair pair;

    start();
    relay_start(&rule);
    pair_open(&pair, 0);
    run_flow(&pair, times(60, 2000), 8, 256, size_small, NULL);
    pair_close(&pair);
    plugin_unload();
}

void cut_at_every_offset(void)
{
    struct relay_rule rule = { 0 };
    struct pair pair;

    start();
    for (rule.cut = 1; rule.cut <= times(200, 1000); rule.cut += times(13, 1)) {
        relay_start(&rule);
        pair_open(&pair, 0);
        run_flow(&pair, 12, 4, 256, size_small, NULL);
        pair_close(&pair);
    }
    plugin_unload();
}

static size_t room_full(size_t index)
{
    return LARGEST_MIXED;
}

void room_may_exceed_the_message(void)
{
    struct pair pair;

    start();
    pair_open(&pair, 0);
    run_flow(&pair, 60, 4, LARGEST_MIXED, size_mixed, room_full);
    pair_close(&pair);
    plugin_unload();
}

/* As many groups and sends as NCCL may have, none of which is tested before all are posted. */
void all_requests_at_once(void)
{
    enum {
        SENDS = 8 * LC_NCCL_MAX_REQUESTS
    };
    static unsigned char out[SENDS][64], in[SENDS][64];
    static struct waited waited[LC_NCCL_MAX_REQUESTS + SENDS];
    void *recvs[LC_NCCL_MAX_REQUESTS], *sends[SENDS];
    struct pair pair;
    long begun = now_ms();
    int n;

    start();
    n = max_recvs();
    pair_open(&pair, 0);
    for (int i = 0; i < LC_NCCL_MAX_REQUESTS; i++) {
        void *data[8], *mrs[8], *events[8] = { NULL };
        size_t sizes[8];
        int tags[8];

        for (int k = 0; k < n; k++) {
            data[k] = in[i * n + k];
            mrs[k] = mr_of(pair.recv, in, sizeof(in));
            sizes[k] = sizeof(in[0]);
            tags[k] = k;
        }
        recvs[i] = STALE;
        OK(net.irecv(pair.recv, n, data, sizes, tags, mrs, events, &recvs[i]));
        CHECK(recvs[i] && recvs[i] != STALE);
    }
    for (int i = 0; i < LC_NCCL_MAX_REQUESTS * n; i++) {
        void *mr = mr_of(pair.send, out, sizeof(out));

        memset(out[i], i + 1, sizeof(out[i]));
        do {
            OK(net.isend(pair.send, out[i], sizeof(out[i]), i % n, mr, NULL, &sends[i]));
            still_patient(begun, "room for all sends");
        } while (!sends[i]);
    }
    for (int i = 0; i < LC_NCCL_MAX_REQUESTS; i++)
        waited[i].request = recvs[LC_NCCL_MAX_REQUESTS - 1 - i];
    for (int i = 0; i < LC_NCCL_MAX_REQUESTS * n; i++)
        waited[LC_NCCL_MAX_REQUESTS + i].request = sends[LC_NCCL_MAX_REQUESTS * n - 1 - i];
    wait_all(waited, LC_NCCL_MAX_REQUESTS * (n + 1));
    for (int i = 0; i < LC_NCCL_MAX_REQUESTS * (n + 1); i++)
        CHECK(waited[i].sizes[0] == (int)sizeof(in[0]));
    CHECK(memcmp(in, out, sizeof(out[0]) * (size_t)(LC_NCCL_MAX_REQUESTS * n)) == 0);
    pair_close(&pair);
    plugin_unload();
}

void close_with_requests_outstanding(void)
{
    enum {
        RECVS = 8
    };
    size_t size = 4 << 20;

    start();
    for (size_t round = 0; round < times(12, 200); round++) {
        char *out = calloc(1, size), *in = calloc(RECVS, size);
        void *requests[16];
        struct pair pair;
        bool done = false;

        CHECK(out && in);
        pair_open(&pair, 0);
        for (int i = 0; i < RECVS; i++) {
            requests[i] = post_recv(pair.recv, in + (size_t)i * size, size, 1);
            if (i < 4)
                requests[RECVS + i] = post_send(pair.send, out, size, 1);
        }
        for (size_t i = 0; i < round && !done; i++)
            CHECK(test_once(requests[RECVS], &done, NULL) == LC_NCCL_SUCCESS);
        if (round % 2) {
            close_recv(pair.recv);
            memset(in, 0x77, RECVS * size); /* nobody writes to it any more */
            close_send(pair.send);
        } else {
            close_send(pair.send);
            free(out);
            out = NULL;
            close_recv(pair.recv);
        }
        pause_ms(1);
        for (size_t i = 0; round % 2 && i < RECVS * size; i += 4096)
            CHECK(in[i] == 0x77);
        free(out);
        free(in);
    }
    plugin_unload();
}

struct registering {
    struct pair *pair;
    bool stop; /* relaxed */
};

static void *register_all_the_time(void *arg)
{
    struct registering *job = arg;
    static char data[1 << 16];

    while (!__atomic_load_n(&job->stop, __ATOMIC_RELAXED)) {
        void *mrs[3];

        OK(net.regMr(job->pair->send, data, sizeof(data), LC_NCCL_PTR_HOST, &mrs[0]));
        OK(net.regMr(job->pair->recv, data, sizeof(data), LC_NCCL_PTR_HOST, &mrs[1]));
        OK(net.regMr(job->pair->send, data, sizeof(data), LC_NCCL_PTR_HOST, &mrs[2]));
        OK(net.deregMr(job->pair->send, mrs[0]));
        OK(net.deregMr(job->pair->recv, mrs[1]));
        OK(net.deregMr(job->pair->send, mrs[2]));
        sched_yield();
    }
    return NULL;
}

void registration_beside_traffic(void)
{
    struct registering job;
    struct pair pair;
    pthread_t thread;

    start();
    pair_open(&pair, 0);
    job = (struct registering){ .pair = &pair };
    CHECK(pthread_create(&thread, NULL, register_all_the_time, &job) == 0);
    run_flow(&pair, times(GUARD_SANITIZED ? 20 : 60, 5000), 8, LARGEST_MIXED, size_mixed, NULL);
    __atomic_store_n(&job.stop, true, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0);
    pair_close(&pair);
    plugin_unload();
}

/* Connections that end in the middle of messages: all data arrives once, or both sides get an error. */
void broken_connections_lose_nothing(void)
{
    struct relay_rule rule = { .sever = 700001, .sever_most = 3 };
    struct flow flow;
    struct pair pair;
    size_t before = 0;
    long last;

    start();
    relay_start(&rule);
    pair_open(&pair, 0);
    last = now_ms();
    flow = (struct flow){ .pair = &pair,
                          .count = times(60, 2000),
                          .window = 8,
                          .largest = LARGEST_MIXED,
                          .size = size_mixed,
                          .fails = true };
    flow_begin(&flow);
    while (flow_step(&flow)) {
        if (flow.sent + flow.received != before)
            last = now_ms();
        before = flow.sent + flow.received;
        still_patient(last, "messages over connections that end");
        sched_yield();
    }
    if (flow.error)
        CHECK(flow.error == LC_NCCL_REMOTE_ERROR);
    fprintf(stderr, "%zu of %zu messages over %u connections, result %d\n", flow.received,
            flow.count, relay_connections(), (int)flow.error);
    flow_end(&flow);
    pair_close(&pair);
    plugin_unload();
}
