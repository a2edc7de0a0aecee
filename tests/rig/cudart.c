/* SPDX-License-Identifier: Apache-2.0
 *
 * Start, end, errors and the small objects (marks, pieces) that the other files share.
 */
#include "tests/rig/cudart_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pthread_mutex_t rt_lock_ = PTHREAD_MUTEX_INITIALIZER;
struct rt_device rt_devices[RT_DEVICES_MAX];
int rt_device_count;
long rt_alive[RT_KINDS];
bool rt_exiting;
unsigned long long rt_work_count;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_bool used; /* set at the first call, release; read by the fork and exit handlers */
static atomic_bool
    forked_child;       /* set by the fork handler in the child, before other threads exist */
static int exit_status; /* of exit(), written by the thread that exits, read by it */

static _Thread_local cudaError_t last_error;
static _Thread_local bool in_host_function;

/* Pieces without owner, waiting for rt_unlock. */
static struct rt_piece *dead_pieces;

/* The youngest dead handles; the oldest makes room. */
static void *retired[1024];
static size_t retired_next;

static void after_fork(void)
{
    if (atomic_load_explicit(&used, memory_order_acquire))
        atomic_store_explicit(&forked_child, true, memory_order_release);
}

static void keep_status(int status, void *arg)
{
    (void)arg;
    exit_status = status;
}

static void init(void)
{
    rt_device_count = (int)lcrig_env("LCRIG_DEVICES", 16, RT_DEVICES_MAX);
    pthread_atfork(NULL, NULL, after_fork);
    on_exit(keep_status, NULL);
    atomic_store_explicit(&used, true, memory_order_release);
}

bool rt_is_forked_child(void)
{
    return atomic_load_explicit(&forked_child, memory_order_acquire);
}

static cudaError_t fault_code(const char *site)
{
    if (strstr(site, "Malloc") || strstr(site, "Alloc"))
        return cudaErrorMemoryAllocation;
    return cudaErrorUnknown;
}

cudaError_t rt_enter(const char *site)
{
    if (rt_is_forked_child())
        return rt_return(cudaErrorInitializationError);
    if (in_host_function)
        return rt_return(cudaErrorNotPermitted);
    pthread_once(&once, init);
    if (!rt_device_count)
        return rt_return(cudaErrorNoDevice);
    if (lcrig_fault(site))
        return rt_return(fault_code(site));
    return cudaSuccess;
}

cudaError_t rt_return(cudaError_t err)
{
    if (err)
        last_error = err;
    return err;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t err = last_error;

    last_error = cudaSuccess;
    return err;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

void rt_set_in_host_function(bool inside)
{
    in_host_function = inside;
}

void rt_lock(void)
{
    pthread_mutex_lock(&rt_lock_);
}

void rt_unlock(void)
{
    struct rt_piece *dead = dead_pieces;

    dead_pieces = NULL;
    pthread_mutex_unlock(&rt_lock_);
    while (dead) {
        struct rt_piece *next = dead->next_dead;

        if (dead->work.release)
            dead->work.release(dead->work.arg);
        free(dead);
        dead = next;
    }
}

void *rt_alloc(size_t bytes)
{
    void *ptr = calloc(1, bytes);

    if (!ptr)
        lcrig_fail("out of host memory for %zu bytes", bytes);
    return ptr;
}

void *rt_grow(void *array, size_t count, size_t *room, size_t item)
{
    void *grown;

    if (count < *room)
        return array;
    *room = *room ? *room * 2 : 4;
    grown = realloc(array, *room * item);
    if (!grown)
        lcrig_fail("out of host memory for %zu bytes", *room * item);
    return grown;
}

void rt_retire(void *ptr)
{
    void **slot = &retired[retired_next++ % (sizeof(retired) / sizeof(retired[0]))];

    free(*slot);
    *slot = ptr;
}

struct rt_mark *rt_mark_new(void)
{
    struct rt_mark *mark = rt_alloc(sizeof(*mark));

    mark->refs = 1;
    pthread_cond_init(&mark->reached, NULL);
    return mark;
}

struct rt_mark *rt_mark_ref(struct rt_mark *mark)
{
    mark->refs++;
    return mark;
}

void rt_mark_unref(struct rt_mark *mark)
{
    if (!mark || --mark->refs)
        return;
    pthread_cond_destroy(&mark->reached);
    free(mark);
}

void rt_mark_finish(struct rt_mark *mark)
{
    mark->done = true;
    clock_gettime(CLOCK_MONOTONIC, &mark->at);
    pthread_cond_broadcast(&mark->reached);
}

void rt_mark_wait(struct rt_mark *mark)
{
    while (!mark->done)
        pthread_cond_wait(&mark->reached, &rt_lock_);
}

struct rt_piece *rt_piece_new(const struct lcrig_work *work)
{
    struct rt_piece *piece = rt_alloc(sizeof(*piece));

    piece->refs = 1;
    piece->work = *work;
    return piece;
}

void rt_piece_ref(struct rt_piece *piece)
{
    piece->refs++;
}

void rt_piece_unref(struct rt_piece *piece)
{
    if (--piece->refs)
        return;
    piece->next_dead = dead_pieces;
    dead_pieces = piece;
}

cudaError_t lcrig_enqueue(cudaStream_t handle, const struct lcrig_work *work)
{
    struct rt_stream *stream;
    struct rt_piece *piece;
    cudaError_t err = rt_enter("lcrig_enqueue");

    if (err) {
        if (work->release)
            work->release(work->arg);
        return err;
    }
    rt_lock();
    piece = rt_piece_new(work);
    err = rt_stream_find(handle, &stream);
    if (!err)
        err = rt_submit(stream, piece, cudaGraphNodeTypeKernel);
    rt_piece_unref(piece);
    rt_unlock();
    return rt_return(err);
}

unsigned long long lcrig_gpu_work_count(void)
{
    unsigned long long count;

    if (rt_is_forked_child())
        return 0;
    rt_lock();
    count = rt_work_count;
    rt_unlock();
    return count;
}

/* Runs after the program's exit handlers and after the destructors of all libraries that are linked with this one.
 * Streams may still be busy: their workers stay where they are until the process is gone. */
__attribute__((destructor)) static void end(void)
{
    static const char *const names[RT_KINDS] = {
        [RT_KIND_STREAM] = "stream",
        [RT_KIND_EVENT] = "event",
        [RT_KIND_GRAPH] = "graph",
        [RT_KIND_EXEC] = "executable graph",
        [RT_KIND_OBJECT] = "user object",
        [RT_KIND_DEVICE_MEMORY] = "device memory allocation",
        [RT_KIND_HOST_MEMORY] = "pinned memory allocation",
        [RT_KIND_REGISTERED] = "registered host range",
        [RT_KIND_IPC] = "opened memory handle",
    };
    bool leaked = false;

    if (!atomic_load_explicit(&used, memory_order_acquire) || rt_is_forked_child())
        return;
    rt_lock();
    rt_exiting = true;
    if (lcrig_env("LCRIG_LEAKS", 1, 1)) {
        for (int i = 0; i < RT_KINDS; i++) {
            if (!rt_alive[i])
                continue;
            leaked = true;
            fprintf(stderr, "rig: rank %d: leaked at exit: %ld %s%s\n", lcrig_rank(), rt_alive[i],
                    names[i], rt_alive[i] == 1 ? "" : "s");
        }
    }
    pthread_mutex_unlock(&rt_lock_);
    if (leaked && !exit_status) {
        fflush(NULL);
        _exit(RT_LEAK_STATUS);
    }
}
