/* SPDX-License-Identifier: Apache-2.0
 *
 * Every collective, type, operator, some counts, in place and not, against a reference that decodes and rounds number
 * formats by their definition. Usage: test_nccl_verify processes|threads RANKS [big] */
#include "tests/rig/test_nccl.h"

#include <math.h>
#include <stdint.h>

#define COUNT_MAX ((size_t)(1 << 20) + 1)
#define SMALL_MAX ((size_t)1000)

/* ---- reference: formats ---- */

struct format {
    const char *name;
    size_t size;
    bool is_float, is_signed;
    int mantissa, bias;
    double largest; /* what overflows becomes this; 0: infinity */
};

static const struct format formats[ncclNumTypes] = {
    [ncclInt8] = {"int8",    1, false, true,  0,  0,    0    },
    [ncclUint8] = { "uint8",  1, false, false, 0,  0,    0    },
    [ncclInt32] = { "int32",  4, false, true,  0,  0,    0    },
    [ncclUint32] = { "uint32", 4, false, false, 0,  0,    0    },
    [ncclInt64] = { "int64",  8, false, true,  0,  0,    0    },
    [ncclUint64] = { "uint64", 8, false, false, 0,  0,    0    },
    [ncclFloat16] = { "f16",    2, true,  true,  10, 15,   0    },
    [ncclFloat32] = { "f32",    4, true,  true,  23, 127,  0    },
    [ncclFloat64] = { "f64",    8, true,  true,  52, 1023, 0    },
    [ncclBfloat16] = { "bf16",   2, true,  true,  7,  127,  0    },
    [ncclFloat8e4m3] = { "e4m3",   1, true,  true,  3,  7,    448  },
    [ncclFloat8e5m2] = { "e5m2",   1, true,  true,  2,  15,   57344},
};

static uint64_t load(const void *from, size_t size)
{
    uint64_t bits = 0;

    memcpy(&bits, from, size);
    return bits;
}

static double decode(const struct format *f, uint64_t bits)
{
    int width = (int)f->size * 8 - 1, exponents = width - f->mantissa;
    uint64_t mantissa = bits & ((1ull << f->mantissa) - 1);
    int exponent = (int)(bits >> f->mantissa & ((1ull << exponents) - 1));
    double sign = bits >> width & 1 ? -1 : 1;

    if (f->largest == 448) { /* e4m3 has no infinity and one NaN of each sign */
        if (exponent == 15 && mantissa == 7)
            return NAN;
    } else if (exponent == (1 << exponents) - 1) {
        return mantissa ? NAN : sign * INFINITY;
    }
    if (exponent == 0)
        return sign * ldexp((double)mantissa, 1 - f->bias - f->mantissa);
    return sign * ldexp((double)(mantissa | 1ull << f->mantissa), exponent - f->bias - f->mantissa);
}

/* Rounds a number to the nearest of the format, to even if there are two. */
static double round_to(const struct format *f, double x)
{
    double top = ldexp(2 - ldexp(1, -f->mantissa), f->bias);
    double quantum, y;
    int exponent;

    if (f->mantissa == 52 || isnan(x) || x == 0)
        return x;
    if (isinf(x))
        return f->largest ? copysign(f->largest, x) : x;
    exponent = ilogb(x);
    if (exponent < 1 - f->bias)
        exponent = 1 - f->bias;
    quantum = ldexp(1, exponent - f->mantissa);
    y = rint(x / quantum) * quantum;
    if (f->largest && fabs(y) > f->largest)
        return copysign(f->largest, x);
    if (!f->largest && fabs(y) > top)
        return copysign(INFINITY, x);
    return copysign(y, x);
}

/* ---- reference: arithmetic on one element, kept as double or as integer ---- */

union value {
    double f;
    uint64_t i; /* sign-extended */
};

