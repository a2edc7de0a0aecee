/* SPDX-License-Identifier: Apache-2.0
 *
 * The TCP transport among strangers, dead peers and forks: test_tcp_peers CASE. */
#include "plugin/net/tcp/tcp_internal.h"
#include "tests/plugin/tcp.h"

#include "common/deadline.h"
#include "common/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static struct lc_net_context *ctx;

static void begin(void)
{
    CHECK(lc_net_tcp.init(&(struct lc_net_options){ .traffic_class = -1 }, &ctx) == 0 && ctx);
}

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int n = 0;

    CHECK(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static int count_fds(void)
{
    return count_entries("/proc/self/fd");
}

/* Of them those that a peer may wait for the end of. A thread may just have another one, which is bound at most, to learn
 * about addresses. */
static int count_connections(void)
{
    int n = 0;

    for (int fd = 0; fd < 1024; fd++) {
        struct tcp_info info = { 0 };
        socklen_t size = sizeof(info);

        n += getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
             info.tcpi_state != TCP_CLOSE && info.tcpi_state != TCP_LISTEN;
    }
    return n;
}

/* ---- strangers ---- */

static int knock(uint16_t port)
{
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_port = port,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    return fd;
}

/* Says `size` bytes of nonsense, then goes, by a reset or not; some stay and are silent. */
static void visit(uint16_t port, unsigned i)
{
    static const char text[] =
        "GET /index.html HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nUser-Agent: scanner\r\n\r\n";
    struct linger reset = { .l_onoff = 1, .l_linger = 0 };
    int fd = knock(port);

    (void)!send(fd, text, i % sizeof(text), MSG_NOSIGNAL);
    if (i % 7 == 0)
        return; /* left open until the process ends */
    if (i % 2)
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    close(fd);
}

static void strangers_change_nothing(unsigned n)
{
    struct lc_net_listen *listen;
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct pair pair;
    uint16_t port;

    CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
    port = pair_port(handle);
    for (unsigned i = 0; i < 100; i++)
        visit(port, i);
    pair = pair_open(ctx, 0);
    for (unsigned i = 0; i < n; i++) {
        visit(port, i);
        if (i % 20 == 0)
            pair_stream(&pair, 4, 100000, 4, i);
    }
    CHECK(atomic_load(&engine.strangers) > n / 2);
    CHECK(listen->n_ready == 0);
    pair_close(&pair);
    lc_net_tcp.close_listen(listen);
}

/* ---- two processes ---- */

struct other {
    pid_t pid;
    int fd;
};

static void say(int fd, const void *data, size_t size)
{
    CHECK(send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size);
}

static void hear(int fd, void *data, size_t size)
{
    CHECK(recv(fd, data, size, MSG_WAITALL) == (ssize_t)size);
}

static struct lc_net_comm *connect_to(const unsigned char *given)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_comm *comm = NULL;

    memcpy(handle, given, sizeof(handle));
    while (!comm) {
        CHECK(lc_net_tcp.connect(ctx, 0, handle, &comm) == 0 && !lc_deadline_passed(end));
        sched_yield();
    }
    return comm;
}

static struct lc_net_comm *accept_from(struct lc_net_listen *listen)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_net_comm *comm = NULL;

    while (!comm) {
        CHECK(lc_net_tcp.accept(listen, &comm) == 0 && !lc_deadline_passed(end));
        sched_yield();
    }
    lc_net_tcp.close_listen(listen);
    return comm;
}

static void wait_for_sockets(struct lc_net_comm *comm)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct conn *conn = (struct conn *)comm;
    int up = 0;

    while (up == 0) {
        conn_lock(conn);
        up = conn->n_up;
        conn_unlock_unchanged(conn);
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

static unsigned char brief[8000]; /* a message that may come before its receive */

static void send_brief(struct lc_net_comm *comm)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_net_request *r = NULL;
    bool done = false;

    while (!done) {
        if (!r)
            CHECK(lc_net_tcp.isend(comm, brief, sizeof(brief), 0, NULL, &r) == 0);
        if (r)
            CHECK(lc_net_tcp.test(r, &done, NULL) == 0);
        CHECK(!lc_deadline_passed(end));
    }
}

/* The other process: connects and sends so many messages, when it is told to, or listens and accepts, and waits to be killed. */
static void be_other(int fd, bool sends, int messages)
{
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_listen *listen;
    struct lc_net_comm *comm;
    char done = 1; /* or: go on */

    begin();
    if (sends) {
        hear(fd, handle, sizeof(handle));
        comm = connect_to(handle);
        if (messages)
            hear(fd, &done, 1);
        for (int i = 0; i < messages; i++)
            send_brief(comm);
    } else {
        CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
        say(fd, handle, sizeof(handle));
        (void)accept_from(listen);
    }
    say(fd, &done, 1);
    for (;;)
        pause();
}

static struct other start_other(bool sends, int messages)
{
    struct other other;
    int fds[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    other.pid = fork();
    CHECK(other.pid >= 0);
    if (other.pid == 0) {
        close(fds[0]);
        be_other(fds[1], sends, messages);
    }
    close(fds[1]);
    other.fd = fds[0];
    return other;
}

static void kill_other(struct other *other)
{
    CHECK(kill(other->pid, SIGKILL) == 0);
    CHECK(waitpid(other->pid, NULL, 0) == other->pid);
    close(other->fd);
}

/* Of a short message the sender hears no more. */
static unsigned char much[2 * LC_TCP_EARLY_MAX];

static int wait_error(struct lc_net_request *r)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool done = false;
    int err;

