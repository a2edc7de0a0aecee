/* SPDX-License-Identifier: Apache-2.0
 *
 * The `loongcomm` command. One thread; nothing here is loaded into a job. What children print, and every
 * file they name, is hostile: sizes are bounded and every wait has a deadline. */
#ifndef LC_CLI_H
#define LC_CLI_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

enum lc_cli_exit {
    LC_CLI_FINE = 0,
    LC_CLI_FINDING = 1, /* at least one finding of severity error, or a bad setting */
    LC_CLI_USAGE = 2,
    LC_CLI_CANNOT_EXEC = 126, /* run: as env(1) */
    LC_CLI_NOT_FOUND = 127,
};

/* The subcommands; argv[0] is the subcommand's name. They return the exit code. */
int lc_cli_run(int argc, char **argv);
int lc_cli_config(int argc, char **argv);
int lc_cli_report(int argc, char **argv);
int lc_cli_doctor(int argc, char **argv);
int lc_cli_topo(int argc, char **argv);
int lc_cli_tune(int argc, char **argv);

/* One line "loongcomm: ..." on standard error; returns LC_CLI_USAGE. */
__attribute__((format(printf, 1, 2))) int lc_cli_usage(const char *fmt, ...);

/* The same line for what is no mistake of usage. */
__attribute__((format(printf, 1, 2))) void lc_cli_say(const char *fmt, ...);

/* Finds libloongcomm.so beside this program: the folder of the program itself, the library folders of the
 * same prefix, the build tree. 0, or -ENOENT; `out` has room for PATH_MAX bytes. */
int lc_cli_find_library(char *out);

/* The folder that holds the proxy libnccl.so.2. Likewise. */
int lc_cli_find_proxy(char *out);

/* libloongtopo.so, which `topo` alone needs. Likewise. */
int lc_cli_find_topology(char *out);

/* loongcomm-bench and the tuner plugin, which `tune` needs. Likewise. */
int lc_cli_find_bench(char *out);
int lc_cli_find_tuner(char *out);

/* What keeps a path out of a list that the loader splits (`separators` names the bytes it splits at): a
 * short text such as "a space", or NULL if the path can be listed. */
const char *lc_cli_unlistable(const char *path, const char *separators);
#define LC_CLI_PRELOAD_SEPARATORS      " :"
#define LC_CLI_LIBRARY_PATH_SEPARATORS ":;"

/* `old` (may be NULL) with `path` in front, unless it is there already: anywhere, or in the first place. The
 * caller frees. NULL: no memory. */
char *lc_cli_list_with(const char *old, const char *path, const char *separators, bool anywhere);

/* Calls visit for each entry of a list; an entry is cut at PATH_MAX - 1 bytes. */
void lc_cli_list_each(const char *list, const char *separators,
                      void (*visit)(const char *entry, void *arg), void *arg);

#endif
