/* SPDX-License-Identifier: Apache-2.0
 *
 * test_verbs_alone CASE...: connections over verbs where there is no device: libibverbs is made of functions here, which
 * keep count of what they are asked for. The suite "roce" has devices. */
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/verbs/data.h"
#include "plugin/net/verbs/service.h"
#include "tests/check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)
#define MANY   4000
#define BYTES  ((size_t)1 << 20)

/* ---- libibverbs ---- */

static atomic_int registrations; /* that there are; the thread may give some back */
static atomic_int queue_pairs;
static int posts;   /* to queue pairs, without receives */
static int answers; /* to them, which the next polls find */
static bool port_is_down;
static enum ibv_wc_status answer; /* of the answers */

static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *at, size_t size, int access)
{
    struct ibv_mr *mr = calloc(1, sizeof(*mr));

    (void)pd;
    (void)at;
    (void)size;
    (void)access;
    registrations += mr != NULL;
    return mr;
}

static int dereg_mr(struct ibv_mr *mr)
{
    registrations--;
    free(mr);
    return 0;
}

static int destroy_qp(struct ibv_qp *qp)
{
    (void)qp;
    queue_pairs--;
    return 0;
}

static int destroy_cq(struct ibv_cq *cq)
{
    (void)cq;
    return 0;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)qp;
    (void)wr;
    (void)bad;
    posts++;
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
    (void)cq;
    (void)n;
    if (!answers)
        return 0;
    answers--;
    *wc = (struct ibv_wc){ .wr_id = LC_VERBS_SEND_ID, .status = answer };
    return 1;
}

static const char *status_str(enum ibv_wc_status which)
{
    return which == IBV_WC_RETRY_EXC_ERR ? "no answer" : "?";
}

static int query_port(struct ibv_context *of, uint8_t number, struct _compat_ibv_port_attr *attr)
{
    (void)of;
    (void)number;
    ((struct ibv_port_attr *)attr)->state = port_is_down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    return 0;
}

static int query_gid(struct ibv_context *of, uint8_t number, int index, union ibv_gid *gid)
{
    (void)of;
    (void)number;
    (void)index;
    memset(gid, 0, sizeof(*gid));
    return 0;
}

static struct ibv_context context = {
    .ops = {.post_send = post_send, .poll_cq = poll_cq}
};
static struct ibv_cq cq = { .context = &context };
static struct ibv_qp qp = { .context = &context };
static struct lc_verbs_nic nic = { .context = &context, .lock = PTHREAD_MUTEX_INITIALIZER };
static struct lc_verbs_port port = { .nic = &nic,
                                     .name = "none:1",
                                     .speed_mbps = 100000,
                                     .max_msg = 1u << 30 };
static struct lc_verbs_device dev = { .name = "none:1", .n_ports = 1, .ports = { &port } };

/* ---- connections ---- */

struct end {
    struct lc_net_comm *comm;
    int peer; /* the other end of its side socket */
};

