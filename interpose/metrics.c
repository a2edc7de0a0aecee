/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/metrics.h"

#include "interpose/call.h"
#include "interpose/loongcomm.h"
#include "interpose/process.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FLUSHES 8

/* Under lock, which is held for a few instructions and calls nobody. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lc_metric *metrics; /* LC_METRIC_LINKS; NULL until the first is added */
static size_t n_metrics;

/* Under flush_lock, which is held while they run: who takes one back knows that it runs no more. */
static pthread_mutex_t flush_lock = PTHREAD_MUTEX_INITIALIZER;
static void (*flushes[FLUSHES])(void);

/* Cut texts are compared as they were kept. */
static struct lc_metric *find(const char *source, const char *device, const char *peer)
{
    struct lc_metric like = { .n = 0 };

    if (!metrics)
        metrics = calloc(LC_METRIC_LINKS, sizeof(*metrics));
    if (!metrics)
        return NULL;
    (void)snprintf(like.source, sizeof(like.source), "%s", source);
    (void)snprintf(like.device, sizeof(like.device), "%s", device);
    (void)snprintf(like.peer, sizeof(like.peer), "%s", peer);
    for (size_t i = 0; i < n_metrics; i++) {
        struct lc_metric *m = &metrics[i];

        if (strcmp(m->source, like.source) == 0 && strcmp(m->device, like.device) == 0 &&
            strcmp(m->peer, like.peer) == 0)
            return m;
    }
    if (n_metrics == LC_METRIC_LINKS - 1)
        like = (struct lc_metric){ .source = "all",
                                   .device = "other devices",
                                   .peer = "other peers" };
    if (n_metrics == LC_METRIC_LINKS)
        return &metrics[LC_METRIC_LINKS - 1];
    metrics[n_metrics] = like;
    return &metrics[n_metrics++];
}

static void add(struct lc_metric *m, const char *name, uint64_t value)
{
    int i = 0;

    while (i < m->n && strncmp(m->counter[i].name, name, sizeof(m->counter[i].name) - 1) != 0)
        i++;
    if (i == LC_METRIC_COUNTERS)
        return;
    if (i == m->n) {
        (void)snprintf(m->counter[i].name, sizeof(m->counter[i].name), "%s", name);
        m->n++;
    }
    m->counter[i].value += value;
}

LC_EXPORT void loongcomm_metrics_add_v1(const char *source, const char *device, const char *peer,
                                        const char *name, uint64_t value)
{
    struct lc_metric *m;

    if (!source || !device || !peer || !name)
        return;
    pthread_mutex_lock(&lock);
    m = find(source, device, peer);
    if (m)
        add(m, name, value);
    pthread_mutex_unlock(&lock);
}

LC_EXPORT void loongcomm_metrics_flush_v1(void (*flush)(void), int wanted)
{
    bool there = false;

    if (wanted)
        lc_process_begin(); /* it is there that a report at the exit is asked for */
    pthread_mutex_lock(&flush_lock);
    for (int i = 0; i < FLUSHES; i++) {
        if (flushes[i] == flush && !wanted)
            flushes[i] = NULL;
        there |= flushes[i] == flush;
    }
    for (int i = 0; i < FLUSHES && wanted && !there; i++) {
        there = !flushes[i];
        flushes[i] = flushes[i] ? flushes[i] : flush;
    }
    pthread_mutex_unlock(&flush_lock);
}

static void flush_all(void)
{
    pthread_mutex_lock(&flush_lock);
    for (int i = 0; i < FLUSHES; i++) {
        if (flushes[i])
            flushes[i]();
    }
    pthread_mutex_unlock(&flush_lock);
}

struct lc_metric *lc_metrics_take(size_t *n)
{
    struct lc_metric *copy = NULL;

    flush_all();
    pthread_mutex_lock(&lock);
    *n = n_metrics;
    if (n_metrics)
        copy = malloc(n_metrics * sizeof(*copy));
    if (copy)
        memcpy(copy, metrics, n_metrics * sizeof(*copy));
    else
        *n = 0;
    pthread_mutex_unlock(&lock);
    return copy;
}

void lc_metrics_after_fork(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&flush_lock, NULL);
    n_metrics = 0;
}
