/* SPDX-License-Identifier: Apache-2.0
 *
 * One rank of one variant. Waits only on its socket and on its stream; how long is the launcher's
 * business, which kills it. Everything is freed at the end, as in a job that ends well. */
#include "perf/bench.h"

#include "perf/ways.h"
#include "plugin/tuner/measure.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_SLOTS 1024
#define POISON    0xa5

#define INPLACE_BYTES (1 << 20)

struct worker {
    int fd;
    struct lc_bench_progress *progress;
    struct lc_bench_reply *reply; /* being made; its text takes the first error */
    int rank, ranks;
    ncclComm_t comm; /* of `comms`, the one in use */
    ncclComm_t comms[LC_BENCH_COMMS];
    struct lc_measure *measure; /* of the tuner for measuring; NULL */
    int heard;                  /* descriptor of what NCCL says of its communicators; 0: none */
    cudaStream_t stream;
    cudaEvent_t *events; /* 2 per sample */
    int n_events;
    /* the case */
    struct lc_bench_case kase;
    char *send;     /* `slots` buffers, `stride` apart, all with the same content */
    char *recv;     /* likewise; in place: the same memory */
    char *orig;     /* in place: what a buffer holds before a call */
    uint32_t *mask; /* of the rows of a buffer; NULL: nobody is told */
    size_t mask_rows;
    int (*set_mask)(ncclComm_t, const uint32_t *, size_t, size_t, cudaStream_t); /* ours alone */
    size_t stride;
    int slots;
    unsigned next; /* slot of the next call, modulo slots */
    unsigned char *expected;
    unsigned char *got;
    cudaGraphExec_t exec; /* of exec_inner calls on the slots from exec_first on */
    int exec_inner;
    uint64_t exec_way; /* which ranks have in common, so that all capture anew */
    int exec_comm;
    bool taken; /* NCCL has sent the last calls that it was asked about the way that was asked, */
    uint64_t choice; /* and the last of them this way */
};

/* Notes the first thing that went wrong and returns -EIO. */
__attribute__((format(printf, 2, 3))) static int fail(struct worker *w, const char *fmt, ...)
{
    va_list args;

    if (!w->reply->text[0]) {
        va_start(args, fmt);
        vsnprintf(w->reply->text, sizeof(w->reply->text), fmt, args);
        va_end(args);
    }
    return -EIO;
}

static int cuda_failed(struct worker *w, cudaError_t err, const char *call)
{
    return err == cudaSuccess ? 0 : fail(w, "%s: %s", call, cudaGetErrorString(err));
}

static int nccl_failed(struct worker *w, ncclResult_t err, const char *call)
{
    if (err == ncclSuccess || err == ncclInProgress)
        return 0;
    return fail(w, "%s: %s (%s)", call, ncclGetErrorString(err), ncclGetLastError(w->comm));
}

