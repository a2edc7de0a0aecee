/* SPDX-License-Identifier: Apache-2.0
 *
 * The rig: a CUDA runtime (libcudart.so.N) and an NCCL (libnccl.so.2) over host memory, so that the real
 * libloongcomm.so and the benchmarks run on a machine without a GPU. Programs use the vendor's headers and
 * link against these libraries, whose sonames are the vendor's. This header is what the rig's two libraries
 * (and tests that look inside) share; it is no part of the product.
 *
 * Model. A device is a number; LCRIG_DEVICES (default 16) of them exist. A stream is a queue with a worker
 * thread of its own (started at first use). Waiting is by futex or condition variable, never by spinning.
 * Ranks are processes or threads. Device memory is ordinary memory of the process; what a test must share
 * between processes goes through cudaIpc or the VMM calls (shared memory files underneath).
 *
 * Settings (environment): LCRIG_DEVICES; LCRIG_SEED and LCRIG_DELAY_US (each piece of stream work is preceded
 * by a pseudo-random sleep of 0..DELAY_US microseconds drawn from SEED, rank and stream; default none);
 * LCRIG_FAULT (site:nth[:rank], see lcrig_fault); LCRIG_NODES via NCCL_HOSTID as with NCCL.
 *
 * Strict: a misuse that real CUDA or NCCL would turn into silent corruption or a hang (mismatched collectives,
 * waiting on an event never recorded where that hides a lost dependency, a buffer written while another stream's work
 * uses it, streams, events or memory leaked at exit) prints one line "rig: ..." and aborts the test process.
 */
#ifndef LCRIG_H
#define LCRIG_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

/* One piece of stream work. run() is called on the stream's worker, once per execution: a captured piece runs
 * once per replay. release() (may be NULL) is called once, when the piece will never run again. */
struct lcrig_work {
    const char *name; /* static text, for messages */
    void (*run)(void *arg);
    void (*release)(void *arg);
    void *arg;
    bool is_kernel; /* counted by lcrig_kernel_count: work that would occupy the GPU's processors */
};

/* Enqueues behind all earlier work of the stream, or adds a node if the stream is being captured. Takes over arg in
 * every case (release is called at once on failure). */
cudaError_t lcrig_enqueue(cudaStream_t stream, const struct lcrig_work *work);

/* Declares, from inside run(), that the piece reads or writes a range until it returns. Two pieces running at once
 * whose ranges overlap, one of them writing, are a failure of the test. */
void lcrig_buffer_use(const void *ptr, size_t bytes, bool write);

/* True if ptr lies in live device (or managed/pinned) memory of the rig for at least `bytes`. */
bool lcrig_is_device_memory(const void *ptr, size_t bytes);

/* Number of lcrig_work pieces with is_kernel, copies and memsets ever enqueued by this process. */
unsigned long long lcrig_gpu_work_count(void);

/* Fault injection: LCRIG_FAULT="cudaMalloc:3:1" makes the third cudaMalloc of rank 1 (LCRIG_RANK, else RANK, of the
 * process) fail once. Returns true when the call at `site` is to fail. Sites are API names. */
bool lcrig_fault(const char *site);

/* Prints "rig: ..." and aborts. */
__attribute__((format(printf, 1, 2), noreturn)) void lcrig_fail(const char *fmt, ...);

#endif
