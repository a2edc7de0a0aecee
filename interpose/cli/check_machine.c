/* SPDX-License-Identifier: Apache-2.0
 *
 * What is wrong with the machine itself: libloongtopo.so knows. */
#include "interpose/cli/doctor.h"
#include "interpose/cli/topo_library.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define CPUS 8192

static void take(void *arg, enum lc_topo_severity severity, const char *id, const char *evidence,
                 const char *remedy)
{
    static const enum lc_cli_severity severities[] = {
        [LC_TOPO_FINE] = LC_CLI_OK,
        [LC_TOPO_INFO] = LC_CLI_INFO,
        [LC_TOPO_WARNING] = LC_CLI_WARNING,
        [LC_TOPO_ERROR] = LC_CLI_ERROR,
    };
    struct lc_cli_findings *findings = arg;

    lc_cli_find(findings, severities[severity], id, "%s", evidence);
    lc_cli_remedy(findings, "%s", remedy);
}

/* The processors that we may use, in words of 32 bits, the highest first; "" if the kernel does not tell. */
static void own_affinity(char *out, size_t size)
{
    static unsigned long long words[CPUS / 64];
    size_t used = 0;
    bool any = false;

    *out = '\0';
    if (sched_getaffinity(0, sizeof(words), (cpu_set_t *)words) != 0)
        return;
    for (int i = CPUS / 32 - 1; i >= 0; i--) {
        unsigned word = (unsigned)(words[i / 2] >> (32 * (i % 2)));

        any |= word != 0;
        if (any && used + 10 < size)
            used += (size_t)snprintf(out + used, size - used, "%08x%s", word, i ? "," : "");
    }
}

void lc_cli_check_machine(struct lc_cli_doctor *doctor)
{
    char affinity[CPUS / 32 * 9 + 1];
    struct lc_topo_checks checks = { .root = doctor->input ? NULL : "/", .get = lc_cli_nccl_get };
    struct lc_cli_topo_library library;
    struct lc_topo *topo = NULL;
    char text[1024];
    struct stat st;

    if (lc_cli_topo_open(&library, text, sizeof(text)) != 0) {
        lc_cli_find(&doctor->findings, doctor->input ? LC_CLI_ERROR : LC_CLI_INFO,
                    "machine-unknown", "GPUs, NICs and their links are not looked at: %s", text);
        return;
    }
    if (library.load(doctor->input, &topo, text, sizeof(text)) != 0) {
        lc_cli_find(&doctor->findings, doctor->input ? LC_CLI_ERROR : LC_CLI_INFO,
                    "machine-unknown", "%s", text);
        return;
    }
    if (doctor->input && stat(doctor->input, &st) == 0 && S_ISDIR(st.st_mode))
        checks.root = doctor->input;
    own_affinity(affinity, sizeof(affinity));
    if (!doctor->input && *affinity)
        checks.affinity = affinity;
    if (library.examine(topo, &checks, take, &doctor->findings) != 0)
        lc_cli_find(&doctor->findings, LC_CLI_INFO, "machine-unknown", "out of memory");
    library.free(topo);
}
