/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/pool.h"

#include <pthread.h>
#include <stdlib.h>

struct block {
    struct block *next;
    const struct lc_backend *backend;
    void *memory;
    size_t bytes;
    int device;
    enum lc_memory kind;
    bool taken;
};

/* Guards the list and its blocks. Nothing else is called under it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;

/* Communicators of one kind need the same sizes or similar ones. What is much larger is left for those that need it: what
 * lies here is then no more than communicators have had at one time, and as much again. */
static bool fits(const struct block *block, enum lc_memory kind, int device, size_t bytes)
{
    return !block->taken && block->kind == kind && block->device == device &&
           block->bytes >= bytes && block->bytes / 2 <= bytes;
}

static void *take_spare(enum lc_memory kind, int device, size_t bytes)
{
    struct block *best = NULL;
    void *memory = NULL;

    (void)pthread_mutex_lock(&lock);
    for (struct block *block = blocks; block; block = block->next) {
        if (fits(block, kind, device, bytes) && (!best || block->bytes < best->bytes))
            best = block;
    }
    if (best) {
        best->taken = true;
        memory = best->memory;
    }
    (void)pthread_mutex_unlock(&lock);
    return memory;
}

int lc_pool_take(const struct lc_backend *backend, enum lc_memory kind, int device, size_t bytes,
                 void **out)
{
    void *memory = take_spare(kind, device, bytes);
    struct block *block;
    int err;

    if (memory) {
        *out = memory;
        return 0;
    }
    block = calloc(1, sizeof(*block));
    if (!block)
        return cudaErrorMemoryAllocation;
    if (kind == LC_MEMORY_DEVICE)
        err = (int)backend->cudaMalloc(&memory, bytes);
    else
        err = (int)backend->cudaHostAlloc(&memory, bytes,
                                          cudaHostAllocPortable | cudaHostAllocMapped);
    if (err) {
        free(block);
        return err;
    }
    *block = (struct block){ NULL, backend, memory, bytes, device, kind, true };
    (void)pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    (void)pthread_mutex_unlock(&lock);
    *out = memory;
    return 0;
}

void lc_pool_give(void *memory)
{
    struct block *block;

    if (!memory)
        return;
    (void)pthread_mutex_lock(&lock);
    for (block = blocks; block && block->memory != memory; block = block->next)
        ;
    if (block) /* else it is a parent's */
        block->taken = false;
    (void)pthread_mutex_unlock(&lock);
}

size_t lc_pool_spare(void)
{
    size_t bytes = 0;

    (void)pthread_mutex_lock(&lock);
    for (const struct block *block = blocks; block; block = block->next)
        bytes += block->taken ? 0 : block->bytes;
    (void)pthread_mutex_unlock(&lock);
    return bytes;
}

/* The block of `memory`, or if that is NULL all that are spare of a device, or of all. */
static struct block *take_out(const void *memory, int device)
{
    struct block *out = NULL;

    (void)pthread_mutex_lock(&lock);
    for (struct block **at = &blocks; *at;) {
        struct block *block = *at;

        if (memory ? block->memory != memory
                   : block->taken || (device != LC_POOL_ALL && block->device != device)) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        block->next = out;
        out = block;
    }
    (void)pthread_mutex_unlock(&lock);
    return out;
}

/* With the device current, if it can be, so that none is made use of that the program does not use. */
static void release(struct block *block)
{
    while (block) {
        const struct lc_backend *backend = block->backend;
        struct block *next = block->next;
        struct lc_guard guard;
        bool guarded = lc_guard_begin(backend, block->device, &guard);

        if (block->kind == LC_MEMORY_DEVICE)
            (void)backend->cudaFree(block->memory);
        else
            (void)backend->cudaFreeHost(block->memory);
        if (guarded)
            lc_guard_end(backend, block->device, &guard);
        free(block);
        block = next;
    }
}

void lc_pool_drop(void *memory)
{
    if (memory)
        release(take_out(memory, LC_POOL_ALL));
}

void lc_pool_empty(int device)
{
    release(take_out(NULL, device));
}

void lc_pool_forget(int device)
{
    struct block *block = take_out(NULL, device);

    while (block) {
        struct block *next = block->next;

        free(block);
        block = next;
    }
}

void lc_pool_after_fork(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* a thread of the parent may have held it */
    blocks = NULL;
}
