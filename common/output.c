/* SPDX-License-Identifier: Apache-2.0 */
#include "common/output.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static int write_all(int fd, const char *text, size_t size)
{
    while (size) {
        ssize_t done = write(fd, text, size);

        if (done < 0 && errno != EINTR)
            return -errno;
        if (done == 0)
            return -EIO;
        if (done > 0) {
            text += done;
            size -= (size_t)done;
        }
    }
    return 0;
}

/* Takes away what our write raised in this thread, but not one that was pending before. */
static void swallow(int signal, const sigset_t *before)
{
    const struct timespec now = { 0 };
    sigset_t only;

    if (sigismember(before, signal))
        return;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, signal);
    while (sigtimedwait(&only, NULL, &now) < 0 && errno == EINTR)
        ;
}

int lc_output_write(int fd, const char *text, size_t size)
{
    sigset_t before;
    sigset_t block;
    sigset_t old;
    bool blocked;
    int err;

    (void)sigemptyset(&before);
    (void)sigpending(&before);
    (void)sigemptyset(&block);
    (void)sigaddset(&block, SIGPIPE);
    (void)sigaddset(&block, SIGXFSZ);
    blocked = pthread_sigmask(SIG_BLOCK, &block, &old) == 0;
    err = write_all(fd, text, size);
    if (!blocked)
        return err;
    if (err == -EPIPE)
        swallow(SIGPIPE, &before);
    else if (err == -EFBIG)
        swallow(SIGXFSZ, &before);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    return err;
}

void lc_output_defuse(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        if (*c < ' ' || *c == 0x7f)
            *c = '?';
        else if (*c == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0)
            *c = c[1] = '?';
    }
}

const char *lc_output_bytes(uint64_t bytes, char out[LC_OUTPUT_BYTES])
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
    double value = (double)bytes;
    int unit = 0;

    for (; value >= 1024 && unit < 6; unit++)
        value /= 1024;
    (void)snprintf(out, LC_OUTPUT_BYTES, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return out;
}
