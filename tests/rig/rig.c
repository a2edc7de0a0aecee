/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/cudart_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DELAY_MAX 10000000ULL /* 10 s */

struct range {
    const char *ptr;
    size_t bytes;
    bool write;
};

/* A piece that runs now; lives on the worker's stack frame of thread-local storage. */
struct running {
    const char *name;
    unsigned long long stream_id;
    struct range *ranges;
    size_t count, room;
    struct running *next;
};

/* Guards all_running and every ranges array. Taken below no other lock and above none. */
static pthread_mutex_t uses_lock = PTHREAD_MUTEX_INITIALIZER;
static struct running *all_running;
static _Thread_local struct running *my_running;

static _Thread_local int thread_rank = -1;

struct fault {
    const char *site;
    unsigned long long nth;
    long rank; /* -1: any */
    unsigned long long calls;
};

/* Written once under faults_once, then under faults_lock; the count is read without it, so that calls are fast where
 * there are none: whoever adds one sees it. */
static pthread_once_t faults_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t faults_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[16];
static _Atomic size_t fault_count;

void lcrig_fail(const char *fmt, ...)
{
    char line[1024];
    va_list args;
    int len = snprintf(line, sizeof(line), "rig: rank %d: ", lcrig_rank());

    va_start(args, fmt);
    len += vsnprintf(line + len, sizeof(line) - (size_t)len - 1, fmt, args);
    va_end(args);
    if (len > (int)sizeof(line) - 2)
        len = sizeof(line) - 2;
    line[len++] = '\n';
    if (write(STDERR_FILENO, line, (size_t)len) < 0)
        abort(); /* nowhere to say it */
    abort();
}

/* Uses no lcrig_fail that would ask for the rank again. */
static bool parse_number(const char *text, unsigned long long max, unsigned long long *out)
{
    unsigned long long value;
    char *end;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    value = strtoull(text, &end, 10);
    if (*end || errno || value > max)
        return false;
    *out = value;
    return true;
}

int lcrig_rank(void)
{
    const char *text = getenv("LCRIG_RANK");
    unsigned long long rank = 0;

    if (thread_rank >= 0)
        return thread_rank;
    if (!text || !*text)
        text = getenv("RANK");
    if (text && *text)
        parse_number(text, 1 << 20, &rank);
    return (int)rank;
}

int rt_thread_rank(void)
{
    return thread_rank;
}

void lcrig_set_thread_rank(int rank)
{
    thread_rank = rank;
}

unsigned long long lcrig_env(const char *name, unsigned long long dflt, unsigned long long max)
{
    const char *text = getenv(name);
    unsigned long long value = dflt;

    if (!text || !*text)
        return dflt;
    if (!parse_number(text, max, &value))
        lcrig_fail("%s: %s is no number of 0 to %llu", name, text, max);
    return value;
}

/* SITE:NTH[:RANK] */
static void parse_fault(char *spec)
{
    struct fault *fault = &faults[fault_count];
    unsigned long long rank = 0;
    char *save = NULL;
    char *site = strtok_r(spec, ":", &save);
    char *nth = strtok_r(NULL, ":", &save);
    char *who = strtok_r(NULL, ":", &save);

    if (fault_count == sizeof(faults) / sizeof(faults[0]))
        lcrig_fail("LCRIG_FAULT: more than %zu faults", sizeof(faults) / sizeof(faults[0]));
    if (!site || !nth || strtok_r(NULL, ":", &save) ||
        (who && !parse_number(who, 1 << 20, &rank)) ||
        !parse_number(nth, 1ULL << 40, &fault->nth) || !fault->nth)
        lcrig_fail("LCRIG_FAULT: not SITE:NTH[:RANK]: %s", site ? site : "empty");
    fault->site = site;
    fault->rank = who ? (long)rank : -1;
    fault_count++;
}

static void parse_faults(void)
{
    const char *text = getenv("LCRIG_FAULT");
    char *save = NULL;
    char *copy;

    if (!text || !*text)
        return;
    copy = strdup(text); /* kept: the sites point into it */
    if (!copy)
        lcrig_fail("out of memory");
    for (char *spec = strtok_r(copy, ",", &save); spec; spec = strtok_r(NULL, ",", &save))
        parse_fault(spec);
}

