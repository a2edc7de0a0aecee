/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_COMMON_OUTPUT_H
#define LC_COMMON_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Writes all of it; 0 or -errno. The program that we are loaded into may not expect anything to be written: a
 * pipe that nobody reads (SIGPIPE) or a file at its size limit (SIGXFSZ) is an error here, and the signal that
 * would end the program does not reach it. */
int lc_output_write(int fd, const char *text, size_t size);

/* Bytes that a terminal may obey become '?': control characters, also those of two bytes in UTF-8. For names that come
 * from outside, in place. */
void lc_output_defuse(char *text);

/* "1.5 GiB", which is given back. */
#define LC_OUTPUT_BYTES 16
const char *lc_output_bytes(uint64_t bytes, char out[LC_OUTPUT_BYTES]);

/* A file that appears whole or not at all: it is written beside its name, and renamed at the end. */
struct lc_output_file {
    const char *path; /* as it was named; the caller's */
    char *target;     /* where it is to appear: what a link leads to */
    char *temporary;
    FILE *out; /* NULL: not open */
};

/* 0 or -errno (lc_input_why). What is at `path` must be a regular file or nothing: -EISDIR or -ENXIO, since a rename would
 * take the place of a device; -EADDRINUSE where it is our standard output or error, whose text would be lost. Others may write the
 * same file at the same time: the last to close has its own there. A link that leads nowhere is replaced. */
int lc_output_open(struct lc_output_file *file, const char *path);

/* It is to appear under a longer name, beside where it would have: 0, or an error as above, and then nothing has changed. */
int lc_output_extend(struct lc_output_file *file, const char *suffix);

/* Without `keep` it goes. Also of one that is not open. 0, or -errno, and then it is gone as well. */
int lc_output_close(struct lc_output_file *file, bool keep);

/* Whatever a user names, to be written in place: also a pipe, if somebody reads it (-ENXIO if not, without waiting). */
int lc_output_open_in_place(const char *path, FILE **out);

#endif
