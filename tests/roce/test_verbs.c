/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs CASE...: both ends of connections over the verbs transport, in one process that plays two hosts: device 0 is
 * host 1's, device 1 host 2's. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/transport.h"
#include "tests/check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WAIT_MS 60000
#define GROUPS  LC_NET_MAX_REQUESTS
#define MB      ((size_t)1 << 20)

static const struct lc_net_ops *const net = &lc_net_verbs;

static unsigned repairs; /* that the log told of; written by the transport's thread */

static void count_repairs(enum lc_log_level level, const char *file, int line, const char *text)
{
    if (strstr(text, "running again"))
        (void)__atomic_add_fetch(&repairs, 1, __ATOMIC_RELAXED);
    fprintf(stderr, "  %d %s:%d %s\n", (int)level, file, line, text);
}

/* Since the last call; both sides tell. */
static unsigned repairs_seen(void)
{
    return __atomic_exchange_n(&repairs, 0, __ATOMIC_RELAXED);
}

struct pair {
    struct lc_net_context *ctx;
    struct lc_net_listen *listen;
    struct lc_net_comm *send;
    struct lc_net_comm *recv;
    char handle[LC_NET_HANDLE_BYTES];
};

/* The guest has one processor, on which the other side has to run, too. */
static void pause_for(struct lc_deadline deadline)
{
    const struct timespec pause = { 0, 200000 };

    CHECK(!lc_deadline_passed(deadline));
    nanosleep(&pause, NULL);
}

static void begin(struct pair *pair)
{
    struct lc_net_options options = { .traffic_class = -1 };
    int n = 0;

    memset(pair, 0, sizeof(*pair));
    CHECK(!net->init(&options, &pair->ctx));
    CHECK(!net->devices(&n));
    CHECK(n == 2);
    CHECK(!net->listen(pair->ctx, 1, pair->handle, &pair->listen));
}

static void join(struct pair *pair)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);

    while (!pair->send || !pair->recv) {
        if (!pair->send)
            CHECK(!net->connect(pair->ctx, 0, pair->handle, &pair->send));
        if (!pair->recv)
            CHECK(!net->accept(pair->listen, &pair->recv));
        pause_for(deadline);
    }
}

static void end(struct pair *pair)
{
    net->close_send(pair->send);
    net->close_recv(pair->recv);
    net->close_listen(pair->listen);
    net->fini(pair->ctx);
}

static unsigned char *memory(size_t size)
{
    unsigned char *bytes = malloc(size + 1);

    CHECK(bytes);
    return bytes;
}

static void fill(unsigned char *bytes, size_t size, uint64_t seed)
{
    for (size_t i = 0; i < size; i++) {
        if (i % 8 == 0)
            seed = seed * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (unsigned char)(seed >> (8 + i % 8 * 7));
    }
}

static int poll_until_done(struct lc_net_request *request, struct lc_net_request *other,
                           size_t *sizes)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    bool done = false, other_done = false;

    for (;;) {
        int err = net->test(request, &done, sizes);

        if (err || done)
            return err;
        if (other && !other_done && net->test(other, &other_done, NULL))
            other_done = true;
        pause_for(deadline);
    }
}

static struct lc_net_request *post_recv(struct pair *pair, void *data, size_t size, int tag,
                                        struct lc_net_mr *mr)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    struct lc_net_request *request = NULL;

    for (;;) {
        CHECK(!net->irecv(pair->recv, 1, &data, &size, &tag, &mr, &request));
        if (request)
            return request;
        pause_for(deadline);
    }
}

static struct lc_net_request *post_send(struct pair *pair, void *data, size_t size, int tag,
                                        struct lc_net_mr *mr)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    struct lc_net_request *request = NULL;

    for (;;) {
        CHECK(!net->isend(pair->send, data, size, tag, mr, &request));
        if (request)
            return request;
        pause_for(deadline);
    }
}

