/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands for libtorch_cuda.so. As there, the version is a constant and the unique id is a call. */
#ifdef HIDDEN
#pragma GCC visibility push(hidden)
#include <nccl.h>
#pragma GCC visibility pop
#else
#include <nccl.h>
#endif
#include <dlfcn.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int fake_unique_id(ncclUniqueId *id);
EXPORT int fake_all_reduce(void);

#ifdef OPEN_NCCL

int fake_unique_id(ncclUniqueId *id)
{
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    ncclResult_t (*call)(ncclUniqueId *);

    if (!lib)
        return ncclSystemError;
    *(void **)&call = dlsym(lib, "ncclGetUniqueId");
    return call ? (int)call(id) : (int)ncclSystemError;
}

#else

int fake_unique_id(ncclUniqueId *id)
{
    return (int)ncclGetUniqueId(id);
}

/* Never called: the doctor looks for the name in the symbol table. */
int fake_all_reduce(void)
{
    return (int)ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, NULL, NULL);
}

#endif
