/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of the rings, compiled for this processor, run for all ranks of a case at once.
 * Arguments: seconds for random cases (0: none), optionally the seed of one of each kind.
 */
#include "tests/kernels/emulation.hpp"

#include "kernels/cuda_exchange_direct.cuh"
#include "kernels/cuda_exchange_short.cuh"
#include "kernels/cuda_rings_body.cuh"
#include "kernels/cuda_rings_lines.cuh"
#include "kernels/cuda_rings_paths.cuh"
#include "kernels/rings_internal.h"
#include "tests/check.h"
#include "tests/kernels/exchange_plan.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/rings_cases.h"

#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

namespace emulation
{

index3 thread;

namespace
{

constexpr size_t stack_bytes = 32768;
constexpr uint64_t most_turns = 400u * 1000 * 1000; /* far beyond any case: nobody gets on */

/* A bulk copy. */
struct bulk_copy {
    uint64_t to;
    const void *from;
    std::vector<char> data; /* once it is read */
    uint32_t bytes;
};

struct fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::function<void()> run;
    index3 index;
    block *in;
    const uint32_t *word; /* sleeps while *word == value; NULL: can run */
    uint32_t value;
    bool ended;
    uint64_t syncs; /* of its warp */
    std::vector<bulk_copy> copies;
};

/* The last store to a word. */
struct store {
    const block *in;
    uint32_t thread;
    uint64_t syncs;
};

ucontext_t scheduler;
fiber *current;
std::vector<std::unique_ptr<fiber>> fibers;
std::unordered_map<uint64_t, store> stores; /* by address */

void enter()
{
    current->run();
    if (!current->copies.empty())
        fail("a thread ends without waiting for its bulk copies");
    current->ended = true;
    swapcontext(&current->context, &scheduler);
}

void turn(fiber *f)
{
    current = f;
    thread = f->index;
    swapcontext(&scheduler, &f->context);
}

} // namespace

void fail(const char *what)
{
    fprintf(stderr, "emulation: %s\n", what);
    abort();
}

void yield()
{
    fiber *me = current;

    swapcontext(&me->context, &scheduler);
}

void sleep_while(const uint32_t *word, uint32_t value)
{
    while (*word == value) {
        current->word = word;
        current->value = value;
        yield();
    }
}

block *current_block()
{
    return current->in;
}

void note_sync()
{
    current->syncs++;
}

void note_store(uint64_t address)
{
    store now = { current->in, thread.x, current->syncs };
    store &last = stores.try_emplace(address, now).first->second;

    if (last.in == now.in && last.thread != now.thread &&
        last.thread / lanes == now.thread / lanes && last.syncs == now.syncs)
        fail("two lanes store a word in no order");
    last = now;
}

void bulk_begin(uint64_t to, const void *from, uint32_t bytes)
{
    current->copies.push_back({ to, from, {}, bytes });
}

void bulk_read(uint32_t but)
{
    for (size_t i = 0; i + but < current->copies.size(); i++) {
        bulk_copy &c = current->copies[i];
        const char *from = static_cast<const char *>(c.from);

        if (c.data.empty())
            c.data.assign(from, from + c.bytes);
    }
}

void bulk_end()
{
    bulk_read(0);
    for (const bulk_copy &c : current->copies)
        memcpy(reinterpret_cast<void *>(c.to), c.data.data(), c.bytes);
    current->copies.clear();
}

const uint64_t *meet(uint64_t value, int line)
{
    warp *w = &current->in->warps[thread.x / lanes];
    uint32_t generation = w->generation;
    uint64_t *values = w->values[generation % 2];

    values[thread.x % lanes] = value;
    if (w->arrived && w->line != line)
        fail("lanes of a warp meet at different places");
    w->line = line;
    if (++w->arrived == lanes) {
        w->arrived = 0;
        w->generation++;
    } else {
        sleep_while(&w->generation, generation);
    }
    return values;
}

void start(block *in, uint32_t number, std::function<void()> run)
{
    auto f = std::make_unique<fiber>();

    getcontext(&f->context);
    f->stack = std::make_unique<char[]>(stack_bytes);
    f->context.uc_stack.ss_sp = f->stack.get();
    f->context.uc_stack.ss_size = stack_bytes;
    f->run = std::move(run);
    f->index = { number, 0, 0 };
    f->in = in;
    makecontext(&f->context, enter, 0);
    fibers.push_back(std::move(f));
}

/* Until all have ended. `between` is called now and then. */
void run_all(uint64_t seed, const std::function<void(uint64_t turns)> &between)
{
    std::vector<fiber *> left;
    uint64_t turns = 0;

    for (auto &f : fibers)
        left.push_back(f.get());
    while (!left.empty()) {
        seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
        size_t begin = (seed >> 33) % left.size(), i = begin;
        fiber *f = nullptr;

        do {
            fiber *candidate = left[i];

            if (!candidate->word || *candidate->word != candidate->value) {
                f = candidate;
                break;
            }
            i = i + 1 == left.size() ? 0 : i + 1;
        } while (i != begin);
        if (!f)
            fail("all threads wait for each other");
        f->word = nullptr;
        turn(f);
        if (f->ended) {
            left[i] = left.back();
            left.pop_back();
        }
        if (++turns > most_turns)
            fail("the call does not end");
        if (between)
            between(turns);
    }
    fibers.clear();
    stores.clear();
}

} // namespace emulation