/* One that runs, in the thread's care; what a peer would have to do for that is written down. */
static struct end running(bool sender)
{
    struct end end;
    int fds[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    end.comm = lc_verbs_comm_new(&dev, sender, fds[0], 60 * SECOND);
    CHECK(end.comm);
    end.comm->state = LC_VERBS_RUN;
    end.comm->look_ns = INT64_MAX;
    end.comm->n_paths = 1;
    end.comm->mine = end.comm->common = 1;
    end.comm->paths[0].port = &port;
    end.comm->paths[0].qp = &qp;
    end.comm->paths[0].cq = &cq;
    end.comm->paths[0].sq_max = 64;
    queue_pairs++;
    end.peer = fds[1];
    CHECK(lc_verbs_service_add(end.comm) == 0);
    return end;
}

static void finish(struct end *end)
{
    lc_verbs_service_close(end->comm);
    close(end->peer);
}

/* The thread may still have had a reference. */
static void all_is_given_back(void)
{
    struct lc_deadline deadline = lc_deadline_in_ms(20000);

    while (registrations || queue_pairs) {
        CHECK(!lc_deadline_passed(deadline));
        usleep(1000);
    }
}

/* ---- cases ---- */

/* The peer has cleared the first group. */
static void send_one(struct lc_net_comm *comm, void *data, struct lc_net_mr *mr)
{
    struct lc_net_request *request = NULL;

    (void)pthread_mutex_lock(&comm->lock);
    comm->outgoing[0] = (struct lc_verbs_outgoing){ .known = true,
                                                    .n = 1,
                                                    .buffers = { { .size = BYTES } } };
    comm->cts_seq = 1;
    CHECK(lc_verbs_data_send(comm, data, BYTES, 0, mr, &request) == 0 && request);
    (void)pthread_mutex_unlock(&comm->lock);
}

static void recv_one(struct lc_net_comm *comm, void *data, struct lc_net_mr *mr)
{
    struct lc_net_request *request = NULL;
    size_t size = BYTES;
    int tag = 0;

    (void)pthread_mutex_lock(&comm->lock);
    CHECK(lc_verbs_data_recv(comm, 1, &data, &size, &tag, &mr, &request) == 0 && request);
    (void)pthread_mutex_unlock(&comm->lock);
}

static void flush_one(struct lc_net_comm *comm, void *data, struct lc_net_mr *mr)
{
    struct lc_net_request *request = NULL;
    int size = (int)BYTES;

    (void)pthread_mutex_lock(&comm->lock);
    comm->paths[0].flush_qp = &qp;
    queue_pairs++;
    CHECK(lc_verbs_data_flush(comm, 1, &data, &size, &mr, &request) == 0 && request);
    (void)pthread_mutex_unlock(&comm->lock);
}

/* What the thread does where the peer had begun a repair. Nothing may come of it. */
static void repair(struct lc_net_comm *comm)
{
    int before = posts;

    (void)pthread_mutex_lock(&comm->lock);
    lc_verbs_data_stop(comm);
    if (comm->sender)
        lc_verbs_data_resume(comm, 1, 1, true);
    lc_verbs_data_move(comm);
    CHECK(posts == before);
    CHECK(comm->error);
    (void)pthread_mutex_unlock(&comm->lock);
}

/* As after an abort: NCCL deregisters, frees, and closes later. */
static void nothing_uses_what_was_deregistered(void (*use)(struct lc_net_comm *, void *,
                                                           struct lc_net_mr *),
                                               bool sender, bool elsewhere)
{
    struct end end = running(sender), other = running(sender);
    unsigned char *data = malloc(BYTES);
    struct lc_net_mr *mr = NULL;
    int before = posts;

    CHECK(data);
    CHECK(lc_net_verbs.reg_mr(end.comm, data, BYTES, LC_NET_HOST, &mr) == 0);
    use(end.comm, data, mr);
    CHECK(posts > before);
    /* It serves all connections of the device. */
    CHECK(lc_net_verbs.dereg(elsewhere ? other.comm : end.comm, mr) == 0);
    free(data);
    CHECK(registrations == 2 && queue_pairs == 1);
    repair(end.comm);
    CHECK(!other.comm->error);
    finish(&end);
    finish(&other);
    all_is_given_back();
}

static void dereg(void)
{
    for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
        nothing_uses_what_was_deregistered(send_one, true, elsewhere);
        nothing_uses_what_was_deregistered(recv_one, false, elsewhere);
        nothing_uses_what_was_deregistered(flush_one, false, elsewhere);
    }
}

/* Whoever is through with a buffer may deregister it, whatever else the connection does. */
static void dereg_after_completion_harms_nobody(void)
{
    struct end end = running(true);
    unsigned char *data = malloc(BYTES);
    struct lc_net_mr *mr = NULL, *unused = NULL;

    CHECK(data);
    CHECK(lc_net_verbs.reg_mr(end.comm, data, BYTES, LC_NET_HOST, &mr) == 0);
    CHECK(lc_net_verbs.reg_mr(end.comm, data, BYTES, LC_NET_HOST, &unused) == 0);
    send_one(end.comm, data, mr);
    CHECK(lc_net_verbs.dereg(end.comm, unused) == 0);
    (void)pthread_mutex_lock(&end.comm->lock);
    CHECK(!end.comm->error);
    lc_verbs_data_resume(end.comm, 1, 0, false); /* the peer has it */
    (void)pthread_mutex_unlock(&end.comm->lock);
    CHECK(lc_net_verbs.dereg(end.comm, mr) == 0);
    CHECK(!end.comm->error);
    free(data);
    finish(&end);
    all_is_given_back();
}

/* `after` seconds from now; what has been answered is seen first. */
static void tick(struct lc_net_comm *comm, int after)
{
    (void)pthread_mutex_lock(&comm->lock);
    lc_verbs_data_move(comm);
    comm->asked |= comm->sender; /* the caller tries to send all the time */
    comm->look_ns = 0;
    (void)lc_verbs_comm_tick(comm, lc_now_ns() + after * SECOND);
    comm->look_ns = INT64_MAX; /* the thread does not look */
    (void)pthread_mutex_unlock(&comm->lock);
}

