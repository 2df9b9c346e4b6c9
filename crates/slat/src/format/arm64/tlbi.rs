//! The instructions that an [`Invalidation`] needs at EL2, as values for a platform to execute.
//!
//! The engine executes no instruction. It computes operands and order here, where the computation
//! is tested on any machine. The platform only needs a `match` with one line of assembly in each
//! arm.
//!
//! Operands as in the Arm Architecture Reference Manual (DDI 0487), C5.5 "A64 System instructions
//! for TLB maintenance", under the name of each instruction; what stage 2 needs, under
//! "Invalidation of TLB entries from stage 2 translations".
//!
//! # What the platform does
//!
//! - **The guest is not an operand.** The instructions act on the VMID in VTTBR_EL2. Before the
//!   sequence the platform loads the guest's VTTBR_EL2 and executes an `isb`, unless the guest's is
//!   already loaded; afterwards it may load the former one, with another `isb`. While HCR_EL2.{E2H,
//!   TGE} is {1, 1}, `vmalle1` and similar instructions act on the host's own EL2&0 translations
//!   instead: a host with VHE clears TGE around the sequence. The platform also handles errata that
//!   forbid a speculative walk in between.
//! - **Scope.** [`Scope::Local`] reaches the entries of one PE. It suffices if the guest never ran
//!   on another PE since the entries there were last invalidated; for a PE that is about to enter a
//!   guest through another root under the same VMID (VTTBR_EL2.CnP is then 0); and for a PE that
//!   faulted for lack of a right that its guest was then given ([`LocalFlush`](crate::LocalFlush)).
//!   Everything else needs [`Scope::InnerShareable`].
//! - **System MMUs and nested guests** that cache the same tables are not reached.
//!
//! # Changes of size
//!
//! [`BreakBeforeMake`] decides whether a change of size needs break-before-make; the sequence is
//! the same. At FEAT_BBM levels 0 and 1 it stands between the invalid entry and the new one. At
//! levels 2 and 3 it comes once, after the new entry was stored, and without a hint of size, since
//! either size may be cached. Until it completes, a PE at level 2 may raise a TLB conflict abort.
//! The handler invalidates all of the guest on its own PE (an [`Invalidation`] without a range,
//! [`Scope::Local`]), not by address, and repeats the access. Level 3 raises no such abort. A
//! change of address or of memory type needs break-before-make at every level.
//!
//! # Example
//!
//! ```
//! use slat::format::arm64::{id::Granule, tlbi::Tlbi};
//! use slat::{Gpa, GpaRange, Invalidation, PageSize, Vmid};
//!
//! let cpu = Tlbi { ttl: true, ..Tlbi::new(Granule::K4) };
//! let what = Invalidation {
//!     vmid: Vmid(1),
//!     range: Some(GpaRange::new(Gpa(0x8000_0000), 0x1000)?),
//!     leaf: Some(PageSize::SIZE_4K),
//!     tables: false,
//! };
//! let text: Vec<_> = cpu.sequence(&what).map(|i| i.to_string()).collect();
//! assert_eq!(
//!     text,
//!     [
//!         "dsb ishst",
//!         "tlbi ipas2le1is, x0 // x0 = 0x700000080000",
//!         "dsb ish",
//!         "tlbi vmalle1is",
//!         "dsb ish",
//!         "isb",
//!     ]
//! );
//! # Ok::<(), slat::RangeError>(())
//! ```
//!
//! [`BreakBeforeMake`]: crate::BreakBeforeMake

use super::Arm64;
use super::id::{Granule, IdRegisters, repeats_tlbi};
use crate::addr::{GpaRange, PageSize};
use crate::invalidation::Invalidation;
use core::fmt;
use core::iter::FusedIterator;

