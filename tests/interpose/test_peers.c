/* SPDX-License-Identifier: Apache-2.0
 *
 * Setting up rings: what others say may come at any moment, and the device may take its time. */
/* What a step may see is put together by hand. NOLINTNEXTLINE(bugprone-suspicious-include) */
#include "interpose/generation.c"
/* NOLINTNEXTLINE(bugprone-suspicious-include) */
#include "interpose/peers.c"

#include "tests/check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define FORKS 300

/* What the only other rank says, by how often it has been listened to: -1, nothing yet. */
static const int *says;
static int listened, own_word;

int lc_room_look(struct lc_room *room, uint32_t rank, uint32_t key, void *data, size_t max,
                 size_t *size)
{
    uint32_t well = (uint32_t)says[listened];

    (void)room;
    CHECK(rank == 1 && key == KEY_RESULT && max == sizeof(well));
    if (says[listened++] < 0)
        return -EAGAIN;
    memcpy(data, &well, sizeof(well));
    *size = sizeof(well);
    return 0;
}

int lc_room_post(struct lc_room *room, uint32_t key, const void *data, size_t size)
{
    uint32_t well;

    (void)room;
    CHECK(key == KEY_RESULT && size == sizeof(well));
    memcpy(&well, data, sizeof(well));
    own_word = (int)well;
    return 0;
}

void lc_room_withdraw_fd(struct lc_room *room)
{
    (void)room;
}

void lc_room_echo_abort(struct lc_room *room, uint32_t *word)
{
    (void)room;
    (void)word;
}

int lc_room_offer_fd(struct lc_room *room, int fd)
{
    (void)room;
    (void)fd;
    return -ENOSYS;
}

int lc_room_fetch_fd(struct lc_room *room, uint32_t rank, int *out)
{
    (void)room;
    (void)rank;
    (void)out;
    return -ENOSYS;
}

const struct lc_record *lc_room_record(struct lc_room *room, uint32_t rank)
{
    (void)room;
    (void)rank;
    return NULL;
}

static cudaError_t attribute(int *value, enum cudaDeviceAttr attr, int device)
{
    (void)device;
    CHECK(attr == cudaDevAttrMultiProcessorCount);
    *value = 132;
    return cudaSuccess;
}

static const struct lc_backend plain = { .cudaDeviceGetAttribute = attribute };

/* A rank that has said that all is well and waits for the other's word. */
static struct lc_peers waiting(const int *words)
{
    struct lc_peers peers = {
        .backend = &plain,
        .facts = {.rank = 0, .ranks = 2, .kernels = 2},
        .stage = SAID,
        .fd = -1
    };

    peers.rings.shape = (struct lk_ring_shape){ .ranks = 2, .channels = 32, .slots = 4 };
    says = words;
    listened = 0;
    own_word = 1;
    return peers;
}

/* ---- a device that is slow ---- */

static int copies, marked, unmapped;
static bool device_is_done;

static cudaError_t copy_once(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                             cudaStream_t stream)
{
    (void)to;
    (void)from;
    (void)size;
    (void)kind;
    (void)stream;
    return copies++ == 0 ? cudaSuccess : cudaErrorUnknown;
}

static cudaError_t record(cudaEvent_t event, cudaStream_t stream)
{
    (void)event;
    (void)stream;
    marked = copies;
    return cudaSuccess;
}

static cudaError_t query(cudaEvent_t event)
{
    (void)event;
    return marked && !device_is_done ? cudaErrorNotReady : cudaSuccess;
}

static cudaError_t last_error(void)
{
    return cudaSuccess;
}

static int unmap_segment(void *address, size_t bytes)
{
    (void)address;
    (void)bytes;
    CHECK(device_is_done);
    unmapped++;
    return 0;
}

static const char *error_text(int err)
{
    (void)err;
    return "error";
}

