//! A CPU at EL2: its registers, and the way into the guest.

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
    /// A register of an instruction: 31 is zero.
    pub fn get(&self, number: u8) -> u64 {
        self.x.get(number as usize).copied().unwrap_or(0)
    }

    /// As above: what is written to 31 is gone.
    pub fn set(&mut self, number: u8, value: u64) {
        if let Some(register) = self.x.get_mut(number as usize) {
            *register = value;
        }
    }
}

/// What made a CPU leave the guest, by vector.
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

/// Runs the guest until it leaves.
///
/// # Safety
/// VTTBR_EL2 holds tables that let the guest reach its own memory only, and ELR_EL2 and SPSR_EL2
/// its state at EL1 or EL0.
pub unsafe fn run(registers: &mut Registers) -> Left {
    // SAFETY: `enter` keeps what the C ABI has it keep, writes to `registers`, which outlive the
    // call, and returns by the vectors of `boot.s`. What the guest may do is the caller's promise.
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

/// The counter, whose frequency is that of `CNTFRQ_EL0`.
pub fn now() -> u64 {
    isb();
    CNTPCT_EL0.get()
}

/// Ticks of a second.
pub fn frequency() -> u64 {
    CNTFRQ_EL0.get()
}

pub fn isb() {
    aarch64_cpu::asm::barrier::isb(aarch64_cpu::asm::barrier::SY);
}

/// Lets other CPUs go on: an emulator that runs them in turns gives them the turn.
pub fn relax() {
    // SAFETY: a hint.
    unsafe { asm!("yield", options(nomem, nostack)) }
}

/// Interrupts all other CPUs that have interrupt 0 of software enabled, as Linux has: a guest that
/// waits for one goes on.
pub fn wake_others() {
    const SYSTEM_REGISTERS: u64 = 1 << 0;
    const ALL_OTHERS: u64 = 1 << 40;
    // ICC_SRE_EL2, ICC_SGI1R_EL1.
    write!("s3_4_c12_c9_5", SYSTEM_REGISTERS);
    isb();
    write!("s3_0_c12_c11_5", ALL_OTHERS);
    isb();
}

/// ESR, ELR and FAR of an exception that EL2 itself took.
pub fn own_exception() -> (u64, u64, u64) {
    (read!("esr_el2"), read!("elr_el2"), read!("far_el2"))
}

const fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0xf
}

/// What the guest may use without leaving: everything but what [`super::vcpu`] traps. Interrupts
/// and timers go straight to it.
pub fn open_to_guest() {
    // No trap of FP, SIMD, SVE or SME; RES1 as the manual has it.
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
        // HCRX_EL2: the features that it lets through are those that Linux finds by their ID
        // registers; MSCEn is one.
        write!("s3_4_c1_c2_2", 1 << 11);
    }
    // Timers, counters, performance counters.
    write!("cnthctl_el2", 0b11);
    write!("cntvoff_el2", 0);
    let counters = read!("pmcr_el0") >> 11 & 0x1f;
    write!("mdcr_el2", counters);
    write!("hstr_el2", 0);
    // The guest sees the CPU that it has.
    write!("vpidr_el2", read!("midr_el1"));
    write!("vmpidr_el2", read!("mpidr_el1"));
    // ICC_SRE_EL2: the GIC's registers, also for EL1. ICH_HCR_EL2: no virtual ones.
    write!("s3_4_c12_c9_5", 0xf);
    isb();
    write!("s3_4_c12_c11_0", 0);
    isb();
}

/// EL1 as after a reset: MMU and caches off.
pub fn reset_el1() {
    write!("sctlr_el1", 0x30d0_0800);
    write!("cpacr_el1", 0);
    write!("vbar_el1", 0);
    write!("cntkctl_el1", 0);
    isb();
}
