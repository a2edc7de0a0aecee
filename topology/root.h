/* SPDX-License-Identifier: Apache-2.0
 *
 * Small files below a folder that stands for /: a captured machine is hostile, and its links must not lead out. */
#ifndef LC_TOPO_ROOT_H
#define LC_TOPO_ROOT_H

#include <stddef.h>

struct lc_root {
    int fd;
};

/* 0 or -errno. */
int lc_root_open(struct lc_root *root, const char *path);
void lc_root_close(struct lc_root *root);

/* All return -errno where there is no such thing; `out` is then "" or NULL. `fmt` makes a path without a leading /. */

/* The beginning of a file, without trailing blanks and line ends. 0. */
__attribute__((format(printf, 4, 5))) int lc_root_text(const struct lc_root *root, char *out,
                                                       size_t size, const char *fmt, ...);

/* The beginning of a file as it is. Its size, at most `size`. */
__attribute__((format(printf, 4, 5))) int lc_root_bytes(const struct lc_root *root, void *out,
                                                        size_t size, const char *fmt, ...);

/* Where a link points to, as it is written there. 0. */
__attribute__((format(printf, 4, 5))) int lc_root_link(const struct lc_root *root, char *out,
                                                       size_t size, const char *fmt, ...);

/* Names in a folder, sorted, without those that begin with a dot; at most `most`, the rest is left out. Free with
 * lc_root_free_names. Returns the count. */
__attribute__((format(printf, 4, 5))) int lc_root_names(const struct lc_root *root, char ***out,
                                                        int most, const char *fmt, ...);
void lc_root_free_names(char **names, int count);

__attribute__((format(printf, 2, 3))) int lc_root_has(const struct lc_root *root, const char *fmt,
                                                      ...);

#endif
