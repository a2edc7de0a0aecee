/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory. Device memory is a shared mapping of one memory file per process, so that IPC is cheap and takes one
 * descriptor however many allocations there are. Each device owns a window of the file and a reserved window of
 * addresses at the same offset; an allocation maps its pages, a free unmaps them and gives the file's pages back.
 * Addresses are reused as late as possible, so that a stale pointer faults instead of finding somebody's data.
 */
#include "tests/rig/cudart_internal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE           ((size_t)4096)
#define FILL           0xcb
#define FILL_MAX       ((size_t)64 << 10)
#define ROUND_UP(size) (((size) + PAGE - 1) & ~(PAGE - 1))

/* All live memory that the rig knows, by address. */
static struct rt_memory *table;
static size_t count, room;

static int file = -1;
static size_t window; /* bytes of address space and file per device */
static struct arena {
    char *base;    /* NULL until the first allocation */
    size_t cursor; /* the search for room starts here */
} arenas[RT_DEVICES_MAX];

/* Index of the first entry that ends behind ptr. */
static size_t lower_bound(const char *ptr)
{
    size_t low = 0, high = count;

    while (low < high) {
        size_t mid = (low + high) / 2;

        if (table[mid].base + table[mid].size > ptr)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

struct rt_memory *rt_memory_find(const void *ptr)
{
    size_t i = lower_bound(ptr);

    return i < count && table[i].base <= (const char *)ptr ? &table[i] : NULL;
}

struct rt_memory *rt_memory_find_ipc(uint64_t owner, uint64_t offset)
{
    for (size_t i = 0; i < count; i++) {
        if (table[i].type == RT_MEM_IPC && table[i].ipc_owner == owner &&
            table[i].ipc_offset == offset)
            return &table[i];
    }
    return NULL;
}

bool rt_memory_holds(const struct rt_memory *mem, const void *ptr, size_t bytes)
{
    return bytes <= mem->size - (size_t)((const char *)ptr - mem->base);
}

static enum rt_kind kind_of(enum rt_memory_type type)
{
    switch (type) {
    case RT_MEM_DEVICE:
    case RT_MEM_MANAGED: return RT_KIND_DEVICE_MEMORY;
    case RT_MEM_HOST: return RT_KIND_HOST_MEMORY;
    case RT_MEM_REGISTERED: return RT_KIND_REGISTERED;
    case RT_MEM_IPC: return RT_KIND_IPC;
    }
    return RT_KIND_DEVICE_MEMORY;
}

void rt_memory_add(const struct rt_memory *mem)
{
    size_t i = lower_bound(mem->base);

    table = rt_grow(table, count, &room, sizeof(*table));
    memmove(&table[i + 1], &table[i], (count - i) * sizeof(*table));
    table[i] = *mem;
    count++;
    rt_alive[kind_of(mem->type)]++;
}

void rt_memory_remove(struct rt_memory *mem)
{
    size_t i = (size_t)(mem - table);

    rt_alive[kind_of(mem->type)]--;
    count--;
    memmove(&table[i], &table[i + 1], (count - i) * sizeof(*table));
}

int rt_memory_file(void)
{
    return file;
}

size_t rt_memory_offset(const struct rt_memory *mem)
{
    return (size_t)mem->device * window + (size_t)(mem->base - arenas[mem->device].base);
}

static void open_file(void)
{
    window = (size_t)lcrig_env("LCRIG_MEMORY_MB", 8192, 1 << 20) << 20;
    file = memfd_create("loongcomm-rig", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)(window * (size_t)rt_device_count)))
        lcrig_fail("cannot make the memory file: %m");
}

static struct arena *arena_of(int device)
{
    struct arena *arena = &arenas[device];

    if (file < 0)
        open_file();
    if (arena->base)
        return arena;
    arena->base = mmap(NULL, window, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena->base == MAP_FAILED)
        lcrig_fail("cannot reserve addresses for device memory: %m");
    return arena;
}

