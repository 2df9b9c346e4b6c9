//! The commands of a RISC-V IOMMU's queue that an [`Invalidation`] needs, as values for a platform
//! to write.
//!
//! Source: the RISC-V IOMMU Architecture Specification, "IOMMU Page-Table cache invalidation
//! commands" (IOTINVAL), "IOMMU Command-queue Fence commands" (IOFENCE).
//!
//! # What the platform does
//!
//! - It orders its stores to tables before the commands (`fence w, o`), writes those of
//!   [`Iotinval::commands`] and [`fence`] to the queue, moves cqt, and returns from
//!   [`Platform::invalidate`](crate::Platform::invalidate) when the fence's data is in memory. The
//!   fence also waits for the reads and writes of devices through what was invalidated.
//! - **Devices with ATS** hold translations of their own: an ATS.INVAL for each of them, and a
//!   second fence, come after the first.
//! - **After a map, or a right that was given**, nothing has to be invalidated for entries that
//!   were not valid, but a device does not walk again before it faults: an entry without a right
//!   stays until it is invalidated.
//!
//! # Example
//!
//! ```
//! use slat::format::riscv::iommu::{Iotinval, fence};
//! use slat::{Gpa, GpaRange, Hpa, Invalidation, Vmid};
//!
//! let range = Some(GpaRange::new(Gpa(0x8020_0000), 0x2000)?);
//! let what = Invalidation { vmid: Vmid(7), range, leaf: None, tables: false };
//! let unit = Iotinval { gscid: 7 };
//! let queue: Vec<_> = unit.commands(&what).chain([fence(Hpa(0x1000), 1)]).collect();
//! let page = 0x7002_0000_0481;
//! assert_eq!(queue, [[page, 0x2008_0000], [page, 0x2008_0400], [0x1_0000_3402, 0x400]]);
//! # Ok::<(), slat::RangeError>(())
//! ```

use crate::addr::Hpa;
use crate::invalidation::Invalidation;

/// A command of 128 bits: its lower and its upper half.
pub type Command = [u64; 2];

/// Commands by address for one range at most; a larger one invalidates the whole guest, whose
/// entries cost a refill each.
pub const MOST: usize = 16;

const IOTINVAL_GVMA: u64 = 1 | 1 << 7;
const IOFENCE_C: u64 = 2;
/// The upper half has an address.
const AV: u64 = 1 << 10;
/// The lower half has a GSCID.
const GV: u64 = 1 << 33;
const GSCID_SHIFT: u32 = 44;
/// Reads and writes of devices that the unit has translated come first.
const PR: u64 = 1 << 12;
const PW: u64 = 1 << 13;
const PAGE_SHIFT: u32 = 12;
const PPN_SHIFT: u32 = 10;

/// The translations of one guest in one unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Iotinval {
    /// The guest's number in iohgatp of its devices' contexts.
    pub gscid: u16,
}

impl Iotinval {
    /// Returns the commands that invalidate what is stale.
    ///
    /// By address a unit has to drop leaves only, so an unlinked table takes the whole guest.
    pub fn commands(self, what: &Invalidation) -> impl Iterator<Item = Command> + use<> {
        let guest = IOTINVAL_GVMA | GV | u64::from(self.gscid) << GSCID_SHIFT;
        let shift = what.leaf.map_or(PAGE_SHIFT, |leaf| leaf.shift());
        let leaves = what.range.filter(|_| !what.tables);
        // A part of a leaf is the leaf.
        let leaves = leaves.map(|r| r.start().0 >> shift..r.end().0.div_ceil(1 << shift));
        let leaves = leaves.filter(|leaves| leaves.end - leaves.start <= MOST as u64);
        let whole = leaves.is_none().then_some([guest, 0]);
        let address = move |leaf: u64| (leaf << shift >> PAGE_SHIFT) << PPN_SHIFT;
        let leaves = leaves.into_iter().flatten();
        whole.into_iter().chain(leaves.map(move |leaf| [guest | AV, address(leaf)]))
    }
}

/// Returns the command after which a unit writes `data` to `status`, 4-aligned, once all commands
/// before it are complete, and the accesses of devices that used what they invalidate.
pub const fn fence(status: Hpa, data: u32) -> Command {
    [(data as u64) << 32 | IOFENCE_C | AV | PR | PW, status.0 >> 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::{Gpa, GpaRange, PageSize};
    use crate::invalidation::Vmid;
    use std::vec::Vec;

    fn queue(range: Option<(u64, u64)>, leaf: Option<u64>, tables: bool) -> Vec<Command> {
        let range = range.map(|(at, bytes)| GpaRange::new(Gpa(at), bytes).unwrap());
        let leaf = leaf.map(|bytes| PageSize::from_bytes(bytes).unwrap());
        let what = Invalidation { vmid: Vmid(1), range, leaf, tables };
        Iotinval { gscid: 0xabcd }.commands(&what).collect()
    }

    /// Opcode 1, function 1, GV, GSCID.
    const ALL: Command = [0xabc_d002_0000_0081, 0];

    #[test]
    fn each_leaf_is_a_command_with_its_page_number() {
        let page = |number: u64| [ALL[0] | 1 << 10, number << 10];
        assert_eq!(queue(Some((0x5000, 0x3000)), None, false), [page(5), page(6), page(7)]);
        assert_eq!(queue(Some((0x20_5000, 0x1000)), Some(2 << 20), false), [page(0x200)]);
        let high = ((1 << 58) + 0x1000, 0x1000);
        assert_eq!(queue(Some(high), Some(4096), false), [page((1 << 46) + 1)]);
    }

    #[test]
    fn tables_and_many_leaves_take_the_whole_guest() {
        assert_eq!(queue(None, None, false), [ALL]);
        assert_eq!(queue(Some((0x5000, 0x1000)), None, true), [ALL]);
        assert_eq!(queue(Some((0, 16 << 12)), None, false).len(), 16);
        assert_eq!(queue(Some((0, 17 << 12)), None, false), [ALL]);
        assert_eq!(queue(Some((0, 17 << 12)), Some(2 << 20), false).len(), 1);
    }

    #[test]
    fn a_fence_waits_for_devices_and_says_so_in_memory() {
        assert_eq!(fence(Hpa(0x8000_1004), 9), [9 << 32 | 0x3402, 0x2000_0401]);
    }
}
