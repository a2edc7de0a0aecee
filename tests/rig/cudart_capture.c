/* SPDX-License-Identifier: Apache-2.0
 *
 * Stream capture (not built yet: nothing is ever captured).
 */
#include "tests/rig/cudart_internal.h"

cudaError_t rt_capture_check_unsafe(void)
{
    return cudaSuccess;
}

cudaError_t rt_capture_add(struct rt_stream *stream, struct rt_piece *piece,
                           enum cudaGraphNodeType type)
{
    return cudaErrorNotSupported;
}

cudaError_t rt_capture_record(struct rt_stream *stream, struct rt_event *event, bool external)
{
    return cudaErrorNotSupported;
}

cudaError_t rt_capture_wait(struct rt_stream *stream, struct rt_event *event, bool external)
{
    return cudaErrorNotSupported;
}

cudaError_t rt_capture_spoil(struct rt_capture *capture, cudaError_t err)
{
    return err;
}

cudaError_t rt_capture_join(struct rt_stream *stream, struct rt_event *event)
{
    return cudaErrorNotSupported;
}

void rt_nodes_clear(struct rt_nodes *set)
{
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    *status = cudaStreamCaptureStatusNone;
    return rt_enter(__func__);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    *mode = cudaStreamCaptureModeGlobal;
    return rt_enter(__func__);
}
