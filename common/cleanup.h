/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_COMMON_CLEANUP_H
#define LC_COMMON_CLEANUP_H

#include <stdio.h>
#include <stdlib.h>

static inline void lc_cleanup_free(void *p)
{
    free(*(void **)p);
}

static inline void lc_cleanup_fclose(FILE **f)
{
    if (*f)
        fclose(*f);
}

#define lc_autofree   __attribute__((cleanup(lc_cleanup_free)))
#define lc_autofclose __attribute__((cleanup(lc_cleanup_fclose)))

#endif
