// From the guest's first instruction to Rust: EL1, caches and MMU off, x0 the device tree.

.section .first, "ax"
.global _start
_start:
    adrp    x1, vectors
    add     x1, x1, :lo12:vectors
    msr     vbar_el1, x1
    msr     tpidr_el1, xzr
    isb
    adrp    x1, stack
    add     x1, x1, :lo12:stack
    mov     sp, x1
    bl      probe
    b       .

.section .text

// attempt(body, argument, caught) -> u64: what body(argument) returns. An exception that it takes
// is recorded in `caught`, and ends it. A body is a leaf that leaves the stack alone, so whatever
// became of it, nothing has to be restored that the C ABI has it keep.
.global attempt
attempt:
    stp     x29, x30, [sp, #-16]!
    msr     tpidr_el1, x2
    mov     x9, x0
    mov     x0, x1
    blr     x9
resume:
    msr     tpidr_el1, xzr
    ldp     x29, x30, [sp], #16
    ret

.global load, store, jump, undefined, read_hcr, translated
load:
    ldr     x0, [x0]
    ret
store:
    str     w0, [x0]
    ret
jump:
    br      x0
undefined:
    udf     #0
    ret
read_hcr:
    mrs     x0, hcr_el2
    ret

// Jumps to x0 with the MMU on.
translated:
    mrs     x9, sctlr_el1
    orr     x9, x9, #1
    tlbi    vmalle1
    dsb     nsh
    isb
    msr     sctlr_el1, x9
    isb
    br      x0

.macro exception vector
    .balign 0x80
    mov     x12, #\vector
    b       record
.endm

.balign 0x800
vectors:
    exception 0x000
    exception 0x080
    exception 0x100
    exception 0x180
    exception 0x200
    exception 0x280
    exception 0x300
    exception 0x380
    exception 0x400
    exception 0x480
    exception 0x500
    exception 0x580
    exception 0x600
    exception 0x680
    exception 0x700
    exception 0x780

record:
    mrs     x10, tpidr_el1
    cbz     x10, nobody
    mrs     x9, esr_el1
    mrs     x11, far_el1
    stp     x9, x11, [x10]
    mrs     x9, elr_el1
    mrs     x11, spsr_el1
    stp     x9, x11, [x10, #16]
    mrs     x11, daif
    stp     x12, x11, [x10, #32]
    adr     x9, resume
    msr     elr_el1, x9
    eret
// An exception that no attempt expects.
nobody:
    mrs     x0, esr_el1
    mrs     x1, far_el1
    mrs     x2, elr_el1
    b       unexpected

.section .bss, "aw", %nobits
.balign 16
    .skip   0x10000
stack:
