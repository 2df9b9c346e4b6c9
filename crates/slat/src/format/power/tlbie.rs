//! The instructions that an [`Invalidation`] needs on a Power host, as values for a platform to
//! execute.
//!
//! Operands as in the Power ISA, Book III, "TLB Management Instructions" (`tlbie`); the order as in
//! "Translation Table Update Synchronization Requirements". RIC, PRS and R are part of the
//! instruction: PRS is 0, for partition-scoped tables, and R is 1, for radix.
//!
//! A platform executes each with one line of assembly. It also handles errata of its CPUs (POWER9
//! needs a second `tlbie`), and units that a broadcast does not reach (accelerators behind a nest
//! MMU).
//!
//! # Example
//!
//! ```
//! use slat::format::power::tlbie::Tlbie;
//! use slat::{Gpa, GpaRange, Invalidation, PageSize, Vmid};
//!
//! let what = Invalidation {
//!     vmid: Vmid(7),
//!     range: Some(GpaRange::new(Gpa(0x8020_0000), 2 << 20)?),
//!     leaf: PageSize::from_bytes(2 << 20),
//!     tables: false,
//! };
//! let text: Vec<_> = Tlbie::default().sequence(&what).map(|i| i.to_string()).collect();
//! assert_eq!(
//!     text,
//!     [
//!         "ptesync",
//!         "tlbie r3, r4, 0, 0, 1 # r3 = 0x80200020, r4 = 0x7",
//!         "eieio",
//!         "tlbsync",
//!         "ptesync",
//!     ]
//! );
//! # Ok::<(), slat::RangeError>(())
//! ```

use crate::invalidation::{Invalidation, Vmid};
use core::fmt;
use core::iter::FusedIterator;

/// An instruction; for a `tlbie` or `tlbiel` with the values of its registers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Instruction {
    /// `ptesync`: stores to tables are visible to walkers; invalidations before it are complete
    /// everywhere.
    Ptesync,
    /// `tlbie` with RIC=0: invalidates translations, and no links to tables.
    Tlb(Operands),
    /// `tlbie` with RIC=2: invalidates translations, the page walk cache, and cached copies of the
    /// guest's partition table entry.
    All(Operands),
    /// `tlbiel` with RIC=0, on this CPU: invalidates translations of the LPID in LPIDR.
    TlbLocal(Operands),
    /// `tlbiel` with RIC=2, on this CPU: as [`Instruction::All`], for the LPID in LPIDR.
    AllLocal(Operands),
    /// `eieio`: stands between the last `tlbie` and the `tlbsync`.
    Eieio,
    /// `tlbsync`: makes the `ptesync` after it wait for the other CPUs.
    Tlbsync,
}

/// The registers of a `tlbie` or `tlbiel`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Operands {
    /// RB: IS; for one page (IS=0) also its address and AP; for a `tlbiel` of all (IS=2) also the
    /// set.
    pub rb: u64,
    /// RS: the LPID; 0 for a `tlbiel`.
    pub rs: u64,
}

impl fmt::Display for Instruction {
    /// Formats the instruction for an assembler, with the registers' values in a comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, ric, Operands { rb, rs }) = match *self {
            Self::Ptesync => return f.write_str("ptesync"),
            Self::Eieio => return f.write_str("eieio"),
            Self::Tlbsync => return f.write_str("tlbsync"),
            Self::Tlb(operands) => ("tlbie", 0, operands),
            Self::All(operands) => ("tlbie", 2, operands),
            Self::TlbLocal(operands) => ("tlbiel", 0, operands),
            Self::AllLocal(operands) => ("tlbiel", 2, operands),
        };
        write!(f, "{name} r3, r4, {ric}, 0, 1 # r3 = {rb:#x}, r4 = {rs:#x}")
    }
}

/// IS=2, in bits 52:53 of the manual's: all entries of the partition.
const PARTITION: u64 = 2 << 10;
/// The set for a `tlbiel` of all, in bits 40:51.
const SET_SHIFT: u32 = 12;
/// AP, in bits 56:58.
const AP_SHIFT: u32 = 5;

/// How a machine invalidates: features of its CPUs, and choices of its hypervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tlbie {
    /// The most pages by address; an invalidation that needs more takes the whole guest.
    pub most_by_address: u64,
    /// Number of TLB sets that a `tlbiel` of all of a guest invalidates one by one: 128 on POWER9
    /// with radix tables; 1 from Power ISA 3.1 on, where one instruction invalidates all.
    pub local_sets: u64,
}

