/* SPDX-License-Identifier: Apache-2.0
 *
 * A relay in a thread of its own: forwards both directions of every connection, and does harm to them. */
#include "tests/plugin/tcp.h"

#include "common/deadline.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINKS 64

struct flow {
    char bytes[65536];
    size_t start;
    size_t end;
};

struct link {
    int fd[2]; /* of the one who came, of the one he wants */
    struct flow flow[2];
    uint64_t passed;
    bool open;
    bool ended[2]; /* nothing more comes from there */
    bool doomed;   /* to be cut at cut_at */
};

struct relay {
    pthread_t thread;
    int listen_fd;
    uint16_t port;
    atomic_ushort target;
    atomic_bool stop;
    atomic_bool killing;
    atomic_uint cuts;
    atomic_uint open;
    atomic_bool refuse;
    atomic_bool kill_busy;
    struct harm harm;
    struct link links[LINKS];
    unsigned begun;
    uint64_t state;
};

static int loopback(uint16_t port, bool listening, uint16_t *bound)
{
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_port = port,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    CHECK(fd >= 0);
    if (listening) {
        CHECK(bind(fd, (struct sockaddr *)&address, size) == 0 && listen(fd, 128) == 0);
        CHECK(getsockname(fd, (struct sockaddr *)&address, &size) == 0);
        *bound = address.sin_port;
    } else if (connect(fd, (struct sockaddr *)&address, size) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Half of the cuts are resets: what is on its way is lost, too. */
static void end_link(struct relay *relay, struct link *link, bool harm)
{
    struct linger reset = { .l_onoff = 1, .l_linger = 0 };

    if (harm && atomic_fetch_add(&relay->cuts, 1) % 2)
        for (int i = 0; i < 2; i++)
            setsockopt(link->fd[i], SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    close(link->fd[0]);
    close(link->fd[1]);
    link->open = false;
    atomic_fetch_sub(&relay->open, 1);
}

static void begin_link(struct relay *relay)
{
    int fd = accept4(relay->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    struct link *link = NULL;
    int there;

    CHECK(fd >= 0);
    for (int i = 0; i < LINKS && !link; i++)
        link = relay->links[i].open ? NULL : &relay->links[i];
    there = link && !atomic_load(&relay->refuse)
                ? loopback(atomic_load(&relay->target), false, NULL)
                : -1;
    if (there < 0) {
        close(fd);
        return;
    }
    memset(link, 0, sizeof(*link));
    link->fd[0] = fd;
    link->fd[1] = there;
    link->open = true;
    atomic_fetch_add(&relay->open, 1);
    link->doomed = relay->harm.cut_at && relay->begun++ < relay->harm.cuts;
}

/* False: the link has ended. */
static bool pass(struct relay *relay, struct link *link, int way, short events_in, short events_out)
{
    struct flow *flow = &link->flow[way];
    size_t n = flow->end - flow->start;

    if (events_out & POLLOUT && n) {
        uint64_t left = link->doomed ? relay->harm.cut_at - link->passed : UINT64_MAX;
        ssize_t put;

        if (relay->harm.chunk && n > relay->harm.chunk)
            n = relay->harm.chunk;
        n = n > left ? left : n;
        put = send(link->fd[!way], flow->bytes + flow->start, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (put < 0 && errno != EAGAIN)
            return false;
        if (put > 0) {
            flow->start += (size_t)put;
            link->passed += (uint64_t)put;
            if (link->doomed && link->passed >= relay->harm.cut_at) {
                end_link(relay, link, true);
                return true;
            }
        }
        if (flow->start == flow->end)
            flow->start = flow->end = 0;
    } else if (events_in & (POLLIN | POLLHUP | POLLERR) && !n) {
        ssize_t got = recv(link->fd[way], flow->bytes, sizeof(flow->bytes), MSG_DONTWAIT);

        if (got == 0 && !link->ended[way]) {
            /* As the kernel has it: the other direction goes on. */
            link->ended[way] = true;
            (void)shutdown(link->fd[!way], SHUT_WR);
            return !link->ended[!way];
        }
        if (got < 0 && errno != EAGAIN)
            return false;
        flow->end = got > 0 ? (size_t)got : 0;
        if (flow->end > sizeof(flow->bytes) / 2 && atomic_exchange(&relay->kill_busy, false))
            end_link(relay, link, true);
    }
    return true;
}

static void kill_one(struct relay *relay, int64_t *next)
{
    unsigned at;

    if (!relay->harm.kill_us || !atomic_load(&relay->killing) || lc_now_ns() < *next)
        return;
    *next = lc_now_ns() + (int64_t)relay->harm.kill_us * 1000;
    relay->state = relay->state * 6364136223846793005u + 1;
    at = (unsigned)(relay->state >> 33);
    for (int i = 0; i < LINKS; i++) {
        struct link *link = &relay->links[(at + (unsigned)i) % LINKS];

        if (link->open) {
            end_link(relay, link, true);
            return;
        }
    }
}

static void *relay_main(void *arg)
{
    struct relay *relay = arg;
    int64_t next_kill = 0;

    while (!atomic_load(&relay->stop)) {
        struct pollfd fds[2 * LINKS + 1];

        for (int i = 0; i < LINKS; i++) {
            struct link *link = &relay->links[i];

            for (int way = 0; way < 2; way++) {
                bool full = link->flow[way].end > 0;
                bool out = link->flow[!way].end > 0;

                fds[2 * i + way] = (struct pollfd){
                    .fd = link->open ? link->fd[way] : -1,
                    .events = (short)((full || link->ended[way] ? 0 : POLLIN) | (out ? POLLOUT : 0))
                };
            }
        }
        fds[2 * LINKS] = (struct pollfd){ .fd = relay->listen_fd, .events = POLLIN };
        CHECK(poll(fds, 2 * LINKS + 1, 5) >= 0);
        for (int i = 0; i < LINKS; i++) {
            struct link *link = &relay->links[i];

            for (int way = 0; way < 2 && link->open; way++) {
                if (!pass(relay, link, way, fds[2 * i + way].revents, fds[2 * i + !way].revents))
                    end_link(relay, link, false);
            }
        }
        kill_one(relay, &next_kill);
        if (fds[2 * LINKS].revents & POLLIN)
            begin_link(relay);
    }
    return NULL;
}

struct relay *relay_open(struct harm harm)
{
    struct relay *relay = calloc(1, sizeof(*relay));

    CHECK(relay);
    relay->harm = harm;
    relay->state = 12345;
    atomic_store(&relay->killing, true);
    relay->listen_fd = loopback(0, true, &relay->port);
    CHECK(pthread_create(&relay->thread, NULL, relay_main, relay) == 0);
    return relay;
}

void relay_target(struct relay *relay, uint16_t port)
{
    atomic_store(&relay->target, port);
}

uint16_t relay_port(const struct relay *relay)
{
    return relay->port;
}

unsigned relay_cuts(struct relay *relay)
{
    return atomic_load(&relay->cuts);
}

unsigned relay_links(struct relay *relay)
{
    return atomic_load(&relay->open);
}

void relay_refuse(struct relay *relay, bool refuse)
{
    atomic_store(&relay->refuse, refuse);
}

void relay_kill_when_busy(struct relay *relay)
{
    atomic_store(&relay->kill_busy, true);
}

void relay_stop_killing(struct relay *relay)
{
    atomic_store(&relay->killing, false);
}

void relay_close(struct relay *relay)
{
    atomic_store(&relay->stop, true);
    pthread_join(relay->thread, NULL);
    for (int i = 0; i < LINKS; i++) {
        if (relay->links[i].open)
            end_link(relay, &relay->links[i], false);
    }
    close(relay->listen_fd);
    free(relay);
}
