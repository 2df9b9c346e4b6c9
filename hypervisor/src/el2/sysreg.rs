//! Emulates writes of system registers that HCR_EL2.TVM traps, by the same write at EL2.

use super::cpu::write;
use slat_hypervisor::syndrome::System;

/// Effect of a trapped access.
pub enum Done {
    /// It wrote a register that does not switch caches.
    Written,
    /// It wrote SCTLR_EL1; the value says whether MMU and data cache are both on.
    Caches(bool),
    /// It was maintenance of a data cache by set and way, which is left to the caller.
    SetWay,
    /// It is not one that is trapped on purpose, and was not emulated.
    Unknown,
}

/// SCTLR_EL1.{M, C}.
const CACHED: u64 = 1 << 0 | 1 << 2;

/// Emulates a trapped access, with the value of its register.
pub fn emulate(system: System, value: u64) -> Done {
    if system.read {
        return Done::Unknown;
    }
    match system.name {
        (3, 0, 1, 0, 0) => {
            write!("sctlr_el1", value);
            return Done::Caches(value & CACHED == CACHED);
        }
        (3, 0, 2, 0, 0) => write!("ttbr0_el1", value),
        (3, 0, 2, 0, 1) => write!("ttbr1_el1", value),
        (3, 0, 2, 0, 2) => write!("tcr_el1", value),
        (3, 0, 5, 1, 0) => write!("afsr0_el1", value),
        (3, 0, 5, 1, 1) => write!("afsr1_el1", value),
        (3, 0, 5, 2, 0) => write!("esr_el1", value),
        (3, 0, 6, 0, 0) => write!("far_el1", value),
        (3, 0, 10, 2, 0) => write!("mair_el1", value),
        (3, 0, 10, 3, 0) => write!("amair_el1", value),
        (3, 0, 13, 0, 1) => write!("contextidr_el1", value),
        // DC ISW, CSW, CISW: HCR_EL2.TSW.
        (1, 0, 7, 6 | 10 | 14, 2) => return Done::SetWay,
        _ => return Done::Unknown,
    }
    Done::Written
}
