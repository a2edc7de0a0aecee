/* SPDX-License-Identifier: Apache-2.0 */
#include "perf/kernels/peers.h"

#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

#define COMMS_MAX 8 /* numbers of CTAs */

static struct {
#define LK_SYM(name) __typeof__(name) *name;
#define FUNCTIONS                  \
    LK_SYM(ncclGetUniqueId)        \
    LK_SYM(ncclGetErrorString)     \
    LK_SYM(ncclGetVersion)         \
    LK_SYM(ncclCommInitRankConfig) \
    LK_SYM(ncclGroupStart)         \
    LK_SYM(ncclGroupEnd)           \
    LK_SYM(ncclAllReduce)          \
    LK_SYM(ncclSend)               \
    LK_SYM(ncclRecv)
    FUNCTIONS
#undef LK_SYM
} nccl;

static struct {
    uint32_t ctas;
    ncclComm_t comms[RANKS_MAX];
} sets[COMMS_MAX];
static int n_sets;
static const ncclComm_t *comms; /* in use */

static void must(ncclResult_t err, const char *what)
{
    if (err == ncclSuccess)
        return;
    fprintf(stderr, "%s: %s\n", what, nccl.ncclGetErrorString(err));
    exit(1);
}

bool nccl_open(const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    bool whole = handle != NULL;
    int version;

#define LK_SYM(name)                                                                    \
    nccl.name = handle ? (__typeof__(nccl.name))(uintptr_t)dlsym(handle, #name) : NULL; \
    whole = whole && nccl.name;
    FUNCTIONS
#undef LK_SYM
    if (!whole) {
        fprintf(stderr, "%s: %s\n", path, handle ? "too old" : dlerror());
        return false;
    }
    must(nccl.ncclGetVersion(&version), "ncclGetVersion");
    printf("NCCL %d\n", version);
    return true;
}

void nccl_use(uint32_t ctas)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;

    for (int i = 0; i < n_sets; i++) {
        if (sets[i].ctas == ctas) {
            comms = sets[i].comms;
            return;
        }
    }
    if (n_sets == COMMS_MAX)
        exit(1);
    if (ctas)
        config.minCTAs = config.maxCTAs = (int)ctas;
    sets[n_sets].ctas = ctas;
    must(nccl.ncclGetUniqueId(&id), "ncclGetUniqueId");
    must(nccl.ncclGroupStart(), "ncclGroupStart");
    for (uint32_t r = 0; r < bench.ranks; r++) {
        bench_use(r);
        must(nccl.ncclCommInitRankConfig(&sets[n_sets].comms[r], (int)bench.ranks, id, (int)r,
                                         &config),
             "ncclCommInitRankConfig");
    }
    must(nccl.ncclGroupEnd(), "ncclCommInitRankConfig");
    comms = sets[n_sets++].comms;
}

static void exchange(const struct row *row, uint32_t rank, size_t at)
{
    const struct rank *r = &bench.of[rank];
    size_t part = row->bytes / bench.ranks;

    for (uint32_t p = 0; p < bench.ranks; p++) {
        must(nccl.ncclSend(r->in + at + p * part, part, ncclInt8, (int)p, comms[rank], r->stream),
             "ncclSend");
        must(nccl.ncclRecv(r->out + at + p * part, part, ncclInt8, (int)p, comms[rank], r->stream),
             "ncclRecv");
    }
}

void nccl_call(const struct row *row, size_t at)
{
    const struct bench_case *c = row->c;

    must(nccl.ncclGroupStart(), "ncclGroupStart");
    for (uint32_t i = 0; i < bench.ranks; i++) {
        const struct rank *r = &bench.of[i];

        bench_use(i);
        if (c->kind == LK_KIND_EXCHANGE)
            exchange(row, i, at);
        else
            must(nccl.ncclAllReduce(
                     r->in + at, r->out + at, row->bytes / (c->type == LK_FP32 ? 4 : 2),
                     c->type == LK_FP32 ? ncclFloat32 : ncclBfloat16, ncclSum, comms[i], r->stream),
                 "ncclAllReduce");
    }
    must(nccl.ncclGroupEnd(), "ncclGroupEnd");
}