/* Each returns from the function that uses it. */
#define CUDA(w, call)                                          \
    do {                                                       \
        int err_ = cuda_failed((w), cuda##call, "cuda" #call); \
        if (err_)                                              \
            return err_;                                       \
    } while (0)
#define NCCL(w, call)                                          \
    do {                                                       \
        int err_ = nccl_failed((w), nccl##call, "nccl" #call); \
        if (err_)                                              \
            return err_;                                       \
    } while (0)

static void resolve(const char *path, char *out, size_t size)
{
    char *whole = realpath(path, NULL);

    snprintf(out, size, "%s", whole ? whole : path);
    free(whole);
}

static int find_library(struct dl_phdr_info *info, size_t size __attribute__((unused)), void *arg)
{
    struct lc_bench_machine *machine = arg;
    const char *base = strrchr(info->dlpi_name, '/');

    base = base ? base + 1 : info->dlpi_name;
    if (strncmp(base, "libnccl.so", 10) == 0 && !machine->nccl_path[0])
        resolve(info->dlpi_name, machine->nccl_path, sizeof(machine->nccl_path));
    if (strncmp(base, "libcudart.so", 12) == 0 && !machine->cudart_path[0])
        resolve(info->dlpi_name, machine->cudart_path, sizeof(machine->cudart_path));
    return 0;
}

static int describe(struct worker *w, struct lc_bench_machine *machine)
{
    struct cudaDeviceProp properties;

    dl_iterate_phdr(find_library, machine);
    machine->rig = dlsym(RTLD_DEFAULT, "lcrig_enqueue") != NULL;
    NCCL(w, GetVersion(&machine->nccl));
    CUDA(w, DriverGetVersion(&machine->driver));
    CUDA(w, GetDeviceCount(&machine->gpus));
    if (machine->gpus < 1)
        return fail(w, "no GPU");
    CUDA(w, GetDeviceProperties(&properties, 0));
    machine->l2_bytes = (size_t)properties.l2CacheSize;
    snprintf(machine->gpu, sizeof(machine->gpu), "%.63s", properties.name);
    return 0;
}

/* A variant that is not what its name says would make every figure a lie. */
static int check_variant(struct worker *w, const char *variant)
{
    void *symbol = dlsym(RTLD_DEFAULT, "ncclAllReduce");
    Dl_info info = { 0 };
    bool ours;

    if (!symbol || !dladdr(symbol, &info) || !info.dli_fname)
        return fail(w, "cannot tell which library ncclAllReduce is from");
    ours = strstr(info.dli_fname, "libloongcomm") != NULL;
    if (ours != (strcmp(variant, lc_bench_variant_names[LC_BENCH_OURS]) == 0))
        return fail(w, "ncclAllReduce is from %s, wrong for the variant %s", info.dli_fname,
                    variant);
    return 0;
}

/* How many channels a communicator has, NCCL only tells its log; whoever wants to see that one, has it. */
static void hear_nccl(struct worker *w)
{
    char path[64];

    if (w->heard || getenv("NCCL_DEBUG") || getenv("NCCL_DEBUG_FILE"))
        return;
    w->heard = memfd_create("loongcomm-bench", MFD_CLOEXEC);
    if (w->heard <= 0) {
        w->heard = 0;
        return;
    }
    snprintf(path, sizeof(path), "/proc/self/fd/%d", w->heard);
    setenv("NCCL_DEBUG", "INFO", 1);
    setenv("NCCL_DEBUG_SUBSYS", "INIT", 1);
    setenv("NCCL_DEBUG_FILE", path, 1);
}

/* Of the communicator that was made last. */
static int count_channels(const struct worker *w)
{
    static char text[1 << 18];
    ssize_t length = w->heard ? pread(w->heard, text, sizeof(text) - 1, 0) : 0;

    text[length < 0 ? 0 : length] = '\0';
    return lc_ways_channels(text);
}

/* NCCL has it by now; it is found by the name under which NCCL has loaded it. */
static int find_measure(struct worker *w)
{
    const char *path = getenv("NCCL_TUNER_PLUGIN");
    void *plugin = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;

    w->measure = plugin ? dlsym(plugin, LC_MEASURE_SYMBOL) : NULL;
    if (!w->measure || w->measure->version != 1)
        return fail(w, "NCCL has not loaded the tuner for measuring, %s", path ? path : "none");
    w->reply->product = atomic_load_explicit(&w->measure->product, memory_order_relaxed) > 0;
    w->reply->channels = count_channels(w);
    return 0;
}

/* NCCL has a thread of each rank busy, too: where there are no more processors than for both, who waits for the GPU shall not
 * take one from those who move the data. */
static bool processors_are_few(int ranks)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) <= 2 * ranks;
}

