/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_COMMON_OUTPUT_H
#define LC_COMMON_OUTPUT_H

#include <stddef.h>
#include <stdint.h>

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

#endif
