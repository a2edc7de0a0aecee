/* SPDX-License-Identifier: Apache-2.0
 *
 * What the preloaded library of all ranks has logged, for tests to look for. */
#ifndef LC_TESTS_SAID_H
#define LC_TESTS_SAID_H

#include "tests/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int said_file;

/* Before ranks are made and before any of NCCL's functions is called. */
static inline void said_begin(void)
{
    char path[64];

    said_file = memfd_create("said", 0);
    CHECK(said_file >= 0);
    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)getpid(), said_file);
    CHECK(setenv("LOONGCOMM_LOG_FILE", path, 1) == 0 &&
          setenv("LOONGCOMM_LOG_LEVEL", "info", 1) == 0);
}

/* So many lines hold `what`. */
static inline int said_count(const char *what)
{
    char *text = calloc(1, 1 << 20);
    int count = 0;

    CHECK(text && pread(said_file, text, (1 << 20) - 1, 0) >= 0);
    for (const char *at = text; (at = strstr(at, what)); at++)
        count++;
    free(text);
    return count;
}

#endif
