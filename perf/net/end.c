/* SPDX-License-Identifier: Apache-2.0
 *
 * One end: waits for orders on its socket and does one at a time. It may use a processor only while it runs. */
#include "perf/net/net.h"

#include <errno.h>
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

#define BLOCK      ((size_t)4096)
#define MOST_BYTES ((size_t)256 << 20) /* of the buffers of one direction */
#define POISON     0xa5

const struct lc_bnet_way *const lc_bnet_ways[LC_BNET_SIDES] = {
    [LC_BNET_SOCKET] = &lc_bnet_way_socket,
    [LC_BNET_OURS] = &lc_bnet_way_plugin,
    [LC_BNET_PEER] = &lc_bnet_way_peer,
};
const char *const lc_bnet_op_names[LC_BNET_OPS] = {
    [LC_BNET_STREAM] = "net-stream",
    [LC_BNET_EXCHANGE] = "net-exchange",
    [LC_BNET_PINGPONG] = "net-pingpong",
};

/* One direction of one flow. */
struct stream {
    void *comm;
    void *mr;
    bool sends;
    unsigned char *data; /* `depth` messages, one behind the other */
    void *requests[LC_BNET_DEPTH];
    uint64_t posted, done;
};

struct end {
    int fd;
    int index;
    const struct lc_bnet_way *way;
    const struct lc_bnet_options *options;
    struct lc_bnet_answer *answer; /* being made; its text takes the first error */
    struct lc_bnet_case kase;
    unsigned depth;
    size_t mapped; /* bytes of each stream's data */
    void *listeners[LC_BNET_FLOWS];
    struct stream streams[2 * LC_BNET_FLOWS]; /* flow f: sends at 2f, receives at 2f + 1 */
    struct lc_deadline patience;
};

__attribute__((format(printf, 2, 3))) static int fail(struct end *end, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    if (!end->answer->text[0])
        (void)vsnprintf(end->answer->text, sizeof(end->answer->text), fmt, ap);
    va_end(ap);
    return -EIO;
}

/* ---- data ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void lc_bnet_fill(const struct lc_bnet_case *kase, int end, int flow, int slot, void *out)
{
    uint64_t seed = mix(kase->seed ^ (uint64_t)end << 48 ^ (uint64_t)flow << 32 ^ (uint64_t)slot);
    unsigned char *bytes = out;

    for (size_t at = 0; at < kase->bytes; at += BLOCK) {
        size_t n = kase->bytes - at < BLOCK ? kase->bytes - at : BLOCK;
        uint64_t state = mix(seed + at + 1);

        if ((double)(state >> 11) * 0x1p-53 >= kase->live) {
            memset(bytes + at, 0, n);
            continue;
        }
        for (size_t i = 0; i < n; i++) {
            if (i % 8 == 0)
                state = mix(state + 0x9e3779b97f4a7c15u);
            bytes[at + i] = (unsigned char)(state >> i % 8 * 8);
        }
    }
}

static void drop_case(struct end *end)
{
    for (int i = 0; i < 2 * end->options->flows; i++) {
        struct stream *s = &end->streams[i];

        if (!s->data)
            continue;
        end->way->dereg(s->comm, s->mr);
        munmap(s->data, end->mapped);
        s->data = NULL;
    }
}

/* As many slots as `depth`, fewer of large messages; the same at both ends. */
static int take_case(struct end *end, const struct lc_bnet_case *kase)
{
    size_t room = MOST_BYTES / (size_t)end->options->flows / kase->bytes;

    drop_case(end);
    end->kase = *kase;
    end->depth = kase->op == LC_BNET_PINGPONG         ? 1
                 : room < (size_t)end->options->depth ? (unsigned)room
                                                      : (unsigned)end->options->depth;
    if (end->depth == 0)
        end->depth = 1;
    end->mapped = end->depth * kase->bytes;
    for (int i = 0; i < 2 * end->options->flows; i++) {
        struct stream *s = &end->streams[i];
        void *data = mmap(NULL, end->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);

        if (data == MAP_FAILED)
            return fail(end, "no memory for %zu bytes", end->mapped);
        s->data = data;
        if (end->way->reg(s->comm, data, end->mapped, &s->mr))
            return fail(end, "memory cannot be registered");
        memset(data, POISON, end->mapped);
        for (unsigned slot = 0; s->sends && slot < end->depth; slot++)
            lc_bnet_fill(kase, end->index, i / 2, (int)slot, s->data + slot * kase->bytes);
    }
    return 0;
}

