/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_CLI_JSON_WALK_H
#define LC_CLI_JSON_WALK_H

#include <stddef.h>

/* Reads one JSON document and calls `visit` for each string, number, true, false and null in it. `path`
 * is the way to it, "comms.calls": names joined by points, arrays leave no trace. `value` is the text of
 * a string with its escapes undone (cut at 1023 bytes), else the token as written. 0, or -EINVAL for
 * what is no JSON or nested more than 16 deep; visits made before stand. `text` must end with a NUL. */
int lc_cli_json_walk(const char *text,
                     void (*visit)(const char *path, const char *value, void *arg), void *arg);

#endif