    while ((err = lc_net_tcp.test(r, &done, NULL)) == 0) {
        CHECK(!done && !lc_deadline_passed(end));
        sched_yield();
    }
    return err;
}

static char said[4096];

static void keep_line(enum lc_log_level level, const char *file, int line, const char *text)
{
    (void)strncat(said, text, sizeof(said) - strlen(said) - 1);
}

static void keep_what_is_said(void)
{
    said[0] = '\0';
    lc_log_set_level(LC_LOG_WARN);
    lc_log_set_sink(keep_line);
}

/* Whole messages that the system holds. */
static int count_unread(struct lane *lane)
{
    int bytes = 0;

    pthread_mutex_lock(&lane->io);
    CHECK(ioctl(lane->fd, FIONREAD, &bytes) == 0);
    lane_unlock(lane);
    return bytes / (int)(sizeof(struct lc_tcp_frame) + sizeof(brief));
}

static int count_early(struct conn *conn)
{
    int n = 0;

    conn_lock(conn);
    for (int i = 0; i < LC_TCP_EARLY && conn->early; i++)
        n += conn->early[i].full;
    conn_unlock_unchanged(conn);
    return n;
}

static bool take_brief(struct lc_net_comm *comm)
{
    static unsigned char to[sizeof(brief)];
    struct lc_net_request *r;
    size_t room = sizeof(to);
    bool done = false;
    void *at = to;
    int tag = 0;

    if (lc_net_tcp.irecv(comm, 1, &at, &room, &tag, NULL, &r) != 0)
        return false;
    while (!done && lc_net_tcp.test(r, &done, NULL) == 0)
        sched_yield();
    return done;
}

/* More than its socket holds waits for a receiver. The first that this one says meets nobody, and what it says next cannot be
 * written, while most messages are still unread. */
static void what_had_come_from_a_killed_peer_is_read(void)
{
    struct other other = start_other(true, 30);
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_listen *listen;
    struct lc_net_comm *comm;
    struct conn *conn;
    int taken = 0;
    int unread;
    char done = 1;

    begin();
    keep_what_is_said();
    CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
    say(other.fd, handle, sizeof(handle));
    comm = accept_from(listen);
    conn = (struct conn *)comm;
    wait_for_sockets(comm);
    atomic_store(&conn->attendance, CALLED); /* just now */
    lane_kick(&conn->lanes[0], 1);
    say(other.fd, &done, 1);
    hear(other.fd, &done, 1);
    unread = count_unread(&conn->lanes[0]);
    CHECK(unread > 2);
    kill_other(&other);
    while (taken < unread && take_brief(comm))
        taken++;
    CHECK(taken + count_early(conn) >= unread);
    lc_net_tcp.close_recv(comm);
    lc_net_tcp.fini(ctx);
}

static struct lc_net_request *post_any(struct lc_net_comm *comm, bool sends)
{
    static unsigned char byte;
    struct lc_net_request *r = NULL;
    void *at = &byte;
    size_t room = 1;
    int tag = 0;

    if (sends)
        CHECK(lc_net_tcp.isend(comm, much, sizeof(much), 0, NULL, &r) == 0 && r);
    else
        CHECK(lc_net_tcp.irecv(comm, 1, &at, &room, &tag, NULL, &r) == 0 && r);
    return r;
}

/* Nothing was sent over it, and it does without sockets. */
static void wait_until_parked(struct lc_net_comm *comm)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct conn *conn = (struct conn *)comm;
    bool parked = false;

    while (!parked) {
        conn_lock(conn);
        parked = conn->parking == PARKED;
        conn_unlock_unchanged(conn);
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
}

/* Also one that ended when nothing told of that any more. */
static void a_killed_peer_is_an_error_that_names_it(bool sends, bool parked)
{
    struct other other = start_other(!sends, 0); /* before our threads are there */
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_listen *listen;
    struct lc_net_comm *comm;
    struct lc_net_request *r;
    char done;

    begin();
    keep_what_is_said();
    if (sends) {
        hear(other.fd, handle, sizeof(handle));
        comm = connect_to(handle);
    } else {
        CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
        say(other.fd, handle, sizeof(handle));
        comm = accept_from(listen);
    }
    if (!parked)
        r = post_any(comm, sends);
    hear(other.fd, &done, 1);
    if (parked)
        wait_until_parked(comm);
    kill_other(&other);
    if (parked)
        r = post_any(comm, sends);
    CHECK(wait_error(r) == -EREMOTEIO && wait_error(r) == -EREMOTEIO);
    CHECK(strstr(said, "127.0.0.1:") && strstr(said, "over lo failed"));
    CHECK(strstr(said, "the other process has ended"));
    if (sends)
        lc_net_tcp.close_send(comm);
    else
        lc_net_tcp.close_recv(comm);
    lc_net_tcp.fini(ctx);
    lc_log_set_sink(NULL);
}

/* ---- a sender that leaves ---- */

#define LAST 30 /* messages, far more than the receiver's socket holds */

/* The other process: its last communicator ends, and it goes on or exits. */
static void be_leaving(int fd, bool exits)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_comm *comm;
    bool runs = true;
    char go = 1;

    begin();
    hear(fd, handle, sizeof(handle));
    comm = connect_to(handle);
    hear(fd, &go, 1);
    for (int i = 0; i < LAST; i++) {
        memset(brief, i + 1, sizeof(brief));
        send_brief(comm);
    }
    lc_net_tcp.close_send(comm);
    lc_net_tcp.fini(ctx);
    say(fd, &go, 1);
    if (exits)
        exit(0);
    while (runs) { /* the engine's threads end behind the last message, though nobody calls */
        pthread_mutex_lock(&engine.life);
        runs = engine.running;
        pthread_mutex_unlock(&engine.life);
        CHECK(!lc_deadline_passed(end));
        usleep(1000);
    }
    begin(); /* anew */
    lc_net_tcp.fini(ctx);
    exit(0);
}

/* Its receiver is there, but looks for them only when everything of the sender would be gone. */
static void last_messages_come_to_a_slow_receiver(bool exits)
{
    static unsigned char to[sizeof(brief)];
    unsigned char handle[LC_NET_HANDLE_BYTES];
    struct lc_net_listen *listen;
    struct lc_net_comm *comm;
    struct conn *conn;
    int fds[2];
    int status;
    pid_t pid;
    char go = 1;

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        be_leaving(fds[1], exits);
    begin();
    CHECK(lc_net_tcp.listen(ctx, 0, handle, &listen) == 0);
    say(fds[0], handle, sizeof(handle));
    comm = accept_from(listen);
    conn = (struct conn *)comm;
    wait_for_sockets(comm);
    atomic_store(&conn->attendance, CALLED); /* just now */
    lane_kick(&conn->lanes[0], 1);
    say(fds[0], &go, 1);
    hear(fds[0], &go, 1);
    sleep(3);
    for (int i = 0; i < LAST; i++) {
        struct lc_net_request *r;
        size_t room = sizeof(to);
        void *at = to;
        int tag = 0;

        CHECK(lc_net_tcp.irecv(comm, 1, &at, &room, &tag, NULL, &r) == 0 && r);
        pair_wait(NULL, r, NULL, NULL);
        CHECK(to[0] == i + 1 && to[sizeof(to) - 1] == i + 1);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    lc_net_tcp.close_recv(comm);
    lc_net_tcp.fini(ctx);
    close(fds[0]);
    close(fds[1]);
}

/* ---- a way that others break ---- */

/* All listens of a device share a port. */
static void aim(struct relay *relay, struct lc_net_listen **listen)
{
    unsigned char handle[LC_NET_HANDLE_BYTES];

    CHECK(lc_net_tcp.listen(ctx, 0, handle, listen) == 0);
    relay_target(relay, pair_port(handle));
}

static struct pair open_through(struct relay *relay, struct lc_net_listen **listen)
{
    aim(relay, listen);
    return pair_open(ctx, relay_port(relay));
}

static void cut_off(struct relay *relay)
{
    relay_refuse(relay, true);
    while (relay_links(relay))
        sched_yield();
}

/* Lanes are to be given up, for they stand still, and the last breaks meanwhile: no deadline has passed. */
static void who_breaks_while_it_is_given_up_has_its_time(void)
{
    struct pair pair = pair_open(ctx, 0);
    struct conn *conn = (struct conn *)pair.recv;

    pair_stream(&pair, 20, 100000, 4, 1);
    for (int i = 0; i < conn->n_lanes; i++)
        pthread_mutex_lock(&conn->lanes[i].io);
    for (int i = 0; i < conn->n_lanes; i++)
        lane_break(&conn->lanes[i], "nothing comes through it");
    service_end_late(conn);
    for (int i = 0; i < conn->n_lanes; i++)
        lane_unlock(&conn->lanes[i]);
    pair_stream(&pair, 20, 100000, 4, 2);
    pair_close(&pair);
}

/* Its farewell cannot arrive, for no socket is left; the receiver has to ask. */
static void a_close_without_a_way_is_heard(void)
{
    struct relay *relay = relay_open((struct harm){ .kill_us = 1000 });
    struct lc_net_listen *listen;
    unsigned char byte = 0;
    void *at = &byte;
    size_t room = 1;
    int tag = 0;
    struct pair pair = open_through(relay, &listen);
    struct lc_net_request *recv;

    cut_off(relay);
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    lc_net_tcp.close_send(pair.send);
    CHECK(wait_error(recv) == -EREMOTEIO);
    CHECK(strstr(said, "the other side closed the connection"));
    lc_net_tcp.close_recv(pair.recv);
    lc_net_tcp.close_listen(listen);
    relay_close(relay);
}

/* What its socket had taken with it, and no other one brings for a while. */
static void last_messages_outlive_a_broken_socket(void)
{
    enum {
        MESSAGES = 6
    };
    struct relay *relay = relay_open((struct harm){ 0 });
    struct lc_net_listen *listen;
    struct pair pair;
    struct lane *far;

    aim(relay, &listen);
    pair = pair_open_narrow(ctx, relay_port(relay));
    far = &((struct conn *)pair.recv)->lanes[0];
    pair_stream(&pair, 4, 1000, 1, 1);
    pthread_mutex_lock(&far->io); /* nobody reads */
    for (int i = 0; i < MESSAGES; i++)
        send_brief(pair.send);
    relay_refuse(relay, true);
    lane_break(far, "lost with all that has come");
    lane_unlock(far);
    while (relay_links(relay))
        sched_yield();
    lc_net_tcp.close_send(pair.send);
    usleep(100000);
    relay_refuse(relay, false);
    for (int i = 0; i < MESSAGES; i++)
        CHECK(take_brief(pair.recv));
    lc_net_tcp.close_recv(pair.recv);
    lc_net_tcp.close_listen(listen);
    relay_close(relay);
}

/* Whoever is there may come back: the sender is asked again and again, and nothing fails. */
static void a_peer_that_is_there_is_waited_for(void)
{
    struct relay *relay = relay_open((struct harm){ .kill_us = 1000 });
    struct lc_net_listen *listen;
    struct pair pair = open_through(relay, &listen);
    struct conn *receiver = (struct conn *)pair.recv;
    unsigned probes = 0;

    cut_off(relay);
    while (probes < 8) {
        bool done;
        struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

        pthread_mutex_lock(&receiver->lock);
        probes = receiver->probes;
        done = receiver->error != 0;
        pthread_mutex_unlock(&receiver->lock);
        CHECK(!done && !lc_deadline_passed(end));
        sched_yield();
    }
    relay_stop_killing(relay);
    relay_refuse(relay, false);
    pair_stream(&pair, 10, 100000, 4, 1);
    pair_close(&pair);
    lc_net_tcp.close_listen(listen);
    relay_close(relay);
}

/* ---- no way to the peer ---- */

static void both_sides_fail_when_the_way_is_gone(void)
{
    struct relay *relay = relay_open((struct harm){ .kill_us = 1000 });
    struct lc_net_listen *listen;
    unsigned char byte = 0;
    void *at = &byte;
    size_t room = 1;
    int tag = 0;
    struct pair pair = open_through(relay, &listen);
    struct lc_net_request *send;
    struct lc_net_request *recv;

    cut_off(relay);
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
    CHECK(lc_net_tcp.isend(pair.send, much, sizeof(much), 0, NULL, &send) == 0 && send);
    CHECK(wait_error(recv) == -EREMOTEIO);
    CHECK(wait_error(send) == -EREMOTEIO);
    CHECK(strstr(said, "receiving from 127.0.0.1:") && strstr(said, "sending to 127.0.0.1:"));
    CHECK(strstr(said, "no way to it for 2 s"));
    pair_close(&pair);
    lc_net_tcp.close_listen(listen);
    relay_close(relay);
}

static bool send_one_more(struct pair *pair, struct lc_net_request **r)
{
    bool done = false;

    if (!*r)
        CHECK(lc_net_tcp.isend(pair->send, brief, sizeof(brief), 0, NULL, r) == 0);
    if (*r)
        CHECK(lc_net_tcp.test(*r, &done, NULL) == 0);
    if (done)
        *r = NULL;
    return done;
}

/* For longer than a system waits for one that takes nothing. */
static void a_receiver_that_does_not_call_keeps_its_socket(void)
{
    enum {
        MESSAGES = LC_TCP_EARLY - 2
    };
    struct pair pair = pair_open_narrow(ctx, 0);
    struct lane *lane = &((struct conn *)pair.recv)->lanes[0];
    struct lc_net_request *send = NULL;
    int64_t end = lc_now_ns() + engine.timeout_ns * 3 / 2;
    unsigned long broken = atomic_load(&engine.broken);
    int bytes = 8192;
    int sent = 0;

    pair_stream(&pair, 4, 1000, 1, 1);
    CHECK(setsockopt(lane->fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)) == 0);
    while (lc_now_ns() < end) {
        if (sent < MESSAGES && send_one_more(&pair, &send))
            memset(brief, ++sent, sizeof(brief));
        usleep(1000);
    }
    CHECK(atomic_load(&engine.broken) == broken && sent == MESSAGES);
    for (int i = 0; i < MESSAGES; i++)
        CHECK(take_brief(pair.recv));
    pair_stream(&pair, 20, 100000, 4, 1);
    CHECK(!lane->watched);
    pair_close(&pair);
}