static int init(struct worker *w, const struct lc_bench_request *request)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;

    w->rank = request->rank;
    w->ranks = request->ranks;
    w->comm = NULL; /* for errors */
    CUDA(w, SetDevice(request->device));
    if (!w->stream && processors_are_few(request->ranks) &&
        cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync) != cudaSuccess)
        (void)cudaGetLastError(); /* a runtime that has its flags already keeps them */
    if (!w->stream)
        CUDA(w, StreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
    if (request->ctas) {
        config.minCTAs = config.maxCTAs = request->ctas;
        NCCL(w, CommInitRankConfig(&w->comms[request->comm], request->ranks, request->id,
                                   request->rank, &config));
    } else {
        NCCL(w, CommInitRank(&w->comms[request->comm], request->ranks, request->id, request->rank));
    }
    w->comm = w->comms[request->comm];
    return request->measures ? find_measure(w) : 0;
}

static int drop_graph(struct worker *w)
{
    if (w->exec)
        CUDA(w, GraphExecDestroy(w->exec));
    w->exec = NULL;
    w->exec_inner = 0;
    return 0;
}

static int drop_case(struct worker *w)
{
    char *recv = w->recv == w->send ? NULL : w->recv;
    char *send = w->send;
    char *orig = w->orig;

    uint32_t *mask = w->mask;

    w->send = w->recv = w->orig = NULL;
    w->mask = NULL;
    free(w->expected);
    free(w->got);
    w->expected = w->got = NULL;
    if (drop_graph(w))
        return -EIO;
    if (send)
        CUDA(w, Free(send));
    if (recv)
        CUDA(w, Free(recv));
    if (orig)
        CUDA(w, Free(orig));
    if (mask)
        CUDA(w, Free(mask));
    return 0;
}

/* As many buffers as make up `rotate` bytes, so that a call does not find its data in the L2. In place a
 * buffer serves one call of a sample only: small ones get several. */
static int count_slots(const struct lc_bench_case *kase, size_t rotate)
{
    size_t slots = rotate / (kase->inplace ? kase->bytes : 2 * kase->bytes) + 1;
    size_t least = kase->inplace ? INPLACE_BYTES / kase->bytes : 1;

    if (slots < least)
        slots = least;
    return slots < MAX_SLOTS ? (int)slots : MAX_SLOTS;
}

static int allocate(struct worker *w, size_t rotate)
{
    size_t bytes = w->kase.bytes;

    w->stride = (bytes + 511) & ~(size_t)511;
    w->slots = count_slots(&w->kase, rotate);
    w->next = 0;
    w->expected = calloc(1, bytes); /* an all-gather sends a part of its size only */
    w->got = malloc(bytes);
    if (!w->expected || !w->got)
        return fail(w, "out of memory");
    CUDA(w, Malloc((void **)&w->send, w->stride * (size_t)w->slots));
    if (w->kase.inplace) {
        w->recv = w->send;
        CUDA(w, Malloc((void **)&w->orig, w->stride));
    } else {
        CUDA(w, Malloc((void **)&w->recv, w->stride * (size_t)w->slots));
    }
    return 0;
}

static int make_mask(struct worker *w)
{
    size_t bytes, rows = lc_bench_fill_mask(&w->kase, w->ranks, w->rank, NULL);
    uint32_t *bits;
    int err;

    w->set_mask = (__typeof__(w->set_mask))(uintptr_t)dlsym(RTLD_DEFAULT, "loongcommSetMask");
    if (!w->kase.mask || !w->set_mask)
        return 0;
    if (!rows)
        return fail(w, "no rows of equal size fill the buffer");
    bytes = (rows + 31) / 32 * 4;
    bits = calloc(1, bytes);
    if (!bits)
        return fail(w, "out of memory");
    w->mask_rows = lc_bench_fill_mask(&w->kase, w->ranks, w->rank, bits);
    err = cuda_failed(w, cudaMalloc((void **)&w->mask, bytes), "cudaMalloc");
    if (!err)
        err = cuda_failed(w, cudaMemcpy(w->mask, bits, bytes, cudaMemcpyHostToDevice),
                          "cudaMemcpy");
    free(bits);
    return err;
}

