/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/nccl_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_BYTES 512

/* Guards last_text. */
static pthread_mutex_t text_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_text[TEXT_BYTES];

ncclResult_t rig_error(ncclResult_t result, const char *fmt, ...)
{
    va_list args;

    pthread_mutex_lock(&text_lock);
    va_start(args, fmt);
    vsnprintf(last_text, sizeof(last_text), fmt, args);
    va_end(args);
    if (getenv("NCCL_DEBUG"))
        fprintf(stderr, "rig: rank %d: NCCL WARN %s\n", lcrig_rank(), last_text);
    pthread_mutex_unlock(&text_lock);
    return result;
}

void *rig_alloc(size_t bytes)
{
    void *ptr = calloc(1, bytes);

    if (!ptr)
        lcrig_fail("no memory for %zu bytes", bytes);
    return ptr;
}

void *rig_grow(void *list, size_t count, size_t *room, size_t item)
{
    if (count < *room)
        return list;
    *room = *room ? *room * 2 : 8;
    list = realloc(list, *room * item);
    if (!list)
        lcrig_fail("no memory for %zu items", *room);
    return list;
}

const char *pncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (the rig)";
    case ncclSystemError: return "unhandled system error (the rig)";
    case ncclInternalError: return "internal error (the rig)";
    case ncclInvalidArgument: return "invalid argument (the rig)";
    case ncclInvalidUsage: return "invalid usage (the rig)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
RIG_EXPORT(GetErrorString)

const char *pncclGetLastError(ncclComm_t comm)
{
    static _Thread_local char text[TEXT_BYTES];

    pthread_mutex_lock(&text_lock);
    memcpy(text, last_text, sizeof(text));
    pthread_mutex_unlock(&text_lock);
    return text;
}
RIG_EXPORT(GetLastError)

ncclResult_t pncclGetVersion(int *version)
{
    if (!version)
        return rig_error(ncclInvalidArgument, "ncclGetVersion: NULL");
    *version = (int)lcrig_env("LCRIG_NCCL_VERSION", NCCL_VERSION_CODE, 99999);
    return ncclSuccess;
}
RIG_EXPORT(GetVersion)

ncclResult_t pncclMemAlloc(void **ptr, size_t size)
{
    if (!ptr)
        return rig_error(ncclInvalidArgument, "ncclMemAlloc: NULL");
    if (lcrig_fault("ncclMemAlloc") || cudaMalloc(ptr, size) != cudaSuccess)
        return rig_error(ncclUnhandledCudaError, "ncclMemAlloc: no memory");
    return ncclSuccess;
}
RIG_EXPORT(MemAlloc)

ncclResult_t pncclMemFree(void *ptr)
{
    return cudaFree(ptr) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
RIG_EXPORT(MemFree)

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
void pncclResetDebugInit(void)
{
}
RIG_EXPORT(ResetDebugInit)