/* ---- forks ---- */

static void in_child(struct pair *pair)
{
    unsigned char byte = 0;
    struct lc_net_request *r;
    struct lc_net_comm *comm;
    unsigned char handle[LC_NET_HANDLE_BYTES];
    int n;

    if (count_connections() > 0)
        _exit(1); /* it would keep the parent's connections open */
    if (lc_net_tcp.isend(pair->send, &byte, 1, 0, NULL, &r) != -ECHILD ||
        lc_net_tcp.connect(ctx, 0, handle, &comm) != -ECHILD || lc_net_tcp.devices(&n) != -ECHILD)
        _exit(2);
    pair_close(pair);
    lc_net_tcp.fini(ctx);
    exit(0); /* with all exit handlers */
}

static void a_child_harms_nobody(void)
{
    int before = count_fds();
    struct pair pair;

    begin();
    pair = pair_open(ctx, 0);
    for (unsigned i = 0; i < 5; i++) {
        int status;
        pid_t pid;

        pair_stream(&pair, 20, 300000, 8, i);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            in_child(&pair);
        pair_stream(&pair, 20, 300000, 8, i);
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 0);
    }
    pair_close(&pair);
    lc_net_tcp.fini(ctx);
    CHECK(count_fds() == before);
}

/* By a child, whose free numbers are files of its own now: how many of them its child lacks. */
static int lost_by_a_child(void)
{
    int status;
    pid_t pid;

    for (int fd = 3; fd < 200; fd++) {
        if (fcntl(fd, F_GETFD) < 0)
            CHECK(dup2(0, fd) == fd);
    }
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        int lost = 0;

        for (int fd = 3; fd < 200; fd++)
            lost += fcntl(fd, F_GETFD) < 0;
        _exit(lost);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void a_child_of_a_child_closes_nothing(void)
{
    struct pair pair;
    int status;
    pid_t pid;

    begin();
    pair = pair_open(ctx, 0);
    pair_stream(&pair, 20, 300000, 8, 1);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        _exit(lost_by_a_child());
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    pair_close(&pair);
    lc_net_tcp.fini(ctx);
}

/* Nor does it keep a socket that has not found its lane yet. */
static void a_child_holds_no_dial(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof(address);
    int mute = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lc_net_listen *listen_comm;
    struct lc_net_comm *comm = NULL;
    struct lc_tcp_handle handle;
    int status;
    pid_t pid;

    CHECK(mute >= 0 && bind(mute, (struct sockaddr *)&address, size) == 0 && listen(mute, 8) == 0);
    CHECK(getsockname(mute, (struct sockaddr *)&address, &size) == 0);
    begin();
    CHECK(lc_net_tcp.listen(ctx, 0, &handle, &listen_comm) == 0);
    handle.address.port = address.sin_port;
    CHECK(lc_net_tcp.connect(ctx, 0, &handle, &comm) == 0 && !comm);
    while (count_connections() == 0) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        _exit(count_connections() > 0);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    lc_net_tcp.close_listen(listen_comm);
    lc_net_tcp.fini(ctx);
    close(mute);
}

/* A sender that closes while it is forked. Written by who moves its lane, and by who forks. */
struct closing {
    struct conn *conn;
    atomic_bool held;   /* the lane is: its socket cannot be closed */
    atomic_bool forked; /* it need not be held any more */
};

/* As in the middle of a batch, behind which no goodbye can be said. */
static void *hold_lane(void *arg)
{
    struct closing *closing = arg;
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct lane *lane = &closing->conn->lanes[0];

    pthread_mutex_lock(&lane->io);
    lane->out_cut = true;
    atomic_store(&closing->held, true);
    while (!atomic_load(&closing->forked)) {
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    pthread_mutex_unlock(&lane->io);
    return NULL;
}

static void *close_sender(void *arg)
{
    lc_net_tcp.close_send(arg);
    return NULL;
}

static bool is_closing(struct conn *conn)
{
    bool closing;

    conn_lock(conn);
    closing = conn->closing;
    conn_unlock_unchanged(conn);
    return closing;
}

/* It knows nothing any more of a connection that is being closed, whose socket it has all the same. */
static void a_child_of_a_close_keeps_nobody_waiting(void)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    struct closing closing = { .conn = NULL };
    struct lc_net_request *r;
    pthread_t threads[2];
    struct pair pair;
    size_t room = sizeof(much);
    void *at = much;
    int tag = 0;
    pid_t pid;

    begin();
    pair = pair_open_narrow(ctx, 0);
    CHECK(lc_net_tcp.irecv(pair.recv, 1, &at, &room, &tag, NULL, &r) == 0 && r);
    closing.conn = (struct conn *)pair.send;
    CHECK(pthread_create(&threads[0], NULL, hold_lane, &closing) == 0);
    while (!atomic_load(&closing.held))
        sched_yield();
    CHECK(pthread_create(&threads[1], NULL, close_sender, pair.send) == 0);
    while (!is_closing(closing.conn)) { /* its memory stays until the lane is let go */
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    atomic_store(&closing.forked, true);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(wait_error(r) == -EREMOTEIO);
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
    lc_net_tcp.close_recv(pair.recv);
    lc_net_tcp.fini(ctx);
}

/* ---- descriptors ---- */

static void nothing_is_left_open(void)
{
    int before = count_fds();

    for (int i = 0; i < 20; i++) {
        struct pair pair;

        begin();
        pair = pair_open(ctx, 0);
        pair_stream(&pair, 4, 1000, 4, 1);
        pair_close(&pair);
        lc_net_tcp.fini(ctx);
        CHECK(count_fds() == before);
    }
}

/* A job with 64 communicators on a machine of which each is a few connections, all of them of short messages. */
static void many_connections_need_one_thread(void)
{
    enum {
        PAIRS = 64,
        SHARED =
            3 /* where all are listened for, where it is waited for them, and what wakes who waits */
    };
    struct pair pairs[PAIRS];
    int threads = count_entries("/proc/self/task");
    int fds = count_fds();

    begin();
    for (int i = 0; i < PAIRS; i++) {
        pairs[i] = pair_open_narrow(ctx, 0);
        pair_stream(&pairs[i], 4, 1000, 4, 1);
    }
    CHECK(count_entries("/proc/self/task") == threads + 1);
    CHECK(count_fds() == fds + SHARED + 2 * PAIRS);
    for (int i = 0; i < PAIRS; i++)
        pair_close(&pairs[i]);
    lc_net_tcp.fini(ctx);
}

/* With all sockets, or one. Whoever wants it first, it works as if it had never been without; to give them up is no loss. */
static void what_is_not_used_needs_no_socket(void)
{
    enum {
        PAIRS = 8
    };
    struct pair pairs[PAIRS];
    unsigned long broken = atomic_load(&engine.broken);
    int before;
    unsigned char byte = 7;
    void *at = &byte;
    size_t room = 1;
    int tag = 0;

    begin();
    before = count_fds();
    for (int i = 0; i < PAIRS; i++)
        pairs[i] = i % 2 ? pair_open(ctx, 0) : pair_open_narrow(ctx, 0);
    for (int i = 0; i < PAIRS; i++) {
        wait_until_parked(pairs[i].send);
        wait_until_parked(pairs[i].recv);
    }
    CHECK(count_connections() == 0 && count_fds() <= before + 1 + 2 * engine.threads_wanted);
    for (int i = 0; i < PAIRS; i++) {
        struct lc_net_request *recv = NULL;
        struct lc_net_request *send;

        if (i % 4 >= 2)
            CHECK(lc_net_tcp.irecv(pairs[i].recv, 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
        if (recv) {
            wait_for_sockets(pairs[i].send);
            CHECK(lc_net_tcp.isend(pairs[i].send, &byte, 1, 0, NULL, &send) == 0 && send);
            pair_wait(send, recv, NULL, NULL);
        }
        pair_stream(&pairs[i], 20, 300000, 8, (unsigned)i);
    }
    CHECK(atomic_load(&engine.broken) == broken);
    for (int i = 0; i < PAIRS; i++)
        pair_close(&pairs[i]);
    lc_net_tcp.fini(ctx);
}

/* Who is gone cannot be called back. */
static void what_was_closed_meanwhile_is_an_error(bool sends)
{
    struct pair pair;

    begin();
    pair = pair_open_narrow(ctx, 0);
    wait_until_parked(pair.send);
    wait_until_parked(pair.recv);
    if (sends) {
        lc_net_tcp.close_recv(pair.recv);
        CHECK(wait_error(post_any(pair.send, true)) == -EREMOTEIO);
        lc_net_tcp.close_send(pair.send);
    } else {
        lc_net_tcp.close_send(pair.send);
        CHECK(wait_error(post_any(pair.recv, false)) == -EREMOTEIO);
        lc_net_tcp.close_recv(pair.recv);
    }
    lc_net_tcp.fini(ctx);
}

static bool is_up(struct lc_net_comm *comm, int lane)
{
    struct conn *conn = (struct conn *)comm;
    bool up;

    conn_lock(conn);
    up = conn->lanes[lane].up;
    conn_unlock_unchanged(conn);
    return up;
}

static void wait_until_up(struct lc_net_comm *comm, int lane, bool up)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

    while (is_up(comm, lane) != up) {
        CHECK(!lc_deadline_passed(end));
        usleep(1000);
    }
}

/* The first message comes when some sockets have ended and one has not yet. */
static void what_ends_meanwhile_comes_back(void)
{
    struct pair pair;
    struct lane *slow;

    begin();
    pair = pair_open(ctx, 0);
    slow = &((struct conn *)pair.send)->lanes[1];
    for (int i = 0; i < slow->conn->n_lanes; i++) {
        wait_until_up(pair.send, i, true);
        wait_until_up(pair.recv, i, true);
    }
    pthread_mutex_lock(&slow->io);
    for (int i = 0; i < slow->conn->n_lanes; i++)
        wait_until_up(pair.send, i, i == 1);
    conn_lock(slow->conn);
    CHECK(slow->conn->parking == PARK_AGREED);
    conn_unlock_unchanged(slow->conn);
    (void)post_any(pair.send, true);
    lane_unlock(slow);
    for (int i = 0; i < slow->conn->n_lanes; i++)
        wait_until_up(pair.send, i, true);
    pair_close(&pair);
    lc_net_tcp.fini(ctx);
}

static void wait_until_parking(struct conn *conn, enum parking parking)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool there = false;

    while (!there) {
        conn_lock(conn);
        there = conn->parking == parking;
        conn_unlock_unchanged(conn);
        CHECK(!lc_deadline_passed(end));
        usleep(1000);
    }
}

/* With another socket than the one of this epoch. */
static void wait_until_back(struct lane *lane, uint32_t epoch)
{
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    bool back = false;

    while (!back) {
        conn_lock(lane->conn);
        back = lane->up && lane->epoch > epoch;
        conn_unlock_unchanged(lane->conn);
        CHECK(!lc_deadline_passed(end));
        usleep(1000);
    }
}

static void lose_socket(struct lane *lane)
{
    lane_break(lane, "lost with all that has come");
    lane_unlock(lane);
}

/* The question, or the answer, is lost with the socket: who could not call its sender back would wait for it in vain. */
static void what_is_lost_of_parking_brings_the_sender_back(bool answer)
{
    struct pair pair;
    struct lane *near;
    struct lane *far;
    uint32_t epoch;
    unsigned char bytes[2] = { 7 };

    begin();
    pair = pair_open_narrow(ctx, 0);
    near = &((struct conn *)pair.send)->lanes[0];
    far = &((struct conn *)pair.recv)->lanes[0];
    wait_until_up(pair.recv, 0, true);
    epoch = near->epoch;
    pthread_mutex_lock(&far->io);
    wait_until_parking(near->conn, PARK_ASKED);
    pthread_mutex_lock(&near->io); /* whoever has asked has written it */
    if (answer) {
        lane_unlock(far);
        lane_kick(far, 1);
        wait_until_parking(far->conn, PARK_AGREED);
        while (pthread_mutex_trylock(&far->io) != 0) /* likewise */
            sched_yield();
        lane_unlock(far);
        lose_socket(near);
    } else {
        lane_unlock(near);
        conn_lock(far->conn);
        far->has_home = false;
        conn_unlock(far->conn);
        lose_socket(far);
    }
    wait_until_back(near, epoch);
    wait_until_back(far, epoch);
    pair_send(&pair, bytes, 1, bytes + 1, 1);
    CHECK(bytes[1] == 7);
    pair_close(&pair);
    lc_net_tcp.fini(ctx);
}

/* It could not call its sender back, which has to know: it comes back by itself when the socket breaks. */
static void who_cannot_call_keeps_its_socket(void)
{
    struct pair pair;
    struct conn *sender;
    struct conn *receiver;
    uint32_t epoch;

    begin();
    pair = pair_open_narrow(ctx, 0);
    sender = (struct conn *)pair.send;
    receiver = (struct conn *)pair.recv;
    conn_lock(receiver);
    receiver->lanes[0].has_home = false;
    conn_unlock(receiver);
    wait_until_parking(sender, PARK_OVER);
    CHECK(is_up(pair.recv, 0));
    epoch = sender->lanes[0].epoch;
    pthread_mutex_lock(&sender->lanes[0].io);
    CHECK(shutdown(sender->lanes[0].fd, SHUT_RDWR) == 0);
    lane_unlock(&sender->lanes[0]);
    lane_kick(&sender->lanes[0], 2); /* sees its end */
    wait_until_back(&sender->lanes[0], epoch);
    pair_close(&pair);
    lc_net_tcp.fini(ctx);
}

enum leaving {
    FITS,  /* into the receiver's socket, which nobody reads */
    MUCH,  /* more than that */
    BROKEN /* the sender's socket is gone, and what came through it is not known */
};

/* A process that exits waits no longer for who stands still than until all is at its machine. */
static void what_is_at_the_peers_machine_is_enough(enum leaving how)
{
    struct pair pair;
    struct lane *near;
    struct lane *far;
    int bytes = 8192;
    int messages = how == MUCH ? 20 : 2;
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);

    begin();
    pair = pair_open_narrow(ctx, 0);
    near = &((struct conn *)pair.send)->lanes[0];
    far = &((struct conn *)pair.recv)->lanes[0];
    wait_until_up(pair.recv, 0, true);
    pthread_mutex_lock(&far->io);
    if (how == MUCH)
        CHECK(setsockopt(far->fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes)) == 0);
    for (int i = 0; i < messages; i++) {
        memset(brief, i + 1, sizeof(brief));
        send_brief(pair.send);
    }
    conn_ref(near->conn); /* it may be over as soon as the other side reads */
    lc_net_tcp.close_send(pair.send);
    if (how == BROKEN) {
        pthread_mutex_lock(&near->io);
        lose_socket(near);
    }
    while (how == FITS && !leave_is_with_peers()) {
        CHECK(!lc_deadline_passed(end));
        usleep(1000);
    }
    CHECK(leave_any() && (how == FITS || !leave_is_with_peers()));
    conn_unref(near->conn);
    lane_unlock(far);
    for (int i = 0; i < messages; i++)
        CHECK(take_brief(pair.recv));
    lc_net_tcp.close_recv(pair.recv);
    lc_net_tcp.fini(ctx);
}