static int check_stream(struct end *end, const struct stream *s, int flow)
{
    unsigned char *expected = malloc(end->kase.bytes + 1);
    int err = expected ? 0 : fail(end, "out of memory");

    for (unsigned slot = 0; !err && expected && slot < end->depth && slot < s->done; slot++) {
        lc_bnet_fill(&end->kase, 1 - end->index, flow, (int)slot, expected);
        if (memcmp(expected, s->data + slot * end->kase.bytes, end->kase.bytes) != 0)
            err = fail(end, "wrong bytes in a message of %zu", end->kase.bytes);
    }
    free(expected);
    return err;
}

/* ---- moving ---- */

static int post(struct end *end, struct stream *s, bool *moved)
{
    unsigned slot = (unsigned)(s->posted % end->depth);
    void *data = s->data + slot * end->kase.bytes;
    int err = s->sends ? end->way->isend(s->comm, data, end->kase.bytes, s->mr, &s->requests[slot])
                       : end->way->irecv(s->comm, data, end->kase.bytes, s->mr, &s->requests[slot]);

    if (err)
        return fail(end, "%s fails", s->sends ? "sending" : "receiving");
    if (s->requests[slot]) {
        s->posted++;
        *moved = true;
    }
    return 0;
}

static int test_oldest(struct end *end, struct stream *s, bool *moved)
{
    bool done = false;
    size_t size = 0;

    if (end->way->test(s->requests[s->done % end->depth], &done, &size))
        return fail(end, "%s fails", s->sends ? "sending" : "receiving");
    if (!done)
        return 0;
    if (size != end->kase.bytes)
        return fail(end, "%zu bytes came instead of %zu", size, end->kase.bytes);
    s->done++;
    *moved = true;
    return 0;
}

/* NCCL's step for one connection. */
static int step(struct end *end, struct stream *s, uint64_t messages, bool *moved)
{
    int err = 0;

    if (s->posted < messages && s->posted - s->done < end->depth)
        err = post(end, s, moved);
    if (!err && s->done < s->posted)
        err = test_oldest(end, s, moved);
    return err;
}

/* Yields when nothing moved; the clock is looked at now and then. */
static int rest(struct end *end, bool moved)
{
    if (moved)
        return 0;
    sched_yield();
    return lc_deadline_passed(end->patience) ? fail(end, "nothing moves any more") : 0;
}

static int run_streams(struct end *end, uint64_t messages)
{
    bool both = end->kase.op == LC_BNET_EXCHANGE;
    int left;
    int err = 0;

    do {
        bool moved = false;

        left = 0;
        for (int i = 0; i < 2 * end->options->flows && !err; i++) {
            struct stream *s = &end->streams[i];

            if (s->done == messages || (!both && s->sends != (end->index == 0)))
                continue;
            err = step(end, s, messages, &moved);
            left += s->done < messages;
        }
        if (!err && left)
            err = rest(end, moved);
    } while (left && !err);
    return err;
}

/* Receives are posted ahead; what was sent is asked about beside, as NCCL does. `most` may have been sent. */
static int wait_for(struct end *end, const struct stream *waited, uint64_t count, uint64_t most,
                    uint64_t messages)
{
    struct stream *out = &end->streams[0];
    struct stream *in = &end->streams[1];
    int err = 0;

    do {
        bool moved = false;

        err = step(end, out, most, &moved);
        if (!err)
            err = step(end, in, messages, &moved);
        if (!err)
            err = rest(end, moved);
    } while (!err && waited->done < count);
    return err;
}

static int run_pingpong(struct end *end, uint64_t messages)
{
    struct stream *out = &end->streams[0];
    struct stream *in = &end->streams[1];
    int err = 0;

    for (uint64_t i = 1; i <= messages && !err; i++)
        err = wait_for(end, in, i, end->index == 0 ? i : i - 1, messages);
    return err ? err : wait_for(end, out, messages, messages, messages);
}