/// An instruction, with the value of its register if it has one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Instruction {
    /// `dsb ishst`: stores to tables are visible to the walkers of all PEs.
    DsbIshst,
    /// `dsb ish`: invalidations before it are complete on all PEs.
    DsbIsh,
    /// `dsb nshst`: stores to tables are visible to this PE's walker.
    DsbNshst,
    /// `dsb nsh`: invalidations before it are complete on this PE.
    DsbNsh,
    /// `isb`: this PE fetches later instructions through no older translation.
    Isb,
    /// `tlbi ipas2e1is`: stage-2 entries of one address, all levels, all PEs.
    Ipas2e1is(u64),
    /// `tlbi ipas2le1is`: stage-2 entries of one address, last level only, all PEs.
    Ipas2le1is(u64),
    /// `tlbi ripas2e1is`: stage-2 entries of a range, all levels, all PEs (FEAT_TLBIRANGE).
    Ripas2e1is(u64),
    /// `tlbi ripas2le1is`: stage-2 entries of a range, last level only, all PEs (FEAT_TLBIRANGE).
    Ripas2le1is(u64),
    /// `tlbi vmalle1is`: the guest's entries of stage 1, and those that combine both stages, all
    /// PEs.
    Vmalle1is,
    /// `tlbi vmalls12e1is`: all of the guest's entries, both stages, all PEs.
    Vmalls12e1is,
    /// `tlbi ipas2e1`: stage-2 entries of one address, all levels, this PE.
    Ipas2e1(u64),
    /// `tlbi ipas2le1`: stage-2 entries of one address, last level only, this PE.
    Ipas2le1(u64),
    /// `tlbi ripas2e1`: stage-2 entries of a range, all levels, this PE (FEAT_TLBIRANGE).
    Ripas2e1(u64),
    /// `tlbi ripas2le1`: stage-2 entries of a range, last level only, this PE (FEAT_TLBIRANGE).
    Ripas2le1(u64),
    /// `tlbi vmalle1`: the guest's entries of stage 1, and those that combine both stages, this PE.
    Vmalle1,
    /// `tlbi vmalls12e1`: all of the guest's entries, both stages, this PE.
    Vmalls12e1,
}

impl fmt::Display for Instruction {
    /// Formats the instruction for an assembler, with the register's value in a comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (text, operand) = match *self {
            Self::DsbIshst => ("dsb ishst", None),
            Self::DsbIsh => ("dsb ish", None),
            Self::DsbNshst => ("dsb nshst", None),
            Self::DsbNsh => ("dsb nsh", None),
            Self::Isb => ("isb", None),
            Self::Ipas2e1is(x) => ("tlbi ipas2e1is", Some(x)),
            Self::Ipas2le1is(x) => ("tlbi ipas2le1is", Some(x)),
            Self::Ripas2e1is(x) => ("tlbi ripas2e1is", Some(x)),
            Self::Ripas2le1is(x) => ("tlbi ripas2le1is", Some(x)),
            Self::Vmalle1is => ("tlbi vmalle1is", None),
            Self::Vmalls12e1is => ("tlbi vmalls12e1is", None),
            Self::Ipas2e1(x) => ("tlbi ipas2e1", Some(x)),
            Self::Ipas2le1(x) => ("tlbi ipas2le1", Some(x)),
            Self::Ripas2e1(x) => ("tlbi ripas2e1", Some(x)),
            Self::Ripas2le1(x) => ("tlbi ripas2le1", Some(x)),
            Self::Vmalle1 => ("tlbi vmalle1", None),
            Self::Vmalls12e1 => ("tlbi vmalls12e1", None),
        };
        match operand {
            Some(x) => write!(f, "{text}, x0 // x0 = {x:#x}"),
            None => f.write_str(text),
        }
    }
}

/// The PEs that an invalidation reaches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// All PEs of the inner shareable domain, which are all that the guest may run on.
    InnerShareable,
    /// The PE that executes the instructions.
    Local,
}

