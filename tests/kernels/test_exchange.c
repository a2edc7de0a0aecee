/* SPDX-License-Identifier: Apache-2.0
 *
 * test_exchange threads|processes: exchanges on rings of the host library, beside reductions on the same rings.
 */
#include "kernels/exchange_internal.h"
#include "kernels/host_rings_internal.h"
#include "tests/check.h"
#include "tests/kernels/exchange_plan.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/rings_world.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void (*run_ranks)(struct ring_world *world, void (*body)(struct ring_rank *me, void *arg),
                         void *arg);
static bool threads;
static bool small; /* under a checker that makes everything slow */

static int issue(struct ring_rank *me, const struct exchange_side *side, uint32_t ctas)
{
    return lk_rings_exchange(&me->rings, side->sends, side->n_sends, side->recvs, side->n_recvs,
                             side->mask.rows ? &side->mask : NULL, ctas, NULL);
}

/* The rank's part of a plan in one call. */
static void play(struct ring_rank *me, const struct exchange_plan *plan)
{
    struct exchange_side *side = exchange_side_make(plan, me->rank);

    CHECK(issue(me, side, 1 + (me->rank + (uint32_t)plan->seed) % 4) == 0);
    exchange_side_check(side);
    exchange_side_free(side);
}

static void play_plan(struct ring_rank *me, void *arg)
{
    play(me, arg);
}

static void play_sum(struct ring_rank *me, uint64_t count, uint64_t seed)
{
    struct ring_call *call = malloc(sizeof(*call));

    CHECK(call);
    ring_call_init(call, seed % 2 ? RING_ALL_REDUCE : RING_REDUCE_SCATTER, LK_FP32, LK_FP32, count,
                   seed);
    ring_play(me, call);
    free(call);
}

static void run_plan(struct exchange_plan *plan, uint32_t channels, uint32_t slots)
{
    struct ring_world world;

    ring_world_init(&world, plan->ranks, channels, slots, 0);
    run_ranks(&world, play_plan, plan);
    ring_world_fini(&world);
}

/* ---- data ---- */

static void bytes_arrive_at_every_alignment(void)
{
    enum {
        N = 256
    };
    struct exchange_message messages[N + 16];
    struct exchange_plan plan = { .ranks = 2, .messages = messages };

    for (uint32_t i = 0; i < N; i++)
        messages[plan.n++] = (struct exchange_message){
            .src = i % 2,
            .dst = 1 - i % 2,
            .bytes = 1 + i * 7 % 1200 + (i % 16 == 0 ? 17001 : 0),
            .seed = i,
            .zeros = i % 3 ? 50 : 0,
            .in_skew = i / 16,
            .out_skew = i % 16,
            .scan = i % 5 != 0,
        };
    for (uint32_t i = 0; i < 16; i++)
        messages[plan.n++] = (struct exchange_message){ .src = 1,
                                                        .dst = 1,
                                                        .bytes = 1001 * i,
                                                        .in_skew = i,
                                                        .out_skew = 15 - i };
    run_plan(&plan, 3, 2);
    for (uint64_t row = 1; row < 3000; row = row * 3 + 1) {
        plan.row_bytes = row;
        run_plan(&plan, 2, 1);
    }
}

struct series {
    uint64_t begin, end;
    bool sums;
};

static void play_series(struct ring_rank *me, void *arg)
{
    const struct series *series = arg;

    for (uint64_t i = series->begin; i < series->end; i++) {
        struct exchange_plan plan;

        exchange_random(i, me->world->shape.ranks, 40, small ? 50000 : 300000, &plan);
        play(me, &plan);
        free(plan.messages);
        if (series->sums && i % 3 == 0)
            play_sum(me, i % 7 * 3000 + 1, i);
    }
}

static void random_matrices_beside_reductions(void)
{
    for (uint32_t ranks = 2; ranks <= (small ? 4 : 7); ranks++) {
        struct series series = { ranks * 100, ranks * 100 + (small ? 6 : 15), true };
        struct ring_world world;

        ring_world_init(&world, ranks, 1 + ranks % 4, 1 + ranks % 3, 0);
        run_ranks(&world, play_series, &series);
        ring_world_fini(&world);
    }
}

static void counters_pass_the_end_of_their_words(void)
{
    struct series series = { 1, 6, true };
    struct ring_world world;

    ring_world_init(&world, 3, 2, 2, 0);
    ring_pretend(&world, (UINT64_C(1) << 32) - 3, 0);
    run_ranks(&world, play_series, &series);
    ring_world_fini(&world);
}

