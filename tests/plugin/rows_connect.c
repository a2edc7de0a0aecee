/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/rows.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define PORTS 256

static void few_messages(struct pair *pair)
{
    struct flow flow = { .pair = pair,
                         .count = 20,
                         .window = 4,
                         .largest = LARGEST_MIXED,
                         .size = size_mixed };

    flow_run(&flow);
}

static uint16_t some_port(void)
{
    uint16_t ports[PORTS];

    CHECK(guard_ports(ports, PORTS) >= 1);
    return ports[0];
}

void strangers_do_not_keep_a_peer_out(void)
{
    static const char http[] = "GET / HTTP/1.0\r\nHost: localhost\r\n\r\n";
    uint16_t ports[PORTS];
    int fds[100];
    struct pair pair;
    long begun = now_ms();
    size_t count;

    start();
    pair_listen(&pair, 0);
    count = guard_ports(ports, PORTS);
    CHECK(count >= 1);
    for (size_t i = 0; i < 100; i++) {
        fds[i] = stranger(ports[i % count]);
        if (i % 2)
            (void)send(fds[i], http, sizeof(http) - 1, MSG_NOSIGNAL);
        if (i % 10 == 9)
            CHECK(!CALL(net.accept(pair.listener, &pair.recv, NULL)) && !pair.recv);
    }
    while (!pair_step(&pair, 0)) {
        still_patient(begun, "a peer among strangers");
        sched_yield();
    }
    few_messages(&pair);
    for (size_t i = 0; i < 100; i++)
        close(fds[i]);
    pair_close(&pair);
    plugin_unload();
}

void strangers_leave_at_every_byte(void)
{
    static const struct linger reset = { .l_onoff = 1, .l_linger = 0 };
    unsigned char bytes[80];
    struct pair pair;
    long begun = now_ms();

    start();
    pair_listen(&pair, 0);
    memset(bytes, 0x4c, sizeof(bytes));
    for (size_t i = 0; i < 2 * sizeof(bytes); i++) {
        int fd = stranger(some_port());

        if (i / 2)
            (void)send(fd, bytes, i / 2, MSG_NOSIGNAL);
        if (i % 2)
            CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)) == 0);
        close(fd);
        if (i % 8 == 0)
            CHECK(!CALL(net.accept(pair.listener, &pair.recv, NULL)) && !pair.recv);
    }
    while (!pair_step(&pair, 0)) {
        still_patient(begun, "a peer after strangers");
        sched_yield();
    }
    few_messages(&pair);
    pair_close(&pair);
    plugin_unload();
}

/* What a peer of another listener said, said again to this one. */
void former_greeting_is_refused(void)
{
    static const struct relay_rule rule = { 0 };
    unsigned char greeting[4096];
    struct pair former, pair;
    size_t size;
    long begun;

    start();
    relay_start(&rule);
    pair_open(&former, 0);
    few_messages(&former);
    size = relay_first(greeting, sizeof(greeting));
    CHECK(size > 0);
    for (size_t i = 0; i < times(10, 200); i++) {
        int fd;

        begun = now_ms();
        pair_listen(&pair, 0);
        guard_redirect(NULL);
        fd = stranger(some_port());
        (void)send(fd, greeting, size, MSG_NOSIGNAL);
        for (int n = 0; n < 20; n++) {
            CHECK(!CALL(net.accept(pair.listener, &pair.recv, NULL)));
            CHECK(!pair.recv);
            pause_ms(1);
        }
        while (!pair_step(&pair, 0)) {
            still_patient(begun, "a peer after a former one");
            sched_yield();
        }
        few_messages(&pair);
        pair_close(&pair);
        close(fd);
    }
    pair_close(&former);
    plugin_unload();
}

void every_order_of_connect_and_accept(void)
{
    uint64_t state = 88172645463325252ULL;
    struct pair pair;

    start();
    for (unsigned order = 0; order < times(32, 256); order++) {
        long begun = now_ms();

        pair_listen(&pair, 0);
        for (int bit = 0; !pair.send || !pair.recv; bit++) {
            bool first = bit < 5 ? order >> bit & 1 : random_next(&state) & 1;

            if (first && !pair.send)
                OK(net.connect(plugin_context, 0, pair.handle, &pair.send, NULL));
            else if (!first && !pair.recv)
                OK(net.accept(pair.listener, &pair.recv, NULL));
            still_patient(begun, "connect and accept in turns");
            sched_yield();
        }
        pair_close(&pair);
    }
    plugin_unload();
}

static void on_timer(int signal)
{
}

void timers_interrupt_everything(void)
{
    struct sigaction action = { .sa_handler = on_timer };
    struct itimerval every = {
        {0,  1000},
        { 0, 1000}
    };
    struct pair pair;

    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && sigaction(SIGPROF, &action, NULL) == 0);
    CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0 && setitimer(ITIMER_PROF, &every, NULL) == 0);
    start();
    for (size_t i = 0; i < times(5, 100); i++) {
        pair_open(&pair, 0);
        few_messages(&pair);
        pair_close(&pair);
    }
    plugin_unload();
}

#define SOON "3" /* seconds after which a connection without a way to its peer fails */

static void receiving_victim(int fd)
{
    static char data[1 << 20];
    struct pair pair;

    start();
    open_receiving(&pair, fd);
    (void)post_recv(pair.recv, data, sizeof(data), 1);
    tell(fd, "x", 1);
    pause();
}

static void sending_victim(int fd)
{
    struct pair pair;

    start();
    open_sending(&pair, fd);
    tell(fd, "x", 1);
    pause();
}

/* Until `request` fails; what it fails with. */
static enum lc_nccl_result wait_failure(void *request)
{
    enum lc_nccl_result result;
    long begun = now_ms();
    int sizes[32] = { 0 };
    bool done = false;

    while (!(result = test_once(request, &done, sizes))) {
        CHECK(!done);
        still_patient(begun, "the failure of a request whose peer is gone");
        pause_ms(1);
    }
    return result;
}

void dead_peer_fails_every_later_call(void)
{
    static char data[4 << 20];
    struct peer receiver, sender;
    void *requests[4], *in, *stale = STALE, *part = data, *mr, *in_mr, *event = NULL;
    size_t size = sizeof(data);
    struct pair out, back;
    int tag = 1;
    char x;

    CHECK(setenv("LOONGCOMM_NET_TIMEOUT", SOON, 1) == 0);
    receiver = peer_start(receiving_victim);
    sender = peer_start(sending_victim);
    start();
    open_sending(&out, receiver.fd);
    open_receiving(&back, sender.fd);
    hear(receiver.fd, &x, 1);
    hear(sender.fd, &x, 1);
    in = post_recv(back.recv, data, sizeof(data), 1);
    mr = mr_of(out.send, data, sizeof(data));
    in_mr = mr_of(back.recv, data, sizeof(data));
    peer_kill(&receiver);
    peer_kill(&sender);
    for (int i = 0; i < 4; i++) {
        requests[i] = NULL;
        if (net.isend(out.send, data, 1 << 20, 1, mr, NULL, &requests[i]))
            break;
    }
    if (requests[0])
        CHECK(wait_failure(requests[0]) == LC_NCCL_REMOTE_ERROR);
    CHECK(wait_failure(in) == LC_NCCL_REMOTE_ERROR);
    for (int i = 0; i < 3; i++) {
        CHECK(CALL(net.isend(out.send, data, 1, 1, mr, NULL, &stale)) == LC_NCCL_REMOTE_ERROR);
        CHECK(CALL(net.irecv(back.recv, 1, &part, &size, &tag, &in_mr, &event, &stale)) ==
              LC_NCCL_REMOTE_ERROR);
    }
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "") >= 1);
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "") <= 4);
    pair_close(&out);
    pair_close(&back);
    plugin_unload();
}

void stopped_peer_does_not_hold_up_closing(void)
{
    struct peer receiver = peer_start(receiving_victim), sender = peer_start(sending_victim);
    static char data[1 << 20];
    struct pair out, back;
    long begun;
    char x;

    start();
    open_sending(&out, receiver.fd);
    open_receiving(&back, sender.fd);
    hear(receiver.fd, &x, 1);
    hear(sender.fd, &x, 1);
    CHECK(kill(receiver.pid, SIGSTOP) == 0 && kill(sender.pid, SIGSTOP) == 0);
    (void)post_send(out.send, data, sizeof(data), 1);
    (void)post_recv(back.recv, data, sizeof(data), 1);
    begun = now_ms();
    pair_close(&out);
    pair_close(&back);
    CHECK(now_ms() - begun < patience_ms() / 2);
    plugin_unload();
    peer_kill(&receiver);
    peer_kill(&sender);
}

#define LAST       30
#define LAST_BYTES 8000 /* all of them are more than a socket holds */

static void slow_receiver(int fd)
{
    static unsigned char data[LAST][LAST_BYTES];
    void *requests[LAST];
    struct pair pair;

    start();
    open_receiving(&pair, fd);
    for (int i = 0; i < LAST; i++)
        requests[i] = post_recv(pair.recv, data[i], sizeof(data[i]), 1);
    tell(fd, "x", 1);
    for (int i = 0; i < LAST; i++) {
        CHECK(wait_done(requests[i]) == LAST_BYTES);
        CHECK(data[i][0] == i + 1 && data[i][LAST_BYTES - 1] == i + 1);
    }
    pair_close(&pair);
    plugin_unload();
}

void last_messages_outlive_the_plugin(void)
{
    struct peer receiver = peer_start(slow_receiver);
    static unsigned char data[LAST][LAST_BYTES];
    struct holdings before, after;
    struct pair out;
    char x;

    start();
    plugin_unload();
    before = holdings_now();
    start();
    open_sending(&out, receiver.fd);
    hear(receiver.fd, &x, 1);
    CHECK(kill(receiver.pid, SIGSTOP) == 0);
    for (int i = 0; i < LAST; i++) {
        memset(data[i], i + 1, sizeof(data[i]));
        CHECK(wait_done(post_send(out.send, data[i], sizeof(data[i]), 1)) == LAST_BYTES);
    }
    pair_close(&out);
    plugin_unload();
    pause_ms(1000);
    CHECK(kill(receiver.pid, SIGCONT) == 0);
    peer_wait(&receiver);
    after = holdings_since(&before);
    CHECK(after.descriptors <= before.descriptors && after.threads <= before.threads);
    start(); /* as if it had never been there */
    plugin_unload();
}

static void *close_sending(void *arg)
{
    close_send(((struct pair *)arg)->send);
    return NULL;
}

static void *close_receiving(void *arg)
{
    close_recv(((struct pair *)arg)->recv);
    return NULL;
}

void both_ends_close_in_any_order(void)
{
    pthread_t threads[2];
    struct pair pair;

    start();
    for (size_t i = 0; i < times(12, 300); i++) {
        pair_open(&pair, 0);
        if (i % 3 == 0) {
            close_sending(&pair);
            close_receiving(&pair);
        } else if (i % 3 == 1) {
            close_receiving(&pair);
            close_sending(&pair);
        } else {
            CHECK(pthread_create(&threads[0], NULL, close_sending, &pair) == 0);
            CHECK(pthread_create(&threads[1], NULL, close_receiving, &pair) == 0);
            CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
        }
    }
    plugin_unload();
}

/* Until connect fails or 60 s pass; it never connects. */
static void never_connects(char *handle)
{
    long begun = now_ms();
    void *comm = STALE;

    while (CALL(net.connect(plugin_context, 0, handle, &comm, NULL)) == LC_NCCL_SUCCESS) {
        CHECK(!comm);
        still_patient(begun, "the refusal of a handle");
        pause_ms(1);
    }
    CHECK(!comm);
}

void handle_may_be_garbage(void)
{
    char handle[LC_NCCL_HANDLE_BYTES];
    uint64_t state = 7;
    struct pair pair;

    start();
    for (size_t round = 0; round < times(20, 1000); round++) {
        for (size_t i = 0; i < sizeof(handle); i++)
            handle[i] = (char)random_next(&state);
        never_connects(handle);
        never_connects(handle);
    }
    memset(handle, 0, sizeof(handle));
    never_connects(handle);
    pair_open(&pair, 0);
    few_messages(&pair);
    pair_close(&pair);
    plugin_unload();
}

