/* SPDX-License-Identifier: Apache-2.0
 *
 * Sharing device memory with other processes: a handle names the owner's memory file and a place in it.
 */
#include "tests/rig/cudart_internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define IPC_MAGIC 0x4c435249u

struct ipc_handle {
    uint32_t magic;
    int32_t pid;
    int32_t fd;
    uint64_t inode; /* the descriptor may be another file's by now */
    uint64_t offset;
    uint64_t size;
};
_Static_assert(sizeof(struct ipc_handle) <= sizeof(cudaIpcMemHandle_t), "fits the vendor's handle");

static cudaError_t make_handle(const void *ptr, struct ipc_handle *out)
{
    const struct rt_memory *mem = rt_memory_find(ptr);
    struct stat st;

    if (!mem || mem->type != RT_MEM_DEVICE || fstat(rt_memory_file(), &st))
        return cudaErrorInvalidValue;
    *out = (struct ipc_handle){ .magic = IPC_MAGIC,
                                .pid = getpid(),
                                .fd = rt_memory_file(),
                                .inode = st.st_ino,
                                .offset = rt_memory_offset(mem),
                                .size = mem->size };
    return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *ptr)
{
    struct ipc_handle handle;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = make_handle(ptr, &handle);
    rt_unlock();
    if (!err) {
        memset(out, 0, sizeof(*out));
        memcpy(out, &handle, sizeof(handle));
    }
    return rt_return(err);
}

static int open_owner(const struct ipc_handle *handle)
{
    char path[64];
    struct stat st;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle->pid, handle->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (fstat(fd, &st) || st.st_ino != handle->inode) {
        close(fd);
        return -1;
    }
    return fd;
}

static uint64_t owner_of(const struct ipc_handle *handle)
{
    return (uint64_t)handle->pid << 32 ^ handle->inode;
}

static cudaError_t map_handle(const struct ipc_handle *handle, void **out)
{
    struct rt_memory *mem = rt_memory_find_ipc(owner_of(handle), handle->offset);
    struct rt_memory fresh = { .size = handle->size,
                               .span = handle->size,
                               .type = RT_MEM_IPC,
                               .device = rt_current_device(),
                               .ipc_opens = 1,
                               .ipc_owner = owner_of(handle),
                               .ipc_offset = handle->offset };
    int fd;

    if (mem) {
        mem->ipc_opens++;
        *out = mem->base;
        return cudaSuccess;
    }
    fd = open_owner(handle);
    if (fd < 0)
        return cudaErrorMapBufferObjectFailed;
    fresh.base = mmap(NULL, handle->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                      (off_t)handle->offset);
    close(fd);
    if (fresh.base == MAP_FAILED)
        return cudaErrorMapBufferObjectFailed;
    rt_memory_add(&fresh);
    *out = fresh.base;
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t opaque, unsigned flags)
{
    struct ipc_handle handle;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    memcpy(&handle, &opaque, sizeof(handle));
    if (!out || flags != cudaIpcMemLazyEnablePeerAccess || handle.magic != IPC_MAGIC)
        return rt_return(cudaErrorInvalidValue);
    if (handle.pid == getpid()) /* as in CUDA: not in the process that made it */
        return rt_return(cudaErrorDeviceUninitialized);
    rt_lock();
    err = rt_capture_check_unsafe();
    if (!err)
        err = map_handle(&handle, out);
    rt_unlock();
    return rt_return(err);
}

static cudaError_t close_handle(void *ptr)
{
    struct rt_memory *mem = rt_memory_find(ptr);
    const char *user;

    if (!mem || mem->type != RT_MEM_IPC || mem->base != (char *)ptr)
        return cudaErrorInvalidValue;
    if (mem->ipc_opens > 1) {
        mem->ipc_opens--;
        return cudaSuccess;
    }
    rt_device_wait(mem->device); /* gives up the lock: look again */
    mem = rt_memory_find(ptr);
    if (!mem || mem->type != RT_MEM_IPC || mem->ipc_opens != 1)
        lcrig_fail("cudaIpcCloseMemHandle(%p): another thread opened or closed it meanwhile", ptr);
    user = rt_use_find(mem->base, mem->size);
    if (user)
        lcrig_fail("mapped memory %p+%zu is closed while %s uses it", ptr, mem->size, user);
    munmap(mem->base, mem->size);
    rt_memory_remove(mem);
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *ptr)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = close_handle(ptr);
    rt_unlock();
    return rt_return(err);
}
