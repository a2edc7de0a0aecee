/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/plugin/rows.h"

#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static size_t size_traffic(size_t index)
{
    return 100000 + index % 7;
}

static void one_message(struct pair *pair)
{
    char out[] = "a message", in[32] = { 0 };
    void *recv = post_recv(pair->recv, in, sizeof(in), 1);
    void *send = post_send(pair->send, out, sizeof(out), 1);

    wait_both(recv, send, (int)sizeof(out));
    CHECK(strcmp(in, out) == 0);
}

static void use_once(void)
{
    struct pair pair;

    start();
    pair_open(&pair, 0);
    one_message(&pair);
    pair_close(&pair);
    plugin_unload();
}

/* Of the library, which stays, once, where it was unloaded while its last message was under way. */
#define LIBRARY_MAPPINGS 8

/* Everything goes with the library, whether or not the version has a finalize. */
static void load_often(size_t count)
{
    struct holdings before, after;

    for (size_t i = 0; i < 3; i++)
        use_once();
    before = holdings_now();
    for (size_t i = 0; i < count; i++)
        use_once();
    after = holdings_since(&before);
    CHECK(after.descriptors <= before.descriptors);
    CHECK(after.threads <= before.threads);
    CHECK(GUARD_SANITIZED || after.mappings <= before.mappings + 2 + LIBRARY_MAPPINGS);
}

void library_leaves_nothing_behind(void)
{
    char resolved[PATH_MAX];

    CHECK(realpath(plugin_path, resolved));
    load_often(times(5, 50));
    CHECK(!dlopen(resolved, RTLD_NOLOAD | RTLD_NOW)); /* gone */
    CHECK(GUARD_SANITIZED ||
          holdings_since(&(struct holdings){ INT_MAX, 3, INT_MAX - 2 }).threads ==
              3); /* ours, "." and ".." */
}

void load_and_unload(void)
{
    load_often(times(200, 2000));
}

void wrong_settings_are_said_once(void)
{
    CHECK(setenv("LOONGCOMM_NET_TIMEOUT", "soon", 1) == 0);
    CHECK(setenv("LOONGCOMM_NET_NO_SUCH", "1", 1) == 0);
    plugin_log_clear();
    start();
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "LOONGCOMM_NET_TIMEOUT") == 1);
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "LOONGCOMM_NET_NO_SUCH") == 1);
    plugin_unload();
}

static struct pair exit_pair;

static void close_at_exit(void)
{
    if (exit_pair.send)
        (void)net.closeSend(exit_pair.send);
    exit_pair.send = NULL;
}

static void close_other_at_exit(void)
{
    if (exit_pair.recv)
        (void)net.closeRecv(exit_pair.recv);
    exit_pair.recv = NULL;
}

static void *test_until_the_end(void *arg)
{
    bool done;

    for (;;)
        (void)test_once(arg, &done, NULL);
    return NULL;
}

/* 0: handlers before and after the library's; 1: none, everything left open; 2: another thread is in the plugin. */
static void exiting(int kind)
{
    static char in[64];
    pthread_t thread;

    if (kind == 0)
        CHECK(atexit(close_at_exit) == 0);
    start();
    pair_open(&exit_pair, 0);
    one_message(&exit_pair);
    if (kind == 0)
        CHECK(atexit(close_other_at_exit) == 0);
    if (kind == 2) {
        void *request = post_recv(exit_pair.recv, in, sizeof(in), 1);

        CHECK(pthread_create(&thread, NULL, test_until_the_end, request) == 0);
    }
    exit(0);
}

