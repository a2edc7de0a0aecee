/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands for NCCL in the test of the trampolines' arguments. */
#include "tests/interpose/args.h"

int ncclCommInitRank(void);
int ncclCommInitRank(void)
{
    return 0;
}

args_fn ncclSetEncryption;
/* NOLINTNEXTLINE(readability-function-size): the number of arguments is the point */
struct args_result ncclSetEncryption(long a, long b, long c, long d, long e, long f, double p,
                                     double q, double r, double s, double t, double u, double v,
                                     double w, long g, double x, struct args_big big)
{
    return (struct args_result){
        .floats = p + 2 * q + 3 * r + 4 * s + 5 * t + 6 * u + 7 * v + 8 * w + 9 * x,
        .sum = a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * big.part[15],
    };
}
