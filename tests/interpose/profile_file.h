/* SPDX-License-Identifier: Apache-2.0
 *
 * Profiles for tests on the rig. */
#ifndef LC_TESTS_PROFILE_FILE_H
#define LC_TESTS_PROFILE_FILE_H

#include "tests/check.h"

#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

/* A new file for `gpu` ("none" is what the rig has) and the rig's NCCL, with these lines. NCCL is not asked: that would load
 * the settings of all ranks. */
static inline void profile_write(char path[64], const char *gpu, const char *rules)
{
    int version = NCCL_VERSION_CODE;
    FILE *file;
    int fd;

    (void)snprintf(path, 64, "/tmp/lc-profile-XXXXXX");
    fd = mkstemp(path);
    CHECK(fd >= 0 && (file = fdopen(fd, "w")));
    fprintf(file, "loongcomm.profile/1\ngpu %s\nnccl %d.%d.%d\n%s", gpu, version / 10000,
            version / 100 % 100, version % 100, rules);
    CHECK(fclose(file) == 0);
}

#endif