static int status_of(void (*body)(int), int arg)
{
    long begun = now_ms();
    int status;
    pid_t pid;

    fflush(NULL);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        body(arg);
        _exit(99);
    }
    while (waitpid(pid, &status, WNOHANG) == 0) {
        still_patient(begun, "the exit of a process");
        pause_ms(2);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void close_from_exit_handlers(void)
{
    for (int kind = 0; kind < 3; kind++)
        CHECK(status_of(exiting, kind) == 0);
}

/* What NCCL tries for a name of NCCL_NET_PLUGIN: the name, then libnccl-net-NAME.so for what is neither path nor file. */
static void *open_by_name(const char *name)
{
    void *found = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    size_t len = strlen(name);
    char file[PATH_MAX];

    if (found || strchr(name, '/') ||
        (strncmp(name, "lib", 3) == 0 && len > 3 && strcmp(name + len - 3, ".so") == 0))
        return found;
    (void)snprintf(file, sizeof(file), "libnccl-net-%.100s.so", name);
    return dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

/* In a process whose loader knows the folder: LD_LIBRARY_PATH is read at its start, hence the exec. */
static void by_names(int unused)
{
    static const char *const names[] = { "loongcomm", "libnccl-net-loongcomm.so",
                                         "./libnccl-net-loongcomm.so", NULL };
    char resolved[PATH_MAX];

    CHECK(realpath(plugin_path, resolved));
    CHECK(chdir(dirname(strdup(resolved))) == 0);
    CHECK(realpath("libnccl-net-loongcomm.so", resolved));
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        void *found = open_by_name(names[i] ? names[i] : resolved);

        if (!found)
            fprintf(stderr, "%s: %s\n", names[i] ? names[i] : resolved, dlerror());
        CHECK(found && dlsym(found, "ncclNetPlugin_v12"));
        CHECK(dlclose(found) == 0);
    }
    _exit(0);
}

void every_name_finds_the_library(void)
{
    char resolved[PATH_MAX], self[PATH_MAX];

    if (getenv("LCTEST_BY_NAMES"))
        by_names(0);
    CHECK(realpath(plugin_path, resolved) && realpath("/proc/self/exe", self));
    CHECK(setenv("LCTEST_BY_NAMES", "1", 1) == 0);
    CHECK(setenv("LD_LIBRARY_PATH", dirname(strdup(resolved)), 1) == 0);
    fflush(NULL);
    (void)execl(self, self, "--library", resolved, "--only", "every_name_finds_the_library",
                "--quiet", (char *)NULL);
    CHECK(false);
}

static void *keep_sending(void *arg)
{
    struct flow *flow = arg;

    flow_run(flow);
    return NULL;
}

void forked_children_do_no_harm(void)
{
    struct flow flow;
    struct pair pair;
    pthread_t thread;

    start();
    pair_open(&pair, 0);
    CHECK(!guard_fd_inherited(NULL, 0));
    flow = (struct flow){ .pair = &pair,
                          .count = times(1500, 50000),
                          .window = 8,
                          .largest = 100006,
                          .size = size_traffic };
    CHECK(pthread_create(&thread, NULL, keep_sending, &flow) == 0);
    for (int i = 0; i < 12; i++) {
        long begun = now_ms();
        int status;
        pid_t pid = fork();

        CHECK(pid >= 0);
        if (pid == 0) {
            if (i % 3 == 0)
                exit(0);
            if (i % 3 == 1)
                (void)execl("/bin/true", "true", (char *)NULL);
            _exit(0);
        }
        while (waitpid(pid, &status, WNOHANG) == 0) {
            still_patient(begun, "the end of a forked child");
            pause_ms(1);
        }
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    one_message(&pair);
    pair_close(&pair);
    plugin_unload();
}

void descriptors_return_to_where_they_were(void)
{
    struct holdings before = { 0 }, after;
    struct pair pair;

    start();
    for (size_t i = 0; i < times(100, 1000); i++) {
        if (i == 10)
            before = holdings_now();
        pair_open(&pair, 0);
        one_message(&pair);
        pair_close(&pair);
    }
    after = holdings_since(&before);
    CHECK(after.descriptors <= before.descriptors);
    CHECK(after.threads <= before.threads);
    plugin_unload();
}

void no_memory_to_lock_is_no_obstacle(void)
{
    static const rlim_t limits[] = { 65536, 0 };
    struct pair pair;

    for (size_t i = 0; i < 2; i++) {
        struct rlimit limit = { limits[i], limits[i] };
        struct flow flow = { .pair = &pair,
                             .count = 30,
                             .window = 8,
                             .largest = LARGEST_MIXED,
                             .size = size_mixed };

        CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
        start();
        pair_open(&pair, 0);
        flow_run(&flow);
        pair_close(&pair);
        CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "") <= 1);
        plugin_unload();
    }
}

void tables_of_addresses_are_the_verbs_transports(void)
{
    skip("this transport reads no such tables; the verbs transport's own tests do");
}

