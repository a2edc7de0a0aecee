/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LC_PROXY_SEARCH_H
#define LC_PROXY_SEARCH_H

#include "interpose/find.h"

/* Loads the NCCL that a program would have got without us: the file that `given` names (from LOONGCOMM_NCCL, empty:
 * none), else the first libnccl.so.2 in LD_LIBRARY_PATH, beside the Python packages that are loaded, below the
 * interpreter, in the loader's own folders, or in a CUDA toolkit. Never a proxy. One line is logged if there
 * is none. */
bool lc_proxy_load_nccl(const char *given, struct lc_nccl *out);

#endif
