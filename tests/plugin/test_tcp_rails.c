/* SPDX-License-Identifier: Apache-2.0
 *
 * The TCP transport over two interfaces: test_tcp_rails CASE [6]. Two processes in network namespaces of their own, joined
 * by two pairs of veth that are given rates, taken down and put up again. Every byte of every message is looked at. */
#include "plugin/net/tcp/tcp_internal.h"
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "common/log.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define RAILS 2
#define ROOM  ((size_t)256 << 10)
#define DEPTH 8

static bool v6;

/* ---- namespaces ---- */

__attribute__((format(printf, 1, 2))) static void shell(const char *fmt, ...)
{
    char command[512];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(command, sizeof(command), fmt, ap);
    va_end(ap);
    if (system(command) !=
        0) { // NOLINT(cert-env33-c): ip and tc have no library that is everywhere
        (void)fprintf(stderr, "failed: %s\n", command);
        CHECK(!"command");
    }
}

static bool write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

    if (fd >= 0)
        close(fd);
    return ok;
}

static bool own_network(void)
{
    char map[64];

    if (unshare(CLONE_NEWNET) == 0)
        return true;
    (void)snprintf(map, sizeof(map), "0 %u 1", (unsigned)geteuid());
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0)
        return false;
    (void)write_file("/proc/self/setgroups", "deny");
    return write_file("/proc/self/uid_map", map);
}

/* Without duplicate address detection, which takes a second. IPv6 addresses go when a link goes down. */
static void put_up(int rail, int side)
{
    if (v6)
        shell("ip addr replace fd98:%d::%d/64 dev r%d nodad", rail + 1, side, rail);
    else
        shell("ip addr replace 10.98.%d.%d/24 dev r%d", rail, side, rail);
    shell("ip link set r%d up", rail);
}

static void have_addresses(int side)
{
    shell("ip link set lo up");
    for (int i = 0; i < RAILS; i++)
        put_up(i, side);
}

static bool all_run(void)
{
    struct ifaddrs *all;
    unsigned run = 0;

    CHECK(getifaddrs(&all) == 0);
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (i->ifa_addr && i->ifa_addr->sa_family == (v6 ? AF_INET6 : AF_INET) &&
            i->ifa_name[0] == 'r' && (i->ifa_flags & IFF_RUNNING))
            run |= 1u << (i->ifa_name[1] - '0');
    }
    freeifaddrs(all);
    return run == (1u << RAILS) - 1;
}