static void one_message(struct pair *pair, size_t size, size_t posted, uint64_t seed)
{
    unsigned char *from = memory(posted), *to = memory(posted);
    struct lc_net_mr *from_mr = NULL, *to_mr = NULL;
    struct lc_net_request *recv, *send;
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    bool sent = false, received = false;
    size_t got = 99, said = 99;

    fill(from, size, seed);
    memset(to, 0xee, posted + 1);
    CHECK(!net->reg_mr(pair->send, from, posted, LC_NET_HOST, &from_mr));
    CHECK(!net->reg_mr(pair->recv, to, posted, LC_NET_HOST, &to_mr));
    recv = post_recv(pair, to, posted, 7, to_mr);
    send = post_send(pair, from, size, 7, from_mr);
    while (!sent || !received) {
        if (!sent)
            CHECK(!net->test(send, &sent, &said));
        if (!received)
            CHECK(!net->test(recv, &received, &got));
        pause_for(deadline);
    }
    CHECK(said == size && got == size);
    CHECK(!memcmp(from, to, size));
    for (size_t i = size; i <= posted; i++)
        CHECK(to[i] == 0xee);
    CHECK(!net->dereg(pair->send, from_mr));
    CHECK(!net->dereg(pair->recv, to_mr));
    free(from);
    free(to);
}

static void messages_of_all_sizes_arrive(void)
{
    static const size_t sizes[] = { 0, 1, 2, 4095, 4096, 4097, 65537, 8 * MB + 3, 64 * MB };
    struct pair pair;

    begin(&pair);
    join(&pair);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        int64_t t = lc_now_ns();

        one_message(&pair, sizes[i], sizes[i], i);
        printf("  %zu bytes: %.1f ms\n", sizes[i], (double)(lc_now_ns() - t) / 1e6);
    }
    one_message(&pair, 0, 4096, 20);
    one_message(&pair, 1000, 100000, 21);
    end(&pair);
}

/* As many as there may be; the receiver's memory is filled message by message, each of another length. */
static void move_many(struct pair *pair, int messages, size_t longest)
{
    unsigned char *from = memory(GROUPS * longest), *to = memory(GROUPS * longest);
    struct lc_net_mr *from_mr, *to_mr;
    struct lc_net_request *sends[GROUPS] = { NULL }, *recvs[GROUPS] = { NULL };
    struct lc_deadline deadline = lc_deadline_in_ms(2 * WAIT_MS);
    int sent = 0, posted = 0, complete = 0, first_send = 0;

    CHECK(!net->reg_mr(pair->send, from, GROUPS * longest, LC_NET_HOST, &from_mr));
    CHECK(!net->reg_mr(pair->recv, to, GROUPS * longest, LC_NET_HOST, &to_mr));
    while (complete < messages || first_send < messages) {
        if (posted < messages && posted < complete + GROUPS) {
            void *at = to + (size_t)(posted % GROUPS) * longest;
            int tag = 0;

            CHECK(!net->irecv(pair->recv, 1, &at, &longest, &tag, &to_mr, &recvs[posted % GROUPS]));
            posted += recvs[posted % GROUPS] != NULL;
        }
        if (sent < messages && sent < first_send + GROUPS) {
            unsigned char *at = from + (size_t)(sent % GROUPS) * longest;
            size_t size = (size_t)sent * 7919 % (longest + 1);

            fill(at, size, (uint64_t)sent);
            CHECK(!net->isend(pair->send, at, size, 0, from_mr, &sends[sent % GROUPS]));
            sent += sends[sent % GROUPS] != NULL;
        }
        if (first_send < sent) {
            bool done;

            CHECK(!net->test(sends[first_send % GROUPS], &done, NULL));
            first_send += done;
        }
        if (complete < posted) {
            size_t want = (size_t)complete * 7919 % (longest + 1), got = 0;
            unsigned char *at = to + (size_t)(complete % GROUPS) * longest;
            bool done;

            CHECK(!net->test(recvs[complete % GROUPS], &done, &got));
            if (done) {
                unsigned char *expected = memory(want);

                CHECK(got == want);
                fill(expected, want, (uint64_t)complete);
                CHECK(!memcmp(expected, at, want));
                free(expected);
                complete++;
            }
        }
        pause_for(deadline);
    }
    CHECK(!net->dereg(pair->send, from_mr));
    CHECK(!net->dereg(pair->recv, to_mr));
    free(from);
    free(to);
}

