/* SPDX-License-Identifier: Apache-2.0
 *
 * What the libraries that tests take for NCCL add to NCCL's own functions. They move no data: they count, hand
 * out communicators (a freed handle is the next one handed out) and keep the rules of groups. Found by dlsym. */
#ifndef LC_TESTS_FAKE_H
#define LC_TESTS_FAKE_H

/* Calls of the function with this name in this copy of the library, also those it made itself. */
typedef unsigned fake_count_fn(const char *name);

#endif
