/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine ends, behind its last message or with the process, while somebody is still about to wake a thread of it: the wake
 * is held back until then, here, and must not meet a descriptor that is closed, which by then may be somebody else's. */
#include "plugin/net/tcp/tcp_internal.h"
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "common/log.h"

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define ENDS_US \
    300000 /* many looks of the service thread; too few would let a fault pass, and never find one */

static struct lc_net_context *ctx;
static int other = -1;           /* the other process */
static _Thread_local bool holds; /* the next wake of this thread is held back */
static bool held;

static void say(const void *data, size_t size)
{
    CHECK(send(other, data, size, MSG_NOSIGNAL) == (ssize_t)size);
}

static void hear(void *data, size_t size)
{
    CHECK(recv(other, data, size, MSG_WAITALL) == (ssize_t)size);
}

/* ---- the process ends while a caller is about to wake a thread of the pool ---- */

static atomic_int pool_fd = -1; /* the caller's next wake by it is held back */
static atomic_bool wakes;       /* set by the caller: that is under way */
static pthread_t caller;
static bool has_caller;

/* It must not be closed while this lasts, however long that is. */
static void hold_wake_of_pool(int fd)
{
    atomic_store(&pool_fd, -1);
    atomic_store(&wakes, true);
    usleep(ENDS_US);
    CHECK(fcntl(fd, F_GETFD) >= 0);
}

/* Behind the engine's own end, which has the priority of none. */
__attribute__((destructor(101))) static void wait_for_caller(void)
{
    if (has_caller)
        CHECK(pthread_join(caller, NULL) == 0);
}

/* ---- both ---- */

/* In place of the C library's. */
ssize_t write(int fd, const void *data, size_t size)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    char go = 1;

    if (fd >= 0 && fd == atomic_load(&pool_fd))
        hold_wake_of_pool(fd);
    if (holds && fd >= 0 && fd == engine.wake_fd) {
        holds = false;
        held = true;
        say(&go, 1);
        while (leave_any()) {
            CHECK(!lc_deadline_passed(end));
            sched_yield();
        }
        usleep(ENDS_US);
        CHECK(fcntl(fd, F_GETFD) >= 0);
    }
    return syscall(SYS_write, fd, data, size);
}

static void begin(void)
{
    CHECK(lc_net_tcp.init(&(struct lc_net_options){ .traffic_class = -1 }, &ctx) == 0 && ctx);
}

/* Its last communicator ends before the message has come. */
static void be_sender(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_comm *comm = NULL;
    struct lc_net_request *r;
    unsigned char byte = 7;
    char go;

    begin();
    hear(handle, sizeof(handle));
    while (!comm) {
        CHECK(lc_net_tcp.connect(ctx, 0, handle, &comm) == 0 && !lc_deadline_passed(end));
        sched_yield();
    }
    hear(&go, 1); /* nobody reads */
    CHECK(lc_net_tcp.isend(comm, &byte, 1, 0, NULL, &r) == 0 && r);
    pair_wait(r, NULL, NULL, NULL);
    lc_net_tcp.close_send(comm);
    while (atomic_load(&engine.attention)) /* or the wake would find it asked for */
        sched_yield();
    holds = true;
    lc_net_tcp.fini(ctx);
    holds = false;
    if (!held)
        say(&go, 1);
    exit(0);
}

static void be_receiver(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_listen *listen;
    struct lc_net_comm *comm = NULL;
    struct lc_net_request *r;
    struct lane *lane;
    unsigned char byte = 0;
    void *at = &byte;
    size_t room = 1;
    int tag = 0;
    char go = 1;

    begin();
    CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
    say(handle, sizeof(handle));
    while (!comm) {
        CHECK(lc_net_tcp.accept(listen, &comm) == 0 && !lc_deadline_passed(end));
        sched_yield();
    }
    lane = &((struct conn *)comm)->lanes[0];
    for (bool up = false; !up; sched_yield()) {
        pthread_mutex_lock(&lane->io);
        up = lane->fd >= 0;
        if (!up)
            lane_unlock(lane);
        CHECK(!lc_deadline_passed(end));
    }
    say(&go, 1);
    hear(&go, 1);
    lane_unlock(lane);
    CHECK(lc_net_tcp.irecv(comm, 1, &at, &room, &tag, NULL, &r) == 0 && r);
    pair_wait(NULL, r, NULL, NULL);
    CHECK(byte == 7);
    lc_net_tcp.close_recv(comm);
    lc_net_tcp.close_listen(listen);
    lc_net_tcp.fini(ctx);
}

/* Until it comes at a time when the thread sleeps. */
static void *keep_asking(void *arg)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lane *lane = arg;

    while (!atomic_load(&wakes)) {
        conn_lock(lane->conn);
        pool_ask(lane);
        conn_unlock_unchanged(lane->conn);
        CHECK(!lc_deadline_passed(end));
        usleep(1000);
    }
    return NULL;
}

/* As NCCL's thread may be when the program returns from main() with its communicators still there. */
static void be_process_that_ends(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct pair pair;
    struct conn *conn;
    struct lane *lane;
    bool up = false;

    tcp_settings(2, 16384, 60);
    begin();
    pair = pair_open(ctx, 0);
    conn = (struct conn *)pair.send;
    lane = &conn->lanes[1];
    for (; !up; sched_yield()) {
        conn_lock(conn);
        up = lane->up && lane->mover > 0;
        if (up)
            atomic_store(&pool_fd, (int)engine.movers[lane->mover].wake_fd);
        conn_unlock_unchanged(conn);
        CHECK(!lc_deadline_passed(end));
    }
    has_caller = pthread_create(&caller, NULL, keep_asking, lane) == 0;
    CHECK(has_caller);
    while (!atomic_load(&wakes)) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    exit(0);
}

static void an_end_of_the_process_waits_for_who_wakes_the_pool(void)
{
    pid_t pid = fork();
    int status;

    CHECK(pid >= 0);
    if (pid == 0)
        be_process_that_ends();
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

int main(void)
{
    int ends[2];
    int status;
    pid_t pid;

    lc_log_set_level(LC_LOG_ERROR);
    an_end_of_the_process_waits_for_who_wakes_the_pool();
    tcp_settings(1, 16384, 60);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    pid = fork();
    CHECK(pid >= 0);
    other = ends[pid == 0];
    close(ends[pid != 0]);
    if (pid == 0)
        be_sender();
    be_receiver();
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    close(other);
    return 0;
}
