/* SPDX-License-Identifier: Apache-2.0
 *
 * The host CUDA runtime's inner parts. One lock (rt_lock) guards everything declared here unless a comment says
 * otherwise; conditions belong to it. No callback of a user (work, host function, release) runs under it.
 * Time is order: a stream is a queue; a mark is a point in a stream that others can wait for. An event is a name for
 * the mark of its latest record, so a wait binds to the record at the time of the call, and the event may be recorded
 * again or destroyed while the wait is pending.
 */
#ifndef LCRIG_CUDART_INTERNAL_H
#define LCRIG_CUDART_INTERNAL_H

#include "tests/rig/rig.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define RT_DEVICES_MAX 64
#define RT_LEAK_STATUS 86

enum rt_magic {
    RT_DEAD = 0,
    RT_STREAM = 0x53545231,
    RT_EVENT = 0x45564e31,
    RT_GRAPH = 0x47524131,
    RT_EXEC = 0x45584531,
    RT_OBJECT = 0x4f424a31,
};

struct rt_graph;
struct rt_node;
struct rt_capture;

/* Refcounted. Done once, never undone. */
struct rt_mark {
    unsigned refs;
    bool done;
    struct timespec at; /* when it was reached */
    pthread_cond_t reached;
};

/* A work that several queue items, nodes and executable graphs may share. */
struct rt_piece {
    unsigned refs;
    struct lcrig_work work;
    struct rt_piece *next_dead;
};

enum rt_item_kind {
    RT_WORK,
    RT_HOLD, /* keeps a piece alive up to here */
    RT_RECORD,
    RT_WAIT,
};

struct rt_item {
    struct rt_item *next;
    enum rt_item_kind kind;
    struct rt_piece *piece; /* RT_WORK, RT_HOLD */
    struct rt_mark *mark;   /* RT_RECORD, RT_WAIT */
};

/* A set of nodes, in the order of their addition, without duplicates. */
struct rt_nodes {
    struct rt_node **list;
    size_t count;
    size_t room;
};

struct rt_stream {
    enum rt_magic magic;
    int device;
    unsigned flags;
    int priority;
    int rank;              /* of the thread that made the stream, -1 if that has none of its own */
    unsigned long long id; /* unique in the process */
    unsigned long long number; /* n-th stream of its device: seeds the delays */
    bool is_legacy;
    bool is_internal; /* default, per-thread and lane streams: no leak if alive at exit */
    bool has_worker;
    bool is_closing; /* the worker frees the stream when its queue is empty */
    bool is_busy;    /* the worker is at an item that it has taken off the queue */
    struct rt_item *head;
    struct rt_item **tail;
    unsigned long long pushed; /* items but records ever put into the queue */
    unsigned long long joined; /* blocking stream: legacy's `pushed` that it waits for already */
    unsigned long long
        legacy_joined;         /* blocking stream: own `pushed` that legacy waits for already */
    unsigned long long random; /* worker only */
    pthread_cond_t wake;
    struct rt_capture *capture; /* NULL unless being captured */
    struct rt_nodes deps;       /* while captured: what the next node depends on */
    struct rt_stream *prev, *next;
};

struct rt_event {
    enum rt_magic magic;
    unsigned refs; /* the handle, and graph nodes that record it or wait for it */
    unsigned flags;
    int device;
    struct rt_mark *mark;          /* latest record outside captures, NULL if none */
    unsigned long long capture_id; /* of the latest record if that was captured, else 0 */
    struct rt_nodes deps;          /* then: the point in the capture */
    struct rt_event *prev, *next;
};

struct rt_device {
    struct rt_stream *legacy;   /* created at first use */
    unsigned long long streams; /* ever created */
    size_t memory_used;
    bool peers[RT_DEVICES_MAX]; /* access enabled */
};

/* Things a program must give back before it exits. */
enum rt_kind {
    RT_KIND_STREAM,
    RT_KIND_EVENT,
    RT_KIND_GRAPH,
    RT_KIND_EXEC,
    RT_KIND_OBJECT,
    RT_KIND_DEVICE_MEMORY,
    RT_KIND_HOST_MEMORY,
    RT_KIND_REGISTERED,
    RT_KIND_IPC,
    RT_KINDS
};

extern pthread_mutex_t rt_lock_;
extern struct rt_device rt_devices[RT_DEVICES_MAX];
extern int rt_device_count;     /* written at init only */
extern long rt_alive[RT_KINDS]; /* how many of each kind exist */
extern bool rt_exiting;         /* workers start no more work */
extern unsigned long long rt_work_count;

/* cudart.c */

/* First line of every API function: initialises, refuses forked children and host functions, injects faults. Returns
 * an error that the function is to return as it is. */
cudaError_t rt_enter(const char *site);
/* Last line: keeps the error for cudaGetLastError. */
cudaError_t rt_return(cudaError_t err);
bool rt_is_forked_child(void);
void rt_lock(void);
/* Releases, after the lock, the pieces that became dead under it. */
void rt_unlock(void);
int rt_current_device(void);
void rt_set_in_host_function(bool inside);
/* Allocate or fail the test; rt_grow doubles an array when count has reached *room. */
void *rt_alloc(size_t bytes);
void *rt_grow(void *array, size_t count, size_t *room, size_t item);
/* Keeps a dead handle's memory for a while, so that its use is an error and not an accident. Takes over ptr. */
void rt_retire(void *ptr);

