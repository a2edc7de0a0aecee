/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels library and the CUDA runtime, opened at first need: libloongkernels.so with the static runtime inside it,
 * or libloongkernels-host.so with the host runtime of the rig. Nothing else in interpose/ calls CUDA.
 */
#ifndef LC_INTERPOSE_BACKEND_H
#define LC_INTERPOSE_BACKEND_H

#include "kernels/rings.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>

struct lc_backend {
#define LK_SYM(name) __typeof__(name) *name;
#include "kernels/api.def"
#undef LK_SYM
#define LK_RT(name) __typeof__(name) *name;
#include "kernels/runtime.def"
#undef LK_RT
};

/* NULL if there is none that works here; one line then says why. The first call opens libraries and may be slow; it
 * loads no kernel. Later calls are one atomic load. Never under a stream capture, never on the path of a committed
 * call for the first time. */
const struct lc_backend *lc_backend(void);

/* Loads the kernels on a device, or if negative on the current one, at the making of a communicator: NCCL has just waited
 * for the device itself. Later it could be for ever: loading waits for all that runs, and that may be a receive whose
 * sender waits for this rank's next call. Failures show when a communicator is set up. */
void lc_backend_load(int device);

/* Between these the thread's CUDA calls act on `device` and are legal whatever the program captures. `begin` is false
 * if the device cannot be made current; nothing is to be undone then. */
struct lc_guard {
    int previous;
    enum cudaStreamCaptureMode mode;
};
bool lc_guard_begin(const struct lc_backend *backend, int device, struct lc_guard *guard);
void lc_guard_end(const struct lc_backend *backend, int device, const struct lc_guard *guard);

#endif