bool lcrig_fault(const char *site)
{
    bool hit = false;

    pthread_once(&faults_once, parse_faults);
    if (!fault_count)
        return false;
    pthread_mutex_lock(&faults_lock);
    for (size_t i = 0; i < fault_count; i++) {
        struct fault *fault = &faults[i];

        if (strcmp(fault->site, site) != 0 || (fault->rank >= 0 && fault->rank != lcrig_rank()))
            continue;
        if (++fault->calls == fault->nth)
            hit = true;
    }
    pthread_mutex_unlock(&faults_lock);
    return hit;
}

void lcrig_fail_next(const char *site)
{
    size_t i = 0;

    pthread_once(&faults_once, parse_faults);
    pthread_mutex_lock(&faults_lock);
    while (i < fault_count && faults[i].calls < faults[i].nth)
        i++; /* one that is over */
    if (i == sizeof(faults) / sizeof(faults[0]))
        lcrig_fail("too many faults");
    faults[i] = (struct fault){ .site = site, .nth = 1, .rank = lcrig_rank() };
    if (i == fault_count)
        fault_count++;
    pthread_mutex_unlock(&faults_lock);
}

static uint64_t mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
}

static pthread_once_t delay_once = PTHREAD_ONCE_INIT;
static uint64_t delay_us, delay_seed; /* written under delay_once only */

static void read_delay(void)
{
    delay_us = lcrig_env("LCRIG_DELAY_US", 0, DELAY_MAX);
    delay_seed = lcrig_env("LCRIG_SEED", 0, UINT64_MAX);
}

void rt_delay(unsigned long long *state, int device, unsigned long long number)
{
    struct timespec pause;
    uint64_t us;

    pthread_once(&delay_once, read_delay);
    if (!delay_us)
        return;
    if (!*state)
        *state = mix(delay_seed ^
                     mix((uint64_t)lcrig_rank() << 40 | (uint64_t)device << 32 | number));
    *state = mix(*state);
    us = *state % (delay_us + 1);
    pause = (struct timespec){ (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };
    while (nanosleep(&pause, &pause) && errno == EINTR)
        ;
}

void rt_use_begin(const char *name, unsigned long long stream_id)
{
    struct running *run = rt_alloc(sizeof(*run));

    run->name = name ? name : "unnamed";
    run->stream_id = stream_id;
    my_running = run;
    pthread_mutex_lock(&uses_lock);
    run->next = all_running;
    all_running = run;
    pthread_mutex_unlock(&uses_lock);
}

void rt_use_end(void)
{
    struct running *run = my_running;

    pthread_mutex_lock(&uses_lock);
    for (struct running **at = &all_running; *at; at = &(*at)->next) {
        if (*at == run) {
            *at = run->next;
            break;
        }
    }
    pthread_mutex_unlock(&uses_lock);
    my_running = NULL;
    free(run->ranges);
    free(run);
}

static bool overlaps(const struct range *a, const char *ptr, size_t bytes)
{
    return a->ptr < ptr + bytes && ptr < a->ptr + a->bytes;
}

static void check_against(const struct running *other, const struct range *mine)
{
    for (size_t i = 0; i < other->count; i++) {
        const struct range *theirs = &other->ranges[i];

        if ((mine->write || theirs->write) && overlaps(theirs, mine->ptr, mine->bytes))
            lcrig_fail("%s on stream %llu %s %p+%zu while %s on stream %llu %s %p+%zu",
                       my_running->name, my_running->stream_id, mine->write ? "writes" : "reads",
                       (const void *)mine->ptr, mine->bytes, other->name, other->stream_id,
                       theirs->write ? "writes" : "reads", (const void *)theirs->ptr,
                       theirs->bytes);
    }
}

void lcrig_buffer_use(const void *ptr, size_t bytes, bool write)
{
    struct running *run = my_running;
    struct range range = { ptr, bytes, write };

    if (!run)
        lcrig_fail("lcrig_buffer_use outside a piece of stream work");
    if (!bytes)
        return;
    pthread_mutex_lock(&uses_lock);
    for (const struct running *other = all_running; other; other = other->next) {
        if (other != run)
            check_against(other, &range);
    }
    run->ranges = rt_grow(run->ranges, run->count, &run->room, sizeof(range));
    run->ranges[run->count++] = range;
    pthread_mutex_unlock(&uses_lock);
}

const char *rt_use_find(const void *ptr, size_t bytes)
{
    const char *name = NULL;

    pthread_mutex_lock(&uses_lock);
    for (const struct running *run = all_running; run && !name; run = run->next) {
        for (size_t i = 0; i < run->count && !name; i++) {
            if (overlaps(&run->ranges[i], ptr, bytes))
                name = run->name;
        }
    }
    pthread_mutex_unlock(&uses_lock);
    return name;
}
