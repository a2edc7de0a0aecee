/* SPDX-License-Identifier: Apache-2.0
 *
 * After an abort NCCL calls no more, deregisters, frees the buffers, and only then closes: test_tcp_dereg SOCKETS. */
#include "plugin/net/tcp/tcp_internal.h"
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "common/log.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SIZE    ((size_t)64 << 20) /* more than sockets hold */
#define OTHER   0xee               /* what the memory's next owner has written */
#define LOOK_MS 200                /* at least */
#define TOLD_MS \
    20000 /* far less than the timeout of a connection, and more than a loaded machine needs */

static struct lc_net_context *ctx;

/* Which side aborts, and how. */
struct way {
    bool sender;
    bool zeros;    /* messages that are sent without most of their bytes */
    bool unmapped; /* nobody has the memory after it was freed */
    bool failed;   /* the connection had an error before */
};

struct message {
    struct pair pair;
    unsigned char *from;
    unsigned char *to;
    struct lc_net_mr *from_mr;
    struct lc_net_mr *to_mr;
    struct lc_net_request *send;
    struct lc_net_request *recv;
};

static unsigned char *map(void *at)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0);
    unsigned char *data = mmap(at, SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);

    CHECK(data != MAP_FAILED && (!at || data == at));
    return data;
}

static void wait_for_lanes(struct pair *pair)
{
    struct conn *conn = (struct conn *)pair->recv;
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool all = false;

    while (!all) {
        conn_lock(conn);
        all = conn->n_up == conn->n_lanes;
        conn_unlock_unchanged(conn);
        CHECK(!lc_deadline_passed(end));
        usleep(1000);
    }
}

static void begin(struct message *m, bool zeros)
{
    void *at;
    size_t room = SIZE;
    int tag = 0;

    m->pair = pair_open(ctx, 0);
    wait_for_lanes(&m->pair);
    m->from = map(NULL);
    m->to = map(NULL);
    for (size_t i = 0; i < SIZE; i += zeros ? 65536 : 1)
        m->from[i] = 0x77;
    at = m->to;
    CHECK(lc_net_tcp.reg_mr(m->pair.recv, m->to, SIZE, LC_NET_HOST, &m->to_mr) == 0);
    CHECK(lc_net_tcp.reg_mr(m->pair.send, m->from, SIZE, LC_NET_HOST, &m->from_mr) == 0);
    CHECK(lc_net_tcp.irecv(m->pair.recv, 1, &at, &room, &tag, &m->to_mr, &m->recv) == 0 && m->recv);
    CHECK(lc_net_tcp.isend(m->pair.send, m->from, SIZE, 0, m->from_mr, &m->send) == 0 && m->send);
}

/* The other side goes on, and may not take what it gets for a message. Its error, 0: it waits. */
static int go_on(struct lc_net_request *request)
{
    struct lc_deadline end = lc_deadline_in_ms(LOOK_MS);
    struct lc_deadline last = lc_deadline_in_ms(TOLD_MS);
    bool done = false;
    int err = 0;

    while (!lc_deadline_passed(end) || (!err && !lc_deadline_passed(last))) {
        int now = err ? 0 : lc_net_tcp.test(request, &done, NULL);

        CHECK(!done);
        err = now ? now : err;
        sched_yield();
    }
    return err;
}

static void an_abort_leaves_the_memory_alone(struct way way)
{
    struct message m;
    unsigned char *gone;

    begin(&m, way.zeros);
    gone = way.sender ? m.from : m.to;
    if (way.failed)
        conn_fail((struct conn *)(way.sender ? m.pair.send : m.pair.recv), -EREMOTEIO, "a test");
    if (way.sender)
        CHECK(lc_net_tcp.dereg(m.pair.send, m.from_mr) == 0);
    else
        CHECK(lc_net_tcp.dereg(m.pair.recv, m.to_mr) == 0);
    CHECK(munmap(gone, SIZE) == 0);
    if (!way.unmapped)
        memset(map(gone), OTHER, SIZE);
    CHECK(go_on(way.sender ? m.recv : m.send) != 0); /* it is told, not left to its timeout */
    for (size_t i = 0; i < SIZE && !way.unmapped; i++)
        CHECK(gone[i] == OTHER);
    if (way.sender)
        CHECK(lc_net_tcp.dereg(m.pair.recv, m.to_mr) == 0);
    else
        CHECK(lc_net_tcp.dereg(m.pair.send, m.from_mr) == 0);
    pair_close(&m.pair);
    CHECK(munmap(way.sender ? m.to : m.from, SIZE) == 0);
    CHECK(way.unmapped || munmap(gone, SIZE) == 0);
}

/* Memory that no open request uses is deregistered all the time: of what is over, of what a copy was kept. */
static void other_memory_ends_nothing(void)
{
    static unsigned char from[2][8192], to[2][8192];
    struct pair pair = pair_open(ctx, 0);
    struct lc_net_mr *send_mrs[2], *recv_mrs[2];
    struct lc_net_request *send, *recv;
    size_t room = sizeof(to[0]);
    void *at = to[0];
    bool done = false;
    int tag = 0;

    for (int i = 0; i < 2; i++) {
        memset(from[i], i + 1, sizeof(from[i]));
        CHECK(lc_net_tcp.reg_mr(pair.send, from[i], sizeof(from[i]), LC_NET_HOST, &send_mrs[i]) ==
              0);
        CHECK(lc_net_tcp.reg_mr(pair.recv, to[i], sizeof(to[i]), LC_NET_HOST, &recv_mrs[i]) == 0);
    }
    CHECK(lc_net_tcp.dereg(pair.recv, send_mrs[0]) == -EINVAL);
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, &recv_mrs[0], &recv) == 0 && recv);
    CHECK(lc_net_tcp.dereg(pair.recv, recv_mrs[1]) == 0); /* another one is open */
    CHECK(lc_net_tcp.isend(pair.send, from[0], sizeof(from[0]), 0, send_mrs[0], &send) == 0 &&
          send);
    pair_wait(send, recv, NULL, NULL);
    CHECK(memcmp(from[0], to[0], sizeof(to[0])) == 0);
    CHECK(lc_net_tcp.dereg(pair.recv, recv_mrs[0]) == 0);
    CHECK(lc_net_tcp.dereg(pair.send, send_mrs[0]) == 0);
    CHECK(lc_net_tcp.isend(pair.send, from[1], sizeof(from[1]), 0, send_mrs[1], &send) == 0 &&
          send);
    while (!done) /* the copy */
        CHECK(lc_net_tcp.test(send, &done, NULL) == 0);
    CHECK(lc_net_tcp.dereg(pair.send, send_mrs[1]) == 0);
    memset(from[1], OTHER, sizeof(from[1]));
    at = to[1];
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    pair_wait(NULL, recv, NULL, NULL);
    CHECK(to[1][0] == 2 && to[1][sizeof(to[1]) - 1] == 2);
    pair_stream(&pair, 20, 100000, 4, 1);
    pair_close(&pair);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    tcp_settings(atoi(argv[1]), 262144, 60);
    lc_log_set_level(LC_LOG_ERROR);
    CHECK(lc_net_tcp.init(&(struct lc_net_options){ .traffic_class = -1 }, &ctx) == 0 && ctx);
    other_memory_ends_nothing();
    for (unsigned i = 0; i < 16; i++)
        an_abort_leaves_the_memory_alone((struct way){ i & 1, i & 2, i & 4, i & 8 });
    lc_net_tcp.fini(ctx);
    return 0;
}
