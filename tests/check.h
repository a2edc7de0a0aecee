/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_TESTS_CHECK_H
#define LC_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define LC_SKIP 77 /* meson's exit code for a skipped test */

#define CHECK(cond)                                                           \
    do {                                                                      \
        if (!(cond)) {                                                        \
            fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #cond); \
            abort();                                                          \
        }                                                                     \
    } while (0)

#endif
