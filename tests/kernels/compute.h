/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute kernels of one library under test, with the memory they work on, so that the same behaviours are checked on
 * the processor and on a device.
 */
#ifndef LC_TESTS_KERNELS_COMPUTE_H
#define LC_TESTS_KERNELS_COMPUTE_H

#include "kernels/loongattention.h"

#include <stdbool.h>
#include <stddef.h>

struct compute_lib {
#define LK_SYM(name) __typeof__(name) *name;
#include "kernels/attention.def"
#include "kernels/blocks.def"
#include "kernels/compute.def"
#undef LK_SYM
    __typeof__(lk_error_text) *lk_error_text;
    __typeof__(lk_backend) *lk_backend;
};

struct compute_target {
    struct compute_lib lib;
    void *handle;                 /* of dlopen */
    bool small;                   /* fewer cases, for runs under a checker */
    void *(*alloc)(size_t bytes); /* aligned to 256 bytes */
    void (*release)(void *ptr);
    void (*put)(void *dst, const void *src, size_t bytes); /* to the target's memory, waits */
    void (*get)(void *dst, const void *src, size_t bytes); /* waits for earlier calls too */
};

void compute_open(struct compute_target *target, const char *path);

/* Whether the text of the last failure begins with the call and has `text` in it. */
bool error_says(const struct compute_target *target, const char *call, const char *text);

/* Memory of the target with a copy here. Guard bytes lie around it. */
struct memory {
    const struct compute_target *target;
    size_t bytes;
    size_t shift;        /* of both pointers from an address that is aligned to 64 bytes */
    unsigned char *near; /* this process's copy */
    unsigned char *far;  /* the target's */
};

/* Filled with guard bytes. */
struct memory memory_new(const struct compute_target *target, size_t bytes, size_t shift);
void memory_up(const struct memory *memory);

/* Fetches and checks that nothing outside changed. */
void memory_down(const struct memory *memory);
void memory_free(struct memory *memory);

/* Deterministic data. */
double random_unit(uint64_t *state); /* in [-1, 1) */
uint16_t random_half(int exponent,
                     uint64_t *state); /* fp16, with this exponent or one of the next three */
uint16_t to_bf16(double x);
double from_bf16(uint16_t bits);

/* Memory of the target with bf16 of random_unit(). */
void *random_bf16(const struct compute_target *target, size_t count, uint64_t seed);

void check_adamw(const struct compute_target *target);

/* Both libraries' results of the same steps, as a number that depends on every bit. */
uint64_t adamw_fingerprint(const struct compute_target *target);

#endif
