/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_TESTS_KERNELS_FAKE_STREAMS_H
#define LC_TESTS_KERNELS_FAKE_STREAMS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

/* The time at which the next event is recorded. Of the tests' only thread, as is everything here. */
extern float fake_ms;

/* Something is launched on a stream. false: it is one of those that were made here, and it does not wait for the caller's. */
bool fake_launch(cudaStream_t stream);

#endif
