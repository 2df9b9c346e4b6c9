// From the reset of a CPU to Rust: EL2, caches and MMU off, x0 from PSCI.

.section .first, "ax"

// The CPU that QEMU starts.
.global _start
_start:
    adr     x21, boot
    b       begin

// Those that PSCI CPU_ON starts; x0 is what it was given.
.global start_secondary
start_secondary:
    adr     x21, secondary
    mov     x20, x0

begin:
    adrp    x0, vectors
    add     x0, x0, :lo12:vectors
    msr     vbar_el2, x0

    // Device-nGnRE, and memory that is cached.
    mov     x0, #0xff04
    msr     mair_el2, x0
    // 39 bits, walks write-back and inner shareable, 4K; up to 48 bits of physical address.
    mrs     x1, id_aa64mmfr0_el1
    and     x1, x1, #0xf
    mov     x2, #5
    cmp     x1, x2
    csel    x1, x1, x2, lo
    ldr     x0, =0x80803519
    orr     x0, x0, x1, lsl #16
    msr     tcr_el2, x0
    adrp    x0, IDENTITY
    add     x0, x0, :lo12:IDENTITY
    msr     ttbr0_el2, x0
    tlbi    alle2
    dsb     nsh
    isb
    // RES1, M, C, I.
    ldr     x0, =0x30c51835
    msr     sctlr_el2, x0
    isb

    // 64 KiB for each CPU, by Aff0.
    mrs     x0, mpidr_el1
    and     x0, x0, #0xff
    add     x0, x0, #1
    adrp    x1, STACKS
    add     x1, x1, :lo12:STACKS
    add     x1, x1, x0, lsl #16
    mov     sp, x1
    mov     x0, x20
    br      x21

.section .text

// enter(registers: *mut Registers) -> exit: runs the guest until its next exit. The guest's
// registers are in TPIDR_EL2 meanwhile, the hypervisor's own on its stack.
.global enter
enter:
    stp     x19, x20, [sp, #-96]!
    stp     x21, x22, [sp, #16]
    stp     x23, x24, [sp, #32]
    stp     x25, x26, [sp, #48]
    stp     x27, x28, [sp, #64]
    stp     x29, x30, [sp, #80]
    msr     tpidr_el2, x0
    ldp     x2, x3, [x0, #16]
    ldp     x4, x5, [x0, #32]
    ldp     x6, x7, [x0, #48]
    ldp     x8, x9, [x0, #64]
    ldp     x10, x11, [x0, #80]
    ldp     x12, x13, [x0, #96]
    ldp     x14, x15, [x0, #112]
    ldp     x16, x17, [x0, #128]
    ldp     x18, x19, [x0, #144]
    ldp     x20, x21, [x0, #160]
    ldp     x22, x23, [x0, #176]
    ldp     x24, x25, [x0, #192]
    ldp     x26, x27, [x0, #208]
    ldp     x28, x29, [x0, #224]
    ldr     x30, [x0, #240]
    ldp     x0, x1, [x0]
    eret

exited:
    ldp     x21, x22, [sp, #16]
    ldp     x23, x24, [sp, #32]
    ldp     x25, x26, [sp, #48]
    ldp     x27, x28, [sp, #64]
    ldp     x29, x30, [sp, #80]
    ldp     x19, x20, [sp], #96
    ret

.macro from_guest code
    .balign 0x80
    stp     x0, x1, [sp, #-16]!
    mrs     x0, tpidr_el2
    stp     x2, x3, [x0, #16]
    stp     x4, x5, [x0, #32]
    stp     x6, x7, [x0, #48]
    stp     x8, x9, [x0, #64]
    stp     x10, x11, [x0, #80]
    stp     x12, x13, [x0, #96]
    stp     x14, x15, [x0, #112]
    stp     x16, x17, [x0, #128]
    stp     x18, x19, [x0, #144]
    stp     x20, x21, [x0, #160]
    stp     x22, x23, [x0, #176]
    stp     x24, x25, [x0, #192]
    stp     x26, x27, [x0, #208]
    stp     x28, x29, [x0, #224]
    str     x30, [x0, #240]
    ldp     x2, x3, [sp], #16
    stp     x2, x3, [x0]
    mov     x0, #\code
    b       exited
.endm

.macro from_el2 code
    .balign 0x80
    mov     x0, #\code
    b       broken
.endm

.balign 0x800
vectors:
    from_el2 0
    from_el2 1
    from_el2 2
    from_el2 3
    from_el2 4
    from_el2 5
    from_el2 6
    from_el2 7
    // Of a lower exception level in AArch64: synchronous, IRQ, FIQ, SError.
    from_guest 0
    from_guest 1
    from_guest 2
    from_guest 3
    from_el2 12
    from_el2 13
    from_el2 14
    from_el2 15