static uint64_t extend(const struct format *f, uint64_t bits)
{
    int unused = 64 - (int)f->size * 8;

    return f->is_signed ? (uint64_t)((int64_t)(bits << unused) >> unused)
                        : bits << unused >> unused;
}

static union value value_of(const struct format *f, const void *from)
{
    uint64_t bits = load(from, f->size);
    union value v;

    if (f->is_float)
        v.f = decode(f, bits);
    else
        v.i = extend(f, bits);
    return v;
}

static double pick(double a, double b, bool larger)
{
    if (isnan(a) || isnan(b))
        return isnan(a) ? b : a;
    if (a == b)
        return (signbit(a) != 0) == larger ? b : a;
    return (a > b) == larger ? a : b;
}

static union value combine(const struct format *f, ncclRedOp_t op, union value a, union value b)
{
    union value v;
    bool less;

    if (f->is_float) {
        switch (op) {
        case ncclProd: v.f = round_to(f, a.f * b.f); break;
        case ncclMax: v.f = pick(a.f, b.f, true); break;
        case ncclMin: v.f = pick(a.f, b.f, false); break;
        default: v.f = round_to(f, a.f + b.f); break;
        }
        /* The vendor's fp8 conversions after max and min saturate, too. */
        if (f->largest && isinf(v.f))
            v.f = copysign(f->largest, v.f);
        return v;
    }
    less = f->is_signed ? (int64_t)a.i < (int64_t)b.i : a.i < b.i;
    switch (op) {
    case ncclProd: v.i = extend(f, a.i * b.i); break;
    case ncclMax: v.i = less ? b.i : a.i; break;
    case ncclMin: v.i = less ? a.i : b.i; break;
    default: v.i = extend(f, a.i + b.i); break;
    }
    return v;
}

static union value scale(const struct format *f, union value v, union value by)
{
    if (f->is_float)
        v.f = round_to(f, v.f * by.f);
    else
        v.i = extend(f, v.i * by.i);
    return v;
}

/* ---- inputs: a function of rank, place and type ---- */

