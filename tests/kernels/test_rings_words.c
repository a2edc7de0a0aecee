/* SPDX-License-Identifier: Apache-2.0
 *
 * Rings beside their results: counters that wrap, calls that are aborted, what is counted, refused and declared.
 */
#include "kernels/host_rings_internal.h"
#include "kernels/loongkernels_host.h"
#include "tests/check.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/rings_world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static struct ring_call *new_call(void)
{
    struct ring_call *call = malloc(sizeof(*call));

    CHECK(call);
    return call;
}

/* ---- counters that wrap ---- */

static void play_both_shots(struct ring_rank *me, void *arg)
{
    struct ring_call *call = new_call();

    for (uint64_t i = 0; i < 12; i++) {
        /* One-shot calls that are now small, now as large as can be: where a small one wrote nothing, what was written
         * there before must not be taken for a line of the next. */
        ring_call_init(call, RING_LINES, LK_FP32, LK_FP32, i % 3 ? 2048 : 3, 100 + i);
        ring_play(me, call);
        ring_call_init(call, i % 2 ? RING_ALL_REDUCE : RING_REDUCE_SCATTER, LK_FP32, LK_BF16, 9000,
                       200 + i);
        ring_play(me, call);
    }
    free(call);
}

static void numbers_may_wrap(void)
{
    static const uint64_t pasts[] = { 0, UINT32_MAX - 6ULL, UINT32_MAX - 5ULL, UINT32_MAX,
                                      (3ULL << 32) - 4 };
    struct ring_world world;

    for (uint32_t slots = 1; slots <= 3; slots++) {
        for (size_t i = 0; i < sizeof(pasts) / sizeof(*pasts); i++) {
            ring_world_init(&world, 3, 2, slots, 8192);
            ring_pretend(&world, pasts[i], pasts[i]);
            ring_threads(&world, play_both_shots, NULL);
            ring_world_fini(&world);
        }
    }
}

/* Every line of both banks as calls of long ago left it, whose flags come around in the calls from `number` on. */
static void leave_stale_lines(struct ring_world *world, uint64_t number)
{
    const struct lk_ring_shape *s = &world->shape;

    for (uint32_t r = 0; r < s->ranks; r++) {
        for (uint32_t src = 0; src < s->ranks; src++) {
            for (uint64_t n = number; n < number + 2; n++) {
                uint64_t *lines = lk_word_at(world->segments[r],
                                             lk_lines_offset(s, (uint32_t)(n & 1), src));

                for (size_t i = 0; i < s->line_bytes / 4; i++)
                    lines[i] = (uint64_t)(uint32_t)n << 32 | 0x41414141;
            }
        }
    }
}

static bool is_stale(const struct ring_world *world, uint64_t number)
{
    const struct lk_ring_shape *s = &world->shape;

    for (uint32_t bank = 0; bank < 2; bank++) {
        for (uint32_t src = 1; src < s->ranks; src++) {
            const uint64_t *lines = lk_word_at(world->segments[0], lk_lines_offset(s, bank, src));

            for (size_t i = 0; i < s->line_bytes / 4; i++) {
                if ((uint32_t)(lines[i] >> 32) - (uint32_t)number < 2)
                    return true;
            }
        }
    }
    return false;
}

static void play_four(struct ring_rank *me, void *arg)
{
    struct ring_call *call = new_call();

    for (uint64_t i = 0; i < 4; i++) {
        ring_call_init(call, RING_LINES, LK_BF16, LK_BF16, *(const uint64_t *)arg, i);
        ring_play(me, call);
    }
    free(call);
}

static void stale_flags_do_not_come_back(void)
{
    struct ring_world world;
    uint64_t begin = (7ULL << 32) + (5 << 24); /* the first large call is the 5th after it */
    uint64_t few = 9, many = 2000;

    ring_world_init(&world, 3, 1, 1, LINES);
    ring_pretend(&world, 0, begin);
    leave_stale_lines(&world, begin + 5);
    CHECK(is_stale(&world, begin + 5));
    ring_threads(&world, play_four, &few);
    CHECK(!is_stale(&world, begin + 5));
    ring_threads(&world, play_four, &many);
    ring_world_fini(&world);
}

