/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the NCCL in use is. Shared by libloongcomm.so and by the proxy; links with libc only. */
#ifndef LC_INTERPOSE_FIND_H
#define LC_INTERPOSE_FIND_H

#include <stdbool.h>

/* Exported by our libnccl.so.2, so that nobody takes the proxy for NCCL: const char *(void), loads the real NCCL
 * if none is loaded, and returns its path, or NULL. */
#define LC_PROXY_NCCL "loongcommProxyNccl"

/* An object file that holds an NCCL. */
struct lc_nccl {
    void *handle;     /* from dlopen(RTLD_NOLOAD); kept for the life of the process */
    const char *path; /* owned by the loader, valid as long as the handle is held */
};

/* Takes over a handle from dlopen: keeps it in *out if it is an NCCL (or a tracer in front of one) and not ours,
 * else closes it. */
bool lc_nccl_open(void *handle, struct lc_nccl *out);

/* Finds the object that holds this address, if it is neither ourselves nor the proxy. Fills *out then,
 * holding a reference to the object. */
bool lc_nccl_at(const void *addr, struct lc_nccl *out);

/* True for a whole NCCL, false for a library that stands in front of one (a tracer, say). */
bool lc_nccl_is_whole(const struct lc_nccl *nccl);

/* Looks among the objects that are already loaded, never loads one: first the name libnccl.so.2, then every
 * file called libnccl.so*, then libtorch_cuda* (NCCL linked in), then any other that defines NCCL's functions
 * itself. False if there is none. */
bool lc_nccl_find_loaded(struct lc_nccl *out);

/* If the proxy is what the program got in place of NCCL: asks it for the real one. */
bool lc_nccl_find_by_proxy(struct lc_nccl *out);

#endif
