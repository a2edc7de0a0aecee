/* SPDX-License-Identifier: Apache-2.0 */
#include "common/log.h"

#include "common/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#define LINE 512 /* longer ones are cut */

enum lc_log_level lc_log_max = LC_LOG_WARN;

/* Changed only while the process is set up; read with relaxed loads, since a line that still goes to
 * the old place is no harm. The descriptor is never closed: a thread may be about to write to it. */
static int log_fd = STDERR_FILENO;

/* One write per line, so that lines of several threads and processes do not mix. */
static void sink_fd(enum lc_log_level level, const char *file, int line, const char *text)
{
    static const char names[] = "EWIDT";
    char whole[LINE + 128];
    int len = snprintf(whole, sizeof(whole), "loongcomm[%d] %c %s:%d %s\n", (int)getpid(),
                       names[level], file, line, text);

    if (len > 0 && (size_t)len < sizeof(whole))
        (void)lc_output_write(__atomic_load_n(&log_fd, __ATOMIC_RELAXED), whole, (size_t)len);
}

static lc_log_sink *current_sink = sink_fd;

void lc_log_set_level(enum lc_log_level level)
{
    __atomic_store_n(&lc_log_max, level, __ATOMIC_RELAXED);
}

void lc_log_set_sink(lc_log_sink *sink)
{
    __atomic_store_n(&current_sink, sink ? sink : sink_fd, __ATOMIC_RELAXED);
}

int lc_log_open_file(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);

    if (fd < 0)
        return -errno;
    __atomic_store_n(&log_fd, fd, __ATOMIC_RELAXED);
    lc_log_set_sink(NULL);
    return 0;
}

void lc_log_write(enum lc_log_level level, const char *file, int line, const char *fmt, ...)
{
    char text[LINE];
    int saved_errno = errno;
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    __atomic_load_n(&current_sink, __ATOMIC_RELAXED)(level, file, line, text);
    errno = saved_errno;
}
