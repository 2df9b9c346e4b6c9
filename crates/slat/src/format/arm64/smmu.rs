//! The commands of an SMMUv3's queue that an [`Invalidation`] needs, as values for a platform to
//! write.
//!
//! Source: the Arm System Memory Management Unit Architecture Specification, version 3 (IHI 0070),
//! "TLB invalidation commands", "Range-based invalidation and level hint", "CMD_SYNC"; SMMU_IDR3
//! (RIL).
//!
//! # What the platform does
//!
//! - **Where broadcasts suffice** it does nothing: SMMU_IDR0.BTM is set, SMMU_CR2.PTM is clear, and
//!   the guest has the same VMID on CPUs and in its stream table entries. The sequence of
//!   [`tlbi`](super::tlbi) then reaches the SMMU, and its `dsb` waits for it.
//! - Elsewhere it orders its stores to tables before the commands (`dsb ishst`), writes those of
//!   [`Smmu::commands`] and [`SYNC`] to the queue, moves the queue's producer index, and returns
//!   from [`Platform::invalidate`](crate::Platform::invalidate) when the consumer index has passed
//!   the last. Accesses through what was invalidated are then complete.
//! - **Devices with ATS** hold translations of their own: a CMD_ATC_INV for each of them, and a
//!   second [`SYNC`], come after the first.
//!
//! # Example
//!
//! ```
//! use slat::format::arm64::{id::Granule, smmu::Smmu};
//! use slat::{Gpa, GpaRange, Invalidation, PageSize, Vmid};
//!
//! let range = Some(GpaRange::new(Gpa(0x8020_0000), 0x3000)?);
//! let leaf = Some(PageSize::SIZE_4K);
//! let what = Invalidation { vmid: Vmid(7), range, leaf, tables: false };
//! let unit = Smmu { granule: Granule::K4, ranges: true, nested: false };
//! let queue: Vec<_> = unit.commands(&what).collect();
//! // CMD_TLBI_S2_IPA of three pages (NUM = 2), of leaves of level 3.
//! assert_eq!(queue, [[0x7_0000_202a, 0x8020_0701]]);
//! # Ok::<(), slat::RangeError>(())
//! ```

use super::id::Granule;
use crate::invalidation::Invalidation;

/// A command of 128 bits: its lower and its upper half.
pub type Command = [u64; 2];

/// Commands by address for one range at most; a larger one invalidates the whole guest, whose
/// entries cost a refill each.
pub const MOST: usize = 16;

/// CMD_SYNC without a signal: it is consumed when all commands before it are complete.
pub const SYNC: Command = [0x46, 0];

const NH_ALL: u64 = 0x10;
const S12_VMALL: u64 = 0x28;
const S2_IPA: u64 = 0x2a;
const NUM_SHIFT: u32 = 12;
const SCALE_SHIFT: u32 = 20;
const VMID_SHIFT: u32 = 32;
/// The upper half: last levels only.
const LEAF: u64 = 1 << 0;
const TTL_SHIFT: u32 = 8;
const TG_SHIFT: u32 = 10;
/// NUM is one less than the pages in units of `2^SCALE`.
const MOST_UNITS: u64 = 31;

/// What an SMMU can do, and how its stream table entries use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Smmu {
    /// The granule of the tables.
    pub granule: Granule,
    /// SMMU_IDR3.RIL: a command can take a range, and the level of its leaves.
    pub ranges: bool,
    /// The guest has a stage 1 of its own in the SMMU. Entries that combine both stages are then
    /// invalidated as well.
    pub nested: bool,
}

impl Smmu {
    /// Returns the commands that invalidate what is stale.
    pub fn commands(self, what: &Invalidation) -> impl Iterator<Item = Command> + use<> {
        let vmid = u64::from(what.vmid.0) << VMID_SHIFT;
        let named = what.range.map(|range| {
            // A part of a leaf is the leaf.
            let page = self.granule.shift();
            let leaf = what.leaf.filter(|_| !what.tables).map(|leaf| leaf.shift());
            let shift = leaf.unwrap_or(page);
            let (first, end) = (range.start().0 >> shift, range.end().0.div_ceil(1 << shift));
            let (at, end) = (first << shift, end << shift);
            let upper = if what.tables { 0 } else { LEAF };
            let ttl = leaf.map_or(0, |leaf| 3_u32.saturating_sub((leaf - page) / (page - 3)));
            let low = S2_IPA | vmid;
            Pieces { at, end, shift, page, ranges: self.ranges, ttl: ttl.into(), low, upper }
        });
        let named = named.filter(|pieces| pieces.clone().take(MOST + 1).count() <= MOST);
        let whole = named.is_none().then_some([S12_VMALL | vmid, 0]);
        // Entries of both stages may be made from those of stage 2 until these are gone.
        let both = (self.nested && named.is_some()).then_some([SYNC, [NH_ALL | vmid, 0]]);
        whole.into_iter().chain(named.into_iter().flatten()).chain(both.into_iter().flatten())
    }
}