/* First room of `span` bytes in [from, to) of the arena, NULL if none. */
static char *find_room(const struct arena *arena, size_t from, size_t to, size_t span)
{
    char *at = arena->base + from;
    char *end = arena->base + to;

    for (size_t i = lower_bound(at); i < count && table[i].base < end; i++) {
        if ((size_t)(table[i].base - at) >= span && table[i].base >= at)
            return at;
        at = table[i].base + table[i].span;
    }
    return at <= end && (size_t)(end - at) >= span ? at : NULL;
}

/* Bytes between the end of an allocation and the end of its last page. */
static size_t tail_of(const struct rt_memory *mem)
{
    return mem->span - PAGE - mem->size;
}

static cudaError_t map_device_memory(size_t size, enum rt_memory_type type, void **out)
{
    int device = rt_current_device();
    struct arena *arena = arena_of(device);
    struct rt_memory mem = { .size = size,
                             .span = ROUND_UP(size) + PAGE,
                             .type = type,
                             .device = device };

    if (size > window || mem.span > window - rt_devices[device].memory_used)
        return cudaErrorMemoryAllocation;
    mem.base = find_room(arena, arena->cursor, window, mem.span);
    if (!mem.base)
        mem.base = find_room(arena, 0, window, mem.span);
    if (!mem.base)
        return cudaErrorMemoryAllocation;
    if (mmap(mem.base, mem.span - PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
             (off_t)rt_memory_offset(&mem)) == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    /* A forked child has no access to device memory. */
    madvise(mem.base, mem.span - PAGE, MADV_DONTFORK);
    memset(mem.base, FILL, size < FILL_MAX ? size : FILL_MAX);
    memset(mem.base + size, FILL, tail_of(&mem));
    arena->cursor = (size_t)(mem.base - arena->base) + mem.span;
    rt_devices[device].memory_used += mem.span;
    rt_memory_add(&mem);
    *out = mem.base;
    return cudaSuccess;
}

static void check_tail(const struct rt_memory *mem)
{
    const unsigned char *tail = (const unsigned char *)mem->base + mem->size;

    for (size_t i = 0; i < tail_of(mem); i++) {
        if (tail[i] != FILL)
            lcrig_fail("byte %zu behind the end of an allocation of %zu bytes was written", i,
                       mem->size);
    }
}

static void check_unused(const struct rt_memory *mem)
{
    const char *user = rt_use_find(mem->base, mem->size);

    if (user)
        lcrig_fail("memory %p+%zu is freed while %s uses it", (void *)mem->base, mem->size, user);
}

static void unmap_device_memory(struct rt_memory *mem)
{
    check_unused(mem);
    check_tail(mem);
    if (mmap(mem->base, mem->span - PAGE, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED ||
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)rt_memory_offset(mem),
                  (off_t)(mem->span - PAGE)))
        lcrig_fail("cannot give device memory back: %m");
    rt_devices[mem->device].memory_used -= mem->span;
    rt_memory_remove(mem);
}

void rt_device_free_memory(int device)
{
    for (size_t i = count; i-- > 0;) {
        if (table[i].device == device &&
            (table[i].type == RT_MEM_DEVICE || table[i].type == RT_MEM_MANAGED))
            unmap_device_memory(&table[i]);
    }
}

static cudaError_t allocate(void **out, size_t size, enum rt_memory_type type)
{
    cudaError_t err;

    if (!out)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    err = rt_capture_check_unsafe();
    if (!err && !size)
        *out = NULL;
    else if (!err)
        err = map_device_memory(size, type, out);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaMalloc(void **out, size_t size)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : allocate(out, size, RT_MEM_DEVICE);
}

cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags)
{
    cudaError_t err = rt_enter(__func__);

    (void)flags;
    return err ? err : allocate(out, size, RT_MEM_MANAGED);
}

static struct rt_memory *find_base(const void *ptr)
{
    struct rt_memory *mem = rt_memory_find(ptr);

