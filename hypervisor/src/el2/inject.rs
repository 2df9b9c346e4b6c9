//! Injects exceptions into the guest, which takes them as from hardware: see [`exception`].
//!
//! [`exception`]: slat_hypervisor::exception

use super::cpu::{isb, read, write};
use slat_hypervisor::exception::State;

/// An exception to inject.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Injection {
    /// A synchronous external abort, because nothing responds at the address.
    ExternalAbort {
        /// Whether it was an instruction fetch.
        fetch: bool,
        /// Whether it was a write.
        write: bool,
        /// The virtual address of the access.
        far: u64,
    },
    /// An undefined instruction.
    Undefined,
}

const IL: u64 = 1 << 25;

/// Makes the guest take the exception when it runs again.
pub fn take(told: Injection) {
    let pstate = read!("spsr_el2");
    let tags = read!("id_aa64pfr1_el1") >> 8 & 0xf >= 2;
    let state = State { pstate, sctlr: read!("sctlr_el1"), tags };
    let (class, iss) = match told {
        Injection::ExternalAbort { fetch, write, far } => {
            write!("far_el1", far);
            let class = if fetch { 0x20 } else { 0x24 };
            let of_el1 = u64::from(!state.from_el0());
            // DFSC: synchronous external abort, not on a table walk.
            (class + of_el1, 0x10 | if write && !fetch { 1 << 6 } else { 0 })
        }
        Injection::Undefined => (0, 0),
    };
    write!("esr_el1", class << 26 | IL | iss);
    write!("elr_el1", read!("elr_el2"));
    write!("spsr_el1", pstate);
    write!("elr_el2", state.handler(read!("vbar_el1")));
    write!("spsr_el2", state.after());
    isb();
}
