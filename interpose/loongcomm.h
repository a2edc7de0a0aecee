/* SPDX-License-Identifier: Apache-2.0
 *
 * What libloongcomm.so offers beside NCCL's own functions. A program need not link with it: look the
 * functions up with dlsym(RTLD_DEFAULT, ...), or ctypes; absent means that the library is not loaded. */
#ifndef LOONGCOMM_H
#define LOONGCOMM_H

#include <stdint.h>

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

/* For libnccl-tuner-loongcomm.so, within NCCL's making of a communicator, on the thread that makes it: a word that becomes
 * 1, before the same call on all ranks, when they have agreed on the profile with this hash. NULL: they will not. To be
 * ended once. */
const uint32_t *loongcomm_tuner_begin_v1(uint64_t hash);
void loongcomm_tuner_end_v1(const uint32_t *agreed);

#ifdef __cplusplus
}
#endif

#endif
