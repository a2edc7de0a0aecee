/* SPDX-License-Identifier: Apache-2.0
 *
 * rings LIBRARY [--processes] [--ranks N] [--seconds S] [--seed N] [--variant N]
 * The rings of a kernels library, all ranks on one device: as threads with a stream each, or as processes (under MPS) that
 * map each other's segments by file descriptor. First the named cases, then random ones for S seconds. The host library
 * runs the same on host memory. 77: the library needs a GPU and there is none.
 */
#include "kernels/rings.h"
#include "kernels/rings_internal.h"
#include "tests/kernels/device.h"
#include "tests/kernels/rings_cases.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static struct {
#define LK_SYM(name) __typeof__(name) *name;
    LK_SYM(lk_backend)
    LK_SYM(lk_load_all)
    LK_SYM(lk_rings_load)
    LK_SYM(lk_error_text)
    LK_SYM(lk_ring_bytes)
    LK_SYM(lk_ring_state_bytes)
    LK_SYM(lk_segment_new)
    LK_SYM(lk_segment_map)
    LK_SYM(lk_segment_free)
    LK_SYM(lk_rings_all_reduce)
    LK_SYM(lk_rings_reduce_scatter)
    LK_SYM(lk_lines_all_reduce)
    __typeof__(lk_rings_variant) *variant; /* NULL: there is one only */
#undef LK_SYM
} lib;
static bool cuda;

/* What ranks share: written before they start, but for the barrier and fds (each by its rank, between two barriers). */
struct world {
    pthread_barrier_t barrier;
    uint32_t ranks;
    int fds[LK_RANKS_MAX]; /* threads */
    int sockets[LK_RANKS_MAX]
               [2]; /* processes: [r][0] is where rank r receives, anybody sends into [r][1] */
    bool processes;
    uint64_t seed;
    int variant;
    int seconds;
    time_t end; /* of random cases, of rank 0 */
    bool more;
};
static struct world *world;
static pthread_barrierattr_t world_attr;

static void meet(void)
{
    int err = pthread_barrier_wait(&world->barrier);

    CHECK(err == 0 || err == PTHREAD_BARRIER_SERIAL_THREAD);
}

static void must(int err)
{
    if (err)
        fprintf(stderr, "%s\n", lib.lk_error_text(err));
    CHECK(err == 0);
}

static void *device_zeroed(size_t bytes)
{
    void *ptr;

    if (!cuda) {
        ptr = aligned_alloc(128, (bytes + 127) / 128 * 128);
        CHECK(ptr);
        memset(ptr, 0, bytes);
        return ptr;
    }
    CUDA(cudaMalloc(&ptr, bytes));
    CUDA(cudaMemset(ptr, 0, bytes));
    return ptr;
}

static void device_free(void *ptr)
{
    if (cuda)
        CUDA(cudaFree(ptr));
    else
        free(ptr);
}

static void device_copy(void *dst, const void *src, size_t bytes, cudaStream_t stream)
{
    if (!cuda) {
        memcpy(dst, src, bytes);
        return;
    }
    CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
}

/* ---- segments ---- */

static void send_fd(int socket, int fd, uint32_t rank)
{
    char control[CMSG_SPACE(sizeof(int))] = { 0 };
    struct iovec part = { &rank, sizeof(rank) };
    struct msghdr msg = { .msg_iov = &part,
                          .msg_iovlen = 1,
                          .msg_control = control,
                          .msg_controllen = sizeof(control) };
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof(fd));
    CHECK(sendmsg(socket, &msg, 0) == sizeof(rank));
}

static int receive_fd(int socket, uint32_t *rank)
{
    char control[CMSG_SPACE(sizeof(int))] = { 0 };
    struct iovec part = { rank, sizeof(*rank) };
    struct msghdr msg = { .msg_iov = &part,
                          .msg_iovlen = 1,
                          .msg_control = control,
                          .msg_controllen = sizeof(control) };
    int fd;

    CHECK(recvmsg(socket, &msg, 0) == sizeof(*rank));
    CHECK(CMSG_FIRSTHDR(&msg) && CMSG_FIRSTHDR(&msg)->cmsg_type == SCM_RIGHTS);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(fd));
    return fd;
}

static void exchange(struct lk_rings *rings, size_t bytes, int fd, uint32_t ranks)
{
    uint32_t me = rings->rank;

    world->fds[me] = fd;
    for (uint32_t r = 0; r < ranks && world->processes; r++)
        if (r != me)
            send_fd(world->sockets[r][1], fd, me);
    meet();
    for (uint32_t i = 0; i + 1 < ranks; i++) {
        uint32_t r = (me + 1 + i) % ranks;
        int theirs = world->processes ? receive_fd(world->sockets[me][0], &r) : world->fds[r];

        CHECK(r != me && r < ranks);
        must(lib.lk_segment_map(theirs, bytes, &rings->segments[r]));
        if (world->processes)
            close(theirs);
    }
    meet();
    close(fd);
}