static int prepare_case(struct worker *w, const struct lc_bench_request *request)
{
    size_t bytes = request->kase.bytes;
    char *first;

    if (drop_case(w))
        return -EIO;
    w->kase = request->kase;
    if (allocate(w, request->rotate) || make_mask(w))
        return -EIO;
    first = w->kase.inplace ? w->orig : w->send;
    w->reply->slots = w->slots;
    if (w->kase.unchecked) {
        CUDA(w, MemsetAsync(w->send, 0, w->stride * (size_t)w->slots, w->stream));
        CUDA(w, StreamSynchronize(w->stream));
        return 0;
    }
    lc_bench_fill_send(&w->kase, w->ranks, w->rank, w->expected);
    CUDA(w, MemcpyAsync(first, w->expected, bytes, cudaMemcpyHostToDevice, w->stream));
    for (int s = w->kase.inplace ? 0 : 1; s < w->slots; s++)
        CUDA(w, MemcpyAsync(w->send + (size_t)s * w->stride, first, bytes, cudaMemcpyDeviceToDevice,
                            w->stream));
    CUDA(w, StreamSynchronize(w->stream));
    lc_bench_fill_expected(&w->kase, w->ranks, w->rank, w->expected);
    return 0;
}

static int send_receive(struct worker *w, const char *send, char *recv)
{
    ncclDataType_t type = lc_bench_dtypes[w->kase.dtype].nccl;
    size_t part = w->kase.bytes / (size_t)w->ranks;
    size_t count = part / lc_bench_dtypes[w->kase.dtype].size;

    NCCL(w, GroupStart());
    for (int peer = 0; peer < w->ranks; peer++) {
        NCCL(w, Send(send + (size_t)peer * part, count, type, peer, w->comm, w->stream));
        NCCL(w, Recv(recv + (size_t)peer * part, count, type, peer, w->comm, w->stream));
    }
    NCCL(w, GroupEnd());
    return 0;
}

/* Parts begin at multiples of 16 bytes, as tensors of a framework do; the last one takes what is left. */
static int grouped(struct worker *w, const char *send, char *recv)
{
    const struct lc_bench_dtype *dtype = &lc_bench_dtypes[w->kase.dtype];
    size_t part = (w->kase.bytes / (size_t)w->kase.tensors + 15) / 16 * 16;
    size_t bytes;

    NCCL(w, GroupStart());
    for (size_t at = 0; at < w->kase.bytes; at += bytes) {
        bytes = w->kase.bytes - at < part ? w->kase.bytes - at : part;
        NCCL(w, AllReduce(send + at, recv + at, bytes / dtype->size, dtype->nccl, ncclSum, w->comm,
                          w->stream));
    }
    NCCL(w, GroupEnd());
    return 0;
}

static int one_call(struct worker *w, int slot)
{
    const struct lc_bench_dtype *dtype = &lc_bench_dtypes[w->kase.dtype];
    const char *send = w->send + (size_t)slot * w->stride;
    char *recv = w->recv + (size_t)slot * w->stride;
    size_t count = w->kase.bytes / dtype->size;

    if (w->kase.op == LC_BENCH_ALLREDUCE && w->kase.tensors > 1)
        return grouped(w, send, recv);
    if (w->kase.op == LC_BENCH_ALLREDUCE) {
        NCCL(w, AllReduce(send, recv, count, dtype->nccl, ncclSum, w->comm, w->stream));
        return 0;
    }
    if (w->kase.op == LC_BENCH_REDUCESCATTER) {
        NCCL(w, ReduceScatter(send, recv, count / (size_t)w->ranks, dtype->nccl, ncclSum, w->comm,
                              w->stream));
        return 0;
    }
    if (w->kase.op == LC_BENCH_ALLGATHER) {
        NCCL(w, AllGather(send, recv, count / (size_t)w->ranks, dtype->nccl, w->comm, w->stream));
        return 0;
    }
    if (w->mask &&
        w->set_mask(w->comm, w->mask, w->mask_rows, w->kase.bytes / w->mask_rows, w->stream) < 0)
        return fail(w, "loongcommSetMask has refused a mask of %zu rows", w->mask_rows);
    if (w->kase.sendrecv)
        return send_receive(w, send, recv);
    NCCL(w, AlltoAll(send, recv, count / (size_t)w->ranks, dtype->nccl, w->comm, w->stream));
    return 0;
}

