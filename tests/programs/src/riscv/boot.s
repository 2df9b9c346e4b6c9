// From reset in M-mode to Rust in HS-mode, and from there into the guest and back. CSRs of the
// hypervisor extension by number: assemblers know their names only with it.

.section .first, "ax"
.global _start
_start:
    csrr    t0, mhartid
0:  bnez    t0, 0b
    la      sp, STACK
    la      t0, broken_below
    csrw    mtvec, t0
    // All of memory to S-mode, by one entry of the PMP.
    li      t0, -1
    csrw    pmpaddr0, t0
    li      t0, 0x1f
    csrw    pmpcfg0, t0
    // Page faults, the guest's calls (10), its guest-page faults (20, 21, 23) and virtual instructions (22).
    li      t0, 0xf0b400
    csrw    medeleg, t0
    // MPP: S; FS: initial.
    li      t0, 0x1800
    csrc    mstatus, t0
    li      t0, 0x2800
    csrs    mstatus, t0
    la      t0, boot
    csrw    mepc, t0
    la      t0, broken
    csrw    stvec, t0
    csrw    satp, zero
    mret

.align 2
broken_below:
    csrr    a0, mcause
    csrr    a1, mepc
    csrr    a2, mtval
    j       unexpected
.align 2
broken:
    csrr    a0, scause
    csrr    a1, sepc
    csrr    a2, stval
    j       unexpected

.macro all op
    \op     ra, 0(sp)
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
    \op     s\n, 8 + 8 * \n(sp)
    .endr
.endm

// enter(pc, a0, a1) -> a1: runs the guest in VS-mode, without a stage of its own, until it traps.
.section .text
.global enter
enter:
    addi    sp, sp, -112
    all     sd
    csrw    sscratch, sp
    csrw    sepc, a0
    la      t0, leave
    csrw    stvec, t0
    // hstatus.SPV and sstatus.SPP: to VS-mode. vsatp: Bare.
    li      t0, 0x80
    csrs    0x600, t0
    li      t0, 0x100
    csrs    sstatus, t0
    csrw    0x280, zero
    mv      a0, a1
    mv      a1, a2
    sret

.align 2
leave:
    csrr    sp, sscratch
    la      t0, broken
    csrw    stvec, t0
    mv      a0, a1
    all     ld
    addi    sp, sp, 112
    ret

// What the guest does: copied to a page of its own. Each piece has 16 bytes.
.global guest_code
.align 4
guest_code:
    ld      a1, 0(a0)
    ecall
.align 4
    sd      a1, 0(a0)
    ecall
.align 4
    jr      a0
.align 4
    ecall
.align 4
