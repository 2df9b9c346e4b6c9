//! What an [`Invalidation`] takes on an AMD CPU: a value of TLB_CONTROL at the next VMRUN.
//!
//! As in the AMD64 Architecture Programmer's Manual, volume 2: 15.16 "TLB Control" (15.16.1 "TLB
//! Flush"), 15.15.4 "VMCB Clean Field", 15.25 "Nested Paging", and appendix B, "VMCB Layout".
//!
//! # What the platform does
//!
//! - **Entries are tagged by ASID**, a number of the CPU that runs the guest, from 1 to
//!   [`Asids::count`] - 1; 0 is the host's. Which guest has which, on which CPU, and when all are
//!   used up, is the owner's to decide: it need not be the tables' [`Vmid`](crate::Vmid). A vCPU
//!   that comes to a CPU where its ASID was another's, or its own while the tables changed
//!   elsewhere, flushes it there first.
//! - **No exit flushes.** #VMEXIT and VMRUN leave entries as they are, but for what TLB_CONTROL of
//!   the VMRUN asks for. A write to the guest's CR3, CR0, CR4, or INVLPGA, takes entries of the
//!   guest's own linear addresses, and need not take nested ones: INVLPGA serves no change here.
//! - **There is nothing by address**: range, leaf size and `tables` of the invalidation say
//!   nothing.
//! - **The CPU that runs the guest has to leave it**: it is interrupted, the exit is taken, and
//!   TLB_CONTROL is set before the next VMRUN of that guest there. The guest does not run between,
//!   so whoever invalidates waits for the exits, not for the VMRUNs. A CPU that is not in the guest
//!   now is noted only. [`Ran`](crate::Ran) keeps account of both.
//! - **TLB_CONTROL stays as it was written**: the platform sets it to 0 after the VMRUN that
//!   flushed, or each one does. It is among what no VMCB clean bit caches; the ASID, beside it, is
//!   bit 2's.
//!
//! # Example
//!
//! ```
//! use slat::format::npt::asid::{Asids, TlbControl};
//! use slat::{Invalidation, Vmid};
//!
//! // EBX and EDX of CPUID function 0x8000_000a.
//! let cpu = Asids::from_cpuid(0x8000, 1 << 6 | 1);
//! let what = Invalidation { vmid: Vmid(1), range: None, leaf: None, tables: true };
//! assert_eq!(cpu.control(&what), TlbControl::FlushGuest);
//! // The VMCB's quadword at 0x58.
//! assert_eq!(cpu.control(&what).with_asid(5), 0x3_0000_0005);
//! ```

use crate::shootdown::Invalidation;

/// TLB_CONTROL, bits 39:32 of the VMCB's quadword at offset 0x58: what VMRUN flushes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[repr(u8)]
pub enum TlbControl {
    /// Nothing.
    #[default]
    Nothing = 0,
    /// All entries of all ASIDs, the host's too: for a CPU without FlushByAsid.
    FlushAll = 1,
    /// The entries of the guest's ASID: what a change of nested tables takes.
    FlushGuest = 3,
    /// Those of them that are not global: for a change of the guest's own tables, not of nested
    /// ones.
    FlushGuestNonGlobal = 7,
}

impl TlbControl {
    /// The VMCB's quadword at offset 0x58: ASID and TLB_CONTROL.
    pub const fn with_asid(self, asid: u32) -> u64 {
        (self as u64) << 32 | asid as u64
    }
}

/// How a CPU tags, and flushes, translations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asids {
    /// ASIDs that the CPU tells apart, the host's 0 among them: NASID.
    pub count: u32,
    /// FlushByAsid: one guest's entries can be flushed alone.
    pub flush_by_asid: bool,
}

impl Asids {
    /// What EBX (NASID) and EDX (bit 6, FlushByAsid) of CPUID function 0x8000_000a say.
    pub const fn from_cpuid(ebx: u32, edx: u32) -> Self {
        Self { count: ebx, flush_by_asid: edx >> 6 & 1 == 1 }
    }

    /// Whether a guest can have this ASID. VMRUN with 0 fails (VMEXIT_INVALID).
    pub const fn can_be(&self, asid: u32) -> bool {
        asid != 0 && asid < self.count
    }

    /// The value for the next VMRUN of the guest, on each CPU that may hold entries of it.
    pub const fn control(&self, _what: &Invalidation) -> TlbControl {
        match self.flush_by_asid {
            true => TlbControl::FlushGuest,
            false => TlbControl::FlushAll,
        }
    }
}

#[cfg(test)]
mod tests;
