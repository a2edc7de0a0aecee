/* SPDX-License-Identifier: Apache-2.0
 *
 * Cases by name: one that fails says which it is, and the next one is run. A CHECK of tests/check.h ends the innermost case.
 */
#ifndef LC_TESTS_KERNELS_COMPUTE_CASES_H
#define LC_TESTS_KERNELS_COMPUTE_CASES_H

#include <stdbool.h>

/* body(arg) as a case; whether it came to its end. What it holds is lost when it does not. Of one thread. */
bool run_case(void (*body)(void *arg), void *arg, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Cases that did not come to their end, but those that lie around one that did not. */
int cases_failed(void);

#endif