    return mem && mem->base == (const char *)ptr ? mem : NULL;
}

static bool is_device_type(const struct rt_memory *mem)
{
    return mem && (mem->type == RT_MEM_DEVICE || mem->type == RT_MEM_MANAGED);
}

static cudaError_t free_device_memory(void *ptr)
{
    struct rt_memory *mem = find_base(ptr);
    cudaError_t err = rt_capture_check_unsafe();

    if (err)
        return err;
    if (!is_device_type(mem))
        return cudaErrorInvalidValue;
    rt_device_wait(mem->device); /* gives up the lock: look again */
    mem = find_base(ptr);
    if (!is_device_type(mem))
        lcrig_fail("cudaFree(%p): another thread freed it meanwhile", ptr);
    unmap_device_memory(mem);
    return cudaSuccess;
}

cudaError_t cudaFree(void *ptr)
{
    cudaError_t err = rt_enter(__func__);

    if (err || !ptr)
        return err;
    rt_lock();
    err = free_device_memory(ptr);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t handle)
{
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = out ? rt_stream_find(handle, &stream) : cudaErrorInvalidValue;
    if (!err && stream->capture) /* memory nodes are not built */
        err = rt_capture_spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
    if (!err && !size)
        *out = NULL;
    else if (!err)
        err = map_device_memory(size, RT_MEM_DEVICE, out);
    rt_unlock();
    return rt_return(err);
}

static void run_free(void *ptr)
{
    struct rt_memory *mem;

    rt_lock();
    mem = find_base(ptr);
    if (!is_device_type(mem))
        lcrig_fail("cudaFreeAsync(%p): freed twice", ptr);
    unmap_device_memory(mem);
    rt_unlock();
}

cudaError_t cudaFreeAsync(void *ptr, cudaStream_t handle)
{
    struct lcrig_work work = { .name = "cudaFreeAsync", .run = run_free, .arg = ptr };
    struct rt_stream *stream;
    cudaError_t err = rt_enter(__func__);

    if (err || !ptr)
        return err;
    rt_lock();
    err = rt_stream_find(handle, &stream);
    if (!err && !is_device_type(find_base(ptr)))
        err = cudaErrorInvalidValue;
    if (!err && stream->capture)
        err = rt_capture_spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
    if (!err) {
        struct rt_piece *piece = rt_piece_new(&work);

        err = rt_submit(stream, piece, cudaGraphNodeTypeMemFree);
        rt_piece_unref(piece);
    }
    rt_unlock();
    return rt_return(err);
}

static cudaError_t allocate_host(void **out, size_t size, unsigned flags)
{
    struct rt_memory mem = { .size = size, .type = RT_MEM_HOST, .host_flags = flags };
    cudaError_t err;

    if (!out)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    mem.device = rt_current_device();
    err = rt_capture_check_unsafe();
    if (!err && !size) {
        *out = NULL;
    } else if (!err) {
        mem.base = aligned_alloc(PAGE, ROUND_UP(size));
        err = mem.base ? cudaSuccess : cudaErrorMemoryAllocation;
    }
    if (mem.base) {
        memset(mem.base, FILL, size < FILL_MAX ? size : FILL_MAX);
        rt_memory_add(&mem);
        *out = mem.base;
    }
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaMallocHost(void **out, size_t size)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : allocate_host(out, size, cudaHostAllocDefault);
}

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags)
{
    cudaError_t err = rt_enter(__func__);

    return err ? err : allocate_host(out, size, flags);
}

