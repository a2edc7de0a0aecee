/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices, versions, error texts.
 */
#include "tests/rig/cudart_internal.h"

#include <stdio.h>
#include <string.h>

#define SM_COUNT  132
#define BUS_FIRST 0x10

static _Thread_local int current;

int rt_current_device(void)
{
    return current;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    cudaError_t err = rt_enter(__func__);

    *count = err ? 0 : rt_device_count;
    return err;
}

static cudaError_t check_device(int device)
{
    return device >= 0 && device < rt_device_count ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    err = check_device(device);
    if (!err)
        current = device;
    return rt_return(err);
}

cudaError_t cudaGetDevice(int *device)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned flags)
{
    (void)flags;
    return rt_enter(__func__);
}

cudaError_t cudaGetDeviceFlags(unsigned *flags)
{
    cudaError_t err = rt_enter(__func__);

    if (!err)
        *flags = cudaDeviceScheduleAuto;
    return err;
}

cudaError_t cudaDeviceSynchronize(void)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = rt_capture_check_unsafe();
    if (!err && rt_device_is_capturing(current))
        err = cudaErrorStreamCaptureUnsupported;
    if (!err)
        rt_device_wait(current);
    rt_unlock();
    return rt_return(err);
}

/* What the program holds on the device goes; handles are dead afterwards. */
cudaError_t cudaDeviceReset(void)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    if (rt_device_is_capturing(current)) {
        err = cudaErrorStreamCaptureUnsupported;
    } else {
        rt_device_wait(current);
        rt_device_close_streams(current);
        rt_device_close_events(current);
        rt_device_free_memory(current);
    }
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    err = value ? check_device(device) : cudaErrorInvalidValue;
    if (err)
        return rt_return(err);
    switch ((int)attr) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = SM_COUNT; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrPciBusId: *value = BUS_FIRST + device; break;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId: *value = 0; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
    default: *value = 0; break;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    err = prop ? check_device(device) : cudaErrorInvalidValue;
    if (err)
        return rt_return(err);
    memset(prop, 0, sizeof(*prop));
    snprintf(prop->name, sizeof(prop->name), "rig device");
    snprintf(prop->uuid.bytes, sizeof(prop->uuid.bytes), "lcrig-gpu-%u", (unsigned)device % 1000);
    prop->totalGlobalMem = (size_t)lcrig_env("LCRIG_MEMORY_MB", 8192, 1 << 20) << 20;
    prop->sharedMemPerBlock = 48 << 10;
    prop->sharedMemPerBlockOptin = 227 << 10;
    prop->sharedMemPerMultiprocessor = 228 << 10;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
    prop->warpSize = 32;
    prop->maxThreadsPerBlock = 1024;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->maxBlocksPerMultiProcessor = 32;
    prop->major = 9;
    prop->minor = 0;
    prop->multiProcessorCount = SM_COUNT;
    prop->l2CacheSize = 50 << 20;
    prop->pciBusID = BUS_FIRST + device;
    prop->concurrentKernels = prop->unifiedAddressing = prop->canMapHostMemory = 1;
    prop->asyncEngineCount = 3;
    prop->streamPrioritiesSupported = prop->managedMemory = prop->memoryPoolsSupported = 1;
    prop->hostRegisterSupported = prop->canUseHostPointerForRegisteredMem = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int len, int device)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    err = out && len > 12 ? check_device(device) : cudaErrorInvalidValue;
    if (!err)
        snprintf(out, (size_t)len, "0000:%02X:00.0", (unsigned)(BUS_FIRST + device));
    return rt_return(err);
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id)
{
    unsigned domain, bus, dev;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!device || !id || sscanf(id, "%x:%x:%x", &domain, &bus, &dev) != 3 || domain || dev ||
        bus < BUS_FIRST || check_device((int)bus - BUS_FIRST))
        return rt_return(cudaErrorInvalidValue);
    *device = (int)bus - BUS_FIRST;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    err = check_device(device) || check_device(peer) ? cudaErrorInvalidDevice : cudaSuccess;
    if (!err)
        *can = device != peer;
    return rt_return(err);
}

static cudaError_t set_peer(int peer, bool enable, cudaError_t already)
{
    cudaError_t err = check_device(peer);

    if (err || peer == current)
        return rt_return(cudaErrorInvalidDevice);
    rt_lock();
    if (rt_devices[current].peers[peer] == enable)
        err = already;
    rt_devices[current].peers[peer] = enable;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    cudaError_t err = rt_enter(__func__);

    (void)flags;
    return err ? err : set_peer(peer, true, cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : set_peer(peer, false, cudaErrorPeerAccessNotEnabled);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* There is no driver library below: whoever asks for one of its functions learns that it is not there. */
static cudaError_t no_driver_function(void **fn, enum cudaDriverEntryPointQueryResult *status)
{
    if (!fn)
        return rt_return(cudaErrorInvalidValue);
    *fn = NULL;
    if (status)
        *status = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **fn, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status)
{
    cudaError_t err = rt_enter(__func__);

    (void)symbol;
    (void)flags;
    return err ? err : no_driver_function(fn, status);
}

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **fn, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status)
{
    cudaError_t err = rt_enter(__func__);

    (void)symbol;
    (void)version;
    (void)flags;
    return err ? err : no_driver_function(fn, status);
}
#endif

static const struct {
    cudaError_t code;
    const char *name;
    const char *text;
} errors[] = {
#define ERROR(code, text) \
    {                     \
        code, #code, text \
    }
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInitializationError, "initialization error"),
    ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction"),
    ERROR(cudaErrorNoDevice, "no device"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorDeviceUninitialized, "invalid device context"),
    ERROR(cudaErrorMapBufferObjectFailed, "mapping failed"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorIllegalState, "operation not allowed in this state"),
    ERROR(cudaErrorNotReady, "not ready"),
    ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ERROR(cudaErrorPeerAccessNotEnabled, "peer access is not enabled"),
    ERROR(cudaErrorHostMemoryAlreadyRegistered, "host memory is already registered"),
    ERROR(cudaErrorHostMemoryNotRegistered, "host memory is not registered"),
    ERROR(cudaErrorNotPermitted, "operation not permitted"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorStreamCaptureUnsupported, "not permitted while a stream is captured"),
    ERROR(cudaErrorStreamCaptureInvalidated, "an earlier error spoilt the capture"),
    ERROR(cudaErrorStreamCaptureMerge, "would merge two captures"),
    ERROR(cudaErrorStreamCaptureUnmatched, "this stream did not begin the capture"),
    ERROR(cudaErrorStreamCaptureUnjoined,
          "a forked stream was not joined before the capture ended"),
    ERROR(cudaErrorStreamCaptureIsolation, "dependency on work outside the capture"),
    ERROR(cudaErrorStreamCaptureImplicit, "implicit dependency of the default stream on a capture"),
    ERROR(cudaErrorCapturedEvent, "the event was last recorded in a capture"),
    ERROR(cudaErrorStreamCaptureWrongThread, "another thread began the capture"),
    ERROR(cudaErrorUnknown, "unknown error"),
#undef ERROR
};

const char *cudaGetErrorString(cudaError_t err)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        if (errors[i].code == err)
            return errors[i].text;
    }
    return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t err)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        if (errors[i].code == err)
            return errors[i].name;
    }
    return "unrecognized error code";
}