namespace
{

using namespace lk_rings_device;

/* The path, and pieces of bulk copies of a warp. */
#ifndef LC_PATH
#define LC_PATH   slot_path
#define LC_PIECES 0
#endif

/* Few threads: quick. Ranks differ in shapes, which nobody else sees. */
struct small_roles : warp_roles<1, 2, 1, LC_PATH> {
};
struct ahead_roles : warp_roles<2, 1, 2, LC_PATH> {
    static constexpr uint32_t send_ahead = 8, reduce_ahead = 4, take_ahead = 16;
};
struct many_roles : warp_roles<2, 5, 3, LC_PATH> {
};
constexpr uint32_t shapes = 3;
constexpr uint32_t threads_of[shapes] = { small_roles::threads, ahead_roles::threads,
                                          many_roles::threads };
using exchange_way = std::conditional_t<std::is_same_v<LC_PATH, slot_path>, exchange_path,
                                        LC_PATH>; /* the library's */
using exchange_roles = exchange_warps<2, 3, 1, exchange_way, LC_PIECES>;
using unmasked_roles = exchange_warps<2, 3, 1, unmasked_path<exchange_way>, LC_PIECES>;
using direct_roles = direct_warps<8, 1>;
constexpr uint32_t line_threads = 64;

struct together {
    std::vector<std::vector<std::unique_ptr<lk_ring_launch>>> launches; /* per rank */
    std::vector<std::vector<std::unique_ptr<lk_exchange_launch>>> exchanges;
    uint32_t rank;
};
together collected;

struct cta {
    emulation::block block;
    std::vector<emulation::warp> warps;
    pipeline pipelines[ROLES];
    uint32_t shape;
    exchange_pipeline exchange[EXCHANGE_ROLES];
    std::vector<exchange_cursor> cursors;
    alignas(128) uint8_t stages[16 * stage_bytes + LC_PIECES * bulk_piece];
    lk_barrier there[LC_PIECES + 1];
    direct_team teams[direct_roles::moving];
};
static_assert(many_roles::stages <= sizeof(cta::stages) &&
              exchange_roles::stages <= sizeof(cta::stages));

template <class V> void run_thread(cta *c, const lk_ring_launch &l, uint32_t number, uint32_t ctas)
{
    const auto &args = reinterpret_cast<const ring_args<LK_RING_MAX> &>(l.head);

    if (l.head.work == LK_WORK_LINES) {
        if constexpr (sizeof(typename V::element) * V::pack == LK_PACK_BYTES)
            c->shape ? run_lines<V, 3>(args, number, ctas, line_threads)
                     : run_lines<V, 1>(args, number, ctas, line_threads);
        else
            emulation::fail("lines do not narrow");
    } else if (c->shape == 0) {
        run_cta<V, small_roles>(args, c->pipelines, number, ctas, c->stages);
    } else if (c->shape == 1) {
        run_cta<V, ahead_roles>(args, c->pipelines, number, ctas, c->stages);
    } else {
        run_cta<V, many_roles>(args, c->pipelines, number, ctas, c->stages);
    }
}

void run_one(cta *c, const lk_ring_launch &l, uint32_t number, uint32_t ctas)
{
    if (l.head.residual && l.head.rounding == LK_STOCHASTIC)
        run_thread<value_fp32_bf16_fed<true>>(c, l, number, ctas);
    else if (l.head.residual)
        run_thread<value_fp32_bf16_fed<false>>(c, l, number, ctas);
    else if (l.head.wire != l.head.type && l.head.rounding == LK_STOCHASTIC)
        run_thread<value_fp32_bf16<true>>(c, l, number, ctas);
    else if (l.head.wire != l.head.type)
        run_thread<value_fp32_bf16<false>>(c, l, number, ctas);
    else if (l.head.type == LK_FP32)
        run_thread<value_fp32>(c, l, number, ctas);
    else if (l.head.type == LK_BF16)
        run_thread<value_16<false>>(c, l, number, ctas);
    else
        run_thread<value_16<true>>(c, l, number, ctas);
}

/* One launch of every rank. */
void run_launches(const std::vector<const lk_ring_launch *> &launches, uint64_t seed,
                  const std::function<void(uint64_t)> &between)
{
    std::vector<std::unique_ptr<cta>> ctas;

    for (const lk_ring_launch *l : launches) {
        uint32_t shape = static_cast<uint32_t>(seed + l->head.rings.rank) % shapes;
        uint32_t threads = l->head.work == LK_WORK_LINES ? line_threads : threads_of[shape];

        for (uint32_t number = 0; number < l->head.ctas; number++) {
            ctas.push_back(std::make_unique<cta>());
            cta *c = ctas.back().get();

            c->shape = shape;
            c->warps.resize(threads / 32);
            c->block = { threads, 0, 0, c->warps.data(), {} };
            for (uint32_t t = 0; t < threads; t++)
                emulation::start(&c->block, t,
                                 [c, l, number] { run_one(c, *l, number, l->head.ctas); });
        }
    }
    emulation::run_all(seed, between);
}

/* What each rank calls one after another; ranks do not wait for each other between calls. A thread of a rank's next call
 * begins when all threads of the one before have ended. */
struct sequence {
    std::vector<const lk_exchange_launch *> calls;
    std::vector<std::unique_ptr<cta>> ctas;
    std::vector<uint32_t> ended;   /* threads, of each call */
    std::vector<uint32_t> threads; /* of a CTA of each call */
};

constexpr uint32_t short_threads = 96;

/* Which kernel runs a call does not matter to the other ranks: some calls do not go through the one that is made for
 * them. */
enum exchange_kernel {
    FOR_ALL,
    FOR_SHORT,
    DIRECTLY
};
uint32_t run_by[DIRECTLY + 1]; /* calls */

exchange_kernel choose_kernel(const lk_exchange_launch &l, uint64_t seed)
{
    const lk_ring_shape *shape = &l.head.rings.shape;
    bool all_short = true;

    for (uint32_t i = 0; i < l.head.takes[shape->ranks]; i++)
        all_short = all_short && lk_message_is_short(shape, l.entries[i].bytes);
    if (seed % 4 == 0)
        return FOR_ALL;
    if (all_short && seed % 4 != 1)
        return FOR_SHORT;
    return runs_directly(l) ? DIRECTLY : all_short ? FOR_SHORT : FOR_ALL;
}

uint32_t threads_for(exchange_kernel kernel)
{
    return kernel == FOR_SHORT  ? short_threads
           : kernel == DIRECTLY ? direct_roles::threads
                                : exchange_roles::threads;
}

void run_exchange_thread(cta *c, const lk_exchange_launch &l, exchange_kernel kernel,
                         uint32_t number)
{
    const auto &args = reinterpret_cast<const exchange_args<LK_EXCHANGE_MAX> &>(l.head);
    uint32_t ctas = l.head.ctas;

    if (kernel == FOR_SHORT)
        run_short_cta(args, c->cursors.data(), number, ctas, short_threads);
    else if (kernel == DIRECTLY)
        run_direct_cta<direct_roles>(args, c->teams, number, ctas);
    else if (args.head.mask.rows)
        run_exchange_cta<exchange_roles>(args, c->exchange, c->cursors.data(), number, ctas,
                                         c->stages, c->there);
    else
        run_exchange_cta<unmasked_roles>(args, c->exchange, c->cursors.data(), number, ctas,
                                         c->stages, c->there);
}

void run_exchanges(std::vector<sequence> *ranks, uint64_t seed,
                   const std::function<void(uint64_t)> &between = {})
{
    for (sequence &s : *ranks) {
        s.ended.assign(s.calls.size(), 0);
        s.threads.assign(s.calls.size(), 0);
        for (size_t i = 0; i < s.calls.size(); i++) {
            const lk_exchange_launch *l = s.calls[i];
            exchange_kernel kernel = choose_kernel(*l, seed + i + l->head.rings.rank);

            run_by[kernel]++;
            s.threads[i] = threads_for(kernel);
            for (uint32_t number = 0; number < l->head.ctas; number++) {
                s.ctas.push_back(std::make_unique<cta>());
                cta *c = s.ctas.back().get();

                c->warps.resize(s.threads[i] / 32);
                c->cursors.resize(exchange_cursors(&l->head.rings.shape, l->head.ctas));
                c->block = { s.threads[i], 0, 0, c->warps.data(), {} };
                for (uint32_t t = 0; t < s.threads[i]; t++)
                    emulation::start(&c->block, t, [&s, c, l, number, i, kernel] {
                        while (i && s.ended[i - 1] < s.calls[i - 1]->head.ctas * s.threads[i - 1])
                            emulation::sleep_while(&s.ended[i - 1], s.ended[i - 1]);
                        run_exchange_thread(c, *l, kernel, number);
                        s.ended[i]++;
                    });
            }
        }
    }
    emulation::run_all(seed, between);
}

struct aligned_memory {
    uint8_t *bytes;
    size_t size;

