//! What must be invalidated, as a value that must be used; the proof that it was.

use crate::addr::{GpaRange, PageSize};
use crate::platform::Platform;

/// One invalidation of stale translations, to be executed by a [`Platform`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invalidation {
    /// The guest whose tables changed.
    pub vmid: Vmid,
    /// The addresses; `None` for all of the guest.
    pub range: Option<GpaRange>,
    /// The size of every changed leaf, where it is one (Arm: a TTL hint); `None` if mixed.
    pub leaf: Option<PageSize>,
    /// Tables were unlinked: walk caches hold stale entries too, not last levels only.
    pub tables: bool,
}

/// Identifies a guest to the TLB (Arm: VMID; x86: the EPT root or ASID).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Vmid(pub u16);

/// Stale translations that an operation left behind: an obligation to invalidate them.
///
/// Merged, one invalidation serves many operations. Until [`Shootdown::complete`] has returned,
/// a vCPU may go on reading and writing through what was removed or restricted.
#[must_use = "until the shootdown completes, vCPUs may use the old translations"]
#[derive(PartialEq, Eq, Debug)]
pub struct Shootdown {
    /// The hull of what changed; empty (0, 0) if nothing did.
    start: u64,
    end: u64,
    vmid: Vmid,
    /// Bit `n`: leaves of `2^n` bytes changed.
    sizes: u64,
    tables: bool,
}

impl Shootdown {
    /// Nothing owed yet.
    pub(crate) const fn none(vmid: Vmid) -> Self {
        Self { start: 0, end: 0, vmid, sizes: 0, tables: false }
    }

    /// Adds a changed leaf of `size` that covered `range`.
    #[inline]
    pub(crate) fn leaf(&mut self, range: GpaRange, size: PageSize) {
        self.sizes |= size.bytes();
        self.cover(range.start().0, range.end().0);
    }

    /// Adds an unlinked table that covered `range`.
    pub(crate) fn table(&mut self, range: GpaRange) {
        self.tables = true;
        self.cover(range.start().0, range.end().0);
    }

    #[inline]
    fn cover(&mut self, start: u64, end: u64) {
        self.start = if self.end == 0 { start } else { self.start.min(start) };
        self.end = self.end.max(end);
    }

    /// Joins what another operation on the same guest owes: one invalidation of the hull of both.
    ///
    /// # Panics
    /// If the other guest is another one: its invalidation would be lost.
    #[inline]
    pub fn merge(&mut self, other: Self) {
        if other.end != 0 {
            assert_eq!(self.vmid, other.vmid, "shootdowns of two guests do not merge");
            self.sizes |= other.sizes;
            self.tables |= other.tables;
            self.cover(other.start, other.end);
        }
    }

    /// What is owed; `None` if the operation left nothing stale behind.
    ///
    /// Where blocks are split without a break, the hint of a leaf size holds only if no split of
    /// the range is still owed: a CPU may hold the block, and an invalidation of pages alone may
    /// leave it. [`Shootdown::complete`] gives no hint there.
    pub const fn owed(&self) -> Option<Invalidation> {
        if self.end == 0 {
            return None;
        }
        let one_size = self.sizes.is_power_of_two() && !self.tables;
        Some(Invalidation {
            vmid: self.vmid,
            range: Some(GpaRange::from_bounds(self.start, self.end)),
            leaf: if one_size { PageSize::from_bytes(self.sizes) } else { None },
            tables: self.tables,
        })
    }

    /// Executes what is owed and returns once it has completed on all CPUs.
    pub fn complete(self, platform: &impl Platform) -> Invalidated {
        if let Some(mut what) = self.owed() {
            let one_size = platform.break_before_make().breaks_size_change();
            what.leaf = what.leaf.filter(|_| one_size);
            platform.invalidate(&what);
        }
        Invalidated { vmid: self.vmid }
    }
}

/// Proof that a [`Shootdown`] completed: memory behind the leaves that it covered is no longer
/// reached by the guest.
#[derive(Debug)]
pub struct Invalidated {
    vmid: Vmid,
}

impl Invalidated {
    /// The guest.
    pub const fn vmid(&self) -> Vmid {
        self.vmid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Gpa;

    #[test]
    fn merged_shootdowns_cover_both_and_hint_a_size_only_if_both_agree() {
        let page = |at| GpaRange::new(Gpa(at), 0x1000).unwrap();
        let mut a = Shootdown::none(Vmid(7));
        a.leaf(page(0x1000), PageSize::SIZE_4K);
        let mut b = Shootdown::none(Vmid(7));
        b.leaf(page(0x9000), PageSize::SIZE_4K);
        a.merge(b);
        let owed = a.owed().unwrap();
        assert_eq!(owed.range.unwrap(), GpaRange::new(Gpa(0x1000), 0x9000).unwrap());
        assert_eq!((owed.leaf, owed.tables), (Some(PageSize::SIZE_4K), false));
        let mut c = Shootdown::none(Vmid(7));
        c.table(GpaRange::new(Gpa(0), 0x200000).unwrap());
        a.merge(c);
        assert_eq!((a.owed().unwrap().leaf, a.owed().unwrap().tables), (None, true));
    }

    #[test]
    fn merging_nothing_owes_nothing() {
        let mut none = Shootdown::none(Vmid(1));
        none.merge(Shootdown::none(Vmid(1)));
        assert_eq!(none.owed(), None);
    }
}
