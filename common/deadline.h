/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_COMMON_DEADLINE_H
#define LC_COMMON_DEADLINE_H

#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

/* A point on the monotonic clock, in nanoseconds. Every host wait of the project ends at one. */
struct lc_deadline {
    int64_t at_ns;
};

static inline int64_t lc_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static inline struct lc_deadline lc_deadline_in_ms(int64_t ms)
{
    return (struct lc_deadline){ lc_now_ns() + ms * 1000000 };
}

static inline bool lc_deadline_passed(struct lc_deadline deadline)
{
    return lc_now_ns() >= deadline.at_ns;
}

/* Milliseconds left, rounded up, never negative: fits poll(). */
static inline int lc_deadline_left_ms(struct lc_deadline deadline)
{
    int64_t left = deadline.at_ns - lc_now_ns();

    if (left <= 0)
        return 0;
    left = (left + 999999) / 1000000;
    return left > INT_MAX ? INT_MAX : (int)left;
}

/* A condition whose timed waits end at points of this clock. */
static inline void lc_deadline_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t monotonic;

    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(cond, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
}

#endif
