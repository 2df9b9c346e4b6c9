//! The x86-64 guest: the host sets up long mode, and the guest's code runs in ring 3.
//!
//! No code of the guest runs in ring 0, not even at its start: a KVM without hardware
//! virtualization interprets ring 0 code, and would write memory without a fault. IOPL is 3, so
//! that `out` in ring 3 exits to the host without a fault in the guest. The guest has no IDT,
//! because no fault is delivered to it: the faults are at the second level, which the guest does
//! not see.
//!
//! Accessed and dirty bits of the guest's own tables are set beforehand, so that no walk has to set
//! them. On a KVM with shadow page tables each would cost another fault.
//!
//! Sources: Intel SDM, volume 3, "Segment Descriptors", "4-Level Paging and 5-Level Paging" and
//! "Checks on the Guest State Area" (VMX's requirements); volume 1, "I/O Privilege Level"; api.rst,
//! `KVM_SET_SREGS`.

use super::MEMORY_GPA;
use super::{CODE_GPA, ROOT_GPA};
use crate::Error;
use crate::mailbox;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// Returns the entry that refers to a table: present, writable, user, accessed.
pub(crate) const fn table(gpa: u64) -> u64 {
    gpa | 0x27
}

/// Returns the entry that maps a 2 MiB page: the same, dirty, and page size.
pub(crate) const fn page_2m(gpa: u64) -> u64 {
    gpa | 0xe7
}

/// Returns the address that an entry has.
#[cfg(test)]
pub(crate) const fn address(entry: u64) -> u64 {
    entry & 0x0000_ffff_ffff_f000
}

/// The guest exits by an I/O port and needs no device.
pub(crate) const DEVICE: Option<(u64, u64)> = None;
/// End of the boot slot at most: below the areas under 4 GiB that chipsets use, and within the
/// gigabyte that its table maps.
pub(crate) const BOOT_LIMIT: u64 = 1 << 30;
/// Eight `ret` instructions.
pub(crate) const RETURNS: u64 = 0xc3c3_c3c3_c3c3_c3c3;

/// Port to which the guest writes when it exits. Any port would do.
const DONE_PORT: u16 = 0x5a;

