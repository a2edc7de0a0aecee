/* SPDX-License-Identifier: Apache-2.0
 *
 * loongcomm-bench-link [SAMPLES]
 * What the link between two devices gives to kernels that do nothing but store to the other one's memory, or load from it:
 * by kind of store, order of lanes, CTAs, size of the window that is written again and again, with a warp of each CTA that
 * fences without end, as the rings' do, in one direction or both. Where there is one device its memory stands for the
 * link. A line of the table for each, and behind it the same as one JSON line. 77: no device.
 */
#include "kernels/cuda_launch_internal.cuh"
#include "kernels/cuda_rings_ops.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CUDA(call)                                                                            \
    do {                                                                                      \
        cudaError_t cuda_err = (call);                                                        \
        if (cuda_err != cudaSuccess) {                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(cuda_err)); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

namespace
{

constexpr uint32_t threads = 1024, data_warps = threads / 32 - 1, granule = 512, ahead = 4;
constexpr uint64_t all_bytes = 512u << 20; /* in each direction */

enum way {
    KEPT,
    PLAIN,
    STREAMING,
    STRONG,
    ODD, /* plain, lanes as a bf16 wire of fp32 data has them */
    BULK,
    LOADS,
    ENGINE, /* cudaMemcpyPeerAsync */
    WAYS,
};
const char *const names[WAYS] = { "kept",      "plain", "streaming", "strong",
                                  "odd lanes", "bulk",  "loads",     "copy engine" };

struct push_args {
    uint64_t to;     /* window */
    uint64_t word;   /* of the other device, 8 bytes for each CTA */
    uint64_t *sink;  /* own; NULL */
    uint32_t pieces; /* of ahead granules, that a warp moves */
    uint32_t window; /* pieces of a CTA */
    bool fences;
};

template <way How>
__device__ __forceinline__ void move_piece(uint64_t to, uint32_t lane, uint8_t *stage, uint4 *sum)
{
    if constexpr (How == BULK) {
        if (lane == 0) {
            bulk_store(to, stage, ahead * granule);
            bulk_wait_read<4>();
        }
    } else if constexpr (How == LOADS) {
        uint4 v[ahead];

#pragma unroll
        for (uint32_t i = 0; i < ahead; i++)
            v[i] = load_slot(to + i * granule + lane * 16);
#pragma unroll
        for (uint32_t i = 0; i < ahead; i++)
            sum->x |= v[i].x | v[i].y | v[i].z | v[i].w;
    } else {
        uint32_t pack = How == ODD ? packed_lane_begin(lane) / 8 : lane;

#pragma unroll
        for (uint32_t i = 0; i < ahead; i++)
            store_slot<How == KEPT        ? STORE_KEPT
                       : How == STREAMING ? STORE_STREAMING
                       : How == STRONG    ? STORE_STRONG
                                          : STORE_PLAIN>(to + i * granule + pack * 16, *sum);
    }
}

template <way How> __global__ void __launch_bounds__(threads) push(const push_args args)
{
    __shared__ __align__(128) uint8_t stage[ahead * granule];
    __shared__ uint32_t through; /* data warps */
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t mine = args.to + static_cast<uint64_t>(blockIdx.x) * args.window * ahead * granule;
    uint4 sum = make_uint4(threadIdx.x, 1, 2, 3);

    if (threadIdx.x == 0)
        through = 0;
    for (uint32_t i = threadIdx.x; i < sizeof(stage); i += threads)
        stage[i] = static_cast<uint8_t>(i);
    fence_bulk();
    __syncthreads();
    if (warp == data_warps) {
        volatile uint32_t *seen = &through;

        for (uint64_t n = 1; args.fences && lane == 0 && *seen < data_warps; n++) {
            fence_system();
            store_word(args.word + 128 * blockIdx.x, n);
        }
        return;
    }
    for (uint32_t i = 0, at = warp % args.window; i < args.pieces; i++) {
        move_piece<How>(mine + static_cast<uint64_t>(at) * ahead * granule, lane, stage, &sum);
        at += data_warps;
        while (at >= args.window)
            at -= args.window;
    }
    if (How == BULK && lane == 0)
        bulk_wait();
    if (args.sink && sum.x == 0xffffffffU)
        *args.sink = sum.x;
    __syncwarp();
    if (lane == 0)
        atomicAdd(&through, 1);
}

template <way How> const void *kernel()
{
    return reinterpret_cast<const void *>(push<How>);
}

const void *kernels[ENGINE] = { kernel<KEPT>(),   kernel<PLAIN>(), kernel<STREAMING>(),
                                kernel<STRONG>(), kernel<ODD>(),   kernel<BULK>(),
                                kernel<LOADS>() };

struct row {
    way how;
    uint32_t ctas;
    size_t window; /* MB */
    bool both;
    bool fences;
    bool same_domain;
};

struct side {
    int device;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    uint8_t *window, *words;
    uint8_t *peer_window, *peer_words;
};
side sides[2];

void start(const row &r, side *s)
{
    uint64_t bytes = 0;

    CUDA(cudaSetDevice(s->device));
    CUDA(cudaEventRecord(s->begin, s->stream));
    if (r.how == ENGINE) {
        for (; bytes < all_bytes; bytes += r.window << 20)
            CUDA(cudaMemcpyAsync(s->peer_window, s->window, r.window << 20, cudaMemcpyDefault,
                                 s->stream));
    } else {
        uint32_t piece = ahead * granule;
        push_args args = { reinterpret_cast<uint64_t>(s->peer_window),
                           reinterpret_cast<uint64_t>(s->peer_words),
                           nullptr,
                           static_cast<uint32_t>(all_bytes / r.ctas / data_warps / piece),
                           static_cast<uint32_t>((r.window << 20) / r.ctas / piece),
                           r.fences };
        lk_ring_kernel k = { kernels[r.how], threads, 0, 0, r.same_domain };

        CUDA(static_cast<cudaError_t>(lk_launch_kernel(k, r.ctas, 0, &args, s->stream)));
    }
    CUDA(cudaEventRecord(s->end, s->stream));
}

double sample(const row &r)
{
    double worst = 0;

    for (side &s : sides)
        if (r.both || &s == sides)
            start(r, &s);
    for (side &s : sides) {
        float ms = 0;

        if (!r.both && &s != sides)
            continue;
        CUDA(cudaEventSynchronize(s.end));
        CUDA(cudaEventElapsedTime(&ms, s.begin, s.end));
        worst = std::max(worst, static_cast<double>(ms));
    }
    return static_cast<double>(all_bytes) / worst / 1e6;
}

void measure(const row &r, int samples)
{
    std::vector<double> gbs;

    sample(r);
    for (int i = 0; i < samples; i++)
        gbs.push_back(sample(r));
    std::sort(gbs.begin(), gbs.end());
    printf("%-12s %4u CTAs %4zu MB %-4s %-7s %-6s %8.1f GB/s (%.1f - %.1f)\n", names[r.how], r.ctas,
           r.window, r.both ? "both" : "one", r.fences ? "fences" : "",
           r.same_domain ? "domain" : "", gbs[gbs.size() / 2], gbs.front(), gbs.back());
    printf(
        "{\"schema\":\"loongcomm.link/1\",\"how\":\"%s\",\"ctas\":%u,\"window_mb\":%zu,\"both\":%s,"
        "\"fences\":%s,\"same_domain\":%s,\"gbs\":%.2f,\"least\":%.2f,\"most\":%.2f}\n",
        names[r.how], r.ctas, r.window, r.both ? "true" : "false", r.fences ? "true" : "false",
        r.same_domain ? "true" : "false", gbs[gbs.size() / 2], gbs.front(), gbs.back());
    fflush(stdout);
}

void set_up(int devices)
{
    for (int i = 0; i < 2; i++) {
        side *s = &sides[i];

        s->device = i % devices;
        CUDA(cudaSetDevice(s->device));
        if (devices > 1)
            CUDA(cudaDeviceEnablePeerAccess(1 - i, 0));
        CUDA(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&s->begin));
        CUDA(cudaEventCreate(&s->end));
        CUDA(cudaMalloc(&s->window, 128u << 20));
        CUDA(cudaMalloc(&s->words, 65536));
        CUDA(cudaMemset(s->window, 1, 128u << 20));
        CUDA(cudaMemset(s->words, 0, 65536));
        CUDA(cudaDeviceSynchronize());
    }
    for (int i = 0; i < 2; i++) {
        sides[i].peer_window = sides[1 - i].window;
        sides[i].peer_words = sides[1 - i].words;
    }
}

} // namespace

int main(int argc, char **argv)
{
    int devices = 0, samples = argc > 1 ? atoi(argv[1]) : 9;

    if (cudaGetDeviceCount(&devices) != cudaSuccess || !devices) {
        printf("SKIPPED: no GPU on this machine\n");
        return 77;
    }
    set_up(std::min(devices, 2));
    measure({ ENGINE, 0, 128, false, false, false }, samples);
    measure({ ENGINE, 0, 128, true, false, false }, samples);
    for (int how = KEPT; how < ENGINE; how++) {
        way w = static_cast<way>(how);

        for (uint32_t ctas : { 16u, 32u, 64u })
            measure({ w, ctas, 16, true, false, false }, samples);
        measure({ w, 32, 16, false, false, false }, samples);
        measure({ w, 32, 128, true, false, false }, samples);
        measure({ w, 32, 16, true, true, false }, samples);
        measure({ w, 32, 16, true, true, true }, samples);
    }
    return 0;
}
