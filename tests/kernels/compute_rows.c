/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kernels/compute_rows.h"
#include "tests/check.h"

#include <math.h>

struct rows rows_new(const struct compute_target *t, uint64_t rows, uint64_t columns,
                     uint64_t stride, size_t shift)
{
    struct rows out = { .rows = rows, .columns = columns, .stride = stride };
    uint64_t elements = rows ? (rows - 1) * stride + columns : 0;

    out.memory = memory_new(t, elements * 2, shift * 2);
    return out;
}

uint16_t *rows_at(const struct rows *rows, uint64_t row)
{
    return (uint16_t *)rows->memory.near + row * rows->stride;
}

double rows_get(const struct rows *rows, uint64_t row, uint64_t column)
{
    return from_bf16(rows_at(rows, row)[column]);
}

void rows_fill(struct rows *rows, enum filling filling, uint64_t *state)
{
    double value = 1.2345;

    for (uint64_t r = 0; r < rows->rows; r++) {
        for (uint64_t c = 0; c < rows->columns; c++) {
            if (filling != FILL_EQUAL)
                value = 2 * random_unit(state);
            if (filling == FILL_LARGE && random_unit(state) > 0.9)
                value *= 60;
            if (filling == FILL_SHIFTED)
                value += 100;
            rows_at(rows, r)[c] = to_bf16(value);
        }
    }
    memory_up(&rows->memory);
}

bool near_float(double got, double want, double bound)
{
    if (isnan(want) || isinf(want))
        return isnan(want) ? isnan(got) : got == want;
    return fabs(got - want) <= bound;
}

bool near_bf16(double got, double want, double bound)
{
    return near_float(got, want, bound + 0x1p-8 * (fabs(want) + bound) + 0x1p-134);
}