/* The clear-to-send has been acknowledged, or there was none. */
static void peer_that_is_gone_is_noticed(struct end *end)
{
    struct lc_net_comm *comm = end->comm;
    int before;

    (void)pthread_mutex_lock(&comm->lock);
    comm->probe_ns = lc_now_ns() + 15 * SECOND;
    (void)pthread_mutex_unlock(&comm->lock);
    before = posts;
    tick(comm, 14);
    CHECK(posts == before);
    tick(comm, 16);
    CHECK(posts == before + 1);
    answers = 1;
    answer = IBV_WC_SUCCESS;
    tick(comm, 30);
    CHECK(posts == before + 1);
    tick(comm, 32);
    CHECK(posts == before + 2 && !comm->restart);
    answers = 1;
    answer = IBV_WC_RETRY_EXC_ERR;
    (void)pthread_mutex_lock(&comm->lock);
    lc_verbs_data_move(comm); /* the caller's test */
    CHECK(comm->restart && strstr(comm->why, "no answer"));
    comm->restart = false;
    (void)pthread_mutex_unlock(&comm->lock);
}

static void who_waits_asks_for_the_peer(void)
{
    struct end receiver = running(false), sender = running(true), idle = running(false);
    struct lc_net_request *request = NULL;
    unsigned char *data = malloc(BYTES);
    struct lc_net_mr *mr = NULL;
    int before;

    CHECK(data);
    CHECK(lc_net_verbs.reg_mr(receiver.comm, data, BYTES, LC_NET_HOST, &mr) == 0);
    recv_one(receiver.comm, data, mr);
    answers = 1;
    answer = IBV_WC_SUCCESS;
    peer_that_is_gone_is_noticed(&receiver);
    CHECK(lc_net_verbs.isend(sender.comm, data, BYTES, 0, mr, &request) == 0 && !request);
    peer_that_is_gone_is_noticed(&sender);
    before = posts;
    tick(idle.comm, 100);
    CHECK(posts == before);
    CHECK(lc_net_verbs.dereg(receiver.comm, mr) == 0);
    free(data);
    finish(&receiver);
    finish(&sender);
    finish(&idle);
    all_is_given_back();
}

/* Each repair is made in 2 s, and nothing gets through after it: not for longer than a timeout, however long nothing had
 * to get through before. With ports that are down, so that no queue pair has to be made. */
static void repairs_have_the_time_of_a_timeout(void)
{
    struct end end = running(true);
    struct lc_net_comm *comm = end.comm;
    int64_t begun = lc_now_ns();
    int seconds = 3600;

    (void)pthread_mutex_lock(&comm->lock);
    comm->barren = 5; /* of an hour ago; nobody has waited since */
    comm->barren_ns = begun;
    comm->look_ns = 0;
    (void)lc_verbs_comm_tick(comm, begun + 1800 * SECOND);
    port_is_down = true;
    for (; !comm->error && seconds < 3700; seconds += 2) {
        char rest[4096];

        comm->state = LC_VERBS_RUN;
        lc_verbs_comm_path_failed(comm, 0, "no answer");
        (void)lc_verbs_comm_tick(comm, begun + seconds * SECOND);
        while (recv(end.peer, rest, sizeof(rest), MSG_DONTWAIT) > 0)
            ;
    }
    CHECK(comm->error == -EREMOTEIO && strstr(comm->why, "repairs do not help"));
    CHECK(seconds > 3660 && seconds < 3666);
    port_is_down = false;
    (void)pthread_mutex_unlock(&comm->lock);
    finish(&end);
    all_is_given_back();
}

static struct lc_net_mr *registered(unsigned char *at, size_t size)
{
    struct lc_net_mr *mr = NULL;

    CHECK(lc_verbs_mr_open(&dev, at, size, -1, 0, &mr) == 0);
    return mr;
}

