/* SPDX-License-Identifier: Apache-2.0
 *
 * libcut.so: preloaded into a job over the network plugin, breaks its TCP connections at random, one in LCCUT_US (50000)
 * microseconds in the mean and in each process. What the plugin's service thread has accepted is cut: by a reset, which
 * loses what is on its way, or by an end. The plugin knows nothing of it. Each process writes how many it has cut into
 * LCCUT_FOLDER/cuts.PID. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FDS 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool ours[FDS]; /* under lock: a number is not cut after it means something else */
static bool running;   /* under lock */
static unsigned cuts;  /* of the cutting thread */

int accept4(int fd, struct sockaddr *addr, socklen_t *size, int flags);
int close(int fd);

static void write_count(void)
{
    const char *folder = getenv("LCCUT_FOLDER");
    char path[512];
    char text[32];
    int fd;

    (void)snprintf(path, sizeof(path), "%s/cuts.%d", folder ? folder : ".", (int)getpid());
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    (void)!pwrite(fd, text, (size_t)snprintf(text, sizeof(text), "%u\n", cuts), 0);
    (void)close(fd);
}

static void cut(int fd, bool reset)
{
    struct sockaddr none = { .sa_family = AF_UNSPEC };

    if (reset)
        (void)connect(fd, &none, sizeof(none)); /* of a TCP socket: a reset */
    else
        (void)shutdown(fd, SHUT_RDWR);
}

static void cut_one(uint32_t dice)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < FDS; i++) {
        unsigned fd = (dice / 2 + i) % FDS;

        if (!ours[fd])
            continue;
        cut((int)fd, dice % 2);
        ours[fd] = false;
        cuts++;
        break;
    }
    pthread_mutex_unlock(&lock);
}

static void *cutter(void *arg)
{
    const char *text = getenv("LCCUT_US");
    uint64_t mean = text ? strtoull(text, NULL, 10) : 50000;
    uint64_t state = (uint64_t)getpid();

    for (;;) {
        struct timespec pause;
        uint64_t us;

        state = state * 6364136223846793005u + 1442695040888963407u;
        us = (state >> 33) % (2 * mean + 1);
        pause = (struct timespec){ (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };
        (void)nanosleep(&pause, NULL);
        cut_one((uint32_t)(state >> 29));
        write_count();
    }
    return NULL;
}

/* The child has none of the plugin's connections. */
static void in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    memset(ours, 0, sizeof(ours));
    running = false;
}

/* With lock held. */
static void note(int fd)
{
    pthread_t thread;

    ours[fd] = true;
    if (running)
        return;
    running = pthread_create(&thread, NULL, cutter, NULL) == 0;
    if (running) {
        (void)pthread_detach(thread);
        (void)pthread_atfork(NULL, NULL, in_child);
    }
}

int accept4(int listener, struct sockaddr *addr, socklen_t *size, int flags)
{
    char name[16] = "";
    int fd = (int)syscall(SYS_accept4, listener, addr, size, flags);

    if (fd < 0 || fd >= FDS || pthread_getname_np(pthread_self(), name, sizeof(name)) != 0 ||
        strcmp(name, "lc-net") != 0)
        return fd;
    pthread_mutex_lock(&lock);
    note(fd);
    pthread_mutex_unlock(&lock);
    return fd;
}

int close(int fd)
{
    int result;

    if (fd < 0 || fd >= FDS)
        return (int)syscall(SYS_close, fd);
    pthread_mutex_lock(&lock);
    ours[fd] = false;
    result = (int)syscall(SYS_close, fd);
    pthread_mutex_unlock(&lock);
    return result;
}
