//! The RISC-V guest: the host sets up VS-mode with its translation on.
//!
//! `satp` has Sv48, whose tables have the same form as those of other architectures, and map
//! addresses one to one. Accessed and dirty bits are set beforehand, so that no walk has to set
//! them. There is a trap vector, because without it a trap of the guest would repeat forever on the
//! fetch of its vector. It exits at another address than the guest's code does, so that the run
//! ends with an error that shows the registers.
//!
//! Sources: RISC-V privileged specification, "Supervisor-level ISA" (`satp`, `stvec`, Sv48) and
//! "Hypervisor extension"; RISC-V SBI specification, base extension; api.rst, `KVM_SET_ONE_REG`,
//! `KVM_SET_MP_STATE`.

use super::MEMORY_GPA;
use super::{CODE_GPA, ROOT_GPA};
use crate::Error;
use crate::mailbox;
use kvm_bindings::{
    KVM_CAP_VM_GPA_BITS, KVM_MP_STATE_RUNNABLE, KVM_REG_RISCV, KVM_REG_RISCV_CORE,
    KVM_REG_RISCV_CSR, KVM_REG_RISCV_TIMER, KVM_REG_SIZE_U64, kvm_mp_state,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

/// Returns the entry that refers to a table: valid, and no right.
pub(crate) const fn table(gpa: u64) -> u64 {
    gpa >> 12 << 10 | 1
}

/// Returns the entry of a page of 2 MiB: dirty, accessed, global, and all rights for the
/// supervisor.
pub(crate) const fn page_2m(gpa: u64) -> u64 {
    gpa >> 12 << 10 | 0xef
}

/// Returns the address that an entry has.
#[cfg(test)]
pub(crate) const fn address(entry: u64) -> u64 {
    entry >> 10 << 12 & 0x0000_ffff_ffff_f000
}

/// Address and entry of a device. No memory is there, so that a store exits to the host.
pub(crate) const DEVICE: Option<(u64, u64)> = Some((DEVICE_GPA, page_2m(DEVICE_GPA)));
/// End of the boot slot at most: below the device, and within the gigabyte that its table maps.
pub(crate) const BOOT_LIMIT: u64 = DEVICE_GPA;
/// Two `ret` instructions.
pub(crate) const RETURNS: u64 = 0x0000_8067_0000_8067;

const DEVICE_GPA: u64 = (1 << 30) - (2 << 20);

// Registers: a0 mailbox, a1 steps left, a2 base, a3 pages, a4 index, a5 random, s0 share, s1
// accumulator, s2 position, s3 clock at the last access, s4 address of the page, s5 when the next
// step is due, s6 and s7 the generator's constants, s8 device, s9 100, s10 and s11 what a question
// would take.
guest_asm!(
    ".pushsection .rodata.slat_guest, \"a\", @progbits",
    ".option push",
    // The linker must not move what is copied.
    ".option norelax",
    // Where the compiler makes several units, the assembler does not know the target's features.
    ".option arch, +m",
    ".macro SLAT_CLOCK register",
    "rdtime \\register",
    ".endm",
    // Records the clock of the last access, where a record is asked for.
    ".macro SLAT_RECORD",
    "ld t4, {record}(a0)",
    "beqz t4, 2f",
    "sd s3, 0(t4)",
    "addi t4, t4, 8",
    "sd t4, {record}(a0)",
    "2:",
    ".endm",
    ".macro SLAT_COUNT word",
    "ld t4, \\word(a0)",
    "addi t4, t4, 1",
    "sd t4, \\word(a0)",
    ".endm",
    ".balign 8",
    "slat_guest_start:",
    // Make the instructions that other vCPUs wrote visible to this vCPU's fetches.
    "fence rw, rw",
    "fence.i",
    "ld a1, {left}(a0)",
    "ld a2, {base}(a0)",
    "ld a3, {pages}(a0)",
    "ld a4, {index}(a0)",
    "ld a5, {random}(a0)",
    "ld s0, {share}(a0)",
    "ld s1, {accumulator}(a0)",
    "ld s2, {position}(a0)",
    "ld s6, .Lslat_multiplier",
    "ld s7, .Lslat_increment",
    "ld s8, .Lslat_device",
    "li s9, {whole}",
    "SLAT_CLOCK s3",
    "mv s5, s3",
    "SLAT_RECORD",
    ".Lslat_step:",
    "ld t0, {next}(a0)",
    "jr t0",
    // Choose the page.
    "slat_guest_sequential:",
    "mv s4, a4",
    "addi a4, a4, 1",
    "bltu a4, a3, .Lslat_page",
    "li a4, 0",
    "j .Lslat_page",
    "slat_guest_random:",
    "mul a5, a5, s6",
    "add a5, a5, s7",
    "mulhu s4, a5, a3",
    "j .Lslat_page",
    "slat_guest_listed:",
    "ld t0, {list}(a0)",
    "slli t1, a4, 3",
    "add t0, t0, t1",
    "ld s4, 0(t0)",
    "addi a4, a4, 1",
    "ld t0, {listed}(a0)",
    "bltu a4, t0, .Lslat_page",
    "li a4, 0",
    "j .Lslat_page",
    "slat_guest_hot:",
    "mul a5, a5, s6",
    "add a5, a5, s7",
    "mulhu t0, a5, s9",
    "mv s4, a3",
    "ld t1, {hot_share}(a0)",
    "bgeu t0, t1, .Lslat_cold",
    "ld s4, {hot_pages}(a0)",
    ".Lslat_cold:",
    "mul a5, a5, s6",
    "add a5, a5, s7",
    "mulhu s4, a5, s4",
    ".Lslat_page:",
    "ld t0, {shift}(a0)",
    "sll s4, s4, t0",
    "add s4, s4, a2",
    "add s1, s1, s0",
    "bltu s1, s9, .Lslat_miss",
    "sub s1, s1, s9",
    "ld t0, {hit}(a0)",
    "jr t0",
    ".Lslat_miss:",
    "ld t0, {miss}(a0)",
    "jr t0",
    // Touch the page: the measured accesses.
    "slat_guest_write:",
    "sd s2, 0(s4)",
    "sd s4, 8(s4)",
    "ld t0, {returns}(a0)",
    "sd t0, 16(s4)",
    "j .Lslat_done",
    "slat_guest_execute:",
    // Fetches of this vCPU see what was written before.
    "fence.i",
    "addi t0, s4, 16",
    "jalr t0",
    "j .Lslat_done",
    // Ask KVM for the version of the SBI; the answer takes a0 and a1.
    "slat_guest_ask:",
    "mv s10, a0",
    "mv s11, a1",
    "li a6, 0",
    "li a7, 0x10",
    "ecall",
    "mv a0, s10",
    "mv a1, s11",
    "j slat_guest_skip",
    // No guest of RISC-V can switch its caches off: no work has this.
    "slat_guest_toggle:",
    "j .Lslat_done",
    "slat_guest_read:",
    "ld t0, 8(s4)",
    "beq t0, s4, .Lslat_done",
    "SLAT_COUNT {wrong}",
    "j .Lslat_done",
    "slat_guest_sum:",
    "ld t0, 0(s4)",
    "ld t1, 8(s4)",
    "ld t2, {sum}(a0)",
    "mul t2, t2, s6",
    "add t2, t2, t0",
    "mul t2, t2, s6",
    "add t2, t2, t1",
    "sd t2, {sum}(a0)",
    // Take the time since the previous access.
    ".Lslat_done:",
    "SLAT_CLOCK t0",
    "sub t1, t0, s3",
    "mv s3, t0",
    "ld t2, {threshold}(a0)",
    "bgeu t2, t1, .Lslat_count",
    "SLAT_COUNT {stalls}",
    "ld t2, {stall_ticks}(a0)",
    "add t2, t2, t1",
    "sd t2, {stall_ticks}(a0)",
    "ld t2, {longest}(a0)",
    "bgeu t2, t1, .Lslat_count",
    "sd t1, {longest}(a0)",
    ".Lslat_count:",
    // t2 becomes the number of the highest bit that is set, by halves: Zbb is no part of rv64gc.
    "ori t1, t1, 1",
    "mv t0, t1",
    "li t2, 0",
    ".irp half, 32, 16, 8, 4, 2, 1",
    "srli t3, t0, \\half",
    "beqz t3, .Lslat_half\\half",
    "mv t0, t3",
    "addi t2, t2, \\half",
    ".Lslat_half\\half:",
    ".endr",
    "addi t2, t2, -3",
    "bltz t2, .Lslat_bucket",
    "srl t1, t1, t2",
    "andi t1, t1, 7",
    "slli t3, t2, 3",
    "add t1, t1, t3",
    "addi t1, t1, 8",
    ".Lslat_bucket:",
    "li t3, {histogram}",
    "add t3, t3, a0",
    "slli t1, t1, 3",
    "add t3, t3, t1",
    "ld t0, 0(t3)",
    "addi t0, t0, 1",
    "sd t0, 0(t3)",
    "SLAT_RECORD",
    // Set when the next step is due. A late step is due at once, and delays the later ones.
    "ld t0, {period}(a0)",
    "beqz t0, slat_guest_skip",
    "add s5, s5, t0",
    "bltu s3, s5, .Lslat_wait",
    "mv s5, s3",
    "j slat_guest_skip",
    ".Lslat_wait:",
    "SLAT_CLOCK t0",
    "sub t1, t0, s3",
    "mv s3, t0",
    "ld t2, {threshold}(a0)",
    "bgeu t2, t1, .Lslat_spun",
    "ld t2, {idle_ticks}(a0)",
    "add t2, t2, t1",
    "sd t2, {idle_ticks}(a0)",
    ".Lslat_spun:",
    "ld t0, {stop}(a0)",
    "bnez t0, slat_guest_skip",
    "bltu s3, s5, .Lslat_wait",
    "slat_guest_skip:",
    "addi s2, s2, 1",
    // The position is a release; the next step's writes come after it.
    "fence rw, w",
    "sd s2, {position}(a0)",
    "fence w, w",
    "addi a1, a1, -1",
    "beqz a1, .Lslat_leave",
    "ld t0, {stop}(a0)",
    "beqz t0, .Lslat_step",
    ".Lslat_leave:",
    "sd a1, {left}(a0)",
    "sd a4, {index}(a0)",
    "sd a5, {random}(a0)",
    "sd s1, {accumulator}(a0)",
    "sd zero, 0(s8)",
    "j slat_guest_start",
    ".balign 8",
    ".Lslat_multiplier:",
    ".quad {multiplier}",
    ".Lslat_increment:",
    ".quad {increment}",
    ".Lslat_device:",
    ".quad {device}",
    // Every trap comes here.
    "slat_guest_vector:",
    "ld s8, .Lslat_device",
    "sd zero, 8(s8)",
    "j .",
    "slat_guest_end:",
    ".option pop",
    ".popsection";
    device = DEVICE_GPA,
);

pieces!();

unsafe extern "C" {
    static slat_guest_vector: u8;
}

/// Returns the number of a register for `KVM_SET_ONE_REG`: its place in its structure.
const fn register(kind: u32, place: u64) -> u64 {
    KVM_REG_RISCV as u64 | KVM_REG_SIZE_U64 | kind as u64 | place
}

/// `struct kvm_riscv_core`: pc, ra, sp, gp, tp, t0 to t2, s0, s1, a0 to a7, s2 to s11, t3 to t6,
/// mode.
const PC: u64 = register(KVM_REG_RISCV_CORE, 0);
const SP: u64 = register(KVM_REG_RISCV_CORE, 2);
const A0: u64 = register(KVM_REG_RISCV_CORE, 10);
const MODE: u64 = register(KVM_REG_RISCV_CORE, 32);
/// `struct kvm_riscv_csr`: sstatus, sie, stvec, sscratch, sepc, scause, stval, sip, satp.
const STVEC: u64 = register(KVM_REG_RISCV_CSR, 2);
const SEPC: u64 = register(KVM_REG_RISCV_CSR, 4);
const SCAUSE: u64 = register(KVM_REG_RISCV_CSR, 5);
const STVAL: u64 = register(KVM_REG_RISCV_CSR, 6);
const SATP: u64 = register(KVM_REG_RISCV_CSR, 8);
/// `struct kvm_riscv_timer`: frequency first.
const FREQUENCY: u64 = register(KVM_REG_RISCV_TIMER, 0);

fn set(vcpu: &VcpuFd, register: u64, value: u64) -> Result<(), Error> {
    vcpu.set_one_reg(register, &value.to_le_bytes()).map_err(Error::os("KVM_SET_ONE_REG"))?;
    Ok(())
}

fn get(vcpu: &VcpuFd, register: u64) -> Result<u64, Error> {
    let mut bytes = [0; 8];
    vcpu.get_one_reg(register, &mut bytes).map_err(Error::os("KVM_GET_ONE_REG"))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Checks that `bytes` of test memory lie within the guest's physical addresses.
pub(crate) fn check(kvm: &Kvm, bytes: u64) -> Result<(), Error> {
    // Sv39x4 has 41 bits; addresses of the guest's own stage have 47 that are not sign-extended.
    let bits = match kvm.check_extension_raw(KVM_CAP_VM_GPA_BITS.into()) {
        bits @ 1.. => (bits as u32).clamp(32, 47),
        _ => 41,
    };
    let limit = (1u64 << bits).saturating_sub(MEMORY_GPA);
    if bytes > limit {
        let rule = format!("this CPU's guest addresses have room for {} MiB", limit >> 20);
        return Err(Error::invalid("memory", bytes, rule));
    }
    Ok(())
}

/// Does the setup of a VM that must come before its first vCPU.
pub(crate) fn set_up_vm(_vm: &VmFd) -> Result<(), Error> {
    Ok(())
}

/// Puts a vCPU at the start of the code, in VS-mode, with its translation on.
pub(crate) fn set_up_vcpu(
    _kvm: &Kvm,
    _vm: &VmFd,
    vcpu: &VcpuFd,
    mailbox: u64,
) -> Result<(), Error> {
    /// `satp.MODE` of Sv48.
    const SV48: u64 = 9 << 60;
    let vector = (&raw const slat_guest_vector).addr() - code().as_ptr().addr();
    for (register, value) in [
        (SATP, SV48 | ROOT_GPA >> 12),
        (STVEC, CODE_GPA + vector as u64),
        (MODE, 1),
        (A0, mailbox),
        (PC, CODE_GPA),
        (SP, mailbox + mailbox::STACK),
    ] {
        set(vcpu, register, value)?;
    }
    // All vCPUs but the first wait for an SBI call that starts them.
    vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })
        .map_err(Error::os("KVM_SET_MP_STATE"))
}

/// Returns whether the exit is the one that the guest's code makes when it leaves. Entered again,
/// the code reloads its state from its mailbox.
pub(crate) fn is_done(exit: &VcpuExit<'_>) -> bool {
    matches!(exit, VcpuExit::MmioWrite(DEVICE_GPA, _))
}

/// Returns the frequency of the clock that the guest's code reads, in ticks per second.
pub(crate) fn ticks_per_second(vcpu: &VcpuFd) -> Result<f64, Error> {
    match get(vcpu, FREQUENCY)? {
        0 => Err(Error::invalid("timebase frequency", 0, "must be the timer's frequency")),
        frequency => Ok(frequency as f64),
    }
}

/// Formats the registers of a vCPU that locate its state, for an error message.
pub(crate) fn describe(vcpu: &VcpuFd) -> String {
    let registers = [("pc", PC), ("a0", A0), ("sepc", SEPC), ("scause", SCAUSE), ("stval", STVAL)];
    let shown = registers.map(|(name, register)| match get(vcpu, register) {
        Ok(value) => format!("{name} {value:#x}"),
        Err(error) => format!("{name} {error}"),
    });
    shown.join(", ")
}
