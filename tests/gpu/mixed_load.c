/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products beside, by a library of its own (mixed_load.cu). */
#include "tests/gpu/mixed.h"

#include <dlfcn.h>
#include <stdlib.h>

#define MOST_TIMES 6 /* half a millisecond each, perhaps */

struct mx_load {
    void *library, *handle;
    int (*add)(void *handle, cudaStream_t stream, int times);
    int (*check)(void *handle, unsigned *out);
    void (*free)(void *handle);
};

struct mx_load *mx_load_begin(const struct mx_rank *me, const char *path, int device)
{
    void *(*make)(int device, unsigned salt);
    struct mx_load *load;

    if (me->rig || !path)
        return NULL;
    load = calloc(1, sizeof(*load));
    CHECK(load);
    load->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!load->library)
        fprintf(stderr, "rank %d: %s\n", me->rank, dlerror());
    CHECK(load->library);
    *(void **)&make = dlsym(load->library, "lc_test_load_new");
    *(void **)&load->add = dlsym(load->library, "lc_test_load_add");
    *(void **)&load->check = dlsym(load->library, "lc_test_load_check");
    *(void **)&load->free = dlsym(load->library, "lc_test_load_free");
    CHECK(make && load->add && load->check && load->free);
    load->handle = make(device, (unsigned)me->rank);
    CHECK(load->handle);
    return load;
}

void mx_load_add(struct mx_rank *me, cudaStream_t stream)
{
    if (me->load)
        CHECK(me->load->add(me->load->handle, stream,
                            1 + (int)mx_draw(&me->random, stream ? 1 : MOST_TIMES)) == 0);
}

void mx_load_check(struct mx_rank *me)
{
    unsigned wrong = 0;

    if (!me->load)
        return;
    CHECK(me->load->check(me->load->handle, &wrong) == 0);
    CHECK(wrong == 0);
}

void mx_load_end(struct mx_rank *me)
{
    if (!me->load)
        return;
    me->load->free(me->load->handle);
    free(me->load);
    me->load = NULL;
}