/* What was sent has come, and the sender is told so, though its receiver fails, for it waits in vain for one more. */
static void who_leaves_hears_from_a_receiver_that_waits_for_more(void)
{
    struct lc_net_request *recv;
    struct pair pair;
    int64_t from;
    unsigned char bytes[2] = { 7 };

    begin();
    pair = pair_open_narrow(ctx, 0);
    for (int i = 0; i < 14; i++) /* no confirmation is due behind the last */
        pair_send(&pair, bytes, 1, bytes + 1, 1);
    recv = post_any(pair.recv, false);
    from = lc_now_ns();
    lc_net_tcp.close_send(pair.send);
    CHECK(wait_error(recv) == -EREMOTEIO);
    leave_wait(engine.timeout_ns, false);
    CHECK(lc_now_ns() - from < engine.timeout_ns / 2);
    lc_net_tcp.close_recv(pair.recv);
    lc_net_tcp.fini(ctx);
}

enum {
    COMMS = 64,
    WAYS = 4, /* each way of a communicator */
    USED = 2  /* of them */
};

/* As NCCL does between two ranks; the handles go over `fd`. */
static void connect_both(int fd, struct lc_net_comm *sends[WAYS], struct lc_net_comm *recvs[WAYS])
{
    unsigned char handles[WAYS][LC_NET_HANDLE_BYTES];
    struct lc_net_listen *listens[WAYS];
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    int left = 2 * WAYS;

    for (int i = 0; i < WAYS; i++)
        CHECK(lc_net_tcp.listen(ctx, 0, handles[i], &listens[i]) == 0);
    say(fd, handles, sizeof(handles));
    hear(fd, handles, sizeof(handles));
    while (left) {
        for (int i = 0; i < WAYS; i++) {
            if (!sends[i]) {
                CHECK(lc_net_tcp.connect(ctx, 0, handles[i], &sends[i]) == 0);
                left -= sends[i] != NULL;
            }
            if (!recvs[i]) {
                CHECK(lc_net_tcp.accept(listens[i], &recvs[i]) == 0);
                left -= recvs[i] != NULL;
            }
        }
        CHECK(!lc_deadline_passed(end));
        sched_yield();
    }
    for (int i = 0; i < WAYS; i++)
        lc_net_tcp.close_listen(listens[i]);
}

