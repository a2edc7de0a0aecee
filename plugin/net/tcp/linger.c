/* SPDX-License-Identifier: Apache-2.0
 *
 * A sender that is closed says its goodbye behind its last messages, ends its direction, and reads on until the peer has
 * ended the other one. All with engine.lock held: these sockets never block, and what they move is short. */
#include "common/deadline.h"
#include "plugin/net/tcp/tcp_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOOK_NS   ((int64_t)20 * 1000000)
#define FINISH_NS ((int64_t)500 * 1000000)

struct parting {
    struct parting *next;
    int fd;
    size_t left; /* of the goodbye */
    bool ended;
    int64_t until;
    struct lc_tcp_frame bye;
};

void linger_add(int fd, const struct lc_tcp_frame *bye)
{
    struct parting *linger = calloc(1, sizeof(*linger));

    if (!linger) {
        close(fd);
        return;
    }
    linger->fd = fd;
    linger->until = lc_now_ns() + engine.timeout_ns;
    if (bye) {
        linger->bye = *bye;
        linger->left = sizeof(*bye);
    }
    pthread_mutex_lock(&engine.lock);
    linger->next = engine.lingers;
    engine.lingers = linger;
    pthread_mutex_unlock(&engine.lock);
    engine_wake();
}

static bool may_try_again(void)
{
    return errno == EAGAIN || errno == EINTR || errno == ENOBUFS;
}

/* False: it is over. */
static bool move(struct parting *linger)
{
    unsigned char ignored[4096];
    ssize_t n = 1;

    if (linger->left) {
        n = send(linger->fd, (char *)(&linger->bye + 1) - linger->left, linger->left,
                 MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && !may_try_again())
            return false;
        linger->left -= n > 0 ? (size_t)n : 0;
    }
    if (linger->left == 0 && !linger->ended) {
        (void)shutdown(linger->fd, SHUT_WR);
        linger->ended = true;
    }
    do {
        n = recv(linger->fd, ignored, sizeof(ignored), MSG_DONTWAIT);
    } while (n > 0);
    return n < 0 && may_try_again();
}

int64_t linger_step(int64_t now)
{
    struct parting **link = &engine.lingers;
    int64_t next = INT64_MAX;

    pthread_mutex_lock(&engine.lock);
    while (*link) {
        struct parting *linger = *link;

        if (move(linger) && now < linger->until) {
            next = now + LOOK_NS;
            link = &linger->next;
            continue;
        }
        *link = linger->next;
        close(linger->fd);
        free(linger);
    }
    pthread_mutex_unlock(&engine.lock);
    return next;
}

void linger_finish(void)
{
    int64_t end = lc_now_ns() + FINISH_NS;
    const struct timespec pause = { .tv_nsec = 1000000 };

    while (linger_step(lc_now_ns()) != INT64_MAX && lc_now_ns() < end)
        nanosleep(&pause, NULL);
    (void)linger_step(INT64_MAX);
}

void linger_forget(void)
{
    for (struct parting *linger = engine.lingers; linger; linger = linger->next)
        close(linger->fd);
    engine.lingers = NULL;
}
