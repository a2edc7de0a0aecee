/* SPDX-License-Identifier: Apache-2.0
 *
 * From the public calls to launches. api.c checks arguments and cuts lists into launches; a backend (cuda_*.cu or
 * host.c, one per library) runs each launch.
 */
#ifndef LK_LIST_INTERNAL_H
#define LK_LIST_INTERNAL_H

#include "kernels/loongkernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LK_API __attribute__((visibility("default")))

/* One tensor or part of one, as it travels by value in the kernel's arguments. */
struct lk_entry {
    uint64_t src;
    uint64_t dst;
    uint32_t count;
    uint32_t chunk; /* number of the entry's first chunk in the launch; filled in by the backend */
};

/* What the entries of a launch have in common. */
struct lk_head {
    uint64_t index; /* element number for the generator = index + dst / 2, modulo 2^64 */
    uint64_t seed;
    const uint64_t *device_offset;
    const void *scale_pointer;
    float scale;
    uint16_t scale_type; /* enum lk_type */
    uint16_t n;
};

/* Size classes of the argument block. The largest is what a kernel takes since CUDA 12.1. */
#define LK_SMALL_ENTRIES  ((256 - sizeof(struct lk_head)) / sizeof(struct lk_entry))
#define LK_MEDIUM_ENTRIES ((4096 - sizeof(struct lk_head)) / sizeof(struct lk_entry))
#define LK_MAX_ENTRIES    ((32764 - sizeof(struct lk_head)) / sizeof(struct lk_entry))

/* Longer tensors become several entries: counts stay below 2^32 with room for the alignment of chunks. */
#define LK_ENTRY_ELEMENTS (UINT64_C(1) << 31)

enum lk_work {
    LK_CAST_PACK_NEAREST,
    LK_CAST_PACK_STOCHASTIC,
    LK_CAST_UNPACK,
    LK_COPY_2, /* bytes an element */
    LK_COPY_4,
};

/* head and the used class of entries are the kernel's argument as they lie here. */
struct lk_launch {
    enum lk_work work;
    struct lk_head head;
    struct lk_entry entries[LK_MAX_ENTRIES]; /* head.n of them */
};

/* Where a launch's random numbers come from; element i of what it writes draws number index + i, and *device_offset more
 * (NULL: none). */
struct lk_draws {
    uint64_t seed;
    uint64_t index;
    const uint64_t *device_offset;
};

struct lk_sum {
    const void *shards;
    void *out;
    uint64_t stride;
    uint64_t count;
    const void *scale_pointer;
    struct lk_draws draws;
    float scale;
    uint32_t n;
    uint16_t scale_type;
    uint16_t out_type;
    enum lk_rounding rounding; /* LK_STOCHASTIC only with bf16 */
};

struct lk_feedback {
    const float *in;
    uint16_t *packed;
    float *residual;
    uint64_t count;
    const void *scale_pointer;
    struct lk_draws draws;
    float scale;
    enum lk_type scale_type;
    enum lk_rounding rounding;
};

struct lk_count {
    uint64_t *word;
    uint64_t by;
};

struct lk_comparison {
    const void *got;
    const void *want;
    uint64_t count;
    void *work;
    struct lk_difference *out;
    enum lk_type type;
};

/* Of the backend. head.n >= 1 and count >= 1. May fill in the entries' chunks. */
int lk_run_launch(struct lk_launch *launch, void *stream);
int lk_run_sum(const struct lk_sum *sum, void *stream);
int lk_run_feedback(const struct lk_feedback *feedback, void *stream);
int lk_run_compare(const struct lk_comparison *comparison, void *stream); /* count may be 0 */
int lk_run_count(const struct lk_count *count, void *stream);

/* Of the CUDA backend: loads its kernels on the current device. 0 or a cudaError_t. */
int lk_load_lists(void);
int lk_load_sum(void);
int lk_load_compare(void);
int lk_load_feedback(void);
int lk_load_count(void);

#ifdef __cplusplus
}
#endif

#endif