/* Every line of the slots is written once in a while, by whatever message comes then. */
static void lines_are_refreshed(void)
{
    struct series series = { 30, 62, false };
    struct ring_world world;

    ring_world_init(&world, 3, 2, 1, 0);
    ring_pretend(&world, 0x800000 - 2, 0);
    run_ranks(&world, play_series, &series);
    for (uint32_t slot = 0; ring_short_bytes && slot < lk_short_slots(&world.shape); slot++) {
        const uint64_t *lines = (const void *)((uint8_t *)world.segments[0] +
                                               lk_short_offset(&world.shape, 1, 0, slot));

        for (uint32_t i = 0; i < LK_SHORT_PACKS * 4; i++)
            CHECK(lines[i] >> 32 >= 0x800000);
    }
    ring_world_fini(&world);
}

static void play_many_short(struct ring_rank *me, void *arg)
{
    uint8_t data[100];
    struct lk_message one = { data, sizeof(data), 1 - me->rank, 0 };

    (void)arg;
    memset(data, 1, sizeof(data));
    for (int i = 0; i < 40; i++) {
        int err = me->rank ? lk_rings_exchange(&me->rings, &one, 1, NULL, 0, NULL, 1, NULL)
                           : lk_rings_exchange(&me->rings, NULL, 0, &one, 1, NULL, 1, NULL);

        CHECK(err == 0);
    }
}

/* Where only lines pass, words of slots would keep their numbers until they are up again. */
static void words_are_refreshed_where_lines_pass(void)
{
    struct ring_world world;
    const uint64_t *words;

    ring_world_init(&world, 2, 1, 2, 0);
    ring_pretend(&world, 0x800000 - 2, 0);
    run_ranks(&world, play_many_short, NULL);
    words = (const void *)((uint8_t *)world.segments[0] +
                           lk_words_offset(&world.shape, LK_EXCHANGE, 1, 0));
    for (uint32_t i = 0; ring_short_bytes && i < lk_leg_slots(&world.shape, LK_EXCHANGE); i++)
        CHECK((uint32_t)words[i] >= 0x800000);
    ring_world_fini(&world);
}

/* The message that writes all lines of a slot comes while a short one lies there that nobody has read. */
static void play_unread(struct ring_rank *me, void *arg)
{
    uint8_t data[6][40000];
    struct lk_message list[6];

    for (uint32_t i = 0; i < 6; i++) {
        list[i] = (struct lk_message){ data[i], i < 4 ? 100 : sizeof(data[i]), 1 - me->rank, 0 };
        memset(data[i], me->rank ? 0 : (int)i + 1, sizeof(data[i]));
    }
    if (me->rank == 0) {
        CHECK(lk_rings_exchange(&me->rings, list, 6, NULL, 0, NULL, 1, NULL) == 0);
        return;
    }
    usleep(20000); /* in which too much could be written */
    CHECK(lk_rings_exchange(&me->rings, NULL, 0, list, 6, NULL, 1, NULL) == 0);
    for (uint32_t i = 0; i < 6; i++)
        for (uint64_t at = 0; at < list[i].bytes; at++)
            CHECK(data[i][at] == i + 1);
}

static void lines_that_nobody_has_read_are_not_refreshed(void)
{
    struct ring_world world;

    ring_world_init(&world, 2, 1, 4, 0);
    ring_pretend(&world, 0x800000 - 5, 0);
    run_ranks(&world, play_unread, NULL);
    ring_world_fini(&world);
}

/* Programs live by it: NCCL has room for so many before a receive is called. The shape is that of two ranks. */
static void eight_sends_end_without_a_receive(uint32_t ranks, size_t bytes, uint32_t short_bytes)
{
    uint8_t *data = calloc(1, bytes);
    struct lk_message message = { data, bytes, 1, 0 };
    uint32_t before = ring_short_bytes;
    struct ring_world world;
    struct ring_rank me;

    CHECK(data);
    if (before)
        ring_short_bytes = short_bytes;
    ring_world_init(&world, ranks, 64, 4, 0);
    ring_rank_init(&me, &world, 0);
    for (int n = 0; n < 8; n++)
        CHECK(lk_rings_exchange(&me.rings, &message, 1, NULL, 0, NULL, 1, NULL) == 0);
    ring_world_fini(&world);
    ring_short_bytes = before;
    free(data);
}

