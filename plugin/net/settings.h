/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_PLUGIN_NET_SETTINGS_H
#define LC_PLUGIN_NET_SETTINGS_H

#include "common/config.h"

/* The one copy that the adapters and all transports use. The first call loads it, and it is then that is said what is
 * wrong with it. */
const struct lc_config *lc_net_settings(void);

#endif
