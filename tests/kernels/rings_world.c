/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/rings_world.h"

#include "kernels/ring_layout.h"
#include "tests/check.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define GUARD      64u /* bytes around each tensor */
#define GUARD_BYTE 0xa5

uint32_t ring_short_bytes;

void ring_world_init(struct ring_world *world, uint32_t ranks, uint32_t channels, uint32_t slots,
                     uint32_t line_bytes)
{
    struct lk_ring_shape shape = { ranks, channels, slots, line_bytes, ring_short_bytes };

    memset(world, 0, sizeof(*world));
    world->shape = shape;
    for (uint32_t r = 0; r < ranks; r++) {
        CHECK(lk_segment_new(lk_ring_bytes(&shape), NULL, &world->segments[r], &world->fds[r]) ==
              0);
        world->states[r] = calloc(1, lk_ring_state_bytes(&shape));
        CHECK(world->states[r]);
    }
}

void ring_world_fini(struct ring_world *world)
{
    for (uint32_t r = 0; r < world->shape.ranks; r++) {
        CHECK(lk_segment_free(world->segments[r], lk_ring_bytes(&world->shape)) == 0);
        close(world->fds[r]);
        free(world->states[r]);
    }
}

void ring_rank_init(struct ring_rank *me, struct ring_world *world, uint32_t rank)
{
    memset(me, 0, sizeof(*me));
    me->world = world;
    me->rank = rank;
    me->rings.shape = world->shape;
    me->rings.rank = rank;
    me->rings.state = world->states[rank];
    me->rings.abort = &world->abort;
    me->rings.too_few = &world->too_few[rank];
    memcpy(me->rings.segments, world->segments, sizeof(world->segments));
}

/* ---- threads ---- */

struct thread {
    struct ring_rank me;
    void (*body)(struct ring_rank *me, void *arg);
    void *arg;
    pthread_t id;
};

static void *thread_main(void *arg)
{
    struct thread *thread = arg;

    thread->body(&thread->me, thread->arg);
    return NULL;
}

void ring_threads(struct ring_world *world, void (*body)(struct ring_rank *me, void *arg),
                  void *arg)
{
    static struct thread threads[LK_RANKS_MAX];

    for (uint32_t r = 0; r < world->shape.ranks; r++) {
        ring_rank_init(&threads[r].me, world, r);
        threads[r].body = body;
        threads[r].arg = arg;
        CHECK(pthread_create(&threads[r].id, NULL, thread_main, &threads[r]) == 0);
    }
    for (uint32_t r = 0; r < world->shape.ranks; r++)
        CHECK(pthread_join(threads[r].id, NULL) == 0);
}

/* ---- processes ---- */

static void process_main(struct ring_world *world, uint32_t rank,
                         void (*body)(struct ring_rank *me, void *arg), void *arg)
{
    size_t bytes = lk_ring_bytes(&world->shape);
    struct ring_rank me;

    ring_rank_init(&me, world, rank);
    for (uint32_t r = 0; r < world->shape.ranks; r++) {
        CHECK(lk_segment_map(world->fds[r], bytes, &me.rings.segments[r]) == 0);
        CHECK(me.rings.segments[r] != world->segments[r]);
    }
    body(&me, arg);
    for (uint32_t r = 0; r < world->shape.ranks; r++)
        CHECK(lk_segment_free(me.rings.segments[r], bytes) == 0);
}

void ring_processes(struct ring_world *world, void (*body)(struct ring_rank *me, void *arg),
                    void *arg)
{
    pid_t pids[LK_RANKS_MAX];
    bool good = true;

    for (uint32_t r = 0; r < world->shape.ranks; r++) {
        pids[r] = fork();
        CHECK(pids[r] >= 0);
        if (!pids[r]) {
            process_main(world, r, body, arg);
            _exit(0);
        }
    }
    for (uint32_t left = world->shape.ranks; left; left--) {
        int status;
        pid_t pid = wait(&status);

        CHECK(pid > 0);
        if (status && good) { /* the others may wait for it for ever */
            good = false;
            for (uint32_t r = 0; r < world->shape.ranks; r++) {
                if (pids[r] != pid && pids[r] > 0)
                    kill(pids[r], SIGKILL);
            }
        }
        for (uint32_t r = 0; r < world->shape.ranks; r++)
            pids[r] = pids[r] == pid ? 0 : pids[r];
    }
    CHECK(good);
}

