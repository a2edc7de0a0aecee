/* SPDX-License-Identifier: Apache-2.0
 *
 * Cases that random programs do not reach, or would not name. */
#include "tests/gpu/reduce.h"

void rd_cases(struct rd_rank *me, const char *only)
{
}
