# enter(registers: *mut [rdi, rsi, rax], launched) -> 0: an exit, 1: VMfail
.text
.global enter
enter:
    push rbp
    push rbx
    push r12
    push r13
    push r14
    push r15
    push rdi
    mov eax, 0x6c14             # the host's RSP and RIP
    vmwrite rax, rsp
    lea rcx, [rip + 1f]
    mov eax, 0x6c16
    vmwrite rax, rcx
    mov r8, rsi
    mov rsi, [rdi + 8]
    mov rdi, [rdi]
    test r8, r8
    jne 2f
    vmlaunch
    jmp 3f
2:  vmresume
3:  pop rdi
    mov eax, 1
    jmp 4f
1:  pop rdi
    mov [rdi + 16], rax
    xor eax, eax
4:  pop r15
    pop r14
    pop r13
    pop r12
    pop rbx
    pop rbp
    ret
