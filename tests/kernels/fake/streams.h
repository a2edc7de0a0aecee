/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_TESTS_KERNELS_FAKE_STREAMS_H
#define LC_TESTS_KERNELS_FAKE_STREAMS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

/* The time at which the next event is recorded. Of the tests' only thread, as is everything here. */
extern float fake_ms;

/* Something is launched on a stream. false: it is one of those that were made here and does not wait for the caller's, or
 * its workspace is in use on another one. */
bool fake_launch(cudaStream_t stream, const void *workspace, size_t bytes);

#endif