/* More ranks have less for each pair, and lines for smaller messages only. */
static void eight_sends_of_any_size_end_without_a_receive(void)
{
    static const size_t sizes[] = {
        1, 512, 32768, 131072, 262144, 262656, 524288, 525312, 1048576
    };

    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        eight_sends_end_without_a_receive(2, sizes[i], 524288);
        eight_sends_end_without_a_receive(5, sizes[i], 262144);
    }
    eight_sends_end_without_a_receive(2, 2097152, 524288);
}

static void a_long_list_is_cut(void)
{
    struct lk_ring_shape shape = { 2, 2, 1, 0, 0 };
    uint32_t most = lk_exchange_most(&shape);
    struct exchange_plan plan = { .ranks = 2 };

    CHECK(most > 1);
    plan.messages = calloc(6 * (size_t)most, sizeof(*plan.messages));
    CHECK(plan.messages);
    for (uint32_t i = 0; i < 6 * most; i++) /* one more from 1 to 0 than fit, and many to itself */
        plan.messages[plan.n++] = (struct exchange_message){
            .src = i % 2,
            .dst = i < 3 * most ? i / 2 % 2 : 0,
            .bytes = i % 11 == 0 ? 0 : 1 + i % 600,
            .seed = i,
            .scan = true,
        };
    run_plan(&plan, 2, 1);
    free(plan.messages);
}

/* ---- programs of several calls ---- */

static void exchange_one(struct ring_rank *me, const struct lk_message *send,
                         const struct lk_message *recv)
{
    CHECK(lk_rings_exchange(&me->rings, send, send != NULL, recv, recv != NULL, NULL, 2, NULL) ==
          0);
}

/* Rank 0 makes one call; the others send and receive one by one, in different orders; calls of everybody in between. */
static void play_hub(struct ring_rank *me, void *arg)
{
    struct exchange_plan plan;
    struct exchange_side *side;

    for (uint64_t round = 0; round < 6; round++) {
        exchange_random(round + 50, me->world->shape.ranks, 60, 100000, &plan);
        plan.row_bytes = 0;
        for (size_t i = 0; i < plan.n; i++) {
            if (plan.messages[i].src && plan.messages[i].dst)
                plan.messages[i].dst = plan.messages[i].in_place = 0;
        }
        side = exchange_side_make(&plan, me->rank);
        if (me->rank == 0) {
            CHECK(issue(me, side, 1) == 0);
        } else if (me->rank % 2) {
            for (size_t i = 0; i < side->n_sends; i++)
                exchange_one(me, &side->sends[i], NULL);
            for (size_t i = side->n_recvs; i--;) /* all of them from rank 0, so in their order */
                exchange_one(me, NULL, &side->recvs[side->n_recvs - 1 - i]);
        } else {
            for (size_t i = 0; i < side->n_recvs; i++)
                exchange_one(me, NULL, &side->recvs[i]);
            for (size_t i = 0; i < side->n_sends; i++)
                exchange_one(me, &side->sends[i], NULL);
        }
        exchange_side_check(side);
        exchange_side_free(side);
        free(plan.messages);
        play_sum(me, 5000, round);
    }
}

static void a_hub_and_its_spokes_may_group_as_they_like(void)
{
    struct ring_world world;

    ring_world_init(&world, 4, 3, 1, 0);
    run_ranks(&world, play_hub, NULL);
    ring_world_fini(&world);
}

/* Each message is a call of its own at both ends, all in one order that everybody knows. */
static void play_pipeline(struct ring_rank *me, void *arg)
{
    struct exchange_plan plan;
    struct exchange_side *side;
    size_t sent = 0, received = 0;

    exchange_random(77, me->world->shape.ranks, 150, 60000, &plan);
    plan.row_bytes = 0;
    side = exchange_side_make(&plan, me->rank);
    for (size_t i = 0; i < plan.n; i++) {
        const struct exchange_message *m = &plan.messages[i];
        const struct lk_message *send = m->src == me->rank ? &side->sends[sent++] : NULL;
        const struct lk_message *recv = m->dst == me->rank ? &side->recvs[received++] : NULL;

        if (send || recv)
            exchange_one(me, send, recv);
        if (i % 30 == 0)
            play_sum(me, 1000, i);
    }
    exchange_side_check(side);
    exchange_side_free(side);
    free(plan.messages);
}

