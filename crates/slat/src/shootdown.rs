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
    owed: Option<Invalidation>,
    vmid: Vmid,
}

impl Shootdown {
    /// Nothing owed yet.
    pub(crate) const fn none(vmid: Vmid) -> Self {
        Self { owed: None, vmid }
    }

    /// Adds a changed leaf of `size` that covered `range`.
    #[inline]
    pub(crate) fn leaf(&mut self, range: GpaRange, size: PageSize) {
        self.leaves(range, Some(size));
    }

    /// Adds changed leaves inside `range`, all of one size or of several.
    #[inline]
    pub(crate) fn leaves(&mut self, range: GpaRange, leaf: Option<PageSize>) {
        self.add(Invalidation { vmid: self.vmid, range: Some(range), leaf, tables: false });
    }

    /// Adds an unlinked table that covered `range`.
    pub(crate) fn table(&mut self, range: GpaRange) {
        self.add(Invalidation { vmid: self.vmid, range: Some(range), leaf: None, tables: true });
    }

    #[inline]
    fn add(&mut self, new: Invalidation) {
        self.owed = Some(match self.owed {
            None => new,
            Some(old) => Invalidation {
                vmid: old.vmid,
                range: match (old.range, new.range) {
                    (Some(a), Some(b)) => Some(a.hull(&b)),
                    _ => None,
                },
                leaf: if old.leaf == new.leaf { old.leaf } else { None },
                tables: old.tables | new.tables,
            },
        });
    }

    /// Joins what another operation on the same guest owes: one invalidation of the hull of both.
    pub fn merge(&mut self, other: Self) {
        debug_assert_eq!(self.vmid, other.vmid, "shootdowns of two guests do not merge");
        if let Some(new) = other.owed {
            self.add(new);
        }
    }

    /// What is owed; `None` if the operation left nothing stale behind.
    pub const fn owed(&self) -> Option<Invalidation> {
        self.owed
    }

    /// Executes what is owed and returns once it has completed on all CPUs.
    pub fn complete(self, platform: &impl Platform) -> Invalidated {
        if let Some(what) = &self.owed {
            platform.invalidate(what);
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
