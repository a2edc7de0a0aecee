/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/rig/test_cudart.h"

#define BYTES 100000

struct message {
    cudaIpcMemHandle_t handle;
    size_t offset;
};

static void give(int fd, const void *data, size_t bytes)
{
    CHECK(write(fd, data, bytes) == (ssize_t)bytes);
}

static void take(int fd, void *data, size_t bytes)
{
    CHECK(read(fd, data, bytes) == (ssize_t)bytes);
}

static void owner(int to, int from)
{
    struct message message = { .offset = 5000 };
    unsigned char *dev;
    void *before, *again;
    char done;

    OK(cudaMalloc(&before, 5));
    OK(cudaMalloc((void **)&dev, BYTES));
    OK(cudaMemset(dev, 1, BYTES));
    OK(cudaDeviceSynchronize());
    OK(cudaIpcGetMemHandle(&message.handle, dev + message.offset));
    FAILS(cudaIpcOpenMemHandle(&again, message.handle, cudaIpcMemLazyEnablePeerAccess),
          cudaErrorDeviceUninitialized);
    FAILS(cudaIpcGetMemHandle(&message.handle, &message), cudaErrorInvalidValue);
    OK(cudaIpcGetMemHandle(&message.handle, dev + message.offset));
    give(to, &message, sizeof(message));
    take(from, &done, 1);
    CHECK(dev[5000] == 42 && dev[4999] == 1 && dev[5100] == 1);
    OK(cudaFree(dev));
    OK(cudaFree(before));
    give(to, &done, 1);
}

static void opener(int to, int from)
{
    struct message message;
    struct cudaPointerAttributes attr;
    unsigned char *base, *same;
    char done = 0;

    take(from, &message, sizeof(message));
    OK(cudaIpcOpenMemHandle((void **)&base, message.handle, cudaIpcMemLazyEnablePeerAccess));
    CHECK(base[message.offset] == 1 && base[BYTES - 1] == 1); /* the base of the allocation */
    CHECK(lcrig_is_device_memory(base, BYTES) && !lcrig_is_device_memory(base, BYTES + 1));
    OK(cudaPointerGetAttributes(&attr, base));
    CHECK(attr.type == cudaMemoryTypeDevice);
    OK(cudaIpcOpenMemHandle((void **)&same, message.handle, cudaIpcMemLazyEnablePeerAccess));
    CHECK(same == base);
    OK(cudaMemset(base + message.offset, 42, 100));
    OK(cudaDeviceSynchronize());
    OK(cudaIpcCloseMemHandle(base));
    CHECK(base[0] == 1); /* the first opening holds */
    give(to, &done, 1);
    take(from, &done, 1);
    CHECK(base[0] == 0); /* freed by its owner: gone, but no fault */
    FAILS(cudaFree(base), cudaErrorInvalidValue);
    OK(cudaIpcCloseMemHandle(base));
    FAILS(cudaIpcCloseMemHandle(base), cudaErrorInvalidValue);
}

static void two_processes_share_an_allocation(void)
{
    int down[2], up[2], status;
    pid_t pid;

    CHECK(!pipe(down) && !pipe(up));
    pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        opener(up[1], down[0]);
        exit(0);
    }
    owner(down[1], up[0]);
    CHECK(waitpid(pid, &status, 0) == pid && left(status, 0));
}

/* The lender's id is no longer anybody's, or not of a process with that file. */
static void handles_of_the_dead_and_of_nobody_are_refused(void)
{
    cudaIpcMemHandle_t handle;
    void *ptr;
    int pipes[2], status;
    pid_t pid;

    CHECK(!pipe(pipes));
    pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        OK(cudaMalloc(&ptr, 100));
        OK(cudaIpcGetMemHandle(&handle, ptr));
        give(pipes[1], &handle, sizeof(handle));
        OK(cudaFree(ptr));
        exit(0);
    }
    take(pipes[0], &handle, sizeof(handle));
    CHECK(waitpid(pid, &status, 0) == pid && left(status, 0));
    FAILS(cudaIpcOpenMemHandle(&ptr, handle, cudaIpcMemLazyEnablePeerAccess),
          cudaErrorMapBufferObjectFailed);
    memset(&handle, 0, sizeof(handle));
    FAILS(cudaIpcOpenMemHandle(&ptr, handle, cudaIpcMemLazyEnablePeerAccess),
          cudaErrorInvalidValue);
}

int main(void)
{
    /* Each forks before it uses the runtime; so the second needs a process of its own. */
    if (fork() == 0) {
        two_processes_share_an_allocation();
        return 0;
    }
    {
        int status;

        CHECK(wait(&status) > 0 && left(status, 0));
    }
    handles_of_the_dead_and_of_nobody_are_refused();
    return 0;
}