/* The device goes on with the pages that were there when it was told of them. */
static void what_is_mapped_later_is_registered_anew(void)
{
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    unsigned char *at = mmap(NULL, BYTES, protection, flags, -1, 0);
    struct lc_net_mr *large, *small, *later;

    CHECK(at != MAP_FAILED);
    large = registered(at, BYTES);
    small = registered(at, 4096);
    CHECK(registrations == 2);
    CHECK(lc_verbs_mr_close(large) == 0);
    CHECK(registrations == 1);
    CHECK(munmap(at + 4096, BYTES - 4096) == 0);
    CHECK(mmap(at + 4096, BYTES - 4096, protection, flags | MAP_FIXED, -1, 0) == at + 4096);
    later = registered(at + 65536, 65536);
    CHECK(registrations == 2 && later->mrs[0] != small->mrs[0]);
    CHECK(lc_verbs_mr_close(small) == 0);
    CHECK(lc_verbs_mr_close(later) == 0);
    CHECK(registrations == 0);
    CHECK(munmap(at, BYTES) == 0);
}

static void the_same_pages_are_registered_once(void)
{
    unsigned char *at = aligned_alloc(4096, BYTES);
    struct lc_net_mr *one, *two;

    CHECK(at);
    one = registered(at, BYTES);
    two = registered(at + 100, BYTES - 200);
    CHECK(registrations == 1 && one->mrs[0] == two->mrs[0]);
    CHECK(lc_verbs_mr_close(one) == 0);
    CHECK(registrations == 1);
    CHECK(lc_verbs_mr_close(two) == 0);
    CHECK(registrations == 0);
    free(at);
}

static struct lc_net_listen *listening(struct lc_verbs_handle *handle)
{
    union lc_tcp_address loopback = {
        .v4 = {.sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) }}
    };
    struct lc_net_listen *listen = NULL;

    CHECK(lc_verbs_service_listen(&dev, &loopback, 60 * SECOND, &listen) == 0);
    lc_verbs_service_handle(listen, handle);
    return listen;
}

/* Both ends, which have greeted each other; without ports that is all. */
static void connect_both(struct lc_net_listen *listen, const struct lc_verbs_handle *handle,
                         struct lc_net_comm *ends[2])
{
    struct lc_deadline deadline = lc_deadline_in_ms(20000);
    union lc_tcp_address address;

    CHECK(lc_tcp_address_read(&handle->address, 0, &address) == 0);
    ends[0] = lc_verbs_comm_new(&dev, true, -1, 60 * SECOND);
    CHECK(ends[0]);
    memcpy(ends[0]->token, handle->token, sizeof(handle->token));
    (void)pthread_mutex_lock(&ends[0]->lock);
    CHECK(lc_verbs_service_dial(ends[0], &address) == 0);
    lc_verbs_comm_hello(ends[0]);
    (void)pthread_mutex_unlock(&ends[0]->lock);
    while (!(ends[1] = lc_verbs_service_incoming(listen))) {
        CHECK(!lc_deadline_passed(deadline));
        usleep(1000);
    }
}

/* That a process got from this transport, or from the test. */
static int descriptors(void)
{
    int n = 0;

    for (int fd = 3; fd < 256; fd++) {
        char name[64], what[64] = "";

        (void)snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
        if (readlink(name, what, sizeof(what) - 1) > 0)
            n += strncmp(what, "socket:", 7) == 0 || strncmp(what, "anon_inode:", 11) == 0;
    }
    return n;
}

