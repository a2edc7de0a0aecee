/* SPDX-License-Identifier: Apache-2.0
 *
 * A thread of each rank that looks whether the rank comes further. Once one does not, each rank says what it is doing and
 * which of its results have not arrived, and the test fails. */
#include "common/deadline.h"
#include "tests/gpu/mixed.h"

#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#define LOOK_US 100000
#define SAID    12 /* results that are named */

static const char *type_name(ncclDataType_t type)
{
    switch (type) {
    case ncclFloat16: return "fp16";
    case ncclBfloat16: return "bf16";
    case ncclFloat32: return "fp32";
    case ncclFloat64: return "fp64";
    default: return "int32";
    }
}

const char *mx_describe(const struct mx_rank *me, const struct mx_take *take, char *text)
{
    static const char *const kinds[] = { "all-reduce", "reduce-scatter", "all-gather", "broadcast",
                                         "all-to-all" };
    static const char *const steps[] = { "alone", "in a group", "one of several", "of a hub" };
    const char *how = steps[me->plan.step[take->step].kind];

    if (take->call >= 0) {
        const struct mx_call *c = &me->plan.call[take->call];

        (void)snprintf(
            text, MX_TEXT,
            "step %d round %d: %s %s of %zu %s, operation %d%s%s, communicator %d, stream %d",
            take->step, take->round, kinds[c->kind], how, c->count, type_name(c->type), c->op,
            c->in_place ? ", in place" : "", c->rough ? ", rough" : "", c->comm, take->stream);
    } else {
        const struct mx_message *m = &me->plan.message[take->message];

        (void)snprintf(
            text, MX_TEXT,
            "step %d round %d: message %s of %zu bytes from %d to %d, communicator %d, stream %d",
            take->step, take->round, how, m->bytes, m->src, m->dst, m->comm, take->stream);
    }
    return text;
}

void mx_now(struct mx_rank *me, const char *fmt, ...)
{
    va_list args;

    pthread_mutex_lock(&me->lock);
    va_start(args, fmt);
    (void)vsnprintf(me->what, sizeof(me->what), fmt, args);
    va_end(args);
    me->since = lc_now_ns();
    pthread_mutex_unlock(&me->lock);
}

/* Under the lock. */
static void say(const struct mx_rank *me)
{
    char text[MX_TEXT];
    int left = 0;

    fprintf(stderr, "rank %d: seed %llu: for %.1f s: %s\n", me->rank,
            (unsigned long long)me->plan.seed, (double)(lc_now_ns() - me->since) / 1e9, me->what);
    for (int i = 0; i < me->takes_n; i++) {
        if (cudaEventQuery(me->takes[i].event) != cudaErrorNotReady)
            continue;
        if (left++ < SAID)
            fprintf(stderr, "rank %d:     not there: %s\n", me->rank,
                    mx_describe(me, &me->takes[i], text));
    }
    fprintf(stderr, "rank %d:     %d of %d results that were asked for are not there\n", me->rank,
            left, me->takes_n);
}

static void *watch(void *arg)
{
    struct mx_rank *me = arg;
    bool over = false;

    while (!over) {
        usleep(LOOK_US);
        pthread_mutex_lock(&me->lock);
        over = me->over;
        if (!over && lc_now_ns() - me->since > me->limit_s * INT64_C(1000000000))
            atomic_store(&me->shared->hung, 1);
        if (!over && atomic_load(&me->shared->hung)) {
            say(me);
            fflush(NULL);
            sleep(1); /* the others say theirs */
            if (me->threads)
                abort();
            _exit(1);
        }
        pthread_mutex_unlock(&me->lock);
    }
    return NULL;
}

void mx_watch_begin(struct mx_rank *me, int limit_s)
{
    CHECK(pthread_mutex_init(&me->lock, NULL) == 0);
    me->limit_s = limit_s;
    mx_now(me, "begins");
    CHECK(pthread_create(&me->watchdog, NULL, watch, me) == 0);
}

void mx_watch_end(struct mx_rank *me)
{
    pthread_mutex_lock(&me->lock);
    me->over = true;
    pthread_mutex_unlock(&me->lock);
    pthread_join(me->watchdog, NULL);
    pthread_mutex_destroy(&me->lock);
}