// Registers: rsi steps left, rbx base, r15 pages, r9 index, r14 random, r8 share, r10 accumulator,
// r12 position, r13 clock at the last access, rbp when the next step is due, r11 mailbox, rdi
// address of the page.
guest_asm!(
    ".pushsection .rodata.slat_guest, \"a\", @progbits",
    ".macro SLAT_CLOCK",
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    ".endm",
    // Records the clock of the last access, where a record is asked for.
    ".macro SLAT_RECORD",
    "mov rcx, [r11 + {record}]",
    "test rcx, rcx",
    "jz 2f",
    "mov [rcx], r13",
    "add rcx, 8",
    "mov [r11 + {record}], rcx",
    "2:",
    ".endm",
    ".macro SLAT_ADVANCE",
    "movabs rcx, {multiplier}",
    "imul r14, rcx",
    "movabs rcx, {increment}",
    "add r14, rcx",
    "mov rax, r14",
    ".endm",
    ".balign 16",
    "slat_guest_start:",
    "mov rsi, [r11 + {left}]",
    "mov rbx, [r11 + {base}]",
    "mov r15, [r11 + {pages}]",
    "mov r9, [r11 + {index}]",
    "mov r14, [r11 + {random}]",
    "mov r8, [r11 + {share}]",
    "mov r10, [r11 + {accumulator}]",
    "mov r12, [r11 + {position}]",
    "SLAT_CLOCK",
    "mov r13, rax",
    "mov rbp, rax",
    "SLAT_RECORD",
    ".Lslat_step:",
    "jmp [r11 + {next}]",
    // Choose the page.
    "slat_guest_sequential:",
    "mov rdi, r9",
    "inc r9",
    "cmp r9, r15",
    "jb .Lslat_page",
    "xor r9d, r9d",
    "jmp .Lslat_page",
    "slat_guest_random:",
    "SLAT_ADVANCE",
    "mul r15",
    "mov rdi, rdx",
    "jmp .Lslat_page",
    "slat_guest_listed:",
    "mov rdi, [r11 + {list}]",
    "mov rdi, [rdi + r9 * 8]",
    "inc r9",
    "cmp r9, [r11 + {listed}]",
    "jb .Lslat_page",
    "xor r9d, r9d",
    "jmp .Lslat_page",
    "slat_guest_hot:",
    "SLAT_ADVANCE",
    "mov ecx, {whole}",
    "mul rcx",
    "mov rdi, r15",
    "cmp rdx, [r11 + {hot_share}]",
    "jae .Lslat_cold",
    "mov rdi, [r11 + {hot_pages}]",
    ".Lslat_cold:",
    "SLAT_ADVANCE",
    "mul rdi",
    "mov rdi, rdx",
    ".Lslat_page:",
    "mov ecx, [r11 + {shift}]",
    "shl rdi, cl",
    "add rdi, rbx",
    "add r10, r8",
    "cmp r10, {whole}",
    "jb .Lslat_miss",
    "sub r10, {whole}",
    "jmp [r11 + {hit}]",
    ".Lslat_miss:",
    "jmp [r11 + {miss}]",
    // Touch the page: the measured accesses.
    "slat_guest_write:",
    "mov [rdi], r12",
    "mov [rdi + 8], rdi",
    "mov rax, [r11 + {returns}]",
    "mov [rdi + 16], rax",
    "jmp .Lslat_done",
    "slat_guest_execute:",
    "lea rax, [rdi + 16]",
    "call rax",
    "jmp .Lslat_done",
    "slat_guest_read:",
    "mov rax, [rdi + 8]",
    "cmp rax, rdi",
    "je .Lslat_done",
    "inc qword ptr [r11 + {wrong}]",
    "jmp .Lslat_done",
    "slat_guest_sum:",
    "mov rax, [r11 + {sum}]",
    "movabs rcx, {multiplier}",
    "imul rax, rcx",
    "mov rdx, [rdi]",
    "add rax, rdx",
    "imul rax, rcx",
    "mov rdx, [rdi + 8]",
    "add rax, rdx",
    "mov [r11 + {sum}], rax",
    "jmp .Lslat_done",
    // Ask KVM; rbx holds the base.
    "slat_guest_ask:",
    "mov rdi, rbx",
    "xor eax, eax",
    "cpuid",
    "mov rbx, rdi",
    "jmp slat_guest_skip",
    // Take the time since the previous access.
    ".Lslat_done:",
    "SLAT_CLOCK",
    "mov rcx, rax",
    "sub rax, r13",
    "mov r13, rcx",
    // The clocks of two CPUs may differ: a negative time counts as 0.
    "jae .Lslat_forward",
    "xor eax, eax",
    ".Lslat_forward:",
    "cmp rax, [r11 + {threshold}]",
    "jbe .Lslat_count",
    "inc qword ptr [r11 + {stalls}]",
    "add [r11 + {stall_ticks}], rax",
    "cmp rax, [r11 + {longest}]",
    "jbe .Lslat_count",
    "mov [r11 + {longest}], rax",
    ".Lslat_count:",
    "or rax, 1",
    "bsr rcx, rax",
    "sub ecx, 3",
    "jb .Lslat_bucket",
    "shr rax, cl",
    "and eax, 7",
    "lea rax, [rax + rcx * 8 + 8]",
    ".Lslat_bucket:",
    "inc qword ptr [r11 + rax * 8 + {histogram}]",
    "SLAT_RECORD",
    // Set when the next step is due. A late step is due at once, and delays the later ones.
    "mov rax, [r11 + {period}]",
    "test rax, rax",
    "jz slat_guest_skip",
    "add rbp, rax",
    "cmp rbp, r13",
    "ja .Lslat_wait",
    "mov rbp, r13",
    "jmp slat_guest_skip",
    ".Lslat_wait:",
    "pause",
    "SLAT_CLOCK",
    "mov rcx, rax",
    "sub rcx, r13",
    "mov r13, rax",
    "jb .Lslat_spun",
    "cmp rcx, [r11 + {threshold}]",
    "jbe .Lslat_spun",
    "add [r11 + {idle_ticks}], rcx",
    ".Lslat_spun:",
    "cmp qword ptr [r11 + {stop}], 0",
    "jne slat_guest_skip",
    "cmp rax, rbp",
    "jb .Lslat_wait",
    // Toggling caches does nothing here. `Work::check` refuses work that asks for it.
    "slat_guest_toggle:",
    "slat_guest_skip:",
    "inc r12",
    "mov [r11 + {position}], r12",
    "dec rsi",
    "jz .Lslat_leave",
    "cmp qword ptr [r11 + {stop}], 0",
    "je .Lslat_step",
    ".Lslat_leave:",
    "mov [r11 + {left}], rsi",
    "mov [r11 + {index}], r9",
    "mov [r11 + {random}], r14",
    "mov [r11 + {accumulator}], r10",
    "out {port}, al",
    "jmp slat_guest_start",
    "slat_guest_end:",
    ".popsection";
    port = DONE_PORT,
);

