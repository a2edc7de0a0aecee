/* SPDX-License-Identifier: Apache-2.0
 *
 * What libloongkernels-host.so has beside loongkernels.h: how its work gets onto a stream.
 */
#ifndef LOONGKERNELS_HOST_H
#define LOONGKERNELS_HOST_H

#include <stdbool.h>
#include <stddef.h>

/* enqueue: puts one piece of work behind all earlier work of the stream. run(arg) is called once per execution (per
 * replay, if the stream was captured), release(arg) once when it will not run again, also if enqueue fails. Returns
 * 0 or an error, which the lk_ call returns. NULL: work runs during the call.
 * buffer_use: told, inside run and before the accesses, of each range that the piece reads or writes. May be NULL. */
struct lk_host_ops {
    int (*enqueue)(void *stream, const char *name, void (*run)(void *arg),
                   void (*release)(void *arg), void *arg);
    void (*buffer_use)(const void *ptr, size_t bytes, bool write);
};

/* Copies *ops (NULL: back to none). To be called before the first call that does work; not thread safe. */
void lk_host_set_ops(const struct lk_host_ops *ops);

#endif