static const struct lc_backend slow = { .cudaDeviceGetAttribute = attribute,
                                        .cudaMemcpyAsync = copy_once,
                                        .cudaEventRecord = record,
                                        .cudaEventQuery = query,
                                        .cudaGetLastError = last_error,
                                        .lk_segment_free = unmap_segment,
                                        .lk_error_text = error_text };

/* The first number is on its way to memory that must not go before it has come. */
static void what_failed_half_way_is_waited_for(void)
{
    static char event, segments[2][4096];
    static struct shared shared;
    struct lc_peers peers = waiting((const int[]){ -1, -1, -1, -1 });

    peers.backend = &slow;
    peers.stage = OFFERED;
    peers.shared = &shared;
    peers.event = (cudaEvent_t)&event;
    peers.rings.segments[0] = segments[0];
    peers.rings.segments[1] = segments[1];
    CHECK(!lc_peers_step(&peers) && own_word == 0 && unmapped == 0);
    device_is_done = true;
    CHECK(lc_peers_step(&peers) && !lc_peers_rings(&peers, 0) && unmapped == 2);
}

static cudaError_t end_event(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}

static cudaError_t end_stream(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

/* Asked again later: nothing waits. */
static void nothing_is_freed_while_the_device_is_at_it(void)
{
    static const struct lc_backend busy = { .cudaEventQuery = query,
                                            .cudaEventDestroy = end_event,
                                            .cudaStreamDestroy = end_stream,
                                            .cudaGetLastError = last_error,
                                            .lk_segment_free = unmap_segment };
    static char event, segment[4096];
    struct lc_peers *peers = calloc(1, sizeof(*peers));

    CHECK(peers && lc_peers_free(NULL));
    *peers = waiting((const int[]){ -1 });
    peers->backend = &busy;
    peers->event = (cudaEvent_t)&event;
    peers->rings.segments[1] = segment;
    marked = 1;
    device_is_done = false;
    unmapped = 0;
    CHECK(!lc_peers_free(peers) && unmapped == 0);
    device_is_done = true;
    CHECK(lc_peers_free(peers) && unmapped == 1);
}

static void goes_on_when_all_is_well(void)
{
    struct lc_peers peers = waiting((const int[]){ -1, -1, 1, 1 });

    CHECK(!lc_peers_step(&peers));
    CHECK(lc_peers_step(&peers) && lc_peers_rings(&peers, 0) && own_word == 1);
}

/* Two ranks on this GPU, two kernels of each at a time, and three quarters of it: 24 communicators, the more the smaller. */
static void kernels_of_all_communicators_find_room(void)
{
    static struct lc_peers peers[25];
    uint32_t before = 16;

    for (uint32_t n = 0; n < 24; n++) {
        peers[n] = waiting((const int[]){ 1, 1 });
        peers[n].facts.device = 3;
        CHECK(lc_peers_take_room(&peers[n]));
        CHECK(lc_peers_ctas(&peers[0], 8) == lc_peers_ctas(&peers[n], 8));
        CHECK(lc_peers_ctas(&peers[n], 8) * 2 * 2 * (n + 1) <= 99);
        CHECK(n == 0 ? lc_peers_ctas(&peers[n], 8) == 16 : lc_peers_ctas(&peers[n], 8) <= before);
        before = lc_peers_ctas(&peers[n], 8);
    }
    peers[24] = waiting((const int[]){ 1, 1 });
    peers[24].facts.device = 3;
    CHECK(before == 1 && !lc_peers_take_room(&peers[24]) && lc_peers_ctas(&peers[0], 8) == 1);
}

/* Between GPUs exchanges get what sums leave, and more than these; on one GPU as much. */
static void exchanges_between_devices_get_the_rest_of_the_room(void)
{
    static struct lc_peers peers[10], shared;

    for (uint32_t n = 0; n < 10; n++) {
        uint32_t sums, exchanges;

        peers[n] = waiting((const int[]){ 1, 1 });
        peers[n].rings.shape.channels = 64;
        peers[n].facts.device = 4;
        strcpy(peers[n].offers[1].gpu, "0000:65:00.0");
        CHECK(lc_peers_take_room(&peers[n]));
        sums = lc_peers_ctas(&peers[n], 8);
        exchanges = lc_peers_exchange_ctas(&peers[n]);
        CHECK(n > 0 || (sums == 32 && exchanges == 64));
        CHECK(sums >= 1 && exchanges >= sums && (sums + exchanges) * (n + 1) <= 99);
    }
    shared = waiting((const int[]){ 1, 1 });
    shared.facts.device = 5;
    CHECK(lc_peers_take_room(&shared));
    CHECK(lc_peers_exchange_ctas(&shared) == lc_peers_ctas(&shared, 8));
}

/* A graph stays as it was captured: those that come later get what it leaves, or nothing where that is too little. */
static void graphs_of_one_communicator_leave_room_for_others(void)
{
    static struct lc_peers peers[4];

    for (int n = 0; n < 4; n++) {
        peers[n] = waiting((const int[]){ 1, 1 });
        peers[n].rings.shape.channels = 64;
        peers[n].facts.device = 7;
        strcpy(peers[n].offers[1].gpu, "0000:65:00.0");
    }
    CHECK(lc_peers_take_room(&peers[0]));
    keep(&peers[0], LC_GRID_EXCHANGES, 20); /* and 32 of sums */
    keep(&peers[0], LC_GRID_EXCHANGES, 10);
    CHECK(lc_peers_ctas(&peers[0], 8) == 32 && lc_peers_exchange_ctas(&peers[0]) == 64);
    CHECK(lc_peers_take_room(&peers[1]));
    CHECK(lc_peers_ctas(&peers[1], 8) == 22 &&
          lc_peers_exchange_ctas(&peers[1]) == 22); /* of 99 - 52 */
    CHECK(lc_peers_ctas(&peers[0], 8) <= 32 && lc_peers_exchange_ctas(&peers[0]) == 16);
    CHECK(lc_peers_take_room(&peers[2]));
    CHECK(lc_peers_ctas(&peers[2], 8) == 11 && lc_peers_ctas(&peers[1], 8) == 11);
    CHECK(!lc_peers_take_room(&peers[3])); /* 15 for both kernels of each */
    CHECK(lc_peers_ctas(&peers[1], 8) == 11);

    lc_budget_leave(&peers[2].share);
    keep(&peers[1], LC_GRID_SUMS, 17);
    lc_budget_leave(&peers[0].share);
    CHECK(lc_peers_ctas(&peers[1], 8) == 32 && lc_peers_exchange_ctas(&peers[1]) == 64);
    CHECK(lc_peers_take_room(&peers[2]));
    CHECK(lc_peers_ctas(&peers[2], 8) == 22 &&
          lc_peers_exchange_ctas(&peers[2]) == 22); /* it keeps less than a half */
    lc_budget_leave(&peers[2].share);
    keep(&peers[1], LC_GRID_EXCHANGES, 64);
    CHECK(!lc_peers_take_room(&peers[3])); /* of 99 - 96 */
    lc_budget_leave(&peers[1].share);
    CHECK(lc_peers_take_room(&peers[3]) && lc_peers_exchange_ctas(&peers[3]) == 64);
    lc_budget_leave(&peers[3].share);
}

/* What is captured runs beside what is not; a communicator that has ended keeps nothing, be its memory still in use. */
static void graphs_and_other_grids_of_a_communicator_share_its_part(void)
{
    static struct lc_peers peers[4];
    static char room;

    for (int n = 0; n < 4; n++) {
        peers[n] = waiting((const int[]){ 1, 1 });
        peers[n].rings.shape.channels = 64;
        peers[n].facts.device = 8;
        strcpy(peers[n].offers[1].gpu, "0000:65:00.0");
        CHECK(lc_peers_take_room(&peers[n]));
        if (n == 0)
            keep(&peers[0], LC_GRID_SUMS, 32);
    }
    CHECK(lc_peers_exchange_ctas(&peers[0]) == 1); /* an equal part is 24 */
    CHECK(lc_peers_ctas(&peers[3], 8) == 11 && lc_peers_exchange_ctas(&peers[3]) == 11);
    peers[0].room = (struct lc_room *)&room;
    lc_peers_detach(&peers[0]);
    CHECK(lc_peers_ctas(&peers[3], 8) == 11 && lc_peers_exchange_ctas(&peers[3]) == 13);
    for (int n = 0; n < 4; n++)
        lc_budget_leave(&peers[n].share);
}

/* Kernels of an aborted one end by themselves: its part goes to others at once, though graphs may keep its memory. */
static void an_aborted_communicator_leaves_its_part(void)
{
    static struct lc_peers peers[2];
    static struct shared shared = { .abort = 1 };
    static char room;

    for (int n = 0; n < 2; n++) {
        peers[n] = waiting((const int[]){ 1, 1 });
        peers[n].facts.device = 9;
        peers[n].room = (struct lc_room *)&room;
        CHECK(lc_peers_take_room(&peers[n]));
    }
    CHECK(lc_budget_members(&peers[1].share) == 2);
    lc_peers_detach(&peers[1]);
    CHECK(lc_budget_members(&peers[0].share) == 2); /* its kernels may wait for peers */
    peers[0].shared = &shared;
    lc_peers_detach(&peers[0]);
    CHECK(lc_budget_members(&peers[1].share) == 1);
    lc_budget_leave(&peers[1].share);
}

/* Fewer or more than is usual, but never more than there is room for. */
static void the_job_says_how_much_a_call_may_take(void)
{
    static struct lc_peers peers;

    peers = waiting((const int[]){ 1, 1 });
    peers.rings.shape.channels = 64;
    peers.facts.device = 6;
    strcpy(peers.offers[1].gpu, "0000:65:00.0");
    CHECK(lc_peers_take_room(&peers));
    peers.facts.ctas = 8;
    CHECK(lc_peers_ctas(&peers, 8) == 8 && lc_peers_exchange_ctas(&peers) == 8);
    peers.facts.ctas = 128;
    CHECK(lc_peers_ctas(&peers, 8) == 32 && /* 49 would have as many channels at most */
          lc_peers_exchange_ctas(&peers) == 64);
    peers.facts.kernels = 1;
    CHECK(lc_peers_ctas(&peers, 8) == 64);
    CHECK(lc_peers_ctas(&peers, 6) == 32);                                   /* 48 likewise */
    CHECK(lc_peers_ctas(&peers, 4) == 32 && lc_peers_ctas(&peers, 1) == 32); /* as is usual */
}

/* ---- LOONGCOMM_MAX_CTAS ---- */

static size_t ring_bytes(const struct lk_ring_shape *s)
{
    return s->ranks > LK_DEVICE_RANKS ? 0 : lk_slot_offset(s, LK_EXCHANGE, s->ranks, 0, 0);
}

static const struct lc_backend shaped = { .lk_ring_bytes = ring_bytes };

#define MB ((size_t)1 << 20)

/* What all ranks have to have alike: nothing of it may depend on the device. `most`: 0, as without the setting. */
static void the_shape_has_a_channel_for_each_cta(void)
{
    static const struct {
        int ranks;
        size_t start, cap;
        uint32_t most, channels, slots, mb;
    } cases[] = {
        {2,   16 * MB, 512 * MB, 0,   64,  8, 88 },
        { 2,  16 * MB, 512 * MB, 32,  64,  8, 88 },
        { 2,  16 * MB, 512 * MB, 33,  66,  8, 89 },
        { 2,  16 * MB, 512 * MB, 48,  96,  8, 111},
        { 2,  16 * MB, 512 * MB, 63,  126, 8, 134},
        { 2,  16 * MB, 512 * MB, 64,  64,  8, 88 },
        { 2,  16 * MB, 512 * MB, 128, 128, 8, 136},
        { 2,  16 * MB, 100 * MB, 128, 128, 4, 96 },
        { 2,  2 * MB,  512 * MB, 0,   32,  1, 19 },
        { 2,  2 * MB,  512 * MB, 128, 64,  1, 30 },
        { 2,  2 * MB,  512 * MB, 33,  33,  1, 19 },
        { 4,  16 * MB, 512 * MB, 0,   64,  4, 101},
        { 4,  16 * MB, 512 * MB, 96,  96,  4, 149},
        { 8,  16 * MB, 512 * MB, 0,   64,  4, 164},
        { 8,  16 * MB, 512 * MB, 128, 128, 4, 325},
        { 8,  16 * MB, 128 * MB, 128, 64,  1, 66 },
        { 8,  16 * MB, 70 * MB,  96,  64,  1, 66 },
        { 16, 16 * MB, 512 * MB, 128, 128, 2, 391},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct lc_peers peers = {
            .backend = &shaped,
            .facts = {.ranks = cases[i].ranks,
                      .kernels = 2,
                      .short_bytes = 512 << 10,
                      .start = cases[i].start,
                      .cap = cases[i].cap,
                      .most = cases[i].most}
        };
        struct lk_ring_shape shape = shape_for(&peers);
        size_t bytes = ring_bytes(&shape);

        CHECK(bytes <= cases[i].cap);
        CHECK(shape.channels == cases[i].channels && shape.slots == cases[i].slots);
        CHECK(bytes >> 20 == cases[i].mb);
    }
}

/* One on a GPU of its own, of which kernels of NCCL's take `beside` at most. */
static void join_wide(struct lc_peers *peers, int device, uint32_t most, uint32_t beside,
                      uint32_t kernels)
{
    static const int well[] = { 1, 1 };

    *peers = waiting(well);
    peers->rings.shape.channels = most < 32 ? 64 : most;
    peers->rings.shape.slots = 8;
    peers->facts.device = device;
    peers->facts.most = most;
    peers->facts.beside = beside;
    peers->facts.kernels = kernels;
    strcpy(peers->offers[1].gpu, "0000:65:00.0");
}

static void the_job_says_how_much_a_call_of_ours_may_take(void)
{
    static const struct {
        uint32_t most, ctas, beside, kernels, sums, exchanges;
    } cases[] = {
        {8,    64, 0,          2, 8,   8  },
        { 16,  0,  0,          1, 16,  16 },
        { 64,  0,  0,          1, 64,  64 },
        { 128, 0,  0,          1, 64,  64 }, /* 99 would have as many channels at most */
        { 96,  0,  0,          1, 96,  96 },
        { 128, 4,  4,          1, 128, 128},
        { 128, 3,  3,          1, 128, 128},
        { 126, 5,  5,          1, 63,  63 }, /* of 124: NCCL may take 8 */
        { 128, 4,  4,          2, 64,  64 },
        { 64,  4,  4,          2, 64,  64 },
        { 128, 0,  0,          2, 43,  43 },
        { 96,  64, 64,         1, 96,  96 }, /* a quarter is left at least */
        { 96,  0,  UINT32_MAX, 1, 96,  96 },
    };
    static struct lc_peers peers;

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        join_wide(&peers, 10, cases[i].most, cases[i].beside, cases[i].kernels);
        peers.facts.ctas = cases[i].ctas;
        CHECK(lc_peers_take_room(&peers));
        CHECK(lc_peers_ctas(&peers, 8) == cases[i].sums);
        CHECK(lc_peers_exchange_ctas(&peers) == cases[i].exchanges);
        CHECK(lc_peers_take(&peers, LC_GRID_SUMS, cases[i].sums, false) == cases[i].sums);
        lc_budget_leave(&peers.share);
    }
}

