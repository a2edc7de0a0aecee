/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/net/net.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#define BLOCK    ((size_t)65536)
#define MOST     64                 /* connections at once */
#define QUEUE    ((size_t)64 << 20) /* bytes on their way in one direction, at most */
#define BURST_NS 2000000            /* of unused rate that is kept */

/* ---- relay: one thread, no lock ---- */

struct block {
    struct block *next;
    int64_t due_ns;
    size_t at, size;
    unsigned char bytes[];
};

/* One direction of one connection. */
struct way {
    int from, to;
    bool over;       /* nothing more comes */
    bool cut;        /* the other side has been told */
    double rate;     /* bytes a second, 0: any */
    int64_t next_ns; /* when the line is free again */
    int64_t last_ns; /* nothing that comes later is due earlier */
    struct block *first, **last;
    size_t queued;
};

struct relay {
    const struct lc_bnet_link *link;
    struct sockaddr_in target[2 * LC_BNET_FLOWS];
    int listeners[2 * LC_BNET_FLOWS];
    int seen[2 * LC_BNET_FLOWS]; /* connections so far */
    int count;
    struct way ways[2 * MOST];
    int n_ways;
    uint64_t random;
};

static void add_way(struct relay *relay, int from, int to, double rate)
{
    struct way *way = &relay->ways[relay->n_ways++];

    *way = (struct way){ .from = from, .to = to, .rate = rate };
    way->last = &way->first;
}

static void take_connection(struct relay *relay, int i)
{
    int from = accept4(relay->listeners[i], NULL, NULL, SOCK_CLOEXEC);
    int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    double rate = relay->link->rate;
    int one = 1;

    if (from < 0 || to < 0 || relay->n_ways + 2 > 2 * MOST ||
        connect(to, (struct sockaddr *)&relay->target[i], sizeof(relay->target[i])) != 0) {
        if (from >= 0)
            close(from);
        if (to >= 0)
            close(to);
        return;
    }
    /* What the kernel takes in beside us would be a part of the line. */
    if (rate > 0)
        (void)setsockopt(from, SOL_SOCKET, SO_RCVBUF, &(int){ 2 * (int)BLOCK }, sizeof(int));
    (void)setsockopt(from, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    (void)setsockopt(to, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    if (relay->link->slow > 0 && relay->seen[i] == 1)
        rate /= relay->link->slow;
    relay->seen[i]++;
    add_way(relay, from, to, rate);
    add_way(relay, to, from, rate);
}

static bool is_unlucky(struct relay *relay)
{
    relay->random = relay->random * 6364136223846793005u + 1442695040888963407u;
    return (double)(relay->random >> 11) * 0x1p-53 < relay->link->stall;
}

/* Never more than the line and the delay can hold, so that the sender sees a line and not a pit. */
static size_t room(const struct relay *relay, const struct way *way)
{
    double most = way->rate > 0 ? way->rate * (2 * relay->link->delay_s + 0.01) : 4e6;

    return most < (double)BLOCK ? BLOCK : most > (double)QUEUE ? QUEUE : (size_t)most;
}

static void take_bytes(struct relay *relay, struct way *way, int64_t now)
{
    struct block *block = malloc(sizeof(*block) + BLOCK);
    ssize_t got = block ? recv(way->from, block->bytes, BLOCK, MSG_DONTWAIT) : -1;

    if (got <= 0) {
        way->over |= got == 0 || (errno != EAGAIN && errno != EINTR);
        free(block);
        return;
    }
    if (way->next_ns < now - BURST_NS)
        way->next_ns = now - BURST_NS;
    if (way->rate > 0)
        way->next_ns += (int64_t)((double)got / way->rate * 1e9);
    block->due_ns = way->rate > 0 ? way->next_ns : now;
    block->due_ns += (int64_t)(relay->link->delay_s * 1e9);
    if (is_unlucky(relay))
        block->due_ns += (int64_t)(2 * relay->link->delay_s * 1e9);
    if (block->due_ns < way->last_ns)
        block->due_ns = way->last_ns;
    way->last_ns = block->due_ns;
    block->next = NULL;
    block->at = 0;
    block->size = (size_t)got;
    *way->last = block;
    way->last = &block->next;
    way->queued += block->size;
}

/* True while the next block could go, were there room for it. */
static bool give_bytes(struct way *way, int64_t now)
{
    while (way->first && way->first->due_ns <= now) {
        struct block *block = way->first;
        ssize_t put = send(way->to, block->bytes + block->at, block->size - block->at,
                           MSG_NOSIGNAL | MSG_DONTWAIT);

        if (put < 0 && errno == EAGAIN)
            return true;
        if (put < 0)
            put = (ssize_t)(block->size - block->at); /* nobody is there any more */
        block->at += (size_t)put;
        way->queued -= (size_t)put;
        if (block->at < block->size)
            return true;
        way->first = block->next;
        if (!way->first)
            way->last = &way->first;
        free(block);
    }
    if (way->over && !way->first && !way->cut) {
        (void)shutdown(way->to, SHUT_WR);
        way->cut = true;
    }
    return false;
}

static int64_t relay_step(struct relay *relay, struct pollfd *polls)
{
    int64_t now = lc_now_ns();
    int64_t next = now + 1000000000;

    for (int i = 0; i < relay->n_ways; i++) {
        struct way *way = &relay->ways[i];
        struct pollfd *in = &polls[relay->count + 2 * i];
        struct pollfd *out = in + 1;

        if (in->revents)
            take_bytes(relay, way, now);
        *out = (struct pollfd){ give_bytes(way, now) ? way->to : -1, POLLOUT, 0 };
        *in = (struct pollfd){ !way->over && way->queued < room(relay, way) ? way->from : -1,
                               POLLIN, 0 };
        if (way->first && out->fd < 0 && way->first->due_ns < next)
            next = way->first->due_ns;
    }
    return next;
}

__attribute__((noreturn)) static void relay_main(struct relay *relay)
{
    static struct pollfd polls[2 * LC_BNET_FLOWS + 4 * MOST];

    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        _exit(1);
    for (;;) {
        int known = relay->n_ways;
        int64_t left = relay_step(relay, polls) - lc_now_ns();
        struct timespec wait = { 0 };

        left = left < 0 ? 0 : left;
        wait.tv_sec = left / 1000000000;
        wait.tv_nsec = left % 1000000000;
        for (int i = 0; i < relay->count; i++)
            polls[i] = (struct pollfd){ relay->listeners[i], POLLIN, 0 };
        if (ppoll(polls, (nfds_t)relay->count + 2 * (nfds_t)known, &wait, NULL) < 0 &&
            errno != EINTR)
            _exit(1);
        for (int i = 0; i < relay->count; i++) {
            if (polls[i].revents)
                take_connection(relay, i);
        }
        for (int i = known; i < relay->n_ways; i++)
            polls[relay->count + 2 * i] = polls[relay->count + 2 * i + 1] = (struct pollfd){ -1, 0,
                                                                                             0 };
    }
}

int lc_bnet_relay_start(const struct lc_bnet_link *link, const uint16_t *ports, int count,
                        pid_t *pid, uint16_t *out)
{
    static struct relay relay;
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t size = sizeof(address);
    int err = 0;

    relay = (struct relay){ .link = link, .count = count, .random = 1 };
    for (int i = 0; i < count && !err; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address.sin_port = 0;
        relay.listeners[i] = fd;
        if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) != 0 || listen(fd, 64) != 0 ||
            getsockname(fd, (struct sockaddr *)&address, &size) != 0)
            err = -errno;
        out[i] = address.sin_port;
        relay.target[i] = address;
        relay.target[i].sin_port = ports[i];
    }
    if (!err) {
        *pid = fork();
        if (*pid == 0)
            relay_main(&relay);
        if (*pid < 0) {
            *pid = 0;
            err = -EAGAIN;
        }
    }
    for (int i = 0; i < count; i++) {
        if (relay.listeners[i] > 0)
            close(relay.listeners[i]);
    }
    return err;
}

/* ---- namespaces ---- */

static int shell(const char *command)
{
    int status = system(command);

    if (status == 0)
        return 0;
    fprintf(stderr, "loongcomm-bench net: failed: %s\n", command);
    return -EIO;
}

int lc_bnet_veth_enter(void)
{
    if (unshare(CLONE_NEWNET) == 0)
        return 0;
    fprintf(stderr, "loongcomm-bench net: no network namespace: %s (use --link relay)\n",
            strerror(errno));
    return -EPERM;
}

int lc_bnet_veth_make(const struct lc_bnet_link *link, const pid_t *ends)
{
    char command[200];

    (void)snprintf(command, sizeof(command),
                   "ip link add lcbench netns %d type veth peer name lcbench netns %d",
                   (int)ends[0], (int)ends[1]);
    return shell(command);
}

int lc_bnet_veth_up(const struct lc_bnet_link *link, int end)
{
    char command[300];
    int n = snprintf(command, sizeof(command),
                     "ip link set lo up && ip addr add 10.199.0.%d/24 dev lcbench && ip link set "
                     "lcbench up",
                     end + 1);

    if (link->rate > 0)
        (void)snprintf(command + n, sizeof(command) - (size_t)n,
                       " && tc qdisc add dev lcbench root tbf rate %.0fbit burst 256k latency 20ms",
                       link->rate * 8);
    return shell(command);
}

int lc_bnet_veth_wait(int timeout_s)
{
    struct lc_deadline end = lc_deadline_in_ms((int64_t)timeout_s * 1000);
    struct ifreq device = { .ifr_name = "lcbench" };
    const struct timespec pause = { .tv_nsec = 2000000 };
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool runs = false;

    while (fd >= 0 && !runs && !lc_deadline_passed(end)) {
        runs = ioctl(fd, SIOCGIFFLAGS, &device) == 0 && device.ifr_flags & IFF_RUNNING;
        if (!runs)
            nanosleep(&pause, NULL);
    }
    if (fd >= 0)
        close(fd);
    return runs ? 0 : -ETIMEDOUT;
}
