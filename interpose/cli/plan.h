/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_CLI_PLAN_H
#define LC_CLI_PLAN_H

#include "common/config.h"

/* `input`: a file or folder that describes the machine; NULL: NCCL_TOPO_FILE if that is whole, else the machine itself.
 *
 * Sets the variables of NCCL that follow from LOONGCOMM_PXN and a plan of this machine, each with a line that says why;
 * what the user has set stays. Nothing is an error: without GPUs, without the library, or where nothing is gained,
 * nothing is set and nothing said. */
void lc_cli_apply_plan(const struct lc_config *config, const char *input);

/* Sets how many channels NCCL makes at least, in all and for a pair of ranks, where loongcomm's network plugin is to be
 * used, as LOONGCOMM_NET_CHANNELS says; each with a line that says why; what the user has set stays. From nothing but what
 * all ranks of a job share: ranks with different channels hang. `command` is what is run, with its arguments. */
void lc_cli_apply_channels(const struct lc_config *config, char *const *command);

/* One variable of NCCL, and the line; if the user has set it, only the line. */
void lc_cli_put(const char *name, const char *value, const char *why);

#endif