/* The first one takes what its calls need, a second one the rest, and a third one stays with NCCL: until the first has gone. */
static void what_a_call_has_had_is_kept(void)
{
    static struct lc_peers peers[3];

    for (int n = 0; n < 3; n++)
        join_wide(&peers[n], 11, 100, 4, 1); /* of 128 */
    CHECK(lc_peers_take_room(&peers[0]) && lc_peers_ctas(&peers[0], 8) == 100);
    CHECK(lc_peers_take(&peers[0], LC_GRID_SUMS, 20, false) == 20);
    CHECK(lc_peers_take(&peers[0], LC_GRID_SUMS, 100, false) == 100);
    CHECK(lc_peers_take_room(&peers[1]));
    CHECK(lc_peers_ctas(&peers[0], 8) == 100); /* as before */
    CHECK(lc_peers_ctas(&peers[1], 8) == 25);  /* of 28 */
    CHECK(lc_peers_take(&peers[1], LC_GRID_SUMS, 100, false) == 28);
    CHECK(!lc_peers_take_room(&peers[2]));
    CHECK(lc_peers_take(&peers[1], LC_GRID_SUMS, 100, true) == 28);
    lc_budget_leave(&peers[0].share);
    CHECK(lc_peers_ctas(&peers[1], 8) == 100);
    CHECK(lc_peers_take_room(&peers[2]) && lc_peers_ctas(&peers[2], 8) == 50);
    CHECK(lc_peers_take(&peers[1], LC_GRID_SUMS, 100, false) == 64);
    CHECK(lc_peers_take(&peers[2], LC_GRID_SUMS, 100, false) == 64);
    lc_budget_leave(&peers[1].share);
    lc_budget_leave(&peers[2].share);
}

