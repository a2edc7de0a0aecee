/* SPDX-License-Identifier: Apache-2.0
 *
 * Files to read that a variable, an option or a well-known path names. Whatever lies there (a FIFO, a terminal, a device, a
 * folder, a file of any size), opening and reading does not wait and has an end. Nothing here logs. */
#ifndef LC_COMMON_INPUT_H
#define LC_COMMON_INPUT_H

#include <stdbool.h>
#include <stddef.h>

/* A descriptor of a regular file, or of /dev/null, an empty one, for reading, closed at exec; or -errno: -EISDIR for a folder,
 * -ENXIO for another file that is not regular. `folder`: a descriptor, or AT_FDCWD. `flags`: O_NOFOLLOW (-ELOOP for a link) or 0. */
int lc_input_open(int folder, const char *path, int flags);

/* 0 where `fd` is of such a file, else as above; it stays open. */
int lc_input_check(int fd);

/* All of such a file in new memory, which is the caller's to free, with a NUL behind; 0 or -errno: as above, -EFBIG for more
 * than `most` bytes. */
int lc_input_read(int folder, const char *path, int flags, size_t most, char **out, size_t *size);

/* As with AT_FDCWD and 0; also what a pipe brings that somebody writes, until all have closed it, which is waited for: for a
 * command's own arguments, where <(zcat file) or /dev/stdin may stand. -ENXIO for one that nobody writes. */
int lc_input_read_argument(const char *path, size_t most, char **out, size_t *size);

/* False where dlopen would find a file that is not regular: it waits for ever for a FIFO. Names without a slash are looked up
 * elsewhere, and what is not there is for dlopen to say. */
bool lc_input_is_loadable(const char *name);

/* What is wrong, for a message behind the name of the file: "it is a folder". */
const char *lc_input_why(int err);

#endif
