/* SPDX-License-Identifier: Apache-2.0
 *
 * What libloongcomm.so offers beside NCCL's own functions. A program need not link with it: look the
 * functions up with dlsym(RTLD_DEFAULT, ...), or ctypes; absent means that the library is not loaded. */
#ifndef LOONGCOMM_H
#define LOONGCOMM_H

#include <stddef.h>
#include <stdint.h>

struct ncclComm;
struct CUstream_st;

#ifdef __cplusplus
extern "C" {
#endif

/* "MAJOR.MINOR.PATCH", lives as long as the process. */
const char *loongcommVersion(void);

/* Calls of NCCL functions that reached us so far in this process, over all threads: collectives and
 * send/receive that NCCL accepted, and every call of the other functions that we replace. Calls that NCCL
 * makes to itself are not counted. */
unsigned long long loongcommCallsSeen(void);

/* File of the NCCL that calls are passed to, or NULL while none is loaded. Lives as long as the process. */
const char *loongcommNcclPath(void);

/* Says which rows of its send buffer the next all-to-all of a communicator need not send: ncclAlltoAll, or a group with
 * sends on it. The buffer is `rows` rows of `row_bytes`, all that the call sends, own part included (of a group: from its
 * lowest address to its highest). Bit r % 32 of bits[r / 32], in device memory, is 1 where row r is live. Other rows are
 * not read and arrive as zeros, whatever they hold. On this rank alone; other ranks need not know.
 *
 * bits are read by the all-to-all, behind what is on `stream` now, and must stay as they are until it has run. For a
 * graph: call it while `stream` is captured, in front of the captured all-to-all; bits are read at each launch.
 *
 * 0: it will be so, if the next all-to-all has a form (ncclAlltoAll, or a group) that one before had, but for messages
 *    smaller than LOONGCOMM_EXCHANGE_MIN_BYTES, or than a profile has rules for, which travel as they are.
 * 1: not yet, or not here, or not known, as of the first all-to-all of a communicator: dead rows arrive as they are. A
 *    program that needs zeros there writes them itself then.
 * Negative: -EINVAL, no such mask; -EIO, CUDA has refused it. Called by the thread that calls the communicator's operations. */
int loongcommSetMask(struct ncclComm *comm, const uint32_t *bits, size_t rows, size_t row_bytes,
                     struct CUstream_st *stream);

/* For libnccl-tuner-loongcomm.so, within NCCL's making of a communicator, on the thread that makes it: a word that becomes
 * 1, before the same call on all ranks, when they have agreed on the profile with this hash. NULL: they will not. To be
 * ended once. */
const uint32_t *loongcomm_tuner_begin_v1(uint64_t hash);
void loongcomm_tuner_end_v1(const uint32_t *agreed);

/* For plugins: adds `value` to a counter that the process's report shows for a device and a peer; names that begin with
 * bytes_ are shown as sizes. The texts are copied, long ones cut. Any thread; never blocks for long. */
void loongcomm_metrics_add_v1(const char *source, const char *device, const char *peer,
                              const char *name, uint64_t value);

/* `flush` is called before a report is made, to add what has not been yet, until this is called again with wanted == 0:
 * after that it does not run any more. It must not call this function. */
void loongcomm_metrics_flush_v1(void (*flush)(void), int wanted);

#ifdef __cplusplus
}
#endif

#endif
