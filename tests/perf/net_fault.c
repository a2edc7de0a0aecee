/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into `loongcomm-bench net` to break what it must notice, on the side of the plain socket, whose only use of
 * sendmsg is to send messages. LCTEST_FAULT: `corrupt` flips a bit of a payload, `lose` claims to have sent it, `die` ends
 * the process, each at the 40th call of a process. */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

__attribute__((visibility("default"))) ssize_t sendmsg(int fd, const struct msghdr *msg, int flags);

static int calls; /* by the end's only thread */

ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    ssize_t (*real)(int, const struct msghdr *, int) = dlsym(RTLD_NEXT, "sendmsg");
    const char *fault = getenv("LCTEST_FAULT");
    struct iovec *last = &msg->msg_iov[msg->msg_iovlen - 1];
    ssize_t sent;

    if (!real)
        abort();
    if (!fault || ++calls != 40)
        return real(fd, msg, flags);
    if (strcmp(fault, "die") == 0)
        raise(SIGKILL);
    if (strcmp(fault, "lose") == 0) {
        size_t size = 0;

        for (size_t i = 0; i < msg->msg_iovlen; i++)
            size += msg->msg_iov[i].iov_len;
        return (ssize_t)size;
    }
    /* From now on, so that it is still there when bytes are looked at. */
    calls--;
    ((unsigned char *)last->iov_base)[last->iov_len / 2] ^= 1;
    sent = real(fd, msg, flags);
    ((unsigned char *)last->iov_base)[last->iov_len / 2] ^= 1;
    return sent;
}