static void banks_take_turns(void)
{
    uint64_t number = (5ULL << 32) - 4;

    for (int i = 0; i < 8; i++) {
        uint64_t next = lk_next_lines(number);

        CHECK((uint32_t)next && next % 2 != number % 2 && next - number < 4);
        number = next;
    }
}

/* ---- aborts ---- */

struct waiter {
    struct ring_world world;
    enum ring_op op;
    uint32_t missing; /* ranks from this one on never call */
    uint32_t ended;   /* under no lock: atomic */
};

static void call_and_wait(struct ring_rank *me, void *arg)
{
    struct waiter *waiter = arg;
    struct ring_call *call = new_call();
    float *data = calloc(100000, sizeof(*data));
    struct lk_buffers buffers = { data, data, waiter->op == RING_LINES ? 1000 : 30000 };

    CHECK(data);
    if (me->rank < waiter->missing) {
        ring_call_init(call, waiter->op, LK_FP32, LK_FP32, buffers.count, 1);
        call->ctas[me->rank] = me->rank + 1;
        CHECK(ring_issue(me, call, &buffers, NULL) == 0);
    }
    __atomic_fetch_add(&waiter->ended, 1, __ATOMIC_RELEASE);
    free(data);
    free(call);
}

static void *waiter_main(void *arg)
{
    struct waiter *waiter = arg;

    ring_threads(&waiter->world, call_and_wait, waiter);
    return NULL;
}

static size_t thread_count(void)
{
    DIR *tasks = opendir("/proc/self/task");
    size_t count = 0;

    CHECK(tasks);
    while (readdir(tasks))
        count++;
    closedir(tasks);
    return count;
}

static void nap(void)
{
    struct timespec ms = { .tv_nsec = 1000000 };

    nanosleep(&ms, NULL);
}

static bool all_sleep(const struct waiter *waiter)
{
    for (uint32_t r = 0; r < waiter->missing; r++) {
        const uint32_t *bell = (const uint32_t *)lk_word_at(waiter->world.segments[r],
                                                            LK_DOORBELL_OFFSET);

        if (!__atomic_load_n(bell + 1, __ATOMIC_SEQ_CST))
            return false;
    }
    return true;
}

/* Everybody who waits for a rank that never comes returns, and leaves no thread. */
static void an_abort_ends_waiting(enum ring_op op, bool before)
{
    static struct waiter waiter;
    size_t threads = thread_count();
    struct timespec deadline;
    pthread_t id;

    memset(&waiter, 0, sizeof(waiter));
    waiter.op = op;
    waiter.missing = 2;
    ring_world_init(&waiter.world, 3, 4, 1, LINES);
    if (before)
        waiter.world.abort = 1;
    CHECK(pthread_create(&id, NULL, waiter_main, &waiter) == 0);
    while (!before && (!all_sleep(&waiter) || !__atomic_load_n(&waiter.ended, __ATOMIC_ACQUIRE)))
        nap();
    CHECK(before || __atomic_load_n(&waiter.ended, __ATOMIC_ACQUIRE) == 1);
    __atomic_store_n(&waiter.world.abort, 1, __ATOMIC_RELEASE);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 30;
    CHECK(pthread_timedjoin_np(id, NULL, &deadline) == 0);
    while (thread_count() > threads) /* a joined thread may still be on its way out */
        nap();
    ring_world_fini(&waiter.world);
}

