/* SPDX-License-Identifier: Apache-2.0
 *
 * One trampoline for each function of nccl.def: jumps to where its slot points, with everything as the caller
 * left it, so that no signature need be known. A slot first points to code that asks lc_proxy_resolve. */

#if defined(__x86_64__)

#define TRAMPOLINE(name)                                        \
    .globl name; .type name, %function; .p2align 4;             \
    name: .cfi_startproc; endbr64;                              \
    movq .Lslot_##name(%rip), %r11; jmpq *%r11;                 \
    .Llazy_##name: endbr64;                                     \
    leaq .Lslot_##name(%rip), %r11; jmp .Lresolve;              \
    .cfi_endproc; .size name, . - name

    .text
    .p2align 4
    /* r11 is the slot; all registers that can hold an argument are kept (NCCL passes no wide vectors). */
.Lresolve:
    .cfi_startproc
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    subq $192, %rsp
    movq %rax, (%rsp)
    movq %rdi, 8(%rsp)
    movq %rsi, 16(%rsp)
    movq %rdx, 24(%rsp)
    movq %rcx, 32(%rsp)
    movq %r8, 40(%rsp)
    movq %r9, 48(%rsp)
    movq %r10, 56(%rsp)
    movups %xmm0, 64(%rsp)
    movups %xmm1, 80(%rsp)
    movups %xmm2, 96(%rsp)
    movups %xmm3, 112(%rsp)
    movups %xmm4, 128(%rsp)
    movups %xmm5, 144(%rsp)
    movups %xmm6, 160(%rsp)
    movups %xmm7, 176(%rsp)
    movq %r11, %rdi
    call lc_proxy_resolve
    movq %rax, %r11
    movups 176(%rsp), %xmm7
    movups 160(%rsp), %xmm6
    movups 144(%rsp), %xmm5
    movups 128(%rsp), %xmm4
    movups 112(%rsp), %xmm3
    movups 96(%rsp), %xmm2
    movups 80(%rsp), %xmm1
    movups 64(%rsp), %xmm0
    movq 56(%rsp), %r10
    movq 48(%rsp), %r9
    movq 40(%rsp), %r8
    movq 32(%rsp), %rcx
    movq 24(%rsp), %rdx
    movq 16(%rsp), %rsi
    movq 8(%rsp), %rdi
    movq (%rsp), %rax
    leave
    .cfi_def_cfa %rsp, 8
    jmpq *%r11
    .cfi_endproc

#elif defined(__aarch64__)

/* hint 34 is "bti c", which older processors ignore. A jump through x16 may land on it. */
#define TRAMPOLINE(name)                                        \
    .globl name; .type name, %function; .p2align 4;             \
    name: .cfi_startproc; hint 34;                              \
    adrp x16, .Lslot_##name; ldr x16, [x16, :lo12:.Lslot_##name]; br x16; \
    .Llazy_##name: hint 34;                                     \
    adrp x17, .Lslot_##name; add x17, x17, :lo12:.Lslot_##name; b .Lresolve; \
    .cfi_endproc; .size name, . - name

    .text
    .p2align 4
    /* x17 is the slot; x8 holds the address of a large result. */
.Lresolve:
    .cfi_startproc
    stp x29, x30, [sp, #-224]!
    .cfi_def_cfa_offset 224
    .cfi_offset 29, -224
    .cfi_offset 30, -216
    mov x29, sp
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    str x8, [sp, #80]
    stp q0, q1, [sp, #96]
    stp q2, q3, [sp, #128]
    stp q4, q5, [sp, #160]
    stp q6, q7, [sp, #192]
    mov x0, x17
    bl lc_proxy_resolve
    mov x16, x0
    ldp q6, q7, [sp, #192]
    ldp q4, q5, [sp, #160]
    ldp q2, q3, [sp, #128]
    ldp q0, q1, [sp, #96]
    ldr x8, [sp, #80]
    ldp x6, x7, [sp, #64]
    ldp x4, x5, [sp, #48]
    ldp x2, x3, [sp, #32]
    ldp x0, x1, [sp, #16]
    ldp x29, x30, [sp], #224
    .cfi_def_cfa_offset 0
    br x16
    .cfi_endproc

#else
#error "the proxy knows x86-64 and aarch64"
#endif

#define LC_NCCL(name, since, returns) TRAMPOLINE(name); TRAMPOLINE(p##name);
#define LC_NCCL_BARE(name, since, returns) TRAMPOLINE(name);
#include "interpose/proxy/nccl.def"
#undef LC_NCCL
#undef LC_NCCL_BARE

/* The slots, in the order of the names in proxy.c. */
#define SLOT(name) .Lslot_##name: .quad .Llazy_##name
#define LC_NCCL(name, since, returns) SLOT(name); SLOT(p##name);
#define LC_NCCL_BARE(name, since, returns) SLOT(name);

    .data
    .p2align 3
    .globl lc_proxy_slots
    .hidden lc_proxy_slots
lc_proxy_slots:
#include "interpose/proxy/nccl.def"

    .section .note.GNU-stack, "", %progbits