void foreign_handles_are_refused(void)
{
    char handle[LC_NCCL_HANDLE_BYTES];
    struct pair pair;
    uint16_t family = AF_INET;

    start();
    /* As NCCL's sockets have it: an address first. */
    memset(handle, 0, sizeof(handle));
    memcpy(handle, &family, sizeof(family));
    memcpy(handle + 2, (char[]){ 0x1f, (char)0x90, 127, 0, 0, 1 }, 6);
    never_connects(handle);
    /* One of ours, any of whose first 16 bytes, magic and version among them, is another. */
    for (size_t i = 0; i < 8; i++) {
        pair_listen(&pair, 0);
        memcpy(handle, pair.handle, sizeof(handle));
        handle[i] = (char)(handle[i] ^ 0x15);
        never_connects(handle);
        pair_close(&pair);
    }
    plugin_unload();
}

void nothing_is_left_of_unused_listeners(void)
{
    struct holdings before = { 0 }, after;
    void *listener;
    char handle[LC_NCCL_HANDLE_BYTES];

    for (size_t i = 0; i < times(60, 1000); i++) {
        if (i == 10)
            before = holdings_now();
        start();
        OK(net.listen(plugin_context, 0, handle, &listener));
        OK(net.closeListen(listener));
        plugin_unload();
    }
    after = holdings_since(&before);
    CHECK(after.descriptors <= before.descriptors);
    CHECK(after.threads <= before.threads);
    CHECK(GUARD_SANITIZED || after.mappings <= before.mappings + 2);
}

void few_descriptors_are_an_error_with_a_name(void)
{
    struct rlimit limit = { 64, 64 };
    static struct pair pairs[100];
    size_t count = 0;
    bool failed = false;

    CHECK(setenv("LOONGCOMM_NET_TIMEOUT", SOON, 1) == 0);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    start();
    plugin_log_clear();
    for (; count < 100 && !failed; count++) {
        struct pair *pair = &pairs[count];
        long begun = now_ms();

        memset(pair, 0, sizeof(*pair));
        failed = CALL(net.listen(plugin_context, 0, pair->handle, &pair->listener));
        while (!failed && (!pair->send || !pair->recv)) {
            if (!pair->send)
                failed = CALL(net.connect(plugin_context, 0, pair->handle, &pair->send, NULL));
            if (!failed && !pair->recv)
                failed = CALL(net.accept(pair->listener, &pair->recv, NULL));
            still_patient(begun, "a connection or an error without descriptors");
            sched_yield();
        }
        if (!failed)
            few_messages(pair); /* one that is not used may do without descriptors */
    }
    CHECK(failed && count > 1);
    if (!plugin_log_count(LC_NCCL_LOG_WARN, "open files") &&
        !plugin_log_count(LC_NCCL_LOG_WARN, "descriptors"))
        plugin_log_print();
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "open files") +
          plugin_log_count(LC_NCCL_LOG_WARN, "descriptors"));
    few_messages(&pairs[0]);
    while (count > 0)
        pair_close(&pairs[--count]);
    pair_open(&pairs[0], 0);
    few_messages(&pairs[0]);
    pair_close(&pairs[0]);
    plugin_unload();
}

void ports_run_out_cleanly(void)
{
    static struct pair pairs[200];
    size_t count = 0;

    own_network();
    if (shell_status("sysctl -q -w net.ipv4.ip_local_port_range='20000 20099' 2>/dev/null"))
        skip("cannot change the range of ports");
    start();
    for (; count < 200; count++) {
        memset(&pairs[count], 0, sizeof(pairs[0]));
        if (CALL(net.listen(plugin_context, 0, pairs[count].handle, &pairs[count].listener)))
            break;
    }
    /* Either they share ports and all 200 are there, or it ends with an error that is said. */
    CHECK(count == 200 || (count >= 50 && plugin_log_count(LC_NCCL_LOG_WARN, "") == 1));
    while (count > 100)
        pair_close(&pairs[--count]);
    for (size_t i = 0; i < count; i++)
        pair_close(&pairs[i]);
    pair_open(&pairs[0], 0);
    few_messages(&pairs[0]);
    pair_close(&pairs[0]);
    plugin_unload();
}

