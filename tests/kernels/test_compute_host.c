/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/compute_adamw.h"
#include "kernels/compute_augment.h"
#include "kernels/loongkernels_host.h"
#include "tests/check.h"
#include "tests/kernels/compute_cases.h"
#include "tests/kernels/compute_matrix.h"
#include "tests/kernels/host.h"

#include <string.h>
#include <sys/mman.h>

/* Memory of which only what is touched exists. */
static float *reserve(size_t count)
{
    void *all = mmap(NULL, count * 4, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    CHECK(all != MAP_FAILED);
    return all;
}

/* The last chunk of a tensor of more than 2^32 elements, by what both libraries run. */
static void adamw_reaches_elements_beyond_2_32(void)
{
    const uint64_t count = (UINT64_C(1) << 32) + 16384 + 5;
    struct lk_adamw_entry entry = { .param = reserve(count),
                                    .grad = reserve(count),
                                    .m = reserve(count),
                                    .v = reserve(count),
                                    .count = count,
                                    .first_chunk = 3,
                                    .flags = LK_ADAMW_FAST };
    uint32_t last = 3 + (uint32_t)(count / LK_ADAMW_CHUNK);
    uint32_t *chunk_entry = calloc(last + 1, sizeof(*chunk_entry));
    struct lk_adamw_launch launch = { .entries = &entry, .chunk_entry = chunk_entry };
    struct adamw_factors factors = { .grad = 1, .keep = 1, .step = 1, .rest1 = 1, .eps = 1 };

    CHECK(chunk_entry);
    for (uint32_t back = 0; back < 2; back++) {
        struct adamw_piece piece = adamw_find(&launch, last - back);
        float squares = 0;

        CHECK(piece.end - piece.begin == (back ? LK_ADAMW_CHUNK : 5));
        ((float *)entry.grad)[piece.end - 1] = 3;
        for (uint32_t t = 0; t < LK_BLOCK; t++) {
            squares += adamw_squares_thread(&piece, t).sum;
            adamw_update_thread(&piece, &factors, t);
        }
        CHECK(squares == 9 && entry.param[piece.end - 1] == -3 && entry.m[piece.end - 1] == 3);
    }
    free(chunk_entry);
    munmap(entry.param, count * 4);
    munmap((void *)entry.grad, count * 4);
    munmap(entry.m, count * 4);
    munmap(entry.v, count * 4);
}

/* Known answers of Philox4x32-10, whose whole counter augmentation uses. Inputs: key, counter. */
static void philox_gives_the_published_numbers(void)
{
    const uint32_t all = UINT32_MAX;
    const uint32_t inputs[][6] = {
        {0,           0,          0,          0,          0,          0         },
        { all,        all,        all,        all,        all,        all       },
        { 0xa4093822, 0x299f31d0, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
    };
    static const uint32_t wanted[][4] = {
        {0x6627e8d5,  0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
    };

    for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
        uint32_t out[4];

        philox_words((uint64_t)inputs[i][1] << 32 | inputs[i][0], inputs[i] + 2, out);
        CHECK(memcmp(out, wanted[i], sizeof(out)) == 0);
    }
}

int main(int argc, char **argv)
{
    struct compute_target target = { .alloc = host_alloc,
                                     .release = free,
                                     .put = host_copy,
                                     .get = host_copy };

    CHECK(argc == 2 || (argc == 3 && strcmp(argv[2], "products") == 0));
    compute_open(&target, argv[1]);
    CHECK(strcmp(target.lib.lk_backend(), "host") == 0 && target.lib.lk_compute_load_all() == 0);
    CHECK(check_gemm(&target) == 0);
    CHECK(check_grouped(&target) == 0);
    check_mlp(&target);
    check_norm_linear(&target);
    CHECK(matrix_errors() == 0);
    if (argc == 3)
        return 0;
    check_fold(&target);
    check_adamw(&target);
    check_swiglu(&target);
    check_norm(&target);
    check_moe(&target);
    check_augment(&target);
    check_races(&target);
    adamw_reaches_elements_beyond_2_32();
    philox_gives_the_published_numbers();
    return cases_failed() ? 1 : 0;
}
