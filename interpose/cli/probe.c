/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/cli/probe.h"

#include "common/cleanup.h"
#include "interpose/cli/probe_py.h"

#include <stdio.h>
#include <string.h>

static void split(struct lc_cli_probe *probe)
{
    char *save = NULL;

    for (char *line = strtok_r(probe->outcome.result, "\n", &save);
         line && probe->count < LC_CLI_PROBE_LINES; line = strtok_r(NULL, "\n", &save)) {
        char *tab = strchr(line, '\t');

        if (!tab)
            continue;
        *tab = '\0';
        probe->line[probe->count].key = line;
        probe->line[probe->count++].value = tab + 1;
    }
}

void lc_cli_probe_run(const char *python, const char *preload, int64_t timeout_ms,
                      struct lc_cli_probe *out)
{
    static char option[] = "-c";
    static char script[sizeof(probe_py)];
    lc_autofree char *interpreter = strdup(python);
    lc_autofree char *variable = NULL;
    char *argv[] = { interpreter, option, script, NULL };
    /* A job's own settings do not change what is asked here, and no report is wanted. */
    const char *env[] = { "LOONGCOMM_ENABLE=yes", "LOONGCOMM_REPORT=off", NULL, NULL };

    memset(out, 0, sizeof(*out));
    memcpy(script, probe_py, sizeof(script));
    if (!interpreter || (preload && asprintf(&variable, "LD_PRELOAD=%s", preload) < 0)) {
        out->outcome.end = LC_CLI_NOT_STARTED;
        return;
    }
    env[2] = variable;
    out->child = (struct lc_cli_child){ .argv = argv, .env = env, .timeout_ms = timeout_ms };
    lc_cli_child_run(&out->child, &out->outcome);
    out->child.argv = NULL; /* ends with this function */
    out->child.env = NULL;
    split(out);
}

const char *lc_cli_probe_get(const struct lc_cli_probe *probe, const char *key)
{
    for (size_t i = 0; i < probe->count; i++) {
        if (strcmp(probe->line[i].key, key) == 0)
            return probe->line[i].value;
    }
    return NULL;
}

bool lc_cli_probe_done(const struct lc_cli_probe *probe)
{
    return probe->outcome.end == LC_CLI_EXITED && lc_cli_probe_get(probe, "end");
}