static void single_sends_and_receives_make_a_pipeline(void)
{
    struct ring_world world;

    ring_world_init(&world, 4, 2, 1, 0);
    run_ranks(&world, play_pipeline, NULL);
    ring_world_fini(&world);
}

/* Rank 0 sends to 1 and 2 in one call; 1 listens to 0 only after it has heard from 2, and 2 speaks to 1 only after it has
 * heard from 0. With one channel and one slot, rank 0 must not wait for rank 1 before it turns to 2. */
static void play_triangle(struct ring_rank *me, void *arg)
{
    const struct exchange_plan *plan = arg;
    struct exchange_side *side = exchange_side_make(plan, me->rank);

    if (me->rank == 0) {
        CHECK(issue(me, side, 1) == 0);
    } else if (me->rank == 1) {
        exchange_one(me, NULL, &side->recvs[1]);
        exchange_one(me, NULL, &side->recvs[0]);
    } else {
        exchange_one(me, NULL, &side->recvs[0]);
        exchange_one(me, &side->sends[0], NULL);
    }
    exchange_side_check(side);
    exchange_side_free(side);
}

static void a_peer_that_is_busy_holds_up_no_other(void)
{
    struct exchange_message messages[] = {
        {.src = 0,  .dst = 1, .bytes = 100000, .seed = 1},
        { .src = 0, .dst = 2, .bytes = 100000, .seed = 2},
        { .src = 2, .dst = 1, .bytes = 100000, .seed = 3},
    };
    struct exchange_plan plan = { .ranks = 3, .n = 3, .messages = messages };
    struct ring_world world;

    ring_world_init(&world, 3, 1, 1, 0);
    run_ranks(&world, play_triangle, &plan);
    ring_world_fini(&world);
}

/* ---- what is written ---- */

/* Every tile of a channel has one place in its message, and where channels begin is spread over it. */
static void tiles_of_a_channel_go_round_the_message(void)
{
    static const uint32_t tiles_of[] = { 1, 2, 63, 64, 65, 128, 500, 8192, 8200 };
    static bool seen[8200];

    for (size_t i = 0; i < sizeof(tiles_of) / sizeof(*tiles_of); i++) {
        const struct lk_ring_shape shape = { .ranks = 2, .channels = 64, .slots = 1 };
        uint32_t tiles = tiles_of[i], quarters[4] = { 0 };

        memset(seen, 0, sizeof(seen));
        for (uint32_t first = 0; first < 64; first++) {
            for (uint32_t tile = first; tile < tiles; tile += 64) {
                uint32_t place = lk_message_place(&shape, tiles, first, tile);

                CHECK(place < tiles && !seen[place]);
                seen[place] = true;
                quarters[place / ((tiles + 3) / 4)] += tile == first;
            }
        }
        for (uint32_t tile = 0; tile < tiles; tile++)
            CHECK(seen[tile]);
        for (int q = 0; tiles > 4000 && q < 4; q++)
            CHECK(quarters[q] >= 15 && quarters[q] <= 17);
    }
}

/* Where each of `period` tiles has a live first part, each channel has about as many live ones. Granules, so that a part of
 * a tile counts as that. */
static void channels_share_what_repeats(void)
{
    static const struct lk_ring_shape shape = { .ranks = 2, .channels = 64, .slots = 1 };
    static const uint32_t periods[] = { 8, 16, 32, 64, 80, 160, 256, 320, 512, 1024, 2048, 4096 };
    enum {
        TILES = 8192,
        TILE = 32
    };

    for (size_t i = 0; i < sizeof(periods) / sizeof(*periods); i++) {
        uint32_t most = 0, live = periods[i] / 4;

        for (uint32_t first = 0; first < 64; first++) {
            uint32_t mine = 0;

            for (uint32_t tile = first; tile < TILES; tile += 64) {
                uint32_t place = lk_message_place(&shape, TILES, first, tile);

                for (uint32_t g = 0; g < TILE; g++)
                    mine += (place * TILE + g) % periods[i] < live;
            }
            most = mine > most ? mine : most;
        }
        CHECK(most <= TILES / 64 * TILE / 4 * 5 / 4);
    }
}