/* Two networks with a cable between them: ours has 10.9.0.1, the peer's 10.9.0.2. */
static void two_networks(pid_t peer)
{
    char command[200];

    (void)snprintf(command, sizeof(command),
                   "ip link add lcnear type veth peer name lcfar netns %d 2>/dev/null", (int)peer);
    if (shell_status(command))
        skip("no veth devices in this kernel");
    shell("ip addr add 10.9.0.1/24 dev lcnear && ip link set lcnear up");
    CHECK(setenv("NCCL_SOCKET_IFNAME", "lcnear", 1) == 0);
}

/* The kernel says so some time after both ends are up. */
static void wait_until_up(const char *name)
{
    char command[200];

    (void)snprintf(command, sizeof(command),
                   "i=0; until ip link show %s | grep -q 'state UP'; do "
                   "i=$((i+1)); [ $i -lt 600 ] || exit 1; sleep 0.05; done",
                   name);
    shell(command);
}

static void far_start(int fd)
{
    char x;

    CHECK(unshare(0x40000000 /* CLONE_NEWNET */) == 0);
    tell(fd, "x", 1);
    hear(fd, &x, 1);
    shell("ip link set lo up; ip addr add 10.9.0.2/24 dev lcfar && ip link set lcfar up");
    tell(fd, "x", 1);
    wait_until_up("lcfar");
    CHECK(setenv("NCCL_SOCKET_IFNAME", "lcfar", 1) == 0);
    start();
}

static void far_listener(int fd)
{
    static char data[1000];
    struct pair pair;

    far_start(fd);
    open_receiving(&pair, fd);
    CHECK(wait_done(post_recv(pair.recv, data, sizeof(data), 1)) == 5);
    CHECK(memcmp(data, "hello", 5) == 0);
    pair_close(&pair);
    plugin_unload();
}

static void far_begin(struct peer *peer, void (*body)(int fd))
{
    char x;

    own_network();
    *peer = peer_start(body);
    hear(peer->fd, &x, 1);
    two_networks(peer->pid);
    tell(peer->fd, "x", 1);
    hear(peer->fd, &x, 1);
    wait_until_up("lcnear");
    start();
}

void route_comes_back_while_connecting(void)
{
    struct pair pair = { 0 };
    char text[] = "hello";
    struct peer peer;
    long begun;

    far_begin(&peer, far_listener);
    hear(peer.fd, pair.handle, sizeof(pair.handle));
    shell("ip route del 10.9.0.0/24 dev lcnear");
    begun = now_ms();
    for (bool back = false; !pair.send;) {
        OK(net.connect(plugin_context, 0, pair.handle, &pair.send, NULL));
        if (!back && now_ms() - begun > 1500) {
            shell("ip route add 10.9.0.0/24 dev lcnear src 10.9.0.1");
            back = true;
        }
        still_patient(begun, "a connection whose route came back");
        pause_ms(2);
    }
    CHECK(wait_done(post_send(pair.send, text, 5, 1)) == 5);
    peer_wait(&peer);
    pair_close(&pair);
    plugin_unload();
}

static void far_echo(int fd)
{
    static char data[512 * 1024];
    struct pair pair;

    far_start(fd);
    open_receiving(&pair, fd);
    for (unsigned i = 0; i < 400; i++) {
        CHECK(wait_done(post_recv(pair.recv, data, sizeof(data), 1)) == (int)sizeof(data));
        for (size_t at = 0; at < sizeof(data); at += 1021)
            CHECK(data[at] == (char)(i + at));
    }
    pair_close(&pair);
    plugin_unload();
}