/* Both kinds may run at a time, whichever was called first. */
static void either_kind_of_call_keeps_room_for_the_other(void)
{
    static struct lc_peers peers[2];

    join_wide(&peers[0], 12, 64, 4, 2);
    join_wide(&peers[1], 12, 64, 4, 2);
    CHECK(lc_peers_take_room(&peers[0]));
    CHECK(lc_peers_take(&peers[0], LC_GRID_EXCHANGES, 60, false) == 60);
    CHECK(!lc_peers_take_room(&peers[1])); /* 8 */
    CHECK(lc_peers_take(&peers[0], LC_GRID_SUMS, 64, false) == 64);
    CHECK(peers[0].share.kept[LC_GRID_SUMS] == 64 && peers[0].share.kept[LC_GRID_EXCHANGES] == 64);
    lc_budget_leave(&peers[0].share);
}

/* Between asking and taking another communicator has come. */
static void what_another_has_got_in_between_is_not_taken(void)
{
    static struct lc_peers peers[2];
    uint32_t ctas;

    for (int n = 0; n < 2; n++)
        join_wide(&peers[n], 13, 128, 4, 1);
    CHECK(lc_peers_take_room(&peers[0]));
    ctas = lc_peers_ctas(&peers[0], 8);
    CHECK(ctas == 128 && lc_peers_take_room(&peers[1]));
    CHECK(lc_peers_take(&peers[0], LC_GRID_SUMS, ctas, false) == 64);
    CHECK(lc_peers_take(&peers[1], LC_GRID_SUMS, ctas, false) == 64);
    lc_budget_leave(&peers[0].share);
    lc_budget_leave(&peers[1].share);
}