/// How a machine invalidates: features of its CPUs, and choices of its hypervisor.
///
/// [`IdRegisters::tlbi`](super::id::IdRegisters::tlbi) reads it from the ID registers. Where CPUs
/// differ, set only the features that all of them have, because an invalidation is broadcast.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tlbi {
    /// The granule of the tables.
    pub granule: Granule,
    /// FEAT_TLBIRANGE: one instruction can take a range.
    pub range_instructions: bool,
    /// FEAT_TTL: an operand may name the level of the leaf.
    pub ttl: bool,
    /// VTCR_EL2.DS is 1 (FEAT_LPA2): range operands are in units of 64 KiB for every granule, and
    /// addresses of 4K and 16K have 52 bits. It must agree with [`Arm64`] of the
    /// tables.
    pub lpa2: bool,
    /// Number of bits of a guest physical address that the CPU implements. No operand can hold an
    /// address beyond them, so its invalidation takes the whole guest.
    pub address_bits: u32,
    /// The most instructions by address; an invalidation that needs more takes the whole guest.
    pub most_by_address: u64,
    /// The PEs to reach.
    pub scope: Scope,
    /// The last TLBI and its DSB are executed twice, for CPUs with an erratum: a store of another
    /// PE through the invalidated translation may become visible after the first DSB. Without it, a
    /// page that was write-protected changes after it was copied. See
    /// [`repeats_tlbi`]. [`Scope::Local`] does not need it.
    pub repeat: bool,
}

impl IdRegisters {
    /// Returns how this CPU invalidates translations of tables of a format, on all PEs.
    pub fn tlbi<const PAGE_SHIFT: u32, const WIDE: bool>(
        &self,
        _: &Arm64<PAGE_SHIFT, WIDE>,
    ) -> Tlbi {
        let granule = const { Granule::of_shift(PAGE_SHIFT) };
        Tlbi {
            range_instructions: self.range_instructions(),
            ttl: self.ttl(),
            lpa2: Arm64::<PAGE_SHIFT, WIDE>::DS,
            address_bits: self.address_bits(),
            repeat: repeats_tlbi(self.midr),
            ..Tlbi::new(granule)
        }
    }
}

impl Tlbi {
    /// The number of pages of a table with the 4K granule; Linux and Hafnium have the same limit.
    /// It bounds the time that broadcasts take. Most walks end in entries that combine both stages,
    /// and those are lost either way, with the whole guest or by address.
    pub const MOST_BY_ADDRESS: u64 = 512;

    /// Returns what every CPU can do: no ranges, no hints of level, 48-bit addresses, on all PEs.
    pub const fn new(granule: Granule) -> Self {
        Self {
            granule,
            range_instructions: false,
            ttl: false,
            lpa2: false,
            address_bits: 48,
            most_by_address: Self::MOST_BY_ADDRESS,
            scope: Scope::InnerShareable,
            repeat: false,
        }
    }

    /// Returns the same for the PE that executes the instructions ([`Scope::Local`]), as
    /// [`Platform::invalidate_local`](crate::Platform::invalidate_local) needs it.
    pub const fn local(self) -> Self {
        Self { scope: Scope::Local, ..self }
    }

    /// Returns the instructions that `what` needs, in order.
    ///
    /// They cover the range of `what`, rounded outwards to the granule or, with a hint of a leaf
    /// size, to that size; or the whole guest. One instruction invalidates a leaf of the hinted
    /// size, whichever address in it the operand has.
    pub fn sequence(&self, what: &Invalidation) -> Sequence {
        let addresses = what.range.and_then(|range| self.addresses(range, what));
        let repeat = self.repeat && self.scope == Scope::InnerShareable;
        Sequence { step: Step::Publish, scope: self.scope, addresses, repeat }
    }

    /// Returns the instructions by address; `None` if they are too many or no operand can hold
    /// them.
    fn addresses(&self, range: GpaRange, what: &Invalidation) -> Option<Addresses> {
        // Below an unlinked table, entries of any size may be cached.
        let leaf = what.leaf.filter(|_| !what.tables);
        let page_shift = self.granule.shift();
        let hint = leaf.and_then(|leaf| Some((leaf.shift(), self.level(leaf)?)));
        let (stride_shift, level) = hint.map_or((page_shift, None), |(s, l)| (s, Some(l)));
        let below = (1 << stride_shift) - 1;
        let at = range.start().0 & !below;
        let end = range.end().0.checked_add(below)? & !below;
        if end > 1 << self.operand_bits() {
            return None;
        }
        let addresses = Addresses {
            at,
            end,
            stride_shift,
            page_shift,
            // For a larger leaf, single instructions are fewer.
            ranges: self.range_instructions && stride_shift < page_shift + RANGE_SHIFT,
            base_shift: if self.lpa2 { 16 } else { page_shift },
            tg: self.granule.tg(),
            level: level.filter(|_| self.ttl),
            last_level: !what.tables,
            scope: self.scope,
        };
        (addresses.instructions() <= self.most_by_address).then_some(addresses)
    }

