/* SPDX-License-Identifier: Apache-2.0
 *
 * What the process has once: settings, devices, threads, the list of connections. */
#include "common/config.h"
#include "common/deadline.h"
#include "common/log.h"
#include "plugin/net/settings.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define PLENTY    8      /* processors of a rank */
#define MANY      4      /* threads that somebody asks for where there are fewer */
#define SPIN_MOST 102400 /* microseconds */
/* Most have gone by then, and the threads end here. Nobody but the caller waits: no other connection is open. */
#define LEAVE_NS     ((int64_t)20 * 1000000)
#define TOMBSTONE_NS ((int64_t)30 * 1000000000)

struct engine engine = {
    .life = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP,
    .service_fd = -1,
    .wake_fd = -1,
    .parts = 1, /* until the settings are read */
};

/* A thread that finds it taken looks again for a moment: to sleep and to be woken takes a hundred times as long as the lock
 * is held. */
void lock_init(pthread_mutex_t *lock)
{
    pthread_mutexattr_t adaptive;

    pthread_mutexattr_init(&adaptive);
    (void)pthread_mutexattr_settype(&adaptive, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(lock, &adaptive);
    pthread_mutexattr_destroy(&adaptive);
}

/* ---- settings ---- */

/* As launchers say; 1: nobody has said. */
static int ranks_of_machine(void)
{
    static const char *const names[] = { "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
                                         "MPI_LOCALNRANKS" };
    int ranks = 1;

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        const char *text = lc_environment_get(names[i]);
        char *end = NULL;
        long n = text ? strtol(text, &end, 10) : 0;

        if (text && end != text && !*end && n > ranks && n <= 4096)
            ranks = (int)n;
    }
    return ranks;
}

int engine_share(int mine, int all, int ranks)
{
    if ((long)mine * ranks <= all)
        return mine;
    all /= ranks;
    return all < 1 ? 1 : all < mine ? all : mine;
}

/* What all ranks may use together: who starts them has not been bound with one of them. The machine's number says nothing, for
 * the job may have a part of it. */
