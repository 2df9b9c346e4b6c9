//! Instructions that invalidate, for the hypervisor and for the stick for real machines.

use core::arch::asm;
use slat::format::arm64::tlbi::Instruction;

/// Executes one instruction of a sequence, for the VMID in VTTBR_EL2.
pub fn execute(instruction: Instruction) {
    macro_rules! plain {
        ($text:literal) => {
            // SAFETY: a barrier, or an invalidation of the guest's translations, which removes TLB
            // entries and changes nothing else.
            unsafe { asm!($text, options(nostack)) }
        };
    }
    macro_rules! with {
        ($text:literal, $operand:expr) => {
            // SAFETY: as above.
            unsafe { asm!(concat!($text, ", {}"), in(reg) $operand, options(nostack)) }
        };
    }
    match instruction {
        Instruction::DsbIshst => plain!("dsb ishst"),
        Instruction::DsbIsh => plain!("dsb ish"),
        Instruction::DsbNshst => plain!("dsb nshst"),
        Instruction::DsbNsh => plain!("dsb nsh"),
        Instruction::Isb => plain!("isb"),
        Instruction::Ipas2e1is(x) => with!("tlbi ipas2e1is", x),
        Instruction::Ipas2le1is(x) => with!("tlbi ipas2le1is", x),
        // RIPAS2E1IS, RIPAS2LE1IS, and both without IS are written by number, because assemblers
        // accept their names only with FEAT_TLBIRANGE.
        Instruction::Ripas2e1is(x) => with!("sys #4, c8, c0, #2", x),
        Instruction::Ripas2le1is(x) => with!("sys #4, c8, c0, #6", x),
        Instruction::Vmalle1is => plain!("tlbi vmalle1is"),
        Instruction::Vmalls12e1is => plain!("tlbi vmalls12e1is"),
        Instruction::Ipas2e1(x) => with!("tlbi ipas2e1", x),
        Instruction::Ipas2le1(x) => with!("tlbi ipas2le1", x),
        Instruction::Ripas2e1(x) => with!("sys #4, c8, c4, #2", x),
        Instruction::Ripas2le1(x) => with!("sys #4, c8, c4, #6", x),
        Instruction::Vmalle1 => plain!("tlbi vmalle1"),
        Instruction::Vmalls12e1 => plain!("tlbi vmalls12e1"),
    }
}
