//! The TLB_CONTROL that an [`Invalidation`] needs at the next VMRUN on an AMD CPU.
//!
//! Source: the AMD64 Architecture Programmer's Manual, volume 2: 15.16 "TLB Control" (15.16.1 "TLB
//! Flush"), 15.15.4 "VMCB Clean Field", 15.25 "Nested Paging", and appendix B, "VMCB Layout".
//!
//! # What the platform does
//!
//! - **Entries are tagged by ASID**, a number that is local to each CPU, from 1 up to, and not
//!   including, [`Asids::count`]; 0 is the host's. The hypervisor decides which guest has which
//!   ASID on which CPU, and what happens when all are in use; an ASID need not be the tables'
//!   [`Vmid`](crate::Vmid). Before a vCPU runs on a CPU where its ASID belonged to another, or to
//!   itself while the tables changed elsewhere, it flushes the ASID there.
//! - **No exit flushes.** #VMEXIT and VMRUN leave entries as they are, except for what TLB_CONTROL
//!   of the VMRUN asks for. A write to the guest's CR3, CR0 or CR4, or INVLPGA, invalidates entries
//!   of the guest's own linear addresses, and need not invalidate nested ones: INVLPGA is of no use
//!   for a change of these tables.
//! - **No invalidation by address**: range, leaf size and `tables` of the invalidation have no
//!   effect.
//! - **The CPU that runs the guest has to leave it.** The platform interrupts it; the CPU exits,
//!   and sets TLB_CONTROL before its next VMRUN of that guest. The guest does not run in between,
//!   so the thread that invalidates waits for the exits, not for the VMRUNs. For a CPU that is not
//!   in the guest now, the platform only notes that it has to flush.
//! - **TLB_CONTROL keeps its value**: the platform sets it to 0 after the VMRUN that flushed, or
//!   each VMRUN flushes. No VMCB clean bit covers it; the ASID next to it is covered by bit 2.
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

use crate::invalidation::Invalidation;

/// TLB_CONTROL, bits 39:32 of the VMCB's quadword at offset 0x58: which entries VMRUN flushes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[repr(u8)]
pub enum TlbControl {
    /// No entries.
    #[default]
    Nothing = 0,
    /// All entries of all ASIDs, including the host's: for a CPU without FlushByAsid.
    FlushAll = 1,
    /// The entries of the guest's ASID: for a change of nested tables.
    FlushGuest = 3,
    /// The entries of the guest's ASID that are not global: for a change of the guest's own tables,
    /// not of nested ones.
    FlushGuestNonGlobal = 7,
}

impl TlbControl {
    /// Returns the VMCB's quadword at offset 0x58: ASID and TLB_CONTROL.
    pub const fn with_asid(self, asid: u32) -> u64 {
        (self as u64) << 32 | asid as u64
    }
}

/// How a CPU tags and flushes translations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asids {
    /// Number of ASIDs that the CPU tells apart, including the host's 0: NASID.
    pub count: u32,
    /// FlushByAsid: the CPU can flush one guest's entries alone.
    pub flush_by_asid: bool,
}

impl Asids {
    /// Reads EBX (NASID) and EDX (bit 6, FlushByAsid) of CPUID function 0x8000_000a.
    pub const fn from_cpuid(ebx: u32, edx: u32) -> Self {
        Self { count: ebx, flush_by_asid: edx >> 6 & 1 == 1 }
    }

    /// Returns whether a guest can have this ASID. VMRUN with ASID 0 fails (VMEXIT_INVALID).
    pub const fn can_be(&self, asid: u32) -> bool {
        asid != 0 && asid < self.count
    }

    /// Returns the value for the next VMRUN of the guest, on each CPU that may hold entries of it.
    pub const fn control(&self, _what: &Invalidation) -> TlbControl {
        match self.flush_by_asid {
            true => TlbControl::FlushGuest,
            false => TlbControl::FlushAll,
        }
    }
}

#[cfg(test)]
mod tests;