static uint64_t scramble(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static void put_input(const struct format *f, int rank, size_t at, void *to)
{
    uint64_t bits = scramble(at * 64 + (uint64_t)rank + 1);
    int width = (int)f->size * 8 - 1, exponents = width - f->mantissa;
    uint64_t kind = bits >> 56;

    if (f->is_float && scramble(at) % 8 == 0) {
        /* At some places all ranks have something special: zeros, infinities, NaN, subnormal numbers. */
        static const uint64_t exponent_ends[] = { 0, 0, ~0ull, 0, ~0ull, 0, 0, 0 };
        uint64_t sign = bits & 1ull << width, ones = ((1ull << exponents) - 1) << f->mantissa;

        bits = (exponent_ends[kind % 8] & ones) |
               (kind % 8 < 3 ? 0 : bits & ((1ull << f->mantissa) - 1));
        bits |= sign;
    } else if (f->is_float) {
        /* Exponents near one, so that sums round. */
        uint64_t exponent = (uint64_t)f->bias + (bits >> 40) % 8 - 4;

        bits = (bits & ~(((1ull << exponents) - 1) << f->mantissa)) | exponent << f->mantissa;
    }
    memcpy(to, &bits, f->size);
}

/* The factor that a rank uses with PreMulSum. */
static void put_factor(const struct format *f, int rank, void *to)
{
    uint64_t bits = (uint64_t)rank + 2;

    if (f->is_float) /* 1.5 x 2^(rank % 3 - 1) */
        bits = ((uint64_t)(f->bias + rank % 3 - 1) << 1 | 1) << (f->mantissa - 1);
    memcpy(to, &bits, f->size);
}

/* ---- reference: the reduction, from the place in the input and its shard's owner ---- */

static union value reduced(const struct format *f, ncclRedOp_t op, int n, int owner, size_t at)
{
    union value acc = { 0 };

    for (int i = 1; i <= n; i++) {
        int rank = (owner + i) % n;
        uint64_t bits = 0;
        union value v;

        put_input(f, rank, at, &bits);
        v = value_of(f, &bits);
        if (op == ncclAvg && f->is_float)
            v = scale(f, v,
                      (union value){
                          .f = round_to(f, f->size == 8 ? 1.0 / n : (double)(float)(1.0 / n)) });
        if (op >= ncclNumOps) {
            bits = 0;
            put_factor(f, rank, &bits);
            v = scale(f, v, value_of(f, &bits));
        }
        acc = i == 1 ? v : combine(f, op, acc, v);
    }
    if (op == ncclAvg && !f->is_float)
        acc.i = f->is_signed ? (uint64_t)((int64_t)acc.i / n) : acc.i / (uint64_t)n;
    return acc;
}

static bool is_same(const struct format *f, union value want, const void *got)
{
    union value v = value_of(f, got);

    if (!f->is_float)
        return v.i == want.i;
    if (isnan(want.f) || isnan(v.f))
        return isnan(want.f) && isnan(v.f);
    return v.f == want.f && signbit(v.f) == signbit(want.f);
}

/* ---- the runs ---- */

/* Big messages are looked at in this step, which is prime, so that all places in a block come up. */
#define BIG_STEP 61

struct run {
    size_t step;
    int rank, n;
    ncclComm_t comm;
    cudaStream_t stream;
    char *send, *recv;
    size_t count;
    ncclDataType_t type;
    const struct format *f;
    bool in_place;
};

/* Fills `count` elements at `to` with what lies at place `at` of rank's input. */
static void fill(struct run *run, char *to, int rank, size_t at, size_t count)
{
    for (size_t i = 0; i < count; i++)
        put_input(run->f, rank, at + i, to + i * run->f->size);
}

static void finish(struct run *run)
{
    CUDA(cudaStreamSynchronize(run->stream));
}

static void expect_reduced(struct run *run, const char *what, ncclRedOp_t op, const char *got,
                           size_t at, size_t i, int owner)
{
    if (is_same(run->f, reduced(run->f, op, run->n, owner, at), got))
        return;
    fprintf(stderr, "%s %s op %d count %zu%s: rank %d of %d, element %zu: got %llx\n", what,
            run->f->name, (int)op, run->count, run->in_place ? " in place" : "", run->rank, run->n,
            i, (unsigned long long)load(got, run->f->size));
    abort();
}

static void expect_moved(struct run *run, const char *what, const char *got, int rank, size_t at,
                         size_t count)
{
    for (size_t i = 0; i < count; i += run->step) {
        uint64_t bits = 0;

        put_input(run->f, rank, at + i, &bits);
        if (memcmp(&bits, got + i * run->f->size, run->f->size) != 0) {
            fprintf(stderr, "%s %s count %zu%s: rank %d of %d, from %d, element %zu\n", what,
                    run->f->name, run->count, run->in_place ? " in place" : "", run->rank, run->n,
                    rank, i);
            abort();
        }
    }
}

static void verify_all_reduce(struct run *run, ncclRedOp_t shown, ncclRedOp_t op)
{
    size_t each = (run->count + (size_t)run->n - 1) / (size_t)run->n;
    char *to = run->in_place ? run->send : run->recv;

    fill(run, run->send, run->rank, 0, run->count);
    NCCL(ncclAllReduce(run->send, to, run->count, run->type, op, run->comm, run->stream));
    finish(run);
    for (size_t i = 0; i < run->count; i += run->step)
        expect_reduced(run, "all-reduce", shown, to + i * run->f->size, i, i, (int)(i / each));
}

static void verify_reduce(struct run *run, ncclRedOp_t shown, ncclRedOp_t op, int root)
{
    bool is_root = run->rank == root;
    char *to = run->in_place ? run->send : is_root ? run->recv : NULL;

    fill(run, run->send, run->rank, 0, run->count);
    NCCL(ncclReduce(run->send, to, run->count, run->type, op, root, run->comm, run->stream));
    finish(run);
    for (size_t i = 0; i < run->count && is_root; i++)
        expect_reduced(run, "reduce", shown, to + i * run->f->size, i, i, root);
}

static void verify_reduce_scatter(struct run *run, ncclRedOp_t shown, ncclRedOp_t op)
{
    size_t at = (size_t)run->rank * run->count;
    char *to = run->in_place ? run->send + at * run->f->size : run->recv;

    fill(run, run->send, run->rank, 0, run->count * (size_t)run->n);
    NCCL(ncclReduceScatter(run->send, to, run->count, run->type, op, run->comm, run->stream));
    finish(run);
    for (size_t i = 0; i < run->count; i += run->step)
        expect_reduced(run, "reduce-scatter", shown, to + i * run->f->size, at + i, i, run->rank);
}

static void verify_all_gather(struct run *run)
{
    size_t bytes = run->count * run->f->size;
    char *from = run->in_place ? run->recv + bytes * (size_t)run->rank : run->send;

    fill(run, from, run->rank, 0, run->count);
    NCCL(ncclAllGather(from, run->recv, run->count, run->type, run->comm, run->stream));
    finish(run);
    for (int rank = 0; rank < run->n; rank++)
        expect_moved(run, "all-gather", run->recv + bytes * (size_t)rank, rank, 0, run->count);
}

static void verify_broadcast(struct run *run, int root)
{
    char *to = run->in_place ? run->send : run->recv;

    fill(run, run->send, run->rank, 0, run->count);
    if (run->in_place)
        NCCL(ncclBcast(to, run->count, run->type, root, run->comm, run->stream));
    else
        NCCL(ncclBroadcast(run->rank == root ? run->send : NULL, to, run->count, run->type, root,
                           run->comm, run->stream));
    finish(run);
    expect_moved(run, "broadcast", to, root, 0, run->count);
}

static void verify_all_to_all(struct run *run)
{
    size_t bytes = run->count * run->f->size;

    fill(run, run->send, run->rank, 0, run->count * (size_t)run->n);
    NCCL(ncclAlltoAll(run->send, run->recv, run->count, run->type, run->comm, run->stream));
    finish(run);
    for (int rank = 0; rank < run->n; rank++)
        expect_moved(run, "all-to-all", run->recv + bytes * (size_t)rank, rank,
                     run->count * (size_t)run->rank, run->count);
}

static void verify_gather(struct run *run, int root)
{
    size_t bytes = run->count * run->f->size;
    bool is_root = run->rank == root;
    char *from = run->in_place && is_root ? run->recv + bytes * (size_t)root : run->send;

    fill(run, from, run->rank, 0, run->count);
    NCCL(ncclGather(from, is_root ? run->recv : NULL, run->count, run->type, root, run->comm,
                    run->stream));
    finish(run);
    for (int rank = 0; is_root && rank < run->n; rank++)
        expect_moved(run, "gather", run->recv + bytes * (size_t)rank, rank, 0, run->count);
}

static void verify_scatter(struct run *run, int root)
{
    size_t bytes = run->count * run->f->size;
    bool is_root = run->rank == root;
    char *to = run->in_place && is_root ? run->send + bytes * (size_t)root : run->recv;

    fill(run, run->send, run->rank, 0, run->count * (size_t)run->n);
    NCCL(ncclScatter(is_root ? run->send : NULL, to, run->count, run->type, root, run->comm,
                     run->stream));
    finish(run);
    expect_moved(run, "scatter", to, root, run->count * (size_t)run->rank, run->count);
}

/* Everybody to everybody, itself included, in one group. */
static void verify_send_recv(struct run *run)
{
    size_t bytes = run->count * run->f->size;

    fill(run, run->send, run->rank, 0, run->count * (size_t)run->n);
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < run->n; peer++) {
        NCCL(ncclSend(run->send + bytes * (size_t)peer, run->count, run->type, peer, run->comm,
                      run->stream));
        NCCL(ncclRecv(run->recv + bytes * (size_t)peer, run->count, run->type, peer, run->comm,
                      run->stream));
    }
    NCCL(ncclGroupEnd());
    finish(run);
    for (int rank = 0; rank < run->n; rank++)
        expect_moved(run, "send/receive", run->recv + bytes * (size_t)rank, rank,
                     run->count * (size_t)run->rank, run->count);
}