/* `inner` calls, each on the next slot. */
static int calls(struct worker *w, int inner)
{
    for (int i = 0; i < inner; i++) {
        int err;

        atomic_fetch_add_explicit(&w->progress->entered, 1, memory_order_relaxed);
        err = one_call(w, (int)(w->next++ % (unsigned)w->slots));
        atomic_fetch_add_explicit(&w->progress->returned, 1, memory_order_relaxed);
        if (err)
            return err;
    }
    return 0;
}

static int capture(struct worker *w, int inner)
{
    cudaGraph_t graph = NULL;
    int err;

    if (drop_graph(w))
        return -EIO;
    w->next = 0;
    CUDA(w, StreamBeginCapture(w->stream, cudaStreamCaptureModeThreadLocal));
    err = calls(w, inner);
    CUDA(w, StreamEndCapture(w->stream, &graph)); /* also after a failure: it ends the capture */
    if (!err)
        err = cuda_failed(w, cudaGraphInstantiateWithFlags(&w->exec, graph, 0),
                          "cudaGraphInstantiateWithFlags");
    if (graph)
        cudaGraphDestroy(graph);
    w->exec_inner = err ? 0 : inner;
    return err;
}

static int batch(struct worker *w, int inner)
{
    if (!w->kase.graph)
        return calls(w, inner);
    CUDA(w, GraphLaunch(w->exec, w->stream));
    return 0;
}

/* In place, a call leaves its sum where its term was: put the term back into what the next `inner` calls
 * use, outside of the timing. */
static int restore(struct worker *w, int inner)
{
    unsigned first = w->kase.graph ? 0 : w->next;

    for (int i = 0; w->kase.inplace && i < inner && i < w->slots; i++) {
        size_t slot = (first + (unsigned)i) % (unsigned)w->slots;

        CUDA(w, MemcpyAsync(w->send + slot * w->stride, w->orig, w->kase.bytes,
                            cudaMemcpyDeviceToDevice, w->stream));
    }
    return 0;
}

/* No result may look right because an earlier call left it. */
static int poison(struct worker *w)
{
    if (!w->kase.inplace)
        CUDA(w, MemsetAsync(w->recv, POISON, w->stride * (size_t)w->slots, w->stream));
    return 0;
}

static int need_events(struct worker *w, int count)
{
    cudaEvent_t *events;

    if (count <= w->n_events)
        return 0;
    events = realloc(w->events, (size_t)count * sizeof(cudaEvent_t));
    if (!events)
        return fail(w, "out of memory");
    w->events = events;
    while (w->n_events < count) {
        CUDA(w, EventCreateWithFlags(&w->events[w->n_events], cudaEventDefault));
        w->n_events++;
    }
    return 0;
}

static void hex(const unsigned char *bytes, size_t count, char *out)
{
    for (size_t i = 0; i < count; i++)
        sprintf(out + 2 * i, "%02x", bytes[i]);
}

static int mismatch(struct worker *w, int slot)
{
    size_t bytes = lc_bench_recv_bytes(&w->kase, w->ranks);
    size_t at = 0;
    size_t wrong = 0;
    size_t shown;
    char want[17] = "";
    char have[17] = "";
    char from[48] = "";

    for (size_t i = bytes; i-- > 0;) {
        if (w->got[i] != w->expected[i]) {
            wrong++;
            at = i;
        }
    }
    if (wrong == 0)
        return 0;
    at -= at % lc_bench_dtypes[w->kase.dtype].size;
    shown = bytes - at < 8 ? bytes - at : 8;
    hex(w->expected + at, shown, want);
    hex(w->got + at, shown, have);
    if (!lc_bench_is_sum(w->kase.op))
        snprintf(from, sizeof(from), " (from rank %zu)", at * (size_t)w->ranks / bytes);
    return fail(
        w, "wrong result: %zu of %zu bytes differ, the first at byte %zu%s: %s instead of %s%s",
        wrong, bytes, at, from, have, want, slot ? " in a later buffer" : "");
}

