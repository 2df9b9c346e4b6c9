//! Exceptions that the hypervisor has the guest take, as hardware would: DDI 0487, D1.3, "Exceptions",
//! and "AArch64.TakeException" of its pseudocode.

use super::cpu::{isb, read, write};

/// What the guest is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    /// A synchronous external abort: nothing answers at the address.
    ExternalAbort {
        /// An instruction was fetched.
        fetch: bool,
        /// It was written.
        write: bool,
        /// As the guest addressed it.
        far: u64,
    },
    /// The instruction is undefined.
    Undefined,
}

const MODE: u64 = 0b1111;
const EL0: u64 = 0b0000;
const EL1_SP0: u64 = 0b0100;
const EL1_SPX: u64 = 0b0101;
const DAIF: u64 = 0b1111 << 6;
const IL: u64 = 1 << 25;

/// Has the guest take the exception when it runs again.
pub fn take(told: Told) {
    let (pc, spsr) = (read!("elr_el2"), read!("spsr_el2"));
    let from_el0 = spsr & MODE == EL0;
    let (class, iss) = match told {
        Told::ExternalAbort { fetch, write, far } => {
            write!("far_el1", far);
            let class = if fetch { 0x20 } else { 0x24 };
            let of_el1 = u64::from(!from_el0);
            // DFSC: synchronous external abort, not on a table walk.
            (class + of_el1, 0x10 | if write && !fetch { 1 << 6 } else { 0 })
        }
        Told::Undefined => (0, 0),
    };
    write!("esr_el1", class << 26 | IL | iss);
    write!("elr_el1", pc);
    write!("spsr_el1", spsr);
    let vector = match spsr & MODE {
        EL0 => 0x400,
        EL1_SP0 => 0,
        _ => 0x200,
    };
    write!("elr_el2", read!("vbar_el1") + vector);
    // Masked, on its own stack; PAN as SCTLR_EL1.SPAN (0: set) has it, with the flags it had.
    let pan = if read!("sctlr_el1") & 1 << 23 == 0 { 1 << 22 } else { spsr & 1 << 22 };
    write!("spsr_el2", spsr & 0xf000_0000 | pan | DAIF | EL1_SPX);
    isb();
}
