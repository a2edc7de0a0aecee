/* SPDX-License-Identifier: Apache-2.0
 *
 * verify: every collective of NCCL with every type, operation, odd sizes, odd places, on N processes, each
 * result compared byte for byte. Knows nothing of the library under test: whether that is preloaded is the
 * environment's business. Runs on real GPUs and on the rig. */
#ifndef LC_GPU_VERIFY_H
#define LC_GPU_VERIFY_H

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VF_BIG (((size_t)1 << 20) + 1)
#define VF_GUARD \
    ((size_t)256) /* bytes before and behind each receive buffer that must stay as they are */

/* What the program calls, by the names that the exit report uses. Bcast counts as Broadcast. */
enum vf_op {
    VF_ALL_REDUCE,
    VF_REDUCE_SCATTER,
    VF_ALL_GATHER,
    VF_ALL_TO_ALL,
    VF_BROADCAST,
    VF_REDUCE,
    VF_GATHER,
    VF_SCATTER,
    VF_SEND,
    VF_RECV,
    VF_OPS,
};

/* --- verify_data.c: types, patterns and what they sum to --- */

struct vf_type {
    const char *name;
    size_t size;
    ncclDataType_t type;
    int exponent_bits, mantissa_bits; /* of the floating ones */
    char kind;                        /* 'i' signed, 'u' unsigned, 'f' floating */
};
extern const struct vf_type vf_types[ncclNumTypes]; /* indexed by ncclDataType_t */

enum vf_redop {
    VF_SUM,
    VF_PROD,
    VF_MAX,
    VF_MIN,
    VF_AVG,
    VF_SCALED_HOST,   /* ncclRedOpCreatePreMulSum, scalar by value */
    VF_SCALED_DEVICE, /* the same, scalar in device memory */
    VF_REDOPS,
};
extern const char *const vf_redop_names[VF_REDOPS];

/* Small values whose every partial result is exact in the type: up to 8 ranks. */
#define VF_MAX_RANKS 8

void vf_encode(const struct vf_type *type, double value, void *out);
double vf_scale(const struct vf_type *type); /* the factor of VF_SCALED_* */

/* Elements begin .. begin + count of what `rank` puts in, and of the result over all ranks. */
void vf_fill_input(const struct vf_type *type, enum vf_redop op, int rank, size_t begin,
                   size_t count, void *out);
void vf_fill_result(const struct vf_type *type, enum vf_redop op, int ranks, size_t begin,
                    size_t count, void *out);

/* Data that only moves: arbitrary bits, NaNs and negative zeros among them, by source and target. */
void vf_fill_bits(size_t element, int source, int target, size_t count, void *out);

/* --- one rank --- */

struct vf_rank {
    int rank, ranks;
    int device, devices;
    bool quick;
    bool fp8_sums; /* reductions of 1-byte floats need compute capability 9 */
    int seconds;   /* of vf_sums; 0: none */
    ncclUniqueId id;
    ncclComm_t comm;
    cudaStream_t stream;
    unsigned char *device_send, *device_recv; /* room bytes each */
    unsigned char *host_in, *host_want, *host_got;
    size_t room;
    unsigned long long calls[VF_OPS];
    unsigned long long checks;
    unsigned failures;
    unsigned turn; /* counts cases: roots and variants are taken in turn */
};

__attribute__((noreturn)) void vf_die(const char *call, const char *error, const char *file,
                                      int line);
__attribute__((format(printf, 2, 3))) void vf_fail(struct vf_rank *rank, const char *fmt, ...);
__attribute__((format(printf, 2, 3))) void vf_note(const struct vf_rank *rank, const char *fmt,
                                                   ...);

#define VF_NCCL(call)                                                          \
    do {                                                                       \
        ncclResult_t vf_result_ = (call);                                      \
        if (vf_result_ != ncclSuccess)                                         \
            vf_die(#call, ncclGetErrorString(vf_result_), __FILE__, __LINE__); \
    } while (0)

#define VF_CUDA(call)                                                         \
    do {                                                                      \
        cudaError_t vf_error_ = (call);                                       \
        if (vf_error_ != cudaSuccess)                                         \
            vf_die(#call, cudaGetErrorString(vf_error_), __FILE__, __LINE__); \
    } while (0)

/* Compares device memory with host memory. Waits for the rank's stream. */
void vf_compare(struct vf_rank *rank, const void *device, const void *want, size_t bytes,
                const char *what);

void vf_collectives(struct vf_rank *rank); /* verify_collectives.c */
void vf_pairs(struct vf_rank *rank);       /* verify_pairs.c: send and receive */
void vf_comms(struct vf_rank *rank); /* verify_comms.c: split, shrink, InitAll, non-blocking, ... */
void vf_order(struct vf_rank *rank); /* verify_order.c: groups, streams, capture */
void vf_sums(struct vf_rank *rank);  /* verify_sums.c: all-reduces for some time */

/* An all-reduce of a sum over any communicator, checked. `count` floats. */
void vf_check_comm(struct vf_rank *rank, ncclComm_t comm, cudaStream_t stream, size_t count,
                   const char *what);

#endif