/* ---- calls ---- */

int ring_issue(struct ring_rank *me, const struct ring_call *call, const struct lk_buffers *list,
               void *stream)
{
    /* Read when the work runs, which the caller waits for. */
    static _Thread_local uint64_t half;
    static _Thread_local union {
        float wide;
        uint16_t narrow;
    } scalar;
    struct lk_scale pre = { .value = call->pre };
    struct lk_rng rng = { .seed = call->seed + me->rank, .offset = call->draws };
    struct lk_reduction how = {
        .type = call->type,
        .wire = call->wire,
        .pre = call->pre == 1 && !call->device_pre ? NULL : &pre,
        .post = call->post,
        .rounding = call->stochastic ? LK_STOCHASTIC : LK_NEAREST,
        .rng = call->stochastic ? &rng : NULL,
    };
    __typeof__(lk_rings_all_reduce) *function = call->op == RING_ALL_REDUCE ? lk_rings_all_reduce
                                                : call->op == RING_LINES    ? lk_lines_all_reduce
                                                                         : lk_rings_reduce_scatter;

    if (call->device_pre) {
        if (call->pre_type == LK_FP32)
            scalar.wide = call->pre;
        else if (call->pre_type == LK_BF16)
            scalar.narrow = (uint16_t)(float_bits(call->pre) >> 16);
        else
            scalar.narrow = ref_to_fp16(call->pre);
        pre = (struct lk_scale){ .value = 77, .type = call->pre_type, .device_value = &scalar };
    }
    if (call->device_draws) {
        half = call->draws / 2;
        rng.offset -= half;
        rng.device_offset = &half;
    }
    return function(&me->rings, &how, list, call->n, call->ctas[me->rank], stream);
}

/* One side's memory: tensors with guards around them. */
struct arena {
    uint8_t *base;
    size_t bytes;
    uint8_t *tensors[RING_TENSORS];
};

static void arena_init(struct arena *arena, const struct ring_call *call, uint64_t parts,
                       uint32_t skew)
{
    size_t width = call->type == LK_FP32 ? 4 : 2;
    size_t at = 0;

    arena->bytes = 0;
    for (size_t t = 0; t < call->n; t++)
        arena->bytes += (parts * call->counts[t] + 16) * width / 64 * 64 + 64 + GUARD;
    arena->base = aligned_alloc(64, (arena->bytes + 127) / 64 * 64);
    CHECK(arena->base);
    memset(arena->base, GUARD_BYTE, arena->bytes);
    for (size_t t = 0; t < call->n; t++) {
        arena->tensors[t] = arena->base + at + skew * width;
        at += (parts * call->counts[t] + 16) * width / 64 * 64 + 64 + GUARD;
    }
}

/* Every byte outside `begin` .. + bytes of each tensor still holds the guard. */
static void check_guards(const struct arena *arena, const struct ring_call *call, uint64_t parts)
{
    size_t width = call->type == LK_FP32 ? 4 : 2;
    const uint8_t *at = arena->base;

    for (size_t t = 0; t <= call->n; t++) {
        const uint8_t *end = t < call->n ? arena->tensors[t] : arena->base + arena->bytes;

        while (at < end)
            CHECK(*at++ == GUARD_BYTE);
        if (t < call->n)
            at += parts * call->counts[t] * width;
    }
}

static void fill(const struct ring_rank *me, const struct ring_call *call, uint64_t parts,
                 const struct arena *in)
{
    size_t width = call->type == LK_FP32 ? 4 : 2;

    for (size_t t = 0; t < call->n; t++) {
        for (uint32_t part = 0; part < parts; part++)
            ring_fill(call, me->rank, part, t, in->tensors[t] + part * call->counts[t] * width);
    }
}

