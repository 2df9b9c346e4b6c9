# PVH entry (Xen's public headers, elfnote.h): 32-bit protected mode, no paging, flat segments.
.section .note.pvh, "a", @note
.balign 4
.long 4, 8, 18                  # XEN_ELFNOTE_PHYS32_ENTRY
.asciz "Xen"
.quad start

.section .first, "ax"
.code32
.global start
start:
    mov esp, offset stack_top
    # Bochs fills memory with something.
    cld
    mov edi, offset bss_start
    mov ecx, offset bss_end
    sub ecx, edi
    shr ecx, 2
    xor eax, eax
    rep stosd
    # 1 GiB as it is, by pages of 2 MiB.
    mov edi, offset directory
    mov eax, 0x83
    mov ecx, 512
2:  mov [edi], eax
    add eax, 0x200000
    add edi, 8
    loop 2b
    mov eax, offset directory + 3
    mov [pointers], eax
    mov eax, offset pointers + 3
    mov [root], eax
    mov eax, offset root
    mov cr3, eax
    mov eax, 0x20               # CR4.PAE
    mov cr4, eax
    xor eax, eax                # CR4.LA57, where the CPU has it
    cpuid
    cmp eax, 7
    jb 4f
    mov eax, 7
    xor ecx, ecx
    cpuid
    test ecx, 0x10000
    jz 4f
    mov eax, offset root + 3
    mov [wide], eax
    mov eax, offset wide
    mov cr3, eax
    mov eax, 0x1020
    mov cr4, eax
4:
    mov ecx, 0xc0000080         # EFER: NXE, LME
    mov eax, 0x900
    xor edx, edx
    wrmsr
    mov eax, 0x80010011         # CR0: PG, WP, ET, PE
    mov cr0, eax
    lgdt [descriptors_end]
    .byte 0xea                  # jmp 8:long
    .long long
    .word 8
.code64
long:
    mov eax, 16
    mov ds, eax
    mov es, eax
    mov ss, eax
    xor ebp, ebp
    call main
3:  hlt
    jmp 3b

.section .rodata
.balign 8
.global descriptors
descriptors:                    # code, data, and a task that VM exits want
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00008b0000000067, 0
descriptors_end:
    .word descriptors_end - descriptors - 1
    .quad descriptors

.section .bss, "aw", @nobits
.balign 4096
root: .skip 4096
wide: .skip 4096
pointers: .skip 4096
directory: .skip 4096
.skip 65536
stack_top:
