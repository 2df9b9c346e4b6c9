//! Invalidations as values: what is stale, for which guest, and when an entry must be broken first.

use crate::addr::{GpaRange, PageSize};

/// An invalidation of stale translations, which a [`Platform`](crate::Platform) executes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidation {
    /// The guest whose tables changed.
    pub vmid: Vmid,
    /// The guest physical addresses; `None` for all of the guest.
    pub range: Option<GpaRange>,
    /// The size of every changed leaf, if all have one size (Arm: a TTL hint); `None` if sizes are
    /// mixed. It does not apply where `tables` is set.
    pub leaf: Option<PageSize>,
    /// Tables were unlinked: invalidate walk caches, too, and not last levels only.
    pub tables: bool,
}

/// Identifies a guest to the TLB (Arm: VMID; x86: the EPT root or ASID).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Vmid(pub u16);

/// The stale translations of one guest, as one range that covers them all; (0, 0) if there are
/// none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PendingFlush {
    pub start: u64,
    pub end: u64,
    /// Bit `n`: leaves of `2^n` bytes changed.
    pub sizes: u64,
    /// [`TABLES`], [`REVOKED`], and a [`CLEAN`] for each guard that is counted as cleaning dirty
    /// state. It is one word, as all the fields are: bytes that are written one by one and then
    /// read back as a word stall a short operation.
    pub state: u64,
}

/// A table was unlinked.
const TABLES: u64 = 1;
/// Rights or dirty state were taken: a guard that owes this completes it when it is dropped.
const REVOKED: u64 = 2;
const CLEAN: u64 = 4;

impl PendingFlush {
    pub const NOTHING: Self = Self { start: 0, end: 0, sizes: 0, state: 0 };

    pub const fn is_nothing(&self) -> bool {
        self.end == 0
    }

    /// Returns whether nothing is stale, and no clean is under way.
    #[inline(always)]
    pub const fn is_untouched(&self) -> bool {
        self.end | self.state == 0
    }

    /// Adds changed leaves of `size` in `start..end`.
    #[inline]
    pub fn leaves(&mut self, start: u64, end: u64, size: PageSize) {
        self.sizes |= size.bytes();
        self.cover(start, end);
    }

    /// Adds leaves of any size in `start..end`.
    pub fn any(&mut self, start: u64, end: u64) {
        self.sizes = u64::MAX;
        self.cover(start, end);
    }

    /// Adds an unlinked table that covered `start..end`.
    pub fn table(&mut self, start: u64, end: u64) {
        self.state |= TABLES;
        self.cover(start, end);
    }

    /// Notes that a right or dirty state was taken.
    #[inline]
    pub const fn set_revoked(&mut self) {
        self.state |= REVOKED;
    }

    const fn unlinks(&self) -> bool {
        self.state & TABLES != 0
    }

    /// Returns whether a CPU may still use a right that was taken.
    pub const fn is_revoked(&self) -> bool {
        self.state & REVOKED != 0
    }

    /// Counts it among the cleans that are under way.
    pub const fn clean(&mut self) {
        self.state += CLEAN;
    }

    pub const fn cleans(&self) -> u64 {
        self.state / CLEAN
    }

    #[inline]
    fn cover(&mut self, start: u64, end: u64) {
        self.start = if self.end == 0 { start } else { self.start.min(start) };
        self.end = self.end.max(end);
    }

    #[inline]
    pub fn merge(&mut self, other: Self) {
        let flags = other.state & (CLEAN - 1);
        self.state = (self.state + (other.state - flags)) | flags;
        if other.end != 0 {
            self.sizes |= other.sizes;
            self.cover(other.start, other.end);
        }
    }