    explicit aligned_memory(size_t n) : size(n)
    {
        bytes = static_cast<uint8_t *>(aligned_alloc(128, (n + 127) / 128 * 128));
        CHECK(bytes);
        memset(bytes, 0, n);
    }
    ~aligned_memory()
    {
        free(bytes);
    }
    aligned_memory(const aligned_memory &) = delete;
    aligned_memory &operator=(const aligned_memory &) = delete;
};

/* What lasts over several calls. */
struct node {
    lk_ring_shape shape;
    std::vector<std::unique_ptr<aligned_memory>> segments, states;
    uint32_t abort = 0;
    uint32_t too_few[LK_RANKS_MAX] = {};

    explicit node(const lk_ring_shape &s) : shape(s)
    {
        for (uint32_t r = 0; r < s.ranks; r++) {
            segments.push_back(std::make_unique<aligned_memory>(lk_ring_bytes(&s)));
            states.push_back(std::make_unique<aligned_memory>(lk_ring_state_bytes(&s)));
            /* what slots hold before they are written must not matter */
            size_t slots = lk_slot_offset(&s, 0, 0, 0, 0);
            memset(segments[r]->bytes + slots, 0x77, segments[r]->size - slots);
        }
    }
    lk_rings view(uint32_t rank)
    {
        lk_rings v = {};

        v.shape = shape;
        v.rank = rank;
        v.state = states[rank]->bytes;
        v.abort = &abort;
        v.too_few = &too_few[rank];
        for (uint32_t r = 0; r < shape.ranks; r++)
            v.segments[r] = segments[r]->bytes;
        return v;
    }
};

void collect(node *n, const rings_data *data, uint32_t rank, uint8_t *in, uint8_t *out,
             float *residual)
{
    const rings_case *c = data->c;
    std::vector<lk_buffers> list(data->ranks[rank].list, data->ranks[rank].list + data->n);
    lk_scale scale;
    lk_reduction how = rings_reduction(data, rank, &scale, residual);
    lk_rings view = n->view(rank);
    int err;

    for (lk_buffers &b : list) {
        b.in = in + reinterpret_cast<uintptr_t>(b.in);
        b.out = out + reinterpret_cast<uintptr_t>(b.out);
    }
    collected.rank = rank;
    if (c->op == RINGS_ALL_REDUCE)
        err = lk_rings_all_reduce(&view, &how, list.data(), data->n, c->ctas[rank % 3], nullptr);
    else if (c->op == RINGS_REDUCE_SCATTER)
        err = lk_rings_reduce_scatter(&view, &how, list.data(), data->n, c->ctas[rank % 3],
                                      nullptr);
    else
        err = lk_lines_all_reduce(&view, &how, list.data(), data->n, c->ctas[rank % 3], nullptr);
    CHECK(err == 0);
}

/* Runs a case on the rings of a node and compares. granules: of tiles instead of what the shape makes of the size, for many
 * tiles of little data; results are the same if nothing is rounded on the wire. */
void run_case(node *n, const rings_case &c, uint64_t seed,
              const std::function<void(uint64_t)> &between = {}, uint32_t granules = 0)
{
    rings_data *data = rings_data_make(&c);
    std::vector<std::unique_ptr<aligned_memory>> ins, outs, residuals;
    auto residual_of = [&residuals](uint32_t r) {
        return reinterpret_cast<float *>(residuals[r]->bytes);
    };

    collected.launches.clear();
    collected.launches.resize(c.shape.ranks);
    for (uint32_t r = 0; r < c.shape.ranks; r++) {
        const rings_rank &rank = data->ranks[r];

        ins.push_back(std::make_unique<aligned_memory>(rank.in_bytes));
        outs.push_back(std::make_unique<aligned_memory>(rank.out_bytes));
        memcpy(ins[r]->bytes, rank.in, rank.in_bytes);
        if (rank.out)
            memcpy(outs[r]->bytes, rank.out, rank.out_bytes);
        residuals.push_back(std::make_unique<aligned_memory>(data->residual_bytes));
        if (rank.residual)
            memcpy(residuals[r]->bytes, rank.residual, data->residual_bytes);
        collect(n, data, r, ins[r]->bytes, rank.out ? outs[r]->bytes : ins[r]->bytes,
                residual_of(r));
    }
    for (size_t i = 0; i < collected.launches[0].size(); i++) {
        std::vector<const lk_ring_launch *> launches;

        for (auto &of_rank : collected.launches) {
            if (granules)
                of_rank.at(i)->head.tile_granules = granules;
            launches.push_back(of_rank.at(i).get());
        }
        run_launches(launches, seed, between);
    }
    for (uint32_t r = 0; r < c.shape.ranks && !n->abort; r++) {
        rings_compare(data, r, c.in_place ? ins[r]->bytes : outs[r]->bytes);
        rings_compare_residual(data, r, residual_of(r));
    }
    rings_data_free(data);
}

/* Parts of a rank's messages, from a begin to an end of both lists. */
struct exchange_part {
    size_t send, send_end, recv, recv_end;
};

void collect_exchange(node *n, const exchange_side *side, const exchange_part &part, uint32_t ctas)
{
    lk_rings view = n->view(side->rank);

    collected.rank = side->rank;
    CHECK(lk_rings_exchange(&view, side->sends + part.send, part.send_end - part.send,
                            side->recvs + part.recv, part.recv_end - part.recv,
                            side->mask.rows ? &side->mask : nullptr, ctas, nullptr) == 0);
}

/* Every rank makes the calls that `parts` gives for it. */
void run_plan(node *n, const exchange_plan &plan, uint64_t seed,
              const std::function<std::vector<exchange_part>(const exchange_side &)> &parts)
{
    std::vector<exchange_side *> sides;
    std::vector<sequence> ranks(plan.ranks);

    collected.exchanges.clear();
    collected.exchanges.resize(plan.ranks);
    for (uint32_t r = 0; r < plan.ranks; r++) {
        sides.push_back(exchange_side_make(&plan, r));
        for (const exchange_part &part : parts(*sides[r]))
            collect_exchange(n, sides[r], part, 1 + static_cast<uint32_t>((seed + r) % 3));
        for (auto &launch : collected.exchanges[r])
            ranks[r].calls.push_back(launch.get());
    }
    run_exchanges(&ranks, seed);
    for (exchange_side *side : sides) {
        exchange_side_check(side);
        exchange_side_free(side);
    }
}

std::vector<exchange_part> all_at_once(const exchange_side &side)
{
    return {
        {0, side.n_sends, 0, side.n_recvs}
    };
}

void say(const rings_case &c)
{
    char text[400];

    rings_describe(&c, text, sizeof(text));
    printf("%s\n", text);
    fflush(stdout);
}

void cases_give_the_bits_that_follow_from_the_arguments()
{
    for (size_t i = 0; i < rings_case_count; i++) {
        node n(rings_cases[i].shape);

        say(rings_cases[i]);
        run_case(&n, rings_cases[i], i);
        run_case(&n, rings_cases[i], i + 2); /* counters run on; another shape */
    }
}

void calls_of_all_kinds_follow_each_other_on_one_set_of_rings()
{
    lk_ring_shape shape = { 2, 3, 2, 16384, 0 };
    node n(shape);

    for (uint64_t i = 0; i < 24; i++) {
        rings_case c;

        rings_random_case(i, 2, 6000, &c);
        c.shape = shape;
        run_case(&n, c, i);
    }
}

/* What the segment of `rank` looks like after so many messages of each unit with `peer`. */
void pretend_messages(node *n, uint32_t rank, uint32_t peer, uint64_t messages)
{
    uint8_t *segment = n->segments[rank]->bytes;
    const lk_ring_shape *s = &n->shape;

    for (uint32_t leg = 0; leg < LK_LEGS; leg++) {
        uint32_t slots = lk_leg_slots(s, leg);

        for (uint32_t channel = 0; channel < s->channels; channel++) {
            auto *words = reinterpret_cast<uint64_t *>(segment +
                                                       lk_words_offset(s, leg, peer, channel));

            *reinterpret_cast<uint64_t *>(segment +
                                          lk_credit_offset(s, leg, peer, channel)) = messages;
            for (uint64_t m = messages - slots + 1; m <= messages; m++)
                words[(m - 1) % slots] = lk_slot_word(m, 0);
        }
    }
}

void counters_pass_the_end_of_their_words()
{
    lk_ring_shape shape = { 2, 2, 3, 16384, 0 };
    node n(shape);
    rings_case c = rings_cases[1];
    const uint64_t before = (UINT64_C(1) << 32) - 2;

    c.shape = shape;
    for (uint32_t r = 0; r < 2; r++) {
        auto *state = reinterpret_cast<lk_ring_state *>(n.states[r]->bytes);
        auto *counters = reinterpret_cast<uint64_t *>(n.states[r]->bytes + LK_STATE_HEADER);

        state->lines = before;
        for (size_t i = 0; i < 2 * lk_units(&shape); i++)
            counters[i] = before;
        pretend_messages(&n, r, 1 - r, before);
    }
    run_case(&n, c, 1);
    run_case(&n, c, 2);
    for (int i = 0; i < 4; i++) {
        rings_case line = rings_cases[17];

        line.shape = shape;
        run_case(&n, line, i);
    }
    CHECK(reinterpret_cast<lk_ring_state *>(n.states[0]->bytes)->lines > before + 4);
}

void counts_say_what_was_written_and_what_was_not()
{
    rings_case c = rings_cases[2];
    node n(c.shape);
    uint64_t payload = 0;

    c.zeros = 0;
    run_case(&n, c, 1);
    for (uint32_t r = 0; r < 2; r++) {
        auto *counts = reinterpret_cast<lk_ring_counts *>(n.states[r]->bytes);

        CHECK(counts->bytes_elided == 0);
        payload += counts->bytes_sent;
    }
    /* every pack once to its owner and once back, and words */
    CHECK(payload > 2 * 2 * c.count && payload < 2 * 2 * c.count + 20000);
    c.zeros = 100;
    run_case(&n, c, 1);
    for (uint32_t r = 0; r < 2; r++)
        CHECK(reinterpret_cast<lk_ring_counts *>(n.states[r]->bytes)->bytes_elided > c.count);
}

/* With one CTA a rank and so many tiles for each unit. */
bool says_too_few(const lk_ring_shape &shape, uint64_t tiles)
{
    rings_case c = rings_cases[1];
    node n(shape);

    c.shape = shape;
    c.count = static_cast<uint32_t>(tiles * shape.ranks * shape.channels * LK_SLOT_BYTES / 4);
    for (uint32_t &ctas : c.ctas)
        ctas = 1;
    run_case(&n, c, 1);
    return n.too_few[0] || n.too_few[1];
}

void too_few_slots_are_noticed()
{
    CHECK(says_too_few({ 2, 1, 1, 0, 0 }, 10));
    CHECK(!says_too_few({ 2, 1, 8, 0, 0 }, 8));
    CHECK(!says_too_few({ 2, 5, 1, 0, 0 },
                        2)); /* who waits for the second may wait for a peer to come */
}

void an_abort_ends_a_call_that_a_rank_never_joins()
{
    for (size_t which : { 2u, 3u, 13u }) {
        rings_case c = rings_cases[which];
        node n(c.shape);
        rings_data *data = rings_data_make(&c);

        collected.launches.clear();
        collected.launches.resize(c.shape.ranks);
        for (uint32_t r = 0; r < c.shape.ranks; r++)
            collect(&n, data, r, data->ranks[r].in, data->ranks[r].out, nullptr);
        std::vector<const lk_ring_launch *> launches;
        for (uint32_t r = 1; r < c.shape.ranks; r++)
            launches.push_back(collected.launches[r][0].get());
        run_launches(launches, which, [&](uint64_t turns) {
            if (turns == 200000)
                n.abort = 1;
        });
        CHECK(n.abort == 2); /* who was cut short says so */
        rings_data_free(data);
    }
}

/* ---- exchanges ---- */

void exchanges_give_the_bytes_that_were_sent()
{
    for (uint64_t seed = 0; seed < 16; seed++) {
        exchange_plan plan;
        lk_ring_shape shape = { 2 + static_cast<uint32_t>(seed % 3),
                                1 + static_cast<uint32_t>(seed / 3 % 3),
                                1 + static_cast<uint32_t>(seed / 2 % 2), 0,
                                seed % 4 ? 3000 * static_cast<uint32_t>(seed % 4) : 0 };
        node n(shape);

        exchange_random(seed, shape.ranks, 12, 60000, &plan);
        run_plan(&n, plan, seed, all_at_once);
        run_plan(&n, plan, seed + 1, all_at_once); /* counters run on */
        free(plan.messages);
    }
}

/* Sums need as many tiles from each peer, but peers have not sent as many messages before. */
void exchanges_and_reductions_follow_each_other_on_one_set_of_rings()
{
    lk_ring_shape shape = { 3, 3, 2, 16384, 5000 };
    node n(shape);

    for (uint64_t i = 0; i < 12; i++) {
        exchange_plan plan;
        rings_case c;

        exchange_random(i, 3, 9, 60000, &plan);
        run_plan(&n, plan, i, all_at_once);
        rings_random_case(i, 3, 6000, &c);
        c.shape = shape;
        run_case(&n, c, i);
        free(plan.messages);
    }
}

void check_counts(const node &n, const exchange_plan &plan, uint32_t rank)
{
    auto *counts = reinterpret_cast<lk_ring_counts *>(n.states[rank]->bytes);
    lk_ring_counts want = exchange_counts(&plan, rank, &n.shape);

    CHECK(counts->bytes_sent == want.bytes_sent);
    CHECK(counts->bytes_elided == want.bytes_elided);
}

void exchanges_count_what_was_written_and_what_was_not()
{
    for (uint32_t zeros = 0; zeros <= 100; zeros += 50) {
        exchange_message messages[2] = {};
        exchange_plan plan = { 2, 0, 0, 2, messages };
        node n({ 2, 2, 2, 0, 40000 });

        messages[0] = { 0, 1, 70003, 5, zeros, 3, 0, true, false, false };
        messages[1] = { 1, 0, 40000, 6, zeros, 0, 0, true, false, false };
        run_plan(&n, plan, zeros, all_at_once);
        for (uint32_t r = 0; r < 2; r++)
            check_counts(n, plan, r);
    }
}

/* Bytes of granules that a rank has for another one and that have no live row. */
uint64_t dead_bytes(const exchange_plan &plan, uint32_t rank)
{
    exchange_side *side = exchange_side_make(&plan, rank);
    uint64_t dead = 0;

    for (size_t i = 0; i < side->n_sends; i++) {
        const lk_message &m = side->sends[i];
        uint64_t begin = reinterpret_cast<uint8_t *>(m.address) - side->in;

        for (uint64_t at = 0; at < m.bytes && m.peer != rank; at += LK_GRANULE) {
            uint64_t size = m.bytes - at < LK_GRANULE ? m.bytes - at : LK_GRANULE, row;
            uint64_t last = (begin + at + size - 1) / plan.row_bytes;

            for (row = (begin + at) / plan.row_bytes; row <= last; row++)
                if (lk_is_live(side->mask.bits, row))
                    break;
            dead += row > last ? size : 0;
        }
    }
    exchange_side_free(side);
    return dead;
}

/* In messages and in what a rank has for itself, where loads are wide: granules lie in rows, across their borders, and hold
 * several of them. */
void dead_rows_of_any_size_do_not_travel()
{
    for (uint64_t row_bytes : { 16, 63, 64, 100, 512, 700, 4096, 5000, 30000 }) {
        exchange_message messages[] = {
            {0,  1, 60000, 1, 0, 0, 0, true,  false, false},
            { 0, 0, 60000, 2, 0, 0, 0, true,  false, false},
            { 0, 1, 50000, 3, 0, 0, 4, false, false, false},
            { 1, 0, 40000, 4, 0, 4, 0, true,  false, false},
            { 1, 1, 40000, 5, 0, 0, 0, false, false, false},
        };
        exchange_plan plan = { 2, row_bytes, row_bytes, 5, messages };
        node n({ 2, 2, 2, 0, 0 });

        run_plan(&n, plan, row_bytes, all_at_once);
        for (uint32_t r = 0; r < 2; r++) {
            auto *counts = reinterpret_cast<lk_ring_counts *>(n.states[r]->bytes);

            CHECK(counts->exchange_elided == dead_bytes(plan, r));
        }
    }
}

/* As in test_exchange.c: rank 0 has to turn to 2 while 1 does not listen yet. With one slot. */
void a_peer_that_is_busy_holds_up_no_other()
{
    exchange_message messages[3] = {};
    exchange_plan plan = { 3, 0, 0, 3, messages };

    messages[0] = { 0, 1, 50000, 1, 0, 0, 0, false, false, false };
    messages[1] = { 0, 2, 50000, 2, 0, 0, 0, false, false, false };
    messages[2] = { 2, 1, 50000, 3, 0, 0, 0, false, false, false };
    for (uint64_t seed = 0; seed < 4; seed++) {
        node n({ 3, 1 + static_cast<uint32_t>(seed % 2), 1, 0, seed / 2 ? 60000U : 0U });

        run_plan(&n, plan, seed, [](const exchange_side &side) -> std::vector<exchange_part> {
            if (side.rank == 0)
                return {
                    {0, 2, 0, 0}
                };
            if (side.rank == 1)
                return {
                    {0,  0, 1, 2},
                    { 0, 0, 0, 1}
                };
            return {
                {0,  0, 0, 1},
                { 0, 1, 0, 0}
            };
        });
    }
}

void an_abort_ends_an_exchange_that_a_rank_never_joins(uint32_t short_bytes)
{
    exchange_message messages[2] = {};
    exchange_plan plan = { 3, 0, 0, 2, messages };
    node n({ 3, 2, 1, 0, short_bytes });
    std::vector<sequence> ranks(3);
    exchange_side *sides[2];

    messages[0] = { 0, 2, 100000, 1, 0, 0, 0, false, false, false };
    messages[1] = { 2, 1, 100000, 2, 0, 0, 0, false, false, false };
    collected.exchanges.clear();
    collected.exchanges.resize(3);
    for (uint32_t r = 0; r < 2; r++) {
        sides[r] = exchange_side_make(&plan, r);
        collect_exchange(&n, sides[r], all_at_once(*sides[r])[0], 2);
        ranks[r].calls.push_back(collected.exchanges[r][0].get());
    }
    run_exchanges(&ranks, 1, [&](uint64_t turns) {
        if (turns == 200000)
            n.abort = 1;
    });
    CHECK(n.abort == 2);
    for (exchange_side *side : sides)
        exchange_side_free(side);
}

/* ---- shapes that take the ways which are taken rarely ---- */

/* Whose tiles are one granule each, so that there are many. */
rings_case granule_case(const lk_ring_shape &shape, rings_op op, uint32_t ctas, uint64_t tiles)
{
    rings_case c = rings_cases[1];

    c.shape = shape;
    c.op = op;
    c.count = static_cast<uint32_t>(tiles * LK_GRANULE / 4 - 5);
    for (uint32_t i = 0; i < 3; i++)
        c.ctas[i] = ctas + i;
    return c;
}

/* Sets all that counts messages to so many. */
void pretend_all(node *n, uint64_t messages)
{
    for (uint32_t r = 0; r < n->shape.ranks; r++) {
        auto *counters = reinterpret_cast<uint64_t *>(n->states[r]->bytes + LK_STATE_HEADER);

        for (size_t i = 0; i < 2 * lk_units(&n->shape); i++)
            counters[i] = messages;
        for (uint32_t peer = 0; peer < n->shape.ranks; peer++)
            if (peer != r)
                pretend_messages(n, r, peer, messages);
    }
}

/* Counts of units are not kept by lanes, and pass the end of their words. */
void one_cta_has_more_units_than_lanes()
{
    node two({ 2, 40, 1, 0, 0 }), three({ 3, 17, 2, 0, 0 });

    pretend_all(&two, (UINT64_C(1) << 32) - 2);
    run_case(&two, granule_case(two.shape, RINGS_ALL_REDUCE, 1, 100), 0, {}, 1);
    pretend_all(&three, (UINT64_C(1) << 32) - 2);
    run_case(&three, granule_case(three.shape, RINGS_REDUCE_SCATTER, 1, 20), 0, {}, 1);
}

/* Three messages of each pair, with a tile in every channel. */
std::vector<exchange_message> three_of_each_pair(const lk_ring_shape &shape)
{
    std::vector<exchange_message> messages;

    for (uint32_t i = 0; i < 3 * shape.ranks * shape.ranks; i++) {
        exchange_message m = {};

        m.src = i / shape.ranks % shape.ranks;
        m.dst = i % shape.ranks;
        m.bytes = shape.channels * LK_GRANULE - i % 300;
        m.seed = i;
        m.zeros = i % 3 * 50;
        m.out_skew = static_cast<uint8_t>(i % 5);
        m.scan = i % 2;
        messages.push_back(m);
    }
    return messages;
}

/* Numbers of messages pass 2^32, cursors are of more units than lanes, and units do not share out lanes evenly. */
void exchanges_of_many_units_and_ranks()
{
    for (const lk_ring_shape &shape : {
             lk_ring_shape{3,   12, 1, 0, 0   },
             lk_ring_shape{ 3,  12, 1, 0, 8192},
             lk_ring_shape{ 10, 1,  2, 0, 0   }
    }) {
        std::vector<exchange_message> messages = three_of_each_pair(shape);
        exchange_plan plan = { shape.ranks, 0, 0, messages.size(), messages.data() };
        node n(shape);

        pretend_all(&n, (UINT64_C(1) << 32) - 2);
        run_plan(&n, plan, 0, all_at_once);
    }
}

/* From the first tile on, where all lines of the slots are written, and where flags pass the end of their words. */
/* Tiles in lines and tiles of zeros in slots, in one call: the words of both may be published together. */
void words_that_are_refreshed_come_before_those_that_count()
{
    for (uint64_t seed = 0; seed < 24; seed++) {
        std::vector<exchange_message> messages;
        node n({ 3, 1, 1, 0, 4000 });

        for (uint32_t i = 0; i < 24; i++)
            messages.push_back(
                { 0, 1, i % 4 < 2 ? 100U : 4500U, i, 100, 0, 0, true, false, false });
        exchange_plan plan = { 3, 0, 0, messages.size(), messages.data() };

        pretend_all(&n, 0x800000 - 4);
        run_plan(&n, plan, seed, all_at_once);
    }
}

/* What a job has that asks for as many CTAs as there may be, but gets few. */
void as_many_channels_as_there_may_be()
{
    node sums({ 2, LK_CHANNELS_MAX, 2, 16384, 0 });
    lk_ring_shape few = { 2, LK_CHANNELS_MAX, 1, 0, 0 },
                  lines = { 2, LK_CHANNELS_MAX, 4, 0, 70000 };

    pretend_all(&sums, (UINT64_C(1) << 32) - 2);
    run_case(&sums, granule_case(sums.shape, RINGS_ALL_REDUCE, 3, 900), 0);
    run_case(&sums, granule_case(sums.shape, RINGS_REDUCE_SCATTER, 1, 300), 1);
    for (const lk_ring_shape &shape : { few, lines }) {
        std::vector<exchange_message> messages = three_of_each_pair(shape);
        exchange_plan plan = { shape.ranks, 0, 0, messages.size(), messages.data() };
        node n(shape);

        pretend_all(&n, (UINT64_C(1) << 32) - 2);
        run_plan(&n, plan, 1, all_at_once);
        run_plan(&n, plan, 2, all_at_once);
    }
}

void short_messages_go_through_either_kernel()
{
    for (uint64_t seed = 0; seed < 24; seed++) {
        const uint64_t before[] = { 0, 0x7ffffe, (UINT64_C(1) << 32) - 3 };
        lk_ring_shape shape = { 2 + static_cast<uint32_t>(seed % 3),
                                1 + static_cast<uint32_t>(seed / 3 % 4),
                                1 + static_cast<uint32_t>(seed / 2 % 2), 0, 30000 };
        exchange_plan plan;
        node n(shape);

        pretend_all(&n, before[seed / 2 % 3]);
        exchange_random(seed, shape.ranks, 12, shape.short_bytes + 1, &plan);
        run_plan(&n, plan, seed, all_at_once);
        run_plan(&n, plan, seed + 1, all_at_once);
        free(plan.messages);
    }
}

/* Calls of one end have other messages than those of the other, so each may wait for what a call has that has not come. */
void ends_need_not_group_alike()
{
    for (uint64_t seed = 0; seed < 8; seed++) {
        const size_t ends[2][3] = {
            {2,  4, 4},
            { 1, 3, 4}
        };
        lk_ring_shape shape = { 2 + static_cast<uint32_t>(seed / 4), 1,
                                1 + static_cast<uint32_t>(seed / 2 % 2), 0, 0 };
        std::vector<exchange_message> messages;
        node n(shape);

        for (uint32_t i = 0; i < 4; i++)
            messages.push_back({ 0, 1, LK_SLOT_BYTES, i, 0, 0, 0, false, false, false });
        exchange_plan plan = { shape.ranks, 0, 0, messages.size(), messages.data() };

        run_plan(&n, plan, seed, [&ends](const exchange_side &side) {
            std::vector<exchange_part> parts;
            size_t at = 0;

            for (size_t end : ends[side.rank == 1]) {
                size_t until = side.rank > 1 ? 0 : end;

                if (until > at)
                    parts.push_back(side.rank == 0 ? exchange_part{ at, until, 0, 0 }
                                                   : exchange_part{ 0, 0, at, until });
                at = until;
            }
            return parts;
        });
    }
}

/* Messages of one pair each way. */
void direct_calls_count_what_was_written()
{
    exchange_message messages[2] = {};
    exchange_plan plan = { 2, 0, 0, 2, messages };
    uint32_t before = run_by[DIRECTLY];

    messages[0] = { 0, 1, 3 * LK_SLOT_BYTES, 5, 0, 3, 0, true, false, false };
    messages[1] = { 1, 0, 40000, 6, 50, 0, 0, true, false, false };
    for (uint64_t seed = 0; seed < 4; seed++) {
        node n({ 2, 2, 2, 0, 0 });

        run_plan(&n, plan, seed, all_at_once);
        for (uint32_t r = 0; r < 2; r++)
            check_counts(n, plan, r);
    }
    CHECK(run_by[DIRECTLY] > before);
}

/* Each message a call of its own, and none waits for what the other rank has called, so slots are used again and again. */
void calls_of_few_tiles_follow_each_other()
{
    for (uint64_t seed = 0; seed < 2; seed++) {
        lk_ring_shape shape = { 2, 2, 1, 0, 0 };
        std::vector<exchange_message> messages;
        uint32_t before = run_by[DIRECTLY];
        node n(shape);

        for (uint32_t i = 0; i < 12; i++)
            messages.push_back({ i % 2, 1 - i % 2, shape.channels * LK_SLOT_BYTES, i, 0, 0, 0, true,
                                 false, false });
        exchange_plan plan = { shape.ranks, 0, 0, messages.size(), messages.data() };

        run_plan(&n, plan, seed, [](const exchange_side &side) {
            std::vector<exchange_part> parts;

            for (size_t i = 0; i < side.n_sends; i++)
                parts.push_back({ i, i + 1, i, i + 1 });
            return parts;
        });
        CHECK(run_by[DIRECTLY] > before + 4);
    }
}

/* Tiles that all warps of a team have a part of, to and from every rank. */
void teams_move_whole_tiles()
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        lk_ring_shape shape = { 2 + static_cast<uint32_t>(seed % 4 == 1), 2,
                                1 + static_cast<uint32_t>(seed % 3 != 0), 0, 0 };
        std::vector<exchange_message> messages;
        uint64_t bytes = shape.channels * LK_SLOT_BYTES * (1 + seed % 4) - seed / 4 * 700;
        uint32_t before = run_by[DIRECTLY];
        node n(shape);

