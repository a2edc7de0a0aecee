/* SPDX-License-Identifier: Apache-2.0
 *
 * The doctor's checks. Each adds findings and returns; none ends the doctor. */
#ifndef LC_CLI_DOCTOR_H
#define LC_CLI_DOCTOR_H

#include "interpose/cli/findings.h"
#include "interpose/cli/settings.h"

#include <stdint.h>

struct lc_cli_doctor {
    struct lc_cli_findings findings;
    struct lc_cli_settings settings;
    const char *python; /* as asked for, or NULL: the first of python3, python */
    const char
        *input; /* another machine: a topology file or a folder; then nothing but it is looked at */
    char *const *command; /* behind --, or NULL */
    int64_t python_ms;    /* deadline of each Python */
    int64_t command_ms;
    char *preload; /* value of LD_PRELOAD that `run` would set; NULL if it could not */
};

/* libloongcomm.so: found, accepted by the loader, its version. Sets `preload`. */
void lc_cli_check_library(struct lc_cli_doctor *doctor);

/* Driver and GPUs. */
void lc_cli_check_gpu(struct lc_cli_doctor *doctor);

/* GPUs, NICs, links, and NCCL's settings beside them. */
void lc_cli_check_machine(struct lc_cli_doctor *doctor);

/* LOONGCOMM_*, LD_PRELOAD, NCCL's plugin and file variables. */
void lc_cli_check_environment(struct lc_cli_doctor *doctor);

/* What the Python would load, and whether a call of its torch reaches us. */
void lc_cli_check_python(struct lc_cli_doctor *doctor);

/* The same for the command. */
void lc_cli_check_command(struct lc_cli_doctor *doctor);

/* dlopens `name` in a child and writes the path it was loaded from to `path`, "" for failure; `why` then
 * holds the loader's message. If it has ncclGetVersion, *nccl_code is that. */
struct lc_cli_loaded {
    char path[1024];
    char why[1024];
    int nccl_code; /* 0: none */
};
void lc_cli_try_load(const char *name, struct lc_cli_loaded *out);

#endif
