//! The arm64 guest: the host sets up EL1 with its MMU on.
//!
//! Stage 1 has the 4 KiB granule and maps addresses one to one as cacheable memory, like an
//! ordinary guest's. With the MMU off, accesses would be of device type. Access flags are set
//! beforehand, so that no walk has to set them. There are exception vectors, because without them
//! an exception of the guest would repeat forever on the fetch of its vector. They exit at another
//! address than the guest's code does, so that the run ends with an error that shows the registers.
//!
//! Sources: Arm ARM (DDI 0487), D8 "VMSAv8-64", `TCR_EL1`, `SCTLR_EL1`, `MAIR_EL1`, `CTR_EL0`, and
//! B2 "Synchronization and coherency issues between data and instruction accesses"; api.rst,
//! `KVM_ARM_VCPU_INIT`, `KVM_SET_ONE_REG`.

use super::MEMORY_GPA;
use super::{CODE_GPA, ROOT_GPA};
use crate::Error;
use crate::mailbox;
use kvm_bindings::{
    KVM_ARM_VCPU_PSCI_0_2, KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_U64,
    kvm_regs, kvm_vcpu_init, user_pt_regs,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::arch::asm;
use std::mem::offset_of;

/// Returns a table descriptor.
pub(crate) const fn table(gpa: u64) -> u64 {
    gpa | 0b11
}

/// Returns a block descriptor: normal memory (attribute 0), read and write for EL1 only, inner
/// shareable, accessed.
pub(crate) const fn page_2m(gpa: u64) -> u64 {
    gpa | 0x701
}

/// Returns the address that a descriptor has.
#[cfg(test)]
pub(crate) const fn address(entry: u64) -> u64 {
    entry & 0x0000_ffff_ffff_f000
}

/// Address and block descriptor of a device (attribute 1, never executed). No memory is there, so
/// that a store exits to the host.
pub(crate) const DEVICE: Option<(u64, u64)> =
    Some((DEVICE_GPA, DEVICE_GPA | 1 << 54 | 1 << 53 | 1 << 10 | 1 << 2 | 1));
/// End of the boot slot at most: below the device, and within the gigabyte that its table maps.
pub(crate) const BOOT_LIMIT: u64 = DEVICE_GPA;
/// Two `ret` instructions.
pub(crate) const RETURNS: u64 = 0xd65f_03c0_d65f_03c0;

const DEVICE_GPA: u64 = (1 << 30) - (2 << 20);

// Registers: x0 mailbox, x1 steps left, x2 base, x3 pages, x4 index, x5 random, x6 share, x7
// accumulator, x8 position, x9 clock at the last access, x10 address of the page, x11 when the next
// step is due, x17 CTR_EL0, x18 and x19 the generator's constants, x20 device,
// x21 to x24 what a question would take.
guest_asm!(
    ".pushsection .rodata.slat_guest, \"a\", %progbits",
    // Without a barrier, the counter may be read before earlier instructions complete.
    ".macro SLAT_CLOCK register",
    "isb",
    "mrs \\register, cntvct_el0",
    ".endm",
    // Records the clock of the last access, where a record is asked for.
    ".macro SLAT_RECORD",
    "ldr x14, [x0, #{record}]",
    "cbz x14, 2f",
    "str x9, [x14], #8",
    "str x14, [x0, #{record}]",
    "2:",
    ".endm",
    ".macro SLAT_COUNT word",
    "ldr x14, [x0, \\word]",
    "add x14, x14, #1",
    "str x14, [x0, \\word]",
    ".endm",
    ".balign 2048",
    "slat_guest_start:",
    // Make the instructions that other vCPUs wrote visible to this vCPU's fetches.
    "ic ialluis",
    "dsb ish",
    "isb",
    "ldr x1, [x0, #{left}]",
    "ldr x2, [x0, #{base}]",
    "ldr x3, [x0, #{pages}]",
    "ldr x4, [x0, #{index}]",
    "ldr x5, [x0, #{random}]",
    "ldr x6, [x0, #{share}]",
    "ldr x7, [x0, #{accumulator}]",
    "ldr x8, [x0, #{position}]",
    "mrs x17, ctr_el0",
    "ldr x18, .Lslat_multiplier",
    "ldr x19, .Lslat_increment",
    "ldr x20, .Lslat_device",
    "SLAT_CLOCK x9",
    "mov x11, x9",
    "SLAT_RECORD",
    ".Lslat_step:",
    "ldr x12, [x0, #{next}]",
    "br x12",
    // Choose the page.
    "slat_guest_sequential:",
    "mov x10, x4",
    "add x4, x4, #1",
    "cmp x4, x3",
    "b.lo .Lslat_page",
    "mov x4, xzr",
    "b .Lslat_page",
    "slat_guest_random:",
    "madd x5, x5, x18, x19",
    "umulh x10, x5, x3",
    "b .Lslat_page",
    "slat_guest_listed:",
    "ldr x12, [x0, #{list}]",
    "ldr x10, [x12, x4, lsl #3]",
    "add x4, x4, #1",
    "ldr x12, [x0, #{listed}]",
    "cmp x4, x12",
    "b.lo .Lslat_page",
    "mov x4, xzr",
    "b .Lslat_page",
    "slat_guest_hot:",
    "madd x5, x5, x18, x19",
    "mov x12, #{whole}",
    "umulh x12, x5, x12",
    "mov x10, x3",
    "ldr x13, [x0, #{hot_share}]",
    "cmp x12, x13",
    "b.hs .Lslat_cold",
    "ldr x10, [x0, #{hot_pages}]",
    ".Lslat_cold:",
    "madd x5, x5, x18, x19",
    "umulh x10, x5, x10",
    ".Lslat_page:",
    "ldr x12, [x0, #{shift}]",
    "lsl x10, x10, x12",
    "add x10, x10, x2",
    "add x7, x7, x6",
    "cmp x7, #{whole}",
    "b.lo .Lslat_miss",
    "sub x7, x7, #{whole}",
    "ldr x12, [x0, #{hit}]",
    "br x12",
    ".Lslat_miss:",
    "ldr x12, [x0, #{miss}]",
    "br x12",
    // Touch the page: the measured accesses.
    "slat_guest_write:",
    "str x8, [x10]",
    "str x10, [x10, #8]",
    "ldr x12, [x0, #{returns}]",
    "add x13, x10, #16",
    "str x12, [x13]",
    // With CTR_EL0.IDC, instruction fetches see the data without a clean of the cache.
    "tbnz x17, #28, .Lslat_done",
    "dc cvau, x13",
    "b .Lslat_done",
    "slat_guest_execute:",
    "add x12, x10, #16",
    "blr x12",
    "b .Lslat_done",
    // Ask KVM for SMCCC_VERSION; the answer takes x0 to x3.
    "slat_guest_ask:",
    "mov x21, x0",
    "mov x22, x1",
    "mov x23, x2",
    "mov x24, x3",
    "mov x0, #0x80000000",
    "hvc #0",
    "mov x0, x21",
    "mov x1, x22",
    "mov x2, x23",
    "mov x3, x24",
    "b slat_guest_skip",
    // Clear and set M and C. In between, the only memory accesses are instruction fetches.
    "slat_guest_toggle:",
    "mrs x12, sctlr_el1",
    "mov x13, #5",
    "bic x13, x12, x13",
    "msr sctlr_el1, x13",
    "isb",
    "msr sctlr_el1, x12",
    "isb",
    "b .Lslat_done",
    "slat_guest_read:",
    "ldr x12, [x10, #8]",
    "cmp x12, x10",
    "b.eq .Lslat_done",
    "SLAT_COUNT #{wrong}",
    "b .Lslat_done",
    "slat_guest_sum:",
    "ldr x12, [x10]",
    "ldr x13, [x10, #8]",
    "ldr x14, [x0, #{sum}]",
    "madd x14, x14, x18, x12",
    "madd x14, x14, x18, x13",
    "str x14, [x0, #{sum}]",
    // Take the time since the previous access.
    ".Lslat_done:",
    "SLAT_CLOCK x12",
    "sub x13, x12, x9",
    "mov x9, x12",
    "ldr x14, [x0, #{threshold}]",
    "cmp x13, x14",
    "b.ls .Lslat_count",
    "SLAT_COUNT #{stalls}",
    "ldr x14, [x0, #{stall_ticks}]",
    "add x14, x14, x13",
    "str x14, [x0, #{stall_ticks}]",
    "ldr x14, [x0, #{longest}]",
    "cmp x13, x14",
    "b.ls .Lslat_count",
    "str x13, [x0, #{longest}]",
    ".Lslat_count:",
    "orr x13, x13, #1",
    "clz x14, x13",
    "mov x15, #63",
    "sub x14, x15, x14",
    "subs x14, x14, #3",
    "b.lo .Lslat_bucket",
    "lsr x13, x13, x14",
    "and x13, x13, #7",
    "add x13, x13, x14, lsl #3",
    "add x13, x13, #8",
    ".Lslat_bucket:",
    "add x15, x0, #{histogram}",
    "ldr x14, [x15, x13, lsl #3]",
    "add x14, x14, #1",
    "str x14, [x15, x13, lsl #3]",
    "SLAT_RECORD",
    // Set when the next step is due. A late step is due at once, and delays the later ones.
    "ldr x12, [x0, #{period}]",
    "cbz x12, slat_guest_skip",
    "add x11, x11, x12",
    "cmp x11, x9",
    "b.hi .Lslat_wait",
    "mov x11, x9",
    "b slat_guest_skip",
    ".Lslat_wait:",
    "yield",
    "SLAT_CLOCK x12",
    "sub x13, x12, x9",
    "mov x9, x12",
    "ldr x14, [x0, #{threshold}]",
    "cmp x13, x14",
    "b.ls .Lslat_spun",
    "ldr x14, [x0, #{idle_ticks}]",
    "add x14, x14, x13",
    "str x14, [x0, #{idle_ticks}]",
    ".Lslat_spun:",
    "ldr x12, [x0, #{stop}]",
    "cbnz x12, slat_guest_skip",
    "cmp x9, x11",
    "b.lo .Lslat_wait",
    "slat_guest_skip:",
    "add x8, x8, #1",
    "add x12, x0, #{position}",
    "stlr x8, [x12]",
    // Order the next step's writes after the new position.
    "dmb ishst",
    "subs x1, x1, #1",
    "b.eq .Lslat_leave",
    "ldr x12, [x0, #{stop}]",
    "cbz x12, .Lslat_step",
    ".Lslat_leave:",
    "str x1, [x0, #{left}]",
    "str x4, [x0, #{index}]",
    "str x5, [x0, #{random}]",
    "str x7, [x0, #{accumulator}]",
    "str xzr, [x20]",
    "b slat_guest_start",
    ".balign 8",
    ".Lslat_multiplier:",
    ".quad {multiplier}",
    ".Lslat_increment:",
    ".quad {increment}",
    ".Lslat_device:",
    ".quad {device}",
    ".balign 2048",
    // Sixteen equal vectors of 128 bytes each.
    "slat_guest_vectors:",
    ".rept 16",
    "ldr x20, .Lslat_device",
    "str xzr, [x20, #8]",
    "b .",
    ".balign 128",
    ".endr",
    "slat_guest_end:",
    ".popsection";
    device = DEVICE_GPA,
);

pieces!();

unsafe extern "C" {
    static slat_guest_vectors: u8;
}

/// Returns the number of a system register for `KVM_SET_ONE_REG`.
const fn system(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    let encoding = op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2;
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM64_SYSREG as u64 | encoding
}

/// Returns the number of a core register, from its offset in `kvm_regs`.
const fn core(offset: usize) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | offset as u64 / 4
}

