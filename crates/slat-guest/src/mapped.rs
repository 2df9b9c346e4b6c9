//! The memory that is mapped, by the size of leaves: counters keep it, so that it takes no walk.
//!
//! Each thread has counters, its own or shared with a few ([`crate::stats`]), to which it adds what
//! its guard mapped and unmapped ([`slat::Guard::sizes`]) when it leaves the tables. *Invariant*:
//! the counters have, or will have when the guard is dropped, the changes of every guard that a
//! worker had in tables of this guest; so their sum is what is mapped there while no thread is
//! inside. A single counter means nothing: a vCPU maps what a worker unmaps, whose counter goes
//! below zero.

use crate::sync::AtomicCount;
use alloc::vec::Vec;
use slat::{Format, PageSize, Sizes};

/// The number of levels that may have leaves.
const LEVELS: usize = 3;

/// Leaves mapped less leaves unmapped, modulo 2^64, by level; members of groups are counted apart.
#[derive(Debug, Default)]
pub(crate) struct SizeCells {
    leaves: [AtomicCount; LEVELS],
    members: [AtomicCount; LEVELS],
}

impl SizeCells {
    #[inline]
    pub fn add(&self, sizes: &Sizes) {
        for level in 0..LEVELS {
            self.leaves[level].add(sizes.leaves(level as u8) as u64);
            self.members[level].add(sizes.members(level as u8) as u64);
        }
    }
}

/// Bytes of the guest's memory that are mapped, by the size of the leaves that map them.
///
/// It is read from counters, in a time that depends on the number of vCPUs alone. It is exact while
/// no thread works on the guest's memory; meanwhile it is off by no more than what the threads in
/// the tables have changed there since they entered, and what changed while it was read. A vCPU's
/// fault changes what it maps, or splits, and what is mapped ahead of it; every other operation
/// leaves the tables after each piece of 1 GiB, or of the largest leaf if that is more. No size
/// falls below 0.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Mapped {
    sizes: Vec<(PageSize, u64)>,
}

impl Mapped {
    /// The bytes by each size of the format's leaves, smallest first; then, where faults fold
    /// ([`Config::contiguous`](crate::Config)), the bytes of groups, by their own size.
    pub fn by_size(&self) -> &[(PageSize, u64)] {
        &self.sizes
    }

    /// All bytes that are mapped.
    pub fn bytes(&self) -> u64 {
        self.sizes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes that are mapped by leaves, or groups, larger than a page: divided by
    /// [`Mapped::bytes`], the coverage by huge pages.
    pub fn huge_bytes(&self) -> u64 {
        let page = self.sizes.first().map(|(size, _)| *size);
        let huge = self.sizes.iter().filter(|(size, _)| Some(*size) > page);
        huge.map(|(_, bytes)| bytes).sum()
    }

    pub(crate) fn read<'c, F: Format>(
        cells: impl Iterator<Item = &'c SizeCells> + Clone,
        contiguous: bool,
    ) -> Self {
        let sum = |of: fn(&SizeCells, usize) -> u64, level: u8| {
            let all = cells.clone().map(|cells| of(cells, level as usize));
            // Of two threads that are inside, the one that unmapped may be counted already, and the
            // one that mapped not yet.
            (all.fold(0u64, u64::wrapping_add) as i64).max(0) as u64
        };
        let levels = 0..=F::LARGEST_LEAF;
        let leaves = levels.clone().map(|level| {
            let count = sum(|cells, level| cells.leaves[level].get(), level);
            (F::size(level), count << F::shift(level))
        });
        let mut sizes: Vec<_> = leaves.collect();
        let groups = levels.filter(|&level| contiguous && F::group(level) > 1);
        sizes.extend(groups.filter_map(|level| {
            let size = PageSize::from_bytes((F::group(level) as u64) << F::shift(level))?;
            let count = sum(|cells, level| cells.members[level].get(), level);
            Some((size, count << F::shift(level)))
        }));
        Self { sizes }
    }
}