impl Default for Tlbie {
    /// The limit of Linux for pages by address, and the sets of POWER9.
    fn default() -> Self {
        Self { most_by_address: 33, local_sets: 128 }
    }
}

impl Tlbie {
    /// Returns the instructions that `what` needs, in order.
    ///
    /// One `tlbie` by address reaches entries of one page size. Without a hint of it, or with more
    /// pages than [`Tlbie::most_by_address`], the sequence invalidates the whole guest. It does so
    /// too where tables were unlinked, because no invalidation by address reaches the page walk
    /// cache.
    pub fn sequence(&self, what: &Invalidation) -> Sequence {
        Sequence {
            next: 0,
            vmid: what.vmid,
            tables: what.tables,
            pages: self.pages(what).unwrap_or(Pages { at: 0, shift: 0, ap: None, count: 1 }),
            local: false,
        }
    }

    /// Returns the instructions that `what` needs on the CPU that executes them, in order. A CPU
    /// executes them before it enters the guest, for an invalidation that was noted while the guest
    /// did not run on it. No fault needs them.
    ///
    /// LPIDR holds the guest's LPID. After the last instruction POWER9 also needs `slbia 7`, which
    /// empties its cores' caches of effective addresses; the platform executes it, as it handles
    /// errata.
    pub fn local_sequence(&self, what: &Invalidation) -> Sequence {
        let all = Pages { at: 0, shift: SET_SHIFT, ap: None, count: self.local_sets };
        let pages = self.pages(what).unwrap_or(all);
        Sequence { next: 0, vmid: what.vmid, tables: what.tables, pages, local: true }
    }

    fn pages(&self, what: &Invalidation) -> Option<Pages> {
        let shift = what.leaf.filter(|_| !what.tables)?.shift();
        let (range, ap) = (what.range?, actual_page_size(shift)?);
        let (first, last) = (range.start().0 >> shift, (range.end().0 - 1) >> shift);
        let count = last - first + 1;
        let pages = Pages { at: first << shift, shift, ap: Some(ap), count };
        (count <= self.most_by_address).then_some(pages)
    }
}

/// Returns the encoding of AP for a page of `1 << shift` bytes on POWER9 and POWER10
/// ("ibm,processor-radix-AP-encodings" of their device trees).
const fn actual_page_size(shift: u32) -> Option<u64> {
    match shift {
        12 => Some(0),
        16 => Some(5),
        21 => Some(1),
        30 => Some(2),
        _ => None,
    }
}

/// Neighbouring pages of one size; without AP, the whole guest, or the sets of the TLB.
#[derive(Clone, Copy, Debug)]
struct Pages {
    at: u64,
    shift: u32,
    ap: Option<u64>,
    count: u64,
}

/// The instructions of one invalidation.
#[derive(Clone, Debug)]
pub struct Sequence {
    next: u64,
    vmid: Vmid,
    tables: bool,
    pages: Pages,
    local: bool,
}

impl Iterator for Sequence {
    type Item = Instruction;

    fn next(&mut self) -> Option<Instruction> {
        let number = self.next;
        self.next = number.saturating_add(1);
        let Pages { at, shift, ap, count } = self.pages;
        let after = match number {
            0 => return Some(Instruction::Ptesync),
            _ if number <= count => {
                let rb = at + ((number - 1) << shift) + ap.map_or(PARTITION, |ap| ap << AP_SHIFT);
                let rs = if self.local { 0 } else { u64::from(self.vmid.0) };
                let operands = Operands { rb, rs };
                return Some(match (self.local, self.tables) {
                    (false, true) => Instruction::All(operands),
                    (false, false) => Instruction::Tlb(operands),
                    // The page walk cache has no sets.
                    (true, true) if number == 1 => Instruction::AllLocal(operands),
                    (true, _) => Instruction::TlbLocal(operands),
                });
            }
            _ if self.local => number - count + 2,
            _ => number - count,
        };
        match after {
            1 => Some(Instruction::Eieio),
            2 => Some(Instruction::Tlbsync),
            3 => Some(Instruction::Ptesync),
            _ => None,
        }
    }
}

impl FusedIterator for Sequence {}

#[cfg(test)]
mod tests;
