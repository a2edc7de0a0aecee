/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels library. libloongkernels.so runs them on the current CUDA device, libloongkernels-host.so on the
 * processor; both export the functions below, give the same bits and take the same arguments.
 *
 * Calls. Everything is ordered by the stream and returns without waiting for it. libloongkernels.so allocates
 * nothing, copies nothing to the device beside kernel arguments and never synchronises: any call may be captured in
 * a CUDA graph, provided that lk_load_all() has run on the device before. Lists of tensors are read during the call
 * and may be reused when it returns; what they point to, and device scalars, are read when the stream gets there.
 * Functions are thread safe. The device of `stream` must be current.
 *
 * Result. 0; a negative errno value for an argument that cannot be served (-EINVAL, also for a forbidden overlap) or
 * -ENOMEM (host library with an enqueue function only); a positive value is the cudaError_t with which a launch
 * failed. After an error of validation nothing was launched; after a launch error part of a list may have been.
 *
 * Values. bf16 is the upper half of fp32. Infinities, -0.0 and denormals (of both types) are kept. Narrowing a NaN
 * gives a NaN of the same sign and upper payload bits with the quiet bit set; a NaN made by scaling (infinity times
 * 0, a NaN scale) is 0x7fff. Widening keeps every bit. Finite values beyond bf16's range become infinities by the
 * rounding rule.
 *
 * Alignment. Pointers are aligned to their element, any count is allowed. Fast paths, per tensor: both sides
 * aligned to 16 bytes, which packed offsets that are multiples of LK_PACK_ALIGN elements give. A tensor whose two
 * sides differ in alignment is served correctly by element-wise accesses.
 *
 * Overlap. A tensor of a list must not overlap the packed range (lowest to highest packed element of the call, gaps
 * included): -EINVAL. Not checked: outputs that overlap each other. Gaps of the packed range are never written.
 */
#ifndef LOONGKERNELS_H
#define LOONGKERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LK_ABI_VERSION 4
#define LK_PACK_ALIGN  8 /* elements */

enum lk_type {
    LK_FP32 = 0,
    LK_BF16 = 1,
    LK_FP16 = 2,
};

enum lk_rounding {
    LK_NEAREST = 0, /* ties to even */
    LK_STOCHASTIC =
        1, /* towards zero or away from it with the probability that makes the mean exact */
};

/* One tensor: `count` elements at `ptr`, which lie at element `offset` of the packed buffer. Packing only reads
 * *ptr. Entries with count 0 are skipped, whatever else they hold. */
struct lk_tensor {
    void *ptr;
    uint64_t count;
    uint64_t offset;
};

/* A factor applied in fp32. If device_value is not NULL the factor is the scalar of `type` that it points to,
 * read in stream order and widened to fp32; else it is `value`. */
struct lk_scale {
    float value;
    enum lk_type type; /* of *device_value */
    const void *device_value;
};

/* Stochastic rounding draws 16 random bits per element from Philox4x32-10: element e of the sequence takes bits
 * 16 * (e % 2) .. of word (e % 8) / 2 of the block with key `seed` and counter e / 8. The wire's element i is element
 * offset + *device_offset + i, however a list cuts it. A caller that never wants to reuse a number adds at least the
 * packed length to the offset after each call; multiples of LK_PACK_ALIGN keep the fast path. device_offset may be
 * NULL (0); it is what changes between replays of a graph. */
struct lk_rng {
    uint64_t seed;
    uint64_t offset;
    const uint64_t *device_offset;
};

/* Version of this interface in the library; a caller compares it with LK_ABI_VERSION. */
int lk_abi_version(void);

/* "cuda" or "host". */
const char *lk_backend(void);

/* Static text for a result of this library. */
const char *lk_error_text(int result);

/* Loads every kernel of this header on the current device, so that no later call loads a module (which waits for the device).
 * Also checks the driver: cudaErrorInsufficientDriver if it is older than lk_driver_needed(). Not for use under
 * capture. */
int lk_load_all(void);

/* The lowest driver, as cudaDriverGetVersion counts (1000 * major + 10 * minor); 0 in the host library. */
int lk_driver_needed(void);

