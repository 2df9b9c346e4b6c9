// From reset in M-mode to Rust in HS-mode, with the number of the machine's architecture, and from
// there into the guest and back. CSRs of the hypervisor extension by number: assemblers know their
// names only with it.

.section .first, "ax"
.global _start
_start:
    csrr    t0, mhartid
    la      sp, STACK
    la      t1, broken_below
    la      t2, boot
    beqz    t0, 0f
    // The second hart, with half of the stack: interrupts from the first one.
    li      t1, 0x10000
    sub     sp, sp, t1
    la      t1, interrupted
    la      t2, second
    li      t0, 8
    csrw    mie, t0
0:  csrw    mtvec, t1
    csrw    mepc, t2
    // All of memory to S-mode, by one entry of the PMP.
    li      t0, -1
    csrw    pmpaddr0, t0
    li      t0, 0x1f
    csrw    pmpcfg0, t0
    // Illegal instructions (2), page faults, the guest's calls (10), its guest-page faults (20, 21,
    // 23) and virtual instructions (22).
    li      t0, 0xf0b404
    csrw    medeleg, t0
    // MPP: S; FS: initial.
    li      t0, 0x1800
    csrc    mstatus, t0
    li      t0, 0x2800
    csrs    mstatus, t0
    la      t0, broken
    csrw    stvec, t0
    csrw    satp, zero
    // menvcfg.ADUE: the hart marks leaves, where it can do both.
    li      t0, 1
    slli    t0, t0, 61
    csrs    0x30a, t0
    csrr    a0, marchid
    mret

// Another hart's interrupt: a fence of all guests if it asks for one, and an answer.
.align 2
interrupted:
    csrw    mscratch, t0
    csrr    t0, mcause
    bgez    t0, broken_below
    li      t0, 0x2000004
    sw      zero, 0(t0)
    la      t0, ASKED
    ld      t0, 0(t0)
    addi    t0, t0, -1
    bnez    t0, 1f
    .insn r 0x73, 0, 0x31, x0, x0, x0
1:  la      t0, ASKED
    sd      zero, 0(t0)
    fence
    csrr    t0, mscratch
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
// Reads a page, reports what it found and counts, writes to the page, until it is told to leave.
1:  ld      t1, 0(a0)
    sd      t1, 0(a1)
    ld      t2, 16(a0)
    addi    t2, t2, 1
    sd      t2, 16(a0)
    ld      t2, 16(a1)
    addi    t2, t2, 1
    sd      t2, 16(a1)
    ld      t3, 8(a1)
    beqz    t3, 1b
    ecall
.align 4