/* Checks what the last `inner` calls left. */
static int verify(struct worker *w, int inner)
{
    int used = inner < w->slots ? inner : w->slots;
    unsigned first = w->kase.graph ? 0 : w->next - (unsigned)used;
    size_t bytes = lc_bench_recv_bytes(&w->kase, w->ranks);

    for (int i = 0; i < used; i++) {
        int slot = (int)((first + (unsigned)i) % (unsigned)w->slots);

        CUDA(w, MemcpyAsync(w->got, w->recv + (size_t)slot * w->stride, bytes,
                            cudaMemcpyDeviceToHost, w->stream));
        CUDA(w, StreamSynchronize(w->stream));
        if (memcmp(w->got, w->expected, bytes) != 0)
            return mismatch(w, slot);
    }
    return 0;
}

static int sample(struct worker *w, const struct lc_bench_request *request, int index)
{
    bool last = index == request->iters - 1;
    cudaEvent_t start = w->events[2 * (size_t)index];
    cudaEvent_t stop = w->events[2 * (size_t)index + 1];

    if (restore(w, request->inner) || (last && request->verify && poison(w)))
        return -EIO;
    CUDA(w, EventRecord(start, w->stream));
    if (batch(w, request->inner))
        return -EIO;
    CUDA(w, EventRecord(stop, w->stream));
    return 0;
}

