/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls on rings, and what they must give, worked out from the words of rings.h and by other means than the library:
 * every value follows from the call and the rank alone, so each rank knows everybody's data without asking.
 */
#ifndef LC_TESTS_KERNELS_RINGS_REFERENCE_H
#define LC_TESTS_KERNELS_RINGS_REFERENCE_H

#include "kernels/rings.h"

#include <stdbool.h>

#define RING_TENSORS 2000u

enum ring_op {
    RING_ALL_REDUCE,
    RING_REDUCE_SCATTER,
    RING_LINES,
    RING_OPS,
};

enum ring_data {
    RING_NORMAL,
    RING_SPARSE,  /* mostly granules of zeros, some of them for all ranks */
    RING_SPECIAL, /* NaN, infinities, -0.0, denormals, extremes */
    RING_ZERO,
    RING_DATA,
};

struct ring_call {
    enum ring_op op;
    enum lk_type type;
    enum lk_type wire;
    enum ring_data data;
    uint64_t seed; /* of the data; rank r's generator has the key seed + r */
    bool stochastic;
    uint64_t draws;    /* first number of the generator, */
    bool device_draws; /* half of it read from memory */
    float pre;         /* exact in pre_type */
    bool device_pre;   /* read from memory */
    enum lk_type pre_type;
    float post;
    bool in_place;
    uint32_t in_skew; /* elements behind an aligned address */
    uint32_t out_skew;
    uint32_t ctas[LK_RANKS_MAX];
    size_t n;
    uint64_t counts[RING_TENSORS];
};

/* A call of defaults: sum of one tensor, one CTA. */
void ring_call_init(struct ring_call *call, enum ring_op op, enum lk_type type, enum lk_type wire,
                    uint64_t count, uint64_t seed);

/* Bytes of its tile space. */
uint64_t ring_call_bytes(const struct ring_call *call);

/* What `rank` gives of tensor t to `part` (0 but for a reduce-scatter): counts[t] elements. */
void ring_fill(const struct ring_call *call, uint32_t rank, uint32_t part, size_t t, void *out);

/* What `rank` must get, for the tensors of the list one after another. */
struct ring_expected;
struct ring_expected *ring_expect(const struct ring_call *call, const struct lk_ring_shape *shape);
void ring_expected_free(struct ring_expected *expected);
void ring_result(const struct ring_expected *expected, uint32_t rank, size_t t, void *out);

/* fp32 to fp16 and to bf16, to nearest even; NaN: 0x7fff. */
uint16_t ref_to_fp16(float x);

#endif