/* The library's own CUDA runtime, for callers that must use the device without linking one: the address of the function
 * of this name, or NULL if it is none of those that callers need (or in the host library). It shares the primary context
 * with every other runtime of the process; streams and events may be handed back and forth. */
void *lk_runtime_symbol(const char *name);

/* packed[offset + i] = bf16(scale * ptr[i]): fp32 tensors to a bf16 buffer. scale may be NULL (1); rng may be NULL
 * with LK_NEAREST. The product is rounded to fp32 before it is rounded to bf16. */
int lk_cast_pack(const struct lk_tensor *tensors, size_t n, void *packed,
                 const struct lk_scale *scale, enum lk_rounding rounding, const struct lk_rng *rng,
                 void *stream);

/* packed[i] = bf16(scale * in[i] + what residual[i] owes): error feedback. residual[i] gets what rounding has lost, for the
 * next call; it is all zero before the first. Whatever it holds does no harm: at most one part in 256 of
 * scale * in[i] is added at a time, the rest is owed further on, and of more than 65 times that much the rest is forgotten,
 * as it comes from other data. A scaled value of 0 is sent as it is, and so is one that is infinite or a NaN, which also
 * ends what is owed. Element i draws as the wire's element i does. The three ranges must not overlap; in and residual are
 * aligned to 4 bytes. */
int lk_cast_feedback(const float *in, uint64_t count, void *packed, float *residual,
                     const struct lk_scale *scale, enum lk_rounding rounding,
                     const struct lk_rng *rng, void *stream);

/* ptr[i] = packed[offset + i]: a bf16 buffer to fp32 tensors. */
int lk_cast_unpack(const struct lk_tensor *tensors, size_t n, const void *packed, void *stream);

/* The same without conversion, bit for bit. */
int lk_pack(const struct lk_tensor *tensors, size_t n, void *packed, enum lk_type type,
            void *stream);
int lk_unpack(const struct lk_tensor *tensors, size_t n, const void *packed, enum lk_type type,
              void *stream);

/* out[i] = scale * (shards[i] + shards[stride + i] + shards[2 * stride + i] ...): n bf16 shards added in fp32 in this
 * order, rounded once if out_type is LK_BF16: to nearest (rng NULL), or stochastically, where out[i] draws as the wire's
 * element i does; LK_FP32 is not rounded. n >= 1, stride >= count unless
 * n is 1. A NaN result is 0x7fff (bf16) or 0x7fffffff. `out` may be one of the shards exactly (bf16 only); any other
 * overlap with the shards' range, gaps included, is -EINVAL. scale may be NULL (1). */
int lk_sum_shards(const void *shards, size_t n, uint64_t stride, uint64_t count, void *out,
                  enum lk_type out_type, const struct lk_scale *scale, const struct lk_rng *rng,
                  void *stream);

/* *word += by, modulo 2^64, in stream order: an lk_rng's device_offset that runs on, also from replay to replay of a graph. word
 * is aligned to 8 bytes. */
int lk_count_up(uint64_t *word, uint64_t by, void *stream);

/* How far a result is from another one of the same sum. */
struct lk_difference {
    double
        relative; /* L2 norm of got - want over that of want; infinite if want alone is all zero */
    double most;  /* largest |got[i] - want[i]| */
    uint64_t
        strange; /* elements of which one is infinite or a NaN and the other one is not the same; left out above */
    uint64_t done; /* the caller's 0; 1 when all else is written: released at system scope */
};

#define LK_COMPARE_BYTES ((size_t)4096)

/* Writes into *out, memory that both the device and the caller read, how far `count` elements of `got` are from those of
 * `want`. In fp64; the libraries add in different orders. work: LK_COMPARE_BYTES of the device, aligned to 16 bytes, zeroed
 * before the first call, for calls one after the other. A count of 0 differs by nothing. */
int lk_compare(const void *got, const void *want, uint64_t count, enum lk_type type, void *work,
               struct lk_difference *out, void *stream);

#ifdef __cplusplus
}
#endif

#endif