pieces!();

/// Checks that `bytes` of test memory lie within the guest's physical addresses.
pub(crate) fn check(kvm: &Kvm, bytes: u64) -> Result<(), Error> {
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::os("KVM_GET_SUPPORTED_CPUID"))?;
    let sizes = cpuid.as_slice().iter().find(|entry| entry.function == 0x8000_0008);
    // A CPU without the leaf has 36 bits (SDM, volume 3, "Enumeration of Paging Features by
    // CPUID"). The guest's virtual addresses are the same numbers and must stay below 2^47.
    let bits = sizes.map_or(36, |entry| entry.eax & 0xff).min(47);
    let limit = (1u64 << bits) - MEMORY_GPA;
    if bytes > limit {
        let rule = format!("this CPU's guest addresses have room for {} MiB", limit >> 20);
        return Err(Error::invalid("memory", bytes, rule));
    }
    Ok(())
}

/// Does the setup of a VM that must come before its first vCPU.
pub(crate) fn set_up_vm(vm: &VmFd) -> Result<(), Error> {
    // On Intel's CPUs, KVM needs three pages for a task state segment, anywhere below 4 GiB and
    // outside of all memslots (api.rst, `KVM_SET_TSS_ADDR`). This is the address that VMMs commonly
    // use.
    vm.set_tss_address(0xfffb_d000).map_err(Error::os("KVM_SET_TSS_ADDR"))
}

/// Puts a vCPU in long mode and ring 3, at the start of the code.
pub(crate) fn set_up_vcpu(kvm: &Kvm, _vm: &VmFd, vcpu: &VcpuFd, mailbox: u64) -> Result<(), Error> {
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::os("KVM_GET_SUPPORTED_CPUID"))?;
    vcpu.set_cpuid2(&cpuid).map_err(Error::os("KVM_SET_CPUID2"))?;
    let mut sregs = vcpu.get_sregs().map_err(Error::os("KVM_GET_SREGS"))?;
    let data = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 0x2b,
        type_: 3, // data, writable, accessed
        present: 1,
        dpl: 3,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    };
    // Type 11: code, readable, accessed. L: 64-bit code.
    sregs.cs = kvm_segment { selector: 0x33, type_: 11, db: 0, l: 1, ..data };
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.cr3 = ROOT_GPA;
    sregs.cr0 = 0x8005_0033; // PG, AM, WP, NE, ET, MP, PE
    sregs.cr4 = 1 << 5; // PAE
    sregs.efer = 1 << 8 | 1 << 10; // LME, LMA
    vcpu.set_sregs(&sregs).map_err(Error::os("KVM_SET_SREGS"))?;
    let registers = kvm_regs {
        rip: CODE_GPA,
        // Bit 1 is always set; IOPL is 3; interrupts are disabled.
        rflags: 0x3002,
        r11: mailbox,
        rsp: mailbox + mailbox::STACK,
        ..Default::default()
    };
    vcpu.set_regs(&registers).map_err(Error::os("KVM_SET_REGS"))
}

/// Returns whether the exit is the one that the guest's code makes when it leaves. Entered again,
/// the code reloads its state from its mailbox.
pub(crate) fn is_done(exit: &VcpuExit<'_>) -> bool {
    matches!(exit, VcpuExit::IoOut(DONE_PORT, _))
}

/// Returns the frequency of the clock that the guest's code reads, in ticks per second.
pub(crate) fn ticks_per_second(vcpu: &VcpuFd) -> Result<f64, Error> {
    let khz = vcpu.get_tsc_khz().map_err(Error::os("KVM_GET_TSC_KHZ"))?;
    Ok(f64::from(khz) * 1e3)
}

/// Formats a vCPU's general registers, for an error message.
pub(crate) fn describe(vcpu: &VcpuFd) -> String {
    match vcpu.get_regs() {
        Ok(registers) => format!("{registers:x?}"),
        Err(error) => error.to_string(),
    }
}
