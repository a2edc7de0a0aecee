/* SPDX-License-Identifier: Apache-2.0
 *
 * CHECK aborts. While a case runs the signal jumps back to its beginning; outside of cases the program ends as ever.
 */
#include "tests/kernels/compute_cases.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

static sigjmp_buf *innermost; /* NULL: no case is running; of the thread that runs cases */
static int failed;

static void leave(int signal)
{
    (void)signal;
    if (innermost)
        siglongjmp(*innermost, 1);
}

static void catch_aborts(void)
{
    struct sigaction action = { .sa_handler = leave };

    sigemptyset(&action.sa_mask);
    sigaction(SIGABRT, &action, NULL);
}

bool run_case(void (*body)(void *arg), void *arg, const char *format, ...)
{
    sigjmp_buf here, *volatile outer = innermost;
    volatile bool whole = false; /* read behind the jump, as outer is */
    va_list names;

    catch_aborts();
    if (sigsetjmp(here, 1) == 0) {
        innermost = &here;
        body(arg);
        whole = true;
    }
    innermost = outer;
    if (whole)
        return true;
    failed++;
    fflush(stdout);
    fprintf(stderr, "FAILED: ");
    va_start(names, format);
    vfprintf(stderr, format, names);
    va_end(names);
    fprintf(stderr, "\n");
    return false;
}

int cases_failed(void)
{
    return failed;
}