/* Waits for the device, then forgets the entry; hands out what was there. */
static cudaError_t forget_host(void *ptr, enum rt_memory_type type)
{
    struct rt_memory *mem = find_base(ptr);
    cudaError_t err = rt_capture_check_unsafe();

    if (err)
        return err;
    if (!mem || mem->type != type)
        return type == RT_MEM_HOST ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered;
    rt_device_wait(mem->device);
    mem = find_base(ptr);
    if (!mem || mem->type != type)
        lcrig_fail("host memory %p: another thread gave it back meanwhile", ptr);
    check_unused(mem);
    rt_memory_remove(mem);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *ptr)
{
    cudaError_t err = rt_enter(__func__);

    if (err || !ptr)
        return err;
    rt_lock();
    err = forget_host(ptr, RT_MEM_HOST);
    if (!err)
        free(ptr);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaHostRegister(void *ptr, size_t size, unsigned flags)
{
    struct rt_memory mem = { .base = ptr,
                             .size = size,
                             .type = RT_MEM_REGISTERED,
                             .host_flags = flags };
    cudaError_t err = rt_enter(__func__);
    size_t i;

    if (err)
        return err;
    if (!ptr || !size)
        return rt_return(cudaErrorInvalidValue);
    rt_lock();
    err = rt_capture_check_unsafe();
    i = lower_bound(ptr);
    if (!err && i < count && table[i].base < (char *)ptr + size)
        err = cudaErrorHostMemoryAlreadyRegistered;
    mem.device = rt_current_device();
    if (!err)
        rt_memory_add(&mem);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaHostUnregister(void *ptr)
{
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    err = forget_host(ptr, RT_MEM_REGISTERED);
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaHostGetDevicePointer(void **out, void *ptr, unsigned flags)
{
    struct rt_memory *mem;
    cudaError_t err = rt_enter(__func__);

    (void)flags;
    if (err)
        return err;
    rt_lock();
    mem = rt_memory_find(ptr);
    if (!out || !mem || (mem->type != RT_MEM_HOST && mem->type != RT_MEM_REGISTERED))
        err = cudaErrorInvalidValue;
    else
        *out = ptr;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaHostGetFlags(unsigned *flags, void *ptr)
{
    struct rt_memory *mem;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    mem = rt_memory_find(ptr);
    if (!mem || mem->type != RT_MEM_HOST)
        err = cudaErrorInvalidValue;
    else
        *flags = mem->host_flags;
    rt_unlock();
    return rt_return(err);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    int device = rt_current_device();
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    rt_lock();
    arena_of(device);
    *total = window;
    *free_bytes = window - rt_devices[device].memory_used;
    rt_unlock();
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *ptr)
{
    struct rt_memory *mem;
    cudaError_t err = rt_enter(__func__);

    if (err)
        return err;
    if (!out)
        return rt_return(cudaErrorInvalidValue);
    *out = (struct cudaPointerAttributes){ .type = cudaMemoryTypeUnregistered,
                                           .device = cudaInvalidDeviceId,
                                           .hostPointer = (void *)ptr };
    rt_lock();
    mem = rt_memory_find(ptr);
    if (mem) {
        bool on_device = mem->type == RT_MEM_DEVICE || mem->type == RT_MEM_IPC;

        out->type = on_device                     ? cudaMemoryTypeDevice
                    : mem->type == RT_MEM_MANAGED ? cudaMemoryTypeManaged
                                                  : cudaMemoryTypeHost;
        out->device = mem->device;
        out->devicePointer = (void *)ptr;
        out->hostPointer = on_device ? NULL : (void *)ptr;
    }
    rt_unlock();
    return cudaSuccess;
}

bool lcrig_is_device_memory(const void *ptr, size_t bytes)
{
    const struct rt_memory *mem;
    bool holds;

    if (rt_is_forked_child())
        return false;
    rt_lock();
    mem = rt_memory_find(ptr);
    holds = mem && rt_memory_holds(mem, ptr, bytes);
    rt_unlock();
    return holds;
}

int lcrig_memory_device(const void *ptr)
{
    const struct rt_memory *mem;
    int device;

    if (rt_is_forked_child())
        return -1;
    rt_lock();
    mem = rt_memory_find(ptr);
    device = mem ? mem->device : -1;
    rt_unlock();
    return device;
}