static void many_messages_are_in_flight(void)
{
    struct pair pair;

    begin(&pair);
    join(&pair);
    move_many(&pair, 300, 10000);
    move_many(&pair, 60, 300000);
    end(&pair);
}

/* The thread of the connections may be at work on the one: then there is no answer yet. */
static int refused_send(struct pair *pair, void *data, size_t size, struct lc_net_mr *mr)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    struct lc_net_request *request = NULL;
    int err = 0;

    for (;;) {
        err = net->isend(pair->send, data, size, 0, mr, &request);
        CHECK(!request);
        if (err)
            return err;
        pause_for(deadline);
    }
}

/* A group completes as one, whatever the order of its sends. */
static void a_group_of_tags_is_filled_in_any_order(void)
{
    enum {
        N = 8,
        BYTES = 5000
    };
    struct pair pair;
    unsigned char *from = memory(N * BYTES), *to = memory(N * BYTES);
    struct lc_net_mr *from_mr, *to_mr, *mrs[N];
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    struct lc_net_request *recv = NULL, *sends[N], *none;
    void *data[N];
    size_t sizes[N], got[N] = { 0 };
    int tags[N];

    begin(&pair);
    join(&pair);
    CHECK(!net->reg_mr(pair.send, from, N * BYTES, LC_NET_HOST, &from_mr));
    CHECK(!net->reg_mr(pair.recv, to, N * BYTES, LC_NET_HOST, &to_mr));
    fill(from, N * BYTES, 5);
    for (int i = 0; i < N; i++) {
        data[i] = to + i * BYTES;
        sizes[i] = BYTES;
        tags[i] = 100 + i;
        mrs[i] = to_mr;
    }
    while (!recv) {
        CHECK(!net->irecv(pair.recv, N, data, sizes, tags, mrs, &recv));
        pause_for(deadline);
    }
    sends[N - 1] = post_send(&pair, from + (N - 1) * BYTES, BYTES - N + 1, 100 + N - 1, from_mr);
    CHECK(!net->isend(pair.send, from, BYTES, 99, from_mr, &none));
    CHECK(!none);
    CHECK(!net->isend(pair.send, from, BYTES, 100 + N - 1, from_mr, &none));
    CHECK(!none);
    for (int i = N - 2; i >= 0; i--)
        sends[i] = post_send(&pair, from + i * BYTES, (size_t)(BYTES - i), 100 + i, from_mr);
    CHECK(!poll_until_done(recv, sends[0], got));
    for (int i = 0; i < N; i++) {
        CHECK(got[i] == (size_t)(BYTES - i));
        CHECK(!memcmp(from + i * BYTES, to + i * BYTES, got[i]));
    }
    for (int i = 1; i < N; i++)
        CHECK(!poll_until_done(sends[i], NULL, NULL));
    end(&pair);
    free(from);
    free(to);
}

static void a_flush_completes(void)
{
    struct pair pair;
    unsigned char *to = memory(8192);
    struct lc_net_mr *mr;
    struct lc_net_request *flush = NULL;
    void *data[2] = { to, to + 4096 };
    int sizes[2] = { 4096, 0 };
    struct lc_net_mr *mrs[2];

    begin(&pair);
    join(&pair);
    CHECK(!net->reg_mr(pair.recv, to, 8192, LC_NET_HOST, &mr));
    mrs[0] = mrs[1] = mr;
    CHECK(!net->iflush(pair.recv, 2, data, sizes, mrs, &flush));
    CHECK(flush);
    CHECK(!poll_until_done(flush, NULL, NULL));
    sizes[0] = 0;
    CHECK(!net->iflush(pair.recv, 2, data, sizes, mrs, &flush));
    CHECK(!flush);
    end(&pair);
    free(to);
}

