/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW on the device: one block per chunk. Both kernels end in the last block that finishes, which is where sums and
 * counters of the whole grid are made.
 */
#include "kernels/compute_adamw.h"
#include "kernels/compute_device.cuh"

namespace
{

__device__ __forceinline__ double tree(double *sums)
{
    for (uint32_t half = LK_BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

__device__ __forceinline__ adamw_squares tree(adamw_squares *squares)
{
    for (uint32_t half = LK_BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            adamw_join(&squares[threadIdx.x], &squares[threadIdx.x + half]);
    }
    __syncthreads();
    return squares[0];
}

__global__ void __launch_bounds__(LK_BLOCK, 4)
    adamw_norm_kernel(const __grid_constant__ lk_adamw_launch launch)
{
    __shared__ adamw_squares squares[LK_BLOCK];
    __shared__ double wide[LK_BLOCK];
    uint32_t t = threadIdx.x;

    if (blockIdx.x < launch.chunks) {
        adamw_piece piece = adamw_find(&launch, blockIdx.x);
        double again = 0;

        squares[t] = adamw_squares_thread(&piece, t);
        adamw_squares all = tree(squares);
        if (adamw_needs_wide(&all)) {
            wide[t] = adamw_wide_thread(&piece, t);
            again = tree(wide);
        }
        if (t == 0)
            launch.partials[blockIdx.x] = adamw_partial(&all, again);
    }
    if (!is_last_block(&launch.state->tickets[0]))
        return;
    wide[t] = adamw_partials_thread(launch.partials, launch.chunks, t);
    double sum = tree(wide);
    if (t == 0)
        launch.state->sum_squares = sum;
}

/* How memory is read: evicted first, as it comes, or gradients evicted first alone. */
enum update_reads {
    READS_STREAMED,
    READS_PLAIN,
    READS_PLAIN_BUT_GRADIENTS,
};

/* Threads of a block, groups of four elements of each that are in flight together, blocks of a multiprocessor. Reversed: from
 * the last chunk to the first, whose gradients the first kernel left in L2. */
template <unsigned T, unsigned G, unsigned B, update_reads R, bool StreamedWrites = true,
          bool Reversed = true>
struct update_form {
    static constexpr unsigned threads = T, groups = G, blocks = B;
    static constexpr update_reads reads = R;
    static constexpr bool streamed_writes = StreamedWrites, reversed = Reversed;
};

/* Measured on one H200, with clipping, 300 tensors of 12.8 GB in all, plain: two groups of 512 threads take 3140 us, of 256 in 4
 * blocks 3268, four in 2 blocks 3194, and 3287 streamed. */
using product_form = update_form<512, 2, 2, READS_PLAIN, false>;

template <bool Streamed> __device__ __forceinline__ void load_four(const float *from, float *out)
{
    if (Streamed)
        load4(from, out);
    else
        read4_kept(from, 0, 4, LK_WHOLE, out);
}

template <class Form, uint32_t Flags>
__device__ __forceinline__ void read_groups(const adamw_piece &piece, uint64_t at,
                                            adamw_group (&out)[Form::groups])
{
    constexpr bool streamed = Form::reads == READS_STREAMED;
    const lk_adamw_entry &entry = piece.entry;

#pragma unroll
    for (unsigned j = 0; j < Form::groups; j++, at += 4 * Form::threads) {
        if (Flags & LK_ADAMW_GRAD16)
            load4_bf16(static_cast<const uint16_t *>(entry.grad) + at, out[j].grad);
        else
            load_four<Form::reads != READS_PLAIN>(static_cast<const float *>(entry.grad) + at,
                                                  out[j].grad);
        load_four<streamed>(entry.param + at, out[j].param);
        load_four<streamed>(entry.m + at, out[j].m);
        load_four<streamed>(entry.v + at, out[j].v);
    }
}

template <bool Streamed> __device__ __forceinline__ void store_four(float *to, const float (&in)[4])
{
    if (Streamed)
        store4(to, in);
    else
        *reinterpret_cast<float4 *>(to) = make_float4(in[0], in[1], in[2], in[3]);
}

template <class Form, uint32_t Flags>
__device__ __forceinline__ void write_groups(const adamw_piece &piece, uint64_t at,
                                             const adamw_factors &f,
                                             adamw_group (&groups)[Form::groups])
{
    const lk_adamw_entry &entry = piece.entry;

#pragma unroll
    for (unsigned j = 0; j < Form::groups; j++, at += 4 * Form::threads) {
        adamw_change(&f, &groups[j]);
        store_four<Form::streamed_writes>(entry.param + at, groups[j].param);
        store_four<Form::streamed_writes>(entry.m + at, groups[j].m);
        store_four<Form::streamed_writes>(entry.v + at, groups[j].v);
        if (Flags & LK_ADAMW_COPY)
            store4_bf16(entry.copy + at, groups[j].param);
    }
}

/* Of thread 0, for all; of no tensor without a chunk. */
__device__ __noinline__ void make_factors(const lk_adamw_launch *launch, uint32_t chunk,
                                          adamw_factors *shared)
{
    adamw_make_factors(launch, shared);
    if (chunk < launch->chunks)
        adamw_tensor_factors(launch, launch->entries + launch->chunk_entry[chunk], shared);
}

/* A chunk that is whole and aligned: its first loads are under way while factors are made. All threads of the block come
 * here. */
template <class Form, uint32_t Flags>
__device__ __forceinline__ void update_chunk(const lk_adamw_launch &launch, uint32_t chunk,
                                             const adamw_piece &piece, adamw_factors &shared)
{
    adamw_group groups[Form::groups];
    uint64_t at = piece.begin + 4 * threadIdx.x;

    read_groups<Form, Flags>(piece, at, groups);
    if (threadIdx.x == 0)
        make_factors(&launch, chunk, &shared);
    __syncthreads();
    adamw_factors mine = shared;

    if (!mine.apply)
        return;
    for (;;) {
        write_groups<Form, Flags>(piece, at, mine, groups);
        at += 4 * Form::groups * Form::threads;
        if (at >= piece.end)
            return;
        read_groups<Form, Flags>(piece, at, groups);
    }
}

template <class Form>
__global__ void __launch_bounds__(Form::threads, Form::blocks)
    adamw_update_kernel(const __grid_constant__ lk_adamw_launch launch)
{
    __shared__ adamw_factors factors;
    bool some = blockIdx.x < launch.chunks;
    uint32_t chunk = some && Form::reversed ? launch.chunks - 1 - blockIdx.x : blockIdx.x, flags;
    adamw_piece piece = {};

    if (some)
        piece = adamw_find(&launch, chunk);
    flags = piece.entry.flags & (LK_ADAMW_COPY | LK_ADAMW_GRAD16);
    if (!some || adamw_width(&piece) != LK_WHOLE) {
        if (threadIdx.x == 0)
            make_factors(&launch, chunk, &factors);
        __syncthreads();
        adamw_factors mine = factors;

        if (some && mine.apply && threadIdx.x < LK_BLOCK)
            adamw_update_groups(&piece, &mine, threadIdx.x, flags, adamw_width(&piece));
    } else if (flags == 0) {
        update_chunk<Form, 0>(launch, chunk, piece, factors);
    } else if (flags == LK_ADAMW_COPY) {
        update_chunk<Form, LK_ADAMW_COPY>(launch, chunk, piece, factors);
    } else if (flags == LK_ADAMW_GRAD16) {
        update_chunk<Form, LK_ADAMW_GRAD16>(launch, chunk, piece, factors);
    } else {
        update_chunk<Form, LK_ADAMW_COPY | LK_ADAMW_GRAD16>(launch, chunk, piece, factors);
    }
    if (threadIdx
            .x) /* thread 0 has read the state for its block, and the last of them changes it */
        return;
    __threadfence();
    if (atomicInc(&launch.state->tickets[1], gridDim.x - 1) == gridDim.x - 1)
        adamw_end(launch.state, &factors);
}

struct adamw_kernel {
    void (*function)(lk_adamw_launch);
    unsigned threads;
};

template <class Form> constexpr adamw_kernel make_update()
{
    return { adamw_update_kernel<Form>, Form::threads };
}

constexpr adamw_kernel product_update = make_update<product_form>();

#ifdef LK_COMPUTE_VARIANTS
int update_form_chosen = -1; /* -1: the product's; set between launches */

constexpr const char *UPDATE_NAMES[] = {
    "4 groups, 2 blocks",         "the same, plain",
    "the same, plain reads",      "the same, gradients streamed",
    "the same, first to last",    "2 groups, 4 blocks, plain",
    "2 groups of 512 threads",    "2 groups of 512 threads, plain",
    "3 blocks of 2 groups, plain"
};
constexpr adamw_kernel UPDATE_FORMS[] = {
    make_update<update_form<256, 4, 2, READS_STREAMED>>(),
    make_update<update_form<256, 4, 2, READS_PLAIN, false>>(),
    make_update<update_form<256, 4, 2, READS_PLAIN>>(),
    make_update<update_form<256, 4, 2, READS_PLAIN_BUT_GRADIENTS, false>>(),
    make_update<update_form<256, 4, 2, READS_STREAMED, true, false>>(),
    make_update<update_form<256, 2, 4, READS_PLAIN, false>>(),
    make_update<update_form<512, 2, 2, READS_STREAMED>>(),
    make_update<update_form<512, 2, 2, READS_PLAIN, false>>(),
    make_update<update_form<256, 2, 3, READS_PLAIN, false>>(),
};
constexpr int UPDATE_FORM_COUNT = sizeof(UPDATE_FORMS) / sizeof(*UPDATE_FORMS);
#endif

adamw_kernel find_update()
{
#ifdef LK_COMPUTE_VARIANTS
    if (update_form_chosen >= 0)
        return UPDATE_FORMS[update_form_chosen];
#endif
    return product_update;
}

int run(const adamw_kernel &kernel, const lk_adamw_launch *launch, void *stream)
{
    void *args[] = { const_cast<lk_adamw_launch *>(launch) };

    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel.function),
                            dim3(launch->chunks ? launch->chunks : 1), dim3(kernel.threads), args,
                            0, static_cast<cudaStream_t>(stream));
}

} // namespace

extern "C" int lk_run_adamw_norm(const lk_adamw_launch *launch, void *stream)
{
    return run({ adamw_norm_kernel, LK_BLOCK }, launch, stream);
}

extern "C" int lk_run_adamw_update(const lk_adamw_launch *launch, void *stream)
{
    return run(find_update(), launch, stream);
}

#ifdef LK_COMPUTE_VARIANTS
extern "C" LK_API const char *lk_variants_adamw(int form)
{
    update_form_chosen = form >= 0 && form < UPDATE_FORM_COUNT ? form : -1;
    return update_form_chosen >= 0 ? UPDATE_NAMES[form] : nullptr;
}
#endif

extern "C" int lk_load_adamw(void)
{
    const void *kernels[] = { reinterpret_cast<const void *>(adamw_norm_kernel),
                              reinterpret_cast<const void *>(product_update.function) };

    return load_kernels(kernels, sizeof(kernels) / sizeof(*kernels));
}