/* Of NCCL's threads and the plugin's: the caller's own mostly spins in CUDA until the stream is done. */
static double others_cpu(void)
{
    static const int whose[] = { RUSAGE_SELF, RUSAGE_THREAD };
    double s[2] = { 0 };

    for (int i = 0; i < 2; i++) {
        struct rusage u;

        if (getrusage(whose[i], &u) == 0)
            s[i] = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                   (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
    }
    return s[0] > s[1] ? s[0] - s[1] : 0;
}

/* The calls of a run so far; `before`: at its begin. */
struct asked {
    uint64_t calls, taken;
};

static struct asked count_asked(const struct worker *w)
{
    if (!w->measure)
        return (struct asked){ 0 };
    return (struct asked){ atomic_load_explicit(&w->measure->asked, memory_order_relaxed),
                           atomic_load_explicit(&w->measure->taken, memory_order_relaxed) };
}

static int choose_way(struct worker *w, const struct lc_bench_request *request)
{
    w->comm = w->comms[request->comm];
    if (request->measures)
        atomic_store_explicit(&w->measure->way, request->way, memory_order_relaxed);
    if (!w->kase.graph || (w->exec && w->exec_inner == request->inner &&
                           w->exec_way == request->way && w->exec_comm == request->comm))
        return 0;
    w->exec_way = request->way;
    w->exec_comm = request->comm;
    w->taken = false;
    w->choice = 0;
    return capture(w, request->inner);
}

/* A graph that was captured before has been asked about then. */
static void say_way(struct worker *w, const struct asked *before)
{
    const struct asked now = count_asked(w);
    uint64_t calls = now.calls - before->calls;

    if (!w->measure)
        return;
    if (calls ||
        !w->kase.graph) { /* calls that it does not ask about go some way that nobody knows */
        w->taken = calls && calls == now.taken - before->taken;
        w->choice = calls ? atomic_load_explicit(&w->measure->choice, memory_order_relaxed) : 0;
    }
    w->reply->taken = w->taken;
    w->reply->choice = w->choice;
}

static int run(struct worker *w, const struct lc_bench_request *request)
{
    const struct asked before = count_asked(w);
    double cpu = others_cpu();
    ncclResult_t async = ncclSuccess;
    float ms;

    if (need_events(w, 2 * request->iters) || choose_way(w, request))
        return -EIO;
    for (int i = 0; i < request->warmup; i++) {
        if (restore(w, request->inner) || batch(w, request->inner))
            return -EIO;
    }
    for (int i = 0; i < request->iters; i++) {
        if (sample(w, request, i))
            return -EIO;
    }
    CUDA(w, StreamSynchronize(w->stream));
    cpu = others_cpu() - cpu;
    w->reply->cpu_s = cpu > 0 ? cpu : 0;
    NCCL(w, CommGetAsyncError(w->comm, &async));
    if (nccl_failed(w, async, "communicator"))
        return -EIO;
    for (int i = 0; i < request->iters; i++) {
        CUDA(w, EventElapsedTime(&ms, w->events[2 * (size_t)i], w->events[2 * (size_t)i + 1]));
        w->reply->us[i] = (double)ms * 1e3 / request->inner;
    }
    w->reply->samples = request->iters;
    say_way(w, &before);
    return request->verify ? verify(w, request->inner) : 0;
}

static int finish(struct worker *w)
{
    if (drop_case(w))
        return -EIO;
    for (int i = 0; i < w->n_events; i++)
        CUDA(w, EventDestroy(w->events[i]));
    free(w->events);
    w->events = NULL;
    w->n_events = 0;
    w->comm = NULL;
    for (int i = 0; i < LC_BENCH_COMMS; i++) {
        ncclComm_t comm = w->comms[i];

        w->comms[i] = NULL;
        if (comm)
            NCCL(w, CommDestroy(comm));
    }
    if (w->stream)
        CUDA(w, StreamDestroy(w->stream));
    return 0;
}

static int serve(struct worker *w, const struct lc_bench_request *request)
{
    if (request->measures)
        hear_nccl(w); /* before NCCL looks for its variables */
    switch (request->kind) {
    case LC_BENCH_ASK_ID: NCCL(w, GetUniqueId(&w->reply->id)); return 0;
    case LC_BENCH_ASK_INIT: return init(w, request);
    case LC_BENCH_ASK_CASE: return prepare_case(w, request);
    case LC_BENCH_ASK_RUN: return run(w, request);
    case LC_BENCH_ASK_QUIT: return finish(w);
    }
    return fail(w, "unknown request %d", (int)request->kind);
}

static int send_reply(struct worker *w, int error)
{
    size_t bytes = offsetof(struct lc_bench_reply, us) + (size_t)w->reply->samples * sizeof(double);

    w->reply->error = error;
    return send(w->fd, w->reply, bytes, MSG_NOSIGNAL) == (ssize_t)bytes ? 0 : -EPIPE;
}

static void clear_reply(struct lc_bench_reply *reply)
{
    memset(reply, 0, offsetof(struct lc_bench_reply, us));
}

/* The first reply says what this process sees; then request after request until the launcher goes. */
static int loop(struct worker *w, const char *variant)
{
    struct lc_bench_request request;
    int err;

    err = describe(w, &w->reply->machine);
    if (!err)
        err = check_variant(w, variant);
    if (send_reply(w, err))
        return 1;
    while (recv(w->fd, &request, sizeof(request), 0) == (ssize_t)sizeof(request)) {
        clear_reply(w->reply);
        err = serve(w, &request);
        if (send_reply(w, err) || err)
            return 1;
        if (request.kind == LC_BENCH_ASK_QUIT)
            return 0;
    }
    return 1;
}

int lc_bench_worker(int fd, int progress_fd, pid_t launcher, const char *variant)
{
    struct worker w = { .fd = fd };
    void *page;
    int rc = 1;

    /* A launcher that is killed leaves nobody behind, not even a rank that is stuck inside a call. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher)
        return 1;
    page = mmap(NULL, sizeof(*w.progress), PROT_READ | PROT_WRITE, MAP_SHARED, progress_fd, 0);
    w.reply = calloc(1, sizeof(*w.reply));
    if (page != MAP_FAILED && w.reply) {
        w.progress = page;
        rc = loop(&w, variant);
    }
    free(w.reply);
    if (rc)
        _exit(rc); /* the stream may hold calls that never end: no exit handler could tidy up */
    return 0;
}
