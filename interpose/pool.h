/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of devices and pinned memory that belongs to communicators. CUDA takes such memory back only when everything on
 * the device has ended, and that may be a call of another communicator whose peer comes only behind this thread's next one:
 * so what a communicator has left goes to later ones, and back to CUDA when there are none. */
#ifndef LC_INTERPOSE_POOL_H
#define LC_INTERPOSE_POOL_H

#include "interpose/backend.h"

enum lc_memory {
    LC_MEMORY_DEVICE,
    LC_MEMORY_PINNED, /* of the host: portable and mapped */
};

/* At least `bytes` of the current device `device`, with any contents: what has been given back, or new. Any thread, as all
 * below, never under capture. 0 or a cudaError_t. */
int lc_pool_take(const struct lc_backend *backend, enum lc_memory kind, int device, size_t bytes,
                 void **out);

/* No work that uses it is in flight. Never waits. NULL is allowed. */
void lc_pool_give(void *memory);

/* Bytes that have been given back and not been taken again, of both kinds and all devices. */
size_t lc_pool_spare(void);

/* Back to CUDA with one that is in use, or with all of a device, or of all, that have been given back. Waits for all work of
 * the devices. */
#define LC_POOL_ALL (-1)
void lc_pool_drop(void *memory);
void lc_pool_empty(int device);

/* What has been given back of a device is lost: it may be reset now, which nobody says. Never waits. */
void lc_pool_forget(int device);

/* In the child, which cannot use the parent's devices: it has none of this. */
void lc_pool_after_fork(void);

#endif