static void an_abort_at_any_point_ends_all(void)
{
    static struct waiter waiter;

    for (unsigned int turn = 0; turn < 20; turn++) {
        struct timespec pause = { .tv_nsec = (long)turn * 50000 };
        pthread_t id;

        memset(&waiter, 0, sizeof(waiter));
        waiter.op = (enum ring_op)(turn % RING_OPS);
        waiter.missing = 3;
        ring_world_init(&waiter.world, 3, 4, 1, LINES);
        CHECK(pthread_create(&id, NULL, waiter_main, &waiter) == 0);
        nanosleep(&pause, NULL);
        __atomic_store_n(&waiter.world.abort, 1, __ATOMIC_RELEASE);
        CHECK(pthread_join(id, NULL) == 0);
        ring_world_fini(&waiter.world);
    }
}

/* ---- counts ---- */

static void play_one(struct ring_rank *me, void *arg)
{
    ring_play(me, arg);
}

static struct lk_ring_counts counts_of(struct ring_call *call)
{
    struct ring_world world;
    struct lk_ring_counts counts;

    ring_world_init(&world, 2, 2, 2, LINES);
    ring_threads(&world, play_one, call);
    memcpy(&counts, world.states[1], sizeof(counts));
    ring_world_fini(&world);
    return counts;
}

/* 64 KB over two ranks and two channels: two tiles of a slot each for either rank. */
static void what_travels_is_counted(void)
{
    struct ring_call *call = new_call();
    struct lk_ring_counts counts;
    uint64_t words = 8 * (2 * 2 + 2 * 2); /* slot words and credits, both legs */

    ring_call_init(call, RING_ALL_REDUCE, LK_FP32, LK_FP32, 16384, 1);
    counts = counts_of(call);
    CHECK(counts.bytes_sent == 65536 + words && counts.bytes_elided == 0);
    call->data = RING_ZERO;
    counts = counts_of(call);
    CHECK(counts.bytes_sent == words && counts.bytes_elided == 65536);
    ring_call_init(call, RING_REDUCE_SCATTER, LK_FP32, LK_FP32, 8192, 1);
    counts = counts_of(call);
    CHECK(counts.bytes_sent == 32768 + 8 * (2 + 2) && counts.bytes_elided == 0);
    ring_call_init(call, RING_ALL_REDUCE, LK_FP32, LK_FP32, 4, 1); /* one pack, to rank 0 */
    counts = counts_of(call);
    CHECK(counts.bytes_sent == 16 + 8 + 8 && counts.bytes_elided == 0);
    ring_call_init(call, RING_LINES, LK_BF16, LK_BF16, 1000, 1);
    counts = counts_of(call);
    CHECK(counts.bytes_sent == 4000 && counts.bytes_elided == 0);
    free(call);
}

/* ---- whether there are enough slots ---- */

/* Rank 1 comes when rank 0 has filled all slots and sleeps. */
static void come_late(struct ring_rank *me, void *arg)
{
    const uint32_t *sleepers = (const uint32_t *)((const char *)me->world->segments[0] +
                                                  LK_DOORBELL_OFFSET) +
                               1;

    while (me->rank == 1 && !__atomic_load_n(sleepers, __ATOMIC_SEQ_CST))
        usleep(100);
    ring_play(me, arg);
}

/* As many tiles for each unit. True: a rank has said that there were too few slots. */
static bool says_too_few(uint32_t slots, uint32_t tiles, void (*body)(struct ring_rank *, void *))
{
    struct ring_call *call = new_call();
    struct ring_world world;
    bool said;

    ring_world_init(&world, 2, 8, slots, 0);
    ring_call_init(call, RING_ALL_REDUCE, LK_FP32, LK_FP32,
                   (uint64_t)tiles * 2 * 8 * LK_SLOT_BYTES / 4, 1);
    ring_threads(&world, body, call);
    said = world.too_few[0] || world.too_few[1];
    ring_world_fini(&world);
    free(call);
    return said;
}

static void too_few_slots_are_noticed(void)
{
    CHECK(says_too_few(1, 40, play_one));
    CHECK(!says_too_few(4, 4, play_one));
    CHECK(
        !says_too_few(1, 2, come_late)); /* all that was waited for is a peer that was not there */
}

