/* SPDX-License-Identifier: Apache-2.0
 *
 * Every function of the list that fake_nccl.c does not write out: does nothing, returns 0. */
#if defined(__x86_64__)
#define RETURN_0 xorl %eax, %eax; ret
#elif defined(__aarch64__)
#define RETURN_0 mov w0, #0; ret
#endif

#define STUB(name) .weak name; .type name, %function; name: RETURN_0
#define LC_NCCL(name, since, returns) STUB(name); STUB(p##name);
#define LC_NCCL_BARE(name, since, returns) STUB(name);

    .text
#include "interpose/proxy/nccl.def"
    .section .note.GNU-stack, "", %progbits
