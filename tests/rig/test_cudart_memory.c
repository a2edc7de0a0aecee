/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/test_cudart.h"

static void memory_is_copied_and_filled(void)
{
    char host[1000], back[1000];
    char *dev;
    cudaStream_t stream;

    OK(cudaStreamCreate(&stream));
    OK(cudaMalloc((void **)&dev, sizeof(host)));
    memset(host, 7, sizeof(host));
    OK(cudaMemcpyAsync(dev, host, sizeof(host), cudaMemcpyHostToDevice, stream));
    OK(cudaMemsetAsync(dev + 10, 9, 5, stream));
    OK(cudaMemcpyAsync(back, dev, sizeof(host), cudaMemcpyDeviceToHost, stream));
    CHECK(back[9] == 7 && back[10] == 9 && back[14] == 9 && back[15] == 7);
    OK(cudaMemset(dev, 1, sizeof(host)));
    OK(cudaMemcpy2DAsync(dev, 100, host, 200, 50, 5, cudaMemcpyHostToDevice, stream));
    OK(cudaMemcpy(back, dev, sizeof(host), cudaMemcpyDeviceToHost));
    CHECK(back[0] == 7 && back[49] == 7 && back[50] == 1 && back[449] == 7 && back[450] == 1);
    OK(cudaMemset2DAsync(dev, 100, 4, 10, 2, stream));
    OK(cudaMemcpy2D(back, 100, dev, 100, 20, 2, cudaMemcpyDeviceToHost));
    CHECK(back[9] == 4 && back[10] == 7 && back[109] == 4 && back[110] == 7);
    OK(cudaMemcpyPeer(dev + 500, 0, dev, 0, 10));
    OK(cudaMemcpy(back, dev + 500, 10, cudaMemcpyDeviceToHost));
    CHECK(back[9] == 4);
    OK(cudaFree(dev));
    OK(cudaStreamDestroy(stream));
}

