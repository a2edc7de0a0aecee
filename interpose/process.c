/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/process.h"

#include "interpose/comm.h"
#include "interpose/control/control.h"
#include "interpose/metrics.h"
#include "interpose/pool.h"
#include "interpose/report.h"
#include "interpose/watch.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct lc_config config;
static pid_t owner; /* the process that loaded the settings; children of fork() inherit the value */
static pid_t self;  /* the process whose memory this is: a child of vfork() is none */

bool lc_enabled;
uint64_t lc_other_calls;
_Thread_local struct lc_thread lc_thread __attribute__((tls_model("initial-exec")));

static void at_exit(void)
{
    if (getpid() != self)
        return;
    if (self == owner && config.report != LC_REPORT_OFF)
        lc_report_write();
    lc_control_fini(); /* in a child too: it may have peers of its own */
}

static void in_child(void)
{
    lc_thread = (struct lc_thread){ 0 }; /* a child has no group open in NCCL that it could end */
    self = getpid();
    lc_comm_after_fork();
    lc_pool_after_fork();
    lc_metrics_after_fork();
}

static void begin(void)
{
    (void)lc_config_load(&config); /* bad values were logged and replaced */
    lc_log_set_level(config.log_level);
    if (*config.log_file) {
        int err = lc_log_open_file(config.log_file);

        if (err)
            lc_warn("cannot append to %s: %s; the log goes to standard error", config.log_file,
                    strerror(-err));
    }
    lc_enabled = config.enable;
    owner = self = getpid();
    if (lc_enabled)
        lc_control_watch(config.hang_timeout, lc_watch_report);
    if (atexit(at_exit) != 0)
        lc_warn(
            "no room for another exit handler: there will be no report, and peers are not told goodbye");
    (void)pthread_atfork(NULL, NULL, in_child);
}

void lc_process_begin(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, begin);
}

const struct lc_config *lc_process_config(void)
{
    return &config;
}
