/* SPDX-License-Identifier: Apache-2.0
 *
 * The host kernels with a mistake in each that sends data: for tests of who sees it. */
#include "kernels/rings.h"

#include "tests/check.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#define REAL(name)                        \
    __typeof__(name) *real;               \
    void *addr = dlsym(RTLD_NEXT, #name); \
                                          \
    CHECK(addr &&memcpy(&real, &addr, sizeof(real)))

/* So that the linker keeps the library with all the rest. */
__attribute__((used)) static int (*const rest)(void) = lk_abi_version;

/* MISTAKEN_RANKS: more ranks than these they do not serve; there is no other mistake then. */
EXPORT size_t lk_ring_bytes(const struct lk_ring_shape *shape)
{
    const char *most = getenv("MISTAKEN_RANKS");

    REAL(lk_ring_bytes);
    return most && shape->ranks > strtoul(most, NULL, 10) ? 0 : real(shape);
}

/* A fiftieth too much. */
static struct lk_scale wrong(const struct lk_scale *scale)
{
    struct lk_scale made = scale ? *scale : (struct lk_scale){ .value = 1 };

    if (!getenv("MISTAKEN_RANKS"))
        made.value *= 1.02f;
    return made;
}

EXPORT int lk_cast_pack(const struct lk_tensor *tensors, size_t n, void *packed,
                        const struct lk_scale *scale, enum lk_rounding rounding,
                        const struct lk_rng *rng, void *stream)
{
    struct lk_scale made = wrong(scale);

    REAL(lk_cast_pack);
    return real(tensors, n, packed, &made, rounding, rng, stream);
}

/* One element too far on. */
EXPORT int lk_pack(const struct lk_tensor *tensors, size_t n, void *packed, enum lk_type type,
                   void *stream)
{
    struct lk_tensor *list = calloc(n, sizeof(*list));
    int result;

    REAL(lk_pack);
    CHECK(list);
    for (size_t i = 0; i < n; i++) {
        list[i] = tensors[i];
        list[i].ptr = (char *)tensors[i].ptr + (type == LK_FP32 ? 4 : 2);
        list[i].count--;
    }
    result = real(list, n, packed, type, stream);
    free(list);
    return result;
}

#define RINGS(name)                                                                       \
    EXPORT int name(const struct lk_rings *rings, const struct lk_reduction *how,         \
                    const struct lk_buffers *list, size_t n, uint32_t ctas, void *stream) \
    {                                                                                     \
        struct lk_scale made = wrong(how->pre);                                           \
        struct lk_reduction other = *how;                                                 \
                                                                                          \
        REAL(name);                                                                       \
        other.pre = &made;                                                                \
        return real(rings, &other, list, n, ctas, stream);                                \
    }
RINGS(lk_rings_all_reduce)
RINGS(lk_rings_reduce_scatter)
RINGS(lk_lines_all_reduce)