static uint32_t draw(uint64_t *state, uint32_t below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % below;
}

#define OWNERS 6
#define ROUNDS 2000

/* CTAs of one GPU that communicators have under way, of all its ranks and of both kinds. */
static _Atomic uint32_t under_way;
static struct lc_peers new_one;

/* A communicator's life, again and again: two ranks on the GPU. What is launched stays under way, at its largest, to the
 * end, as a grid may that waits for a stream. */
static void *live(void *arg)
{
    uint64_t state = (uint64_t)(uintptr_t)arg;
    struct lc_peers peers;

    for (int i = 0; i < ROUNDS; i++) {
        uint32_t largest[LC_GRIDS] = { 0 };

        peers = new_one;
        if (!lc_peers_take_room(&peers))
            continue;
        for (uint32_t calls = draw(&state, 6); calls > 0; calls--) {
            enum lc_grid grid = (enum lc_grid)draw(&state, LC_GRIDS);
            uint32_t ctas = grid == LC_GRID_SUMS ? lc_peers_ctas(&peers, 8)
                                                 : lc_peers_exchange_ctas(&peers);

            ctas = lc_peers_take(&peers, grid, 1 + draw(&state, ctas), draw(&state, 4) == 0);
            if (ctas <= largest[grid])
                continue;
            CHECK(atomic_fetch_add(&under_way, 2 * (ctas - largest[grid])) +
                      2 * (ctas - largest[grid]) <=
                  132 - 2 * 4);
            largest[grid] = ctas;
        }
        atomic_fetch_sub(&under_way, 2 * (largest[0] + largest[1]));
        lc_budget_leave(&peers.share);
    }
    return NULL;
}