static void counts_say_what_was_written_and_what_was_not(void)
{
    for (uint32_t zeros = 0; zeros <= 100; zeros += 25) {
        struct exchange_message messages[] = {
            {.src = 0,  .dst = 1,       .bytes = 1000000, .seed = 1,      .zeros = zeros, .scan = true},
            { .src = 0, .dst = 1,       .bytes = 1000,    .seed = 2,      .zeros = zeros},
            { .src = 1, .dst = 0, .bytes = 70001,        .seed = 3, .zeros = zeros,   .scan = true            },
            { .src = 1, .dst = 1, .bytes = 70001,        .seed = 4, .zeros = zeros,   .scan = true},
        };
        struct exchange_plan plan = { .ranks = 2, .n = 4, .messages = messages };
        struct ring_world world;

        ring_world_init(&world, 2, 3, 2, 0);
        ring_threads(&world, play_plan, &plan);
        for (uint32_t r = 0; r < 2; r++) {
            struct lk_ring_counts want = exchange_counts(&plan, r, &world.shape);
            const struct lk_ring_state *state = world.states[r];

            CHECK(state->counts.bytes_sent == want.bytes_sent);
            CHECK(state->counts.bytes_elided == want.bytes_elided);
            CHECK(state->counts.exchange_sent == want.bytes_sent);
            CHECK(state->counts.exchange_elided == want.bytes_elided);
        }
        ring_world_fini(&world);
    }
}

/* Rows of a page: the dead ones cannot be read at all. */
static void play_dead_pages(struct ring_rank *me, void *arg)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), rows = 12;
    uint32_t bits = 0x124;
    uint8_t *in = mmap(NULL, rows * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                       0);
    uint8_t *out = malloc(rows * page);
    struct lk_row_mask mask = { in, &bits, rows, page };
    struct lk_message sends[] = {
        {in,             7 * page, 1 - me->rank, 1},
        { in + 7 * page, 5 * page, me->rank,     1}
    };
    struct lk_message recvs[] = {
        {out,             7 * page, 1 - me->rank, 0},
        { out + 7 * page, 5 * page, me->rank,     0}
    };

    CHECK(in != MAP_FAILED && out);
    memset(in, 7, rows * page);
    for (size_t row = 0; row < rows; row++)
        CHECK(bits >> row & 1 || mprotect(in + row * page, page, PROT_NONE) == 0);
    CHECK(lk_rings_exchange(&me->rings, sends, 2, recvs, 2, &mask, 2, NULL) == 0);
    for (size_t i = 0; i < rows * page; i++)
        CHECK(out[i] == (bits >> i / page & 1 ? 7 : 0));
    munmap(in, rows * page);
    free(out);
}

static void dead_rows_are_not_read(void)
{
    struct ring_world world;

    ring_world_init(&world, 2, 2, 2, 0);
    run_ranks(&world, play_dead_pages, NULL);
    ring_world_fini(&world);
}

/* ---- large messages: memory that is the same few pages again and again ---- */

#define LARGE_STEP ((size_t)64 << 20)
#define LARGE      ((size_t)2 << 30)

