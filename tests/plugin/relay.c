/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/rows.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TARGETS 64
#define FIRST   4096

/* Set by relay_start before any connection. */
static struct relay_rule rule;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct {
    uint16_t port, ours;
    int fd;
} targets[TARGETS];
static size_t target_count;
static unsigned char first[FIRST];
static size_t first_count;
static unsigned connections, severed;
static bool stalled;

struct lane {
    int from, to;
    bool outwards; /* from the client */
};

static bool note(struct lane *lane, const unsigned char *data, size_t size, bool newest)
{
    bool wait;

    pthread_mutex_lock(&lock);
    if (lane->outwards && newest) {
        size_t fits = size < FIRST - first_count ? size : FIRST - first_count;

        memcpy(first + first_count, data, fits);
        first_count += fits;
    }
    wait = stalled;
    pthread_mutex_unlock(&lock);
    return wait;
}

static bool may_sever(void)
{
    bool may;

    pthread_mutex_lock(&lock);
    may = severed < rule.sever_most;
    severed += may;
    pthread_mutex_unlock(&lock);
    return may;
}

static size_t next_chunk(size_t passed)
{
    size_t most = rule.chunk ? rule.chunk : 65536;

    if (rule.cut > passed && rule.cut - passed < most)
        most = rule.cut - passed;
    if (rule.sever > passed && rule.sever - passed < most)
        most = rule.sever - passed;
    return most;
}

static void *pass(void *arg)
{
    struct lane *lane = arg;
    unsigned char data[65536];
    size_t passed = 0;
    ssize_t got;

    while ((got = recv(lane->from, data, next_chunk(passed), 0)) > 0) {
        while (note(lane, data, (size_t)got, passed < FIRST) && got)
            pause_ms(5);
        for (ssize_t sent = 0; sent < got;) {
            ssize_t more = send(lane->to, data + sent, (size_t)(got - sent), MSG_NOSIGNAL);

            if (more < 0)
                goto out;
            sent += more;
        }
        passed += (size_t)got;
        if (passed == rule.cut)
            pause_ms(20);
        if (rule.sever && passed == rule.sever && may_sever())
            break;
    }
out:
    (void)shutdown(lane->from, SHUT_RDWR);
    (void)shutdown(lane->to, SHUT_RDWR);
    free(lane);
    return NULL;
}

static void spawn(void *(*body)(void *), void *arg)
{
    pthread_attr_t attr;
    pthread_t thread;

    CHECK(pthread_attr_init(&attr) == 0);
    CHECK(pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED) == 0);
    CHECK(pthread_attr_setstacksize(&attr, 256 * 1024) == 0);
    CHECK(pthread_create(&thread, &attr, body, arg) == 0);
    (void)pthread_attr_destroy(&attr);
}

static void start_lane(int from, int to, bool outwards)
{
    struct lane *lane = malloc(sizeof(*lane));
    int yes = 1;

    CHECK(lane);
    *lane = (struct lane){ .from = from, .to = to, .outwards = outwards };
    (void)setsockopt(to, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    spawn(pass, lane);
}

/* Past the redirection of our own connect(): to the address that the client meant. */
static int forward(int client, uint16_t port)
{
    struct sockaddr_storage addr = { 0 };
    socklen_t len = sizeof(addr);
    int fd;

    CHECK(getsockname(client, (struct sockaddr *)&addr, &len) == 0);
    if (addr.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&addr)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)&addr)->sin_port = htons(port);
    fd = socket(addr.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    if (syscall(SYS_connect, fd, &addr, len) == 0)
        return fd;
    close(fd);
    return -1;
}

static void *take(void *arg)
{
    size_t index = (size_t)(uintptr_t)arg;
    int client;

    while ((client = accept4(targets[index].fd, NULL, NULL, SOCK_CLOEXEC)) >= 0 || errno == EINTR ||
           errno == ECONNABORTED) {
        int server = client < 0 ? -1 : forward(client, targets[index].port);

        if (server < 0) {
            if (client >= 0)
                close(client);
            continue;
        }
        pthread_mutex_lock(&lock);
        connections++;
        first_count = 0;
        pthread_mutex_unlock(&lock);
        start_lane(client, server, true);
        start_lane(server, client, false);
    }
    return NULL;
}

/* Not through our own listen(): the relay is no port of the plugin. */
static void open_target(size_t index, uint16_t port)
{
    struct sockaddr_in6 addr = { .sin6_family = AF_INET6 };
    socklen_t len = sizeof(addr);
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), no = 0;

    CHECK(fd >= 0);
    CHECK(setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no)) == 0);
    CHECK(bind(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0);
    CHECK(syscall(SYS_listen, fd, 128) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&addr, &len) == 0);
    targets[index].fd = fd;
    targets[index].port = port;
    targets[index].ours = ntohs(addr.sin6_port);
    spawn(take, (void *)(uintptr_t)index);
}

static uint16_t map(uint16_t port)
{
    uint16_t found = 0;

    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < target_count && !found; i++) {
        if (targets[i].port == port || targets[i].ours == port)
            found = targets[i].ours;
    }
    if (!found) {
        CHECK(target_count < TARGETS);
        open_target(target_count, port);
        found = targets[target_count++].ours;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void relay_start(const struct relay_rule *with)
{
    rule = *with;
    guard_redirect(map);
}

size_t relay_first(unsigned char *out, size_t max)
{
    size_t count;

    pthread_mutex_lock(&lock);
    count = first_count < max ? first_count : max;
    memcpy(out, first, count);
    pthread_mutex_unlock(&lock);
    return count;
}

unsigned relay_connections(void)
{
    unsigned count;

    pthread_mutex_lock(&lock);
    count = connections;
    pthread_mutex_unlock(&lock);
    return count;
}

void relay_stall(bool on)
{
    pthread_mutex_lock(&lock);
    stalled = on;
    pthread_mutex_unlock(&lock);
}