void signals_stay_the_programs(void)
{
    struct sigaction before[65], after;
    sigset_t mask, now;
    struct pair pair;

    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0);
    for (int i = 1; i < 65; i++)
        (void)sigaction(i, NULL, &before[i]);
    start();
    pair_open(&pair, 0);
    one_message(&pair);
    pair_close(&pair);
    for (int i = 1; i < 65; i++) {
        if (i != 32 && i != 33 && sigaction(i, NULL, &after) == 0)
            CHECK(after.sa_handler == before[i].sa_handler && after.sa_flags == before[i].sa_flags);
    }
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &now) == 0);
    CHECK(memcmp(&mask, &now, sizeof(mask)) == 0);
    plugin_unload();
}

static void is_pci_folder(const char *path)
{
    char link[PATH_MAX], target[PATH_MAX];
    ssize_t len;

    (void)snprintf(link, sizeof(link), "%s/subsystem", path);
    len = readlink(link, target, sizeof(target) - 1);
    CHECK(len > 0);
    target[len] = 0;
    CHECK(strcmp(basename(target), "pci") == 0);
}

void properties_are_as_nccl_needs_them(void)
{
    struct lc_nccl_props_v12 props, again;
    char *names[64];
    int count = plugin_load();

    CHECK(strcmp(net.name, "loongcomm") == 0); /* "Using network loongcomm" */
    CHECK(count >= 1);
    for (int i = 0; i < count && i < 64; i++) {
        memset(&props, 0xa5, sizeof(props));
        OK(net.getProperties(i, &props));
        CHECK(props.name && props.name[0]);
        names[i] = props.name;
        for (int k = 0; k < i; k++)
            CHECK(strcmp(names[k], props.name) != 0);
        if (props.pciPath)
            is_pci_folder(props.pciPath);
        CHECK(props.speed > 0 && props.latency >= 0 && props.maxComms > 0);
        CHECK(props.maxRecvs >= 1 && props.maxRecvs <= 8);
        CHECK(props.ptrSupport & LC_NCCL_PTR_HOST);
        CHECK(props.vProps.ndevs == 1 && props.vProps.devs[0] == i);
        CHECK(props.maxP2pBytes > 0 && props.maxP2pBytes <= LC_NCCL_MAX_BYTES);
        CHECK(props.maxMultiRequestSize == 1);
        CHECK(plugin_version == 6 || props.netDeviceType == LC_NCCL_NET_DEVICE_HOST);
        CHECK(!props.regIsGlobal || plugin_version >= 8);
        if (props.ptrSupport == LC_NCCL_PTR_HOST)
            CHECK(!props.forceFlush);
        /* The same texts at the same places, for as long as the library is there. */
        OK(net.getProperties(i, &again));
        CHECK(again.name == props.name && again.pciPath == props.pciPath);
        CHECK(again.guid == props.guid);
    }
    CHECK(CALL(net.getProperties(-1, &props)) != LC_NCCL_SUCCESS);
    CHECK(CALL(net.getProperties(count, &props)) != LC_NCCL_SUCCESS);
    CHECK(!net.makeVDevice && !net.getDeviceMr && !net.irecvConsumed);
    CHECK(plugin_log_count(LC_NCCL_LOG_INFO, "") >= 1); /* which devices, for NCCL_DEBUG=INFO */
    CHECK(plugin_log_count(LC_NCCL_LOG_WARN, "") == 0);
    plugin_unload();
}

void handle_memory_need_not_be_zero(void)
{
    struct pair pair = { 0 };
    long begun = now_ms();

    start();
    memset(pair.handle, 0xa5, sizeof(pair.handle));
    OK(net.listen(plugin_context, 0, pair.handle, &pair.listener));
    while (!pair_step(&pair, 0)) {
        still_patient(begun, "a handle in memory that was not zero");
        sched_yield();
    }
    one_message(&pair);
    pair_close(&pair);
    plugin_unload();
}