static void too_long_a_message_fails_on_both_sides(void)
{
    struct pair pair;
    unsigned char *bytes = memory(8192);
    struct lc_net_mr *send_mr, *recv_mr;
    struct lc_net_request *recv;

    begin(&pair);
    join(&pair);
    CHECK(!net->reg_mr(pair.send, bytes, 8192, LC_NET_HOST, &send_mr));
    CHECK(!net->reg_mr(pair.recv, bytes, 8192, LC_NET_HOST, &recv_mr));
    recv = post_recv(&pair, bytes, 100, 0, recv_mr);
    CHECK(refused_send(&pair, bytes, 101, send_mr) == -EMSGSIZE);
    CHECK(refused_send(&pair, bytes, 1, send_mr) == -EMSGSIZE);
    CHECK(poll_until_done(recv, NULL, NULL) == -EREMOTEIO);
    end(&pair);
    free(bytes);
}

static void a_peer_that_closes_is_named(void)
{
    struct pair pair;
    unsigned char *bytes = memory(4096);
    struct lc_net_mr *mr;
    struct lc_net_request *recv;

    begin(&pair);
    join(&pair);
    CHECK(!net->reg_mr(pair.recv, bytes, 4096, LC_NET_HOST, &mr));
    recv = post_recv(&pair, bytes, 4096, 0, mr);
    net->close_send(pair.send);
    pair.send = NULL;
    CHECK(poll_until_done(recv, NULL, NULL) == -EREMOTEIO);
    end(&pair);
    free(bytes);
}

static void closing_with_requests_open_is_allowed(void)
{
    struct pair pair;
    unsigned char *bytes = memory(16 * MB);
    struct lc_net_mr *send_mr, *recv_mr;

    begin(&pair);
    join(&pair);
    CHECK(!net->reg_mr(pair.send, bytes, 8 * MB, LC_NET_HOST, &send_mr));
    CHECK(!net->reg_mr(pair.recv, bytes + 8 * MB, 8 * MB, LC_NET_HOST, &recv_mr));
    for (int i = 0; i < 4; i++) {
        (void)post_recv(&pair, bytes + 8 * MB, 8 * MB, 0, recv_mr);
        if (i < 3)
            (void)post_send(&pair, bytes, 8 * MB, 0, send_mr);
    }
    CHECK(!net->dereg(pair.send, send_mr));
    CHECK(!net->dereg(pair.recv, recv_mr));
    end(&pair);
    free(bytes);
}

static struct sockaddr_in address_of(const char *handle)
{
    struct sockaddr_in address = { .sin_family = AF_INET };

    memcpy(&address.sin_port, handle + 42, 2);
    memcpy(&address.sin_addr, handle + 44, 4);
    return address;
}

/* Neither those that say nothing, nor those that say something else, nor handles that are none. */
static void strangers_do_not_disturb(void)
{
    struct pair pair;
    char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_comm *comm;
    int fds[50];

    begin(&pair);
    for (int i = 0; i < 50; i++) {
        struct sockaddr_in address = address_of(pair.handle);
        char noise[64];

        fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(fds[i] >= 0);
        CHECK(!connect(fds[i], (struct sockaddr *)&address, sizeof(address)));
        memset(noise, i, sizeof(noise));
        if (i % 3)
            CHECK(send(fds[i], noise, i % 3 == 1 ? 64 : 5, MSG_NOSIGNAL) > 0);
    }
    fill((unsigned char *)handle, sizeof(handle), 1);
    CHECK(net->connect(pair.ctx, 0, handle, &comm) == -EPROTO);
    /* A ticket that nobody gave out is not followed. */
    memset(pair.handle + 32, 0x5a, 8);
    join(&pair);
    one_message(&pair, 100000, 100000, 3);
    for (int i = 0; i < 50; i++)
        close(fds[i]);
    end(&pair);
}

static void run(const char *command)
{
    char line[256];

    (void)snprintf(line, sizeof(line), ". /test/network && %s", command);
    CHECK(system(line) == 0); // NOLINT(cert-env33-c)
}