const SCTLR_EL1: u64 = system(3, 0, 1, 0, 0);
const TTBR0_EL1: u64 = system(3, 0, 2, 0, 0);
const TCR_EL1: u64 = system(3, 0, 2, 0, 2);
const MAIR_EL1: u64 = system(3, 0, 10, 2, 0);
const VBAR_EL1: u64 = system(3, 0, 12, 0, 0);
const ESR_EL1: u64 = system(3, 0, 5, 2, 0);
const FAR_EL1: u64 = system(3, 0, 6, 0, 0);
const ID_AA64MMFR0_EL1: u64 = system(3, 0, 0, 7, 0);
const X0: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, regs));
const PC: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pc));
const SP_EL1: u64 = core(offset_of!(kvm_regs, sp_el1));
const ELR_EL1: u64 = core(offset_of!(kvm_regs, elr_el1));

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
    // A VM has 40 bits by default (api.rst, `KVM_CREATE_VM`), and stage 1 maps 48 bits.
    let bits = match kvm.get_host_ipa_limit() {
        1.. => kvm.get_host_ipa_limit().clamp(32, 48) as u32,
        _ => 40,
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

/// Puts a vCPU at the start of the code, in EL1 (its level after reset), with its MMU on.
pub(crate) fn set_up_vcpu(_kvm: &Kvm, vm: &VmFd, vcpu: &VcpuFd, mailbox: u64) -> Result<(), Error> {
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init).map_err(Error::os("KVM_ARM_PREFERRED_TARGET"))?;
    init.features[0] |= 1 << KVM_ARM_VCPU_PSCI_0_2;
    vcpu.vcpu_init(&init).map_err(Error::os("KVM_ARM_VCPU_INIT"))?;

    // Of the encoded sizes of a physical address, 5 is 48 bits, the most without FEAT_LPA.
    let size = (get(vcpu, ID_AA64MMFR0_EL1)? & 0xf).min(5);
    // T0SZ 16 (48 bits), walks inner shareable and cacheable, 4 KiB granule, no upper address
    // range.
    let tcr = size << 32 | 1 << 23 | 3 << 12 | 1 << 10 | 1 << 8 | 16;
    let vectors = (&raw const slat_guest_vectors).addr() - code().as_ptr().addr();
    for (register, value) in [
        // Attribute 0 is normal, write-back; attribute 1 is device, nGnRnE.
        (MAIR_EL1, 0xff),
        (TCR_EL1, tcr),
        (TTBR0_EL1, ROOT_GPA),
        (VBAR_EL1, CODE_GPA + vectors as u64),
        // The bits that are RES1, and I, C and M.
        (SCTLR_EL1, 0x30d0_0800 | 1 << 12 | 1 << 2 | 1),
        (X0, mailbox),
        (PC, CODE_GPA),
        (SP_EL1, mailbox + mailbox::STACK),
    ] {
        set(vcpu, register, value)?;
    }
    Ok(())
}

