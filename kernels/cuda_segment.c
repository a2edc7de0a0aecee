/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments as memory of the driver's virtual memory management. The driver is asked for by way of the runtime: the library
 * must load where there is none.
 */
#include "kernels/list_internal.h"
#include "kernels/rings.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

/* Written once, under `once`; read only afterwards. `resolve_error`: 0 or what lk_ calls return. */
static struct {
#define LK_DRIVER(name) __typeof__(name) *name;
#include "kernels/driver.def"
#undef LK_DRIVER
} driver;
static int resolve_error;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void resolve(const char *name, void **function)
{
    enum cudaDriverEntryPointQueryResult found;
    cudaError_t err;

    if (resolve_error)
        return;
#if CUDART_VERSION >= 12050
    err = cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found);
#else
    err = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found);
#endif
    if (err != cudaSuccess)
        resolve_error = err;
    else if (found != cudaDriverEntryPointSuccess || !*function)
        resolve_error = -ENOTSUP;
}

static void resolve_all(void)
{
#define LK_DRIVER(name) resolve(#name, (void **)&driver.name);
#include "kernels/driver.def"
#undef LK_DRIVER
}

/* The current device and how its memory is rounded. Makes its primary context current. */
struct place {
    CUmemAllocationProp prop;
    size_t bytes;
};

static bool has(CUdevice_attribute attribute, int device)
{
    int value = 0;

    return driver.cuDeviceGetAttribute(&value, attribute, device) == CUDA_SUCCESS && value;
}

static int find_place(size_t bytes, struct place *out)
{
    struct place place = {
        .prop = {
            .type = CU_MEM_ALLOCATION_TYPE_PINNED,
            .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            .location.type = CU_MEM_LOCATION_TYPE_DEVICE,
        },
    };
    size_t granularity = 0;
    cudaError_t err = cudaFree(NULL); /* runtime and driver agree on a context from here on */
    int result;

    if (err == cudaSuccess)
        err = cudaGetDevice(&place.prop.location.id);
    if (err != cudaSuccess)
        return err;
    pthread_once(&once, resolve_all);
    if (resolve_error)
        return resolve_error;
    if (!has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, place.prop.location.id) ||
        !has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
             place.prop.location.id))
        return -ENOTSUP;
    result = (int)driver.cuMemGetAllocationGranularity(&granularity, &place.prop,
                                                       CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result)
        return result;
    if (!bytes || bytes > SIZE_MAX - granularity)
        return -EINVAL;
    place.bytes = (bytes + granularity - 1) / granularity * granularity;
    *out = place;
    return 0;
}

/* Maps a handle, which may be released afterwards: the mapping keeps the memory. */
static int map_handle(const struct place *place, CUmemGenericAllocationHandle handle,
                      CUdeviceptr *out)
{
    CUmemAccessDesc access = {
        .location = place->prop.location,
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    CUdeviceptr address;
    CUresult err = driver.cuMemAddressReserve(&address, place->bytes, 0, 0, 0);

    if (err != CUDA_SUCCESS)
        return (int)err;
    err = driver.cuMemMap(address, place->bytes, 0, handle, 0);
    if (err != CUDA_SUCCESS)
        goto free_address;
    err = driver.cuMemSetAccess(address, place->bytes, &access, 1);
    if (err != CUDA_SUCCESS)
        goto unmap;
    *out = address;
    return 0;

unmap:
    driver.cuMemUnmap(address, place->bytes);
free_address:
    driver.cuMemAddressFree(address, place->bytes);
    return (int)err;
}

static int unmap_address(CUdeviceptr address, size_t bytes)
{
    CUresult unmapped = driver.cuMemUnmap(address, bytes);
    CUresult freed = driver.cuMemAddressFree(address, bytes);

    return (int)(unmapped != CUDA_SUCCESS ? unmapped : freed);
}

static int export_handle(CUmemGenericAllocationHandle handle, int *out)
{
    int fd = -1;
    CUresult err = driver.cuMemExportToShareableHandle(&fd, handle,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);

    if (err != CUDA_SUCCESS)
        return err == CUDA_ERROR_NOT_SUPPORTED ? -ENOTSUP : (int)err;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
        int result = -errno;

        close(fd);
        return result;
    }
    *out = fd;
    return 0;
}

LK_API int lk_segment_new(size_t bytes, void *stream, void **address, int *fd)
{
    CUmemGenericAllocationHandle handle;
    struct place place;
    CUdeviceptr mapped;
    int exported = -1;
    int err = find_place(bytes, &place);

    if (err)
        return err;
    err = (int)driver.cuMemCreate(&handle, place.bytes, &place.prop, 0);
    if (err)
        return err == CUDA_ERROR_NOT_SUPPORTED || err == CUDA_ERROR_NOT_PERMITTED ? -ENOTSUP : err;
    err = export_handle(handle, &exported);
    if (err)
        goto release;
    err = map_handle(&place, handle, &mapped);
    if (err)
        goto close_fd;
    err = cudaMemsetAsync((void *)(uintptr_t)mapped, 0, place.bytes, (cudaStream_t)stream);
    if (err)
        goto unmap;
    driver.cuMemRelease(handle);
    *address = (void *)(uintptr_t)mapped;
    *fd = exported;
    return 0;

unmap:
    unmap_address(mapped, place.bytes);
close_fd:
    close(exported);
release:
    driver.cuMemRelease(handle);
    return err;
}

LK_API int lk_segment_map(int fd, size_t bytes, void **address)
{
    CUmemGenericAllocationHandle handle;
    struct place place;
    CUdeviceptr mapped;
    int err;

    if (fd < 0)
        return -EINVAL;
    err = find_place(bytes, &place);
    if (err)
        return err;
    err = (int)driver.cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (err)
        return err == CUDA_ERROR_INVALID_VALUE ? -EINVAL : err;
    err = map_handle(&place, handle, &mapped);
    driver.cuMemRelease(handle);
    if (err) /* a wrong size is what the driver calls an invalid value */
        return err == CUDA_ERROR_INVALID_VALUE ? -EINVAL : err;
    *address = (void *)(uintptr_t)mapped;
    return 0;
}

LK_API int lk_segment_free(void *address, size_t bytes)
{
    struct place place;
    int err;

    if (!address)
        return -EINVAL;
    err = find_place(bytes, &place);
    return err ? err : unmap_address((CUdeviceptr)(uintptr_t)address, place.bytes);
}