/// The commands of a range.
#[derive(Clone, Debug)]
struct Pieces {
    at: u64,
    end: u64,
    /// Of a leaf, and of a page.
    shift: u32,
    page: u32,
    ranges: bool,
    ttl: u64,
    low: u64,
    upper: u64,
}

impl Iterator for Pieces {
    type Item = Command;

    fn next(&mut self) -> Option<Command> {
        let (at, left) = (self.at, self.end.checked_sub(self.at).filter(|&left| left > 0)?);
        if !self.ranges {
            self.at += 1 << self.shift;
            return Some([self.low, at | self.upper]);
        }
        let pages = left >> self.page;
        let scale = pages.trailing_zeros().min(MOST_UNITS as u32);
        let units = (pages >> scale & MOST_UNITS).max(1);
        self.at += units << (scale + self.page);
        if units == 1 && scale == 0 && self.ttl == 0 {
            // One page without a level is reserved as a range.
            return Some([self.low, at | self.upper]);
        }
        let granule = u64::from((self.page - 10) / 2);
        let low = self.low | (units - 1) << NUM_SHIFT | u64::from(scale) << SCALE_SHIFT;
        Some([low, at | granule << TG_SHIFT | self.ttl << TTL_SHIFT | self.upper])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::{Gpa, GpaRange, PageSize};
    use crate::invalidation::Vmid;
    use std::vec::Vec;

    const PLAIN: Smmu = Smmu { granule: Granule::K4, ranges: false, nested: false };
    const RANGES: Smmu = Smmu { ranges: true, ..PLAIN };

    fn what(range: Option<(u64, u64)>, leaf: Option<u64>, tables: bool) -> Invalidation {
        let range = range.map(|(at, bytes)| GpaRange::new(Gpa(at), bytes).unwrap());
        let leaf = leaf.map(|bytes| PageSize::from_bytes(bytes).unwrap());
        Invalidation { vmid: Vmid(0x12), range, leaf, tables }
    }

    fn queue(unit: Smmu, what: &Invalidation) -> Vec<Command> {
        unit.commands(what).collect()
    }

    /// Returns the addresses and bytes of a range command, as the manual has it.
    fn covered([low, high]: Command, leaf: u64) -> (u64, u64) {
        let address = high & ((1 << 52) - 1) & !0xfff;
        match high >> 10 & 3 {
            0 => (address, leaf),
            granule => {
                let pages = ((low >> 12 & 31) + 1) << (low >> 20 & 31);
                (address, pages << (2 * granule + 10))
            }
        }
    }

    #[test]
    fn commands_cover_each_page_once_and_no_other() {
        for granule in Granule::ALL {
            let page = 1_u64 << granule.shift();
            for (first, pages) in [(0, 1), (1, 1), (3, 9), (512, 512), (511, 1025), (7, 0x12345)] {
                let range = Some((first * page, pages * page));
                for leaf in [None, Some(page)] {
                    let named = queue(Smmu { granule, ..RANGES }, &what(range, leaf, false));
                    let mut next = first * page;
                    for command in named {
                        let (at, bytes) = covered(command, page);
                        assert_eq!((at, command[0] & 0xff), (next, 0x2a));
                        next += bytes;
                    }
                    assert_eq!(next, (first + pages) * page);
                }
            }
        }
    }

    #[test]
    fn a_level_is_named_for_leaves_of_one_size_only() {
        let range = Some((0x4020_1000, 0x1000));
        let of = |leaf, tables| queue(RANGES, &what(range, leaf, tables));
        // Level 2 is TTL 2; the whole block, as 512 pages.
        assert_eq!(of(Some(2 << 20), false), [[0x12_0090_002a, 0x4020_0601]]);
        assert_eq!(of(Some(1 << 30), false), [[0x12_0120_002a, 0x4000_0501]]);
        // One page without a level has no granule either.
        assert_eq!(of(None, false), [[0x12_0000_002a, 0x4020_1001]]);
        assert_eq!(of(Some(4096), true), [[0x12_0000_002a, 0x4020_1000]]);
    }

    #[test]
    fn without_ranges_each_leaf_is_a_command_up_to_a_limit() {
        let of = |n: u64, leaf| queue(PLAIN, &what(Some((0x20_0000, n << 12)), leaf, false));
        let two = [[0x12_0000_002a, 0x20_0001], [0x12_0000_002a, 0x20_1001]];
        assert_eq!(of(2, Some(4096)), two);
        assert_eq!(of(16, None).len(), 16);
        assert_eq!(of(17, None), [[0x12_0000_0028, 0]]);
        assert_eq!(of(1024, Some(2 << 20)).len(), 2);
        assert_eq!(queue(PLAIN, &what(None, None, true)), [[0x12_0000_0028, 0]]);
    }

    #[test]
    fn a_guest_with_its_own_stage_loses_combined_entries_last() {
        let nested = Smmu { nested: true, ..PLAIN };
        let page = what(Some((0x1000, 0x1000)), None, false);
        let expected = [[0x12_0000_002a, 0x1001], SYNC, [0x12_0000_0010, 0]];
        assert_eq!(queue(nested, &page), expected);
        assert_eq!(queue(nested, &what(None, None, true)), [[0x12_0000_0028, 0]]);
    }
}