static int64_t cpu_ns(void)
{
    struct rusage u;

    getrusage(RUSAGE_SELF, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * INT64_C(1000000000) +
           (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * INT64_C(1000);
}

static int run(struct end *end, uint64_t messages, bool verify)
{
    int64_t cpu;
    int err;

    for (int i = 0; i < 2 * end->options->flows; i++) {
        struct stream *s = &end->streams[i];

        s->posted = s->done = 0;
        if (verify && !s->sends && s->data)
            memset(s->data, POISON, end->mapped);
    }
    end->patience = lc_deadline_in_ms((int64_t)end->options->timeout_s * 1000);
    cpu = cpu_ns();
    end->answer->begin_ns = lc_now_ns();
    err = end->kase.op == LC_BNET_PINGPONG ? run_pingpong(end, messages)
                                           : run_streams(end, messages);
    end->answer->end_ns = lc_now_ns();
    end->answer->cpu_ns = cpu_ns() - cpu;
    for (int i = 0; i < 2 * end->options->flows && verify && !err; i++) {
        if (!end->streams[i].sends)
            err = check_stream(end, &end->streams[i], i / 2);
    }
    return err;
}

/* ---- connecting ---- */

static int listen_all(struct end *end)
{
    int err = 0;

    if (end->options->link.veth && lc_bnet_veth_wait(end->options->timeout_s))
        return fail(end, "the devices do not come up");
    err = end->way->init(end->way == &lc_bnet_way_peer ? end->options->peer
                                                       : end->options->library);
    for (int f = 0; f < end->options->flows && !err; f++)
        err = end->way->listen(&end->answer->handles[f], &end->listeners[f]);
    return err ? fail(end, "cannot listen") : 0;
}

static int connect_all(struct end *end, struct lc_bnet_handle *handles)
{
    int left;
    int err = 0;

    end->patience = lc_deadline_in_ms((int64_t)end->options->timeout_s * 1000);
    do {
        left = 0;
        for (int f = 0; f < end->options->flows && !err; f++) {
            struct stream *out = &end->streams[2 * (size_t)f];
            struct stream *in = &end->streams[2 * (size_t)f + 1];

            out->sends = true;
            if (!out->comm)
                err = end->way->connect(&handles[f], &out->comm);
            if (!err && !in->comm)
                err = end->way->accept(end->listeners[f], &in->comm);
            left += !out->comm || !in->comm;
        }
        if (err)
            return fail(end, "cannot connect");
        err = left ? rest(end, false) : 0;
    } while (left && !err);
    return err;
}

static void close_all(struct end *end)
{
    drop_case(end);
    for (int f = 0; f < end->options->flows; f++) {
        end->way->close_send(end->streams[2 * (size_t)f].comm);
        end->way->close_recv(end->streams[2 * (size_t)f + 1].comm);
        end->way->close_listen(end->listeners[f]);
    }
    end->way->fini();
}

static int obey(struct end *end, struct lc_bnet_order *order)
{
    switch (order->kind) {
    case LC_BNET_ASK_UP:
        return lc_bnet_veth_up(&end->options->link, end->index) ? fail(end, "no devices") : 0;
    case LC_BNET_ASK_LISTEN: return listen_all(end);
    case LC_BNET_ASK_CONNECT: return connect_all(end, order->handles);
    case LC_BNET_ASK_CASE: return take_case(end, &order->kase);
    case LC_BNET_ASK_RUN: return run(end, order->messages, order->verify);
    default: close_all(end); return 0;
    }
}

void lc_bnet_end_main(int fd, enum lc_bnet_side side, int index,
                      const struct lc_bnet_options *options)
{
    static struct lc_bnet_answer answer;
    static struct end end;
    struct lc_bnet_order order;
    bool quit = false;

    end = (struct end){ .fd = fd,
                        .index = index,
                        .way = lc_bnet_ways[side],
                        .options = options,
                        .answer = &answer };
    setenv("NCCL_SOCKET_IFNAME", options->link.veth ? "lcbench" : "lo", options->link.veth);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || (options->link.veth && lc_bnet_veth_enter() != 0))
        _exit(1);
    /* The first answer is to no order: it says that the end is there, in its own namespace where it has one. */
    if (send(fd, &answer, sizeof(answer), MSG_NOSIGNAL) != (ssize_t)sizeof(answer))
        _exit(1);
    while (!quit && recv(fd, &order, sizeof(order), 0) == (ssize_t)sizeof(order)) {
        memset(&answer, 0, sizeof(answer));
        answer.error = obey(&end, &order);
        quit = order.kind == LC_BNET_ASK_QUIT;
        if (send(fd, &answer, sizeof(answer), MSG_NOSIGNAL) != (ssize_t)sizeof(answer))
            break;
    }
    _exit(quit ? 0 : 1);
}
