/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/check.h"
#include "tests/kernels/compute.h"
#include "tests/kernels/reference.h"

#include <dlfcn.h>
#include <string.h>

#define GUARD      ((size_t)64)
#define GUARD_BYTE 0xa5

void compute_open(struct compute_target *target, const char *path)
{
    target->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!target->handle)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(target->handle);
#define LK_SYM(name) CHECK((*(void **)&target->lib.name = dlsym(target->handle, #name)));
#include "kernels/attention.def"
#include "kernels/blocks.def"
#include "kernels/compute.def"
    LK_SYM(lk_error_text)
    LK_SYM(lk_backend)
#undef LK_SYM
}

bool error_says(const struct compute_target *target, const char *call, const char *text)
{
    const char *error = target->lib.lk_compute_error();

    if (strncmp(error, call, strlen(call)) == 0 && strstr(error, text))
        return true;
    fprintf(stderr, "\"%s\" has no \"%s ... %s\"\n", error, call, text);
    return false;
}

struct memory memory_new(const struct compute_target *target, size_t bytes, size_t shift)
{
    struct memory memory = { .target = target, .bytes = bytes, .shift = shift };
    size_t whole = bytes + shift + 2 * GUARD;

    memory.near = malloc(whole);
    CHECK(memory.near);
    memory.far = target->alloc(whole);
    CHECK(memory.far);
    memset(memory.near, GUARD_BYTE, whole);
    memory.near += GUARD + shift;
    memory.far += GUARD + shift;
    return memory;
}

void memory_up(const struct memory *memory)
{
    size_t before = GUARD + memory->shift;

    memory->target->put(memory->far - before, memory->near - before,
                        memory->bytes + before + GUARD);
}

void memory_down(const struct memory *memory)
{
    size_t before = GUARD + memory->shift;

    memory->target->get(memory->near - before, memory->far - before,
                        memory->bytes + before + GUARD);
    for (size_t i = 1; i <= before; i++)
        CHECK(*(memory->near - i) == GUARD_BYTE);
    for (size_t i = 0; i < GUARD; i++)
        CHECK(memory->near[memory->bytes + i] == GUARD_BYTE);
}

void memory_free(struct memory *memory)
{
    free(memory->near - GUARD - memory->shift);
    memory->target->release(memory->far - GUARD - memory->shift);
}

double random_unit(uint64_t *state)
{
    return (double)(ref_next(state) >> 11) * 0x1p-52 - 1;
}

uint16_t random_half(int exponent, uint64_t *state)
{
    uint64_t bits = ref_next(state);

    return (uint16_t)((bits & 0x83ff) | (15 + (uint64_t)exponent + (bits >> 20) % 4) << 10);
}

uint16_t to_bf16(double x)
{
    return ref_nearest((float)x, 1);
}

double from_bf16(uint16_t bits)
{
    return (double)ref_float((uint32_t)bits << 16);
}

void *random_bf16(const struct compute_target *target, size_t count, uint64_t seed)
{
    uint16_t *near = malloc(count * 2), *far = target->alloc(count * 2);

    CHECK(near && far);
    for (size_t i = 0; i < count; i++)
        near[i] = to_bf16(random_unit(&seed));
    target->put(far, near, count * 2);
    free(near);
    return far;
}