        for (uint32_t i = 0; i < shape.ranks * shape.ranks; i++)
            messages.push_back(
                { i / shape.ranks, i % shape.ranks, bytes, i, 0, 0, 0, true, false, false });
        exchange_plan plan = { shape.ranks, 0, 0, messages.size(), messages.data() };

        for (uint64_t again = 0; again < 3; again++)
            run_plan(&n, plan, seed + again, all_at_once);
        CHECK((run_by[DIRECTLY] > before) ==
              (1 + seed % 4 <= direct_tiles &&
               2 * (1 + seed % 4) <= lk_leg_slots(&shape, LK_EXCHANGE) + 1));
    }
}

void messages_of_few_tiles_go_through_either_kernel()
{
    uint32_t before = run_by[DIRECTLY];

    for (uint64_t seed = 0; seed < 24; seed++) {
        const uint64_t messages[] = { 0, 0x7ffffe, (UINT64_C(1) << 32) - 3 };
        lk_ring_shape shape = { 2 + static_cast<uint32_t>(seed % 3 == 0),
                                1 + static_cast<uint32_t>(seed / 3 % 4),
                                1 + static_cast<uint32_t>(seed / 2 % 2), 0, seed % 5 ? 0 : 3000U };
        exchange_plan plan;
        node n(shape);

        pretend_all(&n, messages[seed / 2 % 3]);
        exchange_random(seed, shape.ranks, 4, shape.channels * 24000, &plan);
        run_plan(&n, plan, seed, all_at_once);
        run_plan(&n, plan, seed + 1, all_at_once);
        free(plan.messages);
    }
    CHECK(run_by[DIRECTLY] > before + 10);
}

