//! The descriptors of a VT-d unit's invalidation queue that an [`Invalidation`] needs, as values
//! for a platform to write.
//!
//! Source: the VT-d specification, "IOTLB Invalidate", "Invalidation Wait Descriptor", "Capability
//! Register" (PSI, MAMV).
//!
//! # What the platform does
//!
//! - It writes the descriptors of [`Iotlb::descriptors`] to the queue, then [`wait`], moves the
//!   queue's tail, and returns from [`Platform::invalidate`](crate::Platform::invalidate) when the
//!   status of the wait is in memory. The descriptors ask the unit to drain reads and writes that
//!   are under way.
//! - Devices with ATS hold translations of their own: a device-TLB invalidation for each of them
//!   stands between the IOTLB's and the wait.
//!
//! # Example
//!
//! ```
//! use slat::format::ept::vtd::commands::Iotlb;
//! use slat::{Gpa, GpaRange, Invalidation, Vmid};
//!
//! let range = Some(GpaRange::new(Gpa(0x8020_0000), 0x3000)?);
//! let what = Invalidation { vmid: Vmid(7), range, leaf: None, tables: false };
//! // Page-selective invalidations (PSI) of up to 2^9 pages (MAMV).
//! let unit = Iotlb { domain: 7, pages: Some(9) };
//! let queue: Vec<_> = unit.descriptors(&what).collect();
//! assert_eq!(queue, [[0x7_00f2, 0x8020_0041], [0x7_00f2, 0x8020_2040]]);
//! # Ok::<(), slat::RangeError>(())
//! ```

use crate::addr::Hpa;
use crate::invalidation::Invalidation;

/// A descriptor of 128 bits: its lower and its upper half.
pub type Descriptor = [u64; 2];

/// Descriptors for one range at most; a larger one invalidates the whole domain, whose entries cost
/// a refill each.
pub const MOST: usize = 16;

const IOTLB: u64 = 0x2;
const WAIT: u64 = 0x5;
const DOMAIN: u64 = 2 << 4;
const PAGES: u64 = 3 << 4;
const DRAIN: u64 = 3 << 6;
/// The upper half: only leaves changed (IH).
const LEAVES_ONLY: u64 = 1 << 6;
/// The wait writes its status, and comes after all descriptors before it (FN).
const STATUS: u64 = 1 << 5;
const FENCE: u64 = 1 << 6;

/// The translations of one domain in one unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Iotlb {
    /// The domain's number, in its context or PASID-table entry.
    pub domain: u16,
    /// The base-2 logarithm of the most pages that one descriptor can name; `None` if the unit
    /// invalidates only whole domains.
    pub pages: Option<u32>,
}

impl Iotlb {
    /// Returns the unit's part of what `capability`, its capability register, says.
    pub const fn new(domain: u16, capability: u64) -> Self {
        const PSI: u64 = 1 << 39;
        let most = (capability >> 48 & 0x3f) as u32;
        Self { domain, pages: if capability & PSI == 0 { None } else { Some(most) } }
    }

    /// Returns the descriptors that invalidate what is stale.
    pub fn descriptors(self, what: &Invalidation) -> impl Iterator<Item = Descriptor> + use<> {
        let domain = u64::from(self.domain) << 16 | DRAIN | IOTLB;
        let hint = if what.tables { 0 } else { LEAVES_ONLY };
        let named = self.pages.zip(what.range).map(|(most, range)| {
            // A part of a leaf is the leaf.
            let shift = what.leaf.filter(|_| !what.tables).map_or(12, |leaf| leaf.shift());
            let (first, end) = (range.start().0 >> shift, range.end().0.div_ceil(1 << shift));
            Chunks { at: first << (shift - 12), end: end << (shift - 12), most }
        });
        let named = named.filter(|chunks| chunks.clone().take(MOST + 1).count() <= MOST);
        let whole = named.is_none().then_some([domain | DOMAIN, 0]);
        let pages = named.into_iter().flatten();
        let pages =
            pages.map(move |(page, order)| [domain | PAGES, page << 12 | hint | u64::from(order)]);
        whole.into_iter().chain(pages)
    }
}

/// Returns the descriptor after which a unit writes `data` to `status`, 4-aligned, once all
/// descriptors before it are complete.
pub const fn wait(status: Hpa, data: u32) -> Descriptor {
    [(data as u64) << 32 | FENCE | STATUS | WAIT, status.0 & !3]
}

/// Pieces of a range of pages, each as large as its alignment, the end and the unit allow: the
/// first page, and the base-2 logarithm of the number of pages.
#[derive(Clone, Debug)]
struct Chunks {
    at: u64,
    end: u64,
    most: u32,
}

impl Iterator for Chunks {
    type Item = (u64, u32);

    fn next(&mut self) -> Option<(u64, u32)> {
        let left = self.end.checked_sub(self.at).filter(|&left| left > 0)?;
        let order = self.at.trailing_zeros().min(left.ilog2()).min(self.most);
        let page = self.at;
        self.at += 1 << order;
        Some((page, order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::{Gpa, GpaRange};
    use crate::invalidation::Vmid;
    use std::vec::Vec;

    fn what(range: Option<(u64, u64)>, tables: bool) -> Invalidation {
        let range = range.map(|(at, bytes)| GpaRange::new(Gpa(at), bytes).unwrap());
        Invalidation { vmid: Vmid(1), range, leaf: None, tables }
    }

    const UNIT: Iotlb = Iotlb { domain: 0x12, pages: Some(9) };

    fn queue(unit: Iotlb, what: &Invalidation) -> Vec<Descriptor> {
        unit.descriptors(what).collect()
    }

    #[test]
    fn descriptors_cover_each_page_once_and_no_other() {
        for (first, pages) in [(0, 1), (1, 1), (3, 9), (512, 512), (511, 513), (7, 1000)] {
            let named = queue(UNIT, &what(Some((first << 12, pages << 12)), false));
            let mut covered = Vec::new();
            for [low, high] in named {
                assert_eq!(low, 0x12_00f2);
                let (page, order) = (high >> 12, high & 0x3f);
                assert!(high & LEAVES_ONLY != 0 && page & ((1 << order) - 1) == 0, "{high:#x}");
                covered.extend(page..page + (1 << order));
            }
            assert_eq!(covered, (first..first + pages).collect::<Vec<_>>());
        }
    }

    #[test]
    fn unlinked_tables_leave_no_hint_that_only_leaves_changed() {
        let named = queue(UNIT, &what(Some((1 << 12, 1 << 12)), true));
        assert_eq!(named, [[0x12_00f2, 0x1000]]);
    }

    #[test]
    fn a_whole_guest_and_a_scattered_range_are_the_domain() {
        let domain = [[0x12_00e2, 0]];
        assert_eq!(queue(UNIT, &what(None, true)), domain);
        let small = Iotlb { pages: Some(0), ..UNIT };
        assert_eq!(queue(small, &what(Some((0, 17 << 12)), false)), domain);
        assert_eq!(queue(small, &what(Some((0, 16 << 12)), false)).len(), 16);
        let none = Iotlb { pages: None, ..UNIT };
        assert_eq!(queue(none, &what(Some((0, 1 << 12)), false)), domain);
    }

    #[test]
    fn what_a_unit_can_name_is_in_its_capability_register() {
        assert_eq!(Iotlb::new(3, 1 << 39 | 18 << 48), Iotlb { domain: 3, pages: Some(18) });
        assert_eq!(Iotlb::new(3, 18 << 48), Iotlb { domain: 3, pages: None });
        assert_eq!(wait(Hpa(0x2000), 1), [1 << 32 | 0x65, 0x2000]);
    }
}
