//! Counts of the leaves that operations added and removed, by size, so that they are known without
//! a walk.
//!
//! Every operation knows which leaves it fills and empties. Its guard keeps the sum, and the owner
//! of the guards adds the sums up, so the threads that work on a guest share no counter.

use crate::format::Format;
use core::ops::AddAssign;

/// The number of levels that may have leaves.
const LEVELS: usize = 3;

/// The leaves that were added less those that were removed, by level. A split removes the leaf that
/// it replaces, and adds those that take its place. Members of groups ([`Guard::map_contiguous`])
/// are counted apart.
///
/// It includes all operations of a [`Guard`], in any tables. Operations without a guard
/// ([`UnloadedTables`], [`AddressSpace`]) are not included.
///
/// It does not include the leaves that [`Guard::replace_table`] replaces, which does not look at
/// them.
///
/// The sum over all guards that were in some tables since they were made is the number of leaves
/// that are mapped there, while none of the guards is in an operation.
///
/// [`AddressSpace`]: crate::AddressSpace
/// [`Guard`]: crate::Guard
/// [`Guard::map_contiguous`]: crate::Guard::map_contiguous
/// [`Guard::replace_table`]: crate::Guard::replace_table
/// [`UnloadedTables`]: crate::UnloadedTables
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct LeafDelta {
    leaves: [i64; LEVELS],
    members: [i64; LEVELS],
}

impl LeafDelta {
    /// No leaf was added or removed.
    pub const NONE: Self = Self { leaves: [0; LEVELS], members: [0; LEVELS] };

    /// Returns the leaves at `level` that are in no group; 0 if the level has none.
    #[inline]
    pub fn leaves(&self, level: u8) -> i64 {
        self.leaves.get(level as usize).copied().unwrap_or(0)
    }

    /// Returns the leaves at `level` that are members of groups; 0 if the level has none.
    #[inline]
    pub fn members(&self, level: u8) -> i64 {
        self.members.get(level as usize).copied().unwrap_or(0)
    }

    /// Returns whether all counts are 0.
    #[inline]
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    #[inline(always)]
    pub(crate) fn add(&mut self, level: u8, leaves: i64) {
        if let Some(count) = self.leaves.get_mut(level as usize) {
            *count += leaves;
        }
    }

    #[inline(always)]
    pub(crate) fn add_members(&mut self, level: u8, members: i64) {
        if let Some(count) = self.members.get_mut(level as usize) {
            *count += members;
        }
    }

    /// Counts members at `level` that became single leaves.
    pub(crate) fn unfold(&mut self, level: u8, members: usize) {
        self.add_members(level, -(members as i64));
        self.add(level, members as i64);
    }

    /// Counts a block at `level` that became a table of leaves, except for its entries that link
    /// one of the `tables - 1` tables of leaves of the level below.
    pub(crate) fn split<F: Format>(&mut self, level: u8, tables: u64) {
        self.splits::<F>(level, tables, 1);
    }

    /// Takes back a [`LeafDelta::split`] that did not happen.
    #[cold]
    pub(crate) fn unsplit<F: Format>(&mut self, level: u8, tables: u64) {
        self.splits::<F>(level, tables, -1);
    }

    #[inline]
    fn splits<F: Format>(&mut self, level: u8, tables: u64, blocks: i64) {
        let below = tables as i64 - 1;
        self.add(level, -blocks);
        self.add(level - 1, blocks * (F::entries(level - 1) as i64 - below));
        if level > 1 {
            self.add(level - 2, blocks * below * F::entries(level - 2) as i64);
        }
    }
}

impl AddAssign for LeafDelta {
    fn add_assign(&mut self, other: Self) {
        let add = |(sum, count): (&mut i64, i64)| *sum += count;
        self.leaves.iter_mut().zip(other.leaves).for_each(add);
        self.members.iter_mut().zip(other.members).for_each(add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_and_went_again_is_none() {
        let mut sizes = LeafDelta::NONE;
        assert!(sizes.is_none());
        sizes.add(1, 2);
        assert!(!sizes.is_none());
        sizes.add(1, -2);
        assert!(sizes.is_none());
    }
    #[test]
    fn a_split_adds_as_many_pages_as_its_tables_have_entries() {
        use crate::format::power::PowerK64;
        let mut sizes = LeafDelta::NONE;
        sizes.split::<PowerK64>(2, 3);
        assert_eq!([2, 1, 0].map(|level| sizes.leaves(level)), [-1, 512 - 2, 2 * 32]);
        sizes.unsplit::<PowerK64>(2, 3);
        assert!(sizes.is_none());
    }
}