void random_case(uint64_t seed)
{
    rings_case c;

    rings_random_case(seed, 4, 40000, &c);
    node n(c.shape);
    say(c);
    run_case(&n, c, seed);
    run_case(&n, c, seed + 1);
}

/* Of any shape: lanes for each unit and none, one slot and the most, counters that pass 2^32. */
void random_exchange(uint64_t seed)
{
    uint64_t state = seed * 2 + 1;
    auto pick = [&state](uint32_t n) { return static_cast<uint32_t>(ref_next(&state) % n); };
    uint32_t ranks = 2 + pick(pick(4) ? 3 : LK_DEVICE_RANKS - 1);
    lk_ring_shape shape = { ranks, 1 + pick(ranks > 4 ? 6 : 20), 1 + pick(LK_SLOTS_MAX), 0,
                            pick(3) ? 1000 + pick(60000) : 0 };
    exchange_plan plan;
    node n(shape);

    printf("exchange %llu: %u ranks, %u channels, %u slots\n",
           static_cast<unsigned long long>(seed), ranks, shape.channels, shape.slots);
    fflush(stdout);
    if (pick(2))
        pretend_all(&n, (UINT64_C(1) << 32) - 1 - pick(20));
    for (uint32_t i = 0; i < 2; i++) {
        exchange_random(seed + i, ranks, 10 * ranks, pick(2) ? 200000 : shape.short_bytes + 1,
                        &plan);
        run_plan(&n, plan, seed + i, all_at_once);
        free(plan.messages);
    }
}