void link_goes_down_and_up(void)
{
    static char data[512 * 1024];
    struct peer peer;
    struct pair pair;
    long down = 0;

    far_begin(&peer, far_echo);
    open_sending(&pair, peer.fd);
    for (unsigned i = 0; i < 400; i++) {
        for (size_t at = 0; at < sizeof(data); at += 1021)
            data[at] = (char)(i + at);
        if (i == 50) {
            shell("ip link set lcnear down");
            down = now_ms();
        }
        void *request = post_send(pair.send, data, sizeof(data), 1);
        bool done = false;

        for (long begun = now_ms(); !done;) {
            if (down && now_ms() - down > (long)times(700, 30000)) {
                shell(
                    "ip link set lcnear up; ip route replace 10.9.0.0/24 dev lcnear src 10.9.0.1");
                down = 0;
                begun = now_ms();
            }
            CHECK(test_once(request, &done, NULL) == LC_NCCL_SUCCESS);
            if (!down)
                still_patient(begun, "a message after the link came back");
            sched_yield();
        }
    }
    peer_wait(&peer);
    pair_close(&pair);
    plugin_unload();
}

void bad_interface_names_are_named(void)
{
    static char longest[4096];
    static const char *const none[] = { "nosuch0", "nosuch0,nosuch1", "=nosuch0" };
    static const char *const some[] = { "nosuch0,,lo", "", "=", "^nosuch0", "=lo", "lo" };
    struct pair pair;

    memset(longest, 'x', sizeof(longest) - 1);
    for (size_t i = 0; i <= sizeof(none) / sizeof(none[0]); i++) {
        plugin_log_clear();
        CHECK(setenv("NCCL_SOCKET_IFNAME", i < 3 ? none[i] : longest, 1) == 0);
        CHECK(plugin_load() == 0);
        CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "NCCL_SOCKET_IFNAME") == 1);
        plugin_unload();
    }
    for (size_t i = 0; i < sizeof(some) / sizeof(some[0]); i++) {
        CHECK(setenv("NCCL_SOCKET_IFNAME", some[i], 1) == 0);
        start();
        pair_open(&pair, 0);
        few_messages(&pair);
        pair_close(&pair);
        plugin_unload();
    }
}

static void talk_once(void)
{
    struct pair pair;

    pair_open(&pair, 0);
    few_messages(&pair);
    pair_close(&pair);
}

/* Of an address that its network is still asked about, as for the first second of one that comes while jobs start. */
static void address_that_is_not_there_yet(void)
{
    if (shell_status("sysctl -q -w net.ipv6.conf.lcsix.accept_dad=1 "
                     "net.ipv6.conf.lcsix.dad_transmits=10000 2>/dev/null"))
        skip("cannot keep an address in that state: /proc/sys is not ours to write");
    shell("ip -6 addr flush dev lcsix && ip -6 addr add fd00:9::2/64 dev lcsix");
    plugin_log_clear();
    CHECK(plugin_load() == 0);
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "NCCL_SOCKET_IFNAME") == 1);
    plugin_unload();
    shell("ip -6 addr add fd00:9::1/64 dev lcsix nodad && ip -6 addr add fd00:9::3/64 dev lcsix");
    start();
    talk_once();
    plugin_unload();
}

void addresses_of_ipv6(void)
{
    own_network();
    if (shell_status("ip link add lcsix type veth peer name lcsev && ip link set lcsix up && "
                     "ip link set lcsev up"))
        skip("no veth devices in this kernel");
    shell("ip -6 addr add fd00:9::1/64 dev lcsix nodad");
    wait_until_up("lcsix");
    CHECK(setenv("NCCL_SOCKET_IFNAME", "lcsix", 1) == 0);
    CHECK(setenv("NCCL_SOCKET_FAMILY", "AF_INET6", 1) == 0);
    start();
    talk_once();
    plugin_unload();
    shell("ip -6 addr flush dev lcsix && ip -6 addr add fe80::9/64 dev lcsix nodad");
    if (plugin_load() > 0) /* link-local may be left out, or must work with its scope */
        talk_once();
    plugin_unload();
    address_that_is_not_there_yet();
}

void no_interface_is_no_device(void)
{
    own_network();
    shell("ip link set lo down");
    CHECK(unsetenv("NCCL_SOCKET_IFNAME") == 0);
    CHECK(plugin_load() == 0);
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "") == 1);
    plugin_unload();
}

