/* SPDX-License-Identifier: Apache-2.0 */
#include "plugin/net/settings.h"

#include <pthread.h>

static struct lc_config config; /* written once by `load` */

static void load(void)
{
    (void)lc_config_load(&config);
}

const struct lc_config *lc_net_settings(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, load);
    return &config;
}