static int status_of(pid_t child)
{
    int status = -1;

    CHECK(child > 0);
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

/* The numbers may have been given out again in the child, whose own children then have others' descriptors there. */
static void in_child(int before)
{
    struct lc_net_context *ctx = NULL;
    pid_t grandchild;

    CHECK(descriptors() == before);
    CHECK(lc_net_verbs.init(NULL, &ctx) == -ECHILD);
    for (int fd = 3; fd < 64; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            CHECK(dup2(0, fd) == fd);
    grandchild = fork();
    if (grandchild == 0) {
        for (int fd = 3; fd < 64; fd++)
            CHECK(fcntl(fd, F_GETFD) >= 0);
        _exit(0);
    }
    CHECK(status_of(grandchild) == 0);
    _exit(0);
}

static void a_child_holds_nothing(void)
{
    struct lc_verbs_handle handle;
    struct lc_net_listen *listen;
    struct lc_net_comm *ends[2];
    int before = descriptors(), stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    union lc_tcp_address address;
    pid_t child;

    port_is_down = true;
    listen = listening(&handle);
    connect_both(listen, &handle, ends);
    CHECK(lc_tcp_address_read(&handle.address, 0, &address) == 0);
    CHECK(connect(stranger, &address.sa, lc_tcp_address_size(&address)) == 0);
    usleep(100000);
    CHECK(descriptors() == before + 7); /* two ends, the stranger's, the listen, the thread's two */
    child = fork();
    if (child == 0)
        in_child(before + 1);
    CHECK(status_of(child) == 0);
    CHECK(descriptors() == before + 7);
    lc_verbs_service_close(ends[0]);
    lc_verbs_service_close(ends[1]);
    lc_verbs_service_unlisten(listen);
    close(stranger);
    all_is_given_back();
}

static void both_ends_are_kept_alive(void)
{
    struct lc_verbs_handle handle;
    struct lc_net_listen *listen = listening(&handle);
    struct lc_net_comm *ends[2];

    port_is_down = true;
    connect_both(listen, &handle, ends);
    for (int i = 0; i < 2; i++) {
        int on = 0, idle = 0;
        socklen_t size = sizeof(on);

        (void)pthread_mutex_lock(&ends[i]->lock);
        CHECK(getsockopt(ends[i]->fd, SOL_SOCKET, SO_KEEPALIVE, &on, &size) == 0 && on);
        CHECK(getsockopt(ends[i]->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &size) == 0 && idle == 60);
        (void)pthread_mutex_unlock(&ends[i]->lock);
        lc_verbs_service_close(ends[i]);
    }
    lc_verbs_service_unlisten(listen);
    all_is_given_back();
}

static void closing_twice_harms_nobody(void)
{
    struct lc_verbs_handle handle;
    struct lc_net_listen *listen = listening(&handle);
    struct end one = running(true), two = running(false);

    finish(&one);
    lc_verbs_service_close(one.comm);
    lc_verbs_service_unlisten(listen);
    lc_verbs_service_unlisten(listen);
    CHECK(!two.comm->error);
    finish(&two);
    all_is_given_back();
}

static double processor_seconds(void)
{
    struct timespec time;

    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) == 0);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* As in an all-to-all over hundreds of nodes. Nothing moves, so that they need no memory for devices. */
static void many_connections_cost_little(void)
{
    struct rlimit limit;
    double before, used;

    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    if (limit.rlim_max < MANY + 64 || setrlimit(RLIMIT_NOFILE, &limit))
        exit(LC_SKIP);
    for (int i = 0; i < MANY; i++) {
        struct lc_net_comm *comm = calloc(1, sizeof(*comm));

        CHECK(comm && pthread_mutex_init(&comm->lock, NULL) == 0);
        comm->dev = &dev;
        comm->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        CHECK(comm->fd >= 0);
        comm->state = LC_VERBS_RUN;
        comm->timeout_ns = 60 * SECOND;
        comm->look_ns = INT64_MAX;
        CHECK(lc_verbs_service_add(comm) == 0);
    }
    sleep(1);
    before = processor_seconds();
    sleep(3);
    used = processor_seconds() - before;
    printf("%.1f %% of a processor\n", used / 3 * 100);
    CHECK(used < 3 * 0.05);
    (void)fflush(stdout);
    _exit(0); /* they are not whole */
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"dereg",   dereg                                  },
    { "done",   dereg_after_completion_harms_nobody    },
    { "probe",  who_waits_asks_for_the_peer            },
    { "barren", repairs_have_the_time_of_a_timeout     },
    { "fork",   a_child_holds_nothing                  },
    { "alive",  both_ends_are_kept_alive               },
    { "twice",  closing_twice_harms_nobody             },
    { "many",   many_connections_cost_little           },
    { "later",  what_is_mapped_later_is_registered_anew},
    { "once",   the_same_pages_are_registered_once     },
};

int main(int argc, char **argv)
{
    lc_ibv.ibv_reg_mr = reg_mr;
    lc_ibv.ibv_dereg_mr = dereg_mr;
    lc_ibv.ibv_destroy_qp = destroy_qp;
    lc_ibv.ibv_destroy_cq = destroy_cq;
    lc_ibv.ibv_query_port = query_port;
    lc_ibv.ibv_query_gid = query_gid;
    lc_ibv.ibv_wc_status_str = status_str;
    lc_log_set_level(LC_LOG_INFO);
    CHECK(lc_verbs_service_prepare() == 0);
    for (int k = 1; k < argc; k++) {
        bool known = false;

        for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
            if (strcmp(argv[k], cases[i].name) != 0)
                continue;
            known = true;
            cases[i].run();
            printf("%s: ok\n", argv[k]);
        }
        CHECK(known);
    }
    return 0;
}