/* One of two ways ends, and the other has to do; it comes back and is used again; then all end for a while. */
static void ports_go_down_and_up(void)
{
    unsigned seen = 0;
    struct pair pair;

    begin(&pair);
    join(&pair);
    move_many(&pair, 20, 100000);
    CHECK(repairs_seen() == 0);
    if (getenv("LCTEST_RAILS")) {
        run("port_down 1 0");
        move_many(&pair, 40, 100000);
        CHECK(repairs_seen() >= 2);
        run("port_up 1 0");
        for (struct lc_deadline d = lc_deadline_in_ms(WAIT_MS); seen < 2; seen += repairs_seen())
            pause_for(d);
        move_many(&pair, 40, 100000);
    }
    run("port_down 2 0; port_down 2 1; (sleep 1; port_up 2 0; port_up 2 1) >/dev/null 2>&1 &");
    move_many(&pair, 40, 100000);
    CHECK(repairs_seen() >= 2);
    end(&pair);
}

static void packets_are_lost(void)
{
    struct pair pair;

    begin(&pair);
    join(&pair);
    run("tc qdisc add dev ph1r0 root netem loss 1% && tc qdisc add dev ph2r0 root netem loss 1%");
    move_many(&pair, 60, 100000);
    run("tc qdisc del dev ph1r0 root && tc qdisc del dev ph2r0 root");
    end(&pair);
}

static void without_any_way_both_sides_fail(void)
{
    struct pair pair;
    unsigned char *bytes = memory(4096);
    struct lc_net_mr *send_mr, *recv_mr;
    struct lc_net_request *recv, *send;

    begin(&pair);
    join(&pair);
    CHECK(!net->reg_mr(pair.send, bytes, 4096, LC_NET_HOST, &send_mr));
    CHECK(!net->reg_mr(pair.recv, bytes, 4096, LC_NET_HOST, &recv_mr));
    one_message(&pair, 100, 100, 1);
    recv = post_recv(&pair, bytes, 4096, 0, recv_mr);
    run("port_down 1 0; port_down 1 1");
    /* The receive may not have been heard of: then there is nothing to send, until the error is known. */
    for (int err = 0; !err;) {
        err = net->isend(pair.send, bytes, 4096, 0, send_mr, &send);
        if (!err && send)
            err = poll_until_done(send, recv, NULL);
        CHECK(!err || err == -EREMOTEIO);
        pause_for(lc_deadline_in_ms(WAIT_MS));
    }
    CHECK(poll_until_done(recv, NULL, NULL) == -EREMOTEIO);
    run("port_up 1 0; port_up 1 1");
    end(&pair);
    free(bytes);
}

/* A machine without power: nothing comes from either network, and who waits for a message has nothing to send. */
static void a_machine_that_is_gone_is_noticed(bool receiver_waits)
{
    struct pair pair;
    unsigned char *bytes = memory(4096);
    struct lc_net_mr *mr;
    struct lc_net_request *request = NULL;
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    int err = 0;

    begin(&pair);
    join(&pair);
    one_message(&pair, 100, 100, 1);
    CHECK(!net->reg_mr(receiver_waits ? pair.recv : pair.send, bytes, 4096, LC_NET_HOST, &mr));
    if (receiver_waits)
        request = post_recv(&pair, bytes, 4096, 0, mr);
    for (int i = 0; request && i < 1000; i++) { /* the sender's device has to have it */
        bool done;

        CHECK(!net->test(request, &done, NULL) && !done);
        pause_for(deadline);
    }
    run("for dev in ph1r0 ph2r0 ph1r1 ph2r1 lo; do tc qdisc add dev $dev root netem loss 100%; done");
    while (!err) {
        bool done;

        if (receiver_waits)
            err = net->test(request, &done, NULL);
        else
            err = net->isend(pair.send, bytes, 4096, 0, mr, &request);
        pause_for(deadline);
    }
    CHECK(err == -EREMOTEIO);
    run("for dev in ph1r0 ph2r0 ph1r1 ph2r1 lo; do tc qdisc del dev $dev root; done");
    end(&pair);
    free(bytes);
}

