// From EL2 into the guest and back, and the second CPU's way to Rust.

.section .text

// enter(pc, x0, x1, hcr) -> the guest's x1: runs the guest at EL1 until an exception. The
// firmware's vectors and HCR_EL2 are back after it.
.global enter
enter:
    stp     x29, x30, [sp, #-48]!
    mrs     x4, hcr_el2
    mrs     x5, vbar_el2
    mrs     x6, daif
    stp     x4, x5, [sp, #16]
    str     x6, [sp, #32]
    msr     daifset, #15
    adrp    x4, vectors
    add     x4, x4, :lo12:vectors
    msr     vbar_el2, x4
    msr     hcr_el2, x3
    msr     elr_el2, x0
    // EL1 with its own stack pointer; interrupts masked.
    mov     x4, #0x3c5
    msr     spsr_el2, x4
    mov     x0, x1
    mov     x1, x2
    eret
left:
    ldp     x4, x5, [sp, #16]
    ldr     x6, [sp, #32]
    msr     hcr_el2, x4
    msr     vbar_el2, x5
    isb
    msr     daif, x6
    mov     x0, x1
    ldp     x29, x30, [sp], #48
    ret

// Nothing but the guest's own synchronous exceptions comes here.
.balign 2048
vectors:
    .rept 8
    b       .
    .balign 128
    .endr
    b       left
    .rept 7
    .balign 128
    b       .
    .endr

// PSCI starts the second CPU here, without an MMU; x0 has the registers of the first.
.balign 4
.global started
started:
    ldp     x1, x2, [x0]
    ldp     x3, x4, [x0, #16]
    ldp     x5, x6, [x0, #32]
    ldr     x7, [x0, #48]
    msr     ttbr0_el2, x1
    msr     tcr_el2, x2
    msr     mair_el2, x3
    msr     cptr_el2, x5
    tlbi    alle2
    ic      iallu
    dsb     nsh
    isb
    msr     sctlr_el2, x4
    isb
    mov     sp, x6
    br      x7

// What the guest does, copied to a page of its own. Each piece has 16 bytes.
.global guest_code
.balign 16
guest_code:
    ldr     x1, [x0]
    hvc     #0
.balign 16
    str     x1, [x0]
    hvc     #0
.balign 16
    br      x0
.balign 16
    hvc     #0
.balign 16
// Reads a page, reports what it found and counts, writes to the page, until it is told to leave.
1:  ldr     x2, [x0]
    str     x2, [x1]
    ldr     x2, [x0, #16]
    add     x2, x2, #1
    str     x2, [x0, #16]
    ldr     x2, [x1, #16]
    add     x2, x2, #1
    str     x2, [x1, #16]
    ldr     x2, [x1, #8]
    cbz     x2, 1b
    hvc     #0
.balign 16