/* ---- cases ---- */

struct rank {
    uint32_t number;
    cudaStream_t stream;
    uint32_t *abort;
};

static int call(const struct rings_data *data, const struct lk_rings *rings,
                const struct lk_buffers *list, float *residual, cudaStream_t stream)
{
    const struct rings_case *c = data->c;
    uint32_t ctas = c->ctas[rings->rank % 3];
    struct lk_scale scale;
    struct lk_reduction how = rings_reduction(data, rings->rank, &scale, residual);

    switch (c->op) {
    case RINGS_ALL_REDUCE: return lib.lk_rings_all_reduce(rings, &how, list, data->n, ctas, stream);
    case RINGS_REDUCE_SCATTER:
        return lib.lk_rings_reduce_scatter(rings, &how, list, data->n, ctas, stream);
    default: return lib.lk_lines_all_reduce(rings, &how, list, data->n, ctas, stream);
    }
}

/* The case `times` times, each from fresh data. */
static void play(const struct rank *rank, const struct rings_data *data,
                 const struct lk_rings *rings, int times)
{
    const struct rings_rank *r = &data->ranks[rank->number];
    size_t bytes = r->out ? r->out_bytes : r->in_bytes;
    uint8_t *in = device_zeroed(r->in_bytes), *out = r->out ? device_zeroed(bytes) : in;
    uint8_t *got = malloc(bytes);
    float *residual = device_zeroed(data->residual_bytes + 1);
    float *owed = malloc(data->residual_bytes + 1);
    struct lk_buffers *list = calloc(data->n, sizeof(*list));

    CHECK(got && list && owed);
    for (uint32_t i = 0; i < data->n; i++) {
        list[i] = r->list[i];
        list[i].in = in + (uintptr_t)r->list[i].in;
        list[i].out = out + (uintptr_t)r->list[i].out;
    }
    for (int i = 0; i < times; i++) {
        device_copy(in, r->in, r->in_bytes, rank->stream);
        if (r->out)
            device_copy(out, r->out, bytes, rank->stream);
        if (r->residual)
            device_copy(residual, r->residual, data->residual_bytes, rank->stream);
        meet(); /* nothing that could wait for the device stands between launches */
        must(call(data, rings, list, residual, rank->stream));
        device_copy(got, out, bytes, rank->stream);
        rings_compare(data, rank->number, got);
        if (r->residual)
            device_copy(owed, residual, data->residual_bytes, rank->stream);
        rings_compare_residual(data, rank->number, owed);
        meet();
    }
    if (r->out)
        device_free(out);
    device_free(in);
    device_free(residual);
    free(got);
    free(owed);
    free(list);
}

static void run_case(const struct rank *rank, const struct rings_case *c)
{
    struct lk_rings rings = { .shape = c->shape, .rank = rank->number, .abort = rank->abort };
    struct rings_data *data = NULL;
    size_t bytes = lib.lk_ring_bytes(&c->shape);
    bool takes_part = rank->number < c->shape.ranks;
    int fd;

    CHECK(bytes);
    if (rank->number == 0) {
        char text[400];

        rings_describe(c, text, sizeof(text));
        printf("%s\n", text);
        fflush(stdout);
    }
    if (!takes_part) { /* as often as the others */
        for (int i = 0; i < 2 + 2 * 3 + 1; i++)
            meet();
        return;
    }
    data = rings_data_make(c);
    rings.state = device_zeroed(lib.lk_ring_state_bytes(&c->shape));
    must(lib.lk_segment_new(bytes, rank->stream, &rings.segments[rank->number], &fd));
    if (cuda)
        CUDA(cudaStreamSynchronize(rank->stream));
    exchange(&rings, bytes, fd, c->shape.ranks);
    play(rank, data, &rings, 3);
    meet();
    for (uint32_t r = 0; r < c->shape.ranks; r++)
        must(lib.lk_segment_free(rings.segments[r], bytes));
    device_free(rings.state);
    rings_data_free(data);
}