static void use_some(struct lc_net_comm *sends[WAYS], struct lc_net_comm *recvs[WAYS])
{
    unsigned char from[100] = { 0 };
    unsigned char to[sizeof(from)];

    for (int i = 0; i < USED; i++) {
        struct lc_net_request *send;
        struct lc_net_request *recv;
        size_t room = sizeof(to);
        void *at = to;
        int tag = 0;

        CHECK(lc_net_tcp.irecv(recvs[i], 1, &at, &room, &tag, NULL, &recv) == 0 && recv);
        CHECK(lc_net_tcp.isend(sends[i], from, sizeof(from), 0, NULL, &send) == 0 && send);
        pair_wait(send, recv, NULL, NULL);
    }
}

/* Each of two processes. */
static void be_one_of_two(int fd, int fds, int threads)
{
    static struct lc_net_comm *sends[COMMS][WAYS], *recvs[COMMS][WAYS];
    struct lc_deadline end = lc_deadline_in_ms(PATIENCE_MS);
    int64_t begun;
    char both = 1;

    begin();
    for (int i = 0; i < COMMS; i++) {
        connect_both(fd, sends[i], recvs[i]);
        use_some(sends[i], recvs[i]);
    }
    while (count_fds() > fds + 3 + COMMS * 2 * USED) {
        CHECK(!lc_deadline_passed(end));
        usleep(10000);
    }
    CHECK(count_entries("/proc/self/task") == threads + 1);
    say(fd, &both, 1);
    hear(fd, &both, 1);
    begun = lc_now_ns();
    for (int i = COMMS - 1; i >= 0; i--) {
        for (int k = 0; k < WAYS; k++) {
            lc_net_tcp.close_send(sends[i][k]);
            lc_net_tcp.close_recv(recvs[i][k]);
        }
    }
    lc_net_tcp.fini(ctx);
    CHECK(lc_now_ns() - begun < (int64_t)5 * 1000000000);
}