static void report(const struct ring_rank *me, const struct ring_call *call, size_t t, uint64_t i)
{
    const struct lk_ring_shape *s = &me->world->shape;

    fprintf(stderr,
            "rank %u of %u, %u channels, %u slots: operation %d type %d wire %d data %d seed %llu, "
            "pre %g post %g, %s %s, tensor %zu of %zu, element %llu of %llu\n",
            me->rank, s->ranks, s->channels, s->slots, call->op, call->type, call->wire, call->data,
            (unsigned long long)call->seed, call->pre, call->post,
            call->stochastic ? "stochastic" : "nearest", call->in_place ? "in place" : "apart", t,
            call->n, (unsigned long long)i, (unsigned long long)call->counts[t]);
}

static void check_results(const struct ring_rank *me, const struct ring_call *call,
                          const struct lk_buffers *list)
{
    size_t width = call->type == LK_FP32 ? 4 : 2;
    struct ring_expected *expected = ring_expect(call, &me->world->shape);

    for (size_t t = 0; t < call->n; t++) {
        size_t bytes = call->counts[t] * width;
        uint8_t *want = malloc(bytes ? bytes : 1);
        const uint8_t *have = list[t].out;

        CHECK(want);
        ring_result(expected, me->rank, t, want);
        if (bytes && memcmp(want, have, bytes) != 0) {
            size_t at = 0;

            while (want[at] == have[at])
                at++;
            report(me, call, t, at / width);
            CHECK(!"the result is what it should be");
        }
        free(want);
    }
    ring_expected_free(expected);
}

void ring_play(struct ring_rank *me, const struct ring_call *call)
{
    uint64_t parts = call->op == RING_REDUCE_SCATTER ? me->world->shape.ranks : 1;
    size_t width = call->type == LK_FP32 ? 4 : 2;
    struct arena in = { 0 }, out = { 0 };
    struct lk_buffers *list = calloc(call->n + 1, sizeof(*list));
    uint8_t *before;

    CHECK(list);
    arena_init(&in, call, parts, (call->in_skew + me->rank) % 8);
    arena_init(&out, call, 1, (call->out_skew + 3 * me->rank) % 8);
    fill(me, call, parts, &in);
    before = malloc(in.bytes + 1);
    CHECK(before);
    memcpy(before, in.base, in.bytes);
    for (size_t t = 0; t < call->n; t++) {
        uint32_t part = parts > 1 ? me->rank : 0;

        list[t] = (struct lk_buffers){ in.tensors[t], out.tensors[t], call->counts[t] };
        if (call->in_place)
            list[t].out = in.tensors[t] + part * call->counts[t] * width;
    }
    CHECK(ring_issue(me, call, list, NULL) == 0);
    check_results(me, call, list);
    check_guards(&in, call, parts);
    if (!call->in_place)
        check_guards(&out, call, 1);
    for (size_t t = 0; call->in_place && t < call->n; t++) {
        const uint8_t *changed = list[t].out; /* may have changed */

        if (call->counts[t] && changed)
            memcpy(before + (changed - in.base), changed, call->counts[t] * width);
    }
    CHECK(memcmp(before, in.base, in.bytes) == 0);
    free(before);
    free(list);
    free(in.base);
    free(out.base);
}

/* ---- the past ---- */

void ring_pretend(struct ring_world *world, uint64_t messages, uint64_t lines)
{
    const struct lk_ring_shape *s = &world->shape;

    for (uint32_t r = 0; r < s->ranks; r++) {
        struct lk_ring_state *state = world->states[r];
        uint64_t *counters = (uint64_t *)((uint8_t *)world->states[r] + LK_STATE_HEADER);

        state->lines = lines;
        for (size_t u = 0; u < 2 * lk_units(s); u++)
            counters[u] = messages;
        for (size_t u = 0; u < lk_units(s); u++) {
            uint32_t leg = (uint32_t)(u / s->channels / s->ranks);
            uint32_t peer = (uint32_t)(u / s->channels % s->ranks);
            uint32_t channel = (uint32_t)(u % s->channels);
            uint64_t slots = lk_leg_slots(s, leg);
            uint8_t *segment = world->segments[r];
            uint64_t *words = (uint64_t *)(segment + lk_words_offset(s, leg, peer, channel));

            *(uint64_t *)(segment + lk_credit_offset(s, leg, peer, channel)) = messages;
            for (uint64_t i = 0; i < slots && i < messages; i++) {
                uint64_t m = messages - i;

                words[(m - 1) % slots] = lk_slot_word(m, 0xffffffff);
            }
        }
    }
}
