/* SPDX-License-Identifier: Apache-2.0
 *
 * Cases of the peer-mapped rings with what has to come out of them, bit for bit, worked out element by element. Whoever runs
 * them puts the arenas where the ranks can reach them and compares whole arenas afterwards: nothing but outputs may change.
 */
#ifndef LC_TESTS_RINGS_CASES_H
#define LC_TESTS_RINGS_CASES_H

#include "kernels/rings.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum rings_op {
    RINGS_ALL_REDUCE,
    RINGS_REDUCE_SCATTER,
    RINGS_LINES,
};

struct rings_case {
    const char *name;
    enum rings_op op;
    struct lk_ring_shape shape;
    enum lk_type type, wire;
    enum lk_rounding rounding;
    uint32_t ctas[3]; /* rank r uses ctas[r % 3] */
    uint32_t tensors; /* of random sizes up to `count`; 1: of `count` */
    uint64_t count;   /* elements */
    bool misaligned;  /* tensors begin anywhere */
    bool in_place;
    bool specials; /* NaN, infinities, -0.0, denormals */
    unsigned int
        zeros; /* per cent of runs of 512 bytes that are zero, two thirds of them on all ranks */
    float pre, post;
    uint64_t seed;
    bool fed; /* with residuals; some are of anything, some are what calls leave */
};

/* The same for every target. */
extern const struct rings_case rings_cases[];
extern const size_t rings_case_count;

/* A case of random parameters with at most `most` elements in all and at most `ranks` ranks. */
void rings_random_case(uint64_t seed, uint32_t ranks, uint64_t most, struct rings_case *out);

/* What one rank has. `in` and `out` of the list are offsets into the arenas; in place they are one arena. */
struct rings_rank {
    uint8_t *in, *out; /* before the call; out NULL: in place */
    uint8_t *expected; /* of out, or of in */
    size_t in_bytes, out_bytes;
    struct lk_buffers *list;
    struct lk_rng rng;
    float *residual; /* before the call; NULL: none */
    float *owed;     /* behind it */
};

struct rings_data {
    const struct rings_case *c;
    uint32_t n; /* entries of a list */
    size_t residual_bytes;
    struct rings_rank ranks[LK_RANKS_MAX];
};

struct rings_data *rings_data_make(const struct rings_case *c);
void rings_data_free(struct rings_data *data);

/* The reduction of a rank. *scale is written, too, and has to live as long. residual: where the call finds what the rank has,
 * NULL if that is none. */
struct lk_reduction rings_reduction(const struct rings_data *data, uint32_t rank,
                                    struct lk_scale *scale, float *residual);

/* Aborts with a message at the first byte, or residual, that is not as expected. */
void rings_compare(const struct rings_data *data, uint32_t rank, const uint8_t *got);
void rings_compare_residual(const struct rings_data *data, uint32_t rank, const float *got);

void rings_describe(const struct rings_case *c, char *text, size_t size);

#ifdef __cplusplus
}
#endif

#endif
