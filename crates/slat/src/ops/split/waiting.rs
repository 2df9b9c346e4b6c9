//! Blocks that wait for one common break, and what is known of each.

use crate::addr::Hpa;
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::table::{Frame, Pte};
use crate::walk::Entry;

/// Replacements of blocks of one table that wait for one common break. Their tables are kept in the
/// cache that they came from ([`TableCache::keep`]), by their order, and a block's value is the one
/// that its table was built from ([`block_of`]): a hypervisor's stack has a few KiB. A block's
/// place is its distance from the first, in blocks.
pub(super) struct WaitingBlocks<'t> {
    /// The entry of the first block.
    pub first: &'t Pte,
    /// The first address of that block.
    pub start: u64,
    /// A bit for each place in use: they came in their order.
    pub places: u32,
    /// The number of places in use.
    pub count: u8,
    pub level: u8,
}

impl WaitingBlocks<'_> {
    /// Returns the place of the block at `base`.
    #[inline]
    pub fn place<F: Format>(&self, base: u64) -> usize {
        ((base - self.start) >> F::shift(self.level)) as usize
    }

    /// Returns whether a place from this one on is in use.
    #[inline]
    pub const fn reaches(&self, place: usize) -> bool {
        self.places >> place != 0
    }

    /// Returns whether a block may wait with these, at most `together` of them. A walk that began
    /// anew may bring one that waits already, or one before the last.
    #[inline]
    pub fn joins<F: Format>(&self, level: u8, entry: &Entry<'_>, together: usize) -> bool {
        let (base, start) = (entry.base::<F>(level), self.start);
        level == self.level
            && start <= base
            && (start ^ base) >> F::shift(level + 1) == 0
            && self.place::<F>(base) < together
            && !self.reaches(self.place::<F>(base))
    }
}

/// Returns the block at `level` that an unlinked table was built from, if its pages have its
/// attributes.
#[inline]
pub(super) fn block_of<F: Format>(platform: &impl Platform, table: &mut Frame, level: u8) -> u64 {
    let mut below = level - 1;
    let mut raw = table.entries_mut::<F>(platform, below)[0].get();
    while F::kind(raw, below) == Kind::Table {
        below -= 1;
        // SAFETY: a table that was built is linked from one, with the entries of its level, and
        // both stay while the frame is borrowed.
        raw = unsafe {
            crate::table::entries(platform, F::table_address(raw), F::entries(below))[0].load()
        };
    }
    // Leaves of the same memory and attributes differ only in the bits of their level.
    raw ^ F::leaf(0, below, Hpa(0)) ^ F::leaf(0, level, Hpa(0))
}