/* An end runs when the other one is up, too. */
static void wait_for_carrier(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

    while (!all_run()) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

static void limit(int rail, int kbit)
{
    shell("tc qdisc replace dev r%d root tbf rate %dkbit burst 32k latency 400ms", rail, kbit);
}

/* ---- messages that know what they are ---- */

static size_t size_of(uint64_t k)
{
    return k % 5 == 0 ? 1 + k % 300 : 60000 + k * 7919 % 190000;
}

static void fill(unsigned char *data, size_t size, uint64_t k)
{
    for (size_t i = 0; i < size; i++)
        data[i] = (unsigned char)(k * 131 + i * 7 + (i >> 8));
}

struct message {
    unsigned char data[ROOM];
    struct lc_net_request *r;
    uint64_t k;
};

static struct message messages[DEPTH];
static unsigned char expected[ROOM];

/* ---- the receiver: another process ---- */

/* True if it was the last one. */
static bool take(struct message *m, uint64_t k)
{
    bool done;
    size_t got;

    CHECK(lc_net_tcp.test(m->r, &done, &got) == 0);
    if (!done)
        return false;
    m->r = NULL;
    if (got == 0)
        return true;
    CHECK(got == size_of(k));
    fill(expected, got, k);
    CHECK(memcmp(m->data, expected, got) == 0);
    return false;
}

static void receive_all(struct lc_net_comm *comm)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    uint64_t posted = 0;
    uint64_t taken = 0;

    for (;;) {
        while (posted < taken + DEPTH) {
            struct message *m = &messages[posted % DEPTH];
            void *at = m->data;
            size_t room = ROOM;
            int tag = 0;

            CHECK(lc_net_tcp.irecv(comm, 1, &at, &room, &tag, NULL, &m->r) == 0 && m->r);
            posted++;
        }
        if (take(&messages[taken % DEPTH], taken))
            return;
        if (!messages[taken % DEPTH].r) {
            taken++;
            end = lc_deadline_in_ms(PATIENCE_MS);
        }
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

static void say(int fd, const void *data, size_t size)
{
    CHECK(send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size);
}

static void hear(int fd, void *data, size_t size)
{
    CHECK(recv(fd, data, size, MSG_WAITALL) == (ssize_t)size);
}

static struct lc_net_context *begin(void)
{
    struct lc_net_context *ctx;
    int n = 0;

    CHECK(lc_net_tcp.init(&(struct lc_net_options){ .traffic_class = -1 }, &ctx) == 0 && ctx);
    CHECK(lc_net_tcp.devices(&n) == 0 && n == RAILS);
    return ctx;
}

static void be_receiver(int fd)
{
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_comm *comm = NULL;
    struct lc_net_listen *listen;
    struct lc_net_context *ctx;
    char word = 1;

    CHECK(unshare(CLONE_NEWNET) == 0);
    say(fd, &word, 1);
    hear(fd, &word, 1);
    have_addresses(2);
    wait_for_carrier();
    ctx = begin();
    CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
    say(fd, handle, sizeof(handle));
    while (!comm)
        CHECK(lc_net_tcp.accept(listen, &comm) == 0);
    lc_net_tcp.close_listen(listen);
    receive_all(comm);
    say(fd, &word, 1);
    lc_net_tcp.close_recv(comm);
    lc_net_tcp.fini(ctx);
    exit(0);
}

/* ---- the report's side: what libloongcomm.so would export ---- */

void loongcomm_metrics_add_v1(const char *source, const char *device, const char *peer,
                              const char *name, uint64_t value);
void loongcomm_metrics_flush_v1(void (*flush)(void), int wanted);

static struct {
    uint64_t bytes, messages, rails_lost, sent_again;
} told[RAILS];
static void (*flush_now)(void);

/* Of the sender; all with a lock of the connection held, and there is one connection. */
void loongcomm_metrics_add_v1(const char *source, const char *device, const char *peer,
                              const char *name, uint64_t value)
{
    int rail = device[1] - '0';

    CHECK(strcmp(source, "tcp") == 0 && strchr(peer, v6 ? ':' : '.'));
    CHECK(device[0] == 'r' && rail >= 0 && rail < RAILS);
    told[rail].bytes += strcmp(name, "bytes_sent") == 0 ? value : 0;
    told[rail].messages += strcmp(name, "messages_sent") == 0 ? value : 0;
    told[rail].rails_lost += strcmp(name, "rails_lost") == 0 ? value : 0;
    told[rail].sent_again += strcmp(name, "pieces_sent_again") == 0 ? value : 0;
}

void loongcomm_metrics_flush_v1(void (*flush)(void), int wanted)
{
    flush_now = wanted ? flush : NULL;
}

/* ---- the sender ---- */

static struct conn *conn;
static uint64_t next_message;
static uint64_t oldest;

static void send_one(void)
{
    struct message *m = &messages[next_message % DEPTH];
    size_t size = size_of(next_message);

    fill(m->data, size, next_message);
    CHECK(lc_net_tcp.isend((struct lc_net_comm *)conn, m->data, size, 0, NULL, &m->r) == 0 && m->r);
    next_message++;
}

/* Sends for ever, until told: with all messages confirmed, so that it can go on later. */
static void stream_until(bool (*reached)(void))
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool enough = false;

    while (!enough || oldest < next_message) {
        while (!enough && next_message < oldest + DEPTH)
            send_one();
        if (oldest < next_message) {
            bool done;

            CHECK(lc_net_tcp.test(messages[oldest % DEPTH].r, &done, NULL) == 0);
            oldest += done;
        }
        enough = enough || reached();
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

static uint64_t marks[RAILS];

/* Of pieces; what was sent again counts again. With conn->lock held. */
static uint64_t sum_bytes(int rail)
{
    uint64_t bytes = 0;

    for (int i = 0; i < conn->n_lanes; i++)
        bytes += conn->lanes[i].rail == rail ? conn->lanes[i].bytes : 0;
    return bytes;
}

static uint64_t passed(int rail)
{
    uint64_t bytes;

    conn_lock(conn);
    bytes = sum_bytes(rail);
    conn_unlock(conn);
    return bytes - marks[rail];
}

static void mark(void)
{
    for (int i = 0; i < RAILS; i++) {
        marks[i] = 0;
        marks[i] = passed(i);
    }
}

static uint64_t want_bytes;

static bool so_much_has_passed(void)
{
    return passed(0) + passed(1) >= want_bytes;
}

static void stream(uint64_t bytes)
{
    mark();
    want_bytes = bytes;
    stream_until(so_much_has_passed);
}

static int lanes_up(int rail)
{
    int n = 0;

    conn_lock(conn);
    for (int i = 0; i < conn->n_lanes; i++)
        n += conn->lanes[i].up && conn->lanes[i].rail == rail;
    conn_unlock(conn);
    return n;
}

static int watched;

static bool is_cut;

/* In the middle of messages. */
static bool it_is_cut_and_lost(void)
{
    if (!is_cut && passed(watched) > 100000) {
        shell("ip link set r%d down", watched);
        is_cut = true;
    }
    return is_cut && lanes_up(watched) == 0;
}

static bool it_carries_again(void)
{
    return lanes_up(watched) > 0 && passed(watched) > 100000;
}

static bool all_are_up(void)
{
    return lanes_up(0) + lanes_up(1) == conn->n_lanes;
}

static double share(int rail)
{
    return (double)passed(rail) / (double)(passed(0) + passed(1));
}

/* ---- the cases ---- */

/* Rates follow, and schedulers have moods: what has to be true is so three times in a row, sooner or later. */
static void stream_until_share(bool (*reached)(void))
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

    for (int in_a_row = 0; in_a_row < 3; in_a_row = reached() ? in_a_row + 1 : 0) {
        stream(1000000);
        if (getenv("LCTEST_VERBOSE"))
            (void)fprintf(stderr, "shares %.2f %.2f\n", share(0), share(1));
        CHECK(!lc_deadline_passed(end));
    }
}

static bool half_as_much(void)
{
    return share(1) > 0.15 && share(1) < 0.5;
}

static void both_carry_by_what_they_can(void)
{
    limit(0, 80000);
    limit(1, 40000);
    stream_until_share(half_as_much);
    (void)printf("shares with 80 and 40 Mb/s: %.2f %.2f\n", share(0), share(1));
}

static void a_broken_one_is_left_and_taken_again(int rail)
{
    watched = rail;
    is_cut = false;
    mark();
    stream_until(it_is_cut_and_lost);
    stream(1000000);
    CHECK(passed(rail) == 0 && lanes_up(1 - rail) > 0);
    put_up(rail, 1);
    mark();
    stream_until(it_carries_again);
}

static bool it_is_slow(void)
{
    return share(1) < 0.25;
}

static bool it_is_fast(void)
{
    return share(1) > 0.3 && share(1) < 0.7;
}

static void a_slow_one_carries_less_until_it_is_fast_again(void)
{
    limit(0, 80000);
    limit(1, 80000);
    stream_until_share(it_is_fast);
    limit(1, 8000);
    stream_until_share(it_is_slow);
    (void)printf("share of the one that is ten times slower: %.2f\n", share(1));
    limit(1, 80000);
    stream_until_share(it_is_fast);
}

/* What is thought of a rail is tried again now and then, or one bad moment would be the end of it. */
static void a_bad_opinion_does_not_last(void)
{
    conn_lock(conn);
    for (int i = 0; i < conn->n_lanes; i++) {
        if (conn->lanes[i].rail == 1)
            conn->lanes[i].rate = 20000;
    }
    conn_unlock(conn);
    stream_until_share(it_is_fast);
}

static void the_report_knows_it(const char *what)
{
    flush_now();
    CHECK(told[0].messages == next_message && told[1].messages == 0);
    for (int i = 0; i < RAILS; i++)
        CHECK(told[i].bytes == sum_bytes(i) && told[i].bytes > 0);
    if (strcmp(what, "weights") != 0)
        CHECK(told[0].rails_lost && told[1].rails_lost && told[0].sent_again);
    flush_now();
    CHECK(told[0].messages == next_message); /* once */
}

static void connect_to(struct lc_net_context *ctx, void *handle)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_net_comm *comm = NULL;

    while (!comm) {
        CHECK(lc_net_tcp.connect(ctx, 0, handle, &comm) == 0 && !lc_deadline_passed(end));
        sched_yield();
    }
    conn = (struct conn *)comm;
    CHECK(conn->n_rails == RAILS);
}

static int run(const char *what, int fd, pid_t pid)
{
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_context *ctx;
    struct lc_net_request *last;
    bool done = false;
    char word = 1;
    int status;

    hear(fd, &word, 1);
    for (int i = 0; i < RAILS; i++)
        shell("ip link add name r%d type veth peer name r%d netns %d", i, i, (int)pid);
    have_addresses(1);
    say(fd, &word, 1);
    wait_for_carrier();
    ctx = begin();
    hear(fd, handle, sizeof(handle));
    connect_to(ctx, handle);
    stream_until(all_are_up);
    if (strcmp(what, "weights") == 0) {
        both_carry_by_what_they_can();
        a_slow_one_carries_less_until_it_is_fast_again();
        a_bad_opinion_does_not_last();
    } else {
        unsigned rounds = getenv("LCTEST_SOAK") ? 40 : 2;

        /* Their rates differ, so that pieces wait on the slower one when it goes. */
        limit(0, 200000);
        limit(1, 100000);
        for (unsigned i = 0; i < rounds; i++)
            a_broken_one_is_left_and_taken_again(rounds == 2 ? (int)i : (int)(random() % RAILS));
    }
    the_report_knows_it(what);
    CHECK(lc_net_tcp.isend((struct lc_net_comm *)conn, messages[0].data, 0, 0, NULL, &last) == 0);
    while (!done)
        CHECK(lc_net_tcp.test(last, &done, NULL) == 0);
    hear(fd, &word, 1);
    lc_net_tcp.close_send((struct lc_net_comm *)conn);
    lc_net_tcp.fini(ctx);
    CHECK(told[0].messages == next_message + 1);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return 0;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    int fds[2];
    pid_t pid;

    v6 = argc > 2 && strcmp(argv[2], "6") == 0;
    setenv("PATH", "/usr/sbin:/sbin:/usr/bin:/bin", 1);
    if (system("ip -V >/dev/null 2>&1 && tc -V >/dev/null 2>&1") != 0) { // NOLINT(cert-env33-c)
        (void)puts("SKIPPED: no ip and tc here (iproute2): rails of the TCP transport not tested");
        return 77;
    }
    if (!own_network() || system("ip link add name r0 type veth peer name r9 && ip link del r0") !=
                              0) { // NOLINT(cert-env33-c)
        (void)puts(
            "SKIPPED: no network namespace or no veth to be had: rails of the TCP transport not tested");
        return 77;
    }
    tcp_settings(2, 16384, 60);
    setenv("NCCL_SOCKET_IFNAME", "r", 1);
    setenv("NCCL_SOCKET_FAMILY", v6 ? "AF_INET6" : "AF_INET", 1);
    lc_log_set_level(getenv("LCTEST_VERBOSE") ? LC_LOG_DEBUG : LC_LOG_ERROR);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        be_receiver(fds[1]);
    close(fds[1]);
    return run(what, fds[0], pid);
}