void many_interfaces(void)
{
    struct pair pair;
    struct lc_nccl_props_v12 props;
    char command[400], last[24];
    int count;

    own_network();
    if (shell_status("ip link add lcprobe type veth peer name lcprobe2"))
        skip("no veth devices in this kernel");
    (void)snprintf(
        command, sizeof(command),
        "i=0; while [ $i -lt %zu ]; do "
        "echo link add longname-a-$(printf %%04d $i) type veth peer name longname-b-$(printf %%04d $i); "
        "echo addr add 10.8.$i.1/24 dev longname-a-$(printf %%04d $i); "
        "echo addr add 10.8.$i.2/24 dev longname-a-$(printf %%04d $i); "
        "echo link set longname-a-$(printf %%04d $i) up; "
        "echo link set longname-b-$(printf %%04d $i) up; "
        "i=$((i+1)); done | ip -batch -",
        times(20, 200));
    shell(command);
    (void)snprintf(last, sizeof(last), "longname-a-%04u", (unsigned)times(20, 200) - 1);
    wait_until_up(last);
    CHECK(setenv("NCCL_SOCKET_IFNAME", "longname", 1) == 0);
    count = plugin_load();
    CHECK(count >= 1);
    for (int i = 0; i < count; i++) {
        OK(net.getProperties(i, &props));
        CHECK(props.name && props.name[0]);
    }
    pair_open(&pair, 0);
    few_messages(&pair);
    pair_close(&pair);
    plugin_unload();
}

/* Every allocation on the caller's thread fails once: what was asked for is refused with NULL, or with an error for
 * what cannot be asked again, and comes to its end when asked again. */
void refused_memory_is_no_lost_message(void)
{
    static char data[2][4096];
    struct pair pair;
    unsigned long seen = 0;

    start();
    pair_open(&pair, 0);
    for (unsigned long n = 1; n <= times(30, 300); n++) {
        void *requests[2] = { NULL, NULL }, *part = data[1], *event = NULL;
        void *mr = mr_of(pair.recv, data[1], sizeof(data[1]));
        void *out_mr = mr_of(pair.send, data[0], sizeof(data[0]));
        size_t size = sizeof(data[1]);
        long begun = now_ms();
        int tag = 1;

        memset(data[0], (int)n, sizeof(data[0]));
        (void)guard_fail_allocation(n % 3 + 1);
        while (!requests[0] || !requests[1]) {
            if (!requests[1])
                OK(net.irecv(pair.recv, 1, &part, &size, &tag, &mr, &event, &requests[1]));
            if (!requests[0])
                OK(net.isend(pair.send, data[0], sizeof(data[0]), 1, out_mr, NULL, &requests[0]));
            still_patient(begun, "a request after refused memory");
        }
        wait_both(requests[1], requests[0], (int)sizeof(data[1]));
        seen += guard_fail_allocation(0);
        CHECK(memcmp(data[0], data[1], sizeof(data[0])) == 0);
    }
    pair_close(&pair);
    /* Connecting may fail, but not crash, and must work the next time. */
    for (unsigned long n = 1; n <= times(12, 40); n++) {
        struct pair other = { 0 };
        bool failed;

        (void)guard_fail_allocation(n);
        failed = CALL(net.listen(plugin_context, 0, other.handle, &other.listener));
        for (int i = 0; i < 20 && !failed; i++) {
            if (!other.send)
                failed = CALL(net.connect(plugin_context, 0, other.handle, &other.send, NULL));
            if (!other.recv && !failed)
                failed = CALL(net.accept(other.listener, &other.recv, NULL));
        }
        seen += guard_fail_allocation(0);
        pair_close(&other);
    }
    pair_open(&pair, 0);
    few_messages(&pair);
    pair_close(&pair);
    fprintf(stderr, "%lu allocations seen\n", seen);
    plugin_unload();
}

static void victim_of_threads(int fd)
{
    static char data[1 << 16];
    struct pair pair;

    start();
    open_receiving(&pair, fd);
    for (;;)
        (void)wait_done(post_recv(pair.recv, data, sizeof(data), 1));
}