/* ---- segments ---- */

static void refused(int fd, size_t bytes)
{
    void *address = NULL;

    CHECK(lk_segment_map(fd, bytes, &address) == -EINVAL && !address);
}

static void only_segments_are_mapped(void)
{
    char path[] = "/tmp/lk_segment_XXXXXX";
    int file = mkstemp(path), loose = memfd_create("loose", MFD_ALLOW_SEALING), pipes[2], fd;
    void *first = NULL, *second = NULL;

    CHECK(lk_segment_new(10000, NULL, &first, &fd) == 0);
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK(lk_segment_map(fd, 10000, &second) == 0 && first != second);
    ((char *)first)[9999] = 7;
    CHECK(((const char *)second)[9999] == 7 && ((const char *)second)[0] == 0);
    CHECK(ftruncate(fd, 0) < 0 && ftruncate(fd, 1 << 20) < 0);
    refused(fd, 20000);
    refused(fd, 1);
    refused(fd, 0);
    refused(fd, SIZE_MAX);
    refused(-1, 10000);
    CHECK(file >= 0 && loose >= 0 && unlink(path) == 0 && pipe(pipes) == 0);
    CHECK(ftruncate(file, 12288) == 0 && ftruncate(loose, 12288) == 0);
    refused(file, 10000);
    refused(loose, 10000);
    refused(pipes[0], 10000);
    CHECK(fcntl(loose, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) == 0);
    refused(loose, 10000);
    CHECK(lk_segment_free(first, 10000) == 0);
    CHECK(((const char *)second)[9999] == 7); /* lives as long as one mapping */
    CHECK(lk_segment_free(second, 10000) == 0 && lk_segment_free(NULL, 10000) == -EINVAL);
    CHECK(lk_segment_new(0, NULL, &first, &fd) == -EINVAL);
    close(fd);
    close(file);
    close(loose);
    close(pipes[0]);
    close(pipes[1]);
}

/* ---- arguments ---- */

static void shapes_have_bounds(void)
{
    static const struct lk_ring_shape bad[] = {
        {1,                 1,                   1,                0,                         0               },
        { LK_RANKS_MAX + 1, 1,                   1,                0,                         0               },
        { 2,                0,                   1,                0,                         0               },
        { 2,                LK_CHANNELS_MAX + 1, 1,                0,                         0               },
        { 2,                1,                   0,                0,                         0               },
        { 2,                1,                   LK_SLOTS_MAX + 1, 0,                         0               },
        { 2,                1,                   1,                LK_GRANULE - 16,           0               },
        { 2,                1,                   1,                LK_LINES_MAX + LK_GRANULE, 0               },
        { 2,                1,                   1,                0,                         LK_SHORT_MAX + 1},
    };
    struct lk_ring_shape most = { LK_RANKS_MAX, LK_CHANNELS_MAX, LK_SLOTS_MAX, LK_LINES_MAX,
                                  LK_SHORT_MAX };

    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        CHECK(lk_ring_bytes(&bad[i]) == 0 && lk_ring_state_bytes(&bad[i]) == 0);
    CHECK(lk_ring_bytes(&most) > (size_t)4 << 30);
    CHECK(lk_ring_state_bytes(&most) == 128 + 16 * LK_LEGS * LK_RANKS_MAX * LK_CHANNELS_MAX);
}