static int processors_of_all(int mine)
{
    cpu_set_t set;
    int n = sched_getaffinity(getppid(), sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;

    return n > mine ? n : mine;
}

static int allowed_processors(void)
{
    cpu_set_t set;
    int mine;

    /* More processors than the set holds: plenty. */
    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 64;
    mine = CPU_COUNT(&set);
    return engine_share(mine, processors_of_all(mine), ranks_of_machine());
}

static int choose(size_t wanted, int automatic, int most)
{
    if (wanted == 0)
        return automatic;
    return wanted > (size_t)most ? most : (int)wanted;
}

static uint32_t choose_piece(size_t wanted, uint32_t automatic)
{
    if (wanted == 0)
        return automatic;
    return wanted < LC_TCP_PIECE_MIN   ? LC_TCP_PIECE_MIN
           : wanted > LC_TCP_PIECE_MAX ? LC_TCP_PIECE_MAX
                                       : (uint32_t)wanted;
}

static void read_settings(void)
{
    const struct lc_config *config = lc_net_settings();
    int processors = allowed_processors();
    int sockets = processors >= PLENTY ? 5 : processors > 1 ? 3 : 2;
    int threads = processors - 2; /* one is NCCL's thread's, one the program's */

    engine.sockets = choose(config->net_sockets, sockets, LC_TCP_LANES);
    engine.rails = choose(config->net_rails, 1, LC_TCP_RAILS);
    threads = threads < 1 ? 1 : threads > 6 ? 6 : threads;
    engine.threads_wanted = choose(config->net_threads, threads, POOL_MOST);
    /* NCCL's thread that copies bulk leaves the other connections waiting. But it asks all the time, and where processors are
     * few the one that it has is missing to those who copy. */
    engine.relieves = engine.threads_wanted > 1 &&
                      (processors >= PLENTY ||
                       (config->net_threads && engine.threads_wanted >= MANY));
    /* As many as can move at once: with one processor others would only be woken for what NCCL's thread could have done. */
    engine.parts = engine.threads_wanted < processors ? engine.threads_wanted + 1 : processors;
    engine.spin_ns = 1000 * (int64_t)(config->net_spin < SPIN_MOST ? config->net_spin : SPIN_MOST);
    /* All of many threads would look on where half of them find something; and NCCL's looks for itself. */
    engine.lookers = engine.relieves ? (engine.threads_wanted + 1) / 2 : engine.parts - 1;
    /* Each piece costs calls and a wake: where there are few to share a message it has no more than they are, as a rule. */
    engine.piece = choose_piece(config->net_piece, engine.relieves ? 256 << 10 : 512 << 10);
    engine.elide = config->net_elide;
    engine.keep = config->net_copy < LC_TCP_KEPT_MAX ? config->net_copy : LC_TCP_KEPT_MAX;
    engine.timeout_ns = (int64_t)(config->net_timeout ? config->net_timeout : 1) * 1000000000;
    (void)lc_tcp_devices_find(config->net_speed > 100000000 ? 100000000 : (int)config->net_speed,
                              &engine.devices, &engine.n_devices);
}

/* ---- forks: the child has copies of all descriptors and none of the threads ---- */

static void before_fork(void)
{
    pthread_mutex_lock(&engine.life);
    pthread_mutex_lock(&engine.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&engine.lock);
    pthread_mutex_unlock(&engine.life);
}

/* As long as a child holds a socket, the peer does not see the parent's end. Only close and stores: other threads may
 * have held any other lock at the fork. Where nothing ran, the child may begin by itself. */
static void leave_to_parent(void)
{
    atomic_store(&engine.dead, engine.running);
    for (struct conn *conn = engine.conns; conn; conn = conn->next) {
        for (int i = 0; i < conn->n_lanes; i++) {
            if (conn->lanes[i].fd >= 0)
                close(conn->lanes[i].fd);
        }
    }
    service_forget();
    for (int i = 0; i < engine.n_devices; i++) {
        if (engine.listeners && engine.listeners[i].fd >= 0)
            close(engine.listeners[i].fd);
    }
    if (engine.running) {
        pool_forget();
        close(engine.service_fd);
        engine_close_signal(&engine.wake_fd);
    }
}

/* What a child has closed its own children must not close again: the numbers may be of other files by then. */
static void after_fork_in_child(void)
{
    atomic_store(&engine.wakers, 0); /* threads of the parent's */
    if (!atomic_load(&engine.dead))
        leave_to_parent();
    engine.ended = false; /* the thread was the parent's */
    pthread_mutex_unlock(&engine.lock);
    pthread_mutex_unlock(&engine.life);
}

int engine_configure(void)
{
    int err = 0;

    pthread_mutex_lock(&engine.life);
    if (!engine.configured) {
        read_settings();
        engine.listeners = calloc((size_t)engine.n_devices + 1, sizeof(*engine.listeners));
        if (engine.listeners) {
            for (int i = 0; i < engine.n_devices; i++)
                engine.listeners[i].fd = -1;
            (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
            count_begin();
            engine.configured = true;
        } else {
            lc_tcp_devices_free(engine.devices, engine.n_devices);
            engine.devices = NULL;
            engine.n_devices = 0;
            err = -ENOMEM;
        }
    }
    pthread_mutex_unlock(&engine.life);
    return err;
}

/* ---- life ---- */

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void engine_close_signal(atomic_int *fd)
{
    int was = atomic_exchange(fd, -1);

    while (atomic_load(&engine.wakers) > 0)
        sched_yield();
    if (was >= 0)
        close(was);
}

static void close_polls(void)
{
    pool_close();
    close_fd(&engine.service_fd);
    engine_close_signal(&engine.wake_fd);
}

static int open_polls(void)
{
    struct epoll_event wake = { .events = EPOLLIN, .data.ptr = NULL };
    int err = 0;

    engine.service_fd = epoll_create1(EPOLL_CLOEXEC);
    engine.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine.service_fd < 0 || engine.wake_fd < 0 ||
        epoll_ctl(engine.service_fd, EPOLL_CTL_ADD, engine.wake_fd, &wake) != 0)
        err = -errno;
    pool_open();
    if (err)
        close_polls();
    return err;
}

void engine_signal(atomic_int *fd)
{
    const uint64_t one = 1;
    int to;

    atomic_fetch_add(&engine.wakers, 1);
    to = atomic_load(fd);
    if (to >= 0)
        (void)!write(to, &one, sizeof(one));
    atomic_fetch_sub(&engine.wakers, 1);
}

void engine_wake(void)
{
    if (!atomic_exchange(&engine.attention, true))
        engine_signal(&engine.wake_fd);
}

/* What wakes the service thread wakes the pool behind it, which sees it as long as nobody reads it. */
static void join_threads(void)
{
    atomic_store(&engine.stop, true);
    engine_signal(&engine.wake_fd);
    pthread_join(engine.service, NULL);
    engine_signal(&engine.wake_fd);
    pool_end();
}

/* It and those that it starts take no signals: a handler of the host program shall run where it always did. */
static int start_service(void)
{
    sigset_t all;
    sigset_t old;
    int err;

    atomic_store(&engine.stop, false);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    err = pthread_create(&engine.service, NULL, service_main, NULL);
    if (!err)
        (void)pthread_setname_np(engine.service, "lc-net");
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return -err;
}

/* With life held. */
static int start(void)
{
    int err = open_polls();

    if (err)
        goto failed;
    err = start_service();
    if (err)
        goto close_polls;
    pthread_mutex_lock(&engine.lock);
    engine.running = true;
    pthread_mutex_unlock(&engine.lock);
    return 0;

close_polls:
    close_polls();
failed:
    lc_error("the net plugin cannot start its thread: %s", strerror(-err));
    return err;
}

/* With life held, and no thread running but this one. In the list are those who began to connect and never came back; at the
 * end of the process also what NCCL still holds, whose memory stays, and who has not come to the end of leaving. */
static void wind_up(void)
{
    while (engine.conns) {
        if (engine.conns->claimed && !atomic_load(&engine.conns->leaving))
            conn_ref(engine.conns);
        conn_close(engine.conns);
    }
    pthread_mutex_lock(&engine.lock);
    service_close();
    memset(engine.tombstones, 0, sizeof(engine.tombstones));
    engine.running = false;
    close_polls();
    pthread_mutex_unlock(&engine.lock);
}

static void stop(void)
{
    join_threads();
    wind_up();
}

/* With life held: the thread of an engine that ended itself. */
static void join_ended(void)
{
    if (engine.ended)
        pthread_join(engine.service, NULL);
    engine.ended = false;
}

/* Whoever holds life may use it again, or waits for this thread: then there is another look. */
bool engine_end(void)
{
    bool ends;

    if (pthread_mutex_trylock(&engine.life) != 0)
        return false;
    ends = engine.users == 0 && !leave_any();
    if (ends || engine.users > 0)
        atomic_store(&engine.outlives, false);
    if (ends) {
        atomic_store(&engine.stop, true);
        engine_signal(&engine.wake_fd);
        pool_end();
        wind_up();
        engine.ended = true;
    }
    pthread_mutex_unlock(&engine.life);
    return ends;
}

int engine_hold(void)
{
    int err = 0;

    if (atomic_load(&engine.dead))
        return -ECHILD;
    pthread_mutex_lock(&engine.life);
    if (!engine.running) {
        join_ended();
        err = start();
    }
    if (!err)
        engine.users++;
    pthread_mutex_unlock(&engine.life);
    return err;
}

void engine_drop(void)
{
    bool outlives = false;

    if (atomic_load(&engine.dead))
        return;
    pthread_mutex_lock(&engine.life);
    if (--engine.users == 0) {
        leave_wait(LEAVE_NS, false);
        outlives = leave_any();
        if (!outlives)
            stop();
        atomic_store(&engine.outlives, outlives);
        if (outlives) /* with life held: the service thread may end, and close what this writes to */
            engine_wake();
    }
    pthread_mutex_unlock(&engine.life);
    /* Not with life held, for which a library that is unloaded waits. */
    if (outlives)
        leave_pin();
}

/* The library is unloaded, or the process ends by exit(). NCCL's interfaces before v11 never
 * say that they are done. */
__attribute__((destructor)) static void unload(void)
{
    if (atomic_load(&engine.dead))
        return;
    count_end();
    pthread_mutex_lock(&engine.life);
    if (engine.running) {
        leave_all();
        stop();
    }
    join_ended();
    engine.users = 0;
    lc_tcp_devices_free(engine.devices, engine.n_devices);
    free(engine.listeners);
    engine.devices = NULL;
    engine.n_devices = 0;
    engine.listeners = NULL;
    engine.configured = false;
    /* An exit handler that runs later may still close its connections. */
    atomic_store(&engine.dead, true);
    pthread_mutex_unlock(&engine.life);
}

/* ---- lists ---- */

/* With engine.lock held. */
void engine_enlist(struct conn *conn)
{
    conn->next = engine.conns;
    conn->link = &engine.conns;
    if (conn->next)
        conn->next->link = &conn->next;
    engine.conns = conn;
    conn_ref(conn);
}

void engine_delist(struct conn *conn)
{
    if (!conn->link)
        return;
    *conn->link = conn->next;
    if (conn->next)
        conn->next->link = conn->link;
    conn->link = NULL;
    conn_unref(conn);
}

void engine_home(int dev, struct lc_tcp_wire_address *out)
{
    union lc_tcp_address address = engine.devices[dev].address;

    memset(out, 0, sizeof(*out));
    pthread_mutex_lock(&engine.lock);
    if (engine.listeners[dev].fd >= 0) {
        if (address.sa.sa_family == AF_INET)
            address.v4.sin_port = engine.listeners[dev].port;
        else
            address.v6.sin6_port = engine.listeners[dev].port;
        lc_tcp_address_write(&address, out);
    }
    pthread_mutex_unlock(&engine.lock);
}

void engine_bury(struct conn *conn)
{
    struct tombstone *t = &engine.tombstones[engine.n_tombstones++ % TOMBSTONES];

    t->sent = conn->sends;
    memcpy(t->id, conn->id, sizeof(t->id));
    memcpy(t->token, conn->token, sizeof(t->token));
    conn_lock(conn);
    t->acked = conn->acked;
    conn_unlock(conn);
    t->until = lc_now_ns() + TOMBSTONE_NS;
}
