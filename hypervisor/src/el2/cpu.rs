//! A CPU at EL2: its registers, and the entry into the guest.

use aarch64_cpu::registers::*;
use core::arch::{asm, global_asm};

global_asm!(include_str!("boot.s"));

/// The guest's general registers, as `boot.s` saves and loads them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    pub x: [u64; 31],
}

impl Registers {
    /// Returns a register by its number in an instruction, where 31 is XZR.
    pub fn get(&self, number: u8) -> u64 {
        self.x.get(number as usize).copied().unwrap_or(0)
    }

    /// Sets a register by its number in an instruction; a write to 31 has no effect.
    pub fn set(&mut self, number: u8, value: u64) {
        if let Some(register) = self.x.get_mut(number as usize) {
            *register = value;
        }
    }
}

/// Reason for which a CPU left the guest, by the vector that it took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Left {
    Synchronous,
    Interrupt,
    SystemError,
}

unsafe extern "C" {
    fn enter(registers: *mut Registers) -> u64;
    pub fn start_secondary();
}

/// Runs the guest until the CPU leaves it.
///
/// # Safety
/// 1. VTTBR_EL2 has tables by which the guest reaches its own memory only.
/// 2. ELR_EL2 and SPSR_EL2 have the guest's state, at EL1 or EL0.
pub unsafe fn run(registers: &mut Registers) -> Left {
    // SAFETY: `enter` preserves the registers of the C ABI, writes to `registers`, which outlives
    // the call, and returns by the vectors of `boot.s`. The caller promises 1 and 2, which limit
    // what the guest can do.
    match unsafe { enter(registers) } {
        0 => Left::Synchronous,
        3 => Left::SystemError,
        _ => Left::Interrupt,
    }
}

/// Reads a system register by its name, or as `s3_0_c1_c0_0`.
macro_rules! read {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: reading one of the registers that this crate names changes nothing.
        unsafe {
            core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nomem, nostack));
        }
        value
    }};
}
pub(crate) use read;

/// Writes a system register of EL1 or of a guest's view, which the hypervisor's own code does not
/// depend on.
macro_rules! write {
    ($name:literal, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: the register governs EL1 and EL0, or how they are trapped: not how this code
        // runs.
        unsafe {
            core::arch::asm!(concat!("msr ", $name, ", {}"), in(reg) value, options(nostack));
        }
    }};
}
pub(crate) use write;

/// Returns the value of the physical counter, whose frequency is [`frequency`].
pub fn now() -> u64 {
    isb();
    CNTPCT_EL0.get()
}

/// Returns the frequency of the counter, in Hz.
pub fn frequency() -> u64 {
    CNTFRQ_EL0.get()
}

pub fn isb() {
    aarch64_cpu::asm::barrier::isb(aarch64_cpu::asm::barrier::SY);
}

/// Yields: an emulator that runs CPUs in turns runs another CPU.
pub fn relax() {
    // SAFETY: the instruction is a hint.
    unsafe { asm!("yield", options(nomem, nostack)) }
}

/// Sends the software-generated interrupt 0 to all other CPUs. Linux has it enabled, so a vCPU that
/// waits for an interrupt continues.
pub fn wake_others() {
    const SYSTEM_REGISTERS: u64 = 1 << 0;
    const ALL_OTHERS: u64 = 1 << 40;
    // ICC_SRE_EL2, ICC_SGI1R_EL1.
    write!("s3_4_c12_c9_5", SYSTEM_REGISTERS);
    isb();
    write!("s3_0_c12_c11_5", ALL_OTHERS);
    isb();
}

/// Returns ESR, ELR and FAR of an exception that EL2 itself took.
pub fn own_exception() -> (u64, u64, u64) {
    (read!("esr_el2"), read!("elr_el2"), read!("far_el2"))
}

const fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0xf
}

/// Lets the guest use everything without an exit but what [`super::vcpu`] traps. The guest takes
/// interrupts and timers directly.
pub fn open_to_guest() {
    // Does not trap FP, SIMD, SVE or SME. The other bits are RES1.
    write!("cptr_el2", 0x22ff);
    let (pfr0, pfr1) = (read!("id_aa64pfr0_el1"), read!("id_aa64pfr1_el1"));
    let mmfr1 = read!("id_aa64mmfr1_el1");
    isb();
    if field(pfr0, 32) != 0 {
        // ZCR_EL2: all vector lengths.
        write!("s3_4_c1_c2_0", 0xf);
    }
    if field(pfr1, 24) != 0 {
        // SMCR_EL2: all lengths, FA64.
        write!("s3_4_c1_c2_6", 0x8000_000f);
    }
    if field(mmfr1, 40) != 0 {
        // HCRX_EL2: enables MSCEn, because Linux uses this feature where the ID registers have it.
        write!("s3_4_c1_c2_2", 1 << 11);
    }
    // The guest uses timers, counters and performance counters without traps.
    write!("cnthctl_el2", 0b11);
    write!("cntvoff_el2", 0);
    let counters = read!("pmcr_el0") >> 11 & 0x1f;
    write!("mdcr_el2", counters);
    write!("hstr_el2", 0);
    // The guest sees the CPU that it has.
    write!("vpidr_el2", read!("midr_el1"));
    write!("vmpidr_el2", read!("mpidr_el1"));
    // ICC_SRE_EL2: EL2 and EL1 use the GIC's system registers. ICH_HCR_EL2: no virtual CPU
    // interface.
    write!("s3_4_c12_c9_5", 0xf);
    isb();
    write!("s3_4_c12_c11_0", 0);
    isb();
}

/// Resets EL1: its MMU and caches are off.
pub fn reset_el1() {
    write!("sctlr_el1", 0x30d0_0800);
    write!("cpacr_el1", 0);
    write!("vbar_el1", 0);
    write!("cntkctl_el1", 0);
    isb();
}