/* Lists whose tensors are about as long as those that begin at granules, of many ranks and slots. */
void random_list(uint64_t seed)
{
    uint64_t state = seed * 2 + 1;
    auto pick = [&state](uint32_t n) { return static_cast<uint32_t>(ref_next(&state) % n); };
    uint32_t ranks = 2 + pick(pick(4) ? 3 : LK_DEVICE_RANKS - 1);
    rings_case c;

    rings_random_case(seed, 4, 40000, &c);
    c.shape = lk_ring_shape{ ranks, 1 + pick(ranks > 4 ? 6 : 20), 1 + pick(LK_SLOTS_MAX), 16384,
                             0 };
    c.tensors = 1 + pick(12);
    c.count = 2048 + pick(4096);
    if (c.op == RINGS_LINES)
        c.op = RINGS_ALL_REDUCE;
    for (uint32_t &ctas : c.ctas)
        ctas = 1 + pick(5);
    node n(c.shape);
    say(c);
    if (pick(2))
        pretend_all(&n, (UINT64_C(1) << 32) - 1 - pick(20));
    run_case(&n, c, seed);
    /* several messages of each unit, where it does not matter who owns which tile */
    run_case(&n, c, seed + 1, {}, c.wire == LK_FP32 ? 1 : 0);
}

} // namespace

