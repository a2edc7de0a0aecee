/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the NCCL in use is. Shared by libloongcomm.so and by the proxy; links with libc only. */
#ifndef LC_INTERPOSE_FIND_H
#define LC_INTERPOSE_FIND_H

#include <stdbool.h>

/* Exported by our libnccl.so.2, so that nobody takes the proxy for NCCL. */
#define LC_PROXY_MARKER "loongcommProxyMarker"

/* An object file that holds an NCCL. */
struct lc_nccl {
    void *handle;     /* from dlopen(RTLD_NOLOAD); kept for the life of the process */
    const char *path; /* owned by the loader, valid as long as the handle is held */
};

/* Finds the object that holds this address, if it is neither ourselves nor the proxy. Fills *out then,
 * holding a reference to the object. */
bool lc_nccl_at(const void *addr, struct lc_nccl *out);

/* True for a whole NCCL, false for a library that stands in front of one (a tracer, say). */
bool lc_nccl_is_whole(const struct lc_nccl *nccl);

/* Looks among the objects that are already loaded, never loads one: first the name libnccl.so.2, then every
 * file called libnccl.so*, then libtorch_cuda* (NCCL linked in), then any other that defines NCCL's functions
 * itself. False if there is none. */
bool lc_nccl_find_loaded(struct lc_nccl *out);

#endif
