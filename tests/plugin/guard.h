/* SPDX-License-Identifier: Apache-2.0
 *
 * This program defines functions of the C library that can wait, and exports them: what a library opened later calls by
 * these names comes here first. So it shows whether a call into the plugin can block, where it listens, and can lead its
 * connections through a relay or refuse it memory. */
#ifndef LC_TESTS_PLUGIN_GUARD_H
#define LC_TESTS_PLUGIN_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define GUARD_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define GUARD_SANITIZED 1
#endif
#ifndef GUARD_SANITIZED
#define GUARD_SANITIZED 0
#endif

/* Around every call into the plugin, on the calling thread; `what` is said when it does something that can block. */
void guard_enter(const char *what);
void guard_leave(void);

/* How many calls were guarded, and in how many of them the thread gave up its processor to wait (a lock included). */
struct guard_counts {
    unsigned long calls;
    unsigned long waits;
};
struct guard_counts guard_count(void);

/* Instead of aborting, count what blocks: for the test of the guard itself. */
void guard_only_count(bool on);
unsigned long guard_blocked(void);

/* Ports (in host order) that the process listens on now, `max` at most. Returns how many were written. */
size_t guard_ports(uint16_t *out, size_t max);

/* From now on connections to any port go to what `map` says; NULL: where they want to. */
void guard_redirect(uint16_t (*map)(uint16_t port));

/* The n-th allocation from now (1: the next) inside guarded calls of this thread fails, 0: none. Returns how many
 * allocations were counted since the last call. Always 0 where a sanitizer owns the allocator. */
unsigned long guard_fail_allocation(unsigned long n);

/* True if some descriptor of the process lacks FD_CLOEXEC, but for the first three and `except`. */
bool guard_fd_inherited(const int *except, size_t count);

#endif