static void communicators_cost_what_is_used_of_them(void)
{
    int threads = count_entries("/proc/self/task");
    int fds = count_fds() + 2;
    int ends[2];
    int status;
    pid_t pid;

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    pid = fork();
    CHECK(pid >= 0);
    be_one_of_two(ends[pid == 0], fds, threads);
    if (pid == 0)
        exit(0);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    close(ends[0]);
    close(ends[1]);
}

static void limit_fds(rlim_t soft, rlim_t hard)
{
    struct rlimit limit = { soft, hard };

    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void few_descriptors_mean_fewer_sockets(void)
{
    struct pair pairs[4];
    int held[64];
    int n_held = 0;

    begin();
    /* Room for the soft limit to grow, and then for four connections with a few sockets each, not with all. */
    limit_fds(40, 60);
    while (count_fds() < 32)
        CHECK((held[n_held++] = dup(0)) >= 0);
    for (int i = 0; i < 4; i++)
        pairs[i] = pair_open(ctx, 0);
    for (int i = 0; i < 4; i++)
        pair_stream(&pairs[i], 10, 300000, 4, (unsigned)i);
    for (int i = 0; i < 4; i++)
        pair_close(&pairs[i]);
    while (n_held)
        close(held[--n_held]);
    lc_net_tcp.fini(ctx);
}

static void who_leaves(void)
{
    last_messages_come_to_a_slow_receiver(false);
    last_messages_come_to_a_slow_receiver(true);
    who_leaves_hears_from_a_receiver_that_waits_for_more();
    what_is_at_the_peers_machine_is_enough(FITS);
    what_is_at_the_peers_machine_is_enough(MUCH);
    what_is_at_the_peers_machine_is_enough(BROKEN);
}

static void who_is_unused(void)
{
    what_is_not_used_needs_no_socket();
    what_was_closed_meanwhile_is_an_error(true);
    what_was_closed_meanwhile_is_an_error(false);
    what_ends_meanwhile_comes_back();
    who_cannot_call_keeps_its_socket();
    what_is_lost_of_parking_brings_the_sender_back(false);
    what_is_lost_of_parking_brings_the_sender_back(true);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";

    /* What does not wait for a deadline must not need one: 600 seconds are more than the test has. */
    tcp_settings(strcmp(what, "limit") == 0 ? 6 : 3, 16384,
                 strcmp(what, "deadline") == 0 ? 2
                 : strcmp(what, "peers") == 0  ? 600
                                               : 60);
    lc_log_set_level(LC_LOG_ERROR);
    if (strcmp(what, "strangers") == 0) {
        begin();
        strangers_change_nothing(getenv("LCTEST_SOAK") ? 10000 : 700);
        lc_net_tcp.fini(ctx);
    } else if (strcmp(what, "peers") == 0) {
        a_killed_peer_is_an_error_that_names_it(true, false);
        a_killed_peer_is_an_error_that_names_it(false, false);
        a_killed_peer_is_an_error_that_names_it(true, true);
        a_killed_peer_is_an_error_that_names_it(false, true);
        what_had_come_from_a_killed_peer_is_read();
        begin();
        keep_what_is_said();
        who_breaks_while_it_is_given_up_has_its_time();
        a_close_without_a_way_is_heard();
        a_peer_that_is_there_is_waited_for();
        last_messages_outlive_a_broken_socket();
        lc_net_tcp.fini(ctx);
    } else if (strcmp(what, "leaving") == 0) {
        who_leaves();
    } else if (strcmp(what, "deadline") == 0) {
        begin();
        keep_what_is_said();
        both_sides_fail_when_the_way_is_gone();
        a_receiver_that_does_not_call_keeps_its_socket();
        lc_net_tcp.fini(ctx);
    } else if (strcmp(what, "fork") == 0) {
        a_child_harms_nobody();
        a_child_holds_no_dial();
        a_child_of_a_child_closes_nothing();
        keep_what_is_said();
        a_child_of_a_close_keeps_nobody_waiting();
    } else if (strcmp(what, "unused") == 0) {
        who_is_unused();
    } else if (strcmp(what, "many") == 0) {
        communicators_cost_what_is_used_of_them();
    } else if (strcmp(what, "limit") == 0) {
        nothing_is_left_open();
        many_connections_need_one_thread();
        few_descriptors_mean_fewer_sockets();
    } else {
        return 2;
    }
    return 0;
}