/// Returns whether the exit is the one that the guest's code makes when it leaves. Entered again,
/// the code reloads its state from its mailbox.
pub(crate) fn is_done(exit: &VcpuExit<'_>) -> bool {
    matches!(exit, VcpuExit::MmioWrite(DEVICE_GPA, _))
}

/// Returns the frequency of the clock that the guest's code reads, in ticks per second.
pub(crate) fn ticks_per_second(_vcpu: &VcpuFd) -> Result<f64, Error> {
    let frequency: u64;
    // SAFETY: the instruction reads a register that Linux lets every process read
    // (`CNTKCTL_EL1.EL0VCTEN`), and has no other effect.
    unsafe {
        asm!("mrs {}, cntfrq_el0", out(reg) frequency, options(nomem, nostack, preserves_flags))
    };
    match frequency {
        0 => Err(Error::invalid("CNTFRQ_EL0", 0, "must be the counter's frequency (firmware)")),
        frequency => Ok(frequency as f64),
    }
}

/// Formats the registers of a vCPU that locate its state, for an error message.
pub(crate) fn describe(vcpu: &VcpuFd) -> String {
    let registers =
        [("pc", PC), ("x0", X0), ("elr_el1", ELR_EL1), ("esr_el1", ESR_EL1), ("far_el1", FAR_EL1)];
    let shown = registers.map(|(name, register)| match get(vcpu, register) {
        Ok(value) => format!("{name} {value:#x}"),
        Err(error) => format!("{name} {error}"),
    });
    shown.join(", ")
}