static void *send_until_failure(void *arg)
{
    enum lc_nccl_result result = LC_NCCL_SUCCESS;
    char *data = calloc(1, 1 << 16);
    struct pair *pair = arg;
    long begun = now_ms();
    void *mr;

    CHECK(data);
    mr = mr_of(pair->send, data, 1 << 16);
    while (!result) {
        void *request = NULL;
        bool done = false;

        result = CALL(net.isend(pair->send, data, 1 << 16, 1, mr, NULL, &request));
        while (!result && request && !done) {
            result = test_once(request, &done, NULL);
            still_patient(begun, "the end of a killed peer");
        }
        still_patient(begun, "the end of a killed peer");
    }
    if (result != LC_NCCL_REMOTE_ERROR) {
        fprintf(stderr, "result %d\n", (int)result);
        plugin_log_print();
    }
    CHECK(result == LC_NCCL_REMOTE_ERROR);
    pair_close(pair);
    free(data);
    return NULL;
}

void peers_die_under_many_threads(void)
{
    enum {
        THREADS = 8
    };
    struct peer peers[THREADS];
    struct pair pairs[THREADS];
    pthread_t threads[THREADS];
    uint64_t state = 99;

    CHECK(setenv("LOONGCOMM_NET_TIMEOUT", SOON, 1) == 0);
    for (int i = 0; i < THREADS; i++)
        peers[i] = peer_start(victim_of_threads);
    start();
    for (int i = 0; i < THREADS; i++)
        open_sending(&pairs[i], peers[i].fd);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, send_until_failure, &pairs[i]) == 0);
    for (int i = 0; i < THREADS; i++) {
        pause_ms((long)(random_next(&state) % 30));
        peer_kill(&peers[i]);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    plugin_unload();
}

struct group {
    struct pair *pairs;
    unsigned *order;
    size_t count;
};

static void *connect_some(void *arg)
{
    struct group *group = arg;
    size_t left = group->count;
    long begun = now_ms();

    while (left) {
        left = 0;
        for (size_t i = 0; i < group->count; i++) {
            struct pair *pair = &group->pairs[group->order[i]];

            if (!pair->send)
                OK(net.connect(plugin_context, 0, pair->handle, &pair->send, NULL));
            left += !pair->send;
        }
        still_patient(begun, "connections in random order");
        sched_yield();
    }
    return NULL;
}

static void *accept_some(void *arg)
{
    struct group *group = arg;
    size_t left = group->count;
    long begun = now_ms();

    while (left) {
        left = 0;
        for (size_t i = group->count; i-- > 0;) {
            struct pair *pair = &group->pairs[group->order[i]];

            if (!pair->recv)
                OK(net.accept(pair->listener, &pair->recv, NULL));
            left += !pair->recv;
        }
        still_patient(begun, "accepting in random order");
        sched_yield();
    }
    return NULL;
}

void connections_match_their_handles(void)
{
    enum {
        COUNT = 32
    };
    static struct pair pairs[COUNT];
    unsigned order[2][COUNT], in, out;
    struct group groups[4];
    pthread_t threads[4];
    uint64_t state = 12345;

    start();
    for (unsigned i = 0; i < COUNT; i++) {
        pair_listen(&pairs[i], 0);
        order[0][i] = order[1][i] = i;
    }
    for (int side = 0; side < 2; side++) {
        for (unsigned i = COUNT - 1; i > 0; i--) {
            unsigned other = (unsigned)(random_next(&state) % (i + 1)), kept = order[side][i];

            order[side][i] = order[side][other];
            order[side][other] = kept;
        }
    }
    for (int i = 0; i < 4; i++) {
        groups[i] = (struct group){ pairs, order[i / 2] + i % 2 * COUNT / 2, COUNT / 2 };
        CHECK(pthread_create(&threads[i], NULL, i / 2 ? accept_some : connect_some, &groups[i]) ==
              0);
    }
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (out = 0; out < COUNT; out++) {
        void *recv = post_recv(pairs[out].recv, &in, sizeof(in), 1);
        void *send = post_send(pairs[out].send, &out, sizeof(out), 1);

        wait_both(recv, send, (int)sizeof(in));
        CHECK(in == out);
        pair_close(&pairs[out]);
    }
    plugin_unload();
}
