# The last 256 bytes of a ROM of 512 KiB below 4 GiB, which begins with the program: from the reset
# vector to protected mode, to a copy of the program at 1 MiB, and to its start. No loader reads
# this section: addresses are computed.
.section .rom, "", @progbits
.code16
rom:
    cli
    in al, 0x92                 # address line 20
    or al, 2
    and al, 0xfe
    out 0x92, al
    .byte 0x2e, 0x66, 0x0f, 0x01, 0x16  # lgdt cs:[table]
    .word table - rom + 0xff00
    mov eax, cr0
    or eax, 1
    mov cr0, eax
    .byte 0x66, 0xea            # jmp 8:flat
    .long flat - rom + 0xffffff00
    .word 8
.code32
flat:
    mov eax, 16
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov fs, eax
    mov gs, eax
    cld
    mov esi, 0xfff80000
    mov edi, 0x100000
    mov ecx, 0x1ffc0
    rep movsd
    mov eax, offset start
    jmp eax
.balign 8
segments:
    .quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff
table:
    .word table - segments - 1
    .long segments - rom + 0xffffff00
    .org 0xf0
    .byte 0xe9                  # jmp rom, of 16 bits
    .word -0xf3
    .org 0x100