void one_init_for_each_communicator(void)
{
    void *contexts[50];
    struct pair pairs[50];

    start();
    for (uint64_t i = 0; i < 50; i++) {
        void *kept = plugin_context;

        contexts[i] = plugin_init_again(100 + i);
        plugin_context = contexts[i];
        pair_open(&pairs[i], 0);
        one_message(&pairs[i]);
        plugin_context = kept;
    }
    for (size_t i = 0; i < 50; i++) {
        one_message(&pairs[49 - i]);
        pair_close(&pairs[49 - i]);
        OK(net.finalize(contexts[i])); /* not in order */
    }
    /* As after ncclCommSplit with shared resources: the first context still serves. */
    pair_open(&pairs[0], 0);
    one_message(&pairs[0]);
    pair_close(&pairs[0]);
    plugin_unload();
}

void finalize_without_a_context(void)
{
    start();
    OK(net.finalize(NULL));
    plugin_unload();
    CHECK(setenv("NCCL_SOCKET_IFNAME", "nosuch0", 1) == 0);
    CHECK(plugin_load() == 0); /* never a failing init: 0 devices; NCCL then calls finalize */
    OK(net.finalize(NULL));
    plugin_unload();
}

struct community {
    struct pair pairs[4];
    size_t index;
};

static void *live_and_end(void *arg)
{
    struct community *comm = arg;

    for (size_t round = 0; round < times(GUARD_SANITIZED ? 1 : 2, 30); round++) {
        struct flow flows[4];
        size_t busy = 4, before = 0;
        long last = now_ms();

        for (size_t i = 0; i < 4; i++) {
            pair_open(&comm->pairs[i], 0);
            flows[i] = (struct flow){ .pair = &comm->pairs[i],
                                      .count = 30,
                                      .window = 8,
                                      .largest = LARGEST_MIXED,
                                      .size = size_mixed };
            flow_begin(&flows[i]);
        }
        while (busy) {
            size_t moved = 0;

            busy = 0;
            for (size_t i = 0; i < 4; i++) {
                busy += flow_step(&flows[i]);
                moved += flows[i].sent + flows[i].received;
            }
            if (moved != before)
                last = now_ms();
            before = moved;
            still_patient(last, "several communicators");
            sched_yield();
        }
        for (size_t i = 0; i < 4; i++) {
            flow_end(&flows[i]);
            pair_close(&comm->pairs[i]);
        }
    }
    return NULL;
}

void many_communicators(void)
{
    static struct community communities[4];
    pthread_t threads[4];

    start();
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, live_and_end, &communities[i]) == 0);
    for (size_t i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    plugin_unload();
}

static void *wait_for_lock(void *arg)
{
    pthread_mutex_t *mutex = arg;

    CHECK(pthread_mutex_lock(mutex) == 0);
    CHECK(pthread_mutex_unlock(mutex) == 0);
    return NULL;
}

/* Calls that can wait are seen inside the plugin's calls, and nowhere else. */
void the_guard_sees_what_blocks(void)
{
    struct pollfd none = { .fd = -1 };
    unsigned long before = guard_blocked();
    struct guard_counts counts;
    int ends[2];
    pthread_t thread;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    char x;

    CHECK(pipe(ends) == 0);
    (void)poll(&none, 1, 1);
    CHECK(write(ends[1], "abc", 3) == 3 && read(ends[0], &x, 1) == 1);
    CHECK(guard_blocked() == before);
    guard_only_count(true);
    guard_enter("a test");
    (void)poll(&none, 1, 0);
    CHECK(guard_blocked() == before);
    (void)poll(&none, 1, 1);
    CHECK(guard_blocked() == before + 1);
    CHECK(read(ends[0], &x, 1) == 1);
    CHECK(guard_blocked() == before + 2);
    (void)usleep(1);
    CHECK(guard_blocked() == before + 3);
    guard_leave();
    guard_only_count(false);
    CHECK(pthread_create(&thread, NULL, wait_for_lock, &mutex) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    close(ends[0]);
    close(ends[1]);
    start();
    {
        struct pair pair;
        struct flow flow = { .pair = &pair,
                             .count = 300,
                             .window = 8,
                             .largest = LARGEST_MIXED,
                             .size = size_mixed };

        pair_open(&pair, 0);
        flow_run(&flow);
        pair_close(&pair);
    }
    counts = guard_count();
    fprintf(stderr, "in %lu of %lu calls the thread gave up its processor\n", counts.waits,
            counts.calls);
    plugin_unload();
}
