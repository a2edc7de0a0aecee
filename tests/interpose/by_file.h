/* SPDX-License-Identifier: Apache-2.0
 *
 * How ranks that were started one by one get NCCL's id: through a file. */
#ifndef LC_TESTS_BY_FILE_H
#define LC_TESTS_BY_FILE_H

#include "tests/check.h"

#include <nccl.h>
#include <stdio.h>
#include <unistd.h>

/* Made by rank 0, in a folder that all know. */
static inline ncclUniqueId id_by_file(const char *folder, int rank)
{
    ncclUniqueId id;
    char name[512];
    char made[520];
    FILE *file = NULL;

    snprintf(name, sizeof(name), "%s/id", folder);
    snprintf(made, sizeof(made), "%s.new", name);
    if (rank == 0) {
        CHECK(ncclGetUniqueId(&id) == ncclSuccess);
        file = fopen(made, "w");
        CHECK(file && fwrite(&id, sizeof(id), 1, file) == 1 && fclose(file) == 0);
        CHECK(rename(made, name) == 0);
        return id;
    }
    while (!(file = fopen(name, "r")))
        usleep(1000);
    CHECK(fread(&id, sizeof(id), 1, file) == 1);
    fclose(file);
    return id;
}

#endif
