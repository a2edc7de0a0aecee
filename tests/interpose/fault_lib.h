/* SPDX-License-Identifier: Apache-2.0
 *
 * A library for tests, preloaded behind libloongcomm.so: makes one call that libloongcomm.so makes of libc, of the CUDA
 * runtime or of the kernels fail, once. Calls of anybody else are never touched.
 */
#ifndef LC_TESTS_FAULT_LIB_H
#define LC_TESTS_FAULT_LIB_H

#include <stdbool.h>

/* The nth call at `site` (a function's name) from now on fails in this process; 0: none does. False: no such site. */
bool lcfault_arm(const char *site, unsigned long nth);

/* Calls at the armed site so far. */
unsigned long lcfault_calls(void);

/* The i-th site's name, NULL behind the last. */
const char *lcfault_site(unsigned i);

#endif
