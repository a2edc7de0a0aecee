/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's own files of NAME=value lines: what a user has set there is set. */
#include "common/cleanup.h"
#include "common/input.h"
#include "interpose/cli/cli.h"
#include "interpose/cli/topo_library.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES ((size_t)1 << 20)
#define MAX_KEPT  256

static struct {
    char *name, *value;
} kept[MAX_KEPT]; /* by one thread; the first of a name counts */
static int kept_count;

static void keep(char *line)
{
    char *equals = strchr(line, '=');

    line[strcspn(line, "\r")] = '\0';
    if (*line == '#' || !equals || kept_count == MAX_KEPT)
        return;
    *equals = '\0';
    kept[kept_count].name = strdup(line);
    kept[kept_count].value = strdup(equals + 1);
    kept_count += kept[kept_count].name && kept[kept_count].value;
}

static void read_file(const char *path)
{
    lc_autofree char *text = NULL;
    size_t size;
    int err = lc_input_read(AT_FDCWD, path, 0, MAX_BYTES, &text, &size);
    char *rest = text;
    char *line;

    if (err && err != -ENOENT && err != -ENOTDIR)
        lc_cli_say("settings for NCCL in %s are left out: %s", path, lc_input_why(err));
    while ((line = strsep(&rest, "\n")))
        keep(line);
}

static void read_files(void)
{
    static bool done;
    const char *given = getenv("NCCL_CONF_FILE");
    const char *home = getenv("HOME");
    char path[PATH_MAX];

    if (done)
        return;
    done = true;
    if (given && *given) {
        read_file(given);
    } else if (home && *home) {
        (void)snprintf(path, sizeof(path), "%s/.nccl.conf", home);
        read_file(path);
    }
    read_file("/etc/nccl.conf");
}

char *lc_cli_nccl_get(const char *name)
{
    char *value = getenv(name);

    if (value)
        return value;
    read_files();
    for (int i = 0; i < kept_count; i++) {
        if (strcmp(kept[i].name, name) == 0)
            return kept[i].value;
    }
    return NULL;
}
