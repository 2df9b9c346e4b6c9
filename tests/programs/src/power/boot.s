# From QEMU's entry to Rust, and from there into the guest and back: HV real mode, big-endian.

.section .first, "ax"
.org 0x10
.globl _start
_start:
    b first

.macro vectors first, rest:vararg
    .org \first
    li 3, \first
    b leave
    .ifnb \rest
    vectors \rest
    .endif
.endm
    vectors 0x100, 0x200, 0x300, 0x380, 0x400, 0x480, 0x500, 0x600, 0x700, 0x800, 0x900, 0x980
    vectors 0xa00, 0xb00, 0xc00, 0xd00, 0xe00, 0xe20, 0xe40, 0xe60, 0xe80, 0xea0
    vectors 0xf00, 0xf20, 0xf40, 0xf60, 0xf80

    .org 0x1000
# r3: the vector. HSPRG0 (304) has the address of `saved`.
leave:
    mfspr 1, 304
    std 4, 16(1)
    ld 2, 8(1)
    ld 1, 0(1)
    bl facilities
    ld 0, 16(1)
    mtlr 0
    blr

# An interrupt clears VEC, VSX and FP, which compiled code uses. ME: no checkstop.
facilities:
    mfmsr 0
    oris 0, 0, 0x0280
    ori 0, 0, 0x3000
    mtmsrd 0
    isync
    blr

first:
    lis 3, saved@h
    ori 3, 3, saved@l
    lis 1, STACK@h
    ori 1, 1, STACK@l
    # A function is its descriptor: the code's address, and r2.
    lis 4, boot@h
    ori 4, 4, boot@l
    mfspr 5, 1023               # PIR
    cmpdi 5, 0
    beq 1f
    # The second CPU, with half of the stack.
    addi 3, 3, 32
    addis 1, 1, -1
    lis 4, second@h
    ori 4, 4, second@l
1:  mtspr 304, 3
    li 0, 0
    stdu 0, -256(1)
    bl facilities
    ld 2, 8(4)
    ld 3, 0(4)
    mtctr 3
    bctrl

# enter(pc, r3, r4) -> the vector of the interrupt that ended the guest. The guest runs in real mode
# without HV, so that the partition's tables alone translate.
.section .opd, "aw"
.balign 8
.globl enter
enter:
    .quad .Lenter, .TOC.@tocbase, 0
.text
.Lenter:
    mflr 0
    std 0, 16(1)
    mfspr 9, 304
    std 1, 0(9)
    std 2, 8(9)
    mtspr 314, 3                # HSRR0
    mr 3, 4
    mr 4, 5
    li 7, 1                     # HSRR1: SF, ME
    sldi 7, 7, 63
    ori 7, 7, 0x1000
    mtspr 315, 7
    .long 0x4c000224            # hrfid

.section .data
.balign 8
saved:                          # r1, r2, the guest's r4; the second CPU's
    .quad 0, 0
.globl guest_r4
guest_r4:
    .quad 0, 0
    .quad 0, 0, 0

# What the guest does; each piece ends by a call of the hypervisor.
.globl guest_code
.balign 64
guest_code:
    ld 4, 0(3)
    sc 1
    .balign 16
    std 4, 0(3)
    sc 1
    .balign 16
    mtctr 3
    bctr
    .balign 16
    sc 1
    .balign 16
# Reads a page, reports what it found and counts, writes to the page, until it is told to leave.
1:  ld 5, 0(3)
    std 5, 0(4)
    ld 6, 16(3)
    addi 6, 6, 1
    std 6, 16(3)
    ld 6, 16(4)
    addi 6, 6, 1
    std 6, 16(4)
    ld 7, 8(4)
    cmpdi 7, 0
    beq 1b
    sc 1
    .balign 16
