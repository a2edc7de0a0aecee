/* SPDX-License-Identifier: Apache-2.0
 *
 * Whatever the control plane writes: a terminal may be stopped, a pipe full and a file on a server that hangs, which must
 * keep neither an abort from peers nor a program from forking or ending. So lines and reports wait, and a thread of
 * their own writes them, which lives while there are any. */
#include "interpose/control/control_internal.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void lc_writer_say(enum lc_log_level level, const char *file, int line, const char *format, ...)
{
    struct lc_line **at = &control.lines;
    struct lc_line *entry;
    uint32_t waiting = 0;
    va_list args;

    for (; *at; at = &(*at)->next)
        waiting++;
    if (waiting >= LC_LINES_MAX)
        return;
    entry = malloc(sizeof(*entry));
    if (!entry)
        return;
    *entry = (struct lc_line){ .level = level, .file = file, .line = line };
    va_start(args, format);
    (void)vsnprintf(entry->text, sizeof(entry->text), format, args);
    va_end(args);
    *at = entry;
}

static void write_lines(struct lc_line *line)
{
    while (line) {
        struct lc_line *next = line->next;

        lc_log_write(line->level, line->file, line->line, "%s", line->text);
        free(line);
        line = next;
    }
}

static void *write_all(void *unused)
{
    for (;;) {
        struct lc_line *lines;
        struct lc_hang *hangs;

        pthread_mutex_lock(&control.lock);
        lines = control.lines;
        hangs = control.hangs;
        control.lines = NULL;
        control.hangs = NULL;
        control.n_hangs = 0;
        control.writing = lines || hangs;
        pthread_mutex_unlock(&control.lock);
        if (!lines && !hangs)
            return NULL;
        write_lines(lines);
        lc_hang_write(hangs);
    }
}

bool lc_writer_busy(void)
{
    return control.lines || control.hangs || control.writing;
}

/* The program's signal handlers are not for this thread. */
void lc_writer_start(void)
{
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, old;

    if (control.writing || !lc_writer_busy())
        return;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    control.writing = pthread_create(&thread, &attr, write_all, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
}
