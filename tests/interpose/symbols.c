/* SPDX-License-Identifier: Apache-2.0
 *
 * Prints what libloongcomm.so must export: the lists as the compiler sees them. */
#include <nccl.h>
#include <stdio.h>

int main(void)
{
#define LC_SYM(name) puts(#name);
#include "interpose/symbols.def"
#undef LC_SYM
#define LC_API(name) puts(#name);
#include "interpose/api.def"
#undef LC_API
    return 0;
}