    /// Returns the number of address bits that operands hold and the CPU does not ignore.
    fn operand_bits(&self) -> u32 {
        let most = if self.lpa2 || self.granule == Granule::K64 { 52 } else { 48 };
        self.address_bits.min(most)
    }

    /// Returns the level whose leaves are of this size, as TTL encodes it; `None` if no level's
    /// are. (No level's leaves have the size of a contiguous group: its members are invalidated one
    /// by one.)
    fn level(&self, leaf: PageSize) -> Option<u64> {
        let (granule, shift) = (self.granule.shift(), leaf.shift());
        let index_bits = granule - 3;
        let above = shift.checked_sub(granule).filter(|bits| bits % index_bits == 0)? / index_bits;
        // Lower TTL values are reserved. Without LPA2 one more is, for 4K and 16K, because their
        // leaves of that level do not exist then.
        let lowest = match (self.granule, self.lpa2) {
            (Granule::K4, true) => 0,
            (Granule::K4, false) | (Granule::K16, true) | (Granule::K64, _) => 1,
            (Granule::K16, false) => 2,
        };
        3u64.checked_sub(above.into()).filter(|&level| level >= lowest)
    }
}

/// Base-2 logarithm of the most granules that one range instruction covers: 32 * 2^16.
const RANGE_SHIFT: u32 = 21;

/// Shifts of the fields of an operand.
const TTL_SHIFT: u32 = 44;
const RANGE_TTL_SHIFT: u32 = 37;
const NUM_SHIFT: u32 = 39;
const SCALE_SHIFT: u32 = 44;
const TG_SHIFT: u32 = 46;

/// The instructions by address of a sequence.
#[derive(Clone, Debug)]
struct Addresses {
    at: u64,
    end: u64,
    stride_shift: u32,
    page_shift: u32,
    /// Base-2 logarithm of the unit of a range's base. While `at` is not a multiple of the unit,
    /// single instructions are used.
    base_shift: u32,
    ranges: bool,
    tg: u64,
    level: Option<u64>,
    last_level: bool,
    scope: Scope,
}

impl Addresses {
    /// Returns the number of instructions left.
    fn instructions(&self) -> u64 {
        if !self.ranges {
            return (self.end - self.at) >> self.stride_shift;
        }
        let base = self.at.next_multiple_of(1 << self.base_shift).min(self.end);
        let single = (base - self.at) >> self.page_shift;
        let pages = (self.end - base) >> self.page_shift;
        let digit = |shift: u32| u64::from(pages >> shift & 31 != 0);
        single + (pages >> 16).div_ceil(32) + digit(11) + digit(6) + digit(1) + (pages & 1)
    }

    /// Bits 39:0 are IPA[51:12] for every granule; bit 63, NS, is 0.
    fn single(&mut self) -> Instruction {
        let hint = self.level.map_or(0, |level| (self.tg << 2 | level) << TTL_SHIFT);
        let operand = hint | self.at >> 12;
        self.at += 1 << self.stride_shift;
        match (self.scope, self.last_level) {
            (Scope::InnerShareable, true) => Instruction::Ipas2le1is(operand),
            (Scope::InnerShareable, false) => Instruction::Ipas2e1is(operand),
            (Scope::Local, true) => Instruction::Ipas2le1(operand),
            (Scope::Local, false) => Instruction::Ipas2e1(operand),
        }
    }