extern "C" const uint32_t lk_backend_ranks = LK_DEVICE_RANKS;

extern "C" int lk_run_rings(const lk_ring_launch *launch, void *)
{
    collected.launches.at(collected.rank).push_back(std::make_unique<lk_ring_launch>(*launch));
    return 0;
}

extern "C" int lk_run_exchange(const lk_exchange_launch *launch, void *)
{
    collected.exchanges.at(collected.rank).push_back(std::make_unique<lk_exchange_launch>(*launch));
    return 0;
}

int main(int argc, char **argv)
{
    time_t end = time(nullptr) + (argc > 1 ? atoi(argv[1]) : 0);

    if (argc > 2) {
        uint64_t seed = strtoull(argv[2], nullptr, 10);

        random_case(seed);
        random_exchange(seed);
        random_list(seed);
        return 0;
    }
    cases_give_the_bits_that_follow_from_the_arguments();
    calls_of_all_kinds_follow_each_other_on_one_set_of_rings();
    counters_pass_the_end_of_their_words();
    counts_say_what_was_written_and_what_was_not();
    too_few_slots_are_noticed();
    an_abort_ends_a_call_that_a_rank_never_joins();
    exchanges_give_the_bytes_that_were_sent();
    exchanges_and_reductions_follow_each_other_on_one_set_of_rings();
    exchanges_count_what_was_written_and_what_was_not();
    dead_rows_of_any_size_do_not_travel();
    a_peer_that_is_busy_holds_up_no_other();
    an_abort_ends_an_exchange_that_a_rank_never_joins(0);
    an_abort_ends_an_exchange_that_a_rank_never_joins(100000);
    one_cta_has_more_units_than_lanes();
    exchanges_of_many_units_and_ranks();
    as_many_channels_as_there_may_be();
    words_that_are_refreshed_come_before_those_that_count();
    short_messages_go_through_either_kernel();
    teams_move_whole_tiles();
    ends_need_not_group_alike();
    direct_calls_count_what_was_written();
    calls_of_few_tiles_follow_each_other();
    messages_of_few_tiles_go_through_either_kernel();
    for (uint64_t seed = 1; time(nullptr) < end; seed++) {
        random_case(seed);
        random_exchange(seed);
        random_list(seed);
    }
    return 0;
}