static void run_rank(uint32_t number)
{
    struct rank rank = { .number = number };
    uint64_t seed = world->seed;

    if (cuda) {
        CUDA(cudaSetDevice(0));
        CUDA(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    }
    must(lib.lk_load_all());
    must(lib.lk_rings_load());
    if (world->variant && (world->processes || number == 0))
        CHECK(lib.variant && lib.variant(world->variant));
    rank.abort = device_zeroed(sizeof(*rank.abort));
    meet();
    for (size_t i = 0; i < rings_case_count; i++)
        if (rings_cases[i].shape.ranks <= world->ranks)
            run_case(&rank, &rings_cases[i]);
    if (number == 0)
        world->end = time(NULL) + world->seconds;
    for (;; seed++) {
        struct rings_case c;

        if (number == 0)
            world->more = time(NULL) < world->end;
        meet();
        if (!world->more)
            break;
        rings_random_case(seed, world->ranks, cuda ? 4000000 : 40000, &c);
        run_case(&rank, &c);
    }
    device_free(rank.abort);
}

static void *rank_thread(void *arg)
{
    run_rank((uint32_t)(uintptr_t)arg);
    return NULL;
}

static void run_threads(void)
{
    pthread_t threads[LK_RANKS_MAX];

    for (uint32_t r = 0; r < world->ranks; r++)
        CHECK(pthread_create(&threads[r], NULL, rank_thread, (void *)(uintptr_t)r) == 0);
    for (uint32_t r = 0; r < world->ranks; r++)
        CHECK(pthread_join(threads[r], NULL) == 0);
}

/* A rank that fails takes the others with it: they would wait for ever. */
static void run_processes(void)
{
    pid_t children[LK_RANKS_MAX];
    bool failed = false;

    for (uint32_t r = 0; r < world->ranks; r++) {
        children[r] = fork();
        CHECK(children[r] >= 0);
        if (children[r] == 0) {
            run_rank(r);
            exit(0);
        }
    }
    for (uint32_t left = world->ranks; left; left--) {
        int status;
        pid_t ended = wait(&status);

        CHECK(ended > 0);
        for (uint32_t r = 0; r < world->ranks; r++) {
            if (children[r] == ended)
                children[r] = 0;
        }
        if (!status || failed)
            continue;
        failed = true;
        for (uint32_t r = 0; r < world->ranks; r++) {
            if (children[r])
                kill(children[r], SIGKILL);
        }
    }
    CHECK(!failed);
}

static void open_library(const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (!handle)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(handle);
#define LK_SYM(name)                                                  \
    lib.name = (__typeof__(lib.name))(uintptr_t)dlsym(handle, #name); \
    CHECK(lib.name);
    LK_SYM(lk_backend)
    LK_SYM(lk_load_all)
    LK_SYM(lk_rings_load)
    LK_SYM(lk_error_text)
    LK_SYM(lk_ring_bytes)
    LK_SYM(lk_ring_state_bytes)
    LK_SYM(lk_segment_new)
    LK_SYM(lk_segment_map)
    LK_SYM(lk_segment_free)
    LK_SYM(lk_rings_all_reduce)
    LK_SYM(lk_rings_reduce_scatter)
    LK_SYM(lk_lines_all_reduce)
#undef LK_SYM
    lib.variant = (__typeof__(lib.variant))(uintptr_t)dlsym(handle, "lk_rings_variant");
    cuda = strcmp(lib.lk_backend(), "cuda") == 0;
}

/* Asked in a process of its own: a context does not outlive a fork. */
static bool has_device(void)
{
    int status, count = 0;
    pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0)
        _exit(cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? 0 : 1);
    CHECK(waitpid(child, &status, 0) == child);
    return status == 0;
}

static void make_world(void)
{
    pthread_barrierattr_t shared;

    world = mmap(NULL, sizeof(*world), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(world != MAP_FAILED);
    world->ranks = 4;
    world->seed = 1;
    CHECK(pthread_barrierattr_init(&shared) == 0);
    CHECK(pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED) == 0);
    world_attr = shared;
    for (uint32_t r = 0; r < LK_RANKS_MAX; r++)
        world->sockets[r][0] = -1;
}

int main(int argc, char **argv)
{
    CHECK(argc >= 2);
    make_world();
    for (int i = 2; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";

        if (strcmp(argv[i], "--processes") == 0) {
            world->processes = true;
            continue;
        }
        if (strcmp(argv[i], "--ranks") == 0)
            world->ranks = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--seconds") == 0)
            world->seconds = (int)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--variant") == 0)
            world->variant = (int)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            world->seed = strtoull(value, NULL, 10);
        else
            return 2;
        i++;
    }
    CHECK(world->ranks >= 2 && world->ranks <= LK_DEVICE_RANKS);
    open_library(argv[1]);
    if (cuda && !has_device()) {
        printf("SKIPPED: no GPU on this machine\n");
        return LC_SKIP;
    }
    CHECK(pthread_barrier_init(&world->barrier, &world_attr, world->ranks) == 0);
    for (uint32_t r = 0; r < world->ranks; r++)
        CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, world->sockets[r]) == 0);
    if (world->processes)
        run_processes();
    else
        run_threads();
    printf("passed\n");
    return 0;
}
