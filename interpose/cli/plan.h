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

#endif
