/* SPDX-License-Identifier: Apache-2.0
 *
 * What libloongcomm.so offers beside NCCL's own functions. A program need not link with it: look the
 * functions up with dlsym(RTLD_DEFAULT, ...), or ctypes; absent means that the library is not loaded. */
#ifndef LOONGCOMM_H
#define LOONGCOMM_H

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

#ifdef __cplusplus
}
#endif

#endif