static void copies_must_lie_in_live_memory_of_the_right_kind(void)
{
    char host[64];
    char *dev, *stale;

    OK(cudaMalloc((void **)&dev, 64));
    OK(cudaMalloc((void **)&stale, 64));
    OK(cudaFree(stale));
    FAILS(cudaMemcpy(dev, host, 65, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    FAILS(cudaMemcpy(dev + 1, host, 64, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    FAILS(cudaMemcpy(host, dev, 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    FAILS(cudaMemcpy(stale, host, 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    FAILS(cudaMemset(host, 0, 32), cudaErrorInvalidValue);
    FAILS(cudaMemcpy(dev, host, 4, (enum cudaMemcpyKind)9), cudaErrorInvalidMemcpyDirection);
    FAILS(cudaMemcpy(NULL, host, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    OK(cudaMemcpy(dev, host, 64, cudaMemcpyDefault));
    FAILS(cudaFree(stale), cudaErrorInvalidValue);
    FAILS(cudaFree(dev + 1), cudaErrorInvalidValue);
    OK(cudaFree(dev));
    OK(cudaFree(NULL));
}

static void fresh_memory_is_filled_and_aligned_and_known(void)
{
    struct cudaPointerAttributes attr;
    unsigned char *dev;
    int local;

    OK(cudaSetDevice(2));
    OK(cudaMalloc((void **)&dev, 10000));
    CHECK((size_t)dev % 4096 == 0 && dev[0] == 0xcb && dev[9999] == 0xcb);
    OK(cudaSetDevice(0));
    CHECK(lcrig_is_device_memory(dev, 10000) && lcrig_is_device_memory(dev + 9999, 1));
    CHECK(!lcrig_is_device_memory(dev + 1, 10000) && !lcrig_is_device_memory(&local, 1));
    CHECK(lcrig_memory_device(dev + 5) == 2 && lcrig_memory_device(&local) == -1);
    OK(cudaPointerGetAttributes(&attr, dev + 17));
    CHECK(attr.type == cudaMemoryTypeDevice && attr.device == 2 && attr.devicePointer == dev + 17);
    OK(cudaPointerGetAttributes(&attr, &local));
    CHECK(attr.type == cudaMemoryTypeUnregistered);
    OK(cudaFree(dev));
    OK(cudaMalloc((void **)&dev, 0));
    CHECK(!dev);
}

static void memory_ends(void)
{
    size_t before, during, total;
    void *dev, *more;

    OK(cudaMemGetInfo(&before, &total));
    OK(cudaMalloc(&dev, total / 2));
    OK(cudaMemGetInfo(&during, &total));
    CHECK(during < before - total / 2 + 1 && during > total / 4);
    FAILS(cudaMalloc(&more, total / 2), cudaErrorMemoryAllocation);
    FAILS(cudaMalloc(&more, (size_t)-1), cudaErrorMemoryAllocation);
    OK(cudaFree(dev));
    OK(cudaMemGetInfo(&during, &total));
    CHECK(during == before);
}

/* More turns than the device could hold allocations side by side: freed room is found again. */
static void freed_memory_is_used_again(void)
{
    size_t free_bytes, total;
    char *kept, *dev;

    OK(cudaMemGetInfo(&free_bytes, &total));
    OK(cudaMalloc((void **)&kept, 100));
    for (int i = 0; i < 40; i++) {
        OK(cudaMalloc((void **)&dev, total / 5));
        OK(cudaMemset(dev, i, 100));
        OK(cudaFree(dev));
    }
    OK(cudaFree(kept));
}

static void free_waits_for_the_device(void)
{
    struct gate gate = GATE_INIT;
    cudaStream_t stream;
    void *dev;
    pthread_t opener;

    OK(cudaMalloc(&dev, 100));
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    enqueue(stream, gate_pass, &gate);
    CHECK(!pthread_create(&opener, NULL, open_gate_later, &gate));
    OK(cudaFree(dev));
    OK(cudaStreamQuery(stream));
    CHECK(!pthread_join(opener, NULL));
    OK(cudaStreamDestroy(stream));
}

static void stream_ordered_memory_comes_and_goes_in_order(void)
{
    struct gate gate = GATE_INIT;
    cudaStream_t stream;
    char *dev;
    char back[8];

    OK(cudaStreamCreate(&stream));
    enqueue(stream, gate_pass, &gate);
    OK(cudaMallocAsync((void **)&dev, 8, stream));
    OK(cudaMemsetAsync(dev, 5, 8, stream));
    OK(cudaFreeAsync(dev, stream));
    CHECK(lcrig_is_device_memory(dev, 8)); /* not yet */
    gate_open(&gate);
    OK(cudaStreamSynchronize(stream));
    CHECK(!lcrig_is_device_memory(dev, 8));
    FAILS(cudaFreeAsync(dev, stream), cudaErrorInvalidValue);
    FAILS(cudaMemcpyAsync(back, dev, 8, cudaMemcpyDeviceToHost, stream), cudaErrorInvalidValue);
    OK(cudaStreamDestroy(stream));
}

static void pinned_copies_are_asynchronous_and_pageable_ones_wait(void)
{
    struct gate gate = GATE_INIT;
    cudaStream_t stream;
    pthread_t opener;
    char *pinned, *dev;
    char pageable[16];

    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMallocHost((void **)&pinned, 16));
    OK(cudaMalloc((void **)&dev, 16));
    OK(cudaMemset(dev, 3, 16));
    OK(cudaDeviceSynchronize());
    memset(pinned, 1, 16);
    enqueue(stream, gate_pass, &gate);
    OK(cudaMemcpyAsync(pinned, dev, 16, cudaMemcpyDeviceToHost, stream));
    CHECK(pinned[0] == 1);
    CHECK(!pthread_create(&opener, NULL, open_gate_later, &gate));
    OK(cudaMemcpyAsync(pageable, dev, 16, cudaMemcpyDeviceToHost, stream));
    CHECK(pageable[15] == 3 && pinned[0] == 3);
    CHECK(!pthread_join(opener, NULL));
    OK(cudaFreeHost(pinned));
    OK(cudaFree(dev));
    OK(cudaStreamDestroy(stream));
}

static void host_memory_is_registered_once(void)
{
    static char buffer[8192];
    struct cudaPointerAttributes attr;
    void *dev;

    OK(cudaHostRegister(buffer, sizeof(buffer), cudaHostRegisterDefault));
    FAILS(cudaHostRegister(buffer + 100, 10, 0), cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaPointerGetAttributes(&attr, buffer + 1));
    CHECK(attr.type == cudaMemoryTypeHost);
    OK(cudaHostGetDevicePointer(&dev, buffer, 0));
    CHECK(dev == buffer);
    OK(cudaHostUnregister(buffer));
    FAILS(cudaHostUnregister(buffer), cudaErrorHostMemoryNotRegistered);
}

static void reset_takes_everything_of_one_device(void)
{
    cudaStream_t stream;
    cudaEvent_t event;
    void *here, *there;

    OK(cudaMalloc(&there, 64));
    OK(cudaSetDevice(3));
    OK(cudaMalloc(&here, 64));
    OK(cudaStreamCreate(&stream));
    OK(cudaEventCreate(&event));
    OK(cudaMemsetAsync(here, 0, 64, stream));
    OK(cudaDeviceReset());
    CHECK(!lcrig_is_device_memory(here, 1) && lcrig_is_device_memory(there, 1));
    FAILS(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
    OK(cudaSetDevice(0));
    OK(cudaFree(there));
}

static void devices_are_described(void)
{
    struct cudaDeviceProp prop, other;
    char id[16];
    int count, device, value;

    OK(cudaGetDeviceCount(&count));
    CHECK(count == 16);
    FAILS(cudaSetDevice(16), cudaErrorInvalidDevice);
    OK(cudaGetDeviceProperties(&prop, 0));
    OK(cudaGetDeviceProperties(&other, 15));
    CHECK(memcmp(&prop.uuid, &other.uuid, sizeof(prop.uuid)) != 0 &&
          prop.pciBusID != other.pciBusID);
    OK(cudaDeviceGetPCIBusId(id, sizeof(id), 15));
    OK(cudaDeviceGetByPCIBusId(&device, id));
    CHECK(device == 15);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 15));
    CHECK(value == prop.multiProcessorCount);
    OK(cudaDeviceCanAccessPeer(&value, 0, 1));
    CHECK(value == 1);
    OK(cudaDeviceEnablePeerAccess(1, 0));
    FAILS(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
    CHECK(!strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady"));
    CHECK(cudaGetErrorString((cudaError_t)12345));
}

int main(void)
{
    memory_is_copied_and_filled();
    copies_must_lie_in_live_memory_of_the_right_kind();
    fresh_memory_is_filled_and_aligned_and_known();
    memory_ends();
    freed_memory_is_used_again();
    free_waits_for_the_device();
    stream_ordered_memory_comes_and_goes_in_order();
    pinned_copies_are_asynchronous_and_pageable_ones_wait();
    host_memory_is_registered_once();
    reset_takes_everything_of_one_device();
    devices_are_described();
    return 0;
}