    /// Returns the one invalidation that covers everything.
    ///
    /// It names a leaf size only where a change of size breaks the entry first. Elsewhere a CPU may
    /// hold the block of a split whose shootdown is still owed, and an invalidation of pages alone
    /// may leave that block in the TLB.
    #[inline]
    pub fn invalidation(&self, vmid: Vmid, breaks: bool) -> Option<Invalidation> {
        if self.is_nothing() {
            return None;
        }
        let one_size = self.sizes.is_power_of_two() && !self.unlinks() && breaks;
        Some(Invalidation {
            vmid,
            range: Some(GpaRange::from_bounds(self.start, self.end)),
            leaf: if one_size { PageSize::from_bytes(self.sizes) } else { None },
            tables: self.unlinks(),
        })
    }
}

/// Which changes of size a live entry may make without being invalid in between.
///
/// It concerns *size* only: a change of address or memory type always breaks (Arm: D8.16.1, "Using
/// break-before-make when updating translation table entries").
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum BreakBeforeMake {
    /// Every change breaks: FEAT_BBM level 0, Power. FEAT_BBM level 1 counts as this, too: a CPU
    /// may treat a block with its nT bit as invalid, or walk it at every access, and the bit costs
    /// one more invalidation.
    Always,
    /// FEAT_BBM level 2, declared only by a platform that handles the TLB conflict abort.
    ConflictHandled,
    /// FEAT_BBM level 3, x86, RISC-V: no break, no conflict.
    Never,
}

impl BreakBeforeMake {
    /// Returns whether a block has to be invalid before a table of the same translations replaces
    /// it.
    pub const fn breaks_size_change(self) -> bool {
        matches!(self, Self::Always)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_shootdowns_cover_both_and_hint_only_a_common_size() {
        let page = |at| {
            let mut owed = PendingFlush::NOTHING;
            owed.leaves(at, at + 0x1000, PageSize::SIZE_4K);
            owed
        };
        let mut a = page(0x1000);
        a.merge(page(0x9000));
        let owed = a.invalidation(Vmid(7), true).unwrap();
        assert_eq!(owed.range.unwrap(), GpaRange::from_bounds(0x1000, 0xa000));
        assert_eq!((owed.leaf, owed.tables), (Some(PageSize::SIZE_4K), false));
        assert_eq!(a.invalidation(Vmid(7), false).unwrap().leaf, None);
        let mut table = PendingFlush::NOTHING;
        table.table(0, 0x20_0000);
        a.merge(table);
        let owed = a.invalidation(Vmid(7), true).unwrap();
        assert_eq!((owed.leaf, owed.tables), (None, true));
    }

    #[test]
    fn a_merge_with_mixed_leaves_has_no_hint_and_with_none_its_own() {
        let page = || {
            let mut owed = PendingFlush::NOTHING;
            owed.leaves(0x1000, 0x2000, PageSize::SIZE_4K);
            owed
        };
        let mut any = PendingFlush::NOTHING;
        any.any(0x1000, 0x2000);
        any.merge(page());
        assert_eq!(any.invalidation(Vmid(7), true).unwrap().leaf, None);
        let mut none = PendingFlush::NOTHING;
        none.merge(page());
        assert_eq!(none.invalidation(Vmid(7), true).unwrap().leaf, Some(PageSize::SIZE_4K));
    }

    #[test]
    fn merged_obligations_are_owed_once_and_cleans_are_added() {
        let owed = || {
            let mut owed = PendingFlush::NOTHING;
            owed.table(0, 0x20_0000);
            owed.set_revoked();
            owed.clean();
            owed
        };
        let mut both = owed();
        for cleans in [2, 3] {
            both.merge(owed());
            assert_eq!(both.cleans(), cleans);
            assert!(both.unlinks() && both.is_revoked());
        }
        let mut one = PendingFlush::NOTHING;
        one.merge(both);
        assert_eq!(one, both);
    }

    #[test]
    fn merging_nothing_owes_nothing() {
        let mut none = PendingFlush::NOTHING;
        none.merge(PendingFlush::NOTHING);
        assert_eq!(none.invalidation(Vmid(1), true), None);
    }
}
