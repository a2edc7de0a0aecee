/* SPDX-License-Identifier: Apache-2.0
 *
 * The rig: a CUDA runtime (libcudart.so.N) and an NCCL (libnccl.so.2) over host memory, so that the real
 * libloongcomm.so and the benchmarks run on a machine without a GPU. Programs use the vendor's headers and
 * link against these libraries, whose sonames are the vendor's. This header is what the rig's two libraries
 * (and tests that look inside) share; it is no part of the product.
 *
 * Model. A device is a number; LCRIG_DEVICES (default 16) of them exist. A stream is a queue with a worker
 * thread of its own (started at first use). Waiting is by futex or condition variable, never by spinning.
 * Ranks are processes or threads. Device memory lies in one memory file per process, so every cudaMalloc
 * pointer can be handed to another process by cudaIpcGetMemHandle (the opener maps /proc/PID/fd/N: same user,
 * same pid namespace). Each allocation starts on a page, is followed by an unmapped page, starts out filled
 * with 0xcb (first 64 KB), and faults after cudaFree.
 *
 * Settings (environment):
 *   LCRIG_DEVICES         number of devices, 1..64 (16)
 *   LCRIG_MEMORY_MB       memory of each device (8192); backed by RAM only where touched
 *   LCRIG_SEED            \ each piece of stream work is preceded by a pseudo-random sleep of 0..DELAY_US
 *   LCRIG_DELAY_US        / microseconds, drawn from seed, rank, device and the stream's number on the device (0)
 *   LCRIG_FAULT           SITE:NTH[:RANK][,...], see lcrig_fault
 *   LCRIG_RANK            rank of this process for delays, faults and messages, else RANK, else 0
 *   LCRIG_LEAKS=0         no leak check. Default: at exit, one line per kind of thing still alive (streams, events,
 *                         graphs, device memory ...) and, if the exit status was 0, exit status 86 instead
 *   LCRIG_SLOW_US         NCCL's collectives take so much longer (0) in processes with a tuner, but for those that it
 *   LCRIG_FAST_WAY        sends this way: 3 x NCCL's number of the algorithm + that of the protocol (0)
 *   LCRIG_CONNECT_US      in such processes a communicator's first use of an algorithm takes so much longer (0)
 *   LCRIG_STRICT_EVENTS=1 cudaStreamWaitEvent on an event never recorded is a failure (legal CUDA, a no-op)
 *
 * Strict: a misuse that real CUDA or NCCL would turn into silent corruption or a hang (mismatched collectives,
 * a buffer written while another stream's work uses it, an overrun of an allocation, memory freed while in use, nodes of a
 * graph that record one event in no order) prints one line "rig: ..." and aborts the test process. A graph's nodes are ordered
 * by their dependencies alone.
 *
 * Not built: kernels (cudaLaunchKernel, functions, modules), memory pools and memory nodes, textures, IPC of events.
 *
 * After fork() of a process that has used the rig, every call in the child returns cudaErrorInitializationError.
 */
#ifndef LCRIG_H
#define LCRIG_H

/* The rig's libraries are built with hidden visibility; what the vendor's header and this one declare is exported. */
#pragma GCC visibility push(default)

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

/* One piece of stream work. run() is called on the stream's worker, once per execution: a captured piece runs
 * once per replay. release() (may be NULL) is called once, when the piece will never run again: after run(), or
 * when the last graph and executable graph that hold it are destroyed and their launches are over. Neither is
 * called with a lock of the runtime held. run() may block (on a futex or condition variable: it occupies its own
 * stream's worker only) but must not wait for a stream. */
struct lcrig_work {
    const char *name; /* static text, for messages */
    void (*run)(void *arg);
    void (*release)(void *arg);
    void *arg;
    bool
        is_kernel; /* counted by lcrig_gpu_work_count: work that would occupy the GPU's processors */
};

/* Enqueues behind all earlier work of the stream, or adds a node if the stream is being captured. Takes over arg in
 * every case (release is called at once on failure). Handles 0, cudaStreamLegacy and cudaStreamPerThread mean the
 * current device's. */
cudaError_t lcrig_enqueue(cudaStream_t stream, const struct lcrig_work *work);

/* Declares, from inside run(), that the piece reads or writes a range until it returns. Two pieces of this process
 * running at once whose ranges overlap, one of them writing, are a failure of the test. To be called on the thread
 * that called run(). Copies and memsets declare theirs. */
void lcrig_buffer_use(const void *ptr, size_t bytes, bool write);

/* True if ptr lies in live device (or managed/pinned) memory of the rig for at least `bytes`. */
bool lcrig_is_device_memory(const void *ptr, size_t bytes);

/* Device of a live allocation, -1 if ptr lies in none. */
int lcrig_memory_device(const void *ptr);

/* Number of pieces with is_kernel, copies and memsets put on streams by this process; each replay of a graph counts
 * its nodes. */
unsigned long long lcrig_gpu_work_count(void);

/* Number of cudaStreamWaitEvent calls so far on events never recorded. */
unsigned long long lcrig_unrecorded_waits(void);

/* Fault injection: LCRIG_FAULT="cudaMalloc:3:1" makes the third cudaMalloc of rank 1 fail once. Returns true when
 * the call at `site` is to fail. Sites are API names. A malformed setting is a failure. An operation outside of a group
 * passes ncclGroupEnd, too. */
bool lcrig_fault(const char *site);

/* The next call at `site` (static text) on this thread's rank fails once. */
void lcrig_fail_next(const char *site);

/* Rank used for faults, delays and messages: of this thread if set, else of the process. Streams take over the rank of
 * the thread that makes them, so it holds inside run(), too. */
int lcrig_rank(void);
void lcrig_set_thread_rank(int rank);

/* A number from the environment; unset or empty gives dflt, anything but a decimal number in range is a failure. */
unsigned long long lcrig_env(const char *name, unsigned long long dflt, unsigned long long max);

/* Prints "rig: ..." and aborts. */
__attribute__((format(printf, 1, 2), noreturn)) void lcrig_fail(const char *fmt, ...);

#pragma GCC visibility pop
#endif
