/* SPDX-License-Identifier: Apache-2.0
 *
 * Any text as reports of a job; a line of its own, "-", parts one report from the next. */
#include "interpose/cli/job.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct lc_job *job = calloc(1, sizeof(*job));
    char *text = strndup((const char *)data, size);
    char *at = text;

    while (job && at) {
        char *next = strstr(at, "\n-\n");

        if (next)
            *next = '\0';
        (void)lc_job_add(job, at);
        at = next ? next + 3 : NULL;
    }
    if (job) {
        (void)lc_job_judge(job);
        lc_job_free(job);
    }
    free(job);
    free(text);
    return 0;
}
