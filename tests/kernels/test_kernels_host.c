/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/loongkernels_host.h"
#include "kernels/value_internal.h"
#include "tests/check.h"
#include "tests/kernels/host.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/target.h"

#include <dlfcn.h>
#include <string.h>

static void philox_gives_the_published_numbers(void)
{
    static const uint32_t pi_counter[] = { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 };
    static const uint32_t pi_key[] = { 0xa4093822, 0x299f31d0 };
    static const uint32_t zero[4], ones[] = { ~0U, ~0U, ~0U, ~0U };
    uint32_t out[4], ours[4];

    ref_philox(zero, zero, out);
    CHECK(out[0] == 0x6627e8d5 && out[1] == 0xe169c58d && out[2] == 0xbc57ac4c &&
          out[3] == 0x9b00dbd8);
    philox(0, 0, ours);
    CHECK(memcmp(ours, out, sizeof(out)) == 0);
    ref_philox(ones, ones, out);
    CHECK(out[0] == 0x408f276d && out[1] == 0x41c83b0e && out[2] == 0xa20bc7c6 &&
          out[3] == 0x6d5451fd);
    ref_philox(pi_counter, pi_key, out);
    CHECK(out[0] == 0xd16cfe09 && out[1] == 0x94fdcceb && out[2] == 0x5001e420 &&
          out[3] == 0x24126ea1);
}

/* A stream that keeps its work until the test runs it. */
static struct {
    void *stream;
    void (*run)(void *arg);
    void (*release)(void *arg);
    void *arg;
    int waiting;
    int fail;
} queue;
static size_t bytes_read, bytes_written;

static int keep(void *stream, const char *name, void (*run)(void *arg), void (*release)(void *arg),
                void *arg)
{
    CHECK(name[0] && !queue.waiting);
    if (queue.fail) {
        release(arg);
        return queue.fail;
    }
    queue.stream = stream;
    queue.run = run;
    queue.release = release;
    queue.arg = arg;
    queue.waiting = 1;
    return 0;
}

static void count_use(const void *ptr, size_t bytes, bool write)
{
    CHECK(ptr);
    *(write ? &bytes_written : &bytes_read) += bytes;
}

static void work_runs_when_the_stream_says_so(const struct target *t)
{
    void (*set_ops)(const struct lk_host_ops *ops);
    const struct lk_host_ops ops = { keep, count_use };
    float values[3] = { 1, 2, 3 }, factor = 2;
    uint16_t out[3] = { 0 };
    struct lk_tensor tensor = { values, 3, 0 };
    struct lk_scale scale = { 0, LK_FP32, &factor };

    *(void **)&set_ops = dlsym(t->handle, "lk_host_set_ops");
    CHECK(set_ops);
    set_ops(&ops);
    CHECK(t->lib.lk_cast_pack(&tensor, 1, out, &scale, LK_NEAREST, NULL, &queue) == 0);
    CHECK(queue.waiting && queue.stream == &queue && out[0] == 0 && bytes_read == 0);
    memset(&tensor, 0, sizeof(tensor)); /* the list is the caller's again */
    for (int replay = 1; replay <= 2; replay++) {
        factor = (float)replay;
        queue.run(queue.arg);
        CHECK(out[1] == ref_nearest(2, factor) && out[2] == ref_nearest(3, factor));
    }
    CHECK(bytes_read == 32 && bytes_written == 12); /* two runs of (12 + 4) and 6 */
    queue.release(queue.arg);
    queue.waiting = 0;
    CHECK(t->lib.lk_sum_shards(out, 3, 1, 1, values, LK_FP32, NULL, NULL, NULL) == 0);
    CHECK(queue.waiting);
    queue.run(queue.arg);
    queue.release(queue.arg);
    queue.waiting = 0;
    CHECK(values[0] == 2 + 4 + 6);
    queue.fail = -5;
    CHECK(t->lib.lk_sum_shards(out, 3, 1, 1, values, LK_FP32, NULL, NULL, NULL) == -5);
    set_ops(NULL);
}

int main(int argc, char **argv)
{
    struct target target = { .alloc = host_alloc,
                             .release = free,
                             .put = host_copy,
                             .get = host_copy };

    CHECK(argc == 2);
    open_library(&target, argv[1]);
    CHECK(strcmp(target.lib.lk_backend(), "host") == 0 && target.lib.lk_load_all() == 0);
    philox_gives_the_published_numbers();
    check_behaviours(&target);
    work_runs_when_the_stream_says_so(&target);
    return 0;
}