static uint8_t *map_again(size_t bytes)
{
    int fd = memfd_create("large", 0);
    uint8_t *all = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(fd >= 0 && ftruncate(fd, LARGE_STEP) == 0 && all != MAP_FAILED);
    for (size_t at = 0; at < bytes; at += LARGE_STEP)
        CHECK(mmap(all + at, LARGE_STEP, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
              all + at);
    close(fd);
    return all;
}

static void play_large(struct ring_rank *me, void *arg)
{
    size_t bytes = 2 * LARGE + LARGE_STEP;
    uint8_t *data = map_again(bytes);
    struct lk_message message = { data + 1, bytes - 7, 1 - me->rank, 1 };

    if (me->rank == 0) /* what lies behind 4 GiB is seen in the last page alone */
        memset(data, 0x11, LARGE_STEP);
    exchange_one(me, me->rank ? NULL : &message, me->rank ? &message : NULL);
    for (size_t i = 1; me->rank && i < LARGE_STEP - 6; i += 997)
        CHECK(data[i] == 0x11);
    munmap(data, bytes);
}

static void messages_may_be_larger_than_four_gigabytes(void)
{
    struct ring_world world;

    ring_world_init(&world, 2, 4, 4, 0);
    run_ranks(&world, play_large, NULL);
    ring_world_fini(&world);
}

/* ---- aborts and refusals ---- */

static void play_alone(struct ring_rank *me, void *arg)
{
    static uint8_t bytes[100000];
    struct lk_message send = { bytes, sizeof(bytes), 1, 0 };
    struct lk_message recv = { bytes, sizeof(bytes), 0, 0 };

    if (me->rank < 2)
        exchange_one(me, me->rank == 1 ? NULL : &send, NULL);
    if (me->rank == 3)
        exchange_one(me, NULL, &recv);
    if (me->rank == 2) /* when the others may have begun to wait, or not yet */
        __atomic_store_n(me->rings.abort, 1, __ATOMIC_RELEASE);
}

static void an_abort_ends_waiting(void)
{
    struct ring_world world;
    unsigned int before = lk_bell_nap_ms;

    lk_bell_nap_ms = 5;
    for (int i = 0; i < 20; i++) {
        ring_world_init(&world, 4, 2, 1, 0);
        ring_threads(&world, play_alone, NULL);
        CHECK(world.abort == 2);
        ring_world_fini(&world);
    }
    lk_bell_nap_ms = before;
}

static void what_cannot_be_is_refused(void)
{
    struct ring_world world;
    struct ring_rank me;
    uint8_t bytes[100];
    uint32_t bits = 1;
    struct lk_message none = { NULL, 0, 99, 0 }, own = { bytes, 10, 0, 0 };
    struct lk_message bad[] = {
        {bytes,  10,         2, 0},
        { NULL,  10,         0, 0},
        { bytes, 10,         1, 2},
        { bytes, UINT64_MAX, 1, 0}
    };
    struct lk_row_mask mask = { bytes + 5, &bits, 1, 20 };

    ring_world_init(&world, 2, 2, 2, 0);
    ring_rank_init(&me, &world, 0);
#define TRY(sends, n_sends, recvs, n_recvs, mask, ctas) \
    lk_rings_exchange(&me.rings, sends, n_sends, recvs, n_recvs, mask, ctas, NULL)
    CHECK(TRY(NULL, 0, NULL, 0, NULL, 1) == 0);
    CHECK(TRY(&none, 1, &none, 1, NULL, 1) == 0);
    CHECK(TRY(&own, 1, &own, 1, NULL, 0) == -EINVAL);
    CHECK(TRY(&own, 1, NULL, 0, NULL, 1) == -EINVAL);
    CHECK(TRY(NULL, 1, NULL, 0, NULL, 1) == -EINVAL);
    for (size_t i = 0; i < 4; i++)
        CHECK(TRY(&bad[i], 1, NULL, 0, NULL, 1) == -EINVAL);
    CHECK(TRY(&own, 1, &own, 1, &mask, 1) == -EINVAL); /* across the mask's end */
    mask.base = bytes + 50;
    CHECK(TRY(&own, 1, &own, 1, &mask, 1) == 0);
    mask.row_bytes = 0;
    CHECK(TRY(&own, 1, &own, 1, &mask, 1) == -EINVAL);
    mask.row_bytes = 1;
    mask.bits = NULL;
    CHECK(TRY(&own, 1, &own, 1, &mask, 1) == -EINVAL);
#undef TRY
    ring_world_fini(&world);
}

/* With messages of up to so many bytes in lines. */
static void run_all(uint32_t short_bytes)
{
    ring_short_bytes = short_bytes;
    bytes_arrive_at_every_alignment();
    random_matrices_beside_reductions();
    counters_pass_the_end_of_their_words();
    lines_are_refreshed();
    words_are_refreshed_where_lines_pass();
    lines_that_nobody_has_read_are_not_refreshed();
    a_long_list_is_cut();
    a_hub_and_its_spokes_may_group_as_they_like();
    single_sends_and_receives_make_a_pipeline();
    a_peer_that_is_busy_holds_up_no_other();
    dead_rows_are_not_read();
    if (threads) {
        eight_sends_of_any_size_end_without_a_receive();
        tiles_of_a_channel_go_round_the_message();
        channels_share_what_repeats();
        counts_say_what_was_written_and_what_was_not();
        what_cannot_be_is_refused();
        an_abort_ends_waiting();
    }
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    threads = strcmp(argv[1], "threads") == 0;
    CHECK(threads || strcmp(argv[1], "processes") == 0);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    small = true;
#endif
    run_ranks = threads ? ring_threads : ring_processes;
    lk_host_cta_threads = threads;
    lk_bell_nap_ms = 1000 * 3600; /* whoever forgets the doorbell is never heard */
    run_all(0);
    run_all(20000);
    if (getenv("LCTEST_SOAK"))
        messages_may_be_larger_than_four_gigabytes();
    return 0;
}