static void machines_that_are_gone_are_noticed(void)
{
    a_machine_that_is_gone_is_noticed(true);
    a_machine_that_is_gone_is_noticed(false);
}

/* A rank with a worker that outlives it: it sends from a process of its own, and is killed. */
static void rank_with_a_worker(int handle, int worker_ends)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    struct pair pair = { 0 };

    CHECK(read(handle, pair.handle, sizeof(pair.handle)) == (ssize_t)sizeof(pair.handle));
    CHECK(!net->init(&(struct lc_net_options){ .traffic_class = -1 }, &pair.ctx));
    while (!pair.send) {
        CHECK(!net->connect(pair.ctx, 0, pair.handle, &pair.send));
        pause_for(deadline);
    }
    if (fork() == 0) {
        char none;

        (void)!read(worker_ends, &none, 1);
        _exit(0);
    }
    (void)raise(SIGKILL);
}

/* Before anything else: who has a process with devices open is nobody's child. */
static void a_rank_that_is_killed_is_missed_though_its_worker_lives(void)
{
    struct lc_deadline deadline = lc_deadline_in_ms(WAIT_MS);
    struct lc_deadline soon;
    unsigned char *bytes = memory(4096);
    struct lc_net_request *request;
    struct lc_net_mr *mr;
    int handle[2], worker[2];
    struct pair pair;
    bool done;
    pid_t rank;

    CHECK(!pipe(handle) && !pipe(worker));
    rank = fork();
    CHECK(rank >= 0);
    if (rank == 0) {
        close(worker[1]);
        rank_with_a_worker(handle[0], worker[0]);
    }
    begin(&pair);
    CHECK(write(handle[1], pair.handle, sizeof(pair.handle)) == (ssize_t)sizeof(pair.handle));
    while (!pair.recv) {
        CHECK(!net->accept(pair.listen, &pair.recv));
        pause_for(deadline);
    }
    CHECK(!net->reg_mr(pair.recv, bytes, 4096, LC_NET_HOST, &mr));
    request = post_recv(&pair, bytes, 4096, 0, mr);
    CHECK(waitpid(rank, NULL, 0) == rank);
    soon = lc_deadline_in_ms(5000);
    while (!net->test(request, &done, NULL))
        pause_for(soon);
    CHECK(!net->dereg(pair.recv, mr));
    net->close_recv(pair.recv);
    net->close_listen(pair.listen);
    net->fini(pair.ctx);
    for (int i = 0; i < 2; i++) {
        close(handle[i]);
        close(worker[i]);
    }
    free(bytes);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"sizes",      messages_of_all_sizes_arrive                           },
    { "many",      many_messages_are_in_flight                            },
    { "tags",      a_group_of_tags_is_filled_in_any_order                 },
    { "flush",     a_flush_completes                                      },
    { "long",      too_long_a_message_fails_on_both_sides                 },
    { "closes",    a_peer_that_closes_is_named                            },
    { "open",      closing_with_requests_open_is_allowed                  },
    { "strangers", strangers_do_not_disturb                               },
    { "ports",     ports_go_down_and_up                                   },
    { "loss",      packets_are_lost                                       },
    { "deadline",  without_any_way_both_sides_fail                        },
    { "worker",    a_rank_that_is_killed_is_missed_though_its_worker_lives},
    { "gone",      machines_that_are_gone_are_noticed                     },
};

int main(int argc, char **argv)
{
    lc_log_set_sink(count_repairs);
    lc_log_set_level(LC_LOG_INFO);
    for (int k = 1; k < argc; k++) {
        bool known = false;

        for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
            int64_t begun = lc_now_ns();

            if (strcmp(argv[k], cases[i].name) != 0)
                continue;
            known = true;
            cases[i].run();
            printf("%s: ok, %.2f s\n", argv[k], (double)(lc_now_ns() - begun) / 1e9);
            (void)fflush(stdout);
        }
        CHECK(known);
    }
    return 0;
}