struct rt_mark *rt_mark_new(void);
struct rt_mark *rt_mark_ref(struct rt_mark *mark);
void rt_mark_unref(struct rt_mark *mark);
void rt_mark_finish(struct rt_mark *mark);
/* Both give up the lock while waiting; the caller holds a reference. */
void rt_mark_wait(struct rt_mark *mark);

/* Takes over work->arg. */
struct rt_piece *rt_piece_new(const struct lcrig_work *work);
void rt_piece_ref(struct rt_piece *piece);
void rt_piece_unref(struct rt_piece *piece);

/* cudart_stream.c */

cudaError_t rt_stream_find(cudaStream_t handle, struct rt_stream **out);
struct rt_stream *rt_stream_new(int device, unsigned flags, int priority, bool internal);
/* The stream goes when its queue has run empty. */
void rt_stream_close(struct rt_stream *stream);
bool rt_stream_is_idle(const struct rt_stream *stream);
/* Raw queue operations, no default-stream rules, no capture. */
void rt_push_work(struct rt_stream *stream, struct rt_piece *piece); /* takes an own reference */
void rt_push_hold(struct rt_stream *stream, struct rt_piece *piece); /* the same */
void rt_push_wait(struct rt_stream *stream, struct rt_mark *mark);   /* takes an own reference */
struct rt_mark *rt_push_record(struct rt_stream *stream);            /* caller owns the result */
/* Applies the default stream's implicit order before something is put on stream. Fails if stream is the default one
 * and a blocking stream of the device is being captured. */
cudaError_t rt_stream_join_legacy(struct rt_stream *stream);
/* Puts work on a stream or into its capture. Takes its own reference of piece. */
cudaError_t rt_submit(struct rt_stream *stream, struct rt_piece *piece,
                      enum cudaGraphNodeType type);
/* Waits for all that is on the stream now (of a default stream: as the default stream sees it). */
cudaError_t rt_stream_wait(struct rt_stream *stream);
/* Waits for all streams of a device. */
void rt_device_wait(int device);
bool rt_device_is_capturing(int device);
/* A blocking stream of the device that is being captured, NULL if none. */
struct rt_stream *rt_blocking_stream_in_capture(int device);
void rt_streams_forget_capture(const struct rt_capture *capture);
/* Caller owns the result. */
struct rt_piece *rt_host_piece(cudaHostFn_t fn, void *data);
/* Closes all user streams of a device (cudaDeviceReset). */
void rt_device_close_streams(int device);

/* cudart_event.c */

void rt_event_unref(struct rt_event *event);
/* The event's latest record becomes `mark` (takes an own reference). */
void rt_event_set_mark(struct rt_event *event, struct rt_mark *mark);
void rt_device_close_events(int device);

/* cudart_memory.c */

enum rt_memory_type {
    RT_MEM_DEVICE,
    RT_MEM_MANAGED,
    RT_MEM_HOST,
    RT_MEM_REGISTERED,
    RT_MEM_IPC
};

struct rt_memory {
    char *base;
    size_t size;
    size_t span; /* mapped bytes, guard page included; 0 where the rig did not map it */
    enum rt_memory_type type;
    int device;
    unsigned host_flags;
    unsigned ipc_opens;
    uint64_t ipc_owner, ipc_offset; /* RT_MEM_IPC: a word for process and file, the place in it */
};

struct rt_memory *rt_memory_find(const void *ptr);
bool rt_memory_holds(const struct rt_memory *mem, const void *ptr, size_t bytes);
/* For the IPC calls: this process's memory file and where an allocation lies in it. */
int rt_memory_file(void);
size_t rt_memory_offset(const struct rt_memory *mem);
struct rt_memory *rt_memory_find_ipc(uint64_t owner, uint64_t offset);
void rt_memory_add(const struct rt_memory *mem);
void rt_memory_remove(struct rt_memory *mem);
void rt_device_free_memory(int device);

/* rig.c */

/* Brackets run(): lets lcrig_buffer_use know the piece. */
void rt_use_begin(const char *name, unsigned long long stream_id);
void rt_use_end(void);
/* Name of a running piece that uses part of the range, NULL if none. */
const char *rt_use_find(const void *ptr, size_t bytes);
/* Sleeps as LCRIG_DELAY_US says; *state is the stream's generator, 0 at first. */
int rt_thread_rank(void);
void rt_delay(unsigned long long *state, int device, unsigned long long number);

/* cudart_capture.c */

/* Unsafe calls (CUDA's word) are refused while certain captures run, and spoil them. */
cudaError_t rt_capture_check_unsafe(void);
cudaError_t rt_capture_add(struct rt_stream *stream, struct rt_piece *piece,
                           enum cudaGraphNodeType type);
cudaError_t rt_capture_record(struct rt_stream *stream, struct rt_event *event, bool external);
cudaError_t rt_capture_wait(struct rt_stream *stream, struct rt_event *event, bool external);
/* Makes the capture fail, with the error that the caller is to return. */
cudaError_t rt_capture_spoil(struct rt_capture *capture, cudaError_t err);
/* Joining a stream that is not captured to the capture of the event's latest record. */
cudaError_t rt_capture_join(struct rt_stream *stream, struct rt_event *event);

/* The graph that a captured stream adds to. */
cudaError_t rt_capture_graph(struct rt_stream *stream, struct rt_graph **out);

void rt_nodes_add(struct rt_nodes *set, struct rt_node *node);
void rt_nodes_copy(struct rt_nodes *to, const struct rt_nodes *from);
bool rt_nodes_contain(const struct rt_nodes *set, const struct rt_node *node);
void rt_nodes_clear(struct rt_nodes *set);

#endif
