/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_CLI_CHILD_H
#define LC_CLI_CHILD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LC_CLI_RESULT_FD  3 /* the descriptor on which a child answers */
#define LC_CLI_RESULT_MAX ((size_t)65536)
#define LC_CLI_TAIL_MAX   ((size_t)4096)

struct lc_cli_child {
    char *const *argv;       /* started through PATH, or NULL: */
    void (*body)(void *arg); /* called in the fork instead; writes to LC_CLI_RESULT_FD */
    void *arg;
    const char *const *env; /* "NAME=VALUE" sets, "NAME" removes; NULL-terminated, or NULL */
    int64_t timeout_ms;
    bool loud; /* what it prints is for the user: all of it goes to our standard error */
};

enum lc_cli_end {
    LC_CLI_EXITED,      /* code: exit status */
    LC_CLI_SIGNALLED,   /* code: signal */
    LC_CLI_TIMED_OUT,   /* killed, with its process group */
    LC_CLI_NOT_STARTED, /* code: errno */
};

struct lc_cli_outcome {
    enum lc_cli_end end;
    int code;
    size_t result_len;
    char result[LC_CLI_RESULT_MAX + 1]; /* what arrived on LC_CLI_RESULT_FD; more is dropped */
    char tail[LC_CLI_TAIL_MAX + 1];     /* the last bytes of its standard error, unless loud */
};

/* Runs a child in a process group of its own with no standard input, and returns when it has ended or
 * at the deadline; the rest of the group is killed then. */
void lc_cli_child_run(const struct lc_cli_child *child, struct lc_cli_outcome *out);

/* "exit code 3", "signal 11 (Segmentation fault)", "no answer within 60 s", ...; a static buffer. */
const char *lc_cli_child_end(const struct lc_cli_child *child,
                             const struct lc_cli_outcome *outcome);

/* The last non-empty line of the tail, which for Python is the error's message; "" if there is none.
 * Ends lines in place. */
const char *lc_cli_child_last_line(struct lc_cli_outcome *outcome);

#endif