/* Whatever is wrong, nothing is done and no peer is waited for. */
static void bad_arguments_are_refused(void)
{
    struct ring_world world;
    struct ring_rank me;
    float data[160] = { 0 };
    struct lk_scale pre = { 1, LK_FP32, (const char *)data + 2 };
    struct lk_rng odd = { 0, 0, (const uint64_t *)(const void *)((const char *)data + 4) };
    struct lk_buffers list = { data, data, 130 }, skewed = { (char *)data + 2, data, 4 };
    struct lk_buffers nowhere = { data, NULL, 4 }, endless = { data, data, UINT64_MAX / 2 };
    struct lk_reduction how = { LK_FP32, LK_FP32, NULL, 1, LK_NEAREST, NULL, NULL }, bad = how;

    ring_world_init(&world, 2, 2, 1, 512);
    ring_rank_init(&me, &world, 0);
#define REFUSED(...) CHECK(lk_rings_all_reduce(__VA_ARGS__, NULL) == -EINVAL)
    REFUSED(&me.rings, &how, &list, 1, 0);
    REFUSED(&me.rings, &how, NULL, 1, 1);
    REFUSED(&me.rings, &how, &skewed, 1, 1);
    REFUSED(&me.rings, &how, &nowhere, 1, 1);
    REFUSED(&me.rings, &how, &endless, 1, 1);
    bad.wire = LK_FP16;
    REFUSED(&me.rings, &bad, &list, 1, 1);
    bad.type = bad.wire = (enum lk_type)3;
    REFUSED(&me.rings, &bad, &list, 1, 1);
    bad = how;
    bad.rounding = LK_STOCHASTIC;
    REFUSED(&me.rings, &bad, &list, 1, 1);
    bad.rng = &odd;
    REFUSED(&me.rings, &bad, &list, 1, 1);
    bad = how;
    bad.pre = &pre;
    REFUSED(&me.rings, &bad, &list, 1, 1);
    CHECK(lk_lines_bytes(&how, &list, 1) == 528);
    CHECK(lk_lines_all_reduce(&me.rings, &how, &list, 1, 1, NULL) == -EINVAL); /* too long */
    bad = how;
    bad.wire = LK_BF16;
    list.count = 8;
    CHECK(lk_lines_bytes(&bad, &list, 1) == 16 && lk_lines_bytes(&how, &endless, 1) == SIZE_MAX);
    CHECK(lk_lines_all_reduce(&me.rings, &bad, &list, 1, 1, NULL) == -EINVAL);
    me.rings.rank = 2;
    REFUSED(&me.rings, &how, &list, 1, 1);
    ring_rank_init(&me, &world, 0);
    me.rings.segments[1] = NULL;
    REFUSED(&me.rings, &how, &list, 1, 1);
    ring_rank_init(&me, &world, 0);
    me.rings.state = NULL;
    REFUSED(&me.rings, &how, &list, 1, 1);
    ring_rank_init(&me, &world, 0);
    me.rings.abort = NULL;
    REFUSED(&me.rings, &how, &list, 1, 1);
    ring_rank_init(&me, &world, 0);
    list.count = 0;
    CHECK(lk_rings_all_reduce(&me.rings, &how, &list, 1, 1, NULL) == 0); /* nothing to do */
    CHECK(lk_rings_all_reduce(&me.rings, &how, NULL, 0, 1, NULL) == 0);
#undef REFUSED
    ring_world_fini(&world);
}

/* ---- streams ---- */

/* Work that a stream holds back until the test runs it, perhaps several times. */
struct held {
    void (*run)(void *arg);
    void (*release)(void *arg);
    void *arg;
};
static struct held held[2];
static _Thread_local size_t bytes_read, bytes_written;

static int hold(void *stream, const char *name, void (*run)(void *arg), void (*release)(void *arg),
                void *arg)
{
    struct held *place = stream;

    CHECK(strcmp(name, "lk_rings_all_reduce") == 0 && !place->run);
    *place = (struct held){ run, release, arg };
    return 0;
}

static int no_room(void *stream, const char *name, void (*run)(void *arg),
                   void (*release)(void *arg), void *arg)
{
    release(arg);
    return -ENOMEM;
}

static void count_use(const void *ptr, size_t bytes, bool write)
{
    *(write ? &bytes_written : &bytes_read) += bytes;
}