    /// Covers `(NUM + 1) << (5 * SCALE + 1)` granules from a base, in the largest scale that fits.
    ///
    /// The scales fall, so each base is as aligned as the first. With a hint a base must be a
    /// multiple of the leaf size. It is, because that size divides the steps of every scale used
    /// before.
    fn range(&mut self, pages: u64) -> Instruction {
        let scale = ((pages.ilog2() - 1) / 5).min(3);
        let unit_shift = 5 * scale + 1;
        let units = (pages >> unit_shift).min(32);
        let operand = self.tg << TG_SHIFT
            | u64::from(scale) << SCALE_SHIFT
            | (units - 1) << NUM_SHIFT
            | self.level.unwrap_or(0) << RANGE_TTL_SHIFT
            | self.at >> self.base_shift;
        self.at += units << unit_shift << self.page_shift;
        match (self.scope, self.last_level) {
            (Scope::InnerShareable, true) => Instruction::Ripas2le1is(operand),
            (Scope::InnerShareable, false) => Instruction::Ripas2e1is(operand),
            (Scope::Local, true) => Instruction::Ripas2le1(operand),
            (Scope::Local, false) => Instruction::Ripas2e1(operand),
        }
    }
}

impl Iterator for Addresses {
    type Item = Instruction;

    fn next(&mut self) -> Option<Instruction> {
        let left = self.end - self.at;
        if left == 0 {
            return None;
        }
        let aligned = self.at & ((1 << self.base_shift) - 1) == 0;
        Some(if self.ranges && aligned && left > 1 << self.stride_shift {
            self.range(left >> self.page_shift)
        } else {
            self.single()
        })
    }
}

/// The instructions of one invalidation, as [`Tlbi::sequence`] returns them.
#[derive(Clone, Debug)]
pub struct Sequence {
    step: Step,
    scope: Scope,
    addresses: Option<Addresses>,
    /// The last invalidation comes once more.
    repeat: bool,
}

/// The next step of a sequence.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Makes stores to tables visible before any later walk.
    Publish,
    /// Invalidates entries of stage 2.
    Stage2,
    /// Invalidates entries that combine both stages. A walk that refills them must not find a stale
    /// stage-2 entry, so the stage-2 invalidation completes first.
    Combined,
    Wait,
    Synchronize,
    Done,
}

impl Sequence {
    /// Returns whether the guest loses all of its entries, and not only those of a range.
    pub const fn is_whole_guest(&self) -> bool {
        self.addresses.is_none()
    }

    fn wait(&self) -> Instruction {
        match self.scope {
            Scope::InnerShareable => Instruction::DsbIsh,
            Scope::Local => Instruction::DsbNsh,
        }
    }
}

impl Iterator for Sequence {
    type Item = Instruction;

    fn next(&mut self) -> Option<Instruction> {
        let everywhere = self.scope == Scope::InnerShareable;
        let pick = |shareable, local| if everywhere { shareable } else { local };
        let (instruction, step) = match (self.step, &mut self.addresses) {
            (Step::Publish, _) => {
                (pick(Instruction::DsbIshst, Instruction::DsbNshst), Step::Stage2)
            }
            (Step::Stage2, None) => {
                (pick(Instruction::Vmalls12e1is, Instruction::Vmalls12e1), Step::Wait)
            }
            (Step::Stage2, Some(addresses)) => match addresses.next() {
                Some(instruction) => (instruction, Step::Stage2),
                None => (self.wait(), Step::Combined),
            },
            (Step::Combined, _) => (pick(Instruction::Vmalle1is, Instruction::Vmalle1), Step::Wait),
            (Step::Wait, addresses) if self.repeat => {
                let last = if addresses.is_some() { Step::Combined } else { Step::Stage2 };
                self.repeat = false;
                (self.wait(), last)
            }
            (Step::Wait, _) => (self.wait(), Step::Synchronize),
            (Step::Synchronize, _) => (Instruction::Isb, Step::Done),
            (Step::Done, _) => return None,
        };
        self.step = step;
        Some(instruction)
    }
}

impl FusedIterator for Sequence {}

#[cfg(test)]
mod tests;