static void verify_reductions(struct run *run, ncclRedOp_t op)
{
    ncclRedOp_t real = op;

    if (op == ncclNumOps) {
        uint64_t factor = 0;

        put_factor(run->f, run->rank, &factor);
        NCCL(ncclRedOpCreatePreMulSum(&real, &factor, run->type, ncclScalarHostImmediate,
                                      run->comm));
        factor = 0; /* was copied */
    }
    verify_all_reduce(run, op, real);
    verify_reduce(run, op, real, run->n - 1);
    verify_reduce_scatter(run, op, real);
    if (op == ncclNumOps)
        NCCL(ncclRedOpDestroy(real, run->comm));
}

static void verify_moves(struct run *run)
{
    verify_all_gather(run);
    verify_broadcast(run, run->n - 1);
    verify_gather(run, run->n / 2);
    verify_scatter(run, 0);
    if (!run->in_place) {
        verify_all_to_all(run);
        verify_send_recv(run);
    }
}

static void verify_small(struct run *run)
{
    static const size_t counts[] = { 0, 1, 3, SMALL_MAX };

    for (int type = 0; type < ncclNumTypes; type++) {
        run->type = (ncclDataType_t)type;
        run->f = &formats[type];
        for (int i = 0; i < 8; i++) {
            run->count = counts[i / 2];
            run->in_place = i % 2;
            for (int op = 0; op <= ncclNumOps; op++)
                verify_reductions(run, (ncclRedOp_t)op);
            verify_moves(run);
        }
    }
}

