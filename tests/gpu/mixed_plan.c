/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes programs. Whatever is drawn here is drawn alike on all ranks. */
#include "tests/gpu/mixed.h"
#include "tests/interpose/content.h"

#include <string.h>

uint64_t mx_draw(uint64_t *state, uint64_t below)
{
    return content_mix(*state += 0x9e3779b97f4a7c15u) % below;
}

/* ---- communicators ---- */

static bool is_parted(int n, int comm)
{
    return comm == 2 && n >= 4;
}

int mx_color_in(int n, int comm, int world)
{
    return is_parted(n, comm) ? world % 2 : 0;
}

int mx_size_in(int n, int comm, int world)
{
    return is_parted(n, comm) ? (n + 1 - world % 2) / 2 : n;
}

int mx_rank_in(int n, int comm, int world)
{
    switch (comm) {
    case 0: return world;
    case 1: return n - 1 - world;
    case 2: return is_parted(n, comm) ? world / 2 : (world + 1) % n;
    default: return (world + n - 1) % n;
    }
}

int mx_world_of(int n, int comm, int member, int rank)
{
    switch (comm) {
    case 0: return rank;
    case 1: return n - 1 - rank;
    case 2: return is_parted(n, comm) ? 2 * rank + member % 2 : (rank + n - 1) % n;
    default: return (rank + 1) % n;
    }
}

/* ---- sizes ---- */

static size_t type_size(ncclDataType_t type)
{
    switch (type) {
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclFloat64: return 8;
    case ncclUint8: return 1;
    default: return 4;
    }
}

size_t mx_send_bytes(const struct mx_call *call, int size)
{
    bool all = call->kind == MX_REDUCE_SCATTER || call->kind == MX_ALL_TO_ALL;

    return call->count * type_size(call->type) * (all ? (size_t)size : 1);
}

size_t mx_recv_bytes(const struct mx_call *call, int size)
{
    bool all = call->kind == MX_ALL_GATHER || call->kind == MX_ALL_TO_ALL;

    return call->count * type_size(call->type) * (all ? (size_t)size : 1);
}

/* Of `parts` pieces of a call or message that is carried out `rounds` times. */
static size_t some_bytes(struct mx_plan *p, size_t parts)
{
    static const size_t edges[] = { 0,    1,    7,     511,   1999,  2000,  2001,
                                    4095, 4096, 16384, 16385, 65536, 65537, 131072 };
    static const size_t most[] = { 300, 3000, 20000, 90000, 400000 };
    uint64_t way = mx_draw(&p->random, 24);
    size_t bytes;

    if (way < 8)
        bytes = edges[mx_draw(&p->random, sizeof(edges) / sizeof(*edges))];
    else
        bytes = mx_draw(&p->random, way >= 22 ? p->left / 2 / parts + 1 : most[way % 5]);
    if (bytes * parts > p->left)
        bytes = p->left / 16 / parts;
    p->left -= bytes * parts;
    return bytes;
}

/* ---- calls and messages ---- */

static enum mx_op some_op(struct mx_plan *p, const struct mx_call *call, int least_size)
{
    enum mx_op op = (enum mx_op)mx_draw(&p->random, 5);
    int n = least_size;

    if (op >= MX_HALF && call->type != ncclFloat32)
        op = MX_SUM; /* their factors are floats */
    /* Averages of whole numbers are exact where the number of ranks is a power of two. */
    if (op == MX_AVG && (call->type == ncclInt32 || (n & (n - 1)) != 0))
        op = MX_SUM;
    return op;
}

static void add_call(struct mx_plan *p, int rounds)
{
    static const enum mx_kind kinds[] = { MX_ALL_REDUCE, MX_ALL_REDUCE,     MX_ALL_REDUCE,
                                          MX_ALL_REDUCE, MX_REDUCE_SCATTER, MX_REDUCE_SCATTER,
                                          MX_ALL_GATHER, MX_BROADCAST,      MX_ALL_TO_ALL,
                                          MX_ALL_TO_ALL };
    static const ncclDataType_t types[] = { ncclFloat32,  ncclFloat32, ncclFloat32, ncclFloat32,
                                            ncclBfloat16, ncclFloat16, ncclInt32,   ncclFloat64 };
    struct mx_call *call = &p->call[p->calls++];
    size_t parts;

    *call = (struct mx_call){ .kind = kinds[mx_draw(&p->random, 10)],
                              .type = types[mx_draw(&p->random, 8)],
                              .comm = (uint8_t)mx_draw(&p->random, (uint64_t)p->comms),
                              .in_place = mx_draw(&p->random, 2),
                              .sparse = mx_draw(&p->random, 3) == 0 };
    /* Parts of a parted communicator need not have the same size. */
    call->op = some_op(p, call, is_parted(p->n, call->comm) ? p->n / 2 | (p->n + 1) / 2 : p->n);
    call->root = (uint8_t)mx_draw(&p->random, (uint64_t)mx_size_in(p->n, call->comm, 1));
    call->skip = (uint8_t)(type_size(call->type) * mx_draw(&p->random, 8));
    call->rough = call->kind <= MX_REDUCE_SCATTER && call->type == ncclFloat32 &&
                  call->op != MX_MAX && mx_draw(&p->random, 3) == 0;
    if (call->kind == MX_ALL_TO_ALL)
        call->in_place = false;
    parts = (size_t)rounds * (call->kind <= MX_BROADCAST && call->kind != MX_ALL_GATHER &&
                                      call->kind != MX_REDUCE_SCATTER
                                  ? 2
                                  : 2 * (size_t)p->n);
    call->count = some_bytes(p, parts) / type_size(call->type);
}

