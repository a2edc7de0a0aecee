/* SPDX-License-Identifier: Apache-2.0
 *
 * The reference: one TCP socket, a header of the length before each message, header and payload in one sendmsg, and
 * nothing moves but in isend, irecv and test. What NCCL's own transport is without helper threads, with the header's
 * system call saved. */
#include "perf/net/net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

struct request {
    struct comm *comm;
    char *data;
    uint64_t size; /* of the buffer */
    uint64_t header;
    size_t at; /* of header and payload together */
    bool open;
    bool done;
};

struct comm {
    int fd;
    bool sends;
    unsigned posted;
    unsigned moved; /* requests that are over */
    struct request ring[LC_BNET_DEPTH];
};

struct listener {
    int fd;
};

static int complain(const char *what)
{
    int err = -errno;

    fprintf(stderr, "loongcomm-bench net: a plain socket: %s: %s\n", what, strerror(-err));
    return err;
}

static int socket_init(const char *library)
{
    return 0;
}

static void socket_fini(void)
{
}

/* The interface that the plugin would take, too: NCCL_SOCKET_IFNAME, whole, else loopback. */
static struct in_addr own_address(void)
{
    const char *name = getenv("NCCL_SOCKET_IFNAME");
    struct in_addr found = { htonl(INADDR_LOOPBACK) };
    struct ifaddrs *all = NULL;

    if (!name || getifaddrs(&all) != 0)
        return found;
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && strcmp(i->ifa_name, name) == 0)
            found = ((struct sockaddr_in *)i->ifa_addr)->sin_addr;
    }
    freeifaddrs(all);
    return found;
}

static int socket_listen(struct lc_bnet_handle *handle, void **out)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr = own_address() };
    socklen_t size = sizeof(address);
    struct listener *listener = calloc(1, sizeof(*listener));

    if (!listener)
        return -ENOMEM;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0 || bind(listener->fd, (struct sockaddr *)&address, size) != 0 ||
        listen(listener->fd, 16) != 0 ||
        getsockname(listener->fd, (struct sockaddr *)&address, &size) != 0) {
        int err = complain("listening");

        if (listener->fd >= 0)
            close(listener->fd);
        free(listener);
        return err;
    }
    memcpy(handle->bytes, &address, sizeof(address));
    *out = listener;
    return 0;
}

static int adopt(int fd, bool sends, void **out)
{
    struct comm *comm = calloc(1, sizeof(*comm));
    int one = 1;

    if (!comm) {
        close(fd);
        return -ENOMEM;
    }
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    (void)fcntl(fd, F_SETFL, O_NONBLOCK);
    comm->fd = fd;
    comm->sends = sends;
    *out = comm;
    return 0;
}

static int socket_connect(struct lc_bnet_handle *handle, void **out)
{
    struct sockaddr_in address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    memcpy(&address, handle->bytes, sizeof(address));
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        int err = complain("connecting");

        if (fd >= 0)
            close(fd);
        return err;
    }
    return adopt(fd, true, out);
}

static int socket_accept(void *listener, void **out)
{
    int fd = accept4(((struct listener *)listener)->fd, NULL, NULL, SOCK_CLOEXEC);

    *out = NULL;
    if (fd < 0)
        return errno == EAGAIN || errno == ECONNABORTED ? 0 : complain("accepting");
    return adopt(fd, false, out);
}

static int socket_reg(void *comm, void *data, size_t size, void **out)
{
    *out = NULL;
    return 0;
}

static void socket_dereg(void *comm, void *mr)
{
}

/* 1: something has moved; 0: nothing can; -errno. */
static int move_one(struct comm *comm, struct request *r)
{
    uint64_t payload = comm->sends || r->at >= sizeof(r->header) ? r->header : 0;
    struct iovec iov[2];
    struct msghdr msg = { .msg_iov = iov };
    ssize_t n;

    if (r->at < sizeof(r->header))
        iov[msg.msg_iovlen++] = (struct iovec){ (char *)&r->header + r->at,
                                                sizeof(r->header) - r->at };
    if (payload) {
        size_t done = r->at < sizeof(r->header) ? 0 : r->at - sizeof(r->header);

        iov[msg.msg_iovlen++] = (struct iovec){ r->data + done, payload - done };
    }
    n = comm->sends ? sendmsg(comm->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT)
                    : recvmsg(comm->fd, &msg, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : complain("moving bytes");
    if (n == 0)
        return -EPIPE;
    r->at += (size_t)n;
    if (r->at >= sizeof(r->header) && r->header > r->size)
        return -EMSGSIZE;
    r->done = r->at >= sizeof(r->header) && r->at == sizeof(r->header) + r->header;
    return 1;
}

/* All that is pending, like the plugin; NCCL's own moves the oldest only. */
static int move(struct comm *comm)
{
    int moved = 1;

    for (int i = 0; i < 2 && moved > 0 && comm->moved != comm->posted; i++) {
        struct request *r = &comm->ring[comm->moved % LC_BNET_DEPTH];

        moved = move_one(comm, r);
        if (r->done)
            comm->moved++;
    }
    return moved < 0 ? moved : 0;
}

static int post(struct comm *comm, void *data, size_t size, void **out)
{
    struct request *r = &comm->ring[comm->posted % LC_BNET_DEPTH];

    *out = NULL;
    if (r->open)
        return 0;
    *r = (struct request){ .comm = comm,
                           .data = data,
                           .size = size,
                           .header = comm->sends ? size : 0,
                           .open = true };
    comm->posted++;
    *out = r;
    return move(comm);
}

static int socket_isend(void *comm, void *data, size_t size, void *mr, void **out)
{
    return post(comm, data, size, out);
}

static int socket_irecv(void *comm, void *data, size_t size, void *mr, void **out)
{
    return post(comm, data, size, out);
}

static int socket_test(void *request, bool *done, size_t *size)
{
    struct request *r = request;
    int err = r->done ? 0 : move(r->comm);

    *done = r->done;
    *size = r->header;
    if (r->done)
        r->open = false;
    return err;
}

static void socket_close(void *comm)
{
    if (!comm)
        return;
    close(((struct comm *)comm)->fd);
    free(comm);
}

static void socket_close_listen(void *listener)
{
    if (!listener)
        return;
    close(((struct listener *)listener)->fd);
    free(listener);
}

static int socket_get_port(const struct lc_bnet_handle *handle, uint16_t *port)
{
    struct sockaddr_in address;

    memcpy(&address, handle->bytes, sizeof(address));
    *port = address.sin_port;
    return 0;
}

static void socket_set_port(struct lc_bnet_handle *handle, uint16_t port)
{
    struct sockaddr_in address;

    memcpy(&address, handle->bytes, sizeof(address));
    address.sin_port = port;
    memcpy(handle->bytes, &address, sizeof(address));
}

const struct lc_bnet_way lc_bnet_way_socket = {
    .name = "socket",
    .init = socket_init,
    .fini = socket_fini,
    .listen = socket_listen,
    .connect = socket_connect,
    .accept = socket_accept,
    .reg = socket_reg,
    .dereg = socket_dereg,
    .isend = socket_isend,
    .irecv = socket_irecv,
    .test = socket_test,
    .close_send = socket_close,
    .close_recv = socket_close,
    .close_listen = socket_close_listen,
    .get_port = socket_get_port,
    .set_port = socket_set_port,
};
