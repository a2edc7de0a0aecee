/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/rows.h"

#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

void start(void)
{
    int count = plugin_load();

    if (count <= 0)
        plugin_log_print();
    CHECK(count > 0);
}

struct peer peer_start(void (*body)(int fd))
{
    int ends[2];
    pid_t pid;

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    fflush(NULL);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(ends[0]);
        body(ends[1]);
        fflush(NULL);
        _exit(0);
    }
    close(ends[1]);
    return (struct peer){ .pid = pid, .fd = ends[0] };
}

void peer_kill(struct peer *peer)
{
    CHECK(kill(peer->pid, SIGKILL) == 0);
    CHECK(waitpid(peer->pid, NULL, 0) == peer->pid);
    close(peer->fd);
}

void peer_wait(struct peer *peer)
{
    int status;

    CHECK(waitpid(peer->pid, &status, 0) == peer->pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(peer->fd);
}

void tell(int fd, const void *data, size_t size)
{
    CHECK(send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size);
}

void hear(int fd, void *data, size_t size)
{
    ssize_t got;

    do
        got = recv(fd, data, size, MSG_WAITALL);
    while (got < 0 && errno == EINTR);
    CHECK(got == (ssize_t)size);
}

void open_sending(struct pair *pair, int fd)
{
    struct lc_nccl_net_device_handle *device = NULL;
    long begun = now_ms();

    memset(pair, 0, sizeof(*pair));
    hear(fd, pair->handle, sizeof(pair->handle));
    while (!pair->send) {
        OK(net.connect(plugin_context, 0, pair->handle, &pair->send, &device));
        still_patient(begun, "connecting to another process");
        sched_yield();
    }
}

void open_receiving(struct pair *pair, int fd)
{
    struct lc_nccl_net_device_handle *device = NULL;
    long begun = now_ms();

    pair_listen(pair, 0);
    tell(fd, pair->handle, sizeof(pair->handle));
    while (!pair->recv) {
        OK(net.accept(pair->listener, &pair->recv, &device));
        still_patient(begun, "accepting from another process");
        sched_yield();
    }
    OK(net.closeListen(pair->listener));
    pair->listener = NULL;
}

int shell_status(const char *command)
{
    pid_t pid;
    int status;

    fflush(NULL);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void shell(const char *command)
{
    int status = shell_status(command);

    if (status)
        fprintf(stderr, "%s: %d\n", command, status);
    CHECK(status == 0);
}

void own_network(void)
{
    if (shell_status("command -v ip >/dev/null"))
        skip("no ip command (package iproute2)");
    if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))
        skip("no network namespace: %s", strerror(errno));
    if (shell_status("ip link set lo up 2>/dev/null"))
        skip("cannot set up a network namespace");
}

size_t size_mixed(size_t index)
{
    static const size_t sizes[] = { 0,      1,      8,       128,  129, 4096, 65536,
                                    131072, 524288, 1048576, 4097, 3,   0,    65537 };

    return sizes[index % (sizeof(sizes) / sizeof(sizes[0]))];
}

size_t size_small(size_t index)
{
    return (index * 37) % 200;
}

size_t size_step(size_t index)
{
    return 512 * 1024;
}

size_t size_page(size_t index)
{
    return 4096;
}

int stranger(uint16_t port)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET,
                              .sin_port = htons(port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6,
                               .sin6_port = htons(port),
                               .sin6_addr = IN6ADDR_LOOPBACK_INIT };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    CHECK(fd >= 0);
    if (connect(fd, (struct sockaddr *)&v4, sizeof(v4)) == 0)
        return fd;
    close(fd);
    fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK(connect(fd, (struct sockaddr *)&v6, sizeof(v6)) == 0);
    return fd;
}