static void add_message(struct mx_plan *p, int comm, int src, int dst, int rounds)
{
    if (p->messages < MX_MESSAGES)
        p->message[p->messages++] = (struct mx_message){ .comm = (uint8_t)comm,
                                                         .skip = (uint8_t)mx_draw(&p->random, 16),
                                                         .src = (uint8_t)src,
                                                         .dst = (uint8_t)dst,
                                                         .bytes = some_bytes(p,
                                                                             2 * (size_t)rounds) };
}

static void add_messages(struct mx_plan *p, bool own, int rounds)
{
    int n = 1 + (int)mx_draw(&p->random, 2 * (uint64_t)p->n);
    int comm = (int)mx_draw(&p->random, (uint64_t)p->comms);
    bool several = own && mx_draw(&p->random, 3) == 0;

    for (int i = 0; i < n; i++) {
        int src = (int)mx_draw(&p->random, (uint64_t)p->n), dst;

        if (several)
            comm = (int)mx_draw(&p->random, (uint64_t)p->comms);
        dst = mx_world_of(p->n, comm, src,
                          (int)mx_draw(&p->random, (uint64_t)mx_size_in(p->n, comm, src)));
        if (src != dst || own)
            add_message(p, comm, src, dst, rounds);
    }
}

static void add_hub(struct mx_plan *p, struct mx_step *s, int rounds)
{
    int comm = (int)mx_draw(&p->random, (uint64_t)p->comms);

    s->hub = (uint8_t)mx_draw(&p->random, (uint64_t)p->n);
    for (int spoke = 0; spoke < p->n; spoke++) {
        if (spoke == s->hub || mx_draw(&p->random, 4) == 0 || p->messages + 2 > MX_MESSAGES ||
            mx_color_in(p->n, comm, spoke) != mx_color_in(p->n, comm, s->hub))
            continue;
        add_message(p, comm, s->hub, spoke, rounds);
        add_message(p, comm, spoke, s->hub, rounds);
    }
}

/* NCCL 2.28 at times takes one factor for another's where several are in one group. */
static void one_factor(struct mx_plan *p, const struct mx_step *s)
{
    static const enum mx_op factors[] = { MX_HALF, MX_QUARTER };
    enum mx_op factor = factors[mx_draw(&p->random, 2)];

    for (int i = s->call; i < s->call + s->calls; i++) {
        enum mx_op *op = &p->call[i].op;

        if (*op == MX_HALF || *op == MX_QUARTER ||
            (*op == MX_AVG && p->call[i].type == ncclFloat32))
            *op = p->call[i].type == ncclFloat32 ? factor : MX_SUM;
    }
}

static void add_step(struct mx_plan *p, int rounds)
{
    static const enum mx_step_kind kinds[] = { MX_CALL,  MX_CALL,  MX_CALL,    MX_GROUP,
                                               MX_GROUP, MX_GROUP, MX_SINGLES, MX_HUB };
    struct mx_step *s = &p->step[p->steps++];
    int calls = 0;

    *s = (struct mx_step){ .kind = kinds[mx_draw(&p->random, 8)],
                           .call = p->calls,
                           .message = p->messages };
    if (s->kind == MX_CALL)
        calls = 1;
    if (s->kind == MX_GROUP)
        calls = (int)mx_draw(&p->random, mx_draw(&p->random, 3) ? 3 : 13);
    if (s->kind == MX_GROUP && (calls == 0 || mx_draw(&p->random, 3)))
        add_messages(p, true, rounds);
    if (s->kind == MX_SINGLES)
        add_messages(p, false, rounds);
    if (s->kind == MX_HUB)
        add_hub(p, s, rounds);
    while (calls-- && p->calls < MX_CALLS)
        add_call(p, rounds);
    s->calls = p->calls - s->call;
    s->messages = p->messages - s->message;
    if (s->kind == MX_GROUP)
        one_factor(p, s);
}

void mx_plan_make(struct mx_plan *p, uint64_t seed, int n, int comms, size_t bytes)
{
    int items;

    memset(p, 0, sizeof(*p));
    p->seed = p->random = seed;
    p->n = n;
    p->comms = comms;
    p->left = bytes;
    items = 1 + (int)mx_draw(&p->random, MX_ITEMS);
    while (p->items < items) {
        struct mx_item *item = &p->item[p->items++];

        item->graph = mx_draw(&p->random, 3) == 0;
        item->rounds = item->graph ? 1 + (int)mx_draw(&p->random, MX_ROUNDS) : 1;
        item->step = p->steps;
        for (int i = 1 + (int)mx_draw(&p->random, MX_STEPS / MX_ITEMS); i > 0; i--)
            add_step(p, item->rounds);
        item->steps = p->steps - item->step;
        p->turn[p->turns++] = (struct mx_turn){ p->items - 1, 0 };
        /* Graphs are used again between what comes behind them. */
        for (int i = 0; i < p->items; i++) {
            int *rounds = &p->item[i].rounds, used = 0;

            for (int t = 0; t < p->turns; t++)
                used += p->turn[t].item == i;
            /* those that are still to come have a turn each */
            if (used < *rounds && p->turns + items - p->items < MX_TURNS && mx_draw(&p->random, 2))
                p->turn[p->turns++] = (struct mx_turn){ i, used };
        }
    }
}