static void replay(struct ring_rank *me, void *arg)
{
    bytes_read = bytes_written = 0;
    held[me->rank].run(held[me->rank].arg);
    CHECK(bytes_read == 5000 * 4 + 2 &&
          bytes_written == 5000 * 4 + 8); /* and what only one call uses */
}

static void work_runs_when_its_stream_says_so(void)
{
    static const struct lk_host_ops ops = { hold, count_use }, full = { no_room, NULL };
    static float data[2][5000], out[2][5000];
    static uint16_t factors[2] = { 0x3f80, 0x3f80 };
    struct lk_reduction how = { LK_FP32, LK_FP32, NULL, 0.5F, LK_NEAREST, NULL, NULL };
    struct ring_world world;

    ring_world_init(&world, 2, 3, 1, 0);
    for (uint32_t r = 0; r < 2; r++) {
        struct lk_buffers buffers = { data[r], out[r], 5000 };
        struct lk_scale pre = { 0, LK_BF16, &factors[r] };
        struct ring_rank me;

        how.pre = &pre;
        ring_rank_init(&me, &world, r);
        lk_host_set_ops(&full);
        CHECK(lk_rings_all_reduce(&me.rings, &how, &buffers, 1, 1, NULL) == -ENOMEM);
        lk_host_set_ops(&ops);
        CHECK(lk_rings_all_reduce(&me.rings, &how, &buffers, 1, 1, &held[r]) == 0);
    }
    for (int turn = 1; turn <= 3; turn++) { /* as a graph is replayed: with what is there then */
        for (size_t i = 0; i < 5000; i++) {
            data[0][i] = (float)(i + 1);
            data[1][i] = (float)(turn * 100);
        }
        factors[0] = factors[1] = turn == 3 ? 0x4000 : 0x3f80;
        ring_threads(&world, replay, NULL);
        for (size_t i = 0; i < 5000; i++) {
            float want = (float)(i + 1 + (size_t)turn * 100) * (turn == 3 ? 1 : 0.5F);

            CHECK(out[0][i] == want && out[1][i] == want);
        }
    }
    for (uint32_t r = 0; r < 2; r++)
        held[r].release(held[r].arg);
    lk_host_set_ops(NULL);
    ring_world_fini(&world);
}

/* ---- rounding ---- */

static void halves_round_to_nearest(void)
{
    for (uint32_t half = 0; half < 0x7c00; half++) {
        float here = ref_fp16((uint16_t)half);
        float above = half + 1 == 0x7c00 ? 65536 : ref_fp16((uint16_t)(half + 1));
        float middle = (float)(((double)here + (double)above) / 2);
        const float near[] = { here, above, middle, ref_float(ref_bits(middle) - 1),
                               ref_float(ref_bits(middle) + 1) };

        for (size_t i = 0; i < 5; i++) {
            CHECK(narrow_fp16(near[i]) == ref_to_fp16(near[i]));
            CHECK(narrow_fp16(-near[i]) == ref_to_fp16(-near[i]));
        }
    }
    CHECK(narrow_fp16(ref_float(0x7f800000)) == 0x7c00 && narrow_fp16(1e30F) == 0x7c00);
    CHECK(narrow_fp16(ref_float(0xffc00001)) == 0x7fff && narrow_fp16(1e-30F) == 0);
}

int main(void)
{
    halves_round_to_nearest();
    shapes_have_bounds();
    only_segments_are_mapped();
    bad_arguments_are_refused();
    too_few_slots_are_noticed();
    what_travels_is_counted();
    work_runs_when_its_stream_says_so();
    lk_host_cta_threads = true;
    for (int op = 0; op < RING_OPS; op++) {
        an_abort_ends_waiting((enum ring_op)op, false);
        an_abort_ends_waiting((enum ring_op)op, true);
    }
    an_abort_at_any_point_ends_all();
    lk_bell_nap_ms = 1000 * 3600;
    numbers_may_wrap();
    stale_flags_do_not_come_back();
    banks_take_turns();
    return 0;
}