static void verify_big(struct run *run)
{
    static const ncclDataType_t types[] = { ncclFloat32, ncclBfloat16 };

    run->count = COUNT_MAX;
    for (int i = 0; i < 2; i++) {
        run->type = types[i];
        run->f = &formats[types[i]];
        run->in_place = i;
        verify_all_reduce(run, i ? ncclAvg : ncclSum, i ? ncclAvg : ncclSum);
        verify_broadcast(run, 0);
    }
    run->count = COUNT_MAX / (size_t)run->n;
    run->in_place = false;
    verify_all_to_all(run);
    verify_send_recv(run);
    verify_reduce_scatter(run, ncclSum, ncclSum);
}

struct task {
    struct meeting *meeting;
    bool big;
};

static int rank_main(int rank, int n, void *arg)
{
    struct task *task = arg;
    size_t bytes = (task->big ? COUNT_MAX * 4 : SMALL_MAX * 8 * (size_t)n);
    struct run run = { .step = task->big ? BIG_STEP : 1, .rank = rank, .n = n };

    run.comm = comm_up(task->meeting, rank, n);
    run.stream = stream_up();
    run.send = device_alloc(bytes);
    run.recv = device_alloc(bytes);
    if (task->big)
        verify_big(&run);
    else
        verify_small(&run);
    NCCL(ncclCommDestroy(run.comm));
    CUDA(cudaFree(run.send));
    CUDA(cudaFree(run.recv));
    CUDA(cudaStreamDestroy(run.stream));
    return 0;
}

int main(int argc, char **argv)
{
    struct task task = { meeting_new(), argc > 3 };

    CHECK(argc > 2);
    if (strcmp(argv[1], "threads") == 0)
        return lc_ranks_run_threads(atoi(argv[2]), rank_main, &task, 200);
    return lc_ranks_run(atoi(argv[2]), rank_main, &task, 200);
}