static void all_that_is_under_way_finds_room(void)
{
    pthread_t threads[OWNERS];

    join_wide(&new_one, 14, 128, 4, 2);
    new_one.offers[1].gpu[0] = '\0';
    for (uintptr_t i = 0; i < OWNERS; i++)
        CHECK(pthread_create(&threads[i], NULL, live, (void *)(i + 1)) == 0);
    for (int i = 0; i < OWNERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(atomic_load(&under_way) == 0);
}

static void a_failure_between_two_looks_is_not_missed(void)
{
    struct lc_peers peers = waiting((const int[]){ -1, 0, 0, 0 });

    CHECK(lc_peers_step(&peers) && !lc_peers_rings(&peers, 0) && own_word == 0);
}

static void a_failure_before_is_not_missed(void)
{
    struct lc_peers peers = waiting((const int[]){ 0, 0 });

    CHECK(lc_peers_step(&peers) && !lc_peers_rings(&peers, 0) && own_word == 0);
}

static atomic_bool stop;

static void *come_and_go(void *arg)
{
    static struct lc_share share;

    (void)arg;
    while (!atomic_load(&stop)) {
        lc_budget_join(&share, 9);
        lc_budget_keep(&share, LC_GRID_SUMS, 3);
        lc_budget_leave(&share);
    }
    return NULL;
}

/* A fork may catch another thread under the lock. */
static void child_of_a_fork_can_share_a_device(void)
{
    static struct lc_share own, late;
    pthread_t thread;

    lc_budget_join(&own, 9);
    CHECK(pthread_create(&thread, NULL, come_and_go, NULL) == 0);
    for (int i = 0; i < FORKS; i++) {
        int status;
        pid_t pid = fork();

        CHECK(pid >= 0);
        if (pid == 0) {
            (void)alarm(20);
            lc_budget_join(&late, 9);
            lc_budget_leave(&own);
            _exit(lc_budget_part(&late, 12) < 6); /* of at most two */
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    atomic_store(&stop, true);
    CHECK(pthread_join(thread, NULL) == 0);
    lc_budget_leave(&own);
}

int main(void)
{
    goes_on_when_all_is_well();
    kernels_of_all_communicators_find_room();
    exchanges_between_devices_get_the_rest_of_the_room();
    graphs_of_one_communicator_leave_room_for_others();
    graphs_and_other_grids_of_a_communicator_share_its_part();
    the_job_says_how_much_a_call_may_take();
    the_shape_has_a_channel_for_each_cta();
    the_job_says_how_much_a_call_of_ours_may_take();
    what_a_call_has_had_is_kept();
    either_kind_of_call_keeps_room_for_the_other();
    what_another_has_got_in_between_is_not_taken();
    all_that_is_under_way_finds_room();
    child_of_a_fork_can_share_a_device();
    a_failure_between_two_looks_is_not_missed();
    a_failure_before_is_not_missed();
    what_failed_half_way_is_waited_for();
    nothing_is_freed_while_the_device_is_at_it();
    an_aborted_communicator_leaves_its_part();
    return 0;
}
